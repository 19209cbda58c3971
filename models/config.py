"""What a Hugging Face config.json says, checked and reduced to the numbers that the blocks need. No torch.

A family is a row of FAMILIES; code elsewhere never asks for one.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from trireme.models import names
from trireme.models.keys import InputError, Keys
from trireme.models.names import Names
from trireme.models.rope import GLOBAL, LOCAL, Rope, parse_ropes
from trireme.storage.untrusted import read_small

LARGEST = 1 << 20  # of config.json
MOST_LAYERS = 1 << 16  # for lists by layer
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # the last three: one formula
SPELLED = dict(  # field -> key of config.json
    vocab="vocab_size",
    width="hidden_size",
    n_layers="num_hidden_layers",
    n_heads="num_attention_heads",
    ffn="intermediate_size",
    max_positions="max_position_embeddings",
    eps="rms_norm_eps",
    act="hidden_act",
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
# Keys that change the mathematics -> accepted values.
INERT = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "quantization_config": (None,),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "no_rope_layers": (None,),
}


Flag = bool | tuple[str, bool]  # fixed, or (key, default)
BIAS, MLP_BIAS = ("attention_bias", False), ("mlp_bias", False)


@dataclass(frozen=True)
class Lora:
    """Adapters of the blocks' matrices (lora.py)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # ends of module names, as q_proj

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, module: str) -> bool:
        return any(f".{module}".endswith(f".{target}") for target in self.targets)


