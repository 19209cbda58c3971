"""Measures a training step against its floor: python scripts/bench/step.py llama-1.3b --gpu-memory 24GiB --ram 16GiB

Ceilings (matrix product, each direction of the bus, SSD, CPU AdamW) are measured in the same run. The floor of a lane
is what it has to do over its ceiling; the floor of the step is the largest, and `bound` is its lane.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import block_parts
import numpy as np
import torch
from bare_step import bare_step
from model_shapes import MODELS

from trireme.engine.amounts import size
from trireme.engine.buffers import usage
from trireme.engine.build import build, inputs
from trireme.engine.data.dataset import MicroBatch
from trireme.engine.geometry import Geometry
from trireme.engine.homes import Entry, Homes, Writer
from trireme.engine.lanes import READS, WRITES, InlineLanes, RealLanes, Span, busy, write_perfetto
from trireme.engine.memory import DTYPE, flat, views
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.choose import choose
from trireme.engine.planner.correct import corrected, measured
from trireme.engine.planner.host import choose_device, hold_to, memory_in_use, memory_limits
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.probe import drive_rates, matmul_rate, processor_rates
from trireme.engine.planner.rates import CODE, Rates, rates_of
from trireme.engine.planner.rule import Wanted, simple_plan, sizes_of
from trireme.engine.run.settle import record_size
from trireme.engine.step import Engine, train_step
from trireme.engine.updates import AdamW
from trireme.models import shapes
from trireme.models.config import ModelConfig
from trireme.models.rows import rope_tables
from trireme.storage.devices import open_device
from trireme.storage.layout import sequential
from trireme.storage.store import Store

SWITCHES = ("overlap", "prefetch", "vertical", "split", "pinning")


# ---------------------------------------------------------------- the machine's ceilings


def measure_rates(device: torch.device, dtype: str, store: str | None) -> Rates:
    """The ceilings of this machine, each alone, as a run's own probe finds them, before the engine takes its memory."""
    found = {"matmul": matmul_rate(device, DTYPE[dtype])} | processor_rates(device, dtype)
    if store is not None:
        found |= drive_rates(Path(store))
    return rates_of(found)


def forget_peaks(device: torch.device) -> None:
    """Starts the counting of memory peaks anew."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ---------------------------------------------------------------- what a step has to do


def floors(spans: list[Span], c: Rates, adam_params: float) -> dict[str, float]:
    """Seconds that each lane needs at its ceiling for the tasks of one step. An SSD reads or writes, not both."""
    flops, moved = Counter(), Counter()
    for s in spans:
        flops[s.lane] += s.flops
        moved[s.lane] += s.nbytes
    return {
        "compute": flops["compute"] / c.matmul,
        "h2d": moved["h2d"] / c.h2d,
        "d2h": moved["d2h"] / c.d2h,
        "ssd": sum(moved[lane] / c.ssd_read for lane in READS) + sum(moved[lane] / c.ssd_write for lane in WRITES)
        if c.ssd_read
        else 0.0,
        "cpu": adam_params / c.adam,
    }


def held_rates(cfg: ModelConfig, plan: Plan, seq: int, device: torch.device) -> dict[str, float]:
    """FLOP/s that the GPU holds, by what it computes: what a step may be measured against besides the ceiling."""
    return {"one product": block_parts.product_rate(device),
            "a block's products and attention": block_parts.parts_rate(cfg, plan.tokens, seq, device)}  # fmt: skip


def against(result: dict, c: Rates, what: str, rate: float) -> dict[str, float]:
    """Prints and returns the floor and the ratio if computation runs at `rate`, which the GPU holds at `what`."""
    lanes = {lane: times["floor_s"] for lane, times in result["lanes"].items() if lane != "measured"}
    lanes["compute"] *= c.matmul / rate
    floor = max(lanes.values())
    ratio = result["step_s"] / floor
    print(f"of {what} the GPU holds {rate / 1e12:.0f} TFLOP/s: floor {floor:.3f} s, ratio {ratio:.3f}")
    return {"rate": rate, "floor_s": floor, "ratio": ratio}


def random_homes(homes: Homes) -> None:
    """Random weights straight into their homes, moments zero: no checkpoint, no second copy."""
    tile = (torch.randn(1 << 24) * 0.02).to(DTYPE[homes.geo.dtype])
    for u, layout in enumerate(homes.geo.weights):
        with Writer(homes, Entry("weights", u)) as buffer:
            values = flat(buffer, homes.geo.dtype, homes.geo.numel[u])
            for a in range(0, len(values), len(tile)):
                part = values[a : a + len(tile)]
                part.copy_(tile[: len(part)])
            for name, tensor in views(layout, buffer).items():
                if tensor.dim() == 1:
                    tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        for r in range(len(homes.state[u])):
            with Writer(homes, Entry("state", u, r)) as buffer:
                buffer.zero_()


def make_batch(cfg: ModelConfig, tokens: int, seq: int, micro: int, seed: int, text: bytes | None) -> list[MicroBatch]:
    """`tokens` tokens in rows of `seq`, `micro` rows a micro-batch; bytes of a text, or random ids."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(tokens // seq):
        if text:
            at = random.integers(0, len(text) - seq)
            rows.append(np.frombuffer(text[at : at + seq], np.uint8).astype(np.int32))
        else:
            rows.append(random.integers(0, cfg.vocab, seq).astype(np.int32))
    batch = []
    for k in range(0, len(rows), micro):
        part = rows[k : k + micro]
        labels = [np.append(row[1:], np.int32(-100)) for row in part]
        batch.append(MicroBatch(np.concatenate(part), np.concatenate(labels), (seq,) * len(part)))
    return batch


