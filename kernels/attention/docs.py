"""Packed rows: documents back to back in one run of N tokens, and their bounds as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

TILES = (64, 128)  # rows by tile


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


def make_docs(lengths: Sequence[int], device: torch.device | str) -> Docs:
    """For documents of `lengths` tokens (each >= 1), copied at once."""
    assert lengths
    assert min(lengths) >= 1
    n = torch.tensor(lengths, dtype=torch.int64)
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(n, 0, out=cu[1:])
    positions = torch.arange(int(cu[-1])) - torch.repeat_interleave(cu[:-1], n)
    parts = [cu, positions, *(t for block in TILES for t in _tiles(n, cu[:-1], block))]
    padded = [torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 4)) for t in parts]  # each aligned to 16 bytes:
    sent = torch.cat(padded).to(torch.int32).to(device, non_blocking=True)  # one compiled form by kernel
    found = zip(sent.split([len(p) for p in padded]), parts, strict=True)
    flat = [f[: t.numel()].view(t.shape) for f, t in found]
    query_tiles, key_tiles = dict(zip(TILES, flat[2::2], strict=True)), dict(zip(TILES, flat[3::2], strict=True))
    return Docs(tuple(int(v) for v in lengths), flat[0], flat[1], query_tiles, key_tiles)


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
