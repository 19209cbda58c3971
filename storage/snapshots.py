"""Snapshots on disk: a folder with hard links to the store's files, a manifest and an index. It is a Hugging Face
checkpoint.

One rename on the first device publishes a snapshot, another one begins its removal: a folder with a snapshot's name is
complete, even after a power failure.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.storage.auxiliary import TEMPLATES, is_auxiliary
from trireme.storage.checkpoint import INDEX
from trireme.storage.files import (
    StoreError,
    as_store_error,
    remove_folders,
    replace_synced,
    store_errors,
    sync_folder,
    write_synced,
)
from trireme.storage.headers import list_tensors, parse_tensors
from trireme.storage.layout import Layout
from trireme.storage.stripes import Stripe
from trireme.storage.untrusted import checksum, read_small, seal, unseal
from trireme.storage.versions import FOLDER

MANIFEST = "manifest.json"
FORMAT = 3
LARGEST = 256 << 20  # 405 billion parameters take 20 million
NAME = re.compile(r"snapshot-(\d{6,})-step-(\d+)")
LEFTOVER = re.compile(NAME.pattern + r"\.(partial|dropped)")
LEFT = ".left"  # suffix of a removed snapshot's folder, if others' files are in it
NONE_OLDER = "There is no older snapshot (--keep 1 keeps one)"
NO_WAY_BACK = "restore the file from a copy of the run, or start again"
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class ShardRecord:
    """A shard in a snapshot. For each stripe, `files` has the id of its file and `sums` its checksum."""

    layout: Layout
    weights: bool
    stripes: tuple[Stripe, ...]
    files: tuple[int, ...]
    sums: tuple[str, ...]

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(device, id) of each file."""
        return [(stripe.device, id) for stripe, id in zip(self.stripes, self.files, strict=True)]


@dataclass(frozen=True)
class Snapshot:
    """The content of a manifest. `extra`: what the caller stores with it, as JSON."""

    sequence: int
    step: int
    extra: dict[str, Any]
    auxiliary: dict[str, str]  # name -> checksum
    shards: dict[str, ShardRecord]

    @property
    def folder(self) -> str:
        return f"snapshot-{self.sequence:06d}-step-{self.step}"

    def links(self) -> list[tuple[int, str, int]]:
        """(device, name in the snapshot's folder, id of the store's file) of all files."""
        files: list[tuple[int, str, int]] = []
        for name, record in self.shards.items():
            files += ((device, file_name(name, k), id) for k, (device, id) in enumerate(record.keys))
        return files

    def index(self, prefix: str = "") -> bytes:
        """The Hugging Face index of the weights; `prefix` is put before file names."""
        weight_map: dict[str, str] = {}
        total = 0
        for name, record in self.shards.items():
            for k, stripe in enumerate(record.stripes if record.weights else ()):
                weight_map |= {t.name: prefix + file_name(name, k) for t in stripe.layout.tensors}
                total += stripe.layout.nbytes
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()


def file_name(shard: str, stripe: int) -> str:
    """The name of a stripe's file in a snapshot's folder."""
    return f"{shard}.{stripe}.safetensors" if stripe else f"{shard}.safetensors"


def write(snapshot: Snapshot, devices: Sequence[Path]) -> None:
    """Makes a snapshot of files that are synced. Raises StoreError, leaving nothing."""
    first = devices[0]
    partial = first / f"{snapshot.folder}.partial"
    places = [partial, *(device / snapshot.folder for device in devices[1:])]
    try:
        for place in places:
            place.mkdir()
        for device, name, id in snapshot.links():
            os.link(devices[device] / FOLDER / f"{id:06d}.safetensors", places[device] / name)
            if device:  # for readers of the first folder
                (partial / name).symlink_to((places[device] / name).resolve())
        for name in snapshot.auxiliary:
            (partial / name).parent.mkdir(exist_ok=True)
            os.link(first / name, partial / name)
        write_synced(partial / INDEX, [snapshot.index()])
        write_synced(partial / MANIFEST, [seal(FORMAT, _to_json(snapshot))])
        for place in places:
            for folder in {p.parent for p in place.rglob("*")} | {place}:
                sync_folder(folder)
        for other in devices[1:]:
            sync_folder(other)
        partial.rename(first / snapshot.folder)  # published
    except BaseException as e:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        if isinstance(e, OSError):
            raise as_store_error(e, e.filename or partial, ", making a snapshot") from e
        raise


