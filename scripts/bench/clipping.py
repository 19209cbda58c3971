"""The cost of waiting for the gradient norm: the lower bound of a step with clipping, and the simulated step.

python scripts/bench/clipping.py [--gpu h100] [--gpu-memory 23] [--ram 104] [--adam 6.3] [--dram 194]
python scripts/bench/clipping.py --rates RESULT.json: with the rates of a machine that step.py measured

The factor of clipping multiplies every gradient, and the last gradient of a step is that of its first layer: no
update can begin before backward ends. The loss needs the new weights of all layers, so all weights are updated
between the norm and the loss, while the GPU has one forward to compute. The new moments are needed a step later; they
are written during backward. What is left: the CPU updates weights at 20 bytes of RAM traffic per parameter, and the
GPU those of a share of the layers, whose state is transferred, 14 bytes up and 4 down. Copies take bandwidth of RAM
from the CPU.

--all: the least lower bound (planner/choose.lower_bounds) of all plans with 0 to 8 layers' state on the GPU, any share
of the other updates there, and any saved tensors; some minutes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from trireme.engine.geometry import ADAM_BYTES, PART_BYTES, Geometry
from trireme.engine.plan import Limits, Plan
from trireme.engine.planner.choose import Trials, choose, first_plan
from trireme.engine.planner.gpus import GPUS
from trireme.engine.planner.predict import Batch, predict, unit_seconds
from trireme.engine.planner.rates import Rates, machine, rates_of
from trireme.engine.planner.rule import Cut, Strategy, Wanted, sizes_of
from trireme.engine.planner.sizes import MODELS
from trireme.engine.planner.variants import moves, variants
from trireme.engine.run.plan import record_size
from trireme.models.config import ModelConfig
from trireme.models.sizes import shapes

GIB, SEQ, SEQUENCES = 1 << 30, 2048, 16
CASES = ("llama-7b", False), ("llama-8b", True)  # fp8


@dataclass(frozen=True)
class Bound:
    """Seconds of a step: forward, loss and backward on the GPU; all weights' updates, by the CPU alone and divided."""

    forward: float
    rest: float
    alone: float
    divided: float

    @property
    def step(self) -> float:
        return max(self.forward, self.divided) + self.rest


def bound(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch) -> Bound:
    """Of a plan with state in RAM or on the GPU, in bf16."""
    cfg = plan.cut(cfg)
    geo, seconds = Geometry.of(cfg, plan), unit_seconds(cfg, plan, rates, batch)
    forward = batch.n_micro * sum(s for (kind, _), s in seconds.items() if kind == "forward")
    n = sum(geo.numel[u] for u, unit in enumerate(plan.units) if unit.state != "gpu")

    def updates(share: float) -> float:
        """Seconds of the weights' updates with a share of them on the GPU; weights are transferred for forward."""
        cpu = (1 - share) * n * PART_BYTES["weights"] / (ADAM_BYTES * rates.adam * rates.concurrent)
        up, down = n * (2 + 12 * share), n * 4 * share
        return max(cpu + (up + down) / rates.dram, up / rates.h2d, down / rates.d2h)

    shares = [updates(i / 100) for i in range(100)]
    return Bound(forward, batch.n_micro * sum(seconds.values()) - forward, shares[0], min(shares))


class Case(NamedTuple):
    """The bound of the chosen plan; seconds of its step, simulated, and of computation in it; without clipping."""

    bound: Bound
    step: float
    computing: float
    without: float


def wanted_of(cfg: ModelConfig, limits: Limits, clip: bool) -> Wanted:
    record = record_size(shapes.parameters(cfg), limits.host)
    sizes = sizes_of((16, 8, 4, 2, 1), SEQUENCES, SEQ)
    return Wanted(sizes, mode="forward" if clip else "backward", record=record, document=SEQ)


def case(model: str, fp8: bool, limits: Limits, rates: Rates) -> Case:
    cfg = replace(MODELS[model], fp8=fp8)
    plans = [choose(cfg, limits, rates, wanted_of(cfg, limits, clip)).plan for clip in (True, False)]
    batches = [Batch(plan.tokens, SEQ, plan.n_micro) for plan in plans]
    found, free = (predict(cfg, plan, rates, batch) for plan, batch in zip(plans, batches, strict=True))
    return Case(bound(cfg, plans[0], rates, batches[0]), found.step_s, found.busy["compute"], free.step_s)


def least(model: str, fp8: bool, limits: Limits, rates: Rates, parts: int = 8) -> tuple[int, float]:
    """(plans, seconds): the least lower bound of all plans; shares of updates on the GPU differ by 1 / `parts`."""
    cfg = replace(MODELS[model], fp8=fp8)
    wanted = wanted_of(cfg, limits, clip=True)
    first = first_plan(cfg, limits, wanted, drive=False)
    trials = Trials(Geometry.of(cfg, first), rates, replace(wanted, cuts=(Cut.of(first),)))
    strategies = [
        Strategy(x, states / cfg.n_units, updates=share / parts)
        for x, states, share in product(("gpu", "host"), range(9), range(parts + 1))
    ]
    steps = moves(trials.geo, trials.batch(first), rates)
    made = set(variants(trials.geo, limits, first, trials.wanted, steps, strategies))
    plans = [plan for plan in made if not plan.uses("ssd")]
    return len(plans), SEQUENCES * SEQ * min(map(trials.lower_bound, plans))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpu", default="h100", choices=GPUS)
    p.add_argument("--gpu-memory", type=float, default=23, help="GiB for the plan")
    p.add_argument("--ram", type=float, default=104, help="GiB for the plan")
    p.add_argument("--adam", type=float, default=6.3, help="AdamW on the CPU, G parameters/s")
    p.add_argument("--dram", type=float, default=194, help="RAM, GB/s")
    p.add_argument("--rates", help="what step.py --json wrote: rates and limits are those of its machine")
    p.add_argument("--all", action="store_true", help="the least bound of all plans too")
    given = p.parse_args()
    made = machine(GPUS[given.gpu], round(given.ram * GIB)).rates
    rates = replace(made, adam=given.adam * 1e9, dram=given.dram * 1e9, concurrent=1.0)
    limits = Limits(round(given.gpu_memory * GIB), round(given.ram * GIB))
    if given.rates:
        result = json.loads(Path(given.rates).read_text())
        rates, limits = rates_of(result["ceilings"]), Limits(result["limits"]["gpu"], result["limits"]["host"])
    print("| model | forward | updates by the CPU | divided | loss, backward | bound | simulated | without clipping |")
    print(f"|{'---|' * 8}")
    for model, fp8 in CASES:
        if fp8 and not rates.fp8:
            continue
        b, step, busy, free = case(model, fp8, limits, rates)
        name = model + " fp8" * fp8
        print(f"| {name} | {b.forward:.2f} s | {b.alone:.2f} | {b.divided:.2f} | {b.rest:.2f} | {b.step:.2f}", end="")
        print(f" ({b.step / free:.2f}) | {step:.2f} ({step / free:.2f}), computing {busy / step:.0%} | {free:.2f} |")
        if given.all:
            plans, seconds = least(model, fp8, limits, rates)
            print(f"{name}: the least bound of {plans:,} plans {seconds:.2f} s ({seconds / free:.2f})", flush=True)


if __name__ == "__main__":
    main()
