"""Simulated queues: computes when each task of a step would start and end.

A queue runs its tasks in order. A task starts when its queue is free and the tasks that it waits for have ended. Queues
slow each other down where they share a device:

- **Drives**: the queues of the SSD share one half-duplex device with the rate of all drives. Requests have classes, as
  in storage/aio.py: a request gets the time that requests of its own and of higher classes leave free, and a minimum
  share.
- **PCIe**: in each direction of each GPU, copies of streamed updates share the bus with those of weights and
  activations. Peer copies use it, too, unless they are faster than it, that is, have a link of their own.
- **RAM**: copies and CPU AdamW slow each other down, and so do both directions of PCIe. The factor is computed from the
  bytes of a whole pass. Updates with 8- or 16-bit moments leave some of RAM's rate to copies (`Rates.spare`). If PCIe
  and drives together are faster than RAM, each copy also takes time of RAM, and with several GPUs time of the limit of
  all GPUs in its direction.
- **Statistics**: tasks that are issued after the step's statistics start after them, since the interpreter waits there.
- **Interpreter**: a task starts after it was issued, and its kernels after they were launched, in program order.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from trireme.engine.geometry import ADAM_BYTES
from trireme.engine.planner.rates import Rates
from trireme.engine.queues.names import BUS, LATER, PEERS, READS, STREAMED, WRITES, gpu_of, numbered, plain, queues_of
from trireme.engine.queues.task import Kind, Task
from trireme.storage.aio import BOUND, CLASSES, READ, WRITE

DRIVE = dict.fromkeys(READS, "ssd_read") | dict.fromkeys(WRITES, "ssd_write")  # queue -> its rate
CLASS = {queue: (WRITE if queue in WRITES else READ) + (queue in LATER) for queue in DRIVE}  # of its requests
OWN_LINK = 1.2  # peer copies faster than this multiple of PCIe's rate have a link of their own
BACKWARD_STARTS: tuple[Kind, ...] = ("loss", "adamw moments")  # kinds of tasks that begin backward


@cache
def is_copy(queue: str) -> bool:
    """Whether the tasks of a queue copy between RAM and GPUs or drives."""
    return plain(queue) in ("h2d", "d2h") or queue in DRIVE


class SimulatedTask(Task):
    """A task with its simulated start and end in seconds.

    `seconds`: its duration without others; `issue`: the interpreter's time to launch its kernels; `in_ram`, `of_all`:
    for a copy, its time at the rate of RAM, and at the rate of all GPUs together.
    """

    __slots__ = ("after", "seconds", "issue", "in_ram", "of_all")

    def __init__(self, queue: str, kind: Kind, label: str, nbytes: float, flops: float, after: Sequence[Task]):
        self.queue, self.kind, self.label, self.nbytes, self.flops = queue, kind, label, nbytes, flops
        self.after, self.seconds, self.issue, self.in_ram, self.of_all = after, 0.0, 0.0, 0.0, 0.0
        self.start = self.end = 0.0


class SimulatedQueues:
    """Records the tasks of a step, then computes their times.

    `duration`: seconds of a task without others; `issue`: seconds of the interpreter to launch its kernels. The steps
    of a steady state have the same tasks: computing their times again is ten times as fast as running the step's code.
    """

    simulated, tracing = True, False

    def __init__(
        self,
        duration: Callable[[Task], float],
        rates: Rates,
        gpus: int = 1,
        issue: Callable[[Task], float] | None = None,
        hosts: int = 1,
    ):
        self.duration, self.rates, self.issue = duration, rates, issue
        self.devices: Sequence[torch.device] = [torch.device("cpu")] * gpus
        self.tasks: list[SimulatedTask] = []  # of a step, in program order
        self.parts: list[tuple[int, int, dict[str, float]]] = []  # [start, stop) of them, slow-down of each queue
        self.free = dict.fromkeys(queues_of(gpus, hosts), 0.0)
        self.drives, self.ram = SharedDevice(len(CLASSES), BOUND), Intervals()
        limits = {"h2d": (rates.up_all, Intervals()), "d2h": (rates.down_all, Intervals())}
        pairs = ((queue, limits[plain(queue)]) for queue in self.free if gpus > 1 and plain(queue) in limits)
        self.of_all = {queue: bus for queue, bus in pairs if bus[0]}  # bytes/s of all GPUs' way, its busy times
        buses = {numbered(BUS[queue], gpu) for queue in (STREAMED[0], STREAMED[-1]) for gpu in range(gpus)}
        self.buses = {bus: SharedDevice(2, 1) for bus in buses}
        self.crowded = gpus * (rates.h2d + rates.d2h) + max(rates.ssd_read, rates.ssd_write) > rates.dram
        self.waited = 0.0  # seconds at the end of the last statistics
        self.handed = 0.0  # seconds when the interpreter has issued the last task

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def run(
        self,
        queue: str,
        kind: Kind,
        name: str,
        fn: Callable[[], Any],  # noqa: ARG002 (nothing runs)
        after: Sequence[Task] = (),
        nbytes: float = 0,
        flops: float = 0,
    ) -> SimulatedTask:
        task = SimulatedTask(queue, kind, name, nbytes, flops, after)
        task.seconds = self.duration(task)
        task.issue = self.issue(task) if self.issue else 0.0
        task.in_ram = nbytes / self.rates.dram if self.crowded and is_copy(queue) else 0.0
        if limit := self.of_all.get(queue):
            task.of_all = nbytes / limit[0]
        self.tasks.append(task)
        return task

    def drain(self) -> None:
        """Does nothing: no task runs."""

    def close(self) -> None:
        """Removes the references between tasks, which would take the garbage collector long."""
        for task in self.tasks:
            task.after = ()
        self.begin()

    def begin(self) -> None:
        """Forgets the recorded tasks; those of the next step follow."""
        self.tasks, self.parts = [], []

    def trace(self) -> list[Task]:
        return [t.cut() for t in self.tasks]

    def repeat(self) -> None:
        """Makes the recorded step follow itself: a wait for a task of the previous step becomes a wait for the last
        task of the same queue, kind and unit in this step. It is removed if that task comes earlier in the step than
        the waiting one, since in the previous step it ended long before.
        """
        last = {(task.queue, task.kind, task.label): i for i, task in enumerate(self.tasks)}
        recorded = set(self.tasks)
        for i, task in enumerate(self.tasks):
            if not recorded.issuperset(task.after):
                earlier = [last.get((t.queue, t.kind, t.label), -1) for t in task.after if t not in recorded]
                task.after = [t for t in task.after if t in recorded] + [self.tasks[j] for j in earlier if j >= i]

    def time(self) -> float:
        """Runs the recorded tasks as the next step; returns its seconds. A wait for a later task in program order
        refers to that task in the previous step.
        """
        start, self.parts = self.waited, self.parts or self._halves()
        for a, b, slow in self.parts:
            self._time(self.tasks[a:b], slow)
            if self.tasks[b - 1].kind == "statistics":
                self._wait(self.tasks[b - 1].end)
        return self.waited - start

    def time_alone(self) -> float:
        """Seconds of the recorded tasks, which are not a step: until the last one ends."""
        start, (slow,) = self.waited, _slowness((self.tasks,), self.rates, self.free)
        self._time(self.tasks, slow)
        self._wait(max((self.handed, *(task.end for task in self.tasks))))
        return self.waited - start

    def _wait(self, end: float) -> None:
        """Tasks that are issued from here on start after `end`."""
        self.waited = self.handed = end
        self.free = {queue: max(t, end) for queue, t in self.free.items()}

    def behind(self) -> list[float]:
        """Seconds that each queue works beyond the end of the step."""
        return [end - self.waited for end in self.free.values()]

    def _halves(self) -> list[tuple[int, int, dict[str, float]]]:
        """(start, stop, slow-down) of the tasks of forward, of backward to the statistics, and of the next forward."""
        n = len(self.tasks)
        turn = next(i for i, task in enumerate(self.tasks) if task.kind in BACKWARD_STARTS)
        end = next(i for i in range(n, 0, -1) if self.tasks[i - 1].kind == "statistics")
        up, down = _slowness((self.tasks[:turn] + self.tasks[end:], self.tasks[turn:end]), self.rates, self.free)
        places = pairwise(sorted({0, turn, end, n}))
        return [(a, b, down if turn <= a < end else up) for a, b in places]

    def _time(self, tasks: Sequence[SimulatedTask], slow: dict[str, float]) -> None:
        streamed = {queue for queue in {task.queue for task in tasks} if queue.startswith(STREAMED)}
        shared = {queue: (self.buses[numbered(plain(queue), gpu_of(queue))], 1) for queue in streamed if is_copy(queue)}
        shared |= {name: (bus, 0) for name, bus in self.buses.items() if (bus, 1) in shared.values()}
        shared |= {queue: (self.drives, rank) for queue, rank in CLASS.items()}
        free, task_seconds, handed = self.free, self.rates.task, self.handed
        through_ram = self.ram.take
        inline = task_seconds > 0 and self.rates.launch_overhead == 0  # on a CPU
        for task in tasks:
            queue = task.queue
            handed += task_seconds
            start = free[queue]
            if handed > start:
                start = handed
            for awaited in task.after:
                if awaited.end > start:
                    start = awaited.end
            seconds = task.seconds * slow[queue]
            end = start + seconds
            if queue in shared:
                device, rank = shared[queue]
                end = device.take(rank, start, seconds)
            if task.in_ram:
                end = max(end, through_ram(start, task.in_ram))
            if task.of_all:
                end = max(end, self.of_all[queue][1].take(start, task.of_all))
            task.start, task.end = start, end
            free[queue] = end
            handed = end if inline and queue == "compute" else handed + task.issue
        self.handed = handed


class Intervals:
    """The times at which a device is busy: disjoint intervals in order."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def take(self, start: float, seconds: float) -> float:
        """Reserves the first `seconds` of free time from `start` on; returns their end."""
        starts, ends, n = self.starts, self.ends, len(self.ends)
        if not n or ends[-1] < start:  # mostly
            starts.append(start)
            ends.append(start + seconds)
            return start + seconds
        first = i = bisect.bisect_left(ends, start)
        time, left = start, seconds
        while i < n and (free := starts[i] - time) <= left:
            if free > 0:
                left -= free
            time, i = ends[i], i + 1
        end = time + left
        if i == first:
            starts.insert(first, start)
            ends.insert(first, end)
            return end
        if start < starts[first]:
            starts[first] = start
        ends[first] = end
        if i > first + 1:
            del starts[first + 1 : i], ends[first + 1 : i]
        return end


