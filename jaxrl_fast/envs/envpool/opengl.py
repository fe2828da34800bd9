"""Load OpenGL for envpool's MuJoCo, which draws with it, from the system's libEGL.

envpool 1.2.5 contains a copy of libEGL under another name, by which MuJoCo does not find it: the first image ends the
process. If the system's libEGL is loaded before envpool is imported, both use that one.
"""

import contextlib
import ctypes
import functools
import sys

LIBRARY = "libEGL.so.1"
INSTALL = "install OpenGL, for example with apt-get install libegl1 libgl1-mesa-dri"


@functools.cache
def load() -> str:
    """Load libEGL, before envpool is imported. Return what to do if envpool cannot use it, or ""."""
    if not sys.platform.startswith("linux") or hasattr(ctypes.CDLL(None), "eglGetProcAddress"):  # by LD_PRELOAD
        return ""
    if "envpool" in sys.modules:
        return f"envpool was imported before jaxrl_fast loaded {LIBRARY}; start Python with LD_PRELOAD={LIBRARY}"
    with contextlib.suppress(OSError):
        ctypes.CDLL(LIBRARY, ctypes.RTLD_GLOBAL)
        return ""
    return f"{LIBRARY} is missing; {INSTALL}"
