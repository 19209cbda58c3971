"""Forward of a scan by chunks as far as its backward needs it: T, U and W of each chunk, and the states before chunks.

reference.py has the formulas; outputs.py computes forward's outputs. A program of `_prepare` owns a chunk of a head, a
program of `_walk` some columns of a head's state, with which it goes through a document's chunks in order. The state
before a document's chunk i > 0, whose first row is r, is stored in slot r // C: no two chunks have the same slot.
Legend: K key heads, H value heads, C rows of a chunk, D and E widths of a state; U and D share memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trireme.kernels.launcher import await_previous, launcher

BLOCK = 16  # rows that are inverted one by one


@triton.jit
def columns(p_cu, H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """What a program owns: (first column, head, document, its first row, the row behind its last)."""
    SLICES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    i_e, i_h = (tl.program_id(0) % SLICES) * BLOCK_E, (tl.program_id(0) // SLICES) % H
    i_doc = tl.program_id(0) // (SLICES * H)
    return i_e, i_h, i_doc, tl.load(p_cu + i_doc), tl.load(p_cu + i_doc + 1)


@triton.jit
def decays(p_g, i_row, n, i_h, H: tl.constexpr, C: tl.constexpr):
    """(G (C,), its last value, exp(G_i - G_j) where i >= j, else 0) of a chunk of n rows at i_row."""
    o_c = tl.arange(0, C)
    b_g = tl.load(p_g + (i_row + o_c) * H + i_h, o_c < n, 0.0)
    b_G = tl.cumsum(b_g, 0)
    b_gap = tl.where(o_c[:, None] >= o_c[None, :], b_G[:, None] - b_G[None, :], float("-inf"))
    return b_G, tl.sum(b_g, 0), tl.exp(b_gap)


@triton.jit
def tile(p, i_row, stride, n, i_d, C: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Loads (C, BLOCK_W) from n rows at i_row, W wide, from column i_d on; zero beyond them."""
    o_c, o_w = tl.arange(0, C), i_d + tl.arange(0, BLOCK_W)
    mask = (o_c < n)[:, None] & (o_w < W)[None, :]
    return tl.load(p + (i_row + o_c)[:, None] * stride + o_w[None, :], mask, 0.0)


