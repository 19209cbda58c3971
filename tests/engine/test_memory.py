"""Pools of buffers and transfers ahead of use: what a free buffer holds, and in which order things come."""

from types import SimpleNamespace

import pytest
import torch
from engines import LIMITS, LLAMA, LORA, gpu_plan

from trireme.engine.build import Inputs, build
from trireme.engine.memory import Pool, Prefetch
from trireme.engine.plan import UnitPlan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.queues.names import kind_of
from trireme.engine.step import train_step


class Noted(Pool):
    """Notes the buffers that hold nothing any more."""

    def __init__(self, count: int):
        self.emptied = []
        super().__init__("weights", [torch.empty(0)] * count)

    def empty(self, buffer):
        super().empty(buffer)
        self.emptied.append(buffer)


def test_a_free_buffer_keeps_its_content_until_it_is_acquired_for_another():
    p = Noted(2)
    for content in ("first", "second"):
        buffer = p.acquire("owner", content)
        buffer.content = content
        buffer.free(())
    held = [p.acquire("owner", content) for content in ("second", "first")]
    assert [buffer.content for buffer in held] == ["second", "first"]
    with pytest.raises(RuntimeError, match="third"):
        p.acquire("third")
    for buffer in held:
        buffer.free(())
    assert not p.emptied[2:], "the first two had no content when they were acquired"
    evicted = p.acquire("owner", "third")
    assert evicted is p.emptied[-1] is held[0], "that which was freed first"
    assert evicted.content is None


def test_what_is_forgotten_is_not_found_again():
    p = Noted(1)
    buffer = p.acquire("owner", "weights")
    buffer.content = "weights"
    buffer.free(())
    p.forget("others")
    assert buffer.content == "weights"
    p.forget("weights")
    assert p.emptied[-1] is buffer
    assert p.acquire("owner", "weights").content is None


def test_transfers_start_in_order_and_none_overtakes_one_that_waits():
    (items, fetched), coming = _to_fetch("abc"), Prefetch()
    coming.expect((0, item) for item in items)
    assert fetched == ["a"]
    with pytest.raises(AssertionError):
        coming.expect((0, item) for item in items)
    items[1].can_fetch = True
    coming.advance()
    assert fetched == ["a", "b", "c"]


def test_transfers_to_a_gpu_do_not_wait_for_those_to_another():
    (items, fetched), coming = _to_fetch("abcdef"), Prefetch()
    coming.expect(zip((0, 1, 0, 1, 0, 1), items, strict=True))
    assert fetched == ["a", "c", "e"]
    items[1].can_fetch = True
    coming.advance()
    assert fetched == ["a", "c", "e", "b", "d", "f"]
    coming.cancel()
    coming.expect(zip((0, 1, 0, 1, 0, 1), items, strict=True))
    assert fetched[6:] == ["a", "b", "c", "d", "e", "f"]


def _to_fetch(names):
    """Of which `b` may not come yet, and the names of those that were fetched."""
    items, fetched = [SimpleNamespace(name=name, can_fetch=name != "b") for name in names], []
    for item in items:
        item.fetch = lambda item=item: fetched.append(item.name)
    return items, fetched


@pytest.mark.parametrize("window", [1, 2, 3])
def test_what_is_frozen_stays_in_the_window_from_pass_to_pass(window):
    """Blocks cross the bus 2 n - 2 window times a step."""
    queues = SimulatedQueues(lambda task: 1.0, Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    n, frozen = LORA.n_layers, UnitPlan("gpu", "gpu", base="ram")
    e = build(LORA, gpu_plan(LORA, units=(frozen,) * LORA.n_units, window=window), LIMITS, queues)
    for step in (1, 2):
        queues.begin()
        train_step(e, [Inputs(24, 20, 100)] * 2, step, 1e-3)
    of_blocks = [t for t in queues.tasks if kind_of(t.queue) == "h2d" and t.label.startswith("block")]
    assert len(of_blocks) == 2 * n - 2 * window


def engine(units, **more):
    queues = SimulatedQueues(lambda task: 1.0, Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0))
    queues.begin()
    return build(LLAMA, gpu_plan(LLAMA, units=units, **more), LIMITS, queues)


def test_weights_are_free_after_the_last_use_that_a_pass_expects():
    e = engine((UnitPlan("ram", "ram"),) * LLAMA.n_units, window=2)
    e.weights.expect([0, 1, 2, 0])
    for u, left in ((0, {0, 1, 2}), (1, {0, 2}), (2, {0}), (0, set())):
        for part in e.weights.parts(u):
            assert part.u == u
        assert {layer.u for layer in e.weights.loaded} == left
    assert not e.memory.owned()


@pytest.mark.parametrize(
    ("tier", "again", "after"),
    [("gpu", False, (True, False)), ("gpu", True, (True, True)), ("ram", False, (True, False)),
     ("ram", True, (True, False))],
)  # fmt: skip
def test_an_activation_is_free_after_its_last_reader(tier, again, after):
    """On the GPU after a pass's first reader and after its last; in RAM it waits for another pass."""
    e = engine((UnitPlan("ram", "ram", x=tier),) * LLAMA.n_units)
    x, here = e.activations.x[2][0], []
    task = e.queues.run("compute", "other", "", lambda: None)
    x.fill(24, again).attach(task)
    for last in (False, True):
        x.read(last).attach(task)
        here.append(x.buffer is not None)
    assert tuple(here) == after
    assert x.stored == (tier == "ram" and again)
    if again:
        x.fetch_hop = x.backward_hops[-1] if x.backward_hops else None
        x.fetch()
        x.read().attach(task)
    assert x.buffer is None
    assert not x.stored
    assert not e.memory.owned()
