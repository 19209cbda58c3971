"""Adapters in peft's format: adapter_config.json and adapter_model.safetensors, in fp32.

Adapters of experts are peft's `target_parameters`: the module is wrapped once for each parameter, the last one
outermost, and B is (out, rank E), by rank and expert. Linear layers named like experts' matrices, such as
shared_experts.gate_proj, are `target_parameters`, too, since peft 0.21 takes such a `target_modules` for all experts.
Or they are `separate`: a pair of matrices for each expert, by the names of transformers 4; gate and up have the same A.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from trireme.engine.between import Reader
from trireme.engine.exchange import fetch
from trireme.engine.tuning.chosen import adaptable
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.tuning.spellings import PREFIX
from trireme.models.config import InputError, Lora, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source, concat
from trireme.storage.files import partial_of, store_errors, sync_folder, write_synced
from trireme.storage.headers import encode_header
from trireme.storage.layout import sequential

WEIGHTS = "adapter_model.safetensors"
Halves = tuple[str | None, ...]  # names of an expert's gate and up, or of its down


@dataclass(frozen=True)
class Adapter:
    """An opened adapter: what is adapted, and its tensors by canonical names."""

    cfg: ModelConfig  # the model with it: it may have another vocabulary, or two matrices where there was one
    lora: Lora  # of the largest rank
    source: Source
    base: str  # the model that it was made for: a folder, or a name on the hub
    names: dict[str, str]  # canonical -> in the file
    singles: dict[str, list[Halves]]  # canonical -> in the file, of experts one by one
    whole: dict[str, str]  # weights that take the place of the model's: its name -> in the file
    ranks: dict[str, int]  # by module
    scales: dict[str, float]  # by module
    absent: tuple[str, ...]  # modules of targets that have none: theirs is zero, and stays it
    dropout: float

    def values(self, name: str, first: int, last: int) -> Iterator[np.ndarray]:
        """Elements [first, last) of a tensor, in the rank of `lora`; or of a weight that the adapter replaces."""
        if name in self.whole:
            yield from self.source.values(self.whole[name], first, last)
            return
        module = name.partition(".lora_")[0]
        if module not in self.ranks:
            yield np.zeros(last - first, np.float32)
        elif name in self.names and not is_transposed(name) and self.ranks[module] == self.lora.rank:
            yield from self.source.values(self.names[name], first, last)
        else:
            yield self._padded(name, self.lora.rank - self.ranks[module]).flatten()[first:last].numpy()

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor in fp32, in the rank of its module: A (rank, in), B (out, rank); of experts (E rank,
        features).
        """
        if name in self.singles:
            return self._stacked(name)
        tensor = self._read(self.names[name])
        if not is_transposed(name):
            return tensor
        rank = self.ranks[name.partition(".lora_")[0]]
        return tensor.view(len(tensor), rank, -1).permute(2, 1, 0).reshape(-1, len(tensor))

    def _padded(self, name: str, ranks: int) -> torch.Tensor:
        """A tensor with `ranks` of zeros behind. They get no gradient."""
        tensor = self.tensor(name)
        if name.endswith(".lora_B.weight") and not is_transposed(name):
            return pad(tensor, (0, ranks))
        experts = len(tensor) // self.ranks[name.partition(".lora_")[0]]
        return pad(tensor.unflatten(0, (experts, -1)), (0, 0, 0, ranks)).flatten(0, 1)

    def _stacked(self, name: str) -> torch.Tensor:
        """Adapters of single experts as peft has them in one tensor: of gate and up, A below each other and B side by
        side, zero elsewhere; or of one A that both have, A once.
        """
        experts, b = self.singles[name], name.endswith(".lora_B.weight")
        shape = next(self.source.tensors[one].shape for halves in experts for one in halves if one)
        alike = self.ranks[name.partition(".lora_")[0]] == shape[b]
        join = torch.cat if alike else lambda halves: torch.block_diag(*halves)
        zero = torch.zeros(shape)
        read = ([self._read(one) if one else zero for one in halves] for halves in experts)
        return torch.cat([join(halves).T if b else torch.cat(halves[:1] if alike else halves) for halves in read])

    def _read(self, stored: str) -> torch.Tensor:
        tensor = torch.from_numpy(concat(self.source.values(stored))).view(self.source.tensors[stored].shape)
        if not tensor.isfinite().all():
            raise InputError(f"{self.source.named(stored)} holds NaN or infinite values; the adapter is damaged.")
        return tensor


