"""Activations between forward and backward: kept on the GPU, swapped to RAM, another GPU or the SSD, or recomputed.

The tensors that a layer saves for backward are one buffer for each tier they are saved in. A layer's output (`x` of the
next layer; in backward `dx`) is stored by `plan.between`. "gpu": it stays on the GPU until it is used, and a peer copy
brings it to the next layer's GPU. "host": `x` is copied to the tier that the plan has for it, `dx` to RAM; where the
next layer is on another GPU, `x` goes through the same buffer in RAM as the micro-batch's `dx`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trireme.engine.home import DriveHome, Home
from trireme.engine.memory import Buffer, Pool, Prefetch, copied, flat, views
from trireme.engine.placement import Placement, Scratched
from trireme.engine.plan import SAVED, SavedTier, Tier
from trireme.engine.queues.names import HOPS, numbered
from trireme.engine.queues.task import Task

# ---------------------------------------------------------------- one activation


class Route(NamedTuple):
    """The buffers and queues through which an activation gets from the task that writes it to those that read it."""

    gpu: int  # of the tasks that read it
    out: Buffer | Pool  # to write it to
    back: Buffer | Pool  # to read it from
    leaves: str = ""  # the queue that copies it outside
    outside: Home | None = None  # its place between
    comes: str = ""  # the queue that copies it back, unless the pass says
    stays: bool = False  # it leaves the GPU for another pass alone
    peer: str = ""  # the queue that copies it from `out` to `back`; none where they are one


class Activation:
    """One activation of one micro-batch: layer u's input, its gradient, or tensors saved for backward.

    It takes its buffers from pools, and frees them after its last reader.
    """

    def __init__(self, swap: ActivationSwap, u: int, label: str, route: Route, names: tuple[str, ...] = ()):
        """`names`: of the saved tensors; empty for an input or its gradient."""
        self.swap, self.u, self.label, self.names, self.route = swap, u, label, names, route
        self.here: Buffer | None = None  # on the GPU
        self.made: tuple[Task, ...] = ()  # what readers come after; they do not wait for each other
        self.tokens = 0
        self.again = False  # a later pass reads it, too
        self.stored = False  # outside
        self.queue = ""  # that brings it back

    @property
    def nbytes(self) -> int:
        geo = self.swap.geo
        return geo.saved_layout(self.u, self.names, self.tokens).span if self.names else geo.x_bytes(self.tokens)

    # ------------------------------------------------ written

    def fill(self, tokens: int, again: bool = False) -> InUse:
        """Takes a buffer on the GPU of the task that writes it. `again`: a later pass reads it, too."""
        self.tokens, self.again, self.stored = tokens, again, False
        self.here = self._buffer(self.route.out)
        return InUse(self, self.here, tokens, self.here.ready, self.written)

    def written(self, task: Task) -> None:
        """Sends it outside, unless it stays until its only reader.

        From another GPU it is sent when its reader is queued: else what readers save would queue behind all that the
        other GPU has not written yet.
        """
        here, route = self._here(), self.route
        here.ready = (task,)
        if route.peer:
            here = self._cross(here)
        self.made = here.ready
        if route.outside is None or (route.stays and (route.peer or not self.again)):
            return
        self._store(here, route.outside)
        if not route.stays:
            self._free(here.ready)
        self.swap.go_on()

    def _store(self, here: Buffer, outside: Home) -> None:
        here.used(outside.store(self.route.leaves, here, self.nbytes))
        self.stored = True

    def _cross(self, here: Buffer) -> Buffer:
        """Copies it to the GPU of the tasks that read it."""
        there = self._buffer(self.route.back)
        there.ready = (copied(self.swap.queues, self.route.peer, "activations", self.label, here, there, self.nbytes),)
        here.free(there.ready)
        self.here = there
        return there

    # ------------------------------------------------ read

    @property
    def may_come(self) -> bool:
        back = self.route.back
        return self.stored and (not isinstance(back, Pool) or back.is_free)

    def fetch(self) -> None:
        if self.here is not None:
            return
        assert self.route.outside is not None
        here = self._buffer(self.route.back)
        here.ready = self.made = (self.route.outside.load(self.queue, here, self.nbytes),)
        self.here = here

    def read(self, last: bool = True) -> InUse:
        """`last`: no other task of this pass reads it."""
        here, outside = self._here(), self.route.outside
        if self.again and outside is not None and not self.stored:
            self._store(here, outside)
        return InUse(self, here, self.tokens, self.made, self.was_read if last else here.used)

    def was_read(self, task: Task) -> None:
        """To be called with the last task of a pass that reads it: frees the buffer unless the next pass reads it
        there.
        """
        here = self._here()
        here.used(task)
        self.stored = self.stored and self.again
        if not self.again or (self.stored and isinstance(self.route.back, Pool)):
            self._free(here.ready)
        self.again = False

    def _buffer(self, of: Buffer | Pool) -> Buffer:
        return of.acquire(self.label) if isinstance(of, Pool) else of

    def _here(self) -> Buffer:
        assert self.here is not None, f"{self.label} is not on the GPU"
        return self.here

    def _free(self, after: Sequence[Task]) -> None:
        here, self.here = self._here(), None
        here.free(after)
        self.swap.go_on()


class InUse(NamedTuple):
    """An activation as a task's use: its buffer, and what to call with the task (memory.Use)."""

    of: Activation
    buffer: Buffer
    tokens: int
    ready: tuple[Task, ...]
    done: Callable[[Task], None]

    def rows(self) -> Tensor:
        """The tensor of an input or its gradient, (N, D) in the compute dtype."""
        geo = self.of.swap.geo
        return flat(self.buffer.tensor, geo.dtype, self.tokens * geo.cfg.width).view(self.tokens, geo.cfg.width)


