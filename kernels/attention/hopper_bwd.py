"""Attention's backward for Hopper, in Gluon: dk and dv, and launches; the algorithm of bwd.py with explicit waits.

Matrix multiplications of one step overlap with exponentials of another. Legend: hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from trireme.kernels import launch
from trireme.kernels.attention import hopper
from trireme.kernels.attention.bwd import Backward
from trireme.kernels.attention.fwd import flat
from trireme.kernels.attention.hopper_dq import dq_kernel
from trireme.kernels.launcher import Fixed, await_previous, launcher


@gluon.jit
def _dkv_copy(ahead, slot, q_ring, do_ring, lse_ring, delta_ring, queries, outs, q_n, q_h, do_n, do_h, N, first, end,
              length, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
              o_flat):  # fmt: skip
    """Starts the copies of step `ahead`, q, do, lse and delta; returns the next."""
    i_g, i_q, p_q, p_do, p_lse, p_delta = ahead
    if i_g < GROUP:
        hopper.copy_rows(hopper.tile_of(q_ring, slot), p_q, queries, length - i_q, D)
        hopper.copy_rows(hopper.tile_of(do_ring, slot), p_do, outs, length - i_q, V)
        hopper.copy_async(lse_ring.index(slot), p_lse + o_flat, o_flat < length - i_q)
        hopper.copy_async(delta_ring.index(slot), p_delta + o_flat, o_flat < length - i_q)
    async_copy.commit_group()
    i_q += BLOCK_Q
    p_q += BLOCK_Q * q_n
    p_do += BLOCK_Q * do_n
    p_lse += BLOCK_Q
    p_delta += BLOCK_Q
    if i_q >= end:  # the group's next head
        rows = (i_q - first).to(gl.int64)
        i_g += 1
        i_q = first
        p_q += q_h - rows * q_n
        p_do += do_h - rows * do_n
        p_lse += N - rows
        p_delta += N - rows
    return i_g, i_q, p_q, p_do, p_lse, p_delta


@launcher
@gluon.jit(do_not_specialize=["N"])
def dkv_kernel(
    p_do, p_q, p_k, p_v, p_lse, p_delta, p_dk, p_dv, p_tiles, N, scale, do_n, do_h, q_n, q_h, k_n, k_h, v_n, v_h, dk_n,
    dk_h, dv_n, dv_h, K: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    V: gl.constexpr, V0: gl.constexpr, V1: gl.constexpr, WINDOW: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, DIVIDED: gl.constexpr,
):  # fmt: skip
    """dk, dv of a key tile and key/value head.

    DIVIDED, for heads whose sums would not fit into the registers of 4 warps: two groups of warps have half of the
    columns of scores and sums each, and probabilities reach the other group by shared memory.
    """
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = 2 if DIVIDED else 1
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scores: gl.constexpr = hopper.matmul_layout(WARPS, BLOCK_Q, ACROSS)
    keys: gl.constexpr = hopper.matmul_layout(WARPS, D0, ACROSS)
    values: gl.constexpr = hopper.matmul_layout(WARPS, V0, ACROSS)
    OF_K: gl.constexpr = 2 if D1 else 1  # multiplications of a product with k or q, with v or do
    OF_V: gl.constexpr = 2 if V1 else 1
    dtype: gl.constexpr = p_q.dtype.element_ty

    i_h, start, offset, length = hopper.program_tile(p_tiles, K)
    first, end = offset // BLOCK_Q * BLOCK_Q, length  # queries that see the tile
    if WINDOW:
        end = gl.minimum(offset + BLOCK_K + WINDOW - 1, length)
    i_group = i_h.to(gl.int64) * GROUP
    p_q += (start + first) * q_n + i_group * q_h
    p_do += (start + first) * do_n + i_group * do_h
    p_lse += i_group * N + start + first
    p_delta += i_group * N + start + first

    q_ring = hopper.allocate(dtype, STAGES, BLOCK_Q, D0, D1)
    do_ring = hopper.allocate(dtype, STAGES, BLOCK_Q, V0, V1)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], line)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], line)
    k_tile = hopper.tile_of(hopper.allocate(dtype, 1, BLOCK_K, D0, D1), 0)
    v_tile = hopper.tile_of(hopper.allocate(dtype, 1, BLOCK_K, V0, V1), 0)
    if DIVIDED:
        p_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_Q], tile)
        ds_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_Q], tile)
    p_k += (start + offset) * k_n + i_h * k_h
    p_v += (start + offset) * v_n + i_h * v_h
    hopper.copy_rows(k_tile, p_k, hopper.places(k_n, BLOCK_K, D0, D1), length - offset, D)
    hopper.copy_rows(v_tile, p_v, hopper.places(v_n, BLOCK_K, V0, V1), length - offset, V)

    queries, outs = hopper.places(q_n, BLOCK_Q, D0, D1), hopper.places(do_n, BLOCK_Q, V0, V1)
    o_flat = gl.arange(0, BLOCK_Q, flat)
    ahead = (gl.to_tensor(0), first, p_q, p_do, p_lse, p_delta)
    for i in gl.static_range(STAGES - 1):
        ahead = _dkv_copy(ahead, i, q_ring, do_ring, lse_ring, delta_ring, queries, outs, q_n, q_h, do_n, do_h, N,
                          first, end, length, GROUP, BLOCK_Q, D, V, o_flat)  # fmt: skip

    o_k = offset + gl.arange(0, BLOCK_K, gl.SliceLayout(1, scores))
    o_tile = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, scores))
    none = gl.full([BLOCK_K, BLOCK_Q], 0.0, gl.float32, scores)
    t_dk = [warpgroup_mma_init(part) for part in hopper.zeros(BLOCK_K, D0, D1, ACROSS)]
    t_dv = [warpgroup_mma_init(part) for part in hopper.zeros(BLOCK_K, V0, V1, ACROSS)]
    i_q, slot, free = first, gl.to_tensor(0), gl.to_tensor(STAGES - 1)
    for _ in range(GROUP * gl.cdiv(end - first, BLOCK_Q)):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        q_tile, do_tile = hopper.tile_of(q_ring, slot), hopper.tile_of(do_ring, slot)
        t_s = hopper.start_scores(k_tile, q_tile, none)
        t_dp = hopper.start_scores(v_tile, do_tile, none)
        b_dkv = hopper.wait(OF_K + OF_V, t_dk + t_dv)  # last step's
        b_dk, b_dv = b_dkv[:OF_K], b_dkv[OF_K:]
        if DIVIDED:
            hopper.cta_barrier()  # all warps are done with the last slot and tiles
            ahead = _dkv_copy(ahead, free, q_ring, do_ring, lse_ring, delta_ring, queries, outs, q_n, q_h, do_n, do_h,
                              N, first, end, length, GROUP, BLOCK_Q, D, V, o_flat)  # fmt: skip
        b_lse = lse_ring.index(slot).load(gl.SliceLayout(0, scores)) * hopper.LOG2E
        b_s = warpgroup_mma_wait(OF_V, (t_s,))
        b_p = gl.exp2(b_s * (scale * hopper.LOG2E) - b_lse[None, :])  # 1 past the end, where q, do and delta are zero
        cut = i_q < offset + BLOCK_K
        if WINDOW:
            cut = cut | (i_q + BLOCK_Q > offset + WINDOW)
        if cut:
            b_p = gl.where(hopper.visible((i_q + o_tile)[None, :], o_k[:, None], WINDOW), b_p, 0.0)
        if DIVIDED:
            p_tile.store(b_p.to(dtype))
            fence_async_shared()
            hopper.cta_barrier()
            t_dv = hopper.start_sums(p_tile, do_tile, b_dv)
        else:
            b_left = gl.convert_layout(b_p.to(dtype), gl.DotOperandLayout(0, values, 2))
            t_dv = hopper.start_sums(b_left, do_tile, b_dv)
        b_dp = warpgroup_mma_wait(OF_V, (t_dp,))
        b_delta = delta_ring.index(slot).load(gl.SliceLayout(0, scores))
        b_ds = b_p * (b_dp - b_delta[None, :])
        if DIVIDED:
            ds_tile.store(b_ds.to(dtype))
            fence_async_shared()
            hopper.cta_barrier()
            t_dk = hopper.start_sums(ds_tile, q_tile, b_dk)
        else:
            b_left = gl.convert_layout(b_ds.to(dtype), gl.DotOperandLayout(0, keys, 2))
            t_dk = hopper.start_sums(b_left, q_tile, b_dk)
            hopper.cta_barrier()  # all warps are done with the last slot
            ahead = _dkv_copy(ahead, free, q_ring, do_ring, lse_ring, delta_ring, queries, outs, q_n, q_h, do_n, do_h,
                              N, first, end, length, GROUP, BLOCK_Q, D, V, o_flat)  # fmt: skip
        i_q += BLOCK_Q
        i_q = gl.where(i_q < end, i_q, first)
        free = slot
        slot = hopper.turn(slot, STAGES)
    b_dkv = hopper.wait(0, t_dk + t_dv)
    async_copy.wait_group(0)

    p_dk += (start + offset) * dk_n + i_h * dk_h
    p_dv += (start + offset) * dv_n + i_h * dv_h
    hopper.store_rows(p_dk, [part * scale for part in b_dkv[:OF_K]], dk_n, length - offset, D)
    hopper.store_rows(p_dv, b_dkv[OF_K:], dv_n, length - offset, V)


# ---------------------------------------------------------------- launchers


def plan(H: int, K: int, D: int, V: int, window: int, strides) -> Backward:
    """Backward for the strides of (dout, q, k, v, out, dq, dk, dv), 16-byte aligned."""
    dout, q, k, v, out, dq, dk, dv = strides
    by_query, by_key = launch.hopper_dq(launch.head_block(max(D, V))), launch.hopper_dkv(D, V)
    divided = min(D, V) > 128
    query_sizes = H // K, *launch.head_parts(D, V, 64), window
    key_sizes = H // K, *launch.head_parts(D, V, 256 if divided else 64), window  # parts would be serialized by ptxas
    return Backward(
        by_query.q,
        Fixed(
            dq_kernel, *flat((dout, q, k, v, out, dq)), H, *query_sizes, by_query.q, by_query.k, by_query.stages,
            num_warps=by_query.warps,
        ),
        by_key.k,
        Fixed(
            dkv_kernel, *flat((dout, q, k, v, dk, dv)), K, *key_sizes, by_key.q, by_key.k, by_key.stages, divided,
            num_warps=by_key.warps,
        ),
    )  # fmt: skip
