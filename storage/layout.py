"""A unit is a span of bytes with a Layout: the same offsets on the SSD, in RAM and on the GPU.

Tensors lie back to back: safetensors allows no gaps. Groups of multiples of 4,096 bytes come first, so that nearly all
matrices begin on a block boundary, and vectors (norm weights, biases) last, so that weight decay applies to a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The smallest multiple of `to` that is >= n."""
    return -(-n // to) * to


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor in a span. `dtype` is safetensors' word for it; `offset` is in bytes."""

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
    """Named tensors of one span, in order. `nbytes` is exact, `span` is rounded up to 4,096."""

    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return self.tensors[-1].offset + self.tensors[-1].nbytes if self.tensors else 0

    @cached_property
    def span(self) -> int:
        return round_up(self.nbytes)

    def __getitem__(self, name: str) -> TensorSpec:
        for t in self.tensors:
            if t.name == name:
                return t
        raise KeyError(name)


def sequential(specs: Sequence[tuple[str, str, tuple[int, ...]]], align: int = 1) -> Layout:
    """A Layout of (name, dtype, shape) entries in exactly the given order, each at a multiple of `align` bytes."""
    tensors, offset = [], 0
    for name, dtype, shape in specs:
        offset = round_up(offset, align)
        t = TensorSpec(name, dtype, tuple(shape), offset)
        tensors.append(t)
        offset += t.nbytes
    return Layout(tuple(tensors))


def pack(groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]], dtype: str) -> Layout:
    """A Layout of one dtype from groups of (name, shape); a group's members stay neighbours (q, k, v; gate, up).

    Order: matrices in aligned groups, other matrices, then vectors; stable within each class.
    """

    ordered = sorted(groups, key=lambda group: rank(group, dtype))
    return sequential([(name, dtype, shape) for group in ordered for name, shape in group])


def rank(group: Sequence[tuple[str, tuple[int, ...]]], dtype: str) -> int:
    """Where `pack` puts a group: 0 matrices in aligned groups, 1 other matrices, 2 vectors."""
    if any(len(shape) < 2 for _, shape in group):
        return 2
    return 0 if all(prod(shape) * ITEMSIZE[dtype] % ALIGN == 0 for _, shape in group) else 1
