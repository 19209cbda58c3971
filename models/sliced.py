"""Grouped GEMMs with matrices of experts that stay packed on the GPU.

Legend: E experts, P sorted rows (kernels/experts).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.families.packing import Packing
from trireme.models.lora import Stacked
from trireme.models.packed import decode
from trireme.models.rounded import decode_sum


class Sliced(NamedTuple):
    """Frozen matrices of a layer's experts, which stay packed on the GPU and are decoded some at a time."""

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
    fp8: bool = False,
    adapters: Stacked | None = None,
) -> Tensor:
    """As ops.grouped_mm, with `back` by the transposed matrices. Of Sliced, w.at_once experts are decoded at a time,
    with their adapters in them if these are `merged`.

    With `fp8` each row and each expert's matrix is quantized by its own largest value. A sorted row is multiplied by
    the matrix of its own expert alone, so results do not depend on how experts are divided.
    """
    codes = ops.quantize_rows(x) if fp8 else None
    if isinstance(w, Tensor):
        return _grouped_mm(x, codes, w.mT if back else w, order, k, out, bias)
    experts = len(order.starts) - 1
    features = w.shape[w.turned == back]
    out = x.new_empty((len(order.pair), features)) if out is None else out
    made = torch.empty((min(w.at_once, experts), *w.shape), dtype=x.dtype, device=x.device)
    for a in range(0, experts, w.at_once):
        b = min(a + w.at_once, experts)
        parts, into = [_of(part, a, b, experts) for part in w.parts], made[: b - a]
        if adapters is not None and adapters.merged:
            pair = adapters.a[a:b], adapters.b[a:b]
            matrices = decode_sum(w.packing, parts, *pair, adapters.scale, into, w.turned)
        else:
            matrices = decode(w.packing, parts, into)
        matrices = matrices.mT if w.turned != back else matrices
        rows = order._replace(starts=order.starts[a : b + 1])
        _grouped_mm(x, codes, matrices, rows, k, out, None if bias is None else bias[a:b])
    return out


def _grouped_mm(
    x: Tensor,
    codes: tuple[Tensor, Tensor] | None,
    w: Tensor,
    order: ops.Order,
    k: int,
    out: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """As ops.grouped_mm, in fp8 if `codes` of x (quantize_rows) are given."""
    if codes is None:
        return ops.grouped_mm(x, w, order, k, out, bias)
    out = x.new_empty((len(order.pair), w.shape[2])) if out is None else out
    matrices, scales = ops.quantize_experts(w)
    return ops.grouped_mm(codes[0], matrices.mT, order, k, out, bias, (codes[1], scales))


def _of(part: Tensor, a: int, b: int, experts: int) -> Tensor:
    """The rows of a part that belong to experts [a, b); an expert may have several, as gate and up do."""
    per_expert = len(part) // experts
    return part[a * per_expert : b * per_expert]
