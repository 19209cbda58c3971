"""Names of a model's tensors in Hugging Face checkpoints. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any


@dataclass(frozen=True)
class Names:
    """A family's tensor names, those of a block without its prefix; "" stands for a tensor that does not exist."""

    base: str  # prefix without the head, missing in some checkpoints
    embed: str
    final_norm: str
    block: str
    norm1: str  # "": none
    qkv: tuple[str, ...]  # packed or three
    o: str
    norm2: str  # "": none
    up: tuple[str, ...]  # gate and up, or one; with experts the shared one's
    down: str
    positions: str = ""
    post1: str = ""  # norm behind o
    post2: str = ""  # behind down
    q_norm: str = ""
    k_norm: str = ""
    output: str = "lm_head"
    router: str = ""
    experts: str = ""  # in the engine .gate_up_proj (E, 2I, D) and .down_proj (E, D, I)
    shared_gate: str = ""
    each: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # on disk behind experts.N; (): all in one, as above
    stacked: tuple[str, ...] = ()  # names of the two on disk, (E, out, in), without `each`; (): as above, (E, in, out)
    either: bool = False  # or (E, out, in) by the same names: so transformers writes what it has read otherwise
    sinks: str = ""
    q_b: str = ""  # of latent attention: behind q_norm
    kv_b: str = ""  # behind k_norm
    mixed: tuple[str, ...] = ()  # projections of layers with a recurrence: queries to gate, then the numbers a head
    mixed_o: str = ""
    conv: str = ""
    decay: str = ""  # (H,)
    step: str = ""  # (H,)
    mixed_norm: str = ""
    skip: str = ""  # (H,)
    convs: tuple[str, ...] = ()  # the convolution's parts in files; (): it is one
    also: tuple[tuple[str, str], ...] = ()  # parts of names in some files -> those here
    mixed_by_head: bool = False  # a key head's queries, keys, values and gates stand together
    latent_in: str = ""  # to what experts read, and from what they give
    latent_out: str = ""
    correction: str = ""  # (E,) fp32, frozen
    correction_row: bool = False  # (1, E) on disk
    post_mlp: str = ""  # of an MLP beside experts: norm behind it; post2 is that of their sum
    norm_experts: str = ""  # before the experts, and behind them
    post_experts: str = ""
    router_scale: str = ""  # (D,): the router reads the residual, by a norm of its own
    expert_scale: str = ""  # (E,) factors of experts' weights
    scalar: str = ""  # (1,) factor of the residual behind the layer, frozen
    by_head: bool = False  # in the packed matrix q, k and v of a head stand together
    in_out: bool = False  # stored (in, out), not (out, in)
    in_modules: tuple[tuple[str, str], ...] = ()  # parts of names within a block -> those of transformers' modules

    def prefix(self, layer: int) -> str:
        return self.block.format(layer)

    @cached_property
    def of_mixers(self) -> Names:
        """These without names of MLPs."""
        plain: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in _OF_MLPS}
        return replace(self, **plain, **_NO_MLP)

    @cached_property
    def of_mlps(self) -> Names:
        """These without names of mixers."""
        plain: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in _OF_MIXERS}
        return replace(self, **plain, **_NO_MIXER)

    @property
    def experts_in_out(self) -> bool:
        """Whether a layer's experts are (E, in, out), not (E, out, in)."""
        return not self.each and not self.stacked

    @property
    def attention(self) -> tuple[str, ...]:
        """The names of attention's linear layers."""
        return (*self.qkv, *(name for name in (self.q_b, self.kv_b) if name), self.o)

    def module(self, name: str) -> str:
        """The name that transformers' module or parameter has for a tensor in files."""
        for here, there in self.in_modules:
            name = name.replace(here, there)
        return name

    def stored(self, name: str) -> str:
        """The inverse of `module`: some files have the names of modules."""
        for here, there in self.in_modules:
            name = name.replace(there, here)
        return name


_NO_MLP: dict[str, Any] = dict(norm2="", up=(), down="")
_NO_MIXER: dict[str, Any] = dict(norm1="", qkv=(), o="")
_OF_MLPS = {"post2", "router", "experts", "shared_gate", "each", "stacked", "either", "latent_in", "latent_out"}
_OF_MLPS |= {"correction", "correction_row", "in_modules", "also", "post_mlp", "norm_experts", "post_experts"}
_OF_MLPS |= {"router_scale", "expert_scale", "scalar"}
_OF_MIXERS = {"post1", "q_norm", "k_norm", "sinks", "q_b", "kv_b", "mixed", "mixed_o", "conv", "decay", "step"}
_OF_MIXERS |= {"mixed_norm", "skip", "convs", "mixed_by_head", "by_head"}


