"""Gradients of the experts' weights for Hopper, in Gluon: the algorithm of gradients.py with explicit waits.

Triton copies rows whose numbers are looked up (find_rows) into a single buffer and waits for them. Here they are copied
into ring buffers of STAGES slots: rows are looked up one step ahead, and a slot is filled again during the next matrix
multiplication. Where the sums are fp32, a tile is written to shared memory and the copy engine adds it to the sum in
global memory (cp.reduce.async.bulk.tensor), which no thread reads. Values are added and rounded as by a thread, but
subnormal sums become zero. Legend: matmuls.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trireme.kernels import launch
from trireme.kernels.attention.hopper import copy_async, copy_layout, cta_barrier, matmul_layout, turn
from trireme.kernels.experts.matmuls import find_rows, place_of
from trireme.kernels.experts.reference import Order
from trireme.kernels.launch import Grouped, cdiv
from trireme.kernels.launcher import await_previous, launcher

THREADS = Grouped(64, 128, 256, 8, 3)  # stages are slots of the ring buffers
COPY_ENGINE = Grouped(32, 128, 128, 4, 4)  # three programs on a multiprocessor: one adds while others multiply
LARGE = 1 << 25  # elements of an expert's matrix from which on addition by threads is as fast


@builtin
def _reduce_add(target, coord, tile, _semantic=None):
    """Starts the addition of a tile in shared memory to `target` (a TensorDescriptor) at coord; clips at its shape."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, coord, tile.handle)


