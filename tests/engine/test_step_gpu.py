"""On a GPU: a dozen plans leave the same bits as the run that holds everything there."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from engines import (
    FULL,
    RealQueues,
    batches,
    cards,
    check_same,
    deep,
    final_weights,
    gpu_plan,
    lent,
    make,
    of,
    pairs,
    random_plan,
    relayed,
    scored,
    taught,
    train,
)

from trireme.engine import geometry
from trireme.engine.build import make_inputs
from trireme.engine.check.steps import make_batch, random_engine
from trireme.engine.plan import TIERS, Limits, UnitPlan
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import find_model
from trireme.engine.step import train_step
from trireme.engine.tuning.chosen import adapted, targets
from trireme.engine.updates import AdamW
from trireme.models.config import Lora, Teaching
from trireme.models.families.packing import FP8 as FP8_BLOCKS
from trireme.models.families.packing import MODELOPT, MXFP4
from trireme.models.losses.preferences import Preference
from trireme.models.rows import rope_tables
from trireme.models.sizes import narrow, shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("few_rows_in_fp8")]
SMALL = dict(hidden_size=64, num_hidden_layers=4, head_dim=16, intermediate_size=96, vocab_size=128)
CFG = of("llama", **SMALL)
NAMES = tuple(shapes.saved_shapes(CFG, 1))
ALL_HOST = UnitPlan("ram", "ram", saved=tuple((n, "ram") for n in NAMES), x="ram")
ALL_SSD = UnitPlan("ssd", "ssd", saved=tuple((n, "ssd") for n in NAMES), x="ssd")
UNITS = {
    "ram": (UnitPlan("ram", "ram"),) * 6,
    "ssd": (UnitPlan("ssd", "ssd"),) * 6,
    "streamed": (UnitPlan("ram", "ram", update="gpu"),) * 6,
    "swap to host": (ALL_HOST,) * 6,
    "swap to ssd": (ALL_SSD,) * 6,
    "mixed": (UnitPlan(), ALL_HOST, UnitPlan("ram", "ssd"), ALL_SSD, UnitPlan(), UnitPlan("ssd", "ram")),
}


ADAPTED = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True)
MIXTURE = of("qwen3_moe", **SMALL, **EXPERTS)
OF_EXPERTS = dict(lora=Lora(8, 16.0, ("q_proj", "experts")), frozen=("*",))
PACKED = ("*layers.*", "!*.mlp.gate.weight", "!*.1.self_attn.k_proj.weight")
OTHERS = {
    "mixture": MIXTURE,
    "frozen mixture": replace(MIXTURE, frozen=("*.experts.*", "*embed*")),
    "shared expert": of("qwen2_moe", **SMALL, **EXPERTS, shared_expert_intermediate_size=48),
    "adapters of experts in MXFP4": replace(
        of(
            "gpt_oss",
            **SMALL | dict(intermediate_size=32),
            num_local_experts=8,
            num_experts_per_tok=2,
            attention_bias=False,
            sliding_window=None,
            layer_types=[FULL] * 4,
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
        packing=MXFP4,
        packed=MXFP4.globs,
        **OF_EXPERTS,
    ),
    "adapters of fp8 in blocks": replace(
        MIXTURE, packing=replace(FP8_BLOCKS, block=(24, 32)), packed=PACKED, **OF_EXPERTS
    ),
    "adapters of nvfp4": replace(
        MIXTURE, packing=MODELOPT.with_dtypes(("U8", "F8_E4M3", "F32")), packed=PACKED, **OF_EXPERTS
    ),
    "a dense layer among experts": of(
        "glm4_moe",
        **SMALL,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        partial_rotary_factor=1.0,
    ),
    "adapters": replace(CFG, lora=Lora(8, 16.0, ADAPTED), frozen=("*",)),
    "fp8": replace(CFG, fp8=True),
    "fp8 mixture": replace(MIXTURE, fp8=True),
    "fp8 adapters": replace(CFG, fp8=True, lora=Lora(8, 16.0, ADAPTED), frozen=("*",)),
    "fp8, some tensors frozen": replace(CFG, fp8=True, frozen=("*layers.1.*", "*norm*", "*layers.2.mlp*")),
    "frozen tensors": replace(CFG, tied=True, frozen=("*embed*", "*layers.1.*", "*norm*", "*layers.2.mlp*")),
}


@cache
def on_the_gpu(n_micro: int, clip: float, cfg=CFG):
    e = make(
        cfg,
        gpu_plan(cfg, dtype="BF16", n_micro=n_micro, tokens=48),
        RealQueues("cuda", extra=("poison",)),
        AdamW(max_grad_norm=clip),
    )
    return train(e, batches(cfg, 4, n_micro, 48)), final_weights(e)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(
    ("n_micro", "mode", "between"),
    [(1, "forward", "gpu"), (3, "forward", "gpu"), (3, "forward", "ram"), (2, "backward", "gpu")],
)
def test_placement_never_changes_the_numbers(units, n_micro, mode, between):
    if units == "streamed" and mode == "backward":
        pytest.skip("updates on the GPU wait for the norm")
    clip = 0.0 if mode == "backward" else 1.0
    plan = gpu_plan(
        CFG, dtype="BF16", n_micro=n_micro, tokens=48, units=UNITS[units], mode=mode, record=5000, piece=1000
    )
    plan = replace(plan, between=between, late_moments=TIERS if mode == "forward" and n_micro == 3 else ())
    plan = replace(plan, gradients="ssd" if between == "ram" else "ram")
    e = make(CFG, plan, RealQueues("cuda", extra=("poison",)), AdamW(max_grad_norm=clip))
    check_same(e, batches(CFG, 4, n_micro, 48), *on_the_gpu(n_micro, clip))


@pytest.mark.parametrize("between", ["gpu", "ram"])
@pytest.mark.parametrize("units", ["ram", "ssd", "swap to ssd", "mixed"])
@pytest.mark.parametrize(("cfg", "method"), [
    (CFG, "dpo"), (CFG, "kto"), (OTHERS["adapters"], "orpo"), (CFG, "reward"), (OTHERS["adapters"], "reward"),
    (CFG, "classify"),
])  # fmt: skip
def test_documents_are_compared_wherever_they_are(units, between, cfg, method):
    labels = {"reward": 1, "classify": 3}.get(method, 0)
    cfg = replace(cfg, scores=labels, tied=cfg.tied and not labels)
    data = scored(cfg, 3, 3, 48) if labels else pairs(cfg, 3, 3, 48, method == "kto")
    preference = None if method == "classify" else Preference(method)
    check_placed(cfg, data, UNITS[units], between, preference)


def check_placed(cfg, data, units, between, preference=None):
    """Units placed so leave the bits of all on the GPU."""
    plan = gpu_plan(cfg, dtype="BF16", n_micro=3, tokens=48, record=5000, piece=1000)
    alone, e = (
        make(cfg, each, RealQueues("cuda", extra=("poison",)))
        for each in (plan, replace(plan, units=units, between=between, swap_slots=2))
    )
    losses = train(alone, data, preference=preference)
    check_same(e, data, losses, final_weights(alone), preference=preference)
    alone.queues.close()
    alone.close()


@pytest.mark.parametrize("units", ["ram", "mixed"])
@pytest.mark.parametrize("cfg", [CFG, OTHERS["adapters"]])
def test_a_teacher_is_heard_wherever_layers_are(units, cfg):
    cfg = replace(cfg, teaching=Teaching(8, 0.4, 1.5))
    check_placed(cfg, taught(cfg, 3, 3, 48), UNITS[units], "ram")


@pytest.mark.parametrize("n_micro", [1, 3])
@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
def test_half_blocks_are_the_same_to_the_bit(tier, n_micro):
    plan = gpu_plan(CFG, dtype="BF16", n_micro=n_micro, tokens=48, halves=True, window=1, piece=1)
    e = make(CFG, replace(plan, units=(UnitPlan(tier, tier, x=tier),) * 10), RealQueues("cuda", extra=("poison",)))
    check_same(e, batches(CFG, 4, n_micro, 48), *on_the_gpu(n_micro, 1.0))


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("tier", ["ram", "ssd"])
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_unit_is_placed_without_changing_a_bit(name, tier, halves):
    cfg = OTHERS[name]
    plan = gpu_plan(cfg, dtype="BF16", n_micro=2, tokens=48, halves=halves, window=1, record=5000, piece=1000)
    cut, units = plan.cut(cfg), []
    for u in range(cut.n_units):
        inner = 0 < u < cut.n_units - 1
        names = shapes.saved_shapes(cut, 1, shapes.kind(cut, u)) if inner else ()
        saved = tuple((n, tier) for i, n in enumerate(names) if (u + i) % 3)
        units.append(UnitPlan(tier, tier, x=tier, saved=saved, base=tier))
    e = make(cfg, replace(plan, units=tuple(units)), RealQueues("cuda", extra=("poison",)))
    check_same(e, batches(cfg, 4, 2, 48), *on_the_gpu(2, 1.0, cfg))


SLICED = [name for name, cfg in OTHERS.items() if narrow.may_be_sliced(cfg)]


@pytest.mark.parametrize("slices", [2, 3, 8])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", SLICED)
def test_experts_come_in_slices_without_changing_a_bit(name, tier, slices):
    cfg = OTHERS[name]
    plan = gpu_plan(cfg, dtype="BF16", n_micro=2, tokens=48, halves=True, window=1, slices=slices, at_once=slices % 2)
    units = (UnitPlan("ram", "ram", x="ram", base=tier),) * 10
    e = make(cfg, replace(plan, units=units), RealQueues("cuda", extra=("poison",)))
    check_same(e, batches(cfg, 4, 2, 48), *on_the_gpu(2, 1.0, cfg))


@pytest.mark.parametrize("name", [name for name in OTHERS if name.startswith("fp8")])
def test_codes_of_a_pass_are_those_of_each_product(name, monkeypatch):
    """To the bit, made by the GPU, or for frozen weights by the CPU as they are loaded."""
    cfg = OTHERS[name]
    losses, weights = on_the_gpu(2, 1.0, cfg)
    monkeypatch.setattr(narrow, "fp8_groups", lambda cfg, u: [])
    geometry.geometry.cache_clear()
    e = make(cfg, gpu_plan(cfg, dtype="BF16", n_micro=2, tokens=48), RealQueues("cuda", extra=("poison",)))
    assert not any(layout.tensors for layout in e.geo.decoded)
    check_same(e, batches(cfg, 4, 2, 48), losses, weights)
    geometry.geometry.cache_clear()


SEVERAL_GPUS = [
    "dense",
    "mixture",
    "adapters of experts in MXFP4",
    "a dense layer among experts",
    "fp8",
    "fp8 adapters",
]


@pytest.mark.parametrize("name", SEVERAL_GPUS)
@pytest.mark.parametrize("tier", ["gpu", "ram", "ssd"])
@pytest.mark.parametrize("deal", [(0, 1), (1, 0, 0), (3, 1, 0, 2)])
@pytest.mark.parametrize("between", ["ram", "gpu"])
def test_units_on_several_gpus_leave_the_bits_of_one(name, tier, deal, between):
    cfg = OTHERS.get(name, CFG)
    unit = UnitPlan(tier, tier, x="ssd" if tier == "ssd" else "ram", saved=(("qkv", tier),), base=tier)
    plan = gpu_plan(cfg, units=(unit,) * 6, dtype="BF16", n_micro=3, tokens=48, record=5000)
    plan = relayed(plan, deal, between=between)
    plan = lent(plan, "ram") if between == "gpu" else plan
    e = make(cfg, plan, cards(plan.gpus))
    check_same(e, batches(cfg, 4, 3, 48), *on_the_gpu(3, 1.0, cfg))


@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.parametrize("seed", range(24))
def test_any_plan_on_up_to_four_gpus(name, seed):
    cfg, on_gpus = OTHERS.get(name, CFG), dict(dtype="BF16", mode="forward", adam_bits=32, record=5000)
    plan = random_plan(cfg, Random(seed), tokens=48, **on_gpus)
    plan = replace(plan, accumulate=plan.gpus == 1 and name == "dense" and seed % 2 == 0)
    e = make(cfg, plan, cards(plan.gpus))
    check_same(e, batches(cfg, 4, plan.n_micro, 48), *on_the_gpu(plan.n_micro, 1.0, cfg))


TIMES = 8


def steps(cfg, device, dtype, tokens, seq):
    """(loss, norm of gradients) of the same step again and again, which changes no weight."""
    limits = Limits(48 << 30, 16 << 30)
    plan = simple_plan(
        cfg, limits, Wanted(((tokens, 1),), dtype, placement="gpu", on_cuda=device == "cuda", document=seq)
    )
    torch.manual_seed(0)
    with random_engine(cfg, plan, limits, RealQueues(device), None) as e:
        places = [(rope_tables(e.cfg, seq, gpu), gpu) for gpu in e.queues.devices]
        (batch,) = make_batch(e.cfg, tokens, seq, tokens // seq, 1)
        for step in range(TIMES):
            stats = train_step(e, [make_inputs(e.cfg, batch, places)], step + 1, 0.0)
            e.optimizer.flush()
            yield stats.loss, stats.grad_norm


@pytest.mark.parametrize("seq", [8192, 1024])
@pytest.mark.parametrize(
    ("name", "rank", "fp8"),
    [
        ("llama-8b", 0, False),
        ("llama-8b", 0, True),
        ("gemma-3-4b", 0, False),
        ("qwen3-30b", 0, False),
        ("gpt-oss-20b", 0, True),
        ("qwen3-30b", 16, False),
        ("gpt-oss-20b", 16, False),
        ("deepseek-lite", 0, False),
    ],
)
def test_a_step_of_real_layers_repeats(name, rank, fp8, seq, large):
    cfg = replace(deep(find_model(name), 1 if "qwen" in name else 2), vocab=4096, fp8=fp8)
    cfg = adapted(cfg, Lora(rank, 2.0 * rank, targets(cfg, ()))) if rank else cfg
    found = list(steps(cfg, "cuda", "BF16", 8192, seq))
    assert len(set(found)) == 1, found
