"""A run's config.yaml: `read(write(options))` gives the same options, from any folder; and flat YAML of other trainers.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trireme.engine.run import screen
from trireme.engine.run.after import hub
from trireme.engine.run.options import Every, Options, flag, gib_size, table
from trireme.engine.tuning.peft_config import CONFIG as ADAPTER
from trireme.models.config import InputError
from trireme.storage.auxiliary import TEMPLATE, TOKENIZER
from trireme.storage.untrusted import read_text, why

FIRST = "# options of a run of trireme\n"
REST = "# chosen, or defaults of this version\n"
FIELDS = table(Options)


def saved(options: Options) -> dict[str, Any]:
    """The options as YAML and JSON have them: plain values, absolute paths; without those of one call."""
    names = [name for name, option in FIELDS.items() if "call" not in option.metadata["kind"]]
    return {name: _plain(FIELDS[name].metadata, getattr(options, name)) for name in names}


def _plain(option: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(option, part) for part in value]
    if value is None or value == "":
        return None
    if "path" in option["kind"] and not re.fullmatch(option["words"], value):  # a path, a pattern or PATH:WEIGHT
        is_on_hub = hub.name_of(value) or hub.name_of(value, of_data=True)
        return value if is_on_hub else hub.as_saved(os.path.abspath(value))  # noqa: PTH100 (keeps links)
    return str(value) if isinstance(value, Every) else f"{value}B" if option["parse"] is gib_size else value


def content(options: Options) -> bytes:
    """The config.yaml: first what the user chose, then the rest."""
    values = {name: value for name, value in saved(options).items() if value not in (None, [])}
    parts = [{n: v for n, v in values.items() if (n in options.chosen) is first} for first in (True, False)]
    texts = [yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=1000) * bool(part) for part in parts]
    return (FIRST + REST.join(texts)).encode()


def text_in(path: Path) -> str:
    """The text of a file of options. Raises InputError."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no file of options: {why(error)}.") from None


def parse_options(path: Path, text: str) -> tuple[dict[str, Any], frozenset[str]]:
    """The values in the text of a file, for Options.of, and the names that a user chose. Raises InputError."""
    try:
        wrong, node = "no lines such as `batch-size: 16`", yaml.compose(text, yaml.SafeLoader)
        values = yaml.SafeLoader("").construct_document(node) if node else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        node, wrong = None, " ".join(str(error).split())[:300]
    if not (isinstance(node, yaml.MappingNode) and values and all(isinstance(key, str) for key in values)):
        raise InputError(f"{path} is not YAML with options: {wrong}. Correct or restore it.")
    names = [key.value.replace("-", "_") for key, _ in node.value]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise InputError(f"{path}: {twice} is given twice. Leave one out.")
    if not text.startswith(FIRST):
        values = translated(values, where=f"{path}: ")
        return values, frozenset(values)
    return values, frozenset(line.partition(":")[0] for line in text.partition(REST)[0].splitlines()) & FIELDS.keys()


def of_run(path: Path) -> Options | None:
    """The options of the run that wrote a model into `path`: its OUT, OUT/step-N or OUT/merged."""
    for file in (path / "config.yaml", path.absolute().parent / "config.yaml"):
        if is_own(file):
            return Options.of(parse_options(file, text_in(file))[0], f"{file}: ")
    return None


def wording_of(path: Path, run: Options) -> tuple[str | None, str | None]:
    """(tokenizer, chat template), as options, of a model or adapter in `path`: its own files, else those of `run`,
    which wrote it. A model's own template is with its tokenizer.
    """
    tokenizer = str(path) if (path / TOKENIZER).is_file() else None
    if (path / ADAPTER).is_file() and (path / TEMPLATE).is_file():
        return tokenizer or run.tokenizer, str(path / TEMPLATE)
    return tokenizer or run.tokenizer, None if tokenizer else run.chat_template


def of_adapter(o: Options) -> Options:
    """`o` with the tokenizer, chat template and rotary angles of --adapter, where none are given; a line says so."""
    if not o.adapter:
        return o
    path, run = Path(o.adapter), of_run(Path(o.adapter)) or Options()
    tokenizer, template = wording_of(path, run)
    values: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": template, "rope_factor": run.rope_factor}
    values = {name: value for name, value in values.items() if value and getattr(o, name) is None}
    if values:
        screen.say(f"as {path}: {', '.join(f'{flag(name)} {value}' for name, value in values.items())}")
    return replace(o, **values)


def is_own(path: Path) -> bool:
    """Whether a file is the config.yaml of a run."""
    with suppress(InputError):
        return text_in(path).startswith(FIRST)
    return False


def changed(now: Options, before: Mapping[str, Any], fixed: bool = False) -> list[str]:
    """A line for each option that differs from `before`, which `saved` gave. `fixed`: of those that are set, and that a
    resumed run cannot change.
    """
    plain = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    words = lambda value: "not set" if value in (None, "", []) else plain(value)[:500]
    values = {name: value for name, value in saved(now).items() if not fixed or "run" in FIELDS[name].metadata["kind"]}
    pairs = [(name, value, before.get(name)) for name, value in values.items() if not (fixed and value in (None, []))]
    return [f"{flag(name)} {words(value)}, was {words(was)}" for name, value, was in pairs if value != was]


