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
Rows = Callable[[int, int], np.ndarray]  # fp32 (b - a, columns) of rows [a, b), of all experts one after another
Squares = list[float]  # sums of squares: of what rounding changed, and of the values


@dataclass
class Matrix:
    """A packed matrix, or those of all experts, with new values."""

    packing: Packing
    shape: tuple[int, ...]
    rows: Rows
    squares: Squares
    nested: Nested | None = None  # how the scales of NF4 are packed themselves
    ready: dict[int, list[np.ndarray]] = field(default_factory=dict)  # parts that were made with the codes, by number

    def part(self, index: int) -> Iterator[np.ndarray]:
        """Bytes of a part, in the order of the packing; of NF4 that packs its scales again, of three: codes, codes of
        scales, scales of these. All but the first are made together with it, and wait until they are asked for.
        """
        if index == 0:
            yield from self._codes()
            return
        if index not in self.ready:  # it lies before the codes in the file
            for _ in self._codes():
                pass
        yield from self.ready.pop(index)

    def _codes(self) -> Iterator[np.ndarray]:
        others = list[list[np.ndarray]]([] for _ in self.packing.parts[1:])
        for codes, *arrays in self._strips():
            for array, pieces in zip(arrays, others, strict=True):
                pieces.append(array.view(np.uint8))
            yield codes.view(np.uint8)
        if self.nested:
            others = [[part] for part in self._nested(np.concatenate(others[0]).view(np.float32), self.nested)]
        self.ready = dict(enumerate(others, 1))

    @staticmethod
    def _nested(scales: np.ndarray, nested: Nested) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) as bytes, of the scales of NF4, as bitsandbytes packs them again; the offset stays."""
        middles = (nested.table[1:] + nested.table[:-1]) / 2
        blocks = np.split(scales - nested.offset, range(NESTED_BLOCK, len(scales), NESTED_BLOCK))
        most = np.array([np.abs(block).max() for block in blocks])
        codes = [np.searchsorted(middles, block / (of or 1)) for block, of in zip(blocks, most, strict=True)]
        return np.concatenate(codes).astype(np.uint8), most.view(np.uint8)

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

    def values(self, name: str) -> Iterator[np.ndarray]:
        """Bytes of a part of a changed matrix, by its name in the files."""
        stored, index = self.owners[name]
        return self.matrices[stored].part(index)

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
                owners |= {places[made.codes.file, made.codes.offset]: (stored, i)}
                owners |= {places[made.scales.file, made.scales.offset]: (stored, i + 1)}
            else:
                t = source.parts[stored + part.suffix]
                owners[places[t.file, t.offset]] = stored, i
        kind = re.sub(r"\.\d+", "", stored).removesuffix(".weight").removeprefix("model.layers.")
        matrices[stored] = Matrix(packing, source.tensors[stored].shape, new, squares[kind], nested)
    return Repacked(raw, owners, matrices, squares)
