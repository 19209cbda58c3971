"""Who is told of ops and launches over tensors of torch's "meta" device, where launchers allocate and nothing runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Observer(Protocol):
    """Counts what a pass would take."""

    def begin(self, op: str, args: tuple[Any, ...], options: dict[str, Any]) -> None: ...

    def end(self) -> None: ...

    def launch(self, kernel: str, args: tuple[Any, ...]) -> None: ...


class _Local(threading.local):
    def __init__(self) -> None:
        self.observers: list[Observer] = []


_local = _Local()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tells an observer of the ops and launches of this thread."""
    _local.observers.append(observer)
    try:
        yield
    finally:
        _local.observers.remove(observer)


def observers() -> list[Observer]:
    return _local.observers
