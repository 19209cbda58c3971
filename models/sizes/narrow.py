"""Weights in fewer bits: names, shapes and dtypes of packed matrices, and of codes for fp8 GEMMs. No torch.

A group of matrices in fp8 has codes in rows (as stored), in columns (transposed) and a scale. Legend: shapes.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from trireme.models.config import ModelConfig
from trireme.models.families.packing import Part
from trireme.models.layers import Layer
from trireme.models.sizes.groups import Group, expert_input, up_width
from trireme.models.sizes.shapes import (
    CACHED,
    frozen_groups,
    is_frozen,
    is_packed,
    is_sliced,
    on_disk,
    unit,
    weight_groups,
)

# Behind the name of a matmul's first matrix: its codes. By a mark that no tensor of a file has in its name.
FP8 = ROWS, COLUMNS, SCALE = "@rows", "@columns", "@scale"
SLICES = 16  # of a layer's packed experts, where not all fit decoded
MOST_CODES = 1 << 29  # elements of a unit that codes are made of once a pass, in both orders
LEAST_ROWS = 2048  # of an expert, mean: with fewer, quantizing matrices takes what fp8 saves (docs/dev/kernels.md)
FP8_DTYPES = {ROWS: "F8_E4M3", COLUMNS: "F8_E4M3", SCALE: "F32"}
EXPERT = "#"  # before the number of an expert whose part of a stored tensor is meant
FP8_SCALE = (4,)  # shape: the first is the scale, of which cuBLASLt asks that it lies at a multiple of 16 bytes


class PartOf(NamedTuple):
    """A part of a packed matrix."""

    part: Part
    shape: tuple[int, ...]  # in memory
    stored: Group  # in files: names behind which is the part's suffix


def packed_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """The frozen_groups that stay packed until the GPU decodes them. fp8_groups are not among them: they are codes."""
    if cfg.packing is None:
        return []
    quantized = fp8_groups(cfg, u)
    return [group for group in frozen_groups(cfg, u) if is_packed(cfg, group) and group not in quantized]


def sliced_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """The experts' matrices in packed_groups that each matmul decodes, some experts at a time, not a pass at once."""
    sliced = bool(cfg.at_once) or cfg.slices > 1
    return [group for group in packed_groups(cfg, u) if sliced and len(group[0][1]) == 3]


