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
def parts_at(p, rows, D0: tl.constexpr, D1: tl.constexpr):
    """Pointers to a tile's parts; rows: offsets, a column."""
    first = p + (rows + tl.arange(0, D0)[None, :])
    return (first, p + (rows + (D0 + tl.arange(0, D1))[None, :])) if D1 else (first,)


@triton.jit
def _load_part(p, m_row, D: tl.constexpr, D0: tl.constexpr, ROW_MASK: tl.constexpr):
    if ROW_MASK:
        if D0 <= D:
            return tl.load(p, m_row, 0.0)
        return tl.load(p, m_row & (tl.arange(0, D0) < D)[None, :], 0.0)
    if D0 <= D:
        return tl.load(p)
    return tl.load(p, (tl.arange(0, D0) < D)[None, :], 0.0)


@triton.jit
def load_rows(parts, m_row, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROW_MASK: tl.constexpr):
    """A tile's parts; zeros where m_row, a column, is false (ROW_MASK), and beyond D."""
    first = _load_part(parts[0], m_row, D, D0, ROW_MASK)
    return (first, _load_part(parts[1], m_row, D - D0, D1, ROW_MASK)) if D1 else (first,)


@triton.jit
def _store_part(p, b, m_row, D: tl.constexpr):
    tl.store(p, b.to(p.dtype.element_ty), m_row & (tl.arange(0, b.shape[1]) < D)[None, :])


@triton.jit
def store_rows(parts, b, m_row, D: tl.constexpr):
    """Writes a tile's parts before column D."""
    _store_part(parts[0], b[0], m_row, D)
    if len(b) == 2:
        _store_part(parts[1], b[1], m_row, D - b[0].shape[1])


@triton.jit
def zeros(ROWS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    first = tl.zeros((ROWS, D0), tl.float32)
    return (first, tl.zeros((ROWS, D1), tl.float32)) if D1 else (first,)


@triton.jit
def products(a, b):
    """a b^T of two tiles in parts."""
    b_s = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if len(a) == 2:
        b_s = tl.dot(a[1], tl.trans(b[1]), b_s, input_precision="ieee")
    return b_s


@triton.jit
def add_products(acc, b_p, b):
    """acc + p b in parts, p rounded as b is."""
    b_p = b_p.to(b[0].dtype)
    first = tl.dot(b_p, b[0], acc[0], input_precision="ieee")
    return (first, tl.dot(b_p, b[1], acc[1], input_precision="ieee")) if len(b) == 2 else (first,)


@triton.jit
def visible(o_q, o_k, window, WINDOWED: tl.constexpr):
    """Mask (queries, keys), or with swapped axes (keys, queries)."""
    distance = o_q - o_k
    if WINDOWED:
        return (distance >= 0) & (distance < window)
    return distance >= 0


@triton.jit
def key_ranges(offset, length, window, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr):
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
    D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [lo, hi)."""
    o_tile = tl.arange(0, BLOCK_K)
    p_k = parts_at(p_k, tl.cast(lo, tl.int64) * k_n + o_tile[:, None] * k_n, D0, D1)
    p_v = parts_at(p_v, tl.cast(lo, tl.int64) * v_n + o_tile[:, None] * v_n, V0, V1)
    for i_k in tl.range(lo, hi, BLOCK_K):
        o_k = i_k + o_tile
        m_k = (o_k < length)[:, None]
        b_s = products(b_q, load_rows(p_k, m_k, D, D0, D1, MASKED))
        if MASKED:  # scaled before hidden: a fused HIDDEN * scale - max(HIDDEN * scale) rounds hugely
            b_s = tl.where(visible(o_q[:, None], o_k[None, :], window, WINDOWED), soft_cap(b_s * qk_scale, CAP), HIDDEN)
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
        b_v = load_rows(p_v, m_k, V, V0, V1, MASKED)
        b_acc = add_products([part * b_shrink[:, None] for part in b_acc], b_p, b_v)
        b_m = b_m_new
        p_k = [part + BLOCK_K * k_n for part in p_k]
        p_v = [part + BLOCK_K * v_n for part in p_v]
    return b_acc, b_m, b_l


@launcher
@triton.jit(do_not_specialize=["N"])
def _attention_fwd(
    p_q, p_k, p_v, p_out, p_lse, p_tiles, N, scale, window, q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h, H: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_tile, i_h = tl.program_id(0) // H, tl.program_id(0) % H  # heads fastest: neighbours share keys, values in L2
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_row = tl.arange(0, BLOCK_Q)
    o_q = offset + o_row
    m_q = o_q < length
    first = start + offset
    p_q = parts_at(p_q, first * q_n + i_h * q_h + o_row[:, None] * q_n, D0, D1)
    b_q = load_rows(p_q, m_q[:, None], D, D0, D1, True)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h

    b_acc = zeros(BLOCK_Q, V0, V1)
    b_m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    b_l = tl.zeros((BLOCK_Q,), tl.float32)
    bounds = key_ranges(offset, length, window, BLOCK_Q, BLOCK_K, WINDOWED)
    for i in tl.static_range(0 if WINDOWED else 1, 3):
        b_acc, b_m, b_l = _fwd_range(
            b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, bounds[i], bounds[i + 1], o_q, length, qk_scale, window,
            D, D0, D1, V, V0, V1, BLOCK_K, WINDOWED, i != 1, CAP,
        )  # fmt: skip

    tl.store(p_lse + i_h.to(tl.int64) * N + first + o_row, (b_m + tl.log2(b_l)) * LN2, m_q)
    p_out = parts_at(p_out, first * o_n + i_h * o_h + o_row[:, None] * o_n, V0, V1)
    store_rows(p_out, [part / b_l[:, None] for part in b_acc], m_q[:, None], V)


class Forward(NamedTuple):
    """Launch for one dtype and layout."""

    rows: int  # of a query tile
    run: Fixed  # (q, k, v, out, lse, tiles), (N, scale)


def plan(
    device: torch.device, dtype: torch.dtype, H: int, K: int, D: int, V: int, window: int, strides, cap: float = 0.0
) -> Forward:
    """Forward for the strides of (q, k, v, out)."""
    tile = launch.attention(device, dtype, max(D, V)).fwd
    sizes = H // K, *launch.head_parts(D, V, 64 if launch.chip(device).large else 16)
    constants = *flat(strides), H, *sizes, tile.q, tile.k, window > 0, cap
    return Forward(tile.q, Fixed(_attention_fwd, window, *constants, num_warps=tile.warps, num_stages=tile.stages))
