"""Named shards on one or more drives: read, verified, and written copy-on-write.

A write goes to another file, and the old file becomes a spare when no snapshot and no read uses it. Once there are
enough spares, no file is made, grown or removed.
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
from trireme.storage.stripes import Stripe, stripe_tensors, stripe_turns
from trireme.storage.untrusted import checksum
from trireme.storage.versions import Version, Versions

if TYPE_CHECKING:
    from typing_extensions import Buffer

IN_FLIGHT = 2  # spares of a size beyond snapshots': writes under way while old versions are read
DAMAGED = "is damaged: its bytes are not those that were written"


class Damaged(StoreError):
    """Bytes have changed although the drive reported no error."""


@dataclass
class Shard:
    """A named layout with one stripe on each device; `current`: the files with its content."""

    layout: Layout
    weights: bool
    stripes: tuple[Stripe, ...]
    current: list[Version] | None = None

    @cached_property
    def headers(self) -> list[memoryview]:
        """The headers of its files, in page-aligned memory."""
        buffers = [memoryview(mmap.mmap(-1, len(stripe.header))) for stripe in self.stripes]
        for buffer, stripe in zip(buffers, self.stripes, strict=True):
            buffer[:] = stripe.header
        return buffers


class Shards:
    """The shards of a store, by name. `read`, `verify` and `write` may be called from any thread."""

    def __init__(self, devices: Sequence[Device], keep: int):
        """`keep`: the number of snapshots, each of which may hold further files."""
        self.devices, self.keep = list(devices), keep
        self.shards: dict[str, Shard] = {}
        self.snapshots: list[snapshots.Snapshot] = []  # oldest first
        self._versions = Versions(self.devices)
        self._sums = ThreadPoolExecutor(len(self.devices) + 1)  # checksums, while drives work
        self._load = [0.0] * len(self.devices)

    @property
    def paths(self) -> list[Path]:
        return [device.path for device in self.devices]

    def add(self, name: str, layout: Layout, weights: bool = False) -> None:
        """Adds a shard. `weights`: its tensors are not cut, and are in the Hugging Face index."""
        assert snapshots.SHARD.fullmatch(name), name
        assert name not in self.shards, name
        speeds = [device.speed for device in self.devices]
        stripes = stripe_tensors(layout, speeds, self._load) if weights else stripe_turns(layout, speeds)
        self.shards[name] = Shard(layout, weights, stripes)

    def reserve(self) -> None:
        """Allocates the files that are needed in the long run. Raises StoreError, taking nothing, if space is short."""
        wanted: dict[tuple[int, int], int] = defaultdict(lambda: IN_FLIGHT)
        for shard in self.shards.values():
            for stripe in shard.stripes:
                wanted[stripe.device, stripe.capacity] += 1 + self.keep
        self._versions.reserve(wanted)

    # ------------------------------------------------------------ reading

    def read(self, name: str, buffer: Buffer, later: bool = False) -> Future[None]:
        """Fills `buffer` (page-aligned, layout.span bytes). The future raises StoreError. `later`: as in aio.py."""
        return self._read(name, buffer, later=later)

    def verify(self, name: str, buffer: Buffer, later: bool = False) -> Future[None]:
        """As `read`, and compares with the checksum. The future raises StoreError, also Damaged."""
        return self._read(name, buffer, verify=True, later=later)

    def _read(self, name: str, buffer: Buffer, verify: bool = False, later: bool = False) -> Future[None]:
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
                io.read(version.file, data + offset, view[at : at + round_up(n)], n, later)
                for at, offset, n in stripe.segments
            ]
            if verify:
                compare = partial(self._compare, name, k, version, stripe.data_of(view))
                reads = [then(together(reads), compare, self._sums)]
            parts += reads
        return together(parts, lambda _: self._versions.drop(versions))

    def _compare(self, name: str, stripe: int, version: Version, data: list[memoryview]) -> None:
        """Raises Damaged if the checksum is not that of the version."""
        if checksum(data) == version.sum:
            return
        sound = [s.step for s in self.snapshots if version not in self._held(s)]
        last = f"The last snapshot without this file is of step {sound[-1]}" if sound else "No snapshot is without it"
        path = self._known_as(name, stripe, version)
        raise Damaged(errno.EIO, f"{DAMAGED}. {last}", str(path))

    def _known_as(self, name: str, stripe: int, version: Version) -> Path:
        """The file's name in the last snapshot that has it, else its own."""
        for snapshot in reversed(self.snapshots):
            if name in snapshot.shards and (version.device, version.id) in snapshot.shards[name].keys:
                return self.paths[version.device] / snapshot.folder / snapshots.file_name(name, stripe)
        return Path(version.file.path)

    def _held(self, snapshot: snapshots.Snapshot) -> list[Version]:
        """The files of a snapshot."""
        return [self._versions[key] for record in snapshot.shards.values() for key in record.keys]

    # ------------------------------------------------------------ writing

    def write(self, name: str, buffer: Buffer, later: bool = False) -> Future[None]:
        """Writes `buffer` (page-aligned, layout.span bytes) to new files. They are current once the future ends without
        error.

        There may be one write of a name at a time. `later`: as in aio.py. Raises StoreError at once if space is short.
        """
        shard = self.shards[name]
        view = _view(shard, buffer)
        versions = self._take(shard.stripes)
        parts = []
        for stripe, header, version in zip(shard.stripes, shard.headers, versions, strict=True):
            io = self.devices[stripe.device].io
            parts.append(io.write(version.file, 0, header, later))
            for at, offset, n in stripe.segments:
                parts.append(io.write(version.file, len(header) + offset, view[at : at + round_up(n)], later))
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
        """A file for each stripe. Raises StoreError, taking none."""
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
