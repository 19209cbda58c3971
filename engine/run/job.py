"""A job: everything that is decided before a run writes its first byte."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import gib
from trireme.engine.check.tuned import kept as settings_kept
from trireme.engine.check.tuned import usable
from trireme.engine.data.codec import Codec
from trireme.engine.data.dataset import Dataset, load_dataset
from trireme.engine.data.prepare import DataOptions, Progress
from trireme.engine.data.taught import PLACE
from trireme.engine.geometry import Geometry
from trireme.engine.hosts.group import Alone, Group
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.clock import Clock
from trireme.engine.planner.forecast import Files, Forecast, Work
from trireme.engine.planner.host import drive_of, model_of
from trireme.engine.planner.machine import this_machine
from trireme.engine.planner.rates import Machine, reserved
from trireme.engine.run.begin.limits import check_fp8, check_gpus, check_heads, common_limits, device_and_limits
from trireme.engine.run.begin.method import kind_of_data, parameters, preference_of
from trireme.engine.run.begin.model import alpha_of, given_adapter, is_absent, open_model, pad_of
from trireme.engine.run.begin.snapshot import Pinned, check_updates, identity, pinned_of
from trireme.engine.run.options import Options, store_folders
from trireme.engine.run.plan import Planner
from trireme.engine.tuning.adapters import Adapter, adapter_shapes
from trireme.engine.tuning.base import why_copied
from trireme.engine.tuning.cached import Cached
from trireme.kernels.private import cache_folder
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source
from trireme.storage.files import Say, existing, to_stderr
from trireme.storage.versions import version_files

EVALUATING = 0.1  # evaluations' share of a run's time
TABLES = 64 << 20  # bytes; less is in the reserve of RAM
SOME_STEPS = 1000  # of a plan without data
SMALL = 3_000_000_000  # parameters; below, the default learning rate is doubled


@dataclass(frozen=True)
class Job:
    """The model, data, machine and plan of a run, and the options in force."""

    options: Options
    out: Path
    cfg: ModelConfig
    source: Source
    stored: dict[str, str]  # tensor name -> name in the source
    codec: Codec | None
    read: Dataset | None  # None of a dry run that names no data
    device: torch.device
    plan: Plan
    limits: Limits
    machine: Machine
    work: Work
    files: Files
    launches: dict[str, list[int]] = field(default_factory=dict)  # settings of kernels, as tuned.kept

    @property
    def data(self) -> Dataset:
        assert self.read is not None
        return self.read

    @property
    def store_dirs(self) -> list[Path]:
        return store_folders(self.options.store, self.out)

    @property
    def parameters(self) -> int:
        return shapes.parameters(self.cfg)

    @property
    def adapter(self) -> Adapter | None:
        return given_adapter(self.options, self.cfg)

    @property
    def trained_parameters(self) -> int:
        return sum(Geometry.of(self.cfg, self.plan).numel)

    @property
    def lr(self) -> float:
        assert self.options.lr is not None
        return self.options.lr

    @property
    def weight_decay(self) -> float:
        assert self.options.weight_decay is not None
        return self.options.weight_decay

    @property
    def seq_len(self) -> int:
        return self.work.seq_len

    @property
    def total_steps(self) -> int:
        return self.work.steps

    @property
    def eval_rows(self) -> int | None:
        """Held-out rows that an evaluation reads; None: all of them."""
        held_out, tokens = self.read and self.read.held_out, self.work.held_out
        if held_out is None or tokens >= held_out.tokens:
            return None
        return max(1, round(held_out.n_sequences * tokens / held_out.tokens))

    @property
    def micro_rows(self) -> int:
        return self.plan.tokens // self.seq_len

    @property
    def n_micro(self) -> int:
        """Most micro-batches of a step, over all hosts."""
        if self.plan.hosts == 1:
            return self.plan.n_micro
        return min(self.plan.hosts * self.plan.n_micro, math.ceil(self.work.sequences / self.micro_rows))

    @property
    def pinned(self) -> Pinned:
        return Pinned(self.plan, self.options.batch_size, self.micro_rows, identity(self.cfg, self.source))

    @cached_property
    def forecast(self) -> Forecast:
        return Forecast(self.cfg, self.plan, self.machine, self.limits, self.work, self.files)


def prepare(
    options: Options,
    saved: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    say: Say = to_stderr,
    clock: Clock | None = None,
    group: Alone | None = None,
    date: str | None = None,
    launches: Mapping[str, list[int]] | None = None,
) -> Job:
    """Reads and checks what the options name, and makes the plan.

    `saved`: Pinned.json of a resumed run. `progress(name, position, size)`: bytes read of each data file. `clock`
    counts the parts. `group`: the hosts; the plan is for the smallest of them. `date`: what chat templates take for
    today. `launches`: settings of kernels that a resumed run began with; None: those kept for this GPU. Raises
    InputError, CheckpointError, DoesNotFit.
    """
    assert options.model or options.shape
    assert options.out
    if options.teacher and group and group.hosts > 1:
        raise InputError("--teacher: runs with one are on one host. Start it without torchrun, or with one.")
    clock, out, group = clock or Clock(), Path(options.out), group or Alone()
    with clock.at("headers"):
        pinned = None if saved is None else pinned_of(options, saved, group.host, group.hosts)
        options, cfg, source, stored, codec, seq_len = open_model(options, pinned, date, group.hosts, say)
    with clock.at("probe"):
        device, limits, assumed = device_and_limits(options)
        if not assumed:
            unequal = "Unequal ones round differently: use equal ones, or --device cpu on all"
            group.agree("GPUs", {"--device": model_of(device)}, unequal)
        limits = common_limits(group, options, limits, device)
        settings = {} if assumed else common_launches(group, device, launches, say)
    check_gpus(cfg, limits.gpus)
    check_heads(cfg, device)
    check_fp8(cfg, device, assumed)
    if saved is not None and device.type == "cuda":
        check_updates(options, saved, group.hosts)
    read = _data_options(options, cfg, seq_len, pad_of(options, codec) if cfg.scores else None)
    planner = Planner(options, cfg, read.room, device.type == "cuda", limits, pinned, clock, group.hosts)
    with clock.at("plan"):
        planner.refuse_early()
    with clock.at("tokens"):
        data = load_dataset(options.data, codec, read, progress) if options.data else None
    planner = replace(planner, limits=_with_tables(limits, data, _of_a_teacher(options, cfg, data, seq_len)))
    work = _work(options, data, read.room)
    files = _files(options, cfg, out, source, stored, data, work)
    limits, stores = planner.limits_for(work.sequences), [Path(d) for d in options.store] or [out]
    with clock.at("probe"):
        machine = assumed or this_machine(device, planner.dtype, limits, stores, cfg.fp8, cfg.scan)
        if isinstance(group, Group):
            machine = replace(machine, rates=replace(machine.rates, net=group.speed()))
    with clock.at("plan"):
        plan, machine = planner.find(work, files, limits, machine, stores)
        plan = common_plan(group, plan)
    if not (assumed or is_absent(options)):
        why = why_copied(cfg, plan.dtype, source, stored, stores)
        files = replace(files, copied=f"copied: {why}" if why else "")
    options = _in_force(options, cfg, data, seq_len, plan)
    return Job(
        options, out, cfg, source, stored, codec, data, device, plan, limits, machine, work, files, settings
    )


def read_for_base(source: Source) -> int:
    """Bytes that are read to load a base: the checkpoint twice, for codes and for scales, or for its checksums and for
    both. A file that keeps the result is read once, and before that compared with its checksum if it is there.
    """
    kept = source.file_bytes if isinstance(source, Cached) else 0
    return 2 * kept if isinstance(source, Cached) and source.is_made() else 2 * source.nbytes + kept


def default_rate(options: Options, cfg: ModelConfig) -> float:
    if preference_of(options) and options.method != "reward":
        return 1e-5 if cfg.lora else 1e-6
    return 2e-4 if cfg.lora else 2e-5 if shapes.parameters(cfg) < SMALL else 1e-5


def _of_a_teacher(options: Options, cfg: ModelConfig, data: Dataset | None, seq_len: int) -> int:
    """Bytes of RAM for what a teacher says: offsets for all data, and the rows of three steps."""
    if cfg.teaching is None or data is None:
        return 0
    pieces = len(data.pieces) + (len(data.held_out.pieces) if data.held_out else 0)
    return PLACE * pieces + 3 * min(options.batch_size, data.n_sequences) * seq_len * cfg.teaching.nbytes


def _with_tables(limits: Limits, data: Dataset | None, more: int = 0) -> Limits:
    """The limits less `more` and the RAM of the data's tables, rounded to steps of TABLES so that plans repeat."""
    held = (data.memory + more) // TABLES * TABLES if data else 0
    return replace(limits, host=max(0, limits.host - held))


