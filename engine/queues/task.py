"""Tasks, and the queues that execute them in order, one for each resource.

A task waits only for tasks handed over before it, and queues are first in, first out: no deadlock. Three kinds:

- `InlineQueues` (real.py): every task at once;
- `RealQueues` (real.py): a thread per queue and, for copies to and from a GPU, a stream; ordered by events or futures;
- `SimulatedQueues` (planner/simulate.py): times alone; start = max(queue free, inputs ready), end = start + seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

Kind = Literal[
    "forward", "backward", "loss", "zero", "finish", "statistics", "decode", "token",  # computation
    "adamw", "adamw weights", "adamw moments",  # updates and their parts
    "weights", "state", "gradient", "activations",  # transfers, by content
    "other",
]  # fmt: skip


def named(kind: Kind, of: str) -> str:
    """A task's name for people."""
    return of if kind == "other" else f"{kind} {of}".rstrip()


class Task:
    """Work on a queue, its amounts and times."""

    __slots__ = ("queue", "kind", "of", "nbytes", "flops", "start", "end")

    def __init__(self, queue: str, kind: Kind, of: str, nbytes: float = 0, flops: float = 0):
        self.queue, self.kind, self.of, self.nbytes, self.flops = queue, kind, of, nbytes, flops
        self.start = self.end = 0.0  # seconds; on streams set when the trace is read

    @property
    def name(self) -> str:
        return named(self.kind, self.of)

    def wait(self) -> Any:
        """Blocks until it is over, on the GPU too; returns its result or raises its error."""
        raise NotImplementedError(f"{self.name}: simulated work has no result")


class Queues(Protocol):
    simulated: bool
    devices: Sequence[torch.device]  # GPUs; on the CPU pretended

    @property
    def device(self) -> torch.device:
        """GPU 0."""
        ...

    def run(
        self,
        queue: str,
        kind: Kind,
        of: str,
        fn: Callable[[], Any],
        after: Sequence[Task] = (),
        nbytes: float = 0,
        flops: float = 0,
    ) -> Task:
        """Hands over `fn`, to run after all of `after`; returns its task at once. `of`: unit or piece."""
        ...

    def drain(self) -> None:
        """Returns when all tasks are over; raises the first error."""
        ...
