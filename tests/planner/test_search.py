"""The search: everything that it simulates fits and can be built, it is never slower than the rule, and repeats."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plans import ADAPTED, H200, PARTLY, RATES, SMALL, llama

from trireme.engine.buffers import each_usage, fits
from trireme.engine.build import build
from trireme.engine.geometry import Geometry, geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan, UnitPlan
from trireme.engine.planner import rates as machines
from trireme.engine.planner.choose import Choice, choose
from trireme.engine.planner.predict import Batch, predict, rebuilt_seconds
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import Cut, Wanted, all_cuts, cuts, simple_plan, sizes_of, sliced
from trireme.engine.planner.search import Search, moves, updated_as, with_moves
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.planner.sizes import find_model
from trireme.engine.tuning.chosen import adapted, targets
from trireme.models.config import Lora, ModelConfig
from trireme.models.sizes import shapes

MIB, GIB = 1 << 20, 1 << 30
WANTED = Wanted(((1024, 2), (512, 4), (256, 8)), record=1 << 20, document=256)
GPT3_13B = find_model("gpt3-13b")
FAST = llama(512, 8, 4, 1408, vocab=2048)
NO_DRIVE = dict(ssd_read=0.0, ssd_write=0.0)


def with_adapters(name: str, *names: str) -> ModelConfig:
    cfg = find_model(name)
    return adapted(cfg, Lora(16, 32.0, names or targets(cfg, ())))


def check(cfg: ModelConfig, choice: Choice, limits: Limits, rates: Rates) -> None:
    """The plan fits, and the engine can be built with it."""
    geo = Geometry.of(cfg, choice.plan)
    assert fits(geo, choice.plan, limits)
    assert rates.has_drive or not choice.plan.uses_ssd
    build(cfg, choice.plan, limits, SimulatedQueues(lambda *task: 0.0, RATES, choice.plan.gpus))


def by_rule(cfg: ModelConfig, plan: Plan, rates: Rates, wanted: Wanted) -> float:
    """Seconds of a token."""
    step = predict(cfg, plan, rates, Batch(plan.tokens, wanted.document, plan.n_micro), roughly=True)
    return step.step_s / (plan.tokens * plan.n_micro)


@pytest.mark.full
@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from((SMALL, ADAPTED, PARTLY)),
    st.integers(60, 600),
    st.integers(60, 2000),
    st.sampled_from(("forward", "backward")),
    st.floats(0.3, 30),
    st.booleans(),
    st.booleans(),
    st.sampled_from((1, 1, 2)),
)
def test_a_choice_fits_repeats_and_is_no_slower_than_the_rule(cfg, gpu, host, mode, bus, halves, drive, gpus):
    """Without a drive nothing is put on one. `Search` asserts that all it simulates fits."""
    limits = Limits(gpu * MIB, host * MIB, gpus)
    rates = replace(RATES, h2d=2e10 * bus, d2h=2e10 * bus, **{} if drive else NO_DRIVE)
    wanted = replace(WANTED, mode=mode, cuts=all_cuts(cfg, gpus == 1, (True,)) if halves else (), gpus=gpus)
    try:
        choice = choose(cfg, limits, rates, wanted)
    except DoesNotFit:
        if drive:
            with pytest.raises(DoesNotFit):
                simple_plan(cfg, limits, wanted)
        return
    check(cfg, choice, limits, rates)
    assert choice.plan.halves or not halves
    assert choice == choose(cfg, limits, rates, wanted)
    if drive:
        assert choice.per_token <= by_rule(cfg, simple_plan(cfg, limits, wanted), rates, wanted) * (1 + 1e-9)


LARGE = {  # a quarter of models that an early search planned beyond the limits, on a third of their RAM, and one whole
    "175B, 12 drives": ("gpt3-175b", "gpu=rtx4090,ram=256GiB,dram=200,ssd=12x4TB@7/5", 16),
    "405B, little RAM": ("llama-3.1-405b", "gpu=rtx4090,ram=40GiB,ssd=4x4TB", 8),
    "70B": ("llama-3.3-70b", "gpu=rtx4090,ram=48GiB,ssd=2x4TB@7/5", 32),
    "DeepSeek-V3": (with_adapters("deepseek-v3"), "gpu=rtx4090,ram=48GiB,ssd=2x4TB@7/5", 16),
    "8B on four": ("llama-3.1-8b", "gpu=4xrtx4090,ram=256GiB,ssd=4x2TB@7/5", 32),
}


def planned(name: str, less: tuple[float, float] = (1.0, 1.0)) -> tuple[ModelConfig, Choice, Limits, Rates, Wanted]:
    """`less`: shares of the limits of GPU and RAM."""
    model, text, sequences = LARGE[name]
    cfg, machine = find_model(model) if isinstance(model, str) else model, machines.assume(text)
    cfg = replace(cfg, layers=cfg.layers[: max(24, cfg.n_layers // 4)])
    limits = machine.limits
    limits = replace(limits, gpu=int(less[0] * limits.gpu), ram=int(less[1] * limits.ram))
    rows = [r for r in (8, 4, 2, 1) if r <= max(1, sequences // machine.gpus)]
    wanted = Wanted(sizes_of(rows, sequences, 2048), record=1 << 26, document=2048, gpus=machine.gpus)
    return cfg, choose(cfg, limits, machine.rates, wanted), limits, machine.rates, wanted


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_plans_of_large_models_fit(name):
    cfg, choice, limits, rates, wanted = planned(name)
    check(cfg, choice, limits, rates)
    assert choice.per_token <= by_rule(cfg, simple_plan(cfg, limits, wanted), rates, wanted) * (1 + 1e-9)


@pytest.mark.full
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.sampled_from(("405B, little RAM", "70B", "8B on four")), st.floats(0.3, 1.1), st.floats(0.15, 1.1))
def test_plans_of_large_models_fit_in_any_limits(name, gpu, ram):
    try:
        cfg, choice, limits, rates, _ = planned(name, (gpu, ram))
    except DoesNotFit:
        assume(False)
    check(cfg, choice, limits, rates)


def test_a_plan_that_does_not_fit_is_never_simulated():
    limits = Limits(200 * MIB, 400 * MIB)
    first = simple_plan(SMALL, limits, WANTED)
    s = Search(Geometry.of(SMALL, first), limits, RATES, WANTED, first)
    with pytest.raises(AssertionError):
        s.simulate(first.changed(range(SMALL.n_units), weights="gpu", state="gpu", x="gpu"))
    assert not s.steps


# ---------------------------------------------------------------- more of what a machine has


@pytest.mark.full
@settings(max_examples=4, deadline=None)
@given(st.integers(80, 600), st.integers(80, 2000), st.sampled_from(("matmul", "h2d", "d2h", "ssd_read", "gpu", "ram")))
def test_more_is_hardly_ever_slower(gpu, host, more):
    """A descent does not find every optimum, and what fills memory comes in whole units."""
    limits, rates = Limits(gpu * MIB, host * MIB), RATES
    try:
        less = choose(SMALL, limits, rates, WANTED).per_token
    except DoesNotFit:
        return
    if more in ("gpu", "ram"):
        limits = replace(limits, **{more: 2 * getattr(limits, more)})
    else:
        rates = replace(rates, **{more: 2 * getattr(rates, more)})
    assert choose(SMALL, limits, rates, WANTED).per_token <= 1.04 * less


@pytest.mark.full
@pytest.mark.parametrize(
    ("cfg", "machine", "wanted", "where"),
    [  # what is found where: (tier, what of a unit, least share of the blocks)
        (find_model("llama-8b"), "gpu=rtx4090,ram=192GiB", Wanted(((131072, 1),), document=131072), ("ram", "saved")),
        (find_model("gpt3-13b"), "gpu=rtx4090,ram=715GiB,dram=150,ssd=12x4TB@6.5/3.4", Wanted(((16384, 4),)),
         ("ram", "saved")),
        (FAST, Limits(120 * MIB, 140 * MIB), Wanted(((1024, 8), (512, 16)), mode="backward", record=1 << 20),
         ("ssd", "saved")),
        (find_model("llama-13b"), Limits(79 * GIB, 108 * GIB), Wanted(((16384, 2),), mode="backward"),
         ("gpu", "state")),
    ],
    ids=["long texts", "much RAM", "fast drives", "no drive"],
)  # fmt: skip
def test_what_is_put_where(cfg, machine, wanted, where):
    tier, what = where
    rates = replace(RATES, matmul=2e12, ssd_read=8e10, ssd_write=4e10) if tier == "ssd" else replace(RATES, **NO_DRIVE)
    limits = machine
    if isinstance(machine, str):
        limits, rates = machines.assume(machine).limits, machines.assume(machine).rates
    choice = choose(cfg, limits, rates, replace(wanted, record=min(wanted.record, 1 << 24)))
    check(cfg, choice, limits, rates)
    there = [unit.names(tier) if what == "saved" else unit.state == tier for unit in choice.plan.units[1:-1]]
    assert sum(map(bool, there)) > (len(there) / 2 if what == "saved" else 0)


@pytest.mark.full
def test_adapters_write_nothing_to_the_drive():
    """What RAM does not hold is recomputed, however fast the drive."""
    for host in (150, 200):
        choice = choose(ADAPTED, Limits(120 * MIB, host * MIB), replace(RATES, ssd_read=1e11, ssd_write=1e11), WANTED)
        assert choice.step.ssd_written == 0


def test_without_a_drive_what_memory_does_not_hold_is_refused():
    with pytest.raises(DoesNotFit, match="no drive"):
        choose(SMALL, Limits(200 * MIB, 200 * MIB), replace(RATES, **NO_DRIVE), WANTED)


@pytest.mark.full
def test_placements_that_are_asked_for_stay():
    wanted = replace(WANTED, mode="backward", placement="state-ssd")
    assert {unit.state for unit in choose(SMALL, Limits(GIB, GIB), RATES, wanted).plan.units} == {"ssd"}


@pytest.mark.parametrize(("name", "gpu"), [("llama-8b", 22), ("llama-8b", 46), ("llama-70b", 22)])
def test_micro_batches_come_one_after_the_other_where_that_saves_recomputation(name, gpu):
    """That is, where all weights are on the GPU."""
    cfg, limits = with_adapters(name), Limits(gpu * GIB, 200 * GIB)
    wanted = replace(WANTED, sizes=sizes_of((8, 4, 2, 1), 16, 2048), document=2048)
    alone, together = (choose(cfg, limits, H200, replace(wanted, accumulate=may)) for may in (True, False))
    assert alone.plan.accumulate == alone.plan.resident == (name == "llama-8b")
    assert not together.plan.accumulate
    if alone.plan.accumulate:
        assert alone.per_token < 0.9 * together.per_token
        check(cfg, alone, limits, H200)
        slow = replace(H200, launch_overhead=3e-5, task=1e-4)  # few tokens do not keep the GPU busy
        assert choose(cfg, limits, slow, wanted).plan.tokens >= alone.plan.tokens * (2 if gpu == 22 else 1)


def test_a_tied_embedding_that_is_trained_needs_all_micro_batches_together():
    limits, wanted = Limits(2200 * MIB, GIB), replace(WANTED, sizes=((4096, 32), (1024, 128)))
    for tied in (False, True):
        choice = choose(replace(SMALL, tied=tied), limits, RATES, wanted)
        assert choice.plan.accumulate != tied
        check(replace(SMALL, tied=tied), choice, limits, RATES)


def test_one_after_the_other_a_step_may_have_any_number_of_tokens_without_a_drive():
    cfg, limits = with_adapters("llama-8b"), Limits(22 * GIB, 8 * GIB)
    wanted = replace(WANTED, sizes=sizes_of((8, 4, 2, 1), 512, 2048), document=2048)
    check(cfg, choose(cfg, limits, H200, wanted), limits, H200)
    with pytest.raises(DoesNotFit):
        choose(cfg, limits, H200, replace(wanted, accumulate=False))


def test_the_rule_writes_moments_in_memory_late_in_steps_of_many_tokens():
    for n_micro, late in ((16, ("gpu", "ram")), (2, ())):
        plan = simple_plan(SMALL, Limits(200 * MIB, 200 * MIB), replace(WANTED, sizes=((1024, n_micro),)))
        assert any(unit.state == "ssd" for unit in plan.units)
        assert plan.late_moments == late


# ---------------------------------------------------------------- runs that have begun


@pytest.mark.full
@settings(max_examples=6, deadline=None)
@given(st.integers(80, 600), st.integers(60, 1500), st.floats(0.2, 5), st.sampled_from((0.7, 1.0, 1.5)))
def test_a_resumed_run_keeps_its_updates_where_they_are(gpu, host, faster, more):
    """Other rates and other limits move everything else; only where nothing else fits do updates move."""
    limits = Limits(gpu * MIB, host * MIB)
    try:
        begun = choose(SMALL, limits, RATES, WANTED).plan
        now = replace(limits, gpu=int(limits.gpu * more))
        rates = replace(RATES, adam=2e9 * faster, dram=6e10 * faster)
        settled = replace(WANTED, sizes=((begun.tokens, begun.n_micro),), cuts=all_cuts(SMALL, halves=(begun.halves,)))
        again = choose(SMALL, now, rates, settled, begun)
    except DoesNotFit:
        return
    check(SMALL, again, now, rates)
    if fits(Geometry.of(SMALL, begun), begun, now):
        assert updated_as(again.plan, begun) == again.plan
        assert again.per_token <= by_rule(SMALL, begun, rates, WANTED) * (1 + 1e-9)


# ---------------------------------------------------------------- how a model is cut


def need(cfg: ModelConfig, halves: bool) -> int:
    """GPU bytes of the smallest plan."""
    with pytest.raises(DoesNotFit) as error:
        simple_plan(cfg, Limits(1, 1 << 34), replace(WANTED, sizes=((128, 8),), cuts=all_cuts(cfg, halves=(halves,))))
    return error.value.need["gpu"]


def test_half_blocks_where_whole_ones_do_not_fit():
    wide = llama(512, 8, 4, 8192, vocab=2048)
    whole, half = need(wide, False), need(wide, True)
    assert half < whole
    wanted = replace(WANTED, sizes=((256, 4), (128, 8)))
    of = lambda gpu: simple_plan(wide, Limits(gpu, 600 * MIB), wanted)
    assert of((half + whole) // 2).halves
    assert len(of((half + whole) // 2).units) == 2 * wide.n_layers + 2
    assert not of(2 * whole).halves
    with pytest.raises(DoesNotFit, match="--gpu-memory"):
        of(half // 2)


@pytest.mark.full
def test_packed_experts_are_decoded_in_slices_where_all_do_not_fit():
    """gpt-oss-120b on 8 GB: a layer's experts in bf16 would be nearly all of it. With less they come in slices too."""
    cfg = with_adapters("gpt-oss-120b", "q_proj")
    in_slices = [(True, 8, 2), (True, 8, 4), (True, 8, 8), (True, 8, 16), (True, 4, 32)]
    assert cuts(cfg, WANTED) == [(False, 0, 1), (True, 0, 1), (True, 8, 1), *in_slices]
    plans = [simple_plan(cfg, Limits(int(gib * GIB), 64 * GIB), WANTED) for gib in (16, 7, 3, 2, 1.5)]
    order = [cuts(cfg, WANTED).index(Cut.of(plan)) for plan in plans]
    assert order == sorted(order), "the coarsest that fits"
    assert order[0] == 0
    assert plans[-1].slices > 1
    assert all_cuts(cfg, halves=(False,)) == [(False, 0, 1), (False, 8, 1)]
    assert cuts(cfg, replace(WANTED, cuts=[sliced(cfg, 4)])) == [(True, 8, 4)]
    assert cuts(cfg, replace(WANTED, gpus=2)) == [(False, 0, 1), (True, 0, 1), (True, 8, 1)]  # sums stay on one GPU
    trained = replace(cfg, lora=None, frozen=())  # is not packed, and has gradients
    assert cuts(trained, WANTED) == [(False, 0, 1), (True, 0, 1)]


