"""Linear layer and a teacher's loss in one operation, a chunk of rows at a time: the full logits never exist.

The mathematics is in reference.py. Logits of the teacher's tokens and of the label are computed in fp32, as the label's
is in cross_entropy.py. The teacher's tokens are set to -inf in the chunk of logits, which then has the others alone:

    dlogits = scale * factor * softmax over the others * ((1 - weight) * p + weight * g), p and g of all others

At the end the gradients of the teacher's tokens are stored in their places.
Legend: N tokens, M labels, K most likely tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.cross_entropy import in_chunks, label_logit
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.soft_cap import LN2, LOG2E, cap_slope, soft_cap
from trireme.kernels.teacher.reference import NEVER, Taught

TILE = 4096  # weights of the teacher's tokens at a time
LOWEST = tl.constexpr(NEVER * LOG2E.value)


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
def _distillation(
    p_logits,
    p_x,
    p_w,
    p_labels,
    p_rows,
    p_found,
    p_factors,
    p_top,
    p_ids,
    p_teachers,
    p_rest,
    scale,
    weight,
    temperature,
    M,
    N,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GRADIENT: tl.constexpr,
    CAP: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """p_top has the logits of the teacher's tokens, then their gradients. Passes over a row as in _cross_entropy."""
    await_previous()
    GROUP: tl.constexpr = 8  # a thread's logits share a maximum
    LAST: tl.constexpr = (V - 1) // BLOCK * BLOCK
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in range(tl.program_id(0), M, tl.num_programs(0)):
        i_row = tl.cast(i, tl.int64)
        i_token = tl.load(p_rows + i_row)
        i_label = tl.load(p_labels + i_token)
        target = label_logit(p_x + i_row * D, p_w + i_label * D, D, BLOCK_D, CAP)
        m_k = o_k < K
        p_k = i_row * K + o_k
        m_label = tl.load(p_ids + p_k, m_k, -1) == i_label
        known = tl.max(m_label.to(tl.int32), 0) > 0  # the label is a token of the teacher's
        b_top = soft_cap(tl.load(p_top + p_k, m_k, 0.0) * LOG2E, CAP)
        target = tl.where(known, tl.sum(tl.where(m_label, b_top, 0.0), 0), target)
        b_top = tl.where(m_k, b_top, float("-inf"))
        label = tl.where(known, -1, i_label.to(tl.int32))

        p_z = p_logits + i_row * V
        b_m = tl.full((BLOCK // GROUP,), -1e30, tl.float32)
        b_l = tl.zeros((BLOCK // GROUP,), tl.float32)
        for i_v in range(0, V, BLOCK):
            b_z = tl.load(p_z + i_v + o_v, i_v + o_v < V, float("-inf"), eviction_policy="evict_last").to(tl.float32)
            b_x = tl.where(o_v == label - i_v, target, soft_cap(b_z * LOG2E, CAP))
            b_x = tl.where(b_z == float("-inf"), float("-inf"), b_x)
            b_new = tl.maximum(b_m, tl.max(b_x, 1))
            b_l = b_l * tl.exp2(b_m - b_new) + tl.sum(tl.exp2(b_x - b_new[:, None]), 1)
            b_m = b_new
        m = tl.max(b_m, 0)
        rest = tl.maximum(m + tl.log2(tl.sum(b_l * tl.exp2(b_m - m), 0)), -1e30)
        m = tl.maximum(tl.max(b_top, 0), rest)
        lse = m + tl.log2(tl.sum(tl.exp2(b_top - m), 0) + tl.exp2(rest - m))

        b_q = tl.load(p_teachers + p_k, m_k, 0.0).to(tl.float32) * LOG2E
        b_p, p = _softened(tl.where(m_k, b_top - lse, float("-inf")), rest - lse, temperature)
        b_q, q = _softened(tl.where(m_k, b_q, float("-inf")), tl.load(p_rest + i_row) * LOG2E, temperature)
        b_kl = tl.where(m_k, tl.exp2(b_q) * (b_q - b_p), 0.0)
        kl = temperature * temperature * (tl.sum(b_kl, 0) + tl.exp2(q) * (q - p))
        tl.store(p_found + i_token, (lse - target) * LN2)
        tl.store(p_found + N + i_token, kl * LN2)
        if GRADIENT:
            factor = scale
            if FACTORS:
                factor = scale * tl.load(p_factors + i_token)
            by = weight * temperature
            b_g = by * (tl.exp2(b_p) - tl.exp2(b_q)) + (1.0 - weight) * (tl.exp2(b_top - lse) - m_label.to(tl.float32))
            g = by * (tl.exp2(p) - tl.exp2(q)) + (1.0 - weight) * tl.exp2(rest - lse)
            if CAP > 0.0:
                b_g = b_g * cap_slope(b_top, CAP)
            tl.store(p_top + p_k, b_g * factor, m_k)
            for i_v in range(0, V, BLOCK):
                p_v = p_z + LAST - i_v + o_v
                mask = LAST - i_v + o_v < V
                b_z = tl.load(p_v, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
                m_v = o_v == label - (LAST - i_v)
                b_x = tl.where(m_v, target, soft_cap(b_z * LOG2E, CAP))
                b_d = tl.exp2(b_x - rest) * g - tl.where(m_v, 1.0 - weight, 0.0)
                if CAP > 0.0:
                    b_d = b_d * cap_slope(b_x, CAP)
                b_d = tl.where(b_z == float("-inf"), 0.0, b_d)
                tl.store(p_v, (b_d * factor).to(p_logits.dtype.element_ty), mask, eviction_policy="evict_first")


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    scale: float,
    taught: Taught,
    dweight_: Tensor | None = None,
    dx_: Tensor | None = None,
    chunk: int = 2048,
    cap: float = 0.0,
    factors: Tensor | None = None,
    dlogits_: Tensor | None = None,
) -> Tensor:
    """As reference.linear_distillation, x and weight contiguous.

    Memory: chunk * (V logits + 12 K bytes), and for a bf16 dweight_ the fp32 sum of linear_cross_entropy.
    """
    N, M, K = len(x), len(rows), taught.ids.shape[1]
    assert taught.ids.shape == taught.logps.shape == (M, K)
    assert taught.rest.shape == (M,)
    assert taught.ids.dtype == torch.int32
    assert all(t.is_contiguous() for t in taught[:3])
    assert labels.shape == (N,)
    assert factors is None or (factors.shape == (N,) and factors.dtype == torch.float32 and factors.is_contiguous())
    found = torch.zeros((2, N), dtype=torch.float32, device=x.device)
    block_k = launch.power2(K)

    def fill(first: int, part: Tensor, xs: Tensor, z: Tensor) -> None:
        m, (V, D) = len(part), weight.shape
        ids = taught.ids[first : first + m].long()
        top = torch.empty((m, K), dtype=torch.float32, device=x.device)
        width = min(launch.power2(D), max(16, TILE // block_k))
        _teachers_logits[(m,)](top, xs, weight, ids, K, D, block_k, width, num_warps=4)
        z.scatter_(1, ids, float("-inf"))
        how = launch.cross_entropy(x.device, V)
        programs = min(m, how.each * launch.chip(x.device).sms)
        _distillation[(programs,)](
            z, xs, weight, labels, part, found, found if factors is None else factors, top, ids,
            taught.logps[first : first + m], taught.rest[first : first + m], scale, float(taught.weight),
            float(taught.temperature), m, N, K, V, D, how.block, min(how.block, launch.power2(D)), block_k,
            dx_ is not None, cap, factors is not None, num_warps=how.warps,
        )  # fmt: skip
        if dx_ is not None:
            z.scatter_(1, ids, top.to(z.dtype))

    in_chunks(x, weight, rows, dweight_, dx_, chunk, fill, dlogits_)
    return found
