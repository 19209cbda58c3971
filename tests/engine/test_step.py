"""Placement never changes the numbers: any plan, any queues, any delays, the same bits as the run in one memory."""

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from engines import (
    BESIDE,
    IN_FP8,
    LIMITS,
    LLAMA,
    LORA,
    MODELS,
    JitterQueues,
    LateQueues,
    MemoryScratch,
    MemoryStore,
    batches,
    check_weights,
    deep,
    final_weights,
    gpu_plan,
    make,
    pairs,
    random_plan,
    scored,
    taught,
    train,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stores import OneDrive

from trireme.engine import geometry
from trireme.engine.between import Reader
from trireme.engine.buffers import usage
from trireme.engine.build import Inputs, build, collate, make_inputs, to_devices
from trireme.engine.placement import Entry
from trireme.engine.plan import TIERS, UnitPlan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.queues.names import READS, WRITES, queues_of
from trireme.engine.queues.real import RealQueues
from trireme.engine.run.evaluate import continued
from trireme.engine.step import evaluate, train_step
from trireme.engine.updates import AdamW
from trireme.models.config import InputError, Teaching
from trireme.models.losses.preferences import Preference, compare, joined
from trireme.models.rows import rope_tables
from trireme.models.sizes import narrow, shapes

pytestmark = [pytest.mark.grid, pytest.mark.usefixtures("few_rows_in_fp8")]

NAMES = tuple(shapes.saved_shapes(LLAMA, 1))
ROPE_TABLES = [(rope_tables(LLAMA, 64, "cpu"), "cpu")]  # by device


ELSEWHERE = ("mamba", "olmo hybrid", "nemotron", "falcon h1")  # in test_families.py: half blocks, or layers without any
LLAMAS = ("untied", "tied")
TEACHING = Teaching(5, 0.4, 1.5)
LABELS = {"reward": 1, "classify": 3}
LAGS = (BESIDE, {"compute"}, {"cpu"}, {"h2d"}, {"d2h"})  # queues that are late: all but the caller's, or one alone


# What a run may do before, between and after its steps: name -> what comes of it.
BETWEEN = {
    "evaluate": evaluate,
    "sample": lambda e, micro: None if e.cfg.scores else continued(e, [[1, 2, 3], [4]], 2, frozenset()),
    "flush": lambda e, micro: e.optimizer.flush(),
    "drain": lambda e, micro: e.queues.drain(),
}
ALWAYS = ("evaluate", "sample")


def run(e, n_micro: int, between=((),) * 3, method=None):
    """(losses of steps, what came of `between`: names of BETWEEN before, between and after them, by place and name)."""
    told = {}

    def do(i, micro):
        for name in between[i]:
            told[i, name] = BETWEEN[name](e, micro)
            assert not e.weights.loaded, f"after {name} a buffer stays owned"

    steps, preference = data_of(e.cfg, len(between) - 1, n_micro, method)
    return train(e, steps, between=do, preference=preference), told


def data_of(cfg, steps, n_micro, method):
    """(the steps' micro-batches, Preference)."""
    if method is None:
        return batches(cfg, steps, n_micro, 24), None
    if method == "teacher":
        return taught(cfg, steps, n_micro, 24), None
    if method in LABELS:
        centred = Preference("reward", center_rewards_coefficient=0.1)
        return scored(cfg, steps, n_micro, 24), centred if method == "reward" else None
    return pairs(cfg, steps, n_micro, 24, method == "kto"), Preference(method)


def cfg_of(model, method):
    if method in LABELS:
        return replace(MODELS[model], scores=LABELS[method], score_std=0.1, tied=False, logit_scale=1.0)
    return replace(MODELS[model], teaching=TEACHING) if method == "teacher" else MODELS[model]


@cache
def in_one_memory(
    model: str, dtype: str, n_micro: int, clip: float, adam_bits: int, halves: bool, method: str | None,
    places: int, asked: bool,
):  # fmt: skip
    """As `run`; of evaluations and samples at each place where any is asked for."""
    cfg = cfg_of(model, method)
    plan = gpu_plan(cfg, dtype=dtype, n_micro=n_micro, adam_bits=adam_bits, halves=halves)
    e = make(cfg, plan, adamw=AdamW(max_grad_norm=clip))
    return *run(e, n_micro, (ALWAYS if asked else (),) * places, method), final_weights(e)


def check(plan, queues, model="untied", clip=1.0, between=((),) * 3, method=None, **more):
    cfg = cfg_of(model, method)
    e = make(cfg, plan, queues, AdamW(max_grad_norm=clip), **more)
    halves = plan.halves and plan.adam_bits < 32  # narrow moments are rounded at random, by places in a unit
    given = plan.dtype, plan.n_micro, clip, plan.adam_bits, halves, method, len(between), any(between)
    losses, all_told, weights = in_one_memory(model, *given)
    seen, told = run(e, plan.n_micro, between, method)
    assert seen == losses
    for (i, name), value in told.items():
        if name == "evaluate":
            assert all(map(torch.equal, value, all_told[i, name]))
            assert len(value) == plan.n_micro
        elif name == "sample":
            assert value == all_told[i, name]
    check_weights(e, weights)


HOST, SSD = UnitPlan("ram", "ram"), UnitPlan("ssd", "ssd")
STREAMED, SPLIT = replace(HOST, update="gpu"), UnitPlan("ram", "ssd")
ALL_X = tuple(replace(HOST, x=tier) for tier in ("gpu", "ram", "ssd", "ram", "ssd"))


def swapped(tier):
    """All of a unit in one tier."""
    return (UnitPlan(tier, tier, x="ram", saved=tuple((name, tier) for name in NAMES), base=tier),) * 5


METHODS = "dpo", "kto", "ipo", "orpo", "kto", "dpo", "simpo", "reward"
PLANS = {  # name -> model, method, its units and other decisions
    **{f"all in {tier}": (LLAMAS[i], None, swapped(tier), {}) for i, tier in enumerate(TIERS[1:])},
    **{f"all in {tier}, fp32": (LLAMAS[1 - i], None, swapped(tier), dict(dtype="F32")) for i, tier in enumerate(TIERS)},
    **{f"adapters, base on {tier}": (("lora", "gpt lora", "frozen")[i], None, swapped(tier), dict(window=1))
       for i, tier in enumerate(TIERS)},
    **{f"{n} micro-batches, x on {tier} between layers": (
        "untied", None, (replace(HOST, x=tier),) * 4 + (replace(HOST, x="ram"),), dict(n_micro=n, between="ram"))
       for tier, n in zip(TIERS, (5, 4, 5), strict=True)},
    **{f"{model}, one micro-batch after the other": (
        model, method, (replace(UnitPlan(tier, tier), x=x),) * 5, dict(n_micro=3, accumulate=True))
       for model, method, tier, x in (("untied", "kto", "ram", "gpu"), ("lora", None, "gpu", "ram"),
                                      ("untied", "teacher", "ssd", "ssd"))},
    "a teacher": ("tied", "teacher", (replace(HOST, x="ram"),) * 5, dict(dtype="F32", n_micro=3)),
    **{f"{method}, between {between}": (LLAMAS[i // 2 % 2], method, ALL_X, dict(n_micro=4, between=between))
       for i, (method, between) in enumerate(zip(METHODS, ("gpu", "ram") * 4, strict=True))},
    **{f"late moments, {dtype}": (
        "untied", None, (SPLIT, HOST, SSD, STREAMED, UnitPlan("ssd", "ram")), dict(dtype=dtype, late_moments=TIERS))
       for dtype in ("F32", "BF16")},
    **{f"streamed updates, {slots} buffers, late in {late}": (
        "untied", None, (HOST, STREAMED, STREAMED, HOST, STREAMED),
        dict(dtype=dtype, window=1, stream_slots=slots, late_moments=late))
       for slots, dtype, late in ((1, "F32", ()), (1, "BF16", TIERS[:2]), (3, "BF16", ()), (3, "F32", TIERS[1:2]))},
    **{f"gradients on the SSD, late in {late}": (
        "tied", None, (replace(SSD, x="ssd"), replace(SPLIT, x="ssd"), HOST, UnitPlan(), replace(SSD, x="ssd")),
        dict(dtype=dtype, late_moments=late, gradients="ssd", piece=1000))
       for dtype, late in (("F32", ()), ("BF16", TIERS[1:]))},
}  # fmt: skip


@pytest.mark.grid("all in ram", "late moments, BF16", "untied, one micro-batch after the other")
@pytest.mark.parametrize("name", PLANS)
def test_placement_never_changes_the_numbers(name):
    model, method, units, more = PLANS[name]
    plan = gpu_plan(LLAMA, units=units, **dict(dtype="BF16", record=700) | more)
    before = (ALWAYS, ("evaluate",), ("sample",)) if method == "teacher" else (("evaluate",),) * 3
    check(plan, RealQueues("cpu", extra=("poison",)), model, between=before, method=method)
    check(plan, LateQueues(LAGS[[*PLANS].index(name) % len(LAGS)]), model, method=method)


HALVED = [name for name in MODELS if name not in ELSEWHERE]
MICRO = ("BF16", 1, 0.0), ("F32", 2, 1.0), ("BF16", 3, 1e-2)  # dtype, micro-batches, clip


@pytest.mark.parametrize(
    ("model", "tier", "dtype", "n_micro", "clip"),
    [(model, ("ram", "gpu")[i % 2], *MICRO[i % 3]) for i, model in enumerate(HALVED)],
)
def test_half_blocks_are_the_same_to_the_bit(model, tier, dtype, n_micro, clip):
    """The global norm too: what is summed at once does not depend on how blocks are cut."""
    plan = gpu_plan(MODELS[model], halves=True, dtype=dtype, n_micro=n_micro)
    plan = replace(plan, units=(UnitPlan(tier, tier, x=tier),) * 8, window=1, piece=1)
    check(plan, RealQueues("cpu", extra=("poison",)), model, clip)


@pytest.mark.full
@pytest.mark.parametrize(
    ("late", "window", "model"),
    [
        (late, window, LLAMAS[(i + window) % 2])
        for i, (late, window) in enumerate([((), 1), (("ram",), 2), (("ram", "ssd"), 1)])
    ],
)
def test_evaluations_samples_and_flushes_between_steps_change_nothing(model, window, late):
    units = (UnitPlan("ram", "ssd"), UnitPlan("ram", "ram"), UnitPlan("ssd", "ssd"), *(UnitPlan("ram", "ssd"),) * 2)
    plan = gpu_plan(LLAMA, units=units, dtype="BF16", late_moments=late, record=700, state_slots=2, window=window)
    for twice in (("evaluate", "evaluate"), ("sample", "sample"), ("evaluate", "sample")):
        between = (twice, twice[:1], (*twice, "flush", "drain"), twice)
        check(plan, RealQueues("cpu", extra=("poison",)), model, between=between)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "at_once"),
    [
        ("packed", 1),
        ("packed", 100),
        ("packed in blocks", 2),
        ("packed in nvfp4", 1),
        ("packed in fp8", 2),
        ("latent", 1),
    ],
)
def test_where_packed_experts_are_cut_changes_no_bit(model, at_once):
    """Nor what else a plan does; they are never decoded all, but where a slice holds all."""
    unit = UnitPlan("ram", "ram", base="ssd", x="ram")
    plan = gpu_plan(MODELS[model], units=(unit,) * 8, dtype="BF16", n_micro=2, halves=True, window=1, at_once=at_once)
    check(plan, RealQueues("cpu", extra=("poison",)), model)
    made = geometry.Geometry.of(MODELS[model], plan).decoded
    assert not [t.name for layout in made for t in layout.tensors if len(t.shape) == 3]


SLICED = [name for name, cfg in MODELS.items() if narrow.may_be_sliced(cfg)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "base", "slices", "at_once"),
    [(model, TIERS[(2 - i) % 3], *((2, 1), (3, 0), (100, 0))[i // 2 % 3]) for i, model in enumerate(SLICED)],
)
def test_experts_come_in_slices(model, slices, at_once, base):
    """One unit of weights after another, of all micro-batches; the cut changes no bit."""
    cfg = replace(MODELS[model], halves=True)
    saved = lambda u: tuple((n, "ram") for n in shapes.saved_shapes(replace(cfg, slices=2), 1, shapes.kind(cfg, u)))
    units = [UnitPlan("ram", "ram", base=base, x=("ram", "gpu")[u % 2], saved=saved(u)) for u in range(1, 7)]
    plan = gpu_plan(
        cfg, units=(UnitPlan(), *units, UnitPlan()), dtype="BF16", n_micro=2, halves=True, window=1,
        slices=slices, at_once=at_once,
    )  # fmt: skip
    check(plan, RealQueues("cpu", extra=("poison",)), model, between=(ALWAYS, ("evaluate",), ()))
    if at_once:
        check(plan, LateQueues(LAGS[0]), model)
    geo = geometry.Geometry.of(MODELS[model], plan)
    assert len(geo.slices) == sum(o.experts is not None for o in geo.cfg.layers) * min(slices, geo.cfg.experts.count)
    memory = build(
        MODELS[model], plan, LIMITS, RealQueues(threads=False), store=MemoryStore(), scratch=MemoryScratch()
    ).memory
    assert usage(geo, plan) == {tier: memory.used_bytes(tier) for tier in ("gpu", "ram")}
    whole = geometry.Geometry.of(MODELS[model], replace(plan, slices=1))
    assert [sum(t.nbytes for v in (u, *of) for t in geo.base[v].tensors) for u, of in enumerate(geo.slices_of)] == [
        layout.nbytes for layout in whole.base
    ]


LOSSES = st.sampled_from((None, None, "dpo", "kto", "teacher", "reward", "classify"))
PLACES = st.tuples(*[st.lists(st.sampled_from(tuple(BETWEEN)), max_size=3)] * 4)


def model_and_plan(seed):
    model = Random(seed).choice(tuple(MODELS))
    cfg = MODELS[model]
    plan = random_plan(cfg, Random(f"{model} {seed}"))
    balanced = cfg.experts and not cfg.experts.sigmoid
    return model, replace(plan, accumulate=plan.gpus == 1 and not cfg.tied and not balanced and seed % 3 == 0)


SEEDS = st.integers(0, 1 << 32).map(model_and_plan)


@pytest.mark.full
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS, st.integers(0, 99), st.booleans(), PLACES, LOSSES)
def test_any_plan_with_any_delays(drawn, seed, jitter, between, method):
    model, plan = drawn
    gpus = plan.gpus
    queues = JitterQueues(seed, 0.001, gpus) if jitter else RealQueues("cpu", extra=("poison",), gpus=gpus)
    check(plan, queues, model, 0.0 if plan.mode == "backward" else 1.0, between, method)


@pytest.mark.full
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS, PLACES)
def test_any_plan_with_requests_of_classes(drawn, between):
    """Requests wait for one slow drive, and those of lower classes are passed."""
    model, plan = drawn
    drive, queues = OneDrive(), RealQueues("cpu", extra=("poison",), gpus=plan.gpus)
    check(plan, queues, model, 0.0 if plan.mode == "backward" else 1.0, between, store=drive, scratch=drive)


@pytest.mark.full
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS, st.sets(st.sampled_from((*queues_of(4), "poison"))), PLACES, LOSSES)
def test_any_plan_with_any_queues_late(drawn, late, between, method):
    model, plan = drawn
    if "compute" in late and plan.gpus == 1:  # generate works beside the queues, and reads its weights at once
        between = [[name for name in names if name != "sample"] for names in between]
    check(plan, LateQueues(late, plan.gpus), model, 0.0 if plan.mode == "backward" else 1.0, between, method)


