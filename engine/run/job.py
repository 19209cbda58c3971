"""A job: all that is decided before a run writes its first byte. `make` prints warnings alone, report.py the job."""

from __future__ import annotations

import difflib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import gb
from trireme.engine.check import tuned
from trireme.engine.data.dataset import Dataset, parse_val
from trireme.engine.data.find import find
from trireme.engine.data.prepare import DataOptions
from trireme.engine.data.taught import PLACE
from trireme.engine.data.tokenizer import read_choice
from trireme.engine.hosts.group import world
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.forecast import Files, Forecast, RunWork
from trireme.engine.planner.host import drive_of
from trireme.engine.planner.machine import this_machine
from trireme.engine.planner.rates import Machine, reserved
from trireme.engine.planner.rule import simple_plan
from trireme.engine.run import config_file, folder, opening, screen
from trireme.engine.run.after import hub
from trireme.engine.run.opening import bytes_of, read_data
from trireme.engine.run.options import Every, Options, flag
from trireme.engine.run.planning import Planner, computer
from trireme.engine.run.record import Fixed, RunSnapshot
from trireme.engine.tuning.adapters import adapter_shapes
from trireme.engine.tuning.base import why_copied
from trireme.engine.tuning.cached import Cached
from trireme.engine.tuning.rewritten import Rewritten
from trireme.models.config import InputError, ModelConfig, numbers
from trireme.models.losses.preferences import Preference
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source
from trireme.storage.files import existing
from trireme.storage.untrusted import quoted
from trireme.storage.versions import version_files

EVALUATING = 0.1  # evaluations' share of a run's time
COSTS = 1 / 3  # of a trained token's time, an evaluated one's
TABLES = 64 << 20  # bytes; less is in the reserve of RAM
SOME_STEPS = 1000  # of a plan without data
OF_VAL = ("eval_every", "eval_tokens", "export", "patience")  # options that need held-out data
SMALL = 3_000_000_000  # parameters; below, the default learning rate is doubled
BYTES = 4  # of text, for a token, where there is no tokenizer


@dataclass(frozen=True)
class Job:
    """The model, data, machine and plan of a run, and the options in force."""

    options: Options
    opened: opening.Opened
    read: Dataset | None  # None of a dry run that names no data
    device: torch.device
    plan: Plan
    limits: Limits
    machine: Machine
    work: RunWork
    files: Files
    date: str | None  # that chat templates take for today
    launches: Mapping[str, Sequence[int]]  # settings of kernels

    @property
    def out(self) -> Path:
        return Path(self.options.out)

    @property
    def cfg(self) -> ModelConfig:
        return self.opened.cfg

    @property
    def source(self) -> Source:
        return self.opened.source

    @property
    def data(self) -> Dataset:
        assert self.read is not None
        return self.read

    @property
    def held_out(self) -> Dataset | None:
        return self.read and self.read.held_out

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def preference(self) -> Preference | None:
        return opening.preference_of(self.options)

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.plan.tokens // self.work.seq_len

    @property
    def n_micro(self) -> int:
        """Most micro-batches of a step, over all hosts."""
        if self.plan.hosts == 1:
            return self.plan.n_micro
        return min(self.plan.hosts * self.plan.n_micro, math.ceil(self.work.sequences / self.rows))

    @property
    def eval_rows(self) -> int | None:
        """Held-out rows that an evaluation reads; None: all of them."""
        held_out, tokens = self.held_out, self.work.held_out
        if held_out is None or tokens >= held_out.tokens:
            return None
        return max(1, round(held_out.n_sequences * tokens / held_out.tokens))

    @cached_property
    def forecast(self) -> Forecast:
        return Forecast(self.cfg, self.plan, self.machine, self.limits, self.work, self.files)

    def fixed(self, snapshot: RunSnapshot | None) -> Fixed:
        """What a resumed run keeps of this one; checksums of files are those that it began with."""
        same = *identity_of(self.cfg, self.source), fingerprint(self.data), self.date
        files = dict(snapshot.fixed.base) if snapshot else {}
        teacher, launches = self.data.teacher.key if self.data.teacher else "", tuned.digest(self.launches)
        return Fixed(self.plan, *same, launches, files, teacher)


