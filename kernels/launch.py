"""Block sizes, warps and stages of every kernel, as plain functions of shape and chip, over the table in tiles.py.

Settings do not depend on the number of tokens. Those that `trireme check --tune` found to be faster on the GPU at hand
take the place of the table's: a run passes them to `use`, by name. In Triton's interpreter `arch` is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch

from trireme.kernels.tiles import KIB, ONE_PASS, TABLE, Chip, Grouped, Tile, chip
from trireme.kernels.tiles import settings as settings_of

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=tuple[Any, ...])

_settings: dict[str, tuple[int, ...]] = {}  # by name; `use` alone changes it
_forget: list[Callable[[], None]] = []


def use(settings: Mapping[str, Sequence[int]]) -> None:
    """Sets the settings of launches in bf16, by their names in tiles.py; others have the usual ones."""
    _settings.clear()
    _settings.update({name: tuple(setting) for name, setting in settings.items()})
    for forget in _forget:
        forget()


def settings_cache(fn: Callable[P, R]) -> Any:
    """functools.cache for results that depend on settings: `use` clears it."""
    cached = cache(fn)
    _forget.append(cached.cache_clear)
    return cached


def _set(gpu: Chip, name: str, kind: type[S], interpreted: tuple[int, ...] = ()) -> S:
    """The setting of a launch in use under this name, or the first of tiles.py; where there is no GPU `interpreted`."""
    setting: Any = _settings.get(name) or settings_of(gpu, name)[0]
    return kind(*(interpreted if gpu.arch == 0 and interpreted else setting))


def cdiv(a: int, b: int) -> int:
    """Rounded up; triton.cdiv takes 3 us of the host."""
    return -(-a // b)


def power2(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


class Rows(NamedTuple):
    """Whole-row kernels: rows of a tile, columns (a power of two), warps, stages, programs."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


WIDEST = 8192  # values of a row whose column sums, in fp32, a program has in registers


class Persistent(NamedTuple):
    """The setting of rows_bwd: KiB of a tile, programs on each multiprocessor."""

    kib: int
    per_sm: int


