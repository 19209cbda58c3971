"""The adapter for lm-eval, next to that package's own backend for transformers; skipped where it is not installed."""

import random

import pytest
from script_files import script
from stories import make_checkpoint, make_text, story

from trireme.engine.run.options import Sample

pytest.importorskip("lm_eval")


def test_answers_are_those_of_its_own_backend(tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    make_text(tmp_path / "stories.txt", 50, seed=1)
    make_checkpoint(tmp_path / "model", tmp_path / "stories.txt", seed=2)
    ours = script("harness").Streamed(Sample(folder=str(tmp_path / "model"), device="cpu"), 128)
    theirs = HFLM(pretrained=str(tmp_path / "model"), device="cpu", dtype="float32", max_length=128, batch_size=1)
    dice = random.Random(3)
    texts = [" ".join(story(dice) for _ in range(n)) for n in (1, 2, 5)]
    asked = lambda kind, *args: [Instance(kind, {}, arguments, i) for i, arguments in enumerate(args)]
    pairs = asked("loglikelihood", *((text, f" {end}") for text in ("", *texts) for end in ("the sea", "Lykos was")))
    for (a, greedy), (b, expected) in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert (a, greedy) == (pytest.approx(b, abs=1e-4), expected)
    whole = asked("loglikelihood_rolling", *((text,) for text in texts))
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), rel=1e-5)
    options = {"until": ["e"], "max_gen_toks": 16, "do_sample": False}
    prompts = asked("generate_until", *((text, options) for text in texts))
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)
