"""The families: one row for all models of a model_type, what config.json leaves unsaid. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.models.families import names
from trireme.models.families.experts import ExpertKeys
from trireme.models.families.names import Names

SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # the last three: one formula
EXACT_GELU = "gelu"
SPELLED = dict(  # field -> key of config.json
    vocab="vocab_size",
    width="hidden_size",
    n_layers="num_hidden_layers",
    n_heads="num_attention_heads",
    ffn="intermediate_size",
    max_positions="max_position_embeddings",
    eps="rms_norm_eps",
    act="hidden_act",
    theta="rope_theta",
    share="partial_rotary_factor",
)
OLD_SPELLED = dict(
    vocab="vocab_size",
    width="n_embd",
    n_layers="n_layer",
    n_heads="n_head",
    ffn="n_inner",
    max_positions="n_positions",
    eps="layer_norm_epsilon",
    act="activation_function",
)
OLD_ALIASES = {SPELLED[name]: OLD_SPELLED[name] for name in ("width", "n_layers", "n_heads", "max_positions")}

Flag = bool | tuple[str, bool]  # fixed, or (key, default)
BIAS, MLP_BIAS = ("attention_bias", False), ("mlp_bias", False)


@dataclass(frozen=True)
class Family:
    """What models of a model_type share; defaults as in transformers."""

    known_as: str
    dense_names: Names = names.SPLIT  # of layers without experts among those with
    names: Names = names.SPLIT
    spelled: dict[str, str] = field(default_factory=lambda: SPELLED)
    layer_norm: bool = False  # LayerNorms with a bias, not RMSNorms
    add_one: bool = False  # norms multiply by 1 + weight
    gated: bool = True  # otherwise an activation between two products
    acts: tuple[str, ...] = SILU  # the first is the default
    qk_norm: Literal["", "head", "width"] = ""  # norms of q and k: per head, or over all
    qk_norm_key: str = ""  # there are any; "": always
    rotary: bool = True
    grouped: bool = True  # reads num_key_value_heads and head_dim
    partial: float = 0.0  # default of partial_rotary_factor; 0: not read
    pairs: bool = False  # rope turns neighbouring features, not halves
    longrope: bool = False  # what scales positions is longrope, and nothing else
    query_beta: bool = False  # reads llama_4_scaling_beta: queries scaled by position
    theta: float = 10000.0
    local_theta: float | None = None  # of layers with a window, whose rope is their own; None: one rope for all
    local_theta_key: str = ""  # "": none
    original: int | None = None  # original_max_position_embeddings, outside rope's parameters
    kv_heads: int | None = None  # None: one a query head
    head_dim: int | None = None  # None: width / heads
    vocab: int | None = None  # None: config.json must say it; so for n_heads
    n_heads: int | None = None
    max_positions: int = 2048
    eps: float = 1e-6
    tied: bool = False
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    windows: Literal["none", "all", "above", "pattern", "dense"] = "none"  # "dense": none, and hybrids are refused
    window: int | None = 4096
    period: int = 0  # of "pattern": every period-th layer has no window; 0: all have
    period_key: bool = False  # reads sliding_window_pattern
    listed_type: str = ""  # the model_type that transformers takes it for where layer_types is there
    aliases: dict[str, str] = field(default_factory=dict)  # other names of keys -> those that are read
    unrotated: Literal["", "listed", "full", "typed"] = ""  # no_rope_layers; layers without window; all, by a key
    scaled: bool = False  # reads scales of embedding, attention, branches, logits
    query_scale: bool = False  # attention's scale is query_pre_attn_scalar ** -0.5
    embed_root: bool = False  # the embedding's factor is sqrt(width)
    experts: ExpertKeys | None = None  # in place of the MLP
    mxfp4: bool = False  # experts may be packed so
    mtp: bool = False  # num_nextn_predict_layers more in the file, which predict further tokens
    rope_said: bool = False  # config.json must describe rope: the default of transformers is no plain one
    parallel: bool = False  # reads use_parallel_residual
    by_layer: bool = False  # reads scale_attn_weights, scale_attn_by_inverse_layer_idx

    @property
    def accepts(self) -> set[str]:
        """The keys of INERT that it reads."""
        found = {"query_pre_attn_scalar"} if self.query_scale else set()
        if self.mxfp4:
            found |= {"quantization_config"}
        if self.partial:
            found |= {"partial_rotary_factor"}
        if self.scaled:
            found |= {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
        return found | ({"no_rope_layers"} if self.unrotated == "listed" else set())


_GLM: dict[str, Any] = dict(
    partial=0.5, pairs=True, kv_heads=2, head_dim=128, max_positions=131072, eps=1.5625e-7,
    qkv_bias=("attention_bias", True),
)  # fmt: skip
FAMILIES = {
    "gpt2": Family(
        "GPT-2, DistilGPT-2",
        names=names.IN_OUT, spelled=OLD_SPELLED, aliases=OLD_ALIASES, layer_norm=True, gated=False,
        acts=("gelu_new", *GELU), rotary=False, grouped=False,
        max_positions=1024, eps=1e-5, tied=True, qkv_bias=True, o_bias=True, mlp_bias=True, by_layer=True,
    ),
    "llama": Family(
        "LLaMA 1 to 3, TinyLlama, Yi, Falcon 3, DeepSeek-R1 distills",
        qkv_bias=BIAS, o_bias=BIAS, mlp_bias=MLP_BIAS,
    ),
    "mistral": Family(
        "Mistral 7B, Nemo, Small (text)", kv_heads=8, max_positions=131072, windows="all", listed_type="ministral"
    ),
    "qwen2": Family("Qwen 1.5 to 2.5", kv_heads=32, max_positions=32768, qkv_bias=True, windows="above"),
    "qwen3": Family(
        "Qwen 3 (dense)",
        kv_heads=32, head_dim=128, max_positions=32768, qk_norm="head", qkv_bias=BIAS,
        o_bias=BIAS, windows="above",
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
        aliases={"num_experts": "num_local_experts"}, mxfp4=True, rope_said=True,
    ),
    "olmoe": Family(
        "OLMoE",
        names=names.MIXTURE, max_positions=4096, eps=1e-5, qk_norm="width", qkv_bias=BIAS, o_bias=BIAS,
        experts=ExpertKeys(64, 8, 2048, width_key="intermediate_size"),
        aliases={"num_local_experts": "num_experts"},
    ),
    "phi3": Family(
        "Phi-3, 3.5 and 4 (text)",
        names=names.PACKED, partial=1.0, longrope=True, original=4096, max_positions=4096, eps=1e-5, windows="all",
        window=None,
    ),
    "smollm3": Family(
        "SmolLM3",
        kv_heads=4, max_positions=32768, theta=2e6, tied=True, qkv_bias=BIAS, o_bias=BIAS,
        mlp_bias=MLP_BIAS, windows="pattern", window=None, unrotated="listed",
    ),
    "granite": Family("Granite 3 (dense)", qkv_bias=BIAS, o_bias=BIAS, mlp_bias=MLP_BIAS, scaled=True),
    "granitemoehybrid": Family(
        "Granite 4 (without experts and Mamba layers)",
        names=names.SHARED_MLP, spelled=SPELLED | dict(ffn="shared_intermediate_size"), qkv_bias=BIAS, o_bias=BIAS,
        scaled=True, windows="dense", unrotated="typed", aliases={"layers_block_type": "layer_types"},
    ),
    "starcoder2": Family(
        "StarCoder 2",
        names=names.PLAIN_MLP, spelled=SPELLED | dict(eps="norm_epsilon"), layer_norm=True, gated=False, acts=GELU,
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
    "exaone4": Family(
        "EXAONE 4",
        names=names.POST, qk_norm="head", eps=1e-5, kv_heads=32, windows="pattern", period=4, period_key=True,
        unrotated="full",
    ),
    "seed_oss": Family(
        "Seed-OSS",
        kv_heads=8, head_dim=128, max_positions=524288, qkv_bias=("attention_bias", True),
        o_bias=("attention_out_bias", False), mlp_bias=MLP_BIAS,
    ),
    "gemma3_text": Family(
        "Gemma 3 (270M, 1B; of 4B to 27B the text)",
        names=names.BOTH, spelled=SPELLED | dict(act="hidden_activation"), add_one=True, acts=GELU, qk_norm="head",
        theta=1e6, local_theta=1e4, local_theta_key="rope_local_base_freq", vocab=262208, n_heads=8, kv_heads=4,
        head_dim=256, max_positions=131072, tied=True, qkv_bias=BIAS, o_bias=BIAS, windows="pattern", period=6,
        period_key=True, query_scale=True, embed_root=True,
    ),
    "gpt_neox": Family(
        "Pythia, GPT-NeoX-20B",
        names=names.NEOX, spelled=SPELLED | dict(eps="layer_norm_eps", theta="rotary_emb_base", share="rotary_pct"),
        layer_norm=True, gated=False, acts=(EXACT_GELU, *GELU), grouped=False, partial=0.25, eps=1e-5,
        qkv_bias=("attention_bias", True),
        o_bias=("attention_bias", True), mlp_bias=True, parallel=True,
    ),
    "ministral3": Family(
        "Ministral 3 (text)",
        kv_heads=8, head_dim=128, max_positions=262144, eps=1e-5, windows="all", window=None, query_beta=True,
    ),
    "ministral": Family("Ministral 8B (2410)", kv_heads=8, max_positions=131072, windows="pattern"),
    "glm4_moe": Family(
        "GLM-4.5, 4.5-Air, 4.6 and 4.7",
        names=names.CORRECTED, partial=0.5, kv_heads=8, max_positions=131072, eps=1e-5, qk_norm="head",
        qk_norm_key="use_qk_norm", qkv_bias=BIAS, mtp=True,
        experts=ExpertKeys(
            128, 8, 1408, "n_routed_experts", normalised=True, beside=1, sigmoid=True, leading=1
        ),
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "glm": Family("GLM-4-9B (chat-hf)", names=names.GATE_UP, **_GLM),
    "glm4": Family("GLM-4-0414, GLM-Z1 (dense)", names=names.GLM4, **_GLM),
}  # fmt: skip


@dataclass(frozen=True)
class Wrapper:
    """A multimodal model: the language model of its text_config is trained, the rest copied."""

    known_as: str
    texts: tuple[str, ...]  # model types of text_config; the first is the default
    carried: tuple[str, ...] = ("model.vision_tower.", "model.multi_modal_projector.")


WRAPPERS = {
    "gemma3": Wrapper("Gemma 3 (4B to 27B)", ("gemma3_text",)),
    "mistral3": Wrapper("Mistral Small 3.1 and 3.2, Ministral 3", ("mistral", "ministral3")),
}
