"""The store: one safetensors file per shard and drive, and snapshots without copies.

    store = Store.create(["/nvme0/run", "/nvme1/run"], auxiliary=checkpoint_folder)
    store.add("block-000", weights_layout, weights=True)   # indexed for Hugging Face
    store.add("block-000.adam", state_layout)
    store.reserve()                                        # disk space
    store.write("block-000", buffer).result()
    store.read("block-000", buffer).result()
    store.verify("block-000", buffer).result()             # by checksum
    store.commit(step=100, extra={...})

In each folder:

    files/000012.safetensors      versions, spares (versions.py)
    snapshot-000003-step-100/     hard links, manifest, index (snapshots.py)
    store.id, store.lock          (folders.py)
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trireme.storage import folders, snapshots
from trireme.storage.auxiliary import CONTENT, auxiliary_files, content_of
from trireme.storage.devices import Device, check_links, open_device
from trireme.storage.files import (
    AnyPath,
    NoSnapshot,
    Say,
    StoreError,
    lock_folder,
    store_errors,
    sync_folder,
    to_stderr,
    write_synced,
)
from trireme.storage.shards import Shard, Shards
from trireme.storage.untrusted import checksum
from trireme.storage.versions import FOLDER, Version


class Store(Shards):
    """Shards that outlive the process. Made by Store.create or Store.open."""

    def __init__(self, devices: Sequence[Device], keep: int):
        super().__init__(devices, keep)
        self._auxiliary: dict[str, str] = {}  # name -> checksum
        self._resources = ExitStack()

    @classmethod
    def create(
        cls,
        dirs: Sequence[AnyPath | Device],
        keep: int = 1,
        auxiliary: AnyPath | Mapping[str, CONTENT] | None = None,
        speeds: Sequence[float] = (),
        say: Say = to_stderr,
        run: str = "",
    ) -> Store:
        """Makes a new store that keeps `keep` snapshots; clears remains of stores without a snapshot in these folders.

        `auxiliary`: a checkpoint's folder, or its files besides weights. `speeds`: of the drives, new files are divided
        by them (none: equally). `say` is called with what slows a drive down. `run`: the id of the store's run. Raises
        StoreError, leaving nothing, if a folder is in use, has a snapshot, or holds another's file with a name that
        stores use.
        """
        paths = [_path(d) for d in dirs]
        content = _auxiliary(auxiliary)
        names = list(content)
        with ExitStack() as stack, ExitStack() as undo:
            made = folders.take(paths, names, stack, undo)
            store = cls(_devices(dirs, stack, speeds, say), keep)
            stack.callback(store._end)
            folders.sign(paths, names, run, made, undo)
            store._copy_auxiliary(content)
            store._resources = stack.pop_all()
            undo.pop_all()
        return store

    @classmethod
    def open(
        cls,
        dirs: Sequence[AnyPath | Device],
        keep: int = 1,
        speeds: Sequence[float] = (),
        say: Say = to_stderr,
        run: str = "",
    ) -> Store:
        """Opens the store of a run at its last snapshot; arguments as of `create`. Removes what a crash left. Raises
        StoreError.
        """
        with ExitStack() as stack:
            order = folders.in_order([_path(d) for d in dirs], run)
            dirs, speeds = [dirs[i] for i in order], [speeds[i] for i in order if speeds]
            for d in dirs:
                lock_folder(_path(d), stack)
            loaded = snapshots.load(_path(dirs[0]))
            if not loaded:
                raise NoSnapshot(errno.ENOENT, "holds no complete snapshot; start again", str(_path(dirs[0])))
            store = cls(_devices(dirs, stack, speeds, say), keep)
            stack.callback(store._end)
            store._adopt(loaded)
            store.restore()
            snapshots.publish(loaded[-1], store.paths[0])
            store._resources = stack.pop_all()
        return store

    def _copy_auxiliary(self, auxiliary: Mapping[str, CONTENT]) -> None:
        for name, source in auxiliary.items():
            target = self.paths[0] / name
            target.parent.mkdir(exist_ok=True)
            content = content_of(source)
            write_synced(target, [content])
            self._auxiliary[name] = checksum([content])

    def _adopt(self, loaded: list[snapshots.Snapshot]) -> None:
        snapshots.clean(self.paths, {s.folder for s in loaded})
        for snapshot in loaded:
            snapshots.check_files(snapshot, self.paths)
        records = [record for snapshot in loaded for record in snapshot.shards.values()]
        self._versions.adopt(
            {key: stripe.capacity for r in records for key, stripe in zip(r.keys, r.stripes, strict=True)}
        )
        self.snapshots, self._auxiliary = loaded, loaded[-1].auxiliary
        for snapshot in loaded:
            self._versions.hold(self._held(snapshot))
        for key, sum in (pair for r in records for pair in zip(r.keys, r.sums, strict=True)):
            self._versions[key].sum = sum

    # ------------------------------------------------------------ snapshots

    def commit(
        self,
        step: int,
        extra: dict[str, Any],
        meet: Callable[[], None] = lambda: None,
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Makes a snapshot with `extra` (JSON), then removes the oldest ones beyond `keep`.

        Writes that are in flight belong to the next snapshot. Calls progress(0) for each file that was made durable.
        `meet` returns when the stores of other hosts have this snapshot, too; if it raises, no snapshot is removed.
        Raises StoreError; earlier snapshots stay.
        """
        with self._versions.lock:
            state = {name: list(shard.current or ()) for name, shard in self.shards.items()}
            self._versions.hold(version for versions in state.values() for version in versions)
        records = {}
        for name, versions in state.items():
            shard = self.shards[name]
            assert versions or not shard.stripes, f"{name} was never written"
            files, sums = tuple(v.id for v in versions), tuple(v.sum for v in versions)
            records[name] = snapshots.ShardRecord(shard.layout, shard.weights, shard.stripes, files, sums)
        sequence = self.snapshots[-1].sequence + 1 if self.snapshots else 1
        snapshot = snapshots.Snapshot(sequence, step, extra, self._auxiliary, records)
        try:
            self._sync(snapshot, progress)
            snapshots.write(snapshot, self.paths)
        except BaseException:
            self._versions.drop(self._held(snapshot))
            raise
        self.snapshots.append(snapshot)
        snapshots.publish(snapshot, self.paths[0])
        meet()
        while len(self.snapshots) > self.keep:
            snapshots.remove(self.snapshots[0], self.paths)
            self._versions.drop(self._held(self.snapshots.pop(0)))

    def restore(self) -> dict[str, Any]:
        """Makes the content of the last snapshot current; returns its `extra`. Nothing may be in flight."""
        self.clear()
        snapshot = self.snapshots[-1]
        for name, r in snapshot.shards.items():
            current = [self._versions[key] for key in r.keys]
            self.shards[name] = Shard(r.layout, r.weights, r.stripes, current)
        self._versions.hold(self._held(snapshot))
        return snapshot.extra

    def go_back(self, sequence: int) -> dict[str, Any]:
        """As `restore`, for the snapshot with this number. Removes later ones, which stores of other hosts lack."""
        while self.snapshots[-1].sequence > sequence:
            snapshots.remove(self.snapshots[-1], self.paths)
            self._versions.drop(self._held(self.snapshots.pop()))
            snapshots.publish(self.snapshots[-1], self.paths[0])
        return self.restore()

    def clear(self) -> None:
        """Forgets all shards, so that others can be added. Snapshots keep theirs."""
        for shard in self.shards.values():
            self._versions.drop(shard.current or [])
        self.shards = {}

    def _sync(self, snapshot: snapshots.Snapshot, progress: Callable[[int], object]) -> None:
        stripes = [stripe for record in snapshot.shards.values() for stripe in record.stripes]
        with ThreadPoolExecutor(8) as pool:
            pairs = zip(self._held(snapshot), stripes, strict=True)
            jobs = [pool.submit(_sync, version, stripe.nbytes) for version, stripe in pairs if not version.synced]
            for _ in as_completed(jobs):
                progress(0)
        for job in jobs:
            job.result()
        for path in self.paths:
            sync_folder(path / FOLDER)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Closes the store after the requests in flight."""
        self._resources.close()

    def _end(self) -> None:
        self._versions.close()  # requests ending here still hand over checksums
        self._sums.shutdown()

    def remove(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Removes all files and folders of the store, and closes it. If this is killed, the next process completes it.

        progress(0) is called for each file.
        """
        folders.remove_store(self.paths, progress)
        self.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _path(d: AnyPath | Device) -> Path:
    return d.path if isinstance(d, Device) else Path(d)