# ---------------------------------------------------------------- names of axolotl, LLaMA-Factory and TRL
# fmt: off
NAMES = {
    "adapter": "adapter_name_or_path lora_model_dir", "beta": "pref_beta", "chat_template": "template",
    "batch_size": "per_device_train_batch_size micro_batch_size", "data": "dataset", "dtype": "torch_dtype",
    "epochs": "num_train_epochs num_epochs", "eval_every": "eval_steps", "keep": "save_total_limit",
    "log": "report_to", "lora": "lora_r lora_rank",
    "lora_targets": "lora_target lora_target_modules target_modules", "lr": "learning_rate", "max_steps": "iters",
    "method": "rl", "model": "model_name_or_path base_model",
    "neftune": "neftune_noise_alpha", "out": "output_dir", "patience": "early_stopping_patience",
    "resume": "resume_from_checkpoint", "router_aux": "moe_aux_loss_coef router_aux_loss_coef",
    "save_every": "save_steps", "schedule": "lr_scheduler_type lr_scheduler", "system": "default_system",
    "seq_len": "max_length cutoff_len max_seq_length sequence_len max_seq_len", "val": "val_size val_set_size",
    "warmup": "warmup_steps warmup_ratio",
}
EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
# Keys -> values that mean something else here -> our options with theirs, which give way to what is set by name.
MEANINGS: dict[str, dict[str, dict[str, Any]]] = {
    "packing sample_packing": {"true": {}, "false": {"no_pack": True}},
    "bf16": {"true": {}, "auto": {}, "false": {"dtype": "fp32"}},
    "optim optimizer": {"adamw": {}, "adamw_torch": {}, "adamw_torch_fused": {}}
                       | dict.fromkeys(EIGHT_BITS, {"adam_bits": 8}),
    "load_in_4bit": {"true": {"base": "nf4"}}, "quantization_bit": {"4": {"base": "nf4"}},
    "finetuning_type adapter": {"full": {}, "lora": {"lora": 8}, "qlora": {"lora": 8, "base": "nf4"}},
    "use_peft": {"true": {"lora": 16}}, "lora_target_linear": {"true": {"lora_targets": ["all-linear"]}},
    "stage": {"sft": {}, "pt": {}, "dpo": {"method": "dpo"}, "kto": {"method": "kto"}, "rm": {"method": "reward"}},
    "torch_dtype": {"bfloat16": {"dtype": "bf16"}, "float32": {"dtype": "fp32"}},
    "report_to": {"none": {}}, "val_set_size val_size": {"0": {}, "0.0": {}},
    "do_train gradient_checkpointing flash_attention": {"true": {}},  # as it is here
}
IDLE = """
    dataloader_num_workers dataset_dir dataset_num_proc ddp_timeout eval_strategy flash_attn logging_dir logging_steps
    overwrite_cache overwrite_output_dir per_device_eval_batch_size plot_loss preprocessing_num_workers
    remove_unused_columns run_name save_strategy special_tokens tf32 trust_remote_code wandb_project
"""  # keys that change nothing that is trained
# fmt: on
FIELD_OF: dict[str, str] = {alias: name for name, names in NAMES.items() for alias in names.split()}


def translated(values: Mapping[str, Any], ours: Mapping[str, Any] | None = None, where: str = "") -> dict[str, Any]:
    """Values by option, of names and values of others; unknown names stay. What is empty, or false and unknown, asks
    for nothing. `ours`: values of our options besides. Raises InputError if an option is named twice.
    """
    left = {key.replace("-", "_"): value for key, value in values.items() if value not in (None, [], {})}
    left = {key: value for key, value in left.items() if key not in IDLE.split()}
    named, implied = dict[str, Any](ours or {}), dict[str, Any]()
    sizes = [key for key in ("per_device_train_batch_size", "micro_batch_size") if str(left.get(key)).isdecimal()]
    if sizes and str(left.get("gradient_accumulation_steps")).isdecimal():
        left[sizes[0]] = int(left[sizes[0]]) * int(left.pop("gradient_accumulation_steps"))
    for key, value in left.items():
        name, text = FIELD_OF.get(key, key), str(value).lower()
        meaning = next((words[text] for keys, words in MEANINGS.items() if key in keys.split() and text in words), None)
        if meaning is None and name in named:
            raise InputError(f"{where}{key}: {name} is given twice. Leave one out.")
        if key == "warmup_ratio" and re.fullmatch(r"[1-9]\d*(\.\d*)?", text):  # else they would be steps
            raise InputError(f"{where}{key}: {value} is not a share below 1. Of steps it is warmup_steps.")
        if meaning is None and (name in FIELDS or text not in ("false", "")):
            named[name] = value
        implied |= meaning or {}
    return {name: value for name, value in implied.items() if name != "lora" or "adapter" not in named} | named
