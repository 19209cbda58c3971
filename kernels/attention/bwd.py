"""Attention's backward in Triton.

    dv = p^T do,  ds = p * (do v^T - delta),  delta = rowsum(do * out),  dq = scale * ds k,  dk = scale * ds^T q
    with a cap: ds * (1 - (s / cap)^2)

dq, then (dk, dv), a kernel each: every sum has one owner and order; dq leaves delta. Legend: fwd.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.attention import fwd
from trireme.kernels.attention.docs import Docs
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launcher import Fixed, await_previous, launcher
from trireme.kernels.soft_cap import LOG2E, cap_slope, soft_cap


@triton.jit
def _dq_range(
    b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, lo, hi, o_q, length, qk_scale, window, D: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BLOCK_K: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Adds ds k over keys [lo, hi)."""
    o_tile = tl.arange(0, BLOCK_K)
    p_k = fwd.parts_at(p_k, tl.cast(lo, tl.int64) * k_n + o_tile[:, None] * k_n, D0, D1)
    p_v = fwd.parts_at(p_v, tl.cast(lo, tl.int64) * v_n + o_tile[:, None] * v_n, V0, V1)
    for i_k in tl.range(lo, hi, BLOCK_K):
        o_k = i_k + o_tile
        m_k = (o_k < length)[:, None]
        b_k = fwd.load_rows(p_k, m_k, D, D0, D1, MASKED)
        b_v = fwd.load_rows(p_v, m_k, V, V0, V1, MASKED)
        b_s = fwd.products(b_q, b_k)
        b_dp = fwd.products(b_do, b_v)
        b_s = soft_cap(b_s * qk_scale, CAP)
        b_p = tl.exp2(b_s - b_lse[:, None])
        if MASKED:
            b_p = tl.where(fwd.visible(o_q[:, None], o_k[None, :], window, WINDOWED), b_p, 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if CAP > 0.0:
            b_ds = b_ds * cap_slope(b_s, CAP)
        b_dq = fwd.add_products(b_dq, b_ds, b_k)
        p_k = [part + BLOCK_K * k_n for part in p_k]
        p_v = [part + BLOCK_K * v_n for part in p_v]
    return b_dq


@launcher
@triton.jit(do_not_specialize=["N"])
def _attention_bwd_dq(
    p_do, p_q, p_k, p_v, p_out, p_lse, p_delta, p_dq, p_tiles, N, scale, window, do_n, do_h, q_n, q_h, k_n, k_h, v_n,
    v_h, o_n, o_h, dq_n, dq_h, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dq and delta of a query tile."""
    await_previous()
    i_tile, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_row = tl.arange(0, BLOCK_Q)
    o_q = offset + o_row
    m_q = o_q < length
    first = start + offset
    m_row = m_q[:, None]
    p_do = fwd.parts_at(p_do, first * do_n + i_h * do_h + o_row[:, None] * do_n, V0, V1)
    p_out = fwd.parts_at(p_out, first * o_n + i_h * o_h + o_row[:, None] * o_n, V0, V1)
    p_q = fwd.parts_at(p_q, first * q_n + i_h * q_h + o_row[:, None] * q_n, D0, D1)
    b_do = fwd.load_rows(p_do, m_row, V, V0, V1, True)
    b_out = fwd.load_rows(p_out, m_row, V, V0, V1, True)
    b_delta = tl.sum(b_do[0].to(tl.float32) * b_out[0].to(tl.float32), 1)
    if V1:
        b_delta += tl.sum(b_do[1].to(tl.float32) * b_out[1].to(tl.float32), 1)
    o_stat = i_h.to(tl.int64) * N + first + o_row
    tl.store(p_delta + o_stat, b_delta, m_q)
    b_lse = tl.load(p_lse + o_stat, m_q, 0.0) * LOG2E
    b_q = fwd.load_rows(p_q, m_row, D, D0, D1, True)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h

    b_dq = fwd.zeros(BLOCK_Q, D0, D1)
    bounds = fwd.key_ranges(offset, length, window, BLOCK_Q, BLOCK_K, WINDOWED)
    for i in tl.static_range(0 if WINDOWED else 1, 3):
        b_dq = _dq_range(
            b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_n, v_n, bounds[i], bounds[i + 1], o_q, length, qk_scale,
            window, D, D0, D1, V, V0, V1, BLOCK_K, WINDOWED, i != 1, CAP,
        )  # fmt: skip
    p_dq = fwd.parts_at(p_dq, first * dq_n + i_h * dq_h + o_row[:, None] * dq_n, D0, D1)
    fwd.store_rows(p_dq, [part * scale for part in b_dq], m_row, D)


@triton.jit
def _dkv_range(
    b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, lo, hi, o_k, length, qk_scale, window,
    GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, BLOCK_Q: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Adds p^T do and ds^T q over queries [lo, hi) of the group's heads, in one loop: loads run ahead."""
    o_tile = tl.arange(0, BLOCK_Q)
    steps = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_Q)
    for i in tl.range(0, GROUP * steps):
        i_g = i // steps
        i_q = lo + (i % steps) * BLOCK_Q
        o_q = i_q + o_tile
        row = tl.cast(i_q, tl.int64)
        m_q = (o_q < length)[:, None]
        q_tile = fwd.parts_at(p_q + i_g * q_h + row * q_n + o_tile[:, None] * q_n, 0, D0, D1)
        b_q = fwd.load_rows(q_tile, m_q, D, D0, D1, True)
        do_tile = fwd.parts_at(p_do + i_g * do_h + row * do_n + o_tile[:, None] * do_n, 0, V0, V1)
        b_do = fwd.load_rows(do_tile, m_q, V, V0, V1, True)
        o_stat = tl.cast(i_g, tl.int64) * N + o_q
        b_lse = tl.load(p_lse + o_stat, o_q < length, float("inf")) * LOG2E  # inf: p = 0 past the end
        b_delta = tl.load(p_delta + o_stat, o_q < length, 0.0)
        b_s = fwd.products(b_k, b_q)  # (keys, queries)
        b_dp = fwd.products(b_v, b_do)
        b_s = soft_cap(b_s * qk_scale, CAP)
        b_p = tl.exp2(b_s - b_lse[None, :])
        if MASKED:
            b_p = tl.where(fwd.visible(o_q[None, :], o_k[:, None], window, WINDOWED), b_p, 0.0)
        b_dv = fwd.add_products(b_dv, b_p, b_do)
        b_ds = b_p * (b_dp - b_delta[None, :])
        if CAP > 0.0:
            b_ds = b_ds * cap_slope(b_s, CAP)
        b_dk = fwd.add_products(b_dk, b_ds, b_q)
    return b_dk, b_dv


@launcher
@triton.jit(do_not_specialize=["N"])
def _attention_bwd_dkv(
    p_do, p_q, p_k, p_v, p_lse, p_delta, p_dk, p_dv, p_tiles, N, scale, window, do_n, do_h, q_n, q_h, k_n, k_h, v_n,
    v_h, dk_n, dk_h, dv_n, dv_h, K: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """dk, dv of a key tile and key/value head."""
    await_previous()
    i_tile, i_h = tl.program_id(0) // K, tl.program_id(0) % K
    start = tl.load(p_tiles + 3 * i_tile).to(tl.int64)
    offset = tl.load(p_tiles + 3 * i_tile + 1)
    length = tl.load(p_tiles + 3 * i_tile + 2)
    qk_scale = scale * LOG2E

    o_row = tl.arange(0, BLOCK_K)
    o_k = offset + o_row
    first = start + offset
    m_k = (o_k < length)[:, None]
    p_k = fwd.parts_at(p_k, first * k_n + i_h * k_h + o_row[:, None] * k_n, D0, D1)
    p_v = fwd.parts_at(p_v, first * v_n + i_h * v_h + o_row[:, None] * v_n, V0, V1)
    b_k = fwd.load_rows(p_k, m_k, D, D0, D1, True)
    b_v = fwd.load_rows(p_v, m_k, V, V0, V1, True)
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
    b_dk, b_dv = fwd.zeros(BLOCK_K, D0, D1), fwd.zeros(BLOCK_K, V0, V1)
    bounds = a, b, c, end
    for i in tl.static_range(3 if WINDOWED else 2):
        b_dk, b_dv = _dkv_range(
            b_dk, b_dv, b_k, b_v, p_do, p_q, p_lse, p_delta, N, do_n, do_h, q_n, q_h, bounds[i], bounds[i + 1], o_k,
            length, qk_scale, window, GROUP, D, D0, D1, V, V0, V1, BLOCK_Q, WINDOWED, i != 1, CAP,
        )  # fmt: skip
    p_dk = fwd.parts_at(p_dk, first * dk_n + i_h * dk_h + o_row[:, None] * dk_n, D0, D1)
    p_dv = fwd.parts_at(p_dv, first * dv_n + i_h * dv_h + o_row[:, None] * dv_n, V0, V1)
    fwd.store_rows(p_dk, [part * scale for part in b_dk], m_k, D)
    fwd.store_rows(p_dv, b_dv, m_k, V)


class Backward(NamedTuple):
    """Launches for one dtype and layout."""

    query_rows: int  # of a query tile of dq
    dq: Fixed  # (dout, q, k, v, out, lse, delta, dq, tiles), (N, scale)
    key_rows: int  # of a key tile
    dkv: Fixed  # (dout, q, k, v, lse, delta, dk, dv, tiles), (N, scale)

    def run(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, docs: Docs, scale: float,
        dq_: Tensor, dk_: Tensor, dv_: Tensor,
    ) -> None:  # fmt: skip
        """As reference.attention_bwd."""
        (N, H, _), K = q.shape, k.shape[1]
        delta = torch.empty_like(lse)
        tiles = docs.query_tiles[self.query_rows]
        self.dq(len(tiles) * H, (dout, q, k, v, out, lse, delta, dq_, tiles), (N, scale))
        tiles = docs.key_tiles[self.key_rows]
        self.dkv(len(tiles) * K, (dout, q, k, v, lse, delta, dk_, dv_, tiles), (N, scale))


def plan(
    device: torch.device, dtype: torch.dtype, H: int, K: int, D: int, V: int, window: int, strides, cap: float = 0.0
) -> Backward:
    """Backward for the strides of (dout, q, k, v, out, dq, dk, dv)."""
    dout, q, k, v, out, dq, dk, dv = strides
    sizes = H // K, *launch.head_parts(D, V, 64 if launch.chip(device).large else 16)
    _, by_query, by_key = launch.attention(device, dtype, max(D, V))
    return Backward(
        by_query.q,
        Fixed(
            _attention_bwd_dq, window, *fwd.flat((dout, q, k, v, out, dq)), H, *sizes, by_query.q, by_query.k,
            window > 0, cap, num_warps=by_query.warps, num_stages=by_query.stages,
        ),
        by_key.k,
        Fixed(
            _attention_bwd_dkv, window, *fwd.flat((dout, q, k, v, dk, dv)), K, *sizes, by_key.q, by_key.k, window > 0,
            cap, num_warps=by_key.warps, num_stages=by_key.stages,
        ),
    )  # fmt: skip
