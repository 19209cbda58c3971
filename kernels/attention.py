"""Causal flash attention (Dao 2023) over packed documents, grouped queries, optional sliding window.

    s = scale * q k^T,  p = exp(s - lse),  out = p v
    dv = p^T do,  ds = p * (do v^T - delta),  delta = rowsum(do * out),  dq = scale * ds k,  dk = scale * ds^T q

Softmax runs in base 2. One program owns one tile of rows that docs.py lists, heaviest first; dq and (dk, dv) have a
kernel each, so every sum has one owner and a fixed order. Tiles wholly below the diagonal need no mask.
Legend: N tokens, H query heads, K key/value heads, GROUP = H / K, D head width, BLOCK_Q x BLOCK_K the tile of scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import attention_cudnn, attention_hopper, launch
from trireme.kernels.attention_hopper import strides
from trireme.kernels.docs import Docs

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)  # finite: a row whose first tile is all hidden must not meet inf - inf


@triton.jit
def _load_rows(p, o_row, length, o_d, D: tl.constexpr, BLOCK_D: tl.constexpr, ROW_MASK: tl.constexpr):
    """Rows of a tile; zeros beyond the document (where ROW_MASK) and beyond D."""
    if ROW_MASK:
        if BLOCK_D == D:
            return tl.load(p, (o_row < length)[:, None], 0.0)
        return tl.load(p, (o_row < length)[:, None] & (o_d < D)[None, :], 0.0)
    if BLOCK_D == D:
        return tl.load(p)
    return tl.load(p, (o_d < D)[None, :], 0.0)


@triton.jit
def _visible(o_q, o_k, window, WINDOWED: tl.constexpr):
    """(queries, keys) or, with the arguments' axes swapped by the caller, (keys, queries): who sees whom."""
    distance = o_q - o_k
    if WINDOWED:
        return (distance >= 0) & (distance < window)
    return distance >= 0


