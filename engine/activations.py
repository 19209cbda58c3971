"""Activations between forward and backward: kept on the GPU, swapped to RAM, another GPU or the SSD, or recomputed.

The tensors that a layer saves for backward are one buffer for each tier they are saved in. A layer's output (`x` of the
next layer; in backward `dx`) is stored by `plan.between`. "gpu": it stays on the GPU until it is used, and a peer copy
brings it to the next layer's GPU. "ram": `x` is copied to the tier that the plan has for it, `dx` to RAM; where the
next layer is on another GPU, `x` goes through the same buffer in RAM as the micro-batch's `dx`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trireme.engine.buffers import Role
from trireme.engine.home import DriveHome, Home
from trireme.engine.memory import Buffer, Pool, Prefetch, flat, queue_copy, views
from trireme.engine.placement import Placement, in_scratch
from trireme.engine.plan import SAVED, SavedTier, Tier
from trireme.engine.queues.names import HOPS, gpu_of, numbered
from trireme.engine.queues.task import Task

# ---------------------------------------------------------------- one activation


class Hop(NamedTuple):
    """A copy of an activation: its queue, and a home, or a buffer on the GPU that it is copied to."""

    queue: str
    target: Home | Buffer | Pool


class Activation:
    """One activation of one micro-batch: layer u's input, its gradient, or the tensors `names` saved for backward.

    It is written to `out`, goes by `hops` to the tasks of the same pass that read it, and by `later` to those of the
    next pass. After a home it waits until it is fetched. Its buffers are free after the last reader.
    """

    def __init__(
        self,
        swap: ActivationSwap,
        u: int,
        label: str,
        out: Buffer | Pool,
        hops: Sequence[Hop] = (),
        backward_hops: Sequence[Hop] = (),
        names: tuple[str, ...] = (),
    ):
        self.swap, self.u, self.label, self.names = swap, u, label, names
        self.out, self.hops, self.backward_hops = out, hops, backward_hops
        self.homes = [hop.target for hop in (*hops, *backward_hops) if isinstance(hop.target, Home)]  # one at most
        self.waits = any(isinstance(hop.target, Home) for hop in hops)  # for its readers, at its home
        self.buffer: Buffer | None = None  # on the GPU
        self.writers: tuple[Task, ...] = ()  # what readers come after; they do not wait for each other
        self.tokens = 0
        self.for_backward = False  # the next pass reads it, too
        self.stored = False  # at its home
        self.fetch_hop: Hop | None = None  # from there

    @property
    def nbytes(self) -> int:
        geo = self.swap.geo
        return geo.saved_layout(self.u, self.names, self.tokens).span if self.names else geo.x_bytes(self.tokens)

    # ------------------------------------------------ written

    def fill(self, tokens: int, for_backward: bool = False) -> InUse:
        """Takes a buffer on the GPU of the task that writes it. `for_backward`: the next pass reads it, too."""
        self.tokens, self.for_backward, self.stored = tokens, for_backward, False
        self.buffer = self._acquire(self.out)
        return InUse(self, self.buffer, tokens, self.buffer.ready, self.send)

    def send(self, task: Task) -> None:
        """Sends it to its readers. For the next pass it is stored at once, unless it comes from another GPU: then when
        its reader is queued, or what readers save would queue behind all that the other GPU has not written yet.
        """
        self._get_buffer().ready = (task,)
        for hop in self.hops:
            if isinstance(hop.target, Home):
                self._store(hop)
                self._free(self._get_buffer().ready)
                return
            self._cross(hop.queue, hop.target)
        self.writers = self._get_buffer().ready
        if self.backward_hops and (self.names or (self.for_backward and not self.hops)):
            self._store(self.backward_hops[0])
            if self.names:
                self._free(self._get_buffer().ready)
            else:
                self.swap.advance()

    def _store(self, hop: Hop) -> None:
        assert isinstance(hop.target, Home)
        buffer = self._get_buffer()
        buffer.hold_until(hop.target.store(hop.queue, buffer, self.nbytes))
        self.stored = True

    def _cross(self, queue: str, target: Buffer | Pool) -> None:
        """Copies it to the GPU of the tasks that read it."""
        source, buffer = self._get_buffer(), self._acquire(target)
        buffer.ready = (queue_copy(self.swap.queues, queue, "activations", self.label, source, buffer, self.nbytes),)
        source.free(buffer.ready)
        self.buffer = buffer

    # ------------------------------------------------ read

    @property
    def can_fetch(self) -> bool:
        assert self.fetch_hop is not None
        return self.stored and (not isinstance(self.fetch_hop.target, Pool) or self.fetch_hop.target.is_free)

    def fetch(self) -> None:
        if self.buffer is None:
            assert self.fetch_hop is not None
            assert not isinstance(self.fetch_hop.target, Home)
            self.buffer = self._acquire(self.fetch_hop.target)
            self.buffer.ready = self.writers = (self.homes[0].load(self.fetch_hop.queue, self.buffer, self.nbytes),)

    def read(self, last: bool = True) -> InUse:
        """`last`: no other task of this pass reads it."""
        if self.for_backward and self.backward_hops and not self.stored:
            self._store(self.backward_hops[0])
        buffer = self._get_buffer()
        return InUse(self, buffer, self.tokens, self.writers, self.finish_reading if last else buffer.hold_until)

    def finish_reading(self, task: Task) -> None:
        """To be called with the last task of a pass that reads it: frees the buffer unless the next pass reads it
        there.
        """
        buffer = self._get_buffer()
        buffer.hold_until(task)
        self.stored = self.stored and self.for_backward
        if self.backward_hops or not self.for_backward:
            self._free(buffer.ready)
        self.for_backward = False

    def _acquire(self, target: Buffer | Pool) -> Buffer:
        return target.acquire(self.label) if isinstance(target, Pool) else target

    def _get_buffer(self) -> Buffer:
        assert self.buffer is not None, f"{self.label} is not on the GPU"
        return self.buffer

    def _free(self, after: Sequence[Task]) -> None:
        buffer, self.buffer = self._get_buffer(), None
        buffer.free(after)
        self.swap.advance()


class InUse(NamedTuple):
    """An activation as a task's use: its buffer, and what to call with the task."""

    activation: Activation
    buffer: Buffer
    tokens: int
    ready: tuple[Task, ...]
    attach: Callable[[Task], None]

    def rows(self) -> Tensor:
        """The tensor of an input or its gradient, (N, D) in the compute dtype."""
        geo = self.activation.swap.geo
        return flat(self.buffer.tensor, geo.dtype, self.tokens * geo.cfg.width).view(self.tokens, geo.cfg.width)


