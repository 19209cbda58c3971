"""Trireme from Python: options of the command line as keyword arguments, results as data, one exception."""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trireme.engine.run import cli, screen
from trireme.engine.run.options import Eval, Options, Sample, table

Prompt = str | Sequence[Mapping[str, Any]]  # a text, or messages
os.environ.update(cli.ENVIRONMENT | os.environ)  # before torch is loaded, whose threads read it
SHORT = ("model ", "steps ", "disk ", "time ", "ready ")  # lines of a report that a plan shows


class Error(Exception):
    """The line that the command would print, and `code`, its exit code: 2 options, data or a checkpoint are wrong; 3 it
    does not fit; 4 a drive failed or is full; 130 a signal asked to stop, and the run is saved if a step was done.
    """

    def __init__(self, line: str, code: int):
        super().__init__(line)
        self.code = code


@contextmanager
def _calling(show: bool = False) -> Iterator[None]:
    """A context of one call: with `show` it prints as the command does; errors become Error."""
    with screen.to(sys.stdout if show else io.StringIO()):
        try:
            yield
        except BaseException as error:
            raise Error(*cli.explained(error)) from None  # raises what is a bug


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path  # the checkpoint, or the adapter
    losses: list[tuple[int, float]]  # (step, loss)
    evaluations: list[tuple[int, float]]  # (step, loss on --val); step 0: before training

    def __repr__(self) -> str:
        change = lambda pairs: f"{pairs[0][1]:.4f} -> {pairs[-1][1]:.4f}" if pairs else "none"
        shown = f"loss {change(self.losses)}, on val {change(self.evaluations)}"
        return f"Run of {len(self.losses):,} steps in {self.folder}: {shown}"


class Plan(SimpleNamespace):
    """What a run would do: `report`, the lines of --dry-run, and figures in bytes and seconds, which are None where
    they are not estimated, as times on a CPU.

    steps, tokens_per_step, step_s, tokens_per_second, run_s, limited_by (the queue that a step waits for), gpu_bytes
    (of the fullest GPU), ram_bytes, ssd_bytes (of training state), disk_bytes (at most), written_bytes (in the run)
    """

    def __repr__(self) -> str:
        return "\n".join(line for line in self.report if line.startswith(SHORT))


# ---------------------------------------------------------------- calls


def finetune(*, on_step: Callable[[dict[str, Any]], object] | None = None, show: bool = True, **options: Any) -> Run:
    """Trains. `on_step` gets the log.jsonl record of each step and evaluation; `show`: print as the command
    does. Raises Error.
    """
    from trireme.engine.run.log import read_log  # late: torch takes seconds
    from trireme.engine.run.loop import train

    with _calling(show):
        out = train(cli.of_a_run(options), [(on_step, lambda: None)] if on_step else ())
        records = [] if options.get("dry_run") else list(read_log(out / "log.jsonl"))
    pairs = lambda name: [(record["step"], record[name]) for record in records if name in record]
    return Run(out, pairs("loss"), pairs("eval_loss"))


def plan(**options: Any) -> Plan:
    """A dry run. Raises Error."""
    from trireme.engine.run import folder, report  # late: torch takes seconds
    from trireme.engine.run.after import hub

    with _calling():
        job, lines = report.prepare_job(hub.fetched(folder.named(cli.of_a_run({**options, "dry_run": True}))), None)
        return Plan(**report.figures(job), report=lines)


def sample(folder: str | Path, prompt: Prompt | Sequence[Prompt], **options: Any) -> Any:
    """The answer to a prompt, which is a text or a list of messages; of a list of prompts a list of answers, for which
    the model is loaded once. Raises Error.
    """
    from trireme.engine.run.after.sample import speaking  # late: torch takes seconds

    is_one = isinstance(prompt, str) or not isinstance(prompt, Sequence) or all(isinstance(p, Mapping) for p in prompt)
    prompts = [prompt] if is_one else list(prompt)
    with _calling(), speaking(Sample.of({**options, "folder": folder}), prompts) as (speaker, tokens):
        answers = [answer.text for answer in speaker.answers(tokens)]
    return answers[0] if is_one else answers


def evaluate(folder: str | Path, data: str | Path | Sequence[str | Path], **options: Any) -> Any:
    """Loss and other figures of a file of data; of a list of files a list of them. Raises Error."""
    from trireme.engine.run.after.eval import losses  # late: torch takes seconds

    is_one = isinstance(data, (str, Path))
    with _calling():
        results = list(losses(Eval.of({**options, "folder": folder, "data": [data] if is_one else data})))
    return results[0] if is_one else results


for _call, _cls in ((finetune, Options), (plan, Options), (sample, Sample), (evaluate, Eval)):
    _by_place = {*inspect.signature(_call).parameters, *(("prompts", "chat") if _cls is Sample else ())}
    _lines = (f"    {name}: {f.metadata['help']}" for name, f in table(_cls).items() if name not in _by_place)
    _call.__doc__ = "\n".join((f"{_call.__doc__}\n    Options, as on the command line:\n", *_lines))
