"""Inputs of benchmarks: adapters and, for whole runs, random checkpoints and rows of text."""

from __future__ import annotations

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from trireme.engine.planner.sizes import find_model
from trireme.engine.run import demo
from trireme.engine.tuning.chosen import adapted, targets
from trireme.engine.tuning.packed import outlined
from trireme.engine.tuning.quantized import quantized
from trireme.models.config import Lora, ModelConfig
from trireme.models.sizes import shapes

TILE, WRITERS = 8 << 20, 8  # bytes of a checkpoint's repeated values; threads that write them


def with_adapters(cfg: ModelConfig, rank: int) -> ModelConfig:
    """`cfg`, or with adapters of `rank` on every linear layer."""
    return adapted(cfg, Lora(rank, 2.0 * rank, targets(cfg, ()))) if rank else cfg


def shaped(name: str, layers: int, rank: int, base: str) -> ModelConfig:
    """A shape's first `layers` (0: all) with adapters, frozen matrices in `base` (quantized.BASES; "": as they are)."""
    cfg = find_model(name)
    if layers:
        dense = tuple(i for i in cfg.experts.dense if i < layers) if cfg.experts else ()
        cfg = replace(cfg, n_layers=layers, experts=cfg.experts and replace(cfg.experts, dense=dense))
    cfg = with_adapters(cfg, rank)
    if not base:
        return cfg
    return quantized(cfg, outlined(cfg, Path()), base, {name: name for name in shapes.stored_tensors(cfg)})[0]


# ---------------------------------------------------------------- checkpoints and rows on disk


def make_model(folder: Path, name: str, text: Path) -> Path:
    """A random LLaMA checkpoint in bf16."""
    cfg, made = find_model(name), folder / name
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
