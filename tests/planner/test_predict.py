"""Predictions: the drive and the memory are shared as said, faster is never slower, and measured steps are met."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import ADAPTED, H200, ONE_B, RATES, SEVEN_B, SMALL, llama, plan

from trireme.engine.buffers import usage
from trireme.engine.geometry import ADAM_BYTES, Geometry
from trireme.engine.plan import Limits, Plan, UnitPlan
from trireme.engine.planner.predict import WITHIN, Batch, least_seconds, predict, unit_seconds
from trireme.engine.planner.rates import Rates, assume, rates_of
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.simulate import is_copy
from trireme.engine.planner.sizes import find_model
from trireme.engine.tuning.chosen import adapted, targets
from trireme.models.config import Lora
from trireme.models.families.packing import NF4
from trireme.models.sizes import measure, shapes


def test_a_drive_that_binds_is_never_idle():
    """Reading and writing share it: a step takes the sum of both, and no longer."""
    slow = replace(RATES, ssd_read=1e9, ssd_write=5e8)
    p = plan(SMALL, UnitPlan("ram", "ssd"), tokens=256, record=1 << 22, state_slots=12)
    found = predict(SMALL, p, slow, Batch(256, 256, 2))
    state = sum(Geometry(SMALL, "BF16").state_span(u, p.record) for u in range(SMALL.n_units))
    assert (found.ssd_read, found.ssd_written) == (state, state)
    assert found.bound == "ssd"
    assert found.step_s == pytest.approx(state / 1e9 + state / 5e8, rel=0.02)


def test_what_a_step_waits_for_does_not_wait_behind_records():
    """Everything on a drive that writes slowly, few slots: only forward leaves it idle."""
    p = plan(ONE_B, UnitPlan("ssd", "ssd", x="ssd"), n_micro=8, mode="backward", window=1, piece=1)
    rates = replace(RATES, ssd_read=2.8e10, ssd_write=5.6e9, matmul=8e14)
    found = predict(ONE_B, p, rates, Batch(16384, 1024, 8))
    assert found.bound == "ssd"
    assert found.step_s < 1.25 * found.busy["ssd"]


def test_updates_delay_copies_to_the_gpu():
    """As long as both run, by the measured share: not those back, and none where the GPU updates."""
    rates = replace(RATES, reading=0.7)
    h2d = lambda update, adam, way="h2d": predict(
        SMALL, plan(SMALL, UnitPlan("ram", "ram", update), tokens=512), replace(rates, adam=adam), Batch(512, 256, 2)
    ).busy[way]
    alone, beside, slower = h2d("cpu", 1e14), h2d("cpu", 2e9), h2d("cpu", 1e8)
    assert 1.05 * alone < beside < slower * 1.001 < alone / 0.7 * 1.01
    assert h2d("cpu", 2e9, "d2h") == pytest.approx(h2d("cpu", 1e14, "d2h"))
    assert h2d("gpu", 2e9) == pytest.approx(h2d("gpu", 1e14))


def test_copies_delay_updates():
    """Each byte by 1 / dram seconds: on the way up weights, on the way down weights and gradients."""
    rates = replace(RATES, concurrent=1.0, latency=0.0)
    p = plan(SMALL, UnitPlan("ram", "ram"), tokens=512)
    cpu = lambda dram: predict(SMALL, p, replace(rates, dram=dram), Batch(512, 256, 2)).busy["cpu"]
    geo = Geometry(SMALL, "BF16")
    weights, alone = sum(layout.span for layout in geo.weights), sum(geo.numel) / rates.adam
    assert cpu(1e20) == pytest.approx(alone)
    assert cpu(6e10) == pytest.approx(alone + weights / 6e10, rel=0.01)  # updated under forward, beside weights alone


def test_copies_delay_updates_with_8_bit_moments_by_what_exceeds_the_bandwidth_of_ram():
    """These read and write 16 bytes a parameter, where those with fp32 moments take all of it with 28."""
    rates = replace(RATES, adam=1e9, concurrent=1.0, latency=0.0, dram=4e10)
    geo, batch = Geometry(SMALL, "BF16", 8), Batch(512, 256, 2)
    n, weights = sum(geo.numel), sum(layout.span for layout in geo.weights)
    p = plan(SMALL, UnitPlan("ram", "ram"), tokens=512, adam_bits=8)
    for adam8 in (5e8, 1.5e9, 1.7e9, 2e9):
        alone, spare = n / adam8, max(0.0, 28e9 - 16 * adam8)
        delay = max(0.0, weights - spare * alone) / 4e10
        cpu = predict(SMALL, p, replace(rates, adam8=adam8), batch).busy["cpu"]
        assert cpu == pytest.approx(alone + delay, rel=0.01)
        assert (delay > 0) == (adam8 > 1.6e9)
    assert [rates.with_moments(bits).spare for bits in (32, 16, 8)] == [0, 8e9, 12e9]  # at the rate of fp32 moments


def test_a_plan_that_uses_a_drive_needs_one():
    with pytest.raises(ValueError, match="drive"):
        predict(SMALL, plan(SMALL, UnitPlan("ssd", "ssd")), H200, Batch(256, 256, 2))


def test_a_frozen_matrix_has_one_product_in_backward():
    """Beside recomputation and what is read and written, of LoRA about half of the backward's matmuls are left."""
    fast = replace(RATES, copy=1e15, gap=0.0)
    seconds = lambda cfg, kind: sum(
        s for (k, _), s in unit_seconds(cfg, plan(cfg, UnitPlan(), 6), fast, Batch(512, 256, 2)).items() if k == kind
    )
    assert 0.5 < seconds(ADAPTED, "backward") / seconds(SMALL, "backward") < 0.6
    assert 1.0 < seconds(ADAPTED, "forward") / seconds(SMALL, "forward") < 1.05
    assert seconds(ADAPTED, "loss") / seconds(SMALL, "loss") == pytest.approx(2 / 3, rel=1e-3)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        ("matmul", "copy", "h2d", "d2h", "adam", "dram", "ssd_read", "ssd_write", "duplex", "reading", "concurrent")
    ),
    st.floats(1.01, 8),
    st.sampled_from((("gpu", "gpu"), ("ram", "ram"), ("ram", "ssd"), ("ssd", "ssd"))),
    st.sampled_from(("forward", "backward")),
)
def test_faster_is_never_slower(resource, times, placement, mode):
    p = plan(SMALL, UnitPlan(*placement), keep=2, tokens=512, mode=mode, record=1 << 22)
    batch = Batch(512, 256, 2)
    before = predict(SMALL, p, RATES, batch).step_s
    most = 1.0 if resource in ("duplex", "reading", "concurrent") else math.inf
    faster = replace(RATES, **{resource: min(most, getattr(RATES, resource) * times)})
    if resource == "adam":
        faster = replace(faster, dram=faster.dram * times)
    assert predict(SMALL, p, faster, batch).step_s <= before * 1.02
    assert least_seconds(SMALL, p, faster, batch) <= predict(SMALL, p, faster, batch, roughly=True).step_s * 1.0001


