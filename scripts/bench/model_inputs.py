"""Inputs of benchmarks: random weights, batches, and, for whole runs, random checkpoints and rows of text."""

from __future__ import annotations

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from trireme.engine.between import Writer
from trireme.engine.data.dataset import MicroBatch
from trireme.engine.homes import Entry, Homes
from trireme.engine.memory import DTYPE, views
from trireme.engine.planner.sizes import MODELS
from trireme.engine.run import demo
from trireme.engine.tuning.chosen import adapted, targets
from trireme.kernels.fp8.reference import Quantized, quantize
from trireme.models.config import Lora, ModelConfig
from trireme.models.sizes import shapes
from trireme.models.sizes.narrow import BLOCKS, ROWS, SCALE, SCALES

TILE, WRITERS = 8 << 20, 8  # bytes of a checkpoint's repeated values; threads that write them


def with_adapters(cfg: ModelConfig, rank: int) -> ModelConfig:
    """`cfg`, or with adapters of `rank` on every linear layer."""
    return adapted(cfg, Lora(rank, 2.0 * rank, targets(cfg, ()))) if rank else cfg


def random_homes(homes: Homes) -> None:
    """Stores random weights, and moments of zero."""
    tile = (torch.randn(1 << 24) * 0.02).to(DTYPE[homes.geo.dtype])
    packed = torch.randint(256, (1 << 24,), dtype=torch.uint8)
    coded = quantize(tile.view(1 << 12, -1))
    for u in range(homes.geo.n_units):
        for entry in (Entry("weights", u), Entry("base", u)):
            if homes.layout(entry).tensors:
                _fill(homes, entry, tile, packed, coded)
        for r in range(len(homes.state[u])):
            with Writer(homes, Entry("state", u, r)) as buffer:
                buffer.zero_()


def _fill(homes: Homes, entry: Entry, tile: torch.Tensor, packed: torch.Tensor, coded: Quantized) -> None:
    layout, at = homes.layout(entry), 0
    with Writer(homes, entry) as buffer:
        for name, tensor in views(layout, buffer).items():
            if name.endswith(SCALE):
                tensor.copy_(coded.scale)
            elif name.endswith(ROWS):
                assert coded.rows is not None
                at = _repeat(coded.rows.view(torch.uint8).view(-1), tensor.view(torch.uint8).view(-1), at)
            elif tensor.dim() == 1:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith(SCALES):
                tensor.fill_(120)  # values of MXFP4 are about 3; times 2^-7 they are as large as the tile's
            else:
                at = _repeat(packed if name.endswith(BLOCKS) else tile, tensor.view(-1), at)


def _repeat(tile: torch.Tensor, out: torch.Tensor, at: int) -> int:
    """Fills `out` with the tile again and again, from its element `at` on; returns the element after the last."""
    while len(out):
        part = tile[at : at + len(out)]
        out[: len(part)].copy_(part)
        out, at = out[len(part) :], (at + len(part)) % len(tile)
    return at


def make_batch(
    cfg: ModelConfig, tokens: int, seq: int, micro: int, seed: int, text: bytes | None = None
) -> list[MicroBatch]:
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


# ---------------------------------------------------------------- checkpoints and rows on disk


def make_model(folder: Path, name: str, text: Path) -> Path:
    """A random LLaMA checkpoint in bf16."""
    cfg, made = MODELS[name], folder / name
    if made.exists():
        return made
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    demo.make_checkpoint(part, text, seed=1)
    config = {
        "model_type": "llama",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "intermediate_size": cfg.ffn,
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.eps,
        "tie_word_embeddings": cfg.tied,
    }
    (part / "config.json").write_text(json.dumps(config))
    _write_weights(part / "model.safetensors", cfg)
    part.rename(made)
    return made


def _write_weights(path: Path, cfg: ModelConfig) -> None:
    """Matrices repeat one random tile; norms are ones. Not in the page cache afterwards."""
    header, end = {}, 0
    for name, shape in shapes.stored_tensors(cfg).items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    numbers = np.random.default_rng(1).standard_normal(TILE // 2, dtype=np.float32) * np.float32(0.02)
    tile = memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16)).cast("B")
    with path.open("wb") as file, ThreadPoolExecutor(WRITERS) as threads:
        fd, first = file.fileno(), 8 + len(text)
        write = lambda at: os.pwrite(fd, tile[: min(TILE, end - at)], first + at)
        assert sum(threads.map(write, range(0, end, TILE))) == end
        os.pwrite(fd, len(text).to_bytes(8, "little") + text, 0)
        for tensor in header.values():
            if len(tensor["shape"]) == 1:
                ones = np.full(tensor["shape"], 0x3F80, np.uint16)  # 1.0
                os.pwrite(fd, ones.tobytes(), first + tensor["data_offsets"][0])
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_data(folder: Path, kind: str) -> Path:
    """Stories: `text`, one a row; `chats`, prompt and completion; `long`, a hundred a row."""
    dice, stories = random.Random(1), 20_000
    each = [demo.story(dice) for _ in range(stories)]
    if kind == "text":
        rows = [{"text": story} for story in each]
    elif kind == "chats":
        rows = [{"prompt": story[: len(story) // 3], "completion": story[len(story) // 3 :]} for story in each]
    else:
        rows = [{"text": " ".join(each[k : k + 100])} for k in range(0, stories, 100)]
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
