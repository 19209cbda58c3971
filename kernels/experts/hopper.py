"""Gradients of the experts' weights for Hopper, in Gluon: the algorithm of gradients.py with explicit waits.

A program for each multiprocessor takes tile after tile, in order, and starts the copies of the next tile's rows before
the last tile is done. Rows of x, which may be looked up, are copied by threads; their numbers are read two steps ahead.
Sorted rows of y are copied by the copy engine. Parts of a tile of fp32 sums go through shared memory to the copy
engine, which adds them in global memory (cp.reduce.async.bulk.tensor): values are added and rounded as by a thread, but
subnormal sums become zero. A tile of bf16 sums is read during the matrix multiplications, added to by threads, rounded
once and written by the copy engine.

In an expert's last step rows of x that are not its own are zeros, and those of y are the next expert's: what is not
finite there reaches the gradient of both. So rows of all experts have to be there (Order.sliced).
Legend: E experts, X and Y widths of x and y, CHOSEN rows of a token if rows of x are looked up, else 0. A step is a
tuple: tile, first row, row behind the expert's last, first columns of x and of y, numbers of x's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trireme.kernels import launch
from trireme.kernels.attention.hopper import copy_async, copy_layout, cta_barrier, matmul_layout, turn
from trireme.kernels.experts.matmuls import place_of
from trireme.kernels.experts.reference import Order
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

ROWS, BLOCK_X, BLOCK_Y, WARPS = 64, 128, 256, 8  # BLOCK_Y at most
SLOTS = gl.constexpr(3)  # of a ring buffer: one is read, two are being filled
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # both renamed after Triton 3.6
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
PART = gl.constexpr(64)  # columns of y that the copy engine adds at once, of fp32 sums
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SUMS = {torch.bfloat16: gl.NVMMASharedLayout(128, 16, rank=3), torch.float32: gl.NVMMASharedLayout(128, 32, rank=3)}


@builtin
def _reduce_add(target, coord, tile, _semantic=None):
    """Starts the addition of a tile in shared memory to `target` (a TensorDescriptor) at coord; clips at its shape."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, coord, tile.handle)


@gluon.jit
def _rows_of(p_starts, i_e, E: gl.constexpr):
    """(first row, row behind the last) of an expert; none behind the last expert."""
    return gl.load(p_starts + gl.minimum(i_e, E)), gl.load(p_starts + gl.minimum(i_e + 1, E))


