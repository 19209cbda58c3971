"""Lanes on which nothing runs: when each task of a step would start and end, and what lanes take from each other.

The step's own code hands over the tasks of a run. The seconds of each alone are given; beside that

- **one drive**: all lanes to and from the SSD are queues of one half-duplex device. A request takes the moments that
  requests before it left free; those of the step share the drive with the optimizer's records instead of waiting for
  them. Several drives are one of their summed rate.
- **one memory**: copies take memory bandwidth from CPU AdamW and are slowed by it, and by copies the other way.
  Slow-downs follow from the bytes of a whole pass, not moment by moment, so that a faster lane never slows another.
- **one wait**: nothing handed over after the step's statistics begins before they are known.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.lanes import LANES, READS, WRITES, Kind, Span, Task
from trireme.engine.planner.rates import Rates

DRIVE = dict.fromkeys(READS, "ssd_read") | dict.fromkeys(WRITES, "ssd_write")  # lanes to and from it -> their rate
TURN: tuple[Kind, ...] = ("loss", "adamw moments")  # tasks with which backward begins


class Noted(Task):
    """A task as it was handed over: the tasks it waits for, and its seconds when alone."""

    __slots__ = ("after", "seconds")

    def __init__(self, lane: str, kind: Kind, of: str, nbytes: float, flops: float, after: Sequence[Task]):
        super().__init__(lane, kind, of, nbytes, flops)
        self.after, self.seconds = after, 0.0


class SimulatedLanes:
    """Notes the tasks of a step, and times them when all are known.

    In the steady state all steps hand over the same tasks, so those of one step are timed again for the next: ten times
    as fast as running the step's code. `duration(task)`: seconds of a task alone.
    """

    simulated = True

    def __init__(self, duration: Callable[[Task], float], rates: Rates):
        self.duration, self.rates, self.device = duration, rates, torch.device("cpu")
        self.tasks: list[Noted] = []  # of a step, in the order of the program
        self.parts: list[tuple[int, int, dict[str, float]]] = []  # [start, stop) of them, how much slower each lane is
        self.free = dict.fromkeys(LANES, 0.0)
        self.drive = Intervals()
        self.waited = 0.0  # when the last statistics were known

    def run(
        self,
        lane: str,
        kind: Kind,
        of: str,
        fn: Callable[[], Any],  # noqa: ARG002 (nothing runs)
        after: Sequence[Task] = (),
        nbytes: float = 0,
        flops: float = 0,
    ) -> Noted:
        task = Noted(lane, kind, of, nbytes, flops, after)
        task.seconds = self.duration(task)
        self.tasks.append(task)
        return task

    def drain(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Forgets the noted tasks without the garbage collector, for which they are many."""
        for task in self.tasks:
            task.after = ()
        self.begin()

    def begin(self) -> None:
        """Forgets the noted tasks: a step begins."""
        self.tasks, self.parts = [], []

    def trace(self) -> list[Span]:
        """The spans of the noted tasks as they were timed last."""
        return [Span.over(t) for t in self.tasks]

    def repeat(self) -> None:
        """Makes the noted step follow itself: instead of a task of the step before, wait for the last one alike here.

        One that is handed over earlier than its waiter has long been over.
        """
        last = {(task.lane, task.kind, task.of): i for i, task in enumerate(self.tasks)}
        mine = set(self.tasks)
        for i, task in enumerate(self.tasks):
            if not mine.issuperset(task.after):
                before = [last.get((t.lane, t.kind, t.of), -1) for t in task.after if t not in mine]
                task.after = [t for t in task.after if t in mine] + [self.tasks[j] for j in before if j >= i]

    def time(self) -> float:
        """Times the noted tasks as those of the next step. Returns the step's seconds.

        A task that waits for one handed over later waits for that of the step before.
        """
        begun, self.parts = self.waited, self.parts or self._halves()
        for a, b, slow in self.parts:
            self._time(self.tasks[a:b], slow)
            if self.tasks[b - 1].kind == "statistics":
                self.waited = self.tasks[b - 1].end
                self.free = {lane: max(t, self.waited) for lane, t in self.free.items()}
        return self.waited - begun

    def behind(self) -> list[float]:
        """Seconds that each lane still works when a step is over: while they grow, steps get slower."""
        return [end - self.waited for end in self.free.values()]

    def _halves(self) -> list[tuple[int, int, dict[str, float]]]:
        """The noted tasks as forward, backward until the statistics, and the beginning of the next forward."""
        n = len(self.tasks)
        turn = next(i for i, task in enumerate(self.tasks) if task.kind in TURN)
        end = next(i for i in range(n, 0, -1) if self.tasks[i - 1].kind == "statistics")
        up, down = _slowness((self.tasks[:turn] + self.tasks[end:], self.tasks[turn:end]), self.rates)
        places = pairwise(sorted({0, turn, end, n}))
        return [(a, b, down if turn <= a < end else up) for a, b in places]

    def _time(self, tasks: Sequence[Noted], slow: dict[str, float]) -> None:
        free, take = self.free, self.drive.take
        for task in tasks:
            lane = task.lane
            start, seconds = free[lane], task.seconds * slow[lane]
            for other in task.after:
                if other.end > start:
                    start = other.end
            end = start + seconds
            if lane in DRIVE:
                end = take(start, seconds)
                if DRIVE[lane] == lane:  # beside two queues of records at most, which share the drive with it
                    end = min(end, start + 3 * seconds)
            task.start, task.end = start, end
            free[lane] = end


