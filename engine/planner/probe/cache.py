"""Measured rates, stored in the user's cache folder: one JSON file for each identity.

An identity is a dict that says what was measured, such as the chips and the software that runs on them. Deleting a file
makes the next run measure again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from trireme.engine.planner.host import LASTING, gpu_now
from trireme.engine.queues.cgroups import cores
from trireme.kernels.private import cache_folder
from trireme.storage.files import replace_synced

VERSION = 12  # of what is measured: rates of another version are measured again


def look_up(
    identity: dict[str, Any], measure: Callable[[], dict[str, float]], anew: bool = False
) -> tuple[dict[str, float], str]:
    """Returns the rates stored for this identity; without any, or with `anew`, stores and returns those of `measure`.

    The second value says in words where the rates are from.
    """
    stored = None if anew else remembered(identity)
    if stored is not None:
        return stored, "measured before"
    start = time.monotonic()
    rates = measure()
    remember(identity, rates)
    return rates, f"measured, {time.monotonic() - start:.0f} s"


def remembered(identity: dict[str, Any]) -> dict[str, float] | None:
    """Returns the stored rates; None if the file is missing, unreadable or of another identity."""
    path, identity = _place(identity)
    try:
        stored = json.loads(path.read_text()) if path else {}
        if stored["identity"] == identity:
            return {name: float(value) for name, value in stored["rates"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # missing or foreign
    return None


def remember(identity: dict[str, Any], rates: dict[str, float]) -> None:
    """Stores rates. If the folder cannot be written, the next run measures again."""
    path, identity = _place(identity)
    if path:
        with suppress(OSError):
            replace_synced(path, json.dumps({"identity": identity, "rates": rates}, indent=1).encode())


def _place(identity: dict[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """(the file of an identity, if there is a folder; the identity as of this VERSION)."""
    folder, identity = cache_folder(), identity | {"version": VERSION}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return folder and folder / f"machine-{name}.json", identity


def chips_now(device: torch.device, dtype: str) -> dict[str, Any]:
    """The identity `chips`, with what their speed depends on now: a GPU's slot and power limit."""
    if device.type != "cuda":
        return chips(device, dtype)
    lasting = {name: value for name, value in gpu_now(device).items() if name in LASTING}
    state = {"uuid": str(torch.cuda.get_device_properties(device).uuid), **lasting}
    return chips(device, dtype) | {"now": state}


def chips(device: torch.device, dtype: str) -> dict[str, Any]:
    """The identity of the processor, the GPU and the software that runs on them."""
    identity = {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "ram": _first("/proc/meminfo", "MemTotal"),
        "cores": cores(),
        "torch": torch.__version__,
        "dtype": dtype,
    }
    if device.type == "cuda":
        identity |= {"gpu": torch.cuda.get_device_name(device), "driver": _first("/proc/driver/nvidia/version", "NVRM")}
    return identity


def _first(path: str, key: str) -> str:
    """The first line of a file that begins with `key`, or ""."""
    try:
        return next((line for line in Path(path).read_text().splitlines() if line.startswith(key)), "").strip()
    except OSError:
        return ""
