"""Gradients, from the moment backward has made a unit's until an update consumes it; they never touch the SSD.

A unit's gradient is summed over the micro-batches on the GPU, in fp32 where there are several. It leaves the GPU once a
step, in the compute dtype, for a host slot, unless it is updated there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.engine.homes import Homes
from trireme.engine.lanes import Task
from trireme.engine.memory import Slot, flat, views
from trireme.engine.plan import Geometry, Plan
from trireme.kernels import ops


class Gradients:
    """Owns accumulators, and what waits for its update: `landed`."""

    def __init__(self, geo: Geometry, plan: Plan, homes: Homes, lanes):
        self.geo, self.plan, self.homes, self.lanes = geo, plan, homes, lanes
        self.wide = geo.gradients if plan.n_micro > 1 else geo.weights  # layout of the accumulators
        self.accumulators = homes.rings("gpu", "gradient")
        self.outs = homes.rings("gpu", "gradient out")  # rounded, on their way
        self.landings = homes.rings("host", "gradient")
        self.holding: dict[int, Slot] = {}  # accumulators in use
        self.landed: dict[int, tuple[Slot | None, Task]] = {}  # by unit: its slot in RAM, and when it is there
        self.sums = None if lanes.simulated else torch.zeros(geo.n_units, dtype=torch.float32, device=lanes.device)

    def get(self, u: int) -> tuple[dict[str, Tensor], Task]:
        """The zeroed gradient of unit u by tensor name, to be added to, and the task that zeroes it."""
        if u not in self.holding:
            slot = self.accumulators[self.geo.size_class(u)].acquire(self.geo.names[u])
            nbytes = self.wide[u].span
            task = self.lanes.run(
                "compute", f"zero {self.geo.names[u]}", lambda: slot.buffer[:nbytes].zero_(), slot.ready, nbytes=nbytes
            )
            self.holding[u] = slot
            slot.ready = (task,)
        slot = self.holding[u]
        return {} if self.lanes.simulated else views(self.wide[u], slot.buffer), slot.ready[0]

    def finish(self, u: int, after: Task) -> None:
        """Unit u's gradient is complete: takes its norm, rounds it, and sends it to where its update runs."""
        accumulator, kind = self.holding.pop(u), self.geo.size_class(u)
        name, n, nbytes = self.geo.names[u], self.geo.numel[u], self.geo.weights[u].span
        on_gpu = self.plan.units[u].state == "gpu"
        out_slot = None if on_gpu else self.outs[kind].acquire(name)
        out = self.homes.gradients[u] if on_gpu else out_slot.buffer

        def finish():
            wide = flat(accumulator.buffer, self.wide[u].tensors[0].dtype, n)
            self.sums[u] = ops.grad_finish(wide, out=flat(out, self.geo.dtype, n))[0]

        before = (after, *(out_slot.ready if out_slot else ()))
        task = self.lanes.run("compute", f"finish {name}", finish, before, nbytes=3 * nbytes)
        accumulator.ring.release(accumulator, (task,))
        if on_gpu:
            self.landed[u] = (None, task)
            return
        host = self.landings[kind].acquire(name)

        def land():
            host.buffer[:nbytes].copy_(out[:nbytes], non_blocking=True)

        landed = self.lanes.run("d2h", f"gradient {name}", land, (task, *host.ready), nbytes=nbytes)
        out_slot.ring.release(out_slot, (landed,))
        self.landed[u] = (host, landed)

    def norm(self) -> Tensor:
        """The global norm of all gradients of a step, fp64 on the device."""
        return self.sums.double().sum().sqrt()

    def discard(self) -> None:
        """Drops the gradients that wait for their update: the step is skipped, and nothing of it is applied."""
        for slot, task in self.landed.values():
            if slot is not None:
                slot.ring.release(slot, (task,))
        self.landed.clear()