@pytest.mark.full
def test_experts_come_in_slices_where_that_overlaps_better():
    cfg = with_adapters("gpt-oss-120b", "q_proj")
    cfg = replace(cfg, layers=cfg.layers[:3])
    limits, wanted = Limits(4 * GIB, 6 * GIB), replace(WANTED, sizes=((4096, 2),))
    whole = [cut for cut in all_cuts(cfg) if cut.slices == 1]
    free, other = (choose(cfg, limits, RATES, replace(wanted, cuts=given)) for given in ((), whole))
    assert (free.plan.slices, other.plan.slices) == (4, 1)
    assert free.per_token < 0.9 * other.per_token
    for begun, rates in product((free, other), (RATES, replace(RATES, ssd_read=0.9 * RATES.ssd_read))):
        again = choose(cfg, limits, rates, replace(wanted, cuts=all_cuts(cfg, halves=(True,))), begun.plan)
        assert not again.moved
        assert again.per_token <= by_rule(cfg, begun.plan, rates, wanted) * (1 + 1e-9), (
            "slower than before it was resumed"
        )


# ---------------------------------------------------------------- several GPUs


@pytest.mark.full
def test_two_gpus_have_layers_in_turn_and_resumed_runs_their_updates():
    limits, wanted = Limits(160 * MIB, 2000 * MIB, 2), Wanted(((512, 4), (256, 8)), document=256, gpus=2)
    choice = choose(SMALL, limits, H200, wanted)
    assert (choice.plan.gpus, choice.plan.between) == (2, "ram")
    check(SMALL, choice, limits, H200)
    one = choose(SMALL, replace(limits, gpus=1), H200, replace(wanted, gpus=1), resumed=choice.plan).plan
    on_gpu = lambda plan: [unit.state == "gpu" or unit.update == "gpu" for unit in plan.units]
    assert one.gpus == 1
    assert on_gpu(one) == on_gpu(choice.plan)


