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


# Layers that are a mixer or an MLP, and those with attention and MLP of one input, are not divided. MLPs in tiles of 7
# of 24 tokens have the same tiles in half blocks and whole ones, saved or not.
TILED = [(case, False, rows) for case in ("nemotron 3 of all kinds, latents, groups", "gpt_neox") for rows in (7, 24)]
TILED += [("llama biases", True, 7), ("gpt2", False, 7)]


@pytest.mark.full
@pytest.mark.parametrize(("case", "halves", "rows"), [*((c, i % 2 == 0, 0) for i, c in enumerate(PLACED)), *TILED])
def test_placement_never_changes_the_numbers(case, halves, rows):
    cfg, units = config(case), []
    cfg = replace(cfg, mlp_rows=rows or cfg.mlp_rows)
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
