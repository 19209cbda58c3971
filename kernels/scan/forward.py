"""Forward of a scan by chunks; reference.py has the formulas. Between the kernels only T and P of chunks are stored.

A program of `_local` owns a chunk of a head, a program of `_forward` some columns of a head's values, with which it
goes through a document's chunks in order: D = T (beta (v - e^G k S)), o = P D + e^G q S. It computes the transposed
matrices, so that a sum is an operand of the next product where it is, in registers. For backward.py it stores D, and
the transposed state before a document's chunk i > 0, whose first row is r, in slot r // C: no two chunks share a slot.
Legend: K key heads, H value heads, C rows of a chunk, D and E widths of a state.
"""

from __future__ import annotations

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launcher import await_previous, launcher


@triton.jit
def columns(p_cu, H: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """What a program owns: (first column, head, document, its first row, the row behind its last)."""
    SLICES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    i_e, i_h = (tl.program_id(0) % SLICES) * BLOCK_E, (tl.program_id(0) // SLICES) % H
    i_doc = tl.program_id(0) // (SLICES * H)
    return i_e, i_h, i_doc, tl.load(p_cu + i_doc), tl.load(p_cu + i_doc + 1)


@triton.jit
def decays(p_g, i_row, n, i_h, H: tl.constexpr, C: tl.constexpr):
    """(G (C,), its last value) of a chunk of n rows at i_row."""
    o_c = tl.arange(0, C)
    b_g = tl.load(p_g + (i_row + o_c) * H + i_h, o_c < n, 0.0)
    return tl.cumsum(b_g, 0), tl.sum(b_g, 0)


@triton.jit
def decayed(b_G, C: tl.constexpr):
    """exp(G_i - G_j) where i >= j, else 0, (C, C)."""
    o_c = tl.arange(0, C)
    return tl.exp(tl.where(o_c[:, None] >= o_c[None, :], b_G[:, None] - b_G[None, :], float("-inf")))


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
def transposed(p, i_row, stride, n, i_e, C: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """(pointers, mask) of the transposed tile (BLOCK_E, C)."""
    o_c, o_e = tl.arange(0, C), i_e + tl.arange(0, BLOCK_E)
    return p + (i_row + o_c)[None, :] * stride + o_e[:, None], (o_e < E)[:, None] & (o_c < n)[None, :]


@triton.jit
def state(p, slot, i_d, i_e, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """(pointers, mask) of a part of the transposed state (E, D) in a slot."""
    o_d, o_e = i_d + tl.arange(0, BLOCK_D), i_e + tl.arange(0, BLOCK_E)
    return p + slot * D * E + o_e[:, None] * D + o_d[None, :], (o_e < E)[:, None] & (o_d < D)[None, :]


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
@triton.jit
def _local(
    p_q, p_k, p_g, p_beta, p_tiles, p_T, p_P, q_stride, k_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_h, p_tile = tl.program_id(0) % H, p_tiles + (tl.program_id(0) // H) * 3
    i_offset = tl.load(p_tile + 1)
    i_row, n = (tl.load(p_tile) + i_offset).to(tl.int64), tl.load(p_tile + 2) - i_offset
    o_c, i_k = tl.arange(0, C), i_h // (H // K)
    b_A, b_P = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    for i_d in tl.static_range(0, D, BLOCK_D):
        b_k = tile(p_k + i_k * D, i_row, k_stride, n, i_d, C, D, BLOCK_D)
        b_q = tile(p_q + i_k * D, i_row, q_stride, n, i_d, C, D, BLOCK_D)
        b_P += tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if p_T is not None:
            b_A += tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_gamma = decayed(decays(p_g, i_row, n, i_h, H, C)[0], C)
    put(p_P + i_h * C, b_P * b_gamma, i_row, H * C, n, 0, C, C, C)
    if p_T is not None:
        b_beta = tl.load(p_beta + (i_row + o_c) * H + i_h, o_c < n, 0.0)
        b_A = tl.where(o_c[:, None] > o_c[None, :], b_beta[:, None] * b_A * b_gamma, 0.0)
        put(p_T + i_h * C, inverse(b_A, C, BLOCK, PRECISION), i_row, H * C, n, 0, C, C, C)


@launcher
@triton.jit
def _forward(
    p_q, p_k, p_v, p_g, p_beta, p_cu, p_T, p_P, p_skip, p_o, p_final, p_D, p_states, q_stride, k_stride, v_stride,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fills those of p_o, p_final, p_D and p_states that are given."""
    await_previous()
    i_e, i_h, i_doc, i_start, i_end = columns(p_cu, H, E, BLOCK_E)
    dtype = p_k.dtype.element_ty
    o_c, i_k = tl.arange(0, C), i_h // (H // K)
    b_S = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for i_first in range(i_start, i_end, C):
        i_row, n = tl.cast(i_first, tl.int64), i_end - i_first
        if p_states is not None:  # noqa: SIM102 - a constant
            if i_first > i_start:
                p_state, m_state = state(p_states, i_row // C * H + i_h, 0, i_e, D, E, BLOCK_D, BLOCK_E)
                tl.store(p_state, b_S.to(p_states.dtype.element_ty), m_state)
        b_G, b_end = decays(p_g, i_row, n, i_h, H, C)
        b_beta = tl.load(p_beta + (i_row + o_c) * H + i_h, o_c < n, 0.0)
        if p_o is not None:
            b_q = tile(p_q + i_k * D, i_row, q_stride, n, 0, C, D, BLOCK_D)
        b_k = tile(p_k + i_k * D, i_row, k_stride, n, 0, C, D, BLOCK_D)
        if p_o is not None:
            b_P = tile(p_P + i_h * C, i_row, H * C, n, 0, C, C, C)
        p_value, mask = transposed(p_v + i_h * E, i_row, v_stride, n, i_e, C, E, BLOCK_E)
        b_v = tl.load(p_value, mask, 0.0)
        b_before, b_behind = tl.exp(b_G)[None, :], tl.exp(b_end - b_G)[None, :]
        b_state = b_S.to(dtype)
        b_D = b_v.to(tl.float32)
        if p_T is not None:
            b_T = tile(p_T + i_h * C, i_row, H * C, n, 0, C, C, C)
            b_D -= b_before * tl.dot(b_state, tl.trans(b_k), input_precision=PRECISION)
            b_D = tl.dot((b_beta[None, :] * b_D).to(dtype), tl.trans(b_T), input_precision=PRECISION)
        else:
            b_D *= b_beta[None, :]
        if p_D is not None:
            tl.store(transposed(p_D + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)[0], b_D.to(dtype), mask)
        if p_o is not None:
            b_o = b_before * tl.dot(b_state, tl.trans(b_q), input_precision=PRECISION)
            b_o += tl.dot(b_D.to(dtype), tl.trans(b_P), input_precision=PRECISION)
            if p_skip is not None:
                b_o += tl.load(p_skip + i_h).to(tl.float32) * b_v.to(tl.float32)
            p_out = transposed(p_o + i_h * E, i_row, H * E, n, i_e, C, E, BLOCK_E)[0]
            tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask)
        b_D = (b_D * b_behind).to(dtype)
        b_S = tl.exp(b_end) * b_S + tl.dot(b_D, b_k, input_precision=PRECISION)
    if p_final is not None:
        o_d, o_e = tl.arange(0, BLOCK_D)[:, None], i_e + tl.arange(0, BLOCK_E)[None, :]
        p_end = p_final + (i_doc.to(tl.int64) * H + i_h) * D * E + o_d * E + o_e
        tl.store(p_end, tl.trans(b_S), (o_d < D) & (o_e < E))
