"""What a run says while it trains: log.jsonl and log.csv, the line on the terminal, loss.svg, and trackers by request.

log.jsonl is the record: one object a line, Hugging Face's names. log.csv and loss.svg follow from it. Nothing here can
stop a run: a disk that is full delays the lines and is reported once, a terminal that has gone is forgotten.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from trireme.engine.curve import draw
from trireme.engine.options import Options
from trireme.engine.screen import Screen, compact, duration, progress
from trireme.models.config import InputError

COLUMNS = (
    "step epoch loss eval_loss learning_rate grad_norm tokens_per_second trained_tokens_per_second mfu step_time_s "
    "gpu_mem_gib ram_gib ssd_read_gbs ssd_written_tb bound"
).split()
Record = dict[str, Any]


class Appender:
    """A text file that grows by whole lines only, even when the disk is full: what does not fit waits in memory."""

    def __init__(self, path: Path, lines: list[str]):
        """Replaces the file, in one step, by `lines`, and opens it for more."""
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        os.replace(scratch, path)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._size = os.fstat(self._fd).st_size
        self._waiting = b""

    def append(self, line: str) -> OSError | None:
        """Adds a line, after those that could not be written before. Returns the error when they have to wait again."""
        self._waiting += line.encode() + b"\n"
        return self._flush()

    def _flush(self) -> OSError | None:
        try:
            while self._waiting:
                written = os.write(self._fd, self._waiting)
                end = self._waiting.rfind(b"\n", 0, written) + 1
                if end < written:
                    os.ftruncate(self._fd, self._size + end)  # no torn line stays behind
                self._size += end
                self._waiting = self._waiting[end:]
                if not end:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        self._flush()
        os.close(self._fd)


def read_log(path: Path, last_step: int) -> list[Record]:
    """The records of a log.jsonl up to `last_step`; a torn last line, left by a crash, is passed over."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("step", math.inf) <= last_step:
            records.append({k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in record.items()})
    return records


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity; they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_json(record: Record) -> str:
    ordered = {key: record[key] for key in COLUMNS if key in record} | record
    return json.dumps({key: _finite(value) for key, value in ordered.items()}, allow_nan=False)


def as_csv(record: Record) -> str:
    return ",".join("" if record.get(key) is None else str(record[key]) for key in COLUMNS)


# ---------------------------------------------------------------- trackers


Tracker = tuple[Callable[[Record], None], Callable[[], None]]  # (add, close)


def _tensorboard(out: Path, options: Options) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tensorboard"))

    def add(record: Record) -> None:
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != "step":
                writer.add_scalar(key, value, record["step"])

    return add, writer.close


def _wandb(out: Path, options: Options) -> Tracker:
    import wandb

    run = wandb.init(project="trireme", name=out.name, dir=str(out), config=asdict(options))
    return lambda record: run.log(record, step=record["step"]), run.finish


def _trackers(out: Path, options: Options) -> list[Tracker]:
    """The trackers in --log, imported by request: nobody else needs them, and nothing phones home."""
    made = []
    for name, start in (("tensorboard", _tensorboard), ("wandb", _wandb)):
        if name in options.log:
            try:
                made.append(start(out, options))
            except ImportError:
                raise InputError(f"--log {name}: it is not installed. pip install {name}, or leave it out.") from None
    return made


# ---------------------------------------------------------------- the log of a run


