"""Every option of every command: one field each, with its help, parser and kind. Imports no torch.

Kinds, in `kind=`: `path`, made absolute where it is saved; `rows`, decides what the rows are, fixed in a run; `host`,
of this machine; `call`, of this call alone, not saved.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from trireme.engine.amounts import MOST, number, positive, size, whole
from trireme.models.config import InputError

Parser = Callable[[str], Any]
T = TypeVar("T", bound="Base")
BELOW_ONE, LEAST = 0.999999, 1e-6
SCHEDULES = ("cosine", "linear", "constant", "polynomial", "wsd")
METHODS = ("sft", "dpo", "ipo", "orpo", "simpo", "kto", "reward", "classify")
TEMPLATES = ("alpaca", "chatml", "gemma", "llama3", "mistral", "plain")

# ---------------------------------------------------------------- values, and their parsers, which raise ValueError


@dataclass(frozen=True)
class Every:
    """An interval in steps, in seconds, or as a share of the run; all None: never."""

    steps: int | None = None
    seconds: float | None = None
    share: float | None = None

    def due(self, step: int, total: int, seconds: float) -> bool:
        """Whether it is due after `step`, counted from 1. `seconds`: since the last time."""
        if self.steps:
            return step % self.steps == 0
        if self.seconds:
            return seconds >= self.seconds
        stride = (self.share or 0) * total
        return bool(stride) and int(step / stride + 1e-9) > int((step - 1) / stride + 1e-9)

    def times(self, done: int, total: int, seconds: float | None = None) -> int:
        """How often it is due in the rest of the run, which takes `seconds`; unknown ones count as ten times."""
        if self.seconds:
            return min(10, total - done) if seconds is None else int(seconds / self.seconds)
        return sum(self.due(step, total, 0.0) for step in range(done + 1, total + 1))

    def __str__(self) -> str:
        return f"{self.seconds!r}s" if self.seconds else str(self.steps or self.share or "never")


def every(text: str) -> Every:
    """Parses `500` (steps), `0.1` (of the run), `30min` (s, min, h) or `never`."""
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) ?(s|min|h)?", text.strip())
    value = float(match[1]) if match else LEAST
    if text.strip() in ("never", "no", "none") or value == 0:
        return Every()
    if match and match[2] and LEAST <= value <= MOST:
        return Every(seconds=value * {"s": 1, "min": 60, "h": 3600}[match[2]])
    if match and LEAST <= value < 1:
        return Every(share=value)
    if 1 <= value <= MOST and value.is_integer() and "." not in text:
        return Every(steps=int(value))
    raise ValueError(f"{text!r} is not an interval; write 500 (steps), 0.1 (of the run), 30min or never")


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty; leave the option out")
    return value


def one_of(*values: Any) -> Parser:
    """A parser of some words or numbers."""

    def parse(text: str) -> Any:
        with suppress(StopIteration):
            return next(value for value in values if text == str(value))
        raise ValueError(f"{text!r} is not one of {', '.join(map(str, values))}")

    return parse


def listed(parser: Parser = text, n: int | None = None) -> Callable[[str | list[str]], Any]:
    """A parser of values in a list, or in a text with commas between them; `n` of them if given."""

    def parse(value: str | list[str]) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in (value.strip("()[] ") if n else value).split(",")]
        if n not in (None, len(value)):
            raise ValueError(f"{', '.join(value)[:60]!r} is not {n} values with commas between them")
        return tuple(map(parser, value))

    return parse


def or_word(word: str, parser: Parser) -> Parser:
    """A parser of a word, or of what `parser` takes."""
    return lambda text: word if text == word else parser(text)


def warmup(text: str) -> float:
    """A share of the run (below 1), or a number of steps."""
    share = number(0)(text)
    return share if share < 1 else whole(text)


def labels(value: str | list[str]) -> tuple[str, ...]:
    """Names of classes, or their number: then they are named as in transformers."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return tuple(f"LABEL_{i}" for i in range(number(2, 1 << 16, int)(value)))
    names = listed()(value)
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"{','.join(names)[:60]!r} is neither a number of classes nor two or more different names")
    return names


def json_object(text: str) -> str:
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return json.dumps(value, sort_keys=True)
    raise ValueError(f'{text[:60]!r} is not a JSON object, such as {{"enable_thinking": false}}')


def gib_size(text: str) -> int:
    """As `amounts.size`; a number alone is GiB, or bytes where it is large."""
    alone = re.fullmatch(r"\d+\.?\d*", text)
    return size(f"{text}{'GiB' if float(text) < 1 << 20 else 'B'}" if alone else text)


