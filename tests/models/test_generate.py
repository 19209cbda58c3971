"""The generator: token for token what transformers generates, streamed once a token for all prompts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engines import GPT, LLAMA, gpu_plan, make
from tiny import CASES, Tiny, oracle, oracle_generate
from wrapped import either

from trireme.engine.buffers import workspace
from trireme.engine.plan import Limits, UnitPlan
from trireme.engine.run import evaluate
from trireme.models.config import InputError
from trireme.models.generate import generate, needs
from trireme.models.losses.micro_batch import MicroBatch

pytestmark = pytest.mark.grid

PROMPTS = [[5, 9, 2, 44, 17, 3, 8], [11], [60, 61, 62, 1, 2, 3, 4, 5, 6, 7, 8, 9], [90, 3, 90]]
GENERATE = [
    "gpt2", "llama biases", "llama 3.1 rope", "mistral window", "gpt oss", "flint", "afmoe", "kolibri1", "laguna",
    "mimo v2 flash", "lara mini", "muse glimmer", "qwen2 window above", "qwen3", "granite", "smollm3 window, biases",
    "olmo3", "gemma3", "gemma2", "gemma4", "gemma4 keys that are values", "gemma4, experts", "deepseek v3", "qwen3.5",
    "qwen3.5 moe", "olmo hybrid with rope, odd widths", "granite 4 hybrid with experts", "nemotron 3",
    "falcon h1 with norms, groups, tied",
]  # fmt: skip


def units_of(tiny, asked=None):
    """Passes over units in memory; `asked` collects the order in which they are asked for."""

    def units():
        for u in range(tiny.cfg.n_units):
            if asked is not None:
                asked.append(u)
            yield u, tiny.w[u]

    return units


@pytest.mark.parametrize("case", GENERATE)
def test_greedy_as_transformers(case):
    reference, cfg = either(case)
    tiny = Tiny(cfg, reference.state_dict())
    assert generate(cfg, units_of(tiny), PROMPTS, 8) == oracle_generate(reference, PROMPTS, 8)


@pytest.mark.parametrize("case", ["gpt2", "qwen3.5"])
def test_a_text_ends_where_it_says_or_is_asked_to(case):
    reference, cfg = either(case)
    tiny = Tiny(cfg, reference.state_dict())
    expected = generate(cfg, units_of(tiny), PROMPTS, 12)
    eos = frozenset({expected[0][4], expected[2][9]})
    for ours, theirs in zip(generate(cfg, units_of(tiny), PROMPTS, 12, eos=eos), expected, strict=True):
        stop = next((i + 1 for i, token in enumerate(theirs) if token in eos), 12)
        assert ours == theirs[:stop]
    asked = iter([False, False, True])
    assert generate(cfg, units_of(tiny), PROMPTS, 12, stop=lambda: next(asked)) == [t[:3] for t in expected]


@pytest.mark.full
def test_longrope_takes_its_factors_by_the_length_of_each_text():
    """Texts become longer than 14 tokens at different times, or are from the beginning."""
    model_type, keys = CASES["phi3 window, longrope within"]
    reference, cfg = oracle(model_type, keys | dict(original_max_position_embeddings=14))
    prompts = [*PROMPTS, [5] * 14, [7] * 15]
    made = generate(cfg, units_of(Tiny(cfg, reference.state_dict())), prompts, [4, 20, 5, 8, 4, 4])
    expected = oracle_generate(reference, prompts, 20)
    assert made == [tokens[:n] for tokens, n in zip(expected, [4, 20, 5, 8, 4, 4], strict=True)]


@pytest.mark.parametrize("case", ["llama", "llama tied"])
def test_one_pass_over_the_units_a_token(case):
    reference, cfg = oracle(*CASES[case])
    asked = []
    generate(cfg, units_of(Tiny(cfg, reference.state_dict()), asked), PROMPTS, 3)
    assert asked == [0, 1, 2, 3] * 3


def test_learned_positions_end():
    reference, cfg = oracle(*CASES["gpt2"])
    tiny = Tiny(cfg, reference.state_dict())
    long, short = [7] * 60, [7] * 3
    ours = generate(cfg, units_of(tiny), [long, short], 10)
    assert [len(t) for t in ours] == [4, 10]
    assert ours == [*oracle_generate(reference, [long], 4), *oracle_generate(reference, [short], 10)]
    with pytest.raises(InputError, match="64 positions"):
        generate(cfg, units_of(tiny), [[7] * 64], 1)


# ---------------------------------------------------------------- beside an engine


SSD = UnitPlan("ssd", "ssd")
LONG = [[(7 * i + k) % 61 for i in range(40)] for k in range(3)]


def streamed(cfg, **more):
    """An engine whose units all pass through the rings."""
    plan = gpu_plan(cfg, units=(SSD,) * cfg.n_units, window=2)
    return make(cfg, replace(plan, **more))


@pytest.mark.full
@pytest.mark.parametrize("cfg", [LLAMA, GPT])
def test_prompts_are_cut_to_what_memory_holds(cfg):
    e = streamed(cfg)
    assert evaluate.fitted(e, LONG) == LONG
    held = e.memory.used_bytes("gpu") - workspace(e.geo, e.plan)
    for length in (17, 1):
        e.memory.limits = Limits(held + needs(e.cfg, 3, length, 48, 4), 1 << 30)
        assert evaluate.fitted(e, LONG) == [prompt[-length:] for prompt in LONG]
    e.memory.limits = Limits(held, 1 << 30)
    assert not any(evaluate.fitted(e, LONG))


def test_prompts_are_of_different_rows():
    rows = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [7, 8, 9]]
    ids = [np.array(row * 4) for row in rows]
    labels = [np.where(np.arange(12) < len(row) + k // 3, -100, row * 4) for k, row in enumerate(rows)]
    pairs = [MicroBatch(np.concatenate(ids[k : k + 2]), np.concatenate(labels[k : k + 2]), (12, 12)) for k in (0, 2)]
    data = SimpleNamespace(batches=lambda rows: iter(pairs))
    first, second, third = ([*row * 4][:8] for row in (rows[0], rows[1], rows[3]))
    assert evaluate.prompts(data, 3) == [first, second, third]
    assert evaluate.prompts(data, 9) == [first, second, third]
    assert evaluate.prompts(data, 1) == [first]