class SharedDevice:
    """A device whose requests have classes, the highest first, as those of drives in storage/aio.py."""

    def __init__(self, count: int, bound: int):
        """`bound`: pieces of higher classes that are served before one piece of a waiting lower class."""
        self.bound = bound
        self.busy = [Intervals() for _ in range(count)]  # with requests of a class and of higher ones

    def take(self, rank: int, start: float, seconds: float) -> float:
        """Reserves `seconds` for a request of class `rank` from `start` on; returns its end.

        Lower classes are delayed, except for their minimum share.
        """
        first = last = self.busy[rank].take(start, seconds)
        waiting = 0
        for lower in self.busy[rank + 1 :]:
            end = lower.take(start, seconds)
            waiting += last < end
            last = end
        end = min(last, start + (first - start) * (1 + waiting / self.bound))
        return min(end, start + (1 + self.bound) * seconds) if rank else end


# ---------------------------------------------------------------- slow-down


def _slowness(halves: Sequence[Sequence[SimulatedTask]], rates: Rates, queues: Iterable[str]) -> list[dict[str, float]]:
    """For each pass, the factor by which other queues slow down each queue."""
    moved = [dict.fromkeys(queues, 0.0) for _ in halves]
    for half, tasks in zip(moved, halves, strict=True):
        for task in tasks:
            half[task.queue] += task.nbytes
    read, written = (sum(half[queue] for half in moved for queue in direction) for direction in (READS, WRITES))
    alone = drive_seconds(read, written, replace(rates, mixed=1.0)) or 1.0
    drives = dict.fromkeys(DRIVE, drive_seconds(read, written, rates) / alone or 1.0)
    return [dict.fromkeys(half, 1.0) | _sharing(half, rates) | drives for half in moved]


