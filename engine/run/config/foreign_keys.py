"""Keys of configuration files while they are read, and keys that mean something together, such as a batch's size and
how often it is accumulated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.run.config.option_names import field_of
from trireme.storage.untrusted import parse_json, read_small, shown

MOST = 200  # keys within keys, and values shown of a list


class Item(NamedTuple):
    """A key as it is written, the key as options are written, and its value."""

    key: str
    name: str
    value: Any

    @property
    def text(self) -> str:
        return text_of_value(self.value)


@dataclass
class Read:
    """What has been read of a file, and the keys that have not."""

    left: list[Item]  # not looked at yet
    typed: Container[str] = ()  # options that win
    given: list[tuple[str, str, Any]] = field(default_factory=list)  # (key, field, value)
    ignored: list[str] = field(default_factory=list)  # keys
    said: list[str] = field(default_factory=list)  # lines
    wrong: list[str] = field(default_factory=list)  # a sentence for each key

    def take(self, *names: str) -> Item | None:
        """Takes the key with one of these names; of several the last."""
        found = self.take_all("|".join(map(re.escape, names)) or "(?!)")
        if len(found) > 1:
            self.wrong.append(f"{found[-1].key} and {found[0].key} say the same. Leave one out")
        return found[-1] if found else None

    def take_if(self, fits: Callable[[Item], object], *names: str) -> Item | None:
        """As take, unless the key does not fit."""
        item = self.take(*names)
        if item is None or fits(item):
            return item
        self.left.append(item)
        return None

    def take_all(self, names: str) -> list[Item]:
        """Takes the keys whose whole name matches a regular expression."""
        found = [item for item in self.left if re.fullmatch(names, item.name)]
        self.left = [item for item in self.left if not re.fullmatch(names, item.name)]
        return found

    def value(self, name: str) -> Any:
        """The value of a key, which is not taken; None without it."""
        return next((item.value for item in self.left if name in (item.name, field_of(item.name))), None)

    def give(self, item: Item, name: str, value: Any) -> None:
        self.given.append((item.key, name, value))


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def text_of_value(value: Any) -> str:
    """A value as text; of a list, its plain values."""
    if isinstance(value, list):
        return ",".join("…" if isinstance(v, (list, dict, set)) else text_of_value(v) for v in value[:MOST])
    if isinstance(value, (dict, set)):
        return "{…}"
    try:
        return str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:
        return "…"  # a number of thousands of digits


def number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_file(name: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(name).exists()
    return False


# ---------------------------------------------------------------- keys that mean something together


LARGEST = 1 << 40  # of a batch and of steps
KINDS_OF_ADAPTERS = ("lora", "qlora", "dora", "full")
OF_ADAPTERS = "lora|(lora|qlora|peft)-.*"
LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}  # of stage dpo
KINDS = ("json", "csv", "parquet", "text")  # paths of data sets whose files are named next to them


def _batch(found: Read) -> None:
    """The number of sequences of a step, on one GPU."""
    accumulated = found.take("gradient-accumulation-steps", "grad-accumulation-steps")
    size = found.take("per-device-train-batch-size")
    if size is None and (accumulated or found.value("base-model")):
        size = found.take("micro-batch-size") or (found.take("batch-size") if accumulated else None)
    if size is None:
        found.left += [accumulated] if accumulated else []
        return
    whole = 1
    for item in filter(None, (size, accumulated)):
        times = number(item.value) or 0
        if not 1 <= times < LARGEST or times != int(times):
            found.wrong.append(f"{item.key} {shown(item.text)}: expected a whole number of at least 1")
            return
        whole *= int(times)
    found.give(size, "batch_size", whole)
    if accumulated and "batch_size" not in found.typed:
        product = f"{size.key} {size.text} x {accumulated.key} {accumulated.text}"
        found.said.append(f"read     {product} as --batch-size {whole}")


def _betas(found: Read) -> None:
    first, second = found.take("adam-beta1"), found.take("adam-beta2")
    if item := first or second:
        found.give(item, "betas", [first.value if first else 0.9, second.value if second else 0.999])


def _warmup(found: Read) -> None:
    """Of a share and a number of steps the number counts, unless it is 0."""
    if found.value("warmup-steps") is None or found.value("warmup-ratio") is None:
        return
    unused = found.take("warmup-steps" if number(found.value("warmup-steps")) == 0 else "warmup-ratio")
    found.ignored += [unused.key] if unused else []


def _optimizer(found: Read) -> None:
    narrow = re.compile(r"(paged_|ao_)?adamw_(bnb_|torch_)?8bit|\S+\.(paged)?adamw8bit")
    if item := found.take_if(lambda item: narrow.fullmatch(item.text.lower()), "optim", "optimizer"):
        found.give(item, "adam_bits", 8)


def _packing(found: Read) -> None:
    if item := found.take_if(lambda item: item.value is False, "packing", "sample-packing"):
        found.give(item, "no_pack", True)


def _template_variables(found: Read) -> None:
    """Variables of the chat template as an object; LLaMA-Factory and ms-swift have a single one."""
    item = found.take_if(lambda item: isinstance(item.value, dict), "chat-template-kwargs")
    thinking = found.take("enable-thinking")
    given = item.value if item else {}
    given = given | ({"enable_thinking": thinking.value} if thinking and thinking.value is not None else {})
    if given and (first := item or thinking):
        try:
            found.give(first, "chat_template_kwargs", json.dumps(given, default=str))
        except TypeError:  # a date
            found.wrong.append(f"{first.key}: one of its keys is not a string. Write it in quotes")


def _method(found: Read) -> None:
    """The method: by LLaMA-Factory's stage (dpo with a loss), axolotl's reward model, or ms-swift's task_type."""
    for name, method in (("reward-model", "reward"), ("task-type", "classify")):
        item = found.take(name)
        if item and (item.value is True or item.text.lower() == "seq_cls"):
            found.give(item, "method", method)
        elif item and item.text.lower() in ("false", "causal_lm", ""):
            found.ignored.append(item.key)
        elif item:
            found.left.append(item)
    stage, loss = found.take("stage"), found.take("pref-loss")
    word, name = (item.text.lower() if item else "" for item in (stage, loss))
    others = {"kto": "kto", "rm": "reward"}
    if stage and word in ("dpo", *others):
        found.give(stage, "method", others.get(word, LOSSES.get(name, "dpo")))
    elif stage:
        found.left.append(stage)
    if loss and word == "dpo" and name in LOSSES:
        found.ignored.append(loss.key)
    elif loss:
        found.left.append(loss)