def make(o: Options, snapshot: RunSnapshot | None = None, by_rule: bool = False) -> Job:
    """Reads and checks what the options name, and makes the plan, which is the same on all hosts. `snapshot`: where the
    run goes on. `by_rule`: without a search, which takes seconds. Raises InputError, CheckpointError, DoesNotFit.
    """
    fixed, clock, group = snapshot.fixed if snapshot else None, screen.clock(), world()
    o = o if snapshot else config_file.of_adapter(o)
    check_options(o, snapshot)
    today = fixed.date if fixed else group.texts(date.today().isoformat())[0]
    with clock.at("headers"):
        opened = opening.open_model(o, today)
        o = replace(o, labels=opened.labels, seq_len=opening.sequence_length(o, opened.cfg))
        if fixed and identity_of(opened.cfg, opened.source) != (fixed.config, fixed.tensors):
            raise InputError(f"--resume {o.out}: {o.model} is not what the run began with. Name its checkpoint.")
    with clock.at("probe"):
        device, limits, assumed = computer(o, opened.cfg)
        launches = {} if assumed else launches_on(device, fixed)
    room = DataOptions(o.seq_len or 0, kind=opening.row_kind(o)).room
    planner = Planner(o, opened.cfg, room, device.type == "cuda", limits, fixed)
    with clock.at("plan"):
        least = 1 if o.data else o.batch_size
        if not planner.user_plan:  # before the data is read, of which there may be a single sequence
            simple_plan(opened.cfg, planner.limits_for(least), planner.wanted(least))
    with clock.at("tokens"):
        data = read_data(o, opened)
        if data and fixed and fingerprint(data) != fixed.data:
            changed = "--data, --val, --general or how they are tokenized"
            raise InputError(f"--resume {o.out}: {changed} is not what the run began with. Restore it.")
    opened = opening.in_wording(o, opened, data)
    planner = replace(planner, limits=replace(limits, ram=max(0, limits.ram - tables_of(o, data, room, opened.cfg))))
    o, work = with_work(o, data, room)
    stores = folder.stores(o)
    files, limits = files_of(o, opened, work), planner.limits_for(work.sequences)
    with clock.at("probe"):
        machine = assumed or probe(device, planner.dtype, limits, stores, opened.cfg)
        if group.hosts > 1:
            machine = replace(machine, rates=replace(machine.rates, net=group.bandwidth()))  # type: ignore[attr-defined]
    with clock.at("plan"):
        plan, machine = planner.search(work, files, limits, machine, stores, by_rule)
        plan = replace(Plan.of(json.loads(group.texts(json.dumps(asdict(plan)))[0])), host=group.host)  # of host 0
    if opened.cfg.frozen and not (assumed or opening.is_absent(o)):
        reason = why_copied(opened.cfg, plan.dtype, opened.source, opened.stored, stores)
        files = replace(files, copied=f"copied: {reason}" if reason else "")
    o = in_force(o, opened.cfg, plan)
    job = Job(o, opened, data, device, plan, limits, machine, work, files, today, launches)
    if data and group.hosts > 1:
        check_agreement(job.fixed(snapshot))
    return job


def launches_on(device: torch.device, fixed: Fixed | None) -> Mapping[str, Sequence[int]]:
    """The settings of kernels. Warns if they are not those with which a resumed run began."""
    launches = tuned.stored(device)
    if fixed and fixed.launches != tuned.digest(launches):
        screen.warn("kernels have other settings than before (check --tune), with which they may round differently")
    return launches


def probe(device: torch.device, dtype: str, limits: Limits, stores: Sequence[Path], cfg: ModelConfig) -> Machine:
    """This machine. Says so while its rates are measured."""
    screen.show("probe    measuring this machine")
    machine = this_machine(device, dtype, limits, stores, cfg.fp8, cfg.scan)
    screen.clear()
    return machine


def check_agreement(fixed: Fixed) -> None:
    """Raises InputError unless all hosts have read the same data and checkpoint."""
    read = {"--data": fixed.data, "config.json": fixed.config, "tensors": fixed.tensors}
    world().agree("data and checkpoints", read, "Copy host 0's")


def identity_of(cfg: ModelConfig, source: Source) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """A model's numbers and what of it is trained, as JSON has them; dtype and shape of every tensor, without the head
    that the run adds.
    """
    inner = source.inner if isinstance(source, Rewritten) else source
    tensors = {name: [t.dtype, *t.shape] for name, t in inner.tensors.items()}
    return dict(json.loads(json.dumps(numbers(cfg)))), tensors


def fingerprint(data: Dataset) -> str:
    """Of the data, of what is held out, and of --general."""
    return "-".join(part.fingerprint for part in (data, data.held_out, data.general) if part)


