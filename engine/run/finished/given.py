"""What `sample`, `eval` and `score` have in common: the model opened and loaded by their options."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from trireme.engine.amounts import gib
from trireme.engine.data.codec import Codec
from trireme.engine.planner.host import choose_device, memory_limits
from trireme.engine.run.begin.limits import check_compiler, check_heads
from trireme.engine.run.finished.layers import Layers
from trireme.engine.run.finished.model import Opened, open_folder
from trireme.engine.run.finished.options import FORMATS
from trireme.engine.run.hub.fetch import base_for, folder_of
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.peft_config import CONFIG
from trireme.models.sizes import shapes


def opened(given: argparse.Namespace, screen: Screen) -> tuple[Opened, Codec]:
    """Raises InputError, CheckpointError."""
    folder, model = folder_of(given.folder, screen), given.model or ""
    if (Path(folder) / CONFIG).is_file():
        model = base_for(Path(folder), model, screen)
    found = open_folder(folder, model, screen.warn)
    return found, found.codec(given.tokenizer, given.chat_template)


def place_of(given: argparse.Namespace, found: Opened) -> tuple[torch.device, str]:
    """Device and number format, F32 or BF16. Raises InputError."""
    device = choose_device(given.device or "auto")
    if device.type == "cuda":
        check_compiler()
    check_heads(found.cfg, device)
    return device, FORMATS[given.dtype or ("bf16" if device.type == "cuda" else "fp32")]


def loaded(
    given: argparse.Namespace, found: Opened, place: tuple[torch.device, str], needs: int, what: str, screen: Screen
) -> Layers:
    """The model's layers, and before they are used how fast they come. `needs`: the device's bytes of other tensors."""
    device, dtype = place
    layers = Layers(found, device, dtype, memory_limits(device, given.gpu_memory, given.ram), needs)
    with screen.working("loading", sum(layers.sizes[u] for u in layers.resident | layers.in_ram)) as more:
        layers.load(more)
    adapter = f" with its adapter of rank {found.cfg.lora.rank}" if found.cfg.lora else ""
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    size = f"{shapes.parameters(found.cfg):,} parameters, {gib(sum(layers.sizes))} in {dtype.lower()}"
    screen.say(f"model    {found.base}{adapter}, {size} on the {where}")
    if line := layers.speed_line(what):
        screen.say(f"speed    {line}")
    return layers
