"""A folder on a drive, and the way of moving bytes that was measured to be the fastest there."""

from __future__ import annotations

import errno
import logging
import os
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from trireme.storage.aio import IO, File, ThreadIO, arena
from trireme.storage.files import StoreError
from trireme.storage.kernel_aio import KernelIO
from trireme.storage.layout import ALIGN, round_up

log = logging.getLogger("trireme.storage")
PROBE = ".store-probe"
MIB = 1 << 20
SETTINGS = (  # back end, block, depth, mixed; the first stays unless another is clearly faster
    (KernelIO, 16 * MIB, 8, 2),
    (ThreadIO, 16 * MIB, 8, 2),
    (KernelIO, 16 * MIB, 4, 1),
    (KernelIO, 4 * MIB, 32, 8),
)


@dataclass
class Device:
    """`direct`: the filesystem really goes past the page cache. Speeds in bytes per second, one direction at a time."""

    path: Path
    io: IO
    direct: bool
    read: float = 1e9
    write: float = 1e9

    @property
    def speed(self) -> float:
        """Bytes per second of what is read and written back."""
        return 2 / (1 / self.read + 1 / self.write)


def is_direct(folder: Path) -> bool:
    """Whether files in `folder` go past the page cache. Accepting O_DIRECT proves nothing: where an unaligned read
    succeeds (tmpfs, overlay, btrfs at times), the cache served it.
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


def open_device(path: str | os.PathLike, nbytes: int = 256 * MIB) -> Device:
    """Makes the folder, tries the back ends on `nbytes` of test data there (0: on none) and keeps the fastest."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        direct = is_direct(path)
    except OSError as e:
        raise e if isinstance(e, StoreError) else StoreError(e.errno, e.strerror, str(path)) from e
    if not direct:
        log.warning("%s: no O_DIRECT; slower, and through the page cache", path)
    settings = SETTINGS if direct else [s for s in SETTINGS if s[0] is ThreadIO]
    best, best_time = None, 0.0
    for backend, block, depth, mixed in settings:
        try:
            device = Device(path, backend(block, depth, mixed), direct)
        except StoreError as e:
            log.warning("%s; going without", e)
            continue
        if not nbytes:
            return device
        seconds = _measure(device, nbytes)
        if best is None or seconds < 0.9 * best_time:  # below that it is noise
            best, device, best_time = device, best, seconds
        if device:
            device.io.close()
    log.info("%s: %s, read %.2f write %.2f GB/s", path, best.io, best.read / 1e9, best.write / 1e9)
    return best


def _measure(device: Device, nbytes: int) -> float:
    """Fills in the device's speeds; returns the seconds for reading, writing, and both at once, together."""
    path, half = device.path / PROBE, round_up(nbytes // 2)
    path.unlink(missing_ok=True)
    file = File(path, device.direct, 2 * half)
    try:
        first, second = arena(half), arena(half)

        def timed(*requests: Future[None]) -> float:
            start = time.perf_counter()
            for request in requests:
                request.result()
            return time.perf_counter() - start

        io = device.io
        timed(io.write(file, 0, first), io.write(file, half, second))  # the first write of a block costs more
        write = timed(io.write(file, 0, first), io.write(file, half, second))
        read = timed(io.read(file, 0, first), io.read(file, half, second))
        both = timed(io.read(file, 0, first), io.write(file, half, second))
    finally:
        file.close()
        path.unlink(missing_ok=True)
    device.read, device.write = 2 * half / read, 2 * half / write
    return read + write + both
