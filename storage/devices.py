"""A folder on a drive, and how its files are read and written."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from trireme.storage.aio import IO, File, arena
from trireme.storage.files import AnyPath, Say, StoreError, make_folder, store_errors, to_stderr
from trireme.storage.layout import ALIGN

PROBE, LINKED = ".store-probe", ".store-probe-link"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


@dataclass
class Device:
    """A folder and the requests for its drive. `direct`: files bypass the page cache. `speed`: relative to others."""

    path: Path
    io: IO
    direct: bool
    speed: float = 1.0


def check_links(folder: Path) -> None:
    """Raises StoreError if the drive has no hard links: snapshots consist of them."""
    path, link = folder / PROBE, folder / LINKED
    try:
        link.unlink(missing_ok=True)
        path.touch()
        os.link(path, link)
    except OSError as e:
        none = "cannot hold snapshots: it has no hard links. Name a folder on ext4, xfs or btrfs with --store"
        raise StoreError(e.errno, none if e.errno in NO_LINKS else e.strerror, str(folder)) from e
    finally:
        for made in (link, path):
            made.unlink(missing_ok=True)


def is_direct(folder: Path) -> bool:
    """Whether files in `folder` bypass the page cache.

    That O_DIRECT is accepted proves nothing: where unaligned reads succeed, too (tmpfs, overlay, sometimes btrfs), they
    came from the cache.
    """
    path = folder / PROBE
    path.unlink(missing_ok=True)
    try:
        file = File(path, True, ALIGN)
    except StoreError as e:
        if e.errno == errno.EINVAL:
            return False
        raise
    try:
        buffer = arena(ALIGN)
        try:
            os.pwritev(file.fd, [buffer], 0)
            os.preadv(file.fd, [buffer], 0)
        except OSError:
            return False
        try:
            os.preadv(file.fd, [buffer[1:100]], 1)
        except OSError:
            return True
        return False
    finally:
        file.close()
        path.unlink(missing_ok=True)


def open_device(path: AnyPath, speed: float = 1.0, say: Say = to_stderr) -> Device:
    """Makes the folder and opens its drive. `say` is called with what slows it down. Raises StoreError."""
    path = Path(path)
    with store_errors(path):
        make_folder(path)
        direct = is_direct(path)
    if not direct:
        say(f"{path}: no O_DIRECT; slower, and through the page cache")
    return Device(path, IO(), direct, speed)


def open_reader(path: AnyPath) -> Device:
    """The drive of a file that is only read: nothing is written there. Raises StoreError."""
    path, direct = Path(path), True
    try:
        File(path, direct, write=False).close()
    except StoreError as e:
        if e.errno != errno.EINVAL:
            raise
        direct = False
    return Device(path.parent, IO(), direct)
