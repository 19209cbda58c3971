"""A Hugging Face config.json, checked and reduced to the numbers that the blocks need (ModelConfig). No torch.

No other code decides anything by the name of a model type: it reads the fields of ModelConfig.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trireme.models.families.experts import Experts, parse_experts
from trireme.models.families.extend import extended
from trireme.models.families.family import EXACT_GELU, GELU, OF_LOGITS, RELU2, SILU, Family, Wrapper
from trireme.models.families.fields import heads_of, positions_of, scales_of
from trireme.models.families.keys import InputError, Keys
from trireme.models.families.known import why_not
from trireme.models.families.latent import Latent, parse_latent
from trireme.models.families.names import Names, apart, direct, turned, within
from trireme.models.families.packing import BY_ROW as BY_ROW
from trireme.models.families.packing import COLUMN_GROUPS as COLUMN_GROUPS
from trireme.models.families.packing import FP8 as FP8
from trireme.models.families.packing import MX as MX
from trireme.models.families.packing import MXFP4 as MXFP4
from trireme.models.families.packing import NF4 as NF4
from trireme.models.families.packing import PACKINGS as PACKINGS
from trireme.models.families.packing import UNUSED as UNUSED
from trireme.models.families.packing import WHOLE as WHOLE
from trireme.models.families.packing import Packing
from trireme.models.families.quantization import SAID, packing_of, said_of
from trireme.models.families.rope import Rope
from trireme.models.families.scans import BLOCK_TYPES, KINDS_OF_MLP, block_types, parse_scan
from trireme.models.families.scans import Scan as Scan
from trireme.models.families.scores import CLASS as CLASS
from trireme.models.families.scores import OUTPUT, STD, std_of, why_none
from trireme.models.families.scores import class_of as class_of
from trireme.models.families.scores import labels_of as labels_of
from trireme.models.families.table import FAMILIES, OTHER_NAMES, WRAPPERS, text_of
from trireme.storage.untrusted import parse_json, read_small, shown, unreadable

LARGEST = 1 << 20  # of config.json
MOST_LAYERS = 1 << 12  # work grows with them before the files are read
# Keys that change the mathematics -> values with which they do not, which are accepted.
INERT = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "add_cross_attention": (None, False),
    "use_bidirectional_attention": (None, False),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "no_rope_layers": (None,),
    "per_layer_config": (None,),
}
# Keys by which transformers would read other files -> accepted values.
ELSEWHERE = {"configuration_files": (None,), "transformers_weights": (None, "model.safetensors")}
SUPPORTED = (*(name for name, family in FAMILIES.items() if not family.inner), *OTHER_NAMES, *WRAPPERS)


@dataclass(frozen=True)
class Lora:
    """Adapters of the blocks' matrices (lora.py)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # ends of module names, as q_proj
    scales: tuple[tuple[str, float], ...] = ()  # (module, its scale), where it is another than alpha / rank
    dropout: float = 0.0  # of adapters' inputs in training

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def scale_of(self, module: str) -> float:
        return next((scale for name, scale in self.scales if name == module), self.scale)

    def within(self, prefix: str) -> Lora:
        """These adapters as modules behind a prefix see them: scales by names within it."""
        inner = ((name.removeprefix(prefix), scale) for name, scale in self.scales if name.startswith(prefix))
        return replace(self, scales=tuple(inner)) if self.scales else self

    def adapts(self, module: str) -> bool:
        """Whether a module, by its name or the end of it, has an adapter."""
        return any(f".{module}".endswith(f".{target}") for target in self.targets)


