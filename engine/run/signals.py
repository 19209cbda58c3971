"""Asking a run to stop: by Ctrl-C, SIGTERM or a hang-up, once to end well, twice to end at once.

A hang-up never insists: where a session ends, the system sends it together with SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LEFT = 130  # exit code of a run that was asked to stop


@contextmanager
def stop_signals(first: Callable[[int], str], second: Callable[[], str]) -> Iterator[None]:
    """Within it the first signal calls first(number) and the run goes on; the second one that is no hang-up ends the
    process. What each returns is told on stderr before.
    """
    caught = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    asked: list[int] = []

    def ask(number, frame):
        asked.append(number)
        if sum(n != signal.SIGHUP for n in asked) > 1 and number != signal.SIGHUP:
            _tell(second())
            os._exit(LEFT)
        if len(asked) == 1:
            _tell(first(number))

    before = {n: signal.signal(n, ask) for n in caught}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def _tell(line: str) -> None:
    with suppress(OSError, RuntimeError):  # after a hang-up there is nobody to tell; or a line is being written
        print(line, file=sys.stderr, flush=True)
