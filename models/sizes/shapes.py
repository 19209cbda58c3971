"""Names and shapes of weights and saved tensors. No torch.

Legend: N tokens, D width, H query heads, K key/value heads, d head width, F hidden width, V vocabulary; E experts, k of
them for each token, I hidden width of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Any

from trireme.models.config import InputError, Lora, ModelConfig
from trireme.models.families.experts import Experts
from trireme.models.families.names import adapter_names as adapter_names
from trireme.models.families.scans import Scan
from trireme.models.layers import Layer, Mlp, shared_of
from trireme.models.sizes.groups import DOWN as DOWN
from trireme.models.sizes.groups import GATE_UP as GATE_UP
from trireme.models.sizes.groups import Group as Group
from trireme.models.sizes.groups import norms, parts_of, up_name, up_width

HALVES = ("attention", "mlp")
CACHED = 1 << 12  # of units, which a plan asks for again and again; what is handed out is not changed


def unit_names(cfg: ModelConfig) -> list[str]:
    """The units' names in file names and log lines."""
    short = {"block": "block", "attention": "attn", "mlp": "mlp"}
    return ["embed", *(f"{short[unit.role]}{i:03d}" for i, unit in cfg.units), "head"]


def kind(cfg: ModelConfig, u: int) -> str:
    """The kind of unit u: "embed", "head", or that of its form (ModelConfig.kinds)."""
    return cfg.kinds[unit(cfg, u).form] if 0 < u < cfg.n_units - 1 else "head" if u else "embed"


def unit(cfg: ModelConfig, u: int) -> Layer:
    """What an inner unit computes."""
    return cfg.units[u - 1][1]


def bare(kind: str) -> str:
    """A kind without what sets it apart from others: "block", "attention" or "mlp"."""
    return next((role for role in ("block", *HALVES) if role in kind), kind)


def inner_kinds(cfg: ModelConfig) -> tuple[str, ...]:
    """The bare kinds of the inner units: those that make a block, in order, or those that layers are."""
    return HALVES if cfg.halves or any(not (layer.mixers and layer.mlps) for layer in cfg.layers) else ("block",)


@lru_cache
def representatives(cfg: ModelConfig) -> tuple[int, ...]:
    """For each unit the first unit that is like it: same form, same trained, frozen and packed tensors."""
    first = dict[tuple[Any, ...], int]()
    return tuple(first.setdefault(_described(cfg, u), u) for u in range(cfg.n_units))


def _described(cfg: ModelConfig, u: int) -> tuple[Any, ...]:
    """Everything that a unit's sizes and costs depend on."""
    prefix = cfg.names.prefix(layer(cfg, u)) if 0 < u < cfg.n_units - 1 else ""
    bare = lambda group: tuple((name.removeprefix(prefix), shape) for name, shape in group)
    trained = tuple(tuple(map(bare, part)) for part in trained_parts(cfg, u))
    frozen = tuple((bare(group), is_packed(cfg, group)) for group in frozen_groups(cfg, u))
    return kind(cfg, u), trained, frozen


def layer(cfg: ModelConfig, u: int) -> int:
    return cfg.units[u - 1][0] if 0 < u < cfg.n_units - 1 else -1 if u == 0 else cfg.n_layers


# ---------------------------------------------------------------- weights


def embedding_name(cfg: ModelConfig) -> str:
    """The token embedding (V, D)."""
    return f"{cfg.names.embed}.weight"


def output_name(cfg: ModelConfig) -> str:
    """The output matrix (V, D), or that of a score head; the token embedding if tied."""
    return embedding_name(cfg) if cfg.tied else f"{cfg.names.output}.weight"


def weight_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """(Hugging Face name, shape) of a unit's tensors, in groups of neighbours in memory for storage.layout.pack."""
    return [group for part in weight_parts(cfg, u) for group in part]


def all_groups(cfg: ModelConfig) -> Iterator[Group]:
    """weight_groups of all units."""
    return (group for u in range(cfg.n_units) for group in weight_groups(cfg, u))


@lru_cache(CACHED)
def weight_parts(cfg: ModelConfig, u: int) -> list[list[Group]]:
    """weight_groups by part: a block's are its mixers and MLPs."""
    if u == 0:
        return [_embed_groups(cfg)]
    if u == cfg.n_units - 1:
        return [_head_groups(cfg)]
    i, layer = cfg.units[u - 1]
    prefix = cfg.names.prefix(i)
    return [[[(prefix + name, shape) for name, shape in group] for group in part] for part in parts_of(layer)]