def _base(found: Read) -> None:
    """The base of QLoRA in the 4 bits of bitsandbytes, by its own keys."""
    bits, four = found.take("quantization-bit"), found.take("load-in-4bit")
    method = found.take("quantization-method", "quant-method")
    named = method is None or method.text.lower() in ("bnb", "bitsandbytes")
    if (item := bits or four) and named and (item.value is True or number(item.value) == 4):
        found.give(item, "base", "nf4")
        found.ignored += [other.key for other in (four if bits else None, method) if other]
    else:
        found.left += [other for other in (bits, four, method) if other]


def _torchtune(found: Read) -> None:
    if made := found.take("model.-component-"):
        if "qlora" in made.text:
            found.give(made, "base", "nf4")
        else:
            found.ignored.append(made.key)
    modules, mlp = found.take("model.lora-attn-modules"), found.take("model.apply-lora-to-mlp")
    named = modules.value if modules and isinstance(modules.value, list) else []
    targets = [text_of_value(name).replace("output_proj", "o_proj") for name in named]
    if mlp and mlp.value is True:
        targets += ["gate_proj", "up_proj", "down_proj"]
    if item := modules or mlp:
        found.give(item, "lora_targets", targets)


def _adapters(found: Read) -> None:
    """Whether adapters are trained, and which."""
    kind = found.take("finetuning-type", "fine-tune-type", "use-peft")
    if kind is None and found.value("adapter") in KINDS_OF_ADAPTERS:
        kind = found.take("adapter")
    word = kind.text.lower() if kind else ""
    if model := found.take("lora-model-dir", "adapter-name-or-path"):
        found.give(model, "adapter", model.value)
    if model or "adapter" in found.typed or word in ("full", "false"):
        found.ignored += [item.key for item in (*filter(None, [kind]), *found.take_all(OF_ADAPTERS))]
        return
    rank = found.value("lora")
    if kind and word in ("true", *KINDS_OF_ADAPTERS):
        if rank is None:
            rank = 16 if kind.name == "use-peft" else 8  # theirs without one
            found.give(kind, "lora", rank)
        if word == "dora":
            found.wrong.append(f"{kind.key} {word}: DoRA is not supported; write lora")
        elif word == "qlora" and all(name != "base" for _, name, _ in found.given):
            found.give(kind, "base", "nf4")
        else:
            found.ignored.append(kind.key)
    elif kind:
        found.left.append(kind)
    _alpha(found, kind, rank)
    if (linear := found.take("lora-target-linear")) and linear.value is True:
        found.give(linear, "lora_targets", ["all-linear"])


