"""Packed matrices with new values, in the packing that they have: what `merge --format same` writes.

All else of a checkpoint is copied byte for byte, with its config.json. Some rows of a matrix, or one expert, are in
memory at a time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import sqrt

import numpy as np

from trireme.engine.tuning.bitsandbytes import Nested
from trireme.engine.tuning.packed_source import Packed
from trireme.engine.tuning.quantized import Encoder, Rows
from trireme.models import encoding
from trireme.models.packed import decoded
from trireme.storage.checkpoint import Source, open_source

Squares = list[float]  # sums of squares: of what rounding changed, and of the values


@dataclass
class Matrix:
    """A packed matrix, or those of all experts, with new values."""

    encoder: Encoder
    squares: Squares
    nested: Nested | None  # how the scales of NF4 are packed themselves
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
        others = list[list[np.ndarray]]([] for _ in self.encoder.packing.parts[1:])
        for codes, *arrays in self._strips():
            for array, pieces in zip(arrays, others, strict=True):
                pieces.append(array.view(np.uint8))
            yield codes.view(np.uint8)
        if self.nested:
            others = [[part] for part in self.nested.again(np.concatenate(others[0]).view(np.float32))]
        self.ready = dict(enumerate(others, 1))

    def _strips(self) -> Iterator[tuple[np.ndarray, ...]]:
        """The parts of some rows after another."""
        packing, shape, rows = self.encoder.packing, self.encoder.shape[-2:], self.encoder.rows
        for _, group in groupby(self.encoder.spans(), lambda span: span[0] // shape[0]):  # of each expert
            spans, extent = list(group), 0.0
            if encoding.needs_extent(packing):
                extent = max(float(np.abs(rows(a, b)).max()) for a, b in spans)
            for a, b in spans:
                values = rows(a, b)
                arrays = encoding.encode(packing, values, extent)
                self._compare(values, arrays)
                # Of a part with one element for the whole matrix, that of the first strip counts.
                passed = [a > spans[0][0] and not start for start in packing.starts(shape, a - spans[0][0])]
                yield tuple(array[:0] if past else array for array, past in zip(arrays, passed, strict=True))

    def _compare(self, values: np.ndarray, arrays: tuple[np.ndarray, ...]) -> None:
        packing = self.encoder.packing
        shape = (1, *values.shape) if packing.code == "e2m1" else values.shape
        described = zip(arrays, packing.parts, packing.shapes(shape), strict=True)
        parts = [(array.view(np.uint8), part.dtypes[0], own) for array, part, own in described]
        rounded = decoded(packing, parts, shape, "F32").reshape(values.shape)
        self.squares[0] += float(np.square(rounded - values, dtype=np.float64).sum())
        self.squares[1] += float(np.square(values, dtype=np.float64).sum())


@dataclass(frozen=True)
class Repacked:
    """A packed checkpoint with new values of some matrices."""

    raw: Source  # all its tensors as files have them
    places: Mapping[str, tuple[Matrix, int]]  # of a tensor of `raw`: the matrix and the number of its part
    squares: Mapping[str, Squares]  # by kind of matrix

    def values(self, name: str) -> Iterator[np.ndarray]:
        """Bytes of a part of a changed matrix, by its name in the files."""
        matrix, part = self.places[name]
        return matrix.part(part)

    def errors(self) -> str:
        """The relative error of rounding by kind of matrix, for the user."""
        each = {kind: sqrt(changed / all_) if all_ else 0.0 for kind, (changed, all_) in self.squares.items()}
        return ", ".join(f"{kind} {error:.2%}" for kind, error in each.items())


def repacked(source: Packed, rows: Mapping[str, Rows]) -> Repacked:
    """`source` with other rows of the packed matrices that are named, in its own format."""
    raw = replace(open_source(source.folder, lambda _: None), auxiliary=source.auxiliary)
    names = {(t.file, t.offset): name for name, t in raw.tensors.items()}
    places, squares = dict[str, tuple[Matrix, int]](), defaultdict[str, Squares](lambda: [0.0, 0.0])
    for stored, new in rows.items():
        packing = source.packing.of(stored)
        scales = source.made.get(stored + packing.parts[1].suffix)
        nested = scales if isinstance(scales, Nested) else None
        kind = re.sub(r"\.\d+", "", stored).removesuffix(".weight").removeprefix("model.layers.")
        matrix = Matrix(Encoder(packing, source.tensors[stored].shape, new), squares[kind], nested)
        parts = [source.parts[stored + part.suffix] for part in packing.parts]
        for i, t in enumerate([parts[0], nested.codes, nested.scales] if nested else parts):
            places[names[t.file, t.offset]] = matrix, i
    return Repacked(raw, places, squares)
