"""Estimated seconds of each part of a whole run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.engine.between import Reader, save_to_store
from trireme.engine.build import Engine, Inputs
from trireme.engine.exchange import Kept, fetch
from trireme.engine.memory import NOTHING
from trireme.engine.plan import Plan
from trireme.engine.planner.clock import Part, Times
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.predict import Batch, Prediction, predict_between
from trireme.engine.planner.probe import cache, drive
from trireme.engine.planner.rates import DRIVES
from trireme.engine.step import evaluate, stream_layers
from trireme.models.config import ModelConfig, numbers
from trireme.storage.files import existing

# Seconds that do not follow from rates; medians of runs on an H200 (LLaMA of 0.15 to 6.7 B).
# Compilation, if Triton's cache has no model's kernels, those of another model, all kernels:
NEW, SOME, KNOWN = 9.5, 4.0, 1.0
ENTRIES = 20  # entries of Triton's cache from which it has a model's kernels: a probe leaves 3, a model about 40
FIRST: Times = {"evaluations": 0.2, "samples": 0.3}  # additional, the first time on a GPU
FIXED, CLOSING = 0.1, 0.25  # to write files durably; to end threads, free pinned memory, close the store
LOADING, OPENED = 1.7e9, 0.2  # bytes/s of values from a checkpoint to their placement, at most; seconds in addition
COPIED = 4e9  # bytes/s of a copy from RAM or a GPU to RAM that is not pinned
AGAIN = 0.5  # share of the planning time for the second search, after the traced step
LARGE = 1 << 28  # bytes of a checkpoint from which the rate of its export is stored


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


def estimated_parts(f: Forecast, steps: int, events: Events, known: Times | None = None) -> dict[Part, float]:
    """Seconds of each part except compilation. Steps, and the work between them, are simulated with their own code.

    `known`: measured seconds of one event of a part, which replace the simulation.
    """
    known = known or {}
    first = {part: s for part, s in FIRST.items() if f.machine.rates.host and part not in known}  # of a GPU

    def all_of(part: Part, times: int, each: Callable[[], float]) -> float:
        if not times:
            return 0.0
        return times * (known[part] if part in known else each()) + first.get(part, 0.0)

    free = f.machine.rates.ssd_free
    return {
        "load": OPENED + max(f.files.export, f.frozen_read) / min(LOADING, _read(f)) + f.pinning_s(),
        "reference": evaluation_s(f, events.reference),
        "steps": steps * f.step.step_s,
        "evaluations": all_of("evaluations", events.evaluations, lambda: evaluation_s(f, events.held_out) + _kept_s(f)),
        "samples": all_of("samples", events.samples, lambda: min(events.longest, events.tokens * token_s(f))),
        "snapshots": all_of("snapshots", events.snapshots, lambda: FIXED + snapshot(f).step_s),
        "export": all_of("export", events.exports, lambda: FIXED + _export_s(f)) + _files_s(f, f.files.merged),
        "close": CLOSING + (removed(f, events.snapshots) / free if free else 0.0),
    }


def _read(f: Forecast) -> float:
    """Bytes/s that the drives read; of a usual drive if there is none."""
    return f.machine.rates.ssd_read or DRIVES["gen4"].read


def _write(f: Forecast) -> float:
    """Bytes/s that the drives write."""
    return f.machine.rates.ssd_write or DRIVES["gen4"].write


def export_s(f: Forecast, folder: Path) -> Times:
    """Seconds of an export at the rate of the last one to the drive of `folder`; empty if there was none."""
    found = cache.remembered(_exported(f, folder))
    return {"export": FIXED + f.files.export / found["rate"]} if found else {}


def note_export(f: Forecast, folder: Path, seconds: float) -> None:
    """Stores the rate at which a checkpoint was written to `folder` and read back."""
    if f.files.export >= LARGE:
        cache.remember(_exported(f, folder), {"rate": f.files.export / seconds})


def _exported(f: Forecast, folder: Path) -> dict[str, Any]:
    return drive.identity(existing(folder)) | {"what": "exports", "from the SSD": f.plan.stored_on_ssd}


def snapshot(f: Forecast) -> Prediction:
    """The prediction of a snapshot: what is not on the drives is written, the rest is linked."""
    return _between(f, lambda e, _: save_to_store(e.placement))


def _between(
    f: Forecast, issue: Callable[[Engine, Sequence[Inputs]], object], batch: Batch | None = None
) -> Prediction:
    """Simulates work between steps on the machine; without a drive, on one with a usual drive."""
    rates = f.machine.rates.change(ssd_read=_read(f), ssd_write=_write(f))
    return predict_between(f.cfg, f.plan, rates, batch or f.work.batch(f.plan), issue)


def _kept_s(f: Forecast) -> float:
    """Seconds to copy the best weights."""
    if not f.kept:
        return 0.0
    return f.kept / COPIED + _between(f, lambda e, _: Kept(e.placement, f.files.exact).take()).step_s


def _export_s(f: Forecast) -> float:
    """Seconds of a checkpoint: weights are brought to RAM, then written to files."""

    def read(e: Engine, _: Sequence[Inputs]) -> None:
        reader = Weights(e.placement)
        for u, layout in enumerate(e.geo.stored):
            for t in layout.tensors:
                deque(fetch(reader, u, t.name, f.files.exact), 0)  # without values

    return _between(f, read).step_s + _files_s(f, f.files.export)


def _files_s(f: Forecast, nbytes: int) -> float:
    """Seconds of files: made from RAM that is not pinned, written, and read back."""
    return nbytes * (1 / _write(f) + 1 / _read(f) + 1 / COPIED)


class Weights(Reader):
    """Reads the weights on a host that exports: low halves of other hosts' records come through the network."""

    def low(self, u: int, a: int, b: int) -> Tensor:
        e = self.placement
        if e.geo.owner(u, a, e.plan.record) == e.plan.host:
            return super().low(u, a, b)
        e.queues.run("net", "state", e.geo.names[u], lambda: None, nbytes=2 * (b - a))
        return NOTHING


