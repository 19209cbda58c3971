"""Trireme from Python: options as keyword arguments, results as data, an exception for each exit code."""

from __future__ import annotations

import errno
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from trireme.engine.run.command import parse
from trireme.engine.run.config.option_names import flag_of
from trireme.engine.run.finished.options import eval_options, sample_options
from trireme.engine.run.main import ENVIRONMENT, about_disk, is_of_drive
from trireme.engine.run.options import Options
from trireme.engine.run.screen import Screen
from trireme.models import config
from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

Names = str | Path | Sequence[str | Path]
Record = dict[str, Any]


class Given(TypedDict, total=False):
    """The options of `trireme --help`; sizes (24GiB) and intervals (30min) as text."""

    model: str | Path
    data: Names
    val: str | Path | float
    map: str | dict[str, str]
    seq_len: int
    long: str
    rope_factor: float
    no_pack: bool
    skip_bad: bool
    max_samples: int
    show_example: int
    tokenizer: str | Path
    chat_template: str | Path
    system: str
    chat_template_kwargs: Record
    out: str | Path
    store: Names
    save_every: str | int | float
    eval_every: str | int | float
    eval_tokens: int
    export: str
    export_every: str | int | float
    patience: int
    keep: int
    log: str | Sequence[str]
    push: str
    resume: str | Path
    method: str
    labels: int | str | Sequence[str]
    center_rewards_coefficient: float
    beta: float
    label_smoothing: float
    simpo_gamma: float
    desirable_weight: float
    undesirable_weight: float
    teacher: str | Path
    distill_weight: float
    temperature: float
    top_k: int
    epochs: float
    max_steps: int
    batch_size: int
    micro_batch: str | int
    lr: float
    schedule: str
    warmup: float
    weight_decay: float
    betas: tuple[float, float]
    adam_bits: int
    lora: int
    lora_alpha: float
    rslora: bool
    lora_dropout: float
    loraplus: float
    lora_targets: str | Sequence[str]
    train: str | Sequence[str]
    freeze: str | Sequence[str]
    router_aux: float
    adapter: str | Path
    base: str
    merge: bool
    neftune: float
    max_grad_norm: float
    seed: int
    device: str
    dtype: str
    gpus: str | int
    gpu_memory: str
    ram: str
    optimizer_mode: str
    plan: str | Path
    config: str | Path
    assume: str
    shape: str


class Error(Exception):
    """The line that the command would print."""

    exit_code = 1


class InputError(Error):
    """Options, data or a checkpoint are wrong."""

    exit_code = 2


class DoesNotFit(Error):
    """Memory or drives are too small."""

    exit_code = 3


class DeviceError(Error):
    """A drive failed or is full."""

    exit_code = 4


class Interrupted(Error):
    """A signal asked to stop. The run is saved if a step was done."""

    exit_code = 130


@contextmanager
def _translated(options: Options) -> Iterator[None]:
    """A context in which errors become the exceptions of this module."""
    from trireme.engine.plan import DoesNotFit as Large  # late: torch takes seconds
    from trireme.engine.run.loop import Interrupted as Stopped

    try:
        yield
    except (config.InputError, CheckpointError) as error:
        raise (DeviceError if is_of_drive(error) else InputError)(str(error)) from error
    except (Large, MemoryError) as error:
        raise DoesNotFit(str(error) or os.strerror(errno.ENOMEM)) from error
    except (Stopped, KeyboardInterrupt) as error:
        raise Interrupted(f"interrupted; finetune(resume={options.out!r}) continues the run") from error
    except OSError as error:
        raise DeviceError(about_disk(error, options)) from error


def words_of(options: Record) -> list[str]:
    """The options as words of a command line. Raises config.InputError for data that are no names of files."""
    found = []
    for name, value in options.items():
        flag = flag_of(name)
        several = name in ("data", "dataset") and not isinstance(value, (str, os.PathLike))
        several |= name == "val" and isinstance(value, (list, tuple))  # of which the command takes one
        if value is None or value is False:
            continue
        if value is True:
            found.append(flag)
        elif several:
            found += [f"{flag}={path}" for path in _paths(flag, value)]
        elif isinstance(value, (list, tuple)):
            found.append(f"{flag}={','.join(str(each) for each in value)}")
        elif isinstance(value, dict):
            text = ",".join(f"{ours}={theirs}" for ours, theirs in value.items())
            found.append(f"{flag}={text if name == 'map' else json.dumps(value)}")
        else:
            found.append(f"{flag}={value}")
    return found


def _paths(flag: str, value: Any) -> list[str]:
    """The names in a list of files. Raises config.InputError."""
    names = list[Any](value) if isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping)) else [value]
    for name in names:
        if not isinstance(name, (str, os.PathLike)):
            wrong = f"{flag}: {shown(repr(name))} is no name of a file"
            raise config.InputError(f"{wrong}. Give a path or a list of paths; write rows to a .jsonl file.")
    return [os.fspath(name) for name in names]


def _options(given: Record, **more: Any) -> Options:
    """Raises InputError."""
    try:
        return parse(words_of({**given, **more}))
    except config.InputError as error:
        raise InputError(str(error)) from error


