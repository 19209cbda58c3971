"""Every option of every command: one field each, with its help, kind of value and scope. Imports no torch.

Scopes: `path`, made absolute where it is saved; `run`, not changed by --resume; `call`, of this call alone, not saved.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from trireme.engine.amounts import MOST, natural, number, positive, size
from trireme.models.config import InputError

T = TypeVar("T", bound="Base")
Text: TypeAlias = str | None
Real: TypeAlias = float | None
Whole: TypeAlias = int | None
Texts: TypeAlias = tuple[str, ...]
SCHEDULES = ("cosine", "linear", "constant", "polynomial", "wsd")
METHODS = ("sft", "dpo", "ipo", "orpo", "simpo", "kto", "reward", "classify")
TEMPLATES = ("alpaca", "chatml", "gemma", "llama3", "mistral", "plain")

# ---------------------------------------------------------------- parsers, which raise ValueError


@dataclass(frozen=True)
class Every:
    """An interval in steps, in seconds, or as a share of the run; all None: never."""

    steps: int | None = None
    seconds: float | None = None
    share: float | None = None

    def due(self, step: int, total: int, seconds: float) -> bool:
        """Whether it is due after `step`, counted from 1. `seconds`: since the last time."""
        if self.seconds:
            return seconds >= self.seconds
        steps = self.steps or math.ceil((self.share or 0) * total - 1e-9)
        return bool(steps) and step % steps == 0

    def times(self, done: int, total: int, seconds: float | None = None) -> int:
        """How often it is due in the rest of the run, which takes `seconds`; unknown ones count as ten times."""
        if self.seconds:
            return min(10, total - done) if seconds is None else int(seconds / self.seconds)
        return sum(self.due(step, total, 0.0) for step in range(done + 1, total + 1))

    def __str__(self) -> str:
        return repr(self.seconds).removesuffix(".0") + "s" if self.seconds else str(self.steps or self.share or "never")


def every(text: str) -> Every:
    """Parses `500` (steps), `0.1` (of the run), `30min` (s, min, h) or `never`."""
    match = re.fullmatch(r"([0-9.e+-]+?) ?(s|min|h)?", text.strip())
    if text.strip() in ("never", "no", "none", "0"):
        return Every()
    with suppress(ValueError):
        if match and match[2]:
            return Every(seconds=number(1e-6)(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]])
        if match and match[1].isdecimal():
            return Every(natural(match[1]))
        if match:
            return Every(share=number(1e-6, 0.999999)(match[1]))
    raise ValueError(f"{text!r} is not an interval; write 500 (steps), 0.1 (of the run), 30min or never")


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty; leave the option out")
    return value


def warmup(text: str) -> float:
    """A share of the run (below 1), or a number of steps."""
    share = number(0)(text)
    return share if share < 1 else natural(text)


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


class Value(NamedTuple):
    """A kind of value: the parser of one, which checks limits too, and its name in --help. Options whose default is a
    tuple have several, with commas between them; where the name has none, the option is repeated.
    """

    parse: Callable[[Any], Any]
    metavar: str


def choice(*values: Any) -> Value:
    """One of some words or numbers."""
    known = {str(value): value for value in values}

    def parse(text: str) -> Any:
        if text not in known:
            raise ValueError(f"{text!r} is not one of {', '.join(known)}")
        return known[text]

    return Value(parse, "{" + ",".join(known) + "}")


def real(low: float, high: float = MOST) -> Value:
    return Value(number(low, high), "X")


def integer(low: int, high: float = MOST) -> Value:
    return Value(number(low, high, int), "N")


def or_word(word: str) -> Value:
    """A whole number from 1, or a word."""
    return Value(lambda text: word if text == word else natural(text), "N")


SWITCH, WHEN, SIZE, JSON = Value(bool, ""), Value(every, "WHEN"), Value(gib_size, "SIZE"), Value(json_object, "JSON")
FILE, DIR, TEXT, NAME, HUB = (Value(text, name) for name in ("FILE", "DIR", "TEXT", "NAME", "OWNER/NAME"))
N, X, FROM_0, ABOVE_0, SEED = integer(1), real(0), integer(0), Value(positive, "X"), integer(0, 2**32 - 1)
DATA, PROMPT, FILES = Value(text, "FILE[:WEIGHT]"), Value(text, "TEXT"), Value(text, "FILE")
DIRS, GLOBS, NAMES = Value(text, "DIR[,DIR]"), Value(text, "GLOB[,GLOB]"), Value(text, "NAME[,NAME]")
LOGS, LABELS = Value(choice("tensorboard", "wandb").parse, "NAME[,NAME]"), Value(text, "NAME,NAME")
MAP, LONG = Value(text, "OURS=YOURS"), choice("cut", "drop", "split", "error")
DTYPE, BASE = choice("auto", "bf16", "fp32", "fp8"), choice("nf4", "fp8", "mxfp4")
FORMATS, EXPERTS = choice("bf16", "same"), choice("stacked", "separate")
EXPORT = choice("last", "best")
SHARE = r"\+?[\d.]+([eE][+-]?\d+)?"  # and no file
MINUTES_30 = Every(seconds=1800.0)
TEMPLATE = f"another chat template: a .jinja file, or {', '.join(TEMPLATES)}"
ASSUMED = "dry run for another machine: gpu=rtx4090,ram=128GiB,ssd=2x2TB@7/5,bus=x8"


def option(
    group: str, help: str, value: Value, default: Any = None, scope: str = "", words: str = "", **rules: str
) -> Any:
    """A field. `words`: a pattern of what is a word and not a path. `rules`: `methods` that it belongs to; options of
    which it `needs` one; options that it goes `without`.
    """
    meta = {"group": group, "help": help, "kind": frozenset(scope.split()), "words": words, **value._asdict()}
    meta |= {rule: rules.get(rule, "").split() for rule in ("methods", "needs", "without")}
    return field(default=default, metadata=meta | {"repeat": isinstance(default, tuple) and "," not in value.metavar})


GROUPS = "model and data", "output", "training", "machine (all of it is detected)", "rarely needed", "instead of a run"
_data, _output, _train, _machine, _rare, _instead = (partial(option, group) for group in GROUPS)


def table(cls: type) -> dict[str, Field[Any]]:
    """The options of a command, by name."""
    return {f.name: f for f in fields(cls) if f.metadata}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Base:
    """What all commands share."""

    chosen: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # names that the user gave

    @classmethod
    def of(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
        """Options from Python, YAML or words: texts are parsed, numbers too, so that they are checked. Raises
        InputError.
        """
        known, parsed = table(cls), dict[str, Any]()
        if unknown := [name for name in values if name not in known]:
            near = [(flag(name), difflib.get_close_matches(name, known, 1)) for name in unknown]
            words = ", ".join(f"{name} (is it {flag(other[0])}?)" if other else name for name, other in near)
            raise InputError(f"{where}unknown option {words[:900]}. Leave out what is not in --help.")
        for name, value in values.items():
            try:
                if value is not None:
                    parsed[name] = converted(known[name], value)
            except ValueError as error:
                raise InputError(f"{where}{flag(name)}: {str(error).rstrip('.')}.") from None
        return cls(chosen=frozenset(parsed), **parsed)

    def check(self) -> None:
        """Raises InputError for options that do not go together."""
        options, method = table(type(self)), getattr(self, "method", "")
        usual = lambda name, f: {None, (), False, "", *([] if name in self.chosen else [f.default])}
        values = {name: f.metadata for name, f in options.items() if getattr(self, name) not in usual(name, f)}
        for name, rules in values.items():
            methods, needs, wrong = rules["methods"], rules["needs"], ""
            if methods and method not in methods:
                wrong = f"is for --method {' or '.join(methods)}. Leave it out"
            elif needs and not {*needs} & values.keys():
                add = f"{flag(needs[0])}{' 16' * (needs[0] == 'lora')}"
                wrong = f"is for {' or '.join(map(flag, needs))}. Add {add}, or leave it out"
            elif others := {*rules["without"]} & values.keys():
                wrong = f"does not go with {flag(others.pop())}. Leave one of them out"
            if wrong:
                raise InputError(f"{flag(name)} {wrong}.")


def converted(f: Field[Any], value: Any) -> Any:
    """The value of an option that is given as text, number, list or as the value itself. Raises ValueError."""
    parse, many = f.metadata["parse"], isinstance(f.default, tuple)
    if isinstance(value, Every) or (isinstance(value, bool) and parse is bool):
        return value
    value = json.dumps(value, default=str) if isinstance(value, dict) and parse is json_object else value
    if parse is bool or isinstance(value, (bool, dict)) or (isinstance(value, (list, tuple)) and not many):
        raise ValueError(f"{str(value)[:60]} is not a value of it")
    as_text = lambda v: os.fspath(v) if isinstance(v, os.PathLike) else str(v)
    if many and not f.metadata["repeat"] and not isinstance(value, (list, tuple)):
        value = [part.strip() for part in as_text(value).split(",")]
    values = tuple(parse(as_text(part)) for part in (value if isinstance(value, (list, tuple)) else [value]))
    return values if many else values[0]


# ---------------------------------------------------------------- the options
# fmt: off


@dataclass(frozen=True)
class Reading(Base):
    """How rows are read: of a run, and of a finished model."""

    map: Text = _data("names of your columns: prompt=question,completion=answer", MAP, scope="run")
    seq_len: Whole = _data("tokens per sequence [2048, or the model's maximum if less]", integer(2), scope="run")
    long: Text = _data("what to do with rows longer than --seq-len [text: split, else cut]", LONG, scope="run")
    skip_bad: bool = _data("skip and count rows that cannot be read, instead of stopping", SWITCH, False, "run")
    tokenizer: Text = _data("folder of another tokenizer", DIR, scope="path")
    chat_template: Text = _data(TEMPLATE, FILE, scope="path", words="|".join(TEMPLATES))
    system: Text = _data("system message of chats that have none", TEXT, scope="run")
    chat_template_kwargs: Text = _data('variables of the template: {"enable_thinking": false}', JSON, scope="run")


@dataclass(frozen=True)
class Method(Base):
    """What is learned from the rows, also of an evaluation."""

    method: str = _train("fine-tuning, preferences, a reward model, a classifier", choice(*METHODS), "sft", "run")
    beta: float = _train("preferences: beta of the loss", ABOVE_0, 0.1, methods="dpo ipo orpo simpo kto")
    label_smoothing: float = _train("of the cross-entropy; dpo, simpo: share of wrong pairs", real(0, 0.499999), 0.0,
                                    methods="sft dpo simpo")
    simpo_gamma: float = _rare("simpo: target margin of the rewards", X, 0.5, methods="simpo")
    desirable_weight: float = _rare("kto: weight of good answers", ABOVE_0, 1.0, methods="kto")
    undesirable_weight: float = _rare("kto: weight of bad answers", ABOVE_0, 1.0, methods="kto")
    center_rewards_coefficient: float = _rare("reward: weight of a pair's squared sum of rewards", X, 0.0,
                                              methods="reward")


@dataclass(frozen=True)
class Machine(Base):
    """Where it is computed."""

    device: str = _machine("device to compute on", choice("auto", "cuda", "cpu"), "auto")
    dtype: str = _machine("number format; fp8: to train [bf16 on a GPU, else fp32]", DTYPE, "auto", scope="run")
    gpus: str | int = _machine("number of GPUs, or all; on a CPU they are emulated", or_word("all"), 1)
    gpu_memory: Whole = _machine("hard limit of each GPU, such as 24GiB [the free memory]", SIZE)
    ram: Whole = _machine("hard limit of this process [85 % of what it may use]", SIZE)


@dataclass(frozen=True)
class Options(Reading, Method, Machine):
    """The options of a run. None or empty: chosen by data, model or machine."""

    model: str = _data("Hugging Face checkpoint: a folder, or OWNER/NAME on the hub", DIR, "", "path")
    data: Texts = _data("files, folders or quoted patterns to train on; repeat it to mix", DATA, (), "path", words="-")
    val: Text = _data("held-out data: a file, or a share of --data such as 0.02", FILE, None, "path", SHARE)
    general: Text = _data("other text, evaluated before and after the run: what was forgotten", FILE, None, "path run",
                          methods="sft")
    rope_factor: Real = _data("extend the context by this factor (YaRN), in config.json too", real(1), scope="run")
    no_pack: bool = _data("do not pack: one row per sequence", SWITCH, False, "run")
    max_samples: Whole = _data("use only the first N rows of each file of --data [all]", N, scope="run")

    out: str = _output("output folder [the next free runs/NAME, with the checkpoint's name]", DIR, "", "call")
    store: Texts = _output("folders for training state, one on each drive [OUT/.run/store]", DIRS, (), "path")
    save_every: Every = _output("snapshots: every 500 (steps), 0.1 (of the run), 30min; never", WHEN, MINUTES_30)
    eval_every: Every = _output("evaluations on --val, in the same form", WHEN, Every(share=0.1))
    eval_tokens: Whole = _output("tokens of --val per evaluation [evaluations take a tenth of the run]", N)
    export: str = _output("write the last weights, or those with the lowest loss on --val", EXPORT, "last")
    export_every: Every = _output("complete checkpoints in OUT/step-N, in the same form [never]", WHEN, Every())
    patience: Whole = _output("stop after N evaluations without improvement [never]", N)
    keep: int = _output("number of snapshots to keep", N, 1)
    keep_state: bool = _output("keep the state of a finished run, for --resume OUT --epochs N", SWITCH, False)
    log: Texts = _output("also log to tensorboard, wandb", LOGS, ())
    resume: Text = _output("continue RUN, or the latest unfinished run in runs/", Value(str, "RUN"), scope="call")
    verbose: bool = _output("print all parts of the report, as a dry run does", SWITCH, False, "call")

    labels: Texts = _train("classify: names of classes [from checkpoint or data]", LABELS, (), "run",
                           methods="classify")
    teacher: Text = _train("also learn the likely tokens of this checkpoint, or output of score", DIR, scope="path",
                           methods="sft", without="label_smoothing")
    distill_weight: float = _train("weight of the teacher in the loss, 1 - X of the labels", real(0, 1), 0.5,
                                   needs="teacher")
    temperature: float = _train("temperature of the distributions of teacher and model", real(0.01, 100), 1.0,
                                needs="teacher")
    top_k: int = _train("number of the teacher's most likely tokens per label", integer(1, 256), 64, "run",
                        needs="teacher")
    epochs: Real = _train("passes over the data [text 1, preferences 1, others 3]", ABOVE_0)
    max_steps: Whole = _train("number of steps, instead of --epochs", N)
    batch_size: int = _train("sequences per optimizer step", N, 16, scope="run")
    micro_batch: str | int = _train("sequences that are computed at once", or_word("auto"), "auto", scope="run")
    lr: Real = _train("peak learning rate [1e-5; below 3B parameters 2e-5; LoRA 2e-4; preferences 1e-6, 1e-5]", ABOVE_0)
    schedule: str = _train("learning rate after warm-up; cosine ends at 10 %", choice(*SCHEDULES), "cosine")
    warmup: float = _train("length of the warm-up: a share of the run (below 1), or steps", Value(warmup, "X"), 0.03)
    weight_decay: Real = _train("weight decay; not applied to norms and biases [0.01; adapters 0]", X)
    betas: tuple[float, ...] = _train("beta1 and beta2 of AdamW", Value(number(0, 0.999999), "X,X"), (0.9, 0.95))
    adam_bits: Whole = _train("bits of each AdamW moment: 32, 16 or 8 [32]", choice(32, 16, 8), scope="run")
    lora: Whole = _train("train LoRA adapters of this rank (16 is usual); the model is frozen", N, scope="run",
                         without="freeze train")
    lora_alpha: Real = _train("adapters are scaled by alpha / R [2 R]", real(1e-6, 1e6), scope="run", needs="lora")
    lora_dropout: Real = _train("dropout of adapters' inputs [0; that of --adapter]", real(0, 0.999999), scope="run",
                                needs="lora adapter")
    lora_targets: Texts = _train("matrices with adapters: q_proj [all; of mixtures attention]", NAMES, (), "run",
                                 needs="lora")
    base: Text = _train("quantize the frozen matrices of the blocks while loading, as QLoRA does", BASE, scope="run")
    train: Texts = _train("train only these tensors, such as '*.mlp.*'", GLOBS, (), "run")
    freeze: Texts = _train("do not train these tensors, such as '*embed*'", GLOBS, (), "run")
    router_aux: float = _rare("weight of the load-balancing loss of experts; 0: none", X, 0.0)
    adapter: Text = _train("train this adapter further, a folder in peft's format", DIR, scope="path",
                           without="lora freeze train")
    merge: bool = _train("with adapters: also write OUT/merged, the model with the adapters added", SWITCH, False,
                         needs="lora adapter")
    merge_format: Text = _rare("of --merge with a packed base; same: as it [bf16; aware: same]", FORMATS, needs="merge")
    merge_aware: bool = _rare("compute with packed matrices as --format same merges them", SWITCH, False, "run",
                              needs="lora adapter")
    expert_adapters: str = _rare("of experts: stacked as in peft, separate for vLLM, llama.cpp", EXPERTS, "stacked")
    neftune: Real = _rare("NEFTune: noise on embeddings, up to X / sqrt(tokens x width)", X)
    max_grad_norm: float = _train("clip the global gradient norm; 0: no clipping", X, 1.0)
    seed: int = _train("seed of the data's order, of noise and of dropout", SEED, 42, "run")

    plan: Text = _rare("use this plan, a JSON file, instead of searching for one", FILE, scope="path")

    config: Text = _instead("read options from a YAML file; the command line overrides them", FILE, scope="call")
    dry_run: bool = _instead("print report and plan, then stop; needs only config.json", SWITCH, False, "call")
    assume: Text = _instead(ASSUMED, Value(text, "PARTS"), scope="call", needs="dry_run")
    shape: Text = _instead("dry run for a model by name: llama-3.3-70b (an unknown one lists all)", NAME, scope="call",
                           needs="dry_run", without="model rope_factor")
    demo: bool = _instead("train a small generated model, in a minute", SWITCH, False, "call", without="data model val")

    def warmup_steps(self, total_steps: int) -> int:
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * total_steps)

    def evaluations(self, done: int, total: int, seconds: float | None = None) -> int:
        """Evaluations in the rest of a run, which takes `seconds`; before the first step and after the last, too."""
        last = total > done and not self.eval_every.due(total, total, 0.0)
        return (done == 0) + self.eval_every.times(done, total, seconds) + last


@dataclass(frozen=True)
class Eval(Reading, Method, Machine):
    """The loss of a finished model on each file of --data; perplexity, accuracy or margins."""

    folder: str = _data("a finished run, a checkpoint or an adapter", Value(text, "FOLDER"), "")
    model: Text = _data("base of the adapter, if it has moved", DIR)
    data: Texts = _data("files to read, each by itself", FILES, ())
    reference: Text = _train("the model before training [that of the run]", DIR, methods="dpo ipo kto")


@dataclass(frozen=True)
class Score(Reading, Machine):
    """Log-probabilities, labels or rewards of each row, in files of --out."""

    folder: str = _data("a finished run, a checkpoint or an adapter", Value(text, "FOLDER"), "")
    model: Text = _data("base of the adapter, if it has moved", DIR)
    data: Texts = _data("files to read, each by itself", FILES, ())
    out: str = _output("folder of the scores; one that is not complete is continued", DIR, "")
    top_k: int = _output("also the K most likely tokens of each label, for --teacher", integer(0, 256), 0)


@dataclass(frozen=True)
class Sample(Machine):
    """Text from a finished model, to standard output."""

    folder: str = _data("a finished run, a checkpoint or an adapter", Value(text, "FOLDER"), "")
    model: Text = _data("base of the adapter, if it has moved", DIR)
    tokenizer: Text = _data("folder of another tokenizer", DIR)
    prompt: Texts = _data("text to answer, in the format that the run was trained on", PROMPT, ())
    prompts: Text = _data("file of prompts, a line each; .jsonl: prompt or messages; answers are JSON lines", FILE)
    chat: bool = _data("talk with the model", SWITCH, False)
    as_text: bool = _data("continue TEXT as it is, without the run's format", SWITCH, False)
    system: Text = _data("system message", TEXT)
    chat_template: Text = _data(TEMPLATE, FILE)
    chat_template_kwargs: Text = _data("variables of the chat template", JSON)
    max_new_tokens: int = _output("most tokens of an answer", N, 512)
    temperature: Real = _output("0: the most likely token [generation_config.json, else 0]", real(0, 100))
    top_p: Real = _output("choose among the most likely tokens with this probability [as above, else 1]", real(0, 1))
    top_k: Whole = _output("choose among the K most likely tokens; 0: all [as above, else 0]", FROM_0)
    seed: int = _output("seed of the choice", SEED, 42)


@dataclass(frozen=True)
class Merge(Machine):
    """An adapter added to its model, as an ordinary checkpoint."""

    folder: str = _data("the adapter", Value(text, "ADAPTER"), "")
    model: Text = _data("base of the adapter, if it has moved", DIR)
    data: Text = _data("rows: say the loss of the base, with its adapter, and merged", FILE, without="expert_adapters")
    out: str = _output("folder of the merged model", DIR, "")
    format: str = _output("of matrices of a packed base: bf16; same as it [bf16; of --merge-aware same]", FORMATS)
    expert_adapters: Text = _output("merge nothing: write the adapter with those of experts in this form", EXPERTS)


@dataclass(frozen=True)
class Push(Base):
    """Uploads a finished model or adapter to the Hugging Face hub, with a card of its run."""

    folder: str = _data("a finished run, or any checkpoint", Value(text, "FOLDER"), "")
    name: str = _data("repository", HUB, "")


@dataclass(frozen=True)
class Check(Base):
    """Reports what this machine has, how fast it is, and what to change."""

    store: Texts = _data("folders whose drives are measured [this one]", DIRS, ())
    tune: bool = _output("instead, try launch settings of each kernel; runs use the faster ones", SWITCH, False)


@dataclass(frozen=True)
class Env(Base):
    """What to paste into an issue: versions, machine, drives and variables; measures nothing."""

    store: Texts = _data("folders whose drives are named [this one]", DIRS, ())


# fmt: on
COMMANDS: dict[str, type[Base]] = {cls.__name__.lower(): cls for cls in (Sample, Eval, Score, Merge, Push, Check, Env)}
