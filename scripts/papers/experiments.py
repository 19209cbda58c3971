"""Experiments of the papers that need no hardware, by Trireme's step code: python scripts/papers/experiments.py [NAME]

Prints the tables of docs/papers.md. Machines and shapes are those of figures.py; nothing is measured or fitted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

from figures import (
    GPT,
    NARROW,
    SEQ,
    SERVER_DRAM,
    Row,
    best,
    fuyou_seconds,
    fuyou_server,
    zero_infinity_seconds,
)
from tables import table

from trireme.engine.geometry import ADAM_BYTES, Geometry
from trireme.engine.plan import DoesNotFit, Plan
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.gpus import GPUS
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import Machine, Rates, machine
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.simulate import drive_seconds
from trireme.engine.planner.variants import moves
from trireme.engine.run.plan import record_size
from trireme.models.config import ModelConfig
from trireme.models.sizes import shapes

# Fuyou, table 5: dollars.
SERVER, SSD, PRICES = 14_098, 308, {"a100-80g": 14_177, "rtx4090": 1_600}
CURVES = ("13B", "a100-80g", (8, 16, 32, 64, 80)), ("13B", "rtx4090", (8, 16, 32, 64)), ("175B", "rtx4090", (8, 16))
OVERLAP = {
    ("13B", 8): 1.09,
    ("13B", 16): 1.25,
    ("13B", 32): 1.38,
    ("13B", 64): 1.22,
    ("175B", 8): 1.16,
    ("175B", 16): 1.18,
}
PIPELINED = {
    ("a100-80g", 8): 1.66,
    ("a100-80g", 16): 1.88,
    ("a100-80g", 32): 1.97,
    ("rtx4090", 8): 1.85,
    ("rtx4090", 16): 1.92,
    ("rtx4090", 32): 2.28,
}


def batches() -> list[Row]:
    """Fuyou, figures 5 and 6: TFLOP/s over sequences a step."""
    rows: list[Row] = []
    for model, gpu, counts in (*CURVES, ("276B", "a100-80g", (16, 64)), ("412B", "a100-80g", (16, 64))):
        for sequences in counts:
            found = best(GPT[model], fuyou_server(gpu), sequences, "backward")
            assert found is not None
            rows.append([model, GPUS[gpu].name, found.work.sequences, f"{found.tflops:.0f}", found.step.bound])
    return rows


def overlap() -> list[Row]:
    """Fuyou, figure 7, on an RTX 4090: throughput over that of updates after backward."""
    return [[model, sequences, published, f"{_overlap(model, sequences):.2f}"]
            for (model, sequences), published in OVERLAP.items()]  # fmt: skip


def _overlap(model: str, sequences: int) -> float:
    m = fuyou_server("rtx4090")
    found = best(GPT[model], m, sequences, "backward", "state-ssd")
    assert found is not None
    free = replace(m.rates, adam=1e15, dram=1e30, ssd_read=1e18, ssd_write=1e18)  # no update takes time
    computed = predict(found.cfg, found.plan, free, found.work.batch(found.plan)).step_s
    return (computed + _updates(found, m.rates)) / found.step.step_s


def _updates(f: Forecast, rates: Rates) -> float:
    """Seconds of updates alone: state through the drives, or the CPU."""
    n = sum(f.geo.numel)
    return max(n / rates.adam, ADAM_BYTES * n / rates.dram, drive_seconds(10 * n, 10 * n, rates))


def pipelined() -> list[Row]:
    """Fuyou, figure 8, 13B: throughput of Fuyou with updates after backward over that of ZeRO-Infinity."""
    rows: list[Row] = []
    for (gpu, sequences), published in PIPELINED.items():
        fuyou = fuyou_seconds(GPT["13B"], sequences, gpu, 12, overlapped=False)
        simulated = zero_infinity_seconds(GPT["13B"], sequences, gpu) / fuyou
        rows.append([GPUS[gpu].name, sequences, f"{published:.2f}", f"{simulated:.2f}"])
    return rows


def dollars() -> list[Row]:
    """Fuyou, figure 10: tokens/s per 1,000 dollars of GPU and drives, and of the machine, at 175B."""
    rows: list[Row] = []
    for gpu, sequences in (("rtx4090", 16), ("a100-80g", 64)):
        for drives in (1, 2, 3, 6, 12):
            found = best(GPT["175B"], fuyou_server(gpu, drives), sequences, "backward", "state-ssd")
            if found is None:
                rows.append([GPUS[gpu].name, drives, "does not fit", "", ""])
                continue
            speed, parts = found.work.tokens / found.step.step_s, PRICES[gpu] + drives * SSD
            rows.append([GPUS[gpu].name, drives, f"{speed:.0f}", f"{1e3 * speed / parts:.1f}"]
                        + [f"{1e3 * speed / (parts + SERVER):.1f}"])  # fmt: skip
    return rows


def linear() -> list[Row]:
    """STRONGHOLD, figure 8b, on a V100: seconds of a step over those of 1.7B times the model's size."""
    m, rows, first = machine(GPUS["v100-32g"], 755 * 10**9, None, dram=SERVER_DRAM), list[Row](), 0.0
    for name in ("1.7B", "4B", "6B", "10B", "20B", "40B"):
        plan = _in_ram(NARROW[name], m)
        seconds, size = (
            predict(NARROW[name], plan, m.rates, Batch(plan.tokens, SEQ, 1)).step_s,
            shapes.parameters(NARROW[name]),
        )
        first = first or seconds / size
        rows.append([name, f"{seconds:.2f}", f"{seconds / size / first:.2f}"])
    return rows


