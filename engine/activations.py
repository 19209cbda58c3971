"""Activations from forward to backward: kept on the GPU, swapped to RAM or the SSD, or recomputed.

Saved tensors of one tier are one span. A unit's output (`x` of the next in forward, `dx` in backward) stays on the GPU
until used; with `plan.between` "host" `x` goes to its tier, `dx` to RAM. To a home on another GPU `x` hops through RAM,
by the place of the micro-batch's `dx`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from trireme.engine.geometry import Geometry
from trireme.engine.homes import Homes, Scratch
from trireme.engine.lanes.names import HOPS, numbered
from trireme.engine.lanes.task import Lanes, Task
from trireme.engine.memory import OnGpu, Ring, memory_of, views
from trireme.engine.plan import TIERS, Plan, Tier


class Activation(NamedTuple):
    """Unit u's input, its gradient, or saved tensors, of micro-batch b; `tier`: between uses."""

    u: int
    b: int
    what: Literal["x", "dx", "saved"]
    tier: Tier


class ActivationSwap:
    """Spans to fill in forward and bring back in backward."""

    def __init__(
        self, geo: Geometry, plan: Plan, homes: Homes, lanes: Lanes, scratch: Scratch | None = None, first: int = 0
    ):
        self.geo, self.plan, self.lanes, self.scratch = geo, plan, lanes, scratch
        self.names = {(u, tier): unit.names(tier) for u, unit in enumerate(plan.units) for tier in TIERS}
        self.rings = {what: homes.gpu_rings(f"{what} ring") for what in ("x", "dx")}
        self.swap_rings = {tier: homes.gpu_rings(f"swap ring {tier}") for tier in ("host", "ssd")}
        self.hop_in, self.hop_out = HOPS if plan.gpus > 1 else ("h2d", "d2h")
        self.host_ring = homes.ring("host", "swap ring ssd")
        self.fixed: dict[Activation, Tensor] = {}  # on the GPU, outside rings
        self.host: dict[Activation, Tensor] = {}
        self.offset: dict[Activation, int] = {}  # in the scratch space
        self.first, self.scratch_bytes = first, 0
        self._place(homes)
        self.here: dict[Activation, OnGpu] = {}
        self.away: dict[Activation, Task] = {}  # last tasks outside the GPU
        self.read: dict[Activation, Task] = {}  # last readers of fixed places that hops fill

    def _place(self, homes: Homes) -> None:
        """Places spans outside rings."""
        on_gpu = [iter(homes.many("gpu", "x", gpu)) for gpu in range(self.plan.gpus)]
        in_ram = iter(homes.many("host", "x"))
        for u in range(1, self.geo.n_units):
            name = self.geo.names[u]
            saved_on = self.plan.units[u].gpu
            gpu, host = iter(homes.many("gpu", f"saved {name}", saved_on)), iter(homes.many("host", f"saved {name}"))
            for b in range(self.plan.n_micro):
                for activation in (Activation(u, b, "x", self.plan.units[u].x), *self.saved(u, b)):
                    if activation.tier == "gpu":
                        self.fixed[activation] = next(on_gpu[saved_on] if activation.what == "x" else gpu)
                    elif activation.tier == "host":
                        self.host[activation] = next(in_ram if activation.what == "x" else host)
                    else:
                        self.offset[activation] = self.first + self.scratch_bytes
                        self.scratch_bytes += self._nbytes(activation, self.plan.tokens)
        for b, buffer in enumerate(homes.many("host", "dx")):
            self.host[Activation(0, b, "dx", "host")] = buffer

    # ------------------------------------------------ the spans of a unit

    def x(self, u: int, b: int) -> Activation:
        """Unit u's input. The head's, needed at once, stays on the GPU unless `between` is "host"."""
        at_once = u == self.geo.head and self.plan.between == "gpu"
        return Activation(u, b, "x", "gpu" if at_once else self.plan.units[u].x)

    def dx(self, u: int, b: int) -> Activation:
        return Activation(u, b, "dx", self.plan.between)

    def saved(self, u: int, b: int) -> list[Activation]:
        """Unit u's saved tensors, a span for each tier."""
        if not 0 < u < self.geo.head:
            return []
        return [Activation(u, b, "saved", tier) for tier in TIERS if self.names[u, tier]]

    def tensors(self, spans: Mapping[Activation, OnGpu], tokens: int) -> dict[str, Tensor]:
        """The saved tensors in these spans by name."""
        found: dict[str, Tensor] = {}
        for activation, span in spans.items():
            found |= views(
                self.geo.saved_layout(activation.u, self.names[activation.u, activation.tier], tokens), span.buffer
            )
        return found

    def _nbytes(self, activation: Activation, tokens: int) -> int:
        if activation.what == "saved":
            return self.geo.saved_layout(activation.u, self.names[activation.u, activation.tier], tokens).span
        return self.geo.x_bytes(tokens)

    def _label(self, activation: Activation) -> str:
        what = activation.tier if activation.what == "saved" else activation.what
        return f"{self.geo.names[activation.u]} {what} {activation.b}"

    def _ring(self, activation: Activation, gpu: int) -> Ring:
        rings = self.swap_rings[activation.tier] if activation.what == "saved" else self.rings[activation.what]
        return rings[gpu]

    def _writer(self, activation: Activation) -> int:
        """The GPU that fills it; of `x` that of the unit before."""
        return self.plan.units[activation.u - (activation.what == "x")].gpu

    def _reader(self, activation: Activation) -> int:
        """The GPU that uses it; of `dx` that of the unit before."""
        return self.plan.units[activation.u - (activation.what == "dx")].gpu

    def _hops(self, activation: Activation) -> bool:
        """Whether it is at home on another GPU than its writer's."""
        return self._writer(activation) != self._reader(activation) and activation.tier == "gpu"

    def _waiting_place(self, activation: Activation) -> Activation:
        """The key of its place outside the GPU: all units' `dx`, and `x` that hop, share one per micro-batch."""
        if activation.what == "dx" or self._hops(activation):
            return Activation(0, activation.b, "dx", "host")
        return activation

    # ------------------------------------------------ on the GPU and out

    def open(self, activation: Activation) -> OnGpu:
        """A span on the writer's GPU to fill; its writers come after `ready`."""
        if activation in self.fixed and not self._hops(activation):
            here = OnGpu(self.fixed[activation], ())
        else:
            slot = self._ring(activation, self._writer(activation)).acquire(self._label(activation))
            here = OnGpu(slot.buffer, slot.ready, slot)
        self.here[activation] = here
        return here

    def send(self, activation: Activation, tokens: int, after: Task, backward: bool = True) -> None:
        """Sends a span that `after` fills to its tier; frees its place on the GPU unless the next unit reads there.

        Without a `backward` to come only a next unit that reads it from its tier needs it there.
        """
        here = self.here[activation]
        here.ready = (after,)
        if (activation.tier != "gpu" and (backward or self.plan.between == "host")) or self._hops(activation):
            self._send_out(activation, here, self._nbytes(activation, tokens))
            if activation.what != "x" or self.plan.between == "host":
                self.release(activation, after)

    def _send_out(self, activation: Activation, here: OnGpu, nbytes: int) -> None:
        waits, label = self._waiting_place(activation), self._label(activation)
        slot = self.host_ring.acquire(label) if activation.tier == "ssd" else None
        target, before = (slot.buffer, slot.ready) if slot else (self.host[waits], self._last(waits))

        def out() -> None:
            target[:nbytes].copy_(here.buffer[:nbytes], non_blocking=True)

        lane = numbered("d2h" if activation.what == "saved" else self.hop_out, self._writer(activation))
        task = self.lanes.run(lane, "activations", label, out, (*here.ready, *before), nbytes=nbytes)
        here.ready = (*here.ready, task)
        if slot is not None:
            task = self._write(activation, target, nbytes, (task, *self._last(waits)))
            slot.ring.release(slot, (task,))
        self.away[waits] = task

    def _last(self, waits: Activation) -> tuple[Task, ...]:
        return (self.away[waits],) if waits in self.away else ()

    # ------------------------------------------------ back

    def prefetch(self, activations: Iterable[Activation], tokens: int, lane: str = "h2d") -> None:
        """Starts spans on their way back, unless on the GPU."""
        for activation in activations:
            if activation not in self.here:
                self._fetch(activation, self._nbytes(activation, tokens), numbered(lane, self._reader(activation)))

    def _fetch(self, activation: Activation, nbytes: int, lane: str) -> None:
        waits, label = self._waiting_place(activation), self._label(activation)
        gpu = self._landing(activation)
        slot, come = None, (self.away[waits],)
        if activation.tier == "ssd":
            slot = self.host_ring.acquire(label)
            source, come = slot.buffer, (self._read(activation, slot.buffer, nbytes, (*slot.ready, *come)),)
        else:
            source = self.host[waits]

        def back() -> None:
            gpu.buffer[:nbytes].copy_(source[:nbytes], non_blocking=True)

        task = self.lanes.run(lane, "activations", label, back, (*gpu.ready, *come), nbytes=nbytes)
        if slot is not None:
            slot.ring.release(slot, (task,))
        self.away[waits] = task  # orders the copy's next writer after this read
        self.here[activation] = OnGpu(gpu.buffer, (task,), gpu.slot)

    def _landing(self, activation: Activation) -> OnGpu:
        """Its place on the reader's GPU, to fill after `ready`."""
        if activation in self.fixed:
            last = self.read.get(activation)
            return OnGpu(self.fixed[activation], (last,) if last else ())
        slot = self._ring(activation, self._reader(activation)).acquire(self._label(activation))
        return OnGpu(slot.buffer, slot.ready, slot)

    def get(self, activation: Activation) -> OnGpu:
        return self.here[activation]

    def release(self, activation: Activation, after: Task) -> None:
        """Frees the span's place on the GPU after `after` and copies out."""
        here = self.here.pop(activation)
        if here.slot is not None:
            here.slot.ring.release(here.slot, (*here.ready, after))
        elif self._hops(activation):
            self.read[activation] = after

    # ------------------------------------------------ the SSD

    @property
    def _ssd(self) -> Scratch:
        assert self.scratch is not None, "the plan swaps to the SSD, and no scratch space was claimed"
        return self.scratch

    def _write(self, activation: Activation, buffer: Tensor, nbytes: int, after: Sequence[Task]) -> Task:
        def write() -> None:
            self._ssd.write(self.offset[activation], memory_of(buffer, nbytes)).result()

        return self.lanes.run("ssd_write", "activations", self._label(activation), write, after, nbytes=nbytes)

    def _read(self, activation: Activation, buffer: Tensor, nbytes: int, after: Sequence[Task]) -> Task:
        def read() -> None:
            self._ssd.read(self.offset[activation], memory_of(buffer, nbytes)).result()

        return self.lanes.run("ssd_read", "activations", self._label(activation), read, after, nbytes=nbytes)
