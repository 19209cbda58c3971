"""The table of model families: one row per model_type, with the defaults that config.json leaves out. No torch."""

from __future__ import annotations

from typing import Any

from trireme.models.families import gemma4, names
from trireme.models.families.experts import ExpertKeys
from trireme.models.families.family import (
    BIAS,
    EXACT_GELU,
    GELU,
    MLP_BIAS,
    OF_LOGITS,
    OF_SCORES,
    OLD_ALIASES,
    OLD_SPELLED,
    RELU2,
    SPELLED,
    Family,
    Wrapper,
)
from trireme.models.families.latent import LatentKeys
from trireme.models.families.rope import GLOBAL, LOCAL
from trireme.models.families.scans import LINEAR, DeltaKeys, MambaKeys

_GLM: dict[str, Any] = dict(
    partial=0.5, pairs=True, kv_heads=2, head_dim=128, max_positions=131072, eps=1.5625e-7,
    qkv_bias=("attention_bias", True),
)  # fmt: skip
_SHARED: dict[str, Any] = dict(
    shared_count=1, shared_count_key="n_shared_experts", sigmoid=True, scale_key="routed_scaling_factor",
)  # fmt: skip
PATTERN = "sliding_window_pattern"
_LATENT: dict[str, Any] = dict(moe_layer_freq=(None, 1))
_INDEXED = _LATENT | dict(
    topk_method=(None, "noaux_tc"), scoring_func=(None, "sigmoid"), mlp_bias=(None, False), rope_interleave=(None, True)
)
_HYBRID: dict[str, Any] = dict(
    add_one=True, head_dim=256, max_positions=32768, qk_norm="head", partial=0.25, qkv_bias=BIAS, o_bias=BIAS,
    scan=DeltaKeys(), attention_gate="queries", carried=("mtp.",),
)  # fmt: skip
_QWEN_VL: dict[str, Any] = dict(
    kv_heads=8, max_positions=32768, eps=1e-5, theta=1e6, qkv_bias=True, windows="above", above=80,
    rope_types={"mrope": "default"}, inner=True,
)  # fmt: skip
_GEMMA2: dict[str, Any] = dict(
    spelled=SPELLED | dict(act="hidden_activation"), add_one=True, act=GELU, vocab=256000, n_heads=8, kv_heads=4,
    head_dim=256, max_positions=8192, tied=True, qkv_bias=BIAS, o_bias=BIAS, windows="pattern", period=2,
    query_scale=True, embed_root=True, caps={OF_SCORES: 50.0, OF_LOGITS: 30.0},
)  # fmt: skip
FAMILIES = {
    "gpt2": Family(
        "GPT-2, DistilGPT-2",
        names=names.IN_OUT, spelled=OLD_SPELLED, aliases=OLD_ALIASES, layer_norm=True, gated=False,
        act="gelu_new", rotary=False, grouped=False,
        max_positions=1024, eps=1e-5, tied=True, qkv_bias=True, o_bias=True, mlp_bias=True, by_layer=True,
    ),
    "llama": Family(
        "LLaMA 1 to 3, TinyLlama, Yi, Falcon 3, DeepSeek-R1 distills",
        qkv_bias=BIAS, o_bias=BIAS, mlp_bias=MLP_BIAS,
    ),
    "mistral": Family(
        "Mistral 7B, Nemo, Small 3 to 3.2", kv_heads=8, max_positions=131072, windows="all", listed_type="ministral"
    ),
    "qwen2": Family("Qwen 1.5 to 2.5", kv_heads=32, max_positions=32768, qkv_bias=True, windows="above", above=28),
    "qwen3": Family(
        "Qwen 3 (dense)",
        kv_heads=32, head_dim=128, max_positions=32768, qk_norm="head", qkv_bias=BIAS,
        o_bias=BIAS, windows="above", above=28,
    ),
    "qwen3_moe": Family(
        "Qwen 3 (mixture of experts)",
        names=names.MIXTURE, kv_heads=4, max_positions=32768, qk_norm="head", qkv_bias=BIAS, o_bias=BIAS,
        experts=ExpertKeys(128, 8, 768, among=True), aliases={"num_local_experts": "num_experts"},
    ),
    "qwen2_moe": Family(
        "Qwen 1.5 and 2 (mixtures of experts)",
        names=names.SHARED, kv_heads=16, max_positions=32768, qkv_bias=("qkv_bias", True),
        experts=ExpertKeys(60, 4, 1408, shared=5632, among=True),
    ),
    "mixtral": Family(
        "Mixtral 8x7B, 8x22B",
        names=names.SPARSE, kv_heads=8, max_positions=131072, eps=1e-5, theta=1e6, windows="all", window=None,
        experts=ExpertKeys(8, 2, 14336, "num_local_experts", "intermediate_size", renormalise=True),
        aliases={"num_experts": "num_local_experts"},
    ),
    "gpt_oss": Family(
        "gpt-oss 20b and 120b",
        names=names.FUSED, kv_heads=8, head_dim=64, max_positions=131072, eps=1e-5, theta=150000.0, windows="pattern",
        window=128, period=2, qkv_bias=("attention_bias", True), o_bias=("attention_bias", True),
        experts=ExpertKeys(
            128, 4, 2880, "num_local_experts", "intermediate_size", renormalise=True, limit=7.0, bias=True
        ),
        aliases={"num_experts": "num_local_experts"}, packings=("mxfp4",), rope_said=True,
    ),
    "flint": Family(
        "Flint 40B-A3B",
        names=names.FLINT, vocab=150144, n_heads=32, kv_heads=4, head_dim=128, ffn=6144, max_positions=262144,
        qk_norm="head", qkv_bias=BIAS, o_bias=BIAS, windows="pattern", window=513, period=4, ends=True,
        unrotated="full",
        experts=ExpertKeys(
            256, 6, 512, normalised=True, sigmoid=True, fp32=True, among=True, dense=(0, 1),
            shared_width_key="shared_expert_intermediate_size", shared_width=1024,
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "olmoe": Family(
        "OLMoE",
        names=names.MIXTURE, max_positions=4096, eps=1e-5, qk_norm="width", qkv_bias=BIAS, o_bias=BIAS,
        experts=ExpertKeys(64, 8, 2048, width_key="intermediate_size"),
        aliases={"num_local_experts": "num_experts"},
    ),
    "phi3": Family(
        "Phi-3, 3.5 and 4",
        names=names.PACKED, partial=1.0, longrope=True, rope_types={"su": "longrope", "yarn": "longrope"},
        original=4096, max_positions=4096, eps=1e-5, windows="all", window=None,
    ),
    "smollm3": Family(
        "SmolLM3",
        kv_heads=4, max_positions=32768, theta=2e6, tied=True, qkv_bias=BIAS, o_bias=BIAS,
        mlp_bias=MLP_BIAS, windows="pattern", window=None, unrotated="listed",
    ),
    "granite": Family("Granite 3 (dense)", qkv_bias=BIAS, o_bias=BIAS, mlp_bias=MLP_BIAS, scaled=True),
    "granitemoehybrid": Family(
        "Granite 4 (350M to 32B-A9B, with Mamba2 layers or without)",
        names=names.SHARED_MLP_STACKED, dense=names.SHARED_MLP.mlp,
        spelled=SPELLED | dict(ffn="shared_intermediate_size"), qkv_bias=BIAS, o_bias=BIAS,
        scaled=True, unrotated="typed", aliases={"layers_block_type": "layer_types"}, scan=MambaKeys(),
        experts=ExpertKeys(
            8, 2, 11008, "num_local_experts", "intermediate_size", renormalise=True, optional=True,
            shared_width_key="shared_intermediate_size", scale_key="residual_multiplier",
        ),
    ),
    "bamba": Family(
        "Bamba 9B",
        names=names.FEED_FORWARD, partial=0.5, max_positions=262144, eps=1e-5, qkv_bias=BIAS, o_bias=BIAS,
        mlp_bias=MLP_BIAS, scan=MambaKeys(attending="attn_layer_indices"), only={"partial_rotary_factor": (None, 0.5)},
    ),
    "falcon_h1": Family(
        "Falcon-H1 (0.5B to 34B)",
        names=names.FEED_FORWARD, vocab=128000, n_heads=32, ffn=14336, kv_heads=8, max_positions=8192, eps=1e-5,
        mlp_bias=MLP_BIAS, multiplied=True, unadapted=("mamba.out_proj",),
        scan=MambaKeys(with_attention=True, biases=("mamba_proj_bias", "projectors_bias")),
        only={"attention_bias": (None, False)},
    ),
    "nemotron_h": Family(
        "Nemotron-H, Nemotron Nano 2, Nemotron 3 (Nano 30B-A3B, Super 120B-A12B)",
        names=names.ONE_MIXER_EXPERTS, dense=names.ONE_MIXER.mlp, single=True, unadapted=("mixer.out_proj",),
        spelled=SPELLED | dict(eps="layer_norm_epsilon", act="mlp_hidden_act"), gated=False, act=RELU2,
        vocab=131072, n_heads=32, kv_heads=8, head_dim=128, ffn=21504, max_positions=4096, eps=1e-5, unrotated="all",
        carried=("mtp.",),
        scan=MambaKeys(
            heads=("mamba_num_heads", 128), head_dim=("mamba_head_dim", 64), state=("ssm_state_size", 128),
            groups=("n_groups", 8), taps=("conv_kernel", 4), expand="", conv_bias="use_conv_bias",
            low_key="time_step_min", biases=("use_bias",), layers="layers_block_type",
        ),
        experts=ExpertKeys(
            8, 2, 7688, "n_routed_experts", normalised=True, sigmoid=True, scale_key="routed_scaling_factor",
            groups=(1, 1), shared_width_key="moe_shared_expert_intermediate_size", shared_width=7688,
            latent_key="moe_latent_size", typed=True,
        ),
        aliases={
            "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel", "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias",
        },
        only={"mlp_bias": (None, False), "attention_bias": (None, False), "tie_word_embeddings": (None, False)},
    ),
    "starcoder2": Family(
        "StarCoder 2",
        names=names.PLAIN_MLP, spelled=SPELLED | dict(eps="norm_epsilon"), layer_norm=True, gated=False, act=GELU,
        kv_heads=2, max_positions=4096, eps=1e-5, tied=True, qkv_bias=True, o_bias=True, mlp_bias=True, windows="all",
        window=None,
    ),
    "olmo2": Family(
        "OLMo 2",
        names=names.POST, qk_norm="width", eps=1e-5, qkv_bias=BIAS, o_bias=BIAS,
    ),
    "olmo3": Family(
        "OLMo 3",
        names=names.POST, qk_norm="width", eps=1e-5, theta=5e5, local_theta=5e5, qkv_bias=BIAS, o_bias=BIAS,
        windows="pattern", period=4,
    ),
    "olmo_hybrid": Family(
        "OLMo Hybrid 7B",
        names=names.POST_DELTA, scan_names=names.DELTA_AMONG_POST, vocab=100352, n_heads=30, ffn=11008,
        qk_norm="width", max_positions=65536, qkv_bias=BIAS, o_bias=BIAS, unrotated="null",
        scan=DeltaKeys(
            interval_key="", by_width=True, negative_key="linear_allow_neg_eigval", eps=1e-5, separate_convs=True
        ),
    ),
    "exaone4": Family(
        "EXAONE 4",
        names=names.POST, qk_norm="head", eps=1e-5, kv_heads=32, windows="pattern", period=4, period_key=PATTERN,
        unrotated="full",
    ),
    "seed_oss": Family(
        "Seed-OSS",
        kv_heads=8, head_dim=128, max_positions=524288, qkv_bias=("attention_bias", True),
        o_bias=("attention_out_bias", False), mlp_bias=MLP_BIAS,
    ),
    "gemma3_text": Family(
        "Gemma 3 (270M to 27B)",
        names=names.BOTH, spelled=SPELLED | dict(act="hidden_activation"), add_one=True, act=GELU, qk_norm="head",
        theta=1e6, local_theta=1e4, local_theta_key="rope_local_base_freq", vocab=262208, n_heads=8, kv_heads=4,
        head_dim=256, max_positions=131072, tied=True, qkv_bias=BIAS, o_bias=BIAS, windows="pattern", period=6,
        period_key=PATTERN, query_scale=True, embed_root=True, caps={OF_LOGITS: None},
    ),
    "gemma4_text": Family(
        "Gemma 4 (12B, 26B-A4B, 31B)",
        names=names.GEMMA4, layers=gemma4.layers, spelled=SPELLED | dict(act="hidden_activation"), act=GELU,
        vocab=262144, n_heads=8, kv_heads=4, head_dim=256, max_positions=131072, tied=True, embed_root=True,
        theta=1e6, local_theta=1e4, nested=True, caps={OF_LOGITS: None},
        only={"use_bidirectional_attention": (None, False, "vision"),  # vision: of images' tokens
              "attention_bias": (None, False)},
    ),
    "muse_glimmer_text": Family(
        "Muse Glimmer 30B",
        names=names.GATED_BOTH, spelled=SPELLED | dict(act="hidden_activation"), attention_gate="values",
        add_one=True, plain_end=True, entry_norm=True, post_eps_key="post_norm_eps", eps=1e-5, qk_norm="bare",
        factors=("qk_scale_factor", "output_multiplier"), caps={OF_LOGITS: 20.0}, vocab=202048, n_heads=32, kv_heads=2,
        head_dim=128, ffn=19968, max_positions=131072, windows="pattern", window=2048, period=4, last=True,
        thetas=True, one_theta=True, unrotated="last", only={"attention_bias": (None, False)}, inner=True,
    ),
    "gemma": Family(
        "Gemma 1 (2B, 7B), CodeGemma",
        add_one=True, act=GELU, tanh_meant=True, vocab=256000, n_heads=16, kv_heads=16, head_dim=256,
        max_positions=8192, tied=True, qkv_bias=BIAS, o_bias=BIAS, embed_root=True,
    ),
    "gemma2": Family("Gemma 2 (2B to 27B)", names=names.BOTH, **_GEMMA2),
    "vaultgemma": Family("VaultGemma 1B", names=names.BEFORE_MLP, **_GEMMA2),
    "gpt_neox": Family(
        "Pythia, GPT-NeoX-20B",
        names=names.NEOX, spelled=SPELLED | dict(eps="layer_norm_eps", theta="rotary_emb_base", share="rotary_pct"),
        layer_norm=True, gated=False, act=EXACT_GELU, grouped=False, partial=0.25, eps=1e-5,
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True), mlp_bias=True, parallel=True,
    ),
    "ministral3": Family(
        "Ministral 3 (3B to 14B)",
        kv_heads=8, head_dim=128, max_positions=262144, eps=1e-5, windows="all", window=None, query_beta=True,
    ),
    "ministral": Family("Ministral 8B (2410)", kv_heads=8, max_positions=131072, windows="pattern"),
    "glm4_moe": Family(
        "GLM-4.5, 4.5-Air, 4.6 and 4.7",
        names=names.CORRECTED, partial=0.5, kv_heads=8, max_positions=131072, eps=1e-5, qk_norm="head",
        qk_norm_key="use_qk_norm", qkv_bias=BIAS, mtp=True,
        experts=ExpertKeys(128, 8, 1408, "n_routed_experts", normalised=True, leading=1, **_SHARED),
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "solar_open": Family(
        "Solar Open 100B",
        names=names.CORRECTED, kv_heads=8, head_dim=128, ffn=1280, max_positions=131072, eps=1e-5, theta=1e6,
        qkv_bias=BIAS, experts=ExpertKeys(128, 8, 1280, "n_routed_experts", normalised=True, **_SHARED),
        aliases={"num_local_experts": "n_routed_experts"}, only={"first_k_dense_replace": (None, 0)},
    ),
    "dots1": Family(
        "dots.llm1",
        names=names.CORRECTED, kv_heads=32, qk_norm="head", qkv_bias=BIAS, o_bias=BIAS, windows="pattern", above=62,
        experts=ExpertKeys(None, None, 1408, "n_routed_experts", leading=0, **_SHARED | dict(shared_count=None)),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "minimax_m2": Family(
        "MiniMax-M2 to M2.7, in fp8",
        names=names.SPARSE_CORRECTED, kv_heads=8, head_dim=128, max_positions=196608, theta=5e6, qk_norm="width",
        partial=1.0, rotary_dim=True,
        experts=ExpertKeys(256, 8, 1536, "num_local_experts", "intermediate_size", renormalise=True, sigmoid=True),
        aliases={"num_experts": "num_local_experts"},
    ),
    "exaone_moe": Family(
        "K-EXAONE 236B",
        names=names.OUTSIDE, kv_heads=32, eps=1e-5, qk_norm="head", windows="pattern", period=4, period_key=PATTERN,
        unrotated="full", carried=("mtp.",),
        experts=ExpertKeys(
            64, 8, 1024, normalised=True, leading=1, by_layer_types=True,
            **_SHARED | dict(shared_count_key="num_shared_experts", scale=2.5),
        ),
    ),
    "hy_v3": Family(
        "Hy3 295B",
        names=names.SHARED_MLP_CORRECTED, kv_heads=8, head_dim=128, max_positions=131072, eps=1e-5, theta=11158840.0,
        qk_norm="head", qkv_bias=BIAS, o_bias=BIAS, mtp=True,
        experts=ExpertKeys(
            192, 8, 1536, renormalise=True, leading=1, by_layer_types=True,
            **_SHARED | dict(shared_count_key="num_shared_experts", scale=2.826, scale_key="router_scaling_factor"),
        ),
        aliases={"num_local_experts": "num_experts"},
        only={"mlp_bias": (None, False), "first_k_dense_replace": (None, 1)},
    ),
    "afmoe": Family(
        "Trinity Nano, Mini (26B-A3B) and Large (400B-A13B)",
        names=names.GATED_MIXTURE, dense=names.GATED.mlp, attention_gate="values", head_dim=128, max_positions=16384,
        eps=1e-5, qk_norm="head", windows="pattern", window=1024, period=4, period_key="global_attn_every_n_layers",
        unrotated="global", embed_root_key="mup_enabled",
        experts=ExpertKeys(
            64, 6, 1408, renormalise=True, leading=1, leading_key="num_dense_layers",
            **_SHARED | dict(shared_count=2, shared_count_key="num_shared_experts", scale_key="route_scale"),
        ),
        aliases={"num_local_experts": "num_experts"}, only={"attention_bias": (None, False)},
    ),
    "kolibri1": Family(
        "Kolibri-1 78B-A4B",
        names=names.KOLIBRI, vocab=128000, n_heads=48, kv_heads=4, head_dim=128, ffn=512, max_positions=262144,
        qk_norm="head", windows="pattern", window=513, period=5, unrotated="full",
        experts=ExpertKeys(
            384, 6, 512, sigmoid=True, raw=True, shared_width_key="shared_expert_intermediate_size", shared_width=512
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "laguna": Family(
        "Laguna XS.2 (33B) and S (117B)",
        names=names.LAGUNA, gate_key="gating", gate_act="softplus", heads_key="num_attention_heads_per_layer",
        unadapted=tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
        vocab=100352, n_heads=48, kv_heads=8, head_dim=128, ffn=8192, max_positions=131072, qk_norm="head",
        theta=5e5, local_theta=1e4, partial=1.0, nested=True, rope_said=True, windows="pattern", window=512, period=1,
        experts=ExpertKeys(
            256, 8, 512, renormalise=True, sigmoid=True, scale_key="moe_routed_scaling_factor", by_layer_types=True,
            leading=1, leading_key="", shared_width_key="shared_expert_intermediate_size", shared_width=512,
        ),
        aliases={"num_local_experts": "num_experts"},
        only={
            "attention_bias": (None, False), "partial_rotary_factor": (None, 1, 1.0),
            "moe_router_logit_softcapping": (None, 0, 0.0), "moe_apply_router_weight_on_input": (None, False),
        },
    ),
    "mimo_v2_flash": Family(
        "MiMo-V2-Flash 309B-A15B",
        names=names.MIMO, vocab=152576, n_heads=64, kv_heads=4, head_dim=192, ffn=16384, max_positions=131072,
        eps=1e-5, value_key="v_head_dim", value_scale_key="attention_value_scale", local_kv=2, local_sinks=True,
        theta=5e6, local_theta=1e4, partial=0.334, nested=True, qkv_bias=BIAS, windows="pattern", window=129, period=6,
        begins=True, before_key="sliding_window_size", carried=("model.mtp.",),
        experts=ExpertKeys(
            256, 8, 2048, "n_routed_experts", normalised=True, sigmoid=True, scale_key="routed_scaling_factor",
            scale_null=True, groups=(1, 1), by_layer_types=True, leading=1, leading_key="",
        ),
        aliases={"num_local_experts": "n_routed_experts"}, only={"partial_rotary_factor": (None, 0.334)},
    ),
    "mellum": Family(
        "Mellum 2",
        names=names.MIXTURE, kv_heads=4, head_dim=128, max_positions=131072, theta=5e5, local_theta=1e4, nested=True,
        qk_norm="head", qkv_bias=BIAS, o_bias=BIAS, windows="pattern", window=1024, period=1,
        carried=("mtp.",), experts=ExpertKeys(64, 8, 896, normalised=True, by_layer_types=True),
        aliases={"num_local_experts": "num_experts"},
    ),
    "ernie4_5": Family(
        "ERNIE 4.5 0.3B",
        pairs=True, kv_heads=2, head_dim=128, max_positions=131072, eps=1e-5, theta=5e5, tied=True,
        qkv_bias=("use_bias", False), o_bias=("use_bias", False), mlp_bias=("use_bias", False),
    ),
    "cwm": Family(
        "CWM 32B",
        kv_heads=8, head_dim=128, max_positions=131072, eps=1e-5, theta=1e6, rope_said=True, mlp_bias=MLP_BIAS,
        windows="pattern", window=8192, period=4, first=True,
    ),
    "helium": Family(
        "Helium 1 2B",
        pairs=True, kv_heads=20, head_dim=128, max_positions=4096, eps=1e-8, theta=1e5, qkv_bias=BIAS,
        mlp_bias=MLP_BIAS,
    ),
    "qwen3_vl_text": Family(
        "Qwen3-VL (2B to 32B)",
        kv_heads=32, head_dim=128, max_positions=128000, theta=5e5, qk_norm="head", qkv_bias=BIAS, o_bias=BIAS,
        inner=True,
    ),
    "qwen3_vl_moe_text": Family(
        "Qwen3-VL (30B-A3B, 235B-A22B)",
        names=names.IN_ONE, kv_heads=16, max_positions=128000, theta=5e5, qk_norm="head", qkv_bias=BIAS, o_bias=BIAS,
        experts=ExpertKeys(60, 4, 1408, renormalise=True, among=True), aliases={"num_local_experts": "num_experts"},
        inner=True,
    ),
    "qwen3_next": Family(
        "Qwen3-Next, Qwen3-Coder-Next (80B-A3B)",
        names=names.DELTA_BY_HEAD, kv_heads=2,
        experts=ExpertKeys(512, 10, 512, normalised=True, shared=512, among=True),
        aliases={"num_local_experts": "num_experts"}, **_HYBRID,
    ),
    "qwen3_5_text": Family(
        "Qwen 3.5, 3.6 and 3.8 (0.8B to 27B)",
        names=names.DELTA_TEXT, vocab=248320, n_heads=16, kv_heads=4, ffn=12288, **_HYBRID,
    ),
    "qwen3_5_moe_text": Family(
        "Qwen 3.5 and 3.6 (35B-A3B to 397B-A17B)",
        names=names.DELTA_IN_ONE_TEXT, vocab=248320, n_heads=16, kv_heads=2, ffn=512,
        experts=ExpertKeys(256, 8, 512, renormalise=True, shared=512), aliases={"num_local_experts": "num_experts"},
        **_HYBRID,
    ),
    "lara_mini": Family(
        "Lara-4-Mini 7B-A0.7B",
        names=names.LARA_IN_ONE, n_heads=16, kv_heads=4, head_dim=128, ffn=512, vocab=151936, max_positions=131072,
        tied=True, qk_norm="head", qkv_bias=BIAS, o_bias=BIAS, windows="pattern", window=512, unrotated="global",
        unadapted=("linear_attn.in_proj",),
        scan=DeltaKeys(
            pattern=(LINEAR, LOCAL, LINEAR, GLOBAL, LOCAL), interval_key="", heads=(8, 16)
        ),
        experts=ExpertKeys(
            128, 4, 512, normalised=True, fp32=True, shared_width_key="shared_expert_intermediate_size",
            shared_width=512,
        ),
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen2_5_vl_text": Family("Qwen2.5-VL (3B to 72B)", **_QWEN_VL),
    "qwen2_vl_text": Family("Qwen2-VL (2B to 72B)", **_QWEN_VL),
    "glm4v_text": Family(
        "GLM-4.1V-9B, 4.6V-Flash",
        names=names.GLM4, pairs=True, partial=1.0, kv_heads=2, max_positions=32768, eps=1e-5, qkv_bias=True, inner=True,
    ),
    "glm4v_moe_text": Family(
        "GLM-4.5V and 4.6V (106B)",
        names=names.CORRECTED, partial=0.5, kv_heads=8, max_positions=65536, eps=1e-5,
        qkv_bias=("attention_bias", True), mtp=True, inner=True,
        experts=ExpertKeys(128, 8, 1408, "n_routed_experts", normalised=True, leading=1, **_SHARED),
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "deepseek_v2": Family(
        "DeepSeek-V2, V2-Lite, Coder-V2",
        names=names.LATENT_MIXTURE, latent=LatentKeys(), pairs=True, qkv_bias=BIAS,
        o_bias=BIAS,
        experts=ExpertKeys(
            64, None, 1407, "n_routed_experts", renormalise=False, leading=0, fp32=True, groups=(1, 1), method=True,
            **_SHARED | dict(shared_count=2, sigmoid=False),
        ),
        aliases={"num_experts": "n_routed_experts"},
        only=_LATENT | dict(norm_topk_prob=(None, False), scoring_func=(None, "softmax"), mlp_bias=(None, False)),
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3, V3.1, R1; Moonlight; Kimi K2 in BF16 or fp8, K2.5 and K2.6 in INT4",
        names=names.LATENT_CORRECTED,
        vocab=129280, ffn=18432, n_heads=128, max_positions=4096, latent=LatentKeys(),
        pairs=True, pairs_key=True, qkv_bias=BIAS, o_bias=BIAS, mtp=True,
        experts=ExpertKeys(
            256, 8, 2048, "n_routed_experts", normalised=True, leading=3, groups=(8, 4), **_SHARED | dict(scale=2.5)
        ),
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        only=_LATENT | dict(topk_method=(None, "noaux_tc"), scoring_func=(None, "sigmoid")),
    ),
    "deepseek_v32": Family(
        "DeepSeek-V3.2 (documents of up to 2,048 tokens, where its attention is dense)",
        names=names.LATENT_CORRECTED, vocab=129280, ffn=18432, n_heads=128,
        max_positions=163840, latent=LatentKeys(), pairs=True, indexed=True, qkv_bias=BIAS, o_bias=BIAS, mtp=True,
        experts=ExpertKeys(
            256, 8, 2048, "n_routed_experts", normalised=True, leading=3, by_layer_types=True, groups=(8, 4),
            **_SHARED | dict(scale=2.5),
        ),
        aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}, only=_INDEXED,
    ),
    "glm_moe_dsa": Family(
        "GLM-5 (documents of up to 2,048 tokens, where its attention is dense)",
        names=names.LATENT_CORRECTED, vocab=154880, ffn=12288, n_heads=64,
        max_positions=202752, eps=1e-5, latent=LatentKeys(q_rank=2048, nope=192, value=256), pairs=True, indexed=True,
        qkv_bias=BIAS, o_bias=BIAS, mtp=True,
        experts=ExpertKeys(
            256, 8, 2048, "n_routed_experts", normalised=True, leading=3, by_layer_types=True, groups=(1, 1),
            **_SHARED | dict(scale=2.5),
        ),
        aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}, only=_INDEXED,
    ),
    "glm4_moe_lite": Family(
        "GLM-4.7-Flash",
        names=names.LATENT_CORRECTED,
        vocab=154880, ffn=10240, n_heads=20, max_positions=202752, eps=1e-5,
        latent=LatentKeys(q_rank=768, nope=192, value=256), pairs=True, pairs_key=True, qkv_bias=BIAS, o_bias=BIAS,
        mtp=True,
        experts=ExpertKeys(
            64, 4, 1536, "n_routed_experts", normalised=True, leading=1, by_layer_types=True, groups=(1, 1),
            **_SHARED | dict(scale=1.8),
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        only=_LATENT
        | dict(topk_method=(None, "noaux_tc"), scoring_func=(None, "sigmoid"), first_k_dense_replace=(None, 1)),
    ),
    "mistral4": Family(
        "Mistral Small 4 (119B)",
        names=names.LATENT_STACKED, inner=True,
        vocab=131072, ffn=12288, n_heads=32, max_positions=1048576,
        latent=LatentKeys(q_rank=1024, kv_rank=256, nope=64), pairs=True, pairs_key=True, partial=1.0,
        query_beta=True, rope_said=True, qkv_bias=BIAS, o_bias=BIAS,
        experts=ExpertKeys(
            128, 4, 2048, "n_routed_experts", normalised=True, leading=0, groups=(1, 1),
            **_SHARED | dict(sigmoid=False),
        ),
        aliases={"num_local_experts": "n_routed_experts"}, only=_LATENT,
    ),
    "youtu": Family(
        "Youtu-LLM 2B",
        names=names.LATENT, vocab=128256, ffn=6144, n_heads=16, max_positions=131072, tied=True, latent=LatentKeys(),
        pairs=True, pairs_key=True, qkv_bias=BIAS, o_bias=BIAS, only=_LATENT | dict(mlp_bias=(None, False)),
    ),
    "granitemoe": Family(
        "Granite 3 (1B-A400M, 3B-A800M)",
        names=names.STACKED, qkv_bias=BIAS, o_bias=BIAS, scaled=True,
        experts=ExpertKeys(
            8, 2, None, "num_local_experts", "intermediate_size", renormalise=True, scale_key="residual_multiplier"
        ),
    ),
    "granite_swa": Family(
        "Granite with windows and sinks",
        names=names.WITH_SINKS, kv_heads=4, max_positions=8192, eps=1e-5, tied=True, qkv_bias=BIAS, o_bias=BIAS,
        mlp_bias=MLP_BIAS, scaled=True, windows="pattern", window=128, period=4, first=True, thetas=True,
    ),
    "ernie4_5_moe": Family(
        "ERNIE 4.5 (21B-A3B, 300B-A47B)",
        names=names.STATICS, pairs=True, kv_heads=4, max_positions=131072, eps=1e-5, theta=5e5, tied=True,
        carried=("mtp", "model.mtp"),
        experts=ExpertKeys(
            64, 6, 1536, "moe_num_experts", chosen_key="moe_k", renormalise=True, shared_count=2,
            shared_count_key="moe_num_shared_experts", spaced=True,
        ),
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        only={"use_bias": (None, False), "moe_norm_min": (None, 1e-12)},
    ),
    "hunyuan_v1_dense": Family(
        "Hunyuan (0.5B to 7B)",
        names=names.LAYERNORMS, eps=1e-5, qk_norm="head", rope_first=True, alpha=True, qkv_bias=BIAS, o_bias=BIAS,
    ),
    "hunyuan_v1_moe": Family(
        "Hunyuan A13B (80B)",
        names=names.LAYERNORMS_MIXTURE, vocab=290943, n_heads=32, ffn=11008, eps=1e-5, qk_norm="head", rope_first=True,
        alpha=True, qkv_bias=BIAS, o_bias=BIAS,
        experts=ExpertKeys(
            1, 1, 11008, width_key="intermediate_size", chosen_key="moe_topk", renormalise=True, fp32=True,
            shared_width_key="intermediate_size", shared_width=11008,
            layered=(("moe_intermediate_size", None), ("num_shared_expert", 1)),
        ),
        aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        only={
            "moe_layer_num_skipped": (None, 0), "use_cla": (None, False), "use_mla": (None, False),
            "use_mixed_mlp_moe": (None, True), "use_qk_norm": (None, True), "position_embedding_xdrope": (None, False),
            "routed_scaling_factor": (None, False, 1), "group_limited_greedy": (None, False),
        },
    ),
    "iquestcoder": Family(
        "IQuest-Coder V1 (40B)",
        vocab=76800, n_heads=40, ffn=27648, kv_heads=8, head_dim=128, max_positions=131072, eps=1e-5, qkv_bias=BIAS,
        o_bias=BIAS, mlp_bias=MLP_BIAS, only={"use_sliding_window": (None, False)},
    ),
    "jais2": Family(
        "Jais 2 (8B, 70B)",
        names=names.NO_GATE, spelled=SPELLED | dict(eps="layer_norm_eps"), layer_norm=True, gated=False, act=RELU2,
        vocab=150272, n_heads=26, ffn=26624, max_positions=8192, eps=1e-5, qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True), mlp_bias=("mlp_bias", True),
    ),
    "arcee": Family(
        "AFM 4.5B",
        names=names.NO_GATE, gated=False, act=RELU2, max_positions=4096, eps=1e-5, qkv_bias=BIAS, o_bias=BIAS,
        mlp_bias=MLP_BIAS,
    ),
    "glm": Family("GLM-4-9B (chat-hf)", names=names.GATE_UP, **_GLM),
    "glm4": Family("GLM-4-0414, GLM-Z1 (dense)", names=names.GLM4, **_GLM),
}  # fmt: skip


OTHER_NAMES = {
    "kimi_k2": "deepseek_v3",
    "gemma4_unified_text": "gemma4_text",
}  # of a row: model_type in files of the same model
_WITH_MTP = "model.visual.", "mtp."
_LLAVA = "model.vision_tower.", "model.multi_modal_projector."
_QWEN_MEDIA = {"image_token_id": 151655, "video_token_id": 151656}
_KIMI = "model.vision_tower.", "model.mm_projector.", "vision_tower.", "mm_projector."
_GLM_MEDIA = {"image_token_id": 151343, "video_token_id": 151344}
_QWEN35_MEDIA = {"image_token_id": 248056, "video_token_id": 248057}
_GEMMA4 = Wrapper(
    ("gemma4_text",), {"image_token_id": 258880, "video_token_id": 258884, "audio_token_id": 258881},
    ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."), tied="outside",
    tied_default=True, caps=True,
)  # fmt: skip
WRAPPERS = {
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "muse_glimmer": Wrapper(
        ("muse_glimmer_text",), {"image_token_id": 200092, "video_token_id": 200091},
        ("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."), tied="outside", caps=True,
    ),
    "gemma3": Wrapper(("gemma3_text",), {"image_token_index": 262144}, _LLAVA, behind=True),
    "mistral3": Wrapper(("mistral", "ministral3", "mistral4"), {"image_token_index": 10}, _LLAVA, behind=True),
    "kimi_k25": Wrapper(
        ("deepseek_v3",), {"image_token_id": 163605, "video_token_id": 163840}, _KIMI, tied="outside",
        tied_default=True, behind=True,
    ),
    "exaone4_5": Wrapper(
        ("exaone4",), {"image_token_id": 67, "video_token_id": 68}, _WITH_MTP, tied="outside",
        older={"exaone4_5_text": "exaone4"},
    ),
    "qwen3_5": Wrapper(("qwen3_5_text",), _QWEN35_MEDIA, _WITH_MTP, tied="outside"),
    "qwen3_5_moe": Wrapper(("qwen3_5_moe_text",), _QWEN35_MEDIA, _WITH_MTP, tied="outside"),
    "qwen3_vl": Wrapper(("qwen3_vl_text",), _QWEN_MEDIA, tied="outside"),
    "qwen3_vl_moe": Wrapper(("qwen3_vl_moe_text",), _QWEN_MEDIA, tied="outside"),
    "qwen2_5_vl": Wrapper(("qwen2_5_vl_text",), _QWEN_MEDIA, tied="either", flat=True),
    "qwen2_vl": Wrapper(("qwen2_vl_text",), _QWEN_MEDIA, tied="either", flat=True),
    "glm4v": Wrapper(("glm4v_text",), _GLM_MEDIA, tied="either"),
    "glm4v_moe": Wrapper(("glm4v_moe_text",), {"image_token_id": 151363, "video_token_id": 151364}, tied="either"),
    "glm46v": Wrapper(("glm4v_text",), _GLM_MEDIA, tied="outside"),
}  # fmt: skip


def text_of(raw: dict[str, Any]) -> tuple[Any, str]:
    """(what a wrapper's config.json says of the language model, the key that it stands under, "" where flat)."""
    if not WRAPPERS[raw["model_type"]].flat or raw.get("text_config") is not None:
        return raw.get("text_config"), "text_config"
    return {key: value for key, value in raw.items() if key not in ("model_type", "vision_config")}, ""