def tables_of(o: Options, data: Dataset | None, room: int, cfg: ModelConfig) -> int:
    """Bytes of RAM for the data's tables and a teacher's rows, in steps of TABLES so that plans repeat."""
    held = data.memory if data else 0
    if data and cfg.teaching:
        pieces = len(data.pieces) + (len(data.held_out.pieces) if data.held_out else 0)
        held += PLACE * pieces + 3 * min(o.batch_size, data.n_sequences) * room * cfg.teaching.nbytes
    return held // TABLES * TABLES


# ---------------------------------------------------------------- checks of what the user names


def check_options(o: Options, snapshot: RunSnapshot | None) -> None:
    """Raises InputError for options that do not go together, or that a resumed run cannot change."""
    o.check()
    stores = {os.path.realpath(d) for d in o.store}  # of a loop of links, too
    shared = len(stores) < len(o.store) or stores & {os.path.realpath(o.out or "?"), "/"}
    of_adapter = o.rope_factor and (o.lora or o.adapter) and not o.merge
    table = [
        (not (o.model or o.shape), "no checkpoint given. Try: trireme CHECKPOINT --data FILE, or --demo, or --help."),
        (not (o.data or o.dry_run), "no data given. Name it: --data FILE (.jsonl .json .csv .txt .parquet)."),
        (o.long == "split" and o.method != "sft", f"--long split: --method {o.method} reads whole answers. Take cut."),
        (shared, f"--store {','.join(o.store)}: name a folder of its own on each drive, and not --out."),
        (of_adapter, "--rope-factor of an adapter is in no file. Add --merge."),
        (len(o.betas) != 2, "--betas takes two numbers."),
        (o.teacher and world().hosts > 1, "--teacher: runs with one are on one host. Start it without torchrun."),
    ]
    for change in config_file.changed(o, snapshot.options, fixed=True) if snapshot else ():
        table.append((True, f"{change}: a resumed run keeps it. Leave it out."))
    if wrong := next((line for is_wrong, line in table if is_wrong), ""):
        raise InputError(wrong)


def check_paths(o: Options) -> None:
    """Looks at the paths that a run is given, before anything is downloaded or read for long. Raises InputError."""
    check_options(o, None)
    for name in ("tokenizer", "adapter", "plan", "teacher"):
        path = getattr(o, name)
        file = Path(path or "") / ("tokenizer.json" if name == "tokenizer" else "")
        if path and not hub.name_of(path) and not file.exists():
            raise InputError(f"{flag(name)} {path}: there is no {file}.")
    for text, look in (*((t, find) for t in (*o.data, o.general)), (o.val, parse_val), (o.chat_template, read_choice)):
        if text not in (None, "-") and not hub.name_of(text, of_data=True):
            look(text)
    if o.out and not (o.resume or o.dry_run or world().host):
        folder.check_free(Path(o.out))
    if o.model and not hub.name_of(o.model):
        check_checkpoint(Path(o.model))


def check_checkpoint(path: Path) -> None:
    """Raises InputError for what is likely meant otherwise than as a checkpoint."""
    problem, advice = "is a file", "Give the folder of a checkpoint: config.json, .safetensors"
    if not path.exists():
        close = difflib.get_close_matches(path.name, [entry.name for entry in path.absolute().parent.glob("*/")], 1)
        problem, advice = "is not a folder", f"Perhaps {quoted(path.with_name(close[0]))} is meant" if close else advice
    elif snapshots := sorted(path.glob("snapshots/*")):
        problem, advice = "is a cache of the hub", f"Give the snapshot in it: {quoted(snapshots[-1])}"
    elif any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
        problem, advice = "holds GGUF, which cannot be trained", "Take the safetensors of the same model"
    elif path.is_dir():
        return
    raise InputError(f"{path} {problem}. {advice}.")


# ---------------------------------------------------------------- how much is computed


