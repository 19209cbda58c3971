"""LoRA adapters: y = x W + scale * (x A^T) B^T, as in peft (Hu et al., arXiv:2106.09685), also of experts.

With dropout the A of each part reads x under a mask of its own, as each module of peft does; backward computes the
masks again. Legend: N tokens, R rank, K adapted parts of a fused layer; E experts, P sorted rows (kernels/experts).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from trireme.kernels import ops


class Dropout(NamedTuple):
    """Dropout of the adapters' inputs in a micro-batch of training."""

    p: float
    key: int  # a hash of the seed and the step
    first: int  # tokens of the step before this micro-batch, so that masks do not depend on how a step is divided


class Adapters(NamedTuple):
    """A layer's adapters, or their gradients."""

    a: Tensor  # (K R, in): one matmul
    b: tuple[Tensor, ...]  # K of (features, R)
    columns: tuple[tuple[int, int], ...]  # of the layer's features
    scales: tuple[float, ...]
    keys: tuple[int, ...] = ()  # of parts, below 2^31
    dropout: Dropout | None = None  # from `dropping`
    merged: bool = False  # the layer's weight has them in it: only gradients are computed with them (rounded.py)

    @property
    def rank(self) -> int:
        return len(self.a) // len(self.b)

    def a_parts(self) -> tuple[Tensor, ...]:
        """The A of each part, (R, in)."""
        return self.a.split(self.rank)


def part_key(name: str) -> int:
    """A key below 2^31 for the dropout masks of the adapter or layer of this name."""
    return crc32(name.encode()) >> 1


def dropping(w: Any, dropout: Dropout | None, offset: int = 0) -> Any:
    """Weights, a tree of named tuples, with this dropout in all their adapters.

    `offset` is added to its `first`: the row at which a tile of tokens begins.
    """
    if dropout is None or not isinstance(w, tuple):
        return w
    if isinstance(w, Adapters):
        return w._replace(dropout=dropout._replace(first=dropout.first + offset))
    parts = (dropping(part, dropout, offset) for part in w)
    return type(w)(*parts) if hasattr(w, "_fields") else tuple(parts)


def dropped(x: Tensor, w: Adapters, part: int, out: Tensor | None = None) -> Tensor:
    """x (N, in) under the dropout mask of a part; of the gradient of that result, the gradient of x."""
    assert w.dropout is not None
    return ops.dropout(x, w.dropout.p, w.dropout.key ^ w.keys[part], w.dropout.first, out)


def down(x: Tensor, w: Adapters) -> tuple[Tensor, ...]:
    """x A^T of each part, K times (N, R), given x (N, in)."""
    if w.dropout is not None:
        return tuple(torch.mm(dropped(x, w, i), a.T) for i, a in enumerate(w.a_parts()))
    return torch.mm(x, w.a.T).split(w.rank, 1)


def add_(out_: Tensor, x: Tensor, w: Adapters, times: float = 1.0) -> None:
    """Adds times * scale * (x A^T) B^T to the columns of out_ (N, out) of each part, given x (N, in)."""
    if w.merged:
        return
    for h, b, (start, stop), scale in zip(down(x, w), w.b, w.columns, w.scales, strict=True):
        out_[:, start:stop].addmm_(h, b.T, alpha=times * scale)


def down_gradient(dy: Tensor, w: Adapters) -> Tensor:
    """The gradient of x A^T, (N, K R), with the scales, given dy (N, out)."""
    parts = [torch.mm(dy[:, start:stop], b) for b, (start, stop) in zip(w.b, w.columns, strict=True)]
    return _scale_(torch.cat(parts, 1) if len(parts) > 1 else parts[0], w)


def add_backward_(dx_: Tensor, dh: Tensor, w: Adapters) -> None:
    """Adds the gradient of x to dx_ (N, in), given `down_gradient`."""
    if w.merged:
        return
    if w.dropout is None:
        dx_.addmm_(dh, w.a)
        return
    for i, (a, dh_part) in enumerate(zip(w.a_parts(), dh.split(w.rank, 1), strict=True)):
        d = torch.mm(dh_part, a)
        dx_.add_(dropped(d, w, i, d))
        del d


def inputs(x: Tensor, w: Adapters) -> Iterator[tuple[slice, Tensor]]:
    """(rows of A, their input (N, in)) by part; all rows at once without dropout, as they read the same x."""
    if w.dropout is None:
        yield slice(None), x
        return
    for i in range(len(w.b)):
        yield slice(i * w.rank, (i + 1) * w.rank), dropped(x, w, i)


def scaled_down(x: Tensor, w: Adapters) -> tuple[Tensor, ...]:
    """scale * x A^T of each part, (N, R)."""
    h = torch.mm(x, w.a.T) if w.dropout is None else torch.cat(down(x, w), 1)
    return _scale_(h, w).split(w.rank, 1)


def _scale_(h_: Tensor, w: Adapters) -> Tensor:
    """Multiplies each part's columns of h_ (N, K R) by its scale."""
    if len(set(w.scales)) == 1:
        return h_.mul_(w.scales[0])
    for part, scale in zip(h_.split(w.rank, 1), w.scales, strict=True):
        part.mul_(scale)
    return h_


class Stacked(NamedTuple):
    """Adapters of a layer's experts, or their gradients: to rows x_e of expert e they add scale * (x_e A_e^T) B_e."""

    a: Tensor  # (E, R, in)
    b: Tensor  # (E, R, out)
    scale: float
    merged: bool = False  # as in Adapters

    def down(self, x: Tensor, order: ops.Order, k: int = 0) -> Tensor:
        """x A^T by sorted row, (P, R), of sorted rows x (P, in), or with k > 0 of tokens x (N, in)."""
        return ops.grouped_mm(x, self.a.mT, order, k)

    def add_(self, out_: Tensor, x: Tensor, order: ops.Order, k: int = 0) -> None:
        """Adds to out_ (P, out)."""
        if not self.merged:
            out_.add_(ops.grouped_mm(self.down(x, order, k), self.b, order), alpha=self.scale)

    def add_backward_(self, dx_: Tensor, dh: Tensor, order: ops.Order) -> None:
        """Adds the gradient of x to dx_ (P, in), given `down_gradient`."""
        if not self.merged:
            dx_.add_(ops.grouped_mm(dh, self.a, order))

    def down_gradient(self, dy: Tensor, order: ops.Order, k: int = 0) -> Tensor:
        """The gradient of `down`, (P, R), given dy (P, out), or with k > 0 dy (N, out) by token."""
        return ops.grouped_mm(dy, self.b.mT, order, k).mul_(self.scale)


def initial(name: str, shape: tuple[int, ...], std: float = 0.0) -> Tensor:
    """Initial values of a new tensor, fp32, seeded by its name, as in peft: A uniform within +-1/sqrt(in), B zero.

    Another tensor is a new score head: normally distributed with this standard deviation.
    """
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    if not name.endswith(".lora_A.weight"):
        return torch.randn(shape, generator=generator) * std
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
