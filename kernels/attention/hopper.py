"""Attention's kernels for Hopper, in Gluon: shared-memory pools of tiles.

Triton waits for each matrix multiplication at once (docs/dev/kernels.md); in Gluon waits are explicit. Tiles are copied
asynchronously into ring buffers of STAGES slots, one commit group per step. Pointers and slots advance and are never
recomputed; later copies start last. ptxas serializes matrix multiplications with accumulators that it cannot follow:
between steps only those that the loop carries are in flight (tests/kernels/test_compile.py).
Legend: as fwd.py; t_ a matrix multiplication that may be in flight, of a tile in parts one for each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # both renamed
cta_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # after Triton 3.6


@gluon.jit
def allocate(dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Shared memory of so many tiles, in parts."""
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    first = gl.allocate_shared_memory(dtype, [SLOTS, ROWS, D0], tile)
    return (first, gl.allocate_shared_memory(dtype, [SLOTS, ROWS, D1], tile)) if D1 else (first,)


@gluon.jit
def tile_of(ring, slot):
    """The tile in a slot."""
    return [part.index(slot) for part in ring]


@gluon.jit
def zeros(ROWS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, ACROSS: gl.constexpr = 1):
    """Accumulators of a tile's parts, their columns divided over ACROSS groups of warps."""
    first = gl.full([ROWS, D0], 0.0, gl.float32, matmul_layout(gl.num_warps(), D0, ACROSS))
    rest: gl.constexpr = matmul_layout(gl.num_warps(), D1, ACROSS)
    return (first, gl.full([ROWS, D1], 0.0, gl.float32, rest)) if D1 else (first,)


