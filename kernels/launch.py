"""Block sizes, warps and stages of every kernel, as plain functions of shape and chip.

Independent of the number of tokens. Chips are of two classes, by the shared memory that a program can have: 227 KiB
(Hopper and B200: tuned by scripts/bench/ops.py --tune on an H200), and 99 KiB, which every other chip since Ampere has
at least (without spills on Ada). arch 0 is Triton's interpreter: few programs.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch


class Chip(NamedTuple):
    arch: int  # compute capability: 90 for sm_90; 0 in the interpreter
    sms: int  # multiprocessors

    @property
    def large(self) -> bool:
        """A program can have 227 KiB of shared memory; else 99 KiB (RTX 50xx, compute capability 12, too)."""
        return self.arch // 10 in (9, 10)


@cache
def chip(device: torch.device) -> Chip:
    if device.type != "cuda":
        return Chip(0, 2)
    p = torch.cuda.get_device_properties(device)
    return Chip(10 * p.major + p.minor, p.multi_processor_count)


def cdiv(a: int, b: int) -> int:
    """Rounded up; triton.cdiv takes 3 us of the host."""
    return -(-a // b)


def power2(n: int) -> int:
    """Smallest >= n."""
    return 1 << max(n - 1, 0).bit_length()


class Rows(NamedTuple):
    """Whole-row kernels: rows of a tile, columns (a power of two), warps, stages, programs."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


