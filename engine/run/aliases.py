"""Names of options in other trainers: one table for the command line and for flat YAML files. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trireme.engine.run.options import Options, table
from trireme.models.config import InputError

# fmt: off
NAMES = {
    "adapter": "lora-model-dir adapter-name-or-path", "chat_template": "template",
    "epochs": "num-train-epochs num-epochs",
    "beta": "pref-beta rl-beta dpo-beta kto-beta orpo-alpha orpo-beta", "data": "dataset datasets train-file",
    "desirable_weight": "kto-chosen-weight", "dtype": "torch-dtype", "eval_every": "eval-steps steps-per-eval",
    "gpus": "num-gpus", "keep": "save-total-limit", "label_smoothing": "dpo-label-smoothing label-smoothing-factor",
    "labels": "num-labels", "log": "report-to", "long": "excess-length-strategy", "lora": "lora-r lora-rank",
    "lora_targets": "lora-target lora-target-modules target-modules", "loraplus": "loraplus-lr-ratio",
    "lr": "learning-rate", "max_grad_norm": "clip gradient-clipping clip-grad-norm", "max_steps": "iters",
    "method": "rl", "micro_batch": "micro-batch-size", "model": "model-name-or-path base-model",
    "neftune": "neftune-noise-alpha noisy-embedding-alpha neftune-alpha", "out": "output-dir",
    "patience": "early-stopping-patience", "resume": "resume-from-checkpoint", "rslora": "use-rslora peft-use-rslora",
    "router_aux": "moe-aux-loss-coef router-aux-loss-coef", "save_every": "save-steps",
    "schedule": "lr-scheduler-type lr-scheduler", "seq_len": "max-length cutoff-len max-seq-length sequence-len "
    "max-seq-len", "system": "default-system default-system-message", "teacher": "teacher-model "
    "teacher-model-name-or-path", "temperature": "kd-temperature distill-temperature", "tokenizer":
    "tokenizer-name-or-path", "undesirable_weight": "kto-rejected-weight", "val": "val-size val-set-size eval-dataset",
    "warmup": "warmup-steps",
}
# Option: values of others (globs, in lower case), and ours; None: as if the key were not there.
VALUES: dict[str, dict[str, Any]] = {
    "chat_template": {"tokenizer_default*": None, "default": None, "llama-3": "llama3", "gemma*": "gemma",
                      "mistral*": "mistral", "qwen*": "chatml"},
    "dtype": {"*bfloat16": "bf16", "*float32": "fp32"}, "log": {"none": None}, "long": {"truncate": "cut", "raise":
    "error"}, "max_steps": {"-1": None, "0": None}, "resume": {"false": None}, "schedule": {"constant_with_warmup":
    "constant"}, "val": {"0": None, "0.0": None}, **dict.fromkeys(("patience", "seq_len", "keep", "eval_every",
    "neftune", "lora"), {"0": None, "0.0": None}),
}
# Keys (globs) that ask for nothing here: it is so anyway, or it changes nothing that is trained.
NOTHING = """
    gradient-checkpointing* activation-offloading* use-reentrant-gc *deepspeed* fsdp* ddp-* *flash-att* strict
    sdp-attention attn-implementation *liger* torch-compile* use-unsloth* dataloader-* preprocessing-num-workers
    debug dataset-processes dataset-num-proc group-by-length pad-to-sequence-len eval-sample-packing logging-*
    log-* plot-loss include-*-seen overwrite-output-dir overwrite-cache save-strategy eval-strategy
    evaluation-strategy do-* use-cpu *trust-remote-code model-type tokenizer-type use-fast-tokenizer
    is-*-derived-model *per-device-eval-batch-size eval-batch-size remove-unused-columns save-safetensors
    save-only-model run-name dataset-prepared-path bnb-* tf32 *double-quantization quantization-method
    special-tokens* lora-on-cpu lora-*-kernel lora-fan-in-fan-out data-seed disable-tqdm ref-model*
    precompute-ref-* wandb-* push-to-hub hub-* local-rank shuffle-merged-datasets dataset-dir
    auto-resume-from-checkpoints hf-use-auth-token *field-messages loss-watchdog-*
