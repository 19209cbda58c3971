"""Adapters beside a matrix: y = x W + scale * (x A^T) B^T, as peft has them (Hu et al., LoRA, arXiv:2106.09685).

Legend: N tokens, R the rank, K the parts of a fused layer that have an adapter.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor


class Adapters(NamedTuple):
    """The adapters of a linear layer, or their gradients."""

    a: Tensor  # (K R, in): neighbours in memory, one product
    b: tuple[Tensor, ...]  # K of (features, R)
    columns: tuple[tuple[int, int], ...]  # the features of each among the layer's
    scale: float


def down(x: Tensor, w: Adapters) -> tuple[Tensor, ...]:
    """x A^T of each part, (N, R), for x (N, in)."""
    return torch.mm(x, w.a.T).split(len(w.a) // len(w.b), 1)


def add_(out_: Tensor, x: Tensor, w: Adapters, times: float = 1.0) -> None:
    """out_ (N, out) += times * scale * (x A^T) B^T for x (N, in)."""
    for h, b, (start, stop) in zip(down(x, w), w.b, w.columns, strict=True):
        out_[:, start:stop].addmm_(h, b.T, alpha=times * w.scale)


def down_gradient(dy: Tensor, w: Adapters) -> Tensor:
    """The gradient (N, K R) of x A^T, given dy (N, out)."""
    parts = [torch.mm(dy[:, start:stop], b) for b, (start, stop) in zip(w.b, w.columns, strict=True)]
    return torch.cat(parts, 1).mul_(w.scale)


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """An adapter's tensor as peft begins with it, fp32: A uniform within +-1/sqrt(in), drawn by its name; B zero."""
    if not name.endswith(".lora_A.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
