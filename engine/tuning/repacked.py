"""Packed matrices with new values, in the packing that they have: what `merge --format same` writes.

All else of a checkpoint is copied byte for byte, with its config.json. Some rows of a matrix, or one expert, are in
memory at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod, sqrt

import numpy as np

from trireme.engine.tuning.bitsandbytes import NESTED_BLOCK, Nested
from trireme.engine.tuning.packed_source import Packed
from trireme.models import encoding
from trireme.models.config import Packing
from trireme.models.packed import decoded
from trireme.storage.checkpoint import Source, open_source

STRIP = 1 << 22  # elements of a matrix that are encoded at a time
Rows = Callable[
    [int, int], np.ndarray
]  # values (b - a, columns), fp32, of rows [a, b) of all experts one after another
Squares = list[float]  # sums of squares: of what rounding changed, and of the values


@dataclass
class Matrix:
    """A packed matrix, or those of all experts, with new values."""

    packing: Packing
    shape: tuple[int, ...]
    rows: Rows
    squares: Squares
    nested: Nested | None = None  # how the scales of NF4 are packed themselves
    ready: dict[int, list[np.ndarray]] = field(default_factory=dict)  # parts that were made together with the codes

    def part(self, index: int) -> Iterator[np.ndarray]:
        """Bytes of a part. Those behind the codes in the file were made with these."""
        if index in self.ready:
            yield from self.ready.pop(index)
            return
        self.ready = {i: [] for i in range(1, len(self.packing.parts))} if index == 0 else {}
        for arrays in self._strips():
            for i, pieces in self.ready.items():
                pieces.append(arrays[i].view(np.uint8))
            yield arrays[index].view(np.uint8)

    def scales_of_scales(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(codes, scales) of the scales of NF4, as bitsandbytes packs them again; the offset stays."""
        assert self.nested
        scales = np.concatenate(list(self.part(1))).view(np.float32) - self.nested.offset
        middles = (self.nested.table[1:] + self.nested.table[:-1]) / 2
        for a in range(0, len(scales), NESTED_BLOCK):
            block = scales[a : a + NESTED_BLOCK]
            most = np.abs(block).max()
            yield np.searchsorted(middles, block / (most or 1)).astype(np.uint8), most.reshape(1)

    def _strips(self) -> Iterator[tuple[np.ndarray, ...]]:
        """The parts of some rows after another."""
        rows, columns = shape = self.shape[-2:]
        step = rows if self.packing.code == "e2m1" else self.packing.step(shape)
        step *= max(1, STRIP // (step * columns))
        for first in range(0, prod(self.shape[:-1]), rows):  # the first row of each expert
            strips = [(first + a, first + min(a + step, rows)) for a in range(0, rows, step)]
            extent = 0.0
            if encoding.needs_extent(self.packing):
                extent = max(float(np.abs(self.rows(a, b)).max()) for a, b in strips)
            for a, b in strips:
                values = self.rows(a, b)
                arrays = encoding.encode(self.packing, values, extent)
                self._compare(values, arrays)
                # Of a part with one element for the whole matrix, that of the first strip counts.
                begun = [a > first and start == 0 for start in self.packing.starts(shape, a - first)]
                yield tuple(array[:0] if past else array for array, past in zip(arrays, begun, strict=True))

    def _compare(self, values: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        shape = (1, *values.shape) if self.packing.code == "e2m1" else values.shape
        described = zip(arrays, self.packing.parts, self.packing.shapes(shape), strict=True)
        parts = [(array.view(np.uint8), part.dtypes[0], own) for array, part, own in described]
        rounded = decoded(self.packing, parts, shape, "F32").reshape(values.shape)
        self.squares[0] += float(np.square(rounded - values, dtype=np.float64).sum())
        self.squares[1] += float(np.square(values, dtype=np.float64).sum())


@dataclass(frozen=True)
class Repacked:
    """`source` with new values of some packed matrices. `raw`: the same folder with all tensors as files have them."""

    raw: Source
    owners: Mapping[str, tuple[str, int]]  # of a tensor of `raw`: a matrix of `source`, and the number of its part
    matrices: Mapping[str, Matrix]
    squares: Mapping[str, Squares]  # by kind of matrix
    nested: dict[str, np.ndarray] = field(default_factory=dict)  # scales of scales that were made with their codes

    def values(self, name: str) -> Iterator[np.ndarray]:
        """Bytes of a part of a changed matrix, by its name in the files."""
        stored, index = self.owners[name]
        matrix = self.matrices[stored]
        if index < len(matrix.packing.parts) and not (index == 1 and matrix.nested):
            yield from matrix.part(index)
        elif index == 1:
            codes, scales = zip(*matrix.scales_of_scales(), strict=True)
            self.nested[stored] = np.concatenate(scales)
            yield np.concatenate(codes)
        else:
            if stored not in self.nested:
                self.nested[stored] = np.concatenate([scales for _, scales in matrix.scales_of_scales()])
            yield self.nested.pop(stored).view(np.uint8)

    def errors(self) -> str:
        """The relative error of rounding by kind of matrix, for the user."""
        each = {kind: sqrt(changed / all_) if all_ else 0.0 for kind, (changed, all_) in self.squares.items()}
        return ", ".join(f"{kind} {error:.2%}" for kind, error in each.items())


def repacked(source: Packed, rows: Mapping[str, Rows]) -> Repacked:
    """`source` with other rows of the packed matrices that are named, in its own format."""
    raw = replace(open_source(source.folder, lambda _: None), auxiliary=source.auxiliary)
    places = {(t.file, t.offset): name for name, t in raw.tensors.items()}
    owners, matrices = dict[str, tuple[str, int]](), dict[str, Matrix]()
    squares = defaultdict[str, Squares](lambda: [0.0, 0.0])
    for stored, new in rows.items():
        packing, nested = source.packing.of(stored), None
        for i, part in enumerate(packing.parts):
            made = source.made.get(stored + part.suffix)
            if isinstance(made, Nested):
                nested = made
                owners[places[made.codes.file, made.codes.offset]] = stored, i
                owners[places[made.scales.file, made.scales.offset]] = stored, len(packing.parts)
            else:
                t = source.parts[stored + part.suffix]
                owners[places[t.file, t.offset]] = stored, i
        kind = re.sub(r"\.\d+", "", stored).removesuffix(".weight").removeprefix("model.layers.")
        matrices[stored] = Matrix(packing, source.tensors[stored].shape, new, squares[kind], nested)
    return Repacked(raw, owners, matrices, squares)