MEASURED = [  # seconds of a step on an H200 limited to 24 GiB, 32,768 tokens in sequences of 1,024
    ("on the GPU", ONE_B, plan(ONE_B, UnitPlan()), H200, 0.602),
    ("drive", ONE_B, plan(ONE_B, UnitPlan("ram", "ssd"), 12, window=5, state_slots=69),
     replace(H200, adam=6.04e9, ssd_read=4.24e9, ssd_write=3.75e9), 7.05),
    ("drive, 8 bits", ONE_B, plan(ONE_B, UnitPlan("ram", "ssd"), 13, state_slots=104, adam_bits=8),
     replace(H200, ssd_read=4.36e9, ssd_write=4.0e9), 2.71),
    ("RAM", SEVEN_B, plan(SEVEN_B, UnitPlan("ram", "ram"), 3, mode="backward", record=26320896),
     replace(H200, adam=5.58e9), 2.81),
]  # fmt: skip


@pytest.mark.parametrize(("cfg", "plan", "rates", "seconds"), [m[1:] for m in MEASURED], ids=[m[0] for m in MEASURED])
def test_measured_steps_are_met(cfg, plan, rates, seconds):
    assert predict(cfg, plan, rates, Batch(16384, 1024, 2)).step_s == pytest.approx(seconds, rel=0.05)


