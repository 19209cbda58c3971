"""The state of a run: its store opened, its engine filled, saved as a snapshot, exported and freed."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trireme.engine.amounts import gb, gib
from trireme.engine.build import build
from trireme.engine.exchange import Exchange, replace_folder, take_over
from trireme.engine.lanes import WRITES, RealLanes
from trireme.engine.planner.clock import Clock, Part
from trireme.engine.planner.host import hold_to
from trireme.engine.run.command import kept, program
from trireme.engine.run.job import Job
from trireme.engine.run.log import RunLog, Tracker
from trireme.engine.run.options import Options
from trireme.engine.run.records import Mark
from trireme.engine.run.screen import Screen
from trireme.engine.run.verify import LOGS, has_begun, tidy
from trireme.engine.step import Engine
from trireme.engine.tuning.adapters import CONFIG, WEIGHTS, read_adapter, save_adapter
from trireme.engine.tuning.base import CheckpointBase, check_unchanged, stamps
from trireme.engine.tuning.merge import merge_adapter
from trireme.engine.updates import AdamW
from trireme.engine.watchdog import leave, patience, watched
from trireme.kernels import host_adamw
from trireme.models.config import InputError, ModelConfig
from trireme.storage.files import NoSnapshot, StoreError
from trireme.storage.folders import FINISHED, IDENTITY, remove_finished
from trireme.storage.shards import DAMAGED, Damaged
from trireme.storage.snapshots import NO_WAY_BACK, NONE_OLDER
from trireme.storage.store import Store

TRIAL = 256 << 20  # bytes written to measure a drive, at most

Snapshot = dict[str, Any]  # settle.SNAPSHOT


def new_store(job: Job, screen: Screen) -> Store:
    """Its drives are measured where steps use them. Raises StoreError."""
    trial = min(TRIAL, 4 * job.parameters) * job.plan.uses("ssd")
    return Store.create(job.store_dirs, job.options.keep, job.source.companions, trial, screen.warn)


def open_snapshot(options: Options, screen: Screen) -> tuple[Store | None, Snapshot | None]:
    """The store and last snapshot; (None, None) before the first.

    Raises StoreError, and InputError where the run is finished or its store missing.
    """
    out = Path(options.out)
    dirs = [Path(d) for d in options.store] or [out / "store"]
    finished = any((d / FINISHED).exists() for d in dirs)
    lost = [d for d in dirs if not (d / IDENTITY).exists()]
    ours = not options.store or all(d.is_dir() for d in dirs)  # else a drive may not be mounted
    exported = any(out.glob("*.safetensors"))
    if (finished and (exported or has_begun(out))) or (lost and ours and exported):
        remove_finished(dirs)
        tidy(out)
        raise InputError(
            f"--resume {out}: that run is finished. To train its result further, name the folder as the checkpoint, "
            "and another --out."
        )
    if lost and has_begun(out):
        raise InputError(f"--resume {out}: the run's store is not in {lost[0]}. Is its drive mounted?")
    try:
        store = Store.open(dirs, options.keep, trial=0, say=screen.warn)
    except NoSnapshot:
        screen.say("no snapshot yet: starts from the beginning")
        return None, None
    return store, store.restore()


def check_continues(job: Job, snapshot: Snapshot) -> None:
    """Raises InputError where the job has other data or fewer steps."""
    if snapshot["data"] != job.data.fingerprint:
        seed = snapshot["options"].get("seed")
        way = f"Leave out --seed {job.options.seed}" if seed not in (None, job.options.seed) else "Restore it"
        raise InputError(f"--resume {job.out}: the data is not what the run was started with. {way}.")
    if job.total_steps < snapshot["step"]:
        raise InputError(
            f"--resume {job.out}: the run stands at step {snapshot['step']}, and {job.total_steps} are asked for. "
            "Ask for more: --max-steps or --epochs."
        )


@dataclass
class Progress:
    step: int = 0
    best: float | None = None  # lowest eval_loss
    best_step: int | None = None  # None: before the first step
    evaluated: int | None = None  # last evaluated step
    written: int = 0  # bytes to the SSD, by earlier processes
    worse: int = 0  # evaluations since the best
    eval_rows: int | None = None  # rows an evaluation reads; None: all

    @classmethod
    def of(cls, snapshot: Snapshot) -> Progress:
        best, best_step = snapshot["best"]
        evaluated, rows = Mark(*snapshot["log"]).evaluated, snapshot.get("eval_rows") or None
        return cls(snapshot["step"], best, best_step, evaluated, snapshot["written"], snapshot.get("worse", 0), rows)


class Live:
    def __init__(
        self,
        job: Job,
        store: Store,
        snapshot: Snapshot | None,
        screen: Screen,
        clock: Clock | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        """`snapshot`: of a resumed run. Raises InputError, StoreError."""
        self.job, self.store, self.screen = job, store, screen
        self.resumed = snapshot is not None
        self.progress = Progress.of(snapshot) if snapshot else Progress()
        if job.options.eval_tokens or not snapshot:  # else evaluations stay comparable
            self.progress.eval_rows = job.eval_rows
        since = Mark(*snapshot["log"]) if snapshot else None
        self.log = RunLog(job.out, job.total_steps, screen, since, job.work.evaluations, trackers)
        self.lanes = RealLanes(job.device, gpus=job.plan.gpus)
        self.clock, self.promised = clock or Clock(), dict[Part, float]()
        self._engine: Engine | None = None
        self.base: dict[str, str] = snapshot.get("base", {}) if snapshot else {}  # checksums of frozen weights, by unit
        self._stamps = stamps(job.source)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "no engine between `give_back` and `load`"
        return self._engine

    @property
    def written(self) -> int:
        """Bytes to the SSD in the whole run."""
        return self.progress.written + sum(self.lanes.moved[lane] for lane in WRITES)

    def load(self, asked: Sequence[int] = ()) -> None:
        """Makes and fills the engine.

        Raises DoesNotFit, InputError, StoreError; KeyboardInterrupt between pieces once `asked` is not empty.
        """
        with self.clock.at("load"):
            self._engine = make_engine(self.job, self.lanes, self.store, self.screen)
            if reason := host_adamw.why_slow():
                self.screen.warn(f"AdamW runs in torch on the CPU, several times slower: {reason}")
            self._loaded(fill_engine(self._engine, self.job, self.store, self.screen, self.resumed, asked))

    def _loaded(self, base: dict[str, str]) -> None:
        """Raises InputError where frozen weights are not those that the run began with."""
        for unit, found in base.items():
            if self.base.get(unit, found) != found:
                raise InputError(
                    f"--resume {self.job.out}: the frozen weights of {unit} in {self.job.options.model} are not those "
                    "that the run began with. Restore the checkpoint."
                )
        self.base = base

    def _check_base(self, copied: bool = False) -> None:
        """Raises StoreError where frozen weights that steps read, or that are to be `copied`, have changed."""
        if self.engine.homes.files is not None or (copied and self.base):
            check_unchanged(self.job.source, self._stamps)

    def move(self, job: Job) -> None:
        """Takes over the plan of `job`, through a snapshot: memory holds no second state."""
        self.save()
        self.give_back()
        self.job = job
        with self.clock.at("load"):
            self._engine = make_engine(job, self.lanes, self.store, self.screen)
            self._loaded(fill_engine(self._engine, job, self.store, self.screen, resumed=True, everything=False))

    def settle(self) -> None:
        """Applies all updates; drains lanes."""
        with self.watched("updates"):
            self.engine.optimizer.flush()
            self.lanes.drain()

    def watched(self, what: str) -> AbstractContextManager[None]:
        """Within, a task that hangs ends the process with code 4."""

        def late(how: str) -> None:
            said = f"error: {what}: {how}. Is the GPU or a drive failing? {self.last_snapshot()}"
            leave(lambda: self.screen.urgent(f"{said}. To go on: --resume {self.job.out}"))

        return watched(self.lanes, patience(self.job.forecast.step.step_s), late)

    @property
    def is_saved(self) -> bool:
        return bool(self.store.snapshots) and self.store.snapshots[-1].step == self.progress.step

    def save(self) -> None:
        if self.is_saved:
            return
        self.settle()
        self._check_base()
        homes, done = self.engine.homes, self.progress
        with self.clock.at("snapshots"), self.screen.working("saving", homes.nbytes(everything=False)) as more:
            homes.save_to_store(more)
        says = {
            "step": done.step,
            "options": kept(self.job.options),
            "cut": self.job.pinned.json(),
            "data": self.job.data.fingerprint,
            "best": [done.best, done.best_step],
            "worse": done.worse,
            "written": self.written,
            "eval_rows": done.eval_rows,
            "base": self.base,
            "log": self.log.sync(done.step, done.evaluated),
        }
        self.store.commit(done.step, says)

    def last_snapshot(self) -> str:
        snapshots = self.store.snapshots
        return f"Last snapshot: step {snapshots[-1].step}" if snapshots else "There is no snapshot yet"

    def export(self, folder: Path | None = None) -> None:
        """Writes OUT, or replaces `folder`; reads it back."""
        self._check_base(copied=self.job.cfg.lora is None)
        job, homes = self.job, self.engine.homes
        nbytes = 2 * job.source.nbytes  # written and read back
        if job.cfg.lora is not None:
            with self.clock.at("export"):
                self._export_adapter(job.cfg, folder)
            return
        exchange = Exchange(job.cfg, job.source, homes)
        with self.clock.at("export"), self.screen.working("writing the checkpoint", nbytes) as more:
            if folder is not None:
                exchange.replace(folder, more)
            else:
                exchange.save(job.out, more)

    def _export_adapter(self, cfg: ModelConfig, folder: Path | None) -> None:
        job, homes, base = self.job, self.engine.homes, str(Path(self.job.options.model or "").resolve())
        if folder is not None:
            replace_folder(folder, lambda new: save_adapter(new, cfg, homes, base))
            return
        save_adapter(job.out, cfg, homes, base)
        self._merge(cfg)

    def export_best(self) -> None:
        """OUT becomes what OUT/best is, which stays."""
        with self.clock.at("export"):
            take_over(self.job.out / "best", self.job.out)
            if self.job.cfg.lora is not None:
                self._merge(self.job.cfg)

    def _merge(self, cfg: ModelConfig) -> None:
        job = self.job
        if job.options.merge:
            self._check_base(copied=True)
            with self.screen.working("merging the adapters", 2 * job.source.nbytes) as more:
                merge_adapter(job.out, cfg, job.source, job.out / "merged", more)

    def give_back(self) -> None:
        """Frees the engine's memory. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()
            if self.job.device.type == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        """Ends the lanes; gives back. Idempotent."""
        self.lanes.close()
        self.give_back()


