"""Estimated seconds of each part of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trireme.engine.plan import Plan, Tier
from trireme.engine.planner import probe
from trireme.engine.planner.clock import Part, Times
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.predict import Prediction, predict_evaluation
from trireme.engine.planner.rates import DRIVES
from trireme.models.config import ModelConfig, numbers
from trireme.storage.files import existing

# Seconds beyond rates, medians of runs on an H200 (LLaMA of 0.15 to 6.7 B).
NEW, SOME, KNOWN = 9.5, 4.0, 1.0  # of compilation: Triton's cache has no model's kernels; has another's; has all
ENTRIES = 20  # entries in Triton's cache: a probe leaves 3, a model about 40
FIRST: Times = {"evaluations": 0.2, "samples": 0.3}  # on a GPU the first time: a pass without backward
FIXED, CLOSING = 0.1, 0.25  # of files written and made durable; of the end: threads, pinned memory, the store
LOADING, OPENED = 1.7e9, 0.2  # bytes/s of values from a checkpoint to their placement, at most; seconds beside
COPIED = 4e9  # bytes/s of a copy from RAM or a GPU to RAM that is not pinned
SAMPLED = 40  # kernels of a block for a token that is sampled, 0.65 ms
OPS = 4  # operations of torch on a CPU that take the interpreter as long as a task
AGAIN = 0.5  # of planning before the first step: plans are sought again after the second
LARGE = 1 << 28  # bytes of a checkpoint whose export tells a drive's rate


@dataclass(frozen=True)
class Events:
    """What a run does beside its steps."""

    evaluations: int = 0
    held_out: int = 0  # sequences of each
    reference: int = 0  # sequences of a pass before training
    exports: int = 1  # the result, the best so far
    snapshots: int = 0
    samples: int = 0
    tokens: int = 0  # of each
    longest: float = math.inf  # seconds of each


def foretold(f: Forecast, steps: int, events: Events, known: Times | None = None) -> dict[Part, float]:
    """Seconds of each part but the compilation. All but the steps' are floors: bytes and FLOPs over rates.

    `known`: seconds of one event of a part, in place of a floor.
    """
    twice = 1 / _write(f) + 1 / _read(f) + 1 / COPIED  # written and read back, from where they are stored
    each: dict[Part, float] = {
        "evaluations": evaluation_s(f, events.held_out) + f.kept / min(COPIED, f.machine.rates.d2h),
        "samples": min(events.longest, events.tokens * token_s(f)) if events.samples else 0.0,
        "snapshots": FIXED + unsaved(f) / _write(f),
        "export": FIXED + f.files.export * twice,
    }
    each |= known or {}
    first = {part: s for part, s in FIRST.items() if f.machine.rates.host and part not in (known or {})}  # of a GPU
    free = f.machine.rates.ssd_free
    many = lambda part, times: times * each[part] + (times > 0) * first.get(part, 0.0)
    return {
        "load": OPENED + max(f.files.export, f.frozen_read) / min(LOADING, _read(f)) + f.pinning_s(),
        "reference": evaluation_s(f, events.reference),
        "steps": steps * f.step.step_s,
        "evaluations": events.evaluations * each["evaluations"]
        + (events.evaluations > 0) * first.get("evaluations", 0),
        "samples": many("samples", events.samples),
        "snapshots": events.snapshots * each["snapshots"],
        "export": events.exports * each["export"] + f.files.merged * twice,
        "close": CLOSING + (removed(f, events.snapshots) / free if free else 0.0),
    }


def _read(f: Forecast) -> float:
    """Bytes/s of the drives, or of a usual one."""
    return f.machine.rates.ssd_read or DRIVES["gen4"].read


def _write(f: Forecast) -> float:
    return f.machine.rates.ssd_write or DRIVES["gen4"].write


def export_s(f: Forecast, folder: Path) -> Times:
    """Seconds of an export at the rate of the last to the drive of `folder`, if there was one."""
    found = probe.remembered(_exported(f, folder))
    return {"export": FIXED + f.files.export / found["rate"]} if found else {}


def note_export(f: Forecast, folder: Path, seconds: float) -> None:
    """Remembers the rate of a checkpoint written to `folder` and read back."""
    if f.files.export >= LARGE:
        probe.remember(_exported(f, folder), {"rate": f.files.export / seconds})


def _exported(f: Forecast, folder: Path) -> dict[str, Any]:
    return probe.drive(existing(folder)) | {"what": "exports", "from the SSD": f.plan.stored_on_ssd}


def unsaved(f: Forecast) -> int:
    """Bytes that a snapshot writes, and does not link."""
    geo, plan = f.geo, f.plan
    weights = sum(geo.weights[u].span for u, unit in enumerate(plan.units) if unit.weights != "ssd")
    return weights + sum(geo.state_span(u, plan.record) for u, unit in enumerate(plan.units) if unit.state != "ssd")


def written(f: Forecast, steps: int, events: Events) -> dict[str, int]:
    """Bytes that the run writes to drives, by what writes them."""
    part, evaluated = f.disk_parts(), 0.0
    if events.evaluations and events.held_out and f.plan.uses("ssd"):
        groups, found = _evaluation(f, events.held_out)
        evaluated = events.evaluations * groups * found.ssd_written
    return {
        "steps": steps * f.step.ssd_written,
        "evaluations": math.ceil(evaluated),
        "snapshots": events.snapshots * unsaved(f),
        "checkpoints": events.exports * (part["export"] - f.files.merged) + f.files.merged,
        "start": f.stored() - unsaved(f) + part["frozen"],
    }


def removed(f: Forecast, snapshots: int) -> int:
    """Bytes of the store at the end: what is placed on the SSD, and what the last snapshots keep."""
    return f.stored() - unsaved(f) + min(snapshots, f.files.keep) * f.stored()


def evaluation_s(f: Forecast, sequences: int) -> float:
    """Seconds of an evaluation, in groups of a step's sequences."""
    if not sequences:
        return 0.0
    groups, found = _evaluation(f, sequences)
    return groups * found.step_s


