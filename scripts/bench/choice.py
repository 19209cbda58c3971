"""The planner's choice compared with other plans, measured: python scripts/bench/choice.py --keep DIR

For each line many plans are simulated: sizes of micro-batches, placements, swapped activations. The best of each kind
are measured, and the choice.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import step as bench_step
from estimates import results_folder, run_arguments, write_results

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.host import choose_device, memory_limits
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import MODELS
from trireme.engine.planner.variants import STRATEGIES, moves, with_most_on_gpu, with_moves
from trireme.models.config import ModelConfig

LINES = (  # arguments of step.py
    "llama-1.3b --gpu-memory 12GiB --ram 40GiB",
    "llama-1.3b --gpu-memory 16GiB --ram 60GiB --tokens 8192",
    "llama-3b --gpu-memory 12GiB --ram 60GiB --clip 0",
    "llama-3b --gpu-memory 24GiB --ram 60GiB",
)
PARTS = 12


def swaps(geo: Geometry, base: Plan, limits: Limits, rates: Rates, document: int) -> Iterator[tuple[int, Plan]]:
    """(n, plan) with 0 to 12 twelfths of the moves in RAM, n moves, where that fits."""
    plain = base.changed(range(geo.n_units), saved=())
    steps = moves(geo, Batch(base.tokens, document, base.n_micro), rates)
    total = sum(geo.kinds.count(move.kind) for move in steps)
    for n in dict.fromkeys(round(total * i / PARTS) for i in range(PARTS + 1)):
        if fits(geo, with_moves(geo, plain, steps, n, n), limits):
            yield n, with_most_on_gpu(geo, plain, limits, steps, n, n)


def alternatives(cfg: ModelConfig, limits: Limits, rates: Rates, wanted: Wanted) -> Iterator[tuple[str, Plan]]:
    """(kind, plan) over micro-batches, strategies, tensors in RAM, shares of blocks."""
    for size in wanted.sizes[:3]:
        for strategy in STRATEGIES:
            try:
                base = simple_plan(cfg, limits, replace(wanted, sizes=(size,)), strategy)
            except DoesNotFit:
                continue
            kind = f"x {strategy.x}, states {strategy.states}, resident {strategy.resident}, updates {strategy.updates}"
            yield kind, base
            geo = Geometry.of(cfg, base)
            for n, plan in swaps(geo, base, limits, rates, wanted.document):
                yield f"{kind}, {n or 'no'} moves to RAM", plan


def best_of_each_kind(
    cfg: ModelConfig, wanted: Wanted, limits: Limits, rates: Rates, chosen: Plan
) -> list[tuple[float, str, Plan]]:
    """(predicted seconds, kind, plan) of each kind's best, the fastest first, without `chosen`."""
    best: dict[str, tuple[float, str, Plan]] = {}
    for kind, plan in alternatives(cfg, limits, rates, wanted):
        seconds = predict(cfg, plan, rates, Batch(plan.tokens, wanted.document, plan.n_micro)).step_s
        if plan != chosen and seconds < best.get(kind, (math.inf,))[0]:
            best[kind] = (seconds, kind, plan)
    different = {plan: (seconds, kind, plan) for seconds, kind, plan in best.values()}
    return sorted(different.values(), key=lambda found: found[0])


def compare(a: argparse.Namespace, keep: Path) -> list[dict]:
    """For each line, the choice over the best measured."""
    rows, ends, device = [], time.monotonic() + 60 * a.minutes, choose_device("auto")
    rates = bench_step.measure_rates(device, "BF16", None)
    for i, line in enumerate(LINES):
        if a.only and i not in a.only:
            continue
        given = bench_step.arguments(line.split())
        bench_step.forget_peaks(device)
        cfg, limits = MODELS[given.model], memory_limits(device, given.gpu_memory, given.ram)
        wanted = bench_step.wanted_of(given, cfg, "BF16", limits)
        choice = choose(cfg, limits, rates, wanted)
        plans = [(choice.found.step_s, "the choice", choice.plan)]
        plans += best_of_each_kind(cfg, wanted, limits, rates, choice.plan)[: a.best_of]
        print(line, flush=True)
        measured: list[float] = []
        for predicted, kind, plan in plans:
            if time.monotonic() + 10 > ends:
                break
            bench_step.forget_peaks(device)
            with (keep / f"choice-{i}-{len(measured)}.log").open("w") as out, redirect_stdout(out):
                measured.append(bench_step.measure(given, cfg, plan, limits, rates, device, 0.0)["step_s"])
            print(f"  {kind}: predicted {predicted:.3f} s, measured {measured[-1]:.3f} s", flush=True)
        if len(measured) > 1:
            rows.append({"name": line, "measured": measured, "choice_over_best": measured[0] / min(measured)})
            print(f"  choice over the best measured: {rows[-1]['choice_over_best']:.3f}", flush=True)
    return rows


def main(argv: list[str]) -> int:
    p = run_arguments(__doc__.splitlines()[0])
    p.add_argument("--best-of", type=int, default=5, help="plans that are measured besides the choice")
    a = p.parse_args(argv)
    keep = results_folder(a)
    write_results(compare(a, keep), "choice", keep)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
