"""Models by the names that people use: shapes to plan for and to measure, without a checkpoint. No torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from trireme.models.config import InputError, ModelConfig, Rope, parse_config


def llama(width: int, layers: int, heads: int, ffn: int, vocab: int = 32000, kv: int | None = None) -> ModelConfig:
    return ModelConfig("llama", vocab, width, layers, heads, kv or heads, width // heads, ffn, 1 << 17, 1e-5, False,
                       rope=Rope(1e4))  # fmt: skip


def gpt3(width: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig("gpt2", 50257, width, layers, heads, heads, width // heads, 4 * width, 8192, 1e-5, True,
                       qkv_bias=True, o_bias=True, mlp_bias=True)  # fmt: skip


def mixture(model_type: str, width: int, layers: int, heads: int, kv: int, vocab: int, **keys: Any) -> ModelConfig:
    """Of its config.json, with these keys beside the usual."""
    return parse_config(dict(
        model_type=model_type, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, **keys,
    ))  # fmt: skip


_YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, original_max_position_embeddings=4096, truncate=False)
_OSS: dict[str, Any] = dict(width=2880, heads=64, kv=8, vocab=201088, intermediate_size=2880, rope_parameters=_YARN,
                             quantization_config=dict(quant_method="mxfp4"))  # fmt: skip
MODELS = {
    "llama-tiny": llama(256, 4, 4, 688, vocab=2048),
    "llama-0.15b": llama(768, 12, 12, 2048),
    "llama-0.4b": llama(1024, 24, 16, 2816),
    "llama-1.3b": llama(2048, 24, 16, 5504),
    "llama-3b": llama(3072, 26, 24, 8192),
    "llama-7b": llama(4096, 32, 32, 11008),
    "llama-8b": llama(4096, 32, 32, 14336, vocab=128256, kv=8),
    "llama-13b": llama(5120, 40, 40, 13824),
    "llama-33b": llama(6656, 60, 52, 17920),
    "llama-70b": llama(8192, 80, 64, 28672, kv=8),
    "llama-405b": llama(16384, 126, 128, 53248, vocab=128256, kv=8),
    "gpt3-13b": gpt3(5120, 40, 40),
    "gpt3-175b": gpt3(12288, 96, 96),
    "qwen3-30b": mixture("qwen3_moe", 2048, 48, 32, 4, 151936, intermediate_size=6144, head_dim=128, rope_theta=1e6,
                         norm_topk_prob=True),
    "qwen3-235b": mixture("qwen3_moe", 4096, 94, 64, 4, 151936, intermediate_size=12288, head_dim=128, rope_theta=1e6,
                          moe_intermediate_size=1536, norm_topk_prob=True),
    "mixtral-8x7b": mixture("mixtral", 4096, 32, 32, 8, 32000, intermediate_size=14336),
    "gpt-oss-20b": mixture("gpt_oss", layers=24, num_local_experts=32, **_OSS),
    "gpt-oss-120b": mixture("gpt_oss", layers=36, num_local_experts=128, **_OSS),
    "glm-air": mixture("glm4_moe", 4096, 46, 96, 8, 151552, intermediate_size=10944, head_dim=128, rope_theta=1e6,
                       attention_bias=True),
    "solar-100b": mixture("solar_open", 4096, 48, 64, 8, 196608, head_dim=128),
    "dots1-142b": mixture("dots1", 4096, 62, 32, 32, 152064, intermediate_size=10944, n_routed_experts=128,
                          n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1),
    "minimax-m2": mixture("minimax_m2", 3072, 62, 48, 8, 200064, intermediate_size=1536, rotary_dim=64),
    "k-exaone-236b": mixture("exaone_moe", 6144, 48, 64, 8, 153600, intermediate_size=18432, head_dim=128,
                             num_experts=128, moe_intermediate_size=2048, sliding_window=128),
    "hy3-295b": mixture("hy_v3", 4096, 80, 64, 8, 120832, intermediate_size=13312),
}  # fmt: skip


def find_model(name: str) -> ModelConfig:
    """The shape of that name, in any case. Raises InputError, which lists the names."""
    if found := MODELS.get(name.lower()):
        return found
    near = get_close_matches(name.lower(), MODELS, 1)
    perhaps = f"Did you mean {near[0]}? " if near else ""
    raise InputError(
        f"--shape {name} is not known. {perhaps}There are {', '.join(MODELS)}; for any other model, name a folder "
        "with its config.json as the checkpoint."
    )
