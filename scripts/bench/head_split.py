"""What a step would gain if all GPUs computed the head's micro-batches in turn, simulated.

python scripts/bench/head_split.py --shape llama-3.1-8b --assume gpu=4xh100,ram=512GiB,peer=390 [more of a dry run]

Micro-batch b of the loss runs on GPU b mod N, which needs a copy of the head's weights and of the input. The sum of
gradients, in fp32, goes from GPU to GPU in the order of micro-batches, so that each adds to it as one GPU would: a copy
between GPUs and an addition for each micro-batch. "free" leaves out these copies and additions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from trireme.engine.planner import predict
from trireme.engine.planner.simulate import Noted, SimulatedQueues
from trireme.engine.queues.names import gpu_of, numbered
from trireme.engine.queues.task import Kind, Task
from trireme.engine.run.begin.job import prepare
from trireme.engine.run.command import parse


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
        if gpu != home:
            after = (super().run(numbered("peer", home), "activations", of, fn, after, x),)
            if first:
                after = (*after, super().run(numbered("h2d", gpu), "weights", of, fn, (), weights))
        done = super().run(numbered("compute", gpu), kind, of, fn, after, flops=flops)
        if summed:
            before = (gpu - 1) % gpus
            moved = super().run(numbered("peer", before), "gradient", of, fn, self.last, summed) if self.last else done
            self.last = (super().run(numbered("compute", gpu), "other", "add", fn, (moved, done), 3 * summed),)
        return done


def main() -> None:
    f = prepare(parse([*sys.argv[1:], "--dry-run", "--out", "OUT"])).forecast
    batch, rates = f.work.batch(f.plan), f.machine.rates
    seconds = lambda: predict.predict(f.cfg, f.plan, rates, batch).step_s
    one, found = seconds(), {}
    predict.SimulatedQueues = Divided  # type: ignore[misc]
    head, sums = f.geo.weights[f.geo.head].span, 4 * f.geo.numel[f.geo.head]
    for name, nbytes in {"divided": (head, f.geo.x_bytes(f.plan.tokens), sums), "free": (0.0, 0.0, 0.0)}.items():
        Divided.nbytes = nbytes
        found[name] = seconds()
    said = ", ".join(f"{name} {s:.3f} s ({one / s - 1:+.1%})" for name, s in found.items())
    print(f"{f.plan.gpus} GPUs, {f.plan.n_micro} micro-batches of {f.plan.tokens:,} tokens: {one:.3f} s; {said}")


if __name__ == "__main__":
    main()