def is_transposed(name: str) -> bool:
    """Whether a tensor has another order in peft's files: B of experts is (E rank, out) here."""
    return shapes.adapts_experts(name) and name.endswith(".lora_B.weight")


def on_experts(cfg: ModelConfig) -> bool:
    """Whether routed experts have adapters."""
    return cfg.experts is not None and cfg.lora is not None and cfg.lora.adapts(cfg.names.mlp.experts)


def peft_names(cfg: ModelConfig) -> dict[str, str]:
    """Canonical name -> peft's name of each tensor of the adapters; of experts, that of the outermost wrapped
    module.
    """
    wrapped = {shapes.GATE_UP: ".base_layer", shapes.DOWN: ""}

    def renamed(name: str) -> str:
        for matrix, behind in wrapped.items() if shapes.adapts_experts(name) else ():
            name = name.replace(f".{matrix}.lora_", f"{behind}.lora_")
        return PREFIX + cfg.names.module(name)

    return {name: renamed(name) for name in adapter_shapes(cfg)}


def adapter_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the adapters."""
    units = (shapes.trained_parts(cfg, u) for u in range(cfg.n_units))
    return {name: shape for unit in units for part in unit for group in part for name, shape in group}


def separate_names(cfg: ModelConfig) -> dict[str, list[tuple[str, ...]]]:
    """Canonical name -> name in the file, of its gate and up or of its down, by expert. Raises InputError if the
    checkpoint has no names of single experts, or their adapters several scales.
    """
    assert cfg.lora is not None
    single = cfg.names.mlp.single
    if not single or any(shapes.adapts_experts(f"{module}.lora_") for module, _ in cfg.lora.scales):
        why = "these adapters have several scales" if single else "the checkpoint has all experts in one tensor"
        raise InputError(f"--expert-adapters separate: {why}. Leave it out.")
    names = dict[str, list[tuple[str, ...]]]()
    for name, shape in adapter_shapes(cfg).items():
        if shapes.adapts_experts(name):
            experts, matrix, end, _ = name.rsplit(".", 3)
            halves = single[-1:] if matrix == shapes.DOWN else single[:-1]
            numbers = range(shape[0] // cfg.lora.rank)
            names[name] = [tuple(f"{PREFIX}{experts}.{e}.{half}.{end}.weight" for half in halves) for e in numbers]
    return names


AdapterValues = Callable[[str], Iterable[np.ndarray]]  # the fp32 values of an adapter's tensor in memory, in pieces


def trained_values(reader: Reader) -> AdapterValues:
    """The values of a run's adapters, for `write_adapter`."""
    unit = {t.name: u for u, layout in enumerate(reader.placement.geo.weights) for t in layout.tensors}
    return lambda name: fetch(reader, unit[name], name, exact=True)


