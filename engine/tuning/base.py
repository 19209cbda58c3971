"""Frozen weights read from the user's checkpoint: where they are stored, and whether they are unchanged."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from trireme.engine.geometry import Geometry, geometry
from trireme.engine.placement import Piece
from trireme.engine.plan import Plan
from trireme.models.config import ModelConfig
from trireme.models.sizes.narrow import FP8, in_file
from trireme.storage.aio import IO, File, together
from trireme.storage.checkpoint import Source
from trireme.storage.devices import Device
from trireme.storage.files import StoreError, existing
from trireme.storage.layout import ALIGN, ITEMSIZE, Layout, TensorSpec, round_up

Stamps = dict[Path, tuple[int, int, int]]  # file -> its number, bytes and time of change


class Extent(NamedTuple):
    """Whole blocks of a file, and the first byte to which they are read in a buffer."""

    file: str
    offset: int
    nbytes: int
    first: int


def extents_of(layout: Layout, source: Source, stored: Mapping[str, str]) -> tuple[list[Extent], list[Piece]]:
    """How a unit's frozen weights are read: the extents of its tensors, neighbours joined, and the tensors in them.
    `stored`: their names in `source`.
    """
    places = list[tuple[str, int, TensorSpec]]()
    for t in layout.tensors:
        name, first = in_file(t.name, t.numel)
        place = source.place(stored[name])
        places.append((place.file, place.offset + first * ITEMSIZE[t.dtype], t))
    extents, pieces = list[Extent](), list[Piece]()
    for file, offset, t in sorted(places, key=lambda place: place[:2]):
        begin, end = offset // ALIGN * ALIGN, round_up(offset + t.nbytes)
        last = extents[-1] if extents else Extent("", 0, 0, 0)
        if last.file == file and begin <= last.offset + last.nbytes:
            extents[-1] = last._replace(nbytes=max(last.nbytes, end - last.offset))
        else:
            extents.append(Extent(file, begin, end - begin, last.first + last.nbytes))
        pieces.append(Piece(extents[-1].first + offset - extents[-1].offset, t.offset, t.nbytes))
    return extents, pieces


def read_from_ssd(geo: Geometry, plan: Plan) -> dict[int, Layout]:
    """The layouts of frozen weights that the plan has on the SSD, by unit, with a checkpoint's names of tensors."""
    return {v: layout for v, layout in enumerate(geo.stored_base) if plan.units[geo.unit_of(v)].base == "ssd"}


class CheckpointBase:
    """Reads frozen weights from a checkpoint, as placement.BaseFiles, each file by the requests of its drive."""

    def __init__(
        self, layouts: Mapping[int, Layout], source: Source, stored: Mapping[str, str], devices: Sequence[Device]
    ):
        """`layouts`: of units on the SSD; `devices`: the files' drives. Raises StoreError if a file is not opened."""
        self.ways = {u: extents_of(layout, source, stored) for u, layout in layouts.items()}
        self.files = dict[str, tuple[File, int, IO]]()  # with its bytes, and the requests of its drive
        drives = {device.path.stat().st_dev: device for device in reversed(devices)}
        try:
            for name in {extent.file for extents, _ in self.ways.values() for extent in extents}:
                path = source.folder / name
                device = drives.get(existing(path).stat().st_dev, devices[0])
                file = File(path, device.direct, write=False)
                self.files[name] = file, os.fstat(file.fd).st_size, device.io
        except StoreError:
            self.close()
            raise

    def read(self, u: int, buffer: memoryview) -> Future[None]:
        requests = []
        for name, offset, nbytes, first in self.ways[u][0]:
            file, size, io = self.files[name]
            need = min(nbytes, size - offset)  # the last block of a file may end early
            requests.append(io.read(file, offset, buffer[first : first + nbytes], need))
        return together(requests)

    def pieces(self, u: int) -> Sequence[Piece]:
        return self.ways[u][1]

    def close(self) -> None:
        for file, _, _ in self.files.values():
            file.close()


def why_copied(cfg: ModelConfig, dtype: str, source: Source, stored: Mapping[str, str], stores: Sequence[Path]) -> str:
    """Why frozen weights cannot be read from the checkpoint itself; "" if they can. `stores`: folders that the run
    writes.
    """
    frozen = {t.name: t.dtype for layout in geometry(cfg, dtype, 32).stored_base for t in layout.tensors}
    if any(name.endswith(FP8) for name in frozen):
        return "they are kept in fp8"
    if any(name not in stored for name in frozen):
        return "they are stored in other shapes"
    places = {name: source.place(stored[name]) for name in frozen}
    if not all(place.file for place in places.values()):
        return "they are converted as they are read"
    if other := {place.dtype for name, place in places.items() if place.dtype != frozen[name]}:
        return f"they are {', '.join(sorted(other))}, and computed with in {dtype}"
    drives = {existing(source.folder / place.file).stat().st_dev for place in places.values()}
    if drives - {existing(folder).stat().st_dev for folder in stores}:
        return f"{source.folder} is on another drive than {' and '.join(map(str, stores))}"
    return ""


# ---------------------------------------------------------------- a base that changes


def stamps(source: Source) -> Stamps:
    """Sizes and times of files, which tell whether they have changed."""
    return {source.folder / name: _stamp(source.folder / name) for name in source.files}


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_unchanged(before: Stamps, why: str = "was changed while the run trained on top of it") -> None:
    """Raises StoreError if a file is not as it was for `stamps`."""
    for path, stamp in before.items():
        if not path.exists() or _stamp(path) != stamp:
            raise StoreError(errno.ESTALE, f"{why}; restore it", str(path))
