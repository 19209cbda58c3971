"""When units are updated: AdamW with state outside the GPU, overlapped with its computation (Fuyou, section 4.3).

Mode `forward`: a unit is updated when the gradient norm is known, ahead of its next forward; clipping is exact. With
`late_moments` an update has two parts with bitwise the results of one. The weights are updated during forward: state in
RAM has 18 of 26 bytes a parameter read and written then; on the SSD 10 are read and 2 written, instead of 10 and 10.
The moments are updated during the next backward from the same gradient (18 in RAM; 8 and 8 on the SSD). For updates
streamed through the GPU the first part moves 14 bytes to the GPU and 4 back, and the CPU updates the moments.

Mode `backward`: a unit is updated when its gradient is complete, during the rest of backward; without clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from trireme.engine.gradients import Gradients
from trireme.engine.placement import Placement
from trireme.engine.queues.names import numbered
from trireme.engine.queues.task import Task
from trireme.engine.updates import AdamW, CpuUpdates, Kernels, StreamedUpdates
from trireme.engine.weights import WeightStream

LAST_RATE = 1e-7  # of the schedule "polynomial"
DECAYED = 0.1  # share of the run in which the rate of "wsd" falls to 0
MOMENTS_AHEAD = 2  # units from late moments to the gradient that replaces theirs


@dataclass(frozen=True)
class StepStats:
    """The mean loss of a label and the gradient norm; `metrics` by name."""

    loss: float
    grad_norm: float
    metrics: dict[str, float] = field(default_factory=dict)  # of a comparison


class Optimizer:
    """Hands gradients over to updates at the plan's time."""

    def __init__(self, placement: Placement, weights: WeightStream, gradients: Gradients, adamw: AdamW):
        self.geo, self.plan, self.queues = placement.geo, placement.plan, placement.queues
        self.weights, self.gradients = weights, gradients
        self.kernels = Kernels(placement, adamw)
        self.on_cpu = CpuUpdates(self.kernels, weights, gradients)
        self.streamed = StreamedUpdates(self.kernels, weights, self.on_cpu)
        self.early = [u for u, unit in enumerate(self.plan.units) if unit.weights != "gpu" and unit.update == "cpu"]
        self.head_gpu = self.plan.units[self.geo.head].gpu  # has the statistics
        if not self.queues.simulated:
            self.stats = torch.zeros(3, dtype=torch.float64, device=self.queues.devices[self.head_gpu])

    # ------------------------------------------------ a step

    def begin(self, step: int, lr: float) -> None:
        """Begins a step: sets its number (from 1) and learning rate for updates. The first late moments of the step
        before are queued.
        """
        assert not self.gradients.landed, "the last step's gradients are not consumed"
        self.on_cpu.update_moments(self.geo.head - MOMENTS_AHEAD)
        self.kernels.step, self.kernels.lr = step, lr

    def finish(self, u: int) -> None:
        """Ends unit u's gradient sum; in mode `backward` also queues its update."""
        self.on_cpu.update_moments(u - 1 - MOMENTS_AHEAD)
        self.gradients.finish(u)
        if self.plan.mode == "backward":
            self.update(u)
            self.weights.layers[u].trained.settle()  # its next forward is far off

    def conclude(self, losses: list[Tensor], trained: float) -> StepStats:
        """Waits for backward and returns the step's statistics; sets the clip factor for the updates. `trained`:
        labels.
        """
        kernels, limit, clips = self.kernels, self.kernels.adamw.max_grad_norm, self.plan.mode == "forward"
        other_gpus = [gpu for gpu in range(self.plan.gpus) if gpu != self.head_gpu]
        to_ram = lambda gpu: self.gradients.sums[gpu].to("cpu")
        sums = [self._on(gpu, "sums of squares", partial(to_ram, gpu)) for gpu in other_gpus]

        def add(start: Tensor) -> Tensor:
            return sum((part.double().sum().to(start.device) for part in losses), start)

        def conclude() -> Tensor:
            loss, norm = self.gradients.totals(add, self.head_gpu, [task.wait() for task in sums])
            self.stats[0] = loss / trained
            self.stats[1] = norm
            self.stats[2] = torch.clamp(limit / (norm + 1e-6), max=1.0) if limit else 1.0
            if clips:
                kernels.clip[self.head_gpu].copy_(self.stats[2:])
            return self.stats.to("cpu")

        task = self.queues.run(numbered("compute", self.head_gpu), "statistics", "", conclude, sums)
        if clips:
            fill = lambda gpu: kernels.clip[gpu].fill_(float(task.wait()[2]))
            kernels.clipped = (task, *(self._on(gpu, "clip", partial(fill, gpu), (task,)) for gpu in other_gpus))
        if self.queues.simulated:
            return StepStats(0.0, 0.0)
        loss, norm, factor = task.wait().tolist()
        if clips:
            kernels.clip_in_ram = torch.tensor([factor])
        return StepStats(loss, norm)

    def _on(self, gpu: int, label: str, fn: Callable[[], object], after: Sequence[Task] = ()) -> Task:
        return self.queues.run(numbered("compute", gpu), "other", label, fn, after)

    # ------------------------------------------------ updates

    def update(self, u: int) -> None:
        """Queues unit u's update, if there is a gradient."""
        if u not in self.gradients.landed:
            return
        unit, gradient = self.plan.units[u], self.gradients.landed.pop(u)
        if unit.state == "gpu":
            self.weights.layers[u].trained.updated_on_gpu(self.kernels.update(u, gradient))
        else:
            (self.streamed if unit.update == "gpu" else self.on_cpu).update(u, gradient)

    def update_before_forward(self, u: int) -> None:
        """Queues unit u's update, if there is a gradient, and updates that can run early."""
        self.run_ahead()
        self.update(u)
        self.run_ahead()

    def run_ahead(self) -> None:
        """Queues updates on the CPU in forward order, up to the first whose weights need a staging buffer."""
        for u in self.early:
            if u in self.gradients.landed:
                if self.plan.units[u].weights == "ssd":
                    return
                self.update(u)

    def read_ahead(self) -> None:
        """Starts reading the state of the next updates from the SSD."""
        self.on_cpu.read_ahead()

    def flush(self) -> None:
        """Queues all updates that have a gradient, in forward order, and all late moments."""
        for u in range(self.geo.n_units):
            landed, trained = u in self.gradients.landed, self.weights.layers[u].trained
            self.update(u)
            trained.settle()  # also of an update before a pass that was broken off
            if landed and self.plan.units[u].update == "gpu":  # they came for it alone
                trained.release(())
        self.on_cpu.update_moments(0)

    def close(self) -> None:
        self.kernels.close()


def learning_rate(step: int, total: int, peak: float, schedule: str, warmup: int) -> float:
    """The learning rate of `step` (from 1) of `total`: linear from 0 over `warmup` steps, then by `schedule`.

    constant; cosine to 10 % of the peak at step total, if it is not the only one; linear to 0 at step total + 1;
    polynomial (power 1, to LAST_RATE) and wsd (constant, then falling over the last DECAYED of the run), both as in
    transformers.
    """
    if step <= warmup:
        return peak * step / warmup
    remaining = max(1, total - warmup)
    if schedule == "cosine":
        if total == 1:
            return peak
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / remaining))))
    elapsed = (step - warmup - 1) / remaining
    if schedule == "linear":
        return peak * max(0.0, 1 - elapsed)
    if schedule == "polynomial":
        return LAST_RATE + (peak - LAST_RATE) * max(0.0, 1 - elapsed)
    decay = max(1, round(DECAYED * total))
    if schedule == "wsd" and step > total - decay:
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 1 - total + decay) / decay)))
    return peak  # constant, constant_with_warmup
