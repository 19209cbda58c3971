"""Seconds spent in the parts of a run, and steps that differ from their estimate. Imports no torch."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

Part = Literal[
    "imports", "headers", "tokens", "probe", "plan", "load", "compile", "reference", "steps",
    "evaluations", "samples", "snapshots", "export", "check", "close",
]  # fmt: skip
PARTS: tuple[Part, ...] = get_args(Part)
Times = Mapping[Part, float]  # seconds

DIFFERENT = 1.1  # ratio of step times
WINDOW, FEWEST = 120.0, 5  # seconds and steps that are judged at once
HOUR = 3600.0


class Clock:
    """Seconds spent in each part, and the `whole` since `began`."""

    def __init__(self, now: Callable[[], float] = time.monotonic, began: float | None = None):
        self.now, self.began = now, now() if began is None else began
        self.spent: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.last: dict[Part, float] = {}  # seconds of the last time in a part
        self.times: Counter[Part] = Counter()

    @property
    def whole(self) -> float:
        return self.now() - self.began

    @property
    def other(self) -> float:
        """Seconds since the beginning that are in no part."""
        return self.whole - sum(self.spent.values())

    def with_spent(self, left: Times) -> dict[Part, float]:
        """Seconds of each part of the whole run: those spent, and those of `left`."""
        return {part: seconds + left.get(part, 0.0) for part, seconds in self.spent.items()}

    @contextmanager
    def at(self, part: Part) -> Iterator[None]:
        """A context whose time counts for `part`, without the time of inner parts."""
        began, counted = self.now(), sum(self.spent.values())
        try:
            yield
        finally:
            within = sum(self.spent.values()) - counted
            self.last[part] = self.now() - began - within
            self.spent[part] += self.last[part]
            self.times[part] += 1

    def move(self, seconds: float, source: Part, to: Part) -> None:
        """Counts seconds of one part as those of another."""
        self.spent[source] -= seconds
        self.spent[to] += seconds


def process_began() -> float:
    """time.monotonic() at this process's start, or now where unknown."""
    now = time.monotonic()
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot; proc(5), field 22
        now -= max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return now


@dataclass
class Watch:
    """Notices steps that differ from `step_s` for minutes, such as when a drive slows down; at most once an hour."""

    step_s: float  # seconds of a usual step
    now: Callable[[], float] = time.monotonic
    times: list[float] = field(default_factory=list)  # of the window
    since: float | None = None  # the window's begin
    noticed: float | None = None
    before: float = 0.0  # `step_s` until then
    held: bool = False  # the last step ended a window that was as usual

    def differs(self, seconds: float) -> bool:
        """To be called after a step that took `seconds`, scaled to a usual step's tokens. If it returns True, `step_s`
        is the median of the window.
        """
        now, self.held = self.now(), False
        self.since = now - seconds if self.since is None else self.since
        self.times.append(seconds)
        if now - self.since < WINDOW or len(self.times) < FEWEST:
            return False
        median = statistics.median(self.times)
        self.times, self.since = [], None
        off = not 1 / DIFFERENT < median / self.step_s < DIFFERENT
        self.held = not off
        if not off or (self.noticed is not None and now - self.noticed < HOUR):
            return False
        self.before, self.step_s, self.noticed = self.step_s, median, now
        return True
