"""Models small enough to hold in one memory: transformers' oracle beside our units, for the tests of models/."""

from __future__ import annotations

import json
import math

import torch
import transformers
from torch.overrides import TorchFunctionMode

from trireme.engine.memory import DTYPE, views
from trireme.kernels import ops
from trireme.models import head, hf, model
from trireme.models.config import ModelConfig, parse_config
from trireme.models.rows import make_rows, rope_tables
from trireme.models.sizes import narrow, shapes
from trireme.storage.layout import pack

transformers.PretrainedConfig.__repr__ = object.__repr__  # slow, and made of each config that is read, to be logged

LLAMA = dict(
    vocab_size=97,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
)
GPT2 = dict(vocab_size=97, n_embd=40, n_layer=2, n_head=4, n_positions=64)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
PLAIN = {key: value for key, value in LLAMA.items() if key != "head_dim"} | dict(hidden_size=64, pad_token_id=None)
LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.5,
    short_factor=[1.0, 1.1, 1.3, 2.0],
    long_factor=[1.2, 2.0, 3.0, 9.0],
)
DENSE = PLAIN | dict(
    shared_intermediate_size=56, num_local_experts=0, layer_types=["attention"] * 2, mamba_n_heads=16, mamba_expand=2
)  # fmt: skip
GRANITE = PLAIN | dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_n_heads=8,
    mamba_d_state=12, mamba_expand=2, shared_intermediate_size=56, num_local_experts=0,
)  # fmt: skip
FALCON_H1 = LLAMA | dict(
    mamba_d_ssm=36, mamba_n_heads=6, mamba_d_state=12, pad_token_id=None, embedding_multiplier=5.65,
    lm_head_multiplier=0.4, key_multiplier=0.39, attention_in_multiplier=1.2, attention_out_multiplier=0.93,
    ssm_in_multiplier=1.25, ssm_out_multiplier=0.7, ssm_multipliers=[0.35, 0.25, 0.7, 0.5, 0.9],
    mlp_multipliers=[0.88, 0.58],
)  # fmt: skip
OLMO_HYBRID = {key: value for key, value in LLAMA.items() if key != "head_dim"} | dict(
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    pad_token_id=None,
    eos_token_id=None,
)
NEMOTRON = dict(
    vocab_size=97, hidden_size=40, intermediate_size=56, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
    mamba_num_heads=4, mamba_head_dim=10, ssm_state_size=12, n_groups=2, max_position_embeddings=64, pad_token_id=None,
)  # fmt: skip
RELU2_EXPERTS = dict(
    n_routed_experts=6, moe_intermediate_size=24, moe_shared_expert_intermediate_size=32, routed_scaling_factor=1.7,
)  # fmt: skip
MIXTURE = LLAMA | dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, pad_token_id=None
)
HYBRID = LLAMA | dict(
    num_hidden_layers=3, full_attention_interval=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=12, pad_token_id=None,
)  # fmt: skip
HYBRID_EXPERTS = HYBRID | dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=32
)
GLM = LLAMA | dict(
    num_hidden_layers=3, head_dim=12, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
    routed_scaling_factor=1.7, pad_token_id=None,
)  # fmt: skip
LATENT = dict(
    vocab_size=97, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=64, pad_token_id=None, q_lora_rank=20, kv_lora_rank=24,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=6, num_experts_per_tok=2,
    moe_intermediate_size=24, routed_scaling_factor=1.7,
)  # fmt: skip
INDEXER = dict(index_topk=40, index_head_dim=16, index_n_heads=2)
OSS = MIXTURE | dict(
    num_local_experts=6,
    sliding_window=5,
    swiglu_limit=1.5,
    head_dim=16,
    intermediate_size=24,
    rope_parameters=YARN | dict(truncate=False),
)
GEMMA4 = dict(
    vocab_size=97,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    global_head_dim=24,
    num_global_key_value_heads=1,
    sliding_window=5,
    hidden_size_per_layer_input=0,
    attention_k_eq_v=True,
    num_kv_shared_layers=0,
    layer_types=["sliding_attention", "full_attention"] * 2,
    vocab_size_per_layer_input=97,
    max_position_embeddings=64,
    pad_token_id=None,
    final_logit_softcapping=30.0,
)
NEOX = dict(vocab_size=97, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64)  # fmt: skip
DIALECTS = LLAMA | dict(num_hidden_layers=3, pad_token_id=None)
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
PAIR = dict(sliding_window=5, layer_types=TYPES[:2])  # of two layers
CORRECTED = MIXTURE | dict(head_dim=12, n_routed_experts=6, n_shared_experts=1, routed_scaling_factor=1.7)
ROPES = dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=100.0))
AFMOE = MIXTURE | dict(num_hidden_layers=4, head_dim=12, sliding_window=5, num_shared_experts=1, route_scale=1.7)
KOLIBRI = MIXTURE | dict(
    num_hidden_layers=5, head_dim=12, sliding_window=5, shared_expert_intermediate_size=32, norm_topk_prob=False
)
LAGUNA = MIXTURE | dict(
    num_hidden_layers=3,
    head_dim=16,
    sliding_window=5,
    shared_expert_intermediate_size=32,
    layer_types=TYPES,
    num_attention_heads_per_layer=[4, 6, 2],
    moe_routed_scaling_factor=1.7,
    rope_parameters=dict(
        full_attention=YARN | dict(partial_rotary_factor=0.5), sliding_attention=ROPES["sliding_attention"]
    ),
)
MIMO = LLAMA | dict(
    num_hidden_layers=3,
    num_key_value_heads=1,
    head_dim=12,
    v_head_dim=8,
    sliding_window=5,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    routed_scaling_factor=1.7,
    pad_token_id=None,
)
LARA = HYBRID_EXPERTS | dict(
    sliding_window=5, eos_token_id=None, layer_types=["linear_attention", "sliding_attention", "full_attention"]
)
# name -> (model_type, keys of its config)
CASES = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": ("gpt2", GPT2 | dict(tie_word_embeddings=False, n_inner=72)),
    "gpt2 scaled by layer": ("gpt2", GPT2 | dict(scale_attn_by_inverse_layer_idx=True)),
    "gpt2 unscaled": ("gpt2", GPT2 | dict(scale_attn_weights=False, activation_function="gelu_pytorch_tanh")),
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", LLAMA | dict(tie_word_embeddings=True)),
    "llama biases": ("llama", LLAMA | dict(attention_bias=True, mlp_bias=True)),
    "llama one kv head, head dim 24": ("llama", LLAMA | dict(num_key_value_heads=1, head_dim=24)),
    "llama as many kv heads, head dim 80": ("llama", LLAMA | dict(num_key_value_heads=4, head_dim=80)),
    "llama linear rope": ("llama", LLAMA | dict(rope_parameters=dict(rope_type="linear", rope_theta=5e5, factor=3.0))),
    "llama 3.1 rope": ("llama", LLAMA | dict(rope_parameters=LLAMA3)),
    "mistral": ("mistral", LLAMA | dict(sliding_window=None)),
    "mistral window": ("mistral", LLAMA | dict(sliding_window=5)),
    "ministral": ("ministral", DIALECTS | dict(layer_types=TYPES, sliding_window=5)),
    "ministral3": ("ministral3", LLAMA | dict(rope_parameters=YARN | dict(llama_4_scaling_beta=0.1))),
    "ministral3 tied, window": ("ministral3", LLAMA | dict(
        tie_word_embeddings=True, sliding_window=9, rope_parameters=YARN | dict(
            llama_4_scaling_beta=0.7, original_max_position_embeddings=5, mscale=1.0, mscale_all_dim=1.0))),
    "qwen2": ("qwen2", LLAMA | dict(tie_word_embeddings=True)),
    "qwen2 window above": ("qwen2", LLAMA | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "llama yarn": ("llama", LLAMA | dict(rope_parameters=YARN)),
    "llama yarn factors": ("llama", LLAMA | dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=1.1,
                                                 truncate=False, beta_fast=8.0, beta_slow=2.0))),
    "phi3": ("phi3", PLAIN),
    "phi3 window, longrope within": ("phi3", PLAIN | dict(
        sliding_window=5, rope_parameters=LONG, original_max_position_embeddings=32)),
    "phi3 tied, longrope beyond": ("phi3", PLAIN | dict(
        tie_word_embeddings=True, rope_parameters=LONG, original_max_position_embeddings=2)),
    "smollm3": ("smollm3", PLAIN | dict(num_hidden_layers=3, no_rope_layer_interval=2)),
    "smollm3 window, biases": ("smollm3", PLAIN | dict(
        num_hidden_layers=3, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=4,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
    "granite": ("granite", PLAIN | dict(
        embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=3.0)),
    "granite tied, biases": ("granite", PLAIN | dict(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, residual_multiplier=0.5)),
    "granite 4": ("granitemoehybrid", DENSE | dict(
        position_embedding_type="rope", embedding_multiplier=12.0, attention_multiplier=0.2, residual_multiplier=0.22,
        logits_scaling=3.0)),
    "granite 4 tied, biases, no rope": ("granitemoehybrid", DENSE | dict(
        tie_word_embeddings=True, attention_bias=True, residual_multiplier=0.5, num_key_value_heads=4)),
    "granite 4 hybrid with experts": ("granitemoehybrid", GRANITE | dict(
        num_local_experts=6, intermediate_size=24, mamba_n_groups=2, embedding_multiplier=12.0,
        attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=3.0)),
    "granite 4 hybrid": ("granitemoehybrid", GRANITE | dict(
        mamba_conv_bias=False, time_step_limit=[0.3, 1.5], position_embedding_type="rope", attention_multiplier=0.3,
        tie_word_embeddings=True)),
    "nemotron 3": ("nemotron_h", NEMOTRON | RELU2_EXPERTS | dict(hybrid_override_pattern="MEM*E")),
    "nemotron 3 of all kinds, latents, groups": ("nemotron_h", NEMOTRON | RELU2_EXPERTS | dict(
        layers_block_type=["moe", "mlp", "full_attention", "linear_attention"], moe_latent_size=20, n_group=3,
        topk_group=2, norm_topk_prob=False, use_conv_bias=False, time_step_min=0.6)),
    "bamba": ("bamba", PLAIN | dict(
        num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=12, mamba_n_groups=2)),
    "falcon h1": ("falcon_h1", FALCON_H1),
    "falcon h1 with norms, groups, tied": ("falcon_h1", FALCON_H1 | dict(
        mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2, mamba_conv_bias=False, mlp_bias=True,
        time_step_limit=[0.3, 1.5], tie_word_embeddings=True)),
    "nemotron h": ("nemotron_h", NEMOTRON | dict(hybrid_override_pattern="M-M*-")),
    "starcoder2": ("starcoder2", PLAIN),
    "starcoder2 window, untied": ("starcoder2", PLAIN | dict(sliding_window=5, tie_word_embeddings=False)),
    "olmo2": ("olmo2", PLAIN),
    "olmo2 tied, biases": ("olmo2", PLAIN | dict(tie_word_embeddings=True, attention_bias=True,
                                                 num_key_value_heads=4)),
    "olmo3": ("olmo3", PLAIN | dict(num_hidden_layers=4, sliding_window=5)),
    "olmo3 yarn": ("olmo3", PLAIN | dict(
        num_hidden_layers=3, sliding_window=5, layer_types=TYPES,
        rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=10000.0)))),
    "exaone4": ("exaone4", PLAIN | dict(num_hidden_layers=3, sliding_window=5, layer_types=TYPES)),
    "exaone4 tied, no window": (
        "exaone4",
        PLAIN | dict(sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True),
    ),
    "seed_oss": ("seed_oss", LLAMA | dict(pad_token_id=None)),
    "seed_oss other biases": (
        "seed_oss",
        LLAMA | dict(pad_token_id=None, attention_bias=False, attention_out_bias=True, mlp_bias=True),
    ),
    "gemma3": ("gemma3_text", DIALECTS | dict(layer_types=TYPES, sliding_window=4, query_pre_attn_scalar=12)),
    "gemma3 untied, two ropes": ("gemma3_text", DIALECTS | dict(
        layer_types=TYPES, sliding_window=6, tie_word_embeddings=False, head_dim=16, num_key_value_heads=1,
        final_logit_softcapping=2.0,
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                             sliding_attention=dict(rope_type="default", rope_theta=100.0)))),
    "gemma": ("gemma", LLAMA),
    "gemma untied, gelu": ("gemma", LLAMA | dict(tie_word_embeddings=False, hidden_act="gelu", attention_bias=True)),
    "gemma2": ("gemma2", LLAMA | dict(sliding_window=4, query_pre_attn_scalar=12, attn_logit_softcapping=1.5,
                                      final_logit_softcapping=2.0)),
    "gemma2 untied, without caps": ("gemma2", LLAMA | dict(
        tie_word_embeddings=False, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True)),
    "gemma4": ("gemma4_text", GEMMA4 | dict(attention_k_eq_v=False)),
    "gemma4 keys that are values": ("gemma4_text", GEMMA4),
    "gemma4, experts": ("gemma4_text", GEMMA4 | dict(
        enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24)),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox in sequence, whole heads": ("gpt_neox", NEOX | dict(use_parallel_residual=False, rotary_pct=1.0)),
    "gpt_neox tied, without attention's biases": ("gpt_neox", NEOX | dict(
        tie_word_embeddings=True, attention_bias=False, rotary_emb_base=500)),
    "glm": ("glm", PLAIN | dict(head_dim=16)),
    "glm4": ("glm4", PLAIN | dict(head_dim=16)),
    "glm4 tied, whole heads, no biases": ("glm4", LLAMA | dict(
        pad_token_id=None, tie_word_embeddings=True, attention_bias=False, partial_rotary_factor=1.0)),
    "qwen3 moe": ("qwen3_moe", MIXTURE),
    "qwen3 moe tied, not renormalised, biases": ("qwen3_moe", MIXTURE | dict(
        tie_word_embeddings=True, norm_topk_prob=False, attention_bias=True, num_experts_per_tok=3)),
    "qwen2 moe": ("qwen2_moe", MIXTURE | dict(shared_expert_intermediate_size=32)),
    "mixtral": ("mixtral", MIXTURE | dict(num_local_experts=6)),
    "mixtral window, tied": ("mixtral", MIXTURE | dict(
        num_local_experts=4, sliding_window=5, tie_word_embeddings=True)),
    "gpt oss": ("gpt_oss", OSS),
    "gpt oss, other limits": ("gpt_oss", OSS | dict(
        swiglu_limit=0.5, num_experts_per_tok=3, layer_types=["full_attention", "sliding_attention"])),
    "flint": ("flint", MIXTURE | dict(
        num_hidden_layers=4, head_dim=12, sliding_window=5, mlp_only_layers=[0], shared_expert_intermediate_size=32)),
    "flint tied, biases, not renormalised": ("flint", MIXTURE | PAIR | dict(
        tie_word_embeddings=True, norm_topk_prob=False, attention_bias=True, mlp_only_layers=[],
        shared_expert_intermediate_size=20)),
    "olmoe": ("olmoe", PLAIN | dict(num_experts=6, num_experts_per_tok=3)),
    "glm4 moe": ("glm4_moe", GLM),
    "glm4 moe, q and k norms, biases": ("glm4_moe", GLM | dict(
        use_qk_norm=True, attention_bias=True, norm_topk_prob=False, n_shared_experts=2, first_k_dense_replace=2,
        tie_word_embeddings=True)),
    "solar open": ("solar_open", CORRECTED),
    "solar open tied, biases": ("solar_open", CORRECTED | dict(
        tie_word_embeddings=True, attention_bias=True, norm_topk_prob=False, n_shared_experts=2)),
    "dots1": ("dots1", CORRECTED | PAIR | dict(first_k_dense_replace=1)),
    "dots1 window above, biases": ("dots1", CORRECTED | dict(
        sliding_window=5, max_window_layers=1, attention_bias=True, norm_topk_prob=False, num_key_value_heads=None)),
    "afmoe": ("afmoe", AFMOE),
    "afmoe tied, scaled, without dense layers": ("afmoe", AFMOE | dict(
        num_dense_layers=0, mup_enabled=True, tie_word_embeddings=True, num_shared_experts=2, sliding_window=4,
        layer_types=["full_attention", *TYPES])),
    "kolibri1": ("kolibri1", KOLIBRI),
    "kolibri1 tied, renormalised": ("kolibri1", KOLIBRI | PAIR | dict(
        num_hidden_layers=2, tie_word_embeddings=True,
        norm_topk_prob=True)),
    "laguna": ("laguna", LAGUNA),
    "laguna tied, gates of each value, heads of all": ("laguna", LAGUNA | dict(
        num_hidden_layers=2, gating="per-element", num_attention_heads_per_layer=None, layer_types=TYPES[:2],
        mlp_layer_types=["sparse"] * 2, tie_word_embeddings=True)),
    "mimo v2 flash": ("mimo_v2_flash", MIMO),
    "mimo v2 flash tied, biases, groups": ("mimo_v2_flash", MIMO | dict(
        num_hidden_layers=2, attention_bias=True, tie_word_embeddings=True, n_group=3, topk_group=2,
        attention_value_scale=None, norm_topk_prob=False, layer_types=TYPES[:2], mlp_layer_types=["sparse"] * 2)),
    "minimax m2": ("minimax_m2", MIXTURE | dict(num_local_experts=6, intermediate_size=24, head_dim=12, rotary_dim=6)),
    "minimax m2 tied, whole heads": ("minimax_m2", MIXTURE | dict(
        num_local_experts=4, intermediate_size=24, tie_word_embeddings=True)),
    "exaone moe": ("exaone_moe", CORRECTED | PAIR | dict(num_shared_experts=1)),
    "exaone moe, all sparse, by period": ("exaone_moe", CORRECTED | dict(
        num_shared_experts=2, mlp_layer_types=["sparse"] * 2, sliding_window=5, sliding_window_pattern=2,
        norm_topk_prob=False)),
    "hy v3": ("hy_v3", CORRECTED | dict(num_shared_experts=1)),
    "hy v3, all sparse, biases": ("hy_v3", CORRECTED | dict(
        num_shared_experts=2, mlp_layer_types=["sparse"] * 2, attention_bias=True, router_scaling_factor=0.7,
        enable_moe_fp32_combine=False)),
    "mellum": ("mellum", MIXTURE | PAIR | dict(rope_parameters=ROPES)),
    "mellum, dense layers, no window": ("mellum", MIXTURE | dict(
        norm_topk_prob=False, mlp_layer_types=["dense", "sparse"], attention_bias=True)),
    "ernie": ("ernie4_5", LLAMA),
    "ernie untied, biases": ("ernie4_5", LLAMA | dict(use_bias=True, tie_word_embeddings=False)),
    "cwm": ("cwm", DIALECTS | dict(sliding_window=5, rope_parameters=LLAMA3)),
    "cwm biases": ("cwm", LLAMA | PAIR | dict(mlp_bias=True, rope_parameters=ROPES["sliding_attention"])),
    "helium": ("helium", LLAMA),
    "helium tied, biases": ("helium", LLAMA | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "granite moe": ("granitemoe", PLAIN | dict(
        num_local_experts=6, intermediate_size=24, embedding_multiplier=12.0, attention_multiplier=0.2,
        residual_multiplier=0.22, logits_scaling=3.0)),
    "granite moe tied, biases": ("granitemoe", PLAIN | dict(
        num_local_experts=5, num_experts_per_tok=3, intermediate_size=24, tie_word_embeddings=True,
        attention_bias=True)),
    "granite swa": ("granite_swa", PLAIN | dict(
        num_hidden_layers=3, sliding_window=5, layer_rope_theta=[0, 100.0, 100], embedding_multiplier=12.0,
        attention_multiplier=0.2, residual_multiplier=0.22, logits_scaling=3.0)),
    "granite swa untied, two thetas": ("granite_swa", PLAIN | PAIR | dict(
        layer_rope_theta=[100.0, 10000.0], tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "ernie moe": ("ernie4_5_moe", MIXTURE | dict(moe_num_experts=6, moe_k=2)),
    "ernie moe untied, spaced": ("ernie4_5_moe", MIXTURE | dict(
        num_hidden_layers=3, moe_num_experts=5, moe_k=3, moe_layer_start_index=0, moe_layer_end_index=1,
        moe_num_shared_experts=1, tie_word_embeddings=False)),
    "hunyuan": ("hunyuan_v1_dense", LLAMA),
    "hunyuan tied, biases, alpha": ("hunyuan_v1_dense", LLAMA | dict(
        attention_bias=True, tie_word_embeddings=True, rope_parameters=dict(
            rope_type="dynamic", alpha=50.0, rope_theta=10000.0, factor=1.0, mscale=1.0, mscale_all_dim=1.0))),
    "hunyuan moe": ("hunyuan_v1_moe", LLAMA | dict(num_experts=6, moe_topk=2, intermediate_size=24)),
    "hunyuan moe tied, biases, alpha": ("hunyuan_v1_moe", LLAMA | dict(
        num_experts=5, moe_topk=[3, 3], attention_bias=True, tie_word_embeddings=True, rope_parameters=dict(
            rope_type="dynamic", alpha=50.0, rope_theta=10000.0, factor=1.0))),
    "iquestcoder": ("iquestcoder", LLAMA),
    "jais2": ("jais2", PLAIN),
    "jais2 tied, without biases": ("jais2", PLAIN | dict(
        attention_bias=False, mlp_bias=False, tie_word_embeddings=True)),
    "vaultgemma": ("vaultgemma", LLAMA | dict(
        hidden_size=64, head_dim=16, sliding_window=4, query_pre_attn_scalar=12, attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0)),
    "arcee": ("arcee", LLAMA),
    "arcee tied, biases": ("arcee", LLAMA | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "qwen3 moe among dense layers": ("qwen3_moe", MIXTURE | dict(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])),
    "qwen2 moe among dense layers": ("qwen2_moe", MIXTURE | dict(
        shared_expert_intermediate_size=32, mlp_only_layers=[1])),
    "qwen3 moe of one expert": ("qwen3_moe", MIXTURE | dict(num_experts=1, num_experts_per_tok=1)),
    "qwen3.5": ("qwen3_5_text", HYBRID),
    "qwen3.5, attention first, odd widths": ("qwen3_5_text", HYBRID | dict(
        layer_types=["full_attention", "linear_attention"], num_hidden_layers=2, linear_num_key_heads=3,
        linear_num_value_heads=3, linear_key_head_dim=6, linear_value_head_dim=10, tie_word_embeddings=True)),
    "qwen3 next": ("qwen3_next", HYBRID_EXPERTS | dict(norm_topk_prob=True)),
    "qwen3 next among dense layers": ("qwen3_next", HYBRID_EXPERTS | dict(
        decoder_sparse_step=2, full_attention_interval=3, norm_topk_prob=False, linear_num_key_heads=1,
        linear_key_head_dim=16, linear_value_head_dim=16)),
    "qwen3.5 moe": ("qwen3_5_moe_text", HYBRID_EXPERTS),
    "olmo hybrid": ("olmo_hybrid", OLMO_HYBRID | dict(rope_parameters=dict(rope_type="default", rope_theta=None))),
    "olmo hybrid with rope, odd widths": ("olmo_hybrid", OLMO_HYBRID | dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=20,
        linear_allow_neg_eigval=False, layer_types=["full_attention", "linear_attention", "linear_attention"],
        tie_word_embeddings=True)),
    "lara mini": ("lara_mini", LARA),
    "lara mini untied, biases": ("lara_mini", LARA | dict(
        layer_types=["full_attention", "linear_attention", "sliding_attention"], tie_word_embeddings=False,
        attention_bias=True, norm_topk_prob=False)),
    "qwen3": ("qwen3", LLAMA),
    "qwen3 tied, biases": ("qwen3", LLAMA | dict(tie_word_embeddings=True, attention_bias=True, head_dim=16)),
    "deepseek v2": ("deepseek_v2", LATENT | dict(first_k_dense_replace=1)),
    "deepseek v2, groups, queries without a latent, yarn": ("deepseek_v2", LATENT | dict(
        q_lora_rank=None, topk_method="group_limited_greedy", n_group=3, topk_group=2, n_shared_experts=1,
        rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7))),
    "deepseek v3": ("deepseek_v3", LATENT | dict(
        first_k_dense_replace=1, n_group=3, topk_group=2, norm_topk_prob=True)),
    "deepseek v3 biases, halves, yarn": ("deepseek_v3", LATENT | dict(
        first_k_dense_replace=0, n_group=1, topk_group=1, norm_topk_prob=False, attention_bias=True,
        rope_interleave=False, tie_word_embeddings=True, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0))),
    "deepseek v32": ("deepseek_v32", LATENT | INDEXER | dict(first_k_dense_replace=1, n_group=3, topk_group=2)),
    "glm moe dsa, a shared index": ("glm_moe_dsa", LATENT | INDEXER | dict(
        num_hidden_layers=3, first_k_dense_replace=1, index_topk_freq=2, attention_bias=True, norm_topk_prob=False)),
    "glm4 moe lite": ("glm4_moe_lite", LATENT | dict(qk_nope_head_dim=16, v_head_dim=24, norm_topk_prob=True)),
    "youtu": ("youtu", LATENT),
    "youtu untied, queries without a latent": ("youtu", LATENT | dict(q_lora_rank=None, tie_word_embeddings=False)),
}  # fmt: skip