# ---------------------------------------------------------------- fields


def option(
    group: str,
    help: str,
    default: Any = None,
    parse: Parser = text,
    *,
    metavar: str = "",
    kind: str = "",
    words: str = "",
    choices: tuple[Any, ...] = (),
    repeat: bool = False,
) -> Any:
    """A field. `words`: a pattern of what is a word and not a path; `repeat`: each use adds a value."""
    if choices:
        parse, metavar = one_of(*choices), "{" + ",".join(map(str, choices)) + "}"
    meta: dict[str, Any] = {"group": group, "help": help, "parse": bool if default is False else parse}
    meta |= {"metavar": metavar, "kind": frozenset(kind.split()), "words": words, "repeat": repeat}
    return field(default=default, metadata=meta)


GROUPS = (
    "model and data",
    "output",
    "training",
    "machine (all of it is detected)",
    "rarely needed",
    "instead of a run",
)
_data, _output, _train, _machine, _rare, _instead = (partial(option, group) for group in GROUPS)


def table(cls: type) -> dict[str, Field[Any]]:
    """The options of a command, by name."""
    return {f.name: f for f in fields(cls) if f.metadata}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Base:
    """What all commands share."""

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # names that the user chose

    @classmethod
    def of(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
        """Options from Python, YAML or words: texts are parsed, numbers too, so that they are checked. Raises
        InputError.
        """
        known, parsed = table(cls), dict[str, Any]()
        for name, value in values.items():
            if name not in known:
                raise InputError(f"{where}unknown option {name}. See --help.")
            try:
                if value is not None:
                    parsed[name] = converted(known[name], value)
            except ValueError as error:
                raise InputError(f"{where}{flag(name)}: {str(error).rstrip('.')}.") from None
        return cls(given=frozenset(parsed), **parsed)


def converted(f: Field[Any], value: Any) -> Any:
    """The value of an option that is given as text, number, list or as the value itself. Raises ValueError."""
    parse, several = f.metadata["parse"], isinstance(f.default, tuple)
    if isinstance(value, Every) or (isinstance(value, bool) and parse is bool):
        return value
    if isinstance(value, (bool, dict)) or parse is bool:
        raise ValueError(f"{str(value)[:60]} is not a value of it")
    if isinstance(value, (list, tuple)) and not several:
        raise ValueError(f"it takes one value, not {len(value)}")
    as_text = lambda v: os.fspath(v) if isinstance(v, os.PathLike) else str(v)
    if isinstance(value, (list, tuple)):
        return parse(list(map(as_text, value))) if value else ()
    return parse([as_text(value)] if f.metadata["repeat"] else as_text(value))


# ---------------------------------------------------------------- the options
# fmt: off

N, X = "N", "X"


@dataclass(frozen=True)
class Reading(Base):
    """How rows are read: of a run, and of a finished model."""

    map: str | None = _data("names of your columns: prompt=question,completion=answer", metavar="OURS=YOURS",
                            kind="rows")
    seq_len: int | None = _data("tokens per sequence [2048, or the model's maximum if that is less]", None,
                                number(2, kind=int), metavar=N)
    long: str | None = _data("what to do with rows longer than --seq-len [text: split, else cut]",
                             choices=("cut", "drop", "split", "error"), kind="rows")
    skip_bad: bool = _data("skip and count rows that cannot be read, instead of stopping", False, kind="rows")
    tokenizer: str | None = _data("folder of another tokenizer", metavar="DIR", kind="path rows")
    chat_template: str | None = _data(f"another chat template: a .jinja file, or {', '.join(TEMPLATES)}",
                                      metavar="FILE", kind="path rows", words="|".join(TEMPLATES))
    system: str | None = _data("system message of chats that have none", metavar="TEXT", kind="rows")
    chat_template_kwargs: str | None = _data("variables of the chat template, such as '{\"enable_thinking\": false}'",
                                             None, json_object, metavar="JSON", kind="rows")


@dataclass(frozen=True)
class Method(Base):
    """What is learned from the rows, also of an evaluation."""

    method: str = _train("fine-tuning (sft), preferences (dpo to kto), a reward model or a classifier", "sft",
                         choices=METHODS)
    beta: float | None = _train("preferences: beta of the loss [0.1]", None, positive, metavar=X)
    label_smoothing: float | None = _train("smoothing of the cross-entropy; dpo, simpo: share of wrong pairs [0]", None,
                                           number(0, 0.499999), metavar=X)
    simpo_gamma: float | None = _rare("simpo: target margin of the rewards [0.5]", None, number(0), metavar=X)
    desirable_weight: float | None = _rare("kto: weight of good answers [1]", None, positive, metavar=X)
    undesirable_weight: float | None = _rare("kto: weight of bad answers [1]", None, positive, metavar=X)
    center_rewards_coefficient: float | None = _rare("reward: weight of a pair's squared sum of rewards [0]", None,
                                                     number(0), metavar=X)


@dataclass(frozen=True)
class Machine(Base):
    """Where it is computed."""

    device: str = _machine("device to compute on", "auto", choices=("auto", "cuda", "cpu"), kind="host")
    dtype: str = _machine("number format of the computation [bf16 on a GPU, else fp32]", "auto",
                          choices=("auto", "bf16", "fp32", "fp8"))
    gpus: str | int = _machine("number of GPUs, or all; on a CPU they are emulated", 1, or_word("all", whole),
                               metavar=N, kind="host")
    gpu_memory: int | None = _machine("hard limit of each GPU, such as 24GiB [the free memory]", None, gib_size,
                                      metavar="SIZE", kind="host")
    ram: int | None = _machine("hard limit of this process [85 % of what it may use]", None, gib_size, metavar="SIZE",
                               kind="host")


@dataclass(frozen=True)
class Options(Reading, Method, Machine):
    """The options of a run. None or empty: chosen by data, model or machine."""

    model: str = _data("Hugging Face checkpoint: a folder, or OWNER/NAME on the hub", "", metavar="DIR", kind="path")
    data: tuple[str, ...] = _data("files, folders or quoted patterns to train on; repeat the option to mix several", (),
                                  listed(), metavar="FILE[:WEIGHT]", repeat=True, kind="path", words="-")
    val: str | None = _data("held-out data for evaluation: a file, or a share of --data such as 0.02", metavar="FILE",
                            kind="path rows", words=r"[\d.]+%?")
    rope_factor: float | None = _data("extend the context by this factor (YaRN); written to OUT's config.json", None,
                                      number(1), metavar=X)
    no_pack: bool = _data("do not pack: one row per sequence", False, kind="rows")
    max_samples: int | None = _data("use only the first N rows of each file of --data [all]", None, whole, metavar=N,
                                    kind="rows")
    show_example: int = _data("number of examples to print, with the trained part in [..]", 1, number(0, kind=int),
                              metavar=N)

    out: str = _output("output folder [the next free runs/NAME, with the checkpoint's name]", "", metavar="DIR",
                       kind="call")
    store: tuple[str, ...] = _output("folders for weights, moments and snapshots, one on each drive [OUT/.run/store]",
                                     (), listed(), metavar="DIR[,DIR]", kind="path host")
    save_every: Every = _output("interval of snapshots: 500 (steps), 0.1 (of the run), 30min, never",
                                Every(seconds=1800.0), every, metavar="WHEN")
    eval_every: Every = _output("interval of evaluations on --val, in the same form", Every(share=0.1), every,
                                metavar="WHEN")
    eval_tokens: int | None = _output("tokens of --val per evaluation [evaluations take a tenth of the run]", None,
                                      whole, metavar=N)
    export: str = _output("write the last weights, or those with the lowest loss on --val", "last",
                          choices=("last", "best"))
    export_every: Every = _output("interval of complete checkpoints in OUT/step-N", Every(), every, metavar="WHEN")
    patience: int | None = _output("stop after N evaluations without improvement [never]", None, whole, metavar=N)
    keep: int = _output("number of snapshots to keep", 1, whole, metavar=N)
    keep_state: bool = _output("keep the last snapshot of a finished run, so that --resume OUT --epochs N goes on",
                               False)
    log: tuple[str, ...] = _output("also log to tensorboard, wandb; trace: a timeline of all tasks", (),
                                   listed(one_of("tensorboard", "wandb", "trace")), metavar="NAME[,NAME]", kind="host")
    push: str | None = _output("upload OUT to a private repository of the Hugging Face hub", metavar="OWNER/NAME")
    resume: str | None = _output("continue RUN, or the latest unfinished run in runs/", None, str, metavar="RUN",
                                 kind="call")
    verbose: bool = _output("print all parts of the report, as a dry run does", False, kind="call")

    labels: tuple[str, ...] = _train("classify: names or number of the classes [from the checkpoint, else the data]",
                                     (), labels, metavar="NAME,NAME")
    teacher: str | None = _train("also learn from the likely tokens of this checkpoint, or of an output of `trireme "
                                 "score`", metavar="DIR", kind="path")
    distill_weight: float | None = _train("weight of the teacher in the loss; that of the labels is 1 - X [0.5]", None,
                                          number(0, 1), metavar=X)
    temperature: float | None = _train("temperature of the distributions of teacher and model [1]", None,
                                       number(0.01, 100), metavar=X)
    top_k: int | None = _train("number of the teacher's most likely tokens per label [64]", None,
                               number(1, 256, kind=int), metavar=N)
    epochs: float | None = _train("passes over the data [text 1, preferences 1, chats 3]", None, positive, metavar=X)
    max_steps: int | None = _train("number of steps, instead of --epochs", None, whole, metavar=N)
    batch_size: int = _train("sequences per optimizer step", 16, whole, metavar=N)
    micro_batch: str | int = _train("sequences that are computed at once", "auto", or_word("auto", whole), metavar=N)
    lr: float | None = _train("peak learning rate [1e-5; 2e-5 below 3B parameters; adapters 2e-4; preferences 1e-6, "
                              "adapters 1e-5]", None, positive, metavar=X)
    schedule: str = _train("learning rate after warm-up; cosine ends at 10 %", "cosine", choices=SCHEDULES)
    warmup: float = _train("length of the warm-up: a share of the run (below 1), or steps", 0.03, warmup, metavar=X)
    weight_decay: float | None = _train("weight decay; not applied to norms and biases [0.01; adapters 0]", None,
                                        number(0), metavar=X)
    betas: tuple[float, ...] = _train("beta1 and beta2 of AdamW", (0.9, 0.95), listed(number(0, BELOW_ONE), 2),
                                      metavar="X,X")
    adam_bits: int | None = _train("bits of each AdamW moment: 32, 16 or 8 [32]", choices=(32, 16, 8))
    lora: int | None = _train("train LoRA adapters of this rank (16 is usual); the model is frozen", None, whole,
                              metavar="R")
    lora_alpha: float | None = _train("adapters are scaled by alpha / R [2 R]", None, number(1e-6, 1e6), metavar=X)
    lora_dropout: float | None = _train("dropout of the adapters' inputs [0; with --adapter that of the adapter]", None,
                                        number(0, BELOW_ONE), metavar=X)
    lora_targets: tuple[str, ...] = _train("matrices with adapters, such as q_proj, experts [all; of a mixture of "
                                           "experts those of attention]", (), listed(), metavar="NAME[,NAME]")
    rslora: bool = _rare("rsLoRA: scale by alpha / sqrt(R); the default alpha is then 8", False)
    loraplus: float | None = _rare("LoRA+: ratio of the learning rates of B and A", None, number(1, 1024), metavar=X)
    base: str | None = _train("quantize the frozen matrices of the blocks while loading, as QLoRA does",
                              choices=("nf4", "fp8", "mxfp4"))
    train: tuple[str, ...] = _train("train only these tensors, such as '*.mlp.*'", (), listed(), metavar="GLOB[,GLOB]")
    freeze: tuple[str, ...] = _train("do not train these tensors, such as '*embed*'", (), listed(),
                                     metavar="GLOB[,GLOB]")
    router_aux: float = _rare("weight of the load-balancing loss of experts; 0: none", 0.0, number(0), metavar=X)
    adapter: str | None = _train("train this adapter further, a folder in peft's format", metavar="DIR", kind="path")
    merge: bool = _train("with adapters: also write OUT/merged, the model with the adapters added", False)
    neftune: float | None = _rare("NEFTune: noise on embeddings, up to alpha / sqrt(tokens x width)", None, number(0),
                                  metavar="ALPHA")
    max_grad_norm: float = _train("clip the global gradient norm; 0: no clipping", 1.0, number(0), metavar=X)
    seed: int = _train("seed of the data's order, of noise and of dropout", 42, number(0, 2**32 - 1, kind=int),
                       metavar=N, kind="rows")

    optimizer_mode: str = _rare("whether AdamW overlaps with backward or with the next forward", "auto",
                                choices=("auto", "backward", "forward"))
    plan: str | None = _rare("use this plan, a JSON file, instead of searching for one", metavar="FILE",
                             kind="path host")

    config: str | None = _instead("read options from a YAML file; the command line overrides them", metavar="FILE",
                                  kind="call")
    dry_run: bool = _instead("print report and plan, then stop; needs only config.json, and no --data", False,
                             kind="call")
    assume: str | None = _instead("dry run for another machine: gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5,bus=x8; of "
                                  "several ram=32,64,96GiB a table", metavar="PARTS", kind="call")
    shape: str | None = _instead("dry run for a model by name: llama-3.3-70b (an unknown name lists all)",
                                 metavar="NAME", kind="call")
    demo: bool = _instead("train a small generated model on generated text, in a minute", False, kind="call")

    @property
    def trace(self) -> bool:
        return "trace" in self.log

    def warmup_steps(self, total_steps: int) -> int:
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * total_steps)


