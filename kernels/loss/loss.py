"""Linear layer and loss in one operation, a chunk of rows at a time: the full logits never exist.

    loss = lse - logits[label],  lse = log(sum(exp(logits)))
    dlogits = scale * factor * (exp(logits - lse) - onehot(label)), factor of the token, 1 where none is given

With label smoothing s (Szegedy et al. 2016, arXiv:1512.00567) the label is (1 - s) onehot(label) + s / V. Logits, in
the compute dtype, are replaced by dlogits in place; cuBLAS does the GEMMs. The label's logit is computed again in fp32,
because the rounding of a stored one would be an error of the loss. With a cap, logits are cap * tanh(z / cap), where z
is the result of the GEMM, and dlogits are multiplied by the slope of that.

reference.py has the loss of a teacher. Logits of its K tokens are computed in fp32, too, and set to -inf in the chunk,
which then has the others alone; at the end the gradients of the teacher's tokens are stored in their places:

    dlogits = scale * factor * softmax over the others * ((1 - weight) * p + weight * g), p and g of all others

Legend: N tokens, M labels, D width, V vocabulary, K tokens of a teacher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.loss.reference import NEVER, Taught
from trireme.kernels.soft_cap import LN2, LOG2E, cap_slope, soft_cap

TILE = 4096  # weights of a teacher's tokens at a time
LOWEST = tl.constexpr(NEVER * LOG2E.value)


@triton.jit
def _label_logit(p_x, p_w, D: tl.constexpr, BLOCK_D: tl.constexpr, CAP: tl.constexpr):
    """The label's logit in fp32, capped and times log2(e): p_x points to a row of x, p_w to the label's weights."""
    o_d = tl.arange(0, BLOCK_D)
    b_dot = tl.zeros((BLOCK_D,), tl.float32)
    for i_d in range(0, D, BLOCK_D):
        b_x = tl.load(p_x + i_d + o_d, i_d + o_d < D, 0.0).to(tl.float32)
        b_dot += b_x * tl.load(p_w + i_d + o_d, i_d + o_d < D, 0.0).to(tl.float32)
    return soft_cap(tl.sum(b_dot, 0) * LOG2E, CAP)


@launcher
@triton.jit
def _teachers_logits(
    p_top, p_x, p_w, p_ids, K: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A row's logits of the teacher's tokens, in fp32."""
    await_previous()
    i_row = tl.program_id(0).to(tl.int64)
    o_k, o_d = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    b_ids = tl.load(p_ids + i_row * K + o_k, o_k < K, 0)
    b_dot = tl.zeros((BLOCK_K,), tl.float32)
    for i_d in range(0, D, BLOCK_D):
        m_d = i_d + o_d < D
        b_x = tl.load(p_x + i_row * D + i_d + o_d, m_d, 0.0).to(tl.float32)
        b_w = tl.load(p_w + b_ids[:, None] * D + i_d + o_d[None, :], m_d[None, :], 0.0).to(tl.float32)
        b_dot += tl.sum(b_x[None, :] * b_w, 1)
    tl.store(p_top + i_row * K + o_k, b_dot, o_k < K)


@triton.jit
def _softened(b_z, z, temperature):
    """(logarithms of the softened shares of K tokens, of the others'), in base 2, of logarithms of shares in base 2."""
    b_z, z = tl.maximum(b_z, LOWEST) / temperature, tl.maximum(z, LOWEST) / temperature
    m = tl.maximum(tl.max(b_z, 0), z)
    lse = m + tl.log2(tl.sum(tl.exp2(b_z - m), 0) + tl.exp2(z - m))
    return b_z - lse, z - lse


