"""How a unit is updated: on its GPU, on the CPU, or streamed through the GPU; the latter two whole or in two parts.

Tasks keep the hyper-parameters of their step, since the next step may begin before they run. State in RAM may be
streamed through the GPU, because PCIe and RAM together are faster than either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from trireme.engine.geometry import GPU_BYTES, PART_BYTES, Part
from trireme.engine.gradients import Gradients
from trireme.engine.home import Home
from trireme.engine.memory import NOTHING, Buffer, flat, views
from trireme.engine.placement import Entry, Placement
from trireme.engine.queues.cgroups import update_threads
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Kind, Task
from trireme.engine.weights import WeightStream
from trireme.kernels import ops
from trireme.kernels.optimizer.host_adamw import Workers
from trireme.storage.layout import ITEMSIZE

KIND: dict[Part, Kind] = {"all": "adamw", "weights": "adamw weights", "moments": "adamw moments"}

Kernel = Callable[[Tensor, Mapping[str, Tensor], Tensor], None]  # (weights, state by name, gradient), flat


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters. `max_grad_norm` 0: no clipping."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


class Kernels:
    """AdamW kernels with the hyper-parameters of the current step, and the factor of its gradients."""

    def __init__(self, placement: Placement, adamw: AdamW):
        self.placement, self.adamw = placement, adamw
        self.geo, self.plan, self.queues = placement.geo, placement.plan, placement.queues
        self.on_cuda = self.queues.device.type == "cuda"
        self.step, self.lr = 0, 0.0
        idle = self.queues.simulated or not self.geo.cfg.trains
        self.workers = None if idle else Workers(update_threads(self.plan.gpus))
        self.parts: dict[int, list[tuple[Tensor, dict[str, Tensor]]]] = {}  # by unit: weights and state of each record
        self.clipped: tuple[Task, ...] = ()  # set the factor; clipped updates come after
        if not self.queues.simulated:  # 1 until a norm is known
            self.clip = [torch.ones(1, device=device) for device in self.queues.devices]  # fp32
            self.clip_in_ram = torch.ones(1)  # replaced, since earlier updates may still read it

    def bind(self, u: int, a: int, b: int, on_gpu: bool = False, part: Part = "all") -> Kernel:
        """A function that updates elements [a, b) of unit u, or a `part` of their state, with this step's
        hyper-parameters.
        """
        self.placement.updates += 1
        h = self.adamw
        hyper = dict(lr=self.lr, beta1=h.beta1, beta2=h.beta2, eps=h.eps, weight_decay=h.weight_decay, step=self.step)
        hyper["n_decay"] = min(max(self.geo.n_decay[u] - a, 0), b - a)
        if self.plan.adam_bits < 32:
            hyper |= dict(seed=u, first=a)
        options = {} if part == "all" else {"part": part}
        on_cuda = on_gpu and self.on_cuda
        if self.workers is None:
            return lambda *_: None  # of a simulation
        kernel: Callable[..., None] = ops.adamw_ if on_cuda else self.workers.adamw_
        clip = self.clip[self.plan.units[u].gpu] if on_cuda else self.clip_in_ram

        def adamw(w: Tensor, state: Mapping[str, Tensor], grad: Tensor) -> None:
            moments = [state[name] for name in ("m", "m_floor", "v", "v_floor") if name in state]
            kernel(w, state.get("lo"), *moments, grad, clip, **hyper, **options)

        return adamw

    def update(self, u: int, gradient: Home) -> Task:
        """Queues the update of a unit whose state is on its GPU, in the compute queue."""
        ranges, landed = self.geo.records(u, self.plan.record), gradient.place.tensor
        updates = [self.bind(u, a, b, on_gpu=True) for a, b in ranges]

        def update() -> None:
            grad = flat(landed, self.geo.dtype, self.geo.numel[u])
            for (a, b), adamw, (weights, state) in zip(ranges, updates, self._records(u), strict=True):
                adamw(weights, state, grad[a:b])

        nbytes, queue = GPU_BYTES * self.geo.numel[u], numbered("compute", self.plan.units[u].gpu)
        return self.queues.run(queue, "adamw", self.geo.names[u], update, gradient.ready, nbytes=nbytes)

    def _records(self, u: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Views of each record, made once: with several GPUs making them takes longer than launching the kernel."""
        if u not in self.parts:
            weights = flat(self.placement.weights[u], self.geo.dtype, self.geo.numel[u])
            parts = zip(self.geo.records(u, self.plan.record), self.placement.state[u], strict=True)
            self.parts[u] = [(weights[a:b], views(self.geo.state_layout(b - a), state)) for (a, b), state in parts]
        return self.parts[u]

    def close(self) -> None:
        self.parts.clear()  # views of memory that is freed next
        if self.workers is not None:
            self.workers.close()