@triton.jit
def put(p, b, i_row, stride, n, i_d, C: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Stores as `tile` loads."""
    o_c, o_w = tl.arange(0, C), i_d + tl.arange(0, BLOCK_W)
    mask = (o_c < n)[:, None] & (o_w < W)[None, :]
    tl.store(p + (i_row + o_c)[:, None] * stride + o_w[None, :], b.to(p.dtype.element_ty), mask)


@triton.jit
def state(p, slot, i_e, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """(pointers, mask) of the columns of the state (D, E) in a slot, from i_e on."""
    o_d, o_e = tl.arange(0, BLOCK_D), i_e + tl.arange(0, BLOCK_E)
    return p + slot * D * E + o_d[:, None] * E + o_e[None, :], (o_d < D)[:, None] & (o_e < E)[None, :]


@triton.jit
def inverse(b_A, C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """T = (1 + A)^-1 of a strictly lower triangular A (C, C).

    T_d inverts the blocks on the diagonal, row by row; then T = T_d - (T_d A_o) T, A_o being A without these blocks.
    """
    BLOCKS: tl.constexpr = C // BLOCK
    o_c, o_b = tl.arange(0, C), tl.arange(0, BLOCK)
    near = (o_c // BLOCK)[:, None] == (o_c // BLOCK)[None, :]
    b_near = tl.sum(tl.reshape(tl.where(near, b_A, 0.0), (C, BLOCKS, BLOCK)), 1)
    b_near = tl.reshape(b_near, (BLOCKS, BLOCK, BLOCK))
    b_T = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32) + (o_b[:, None] == o_b[None, :]).to(tl.float32)[None, :, :]
    for i in range(1, BLOCK):
        here = (o_b == i)[None, :, None]
        b_a = tl.sum(tl.where(here, b_near, 0.0), 1)
        b_row = tl.sum(b_a[:, :, None] * b_T, 1)
        b_T = tl.where(here, b_T - b_row[:, None, :], b_T)
    b_wide = tl.broadcast_to(tl.reshape(b_T, (C, 1, BLOCK)), (C, BLOCKS, BLOCK))
    b_D = tl.where(near, tl.reshape(b_wide, (C, C)), 0.0)
    b_N = tl.dot(b_D, tl.where(near, 0.0, b_A), input_precision=PRECISION)
    b_all = b_D
    for _ in tl.static_range(BLOCKS - 1):
        b_all = b_D - tl.dot(b_N, b_all, input_precision=PRECISION)
    return b_all


@launcher
@triton.jit(do_not_specialize=["k_stride", "v_stride"])
def _prepare(
    p_k, p_v, p_g, p_beta, p_tiles, p_T, p_U, p_W, k_stride, v_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_h, p_tile = tl.program_id(0) % H, p_tiles + (tl.program_id(0) // H) * 3
    i_offset = tl.load(p_tile + 1)
    i_row, n = (tl.load(p_tile) + i_offset).to(tl.int64), tl.load(p_tile + 2) - i_offset
    o_c = tl.arange(0, C)
    dtype = p_T.dtype.element_ty
    b_G, _, b_gamma = decays(p_g, i_row, n, i_h, H, C)
    b_beta = tl.load(p_beta + (i_row + o_c) * H + i_h, o_c < n, 0.0)
    b_k = tile(p_k + i_h // (H // K) * D, i_row, k_stride, n, 0, C, D, BLOCK_D)
    b_A = b_beta[:, None] * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_gamma
    b_T = inverse(tl.where(o_c[:, None] > o_c[None, :], b_A, 0.0), C, BLOCK, PRECISION)
    put(p_T + i_h * C, b_T, i_row, H * C, n, 0, C, C, C)
    b_T = b_T * b_beta[None, :]
    b_W = tl.dot((b_T * tl.exp(b_G)[None, :]).to(dtype), b_k, input_precision=PRECISION)
    put(p_W + i_h * D, b_W, i_row, H * D, n, 0, C, D, BLOCK_D)
    b_T = b_T.to(dtype)
    for i_e in range(0, E, BLOCK_E):
        b_v = tile(p_v + i_h * E, i_row, v_stride, n, i_e, C, E, BLOCK_E)
        put(p_U + i_h * E, tl.dot(b_T, b_v, input_precision=PRECISION), i_row, H * E, n, i_e, C, E, BLOCK_E)


@launcher
@triton.jit(do_not_specialize=["k_stride", "v_stride"])
def _walk(
    p_k, p_v, p_g, p_beta, p_cu, p_U, p_W, p_states, k_stride, v_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_e, i_h, _, i_start, i_end = columns(p_cu, H, E, BLOCK_E)
    dtype = p_k.dtype.element_ty
    o_c = tl.arange(0, C)
    b_S = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    for i_first in range(i_start, i_end, C):
        i_row, n = tl.cast(i_first, tl.int64), i_end - i_first
        if i_first > i_start:
            p_state, m_state = state(p_states, i_row // C * H + i_h, i_e, D, E, BLOCK_D, BLOCK_E)
            tl.store(p_state, b_S.to(p_states.dtype.element_ty), m_state)
        b_g = tl.load(p_g + (i_row + o_c) * H + i_h, o_c < n, 0.0)
        b_G, b_end = tl.cumsum(b_g, 0), tl.sum(b_g, 0)
        if DELTA:
            b_W = tile(p_W + i_h * D, i_row, H * D, n, 0, C, D, BLOCK_D)
            b_D = tile(p_U + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E).to(tl.float32)
            b_D -= tl.dot(b_W, b_S.to(dtype), input_precision=PRECISION)
            put(p_U + i_h * E, b_D, i_row, H * E, n, i_e, C, E, BLOCK_E)
        else:
            b_beta = tl.load(p_beta + (i_row + o_c) * H + i_h, o_c < n, 0.0)
            b_D = b_beta[:, None] * tile(p_v + i_h * E, i_row, v_stride, n, i_e, C, E, BLOCK_E).to(tl.float32)
        b_k = tile(p_k + i_h // (H // K) * D, i_row, k_stride, n, 0, C, D, BLOCK_D).to(tl.float32)
        b_k = (b_k * tl.exp(b_end - b_G)[:, None]).to(dtype)
        b_S = tl.exp(b_end) * b_S + tl.dot(tl.trans(b_k), b_D.to(dtype), input_precision=PRECISION)
