"""Models for benchmarks: shapes, random weights, batches."""

from __future__ import annotations

import numpy as np
import torch

from trireme.engine.data.dataset import MicroBatch
from trireme.engine.homes import Entry, Homes, Writer
from trireme.engine.memory import DTYPE, flat, views
from trireme.models.config import ModelConfig, Rope


def llama(width: int, layers: int, heads: int, ffn: int, vocab: int = 32000, kv: int | None = None) -> ModelConfig:
    return ModelConfig("llama", vocab, width, layers, heads, kv or heads, width // heads, ffn, 1 << 17, 1e-5, False,
                       rope=Rope(1e4))  # fmt: skip


def gpt3(width: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig("gpt2", 50257, width, layers, heads, heads, width // heads, 4 * width, 8192, 1e-5, True,
                       qkv_bias=True, o_bias=True, mlp_bias=True)  # fmt: skip


MODELS = {
    "llama-tiny": llama(256, 4, 4, 688, vocab=2048),
    "llama-0.15b": llama(768, 12, 12, 2048),
    "llama-0.4b": llama(1024, 24, 16, 2816),
    "llama-1.3b": llama(2048, 24, 16, 5504),
    "llama-3b": llama(3072, 26, 24, 8192),
    "llama-7b": llama(4096, 32, 32, 11008),
    "llama-8b": llama(4096, 32, 32, 14336, vocab=128256, kv=8),
    "llama-13b": llama(5120, 40, 40, 13824),
    "llama-33b": llama(6656, 60, 52, 17920),
    "llama-70b": llama(8192, 80, 64, 28672, kv=8),
    "gpt3-13b": gpt3(5120, 40, 40),
    "gpt3-175b": gpt3(12288, 96, 96),
}


def random_homes(homes: Homes) -> None:
    """Random weights straight into their homes, moments zero."""
    tile = (torch.randn(1 << 24) * 0.02).to(DTYPE[homes.geo.dtype])
    for u, layout in enumerate(homes.geo.weights):
        with Writer(homes, Entry("weights", u)) as buffer:
            values = flat(buffer, homes.geo.dtype, homes.geo.numel[u])
            for a in range(0, len(values), len(tile)):
                part = values[a : a + len(tile)]
                part.copy_(tile[: len(part)])
            for name, tensor in views(layout, buffer).items():
                if tensor.dim() == 1:
                    tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        for r in range(len(homes.state[u])):
            with Writer(homes, Entry("state", u, r)) as buffer:
                buffer.zero_()


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
