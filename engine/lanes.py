"""Lanes: resources that run tasks one after another, and the trace of what they did.

A step is straight-line code that hands tasks to named lanes. A task may wait only for tasks handed over before it,
and each lane is first in, first out; so the order of the program is itself a legal schedule, and no set of tasks can
wait for each other in a circle. Three kinds of lanes run the same step:

- `InlineLanes`: every task at once, in program order;
- `RealLanes`: a thread per lane and, for copies to and from a GPU, a stream; hand-over by CUDA event or future;
- `SimulatedLanes` (simulate.py): nothing runs; start = max(lane free, inputs ready), end = start + its seconds.

The `compute` lane is the calling thread (and its current CUDA stream) in all three.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# To and from the SSD: what a step waits for; and the optimizer's records, which wait for slots and for updates. With
# queues of their own they never stand in its way.
READS, WRITES = ("ssd_read", "state_read"), ("ssd_write", "state_write")
LANES = ("compute", "h2d", "d2h", *READS, *WRITES, "cpu", "update")  # update: optimizer kernels on the GPU


class Task:
    """One piece of work on a lane, and the future of its result."""

    __slots__ = ("lane", "name", "nbytes", "flops", "start", "end", "result", "error", "began", "ended", "_issued")

    def __init__(self, lane: str, name: str, nbytes: float, flops: float):
        self.lane, self.name, self.nbytes, self.flops = lane, name, nbytes, flops
        self.start = self.end = 0.0  # seconds; for work on a GPU stream filled in when the trace is read
        self.result: Any = None
        self.error: BaseException | None = None
        self.began: torch.cuda.Event | None = None  # on a stream: the work is over when `ended` has happened there
        self.ended: torch.cuda.Event | None = None
        self._issued = threading.Event()  # the lane has run the task's function

    def wait(self) -> Any:
        """Blocks this thread until the work is over, on the GPU too; returns the result or raises the task's error."""
        self._issued.wait()
        if self.error is not None:
            raise self.error
        if self.ended is not None:
            self.ended.synchronize()
        return self.result

    def order_before(self, stream: torch.cuda.Stream | None) -> None:
        """Makes what `stream` does next come after this task; with no stream, blocks this thread until it is over."""
        if stream is None:
            self.wait()
            return
        self._issued.wait()
        if self.error is not None:
            raise self.error
        if self.ended is not None:
            stream.wait_event(self.ended)


@dataclass(frozen=True)
class Span:
    """What a task did and when: seconds since the trace began, bytes moved, FLOPs done."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: float
    flops: float


class InlineLanes:
    """Runs every task at once in the calling thread: the simplest lanes, for tests and small CPU runs."""

    simulated = False

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.tasks: list[Task] = []
        self.tracing = False
        self.moved: Counter[str] = Counter()  # bytes handed to each lane so far
        self.zero = time.perf_counter()

    def run(
        self,
        lane: str,
        name: str,
        fn: Callable[[], Any],
        after: Sequence[Task] = (),
        nbytes: float = 0,
        flops: float = 0,
    ) -> Task:
        """Hands `fn` to a lane, to run once all of `after` are over. Returns the Task at once."""
        task = self._task(lane, name, nbytes, flops)
        self._execute(task, fn, after, None)
        if task.error is not None:
            raise task.error
        if (
            self.device.type == "cuda"
        ):  # nothing overlaps here: the next task, on the CPU perhaps, finds the bytes there
            torch.cuda.current_stream(self.device).synchronize()
        return task

    def _task(self, lane: str, name: str, nbytes: float, flops: float) -> Task:
        task = Task(lane, name, nbytes, flops)
        self.moved[lane] += int(nbytes)
        if self.tracing:
            self.tasks.append(task)
        return task

    def _execute(
        self, task: Task, fn: Callable[[], Any], after: Sequence[Task], stream: torch.cuda.Stream | None
    ) -> None:
        try:
            for other in after:
                other.order_before(stream)
            task.start = time.perf_counter() - self.zero
            if stream is not None:
                task.began = torch.cuda.Event(enable_timing=True)
                task.began.record(stream)
            task.result = fn()
            if stream is not None:
                task.ended = torch.cuda.Event(enable_timing=True)
                task.ended.record(stream)
            task.end = time.perf_counter() - self.zero
        except BaseException as error:  # handed to whoever waits for the task
            task.error = error
        finally:
            task._issued.set()

    def drain(self) -> None:
        """Returns when everything handed over is done; raises the first error of any task."""

    def close(self) -> None:
        """Ends the lanes' threads. What is queued behind a failed task is not run."""

    def trace(self) -> list[Span]:
        """The spans recorded while `tracing`, and forgets them. Call after drain()."""
        spans = [Span(t.lane, t.name, t.start, t.end, t.nbytes, t.flops) for t in self.tasks]
        self.tasks = []
        return spans