def reopen_adapter(cfg: ModelConfig, model: str, out: Path) -> list[str]:
    """Returns the lines to print. Raises StoreError where the adapter cannot be read."""
    try:
        found = read_adapter(out, replace(cfg, lora=None, frozen=()))
    except InputError as error:
        raise StoreError(errno.EIO, f"read back, it is not what was written: {error}", str(out)) from None
    logs = [name for name in LOGS if (out / name).exists()]
    return [
        f"output   {out}/: {', '.join([CONFIG, WEIGHTS, *logs])}",
        f"check    reopened: an adapter of rank {found.lora.rank}, {len(found.source.tensors):,} tensors",
        f"next     PeftModel.from_pretrained({cfg.opener}.from_pretrained({model!r}), {str(out)!r}), or "
        f"{program()} merge {out} --out DIR",
    ]


# ---------------------------------------------------------------- the engine


def make_engine(job: Job, lanes: RealLanes, store: Store, screen: Screen) -> Engine:
    """An engine with empty homes. Raises DoesNotFit."""
    o = job.options
    adamw = AdamW(o.beta1, o.beta2, o.eps, job.weight_decay, o.max_grad_norm)
    hold_to(job.limits, job.device)
    e = build(job.cfg, job.plan, job.limits, lanes, adamw=adamw, store=store, files=_base_files(job, store, screen))
    if e.memory.refused:
        screen.warn(
            f"CUDA pins {gib(e.memory.used('host') - e.memory.refused)} of RAM, the plan uses "
            f"{gib(e.memory.used('host'))}: copies of the rest are several times slower than predicted. Lower --ram"
        )
    return e


