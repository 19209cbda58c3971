"""Names of a model's tensors in Hugging Face checkpoints, in four records. No torch.

"" and () stand for a tensor that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class MixerNames:
    """Names within a block of the tensors of attention and recurrences."""

    norm: str = ""
    qkv: tuple[str, ...] = ()  # packed, three, or of latents
    o: str = ""
    post: str = ""  # norm behind o
    q_norm: str = ""
    k_norm: str = ""
    q_b: str = ""  # of latent attention: behind q_norm
    kv_b: str = ""  # behind k_norm
    sinks: str = ""
    by_head: bool = False  # in the packed matrix q, k and v of a head stand together
    mixed: tuple[str, ...] = ()  # projections of a recurrence: queries to gate, then the numbers a head
    mixed_o: str = ""
    mixed_in_one: str = ""  # name of these in files that have one matrix of all
    mixed_by_head: bool = False  # a key head's queries, keys, values and gates stand together
    conv: str = ""
    convs: tuple[str, ...] = ()  # the convolution's parts in files; (): it is one
    decay: str = ""  # (H,)
    step: str = ""  # (H,)
    skip: str = ""  # (H,)
    mixed_norm: str = ""

    @property
    def attention(self) -> tuple[str, ...]:
        """The names of attention's linear layers."""
        return (*self.qkv, *(name for name in (self.q_b, self.kv_b) if name), self.o)

    @property
    def recurrence(self) -> tuple[str, ...]:
        """The names of a recurrence's linear layers."""
        return (*self.mixed, self.mixed_o)


@dataclass(frozen=True)
class MlpNames:
    """Names within a block of the tensors of MLPs and experts."""

    norm: str = ""
    up: tuple[str, ...] = ()  # gate and up, or one; with experts the shared one's
    down: str = ""
    post: str = ""  # norm behind down, or behind the sum of MLP and experts
    router: str = ""
    experts: str = ""  # in the engine .gate_up_proj (E, 2I, D) and .down_proj (E, D, I)
    single: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # in files behind experts.N; (): all in one tensor
    stacked: tuple[str, ...] = ()  # names of the two in files, (E, out, in), without `single`; (): (E, in, out)
    either: bool = False  # or (E, out, in) by the same names: so transformers writes what it has read otherwise
    shared_gate: str = ""
    latent_in: str = ""  # to what experts read, and from what they give
    latent_out: str = ""
    correction: str = ""  # (E,) fp32, frozen
    correction_row: bool = False  # (1, E) in files
    post_mlp: str = ""  # of an MLP next to experts: norm behind it
    norm_experts: str = ""  # before the experts, and behind them
    post_experts: str = ""
    router_scale: str = ""  # (D,): the router reads the residual, by a norm of its own
    expert_scale: str = ""  # (E,) factors of experts' weights
    scalar: str = ""  # (1,) factor of the residual behind the layer, frozen

    @property
    def experts_in_out(self) -> bool:
        """Whether a layer's experts are (E, in, out), not (E, out, in)."""
        return not self.single and not self.stacked


@dataclass(frozen=True)
class FileNames:
    """Other spellings of names."""

    also: tuple[tuple[str, str], ...] = ()  # parts of names in some files -> those here
    modules: tuple[tuple[str, str], ...] = ()  # parts of names within a block -> those of transformers' modules


@dataclass(frozen=True)
class Names:
    """The names of a model: of its ends and blocks, and within them."""

    base: str  # prefix without the head, missing in some checkpoints
    embed: str
    final_norm: str
    block: str
    mixer: MixerNames
    mlp: MlpNames
    files: FileNames = field(default_factory=FileNames)
    positions: str = ""
    output: str = "lm_head"
    in_out: bool = False  # matrices are stored (in, out), not (out, in)

    def prefix(self, layer: int) -> str:
        return self.block.format(layer)

    def module(self, name: str) -> str:
        """The name that transformers' module or parameter has for a tensor in files."""
        for stored, module in self.files.modules:
            name = name.replace(stored, module)
        return name

    def stored(self, name: str) -> str:
        """The inverse of `module`: some files have the names of modules."""
        for stored, module in self.files.modules:
            name = name.replace(module, stored)
        return name

    def changed(self, mixer: Mapping[str, Any] = {}, mlp: Mapping[str, Any] = {}, **ends: Any) -> Names:
        """These names with other ones in mixers, MLPs, and files or ends."""
        files = {name: ends.pop(name) for name in ("also", "modules") if name in ends}
        return replace(
            self, mixer=replace(self.mixer, **mixer), mlp=replace(self.mlp, **mlp),
            files=replace(self.files, **files), **ends,
        )  # fmt: skip


