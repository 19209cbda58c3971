"""What a run prints, and the seconds of its parts: functions that any part may call; nobody passes them on.

Lines stay; the live line is redrawn on a terminal, and printed every ten seconds in a pipe. Strange characters are
escaped here, where lines are printed, and nowhere else.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from trireme.engine.amounts import compact, duration, gb
from trireme.engine.planner.clock import Clock
from trireme.storage.files import StoreError
from trireme.storage.untrusted import LINE, shown

OUTPUT = "standard output"
PIPE, TERMINAL = 10.0, 0.1  # seconds between two states of the live line
PATIENCE = 3.0  # seconds before progress of a part shows
LABEL = re.compile(r"(warning|error|note)(?=:)|[a-z]+( [a-z]+)?(?= {2,}\S)")
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
COLOURS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m"}


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: wide characters take two."""
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def coloured(line: str) -> str:
    """A line with its label in bold or in the colour of what it warns of."""
    return LABEL.sub(lambda match: f"{COLOURS.get(match[0], BOLD)}{match[0]}{PLAIN}", line, count=1)


class Screen:
    """One stream of output; None: standard output. Used by one thread at a time."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream
        self.line, self.drawn = "", -1e9
        self.counted, self.must_write = 0, True  # parts of work, watched for a hang; see forgive
        self.waits = False  # for a terminal that is held

    @property
    def is_live(self) -> bool:
        return (self.stream or sys.stdout).isatty()

    def write(self, text: str) -> None:
        """Raises StoreError and BrokenPipeError, until `forgive` is called."""
        self.waits, stream = True, self.stream or sys.stdout
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            if self.must_write and isinstance(error, BrokenPipeError):
                raise
            if self.must_write:
                raise StoreError(error.errno, error.strerror, OUTPUT) from None
        finally:
            self.waits = False


_screen, _clock = Screen(), Clock()


def say(line: str) -> None:
    """Prints a line that stays. Raises StoreError and BrokenPipeError, until `forgive` is called."""
    line = coloured(shown(line, LINE)) if _screen.is_live else shown(line, LINE)
    _screen.write(f"\r\x1b[K{line}\n{_screen.line}" if _screen.line else line + "\n")


def warn(line: str) -> None:
    say(f"warning: {line}")


def urgent(line: str) -> None:
    """Prints to standard error; also in a signal handler."""
    with suppress(OSError, RuntimeError, ValueError):  # a closed terminal; within another line
        lines = [shown(part, LINE) for part in line.split("\n")]
        print(*map(coloured, lines) if sys.stderr.isatty() else lines, sep="\n", file=sys.stderr, flush=True)


def show(line: str, final: bool = False) -> None:
    """Redraws the live line. A final one stays."""
    now, live = time.monotonic(), _screen.is_live
    if final or now - _screen.drawn >= (TERMINAL if live else PIPE):
        _screen.drawn, line = now, shown(line, LINE)
        while live and columns(line) >= shutil.get_terminal_size().columns:
            line = line[:-1]
        _screen.line = line if live and not final else ""
        _screen.write((f"\r\x1b[K{line}" if live else line) + "\n" * (final or not live))


def clear() -> None:
    """Removes the live line."""
    if _screen.line:
        _screen.line = ""
        _screen.write("\r\x1b[K")


def forgive() -> None:
    """From now on output that cannot be written is dropped: the run is worth more than its lines."""
    _screen.must_write = False


def parts_done() -> tuple[int, object]:
    """Changes with every finished part of some work, and always while a terminal is waited for."""
    return _screen.counted, object() if _screen.waits else None


def clock() -> Clock:
    """Seconds of this run's parts."""
    return _clock


def labelled(label: str, lines: Sequence[str]) -> list[str]:
    """Lines under one label."""
    return [f"{label if i == 0 else '':8} {line}" for i, line in enumerate(lines)]


@contextmanager
def to(stream: TextIO | None = None, began: float | None = None) -> Iterator[None]:
    """A context of one run: its stream, and a clock from 0 or from `began`."""
    global _screen, _clock
    before, _screen, _clock = (_screen, _clock), Screen(stream), Clock(began=began)
    try:
        yield
    finally:
        _screen, _clock = before


def show_progress(what: str, done: int, total: int, began: float, unit: str = "B") -> None:
    """Shows how much of some work is done, once it takes long. `began`: by time.monotonic."""
    seconds = time.monotonic() - began
    if seconds > PATIENCE and 0 < done < total:
        amounts = f"{gb(done)} of {gb(total)}" if unit == "B" else f"{compact(done)} of {compact(total)} {unit}"
        show(f"{what}  {amounts}  eta {duration(seconds * (total - done) / done)}")


@contextmanager
def working(
    what: str, total: int, unit: str = "B", stopped: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the size of each finished part, which raises KeyboardInterrupt if `stopped()`. Its
    progress shows after PATIENCE.
    """
    began, done, line = time.monotonic(), 0, _screen.line

    def finished(size: int) -> None:
        nonlocal done
        done += size
        _screen.counted += 1
        show_progress(what, done, total, began, unit)
        if stopped():
            raise KeyboardInterrupt

    try:
        yield finished
    finally:
        if _screen.line != line:
            clear()
