"""A span of bytes that need not survive the run, dealt over the drives: swapped activations. Written in place, never
synced. Its files have no names: they are gone when this process ends, however it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from trireme.storage.aio import File, together
from trireme.storage.devices import Device
from trireme.storage.files import check_space

NAME = "scratch"  # of a file, for the moment before it loses it
STRIPE = 4 << 20  # bytes that lie on one device before the next one's turn
MOST_TURNS = 8  # of a device for one of the slowest


class Scratch:
    """`nbytes` on some devices, claimed at once. Raises StoreError where they do not fit."""

    def __init__(self, devices: Sequence[Device], nbytes: int):
        self.devices, self.turns = tuple(devices), _turns([device.speed for device in devices])
        self.files: list[File] = []
        try:
            for d, device in enumerate(self.devices):
                self.files.append(_claim(device, self._share(d, nbytes)))
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, buffer) -> Future[None]:
        """Fills `buffer` from `offset`; both multiples of 4,096."""
        return self._move("read", offset, buffer)

    def write(self, offset: int, buffer) -> Future[None]:
        """Writes `buffer` at `offset`; both multiples of 4,096."""
        return self._move("write", offset, buffer)

    def close(self) -> None:
        """Gives the bytes back. Nothing may be in flight."""
        for file in self.files:
            file.close()

    def _move(self, way: str, offset: int, buffer) -> Future[None]:
        view = memoryview(buffer).cast("B")
        moving = [
            getattr(self.devices[d].io, way)(self.files[d], place, view[a:b])
            for d, place, a, b in self._parts(offset, len(view))
        ]
        return moving[0] if len(moving) == 1 else together(moving, lambda error: None)

    def _parts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(device, place in its file, begin and end in the buffer) of what [offset, offset + nbytes) consists of."""
        if len(self.turns) == 1:
            yield 0, offset, 0, nbytes
            return
        done = 0
        while done < nbytes:
            stripe, within = divmod(offset + done, STRIPE)
            rounds, turn = divmod(stripe, len(self.turns))
            d = self.turns[turn]
            before = rounds * self.turns.count(d) + self.turns[:turn].count(d)
            length = min(STRIPE - within, nbytes - done)
            yield d, before * STRIPE + within, done, done + length
            done += length

    def _share(self, d: int, nbytes: int) -> int:
        """Bytes of the file on device d."""
        rounds, rest = divmod(nbytes, STRIPE * len(self.turns))
        ends = [min(max(rest - i * STRIPE, 0), STRIPE) for i, turn in enumerate(self.turns) if turn == d]
        return rounds * STRIPE * self.turns.count(d) + sum(ends)


def _claim(device: Device, nbytes: int) -> File:
    check_space(device.path, nbytes, "the file of swapped activations and gradients")
    path = Path(device.path) / NAME
    path.unlink(missing_ok=True)  # of a run that was killed at this very place
    file = File(path, device.direct, 0)
    try:
        path.unlink()
        file.allocate(nbytes)
    except BaseException:
        file.close()
        raise
    return file


def _turns(speeds: Sequence[float]) -> tuple[int, ...]:
    """The devices in turn, faster ones more often, each as evenly as can be."""
    counts = [min(MOST_TURNS, round(speed / min(speeds))) for speed in speeds]
    return tuple(d for _, d in sorted(((i + 0.5) / n, d) for d, n in enumerate(counts) for i in range(n)))
