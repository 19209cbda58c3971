"""peft's adapter_config.json: what is read, what has no effect, and everything else refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trireme.models.config import InputError
from trireme.storage.untrusted import complaint, parse_json, read_small, shown, why

CONFIG = "adapter_config.json"
MOST = 1_000_000  # of rank and alpha
# Keys that are read -> the form of their values, as `complaint` has them.
READ: dict[str, Any] = {
    "alpha_pattern": dict,
    "lora_dropout": {int, float},
    "rank_pattern": dict,
    "target_parameters": [str],
    "use_rslora": bool,
}
# Keys of which only these values are read: with others the adapter computes something else.
ONLY: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
# Keys of peft 0.21 that change no number once the tensors are there. Any other key that has a value is refused: a later
# version's may change numbers.
UNUSED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_ga_config",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
})  # fmt: skip
_SLOW = re.compile(r"\)[*+?{]|\(\?|\\[1-9]|[*+?{].*[*+?{].*[*+?{]|\(.*\(.*\(")  # patterns that may take hours


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json. Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Name the folder of an adapter, with {CONFIG}.")
    try:
        return parse_json(read_small(folder / CONFIG, links=True), "file")
    except FileNotFoundError:
        inner = ", ".join(str(path.parent) for path in sorted(folder.glob(f"*/{CONFIG}"))[:4])
        fault = f"it holds adapters in folders. Name one of them: {inner}" if inner else "it is not an adapter of peft"
        if (folder / "config.json").is_file():
            fault = "it is a whole model. Take it as the checkpoint"
        raise InputError(f"{folder} has no {CONFIG}: {fault}.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG}: {why(error)}.") from None


def base_of(config: Mapping[str, Any]) -> str:
    """The name of the base model; "" if the config has none."""
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) and "\0" not in name else ""


def check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Raises InputError for what is not a plain LoRA, for a key that is not known, and for numbers out of range."""
    if config.get("peft_type") != "LORA":
        raise InputError(f"{file}: peft_type is {shown(repr(config.get('peft_type')))}; LORA is supported.")
    for key, value in sorted(config.items()):
        if key in READ and value is not None and (wrong := complaint(value, READ[key])):
            raise InputError(f"{file}: {key}{wrong}.")
        legal = key in UNUSED or key in READ or key in ("peft_type", "r", "lora_alpha") or value in ONLY.get(key, ())
        if value and not legal:
            advice = "Train the adapter without it, or add it to its model or convert it with peft"
            raise InputError(f"{file}: {shown(key)} is {shown(repr(value))}, which is not supported. {advice}.")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    integral = all(type(rank) is int and 1 <= rank <= MOST for rank in (config.get("r"), *ranks.values()))
    in_range = all(type(a) in (int, float) and abs(a) <= MOST for a in (config.get("lora_alpha"), *alphas.values()))
    if not (integral and in_range and 0 <= (config.get("lora_dropout") or 0) < 1):
        keys = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout")
        values = ", ".join(f"{key} {shown(repr(config[key]))}" for key in keys if config.get(key))
        raise InputError(f"{file}: {values}: expected r and lora_alpha up to {MOST:,}, lora_dropout from 0 to 1.")
    for pattern in (*ranks, *alphas):
        with suppress(re.error, RecursionError, OverflowError):
            if not _SLOW.search(pattern) and re.compile(pattern):
                continue
        raise InputError(f"{file}: the pattern {shown(repr(pattern))} is not read. Name the modules instead.")


def by_pattern(patterns: Mapping[str, float] | None, name: str, default: float) -> float:
    """The value of the first pattern that matches a name, as peft matches."""
    return next((v for key, v in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)


def is_parameter(config: Mapping[str, Any], name: str) -> bool:
    """Whether peft adapts a parameter by its own name (target_parameters), not its module."""
    return any(f".{name}".endswith(f".{target}") for target in config.get("target_parameters") or ())
