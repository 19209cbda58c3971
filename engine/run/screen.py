"""The output of a run: lines that stay, a live line on a terminal (plain lines in a pipe), errors."""

from __future__ import annotations

import math
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from trireme.engine.amounts import compact, duration, percent
from trireme.storage.files import StoreError
from trireme.storage.untrusted import LINE, displayed, shown

OUTPUT = "standard output"
PLAIN_SECONDS = 10.0  # between lines in a pipe
LIVE_SECONDS = 0.1
PATIENCE = 3.0  # seconds before progress shows
TICK = 1.0  # seconds between looks at a step
PLAIN_STEP = 60.0  # seconds between lines of one step in a pipe
COMMAND = re.compile(r"\b(?:trireme|python scripts/finetune\.py) [^;,()]*")
INDENT = 9  # of a line's continuation: the width of its label


def progress(record: Mapping[str, Any], total_steps: int, eta: float | None) -> dict[str, str]:
    """The parts of a step's line, in order."""
    r = {key: value for key, value in record.items() if value is not None}
    parts = {"step": f"step {r['step']:>{len(f'{total_steps:,}')},}/{total_steps:,}", "loss": f"loss {r['loss']:.4f}"}
    if "ce" in r and "kl" in r:
        parts["parts"] = f"ce {r['ce']:.4f} kl {r['kl']:.4f}"
    scored = "rows_per_second" in r
    accuracy, margin = ("accuracy", "margin") if scored else ("rewards/accuracies", "rewards/margins")
    if accuracy in r:
        parts["accuracy"] = f"accuracy {r[accuracy]:.2f}"
    if margin in r:
        parts["margin"] = f"margin {r[margin]:.3g}"
    if "learning_rate" in r:
        parts["lr"] = f"lr {r['learning_rate']:.1e}"
    if "grad_norm" in r:
        parts["norm"] = f"grad_norm {r['grad_norm']:.2g}"
    if "tokens_per_second" in r:
        trained = r.get("trained_tokens_per_second", r["tokens_per_second"])
        rows = f" ({compact(r['rows_per_second'])} rows)" if scored else ""
        some = rows or f" ({compact(trained)} trained)" if scored or trained < 0.95 * r["tokens_per_second"] else ""
        parts["speed"] = f"{compact(r['tokens_per_second'])} tok/s{some}"
    if "step_time_s" in r:
        parts["time"] = f"{r['step_time_s']:.3g} s"
    if "mfu" in r:
        parts["mfu"] = f"mfu {percent(r['mfu'])}"
    memory = [f"{name} {r[key]:.3g} GiB" for name, key in (("gpu", "gpu_mem_gib"), ("ram", "ram_gib")) if key in r]
    if memory:
        parts["memory"] = " ".join(memory)
    if "expert_share" in r:
        parts["experts"] = f"busiest expert {percent(r['expert_share'])}, {r['experts_idle']} idle"
    if "bound" in r:
        parts["bound"] = f"bound: {r['bound']}"
    if eta is not None:
        parts["eta"] = f"eta {duration(eta)}"
    return parts


def one_line(parts: Mapping[str, str], width: float = math.inf) -> str:
    """A line shorter than `width`: parts that say least are left out, then its end is cut."""
    parts = {name: shown(part, LINE) for name, part in parts.items()}
    for name in ("memory", "mfu", "experts", "time", "norm", "lr", "bound", "speed"):
        if len("  ".join(parts.values())) < width:
            break
        parts.pop(name, None)
    line = "  ".join(parts.values())
    return line if len(line) < width else line[: int(width) - 1]