def test_a_measured_step_of_a_mixture_is_met():
    """gpt-oss-120b with adapters in 24 GiB of an H200, its base in MXFP4 in RAM: 3.03 s."""
    cfg = find_model("gpt-oss-120b")
    cfg = adapted(cfg, Lora(16, 32.0, targets(cfg, ())))
    rates = Rates(7.77e14, 3.93e12, 5.53e10, 5.53e10, 6.3e9, 1.94e11, duplex=0.9, concurrent=1.0)
    rates = replace(rates, launch_overhead=1.87e-5)
    plan = simple_plan(cfg, Limits(24_581_963_776, 73_861_693_440), Wanted(((8192, 4),), document=4096))
    assert predict(cfg, plan, rates, Batch(8192, 4096, 4)).step_s == pytest.approx(3.03, rel=0.1)


def test_experts_products_are_slower_than_dense_ones_and_small_groups_slower_still():
    cfg = replace(find_model("qwen3-30b"), layers=find_model("qwen3-30b").layers[:1])
    rates = replace(RATES, copy=1e15, gap=0.0)
    batches = [Batch(n, 256, 2) for n in (32768, 512)]
    seconds = lambda batch, **shares: unit_seconds(cfg, plan(cfg, UnitPlan()), replace(rates, **shares), batch)
    for kind, shares in (("forward", dict(grouped=0.1)), ("backward", dict(grouped_add=0.1))):
        long, short = (seconds(batch, **shares)[kind, "block000"] / batch.tokens for batch in batches)
        assert long > 2 * seconds(batches[0])[kind, "block000"] / batches[0].tokens
        assert short > 1.4 * long  # 32 rows an expert, and half a tile of nothing


def test_labels_that_do_not_count_cost_nothing():
    """Of a head that is most of the model."""
    cfg = replace(SMALL, layers=SMALL.layers[:1], vocab=65536)
    p = plan(cfg, UnitPlan(), tokens=4096)
    few, all_ = (unit_seconds(cfg, p, RATES, Batch(4096, 256, 2, share)) for share in (0.25, 1.0))
    assert few["loss", "head"] == pytest.approx(all_["loss", "head"] / 4, rel=0.2)
    assert few | all_ == all_
    lengths = Batch(4096, 1000, 2).lengths
    assert lengths == [1000] * 4 + [96]
    assert Batch(4096, 1024, 2).lengths == [1024] * 4


def test_small_blocks_wait_for_the_host():
    """Kernels cannot be done sooner than they are started; large blocks hide that."""
    for tokens, waits in ((64, True), (65536, False)):
        p, batch = plan(SMALL, UnitPlan(), tokens=tokens), Batch(tokens, 64, 1)
        rates = [replace(RATES, launch_overhead=overhead) for overhead in (0.0, 1e-4)]
        found = [unit_seconds(SMALL, p, each, batch) for each in rates]
        assert (found[0] != found[1]) == waits
        if waits:
            launches = measure.work(SMALL, 1, 64, 64)[1].launches
            assert found[1]["backward", "block000"] == pytest.approx(launches * 1e-4)
            assert found[1]["backward", "block000"] > found[0]["backward", "block000"]


@pytest.mark.parametrize("tokens", [64, 65536])
def test_a_step_takes_as_long_as_the_interpreter_for_its_tasks(tokens):
    """Of small blocks; large ones hide it."""
    p, batch = plan(SMALL, UnitPlan(), tokens=tokens), Batch(tokens, 64, 1)
    alone, handed = (predict(SMALL, p, replace(RATES, launch_overhead=1e-5, task=task), batch) for task in (0.0, 1e-3))
    tasks = (len(alone.spans) + SMALL.n_layers * sum(WITHIN.values())) * 1e-3
    if tokens == 64:
        assert handed.step_s == pytest.approx(tasks + alone.step_s, rel=0.2)
    else:
        assert alone.step_s < handed.step_s < alone.step_s + 0.1 * tasks


