"""How a run starts: a new store and the checkpoint in it, or the store of an interrupted run at its last snapshot."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trireme.engine.amounts import gib
from trireme.engine.build import build
from trireme.engine.exchange import Exchange
from trireme.engine.lanes import RealLanes
from trireme.engine.run.job import Job
from trireme.engine.run.log import RunLog
from trireme.engine.run.options import Options
from trireme.engine.run.screen import tell
from trireme.engine.run.verify import has_begun, tidy
from trireme.engine.step import Engine
from trireme.engine.updates import AdamW
from trireme.models.config import InputError
from trireme.storage.files import NoSnapshot, StoreError
from trireme.storage.folders import FINISHED, IDENTITY, remove_finished
from trireme.storage.shards import DAMAGED, Damaged
from trireme.storage.snapshots import NO_WAY_BACK, NONE_OLDER
from trireme.storage.store import Store

TRIAL = 256 << 20  # most bytes written to find out how a drive is best driven


def new_store(job: Job) -> Store:
    """An empty store. Raises StoreError."""
    return Store.create(job.store_dirs, job.options.keep, job.source.folder, min(TRIAL, 4 * job.parameters))


def open_snapshot(options: Options) -> tuple[Store | None, dict | None]:
    """The store of an interrupted run and what its last snapshot says, as train.Run saved it; (None, None) before one.

    Raises InputError where the run is finished or its store is elsewhere, StoreError.
    """
    out, dirs = Path(options.out), [Path(d) for d in options.store or (os.path.join(options.out, "store"),)]
    finished = any((d / FINISHED).exists() for d in dirs)
    lost = [d for d in dirs if not (d / IDENTITY).exists()]
    ours = not options.store or all(d.is_dir() for d in dirs)  # what is empty may also be a drive that is not mounted
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
        store = Store.open(dirs, options.keep, trial=0)
    except NoSnapshot:
        tell("no snapshot yet: starts from the beginning")
        return None, None
    return store, store.restore()


def check_continues(job: Job, snapshot: dict) -> None:
    """Raises InputError unless the job goes on where the snapshot of its run ended: same data, steps left."""
    if snapshot["data"] != job.data.fingerprint:
        raise InputError(f"--resume {job.out}: the data is not what the run was started with. Restore it.")
    if job.total_steps < snapshot["step"]:
        raise InputError(
            f"--resume {job.out}: the run stands at step {snapshot['step']}, and {job.total_steps} are asked for. "
            "Ask for more: --max-steps or --epochs."
        )


def make_engine(job: Job, lanes: RealLanes, store: Store, log: RunLog) -> Engine:
    """An engine by the job's plan, with nothing in its homes yet. Raises DoesNotFit."""
    o = job.options
    adamw = AdamW(o.beta1, o.beta2, o.eps, o.weight_decay, o.max_grad_norm)
    e = build(job.cfg, job.plan, job.limits, lanes, adamw=adamw, store=store)
    if e.memory.refused:
        log.say(
            f"warning: CUDA pins {gib(e.memory.used('host') - e.memory.refused)} of RAM, the plan uses "
            f"{gib(e.memory.used('host'))}: copies of the rest are several times slower than predicted. Lower --ram"
        )
    return e


def fill_engine(
    e: Engine, job: Job, store: Store, log: RunLog, resumed: bool, asked: Sequence[int] = (), moved: bool = False
) -> None:
    """Claims the room that the engine needs on the drives, and loads it: the snapshot if `resumed`, or the checkpoint.

    `moved`: this process has just written the snapshot, and what stays on the SSD is not read. Raises KeyboardInterrupt
    between two pieces when anything is in `asked`; InputError, StoreError.
    """
    e.claim_scratch(store.devices)
    if resumed:
        _load_snapshot(e, store, log, asked, everything=not moved)
        return
    for shard in e.homes.shards():
        store.add(shard.name, shard.layout, weights=shard.entry.kind == "weights")
    if job.plan.homes_on_ssd:
        store.reserve()
    with _loading(log, "loading", e.homes.nbytes(), asked) as more:
        Exchange(job.cfg, job.source, e.homes).load(more)


def _load_snapshot(e: Engine, store: Store, log: RunLog, asked: Sequence[int], everything: bool) -> None:
    """Fills the homes from the last snapshot; what is read is compared with its checksums. Raises StoreError."""
    if {name: shard.layout for name, shard in store.shards.items()} != {
        shard.name: shard.layout for shard in e.homes.shards()
    }:
        folder = os.path.join(store.devices[0].path, store.snapshots[-1].folder)
        raise StoreError(errno.EINVAL, "is the state of another model, or cut otherwise", folder)
    try:
        with _loading(log, "loading", e.homes.nbytes(everything), asked) as more:
            e.homes.load_from_store(more, everything)
    except Damaged as damage:
        back = _way_back(e, store, log, asked)
        raise StoreError(damage.errno, f"{DAMAGED}. {back}", damage.filename) from damage


def _way_back(e: Engine, store: Store, log: RunLog, asked: Sequence[int]) -> str:
    """What to do where the last snapshot is damaged: those before it are read until one is whole."""
    *older, last = store.snapshots
    newer = [last.folder]
    for snapshot in reversed(older):
        store.restore(snapshot.step)
        try:
            with _loading(log, f"checking step {snapshot.step}", e.homes.nbytes(), asked) as more:
                e.homes.load_from_store(more)
        except Damaged:
            newer.append(snapshot.folder)
        else:
            return f"The last whole snapshot is of step {snapshot.step}: to go back to it, remove {', '.join(newer)}"
    return f"{'No snapshot is whole' if older else NONE_OLDER}: {NO_WAY_BACK}"


@contextmanager
def _loading(log: RunLog, what: str, nbytes: int, asked: Sequence[int]) -> Iterator[Callable[[int], None]]:
    with log.screen.working(what, nbytes) as more:

        def more_or_leave(nbytes: int) -> None:
            more(nbytes)
            if asked:
                raise KeyboardInterrupt

        yield more_or_leave