@cache
def rows_fwd(D: int) -> Rows:
    """A program per tile of rows of D values (`programs` unused)."""
    columns = power2(D)
    return Rows(max(1, 2048 // columns), columns, 4 if columns <= 8192 else 8, 1, 0)


def rows_bwd(device: torch.device, N: int, D: int, itemsize: int) -> Rows:
    """Persistent programs over tiles of N rows of D values of so many bytes, column sums in registers."""
    columns, here = power2(D), chip(device)
    # bytes of a tile and of a program's shared memory, programs on a multiprocessor
    aim, shared, each = (16 << 10, 227 << 10, 1) if here.large else (8 << 10, 99 << 10, 2)
    rows = max(1, aim // (columns * itemsize))
    tile = rows * columns * itemsize
    ahead = 0 if 3 * tile > shared else 1 if tile > aim else 3 if here.large and rows == 1 else 2  # tiles of 3 inputs
    return Rows(rows, columns, min(16, max(4, rows * columns // 1024)), ahead + 1, min(cdiv(N, rows), each * here.sms))


@cache
def rows_maxima(D: int) -> Rows:
    """Persistent programs over tiles of rows of D values that are read alone (`programs` unused)."""
    columns = power2(D)
    rows = max(1, 2048 // columns)
    return Rows(rows, columns, min(16, max(4, rows * columns // 1024)), 3, 0)


def column_splits(device: torch.device, n_columns: int, n_tiles: int) -> int:
    """Programs for each column block."""
    return max(1, min(n_tiles, 8 * chip(device).sms // n_columns))


# ---------------------------------------------------------------- attention


def head_block(D: int) -> int:
    """Head width, padded for matrix instructions."""
    return max(16, power2(D))


def head_blocks(D: int, V: int) -> tuple[int, int]:
    """Of keys and values: equal below 64, where two widths read out of bounds in bf16 on an H100 (Triton 3.6)."""
    blocks = head_block(D), head_block(V)
    return blocks if min(blocks) >= 64 else (max(blocks),) * 2


class Tile(NamedTuple):
    """A launch of attention: rows of queries, of keys, warps, pipeline stages."""

    q: int
    k: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Attention's launches. Rows that a program owns, queries of fwd and dq and keys of dkv, are of attention.docs."""

    fwd: Tile
    dq: Tile
    dkv: Tile


INTERPRETED = Tiles(Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1))
FP32 = {  # by head width, on every chip
    64: Tiles(Tile(64, 32, 8, 1), Tile(64, 32, 8, 2), Tile(32, 64, 8, 1)),
    128: Tiles(Tile(32, 16, 8, 1), Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)),
    256: Tiles(Tile(32, 16, 8, 2), Tile(32, 16, 8, 2), Tile(16, 32, 16, 1)),
}
SMALL = {  # bf16 in 99 KiB
    64: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2)),
    128: Tiles(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(16, 64, 8, 1)),
}
LARGE = {  # bf16 in 227 KiB
    64: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
}
WIDEST_HEAD = 256


def attention(device: torch.device, dtype: torch.dtype, D: int) -> Tiles:
    """Of heads of width D, at most WIDEST_HEAD on a GPU."""
    here = chip(device)
    if here.arch == 0:
        return INTERPRETED
    table = FP32 if dtype == torch.float32 else LARGE if here.large else SMALL
    return table[max(64, head_block(D))]


def hopper_fwd(block_d: int) -> Tile:
    """Stages are slots of its ring buffer."""
    return Tile(64, 64, 4, 3) if block_d == 128 else Tile(128, 64, 8, 3)


def hopper_dq(block_d: int) -> Tile:
    return Tile(128, 64, 8, 3) if block_d == 128 else Tile(64, 64, 4, 3)


def hopper_dkv(block_d: int) -> Tile:
    return Tile(64, 128, 8, 3) if block_d == 128 else Tile(32, 64, 4, 4)


class Logits(NamedTuple):
    """Launch of the loss: a row's logits at a time, warps, programs on a multiprocessor."""

    block: int
    warps: int
    each: int


def cross_entropy(V: int) -> Logits:
    """Wide programs for wide rows: rows in flight stay in L2."""
    return Logits(8192, 32, 2) if V > 65536 else Logits(4096, 8, 8)


# ---------------------------------------------------------------- experts


class Grouped(NamedTuple):
    """A grouped GEMM's launch: rows of a tile, columns of its two widths, warps, stages of the software pipeline."""

    rows: int
    a: int
    b: int
    warps: int
    stages: int


def grouped_mm(device: torch.device, dtype: torch.dtype) -> Grouped:
    """Tile of rows (rows, a) times a matrix (a, b)."""
    here = chip(device)
    if here.arch == 0 or dtype == torch.float32:
        return Grouped(32, 32, 32, 4, 1)
    return Grouped(128, 64, 128, 8, 3) if here.large else Grouped(128, 32, 128, 8, 3)


def grouped_add(device: torch.device, dtype: torch.dtype) -> Grouped:
    """Tile (a, b) of a matrix's gradient, from so many rows at a time."""
    if chip(device).arch == 0 or dtype == torch.float32:
        return Grouped(32, 32, 32, 4, 1)
    return Grouped(64, 128, 128, 8, 3)


# ---------------------------------------------------------------- fp8


class Codes(NamedTuple):
    """Quantization's launch: rows and columns of a tile, warps."""

    rows: int
    columns: int
    warps: int


@cache
def quantize(device: torch.device, both: bool) -> Codes:
    here = chip(device)
    return Codes(32, 32, 4) if here.arch == 0 else Codes(128, 128, 8) if both and here.large else Codes(64, 128, 8)


@cache
def gated_codes(device: torch.device) -> Codes:
    """Of a gated unit's backward, with three matrices of codes."""
    return Codes(32, 32, 4) if chip(device).arch == 0 else Codes(64, 64, 8)


class BlockScaled(NamedTuple):
    """An fp8 matmul on sm_120: rows, columns and depth of a tile, rows of tiles in L2 at once, warps, stages."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


def block_scaled(device: torch.device) -> BlockScaled:
    """By the 99 KiB of shared memory that a program can have; never measured."""
    return BlockScaled(32, 32, 64, 2, 4, 2) if chip(device).arch == 0 else BlockScaled(128, 128, 128, 8, 8, 3)


def maxima(device: torch.device, blocks: int) -> int:
    """Programs that each take the maximum of some of the blocks."""
    return min(power2(blocks), power2(4 * chip(device).sms) // 2)


# ---------------------------------------------------------------- scans


ROWS_OF_SCANS = 32  # of a chunk


class Scan(NamedTuple):
    """A scan's launches: rows of a chunk, width of keys (a power of two), columns of values of a program."""

    rows: int
    width: int
    columns: int
    warps: int
    wide_warps: int  # of the kernel that computes all gradients of a chunk
    stages: int
    precision: Literal["ieee", "tf32"]  # of fp32 products; those of bf16 are exact


@cache
def scan(device: torch.device, D: int, E: int, itemsize: int) -> Scan:
    """Of states (D, E). Tiles of 64 rows by four warps or more are wrong in bf16 on an H100 with Triton 3.6."""
    width, columns = max(16, power2(D)), min(32, max(16, power2(E)))
    if itemsize == 4 or chip(device).arch == 0:
        return Scan(ROWS_OF_SCANS, width, columns, 4, 4, 1, "ieee")
    return Scan(ROWS_OF_SCANS, width, columns, 4, 8, 1, "tf32")
