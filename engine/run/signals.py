"""Requests to stop: a signal once to save and end, twice to end at once.

A notice is no second request: a session's end sends a hang-up with SIGTERM, SLURM sends SIGUSR1 long before it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trireme.engine.run.screen import Screen

LEFT = 130  # exit code
NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPS = (signal.SIGINT, signal.SIGTERM, *NOTICES)


class Stop:
    """A request to stop after the step that has begun."""

    def __init__(self, total: int, screen: Screen, last_snapshot: Callable[[], str], alone: bool = True):
        """Where not `alone`, hosts agree first, by `hear`."""
        self.total, self.screen, self.last_snapshot, self.alone = total, screen, last_snapshot, alone
        self.asked = False
        self.last = total  # last step to do
        self.begun = 0
        self.how = ""

    @property
    def leaving(self) -> bool:
        """Whether it stops before its last step."""
        return self.last < self.total

    def begins(self, step: int) -> None:
        """Signals now let `step` finish."""
        self.begun = min(step, self.total)

    def ask(self, number: int) -> None:
        self.how = "^C " if number == signal.SIGINT else "asked to stop:"
        self.asked = True
        if self.alone:
            self.hear(True)
        insist = "" if number in NOTICES else "; again: leave at once"
        self.screen.urgent(f"\n  finishing step {self.begun:,} and saving{insist}")

    def hear(self, asked: bool) -> None:
        """A host was asked."""
        if asked:
            self.last, self.how = self.begun, self.how or "asked to stop:"

    def insist(self) -> None:
        """On the second signal."""
        self.screen.urgent(f"\nleft at once. {self.last_snapshot()}")


@contextmanager
def stop_signals(first: Callable[[int], None], second: Callable[[], None]) -> Iterator[None]:
    """The first signal calls first(number); a second that is no notice calls second() and exits.

    Signals belong to the main thread: in another nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = [n for n in STOPS if signal.getsignal(n) != signal.SIG_IGN]
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if sum(n not in NOTICES for n in asked) > 1 and number not in NOTICES:
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