class RunLog:
    """Everything a run reports, in one place. One thread at a time."""

    def __init__(
        self, out: Path, options: Options, total_steps: int, start_step: int = 0, stream: TextIO | None = None
    ):
        """Opens OUT's logs. When resuming, `start_step` is the last step that stands: later lines are dropped."""
        self._out, self._total = out, total_steps
        self._trackers = _trackers(out, options)
        self._records = read_log(out / "log.jsonl", start_step) if start_step else []
        self._jsonl = Appender(out / "log.jsonl", [as_json(r) for r in self._records])
        self._csv = Appender(out / "log.csv", [",".join(COLUMNS), *(as_csv(r) for r in self._records)])
        self.screen = Screen(stream or sys.stdout)
        self._ends: deque[float] = deque(maxlen=50)  # ends of the last steps: what lies between counts too
        self._warned = False

    def say(self, line: str) -> None:
        self.screen.say(line)

    def step(self, record: Record) -> None:
        """One optimizer step: `step`, `loss`, and whatever else of COLUMNS is known."""
        self._add(record)
        self._ends.append(time.monotonic())
        final = record["step"] >= self._total
        self.screen.show(progress(record, self._total, None if final else self._eta(record)), final)

    def eval(self, record: Record) -> None:
        """An evaluation: `step` (0 before training), `eval_loss`, `epoch`; `sample`, a text, when there is one."""
        best = min((r["eval_loss"] for r in self._records if "eval_loss" in r), default=math.inf)
        self._add({key: value for key, value in record.items() if key != "sample"})
        loss = record["eval_loss"]
        note = "(before training)" if record["step"] == 0 else "(best)" if loss < best else f"(best {best:.4f})"
        sample = f"  sample: {json.dumps(record['sample'], ensure_ascii=False)}" if record.get("sample") else ""
        self.say(f"step {record['step']}  eval_loss {loss:.4f}  perplexity {_perplexity(loss)} {note}{sample}")
        self.draw()

    def summary(self) -> str:
        """Draws the picture and returns the line at the end of a run: steps, time, how the losses went, tokens."""
        self.draw()
        steps = [r for r in self._records if "loss" in r]
        evals = [r for r in self._records if "eval_loss" in r]
        parts = [f"done     {len(steps):,} steps"]
        seconds = sum(r.get("step_time_s", 0.0) for r in steps)
        if seconds:
            parts.append(duration(seconds))
        if steps:
            parts.append(f"loss {steps[0]['loss']:.4g} -> {steps[-1]['loss']:.4g}")
        if evals:
            best = min(evals, key=lambda r: r["eval_loss"])
            note = "" if best is evals[-1] else f" (best {best['eval_loss']:.4g} at step {best['step']:,})"
            parts.append(f"eval {evals[0]['eval_loss']:.4g} -> {evals[-1]['eval_loss']:.4g}{note}")
        if seconds:
            seen, trained = (
                sum(r.get(key, 0.0) * r.get("step_time_s", 0.0) for r in steps)
                for key in ("tokens_per_second", "trained_tokens_per_second")
            )
            parts += [f"{compact(trained)} trained tokens of {compact(seen)}", f"{compact(seen / seconds)} tok/s"]
        return ", ".join(parts)

    def draw(self) -> None:
        """Writes loss.svg from what has been logged so far."""
        scratch = self._out / "loss.svg.tmp"
        try:
            scratch.write_text(draw(self._records), encoding="utf-8")
            os.replace(scratch, self._out / "loss.svg")
        except OSError as error:
            scratch.unlink(missing_ok=True)
            self._warn(error)

    def close(self) -> None:
        self.screen.clear()
        self.draw()
        for file in (self._jsonl, self._csv):
            file.close()
        for _, close in self._trackers:
            try:
                close()
            except Exception as error:
                self._warn_of_tracker(error)

    def _add(self, record: Record) -> None:
        self._records.append(record)
        for file, line in ((self._jsonl, as_json(record)), (self._csv, as_csv(record))):
            if error := file.append(line):
                self._warn(error)
        for tracker in tuple(self._trackers):
            try:
                tracker[0](record)
            except Exception as error:
                self._trackers.remove(tracker)
                self._warn_of_tracker(error)

    def _warn_of_tracker(self, error: Exception) -> None:
        """Somebody else's code, perhaps over a network: never worth a run."""
        self.say(f"warning: a tracker of --log has failed and is left out from here on ({error!r})")

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self.say(f"warning: the log in {self._out} cannot be written ({error.strerror}); training goes on")
            self._warned = True

    def _eta(self, record: Record) -> float | None:
        """Seconds to go, at the pace of the last steps."""
        left = self._total - record["step"]
        if len(self._ends) > 1:
            return left * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return left * record["step_time_s"] if "step_time_s" in record else None


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 50 else "inf"
