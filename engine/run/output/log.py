"""The log of a run: log.jsonl and log.csv, the line on the terminal, loss.svg, and trackers if asked for.

log.csv and loss.svg are made from log.jsonl. Nothing here stops a run: if a disk is full, lines wait and the user is
warned once; a tracker that fails is left out.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trireme.engine.amounts import compact, count, duration
from trireme.engine.run.options import Options
from trireme.engine.run.output.curve import LOSS, Curve, draw
from trireme.engine.run.output.records import (
    COLUMNS,
    Appender,
    Mark,
    Record,
    as_csv,
    as_json,
    is_whole,
    read_log,
    read_until,
)
from trireme.engine.run.screen import Screen, progress
from trireme.models.config import InputError
from trireme.storage.files import replace_synced

PACKAGES = {"comet": "comet-ml"}  # if not called as --log has it
Tracker = tuple[Callable[[Record], None], Callable[[], None]]  # (add, close)
Started = tuple[str, Tracker]  # with the id that it gave to the run, by which it continues a resumed one; "": none


def _tensorboard(out: Path, options: Options, known: str) -> Started:  # noqa: ARG001 (as the others)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tensorboard"))

    def add(record: Record) -> None:
        for key, value in _numbers(record).items():
            writer.add_scalar(key, value, record["step"])

    return "", (add, writer.close)


def _wandb(out: Path, options: Options, known: str) -> Started:
    """Weights & Biases."""
    import wandb

    resumed = {"id": known, "resume": "allow"} if known else {}
    run = wandb.init(project="trireme", name=out.name, dir=str(out), config=asdict(options), **resumed)
    return run.id, (lambda record: run.log(record, step=record["step"]), run.finish)


def _mlflow(out: Path, options: Options, known: str) -> Started:
    """MLflow. Its own environment variables say where it logs to."""
    import mlflow

    if not known:
        mlflow.set_experiment("trireme")
    run = mlflow.start_run(**({"run_id": known} if known else {"run_name": out.name}))
    if not known:
        mlflow.log_params({name: str(value)[:500] for name, value in asdict(options).items()})
    add = lambda record: mlflow.log_metrics(_numbers(record), step=record["step"])
    return run.info.run_id, (add, mlflow.end_run)


def _comet(out: Path, options: Options, known: str) -> Started:
    import comet_ml

    how = {"experiment_key": known, "mode": "get"} if known else {"mode": "create"}
    experiment = comet_ml.start(project_name="trireme", **how)
    if not known:
        experiment.set_name(out.name)
        experiment.log_parameters(asdict(options))
    add = lambda record: experiment.log_metrics(_numbers(record), step=record["step"])
    return experiment.get_key(), (add, experiment.end)


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "comet": _comet}


def _numbers(record: Record) -> Record:
    return {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "step"}


@contextmanager
def open_trackers(options: Options, screen: Screen) -> Iterator[list[Tracker]]:
    """The trackers of --log, started before anything takes time. Raises InputError if one cannot be started."""
    started: list[Tracker] = []
    try:
        for name, start in TRACKERS.items():
            if name in options.log:
                started.append(_start(name, start, options))
        yield started
    finally:
        for _, close in started:
            try:
                close()
            except Exception as error:
                _warn_of_tracker(screen, error)


def _start(name: str, start: Callable[[Path, Options, str], Started], options: Options) -> Tracker:
    """Starts a tracker, or continues it: the id of its run is in OUT/NAME."""
    out, held = Path(options.out), Path(options.out, name, "run-id")
    try:
        id, tracker = start(out, options, held.read_text().strip() if options.resume and held.is_file() else "")
        if id:
            held.parent.mkdir(exist_ok=True)
            replace_synced(held, id.encode())
        return tracker
    except ImportError:
        raise InputError(
            f"--log {name}: it is not installed. pip install {PACKAGES.get(name, name)}, or leave it out."
        ) from None
    except Exception as error:
        key = "Log in with `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else "Fix that"
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"--log {name}: {why}. {key}, or leave it out.") from None


def _warn_of_tracker(screen: Screen, error: Exception) -> None:
    screen.warn(f"a tracker of --log has failed and is left out from here on ({error!r})")


@dataclass
class Totals:
    """Sums and extremes over the log of a run."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    trained: float = 0.0
    losses: tuple[float, float] | None = None  # first and last
    evals: tuple[float, float] | None = None
    best: tuple[float, int] | None = None  # lowest eval_loss of what was trained, its step
    evaluated: int | None = None  # last evaluated step
    evaluations: int = 0
    evaluating: float = 0.0  # seconds, samples included
    sampled: bool = False  # whether an evaluation had one

    def add(self, record: Record) -> None:
        if "loss" in record:
            seconds = record.get("step_time_s", 0.0)
            self.steps += 1
            self.seconds += seconds
            self.tokens += record.get("tokens", seconds * record.get("tokens_per_second", 0.0))
            rate = record.get("trained_tokens_per_second", 0.0)  # an older log has the rate alone
            self.trained += record.get("trained_tokens", seconds * rate)
            self.losses = (self.losses or (record["loss"],))[0], record["loss"]
        if "eval_loss" in record:
            loss, self.evaluated = record["eval_loss"], record["step"]
            self.evaluations += 1
            self.evaluating += record.get("eval_time_s", 0.0)
            self.sampled |= "sample" in record
            self.evals = (self.evals or (loss,))[0], loss
            if record["step"] and loss < (self.best[0] if self.best else math.inf):
                self.best = loss, record["step"]

    def line(self) -> str:
        parts = [f"done     {count(self.steps, 'step')}"]
        if self.seconds:
            parts.append(duration(self.seconds))
        if self.evaluating:
            samples = " with samples" if self.sampled else ""
            parts.append(f"{count(self.evaluations, 'evaluation')}{samples} {duration(self.evaluating)}")
        if self.losses:
            parts.append("loss {:.4g} -> {:.4g}".format(*self.losses))
        if self.evals:
            note = (
                ""
                if self.best is None or self.best[1] == self.evaluated
                else " (best {:.4g} at step {:,})".format(*self.best)
            )
            parts.append("eval {:.4g} -> {:.4g}".format(*self.evals) + note)
        if self.seconds:
            trained = f"{compact(self.trained)} trained tokens of {compact(self.tokens)}"
            parts.append(trained if self.trained else f"{compact(self.tokens)} tokens")
            parts.append(f"{compact(self.tokens / self.seconds)} tok/s")
        return ", ".join(parts)


