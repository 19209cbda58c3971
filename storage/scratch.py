"""A file for bytes that need not survive the run: swapped activations. Written in place, never synced."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from trireme.storage.aio import File
from trireme.storage.devices import Device
from trireme.storage.files import check_space


class Scratch:
    """`nbytes` on a device, claimed at once. Raises StoreError where they do not fit."""

    def __init__(self, device: Device, nbytes: int):
        check_space(device.path, nbytes, "swapped activations")
        self.device, self.path = device, Path(device.path) / "scratch"
        self.path.unlink(missing_ok=True)  # of a run that was killed
        self.file = File(self.path, device.direct, nbytes)

    def read(self, offset: int, buffer) -> Future[None]:
        """Fills `buffer` from `offset`; both multiples of 4,096."""
        return self.device.io.read(self.file, offset, buffer)

    def write(self, offset: int, buffer) -> Future[None]:
        """Writes `buffer` at `offset`; both multiples of 4,096."""
        return self.device.io.write(self.file, offset, buffer)

    def close(self) -> None:
        """Removes the file. Nothing may be in flight."""
        self.file.close()
        self.path.unlink(missing_ok=True)
