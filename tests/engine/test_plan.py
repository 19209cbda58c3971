"""Plans: what they estimate is what is allocated, what cannot fit is refused, and files of plans are checked."""

import json
import re
from dataclasses import replace

import pytest
from engines import of, write_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import LAUGHS

from trireme.engine.buffers import fits, usage
from trireme.engine.build import build
from trireme.engine.geometry import Geometry
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import MARGIN, Wanted, largest, simple_plan, spread
from trireme.engine.planner.simulate import SimulatedQueues
from trireme.models.config import InputError

SMALL = of("llama", hidden_size=256, num_hidden_layers=8, head_dim=64, intermediate_size=688, vocab_size=1000)
RATES = Rates(matmul=1e14, copy=1e12, h2d=2e10, d2h=2e10, adam=2e9, dram=6e10)
MIB = 1 << 20


def plan_for(gpu: int, ram: int, **more) -> Plan:
    wanted = Wanted(((512, 2), (256, 4), (64, 16)), record=1 << 16)
    return simple_plan(SMALL, Limits(gpu, ram), replace(wanted, **more))


def test_equal_plans_and_models_have_one_hash():
    """Whether equal units are one object or not: both are looked up by a cached hash."""
    plan = plan_for(100 * MIB, 100 * MIB)
    apart = replace(plan, units=tuple(map(replace, plan.units)))
    assert apart.distinct == plan.distinct == plan.changed((), x="gpu").distinct
    assert (apart, hash(apart)) == (plan, hash(plan))
    assert hash(replace(SMALL, layers=SMALL.layers[:7])) != hash(replace(SMALL)) == hash(SMALL)


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(("forward", "backward")), st.sampled_from((32, 8)))
def test_a_plan_fits_or_is_refused_with_the_way_out(gpu, ram, mode, bits):
    limits = {"gpu": gpu * MIB, "ram": ram * MIB}
    try:
        plan = plan_for(**limits, mode=mode, adam_bits=bits)
    except DoesNotFit as refusal:
        way_out = re.findall(r"(--gpu-memory|--ram) by ([\d.]+) MiB", str(refusal))
        assert way_out
        for option, amount in way_out:  # which is enough, and no more than that and a margin
            tier = {"--gpu-memory": "gpu", "--ram": "ram"}[option]
            lack = refusal.need[tier] - limits[tier]
            assert 0 <= float(amount) * MIB - MARGIN[tier] * lack < 0.02 * MIB
            limits[tier] += int(float(amount) * MIB)
        plan_for(**limits, mode=mode, adam_bits=bits)
        return
    geo = Geometry.of(SMALL, plan)
    estimated = usage(geo, plan)
    assert fits(geo, plan, Limits(**limits))
    e = build(SMALL, plan, Limits(**limits), SimulatedQueues(lambda *task: 0.0, RATES))
    for tier in limits:
        assert e.memory.used_bytes(tier) == pytest.approx(estimated[tier], abs=4096 * 200)
        assert e.memory.used_bytes(tier) <= limits[tier]


def test_with_room_everything_is_on_the_gpu():
    plan = plan_for(1 << 30, 1 << 30)
    assert {(u.weights, u.state) for u in plan.units} == {("gpu", "gpu")}
    assert all(u.saved for u in plan.units[1:-1])  # and nothing is recomputed


def test_without_room_the_ssd_is_home():
    plan = plan_for(64 * MIB, 26 * MIB)
    assert "ssd" in {u.state for u in plan.units}


def test_spread_is_even():
    assert spread(10, 5) == {0, 2, 4, 6, 8}
    assert spread(10, 0) == frozenset()
    assert len(spread(97, 31)) == 31


@given(st.integers(0, 40), st.integers(0, 40))
def test_bisection_gives_the_largest_that_fits(n, most):
    assert largest(n, lambda k: k <= most) == min(n, most)


def test_gradients_that_do_not_wait_take_few_slots():
    """In RAM those of all blocks wait for their norm, unless there is none or they wait on the SSD."""
    all_wait = plan_for(64 * MIB, 300 * MIB, placement="ssd")
    geo, less = Geometry.of(SMALL, all_wait), {"backward": dict(mode="backward"), "ssd": dict(gradients="ssd")}
    block = geo.weights[1].span
    for how in less.values():
        plan = replace(all_wait, late_moments=(), **how)
        assert usage(geo, all_wait)["ram"] - usage(geo, plan)["ram"] > (SMALL.n_layers - plan.ram_window - 1) * block