def common_plan(group: Alone, plan: Plan) -> Plan:
    """The plan of host 0, which all hosts use."""
    if group.hosts == 1:
        return plan
    return replace(Plan.of(json.loads(group.texts(json.dumps(asdict(plan)))[0])), host=group.host)


def common_launches(
    group: Alone, device: torch.device, begun: Mapping[str, list[int]] | None, say: Say
) -> dict[str, list[int]]:
    """Settings of kernels of host 0, which all hosts use: those that the run began with, or those kept for its GPU.
    Without those that this device or this version does not use.
    """
    own = settings_kept(device) if begun is None else dict(begun)
    if group.hosts > 1:
        own = json.loads(group.texts(json.dumps(own))[0])
    used, wrong = usable(own, device)
    if wrong:
        say(f"the run began with launch settings that do not suit this device ({wrong}): it may round differently")
    return used


def _data_options(options: Options, cfg: ModelConfig, seq_len: int, pad: int | None) -> DataOptions:
    return DataOptions(
        seq_len=seq_len,
        val=options.val,
        map=options.map,
        long=options.long,
        pack=not options.no_pack,
        skip_bad=options.skip_bad,
        max_samples=options.max_samples,
        seed=options.seed,
        vocab_size=cfg.vocab,
        media=cfg.media,
        cache=None if options.dry_run or not options.out else Path(options.out) / "tokens",
        shared=shared_tokens(),
        system=options.system,
        variables=json.loads(options.chat_template_kwargs or "{}"),
        kind=kind_of_data(options),
        labels=options.labels,
        pad=pad,
    )


