"""Adapters in peft's format: adapter_config.json and adapter_model.safetensors, fp32.

Those of experts are `target_parameters` there: the module is wrapped once for each parameter, the last outermost, and B
is (out, rank E), by rank and expert.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trireme.engine.between import Reader
from trireme.engine.exchange import fetch
from trireme.engine.tuning.chosen import adapted
from trireme.models.config import InputError, Lora, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source, SourceTensor, convert, dtype_of
from trireme.storage.files import StoreError, partial_of, sync_folder, write_synced
from trireme.storage.headers import encode_header, read_header
from trireme.storage.layout import sequential
from trireme.storage.untrusted import parse_json, read_small

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's
IN_PEFT = {  # of a layer's experts, in transformers: parameter -> the module that has its adapter
    shapes.GATE_UP: "mlp.experts.base_layer",
    shapes.DOWN: "mlp.experts",
}
PARAMETERS = [f"mlp.experts.{matrix}" for matrix in IN_PEFT]


@dataclass(frozen=True)
class Adapter:
    """What is adapted; tensors by canonical names."""

    lora: Lora
    source: Source
    base: str  # the model that it was made for: a folder, or a name on the hub
    names: dict[str, str]  # canonical -> in the file

    def values(self, name: str, first: int, last: int) -> Iterator[np.ndarray]:
        if _turned(name):
            yield self.tensor(name).flatten()[first:last].numpy()
        else:
            yield from self.source.values(self.names[name], first, last)

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, fp32."""
        t = self.source.tensors[self.names[name]]
        pieces = [convert(piece, dtype_of(piece), "F32") for piece in self.source.values(self.names[name])]
        found = torch.from_numpy(np.concatenate(pieces)).view(t.shape)
        if not _turned(name):
            return found
        return found.view(t.shape[0], self.lora.rank, -1).permute(2, 1, 0).reshape(-1, t.shape[0])


def _turned(name: str) -> bool:
    """Whether a tensor lies otherwise in peft's files: B of experts, (E rank, out) here."""
    return shapes.adapts_experts(name) and name.endswith(".lora_B.weight")


def peft_names(cfg: ModelConfig) -> dict[str, str]:
    """Canonical name of each tensor of the adapters -> peft's."""

    def renamed(name: str) -> str:
        for matrix, module in IN_PEFT.items() if shapes.adapts_experts(name) else ():
            name = name.replace(f"{cfg.names.experts}.{matrix}.lora_", f"{module}.lora_")
        return PREFIX + name

    return {name: renamed(name) for name in adapter_shapes(cfg)}


def adapter_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """name -> shape."""
    units = (shapes.trained_parts(cfg, u) for u in range(cfg.n_units))
    return {name: shape for unit in units for part in unit for group in part for name, shape in group}


def save_adapter(folder: Path, cfg: ModelConfig, reader: Reader, base: str) -> None:
    """Writes the adapters; `base` names their model. Raises StoreError."""
    assert cfg.lora is not None
    unit = {t.name: u for u, layout in enumerate(reader.homes.geo.weights) for t in layout.tensors}
    names, rank = peft_names(cfg), cfg.lora.rank
    stored = {name: shape[::-1] if _turned(name) else shape for name, shape in adapter_shapes(cfg).items()}
    layout = sequential([(names[name], "F32", shape) for name, shape in stored.items()])

    def content() -> Iterator[bytes]:
        yield encode_header(layout, {"format": "pt"})
        for name, shape in stored.items():
            pieces = fetch(reader, unit[name], name, exact=True)
            if _turned(name):
                whole = np.concatenate([piece.copy() for piece in pieces])
                pieces = iter([np.ascontiguousarray(whole.reshape(-1, rank, shape[0]).transpose(2, 1, 0))])
            for piece in pieces:
                yield piece.tobytes()

    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(_config(cfg, cfg.lora, base), indent=2, sort_keys=True).encode()
    try:
        write_synced(partial_of(folder / CONFIG), [config])
        write_synced(partial_of(folder / WEIGHTS), content())
        for name in (WEIGHTS, CONFIG):
            partial_of(folder / name).replace(folder / name)
        sync_folder(folder)
    except OSError as e:
        raise e if isinstance(e, StoreError) else StoreError(e.errno, e.strerror, str(e.filename or folder)) from e