def _alpha(found: Read, kind: Item | None, rank: Any) -> None:
    """mlx-lm's scale, as alpha."""
    scale = found.take("lora-parameters.scale")
    if scale is None and kind and kind.name == "fine-tune-type":
        scale = Item(kind.key, kind.name, 20.0)
    if scale:
        found.give(scale, "lora_alpha", (number(scale.value) or 0.0) * (number(rank) or 0.0))


def _steps(found: Read) -> None:
    if per_epoch := found.take("max-steps-per-epoch"):
        epochs = found.take(*(item.name for item in found.left if field_of(item.name) == "epochs"))
        steps = (number(per_epoch.value) or 0) * (number(epochs.value) or 0 if epochs else 1)
        found.give(per_epoch, "max_steps", int(steps) if abs(steps) < LARGEST and steps == int(steps) else steps)
    if (best := found.take("load-best-model-at-end")) and best.value is True:
        found.give(best, "export", "best")


def _datasets(found: Read) -> None:
    """axolotl's lists of data, and the column with the text."""
    if "data" in found.typed:
        found.ignored += [item.key for item in found.take_all(r"datasets?(\..*)?|dataset-(dir|text-field)")]
    for kind, name in (("datasets", "data"), ("test-datasets", "val")):
        paths = found.take_all(rf"{kind}\.\d+\.path")
        files: list[Any] = []
        for item in paths:
            named = found.take(item.name.replace("path", "data-files"))
            value = named.value if named and item.value in KINDS else item.value
            files += value if isinstance(value, list) else [value]
        if len(files) > 1 and name == "val":
            found.wrong.append(f"{paths[1].key} {shown(paths[1].text)}: --val takes one file")
        elif files:
            found.give(paths[0], name, files if name == "data" else files[0])
    columns = {item.text: item for item in found.take_all(r"dataset-text-field|datasets\.\d+\.field")}
    for column, item in columns.items():
        if column == "text":
            found.ignored.append(item.key)
        else:
            found.give(item, "map", f"text={column}")
    source = found.take("dataset.source")
    if source and not (source.value in KINDS and found.value("data")):
        found.give(source, "data", source.value)
    if loader := found.take_if(lambda _: source or found.value("data"), "dataset.-component-"):
        found.ignored.append(loader.key)


def _named_data(found: Read) -> None:
    """LLaMA-Factory's data sets, by the names in its dataset_info.json."""
    folder, item = found.take("dataset-dir"), None
    if isinstance(found.value("dataset"), (str, list)):
        item = found.take("dataset")
    if item is None:
        return
    info = Path(folder.text if folder else "data") / "dataset_info.json"
    known = _info(info)
    names = [text_of_value(name) for name in item.value] if isinstance(item.value, list) else [item.text]
    if "," in item.text and not is_file(item.text):
        names = [name.strip() for name in item.text.split(",")]
    files = [str(info.parent / known[name]) if name in known else name for name in names]
    missing = [name for name in files if "." not in name and "/" not in name and not is_file(name)]
    if missing:
        found.wrong.append(f"{item.key} {shown(','.join(missing))}: not in {info}. Name the files: --data FILE")
    else:
        found.give(item, "data", files)


def _info(path: Path) -> dict[str, str]:
    """The file of each data set whose columns have the usual names; {} without such a file."""
    try:
        sets = parse_json(read_small(path, links=True), str(path))
    except (OSError, ValueError):
        return {}
    plain = {n: s for n, s in sets.items() if isinstance(s, dict) and set(s) <= {"file_name", "formatting"}}
    return {name: said["file_name"] for name, said in plain.items() if isinstance(said.get("file_name"), str)}


# In this order: some need what others have given.
STEPS = (
    _batch, _betas, _warmup, _optimizer, _packing, _template_variables, _method, _base, _torchtune, _adapters, _steps,
    _datasets, _named_data,
)  # fmt: skip
