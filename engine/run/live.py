"""A run in progress: its engine is loaded, saved as a snapshot, exported and freed."""

from __future__ import annotations

import errno
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trireme.engine.amounts import compact, count, duration
from trireme.engine.between import Reader, save_to_store
from trireme.engine.build import Engine, InRam, dealt, shares
from trireme.engine.exchange import LARGEST_F16, Exchange, Kept
from trireme.engine.hosts.gather import masters
from trireme.engine.hosts.group import Alone
from trireme.engine.hosts.host_snapshots import RunSnapshot
from trireme.engine.planner.clock import Clock, Part
from trireme.engine.planner.host import computed_by
from trireme.engine.planner.whole import note_export
from trireme.engine.queues.real import RealQueues
from trireme.engine.queues.watchdog import leave, patience, watched
from trireme.engine.run.begin.method import preference_of
from trireme.engine.run.begin.reference import with_reference
from trireme.engine.run.begin.resume import Snapshot, Start, hosts_in, remove_host, run_folder
from trireme.engine.run.command import program
from trireme.engine.run.config.config_file import saved_options
from trireme.engine.run.engine import Loader, claim_space, make_base, make_engine
from trireme.engine.run.hub.names import base_of, title
from trireme.engine.run.job import Job
from trireme.engine.run.output.curve import LOSS
from trireme.engine.run.output.exports import BEST, Best, forget_old, replace_best, replace_folder, take_over
from trireme.engine.run.output.folder import LOGS, afterwards, run_of
from trireme.engine.run.output.log import RunLog, Tracker
from trireme.engine.run.output.records import Mark
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.adapters import WEIGHTS, save_adapter
from trireme.engine.tuning.base import check_unchanged, stamps
from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.tuning.peft import read_adapter
from trireme.engine.tuning.peft_config import CONFIG
from trireme.kernels import host_adamw
from trireme.models.config import InputError, ModelConfig
from trireme.models.losses.preferences import Documents
from trireme.storage.files import StoreError, remove_folders, stream
from trireme.storage.untrusted import checksum, quoted


@dataclass
class Progress:
    """How far a run has come, and its best evaluation."""

    step: int = 0
    start: float | None = None  # eval_loss before training
    best: float | None = None  # lowest eval_loss of what was trained, and its step
    best_step: int | None = None
    evaluated: int | None = None  # last evaluated step
    written: int = 0  # bytes to the SSD, by earlier processes
    worse: int = 0  # evaluations since the lowest, that before training included
    eval_rows: int | None = None  # rows an evaluation reads; None: all

    @classmethod
    def of(cls, snapshot: Snapshot) -> Progress:
        best, best_step = snapshot["best"]
        return cls(
            snapshot["step"],
            snapshot["start"],
            best,
            best_step,
            Mark(*snapshot["log"]).evaluated,
            snapshot["written"],
            snapshot["worse"],
            snapshot["eval_rows"] or None,
        )

    @property
    def lowest(self) -> float:
        """The lowest eval_loss, with that before training."""
        return min((loss for loss in (self.start, self.best) if loss is not None), default=math.inf)


