"""Packed matrices with new values, in the packing that they have: what `merge --format same` writes.

All else of a checkpoint is copied byte for byte, with its config.json. Some rows of a matrix, or one expert, are in
memory at a time, and are encoded where their new values are: on a GPU or the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from trireme.engine.tuning.bitsandbytes import Nested
from trireme.engine.tuning.packed_source import Packed, strips
from trireme.models import encoding
from trireme.models.config import InputError, Packing
from trireme.models.packed import damage, decode
from trireme.storage.checkpoint import Source, open_source

Squares = list[tuple[float, float]]  # sums of squares by strip: of what rounding changed, and of the values
NewRows = Callable[[int, int], Tensor]  # fp32 (b - a, columns) of rows [a, b), of all matrices one after another


@dataclass
class Matrix:
    """A packed matrix, or those of all experts, with new values."""

    name: str
    packing: Packing
    shape: tuple[int, ...]  # (rows, columns), or (matrices, rows, columns)
    rows: NewRows
    most: int  # elements at a time
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
        later = list[list[np.ndarray]]([] for _ in self.packing.parts[1:])
        for codes, *arrays in self._strips():
            for array, pieces in zip(arrays, later, strict=True):
                pieces.append(array.view(np.uint8))
            yield codes.view(np.uint8)
        if self.nested:
            later = [[part] for part in self.nested.again(np.concatenate(later[0]).view(np.float32))]
        self.ready = dict(enumerate(later, 1))

    def _strips(self) -> Iterator[tuple[np.ndarray, ...]]:
        """The parts of some rows after another."""
        packing, shape, rows = self.packing, self.shape[-2:], lru_cache(1)(self.rows)  # one strip is made once
        for of_expert in strips(packing, self.shape, self.most):
            first, extent = of_expert[0][0], torch.zeros(1)
            if encoding.needs_extent(packing):
                extent = torch.stack([rows(a, b).abs().max() for a, b in of_expert]).max()[None]
            for a, b in of_expert:
                values = rows(a, b)[None]
                parts = encoding.encoded(packing, values, extent.to(values.device))
                self._compare(values, parts)
                # Of a part with one element for the whole matrix, that of the first strip counts.
                started = zip(parts, packing.starts(shape, a - first), strict=True)
                arrays = encoding.arrays(part[:0] if a > first and not start else part for part, start in started)
                if any(map(partial(damage, packing), packing.parts[1:], arrays[1:])):
                    beyond = f"with the adapter, values are beyond {packing.word}"
                    raise InputError(f"{self.name}: {beyond}. Is its lora_alpha right?")
                yield arrays

    def _compare(self, values: Tensor, parts: tuple[Tensor, ...]) -> None:
        shapes = self.packing.shapes(values.shape)
        stored = [part.contiguous().view(shape) for part, shape in zip(parts, shapes, strict=True)]
        rounded = decode(self.packing, stored, torch.empty(values.shape, device=values.device))
        norm = lambda x: float(torch.linalg.vector_norm(x, dtype=torch.float64))
        self.squares.append((norm(rounded - values) ** 2, norm(values) ** 2))


@dataclass(frozen=True)
class Repacked:
    """A packed checkpoint with new values of some matrices."""

    raw: Source  # all its tensors as files have them
    places: Mapping[str, tuple[Matrix, int]]  # of a tensor of `raw`: the matrix and the number of its part
    squares: Mapping[str, Squares]  # by kind of matrix

    def values(self, name: str) -> Iterator[np.ndarray] | None:
        """Bytes of a part of a changed matrix, by its name in the files; None of other tensors."""
        matrix, part = self.places.get(name, (None, 0))
        return matrix.part(part) if matrix else None

    def errors(self) -> str:
        """The relative error of rounding by kind of matrix, for the user."""
        sums = {kind: [sum(strip) for strip in zip(*squares, strict=True)] for kind, squares in self.squares.items()}
        return ", ".join(f"{kind} {sqrt(changed / (of_all or 1.0)):.2%}" for kind, (changed, of_all) in sums.items())


def repacked(source: Packed, rows: Mapping[str, NewRows], most: int) -> Repacked:
    """`source` with other rows of the packed matrices that are named, in its own format; `most` elements at a time."""
    raw = replace(open_source(source.folder, lambda _: None), auxiliary=source.auxiliary)
    names = {(t.file, t.offset): name for name, t in raw.tensors.items()}
    places, squares = dict[str, tuple[Matrix, int]](), dict[str, Squares]()
    for stored, new in rows.items():
        packing = source.packing.of(stored)
        scales = source.made.get(stored + packing.parts[1].suffix)
        nested = scales if isinstance(scales, Nested) else None
        kind = re.sub(r"\.\d+", "", stored).removesuffix(".weight").removeprefix("model.layers.")
        matrix = Matrix(stored, packing, source.tensors[stored].shape, new, most, squares.setdefault(kind, []), nested)
        parts = [source.parts[stored + part.suffix] for part in packing.parts]
        for i, t in enumerate([parts[0], nested.codes, nested.scales] if nested else parts):
            places[names[t.file, t.offset]] = matrix, i
    return Repacked(raw, places, squares)