@dataclass(frozen=True)
class Eval(Reading, Method, Machine):
    """The loss of a finished model on each file of --data; perplexity, accuracy or margins."""

    folder: str = _data("a finished run, a checkpoint or an adapter", "", metavar="FOLDER")
    model: str | None = _data("base of the adapter, if it has moved", metavar="DIR")
    data: tuple[str, ...] = _data("files to read, each by itself", (), listed(), metavar="FILE", repeat=True)
    reference: str | None = _train("the model before training, for preferences [that of the run]", metavar="DIR")


@dataclass(frozen=True)
class Score(Eval):
    """Log-probabilities, labels or rewards of each row, in files of --out."""

    out: str = _output("folder of the scores; one that is not complete is continued", "", metavar="DIR")
    top_k: int = _output("also the K most likely tokens of each label, for --teacher", 0, number(0, 256, kind=int),
                         metavar="K")


@dataclass(frozen=True)
class Sample(Machine):
    """Text from a finished model, to standard output."""

    folder: str = _data("a finished run, a checkpoint or an adapter", "", metavar="FOLDER")
    model: str | None = _data("base of the adapter, if it has moved", metavar="DIR")
    tokenizer: str | None = _data("folder of another tokenizer", metavar="DIR")
    prompt: tuple[str, ...] = _data("text to answer, in the format that the run was trained on", (), listed(),
                                    metavar="TEXT", repeat=True)
    prompts: str | None = _data("file of prompts, a line each; .jsonl: prompt or messages; answers are JSON lines",
                                metavar="FILE")
    chat: bool = _data("talk with the model", False)
    as_text: bool = _data("continue TEXT as it is, without the run's format", False)
    system: str | None = _data("system message", metavar="TEXT")
    chat_template: str | None = _data(f"another chat template: a .jinja file, or {', '.join(TEMPLATES)}",
                                      metavar="FILE")
    chat_template_kwargs: str | None = _data("variables of the chat template", None, json_object, metavar="JSON")
    max_new_tokens: int = _output("most tokens of an answer", 512, whole, metavar=N)
    temperature: float | None = _output("0: the most likely token [generation_config.json, else 0]", None,
                                        number(0, 100), metavar=X)
    top_p: float | None = _output("choose among the most likely tokens with this probability [as above, else 1]", None,
                                  number(0, 1), metavar=X)
    top_k: int | None = _output("choose among the K most likely tokens; 0: all [as above, else 0]", None,
                                number(0, kind=int), metavar="K")
    seed: int = _output("seed of the choice", 42, number(0, 2**32 - 1, kind=int), metavar=N)


@dataclass(frozen=True)
class Merge(Base):
    """An adapter added to its model, as an ordinary checkpoint."""

    folder: str = _data("the adapter", "", metavar="ADAPTER")
    model: str | None = _data("base of the adapter, if it has moved", metavar="DIR")
    out: str = _output("folder of the merged model", "", metavar="DIR")


@dataclass(frozen=True)
class Push(Base):
    """Uploads a finished model or adapter to the Hugging Face hub, with a card of its run."""

    folder: str = _data("a finished run, or any checkpoint", "", metavar="FOLDER")
    name: str = _data("repository", "", metavar="OWNER/NAME")


@dataclass(frozen=True)
class Check(Base):
    """Reports what this machine has, how fast it is, and what to change."""

    store: tuple[str, ...] = _data("folders whose drives are measured [this one]", (), listed(), metavar="DIR[,DIR]")
    report: str = _output("where the report is written", "trireme-check.json", metavar="FILE")
    tune: bool = _output("instead, try launch settings of each kernel; runs use the faster ones", False)

# fmt: on


COMMANDS: dict[str, type[Base]] = {
    "sample": Sample,
    "eval": Eval,
    "score": Score,
    "merge": Merge,
    "push": Push,
    "check": Check,
}