# ---------------------------------------------------------------- on the CPU


class CpuWork:
    """The update of one unit on the CPU, or one of its two parts."""

    def __init__(self, kernels: Kernels, u: int, gradient: Home, part: Part, hi: Tensor = NOTHING):
        """`hi`: the weights in RAM. The part "moments" does not need them."""
        self.kernels, self.geo, self.u, self.gradient, self.part, self.hi = kernels, kernels.geo, u, gradient, part, hi
        self.ranges = self.geo.records(u, kernels.plan.record)
        self.updates = [kernels.bind(u, a, b, part=part) for a, b in self.ranges]

    def update_unit(self, states: Sequence[Tensor], after: Sequence[Task]) -> Task:
        """Queues the update of all records, whose `states` are in RAM."""
        return self._run(self.geo.names[self.u], dict(enumerate(states)), after)

    def update_record(self, r: int, state: Tensor, after: Sequence[Task]) -> Task:
        """Queues the update of record r."""
        return self._run(f"{self.geo.names[self.u]} {r}", {r: state}, after)

    def _run(self, label: str, states: Mapping[int, Tensor], after: Sequence[Task]) -> Task:
        first = self.geo.share(self.u, self.kernels.plan.record).start  # of the gradient that is here
        bytes_of = lambda r: (ITEMSIZE[self.geo.dtype] * (i - first) for i in self.ranges[r])
        grads = {r: self.gradient.part(*bytes_of(r)) for r in states}

        def update() -> None:
            assert self.kernels.workers is not None, "simulated work is never run"
            with self.kernels.workers.together():
                for r, (grad, _) in grads.items():
                    self._update(r, states[r], grad)

        nbytes = PART_BYTES[self.part] * sum(b - a for a, b in (self.ranges[r] for r in states))
        buffers = [buffer for _, buffer in grads.values() if buffer]
        dependencies = (*after, *self.gradient.ready, *(task for buffer in buffers for task in buffer.ready))
        task = self.kernels.queues.run("cpu", KIND[self.part], label, update, dependencies, nbytes=nbytes)
        for buffer in buffers:
            buffer.free((task,))
        return task

    def _update(self, r: int, state: Tensor, gradient: Tensor) -> None:
        (a, b), dtype = self.ranges[r], self.geo.dtype
        grad = flat(gradient, dtype, b - a)
        hi = grad if self.part == "moments" else flat(self.hi, dtype, b)[a:]  # moments read no weights
        self.updates[r](hi, views(self.geo.state_layout(b - a), state), grad)