@dataclass(frozen=True)
class Family:
    """What a model_type's models share. Defaults are those of transformers."""

    known_as: str
    names: Names = names.SPLIT
    spelled: dict[str, str] = field(default_factory=lambda: SPELLED)
    layer_norm: bool = False  # LayerNorms with a bias, not RMSNorms
    add_one: bool = False  # norms multiply by 1 + weight
    gated: bool = True  # otherwise an activation between two products
    acts: tuple[str, ...] = SILU  # the first is the default
    qk_norm: Literal["", "head", "width"] = ""  # norms of q and k: per head, or over all
    rotary: bool = True
    partial: bool = False  # reads partial_rotary_factor
    theta: float = 10000.0
    local_theta: float | None = None  # of layers with a window; None: theta
    kv_heads: int | None = None  # None: one a query head
    head_dim: int | None = None  # None: width / heads
    max_positions: int = 2048
    eps: float = 1e-6
    tied: bool = False
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    windows: Literal["none", "all", "above", "pattern"] = "none"  # with a sliding window
    window: int | None = 4096
    period: int = 0  # every period-th layer has no window; 0: all have
    unrotated: Literal["", "listed", "full"] = ""  # no_rope_layers; layers without window
    scaled: bool = False  # reads scales of embedding, attention, branches, logits
    query_scale: bool = False  # attention's scale is query_pre_attn_scalar ** -0.5
    embed_root: bool = False  # the embedding's factor is sqrt(width)
    by_layer: bool = False  # reads scale_attn_weights, scale_attn_by_inverse_layer_idx

    @property
    def accepts(self) -> set[str]:
        """Keys of INERT that it reads."""
        found = {"query_pre_attn_scalar"} if self.query_scale else set()
        if self.partial:
            found |= {"partial_rotary_factor"}
        if self.scaled:
            found |= {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
        return found | ({"no_rope_layers"} if self.unrotated == "listed" else set())


FAMILIES = {
    "gpt2": Family(
        "GPT-2, DistilGPT-2",
        names=names.IN_OUT, spelled=OLD_SPELLED, layer_norm=True, gated=False, acts=("gelu_new", *GELU), rotary=False,
        max_positions=1024, eps=1e-5, tied=True, qkv_bias=True, o_bias=True, mlp_bias=True, by_layer=True,
    ),
    "llama": Family(
        "LLaMA 1 to 3, TinyLlama, Yi, Falcon 3, DeepSeek-R1 distills",
        qkv_bias=BIAS, o_bias=BIAS, mlp_bias=MLP_BIAS,
    ),
    "mistral": Family("Mistral 7B, Nemo, Small (text)", kv_heads=8, max_positions=131072, windows="all"),
    "qwen2": Family("Qwen 1.5 to 2.5", kv_heads=32, max_positions=32768, qkv_bias=True, windows="above"),
    "qwen3": Family(
        "Qwen 3 (dense)",
        kv_heads=32, head_dim=128, max_positions=32768, qk_norm="head", qkv_bias=BIAS,
        o_bias=BIAS, windows="above",
    ),
    "phi3": Family(
        "Phi-3, 3.5 and 4 (text)",
        names=names.PACKED, partial=True, max_positions=4096, eps=1e-5, windows="all", window=None,
    ),
    "smollm3": Family(
        "SmolLM3",
        kv_heads=4, max_positions=32768, theta=2e6, tied=True, qkv_bias=BIAS, o_bias=BIAS,
        mlp_bias=MLP_BIAS, windows="pattern", window=None, unrotated="listed",
    ),
    "granite": Family("Granite 3 (dense)", qkv_bias=BIAS, o_bias=BIAS, mlp_bias=MLP_BIAS, scaled=True),
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
        names=names.POST, qk_norm="width", eps=1e-5, theta=5e5, qkv_bias=BIAS, o_bias=BIAS,
        windows="pattern", period=4,
    ),
    "exaone4": Family(
        "EXAONE 4",
        names=names.POST, qk_norm="head", eps=1e-5, kv_heads=32, windows="pattern", period=4, unrotated="full",
    ),
    "seed_oss": Family(
        "Seed-OSS",
        kv_heads=8, head_dim=128, max_positions=524288, qkv_bias=("attention_bias", True),
        o_bias=("attention_out_bias", False), mlp_bias=MLP_BIAS,
    ),
    "gemma3_text": Family(
        "Gemma 3 (270M, 1B)",
        names=names.BOTH, spelled=SPELLED | dict(act="hidden_activation"), add_one=True, acts=GELU, qk_norm="head",
        theta=1e6, local_theta=1e4, kv_heads=4, head_dim=256, max_positions=131072, tied=True,
        qkv_bias=BIAS, o_bias=BIAS, windows="pattern", period=6, query_scale=True,
        embed_root=True,
    ),
}  # fmt: skip
SUPPORTED = tuple(FAMILIES)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only Transformer, without dropout."""

    model_type: str
    vocab: int
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int
    eps: float
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = None  # None: learned positions
    window: int = 0  # tokens attended to, itself included; 0: all
    window_from: int = 0  # first layer with the window
    scale_attn: bool = True  # by head_dim ** -0.5
    scale_attn_by_layer: bool = False  # scores also divided by layer + 1
    frozen: tuple[str, ...] = ()  # globs over tensor names; from the run's options
    lora: Lora | None = None  # from the run's options
    halves: bool = False  # units are half blocks; from the plan
    local_rope: Rope | None = None  # of layers with the window, if different
    full_layers: tuple[int, ...] = ()  # from window_from on, without the window
    unrotated: tuple[int, ...] = ()  # layers without rope
    attention_scale: float = 0.0  # of scores; 0: by scale_attn
    embed_scale: float = 1.0
    branch_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def names(self) -> Names:
        return self.family.names

    @property
    def gated(self) -> bool:
        return self.family.gated

    @property
    def silu(self) -> bool:
        """SiLU at the gate; otherwise GELU by tanh."""
        return self.family.acts is SILU

    @property
    def n_units(self) -> int:
        return self.n_layers * (2 if self.halves else 1) + 2

    @property
    def q_width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width

    def layer_window(self, layer: int) -> int:
        """0 for full attention."""
        return self.window if layer >= self.window_from and layer not in self.full_layers else 0

    def layer_scale(self, layer: int) -> float:
        """Factor of scores."""
        scale = self.attention_scale or (self.head_dim**-0.5 if self.scale_attn else 1.0)
        return scale / (layer + 1) if self.scale_attn_by_layer else scale


def numbers(cfg: ModelConfig) -> dict[str, Any]:
    """A config as flat JSON, without what a plan adds: a run compares its model by this."""
    found = json.loads(json.dumps(asdict(cfg)))
    del found["halves"]
    for name in ("rope", "local_rope"):
        found |= {f"{name}.{key}": value for key, value in (found.pop(name) or {}).items()}
    return found


def default_number(name: str) -> Any:
    """What a name of `numbers` means where older records lack it."""
    holder, _, key = name.rpartition(".")
    defaults = {f.name: f.default for f in fields(Rope if holder else ModelConfig) if f.default is not MISSING}
    return json.loads(json.dumps(defaults.get(key)))


def read_config(folder: str | Path) -> ModelConfig:
    """Of the checkpoint in `folder`. Raises InputError where config.json is missing, malformed or unsupported."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(read_small(path, LARGEST, links=True).decode())
    except FileNotFoundError:
        raise InputError(f"{path} is missing. Give the folder of a Hugging Face checkpoint.") from None
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror}.") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is not JSON ({e}). Download it again.") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds a {type(raw).__name__}, expected an object.")
    return parse_config(raw, str(path))


