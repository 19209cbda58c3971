"""Names found in checkpoints, in every form that they come in."""

import pytest

from trireme.models.config import InputError, parse_config
from trireme.models.hf import canonical_names, sources
from trireme.models.sizes.shapes import stored_tensors, weight_groups

GPT2 = parse_config(dict(model_type="gpt2", vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16))
KEYS = dict(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
LLAMA = parse_config(KEYS | dict(model_type="llama"))
NEOX = parse_config(KEYS | dict(model_type="gpt_neox", rotary_pct=0.5))
TIED = parse_config(KEYS | dict(model_type="llama", tie_word_embeddings=True))
EMBED = "model.embed_tokens.weight"


def shapes_of(cfg):
    return {name: shape for u in range(cfg.n_units) for group in weight_groups(cfg, u) for name, shape in group}


@pytest.mark.parametrize("cfg", [GPT2, LLAMA, TIED])
def test_names_of_a_released_model_stay(cfg):
    found = shapes_of(cfg)
    assert canonical_names(cfg, found) == sources(cfg, found) == {name: name for name in found}


def of_norms(name):
    """The name of OLMo Hybrid's tensors without an output matrix; the first layer's norms have names of their own."""
    ours = ("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")
    for usual, other in ours if ".layers.0." in name else ():
        name = name.replace(usual, other)
    return name.removeprefix("model.")


KINDS = dict(layer_types=["linear_attention", "full_attention"])
OLMO = parse_config(KEYS | KINDS | dict(model_type="olmo_hybrid", tie_word_embeddings=True))
WITHIN = parse_config(KEYS | KINDS | dict(  # transformers reads its text_config next to the tensors of the whole
    model_type="qwen3_5_text", num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=2,
    linear_key_head_dim=4, linear_value_head_dim=4))  # fmt: skip


@pytest.mark.parametrize(("cfg", "named"), [
    (GPT2, lambda name: name.removeprefix("transformer.")), (TIED, lambda name: name.removeprefix("model.")),
    (OLMO, of_norms), (WITHIN, lambda name: name.replace("model.", "model.language_model.", 1)),
])  # fmt: skip
def test_names_that_transformers_writes_of_a_part(cfg, named):
    wanted = stored_tensors(cfg)
    found = {named(name): shape for name, shape in wanted.items()}
    assert sources(cfg, found) == {name: named(name) for name in wanted}
    assert canonical_names(cfg, found) == {named(name): name for name in wanted}


def test_tied_in_either_direction():
    found = shapes_of(TIED)
    both = found | {"lm_head.weight": found[EMBED]}
    only_head = {name: shape for name, shape in both.items() if name != EMBED}
    assert sources(TIED, both)[EMBED] == EMBED
    assert sources(TIED, dict(reversed(both.items())))[EMBED] == EMBED
    assert canonical_names(TIED, both)["lm_head.weight"] == EMBED
    assert sources(TIED, only_head)[EMBED] == "lm_head.weight"


def test_the_name_of_the_output_matrix_is_the_familys():
    """A name that transformers passes over leaves it without an output matrix."""
    renamed = lambda cfg: {name.replace("lm_head", "embed_out"): shape for name, shape in shapes_of(cfg).items()}
    assert sources(NEOX, renamed(NEOX))["lm_head.weight"] == "embed_out.weight"
    for cfg, found in ((LLAMA, renamed(LLAMA)), (TIED, shapes_of(TIED) | {"embed_out.weight": (11, 8)})):
        with pytest.raises(InputError, match=r"embed_out\.weight"):
            canonical_names(cfg, found)


@pytest.mark.parametrize(("wrapper", "read"), [("mistral3", True), ("qwen3_vl", False)])
def test_names_behind_language_model_are_of_some_wrappers(wrapper, read):
    cfg = parse_config(dict(model_type=wrapper, text_config=KEYS | dict(num_key_value_heads=2)))
    outer = "language_model.lm_head.weight"
    found = {outer if name == "lm_head.weight" else name: shape for name, shape in shapes_of(cfg).items()}
    if read:
        assert sources(cfg, found)["lm_head.weight"] == outer
    else:
        with pytest.raises(InputError, match=outer):
            canonical_names(cfg, found)


@pytest.mark.parametrize(
    ("cfg", "buffers"),
    [
        (GPT2, ["transformer.h.0.attn.bias", "h.1.attn.masked_bias"]),
        (LLAMA, ["model.layers.1.self_attn.rotary_emb.inv_freq"]),
    ],
)
def test_buffers_are_ignored(cfg, buffers):
    found = shapes_of(cfg) | dict.fromkeys(buffers, (1, 1, 16, 16))
    names = canonical_names(cfg, found)
    assert all(names[name] is None for name in buffers)
    assert sources(cfg, found).keys() == shapes_of(cfg).keys()


def test_a_missing_unknown_or_misshapen_tensor_is_named():
    found = shapes_of(LLAMA)
    wrong = found | {"lm_head.weight": (8, 11)}
    unknown = found | {"score.weight": (2, 8)}
    missing = {name: shape for name, shape in found.items() if name != "lm_head.weight"}
    for bad, words in (
        (wrong, ["lm_head.weight", "[8, 11]", "[11, 8]"]),
        (unknown, ["score.weight"]),
        (missing, ["lm_head.weight"]),
        (dict(list(found.items())[:2]), ["and 18 more"]),
        ({}, ["0 tensors", "2 layers"]),
    ):
        with pytest.raises(InputError) as e:
            canonical_names(LLAMA, bad, label=lambda name: f"FILE: {name}")
        assert all(word in str(e.value) for word in ("FILE: ", *words)), str(e.value)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_a_wrapped_models_prefix_is_named(prefix):
    with pytest.raises(InputError, match=f"'{prefix}'"):
        canonical_names(LLAMA, {prefix + name: shape for name, shape in shapes_of(LLAMA).items()})


def test_layers_that_cannot_be_there_make_no_work():
    """A config.json that claims thousands of layers is refused by counts alone."""
    claim = KEYS | dict(model_type="qwen2", num_key_value_heads=2, num_hidden_layers=4096)
    with pytest.raises(InputError, match="22 tensors.*4,096 layers"):
        canonical_names(parse_config(claim), {f"{i}": (1,) for i in range(22)})
    with pytest.raises(InputError, match="layer_types"):
        parse_config(claim | dict(layer_types=["full_attention"] * 2))
