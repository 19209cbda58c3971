"""The losses of micro-batches divided over GPUs, on the CPU pretended: the bits of one, wherever each is computed."""

import json
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from engines import (
    FP8,
    FROZEN,
    GPT,
    LIMITS,
    LLAMA,
    LORA,
    PACKED,
    LateQueues,
    batches,
    final_weights,
    gpu_plan,
    make,
    pairs,
    relayed,
    small_stretches,  # noqa: F401 (every test's)
    taught,
    train,
)

from trireme.engine.buffers import buffers, moving_sums, usage
from trireme.engine.build import Inputs, build, inputs_on
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.queues.names import kind_of, queues_of
from trireme.engine.queues.real import RealQueues
from trireme.engine.step import evaluate, train_step
from trireme.models.config import InputError, Teaching
from trireme.models.losses.preferences import Preference
from trireme.models.rows import rope_tables

pytestmark = pytest.mark.grid

MODELS = {
    "untied": LLAMA,
    "tied": replace(LLAMA, tied=True),
    "gpt": GPT,
    "lora": LORA,
    "packed": PACKED,
    "fp8": FP8,
    "frozen norm": FROZEN,
    "frozen output": replace(LLAMA, frozen=("lm_head*",)),
    "capped, smoothed": replace(LLAMA, logit_cap=5.0, smoothing=0.1, logit_scale=0.5),
}
HOST = UnitPlan("host", "host", x="host")


def data(cfg, n_micro, method):
    if method == "teacher":
        return taught(cfg, 3, n_micro, 24), None
    if method:
        return pairs(cfg, 3, n_micro, 24), Preference(method)
    return batches(cfg, 3, n_micro, 24), None


def outcome(e, n_micro, method=None):
    """(losses and norms of three steps, each one's metrics and an evaluation's losses after it, weights)"""
    steps, preference = data(e.cfg, n_micro, method)
    told = []
    losses = train(e, steps, between=lambda i, micro: told.append(evaluate(e, micro)), preference=preference)
    return losses, told, final_weights(e)


@cache
def on_one(cfg, dtype, slots, n_micro, method):
    """`slots`: micro-batches of the plan."""
    e = make(cfg, gpu_plan(cfg, dtype=dtype, n_micro=slots))
    found = outcome(e, n_micro, method)
    e.close()
    return found


def check(cfg, plan, queues, n_micro=3, method=None):
    losses, told, weights = on_one(cfg, plan.dtype, plan.n_micro, n_micro, method)
    e = make(cfg, plan, queues)
    seen, each, found = outcome(e, n_micro, method)
    assert seen == losses
    for ours, theirs in zip(each, told, strict=True):
        assert all(map(torch.equal, ours, theirs))
    for name, value in found.items():
        assert torch.equal(value, weights[name]), name
    assert e.memory.owned() == len(e.optimizer.on_cpu.records.ahead)
    queues.close()
    e.close()


def divided(cfg, losses, deal=(0, 1, 2), between="gpu", n_micro=3, unit=HOST, dtype="BF16"):
    plan = gpu_plan(cfg, units=(unit,) * cfg.n_units, dtype=dtype, n_micro=n_micro, record=700)
    return replace(relayed(plan, deal, cfg.tied, between), losses=losses)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("between", ["gpu", "host"])
def test_losses_on_several_gpus_leave_the_bits_of_one(model, between):
    plan = divided(MODELS[model], (0, 1, 2), between=between)
    check(MODELS[model], plan, RealQueues("cpu", extra=("poison",), gpus=3))


@pytest.mark.parametrize("method", ["dpo", "kto", "teacher"])
@pytest.mark.parametrize("between", ["gpu", "host"])
@pytest.mark.parametrize("model", ["tied", "lora"])
def test_where_documents_are_compared_or_a_teacher_is_heard(model, method, between):
    cfg = replace(MODELS[model], teaching=Teaching(5, 0.4, 1.5)) if method == "teacher" else MODELS[model]
    plan = divided(cfg, (1, 0), (0, 1), between)
    check(cfg, plan, RealQueues("cpu", extra=("poison",), gpus=2), method=method)


@pytest.mark.parametrize("losses", [(0,), (1,), (0, 1), (1, 0), (0, 0, 1), (1, 1, 0, 0)])
@pytest.mark.parametrize(("tier", "dtype", "tied"), [("gpu", "BF16", False), ("ssd", "F32", True)])
def test_in_any_turn(losses, tier, dtype, tied):
    """Also where the head's own GPU has none, a step has fewer micro-batches than the plan, or one."""
    cfg, unit = replace(LLAMA, tied=tied), UnitPlan(tier, tier, x=tier)
    for n_micro in (4, 1):
        plan = divided(cfg, losses, (0, 1), n_micro=n_micro, unit=unit, dtype=dtype)
        check(cfg, plan, RealQueues("cpu", extra=("poison",), gpus=2), n_micro=min(3, n_micro))


@pytest.mark.parametrize(
    ("late", "between"),
    [*((q, "gpu") for q in (*queues_of(2), "poison")), *((q, "host") for q in queues_of(2) if "hop" in q)],
)
def test_any_queue_may_be_late(late, between):
    cfg = replace(LLAMA, tied=late != "compute")
    check(cfg, divided(cfg, (1, 0), (0, 1), between), LateQueues({late}, 2))


