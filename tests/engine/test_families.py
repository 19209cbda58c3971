"""Every kind of block under plans that place it otherwise: the bits of the run in one memory."""

from dataclasses import replace
from functools import cache

import pytest
import wrapped
from engines import batches, check_same, final_weights, gpu_plan, make, small_stretches, train  # noqa: F401  autouse
from tiny import CASES

from trireme.engine.plan import UnitPlan
from trireme.engine.queues.real import RealQueues
from trireme.models.config import parse_config
from trireme.models.sizes import shapes

pytestmark = pytest.mark.grid


def config(case):
    if case in wrapped.CASES:
        return wrapped.either(case)[1]
    model_type, keys = CASES[case]
    return parse_config(keys | dict(model_type=model_type))


@cache
def in_one_memory(cfg):
    plan = gpu_plan(cfg, dtype="BF16")
    e = make(cfg, plan)
    found = train(e, batches(cfg, 2, plan.n_micro, 24)), final_weights(e)
    e.close()
    return found


PLACED = (
    "phi3 window, longrope within", "smollm3", "olmo3", "glm4", "qwen3 moe", "gpt oss", "flint", "glm4 moe", "afmoe",
    "laguna", "mimo v2 flash", "lara mini", "muse glimmer", "deepseek v3",
    "deepseek v2, groups, queries without a latent, yarn", "qwen3.5", "qwen3 next", "olmo hybrid",
    "granite 4 hybrid with experts", "falcon h1", "gemma4 keys that are values", "gemma4, experts",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("case", "halves"), [(case, i % 2 == 0) for i, case in enumerate(PLACED)])
def test_placement_never_changes_the_numbers(case, halves):
    check_placement(config(case), halves)


@pytest.mark.full
@pytest.mark.parametrize("rows", [7, 24])
def test_layers_that_are_a_mixer_or_an_mlp(rows):
    """They are not divided."""
    check_placement(replace(config("nemotron 3 of all kinds, latents, groups"), mlp_rows=rows), halves=False)


@pytest.mark.full
def test_no_plan_changes_the_tiles_of_a_long_text():
    """An MLP in tiles of 7 of 24 tokens: in half blocks and whole ones, saved or not, the same bits."""
    check_placement(replace(config("llama biases"), mlp_rows=7), halves=True)
    check_placement(replace(config("gpt2"), mlp_rows=7), halves=False)


@pytest.mark.full
def test_attention_and_mlp_of_one_input():
    """They are no half blocks; whole ones may lie anywhere, their MLPs in tiles or not."""
    for rows in (7, 24):
        check_placement(replace(config("gpt_neox"), mlp_rows=rows), halves=False)


def check_placement(cfg, halves):
    units = []
    plan = gpu_plan(cfg, halves=halves, dtype="BF16", window=1)
    cut = plan.cut(cfg)
    for u in range(cut.n_units):
        tier = ("ram", "ssd")[u % 2]
        inner = 0 < u < cut.n_units - 1
        names = list(shapes.saved_shapes(cut, 1, shapes.kind(cut, u))) if inner else []
        saved = tuple((name, ("gpu", "ram", "ssd")[(u + i) % 3]) for i, name in enumerate(names) if (u + i) % 4)
        units.append(UnitPlan(tier, tier, x="ram", saved=saved, base=tier))
    e = make(cfg, replace(plan, units=tuple(units)), RealQueues("cpu", extra=("poison",)))
    check_same(e, batches(cfg, 2, plan.n_micro, 24), *in_one_memory(cfg))
