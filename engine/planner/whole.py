"""Estimated seconds of each part of a whole run: from the simulated step, one simulated evaluation, and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trireme.engine.buffers import usage
from trireme.engine.planner.clock import RunPart, Times
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.predict import Prediction, predict_evaluation
from trireme.engine.planner.rates import DRIVES, Rates

# Seconds that do not follow from rates; medians of runs on an H200 (LLaMA of 0.15 to 6.7 B).
NEW, KNOWN = 9.5, 1.0  # the first step with kernels to compile, and where a run has compiled them before
ENTRIES = 20  # of Triton's cache from which it has a model's kernels: a probe leaves 3, a model about 40
FIXED, CLOSING = 0.1, 0.25  # to write files durably; to end threads, free pinned memory, close the store
LOADING, OPENED = 1.7e9, 0.2  # bytes/s of values from a checkpoint to their placement, at most; seconds in addition
COPIED = 4e9  # bytes/s of a copy from RAM or a GPU to RAM that is not pinned
TOKEN = 40  # kernels of a block for a sampled token, which take 0.65 ms


@dataclass(frozen=True)
class Events:
    """The parts of a run other than its steps."""

    evaluations: int = 0
    held_out: int = 0  # sequences of each
    reference: int = 0  # sequences of a pass before training
    exports: int = 1  # the result, the best so far
    snapshots: int = 0
    samples: int = 0
    tokens: int = 0  # of each
    longest: float = math.inf  # seconds of each


def estimated_parts(f: Forecast, steps: int, events: Events, known: Times | None = None) -> dict[RunPart, float]:
    """Seconds of each part except compilation.

    `known`: measured seconds of one event of a part, which replace the estimate.
    """
    known = known or {}

    def all_of(part: RunPart, times: int, estimate: Callable[[], float]) -> float:
        return times * (known[part] if part in known else estimate()) if times else 0.0

    read, write, pinning_s = _rates(f).ssd_read, _rates(f).ssd_write, usage(f.geo, f.plan)["ram"] / _rates(f).pin
    files_s = lambda nbytes: nbytes * (1 / write + 1 / read + 1 / COPIED)  # made from RAM, written, read back
    return {
        "load": OPENED + max(f.files.export, f.frozen_read) / min(LOADING, read) + pinning_s,
        "reference": evaluation_s(f, events.reference),
        "steps": steps * f.step.step_s,
        "evaluations": all_of("evaluations", events.evaluations, lambda: evaluation_s(f, events.held_out)),
        "samples": all_of("samples", events.samples, lambda: min(events.longest, events.tokens * token_s(f))),
        "snapshots": all_of("snapshots", events.snapshots, lambda: FIXED + f.unsaved() / write),
        "export": all_of("export", events.exports, lambda: FIXED + _gathered_s(f) + files_s(f.files.export))
        + files_s(f.files.merged),
        "close": CLOSING,
    }


def _rates(f: Forecast) -> Rates:
    """The machine's rates, with those of a usual drive if it has none."""
    rates, usual = f.machine.rates, DRIVES["gen4"]
    return rates if rates.has_drive else replace(rates, ssd_read=usual.read, ssd_write=usual.write)


def _gathered_s(f: Forecast) -> float:
    """Seconds to bring the trained weights to RAM, with low halves if the export is exact."""
    rates, plan = _rates(f), f.plan
    speed = {"gpu": rates.d2h, "ram": math.inf, "ssd": rates.ssd_read}
    exact, seconds = f.files.exact and plan.dtype == "BF16", 0.0
    for unit, layout, numel in zip(plan.units, f.geo.weights, f.geo.numel, strict=True):
        seconds += layout.span / speed[unit.weights] + exact * 2 * numel / speed[unit.state]
        seconds += exact * 2 * numel * (1 - 1 / plan.hosts) / rates.net
    return seconds


def written_bytes(f: Forecast, steps: int, events: Events) -> dict[str, int]:
    """Bytes that the run writes to drives, by what writes them."""
    part, evaluated = f.disk_parts(), 0.0
    if events.evaluations and events.held_out and f.plan.uses_ssd:
        groups, step = _evaluation(f, events.held_out)
        evaluated = events.evaluations * groups * step.ssd_written
    return {
        "steps": steps * f.step.ssd_written,
        "evaluations": math.ceil(evaluated),
        "snapshots": events.snapshots * f.unsaved(),
        "checkpoints": events.exports * (part["export"] - f.files.merged) + f.files.merged,
        "start": f.stored() - f.unsaved() + part["frozen"],
    }


def evaluation_s(f: Forecast, sequences: int) -> float:
    """Seconds of an evaluation, in groups of a step's sequences."""
    if not sequences:
        return 0.0
    groups, step = _evaluation(f, sequences)
    return groups * step.step_s


def _evaluation(f: Forecast, sequences: int) -> tuple[float, Prediction]:
    """(number of groups of sequences, the prediction of one)."""
    work = replace(f.work, sequences=min(sequences, f.work.sequences))
    batch = replace(work.batch(f.plan), compared=False)
    return sequences / work.sequences, predict_evaluation(f.cfg, f.plan, _rates(f), batch)


def token_s(f: Forecast) -> float:
    """Seconds of a sampled token: all weights are streamed as in an evaluation, and read by the GPU."""
    busy, read = _evaluation(f, 1)[1].busy, f.stored_weights / f.machine.rates.copy
    return max(read, TOKEN * f.cfg.n_layers * f.machine.rates.launch_overhead, busy["h2d"], busy["ssd"])


# ---------------------------------------------------------------- the first step


def compile_s(device: torch.device | None) -> float:
    """Seconds that the first step takes longer than the second; 0 on a CPU. Kernels that Triton's cache has are only
    loaded; with `device` None it has none.
    """
    if device is not None and device.type != "cuda":
        return 0.0
    from triton import knobs  # late: it takes a second

    folder = Path(knobs.cache.dir)
    return KNOWN if device and folder.exists() and len(list(folder.iterdir())) >= ENTRIES else NEW
