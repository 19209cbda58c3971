"""Requests to stop: Ctrl-C, SIGTERM or a hang-up, once to save and end, twice to end at once.

A hang-up does not count as the second: at the end of a session the system sends it together with SIGTERM.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trireme.engine.run.screen import Screen

LEFT = 130  # exit code of a run that was asked to stop


class Stop:
    """Whether a run is to stop before its end. A signal lets the step that has begun finish."""

    def __init__(self, total: int, screen: Screen, last_snapshot: Callable[[], str]):
        """`total`: steps of the whole run."""
        self.total, self.screen, self.last_snapshot = total, screen, last_snapshot
        self.last = total  # the last step that is done
        self.begun = 0
        self.how = ""

    @property
    def leaving(self) -> bool:
        """Whether the run stops before its last step."""
        return self.last < self.total

    def begins(self, step: int) -> None:
        """A signal from here on lets `step` finish."""
        self.begun = min(step, self.total)

    def ask(self, number: int) -> None:
        """Signal `number`: the run stops after the step that has begun."""
        self.how = "^C " if number == signal.SIGINT else "asked to stop:"
        self.last = self.begun
        self.screen.urgent(f"\n  finishing step {self.begun} and saving; again: leave at once")

    def insist(self) -> None:
        """The last words of a process that leaves at once."""
        self.screen.urgent(f"\nleft at once. {self.last_snapshot()}")


@contextmanager
def stop_signals(first: Callable[[int], None], second: Callable[[], None]) -> Iterator[None]:
    """Within it the first signal calls first(number), and the second that is no hang-up calls second() and exits."""
    caught = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if sum(n != signal.SIGHUP for n in asked) > 1 and number != signal.SIGHUP:
            second()
            os._exit(LEFT)
        if len(asked) == 1:
            first(number)

    before = {n: signal.signal(n, ask) for n in caught}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
