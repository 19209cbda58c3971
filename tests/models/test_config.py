"""config.json: what is understood, in the forms of transformers 4 and 5, and what is refused by name."""

import json
import os
import re
from pathlib import Path

import pytest
import transformers
from script_files import script

from trireme.models.config import SUPPORTED, InputError, numbers, parse_config, read_config
from trireme.models.families.known import KNOWN
from trireme.models.families.table import FAMILIES, WRAPPERS

FP8 = dict(quant_method="fp8")


def of_group(**weights):
    own = dict(num_bits=8, type="float", strategy="channel") | weights
    return dict(config_groups=dict(group_0=dict(targets=["Linear"], weights=own)))


NF4 = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
BY_ROW = dict(quant_method="compressed-tensors", format="float-quantized") | of_group()
MODELOPT = dict(quant_method="modelopt")
MXFP8 = BY_ROW | dict(format="mxfp8-quantized")
OF_INT4 = dict(num_bits=4, type="int", strategy="group", group_size=32)
OF_FP4 = dict(num_bits=4, strategy="tensor_group", group_size=16)
INT4, NVFP4 = (
    dict(quant_method="compressed-tensors", format=form) for form in ("pack-quantized", "nvfp4-pack-quantized")
)
GPT2 = dict(model_type="gpt2", vocab_size=50257, n_embd=768, n_layer=12, n_head=12)
LLAMA = dict(
    model_type="llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
)
GRANITE4 = LLAMA | dict(
    model_type="granitemoehybrid", shared_intermediate_size=64, num_local_experts=0, layer_types=["attention"] * 32
)  # fmt: skip
GRANITE4_H = GRANITE4 | dict(layer_types=["mamba"] * 31 + ["attention"])
HUNYUAN = LLAMA | dict(model_type="hunyuan_v1_moe")
OLMO_H = LLAMA | dict(model_type="olmo_hybrid")
FALCON_H1 = LLAMA | dict(model_type="falcon_h1")
MISTRAL3 = dict(model_type="mistral3", text_config=LLAMA | dict(model_type="mistral", num_key_value_heads=8))
NEMOTRON = dict(model_type="nemotron_h", hidden_size=4096, hybrid_override_pattern="ME*")
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def quantized(said) -> dict:
    return LLAMA | dict(quantization_config=said)