def oracle(model_type: str, keys: dict):
    """(transformers model with random weights, biases and norms included; ModelConfig of its config.json)."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **keys)
    auto = transformers.AutoModelForCausalLM
    oracle = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in oracle.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5))
            if "norm" in name or ".ln_" in name:
                p.add_(1.0 if name.endswith("weight") else 0.0)
        for name, buffer in oracle.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    return oracle, parse_config(json.loads(config.to_json_string(use_diff=False)) | {"model_type": model_type})


class InDouble(TorchFunctionMode):
    """What is said to be computed in fp32 is in fp64: models whose rounding grows are compared so."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda value: torch.float64 if value is torch.float32 else value
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


class Tiny:
    """All units of a model in memory, each one flat buffer, with gradients of the same order."""

    def __init__(self, cfg: ModelConfig, state: dict[str, torch.Tensor], dtype="F32", grad_dtype=None, device="cpu"):
        self.cfg, self.dtype, self.device = cfg, DTYPE[dtype], device
        units = range(cfg.n_units)
        trained = [[group for part in shapes.trained_parts(cfg, u) for group in part] for u in units]
        zeros = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device)
        memory = lambda u, groups, dtype: views(
            layout := pack(groups, dtype, narrow.own_dtypes(cfg, u)), zeros(layout.span)
        )
        self.views = [memory(u, trained[u], dtype) | memory(u, shapes.frozen_groups(cfg, u), dtype) for u in units]
        self.grad_views = [memory(u, trained[u], grad_dtype or dtype) for u in units]
        self.w = [model.weights(cfg, u, self.views[u]) for u in units]
        self.g = [model.gradients(cfg, u, self.grad_views[u]) for u in units]
        adapters = {name: t for name, t in state.items() if ".lora_" in name}
        base = dict(part for name, t in state.items() if name not in adapters for part in apart(cfg, name, t))
        found = hf.sources(cfg, {name: tuple(t.shape) for name, t in base.items()})
        for unit in self.views:
            for name, view in unit.items():
                for stored, part in apart(cfg, name, view):
                    part.copy_(adapters[name] if name in adapters else base[found[stored]])

    @property
    def grads(self) -> dict[str, torch.Tensor]:
        return {name: grad for unit in self.grad_views for name, grad in unit.items()}

    def hidden(self, ids, rows, keep=()):
        """Block inputs x[0..n_layers] and each block's saved tensors."""
        cfg, n = self.cfg, len(ids)
        xs, saves = [torch.empty(n, cfg.width, dtype=self.dtype, device=self.device)], []
        head.embed_forward(self.w[0], ids, rows, xs[0])
        for layer in range(cfg.n_layers):
            saves.append(empty_saved(cfg, n, self.dtype, keep, self.device, shapes.kind(cfg, layer + 1)))
            xs.append(torch.empty_like(xs[0]))
            model.forward(cfg, layer + 1, self.w[layer + 1], xs[layer], rows, saves[-1], xs[-1])
        return xs, saves

    def logits(self, ids, lengths):
        """(N, V) of packed documents."""
        rows = self.rows(lengths)
        y = head.final_norm(self.cfg, self.w[-1], self.hidden(ids, rows)[0][-1])[0]
        return ops.soft_cap(y @ head.with_output(self.cfg, self.w[-1], self.w[0]).matrix.T, self.cfg.logit_cap)

    def rows(self, lengths, load=None):
        rows = make_rows(lengths, rope_tables(self.cfg, max(lengths), self.device), self.device)
        return rows._replace(load=load)

    def train(self, ids, labels, lengths, keep=(), scale=None, load=None):
        """Losses (N,), with the gradients of their mean over the labels added to self.grads."""
        cfg, rows, top = self.cfg, self.rows(lengths, load), self.cfg.n_units - 1
        loss_rows = torch.nonzero(labels >= 0)[:, 0]
        xs, saves = self.hidden(ids, rows, keep)
        dy, dx = torch.empty_like(xs[0]), torch.empty_like(xs[0])
        w, g = (head.with_output(cfg, side[top], side[0]) for side in (self.w, self.g))
        scale = 1 / len(loss_rows) if scale is None else scale
        losses = head.head_loss(cfg, w, xs[-1], head.Targets(labels, loss_rows), scale, g, dy)
        for layer in reversed(range(cfg.n_layers)):
            u = layer + 1
            model.backward(cfg, u, self.w[u], self.g[u], xs[layer], saves[layer], dy, rows, dx)
            dy, dx = dx, dy
        head.embed_backward(self.g[0], dy, ids, rows)
        return losses


