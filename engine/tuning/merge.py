"""An adapter added to its model: an ordinary checkpoint, each matrix rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from trireme.engine.homes import Progress, silent
from trireme.engine.tuning.adapters import PREFIX, Adapter, base_of, read_adapter, read_adapter_config
from trireme.engine.tuning.packed import open_checkpoint
from trireme.models import hf, shapes
from trireme.models.config import InputError, ModelConfig, read_config
from trireme.storage.checkpoint import Source, convert, dtype_of, export
from trireme.storage.files import Say

Working = Callable[[str, int], AbstractContextManager[Progress]]  # (what is done, its bytes) -> what hears of them


def merge_folder(folder: Path, model: str, out: Path, say: Say, working: Working) -> None:
    """Writes the model of the adapter in `folder`, or that in the folder `model`, plus the adapter to `out`.

    Raises InputError, CheckpointError, StoreError.
    """
    base = base_of(read_adapter_config(folder))
    if not Path(model or base or "?").is_dir():
        wrong = f"--model {model} is no folder" if model else f"{folder}: its base, {base!r}, is no folder here"
        raise InputError(f"{wrong}. Name the checkpoint: --model DIR.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is there already. Name another folder.")
    cfg, source = read_config(model or base), open_checkpoint(model or base, say)
    with working("merging the adapter", 2 * source.nbytes) as more:
        merge_adapter(folder, cfg, source, out, more)


def merge_adapter(folder: Path, cfg: ModelConfig, source: Source, out: Path, progress: Progress = silent) -> None:
    """Writes `source` plus the adapter to `out`. Raises InputError, StoreError."""
    base = replace(cfg, lora=None, frozen=())
    adapter = read_adapter(folder, base)
    names = hf.canonical_names(base, {name: t.shape for name, t in source.tensors.items()})

    def values(stored: str) -> Iterator[np.ndarray] | None:
        name = names[stored]
        return merged(cfg, adapter, name, source.values(stored), source.tensors[stored].shape) if name else None

    export(source, out, values, progress)


def merged(
    cfg: ModelConfig, adapter: Adapter, name: str, read: Iterator[np.ndarray], shape: tuple[int, ...]
) -> Iterator[np.ndarray]:
    """W + scale * B A in fp32, in pieces; other tensors as read."""
    module = name.removesuffix(".weight")
    names = shapes.adapter_names(module)
    if PREFIX + names[0] not in adapter.source.tensors:
        yield from (piece if dtype_of(piece) == "BF16" else convert(piece, dtype_of(piece), "F32") for piece in read)
        return
    a, b = map(adapter.tensor, names)
    left, right = (a.T, b.T) if cfg.names.in_out else (b, a)
    first, columns = 0, shape[1]
    for piece in read:
        n = len(piece)
        rows = slice(first // columns, -(-(first + n) // columns))
        delta = (left[rows] @ right).flatten()[first - rows.start * columns :][:n] * adapter.lora.scale
        yield convert(piece, dtype_of(piece), "F32") + delta.numpy()
        first += n