def _base_files(job: Job, store: Store, screen: Screen) -> CheckpointBase | None:
    """Frozen weights on the SSD, in the user's checkpoint; None where they are copied."""
    if job.files.copied or not job.forecast.frozen_on_ssd:
        return None
    layouts = {u: job.forecast.geo.stored_base[u] for u, unit in enumerate(job.plan.units) if unit.base == "ssd"}
    try:
        return CheckpointBase(layouts, job.source, job.stored, store.devices[0])
    except StoreError as error:
        screen.warn(f"{error}; so frozen weights are copied, {gb(job.forecast.frozen_on_ssd)}")
        return None


def fill_engine(
    e: Engine,
    job: Job,
    store: Store,
    screen: Screen,
    resumed: bool,
    asked: Sequence[int] = (),
    everything: bool = True,
) -> dict[str, str]:
    """Loads the snapshot if `resumed`, else the checkpoint. Returns Exchange.base. Raises as Live.load.

    Without `everything`, homes on the SSD are not read.
    """
    e.claim_scratch(store.devices)
    adapter = None if resumed else job.adapter
    exchange = Exchange(job.cfg, job.source, e.homes, adapter.values if adapter else None)
    if resumed:
        _load_snapshot(e, store, screen, asked, everything)
        if e.homes.frozen_bytes:
            with _loading(screen, "loading what is frozen", e.homes.frozen_bytes, asked) as more:
                exchange.load_base(more)
        return exchange.base
    for shard in e.homes.shards():
        store.add(shard.name, shard.layout, weights=shard.entry.kind == "weights")
    if job.plan.homes_on_ssd:
        store.reserve()
    with _loading(screen, "loading", e.homes.nbytes() + e.homes.frozen_bytes, asked) as more:
        exchange.load(more)
    return exchange.base