@launcher
@triton.jit(do_not_specialize=["M", "N"])
def _loss(
    p_logits, p_x, p_w, p_labels, p_rows, p_losses, p_factors, p_hits, p_top, p_ids, p_teachers, p_rest, scale, weight,
    temperature, M, N, K: tl.constexpr, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, GRADIENT: tl.constexpr, CAP: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """A row of logits at a time. The second pass reads it backwards: what the first pass read last is still in L2.

    K > 0: p_top has the logits of the teacher's tokens, then their gradients; the chunk has -inf in their places.
    """
    await_previous()
    GROUP: tl.constexpr = 8  # a thread's logits share a maximum
    LAST: tl.constexpr = (V - 1) // BLOCK * BLOCK
    o_v = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        i_row = tl.cast(i, tl.int64)
        i_token = tl.load(p_rows + i_row)
        i_label = tl.load(p_labels + i_token)
        target = _label_logit(p_x + i_row * D, p_w + i_label * D, D, BLOCK_D, CAP)
        label = i_label.to(tl.int32)
        if K > 0:
            o_k = tl.arange(0, BLOCK_K)
            m_k, p_k = o_k < K, i_row * K + o_k
            m_label = tl.load(p_ids + p_k, m_k, -1) == i_label
            known = tl.max(m_label.to(tl.int32), 0) > 0  # the label is a token of the teacher's
            b_top = soft_cap(tl.load(p_top + p_k, m_k, 0.0) * LOG2E, CAP)
            target = tl.where(known, tl.sum(tl.where(m_label, b_top, 0.0), 0), target)
            b_top = tl.where(m_k, b_top, float("-inf"))
            label = tl.where(known, -1, label)

        p_z = p_logits + i_row * V
        b_m = tl.full((BLOCK // GROUP,), -1e30, tl.float32)
        b_l = tl.zeros((BLOCK // GROUP,), tl.float32)
        b_sum = tl.zeros((BLOCK // GROUP,), tl.float32)
        for i_v in range(0, V, BLOCK):
            b_z = tl.load(p_z + i_v + o_v, i_v + o_v < V, float("-inf"), eviction_policy="evict_last").to(tl.float32)
            b_x = tl.where(o_v == label - i_v, target, soft_cap(b_z * LOG2E, CAP))
            if K > 0:
                b_x = tl.where(b_z == float("-inf"), float("-inf"), b_x)
            elif CAP > 0.0:
                b_x = tl.where(i_v + o_v < V, b_x, float("-inf"))
            if SMOOTHING > 0.0:
                b_sum += tl.sum(tl.where(i_v + o_v < V, b_x, 0.0), 1)
            b_new = tl.maximum(b_m, tl.max(b_x, 1))
            b_l = b_l * tl.exp2(b_m - b_new) + tl.sum(tl.exp2(b_x - b_new[:, None]), 1)
            b_m = b_new
        m = tl.max(b_m, 0)
        lse = m + tl.log2(tl.sum(b_l * tl.exp2(b_m - m), 0))
        if K > 0:
            rest = tl.maximum(lse, -1e30)  # of the others: none, where the teacher has all tokens
            m = tl.maximum(tl.max(b_top, 0), rest)
            lse = m + tl.log2(tl.sum(tl.exp2(b_top - m), 0) + tl.exp2(rest - m))
            b_q = tl.load(p_teachers + p_k, m_k, 0.0).to(tl.float32) * LOG2E
            b_p, p = _softened(tl.where(m_k, b_top - lse, float("-inf")), rest - lse, temperature)
            b_q, q = _softened(tl.where(m_k, b_q, float("-inf")), tl.load(p_rest + i_row) * LOG2E, temperature)
            b_kl = tl.where(m_k, tl.exp2(b_q) * (b_q - b_p), 0.0)
            kl = temperature * temperature * (tl.sum(b_kl, 0) + tl.exp2(q) * (q - p))
            tl.store(p_losses + N + i_token, kl * LN2)
        own = target
        if SMOOTHING > 0.0:
            own = (1.0 - SMOOTHING) * target + SMOOTHING / V * tl.sum(b_sum, 0)
        tl.store(p_losses + i_token, (lse - own) * LN2)
        if p_hits is not None:
            tl.store(p_hits + i_token, (target == m).to(tl.uint8))
        if GRADIENT:
            factor = scale
            if p_factors is not None:
                factor = scale * tl.load(p_factors + i_token)
            if K > 0:
                by = weight * temperature
                b_g = by * (tl.exp2(b_p) - tl.exp2(b_q))
                b_g += (1.0 - weight) * (tl.exp2(b_top - lse) - m_label.to(tl.float32))
                g = by * (tl.exp2(p) - tl.exp2(q)) + (1.0 - weight) * tl.exp2(rest - lse)
                if CAP > 0.0:
                    b_g = b_g * cap_slope(b_top, CAP)
                tl.store(p_top + p_k, b_g * factor, m_k)
            for i_v in range(0, V, BLOCK):
                p_v = p_z + LAST - i_v + o_v
                mask = LAST - i_v + o_v < V
                b_z = tl.load(p_v, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                b_x = soft_cap(b_z * LOG2E, CAP)
                m_v = o_v == label - (LAST - i_v)
                if K > 0:
                    b_x = tl.where(m_v, target, b_x)
                    b_d = tl.exp2(b_x - rest) * g - tl.where(m_v, 1.0 - weight, 0.0)
                else:
                    b_d = tl.where(m_v, tl.exp2(target - lse) - (1.0 - SMOOTHING), tl.exp2(b_x - lse))
                if SMOOTHING > 0.0:
                    b_d -= SMOOTHING / V
                if CAP > 0.0:
                    b_d = b_d * cap_slope(tl.where(m_v, target, b_x), CAP)
                if K > 0:
                    b_d = tl.where(b_z == float("-inf"), 0.0, b_d)
                tl.store(p_v, (b_d * factor).to(p_logits.dtype.element_ty), mask, eviction_policy="evict_first")


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
    taught: Taught | None = None,
) -> Tensor:
    """As reference.linear_cross_entropy, x and weight contiguous.

    Memory: chunk * V logits, and 12 K bytes for each row of a chunk. Where several chunks are added to a bf16 dweight_
    also V * D fp32 values: a sum in bf16 would lose later chunks.
    """
    (N, D), V, M = x.shape, weight.shape[0], len(rows)
    assert weight.shape == (V, D)
    assert all(t.is_contiguous() for t in (weight, x))
    assert rows.dtype == torch.int64
    assert labels.shape == (N,)
    assert factors is None or (factors.shape == (N,) and factors.dtype == torch.float32 and factors.is_contiguous())
    assert hits_ is None or (hits_.shape == (N,) and hits_.dtype == torch.uint8)
    assert dx_ is not None or dweight_ is None
    assert taught is None or (_checked(taught, M) and not smoothing and hits_ is None)
    if dx_ is not None and M < N:
        dx_.zero_()
    losses = torch.zeros(N if taught is None else (2, N), dtype=torch.float32, device=x.device)
    chunk = max(1, min(chunk, M))
    logits = torch.empty((chunk, V), dtype=x.dtype, device=x.device)
    total, setting = dweight_, launch.cross_entropy(x.device, V)
    if dweight_ is not None and dweight_.dtype != torch.float32 and chunk < M:
        total = dweight_.float()
    for i in range(0, M, chunk):
        part = rows[i : i + chunk]
        contiguous = M == N  # rows count up from 0: no gathering
        xs = x[i : i + chunk] if contiguous else x.index_select(0, part)
        z = logits[: len(part)]
        torch.mm(xs, weight.T, out=z)
        top, ids, teachers, tail = (None,) * 4 if taught is None else _teacher(taught, i, xs, weight, z)
        teaching = (0.0, 1.0) if taught is None else (float(taught.weight), float(taught.temperature))
        K = 0 if ids is None else ids.shape[1]
        _loss[(min(len(part), setting.per_sm * launch.chip(x.device).sms),)](
            z, xs, weight, labels, part, losses, factors, hits_, top, ids, teachers, tail, scale, *teaching, len(part),
            N, K, V, D, setting.block, min(setting.block, launch.power2(D)), launch.power2(K), dx_ is not None, cap,
            smoothing, num_warps=setting.warps,
        )  # fmt: skip
        if dx_ is None:
            continue
        if top is not None and ids is not None:
            z.scatter_(1, ids, top.to(z.dtype))
        if contiguous:
            torch.mm(z, weight, out=dx_[i : i + chunk])
        else:
            dx_.index_copy_(0, part, torch.mm(z, weight))
        if total is not None:
            _add_product_(total, z.T, xs)
    if dweight_ is not None and total is not None and total is not dweight_:
        dweight_.copy_(total)
    return losses


def _checked(taught: Taught, M: int) -> bool:
    K = taught.ids.shape[1]
    shapes = taught.ids.shape == taught.logps.shape == (M, K) and taught.tail.shape == (M,)
    return shapes and taught.ids.dtype == torch.int32 and all(t.is_contiguous() for t in taught[:3])


def _teacher(
    taught: Taught, first: int, xs: Tensor, weight: Tensor, logits_: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits of the teacher's tokens, their ids, logps, rest) of a chunk's rows from `first`; sets those logits to
    -inf in logits_.
    """
    (m, D), part = xs.shape, slice(first, first + len(xs))
    ids, K = taught.ids[part].long(), taught.ids.shape[1]
    block = launch.power2(K)
    top = torch.empty((m, K), dtype=torch.float32, device=xs.device)
    width = min(launch.power2(D), max(16, TILE // block))
    _teachers_logits[(m,)](top, xs, weight, ids, K, D, block, width, num_warps=4)
    logits_.scatter_(1, ids, float("-inf"))
    return top, ids, taught.logps[part], taught.tail[part]


def _add_product_(total_: Tensor, a: Tensor, b: Tensor) -> None:
    """total_ += a @ b, summed in fp32."""
    if total_.dtype == a.dtype:
        torch.addmm(total_, a, b, out=total_)
    elif total_.is_cuda or total_.is_meta:
        torch.addmm(total_, a, b, out_dtype=total_.dtype, out=total_)
    else:  # the interpreter: no GEMM of mixed dtypes on the CPU
        total_.add_(torch.mm(a.to(total_.dtype), b.to(total_.dtype)))
