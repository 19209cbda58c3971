"""How fast a drive reads and writes, measured as the store uses it; and whether it is a virtual one.

The trial file is unlinked before it is written, so it is gone however this process ends. A trial of a local drive takes
twelve seconds, which do not fill its fast cache.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.planner.probe.compute import TURNS
from trireme.storage.aio import arena
from trireme.storage.devices import open_device
from trireme.storage.scratch import Scratch
from trireme.storage.temporary import HIDDEN, Temporary

CHUNK, DEPTH = 64 << 20, 3  # bytes of a drive's request, requests in flight each way
AGREE = 0.1  # change of a drive's rate between two turns that is noise
# In a virtual drive's path in sysfs, or its model: virtio, Xen, Hyper-V, QEMU, clouds' network drives.
LENT = ("/virtio", "/vbd-", "/vmbus", "/VMBUS", "QEMU", "Virtual", "Elastic Block Store", "nvme_card-pd", "Persistent")


def identity(folder: Path) -> dict[str, Any]:
    """The identity of the drive under `folder`, for stored rates."""
    return {"device": folder.stat().st_dev, "model": _model(folder), "bytes": shutil.disk_usage(folder).total}


def _block(folder: Path) -> Path:
    number = folder.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")


def _model(folder: Path) -> str:
    block = _block(folder)
    models = [f for f in (block / "device/model", block / "../device/model") if f.exists()]
    return models[0].read_text().strip() if models else ""


def is_virtual(folder: Path) -> bool:
    """Whether the drive is virtual: bursts and caches make the first seconds of such drives too fast."""
    return any(name in f"{_block(folder).resolve()} {_model(folder)}" for name in LENT)


def settled(rate: Callable[[], float], believed: bool) -> float:
    """Measures a rate: once if `believed`, else until two in a row agree within AGREE, at most TURNS times."""
    now = rate()
    for _ in range(0 if believed else TURNS - 1):
        before, now = now, rate()
        if abs(now - before) <= AGREE * before:
            break
    return now


def drive_rates(folder: Path, seconds: float = 4.0, most: int = 4 << 30, patient: bool = False) -> dict[str, float]:
    """Rates of the drive under `folder`, measured with a file of at most `most` bytes in 3 x `seconds`.

    Keys: ssd_read, ssd_write (bytes/s, each alone); mixed, the share of its rate that reading reaches during
    writing, plus that of writing. A virtual drive's rates, or with `patient` any drive's, are measured until they no
    longer change. Raises OSError if there is no space or no permission to write.
    """
    nbytes = min(most, shutil.disk_usage(folder).free // 8) // (2 * CHUNK) * 2 * CHUNK
    believed, written = not (patient or is_virtual(folder)), 0
    with Temporary(HIDDEN, folder) as trial, ExitStack() as stack:
        device = open_device(trial)  # as the store does
        stack.callback(device.io.close)
        scratch = Scratch()
        scratch.reserve(max(nbytes, 2 * CHUNK))
        scratch.claim([device])

        def writing() -> float:
            nonlocal written
            ((rate, moved),) = _flow(seconds, _Stream(scratch.write, 0, nbytes))
            written = max(written, moved)
            return rate

        try:
            write = settled(writing, believed)
            read = settled(lambda: _flow(seconds, _Stream(scratch.read, 0, min(nbytes, written)))[0][0], believed)
            half = nbytes // 2
            together = _flow(seconds, _Stream(scratch.read, 0, half), _Stream(scratch.write, half, nbytes))
        finally:
            device.io.close()  # first: an error leaves requests in flight
            scratch.close()
    return {"ssd_read": read, "ssd_write": write, "mixed": together[0][0] / read + together[1][0] / write}


class _Stream(NamedTuple):
    """Requests of CHUNK bytes that go through the bytes [first, last) of a scratch file, again and again."""

    move: Callable[[int, memoryview], Future[None]]
    first: int
    last: int

    def after(self, position: int) -> int:
        return position + CHUNK if position + 2 * CHUNK <= self.last else self.first


def _flow(seconds: float, *streams: _Stream) -> list[tuple[float, int]]:
    """Runs the requests of all streams at once for `seconds`; returns (bytes/s, bytes moved) of each."""
    positions, moved = [stream.first for stream in streams], [0] * len(streams)
    flying: deque[tuple[int, memoryview, Future[None]]] = deque()
    start = time.perf_counter()

    def go(k: int, buffer: memoryview) -> None:
        flying.append((k, buffer, streams[k].move(positions[k], buffer)))
        positions[k] = streams[k].after(positions[k])

    for k in list(range(len(streams))) * DEPTH:
        go(k, arena(CHUNK))
    while flying:
        k, buffer, future = flying.popleft()
        future.result()
        moved[k] += CHUNK
        if time.perf_counter() - start < seconds:
            go(k, buffer)
    took = time.perf_counter() - start
    return [(nbytes / took, nbytes) for nbytes in moved]
