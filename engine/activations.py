"""Activations between forward and backward: kept on the GPU, or swapped to RAM or SSD and fetched back in time.

Each block and micro-batch has up to three spans of saved tensors, one per tier, its input `x`, which is a span too, and
in backward the gradient `dx` of that. Names that the plan gives to no tier are not saved; backward recomputes them.
A swapped span passes through a ring of GPU slots, and on the way to the SSD through a ring of host slots (Fuyou,
section 4.4: full pipelining, first in first out, bounded by the slots that the plan found room for).

What a unit leaves for the next, `x` or `dx` of every micro-batch, stays on the GPU until that has used it. In a step of
very many micro-batches it waits outside instead: `x` where it waits for backward too, `dx` in RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trireme.engine.geometry import Geometry
from trireme.engine.homes import Homes
from trireme.engine.lanes import Task
from trireme.engine.memory import OnGpu, memory_of, views
from trireme.engine.plan import TIERS, Plan

Key = tuple[int, int, str]  # unit, micro-batch, part: "x", "dx", or the tier of a span of saved tensors


class ActivationSwap:
    """Hands out spans to be filled in forward and brings them back, in reverse, in backward."""

    def __init__(self, geo: Geometry, plan: Plan, homes: Homes, lanes, scratch=None):
        self.geo, self.plan, self.lanes, self.scratch = geo, plan, lanes, scratch
        self.names = {(u, tier): unit.names(tier) for u, unit in enumerate(plan.units) for tier in TIERS}
        self.rings = {part: homes.ring("gpu", f"{part} ring") for part in ("x", "dx")}
        self.rings |= {tier: homes.ring("gpu", f"swap ring {tier}") for tier in ("host", "ssd")}
        self.host_ring = homes.ring("host", "swap ring ssd")
        self.fixed: dict[Key, Tensor | None] = {}  # spans on the GPU that have a buffer of their own
        self.host: dict[Key, Tensor | None] = {}
        self.offset: dict[Key, int] = {}  # place in the scratch file of spans that go to the SSD
        self._place(homes)
        self.here: dict[Key, OnGpu] = {}
        self.away: dict[Key, Task] = {}  # the task after which a swapped span is whole outside the GPU

    def _place(self, homes: Homes) -> None:
        on_gpu, in_ram, end = iter(homes.many("gpu", "x")), iter(homes.many("host", "x")), 0
        for u in range(1, self.geo.n_units):
            name = self.geo.names[u]
            gpu, host = iter(homes.many("gpu", f"saved {name}")), iter(homes.many("host", f"saved {name}"))
            for b in range(self.plan.n_micro):
                for part in ("x", *TIERS):
                    tier = self.tier(u, part)
                    if part != "x" and not self.names[u, tier]:
                        continue
                    if tier == "gpu":
                        self.fixed[u, b, part] = next(on_gpu if part == "x" else gpu)
                    elif tier == "host":
                        self.host[u, b, part] = next(in_ram if part == "x" else host)
                    else:
                        self.offset[u, b, part] = end
                        end += self._nbytes(u, part, self.plan.tokens)
        self.scratch_bytes = end
        for b, buffer in enumerate(homes.many("host", "dx")):
            self.host[0, b, "dx"] = buffer

    def tier(self, u: int, part: str) -> str:
        return {"x": self.plan.units[u].x, "dx": self.plan.between}.get(part, part)

    def parts(self, u: int) -> list[str]:
        """The spans of saved tensors that unit u has."""
        return [tier for tier in TIERS if self.names[u, tier]] if 0 < u < self.geo.head else []

    def _nbytes(self, u: int, part: str, tokens: int) -> int:
        if part in ("x", "dx"):
            return self.geo.x_bytes(tokens)
        return self.geo.saved_layout(self.names[u, part], tokens).span

    # ------------------------------------------------ forward

    def open(self, u: int, b: int, part: str) -> OnGpu:
        """A span on the GPU to be filled; whoever writes it is ordered after `ready`."""
        key = (u, b, part)
        if key in self.fixed:
            here = OnGpu(self.fixed[key], ())
        else:
            slot = self.rings[part].acquire(f"{self.geo.names[u]} {part} {b}")
            here = OnGpu(slot.buffer, slot.ready, slot)
        self.here[key] = here
        return here

    def saved(self, u: int, tokens: int, here: dict[str, OnGpu]) -> dict[str, Tensor]:
        """The saved tensors of a block by name, as views of the spans in `here`."""
        found: dict[str, Tensor] = {}
        for part, span in here.items():
            found |= views(self.geo.saved_layout(self.names[u, part], tokens), span.buffer)
        return found

    def send(self, u: int, b: int, part: str, tokens: int, after: Task) -> None:
        """The span is filled once `after` is over: starts it on its way out where it is swapped."""
        key, nbytes = (u, b, part), self._nbytes(u, part, tokens)
        here, name, home = self.here[key], f"{self.geo.names[u]} {part} {b}", _home(key)
        here.ready = (after,)
        tier, passing = self.tier(u, part), part in ("x", "dx") and self.plan.between == "host"
        if tier == "gpu" or (part == "x" and u == self.geo.head and not passing):
            return
        slot = self.host_ring.acquire(name) if tier == "ssd" else None
        target, before = (slot.buffer, slot.ready) if slot else (self.host[home], self._gone(home))

        def out():
            target[:nbytes].copy_(here.buffer[:nbytes], non_blocking=True)

        task = self.lanes.run("d2h", f"swap {name}", out, (after, *before), nbytes=nbytes)
        here.ready = (after, task)
        if slot is not None:
            task = self._scratch("write", key, target, nbytes, (task, *self._gone(home)))
            slot.ring.release(slot, (task,))
        self.away[home] = task
        if passing:
            self.release(u, b, part, after)

    def _gone(self, key: Key) -> tuple[Task, ...]:
        return (self.away[key],) if key in self.away else ()

    # ------------------------------------------------ backward

    def prefetch(self, u: int, b: int, part: str, tokens: int) -> None:
        """Starts a swapped span on its way back; nothing where it is on the GPU."""
        key = (u, b, part)
        if key in self.here:
            return
        nbytes, name, home = self._nbytes(u, part, tokens), f"{self.geo.names[u]} {part} {b}", _home(key)
        gpu = self.rings[part].acquire(name)
        slot, source, come = None, self.host.get(home), (self.away[home],)
        if source is None and key in self.offset:
            slot = self.host_ring.acquire(name)
            source = slot.buffer
            come = (self._scratch("read", key, source, nbytes, (*slot.ready, *come)),)

        def back():
            gpu.buffer[:nbytes].copy_(source[:nbytes], non_blocking=True)

        task = self.lanes.run("h2d", f"fetch {name}", back, (*gpu.ready, *come), nbytes=nbytes)
        if slot is not None:
            slot.ring.release(slot, (task,))
        self.away[home] = task  # the next writer of the host copy comes after this reader
        self.here[key] = OnGpu(gpu.buffer, (task,), gpu)

    def get(self, u: int, b: int, part: str) -> OnGpu:
        """A span that was opened or prefetched."""
        return self.here[u, b, part]

    def release(self, u: int, b: int, part: str, after: Task) -> None:
        """The span's place on the GPU is free once `after`, and what still copies it out, is over."""
        here = self.here.pop((u, b, part))
        if here.slot is not None:
            here.slot.ring.release(here.slot, (*here.ready, after))

    def _scratch(self, way: str, key: Key, buffer: Tensor, nbytes: int, after: Sequence[Task]) -> Task:
        def move():
            getattr(self.scratch, way)(self.offset[key], memory_of(buffer, nbytes)).result()

        return self.lanes.run(
            f"ssd_{way}", f"swap {self.geo.names[key[0]]} {key[2]} {key[1]}", move, after, nbytes=nbytes
        )


def _home(key: Key) -> Key:
    """Where a span waits outside the GPU: `dx` of a unit takes the place of the next one's, which has been used."""
    return (0, key[1], "dx") if key[2] == "dx" else key
