"""Launch settings that `trireme check --tune` has found, stored in the cache folder; they override the usual ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import torch

from trireme.engine.planner.host import model_of
from trireme.engine.planner.probe.cache import chips
from trireme.kernels import launch
from trireme.kernels.private import cache_folder
from trireme.kernels.tiles import chip, misfit
from trireme.storage.files import replace_synced

Settings = Mapping[str, Sequence[int]]  # as launch.use


def store(device: torch.device, settings: Settings) -> Path | None:
    """Stores settings; returns their file, or None without a cache folder. Raises StoreError."""
    path = _file(device)
    if path is not None:
        replace_synced(path, json.dumps(settings).encode())
    return path


def stored(device: torch.device) -> dict[str, Sequence[int]]:
    """The settings stored for this GPU and this software that it may use; none for a CPU."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        if device.type == "cuda" and (path := _file(device)):
            current_chip, settings = chip(device), json.loads(path.read_bytes())
            return {name: setting for name, setting in settings.items() if not misfit(current_chip, {name: setting})}
    return {}


def digest(settings: Settings) -> str:
    """What a snapshot says of settings: "" for the usual ones."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12] if settings else ""


def _file(device: torch.device) -> Path | None:
    """Settings hold for a GPU, its driver, torch and Triton."""
    driver = str(chips(device, "").get("driver", ""))
    identity = {"gpu": model_of(device), "driver": driver, "torch": torch.__version__, "triton": version("triton")}
    name, folder = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12], cache_folder()
    return folder and folder / f"launches-{name}.json"


@contextmanager
def in_use(settings: Settings) -> Iterator[None]:
    """A context in which kernels are launched with these settings."""
    launch.use(settings)
    try:
        yield
    finally:
        launch.use({})
