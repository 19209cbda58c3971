"""Linear layers of a mixture's experts: grouped GEMMs over rows sorted by expert, forward and backward.

Matrices that stay packed on the GPU are decoded some experts at a time. Legend: E experts, N tokens, k experts of each,
P = N k sorted rows (kernels/experts), R rank of adapters. x and dy are by sorted row, or if `k` > 0 by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.families.packing import Packing
from trireme.models.linear import trained
from trireme.models.lora import Stacked
from trireme.models.packed import decode, matrix_view
from trireme.models.reader import Reader
from trireme.models.rounded import decode_sum
from trireme.models.sizes import narrow
from trireme.models.sizes.groups import expert_shape


class Slice(NamedTuple):
    """The experts [first, last) of the `total` experts of a layer."""

    first: int
    last: int
    total: int


class Sliced(NamedTuple):
    """Frozen matrices of a layer's experts, which stay packed on the GPU and are decoded some at a time."""

    packing: Packing
    parts: tuple[Tensor, ...]  # of all experts, by expert
    shape: tuple[int, int]  # of a decoded matrix
    out_in: bool  # that is (out, in), not (in, out)
    at_once: int  # experts of a slice


class Grouped(NamedTuple):
    """Weights of one layer of all experts, or their gradients: empty where a tensor is frozen."""

    matrices: Tensor | Sliced  # (E, in, out), perhaps a transposed view
    bias: Tensor | None  # (E, out)
    adapters: Stacked | None
    fp8: bool = False  # whether GEMMs with the matrices are in fp8, but for their gradients; set by `sliced`

    def sliced(self, part: Slice | None, fp8: bool) -> Grouped:
        """This layer, which has the matrices of `part`, with biases and adapters of these experts alone."""
        if part is None:
            return self._replace(fp8=fp8)
        experts = slice(part.first, part.last)
        bias = None if self.bias is None else self.bias[experts]
        adapters = self.adapters and self.adapters._replace(a=self.adapters.a[experts], b=self.adapters.b[experts])
        return self._replace(bias=bias, adapters=adapters, fp8=fp8)


def grouped(read: Reader, matrix: str) -> Grouped:
    """GATE_UP or DOWN of a layer's experts."""
    names, packing = read.layer.mlp_names, read.cfg.packing
    name = f"{names.experts}.{matrix}"
    bias, adapters = read.get(f"{name}_bias"), read.stacked(name)
    if bias is not None and trained(bias):
        assert read.layer.experts is not None
        bias = bias.view(read.layer.experts.count, -1)
    if name in read.views:
        matrices = matrix_view(packing, name, read.views)
        return Grouped(matrices if names.experts_in_out else matrices.mT, bias, adapters)
    assert packing is not None
    packing = packing.of(name)
    parts = tuple(read[name + part.suffix] for part in packing.parts)
    out_in, at_once = not names.experts_in_out, narrow.at_once(read.cfg)
    return Grouped(Sliced(packing, parts, expert_shape(read.layer, matrix), out_in, at_once), bias, adapters)


def grouped_linear(x: Tensor, w: Grouped, order: ops.Order, k: int = 0, out: Tensor | None = None) -> Tensor:
    """Each sorted row of x times its expert's matrix, (P, out), in `out` if given."""
    y = _product(x, w, order, k, out, w.bias)
    if w.adapters is not None:
        w.adapters.add_(y, x, order, k)
    return y


def grouped_backward(dy: Tensor, w: Grouped, order: ops.Order, k: int = 0) -> tuple[Tensor, Tensor | None]:
    """(gradient of x by sorted row (P, in); with adapters that of x A^T (P, R)), given that of the result."""
    dx = _product(dy, w, order, k, transpose=True)
    if w.adapters is None:
        return dx, None
    dh = w.adapters.down_gradient(dy, order, k)
    w.adapters.add_backward_(dx, dh, order)
    return dx, dh


def grouped_gradients_(
    g: Grouped, w: Grouped, x: Tensor, dy: Tensor, dh: Tensor | None, order: ops.Order, k: int = 0, k_dy: int = 0
) -> None:
    """Adds to g: of matrices, adapters, and if dy is by row biases. x is by token if k > 0, dy if k_dy > 0."""
    if isinstance(g.matrices, Tensor) and trained(g.matrices):
        ops.grouped_add_(g.matrices, x, dy, order, k, k_dy)
    if not k_dy and g.bias is not None and trained(g.bias):
        ops.grouped_add_(g.bias[:, None], dy.new_ones((len(dy), 1)), dy, order)
    if w.adapters is not None and g.adapters is not None and dh is not None:
        ops.grouped_add_(g.adapters.a, dh, x, order, 0, k)
        ops.grouped_add_(g.adapters.b, w.adapters.down(x, order, k).mul_(w.adapters.scale), dy, order, 0, k_dy)


def _product(
    x: Tensor,
    w: Grouped,
    order: ops.Order,
    k: int,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    transpose: bool = False,
) -> Tensor:
    """As ops.grouped_mm, with `transpose` by transposed matrices. Of Sliced, w.at_once experts are decoded at a time,
    with their adapters in them if these are `merged`.

    In fp8 each row and each expert's matrix is quantized by its own largest value. A sorted row is multiplied by
    the matrix of its own expert alone, so results do not depend on how experts are divided.
    """
    codes, stack = ops.quantize_rows(x) if w.fp8 else None, w.matrices
    if isinstance(stack, Tensor):
        return _grouped_mm(x, codes, stack.mT if transpose else stack, order, k, out, bias)
    experts = len(order.starts) - 1
    out = x.new_empty((len(order.pair), stack.shape[stack.out_in == transpose])) if out is None else out
    buffer = torch.empty((min(stack.at_once, experts), *stack.shape), dtype=x.dtype, device=x.device)
    for a in range(0, experts, stack.at_once):
        b = min(a + stack.at_once, experts)
        parts, target = [_expert_rows(part, a, b, experts) for part in stack.parts], buffer[: b - a]
        if w.adapters is not None and w.adapters.merged:
            pair = w.adapters.a[a:b], w.adapters.b[a:b]
            matrices = decode_sum(stack.packing, parts, *pair, w.adapters.scale, target, stack.out_in)
        else:
            matrices = decode(stack.packing, parts, target)
        matrices = matrices.mT if stack.out_in != transpose else matrices
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


def _expert_rows(part: Tensor, a: int, b: int, experts: int) -> Tensor:
    """The rows of a part that belong to experts [a, b); an expert may have several, as gate and up do."""
    per_expert = len(part) // experts
    return part[a * per_expert : b * per_expert]
