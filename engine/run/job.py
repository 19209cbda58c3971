"""A job: everything about a run that is settled before the first byte is written, and the report of it."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from trireme.engine.amounts import compact, count, gib
from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.dataset import DataOptions, Dataset, load_dataset
from trireme.engine.data.prepare import Progress
from trireme.engine.plan import DoesNotFit, Plan
from trireme.engine.planner.forecast import Forecast
from trireme.engine.planner.machine import as_planned, available_ram, choose_device, drive, memory_limits, this_machine
from trireme.engine.planner.rates import Machine, assume
from trireme.engine.run.options import Options
from trireme.engine.run.settle import CUT, Planner, check_model, check_resumed, identity
from trireme.engine.schedule import learning_rate
from trireme.models import hf, shapes
from trireme.models.config import InputError, ModelConfig, read_config
from trireme.storage.checkpoint import Source, open_source
from trireme.storage.files import Say, existing, to_stderr
from trireme.storage.versions import version_files

SMALL = 3_000_000_000  # parameters below which the usual learning rate is twice as high


@dataclass(frozen=True)
class Job:
    """What is trained, on what, where and for how long."""

    options: Options
    cfg: ModelConfig
    source: Source
    stored: dict[str, str]  # canonical tensor name -> name in the source
    codec: Codec | None
    data: Dataset
    device: torch.device
    plan: Plan
    because: tuple[str, ...]  # why the plan is what it is
    limits: dict[str, int]  # bytes of gpu and host
    machine: Machine
    seq_len: int
    micro_rows: int  # rows of a micro-batch
    total_steps: int
    lr: float

    @property
    def out(self) -> Path:
        return Path(self.options.out)

    @property
    def store_dirs(self) -> list[Path]:
        return [Path(d) for d in self.options.store] or [self.out / "store"]

    @property
    def parameters(self) -> int:
        return shapes.parameters(self.cfg)


def prepare(options: Options, like: dict | None = None, progress: Progress | None = None, say: Say = to_stderr) -> Job:
    """Reads and checks everything that the options name, and plans.

    `like`: the cut of a run that is resumed (see `cut`). `progress(name, position, size)` hears of data files as they
    are read, in bytes. Raises InputError, CheckpointError, DoesNotFit.
    """
    if like is not None:
        check_resumed(options, like)
    folder = Path(options.model)
    cfg = read_config(folder)
    source = open_source(folder, say)
    if like is not None:
        check_model(options, like, cfg, source)
    stored = hf.sources(cfg, {name: t.shape for name, t in source.tensors.items()})
    codec = load_codec(options.tokenizer or folder, options.chat_template)
    if options.tokenizer and codec is None:
        wrong = "is a file; name its folder" if Path(options.tokenizer).is_file() else "holds no tokenizer.json"
        raise InputError(f"--tokenizer {options.tokenizer} {wrong}.")
    seq_len = options.seq_len or min(2048, cfg.max_positions)
    if seq_len > cfg.max_positions:
        raise InputError(f"--seq-len {seq_len}: the model has {cfg.max_positions} positions. Lower it.")
    if options.assume:
        assumed, limits = _assumed(options)
        device = torch.device("cuda")
    else:
        assumed, device = None, choose_device(options.device)
        limits = memory_limits(device, options.gpu_memory, options.ram)
    planner = Planner(options, cfg, seq_len, device.type == "cuda", limits, like)
    planner.refuse_early()
    data = load_dataset(options.data, codec, _data_options(options, cfg, seq_len), progress)
    sequences = min(options.batch_size, data.n_sequences)
    limits = planner.limits_for(sequences)
    machine = assumed or this_machine(device, planner.dtype, limits, options.store or (options.out,))
    plan, because, machine = planner.find(data, sequences, limits, machine, source.nbytes)
    per_epoch = data.steps_per_epoch(options.batch_size)
    epochs = options.epochs or (1 if data.is_text else 3)
    job = Job(
        options, cfg, source, stored, codec, data, device, plan, because, limits, machine, seq_len,
        micro_rows=plan.tokens // seq_len,
        total_steps=options.max_steps or max(1, math.ceil(per_epoch * epochs)),
        lr=options.lr or (2e-5 if shapes.parameters(cfg) < SMALL else 1e-5),
    )  # fmt: skip
    return replace(job, machine=as_planned(machine, cfg, plan, forecast(job).batch, device))


def _assumed(options: Options) -> tuple[Machine, dict[str, int]]:
    """The machine that --assume says, and the bytes of gpu and host that a plan may use of it.

    What --gpu-memory and --ram say takes the place of what is assumed. Raises InputError, DoesNotFit.
    """
    if not options.dry_run:
        raise InputError("--assume plans for a machine that is not this one. Add --dry-run.")
    machine = assume(options.assume)
    machine = replace(machine, gpu=options.gpu_memory or machine.gpu)
    limits = machine.limits | ({"host": options.ram} if options.ram else {})
    if limits["gpu"] <= 0:
        taken = gib(machine.gpu - limits["gpu"])
        raise DoesNotFit(f"--assume: the driver's context and late kernels alone take {taken} of the GPU. Assume more.")
    return machine, limits


def forecast(job: Job) -> Forecast:
    """What the run will take."""
    rows = min(job.options.batch_size, job.data.n_sequences)
    kept = [*(file for d in job.store_dirs for file in version_files(d)), *(job.out / "best").glob("*.safetensors")]
    kept = sum(file.stat().st_blocks * 512 for file in kept)
    tokens = job.data.nbytes
    return Forecast(
        job.cfg, job.plan, job.machine, job.limits, job.seq_len, rows, job.total_steps, job.options.keep,
        most=job.data.n_sequences, used=job.data.report.used, document=job.data.document, trained=job.data.trained,
        cuda=job.device.type == "cuda", bits_open=job.options.resume is None,
        data=tokens, held=kept + (0 if job.options.dry_run else tokens),
        export=job.source.nbytes, best=job.data.held_out is not None,
    )  # fmt: skip


def check_room(job: Job) -> None:
    """Raises DoesNotFit where a drive has no room for what the run cannot do without: a disk full at its end is late.

    Snapshots may be had or not; the report says what they would take.
    """
    part = forecast(job).disk_parts()
    wanted = [(job.out, part["export"] + part["best"], "--out")]
    if job.plan.uses("ssd"):
        each = (part["store"] + part["spares"] + part["waiting"]) // len(job.store_dirs)
        wanted += [(d, each, "--store") for d in job.store_dirs]
    by_drive = defaultdict(list)
    for folder, need, option in wanted:
        by_drive[drive(folder)].append((folder, need, option))
    for here in by_drive.values():
        folders, needs, options = zip(*here, strict=True)
        room = shutil.disk_usage(existing(folders[0])).free
        if sum(needs) > room:
            raise DoesNotFit(
                f"{folders[-1]}: what the run writes there takes {gib(sum(needs))}, {gib(room)} are free. "
                f"Make room, or name another drive with {' or '.join(dict.fromkeys(options))}."
            )


def _data_options(options: Options, cfg: ModelConfig, seq_len: int) -> DataOptions:
    cache = None if options.dry_run else Path(options.out) / "tokens"
    return DataOptions(
        seq_len=seq_len,
        val=options.val,
        map=options.map,
        long=options.long,
        pack=not options.no_pack,
        skip_bad=options.skip_bad,
        seed=options.seed,
        vocab_size=cfg.vocab,
        cache=cache,
    )


def cut(job: Job) -> dict:
    """What must be the same for a resumed run to go on to the bit: the model, how a step is cut, how state is cut and
    stored, and by the plan where updates run.
    """
    p = job.plan
    asked = {"batch_size": job.options.batch_size, "rows": job.micro_rows, "model": identity(job.cfg, job.source)}
    return {key: getattr(p, key) for key in CUT} | asked | {"plan": asdict(p)}


def report(job: Job) -> list[str]:
    """The lines that are printed before the first step: model, data, method, machine, plan."""
    cfg, o = job.cfg, job.options
    dtypes = "/".join(dict.fromkeys(job.source.tensors[n].dtype for n in job.stored.values()))
    head = "tied head" if cfg.tied else "untied head"
    vocabulary = f"tokenizer {job.codec.facts.vocab_size:,}" if job.codec else "no tokenizer"
    files = f"{len(job.source.files)} shard{'s' * (len(job.source.files) > 1)}, {gib(job.source.nbytes)}"
    lines = [
        f"model    {cfg.model_type}, {compact(job.parameters)} parameters, {dtypes}, {files}; "
        f"{cfg.n_layers} layers; {head}; {vocabulary}",
        *_labelled("data", job.data.report.lines()),
        *_labelled("val", job.data.describe_held_out()),
    ]
    for k in range(min(o.show_example, len(job.data.pieces))):
        lines += _labelled("example", [job.data.example(k)])
    master = "split fp32 master" if job.plan.dtype == "BF16" else "fp32"
    adamw = f"AdamW ({master}, {job.plan.adam_bits}-bit moments)"
    lines.append(
        f"method   full fine-tuning, {adamw}, peak lr {job.lr:g}, {o.schedule}, "
        f"clip {o.max_grad_norm or 'off'}; compute in {job.plan.dtype.lower()}"
    )
    lines.append(f"machine  {job.machine.describe()}")
    given = job.limits["host"] + (job.limits["gpu"] if job.device.type == "cpu" else 0)  # on a CPU both tiers are RAM
    if not o.assume and given > (free := available_ram()):
        lines += _labelled(
            "", [f"warning: the limit of {gib(given)} is more than the {gib(free)} of RAM that are free"]
        )
    rows = min(o.batch_size, job.data.n_sequences)
    fewer = f" (all there are, fewer than --batch-size {o.batch_size:,})" if rows < o.batch_size else ""
    lines.append(
        f"steps    {job.total_steps:,} of {count(rows, 'sequence')}{fewer} of up to {job.seq_len:,} tokens, "
        f"{job.plan.n_micro} micro-batch{'es' * (job.plan.n_micro > 1)} of {job.micro_rows}"
    )
    lines += _labelled("", _length_notes(job))
    return [*lines, *forecast(job).lines(faster=o.dry_run), *_labelled("because", list(job.because))]


def _length_notes(job: Job) -> list[str]:
    """What the options say of the run's length that is not as it seems."""
    o, notes = job.options, []
    if o.max_steps and o.epochs:
        notes.append(f"note: --max-steps {o.max_steps:,} decides, not --epochs {o.epochs:g}")
    warmup = o.warmup_steps(job.total_steps)
    if warmup >= job.total_steps and o.warmup >= 1:
        rate = learning_rate(job.total_steps, job.total_steps, job.lr, o.schedule, warmup)
        notes.append(f"note: --warmup {warmup:,} takes the whole run; its last step has lr {rate:.1e}")
    return notes


def _labelled(label: str, lines: list[str]) -> list[str]:
    """Lines under one label, the following ones indented."""
    return [f"{label if i == 0 else '':8} {line}" for i, line in enumerate(lines)]