@pytest.mark.parametrize(
    ("keys", "window", "window_from"),
    [
        (dict(model_type="mistral"), 4096, 0),  # the default of its class in transformers
        (dict(model_type="mistral", sliding_window=None), 0, 0),
        (dict(model_type="qwen2", sliding_window=100), 0, 0),
        (dict(model_type="qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=20), 100, 20),
        (dict(model_type="qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=99), 0, 0),
        (dict(model_type="qwen3", sliding_window=None, use_sliding_window=True, max_window_layers=1), 0, 0),
    ],
)
def test_layers_from_one_on_have_the_window(keys, window, window_from):
    cfg = parse_config(LLAMA | dict(num_key_value_heads=8) | keys)
    assert [own.attention.window for own in cfg.layers] == [0] * window_from + [window] * (32 - window_from)


REFUSED = [
    (dict(model_type="mamba"), ["mamba", "it has Mamba layers", "llama", "docs/models.md"]),
    (dict(model_type="kimi_linear"), ["linear attention", "glm4_moe"]),
    (dict(model_type="longcat_flash"), ["latent attention", "deepseek_v3"]),
    (dict(model_type="qwen_3"), ["it is not known. Did you mean qwen3?"]),
    (dict(model_type=["llama"]), ["model_type", "it is not known. docs/models.md"]),
    (dict(model_type="qwen3_vl_text"), ["qwen3_vl_text", "Did you mean qwen3_5_text"]),
    (quantized(dict(quant_method="quark")), ["quantized by quark", "Take the BF16 original"]),
    (quantized(dict(quant_method="mxfp4")), ["quantized by mxfp4", "for a llama"]),
    (quantized(FP8 | dict(fmt="e5m2")), ["quantization_config", "fmt", "e5m2", "e4m3"]),
    (quantized(FP8 | dict(weight_block_size=[128])), ["weight_block_size", "two positive"]),
    (quantized(FP8 | dict(scale_fmt="e5m3")), ["scale_fmt", "ue8m0"]),
    (quantized(FP8 | dict(expert_dtype="fp6")), ["expert_dtype", "fp6"]),
    (quantized(FP8 | dict(ignored_layers="lm_head")), ["ignored_layers", "a list of names"]),
    (
        quantized(BY_ROW | dict(format="int-quantized")),
        ["quantized by compressed-tensors", 'mxfp4-pack-quantized, not "int-quantized"', "Take the BF16 original"],
    ),
    (quantized(INT4 | of_group(**OF_INT4, actorder="group")), ["actorder", "group"]),
    (quantized(INT4 | of_group(**OF_INT4 | dict(symmetric=1))), ["symmetric", "true or"]),
    (quantized(NVFP4 | of_group(**OF_FP4 | dict(group_size=32))), ["group_size", "32", "16"]),
    (quantized(NVFP4 | of_group(**OF_FP4 | dict(strategy="group"))), ["strategy", "tensor_"]),
    (quantized(dict(quant_method="modelopt", quant_algo="W4A8")), ["quant_algo", "NVFP4"]),
    *(
        (quantized(dict(quant_method=method, bits=4)), [method, "Take the BF16 original"])
        for method in ("gptq", "awq", "auto-round")
    ),
    (quantized(BY_ROW | dict(transform_config={"r": 1})), ["transform_config"]),
    (quantized(BY_ROW | dict(sparsity_config=dict(format="2:4"))), ["sparsity_config", "2:4"]),
    (quantized(BY_ROW | dict(config_groups={})), ["config_groups", "an object of groups"]),
    (quantized(BY_ROW | of_group(strategy="token")), ["strategy", "token", "channel"]),
    (quantized(BY_ROW | of_group(strategy="block")), ["block_structure", "two positive"]),
    (quantized(NF4 | dict(load_in_8bit=True)), ["load_in_8bit"]),
    (quantized(NF4 | dict(bnb_4bit_quant_type="fp4")), ["bnb_4bit_quant_type", "nf4"]),
    (quantized([4]), ["quantization_config", "does not name"]),
    (
        quantized(BY_ROW) | dict(compression_config=INT4),
        ['"quantization_config" and "compression_config" are two names of one key, but differ. Remove one.'],
    ),
    (MISTRAL3 | dict(text_config=None), ["text_config", "an object"]),
    (MISTRAL3 | dict(text_config=[]), ["text_config", "an object"]),
    (MISTRAL3 | dict(text_config=dict(model_type="mixtral")), ["text_config", "model_type", "mixtral", "mistral"]),
    (MISTRAL3 | dict(text_config=dict(model_type="mistral")), ["text_config", "hidden_size"]),
    (MISTRAL3 | dict(quantization_config=dict(quant_method="aqlm")), ["quantization_config", "aqlm"]),
    (dict(), ["model_type"]),
    (GPT2 | dict(activation_function="relu"), ["activation_function", "gelu_new"]),
    (GPT2 | dict(n_head=7), ["n_head"]),
    (GPT2 | dict(add_cross_attention=True), ["add_cross_attention"]),
    (LLAMA | dict(hidden_act=None), ["hidden_act", "silu"]),
    (LLAMA | dict(num_key_value_heads=5), ["num_key_value_heads"]),
    (LLAMA | dict(head_dim=81), ["81", "even"]),
    (LLAMA | dict(model_type="gemma4_text", hidden_size_per_layer_input=0, global_head_dim=81), ["81", "even"]),
    (LLAMA | dict(hidden_size="4096"), ["hidden_size", '"4096"']),
    (LLAMA | dict(model_type="gemma4_text"), ["E2B and E4B", "12B, 26B-A4B or 31B"]),
    (LLAMA | dict(num_hidden_layers=-1), ["num_hidden_layers"]),
    (LLAMA | dict(rms_norm_eps=float("nan")), ["rms_norm_eps"]),
    (LLAMA | dict(tie_word_embeddings="yes"), ["tie_word_embeddings"]),
    (LLAMA | dict(partial_rotary_factor=0.5), ["partial_rotary_factor"]),
    (LLAMA | dict(attn_logit_softcapping=50.0), ["attn_logit_softcapping"]),
    (LLAMA | dict(rope_scaling=dict(type="ntk", factor=4.0)), ["ntk", "default, linear, llama3, yarn, longrope"]),
    (LLAMA | dict(rope_scaling=dict(type="yarn", factor=-1)), ["factor", "-1"]),
    (LLAMA | dict(rope_scaling=dict(type="longrope", short_factor=[1.0] * 64)), ["long_factor", "64"]),
    (LLAMA | dict(rope_scaling=dict(type="longrope", short_factor=[1.0], long_factor=[1])), ["short_factor"]),
    (LLAMA | dict(no_rope_layers=[1] * 32), ["no_rope_layers"]),
    (LLAMA | dict(model_type="apertus"), ["another activation", "llama"]),
    (HUNYUAN | dict(moe_topk=[1, 2] * 16), ["moe_topk", "32 times the same"]),
    (HUNYUAN | dict(moe_intermediate_size=[11008, 1] * 16), ["moe_intermediate_size"]),
    (HUNYUAN | dict(num_shared_expert=[2] * 32), ["num_shared_expert", "expected 1 in all layers"]),
    (HUNYUAN | dict(moe_layer_num_skipped=1), ["moe_layer_num_skipped"]),
    (HUNYUAN | dict(use_cla=True), ["use_cla"]),
    (LLAMA | dict(model_type="gemma2", hidden_act="gelu_pytorch_tanh", attn_logit_softcapping=0), ["softcapping"]),
    (LLAMA | dict(model_type="phi3", partial_rotary_factor=0.23), ["partial_rotary_factor", "0.23", "128"]),
    (LLAMA | dict(model_type="smollm3", no_rope_layers=[1, 0]), ["no_rope_layers", "32"]),
    (LLAMA | dict(model_type="smollm3", layer_types=["sliding_attention"] * 32), ["sliding_window", "null"]),
    (LLAMA | dict(num_hidden_layers=2**31 - 1), ["num_hidden_layers", "at most 4,096"]),
    (
        LLAMA | dict(model_type="mixtral", num_local_experts=2**31 - 1),
        ["num_local_experts", "at most 8,192 in each of 32 layers"],
    ),
    (LLAMA | dict(model_type="olmo3", sliding_window=None), ["sliding_window"]),
    (LLAMA | dict(rope_scaling=dict(type="yarn", factor=4.0, llama_4_scaling_beta=0.1)), ["llama_4_scaling_beta"]),
    (LLAMA | dict(model_type="granite", logits_scaling=0), ["logits_scaling", "0"]),
    (LLAMA | dict(model_type="gemma3_text", use_bidirectional_attention=True), ["use_bidirectional_attention"]),
    (LLAMA | dict(rope_scaling=dict(type="dynamic", factor=4.0)), ["dynamic"]),
    (LLAMA | dict(model_type="ministral3"), ["default", "yarn"]),
    (LLAMA | dict(model_type="ministral3", rope_scaling=dict(type="yarn", factor=4)), ["llama_4_scaling_beta"]),
    (LLAMA | dict(model_type="glm4", partial_rotary_factor=0.01), ["partial_rotary_factor", "0.01"]),
    (LLAMA | dict(model_type="gpt_neox", hidden_act="gelu", use_parallel_residual=1), ["use_parallel_residual"]),
    (GRANITE4 | dict(layer_types=["attention"] * 31 + ["moe"]), ["layer_types", "linear_attention"]),
    (GRANITE4 | dict(num_local_experts=62, num_experts_per_tok=63), ["num_local_experts", "62"]),
    (GRANITE4 | dict(num_local_experts=None), ["num_local_experts"]),
    (GRANITE4_H | dict(mamba_d_head=32), ["mamba_n_heads", "mamba_expand", "8192"]),
    (GRANITE4_H | dict(mamba_n_groups=3), ["mamba_n_groups", "mamba_n_heads = 128"]),
    (GRANITE4_H | dict(mamba_d_state=512), ["mamba_d_state", "at most 256"]),
    (GRANITE4_H | dict(mamba_d_conv=3), ["mamba_d_conv", "a power of two"]),
    (GRANITE4_H | dict(mamba_proj_bias=True), ["mamba_proj_bias", "true"]),
    (GRANITE4_H | dict(time_step_limit=[0.1, 0.05]), ["time_step_limit", "[least, most]"]),
    (LLAMA | dict(model_type="bamba", attn_layer_indices=[32]), ["attn_layer_indices", "0 to 31"]),
    (FALCON_H1 | dict(mamba_n_heads=24), ["mamba_n_heads", "mamba_d_ssm = 1024"]),
    (FALCON_H1 | dict(mamba_rms_norm=True), ["mamba_norm_before_gate", "true", "Supported: false"]),
    (FALCON_H1 | dict(mamba_rms_norm="no"), ["mamba_rms_norm", "true or false"]),
    (FALCON_H1 | dict(projectors_bias=True), ["projectors_bias", "true"]),
    (FALCON_H1 | dict(ssm_multipliers=[1.0] * 4), ["ssm_multipliers", "a list of 5 positive numbers"]),
    (FALCON_H1 | dict(key_multiplier=-1), ["key_multiplier", "-1"]),
    (NEMOTRON | dict(hybrid_override_pattern="M*X"), ["hybrid_override_pattern", "ME*-", "X"]),
    (NEMOTRON | dict(num_hidden_layers=4), ["num_hidden_layers", "expected 3"]),
    (NEMOTRON | dict(layers_block_type=["mamba", "attention", "conv"]), ["layers_block_type", "moe"]),
    (NEMOTRON | dict(hybrid_override_pattern=None), ["hybrid_override_pattern", "the kind of each layer"]),
    (NEMOTRON | dict(mlp_hidden_act="silu"), ["mlp_hidden_act", "relu2"]),
    (NEMOTRON | dict(sliding_window=64), ["sliding_window", "64"]),
    (dict(model_type="nemotron_h_omni"), ["images and audio", "nemotron_h"]),
    (OLMO_H | dict(linear_num_key_heads=5), ["linear_num_value_heads", "linear_num_key_heads = 5"]),
    (GRANITE4 | dict(position_embedding_type="alibi"), ["position_embedding_type", "alibi"]),
    (GRANITE4 | dict(shared_intermediate_size=None), ["shared_intermediate_size"]),
    (LLAMA | dict(rope_scaling=dict(type="linear")), ["rope_scaling", "factor"]),
    (LLAMA | dict(rope_scaling="linear"), ["rope_scaling"]),
    (LLAMA | dict(rope_scaling=LLAMA3 | dict(high_freq_factor=1.0)), ["high_freq_factor"]),
    (LLAMA | dict(rms_norm_eps=10**400), ["rms_norm_eps"]),  # more than a float holds
    (LLAMA | dict(rope_parameters=dict(full_attention=dict(rope_theta=1.0))), ["full_attention"]),
    (LLAMA | dict(model_type="qwen2", layer_types=["sliding_attention"] * 32), ["layer_types"]),
]


@pytest.mark.parametrize(("raw", "words"), REFUSED)
def test_refused_by_name(raw, words):
    with pytest.raises(InputError) as e:
        parse_config(raw, "config.json")
    assert "config.json" in str(e.value)
    assert "\n" not in str(e.value)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_every_group_of_columns_is_whole():
    packing = parse_config(LLAMA | dict(quantization_config=INT4 | of_group(**OF_INT4))).packing
    assert packing.holds((64, 2 * packing.block[1]))
    assert not packing.holds((64, 2 * packing.block[1] - 8))


def test_weights_whose_activations_are_not_quantized_are_packed_alike():
    packing = lambda algo: parse_config(LLAMA | dict(quantization_config=MODELOPT | dict(quant_algo=algo))).packing
    assert packing("W4A16_NVFP4") == packing("NVFP4") != packing("FP8")


def test_numbers_tell_models_apart_and_are_json():
    same = lambda **keys: numbers(parse_config(LLAMA | keys)) == numbers(parse_config(LLAMA))
    assert same()
    assert not same(rope_scaling=dict(type="yarn", factor=4.0))
    assert not same(model_type="olmo3")
    found = numbers(parse_config(LLAMA | dict(model_type="olmo3")))
    assert json.loads(json.dumps(found)) == found


def test_what_is_known_and_not_supported():
    """Each is refused with a reason, and points at what is supported."""
    types = [name for names in KNOWN.values() for name in names.split()]
    assert len(types) == len({*types})
    assert not {*types} & {*FAMILIES, *WRAPPERS}
    assert {nearest for _, nearest in KNOWN} <= {*SUPPORTED}


def test_only_the_table_names_a_family():
    """Blocks, shapes and planner read descriptions; known.py gives reasons."""
    root = Path(__file__).parents[2]
    own = set(SUPPORTED) - {"llama", "gpt2"} | {"gemma3"}
    for path in (path for room in ("models", "engine/planner", "kernels") for path in root.glob(f"{room}/**/*.py")):
        named = ("models/families/table.py", "models/families/known.py")
        if path not in [root / name for name in named]:
            words = set(re.findall(r"[\"']([a-z_]+\d*\w*)[\"']", path.read_text()))
            assert not words & own, path


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "near", "new"), [
    ("afmoe", "exaone_moe", "route_scale"), ("deepseek_v3", "deepseek_v32", ""), ("qwen3_moe", "qwen3_vl_moe_text", ""),
])  # fmt: skip
def test_a_row_that_is_missing_has_near_ones(model_type, near, new, monkeypatch):
    keys = json.loads(transformers.CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    made = script("dev/new_model")
    assert f"\n  {model_type}: distance 0" in made.report(keys)
    monkeypatch.delitem(FAMILIES, model_type)
    found = made.report(keys)
    assert f"closest rows:\n  {near}: " in found
    assert not new or f"{new} = " in found


def test_the_page_of_families_is_as_the_table():
    made = script("dev/models").page()
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    versions = lambda text: re.sub(r"transformers \d[\w.]*", "transformers", text)
    assert versions(page) == versions(made), "renew it: python scripts/dev/models.py"


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null", '{"a": 1', '{"a": 1, "a": 2}', "\udcff", "[" * 100_000])
def test_a_config_that_is_missing_or_no_json_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="config.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_text(" " * (2 << 20) + "{}"),
        os.mkdir,
        lambda path: path.symlink_to("config.json"),
    ],
)
def test_what_is_no_small_regular_file_is_not_read(tmp_path, make):
    """A pipe would be waited for, and a device read, for ever."""
    make(tmp_path / "config.json")
    why = "(regular|more than 1048576 bytes|directory|links).*[.] Put the file itself there"
    with pytest.raises(InputError, match=f"config.json cannot be read: .*{why}"):
        read_config(tmp_path)


def test_an_adapter_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="config.json"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="--adapter "):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(InputError, match="adapter_config.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("configuration_files", ["config.4.0.0.json"]), ("transformers_weights", "other.safetensors")]
)
def test_other_files_that_transformers_takes_by_a_key_are_refused(key, value):
    for model_type in ("llama", "gemma3"):
        with pytest.raises(InputError, match=key):
            parse_config(LLAMA | dict(model_type=model_type, text_config=LLAMA) | {key: value})
    parse_config(LLAMA | dict(transformers_weights="model.safetensors"))
