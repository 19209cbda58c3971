"""What `sample` and `eval` have in common: options of the model and the machine, and the model opened by them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from trireme.engine.amounts import gib, size
from trireme.engine.data.codec import Codec
from trireme.engine.planner.host import choose_device, memory_limits
from trireme.engine.run.begin.limits import check_compiler, check_heads
from trireme.engine.run.command import CommandParser, program, typed
from trireme.engine.run.finished.layers import Layers
from trireme.engine.run.finished.opened import Opened, open_folder
from trireme.engine.run.hub.fetch import base_for, folder_of
from trireme.engine.run.options import one_of
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.peft_config import CONFIG
from trireme.models.config import InputError
from trireme.models.sizes import shapes

FORMATS = {"bf16": "BF16", "fp32": "F32"}


def parser(name: str, usage: str, description: str) -> CommandParser:
    found = CommandParser(
        usage=f"{program()} {name} FOLDER {usage}",
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=112),
    )
    found.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default="",
        help="a checkpoint, a run's output, its best or step-N, or an adapter",
    )
    more = found.add_argument_group("model and machine")
    add = lambda flag, metavar, text, parse=str: more.add_argument(flag, metavar=metavar, help=text, type=typed(parse))
    add("--model", "DIR", "an adapter's base [the one that it names]")
    add("--tokenizer", "DIR", "a folder with another tokenizer [that of the run]")
    add("--chat-template", "FILE", "another chat template: a .jinja file, chatml or plain [that of the run]")
    add("--device", "{auto,cuda,cpu}", "where to compute [auto]", one_of("auto", "cuda", "cpu"))
    add("--dtype", "{bf16,fp32}", "number format [bf16 on a GPU, else fp32]", one_of(*FORMATS))
    add("--gpu-memory", "SIZE", "hard limit of the GPU, as 24GiB [what is free]", size)
    add("--ram", "SIZE", "hard limit of RAM [85 %% of what this process may use]", size)
    return found


def parse(found: CommandParser, name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Raises InputError; --help exits."""
    given = found.known([word.replace("_", "-") if word.startswith("--") else word for word in argv], name)
    if not given.folder:
        raise InputError(f"no model is named. Name its folder: {program()} {name} FOLDER.")
    return given


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
    """The model's layers, and before they are used how fast they come. `needs`: bytes of the device beside them."""
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
