"""The peak rates of a machine, measured in a benchmark's run, and the lower bounds of a step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_parts
import torch

from trireme.engine.memory import DTYPE
from trireme.engine.plan import Plan
from trireme.engine.planner.host import gpus_from
from trireme.engine.planner.probe.compute import fp8_rate, matmul_rate, scan_shares
from trireme.engine.planner.probe.copies import several_rates
from trireme.engine.planner.probe.drive import drive_rates
from trireme.engine.planner.probe.processor import processor_rates
from trireme.engine.planner.rates import Rates, rates_of
from trireme.engine.queues.names import READS, WRITES, kind_of
from trireme.engine.queues.task import Task
from trireme.models.config import ModelConfig, Scan
from trireme.models.sizes import costs, measure


def measure_rates(
    device: torch.device,
    dtype: str,
    store: Path | None,
    fp8: bool = False,
    gpus: int = 1,
    scan: Scan | None = None,
) -> Rates:
    """Ceilings, by the probe of runs, before the engine takes memory."""
    rates = {"matmul": matmul_rate(device, DTYPE[dtype])} | processor_rates(device, dtype)
    if fp8:
        rates["fp8"] = fp8_rate(device)
    if scan and device.type == "cuda":
        rates |= scan_shares(device, DTYPE[dtype], scan, rates["matmul"])
    if gpus > 1 and device.type == "cuda":
        rates |= several_rates(gpus_from(device, gpus), 1 << 40)
    if store is not None:
        rates |= drive_rates(store)
    return rates_of(rates)


def forget_peaks(device: torch.device) -> None:
    """Resets memory peaks."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def lower_bounds(spans: Sequence[Task], ceilings: Rates, adam_params: float) -> dict[str, float]:
    """Seconds of each queue's work in a step at its ceiling, of the slowest GPU. An SSD reads or writes, not both."""
    flops, moved = Counter[str](), Counter[str]()
    for s in spans:
        flops[s.queue] += s.flops
        moved[s.queue] += s.nbytes

    def most(amounts: Counter[str], name: str) -> float:
        return max((n for queue, n in amounts.items() if kind_of(queue) == name), default=0)

    ssd = 0.0
    if ceilings.ssd_read:
        ssd += sum(moved[queue] for queue in READS) / ceilings.ssd_read
        ssd += sum(moved[queue] for queue in WRITES) / ceilings.ssd_write
    return {
        "compute": most(flops, "compute") / ceilings.matmul,
        "h2d": most(moved, "h2d") / ceilings.h2d,
        "d2h": most(moved, "d2h") / ceilings.d2h,
        "ssd": ssd,
        "cpu": adam_params / ceilings.adam,
    }


def blended(cfg: ModelConfig, plan: Plan, tokens: int, seq: int, rates: Rates) -> Rates:
    """`rates` with `adam` of the plan's moments, and `matmul` of a step's FLOPs, some of them in fp8 at its rate."""
    cfg, rates = plan.cut(cfg), rates.with_moments(plan.adam_bits)
    pairs, head = costs.layer_pairs(cfg.layers, [seq] * (tokens // seq)), cfg.n_units - 1
    flops = quick = 0.0
    for u in range(1, head + 1):
        names = frozenset(name for name, _ in plan.units[u].saved)
        for work in measure.work(cfg, u, tokens, pairs, names=names)[u == head :]:
            flops += sum(work.flops.values())
            quick += sum(n for kind, n in work.flops.items() if "fp8" in kind)
    return replace(rates, matmul=flops / ((flops - quick) / rates.matmul + quick / rates.fp8)) if quick else rates


def sustained_rates(cfg: ModelConfig, plan: Plan, seq: int, device: torch.device) -> dict[str, float]:
    """FLOP/s under sustained load: further ceilings."""
    parts = {"a block's GEMMs and attention": block_parts.parts_rate(cfg, plan.tokens, seq, device)}
    return parts if cfg.fp8 else {"one GEMM": block_parts.gemm_rate(device)} | parts


def against(result: dict[str, Any], ceilings: Rates, what: str, rate: float) -> dict[str, float]:
    """Prints and returns lower bound and ratio at the `rate` of `what`."""
    queues = {queue: times["bound_s"] for queue, times in result["queues"].items() if queue != "measured"}
    queues["compute"] *= ceilings.matmul / rate
    bound_s = max(queues.values())
    ratio = result["step_s"] / bound_s
    print(f"sustained rate of {what}: {rate / 1e12:.0f} TFLOP/s, lower bound {bound_s:.3f} s, ratio {ratio:.3f}")
    return {"rate": rate, "bound_s": bound_s, "ratio": ratio}
