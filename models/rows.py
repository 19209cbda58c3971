"""What the blocks are told about the packed tokens of a micro-batch: documents, positions, rotation tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.config import ModelConfig, Rope

Tables = tuple[Tensor, Tensor] | tuple[None, None]


class Rows(NamedTuple):
    """N packed tokens. cos and sin are the run's tables, the same objects in every micro-batch."""

    docs: ops.Docs
    cos: Tensor | None  # (P, d/2) fp32, P at least the longest document; None with learned positions
    sin: Tensor | None


def make_rows(lengths: Sequence[int], tables: Tables, device: torch.device | str) -> Rows:
    """Rows of documents of these lengths; `tables` from rope_tables."""
    return Rows(ops.make_docs(lengths, device), *tables)


def rope_tables(cfg: ModelConfig, length: int, device: torch.device | str) -> Tables:
    """(cos, sin) for positions below `length`, made once a run; (None, None) for learned positions."""
    if cfg.rope is None:
        return None, None
    cos, sin = ops.rope_table(_inv_freq(cfg.rope, cfg.head_dim), length)
    return cos.to(device), sin.to(device)


def _inv_freq(rope: Rope, head_dim: int) -> Tensor:
    """(d/2,) fp32: the angle that each pair of features turns by per position."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = rope.original_positions * inv_freq / (2 * math.pi)  # full turns within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * inv_freq + (1 - kept) * inv_freq / rope.factor
