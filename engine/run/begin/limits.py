"""Where a job computes: the device and its memory limits, of this machine, of --assume, or the smallest of all
hosts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from trireme.engine.amounts import count, gib
from trireme.engine.hosts.group import Alone
from trireme.engine.plan import DoesNotFit, Limits
from trireme.engine.planner.host import are_equal, choose_device, choose_gpus, memory_limits
from trireme.engine.planner.machine import pinnable
from trireme.engine.planner.rates import Machine, assume
from trireme.engine.run.options import Options
from trireme.kernels.launch import WIDEST_HEAD
from trireme.models.config import InputError, ModelConfig


def device_and_limits(options: Options) -> tuple[torch.device, Limits, Machine | None]:
    """The device, usable memory, and the machine of --assume if there is one. Raises InputError, DoesNotFit."""
    if options.assume:
        machine, limits = _assumed(options, options.assume)
        return torch.device("cuda"), limits, machine
    device = choose_device(options.device)
    gpus = choose_gpus(options.gpus, device)
    limits = memory_limits(device, options.gpu_memory, options.ram, gpus)
    if device.type == "cuda":
        check_compiler()
        if options.ram is None:
            limits = replace(limits, host=int(min(limits.host, pinnable(device))))
    return device, limits, None


def common_limits(group: Alone, options: Options, limits: Limits, device: torch.device) -> Limits:
    """The limits that every host has, on all its GPUs. Hosts on one machine share its RAM. Raises InputError."""
    if options.ram is None:
        limits = replace(limits, host=limits.host // group.local_hosts)
    several = group.hosts > 1
    room = limits.gpu - max(limits.less, default=0) * several  # a plan is of one host, and the same on all
    gpu, host, gpus = map(group.values, (room, limits.host, limits.gpus))
    if len(set(gpus)) > 1:
        raise InputError(f"--gpus: hosts have {', '.join(f'{n:.0f}' for n in gpus)}. Give each as many.")
    if several and limits.less and (options.assume or not are_equal(device, limits.gpus)):
        raise InputError(
            "--gpus: unequal GPUs round differently, and hosts sum what their GPUs computed. Use equal ones."
        )
    return replace(limits, gpu=int(min(gpu)), host=int(min(host)), less=() if several else limits.less)


def _assumed(options: Options, machine: str) -> tuple[Machine, Limits]:
    """The machine of --assume and its limits, which --gpu-memory and --ram replace. Raises InputError, DoesNotFit."""
    if not options.dry_run:
        raise InputError("--assume plans for a machine that is not this one. Add --dry-run.")
    made = assume(machine)
    if options.gpus == "all" and made.gpus == 1:
        raise InputError(
            "--gpus all: how many does the assumed machine have? Give --gpus N, or --assume gpu=2xrtx4090."
        )
    asked = made.gpus if options.gpus in ("all", 1) else int(options.gpus)
    if asked > made.gpus > 1:
        raise InputError(f"--gpus {asked}: the assumed machine has {made.gpus}.")
    made = made.first(asked, options.gpu_memory)
    limits = replace(made.limits, host=options.ram or made.limits.host, all_free=options.gpu_memory is None)
    if limits.gpu <= 0:
        taken = gib(made.gpu - limits.gpu)
        raise DoesNotFit(f"--assume: the driver's context and late kernels alone take {taken} of the GPU. Assume more.")
    return made, limits


def check_gpus(cfg: ModelConfig, gpus: int) -> None:
    """Raises InputError if the model cannot be divided among this many GPUs."""
    if gpus > cfg.n_layers:
        raise InputError(f"--gpus {gpus}: the model has {count(cfg.n_layers, 'block')}, a GPU computes one at least.")


def check_compiler() -> None:
    """Raises InputError if Triton cannot compile what launches kernels."""
    from trireme.kernels.launcher import why_none  # late: Triton takes a second

    if why := why_none():
        needs = "Triton needs a C compiler and Python's headers to launch kernels on a GPU"
        raise InputError(f"{needs} ({why.rstrip('.')}). Install them: gcc and python3-dev.")


def check_heads(cfg: ModelConfig, device: torch.device) -> None:
    """Raises InputError if no kernel has heads this wide."""
    if device.type == "cuda" and cfg.widest_head > WIDEST_HEAD:
        wide = f"the model has heads of {cfg.widest_head}"
        raise InputError(f"{wide}, and a GPU computes heads of {WIDEST_HEAD} at most. Add --device cpu.")


def check_fp8(cfg: ModelConfig, device: torch.device, assumed: Machine | None) -> None:
    """Raises InputError if the GPU has no fp8."""
    if not cfg.fp8 or device.type != "cuda":
        return
    lacks = assumed.rates.fp8 == 0 if assumed else torch.cuda.get_device_capability(device) < (8, 9)
    if lacks:
        name = assumed.name if assumed else torch.cuda.get_device_name(device)
        raise InputError(f"--dtype fp8: {name} multiplies no fp8; Ada, Hopper and newer do. Leave it out.")
