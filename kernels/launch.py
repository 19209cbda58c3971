"""Block sizes, warps and stages of every kernel, as plain functions of shape and chip.

Independent of the number of tokens. Tuned by scripts/bench/ops.py --tune on an H200 (arch 90); on Ada (arch 89) without
spills, within 99 KiB of shared memory. arch 0 is Triton's interpreter: few programs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Chip(NamedTuple):
    arch: int  # compute capability: 90 for sm_90; 0 in the interpreter
    sms: int  # multiprocessors


class Tile(NamedTuple):
    """Attention's launch: rows of queries, of keys, warps, pipeline stages."""

    q: int
    k: int
    warps: int
    stages: int


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


def rows_bwd(device: torch.device, N: int, D: int) -> Rows:
    """Persistent programs over tiles of N rows of D values, column sums in registers."""
    columns, (arch, sms) = power2(D), chip(device)
    values, each = (4096, 2) if arch < 90 else (8192, 1)  # of a tile; programs on a multiprocessor
    rows = max(1, values // columns)
    programs = min(cdiv(N, rows), each * sms)
    stages = 2 if rows * columns > values else 4 if arch >= 90 and rows == 1 else 3
    return Rows(rows, columns, min(16, max(4, rows * columns // 1024)), stages, programs)


def column_splits(device: torch.device, n_columns: int, n_tiles: int) -> int:
    """Programs for each column block."""
    return max(1, min(n_tiles, 8 * chip(device).sms // n_columns))


# ---------------------------------------------------------------- attention


def head_block(D: int) -> int:
    """Head width, padded for matrix instructions."""
    return max(16, power2(D))


def attention_fwd(device: torch.device, dtype: torch.dtype, D: int) -> Tile:
    arch, D = chip(device).arch, head_block(D)
    if arch == 0 or dtype == torch.float32:
        return Tile(64, 32, 4, 1)
    if arch >= 90:
        return Tile(128, 64, 8, 2 if D == 256 else 3)
    return Tile(64, 32, 8, 2) if D == 256 else Tile(128, 32, 8, 2) if D == 128 else Tile(128, 64, 8, 2)


def attention_dq(device: torch.device, dtype: torch.dtype, D: int) -> Tile:
    arch, D = chip(device).arch, head_block(D)
    if arch == 0 or dtype == torch.float32:
        return Tile(64, 32, 4, 1)
    if arch >= 90:
        return Tile(128, 32, 8, 2) if D == 256 else Tile(128, 64, 8, 3) if D == 128 else Tile(64, 64, 4, 3)
    return Tile(64, 32, 8, 1) if D == 256 else Tile(128, 32, 8, 2)


def attention_dkv(device: torch.device, dtype: torch.dtype, D: int) -> Tile:
    arch, D = chip(device).arch, head_block(D)
    if arch == 0 or dtype == torch.float32:
        return Tile(32, 64, 4, 1)
    if arch >= 90:
        return Tile(32, 64, 8, 2) if D == 256 else Tile(32, 64, 4, 3) if D == 128 else Tile(64, 64, 4, 2)
    return Tile(16, 64, 8, 1) if D == 256 else Tile(64, 64, 8, 2) if D == 128 else Tile(32, 128, 8, 2)


def hopper_fwd(block_d: int) -> Tile:
    """Stages are slots of its ring."""
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
    """A grouped product's launch: rows of a tile, columns of its two widths, warps, stages of the software pipeline."""

    rows: int
    a: int
    b: int
    warps: int
    stages: int


def grouped_mm(device: torch.device, dtype: torch.dtype) -> Grouped:
    """Tile of rows (rows, a) times a matrix (a, b)."""
    arch = chip(device).arch
    if arch == 0 or dtype == torch.float32:
        return Grouped(32, 32, 32, 4, 1)
    return Grouped(128, 64, 128, 8, 3) if arch >= 90 else Grouped(128, 32, 128, 8, 3)


def grouped_add(device: torch.device, dtype: torch.dtype) -> Grouped:
    """Tile (a, b) of a matrix's gradient, from so many rows at a time."""
    if chip(device).arch == 0 or dtype == torch.float32:
        return Grouped(32, 32, 32, 4, 1)
    return Grouped(64, 128, 128, 8, 3)


# ---------------------------------------------------------------- fp8


class Codes(NamedTuple):
    """Quantisation's launch: rows and columns of a tile, warps."""

    rows: int
    columns: int
    warps: int


@cache
def quantize(device: torch.device, both: bool) -> Codes:
    arch = chip(device).arch
    return Codes(32, 32, 4) if arch == 0 else Codes(128, 128, 8) if both and arch >= 90 else Codes(64, 128, 8)


@cache
def gated_codes(device: torch.device) -> Codes:
    """Of a gated unit's backward, with three matrices of codes."""
    return Codes(32, 32, 4) if chip(device).arch == 0 else Codes(64, 64, 8)


def maxima(device: torch.device, blocks: int) -> int:
    """Programs that each take the maximum of some of the blocks."""
    return min(power2(blocks), power2(4 * chip(device).sms) // 2)
