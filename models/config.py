"""A Hugging Face config.json, checked and reduced to the numbers that the blocks need (ModelConfig). No torch.

No other code decides anything by the name of a model type: it reads the fields of ModelConfig.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trireme.models.families.experts import Experts
from trireme.models.families.extend import extended
from trireme.models.families.family import OF_LOGITS, Family, Wrapper
from trireme.models.families.fields import ACTS, layers_of, scales_of
from trireme.models.families.keys import InputError, Keys
from trireme.models.families.known import why_not
from trireme.models.families.latent import Latent
from trireme.models.families.names import SPLIT as NO_NAMES
from trireme.models.families.names import Names, within
from trireme.models.families.packing import BY_ROW as BY_ROW
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
from trireme.models.families.scans import block_types
from trireme.models.families.scans import Scan as Scan
from trireme.models.families.scores import CLASS as CLASS
from trireme.models.families.scores import OUTPUT, STD, std_of, why_none
from trireme.models.families.scores import class_of as class_of
from trireme.models.families.scores import labels_of as labels_of
from trireme.models.families.table import FAMILIES, OTHER_NAMES, WRAPPERS, text_of
from trireme.models.layers import Attention, Layer, Mlp
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
    max_positions: int  # of a document
    eps: float
    tied: bool
    layers: tuple[Layer, ...]
    learned: bool = False  # positions are learned: rows of a table
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # of logits l: cap * tanh(l / cap); 0: l
    indexed: bool = False  # in longer documents an indexer selects keys, which is not supported
    mtp_layers: int = 0  # layers after the last, for further tokens: copied, not used
    wrapper: str = ""  # model_type of the multimodal model that contains it
    media: tuple[tuple[int, str], ...] = ()  # tokens that stand for images, audio or video, and their keys
    scores: int = 0  # rows of a score head in place of the output matrix (families/scores.py); 0: a language model
    score_std: float = STD  # of the weights of a new score head
    packing: Packing | None = None  # of matrices in files; frozen ones stay packed until the GPU decodes them
    packed: tuple[str, ...] = ()  # globs over their names, as `frozen`
    frozen: tuple[str, ...] = ()  # globs over names of tensors, with "!" of trained ones; the last match counts
    lora: Lora | None = None  # from the run's options, as those below
    smoothing: float = 0.0  # of labels in training
    fp8: bool = False  # linear layers of blocks multiply in fp8
    teaching: Teaching | None = None  # of the loss
    halves: bool = False  # units are sub-layers; from the plan, as those below
    at_once: int = 0  # packed experts that a matmul decodes at a time; 0: a pass decodes all
    slices: int = 1  # units of weights with a layer's frozen experts
    trains: bool = True  # False: no gradients and no optimizer state; evaluation, sampling, a teacher
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
        """The names of its ends and blocks, and those within a block of the layer with most."""
        most = sorted(self.layers, key=lambda layer: (layer.experts is None, layer.attention is None))
        own = most[0].names
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
    def n_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def whole(self) -> bool:
        """Whether blocks cannot be divided into two sub-layers."""
        return any(layer.whole for layer in self.layers)

    @cached_property
    def units(self) -> tuple[tuple[int, Layer], ...]:
        """(number of the layer, what it computes) of each inner unit: layers, or halves of them."""
        halves = lambda layer: (layer.mixing, layer.feeding) if self.halves else (layer,)
        return tuple((i, unit) for i, layer in enumerate(self.layers) for unit in halves(layer))

    @property
    def n_units(self) -> int:
        return len(self.layers) * (2 if self.halves else 1) + 2

    @cached_property
    def kinds(self) -> dict[Layer, str]:
        """The distinct forms of units, with names: "block", "attention" or "mlp", with what sets them apart."""
        found, mixed = dict[Layer, str](), any(layer.experts for layer in self.layers)
        for _, unit in self.units:
            if unit.form in found:
                continue
            scans = "scan " * (unit.attention is None and unit.scan is not None)
            name = scans + "dense " * (mixed and unit.mlp is not None and unit.experts is None) + unit.what
            number = sum(other.rstrip(" 0123456789") == name for other in found.values())
            found[unit.form] = f"{name} {number + 1}" if number else name
        return found

    def kind(self, name: str) -> Layer:
        """The form of that name."""
        return next(form for form, own in self.kinds.items() if own == name)

    @property
    def widest_head(self) -> int:
        return max((own.attention.dim for own in self.layers if own.attention), default=0)

    # Of the first layer that has them: what asks for these must become a question to a layer.

    @cached_property
    def experts(self) -> Experts | None:
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @cached_property
    def scan(self) -> Scan | None:
        return next((layer.scan for layer in self.layers if layer.scan), None)

    @cached_property
    def attention(self) -> Attention:
        return next(layer.attention for layer in self.layers if layer.attention)

    @property
    def latent(self) -> Latent | None:
        return self.attention.latent

    @property
    def rope(self) -> Rope | None:
        return next((layer.attention.rope for layer in self.layers if layer.attention), None)


def with_experts(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """`cfg` with other fields of experts in all layers that have them."""
    changed = lambda mlps: tuple(replace(m, **changes) if isinstance(m, Experts) else m for m in mlps)
    return replace(cfg, layers=tuple(replace(layer, mlps=changed(layer.mlps)) for layer in cfg.layers))


def renamed(cfg: ModelConfig, spelled: Callable[[Names], Names]) -> ModelConfig:
    """`cfg` with other names within the layers that have experts."""
    found = (replace(own, names=spelled(own.names)) if own.experts else own for own in cfg.layers)
    return replace(cfg, layers=tuple(found))


def uniform(
    model_type: str, vocab: int, width: int, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, ffn: int,
    max_positions: int, eps: float, tied: bool, *, qkv_bias: bool = False, o_bias: bool = False,
    mlp_bias: bool = False, rope: Rope | None = None,
) -> ModelConfig:  # fmt: skip
    """A model of `n_layers` alike."""
    family = FAMILIES[model_type]
    rope = rope and replace(rope, width=rope.width or head_dim)
    attention = Attention(n_heads, n_kv_heads, head_dim, head_dim**-0.5, rope, bias=qkv_bias, o_bias=o_bias)
    mlp = Mlp(ffn, ACTS[family.acts[0]], family.gated, mlp_bias)
    layer = Layer(width, eps, family.names, (attention,), (mlp,), "layer" if family.layer_norm else "rms")
    return ModelConfig(model_type, vocab, width, max_positions, eps, tied, (layer,) * n_layers, learned=rope is None)


LATER = ("trains", "halves", "at_once", "slices", "media", "packing", "packed", "teaching", "smoothing", "score_std")


def numbers(cfg: ModelConfig) -> dict[str, Any]:
    """A config as flat JSON, by which a run compares its model: without what a plan adds and how files spell it.

    Layers are their distinct records, and the record of each layer.
    """
    found: dict[str, Any] = json.loads(json.dumps(asdict(replace(cfg, layers=()))))
    for name in (*LATER, "layers"):
        del found[name]
    if found["lora"] and not found["lora"]["scales"]:
        del found["lora"]["scales"]  # as in older records
    if found["lora"] and not found["lora"]["dropout"]:
        del found["lora"]["dropout"]
    distinct = list(dict.fromkeys(cfg.layers))
    for i, layer in enumerate(distinct):
        said = json.loads(json.dumps(asdict(replace(layer, names=NO_NAMES))))
        del said["names"]
        found |= {f"layers.{i}.{key}": value for key, value in said.items()}
    return found | {"layers": [distinct.index(layer) for layer in cfg.layers]}


def default_number(name: str) -> Any:
    """The value that records older than this name of `numbers` stand for."""
    defaults = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING}
    return json.loads(json.dumps(defaults.get(name)))


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
    positions = keys.count(spelled["max_positions"], family.max_positions)
    if family.mlp_bias is True:
        keys.refuse_unless("use_bias", (None, True))  # gelu.py always adds one
    if family.layers:
        made = family.layers(keys, family, width, layers, heads)
    else:
        made = layers_of(keys, family, width, layers, heads, positions)
    scales = scales_of(keys, family, width, made[0].attention.dim if made[0].attention else 1)
    return ModelConfig(
        model_type=model_type,
        vocab=keys.count(spelled["vocab"], family.vocab),
        width=width,
        max_positions=min(positions, keys.count("index_topk", 2048)) if family.indexed else positions,
        eps=keys.number(spelled["eps"], family.eps),
        tied=keys.flag("tie_word_embeddings", family.tied),
        layers=made,
        learned=not family.rotary,
        embed_scale=scales.embed,
        logit_scale=scales.logits,
        logit_cap=scales.logits_cap,
        indexed=family.indexed,
        mtp_layers=_mtp_layers(keys) if family.mtp else 0,
        packing=packing,
        packed=packed,
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
