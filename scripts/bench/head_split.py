"""What a step of 8B with 128k words would gain if all GPUs computed the head's micro-batches in turn, simulated.

python scripts/bench/head_split.py [--gpu h100] [--peer 390]

Micro-batch b of the loss runs on GPU b mod N, which needs a copy of the head's weights and of the input. The sum of
gradients, in fp32, goes from GPU to GPU in the order of micro-batches, so that each adds to it as one GPU would: a copy
between GPUs and an addition for each micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from trireme.engine.geometry import Geometry
from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.planner import predict
from trireme.engine.planner.gpus import GPUS
from trireme.engine.planner.rates import Rates, machine
from trireme.engine.planner.simulate import Noted, SimulatedQueues
from trireme.engine.planner.sizes import MODELS
from trireme.engine.queues.names import gpu_of, numbered
from trireme.engine.queues.task import Kind, Task


class Divided(SimulatedQueues):
    """Gives each loss to the next GPU. `nbytes`: of the head's weights, an input, the gradient's sum."""

    nbytes = 0.0, 0.0, 0.0
    turn, last = 0, tuple[Task, ...]()  # losses handed over; the last addition

    def begin(self) -> None:
        super().begin()
        self.turn, self.last = 0, ()

    def run(
        self,
        queue: str,
        kind: Kind,
        of: str,
        fn: Callable[[], Any],
        after: Sequence[Task] = (),
        nbytes: float = 0,
        flops: float = 0,
    ) -> Noted:
        if kind == "finish" and self.last:
            after, self.last = (*after, *self.last), ()
        if kind != "loss":
            return super().run(queue, kind, of, fn, after, nbytes, flops)
        home, gpus, (weights, x, summed) = gpu_of(queue), len(self.devices), self.nbytes
        gpu, first = (home + self.turn) % gpus, self.turn < gpus
        self.turn += 1
        # Only the additions wait for one sum; each GPU has buffers of its own for gradients of inputs.
        after = [task for task in after if task.kind != "loss" and " dx " not in task.of]
        if gpu != home:
            after = (super().run(numbered("peer_in", gpu), "activations", of, fn, after, x),)
            if first:
                after = (*after, super().run(numbered("h2d", gpu), "weights", of, fn, (), weights))
        done = super().run(numbered("compute", gpu), kind, of, fn, after, flops=flops)
        if summed:
            before = (gpu - 1) % gpus
            moved = super().run(numbered("peer", before), "gradient", of, fn, self.last, summed) if self.last else done
            self.last = (super().run(numbered("compute", gpu), "other", "add", fn, (moved, done), 3 * summed),)
        return done


def seconds_of(gpus: int, n_micro: int, rates: Rates) -> tuple[float, float]:
    """A step of micro-batches of 8,192 tokens, with weights and state in RAM: as it is, and with the head divided."""
    cfg = MODELS["llama-8b"]
    units = (UnitPlan("host", "host"),) * cfg.n_units
    plan = Plan(units, 8192, n_micro, window=3).dealt(gpus, cfg.tied, peers=True)
    geo, batch = Geometry.of(cfg, plan), predict.Batch(8192, 2048, n_micro)
    Divided.nbytes = geo.weights[geo.head].span, geo.x_bytes(8192), 4 * geo.numel[geo.head]
    found = []
    for queues in (SimulatedQueues, Divided):
        predict.SimulatedQueues = queues  # type: ignore[misc]
        found.append(predict.predict(cfg, plan, rates, batch).step_s)
    return found[0], found[1]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpu", default="h100", choices=GPUS)
    p.add_argument("--peer", type=float, default=390, help="copies between GPUs, GB/s each way")
    given = p.parse_args()
    rates = machine(GPUS[given.gpu], 1 << 40, dram=1e12).rates  # RAM and CPU are not the limit
    rates = replace(rates, peer=given.peer * 1e9)
    print("| GPUs | micro-batches | head on one GPU | head on all | faster |")
    print("|---|---|---|---|---|")
    for gpus, n_micro in product((2, 4), (8, 16, 32)):
        one, every = seconds_of(gpus, n_micro, rates)
        print(f"| {gpus} | {n_micro} | {one:.3f} s | {every:.3f} s | {one / every - 1:.1%} |", flush=True)


if __name__ == "__main__":
    main()
