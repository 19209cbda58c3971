"""The watchdog: ends a run that makes no more progress.

A wedged GPU or drive would be waited for without end, in calls that no exception interrupts. So a thread of its own
says what hangs and ends the process at once: unwinding would free memory that a late queue may still write to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trireme.engine.queues.real import RealQueues

HUNG = 4  # exit code
LEAST, STEPS = 600.0, 20  # seconds without progress, at least; steps as predicted
HALVES = 2  # silent in a row: a process stopped and continued has slept through one at most


def patience(step_s: float) -> float:
    """Seconds without progress; `step_s`: of a step, as predicted."""
    return max(LEAST, STEPS * step_s)


def nothing() -> None:
    """Of a run that has no other progress than its queues'."""


@contextmanager
def watched(
    queues: RealQueues, limit: float, late: Callable[[str], object], other: Callable[[], object] = nothing
) -> Iterator[None]:
    """Within, calls late(what hangs) from another thread once for `limit` seconds no task was over and `other` returned
    equal values: progress outside the queues.
    """
    left = threading.Event()
    args = (left, queues, limit, late, other)
    threading.Thread(target=watch, args=args, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        left.set()


def watch(
    left: threading.Event,
    queues: RealQueues,
    limit: float,
    late: Callable[[str], object],
    other: Callable[[], object] = nothing,
) -> None:
    """Until `left` is set or, once, `late` is called."""
    before, silent = (dict(queues.over), other()), 0
    while not left.wait(limit / HALVES):
        now = dict(queues.over), other()
        silent, before = (silent + 1 if now == before else 0), now
        if silent == HALVES:
            late(_hanging(queues))
            return


def _hanging(queues: RealQueues) -> str:
    """The queue and task that others wait for: of those that have begun, the first; none on a GPU's streams."""
    tasks = list(queues.at.values())
    begun = [task for task in tasks if task.start]
    if not begun and queues.streams:
        return "the GPU does not end what was issued to it"
    begun = begun or tasks
    if not begun:
        return "no queue has a task"
    task = min(begun, key=lambda task: task.start)
    return f"queue {task.queue} hangs in {task.name}"


def leave(say: Callable[[], object], at_most: float = 5.0) -> None:
    """Ends the process with HUNG once `say` returns, or seconds later: the terminal may hang too."""
    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(at_most)
    os._exit(HUNG)
