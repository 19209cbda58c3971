"""LoRA adapters: y = x W + scale * (x A^T) B^T, as in peft (Hu et al., arXiv:2106.09685).

Legend: R rank, K adapted parts of a fused layer.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor


class Adapters(NamedTuple):
    """A layer's adapters, or their gradients."""

    a: Tensor  # (K R, in): one product
    b: tuple[Tensor, ...]  # K of (features, R)
    columns: tuple[tuple[int, int], ...]  # of the layer's features
    scale: float


def down(x: Tensor, w: Adapters) -> tuple[Tensor, ...]:
    """x A^T of each part, (N, R)."""
    return torch.mm(x, w.a.T).split(len(w.a) // len(w.b), 1)


def add_(out_: Tensor, x: Tensor, w: Adapters, times: float = 1.0) -> None:
    """out_ += times * scale * (x A^T) B^T."""
    for h, b, (start, stop) in zip(down(x, w), w.b, w.columns, strict=True):
        out_[:, start:stop].addmm_(h, b.T, alpha=times * w.scale)


def down_gradient(dy: Tensor, w: Adapters) -> Tensor:
    """Gradient of x A^T, (N, K R), given dy (N, out)."""
    parts = [torch.mm(dy[:, start:stop], b) for b, (start, stop) in zip(w.b, w.columns, strict=True)]
    return torch.cat(parts, 1).mul_(w.scale)


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """First values as in peft, fp32: A uniform within +-1/sqrt(in), seeded by name; B zero."""
    if not name.endswith(".lora_A.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
