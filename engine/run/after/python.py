"""Trireme from Python: the options of the command line as keyword arguments, results as data, one exception for each
exit code.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trireme.engine.amounts import compact, duration, gb, gib
from trireme.engine.run import cli, screen
from trireme.engine.run.options import Base, Eval, Options, Sample, Score, table

Names = str | Path | Sequence[str | Path]
Record = dict[str, Any]
Prompt = str | Sequence[Mapping[str, Any]]  # a text, or messages
FIRST = ("folder", "data", "out", "prompt", "prompts")  # that functions take by place, or otherwise


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


KINDS = {kind.exit_code: kind for kind in (InputError, DoesNotFit, DeviceError, Interrupted)}


@contextmanager
def _translated(show: bool = False) -> Iterator[None]:
    """A context of one call: with `show` it prints as the command does; errors become those of this module."""
    os.environ.update(cli.ENVIRONMENT | os.environ)
    failed: Error | None = None
    with screen.to(sys.stdout if show else io.StringIO()):
        try:
            yield
        except Error:
            raise
        except BaseException as error:
            message, code = cli.explained(error)  # raises what is a bug
            failed = KINDS.get(code, DeviceError)(message)
    if failed:
        raise failed from None


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

    def sample(self, prompt: Any, **options: Any) -> Any:
        """As the function `sample`, for the run's folder."""
        return sample(self.folder, prompt, **options)

    def evaluate(self, data: Names, **options: Any) -> Any:
        """As the function `evaluate`, for the run's folder."""
        return evaluate(self.folder, data, **options)

    def __repr__(self) -> str:
        ends = lambda pairs: f"{pairs[0][1]:.4f} -> {pairs[-1][1]:.4f}" if pairs else "none"
        return "\n".join([
            f"Run in {self.folder}", f"  {self.steps:,} steps in {duration(self.seconds)}",
            f"  {compact(self.tokens)} tokens, {compact(self.trained_tokens)} of them trained",
            f"  loss, first and last step: {ends(self.losses)}", f"  loss on val: {ends(self.evaluations)}",
        ])  # fmt: skip


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
    report: list[str] = field(repr=False)  # the lines of --dry-run

    def __repr__(self) -> str:
        step = "not estimated on a CPU" if self.step_s is None else f"{self.step_s:.3g} s, limited by {self.limited_by}"
        whole = "" if self.run_s is None else f", {duration(self.run_s)} in all"
        return "\n".join([
            f"Plan of {self.steps:,} steps of {compact(self.tokens_per_step)} tokens", f"  step: {step}{whole}",
            f"  GPU {gib(self.gpu_bytes)}, RAM {gib(self.ram_bytes)}, state on the SSD {gib(self.ssd_bytes)}",
            f"  disk: at most {gb(self.disk_bytes)}", "  .report has the lines of a dry run",
        ])  # fmt: skip


# ---------------------------------------------------------------- calls


def finetune(*, on_step: Callable[[Record], object] | None = None, show: bool = True, **options: Any) -> Run:
    """Trains. `on_step` gets the log.jsonl record of each step and evaluation; `show`: print as the command does.

    Raises InputError, DoesNotFit, DeviceError, Interrupted.
    """
    from trireme.engine.run.loop import Interrupted as Stopped  # late: torch takes seconds
    from trireme.engine.run.loop import train

    with _translated(show):
        given = cli.of_a_run(options)
        if given.dry_run or given.demo:
            raise InputError("finetune trains; a dry run is trireme.plan(...), the demo is on the command line.")
        try:
            out = train(given, [(_hearing(on_step), lambda: None)] if on_step else ())
        except Stopped:
            raise Interrupted("interrupted; finetune(resume=OUT) continues the run") from None
    return result(out)


