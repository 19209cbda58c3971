"""The files of a store: each is in use, or a spare that can be overwritten."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.storage.aio import File
from trireme.storage.devices import Device
from trireme.storage.files import check_space, store_errors

FOLDER = "files"


@dataclass(eq=False)
class Version:
    """One file of a store. `users`: the shard's current content, snapshots, and reads and writes in progress."""

    id: int
    device: int
    capacity: int  # bytes, whole blocks
    file: File
    users: int = 0
    sum: str = ""  # of its data, once written
    synced: bool = False  # durable, exact size
    lost: bool = False  # an fsync failed: content unknown

    def resize(self, nbytes: int) -> None:
        """Sets the file's size. Raises StoreError."""
        with store_errors(self.file.path, f", resizing to {nbytes} bytes"):
            os.ftruncate(self.file.fd, nbytes)


class Versions:
    """The files of all devices, with their users. May be used from any thread."""

    def __init__(self, devices: Sequence[Device]):
        self.devices = devices
        self.lock = threading.RLock()
        self._all: dict[tuple[int, int], Version] = {}  # by device, id
        self._spares: dict[tuple[int, int], list[Version]] = defaultdict(list)  # by device, capacity
        self._next_id = 0

    def __getitem__(self, key: tuple[int, int]) -> Version:
        return self._all[key]

    def take(self, device: int, capacity: int) -> Version:
        """A spare or new file, with one user. Raises StoreError if space is short."""
        with self.lock:
            spares = self._spares[device, capacity]
            version = spares.pop() if spares else self._allocate(device, capacity)
            version.users = 1
        try:
            if version.synced:  # cut to exact size; growth during writes costs speed
                version.resize(capacity)
        except BaseException:
            self.drop([version])
            raise
        version.sum, version.synced, version.lost = "", False, False
        return version

    def hold(self, versions: Iterable[Version]) -> None:
        with self.lock:
            for version in versions:
                version.users += 1

    def drop(self, versions: Iterable[Version]) -> None:
        """Takes a user from each file. Files without users become spares."""
        with self.lock:
            for version in versions:
                version.users -= 1
                if version.users == 0:
                    self._spares[version.device, version.capacity].append(version)

    def reserve(self, wanted: Mapping[tuple[int, int], int]) -> None:
        """Allocates files until there are `wanted` of each (device, capacity). Raises StoreError if space is short."""
        there = Counter((v.device, v.capacity) for v in self._all.values())
        missing = {key: n - there[key] for key, n in wanted.items() if n > there[key]}
        for k, device in enumerate(self.devices):
            check_space(device.path, sum(size * n for (where, size), n in missing.items() if where == k), "the store")
        for (k, size), n in missing.items():
            for _ in range(n):
                with self.lock:
                    self._spares[k, size].append(self._allocate(k, size))

    def _allocate(self, device: int, capacity: int) -> Version:
        path = self.devices[device].path / FOLDER / f"{self._next_id:06d}.safetensors"
        self._next_id += 1
        version = Version(self._next_id - 1, device, capacity, File(path, self.devices[device].direct, capacity))
        self._all[device, version.id] = version
        return version

    def adopt(self, named: Mapping[tuple[int, int], int]) -> None:
        """Opens the files of snapshots, (device, id) -> capacity, and spares of those sizes; removes all others."""
        sizes = {(device, capacity) for (device, _), capacity in named.items()}
        for k, device in enumerate(self.devices):
            for path in version_files(device.path):
                id, size = int(path.stem), path.stat().st_size
                self._next_id = max(self._next_id, id + 1)
                if (k, id) in named:
                    file = File(path, device.direct)
                    self._all[k, id] = Version(id, k, named[k, id], file, synced=True)
                elif (k, size) in sizes:
                    self._all[k, id] = Version(id, k, size, File(path, device.direct))
                    self._spares[k, size].append(self._all[k, id])
                else:
                    path.unlink()

    def close(self) -> None:
        """Closes the drives, after transfers in flight, and all files."""
        for device in self.devices:
            device.io.close()
        for version in self._all.values():
            version.file.close()
        self._all.clear()
        self._spares.clear()


def version_files(folder: Path) -> list[Path]:
    """The files of a store in a device's folder."""
    paths = (folder / FOLDER).glob("*.safetensors")
    return sorted(p for p in paths if re.fullmatch(r"\d{6,}", p.stem) and p.is_file())
