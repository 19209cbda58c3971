"""Folders that need not outlive a process. Each holds a file that its process has locked; the next process that makes
such a folder in the same place removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

LOCK = "lock"
HIDDEN = ".trireme-"  # how the names of such folders begin where a user looks


class Temporary:
    """A new folder `path`, for this user alone, removed when the object is closed or gone. Raises OSError."""

    def __init__(self, prefix: str, parent: str | os.PathLike[str] | None = None):
        """`parent`: where it is made; None: in the system's folder for temporary files."""
        parent = Path(parent or tempfile.gettempdir())
        for left in parent.glob(prefix + "*"):
            _sweep(left)
        self.path, fd = _make(prefix, parent)
        self._end = weakref.finalize(self, _end, self.path, fd)

    def keep(self) -> None:
        """Leaves the folder where it is: it is no temporary one any more."""
        if ended := self._end.detach():
            (self.path / LOCK).unlink(missing_ok=True)
            os.close(ended[2][1])

    def close(self) -> None:
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()


def _make(prefix: str, parent: Path) -> tuple[Path, int]:
    """(a new folder, the descriptor that holds its lock)"""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            path.rmdir()
            raise
        with suppress(OSError):  # a filesystem without locks: nobody sweeps there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # taken for one that was left, between two of these lines


def _sweep(left: Path) -> None:
    """Removes a folder that is this user's, holds a lock, and belongs to no process any more."""
    with suppress(OSError):
        found = left.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        fd = os.open(left / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left)
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    """Removes the folder, its lock last: who is killed meanwhile leaves what the next one removes."""
    for inside in path.iterdir():
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside, ignore_errors=True)
        elif inside.name != LOCK:
            inside.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _end(path: Path, fd: int) -> None:
    with suppress(OSError):
        _remove(path)
    os.close(fd)