def with_work(o: Options, data: Dataset | None, room: int) -> tuple[Options, RunWork]:
    """How much the run computes, and the options with its epochs and interval of evaluations: fewer than ten in a
    short run.

    Evaluations take about EVALUATING of the run, and each at least as many tokens as a step. Without data all sequences
    are full, and without a tokenizer they are estimated from bytes.
    """
    if data is None:
        tokens = bytes_of(o) / BYTES * (o.epochs or 1.0)
        steps = math.ceil(tokens / (o.batch_size * room)) if tokens else SOME_STEPS
        return o, RunWork(room, o.batch_size, o.max_steps or steps, document=room, accumulate=not o.router_aux)
    if not o.max_steps and o.epochs is None:
        o = replace(o, epochs=1.0 if data.is_text or data.options.paired else 3.0)
    steps = o.max_steps or max(1, math.ceil(data.steps_per_epoch(o.batch_size) * (o.epochs or 1.0)))
    sequences = min(o.batch_size, data.n_sequences)
    work = RunWork(room, sequences, steps, data.report.used, data.document, data.trained, data.options.paired)
    work = replace(work, accumulate=not o.router_aux)
    if data.held_out is None:
        if idle := [name for name in OF_VAL if getattr(o, name) not in (Every(), getattr(Options, name))]:
            raise InputError(f"{flag(idle[0])} is for held-out data, and there is none. Add --val, or leave it out.")
        return o, work
    share = EVALUATING * steps / COSTS / (1 - EVALUATING)  # of a step's tokens, of all evaluations
    if "eval_every" not in o.chosen and o.eval_every == Options.eval_every and share < 11:
        o = replace(o, eval_every=Every(steps=math.ceil(steps / max(1, int(share) - 1))))
    n = o.evaluations(0, steps)
    read = o.eval_tokens or math.ceil(max(1.0, share / n) * work.tokens)
    return o, replace(work, evaluations=n, held_out=min(read, data.held_out.tokens))


def in_force(o: Options, cfg: ModelConfig, plan: Plan) -> Options:
    """The options with all that was chosen, so that config.yaml repeats the run where defaults differ."""
    rate = 2e-4 if cfg.lora else 2e-5 if shapes.parameters(cfg) < SMALL else 1e-5
    if o.method not in ("sft", "reward", "classify"):
        rate = 1e-5 if cfg.lora else 1e-6
    chosen: dict[str, Any] = {"lr": rate, "weight_decay": 0.0 if cfg.lora else 0.01, "adam_bits": plan.adam_bits}
    if o.lora and cfg.lora:
        chosen |= {"lora_alpha": cfg.lora.alpha, "lora_targets": cfg.lora.targets}
        o = replace(o, lora_targets=())
    return replace(o, **{name: value for name, value in chosen.items() if getattr(o, name) in (None, ())})


# ---------------------------------------------------------------- drives


def files_of(o: Options, opened: opening.Opened, work: RunWork) -> Files:
    """What the run has on drives, and will have, besides training state."""
    cfg, source, out = opened.cfg, opened.source, Path(o.out)
    held = [file for d in folder.stores(o) for file in version_files(d)]
    held += [file for kind in (f"{folder.RUN}/best-*", "step-*") for file in out.glob(f"{kind}/*.safetensors")]
    dtypes = {t.dtype for name in opened.stored.values() if (t := source.tensors.get(name))}
    return Files(
        export=4 * sum(map(math.prod, adapter_shapes(cfg).values())) if cfg.lora else source.nbytes,
        merged=source.nbytes * o.merge,
        best=o.export == "best",
        existing=sum(file.stat().st_blocks * 512 for file in held),
        keep=o.keep,
        step_exports=o.export_every.times(0, work.steps),
        read=2 * source.nbytes if o.base else 0,  # for codes and for scales
        exact=bool(cfg.lora) or dtypes != {"BF16"},
    )


def check_room(job: Job) -> None:
    """Raises DoesNotFit if a drive has no space for what the run must write: its output, state that steps write, of
    which a snapshot has links, and a first snapshot that is certain to be made.
    """
    part, stores, on_ssd = job.forecast.disk_parts(), folder.stores(job.options), job.plan.uses_ssd
    often = job.options.save_every  # after minutes there may be space
    certain = on_ssd or (not often.seconds and job.plan.hosts == 1 and often.times(0, job.work.steps))
    state = part["store"] * bool(certain) + on_ssd * (part["spares"] + part["scratch"] + part["frozen"])
    exports = part["export"] + part["best"] + part["step_exports"]
    wanted = [(job.out, exports), *((d, state // len(stores)) for d in stores)]
    if isinstance(job.source, Cached) and not job.source.is_made():
        wanted.append((stores[0], job.source.file_bytes))
    for place, need in wanted:
        total = sum(nbytes for path, nbytes in wanted if drive_of(path) == drive_of(place))
        disk = shutil.disk_usage(existing(place))
        free = disk.free - on_ssd * reserved(disk.total)
        if need and total > free:
            advice = "Free some, name another drive with --out or --store, or save less often with --save-every"
            raise DoesNotFit(f"{place}: the run writes {gb(total)} there, {gb(max(0, free))} are free. {advice}.")
