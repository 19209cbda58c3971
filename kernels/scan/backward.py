"""Backward of a scan by chunks (reference.py has the formulas): gradients of states in reverse, then all others.

A program of `_walk_back` owns some columns of a head's state, transposed as in forward.py, a program of `_gradients` a
chunk of a head, whose keys it divides into BLOCK_D columns. With X = T^T dD the gradient of a state takes
-W^T dD = -(beta e^G k)^T X, so W is not needed. The gradient of the state behind a chunk is stored in the slot of the
next chunk's state. Legend: forward.py.
"""

from __future__ import annotations

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.scan.forward import columns, decayed, decays, put, state, tile, transposed


@launcher
@triton.jit
def _walk_back(
    p_dO, p_q, p_k, p_g, p_beta, p_cu, p_T, p_P, p_X, p_dstates, q_stride, k_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_e, i_h, _, i_start, i_end = columns(p_cu, H, E, BLOCK_E)
    o_c, i_k = tl.arange(0, C), i_h // (H // K)
    dtype = p_q.dtype.element_ty
    b_dS = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    chunks = tl.cdiv(i_end - i_start, C)
    for i in range(chunks):
        i_first = i_start + (chunks - 1 - i) * C
        i_row, n = tl.cast(i_first, tl.int64), i_end - i_first
        if i > 0:
            p_state, m_state = state(p_dstates, (i_row // C + 1) * H + i_h, 0, i_e, D, E, BLOCK_D, BLOCK_E)
            tl.store(p_state, b_dS.to(p_dstates.dtype.element_ty), m_state)
        b_G, b_end = decays(p_g, i_row, n, i_h, H, C)
        b_before, b_behind = tl.exp(b_G)[None, :], tl.exp(b_end - b_G)[None, :]
        b_k = tile(p_k + i_k * D, i_row, k_stride, n, 0, C, D, BLOCK_D)
        b_P = tile(p_P + i_h * C, i_row, H * C, n, 0, C, C, C)
        p_gradient, mask = transposed(p_dO + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)
        b_dO = tl.load(p_gradient, mask, 0.0)
        b_X = b_behind * tl.dot(b_dS.to(dtype), tl.trans(b_k), input_precision=PRECISION)
        b_X += tl.dot(b_dO, b_P, input_precision=PRECISION)
        if p_T is not None:
            b_T = tile(p_T + i_h * C, i_row, H * C, n, 0, C, C, C)
            b_X = tl.dot(b_X.to(dtype), b_T, input_precision=PRECISION)
        tl.store(transposed(p_X + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)[0], b_X.to(dtype), mask)
        b_q = tile(p_q + i_k * D, i_row, q_stride, n, 0, C, D, BLOCK_D)
        b_dO = (b_dO.to(tl.float32) * b_before).to(dtype)
        b_dS = tl.exp(b_end) * b_dS + tl.dot(b_dO, b_q, input_precision=PRECISION)
        if p_T is not None:
            b_beta = tl.load(p_beta + (i_row + o_c) * H + i_h, o_c < n, 0.0)[None, :]
            b_dS -= tl.dot((b_X * (b_beta * b_before)).to(dtype), b_k, input_precision=PRECISION)


@launcher
@triton.jit
def _gradients(
    p_dO, p_q, p_k, p_v, p_g, p_beta, p_tiles, p_D, p_X, p_states, p_dstates, p_skip, p_dq, p_dk, p_dv, p_dg, p_dbeta,
    p_dskip, q_stride, k_stride, v_stride, dq_stride, dk_stride, dv_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p_D: with the delta rule."""
    await_previous()
    i_h, i_tile = tl.program_id(0) % H, tl.program_id(0) // H
    i_offset = tl.load(p_tiles + i_tile * 3 + 1)
    i_row = (tl.load(p_tiles + i_tile * 3) + i_offset).to(tl.int64)
    n = tl.load(p_tiles + i_tile * 3 + 2) - i_offset
    o_c, i_k = tl.arange(0, C), i_h // (H // K)
    o_h = (i_row + o_c) * H + i_h
    dtype = p_q.dtype.element_ty
    b_beta = tl.load(p_beta + o_h, o_c < n, 0.0)
    b_dP, b_dA = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    b_dbeta = tl.zeros((C,), tl.float32)
    skipped = 0.0
    for i_e in range(0, E, BLOCK_E):
        b_dO = tile(p_dO + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)
        b_v = tile(p_v + i_h * E, i_row, v_stride, n, i_e, C, E, BLOCK_E)
        b_X = tile(p_X + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)
        b_D = _delta(p_D, b_v, b_beta, i_row, n, i_h, i_e, H, C, E, BLOCK_E)
        if p_D is not None:
            b_dA += tl.dot(b_X, tl.trans(b_D), input_precision=PRECISION)
        b_dP += tl.dot(b_dO, tl.trans(b_D), input_precision=PRECISION)
        b_dbeta += tl.sum(b_X.to(tl.float32) * b_v.to(tl.float32), 1)
        b_dv = b_beta[:, None] * b_X.to(tl.float32)
        if p_skip is not None:
            b_dv += tl.load(p_skip + i_h).to(tl.float32) * b_dO.to(tl.float32)
            skipped += tl.sum(b_dO.to(tl.float32) * b_v.to(tl.float32))
        put(p_dv + i_h * E, b_dv, i_row, dv_stride, n, i_e, C, E, BLOCK_E)
    b_G, b_end = decays(p_g, i_row, n, i_h, H, C)
    b_gamma = decayed(b_G, C)
    b_dP = b_dP * b_gamma
    b_dA = tl.where(o_c[:, None] > o_c[None, :], -b_dA * b_gamma, 0.0)
    b_QK, b_KK = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    b_dG, b_leaving, carried = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), 0.0
    slot = i_row // C * H + i_h
    for i_d in range(0, D, BLOCK_D):
        b_qs, b_ks = tl.zeros((C, BLOCK_D), tl.float32), tl.zeros((C, BLOCK_D), tl.float32)
        b_dY = tl.zeros((C, BLOCK_D), tl.float32)  # minus the gradient of Y
        for i_e in range(0, E, BLOCK_E):
            if i_offset > 0:
                p_state, m_state = state(p_states, slot, i_d, i_e, D, E, BLOCK_D, BLOCK_E)
                b_S = tl.load(p_state, m_state, 0.0)
                b_dO = tile(p_dO + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)
                b_qs += tl.dot(b_dO, b_S, input_precision=PRECISION)
                if p_D is not None:
                    b_X = tile(p_X + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)
                    b_dY += tl.dot(b_X, b_S, input_precision=PRECISION)
                if n > C:
                    p_state, m_state = state(p_dstates, slot + H, i_d, i_e, D, E, BLOCK_D, BLOCK_E)
                    carried += tl.sum(b_S.to(tl.float32) * tl.load(p_state, m_state, 0.0).to(tl.float32))
            if n > C:
                p_state, m_state = state(p_dstates, slot + H, i_d, i_e, D, E, BLOCK_D, BLOCK_E)
                b_v = tile(p_v + i_h * E, i_row, v_stride, n, i_e, C, E, BLOCK_E)
                b_D = _delta(p_D, b_v, b_beta, i_row, n, i_h, i_e, H, C, E, BLOCK_E)
                b_ks += tl.dot(b_D, tl.load(p_state, m_state, 0.0), input_precision=PRECISION)
        b_q = tile(p_q + i_k * D, i_row, q_stride, n, i_d, C, D, BLOCK_D)
        b_k = tile(p_k + i_k * D, i_row, k_stride, n, i_d, C, D, BLOCK_D)
        b_QK += tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_qs *= tl.exp(b_G)[:, None]
        b_ks *= tl.exp(b_end - b_G)[:, None]
        b_c = tl.sum(b_ks * b_k.to(tl.float32), 1)
        b_leaving += b_c
        b_dG += tl.sum(b_qs * b_q.to(tl.float32), 1) - b_c
        b_qs += tl.dot(b_dP.to(dtype), b_k, input_precision=PRECISION)
        put(p_dq + i_h * D, b_qs, i_row, dq_stride, n, i_d, C, D, BLOCK_D)
        b_ks += tl.dot(tl.trans(b_dP.to(dtype)), b_q, input_precision=PRECISION)
        if p_D is not None:
            b_KK += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
            b_dY *= -tl.exp(b_G)[:, None]
            b_each = tl.sum(b_dY * b_k.to(tl.float32), 1)
            b_dbeta += b_each
            b_dG += b_beta * b_each
            b_R = (b_dA * b_beta[:, None]).to(dtype)
            b_ks += b_beta[:, None] * b_dY + tl.dot(b_R, b_k, input_precision=PRECISION)
            b_ks += tl.dot(tl.trans(b_R), b_k, input_precision=PRECISION)
        put(p_dk + i_h * D, b_ks, i_row, dk_stride, n, i_d, C, D, BLOCK_D)
    b_turns = b_dP * b_QK
    if p_D is not None:
        b_own = b_dA * b_KK
        b_turns += b_own * b_beta[:, None]
        b_dbeta += tl.sum(b_own, 1)
    b_dG += tl.sum(b_turns, 1) - tl.sum(b_turns, 0)
    b_dG = tl.where(o_c == C - 1, b_dG + tl.sum(b_leaving, 0) + tl.exp(b_end) * carried, b_dG)
    tl.store(p_dg + o_h, tl.cumsum(b_dG, 0, reverse=True), o_c < n)
    tl.store(p_dbeta + o_h, b_dbeta, o_c < n)
    if p_skip is not None:
        tl.store(p_dskip + i_tile * H + i_h, skipped)


@triton.jit
def _delta(p_D, b_v, b_beta, i_row, n, i_h, i_e, H: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
           BLOCK_E: tl.constexpr):  # fmt: skip
    """D (C, BLOCK_E), which without the delta rule is beta v."""
    if p_D is not None:
        b_D = tile(p_D + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)
    else:
        b_D = (b_beta[:, None] * b_v.to(tl.float32)).to(b_v.dtype)
    return b_D
