"""Who is told of ops and launches over tensors of torch's "meta" device, where launchers allocate and nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Observer(Protocol):
    """Counts what a pass would take."""

    def begin(self, op: str, args: tuple[Any, ...], options: dict[str, Any]) -> None: ...

    def end(self) -> None: ...

    def launch(self, kernel: str, args: tuple[Any, ...]) -> None: ...


_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())  # of a thread
observers = _observers.get


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tells an observer of the ops and launches of this thread."""
    before = _observers.set((*observers(), observer))
    try:
        yield
    finally:
        _observers.reset(before)
