"""Attention's dq for Hopper, in Gluon: the algorithm of bwd.py with explicit waits.

The matrix multiplication of one step's dq overlaps with the next one's exponentials. Legend: hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from trireme.kernels.attention import hopper
from trireme.kernels.launcher import await_previous, launcher


@gluon.jit
def _probabilities(b_s, b_lse, i_k, offset, o_q, o_tile, qk_scale, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
                   WINDOW: gl.constexpr):  # fmt: skip
    """exp(scores - lse), zero where hidden."""
    b_p = gl.exp2(b_s * qk_scale - b_lse[:, None])
    cut = i_k + BLOCK_K > offset
    if WINDOW:
        cut = cut | (i_k + WINDOW < offset + BLOCK_Q)
    if cut:
        b_p = gl.where(hopper.visible(o_q[:, None], (i_k + o_tile)[None, :], WINDOW), b_p, 0.0)
    return b_p


@gluon.jit
def _row_products(p_do, p_out, do_place, out_place, rows, V: gl.constexpr):
    """Sums of do * out over a part's columns."""
    mask = (do_place[0] < rows)[:, None] & (do_place[1] < V)[None, :]
    b_do = gl.load(p_do + do_place[2], mask, 0.0).to(gl.float32)
    return gl.sum(b_do * gl.load(p_out + out_place[2], mask, 0.0).to(gl.float32), 1)


@launcher
@gluon.jit(do_not_specialize=["N"])
def dq_kernel(
    p_do, p_q, p_k, p_v, p_out, p_lse, p_delta, p_dq, p_tiles, N, scale, do_n, do_h, q_n, q_h, k_n, k_h, v_n, v_h, o_n,
    o_h, dq_n, dq_h, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    V: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr, WINDOW: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq and delta of a query tile."""
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = hopper.matmul_layout(WARPS, BLOCK_K)
    operand: gl.constexpr = gl.DotOperandLayout(0, hopper.matmul_layout(WARPS, D0), 2)
    SUMS: gl.constexpr = 2 if D1 else 1  # multiplications of ds k
    LATER: gl.constexpr = SUMS + (2 if V1 else 1)  # and of do v^T
    dtype: gl.constexpr = p_q.dtype.element_ty

    i_h, start, offset, length = hopper.program_tile(p_tiles, H)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h
    end = gl.minimum(offset + BLOCK_Q, length)

    k_ring = hopper.allocate(dtype, STAGES, BLOCK_K, D0, D1)
    v_ring = hopper.allocate(dtype, STAGES - 1, BLOCK_K, V0, V1)
    q_tile = hopper.tile_of(hopper.allocate(dtype, 1, BLOCK_Q, D0, D1), 0)
    do_tile = hopper.tile_of(hopper.allocate(dtype, 1, BLOCK_Q, V0, V1), 0)
    p_q += (start + offset) * q_n + i_h * q_h
    p_do += (start + offset) * do_n + i_h * do_h
    p_out += (start + offset) * o_n + i_h * o_h
    rows = hopper.places(do_n, BLOCK_Q, V0, V1)
    hopper.copy_rows(q_tile, p_q, hopper.places(q_n, BLOCK_Q, D0, D1), length - offset, D)
    hopper.copy_rows(do_tile, p_do, rows, length - offset, V)
    keys, values = hopper.places(k_n, BLOCK_K, D0, D1), hopper.places(v_n, BLOCK_K, V0, V1)
    begin = hopper.first_key(offset, WINDOW, BLOCK_K)
    ahead = hopper.first_keys(
        v_ring, k_ring, p_v, p_k, values, keys, v_n, k_n, begin, end, length, V, D, BLOCK_K, STAGES
    )

    outs = hopper.places(o_n, BLOCK_Q, V0, V1)
    b_delta = _row_products(p_do, p_out, rows[0], outs[0], length - offset, V)
    if V1:
        b_rest = _row_products(p_do + V0, p_out + V0, rows[1], outs[1], length - offset, V - V0)
        b_delta += gl.convert_layout(b_rest, b_delta.type.layout)
    p_stat = i_h.to(gl.int64) * N + start
    o_row = rows[0][0]
    gl.store(p_delta + p_stat + offset + o_row, b_delta, o_row < length - offset)
    b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
    o_q = offset + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, scores))
    b_lse = gl.load(p_lse + p_stat + o_q, o_q < length, 0.0) * hopper.LOG2E

    o_tile = gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores))
    none = gl.full([BLOCK_Q, BLOCK_K], 0.0, gl.float32, scores)
    b_dq = hopper.zeros(BLOCK_Q, D0, D1)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    b_s = warpgroup_mma_wait(0, (hopper.start_scores(q_tile, hopper.tile_of(k_ring, 0), none),))
    b_dp = warpgroup_mma_wait(0, (hopper.start_scores(do_tile, hopper.tile_of(v_ring, 0), none),))
    b_p = _probabilities(b_s, b_lse, begin, offset, o_q, o_tile, scale * hopper.LOG2E, BLOCK_Q, BLOCK_K, WINDOW)
    b_ds = gl.convert_layout((b_p * (b_dp - b_delta[:, None])).to(dtype), operand)
    hopper.cta_barrier()  # all warps are done with the slot
    ahead = hopper.keys_copy(ahead, 0, STAGES - 1, v_ring, k_ring, values, keys, v_n, k_n, end, length, V, D, BLOCK_K)
    slot, own = gl.to_tensor(0), hopper.turn(gl.to_tensor(0), STAGES - 1)
    for i_k in range(begin + BLOCK_K, end, BLOCK_K):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        after = hopper.turn(slot, STAGES)
        t_s = hopper.start_scores(q_tile, hopper.tile_of(k_ring, after), none)
        t_dp = hopper.start_scores(do_tile, hopper.tile_of(v_ring, own), none)
        t_dq = hopper.start_sums(b_ds, hopper.tile_of(k_ring, slot), b_dq)
        b_s = warpgroup_mma_wait(LATER, (t_s,))
        b_p = _probabilities(b_s, b_lse, i_k, offset, o_q, o_tile, scale * hopper.LOG2E, BLOCK_Q, BLOCK_K, WINDOW)
        b_dp = warpgroup_mma_wait(SUMS, (t_dp,))
        b_ds = (b_p * (b_dp - b_delta[:, None])).to(dtype)
        b_dq = hopper.wait(0, t_dq)
        b_ds = gl.convert_layout(b_ds, operand)
        hopper.cta_barrier()  # all warps are done with the slots
        ahead = hopper.keys_copy(ahead, own, slot, v_ring, k_ring, values, keys, v_n, k_n, end, length, V, D, BLOCK_K)
        slot, own = after, hopper.turn(own, STAGES - 1)
    async_copy.wait_group(0)
    fence_async_shared()
    b_dq = hopper.wait(0, hopper.start_sums(b_ds, hopper.tile_of(k_ring, slot), b_dq))

    p_dq += (start + offset) * dq_n + i_h * dq_h
    hopper.store_rows(p_dq, [part * scale for part in b_dq], dq_n, length - offset, D)
