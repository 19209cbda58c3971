"""Units dealt to GPUs, how long their steps take, and what the planner makes of several."""

from collections import Counter
from dataclasses import replace

import pytest
from engines import LIMITS, LLAMA, gpu_plan
from plans import ADAPTED, H200, SEVEN_B, SMALL, fitting, plan

from trireme.engine.amounts import rounded_up
from trireme.engine.buffers import each_usage, fits, usage
from trireme.engine.build import Inputs, build
from trireme.engine.geometry import Geometry
from trireme.engine.plan import Limits, Shares, UnitPlan
from trireme.engine.planner import choose as choose_module
from trireme.engine.planner.choose import choose, lower_bounds, ways_to_share
from trireme.engine.planner.predict import Batch, predict, predict_between
from trireme.engine.planner.rule import Strategy, Wanted, shortage, simple_plan
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.engine.planner.variants import divided_losses, fuller, in_peers, moves
from trireme.engine.step import evaluate, train_step

MIB = 1 << 20


def deal(cfg, plan, gpus):
    return plan.dealt(gpus, cfg.tied)


DEEP = replace(LLAMA, n_layers=8)


def test_blocks_are_dealt_in_turn():
    of = lambda made: [unit.gpu for unit in made.units]
    assert of(deal(DEEP, gpu_plan(DEEP), 3)) == [0, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert of(deal(replace(DEEP, tied=True), gpu_plan(DEEP), 3)) == [2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    halves = deal(replace(DEEP, halves=True), gpu_plan(DEEP, halves=True), 2)
    assert of(halves) == [0, *(0, 0, 1, 1) * 4, 0]
    again = deal(DEEP, deal(DEEP, gpu_plan(DEEP), 3), 1)
    assert of(again) == [0] * 10


def test_equal_units_of_a_gpu_stay_one_object():
    made = deal(DEEP, gpu_plan(DEEP), 3)
    assert len(made.distinct) == 3
    assert len(deal(DEEP, made, 2).distinct) <= 6


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("n_micro", [4, 8])
def test_equal_blocks_take_the_time_of_a_filled_and_drained_relay(gpus, n_micro):
    """L M / N slots each way, and N - 1 more for the first and the last to come through."""
    seconds = {"forward": 1.0, "backward": 3.0}
    of_a_block = lambda task: seconds.get(task.kind, 0.0) if task.of.startswith("block") else 0.0
    made = deal(DEEP, gpu_plan(DEEP, n_micro=n_micro, units=(UnitPlan(x="host"),) * 10, window=4), gpus)
    queues = SimulatedQueues(of_a_block, H200, gpus)
    e = build(DEEP, made, LIMITS, queues)
    for step in (1, 2):
        queues.begin()
        train_step(e, [Inputs(24, 20, 300)] * n_micro, step, 0.0)
        taken = queues.time()
    slots = 8 * n_micro / gpus + gpus - 1
    assert taken == pytest.approx(4.0 * slots, rel=0.01)


def test_two_gpus_are_nearly_twice_as_fast():
    one = plan(SEVEN_B, UnitPlan("host", "host", x="host"), tokens=8192, n_micro=4, between="host", window=3)
    rates, seconds = replace(H200, host=1.3e-5), {}
    for gpus in (1, 2, 4):
        batch = Batch(8192, 2048, 4 * gpus)
        found = predict(SEVEN_B, deal(SEVEN_B, replace(one, n_micro=4 * gpus), gpus), rates, batch, roughly=True)
        seconds[gpus] = found.step_s
        assert found.busy["compute"] < found.step_s
    assert seconds[2] < 2 / 1.8 * seconds[1]
    assert seconds[2] > seconds[1]  # each has as many tokens


def test_the_planner_deals_and_fills_each_gpu():
    limits = Limits(160 * MIB, 2000 * MIB, 2)
    wanted = Wanted(((512, 4), (256, 8)), document=256, gpus=2)
    first = simple_plan(SMALL, limits, wanted)
    choice = choose(SMALL, limits, H200, wanted)
    for made in (first, choice.plan):
        assert made.gpus == 2
        assert made.between == "host"
        assert fits(Geometry.of(SMALL, made), made, limits)
    assert choice.found.step_s * (1 + 1e-9) >= max(choice.found.busy.values())
    begun = choose(SMALL, replace(limits, gpus=1), H200, replace(wanted, gpus=1), begun=choice.plan).plan
    assert begun.gpus == 1
    assert [u.state == "gpu" or u.update == "gpu" for u in begun.units] == [
        u.state == "gpu" or u.update == "gpu" for u in choice.plan.units
    ]


def test_where_ram_is_short_inputs_are_at_home_on_their_gpus():
    """Each GPU has those of its own blocks: a plan fits that has no room for them in RAM."""
    wanted = Wanted(((512, 8),), document=512, gpus=2, placement="host")
    roomy = Limits(300 * MIB, 4000 * MIB, 2)
    low = simple_plan(SMALL, roomy, wanted, Strategy("host"))
    assert all(unit.x == "host" for unit in low.units)
    short = replace(roomy, host=usage(Geometry.of(SMALL, low), low)["host"] - 8 * MIB)
    choice = choose(SMALL, short, H200, wanted)
    geo = Geometry.of(SMALL, choice.plan)
    assert {unit.x for unit in choice.plan.units[1:-1]} == {"gpu"}
    assert choice.plan.units[-1].x == "host"
    assert fits(geo, choice.plan, short)
    batch = Batch(512, 512, 8)
    assert max(lower_bounds(geo, choice.plan, H200, batch).values()) <= choice.found.step_s


LINKED = replace(H200, peer=3e11, host=1.3e-5)


def test_with_peer_access_outputs_stay_on_gpus(monkeypatch):
    """They move by peer copies where that fits and is faster; else through RAM, as without peer access."""
    monkeypatch.setattr(choose_module, "WORK", 400)
    wanted, plain = Wanted(((512, 4),), document=256, gpus=2), [Strategy()]
    limits = Limits(200 * MIB, 2000 * MIB, 2)
    linked, apart = (
        choose(SMALL, limits, rates, wanted, strategies=plain) for rates in (LINKED, replace(LINKED, peer=0.0))
    )
    assert (linked.plan.between, apart.plan.between) == ("gpu", "host")
    assert linked.found.step_s < apart.found.step_s
    assert linked.found.busy["peer"] > 0
    assert "outputs of layers go to the next GPU by peer copies, not through RAM" in linked.because
    assert (
        "outputs of layers go to the next GPU through RAM: the GPUs have no access to each other's memory"
        in apart.because
    )
    begun = choose(SMALL, limits, replace(LINKED, peer=0.0), wanted, linked.plan, plain)
    assert begun.plan.between == "host"
    many = Wanted(((256, 200),), document=256, gpus=2, mode="backward")
    tight = Limits(160 * MIB, 2000 * MIB, 2)
    assert simple_plan(SMALL, tight, replace(many, peers=True)).between == "host"


def test_peer_copies_spare_ram_and_the_bus():
    """Within a pass of full speed the step takes no longer, and less where RAM's bandwidth is what binds."""
    host = deal(SEVEN_B, plan(SEVEN_B, UnitPlan("host", "host", x="gpu"), tokens=8192, n_micro=8, window=3), 2)
    peer, batch = replace(host, between="gpu"), Batch(8192, 2048, 8)
    busy = {}
    for name, made in (("host", host), ("peer", peer)):
        found = predict(SEVEN_B, made, LINKED, batch, roughly=True)
        busy[name] = found.busy
        slow = predict(SEVEN_B, made, replace(LINKED, dram=6e10, adam=2e9), batch, roughly=True)
        busy[name, "slow"] = slow.step_s
    assert busy["peer"]["dram"] < busy["host"]["dram"]
    assert busy["peer"]["h2d"] < busy["host"]["h2d"]
    assert busy["peer", "slow"] < busy["host", "slow"]


def test_peer_copies_without_a_link_of_their_own_take_the_bus():
    made = replace(deal(SEVEN_B, plan(SEVEN_B, UnitPlan("host", "host", x="gpu"), window=3), 2), between="gpu")
    seconds = lambda peer: predict(SEVEN_B, made, replace(H200, peer=peer), Batch(16384, 2048, 2)).busy["h2d"]
    assert seconds(5e10) > seconds(3e11)


def test_spare_memory_of_a_peer_holds_what_the_heads_gpu_would_recompute():
    """The GPU of a large head is full, the other has room beside all that it keeps itself; the simulator says what
    that gains, and nothing more of RAM or PCIe is used."""
    rates = replace(LINKED, adam=1e12, dram=1e14, host=0.0)  # computation is the limit
    cfg = replace(SMALL, vocab=256000)
    first = deal(cfg, plan(cfg, UnitPlan("host", "host", x="gpu"), tokens=4096, n_micro=4, window=3), 2)
    first, batch = replace(first, between="gpu"), Batch(4096, 2048, 4)
    geo = Geometry.of(cfg, first)
    full, other = each_usage(geo, first)[0]
    saved = 4 * 3 * geo.saved_layout(1, tuple(geo.saved_names(geo.kinds[1])), 4096).span
    assert full - other > saved
    limits, steps = Limits(full + (24 << 20), 1 << 40, 2), moves(geo, batch, rates)
    found = fitting(in_peers, geo, first, limits, steps)
    assert all(fits(geo, each, limits) for each in found)
    assert any(unit.lent for each in found for unit in each.units)
    assert not any(unit.names("host") for each in found for unit in each.units)
    before, *after = (predict(cfg, each, rates, batch) for each in (first, *found))
    best = min(after, key=lambda found: found.step_s)
    assert best.step_s < before.step_s
    assert best.busy["dram"] == before.busy["dram"]
    assert {"peer_out", "peer_in"} <= {span.queue for span in best.spans}


def test_a_full_gpu_makes_room_for_what_a_peer_saves():
    """Its resident weights are streamed instead, or there is no buffer for copies in flight."""
    unit = UnitPlan("host", "host", resident=True)
    cfg = replace(SMALL, n_layers=24)
    first = replace(deal(cfg, plan(cfg, unit, tokens=4096, n_micro=4), 2), between="gpu")
    geo, batch = Geometry.of(cfg, first), Batch(4096, 2048, 4)
    used = each_usage(geo, first)[0]
    limits = Limits(4 << 30, 1 << 40, 2, less=((4 << 30) - used[0], 0))
    found = fitting(in_peers, geo, first, limits, moves(geo, batch, LINKED))
    assert all(fits(geo, each, limits) for each in found)
    lent = [each for each in found if any(unit.lent for unit in each.units)]
    assert lent
    assert all(unit.gpu == 0 and unit.peer == 1 and not unit.resident for p in lent for unit in p.units if unit.lent)


def test_a_full_gpu_leaves_room_for_buffers_on_their_way_to_a_peer():
    """All that it saves is in the peer's memory, where its own has room for some and then for no buffer."""
    cfg = replace(SMALL, n_layers=6)
    first = replace(deal(cfg, plan(cfg, UnitPlan("host", "host"), tokens=4096, n_micro=4), 2), between="gpu")
    geo, batch = Geometry.of(cfg, first), Batch(4096, 2048, 4)
    names, used = set(geo.saved_names(geo.kinds[1])), each_usage(geo, first)[0]
    room = first.swap_slots * geo.saved_layout(1, tuple(geo.saved_names(geo.kinds[1])), 4096).span + MIB
    limits = Limits(8 << 30, 1 << 40, 2, less=((8 << 30) - used[0] - room, 0))
    found = fitting(in_peers, geo, first, limits, moves(geo, batch, LINKED))
    assert all(fits(geo, each, limits) for each in found)
    kept = [[set(unit.names("peer")) for unit in each.units[1:-1] if unit.gpu == 0] for each in found]
    assert [names] * 3 in kept


@pytest.mark.full
def test_memory_that_another_process_leaves_on_one_of_two_equal_gpus_is_used(monkeypatch):
    """Both compute as many layers, and the roomier one saves for the other."""
    monkeypatch.setattr(choose_module, "WORK", 400)
    rates = replace(LINKED, adam=1e12, dram=1e14, host=0.0)  # computation is the limit
    wanted = Wanted(((4096, 4),), document=2048, gpus=2)
    limits = Limits(4000 * MIB, 1400 * MIB, 2, less=(3400 * MIB, 0))
    lending, alone = (
        choose(SMALL, limits, rates, replace(wanted, lending=lends), strategies=[Strategy()]) for lends in (True, False)
    )
    assert {unit.gpu for unit in lending.plan.units if unit.lent} == {0}
    assert not any(unit.lent for unit in alone.plan.units)
    assert lending.found.step_s < 0.995 * alone.found.step_s
    assert lending.found.busy["dram"] < alone.found.busy["dram"]
    geo = Geometry.of(SMALL, lending.plan)
    for gpu, used in enumerate(each_usage(geo, lending.plan)[0]):
        assert used <= limits.of(gpu)
    assert any("are swapped to memory of other GPUs" in said for said in lending.because)


@pytest.mark.parametrize("cfg", [SMALL, replace(ADAPTED, n_layers=24)], ids=["state", "frozen weights"])
def test_each_gpu_is_filled_with_what_its_own_units_store(cfg):
    """With state unless updates must stay where they are; the rule stops where the fullest GPU is full."""
    limits = Limits(2000 * MIB, 8000 * MIB, 2, less=(1700 * MIB, 0))
    first = simple_plan(cfg, limits, Wanted(((512, 4),), document=256, gpus=2, peers=True))
    geo = Geometry.of(cfg, first)
    stored = lambda made, gpu: [unit.base if cfg.lora else unit.state for unit in made.units if unit.gpu == gpu]
    assert "host" in stored(first, 1)
    (filled,) = fitting(fuller, geo, first, limits, True)
    assert fits(geo, filled, limits)
    assert set(stored(filled, 1)) == {"gpu"}
    assert "host" in stored(filled, 0)
    assert bool(fitting(fuller, geo, first, limits, False)) == bool(cfg.lora)


@pytest.mark.full
def test_equal_gpus_of_which_one_has_little_memory_left_divide_layers_by_it(monkeypatch):
    """Where that is faster: a short step and a slow CPU, since more of the state then stays on GPUs."""
    monkeypatch.setattr(choose_module, "WORK", 400)
    rates = replace(LINKED, adam=3e8, dram=3e8 * 34)
    wanted, limits = Wanted(((512, 2),), document=512, gpus=2), Limits(2000 * MIB, 2000 * MIB, 2, less=(1700 * MIB, 0))
    assert ways_to_share(SMALL, limits, rates, wanted) == [None, Shares((300 * MIB, 2000 * MIB), 1)]
    choice = choose(SMALL, limits, rates, wanted, strategies=[Strategy()])
    blocks = Counter(unit.gpu for unit in choice.plan.units[1:-1])
    assert blocks[1] > blocks[0] > 0
    assert choice.because[-1].startswith("one GPU has less free memory than another (")
    in_turn = choose(SMALL, replace(limits, gpu=300 * MIB, less=()), rates, wanted, strategies=[Strategy()])
    assert choice.found.step_s < 0.9 * in_turn.found.step_s


def test_losses_in_turn_take_the_memory_of_what_peers_save():
    """As much of it as they need."""
    names = tuple(Geometry.of(SMALL, gpu_plan(SMALL)).saved_names("block"))
    unit = UnitPlan("host", "host", saved=tuple((name, "peer") for name in names), peer=1)
    dealt = deal(SMALL, plan(SMALL, replace(unit, saved=(), peer=0), tokens=4096, n_micro=4), 2)
    of_first = {u for u, each in enumerate(dealt.units) if each.gpu == 0 and 0 < u < SMALL.n_units - 1}
    first = replace(dealt, between="gpu").changed(of_first, saved=unit.saved, peer=1)
    geo = Geometry.of(SMALL, first)
    used = each_usage(geo, first)[0]
    tight = Limits(used[1], 1 << 40, 2)
    found = fitting(divided_losses, geo, first, tight)
    assert found
    for each in found:
        assert fits(geo, each, tight)
        assert 0 < sum(unit.lent for unit in each.units) < len(of_first)


def test_losses_of_a_large_vocabulary_are_divided_over_gpus(monkeypatch):
    """Where that is faster; a begun run goes on with another choice, since its bits are the same."""
    monkeypatch.setattr(choose_module, "WORK", 400)
    cfg, rates = replace(SMALL, vocab=64000), replace(LINKED, adam=1e12, dram=1e14, host=0.0)
    wanted, limits = Wanted(((4096, 8),), document=2048, gpus=2), Limits(4 << 30, 1 << 40, 2)
    choose_for = lambda cfg, begun=None, rates=rates: choose(cfg, limits, rates, wanted, begun, [Strategy()])
    choice = choose_for(cfg)
    assert set(choice.plan.losses) == {0, 1}
    said = [each for each in choice.because if each.startswith("GPUs ")]
    assert said == [
        f"GPUs {choice.plan.losses[0]}, {choice.plan.losses[1]} compute the losses of micro-batches in turn, each with "
        "a copy of the head's weights"
    ]
    geo, batch = Geometry.of(cfg, choice.plan), Batch(4096, 2048, 8)
    assert fits(geo, choice.plan, limits)
    alone = predict(cfg, replace(choice.plan, losses=()), rates, batch, roughly=True)
    assert choice.found.step_s < 0.99 * alone.step_s
    assert choice.found.busy["compute"] < alone.busy["compute"]
    assert choose_for(cfg, replace(choice.plan, losses=())).plan.losses == choice.plan.losses
    assert choose_for(cfg, choice.plan, replace(rates, peer=0.0)).plan.losses == ()
    unequal = replace(rates, others=(replace(rates, matmul=rates.matmul / 2),))
    assert choose_for(cfg, rates=unequal).plan.losses == ()
    assert choice.plan.dealt(3, cfg.tied, peers=True).losses == ()


def test_an_evaluation_takes_its_part_of_divided_losses():
    cfg = replace(SMALL, vocab=64000)
    made = replace(deal(cfg, plan(cfg, UnitPlan("host", "host"), tokens=4096, n_micro=8), 2), between="gpu")
    batch, rates = Batch(4096, 2048, 8), replace(LINKED, host=0.0)
    one, both = (predict_between(cfg, replace(made, losses=of), rates, batch, evaluate) for of in ((0,), (1, 0)))
    apart = predict_between(cfg, made, rates, batch, evaluate)
    assert one.busy["compute"] == pytest.approx(apart.busy["compute"])
    assert both.step_s < one.step_s


UNEQUAL = replace(H200, others=(replace(H200, matmul=H200.matmul / 2, copy=H200.copy / 2),))


def test_unequal_gpus_have_blocks_by_their_speed_in_even_distances():
    made = gpu_plan(DEEP).dealt(2, False, shares=Shares((3.0, 1.0), 0))
    assert [unit.gpu for unit in made.units] == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert made.dealt(2, False) == made, "a begun run keeps it"
    tied = gpu_plan(replace(DEEP, tied=True)).dealt(3, True, shares=Shares((1.0, 2.0, 1.0), 1))
    assert [unit.gpu for unit in tied.units] == [1, 1, 0, 2, 1, 1, 0, 2, 1, 1]
    wanted, limits = Wanted(((512, 4),), document=256, gpus=2), Limits(400 * MIB, 2000 * MIB, 2, less=(0, 200 * MIB))
    by_speed, by_memory = ways_to_share(DEEP, limits, UNEQUAL, wanted)
    assert by_speed.head == by_memory.head == 0
    assert sum(by_speed.blocks) == pytest.approx(8)
    assert 1 < by_speed.blocks[0] / by_speed.blocks[1] < 2, "the head counts"
    assert by_memory.blocks == (400 * MIB, 200 * MIB)


@pytest.mark.full
def test_unequal_gpus_are_planned_within_the_memory_of_each(monkeypatch):
    monkeypatch.setattr(choose_module, "WORK", 400)
    limits = Limits(300 * MIB, 2000 * MIB, 2, less=(0, 120 * MIB))
    wanted, plain = Wanted(((512, 8),), document=256, gpus=2), [Strategy()]
    choice = choose(SMALL, limits, UNEQUAL, wanted, strategies=plain)
    geo = Geometry.of(SMALL, choice.plan)
    for gpu, used in enumerate(each_usage(geo, choice.plan)[0]):
        assert used <= limits.of(gpu)
    blocks = Counter(unit.gpu for unit in choice.plan.units[1:-1])
    assert blocks[0] > blocks[1]
    batch = Batch(512, 256, 8)
    assert max(lower_bounds(geo, choice.plan, UNEQUAL, batch).values()) <= choice.found.step_s
    in_turn = predict(SMALL, choice.plan.dealt(1, False).dealt(2, False), UNEQUAL, batch, roughly=True)
    assert choice.found.step_s < in_turn.step_s
    assert any(said.startswith("GPUs are unequal (") for said in choice.because)
    build(SMALL, choice.plan, limits, SimulatedQueues(lambda task: 0.0, UNEQUAL, 2)).close()
    again = choose(SMALL, limits, UNEQUAL, wanted, choice.plan, plain).plan
    assert [unit.gpu for unit in again.units] == [unit.gpu for unit in choice.plan.units]


def test_a_refusal_names_the_gpu_that_lacks_memory():
    """Of equal GPUs, one of which another process uses."""
    made = deal(SMALL, plan(SMALL, UnitPlan("gpu", "gpu", x="gpu"), tokens=4096, n_micro=4, window=3), 2)
    geo = Geometry.of(SMALL, made)
    used = each_usage(geo, made)[0]
    limits = Limits(max(used) + (4 << 30), 1 << 40, 2, less=(max(used) + (4 << 30) - used[0] + MIB, 0))
    said = f"{rounded_up(used[0])} of memory of GPU 0, the limit is {rounded_up(used[0] - MIB)}"
    assert shortage(geo, made, limits) == said
    assert not fits(geo, made, limits)
