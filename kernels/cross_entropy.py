"""Linear layer and cross-entropy in one operation, a chunk of rows at a time: the full logits never exist.

    loss = lse - logits[label],  lse = log(sum(exp(logits)))
    dlogits = scale * factor * (exp(logits - lse) - onehot(label)), factor of the token, 1 where none is given

With label smoothing s (Szegedy et al. 2016, arXiv:1512.00567) the label is (1 - s) onehot(label) + s / V:

    loss = lse - (1 - s) logits[label] - s mean(logits)

Logits, in the compute dtype, are replaced by dlogits in place; cuBLAS does the GEMMs. The label's logit is computed
again in fp32, because the rounding of a stored one would be an error of the loss. With a cap, logits are
cap * tanh(z / cap), where z is the result of the GEMM, and dlogits are multiplied by the slope of that.
Legend: N tokens, M labels, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.soft_cap import LN2, LOG2E, cap_slope, soft_cap


@triton.jit
def label_logit(p_x, p_w, D: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr):
    """The label's logit in fp32, capped and times log2(e): p_x points to a row of x, p_w to the label's weights."""
    o_d = tl.arange(0, BLOCK_D)
    b_dot = tl.zeros((BLOCK_D,), tl.float32)
    for i_d in range(0, D, BLOCK_D):
        b_x = tl.load(p_x + i_d + o_d, i_d + o_d < D, 0.0).to(tl.float32)
        b_dot += b_x * tl.load(p_w + i_d + o_d, i_d + o_d < D, 0.0).to(tl.float32)
    return soft_cap(tl.sum(b_dot, 0) * LOG2E, CAP)


@launcher
@triton.jit(do_not_specialize=["M"])
def _cross_entropy(
    p_logits,
    p_x,
    p_w,
    p_labels,
    p_rows,
    p_losses,
    p_factors,
    p_hits,
    scale,
    M,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GRADIENT: tl.constexpr,
    CAP: tl.constexpr,
    FACTORS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    HITS: tl.constexpr,
):
    """A row of logits at a time. The second pass reads it backwards: what the first pass read last is still in L2."""
    await_previous()
    GROUP: tl.constexpr = 8  # a thread's logits share a maximum
    LAST: tl.constexpr = (V - 1) // BLOCK * BLOCK
    o_v = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        i_row = tl.cast(i, tl.int64)
        i_token = tl.load(p_rows + i_row)
        i_label = tl.load(p_labels + i_token)
        target = label_logit(p_x + i_row * D, p_w + i_label * D, D, BLOCK_D, CAP)
        label = i_label.to(tl.int32)

        p_z = p_logits + i_row * V
        b_m = tl.full((BLOCK // GROUP,), -1e30, tl.float32)
        b_l = tl.zeros((BLOCK // GROUP,), tl.float32)
        b_sum = tl.zeros((BLOCK // GROUP,), tl.float32)
        for i_v in range(0, V, BLOCK):
            b_x = tl.load(p_z + i_v + o_v, i_v + o_v < V, float("-inf"), eviction_policy="evict_last")
            b_x = tl.where(o_v == label - i_v, target, soft_cap(b_x.to(tl.float32) * LOG2E, CAP))
            if CAP > 0.0:
                b_x = tl.where(i_v + o_v < V, b_x, float("-inf"))
            if SMOOTHING > 0.0:
                b_sum += tl.sum(tl.where(i_v + o_v < V, b_x, 0.0), 1)
            b_new = tl.maximum(b_m, tl.max(b_x, 1))
            b_l = b_l * tl.exp2(b_m - b_new) + tl.sum(tl.exp2(b_x - b_new[:, None]), 1)
            b_m = b_new
        m = tl.max(b_m, 0)
        lse = m + tl.log2(tl.sum(b_l * tl.exp2(b_m - m), 0))
        own = target
        if SMOOTHING > 0.0:
            own = (1.0 - SMOOTHING) * target + SMOOTHING / V * tl.sum(b_sum, 0)
        tl.store(p_losses + i_token, (lse - own) * LN2)
        if HITS:
            tl.store(p_hits + i_token, (target == m).to(tl.uint8))
        if GRADIENT:
            factor = scale
            if FACTORS:
                factor = scale * tl.load(p_factors + i_token)
            for i_v in range(0, V, BLOCK):
                p_v = p_z + LAST - i_v + o_v
                mask = LAST - i_v + o_v < V
                b_x = tl.load(p_v, mask, 0.0, eviction_policy="evict_first").to(tl.float32) * LOG2E
                b_x = soft_cap(b_x, CAP)
                b_p = tl.where(
                    o_v == label - (LAST - i_v), tl.exp2(target - lse) - (1.0 - SMOOTHING), tl.exp2(b_x - lse)
                )
                if SMOOTHING > 0.0:
                    b_p -= SMOOTHING / V
                if CAP > 0.0:
                    b_p = b_p * cap_slope(tl.where(o_v == label - (LAST - i_v), target, b_x), CAP)
                tl.store(p_v, (b_p * factor).to(p_logits.dtype.element_ty), mask, eviction_policy="evict_first")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    scale: float,
    dweight_: Tensor | None = None,
    dx_: Tensor | None = None,
    chunk: int = 2048,
    cap: float = 0.0,
    factors: Tensor | None = None,
    smoothing: float = 0.0,
    hits_: Tensor | None = None,
    dlogits_: Tensor | None = None,
) -> Tensor:
    """As reference.linear_cross_entropy, x and weight contiguous.

    Memory: chunk * V logits, unless dlogits_ holds them. Where several chunks are added to a bf16 dweight_ also V * D
    fp32 values: a sum in bf16 would lose later chunks.
    """
    (N, D), V = x.shape, weight.shape[0]
    assert labels.shape == (N,)
    assert factors is None or (factors.shape == (N,) and factors.dtype == torch.float32 and factors.is_contiguous())
    assert hits_ is None or (hits_.shape == (N,) and hits_.dtype == torch.uint8)
    losses = torch.zeros(N, dtype=torch.float32, device=x.device)

    def fill(_: int, part: Tensor, xs: Tensor, z: Tensor) -> None:
        how = launch.cross_entropy(x.device, V)
        programs = min(len(part), how.each * launch.chip(x.device).sms)
        _cross_entropy[(programs,)](
            z, xs, weight, labels, part, losses, losses if factors is None else factors,
            labels if hits_ is None else hits_, scale, len(part), V, D,
            how.block, min(how.block, launch.power2(D)), dx_ is not None, cap, factors is not None,
            smoothing, hits_ is not None,
            num_warps=how.warps,
        )  # fmt: skip

    in_chunks(x, weight, rows, dweight_, dx_, chunk, fill, dlogits_)
    return losses


def in_chunks(
    x: Tensor,
    weight: Tensor,
    rows: Tensor,
    dweight_: Tensor | None,
    dx_: Tensor | None,
    chunk: int,
    fill: Callable[[int, Tensor, Tensor, Tensor], None],
    dlogits_: Tensor | None = None,
) -> None:
    """The GEMMs of a loss over logits x @ weight.T, `chunk` rows at a time; arguments as of linear_cross_entropy.

    `fill(first, part, xs, z)` computes the loss of the tokens part = rows[first : first + m]: xs (m, D) are their rows
    of x, z (m, V) their logits, which it replaces by their gradients where dx_ is given.
    """
    (N, D), V, M = x.shape, weight.shape[0], len(rows)
    assert weight.shape == (V, D)
    assert weight.is_contiguous()
    assert x.is_contiguous()
    assert rows.dtype == torch.int64
    assert dx_ is not None or (dweight_ is None and dlogits_ is None)
    assert dlogits_ is None or (dweight_ is None and dlogits_.shape == (M, V) and dlogits_.is_contiguous())
    if dx_ is not None and M < N:
        dx_.zero_()
    chunk = max(1, min(chunk, M))
    logits = torch.empty((chunk, V), dtype=x.dtype, device=x.device) if dlogits_ is None else dlogits_
    total = _total_of(dweight_, chunk < M)
    for i in range(0, M, chunk):
        part = rows[i : i + chunk]
        every = M == N  # rows count up from 0: no gathering
        xs = x[i : i + chunk] if every else x.index_select(0, part)
        z = logits[: len(part)] if dlogits_ is None else dlogits_[i : i + chunk]
        torch.mm(xs, weight.T, out=z)
        fill(i, part, xs, z)
        if dx_ is None:
            continue
        if every:
            torch.mm(z, weight, out=dx_[i : i + chunk])
        else:
            dx_.index_copy_(0, part, torch.mm(z, weight))
        if total is not None:
            _add_product_(total, z.T, xs)
    if dweight_ is not None and total is not None and total is not dweight_:
        dweight_.copy_(total)


def linear_cross_entropy_dweight(x: Tensor, rows: Tensor, dlogits: Tensor, dweight_: Tensor, chunk: int = 2048) -> None:
    """As reference.linear_cross_entropy_dweight: with the GEMMs of a loss that is given dweight_, bitwise equal.

    `chunk` is that of the loss.
    """
    N, M = len(x), len(rows)
    assert dlogits.shape == (M, len(dweight_))
    assert dlogits.is_contiguous()
    assert x.is_contiguous()
    chunk = max(1, min(chunk, M))
    total = _total_of(dweight_, chunk < M)
    assert total is not None
    for i in range(0, M, chunk):
        xs = x[i : i + chunk] if M == N else x.index_select(0, rows[i : i + chunk])
        _add_product_(total, dlogits[i : i + chunk].T, xs)
    if total is not dweight_:
        dweight_.copy_(total)


def _total_of(dweight: Tensor | None, several: bool) -> Tensor | None:
    """The sum that products of chunks are added to: dweight itself, or where there are several chunks an fp32 copy."""
    return dweight.float() if dweight is not None and dweight.dtype != torch.float32 and several else dweight


def _add_product_(total_: Tensor, a: Tensor, b: Tensor) -> None:
    """total_ += a @ b, summed in fp32."""
    if total_.dtype == a.dtype:
        torch.addmm(total_, a, b, out=total_)
    elif total_.is_cuda:
        torch.addmm(total_, a, b, out_dtype=total_.dtype, out=total_)
    else:  # the interpreter: no GEMM of mixed dtypes on the CPU
        total_.add_(torch.mm(a.to(total_.dtype), b.to(total_.dtype)))
