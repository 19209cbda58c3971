"""A job: all that is decided before a run writes its first byte. `make` prints warnings alone, report.py the job."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import count, gib
from trireme.engine.check import tuned
from trireme.engine.data.dataset import Dataset, load_dataset
from trireme.engine.data.find import find
from trireme.engine.data.prepare import DataOptions
from trireme.engine.data.taught import PLACE
from trireme.engine.geometry import Geometry
from trireme.engine.hosts.group import here
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.forecast import Files, Forecast, Work
from trireme.engine.planner.host import are_equal, choose_device, choose_gpus, drive_of, memory_limits, model_of
from trireme.engine.planner.machine import pinnable, this_machine
from trireme.engine.planner.rates import Machine, assume, reserved
from trireme.engine.run import config_file, folder, screen
from trireme.engine.run.opening import (
    KINDS,
    Opened,
    alpha_of,
    in_wording,
    is_absent,
    open_model,
    pad_of,
    parameters,
    preference_of,
)
from trireme.engine.run.options import Every, Options, flag
from trireme.engine.run.planning import DTYPES, Planner, misfit
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
    opened: Opened
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
    def parameters(self) -> int:
        return shapes.parameters(self.cfg)

    @property
    def trained_parameters(self) -> int:
        return sum(Geometry.of(self.cfg, self.plan).numel)

    @property
    def preference(self) -> Preference | None:
        return preference_of(self.options)

    @property
    def total_steps(self) -> int:
        return self.work.steps

    @property
    def seq_len(self) -> int:
        assert self.options.seq_len is not None
        return self.options.seq_len

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

    def fixed(self, begun: Snapshot | None) -> Fixed:
        """What a resumed run keeps of this one; checksums of files are those that it began with."""
        tensors = {name: [t.dtype, *t.shape] for name, t in _inner(self.source).tensors.items()}
        content, data = json.loads(json.dumps(numbers(self.cfg))), fingerprint(self.data)
        size = self.options.batch_size
        own = Fixed(self.plan, size, self.rows, self.seq_len, content, tensors, data, self.date)
        then = begun.fixed if begun else own
        own = replace(own, launches=tuned.digest(self.launches), base=dict(then.base))
        return replace(own, reference=then.reference, teacher=then.teacher)


def make(o: Options, begun: Snapshot | None = None, by_rule: bool = False) -> Job:
    """Reads and checks what the options name, and makes the plan. `begun`: the snapshot that it goes on from.
    `by_rule`: the plan is not searched for, which takes seconds.

    With several hosts all call it, and get the same plan. Raises InputError, CheckpointError, DoesNotFit.
    """
    fixed, clock, group = begun.fixed if begun else None, screen.clock(), here()
    check(o, fixed)
    now = group.texts(date.today().isoformat())[0]
    today = fixed.date if fixed else now
    with clock.at("headers"):
        opened = open_model(o, today)
        o = replace(o, labels=opened.labels, seq_len=sequence_length(o, opened.cfg))
        if fixed:
            check_model(o, fixed, opened)
    with clock.at("probe"):
        device, limits, assumed = computer(o, opened.cfg)
        launches = {} if assumed else tuned.stored(device)
        if fixed and fixed.launches != tuned.digest(launches):
            screen.warn("kernels have other settings than before (check --tune), with which they may round differently")
    room = tokens_of_a_sequence(o)
    planner = Planner(o, opened.cfg, room, device.type == "cuda", limits, fixed, group.hosts)
    with clock.at("plan"):
        planner.refuse_early()
    with clock.at("tokens"):
        data = read_data(o, opened)
    opened = in_wording(o, opened, data)
    if fixed and data and fingerprint(data) != fixed.data:
        raise InputError(f"--resume {o.out}: {_other_data(o, begun)}")
    planner = replace(planner, limits=less_tables(limits, data, o, opened.cfg))
    steps, stores = steps_of(o, data), folder.stores(o)
    o = with_interval(o, steps)
    work = work_of(o, data, steps, room)
    files, limits = files_of(o, opened, data, work), planner.limits_for(work.sequences)
    with clock.at("probe"):
        machine = assumed or this_machine(device, planner.dtype, limits, stores, opened.cfg.fp8, opened.cfg.scan)
        if group.hosts > 1:
            machine = replace(machine, rates=replace(machine.rates, net=group.speed()))  # type: ignore[attr-defined]
    with clock.at("plan"):
        plan, machine = planner.search(work, files, limits, machine, stores, by_rule)
        if group.hosts > 1:
            plan = replace(Plan.of(json.loads(group.texts(json.dumps(asdict(plan)))[0])), host=group.host)
    if not (assumed or is_absent(o)):
        why = why_copied(opened.cfg, plan.dtype, opened.source, opened.stored, stores)
        files = replace(files, copied=f"copied: {why}" if why else "")
    if begun and work.steps < begun.progress.step:
        done = f"the run is at step {begun.progress.step:,}"
        raise InputError(f"--resume {o.out}: {done}. Give more: --max-steps or --epochs.")
    o = in_force(o, opened.cfg, data, plan)
    job = Job(o, opened, data, device, plan, limits, machine, work, files, today, launches)
    if data and group.hosts > 1:
        fixed = job.fixed(begun)
        group.agree("data", {"--data": fixed.data}, "Copy host 0's")
        group.agree("checkpoints", {"config": fixed.config, "tensors": fixed.tensors}, "Copy host 0's")
    return job


def check(o: Options, fixed: Fixed | None) -> None:
    """Raises InputError for options that do not go together, or not with what a resumed run keeps."""
    check_named(o)
    if (o.export == "best" or o.patience) and not o.val and o.data:
        raise InputError("--export best and --patience need the loss on held-out data. Give --val.")
    if o.long == "split" and o.method != "sft":
        raise InputError(f"--long split: --method {o.method} reads whole answers. Take cut, drop or error.")
    stores = {Path(d).resolve() for d in o.store}
    if len(stores) < len(o.store) or Path(o.out or "?").resolve() in stores or Path("/") in stores:
        raise InputError(f"--store {','.join(o.store)}: name a folder of its own on each drive, and not --out.")
    if o.teacher and here().hosts > 1:
        raise InputError("--teacher: runs with one are on one host. Start it without torchrun.")
    if fixed is None:
        return
    p, fp8 = fixed.plan, bool(fixed.config.get("fp8"))
    dtype = "fp8" if fp8 else next(name for name, stored in DTYPES.items() if stored == p.dtype)
    kept: dict[str, Any] = {"batch_size": fixed.batch_size, "seq_len": fixed.seq_len, "dtype": dtype}
    if not o.plan:  # which says these
        most = fixed.rows if p.n_micro == 1 else o.micro_batch  # one micro-batch is the whole step
        kept |= {"adam_bits": p.adam_bits}
        if isinstance(o.micro_batch, int) and isinstance(most, int) and min(o.micro_batch, most) != fixed.rows:
            raise InputError(f"--micro-batch {o.micro_batch}: the run began with {fixed.rows}. Leave it out.")
    for name, before in kept.items():
        if (now := getattr(o, name)) not in (None, "auto", before) or (name == "dtype" and fp8 != (now == "fp8")):
            raise InputError(f"{flag(name)} {now}: the run began with {before}, which cannot change. Leave it out.")


def check_named(o: Options) -> None:
    """Raises InputError unless a model and data are named, or only a plan is wanted."""
    if not (o.model or o.shape):
        raise InputError("no checkpoint given. Try: trireme CHECKPOINT --data FILE, or --demo, or --help.")
    if o.shape and (o.model or not o.dry_run):
        wrong = f"leave {o.model} out" if o.model else "add --dry-run"
        raise InputError(f"--shape {o.shape} plans for a model that is not here: {wrong}.")
    if o.assume and not o.dry_run:
        raise InputError("--assume plans for a machine that is not this one. Add --dry-run.")
    if not o.data and not o.dry_run:
        raise InputError("no data given. Name it: --data FILE (.jsonl .json .csv .txt .parquet).")


def check_model(o: Options, fixed: Fixed, opened: Opened) -> None:
    """Raises InputError unless the model is that of the resumed run."""
    now = json.loads(json.dumps(numbers(opened.cfg)))
    for name in [*fixed.config, *now]:
        if now.get(name) != fixed.config.get(name):
            way = "Name the checkpoint that it began with, as it was."
            if name in ("lora", "frozen"):
                way = "What is trained cannot change: leave --lora and its options, --freeze and --train out."
            raise InputError(f"--resume {o.out}: {name} of {o.model} is not what the run began with. {way}")
    tensors = {name: [t.dtype, *t.shape] for name, t in _inner(opened.source).tensors.items()}
    if tensors != fixed.tensors:
        raise InputError(f"--resume {o.out}: {o.model} has other tensors than the run began with. Restore it.")
    if wrong := misfit(fixed.plan, opened.cfg):
        raise InputError(f"--resume {o.out}: its snapshot was changed: {wrong}. Restore it from a copy.")


def _inner(source: Source) -> Source:
    return source.inner if isinstance(source, Rewritten) else source  # without the head that the run adds


def _other_data(o: Options, begun: Snapshot | None) -> str:
    """What may be wrong with the data of a resumed run."""
    now, then = config_file.saved(o), begun.options if begun else {}
    rows = [name for name, f in config_file.FIELDS.items() if "rows" in f.metadata["kind"]]
    if other := [flag(name) for name in rows if now[name] != then.get(name)]:
        return f"the run began with other rows. Leave {', '.join(other)} out."
    way = f"Restore it; or train its result on other data: trireme {o.out} --data FILE once it is finished."
    return f"the data is not what the run began with. {way}"


# ---------------------------------------------------------------- calls into engine/data


def read_data(o: Options, opened: Opened) -> Dataset | None:
    """The data, tokenized; None without --data. Raises InputError, OSError."""
    if not o.data or (opened.codec is None and o.dry_run):
        return None
    began = time.monotonic()
    try:
        far = lambda name, position, size: screen.far(f"reading {name}", position, size, began)
        return load_dataset(o.data, opened.codec, data_options(o, opened), far)
    finally:
        screen.clear()


def data_options(o: Options, opened: Opened) -> DataOptions:
    cfg = opened.cfg
    return DataOptions(
        seq_len=o.seq_len or 0,
        val=o.val,
        map=o.map,
        long=o.long,
        pack=not o.no_pack,
        skip_bad=o.skip_bad,
        max_samples=o.max_samples,
        seed=o.seed,
        vocab_size=cfg.vocab,
        media=cfg.media,
        shared=shared_tokens(),
        system=o.system,
        cache=None if o.dry_run else Path(o.out) / folder.RUN / "tokens",
        kind=KINDS.get(o.method, "pairs"),
        variables=json.loads(o.chat_template_kwargs or "{}"),
        labels=o.labels,
        pad=pad_of(o, opened.codec) if cfg.scores else None,
    )


def tokens_of_a_sequence(o: Options) -> int:
    """Tokens of a packed sequence: of pairs two documents."""
    return (o.seq_len or 0) * (1 if KINDS.get(o.method, "pairs") in ("", "classes") else 2)


def shared_tokens() -> Path | None:
    """The folder of tokens that all runs of this user share."""
    place = cache_folder()
    return place / "tokens" if place else None


def bytes_of(o: Options) -> int:
    """Bytes of the files of --data."""
    return sum(file.path.stat().st_size for text in o.data if text != "-" for file in find(text).files)


def nbytes_of(data: Dataset | None) -> int:
    return data.nbytes(shared_tokens()) if data else 0


def fingerprint(data: Dataset) -> str:
    """Of the data, and of what is held out."""
    return f"{data.fingerprint}-{data.held_out.fingerprint}" if data.held_out else data.fingerprint


# ---------------------------------------------------------------- machine, work


def computer(o: Options, cfg: ModelConfig) -> tuple[torch.device, Limits, Machine | None]:
    """The device, usable memory, and the machine of --assume if there is one. Raises InputError, DoesNotFit."""
    if o.assume:
        device, (assumed, limits) = torch.device("cuda"), _assumed(o, o.assume)
    else:
        device, assumed = choose_device(o.device), None
        limits = memory_limits(device, o.gpu_memory, o.ram, choose_gpus(o.gpus, device))
        if device.type == "cuda" and o.ram is None:
            limits = replace(limits, ram=int(min(limits.ram, pinnable(device))))
        here().agree("GPUs", {"--device": model_of(device)}, "Unequal ones round differently: use equal ones")
    limits = common_limits(o, limits, device)
    if limits.gpus > cfg.n_layers:
        blocks = count(cfg.n_layers, "block")
        raise InputError(f"--gpus {limits.gpus}: the model has {blocks}, a GPU computes one at least.")
    if device.type == "cuda":
        _check_gpu(cfg, device, assumed)
    return device, limits, assumed


def _assumed(o: Options, parts: str) -> tuple[Machine, Limits]:
    assumed = assume(parts)
    if o.gpus == "all" and assumed.gpus == 1:
        raise InputError("--gpus all: how many does the assumed machine have? Give --assume gpu=2xrtx4090.")
    asked = assumed.gpus if o.gpus in ("all", 1) else int(o.gpus)
    if asked > assumed.gpus > 1:
        raise InputError(f"--gpus {asked}: the assumed machine has {assumed.gpus}.")
    assumed = assumed.first(asked, o.gpu_memory)
    limits = replace(assumed.limits, ram=o.ram or assumed.limits.ram, all_free=o.gpu_memory is None)
    if limits.gpu <= 0:
        taken = gib(assumed.gpu - limits.gpu)
        raise DoesNotFit(f"--assume: the driver's context and late kernels alone take {taken} of the GPU. Assume more.")
    return assumed, limits


def _check_gpu(cfg: ModelConfig, device: torch.device, assumed: Machine | None) -> None:
    """Raises InputError if no kernel of this GPU computes the model, or none can be compiled."""
    from trireme.kernels.launch import WIDEST_HEAD  # late: Triton takes a second
    from trireme.kernels.launcher import why_none

    if cfg.widest_head > WIDEST_HEAD:
        wide = f"the model has heads of {cfg.widest_head}"
        raise InputError(f"{wide}, and a GPU computes heads of {WIDEST_HEAD} at most. Add --device cpu.")
    if cfg.fp8 and (assumed.rates.fp8 == 0 if assumed else torch.cuda.get_device_capability(device) < (8, 9)):
        raise InputError("--dtype fp8: this GPU multiplies no fp8; Ada, Hopper and newer do. Leave it out.")
    if not assumed and (why := why_none()):
        needs = "Triton needs a C compiler and Python's headers to launch kernels on a GPU"
        raise InputError(f"{needs} ({why.rstrip('.')}). Install them: gcc and python3-dev.")


def common_limits(o: Options, limits: Limits, device: torch.device) -> Limits:
    """The limits that every host has, on all its GPUs. Hosts on one machine share its RAM. Raises InputError."""
    group = here()
    if group.hosts == 1:
        return limits
    if limits.less and not are_equal(device, limits.gpus):
        raise InputError("--gpus: unequal GPUs round differently, and hosts sum what they computed. Use equal ones.")
    ram = limits.ram if o.ram else limits.ram // group.local_hosts
    room = limits.gpu - max(limits.less, default=0)  # a plan is of one host, and the same on all
    gpu, host, gpus = map(group.values, (room, ram, limits.gpus))
    if len(set(gpus)) > 1:
        raise InputError(f"--gpus: hosts have {', '.join(f'{n:.0f}' for n in gpus)}. Give each as many.")
    return replace(limits, gpu=int(min(gpu)), ram=int(min(host)), less=())


def sequence_length(o: Options, cfg: ModelConfig) -> int:
    seq_len = o.seq_len or min(2048, cfg.max_positions)
    if seq_len > cfg.max_positions:
        may_extend = cfg.rotates and not cfg.indexed
        longer = f", or extend them: --rope-factor {-(-seq_len // cfg.max_positions)}" if may_extend else ""
        raise InputError(f"--seq-len {seq_len}: the model has {cfg.max_positions} positions. Lower it{longer}.")
    return seq_len


def less_tables(limits: Limits, data: Dataset | None, o: Options, cfg: ModelConfig) -> Limits:
    """The limits less the RAM of the data's tables and a teacher's rows, in steps of TABLES so that plans repeat."""
    if data is None:
        return limits
    held = data.memory
    if cfg.teaching:
        pieces = len(data.pieces) + (len(data.held_out.pieces) if data.held_out else 0)
        rows = 3 * min(o.batch_size, data.n_sequences) * tokens_of_a_sequence(o)
        held += PLACE * pieces + rows * cfg.teaching.nbytes
    return replace(limits, ram=max(0, limits.ram - held // TABLES * TABLES))


def steps_of(o: Options, data: Dataset | None) -> int:
    """Steps of the whole run. Without a tokenizer they are estimated from bytes."""
    if data is not None:
        return o.max_steps or max(1, math.ceil(data.steps_per_epoch(o.batch_size) * epochs_of(o, data)))
    tokens = bytes_of(o) / BYTES * (o.epochs or 1.0)
    return o.max_steps or (math.ceil(tokens / (o.batch_size * tokens_of_a_sequence(o))) if tokens else SOME_STEPS)


def with_interval(o: Options, steps: int) -> Options:
    """The options with fewer evaluations than ten if those of a short run would take more than EVALUATING of it."""
    if o.eval_every != Options.eval_every or "eval_every" in o.given or not o.val:
        return o
    most = int(EVALUATING * steps / COSTS / (1 - EVALUATING)) - 1  # of a step's tokens each, without the first
    return o if most >= 10 else replace(o, eval_every=Every(steps=math.ceil(steps / max(1, most))))


def work_of(o: Options, data: Dataset | None, steps: int, room: int) -> Work:
    """How much the run computes. Without data, all sequences are full.

    Evaluations take about EVALUATING of the run, and each at least as many tokens as a step.
    """
    if data is None:
        return Work(room, o.batch_size, steps, document=room)
    sequences = min(o.batch_size, data.n_sequences)
    work = Work(room, sequences, steps, data.report.used, data.document, data.trained, data.options.paired)
    if data.held_out is None:
        return work
    evaluations = 1 + o.eval_every.times(0, steps) + (not o.eval_every.due(steps, steps, 0.0))
    share = EVALUATING * steps / COSTS / (1 - EVALUATING) / evaluations  # of a step's tokens, each
    read = o.eval_tokens or math.ceil(max(1.0, share) * work.tokens)
    return replace(work, evaluations=evaluations, held_out=min(read, data.held_out.tokens))


def epochs_of(o: Options, data: Dataset) -> float:
    return o.epochs or (1.0 if data.is_text or data.options.paired else 3.0)


def in_force(o: Options, cfg: ModelConfig, data: Dataset | None, plan: Plan) -> Options:
    """The options with all that was chosen, so that config.yaml repeats the run where defaults differ."""
    rate = 2e-4 if cfg.lora else 2e-5 if shapes.parameters(cfg) < SMALL else 1e-5
    if o.method not in ("sft", "reward", "classify"):
        rate = 1e-5 if cfg.lora else 1e-6
    chosen: dict[str, Any] = {"lr": rate, "weight_decay": 0.0 if cfg.lora else 0.01, "adam_bits": plan.adam_bits}
    if data is not None and not o.max_steps:
        chosen["epochs"] = epochs_of(o, data)
    if o.lora and cfg.lora:
        chosen |= {"lora_alpha": alpha_of(o), "lora_targets": cfg.lora.targets}
        o = replace(o, lora_targets=())
    if of := preference_of(o):
        chosen |= {name: getattr(of, name) for name in parameters(o.method)}
    if cfg.teaching:
        of_teacher = cfg.teaching
        chosen |= {"distill_weight": of_teacher.weight, "temperature": of_teacher.temperature, "top_k": of_teacher.k}
    return replace(o, **{name: value for name, value in chosen.items() if getattr(o, name) in (None, ())})


# ---------------------------------------------------------------- drives


def files_of(o: Options, opened: Opened, data: Dataset | None, work: Work) -> Files:
    """What the run has on drives, and will have, besides training state."""
    cfg, source, out = opened.cfg, opened.source, Path(o.out)
    tokens = nbytes_of(data)
    held = [file for d in folder.stores(o) for file in version_files(d)]
    held += [file for kind in (f"{folder.RUN}/best-*", "step-*") for file in out.glob(f"{kind}/*.safetensors")]
    dtypes = {t.dtype for name in opened.stored.values() if (t := source.tensors.get(name))}
    return Files(
        export=4 * sum(map(math.prod, adapter_shapes(cfg).values())) if cfg.lora else source.nbytes,
        merged=source.nbytes * o.merge,
        best=data is not None and data.held_out is not None,
        tokens=tokens,
        held=sum(file.stat().st_blocks * 512 for file in held) + (0 if o.dry_run else tokens),
        keep=o.keep,
        apart=o.export_every.times(0, work.steps),
        read=read_for_base(source) if o.base else 0,
        exact=bool(cfg.lora) or dtypes != {"BF16"},
    )


def read_for_base(source: Source) -> int:
    """Bytes read to quantize a base: the checkpoint twice, for codes and for scales; into a file once, which is read. A
    file that is there is read twice, the first time for its checksum.
    """
    if isinstance(source, Cached):
        return source.file_bytes + (source.file_bytes if source.is_made() else source.nbytes)
    return 2 * source.nbytes


def check_room(job: Job) -> None:
    """Raises DoesNotFit if a drive has no space for what the run must write: its output, state that steps write, and
    the first snapshot where it is certain to be made. Of state that steps write, a snapshot has links.
    """
    part, stores, on_ssd = job.forecast.disk_parts(), folder.stores(job.options), job.plan.uses("ssd")
    wanted = [(job.out, part["export"] + part["best"] + part["apart"], "--out")]
    often = job.options.save_every  # after minutes there may be space
    certain = not often.seconds and job.plan.hosts == 1 and often.times(0, job.total_steps)
    state, option = part["store"] * bool(certain), "--store, or set --save-every never"
    if on_ssd:
        state, option = part["store"] + part["spares"] + part["scratch"] + part["frozen"], "--store"
    wanted += [(d, state // len(stores), option) for d in stores if state]
    if isinstance(job.source, Cached) and not job.source.is_made():
        wanted.append((stores[0], job.source.file_bytes, "--store"))
    by_drive: dict[int, list[tuple[Path, int, str]]] = defaultdict(list)
    for place, need, name in wanted:
        by_drive[drive_of(place)].append((place, need, name))
    for parts in by_drive.values():
        disk, needs = shutil.disk_usage(existing(parts[0][0])), sum(need for _, need, _ in parts)
        reserve = reserved(disk.total) if on_ssd and any(name == "--store" for *_, name in parts) else 0
        if needs > disk.free - reserve:
            names = " or ".join(dict.fromkeys(name for *_, name in parts))
            kept = f", {gib(reserve)} of them to stay free for the file system" if reserve else ""
            raise DoesNotFit(
                f"{parts[-1][0]}: the run writes {gib(needs)} there, {gib(disk.free)} are free{kept}. Free some, or "
                f"name another drive with {names}."
            )


# ---------------------------------------------------------------- what would fit

BASES, RANK = ("fp8", "nf4"), 16  # what is offered where a run does not fit, the more exact base first


def alternatives(o: Options) -> str:
    """A sentence that offers what would fit, each with its step: a quantized base, adapters, 8-bit moments, a smaller
    step if nothing else fits.
    """
    if o.resume or o.plan:
        return ""
    frozen = bool(o.lora or o.adapter or o.freeze or o.train)
    tries: list[dict[str, Any]] = [] if frozen else [{"adam_bits": 8}, {"lora": RANK}]
    tries += [({} if frozen else {"lora": RANK}) | {"base": base} for base in BASES if o.base is None]
    tries += [(tries or [{}])[-1] | {"batch_size": o.batch_size // k} for k in (2, 4, 8, 16) if o.batch_size >= k]
    fitting = list[str]()
    for change in tries:
        once = fitting and not change.keys().isdisjoint(("base", "batch_size"))
        if once or any(getattr(o, name) == value for name, value in change.items()):
            continue
        try:
            job = make(replace(o, data=(), val=None, dry_run=True, **change), by_rule=True)
            if not o.assume:
                check_room(job)
        except (DoesNotFit, InputError, OSError):
            continue
        speed = f", at most {job.forecast.step.step_s:.3g} s a step" if job.on_gpu else ""
        fitting.append(" ".join(f"{flag(name)} {value}" for name, value in change.items()) + speed)
    return f" This fits: {'; or '.join(fitting)}." if fitting else ""
