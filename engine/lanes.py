"""Lanes: resources that run tasks one after another, and the trace of what they did.

A task waits only for tasks handed over before it, and lanes are first in, first out: no deadlock. Three kinds:

- `InlineLanes`: every task at once;
- `RealLanes`: a thread per lane and, for copies to and from a GPU, a stream; ordered by events or futures;
- `SimulatedLanes` (planner/simulate.py): times alone; start = max(lane free, inputs ready), end = start + seconds.

With one GPU `compute` is the calling thread with its CUDA stream. Several GPUs have lanes of their own, threads all:
`compute`, `compute1`, ... On the CPU they are pretended.
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
from typing import Any, Literal, Protocol

import torch

# What a step waits for; optimizer records, which would hold it up in the same queue.
READS, WRITES = ("ssd_read", "state_read"), ("ssd_write", "state_write")
LANES = ("compute", "h2d", "d2h", *READS, *WRITES, "cpu", "update")  # update: optimizer on the GPU
HOPS = ("hop_in", "hop_out")  # activations between GPUs, which would wait behind weights
# Between hosts: shares and weights; sums from the host before, to the next. On the bus too a sum would hold others up.
NET, SUMS = ("net", "sum_in", "sum_out"), ("sum_up", "sum_down")
ON_GPU = ("compute", "h2d", "d2h", "update", *HOPS, *SUMS)
BUS = {"hop_in": "h2d", "hop_out": "d2h", "sum_up": "h2d", "sum_down": "d2h"}  # lane -> the way that it shares


def numbered(name: str, gpu: int) -> str:
    """A GPU's lane or tier."""
    return f"{name}{gpu}" if gpu else name


def kind_of(lane: str) -> str:
    """A lane's name without its GPU."""
    return lane.rstrip("0123456789")


def gpu_of(lane: str) -> int:
    return int(lane[len(kind_of(lane)) :] or 0)


def plain(lane: str) -> str:
    """A lane's kind; of hops and sums, the way on the bus that they take."""
    return BUS.get(kind_of(lane), kind_of(lane))


def lanes_of(gpus: int, hosts: int = 1) -> tuple[str, ...]:
    own = tuple(lane for lane in ON_GPU if (gpus > 1 or lane not in HOPS) and (hosts > 1 or lane not in SUMS))
    others = (numbered(lane, gpu) for gpu in range(1, gpus) for lane in own)
    return (*LANES, *(lane for lane in own if lane not in LANES), *(NET if hosts > 1 else ()), *others)


Kind = Literal[
    "forward", "backward", "loss", "zero", "finish", "statistics", "decode",  # computation
    "adamw", "adamw weights", "adamw moments",  # updates and their parts
    "weights", "state", "gradient", "activations",  # transfers, by content
    "other",
]  # fmt: skip


def _named(kind: Kind, of: str) -> str:
    return of if kind == "other" else f"{kind} {of}".rstrip()


class Task:
    """Work on a lane, its amounts and times."""

    __slots__ = ("lane", "kind", "of", "nbytes", "flops", "start", "end")

    def __init__(self, lane: str, kind: Kind, of: str, nbytes: float = 0, flops: float = 0):
        self.lane, self.kind, self.of, self.nbytes, self.flops = lane, kind, of, nbytes, flops
        self.start = self.end = 0.0  # seconds; on streams set when the trace is read

    @property
    def name(self) -> str:
        return _named(self.kind, self.of)

    def wait(self) -> Any:
        """Blocks until it is over, on the GPU too; returns its result or raises its error."""
        raise NotImplementedError(f"{self.name}: simulated work has no result")


class RealTask(Task):
    __slots__ = ("result", "error", "began", "ended", "_issued")

    def __init__(self, lane: str, kind: Kind, of: str, nbytes: float = 0, flops: float = 0):
        super().__init__(lane, kind, of, nbytes, flops)
        self.result: Any = None
        self.error: BaseException | None = None
        self.began: torch.cuda.Event | None = None  # on a stream: over once `ended` has happened
        self.ended: torch.cuda.Event | None = None
        self._issued = threading.Event()

    def wait(self) -> Any:
        self._issued.wait()
        if self.error is not None:
            raise self.error
        if self.ended is not None:
            self.ended.synchronize()
        return self.result

    def order_before(self, stream: torch.cuda.Stream | None) -> None:
        """Orders `stream`'s next work after this task; without a stream blocks. Raises its error."""
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
    """A task in a trace; seconds since its beginning."""

    lane: str
    kind: Kind
    of: str
    start: float
    end: float
    nbytes: float
    flops: float

    @staticmethod
    def over(t: Task) -> Span:
        return Span(t.lane, t.kind, t.of, t.start, t.end, t.nbytes, t.flops)

    @property
    def name(self) -> str:
        return _named(self.kind, self.of)


