"""Folders that are removed with their process: each has a locked file, and the next process removes unlocked ones."""

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
HIDDEN = ".trireme-"  # prefix where users look


class Temporary:
    """A new private folder, removed when it is closed or collected. Raises OSError."""

    def __init__(self, prefix: str, parent: str | os.PathLike[str] | None = None):
        """`parent`: None is the system's temporary folder."""
        parent = Path(parent or tempfile.gettempdir())
        sweep(prefix, parent)
        self.path, fd = _make(prefix, parent)
        self._end = weakref.finalize(self, _end, self.path, fd)

    def close(self) -> None:
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()


def sweep(prefix: str, parent: Path) -> None:
    """Removes folders that killed processes of this user have left."""
    for left in parent.glob(prefix + "*"):
        _sweep(left)


def _make(prefix: str, parent: Path) -> tuple[Path, int]:
    """Makes a folder; returns it and the descriptor of its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            path.rmdir()
            raise
        with suppress(OSError):  # without locks nobody sweeps
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # swept before the lock


def _sweep(left: Path) -> None:
    """Removes a folder of this user if its lock is free."""
    with suppress(OSError):
        status = left.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
        fd = os.open(left / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left)
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    """Removes a folder, its lock last: if this is killed, the next process removes the rest."""
    for inside in path.iterdir():
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside, ignore_errors=True)
        elif inside.name != LOCK:
            inside.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _end(path: Path, fd: int) -> None:
    try:
        with suppress(OSError):
            _remove(path)
    finally:
        os.close(fd)