def test_half_blocks_take_as_long_as_whole_ones():
    of = lambda kind: shapes.saved_shapes(replace(SMALL, halves=kind != "block"), 1, kind)
    saved = {kind: tuple((name, "gpu") for name in of(kind)) for kind in ("block", *shapes.HALVES)}
    found = {}
    for halves, kinds in ((False, ("block",)), (True, shapes.HALVES)):
        inner = tuple(UnitPlan(saved=saved[kind]) for kind in kinds) * SMALL.n_layers
        cut = Plan((UnitPlan(), *inner, UnitPlan()), 1024, 2, halves=halves)
        found[halves] = unit_seconds(SMALL, cut, RATES, Batch(1024, 256, 2))
    assert sum(found[True].values()) == pytest.approx(sum(found[False].values()))
    assert found[True]["backward", "attn000"] + found[True]["backward", "mlp000"] == pytest.approx(
        found[False]["backward", "block000"]
    )


# ---------------------------------------------------------------- machines that are not at hand


def test_rates_from_what_was_measured():
    """As a benchmark hands them over: infinite where there was nothing to measure."""
    found = rates_of(dict(matmul=7e14, h2d=5e10, d2h=4e10, adam=5e9, ssd_read=math.inf, ssd_write=math.inf, other=1.0))
    assert (found.matmul, found.h2d, found.d2h, found.ssd_read) == (7e14, 5e10, 4e10, 0.0)
    assert found.dram > ADAM_BYTES * found.adam
    assert found.copy > 1e12
    on_cpu = rates_of(dict(matmul=1e11, adam=1e9, h2d=math.inf, duplex=0.8))
    assert on_cpu.copy == on_cpu.dram
    assert on_cpu.duplex == 0.8
    assert on_cpu.h2d == on_cpu.d2h == on_cpu.dram / 2  # a copy in RAM reads and writes all that it moves


def test_copies_take_no_less_time_than_their_bytes_of_ram():
    """Of all GPUs and both ways; where RAM is faster than what copies, nothing changes."""
    p = plan(SMALL, UnitPlan("ram", "ram", update="gpu"), tokens=512)
    slow, usual, fast = (predict(SMALL, p, replace(RATES, dram=dram), Batch(512, 256, 2)) for dram in (5e9, 6e10, 6e11))
    copied = sum(span.nbytes for span in slow.spans if is_copy(span.queue))
    assert slow.busy["dram"] == copied / 5e9
    assert slow.busy["dram"] < slow.step_s < 1.3 * slow.busy["dram"]
    assert slow.bound == "dram"
    assert usual.step_s == fast.step_s < 0.5 * slow.step_s
    eight = predict(SMALL, p.on_gpus(8, tied=False), replace(RATES, dram=3e10), Batch(512, 256, 2))
    assert eight.busy["dram"] < eight.step_s


def test_a_machine_by_its_parts():
    made = assume("gpu=rtx4090, ram=128GiB, ssd=2x2TB@7/5, dram=60")
    assert made.gpu == 24 << 30
    assert made.ram == 128 << 30
    assert made.ssd == 4 * 10**12
    assert (made.rates.ssd_read, made.rates.ssd_write, made.rates.dram) == (14e9, 10e9, 60e9)
    assert made.endurance == pytest.approx(2400e12)
    assert made.limits.gpu < made.gpu
    assert made.limits.ram < made.ram


