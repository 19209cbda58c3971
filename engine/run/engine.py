"""The engine of a run, built and loaded: from the checkpoint, from a snapshot, or from the snapshots of other hosts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from trireme.engine.activations import Activation
from trireme.engine.amounts import count, gb, gib
from trireme.engine.between import load_from_store
from trireme.engine.build import Engine, Inputs, build, in_ram, placed
from trireme.engine.exchange import Exchange
from trireme.engine.hosts import reshare
from trireme.engine.hosts.group import Alone
from trireme.engine.hosts.held import Whole
from trireme.engine.layers import Into, backward_block, backward_embedding, forward_block, forward_embedding, loss
from trireme.engine.memory import NOTHING
from trireme.engine.planner.clock import Clock
from trireme.engine.planner.host import hold_to
from trireme.engine.planner.machine import note_pinned
from trireme.engine.queues.real import RealQueues
from trireme.engine.run.job import Job
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.base import CheckpointBase
from trireme.engine.tuning.cached import Cached
from trireme.engine.updates import AdamW
from trireme.models.losses.comparison import Comparison
from trireme.models.losses.preferences import Preference
from trireme.models.rows import make_load, rope_tables
from trireme.models.sizes.shapes import layer
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
            _load_and_warm_up(self.e, job, exchange, more, clock)
        sums = exchange.base | {"those that are trained": exchange.trained}
        self.group.agree("weights", sums, "Copy host 0's checkpoint")
        return exchange

    def go_on(self, whole: Whole | None = None, everything: bool = True) -> Exchange:
        """Loads the snapshot, or this host's share of `whole`, and frozen weights from the checkpoint. Without
        `everything`, what stays on the SSD is not read.
        """
        job, placement = self.job, self.e.placement
        if whole is None:
            self._snapshot(everything)
        else:
            what = f"redistributing the state of {count(whole.key.hosts, 'host')}"
            with self._loading(what, placement.nbytes()) as more:
                reshare.fill(placement, whole, self.group.wire, more)
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


def _load_and_warm_up(e: Engine, job: Job, exchange: Exchange, more: Callable[[int], None], clock: Clock) -> None:
    """On a GPU, loads in another thread while this one compiles kernels."""
    if job.device.type != "cuda" or job.plan.gpus * job.plan.hosts > 1:
        exchange.load(more)
        return
    loaded, ended = SimpleQueue[int | None](), list[float]()

    def load() -> None:
        try:
            exchange.load(more, loaded.put)
        finally:
            ended.append(clock.now())
            loaded.put(None)

    with ThreadPoolExecutor(1, "load") as thread:
        loading = thread.submit(load)
        warm_up(e, _first(job), iter(loaded.get, None))
        loading.result()
    clock.move(clock.now() - ended[0], "load", "compile")


def _first(job: Job) -> Inputs:
    """The first micro-batch of the first step."""
    mb, o = in_ram(job.cfg, next(iter(job.data.step(0, job.options.batch_size, job.micro_rows)))), job.options
    load = make_load(job.cfg, mb.tokens, o.router_aux, job.device)
    return placed(mb, [(rope_tables(job.cfg, job.seq_len, job.device), job.device)], [load])


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


# ---------------------------------------------------------------- kernel warm-up


def warm_up(e: Engine, mb: Inputs, loaded: Iterable[int]) -> None:
    """Runs forward and backward of units in the order in which they are `loaded`, to compile kernels. For one GPU.

    Raises what a step of the micro-batch would raise.
    """
    seen = set[tuple[str, bool]]()
    for u in loaded:
        form = e.geo.kinds[u], 0 < u < e.geo.head and e.cfg.layer_window(layer(e.cfg, u)) > 0
        if form not in seen:
            seen.add(form)
            {0: _embedding, e.geo.head: _head}.get(u, _block)(e, u, mb)
    e.queues.drain()


def _arrives(e: Engine, activation: Activation, tokens: int, again: bool = False) -> None:
    """An activation of zeros, copied out and back as in a step."""
    here = activation.fill(tokens, again)
    e.compute("zero", activation.u, here.buffer.tensor.zero_, (here,))
    activation.queue = e.activations.hop_in
    activation.fetch()


def _embedding(e: Engine, u: int, mb: Inputs) -> None:
    for part in e.weights.parts(u):
        done = forward_embedding(e, 0, part, mb, train=False)
    e.activations.x[1][0].discard(done)
    _arrives(e, e.activations.dx[1][0], mb.tokens)
    backward_embedding(e, 0, mb)
    e.gradients.drop(u)


def _block(e: Engine, u: int, mb: Inputs) -> None:
    x, dx, saved = e.activations.x, e.activations.dx, e.activations.saved
    _arrives(e, x[u][0], mb.tokens, again=True)
    for part in e.weights.parts(u):
        done = forward_block(e, u, 0, part, mb, train=True)
    x[u + 1][0].discard(done)
    _arrives(e, dx[u + 1][0], mb.tokens)
    for left in (x[u][0], *saved[u][0]):
        left.queue = "h2d"
        left.fetch()
    for part in e.weights.parts(u, backward=True):
        done = backward_block(e, u, 0, part, mb)
    dx[u][0].discard(done)
    e.gradients.drop(u)


def _head(e: Engine, u: int, mb: Inputs) -> None:
    x, comparison = e.activations.x[u][0], None
    _arrives(e, x, mb.tokens, again=bool(mb.docs))
    with e.weights.of_losses([e.gpu(u)]) as w:
        g = {v: e.gradients.get(v) for v in w[e.gpu(u)]}
        if mb.docs:
            loss(e, 0, w[e.gpu(u)], mb, [NOTHING])
            x.fetch()
            factors = torch.zeros(mb.tokens, device=mb.on(e.gpu(u)).labels.device)
            comparison = Comparison(Preference("dpo"), [], factors=[factors])
        done = loss(e, 0, w[e.gpu(u)], mb, [NOTHING], into=Into(1.0, g, comparison=comparison))
    e.activations.dx[u][0].discard(done)
    for v in g:
        e.gradients.drop(v)
