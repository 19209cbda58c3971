"""Out-of-core AdamW, hidden under the GPU's work (Fuyou, section 4.3), with exact global-norm clipping.

An update runs on the CPU, from a gradient that waits in RAM, record by record: read i+1, update i, write i-1 follow
from three lanes that each work first in, first out. Units whose state is on the GPU are updated there; so are some
whose state is in RAM, streamed there and back, since PCIe and the CPU's memory together are faster than either. When:

- `forward`: all updates wait until backward has ended and the global norm is known; each runs just ahead of its unit's
  next forward. Clipping is exact, and nothing is serial. But forward is a quarter of a step, and in it the updates of
  few tokens take longer, by the bandwidth of the RAM or of the SSD. So an update may be cut in two (`late_moments`):
  under forward the new weights alone are written (of 26 bytes of RAM a parameter 18 are moved; of 10 bytes each way on
  the SSD 10 and 2), and the moments follow under backward, computed once more from the same gradient (18; 8 and 8)
  before the next one lands in its place. The bits are those of one update.
- `backward`: a unit is updated as soon as its gradient lands, under the rest of backward. No clipping is possible.
- `serial`: all updates after backward, each read, update and write in turn; the baseline.

In every mode each forward uses weights that hold the update of the step before: nothing is ever stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trireme.engine.geometry import PARTS, Geometry
from trireme.engine.gradients import Gradients
from trireme.engine.homes import Homes
from trireme.engine.lanes import Task
from trireme.engine.memory import Slot, flat, views
from trireme.engine.plan import Plan
from trireme.engine.weights import WeightStream
from trireme.kernels import ops
from trireme.kernels.host_adamw import Workers
from trireme.storage.layout import ITEMSIZE

# What a task on the CPU stores: its name, and bytes of RAM a parameter, scaled so that "all" is that of a rate. The
# parts as they were measured on a Xeon: 9.9 and 9.1 G parameters/s beside 7.1 in one.

MOMENTS_AHEAD = 2  # units by which late moments are handed over before the gradient that takes the place of theirs


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters of the update. `max_grad_norm` 0 means no clipping."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class StepStats:
    """What is known when backward has ended: mean loss per trained token, gradient norm, clip factor."""

    loss: float
    grad_norm: float
    clip: float


class Optimizer:
    """Brings each unit's update and its turn together: when it may run, where, and what travels for it."""

    def __init__(
        self, geo: Geometry, plan: Plan, homes: Homes, weights: WeightStream, gradients: Gradients, lanes, adamw: AdamW
    ):
        self.geo, self.plan, self.homes, self.weights, self.gradients = geo, plan, homes, weights, gradients
        self.lanes, self.device, self.adamw = lanes, lanes.device, adamw
        self.state_ring, self.stream_ring = homes.ring("host", "state ring"), homes.ring("gpu", "stream ring")
        self.step, self.lr = 0, 0.0
        self.written: dict[tuple[int, int], Task] = {}  # last write of each SSD-home record
        self.ahead: deque[tuple[int, int, Slot, Task]] = deque()  # records read before they are asked for
        order = range(geo.n_units) if plan.mode != "backward" else reversed(range(geo.n_units))
        self.record_order = [
            (u, r) for u in order if plan.units[u].state == "ssd" for r in range(len(geo.records(u, plan.record)))
        ]
        self.late: list[tuple[int, Slot, Callable, Task]] = []  # moments that are due: unit, gradient, work, weights
        self.norm_known: tuple[Task, ...] = ()  # what updates wait for where they are clipped
        self.cursor = 0  # next of record_order to be read ahead
        self.readable = len(self.record_order)  # how many may be read by now: what has late moments, when they are due
        self.stats = self.clip = self.clip_host = None
        if not lanes.simulated:
            self.stats = torch.zeros(3, dtype=torch.float64, device=self.device)
            self.clip = torch.ones(1, dtype=torch.float32, device=self.device)
            self.clip_host = torch.ones(1, dtype=torch.float32)
        self.workers = None if lanes.simulated else Workers()

    # ------------------------------------------------ a step

    def begin(self, step: int, lr: float) -> None:
        """Opens the backward of step `step` (from 1) with its learning rate; what it updates uses these."""
        assert not self.gradients.landed, "the last step's gradients are not consumed"
        self._update_moments(self.geo.head - MOMENTS_AHEAD)
        self.step, self.lr = step, lr

    def finish(self, u: int, after: Task) -> None:
        """Unit u's gradient is complete: sends it on its way; in mode `backward` its update follows."""
        self._update_moments(u - 1 - MOMENTS_AHEAD)
        self.gradients.finish(u, after)
        if self.plan.mode == "backward":
            self.update(u)
            self.weights.settle()  # its next forward is far off

    def conclude(self, losses: list[Tensor], trained: int) -> StepStats:
        """Waits for the end of backward and returns its statistics; sets the clip factor that the updates use."""
        limit = self.adamw.max_grad_norm

        def conclude():
            norm = self.gradients.norm()
            self.stats[0] = sum(part.double().sum() for part in losses) / trained
            self.stats[1] = norm
            self.stats[2] = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else 1.0
            if self.plan.mode != "backward":
                self.clip.copy_(self.stats[2:])
            return self.stats.to("cpu")

        task = self.lanes.run("compute", "statistics", conclude)
        if self.plan.mode != "backward":
            self.norm_known = (task,)
        if self.lanes.simulated:
            return StepStats(0.0, 0.0, 1.0)
        loss, norm, clip = task.wait().tolist()
        if self.plan.mode != "backward":
            self.clip_host = torch.tensor([clip], dtype=torch.float32)  # the last one may still be in use
        return StepStats(loss, norm, clip)

    # ------------------------------------------------ updates

    def update(self, u: int) -> None:
        """Hands over unit u's update, if one is due, and publishes its new weights."""
        if u not in self.gradients.landed:
            return
        slot, landed = self.gradients.landed.pop(u)
        if self.plan.units[u].state == "gpu":
            self._update_on_gpu(u, landed)
            return
        if self.plan.units[u].update == "gpu":
            self._update_streamed(u, slot, landed)
            return
        hi, hi_slot, come = self._weights_for_update(u)
        come = (*come, landed, *self.norm_known)
        late = self.plan.units[u].state in self.plan.late_moments
        work = self._on_cpu(u, hi, slot, "weights" if late else "all")
        if self.plan.units[u].state == "ssd":
            done = [self._update_record(u, r, work, come, late) for r in range(len(self.homes.state[u]))]
            final = done[-1]  # one lane, first in first out: the last record's update comes after the others
        else:
            final = work(come)
        if late:
            # The moments leave the weights alone, whatever stands in their place: those of the SSD have gone by then.
            stand_in = slot.buffer if slot else hi
            self.late.append((u, slot, self._on_cpu(u, stand_in, slot, "moments"), final))
        elif slot:
            slot.ring.release(slot, (final,))
        if hi_slot is None:
            self.weights.publish(u, final)
        else:
            written = self.homes.write_weights(u, hi, (final,))
            self.weights.publish(u, final, hi_slot, written)

    def begin_updates(self) -> None:
        """What a forward begins with. In mode `serial` all updates run here, one after another, and the step waits."""
        if self.plan.mode == "serial":
            self.flush()
            self.lanes.drain()
        self.run_ahead()

    def run_ahead(self) -> None:
        """Hands over, in forward order, the updates on the CPU that need no slot of the weights' rings.

        The CPU and the SSD then run as far ahead of the GPU as they can. Weights whose home is the SSD pass through a
        host slot on their way, so what lies behind such a unit waits for its turn.
        """
        for u, unit in enumerate(self.plan.units):
            if u in self.gradients.landed and unit.weights == "ssd":
                return
            if unit.weights == "host" and unit.update == "cpu":
                self.update(u)

    def flush(self) -> None:
        """Updates every unit that has an update due, in forward order."""
        for u in range(self.geo.n_units):
            self.update(u)
            self.weights.settle()
            if self.plan.units[u].update == "gpu" and u in self.weights.held:
                self.weights.drop(u)
        self._update_moments(0)

    def _update_moments(self, first: int) -> None:
        """Hands over the moments that are due, the last unit's first, down to unit `first`: as backward comes by."""
        while self.late and self.late[-1][0] >= first:
            u, slot, work, weights = self.late.pop()
            if self.plan.units[u].state == "ssd":
                done = [self._moments_record(u, r, work, weights) for r in range(len(self.homes.state[u]))]
                self.readable += len(done)
            else:
                done = [work((weights,))]
            if slot:
                slot.ring.release(slot, done[-1:])

    def _moments_record(self, u: int, r: int, work: Callable, weights: Task) -> Task:
        """The moments of one record, once more from the SSD and back."""
        slot = self.state_ring.acquire(f"{self.geo.names[u]} moments {r}")
        read = self.homes.read_state(u, r, slot.buffer, (*slot.ready, *self._written(u, r)), "moments")
        task = self._with_gradient(u, r, work, (weights, read), slot)
        self.written[u, r] = self.homes.write_state(u, r, slot.buffer, (task,), "moments")
        self.state_ring.release(slot, (self.written[u, r],))
        return task

    def read_ahead(self) -> None:
        """Starts reading the next SSD-home records for as long as the ring has free slots."""
        while self.readable and self.state_ring.free and len(self.ahead) < len(self.record_order):
            self._read_next()

    def _read_next(self) -> None:
        u, r = self.record_order[self.cursor]
        self.cursor = (self.cursor + 1) % len(self.record_order)
        self.readable -= 1
        slot = self.state_ring.acquire(f"{self.geo.names[u]} state {r}")
        task = self.homes.read_state(u, r, slot.buffer, (*slot.ready, *self._written(u, r)))
        self.ahead.append((u, r, slot, task))

    def _weights_for_update(self, u: int):
        """(buffer of hi in host memory, its slot where the home is the SSD, tasks to wait for)."""
        before = (self.weights.updated[u],) if u in self.weights.updated else ()
        if self.plan.units[u].weights == "host":
            return self.homes.weights[u], None, before
        slot = self.weights.host_rings[self.geo.size_class(u)].acquire(f"{self.geo.names[u]} update")
        task = self.homes.read_weights(u, slot.buffer, (*slot.ready, *before))
        return slot.buffer, slot, (task,)

    def _with_gradient(self, u: int, r: int, work: Callable, come: tuple[Task, ...], state: Slot) -> Task:
        """Hands over work on one record of unit u, whose gradient is fetched where it waits on the SSD."""
        if not self.plan.spilled(u):
            return work(come, [(r, state.buffer)])
        back, first = self.gradients.fetch(u, *self.geo.records(u, self.plan.record)[r])
        task = work((*come, *back.ready), [(r, state.buffer)], (back, first))
        back.ring.release(back, (task,))
        return task

    def _update_record(self, u: int, r: int, work: Callable, come: tuple[Task, ...], late: bool) -> Task:
        """Updates one record of unit u on the CPU; its state comes from the SSD and goes back: if late, lo alone."""
        if not self.ahead:
            self._read_next()
        got_u, got_r, slot, read = self.ahead.popleft()
        assert (got_u, got_r) == (u, r), "optimizer records are read in the order of their updates"
        last = task = self._with_gradient(u, r, work, (*come, read), slot)
        if not late or self.geo.dtype == "BF16":
            last = self.written[u, r] = self.homes.write_state(u, r, slot.buffer, (task,), *(("low",) if late else ()))
        if not late:
            self.readable += 1
        self.state_ring.release(slot, (last,))
        if self.plan.mode == "serial":
            self.lanes.drain()
        else:
            self.read_ahead()
        return task

    def _on_cpu(self, u: int, hi, grad: Slot | None, part: str) -> Callable:
        """A function that hands over the update of unit u on the CPU, or a part of it, with this step's
        hyper-parameters: of what to wait for, and of numbers and states of records (default all, at home in RAM).
        The gradient is in `grad`, or that of a single record in a slot of its own, from some byte on.
        """
        dtype, ranges = self.geo.dtype, self.geo.records(u, self.plan.record)
        updates = [self._adamw(u, a, b, part=part) for a, b in ranges]

        def hand_over(
            after: tuple[Task, ...],
            records: Sequence[tuple[int, Tensor]] = (),
            alone: tuple[Slot, int] | None = None,
        ) -> Task:
            whole = not records
            records = records or list(enumerate(self.homes.state[u]))

            def update():
                with self.workers.together():
                    for r, state in records:
                        a, b = ranges[r]
                        state = views(self.geo.state_layout(b - a), state)
                        g = (
                            flat(alone[0].buffer[alone[1] :], dtype, b - a)
                            if alone
                            else flat(grad.buffer, dtype, b)[a:]
                        )
                        updates[r](flat(hi, dtype, b)[a:], state, g)

            name, nbytes = PARTS[part]
            name = f"{name} {self.geo.names[u]}" + ("" if whole else f" {records[0][0]}")
            n = sum(b - a for a, b in (ranges[r] for r, _ in records))
            return self.lanes.run("cpu", name, update, after, nbytes=nbytes * n)

        return hand_over

    def _update_on_gpu(self, u: int, landed: Task) -> None:
        hi, grad, states, dtype = self.homes.weights[u], self.homes.gradients[u], self.homes.state[u], self.geo.dtype
        parts = [(a, b, self._adamw(u, a, b, on_gpu=True)) for a, b in self.geo.records(u, self.plan.record)]

        def update():
            for (a, b, adamw), state in zip(parts, states, strict=True):
                layout = self.geo.state_layout(b - a)
                adamw(flat(hi, dtype, b)[a:], views(layout, state), flat(grad, dtype, b)[a:])

        name, nbytes = self.geo.names[u], 26 * self.geo.numel[u]
        task = self.lanes.run("compute", f"adamw {name}", update, (landed,), nbytes=nbytes)
        self.weights.publish(u, task)

    def _update_streamed(self, u: int, landing: Slot, landed: Task) -> None:
        """Updates unit u on the GPU, where its weights are needed next; its state comes from RAM and goes back."""
        held, name, nbytes = self.weights.get(u), self.geo.names[u], self.geo.weights[u].span
        ups = []
        for r, (a, b) in enumerate(self.geo.records(u, self.plan.record)):
            up, done = self._stream_record(u, r, a, b, held, landing, landed)
            ups.append(up)
        landing.ring.release(landing, ups)
        hi = self.homes.weights[u]

        def home():
            hi[:nbytes].copy_(held.buffer[:nbytes], non_blocking=True)

        self.weights.refreshed(u, done, self.lanes.run("d2h", f"weights {name}", home, (done,), nbytes=nbytes))

    def _stream_record(self, u: int, r: int, a: int, b: int, held, landing: Slot, landed: Task) -> tuple[Task, Task]:
        """One record's way to the GPU, its update, and its way back; (when the gradient is read, when w is new)."""
        dtype, layout, home = self.geo.dtype, self.geo.state_layout(b - a), self.homes.state[u][r]
        name, adamw = f"{self.geo.names[u]} {r}", self._adamw(u, a, b, on_gpu=True)
        slot = self.stream_ring.acquire(name)

        def up():
            slot.buffer[: layout.span].copy_(home, non_blocking=True)
            gradient = flat(slot.buffer[layout.span :], dtype, b - a)
            gradient.copy_(flat(landing.buffer, dtype, b)[a:], non_blocking=True)

        def update():
            gradient = flat(slot.buffer[layout.span :], dtype, b - a)
            adamw(flat(held.buffer, dtype, b)[a:], views(layout, slot.buffer), gradient)

        def down():
            home.copy_(slot.buffer[: layout.span], non_blocking=True)

        before = (*slot.ready, landed, *self.norm_known, *self._written(u, r))
        nbytes = layout.span + ITEMSIZE[dtype] * (b - a)
        gone = self.lanes.run("h2d", f"state {name}", up, before, nbytes=nbytes)
        done = self.lanes.run("update", f"adamw {name}", update, (gone, *held.ready), nbytes=26 * (b - a))
        self.written[u, r] = self.lanes.run("d2h", f"state {name}", down, (done,), nbytes=layout.span)
        self.stream_ring.release(slot, (self.written[u, r],))
        return gone, done

    def _written(self, u: int, r: int) -> tuple[Task, ...]:
        return (self.written[u, r],) if (u, r) in self.written else ()

    def _adamw(self, u: int, a: int, b: int, on_gpu: bool = False, part: str = "all"):
        """The update of elements a..b of unit u as a function of (weights, state by name, gradient), all flat.

        It is bound to this step's hyper-parameters; by the time it runs the next step may have begun.
        """
        h = self.adamw
        hyper = dict(lr=self.lr, beta1=h.beta1, beta2=h.beta2, eps=h.eps, weight_decay=h.weight_decay, step=self.step)
        hyper["n_decay"] = min(max(self.geo.n_decay[u] - a, 0), b - a)
        if self.plan.adam_bits < 32:
            hyper |= dict(seed=u, first=a)
        if part != "all":
            hyper["part"] = part
        if on_gpu and self.device.type == "cuda":
            kernel, clip = ops.adamw_, self.clip
        else:
            kernel, clip = {32: "adamw_", 16: "adamw16_", 8: "adamw8_"}[self.plan.adam_bits], self.clip_host
            kernel = getattr(self.workers, kernel, None)  # None in a simulation

        def adamw(w, state, grad):
            moments = [state[name] for name in ("m", "m_floor", "v", "v_floor") if name in state]
            kernel(w, state.get("lo"), *moments, grad, clip, **hyper)

        return adamw

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
