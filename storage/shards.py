"""The store: one safetensors file per span and drive, new versions beside old ones, snapshots that copy nothing.

    store = Store.create(["/nvme0/run", "/nvme1/run"], companions=checkpoint_folder)
    store.add("block-000", weights_layout, weights=True)   # tensors never cut, listed for Hugging Face readers
    store.add("block-000.adam", state_layout)
    store.reserve()                                        # claims the disk space
    store.write("block-000", buffer).result()
    store.read("block-000", buffer).result()
    store.verify("block-000", buffer).result()             # reads, and compares with the checksum of what was written
    store.commit(step=100, extra={...})                    # a snapshot: what a crash or restore() goes back to

A write never touches a version that can be read or that a snapshot holds: it goes to a spare file and becomes current
when all of it has arrived. Versions that nobody refers to any more become spares, so that in the steady state no file
is made, grown or removed. In each folder:

    files/000012.safetensors      every version and every spare (versions.py)
    snapshot-000003-step-100/     hard links to versions, manifest, index (snapshots.py)
    store.id, store.lock          which store this is; the lock is held while a process uses it (folders.py)
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from trireme.storage import folders, snapshots
from trireme.storage.aio import then, together
from trireme.storage.companions import companions as companions_of
from trireme.storage.devices import Device, open_device
from trireme.storage.files import NoSnapshot, StoreError, lock_folder, sync_folder, write_synced
from trireme.storage.layout import Layout, round_up
from trireme.storage.stripes import Stripe, deal_cut, deal_whole
from trireme.storage.sums import checksum
from trireme.storage.untrusted import read_small
from trireme.storage.versions import FOLDER, Version, Versions

IN_FLIGHT = 2  # spares of each size beyond what snapshots hold: writes under way while old versions can still be read
DAMAGED = "is damaged: its bytes are not those that were written"


class Damaged(StoreError):
    """The bytes of a file are not those that were written, and the drive did not say so."""


@dataclass
class Shard:
    """A named span: its layout, how it is dealt over the devices, and the current version of each stripe."""

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


class Store:
    """Spans of bytes by name, on one or more drives. read and write may be called from any thread."""

    def __init__(self, devices: Sequence[Device], keep: int):
        """Use Store.create or Store.open."""
        self.devices, self.keep = list(devices), keep
        self.made: list[Path] = []  # folders that this process made for it, innermost first
        self.shards: dict[str, Shard] = {}
        self.snapshots: list[snapshots.Snapshot] = []  # oldest first
        self._companions: dict[str, str] = {}  # name -> checksum
        self._versions = Versions(self.devices)
        self._sums = ThreadPoolExecutor(len(self.devices) + 1)  # checksums, taken while the drives work
        self._load = [0.0] * len(self.devices)
        self._resources = ExitStack()

    @classmethod
    def create(
        cls,
        dirs: Sequence[str | os.PathLike | Device],
        keep: int = 1,
        companions: str | os.PathLike | None = None,
        trial: int = 256 << 20,
    ) -> Store:
        """A new, empty store that keeps the last `keep` snapshots.

        Config and tokenizer of the checkpoint folder `companions` make its snapshots loadable as they lie. `trial`:
        bytes written to find out how a drive is best driven. What an earlier store left that never reached a snapshot
        is removed. Raises StoreError, leaving nothing, where a folder holds a snapshot already or is in use, or where a
        file of somebody else's has a name that a store takes.
        """
        paths = [_path(d) for d in dirs]
        names = _companions(companions)
        with ExitStack() as stack, ExitStack() as undo:
            made = folders.take(paths, names, stack, undo)
            store = cls([_device(d, stack, trial) for d in dirs], keep)
            stack.callback(store._end)
            folders.sign(paths, names, undo)
            store._copy_companions(companions, names)
            store.made = made
            store._resources = stack.pop_all()
            undo.pop_all()
        return store

    @classmethod
    def open(cls, dirs: Sequence[str | os.PathLike | Device], keep: int = 1, trial: int = 256 << 20) -> Store:
        """The store in these folders, at its last snapshot; `trial` as in `create`. Removes what a crash left behind.

        Raises StoreError.
        """
        with ExitStack() as stack:
            dirs = [dirs[i] for i in folders.in_order([_path(d) for d in dirs])]
            for d in dirs:
                lock_folder(_path(d), stack)
            loaded = snapshots.load(_path(dirs[0]))
            if not loaded:
                raise NoSnapshot(errno.ENOENT, "holds no complete snapshot; start again", str(_path(dirs[0])))
            store = cls([_device(d, stack, trial) for d in dirs], keep)
            stack.callback(store._end)
            snapshots.clean(store._paths, {s.folder for s in loaded})
            for snapshot in loaded:
                snapshots.check(snapshot, store._paths)
            records = [record for snapshot in loaded for record in snapshot.shards.values()]
            store._versions.adopt(
                {key: stripe.capacity for r in records for key, stripe in zip(r.keys, r.stripes, strict=True)}
            )
            store.snapshots, store._companions = loaded, loaded[-1].companions
            for snapshot in loaded:
                store._versions.hold(store._held(snapshot))
            for key, sum in (pair for r in records for pair in zip(r.keys, r.sums, strict=True)):
                store._versions[key].sum = sum
            store.restore()
            snapshots.publish(loaded[-1], store._paths[0])
            store._resources = stack.pop_all()
        return store

    @property
    def _paths(self) -> list[Path]:
        return [device.path for device in self.devices]

    def _copy_companions(self, source: str | os.PathLike | None, names: Sequence[str]) -> None:
        for name in names:
            target = self._paths[0] / name
            snapshots.make_place(target, self._paths[0])
            content = read_small(Path(source) / name, links=True)
            write_synced(target, [content])
            self._companions[name] = checksum([content])

    def add(self, name: str, layout: Layout, weights: bool = False) -> None:
        """Declares a span. `weights`: tensors stay whole and are listed in the index that Hugging Face readers use."""
        assert snapshots.SHARD.fullmatch(name) and name not in self.shards, name
        speeds = [device.speed for device in self.devices]
        stripes = deal_whole(layout, speeds, self._load) if weights else deal_cut(layout, speeds)
        self.shards[name] = Shard(layout, weights, stripes)

    def reserve(self) -> None:
        """Allocates every file that the steady state needs. Raises StoreError, taking nothing, where space is short."""
        wanted: dict[tuple[int, int], int] = defaultdict(lambda: IN_FLIGHT)
        for shard in self.shards.values():
            for stripe in shard.stripes:
                wanted[stripe.device, stripe.capacity] += 1 + self.keep
        self._versions.reserve(wanted)

    # ------------------------------------------------------------ reading and writing

    def read(self, name: str, buffer) -> Future[None]:
        """Fills `buffer` (page-aligned, layout.span bytes) with the current version. The future raises StoreError."""
        return self._read(name, buffer, verify=False)

    def verify(self, name: str, buffer) -> Future[None]:
        """As read; the future raises Damaged, too, where the bytes are not those that were written."""
        return self._read(name, buffer, verify=True)

    def _read(self, name: str, buffer, verify: bool) -> Future[None]:
        shard = self.shards[name]
        view = _span(shard, buffer)
        with self._versions.lock:
            assert shard.current, f"{name} was never written"
            versions = list(shard.current)
            self._versions.hold(versions)
        parts = []
        for k, (stripe, version) in enumerate(zip(shard.stripes, versions, strict=True)):
            io, data = self.devices[stripe.device].io, len(stripe.header)
            come = [
                io.read(version.file, data + offset, view[at : at + round_up(n)], n)
                for at, offset, n in stripe.segments
            ]
            if verify:
                compare = partial(self._compare, name, k, version, stripe.data_of(view))
                come = [then(together(come, lambda error: None), compare, self._sums)]
            parts += come
        return together(parts, lambda error: self._versions.drop(versions))

    def _compare(self, name: str, stripe: int, version: Version, data: list[memoryview]) -> None:
        """Raises Damaged unless the data of a stripe is what was written."""
        if checksum(data) == version.sum:
            return
        sound = [s.step for s in self.snapshots if version not in self._held(s)]
        last = f"The last snapshot without this file is of step {sound[-1]}" if sound else "No snapshot is without it"
        path = self._known_as(name, stripe, version)
        raise Damaged(errno.EIO, f"{DAMAGED}. {last}", str(path))

    def _known_as(self, name: str, stripe: int, version: Version) -> Path:
        """The file's name in a snapshot, or where no snapshot holds it its own."""
        for snapshot in reversed(self.snapshots):
            if name in snapshot.shards and (version.device, version.id) in snapshot.shards[name].keys:
                return self._paths[version.device] / snapshot.folder / snapshots.file_name(name, stripe)
        return Path(version.file.path)

    def write(self, name: str, buffer) -> Future[None]:
        """Writes `buffer` (page-aligned, layout.span bytes) as a new version; reads that begin once it is done get it.

        After an error the old version is still current. One write of a name at a time. Raises StoreError at once where
        there is no space for a new version.
        """
        shard = self.shards[name]
        view = _span(shard, buffer)
        with ExitStack() as stack:
            versions = []
            for stripe in shard.stripes:
                versions.append(self._versions.take(stripe.device, stripe.capacity))
                stack.callback(self._versions.drop, versions[-1:])
            stack.pop_all()
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

    # ------------------------------------------------------------ snapshots

    def commit(self, step: int, extra: dict) -> None:
        """Makes the current state a snapshot with `extra` (JSON), and drops the oldest beyond `keep`. Copies nothing.

        Raises StoreError; the earlier snapshots are then as they were. Writes under way belong to the next one.
        """
        with self._versions.lock:
            state = {name: list(shard.current or ()) for name, shard in self.shards.items()}
            self._versions.hold(version for versions in state.values() for version in versions)
        records = {}
        for name, versions in state.items():
            shard = self.shards[name]
            assert versions or not shard.stripes, f"{name} was never written"
            files, sums = tuple(v.id for v in versions), tuple(v.sum for v in versions)
            records[name] = snapshots.Record(shard.layout, shard.weights, shard.stripes, files, sums)
        sequence = self.snapshots[-1].sequence + 1 if self.snapshots else 1
        snapshot = snapshots.Snapshot(sequence, step, extra, self._companions, records)
        try:
            self._sync(snapshot)
            snapshots.write(snapshot, self._paths)
        except BaseException:
            self._versions.drop(self._held(snapshot))
            raise
        self.snapshots.append(snapshot)
        snapshots.publish(snapshot, self._paths[0])
        while len(self.snapshots) > self.keep:
            snapshots.remove(self.snapshots[0], self._paths)
            self._versions.drop(self._held(self.snapshots.pop(0)))

    def restore(self, step: int | None = None) -> dict:
        """Makes the last snapshot (of `step`, if given) current and returns its `extra`. Nothing may be under way."""
        matching = [s for s in self.snapshots if step is None or s.step == step]
        if not matching:
            raise StoreError(errno.ENOENT, f"holds no snapshot of step {step}", str(self._paths[0]))
        snapshot = matching[-1]
        for shard in self.shards.values():
            self._versions.drop(shard.current or [])
        self.shards = {}
        for name, r in snapshot.shards.items():
            current = [self._versions[key] for key in r.keys]
            self.shards[name] = Shard(r.layout, r.weights, r.stripes, current)
        self._versions.hold(self._held(snapshot))
        return snapshot.extra

    def _held(self, snapshot: snapshots.Snapshot) -> list[Version]:
        return [self._versions[key] for record in snapshot.shards.values() for key in record.keys]

    def _sync(self, snapshot: snapshots.Snapshot) -> None:
        """Makes the versions of a coming snapshot durable, each at its exact size."""

        def sync(version: Version, nbytes: int) -> None:
            try:
                if version.lost:
                    raise OSError(errno.EIO, "an earlier fsync failed; it must be written again")
                version.resize(nbytes)
                os.fsync(version.file.fd)
            except OSError as e:
                version.lost = True
                raise StoreError(e.errno, f"{e.strerror}, making it durable", version.file.path) from e
            version.synced = True

        stripes = [stripe for record in snapshot.shards.values() for stripe in record.stripes]
        with ThreadPoolExecutor(8) as pool:
            pairs = zip(self._held(snapshot), stripes, strict=True)
            jobs = [pool.submit(sync, version, stripe.nbytes) for version, stripe in pairs if not version.synced]
        for job in jobs:
            job.result()
        for path in self._paths:
            sync_folder(path / FOLDER)

    def close(self) -> None:
        """Ends what is in flight, closes every file and gives up the folders."""
        self._resources.close()

    def _end(self) -> None:
        self._versions.close()  # ends what is in flight; what that brought is then still to be summed
        self._sums.shutdown()

    def remove(self) -> None:
        """Removes everything that the store made in its folders, and closes it. Killed meanwhile, it is finished."""
        folders.remove(self._paths)
        self.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def _path(d: str | os.PathLike | Device) -> Path:
    return d.path if isinstance(d, Device) else Path(d)


def _device(d: str | os.PathLike | Device, stack: ExitStack, trial: int) -> Device:
    device = d if isinstance(d, Device) else open_device(d, trial)
    stack.callback(device.io.close)
    return device


def _take_sum(version: Version, data: list[memoryview]) -> None:
    version.sum = checksum(data)


def _span(shard: Shard, buffer) -> memoryview:
    view = memoryview(buffer).cast("B")
    assert len(view) == shard.layout.span, (len(view), shard.layout.span)
    return view


def _companions(source: str | os.PathLike | None) -> list[str]:
    """The files of a checkpoint that lie beside a store's snapshots."""
    return [name for name in companions_of(Path(source)) if snapshots.may_lie_beside(name)] if source else []
