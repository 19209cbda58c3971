"""An adapter added to its model: an ordinary checkpoint, each matrix rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor

from trireme.engine.homes import Progress, silent
from trireme.engine.tuning.adapters import Adapter
from trireme.engine.tuning.opened import read_adapter
from trireme.engine.tuning.packed import Packed, open_checkpoint, unpacked
from trireme.engine.tuning.peft_config import base_of, read_adapter_config
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig, read_config
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source, convert, dtype_of, export
from trireme.storage.files import Say

Factors = list[tuple[Tensor, Tensor]]  # (left (rows, R), right (R, columns)) of each matrix
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
    adapter = read_adapter(folder, base, single=True)
    if isinstance(source, Packed) and any(map(shapes.adapts_experts, adapter.names)):
        source = unpacked(source)
    tensor = lru_cache(4)(adapter.tensor)  # one of experts serves all of them
    names = hf.canonical_names(base, {name: t.shape for name, t in source.tensors.items()})

    def values(stored: str) -> Iterator[np.ndarray] | None:
        name = names[stored]
        return merged(source.values(stored), factors(cfg, adapter, tensor, name), adapter.lora.scale) if name else None

    export(source, out, values, progress)


def factors(cfg: ModelConfig, adapter: Adapter, tensor: Callable[[str], Tensor], name: str) -> Factors:
    """What a tensor's matrices, one after another, get the products of; none where it is not adapted."""
    module = name.removesuffix(".weight")
    a, b = shapes.adapter_names(module)
    if a in adapter.names and not shapes.adapts_experts(a):
        return [(tensor(a).T, tensor(b).T) if cfg.names.in_out else (tensor(b), tensor(a))]
    before, _, last = module.rpartition(".")
    expert = before.rpartition(".")[2]
    single = last in cfg.names.each and expert.isdigit()
    if single:  # stored (out, in), of gate_up each half
        place = cfg.names.each.index(last)
        a, b = shapes.adapter_names(f"{before.rpartition('.')[0]}.{shapes.DOWN if place == 2 else shapes.GATE_UP}")
    if a not in adapter.names:
        return []
    downs, ups = (tensor(part).unflatten(0, (-1, adapter.lora.rank)) for part in (a, b))
    if not single:
        return [(down.T, up) for down, up in zip(downs, ups, strict=True)]
    down, up = downs[int(expert)], ups[int(expert)]
    return [(up.T if place == 2 else up.T.chunk(2)[place], down)]


def merged(read: Iterator[np.ndarray], found: Factors, scale: float) -> Iterator[np.ndarray]:
    """W + scale * left @ right in fp32, in pieces; without factors BF16 as read, the rest in fp32."""
    coming, first, stop = iter(found), 0, 0  # first: of the tensor's elements
    for piece in read:
        if not found:
            yield piece if dtype_of(piece) == "BF16" else convert(piece, dtype_of(piece), "F32")
            continue
        end = first + len(piece)
        while first < end:
            if first == stop:
                (left, right), begin = next(coming), stop
                stop += len(left) * right.shape[1]
            part, at, columns = piece[first - end :][: stop - first], first - begin, right.shape[1]
            rows = slice(at // columns, -(-(at + len(part)) // columns))
            delta = (left[rows] @ right).flatten()[at - rows.start * columns :][: len(part)] * scale
            yield convert(part, dtype_of(part), "F32") + delta.numpy()
            first += len(part)
