"""The layout of a unit's buffer: tensors have the same offsets on the SSD, in RAM and on the GPU.

There are no gaps, as safetensors requires. Groups whose size is a multiple of 4,096 bytes come first, so most matrices
are aligned to blocks. Vectors come last, so that weight decay applies to a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGN = 4096
ITEMSIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
}


def round_up(n: int, to: int = ALIGN) -> int:
    """The next multiple of `to`."""
    return -(-n // to) * to


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in a layout. `dtype` as safetensors writes it, `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Tensors in the order of their offsets; `span` is `nbytes` rounded up to 4,096."""

    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return self.tensors[-1].offset + self.tensors[-1].nbytes if self.tensors else 0

    @cached_property
    def span(self) -> int:
        return round_up(self.nbytes)

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {t.name: t for t in self.tensors}

    def __getitem__(self, name: str) -> TensorSpec:
        return self._by_name[name]


def sequential(specs: Sequence[tuple[str, str, tuple[int, ...]]], align: int = 1) -> Layout:
    """A layout of (name, dtype, shape) in this order, each at a multiple of `align` bytes."""
    tensors, offset = [], 0
    for name, dtype, shape in specs:
        offset = round_up(offset, align)
        t = TensorSpec(name, dtype, tuple(shape), offset)
        tensors.append(t)
        offset += t.nbytes
    return Layout(tuple(tensors))


def pack(
    groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]], dtype: str, others: Mapping[str, str] | None = None
) -> Layout:
    """A layout of groups of (name, shape), sorted by `rank`. Members of a group stay neighbours (q, k, v; gate, up).

    `others`: name -> dtype of tensors that have another one. Wider ones stand before the vectors; those that would put
    what follows at an odd address stand among the vectors.
    """
    others = others or {}
    of = lambda name: others.get(name, dtype)

    def place(group: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, int, bool]:
        name, size = group[0][0], ITEMSIZE[of(group[0][0])]
        odd = name in others and size * sum(prod(shape) for _, shape in group) % 16 > 0
        return 2 if odd else rank(group, of(name)), -size, odd

    ordered = sorted(groups, key=place)
    return sequential([(name, of(name), shape) for group in ordered for name, shape in group])


def rank(group: Sequence[tuple[str, tuple[int, ...]]], dtype: str) -> int:
    """The order of a group: 0 matrices that fill blocks of 4,096 bytes, 1 other matrices, 2 vectors."""
    if any(len(shape) < 2 for _, shape in group):
        return 2
    return 0 if all(prod(shape) * ITEMSIZE[dtype] % ALIGN == 0 for _, shape in group) else 1