def _devices(dirs: Sequence[AnyPath | Device], stack: ExitStack, speeds: Sequence[float], say: Say) -> list[Device]:
    """Opened drives; `stack` closes them. Raises StoreError."""
    opened: list[Device] = []
    for d, speed in zip(dirs, speeds or [1.0] * len(dirs), strict=True):
        if not isinstance(d, Device):
            check_links(Path(d))
        opened.append(d if isinstance(d, Device) else open_device(d, speed, say))
        stack.callback(opened[-1].io.close)
    return opened


def _auxiliary(source: AnyPath | Mapping[str, CONTENT] | None) -> dict[str, CONTENT]:
    """The files that can be stored with snapshots."""
    files = source if isinstance(source, Mapping) else auxiliary_files(Path(source)) if source else {}
    return {name: auxiliary for name, auxiliary in files.items() if snapshots.may_be_auxiliary(name)}


def _sync(version: Version, nbytes: int) -> None:
    """Makes a file durable at its exact size. Raises StoreError."""
    path = version.file.path
    if version.lost:
        raise StoreError(errno.EIO, "an earlier fsync failed; it must be written again", path)
    version.lost = True  # if this fails
    with store_errors(path, ", making it durable"):
        version.resize(nbytes)
        os.fsync(version.file.fd)
    version.lost, version.synced = False, True