def publish(snapshot: Snapshot, first: Path) -> None:
    """Makes the rename durable, and writes the index in the store's folder, which leads to this snapshot."""
    sync_folder(first)
    if any(record.weights for record in snapshot.shards.values()):
        replace_synced(first / INDEX, snapshot.index(f"{snapshot.folder}/"))


def remove(snapshot: Snapshot, devices: Sequence[Path]) -> None:
    """Removes a snapshot. Only then its files may be overwritten. Raises StoreError."""
    dropped = devices[0] / f"{snapshot.folder}.dropped"
    with store_errors(dropped, ", removing a snapshot"):
        (devices[0] / snapshot.folder).rename(dropped)
        sync_folder(devices[0])
        for place in (dropped, *(device / snapshot.folder for device in devices[1:])):
            erase(place, snapshot)


def erase(folder: Path, snapshot: Snapshot | None = None) -> None:
    """Removes a snapshot's files from its folder, and the folder; if it has other files, it gets another name. None:
    that of its manifest, which goes last; without one it was only partly made, and its files are known by their kind.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        snapshot = snapshot or parse_manifest(read_small(folder / MANIFEST, LARGEST))
    if snapshot is None:
        known = [path for pattern in ("*.safetensors", "*.partial") for path in folder.glob(pattern)]
        known += [folder / name for name in _auxiliary(folder)]
    else:
        known = [folder / name for _, name, _ in snapshot.links()] + [folder / name for name in snapshot.auxiliary]
    for path in (*known, folder / INDEX, folder / MANIFEST):
        path.unlink(missing_ok=True)
    remove_folders([folder / TEMPLATES, folder])
    if folder.exists():
        folder.rename(folder.with_name(folder.name.split(".")[0] + LEFT))


def _auxiliary(folder: Path) -> list[str]:
    """Names of the auxiliary files that a snapshot's folder shares with its store."""
    every = [str(path.relative_to(folder)) for path in (*folder.glob("*"), *folder.glob(f"{TEMPLATES}/*"))]
    store = folder.parent
    return [name for name in every if (store / name).is_file() and (store / name).samefile(folder / name)]