@triton.jit
def _key_ranges(offset, length, window, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr):
    """(a, b, c, end) of a query tile's keys: [a, b) cut by the window, [b, c) all visible, [c, end) on the diagonal."""
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
    b_acc,
    b_m,
    b_l,
    b_q,
    p_k,
    p_v,
    k_n,
    v_n,
    lo,
    hi,
    o_q,
    length,
    qk_scale,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over keys [lo, hi) of the document that p_k and p_v point to."""
    o_d = tl.arange(0, BLOCK_D)
    o_tile = tl.arange(0, BLOCK_K)
    p_k += tl.cast(lo, tl.int64) * k_n + o_tile[:, None] * k_n + o_d[None, :]
    p_v += tl.cast(lo, tl.int64) * v_n + o_tile[:, None] * v_n + o_d[None, :]
    for i_k in tl.range(lo, hi, BLOCK_K):
        o_k = i_k + o_tile
        b_k = _load_rows(p_k, o_k, length, o_d, D, BLOCK_D, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if MASKED:  # scaled before hidden: a fused HIDDEN * scale - max(HIDDEN * scale) is a huge rounding error
            b_s = tl.where(_visible(o_q[:, None], o_k[None, :], window, WINDOWED), b_s * qk_scale, HIDDEN)
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_m_new[:, None])
        else:
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * qk_scale)
            b_p = tl.exp2(b_s * qk_scale - b_m_new[:, None])
        b_shrink = tl.exp2(b_m - b_m_new)
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_v = _load_rows(p_v, o_k, length, o_d, D, BLOCK_D, MASKED)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
        b_m = b_m_new
        p_k += BLOCK_K * k_n
        p_v += BLOCK_K * v_n
    return b_acc, b_m, b_l


@triton.jit(do_not_specialize=["N"])
def _attention_fwd(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_tiles,
    N,
    scale,
    window,
    q_n,
    q_h,
    k_n,
    k_h,
    v_n,
    v_h,
    o_n,
    o_h,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    i_tile, i_h = (
        tl.program_id(0) // H,
        tl.program_id(0) % H,
    )  # heads run fastest: neighbours share keys and values in L2
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_d = tl.arange(0, BLOCK_D)
    o_row = tl.arange(0, BLOCK_Q)
    o_q = offset + o_row
    first = start + offset
    p_q += first * q_n + i_h * q_h + o_row[:, None] * q_n + o_d[None, :]
    b_q = _load_rows(p_q, o_q, length, o_d, D, BLOCK_D, True)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h

    b_acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    b_m = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    b_l = tl.zeros((BLOCK_Q,), tl.float32)
    a, b, c, end = _key_ranges(offset, length, window, BLOCK_Q, BLOCK_K, WINDOWED)
    if WINDOWED:
        b_acc, b_m, b_l = _fwd_range(
            b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, a, b, o_q, length, qk_scale, window,
            D, BLOCK_D, BLOCK_K, True, True,
        )  # fmt: skip
    b_acc, b_m, b_l = _fwd_range(
        b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, b, c, o_q, length, qk_scale, window,
        D, BLOCK_D, BLOCK_K, WINDOWED, False,
    )  # fmt: skip
    b_acc, b_m, b_l = _fwd_range(
        b_acc, b_m, b_l, b_q, p_k, p_v, k_n, v_n, c, end, o_q, length, qk_scale, window,
        D, BLOCK_D, BLOCK_K, WINDOWED, True,
    )  # fmt: skip

    m_q = o_q < length
    tl.store(p_lse + i_h.to(tl.int64) * N + first + o_row, (b_m + tl.log2(b_l)) * LN2, m_q)
    p_out += first * o_n + i_h * o_h + o_row[:, None] * o_n + o_d[None, :]
    b_out = b_acc / b_l[:, None]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), m_q[:, None] & (o_d < D)[None, :])


# ---------------------------------------------------------------- backward


@triton.jit
def _dq_range(
    b_dq,
    b_q,
    b_do,
    b_lse,
    b_delta,
    p_k,
    p_v,
    k_n,
    v_n,
    lo,
    hi,
    o_q,
    length,
    qk_scale,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds ds k over keys [lo, hi)."""
    o_d = tl.arange(0, BLOCK_D)
    o_tile = tl.arange(0, BLOCK_K)
    p_k += tl.cast(lo, tl.int64) * k_n + o_tile[:, None] * k_n + o_d[None, :]
    p_v += tl.cast(lo, tl.int64) * v_n + o_tile[:, None] * v_n + o_d[None, :]
    for i_k in tl.range(lo, hi, BLOCK_K):
        o_k = i_k + o_tile
        b_k = _load_rows(p_k, o_k, length, o_d, D, BLOCK_D, MASKED)
        b_v = _load_rows(p_v, o_k, length, o_d, D, BLOCK_D, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        b_p = tl.exp2(b_s * qk_scale - b_lse[:, None])
        if MASKED:
            b_p = tl.where(_visible(o_q[:, None], o_k[None, :], window, WINDOWED), b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
        p_k += BLOCK_K * k_n
        p_v += BLOCK_K * v_n
    return b_dq


@triton.jit(do_not_specialize=["N"])
def _attention_bwd_dq(
    p_do,
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    p_delta,
    p_dq,
    p_tiles,
    N,
    scale,
    window,
    do_n,
    do_h,
    q_n,
    q_h,
    k_n,
    k_h,
    v_n,
    v_h,
    o_n,
    o_h,
    dq_n,
    dq_h,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """dq of one query tile, and its delta, which the (dk, dv) kernel reads."""
    i_tile, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_d = tl.arange(0, BLOCK_D)
    o_row = tl.arange(0, BLOCK_Q)
    o_q = offset + o_row
    m_q = o_q < length
    first = start + offset
    p_do += first * do_n + i_h * do_h + o_row[:, None] * do_n + o_d[None, :]
    p_out += first * o_n + i_h * o_h + o_row[:, None] * o_n + o_d[None, :]
    p_q += first * q_n + i_h * q_h + o_row[:, None] * q_n + o_d[None, :]
    b_do = _load_rows(p_do, o_q, length, o_d, D, BLOCK_D, True)
    b_out = _load_rows(p_out, o_q, length, o_d, D, BLOCK_D, True)
    b_delta = tl.sum(b_do.to(tl.float32) * b_out.to(tl.float32), 1)
    o_stat = i_h.to(tl.int64) * N + first + o_row
    tl.store(p_delta + o_stat, b_delta, m_q)
    b_lse = tl.load(p_lse + o_stat, m_q, 0.0) * LOG2E
    b_q = _load_rows(p_q, o_q, length, o_d, D, BLOCK_D, True)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h

    b_dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    a, b, c, end = _key_ranges(offset, length, window, BLOCK_Q, BLOCK_K, WINDOWED)
    if WINDOWED:
        b_dq = _dq_range(
            b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, a, b, o_q, length, qk_scale, window,
            D, BLOCK_D, BLOCK_K, True, True,
        )  # fmt: skip
    b_dq = _dq_range(
        b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, b, c, o_q, length, qk_scale, window,
        D, BLOCK_D, BLOCK_K, WINDOWED, False,
    )  # fmt: skip
    b_dq = _dq_range(
        b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, c, end, o_q, length, qk_scale, window,
        D, BLOCK_D, BLOCK_K, WINDOWED, True,
    )  # fmt: skip
    p_dq += first * dq_n + i_h * dq_h + o_row[:, None] * dq_n + o_d[None, :]
    tl.store(p_dq, (b_dq * scale).to(p_dq.dtype.element_ty), m_q[:, None] & (o_d < D)[None, :])


@triton.jit
def _dkv_range(
    b_dk,
    b_dv,
    b_k,
    b_v,
    p_do,
    p_q,
    p_lse,
    p_delta,
    N,
    do_n,
    do_h,
    q_n,
    q_h,
    lo,
    hi,
    o_k,
    length,
    qk_scale,
    window,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds p^T do and ds^T q over queries [lo, hi) of all heads of the group, in one loop so that loads run ahead."""
    o_d = tl.arange(0, BLOCK_D)
    o_tile = tl.arange(0, BLOCK_Q)
    steps = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_Q)
    for i in tl.range(0, GROUP * steps):
        i_g = i // steps
        i_q = lo + (i % steps) * BLOCK_Q
        o_q = i_q + o_tile
        row = tl.cast(i_q, tl.int64)
        b_q = _load_rows(
            p_q + i_g * q_h + row * q_n + o_tile[:, None] * q_n + o_d[None, :], o_q, length, o_d, D, BLOCK_D, True
        )
        b_do = _load_rows(
            p_do + i_g * do_h + row * do_n + o_tile[:, None] * do_n + o_d[None, :], o_q, length, o_d, D, BLOCK_D, True
        )
        o_stat = tl.cast(i_g, tl.int64) * N + o_q
        b_lse = tl.load(p_lse + o_stat, o_q < length, float("inf")) * LOG2E  # inf: rows past the end get p = 0
        b_delta = tl.load(p_delta + o_stat, o_q < length, 0.0)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")  # (keys, queries)
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
        b_p = tl.exp2(b_s * qk_scale - b_lse[None, :])
        if MASKED:
            b_p = tl.where(_visible(o_q[None, :], o_k[:, None], window, WINDOWED), b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
        b_ds = b_p * (b_dp - b_delta[None, :])
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@triton.jit(do_not_specialize=["N"])
def _attention_bwd_dkv(
    p_do,
    p_q,
    p_k,
    p_v,
    p_lse,
    p_delta,
    p_dk,
    p_dv,
    p_tiles,
    N,
    scale,
    window,
    do_n,
    do_h,
    q_n,
    q_h,
    k_n,
    k_h,
    v_n,
    v_h,
    dk_n,
    dk_h,
    dv_n,
    dv_h,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """dk and dv of one key tile of one key/value head."""
    i_tile, i_h = tl.program_id(0) // K, tl.program_id(0) % K
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_d = tl.arange(0, BLOCK_D)
    o_row = tl.arange(0, BLOCK_K)
    o_k = offset + o_row
    first = start + offset
    p_k += first * k_n + i_h * k_h + o_row[:, None] * k_n + o_d[None, :]
    p_v += first * v_n + i_h * v_h + o_row[:, None] * v_n + o_d[None, :]
    b_k = _load_rows(p_k, o_k, length, o_d, D, BLOCK_D, True)
    b_v = _load_rows(p_v, o_k, length, o_d, D, BLOCK_D, True)
    i_group = i_h.to(tl.int64) * GROUP
    p_q += start * q_n + i_group * q_h
    p_do += start * do_n + i_group * do_h
    p_lse += i_group * N + start
    p_delta += i_group * N + start

    # queries [a, b) meet the diagonal, [b, c) see every key of the tile, [c, end) are cut by the window
    a = offset // BLOCK_Q * BLOCK_Q
    b = tl.minimum(tl.cdiv(offset + BLOCK_K, BLOCK_Q) * BLOCK_Q, length)
    c = length
    end = length
    if WINDOWED:
        end = tl.minimum(offset + BLOCK_K - 1 + window, length)
        c = tl.minimum(tl.maximum((offset + window) // BLOCK_Q * BLOCK_Q, b), end)
    b_dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    b_dk, b_dv = _dkv_range(
        b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, a, b, o_k, length,
        qk_scale, window, GROUP, D, BLOCK_D, BLOCK_Q, WINDOWED, True,
    )  # fmt: skip
    b_dk, b_dv = _dkv_range(
        b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, b, c, o_k, length,
        qk_scale, window, GROUP, D, BLOCK_D, BLOCK_Q, WINDOWED, False,
    )  # fmt: skip
    if WINDOWED:
        b_dk, b_dv = _dkv_range(
            b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, c, end, o_k, length,
            qk_scale, window, GROUP, D, BLOCK_D, BLOCK_Q, True, True,
        )  # fmt: skip
    mask = (o_k < length)[:, None] & (o_d < D)[None, :]
    p_dk += first * dk_n + i_h * dk_h + o_row[:, None] * dk_n + o_d[None, :]
    p_dv += first * dv_n + i_h * dv_h + o_row[:, None] * dv_n + o_d[None, :]
    tl.store(p_dk, (b_dk * scale).to(p_dk.dtype.element_ty), mask)
    tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), mask)


# ---------------------------------------------------------------- launchers


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, docs: Docs, scale: float, window: int = 0, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.attention_fwd. Each head's d values lie together; tokens and heads may be strided."""
    N, H, D = q.shape
    _check(q, k, v, scale)
    if attention_cudnn.suits(q, docs, window):
        return attention_cudnn.attention_fwd(q, k, v, docs, scale, out)
    out = torch.empty((N, H, D), dtype=q.dtype, device=q.device) if out is None else out
    assert out.shape == q.shape and out.stride(2) == 1
    lse = torch.empty((H, N), dtype=torch.float32, device=q.device)
    tile = launch.attention_fwd(q)
    tiles = docs.query_tiles[tile.q]
    _attention_fwd[(len(tiles) * H,)](
        q, k, v, out, lse, tiles, N, scale, window, *strides(q, k, v, out),
        H, H // k.shape[1], D, launch.head_block(D), tile.q, tile.k, window > 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    docs: Docs,
    scale: float,
    dq_: Tensor,
    dk_: Tensor,
    dv_: Tensor,
    window: int = 0,
) -> None:
    """As reference.attention_bwd. Each head's d values lie together; tokens and heads may be strided."""
    N, H, D = q.shape
    K = k.shape[1]
    _check(q, k, v, scale)
    assert dout.shape == out.shape == dq_.shape == q.shape and dk_.shape == dv_.shape == k.shape
    assert all(t.stride(2) == 1 for t in (dout, out, dq_, dk_, dv_)) and lse.shape == (H, N) and lse.is_contiguous()
    if attention_hopper.suits(window, q, k, v, dout):
        return attention_hopper.attention_bwd(dout, q, k, v, out, lse, docs, scale, dq_, dk_, dv_)
    delta = torch.empty_like(lse)
    block_d = launch.head_block(D)
    tile = launch.attention_dq(q)
    tiles = docs.query_tiles[tile.q]
    _attention_bwd_dq[(len(tiles) * H,)](
        dout, q, k, v, out, lse, delta, dq_, tiles, N, scale, window, *strides(dout, q, k, v, out, dq_),
        H, H // K, D, block_d, tile.q, tile.k, window > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = launch.attention_dkv(q)
    tiles = docs.key_tiles[tile.k]
    _attention_bwd_dkv[(len(tiles) * K,)](
        dout, q, k, v, lse, delta, dk_, dv_, tiles, N, scale, window, *strides(dout, q, k, v, dk_, dv_),
        K, H // K, D, block_d, tile.q, tile.k, window > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    N, H, D = q.shape
    assert k.shape == v.shape == (N, k.shape[1], D) and H % k.shape[1] == 0 and 8 <= D <= 256 and scale > 0
    assert q.dtype == k.dtype == v.dtype and q.stride(2) == k.stride(2) == v.stride(2) == 1
