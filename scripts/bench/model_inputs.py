"""What a benchmark trains with: random weights, and batches of random ids or the bytes of a text."""

from __future__ import annotations

import numpy as np
import torch

from trireme.engine.data.dataset import MicroBatch
from trireme.engine.homes import Entry, Homes, Writer
from trireme.engine.memory import DTYPE, flat, views
from trireme.engine.tuning.chosen import adapted, targets
from trireme.models.config import Lora, ModelConfig


def with_adapters(cfg: ModelConfig, rank: int) -> ModelConfig:
    """`cfg`, or with adapters of `rank` on every linear layer."""
    return adapted(cfg, Lora(rank, 2.0 * rank, targets(cfg, ()))) if rank else cfg


def random_homes(homes: Homes) -> None:
    """Random weights straight into their homes, moments zero."""
    tile = (torch.randn(1 << 24) * 0.02).to(DTYPE[homes.geo.dtype])
    for u in range(homes.geo.n_units):
        for entry in (Entry("weights", u), Entry("base", u)):
            if homes.layout(entry).tensors:
                _fill(homes, entry, tile)
        for r in range(len(homes.state[u])):
            with Writer(homes, Entry("state", u, r)) as buffer:
                buffer.zero_()


def _fill(homes: Homes, entry: Entry, tile: torch.Tensor) -> None:
    layout = homes.layout(entry)
    with Writer(homes, entry) as buffer:
        values = flat(buffer, homes.geo.dtype, sum(t.numel for t in layout.tensors))
        for a in range(0, len(values), len(tile)):
            part = values[a : a + len(tile)]
            part.copy_(tile[: len(part)])
        for name, tensor in views(layout, buffer).items():
            if tensor.dim() == 1:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def make_batch(cfg: ModelConfig, tokens: int, seq: int, micro: int, seed: int, text: bytes | None) -> list[MicroBatch]:
    """`tokens` in sequences of `seq`, `micro` a micro-batch: bytes of a text, or random ids."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(tokens // seq):
        if text:
            at = random.integers(0, len(text) - seq)
            rows.append(np.frombuffer(text[at : at + seq], np.uint8).astype(np.int32))
        else:
            rows.append(random.integers(0, cfg.vocab, seq).astype(np.int32))
    batch = []
    for k in range(0, len(rows), micro):
        part = rows[k : k + micro]
        labels = [np.append(row[1:], np.int32(-100)) for row in part]
        batch.append(MicroBatch(np.concatenate(part), np.concatenate(labels), (seq,) * len(part)))
    return batch
