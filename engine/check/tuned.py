"""Launch settings that `trireme check --tune` has found, stored in the cache folder, and the settings of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from trireme.engine.planner.host import model_of
from trireme.engine.planner.probe.cache import chips
from trireme.kernels import launch
from trireme.kernels.private import cache_folder
from trireme.kernels.tiles import chip, misfit
from trireme.storage.files import replace_synced
from trireme.storage.untrusted import complaint, parse_json

Settings = Mapping[str, list[int]]  # as launch.use
SHAPE = {str: [int]}


def identity(device: torch.device) -> dict[str, str]:
    """What settings are stored for: the GPU, its driver, torch and Triton."""
    found = chips(device, "")
    driver = str(found.get("driver", ""))
    return {"gpu": model_of(device), "driver": driver, "torch": torch.__version__, "triton": version("triton")}


def keep(device: torch.device, settings: Settings) -> Path | None:
    """Stores settings; returns their file, or None without a cache folder. Raises StoreError."""
    path, known = _file(device)
    if path is not None:
        replace_synced(path, (json.dumps({"identity": known, "settings": settings}) + "\n").encode())
    return path


def kept(device: torch.device) -> dict[str, list[int]]:
    """The settings stored for this GPU and this software; empty if there are none or they cannot be used."""
    if device.type != "cuda":
        return {}
    path, known = _file(device)
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = parse_json(path.read_bytes(), path.name) if path else {}
    if complaint(found, {"identity": {str: str}, "settings": SHAPE}) or found["identity"] != known:
        return {}
    return usable(found["settings"], device)[0]


def usable(settings: Settings, device: torch.device) -> tuple[dict[str, list[int]], str]:
    """Those of `settings` that this version may use on `device`, and why the others are left out, or "". Another
    version may tune other launches, and try other settings of a launch.
    """
    if device.type != "cuda":
        return {}, "a CPU has none" if settings else ""
    here = chip(device)
    why = {name: misfit(here, {name: setting}) for name, setting in settings.items()}
    return {name: setting for name, setting in settings.items() if not why[name]}, ", ".join(filter(None, why.values()))


def _file(device: torch.device) -> tuple[Path | None, dict[str, str]]:
    folder, known = cache_folder(), identity(device)
    name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    return folder and folder / f"launches-{name}.json", known


@contextmanager
def in_use(settings: Settings) -> Iterator[None]:
    """A context in which kernels are launched with these settings."""
    launch.use(settings)
    try:
        yield
    finally:
        launch.use({})
