"""Attention's kernels for Hopper, in Gluon: shared-memory pools of tiles, and which tensors are supported.

Triton waits for each matrix multiplication at once (docs/kernels-log.md); in Gluon waits are explicit. Tiles are copied
asynchronously into ring buffers of STAGES slots, one commit group per step. Pointers and slots advance and are never
recomputed; later copies start last. ptxas serializes matrix multiplications with accumulators that it cannot follow:
between steps only those that the loop carries are in flight (tests/kernels/test_compile.py).
Legend: as fwd.py, D padded to BLOCK_D; t_ a matrix multiplication that may be in flight.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from trireme.kernels import launch
from trireme.kernels.attention.fwd import flat

LOG2E = gl.constexpr(1.4426950408889634)
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # both renamed
cta_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # after Triton 3.6


@gluon.jit
def copy_rows(smem, p, o_tile, o_row, rows, o_d, D: gl.constexpr):
    """Starts the copy of a tile at p + o_tile to smem; zeros after `rows` and beyond D."""
    copy_async(smem, p + o_tile, (o_row < rows)[:, None] & (o_d < D)[None, :])


@gluon.jit
def turn(slot, stages: gl.constexpr):
    """The next slot: cheaper than a remainder."""
    return gl.where(slot == stages - 1, 0, slot + 1)


@gluon.jit
def keys_copy(ahead, slot, k_ring, v_ring, o_k, o_v, k_n, v_n, end, length, BLOCK_K: gl.constexpr, D: gl.constexpr,
              o_row, o_d):  # fmt: skip
    """Starts the copies of step `ahead`, keys and values; returns the next."""
    i_k, p_k, p_v = ahead
    if i_k < end:
        copy_rows(k_ring.index(slot), p_k, o_k, o_row, length - i_k, o_d, D)
        copy_rows(v_ring.index(slot), p_v, o_v, o_row, length - i_k, o_d, D)
    async_copy.commit_group()
    return i_k + BLOCK_K, p_k + BLOCK_K * k_n, p_v + BLOCK_K * v_n


@gluon.constexpr_function
def copy_layout(warps, block_d):
    """Layout of a tile copied to shared memory: 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // block_d, block_d // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def matmul_layout(warps, columns):
    """Layout of an accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def program_tile(p_tiles, heads: gl.constexpr):
    """(head, document's first token, tile's offset in it, its length)."""
    i_tile, i_h = gl.program_id(0) // heads, gl.program_id(0) % heads
    start = gl.load(p_tiles + 3 * i_tile).to(gl.int64)
    offset = gl.load(p_tiles + 3 * i_tile + 1)
    length = gl.load(p_tiles + 3 * i_tile + 2)
    return i_h, start, offset, length


@gluon.jit
def first_keys(
    k_ring,
    v_ring,
    p_k,
    p_v,
    k_n,
    v_n,
    end,
    length,
    o_d,
    wide: gl.constexpr,
    D: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fills a query tile's ring buffers; returns (ahead, key offsets, value offsets, rows) for keys_copy."""
    o_key = gl.arange(0, BLOCK_K, gl.SliceLayout(1, wide))
    o_k = o_key[:, None] * k_n + o_d[None, :]
    o_v = o_key[:, None] * v_n + o_d[None, :]
    ahead = (gl.to_tensor(0), p_k, p_v)
    for i in gl.static_range(STAGES):
        ahead = keys_copy(ahead, i, k_ring, v_ring, o_k, o_v, k_n, v_n, end, length, BLOCK_K, D, o_key, o_d)
    return ahead, o_k, o_v, o_key


def suits(device: torch.device, dtype: torch.dtype, D: int, window: int, strides) -> bool:
    """Whether the kernels take these strides, 16-byte aligned."""
    return (
        launch.chip(device).arch == 90
        and window == 0
        and dtype == torch.bfloat16
        and 32 < D <= 128
        and D % 8 == 0
        and all(n % 16 == 0 and n < 1 << 24 for n in flat(strides))  # tile offsets are int32
    )
