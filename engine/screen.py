"""What a person sees while a run trains: one live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from typing import Any, TextIO

PLAIN_SECONDS = 10.0  # a pipe or a file gets a line at most this often; log.jsonl has every step
LIVE_SECONDS = 0.1


def duration(seconds: float) -> str:
    """`41s`, `3m20s`, `30h34m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def compact(n: float) -> str:
    """Three figures or so: `243`, `11.7k`, `1.24M`."""
    units = ["", "k", "M", "G"]
    while n >= 999.5 and len(units) > 1:
        n /= 1000
        del units[0]
    return f"{n:.0f}{units[0]}" if n >= 99.95 or not units[0] else f"{n:.3g}{units[0]}"


def progress_line(record: Mapping[str, Any], total_steps: int, eta: float | None) -> str:
    """The one line about a step. What is not in the record is not mentioned."""
    r = {key: value for key, value in record.items() if value is not None}
    parts = [f"step {r['step']:>{len(str(total_steps))}}/{total_steps}", f"loss {r['loss']:.4f}"]
    if "learning_rate" in r:
        parts.append(f"lr {r['learning_rate']:.1e}")
    if "grad_norm" in r:
        parts.append(f"grad_norm {r['grad_norm']:.2g}")
    if "tokens_per_second" in r:
        trained = r.get("trained_tokens_per_second", r["tokens_per_second"])
        some = f" ({compact(trained)} trained)" if trained < 0.995 * r["tokens_per_second"] else ""
        parts.append(f"{compact(r['tokens_per_second'])} tok/s{some}")
    if "step_time_s" in r:
        parts.append(f"{r['step_time_s']:.3g} s")
    if "mfu" in r:
        parts.append(f"mfu {100 * r['mfu']:.0f} %")
    memory = [f"{name} {r[key]:.3g}G" for name, key in (("gpu", "gpu_mem_gib"), ("ram", "ram_gib")) if key in r]
    if memory:
        parts.append(" ".join(memory))
    if "bound" in r:
        parts.append(f"bound: {r['bound']}")
    if eta is not None:
        parts.append(f"eta {duration(eta)}")
    return "  ".join(parts)


class Screen:
    """The terminal, or the pipe that stands in for it: a live line that is redrawn, and lines that stay."""

    def __init__(self, stream: TextIO):
        self._stream: TextIO | None = stream
        self.live = stream.isatty()
        self._line = ""
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
        self._write(f"\r\x1b[K{line}\n{self._fitted()}" if self._line else line + "\n")

    def show(self, line: str, final: bool) -> None:
        """The state of the run: drawn over the last one on a terminal; every few seconds, and at the end, to a pipe."""
        now = time.monotonic()
        if not final and now - self._last < (LIVE_SECONDS if self.live else PLAIN_SECONDS):
            return
        self._last = now
        if not self.live:
            return self._write(line + "\n")
        self._line = line
        self._write("\r\x1b[K" + self._fitted())

    def _fitted(self) -> str:
        """The live line cut to the terminal's width: a wrapped line could not be drawn over."""
        return self._line[: shutil.get_terminal_size().columns - 1]

    def settle(self) -> None:
        """Leaves the live line where it stands."""
        if self._line:
            self._write("\n")
            self._line = ""