def oracle_generate(model, prompts, max_new):
    """transformers' greedy tokens for each prompt alone."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        keys = dict(max_new_tokens=max_new, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **keys)[0, len(prompt) :].tolist())
    return found


def own_name(cfg, name):
    """Ours of a name that transformers has in memory, where files of the model have another."""
    return cfg.names.stored(name)


def apart(cfg, name, t):
    """(name, view) of a tensor as a checkpoint has it: experts one by one, convolutions of queries, keys, values."""
    if not (cfg.experts or cfg.scan) or hf.carried(cfg, [name]):  # a vision tower has tensors of any rank
        return [(name, t)]
    stored = shapes.on_disk(cfg, own_name(cfg, name), tuple(t.shape))
    parts = t.view(-1).split([math.prod(shape) for _, shape in stored])
    return [(name, part.view(shape)) for (name, shape), part in zip(stored, parts, strict=True)]


def empty_saved(cfg, tokens, dtype, keep, device="cpu", kind="block"):
    """Uninitialised memory for the names in `keep`, filled with NaN."""
    return {
        name: torch.full(shape, float("nan"), dtype=torch.float32 if kind == "F32" else dtype, device=device)
        for name, (shape, kind) in shapes.saved_shapes(cfg, tokens, kind).items()
        if name in keep
    }


def shifted_labels(ids, lengths):
    """The token after each, -100 at the end of a document."""
    labels = torch.roll(ids, -1)
    labels[torch.cumsum(torch.tensor(lengths), 0) - 1] = -100
    return labels


def relative(a, b) -> float:
    """Frobenius distance of a from b, relative to b."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