def write_adapter(
    folder: Path, cfg: ModelConfig, values: AdapterValues, base: str, revision: str = "", separate: bool = False
) -> None:
    """Writes adapters. `base`: the name of their model; `revision`: its commit on the hub; `separate`: those of each
    expert by themselves. Raises StoreError, and InputError as separate_names.
    """
    assert cfg.lora is not None
    names, rank = peft_names(cfg), cfg.lora.rank
    alone = separate_names(cfg) if separate else {}
    stored = {name: shape[::-1] if is_transposed(name) else shape for name, shape in adapter_shapes(cfg).items()}
    entries = list[tuple[str, str, tuple[int, ...]]]()
    for name, shape in stored.items():
        of_one = shape
        if name in alone:
            a, b = (rank, shape[1]), (shape[0] // len(alone[name][0]), rank)
            of_one = b if is_transposed(name) else a
        inside = [one for halves in alone.get(name, [(names[name],)]) for one in halves]
        entries += [(one, "F32", of_one) for one in inside]
    layout = sequential(entries)

    def content() -> Iterator[bytes]:
        yield encode_header(layout, {"format": "pt"})
        for name in stored:
            pieces = values(name)
            if name in alone:
                pieces = _of_experts(concat(pieces), name, alone[name], rank)
            elif is_transposed(name):
                pieces = [np.ascontiguousarray(concat(pieces).reshape(-1, rank, stored[name][0]).transpose(2, 1, 0))]
            for piece in pieces:
                yield piece.tobytes()

    folder.mkdir(parents=True, exist_ok=True)
    config = _config(cfg, cfg.lora, base, separate) | ({"revision": revision} if revision else {})
    with store_errors(folder):
        write_synced(partial_of(folder / CONFIG), [json.dumps(config, indent=2, sort_keys=True).encode()])
        write_synced(partial_of(folder / WEIGHTS), content())
        for name in (WEIGHTS, CONFIG):
            partial_of(folder / name).replace(folder / name)
        sync_folder(folder)


def _of_experts(whole: np.ndarray, name: str, experts: list[tuple[str, ...]], rank: int) -> Iterator[np.ndarray]:
    """The tensors of separate_names, in order, of a flat one in memory: (E rank, in), or of B (E rank, out)."""
    for one in whole.reshape(len(experts), rank, -1):
        halves = len(experts[0])
        yield from np.split(one.T, halves) if is_transposed(name) else [one] * halves


def _config(cfg: ModelConfig, lora: Lora, base: str, separate: bool) -> dict[str, Any]:
    """The keys of adapter_config.json that peft, vLLM and llama.cpp read."""
    experts = on_experts(cfg)
    others = [t for t in lora.targets if not (experts and f".{cfg.names.mlp.experts}".endswith(f".{t}"))]
    full = {t: next(module for module in adaptable(cfg) if f".{module}".endswith(f".{t}")) for t in others}
    modules = [".".join(cfg.names.module(full[t]).split(".")[-len(t.split(".")) :]) for t in others]
    single = cfg.names.mlp.single or cfg.family.names.mlp.single  # however files have experts
    like_experts = [t for t in modules if (cfg.experts or cfg.family.experts) and t.rpartition(".")[2] in single]
    matrices = (shapes.GATE_UP, shapes.DOWN) if experts and not separate else ()
    stacked = [cfg.names.module(f"{cfg.names.mlp.experts}.{matrix}") for matrix in matrices]
    parameters = [*stacked, *(f"{t}.weight" for t in like_experts)]
    alone = cfg.names.mlp.single if experts and separate else ()
    # modules outside the language model whose layers have the same names
    excluded = "|".join(f"{re.escape(prefix)}.*" for prefix in (cfg.carried if cfg.wrapper else ()))
    optional: dict[str, Any] = {"exclude_modules": excluded} if excluded else {}
    if lora.scales:
        ends = tuple(f".{t}" for t in like_experts)
        alphas = ((cfg.names.module(name), scale * lora.rank) for name, scale in lora.scales)
        optional["alpha_pattern"] = {f"{m}.weight" if f".{m}".endswith(ends) else m: alpha for m, alpha in alphas}
    if parameters:
        optional["target_parameters"] = parameters
    return optional | {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": cfg.names.in_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": [cfg.names.output] if cfg.scores else None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": [*(t for t in modules if t not in like_experts), *alone],
        "task_type": "SEQ_CLS" if cfg.scores else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
