"""What an option is called: its flag, its names in other trainers, and what to say of theirs without an equal here."""

from __future__ import annotations

import difflib
from dataclasses import fields
from fnmatch import fnmatch

from trireme.engine.run.options import Options
from trireme.models.config import InputError

FIELDS = {f.name: f for f in fields(Options)}
_ALIASES = {alias: f.name for f in fields(Options) for alias in f.metadata.get("also", "").split()}

# Answer -> options and patterns of other trainers without an equal here.
ELSEWHERE = {
    "--batch-size is the sequences of a whole step; micro-batches are planned": (
        "per-device-train-batch-size gradient-accumulation-steps"
    ),
    "it is that of training; leave it out": "per-device-eval-batch-size eval-batch-size",
    "what is kept, swapped or recomputed is planned; leave it out": "gradient-checkpointing*",
    "every step is logged; leave it out": "logging-*",
    "--betas 0.9,0.95 sets both": "adam-beta1 adam-beta2",
    "it is 1e-8; leave it out": "adam-epsilon",
    "--dtype bf16, which is the default on a GPU": "bf16 pure-bf16 tf32",
    "fp16 is not supported; --dtype bf16 is the default on a GPU": "fp16",
    "sequences are packed unless --no-pack is given": (
        "packing sample-packing eval-sample-packing pad-to-sequence-len group-by-length"
    ),
    "offloading needs no configuration here; leave it out": "deepspeed*",
    "--gpus N, or torchrun for several hosts; leave it out": "fsdp* ddp-*",
    "the optimizer is AdamW; leave it out": "optim optimizer",
    "an output folder is never overwritten; remove it yourself, or name another --out": "overwrite-output-dir",
    "it is supervised fine-tuning; leave it out": "stage",
    "preference training is not supported": "rl dpo-* pref-* kto-*",
    "adapters have no dropout here; leave it out": "lora-dropout",
    "DoRA is not supported; --lora alone": "*use-dora",
    "write an alpha of so much times the root of the rank: --lora-alpha": "*use-rslora",
    "--train and --freeze take globs over names of tensors": "unfrozen-parameters freeze-*",
    "--lora 16 trains adapters, and without it everything is trained": "finetuning-type lora-* qlora-* peft-*",
    "nothing is quantized; leave it out": "load-in-* quantization-*",
    "the checkpoint's own chat template is used, or a .jinja file of --chat-template": "template",
    "--data takes paths of files; the format is found from the keys": "datasets dataset-dir",
    "--val takes a file": "test-datasets eval-dataset",
    "leave it out": "do-train do-predict dataset-prepared-path overwrite-cache save-only-model",
    "--val is evaluated if given": "do-eval",
    "all cores are used; leave it out": "preprocessing-num-workers dataloader-* dataset-processes",
    "prompts are not trained on, and plain text is as a whole": "train-on-*",
    "attention is always flash attention; leave it out": "flash-att* xformers-attention sdp-attention",
    "--save-every and --eval-every take steps, a share of the run, minutes or never": "*-strategy *-per-epoch",
    "loss.svg is always drawn; leave it out": "plot-loss",
    "--log wandb, which reads its own settings from the environment": "wandb-*",
    "no code of a checkpoint is run; leave it out": "trust-remote-code",
    "the checkpoint's files say it; leave it out": "model-type tokenizer-type special-tokens",
    "--export best does that": "load-best-model-at-end",
    "nothing is uploaded; leave it out": "push-to-hub hub-*",
}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def resolve(name: str) -> str:
    """The field of an option or alias, without dashes. Raises InputError."""
    key = name.replace("_", "-")
    found = _ALIASES.get(key, key.replace("-", "_"))
    if found in FIELDS:
        return found
    if answer := next((text for text, names in ELSEWHERE.items() if any(fnmatch(key, n) for n in names.split())), ""):
        raise InputError(f"--{key} is not an option here: {answer}.")
    near = difflib.get_close_matches(key, [*_ALIASES, *(n.replace("_", "-") for n in FIELDS)], 1)
    if not near:
        raise InputError(f"unknown option --{name}. See --help.")
    same = f" (= {flag_of(_ALIASES[near[0]])})" if near[0] in _ALIASES else ""
    raise InputError(f"unknown option --{name}. Did you mean --{near[0]}{same}?")