"""
# Keys that ask for nothing with these values (globs), and are refused with any other.
ONLY = {
    "packing sample-packing shuffle assistant-only-loss completion-only-loss mask-prompt *init-lora-weights": "true",
    "train-on-inputs train-on-prompt mask-history fp16 load-in-8bit use-dora quantization-bit load-in-4bit use-peft "
    "load-best-model-at-end lora-target-linear": "false", "bf16 pure-bf16": "true auto full", "stage": "sft pt",
    "optim optimizer": "adamw adamw_torch* adamw_hf adamw_apex_fused paged_adamw*", "adam-epsilon": "1e-8 1e-08",
    "cosine-min-lr-ratio min-lr-ratio *min-lr-rate": "0.1", "dataset-text-field": "text", "pref-loss": "sigmoid",
    "metric-for-best-model": "eval_loss loss", "loss-type": "nll", "bias": "none", "train-on-eos": "turn all",
    "roles-to-train": "*assistant* *gpt*",
}
TOGETHER = """
    per-device-train-batch-size gradient-accumulation-steps grad-accumulation-steps adam-beta1 adam-beta2
    warmup-ratio finetuning-type evals-per-epoch saves-per-epoch test-datasets
"""
# fmt: on
FIELD_OF: dict[str, str] = {alias: name for name, names in NAMES.items() for alias in names.split()}
FIELD_OF |= {name.replace("_", "-"): name for name in table(Options)}
SWITCHES = ("true", "false", "yes", "no", "auto")
STAGES = {"dpo": "dpo", "kto": "kto", "rm": "reward"}
EMPTY: tuple[Any, ...] = (None, "", [], {})


def is_known(flag: str) -> bool:
    """Whether another trainer has an option of this name, without dashes, that is none here."""
    return flag in FIELD_OF or flag in TOGETHER.split() or _is(flag, [*NOTHING.split(), *" ".join(ONLY).split()])


def takes(name: str, word: str) -> bool:
    """Whether an option of another trainer takes the word behind it on a command line as its value."""
    valued = (
        name in FIELD_OF
        or name in TOGETHER.split()
        or _is(name, ["optim*", "*-ratio", "*-epsilon", "*-type", "*-strategy", "stage"])
    )
    return valued or word.lower() in SWITCHES or word.replace(".", "").isdecimal()


def translated(values: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], list[str]]:
    """(values of our options, lines on what asks for nothing) of the names and values of others. Raises InputError."""
    words = {"true": True, "false": False}
    left = {key.replace("_", "-"): words.get(v.lower(), v) if isinstance(v, str) else v for key, v in values.items()}
    given, ignored, refused = together(left), list[str](), list[str]()
    for key, value in left.items():
        name, text = FIELD_OF.get(key), _text(value)
        ours = next((ours for glob, ours in VALUES.get(name or "", {}).items() if fnmatch(text, glob)), value)
        if name and ours in EMPTY:
            given |= {"max_grad_norm": 0} if key == "clip-grad-norm" else {}  # torchtune: no clipping
        elif name and name in given:
            refused.append(f"{key} (it is given twice)")
        elif name and (ours is not False or table(Options)[name].metadata["parse"] is bool):
            given[name] = ours
        elif name or value in EMPTY or _is(key, NOTHING.split()):
            ignored += [] if name else [key]
        elif not any(_is(key, keys.split()) and _is(text, texts.split()) for keys, texts in ONLY.items()):
            harmless = value is False and not _is(key, " ".join(ONLY).split())
            (ignored if harmless else refused).append(key if harmless else f"{key} {text}")
    if refused:
        shown = ", ".join(word[:60] for word in refused[:10]) + f" and {len(refused) - 10} more" * (len(refused) > 10)
        raise InputError(f"{where}these have no meaning here: {shown}. Leave them out, or see --help.")
    return given, [f"ignored  {where}{', '.join(key[:60] for key in ignored[:20])}"] if ignored else []


def together(left: dict[str, Any]) -> dict[str, Any]:
    """Takes what means something together, or in other words than ours, out of `left`; returns it by option."""
    given, files = dict[str, Any](), _files(left)
    pop = lambda *names: next((value for name in names if (value := left.pop(name, None)) not in EMPTY), None)
    is_on = lambda name: left.get(name) is True and left.pop(name)
    times = pop("gradient-accumulation-steps", "grad-accumulation-steps")
    of_axolotl = ("micro-batch-size", "batch-size") if times or "base-model" in left else ()
    if (size := pop("per-device-train-batch-size", *of_axolotl)) is not None:
        given["batch_size"] = _whole(size) * _whole(times or 1)
    elif times is not None and _whole(times) > 1:
        raise InputError(
            "gradient accumulation: give --batch-size, the sequences of a whole step; the rest is planned."
        )
    if (betas := (pop("adam-beta1"), pop("adam-beta2"))) != (None, None):
        given["betas"] = [betas[0] or 0.9, betas[1] or 0.999]
    ratio = pop("warmup-ratio")
    if ratio is not None and not float(left.get("warmup-steps") or 0):
        left.pop("warmup-steps", None)
        given["warmup"] = min(float(ratio), 0.999999)  # 1: the whole run
    for key, name in (("evals-per-epoch", "eval_every"), ("saves-per-epoch", "save_every")):
        if (each := pop(key)) is not None:
            epochs = float(left.get("num-epochs") or left.get("num-train-epochs") or 1)
            given[name] = 1 / max(1.000001, epochs * float(each))
    for key in ("optim", "optimizer"):
        if "8bit" in _text(left.get(key)) and "adam" in _text(left.pop(key)):
            given["adam_bits"] = 8
    if any(left.get(key) is False for key in ("packing", "sample-packing")):
        given["no_pack"] = not pop("packing", "sample-packing")
    if left.get("stage") in STAGES:
        stage, loss = left.pop("stage"), left.pop("pref-loss", None) or "sigmoid"
        given["method"] = STAGES[stage] if stage != "dpo" or loss == "sigmoid" else loss
    if left.get("bf16") is False and left.get("fp16") is not True:
        left.pop("bf16")
        given["dtype"] = "fp32"
    if is_on("load-in-4bit") or (_text(left.get("quantization-bit")) == "4" and left.pop("quantization-bit")):
        given["base"] = "nf4"
    if is_on("load-best-model-at-end"):
        given["export"] = "best"
    if is_on("lora-target-linear"):
        given["lora_targets"] = ["all-linear"]
    word, ranked = (
        _text(pop("finetuning-type") or left.get("adapter") or ""),
        {"lora-r", "lora-rank", "lora"} & left.keys(),
    )
    if word in ("lora", "qlora", "full") and ("lora-r" in left or not Path(word).exists()):
        left.pop("adapter", None)
        given |= {"lora": 8} if word != "full" and not ranked else {}
        given |= {"base": "nf4"} if word == "qlora" else {}
    if is_on("use-peft") and not ranked:
        given["lora"] = 16
    if word == "full" or left.get("lora-model-dir") or left.get("adapter-name-or-path"):
        for key in [key for key in left if key.startswith("lora-") and key not in ("lora-model-dir", "lora-dropout")]:
            left.pop(key)
    return given | files


def _files(left: dict[str, Any]) -> dict[str, Any]:
    """Lists of data sets with their paths, and names in LLaMA-Factory's dataset_info.json."""
    folder, info, test = (
        Path(_text(left.get("dataset-dir") or "data")),
        dict[str, Any](),
        left.pop("test-datasets", None),
    )
    with suppress(OSError, ValueError):
        info = json.loads((folder / "dataset_info.json").read_text())
    for key in ("dataset", "datasets"):
        if sets := left.get(key):
            sets = sets if isinstance(sets, list) else sets.split(",") if isinstance(sets, str) else [sets]
            paths = [str(each.get("path", "?") if isinstance(each, dict) else each).strip() for each in sets]
            left[key] = [str(folder / info[path]["file_name"]) if path in info else path for path in paths]
    return {"val": test[0].get("path")} if isinstance(test, list) and isinstance(test[0], dict) else {}


def _text(value: Any) -> str:
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value).lower()


def _is(text: str, globs: Iterable[str]) -> bool:
    return any(fnmatch(text, glob) for glob in globs)


def _whole(value: Any) -> int:
    if not str(value).isdecimal() or not 0 < int(value) < 1 << 40:
        raise InputError(f"a batch of {str(value)[:20]}: expected a whole number of at least 1.")
    return int(value)