class CpuUpdates:
    """Updates on the CPU. With late moments `update` queues the update of weights, `update_moments` that of the
    moments. Records stored on the SSD are read ahead while their pool has free buffers.
    """

    def __init__(self, kernels: Kernels, weights: WeightStream, gradients: Gradients):
        self.kernels, self.geo, self.plan = kernels, kernels.geo, kernels.plan
        self.placement, self.weights, self.gradients = kernels.placement, weights, gradients
        self.pool, geo, plan = self.placement.pool("ram", "state pool"), self.geo, self.plan
        units = range(geo.n_units) if plan.mode == "forward" else reversed(range(geo.n_units))
        keys = [(u, r) for u in units if plan.units[u].state == "ssd" for r in range(len(geo.records(u, plan.record)))]
        homes = {(u, r): self.placement.home(Entry("state", u, r), self.pool) for u, r in keys}
        self.homes, self.next = homes, cycle(homes)  # in the order of updates
        self.readable = len(keys)  # records to read; late moments must be written first
        self.ahead: deque[tuple[Home, Buffer]] = deque()
        self.deferred: dict[int, tuple[CpuWork, Sequence[Task]]] = {}  # moments that are due, and what they come after
        self.written: dict[int, tuple[Task, ...]] = {}  # the last late moments of a layer with state in RAM

    def update(self, u: int, gradient: Home) -> None:
        """Queues unit u's update."""
        unit, weights = self.plan.units[u], self.weights.layers[u].trained
        buffer, late = weights.home.bring(), unit.state in self.plan.late_moments
        after = (*buffer.ready, *self.kernels.clipped)
        work = CpuWork(self.kernels, u, gradient, "weights" if late else "all", buffer.tensor)
        if unit.state == "ssd" and work.ranges:
            for r in range(len(work.ranges)):  # first in, first out: the last record ends last
                task = self._record(work, r, after, late)
        else:
            task = work.update_unit(self.placement.state[u], after)
        current = self.gradients.share_weights(u, buffer.tensor, task)
        if late:
            self.defer_moments(u, gradient, (task,))
        else:
            gradient.free((task,))
        weights.updated_in_ram(buffer, current)

    def defer_moments(self, u: int, gradient: Home, after: Sequence[Task]) -> None:
        """Keeps the update of unit u's moments for `moments`. It comes after `after`, the update of its weights."""
        self.deferred[u] = CpuWork(self.kernels, u, gradient, "moments"), after

    def _record(self, work: CpuWork, r: int, after: Sequence[Task], late: bool) -> Task:
        """Queues the update of a record on the SSD; with late moments only its low halves are written."""
        if not self.ahead:
            self._read_next()
        home, buffer = self.ahead.popleft()
        assert home is self.homes[work.u, r], "optimizer records are read in the order of their updates"
        task = work.update_record(r, buffer.tensor, (*after, *buffer.ready))
        if not late:
            home.keep(buffer, (task,))
            self.readable += 1
        elif self.geo.dtype == "BF16":
            home.keep(buffer, (task,), part=("low",))
        else:  # F32: the weights are the master, the record is unchanged
            buffer.free((task,))
        self.read_ahead()
        return task

    def read_ahead(self) -> None:
        """Starts reads of records in the order of the updates, as far as there are buffers."""
        while self.readable and self.pool.is_free and len(self.ahead) < len(self.homes):
            self._read_next()

    def _read_next(self) -> None:
        home = self.homes[next(self.next)]
        self.ahead.append((home, home.bring()))
        self.readable -= 1

    def update_moments(self, first: int) -> None:
        """Queues late updates of moments, from the last unit down to unit `first`."""
        for u in sorted((u for u in self.deferred if u >= first), reverse=True):
            work, after = self.deferred.pop(u)
            if self.plan.units[work.u].state == "ssd" and work.ranges:
                for r in range(len(work.ranges)):
                    home = self.homes[work.u, r]
                    buffer = home.bring(part=("moments",))
                    task = work.update_record(r, buffer.tensor, (*after, *buffer.ready))
                    home.keep(buffer, (task,), part=("moments",))
                self.readable += len(work.ranges)
            else:
                task = work.update_unit(self.placement.state[work.u], after)
                self.written[work.u] = (task,)
            work.gradient.free((task,))


# ---------------------------------------------------------------- streamed through the GPU


