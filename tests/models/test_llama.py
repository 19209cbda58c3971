"""Blocks of the families by themselves; test_blocks_hf.py compares them with transformers."""

import pytest
from blocks import check_every_subset
from tiny import CASES

pytestmark = pytest.mark.grid

KEYS = dict(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
GPT = dict(vocab_size=64, n_embd=48, n_layer=2, n_head=3, n_positions=32)


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("F32", "F32"), ("BF16", "F32"), ("BF16", "BF16")])
@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", KEYS),
        ("llama", KEYS | dict(attention_bias=True, mlp_bias=True)),
        ("mistral", KEYS | dict(sliding_window=3)),
        ("qwen3", KEYS),
        ("gpt2", GPT),
        ("gpt2", GPT | dict(scale_attn_by_inverse_layer_idx=True)),
    ],
)
def test_every_subset_of_saved(model_type, keys, dtype, grad_dtype):
    check_every_subset(model_type, dtype, grad_dtype, **keys)


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("F32", "F32"), ("BF16", "F32")])
@pytest.mark.parametrize(
    "case",
    [
        "phi3",
        "granite",
        "smollm3",
        "starcoder2",
        "olmo2",
        "olmo3",
        "exaone4",
        "seed_oss",
        "gemma3",
        "gemma2",
        "ministral3 tied, window",
        "glm4",
        "gpt_neox",
        "granite 4",
        "falcon h1",
        "qwen3 moe",
        "qwen2 moe",
        "gpt oss",
        "glm4 moe",
        "minimax m2",
        "hy v3",
        "granite moe",
        "granite swa",
        "ernie moe",
        "hunyuan",
        "arcee",
    ],
)
def test_every_subset_of_saved_in_other_families(case, dtype, grad_dtype):
    model_type, keys = CASES[case]
    check_every_subset(model_type, dtype, grad_dtype, **keys)
