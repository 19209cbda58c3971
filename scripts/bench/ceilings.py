"""The peak rates of a machine, measured in a benchmark's run, and the lower bounds of a step."""

from __future__ import annotations

import bisect
import gc
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_parts
import torch

from trireme.engine.lanes.names import READS, WRITES, kind_of
from trireme.engine.lanes.trace import Span, busy
from trireme.engine.memory import DTYPE
from trireme.engine.plan import Plan
from trireme.engine.planner.probe import drive_rates, fp8_rate, matmul_rate, processor_rates
from trireme.engine.planner.rates import Rates, rates_of
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, shapes


def measure_rates(device: torch.device, dtype: str, store: str | None, fp8: bool = False) -> Rates:
    """Ceilings, by the probe of runs, before the engine takes memory."""
    found = {"matmul": matmul_rate(device, DTYPE[dtype])} | processor_rates(device, dtype)
    if fp8:
        found["fp8"] = fp8_rate(device)
    if store is not None:
        found |= drive_rates(Path(store))
    return rates_of(found)


def forget_peaks(device: torch.device) -> None:
    """Resets memory peaks."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def floors(spans: Sequence[Span], ceilings: Rates, adam_params: float) -> dict[str, float]:
    """Seconds of each lane at its ceiling, for a step: of GPUs the longest. An SSD reads or writes, not both."""
    flops: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for s in spans:
        flops[s.lane] += s.flops
        moved[s.lane] += s.nbytes

    def most(amounts: Counter[str], name: str) -> float:
        return max((n for lane, n in amounts.items() if kind_of(lane) == name), default=0)

    ssd = 0.0
    if ceilings.ssd_read:
        ssd += sum(moved[lane] for lane in READS) / ceilings.ssd_read
        ssd += sum(moved[lane] for lane in WRITES) / ceilings.ssd_write
    return {
        "compute": most(flops, "compute") / ceilings.matmul,
        "h2d": most(moved, "h2d") / ceilings.h2d,
        "d2h": most(moved, "d2h") / ceilings.d2h,
        "ssd": ssd,
        "cpu": adam_params / ceilings.adam,
    }


def blended(cfg: ModelConfig, plan: Plan, tokens: int, seq: int, rates: Rates) -> Rates:
    """`rates` with `matmul` that of a step's FLOPs, some of them in fp8 at its rate."""
    cfg = plan.cut(cfg)
    pairs, head = costs.attended_pairs([seq] * (tokens // seq), cfg.window), cfg.n_units - 1
    passes = costs.forward_flops, costs.backward_flops
    flops = sum(count(cfg, u, tokens, pairs) for u in range(1, head + 1) for count in passes)
    quick = 0
    for u in range(1, head):
        kept = frozenset(name for name, _ in plan.units[u].saved)
        flops += costs.recompute_flops(cfg, kept, tokens, pairs, shapes.kind(cfg, u))
        quick += sum(costs.in_fp8_work(cfg, u, kept, tokens)[:3])
    return replace(rates, matmul=flops / ((flops - quick) / rates.matmul + quick / rates.fp8)) if quick else rates


def held_rates(cfg: ModelConfig, plan: Plan, seq: int, device: torch.device) -> dict[str, float]:
    """FLOP/s under lasting load: further ceilings."""
    parts = {"a block's products and attention": block_parts.parts_rate(cfg, plan.tokens, seq, device)}
    return parts if cfg.fp8 else {"one product": block_parts.product_rate(device)} | parts


def against(result: dict[str, Any], ceilings: Rates, what: str, rate: float) -> dict[str, float]:
    """Prints and returns floor and ratio at the `rate` of `what`."""
    lanes = {lane: times["floor_s"] for lane, times in result["lanes"].items() if lane != "measured"}
    lanes["compute"] *= ceilings.matmul / rate
    floor = max(lanes.values())
    ratio = result["step_s"] / floor
    print(f"of {what} the GPU holds {rate / 1e12:.0f} TFLOP/s: floor {floor:.3f} s, ratio {ratio:.3f}")
    return {"rate": rate, "floor_s": floor, "ratio": ratio}


SOON = 2e-4  # seconds from the end of what a task waits for to its start


def idle(spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """Seconds that each lane is idle between its tasks, by the lane that it waits for; "host": for none.

    The last task that is over before an idle lane's next one begins, and SOON before at most, is what it waits for.
    """
    ends = sorted((s.end, s.lane) for s in spans)
    found: dict[str, dict[str, float]] = {}
    for lane in dict.fromkeys(s.lane for s in spans):
        end, causes = 0.0, defaultdict[str, float](float)
        for span in sorted((s for s in spans if s.lane == lane), key=lambda s: s.start):
            if end and span.start > end:
                before = (ends[k] for k in range(bisect.bisect(ends, (span.start, "~")) - 1, -1, -1))
                last, cause = next(((at, other) for at, other in before if other != lane), (0.0, ""))
                causes[cause if last > max(end, span.start - SOON) else "host"] += span.start - end
            end = max(end, span.end)
        found[lane] = dict(causes)
    return found


def print_lanes(what: str, spans: Sequence[Span]) -> None:
    """Each lane at work in a traced step, and idle by what it waits for."""
    at_work, waits = busy(spans), idle(spans)
    print(f"{what}: {max(s.end for s in spans) - min(s.start for s in spans):.4f} s from the first task to the last")
    for lane, seconds in at_work.items():
        causes = sorted(waits[lane].items(), key=lambda cause: -cause[1])
        said = ", ".join(f"{cause} {idle_s:.4f}" for cause, idle_s in causes if idle_s >= 5e-5)
        print(f"  {lane:12} at work {seconds:8.4f} s, idle between tasks {sum(waits[lane].values()):8.4f} s: {said}")