SWITCH = 5e-4  # seconds after which a lane gets the GIL; the usual 5e-3 is as long as a task: a copy or an update waits


class RealLanes(InlineLanes):
    """A thread per lane; on CUDA a stream each for `h2d`, `d2h`, `update`. `compute` is the caller's stream."""

    def __init__(self, device: torch.device | str = "cpu", extra: Sequence[str] = ()):
        super().__init__(device)
        sys.setswitchinterval(SWITCH)
        self.error: BaseException | None = None
        cuda = self.device.type == "cuda"
        self.streams = {name: torch.cuda.Stream(self.device) for name in ("h2d", "d2h", "update")} if cuda else {}
        if cuda:
            self.streams["compute"] = torch.cuda.current_stream(self.device)
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record(self.streams["compute"])
            self.origin.synchronize()
            self.zero = time.perf_counter()
        self.queues: dict[str, queue.SimpleQueue] = {}
        self.threads = []
        for name in (*LANES[1:], *extra):
            self.queues[name] = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(name,), name=f"lane-{name}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def run(self, lane, name, fn, after=(), nbytes=0, flops=0) -> Task:
        if self.error is not None:
            raise self.error
        task = self._task(lane, name, nbytes, flops)
        if lane == "compute":
            self._execute(task, fn, after, self.streams.get(lane))
            if task.error is not None:
                raise task.error
        else:
            self.queues[lane].put((task, fn, tuple(after)))
        return task

    def _serve(self, lane: str) -> None:
        stream = self.streams.get(lane)
        try:
            if stream is not None:
                torch.cuda.set_device(self.device)
                torch.cuda.set_stream(stream)
        except BaseException as error:  # for whoever waits for a task of this lane
            self.error = self.error or error
        while (item := self.queues[lane].get()) is not None:
            task, fn, after = item
            if self.error is not None:
                task.error = self.error
                task._issued.set()
                continue
            self._execute(task, fn, after, stream)
            if task.error is not None and self.error is None:
                self.error = task.error
            del task, fn, after, item  # a slot's memory must not live on in an idle thread's locals

    def drain(self) -> None:
        last = [self._sentinel(name) for name in self.queues]
        for task in last:
            task._issued.wait()
            if task.ended is not None:
                task.ended.synchronize()
        if self.error is not None:
            raise self.error
        if "compute" in self.streams:
            self.streams["compute"].synchronize()

    def _sentinel(self, lane: str) -> Task:
        task = Task(lane, "drain", 0, 0)
        self.queues[lane].put((task, lambda: None, ()))
        return task

    def close(self) -> None:
        for q in self.queues.values():
            q.put(None)
        for thread in self.threads:
            thread.join()
        if "compute" in self.streams:
            for stream in self.streams.values():
                stream.synchronize()

    def trace(self) -> list[Span]:
        for t in self.tasks:
            if t.ended is not None:
                t.start = self.origin.elapsed_time(t.began) / 1e3
                t.end = self.origin.elapsed_time(t.ended) / 1e3
        return super().trace()


def busy(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds each lane was at work."""
    total: dict[str, float] = {}
    for s in spans:
        total[s.lane] = total.get(s.lane, 0.0) + s.end - s.start
    return total


def write_perfetto(path: Path, spans: Sequence[Span], process: str = "measured") -> None:
    """Writes spans as a Chrome trace, which ui.perfetto.dev opens: a row a lane, microseconds."""
    rows = {lane: i for i, lane in enumerate(dict.fromkeys((*LANES, *(s.lane for s in spans))))}
    events = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": i, "args": {"name": lane}} for lane, i in rows.items()
    ]
    for s in spans:
        args = {"MB": round(s.nbytes / 1e6, 3), "GFLOP": round(s.flops / 1e9, 3)}
        times = {"ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}
        events.append({"ph": "X", "name": s.name, "pid": process, "tid": rows[s.lane], "args": args, **times})
    path.write_text(json.dumps({"traceEvents": events}))
