"""What is settled before a job begins: by the run that is resumed, or by a plan from a file. Options that contradict it
are refused. No torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from trireme.engine.buffers import usage
from trireme.engine.geometry import Geometry
from trireme.engine.options import Options
from trireme.engine.plan import DoesNotFit, Plan
from trireme.engine.rule import amount
from trireme.models.config import InputError, ModelConfig
from trireme.storage.checkpoint import Source

DTYPES = {"bf16": "BF16", "fp32": "F32"}
CUT = ("tokens", "n_micro", "dtype", "record", "adam_bits", "halves")  # of a plan, that a run keeps to its end


def check_resumed(options: Options, like: dict) -> None:
    """Raises InputError where the options contradict the cut of the run that is resumed."""
    if not {"halves", "batch_size", "model"} <= like.keys():
        raise InputError(f"--resume {options.resume}: begun by an older version, which cut its files otherwise.")
    asked = {"--batch-size": (options.batch_size, like["batch_size"])}
    if options.seq_len is not None:
        asked["--seq-len"] = options.seq_len, like["tokens"] // like["rows"]
    if options.dtype != "auto":
        asked["--dtype"] = options.dtype, next(name for name, dtype in DTYPES.items() if dtype == like["dtype"])
    if not options.plan:  # which says these
        asked["--adam-bits"] = options.adam_bits, like["adam_bits"]
        if options.micro_batch != "auto":
            most = like["rows"] if like["n_micro"] == 1 else options.micro_batch  # of a whole step there is no more
            asked["--micro-batch"] = min(options.micro_batch, most), like["rows"]
    for flag, (now, before) in asked.items():
        if now != before:
            raise InputError(f"{flag} {now}: the run began with {before}, which cannot change. Leave it out.")


def identity(cfg: ModelConfig, source: Source) -> dict[str, dict]:
    """What a run knows its model by: the numbers of its config, and dtype and shape of every tensor in its files."""
    numbers = {name: value for name, value in asdict(cfg).items() if name not in ("rope", "halves")}
    numbers |= {f"rope.{name}": value for name, value in asdict(cfg.rope).items()} if cfg.rope else {}
    return {"config": numbers, "tensors": {name: [t.dtype, *t.shape] for name, t in source.tensors.items()}}


def check_model(options: Options, like: dict, cfg: ModelConfig, source: Source) -> None:
    """Raises InputError where the model is not the one that the resumed run was begun with."""
    for kind, now in identity(cfg, source).items():
        before = like["model"][kind]
        for name in [*before, *now]:
            if now.get(name) != before.get(name):
                here, then = (json.dumps(found[name]) if name in found else "missing" for found in (now, before))
                raise InputError(
                    f"--resume {options.resume}: {name} of {options.model} is {here}, the run began with {then}. "
                    "Name the checkpoint that it began with, as it was."
                )


def given_plan(options: Options, cfg: ModelConfig, seq_len: int, like: dict | None, on_cuda: bool) -> Plan | None:
    """The plan that was given; InputError where it is not for this model, this run or this device."""
    if not options.plan:
        return None
    plan = Plan.load(Path(options.plan))
    if len(plan.units) != plan.cut(cfg).n_units or plan.tokens % seq_len:
        raise InputError(f"{options.plan}: the plan is for another model or --seq-len")
    if options.dtype != "auto" and DTYPES[options.dtype] != plan.dtype:
        raise InputError(f"{options.plan}: the plan computes in {plan.dtype}. Leave --dtype out, or change the plan.")
    if on_cuda and not plan.runs_on_cuda:
        raise InputError(
            f"{options.plan}: no CUDA kernel updates {plan.adam_bits}-bit moments. Give every unit a state in host or "
            "ssd and the update cpu, or set adam_bits to 32."
        )
    geo = Geometry.of(cfg, plan)
    for u, unit in enumerate(plan.units):
        unknown = {name for name, _ in unit.saved} - set(geo.saved_names(geo.kinds[u]) if 0 < u < geo.head else ())
        if unknown:
            raise InputError(f"{options.plan}: unit {u} saves {unknown.pop()!r}, which it does not have")
    for key in CUT if like else ():
        if getattr(plan, key) != like[key]:
            raise InputError(f"{options.plan}: the run began with {key} {like[key]}, the plan has {getattr(plan, key)}")
    return plan


def check_memory(options: Options, cfg: ModelConfig, plan: Plan, limits: dict[str, int]) -> None:
    """Raises DoesNotFit where the plan that was given takes more than there is."""
    need = usage(Geometry.of(cfg, plan), plan)
    if any(need[tier] > limits[tier] for tier in need):
        numbers = [f"{amount(need[t])} of {what}, the limit is {amount(limits[t])}"
                   for t, what in (("gpu", "GPU memory"), ("host", "RAM")) if need[t] > limits[t]]  # fmt: skip
        raise DoesNotFit(f"{options.plan}: the plan needs {' and '.join(numbers)}. Change it, or leave it out.")


def check_step(options: Options, plan: Plan, sequences: int, seq_len: int) -> None:
    """Raises InputError where a step of so many sequences has more micro-batches than the plan that was given."""
    rows = plan.tokens // seq_len
    needed = math.ceil(sequences / rows)
    if needed > plan.n_micro:
        raise InputError(
            f"{options.plan}: a step of {sequences} sequences is {needed} micro-batches of {rows}, the plan has room "
            f"for {plan.n_micro}. Raise its n_micro, or lower --batch-size."
        )