def written(f: Forecast, steps: int, events: Events) -> dict[str, int]:
    """Bytes that the run writes to drives, by what writes them."""
    part, evaluated, saved = f.disk_parts(), 0.0, snapshot(f).ssd_written
    if events.evaluations and events.held_out and f.plan.uses("ssd"):
        groups, found = _evaluation(f, events.held_out)
        evaluated = events.evaluations * groups * found.ssd_written
    return {
        "steps": steps * f.step.ssd_written,
        "evaluations": math.ceil(evaluated),
        "snapshots": events.snapshots * saved,
        "checkpoints": events.exports * (part["export"] - f.files.merged) + f.files.merged,
        "start": f.stored() - saved + part["frozen"],
    }


def removed(f: Forecast, snapshots: int) -> int:
    """Bytes of the store at the end: what the plan stores on the SSD, and what the last snapshots keep."""
    return f.stored() - snapshot(f).ssd_written + min(snapshots, f.files.keep) * f.stored()


def evaluation_s(f: Forecast, sequences: int) -> float:
    """Seconds of an evaluation, in groups of a step's sequences."""
    if not sequences:
        return 0.0
    groups, found = _evaluation(f, sequences)
    return groups * found.step_s


def _evaluation(f: Forecast, sequences: int) -> tuple[float, Prediction]:
    """(number of groups of sequences, the prediction of one)."""
    work = replace(f.work, sequences=min(sequences, f.work.sequences))
    return sequences / work.sequences, _between(f, evaluate, replace(work.batch(f.plan), compared=False))


def token_s(f: Forecast) -> float:
    """Seconds of a sampled token: a pass over all weights."""
    return _between(f, lambda e, _: deque(stream_layers(e), 0)).step_s


# ---------------------------------------------------------------- the first step


def compile_s(cfg: ModelConfig, plan: Plan, device: torch.device | None, loading: float = 0.0) -> float:
    """Seconds that the first step takes longer than the second; 0 on a CPU. `loading`: seconds during which kernels are
    compiled already.

    It is KNOWN, or as measured, if this machine has run the model with Triton's present cache; with `device` None it
    has not.
    """
    if device is not None and device.type != "cuda":
        return 0.0
    found = cache.remembered(_forms(cfg, plan, device)) if device else None
    return found["seconds"] if found else max(KNOWN, (SOME if device and _cached() else NEW) - loading)


def note_compilation(cfg: ModelConfig, plan: Plan, device: torch.device, seconds: float) -> None:
    """Stores what the next run's first step will take, after one that took `seconds` more than its second."""
    known = _forms(cfg, plan, device)
    cache.remember(known, {"seconds": seconds if cache.remembered(known) else min(seconds, KNOWN)})


def _forms(cfg: ModelConfig, plan: Plan, device: torch.device) -> dict[str, Any]:
    """Everything that the kernels depend on, and Triton's cache folder."""
    return cache.chips(device, plan.dtype) | {
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
    """Triton's version and cache folder; its inode changes when it is removed."""
    import triton
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return [triton.__version__, str(folder), folder.stat().st_ino if folder.exists() else 0]