def wanted_of(a, cfg: ModelConfig, dtype: str, limits: Limits) -> Wanted:
    """What the arguments ask of a plan."""
    rows = [a.micro] if a.micro else [r for r in (32, 16, 8, 4, 2, 1) if r * a.seq <= min(a.tokens, 16384)]
    return Wanted(
        sizes_of(rows, math.ceil(a.tokens / a.seq), a.seq),
        dtype=dtype,
        mode="forward" if a.clip else "backward",
        record=a.record or record_size(shapes.parameters(cfg), limits.host),
        adam_bits=a.adam_bits,
        homes=a.homes,
        on_cuda=dtype == "BF16",
        document=a.seq,
    )


def make_plan(a, cfg: ModelConfig, dtype: str, limits: Limits, rates: Rates) -> Plan:
    """The plan of a file; with --homes or --rule the plain rule's; else what a run on such a machine would choose.

    Ideas that are switched off are taken out of that plan.
    """
    wanted = wanted_of(a, cfg, dtype, limits)
    if a.plan:
        plan = Plan.load(Path(a.plan))
    elif a.rule or a.homes != "auto":
        plan = simple_plan(cfg, limits, wanted)
    else:
        choice = choose(cfg, limits, rates, wanted)
        for line in choice.because:
            print(f"because {line}")
        plan = choice.plan
    return replace(plan, window=1) if "prefetch" in a.off else plan


def without_split_master() -> None:
    """Makes every record of state carry a whole fp32 master, as other trainers' do: its high halves too.

    For the comparison only: they travel and take room, and the update goes on using the copy that is computed with.
    """
    parts = Geometry.state_parts

    def state_parts(geo: Geometry, n: int):
        found = parts(geo, n)
        first, low = found["low"]
        return found | {"high": (first + low.span, sequential([("high", "I16", (n,))]))}

    Geometry.state_parts = state_parts


# ---------------------------------------------------------------- the run


class Run(NamedTuple):
    """The seconds of each timed step and of the one that was traced before, each step's loss, both steps' spans."""

    times: list[float]
    warm_s: float
    losses: list[float]
    warm: list[Span]
    last: list[Span]


def run_steps(a, e: Engine, device: torch.device, text: bytes | None) -> Run:
    """Warms up, then times steps. The last but one of warm-up is traced between two drains, as a run's second is."""
    cfg, tables = e.cfg, rope_tables(e.cfg, a.seq, device)
    micro = e.plan.tokens // a.seq
    times, losses, warm = [], [], []
    for step in range(1, a.warmup + a.steps + 1):
        batch = make_batch(cfg, a.tokens, a.seq, micro, step, text)
        start = time.perf_counter()
        e.lanes.tracing = step in (a.warmup - 1, a.warmup + a.steps)
        if a.bare:
            stats = bare_step(e, [inputs(cfg, mb, tables, device) for mb in batch], step, a.lr)
        elif "vertical" in a.off:
            stats = _horizontal(e, batch, tables, device, step, a.lr)
        else:
            stats = train_step(e, [inputs(cfg, mb, tables, device) for mb in batch], step, a.lr)
        times.append(time.perf_counter() - start)
        losses.append(stats.loss)
        print(f"step {step}: {times[-1]:.3f} s, loss {stats.loss:.4f}, norm {stats.grad_norm:.3f}", flush=True)
        if step in (a.warmup - 2, a.warmup - 1):
            e.lanes.drain()
            warm = e.lanes.trace()
    e.lanes.tracing = False
    start = time.perf_counter()
    e.optimizer.flush()
    e.lanes.drain()
    print(f"last updates: {time.perf_counter() - start:.3f} s")
    return Run(times[a.warmup :], times[a.warmup - 2], losses, warm, e.lanes.trace())


