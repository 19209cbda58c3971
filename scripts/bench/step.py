"""Measures a training step, and compares it with its lower bound and its estimate.

    python scripts/bench/step.py llama-1.3b --gpu-memory 24GiB --ram 16GiB

A queue's lower bound is its work divided by its ceiling, which is measured in the same run. The step's is the largest,
of queue `bound`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from ceilings import against, blended, forget_peaks, lower_bounds, measure_rates, sustained_rates
from model_inputs import shaped

from trireme.engine.amounts import gib, size
from trireme.engine.buffers import usage
from trireme.engine.build import Engine, make_inputs
from trireme.engine.check.steps import make_batch, random_engine
from trireme.engine.optimizer import StepStats
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.correct import corrected, measured
from trireme.engine.planner.host import choose_device, choose_gpus, limit_torch, memory_in_use, memory_limits
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import CODE, Rates
from trireme.engine.planner.rule import Wanted, record_size, simple_plan, sizes_of, sliced
from trireme.engine.planner.sizes import names
from trireme.engine.queues.names import numbered
from trireme.engine.queues.real import RealQueues
from trireme.engine.queues.task import Task
from trireme.engine.queues.trace import busy, perfetto
from trireme.engine.run.cli import ENVIRONMENT
from trireme.engine.step import train_step
from trireme.engine.tuning.chosen import aware
from trireme.engine.tuning.quantized import BASES
from trireme.models.config import ModelConfig
from trireme.models.losses.micro_batch import MicroBatch
from trireme.models.losses.preferences import METHODS, Preference
from trireme.models.rows import Tables, rope_tables
from trireme.models.sizes import costs, narrow, shapes

Arguments = argparse.Namespace

SWITCHES = ("overlap", "prefetch", "vertical", "pinning", "peers")
GIB = 1 << 30


# ---------------------------------------------------------------- the plan


def wanted_of(a: Arguments, cfg: ModelConfig, dtype: str, limits: Limits) -> Wanted:
    if a.slices and not narrow.may_be_sliced(cfg):
        raise DoesNotFit(f"--slices {a.slices}: {a.model} has no frozen experts that can come in slices. Leave it out.")
    most = min(a.tokens // a.gpus, 16384)  # a micro-batch for each GPU at least
    rows = [a.micro] if a.micro else [r for r in (32, 16, 8, 4, 2, 1) if r * a.seq <= most] or [1]
    return Wanted(
        sizes_of(rows, math.ceil(a.tokens / a.seq), a.seq),
        dtype=dtype,
        mode="forward" if a.clip else "backward",
        record=a.record or record_size(shapes.parameters(cfg), limits.ram),
        adam_bits=a.adam_bits,
        placement=a.placement,
        on_cuda=dtype == "BF16",
        document=a.seq,
        cuts=[sliced(cfg, a.slices)] if a.slices else (),
        gpus=a.gpus,
        compared=bool(a.method),
    )


def make_plan(a: Arguments, cfg: ModelConfig, dtype: str, limits: Limits, rates: Rates) -> Plan:
    """The plan of --plan, of the rule (--placement, --rule) or of a run; one buffer of weights for --off prefetch."""
    wanted = wanted_of(a, cfg, dtype, limits)
    if a.plan:
        plan = Plan.load(Path(a.plan))
    elif a.rule or a.placement != "auto":
        plan = simple_plan(cfg, limits, wanted)
    else:
        plan = choose(cfg, limits, rates, wanted).plan
    return replace(plan, window=1) if "prefetch" in a.off else plan


# ---------------------------------------------------------------- the run


class Run(NamedTuple):
    """Seconds of timed steps and of the traced one before, losses, spans of the traced and the last."""

    times: list[float]
    warm_s: float  # of no meaning where `warm` is empty
    losses: list[float]
    warm: list[Task]
    last: list[Task]


def run_steps(a: Arguments, e: Engine, batch_of: Callable[[int], list[MicroBatch]]) -> Run:
    """Warms up, then times steps.

    Of three or more warm-up steps the last but one is traced, with the queues empty before and after it, as a run
    traces its second step: the first compiles kernels.
    """
    places = [(rope_tables(e.cfg, a.seq, gpu), gpu) for gpu in e.queues.devices]
    times, losses, warm = [], [], []
    traced = a.warmup - 1 if a.warmup > 2 else 0
    for step in range(1, a.warmup + a.steps + 1):
        batch = batch_of(step)
        start = time.perf_counter()
        e.queues.tracing = step in (traced, a.warmup + a.steps)
        stats = _step(a, e, batch, places, step)
        times.append(time.perf_counter() - start)
        losses.append(stats.loss)
        print(f"step {step}: {times[-1]:.3f} s, loss {stats.loss:.4f}, norm {stats.grad_norm:.3f}", flush=True)
        if traced and step in (traced - 1, traced):
            e.queues.drain()
            warm = e.queues.trace()
    e.queues.tracing = False
    start = time.perf_counter()
    e.optimizer.flush()
    e.queues.drain()
    print(f"last updates: {time.perf_counter() - start:.3f} s")
    return Run(times[a.warmup :], times[traced - 1], losses, warm, e.queues.trace())


def _step(
    a: Arguments, e: Engine, batch: Sequence[MicroBatch], places: Sequence[tuple[Tables, torch.device]], step: int
) -> StepStats:
    on_device = (make_inputs(e.cfg, mb, places) for mb in batch)  # a generator, for "vertical"
    if a.method:
        pairs = sum(len(mb.lengths) for mb in batch) / 2
        return train_step(e, list(on_device), step, a.lr, pairs, Preference(a.method))
    if "vertical" not in a.off:
        return train_step(e, list(on_device), step, a.lr)
    # As in other trainers, weights are transferred for each micro-batch, which is a step here; only the last updates.
    for k, mb in enumerate(on_device):
        if k:
            e.gradients.discard()
        stats = train_step(e, [mb], step, a.lr)
    return stats


@contextmanager
def engine_of(a: Arguments, cfg: ModelConfig, plan: Plan, limits: Limits, device: torch.device) -> Iterator[Engine]:
    torch.manual_seed(0)
    queues = RealQueues(device, gpus=plan.gpus, threads="overlap" not in a.off)
    start = time.perf_counter()
    limit_torch(limits, device)
    with random_engine(cfg, plan, limits, queues, a.store, a.clip, "pinning" not in a.off) as e:
        for tier, name, each, count, gpu in e.memory.table:
            print(f"{numbered(tier, gpu):5} {name:32} {count:6} {gib(each):>11} {gib(each * count):>11}")
        print(f"set-up {time.perf_counter() - start:.1f} s; {plan.n_micro} micro-batches of {plan.tokens} tokens")
        if device.type == "cuda":  # what was taken to build it does not count
            torch.cuda.reset_peak_memory_stats(device)
        print(f"window {plan.window}, state slots {plan.state_slots}, mode {plan.mode}", flush=True)
        yield e


def measure(
    a: Arguments, cfg: ModelConfig, plan: Plan, limits: Limits, rates: Rates, device: torch.device, at_start: float
) -> dict[str, Any]:
    """Trains by a plan; prints and returns the figures. `at_start`: GiB of RAM resident before."""
    text = Path(a.text).read_bytes() if a.text else None
    with engine_of(a, cfg, plan, limits, device) as e:
        made = partial(make_batch, cfg, a.tokens, a.seq, plan.tokens // a.seq, text=text)
        run = run_steps(a, e, lambda step: [compared(mb) for mb in made(step)] if a.method else made(step))
        result = {name: vars(a)[name] for name in ("model", "lora", "base", "gpus", "dtype", "tokens", "seq")}
        result |= {"losses": run.losses, "limits": asdict(limits), "plan": asdict(plan)}
        result |= {"step_s": statistics.median(run.times), "steps_s": run.times}
        result |= against_bound(a, e, rates, run) | against_prediction(a, e, rates, run, at_start)
    if a.trace:
        Path(a.trace).write_text(perfetto(run.last))
    return result


def compared(mb: MicroBatch) -> MicroBatch:
    """`mb` with its documents as pairs of equal weight; the reference gives 32,000 tokens one probability."""
    n = len(mb.lengths)
    return replace(mb, weights=np.ones(n), reference=np.full(n, -math.log(32000) * mb.lengths[0]))


# ---------------------------------------------------------------- comparison


def against_bound(a: Arguments, e: Engine, rates: Rates, run: Run) -> dict[str, Any]:
    """Prints and returns the lower bound and busy time of each queue, and the ratio of the step."""
    on_cpu = sum(n for n, u in zip(e.geo.numel, e.plan.units, strict=True) if u.state != "gpu")
    ceilings = blended(e.cfg, e.plan, a.tokens, a.seq, rates)
    step_s, bounds = statistics.median(run.times), lower_bounds(run.last, ceilings, on_cpu)
    at_work = busy(run.last) | {"ssd": measured(run.last)["ssd"]}
    bound = max(bounds, key=lambda queue: bounds[queue])
    flops = costs.model_flops(e.cfg, a.tokens, costs.layer_pairs(e.cfg.layers, [a.seq] * (a.tokens // a.seq)))
    print(f"{'queue':10} {'bound s':>9} {'busy s':>9}")
    for queue in bounds:
        print(f"{queue:10} {bounds[queue]:9.3f} {at_work.get(queue, 0):9.3f}")
    result = {
        "bound_s": bounds[bound],
        "ratio": step_s / bounds[bound],
        "bound": bound,
        "ceilings": vars(rates),
        "queues": {k: {"bound_s": v, "busy_s": at_work.get(k, 0)} for k, v in bounds.items()} | {"measured": at_work},
        "tokens_per_s": a.tokens / step_s,
        "model_tflops": flops / step_s / 1e12,
    }
    print(
        f"step {step_s:.3f} s, lower bound {bounds[bound]:.3f} s ({bound}), ratio {result['ratio']:.3f}; "
        f"{result['model_tflops']:.1f} model TFLOP/s, {result['tokens_per_s']:.0f} tokens/s; "
        f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}"
    )
    return result


def against_prediction(a: Arguments, e: Engine, rates: Rates, run: Run, at_start: float) -> dict[str, Any]:
    """Prints and returns predicted and measured time and memory."""
    step_s, device = statistics.median(run.times), e.queues.device
    gpu, ram = memory_in_use(device, a.gpus)
    alive = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0
    estimated = {tier: nbytes / GIB for tier, nbytes in usage(e.geo, e.plan).items()}
    estimated["ram"] += CODE / GIB if device.type == "cuda" else 0.0
    batch = Batch(e.plan.tokens, a.seq, e.plan.n_micro, compared=bool(a.method))
    prediction = predict(e.cfg, e.plan, rates, batch)
    known = corrected(rates, prediction, run.warm, run.warm_s) if run.warm else rates
    again = predict(e.cfg, e.plan, known, batch).step_s
    by_tasks = f", corrected by a warm-up step {again:.3f} s ({again / step_s - 1:+.1%})" if run.warm else ""
    print(
        f"predicted {prediction.step_s:.3f} s ({prediction.step_s / step_s - 1:+.1%}){by_tasks}; "
        f"peaks GPU {gpu:.2f} GiB ({alive:.2f} live, predicted {estimated['gpu']:.2f}), RAM {ram - at_start:.2f} GiB "
        f"(predicted {estimated['ram']:.2f}) plus {at_start:.2f} of interpreter and libraries"
    )
    return {
        "peaks": {"gpu_gib": gpu, "gpu_alive_gib": alive, "ram_gib": ram, "rss_start_gib": at_start},
        "predicted_s": prediction.step_s,
        "corrected_s": again,
        "corrected": vars(known),
        "estimated_gib": estimated,
    }


# ---------------------------------------------------------------- command


def main(argv: list[str]) -> int:
    a = arguments(argv)
    os.environ.update(ENVIRONMENT | os.environ)  # before memory of a GPU is taken
    device = choose_device(a.device)
    dtype = "BF16" if device.type == "cuda" or a.dtype != "auto" else "F32"
    cfg = replace(shaped(a.model, a.layers, a.lora, a.base, a.experts), fp8=a.dtype == "fp8")
    cfg = aware(cfg, None) if a.merge_aware else cfg
    limits = memory_limits(device, a.gpu_memory, a.ram, choose_gpus(a.gpus, device))
    at_start = memory_in_use(device)[1]
    if a.store:
        a.store.mkdir(parents=True, exist_ok=True)
    rates = measure_rates(device, dtype, a.store, cfg.fp8, limits.gpus, cfg.scan)
    rates = replace(rates, peer=0.0) if "peers" in a.off else rates
    size_b = shapes.parameters(cfg) / 1e9
    what = f", LoRA {a.lora}" * bool(a.lora) + f", base in {a.base}" * bool(a.base) + ", merge-aware" * a.merge_aware
    what += ", fp8" * cfg.fp8 + f", {a.layers} layers" * bool(a.layers)
    print(f"{a.model}{what}, {size_b:.3f} B parameters, {a.tokens} tokens a step of {a.seq}, {device}, {dtype}")
    print("ceilings " + ", ".join(f"{k} {v:.4g}" for k, v in vars(rates).items() if k != "others"))
    plan = make_plan(a, cfg, dtype, limits, rates)
    slower = sustained_rates(cfg, plan, a.seq, device) if device.type == "cuda" and cfg.experts is None else {}
    forget_peaks(device)
    result = measure(a, cfg, plan, limits, rates, device, at_start)
    ceilings = blended(cfg, plan, a.tokens, a.seq, rates)
    result["sustained"] = {what: against(result, ceilings, what, rate) for what, rate in slower.items()}
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1))
    return 0


def arguments(argv: list[str]) -> Arguments:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=names())
    p.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--lora", type=int, default=0, help="rank of adapters on all linear layers; 0: all is trained")
    p.add_argument("--layers", type=int, default=0, help="the first so many of the model; 0: all")
    p.add_argument("--base", choices=("", *BASES), default="", help="frozen matrices in fewer bits, with --lora")
    p.add_argument("--experts", action="store_true", help="adapters on routed experts, too")
    p.add_argument("--merge-aware", action="store_true", help="packed matrices are rounded with their adapters")
    p.add_argument("--slices", type=int, default=0, help="that frozen experts of a layer come in; 0: as planned")
    p.add_argument("--micro", type=int, default=0, help="rows of a micro-batch; default: what fits, up to 16k tokens")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--gpu-memory", type=size, help="of each GPU")
    p.add_argument("--ram", type=size)
    p.add_argument("--store", type=Path, help="a folder on the SSD; without it the SSD is not used")
    tiers = ("auto", "gpu", "ram", "ssd", "state-ssd")
    p.add_argument("--placement", choices=tiers, default="auto", help="store everything in one tier")
    p.add_argument("--rule", action="store_true", help="the plan of the plain rule, without a search")
    p.add_argument("--plan", help="a plan as JSON or YAML, for --seq and --tokens as given")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--adam-bits", type=int, default=32, choices=(32, 16, 8))
    p.add_argument("--record", type=int, default=0, help="parameters of an optimizer record")
    p.add_argument(
        "--off", type=lambda t: t.split(","), default=[], help="techniques to leave out: " + ",".join(SWITCHES)
    )
    p.add_argument("--method", choices=METHODS, help="preference tuning of pairs, the reference pass apart")
    p.add_argument("--text", help="a text file whose bytes are the tokens")
    p.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    p.add_argument("--dtype", choices=("auto", "bf16", "fp8"), default="auto", help="bf16 on the CPU too; or fp8")
    p.add_argument("--json")
    p.add_argument("--trace")
    return p.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DoesNotFit as error:
        sys.exit(f"error: {error}")
