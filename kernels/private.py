"""The user's private cache folder, which holds libraries that are loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_private(path: Path) -> bool:
    """Whether `path` belongs to this user, nobody else may write to it, and it is not a link."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode) and not status.st_mode & 0o022


def cache_folder() -> Path | None:
    """$XDG_CACHE_HOME/trireme, or ~/.cache/trireme, created and made private; None where that fails."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.is_symlink() and folder.lstat().st_uid == os.geteuid():
            folder.chmod(0o700)
        return folder if is_private(folder) else None
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
