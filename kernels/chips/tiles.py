"""Tiles of launches, and the choice of one for a chip that was never measured, by its registers and shared memory.

The registers and shared memory of each tile are what the compiler reports; a test compiles those that are chosen
(tests/kernels/chips/test_launch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trireme.kernels.chips.chip import Chip


class Tile(NamedTuple):
    """A launch of attention: rows of queries, of keys, warps, pipeline stages."""

    q: int
    k: int
    warps: int
    stages: int


class Grouped(NamedTuple):
    """A grouped GEMM's launch, with warps and stages of the software pipeline.

    Of a product: a tile of the result has `rows` by `b`, and `a` is the depth of a step. Of a matrix's gradient: a tile
    has `a` by `b`, and `rows` is the depth of a step.
    """

    rows: int
    a: int
    b: int
    warps: int
    stages: int


class Known(NamedTuple):
    """A launch in bf16, compiled by Triton 3.9 for sm_89 without spills, and what it takes."""

    tile: Tile | Grouped
    own: int  # rows of the tile that it writes
    other: int  # rows, or columns, of the products' second operand
    registers: int  # of a thread
    shared: int  # bytes


def _attention(own: str, *found: tuple[int, int, int, int, int, int]) -> tuple[Known, ...]:
    """Launches of attention; each of `found`: queries, keys, warps, stages, registers, bytes of shared memory."""
    known = []
    for q, k, warps, stages, registers, shared in found:
        rows = (q, k) if own == "q" else (k, q)
        known.append(Known(Tile(q, k, warps, stages), *rows, registers, shared))
    return tuple(known)


KNOWN = {  # by names of launches, of attention with the head width
    "attention_fwd 64": _attention(
        "q",
        (128, 64, 8, 2, 179, 32768),
        (128, 32, 4, 3, 232, 32768),
        (64, 64, 4, 2, 246, 24576),
        (64, 64, 4, 3, 252, 40960),
    ),
    "attention_fwd 128": _attention(
        "q",
        (128, 32, 8, 2, 204, 49152),
        (64, 64, 4, 2, 255, 57344),
        (64, 32, 4, 2, 185, 36864),
        (64, 32, 4, 3, 183, 53248),
    ),
    "attention_fwd 256": _attention(
        "q", (64, 32, 8, 2, 184, 69632), (64, 16, 4, 2, 251, 51200), (64, 64, 8, 1, 220, 73728)
    ),
    "attention_dq 64": _attention(
        "q",
        (128, 32, 8, 2, 170, 40960),
        (64, 32, 4, 2, 168, 24576),
        (64, 32, 4, 3, 134, 32768),
        (128, 64, 8, 2, 185, 49152),
    ),
    "attention_dq 128": _attention(
        "q",
        (128, 32, 8, 2, 194, 81920),
        (64, 32, 4, 2, 241, 53248),
        (64, 64, 8, 2, 168, 73728),
        (64, 32, 4, 3, 241, 69632),
    ),
    "attention_dq 256": _attention(
        "q", (64, 32, 8, 1, 186, 98304), (64, 16, 4, 2, 255, 83968), (32, 32, 4, 1, 205, 65536)
    ),
    "attention_dkv 64": _attention(
        "k",
        (32, 128, 8, 2, 174, 41216),
        (32, 64, 4, 2, 174, 24832),
        (64, 64, 4, 2, 255, 33280),
        (32, 128, 8, 3, 176, 49664),
    ),
    "attention_dkv 128": _attention(
        "k",
        (64, 64, 8, 2, 179, 74240),
        (32, 64, 8, 2, 164, 53504),
        (32, 128, 8, 2, 255, 82176),
        (16, 64, 4, 2, 246, 43136),
    ),
    "attention_dkv 256": _attention(
        "k",
        (16, 64, 8, 1, 248, 90112),
        (32, 32, 8, 1, 174, 81920),
        (16, 32, 8, 2, 128, 50304),
        (16, 64, 8, 2, 248, 84096),
    ),
    "grouped_mm": tuple(
        Known(Grouped(*tile), tile[0], tile[2], registers, shared)
        for tile, registers, shared in (
            ((128, 32, 128, 8, 3), 148, 32768),
            ((128, 64, 128, 8, 3), 168, 65536),
            ((128, 32, 128, 8, 4), 148, 49152),
            ((64, 64, 128, 4, 3), 168, 49152),
            ((64, 32, 128, 4, 4), 162, 36864),
            ((128, 64, 64, 4, 3), 168, 49152),
        )
    ),
    "grouped_add": tuple(
        Known(Grouped(*tile), tile[1], tile[2], registers, shared)
        for tile, registers, shared in (
            ((64, 128, 128, 8, 3), 186, 33024),
            ((32, 128, 128, 8, 3), 186, 32768),
            ((64, 128, 64, 4, 2), 182, 24576),
            ((32, 64, 128, 4, 3), 182, 12416),
        )
    ),
}
MOST = 240  # registers of a tile that is chosen: windows and other chips take some more of 255
ENOUGH = 64  # rows of a tile: bytes that it reads from L2 are then no limit on any of these chips


def best(chip: Chip, known: Sequence[Known]) -> Known:
    """The tile that leaves a multiprocessor's units idle least.

    In this order: two programs at once, of which one computes while the other waits; eight warps; 16 rows a warp, whose
    sums no other warp shares, and 32 rows at a time; loads ahead; large tiles, square ones among equals.
    """

    def rank(k: Known) -> tuple[float, ...]:
        warps, stages = k.tile.warps, k.tile.stages
        at_once = chip.programs(warps, k.registers, k.shared)
        own, other = min(k.own, ENOUGH), min(k.other, ENOUGH)
        shape = (k.own >= 16 * warps) + (k.other >= 32)
        return (
            k.other >= 32,
            min(at_once, 2),
            min(at_once * warps, 8),
            shape,
            min(stages, 2),
            own * other,
            -abs(k.own - k.other),
            stages,
            -k.registers,
        )

    fitting = [k for k in known if k.shared <= chip.shared and k.registers <= MOST]
    return max(fitting, key=rank)