def slice_of(cfg: ModelConfig) -> int:
    """How many of a layer's packed experts a matmul decodes at a time if not all are decoded; 0 without such."""
    single = replace(cfg, at_once=1, slices=1)
    if cfg.experts is None or not any(sliced_groups(single, u) for u in range(single.n_units)):
        return 0
    return -(-cfg.experts.count // SLICES)


def at_once(cfg: ModelConfig) -> int:
    """Experts that a matmul decodes at a time."""
    assert cfg.experts is not None
    size = -(-cfg.experts.count // min(cfg.slices, cfg.experts.count))
    return min(cfg.at_once or size, size)


# ---------------------------------------------------------------- slices that are units of weights


def slices(cfg: ModelConfig, u: int) -> tuple[range, ...]:
    """The experts of each slice of unit u's experts, which are transferred in turn; () where all come with the unit."""
    if cfg.slices == 1 or u in (0, cfg.n_units - 1) or not is_sliced(cfg, unit(cfg, u)) or unit(cfg, u).mixers:
        return ()
    assert cfg.experts is not None
    E, n = cfg.experts.count, min(cfg.slices, cfg.experts.count)
    return tuple(range(E * i // n, E * (i + 1) // n) for i in range(n)) if n > 1 else ()


def may_be_sliced(cfg: ModelConfig) -> bool:
    """Whether experts can come in slices: all of them are frozen, without a norm behind their sum, and blocks can be
    divided into sub-layers.
    """
    if cfg.experts is None or cfg.indivisible or any(layer.experts and layer.mlp_names.post for layer in cfg.layers):
        return False
    cut = replace(cfg, halves=True)
    fed = (u for u in range(1, cut.n_units - 1) if unit(cut, u).role == "mlp" and unit(cut, u).experts)
    groups = (g for u in fed for g in weight_groups(cut, u))
    return all(is_frozen(cut, group) for group in groups if len(group[0][1]) == 3)


def slice_groups(cfg: ModelConfig, u: int, experts: range) -> list[Group]:
    """The groups of one of `slices`: the matrices of its experts, under the names of those of all experts."""
    assert cfg.experts is not None
    return [
        [(name, (shape[0] * len(experts) // cfg.experts.count, *shape[1:])) for name, shape in group]
        for group in _base_groups(cfg, u)
        if _of_experts(cfg, group)
    ]


def slice_on_disk(cfg: ModelConfig, stored: Group, experts: range) -> Group:
    """The part of `stored` (on_disk) that belongs to a slice; of a tensor for all experts, each expert (EXPERT)."""
    assert cfg.experts is not None
    E = cfg.experts.count
    if len(stored) == 1:
        ((name, shape),) = stored
        return [(f"{name}{EXPERT}{e}", (shape[0] // E, *shape[1:])) for e in experts]
    count = len(stored) // E
    return stored[experts.start * count : experts.stop * count]


def in_file(name: str, numel: int) -> tuple[str, int]:
    """(name of the stored tensor, first element in it) of an entry of slice_on_disk with so many elements."""
    stored, _, expert = name.partition(EXPERT)
    return stored, int(expert or 0) * numel


def _of_experts(cfg: ModelConfig, group: Group) -> bool:
    """Whether these are matrices of all experts, or parts of packed ones."""
    infix = f".{cfg.names.mlp.experts}."
    return infix in group[0][0] and not group[0][0].endswith("_bias")


@lru_cache(CACHED)
def packed_parts(cfg: ModelConfig, u: int) -> dict[str, PartOf]:
    """Parts of packed_groups, by their names in memory."""
    parts = dict[str, PartOf]()
    for name, shape in (matrix for group in packed_groups(cfg, u) for matrix in group):
        assert cfg.packing is not None
        files, packing = on_disk(cfg, name, shape), cfg.packing.of(name)
        for part, dims in zip(packing.parts, packing.shapes(files[0][1]), strict=True):
            full = dims if len(files) == 1 else (len(files), *dims)
            parts[name + part.suffix] = PartOf(part, full, [(stored + part.suffix, dims) for stored, _ in files])
    return parts


def base_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """frozen_groups as they are stored in memory, without those of `slices`.

    Packed ones are their parts; those in fp8 are codes in rows, and scales, which come before other vectors.
    """
    groups = _base_groups(cfg, u)
    return [group for group in groups if not _of_experts(cfg, group)] if slices(cfg, u) else groups


def _base_groups(cfg: ModelConfig, u: int) -> list[Group]:
    packed, parts, quantized = packed_groups(cfg, u), packed_parts(cfg, u), fp8_groups(cfg, u)
    suffixes = [part.suffix for part in cfg.packing.parts] if cfg.packing else []
    groups: list[Group] = [[(group[0][0] + SCALE, FP8_SCALE)] for group in quantized if is_frozen(cfg, group)]
    for group in frozen_groups(cfg, u):
        if group in quantized:
            groups.append([(group[0][0] + ROWS, fused(group))])
            continue
        if group not in packed:
            groups.append(group)
            continue
        groups += [[(name, parts[name].shape)] for name in (n + s for n, _ in group for s in suffixes)]
    return groups


def own_dtypes(cfg: ModelConfig, u: int) -> dict[str, str]:
    """name -> dtype of the tensors in base_groups that are not in the run's dtype."""
    names = [name for group in _base_groups(cfg, u) for name, _ in group]
    dtypes = {name: "F32" for name in names if cfg.names.mlp.correction and name.endswith(cfg.names.mlp.correction)}
    dtypes |= {name: FP8_DTYPES[part] for name in names for part in FP8 if name.endswith(part)}
    return dtypes | {name: part.part.dtypes[0] for name, part in packed_parts(cfg, u).items()}


def in_fp8(cfg: ModelConfig, rows: int, columns: int) -> bool:
    """Whether a linear layer's matrix is multiplied in fp8: its sizes must be multiples of 16."""
    return cfg.fp8 and rows % 16 == 0 and columns % 16 == 0


def experts_in_fp8(cfg: ModelConfig, layer: Layer, tokens: int) -> bool:
    """Whether grouped GEMMs of rows and experts' matrices are in fp8, in a micro-batch of so many tokens."""
    spec, rows, inner = layer.experts, min(tokens, cfg.mlp_rows), expert_input(layer)
    if spec is None or rows * spec.chosen < LEAST_ROWS * spec.count:
        return False
    return in_fp8(cfg, inner, up_width(spec)) and in_fp8(cfg, spec.width, inner)


def fp8_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """The groups of weights that are multiplied in fp8; experts are not among them: each matmul quantizes them."""
    if not cfg.fp8 or u in (0, cfg.n_units - 1):
        return []
    router = f".{cfg.names.mlp.router}.weight"
    groups = [g for g in weight_groups(cfg, u) if len(g[0][1]) == 2 and not g[0][0].endswith(router)]
    return [group for group in groups if in_fp8(cfg, *fused(group))]


def fused(group: Group) -> tuple[int, int]:
    """The shape of a group's matrices as one matrix."""
    return sum(shape[0] for _, shape in group), group[0][1][1]


def quantized_each(cfg: ModelConfig, u: int) -> bool:
    """Whether each matmul quantizes unit u's trained matrices, because codes of all would take too much GPU memory."""
    return sum(prod(fused(group)) for group in fp8_groups(cfg, u) if not is_frozen(cfg, group)) > MOST_CODES


def derived_groups(cfg: ModelConfig, u: int) -> tuple[list[Group], dict[str, str]]:
    """(tensors that a pass makes from a unit's weights, those of their dtypes that are not the run's).

    They are the decoded packed_groups without sliced_groups, and of fp8_groups codes in both orders, or if frozen in
    the order that base_groups do not have.
    """
    sliced, dtypes, at_once = sliced_groups(cfg, u), dict[str, str](), quantized_each(cfg, u)
    groups = [group for group in packed_groups(cfg, u) if group not in sliced]
    for group in fp8_groups(cfg, u):
        if at_once and not is_frozen(cfg, group):
            continue
        name, (rows, columns) = group[0][0], fused(group)
        shapes = {ROWS: (rows, columns), COLUMNS: (columns, rows), SCALE: FP8_SCALE}
        suffixes = [COLUMNS] if is_frozen(cfg, group) else FP8
        groups += [[(name + part, shapes[part])] for part in suffixes]
        dtypes |= {name + part: FP8_DTYPES[part] for part in suffixes}
    return groups, dtypes
