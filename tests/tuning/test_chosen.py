"""Which tensors are trained: by globs, of which the last that matches holds, and what is said of them."""

from dataclasses import replace

import pytest
from engines import GPT, LLAMA
from tiny import CASES, oracle

from trireme.engine.tuning.chosen import adapted, folded, matching, targets, train_only, trained_lines
from trireme.models.config import InputError, Lora
from trireme.models.sizes import shapes


def trained(cfg) -> set[str]:
    return {name for u in range(cfg.n_units) for part in shapes.trained_parts(cfg, u) for g in part for name, _ in g}


EVERY = trained(LLAMA)


@pytest.mark.parametrize(("train", "freeze", "words"), [
    ((), ("*",), None),
    ((), (), ""),
    ((), ("*embed*",), "embed"),
    (("*mlp*",), (), "mlp"),
    (("*mlp*",), ("*layers.0.*",), "mlp"),
])  # fmt: skip
def test_what_matches_is_trained_or_frozen(train, freeze, words):
    if words is None:
        with pytest.raises(InputError, match="leave nothing to train"):
            train_only(LLAMA, freeze, train)
        return
    found = trained(train_only(LLAMA, freeze, train))
    if train:
        assert found == {name for name in EVERY if words in name and (not freeze or "layers.0." not in name)}
    else:
        assert found == {name for name in EVERY if not words or words not in name}


@pytest.mark.parametrize(("freeze", "train", "words"), [
    (("*.mlp.donw_proj.*",), (), r"--freeze \*.mlp.donw_proj.\*: no tensor .* model.layers.0-\d.mlp.down_proj.weight"),
    (("model.embed_tokens",), (), r"Near it: model.embed_tokens.weight"),
    ((), ("lm_haed",), r"--train lm_haed: no tensor .* Near it: lm_head.weight"),
    (("*q_proj*",), (), "are multiplied as one matrix"),
])  # fmt: skip
def test_patterns_that_fit_nothing_are_one_line_with_the_nearest_names(freeze, train, words):
    with pytest.raises(InputError, match=words) as refused:
        train_only(LLAMA, freeze, train)
    assert "\n" not in str(refused.value)


def test_names_of_all_layers_are_one():
    assert folded(GPT, matching(GPT, "*mlp.c_fc*")) == [f"transformer.h.0-2.mlp.c_fc.{e}" for e in ("weight", "bias")]
    cfg = replace(LLAMA, layers=LLAMA.layers[:1] * 12)
    names = matching(cfg, "*layers.[13]*down*") + ["model.norm.weight"]
    assert folded(cfg, names) == ["model.layers.1,3,10-11.mlp.down_proj.weight", "model.norm.weight"]


def test_what_each_pattern_matches_is_said():
    cfg = train_only(LLAMA, ("*embed*",), ())
    first, second = trained_lines(cfg, {"--train": (), "--freeze": ("*embed*",)})
    assert first.startswith(f"{len(EVERY) - 1} of {len(EVERY)} tensors, ")
    assert second == "--freeze *embed*: model.embed_tokens.weight"


def test_all_targets_by_the_words_of_others():
    assert targets(GPT, ("all-linear",)) == targets(GPT, ()) == ("c_attn", "c_proj", "c_fc")
    assert targets(GPT, ("c_fc",)) == ("c_fc",)
    mixture = oracle(*CASES["qwen2 moe"])[1]
    assert targets(mixture, ("all",))[0::4] == ("self_attn.q_proj", "shared_expert.gate_proj")
    assert targets(mixture, ())[0::3] == ("self_attn.q_proj", "self_attn.o_proj")
    nemotron = oracle(*CASES["nemotron 3"])[1]  # peft adapts no out_proj of it
    assert targets(nemotron, ())[3:] == ("mixer.o_proj", "mixer.in_proj")
    falcon = oracle(*CASES["falcon h1"])[1]
    assert targets(falcon, ())[:5] == ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj")
    assert "out_proj" not in targets(falcon, ("all",))
    assert adapted(nemotron, Lora(2, 4.0, targets(nemotron, ("all",)))).lora is not None