def shared_tokens() -> Path | None:
    """The folder of tokens that all runs of this user share."""
    folder = cache_folder()
    return folder / "tokens" if folder else None


def _work(options: Options, data: Dataset | None, seq_len: int) -> Work:
    """How much the run computes. Without data, all sequences are full.

    Evaluations take about EVALUATING of the run, and at least as many tokens as a step; one of their tokens costs at
    most a third of a trained one.
    """
    if data is None:
        return Work(seq_len, options.batch_size, options.max_steps or SOME_STEPS, document=seq_len)
    epochs = epochs_of(options, data)
    steps = options.max_steps or max(1, math.ceil(data.steps_per_epoch(options.batch_size) * epochs))
    sequences = min(options.batch_size, data.n_sequences)
    work = Work(seq_len, sequences, steps, data.report.used, data.document, data.trained, data.options.paired)
    if data.held_out is None:
        return work
    due = options.eval_every.count(steps)
    evaluations = 1 + due + (not options.eval_every.due(steps, steps, 0.0))
    share = 3 * EVALUATING * steps / (1 - EVALUATING) / evaluations  # of a step's tokens, each
    read = options.eval_tokens or math.ceil(max(1.0, share) * work.tokens)
    return replace(work, evaluations=evaluations, held_out=min(read, data.held_out.tokens))


def epochs_of(options: Options, data: Dataset) -> float:
    return options.epochs or (1.0 if data.is_text or data.options.paired else 3.0)


