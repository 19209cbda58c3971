"""Scratch files striped over the drives, for swapped activations, gradients and copies of frozen weights.

They are written in place, never synced, and unlinked from the start, so they are gone with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.storage.aio import File, together
from trireme.storage.devices import Device
from trireme.storage.files import check_space
from trireme.storage.stripes import turns

if TYPE_CHECKING:
    from typing_extensions import Buffer

NAME = "scratch"  # until unlinked
STRIPE = 4 << 20  # bytes on a device in turn
Transfer = Callable[[File, int, memoryview], Future[None]]


class Scratch:
    """Space on devices. Its parts are reserved; then `claim` allocates all of it at once."""

    def __init__(self) -> None:
        self.nbytes = 0  # reserved
        self.devices: tuple[Device, ...] = ()
        self.turns: tuple[int, ...] = ()
        self.files: list[File] = []

    def reserve(self, nbytes: int) -> int:
        """Reserves bytes; returns their offset."""
        self.nbytes += nbytes
        return self.nbytes - nbytes

    def claim(self, devices: Sequence[Device]) -> None:
        """Takes the reserved space from devices, if there is any. Raises StoreError if they are short of it."""
        if not self.nbytes:
            return
        self.devices, self.turns = tuple(devices), turns([device.speed for device in devices])
        try:
            for d, device in enumerate(self.devices):
                self.files.append(_claim(device, self._share(d, self.nbytes)))
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, buffer: Buffer, later: bool = False) -> Future[None]:
        """Fills `buffer`; offset and size are multiples of 4,096. `later` as in aio.py."""
        return self._move([partial(device.io.read, later=later) for device in self.devices], offset, buffer)

    def write(self, offset: int, buffer: Buffer, later: bool = False) -> Future[None]:
        """Writes `buffer`; offset and size are multiples of 4,096. `later` as in aio.py."""
        return self._move([partial(device.io.write, later=later) for device in self.devices], offset, buffer)

    def close(self) -> None:
        """Frees the space. Nothing may be in flight."""
        for file in self.files:
            file.close()

    def _move(self, moves: Sequence[Transfer], offset: int, buffer: Buffer) -> Future[None]:
        """Moves the parts of a buffer. `moves`: the read or write of each device."""
        assert self.files, "scratch space was not claimed"
        view = memoryview(buffer).cast("B")
        parts = [moves[d](self.files[d], place, view[a:b]) for d, place, a, b in self._parts(offset, len(view))]
        return parts[0] if len(parts) == 1 else together(parts)

    def _parts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields (device, offset in its file, begin in the buffer, end in the buffer)."""
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
        """Bytes on device d."""
        rounds, rest = divmod(nbytes, STRIPE * len(self.turns))
        ends = [min(max(rest - i * STRIPE, 0), STRIPE) for i, turn in enumerate(self.turns) if turn == d]
        return rounds * STRIPE * self.turns.count(d) + sum(ends)


def _claim(device: Device, nbytes: int) -> File:
    """Makes and unlinks a device's file and allocates its blocks. Raises StoreError."""
    check_space(device.path, nbytes, "the file of swapped activations and gradients")
    path = Path(device.path) / NAME
    path.unlink(missing_ok=True)  # of a run killed right here
    file = File(path, device.direct, 0)
    try:
        path.unlink()
        file.allocate(nbytes)
    except BaseException:
        file.close()
        raise
    return file
