"""What a resumed run keeps so that its results are bitwise those of the uninterrupted one, and what must agree.

Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

from trireme.engine.geometry import Geometry
from trireme.engine.plan import Plan
from trireme.engine.run.options import Options
from trireme.engine.tuning.rewritten import Rewritten
from trireme.models.config import InputError, ModelConfig, default_number, numbers
from trireme.models.sizes import narrow
from trireme.storage.checkpoint import Source
from trireme.storage.untrusted import complaint

SAID = ("frozen", "lora")  # of a config: what a run says, not config.json
DTYPES = {"bf16": "BF16", "fp32": "F32", "fp8": "BF16"}  # of all but the matmuls


def cut_of(plan: Plan) -> dict[str, Any]:
    """What a resumed run keeps of a plan, besides where updates run, for bitwise equal results."""
    return {
        "tokens": plan.tokens,
        "n_micro": plan.n_micro,
        "dtype": plan.dtype,
        "record": plan.record,
        "adam_bits": plan.adam_bits,
        "halves": plan.halves,
    }


@dataclass(frozen=True)
class Pinned:
    """What a resumed run keeps. Its plan may change, but not `cut_of` it nor where updates run."""

    plan: Plan
    batch_size: int
    rows: int  # sequences of a micro-batch
    model: dict[str, dict[str, Any]]  # `identity`

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Pinned:
        """The inverse of `json`. Raises InputError, KeyError."""
        plan = Plan.of(data["plan"])
        if missing := cut_of(plan).keys() - data.keys():
            raise KeyError(*missing)
        return cls(plan, data["batch_size"], data["rows"], data["model"])

    def json(self) -> dict[str, Any]:
        own = {"batch_size": self.batch_size, "rows": self.rows, "model": self.model, "plan": asdict(self.plan)}
        return cut_of(self.plan) | own

    @property
    def seq_len(self) -> int:
        return self.plan.tokens // self.rows

    def on(self, host: int, hosts: int) -> Pinned:
        """What the run keeps on another number of hosts."""
        if hosts == self.plan.hosts:
            return self
        most = min(self.plan.hosts * self.plan.n_micro, math.ceil(self.batch_size / self.rows))
        plan = replace(self.plan, hosts=1, host=0, n_micro=math.ceil(most / hosts))
        if hosts > 1:
            at_gpu = [u for u, unit in enumerate(plan.units) if "gpu" in (unit.state, unit.update)]
            plan = plan.changed(at_gpu, weights="host", state="host", update="cpu")
            plan = replace(plan, mode="forward", gradients="host", hosts=hosts, host=host)
        return replace(self, plan=plan)


# What Live.save writes into a snapshot's manifest.
SNAPSHOT = {
    "step": int,
    "options": dict,
    "data": str,
    "computed_by": str,  # as host.computed_by
    "launches": {str: [int]},  # as tuned.kept
    "written": int,
    "worse": int,
    "eval_rows": {int, type(None)},  # None: all
    "date": {str, type(None)},  # that the chat template writes
    "best": ({float, type(None)}, {int, type(None)}),
    "start": {float, type(None)},  # eval_loss before training
    "base": dict,  # checksums of frozen weights, by unit
    "teacher": str,  # key of its scores; "": none
    "log": (int, {int, type(None)}, int, int),
    "cut": {
        **dict.fromkeys(("tokens", "n_micro", "record", "adam_bits", "batch_size", "rows"), int),
        "dtype": str,
        "halves": bool,
        "plan": dict,
        "model": {"config": dict, "tensors": dict},
    },
}


LATER: dict[str, Any] = {"computed_by": "", "launches": {}, "eval_rows": None, "worse": 0}  # older snapshots have none
LATER |= {"base": {}, "date": None, "start": None, "teacher": ""}


def check_snapshot(options: Options, found: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot, with what an older one lacks. Raises InputError if it has not the form of SNAPSHOT."""
    said = {**LATER, **found}
    wrong = complaint(said, SNAPSHOT)
    if not wrong and "start" not in found and said["best"][1] is None:
        said |= {"start": said["best"][0], "best": [None, None]}  # its best was that before training
    if not wrong and said["date"] is not None and not is_date(said["date"]):
        wrong = ".date is not a date"
    if not wrong:
        try:
            pinned = Pinned.read(said["cut"])
            same = all(said["cut"][name] == value for name, value in cut_of(pinned.plan).items())
            fits = same and pinned.rows and pinned.plan.tokens % pinned.rows == 0
            wrong = "" if fits else ".cut is not the one of its plan"
        except InputError as error:
            wrong = f".cut: {error}"
    if wrong:
        raise InputError(
            f"--resume {options.resume}: its snapshot{wrong}. Use the version that made it, or start again."
        )
    return said


