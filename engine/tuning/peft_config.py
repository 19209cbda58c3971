"""peft's adapter_config.json, key by key: what is read, what has no effect, and everything else refused by name.

Checked against LoraConfig of peft 0.21.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.engine.tuning.spellings import Spelling
from trireme.models.config import InputError
from trireme.storage.untrusted import complaint, parse_json, read_small, shown, why

CONFIG = "adapter_config.json"
MOST = 1_000_000  # of rank and alpha
# Keys that change no number whatever they say: where the base is, how peft computes, details of what `ONLY` decides.
# `fan_in_fan_out` is corrected by peft to what the layer is.
UNUSED = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config",
})  # fmt: skip
# Key -> values that change no number.
ONLY: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"),
}
SCORED = "SEQ_CLS"  # task_type of models with a score head
NUMBERS = ("lora_alpha", "r")
# Other keys that are read -> the forms of their values, as `complaint` has them.
READ: dict[str, tuple[Any, ...]] = {
    "alpha_pattern": ({str: {int, float}},),
    "exclude_modules": (str, [str]),
    "layers_pattern": (str, [str]),
    "layers_to_transform": (int, [int]),
    "lora_dropout": ({int, float},),
    "modules_to_save": (str, [str]),
    "rank_pattern": ({str: int},),
    "target_modules": (str, [str]),
    "target_parameters": ([str],),
    "use_rslora": (bool,),
}
KNOWN = UNUSED | READ.keys() | set(NUMBERS)
QUANTIFIERS = 2  # of a pattern, at most: with more, or repeated groups, a stranger's may take hours
OF_TARGETS = 4  # likewise, of the one that target_modules may be
Patterns = tuple[tuple[re.Pattern[str], float], ...]
CONVERTED = ("pissa", "olora", "corda", "lora_ga")  # initial values that peft takes out of the base


@dataclass(frozen=True)
class Said:
    """The settings of a plain LoRA in an adapter_config.json."""

    rank: int
    alpha: float
    dropout: float
    base: str  # the model that it was made for: a folder, or a name on the hub; "": not said
    modules: frozenset[str] | None  # ends of their names; None: all linear layers, or a regular expression
    matching: re.Pattern[str] | None  # that regular expression, where it is sure to end
    excluded: frozenset[str]
    excluding: re.Pattern[str] | None  # exclude_modules, where it is a regular expression
    parameters: frozenset[str]
    layers: frozenset[int]  # none: all
    lists: frozenset[str]  # of layers; none: any
    saved: frozenset[str]  # ends of names of modules that are stored whole
    ranks: Patterns
    alphas: Patterns
    stable: bool  # alpha is to be divided by the root of the rank
    spelling: Spelling = Spelling()  # of modules' names in these lists and patterns

    def left_out(self, module: str, layer: int, layers: str) -> str | None:
        """The key because of which peft gives a linear layer no adapter; "" if it gives one; None if it cannot be
        known.

        `layer`: its number in the list `layers` of the model.
        """
        if self.adapts(f"{module}.weight"):
            return ""
        module = self.spelling.theirs(module)
        if _named(self.excluded, module) or (self.excluding and self.excluding.fullmatch(module)):
            return "exclude_modules"
        if any(f".{end}." in f".{module}." for end in self.saved):
            return "modules_to_save"
        if self.modules is None:
            return "target_modules" if self.matching and not self.matching.fullmatch(module) else None
        if not _named(self.modules, module):
            return "target_modules"
        if module in self.modules:  # by its full name, whatever the layers are
            return ""
        if self.layers and layer not in self.layers:
            return "layers_to_transform"
        return "layers_pattern" if self.layers and self.lists and layers not in self.lists else ""

    def sized(self, name: str) -> tuple[int, float]:
        """(rank, alpha without rank stabilisation) of a module or parameter."""
        name = self.spelling.theirs(name)
        rank = int(_first(self.ranks, name, self.rank))
        alpha = float(_first(self.alphas, name, self.alpha))
        return rank, alpha * math.sqrt(rank) if self.stable else alpha

    def adapts(self, parameter: str) -> bool:
        """Whether peft gives a parameter an adapter."""
        return _named(self.parameters, self.spelling.theirs(parameter))


def _named(ends: frozenset[str], name: str) -> bool:
    """Whether a name, or its end after a dot, is in `ends`."""
    parts = name.split(".")
    return any(".".join(parts[k:]) in ends for k in range(len(parts)))


def read_said(folder: Path, excluded: str, scored: bool) -> Said:
    """Reads adapter_config.json. `excluded`: a regular expression that exclude_modules may be. `scored`: the model has
    a score head.

    Raises InputError unless it is a plain LoRA of a causal language model or, if `scored`, of a classifier.
    """
    config, where = read_adapter_config(folder), folder / CONFIG
    _check(where, config, excluded, scored)
    rank, alpha = _numbers(where, config)
    targets, parameters = config.get("target_modules"), _listed(config.get("target_parameters"))
    left = config.get("exclude_modules")
    if targets is None and parameters:
        targets = []  # as peft
    if targets is None:
        raise InputError(f"{where}: target_modules is null, for which peft chooses by the model. List the modules.")
    return Said(
        rank,
        alpha,
        float(config.get("lora_dropout") or 0),
        base_of(config),
        None if isinstance(targets, str) else frozenset(targets),
        _matching(targets) if isinstance(targets, str) else None,
        frozenset() if isinstance(left, str) else _listed(left),
        _matching(left) if isinstance(left, str) and left else None,
        parameters,
        _listed(config.get("layers_to_transform")),
        _listed(config.get("layers_pattern") or None),
        _listed(config.get("modules_to_save")),
        _patterns(where, "rank_pattern", config.get("rank_pattern") or {}, 1),
        _patterns(where, "alpha_pattern", config.get("alpha_pattern") or {}, -MOST),
        bool(config.get("use_rslora")),
    )


def _first(patterns: Patterns, name: str, otherwise: float) -> float:
    """The value of the first pattern that matches a name, as peft matches."""
    return next((value for pattern, value in patterns if pattern.match(name)), otherwise)


def _patterns(where: Path, key: str, given: dict[str, float], least: int) -> Patterns:
    """Raises InputError for a pattern that might take forever, or a value not between `least` and MOST."""
    found = []
    for text, value in given.items():
        if not least <= value <= MOST:
            raise InputError(f"{where}: {key} has {_show(value)} for {_show(text)}, expected a number up to {MOST:,}.")
        quantifiers, groups = len(re.findall(r"[*+?{]", text)), text.count("(")
        try:
            if quantifiers > QUANTIFIERS or groups > QUANTIFIERS or re.search(r"\)[*+?{]|\(\?|\\[1-9]", text):
                raise re.error("too involved")
            found.append((re.compile(rf"(.*\.)?({text})$"), value))
        except (re.error, RecursionError, OverflowError):
            wrong = f"{where}: {key} has the regular expression {_show(text)}"
            raise InputError(f"{wrong}, which is not read. Name the modules instead.") from None
    return tuple(found)


def _matching(text: str) -> re.Pattern[str] | None:
    """target_modules as a regular expression; None for all linear layers, and if it might take forever.

    Names of modules have few digits, so repeated digits are harmless.
    """
    plain = re.sub(r"(\\d|\[\\d\]|\[0-9\])[*+{]", "", text)
    repeated = len(re.findall(r"[*+{]", plain)) > OF_TARGETS or re.search(r"\)[*+{]|\\[1-9]|\(\?P=", text)
    if repeated or text.lower() == "all-linear":
        return None
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None


def _listed(value: Any) -> frozenset[Any]:
    return frozenset(value if isinstance(value, list) else () if value is None else (value,))


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json. Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Name the folder of an adapter, with {CONFIG}.")
    try:
        return parse_json(read_small(folder / CONFIG, links=True), "file")
    except FileNotFoundError:
        whole = (folder / "config.json").is_file()
        what = "it is a whole model. Take it as the checkpoint" if whole else "it is not an adapter of peft"
        raise InputError(f"{folder} has no {CONFIG}: {what}.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG}: {why(error)}.") from None


def base_of(config: dict[str, Any]) -> str:
    """The name of the base model (Said.base)."""
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) and "\0" not in name else ""


def _check(where: Path, config: dict[str, Any], excluded: str, scored: bool) -> None:
    """Raises InputError as read_said."""
    if "peft_type" not in config and "fine_tune_type" in config:
        raise InputError(
            f"{where} is of mlx-lm, not of peft. Fuse the adapter there (mlx_lm.fuse), and train the result."
        )
    if config.get("peft_type") != "LORA":
        raise InputError(f"{where}: peft_type is {_show(config.get('peft_type'))}; LORA is supported.")
    for key, value in sorted(config.items()):
        if key in READ and value is not None:
            if all(complaint(value, form) for form in READ[key]):
                raise InputError(f"{where}: {key}{complaint(value, READ[key][-1])}.")
            unread = isinstance(value, str) and value not in ("", excluded) and not _matching(value)
            if key == "exclude_modules" and unread:
                raise InputError(f"{where}: {key} is a regular expression, {_show(value)}. List the modules instead.")
        elif scored and key == "task_type" and value == SCORED:
            continue
        elif value and key not in KNOWN and value not in ONLY.get(key, ()):
            raise InputError(f"{where}: {shown(key)} is {_show(value)}, which is not supported. {_instead(key, value)}")


def _numbers(where: Path, config: dict[str, Any]) -> tuple[int, float]:
    """Rank and alpha. Raises InputError."""
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    dropout: Any = config.get("lora_dropout") or 0.0
    if not 0 <= dropout < 1:
        raise InputError(f"{where}: lora_dropout is {_show(dropout)}, expected a number from 0 to below 1.")
    if type(rank) is int and 1 <= rank <= MOST and type(alpha) in (int, float) and abs(alpha) <= MOST:
        plain = alpha * math.sqrt(rank) if config.get("use_rslora") else float(alpha)
        if abs(plain) <= MOST:
            return rank, alpha
    raise InputError(f"{where}: r is {_show(rank)}, lora_alpha is {_show(alpha)}; expected numbers up to {MOST:,}.")


def _instead(key: str, value: object) -> str:
    if key == "init_lora_weights" and str(value).lower().startswith(CONVERTED):
        convert = "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        return f"The adapter is for a changed base. Convert it with peft: {convert}."
    return "Train the adapter without it, or add it to its model with peft."


def _show(value: object) -> str:
    return shown(repr(value))
