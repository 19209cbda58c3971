"""Names of options in other trainers: one table for the command line and for flat YAML files. Imports no torch."""

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
    "adapter": "lora-model-dir adapter-name-or-path", "batch_size": "per-device-train-batch-size", "beta":
    "pref-beta rl-beta dpo-beta kto-beta orpo-alpha orpo-beta", "chat_template": "template", "data":
    "dataset datasets train-file", "desirable_weight": "kto-chosen-weight", "dtype": "torch-dtype", "epochs":
    "num-train-epochs num-epochs", "eval_every": "eval-steps steps-per-eval", "gpus": "num-gpus", "keep":
    "save-total-limit", "label_smoothing": "dpo-label-smoothing label-smoothing-factor", "labels": "num-labels", "log":
    "report-to", "long": "excess-length-strategy", "lora": "lora-r lora-rank", "lora_targets":
    "lora-target lora-target-modules target-modules", "loraplus": "loraplus-lr-ratio", "lr": "learning-rate",
    "max_grad_norm": "clip gradient-clipping clip-grad-norm", "max_steps": "iters", "method": "rl", "micro_batch":
    "micro-batch-size", "model": "model-name-or-path base-model", "neftune":
    "neftune-noise-alpha noisy-embedding-alpha neftune-alpha", "out": "output-dir", "patience":
    "early-stopping-patience", "resume": "resume-from-checkpoint", "rslora": "use-rslora peft-use-rslora", "router_aux":
    "moe-aux-loss-coef router-aux-loss-coef", "save_every": "save-steps", "schedule": "lr-scheduler-type lr-scheduler",
    "seq_len": "max-length cutoff-len max-seq-length sequence-len max-seq-len", "system":
    "default-system default-system-message", "teacher": "teacher-model teacher-model-name-or-path", "temperature":
    "kd-temperature distill-temperature", "tokenizer": "tokenizer-name-or-path", "undesirable_weight":
    "kto-rejected-weight", "val": "val-size val-set-size eval-dataset", "warmup": "warmup-steps warmup-ratio",
}
ZERO: dict[str, dict[str, Any]] = {"0": {}, "0.0": {}}
NF4: dict[str, Any] = {"base": "nf4"}
# Keys of others, or our options -> values (globs, in lower case) -> our options with theirs, which give way to what is
# set by name. Other values of such a key are refused, unless it is a name of an option.
MEANINGS: dict[str, dict[str, dict[str, Any]]] = {
    "packing sample-packing": {"true": {}, "false": {"no_pack": True}}, "bf16": {"true": {}, "auto": {}, "full": {},
    "false": {"dtype": "fp32"}}, "optim optimizer": {"*adam*8bit": {"adam_bits": 8}, "adamw": {}, "adamw_torch*": {},
    "adamw_hf": {}, "adamw_apex_fused": {}, "paged_adamw*": {}}, "load-in-4bit": {"false": {}, "true": NF4},
    "quantization-bit": {"false": {}, "4": NF4}, "load-best-model-at-end": {"false": {}, "true": {"export": "best"}},
    "lora-target-linear": {"false": {}, "true": {"lora_targets": ["all-linear"]}}, "use-peft": {"false": {}, "true":
    {"lora": 16}}, "finetuning-type adapter": {"lora": {"lora": 8}, "qlora": {"lora": 8, **NF4}, "full": {}}, "stage":
    {"sft": {}, "pt": {}, "dpo": {"method": "dpo"}, "kto": {"method": "kto"}, "rm": {"method": "reward"}}, "pref-loss":
    {"sigmoid": {}, "ipo": {"method": "ipo"}, "orpo": {"method": "orpo"}, "simpo": {"method": "simpo"}},
    "shuffle assistant-only-loss completion-only-loss mask-prompt init-lora-weights": {"true": {}}, "loss-type": {"nll":
    {}}, "train-on-inputs train-on-prompt mask-history fp16 load-in-8bit use-dora": {"false": {}}, "bias": {"none": {}},
    "adam-epsilon": {"1e-08": {}, "1e-8": {}}, "cosine-min-lr-ratio min-lr-ratio min-lr-rate": {"0.1": {}},
    "dataset-text-field": {"text": {}}, "metric-for-best-model": {"eval_loss": {}, "loss": {}}, "train-on-eos": {"turn":
    {}, "all": {}}, "roles-to-train": {"*assistant*": {}, "*gpt*": {}}, "max_steps": {"-1": {}, "0": {}},
    "chat_template": {"tokenizer_default*": {}, "default": {}}, "template": {"llama-3": {"chat_template": "llama3"},
    "gemma*": {"chat_template": "gemma"}, "mistral*": {"chat_template": "mistral"}, "qwen*": {"chat_template":
    "chatml"}}, "torch-dtype": {"*bfloat16": {"dtype": "bf16"}, "*float32": {"dtype": "fp32"}}, "log": {"none": {}},
    "resume": {"false": {}}, "schedule": {"constant_with_warmup": {"schedule": "constant"}}, "long": {"truncate":
    {"long": "cut"}, "raise": {"long": "error"}}, "val patience seq_len keep eval_every neftune lora": ZERO,
    "warmup-ratio": {"1*": {"warmup": 0.999999}}, "warmup": dict.fromkeys(("0", "0.0"), {"warmup": 0}),
    "gradient-accumulation-steps": {"1": {}}, "clip-grad-norm": {"none": {"max_grad_norm": 0}},
}
# Keys (globs) that ask for nothing here: it is so anyway, or it changes nothing that is trained.
NOTHING = """
    gradient-checkpointing* activation-offloading* use-reentrant-gc *deepspeed* fsdp* ddp-* *flash-att* strict
    sdp-attention attn-implementation *liger* torch-compile* use-unsloth* dataloader-* debug dataset-processes
    group-by-length pad-to-sequence-len eval-sample-packing plot-loss include-*-seen save-strategy do-* use-cpu
    *trust-remote-code model-type tokenizer-type use-fast-tokenizer is-*-derived-model remove-unused-columns
    save-safetensors save-only-model run-name dataset-prepared-path bnb-* tf32 *double-quantization
    quantization-method special-tokens* lora-on-cpu lora-*-kernel lora-fan-in-fan-out data-seed disable-tqdm
    ref-model* precompute-ref-* wandb-* push-to-hub hub-* local-rank shuffle-merged-datasets dataset-dir
    auto-resume-from-checkpoints hf-use-auth-token *field-messages loss-watchdog-* overwrite-* eval*-strategy
    *eval-batch-size *num-proc *num-workers log*-*
"""
COMPUTED = "gradient-accumulation-steps grad-accumulation-steps adam-beta1 adam-beta2 evals-per-epoch saves-per-epoch"
# fmt: on
FIELD_OF: dict[str, str] = {alias: name for name, names in NAMES.items() for alias in names.split()}
FIELD_OF |= {name.replace("_", "-"): name for name in table(Options)}
KNOWN = (*FIELD_OF, *COMPUTED.split(), *" ".join(MEANINGS).split(), *NOTHING.split())
EMPTY: tuple[Any, ...] = (None, "", [], {})