class RunLog:
    """Writes a run's log. Used by one thread at a time."""

    def __init__(
        self,
        out: Path,
        total_steps: int,
        screen: Screen,
        since: Mark | None = None,
        evaluations: int = 0,
        trackers: Sequence[Tracker] = (),
        title: str = "",
        what: str = LOSS,
    ):
        """`since`: from the snapshot of a resumed run; later lines are removed. `evaluations`: of the whole run.
        `title`, `what`: title and vertical axis of loss.svg.

        Raises StoreError.
        """
        self._out, self._total, self._evaluations, self._named = out, total_steps, evaluations, (title, what)
        self._trackers = list(trackers)
        self.totals, self._losses, self._evals = Totals(), Curve(), Curve()
        path = out / "log.jsonl"
        whole = since is None or is_whole(path, since)
        self._jsonl = Appender(path, read_until(path, since) if since else ())
        self._csv = Appender(out / "log.csv", self._taken_over(path))
        self._screen = screen
        self._ends: deque[float] = deque(maxlen=50)  # of the last steps, evaluations between them left out
        self._evaluated = 0.0  # seconds, in this process
        self._warned = False
        if since and not whole:
            screen.warn(f"{path} is not as it was at step {since.step:,}: lines were lost or changed")

    def _taken_over(self, path: Path) -> Iterator[bytes]:
        """The lines of log.csv, made from log.jsonl, which are counted."""
        yield ",".join(COLUMNS).encode() + b"\n"
        for _, record in read_log(path):
            self._count(record)
            yield as_csv(record)

    def _count(self, record: Record) -> None:
        self.totals.add(record)
        for curve, key in ((self._losses, "loss"), (self._evals, "eval_loss")):
            if key in record:
                curve.add(record["step"], record[key])

    def step(self, record: Record) -> None:
        """Logs a step: `step`, `loss` and any of COLUMNS."""
        self._add(record)
        self._ends.append(time.monotonic() - self._evaluated)
        final = record["step"] >= self._total
        self._screen.show(progress(record, self._total, None if final else self._eta(record)), final)

    def eval(self, record: Record) -> None:
        """Logs an evaluation: `step` (0 before training), `eval_loss`, `epoch`, and perhaps `sample`, a text."""
        best, first = self.totals.best[0] if self.totals.best else math.inf, self.totals.evals
        self._add(record)
        self._evaluated += record.get("eval_time_s", 0.0)
        loss = record["eval_loss"]
        above = f", not better than {first[0]:.4f} before training" if first and not loss < first[0] else ""
        note = "(before training)" if record["step"] == 0 else f"(best{'' if loss < best else f' {best:.4f}'}{above})"
        sample = f"  sample: {json.dumps(record['sample'], ensure_ascii=False)}" if record.get("sample") else ""
        said = evaluated(loss, record)
        self._screen.say(f"step {record['step']:,}  {said} {note}{sample}")
        self.draw()

    def summary(self) -> str:
        """Draws loss.svg; returns the last line of the run."""
        self.draw()
        return self.totals.line()

    def sync(self, step: int, evaluated: int | None) -> Mark:
        """Makes the log durable; returns how far it goes."""
        for file in (self._jsonl, self._csv):
            if error := file.sync():
                self._warn(error)
        return Mark(step, evaluated, self._jsonl.nbytes, self._jsonl.crc32)

    def draw(self) -> None:
        try:
            replace_synced(self._out / "loss.svg", draw(self._losses.points, self._evals.points, *self._named).encode())
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        self._screen.clear()
        self.draw()
        for file in (self._jsonl, self._csv):
            file.close()

    def _add(self, record: Record) -> None:
        self._count(record)
        for file, line in ((self._jsonl, as_json(record)), (self._csv, as_csv(record))):
            if error := file.append(line):
                self._warn(error)
        for tracker in tuple(self._trackers):
            try:
                tracker[0](record)
            except Exception as error:
                self._trackers.remove(tracker)
                _warn_of_tracker(self._screen, error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._screen.warn(f"the log in {self._out} cannot be written ({error.strerror}); training continues")
            self._warned = True

    def _eta(self, record: Record) -> float | None:
        """Seconds until the end, evaluations included."""
        left, t = self._total - record["step"], self.totals
        evaluations = t.evaluating / t.evaluations * max(0, self._evaluations - t.evaluations) if t.evaluations else 0.0
        if len(self._ends) > 1:
            return evaluations + left * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return evaluations + left * record["step_time_s"] if "step_time_s" in record else None


def evaluated(loss: float, record: Record) -> str:
    """eval_loss and the other figures of an evaluation, as text."""
    shown = {"accuracy": "eval_rewards/accuracies", "margin": "eval_rewards/margins"}
    if "eval_rows" in record:
        shown = {"accuracy": "eval_accuracy", "margin": "eval_margin"}
    parts = [f"{word} {record[key]:.4g}" for word, key in shown.items() if key in record]
    if "eval_ce" in record:
        ce, kl = record["eval_ce"], record["eval_kl"]
        parts = [f"ce {ce:.4f}", f"kl {kl:.4f}", f"perplexity {perplexity(ce)}"]
    elif not parts:
        parts = [f"perplexity {perplexity(loss)}"]
        parts += [f"accuracy {record['eval_accuracy']:.4f}"] if "eval_accuracy" in record else []
    return "  ".join([f"eval_loss {loss:.4f}", *parts])


def perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 50 else "inf"