def on_disk(cfg: ModelConfig, name: str, shape: tuple[int, ...]) -> Group:
    """The tensors of a checkpoint that make up a tensor in memory, in order: itself, or for example one per expert."""
    if cfg.experts and len(shape) == 1 and name.endswith((f".{GATE_UP}_bias", f".{DOWN}_bias")):
        return [(name, (cfg.experts.count, shape[0] // cfg.experts.count))]
    if cfg.names.mlp.correction_row and len(shape) == 1 and name.endswith(cfg.names.mlp.correction):
        return [(name, (1, *shape))]
    if cfg.names.mixer.conv and name.endswith(f".{cfg.names.mixer.conv}.weight"):
        if cfg.scan is None or not cfg.scan.parts:
            return [(name, (shape[0], 1, shape[-1]))]
        parts = zip(cfg.names.mixer.convs, cfg.scan.parts, strict=True)
        return [(name.replace(cfg.names.mixer.conv, part), (rows, 1, shape[-1])) for part, rows in parts]
    before, separator, last = name.rpartition(f"{cfg.names.mlp.experts}.")
    if len(shape) == 3 and cfg.names.mlp.stacked and separator:
        return [(before + cfg.names.mlp.stacked[last == DOWN], shape)]
    if len(shape) < 3 or not (cfg.names.mlp.single and cfg.names.mlp.experts):
        return [(name, shape)]
    prefix, last = name.rsplit(".", 1)
    matrices = cfg.names.mlp.single[-1:] if last == DOWN else cfg.names.mlp.single[:-1]
    matrix_shape = (shape[1] // len(matrices), shape[2])
    return [(f"{prefix}.{e}.{matrix}.weight", matrix_shape) for e in range(shape[0]) for matrix in matrices]


def within_experts(cfg: ModelConfig, name: str) -> tuple[str, int | None, int | None]:
    """(name in memory, expert, half) of a stored tensor: which part of the matrix of all experts it is.

    expert and half are None where it has all of them; half is 0 for gate, 1 for up. Of other tensors: (name, None,
    None).
    """
    for matrix, stacked in zip((GATE_UP, DOWN), cfg.names.mlp.stacked, strict=False):
        if name.endswith(f".{stacked}"):
            return f"{name.removesuffix(stacked)}{cfg.names.mlp.experts}.{matrix}", None, None
    before, _, last = name.removesuffix(".weight").rpartition(".")
    layer, _, expert = before.rpartition(".")
    if last not in cfg.names.mlp.single or not expert.isdigit():
        return name, None, None
    half, ups = cfg.names.mlp.single.index(last), len(cfg.names.mlp.single) - 1
    if half == ups:
        return f"{layer}.{DOWN}", int(expert), None
    return f"{layer}.{GATE_UP}", int(expert), half if ups > 1 else None


def stored_tensors(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """name -> shape of all that a checkpoint of the model holds."""
    return dict(stored for group in all_groups(cfg) for name, shape in group for stored in on_disk(cfg, name, shape))


def trained_parts(cfg: ModelConfig, u: int) -> list[list[Group]]:
    """weight_parts of a unit without frozen groups, with adapters."""
    lora = cfg.lora if 0 < u < cfg.n_units - 1 else None
    return [
        [group for group in part if not is_frozen(cfg, group)] + (_adapter_groups(cfg, lora, part) if lora else [])
        for part in weight_parts(cfg, u)
    ]


@lru_cache(CACHED)
def frozen_groups(cfg: ModelConfig, u: int) -> list[Group]:
    return [group for group in weight_groups(cfg, u) if is_frozen(cfg, group)]


def is_packed(cfg: ModelConfig, group: Group) -> bool:
    """Whether all matrices of a group are packed in files."""
    return cfg.packing is not None and all(len(shape) > 1 and _matches(name, cfg.packed) for name, shape in group)


def is_frozen(cfg: ModelConfig, group: Group) -> bool:
    """Whether a group is frozen, as a router's correction always is, and a score head with adapters never.

    Raises InputError where only some tensors of the one matmul are.
    """
    if len(group) == 1 and cfg.names.mlp.scalar and group[0][0].endswith(f".{cfg.names.mlp.scalar}"):
        return True
    if len(group) == 1 and cfg.names.mlp.correction and group[0][0].endswith(cfg.names.mlp.correction):
        return True
    if cfg.scores and cfg.lora and group[0][0] == output_name(cfg):
        return False
    frozen = [_matches(name, cfg.frozen) for name, _ in group]
    if any(frozen) and not all(frozen):
        raise InputError(
            f"{', '.join(name for name, _ in group)} are multiplied as one matrix: freeze all of them, or none."
        )
    return all(frozen)


@lru_cache(CACHED)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether the last glob that matches `name` is one without `!`."""
    matches = (not p.startswith("!") for p in reversed(patterns) if fnmatchcase(name, p.removeprefix("!")))
    return next(matches, False)


def _adapter_groups(cfg: ModelConfig, lora: Lora, groups: list[Group]) -> list[Group]:
    """Adapters of a part: of each matmul every A (rank, in), neighbours, then every B (out, rank).

    Of experts all A, by expert and rank (E rank, in), and all B (E rank, out).
    """
    adapters: list[Group] = []
    for group in groups:
        name, shape = group[0]
        if len(shape) == 3 and lora.adapts(name.rpartition(".")[0]):
            features = shape[:0:-1] if cfg.names.mlp.experts_in_out else shape[1:]  # (out, in)
            sizes = zip(adapter_names(name), reversed(features), strict=True)
            adapters += [[(part, (shape[0] * lora.rank, n))] for part, n in sizes]
        matrices = [(name.removesuffix(".weight"), shape) for name, shape in group if len(shape) == 2]
        adapted = [(adapter_names(module), shape) for module, shape in matrices if lora.adapts(module)]
        rows, columns = (1, 0) if cfg.names.in_out else (0, 1)
        if adapted:
            adapters.append([(a, (lora.rank, shape[columns])) for (a, _), shape in adapted])
            adapters.append([(b, (shape[rows], lora.rank)) for (_, b), shape in adapted])
    return adapters


def adapts_experts(name: str) -> bool:
    """Whether a tensor is an adapter of a layer's experts."""
    return f".experts.{GATE_UP}.lora_" in name or f".experts.{DOWN}.lora_" in name


def _embed_groups(cfg: ModelConfig) -> list[Group]:
    tokens: Group = [(embedding_name(cfg), (cfg.vocab, cfg.width))]
    positions: Group = [(f"{cfg.names.positions}.weight", (cfg.max_positions, cfg.width))]
    return [tokens, positions] if cfg.learned else [tokens]


def _head_groups(cfg: ModelConfig) -> list[Group]:
    output: list[Group] = [] if cfg.tied else [[(output_name(cfg), (cfg.outputs, cfg.width))]]
    return output + norms(cfg.layers[0], cfg.names.final_norm)


def parameters(cfg: ModelConfig, u: int | None = None) -> int:
    """Number of parameters of a unit, or of the model."""
    groups = all_groups(cfg) if u is None else weight_groups(cfg, u)
    return sum(prod(shape) for group in groups for _, shape in group)


# ---------------------------------------------------------------- saved tensors


def chosen(spec: Mlp | Experts) -> int:
    """Rows of an MLP's matmuls for each token."""
    return spec.chosen if isinstance(spec, Experts) else 1


Saved = dict[str, tuple[tuple[int, ...], str]]


def saved_shapes(cfg: ModelConfig, tokens: int, kind: str = "block") -> Saved:
    """saved_of a unit of this kind."""
    return {} if kind in ("embed", "head") else saved_of(cfg, cfg.kind(kind), tokens)


def saved_of(cfg: ModelConfig, layer: Layer, tokens: int) -> Saved:
    """name -> (shape, "compute" or "F32") of the tensors that forward can save besides its input.

    Results are bitwise identical for any subset of them. attn_out without lse is of no use.
    """
    N, saved, D = tokens, Saved(), layer.width
    for mixer in layer.mixers:
        if isinstance(mixer, Scan):
            saved["mixed"] = (N, mixer.mixed_width), "compute"
            saved["scan_out"] = (N, mixer.value_width), "compute"
            continue
        saved["qkv"] = (N, mixer.qkv_width), "compute"
        saved["attn_out"] = (N, mixer.out_width), "compute"
        saved["lse"] = (mixer.heads, N), "F32"
        if layer.mixer_names.post:
            saved["attn_branch"] = (N, D), "compute"
    if layer.mixers and layer.mlps and not layer.parallel:
        saved["resid"] = (N, D), "compute"
    for mlp in layer.mlps:
        if not is_sliced(cfg, layer) and mlp is layer.mlps[0]:  # then of several units
            saved[up_name(mlp)] = (N * chosen(mlp), up_width(mlp)), "compute"
        if isinstance(mlp, Experts) and (shared := shared_of(mlp)):
            saved[up_name(shared)] = (N, up_width(shared)), "compute"
        if isinstance(mlp, Experts) and mlp.latent:
            saved["latent_sum"] = (N, mlp.latent), "compute"
        if layer.mlp_names.post:
            saved["mlp_branch"] = (N, D), "compute"
    return saved


def is_sliced(cfg: ModelConfig, layer: Layer) -> bool:
    """Whether a layer's experts come in slices."""
    return cfg.slices > 1 and cfg.halves and layer.experts is not None


def passed_shapes(cfg: ModelConfig, tokens: int) -> Saved:
    """name -> (shape, dtype) of the tensors that pass from slice to slice of a layer's experts, besides their input.

    sum (of the experts so far), weights and experts (the routing), and in backward d_weights (the weights' gradient).
    """
    N, k = tokens, cfg.experts.chosen if cfg.experts else 1
    sums = {"sum": ((N, cfg.width), "F32"), "weights": ((N, k), "F32"), "d_weights": ((N, k), "F32")}
    return {**sums, "experts": ((N, k), "I32")}


def saved_bytes(cfg: ModelConfig, tokens: int, itemsize: int, kind: str = "block") -> dict[str, int]:
    """name -> bytes of saved_shapes, `itemsize` per compute element."""
    shapes = saved_shapes(cfg, tokens, kind)
    return {name: prod(shape) * (4 if dtype == "F32" else itemsize) for name, (shape, dtype) in shapes.items()}
