"""A folder on a drive, and the I/O back end that was measured to be the fastest there."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.storage.aio import IO, File, ThreadIO, arena
from trireme.storage.files import AnyPath, Say, StoreError, as_store_error, make_folder, to_stderr
from trireme.storage.kernel_aio import KernelIO
from trireme.storage.layout import ALIGN, round_up

PROBE, LINKED = ".store-probe", ".store-probe-link"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
MIB = 1 << 20
# Back end, block, depth, mixed; the first is the default. Over 100 MiB in flight keep the drive busy while Python holds
# the GIL, 5 ms at a time. Threads need it after every block: larger blocks.
SETTINGS = (
    (KernelIO, 16 * MIB, 8, 3),
    (ThreadIO, 64 * MIB, 4, 2),
    (KernelIO, 64 * MIB, 3, 1),
    (KernelIO, 4 * MIB, 32, 12),
)


@dataclass
class Device:
    """A folder and its back end. `direct`: files bypass the page cache. `read`, `write`: bytes/s, one direction at a
    time.
    """

    path: Path
    io: IO
    direct: bool
    read: float = 1e9
    write: float = 1e9

    def __str__(self) -> str:
        return f"{self.path}: {self.io}, read {self.read / 1e9:.2f} write {self.write / 1e9:.2f} GB/s"

    @property
    def speed(self) -> float:
        """Bytes/s of data that is read and written back."""
        return 2 / (1 / self.read + 1 / self.write)


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


def open_device(path: AnyPath, nbytes: int = 256 * MIB, say: Say = to_stderr) -> Device:
    """Makes the folder and picks the fastest back end, measured on `nbytes` of test data (0: takes the first).

    `say` is called with what slows the drive down. Raises StoreError.
    """
    path = Path(path)
    try:
        make_folder(path)
        direct = is_direct(path)
    except OSError as e:
        raise as_store_error(e, path) from e
    if not direct:
        say(f"{path}: no O_DIRECT; slower, and through the page cache")
    candidates = _candidates(path, direct, say)
    opened = [next(candidates)]  # first the best so far
    try:
        if nbytes:
            with _test_file(path, direct, nbytes) as (file, halves):
                best = _measure(opened[0], file, halves)
                for device in candidates:
                    opened.append(device)
                    seconds = _measure(device, file, halves)
                    faster = seconds < 0.9 * best  # less is noise
                    best = seconds if faster else best
                    opened.pop(0 if faster else 1).io.close()
    except BaseException:
        for device in opened:
            device.io.close()
        raise
    return opened[0]


def open_reader(path: AnyPath) -> Device:
    """The drive of a file that is only read: nothing is measured or written there. Raises StoreError."""
    path, direct = Path(path), True
    try:
        File(path, direct, write=False).close()
    except StoreError as e:
        if e.errno != errno.EINVAL:
            raise
        direct = False
    return next(_candidates(path.parent, direct, lambda _: None))


def _candidates(path: Path, direct: bool, say: Say) -> Iterator[Device]:
    """Yields the back ends that work here."""
    for backend, block, depth, mixed in SETTINGS:
        if direct or backend is ThreadIO:
            try:
                yield Device(path, backend(block, depth, mixed), direct)
            except StoreError as e:
                say(f"{e}; going without")


@contextmanager
def _test_file(folder: Path, direct: bool, nbytes: int) -> Iterator[tuple[File, list[memoryview]]]:
    """A file of about `nbytes` that was written once, since first writes cost more, and two buffers of half its
    size.
    """
    path, half = folder / PROBE, round_up(nbytes // 2)
    path.unlink(missing_ok=True)
    file = File(path, direct, 2 * half)
    try:
        halves = [arena(half), arena(half)]
        for i, buffer in enumerate(halves):
            if os.pwritev(file.fd, [buffer], i * half) != half:
                raise StoreError(errno.EIO, "took only a part of a write", str(path))
        yield file, halves
    except OSError as e:
        raise as_store_error(e, path) from e
    finally:
        file.close()
        path.unlink(missing_ok=True)


def _measure(device: Device, file: File, halves: list[memoryview]) -> float:
    """Sets the device's speeds. Returns seconds to read, write, and do both at once."""
    io, half = device.io, len(halves[0])

    def timed(*requests: Future[None]) -> float:
        start = time.perf_counter()
        while not all(request.done() for request in requests):
            pass  # as busy as a training loop, so that back ends that suffer from that are not chosen
        seconds = time.perf_counter() - start
        for request in requests:
            request.result()
        return seconds

    write = timed(io.write(file, 0, halves[0]), io.write(file, half, halves[1]))
    read = timed(io.read(file, 0, halves[0]), io.read(file, half, halves[1]))
    both = timed(io.read(file, 0, halves[0]), io.write(file, half, halves[1]))
    device.read, device.write = 2 * half / read, 2 * half / write
    return read + write + both