def parse_config(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Of a decoded config.json; `where` names it in errors."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise InputError(f'model_type "{model_type}" is not supported ({where}). Supported: {", ".join(SUPPORTED)}.')
    keys, family = Keys(raw, where), FAMILIES[model_type]
    for name, accepted in INERT.items():
        if name not in family.accepts:
            keys.refuse_unless(name, accepted)
    spelled = family.spelled
    keys.refuse_unless(spelled["act"], family.acts, family.acts[0])
    width, heads, layers = (keys.count(spelled[name]) for name in ("width", "n_heads", "n_layers"))
    kv_heads, head_dim = _heads(keys, family, width, heads)
    positions = keys.count(spelled["max_positions"], family.max_positions)
    if not family.gated:
        keys.refuse_unless("use_bias", (None, True))  # gelu.py always adds one
    flag = lambda bias: bias if isinstance(bias, bool) else keys.flag(*bias)
    return ModelConfig(
        model_type=model_type,
        vocab=keys.count(spelled["vocab"]),
        width=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=keys.count(spelled["ffn"], None if family.rotary else 4 * width),
        max_positions=positions,
        eps=keys.number(spelled["eps"], family.eps),
        tied=keys.flag("tie_word_embeddings", family.tied),
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=bool(family.qk_norm),
        **_positions(keys, family, head_dim, positions, layers),
        **_scales(keys, family, width),
    )


def _heads(keys: Keys, family: Family, width: int, heads: int) -> tuple[int, int]:
    """(key/value heads, head width)."""
    if not family.rotary:
        if width % heads:
            raise keys.error(family.spelled["n_heads"], f"a divisor of {family.spelled['width']} = {width}")
        return heads, width // heads
    kv_heads = keys.count("num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = keys.count("head_dim", family.head_dim or width // heads)
    if head_dim % 2:
        raise InputError(f"{keys.where}: heads of {head_dim} cannot be rotated; head_dim must be even.")
    return kv_heads, head_dim


def _positions(keys: Keys, family: Family, head_dim: int, positions: int, layers: int) -> dict[str, Any]:
    """Fields of ModelConfig."""
    if not family.rotary:
        return {}
    window, first, full = _window(keys, family, layers)
    rope, local = parse_ropes(keys, family.theta, family.local_theta, head_dim, positions, family.windows == "pattern")
    if rope.width and not family.partial:
        raise InputError(f'{keys.where}: "partial_rotary_factor" is not supported for {keys.raw["model_type"]}.')
    found: dict[str, Any] = dict(rope=rope, window=window, window_from=first, full_layers=full)
    if local != rope and window:
        found["local_rope"] = local
    if family.unrotated == "listed":
        found["unrotated"] = _unrotated(keys, layers)
    elif family.unrotated:
        found["unrotated"] = full
    return found


def _window(keys: Keys, family: Family, layers: int) -> tuple[int, int, tuple[int, ...]]:
    """(window, its first layer, later layers without it); (0, 0, ()) for none."""
    given = "sliding_window" in keys.raw
    absent = keys.raw["sliding_window"] is None if given else family.window is None
    window = 0 if absent else keys.count("sliding_window", family.window)
    if family.windows == "all":
        return window, 0, ()
    if family.windows == "pattern":
        return _pattern(keys, family, layers, window)
    if family.windows == "none" or not keys.flag("use_sliding_window", False):
        window = 0
    first = keys.raw.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise keys.error("max_window_layers", "an integer >= 0")
    first = min(first, layers) if window else layers
    types = keys.raw.get("layer_types")
    wanted = lambda: [GLOBAL] * first + [LOCAL] * (layers - first)
    if types is not None and not (isinstance(types, list) and len(types) == layers and types == wanted()):
        raise InputError(
            f'{keys.where}: "layer_types" must be full_attention in the first {first} layers and sliding_attention in '
            "the others, as use_sliding_window and max_window_layers say; other patterns are not supported."
        )
    return (window, first, ()) if first < layers else (0, 0, ())


def _pattern(keys: Keys, family: Family, layers: int, window: int) -> tuple[int, int, tuple[int, ...]]:
    """As _window, by `layer_types` or the family's period."""
    _few(keys, layers)
    types = keys.raw.get("layer_types")
    if types is None:
        period = keys.count("sliding_window_pattern", family.period or (layers + 1 if window else 1))
        types = [GLOBAL if (i + 1) % period == 0 else LOCAL for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(t in (GLOBAL, LOCAL) for t in types):
        raise keys.error("layer_types", f"a list of {layers} names, each {GLOBAL} or {LOCAL}")
    if LOCAL not in types:
        return 0, 0, ()
    if not window:
        raise keys.error("sliding_window", f"a positive integer, as layer_types names {LOCAL}")
    return window, 0, tuple(i for i, kind in enumerate(types) if kind == GLOBAL)


def _unrotated(keys: Keys, layers: int) -> tuple[int, ...]:
    """Layers without rope."""
    _few(keys, layers)
    rotated = keys.raw.get("no_rope_layers")
    if rotated is None:
        every = keys.count("no_rope_layer_interval", 4)
        rotated = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or not all(r in (0, 1) for r in rotated):
        raise keys.error("no_rope_layers", f"a list of {layers} times 0 or 1")
    return tuple(i for i, r in enumerate(rotated) if not r)


def _few(keys: Keys, layers: int) -> None:
    """Raises InputError where lists of all layers would fill the RAM."""
    if layers > MOST_LAYERS:
        raise keys.error("num_hidden_layers", f"at most {MOST_LAYERS}")


def _scales(keys: Keys, family: Family, width: int) -> dict[str, Any]:
    """Fields of ModelConfig."""
    if family.by_layer:
        return dict(
            scale_attn=keys.flag("scale_attn_weights", True),
            scale_attn_by_layer=keys.flag("scale_attn_by_inverse_layer_idx", False),
        )
    if family.scaled:
        return dict(
            attention_scale=keys.number("attention_multiplier", 1.0),
            embed_scale=keys.number("embedding_multiplier", 1.0),
            branch_scale=keys.number("residual_multiplier", 1.0),
            logit_scale=1.0 / keys.number("logits_scaling", 1.0),
        )
    found = dict(embed_scale=width**0.5) if family.embed_root else {}
    if family.query_scale:
        found["attention_scale"] = keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    return found
