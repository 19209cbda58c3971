"""The numbers of a model: what its config.json (families/parse.py), a run's options and a plan say of it. No torch.

No other code decides anything by the name of a model type: it reads the fields of ModelConfig.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trireme.models.families.experts import Experts
from trireme.models.families.extend import extended
from trireme.models.families.family import ACTS, Family, Wrapper
from trireme.models.families.keys import InputError
from trireme.models.families.names import MixerNames, MlpNames, Names, nested_names
from trireme.models.families.packing import Packing
from trireme.models.families.parse import SUPPORTED as SUPPORTED
from trireme.models.families.parse import fields
from trireme.models.families.quantization import SETTINGS
from trireme.models.families.rope import Rope
from trireme.models.families.scans import Scan
from trireme.models.families.scores import CLASS, OUTPUT, STD, labels_of, scores_obstacle
from trireme.models.families.table import FAMILIES, WRAPPERS
from trireme.models.layers import Attention, Layer, Mlp, hash_once
from trireme.storage.untrusted import parse_json, read_small, unreadable

LARGEST = 1 << 20  # of config.json


@dataclass(frozen=True)
class Lora:
    """Adapters of the blocks' matrices (lora.py)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # ends of module names, as q_proj
    scales: tuple[tuple[str, float], ...] = ()  # (module, its scale), where it is another than alpha / rank
    dropout: float = 0.0  # of adapters' inputs in training
    aware: bool = False  # compute with packed matrices as they will be when adapters are merged (rounded.py)

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

    __hash__ = hash_once  # counts and layouts are kept by configuration

    @cached_property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @cached_property
    def names(self) -> Names:
        """The names of its ends and blocks; within a block those of a layer with attention, and of one with experts."""
        attending = next((layer for layer in self.layers if layer.attention), None)
        mixed = next((layer for layer in self.layers if layer.experts), None)
        mixed = mixed or next((layer for layer in self.layers if layer.mlps), None)
        names = self.family.names
        names = replace(
            names, mixer=attending.mixer_names if attending else names.mixer,
            mlp=mixed.mlp_names if mixed else names.mlp, output=OUTPUT if self.scores else names.output,
        )  # fmt: skip
        return nested_names(names) if self.wrapper else names

    @property
    def carried(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors that are copied to the output and not used."""
        mtp = (self.names.prefix(self.n_layers + i) for i in range(self.mtp_layers))
        return (*(self.outer.carried if self.outer else ()), *self.family.carried, *mtp)

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
    def indivisible(self) -> bool:
        """Whether blocks cannot be divided into two sub-layers."""
        return any(layer.indivisible for layer in self.layers)

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
        names, mixed = dict[Layer, str](), any(layer.experts for layer in self.layers)
        for _, unit in self.units:
            if unit.form in names:
                continue
            scans = "scan " * (unit.attention is None and unit.scan is not None)
            name = scans + "dense " * (mixed and unit.mlp is not None and unit.experts is None) + unit.role
            number = sum(kind.rstrip(" 0123456789") == name for kind in names.values())
            names[unit.form] = f"{name} {number + 1}" if number else name
        return names

    def kind(self, name: str) -> Layer:
        """The form of that name."""
        return next(form for form, kind in self.kinds.items() if kind == name)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The distinct attentions of its layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers if layer.attention))

    @cached_property
    def scan(self) -> Scan | None:
        """The recurrence of those of its layers that have one: it is the same in all of them."""
        distinct = {layer.scan for layer in self.layers if layer.scan}
        assert len(distinct) <= 1
        return next(iter(distinct), None)

    @cached_property
    def experts(self) -> Experts | None:
        """The experts of those of its layers that have them: they are the same in all of them."""
        distinct = {layer.experts for layer in self.layers if layer.experts}
        assert len(distinct) <= 1
        return next(iter(distinct), None)

    @property
    def widest_head(self) -> int:
        return max((spec.dim for spec in self.attentions), default=0)

    @property
    def rotates(self) -> bool:
        """Whether a layer's positions are rotated."""
        return any(spec.rope for spec in self.attentions)


def renamed(cfg: ModelConfig, rename: Callable[[MlpNames], MlpNames]) -> ModelConfig:
    """`cfg` with other names of MLPs in the layers that have experts."""
    named = lambda layer: replace(layer, mlp_names=rename(layer.mlp_names)) if layer.experts else layer
    return replace(cfg, layers=tuple(map(named, cfg.layers)))


def uniform(
    model_type: str, vocab: int, width: int, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, ffn: int,
    max_positions: int, eps: float, tied: bool, *, bias: bool = False, rope: Rope | None = None,
) -> ModelConfig:  # fmt: skip
    """A model of `n_layers` alike, with or without biases of all linear layers."""
    family = FAMILIES[model_type]
    rope = rope and replace(rope, width=rope.width or head_dim)
    attention = Attention(n_heads, n_kv_heads, head_dim, head_dim**-0.5, rope, bias=bias, o_bias=bias)
    layer = Layer(
        width, eps, (attention,), (Mlp(ffn, ACTS[family.act], family.gated, bias),), family.names.mixer,
        family.names.mlp, "layer" if family.layer_norm else "rms", in_out=family.names.in_out,
    )  # fmt: skip
    return ModelConfig(model_type, vocab, width, max_positions, eps, tied, (layer,) * n_layers, learned=rope is None)


# Fields that a plan adds, that say how files spell the model, or that a run may change.
NOT_COMPARED = {
    "trains", "halves", "at_once", "slices", "media", "packing", "packed", "teaching", "smoothing", "score_std",
}  # fmt: skip


def numbers(cfg: ModelConfig) -> dict[str, Any]:
    """A config as flat JSON, by which a run compares its model. Layers are distinct records, and the number of each."""
    layers = [replace(layer, mixer_names=MixerNames(), mlp_names=MlpNames()) for layer in cfg.layers]
    distinct = list(dict.fromkeys(layers))
    flat = {key: value for key, value in asdict(replace(cfg, layers=())).items() if key not in NOT_COMPARED}
    for i, layer in enumerate(distinct):
        values = asdict(layer)
        flat |= {f"layers.{i}.{key}": values[key] for key in values if not key.endswith("_names")}
    flat["layers"] = [distinct.index(layer) for layer in layers]
    compared: dict[str, Any] = json.loads(json.dumps(flat))
    return compared


def read_config(folder: str | Path, rope_factor: float | None = None) -> ModelConfig:
    """ModelConfig of the checkpoint in `folder`, arguments as in read_raw. Raises InputError."""
    return parse_config(read_raw(folder, rope_factor), str(Path(folder) / "config.json"))


def read_raw(folder: str | Path, rope_factor: float | None = None) -> dict[str, Any]:
    """The decoded config.json of a checkpoint's folder, with rope_factor times the positions if given (extend.py).

    Raises InputError where config.json is missing, malformed or of an adapter.
    """
    path = Path(folder) / "config.json"
    adapter = Path(folder) / "adapter_config.json"
    try:
        raw = parse_json(read_small(path, LARGEST, links=True), "file")
    except FileNotFoundError:
        if adapter.exists():
            advice = f"{folder} holds an adapter: give its base, and --adapter {folder}, or merge them"
            raise InputError(f"{path} is missing. {advice}.") from None
        raise InputError(f"{path} is missing. Give the folder of a Hugging Face checkpoint.") from None
    except OSError as e:
        raise InputError(unreadable(path, e)) from None
    except ValueError as e:
        raise InputError(f"{path}: {e}. Download it again.") from None
    if adapter.exists():
        raise InputError(f"{adapter}: transformers adds this adapter to the model in its folder. Move it elsewhere.")
    return extended(raw, rope_factor, str(path)) if rope_factor else raw


def parse_config(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """ModelConfig of a decoded config.json, which `source` names in errors. Raises InputError if it is unsupported."""
    cfg, labels = ModelConfig(**fields(raw, source)), labels_of(raw, source)
    return scored(cfg, labels, source) if labels else cfg


def scored(cfg: ModelConfig, labels: int, source: str) -> ModelConfig:
    """`cfg` with a score head of `labels` rows, untied, without factors of logits. Raises InputError with `source`."""
    if cause := scores_obstacle(cfg.model_type, cfg.wrapper):
        raise InputError(f"{source}: {cause}, so a score head on it could not be opened elsewhere. Take another model.")
    return replace(cfg, scores=labels, tied=False, logit_scale=1.0, logit_cap=0.0)


def without_packing(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint after its packed matrices are decoded; Kimi says it of the language model."""
    bare = {key: value for key, value in raw.items() if key not in SETTINGS}
    inner = bare.get("text_config")
    return bare | ({"text_config": without_packing(inner)} if isinstance(inner, dict) else {})
