"""This machine as the planner's Machine: its memory, drives and rates."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trireme.engine.memory import DTYPE
from trireme.engine.plan import Limits
from trireme.engine.planner import probe
from trireme.engine.planner.host import gpus_from, places_of
from trireme.engine.planner.rates import DRIVES, ENDURANCE, GB, Machine, Rates, rates_of, reserved

NOTICED = 0.9  # share of a drive's measured rate from which a run's is told


def this_machine(
    device: torch.device, dtype: str, limits: Limits, folders: Sequence[str | Path], fp8: bool = False
) -> Machine:
    """This machine, its rates measured in seconds or before, its drives, under `folders`, taken as usual ones."""
    cuda = device.type == "cuda"

    def measure() -> dict[str, float]:
        return {"matmul": probe.matmul_rate(device, DTYPE[dtype])} | probe.processor_rates(device, dtype, limits.host)

    found, how = probe.kept(probe.processor(device, dtype), measure) if cuda else (measure(), "measured")
    if fp8:
        quick = lambda: {"fp8": probe.fp8_rate(device)}
        found |= probe.kept(probe.processor(device, "FP8"), quick)[0] if cuda else quick()
    if cuda and limits.gpus > 1:
        between = {"gpus": limits.gpus, **probe.processor(device, "peer copies")}
        found |= probe.kept(between, lambda: probe.peer_rates(gpus_from(device, limits.gpus)))[0]
    places, usual = places_of(folders), DRIVES["gen4"]
    name = torch.cuda.get_device_name(device) if cuda else f"CPU, {len(os.sched_getaffinity(0))} cores"
    disks, count = [shutil.disk_usage(place) for place in places], len(places)
    room, worn = sum(disk.free for disk in disks), ENDURANCE * sum(disk.total for disk in disks)
    rates = rates_of(found | {"ssd_read": count * usual.read, "ssd_write": count * usual.write})
    drives = f"{room / GB:,.0f} GB of disk free (speed of {count} {usual.name}{'s' * (count > 1)} assumed)"
    kept = sum(reserved(disk.total) for disk in disks)
    return Machine(name, limits.gpu, limits.host, rates, room, kept, worn, drives, how, limits.gpus)


def doubt(device: torch.device, dtype: str) -> None:
    """Has the next run measure processor and GPU anew, fp8 too."""
    for kind in (dtype, "FP8"):
        probe.forget(probe.processor(device, kind))


def with_drives(machine: Machine, folders: Sequence[str | Path], anew: bool = False) -> Machine:
    """`machine` with rates of the drives under `folders`, measured before or `anew`, if they can be tried.

    No faster than they were for minutes in the last run that told: a probe ends before a fast cache is full.
    """
    try:
        places = places_of(folders)
        tried = [probe.kept(probe.drive(place), partial(_drive_rates, place), anew) for place in places]
    except OSError:
        return machine
    read, write = (sum(found[name] for found, _ in tried) for name in ("ssd_read", "ssd_write"))
    free, mixed = (min(found[name] for found, _ in tried) for name in ("ssd_free", "mixed"))
    held = min(_held(place) for place in places)
    rates = replace(machine.rates, ssd_read=held * read, ssd_write=held * write, ssd_free=free, mixed=mixed)
    each = f"read {rates.ssd_read / GB:.1f}, write {rates.ssd_write / GB:.1f} GB/s, {mixed:.2f} of it both at once"
    how = tried[0][1] + f"; a run kept up {held:.0%} of that" * (held < NOTICED)
    return replace(machine, rates=rates, drives=f"{machine.ssd / GB:,.0f} GB of disk free, {each} ({how})")


def note_pinned(device: torch.device, nbytes: int) -> None:
    """Remembers what CUDA pinned before it refused more, as on WSL2; for the next run."""
    probe.remember(probe.chips(device, "") | {"what": "pinned"}, {"bytes": nbytes})


def pinnable(device: torch.device) -> float:
    """Bytes of RAM that CUDA pins, if an earlier run was refused more."""
    found = probe.remembered(probe.chips(device, "") | {"what": "pinned"})
    return found["bytes"] if found else math.inf


def note_drives(rates: Rates, folders: Sequence[str | Path]) -> None:
    """Remembers `rates` of drives that worked for minutes, as a share of what was measured; for the next run."""
    found = {place: probe.remembered(probe.drive(place)) for place in places_of(folders)}
    measured = sum(known["ssd_read"] for known in found.values() if known)
    for place in found if all(found.values()) else ():
        probe.remember(_sustained(place), {"share": rates.ssd_read / measured})


def _drive_rates(place: Path) -> dict[str, float]:
    return probe.drive_rates(place)


def _held(place: Path) -> float:
    return min(1.0, (probe.remembered(_sustained(place)) or {"share": 1.0})["share"])


def _sustained(place: Path) -> dict[str, Any]:
    return probe.drive(place) | {"what": "sustained"}
