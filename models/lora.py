"""LoRA adapters: y = x W + scale * (x A^T) B^T, as in peft (Hu et al., arXiv:2106.09685), also of experts.

Legend: R rank, K adapted parts of a fused layer; E experts, P sorted rows (kernels/experts).
"""

from __future__ import annotations

import math
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from trireme.kernels import ops


class Adapters(NamedTuple):
    """A layer's adapters, or their gradients."""

    a: Tensor  # (K R, in): one matmul
    b: tuple[Tensor, ...]  # K of (features, R)
    columns: tuple[tuple[int, int], ...]  # of the layer's features
    scales: tuple[float, ...]


def down(x: Tensor, w: Adapters) -> tuple[Tensor, ...]:
    """x A^T of each part, (N, R)."""
    return torch.mm(x, w.a.T).split(len(w.a) // len(w.b), 1)


def add_(out_: Tensor, x: Tensor, w: Adapters, times: float = 1.0) -> None:
    """out_ += times * scale * (x A^T) B^T."""
    for h, b, (start, stop), scale in zip(down(x, w), w.b, w.columns, w.scales, strict=True):
        out_[:, start:stop].addmm_(h, b.T, alpha=times * scale)


def down_gradient(dy: Tensor, w: Adapters) -> Tensor:
    """Gradient of x A^T, (N, K R), given dy (N, out)."""
    parts = [torch.mm(dy[:, start:stop], b) for b, (start, stop) in zip(w.b, w.columns, strict=True)]
    return _scale_(torch.cat(parts, 1), w)


def scaled_down(x: Tensor, w: Adapters) -> tuple[Tensor, ...]:
    """scale * x A^T of each part, (N, R)."""
    return _scale_(torch.mm(x, w.a.T), w).split(len(w.a) // len(w.b), 1)


def _scale_(h_: Tensor, w: Adapters) -> Tensor:
    """Multiplies each part's columns of h_ (N, K R) by its scale."""
    if len(set(w.scales)) == 1:
        return h_.mul_(w.scales[0])
    for part, scale in zip(h_.split(len(w.a) // len(w.b), 1), w.scales, strict=True):
        part.mul_(scale)
    return h_


class Stacked(NamedTuple):
    """Adapters of a layer's experts, or their gradients: rows x_e by expert get scale * (x_e A_e^T) B_e."""

    a: Tensor  # (E, R, in)
    b: Tensor  # (E, R, out)
    scale: float

    def down(self, x: Tensor, order: ops.Order, k: int = 0) -> Tensor:
        """(P, R) of sorted rows x (P, in), or with k of tokens."""
        return ops.grouped_mm(x, self.a.mT, order, k)

    def add_(self, out_: Tensor, x: Tensor, order: ops.Order, k: int = 0) -> None:
        """Adds to out_ (P, out)."""
        out_.add_(ops.grouped_mm(self.down(x, order, k), self.b, order), alpha=self.scale)

    def down_gradient(self, dy: Tensor, order: ops.Order, k: int = 0) -> Tensor:
        """Gradient of `down`, (P, R), given dy (P, out), or with k of tokens."""
        return ops.grouped_mm(dy, self.b.mT, order, k).mul_(self.scale)


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """First values as in peft, fp32: A uniform within +-1/sqrt(in), seeded by name; B zero."""
    if not name.endswith(".lora_A.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