@pytest.mark.full
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS, st.tuples(*[st.integers(0, 2)] * 3), LOSSES)
@example(("untied", gpu_plan(LLAMA, units=(UnitPlan("ram", "ram"),) * 5, window=1)), (0, 1, 2), None)
def test_what_is_simulated_is_what_runs(drawn, evaluations, method):
    """Three steps of any plan, evaluations between: the same tasks in the same order, of the same bytes and FLOPs."""
    model, plan = drawn[0], drawn[1]
    cfg, real = cfg_of(model, method), RealQueues("cpu", gpus=plan.gpus)
    drive = Rates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, ssd_read=1.0, ssd_write=1.0)
    simulated = SimulatedQueues(lambda task: 1.0, drive, plan.gpus)
    adamw = AdamW(max_grad_norm=0.0 if plan.mode == "backward" else 1.0)
    runs, thought = make(cfg, plan, real, adamw, poison=False), build(cfg, plan, LIMITS, simulated, adamw=adamw)
    tables, tasks = (
        rope_tables(cfg, 64, "cpu"),
        lambda spans: [(s.queue, s.kind, s.label, s.nbytes, s.flops) for s in spans],
    )
    real.tracing = simulated.tracing = True
    steps, preference = data_of(cfg, 3, plan.n_micro, method)
    for i, step in enumerate(steps, 1):
        micro = [make_inputs(runs.cfg, mb, [(tables, "cpu")] * plan.gpus, method == "kto") for mb in step]
        real.trace()
        simulated.begin()
        for e, batch in ((runs, micro), (thought, [_without_tensors(mb) for mb in micro])):
            for _ in range(evaluations[i - 1]):
                evaluate(e, batch)
            train_step(e, batch, i, 1e-3, preference=preference)
            assert not e.weights.loaded
        assert tasks(real.trace()) == tasks(simulated.trace())
    real.drain()
    real.close()
    runs.close()


