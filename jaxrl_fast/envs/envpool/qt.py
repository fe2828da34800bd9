"""Qt 5.15, which envpool's Procgen is linked with, from the package PyQt5-Qt5 where the system has none."""

import ctypes
import importlib.util
import sys
from pathlib import Path

FAMILY = "envpool.procgen"
LIBRARIES = ("libQt5Core.so.5", "libQt5Gui.so.5")  # the second needs the first


def load_for(family: str) -> None:
    """Loads that package for Procgen, if it is installed. For other families, and where it is not, nothing is done.

    envpool has looked for Qt when it was imported, and has to look again: libraries are found in the process by name.
    """
    module = sys.modules.get(family)
    if family != FAMILY or module is None or "ProcgenEnvSpec" in vars(module):
        return
    package = importlib.util.find_spec("PyQt5")
    for folder in (package and package.submodule_search_locations) or ():
        for path in (Path(folder) / "Qt5" / "lib" / name for name in LIBRARIES):
            if path.exists():
                ctypes.CDLL(str(path))
    importlib.reload(module)