@lru_cache
def within(names: Names) -> Names:
    """The names of the same model inside a multimodal one."""
    inside = lambda name: name.replace("model.", "model.language_model.", 1)
    return replace(names, embed=inside(names.embed), final_norm=inside(names.final_norm), block=inside(names.block))


@lru_cache
def turned(names: Names) -> Names:
    """The names for files with experts (E, out, in), where those of the release are (E, in, out) or one by one."""
    return replace(names, each=(), stacked=(f"{names.experts}.gate_up_proj", f"{names.experts}.down_proj"))


@lru_cache
def direct(names: Names) -> Names:
    """The names of latent attention whose queries have no latent."""
    return replace(names, qkv=("self_attn.q_proj", names.qkv[1]), q_norm="", q_b="")


@lru_cache
def apart(names: Names) -> Names:
    """The names for files with a tensor for each expert, where those of the release have one for all."""
    return replace(names, each=MIXTURE.each, stacked=())


def adapter_names(module: str) -> tuple[str, str]:
    """The names of a module's adapter: of A (rank, in), of B (out, rank)."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _gated(module: str) -> dict[str, Any]:
    """The matrices of a gated MLP."""
    return dict(up=(f"{module}.gate_proj", f"{module}.up_proj"), down=f"{module}.down_proj")


SPLIT = Names(
    base="model.",
    embed="model.embed_tokens",
    final_norm="model.norm",
    block="model.layers.{}.",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    norm2="post_attention_layernorm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    **_gated("mlp"),
)
EXPERTS: dict[str, Any] = dict(router="mlp.gate", experts="mlp.experts")
WITH_SHARED = EXPERTS | _gated("mlp.shared_expert") | dict(shared_gate="mlp.shared_expert_gate")
MIXTURE = replace(SPLIT, **EXPERTS)
DELTA = replace(
    SPLIT,
    mixed=tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    mixed_o="linear_attn.out_proj",
    conv="linear_attn.conv1d",
    decay="linear_attn.A_log",
    step="linear_attn.dt_bias",
    mixed_norm="linear_attn.norm",
)
MAMBA: dict[str, Any] = dict(
    mixed=("mamba.in_proj",),
    mixed_o="mamba.out_proj",
    conv="mamba.conv1d",
    decay="mamba.A_log",
    step="mamba.dt_bias",
    mixed_norm="mamba.norm",
    skip="mamba.D",
)
SHARED = replace(SPLIT, **WITH_SHARED)
OF_WRAPPER = (("model.language_model.", "model."),)  # a text's own files may have the names of those around it
DELTA_TEXT = replace(DELTA, also=OF_WRAPPER)
DELTA_IN_ONE_TEXT = turned(replace(DELTA_TEXT, **WITH_SHARED))
DELTA_BY_HEAD = replace(DELTA, mixed=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), mixed_by_head=True)
DELTA_SHARED_BY_HEAD = replace(DELTA_BY_HEAD, **WITH_SHARED)
CORRECTED = replace(MIXTURE, **_gated("mlp.shared_experts"), correction="mlp.gate.e_score_correction_bias")
LATENT = replace(
    SPLIT,
    qkv=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    q_norm="self_attn.q_a_layernorm",
    k_norm="self_attn.kv_a_layernorm",
    q_b="self_attn.q_b_proj",
    kv_b="self_attn.kv_b_proj",
)
LATENT_MIXTURE = replace(LATENT, **EXPERTS, **_gated("mlp.shared_experts"))
LATENT_STACKED = turned(LATENT_MIXTURE)
LATENT_CORRECTED = replace(LATENT_MIXTURE, correction=CORRECTED.correction)
FUSED = replace(SPLIT, router="mlp.router", experts="mlp.experts", each=(), sinks="self_attn.sinks")
IN_ONE = replace(MIXTURE, each=(), either=True)
SPARSE = replace(
    SPLIT,
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    each=("w1", "w3", "w2"),
    in_modules=(("block_sparse_moe.", "mlp."),),
)
SPARSE_CORRECTED = replace(SPARSE, correction="block_sparse_moe.e_score_correction_bias")
OUTSIDE = replace(
    CORRECTED,
    correction="mlp.e_score_correction_bias",
    in_modules=(("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
)
SHARED_MLP_CORRECTED = replace(
    MIXTURE,
    router="mlp.router.gate",
    correction="mlp.expert_bias",
    in_modules=(
        ("mlp.router.gate.", "mlp.gate."),
        ("mlp.expert_bias", "mlp.e_score_correction_bias"),
        ("mlp.shared_mlp.", "mlp.shared_experts."),
    ),
    **_gated("mlp.shared_mlp"),
)
STATICS = replace(
    CORRECTED,
    correction="mlp.moe_statics.e_score_correction_bias",
    correction_row=True,
    in_modules=(("mlp.moe_statics.", "mlp.gate.moe_statics."),),
)
STACKED = replace(
    SPLIT,
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    each=(),
    stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    in_modules=(("router.layer.weight", "router.weight"),),
)
PACKED = replace(SPLIT, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
SHARED_MLP = replace(SPLIT, up=("shared_mlp.input_linear",), down="shared_mlp.output_linear", **MAMBA)
SHARED_MLP_STACKED = replace(STACKED, up=SHARED_MLP.up, down=SHARED_MLP.down, **MAMBA)
FEED_FORWARD = replace(
    SPLIT,
    final_norm="model.final_layernorm",
    norm2="pre_ff_layernorm",
    **_gated("feed_forward"),
    **MAMBA,
)
ONE_MIXER = Names(
    base="backbone.",
    embed="backbone.embeddings",
    final_norm="backbone.norm_f",
    block="backbone.layers.{}.",
    norm1="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    norm2="norm",  # a layer has one
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    in_modules=(("backbone.", "model."), ("mixer.experts.gate_up_proj", "mixer.experts.up_proj")),
    mixed=("mixer.in_proj",),
    mixed_o="mixer.out_proj",
    conv="mixer.conv1d",
    decay="mixer.A_log",
    step="mixer.dt_bias",
    mixed_norm="mixer.norm",
    skip="mixer.D",
)
ONE_MIXER_EXPERTS = replace(
    ONE_MIXER,
    up=("mixer.shared_experts.up_proj",),
    down="mixer.shared_experts.down_proj",
    router="mixer.gate",
    experts="mixer.experts",
    each=("up_proj", "down_proj"),
    latent_in="mixer.fc1_latent_proj",
    latent_out="mixer.fc2_latent_proj",
    correction="mixer.gate.e_score_correction_bias",
)
NEOX = Names(
    base="gpt_neox.",
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    block="gpt_neox.layers.{}.",
    norm1="input_layernorm",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    norm2="post_attention_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    also=(("embed_out.", "lm_head."),),
    by_head=True,
)
WITH_SINKS = replace(SPLIT, sinks="self_attn.sinks")
NO_GATE = replace(SPLIT, up=("mlp.up_proj",))
BEFORE_MLP = replace(SPLIT, norm2="pre_feedforward_layernorm")
LAYERNORMS = replace(SPLIT, q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
LAYERNORMS_MIXTURE = replace(LAYERNORMS, **_gated("mlp.shared_mlp"), router="mlp.gate.wg", experts="mlp.experts")
GATE_UP = replace(SPLIT, up=("mlp.gate_up_proj",))
GLM4 = replace(GATE_UP, post1="post_self_attn_layernorm", post2="post_mlp_layernorm")
PLAIN_MLP = replace(SPLIT, up=("mlp.c_fc",), down="mlp.c_proj")
POST = replace(SPLIT, norm1="", norm2="", post1="post_attention_layernorm", post2="post_feedforward_layernorm")
POST_DELTA = replace(
    POST,
    mixed=tuple(f"linear_attn.{part}_proj" for part in "qkvgba"),
    mixed_o="linear_attn.o_proj",
    conv="linear_attn.conv1d",
    convs=tuple(f"linear_attn.{part}_conv1d" for part in "qkv"),
    decay="linear_attn.A_log",
    step="linear_attn.dt_bias",
    mixed_norm="linear_attn.o_norm",
    also=(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
)
DELTA_AMONG_POST = replace(POST_DELTA, norm1="input_layernorm", norm2="post_attention_layernorm", post1="", post2="")
BOTH = replace(POST, norm1="input_layernorm", norm2="pre_feedforward_layernorm")
GEMMA4 = replace(BOTH, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", scalar="layer_scalar")
GEMMA4_EXPERTS = replace(
    GEMMA4,
    router="router.proj",
    experts="experts",
    each=(),
    stacked=("experts.gate_up_proj", "experts.down_proj"),
    post_mlp="post_feedforward_layernorm_1",
    norm_experts="pre_feedforward_layernorm_2",
    post_experts="post_feedforward_layernorm_2",
    router_scale="router.scale",
    expert_scale="router.per_expert_scale",
)
IN_OUT = Names(
    base="transformer.",
    embed="transformer.wte",
    final_norm="transformer.ln_f",
    block="transformer.h.{}.",
    norm1="ln_1",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    norm2="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    positions="transformer.wpe",
    in_out=True,
)
