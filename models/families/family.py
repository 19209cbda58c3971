"""The types of the rows of the table of model types (table.py): Family and Wrapper. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.models.families import names
from trireme.models.families.experts import Act, ExpertKeys
from trireme.models.families.latent import LatentKeys
from trireme.models.families.names import MlpNames, Names
from trireme.models.families.scans import DeltaKeys, MambaKeys

ACTS: dict[str, Act] = dict.fromkeys(("silu", "swish"), "silu")
ACTS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu")  # one formula
ACTS |= {"gelu": "exact gelu", "relu2": "relu2"}
GELU, EXACT_GELU, RELU2 = "gelu_pytorch_tanh", "gelu", "relu2"
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
OF_SCORES, OF_LOGITS = "attn_logit_softcapping", "final_logit_softcapping"  # keys of soft caps
BIAS, MLP_BIAS = ("attention_bias", False), ("mlp_bias", False)


@dataclass(frozen=True)
class Family:
    """What all models of a model_type share. Defaults of keys are those of transformers."""

    known_as: str
    dense: MlpNames = names.SPLIT.mlp  # of layers without experts among those with
    names: Names = names.SPLIT
    scan_names: Names | None = None  # of layers with a recurrence; None: as the others'
    spelled: dict[str, str] = field(default_factory=lambda: SPELLED)
    layer_norm: bool = False  # LayerNorms with a bias, not RMSNorms
    add_one: bool = False  # norms multiply by 1 + weight
    plain_end: bool = False  # but for the last one
    entry_norm: bool = False  # embeddings pass a norm without weights
    post_eps_key: str = ""  # eps of norms behind mixers and MLPs, 1e-8 by default; "": that of the others
    gated: bool = True  # otherwise an activation between two matmuls
    act: str = "silu"  # default of the activation
    tanh_meant: bool = False  # gelu in config.json stands for its approximation by tanh
    qk_norm: Literal["", "head", "width", "bare"] = ""  # norms of q and k: per head, over all, per head without weights
    qk_norm_key: str = ""  # key that says whether there are such norms; "": there are
    rope_first: bool = False  # q and k are rotated before their norms
    rotary: bool = True
    grouped: bool = True  # reads num_key_value_heads and head_dim
    partial: float = 0.0  # default of partial_rotary_factor; 0: not read
    pairs: bool = False  # rope turns neighbouring features, not halves
    rotary_dim: bool = False  # reads rotary_dim: the features of a head that are rotated
    longrope: bool = False  # longrope is the only scaling of positions
    rope_types: dict[str, str] = field(default_factory=dict)  # other names of rope's types
    alpha: bool = False  # rope of type dynamic has an alpha, which changes theta
    pairs_key: bool = False  # reads rope_interleave: pairs, or halves
    latent: LatentKeys | None = None  # attention over latents
    indexed: bool = False  # reads index_topk: in longer documents an indexer selects keys; it is copied, not used
    query_beta: bool = False  # reads llama_4_scaling_beta: queries scaled by position
    theta: float = 10000.0
    local_theta: float | None = None  # theta of layers with a window; None: one rope for all layers
    local_theta_key: str = ""  # "": none
    thetas: bool = False  # reads layer_rope_theta, a number for each layer; 0: no rope
    one_theta: bool = False  # any other number there stands for rope's theta
    nested: bool = False  # rope is described in rope_parameters alone, for each kind of layers
    original: int | None = None  # original_max_position_embeddings, outside rope's parameters
    kv_heads: int | None = None  # None: one for each query head
    head_dim: int | None = None  # None: width / heads
    vocab: int | None = None  # None: config.json must have it; likewise n_heads and ffn
    n_heads: int | None = None
    ffn: int | None = None
    max_positions: int = 2048
    eps: float = 1e-6
    tied: bool = False
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    windows: Literal["none", "all", "above", "pattern"] = "none"  # above: a pattern, if use_sliding_window
    window: int | None = 4096
    before_key: str = ""  # key of the tokens before a token's own that a window has; "": none
    period: int = 0  # of "pattern": every period-th layer has no window; 0: all have
    period_key: str = ""  # "": none
    first: bool = False  # the first layer of a period, not the last, has no window
    last: bool = False  # periods are counted from the last layer, which has no window
    begins: bool = False  # nor has the first layer of all
    ends: bool = False  # nor have the first two layers and the last; a period's one is its second (Flint)
    above: int = 0  # default of max_window_layers, of "above" and of "pattern"; 0: not read
    listed_type: str = ""  # model_type as which transformers reads a config.json with layer_types
    aliases: dict[str, str] = field(default_factory=dict)  # other names of keys -> those that are read
    # no_rope_layers; layers without window, with a sliding_window or always; all: by a key, without theta, always
    unrotated: Literal["", "listed", "full", "global", "last", "typed", "null", "all"] = ""  # last: of periods
    scaled: bool = False  # reads scales of embedding, attention, branches, logits
    multiplied: bool = False  # reads Falcon-H1's factors of embedding, keys, attention, MLP, logits
    caps: dict[str, float | None] = field(default_factory=dict)  # keys of soft caps that are read -> defaults
    query_scale: bool = False  # attention's scale is query_pre_attn_scalar ** -0.5
    factors: tuple[str, str] = ("", "")  # keys of factors of scores, beside dim ** -0.5, and of logits; "": none
    embed_root: bool = False  # the embedding's factor is sqrt(width)
    embed_root_key: str = ""  # key that says whether it is; "": none
    experts: ExpertKeys | None = None  # in place of the MLP
    single: bool = False  # a layer is a mixer or an MLP, by layers_block_type or hybrid_override_pattern
    scan: DeltaKeys | MambaKeys | None = None  # in place of attention in some layers
    unadapted: tuple[str, ...] = ()  # linear layers for which peft has no adapters, or whose names it does not find
    attention_gate: Literal["", "queries", "values", "heads"] = ""  # layers.Attention.gate
    gate_key: str = ""  # key of it: heads, where it is true or per-head, or values, where it is per-element; "": none
    gate_act: Literal["sigmoid", "softplus"] = "sigmoid"
    heads_key: str = ""  # a number of heads for each layer; "": none
    value_key: str = ""  # width of a head's values, 128 by default; "": that of its keys
    value_scale_key: str = ""  # factor of values, null for 1; "": none
    local_kv: int = 1  # layers with a window have so many times the key/value heads
    local_sinks: bool = False  # layers with a window have sinks, the others none
    packings: tuple[str, ...] = (  # accepted values of quant_method
        "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "bitsandbytes",
    )  # fmt: skip
    mtp: bool = False  # files have num_nextn_predict_layers more layers, for further tokens
    carried: tuple[str, ...] = ()  # prefixes of the names of tensors that are copied and not used
    rope_said: bool = False  # config.json must describe rope: the default of transformers is not plain rope
    parallel: bool = False  # reads use_parallel_residual
    by_layer: bool = False  # reads scale_attn_weights, scale_attn_by_inverse_layer_idx
    layers: Callable[..., Any] | None = None  # makes the layers, where keys of several rows do not say them
    only: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # keys -> values that are accepted
    inner: bool = False  # only within a Wrapper

    @property
    def accepts(self) -> set[str]:
        """The keys of parse.INERT that models of this family read, so that all values are accepted."""
        keys = {"query_pre_attn_scalar", *self.caps} if self.query_scale else {*self.caps}
        if self.partial:
            keys |= {"partial_rotary_factor"}
        if self.scaled:
            keys |= {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
        if self.layers:
            keys |= {"per_layer_config"}
        if self.multiplied:
            keys |= {"embedding_multiplier"}
        return keys | ({"no_rope_layers"} if self.unrotated == "listed" else set())


@dataclass(frozen=True)
class Wrapper:
    """A multimodal model: the language model of its text_config is trained, the rest copied."""

    texts: tuple[str, ...]  # model types of text_config; the first is the default
    media: dict[str, int]  # keys of the tokens that stand for images, audio or video -> defaults
    carried: tuple[str, ...] = ("model.visual.",)
    tied: Literal["text", "outside", "either"] = "text"  # place of tie_word_embeddings; "text": both, outside first
    tied_default: bool = False  # of the key outside
    flat: bool = False  # keys and names of tensors may be those of a text model with a vision tower
    behind: bool = False  # names of tensors may have language_model. before those of the text model
    older: dict[str, str] = field(default_factory=dict)  # other names of `texts` in files -> these
    caps: bool = False  # its class has the text's cap of logits