@pytest.mark.full
def test_outputs_go_by_peer_copies_where_gpus_have_access():
    limits, wanted, linked = Limits(300 * MIB, 2000 * MIB, 2), Wanted(((512, 4),), document=256, gpus=2), {}
    for peer in (0.0, 3e11):
        linked[peer] = choose(SMALL, limits, replace(H200, launch_overhead=1.3e-5, peer=peer), wanted)
    assert [choice.plan.between for choice in linked.values()] == ["ram", "gpu"]
    assert linked[3e11].step.step_s < linked[0.0].step.step_s
    assert linked[3e11].step.busy["peer"] > 0


@pytest.mark.full
def test_a_gpu_with_free_memory_lends_it():
    """The other's saved tensors are there, where recomputing is slow."""
    limits = Limits(520 * MIB, 700 * MIB, 2, less=(260 * MIB, 0))
    wanted = Wanted(((512, 4),), document=256, gpus=2)
    rates = replace(RATES, matmul=2e12, launch_overhead=1.3e-5, peer=3e11, h2d=1e9, d2h=1e9)
    choice = choose(SMALL, limits, rates, wanted)
    check(SMALL, choice, limits, rates)
    apart = choice.plan.changed(range(SMALL.n_units), saved=())
    assert any(unit.lent for unit in choice.plan.units)
    assert choice.per_token < by_rule(SMALL, apart, rates, wanted)


