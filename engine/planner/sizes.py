"""Models by their published names: shapes to plan for and to measure, without a checkpoint. Imports no torch."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from trireme.models.config import InputError, ModelConfig, Rope, parse_config, uniform


def llama(
    width: int, layers: int, heads: int, ffn: int, vocab: int = 32000, kv: int | None = None, tied: bool = False
) -> ModelConfig:
    return uniform("llama", vocab, width, layers, heads, kv or heads, width // heads, ffn, 1 << 17, 1e-5, tied,
                       rope=Rope(1e4))  # fmt: skip


def gpt3(width: int, layers: int, heads: int) -> ModelConfig:
    return uniform("gpt2", 50257, width, layers, heads, heads, width // heads, 4 * width, 8192, 1e-5, True,
                       qkv_bias=True, o_bias=True, mlp_bias=True)  # fmt: skip


def config(model_type: str, width: int, layers: int, heads: int, kv: int, vocab: int, **keys: Any) -> ModelConfig:
    """The config of a config.json with these keys in addition to the usual ones."""
    return parse_config(dict(
        model_type=model_type, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, **keys,
    ))  # fmt: skip


def qwen3(width: int, ffn: int, layers: int, heads: int, tied: bool = False) -> ModelConfig:
    return config("qwen3", width, layers, heads, 8, 151936, intermediate_size=ffn, head_dim=128, rope_theta=1e6,
                  tie_word_embeddings=tied)  # fmt: skip


def qwen2(width: int, ffn: int, layers: int, heads: int, kv: int) -> ModelConfig:
    return config("qwen2", width, layers, heads, kv, 152064, intermediate_size=ffn, rope_theta=1e6)


def gemma3(width: int, ffn: int, layers: int, heads: int, kv: int, vocab: int = 262208, head: int = 256) -> ModelConfig:
    return config("gemma3_text", width, layers, heads, kv, vocab, intermediate_size=ffn, head_dim=head,
                  sliding_window=512 if layers == 26 else 1024)  # fmt: skip


def qwen35(model_type: str, width: int, layers: int, heads: int, kv: int, **keys: Any) -> ModelConfig:
    """The config of the language model in a model with vision."""
    text = dict(model_type=f"{model_type}_text", hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv, vocab_size=248320, head_dim=256,
                rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25))  # fmt: skip
    return parse_config(dict(model_type=model_type, text_config=text | keys))


def granite_h(width: int, ffn: int, heads: int, kv: int, mamba: int, experts: int = 0, **keys: Any) -> ModelConfig:
    """Granite 4 with 40 layers, four of them with attention."""
    types = ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]
    return config("granitemoehybrid", width, 40, heads, kv, 100352, shared_intermediate_size=ffn, layer_types=types,
                  num_local_experts=experts, mamba_n_heads=mamba, mamba_d_state=128, position_embedding_type="nope",
                  tie_word_embeddings=True, embedding_multiplier=12, residual_multiplier=0.22, **keys)  # fmt: skip


def falcon_h1(
    width: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, mamba: tuple[int, int], **keys: Any
) -> ModelConfig:
    """`mamba`: number of heads of the recurrences, and their width."""
    own = dict(head_dim=128, mamba_d_ssm=mamba[0] * mamba[1], mamba_n_heads=mamba[0], mamba_d_head=mamba[1],
               mamba_rms_norm=True, mamba_norm_before_gate=False, rope_theta=1e11,
               embedding_multiplier=5.656854249492381)  # fmt: skip
    return config("falcon_h1", width, layers, heads, kv, vocab, intermediate_size=ffn, **own | keys)


_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
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
    "llama-3.2-1b": llama(2048, 16, 32, 8192, vocab=128256, kv=8, tied=True),
    "llama-3.2-3b": llama(3072, 28, 24, 8192, vocab=128256, kv=8, tied=True),
    "llama-3.3-70b": llama(8192, 80, 64, 28672, vocab=128256, kv=8),
    "mistral-7b": llama(4096, 32, 32, 14336, vocab=32768, kv=8),
    "mistral-small-24b": config("mistral", 5120, 40, 32, 8, 131072, intermediate_size=32768, head_dim=128,
                                sliding_window=None, rope_theta=1e8),
    "phi-4": config("phi3", 5120, 40, 40, 10, 100352, intermediate_size=17920, pad_token_id=None,
                    max_position_embeddings=16384, original_max_position_embeddings=16384),
    "qwen2.5-7b": qwen2(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": qwen2(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": qwen2(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": qwen2(8192, 29568, 80, 64, 8),
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32),
    "qwen3-14b": qwen3(5120, 17408, 40, 40),
    "qwen3-32b": qwen3(5120, 25600, 64, 64),
    "qwen3.5-tiny": qwen35("qwen3_5", 256, 4, 4, 2, intermediate_size=688, vocab_size=2048, head_dim=64,
                           linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
                           linear_value_head_dim=64),
    "qwen3.5-9b": qwen35("qwen3_5", 4096, 32, 16, 4),
    "qwen3.5-27b": qwen35("qwen3_5", 5120, 64, 24, 4, intermediate_size=17408, linear_num_value_heads=48),
    "qwen3.5-35b": qwen35("qwen3_5_moe", 2048, 40, 16, 2),
    "qwen3.5-122b": qwen35("qwen3_5_moe", 3072, 48, 32, 2, moe_intermediate_size=1024, linear_num_value_heads=64,
                           shared_expert_intermediate_size=1024),
    "qwen3.5-397b": qwen35("qwen3_5_moe", 4096, 60, 32, 2, moe_intermediate_size=1024, linear_num_value_heads=64,
                           shared_expert_intermediate_size=1024, num_experts=512, num_experts_per_tok=10),
    "qwen3-next-80b": config("qwen3_next", 2048, 48, 16, 2, 151936, intermediate_size=5120, rope_theta=1e7),
    "olmo-hybrid-7b": config("olmo_hybrid", 3840, 32, 30, 30, 100352, rope_parameters=dict(rope_theta=None)),
    "nemotron-3-nano": parse_config(dict(
        model_type="nemotron_h", hidden_size=2688, hybrid_override_pattern=_NANO, num_key_value_heads=2,
        mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5, max_position_embeddings=262144)),
    "granite-4-h-micro": granite_h(2048, 8192, 32, 8, 64, attention_multiplier=0.015625, logits_scaling=8),
    "granite-4-h-tiny": granite_h(1536, 1024, 12, 4, 48, 64, intermediate_size=512, num_experts_per_tok=6,
                                  attention_multiplier=0.0078125, logits_scaling=6),
    "granite-4-h-small": granite_h(4096, 1536, 32, 8, 128, 72, intermediate_size=768, num_experts_per_tok=10,
                                   attention_multiplier=0.0078125, logits_scaling=16),
    "falcon-h1-0.5b": falcon_h1(1024, 2048, 36, 8, 2, 32784, (24, 64), head_dim=64, mamba_d_state=128,
                                mamba_rms_norm=False),
    "falcon-h1-1.5b-deep": falcon_h1(1280, 3072, 66, 6, 2, 65537, (24, 64)),
    "falcon-h1-7b": falcon_h1(3072, 12288, 44, 12, 2, 130049, (24, 128)),
    "falcon-h1-34b": falcon_h1(5120, 21504, 72, 20, 4, 261120, (32, 128), mamba_n_groups=2),
    "gemma-3-1b": gemma3(1152, 6912, 26, 4, 1, vocab=262144),
    "gemma-3-4b": gemma3(2560, 10240, 34, 8, 4),
    "gemma-3-12b": gemma3(3840, 15360, 48, 16, 8),
    "gemma-3-27b": gemma3(5376, 21504, 62, 32, 16, head=128),
    "gpt3-13b": gpt3(5120, 40, 40),
    "gpt3-175b": gpt3(12288, 96, 96),
    "qwen3-30b": config("qwen3_moe", 2048, 48, 32, 4, 151936, intermediate_size=6144, head_dim=128, rope_theta=1e6,
                         norm_topk_prob=True),
    "qwen3-235b": config("qwen3_moe", 4096, 94, 64, 4, 151936, intermediate_size=12288, head_dim=128, rope_theta=1e6,
                          moe_intermediate_size=1536, norm_topk_prob=True),
    "qwen3-480b": config("qwen3_moe", 6144, 62, 96, 8, 151936, intermediate_size=8192, head_dim=128,
                                    rope_theta=1e7, num_experts=160, moe_intermediate_size=2560, norm_topk_prob=True),
    "deepseek-v3": config("deepseek_v3", 7168, 61, 128, 128, 129280),
    "deepseek-lite": config("deepseek_v2", 2048, 27, 16, 16, 102400, intermediate_size=10944, q_lora_rank=None,
                               num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1),
    "kimi-k2": config("kimi_k2", 7168, 61, 64, 64, 163840, n_routed_experts=384, n_group=1, topk_group=1,
                      first_k_dense_replace=1, routed_scaling_factor=2.827),
    "mistral-small-4": parse_config(dict(
        model_type="mistral3", tie_word_embeddings=False, text_config=dict(
            model_type="mistral4", hidden_size=4096, num_hidden_layers=36, rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=128.0, original_max_position_embeddings=8192,
                mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1, partial_rotary_factor=0.5)))),
    "glm-flash": config("glm4_moe_lite", 2048, 47, 20, 20, 154880),
    "mixtral-8x7b": config("mixtral", 4096, 32, 32, 8, 32000, intermediate_size=14336),
    "mixtral-8x22b": config("mixtral", 6144, 56, 48, 8, 32768, intermediate_size=16384),
    "gpt-oss-20b": config("gpt_oss", layers=24, num_local_experts=32, **_OSS),
    "gpt-oss-120b": config("gpt_oss", layers=36, num_local_experts=128, **_OSS),
    "glm-air": config("glm4_moe", 4096, 46, 96, 8, 151552, intermediate_size=10944, head_dim=128, rope_theta=1e6,
                       attention_bias=True),
    "solar-100b": config("solar_open", 4096, 48, 64, 8, 196608, head_dim=128),
    "dots1-142b": config("dots1", 4096, 62, 32, 32, 152064, intermediate_size=10944, n_routed_experts=128,
                          n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1),
    "minimax-m2": config("minimax_m2", 3072, 62, 48, 8, 200064, intermediate_size=1536, rotary_dim=64),
    "k-exaone-236b": config("exaone_moe", 6144, 48, 64, 8, 153600, intermediate_size=18432, head_dim=128,
                             num_experts=128, moe_intermediate_size=2048, sliding_window=128),
    "hy3-295b": config("hy_v3", 4096, 80, 64, 8, 120832, intermediate_size=13312),
}  # fmt: skip


_ALSO = {
    "llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b", "llama-2-70b": "llama-70b", "llama-3-8b": "llama-8b",
    "llama-3.1-8b": "llama-8b", "llama-3-70b": "llama-3.3-70b", "llama-3.1-70b": "llama-3.3-70b",
    "llama-3.1-405b": "llama-405b", "deepseek-r1-distill-llama-8b": "llama-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b", "qwen3-30b-a3b": "qwen3-30b",
    "qwen3-coder-30b-a3b": "qwen3-30b", "qwen3-235b-a22b": "qwen3-235b", "qwen3-coder-480b-a35b": "qwen3-480b",
    "qwen3.5-35b-a3b": "qwen3.5-35b", "qwen3.6-35b-a3b": "qwen3.5-35b", "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.5-122b-a10b": "qwen3.5-122b", "qwen3.5-397b-a17b": "qwen3.5-397b",
    "qwen3-next-80b-a3b": "qwen3-next-80b", "qwen3-coder-next": "qwen3-next-80b",
    "nvidia-nemotron-3-nano-30b-a3b-bf16": "nemotron-3-nano", "nemotron-3-nano-30b-a3b": "nemotron-3-nano",
    "granite-4.0-h-micro": "granite-4-h-micro", "granite-4.0-h-tiny": "granite-4-h-tiny",
    "granite-4.0-h-small": "granite-4-h-small", "falcon-h1r-7b": "falcon-h1-7b",
    "glm-4.5-air": "glm-air", "glm-4.7-flash": "glm-flash", "minimax-m2.1": "minimax-m2",
    "deepseek-r1": "deepseek-v3", "deepseek-v2-lite": "deepseek-lite", "deepseek-v3.1": "deepseek-v3",
    "kimi-k2-instruct": "kimi-k2", "mistral-small-3": "mistral-small-24b", "meta-llama-3-8b": "llama-8b",
    "meta-llama-3.1-8b": "llama-8b",
}  # fmt: skip
# Of a published name: its organisation, and what does not change the shape.
_UNSHAPED = re.compile(r"^.*/|-(instruct|it|pt|base|chat|hf|thinking|v\d\.\d|\d{4})(?=-|$)")


def find_model(name: str) -> ModelConfig:
    """The shape of a model by its published name or the name here, in any case. Raises InputError, which lists near
    names.
    """
    plain = _UNSHAPED.sub("", name.lower().replace("_", "-"))
    if found := MODELS.get(_ALSO.get(plain, plain)):
        return found
    near = get_close_matches(plain, [*MODELS, *_ALSO], 1, 0.8)
    perhaps = f"Did you mean {near[0]}? " if near else ""
    raise InputError(
        f"--shape {name} is not known. {perhaps}There are {_listed(_ALSO.get(near[0], near[0]) if near else '')}; "
        "or name a folder with a config.json."
    )


def _listed(near: str) -> str:
    """The names that begin as `near` does, or all for "", written as llama-{7b,8b}."""
    families: dict[str, list[str]] = {}
    for name in (name for name in MODELS if name.partition("-")[0].startswith(near.partition("-")[0])):
        family, _, size = name.rpartition("-")
        families.setdefault(family, []).append(size)
    braced = lambda sizes: sizes[0] if len(sizes) == 1 else f"{{{','.join(sizes)}}}"
    return " ".join(f"{family}-{braced(sizes)}" for family, sizes in families.items())