def is_known(key: str) -> bool:
    """Whether another trainer has an option of this name, without dashes, that is none here."""
    return any(fnmatch(key, name) for name in KNOWN)


def translated(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Values of our options, of the names and values of others. Raises InputError."""
    words = {"true": True, "True": True, "false": False, "False": False}
    left = {key.replace("_", "-"): words.get(v, v) if isinstance(v, str) else v for key, v in values.items()}
    if left.get("push-to-hub"):
        screen.say("note: push-to-hub is not read: --push OWNER/NAME uploads the result")
    try:
        named, implied, refused = dict(_computed(left)), dict[str, Any](), list[str]()
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}{error}") from None
    for key, value in left.items():
        name = FIELD_OF.get(key)
        meanings = [of for keys, of in MEANINGS.items() if not {key, name}.isdisjoint(keys.split())]
        meaning = [ours for of in meanings for glob, ours in of.items() if fnmatch(_text(value), glob)]
        is_off = value is False and not (name and table(Options)[name].metadata["parse"] is bool)
        if meaning and not (name == "adapter" and Path(str(value)).is_dir()):
            implied |= meaning[0]
        elif name in named and value not in EMPTY:
            refused.append(f"{key} (it is given twice)")
        elif name and value not in EMPTY and not is_off:
            named[name] = value
        elif value not in EMPTY and not (is_off and not meanings) and not any(fnmatch(key, k) for k in NOTHING.split()):
            refused.append(f"{key} {_text(value)}")
    if refused:
        shown = ", ".join(word[:60] for word in refused[:10]) + f" and {len(refused) - 10} more" * (len(refused) > 10)
        raise InputError(f"{where}these have no meaning here: {shown}. Leave them out, or see --help.")
    return {name: value for name, value in implied.items() if name != "lora" or "adapter" not in named} | named


def _computed(left: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Takes what is computed from several keys out of `left`; gives it by option. Raises ValueError."""
    pop = lambda *names: next((value for name in names if (value := left.pop(name, None)) not in EMPTY), None)
    times = pop("gradient-accumulation-steps", "grad-accumulation-steps")
    of_axolotl = ("micro-batch-size", "batch-size") if times or "base-model" in left else ()
    if (size := pop("per-device-train-batch-size", *of_axolotl)) is not None:
        yield "batch_size", whole(str(size)) * whole(str(times or 1))
    elif times:  # of a batch of unknown size: refused, unless it is 1
        left["gradient-accumulation-steps"] = times
    if (betas := (pop("adam-beta1"), pop("adam-beta2"))) != (None, None):
        yield "betas", [betas[0] or 0.9, betas[1] or 0.999]
    for key, name in (("evals-per-epoch", "eval_every"), ("saves-per-epoch", "save_every")):
        if (count := pop(key)) is not None:
            epochs = left.get("num-epochs") or left.get("num-train-epochs") or 1
            yield name, 1 / max(1.000001, float(epochs) * float(count))
    full, adapter = "full" in (left.get("finetuning-type"), left.get("adapter")), left.get("adapter-name-or-path")
    for key in [key for key in left if key.startswith("lora-") and (full or adapter or left.get("lora-model-dir"))]:
        if full or key not in ("lora-model-dir", "lora-dropout"):
            del left[key]
    for key in {"dataset", "datasets"} & left.keys():
        left[key] = list(_paths(left[key], Path(str(left.get("dataset-dir") or "data"))))


def _paths(sets: Any, folder: Path) -> Iterator[str]:
    """Paths of axolotl's data sets, or of names in LLaMA-Factory's dataset_info.json."""
    info = dict[str, Any]()
    with suppress(OSError, ValueError):
        info = json.loads((folder / "dataset_info.json").read_text())
    for each in sets if isinstance(sets, list) else str(sets).split(",") if sets else ():
        name = str(each.get("path", "?") if isinstance(each, dict) else each).strip()
        yield str(folder / info[name]["file_name"]) if name in info else name


def _text(value: Any) -> str:
    return ",".join(map(_text, value)) if isinstance(value, list) else str(value).lower()