@gluon.jit
def _rows_copy(ahead, slot, a_ring, b_ring, p_a, p_b, p_pair, stop, o_ra, o_rb, m_a, m_b, A: gl.constexpr,
               B: gl.constexpr, CHOSEN_A: gl.constexpr, CHOSEN_B: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Starts the copies of the step `ahead`, (first row, row numbers of a, of b); returns the next step, looked up."""
    i_row, b_ra, b_rb = ahead
    if i_row < stop:
        copy_async(a_ring.index(slot), p_a + b_ra[:, None] * A, (i_row + o_ra < stop)[:, None] & m_a)
        copy_async(b_ring.index(slot), p_b + b_rb[:, None] * B, (i_row + o_rb < stop)[:, None] & m_b)
    async_copy.commit_group()
    i_row += ROWS
    b_ra = find_rows(p_pair, i_row + o_ra, i_row + o_ra < stop, CHOSEN_A)
    b_rb = find_rows(p_pair, i_row + o_rb, i_row + o_rb < stop, CHOSEN_B)
    return i_row, b_ra, b_rb


@launcher
@gluon.jit
def add_kernel(
    p_a,
    p_b,
    p_pair,
    p_starts,
    dw,
    A: gl.constexpr,
    B: gl.constexpr,
    CHOSEN_A: gl.constexpr,
    CHOSEN_B: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_A: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    REDUCE: gl.constexpr,
):
    """As gradients._grouped_add; `dw` is a pointer, or with REDUCE a descriptor of (E, A, B) in fp32."""
    await_previous()
    WARPS: gl.constexpr = gl.num_warps()
    TILES_A: gl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    TILES_B: gl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    wide_a: gl.constexpr = copy_layout(WARPS, BLOCK_A)
    wide_b: gl.constexpr = copy_layout(WARPS, BLOCK_B)
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    sums: gl.constexpr = matmul_layout(WARPS, BLOCK_B)
    dtype: gl.constexpr = p_a.dtype.element_ty

    i_e = gl.program_id(0) // (TILES_A * TILES_B)
    i_a, i_b = place_of(gl.program_id(0) % (TILES_A * TILES_B), TILES_A, TILES_B)
    start, stop = gl.load(p_starts + i_e), gl.load(p_starts + i_e + 1)
    if start == stop:
        return
    a_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_A], tile)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_B], tile)
    o_ra = gl.arange(0, ROWS, gl.SliceLayout(1, wide_a))
    o_rb = gl.arange(0, ROWS, gl.SliceLayout(1, wide_b))
    o_a = i_a * BLOCK_A + gl.arange(0, BLOCK_A, gl.SliceLayout(0, wide_a))[None, :]
    o_b = i_b * BLOCK_B + gl.arange(0, BLOCK_B, gl.SliceLayout(0, wide_b))[None, :]
    m_a, m_b = o_a < A, o_b < B
    p_a += o_a
    p_b += o_b
    b_ra = find_rows(p_pair, start + o_ra, start + o_ra < stop, CHOSEN_A)
    b_rb = find_rows(p_pair, start + o_rb, start + o_rb < stop, CHOSEN_B)
    ahead = (start, b_ra, b_rb)
    for i in gl.static_range(STAGES - 1):
        ahead = _rows_copy(ahead, i, a_ring, b_ring, p_a, p_b, p_pair, stop, o_ra, o_rb, m_a, m_b, A, B, CHOSEN_A,
                           CHOSEN_B, ROWS)  # fmt: skip

    b_sum = gl.full([BLOCK_A, BLOCK_B], 0.0, gl.float32, sums)
    slot, free = gl.to_tensor(0), gl.to_tensor(STAGES - 1)
    for _ in range(gl.cdiv(stop - start, ROWS)):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        t_sum = warpgroup_mma(a_ring.index(slot).permute((1, 0)), b_ring.index(slot), b_sum, is_async=True)
        b_sum = warpgroup_mma_wait(1, (t_sum,))  # the last step's is over
        cta_barrier()  # in all warps
        ahead = _rows_copy(ahead, free, a_ring, b_ring, p_a, p_b, p_pair, stop, o_ra, o_rb, m_a, m_b, A, B, CHOSEN_A,
                           CHOSEN_B, ROWS)  # fmt: skip
        free = slot
        slot = turn(slot, STAGES)
    b_sum = warpgroup_mma_wait(0, (b_sum,))
    async_copy.wait_group(0)

    if REDUCE:
        stage: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=3)
        cta_barrier()  # all warps are done with the ring buffers, whose memory the tile takes
        b_tile = gl.allocate_shared_memory(gl.float32, [1, BLOCK_A, BLOCK_B], stage)
        b_tile.store(b_sum.reshape([1, BLOCK_A, BLOCK_B]))
        fence_async_shared()
        cta_barrier()
        _reduce_add(dw, [i_e, i_a * BLOCK_A, i_b * BLOCK_B], b_tile)
        tma.store_wait(0)
    else:
        o_a = i_a * BLOCK_A + gl.arange(0, BLOCK_A, gl.SliceLayout(1, sums))
        o_b = i_b * BLOCK_B + gl.arange(0, BLOCK_B, gl.SliceLayout(0, sums))
        mask = (o_a < A)[:, None] & (o_b < B)[None, :]
        p_dw = dw + i_e.to(gl.int64) * A * B + (o_a[:, None] * B + o_b[None, :])
        b_sum += gl.load(p_dw, mask, 0.0).to(gl.float32)
        gl.store(p_dw, b_sum.to(p_dw.dtype.element_ty), mask)


def suits(device: torch.device, dtype: torch.dtype, A: int, B: int) -> bool:
    """Whether the kernel takes rows of A and B values: on sm_90 in bf16, each row aligned to 16 bytes."""
    return launch.chip(device).arch == 90 and dtype == torch.bfloat16 and A % 8 == 0 and B % 8 == 0


def reduces(dw_: Tensor) -> bool:
    """Whether the copy engine adds to dw_ (E, A, B): to fp32 alone, as it would round sums in bf16 twice."""
    _, A, B = dw_.shape
    return dw_.dtype == torch.float32 and min(A, B) >= 128 and A * B < LARGE and dw_.data_ptr() % 16 == 0


def add_(dw_: Tensor, a: Tensor, b: Tensor, order: Order, k_a: int, k_b: int, reduce: bool) -> None:
    """As reference.grouped_add_; all tensors are contiguous. With `reduce` the copy engine adds, otherwise threads."""
    E, A, B = dw_.shape
    t = COPY_ENGINE if reduce else THREADS
    layout = gl.NVMMASharedLayout(128, 32, rank=3)
    target = TensorDescriptor.from_tensor(dw_, [1, t.a, t.b], layout) if reduce else dw_
    add_kernel[(E * cdiv(A, t.a) * cdiv(B, t.b),)](
        a, b, order.pair, order.starts, target, A, B, k_a, k_b, t.rows, t.a, t.b, t.stages, reduce, num_warps=t.warps
    )
