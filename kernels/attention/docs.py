"""Packed rows: documents concatenated in one sequence of N tokens, and their bounds as the kernels read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

TILES = (32, 64, 128)  # rows by tile


class Docs(NamedTuple):
    """A micro-batch's documents; attention never crosses them, positions restart.

    Tiles by their rows: (tiles, 3) int32 of document's first row, tile's offset, document's length, heaviest first:
    late queries see most keys, early keys are seen most.
    """

    lengths: tuple[int, ...]  # on the host; sums to N
    cu_seqlens: torch.Tensor  # (n + 1,) int32, on the device
    positions: torch.Tensor  # (N,) int32, on the device
    query_tiles: dict[int, torch.Tensor]
    key_tiles: dict[int, torch.Tensor]


class Laid(NamedTuple):
    """Documents in RAM, transferred to a GPU in one copy."""

    lengths: tuple[int, ...]
    content: torch.Tensor  # (M,) int32: bounds, positions, tiles; each padded to 16 bytes: one compiled form by kernel
    shapes: tuple[tuple[int, ...], ...]


def lay_docs(lengths: Sequence[int]) -> Laid:
    """Documents of `lengths` tokens (each >= 1)."""
    assert lengths
    assert min(lengths) >= 1
    n = torch.tensor(lengths, dtype=torch.int64)
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(n, 0, out=cu[1:])
    positions = torch.arange(int(cu[-1])) - torch.repeat_interleave(cu[:-1], n)
    parts = [cu, positions, *(t for block in TILES for t in _tiles(n, cu[:-1], block))]
    content = torch.cat([torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 4)) for t in parts]).to(torch.int32)
    return Laid(tuple(int(v) for v in lengths), content, tuple(tuple(t.shape) for t in parts))


def place_docs(laid: Laid, device: torch.device | str) -> Docs:
    """On the device, copied at once."""
    sent = laid.content.to(device, non_blocking=True)
    numels = [math.prod(shape) for shape in laid.shapes]
    parts = zip(sent.split([n + -n % 4 for n in numels]), numels, laid.shapes, strict=True)
    flat = [part[:n].view(shape) for part, n, shape in parts]
    query_tiles, key_tiles = dict(zip(TILES, flat[2::2], strict=True)), dict(zip(TILES, flat[3::2], strict=True))
    return Docs(laid.lengths, flat[0], flat[1], query_tiles, key_tiles)


def make_docs(lengths: Sequence[int], device: torch.device | str) -> Docs:
    """For documents of `lengths` tokens (each >= 1)."""
    return place_docs(lay_docs(lengths), device)


def _tiles(n: torch.Tensor, start: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(query tiles, key tiles) of `block` rows; documents of n tokens at `start`, (n_docs,) both."""
    counts = (n + block - 1) // block
    doc = torch.repeat_interleave(torch.arange(len(n)), counts)
    first = torch.cumsum(counts, 0) - counts  # document's first tile
    offset = (torch.arange(len(doc)) - first[doc]) * block
    tiles = torch.stack((start[doc], offset, n[doc]), 1)
    by_queries = torch.argsort(offset, descending=True, stable=True)
    by_keys = torch.argsort(n[doc] - offset, descending=True, stable=True)
    return tiles[by_queries], tiles[by_keys]