def _without_tensors(mb: Inputs) -> Inputs:
    return replace(mb, packed=(), kl=mb.kl and _without_tensors(mb.kl))


def handed_over(plan) -> list[tuple[str, str, str]]:
    """(queue, kind, of) of a step's tasks in the order of the program."""
    cfg, drive = deep(LLAMA, len(plan.units) - 2), Rates(*[1.0] * 8)
    queues = SimulatedQueues(lambda task: 1.0, drive, plan.gpus)
    e, batch = build(cfg, plan, LIMITS, queues), [Inputs(24, 20, 100)] * plan.n_micro
    for step in (1, 2):
        queues.begin()
        train_step(e, batch, step, 1e-3)
    return [(task.queue, task.kind, task.label) for task in queues.tasks]


@pytest.mark.parametrize("between", ["gpu", "ram"])
@pytest.mark.parametrize("slots", [2, 3])
def test_what_is_needed_next_is_on_its_way_before(between, slots):
    """As early as there are slots for it. Of the weights, those that forward used last are not brought again."""
    unit = UnitPlan("ram", "ram", x="ram", saved=(("qkv", "ram"),))
    done = handed_over(gpu_plan(LLAMA, units=(unit,) * 8, between=between, window=slots, swap_slots=slots, n_micro=4))
    turn, fetched = (
        done.index(("compute", "loss", "head")),
        {"forward": ("x",) * (between == "ram"), "backward": ("x", "ram")},
    )
    weights = lambda u: ("h2d", "weights", f"block{u:03d}")
    for way, tasks, order in (("forward", done[:turn], range(6)), ("backward", done[turn:], range(5, -1, -1))):
        at = [i for i, (_, kind, of) in enumerate(tasks) if kind == way and of.startswith("block")]
        assert [tasks[i][2] for i in at] == [f"block{u:03d}" for u in order for _ in range(4)]
        brought = [u for u in order if weights(u) in tasks]
        assert brought == list(order[0 if way == "forward" else slots :])
        for u in brought:
            assert tasks.index(weights(u)) < at[max(0, 4 * (order.index(u) - slots + 1))]
        for i, (u, b) in enumerate((u, b) for u in order for b in range(4)):
            for what in fetched[way]:
                assert tasks.index(("h2d", "activations", f"block{u:03d} {what} {b}")) < at[max(0, i - slots + 1)]


