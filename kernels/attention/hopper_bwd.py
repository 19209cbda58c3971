"""Attention's backward for Hopper, in Gluon: the algorithm of bwd.py with explicit waits.

Matrix multiplications of one step overlap with exponentials of another. Legend: hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from trireme.kernels import launch
from trireme.kernels.attention.bwd import Backward
from trireme.kernels.attention.fwd import flat
from trireme.kernels.attention.hopper import (
    LOG2E,
    copy_async,
    copy_layout,
    copy_rows,
    cta_barrier,
    first_keys,
    keys_copy,
    matmul_layout,
    program_tile,
    turn,
)
from trireme.kernels.launcher import Fixed, await_previous, launcher


@gluon.jit
def _dkv_copy(ahead, slot, q_ring, do_ring, lse_ring, delta_ring, o_q, o_do, q_n, q_h, do_n, do_h, N, first, length,
              GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr, o_row, o_d, o_flat):  # fmt: skip
    """Starts the copies of step `ahead`, q, do, lse and delta; returns the next."""
    i_g, i_q, p_q, p_do, p_lse, p_delta = ahead
    if i_g < GROUP:
        copy_rows(q_ring.index(slot), p_q, o_q, o_row, length - i_q, o_d, D)
        copy_rows(do_ring.index(slot), p_do, o_do, o_row, length - i_q, o_d, D)
        copy_async(lse_ring.index(slot), p_lse + o_flat, o_flat < length - i_q)
        copy_async(delta_ring.index(slot), p_delta + o_flat, o_flat < length - i_q)
    async_copy.commit_group()
    i_q += BLOCK_Q
    p_q += BLOCK_Q * q_n
    p_do += BLOCK_Q * do_n
    p_lse += BLOCK_Q
    p_delta += BLOCK_Q
    if i_q >= length:  # the group's next head
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
    K: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """dk, dv of a key tile and key/value head."""
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    wide: gl.constexpr = copy_layout(WARPS, BLOCK_D)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scores: gl.constexpr = matmul_layout(WARPS, BLOCK_Q)
    heads: gl.constexpr = matmul_layout(WARPS, BLOCK_D)
    operand: gl.constexpr = gl.DotOperandLayout(0, heads, 2)
    dtype: gl.constexpr = p_q.dtype.element_ty

    i_h, start, offset, length = program_tile(p_tiles, K)
    first = offset // BLOCK_Q * BLOCK_Q  # queries that see the tile
    i_group = i_h.to(gl.int64) * GROUP
    p_q += (start + first) * q_n + i_group * q_h
    p_do += (start + first) * do_n + i_group * do_h
    p_lse += i_group * N + start + first
    p_delta += i_group * N + start + first

    q_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, BLOCK_D], tile)
    do_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, BLOCK_D], tile)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], line)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], line)
    k_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_D], tile)
    v_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_D], tile)
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    o_row = gl.arange(0, BLOCK_K, gl.SliceLayout(1, wide))
    p_k += (start + offset) * k_n + i_h * k_h
    p_v += (start + offset) * v_n + i_h * v_h
    copy_rows(k_tile, p_k, o_row[:, None] * k_n + o_d[None, :], o_row, length - offset, o_d, D)
    copy_rows(v_tile, p_v, o_row[:, None] * v_n + o_d[None, :], o_row, length - offset, o_d, D)

    o_row = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, wide))
    o_flat = gl.arange(0, BLOCK_Q, flat)
    o_q = o_row[:, None] * q_n + o_d[None, :]
    o_do = o_row[:, None] * do_n + o_d[None, :]
    ahead = (gl.to_tensor(0), first, p_q, p_do, p_lse, p_delta)
    for i in gl.static_range(STAGES - 1):
        ahead = _dkv_copy(ahead, i, q_ring, do_ring, lse_ring, delta_ring, o_q, o_do, q_n, q_h, do_n, do_h, N, first,
                          length, GROUP, BLOCK_Q, D, o_row, o_d, o_flat)  # fmt: skip

    o_k = offset + gl.arange(0, BLOCK_K, gl.SliceLayout(1, scores))
    o_tile = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, scores))
    none = gl.full([BLOCK_K, BLOCK_Q], 0.0, gl.float32, scores)
    t_dk = warpgroup_mma_init(gl.full([BLOCK_K, BLOCK_D], 0.0, gl.float32, heads))
    t_dv = warpgroup_mma_init(gl.full([BLOCK_K, BLOCK_D], 0.0, gl.float32, heads))
    i_q, slot, free = first, gl.to_tensor(0), gl.to_tensor(STAGES - 1)
    for _ in range(GROUP * gl.cdiv(length - first, BLOCK_Q)):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        q_tile, do_tile = q_ring.index(slot), do_ring.index(slot)
        t_s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        t_dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), none, use_acc=False, is_async=True)
        b_dk, b_dv = warpgroup_mma_wait(2, (t_dk, t_dv))  # last step's
        b_lse = lse_ring.index(slot).load(gl.SliceLayout(0, scores)) * LOG2E
        b_s = warpgroup_mma_wait(1, (t_s,))
        b_p = gl.exp2(b_s * (scale * LOG2E) - b_lse[None, :])  # 1 beyond the document, where q, do and delta are zero
        if i_q < offset + BLOCK_K:
            b_p = gl.where((i_q + o_tile)[None, :] >= o_k[:, None], b_p, 0.0)
        t_dv = warpgroup_mma(gl.convert_layout(b_p.to(dtype), operand), do_tile, b_dv, is_async=True)
        b_dp = warpgroup_mma_wait(1, (t_dp,))
        b_delta = delta_ring.index(slot).load(gl.SliceLayout(0, scores))
        b_ds = b_p * (b_dp - b_delta[None, :])
        t_dk = warpgroup_mma(gl.convert_layout(b_ds.to(dtype), operand), q_tile, b_dk, is_async=True)
        cta_barrier()  # all warps are done with the last slot
        ahead = _dkv_copy(ahead, free, q_ring, do_ring, lse_ring, delta_ring, o_q, o_do, q_n, q_h, do_n, do_h, N,
                          first, length, GROUP, BLOCK_Q, D, o_row, o_d, o_flat)  # fmt: skip
        i_q += BLOCK_Q
        i_q = gl.where(i_q < length, i_q, first)
        free = slot
        slot = turn(slot, STAGES)
    b_dk, b_dv = warpgroup_mma_wait(0, (t_dk, t_dv))
    async_copy.wait_group(0)

    o_row = gl.arange(0, BLOCK_K, gl.SliceLayout(1, heads))
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, heads))
    mask = (offset + o_row < length)[:, None] & (o_d < D)[None, :]
    p_dk += (start + offset) * dk_n + i_h * dk_h
    p_dv += (start + offset) * dv_n + i_h * dv_h
    gl.store(p_dk + o_row[:, None] * dk_n + o_d[None, :], (b_dk * scale).to(dtype), mask)
    gl.store(p_dv + o_row[:, None] * dv_n + o_d[None, :], b_dv.to(dtype), mask)


@gluon.jit
def _probabilities(b_s, b_lse, i_k, offset, o_q, o_tile, qk_scale, BLOCK_K: gl.constexpr):
    """exp(scores - lse), zero above the diagonal."""
    b_p = gl.exp2(b_s * qk_scale - b_lse[:, None])
    if i_k + BLOCK_K > offset:
        b_p = gl.where(o_q[:, None] >= (i_k + o_tile)[None, :], b_p, 0.0)
    return b_p


@launcher
@gluon.jit(do_not_specialize=["N"])
def dq_kernel(
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
    H: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """dq and delta of a query tile."""
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    wide: gl.constexpr = copy_layout(WARPS, BLOCK_D)
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    scores: gl.constexpr = matmul_layout(WARPS, BLOCK_K)
    heads: gl.constexpr = matmul_layout(WARPS, BLOCK_D)
    operand: gl.constexpr = gl.DotOperandLayout(0, heads, 2)
    dtype: gl.constexpr = p_q.dtype.element_ty

    i_h, start, offset, length = program_tile(p_tiles, H)
    p_k += start * k_n + (i_h // GROUP) * k_h
    p_v += start * v_n + (i_h // GROUP) * v_h
    end = gl.minimum(offset + BLOCK_Q, length)

    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_D], tile)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_D], tile)
    q_tile = gl.allocate_shared_memory(dtype, [BLOCK_Q, BLOCK_D], tile)
    do_tile = gl.allocate_shared_memory(dtype, [BLOCK_Q, BLOCK_D], tile)
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    o_row = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, wide))
    p_q += (start + offset) * q_n + i_h * q_h
    p_do += (start + offset) * do_n + i_h * do_h
    p_out += (start + offset) * o_n + i_h * o_h
    o_do = o_row[:, None] * do_n + o_d[None, :]
    copy_rows(q_tile, p_q, o_row[:, None] * q_n + o_d[None, :], o_row, length - offset, o_d, D)
    copy_rows(do_tile, p_do, o_do, o_row, length - offset, o_d, D)
    ahead, o_k, o_v, o_key = first_keys(k_ring, v_ring, p_k, p_v, k_n, v_n, end, length, o_d, wide, D, BLOCK_K, STAGES)

    mask = (o_row < length - offset)[:, None] & (o_d < D)[None, :]
    b_do = gl.load(p_do + o_do, mask, 0.0).to(gl.float32)
    b_out = gl.load(p_out + o_row[:, None] * o_n + o_d[None, :], mask, 0.0).to(gl.float32)
    b_delta = gl.sum(b_do * b_out, 1)
    p_stat = i_h.to(gl.int64) * N + start
    gl.store(p_delta + p_stat + offset + o_row, b_delta, o_row < length - offset)
    b_delta = gl.convert_layout(b_delta, gl.SliceLayout(1, scores))
    o_q = offset + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, scores))
    b_lse = gl.load(p_lse + p_stat + o_q, o_q < length, 0.0) * LOG2E

    o_tile = gl.arange(0, BLOCK_K, gl.SliceLayout(0, scores))
    none = gl.full([BLOCK_Q, BLOCK_K], 0.0, gl.float32, scores)
    b_dq = gl.full([BLOCK_Q, BLOCK_D], 0.0, gl.float32, heads)
    async_copy.wait_group(STAGES - 1)
    fence_async_shared()
    b_s = warpgroup_mma(q_tile, k_ring.index(0).permute((1, 0)), none, use_acc=False)
    b_dp = warpgroup_mma(do_tile, v_ring.index(0).permute((1, 0)), none, use_acc=False)
    b_p = _probabilities(b_s, b_lse, 0, offset, o_q, o_tile, scale * LOG2E, BLOCK_K)
    b_ds = gl.convert_layout((b_p * (b_dp - b_delta[:, None])).to(dtype), operand)
    slot = gl.to_tensor(0)
    for i_k in range(BLOCK_K, end, BLOCK_K):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        after = turn(slot, STAGES)
        t_s = warpgroup_mma(q_tile, k_ring.index(after).permute((1, 0)), none, use_acc=False, is_async=True)
        t_dp = warpgroup_mma(do_tile, v_ring.index(after).permute((1, 0)), none, use_acc=False, is_async=True)
        t_dq = warpgroup_mma(b_ds, k_ring.index(slot), b_dq, is_async=True)
        b_s = warpgroup_mma_wait(2, (t_s,))
        b_p = _probabilities(b_s, b_lse, i_k, offset, o_q, o_tile, scale * LOG2E, BLOCK_K)
        b_dp = warpgroup_mma_wait(1, (t_dp,))
        b_ds = (b_p * (b_dp - b_delta[:, None])).to(dtype)
        b_dq = warpgroup_mma_wait(0, (t_dq,))
        b_ds = gl.convert_layout(b_ds, operand)
        cta_barrier()  # all warps are done with the slot
        ahead = keys_copy(ahead, slot, k_ring, v_ring, o_k, o_v, k_n, v_n, end, length, BLOCK_K, D, o_key, o_d)
        slot = after
    async_copy.wait_group(0)
    fence_async_shared()
    b_dq = warpgroup_mma(b_ds, k_ring.index(slot), b_dq)

    o_row = gl.arange(0, BLOCK_Q, gl.SliceLayout(1, heads))
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, heads))
    mask = (offset + o_row < length)[:, None] & (o_d < D)[None, :]
    p_dq += (start + offset) * dq_n + i_h * dq_h
    gl.store(p_dq + o_row[:, None] * dq_n + o_d[None, :], (b_dq * scale).to(dtype), mask)


# ---------------------------------------------------------------- launchers


def plan(H: int, K: int, D: int, strides) -> Backward:
    """Backward for the strides of (dout, q, k, v, out, dq, dk, dv), 16-byte aligned."""
    dout, q, k, v, out, dq, dk, dv = strides
    sizes = H // K, D, launch.head_block(D)
    by_query, by_key = launch.hopper_dq(sizes[2]), launch.hopper_dkv(sizes[2])
    return Backward(
        by_query.q,
        Fixed(
            dq_kernel, *flat((dout, q, k, v, out, dq)), H, *sizes, by_query.q, by_query.k, by_query.stages,
            num_warps=by_query.warps,
        ),
        by_key.k,
        Fixed(
            dkv_kernel, *flat((dout, q, k, v, dk, dv)), K, *sizes, by_key.q, by_key.k, by_key.stages,
            num_warps=by_key.warps,
        ),
    )  # fmt: skip