def wrapped(line: str, width: int) -> str:
    """A line divided between words for a terminal of this width; all but the first part are indented.

    A command, which users copy, is not divided.
    """
    if len(line) < width:
        return line
    whole = COMMAND.sub(lambda found: found[0].replace(" ", "\0"), line)
    parts = textwrap.wrap(
        whole, max(20, width - 1), subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(parts).replace("\0", " ")


class Screen:
    """Standard output and standard error. Used by one thread at a time, except `urgent`."""

    def __init__(self, stream: TextIO | None = None):
        self._stream: TextIO | None = stream or sys.stdout
        self._live = self._stream.isatty()
        self._parts: Mapping[str, str] = {}  # of the live line
        self._last = -math.inf
        self._may_fail = True
        self.counted = 0  # sizes told while `working`, in all
        self.waits = False  # for a terminal that is held

    def forgive(self) -> None:
        """From now on, output that cannot be written is dropped."""
        self._may_fail = False

    def _write(self, text: str) -> None:
        self.waits = True
        try:
            if self._stream:
                self._stream.write(text)
                self._stream.flush()
        except OSError as error:
            if self._may_fail and isinstance(error, BrokenPipeError):
                raise
            if self._may_fail:
                raise StoreError(error.errno, error.strerror, OUTPUT) from error
            self._stream = None
        finally:
            self.waits = False

    def say(self, line: str) -> None:
        """Prints a line above the live line. Raises StoreError and BrokenPipeError, until `forgive` is called."""
        line = shown(line, LINE)
        if self._live:
            line = wrapped(line, shutil.get_terminal_size().columns)
        self._write(f"\r\x1b[K{line}\n{self._drawn()}" if self._parts else line + "\n")

    def text(self, piece: str) -> None:
        """Prints text as it is, without a line end: what the command was called for. Raises as `say`.

        On a terminal control characters are escaped, since a model may have learned any text.
        """
        self._write(displayed(piece) if self._live else piece)

    def warn(self, line: str) -> None:
        self.say(f"warning: {line}")

    def urgent(self, line: str) -> None:
        """Prints to standard error. May be called in a signal handler."""
        with suppress(OSError, RuntimeError):  # a closed terminal; within another line
            if sys.stderr.isatty():
                width = shutil.get_terminal_size().columns
                line = "\n".join(wrapped(part, width) for part in line.split("\n"))
            print(line, file=sys.stderr, flush=True)

    def show(self, parts: Mapping[str, str], final: bool) -> None:
        """Redraws the live line; in a pipe, prints a line every PLAIN_SECONDS and the final one."""
        now = time.monotonic()
        if not final and now - self._last < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._last = now
        if not self._live:
            self._write(one_line(parts) + "\n")
            return
        self._parts = parts
        self._write("\r\x1b[K" + self._drawn())
        if final:
            self._write("\n")
            self._parts = {}

    def _drawn(self) -> str:
        """The live line in the terminal's width: a line that wraps cannot be redrawn."""
        return one_line(self._parts, shutil.get_terminal_size().columns)

    @contextmanager
    def passing(self, step: str, expected: float | None) -> Iterator[None]:
        """A context that shows the seconds of a long step, in a pipe every minute. Within, only `urgent` may print."""
        began, ended, before = time.monotonic(), threading.Event(), dict(self._parts)

        def tell() -> None:
            due = PATIENCE if self._live else PLAIN_STEP
            while not ended.wait(TICK):
                passed = time.monotonic() - began
                if passed > due:
                    due += 0 if self._live else PLAIN_STEP
                    of = f" of about {duration(expected)}" if expected and passed < expected else ""
                    self.show(before | {"step": f"{step}  {duration(passed)}{of}"}, False)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if self._live:
                self._last = -math.inf

    def clear(self) -> None:
        if self._parts:
            self._write("\r\x1b[K")
            self._parts = {}

    def far(self, what: str, done: int, total: int, begun: float, unit: str = "B") -> None:
        """Shows how much of some work is done. `begun`: by time.monotonic."""
        seconds = time.monotonic() - begun
        if seconds > PATIENCE and 0 < done < total:
            size, prefix = next((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")) if total >= s)
            unit = f"{prefix}{unit}" if len(unit) == 1 else f"{prefix} {unit}".lstrip()
            parts = {"what": f"{what}  {done / size:.3g} of {total / size:.3g} {unit}"}
            parts["speed"] = f"{done / seconds / size:.2g} {unit}/s"
            if 1000 * done >= total:  # before, it may be small files alone, which are slower
                parts["eta"] = f"eta {duration(seconds * (total - done) / done)}"
            self.show(parts, False)

    @contextmanager
    def working(self, what: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
        """Gives a function to call with the size of each finished part; restores the live line afterwards."""
        begun, done, before = time.monotonic(), 0, self._parts

        def more(size: int) -> None:
            nonlocal done
            done += size
            self.counted += size + 1  # a part without bytes counts too
            self.far(what, done, total, begun, unit)

        try:
            yield more
        finally:
            if self._parts is not before:
                self._parts = before
                self._write("\r\x1b[K" + self._drawn())
