"""python scripts/papers/tables.py: published figures of the papers next to the estimate for the same machine and model.

An estimate is the code of the step on simulated queues, with assumed rates. Nothing is fitted, and
nothing was run on these machines. Without clipping, as in the papers; sequences of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from trireme.engine.plan import DoesNotFit
from trireme.engine.planner.advice import check_drive
from trireme.engine.planner.choose import choose
from trireme.engine.planner.forecast import Forecast, RunWork
from trireme.engine.planner.gpus import GPUS
from trireme.engine.planner.rates import DRIVES, GB, Machine, machine
from trireme.engine.planner.rule import Wanted, simple_plan, sizes_of
from trireme.models.config import ModelConfig, uniform

SEQ = 1024
SERVER_DRAM = 150 * GB  # eight channels of DDR4-2933, 188 GB/s on paper, at 0.8


def gpt3(width: int, layers: int, heads: int) -> ModelConfig:
    """A model of GPT-3's form, as the papers have it."""
    return uniform("gpt2", 50257, width, layers, heads, heads, width // heads, 4 * width, 8192, 1e-5, True, bias=True)


# Fuyou, table 4; then PatrickStar, table 2, and STRONGHOLD's size: hidden width, layers, heads.
GPT = {
    "13B": gpt3(5120, 40, 40),
    "65B": gpt3(8192, 80, 64),
    "135B": gpt3(11264, 88, 88),
    "175B": gpt3(12288, 96, 96),
    "276B": gpt3(14336, 112, 112),
    "412B": gpt3(16384, 128, 128),
    "805B": gpt3(20480, 160, 160),
}
NARROW = {
    "12B": gpt3(4096, 58, 32),
    "15B": gpt3(4096, 73, 32),
    "20B": gpt3(8192, 25, 64),
    "30B": gpt3(8192, 37, 64),
    "40B": gpt3(8192, 49, 64),
    "50B": gpt3(8192, 62, 64),
    "60B": gpt3(8192, 75, 64),
    "68B": gpt3(9216, 66, 72),
}


class Published(NamedTuple):
    """A printed throughput: model TFLOP/s in steps of `sequences`."""

    source: str
    model: str
    gpu: str
    drives: int
    sequences: int
    tflops: float


THROUGHPUT = (
    Published("Fuyou, figure 5c", "13B", "rtx4090", 12, 64, 156),
    Published("Fuyou, figure 5b", "13B", "a100-80g", 12, 80, 202),
    Published("Fuyou, figure 5a", "175B", "rtx4090", 12, 16, 87),
    Published("Fuyou, figure 5a", "175B", "a100-80g", 12, 64, 172),
    Published("Fuyou, figure 6", "276B", "a100-80g", 12, 64, 168),
    Published("Fuyou, figure 6", "412B", "a100-80g", 12, 64, 163),
    Published("LoHan", "13B", "rtx4090", 1, 32, 37.5),
    Published("LoHan", "13B", "rtx4090", 3, 32, 81.1),
    Published("LoHan", "13B", "rtx4090", 12, 32, 142.0),
)
LARGEST = (  # paper, GPU, GB of RAM, drives, models, the largest that was published
    ("Fuyou, figure 4", "rtx4090", 128, 12, GPT, "65B"),
    ("Fuyou, figure 4", "rtx4090", 768, 12, GPT, "276B"),
    ("Fuyou, figure 4", "a100-80g", 768, 12, GPT, "805B"),
    ("STRONGHOLD, figure 6a", "v100-32g", 755, 0, NARROW, "39.5B"),
    ("PatrickStar, figure 10", "v100-32g", 240, 0, NARROW, "12B"),
    ("PatrickStar, figure 10", "a100-40g", 1000, 0, NARROW, "50B"),
)


def server(gpu: str, ram: int, drives: int) -> Machine:
    """The machine of Fuyou's table 3, and of LoHan; `ram` in GB."""
    return machine(GPUS[gpu], ram * 10**9, DRIVES["p5510"] if drives else None, drives or 1, SERVER_DRAM)


def forecast(cfg: ModelConfig, m: Machine, sequences: int, search: bool = True) -> Forecast:
    """The estimate of the plan that a run would make, or of the one where its search starts. Raises DoesNotFit."""
    sizes = sizes_of([rows for rows in (16, 8, 4, 2, 1) if rows <= sequences], sequences, SEQ)
    wanted = Wanted(sizes, mode="backward", document=SEQ)
    plan = choose(cfg, m.limits, m.rates, wanted).plan if search else simple_plan(cfg, m.limits, wanted)
    made = Forecast(cfg, plan, m, m.limits, RunWork(SEQ, sequences, 1))
    check_drive(made)
    return made


def throughput() -> list[str]:
    rows = ["published in | model | GPU | drives | sequences | published TFLOP/s | estimated | limited by"]
    for p in THROUGHPUT:
        made = forecast(GPT[p.model], server(p.gpu, 768, p.drives), p.sequences)
        rows.append(
            f"{p.source} | {p.model} | {GPUS[p.gpu].name} | {p.drives} | {p.sequences} | {p.tflops:g} "
            f"| {made.tflops:.0f} | {made.step.bound}"
        )
    return rows


def largest() -> list[str]:
    """The largest models that train with one sequence."""
    rows = ["published in | machine | published | fits here"]
    for source, gpu, ram, drives, models, published in LARGEST:
        best = "none"
        for name, cfg in models.items():
            try:
                forecast(cfg, server(gpu, ram, drives), 1, search=False)
                best = name
            except DoesNotFit:
                break
        rows.append(f"{source} | {GPUS[gpu].name}, {ram} GB, {drives} drives | {published} | {best}")
    return rows


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    for heads, *rows in (throughput(), largest()):
        print(f"| {heads} |", f"|{'---|' * (1 + heads.count('|'))}", *(f"| {row} |" for row in rows), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