def folders(device: Path) -> list[str]:
    """Names of the snapshots on a device, oldest first."""
    names = [p.name for p in device.iterdir() if NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(names, key=lambda name: int(name.split("-")[1]))


def leftovers(device: Path) -> list[Path]:
    """Folders of snapshots that are only partly made or partly removed."""
    return [p for p in device.iterdir() if LEFTOVER.fullmatch(p.name) and p.is_dir()]


def load(first: Path) -> list[Snapshot]:
    """The snapshots on the first device, oldest first. Raises StoreError."""
    return [_read(first / name) for name in folders(first)]


def _read(folder: Path) -> Snapshot:
    path = folder / MANIFEST
    try:
        snapshot = parse_manifest(read_small(path, LARGEST))
        if snapshot.folder != folder.name:
            raise ValueError(f"it is the one of {snapshot.folder}")
        return snapshot
    except OSError as e:
        raise as_store_error(e, path) from e
    except ValueError as e:
        raise StoreError(errno.EIO, f"is damaged: {e}. {way_back(folder)}", str(path)) from e


def way_back(folder: Path) -> str:
    """What the user can do if the snapshot in `folder` is damaged."""
    names = folders(folder.parent)
    older, newer = names[: names.index(folder.name)], names[names.index(folder.name) + 1 :]
    if newer:
        return f"Remove {folder}: there is a newer snapshot"
    if older:
        return f"To go back to step {older[-1].split('-')[3]}, remove {folder}"
    return f"{NONE_OLDER}: {NO_WAY_BACK}"


def check_files(snapshot: Snapshot, devices: Sequence[Path]) -> None:
    """Raises StoreError unless every file has its size and header, and every auxiliary file its checksum.

    Data of shards is checked when it is read. If a copy of the run split a hard link, the snapshot's file counts.
    """
    first, back = devices[0] / snapshot.folder, way_back(devices[0] / snapshot.folder)
    stripes = [stripe for record in snapshot.shards.values() for stripe in record.stripes]
    if any(stripe.device >= len(devices) for stripe in stripes):
        message = f"is damaged: it names more than {len(devices)} folders. {back}"
        raise StoreError(errno.EIO, message, str(first / MANIFEST))
    for folder in (device / FOLDER for device in devices):
        with store_errors(folder):
            folder.mkdir(exist_ok=True)  # its files are the snapshot's, by other names
    for (device, name, id), stripe in zip(snapshot.links(), stripes, strict=True):
        path = devices[device] / snapshot.folder / name
        with store_errors(path):
            check_header(path, stripe, back)
            _link(path, devices[device] / FOLDER / f"{id:06d}.safetensors")
    for name, known in snapshot.auxiliary.items():
        path = first / name
        with store_errors(path):
            (devices[0] / name).parent.mkdir(exist_ok=True)
            if checksum([read_small(path)]) != known:
                message = "is not what was written. Copy it from the checkpoint again"
                raise StoreError(errno.EIO, message, str(path))
            _link(path, devices[0] / name)


def check_header(path: Path, stripe: Stripe, back: str) -> None:
    """Raises StoreError unless a stripe's file has its size and header; OSError if it cannot be read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as f:
        size, header = os.fstat(f.fileno()).st_size, f.read(len(stripe.header))
    if size != stripe.nbytes:
        raise StoreError(errno.EIO, f"was changed: {size} bytes of {stripe.nbytes}. {back}", str(path))
    if header != stripe.header:
        raise StoreError(errno.EIO, f"was changed: its header is not the one that was written. {back}", str(path))


def _link(path: Path, name: Path) -> None:
    """Makes `name` a hard link to `path`, if it is not."""
    if not (os.path.lexists(name) and os.path.samestat(os.lstat(name), os.lstat(path))):
        name.unlink(missing_ok=True)
        os.link(path, name)


def clean(devices: Sequence[Path], valid: set[str]) -> None:
    """Removes partial snapshots that a crash left, and nothing else."""
    for k, device in enumerate(devices):
        orphans = [device / name for name in folders(device) if k > 0 and name not in valid]
        for path in (*orphans, *leftovers(device)):
            erase(path)


def _to_json(snapshot: Snapshot) -> dict[str, Any]:
    shards = {}
    for name, r in snapshot.shards.items():
        stripes = [
            {"device": s.device, "tensors": list_tensors(s.layout), "segments": s.segments, "file": file, "sum": sum}
            for s, file, sum in zip(r.stripes, r.files, r.sums, strict=True)
        ]
        shards[name] = {"tensors": list_tensors(r.layout), "weights": r.weights, "stripes": stripes}
    head = {"sequence": snapshot.sequence, "step": snapshot.step, "extra": snapshot.extra}
    return head | {"auxiliary": snapshot.auxiliary, "shards": shards}


def parse_manifest(manifest: bytes) -> Snapshot:
    """The snapshot of a manifest. Raises ValueError if it is not as it was written or names files elsewhere, StoreError
    for another format.
    """
    fields = unseal(manifest, FORMAT, "manifest")
    for name in fields["auxiliary"]:
        if not may_be_auxiliary(name):
            raise ValueError(f"{name!r} is not the name of an auxiliary file")
    shards = {name: _record(name, r) for name, r in fields["shards"].items()}
    return Snapshot(fields["sequence"], fields["step"], fields["extra"], fields["auxiliary"], shards)


def may_be_auxiliary(name: str) -> bool:
    """Whether this can be the name of an auxiliary file, and is not a name that snapshots use."""
    return is_auxiliary(name) and name not in (MANIFEST, INDEX)


def _record(name: str, r: dict[str, Any]) -> ShardRecord:
    if not SHARD.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a shard")
    stripes = tuple(
        Stripe(s["device"], parse_tensors(s["tensors"]), tuple(tuple(segment) for segment in s["segments"]))
        for s in r["stripes"]
    )
    files, sums = (tuple(s[key] for s in r["stripes"]) for key in ("file", "sum"))
    return ShardRecord(parse_tensors(r["tensors"]), r["weights"], stripes, files, sums)