@pytest.mark.parametrize("base", TIERS)
def test_what_is_frozen_is_read_alone(base):
    """It is as it was, and no byte of it is written to the SSD in a step."""
    queues = RealQueues(threads=False)
    e = make(LORA, gpu_plan(LORA, units=(UnitPlan("ram", "ram", base=base),) * 5, dtype="BF16"), queues)
    before, moved = frozen_bytes(e), queues.moved.copy()
    run(e, 2)
    assert sum(queues.moved[queue] - moved[queue] for queue in WRITES) == 0
    read = sum(queues.moved[queue] - moved[queue] for queue in READS)
    assert (read > 0) == (base == "ssd")
    assert frozen_bytes(e) == before


def frozen_bytes(e) -> list[bytes]:
    reader = Reader(e.placement)
    entries = [Entry("base", u) for u in range(e.geo.n_units) if e.geo.base[u].tensors]
    return [bytes(reader.read(entry)[: e.geo.base[entry.u].nbytes].numpy()) for entry in entries]


@pytest.mark.parametrize(("model", "dtype"), [(model, ("F32", "BF16")[i % 2]) for i, model in enumerate(IN_FP8)])
def test_matrices_are_quantized_once_a_pass(model, dtype):
    """Frozen ones once, as they are loaded."""
    cfg = IN_FP8[model]
    plan = gpu_plan(cfg, dtype=dtype, n_micro=3)
    e, micro = make(cfg, plan, RealQueues("cpu", extra=("poison",))), batches(cfg, 2, 3, 24)
    e.queues.tracing = True
    train(e, micro)
    made = Counter((task.label, task.kind) for task in e.queues.trace())
    blocks = e.geo.names[1:-1]
    passes = {"fp8 lora": {1}, "some frozen, in fp8": {1, 2}}.get(model, {2})  # forward reads codes as they lie
    assert {made[name, "decode"] for name in blocks} == {n * len(micro) for n in passes}
    assert {made[name, "backward"] for name in blocks} == {3 * len(micro)}
    e.queues.close()


