"""The generator: token for token what transformers generates, streamed once a token for all prompts."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from tiny import CASES, Tiny, oracle
from transformers import AutoModelForCausalLM

from trireme.engine.generate import _pick, generate
from trireme.models.config import InputError, read_config

PROMPTS = [[5, 9, 2, 44, 17, 3, 8], [11], [60, 61, 62, 1, 2, 3, 4, 5, 6, 7, 8, 9], [90, 3, 90]]


def fetch_of(tiny, asked=None):
    """Units from memory; `asked` collects the order in which they are asked for."""

    @contextmanager
    def fetch(u):
        if asked is not None:
            asked.append(u)
        yield tiny.w[u]

    return fetch


def oracle_generate(model, prompts, max_new, eos=None):
    """transformers' greedy tokens for each prompt alone."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        keys = dict(max_new_tokens=max_new, do_sample=False, eos_token_id=eos, pad_token_id=0)
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **keys)[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(
    "case", ["gpt2", "llama biases", "llama 3.1 rope", "mistral window", "qwen2 window above", "qwen3"]
)
def test_greedy_as_transformers(case):
    reference, cfg = oracle(*CASES[case])
    tiny = Tiny(cfg, reference.state_dict())
    expected = oracle_generate(reference, PROMPTS, 20)
    assert generate(cfg, fetch_of(tiny), PROMPTS, 20) == expected
    eos = frozenset({expected[0][4], expected[2][9]})
    for ours, theirs in zip(generate(cfg, fetch_of(tiny), PROMPTS, 20, eos=eos), expected, strict=True):
        stop = next((i + 1 for i, token in enumerate(theirs) if token in eos), 20)
        assert ours == theirs[:stop]
    asked = iter([False, False, True])
    assert generate(cfg, fetch_of(tiny), PROMPTS, 20, enough=lambda: next(asked)) == [t[:3] for t in expected]


def test_greedy_on_stories(real):
    folder = real / "stories260k"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tiny = Tiny(read_config(folder), load_file(folder / "model.safetensors"))
    prompts = [[1], [1, 403, 407, 261, 378], [1, 403, 407, 261, 378, 383, 286, 261, 376, 268]]
    assert generate(tiny.cfg, fetch_of(tiny), prompts, 100) == oracle_generate(reference, prompts, 100)


@pytest.mark.parametrize("case", ["llama", "llama tied"])
def test_one_pass_over_the_units_a_token(case):
    reference, cfg = oracle(*CASES[case])
    asked = []
    generate(cfg, fetch_of(Tiny(cfg, reference.state_dict()), asked), PROMPTS, 3)
    assert asked == ([0, 1, 2, 3, 0] if cfg.tied else [0, 1, 2, 3]) * 3


def test_learned_positions_end():
    reference, cfg = oracle(*CASES["gpt2"])
    tiny = Tiny(cfg, reference.state_dict())
    long, short = [7] * 60, [7] * 3
    ours = generate(cfg, fetch_of(tiny), [long, short], 10)
    assert [len(t) for t in ours] == [4, 10] and ours == [
        *oracle_generate(reference, [long], 4),
        *oracle_generate(reference, [short], 10),
    ]
    with pytest.raises(InputError, match="64 positions"):
        generate(cfg, fetch_of(tiny), [[7] * 64], 1)


def test_sampling_is_reproducible_and_keeps_prompts_apart():
    reference, cfg = oracle(*CASES["llama"])
    fetch = fetch_of(Tiny(cfg, reference.state_dict()))
    draw = lambda prompts, seed: generate(cfg, fetch, prompts, 12, temperature=1.0, top_p=0.9, seed=seed)  # noqa: E731
    assert draw(PROMPTS, 1) == draw(PROMPTS, 1) != draw(PROMPTS, 2)
    assert draw(PROMPTS[:1], 1)[0] == draw(PROMPTS, 1)[0]
    cold = generate(cfg, fetch, PROMPTS, 12, temperature=1e-4, seed=3)
    assert cold == generate(cfg, fetch, PROMPTS, 12)


def test_top_p():
    """Shares of the drawn tokens are the probabilities, cut to the smallest set that holds top_p and renormalised."""
    probs = torch.tensor([0.1, 0.5, 0.05, 0.35])
    chances = (torch.arange(10_000) + 0.5) / 10_000
    for top_p, kept in ((1.0, [0, 1, 2, 3]), (0.9, [0, 1, 3]), (0.8, [1, 3]), (0.5, [1]), (1e-9, [1])):
        picked = _pick(probs.log().expand(10_000, 4) * 2.0, 2.0, top_p, chances)
        shares = torch.bincount(picked, minlength=4) / 10_000
        expected = torch.zeros(4).index_put((torch.tensor(kept),), probs[kept])
        assert torch.allclose(shares, expected / expected.sum(), atol=1e-3), top_p


def test_bf16_runs():
    reference, cfg = oracle(*CASES["qwen3"])
    tiny = Tiny(cfg, reference.state_dict(), "BF16")
    assert [len(t) for t in generate(cfg, fetch_of(tiny), PROMPTS, 5, dtype=torch.bfloat16)] == [5] * 4
