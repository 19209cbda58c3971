"""Named shards on one or more drives: read, verified, and written copy-on-write.

A write goes to a spare file, which becomes the current version when it is complete. Versions that neither the current
state nor a snapshot needs become spares, so that in the steady state no file is made, grown or removed.
"""

from __future__ import annotations

import errno
import mmap
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.storage import snapshots
from trireme.storage.aio import then, together
from trireme.storage.devices import Device
from trireme.storage.files import StoreError
from trireme.storage.layout import Layout, round_up
from trireme.storage.stripes import Stripe, stripe_bytes, stripe_tensors
from trireme.storage.untrusted import checksum
from trireme.storage.versions import Version, Versions

if TYPE_CHECKING:
    from typing_extensions import Buffer

IN_FLIGHT = 2  # spares of each size beyond the snapshots' files: writes under way while old versions can still be read
DAMAGED = "is damaged: its bytes are not those that were written"


class Damaged(StoreError):
    """The bytes of a file are not those that were written, and the drive did not say so."""


@dataclass
class Shard:
    """A layout's bytes under a name: one stripe on each device, and the current version of each stripe."""

    layout: Layout
    weights: bool
    stripes: tuple[Stripe, ...]
    current: list[Version] | None = None

    @cached_property
    def headers(self) -> list[memoryview]:
        """The stripes' headers in page-aligned memory."""
        buffers = [memoryview(mmap.mmap(-1, len(stripe.header))) for stripe in self.stripes]
        for buffer, stripe in zip(buffers, self.stripes, strict=True):
            buffer[:] = stripe.header
        return buffers


class Shards:
    """The shards of a store by name. read, verify and write may be called from any thread."""

    def __init__(self, devices: Sequence[Device], keep: int):
        """`keep`: how many snapshots hold versions beside the current ones."""
        self.devices, self.keep = list(devices), keep
        self.shards: dict[str, Shard] = {}
        self.snapshots: list[snapshots.Snapshot] = []  # oldest first
        self._versions = Versions(self.devices)
        self._sums = ThreadPoolExecutor(len(self.devices) + 1)  # checksums, taken while the drives work
        self._load = [0.0] * len(self.devices)

    @property
    def paths(self) -> list[Path]:
        """The devices' folders."""
        return [device.path for device in self.devices]

    def add(self, name: str, layout: Layout, weights: bool = False) -> None:
        """Declares a shard. `weights`: tensors stay whole and are listed in Hugging Face's index."""
        assert snapshots.SHARD.fullmatch(name), name
        assert name not in self.shards, name
        speeds = [device.speed for device in self.devices]
        stripes = stripe_tensors(layout, speeds, self._load) if weights else stripe_bytes(layout, speeds)
        self.shards[name] = Shard(layout, weights, stripes)

    def reserve(self) -> None:
        """Allocates every file that the steady state needs. Raises StoreError, taking nothing, where space is short."""
        wanted: dict[tuple[int, int], int] = defaultdict(lambda: IN_FLIGHT)
        for shard in self.shards.values():
            for stripe in shard.stripes:
                wanted[stripe.device, stripe.capacity] += 1 + self.keep
        self._versions.reserve(wanted)

    # ------------------------------------------------------------ reading

    def read(self, name: str, buffer: Buffer) -> Future[None]:
        """Fills `buffer` (page-aligned, layout.span bytes) with the current version. The future raises StoreError."""
        return self._read(name, buffer, verify=False)

    def verify(self, name: str, buffer: Buffer) -> Future[None]:
        """As read, and compares with the checksum of what was written: the future may raise Damaged."""
        return self._read(name, buffer, verify=True)

    def _read(self, name: str, buffer: Buffer, verify: bool) -> Future[None]:
        shard = self.shards[name]
        view = _view(shard, buffer)
        with self._versions.lock:
            assert shard.current, f"{name} was never written"
            versions = list(shard.current)
            self._versions.hold(versions)
        parts = []
        for k, (stripe, version) in enumerate(zip(shard.stripes, versions, strict=True)):
            io, data = self.devices[stripe.device].io, len(stripe.header)
            reads = [
                io.read(version.file, data + offset, view[at : at + round_up(n)], n)
                for at, offset, n in stripe.segments
            ]
            if verify:
                compare = partial(self._compare, name, k, version, stripe.data_of(view))
                reads = [then(together(reads), compare, self._sums)]
            parts += reads
        return together(parts, lambda _: self._versions.drop(versions))

    def _compare(self, name: str, stripe: int, version: Version, data: list[memoryview]) -> None:
        """Raises Damaged unless the data of a stripe is what was written."""
        if checksum(data) == version.sum:
            return
        sound = [s.step for s in self.snapshots if version not in self._held(s)]
        last = f"The last snapshot without this file is of step {sound[-1]}" if sound else "No snapshot is without it"
        path = self._known_as(name, stripe, version)
        raise Damaged(errno.EIO, f"{DAMAGED}. {last}", str(path))

    def _known_as(self, name: str, stripe: int, version: Version) -> Path:
        """The file's name in the last snapshot that holds it, else its own."""
        for snapshot in reversed(self.snapshots):
            if name in snapshot.shards and (version.device, version.id) in snapshot.shards[name].keys:
                return self.paths[version.device] / snapshot.folder / snapshots.file_name(name, stripe)
        return Path(version.file.path)

    def _held(self, snapshot: snapshots.Snapshot) -> list[Version]:
        """The versions that a snapshot names."""
        return [self._versions[key] for record in snapshot.shards.values() for key in record.keys]

    # ------------------------------------------------------------ writing

    def write(self, name: str, buffer: Buffer) -> Future[None]:
        """Writes `buffer` (page-aligned, layout.span bytes) as a new version; reads that begin once it is done get it.

        After an error the old version is still current. One write of a name at a time. Raises StoreError at once if
        there is no space.
        """
        shard = self.shards[name]
        view = _view(shard, buffer)
        versions = self._take(shard.stripes)
        parts = []
        for stripe, header, version in zip(shard.stripes, shard.headers, versions, strict=True):
            io = self.devices[stripe.device].io
            parts.append(io.write(version.file, 0, header))
            for at, offset, n in stripe.segments:
                parts.append(io.write(version.file, len(header) + offset, view[at : at + round_up(n)]))
        for stripe, version in zip(shard.stripes, versions, strict=True):
            parts.append(self._sums.submit(_take_sum, version, stripe.data_of(view)))

        def finish(error: BaseException | None) -> None:
            with self._versions.lock:
                old = versions
                if not error:
                    old, shard.current = shard.current or [], versions
            self._versions.drop(old)

        return together(parts, finish)

    def _take(self, stripes: Sequence[Stripe]) -> list[Version]:
        """A file to write into for each stripe. Raises StoreError, taking none, where there is no space."""
        versions: list[Version] = []
        with ExitStack() as undo:
            for stripe in stripes:
                versions.append(self._versions.take(stripe.device, stripe.capacity))
                undo.callback(self._versions.drop, versions[-1:])
            undo.pop_all()
        return versions


def _take_sum(version: Version, data: list[memoryview]) -> None:
    version.sum = checksum(data)


def _view(shard: Shard, buffer: Buffer) -> memoryview:
    view = memoryview(buffer).cast("B")
    assert len(view) == shard.layout.span, (len(view), shard.layout.span)
    return view