class Passed(NamedTuple):
    """Sums that each slice of a layer's experts adds to and the next one reads (shapes.passed_shapes), as a task's
    use.
    """

    swap: ActivationSwap
    b: int  # micro-batch
    buffer: Buffer
    tokens: int
    ends: bool  # the last slice frees it

    @property
    def ready(self) -> tuple[Task, ...]:
        return self.buffer.ready

    def done(self, task: Task) -> None:
        self.buffer.ready = (task,)
        if self.ends:
            del self.swap.passed[self.b]
            self.buffer.free((task,))

    def tensors(self) -> dict[str, Tensor]:
        return views(self.swap.geo.passed_layout(self.tokens), self.buffer.tensor)


def saved_tensors(saved: Iterable[InUse]) -> dict[str, Tensor]:
    """Views of all saved tensors of a layer, by name."""
    found: dict[str, Tensor] = {}
    for use in saved:
        layout = use.of.swap.geo.saved_layout(use.of.u, use.of.names, use.tokens)
        found |= views(layout, use.buffer.tensor)
    return found


# ---------------------------------------------------------------- all of them


Pools = tuple[list[Pool], list[Pool]]  # of each GPU: to fill, and to bring back to


class ActivationSwap:
    """The activations of all layers, `x[u][b]`, `dx[u][b]` and `saved[u][b]` by layer u and micro-batch b.

    Copies back to the GPU are started in the order in which a pass reads them, each once its pool has a free buffer.
    """

    def __init__(self, placement: Placement):
        self.placement, self.queues = placement, placement.queues
        self.geo, self.plan = geo, plan = placement.geo, placement.plan
        self.hop_in, self.hop_out = HOPS if plan.gpus > 1 and plan.between == "host" else ("h2d", "d2h")
        self.to_next, self.again = Prefetch(), Prefetch()  # to the next layer; in backward what forward left
        self.staging = placement.pool("host", "staging pool")
        self.pools = {tier: placement.gpu_pools("saved pool", tier) for tier in ("peer", "host", "ssd")}
        self.places = [Buffer(tensor) for tensor in placement.many("host", "dx")]  # by micro-batch
        micro_batches, layers = range(plan.n_micro), range(1, geo.n_units)
        x, dx = self._between("x pool"), self._between("dx pool")
        on_gpu = [iter(placement.many("gpu", "x", gpu=gpu)) for gpu in range(plan.gpus)]
        in_ram = iter(placement.many("host", "x"))
        self.x = [[], *([self._x(u, b, x, on_gpu[self._gpu(u)], in_ram) for b in micro_batches] for u in layers)]
        self.dx = [[], *([self._dx(u, b, dx) for b in micro_batches] for u in layers)]
        self.saved = [list(self._saved(u)) for u in range(geo.n_units)]  # of each micro-batch one for each tier
        self.for_passed = placement.gpu_pools("passed pool")
        self.passed = dict[int, Buffer]()  # by micro-batch, of the layer whose slices are in use

    def _between(self, what: Literal["x pool", "dx pool"]) -> Pools:
        """Pools of each GPU for the outputs of layers, or their gradients."""
        gpus = range(self.plan.gpus)
        if self.plan.between == "gpu" and self.plan.gpus == 1:
            pools = self.placement.gpu_pools(what)
            return pools, pools
        slots = self.plan.swap_slots
        out, back = (
            [self.placement.pool("gpu", what, gpu=gpu, part=part) for gpu in gpus]
            for part in (slice(slots), slice(slots, None))
        )
        return out, back

    def _gpu(self, u: int) -> int:
        """The GPU that computes with layer u."""
        return self.plan.units[u].gpu

    def _x(self, u: int, b: int, pools: Pools, on_gpu: Iterator[Tensor], in_ram: Iterator[Tensor]) -> Activation:
        """Layer u's input. The head's is read at once, so it stays on the GPU unless `between` is "host"."""
        tier: Tier | None = self.plan.units[u].x if self.geo.cfg.trains else None  # None: no later pass reads it
        writer, reader, label = self._gpu(u - 1), self._gpu(u), f"{self.geo.names[u]} x {b}"
        out, back, peer = self._pools_of(pools, writer, reader)
        stays, leaves = self.plan.between == "gpu", numbered(self.hop_out, reader if peer else writer)
        if tier == "gpu":
            own = Buffer(next(on_gpu))
            through_ram = self._home(label, self.places[b]) if writer != reader and not stays else None
            route = Route(reader, own if writer == reader else out, own, leaves, through_ram, peer=peer)
        elif stays and (u == self.geo.head or tier is None):
            route = Route(reader, out, back, peer=peer)
        else:
            nbytes = self.geo.x_bytes(self.plan.tokens)
            home = self._outside(label, tier, in_ram, nbytes) if tier else self._home(label, self.places[b])
            route = Route(reader, out, back, leaves, home, stays=stays, peer=peer)
        return Activation(self, u, label, route)

    def _dx(self, u: int, b: int, pools: Pools) -> Activation:
        writer, reader, label = self._gpu(u), self._gpu(u - 1), f"{self.geo.names[u]} dx {b}"
        home = self._home(label, self.places[b]) if self.plan.between == "host" else None
        out, back, peer = self._pools_of(pools, writer, reader)
        return Activation(self, u, label, Route(reader, out, back, numbered(self.hop_out, writer), home, peer=peer))

    def _pools_of(self, pools: Pools, writer: int, reader: int) -> tuple[Pool, Pool, str]:
        """The pools to write to and to read from, and the queue of peer copies between them ("" if there is no
        copy).
        """
        stays = self.plan.between == "gpu"
        peer = numbered("peer", writer) if stays and writer != reader else ""
        out = pools[0][writer] if peer or not stays else pools[1][writer]
        return out, pools[1][reader], peer

    def _saved(self, u: int) -> Iterator[list[Activation]]:
        unit, name, inner = self.plan.units[u], self.geo.names[u], 0 < u < self.geo.head
        gpu, tiers = unit.gpu, [tier for tier in SAVED if inner and unit.names(tier)]
        on_gpu = iter(self.placement.many("gpu", "saved", name, gpu))
        lent = iter(self.placement.many("gpu", "lent", name, unit.peer))
        in_ram = iter(self.placement.many("host", "saved", name))

        def route(tier: SavedTier, label: str) -> Route:
            if tier == "gpu":
                own = Buffer(next(on_gpu))
                return Route(gpu, own, own)
            pool = self.pools[tier][gpu]
            if tier == "peer":
                at_peer = self._home(label, Buffer(next(lent)))
                return Route(gpu, pool, pool, numbered("peer_out", gpu), at_peer, numbered("peer_in", gpu))
            nbytes = self.geo.saved_layout(u, unit.names(tier), self.plan.tokens).span
            return Route(gpu, pool, pool, numbered("d2h", gpu), self._outside(label, tier, in_ram, nbytes))

        for b in range(self.plan.n_micro):
            labels = {tier: f"{name} {tier} {b}" for tier in tiers}
            yield [Activation(self, u, label, route(t, label), unit.names(t)) for t, label in labels.items()]

    def _home(self, label: str, place: Buffer) -> Home:
        return Home(self.queues, "activations", label, place)

    def _outside(self, label: str, tier: Tier, in_ram: Iterator[Tensor], nbytes: int) -> Home:
        if tier == "host":
            return self._home(label, Buffer(next(in_ram)))
        return DriveHome(self.queues, "activations", label, self.staging, Scratched(self.placement.space, nbytes))

    # ------------------------------------------------ slices of experts

    def from_slice(self, u: int, b: int, tokens: int, begins: bool, ends: bool) -> list[Passed]:
        """The sums that a slice of experts passes to the next one, for micro-batch b; empty if the layer is not
        sliced.
        """
        if begins and ends:
            return []
        if begins:
            self.passed[b] = self.for_passed[self._gpu(u)].acquire(f"{self.geo.names[u]} passed {b}")
        return [Passed(self, b, self.passed[b], tokens, ends)]

    # ------------------------------------------------ a pass

    def expect_forward(self, n_micro: int) -> None:
        """Starts a forward pass: with `between` "host", each layer's input is brought back before the layer."""
        if self.plan.between == "host":
            self._expect(self.to_next, self.hop_in, [x for of in self.x for x in of[:n_micro]])

    def expect_backward(self, n_micro: int) -> None:
        """Starts a backward pass: what forward stored outside is brought back before its layer, and, with `between`
        "host", the gradients of inputs.
        """
        left = [each for u in range(self.geo.head - 1, 0, -1) for each in self._left(u, n_micro)]
        self._expect(self.again, "h2d", [each for each in left if isinstance(each.route.back, Pool)])
        self._expect(self.to_next, self.hop_in, [dx for of in self.dx[:0:-1] for dx in of[:n_micro]])

    def _left(self, u: int, n_micro: int) -> list[Activation]:
        """Layer u's activations in the order in which backward reads them; of slices, the last one reads what is
        saved.
        """
        x, saved = self.x[u][:n_micro], self.saved[u][:n_micro]
        if self.geo.slices_of[u]:
            return [*x, *(each for of in saved for each in of)]
        return [each for b in range(n_micro) for each in (x[b], *saved[b])]

    def _expect(self, prefetch: Prefetch, queue: str, read: Sequence[Activation]) -> None:
        """`read`: in the order in which layers read them."""
        coming = [each for each in read if each.route.outside is not None]
        for each in coming:
            each.queue = each.route.comes or numbered(queue, each.route.gpu)
        prefetch.expect([(each.route.gpu, each) for each in coming])

    def go_on(self) -> None:
        """To be called when a buffer was freed or an activation stored: starts the transfers that can start now."""
        self.to_next.go_on()
        self.again.go_on()