def test_a_rough_prediction_tells_few_pieces_of_a_gradient_apart():
    """Of a block of 2.4 B parameters that leaves the GPU in 72 pieces."""
    wide = llama(16384, 2, 128, 32768, vocab=61)
    p, batch = plan(wide, UnitPlan("ram", "ram"), tokens=2048, piece=1), Batch(2048, 2048, 2)
    rough, exact = (predict(wide, p, RATES, batch, roughly) for roughly in (True, False))
    assert rough.step_s == pytest.approx(exact.step_s, rel=0.01)
    assert not rough.spans
    assert sum((s.kind, s.label) == ("finish", "block000") for s in exact.spans) > 60


@pytest.mark.parametrize("roughly", [False, True])
def test_a_packed_base_is_decoded_for_each_micro_batch_that_passes_alone(roughly):
    """However many of them are simulated as one."""
    cfg = replace(ADAPTED, packing=NF4, packed=("*layers.*proj.weight",))

    def longer(n: int) -> float:
        together = plan(cfg, UnitPlan(), keep=6, tokens=256, n_micro=n)
        both = together, replace(together, accumulate=True)
        before, after = (predict(cfg, p, RATES, Batch(256, 256, n), roughly).step_s for p in both)
        return after - before

    assert longer(16) == pytest.approx(15 * longer(2), rel=0.01)


def test_streamed_weights_cross_the_bus_for_each_micro_batch_that_passes_alone():
    alone = lambda n: plan(ADAPTED, UnitPlan(base="ram"), tokens=256, n_micro=n, accumulate=True)
    up = lambda n: predict(ADAPTED, alone(n), RATES, Batch(256, 256, n), roughly=True).busy["h2d"]
    assert up(16) == pytest.approx(8 * up(2), rel=0.1)


def test_products_in_fp8_take_its_time_and_that_of_codes():
    """Where multiplying costs little, codes are all that is added; where it is all, each rate has its FLOPs."""
    p, batch = plan(SEVEN_B, UnitPlan("ram", "ram"), keep=3), Batch(16384, 4096, 2)
    unit = lambda on, **rates: unit_seconds(replace(SEVEN_B, fp8=on), p, replace(RATES, gap=0.0, **rates), batch)
    slow, fast = unit(False, copy=1e30), unit(True, copy=1e30, fp8=2 * RATES.matmul)
    last = [name for _, name in slow if name.startswith(("block", "attn", "mlp"))][-1]
    for kind in ("forward", "backward"):
        assert 1.5 < slow[kind, last] / fast[kind, last] <= 2.0
        same = unit(True, copy=1e30, fp8=RATES.matmul * RATES.gemm / RATES.gemm_fp8)[kind, last]
        assert same == pytest.approx(slow[kind, last], rel=1e-9)
        codes = unit(True, fp8=1e40)[kind, last] - unit(True, fp8=1e40, copy=1e30)[kind, last]
        assert codes > unit(False)[kind, last] - slow[kind, last]
    assert slow["loss", "head"] == fast["loss", "head"]


def test_a_base_in_fp8_takes_half_the_bus_and_half_the_ram():
    """But for embedding and head; and what a pass makes of matrices is a task of it, not of each micro-batch."""
    cfg = adapted(SEVEN_B, Lora(8, 16.0, ("q_proj",)))
    p, batch = plan(cfg, UnitPlan(base="ram"), n_micro=2, tokens=4096), Batch(4096, 1024, 2)
    rates = replace(RATES, fp8=2 * RATES.matmul)
    plain, quick = (predict(replace(cfg, fp8=on), p, rates, batch) for on in (False, True))
    assert 0.5 < quick.busy["h2d"] / plain.busy["h2d"] < 0.54
    host = [usage(Geometry.of(replace(cfg, fp8=on), p), p)["ram"] for on in (False, True)]
    assert 0.5 < host[1] / host[0] < 0.54
    made = [(span.label, span.kind) for span in quick.spans if span.kind == "decode"]
    assert len(made) == len(set(made)) == cfg.n_layers  # in backward: forward reads codes as they lie
    whole = predict(replace(SEVEN_B, fp8=True), plan(SEVEN_B, UnitPlan("ram", "ram"), n_micro=2), rates, batch)
    assert sum(span.kind == "decode" for span in whole.spans) == 2 * cfg.n_layers