class Lanes(Protocol):
    simulated: bool
    devices: Sequence[torch.device]  # GPUs; on the CPU pretended

    @property
    def device(self) -> torch.device:
        """GPU 0."""
        ...

    def run(
        self,
        lane: str,
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


class InlineLanes:
    """Every task at once in the calling thread: the reference."""

    simulated = False

    def __init__(self, device: torch.device | str = "cpu", gpus: int = 1):
        """`gpus`: `device` and those behind it."""
        first = torch.device(device)
        if first.type == "cuda" and first.index is None:
            first = torch.device("cuda", torch.cuda.current_device())
        self.devices: Sequence[torch.device] = [first] + [
            torch.device("cuda", first.index + gpu) if first.type == "cuda" else first for gpu in range(1, gpus)
        ]
        self.tasks: list[RealTask] = []
        self.tracing = False
        self.moved: Counter[str] = Counter()  # bytes by lane
        self.zero = time.perf_counter()

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def run(
        self,
        lane: str,
        kind: Kind,
        of: str,
        fn: Callable[[], Any],
        after: Sequence[Task] = (),
        nbytes: float = 0,
        flops: float = 0,
    ) -> Task:
        task = self._noted(RealTask(lane, kind, of, nbytes, flops))
        execute(task, fn, after, None, self.zero)
        if task.error is not None:
            raise task.error
        if self.device.type == "cuda":  # the CPU may read the bytes next
            torch.cuda.current_stream(self.device).synchronize()
        return task

    def _noted(self, task: RealTask) -> RealTask:
        self.moved[task.lane] += int(task.nbytes)
        if self.tracing:
            self.tasks.append(task)
        return task

    def drain(self) -> None:
        """All is done."""

    def close(self) -> None:
        """No threads to end."""

    def trace(self) -> list[Span]:
        """Spans recorded while `tracing`, since the last call. Call after drain()."""
        spans = [Span.over(t) for t in self.tasks]
        self.tasks = []
        return spans


def execute(
    task: RealTask, fn: Callable[[], Any], after: Sequence[Task], stream: torch.cuda.Stream | None, zero: float
) -> None:
    """Runs `fn` after `after`, on `stream` if given; keeps its error in the task."""
    try:
        for other in after:
            assert isinstance(other, RealTask), other
            other.order_before(stream)
        task.start = time.perf_counter() - zero
        if stream is not None:
            task.began = torch.cuda.Event(enable_timing=True)
            task.began.record(stream)
        task.result = fn()
        if stream is not None:
            task.ended = torch.cuda.Event(enable_timing=True)
            task.ended.record(stream)
        task.end = time.perf_counter() - zero
    except BaseException as error:
        task.error = error
    finally:
        task._issued.set()


SWITCH = 5e-4  # seconds between GIL switches; the usual 5e-3 is a whole copy or update
USUAL: list[float] = []  # the interval without lanes, for each RealLanes that is open
SWITCHING = threading.Lock()


class RealLanes(InlineLanes):
    """A thread per lane, on CUDA with a stream where it is a GPU's; one GPU's `compute`: the caller's.

    SWITCH is the interpreter's switch interval until all are closed.
    """

    def __init__(self, device: torch.device | str = "cpu", extra: Sequence[str] = (), gpus: int = 1, hosts: int = 1):
        super().__init__(device, gpus)
        self.names = lanes_of(gpus, hosts)
        with SWITCHING:
            USUAL.append(USUAL[0] if USUAL else sys.getswitchinterval())
            sys.setswitchinterval(SWITCH)
        self.open = True
        self.error: BaseException | None = None
        self.failed: Callable[[BaseException], object] = lambda _: None  # hears of the first of a thread
        self.at: dict[str, RealTask] = {}  # by lane: its task, waiting or begun
        self.over: Counter[str] = Counter()  # by lane: tasks executed, on streams issued
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.origins: list[tuple[torch.cuda.Event, float]] = []  # by GPU: an event, its time
        if self.device.type == "cuda":
            for gpu in range(gpus):
                self._open(gpu)
            self.zero = self.origins[0][1]
        self.queues: dict[str, queue.SimpleQueue[Any]] = {}
        self.threads: list[threading.Thread] = []
        for name in (*self.names[gpus == 1 :], *extra):
            self._start(name)

    def _start(self, lane: str) -> None:
        self.queues[lane] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(lane,), name=f"lane-{lane}", daemon=True)
        thread.start()
        self.threads.append(thread)

    def _open(self, gpu: int) -> None:
        """Makes its streams; `compute` shares the caller's, which brings inputs."""
        device = self.devices[gpu]
        for name in (lane for lane in ON_GPU[1:] if lane in self.names):
            self.streams[numbered(name, gpu)] = torch.cuda.Stream(device)
        stream = self.streams[numbered("compute", gpu)] = torch.cuda.current_stream(device)
        origin = torch.cuda.Event(enable_timing=True)
        origin.record(stream)
        origin.synchronize()
        self.origins.append((origin, time.perf_counter()))

    def run(
        self,
        lane: str,
        kind: Kind,
        of: str,
        fn: Callable[[], Any],
        after: Sequence[Task] = (),
        nbytes: float = 0,
        flops: float = 0,
    ) -> Task:
        if self.error is not None:
            raise self.error
        task = self._noted(RealTask(lane, kind, of, nbytes, flops))
        if lane == "compute" and len(self.devices) == 1:
            self._execute(task, fn, after, self.streams.get(lane))
            if task.error is not None:
                raise task.error
        else:
            self.queues[lane].put((task, fn, tuple(after)))
        return task

    def _execute(
        self, task: RealTask, fn: Callable[[], Any], after: Sequence[Task], stream: torch.cuda.Stream | None
    ) -> None:
        self.at[task.lane] = task
        execute(task, fn, after, stream, self.zero)
        self.over[task.lane] += 1
        del self.at[task.lane]  # its result may be large

    def _serve(self, lane: str) -> None:
        stream = self.streams.get(lane)
        try:
            if stream is not None:
                torch.cuda.set_device(self.devices[gpu_of(lane)])
                torch.cuda.set_stream(stream)
        except BaseException as error:  # kept for the lane's tasks
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
                self.failed(task.error)
            del task, fn, after, item  # an idle thread's locals would keep a slot's memory

    def drain(self) -> None:
        last = [self._sentinel(name) for name in self.queues]
        for task in last:
            task._issued.wait()
            if task.ended is not None:
                task.ended.synchronize()
        if self.error is not None:
            raise self.error
        for lane, stream in self.streams.items():
            if kind_of(lane) == "compute":
                stream.synchronize()

    def _sentinel(self, lane: str) -> RealTask:
        task = RealTask(lane, "other", "drain")
        self.queues[lane].put((task, lambda: None, ()))
        return task

    def close(self) -> None:
        """Ends the threads; tasks behind a failed one do not run."""
        for waiting in self.queues.values():
            waiting.put(None)
        for thread in self.threads:
            thread.join()
        if self.origins:
            for stream in self.streams.values():
                stream.synchronize()
        with SWITCHING:
            usual = USUAL.pop() if self.open else None
            self.open = False
            if usual is not None and not USUAL:
                sys.setswitchinterval(usual)

    def trace(self) -> list[Span]:
        for t in self.tasks:
            if t.began is not None and t.ended is not None:
                origin, at = self.origins[gpu_of(t.lane)]
                t.start = origin.elapsed_time(t.began) / 1e3 + (at - self.zero)
                t.end = origin.elapsed_time(t.ended) / 1e3 + (at - self.zero)
        return super().trace()


def busy(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of work by lane."""
    total: dict[str, float] = {}
    for s in spans:
        total[s.lane] = total.get(s.lane, 0.0) + s.end - s.start
    return total


def write_perfetto(path: Path, spans: Sequence[Span], process: str = "measured") -> None:
    """Writes a Chrome trace (ui.perfetto.dev): a row a lane, microseconds."""
    rows = {lane: i for i, lane in enumerate(dict.fromkeys((*LANES, *(s.lane for s in spans))))}
    events = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": i, "args": {"name": lane}} for lane, i in rows.items()
    ]
    for s in spans:
        args = {"MB": round(s.nbytes / 1e6, 3), "GFLOP": round(s.flops / 1e9, 3)}
        times = {"ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}
        events.append({"ph": "X", "name": s.name, "pid": process, "tid": rows[s.lane], "args": args, **times})
    path.write_text(json.dumps({"traceEvents": events}))
