"""Options: one field each, with help, parser and names in other trainers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trireme.engine.amounts import MOST, number, positive, size, whole

BELOW_ONE = 0.999999
LEAST = 1e-9  # share of a run
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "polynomial", "wsd")
Parser = Callable[[str], Any]
GROUPS = ("model and data", "output", "training", "machine (all of it is detected)", "configuration files, dry runs")


@dataclass(frozen=True)
class Every:
    """An interval in steps, in seconds, or as a share of the run; all None: never."""

    steps: int | None = None
    seconds: float | None = None
    share: float | None = None

    def due(self, step: int, total_steps: int, seconds: float) -> bool:
        """Whether it is due after `step`, counted from 1. `seconds`: since the last time."""
        if self.steps:
            return step % self.steps == 0
        if self.seconds:
            return seconds >= self.seconds
        if self.share:
            stride = self.share * total_steps
            return int(step / stride + 1e-9) > int((step - 1) / stride + 1e-9)
        return False

    def count(self, total_steps: int) -> int:
        """How often it is due in the run; an interval in seconds counts as ten times."""
        if self.steps:
            return total_steps // self.steps
        if self.seconds:
            return min(10, total_steps)
        return min(int(1 / self.share + 1e-9), total_steps) if self.share else 0

    def __str__(self) -> str:
        """The text that `every` parses to this."""
        if not self.seconds:
            return str(self.steps or self.share or "never")
        whole = self.seconds % 60 == 0
        return str(self.seconds / 60 if whole else self.seconds).removesuffix(".0") + ("min" if whole else "s")


# ---------------------------------------------------------------- parsers, raise ValueError


def every(text: str) -> Every:
    """Parses `500` (steps), `0.1` (of the run), `30min` (s, min, h) or `never`."""
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) ?(s|min|h)?", text.strip())
    if text.strip() in ("never", "0"):
        return Every()
    if match:
        value, unit = float(match[1]), match[2]
        if unit:
            seconds = value * {"s": 1, "min": 60, "h": 3600}[unit]
            if 0 < seconds <= MOST:
                return Every(seconds=seconds)
        elif LEAST <= value < 1:
            return Every(share=value)
        elif 1 <= value <= MOST and value == int(value):
            return Every(steps=int(value))
    raise ValueError(f"{text!r} is not an interval; write 500 (steps), 0.1 (of the run), 30min or never")


def integral(text: str) -> int:
    """Parses a whole number, also written as 100.0 or 1e2."""
    if not float(text).is_integer():
        raise ValueError(f"{text!r} is not a whole number")
    return int(float(text))


def one_of(*values: Any) -> Parser:

    def parse(text: str) -> Any:
        for value in values:
            if text == str(value):
                return value
        raise ValueError(f"{text!r} is not one of {', '.join(map(str, values))}")

    return parse


def either(*parsers: Parser, expected: str) -> Parser:
    """A parser that takes the result of the first of several that accepts the text. `expected`: describes them all."""

    def parse(text: str) -> Any:
        for parser in parsers:
            with suppress(ValueError):
                return parser(text)
        raise ValueError(f"{text!r} is not {expected}")

    return parse


def listed(parser: Parser, like: str = "") -> Parser:
    """A parser of values separated by commas, as many as `like` has."""

    def parse(text: str) -> tuple[Any, ...]:
        values = [part for part in text.strip("()[] ").split(",") if part] if like else text.split(",")
        if like and len(values) != len(like.split(",")):
            raise ValueError(f"{text!r} does not have the form {like}")
        return tuple(parser(value.strip()) for value in values)

    return parse


def labels_of(text: str) -> tuple[str, ...]:
    """Parses names of classes, or their number: then they are named as in transformers."""
    if text.isascii() and text.isdigit():
        return tuple(f"LABEL_{i}" for i in range(number(2, 1 << 16, int)(text)))
    names = tuple(part.strip() for part in text.split(","))
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise ValueError(
            f"{text[:60]!r} is neither a number of classes nor two or more different names, such as negative,positive"
        )
    return names


def json_object(text: str) -> str:
    """Parses a JSON object; returns it as text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f'{text[:60]!r} is not a JSON object, such as {{"enable_thinking": false}}')
    return json.dumps(value, sort_keys=True)


def named(text: str) -> str:
    """Any text but an empty one, as a shell gives for a variable that is not set."""
    if not text.strip():
        raise ValueError("it is empty; leave the option out")
    return text


