"""Engines of models that are not trained: the bits of an evaluation in training, in little memory."""

from dataclasses import replace

import pytest
import torch
from engines import LLAMA, MODELS, PACKED, batches, gpu_plan, make, of, relayed
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.buffers import buffers, fits, usage
from trireme.engine.build import build, make_inputs
from trireme.engine.geometry import Geometry
from trireme.engine.plan import TIERS, DoesNotFit, Limits, UnitPlan
from trireme.engine.planner.forward_only import forward_plan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.queues.real import RealQueues
from trireme.engine.run.evaluate import continued
from trireme.engine.step import evaluate
from trireme.models.rows import rope_tables

pytestmark = pytest.mark.grid

NAMES = ("untied", "tied", "gpt", "mixture", "hybrid", "packed", "lora", "gpt lora", "frozen", "latent")
SAMPLED = ("untied", "packed", "hybrid")
MIB = 1 << 20


def untrained(cfg):
    """As a finished model is opened: all is frozen but adapters."""
    return replace(cfg, frozen=("*",), trains=False)


def passes(e, name):
    """(losses of two evaluations, text)"""
    step = batches(e.cfg, 1, 3, 24)[0]
    micro = [make_inputs(e.cfg, mb, [(rope_tables(e.cfg, 64, "cpu"), "cpu")] * e.plan.gpus) for mb in step]
    losses = [loss for _ in range(2) for loss in evaluate(e, micro)]
    text = continued(e, [[1, 2, 3], [4]], 2, frozenset()) if name in SAMPLED else None
    e.queues.drain()
    assert not e.weights.loaded
    assert not e.memory.owned()
    e.queues.close()
    e.close()
    return losses, text


@pytest.mark.parametrize(("name", "base"), [(name, TIERS[i % 3]) for i, name in enumerate(NAMES)])
def test_losses_and_texts_are_those_in_training(name, base):
    cfg = MODELS[name]
    trains = make(cfg, gpu_plan(cfg, dtype="BF16", n_micro=3))
    at = ("gpu", "ram")[name in ("lora", "latent")]
    for between, gpus in (("gpu", (0,)), ("ram", (0,)), ("gpu", (0, 1)), ("ram", (1, 0))):
        units = (UnitPlan(at, at, base=base),) * cfg.n_units
        plan = relayed(gpu_plan(cfg, units=units, dtype="BF16", n_micro=3, window=1), gpus, cfg.tied, between)
        e = make(untrained(cfg), replace(plan, between=between), RealQueues("cpu", extra=("poison",), gpus=plan.gpus))
        assert not [b for b in buffers(e.geo, plan) if b.role in ("sum", "rounded", "gradient", "state", "dx pool")]
        losses, text = passes(e, name)
        if between == "gpu" and gpus == (0,):
            expected = passes(trains, name)
        assert all(map(torch.equal, losses, expected[0]))
        assert text == expected[1]


@pytest.mark.parametrize("cfg", [LLAMA, PACKED])
def test_no_byte_is_written(cfg):
    """What does not fit is read from the drive."""
    unit, queues = UnitPlan(base="ssd"), RealQueues(threads=False)
    e = make(untrained(cfg), gpu_plan(cfg, units=(unit,) * cfg.n_units, dtype="BF16", n_micro=3), queues)
    before = queues.moved.copy()
    passes(e, "")
    moved = queues.moved - before
    assert {queue for queue, nbytes in moved.items() if nbytes} - {"compute"} == {"ssd_read", "h2d"}


@pytest.mark.full
@settings(max_examples=16, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from(NAMES), st.integers(1, 2))
def test_a_plan_fits_or_is_refused(gpu, ram, name, gpus):
    cfg, limits = untrained(MODELS[name]), Limits(gpu << 10, ram << 10, gpus)
    try:
        plan = forward_plan(cfg, limits, [(64, 8), (64, 1)], gpus=gpus)
    except DoesNotFit as refusal:
        assert limits.missing(refusal.need)  # noqa: PT017 (one of two right ends)
        return
    geo = Geometry.of(cfg, plan)
    assert fits(geo, plan, limits)
    memory = build(cfg, plan, limits, SimulatedQueues(lambda task: 1.0, Rates(*[1.0] * 6), gpus)).memory
    assert usage(geo, plan) == {tier: memory.used_bytes(tier) for tier in ("gpu", "ram")}


def test_weights_go_as_near_to_the_gpu_as_they_fit():
    large = untrained(of("llama", hidden_size=256, num_hidden_layers=8, intermediate_size=688, vocab_size=1000))
    at = lambda gpu, ram: forward_plan(large, Limits(gpu, ram), [(64, 8), (64, 1)])
    whole = at(64 * MIB, 64 * MIB)
    assert {unit.base for unit in whole.units} == {"gpu"}
    assert whole.n_micro == 1
    need = usage(Geometry.of(large, whole), whole)["gpu"]
    for ram, tiers in ((64 * MIB, {"gpu", "ram"}), (5 * MIB, set(TIERS))):
        plan = at(need - 5 * MIB, ram)
        assert {unit.base for unit in plan.units} == tiers
        assert plan.n_micro == 8