def _load_snapshot(e: Engine, store: Store, screen: Screen, asked: Sequence[int], everything: bool) -> None:
    expected = {shard.name: shard.layout for shard in e.homes.shards()}
    if {name: shard.layout for name, shard in store.shards.items()} != expected:
        folder = Path(store.devices[0].path) / store.snapshots[-1].folder
        raise StoreError(errno.EINVAL, "is the state of another model, or in other shards", str(folder))
    try:
        with _loading(screen, "loading", e.homes.nbytes(everything), asked) as more:
            e.homes.load_from_store(more, everything)
    except Damaged as damage:
        back = _way_back(e, store, screen, asked)
        raise StoreError(damage.errno, f"{DAMAGED}. {back}", damage.filename) from damage


def _way_back(e: Engine, store: Store, screen: Screen, asked: Sequence[int]) -> str:
    """Advice for a damaged snapshot; reads older ones until one is whole."""
    *older, last = store.snapshots
    newer = [last.folder]
    for snapshot in reversed(older):
        store.restore(snapshot.step)
        try:
            with _loading(screen, f"checking step {snapshot.step}", e.homes.nbytes(), asked) as more:
                e.homes.load_from_store(more)
        except Damaged:
            newer.append(snapshot.folder)
        else:
            return f"The last whole snapshot is of step {snapshot.step}: to go back to it, remove {', '.join(newer)}"
    return f"{'No snapshot is whole' if older else NONE_OLDER}: {NO_WAY_BACK}"


@contextmanager
def _loading(screen: Screen, what: str, nbytes: int, asked: Sequence[int]) -> Iterator[Callable[[int], None]]:
    with screen.working(what, nbytes) as more:

        def more_or_leave(nbytes: int) -> None:
            more(nbytes)
            if asked:
                raise KeyboardInterrupt

        yield more_or_leave
