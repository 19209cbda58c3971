"""Seconds spent in the parts of a run. Imports no torch."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

RunPart = Literal[
    "imports", "headers", "tokens", "probe", "plan", "load", "compile", "reference", "steps",
    "evaluations", "samples", "snapshots", "export", "check", "close",
]  # fmt: skip
PARTS: tuple[RunPart, ...] = get_args(RunPart)
Times = Mapping[RunPart, float]  # seconds


class Clock:
    """Seconds spent in each part, and the `whole` since `began`."""

    def __init__(self, now: Callable[[], float] = time.monotonic, began: float | None = None):
        self.now, self.began = now, now() if began is None else began
        self.spent: dict[RunPart, float] = dict.fromkeys(PARTS, 0.0)
        self.last: dict[RunPart, float] = {}  # seconds of the last time in a part
        self.times: Counter[RunPart] = Counter()

    @property
    def whole(self) -> float:
        return self.now() - self.began

    @property
    def other(self) -> float:
        """Seconds since the beginning that are in no part."""
        return self.whole - sum(self.spent.values())

    @contextmanager
    def at(self, part: RunPart) -> Iterator[None]:
        """A context whose time counts for `part`, without the time of inner parts."""
        began, counted = self.now(), sum(self.spent.values())
        try:
            yield
        finally:
            within = sum(self.spent.values()) - counted
            self.last[part] = self.now() - began - within
            self.spent[part] += self.last[part]
            self.times[part] += 1


def process_began() -> float:
    """time.monotonic() at this process's start, or now where unknown."""
    now = time.monotonic()
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot; proc(5), field 22
        now -= max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return now
