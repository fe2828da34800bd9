"""A lock on a folder, held by one process."""

import errno
import os
from pathlib import Path

from jaxrl_fast.utils.warnings import warn

LOCK = ".lock"
NO_LOCKS = errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP  # what file systems say that have none


class Lock:
    """The right to write into a run's folder, until it is released. BlockingIOError: another process has it."""

    descriptor = -1

    def __init__(self, folder: Path):
        self.descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            import fcntl

            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no such lock
            pass
        except OSError as error:
            if error.errno in NO_LOCKS:
                warn(f"the file system of {folder} has no locks, so nothing keeps two processes from writing there")
                return
            self.release()
            raise

    def release(self) -> None:
        """The kernel does so too when the process ends, however it ends."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    __del__ = release