def saved_tensors(saved: Iterable[InUse]) -> dict[str, Tensor]:
    """Views of all saved tensors of a layer, by name."""
    tensors: dict[str, Tensor] = {}
    for use in saved:
        layout = use.activation.swap.geo.saved_layout(use.activation.u, use.activation.names, use.tokens)
        tensors |= views(layout, use.buffer.tensor)
    return tensors


# ---------------------------------------------------------------- all of them


Between = Literal["x", "dx"]  # what layers leave for each other


class ActivationSwap:
    """The activations of all layers, `x[u][b]`, `dx[u][b]` and `saved[u][b]` by layer u and micro-batch b.

    Copies back to the GPU are started in the order in which a pass reads them, each once its pool has a free buffer.
    """

    def __init__(self, placement: Placement):
        self.placement, self.queues = placement, placement.queues
        self.geo, self.plan = geo, plan = placement.geo, placement.plan
        self.hop_in, self.hop_out = HOPS if plan.gpus > 1 and plan.between == "ram" else ("h2d", "d2h")
        self.to_next, self.to_backward = Prefetch(), Prefetch()  # to the next layer; in backward what forward left
        self.staging = placement.pool("ram", "staging pool")
        self.pools = {tier: placement.gpu_pools("saved pool", tier) for tier in ("peer", "ram", "ssd")}
        self.dx_buffers = [Buffer(tensor) for tensor in placement.many("ram", "dx")]  # by micro-batch
        micro_batches, layers = range(plan.pass_size), range(1, geo.n_units)
        self.between: dict[Between, tuple[list[Pool], list[Pool]]] = {"x": self._pools("x"), "dx": self._pools("dx")}
        on_gpu = [iter(placement.many("gpu", "x", gpu=gpu)) for gpu in range(plan.gpus)]
        in_ram = iter(placement.many("ram", "x"))
        times = plan.n_micro // plan.pass_size  # that a buffer is used in a step
        x = [[self._x(u, b, on_gpu[self._gpu(u)], in_ram) for b in micro_batches] for u in layers]
        self.x = [[], *(of_pass * times for of_pass in x)]
        self.dx = [[], *([self._dx(u, b) for b in micro_batches] * times for u in layers)]
        self.saved = [[*self._saved(u)] * times for u in range(geo.n_units)]  # of each micro-batch one for each tier
        self.passed_pools = placement.gpu_pools("passed pool")
        self.passed = dict[int, Buffer]()  # by micro-batch, of the layer whose slices are in use

    def _pools(self, kind: Between) -> tuple[list[Pool], list[Pool]]:
        """Pools of each GPU for the outputs of layers, or their gradients: to write to, and to read from."""
        pool: Role = "x pool" if kind == "x" else "dx pool"
        if self.plan.between == "gpu" and self.plan.gpus == 1:
            pools = self.placement.gpu_pools(pool)
            return pools, pools
        gpus, slots = range(self.plan.gpus), self.plan.swap_slots
        make_pools = lambda part: [self.placement.pool("gpu", pool, gpu=gpu, part=part) for gpu in gpus]
        return make_pools(slice(slots)), make_pools(slice(slots, None))

    def _gpu(self, u: int) -> int:
        """The GPU that computes with layer u."""
        return self.plan.units[u].gpu

    def _x(self, u: int, b: int, on_gpu: Iterator[Tensor], in_ram: Iterator[Tensor]) -> Activation:
        """Layer u's input. With `between` "gpu" the head's is read at once."""
        tier: Tier | None = self.plan.units[u].x if self.geo.cfg.trains else None  # until backward
        writer, reader, stays = self._gpu(u - 1), self._gpu(u), self.plan.between == "gpu"
        label, pool = f"{self.geo.names[u]} x {b}", self.between["x"][1][reader]
        if tier == "gpu":
            buffer = Buffer(next(on_gpu))
            return Activation(self, u, label, buffer) if writer == reader else self._sent("x", u, b, reader, buffer)
        if tier is None or (stays and u == self.geo.head):
            return self._sent("x", u, b, reader, pool)
        home = self._home(label, tier, in_ram, self.geo.x_bytes(self.plan.tokens))
        backward_hops = Hop(numbered("d2h", reader), home), Hop(numbered("h2d", reader), pool)
        return self._sent("x", u, b, reader, pool, home, backward_hops if stays else backward_hops[1:])

    def _dx(self, u: int, b: int) -> Activation:
        reader = self._gpu(u - 1)
        return self._sent("dx", u, b, reader, self.between["dx"][1][reader])

    def _sent(
        self,
        kind: Between,
        u: int,
        b: int,
        reader: int,
        target: Buffer | Pool,
        home: Home | None = None,
        backward_hops: Sequence[Hop] = (),
    ) -> Activation:
        """What a GPU writes, and the GPU `reader` reads in the buffer `target`: where it stays, by a peer copy, or
        through `home`, or the micro-batch's place in RAM.
        """
        writer, label = self._gpu(u - 1 if kind == "x" else u), f"{self.geo.names[u]} {kind} {b}"
        write_pool, read_pool = (pools[writer] for pools in self.between[kind])
        if self.plan.between == "ram":
            home = home or Home(self.queues, "activations", label, self.dx_buffers[b])
            hops = Hop(numbered(self.hop_out, writer), home), Hop(numbered(self.hop_in, reader), target)
            return Activation(self, u, label, write_pool, hops, backward_hops)
        if writer != reader:
            return Activation(self, u, label, write_pool, [Hop(numbered("peer", writer), target)], backward_hops)
        return Activation(self, u, label, read_pool, (), backward_hops)

    def _saved(self, u: int) -> Iterator[list[Activation]]:
        unit, name, inner = self.plan.units[u], self.geo.names[u], 0 < u < self.geo.head
        gpu, tiers = unit.gpu, [tier for tier in SAVED if inner and unit.names(tier)]
        on_gpu = iter(self.placement.many("gpu", "saved", name, gpu))
        buffers = {"peer": iter(self.placement.many("gpu", "lent", name, unit.peer))}
        buffers["ram"] = iter(self.placement.many("ram", "saved", name))

        def make(tier: SavedTier, label: str) -> Activation:
            names = unit.names(tier)
            if tier == "gpu":
                return Activation(self, u, label, Buffer(next(on_gpu)), names=names)
            out_queue, in_queue = ("peer_out", "peer_in") if tier == "peer" else ("d2h", "h2d")
            nbytes, pool = self.geo.saved_layout(u, names, self.plan.tokens).span, self.pools[tier][gpu]
            home = self._home(label, tier, buffers.get(tier), nbytes)
            backward_hops = Hop(numbered(out_queue, gpu), home), Hop(numbered(in_queue, gpu), pool)
            return Activation(self, u, label, pool, backward_hops=backward_hops, names=names)

        for b in range(self.plan.pass_size):
            yield [make(tier, f"{name} {tier} {b}") for tier in tiers]

    def _home(self, label: str, tier: SavedTier, in_memory: Iterator[Tensor] | None, nbytes: int) -> Home:
        if tier == "ssd" or in_memory is None:
            return DriveHome(
                self.queues, "activations", label, self.staging, in_scratch(self.placement.scratch, nbytes)
            )
        return Home(self.queues, "activations", label, Buffer(next(in_memory)))

    # ------------------------------------------------ slices of experts

    def from_slice(self, u: int, b: int, begins: bool, ends: bool) -> list[Buffer]:
        """The sums that a slice of experts adds to and the next one reads, for micro-batch b (geo.passed_layout); empty
        if the layer is not sliced.
        """
        if begins and ends:
            return []
        if begins:
            self.passed[b] = self.passed_pools[self._gpu(u)].acquire(f"{self.geo.names[u]} passed {b}")
        return [self.passed[b]]

    def end_slices(self, b: int, last: Task) -> None:
        """Frees the sums of micro-batch b after the task of the last slice, if the layer is sliced."""
        if b in self.passed:
            self.passed.pop(b).free((last,))

    # ------------------------------------------------ a pass

    def expect_forward(self, n_micro: int) -> None:
        """Starts a forward pass: each layer's input that went to a home is brought back before the layer."""
        self._expect(self.to_next, [(x, x.hops[-1]) for unit in self.x for x in unit[:n_micro] if x.waits])

    def expect_backward(self, n_micro: int) -> None:
        """Starts a backward pass: what forward left at a home is brought back before its layer, and so are gradients of
        inputs.
        """
        reads = [activation for u in range(self.geo.head - 1, 0, -1) for activation in self._backward_reads(u, n_micro)]
        self._expect(self.to_backward, [(read, read.backward_hops[-1]) for read in reads if read.backward_hops])
        self._expect(self.to_next, [(dx, dx.hops[-1]) for unit in self.dx[:0:-1] for dx in unit[:n_micro] if dx.waits])

    def _backward_reads(self, u: int, n_micro: int) -> list[Activation]:
        """Layer u's activations in the order in which backward reads them; of slices, the last one reads what is
        saved.
        """
        x, saved = self.x[u][:n_micro], self.saved[u][:n_micro]
        if self.geo.slices_of[u]:
            return [*x, *(activation for micro_batch in saved for activation in micro_batch)]
        return [activation for b in range(n_micro) for activation in (x[b], *saved[b])]

    def _expect(self, prefetch: Prefetch, transfers: Sequence[tuple[Activation, Hop]]) -> None:
        """`transfers`: in the order in which layers read them, with the hop from the home."""
        for activation, hop in transfers:
            activation.fetch_hop = hop
        prefetch.expect([(gpu_of(hop.queue), activation) for activation, hop in transfers])

    def advance(self) -> None:
        """To be called when a buffer was freed or an activation stored: starts the transfers that can start now."""
        self.to_next.advance()
        self.to_backward.advance()
