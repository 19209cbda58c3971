"""Asking a run to stop: by Ctrl-C, SIGTERM or a hang-up, once to end well, twice to end at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

LEFT = 130  # exit code of a run that was asked to stop


@contextmanager
def stop_signals(first: Callable[[int], str], second: Callable[[], str]) -> Iterator[None]:
    """Within it the first signal calls first(number) and the run goes on; the second ends the process.

    What each returns is told on stderr before.
    """
    caught = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]

    def once(number, frame):
        _tell(first(number))
        for n in caught:
            signal.signal(n, twice)

    def twice(number, frame):
        _tell(second())
        os._exit(LEFT)

    before = {n: signal.signal(n, once) for n in caught}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def _tell(line: str) -> None:
    with suppress(OSError):  # after a hang-up there is nobody to tell
        print(line, file=sys.stderr, flush=True)
