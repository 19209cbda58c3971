"""Linear layer and cross-entropy in one, a chunk of rows at a time: the full logits never exist.

    loss = lse - logits[label],  lse = log(sum(exp(logits)));  dlogits = scale * (exp(logits - lse) - onehot(label))

The chunk's logits, in the compute dtype, become dlogits in place; cuBLAS does the three products. The label's own logit
is taken again in fp32: its rounding would be the loss's error, the others' rounding averages out.
Legend: N tokens, M rows with a label, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.launcher import launcher

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@launcher
@triton.jit
def _cross_entropy(
    p_logits,
    p_x,
    p_w,
    p_labels,
    p_rows,
    p_losses,
    scale,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """One row: its loss, and dlogits over its logits. The second pass finds the row in L2."""
    i_row = tl.program_id(0).to(tl.int64)
    i_token = tl.load(p_rows + i_row)
    i_label = tl.load(p_labels + i_token)
    p_x += i_row * D
    p_w += i_label * D
    o_d = tl.arange(0, BLOCK_D)
    b_dot = tl.zeros((BLOCK_D,), tl.float32)
    for i_d in range(0, D, BLOCK_D):
        b_x = tl.load(p_x + i_d + o_d, i_d + o_d < D, 0.0).to(tl.float32)
        b_dot += b_x * tl.load(p_w + i_d + o_d, i_d + o_d < D, 0.0).to(tl.float32)
    target = tl.sum(b_dot, 0) * LOG2E

    p_logits += i_row * V
    o_v = tl.arange(0, BLOCK)
    b_m = tl.full((BLOCK,), -1e30, tl.float32)
    b_l = tl.zeros((BLOCK,), tl.float32)
    for i_v in range(0, V, BLOCK):
        b_x = tl.load(p_logits + i_v + o_v, i_v + o_v < V, float("-inf")).to(tl.float32) * LOG2E
        b_x = tl.where(i_v + o_v == i_label, target, b_x)
        b_e = tl.exp2(
            -tl.abs(b_x - b_m)
        )  # one exponential serves both: a new maximum shrinks the sum, else x adds to it
        b_l = tl.where(b_x > b_m, b_l * b_e + 1.0, b_l + b_e)
        b_m = tl.maximum(b_m, b_x)
    m = tl.max(b_m, 0)
    lse = m + tl.log2(tl.sum(b_l * tl.exp2(b_m - m), 0))
    tl.store(p_losses + i_token, (lse - target) * LN2)
    if GRADIENT:
        for i_v in range(0, V, BLOCK):
            b_x = tl.load(p_logits + i_v + o_v, i_v + o_v < V, 0.0).to(tl.float32) * LOG2E
            b_p = tl.where(i_v + o_v == i_label, tl.exp2(target - lse) - 1.0, tl.exp2(b_x - lse))
            tl.store(p_logits + i_v + o_v, (b_p * scale).to(p_logits.dtype.element_ty), i_v + o_v < V)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    scale: float,
    dweight_: Tensor | None = None,
    dx_: Tensor | None = None,
    chunk: int = 2048,
) -> Tensor:
    """As reference.linear_cross_entropy, x and weight contiguous.

    Works in chunk * V values for the logits and, where dweight_ is bf16 and one chunk is not enough, in V * D of fp32:
    bf16 sums would lose what later chunks add.
    """
    (N, D), V, M = x.shape, weight.shape[0], len(rows)
    assert weight.shape == (V, D) and weight.is_contiguous() and x.is_contiguous()
    assert labels.shape == (N,) and rows.dtype == torch.int64 and (dx_ is None) == (dweight_ is None)
    losses = torch.zeros(N, dtype=torch.float32, device=x.device)
    if dx_ is not None and M < N:
        dx_.zero_()
    chunk = max(1, min(chunk, M))
    logits = torch.empty((chunk, V), dtype=x.dtype, device=x.device)
    total = dweight_
    if dweight_ is not None and dweight_.dtype != torch.float32 and chunk < M:
        total = dweight_.float()
    for i in range(0, M, chunk):
        part = rows[i : i + chunk]
        every = M == N  # then rows counts up from 0, and nothing need be gathered
        xs = x[i : i + chunk] if every else x.index_select(0, part)
        z = logits[: len(part)]
        torch.mm(xs, weight.T, out=z)
        block, warps = launch.cross_entropy(V)
        _cross_entropy[(len(part),)](
            z, xs, weight, labels, part, losses, scale, V, D, block, min(block, launch.power2(D)), dx_ is not None,
            num_warps=warps,
        )  # fmt: skip
        if dx_ is None:
            continue
        if every:
            torch.mm(z, weight, out=dx_[i : i + chunk])
        else:
            dx_.index_copy_(0, part, torch.mm(z, weight))
        _add_product_(total, z.T, xs)
    if total is not dweight_:
        dweight_.copy_(total)
    return losses


def _add_product_(total_: Tensor, a: Tensor, b: Tensor) -> None:
    """total_ += a @ b, with fp32 sums whatever total_ holds."""
    if total_.dtype == a.dtype:
        torch.addmm(total_, a, b, out=total_)
    elif total_.is_cuda:
        torch.addmm(total_, a, b, out_dtype=total_.dtype, out=total_)
    else:  # the interpreter's tensors: no mixed product on the CPU
        total_.add_(torch.mm(a.to(total_.dtype), b.to(total_.dtype)))
