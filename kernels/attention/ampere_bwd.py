"""Attention's backward in one pass, in Gluon: five multiplications instead of seven, for GPUs without wgmma.

A program owns a key tile, whose dk and dv are in registers. The parts of a query tile's dq are added in fp32 in memory
by the programs of its key tiles in turn, first keys first: results repeat bit by bit. A program waits only for one with
earlier keys, which has a lower index and was started first: no deadlock. All walk from the last query to the diagonal,
heads of a group innermost, so that they follow one another and seldom wait. Legend: fwd.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from trireme.kernels import launch
from trireme.kernels.attention import fwd, hopper
from trireme.kernels.attention.docs import Docs
from trireme.kernels.launcher import Fixed, await_previous, launcher

ROWS = 64  # of a program that prepares
AWAIT = gl.constexpr("""{
    .reg .pred here, late;
    .reg .b32 turn, polls;
    mov.b32 polls, 0;
    await_turn:
    ld.acquire.gpu.global.b32 turn, [$1];
    setp.ge.u32 here, turn, $2;
    @here bra turn_is_here;
    nanosleep.u32 40;
    add.u32 polls, polls, 1;
    setp.gt.u32 late, polls, 10000000;
    @late trap;
    bra await_turn;
    turn_is_here:
    bar.warp.sync 0xffffffff;
    mov.b32 $0, 0;
}""")  # an error after some 10 s


@gluon.constexpr_function
def _product(warps, rows):
    """Layout of a product of `rows` rows."""
    down = min(warps, rows // 16)
    return gl.NVMMADistributedLayout([2, 0], [down, warps // down], [16, 8])


@gluon.constexpr_function
def _shared(columns):
    return gl.SwizzledSharedLayout(8, max(1, 64 // columns), min(8, columns // 8), [1, 0])


@launcher
@gluon.jit(do_not_specialize=["N"])
def prepare_kernel(
    p_do, p_out, p_delta, p_turn, N, do_n, do_h, o_n, o_h, H: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr
):
    """delta, and no turn taken."""
    await_previous()
    layout: gl.constexpr = hopper.copy_layout(gl.num_warps(), D)
    i_h = gl.program_id(0) % H
    o_row = gl.program_id(0) // H * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d, row = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :], o_row.to(gl.int64)[:, None]
    mask = (o_row < N)[:, None]
    b_do = gl.load(p_do + i_h * do_h + row * do_n + o_d, mask, 0.0).to(gl.float32)
    b_out = gl.load(p_out + i_h * o_h + row * o_n + o_d, mask, 0.0).to(gl.float32)
    o_stat = i_h.to(gl.int64) * N + o_row
    gl.store(p_delta + o_stat, gl.sum(b_do * b_out, 1), o_row < N)
    gl.store(p_turn + o_stat, gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, layout)), o_row < N)


@gluon.jit
def _copy_step(tile, p, i, steps, last, length, n: gl.constexpr, h: gl.constexpr, GROUP: gl.constexpr):
    """Starts the copy of the rows of step i."""
    ROWS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    if i < steps:
        i_q = last - i // GROUP * ROWS
        p += (i % GROUP) * h + i_q.to(gl.int64) * n
        hopper.copy_rows([tile], p, hopper.places(n, ROWS, D, 0), length - i_q, D)
    async_copy.commit_group()


@launcher
@gluon.jit(do_not_specialize=["N"])
def bwd_kernel(
    p_do, p_q, p_k, p_v, p_lse, p_delta, p_turn, p_sum, p_dq, p_dk, p_dv, p_tiles, N, scale, do_n: gl.constexpr,
    do_h: gl.constexpr, q_n: gl.constexpr, q_h: gl.constexpr, k_n: gl.constexpr, k_h: gl.constexpr, v_n: gl.constexpr,
    v_h: gl.constexpr, dq_n: gl.constexpr, dq_h: gl.constexpr, dk_n: gl.constexpr, dk_h: gl.constexpr,
    dv_n: gl.constexpr, dv_h: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    WINDOW: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """dk, dv of a key tile and key/value head, and its part of dq."""
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = _product(WARPS, BLOCK_K)  # of dk and dv, too: probabilities stay in registers
    turned: gl.constexpr = _product(WARPS, D)
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, scores, 2)
    dtype: gl.constexpr = p_q.dtype.element_ty

    i_h, start, offset, length = hopper.program_tile(p_tiles, K)
    end = length
    if WINDOW:
        end = gl.minimum(offset + BLOCK_K + WINDOW - 1, length)
    tiles = gl.cdiv(end - offset, BLOCK_Q)
    steps, last = GROUP * tiles, offset + (tiles - 1) * BLOCK_Q
    i_group = i_h.to(gl.int64) * GROUP
    p_q += start * q_n + i_group * q_h
    p_do += start * do_n + i_group * do_h
    p_dq += start * dq_n + i_group * dq_h
    stat = i_group * N + start
    p_lse, p_delta, p_turn, p_sum = p_lse + stat, p_delta + stat, p_turn + stat, p_sum + stat * D

    k_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, D], _shared(D))
    v_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, D], _shared(D))
    q_ring = gl.allocate_shared_memory(dtype, [2, BLOCK_Q, D], _shared(D))
    do_tile = gl.allocate_shared_memory(dtype, [BLOCK_Q, D], _shared(D))
    ds_tile = gl.allocate_shared_memory(dtype, [BLOCK_K, BLOCK_Q], _shared(BLOCK_Q))
    p_k += (start + offset) * k_n + i_h * k_h
    p_v += (start + offset) * v_n + i_h * v_h
    hopper.copy_rows([k_tile], p_k, hopper.places(k_n, BLOCK_K, D, 0), length - offset, D)
    hopper.copy_rows([v_tile], p_v, hopper.places(v_n, BLOCK_K, D, 0), length - offset, D)
    _copy_step(q_ring.index(0), p_q, gl.to_tensor(0), steps, last, length, q_n, q_h, GROUP)
    _copy_step(do_tile, p_do, gl.to_tensor(0), steps, last, length, do_n, do_h, GROUP)

    o_k = offset + gl.arange(0, BLOCK_K, gl.SliceLayout(1, scores))
    o_row = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, scores))
    o_d = gl.arange(0, D, gl.SliceLayout(1, turned))[:, None]
    o_sum = gl.arange(0, BLOCK_Q, gl.SliceLayout(0, turned))
    none = gl.full([BLOCK_K, BLOCK_Q], 0.0, gl.float32, scores)
    no_dq = gl.full([D, BLOCK_Q], 0.0, gl.float32, turned)
    b_dk = gl.full([BLOCK_K, D], 0.0, gl.float32, scores)
    b_dv = gl.full([BLOCK_K, D], 0.0, gl.float32, scores)
    taken, added = p_turn, gl.to_tensor(False)  # of the last step's tile, and whether others follow
    for i in range(steps):
        async_copy.wait_group(0)
        hopper.cta_barrier()  # copies are here; all warps have added the last step's dq and are done with its tiles
        q_tile = q_ring.index(i % 2)
        _copy_step(q_ring.index((i + 1) % 2), p_q, i + 1, steps, last, length, q_n, q_h, GROUP)
        i_q, i_g = last - i // GROUP * BLOCK_Q, i % GROUP
        head = i_g.to(gl.int64) * N + i_q
        rest = length - i_q
        b_lse = gl.load(p_lse + head + o_row, o_row < rest, float("inf")) * hopper.LOG2E  # inf: p = 0 past the end
        b_delta = gl.load(p_delta + head + o_row, o_row < rest, 0.0)
        b_s = mma_v2(k_tile.load(left), q_tile.permute((1, 0)).load(right), none)  # (keys, queries)
        b_dp = mma_v2(v_tile.load(left), do_tile.permute((1, 0)).load(right), none)
        gl.atomic_add(taken, 1, mask=added, sem="release")
        b_p = gl.exp2(b_s * (scale * hopper.LOG2E) - b_lse[None, :])
        b_p = gl.where(hopper.visible(o_row[None, :], (o_k - i_q)[:, None], WINDOW), b_p, 0.0)
        b_ds = (b_p * (b_dp - b_delta[None, :])).to(dtype)
        ds_tile.store(b_ds)
        b_dv = mma_v2(gl.convert_layout(b_p.to(dtype), left), do_tile.load(right), b_dv)
        hopper.cta_barrier()  # ds is here; all warps are done with do
        _copy_step(do_tile, p_do, i + 1, steps, last, length, do_n, do_h, GROUP)

        first = hopper.first_key(i_q, WINDOW, BLOCK_K)  # of those that add to the tile
        taken, added = p_turn + head, i_q >= offset + BLOCK_K
        zero = gl.inline_asm_elementwise(AWAIT, "=r,l,r", [taken, (offset - first) // BLOCK_K], gl.int32, False, 1)
        b_dk = mma_v2(ds_tile.load(left), q_tile.load(right), b_dk)
        p_sums = p_sum + (head + zero) * D + o_sum.to(gl.int64)[None, :] * D + o_d
        m_sum = o_sum < gl.where(offset > first, rest, 0)
        b_sum = gl.load(p_sums, m_sum[None, :], 0.0, cache_modifier=".cg")
        b_dq = mma_v2(
            k_tile.permute((1, 0)).load(gl.DotOperandLayout(0, turned, 2)),
            ds_tile.load(gl.DotOperandLayout(1, turned, 2)),
            no_dq,
        )
        b_dq += b_sum
        m_q = (o_sum < rest)[None, :]
        if added:
            gl.store(p_sums, b_dq, m_q)
        else:
            p_out = p_dq + i_g * dq_h + i_q.to(gl.int64) * dq_n
            gl.store(p_out + o_sum.to(gl.int64)[None, :] * dq_n + o_d, (b_dq * scale).to(p_dq.dtype.element_ty), m_q)
    async_copy.wait_group(0)

    p_dk += (start + offset) * dk_n + i_h * dk_h
    p_dv += (start + offset) * dv_n + i_h * dv_h
    hopper.store_rows(p_dk, [b_dk * scale], dk_n, length - offset, D)
    hopper.store_rows(p_dv, [b_dv], dv_n, length - offset, D)


class OnePass(NamedTuple):
    """Launches for one layout."""

    prepare: Fixed  # (dout, out, delta, turns), (N,)
    key_rows: int  # of a key tile
    bwd: Fixed  # (dout, q, k, v, lse, delta, turns, sums, dq, dk, dv, tiles), (N, scale)

    def run(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, docs: Docs, scale: float,
        dq_: Tensor, dk_: Tensor, dv_: Tensor,
    ) -> None:  # fmt: skip
        """As reference.attention_bwd."""
        N, H, D = q.shape
        delta, turns = torch.empty_like(lse), torch.empty_like(lse, dtype=torch.int32)
        sums = torch.empty((H, N, D), dtype=torch.float32, device=q.device)
        self.prepare(launch.cdiv(N, ROWS) * H, (dout, out, delta, turns), (N,))
        tiles = docs.key_tiles[self.key_rows]
        tensors = dout, q, k, v, lse, delta, turns, sums, dq_, dk_, dv_, tiles
        self.bwd(len(tiles) * k.shape[1], tensors, (N, scale))


def plan(tile: launch.Tile, H: int, K: int, D: int, window: int, strides) -> OnePass:
    """Backward for the strides of (dout, q, k, v, out, dq, dk, dv), 16-byte aligned."""
    dout, q, k, v, out, dq, dk, dv = strides
    assert tile.k % tile.q == 0
    prepare = Fixed(prepare_kernel, *fwd.flat((dout, out)), H, D, ROWS, num_warps=4)
    sizes = K, H // K, D, window, tile.q, tile.k
    return OnePass(
        prepare, tile.k, Fixed(bwd_kernel, *fwd.flat((dout, q, k, v, dq, dk, dv)), *sizes, num_warps=tile.warps)
    )
