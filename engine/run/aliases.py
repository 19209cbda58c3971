"""Names of options in axolotl, LLaMA-Factory, TRL and unsloth, on the command line and in flat YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trireme.engine.run import screen
from trireme.engine.run.options import Options, table, whole
from trireme.models.config import InputError

# fmt: off
NAMES = {
    "adapter": "lora-model-dir adapter-name-or-path", "batch_size": "per-device-train-batch-size", "beta": "pref-beta",
    "chat_template": "template", "data": "dataset datasets", "dtype": "torch-dtype",
    "epochs": "num-train-epochs num-epochs", "eval_every": "eval-steps", "keep": "save-total-limit",
    "labels": "num-labels", "log": "report-to", "lora": "lora-r lora-rank",
    "lora_targets": "lora-target lora-target-modules target-modules", "loraplus": "loraplus-lr-ratio",
    "lr": "learning-rate", "max_steps": "iters", "method": "rl", "micro_batch": "micro-batch-size",
    "model": "model-name-or-path base-model", "neftune": "neftune-noise-alpha", "out": "output-dir",
    "patience": "early-stopping-patience", "resume": "resume-from-checkpoint", "rslora": "use-rslora",
    "router_aux": "moe-aux-loss-coef router-aux-loss-coef", "save_every": "save-steps",
    "schedule": "lr-scheduler-type lr-scheduler",
    "seq_len": "max-length cutoff-len max-seq-length sequence-len max-seq-len", "system": "default-system",
    "val": "val-size val-set-size", "warmup": "warmup-steps warmup-ratio",
}
NF4: dict[str, Any] = {"base": "nf4"}
FALSE: dict[str, dict[str, Any]] = {"false": {}}
ZERO: dict[str, dict[str, Any]] = {"0": {}, "0.0": {}}
# Keys of others, or our options -> values (globs, in lower case) -> our options with theirs, which give way to what is
# set by name. Other values of such a key are refused, unless it is a name of an option.
MEANINGS: dict[str, dict[str, dict[str, Any]]] = {
    "packing sample-packing": {"true": {}, "false": {"no_pack": True}},
    "bf16": {"true": {}, "auto": {}, "false": {"dtype": "fp32"}},
    "optim optimizer": {"*adam*8bit": {"adam_bits": 8}, "adamw": {}, "adamw_torch*": {}, "paged_adamw*": {}},
    "load-in-4bit": FALSE | {"true": NF4},
    "quantization-bit": FALSE | {"4": NF4},
    "load-best-model-at-end": FALSE | {"true": {"export": "best"}},
    "lora-target-linear": FALSE | {"true": {"lora_targets": ["all-linear"]}},
    "use-peft": FALSE | {"true": {"lora": 16}},
    "finetuning-type adapter": {"lora": {"lora": 8}, "qlora": {"lora": 8, **NF4}, "full": {}},
    "stage": {"sft": {}, "pt": {}, "dpo": {"method": "dpo"}, "kto": {"method": "kto"}, "rm": {"method": "reward"}},
    "pref-loss": {"sigmoid": {}, "ipo": {"method": "ipo"}, "orpo": {"method": "orpo"}, "simpo": {"method": "simpo"}},
    "train-on-inputs train-on-prompt mask-history fp16 load-in-8bit use-dora": FALSE,
    "template": {"llama-3": {"chat_template": "llama3"}, "qwen*": {"chat_template": "chatml"}, "default": {}},
    "chat_template": {"tokenizer_default*": {}},
    "torch-dtype": {"*bfloat16": {"dtype": "bf16"}, "*float32": {"dtype": "fp32"}},
    "log": {"none": {}}, "max_steps": {"-1": {}}, "gradient-accumulation-steps": {"1": {}},
    "schedule": {"constant_with_warmup": {"schedule": "constant"}},
    "warmup-ratio": {"1*": {"warmup": 0.999999}}, "val patience keep neftune lora": ZERO,
}
# Keys (globs) that ask for nothing here: it is so anyway, or it changes nothing that is trained.
NOTHING = """
    gradient-checkpointing* activation-offloading* *deepspeed* fsdp* ddp-* *flash-att* attn-implementation *liger*
    torch-compile* use-unsloth* dataloader-* eval-sample-packing pad-to-sequence-len plot-loss do-* save-strategy
    *trust-remote-code model-type tokenizer-type remove-unused-columns save-safetensors save-only-model run-name
    dataset-prepared-path dataset-dir bnb-* tf32 *double-quantization special-tokens* wandb-* push-to-hub hub-*
    overwrite-* eval*-strategy *eval-batch-size *num-proc *num-workers log*-* strict
