"""The log of a run: log.jsonl, the line of a step, tensorboard and wandb, totals, report.html.

Nothing here stops a run: if a drive is full, lines wait in memory and the user is warned once; a tracker that fails is
left out.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.engine.amounts import compact, count, duration, percent
from trireme.engine.run import config_file, page, screen
from trireme.engine.run.options import Options
from trireme.models.config import InputError
from trireme.storage.files import replace_synced, sync_folder

Record = dict[str, Any]  # of a step or evaluation
Tracker = tuple[Callable[[Record], object], Callable[[], object]]  # (add, close)
LAST = 50  # steps from which the rest is estimated
APART = 10.0  # seconds between lines of steps that stay
DOUBLED = 2.0  # of the smoothed loss at the beginning: the run diverges
SHOWN = {"ce": "ce", "kl": "kl", "accuracy": "accuracy", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}


@dataclass
class Totals:
    """Sums over the log of a run."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    trained: int = 0
    evaluations: int = 0
    evaluating: float = 0.0  # seconds, samples included

    def add(self, record: Mapping[str, Any]) -> None:
        if "loss" in record:
            self.steps, self.seconds = self.steps + 1, self.seconds + record["step_time_s"]
            self.tokens, self.trained = self.tokens + record["tokens"], self.trained + record.get("trained_tokens", 0)
        else:
            self.evaluations += 1
            self.evaluating += record["eval_time_s"]