def test_ktos_counterparts_are_only_read_forward():
    """With the loss and the divergence of all documents in one pass, and half of the work behind it."""
    (step,), of = pairs(LLAMA, 1, 3, 24, kto=True), Preference("kto")
    e = make(LLAMA, gpu_plan(LLAMA, n_micro=3), RealQueues("cpu", extra=("poison",)))
    docs, losses = [mb.documents for mb in step], evaluate(e, [make_inputs(LLAMA, mb, ROPE_TABLES) for mb in step])
    logps = np.concatenate([each.sums(loss.numpy()) for each, loss in zip(docs, losses, strict=True)])
    expected = compare(of, joined(docs), logps)
    micro = [collate(LLAMA, mb, split_kl=True) for mb in step]
    stats = train_step(e, [to_devices(mb, ROPE_TABLES) for mb in micro], 1, 1e-3, sum(mb.weight for mb in micro), of)
    assert stats.loss == pytest.approx(expected.loss, rel=1e-6)
    assert stats.metrics == pytest.approx(expected.metrics(), rel=1e-5)
    assert sum(mb.tokens for mb in micro) + sum(mb.kl.tokens for mb in micro) == sum(len(mb.ids) for mb in step)
    e.queues.close()


def test_where_nothing_is_trained_a_step_is_an_evaluation():
    cfg = replace(LLAMA, frozen=("*",))
    e = make(cfg, gpu_plan(cfg, dtype="BF16"))
    micro = [make_inputs(cfg, mb, ROPE_TABLES) for mb in batches(cfg, 1, 2, 24)[0]]
    losses = evaluate(e, micro)
    stats = train_step(e, micro, 1, 1e-2)
    assert stats.loss == float(sum(part.double().sum() for part in losses) / sum(mb.trained for mb in micro))
    assert stats.grad_norm == 0
    assert all(map(torch.equal, evaluate(e, micro), losses))