@pytest.mark.full
def test_gpus_with_unequal_memory_have_layers_in_proportion():
    limits = Limits(400 * MIB, 700 * MIB, 2, less=(0, 200 * MIB))
    choice = choose(SMALL, limits, RATES, Wanted(((512, 4),), document=256, gpus=2))
    check(SMALL, choice, limits, RATES)
    used = each_usage(Geometry.of(SMALL, choice.plan), choice.plan)[0]
    assert all(nbytes <= limits.gpu_bytes(gpu) for gpu, nbytes in enumerate(used))


# ---------------------------------------------------------------- the order of moves


@pytest.mark.parametrize("cfg", [GPT3_13B, replace(GPT3_13B, halves=True), find_model("qwen3-30b")])
def test_moves_spare_less_and_less_recomputation_per_byte(cfg):
    """No set of saved tensors, and no mixture of two, is better in bytes and recomputation."""
    geo, batch = geometry(cfg, "BF16", 32), Batch(4096, 1024, 1)
    steps = moves(geo, batch, RATES)
    empty = Plan((UnitPlan(),) * cfg.n_units, 4096, 1)
    each = [move for move in steps for _ in range(geo.kinds.count(move.kind))]
    for n in (1, len(each) // 2, len(each)):  # the first n take as much as they say
        for counts in ({"ram": n}, {"ram": n // 2, "gpu": n - n // 2}):
            units = zip(geo.kinds[1:-1], with_moves(geo, empty, steps, counts).units[1:-1], strict=True)
            taken = [shapes.saved_bytes(cfg, 4096, 2, kind)[name] for kind, unit in units for name, _ in unit.saved]
            assert sum(taken) == sum(move.nbytes for move in each[:n])
    per_byte = [float(f"{move.seconds / move.nbytes:.6g}") for move in steps]
    assert per_byte == sorted(per_byte, reverse=True)
    for kind in geo.inner_kinds:
        u, size, names = geo.kinds.index(kind), shapes.saved_bytes(cfg, 4096, 2, kind), [()]
        names += [move.names for move in steps if move.kind == kind]
        again = lambda saved, u=u: rebuilt_seconds(cfg, u, frozenset(saved), 2, RATES, batch)
        assert again(names[-1]) == pytest.approx(again(tuple(size)), abs=1e-12)
        corners = [(sum(map(size.get, saved)), again(saved)) for saved in names]
        for saved in (s for n in range(len(size) + 1) for s in combinations(size, n)):
            nbytes, left = sum(map(size.get, saved)), again(saved)
            for (x0, y0), (x1, y1) in pairwise(corners):
                assert (left - y0) * (x1 - x0) >= (y1 - y0) * (nbytes - x0) - 1e-6 * y0 * x1
