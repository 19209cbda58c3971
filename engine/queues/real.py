"""Queues that execute tasks, in threads and CUDA streams or immediately in the calling thread."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from trireme.engine.queues.names import ON_GPU, PEERS, gpu_of, kind_of, numbered, queues_of
from trireme.engine.queues.task import Fn, Kind, Task


class RealTask(Task):
    """A task with its result or error, and on a stream its CUDA events."""

    __slots__ = ("result", "error", "began", "ended", "_issued")

    def __init__(self, queue: str, kind: Kind, label: str, nbytes: float = 0, flops: float = 0):
        super().__init__(queue, kind, label, nbytes, flops)
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


PROFILED = "NVTX_INJECTION64_PATH" in os.environ  # as Nsight Systems and Nsight Compute start a program


def execute(task: RealTask, fn: Fn, after: Sequence[Task], stream: torch.cuda.Stream | None, zero: float) -> None:
    """Runs `fn` after `after`, on `stream` if given; keeps its error in the task. A profiler sees an NVTX range."""
    try:
        for dependency in after:
            assert isinstance(dependency, RealTask), dependency
            dependency.order_before(stream)
        task.start = time.perf_counter() - zero
        if stream is not None:
            task.began = torch.cuda.Event(enable_timing=True)
            task.began.record(stream)
        with torch.cuda.nvtx.range(task.name) if PROFILED else nullcontext():
            task.result = fn()
        if stream is not None:
            task.ended = torch.cuda.Event(enable_timing=True)
            task.ended.record(stream)
        task.end = time.perf_counter() - zero
    except BaseException as error:
        task.error = error
    finally:
        task._issued.set()


SWITCH = 5e-4  # seconds between GIL switches, divided by GPUs; the usual 5e-3 is a whole copy or update
OLD = 1000  # collections of younger objects for one of all; the usual 10 come once a step with several GPUs
DEFAULTS: list[tuple[float, tuple[int, int, int]]] = []  # both without queues, for each RealQueues that is open
SWITCHING = threading.Lock()


def _set_interpreter(gpus: int) -> None:
    """Lets the threads that launch kernels run: they take short turns, and the garbage collector rarely looks at all
    objects.

    Such a collection takes 0.15 s once torch is imported, and every thread waits for it. Objects that exist now are
    left out.
    """
    with SWITCHING:
        DEFAULTS.append(DEFAULTS[0] if DEFAULTS else (sys.getswitchinterval(), gc.get_threshold()))
        sys.setswitchinterval(SWITCH / gpus)
        gc.set_threshold(*DEFAULTS[0][1][:2], OLD)
        gc.freeze()


def _reset_interpreter() -> None:
    """Restores the settings when the last open queues are closed."""
    with SWITCHING:
        interval, thresholds = DEFAULTS.pop()
        if not DEFAULTS:
            sys.setswitchinterval(interval)
            gc.set_threshold(*thresholds)
            gc.unfreeze()


class RealQueues:
    """A thread for each queue, with a CUDA stream for those of a GPU. The caller's thread executes one GPU's `compute`.

    While any are open, the interpreter's threads take shorter turns, and garbage is collected more rarely.
    """

    simulated = False

    def __init__(
        self,
        device: torch.device | str = "cpu",
        extra: Sequence[str] = (),
        gpus: int = 1,
        hosts: int = 1,
        threads: bool = True,
    ):
        """`device`: the first of `gpus` GPUs with consecutive numbers. Without `threads` the caller executes every task
        at once; the results of all queues are bitwise those.
        """
        first = torch.device(device)
        if first.type == "cuda" and first.index is None:
            first = torch.device("cuda", torch.cuda.current_device())
        self.devices: Sequence[torch.device] = [first] + [
            torch.device("cuda", first.index + gpu) if first.type == "cuda" else first for gpu in range(1, gpus)
        ]
        self.names = queues_of(gpus, hosts)
        self.tasks: list[RealTask] = []
        self.tracing = False
        self.moved: Counter[str] = Counter()  # by queue: bytes of the tasks handed over
        self.error: BaseException | None = None
        self.on_error: Callable[[BaseException], object] = lambda _: None  # hears of the first of a thread
        self.current: dict[str, RealTask] = {}  # by queue: its task, waiting or started
        self.executed: Counter[str] = Counter()  # by queue: tasks executed, on streams issued
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.origins: list[tuple[torch.cuda.Event, float]] = []  # by GPU: an event, its time
        self.zero = time.perf_counter()
        if self.device.type == "cuda" and threads:
            for gpu in range(gpus):
                self._open(gpu)
            self.zero = self.origins[0][1]
        self.queues: dict[str, SimpleQueue[Any]] = {}
        self.threads: list[threading.Thread] = []
        self.open = False
        try:
            for name in (*self.names[gpus == 1 :], *extra) if threads else ():
                self._start(name)
        except BaseException:
            self.close()
            raise
        if threads:
            _set_interpreter(gpus)  # last: `close` resets it
        self.open = True

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def _start(self, queue: str) -> None:
        """Starts a queue's thread."""
        self.queues[queue] = SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(queue,), name=f"queue-{queue}", daemon=True)
        thread.start()
        self.threads.append(thread)

    def _open(self, gpu: int) -> None:
        """Makes a GPU's streams. `compute` has the caller's stream, on which inputs are copied."""
        device = self.devices[gpu]
        for name in (queue for queue in ON_GPU[1:] if queue in self.names):
            self.streams[numbered(name, gpu)] = torch.cuda.Stream(device)
        stream = self.streams[numbered("compute", gpu)] = torch.cuda.current_stream(device)
        origin = torch.cuda.Event(enable_timing=True)
        origin.record(stream)
        origin.synchronize()
        self.origins.append((origin, time.perf_counter()))

    def run(
        self, queue: str, kind: Kind, name: str, fn: Fn, after: Sequence[Task] = (), nbytes: float = 0, flops: float = 0
    ) -> Task:
        """As of Queues. Raises the first error of any thread, and of a task executed here its own: that task is not
        counted.
        """
        assert self.open, "the queues are closed"
        if self.error is not None:
            raise self.error
        task = RealTask(queue, kind, name, nbytes, flops)
        if self.threads and not (queue == "compute" and len(self.devices) == 1):
            self.queues[queue].put((task, fn, tuple(after)))
        else:
            self._execute(task, fn, after, self.streams.get(queue))
            if task.error is not None:
                raise task.error
            if self.device.type == "cuda" and not self.threads:  # the CPU may read the bytes next
                torch.cuda.current_stream(self.device).synchronize()
        self.moved[queue] += int(nbytes)
        if self.tracing:
            self.tasks.append(task)
        return task

    def _execute(self, task: RealTask, fn: Fn, after: Sequence[Task], stream: torch.cuda.Stream | None) -> None:
        self.current[task.queue] = task
        execute(task, fn, after, stream, self.zero)
        self.executed[task.queue] += 1
        del self.current[task.queue]  # its result may be large

    def _serve(self, queue: str) -> None:
        stream = self.streams.get(queue)
        torch.get_num_threads()  # asked first, torch applies its number to this thread: bits of GEMMs depend on it
        try:
            if stream is not None:
                if kind_of(queue) in PEERS:  # torch orders a copy between GPUs behind the current streams of both
                    for device in self.devices:
                        torch.cuda.set_stream(torch.cuda.Stream(device))
                torch.cuda.set_device(self.devices[gpu_of(queue)])
                torch.cuda.set_stream(stream)
        except BaseException as error:  # kept for the queue's tasks
            self.error = self.error or error
        while (item := self.queues[queue].get()) is not None:
            task, fn, after = item
            if self.error is not None:
                task.error = self.error
                task._issued.set()
                continue
            self._execute(task, fn, after, stream)
            if task.error is not None and self.error is None:
                self.error = task.error
                self.on_error(task.error)
            del task, fn, after, item  # an idle thread's locals would keep a slot's memory

    def drain(self) -> None:
        """Waits for all tasks; raises the first error."""
        sentinels = [self._sentinel(name) for name in self.queues]
        for task in sentinels:
            task._issued.wait()
            if task.ended is not None:
                task.ended.synchronize()
        if self.error is not None:
            raise self.error
        for queue, stream in self.streams.items():
            if kind_of(queue) == "compute":
                stream.synchronize()

    def _sentinel(self, queue: str) -> RealTask:
        """Queues an empty task, to wait for those before it."""
        task = RealTask(queue, "other", "drain")
        self.queues[queue].put((task, lambda: None, ()))
        return task

    def close(self) -> None:
        """Ends the threads. Tasks after a failed one are not executed."""
        for queue in self.queues.values():
            queue.put(None)
        for thread in self.threads:
            thread.join()
        if self.origins:
            for stream in self.streams.values():
                stream.synchronize()
        if self.open and self.threads:
            _reset_interpreter()
        self.open = False

    def trace(self) -> list[Task]:
        """The tasks recorded while `tracing` since the last call. To be called after `drain`."""
        for t in self.tasks:
            if t.began is not None and t.ended is not None:
                origin, origin_time = self.origins[gpu_of(t.queue)]
                t.start = origin.elapsed_time(t.began) / 1e3 + (origin_time - self.zero)
                t.end = origin.elapsed_time(t.ended) / 1e3 + (origin_time - self.zero)
        trace, self.tasks = [t.cut() for t in self.tasks], []
        return trace
