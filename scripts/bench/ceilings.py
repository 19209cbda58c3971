"""The ceilings of a machine, measured in a benchmark's run, and the floors of a step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import block_parts
import torch

from trireme.engine.lanes import READS, WRITES, Span
from trireme.engine.memory import DTYPE
from trireme.engine.plan import Plan
from trireme.engine.planner.probe import drive_rates, matmul_rate, processor_rates
from trireme.engine.planner.rates import Rates, rates_of
from trireme.models.config import ModelConfig


def measure_rates(device: torch.device, dtype: str, store: str | None) -> Rates:
    """Ceilings, by the probe of runs, before the engine takes memory."""
    found = {"matmul": matmul_rate(device, DTYPE[dtype])} | processor_rates(device, dtype)
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
    """Seconds of each lane at its ceiling, for a step. An SSD reads or writes, not both."""
    flops: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for s in spans:
        flops[s.lane] += s.flops
        moved[s.lane] += s.nbytes
    ssd = 0.0
    if ceilings.ssd_read:
        ssd += sum(moved[lane] for lane in READS) / ceilings.ssd_read
        ssd += sum(moved[lane] for lane in WRITES) / ceilings.ssd_write
    return {
        "compute": flops["compute"] / ceilings.matmul,
        "h2d": moved["h2d"] / ceilings.h2d,
        "d2h": moved["d2h"] / ceilings.d2h,
        "ssd": ssd,
        "cpu": adam_params / ceilings.adam,
    }


def held_rates(cfg: ModelConfig, plan: Plan, seq: int, device: torch.device) -> dict[str, float]:
    """FLOP/s under lasting load: further ceilings."""
    parts = block_parts.parts_rate(cfg, plan.tokens, seq, device)
    return {"one product": block_parts.product_rate(device), "a block's products and attention": parts}


def against(result: dict[str, Any], ceilings: Rates, what: str, rate: float) -> dict[str, float]:
    """Prints and returns floor and ratio at the `rate` of `what`."""
    lanes = {lane: times["floor_s"] for lane, times in result["lanes"].items() if lane != "measured"}
    lanes["compute"] *= ceilings.matmul / rate
    floor = max(lanes.values())
    ratio = result["step_s"] / floor
    print(f"of {what} the GPU holds {rate / 1e12:.0f} TFLOP/s: floor {floor:.3f} s, ratio {ratio:.3f}")
    return {"rate": rate, "floor_s": floor, "ratio": ratio}
