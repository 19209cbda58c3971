"""Packed rows: several documents back to back in one run of N tokens, and what the kernels need to tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Docs(NamedTuple):
    """The documents of one micro-batch. Attention never crosses a document and positions restart in each."""

    lengths: tuple[int, ...]  # on the host; sums to N
    cu_seqlens: torch.Tensor  # (n + 1,) int32, on the device
    positions: torch.Tensor  # (N,) int32, on the device


def make_docs(lengths: Sequence[int], device: torch.device | str) -> Docs:
    """Docs for `lengths`, the token count of each document in order (each >= 1). The copies to the device are asynchronous."""
    assert lengths and min(lengths) >= 1
    n = torch.tensor(lengths, dtype=torch.int64)
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(n, 0, out=cu[1:])
    positions = torch.arange(int(cu[-1])) - torch.repeat_interleave(cu[:-1], n)
    to = lambda t: t.to(torch.int32).to(device, non_blocking=True)  # noqa: E731
    return Docs(tuple(int(v) for v in lengths), to(cu), to(positions))