class Live:
    """A run in progress."""

    def __init__(
        self,
        job: Job,
        start: Start,
        screen: Screen,
        clock: Clock,
        trackers: Sequence[Tracker],
        group: Alone,
    ):
        """`start`: what it goes on with, and its store. Raises InputError, StoreError."""
        assert start.store is not None
        self.job, self.store, self.screen, self.group = job, start.store, screen, group
        snapshot, self.common = start.snapshot, start.common
        self.resumed = snapshot is not None
        self.progress = Progress.of(snapshot) if snapshot else Progress()
        if job.options.eval_tokens or not snapshot:  # else evaluations stay comparable
            self.progress.eval_rows = job.eval_rows
        since = Mark(*snapshot["log"]) if snapshot else None
        name = f"{job.out.resolve().name}: {title(job.options.model)}, {compact(job.parameters)} parameters"
        axis = f"loss of {job.options.method}" if job.options.method != "sft" else LOSS
        self.log = RunLog(job.out, job.total_steps, screen, since, job.work.evaluations, trackers, name, axis)
        self.queues = RealQueues(job.device, gpus=job.plan.gpus, hosts=job.plan.hosts)
        self.queues.failed = self.group.failed  # where this thread waits for a host that waits for a queue
        self.clock, self.estimated = clock, dict[Part, float]()
        self._engine: Engine | None = None
        self.preference, self.loaded = preference_of(job.options), ""  # checksum of what is trained, as it was loaded
        self.base: dict[str, str] = snapshot["base"] if snapshot else {}  # checksums of frozen weights, by unit
        self._stamps = stamps(job.source)
        self._best: Kept | None = None  # where there is room for it
        self.exported = 0  # bytes of checkpoints, by this process
        self.best_kept = False  # in RAM alone: OUT/best is an earlier one

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "no engine between `give_back` and `load`"
        return self._engine

    @property
    def written(self) -> int:
        """Bytes that the whole run has written to drives: in steps and evaluations, of snapshots, of checkpoints."""
        return self.progress.written + sum(device.io.written for device in self.store.devices) + self.exported

    def load(self, asked: Sequence[int] = ()) -> None:
        """Builds and fills the engine.

        Raises DoesNotFit, InputError, StoreError; KeyboardInterrupt between two pieces when `asked` is not empty.
        """
        with self.clock.at("load"):
            with self.watched("quantizing"):
                make_base(self.job, self.screen, asked)
            self._engine = make_engine(self.job, self.queues, self.store, self.screen, self.group)
            if reason := host_adamw.why_slow():
                self.screen.warn(f"AdamW runs in torch on the CPU, several times slower: {reason}")
            claim_space(self._engine, self.job, self.store, anew=not self.resumed or self.common is not None)
            with self.watched("loading"):
                loader = Loader(self._engine, self.job, self.store, self.screen, self.group, asked)
                read = loader.go_on(self.common) if self.resumed else loader.begin(self.clock)
                self.loaded = read.trained
                self._check_frozen(read.base)
        self._compute_reference(asked)
        if self.common is not None and not asked:
            self._save_resharded(self.common)

    def _compute_reference(self, asked: Sequence[int]) -> None:
        """Computes the reference's log-probabilities of the data, if --method compares with them. Raises as `load`."""
        if self.preference is None or not self.preference.compares:
            return
        sums = {} if self.resumed else self.base | {"trained": self.loaded}
        with self.clock.at("reference"), self.watched("the reference"):
            stopped = lambda: bool(asked)
            self.job = with_reference(self.job, self.engine, self.screen, sums, self.resumed, stopped, self.group)

    def _save_resharded(self, common: RunSnapshot) -> None:
        """Saves this host's share; then the state of hosts that no longer exist can be removed."""
        self._save(keep=1)
        self.screen.say(f"hosts    {self.group.hosts}, where the run had {count(common.key.hosts, 'host')}")
        places = sorted(hosts_in(run_folder(self.job.out, self.group.host)).items())
        with self.watched("removing what other hosts left"), self.screen.working("removing it", 0) as more:
            for host, place in places:
                if host in common.by_host and host >= self.group.hosts and self.group.host == 0:
                    remove_host(place, run_of(self.job.out), more)
        self.common = None

    def _check_frozen(self, base: dict[str, str]) -> None:
        """Stores the checksums of frozen weights. Raises InputError if they are not those that the run began with."""
        for unit, found in base.items():
            if self.base.get(unit, found) != found:
                raise InputError(
                    f"--resume {self.job.out}: the frozen weights of {unit} in {self.job.options.model} are not those "
                    "that the run began with. Restore the checkpoint."
                )
        self.base = base

    def _check_base(self, copied: bool = False) -> None:
        """Raises StoreError if frozen weights that steps read, or that are to be `copied`, have changed."""
        if self.engine.placement.files is not None or (copied and self.base):
            check_unchanged(self._stamps)

    def move(self, job: Job) -> None:
        """Changes to the plan of `job`, through a snapshot: memory cannot hold the state twice."""
        self.save()
        self.give_back()
        self.job = job
        with self.clock.at("load"):
            self._engine = make_engine(job, self.queues, self.store, self.screen, self.group)
            claim_space(self._engine, job, self.store, anew=False)
            if job.plan.stored_on_ssd:
                self.store.reserve()
            with self.watched("loading"):
                loader = Loader(self._engine, job, self.store, self.screen, self.group)
                self._check_frozen(loader.go_on(everything=False).base)

    def apply_updates(self) -> None:
        """Runs all updates that are due, and waits for them."""
        with self.clock.at("steps"), self.watched("updates"):
            self.engine.optimizer.flush()
            self.queues.drain()

    def watched(self, what: str) -> AbstractContextManager[None]:
        """A context in which a task, a read or a write that hangs ends the process with exit code 4."""
        limit = patience(self.job.forecast.step.step_s)

        def late(what_hangs: str) -> None:
            how = f"no progress for {duration(limit)}; {what_hangs}"
            said = f"error: {what}: {how}. Is the GPU or a drive failing? {self.last_snapshot()}"
            self.group.tell(how)
            leave(lambda: self.screen.urgent(f"{said}. To continue: --resume {quoted(self.job.out)}"))

        return watched(self.queues, limit, late, self._progress)

    def _progress(self) -> tuple[int, object]:
        """Progress outside the queues. It always changes while a terminal or another host is waited for."""
        return self.screen.counted, object() if self.screen.waits or self.group.waits else None

    def dealt(self, batch: Sequence[InRam]) -> Sequence[InRam]:
        """The micro-batches of this host."""
        return dealt(batch, self.group.host, self.group.hosts)

    def documents(self, batch: Sequence[InRam]) -> list[list[Documents]]:
        """The documents of each host's micro-batches."""
        return [[mb.of_docs for mb in share if mb.of_docs] for share in shares(batch, self.group.hosts)]

    @property
    def is_saved(self) -> bool:
        return bool(self.store.snapshots) and self.store.snapshots[-1].step == self.progress.step

    def save(self) -> None:
        """Makes a snapshot, and writes its best weights to OUT/best.

        If OUT/best cannot be written, as on a full drive, and the snapshot itself has those weights, the error is
        raised after the snapshot was made. Raises StoreError.
        """
        failed: StoreError | None = None
        try:
            self.write_best()
        except StoreError as error:
            if self.group.hosts > 1 or self.progress.best_step != self.progress.step:
                raise
            failed = error
        if not self.is_saved:
            self._save()
        if failed:
            raise failed

    def _save(self, keep: int | None = None) -> None:
        """`keep`: the number of snapshots; None: that of --keep."""
        self.apply_updates()
        self._check_base()
        with self.clock.at("snapshots"), self.watched("snapshot"):
            self._write(keep)

    def _write(self, keep: int | None) -> None:
        placement, done = self.engine.placement, self.progress
        with self.screen.working("saving", placement.nbytes(everything=False)) as more:
            save_to_store(placement, more)
            says = {
                "step": done.step,
                "options": saved_options(self.job.options),
                "cut": self.job.pinned.json(),
                "data": self.job.data.fingerprint,
                "computed_by": computed_by(self.job.device),
                "launches": self.job.launches,
                "best": [done.best, done.best_step],
                "start": done.start,
                "worse": done.worse,
                "written": self.written,
                "eval_rows": done.eval_rows,
                "date": self.job.codec and self.job.codec.facts.date,
                "base": self.base,
                "teacher": self.job.data.teacher.key if self.job.data.teacher else "",
                "log": self.log.sync(done.step, done.evaluated),
            }
            self.store.commit(done.step, says, self.group.meet, keep, more)
            forget_old(self.job.out)

    def last_snapshot(self) -> str:
        snapshots = self.store.snapshots
        return f"Last snapshot: step {snapshots[-1].step:,}" if snapshots else "There is no snapshot yet"

    def keep_best(self) -> None:
        """Keeps the present weights as the best: copied within RAM if it has room, else written to OUT/best at once."""
        self.apply_updates()
        if self.group.any(not self.job.forecast.kept):
            self.export(self.job.out / BEST)
        else:
            self._best = self._best or Kept(self.engine.placement, self.job.files.exact)
            with self.watched("the best"):
                self._best.take()
            self.best_kept = True

    def write_best(self) -> None:
        """Writes the best weights so far to OUT/best."""
        if self.best_kept:
            self.export(self.job.out / BEST, self._best)
            self.best_kept = False

    def export(self, folder: Path | None = None, kept: Kept | None = None) -> None:
        """Writes weights, those `kept` or the present ones, to OUT, or replaces `folder` by them; reads them back.

        Host 0 writes; it asks the others for what it lacks.
        """
        own = kept or Reader(self.engine.placement)
        with self.clock.at("export"), self.watched("export"), masters(own, self.group.wire) as reader:
            if reader is not None:
                self._check_base(copied=self.job.cfg.lora is None)
                self._export(folder, reader)

    def _export(self, folder: Path | None, reader: Reader) -> None:
        job, save, began = self.job, partial(self._save_weights, reader), self.clock.now()
        if folder is None:
            save(job.out)
        elif folder.name == BEST:
            assert self.progress.best_step is not None
            assert self.progress.best is not None
            replace_best(job.out, save, Best(self.progress.best_step, self.progress.best))
        else:
            replace_folder(folder, save)
        if job.cfg.lora is None:
            note_export(job.forecast, job.out, self.clock.now() - began)
        elif folder is None:
            self._merge(job.cfg)

    def _save_weights(self, reader: Reader, folder: Path) -> dict[str, str]:
        """Writes a checkpoint or adapters; returns the checksums of its files."""
        job = self.job
        if job.cfg.lora is not None:
            save_adapter(folder, job.cfg, reader, *base_of(job.options.model))
            self.exported += sum((folder / name).stat().st_size for name in (CONFIG, WEIGHTS))
            return {name: checksum(stream(folder / name)) for name in (CONFIG, WEIGHTS)}
        exchange = Exchange(job.cfg, job.source, self.engine.placement, reader=reader)
        with self._writing("writing the checkpoint", job.source.nbytes, 2) as more:  # and reading it back
            sums = exchange.save(folder, more)
        if beyond := exchange.beyond:
            many = f"{count(sum(beyond.values()), 'value')} of {count(len(beyond), 'tensor')}, as {max(beyond)}"
            self.screen.warn(
                f"{folder}: {many}, beyond {LARGEST_F16:,.0f}, the largest of F16, and written as that. "
                "Lower --lr, or train a copy of the checkpoint in BF16"
            )
        return sums

    @contextmanager
    def _writing(self, what: str, nbytes: int, times: int) -> Iterator[Callable[[int], None]]:
        """Gives a function to call with each part's size; each byte is counted `times` times."""
        told = 0
        with self.screen.working(what, times * nbytes) as more:

            def count(size: int) -> None:
                nonlocal told
                told += size
                more(size)

            yield count
        self.exported += told // times

    def export_best(self) -> None:
        """Makes OUT/best the output without writing it again. OUT/best stays."""
        if self.best_kept:
            self.export(kept=self._best)
            return
        if self.group.host:
            return
        with self.clock.at("export"), self.watched("export"):
            with self._writing("writing the checkpoint", self.job.files.export, 1) as more:
                take_over(self.job.out / BEST, self.job.out, more)
            if self.job.cfg.lora is not None:
                self._merge(self.job.cfg)

    def _merge(self, cfg: ModelConfig) -> None:
        job = self.job
        if job.options.merge:
            self._check_base(copied=True)
            try:
                with self._writing("merging the adapters", job.source.nbytes, 2) as more:
                    merge_adapter(job.out, cfg, job.source, job.out / "merged", more)
            except InputError as error:  # the adapter is whole
                remove_folders([job.out / "merged"])
                self.screen.warn(f"not merged: {error}")

    def give_back(self) -> None:
        """Frees the engine's memory. Calling it again does nothing."""
        if self._engine is not None:
            self._engine.close()
            self._engine = self._best = None
            gc.collect()
            if self.job.device.type == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        """Ends the queues and frees the memory. Calling it again does nothing."""
        with self.watched("close"):
            self.queues.close()
            self.give_back()

    def close_log(self) -> None:
        with self.watched("close"):
            self.log.close()


def reopen_adapter(cfg: ModelConfig, model: str, out: Path) -> list[str]:
    """Opens the adapter that was written; returns the lines to print. Raises StoreError if it cannot be read."""
    try:
        found = read_adapter(out, cfg)
    except InputError as error:
        raise StoreError(errno.EIO, f"read back, it is not what was written: {error}", str(out)) from None
    logs = [name for name in LOGS if (out / name).exists()]
    labels = f", num_labels={cfg.scores}" if cfg.scores else ""
    return [
        f"output   {out}/: {', '.join([CONFIG, WEIGHTS, *logs])}",
        f"check    reopened: an adapter of rank {found.lora.rank}, {len(found.source.tensors):,} tensors",
        f"next     {afterwards(out, cfg.scores > 0)}; {program()} merge {quoted(out)} --out DIR; "
        f"PeftModel.from_pretrained({cfg.opener}.from_pretrained({model!r}{labels}), {str(out)!r})",
    ]