def _option(group: str, text: str, default: Any = None, parse: Parser = named, **more: Any) -> Any:
    """A field with help for the command line. `more`: metavar or choices; also: names elsewhere; repeat: each use adds
    a value.
    """
    if choices := more.pop("choices", ()):
        parse, more["metavar"] = one_of(*choices), "{" + ",".join(choices) + "}"
    return field(default=default, metadata={"group": group, "help": text, "parse": parse, **more})


_data, _output, _training, _machine, _instead = (partial(_option, group) for group in GROUPS)


# ---------------------------------------------------------------- the options


@dataclass(frozen=True)
class Options:
    """All options of a run. None or empty: chosen by data, model or machine."""

    model: str = _data("Hugging Face checkpoint", "", metavar="DIR", also="model-name-or-path base-model")
    data: tuple[str, ...] = _data(
        "files, folders or quoted patterns to train on; repeat the option to mix several",
        (),
        metavar="FILE[:WEIGHT]",
        also="dataset",
        repeat=True,
    )
    val: str | None = _data(
        "held-out data for evaluation: a file, or a share of --data such as 0.02",
        metavar="FILE",
        also="val-size val-set-size",
    )
    map: str | None = _data("names of your columns: prompt=question,completion=answer", metavar="OURS=YOURS")
    seq_len: int | None = _data(
        "tokens per sequence [2048, or the model's maximum if that is less]",
        parse=number(2, kind=int),
        metavar="N",
        also="max-length cutoff-len max-seq-length sequence-len max-seq-len",
    )
    long: str | None = _data(
        "what to do with rows longer than --seq-len [text: split, else cut]",
        choices=("cut", "drop", "split", "error"),
    )
    rope_factor: float | None = _data(
        "extend the context length by this factor (YaRN); written to OUT's config.json",
        parse=number(1),
        metavar="X",
    )
    no_pack: bool = _data("do not pack: one row per sequence", False, parse=bool)
    skip_bad: bool = _data("skip and count rows that cannot be read, instead of stopping", False, parse=bool)
    max_samples: int | None = _data("use only the first N rows of each file of --data [all]", parse=whole, metavar="N")
    show_example: int = _data(
        "number of examples to print, with the trained part in [..]", 1, parse=number(0, kind=int), metavar="N"
    )
    tokenizer: str | None = _data("folder of another tokenizer", metavar="DIR", also="tokenizer-name-or-path")
    chat_template: str | None = _data("another chat template: a .jinja file, chatml or plain", metavar="FILE")
    system: str | None = _data(
        "system message of chats that have none", metavar="TEXT", also="default-system default-system-message"
    )
    chat_template_kwargs: str | None = _data(
        "variables of the chat template, such as '{\"enable_thinking\": false}'",
        parse=json_object,
        metavar="JSON",
    )

    out: str = _output("output folder [runs/NAME, with the checkpoint's name]", "", metavar="DIR", also="output-dir")
    store: tuple[str, ...] = _output(
        "folders for weights, moments and snapshots, one on each drive [OUT/store]",
        (),
        parse=listed(named),
        metavar="DIR[,DIR]",
    )
    save_every: Every = _output(
        "interval of snapshots: 500 (steps), 0.1 (of the run), 30min, never",
        Every(seconds=1800.0),
        parse=every,
        metavar="WHEN",
        also="save-steps",
    )
    eval_every: Every = _output(
        "interval of evaluations on --val, in the same form",
        Every(share=0.1),
        parse=every,
        metavar="WHEN",
        also="eval-steps",
    )
    eval_tokens: int | None = _output(
        "tokens of --val per evaluation [such that evaluations take a tenth of the run]",
        parse=whole,
        metavar="N",
    )
    export: str = _output(
        "write the last weights, or those with the lowest loss on --val", "last", choices=("last", "best")
    )
    export_every: Every = _output(
        "interval of complete checkpoints in OUT/step-N", Every(), parse=every, metavar="WHEN"
    )
    patience: int | None = _output(
        "stop after N evaluations without improvement [never]",
        parse=whole,
        metavar="N",
        also="early-stopping-patience",
    )
    keep: int = _output("number of snapshots to keep", 1, parse=whole, metavar="N", also="save-total-limit")
    log: tuple[str, ...] = _output(
        "also log to tensorboard, wandb, mlflow, comet; trace: a timeline of all tasks",
        (),
        parse=listed(named),
        metavar="NAME[,NAME]",
        also="report-to",
    )
    push: str | None = _output(
        "upload OUT to a private repository of the Hugging Face hub, with a model card", metavar="OWNER/NAME"
    )
    resume: str | None = _output(
        "continue RUN, or the latest run in runs/", parse=str, metavar="RUN", also="resume-from-checkpoint"
    )

    method: str = _training(
        "fine-tuning (sft), learning from preferences (dpo to kto), a reward model or a classifier",
        "sft",
        choices=("sft", "dpo", "ipo", "orpo", "simpo", "kto", "reward", "classify"),
        also="rl",
    )
    labels: tuple[str, ...] = _training(
        "classify: names or number of the classes [from the checkpoint, else from the data]",
        (),
        parse=labels_of,
        metavar="NAME,NAME",
        also="num-labels",
    )
    center_rewards_coefficient: float | None = _training(
        "reward: weight of the squared sum of a pair's rewards [0]", parse=number(0), metavar="X"
    )
    beta: float | None = _training(
        "methods of preferences: beta of the loss [0.1]",
        parse=positive,
        metavar="X",
        also="pref-beta rl-beta dpo-beta kto-beta orpo-alpha orpo-beta",
    )
    label_smoothing: float | None = _training(
        "label smoothing of the cross-entropy; dpo, simpo: share of wrong pairs [0]",
        parse=number(0, 0.499999),
        metavar="X",
        also="dpo-label-smoothing label-smoothing-factor",
    )
    simpo_gamma: float | None = _training("simpo: target margin of the rewards [0.5]", parse=number(0), metavar="X")
    desirable_weight: float | None = _training(
        "kto: weight of good answers [1]",
        parse=positive,
        metavar="X",
        also="kto-chosen-weight kto-desirable-weight",
    )
    undesirable_weight: float | None = _training(
        "kto: weight of bad answers [1]",
        parse=positive,
        metavar="X",
        also="kto-rejected-weight kto-undesirable-weight",
    )
    teacher: str | None = _training(
        "distillation: also learn from the most likely tokens of this checkpoint, or from an output of `trireme score`",
        metavar="DIR",
        also="teacher-model teacher-model-name-or-path",
    )
    distill_weight: float | None = _training(
        "weight of the teacher in the loss; that of the labels is 1 - X [0.5]",
        parse=number(0, 1),
        metavar="X",
    )
    temperature: float | None = _training(
        "temperature of the distributions of teacher and model [1]",
        parse=number(0.01, 100),
        metavar="X",
        also="kd-temperature distill-temperature",
    )
    top_k: int | None = _training(
        "number of the teacher's most likely tokens per label [64]",
        parse=number(1, 256, kind=int),
        metavar="K",
    )
    epochs: float | None = _training(
        "passes over the data [text 1, preferences 1, chats 3]",
        parse=positive,
        metavar="X",
        also="num-train-epochs num-epochs",
    )
    max_steps: int | None = _training("number of steps, instead of --epochs", parse=whole, metavar="N", also="iters")
    batch_size: int = _training("sequences per optimizer step", 16, parse=whole, metavar="N")
    micro_batch: str | int = _training(
        "sequences that are computed at once",
        "auto",
        parse=either(one_of("auto"), whole, expected="auto, or a whole number of at least 1"),
        metavar="N",
        also="micro-batch-size",
    )
    lr: float | None = _training(
        "peak learning rate [1e-5; 2e-5 below 3B parameters; adapters 2e-4; preferences 1e-6, adapters 1e-5]",
        parse=positive,
        metavar="X",
        also="learning-rate",
    )
    schedule: str = _training(
        "learning rate after warm-up: cosine (ends at 10 %), linear, constant, polynomial, wsd",
        "cosine",
        parse=one_of(*SCHEDULES),
        metavar="NAME",
        also="lr-scheduler-type lr-scheduler",
    )
    warmup: float = _training(
        "length of the warm-up: a share of the run (below 1), or steps",
        0.03,
        parse=either(number(0, BELOW_ONE), number(1, kind=integral), expected="a share (below 1) or a number of steps"),
        metavar="X",
        also="warmup-steps warmup-ratio",
    )
    weight_decay: float | None = _training(
        "weight decay; not applied to norms and biases [0.01; adapters 0]", parse=number(0), metavar="X"
    )
    betas: tuple[float, float] = _training(
        "beta1 and beta2 of AdamW",
        (0.9, 0.95),
        parse=listed(number(0, BELOW_ONE), "0.9,0.95"),
        metavar="X,X",
        also="adam-betas",
    )
    adam_bits: int | None = _training(
        "bits of each AdamW moment: 32, 16 or 8 [32]", parse=one_of(32, 16, 8), metavar="N"
    )
    lora: int | None = _training(
        "train LoRA adapters of this rank (16 is usual); the model is frozen",
        parse=whole,
        metavar="R",
        also="lora-r lora-rank",
    )
    lora_alpha: float | None = _training("adapters are scaled by alpha / R [2 R]", parse=positive, metavar="X")
    rslora: bool = _training(
        "rsLoRA: scale by alpha / sqrt(R); the default alpha is then 8",
        False,
        parse=bool,
        also="use-rslora peft-use-rslora",
    )
    loraplus: float | None = _training(
        "LoRA+: ratio of the learning rates of B and A (16 is usual)",
        parse=number(1, 1024),
        metavar="X",
        also="loraplus-lr-ratio",
    )
    lora_dropout: float | None = _training(
        "dropout of the adapters' inputs [0; with --adapter that of the adapter]",
        parse=number(0, BELOW_ONE),
        metavar="X",
    )
    lora_targets: tuple[str, ...] = _training(
        "matrices with adapters, such as q_proj, experts [all; mixtures of experts: attention]",
        (),
        parse=listed(named),
        metavar="NAME[,NAME]",
        also="lora-target lora-target-modules",
    )
    base: str | None = _training(
        "quantize the frozen matrices of the blocks while loading, as QLoRA does",
        choices=("nf4", "fp8", "mxfp4"),
    )
    train: tuple[str, ...] = _training(
        "train only these tensors, such as '*.mlp.*'", (), parse=listed(named), metavar="GLOB[,GLOB]"
    )
    freeze: tuple[str, ...] = _training(
        "do not train these tensors, such as '*embed*'", (), parse=listed(named), metavar="GLOB[,GLOB]"
    )
    router_aux: float = _training(
        "weight of the load-balancing loss of experts; 0: none", 0.0, parse=number(0), metavar="X"
    )
    adapter: str | None = _training("train this adapter further, a folder in peft's format", metavar="DIR")
    merge: bool = _training(
        "with adapters: also write OUT/merged, the model with the adapters added", False, parse=bool
    )
    neftune: float | None = _training(
        "NEFTune: noise on embeddings of up to alpha / sqrt(tokens x width) (5 is usual)",
        parse=number(0),
        metavar="ALPHA",
        also="neftune-noise-alpha noisy-embedding-alpha neftune-alpha",
    )
    max_grad_norm: float = _training(
        "clip the global gradient norm; 0: no clipping",
        1.0,
        parse=number(0),
        metavar="X",
        also="clip gradient-clipping",
    )
    seed: int = _training(
        "seed of the data's order, of noise and of dropout",
        42,
        parse=number(0, 2**32 - 1, kind=int),
        metavar="N",
    )

    device: str = _machine("device to compute on", "auto", choices=("auto", "cuda", "cpu"))
    dtype: str = _machine(
        "number format of the computation [bf16 on a GPU, else fp32]",
        "auto",
        choices=("auto", "bf16", "fp32", "fp8"),
    )
    gpus: str | int = _machine(
        "number of GPUs, or all; on a CPU they are emulated",
        1,
        parse=either(one_of("all"), whole, expected="all, or a whole number of at least 1"),
        metavar="N",
        also="num-gpus",
    )
    gpu_memory: int | None = _machine(
        "hard limit of each GPU, such as 24GiB [the free memory]", parse=size, metavar="SIZE"
    )
    ram: int | None = _machine("hard limit of this process [85 % of what it may use]", parse=size, metavar="SIZE")
    optimizer_mode: str = _machine(
        "whether AdamW overlaps with backward or with the next forward",
        "auto",
        choices=("auto", "backward", "forward"),
    )
    plan: str | None = _machine("use this plan, a JSON file, instead of searching for one", metavar="FILE")

    config: str | None = _instead("read options from a YAML file; the command line overrides them", metavar="FILE")
    dry_run: bool = _instead(
        "print report and plan, then stop; needs only config.json, and no --data", False, parse=bool
    )
    assume: str | None = _instead(
        "dry run for another machine: gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5,bus=x8", metavar="PARTS"
    )
    shape: str | None = _instead(
        "dry run for a model by name: llama-3.3-70b (an unknown name lists all)", metavar="NAME"
    )
    demo: bool = _instead("train a small generated model on generated text, in a minute", False, parse=bool)

    @property
    def trace(self) -> bool:
        return "trace" in self.log

    def warmup_steps(self, total_steps: int) -> int:
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * total_steps)


def store_folders(given: Sequence[str], out: Path) -> list[Path]:
    """The folders of a run's store: those of --store, or one in its output."""
    return [Path(folder) for folder in given] or [out / "store"]