@lru_cache
def nested_names(names: Names) -> Names:
    """The names of the same model inside a multimodal one."""
    nested = lambda name: name.replace("model.", "model.language_model.", 1)
    return replace(names, embed=nested(names.embed), final_norm=nested(names.final_norm), block=nested(names.block))


def stacked_names(names: MlpNames) -> MlpNames:
    """The names for files with all experts in one tensor (E, out, in)."""
    return replace(names, single=(), stacked=(f"{names.experts}.gate_up_proj", f"{names.experts}.down_proj"))


def single_names(names: MlpNames) -> MlpNames:
    """The names for files with a tensor for each expert."""
    return replace(names, single=MlpNames.single, stacked=())


def direct(names: MixerNames) -> MixerNames:
    """The names of latent attention whose queries have no latent."""
    return replace(names, qkv=("self_attn.q_proj", names.qkv[1]), q_norm="", q_b="")


def adapter_names(module: str) -> tuple[str, str]:
    """The names of a module's adapter: of A (rank, in), of B (out, rank)."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _gated(module: str) -> dict[str, Any]:
    """The matrices of a gated MLP."""
    return dict(up=(f"{module}.gate_proj", f"{module}.up_proj"), down=f"{module}.down_proj")


def _recurrence(module: str, mixed: tuple[str, ...], o: str = "out_proj", norm: str = "norm") -> dict[str, Any]:
    return dict(
        mixed=tuple(f"{module}.{name}" for name in mixed), mixed_o=f"{module}.{o}", conv=f"{module}.conv1d",
        decay=f"{module}.A_log", step=f"{module}.dt_bias", mixed_norm=f"{module}.{norm}",
    )  # fmt: skip


def _attention(module: str = "self_attn", norm: str = "input_layernorm") -> MixerNames:
    q, k, v, o = (f"{module}.{part}_proj" for part in "qkvo")
    return MixerNames(norm, (q, k, v), o, q_norm=f"{module}.q_norm", k_norm=f"{module}.k_norm")


SPLIT = Names(
    "model.", "model.embed_tokens", "model.norm", "model.layers.{}.", _attention(),
    MlpNames("post_attention_layernorm", **_gated("mlp")),
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(router="mlp.gate", experts="mlp.experts")
_SHARED = _EXPERTS | _gated("mlp.shared_expert") | dict(shared_gate="mlp.shared_expert_gate")
MIXTURE = SPLIT.changed(mlp=_EXPERTS)
SHARED = SPLIT.changed(mlp=_SHARED)
IN_ONE = MIXTURE.changed(mlp=dict(single=(), either=True))
FLINT = MIXTURE.changed(
    dict(sinks="self_attn.softmax_offset"), _gated("mlp.shared_expert"),
    modules=(("self_attn.softmax_offset", "self_attn.sinks"),),
)  # fmt: skip
FUSED = SPLIT.changed(dict(sinks="self_attn.sinks"), dict(router="mlp.router", experts="mlp.experts", single=()))
CORRECTED = MIXTURE.changed(mlp=_gated("mlp.shared_experts") | dict(correction="mlp.gate.e_score_correction_bias"))
OUTSIDE = CORRECTED.changed(
    mlp=dict(correction="mlp.e_score_correction_bias"),
    modules=(("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
)
STATICS = CORRECTED.changed(
    mlp=dict(correction="mlp.moe_statics.e_score_correction_bias", correction_row=True),
    modules=(("mlp.moe_statics.", "mlp.gate.moe_statics."),),
)
SHARED_MLP_CORRECTED = SPLIT.changed(
    mlp=_gated("mlp.shared_mlp") | dict(router="mlp.router.gate", experts="mlp.experts", correction="mlp.expert_bias"),
    modules=(
        ("mlp.router.gate.", "mlp.gate."),
        ("mlp.expert_bias", "mlp.e_score_correction_bias"),
        ("mlp.shared_mlp.", "mlp.shared_experts."),
    ),
)
SPARSE = SPLIT.changed(
    mlp=dict(router="block_sparse_moe.gate", experts="block_sparse_moe.experts", single=("w1", "w3", "w2")),
    modules=(("block_sparse_moe.", "mlp."),),
)
SPARSE_CORRECTED = SPARSE.changed(mlp=dict(correction="block_sparse_moe.e_score_correction_bias"))
STACKED = SPLIT.changed(
    mlp=dict(
        router="block_sparse_moe.router.layer", experts="block_sparse_moe.experts", single=(),
        stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    modules=(("router.layer.weight", "router.weight"),),
)  # fmt: skip
_DELTA = _recurrence("linear_attn", tuple(f"in_proj_{part}" for part in ("qkv", "z", "b", "a")))
DELTA_TEXT = SPLIT.changed(_DELTA, also=(("model.language_model.", "model."),))  # may have names as in a wrapper
DELTA_IN_ONE_TEXT = replace(DELTA_TEXT, mlp=stacked_names(replace(SPLIT.mlp, **_SHARED)))
DELTA_BY_HEAD = SPLIT.changed(
    _recurrence("linear_attn", ("in_proj_qkvz", "in_proj_ba")) | dict(mixed_by_head=True), _SHARED
)
LARA = SPLIT.changed(
    _DELTA | dict(mixed_in_one="linear_attn.in_proj", mixed_norm="linear_attn.out_norm"),
    _EXPERTS | _gated("mlp.shared_expert"), modules=(("linear_attn.out_norm.", "linear_attn.norm."),),
)  # fmt: skip
LARA_IN_ONE = replace(LARA, mlp=stacked_names(LARA.mlp))
_MAMBA = _recurrence("mamba", ("in_proj",)) | dict(skip="mamba.D")
SHARED_MLP = SPLIT.changed(_MAMBA, dict(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"))
SHARED_MLP_STACKED = STACKED.changed(_MAMBA, dict(up=SHARED_MLP.mlp.up, down=SHARED_MLP.mlp.down))
FEED_FORWARD = SPLIT.changed(
    _MAMBA, _gated("feed_forward") | dict(norm="pre_ff_layernorm"), final_norm="model.final_layernorm"
)
ONE_MIXER = Names(  # a layer has one norm
    "backbone.", "backbone.embeddings", "backbone.norm_f", "backbone.layers.{}.",
    replace(_attention("mixer", "norm"), **_recurrence("mixer", ("in_proj",)), skip="mixer.D"),
    MlpNames("norm", ("mixer.up_proj",), "mixer.down_proj"),
    FileNames(modules=(("backbone.", "model."), ("mixer.experts.gate_up_proj", "mixer.experts.up_proj"))),
)  # fmt: skip
ONE_MIXER_EXPERTS = ONE_MIXER.changed(
    mlp=dict(
        up=("mixer.shared_experts.up_proj",), down="mixer.shared_experts.down_proj", router="mixer.gate",
        experts="mixer.experts", single=("up_proj", "down_proj"), latent_in="mixer.fc1_latent_proj",
        latent_out="mixer.fc2_latent_proj", correction="mixer.gate.e_score_correction_bias",
    ),
)  # fmt: skip
_GATE_PROJ = dict(qkv=(*SPLIT.mixer.qkv, "self_attn.gate_proj"), post="post_attention_layernorm")
GATED = SPLIT.changed(_GATE_PROJ, dict(norm="pre_mlp_layernorm", post="post_mlp_layernorm"))
GATED_MIXTURE = GATED.changed(
    mlp=_gated("mlp.shared_experts")
    | dict(router="mlp.router.gate", experts="mlp.experts", correction="mlp.expert_bias")
)
KOLIBRI = MIXTURE.changed(
    dict(post="post_attn_norm"),
    _gated("mlp.shared_experts") | dict(post="post_ffn_norm", correction="moe.router.expert_bias"),
    modules=(
        ("post_attn_norm", "post_self_attn_layernorm"),
        ("post_ffn_norm", "post_mlp_layernorm"),
        ("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    ),
)
LAGUNA = MIXTURE.changed(
    dict(qkv=(*SPLIT.mixer.qkv, "self_attn.g_proj")),
    _gated("mlp.shared_expert") | dict(correction="mlp.experts.e_score_correction_bias"),
    modules=(
        ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.shared_expert.", "mlp.shared_experts."),
    ),
)
MIMO = MIXTURE.changed(
    dict(sinks="self_attn.attention_sink_bias"), dict(correction=CORRECTED.mlp.correction),
    modules=(("self_attn.attention_sink_bias", "self_attn.sinks"),),
)  # fmt: skip
LATENT = SPLIT.changed(
    dict(
        qkv=("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"), q_norm="self_attn.q_a_layernorm",
        k_norm="self_attn.kv_a_layernorm", q_b="self_attn.q_b_proj", kv_b="self_attn.kv_b_proj",
    )
)  # fmt: skip
LATENT_MIXTURE = LATENT.changed(mlp=_EXPERTS | _gated("mlp.shared_experts"))
LATENT_STACKED = replace(LATENT_MIXTURE, mlp=stacked_names(LATENT_MIXTURE.mlp))
LATENT_CORRECTED = LATENT_MIXTURE.changed(mlp=dict(correction=CORRECTED.mlp.correction))
PACKED = SPLIT.changed(dict(qkv=("self_attn.qkv_proj",)), dict(up=("mlp.gate_up_proj",)))
GATE_UP = SPLIT.changed(mlp=dict(up=("mlp.gate_up_proj",)))
GLM4 = GATE_UP.changed(dict(post="post_self_attn_layernorm"), dict(post="post_mlp_layernorm"))
PLAIN_MLP = SPLIT.changed(mlp=dict(up=("mlp.c_fc",), down="mlp.c_proj"))
NO_GATE = SPLIT.changed(mlp=dict(up=("mlp.up_proj",)))
WITH_SINKS = SPLIT.changed(dict(sinks="self_attn.sinks"))
LAYERNORMS = SPLIT.changed(dict(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"))
LAYERNORMS_MIXTURE = LAYERNORMS.changed(
    mlp=_gated("mlp.shared_mlp") | dict(router="mlp.gate.wg", experts="mlp.experts")
)
BEFORE_MLP = SPLIT.changed(mlp=dict(norm="pre_feedforward_layernorm"))
BOTH = SPLIT.changed(
    dict(post="post_attention_layernorm"), dict(norm="pre_feedforward_layernorm", post="post_feedforward_layernorm")
)
GATED_BOTH = BOTH.changed(dict(qkv=_GATE_PROJ["qkv"]))
POST = BOTH.changed(dict(norm=""), dict(norm=""))
POST_DELTA = POST.changed(
    _recurrence("linear_attn", tuple(f"{part}_proj" for part in "qkvgba"), "o_proj", "o_norm")
    | dict(convs=tuple(f"linear_attn.{part}_conv1d" for part in "qkv")),
    also=(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
)
DELTA_AMONG_POST = POST_DELTA.changed(
    dict(norm="input_layernorm", post=""), dict(norm="post_attention_layernorm", post="")
)
GEMMA4 = BOTH.changed(mlp=dict(scalar="layer_scalar"))
GEMMA4_EXPERTS = GEMMA4.changed(
    mlp=dict(
        router="router.proj", experts="experts", single=(), stacked=("experts.gate_up_proj", "experts.down_proj"),
        post_mlp="post_feedforward_layernorm_1", norm_experts="pre_feedforward_layernorm_2",
        post_experts="post_feedforward_layernorm_2", router_scale="router.scale",
        expert_scale="router.per_expert_scale",
    )
)  # fmt: skip
NEOX = Names(
    "gpt_neox.", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "gpt_neox.layers.{}.",
    MixerNames("input_layernorm", ("attention.query_key_value",), "attention.dense", by_head=True),
    MlpNames("post_attention_layernorm", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
    FileNames(also=(("embed_out.", "lm_head."),)),
)  # fmt: skip
IN_OUT = Names(
    "transformer.", "transformer.wte", "transformer.ln_f", "transformer.h.{}.",
    MixerNames("ln_1", ("attn.c_attn",), "attn.c_proj"), MlpNames("ln_2", ("mlp.c_fc",), "mlp.c_proj"),
    positions="transformer.wpe", in_out=True,
)  # fmt: skip