"""
# fmt: on
FIELD_OF: dict[str, str] = {alias: name for name, names in NAMES.items() for alias in names.split()}
FIELD_OF |= {name.replace("_", "-"): name for name in table(Options)}
EMPTY: tuple[Any, ...] = (None, "", [], {})


def translated(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Values of our options, of the names and values of others; those of unknown names as they are. Raises
    InputError.
    """
    left = {key.replace("_", "-"): value for key, value in values.items() if value not in EMPTY}
    if _text(left.get("push-to-hub")) == "true":
        screen.say("note: push-to-hub is not read: --push OWNER/NAME uploads the result")
    try:
        named, implied = dict(_computed(left)), dict[str, Any]()
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}{error}") from None
    for key, value in left.items():
        name, text = FIELD_OF.get(key, key.replace("-", "_")), _text(value)
        meanings = [of for keys, of in MEANINGS.items() if not {key, name}.isdisjoint(keys.split())]
        meaning = [ours for of in meanings for glob, ours in of.items() if fnmatch(text, glob)]
        is_option = key in FIELD_OF
        is_switch = is_option and table(Options)[name].metadata["parse"] is bool
        if meaning and not (name == "adapter" and Path(str(value)).is_dir()):
            implied |= meaning[0]
        elif (meanings and not is_option) or name in named:
            wrong = f"{key} {text} has no meaning here, or is given twice"
            raise InputError(f"{where}{wrong}. Leave it out, or see --help.")
        elif is_switch or not (text == "false" or any(fnmatch(key, glob) for glob in NOTHING.split())):
            named[name] = {"true": True, "false": False}.get(text, value) if is_switch else value
    return {name: value for name, value in implied.items() if name != "lora" or "adapter" not in named} | named


def _computed(left: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Takes what is computed from several keys out of `left`; gives it by option. Raises ValueError."""
    times = left.get("gradient-accumulation-steps")
    of_axolotl = ("micro-batch-size", "batch-size") if times or "base-model" in left else ()
    sizes = [left.pop(key) for key in ("per-device-train-batch-size", *of_axolotl) if key in left]
    if sizes:
        yield "batch_size", whole(str(sizes[0])) * whole(str(left.pop("gradient-accumulation-steps", 1)))
    for key, name in (("evals-per-epoch", "eval_every"), ("saves-per-epoch", "save_every")):
        if key in left:
            epochs = left.get("num-epochs") or left.get("num-train-epochs") or 1
            yield name, 1 / max(1.000001, float(epochs) * float(left.pop(key)))
    if "full" in (left.get("finetuning-type"), left.get("adapter")):
        for key in [key for key in left if key.startswith("lora-")]:
            del left[key]
    for key in {"dataset", "datasets"} & left.keys():
        left[key] = list(_paths(left[key], Path(str(left.get("dataset-dir") or "data"))))


def _paths(sets: Any, folder: Path) -> Iterator[str]:
    """Paths of axolotl's data sets, or of names in LLaMA-Factory's dataset_info.json."""
    info = dict[str, Any]()
    with suppress(OSError, ValueError):
        info = json.loads((folder / "dataset_info.json").read_text())
    for part in sets if isinstance(sets, list) else str(sets).split(","):
        name = str(part.get("path", "?") if isinstance(part, dict) else part).strip()
        yield str(folder / info[name]["file_name"]) if name in info else name


def _text(value: Any) -> str:
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value).lower()
