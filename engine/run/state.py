"""The training state of a run: built, loaded, saved as a snapshot, exported, freed; and what its loss compares with.
The loop decides when.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from trireme.engine.amounts import count, duration, gb, gib, seconds
from trireme.engine.between import Reader, load_from_store, save_to_store
from trireme.engine.build import Engine, build
from trireme.engine.data.taught import is_scores, read_index, taught_by
from trireme.engine.exchange import LARGEST_F16, Exchange
from trireme.engine.hosts.gather import masters
from trireme.engine.hosts.group import world
from trireme.engine.planner.host import computed_by, limit_torch
from trireme.engine.planner.machine import drive_speeds, note_pinned
from trireme.engine.queues.real import RealQueues
from trireme.engine.queues.watchdog import leave, patience, watched
from trireme.engine.run import config_file, screen
from trireme.engine.run.after import hub, score
from trireme.engine.run.evaluate import Evaluator, Stopped
from trireme.engine.run.folder import REFERENCE, RUN, Folder, Save, read_record, write_record
from trireme.engine.run.job import Job
from trireme.engine.run.options import Options
from trireme.engine.run.record import Reference, RunProgress, RunSnapshot
from trireme.engine.tuning.adapters import WEIGHTS, trained_values, write_adapter
from trireme.engine.tuning.base import CheckpointBase, check_unchanged, read_from_ssd, stamps
from trireme.engine.tuning.cached import Cached
from trireme.engine.tuning.merging import merge_adapter
from trireme.engine.tuning.peft_config import CONFIG
from trireme.engine.updates import AdamW
from trireme.kernels.optimizer import host_adamw
from trireme.models.config import InputError
from trireme.storage import folders
from trireme.storage.auxiliary import TEMPLATE
from trireme.storage.files import NoSnapshot, StoreError, remove_folders, replace_synced, stream
from trireme.storage.shards import DAMAGED, Damaged
from trireme.storage.snapshots import way_back
from trireme.storage.store import Store
from trireme.storage.untrusted import checksum, quoted


def snapshot_of(folder: Folder, options: Options) -> RunSnapshot | None:
    """Opens the store of a resumed run at the last snapshot that all hosts have; None before the first. Raises
    StoreError, InputError.
    """
    lost = next((path for path in folder.stores if not (path / folders.IDENTITY).exists()), None)
    if lost is not None and folder.state.started:
        advice = f"If it has moved: --store DIR. If it is lost, remove {quoted(folder.out)} and start again"
        raise InputError(f"--resume {folder.out}: its store is not in {lost}. Is its drive mounted? {advice}.")
    with suppress(NoSnapshot):
        if lost is None:
            speeds, run = drive_speeds(folder.stores), folder.state.id
            folder.store = Store.open(folder.stores, options.keep, speeds, screen.warn, run)
    sequences = {snapshot.step: snapshot.sequence for snapshot in folder.store.snapshots} if folder.store else {}
    of_hosts = [json.loads(text) for text in world().texts(json.dumps([folder.state.started, [*sequences]]))]
    last = max(set(sequences).intersection(*(steps for _, steps in of_hosts)), default=None)
    if folder.store and last is not None:
        return RunSnapshot.of(folder.store.go_back(sequences[last]), f"--resume {folder.out}: its snapshot")
    latest = [max(steps, default=0) for _, steps in of_hosts]
    if any(latest) and any(started for started, _ in of_hosts):
        lacks = f"host {latest.index(min(latest))} has no snapshot that the others have"
        advice = f"Restore its part of {folder.out / RUN} and of --store from a copy, or start again"
        raise InputError(f"--resume {folder.out}: {lacks}. {advice}.")
    if folder.store:  # of a moment that not all had
        folder.store.remove()
        folder.store = None
    screen.say("no snapshot yet: starts from the beginning")
    return None


class Training:
    """A job with its engine."""

    def __init__(self, job: Job, folder: Folder, snapshot: RunSnapshot | None):
        self.job, self.folder, self.snapshot, o = job, folder, snapshot, job.options
        self.progress = replace(snapshot.progress) if snapshot else RunProgress()
        if o.eval_tokens or not snapshot:  # else evaluations stay comparable
            self.progress.eval_rows = job.eval_rows
        if folder.store is None:
            speeds, run = drive_speeds(folder.stores), folder.state.id
            folder.store = Store.create(folder.stores, o.keep, job.source.auxiliary, speeds, screen.warn, run)
        self.store, self.fixed = folder.store, job.fixed(snapshot)
        self._stamps = stamps(job.source) if job.cfg.frozen else {}
        self.exported = 0  # bytes of checkpoints, by this process
        self._evaluator: Evaluator | None = None
        self.queues = RealQueues(job.device, gpus=job.plan.gpus, hosts=job.plan.hosts)  # last: `close` ends threads
        self.queues.on_error = world().fail  # where this thread waits for a host that waits for a queue

    @property
    def evaluator(self) -> Evaluator:
        assert self._evaluator is not None, "the engine is loaded"
        return self._evaluator

    @property
    def engine(self) -> Engine:
        return self.evaluator.e

    @property
    def written(self) -> int:
        """Bytes that the whole run has written to drives."""
        return self.progress.written + sum(device.io.written for device in self.store.devices) + self.exported

    @property
    def last_snapshot(self) -> str:
        snapshots = self.store.snapshots
        return f"Last snapshot: step {snapshots[-1].step:,}" if snapshots else "There is no snapshot yet"

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """A context in which a task, a read or a write that hangs ends the process with exit code 4."""
        limit = patience(self.job.forecast.step.step_s)

        def late(what_hangs: str) -> None:
            problem = f"no progress for {duration(limit)}; {what_hangs}"
            world().abort(problem)
            advice = f"{self.last_snapshot}. To continue: --resume {quoted(self.job.out)}"
            leave(lambda: screen.urgent(f"error: {what}: {problem}. Is the GPU or a drive failing? {advice}"))

        progress = lambda: (screen.parts_done(), object() if world().waits else None)
        with watched(self.queues, limit, late, progress):
            yield

    # ------------------------------------------------------------ built and loaded

    def build(self, stopped: Stopped) -> None:
        """Builds the engine, whose buffers are not filled, and takes its space on drives.

        Raises DoesNotFit, InputError, StoreError; KeyboardInterrupt between two pieces if `stopped()`.
        """
        job, o = self.job, self.job.options
        if isinstance(job.source, Cached):
            task = "checking the base" if job.source.is_made() else f"quantizing the base to {job.source.base}"
            with screen.working(task, job.source.file_bytes, stopped=stopped) as progressed:
                job.source.make(progressed, screen.warn)
        limit_torch(job.limits, job.device)
        adamw = AdamW(o.betas[0], o.betas[1], weight_decay=o.weight_decay or 0.0, max_grad_norm=o.max_grad_norm)
        files, wire = self._base_files(), world().wire
        e = build(job.cfg, job.plan, job.limits, self.queues, adamw=adamw, store=self.store, files=files, wire=wire)
        self._evaluator = Evaluator(e, job.rows, o.seq_len or 0, job.n_micro)
        if e.memory.refused:
            planned, pinned = e.memory.used_bytes("ram"), e.memory.used_bytes("ram") - e.memory.refused
            note_pinned(job.device, pinned)
            hint = f"Copies of the rest are several times slower; the next run plans with {gib(pinned)}"
            screen.warn(f"CUDA pins {gib(pinned)} of RAM, the plan uses {gib(planned)}. {hint}, unless --ram is given")
        if reason := host_adamw.why_slow():
            screen.warn(f"AdamW runs in torch on the CPU, several times slower: {reason}")
        e.placement.scratch.claim(self.store.devices)
        if self.snapshot is None:
            self.store.clear()
            for shard in e.placement.shards():
                self.store.add(shard.name, shard.layout, weights=shard.entry.kind == "weights")
            if job.plan.stored_on_ssd:
                self.store.reserve()

    def _base_files(self) -> CheckpointBase | None:
        """Reads frozen weights on the SSD from the user's checkpoint; None if they are copied to scratch space."""
        job = self.job
        if job.files.copied or not job.forecast.frozen_on_ssd:
            return None
        layouts = read_from_ssd(job.forecast.geo, job.plan)
        try:
            return CheckpointBase(layouts, job.source, job.opened.stored, self.store.devices)
        except StoreError as error:
            screen.warn(f"{error}; so frozen weights are copied, {gb(job.forecast.frozen_on_ssd)}")
            return None

    def load_checkpoint(self, stopped: Stopped) -> None:
        """Fills the engine with the model before training."""
        job, placement, adapter = self.job, self.engine.placement, self.job.opened.adapter
        exchange = Exchange(job.cfg, job.source, placement, adapter.values if adapter else None)
        with screen.working("loading", placement.nbytes() + placement.frozen_bytes, stopped=stopped) as progressed:
            exchange.load(progressed)
        world().agree("weights", exchange.base | {"trained": exchange.trained}, "Copy host 0's checkpoint")
        self._check_frozen(exchange.base)

    def load_snapshot(self, stopped: Stopped) -> None:
        """Fills the engine with the last snapshot, and what is frozen from the checkpoint."""
        placement = self.engine.placement
        with screen.working("loading", placement.nbytes(), stopped=stopped) as progressed:
            try:
                load_from_store(placement, progressed)
            except Damaged as damage:
                advice = way_back(self.store.paths[0] / self.store.snapshots[-1].folder)
                raise StoreError(damage.errno, f"{DAMAGED}. {advice}", damage.filename) from damage
        if placement.frozen_bytes:
            exchange = Exchange(self.job.cfg, self.job.source, placement)
            with screen.working("loading what is frozen", placement.frozen_bytes, stopped=stopped) as progressed:
                exchange.load_base(progressed)
            self._check_frozen(exchange.base)

    def load_reference(self, stopped: Stopped) -> None:
        """Gives the data the log-probabilities of the model before training, if the method compares with them.

        A resumed run has them in .run/reference.json. Raises InputError, StoreError; KeyboardInterrupt if `stopped()`.
        """
        job, path = self.job, self.folder.run / REFERENCE
        if job.preference is None or not job.preference.compares:
            return
        data = [job.data, *([job.data.held_out] if job.data.held_out else [])]
        total = sum(len(part.pieces) for part in data)
        if not self.snapshot:
            began = time.monotonic()
            with screen.clock().at("reference"), self.watched("the reference"):
                logps = self.evaluator.logps(data, stopped)
            if len(logps) < total:
                raise KeyboardInterrupt
            if not world().host:
                write_record(path, Reference(logps))
            pairs = count(total // 2, "answer" if job.data.options.kind == "labels" else "pair")
            screen.say(f"compared {pairs}: the reference took {seconds(time.monotonic() - began)}")
        stored = read_record(path, Reference)  # of host 0
        logps = json.loads(world().texts(json.dumps(stored.logps if stored else []))[0])
        if len(logps) != total:
            raise InputError(f"--resume {job.out}: {path} is lost or damaged. Restore it from a copy, or start again.")
        n, held = len(job.data.pieces), job.data.held_out
        held = held and replace(held, reference=np.array(logps[n:], np.float64))
        self.job = replace(job, read=replace(job.data, reference=np.array(logps[:n], np.float64), held_out=held))

    def _check_frozen(self, base: dict[str, str]) -> None:
        """Keeps the checksums of frozen weights. Raises InputError if they are not those that the run began with."""
        for unit, sum in base.items():
            if self.fixed.base.setdefault(unit, sum) != sum:
                problem = f"the frozen weights of {unit} in {self.job.options.model} are not those of its beginning"
                raise InputError(f"--resume {self.job.out}: {problem}. Restore the checkpoint.")

    def check_base(self, copied: bool) -> None:
        """Raises StoreError if frozen weights that steps read, or that are to be `copied`, have changed."""
        if self.engine.placement.files is not None or (copied and self.fixed.base):
            check_unchanged(self._stamps)

    # ------------------------------------------------------------ saved

    def apply_updates(self) -> None:
        """Runs all updates that are due, and waits for them."""
        with screen.clock().at("steps"), self.watched("updates"):
            self.engine.optimizer.flush()
            self.queues.drain()

    def save(self, log: Callable[[], int]) -> None:
        """Makes a snapshot, unless there is one of this step. `log`: makes the log durable, returns its bytes. Raises
        StoreError.
        """
        self.apply_updates()
        self.check_base(copied=False)
        done, placement = self.progress, self.engine.placement
        if self.store.snapshots and self.store.snapshots[-1].step == done.step:
            return
        with screen.clock().at("snapshots"), self.watched("snapshot"):
            with screen.working("saving", placement.nbytes(everything=False)) as progressed:
                save_to_store(placement, progressed)
                done.log = log()
                saved, computer = config_file.saved(self.job.options), computed_by(self.job.device)
                snapshot = RunSnapshot(replace(done, written=self.written), self.fixed, saved, computer)
                self.store.commit(done.step, asdict(snapshot), world().barrier, progressed)
            self.folder.note(replace(self.folder.state, started=True))
            self.folder.drop_best(done.best_step)

    def save_best(self) -> None:
        """Writes the present weights as the best. Those that the last snapshot names stay."""
        self.apply_updates()
        self.folder.drop_best(self.store.snapshots[-1].extra["progress"]["best_step"] if self.store.snapshots else None)
        best = self.folder.best(self.progress.best_step)
        self._export(lambda save: self.folder.replace(best, save, note=True))

    # ------------------------------------------------------------ exported

    def export(self, step: int | None = None) -> None:
        """Writes the weights to OUT, or to OUT/step-N; reads them back."""
        out = self.job.out
        self._export(lambda save: save(out) if step is None else self.folder.replace(out / f"step-{step}", save))

    def export_best(self) -> None:
        """Makes the best weights the output."""
        if not world().host:
            with screen.clock().at("export"), self.watched("export"):
                self.folder.take_over(self.progress.best_step)

    def _export(self, write: Callable[[Save], object]) -> None:
        """Calls `write` with what saves the weights to a folder. Host 0 writes, with what the others send."""
        with (
            screen.clock().at("export"),
            self.watched("export"),
            masters(Reader(self.engine.placement), world().wire) as reader,
        ):
            if reader is not None:
                self.check_base(copied=self.job.cfg.lora is None)
                write(partial(self._save_weights, reader))

    def _save_weights(self, reader: Reader, folder: Path) -> dict[str, str]:
        """Writes a checkpoint or adapters; returns the checksums of its files."""
        job = self.job
        if job.cfg.lora is not None:
            base, revision = hub.name_and_commit(job.options.model)
            separate = job.options.expert_adapters == "separate"
            write_adapter(folder, job.cfg, trained_values(reader), base, revision, separate)
            names = [CONFIG, WEIGHTS]
            if isinstance(template := job.source.auxiliary.get(TEMPLATE), bytes):  # which the base has not
                replace_synced(folder / TEMPLATE, template)
                names.append(TEMPLATE)
            self.exported += sum((folder / name).stat().st_size for name in names)
            return {name: checksum(stream(folder / name)) for name in names}
        exchange = Exchange(job.cfg, job.source, self.engine.placement, reader=reader)
        with screen.working("writing the checkpoint", 2 * job.source.nbytes) as progressed:  # and reading it back
            sums = exchange.save(folder, progressed)
        self.exported += job.source.nbytes
        if n := sum(exchange.clipped.values()):
            advice = f"written as {LARGEST_F16:,.0f}, the largest. Lower --lr"
            screen.warn(f"{folder}: {count(n, 'value')} of {max(exchange.clipped)} and others, beyond F16: {advice}")
        return sums

    def merge(self) -> None:
        """With --merge, writes base plus adapter to OUT/merged. It takes the GPU's memory, which `close` has freed."""
        job, o, merged = self.job, self.job.options, self.job.out / "merged"
        if job.cfg.lora is None or not o.merge or world().host:
            return
        check_unchanged(self._stamps)
        same = (o.merge_format or ("same" if o.merge_aware else "bf16")) == "same"
        progress = screen.working("merging the adapters", 2 * job.source.nbytes)
        with screen.clock().at("export"), self.watched("export"), progress as progressed:
            try:
                merge_adapter(job.out, job.cfg, job.source, merged, progressed, screen.say, same, job.device)
            except InputError as error:  # the adapter is whole
                remove_folders([merged])
                screen.warn(f"not merged: {error}")

    def close(self) -> None:
        """Ends the queues and frees the memory. Calling it again does nothing."""
        with screen.clock().at("close"), self.watched("close"):
            self.queues.close()
            if self._evaluator is not None:
                self._evaluator.e.close()
                self._evaluator = None
                gc.collect()
                if self.job.on_gpu:
                    torch.cuda.empty_cache()


# ---------------------------------------------------------------- a teacher


def with_teacher(job: Job, place: Folder, snapshot: RunSnapshot | None) -> Job:
    """The job with the teacher's rows in its data; a checkpoint scores the data first, into .run/teacher. A pass that
    was killed goes on. Raises InputError, CheckpointError, DoesNotFit, StoreError.
    """
    teacher, teaching, held = job.options.teacher, job.cfg.teaching, job.data.held_out
    if not teacher or teaching is None:
        return job
    scores, sources = Path(teacher), {"train": job.data} | ({"val": held} if held else {})
    taught = lambda data: replace(data, teacher=taught_by(read_index(scores), data, job.cfg.vocab))
    with screen.clock().at("reference"):
        if not is_scores(scores):
            scores = place.run / "teacher"
            if snapshot and config_file.saved(job.options)["teacher"] != (began := snapshot.options.get("teacher")):
                raise InputError(f"--teacher {teacher}: the run began with {began or 'none'}. Leave it out.")
            if not (snapshot and is_scores(scores)):
                score.teach(scores, Path(teacher), sources, teaching.k, job.cfg.vocab, job.options)
        read = [taught(data) for data in sources.values()]
    data = replace(read[0], held_out=held and read[-1])
    if snapshot and data.teacher and snapshot.fixed.teacher not in ("", data.teacher.key):
        changed = f"the teacher {teacher} is not what the run began with"
        raise InputError(f"--resume {job.out}: {changed}. Restore it, or start again.")
    return replace(job, read=data)