def _config(cfg: ModelConfig, lora: Lora, base: str) -> dict[str, Any]:
    """Keys that peft, vLLM and llama.cpp read."""
    towers = cfg.carried if cfg.wrapper else ()  # have layers of like names
    beside = "|".join(f"{re.escape(prefix)}.*" for prefix in towers)
    experts = cfg.experts is not None and lora.adapts(cfg.names.experts)
    modules = [t for t in lora.targets if not (experts and f".{cfg.names.experts}".endswith(f".{t}"))]
    more: dict[str, Any] = {"exclude_modules": beside} if beside else {}
    if experts:
        more["target_parameters"] = PARAMETERS
    return more | {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": cfg.names.in_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def read_adapter(folder: Path, cfg: ModelConfig) -> Adapter:
    """What of `cfg` is trained does not count. Raises InputError on another format, kind or base."""
    config = read_adapter_config(folder)
    try:
        header = read_header(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None
    rank, alpha = _numbers(folder, config)
    found = {t.name.removeprefix(PREFIX): t.shape for t in header.layout.tensors}
    layered = re.compile(re.escape(cfg.names.block).replace(r"\{\}", r"\d+") + r"(.+)\.lora_[AB]\.weight")
    modules = {match[1] for match in map(layered.fullmatch, found) if match}
    wrapped = modules & set(IN_PEFT.values()) if cfg.experts else set()
    experts = _of_parameters(folder, config, bool(wrapped))
    lora = Lora(rank, alpha, (*sorted(modules - wrapped), *((cfg.names.experts,) if experts else ())))
    names, ours = peft_names(adapted(cfg, lora)), adapter_shapes(adapted(cfg, lora))
    expected = {
        names[name].removeprefix(PREFIX): shape[::-1] if _turned(name) else shape for name, shape in ours.items()
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            has, wants = (list(known[name]) if name in known else "missing" for known in (found, expected))
            raise InputError(f"{folder / WEIGHTS}: {name} is {has}, for this model it would be {wants}.")
    tensors = {t.name: SourceTensor(t.dtype, t.shape, WEIGHTS, header.data + t.offset) for t in header.layout.tensors}
    return Adapter(lora, Source(folder, (WEIGHTS,), tensors, {}), base_of(config), names)


def _of_parameters(folder: Path, config: dict[str, Any], experts: bool) -> bool:
    """Whether experts are adapted. Raises InputError where only one of their matrices is, or something else."""
    given = config.get("target_parameters") or []
    ends = {str(name).rpartition(".")[2] for name in given} if isinstance(given, list) else {"?"}
    if ends == (set(IN_PEFT) if experts else set()):
        return experts
    wanted = (
        f"{', '.join(PARAMETERS)}, both, are" if experts or ends <= set(IN_PEFT) else "only parameters of experts are"
    )
    raise InputError(f"{folder / CONFIG}: target_parameters is {given!r}; {wanted} supported.")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Raises InputError."""
    try:
        return parse_json(read_small(folder / CONFIG, links=True), str(folder / CONFIG))
    except FileNotFoundError:
        raise InputError(f"{folder} has no {CONFIG}: it is not an adapter of peft.") from None
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from None


def base_of(config: dict[str, Any]) -> str:
    """The model that an adapter was made for; "" where it does not say."""
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) and "\0" not in name else ""


def _numbers(folder: Path, config: dict[str, Any]) -> tuple[int, float]:
    """(rank, alpha without rank stabilisation). Raises InputError on other kinds."""
    where = folder / CONFIG
    if config.get("peft_type") != "LORA":
        raise InputError(f"{where}: peft_type is {config.get('peft_type')!r}; LORA is supported.")
    for key in ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias"):
        if config.get(key):
            raise InputError(
                f"{where}: {key} is {config[key]!r}, which is not supported. Train the adapter without it."
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (isinstance(rank, int) and isinstance(alpha, int | float)) or rank < 1 or not math.isfinite(alpha):
        raise InputError(f"{where}: r is {rank!r}, lora_alpha is {alpha!r}; expected numbers.")
    return rank, alpha * math.sqrt(rank) if config.get("use_rslora") else float(alpha)
