"""What a run prints, and the seconds of its parts: functions that any part may call; nobody passes them on.

Lines stay; the live line is redrawn on a terminal, and printed every ten seconds in a pipe. Strange characters are
escaped here, where lines are printed, and nowhere else.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from trireme.engine.amounts import compact, duration, gb
from trireme.engine.planner.clock import Clock
from trireme.storage.files import StoreError
from trireme.storage.untrusted import LINE, displayed, shown

OUTPUT = "standard output"
PIPE, TERMINAL = 10.0, 0.1  # seconds between two states of the live line
PIPE_STEP = 60.0  # seconds between lines of one long step in a pipe
PATIENCE = 3.0  # seconds before progress of a part shows
INDENT = 9  # width of a label
COMMAND = re.compile(r"\b(?:python -m )?trireme [^;,()]*")  # users copy it: it is not divided
LABEL = re.compile(r"(warning|error|note)(?=:)|[a-z]+( [a-z]+)?(?= {2,}\S)")
BOLD, RED, YELLOW, PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[1;33m", "\x1b[0m"


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text) if not text.isascii() else 0
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def cut(text: str, width: int) -> str:
    """The beginning of a text, at most `width` columns of it."""
    while cells(text) > width:
        text = text[: len(text) - max(1, (cells(text) - width) // 2)]
    return text


def wrapped(line: str, width: int) -> str:
    """A line divided between words for a terminal of this width; all but its first part are indented."""
    if cells(line) < width:
        return line
    lines, space = [""], max(20, width - 1)
    for piece in re.findall(r"\s*\S+", COMMAND.sub(lambda match: match[0].replace(" ", "\0"), line)):
        word = piece
        while cells(lines[-1] + word) > space:
            part = cut(word, space - cells(lines[-1])) if cells(word) > len(word) else ""  # wide: anywhere
            lines[-1], word = lines[-1] + part, word[len(part) :].lstrip()
            if not part and not lines[-1].strip():
                break
            lines.append(" " * INDENT)
        lines[-1] += word
    return "\n".join(lines).replace("\0", " ")


def coloured(line: str) -> str:
    """A line with its label in bold, or in the colour of what it warns of."""
    colours = {"warning": YELLOW, "error": RED}
    return LABEL.sub(lambda match: f"{colours.get(match[0], BOLD)}{match[0]}{PLAIN}", line, count=1)


class Screen:
    """One stream of output; None: standard output. Used by one thread at a time."""

    def __init__(self, stream: TextIO | None = None):
        self.stream, self.is_lost = stream, False
        self.line, self.drawn = "", -1e9
        self.counted, self.must_write = 0, True  # parts told while working, watched for a hang; see forgive
        self.waits = False  # for a terminal that is held

    @property
    def is_live(self) -> bool:
        return (self.stream or sys.stdout).isatty()

    def write(self, text: str) -> None:
        self.waits = True
        try:
            if not self.is_lost:
                stream = self.stream or sys.stdout
                stream.write(text)
                stream.flush()
        except OSError as error:
            if self.must_write and isinstance(error, BrokenPipeError):
                raise
            if self.must_write:
                raise StoreError(error.errno, error.strerror, OUTPUT) from error
            self.is_lost = True
        finally:
            self.waits = False

    def say(self, line: str) -> None:
        line = shown(line, LINE)
        if self.is_live:
            line = coloured(wrapped(line, shutil.get_terminal_size().columns))
        self.write(f"\r\x1b[K{line}\n{self.line}" if self.line else line + "\n")

    def show(self, line: str, final: bool = False) -> None:
        """Redraws the live line. A final one stays."""
        now = time.monotonic()
        if final or now - self.drawn >= (TERMINAL if self.is_live else PIPE):
            self.drawn, line = now, shown(line, LINE)
            if self.is_live:
                line = cut(line, shutil.get_terminal_size().columns - 1)
            self.line = line if self.is_live and not final else ""
            self.write((f"\r\x1b[K{line}" if self.is_live else line) + "\n" * (final or not self.is_live))

    def clear(self) -> None:
        if self.line:
            self.line = ""
            self.write("\r\x1b[K")


_screen, _clock = Screen(), Clock()


def say(line: str) -> None:
    """Prints a line that stays. Raises StoreError and BrokenPipeError, until `forgive` is called."""
    _screen.say(line)


def warn(line: str) -> None:
    _screen.say(f"warning: {line}")


def text(piece: str) -> None:
    """Prints text as it is, without a line end; on a terminal control characters are escaped."""
    _screen.write(displayed(piece) if _screen.is_live else piece)


def urgent(line: str) -> None:
    """Prints to standard error; also in a signal handler."""
    line = "\n".join(shown(part, LINE) for part in line.split("\n"))
    with suppress(OSError, RuntimeError, ValueError):  # a closed terminal; within another line
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            line = "\n".join(coloured(wrapped(part, width)) for part in line.split("\n"))
        print(line, file=sys.stderr, flush=True)


def show(line: str, final: bool = False) -> None:
    """Redraws the live line."""
    _screen.show(line, final)


def clear() -> None:
    _screen.clear()


def forgive() -> None:
    """From now on output that cannot be written is dropped: the run is worth more than its lines."""
    _screen.must_write = False


def counted() -> tuple[int, object]:
    """Changes with every part of some work that is told, and always while a terminal is waited for."""
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


def far(what: str, done: int, total: int, began: float, unit: str = "B") -> None:
    """Shows how much of some work is done, once it takes long. `began`: by time.monotonic."""
    seconds = time.monotonic() - began
    if seconds > PATIENCE and 0 < done < total:
        of = f"{gb(done)} of {gb(total)}" if unit == "B" else f"{compact(done)} of {compact(total)} {unit}"
        rest = f"  eta {duration(seconds * (total - done) / done)}" if 1000 * done >= total else ""
        _screen.show(f"{what}  {of}{rest}")


@contextmanager
def working(what: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the size of each finished part; its progress shows after PATIENCE."""
    began, done, screen, line = time.monotonic(), 0, _screen, _screen.line

    def more(size: int) -> None:
        nonlocal done
        done, screen.counted = done + size, screen.counted + 1
        far(what, done, total, began, unit)

    try:
        yield more
    finally:
        if screen.line != line:
            screen.clear()


@contextmanager
def passing(what: str, expected: float | None) -> Iterator[None]:
    """Shows the seconds of something long that tells no parts. Within, only `urgent` may print."""
    ended, began, screen = threading.Event(), time.monotonic(), _screen

    def tell() -> None:
        due = PATIENCE if screen.is_live else PIPE_STEP
        while not ended.wait(1.0):
            if (passed := time.monotonic() - began) > due:
                due += 0 if screen.is_live else PIPE_STEP
                of = f" of about {duration(expected)}" if expected and passed < expected else ""
                screen.show(f"{what}  {duration(passed)}{of}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