def test_only_the_gradients_gemm_waits_for_the_sum():
    """It goes once from GPU to GPU for each micro-batch, and home; all other work of the loss does not wait for it."""
    plan = divided(LLAMA, (1, 0), (0, 1), n_micro=4)
    queues = SimulatedQueues(lambda task: 1.0, Rates(*[1.0] * 6, peer=1.0), 2)
    e = build(LLAMA, plan, LIMITS, queues)
    train_step(e, [Inputs(24, 20, 300)] * 4, 1, 1e-3)
    head = e.geo.names[e.geo.head]
    losses = [t for t in queues.tasks if t.kind == "loss"]
    assert [(t.queue, t.of) for t in losses] == [
        (queue, of) for queue in ("compute1", "compute") * 2 for of in (head, f"{head} gradient")
    ]
    moves = [t for t in queues.tasks if kind_of(t.queue) == "peer" and t.kind == "gradient"]
    assert [t.queue for t in moves] == ["peer1", "peer", "peer1"]  # the last GPU is the head's
    assert {t.nbytes for t in moves} == {e.geo.gradients[e.geo.head].span}
    ahead, adding = losses[::2], losses[1::2]
    assert not any(move in task.after for task in ahead for move in moves)
    assert [[move in task.after for move in moves] for task in adding] == [
        [move is before for move in moves] for before in (None, *moves)
    ]
    copied = [t for t in queues.tasks if t.kind == "weights" and kind_of(t.queue) == "peer"]
    assert [(t.queue, t.of, t.nbytes) for t in copied] == [("peer", head, e.geo.weights[e.geo.head].span)]
    once = [sum(t.flops for t in of) for of in (ahead, adding)]
    assert once[0] == 2 * once[1]
    queues.begin()
    evaluate(e, [Inputs(24, 20, 300)] * 4)
    assert [t.queue for t in queues.tasks if t.kind == "loss"] == ["compute1", "compute"] * 2
    assert not [t for t in queues.tasks if t.kind == "gradient"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("between", ["gpu", "host"])
def test_each_gpu_has_the_memory_of_its_losses(tied, between):
    cfg = replace(LLAMA, tied=tied)
    made, alone = divided(cfg, (1, 2), between=between), divided(cfg, (), between=between)
    geo = Geometry.of(cfg, made)
    for plan in (made, alone):
        memory = build(cfg, plan, LIMITS, SimulatedQueues(lambda task: 1.0, Rates(*[1.0] * 6), 3)).memory
        assert usage(geo, plan) == {tier: memory.used(tier) for tier in ("gpu", "host")}
    of = lambda what: {(b.gpu, b.of): b.nbytes for b in buffers(geo, made) if b.what == what}
    read = [geo.head, 0] if tied else [geo.head]
    home, guests = made.units[-1].gpu, {1, 2} - {made.units[-1].gpu}
    assert of("weights copy") == {(gpu, geo.names[v]): geo.weights[v].span for gpu in guests for v in read}
    assert {gpu for gpu, _ in of("dlogits")} == {1, 2}
    assert all(24 * cfg.vocab * 2 <= nbytes < 24 * cfg.vocab * 2 + 4096 for nbytes in of("dlogits").values())
    assert {gpu for gpu, _ in of("sum of embedding" if tied else "sum")} >= {1, 2, home}
    assert not buffers_of(cfg, replace(made, losses=())) & {"dlogits", "weights copy"}


def buffers_of(cfg, plan) -> set[str]:
    return {b.what for b in buffers(Geometry.of(cfg, plan), plan)}


def test_adapters_have_no_sum_that_moves():
    plan = divided(LORA, (1, 0), (0, 1))
    geo = Geometry.of(LORA, plan)
    assert moving_sums(geo, plan) == ()
    assert "base copy" in buffers_of(LORA, plan)
    assert "dlogits" not in buffers_of(LORA, plan)
    queues = SimulatedQueues(lambda task: 1.0, Rates(*[1.0] * 6), 2)
    train_step(build(LORA, plan, LIMITS, queues), [Inputs(24, 20, 300)] * 3, 1, 1e-3)
    losses = [task for task in queues.tasks if task.kind == "loss"]
    assert not any(before in task.after for task in losses for before in losses), "none waits for another"


@pytest.mark.parametrize("run", [evaluate, lambda e, batch: train_step(e, batch, 1, 1e-3)], ids=["evaluate", "train"])
def test_labels_are_counted_where_losses_are_computed(run):
    """And added in the order of micro-batches on the head's GPU."""
    cfg, found = replace(LLAMA, tied=True), []
    for plan in (gpu_plan(cfg, dtype="BF16", n_micro=3), divided(cfg, (1, 0), (0, 1))):
        e = make(cfg, plan, RealQueues("cpu", extra=("poison",), gpus=plan.gpus))
        correct, tables = torch.zeros(1, dtype=torch.float64), rope_tables(cfg, 64, "cpu")
        micro = [inputs_on(e.cfg, mb, [(tables, "cpu")] * plan.gpus) for mb in batches(cfg, 1, 3, 24)[0]]
        given = [replace(mb, packed=tuple(each._replace(correct=correct) for each in mb.packed)) for mb in micro]
        run(e, given)
        e.queues.drain()
        found.append(float(correct))
        e.queues.close()
        e.close()
    assert found[0] == found[1] > 0


def test_a_plans_losses_are_read_and_checked():
    plan = divided(LLAMA, (1, 0), (0, 1))
    data = json.loads(json.dumps(asdict(plan)))
    assert Plan.of(data) == plan
    del data["losses"]
    assert Plan.of(data) == replace(plan, losses=()), "plans of older versions have none"
    for wrong in ([2], [-1], ["0"], [True], [0.0]):
        with pytest.raises(InputError, match="losses lists GPUs"):
            Plan.of(data | {"losses": wrong})
    with pytest.raises(InputError, match="not a plan"):
        Plan.of(data | {"losses": 1})
    with pytest.raises(InputError, match="units are on several"):
        gpu_plan(LLAMA, losses=(0,))
    with pytest.raises(InputError, match="several hosts"):
        replace(plan, hosts=2)
