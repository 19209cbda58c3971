"""Configuration files of other trainers: each key becomes an option, is named as ignored, or is refused with a hint.

They are those of LLaMA-Factory, axolotl, TRL, torchtune and mlx-lm. Keys within keys have dots, such as optimizer.lr.
Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from fnmatch import fnmatch
from typing import Any

from trireme.engine.run.config.foreign_keys import MOST, STEPS, Item, Read, is_empty, is_file, number, text_of_value
from trireme.engine.run.config.option_names import FIELDS, elsewhere, field_of, unknown
from trireme.storage.untrusted import shown

NESTED = re.compile(
    "checkpointer|(test-)?datasets|dataset(-val)?|loss|lora-parameters|lr-schedule(r|r-kwargs)?|metric-logger|model|"
    "optimizer(-config)?|profiler|special-tokens|tokenizer"
)
RENAMED = {
    "adapter-path": "out",
    "chat-template-path": "chat-template",
    "checkpointer.checkpoint-dir": "model",
    "clip-grad-norm": "max-grad-norm",
    "dataset-name": "data",
    "dataset.data-files": "data",
    "dataset.packed": "packing",
    "dataset.train-on-input": "train-on-inputs",
    "dataset-val.data-files": "val",
    "excess-length-strategy": "long",
    "keep-last-n-checkpoints": "keep",
    "lora-parameters.dropout": "lora-dropout",
    "lora-parameters.keys": "lora-targets",
    "lora-parameters.rank": "lora",
    "lr-schedule.name": "schedule",
    "lr-schedule.warmup": "warmup",
    "lr-scheduler.-component-": "schedule",
    "lr-scheduler.num-warmup-steps": "warmup",
    "model.apply-lora-to-output": "apply-lora-to-output",
    "model.lora-alpha": "lora-alpha",
    "model.lora-dropout": "lora-dropout",
    "model.lora-rank": "lora",
    "model.use-dora": "use-dora",
    "optimizer-config.adamw.betas": "betas",
    "optimizer-config.adamw.eps": "adam-epsilon",
    "optimizer-config.adamw.weight-decay": "weight-decay",
    "optimizer.-component-": "optimizer",
    "optimizer.betas": "betas",
    "optimizer.eps": "adam-epsilon",
    "optimizer.lr": "lr",
    "optimizer.weight-decay": "weight-decay",
    "run-val-every-n-steps": "eval-every",
    "save-every-n-steps": "save-every",
    "steps-per-eval": "eval-every",
    "tokenizer.max-seq-len": "seq-len",
    "torch-dtype": "dtype",
}
# Field -> values of others (globs) -> ours; None: they ask for nothing.
VALUES: dict[str, dict[str, str | None]] = {
    "chat_template": {"tokenizer_default*": None},
    "dtype": {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float32": "fp32", "torch.float32": "fp32"},
    "log": {"none": None},
    "long": {"truncate": "cut", "raise": "error"},
    "max_steps": {"-1": None},
    "patience": {"0": None},
    "schedule": {
        "constant_with_warmup": "constant",
        "cosine_decay": "cosine",
        "cosine_with_min_lr": "cosine",
        "*.get_cosine_schedule_with_warmup": "cosine",
    },
    "train": {"true": None},
    "val": {"0": None, "0.0": None},
}
NOTHING = ("none", "no", "null", "false", "disabled")


def read_keys(pairs: Iterable[tuple[str, Any]], typed: Container[str]) -> Read:
    """The options of a file's keys and values, `pairs`. `typed`: options that replace them."""
    items = [Item(key, key.replace("_", "-"), value) for key, value in _flat(pairs)]
    items = [item._replace(name=RENAMED.get(item.name, item.name)) for item in items]
    found = Read([item for item in items if not is_empty(item.value)], typed)
    found.ignored += [i.key for i in items if is_empty(i.value) and not (_field(i) or elsewhere(i.name))]
    if any(i.name == "adapter" and i.value is None for i in items) and found.value("lora-r") is not None:
        found.left.append(Item("adapter", "finetuning-type", "full"))  # axolotl's word for it
    for step in STEPS:
        step(found)
    for item in found.left:
        _single(found, item)
    return found


def _flat(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Keys within the keys of NESTED, with dots. There may be few: a few bytes of aliases can expand to gigabytes."""
    left = MOST

    def inner(key: str, value: Any) -> Iterator[tuple[str, Any]]:
        nonlocal left
        left -= 1
        if isinstance(value, dict) and value and left > 0 and all(isinstance(k, str) for k in value):
            for k, v in value.items():
                yield from inner(f"{key}.{k}", v)
        elif isinstance(value, list) and left > 0 and value and all(isinstance(v, dict) for v in value):
            for i, v in enumerate(value):
                yield from inner(f"{key}.{i}", v)
        else:
            yield key, value

    for key, value in pairs:
        yield from inner(key, value) if NESTED.fullmatch(key.replace("_", "-")) else [(key, value)]


def _field(item: Item) -> str | None:
    return None if "." in item.name else field_of(item.name)


def _matches(value: Any, globs: str) -> bool:
    """Whether a value, or each value of a list, is one of these."""
    texts = [text_of_value(v).lower() for v in (value if isinstance(value, list) else [value])]
    return all(any(fnmatch(text, glob) or _equal(text, glob) for glob in globs.split()) for text in texts)


def _equal(text: str, other: str) -> bool:
    found = number(text)
    return found is not None and found == number(other)


def _single(found: Read, item: Item) -> None:
    """Reads a key that has a meaning by itself."""
    name, theirs = _field(item), None if _field(item) else elsewhere(item.name)
    if name:
        _own(found, item, name)
    elif theirs and theirs.done and _matches(item.value, theirs.done):
        if theirs.told:
            found.said.append(f"ignored  {item.key} {shown(item.text)}: {theirs.answer}")
        else:
            found.ignored.append(item.key)
    elif theirs:
        if theirs.done == "true" or not (item.text.lower() in NOTHING or number(item.value) == 0):
            found.wrong.append(f"{item.key} {shown(item.text)}: {theirs.answer}")
    elif item.value is False:
        found.ignored.append(item.key)
    else:
        found.wrong.append(unknown(item.key))


def _own(found: Read, item: Item, name: str) -> None:
    """Reads a key that is an option here."""
    values = VALUES.get(name, {})
    glob = next((glob for glob in values if fnmatch(item.text.lower(), glob)), None)
    if (
        glob is not None
        and values[glob] is None
        or (item.value is False and FIELDS[name].metadata["parse"] is not bool)
    ):
        return
    wrong = _wrong(item, name)
    if wrong:
        found.wrong.append(f"{item.key} {shown(item.text)}: {wrong}")
    elif name == "chat_template" and not (_matches(item.value, "chatml plain *.* */*") or is_file(item.text)):
        found.said.append(f"ignored  {item.key} {shown(item.text)}: the checkpoint's own chat template is used")
    else:
        found.give(item, name, item.value if glob is None else values[glob])


def _wrong(item: Item, name: str) -> str:
    """What is wrong with a value that the option does not take; "" if nothing."""
    if name == "val" and (number(item.value) or 0) >= 1:
        return "--val takes a file, or a share of --data such as 0.02"
    if name == "log" and not _matches(item.value, "tensorboard wandb trace *,*"):
        return "--log takes tensorboard, wandb, mlflow, comet and trace; leave it out"
    if name == "lora_targets" and re.search(r"[\\()|[\]*+?^$]", item.text):
        return "it is a regular expression; name the modules, as q_proj,v_proj"
    return "write what it stands for" if "${" in item.text else ""