@cache
def rows_fwd(D: int) -> Rows:
    """A program per tile of rows of D values (`programs` unused)."""
    columns = power2(D)
    return Rows(max(1, 2048 // columns), columns, 4 if columns <= 8192 else 8, 1, 0)


def rows_bwd(device: torch.device, N: int, D: int, itemsize: int, gated: bool = False) -> Rows:
    """Persistent programs over tiles of N rows of D values of `itemsize` bytes, with column sums in registers.

    Rows of more than WIDEST values are divided into parts of WIDEST columns; `programs` is the number for each part.
    """
    columns, gpu = min(power2(D), WIDEST), chip(device)
    default = Persistent(16, 1) if gpu.large else Persistent(8, 2)
    setting = default if itemsize > 2 else _set(gpu, "rows_bwd", Persistent, (8, 2))
    aim = setting.kib << 10
    rows = max(1, aim // (columns * itemsize))
    tile = rows * columns * itemsize
    # tiles of 3 inputs; of wide rows a gate's terms would spill beside them (88 bytes on sm_120, Triton 3.9)
    none = 3 * tile > gpu.shared or (gated and columns == WIDEST and not gpu.large)
    ahead = 0 if none else 1 if tile > aim else 3 if gpu.large and rows == 1 else 2
    programs = min(cdiv(N, rows), setting.per_sm * gpu.sms)
    if D > WIDEST:  # other parts of dy, h and weights are read, too
        parts = cdiv(D, WIDEST)
        ahead = min(ahead, (gpu.shared - KIB) // (3 * parts * tile)) if itemsize == 2 else 0
        return Rows(rows, columns, 16, ahead + 1, max(1, programs // parts))
    return Rows(rows, columns, min(16, max(4, rows * columns // 1024)), ahead + 1, programs)


def column_splits(device: torch.device, n_columns: int, n_tiles: int) -> int:
    """Programs that share the n_tiles tiles of rows of each of n_columns column blocks."""
    return max(1, min(n_tiles, 8 * chip(device).sms // n_columns))


# ---------------------------------------------------------------- attention


def head_block(D: int) -> int:
    """Head width, padded for matrix instructions."""
    return max(16, power2(D))


def _parts(D: int, minimum: int) -> tuple[int, int]:
    first = power2(D + 1) // 2  # the largest power of two <= D
    second = max(minimum, head_block(D - first))
    return (first, second) if first >= 64 and first + second < power2(D) else (head_block(D), 0)


def head_parts(D: int, V: int, minimum: int) -> tuple[int, int, int, int, int, int]:
    """Of keys and values: width, and its two parts as they are computed, the second 0 or less than the first.

    Parts are powers of two, which tensors in Triton must have, of at least `minimum`. Below 64 heads have equal parts:
    with two widths tiles are read out of bounds in bf16 on an H100 (Triton 3.6).
    """
    if min(head_block(D), head_block(V)) < 64:
        parts = _parts(max(D, V), minimum)
        return D, *parts, V, *parts
    return D, *_parts(D, minimum), V, *_parts(V, minimum)


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
WIDTHS = 64, 96, 128, 192, 256, 512  # of heads with settings of their own, in tiles.py
WIDEST_HEAD, WIDEST_IN_FP32 = 512, 256  # on a GPU


def widest_head(dtype: torch.dtype) -> int:
    """The widest head that a GPU's kernels take."""
    return WIDEST_IN_FP32 if dtype == torch.float32 else WIDEST_HEAD


def attention(device: torch.device, dtype: torch.dtype, D: int) -> Tiles:
    """Of heads of width D: settings of the next width that tiles.py has."""
    gpu = chip(device)
    if gpu.arch == 0:
        return INTERPRETED
    if dtype == torch.float32:
        return FP32[max(64, head_block(D))]
    names = [[f"attention_{kind} {width}" for width in WIDTHS if width >= D] for kind in Tiles._fields]
    return Tiles(*(_set(gpu, next(name for name in options if name in TABLE), Tile) for options in names))


def one_pass(device: torch.device, dtype: torch.dtype, widths: tuple[int, int]) -> Tile | None:
    """The tile of a backward in one pass, of heads of widths (keys, values); None: two passes are used."""
    gpu, (d, e) = chip(device), widths
    if gpu.arch not in ONE_PASS or dtype != torch.bfloat16 or d != e or f"one_pass {d}" not in TABLE:
        return None
    tile = _set(gpu, f"one_pass {d}", Tile)
    return tile if tile.q else None


def hopper_fwd(block_d: int, window: int) -> Tile:
    """Of heads padded to block_d, keys' or values', whichever are wider. Stages are slots of the longer ring buffer."""
    if block_d == 64:
        return Tile(64, 64, 4, 4) if window else Tile(128, 64, 8, 4)
    return Tile(64, 64, 4, 3) if block_d == 128 else Tile(128, 64, 8, 3)


def hopper_dq(block_d: int) -> Tile:
    return {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 3)}[block_d]


def hopper_dkv(D: int, V: int) -> Tile:
    """Of keys and values; 4 warps have the sums of 64 keys whose heads are both wide."""
    if max(D, V) > 128:
        return Tile(64, 64, 8, 2) if min(D, V) > 128 else Tile(16, 128, 8, 3)
    return Tile(64, 128, 8, 3) if max(D, V) > 64 else Tile(32, 64, 4, 4)


class Logits(NamedTuple):
    """Launch of the loss: a row's logits at a time, warps, programs on a multiprocessor."""

    block: int
    warps: int
    per_sm: int


WIDE = 65536  # of a vocabulary: values of a row


def cross_entropy(device: torch.device, V: int) -> Logits:
    """Wide programs for wide rows, if rows in flight stay in L2, from which they are read a second time."""
    gpu = chip(device)
    if gpu.arch == 0:
        return Logits(8192, 32, 2) if V > WIDE else Logits(4096, 8, 8)
    name = "cross_entropy wide" if V > WIDE else "cross_entropy"
    setting = _set(gpu, name, Logits)
    at_once = min(setting.per_sm, gpu.warps // setting.warps)  # of a multiprocessor
    in_l2 = gpu.large or V <= WIDE or name in _settings or at_once * gpu.sms * 2 * V <= gpu.l2
    return setting if in_l2 else Logits(4096, 8, 8)


# ---------------------------------------------------------------- experts


def grouped_mm(device: torch.device, dtype: torch.dtype, B: int) -> Grouped:
    """Tile of rows (rows, a) times a matrix (a, b) of B columns.

    fp8 values take half the bytes of bf16, so `a` is twice as large. Hopper's tile in bf16 has 256 columns where these
    are at least ten elevenths of what its tiles compute, otherwise 128: 1.0 to 1.3 times as fast, and with the same `a`
    sums have the same order (docs/dev/kernels.md).
    """
    gpu = chip(device)
    if gpu.arch == 0 or dtype == torch.float32:
        return Grouped(32, 32, 32, 4, 1)
    if gpu.arch == 90:
        tile = Grouped(128, 64, 256 if dtype.itemsize == 2 and 2560 * cdiv(B, 256) <= 11 * B else 128, 8, 3)
    else:
        tile = _set(gpu, "grouped_mm", Grouped)
    return tile if dtype.itemsize > 1 else tile._replace(a=2 * tile.a)


def grouped_add(device: torch.device, dtype: torch.dtype) -> Grouped:
    """Tile (a, b) of a matrix's gradient, from so many rows at a time."""
    gpu = chip(device)
    if gpu.arch == 0 or dtype == torch.float32:
        return Grouped(32, 32, 32, 4, 1)
    return _set(gpu, "grouped_add", Grouped)


# ---------------------------------------------------------------- fp8


class Codes(NamedTuple):
    """Quantization's launch: rows and columns of a tile, warps."""

    rows: int
    columns: int
    warps: int


@settings_cache
def quantize(device: torch.device, both_orders: bool) -> Codes:
    return _set(chip(device), "quantize both" if both_orders else "quantize", Codes, (32, 32, 4))


@settings_cache
def gated_codes(device: torch.device) -> Codes:
    """Tile of a gated unit's backward, which writes three matrices in fp8."""
    return _set(chip(device), "gated_codes", Codes, (32, 32, 4))


class BlockScaled(NamedTuple):
    """An fp8 matmul on sm_120: rows, columns and depth of a tile, rows of tiles in L2 at once, warps, stages."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


def block_scaled(device: torch.device) -> BlockScaled:
    """Chosen by the 99 KiB of shared memory that a program can have; never measured."""
    return _set(chip(device), "block_scaled", BlockScaled, (32, 32, 64, 2, 4, 2))


def maxima(device: torch.device, blocks: int) -> int:
    """How many programs search for a maximum, each in some of the blocks."""
    return min(power2(blocks), power2(4 * chip(device).sms) // 2)


# ---------------------------------------------------------------- scans


ROWS_OF_SCANS = 32  # of a chunk


class Scan(NamedTuple):
    """A scan's launches. backward._gradients is the kernel that computes all gradients of a chunk."""

    rows: int  # of a chunk
    width: int  # of keys, padded to a power of two
    columns: int  # of values that a program owns
    keys: int  # columns of keys, and of values, that _gradients takes at a time
    values: int
    warps: int  # of _gradients
    stages: int  # of _walk_back: chunks that are read while one is computed, and that one
    precision: Literal["ieee", "tf32"]  # of fp32 products; those of bf16 are exact


@cache
def scan(device: torch.device, D: int, E: int, itemsize: int) -> Scan:
    """Launches for states (D, E). In bf16, chunks of 64 rows are wrong on an H100 (Triton 3.6)."""
    width, columns, arch = max(16, power2(D)), max(16, power2(E)), chip(device).arch
    if itemsize == 4 or arch == 0:
        values = min(16, columns)
        return Scan(ROWS_OF_SCANS, width, values, min(32, width), values, 4, 1, "ieee")
    narrow = max(width, columns) <= 128
    block, stages = min(64 if narrow else 32, columns), 1 if arch // 10 == 12 else 2  # two would spill
    return Scan(ROWS_OF_SCANS, width, block, min(64, width), min(64, columns), 4 if narrow else 8, stages, "tf32")