@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_an_evaluation_sends_no_input_to_its_tier(tier):
    """No backward will read it there."""
    plan = gpu_plan(LLAMA)
    inner = tuple(replace(unit, x=tier) for unit in plan.units[1:-1])
    e = make(LLAMA, replace(plan, units=(plan.units[0], *inner, plan.units[-1])), poison=False)
    micro = [make_inputs(LLAMA, mb, ROPE_TABLES) for mb in batches(LLAMA, 1, 2, 24)[0]]
    before = evaluate(e, micro)
    assert not e.queues.moved["d2h"] + e.queues.moved["ssd_write"]
    train_step(e, micro, 1, 0.0)
    assert (e.queues.moved["d2h"] > 0, e.queues.moved["ssd_write"] > 0) == (tier != "gpu", tier == "ssd")
    assert all(map(torch.equal, evaluate(e, micro), before))


def test_a_pass_over_no_micro_batch_runs_the_updates_that_are_due():
    """As on one of several hosts, which has none of an evaluation's, and shares its updates with the others."""
    e = make(LLAMA, gpu_plan(LLAMA, units=(HOST,) * 5))
    (batch,) = batches(LLAMA, 1, 1, 24)[0]
    train_step(e, [make_inputs(LLAMA, batch, ROPE_TABLES)], 1, 1e-2)
    assert e.gradients.landed
    assert evaluate(e, []) == []
    assert not e.gradients.landed


def test_a_step_without_labels_is_refused_and_changes_nothing():
    e = make(LLAMA, gpu_plan(LLAMA))
    before = {name: value.clone() for name, value in final_weights(e).items()}
    batch = batches(LLAMA, 1, 1, 24)[0]
    batch[0].labels[:] = -100
    with pytest.raises(InputError, match="step 7"):
        train_step(e, [make_inputs(LLAMA, batch[0], ROPE_TABLES)], 7, 1e-2)
    e.optimizer.flush()
    assert all(torch.equal(value, before[name]) for name, value in final_weights(e).items())