def _horizontal(e: Engine, batch, tables, device, step: int, lr: float):
    """What other trainers do: forward and backward of one micro-batch after another, weights streamed for each.

    For the comparison only: each micro-batch is a step of its own to the engine, and only the last one updates.
    """
    for k, mb in enumerate(batch):
        stats = train_step(e, [inputs(e.cfg, mb, tables, device)], step, lr)
        if k + 1 < len(batch):
            e.gradients.discard()
    return stats


def main(argv: list[str]) -> int:
    a = arguments(argv)
    device = choose_device(a.device)
    dtype = "BF16" if device.type == "cuda" or a.bf16 else "F32"
    cfg = MODELS[a.model]
    if "split" in a.off and dtype == "BF16":
        without_split_master()
    limits = memory_limits(device, a.gpu_memory, a.ram)
    at_start = memory_in_use(device)[1]
    if a.store:
        Path(a.store).mkdir(parents=True, exist_ok=True)
    rates = measure_rates(device, dtype, a.store)
    size_b = shapes.parameters(cfg) / 1e9
    print(f"{a.model}, {size_b:.3f} B parameters, {a.tokens} tokens a step of {a.seq}, {device}, {dtype}")
    print("ceilings " + ", ".join(f"{k} {v:.4g}" for k, v in vars(rates).items()))
    plan = make_plan(a, cfg, dtype, limits, rates)
    slower = held_rates(cfg, plan, a.seq, device) if device.type == "cuda" and not a.bare else {}
    forget_peaks(device)
    result = measure(a, cfg, plan, limits, rates, device, at_start)
    result["held"] = {what: against(result, rates, what, rate) for what, rate in slower.items()}
    if a.json:
        Path(a.json).write_text(json.dumps(result, indent=1))
    return 0


def measure(
    a, cfg: ModelConfig, plan: Plan, limits: Limits, rates: Rates, device: torch.device, at_start: float
) -> dict:
    """Trains by a plan as long as the arguments say, on random weights; prints and returns what it took.

    `at_start`: GiB of RAM resident before. All memory is given back.
    """
    torch.manual_seed(0)
    folder = tempfile.TemporaryDirectory(dir=a.store) if a.store else None
    store = Store.create([open_device(folder.name)]) if folder else None
    lanes = (InlineLanes if "overlap" in a.off else RealLanes)(device)
    start = time.perf_counter()
    hold_to(limits, device)
    adamw = AdamW(max_grad_norm=a.clip)
    e = build(cfg, plan, limits, lanes, adamw=adamw, store=store, pinned="pinning" not in a.off)
    for line in e.memory.describe():
        print(line)
    if store is not None:
        for shard in e.homes.shards():
            if e.homes.tier(shard.entry) == "ssd":
                store.add(shard.name, shard.layout)
        e.claim_scratch(store.devices)
    random_homes(e.homes)
    print(f"set-up {time.perf_counter() - start:.1f} s; {plan.n_micro} micro-batches of {plan.tokens} tokens; "
          f"window {plan.window}, state slots {plan.state_slots}, mode {plan.mode}", flush=True)  # fmt: skip
    text = Path(a.text).read_bytes() if a.text else None
    run = run_steps(a, e, device, text)
    result = summary(a, e, rates, at_start, run) | {"limits": asdict(limits)}
    if a.trace:
        write_perfetto(Path(a.trace), run.last)
    lanes.close()
    e.close()
    if store is not None:
        store.close()
        folder.cleanup()
    return result