def is_date(text: str) -> bool:
    """Whether a text is a date such as 2026-03-31."""
    try:
        return text == date.fromisoformat(text).isoformat()
    except ValueError:
        return False


def check_updates(options: Options, data: Mapping[str, Any], hosts: int) -> None:
    """Raises InputError if a GPU has updated what the CPU would update with several hosts."""
    plan = Pinned.read(data).plan
    if hosts > 1 and any("gpu" in (unit.state, unit.update) for unit in plan.distinct.values()):
        raise InputError(
            f"--resume {options.resume}: the run updates state on the GPU, and {hosts} hosts would on the CPU, with "
            "other roundings. Continue with one host."
        )


def pinned_of(options: Options, data: Mapping[str, Any], host: int = 0, hosts: int = 1) -> Pinned:
    """What the snapshot's run keeps. Raises InputError if its form is old, or the options contradict it."""
    try:
        pinned = Pinned.read(data)
    except (InputError, KeyError):
        old = "started by an older version, which stored its state in another form"
        raise InputError(f"--resume {options.resume}: {old}.") from None
    pinned = pinned.on(host, hosts)
    asked: dict[str, tuple[object, object]] = {"--batch-size": (options.batch_size, pinned.batch_size)}
    if options.seq_len is not None:
        documents = 1 if options.method in ("sft", "classify") else 2  # of a sequence, each of --seq-len
        asked["--seq-len"] = options.seq_len, pinned.seq_len // documents
    fp8 = bool(pinned.model["config"].get("fp8"))
    if options.dtype != "auto" or fp8:
        begun = "fp8" if fp8 else next(name for name, dtype in DTYPES.items() if dtype == pinned.plan.dtype)
        asked["--dtype"] = options.dtype, begun
    if not options.plan:  # else the plan says these
        asked["--adam-bits"] = options.adam_bits or pinned.plan.adam_bits, pinned.plan.adam_bits
        if isinstance(options.micro_batch, int):
            most = pinned.rows if pinned.plan.n_micro == 1 else options.micro_batch  # one micro-batch is the whole step
            asked["--micro-batch"] = min(options.micro_batch, most), pinned.rows
    for flag, (now, before) in asked.items():
        if now != before:
            raise InputError(f"{flag} {now}: the run began with {before}, which cannot change. Leave it out.")
    return pinned


def identity(cfg: ModelConfig, source: Source) -> dict[str, dict[str, Any]]:
    """The numbers of the config, and dtype and shape of every tensor."""
    source = source.inner if isinstance(source, Rewritten) else source
    return {"config": numbers(cfg), "tensors": {name: [t.dtype, *t.shape] for name, t in source.tensors.items()}}


def check_model(options: Options, pinned: Pinned, cfg: ModelConfig, source: Source) -> None:
    """Raises InputError unless the model is that of the resumed run."""
    for kind, now in identity(cfg, source).items():
        before = pinned.model[kind]
        for name in [*before, *now]:
            usual = default_number(name) if kind == "config" else None
            if now.get(name, usual) != before.get(name, usual):
                if name in SAID:
                    raise InputError(
                        f"--resume {options.resume}: what is trained cannot change. Leave --lora and its options, "
                        "--freeze and --train out."
                    )
                here, then = (json.dumps(found[name]) if name in found else "missing" for found in (now, before))
                raise InputError(
                    f"--resume {options.resume}: {name} of {options.model} is {here}, the run began with {then}. "
                    "Name the checkpoint that it began with, as it was."
                )
    if wrong := misfit(pinned.plan, cfg):
        raise InputError(f"--resume {options.resume}: its snapshot was changed: {wrong}. Restore it from a copy.")


def misfit(plan: Plan, cfg: ModelConfig) -> str:
    """Why a plan does not suit the model; "" if it does."""
    if len(plan.units) != plan.cut(cfg).n_units or plan.halves and cfg.whole:
        return "the plan is for another model"
    if plan.slices > 1 and not narrow.may_be_sliced(cfg):
        return "the plan has slices of frozen experts, and the model trains its experts or has none"
    geo = Geometry.of(cfg, plan)
    for u, unit in enumerate(plan.units):
        unknown = {name for name, _ in unit.saved} - set(geo.saved_names(geo.kinds[u]) if 0 < u < geo.head else ())
        if unknown:
            return f"unit {u} saves {unknown.pop()!r}, which it does not have"
    return ""
