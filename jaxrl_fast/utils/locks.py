"""Lock a folder, so that one process at a time writes to it."""

import errno
import os
from pathlib import Path

from jaxrl_fast.utils.warnings import warn

LOCK = ".lock"
NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP  # errors of file systems without locks


class Lock:
    """An exclusive lock on a run's folder until it is released.

    Raises:
        BlockingIOError: If another process holds the lock.
        OSError: If the lock file cannot be created.
    """

    descriptor = -1

    def __init__(self, folder: Path):
        self.acquire(folder)

    def acquire(self, folder: Path) -> None:
        """Lock this folder, and release the one before."""
        self.release()
        self.descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            import fcntl

            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no fcntl
            pass
        except OSError as error:
            if error.errno in NO_LOCKS:
                warn(f"the file system of {folder} has no locks; make sure that only one process writes to it")
                return
            self.release()
            raise

    def release(self) -> None:
        """Release the lock, as the kernel also does when the process ends."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    __del__ = release