@contextmanager
def _screen(show: bool) -> Iterator[Screen]:
    os.environ.update(ENVIRONMENT | os.environ)
    with Path(os.devnull).open("w") as nowhere:
        yield Screen(sys.stdout if show else nowhere)


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path  # the checkpoint, or the adapter
    steps: int
    seconds: float  # of steps
    tokens: int
    trained_tokens: int
    losses: list[tuple[int, float]]  # (step, loss)
    evaluations: list[tuple[int, float]]  # (step, loss on --val); step 0: before training
    best: tuple[int, float] | None  # (step, loss on --val), the lowest of what was trained

    def sample(self, prompt: str | Sequence[dict[str, Any]], **options: Any) -> str:
        """As the function `sample`, for the run's folder."""
        return sample(self.folder, prompt, **options)

    def evaluate(self, data: Names, **options: Any) -> Record:
        """As the function `evaluate`, for the run's folder."""
        return evaluate(self.folder, data, **options)


@dataclass(frozen=True)
class Plan:
    """What a run would do: bytes, seconds. On a CPU times are not estimated and are None."""

    steps: int
    tokens_per_step: int
    step_s: float | None
    tokens_per_second: float | None
    run_s: float | None
    limited_by: str | None  # the queue that a step waits for: compute, ssd, ...
    gpu_bytes: int  # of the fullest GPU; 0 on a CPU
    ram_bytes: int
    ssd_bytes: int  # of training state
    disk_bytes: int  # on the drives in all, at most
    written_bytes: int | None  # to the drives in the whole run
    report: list[str]  # the lines of --dry-run


# ---------------------------------------------------------------- calls


def finetune(*, on_step: Callable[[Record], object] | None = None, show: bool = True, **options: Unpack[Given]) -> Run:
    """Trains. `on_step` gets the log.jsonl record of each step and evaluation; `show`: print as the command does.

    Raises InputError, DoesNotFit, DeviceError, Interrupted; warns of an exception in `on_step`, once.
    """
    given = _options(dict(options))
    if given.dry_run or given.demo:
        raise InputError("finetune trains; a dry run is trireme.plan(...), the demo is on the command line.")
    with _translated(given), _screen(show) as screen:
        from trireme.engine.run import train  # late: torch takes seconds

        live = train.finetune(given, screen, trackers=[(hearing(on_step), lambda: None)] if on_step else [])
        assert live is not None
    return result(Path(given.out))


def hearing(on_step: Callable[[Record], object]) -> Callable[[Record], None]:
    """Calls `on_step` with copies of records, until it raises an exception: that is a warning, seen without `show`."""
    failed = False

    def hear(record: Record) -> None:
        nonlocal failed
        if failed:
            return
        try:
            on_step(dict(record))
        except Exception as error:
            failed = True
            Screen().urgent(f"warning: on_step has failed and is not called any more: {error!r}")

    return hear


def result(folder: Path) -> Run:
    """The run in a finished run's folder, from its log."""
    from trireme.engine.run.output.log import Totals
    from trireme.engine.run.output.records import read_log

    totals, losses, evaluations = Totals(), list[tuple[int, float]](), list[tuple[int, float]]()
    for _, record in read_log(folder / "log.jsonl"):
        totals.add(record)
        if "loss" in record:
            losses.append((record["step"], record["loss"]))
        if "eval_loss" in record:
            evaluations.append((record["step"], record["eval_loss"]))
    best = totals.best and (totals.best[1], totals.best[0])
    tokens, trained = round(totals.tokens), round(totals.trained)
    return Run(folder, totals.steps, totals.seconds, tokens, trained, losses, evaluations, best)


def plan(**options: Unpack[Given]) -> Plan:
    """A dry run. Raises InputError, DoesNotFit."""
    given = _options(dict(options), dry_run=True)
    with _translated(given), _screen(False) as screen:
        from trireme.engine.run.hub.fetch import fetched
        from trireme.engine.run.job import prepare  # late: torch takes seconds
        from trireme.engine.run.report import planned, report

        job = prepare(fetched(given, screen), say=lambda _: None)
        return Plan(**planned(job), report=list(report(job)))


def sample(folder: str | Path, prompt: str | Sequence[dict[str, Any]], **options: Any) -> str:
    """The answer to a prompt or to messages. Options are those of `trireme sample`, such as temperature=0.7, seed=1,
    as_text=True.

    Raises InputError, DoesNotFit, DeviceError.
    """
    with _translated(Options(out=str(folder))), _screen(False) as screen:
        from trireme.engine.run.finished import sample as command  # late: torch takes seconds

        messages = isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
        if not (isinstance(prompt, str) or messages):
            raise config.InputError(f"the prompt is {shown(repr(prompt))}; expected a text or a list of messages.")
        words = [str(folder), "--prompt=x", *words_of(options)]
        return command.answer(sample_options(words), prompt if isinstance(prompt, str) else list(prompt), screen)


def evaluate(folder: str | Path, data: Names, **options: Any) -> Record:
    """loss, perplexity, trained_tokens and tokens of a file, or of several together. Options are those of
    `trireme eval`. Raises as `sample`.
    """
    with _translated(Options(out=str(folder))), _screen(False) as screen:
        from trireme.engine.run.finished import evaluate as command  # late: torch takes seconds

        given = eval_options([str(folder), *words_of({"data": data, **options})])
        each: Iterator[Any] = command.losses(given, screen)
        return reduce(lambda one, other: one.plus(other), each).described()


def _with_names(function: Any) -> None:
    """Puts the options in the signature, which notebooks show and complete."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in Given.__annotations__]
    function.__signature__ = inspect.Signature([*names, *own])


for _function in (finetune, plan):
    _with_names(_function)
