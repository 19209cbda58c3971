"""Outputs of a scan by chunks (reference.py has the formulas); between the kernels only T and P of chunks are stored.

A program of `_local` owns a chunk of a head, a program of `_forward` some columns of a head's values, with which it
goes through a document's chunks in order: D = T (beta (v - e^G k S)), o = P D + e^G q S. `_forward` computes the
transposed matrices, so that a sum is an operand of the next product where it is, in registers.
Legend as in chunks.py: K key heads, H value heads, C rows of a chunk, states of D by E.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.scan.chunks import columns, decays, inverse, put, state, tile


@launcher
@triton.jit(do_not_specialize=["q_stride", "k_stride"])
def _local(
    p_q, p_k, p_g, p_beta, p_tiles, p_T, p_P, q_stride, k_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_h, p_tile = tl.program_id(0) % H, p_tiles + (tl.program_id(0) // H) * 3
    i_offset = tl.load(p_tile + 1)
    i_row, n = (tl.load(p_tile) + i_offset).to(tl.int64), tl.load(p_tile + 2) - i_offset
    o_c, i_k = tl.arange(0, C), i_h // (H // K)
    b_beta = tl.load(p_beta + (i_row + o_c) * H + i_h, o_c < n, 0.0)
    b_A, b_P = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for i_d in tl.static_range(0, D, BLOCK_D):
        b_k = tile(p_k + i_k * D, i_row, k_stride, n, i_d, C, D, BLOCK_D)
        b_q = tile(p_q + i_k * D, i_row, q_stride, n, i_d, C, D, BLOCK_D)
        b_P += tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if DELTA:
            b_A += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    _, _, b_gamma = decays(p_g, i_row, n, i_h, H, C)
    b_P *= b_gamma
    if DELTA:
        b_A = tl.where(o_c[:, None] > o_c[None, :], b_beta[:, None] * b_A * b_gamma, 0.0)
        put(p_T + i_h * C, inverse(b_A, C, BLOCK, PRECISION), i_row, H * C, n, 0, C, C, C)
    else:
        b_P *= b_beta[None, :]
    put(p_P + i_h * C, b_P, i_row, H * C, n, 0, C, C, C)


@launcher
@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride"])
def _forward(
    p_q, p_k, p_v, p_g, p_beta, p_cu, p_T, p_P, p_skip, p_o, p_final, q_stride, k_stride, v_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_e, i_h, i_doc, i_start, i_end = columns(p_cu, H, E, BLOCK_E)
    dtype = p_k.dtype.element_ty
    o_c, o_e, i_k = tl.arange(0, C), i_e + tl.arange(0, BLOCK_E), i_h // (H // K)
    b_S = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for i_first in range(i_start, i_end, C):
        i_row, n = tl.cast(i_first, tl.int64), i_end - i_first
        b_g = tl.load(p_g + (i_row + o_c) * H + i_h, o_c < n, 0.0)
        b_G, b_end = tl.cumsum(b_g, 0), tl.sum(b_g, 0)
        b_beta = tl.load(p_beta + (i_row + o_c) * H + i_h, o_c < n, 0.0)
        b_q = tile(p_q + i_k * D, i_row, q_stride, n, 0, C, D, BLOCK_D)
        b_k = tile(p_k + i_k * D, i_row, k_stride, n, 0, C, D, BLOCK_D)
        b_P = tile(p_P + i_h * C, i_row, H * C, n, 0, C, C, C)
        mask = (o_e < E)[:, None] & (o_c < n)[None, :]
        b_v = tl.load(p_v + i_h * E + (i_row + o_c)[None, :] * v_stride + o_e[:, None], mask, 0.0)
        b_before, b_behind = tl.exp(b_G)[None, :], tl.exp(b_end - b_G)[None, :]
        b_state = b_S.to(dtype)
        b_D = b_v.to(tl.float32)
        if DELTA:
            b_T = tile(p_T + i_h * C, i_row, H * C, n, 0, C, C, C)
            b_D -= b_before * tl.dot(b_state, tl.trans(b_k), input_precision=PRECISION)
            b_D = tl.dot((b_beta[None, :] * b_D).to(dtype), tl.trans(b_T), input_precision=PRECISION)
        else:
            b_D *= b_beta[None, :]
        b_o = b_before * tl.dot(b_state, tl.trans(b_q), input_precision=PRECISION)
        b_o += tl.dot(b_D.to(dtype) if DELTA else b_v, tl.trans(b_P), input_precision=PRECISION)
        if SKIP:
            b_o += tl.load(p_skip + i_h).to(tl.float32) * b_v.to(tl.float32)
        p_out = p_o + i_h * E + (i_row + o_c)[None, :] * (H * E) + o_e[:, None]
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask)
        b_D = (b_D * b_behind).to(dtype)
        b_S = tl.exp(b_end) * b_S + tl.dot(b_D, b_k, input_precision=PRECISION)
    if FINAL:
        p_state, m_state = state(p_final, i_doc.to(tl.int64) * H + i_h, i_e, D, E, BLOCK_D, BLOCK_E)
        tl.store(p_state, tl.trans(b_S), m_state)