def test_micro_batches_one_after_the_other_store_the_activations_of_one():
    plan = plan_for(1 << 30, 1 << 30).changed(range(SMALL.n_units), x="gpu", saved=(("qkv", "gpu"),))
    geo, four = Geometry.of(SMALL, plan), replace(plan, n_micro=4)
    stored = geo.x_bytes(plan.tokens) + geo.saved_layout(1, ("qkv",), plan.tokens).span
    freed = usage(geo, four)["gpu"] - usage(geo, replace(four, accumulate=True))["gpu"]
    sums = sum(layout.span for layout in geo.gradients)
    assert freed > 3 * 8 * stored - sums
    tied = replace(SMALL, tied=True)
    with pytest.raises(InputError, match="tied"):
        build(tied, replace(four, accumulate=True), Limits(1 << 40, 1 << 40), SimulatedQueues(lambda *task: 0.0, RATES))


def test_a_plan_survives_its_file(tmp_path):
    plan = plan_for(64 * MIB, 40 * MIB)
    write_plan(plan, tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


STORED = {"weights": "ram", "state": "ram"}
NO_UNITS = [  # of which a plan has one
    {"weights": "gpu", "state": "ram"}, {"weights": "tape", "state": "ram"}, {"weights": ["ram"], "state": "ram"},
    {"weights": "ssd", "state": "ssd", "update": "gpu"}, STORED | {"update": "tpu"}, STORED | {"saved": [["qkv"]]},
    STORED | {"resident": []}, STORED | {"saved": [[["qkv"], "gpu"]]}, STORED | {"saved": [["qkv", 3]]},
    STORED | {"saved": [["qkv", "gpu"], ["qkv", "ram"]]}, STORED | {"gpu": -1}, STORED | {"gpu": 1 << 40},
    STORED | {"gpu": "1"}, STORED | {"saved": [["qkv", "peer"]]}, STORED | {"x": "peer"},
    STORED | {"peer": 64, "saved": [["qkv", "peer"]]},
]  # fmt: skip
NO_PLANS = [
    *({"units": [unit]} for unit in NO_UNITS), {"units": 3}, {"color": "blue"}, {"tokens": 0}, {"tokens": 64.0},
    {"units": [STORED | {"update": "gpu"}], "mode": "backward"}, {"mode": "backward", "gradients": "ssd"},
    {"mode": "serial"}, {"mode": {}}, {"n_micro": "x"}, {"n_micro": True}, {"record": -4096}, {"swap_slots": None},
    {"dtype": "F16"}, {"adam_bits": "8"}, {"late_moments": 3}, {"late_moments": [["ram"]]}, {"halves": []},
    {"adam_bits": 32.0}, {"adam_bits": [32]}, {"dtype": ["BF16"]}, {"tokens": 10**400}, {"record": 1 << 60},
    {"slices": 0}, {"slices": 2}, {"slices": 2, "halves": True, "between": "ram"},
    {"slices": 2, "halves": True, "hosts": 2}, {"accumulate": 1}, {"accumulate": True, "hosts": 2},
    {"accumulate": True, "units": [STORED | {"gpu": u} for u in range(2)]},
    {"slices": 2, "halves": True, "units": [{"x": "ram", "gpu": u // 3} for u in range(4)]},
    {"units": [{"gpu": u % 2, "x": "ram"} for u in range(4)], "between": "ram", "halves": True},
    {"units": [{"gpu": u // 2, "x": "ram"} for u in range(5)], "between": "ram", "halves": True},
]  # fmt: skip


ENDLESS = [
    f"units: []\nn_micro: 1\ntokens: 1\n{key}: {LAUGHS}\n" for key in ("tokens", "dtype", "late_moments", "units")
]
FILES = [  # None: there is none
    *(json.dumps({"units": [STORED], "tokens": 64, "n_micro": 1} | change) for change in NO_PLANS), *ENDLESS,
    b"\x89PNG\r\n\x1a\n\xff", b"\x00", b"[" * 1_000, b"", "{}", None,
]  # fmt: skip


@pytest.mark.parametrize("content", FILES, ids=lambda content: repr(content)[:60])
def test_a_file_that_is_no_plan_is_refused(tmp_path, content):
    path = tmp_path / "plan.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    culprit = {"{}": "plan.yaml.*units", None: "--plan .*plan.yaml"}.get(content, "plan")
    with pytest.raises(InputError, match=culprit) as error:
        Plan.load(path)
    assert len(str(error.value)) < 1000


def test_a_step_may_have_any_number_of_micro_batches():
    """Room on the GPU for what all of them leave from unit to unit is not asked for where there is none."""
    plans = [plan_for(24 * MIB, 300 * MIB, sizes=((256, n),), mode="backward") for n in (2, 40, 200)]
    assert [plan.between for plan in plans] == ["gpu", "ram", "ram"]
    geo = Geometry(SMALL, "BF16")
    with pytest.raises(DoesNotFit, match="GPU memory|RAM"):
        plan_for(24 * MIB, 12 * MIB, sizes=((256, 200),), placement="ram")
    assert usage(geo, plans[2])["gpu"] - usage(geo, plans[1])["gpu"] < 4 * MIB
