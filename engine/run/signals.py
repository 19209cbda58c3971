"""Requests to stop: the first signal saves and ends the run, the second ends it at once.

Some signals are notices and do not count as second ones: when a session ends, a hang-up comes with SIGTERM, and SLURM
sends SIGUSR1 long before it.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trireme.engine.hosts.group import world
from trireme.engine.run import screen

LEFT = 130  # exit code
NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPS = (signal.SIGINT, signal.SIGTERM, *NOTICES)


class Stop:
    """A request to stop after the step that has begun."""

    def __init__(self, step: int, total: int):
        self.step, self.last, self.total = step, total, total  # the step that is done now; the last one to do
        self.requested, self.loading = False, True

    def leaving(self) -> bool:
        """Whether the run stops before its last step."""
        return self.last < self.total

    def ask(self, number: int) -> None:
        """Handles the first signal. Several hosts go on until they agree."""
        self.requested = True
        self.last = self.step if world().hosts == 1 else self.last
        action = "leaving" if self.loading else f"finishing step {self.step:,} and saving"
        screen.urgent(f"\n  {action}{'' if number in NOTICES else '; again: exit immediately'}")

    def agree(self) -> None:
        """To be called by all hosts after each step."""
        if world().any(self.requested):
            self.last = self.step


class Handler:
    """A handler of STOPS, and the signals that it has had."""

    def __init__(self, first: Callable[[int], None], second: Callable[[], None]):
        self.first, self.second, self.signals = first, second, list[int]()

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.signals.append(number)
        if len(self.signals) == 1:
            self.first(number)
        elif number not in NOTICES and sum(n not in NOTICES for n in self.signals) > 1:
            self.second()
            os._exit(LEFT)


@contextmanager
def stop_signals(first: Callable[[int], None], second: Callable[[], None]) -> Iterator[None]:
    """A context in which the first signal calls first(number), and a second one that is no notice calls second() and
    exits; the first that comes after notices alone does nothing.

    Where it is used within itself, what the inner one has had counts in the outer one too: a second signal while the
    first unwinds ends the process. Signals belong to the main thread: in another nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = Handler(first, second)
    before = {n: signal.signal(n, handler) for n in STOPS if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for outer in {former for former in before.values() if isinstance(former, Handler)}:
            outer.signals += handler.signals
        for n, former in before.items():
            signal.signal(n, former)


def end_at_signals(code: int) -> None:
    """From now on they end the process with `code`; once threads have ended they are ignored.

    The interpreter's own end takes a moment, in which they would show a traceback, or change the code.
    """
    caught = [n for n in STOPS if signal.getsignal(n) != signal.SIG_IGN]
    for n in caught:
        signal.signal(n, lambda *_: os._exit(code))
    atexit.register(lambda: [signal.signal(n, signal.SIG_IGN) for n in caught])
