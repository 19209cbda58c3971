"""Experts that stay packed on the GPU: a slice of a layer's experts is decoded for one grouped GEMM at a time.

A sorted row is multiplied by the matrix of its own expert alone, so that where the experts are cut changes no bit.
Legend: E experts, P sorted rows (kernels/experts), A and B features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.families.packing import Packing
from trireme.models.packed import decode


class Sliced(NamedTuple):
    """Frozen matrices of a layer's experts, packed."""

    packing: Packing
    parts: tuple[Tensor, ...]  # of all experts, by expert
    shape: tuple[int, int]  # of a decoded matrix
    turned: bool  # that is (out, in), not (in, out)
    at_once: int  # experts of a slice


Stack = Tensor | Sliced  # (E, in, out)


def grouped_mm(
    x: Tensor,
    w: Stack,
    order: ops.Order,
    k: int = 0,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    back: bool = False,
) -> Tensor:
    """As ops.grouped_mm; `back`: by the transposed matrices."""
    if isinstance(w, Tensor):
        return ops.grouped_mm(x, w.mT if back else w, order, k, out, bias)
    experts = len(order.starts) - 1
    features = w.shape[w.turned == back]
    out = x.new_empty((len(order.pair), features)) if out is None else out
    made = torch.empty((min(w.at_once, experts), *w.shape), dtype=x.dtype, device=x.device)
    for a in range(0, experts, w.at_once):
        b = min(a + w.at_once, experts)
        matrices = made[: b - a]
        decode(w.packing, [_of(part, a, b, experts) for part in w.parts], matrices)
        matrices = matrices.mT if w.turned != back else matrices
        rows = order._replace(starts=order.starts[a : b + 1])
        ops.grouped_mm(x, matrices, rows, k, out, None if bias is None else bias[a:b])
    return out


def _of(part: Tensor, a: int, b: int, experts: int) -> Tensor:
    """Of experts a to b; gate and up may be matrices of their own."""
    each = len(part) // experts
    return part[a * each : b * each]