@dataclass(frozen=True)
class Teaching:
    """A teacher in the loss: its k most likely tokens, the weight of its divergence, and the temperature of both."""

    k: int
    weight: float
    temperature: float

    @property
    def nbytes(self) -> int:
        """Bytes for each label: ids, log-probabilities, and the logarithm of the rest."""
        return self.k * (4 + 2) + 4


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one decoder-only model, and what the run's options and its plan add to them."""

    model_type: str
    vocab: int
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int  # of a document
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
    frozen: tuple[str, ...] = ()  # globs over names of tensors, with "!" of trained ones; the last match counts
    lora: Lora | None = None  # from the run's options
    smoothing: float = 0.0  # of labels in training; from the run's options
    fp8: bool = False  # linear layers of blocks multiply in fp8; from the run's options
    teaching: Teaching | None = None  # of the loss; from the run's options
    scores: int = 0  # rows of a score head in place of the output matrix (families/scores.py); 0: a language model
    score_std: float = STD  # of the weights of a new score head
    halves: bool = False  # units are sub-layers; from the plan
    at_once: int = 0  # packed experts that a matmul decodes at a time; 0: a pass decodes all; from the plan
    slices: int = 1  # units of weights with a layer's frozen experts; from the plan
    packing: Packing | None = None  # of matrices in files; frozen ones stay packed until the GPU decodes them
    packed: tuple[str, ...] = ()  # globs over their names, as `frozen`
    local_rope: Rope | None = None  # of layers with the window, if different
    full_layers: tuple[int, ...] = ()  # from window_from on, without the window
    unrotated: tuple[int, ...] = ()  # layers without rope
    attention_scale: float = 0.0  # of scores; 0: by scale_attn
    embed_scale: float = 1.0
    branch_scale: float = 1.0  # factor of the outputs of attention and MLP
    mlp_scale: float = 0.0  # factor of the MLP's output; 0: branch_scale
    gate_scale: float = 1.0  # factor of the MLP's gate, before its activation
    logit_scale: float = 1.0
    attention_cap: float = 0.0  # scores s are cap * tanh(s / cap); 0: s
    logit_cap: float = 0.0  # of logits, likewise
    indexed: bool = False  # in longer documents an indexer selects keys, which is not supported
    experts: Experts | None = None
    latent: Latent | None = None  # q, k and v are computed from latents; head_dim is that of q and k
    scan: Scan | None = None
    scanning: bool = False  # this is the config of layers whose mixer is a recurrence
    mtp_layers: int = 0  # layers after the last, for further tokens: copied, not used
    wrapper: str = ""  # model_type of the multimodal model that contains it
    media: tuple[tuple[int, str], ...] = ()  # tokens that stand for images, audio or video, and their keys
    parallel: bool = False  # attention and MLP read one input: no sub-layers
    mlp_layers: tuple[int, ...] = ()  # layers that are an MLP, where each is a mixer or an MLP; (): each has both
    tanh_gelu: bool = False  # GELU by tanh, in a family whose GELU is exact
    mlp_rows: int = 1 << 14  # tokens of a tile of an MLP: its gradients are summed tile by tile

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:
        """Computed once: counts and layouts are kept by configuration."""
        return self._hash

    @cached_property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @cached_property
    def names(self) -> Names:
        own = self.family.dense_names if self.family.experts and self.experts is None else self.family.names
        own = self.family.scan_names if self.scanning and self.family.scan_names else own
        own = apart(own) if self.experts is not None and self.experts.apart else own
        own = turned(own) if self.experts is not None and self.experts.turned else own
        own = direct(own) if self.latent is not None and not self.latent.q_rank else own
        own = replace(own, output=OUTPUT) if self.scores else own
        return within(own) if self.wrapper else own

    @property
    def carried(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors that are copied to the output and not used."""
        behind = (self.names.prefix(self.n_layers + i) for i in range(self.mtp_layers))
        return (*(self.outer.carried if self.outer else ()), *self.family.carried, *behind)

    def carries(self, name: str) -> bool:
        """Whether a tensor is copied and not used."""
        return name.startswith(self.carried) or self.indexed and ".self_attn.indexer." in name

    @property
    def outer(self) -> Wrapper | None:
        """The multimodal model that contains it."""
        return WRAPPERS.get(self.wrapper)

    @property
    def opener(self) -> str:
        """transformers' class for the whole checkpoint."""
        if self.scores:
            return f"AutoModel{CLASS}"
        return "AutoModelForImageTextToText" if self.wrapper else "AutoModelForCausalLM"

    @property
    def outputs(self) -> int:
        """Rows of the head's matrix."""
        return self.scores or self.vocab

    @property
    def attention_gate(self) -> bool:
        return self.family.attention_gate

    @property
    def gated(self) -> bool:
        return self.family.gated

    @property
    def silu(self) -> bool:
        """Whether the gate's activation is SiLU; otherwise it is GELU by tanh."""
        return self.family.acts is SILU

    @property
    def relu2(self) -> bool:
        """Whether the MLP is relu squared between two matmuls, without a gate."""
        return self.family.acts is RELU2

    @property
    def rotated_first(self) -> bool:
        """Whether q and k are rotated right after their projection: they have no norms, or norms after the rotation."""
        return not self.qk_norm or self.family.rope_first

    @property
    def exact_gelu(self) -> bool:
        """Whether GELU is exact, by erf; otherwise it is by tanh."""
        return self.family.acts[0] == EXACT_GELU and not self.tanh_gelu

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
    def value_dim(self) -> int:
        return self.latent.value if self.latent else self.head_dim

    @property
    def attn_width(self) -> int:
        """Features of attention's result, before the output projection."""
        return self.n_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        """Features of the result of attention's first matmul."""
        if self.latent:
            return (self.latent.q_rank or self.q_width) + self.latent.kv_rank + self.latent.rope
        return self.q_width * (1 + self.attention_gate) + 2 * self.kv_width

    @cached_property
    def dense(self) -> ModelConfig:
        """The config that layers without experts use, where others have them."""
        return replace(self, experts=None)

    @cached_property
    def scanned(self) -> ModelConfig:
        """The config that layers whose mixer is a recurrence use."""
        scale = self.branch_scale if self.scan is None else self.scan.scale or self.branch_scale
        return replace(self, scanning=True, branch_scale=scale)

    @cached_property
    def in_mlp(self) -> ModelConfig:
        """The config that MLPs use."""
        return replace(self, branch_scale=self.mlp_scale) if self.mlp_scale else self

    def at(self, layer: int) -> ModelConfig:
        """The config that a layer uses."""
        found = self.dense if self.is_dense(layer) else self
        return found.scanned if self.scans(layer) else found

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts where others have."""
        return self.experts is not None and layer in self.experts.dense

    def scans(self, layer: int) -> bool:
        """Whether a layer's mixer is a recurrence alone."""
        return self.scan is not None and layer in self.scan.layers and not self.scan.with_attention

    @property
    def both(self) -> bool:
        """Whether each mixer is attention and a recurrence of the same input (mixers/both.py)."""
        return self.scan is not None and self.scan.with_attention and not self.scanning

    @property
    def attending(self) -> int:
        """The number of layers with attention."""
        alone = len(self.scan.layers) if self.scan and not self.scan.with_attention else 0
        return self.n_layers - alone - len(self.mlp_layers)

    @property
    def recurring(self) -> int:
        """The number of layers with a recurrence."""
        return len(self.scan.layers) if self.scan else 0

    @property
    def whole(self) -> bool:
        """Whether blocks cannot be divided into two sub-layers."""
        return self.parallel or bool(self.mlp_layers)

    def layer_window(self, layer: int) -> int:
        """The attention window of a layer; 0: none."""
        return self.window if layer >= self.window_from and layer not in self.full_layers else 0

    def layer_scale(self, layer: int) -> float:
        """The factor of a layer's attention scores."""
        scale = self.attention_scale or (self.head_dim**-0.5 if self.scale_attn else 1.0)
        return scale / (layer + 1) if self.scale_attn_by_layer else scale


NESTED = {"rope": Rope, "local_rope": Rope, "experts": Experts, "latent": Latent, "scan": Scan}  # of ModelConfig


def numbers(cfg: ModelConfig) -> dict[str, Any]:
    """A config as flat JSON, by which a run compares its model: without what a plan adds and how files spell it."""
    found = json.loads(json.dumps(asdict(cfg)))
    for name in (
        "halves",
        "scanning",
        "at_once",
        "slices",
        "media",
        "packing",
        "packed",
        "teaching",
        "smoothing",
        "score_std",
    ):
        del found[name]
    if found["lora"] and not found["lora"]["scales"]:
        del found["lora"]["scales"]  # as in older records
    if found["lora"] and not found["lora"]["dropout"]:
        del found["lora"]["dropout"]
    for name in NESTED:
        found |= {f"{name}.{key}": value for key, value in (found.pop(name) or {}).items()}
    for name in ("experts.turned", "experts.apart", "scan.parts"):
        found.pop(name, None)
    return found


def default_number(name: str) -> Any:
    """The value that records older than this name of `numbers` stand for."""
    holder, _, key = name.rpartition(".")
    described = fields(NESTED[holder] if holder else ModelConfig)
    defaults = {f.name: f.default for f in described if f.default is not MISSING}
    return json.loads(json.dumps(defaults.get(key)))


def read_config(folder: str | Path, rope_factor: float | None = None) -> ModelConfig:
    """ModelConfig of the checkpoint in `folder`, arguments as in read_raw. Raises InputError."""
    return parse_config(read_raw(folder, rope_factor), str(Path(folder) / "config.json"))


def read_raw(folder: str | Path, rope_factor: float | None = None) -> dict[str, Any]:
    """The decoded config.json of a checkpoint's folder, with rope_factor times the positions if given (extend.py).

    Raises InputError where config.json is missing, malformed or of an adapter.
    """
    path = Path(folder) / "config.json"
    inside = Path(folder) / "adapter_config.json"
    try:
        raw = parse_json(read_small(path, LARGEST, links=True), "file")
    except FileNotFoundError:
        if inside.exists():
            how = f"{folder} holds an adapter: give its base, and --adapter {folder}, or merge them"
            raise InputError(f"{path} is missing. {how}.") from None
        raise InputError(f"{path} is missing. Give the folder of a Hugging Face checkpoint.") from None
    except OSError as e:
        raise InputError(unreadable(path, e)) from None
    except ValueError as e:
        raise InputError(f"{path}: {e}. Download it again.") from None
    if inside.exists():
        raise InputError(f"{inside}: transformers adds this adapter to the model in its folder. Move it elsewhere.")
    return extended(raw, rope_factor, str(path)) if rope_factor else raw


def parse_config(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """ModelConfig of a decoded config.json, which `where` names in errors. Raises InputError if it is not supported."""
    model_type = raw.get("model_type")
    for name, accepted in ELSEWHERE.items():
        Keys(raw, where).refuse_unless(name, accepted)
    if model_type not in SUPPORTED:
        why = why_not(model_type, SUPPORTED)
        raise InputError(f'{where}: model_type "{shown(str(model_type))}" is not supported: {why}')
    if model_type in WRAPPERS:
        found = _wrapped(raw, where, model_type)
    else:
        model_type = OTHER_NAMES.get(model_type, model_type)
        listed = FAMILIES[model_type].listed_type if "layer_types" in raw else ""
        found = _parsed(raw, where, listed or model_type)
    found, labels = replace(found, score_std=std_of(raw)), labels_of(raw, where)
    return scored(found, labels, where) if labels else found


def scored(cfg: ModelConfig, labels: int, where: str) -> ModelConfig:
    """`cfg` with a score head of `labels` rows, not tied, without factors of logits. Raises InputError with `where`."""
    if why := why_none(cfg.model_type, cfg.wrapper):
        raise InputError(f"{where}: {why}, so a score head on it could not be opened elsewhere. Take another model.")
    return replace(cfg, scores=labels, tied=False, logit_scale=1.0, logit_cap=0.0)


def _parsed(raw: dict[str, Any], where: str, model_type: str) -> ModelConfig:
    """parse_config for a model_type in FAMILIES."""
    family = FAMILIES[model_type]
    raw = _renamed(raw, family, where)
    keys = Keys(block_types(raw, where) if family.single else raw, where)
    keys.refuse_unless("is_causal", (True,), True)
    for name, accepted in (INERT | family.only).items():
        if name not in family.accepts or name in family.only:
            keys.refuse_unless(name, accepted)
    packing, packed = packing_of(keys, family.packings, family.names, family.carried)
    spelled = family.spelled
    keys.refuse_unless(spelled["act"], family.acts, family.acts[0])
    width, layers = keys.count(spelled["width"]), keys.count(spelled["n_layers"], most=MOST_LAYERS)
    heads = keys.count(spelled["n_heads"], family.n_heads)
    latent = parse_latent(keys, family.latent, heads)
    kv_heads, head_dim = (heads, latent.head_dim) if latent else heads_of(keys, family, width, heads)
    positions = keys.count(spelled["max_positions"], family.max_positions)
    usual_ffn = family.ffn if family.rotary else 4 * width
    if family.mlp_bias is True:
        keys.refuse_unless("use_bias", (None, True))  # gelu.py always adds one
    flag = lambda bias: bias if isinstance(bias, bool) else keys.flag(*bias)
    return ModelConfig(
        model_type=model_type,
        vocab=keys.count(spelled["vocab"], family.vocab),
        width=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=keys.count(spelled["ffn"], usual_ffn, null=usual_ffn),
        max_positions=min(positions, keys.count("index_topk", 2048)) if family.indexed else positions,
        eps=keys.number(spelled["eps"], family.eps),
        tied=keys.flag("tie_word_embeddings", family.tied),
        qkv_bias=flag(family.qkv_bias),
        o_bias=flag(family.o_bias),
        mlp_bias=flag(family.mlp_bias),
        qk_norm=bool(family.qk_norm) and (not family.qk_norm_key or keys.flag(family.qk_norm_key, False)),
        parallel=family.parallel and keys.flag("use_parallel_residual", True),
        tanh_gelu=EXACT_GELU in family.acts and keys.raw.get(spelled["act"]) in GELU,
        experts=parse_experts(keys, family.experts, layers),
        latent=latent,
        scan=parse_scan(keys, family.scan, layers, width, heads),
        packing=packing,
        packed=packed,
        indexed=family.indexed,
        mlp_layers=tuple(i for i, t in enumerate(keys.raw[BLOCK_TYPES]) if t in KINDS_OF_MLP) if family.single else (),
        mtp_layers=_mtp_layers(keys) if family.mtp else 0,
        **positions_of(keys, family, head_dim, positions, layers, latent),
        **scales_of(keys, family, width, head_dim),
    )


def _renamed(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """`raw` with aliases of keys renamed to the keys that are read. Raises InputError where the two differ."""
    for alias, name in family.aliases.items():
        if alias not in raw:
            continue
        if name in raw and raw[name] != raw[alias]:
            raise InputError(f'{where}: "{alias}" and "{name}" are two names of one key, but differ. Remove one.')
        raw = {name: raw[alias]} | {key: value for key, value in raw.items() if key != alias}
    return raw


def _mtp_layers(keys: Keys) -> int:
    name = "num_nextn_predict_layers"
    return 0 if keys.raw.get(name) == 0 else keys.count(name, 1, MOST_LAYERS)


def _wrapped(raw: dict[str, Any], where: str, model_type: str) -> ModelConfig:
    """parse_config for a multimodal model: that of its language model, described by its text_config."""
    keys, wrapper = Keys(raw, where), WRAPPERS[model_type]
    inner, name = text_of(raw)
    if not isinstance(inner, dict):
        raise keys.error(name, "an object")
    where = f"{where}: {name}" if name else where
    if isinstance(said := inner.get("model_type", wrapper.texts[0]), str):
        inner = inner | {"model_type": (OTHER_NAMES | wrapper.older).get(said, said)}
    Keys(inner, where).refuse_unless("model_type", wrapper.texts)
    inner = inner | _tied(keys, Keys(inner, where), wrapper)
    if OF_LOGITS in FAMILIES[inner["model_type"]].caps:
        Keys(inner, where).refuse_unless(OF_LOGITS, (None,))  # transformers' multimodal class has no cap of logits
    if (said := said_of(raw, keys.where)) is not None:
        inner["quantization_config"] = said
    media = tuple((keys.count(key, default), key) for key, default in wrapper.media.items())
    return replace(_parsed(inner, where, inner["model_type"]), wrapper=model_type, media=media)


def without_packing(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint after its packed matrices are decoded."""
    return {key: value for key, value in raw.items() if key not in SAID}


def _tied(keys: Keys, inner: Keys, wrapper: Wrapper) -> dict[str, bool]:
    """tie_word_embeddings of a multimodal model, from where its family has it."""
    name = "tie_word_embeddings"
    if wrapper.tied == "text":
        return {name: keys.flag(name, False)} if name in keys.raw else {}
    return {name: keys.flag(name, wrapper.tied_default) or (wrapper.tied == "either" and inner.flag(name, False))}
