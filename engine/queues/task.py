"""Tasks, and the queues that execute them in order; each queue is one resource.

A task waits only for tasks handed over before it, and each queue executes in order, so there is no deadlock. There are
two kinds of queues:

- `RealQueues` (real.py): a thread for each queue and, for work on a GPU, a stream; ordered by futures and events. On
  demand without threads: every task is executed at once;
- `SimulatedQueues` (planner/simulate.py): computes times alone; a task starts when its queue is free and all tasks that
  it waits for have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Literal, Protocol, TypeAlias

import torch

Fn: TypeAlias = Callable[[], Any]  # what a task does; returns its result
Kind = Literal[
    "forward", "backward", "loss", "zero", "finish", "statistics", "decode", "token",  # computation
    "adamw", "adamw weights", "adamw moments",  # updates and their parts
    "weights", "state", "gradient", "activations",  # transfers, by content
    "other",
]  # fmt: skip


class Task:
    """Work on a queue: its kind, what it is on (`label`), bytes, FLOPs, start and end."""

    __slots__ = ("queue", "kind", "label", "nbytes", "flops", "start", "end")

    def __init__(self, queue: str, kind: Kind, label: str, nbytes: float = 0, flops: float = 0):
        self.queue, self.kind, self.label, self.nbytes, self.flops = queue, kind, label, nbytes, flops
        self.start = self.end = 0.0  # seconds; on streams set when the trace is read

    @property
    def name(self) -> str:
        """For people."""
        return self.label if self.kind == "other" else f"{self.kind} {self.label}".rstrip()

    def cut(self, end: float = inf) -> Task:
        """A copy for a trace, without the task's result: ended by `end`, with its share of bytes and FLOPs."""
        share = 1 if self.end <= end else (end - self.start) / (self.end - self.start)
        task = Task(self.queue, self.kind, self.label, share * self.nbytes, share * self.flops)
        task.start, task.end = self.start, min(self.end, end)
        return task

    def wait(self) -> Any:
        """Blocks until the task is over, on the GPU too. Returns its result or raises its error."""
        raise NotImplementedError(f"{self.name}: simulated work has no result")


class Queues(Protocol):
    simulated: bool
    tracing: bool  # whether FLOPs of tasks are counted
    devices: Sequence[torch.device]  # GPUs; on a CPU they are emulated

    @property
    def device(self) -> torch.device:
        """The first GPU."""

    def run(
        self, queue: str, kind: Kind, name: str, fn: Fn, after: Sequence[Task] = (), nbytes: float = 0, flops: float = 0
    ) -> Task:
        """Hands over `fn`, which is executed after all tasks in `after`; returns its task at once.

        `name`: what it is on, such as a layer. `nbytes`, `flops`: what it moves and computes.
        """

    def drain(self) -> None:
        """Waits for all tasks; raises the first error."""

    def close(self) -> None:
        """Ends its threads. Calling it again does nothing."""
