"""What a person sees while a run trains: one live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from trireme.engine.amounts import compact, duration
from trireme.storage.files import StoreError
from trireme.storage.untrusted import LINE, shown

OUTPUT = "standard output"
PLAIN_SECONDS = 10.0  # a pipe or a file gets a line at most this often; log.jsonl has every step
LIVE_SECONDS = 0.1
PATIENCE = 3.0  # seconds after which work outside the steps says how far it has come


# Controls of C0 and C1, halves of surrogate pairs, and what turns the direction of writing, ends lines or is invisible.


def tell(line: str) -> None:
    """A line on standard output before the steps begin. Raises StoreError where it cannot be written."""
    try:
        print(shown(line, LINE), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StoreError(error.errno, error.strerror, OUTPUT) from error


def progress(record: Mapping[str, Any], total_steps: int, eta: float | None) -> dict[str, str]:
    """What there is to say about a step, in the order of the line. What is not in the record is not mentioned."""
    r = {key: value for key, value in record.items() if value is not None}
    parts = {"step": f"step {r['step']:>{len(str(total_steps))}}/{total_steps}", "loss": f"loss {r['loss']:.4f}"}
    if "learning_rate" in r:
        parts["lr"] = f"lr {r['learning_rate']:.1e}"
    if "grad_norm" in r:
        parts["norm"] = f"grad_norm {r['grad_norm']:.2g}"
    if "tokens_per_second" in r:
        trained = r.get("trained_tokens_per_second", r["tokens_per_second"])
        some = f" ({compact(trained)} trained)" if trained < 0.95 * r["tokens_per_second"] else ""
        parts["speed"] = f"{compact(r['tokens_per_second'])} tok/s{some}"
    if "step_time_s" in r:
        parts["time"] = f"{r['step_time_s']:.3g} s"
    if "mfu" in r:
        parts["mfu"] = f"mfu {100 * r['mfu']:.0f} %"
    memory = [f"{name} {r[key]:.3g}G" for name, key in (("gpu", "gpu_mem_gib"), ("ram", "ram_gib")) if key in r]
    if memory:
        parts["memory"] = " ".join(memory)
    if "bound" in r:
        parts["bound"] = f"bound: {r['bound']}"
    if eta is not None:
        parts["eta"] = f"eta {duration(eta)}"
    return parts


def one_line(parts: Mapping[str, str], width: float = math.inf) -> str:
    """The parts as a line of less than `width` characters: the least telling ones go first, the rest is cut."""
    parts = {name: shown(part, LINE) for name, part in parts.items()}
    for name in ("memory", "mfu", "time", "norm", "lr", "bound", "speed"):
        if len("  ".join(parts.values())) < width:
            break
        parts.pop(name, None)
    line = "  ".join(parts.values())
    return line if len(line) < width else line[: int(width) - 1]


class Screen:
    """The terminal, or the pipe that stands in for it: a live line that is redrawn, and lines that stay."""

    def __init__(self, stream: TextIO):
        self._stream: TextIO | None = stream
        self._live = stream.isatty()
        self._parts: Mapping[str, str] = {}  # of the live line, when there is one
        self._last = -math.inf

    def _write(self, text: str) -> None:
        try:
            if self._stream:
                self._stream.write(text)
                self._stream.flush()
        except OSError:  # a closed terminal or pipe: the run goes on, the log has it all
            self._stream = None

    def say(self, line: str) -> None:
        """A line that stays; the live line moves below it."""
        line = shown(line, LINE)
        self._write(f"\r\x1b[K{line}\n{self._drawn()}" if self._parts else line + "\n")

    def show(self, parts: Mapping[str, str], final: bool) -> None:
        """The state of the run: drawn over the last one on a terminal; every few seconds, and at the end, to a pipe."""
        now = time.monotonic()
        if not final and now - self._last < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return None
        self._last = now
        if not self._live:
            return self._write(one_line(parts) + "\n")
        self._parts = parts
        self._write("\r\x1b[K" + self._drawn())
        if final:
            self._write("\n")
            self._parts = {}

    def _drawn(self) -> str:
        """The live line, within the terminal's width: a wrapped line could not be drawn over."""
        return one_line(self._parts, shutil.get_terminal_size().columns)

    def clear(self) -> None:
        """Takes the live line away."""
        if self._parts:
            self._write("\r\x1b[K")
            self._parts = {}

    def far(self, what: str, done: int, total: int, begun: float) -> None:
        """How many bytes of long work are done that began at the moment `begun` (time.monotonic)."""
        seconds = time.monotonic() - begun
        if seconds > PATIENCE and 0 < done < total:
            size, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if total >= s)
            parts = {"what": f"{what}  {done / size:.3g} of {total / size:.3g} {unit}"}
            parts["speed"] = f"{done / seconds / size:.2g} {unit}/s"
            self.show(parts | {"eta": f"eta {duration(seconds * (total - done) / done)}"}, False)

    @contextmanager
    def working(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Long work on `total` bytes: gives what is to be told of each part that is done. Then all is as before."""
        begun, done, before = time.monotonic(), 0, self._parts

        def more(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self.far(what, done, total, begun)

        try:
            yield more
        finally:
            if self._parts is not before:
                self._parts = before
                self._write("\r\x1b[K" + self._drawn())
