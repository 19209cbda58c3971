"""A job: all that is decided before a run writes its first byte. `make` prints warnings alone, report.py the job."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import count, gb
from trireme.engine.check import tuned
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset, load_dataset
from trireme.engine.data.find import find
from trireme.engine.data.prepare import DataOptions
from trireme.engine.data.taught import PLACE
from trireme.engine.hosts.group import here
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.forecast import Files, Forecast, Work
from trireme.engine.planner.host import choose_device, choose_gpus, drive_of, memory_limits, model_of
from trireme.engine.planner.machine import pinnable, this_machine
from trireme.engine.planner.rates import Machine, assume, reserved
from trireme.engine.planner.rule import simple_plan
from trireme.engine.run import config_file, folder, opening, screen
from trireme.engine.run.options import Every, Options, Reading, flag
from trireme.engine.run.planning import Planner
from trireme.engine.run.record import Fixed, Snapshot
from trireme.engine.tuning.adapters import adapter_shapes
from trireme.engine.tuning.base import why_copied
from trireme.engine.tuning.cached import Cached
from trireme.engine.tuning.rewritten import Rewritten
from trireme.kernels.private import cache_folder
from trireme.models.config import InputError, ModelConfig, numbers
from trireme.models.losses.preferences import Preference
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source
from trireme.storage.files import existing
from trireme.storage.versions import version_files

EVALUATING = 0.1  # evaluations' share of a run's time
COSTS = 1 / 3  # of a trained token's time, an evaluated one's
TABLES = 64 << 20  # bytes; less is in the reserve of RAM
SOME_STEPS = 1000  # of a plan without data
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
    work: Work
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
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def preference(self) -> Preference | None:
        return opening.preference_of(self.options)

    @property
    def total_steps(self) -> int:
        return self.work.steps

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
        held_out, tokens = self.read and self.read.held_out, self.work.held_out
        if held_out is None or tokens >= held_out.tokens:
            return None
        return max(1, round(held_out.n_sequences * tokens / held_out.tokens))

    @cached_property
    def forecast(self) -> Forecast:
        return Forecast(self.cfg, self.plan, self.machine, self.limits, self.work, self.files)

    def fixed(self, snapshot: Snapshot | None) -> Fixed:
        """What a resumed run keeps of this one; checksums of files are those that it began with."""
        o, same = self.options, (*identity(self.cfg, self.source), fingerprint(self.data), self.date)
        files = dict(snapshot.fixed.base) if snapshot else {}
        teacher, launches = self.data.teacher.key if self.data.teacher else "", tuned.digest(self.launches)
        return Fixed(self.plan, o.batch_size, self.rows, o.seq_len or 0, *same, launches, files, teacher)


def make(o: Options, snapshot: Snapshot | None = None, by_rule: bool = False) -> Job:
    """Reads and checks what the options name, and makes the plan. `snapshot`: the snapshot that it goes on from.
    `by_rule`: the plan is not searched for, which takes seconds.

    With several hosts all call it, and get the same plan. Raises InputError, CheckpointError, DoesNotFit.
    """
    fixed, clock, group = snapshot.fixed if snapshot else None, screen.clock(), here()
    check_options(o, snapshot)
    today = fixed.date if fixed else group.texts(date.today().isoformat())[0]
    with clock.at("headers"):
        opened = opening.open_model(o, today)
        o = replace(o, labels=opened.labels, seq_len=sequence_length(o, opened.cfg))
        if fixed and identity(opened.cfg, opened.source) != (fixed.config, fixed.tensors):
            raise InputError(f"--resume {o.out}: {o.model} is not what the run began with. Name its checkpoint.")
    with clock.at("probe"):
        device, limits, assumed = computer(o, opened.cfg)
        launches = {} if assumed else tuned.stored(device)
        if fixed and fixed.launches != tuned.digest(launches):
            screen.warn("kernels have other settings than before (check --tune), with which they may round differently")
    room = DataOptions(o.seq_len or 0, kind=opening.kind_of(o)).room
    planner = Planner(o, opened.cfg, room, device.type == "cuda", limits, fixed)
    with clock.at("plan"):
        if not planner.user_plan:  # before the data is read
            simple_plan(opened.cfg, planner.limits_for(o.batch_size), planner.wanted(o.batch_size))
    with clock.at("tokens"):
        data = read_data(o, opened)
    opened = opening.in_wording(o, opened, data)
    if data:
        if snapshot and fingerprint(data) != snapshot.fixed.data:
            what = "--data, --val, --general or how they are tokenized"
            raise InputError(f"--resume {o.out}: {what} is not what the run began with. Restore it.")
        ram = limits.ram - tables_of(o, data, room, opened.cfg)
        planner = replace(planner, limits=replace(limits, ram=max(0, ram)))
    o, work = with_work(o, data, room)
    stores = folder.stores(o)
    if snapshot and work.steps < snapshot.progress.step:
        at = f"the run is at step {snapshot.progress.step:,}"
        raise InputError(f"--resume {o.out}: {at}. Give more: --max-steps or --epochs.")
    files, limits = files_of(o, opened, work), planner.limits_for(work.sequences)
    with clock.at("probe"):
        if not assumed:
            screen.show("probe    measuring this machine")
        machine = assumed or this_machine(device, planner.dtype, limits, stores, opened.cfg.fp8, opened.cfg.scan)
        screen.clear()
        if group.hosts > 1:
            machine = replace(machine, rates=replace(machine.rates, net=group.speed()))  # type: ignore[attr-defined]
    with clock.at("plan"):
        plan, machine = planner.search(work, files, limits, machine, stores, by_rule)
        plan = replace(Plan.of(json.loads(group.texts(json.dumps(asdict(plan)))[0])), host=group.host)  # of host 0
    if opened.cfg.frozen and not (assumed or opening.is_absent(o)):
        why = why_copied(opened.cfg, plan.dtype, opened.source, opened.stored, stores)
        files = replace(files, copied=f"copied: {why}" if why else "")
    o = in_force(o, opened.cfg, plan)
    job = Job(o, opened, data, device, plan, limits, machine, work, files, today, launches)
    if data and group.hosts > 1:
        fixed = job.fixed(snapshot)
        read = {"--data": fixed.data, "config.json": fixed.config, "tensors": fixed.tensors}
        group.agree("data and checkpoints", read, "Copy host 0's")
    return job


def check_options(o: Options, snapshot: Snapshot | None) -> None:
    """Raises InputError for options that do not go together, or that a resumed run cannot change."""
    o.check()
    stores = {Path(d).resolve() for d in o.store}
    shared = len(stores) < len(o.store) or stores & {Path(o.out or "?").resolve(), Path("/")}
    of_adapter = o.rope_factor and (o.lora or o.adapter) and not o.merge
    table = [
        (not (o.model or o.shape), "no checkpoint given. Try: trireme CHECKPOINT --data FILE, or --demo, or --help."),
        (not (o.data or o.dry_run), "no data given. Name it: --data FILE (.jsonl .json .csv .txt .parquet)."),
        (o.data and o.export == "best" and not o.val, "--export best needs the loss on held-out data. Give --val."),
        (o.long == "split" and o.method != "sft", f"--long split: --method {o.method} reads whole answers. Take cut."),
        (shared, f"--store {','.join(o.store)}: name a folder of its own on each drive, and not --out."),
        (of_adapter, "--rope-factor of an adapter is in no file. Add --merge."),
        (len(o.betas) != 2, "--betas takes two numbers."),
        (o.teacher and here().hosts > 1, "--teacher: runs with one are on one host. Start it without torchrun."),
    ]
    now, before = (config_file.saved(o), snapshot.options) if snapshot else ({}, {})
    for name, f in config_file.FIELDS.items() if snapshot else ():
        was = before.get(name)
        is_other = "run" in f.metadata["kind"] and now[name] not in (None, [], was)
        table.append((is_other, f"{flag(name)} {now.get(name)}: the run began with {was or 'none'}. Leave it out."))
    if wrong := next((line for is_wrong, line in table if is_wrong), ""):
        raise InputError(wrong)


def identity(cfg: ModelConfig, source: Source) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """A model's numbers and what of it is trained, as JSON has them; dtype and shape of every tensor, without the head
    that the run adds.
    """
    inner = source.inner if isinstance(source, Rewritten) else source
    tensors = {name: [t.dtype, *t.shape] for name, t in inner.tensors.items()}
    return dict(json.loads(json.dumps(numbers(cfg)))), tensors


# ---------------------------------------------------------------- data


def read_data(o: Options, opened: opening.Opened) -> Dataset | None:
    """The data, tokenized; None without --data. Raises InputError, OSError."""
    cfg, codec, shared = opened.cfg, opened.codec, cache_folder()  # by all runs of this user
    if not o.data or (codec is None and o.dry_run):
        return None
    return read_rows(
        o, cfg, codec, o.data, seq_len=o.seq_len or 0, val=o.val, general=o.general, pack=not o.no_pack,
        max_samples=o.max_samples, seed=o.seed, shared=shared / "tokens" if shared else None,
        cache=None if o.dry_run else Path(o.out) / folder.RUN / "tokens", kind=opening.kind_of(o), labels=o.labels,
        pad=opening.pad_of(o, codec) if cfg.scores else None,
    )  # fmt: skip


def read_rows(o: Reading, cfg: ModelConfig, codec: Codec | None, names: Sequence[str], **others: Any) -> Dataset:
    """Rows of what `names` name, tokenized. `others`: of DataOptions. Raises InputError, OSError."""
    began, variables = time.monotonic(), json.loads(o.chat_template_kwargs or "{}")
    options = DataOptions(
        map=o.map, long=o.long, skip_bad=o.skip_bad, vocab_size=cfg.vocab, media=cfg.media, system=o.system,
        variables=variables, **others,
    )  # fmt: skip
    try:
        far = lambda name, position, size: screen.far(f"reading {name}", position, size, began)
        return load_dataset(names, codec, options, far)
    finally:
        screen.clear()


def bytes_of(o: Options) -> int:
    """Bytes of the files of --data."""
    return sum(file.path.stat().st_size for text in o.data if text != "-" for file in find(text).files)


def fingerprint(data: Dataset) -> str:
    """Of the data, of what is held out, and of --general."""
    return "-".join(part.fingerprint for part in (data, data.held_out, data.general) if part)


def tables_of(o: Options, data: Dataset, room: int, cfg: ModelConfig) -> int:
    """RAM of the data's tables and a teacher's rows, in steps of TABLES so that plans repeat."""
    held = data.memory
    if cfg.teaching:
        pieces = len(data.pieces) + (len(data.held_out.pieces) if data.held_out else 0)
        held += PLACE * pieces + 3 * min(o.batch_size, data.n_sequences) * room * cfg.teaching.nbytes
    return held // TABLES * TABLES


# ---------------------------------------------------------------- machine


def computer(o: Options, cfg: ModelConfig) -> tuple[torch.device, Limits, Machine | None]:
    """The device, usable memory, and the machine of --assume if there is one. Raises InputError, DoesNotFit."""
    if o.assume:
        device, assumed = torch.device("cuda"), assume(o.assume)
        gpus = assumed.gpus if o.gpus in ("all", 1) else int(o.gpus)
        assumed = assumed.first(gpus, o.gpu_memory)
        limits = replace(assumed.limits, ram=o.ram or assumed.limits.ram, all_free=o.gpu_memory is None)
    else:
        device, assumed = choose_device(o.device), None
        limits = memory_limits(device, o.gpu_memory, o.ram, choose_gpus(o.gpus, device))
        if device.type == "cuda" and o.ram is None:
            limits = replace(limits, ram=int(min(limits.ram, pinnable(device))))
        if (group := here()).hosts > 1:  # those that every host has; hosts on one machine share its RAM
            same = {"--device": model_of(device), "--gpus": limits.gpus}
            group.agree("GPUs", same, "Use equal ones, which round equally, as many on each")
            least = min(group.values(limits.gpu - max(limits.less, default=0)))
            ram = min(group.values(limits.ram if o.ram else limits.ram // group.local_hosts))
            limits = replace(limits, gpu=int(least), ram=int(ram), less=())
    if limits.gpus > cfg.n_layers:
        raise InputError(f"--gpus {limits.gpus}: the model has {count(cfg.n_layers, 'block')}. Take as many at most.")
    if device.type == "cuda" and (wrong := next(_without_kernels(cfg, o.dtype, device, assumed), "")):
        raise InputError(wrong)
    return device, limits, assumed


def _without_kernels(cfg: ModelConfig, dtype: str, device: torch.device, assumed: Machine | None) -> Iterator[str]:
    """Why no kernel of this GPU computes the model, or none can be compiled."""
    from trireme.kernels.launch import widest_head  # late: Triton takes a second
    from trireme.kernels.launcher import why_none

    most = widest_head(torch.float32 if dtype == "fp32" else torch.bfloat16)
    if cfg.widest_head > most:
        yield f"the model has heads of {cfg.widest_head}, a GPU computes heads of {most}. Add --device cpu."
    if cfg.fp8 and (assumed.rates.fp8 == 0 if assumed else torch.cuda.get_device_capability(device) < (8, 9)):
        yield "--dtype fp8: this GPU multiplies no fp8; Ada, Hopper and newer do. Leave it out."
    if not assumed and (why := why_none()):
        yield f"Triton compiles no kernel here ({why.rstrip('.')}). Install gcc and python3-dev."


# ---------------------------------------------------------------- how much is computed


def sequence_length(o: Options, cfg: ModelConfig) -> int:
    """Tokens of a sequence. Raises InputError."""
    seq_len, most = o.seq_len or min(2048, cfg.max_positions), cfg.max_positions
    if seq_len > most:
        longer = f", or extend them: --rope-factor {-(-seq_len // most)}" if cfg.rotates and not cfg.indexed else ""
        raise InputError(f"--seq-len {seq_len}: the model has {most} positions. Lower it{longer}.")
    return seq_len


def with_work(o: Options, data: Dataset | None, room: int) -> tuple[Options, Work]:
    """How much the run computes, and the options with its epochs and interval of evaluations: fewer than ten in a
    short run.

    Evaluations take about EVALUATING of the run, and each at least as many tokens as a step. Without data all sequences
    are full, and without a tokenizer they are estimated from bytes.
    """
    if data is None:
        tokens = bytes_of(o) / BYTES * (o.epochs or 1.0)
        steps = math.ceil(tokens / (o.batch_size * room)) if tokens else SOME_STEPS
        return o, Work(room, o.batch_size, o.max_steps or steps, document=room)
    if not o.max_steps and o.epochs is None:
        o = replace(o, epochs=1.0 if data.is_text or data.options.paired else 3.0)
    steps = o.max_steps or max(1, math.ceil(data.steps_per_epoch(o.batch_size) * (o.epochs or 1.0)))
    sequences = min(o.batch_size, data.n_sequences)
    work = Work(room, sequences, steps, data.report.used, data.document, data.trained, data.options.paired)
    if data.held_out is None:
        return o, work
    share = EVALUATING * steps / COSTS / (1 - EVALUATING)  # of a step's tokens, of all evaluations
    if "eval_every" not in o.chosen and o.eval_every == Options.eval_every and share < 11:
        o = replace(o, eval_every=Every(steps=math.ceil(steps / max(1, int(share) - 1))))
    n = 1 + o.eval_every.times(0, steps) + (not o.eval_every.due(steps, steps, 0.0))
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


def files_of(o: Options, opened: opening.Opened, work: Work) -> Files:
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
        apart=o.export_every.times(0, work.steps),
        read=2 * source.nbytes if o.base else 0,  # for codes and for scales
        exact=bool(cfg.lora) or dtypes != {"BF16"},
    )


def check_room(job: Job) -> None:
    """Raises DoesNotFit if a drive has no space for what the run must write: its output, state that steps write, of
    which a snapshot has links, and a first snapshot that is certain to be made.
    """
    part, stores, on_ssd = job.forecast.disk_parts(), folder.stores(job.options), job.plan.uses("ssd")
    often = job.options.save_every  # after minutes there may be space
    certain = on_ssd or (not often.seconds and job.plan.hosts == 1 and often.times(0, job.total_steps))
    state = part["store"] * bool(certain) + on_ssd * (part["spares"] + part["scratch"] + part["frozen"])
    wanted = [(job.out, part["export"] + part["best"] + part["apart"]), *((d, state // len(stores)) for d in stores)]
    if isinstance(job.source, Cached) and not job.source.is_made():
        wanted.append((stores[0], job.source.file_bytes))
    for place, need in wanted:
        total = sum(other for at, other in wanted if drive_of(at) == drive_of(place))
        disk = shutil.disk_usage(existing(place))
        free = disk.free - on_ssd * reserved(disk.total)
        if need and total > free:
            way = "Free some, name another drive with --out or --store, or save less often with --save-every"
            raise DoesNotFit(f"{place}: the run writes {gb(total)} there, {gb(max(0, free))} are free. {way}.")


# ---------------------------------------------------------------- what would fit


def alternatives(o: Options) -> str:
    """A sentence that offers the most exact of what would fit, with its step: 8-bit moments, adapters, a quantized
    base, a smaller step.
    """
    frozen = bool(o.lora or o.adapter or o.freeze or o.train)
    lora: dict[str, Any] = {} if frozen else {"lora": 16}
    tries: list[dict[str, Any]] = [] if frozen else [{"adam_bits": 8}, lora]
    tries += [] if o.base else [lora | {"base": "nf4"}]
    tries += [(tries or [{}])[-1] | {"batch_size": max(1, o.batch_size // k)} for k in (2, 4, 16)]
    for change in [] if o.resume or o.plan else tries:
        with suppress(DoesNotFit, InputError, OSError):
            job = make(replace(o, data=(), val=None, dry_run=True, **change), by_rule=True)
            if not o.assume:
                check_room(job)
            speed = f", at most {job.forecast.step.step_s:.3g} s a step" if job.on_gpu else ""
            return f" This fits: {' '.join(f'{flag(name)} {value}' for name, value in change.items())}{speed}."
    return ""
