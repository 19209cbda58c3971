"""Attention's forward in Triton, and functions that its backward uses too.

    s = scale * q k^T, or cap * tanh(scale * q k^T / cap),  p = exp(s - lse),  out = p v

Online softmax in base 2. Score tiles below the diagonal, within the window, need no mask.
Legend: N tokens, H query heads, K key/value heads, GROUP = H / K, D width of queries and keys, V of values,
BLOCK_Q x BLOCK_K the tile of scores.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch

from trireme.kernels import launch
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launcher import Fixed, await_previous, launcher
from trireme.kernels.soft_cap import LN2, LOG2E, soft_cap

HIDDEN = tl.constexpr(-1e30)  # finite: hidden first tiles must not meet inf - inf


def flat(strides: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    """Token and head strides in turn."""
    return tuple(chain.from_iterable(s[:2] for s in strides))


@triton.jit
def _load_rows(p, o_row, length, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr, ROW_MASK: tl.constexpr):
    """Zeros beyond document (ROW_MASK) and D."""
    if ROW_MASK:
        if BLOCK_D == D:
            return tl.load(p, (o_row < length)[:, None], 0.0)
        return tl.load(p, (o_row < length)[:, None] & (o_d < D)[None, :], 0.0)
    if BLOCK_D == D:
        return tl.load(p)
    return tl.load(p, (o_d < D)[None, :], 0.0)


@triton.jit
def _visible(o_q, o_k, window, WINDOWED: tl.constexpr):
    """Mask (queries, keys), or with swapped axes (keys, queries)."""
    distance = o_q - o_k
    if WINDOWED:
        return (distance >= 0) & (distance < window)
    return distance >= 0


@triton.jit
def _key_ranges(offset, length, window, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr):
    """(a, b, c, end): keys [a, b) are cut by the window, [b, c) visible, [c, end) diagonal."""
    c = offset // BLOCK_K * BLOCK_K
    end = tl.minimum(offset + BLOCK_Q, length)
    a = c * 0
    b = a
    if WINDOWED:
        a = tl.maximum(offset - window + 1, 0) // BLOCK_K * BLOCK_K
        b = tl.minimum(tl.cdiv(tl.maximum(offset + BLOCK_Q - window, 0), BLOCK_K) * BLOCK_K, c)
        b = tl.maximum(a, b)
    return a, b, c, end


@triton.jit
def _fwd_range(
    b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, lo, hi, o_q, length, qk_scale, window, D: tl.constexpr,
    BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [lo, hi)."""
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    o_tile = tl.arange(0, BLOCK_K)
    p_k += tl.cast(lo, tl.int64) * k_n + o_tile[:, None] * k_n + o_d[None, :]
    p_v += tl.cast(lo, tl.int64) * v_n + o_tile[:, None] * v_n + o_v[None, :]
    for i_k in tl.range(lo, hi, BLOCK_K):
        o_k = i_k + o_tile
        b_k = _load_rows(p_k, o_k, length, o_d, D, BLOCK_D, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if MASKED:  # scaled before hidden: a fused HIDDEN * scale - max(HIDDEN * scale) rounds hugely
            b_s = tl.where(
                _visible(o_q[:, None], o_k[None, :], window, WINDOWED), soft_cap(b_s * qk_scale, CAP), HIDDEN
            )
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_m_new[:, None])
        elif CAP > 0.0:
            b_s = soft_cap(b_s * qk_scale, CAP)
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_m_new[:, None])
        else:
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * qk_scale)
            b_p = tl.exp2(b_s * qk_scale - b_m_new[:, None])
        b_shrink = tl.exp2(b_m - b_m_new)
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_v = _load_rows(p_v, o_k, length, o_v, V, BLOCK_V, MASKED)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
        b_m = b_m_new
        p_k += BLOCK_K * k_n
        p_v += BLOCK_K * v_n
    return b_acc, b_m, b_l


@launcher
@triton.jit(do_not_specialize=["N"])
def _attention_fwd(
    p_q, p_k, p_v, p_out, p_lse, p_tiles, N, scale, window, q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h, H: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_tile, i_h = (
        tl.program_id(0) // H,
        tl.program_id(0) % H,
    )  # heads fastest: neighbours share keys, values in L2
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    o_row = tl.arange(0, BLOCK_Q)
    o_q = offset + o_row
    first = start + offset
    p_q += first * q_n + i_h * q_h + o_row[:, None] * q_n + o_d[None, :]
    b_q = _load_rows(p_q, o_q, length, o_d, D, BLOCK_D, True)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h

    b_acc = tl.zeros((BLOCK_Q, BLOCK_V), tl.float32)
    b_m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    b_l = tl.zeros((BLOCK_Q,), tl.float32)
    a, b, c, end = _key_ranges(offset, length, window, BLOCK_Q, BLOCK_K, WINDOWED)
    if WINDOWED:
        b_acc, b_m, b_l = _fwd_range(
            b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, a, b, o_q, length, qk_scale, window,
            D, BLOCK_D, V, BLOCK_V, BLOCK_K, True, True, CAP,
        )  # fmt: skip
    b_acc, b_m, b_l = _fwd_range(
        b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, b, c, o_q, length, qk_scale, window,
        D, BLOCK_D, V, BLOCK_V, BLOCK_K, WINDOWED, False, CAP,
    )  # fmt: skip
    b_acc, b_m, b_l = _fwd_range(
        b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, c, end, o_q, length, qk_scale, window,
        D, BLOCK_D, V, BLOCK_V, BLOCK_K, WINDOWED, True, CAP,
    )  # fmt: skip

    m_q = o_q < length
    tl.store(p_lse + i_h.to(tl.int64) * N + first + o_row, (b_m + tl.log2(b_l)) * LN2, m_q)
    p_out += first * o_n + i_h * o_h + o_row[:, None] * o_n + o_v[None, :]
    b_out = b_acc / b_l[:, None]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), m_q[:, None] & (o_v < V)[None, :])


class Forward(NamedTuple):
    """Launch for one dtype and layout."""

    rows: int  # of a query tile
    run: Fixed  # (q, k, v, out, lse, tiles), (N, scale)


def plan(
    device: torch.device, dtype: torch.dtype, H: int, K: int, D: int, V: int, window: int, strides, cap: float = 0.0
) -> Forward:
    """Forward for the strides of (q, k, v, out)."""
    tile = launch.attention(device, dtype, max(D, V)).fwd
    block_d, block_v = launch.head_blocks(D, V)
    widths = D, block_d, V, block_v
    constants = H, H // K, *widths, tile.q, tile.k, window > 0, cap
    return Forward(
        tile.q,
        Fixed(_attention_fwd, window, *flat(strides), *constants, num_warps=tile.warps, num_stages=tile.stages),
    )
