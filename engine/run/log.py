"""The log of a run: log.jsonl, the line of a step, tensorboard and wandb, totals, report.html.

Nothing here stops a run: if a drive is full, lines wait in memory and the user is warned once; a tracker that fails is
left out.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import compact, count, duration, percent
from trireme.engine.hosts.group import world
from trireme.engine.run import config_file, page, screen
from trireme.engine.run.options import Options
from trireme.models.config import InputError
from trireme.models.rows import Load
from trireme.storage.files import replace_synced, sync_folder

Record = dict[str, Any]  # of a step or evaluation
Tracker = tuple[Callable[[Record], object], Callable[[], object]]  # (add, close)
LAST = 50  # steps from which the rest is estimated
APART = 10.0  # seconds between lines of steps that stay
DOUBLED, NOISE, FEWEST = 2.0, 2.0, 3  # the run diverges at twice the first loss and more than noise, in some steps
IN_MEMORY = (*page.DRAWN, "step_time_s", "tokens", "trained_tokens", "eval_time_s", "general_loss", "general_accuracy")
SHOWN = {"ce": "ce", "kl": "kl", "accuracy": "accuracy", "rewards/accuracies": "accuracy", "rewards/margins": "margin"}


class Log:
    """Used by one thread at a time."""

    def __init__(self, out: Path, total: int, evaluations: int, since: int, others: Sequence[Tracker]):
        """`since`: bytes that belong to the snapshot; what comes behind is removed. `evaluations`: of the whole run.

        Raises OSError.
        """
        self.path, self.total, self.expected, self.trackers = out / "log.jsonl", total, evaluations, list(others)
        self.steps, self.evals, self.general = list[Record](), list[Record](), list[Record]()  # IN_MEMORY of each
        self.waiting, self.warned, self.diverges = b"", False, False
        self.stayed = -math.inf  # when a step's line last stayed
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(self.fd).st_size < since:
            screen.warn(f"{self.path} is shorter than it was at the snapshot: lines were lost")
        os.ftruncate(self.fd, min(since, os.fstat(self.fd).st_size))
        sync_folder(out)
        for record in read_log(self.path):
            self._remember(record)
        self.nbytes = os.fstat(self.fd).st_size

    def step(self, record: Record) -> None:
        """Logs a step, and shows its line; about every tenth of the run its line stays."""
        self.add(record)
        now, step, total = time.monotonic(), record["step"], self.total
        tenth = step * 10 // total > (step - 1) * 10 // total and now - self.stayed >= APART
        self.stayed = now if tenth else self.stayed
        screen.show(line_of(record, total, None if step == total else self.left(step)), tenth or step == total)
        first, last = self.steps[0]["loss"], self.smoothed[1]  # the first is before any update
        if not self.diverges and len(self.steps) >= FEWEST and last > DOUBLED * abs(first) + NOISE:
            self.diverges = True
            screen.warn(f"the loss rises, {first:.4g} -> {last:.4g}: the run diverges. Lower --lr")

    @property
    def smoothed(self) -> tuple[float, float]:
        """Mean losses of the first and of the last tenth of the steps. There is a step."""
        n = max(1, min(FEWEST, len(self.steps) // 2), min(LAST, len(self.steps) // 10))
        first, last = (totalled(part, "loss") / len(part) for part in (self.steps[:n], self.steps[-n:]))
        return first, last

    def left(self, step: int) -> float:
        """Seconds until the end, evaluations included."""
        steps, evals = self.steps[-LAST:], self.evals
        step_s, eval_s = totalled(steps, "step_time_s") / len(steps), totalled(evals, "eval_time_s")
        return (self.total - step) * step_s + eval_s / max(1, len(evals)) * max(0, self.expected - len(evals))

    def sync(self) -> int:
        """Makes the log durable; returns its bytes."""
        self._flush()
        with self._forgiving():
            os.fdatasync(self.fd)
        return self.nbytes

    def close(self) -> None:
        screen.clear()
        self.sync()
        os.close(self.fd)
        for _, end in self.trackers:
            works(end)

    def draw(self, facts: page.PageFacts) -> None:
        """Writes report.html."""
        html = page.page([*self.steps, *self.evals], facts).encode(errors="replace")  # names may be no UTF-8
        with self._forgiving():
            replace_synced(self.path.with_name("report.html"), html)

    def line(self) -> str:
        """The last line of the run."""
        seconds, tokens, trained = (totalled(self.steps, key) for key in ("step_time_s", "tokens", "trained_tokens"))
        parts = [f"done     {count(len(self.steps), 'step')}", duration(seconds)]
        if self.evals:
            parts.append(f"{count(len(self.evals), 'evaluation')} {duration(totalled(self.evals, 'eval_time_s'))}")
        parts += ["loss {:.4g} -> {:.4g}".format(*self.smoothed)] if self.steps else []
        share = f"{compact(trained)} trained of " if trained else ""
        return ", ".join([*parts, f"{share}{compact(tokens)} tokens, {compact(tokens / max(seconds, 1e-9))} tok/s"])

    def add(self, record: Record) -> None:
        """Logs a step or an evaluation."""
        self._remember(record)
        line = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self.waiting += json.dumps(line).encode() + b"\n"
        self._flush()
        self.trackers = [tracker for tracker in self.trackers if works(partial(tracker[0], record))]

    def _remember(self, record: Record) -> None:
        part = {key: record[key] for key in IN_MEMORY if key in record}
        series = {"loss": self.steps, "eval_loss": self.evals, "general_loss": self.general}
        next(records for name, records in series.items() if name in record).append(part)

    def _flush(self) -> None:
        """Writes what waits; a torn line is cut off again."""
        with self._forgiving():
            while self.waiting:
                written = os.write(self.fd, self.waiting)
                end = self.waiting.rfind(b"\n", 0, written) + 1
                self.nbytes += end
                if end < written:
                    os.ftruncate(self.fd, self.nbytes)
                self.waiting = self.waiting[end:]

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """A context whose OSError is a warning, the first time."""
        try:
            yield
        except OSError as error:
            if not self.warned:
                screen.warn(f"the log in {self.path.parent} cannot be written ({error.strerror}); training continues")
            self.warned = True


def totalled(records: Iterable[Record], key: str) -> float:
    """The sum of one number over records."""
    return sum(record.get(key, 0) for record in records)


def read_log(path: Path) -> Iterator[Record]:
    """The records of a log.jsonl, without damaged lines. Raises OSError."""
    for line in path.read_bytes().splitlines():
        try:
            record = {k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in json.loads(line).items()}
        except (ValueError, AttributeError, TypeError):
            continue
        if {"loss", "step_time_s", "tokens", "step"} <= record.keys() or {"eval_loss", "general_loss"} & record.keys():
            yield record


def label_of(step: int, total: int) -> str:
    """A step's number, as wide in all lines of the run."""
    return f"step {step:>{len(f'{total:,}')},}"


