"""Attention's backward in Triton.

    dv = p^T do,  ds = p * (do v^T - delta),  delta = rowsum(do * out),  dq = scale * ds k,  dk = scale * ds^T q
    with a cap: ds * (1 - (s / cap)^2)

dq, then (dk, dv), a kernel each: every sum has one owner and order; dq leaves delta. Legend: fwd.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trireme.kernels import launch
from trireme.kernels.attention.fwd import LOG2E, _key_ranges, _load_rows, _visible, flat
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launcher import Fixed, await_previous, launcher
from trireme.kernels.soft_cap import cap_slope, soft_cap


@triton.jit
def _dq_range(
    b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, lo, hi, o_q, length, qk_scale, window, D: tl.constexpr,
    BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Adds ds k over keys [lo, hi)."""
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    o_tile = tl.arange(0, BLOCK_K)
    p_k += tl.cast(lo, tl.int64) * k_n + o_tile[:, None] * k_n + o_d[None, :]
    p_v += tl.cast(lo, tl.int64) * v_n + o_tile[:, None] * v_n + o_v[None, :]
    for i_k in tl.range(lo, hi, BLOCK_K):
        o_k = i_k + o_tile
        b_k = _load_rows(p_k, o_k, length, o_d, D, BLOCK_D, MASKED)
        b_v = _load_rows(p_v, o_k, length, o_v, V, BLOCK_V, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        b_s = soft_cap(b_s * qk_scale, CAP)
        b_p = tl.exp2(b_s - b_lse[:, None])
        if MASKED:
            b_p = tl.where(_visible(o_q[:, None], o_k[None, :], window, WINDOWED), b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if CAP > 0.0:
            b_ds = b_ds * cap_slope(b_s, CAP)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
        p_k += BLOCK_K * k_n
        p_v += BLOCK_K * v_n
    return b_dq


@launcher
@triton.jit(do_not_specialize=["N"])
def _attention_bwd_dq(
    p_do, p_q, p_k, p_v, p_out, p_lse, p_delta, p_dq, p_tiles, N, scale, window, do_n, do_h, q_n, q_h, k_n, k_h, v_n,
    v_h, o_n, o_h, dq_n, dq_h, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """dq and delta of a query tile."""
    await_previous()
    i_tile, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    o_row = tl.arange(0, BLOCK_Q)
    o_q = offset + o_row
    m_q = o_q < length
    first = start + offset
    p_do += first * do_n + i_h * do_h + o_row[:, None] * do_n + o_v[None, :]
    p_out += first * o_n + i_h * o_h + o_row[:, None] * o_n + o_v[None, :]
    p_q += first * q_n + i_h * q_h + o_row[:, None] * q_n + o_d[None, :]
    b_do = _load_rows(p_do, o_q, length, o_v, V, BLOCK_V, True)
    b_out = _load_rows(p_out, o_q, length, o_v, V, BLOCK_V, True)
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
            D, BLOCK_D, V, BLOCK_V, BLOCK_K, True, True, CAP,
        )  # fmt: skip
    b_dq = _dq_range(
        b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, b, c, o_q, length, qk_scale, window,
        D, BLOCK_D, V, BLOCK_V, BLOCK_K, WINDOWED, False, CAP,
    )  # fmt: skip
    b_dq = _dq_range(
        b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, c, end, o_q, length, qk_scale, window,
        D, BLOCK_D, V, BLOCK_V, BLOCK_K, WINDOWED, True, CAP,
    )  # fmt: skip
    p_dq += first * dq_n + i_h * dq_h + o_row[:, None] * dq_n + o_d[None, :]
    tl.store(p_dq, (b_dq * scale).to(p_dq.dtype.element_ty), m_q[:, None] & (o_d < D)[None, :])


@triton.jit
def _dkv_range(
    b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, lo, hi, o_k, length, qk_scale, window,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Adds p^T do and ds^T q over queries [lo, hi) of the group's heads, in one loop: loads run ahead."""
    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
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
            p_do + i_g * do_h + row * do_n + o_tile[:, None] * do_n + o_v[None, :], o_q, length, o_v, V, BLOCK_V, True
        )
        o_stat = tl.cast(i_g, tl.int64) * N + o_q
        b_lse = tl.load(p_lse + o_stat, o_q < length, float("inf")) * LOG2E  # inf: p = 0 past the end
        b_delta = tl.load(p_delta + o_stat, o_q < length, 0.0)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")  # (keys, queries)
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
        b_s = soft_cap(b_s * qk_scale, CAP)
        b_p = tl.exp2(b_s - b_lse[None, :])
        if MASKED:
            b_p = tl.where(_visible(o_q[None, :], o_k[:, None], window, WINDOWED), b_p, 0.0)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
        b_ds = b_p * (b_dp - b_delta[None, :])
        if CAP > 0.0:
            b_ds = b_ds * cap_slope(b_s, CAP)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@launcher
@triton.jit(do_not_specialize=["N"])
def _attention_bwd_dkv(
    p_do, p_q, p_k, p_v, p_lse, p_delta, p_dk, p_dv, p_tiles, N, scale, window, do_n, do_h, q_n, q_h, k_n, k_h, v_n,
    v_h, dk_n, dk_h, dv_n, dv_h, K: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """dk, dv of a key tile and key/value head."""
    await_previous()
    i_tile, i_h = tl.program_id(0) // K, tl.program_id(0) % K
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_d = tl.arange(0, BLOCK_D)
    o_v = tl.arange(0, BLOCK_V)
    o_row = tl.arange(0, BLOCK_K)
    o_k = offset + o_row
    first = start + offset
    p_k += first * k_n + i_h * k_h + o_row[:, None] * k_n + o_d[None, :]
    p_v += first * v_n + i_h * v_h + o_row[:, None] * v_n + o_v[None, :]
    b_k = _load_rows(p_k, o_k, length, o_d, D, BLOCK_D, True)
    b_v = _load_rows(p_v, o_k, length, o_v, V, BLOCK_V, True)
    i_group = i_h.to(tl.int64) * GROUP
    p_q += start * q_n + i_group * q_h
    p_do += start * do_n + i_group * do_h
    p_lse += i_group * N + start
    p_delta += i_group * N + start

    # queries: [a, b) on the diagonal, [b, c) see all keys, [c, end) cut by the window
    a = offset // BLOCK_Q * BLOCK_Q
    b = tl.minimum(tl.cdiv(offset + BLOCK_K, BLOCK_Q) * BLOCK_Q, length)
    c = length
    end = length
    if WINDOWED:
        end = tl.minimum(offset + BLOCK_K - 1 + window, length)
        c = tl.minimum(tl.maximum((offset + window) // BLOCK_Q * BLOCK_Q, b), end)
    b_dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    b_dv = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    b_dk, b_dv = _dkv_range(
        b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, a, b, o_k, length,
        qk_scale, window, GROUP, D, BLOCK_D, V, BLOCK_V, BLOCK_Q, WINDOWED, True, CAP,
    )  # fmt: skip
    b_dk, b_dv = _dkv_range(
        b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, b, c, o_k, length,
        qk_scale, window, GROUP, D, BLOCK_D, V, BLOCK_V, BLOCK_Q, WINDOWED, False, CAP,
    )  # fmt: skip
    if WINDOWED:
        b_dk, b_dv = _dkv_range(
            b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, c, end, o_k, length,
            qk_scale, window, GROUP, D, BLOCK_D, V, BLOCK_V, BLOCK_Q, True, True, CAP,
        )  # fmt: skip
    m_k = (o_k < length)[:, None]
    p_dk += first * dk_n + i_h * dk_h + o_row[:, None] * dk_n + o_d[None, :]
    p_dv += first * dv_n + i_h * dv_h + o_row[:, None] * dv_n + o_v[None, :]
    tl.store(p_dk, (b_dk * scale).to(p_dk.dtype.element_ty), m_k & (o_d < D)[None, :])
    tl.store(p_dv, b_dv.to(p_dv.dtype.element_ty), m_k & (o_v < V)[None, :])


class Backward(NamedTuple):
    """Launches for one dtype and layout."""

    query_rows: int  # of a query tile of dq
    dq: Fixed  # (dout, q, k, v, out, lse, delta, dq, tiles), (N, scale)
    key_rows: int  # of a key tile
    dkv: Fixed  # (dout, q, k, v, lse, delta, dk, dv, tiles), (N, scale)


def plan(
    device: torch.device, dtype: torch.dtype, H: int, K: int, D: int, V: int, window: int, strides, cap: float = 0.0
) -> Backward:
    """Backward for the strides of (dout, q, k, v, out, dq, dk, dv)."""
    dout, q, k, v, out, dq, dk, dv = strides
    block_d, block_v = launch.head_blocks(D, V)
    sizes = H // K, D, block_d, V, block_v
    _, by_query, by_key = launch.attention(device, dtype, max(D, V))
    return Backward(
        by_query.q,
        Fixed(
            _attention_bwd_dq, window, *flat((dout, q, k, v, out, dq)), H, *sizes, by_query.q, by_query.k, window > 0,
            cap, num_warps=by_query.warps, num_stages=by_query.stages,
        ),
        by_key.k,
        Fixed(
            _attention_bwd_dkv, window, *flat((dout, q, k, v, dk, dv)), K, *sizes, by_key.q, by_key.k, window > 0,
            cap, num_warps=by_key.warps, num_stages=by_key.stages,
        ),
    )  # fmt: skip