def summary(a, e: Engine, c: Rates, at_start: float, run: Run) -> dict:
    """Prints the table and returns it. `at_start`: GiB of RAM resident before the engine was built."""
    cfg, device, times, losses, spans = e.cfg, e.memory.device, run.times, run.losses, run.last
    on_cpu = sum(n for n, u in zip(e.geo.numel, e.plan.units, strict=True) if u.state != "gpu")
    step_s = statistics.median(times)
    if a.bare:
        print(f"step {step_s:.3f} s without the engine's machinery; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        return {"step_s": step_s, "losses": losses}
    floor, at_work = floors(spans, c, on_cpu), busy(spans) | {"ssd": measured(spans)["ssd"]}
    bound = max(floor, key=floor.get)
    flops = shapes.model_flops(cfg, a.tokens, shapes.attended_pairs([a.seq] * (a.tokens // a.seq), cfg.window))
    gpu, ram = memory_in_use(device)
    promised = {tier: nbytes / 2**30 for tier, nbytes in usage(e.geo, e.plan).items()}
    promised["host"] += CODE / 2**30 if device.type == "cuda" else 0.0
    batch = Batch(e.plan.tokens, a.seq, e.plan.n_micro)
    found = predict(cfg, e.plan, c, batch)
    predicted, known = found.step_s, corrected(c, found, run.warm, run.warm_s) if run.warm else c
    again = predict(cfg, e.plan, known, batch).step_s
    print(f"{'lane':10} {'floor s':>9} {'busy s':>9}")
    for lane in floor:
        print(f"{lane:10} {floor[lane]:9.3f} {at_work.get(lane, 0):9.3f}")
    print(f"step {step_s:.3f} s, floor {floor[bound]:.3f} s ({bound}), ratio {step_s / floor[bound]:.3f}; "
          f"{flops / step_s / 1e12:.1f} model TFLOP/s, {a.tokens / step_s:.0f} tokens/s; "
          f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")  # fmt: skip
    print(f"predicted {predicted:.3f} s ({predicted / step_s - 1:+.1%}), by the tasks of a step of warm-up "
          f"{again:.3f} s ({again / step_s - 1:+.1%}); peaks GPU {gpu:.2f} GiB (predicted "
          f"{promised['gpu']:.2f}), RAM {ram - at_start:.2f} GiB (predicted {promised['host']:.2f}) beside "
          f"{at_start:.2f} of interpreter and libraries")  # fmt: skip
    return {
        "model": a.model, "tokens": a.tokens, "step_s": step_s, "steps_s": times, "floor_s": floor[bound],
        "ratio": step_s / floor[bound], "bound": bound, "ceilings": vars(c),
        "lanes": {k: {"floor_s": v, "busy_s": at_work.get(k, 0)} for k, v in floor.items()} | {"measured": at_work},
        "peaks": {"gpu_gib": gpu, "ram_gib": ram, "rss_start_gib": at_start}, "predicted_s": predicted,
        "corrected_s": again, "corrected": vars(known), "promised_gib": promised, "tokens_per_s": a.tokens / step_s,
        "model_tflops": flops / step_s / 1e12, "losses": losses, "seq": a.seq, "plan": asdict(e.plan),
    }  # fmt: skip


def arguments(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=MODELS)
    p.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--micro", type=int, default=0, help="rows of a micro-batch; default: what fits, up to 16k tokens")
    p.add_argument("--gpu-memory", type=size)
    p.add_argument("--ram", type=size)
    p.add_argument("--store", help="a folder on the SSD; without it the SSD is not used")
    p.add_argument(
        "--homes", choices=("auto", "gpu", "host", "ssd", "state-ssd"), default="auto", help="force all homes to a tier"
    )
    p.add_argument("--rule", action="store_true", help="the plain rule's plan rather than the fastest that is found")
    p.add_argument("--plan", help="a plan as JSON or YAML, for --seq and --tokens as given")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--adam-bits", type=int, default=32, choices=(32, 16, 8))
    p.add_argument("--record", type=int, default=0, help="parameters of an optimizer record")
    p.add_argument("--off", type=lambda t: t.split(","), default=[], help="ideas to switch off: " + ",".join(SWITCHES))
    p.add_argument("--bare", action="store_true", help="plain calls without the engine's machinery, all on the GPU")
    p.add_argument("--text", help="a text file whose bytes are the tokens")
    p.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    p.add_argument("--bf16", action="store_true", help="bf16 on the CPU too")
    p.add_argument("--json")
    p.add_argument("--trace")
    return p.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DoesNotFit as error:
        sys.exit(f"error: {error}")
