"""Strands: sums of the head's gradient side by side, so that several GPUs share its work.

Of a large vocabulary the head takes as long as several blocks, and all others would wait for its GPU. With K strands
micro-batch b is added to sum b mod K; then each sum is added to the next, through RAM to another GPU, and the last is
the whole. K is of the plan: on any number of GPUs additions have the same order, and so the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trireme.engine.geometry import Geometry
from trireme.engine.homes import Homes
from trireme.engine.lanes.names import numbered
from trireme.engine.lanes.task import Lanes, Task
from trireme.engine.memory import Slot, flat
from trireme.engine.plan import Plan


class Strands:
    """Adds sums of a unit to each other, piece by piece: while one is added the next is on its way."""

    def __init__(self, geo: Geometry, plan: Plan, homes: Homes, lanes: Lanes):
        self.geo, self.plan, self.lanes = geo, plan, lanes
        self.between = homes.ring("host", "gradient strands")
        self.landings = homes.gpu_rings("gradient strands")

    def join(self, u: int, sums: Sequence[Slot], done: Sequence[Sequence[Task]]) -> tuple[Slot, Task]:
        """Adds each of `sums`, whole after its `done`, to the next; returns the last and its last addition."""
        first, *others = range(len(sums))
        last = done[first][-1]
        left = dict.fromkeys(others, last)  # last reads of each sum by the next
        for start, n in self.geo.sum_pieces(u) if others else ():
            after = done[first]
            for s in others:
                left[s], last = self._add(u, s, sums[s - 1 : s + 1], start, n, after, done[s])
                after = (last,)
        for s in others:
            sums[s - 1].ring.release(sums[s - 1], (left[s],))
        return sums[-1], last

    def _add(
        self, u: int, s: int, sums: Sequence[Slot], start: int, n: int, above: Sequence[Task], own: Sequence[Task]
    ) -> tuple[Task, Task]:
        """Adds n elements of sum s - 1, there after `above`, to those of sum s.

        Returns the last read of sum s - 1, and the addition.
        """
        away, gpu, name, nbytes = self.plan.gpu(u, s - 1), self.plan.gpu(u, s), self.geo.names[u], 4 * n
        source, target = (slot.buffer[4 * start : 4 * start + nbytes] for slot in sums)

        def add(more: Tensor, *after: Task) -> Task:
            def add() -> None:
                flat(target, "F32", n).add_(flat(more, "F32", n))

            lane = numbered("compute", gpu)
            return self.lanes.run(lane, "other", f"strands of {name}", add, (*after, *own), nbytes=3 * nbytes)

        if away == gpu:
            added = add(source, *above)
            return added, added
        piece, landing = self.between.acquire(name), self.landings[gpu].acquire(name)

        def down() -> None:
            piece.buffer[:nbytes].copy_(source, non_blocking=True)

        def up() -> None:
            landing.buffer[:nbytes].copy_(piece.buffer[:nbytes], non_blocking=True)

        left = self.lanes.run(numbered("d2h", away), "gradient", name, down, (*above, *piece.ready), nbytes=nbytes)
        here = self.lanes.run(numbered("h2d", gpu), "gradient", name, up, (left, *landing.ready), nbytes=nbytes)
        piece.ring.release(piece, (here,))
        added = add(landing.buffer, here)
        landing.ring.release(landing, (added,))
        return left, added
