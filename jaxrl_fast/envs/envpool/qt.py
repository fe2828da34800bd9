"""Load Qt 5.15 for envpool's Procgen, from the package PyQt5-Qt5 if the system has none."""

import ctypes
import importlib.util
import sys
from pathlib import Path

PROCGEN_FAMILY = "envpool.procgen"
QT_LIBRARIES = ("libQt5Core.so.5", "libQt5Gui.so.5")  # the second needs the first


def load_for(family: str) -> None:
    """Load Qt if the family is Procgen and the package is installed; otherwise do nothing.

    envpool looked for Qt when it was imported, so its module is reloaded once the libraries are in the process.
    """
    module = sys.modules.get(family)
    if family != PROCGEN_FAMILY or module is None or "ProcgenEnvSpec" in vars(module):
        return
    package = importlib.util.find_spec("PyQt5")
    for folder in (package and package.submodule_search_locations) or ():
        for path in (Path(folder) / "Qt5" / "lib" / name for name in QT_LIBRARIES):
            if path.exists():
                ctypes.CDLL(str(path))
    importlib.reload(module)
