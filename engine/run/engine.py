"""The engine of a run, built and loaded: from the checkpoint, from a snapshot, or from the snapshots of other hosts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trireme.engine.amounts import count, gb, gib
from trireme.engine.between import load_from_store
from trireme.engine.build import Engine, build
from trireme.engine.exchange import Exchange
from trireme.engine.hosts.group import Alone
from trireme.engine.hosts.host_snapshots import RunSnapshot
from trireme.engine.hosts.reshard import load_share
from trireme.engine.planner.clock import Clock
from trireme.engine.planner.host import hold_to
from trireme.engine.planner.machine import note_pinned
from trireme.engine.queues.real import RealQueues
from trireme.engine.run.job import Job
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.base import CheckpointBase
from trireme.engine.tuning.cached import Cached
from trireme.engine.updates import AdamW
from trireme.storage.files import StoreError
from trireme.storage.shards import DAMAGED, Damaged
from trireme.storage.snapshots import NO_WAY_BACK, NONE_OLDER
from trireme.storage.store import Store


def make_engine(job: Job, queues: RealQueues, store: Store, screen: Screen, group: Alone) -> Engine:
    """Builds the engine; its buffers are not filled. Raises DoesNotFit."""
    o = job.options
    adamw = AdamW(*o.betas, weight_decay=job.weight_decay, max_grad_norm=o.max_grad_norm)
    hold_to(job.limits, job.device)
    files = _base_files(job, store, screen)
    e = build(job.cfg, job.plan, job.limits, queues, adamw=adamw, store=store, files=files, wire=group.wire)
    if e.memory.refused:
        pinned = e.memory.used("host") - e.memory.refused
        note_pinned(job.device, pinned)
        screen.warn(
            f"CUDA pins {gib(pinned)} of RAM, the plan uses {gib(e.memory.used('host'))}: copies of the rest are "
            f"several times slower than predicted. The next run plans with {gib(pinned)}, unless --ram is given"
        )
    return e


def make_base(job: Job, screen: Screen, asked: Sequence[int]) -> None:
    """Writes the file of --base in the store, unless it is there and as it was written. Raises StoreError;
    KeyboardInterrupt as Live.load.
    """
    if isinstance(job.source, Cached):
        made, nbytes = job.source.is_made(), job.source.file_bytes
        what = "checking the base" if made else f"quantizing the base to {job.source.base}"
        with _loading(screen, what, nbytes + (0 if made else job.source.original.nbytes), asked) as more:
            job.source.make(more, screen.warn)


def _base_files(job: Job, store: Store, screen: Screen) -> CheckpointBase | None:
    """Reads frozen weights on the SSD from the user's checkpoint; None if they are copied to the scratch space
    instead.
    """
    if job.files.copied or not job.forecast.frozen_on_ssd:
        return None
    geo, units = job.forecast.geo, job.plan.units
    layouts = {v: layout for v, layout in enumerate(geo.stored_base) if units[geo.unit_of(v)].base == "ssd"}
    try:
        return CheckpointBase(layouts, job.source, job.stored, store.devices[0])
    except StoreError as error:
        screen.warn(f"{error}; so frozen weights are copied, {gb(job.forecast.frozen_on_ssd)}")
        return None


@dataclass(frozen=True)
class Loader:
    """Fills an engine. Its methods raise as Live.load, and return the exchange with the checksums of what was read."""

    e: Engine
    job: Job
    store: Store
    screen: Screen
    group: Alone
    asked: Sequence[int] = ()

    def begin(self, clock: Clock) -> Exchange:
        """Loads the checkpoint, with the adapter of --adapter. `clock` counts within its part "load"."""
        job, placement, adapter = self.job, self.e.placement, self.job.adapter
        exchange = Exchange(job.cfg, job.source, placement, adapter.values if adapter else None)
        with self._loading("loading", placement.nbytes() + placement.frozen_bytes) as more:
            exchange.load(more)
        sums = exchange.base | {"those that are trained": exchange.trained}
        self.group.agree("weights", sums, "Copy host 0's checkpoint")
        return exchange

    def go_on(self, common: RunSnapshot | None = None, everything: bool = True) -> Exchange:
        """Loads the snapshot, or this host's share of `common`, and frozen weights from the checkpoint. Without
        `everything`, what stays on the SSD is not read.
        """
        job, placement = self.job, self.e.placement
        if common is None:
            self._snapshot(everything)
        else:
            with self._loading(f"loading the state of {count(common.key.hosts, 'host')}", placement.nbytes()) as more:
                load_share(placement, common, more)
        exchange = Exchange(job.cfg, job.source, placement)
        if placement.frozen_bytes:
            with self._loading("loading what is frozen", placement.frozen_bytes) as more:
                exchange.load_base(more)
        return exchange

    def _snapshot(self, everything: bool) -> None:
        store, placement = self.store, self.e.placement
        expected = {shard.name: shard.layout for shard in placement.shards()}
        if {name: shard.layout for name, shard in store.shards.items()} != expected:
            folder = Path(store.devices[0].path) / store.snapshots[-1].folder
            raise StoreError(errno.EINVAL, "is the state of another model, or in other shards", str(folder))
        try:
            with self._loading("loading", placement.nbytes(everything)) as more:
                load_from_store(placement, more, everything)
        except Damaged as damage:
            raise StoreError(damage.errno, f"{DAMAGED}. {self._way_back()}", damage.filename) from damage

    def _way_back(self) -> str:
        """What the user can do about a damaged snapshot. Reads older ones until one is whole."""
        *older, last = self.store.snapshots
        newer, placement = [last.folder], self.e.placement
        for snapshot in reversed(older):
            self.store.restore(snapshot.step)
            try:
                with self._loading(f"checking step {snapshot.step:,}", placement.nbytes()) as more:
                    load_from_store(placement, more)
            except Damaged:
                newer.append(snapshot.folder)
            else:
                back = f"The last whole snapshot is of step {snapshot.step:,}"
                return f"{back}: to go back to it, remove {', '.join(newer)}"
        return f"{'No snapshot is whole' if older else NONE_OLDER}: {NO_WAY_BACK}"

    def _loading(self, what: str, nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
        return _loading(self.screen, what, nbytes, self.asked)


def claim_space(e: Engine, job: Job, store: Store, anew: bool) -> None:
    """Takes scratch space and, if `anew`, space for shards, which no snapshot has then. Raises StoreError if it is
    short.
    """
    e.claim_scratch(store.devices)
    if not anew:
        return
    store.clear()
    for shard in e.placement.shards():
        store.add(shard.name, shard.layout, weights=shard.entry.kind == "weights")
    if job.plan.stored_on_ssd:
        store.reserve()


@contextmanager
def _loading(screen: Screen, what: str, nbytes: int, asked: Sequence[int]) -> Iterator[Callable[[int], None]]:
    with screen.working(what, nbytes) as more:

        def more_or_leave(nbytes: int) -> None:
            more(nbytes)
            if asked:
                raise KeyboardInterrupt

        yield more_or_leave