def _hearing(on_step: Callable[[Record], object]) -> Callable[[Record], None]:
    """Calls `on_step` with copies of records, until it raises an exception: that is a warning, seen without `show`."""
    heard = [on_step]

    def hear(record: Record) -> None:
        try:
            for each in heard:
                each(dict(record))
        except Exception as error:
            heard.clear()
            screen.urgent(f"warning: on_step has failed and is not called any more: {error!r}")

    return hear


def result(folder: str | Path) -> Run:
    """The run in a finished run's folder, from its log."""
    from trireme.engine.run.log import read_log, totalled

    records = list(read_log(Path(folder) / "log.jsonl"))
    steps = [record for record in records if "loss" in record]
    seconds, tokens, trained = (totalled(steps, key) for key in ("step_time_s", "tokens", "trained_tokens"))
    pairs = lambda name: [(record["step"], record[name]) for record in records if name in record]
    return Run(Path(folder), len(steps), seconds, round(tokens), round(trained), pairs("loss"), pairs("eval_loss"))


def plan(**options: Any) -> Plan:
    """A dry run. Raises InputError, DoesNotFit."""
    from trireme.engine.run import folder, report  # late: torch takes seconds
    from trireme.engine.run.after import hub
    from trireme.engine.run.job import make

    with _translated():
        job = make(hub.fetched(folder.named(cli.of_a_run({**options, "dry_run": True}))))
        return Plan(**report.figures(job), report=list(report.lines(job)))


def sample(folder: str | Path, prompt: Prompt | Sequence[Prompt], **options: Any) -> Any:
    """The answer to a prompt, which is a text or a list of messages; of a list of prompts a list of answers, for which
    the model is loaded once. Raises InputError, DoesNotFit, DeviceError.
    """
    from trireme.engine.run.after import sample as command  # late: torch takes seconds

    several = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    one = not several or (len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt))
    prompts: Sequence[Any] = [prompt] if one else list(prompt)
    with _translated():
        if not prompts or not all(isinstance(each, Sequence) for each in prompts):
            raise InputError(f"prompt: {prompt!r:.60}: expected a text, a list of messages, or a list of these.")
        o = Sample.of({**options, "folder": folder})
        row_of = lambda each: {"prompt": each} if isinstance(each, str) else {"messages": list(each)}
        answers = command.answers(o, list(map(row_of, prompts)))
    return answers[0] if one else answers


def names_of(data: Names) -> list[str | Path]:
    return [data] if isinstance(data, (str, Path)) else list(data)


def evaluate(folder: str | Path, data: Names, **options: Any) -> Any:
    """Loss and other figures of a file of data; of a list of files a list of them. Raises as `sample`."""
    from trireme.engine.run.after.eval import losses  # late: torch takes seconds

    one = isinstance(data, (str, Path))
    with _translated():
        o = Eval.of({**options, "folder": folder, "data": names_of(data)})
        results = [{"loss": each.loss, **each.figures, "labels": each.labels} for each in losses(o)]
    return results[0] if one else results


def score(folder: str | Path, data: Names, out: str | Path, **options: Any) -> Path:
    """Writes a model's log-probabilities, labels or rewards of each row into the folder `out`. Raises as `sample`."""
    from trireme.engine.run.after import score as command  # late: torch takes seconds

    with _translated():
        command.run(Score.of({**options, "folder": folder, "data": names_of(data), "out": out}))
    return Path(out)


def _described(call: Callable[..., Any], cls: type[Base]) -> None:
    """Adds the options of the command line to a function's docstring and signature."""
    options = {name: f for name, f in table(cls).items() if name not in FIRST or cls is Options}
    lines = [f"    {name}: {f.metadata['help']}" for name, f in options.items()]
    call.__doc__ = f"{call.__doc__}\n    Options, as on the command line:\n\n" + "\n".join(lines)
    own = inspect.signature(call)
    kept = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    known = {each.name for each in kept}
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    added = [keyword(name, default=f.default) for name, f in options.items() if name not in known]
    call.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]


for _call, _cls in ((finetune, Options), (plan, Options), (sample, Sample), (evaluate, Eval), (score, Score)):
    _described(_call, _cls)
