"""Snapshots on disk: a folder of hard links, a manifest, and an index, so that it is a Hugging Face checkpoint too.

A snapshot is made under another name and becomes one by the rename of its folder on the first device, after every byte
that it names has been synced. It ends in the reverse order. So at every instant, also after a power failure, a folder
with a snapshot's name on the first device is complete.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trireme.storage.checkpoint import INDEX
from trireme.storage.files import StoreError, replace_synced, sync_folder, write_synced
from trireme.storage.layout import Layout, TensorSpec
from trireme.storage.stripes import Stripe
from trireme.storage.versions import FOLDER

MANIFEST = "manifest.json"
FORMAT = 1
NAME = re.compile(r"snapshot-(\d{6,})-step-(\d+)")
LEFTOVER = re.compile(NAME.pattern + r"\.(partial|dropped)")


@dataclass(frozen=True)
class Record:
    """One span in a snapshot: `files` holds the id of the version of each stripe."""

    layout: Layout
    weights: bool
    stripes: tuple[Stripe, ...]
    files: tuple[int, ...]

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(device, id) of each file."""
        return [(stripe.device, id) for stripe, id in zip(self.stripes, self.files, strict=True)]


@dataclass(frozen=True)
class Snapshot:
    sequence: int
    step: int
    extra: dict
    companions: tuple[str, ...]
    shards: dict[str, Record]

    @property
    def folder(self) -> str:
        return f"snapshot-{self.sequence:06d}-step-{self.step}"

    def links(self) -> list[tuple[int, str, int]]:
        """(device, name in the snapshot's folder, id of the file) of everything."""
        found = []
        for name, record in self.shards.items():
            for k, (device, id) in enumerate(record.keys):
                found.append((device, f"{name}.safetensors" if k == 0 else f"{name}.{k}.safetensors", id))
        return found

    def index(self, prefix: str = "") -> bytes:
        """Hugging Face's index of the weights, with `prefix` before each file name."""
        weight_map, total = {}, 0
        for name, record in self.shards.items():
            for k, stripe in enumerate(record.stripes if record.weights else ()):
                file = f"{prefix}{name}.safetensors" if k == 0 else f"{prefix}{name}.{k}.safetensors"
                weight_map |= {t.name: file for t in stripe.layout.tensors}
                total += stripe.layout.nbytes
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()


def write(snapshot: Snapshot, devices: Sequence[Path]) -> None:
    """Makes the snapshot; the files that it names must be synced already. Raises StoreError, leaving nothing."""
    first = devices[0]
    partial = first / f"{snapshot.folder}.partial"
    places = [partial, *(device / snapshot.folder for device in devices[1:])]
    try:
        for place in places:
            os.mkdir(place)
        for device, name, id in snapshot.links():
            os.link(devices[device] / FOLDER / f"{id:06d}.safetensors", places[device] / name)
            if device:  # readers of the first folder find it too
                os.symlink((places[device] / name).resolve(), partial / name)
        for name in snapshot.companions:
            (partial / name).parent.mkdir(exist_ok=True)
            os.link(first / name, partial / name)
        write_synced(partial / INDEX, [snapshot.index()])
        write_synced(partial / MANIFEST, [json.dumps(_to_json(snapshot)).encode()])
        for place in places:
            for folder in {p.parent for p in place.rglob("*")} | {place}:
                sync_folder(folder)
        for device in devices[1:]:
            sync_folder(device)
        os.rename(partial, first / snapshot.folder)  # from here on it is a snapshot
    except BaseException as e:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)
        if isinstance(e, OSError) and not isinstance(e, StoreError):
            raise StoreError(e.errno, f"{e.strerror}, making a snapshot", e.filename or str(partial)) from e
        raise


def publish(snapshot: Snapshot, first: Path) -> None:
    """Makes the snapshot's name durable and points the index of the store's own folder at it."""
    sync_folder(first)
    if any(record.weights for record in snapshot.shards.values()):
        replace_synced(first / INDEX, snapshot.index(f"{snapshot.folder}/"))


def remove(snapshot: Snapshot, devices: Sequence[Path]) -> None:
    """Ends a snapshot. Its files may be written again only afterwards."""
    dropped = devices[0] / f"{snapshot.folder}.dropped"
    try:
        os.rename(devices[0] / snapshot.folder, dropped)
        sync_folder(devices[0])
        for place in (dropped, *(device / snapshot.folder for device in devices[1:])):
            shutil.rmtree(place)
    except OSError as e:
        raise StoreError(e.errno, f"{e.strerror}, removing a snapshot", e.filename or str(dropped)) from e