class Intervals:
    """When a device that does one thing at a time is busy: sorted intervals that neither overlap nor touch."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def take(self, start: float, seconds: float) -> float:
        """Books `seconds` of the moments that are free from `start` on; returns when the last of them ends."""
        first = i = bisect.bisect_left(self.ends, start)  # what ends before `start` is no concern
        at, left = start, seconds
        while i < len(self.starts) and self.starts[i] - at <= left:
            left -= max(0.0, self.starts[i] - at)
            at = max(at, self.ends[i])
            i += 1
        met = self.starts[first : first + 1] if i > first else []
        self.starts[first:i], self.ends[first:i] = [min([start, *met])], [at + left]
        return at + left


# ---------------------------------------------------------------- what lanes take from each other


def _slowness(halves: Sequence[Sequence[Noted]], rates: Rates) -> list[dict[str, float]]:
    """For each pass, how many times longer each lane's tasks take beside the others."""
    moved = [dict.fromkeys(LANES, 0.0) for _ in halves]
    for half, tasks in zip(moved, halves, strict=True):
        for task in tasks:
            half[task.lane] += task.nbytes
    read, written = (sum(half[lane] for half in moved for lane in way) for way in (READS, WRITES))
    alone = drive_seconds(read, written, replace(rates, mixed=1.0)) or 1.0
    both = dict.fromkeys(DRIVE, drive_seconds(read, written, rates) / alone or 1.0)
    return [dict.fromkeys(LANES, 1.0) | _sharing(half, rates) | both for half in moved]


def drive_seconds(read: float, written: float, rates: Rates) -> float:
    """Seconds that drives need for so many bytes of a step, reads beside writes."""
    if not (read or written):
        return 0.0
    up, down = read / rates.ssd_read, written / rates.ssd_write
    return up + down + 2 * min(up, down) * (1 / rates.mixed - 1)


def _sharing(moved: dict[str, float], rates: Rates) -> dict[str, float]:
    """How many times longer each lane's tasks take beside the others, from the bytes that each lane moves."""
    beside = sum(moved[lane] for lane in ("h2d", "d2h", *DRIVE))
    crowd = 1 + ADAM_BYTES * rates.adam / rates.dram * beside / moved["cpu"] if moved["cpu"] else 1.0
    lost = dict.fromkeys(("h2d", "d2h"), (1 / rates.duplex - 1) * min(moved["h2d"], moved["d2h"]))
    lost["h2d"] += (1 / rates.reading - 1) * min(moved["h2d"], moved["cpu"] / ADAM_BYTES / rates.adam * rates.h2d)
    return {way: 1 + lost[way] / moved[way] if moved[way] else 1.0 for way in lost} | {"cpu": crowd}


def lane_seconds(moved: dict[str, float], rates: Rates) -> dict[str, float]:
    """Seconds that the bus and the CPU need for the bytes that each lane moves in a pass, all at once."""
    slow = _sharing(moved, rates)
    alone = {"h2d": rates.h2d, "d2h": rates.d2h, "cpu": ADAM_BYTES * rates.adam * rates.beside}
    return {lane: moved[lane] / rate * slow[lane] for lane, rate in alone.items()}