@gluon.jit
def _place(n, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = copy_layout(gl.num_warps(), COLUMNS)
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return o_row, o_d, o_row[:, None] * n + o_d[None, :]


@gluon.jit
def places(n, ROWS: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """(rows, columns, offsets) of a tile's parts that threads copy, of a tensor whose rows are n elements apart."""
    first = _place(n, ROWS, D0)
    return (first, _place(n, ROWS, D1)) if D1 else (first,)


@gluon.jit
def _copy(smem, p, place, rows, D: gl.constexpr):
    copy_async(smem, p + place[2], (place[0] < rows)[:, None] & (place[1] < D)[None, :])


@gluon.jit
def copy_rows(tile, p, place, rows, D: gl.constexpr):
    """Starts the copy of a tile at p to shared memory; zeros after `rows` and beyond column D."""
    _copy(tile[0], p, place[0], rows, D)
    if len(tile) == 2:
        D0: gl.constexpr = tile[0].shape[1]
        _copy(tile[1], p + D0, place[1], rows, D - D0)


@gluon.jit
def _store(p, tile, n, rows, D: gl.constexpr):
    layout: gl.constexpr = tile.type.layout
    o_row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    o_d = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    mask = (o_row < rows)[:, None] & (o_d < D)[None, :]
    gl.store(p + o_row[:, None] * n + o_d[None, :], tile.to(p.dtype.element_ty), mask)


@gluon.jit
def store_rows(p, parts, n, rows, D: gl.constexpr):
    """Writes a tile's first `rows` and D columns, rows n elements apart."""
    _store(p, parts[0], n, rows, D)
    if len(parts) == 2:
        D0: gl.constexpr = parts[0].shape[1]
        _store(p + D0, parts[1], n, rows, D - D0)


@gluon.jit
def start_scores(a, b, none):
    """Starts a b^T of two tiles."""
    t = warpgroup_mma(a[0], b[0].permute((1, 0)), none, use_acc=False, is_async=True)
    if len(a) == 2:
        t = warpgroup_mma(a[1], b[1].permute((1, 0)), t, is_async=True)
    return t


@gluon.jit
def start_sums(b_p, b, acc):
    """Starts acc + p b of a tile b; p: an operand in registers, or in shared memory."""
    first = warpgroup_mma(b_p, b[0], acc[0], is_async=True)
    if len(acc) == 2 and isinstance(b_p, gl.tensor):
        b_p = gl.convert_layout(b_p, gl.DotOperandLayout(0, acc[1].type.layout, 2))
    return (first, warpgroup_mma(b_p, b[1], acc[1], is_async=True)) if len(acc) == 2 else (first,)


@gluon.jit
def wait(count: gl.constexpr, t):
    """The results of t when at most `count` later multiplications are in flight."""
    parts = warpgroup_mma_wait(count, t)
    return (parts,) if len(t) == 1 else parts


@gluon.jit
def turn(slot, stages: gl.constexpr):
    """The next slot: cheaper than a remainder."""
    return gl.where(slot == stages - 1, 0, slot + 1)


@gluon.jit
def keys_copy(ahead, own_slot, kept_slot, own_ring, kept_ring, own, kept, own_n, kept_n, end, length,
              OWN: gl.constexpr, KEPT: gl.constexpr, BLOCK_K: gl.constexpr):  # fmt: skip
    """Starts the copies of step `ahead`, keys and values; returns the next.

    own_ring: of what only its own step reads, one slot shorter than kept_ring, whose tile the next step reads too. own,
    kept: places of their tiles, of OWN and KEPT columns.
    """
    i_k, p_own, p_kept = ahead
    if i_k < end:
        copy_rows(tile_of(own_ring, own_slot), p_own, own, length - i_k, OWN)
        copy_rows(tile_of(kept_ring, kept_slot), p_kept, kept, length - i_k, KEPT)
    async_copy.commit_group()
    return i_k + BLOCK_K, p_own + BLOCK_K * own_n, p_kept + BLOCK_K * kept_n


@gluon.jit
def first_keys(own_ring, kept_ring, p_own, p_kept, own, kept, own_n, kept_n, begin, end, length,
               OWN: gl.constexpr, KEPT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Fills the ring of STAGES - 1 slots from key `begin` on, as keys_copy; returns the next step."""
    ahead = (begin, p_own + begin.to(gl.int64) * own_n, p_kept + begin.to(gl.int64) * kept_n)
    for i in gl.static_range(STAGES - 1):
        ahead = keys_copy(ahead, i, i, own_ring, kept_ring, own, kept, own_n, kept_n, end, length, OWN, KEPT, BLOCK_K)
    return ahead


@gluon.jit
def first_key(offset, WINDOW: gl.constexpr, BLOCK_K: gl.constexpr):
    """Of the first tile of keys that a query tile sees."""
    if WINDOW == 0:
        return gl.to_tensor(0)
    return gl.maximum(offset - WINDOW + 1, 0) // BLOCK_K * BLOCK_K


@gluon.jit
def visible(o_q, o_k, WINDOW: gl.constexpr):
    """Keys not after their query, and of the window's last tokens if there is a window."""
    seen = o_q >= o_k
    if WINDOW:
        seen = seen & (o_q - o_k < WINDOW)
    return seen


@gluon.constexpr_function
def copy_layout(warps, block_d):
    """Layout of a tile copied to shared memory: 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // block_d, block_d // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def matmul_layout(warps, columns, across=1):
    """Layout of an accumulator whose columns are divided over `across` groups of warps."""
    return gl.NVMMADistributedLayout([3, 0], [warps // across, across], [16, columns // across, 16])


@gluon.jit
def program_tile(p_tiles, heads: gl.constexpr):
    """(head, document's first token, tile's offset in it, its length)."""
    i_tile, i_h = gl.program_id(0) // heads, gl.program_id(0) % heads
    start = gl.load(p_tiles + 3 * i_tile).to(gl.int64)
    offset = gl.load(p_tiles + 3 * i_tile + 1)
    length = gl.load(p_tiles + 3 * i_tile + 2)
    return i_h, start, offset, length