class StreamedUpdates:
    """Updates on the GPU of state in RAM, record by record, when a unit's weights are copied to the GPU for forward.

    They have queues of their own, while the CPU updates other units. Late moments are updated on the CPU.
    """

    def __init__(self, kernels: Kernels, weights: WeightStream, on_cpu: CpuUpdates):
        self.kernels, self.geo, self.plan, self.queues = kernels, kernels.geo, kernels.plan, kernels.queues
        self.placement, self.weights, self.on_cpu = kernels.placement, weights, on_cpu
        self.pools = self.placement.gpu_pools("state pool")
        self.written: dict[tuple[int, int], tuple[Task, ...]] = {}
        self.part: Part = "weights" if "gpu" in self.plan.late_moments else "all"

    def update(self, u: int, gradient: Home) -> None:
        """Queues unit u's update."""
        weights, copies = self.weights.layers[u].trained, []
        buffer = weights.get()
        users = (*weights.ready, *weights.home.last)  # the copy of the last update reads them, too
        for r, (a, b) in enumerate(self.geo.records(u, self.plan.record)):
            copy, task = self._record(u, r, flat(buffer.tensor, self.geo.dtype, b)[a:], users, gradient)
            copies.append(copy)
        if self.part == "weights":
            self.on_cpu.defer_moments(u, gradient, copies)
        else:
            gradient.free(copies)
        weights.updated_on_gpu(task)

    def _record(self, u: int, r: int, hi: Tensor, users: Sequence[Task], gradient: Home) -> tuple[Task, Task]:
        """Queues the update of a record: copy to the GPU, update, copy back. Returns the first two tasks.

        `hi`: its weights on the GPU, which may be written after `users`.
        """
        a, b = self.geo.records(u, self.plan.record)[r]
        dtype, layout, stored = self.geo.dtype, self.geo.state_layout(b - a), self.placement.state[u][r]
        label, gpu = f"{self.geo.names[u]} {r}", self.plan.units[u].gpu
        adamw, buffer = self.kernels.bind(u, a, b, on_gpu=True, part=self.part), self.pools[gpu].acquire(label)
        landed, _ = gradient.part(ITEMSIZE[dtype] * a, ITEMSIZE[dtype] * b)

        def up() -> None:
            buffer.tensor[: layout.span].copy_(stored, non_blocking=True)
            grad = flat(buffer.tensor[layout.span :], dtype, b - a)
            grad.copy_(flat(landed, dtype, b - a), non_blocking=True)

        def run() -> None:
            grad = flat(buffer.tensor[layout.span :], dtype, b - a)
            adamw(hi, views(layout, buffer.tensor), grad)

        last = (*self.written.get((u, r), ()), *self.on_cpu.written.get(u, ()))
        after = (*buffer.ready, *gradient.ready, *self.kernels.clipped, *last)
        nbytes = layout.span + ITEMSIZE[dtype] * (b - a)
        copy = self.queues.run(numbered("update_in", gpu), "state", label, up, after, nbytes=nbytes)
        task = self.queues.run(numbered("update", gpu), "adamw", label, run, (copy, *users), nbytes=GPU_BYTES * (b - a))
        buffer.free((self._copy_back(u, r, buffer.tensor, task),))
        return copy, task

    def _copy_back(self, u: int, r: int, updated: Tensor, task: Task) -> Task:
        """Queues the copy of what changed to RAM; before late moments these are the low halves. Returns the last task
        on the buffer.
        """
        (a, b), stored = self.geo.records(u, self.plan.record)[r], self.placement.state[u][r]
        first, layout = 0, self.geo.state_layout(b - a)
        if self.part == "weights":
            if self.geo.dtype == "F32":  # the weights are the master, the record is unchanged
                return task
            first, layout = self.geo.state_parts(b - a)["low"]
        changed = slice(first, first + layout.span)

        def down() -> None:
            stored[changed].copy_(updated[changed], non_blocking=True)

        queue, label = numbered("update_out", self.plan.units[u].gpu), f"{self.geo.names[u]} {r}"
        copy = self.queues.run(queue, "state", label, down, (task,), nbytes=layout.span)
        self.written[u, r] = (copy,)
        return copy