def _in_force(options: Options, cfg: ModelConfig, data: Dataset | None, seq_len: int, plan: Plan) -> Options:
    """The options with all that was chosen, so that config.yaml repeats the run where defaults differ."""
    default_decay = 0.0 if cfg.lora else 0.01
    found = replace(
        options,
        seq_len=seq_len,
        lr=options.lr or default_rate(options, cfg),
        weight_decay=default_decay if options.weight_decay is None else options.weight_decay,
        adam_bits=plan.adam_bits,
    )
    if data is not None and not options.max_steps:
        found = replace(found, epochs=epochs_of(options, data))
    if options.lora is not None and cfg.lora is not None:
        found = replace(found, lora_alpha=alpha_of(options), lora_targets=cfg.lora.targets)
    if of := preference_of(options):
        found = replace(found, **parameters(of))
    if taught := cfg.teaching:
        found = replace(found, distill_weight=taught.weight, temperature=taught.temperature, top_k=taught.k)
    return found


def _files(
    options: Options,
    cfg: ModelConfig,
    out: Path,
    source: Source,
    stored: Mapping[str, str],
    data: Dataset | None,
    work: Work,
) -> Files:
    """What the run has on drives, and will have, besides training state."""
    tokens = data.nbytes(shared_tokens()) if data else 0
    held = [*(file for d in store_folders(options.store, out) for file in version_files(d))]
    held += [file for kind in ("best*", "step-*") for file in out.glob(f"{kind}/*.safetensors")]
    taken = sum(file.stat().st_blocks * 512 for file in held) + (0 if options.dry_run else tokens)
    export = 4 * sum(map(math.prod, adapter_shapes(cfg).values())) if cfg.lora else source.nbytes
    merged = source.nbytes * options.merge
    best = data is not None and data.held_out is not None
    apart = options.export_every.count(work.steps)
    read = read_for_base(source) if options.base else 0
    dtypes = {t.dtype for name in stored.values() if (t := source.tensors.get(name))}
    exact = bool(cfg.lora) or dtypes != {"BF16"}
    return Files(
        export, merged, best=best, tokens=tokens, held=taken, keep=options.keep, apart=apart, read=read, exact=exact
    )


def check_room(job: Job) -> None:
    """Raises DoesNotFit if a drive has no space for what the run must write: its output, state that steps write, and
    the first snapshot where it is certain to be made. Of state that steps write, a snapshot holds links.
    """
    part = job.forecast.disk_parts()
    wanted = [(job.out, part["export"] + part["best"] + part["apart"], "--out")]
    if job.plan.uses("ssd"):
        each = (part["store"] + part["spares"] + part["scratch"] + part["frozen"]) // len(job.store_dirs)
        wanted += [(d, each, "--store") for d in job.store_dirs]
    if isinstance(job.source, Cached) and not job.source.is_made():
        wanted.append((job.store_dirs[0], job.source.file_bytes, "--store"))
    reserving = {drive_of(folder) for folder, _, option in wanted if option == "--store"}
    often = job.options.save_every  # after minutes there may be space
    saved = 0 if often.seconds or job.plan.hosts > 1 or job.plan.uses("ssd") else often.count(job.total_steps)
    if saved:
        each = part["store"] // len(job.store_dirs)
        wanted += [(d, each, "--store, or set --save-every never") for d in job.store_dirs]
    by_drive: dict[int, list[tuple[Path, int, str]]] = defaultdict(list)
    for folder, need, option in wanted:
        by_drive[drive_of(folder)].append((folder, need, option))
    for drive, here in by_drive.items():
        folders, needs, flags = zip(*here, strict=True)
        disk = shutil.disk_usage(existing(folders[0]))
        reserve, room = (reserved(disk.total), disk.free) if drive in reserving else (0, disk.free)
        if sum(needs) > room - reserve:
            kept = f", {gib(reserve)} of them to stay free for the file system" if reserve else ""
            raise DoesNotFit(
                f"{folders[-1]}: what the run writes there takes {gib(sum(needs))}, {gib(room)} are free{kept}. "
                f"Free some space, or name another drive with {' or '.join(dict.fromkeys(flags))}."
            )