def _in_ram(cfg: ModelConfig, m: Machine) -> Plan:
    record = record_size(shapes.parameters(cfg), m.limits.host)
    plan = simple_plan(cfg, m.limits, Wanted(((4 * SEQ, 1),), mode="backward", record=record, placement="host"))
    return replace(plan, units=tuple(replace(unit, saved=()) for unit in plan.units))


def tensors() -> list[Row]:
    """MPress, table III: milliseconds to recompute or to swap what a block saves, GPT-3 13B, 8 sequences, A100."""
    m, cfg = fuyou_server("a100-80g"), GPT["13B"]
    plan, rows, had = _in_ram(cfg, m), list[Row](), set[str]()
    for move in moves(Geometry.of(cfg, plan), Batch(8 * SEQ, SEQ, 1), m.rates):
        rows.append([", ".join(name for name in move.names if name not in had), f"{move.nbytes / 2**20:.0f}"]
                    + [f"{1e3 * move.seconds:.1f}", f"{1e3 * move.nbytes / m.rates.h2d:.1f}"])  # fmt: skip
        had |= set(move.names)
    return rows


def strategies() -> list[Row]:
    """MPress, table IV: what the plan does with the activations of blocks, in shares of their bytes."""
    rows: list[Row] = []
    for model, gpu, sequences in (("13B", "a100-80g", 32), ("13B", "a100-80g", 80), ("175B", "rtx4090", 16)):
        f = best(GPT[model], fuyou_server(gpu), sequences, "backward")
        assert f is not None
        inner = range(1, f.geo.head)
        span = lambda u, names, f=f: f.geo.saved_layout(u, names, f.plan.tokens).span
        total = sum(span(u, f.geo.saved_names(f.geo.kinds[u])) for u in inner)
        kept = [sum(span(u, f.plan.units[u].names(tier)) for u in inner) / total for tier in ("gpu", "host", "ssd")]
        rows.append([model, GPUS[gpu].name, f.work.sequences] + [f"{x:.0%}" for x in (1 - sum(kept), *kept)])
    return rows


TABLES: dict[str, tuple[Callable[[], list[Row]], str]] = {
    "batches": (batches, "model | GPU | sequences | TFLOP/s | limited by"),
    "overlap": (overlap, "model | sequences | published | Trireme"),
    "pipelined": (pipelined, "GPU | sequences | published | simulated"),
    "dollars": (dollars, "GPU | drives | tokens/s | per 1,000 $ of GPU and drives | of the machine"),
    "linear": (linear, "model | s per step | over linear"),
    "tensors": (tensors, "saved tensors | MiB | recomputed ms | swapped ms"),
    "strategies": (strategies, "model | GPU | sequences | recomputed | on the GPU | in RAM | on the SSD"),
}


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)}; all if none")
    for name in p.parse_args(argv).names or TABLES:
        if name not in TABLES:
            p.error(f"there is no table {name}")
        make, heads = TABLES[name]
        print(f"\n{(make.__doc__ or '').splitlines()[0]}\n")
        try:
            print("\n".join(table(heads, make())), flush=True)
        except DoesNotFit as error:
            sys.exit(f"error: {name}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
