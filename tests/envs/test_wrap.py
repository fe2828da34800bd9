"""Test errors in a user's wrapper: an exception keeps its traceback, and a message for users is one line."""

import pytest

import jaxrl_fast
from jaxrl_fast import train
from jaxrl_fast.sweep import __main__ as sweep
from jaxrl_fast.utils.errors import blamed

MODULE = """
from jaxrl_fast.envs.wrappers.hide import hide


def fails(env):
    return halved(env, None)


def halved(env, scale):
    raise ValueError(f"no scale {scale}")


def lacks(env):
    return {}["scale"]


def hides(env):
    return hide(env, ["velocity"])


def forgets(env):
    pass
"""


@pytest.fixture(autouse=True)
def in_folder_of_module(tmp_path, monkeypatch):
    (tmp_path / "own_wrappers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "text"), [("fails", ValueError, "no scale None"), ("lacks", KeyError, "scale")]
)
def test_exception_of_a_wrapper_is_raised_and_printed_with_its_traceback(name, error, text, capsys):
    with pytest.raises(error, match=text) as raised:
        jaxrl_fast.fit(algo="ppo", wrap=f"own_wrappers:{name}")
    assert blamed(raised.value) == f"wrap: own_wrappers:{name} failed"
    for main, more in ((train.main, []), (sweep.main, ["--gamma", "0.9,0.99", "--num-envs", "2,4"])):
        assert main(["ppo", "--wrap", f"own_wrappers:{name}", *more]) == 1
        first, begin, *frames = capsys.readouterr().err.rstrip().split("\n")
        assert first == f"error: wrap: own_wrappers:{name} failed" and begin.startswith("Traceback")
        assert "own_wrappers.py" in frames[0] and frames[0].endswith(f"in {name}")
        assert frames[-1].startswith(error.__name__) and text in frames[-1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hides", "wrap hide: must be entries 0 to 3 of the vector"),
        ("forgets", "wrap: own_wrappers:forgets must return an Env, got None; return env._replace(...)\n"),
        ("nothing", "module 'own_wrappers' has no 'nothing'"),
    ],
)
def test_message_for_users_about_a_wrapper_is_one_line(name, words, capsys):
    assert train.main(["ppo", "--wrap", f"own_wrappers:{name}"]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1, error