class Log:
    """Used by one thread at a time."""

    def __init__(self, out: Path, total: int, evaluations: int, since: int, trackers: Sequence[Tracker]):
        """`since`: bytes that belong to the snapshot; what comes behind is removed. `evaluations`: of the whole run.

        Raises OSError.
        """
        self.path, self.total, self.expected, self.trackers = out / "log.jsonl", total, evaluations, list(trackers)
        self.totals, self.records = Totals(), list[Record]()
        self.waiting, self.warned, self.diverges, self.evaluated = b"", False, False, 0.0
        self.stayed = -math.inf  # when a step's line last stayed
        self.ends: deque[float] = deque(maxlen=LAST)  # of the last steps, without the evaluations between them
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(self.fd).st_size < since:
            screen.warn(f"{self.path} is shorter than it was at the snapshot: lines were lost")
        os.ftruncate(self.fd, min(since, os.fstat(self.fd).st_size))
        sync_folder(out)
        for record in read_log(self.path):
            self._count(record)
        self.nbytes = os.fstat(self.fd).st_size

    def step(self, record: Record) -> None:
        """Logs a step, and shows its line; about every tenth of the run its line stays."""
        self._add(record)
        now, step, total = time.monotonic(), record["step"], self.total
        self.ends.append(now - self.evaluated)
        tenth = step * 10 // total > (step - 1) * 10 // total and now - self.stayed >= APART
        self.stayed = now if tenth else self.stayed
        screen.show(line_of(record, total, None if step == total else self.left(step)), tenth or step == total)
        first, last = self.smoothed
        if not self.diverges and step > 2 and last > DOUBLED * abs(first):
            self.diverges = True
            screen.warn(f"the loss rises, {first:.4g} -> {last:.4g}: the run diverges. Lower --lr")

    def eval(self, record: Record) -> None:
        """Logs an evaluation."""
        self._add(record)
        self.evaluated += record["eval_time_s"]

    @property
    def smoothed(self) -> tuple[float, float]:
        """Mean losses of the first and of the last tenth of the steps."""
        losses = [record["loss"] for record in self.records if "loss" in record]
        n = max(1, min(LAST, len(losses) // 10))
        return (sum(losses[:n]) / n, sum(losses[-n:]) / n) if losses else (math.nan, math.nan)

    def left(self, step: int) -> float:
        """Seconds until the end, evaluations included."""
        t, ends = self.totals, self.ends
        each = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else t.seconds / max(1, t.steps)
        return (self.total - step) * each + t.evaluating / max(1, t.evaluations) * max(0, self.expected - t.evaluations)

    def sync(self) -> int:
        """Makes the log durable; returns its bytes."""
        self._flush()
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            self._warn(error)
        return self.nbytes

    def close(self) -> None:
        screen.clear()
        self.sync()
        os.close(self.fd)

    def draw(self, facts: page.Facts) -> None:
        """Writes report.html."""
        try:
            replace_synced(self.path.with_name("report.html"), page.page(self.records, facts).encode())
        except OSError as error:
            self._warn(error)

    def line(self) -> str:
        """The last line of the run."""
        t, evals = self.totals, [record["eval_loss"] for record in self.records if "eval_loss" in record]
        parts = [f"done     {count(t.steps, 'step')}", duration(t.seconds)]
        parts += [f"{count(t.evaluations, 'evaluation')} {duration(t.evaluating)}"] if evals else []
        parts += ["loss {:.4g} -> {:.4g}".format(*self.smoothed)] if t.steps else []
        parts += [f"eval {evals[0]:.4g} -> {evals[-1]:.4g}"] if evals else []
        trained = f"{compact(t.trained)} trained of " if t.trained else ""
        return ", ".join(
            [*parts, f"{trained}{compact(t.tokens)} tokens, {compact(t.tokens / max(t.seconds, 1e-9))} tok/s"]
        )

    def _add(self, record: Record) -> None:
        self._count(record)
        line = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self.waiting += json.dumps(line).encode() + b"\n"
        self._flush()
        for tracker in tuple(self.trackers):
            try:
                tracker[0](record)
            except Exception as error:
                self.trackers.remove(tracker)
                warn_of_tracker(error)

    def _count(self, record: Record) -> None:
        self.totals.add(record)
        self.records.append({key: record[key] for key in page.DRAWN if key in record})

    def _flush(self) -> None:
        """Writes what waits; a torn line is cut off again."""
        try:
            while self.waiting:
                written = os.write(self.fd, self.waiting)
                end = self.waiting.rfind(b"\n", 0, written) + 1
                self.nbytes += end
                if end < written:
                    os.ftruncate(self.fd, self.nbytes)
                self.waiting = self.waiting[end:]
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self.warned:
            screen.warn(f"the log in {self.path.parent} cannot be written ({error.strerror}); training continues")
            self.warned = True


def read_log(path: Path) -> Iterator[Record]:
    """The records of a log.jsonl, without damaged lines. Raises OSError."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in json.loads(line).items()}
                if ("loss" in record and {"step_time_s", "tokens", "step"} <= record.keys()) or "eval_time_s" in record:
                    yield record
            except (ValueError, AttributeError, TypeError):
                continue


def line_of(r: Record, total: int, left: float | None) -> str:
    """The line of a step, what says most first."""
    parts = [f"step {r['step']:>{len(f'{total:,}')},}/{total:,}", f"loss {r['loss']:.4f}"]
    parts += [f"{word} {r[name]:.3g}" for name, word in SHOWN.items() if name in r]
    parts += [f"eta {duration(left)}"] if left is not None else []
    parts += [f"{compact(r['tokens_per_second'])} tok/s", f"lr {r['learning_rate']:.1e}"]
    parts += [f"grad_norm {r['grad_norm']:.2g}", f"{r['step_time_s']:.3g} s"]
    parts += [f"busiest expert {percent(r['expert_share'])}, {r['experts_idle']} idle"] if "expert_share" in r else []
    parts += [f"mfu {percent(r['mfu'])}", f"limited by {r['bound']}"] if "mfu" in r else []
    return "  ".join(parts)


def eval_line(record: Record, note: str) -> str:
    """The line of an evaluation."""
    figures = {f"eval_{name}": word for name, word in SHOWN.items()}
    parts = [f"eval_loss {record['eval_loss']:.4f}{note}"]
    parts += [f"{word} {record[name]:.4g}" for name, word in figures.items() if name in record]
    if not any(name in record for name in figures if name != "eval_accuracy") and "eval_rows" not in record:
        parts.append(f"perplexity {perplexity(record['eval_loss'])}")
    return "  ".join(parts)


def perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 50 else "inf"


# ---------------------------------------------------------------- trackers


@contextmanager
def trackers(o: Options, id: str) -> Iterator[list[Tracker]]:
    """A context with the trackers of --log, started before anything takes time. `id`: of the run. Raises InputError."""
    started = list[Tracker]()
    try:
        for name, start in (("tensorboard", _tensorboard), ("wandb", _wandb)):
            if name in o.log:
                started.append(_started(name, start, o, id))
        yield started
    finally:
        for _, close in started:
            try:
                close()
            except Exception as error:
                warn_of_tracker(error)


def _started(name: str, start: Callable[[Options, str], Tracker], o: Options, id: str) -> Tracker:
    try:
        return start(o, id)
    except ImportError:
        raise InputError(f"--log {name}: it is not installed. pip install {name}, or leave it out.") from None
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        way = "Log in with `wandb login`, or set WANDB_MODE=offline" if name == "wandb" else "Fix that"
        raise InputError(f"--log {name}: {why}. {way}, or leave it out.") from None


def warn_of_tracker(error: Exception) -> None:
    screen.warn(f"a tracker of --log has failed and is left out from here on ({error!r})")


def _tensorboard(o: Options, _: str) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter  # late: optional

    writer = SummaryWriter(str(Path(o.out) / "tensorboard"))
    numbers = lambda record: ((k, v) for k, v in record.items() if isinstance(v, (int, float)) and k != "step")

    def add(record: Record) -> None:
        for name, value in numbers(record):
            writer.add_scalar(name, value, record["step"])

    return add, writer.close


def _wandb(o: Options, id: str) -> Tracker:
    import wandb  # late: optional

    run = wandb.init(
        project="trireme", name=Path(o.out).name, id=id, resume="allow", dir=o.out, config=config_file.saved(o)
    )
    return lambda record: run.log(record, step=record["step"]), run.finish