def _evaluation(f: Forecast, sequences: int) -> tuple[float, Prediction]:
    """Groups of sequences, and one of them simulated."""
    work = replace(f.work, sequences=min(sequences, f.work.sequences))
    batch = replace(work.batch(f.plan), compared=False)
    return sequences / work.sequences, predict_evaluation(f.cfg, f.plan, f.machine.rates, batch)


def token_s(f: Forecast) -> float:
    """Of a sampled token: weights read once, kernels started."""
    rates, resident = f.machine.rates, sum(nbytes for tier, nbytes in _stored(f) if tier == "gpu")
    each = max(rates.host or rates.task / OPS, rates.launch)
    started = f.cfg.n_layers * SAMPLED * each + 2 * f.cfg.n_units * rates.task  # waits for a unit, and has read it
    return max(resident / rates.copy + sum(_streamed(f).values()), started)


def _streamed(f: Forecast) -> dict[str, float]:
    """Seconds to bring all weights once."""
    up = sum(nbytes for tier, nbytes in _stored(f) if tier != "gpu")
    read = sum(nbytes for tier, nbytes in _stored(f) if tier == "ssd")
    return {"h2d": up / f.machine.rates.h2d / f.plan.gpus, "ssd": read / _read(f)}


def _stored(f: Forecast) -> Iterator[tuple[Tier, int]]:
    """(tier, bytes) of trained and frozen weights, by the tier that a pass takes them from."""
    for u, unit in enumerate(f.plan.units):
        yield "gpu" if unit.resident else unit.weights, f.geo.weights[u].span
        yield unit.base, f.geo.base_bytes[u]


# ---------------------------------------------------------------- the first step


def compile_s(cfg: ModelConfig, plan: Plan, device: torch.device | None, loading: float = 0.0) -> float:
    """Seconds of the first step beyond the second; 0 on a CPU. Compilation begins under `loading` seconds.

    KNOWN or as measured if this machine has run the model with Triton's present cache; `device` None: it has not.
    """
    if device is not None and device.type != "cuda":
        return 0.0
    found = probe.remembered(_forms(cfg, plan, device)) if device else None
    return found["seconds"] if found else max(KNOWN, (SOME if device and _cached() else NEW) - loading)


def note_compilation(cfg: ModelConfig, plan: Plan, device: torch.device, seconds: float) -> None:
    """Remembers what the next run's first step will take, after one that took `seconds` more than its second."""
    known = _forms(cfg, plan, device)
    probe.remember(known, {"seconds": seconds if probe.remembered(known) else min(seconds, KNOWN)})


def _forms(cfg: ModelConfig, plan: Plan, device: torch.device) -> dict[str, Any]:
    """All that kernels' forms depend on, and Triton's cache folder."""
    return probe.chips(device, plan.dtype) | {
        "model": {name: value for name, value in numbers(cfg).items() if name != "n_layers"},
        "micro-batch": plan.tokens,
        "kernels": _cache_folder(),
    }


def _cached() -> bool:
    """Whether Triton's cache has kernels of a model."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return folder.exists() and len(list(folder.iterdir())) >= ENTRIES


def _cache_folder() -> list[Any]:
    """Triton's version and cache folder; another inode once it was removed."""
    import triton
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return [triton.__version__, str(folder), folder.stat().st_ino if folder.exists() else 0]