def folders(device: Path) -> list[str]:
    """Names of the snapshots in a device's folder, oldest first."""
    found = [p.name for p in device.iterdir() if NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
    return sorted(found, key=lambda name: int(NAME.fullmatch(name)[1]))


def load(first: Path) -> list[Snapshot]:
    """The snapshots in the first device's folder, oldest first."""
    return [_read(first / name) for name in folders(first)]


def _read(folder: Path) -> Snapshot:
    path = folder / MANIFEST
    try:
        return parse(path.read_bytes())
    except OSError as e:
        raise StoreError(e.errno, e.strerror, str(path)) from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise StoreError(
            errno.EIO, f"is damaged ({e}). Remove this snapshot's folder to go back to the one before", str(path)
        ) from e


def check(snapshot: Snapshot, devices: Sequence[Path]) -> None:
    """Raises StoreError unless every file of the snapshot is there, has its size and begins with its header.

    Where a copy of the run has parted a hard link into two files, the snapshot's is the one that counts.
    """
    stripes = [stripe for record in snapshot.shards.values() for stripe in record.stripes]
    for (device, name, id), stripe in zip(snapshot.links(), stripes, strict=True):
        path = devices[device] / snapshot.folder / name
        try:
            with open(path, "rb") as f:
                status, header = os.fstat(f.fileno()), f.read(len(stripe.header))
            if status.st_size != stripe.nbytes or header != stripe.header:
                message = f"was changed: {status.st_size} bytes of {stripe.nbytes}. Remove {snapshot.folder} to go back"
                raise StoreError(errno.EIO, message, str(path))
            _link(path, devices[device] / FOLDER / f"{id:06d}.safetensors")
        except OSError as e:
            raise e if isinstance(e, StoreError) else StoreError(e.errno, e.strerror, e.filename or str(path)) from e


def _link(path: Path, name: Path) -> None:
    """Makes `name` another name of the file `path`, unless it is one."""
    if not (name.exists() and name.samefile(path)):
        partial = name.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        os.link(path, partial)
        os.replace(partial, name)


def clean(devices: Sequence[Path], valid: set[str]) -> None:
    """Removes what a crash left of snapshots that were being made or removed. Nothing else is touched."""
    for k, device in enumerate(devices):
        for path in list(device.iterdir()):
            orphan = k > 0 and NAME.fullmatch(path.name) and path.name not in valid
            if (orphan or LEFTOVER.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def _to_json(snapshot: Snapshot) -> dict:
    shards = {}
    for name, r in snapshot.shards.items():
        stripes = [{"device": s.device, "tensors": _rows(s.layout), "segments": s.segments} for s in r.stripes]
        shards[name] = {"tensors": _rows(r.layout), "weights": r.weights, "stripes": stripes, "files": r.files}
    head = {"format": FORMAT, "sequence": snapshot.sequence, "step": snapshot.step, "extra": snapshot.extra}
    return {**head, "companions": snapshot.companions, "shards": shards}


def parse(manifest: bytes) -> Snapshot:
    """The snapshot that a manifest describes. Raises StoreError where its format is another one; else ValueError,
    KeyError, TypeError or AttributeError.
    """
    content, shards = json.loads(manifest), {}
    if content["format"] != FORMAT:
        message = f"is of format {content['format']}, this version reads {FORMAT}. Go on with the version that wrote it"
        raise StoreError(errno.EINVAL, message)
    for name, r in content["shards"].items():
        stripes = tuple(
            Stripe(s["device"], _layout(s["tensors"]), tuple(tuple(segment) for segment in s["segments"]))
            for s in r["stripes"]
        )
        shards[name] = Record(_layout(r["tensors"]), r["weights"], stripes, tuple(r["files"]))
    return Snapshot(content["sequence"], content["step"], content["extra"], tuple(content["companions"]), shards)


def _rows(layout: Layout) -> list:
    return [[t.name, t.dtype, t.shape, t.offset] for t in layout.tensors]


def _layout(rows: list) -> Layout:
    return Layout(tuple(TensorSpec(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in rows))
