"""Attention's forward for Hopper, in Gluon: the algorithm of fwd.py with explicit waits.

Exponentials of one step overlap with p v of the last. Programs are small: two share a multiprocessor, one multiplying.
Legend: hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from trireme.kernels import launch
from trireme.kernels.attention import hopper
from trireme.kernels.attention.fwd import Forward, flat
from trireme.kernels.launcher import Fixed, await_previous, launcher

LN2 = gl.constexpr(0.6931471805599453)
HIDDEN = gl.constexpr(-1e30)


@gluon.jit
def _softmax(b_s, b_m, i_k, offset, o_q, o_tile, qk_scale, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
             WINDOW: gl.constexpr):  # fmt: skip
    """(largest score so far, exp(scores - it)), zero where hidden.

    HIDDEN is scaled and b_m subtracted in one rounding, which is huge where b_m is HIDDEN * qk_scale, of a query that
    has seen no key yet. Without a window there is none: all see key 0, in the first tile. With one, scores are scaled
    before they are hidden, as in fwd.py.
    """
    if WINDOW:
        b_s = b_s * qk_scale
        if (i_k + BLOCK_K > offset) | (i_k + WINDOW < offset + BLOCK_Q):
            b_s = gl.where(hopper.visible(o_q[:, None], (i_k + o_tile)[None, :], WINDOW), b_s, HIDDEN)
        b_m = gl.maximum(b_m, gl.max(b_s, 1))
        b_p = gl.exp2(b_s - b_m[:, None])
    else:
        if i_k + BLOCK_K > offset:
            b_s = gl.where(hopper.visible(o_q[:, None], (i_k + o_tile)[None, :], WINDOW), b_s, HIDDEN)
        b_m = gl.maximum(b_m, gl.max(b_s, 1) * qk_scale)
        b_p = gl.exp2(b_s * qk_scale - b_m[:, None])
    return b_m, b_p


@gluon.jit
def _row_sums(b_p, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """(BLOCK_Q, 4): sums by thread, nothing crosses threads."""
    return gl.sum(gl.sum(b_p.reshape([BLOCK_Q, BLOCK_K // 8, 4, 2]), 3), 1)


@launcher
@gluon.jit(do_not_specialize=["N"])
def fwd_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_tiles, N, scale, q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h, H: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, V: gl.constexpr, V0: gl.constexpr,
    V1: gl.constexpr, WINDOW: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out and lse of a query tile."""
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = hopper.matmul_layout(WARPS, BLOCK_K)
    operand: gl.constexpr = gl.DotOperandLayout(0, hopper.matmul_layout(WARPS, V0), 2)
    SUMS: gl.constexpr = 2 if V1 else 1  # multiplications of p v
    dtype: gl.constexpr = p_q.dtype.element_ty

    i_h, start, offset, length = hopper.program_tile(p_tiles, H)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h
    end = gl.minimum(offset + BLOCK_Q, length)

    k_ring = hopper.allocate(dtype, STAGES - 1, BLOCK_K, D0, D1)
    v_ring = hopper.allocate(dtype, STAGES, BLOCK_K, V0, V1)
    q_tile = hopper.tile_of(hopper.allocate(dtype, 1, BLOCK_Q, D0, D1), 0)
    p_q += (start + offset) * q_n + i_h * q_h
    hopper.copy_rows(q_tile, p_q, hopper.places(q_n, BLOCK_Q, D0, D1), length - offset, D)
    keys, values = hopper.places(k_n, BLOCK_K, D0, D1), hopper.places(v_n, BLOCK_K, V0, V1)
    begin = hopper.first_key(offset, WINDOW, BLOCK_K)
    ahead = hopper.first_keys(
        k_ring, v_ring, p_k, p_v, keys, values, k_n, v_n, begin, end, length, D, V, BLOCK_K, STAGES
    )

    qk_scale = scale * hopper.LOG2E
    o_q = offset + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, scores))
    o_tile = gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores))
    none = gl.full([BLOCK_Q, BLOCK_K], 0.0, gl.float32, scores)
    b_acc = hopper.zeros(BLOCK_Q, V0, V1)
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    b_s = warpgroup_mma_wait(0, (hopper.start_scores(q_tile, hopper.tile_of(k_ring, 0), none),))
    b_m = gl.full([BLOCK_Q], HIDDEN, gl.float32, gl.SliceLayout(1, scores))
    b_m, b_p = _softmax(b_s, b_m, begin, offset, o_q, o_tile, qk_scale, BLOCK_Q, BLOCK_K, WINDOW)
    b_l = _row_sums(b_p, BLOCK_Q, BLOCK_K)
    b_p = gl.convert_layout(b_p.to(dtype), operand)
    hopper.cta_barrier()  # all warps are done with the slot
    ahead = hopper.keys_copy(ahead, 0, STAGES - 1, k_ring, v_ring, keys, values, k_n, v_n, end, length, D, V, BLOCK_K)
    slot, own = gl.to_tensor(0), hopper.turn(gl.to_tensor(0), STAGES - 1)
    for i_k in range(begin + BLOCK_K, end, BLOCK_K):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        t_s = hopper.start_scores(q_tile, hopper.tile_of(k_ring, own), none)
        t_acc = hopper.start_sums(b_p, hopper.tile_of(v_ring, slot), b_acc)
        b_s = warpgroup_mma_wait(SUMS, (t_s,))
        b_most, b_p = _softmax(b_s, b_m, i_k, offset, o_q, o_tile, qk_scale, BLOCK_Q, BLOCK_K, WINDOW)
        b_shrink = gl.exp2(b_m - b_most)
        b_now = _row_sums(b_p, BLOCK_Q, BLOCK_K)
        b_l = b_l * gl.convert_layout(b_shrink, gl.SliceLayout(1, b_now.type.layout))[:, None] + b_now
        b_m = b_most
        b_p = b_p.to(dtype)
        b_acc = [
            part * gl.convert_layout(b_shrink, gl.SliceLayout(1, part.type.layout))[:, None]
            for part in hopper.wait(0, t_acc)
        ]
        b_p = gl.convert_layout(b_p, operand)
        hopper.cta_barrier()  # all warps are done with the slots
        ahead = hopper.keys_copy(ahead, own, slot, k_ring, v_ring, keys, values, k_n, v_n, end, length, D, V, BLOCK_K)
        slot, own = hopper.turn(slot, STAGES), hopper.turn(own, STAGES - 1)
    async_copy.wait_group(0)
    fence_async_shared()
    b_acc = hopper.wait(0, hopper.start_sums(b_p, hopper.tile_of(v_ring, slot), b_acc))

    b_sum = gl.convert_layout(gl.sum(b_l, 1), gl.SliceLayout(1, scores))
    m_q = o_q < length
    gl.store(p_lse + i_h.to(gl.int64) * N + start + o_q, (b_m + gl.log2(b_sum)) * LN2, m_q)
    p_out += (start + offset) * o_n + i_h * o_h
    b_out = [part / gl.convert_layout(b_sum, gl.SliceLayout(1, part.type.layout))[:, None] for part in b_acc]
    hopper.store_rows(p_out, b_out, o_n, length - offset, V)


def plan(H: int, K: int, D: int, V: int, window: int, strides) -> Forward:
    """Forward for the strides of (q, k, v, out), 16-byte aligned but out."""
    tile = launch.hopper_fwd(launch.head_block(max(D, V)), window)
    constants = *flat(strides), H, H // K, *launch.head_parts(D, V, 64), window, tile.q, tile.k, tile.stages
    return Forward(tile.q, Fixed(fwd_kernel, *constants, num_warps=tile.warps))
