"""What several tests share; `probes` has environments with known answers."""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)  # parameters with which a test takes long