@gluon.jit
def _next_tile(p_next, p_starts, E: gl.constexpr, TILES: gl.constexpr):
    """(tile, first row, row behind the last) of the next tile with rows; a tile >= E * TILES if none is left."""
    i = gl.atomic_add(p_next, 1, sem="relaxed") + gl.num_programs(0)
    start, stop = _rows_of(p_starts, i // TILES, E)
    while (start == stop) & (i < E * TILES):
        i = gl.atomic_add(p_next, 1, sem="relaxed") + gl.num_programs(0)
        start, stop = _rows_of(p_starts, i // TILES, E)
    return i, start, stop


@gluon.jit
def _place(i, TILES_X: gl.constexpr, TILES_Y: gl.constexpr, BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr):
    """(expert, first column of x, of y) of tile i."""
    i_x, i_y = place_of(i % (TILES_X * TILES_Y), TILES_X, TILES_Y)
    return i // (TILES_X * TILES_Y), i_x * BLOCK_X, i_y * BLOCK_Y


@gluon.jit
def _numbers(p_pair, o_row, stop, CHOSEN: gl.constexpr):
    """The pairs of sorted rows; without CHOSEN the rows themselves."""
    if CHOSEN > 0:
        return gl.load(p_pair + o_row, o_row < stop, 0)
    return o_row


@gluon.jit
def _step_after(step, p_pair, p_starts, p_next, o_row, E: gl.constexpr, TILES_X: gl.constexpr, TILES_Y: gl.constexpr,
                CHOSEN: gl.constexpr, ROWS: gl.constexpr, BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr):  # fmt: skip
    """The next step, of the same tile or of the next; without rows behind the last tile."""
    i, i_row, stop, first_x, first_y = step[0], step[1] + ROWS, step[2], step[3], step[4]
    if (i_row >= stop) & (i < E * TILES_X * TILES_Y):
        i, i_row, stop = _next_tile(p_next, p_starts, E, TILES_X * TILES_Y)
        _, first_x, first_y = _place(i, TILES_X, TILES_Y, BLOCK_X, BLOCK_Y)
    return i, i_row, stop, first_x, first_y, _numbers(p_pair, i_row + o_row, stop, CHOSEN)


@gluon.jit
def _copy(step, slot, x_ring, y_ring, copied, p_x, y_rows, o_row, o_x, X: gl.constexpr, CHOSEN: gl.constexpr):
    """Starts the copies of a step to a slot. Returns its tile, -1 if it has no rows."""
    i, i_row, stop, first_x, first_y, b_row = step
    if CHOSEN > 0:
        b_row = b_row // CHOSEN
    p_x = p_x + first_x + (b_row.to(gl.int64) * X)[:, None] + o_x[None, :]
    copy_async(x_ring.index(slot), p_x, (i_row + o_row < stop)[:, None] & (first_x + o_x < X)[None, :])
    async_copy.commit_group()
    some, y_slot = i_row < stop, y_ring.index(slot)
    mbarrier.expect(copied.index(slot), y_slot.shape[0] * y_slot.shape[1] * 2, pred=some)
    copy_in(y_rows, [i_row, first_y], copied.index(slot), y_slot, pred=some)
    return gl.where(some, i, -1)


@gluon.jit
def _oriented(b_sum, TURNED: gl.constexpr):
    """Sums (BLOCK_X, columns of y) as a tile of one expert."""
    if TURNED:
        b_sum = b_sum.permute((1, 0))
    return b_sum.reshape([1, b_sum.shape[0], b_sum.shape[1]])


@gluon.jit
def _divided(b_sum, PARTS: gl.constexpr):
    """Sums of neighbouring columns, PARTS equal parts."""
    if PARTS == 1:
        return (b_sum,)
    else:  # noqa: RET505 (else what follows is compiled too)
        halves: gl.constexpr = [b_sum.shape[0], 2, b_sum.shape[1] // 2]
        b_low, b_high = b_sum.reshape(halves).permute((0, 2, 1)).split()
        return _divided(b_low, PARTS // 2) + _divided(b_high, PARTS // 2)


@gluon.jit
def _add_by_copy_engine(dw, i_e, first_x, first_y, b_sum, tiles, TURNED: gl.constexpr):
    """Adds fp32 sums to dw in parts; while one is read from shared memory, the next is written to another buffer."""
    PARTS: gl.constexpr = b_sum.shape[1] // PART
    BUFFERS: gl.constexpr = tiles.shape[0]
    parts = _divided(b_sum, PARTS)
    for j in gl.static_range(PARTS):
        tile = tiles.index(j % BUFFERS)
        first = first_y + j * PART
        tma.store_wait(BUFFERS - 1)
        cta_barrier()  # what was there is read, for all warps
        tile.store(_oriented(parts[j], TURNED))
        fence_async_shared()
        cta_barrier()
        _reduce_add(dw, [i_e, first if TURNED else first_x, first_x if TURNED else first], tile)


@gluon.jit
def _add_by_threads(b_sum, tile, TURNED: gl.constexpr):
    """Adds sums to a tile in bf16."""
    b_sum = _oriented(b_sum, TURNED)
    layout: gl.constexpr = b_sum.type.layout
    tile.store((b_sum + tile.load(layout).to(gl.float32)).to(tile.dtype))
    fence_async_shared()
    cta_barrier()


@launcher
@gluon.jit
def add_kernel(
    p_pair, p_starts, p_next, p_x, y_rows, dw, E: gl.constexpr, X: gl.constexpr, Y: gl.constexpr, CHOSEN: gl.constexpr,
    TURNED: gl.constexpr, ROWS: gl.constexpr, BLOCK_X: gl.constexpr, BLOCK_Y: gl.constexpr,
):  # fmt: skip
    """As gradients._grouped_add. y_rows is a descriptor of (P, Y), dw of (E, X, Y), or if TURNED of (E, Y, X).

    p_next points at a zero: the number of tiles that programs took besides their first.
    """
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    TILES_X: gl.constexpr = (X + BLOCK_X - 1) // BLOCK_X
    TILES_Y: gl.constexpr = (Y + BLOCK_Y - 1) // BLOCK_Y
    REDUCE: gl.constexpr = dw.dtype == gl.float32
    BUFFERS: gl.constexpr = 2 if REDUCE and BLOCK_Y > PART else 1
    wide: gl.constexpr = copy_layout(WARPS, BLOCK_X)
    sums: gl.constexpr = matmul_layout(WARPS, BLOCK_Y)

    x_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, BLOCK_X], OPERAND)
    y_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, ROWS, BLOCK_Y], OPERAND)
    tiles = gl.allocate_shared_memory(dw.dtype, [BUFFERS] + dw.block_shape, dw.layout)
    copied = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())  # rows of y, of each slot
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())  # the tile of bf16 sums
    for s in gl.static_range(SLOTS):
        mbarrier.init(copied.index(s), count=1)
    mbarrier.init(read, count=1)
    fence_async_shared()
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    o_x = gl.arange(0, BLOCK_X, gl.SliceLayout(0, wide))
    i = gl.program_id(0)
    start, stop = _rows_of(p_starts, i // (TILES_X * TILES_Y), E)
    if start == stop:
        i, start, stop = _next_tile(p_next, p_starts, E, TILES_X * TILES_Y)
    _, first_x, first_y = _place(i, TILES_X, TILES_Y, BLOCK_X, BLOCK_Y)
    step = (i, start, stop, first_x, first_y, _numbers(p_pair, start + o_row, stop, CHOSEN))
    later = _step_after(step, p_pair, p_starts, p_next, o_row, E, TILES_X, TILES_Y, CHOSEN, ROWS, BLOCK_X, BLOCK_Y)
    i = _copy(step, 0, x_ring, y_ring, copied, p_x, y_rows, o_row, o_x, X, CHOSEN)
    i_then = _copy(later, 1, x_ring, y_ring, copied, p_x, y_rows, o_row, o_x, X, CHOSEN)
    step = _step_after(later, p_pair, p_starts, p_next, o_row, E, TILES_X, TILES_Y, CHOSEN, ROWS, BLOCK_X, BLOCK_Y)
    later = _step_after(step, p_pair, p_starts, p_next, o_row, E, TILES_X, TILES_Y, CHOSEN, ROWS, BLOCK_X, BLOCK_Y)

    slot, free, turns, phase = gl.to_tensor(0), gl.to_tensor(2), gl.to_tensor(0), gl.to_tensor(0)
    while i >= 0:
        i_e, first_x, first_y = _place(i, TILES_X, TILES_Y, BLOCK_X, BLOCK_Y)
        start, stop = _rows_of(p_starts, i_e, E)
        place = [i_e, first_y if TURNED else first_x, first_x if TURNED else first_y]
        if not REDUCE:
            tma.store_wait(0)  # the last tile has been read
            mbarrier.expect(read, BLOCK_X * BLOCK_Y * 2)
            copy_in(dw, place, read, tiles.index(0))
        b_sum = gl.full([BLOCK_X, BLOCK_Y], 0.0, gl.float32, sums)
        for _ in range(gl.cdiv(stop - start, ROWS)):
            async_copy.wait_group(1)
            mbarrier.wait(copied.index(slot), turns & 1)
            fence_async_shared()
            t_sum = warpgroup_mma(x_ring.index(slot).permute((1, 0)), y_ring.index(slot), b_sum, is_async=True)
            b_sum = warpgroup_mma_wait(1, (t_sum,))  # the last step's is over
            cta_barrier()  # in all warps
            i = i_then
            i_then = _copy(step, free, x_ring, y_ring, copied, p_x, y_rows, o_row, o_x, X, CHOSEN)
            step = later
            later = _step_after(step, p_pair, p_starts, p_next, o_row, E, TILES_X, TILES_Y, CHOSEN, ROWS, BLOCK_X,
                                BLOCK_Y)  # fmt: skip
            free = slot
            slot = turn(slot, SLOTS)
            turns += (slot == 0).to(gl.int32)
        b_sum = warpgroup_mma_wait(0, (b_sum,))
        if REDUCE:
            _add_by_copy_engine(dw, i_e, first_x, first_y, b_sum, tiles, TURNED)
        else:
            mbarrier.wait(read, phase)
            phase ^= 1
            _add_by_threads(b_sum, tiles.index(0), TURNED)
            copy_out(dw, place, tiles.index(0))
    async_copy.wait_group(0)
    tma.store_wait(0)


def add_(dw_: Tensor, a: Tensor, b: Tensor, order: Order, k_a: int, k_b: int) -> None:
    """As reference.grouped_add_, of tensors that gradients.suits_hopper takes."""
    turned = k_b > 0 or (k_a == 0 and a.shape[1] < b.shape[1])  # y is the narrower where both are sorted
    x, y, chosen = (b, a, k_b) if turned else (a, b, k_a)
    (E, *_), X, Y = dw_.shape, x.shape[1], y.shape[1]
    block_y = min(BLOCK_Y, max(PART.value, power2(Y)))
    columns = PART.value if dw_.dtype == torch.float32 else block_y
    tile = [1, columns, BLOCK_X] if turned else [1, BLOCK_X, columns]
    target = TensorDescriptor.from_tensor(dw_, tile, SUMS[dw_.dtype])
    y_rows = TensorDescriptor.from_tensor(y, [ROWS, block_y], OPERAND.value)
    at_once = launch.chip(dw_.device).sms * (2 if block_y == PART.value else 1)
    programs = min(at_once, E * cdiv(X, BLOCK_X) * cdiv(Y, block_y))
    counter = torch.zeros(1, dtype=torch.int32, device=dw_.device)
    inputs = order.pair, order.starts, counter, x, y_rows, target, E, X, Y, chosen, turned
    add_kernel[(programs,)](*inputs, ROWS, BLOCK_X, block_y, num_warps=WARPS)