def drive_seconds(read: float, written: float, rates: Rates) -> float:
    """Seconds of the drives to read and write so many bytes; reads and writes at once have the mixed rate."""
    if not (read or written):
        return 0.0
    up, down = read / rates.ssd_read, written / rates.ssd_write
    return up + down + 2 * min(up, down) * (1 / rates.mixed - 1)


def _sharing(moved: dict[str, float], rates: Rates) -> dict[str, float]:
    """The factor by which the queues of PCIe and of the CPU are slowed down; `moved`: bytes of each queue in a pass.

    On PCIe, outputs of layers and sums of gradients have priority. Each GPU is assumed to receive as many bytes of
    outputs by peer copies as it sends; copies of tensors saved in peers have lower priority.
    """
    copied = sum(moved[queue] for queue in moved if is_copy(queue))
    alone = moved["cpu"] / (ADAM_BYTES * rates.adam)  # seconds of updates
    crowd = 1 + max(0.0, copied / alone - rates.spare) / rates.dram if alone else 1.0
    slow, on_bus = {"cpu": crowd}, rates.peer <= OWN_LINK * rates.d2h
    for gpu in {gpu_of(queue) for queue in moved}:
        buses = {bus: [queue for queue in BUS if BUS[queue] == bus] for bus in ("h2d", "d2h")}
        amount = lambda queues, gpu=gpu: sum(moved.get(numbered(queue, gpu), 0.0) for queue in queues)
        first = {bus: amount(queue for queue in queues if queue not in STREAMED) for bus, queues in buses.items()}
        hops, *swaps = (amount((queue,)) for queue in PEERS)  # out, in
        if on_bus:
            first = {bus: first[bus] + hops + swap for bus, swap in zip(("d2h", "h2d"), swaps, strict=True)}
        for queue, swap in zip(PEERS[1:], swaps, strict=True):
            slow[numbered(queue, gpu)] = 1 + hops / swap if swap else 1.0
        turns = {bus: amount((bus, *(queue for queue in queues if queue in STREAMED))) for bus, queues in buses.items()}
        total = {bus: turns[bus] + first[bus] for bus in buses}
        lost = dict.fromkeys(buses, (1 / rates.duplex - 1) * min(total.values()))
        lost["h2d"] += (1 / rates.reading - 1) * min(total["h2d"], alone * rates.h2d)
        for bus, queues in buses.items():
            slower = 1 + (lost[bus] + first[bus]) / turns[bus] if turns[bus] else 1.0
            slow |= {numbered(queue, gpu): slower for queue in (bus, *queues) if queue == bus or queue in STREAMED}
    return slow
