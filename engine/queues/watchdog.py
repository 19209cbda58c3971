"""The watchdog: ends a run that makes no more progress.

A GPU or drive that hangs would be waited for without end, in calls that no exception interrupts. So a thread says what
hangs and ends the process at once: unwinding the stack would free memory that a late transfer may still write to.
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
    """Seconds without progress until a run is ended. `step_s`: predicted seconds of a step."""
    return max(LEAST, STEPS * step_s)


@contextmanager
def watched(
    queues: RealQueues, limit: float, on_timeout: Callable[[str], object], counter: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """A context in which `on_timeout(what hangs)` is called once, from another thread, after `limit` seconds without
    progress.

    Progress is a task that ends, or another value of `counter`.
    """
    stop = threading.Event()
    args = (stop, queues, limit, on_timeout, counter)
    threading.Thread(target=watch, args=args, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def watch(
    stop: threading.Event,
    queues: RealQueues,
    limit: float,
    on_timeout: Callable[[str], object],
    counter: Callable[[], object] = lambda: None,
) -> None:
    """The thread's function: returns when `stop` is set, or after the call of `on_timeout`."""
    last_counts, silent = (dict(queues.executed), counter()), 0
    while not stop.wait(limit / HALVES):
        counts = dict(queues.executed), counter()
        silent, last_counts = (silent + 1 if counts == last_counts else 0), counts
        if silent == HALVES:
            on_timeout(_hanging(queues))
            return


def _hanging(queues: RealQueues) -> str:
    """Names what hangs: the first of the started tasks, for which others wait; or a GPU's streams."""
    tasks = list(queues.current.values())
    started = [task for task in tasks if task.start]
    if not started and queues.streams:
        return "the GPU does not end what was issued to it"
    started = started or tasks
    if not started:
        return "no queue has a task"
    task = min(started, key=lambda task: task.start)
    return f"queue {task.queue} hangs in {task.name}"


def leave(say: Callable[[], object], at_most: float = 5.0) -> None:
    """Ends the process with exit code HUNG after `say`, or after `at_most` seconds: the terminal may hang, too."""
    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(at_most)
    os._exit(HUNG)