def line_of(r: Record, total: int, left: float | None) -> str:
    """The line of a step, what says most first."""
    parts = [f"{label_of(r['step'], total)}/{total:,}", f"loss {r['loss']:.4f}"]
    parts += [f"{word} {r[name]:.3g}" for name, word in SHOWN.items() if name in r]
    parts += [f"eta {duration(left)}"] if left is not None else []
    parts += [f"{compact(r['tokens_per_second'])} tok/s", f"lr {r['learning_rate']:.1e}"]
    parts += [f"grad_norm {r['grad_norm']:.2g}", f"{r['step_time_s']:.3g} s"]
    parts += [f"busiest expert {percent(r['expert_share'])}, {r['experts_idle']} idle"] if "expert_share" in r else []
    parts += [f"mfu {percent(r['mfu'])}"] if "mfu" in r else []
    parts += [f"limited by {r['bound']}"] if "mfu" in r and r["bound"] else []
    return "  ".join(parts)


def eval_line(record: Record, note: str) -> str:
    """The line of an evaluation."""
    figures = {f"eval_{name}": word for name, word in SHOWN.items()}
    parts = [f"eval_loss {record['eval_loss']:.4f}{note}"]
    parts += [f"{word} {record[name]:.4g}" for name, word in figures.items() if name in record]
    if figures.keys() & record.keys() == {"eval_accuracy"} and "eval_rows" not in record:
        parts.append(f"perplexity {math.exp(min(record['eval_loss'], 50.0)):.4g}")
    return "  ".join(parts)


def load_record(load: Load | None) -> Record:
    """The largest share of a layer's tokens that one expert has, experts without a token, the balance loss."""
    if load is None:
        return {}
    group = world()
    if group.hosts > 1 and not load.weight:  # else the step has asked the others
        counts = group.numbers(load.counts.flatten().tolist(), load.counts.numel())
        load.counts.copy_(torch.tensor(counts).view(group.hosts, *load.counts.shape).sum(0))
    counted = load.counts[load.counts.any(1)]  # dense layers count nothing
    shares = counted / counted.sum(1, keepdim=True)
    record: Record = {"expert_share": round(float(shares.max()), 4), "experts_idle": int((counted == 0).sum())}
    return record | ({"router_aux": round(load.loss(), 6)} if load.weight else {})


# ---------------------------------------------------------------- trackers


def trackers(o: Options, id: str) -> list[Tracker]:
    """Starts the trackers of --log. `id`: of the run. Raises InputError."""
    started = list[Tracker]()
    for name in o.log:
        try:
            started.append(STARTS[name](o, id))
        except Exception as error:
            first = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".")
            advice = f"Install it (pip install {name}), log in to it, or leave it out"
            raise InputError(f"--log {name}: {first}. {advice}.") from None
    return started


def works(call: Callable[[], object]) -> bool:
    """Calls a tracker, which may be broken, and warns if it is."""
    try:
        call()
    except Exception as error:
        screen.warn(f"a tracker of --log has failed and is left out from here on ({error!r})")
        return False
    return True


def _tensorboard(o: Options, _: str) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter  # late: optional

    writer = SummaryWriter(str(Path(o.out) / "tensorboard"))

    def add(record: Record) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                writer.add_scalar(name, value, record["step"])

    return add, writer.close


def _wandb(o: Options, id: str) -> Tracker:
    import wandb  # late: optional

    values = config_file.saved(o)
    run = wandb.init(project="trireme", name=Path(o.out).name, id=id, resume="allow", dir=o.out, config=values)
    return lambda record: run.log(record, step=record["step"]), run.finish


STARTS = {"tensorboard": _tensorboard, "wandb": _wandb}
