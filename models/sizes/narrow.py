"""Weights in fewer bits: frozen packed matrices, and quantized weights of fp8 GEMMs; names, shapes, dtypes. No torch.

Legend: shapes.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

from trireme.models.config import ModelConfig
from trireme.models.families.packing import Part
from trireme.models.sizes.shapes import (
    GATE_UP,
    Group,
    expert_input,
    frozen_groups,
    is_frozen,
    is_packed,
    is_sliced,
    kind,
    on_disk,
    up_width,
    weight_groups,
)

FP8 = ROWS, COLUMNS, SCALE = "_rows", "_columns", "_scale"  # behind the name of a matmul's first matrix: its codes
SLICES = 16  # of a layer's packed experts, where not all fit decoded
MOST_CODES = 1 << 29  # elements of a unit that codes are made of once a pass, in both orders
LEAST_ROWS = 2048  # of an expert, mean: with fewer, quantizing matrices takes what fp8 saves (docs/kernels.md)
FP8_DTYPES = {ROWS: "F8_E4M3", COLUMNS: "F8_E4M3", SCALE: "F32"}
EXPERT = "#"  # before the number of an expert whose part of a stored tensor is meant
FP8_SCALE = (4,)  # shape: the first is the scale, of which cuBLASLt asks that it lies at a multiple of 16 bytes


class PartOf(NamedTuple):
    """A part of a packed matrix."""

    part: Part
    shape: tuple[int, ...]  # in memory
    stored: Group  # in files: names behind which is the part's suffix


def packed_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """Those frozen_groups that stay packed until the GPU decodes them; fp8_groups have codes of their own."""
    if cfg.packing is None:
        return []
    quantised = fp8_groups(cfg, u)
    return [group for group in frozen_groups(cfg, u) if is_packed(cfg, group) and group not in quantised]


def sliced_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """Experts' matrices among packed_groups of which each matmul decodes some at a time (packed.py), not a pass all."""
    sliced = bool(cfg.at_once) or cfg.slices > 1
    return [group for group in packed_groups(cfg, u) if sliced and len(group[0][1]) == 3]


def slice_of(cfg: ModelConfig) -> int:
    """Experts of a slice, where not all of a layer's packed ones are to be decoded; 0: there are none."""
    one = replace(cfg, at_once=1, slices=1)
    sliced = cfg.experts and any(sliced_groups(one, u) for u in range(one.n_units))
    return -(-cfg.experts.count // SLICES) if cfg.experts and sliced else 0


def slice_bytes(cfg: ModelConfig, u: int, itemsize: int) -> int:
    """Of the largest of their slices, decoded."""
    return max((at_once(cfg) * prod(shape[1:]) * itemsize for ((_, shape),) in sliced_groups(cfg, u)), default=0)


def at_once(cfg: ModelConfig) -> int:
    """Experts that a matmul decodes at a time."""
    assert cfg.experts is not None
    of_slice = -(-cfg.experts.count // min(cfg.slices, cfg.experts.count))
    return min(cfg.at_once or of_slice, of_slice)


# ---------------------------------------------------------------- slices that are units of weights


def slices(cfg: ModelConfig, u: int) -> tuple[range, ...]:
    """The experts of each of unit u's slices, which come one after another; () where they come with the unit."""
    if cfg.slices == 1 or u in (0, cfg.n_units - 1) or not is_sliced(cfg) or kind(cfg, u) != "mlp":
        return ()
    assert cfg.experts is not None
    E, n = cfg.experts.count, min(cfg.slices, cfg.experts.count)
    return tuple(range(E * i // n, E * (i + 1) // n) for i in range(n)) if n > 1 else ()


def may_be_sliced(cfg: ModelConfig) -> bool:
    """Whether layers have experts, all of them frozen, and are cut in sub-layers."""
    if cfg.experts is None or cfg.parallel:
        return False
    cut = replace(cfg, halves=True)
    found = (g for u in range(1, cut.n_units - 1) if kind(cut, u) == "mlp" for g in weight_groups(cut, u))
    return all(is_frozen(cut, group) for group in found if len(group[0][1]) == 3)


def slice_groups(cfg: ModelConfig, u: int, own: range) -> list[Group]:
    """base_groups of one of `slices`: matrices of its experts, by the names of all."""
    assert cfg.experts is not None
    return [
        [(name, (shape[0] * len(own) // cfg.experts.count, *shape[1:])) for name, shape in group]
        for group in _base_groups(cfg, u)
        if _of_experts(cfg, group)
    ]


def slice_on_disk(cfg: ModelConfig, stored: Group, own: range) -> Group:
    """Of a tensor of all experts as files have it, those of a slice; of one for all, expert by expert."""
    assert cfg.experts is not None
    E = cfg.experts.count
    if len(stored) == 1:
        ((name, shape),) = stored
        return [(f"{name}{EXPERT}{e}", (shape[0] // E, *shape[1:])) for e in own]
    each = len(stored) // E
    return stored[own.start * each : own.stop * each]


def in_file(name: str, numel: int) -> tuple[str, int]:
    """(the stored tensor, its first element) of one in slice_on_disk."""
    stored, _, expert = name.partition(EXPERT)
    return stored, int(expert or 0) * numel


def _of_experts(cfg: ModelConfig, group: Group) -> bool:
    """Whether these are matrices of all experts, or parts of packed ones."""
    within = f".{cfg.names.experts}."
    return within in group[0][0] and not group[0][0].endswith("_bias")


class Decoded(NamedTuple):
    """Bytes that decoding them reads and writes in a micro-batch."""

    forward: int = 0
    backward: int = 0
    rebuilt: int = 0  # of forward, in backward


def sliced_bytes(cfg: ModelConfig, u: int, tokens: int, itemsize: int) -> Decoded:
    """Each tile of tokens (block.mlp_forward) decodes all."""
    parts, found = packed_parts(cfg, u), dict[str, int]()
    for ((name, shape),) in sliced_groups(cfg, u):
        assert cfg.packing is not None
        read = sum(prod(parts[name + part.suffix].shape) * part.itemsize for part in cfg.packing.parts)
        found[name.rpartition(".")[2]] = (read + prod(shape) * itemsize) * -(-tokens // cfg.mlp_rows)
    both = sum(found.values())
    return Decoded(both, both, found.get(GATE_UP, 0))


def packed_parts(cfg: ModelConfig, u: int) -> dict[str, PartOf]:
    """Parts of packed_groups, by their names in memory."""
    found = dict[str, PartOf]()
    for name, shape in (matrix for group in packed_groups(cfg, u) for matrix in group):
        assert cfg.packing is not None
        files, packing = on_disk(cfg, name, shape), cfg.packing.of(name)
        for part, one in zip(packing.parts, packing.shapes(files[0][1]), strict=True):
            own = one if len(files) == 1 else (len(files), *one)
            found[name + part.suffix] = PartOf(part, own, [(stored + part.suffix, one) for stored, _ in files])
    return found


def base_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """frozen_groups as they lie in memory, without those of `slices`: of packed ones their parts; of fp8_groups codes
    as stored, and their scales, before other vectors.
    """
    found = _base_groups(cfg, u)
    return [group for group in found if not _of_experts(cfg, group)] if slices(cfg, u) else found


def _base_groups(cfg: ModelConfig, u: int) -> list[Group]:
    packed, parts, quantised = packed_groups(cfg, u), packed_parts(cfg, u), fp8_groups(cfg, u)
    suffixes = [part.suffix for part in cfg.packing.parts] if cfg.packing else []
    found: list[Group] = [[(group[0][0] + SCALE, FP8_SCALE)] for group in quantised if is_frozen(cfg, group)]
    for group in frozen_groups(cfg, u):
        if group in quantised:
            found.append([(group[0][0] + ROWS, fused(group))])
            continue
        if group not in packed:
            found.append(group)
            continue
        found += [[(name, parts[name].shape)] for name in (n + s for n, _ in group for s in suffixes)]
    return found


def own_dtypes(cfg: ModelConfig, u: int) -> dict[str, str]:
    """name -> dtype of a unit's base_groups that are not of the run's."""
    names = [name for group in _base_groups(cfg, u) for name, _ in group]
    wide = {name: "F32" for name in names if cfg.names.correction and name.endswith(cfg.names.correction)}
    wide |= {name: FP8_DTYPES[part] for name in names for part in FP8 if name.endswith(part)}
    return wide | {name: part.part.dtypes[0] for name, part in packed_parts(cfg, u).items()}


def in_fp8(cfg: ModelConfig, rows: int, columns: int) -> bool:
    """Whether a linear layer's matrix is multiplied in fp8: the hardware's matmuls are of multiples of 16."""
    return cfg.fp8 and rows % 16 == 0 and columns % 16 == 0


def experts_in_fp8(cfg: ModelConfig, tokens: int) -> bool:
    """Whether products of rows and experts' matrices are in fp8 in a tile of so many tokens (block.mlp_forward)."""
    own, rows = cfg.experts, min(tokens, cfg.mlp_rows)
    if own is None or rows * own.chosen < LEAST_ROWS * own.count:
        return False
    return in_fp8(cfg, expert_input(cfg), up_width(cfg)) and in_fp8(cfg, own.width, expert_input(cfg))


def norms_make_codes(cfg: ModelConfig) -> bool:
    """Whether a norm before a linear layer in fp8 writes codes alone: RMSNorm without adapters behind it."""
    return cfg.fp8 and cfg.lora is None and not cfg.family.layer_norm


def fp8_groups(cfg: ModelConfig, u: int) -> list[Group]:
    """Matrices of the matmuls in fp8."""
    if not cfg.fp8 or u in (0, cfg.n_units - 1):
        return []
    router = f".{cfg.names.router}.weight"
    found = [g for g in weight_groups(cfg, u) if len(g[0][1]) == 2 and not g[0][0].endswith(router)]
    return [group for group in found if in_fp8(cfg, *fused(group))]


def fused(group: Group) -> tuple[int, int]:
    """Shape of a matmul's matrices as one."""
    return sum(shape[0] for _, shape in group), group[0][1][1]


def quantised_each(cfg: ModelConfig, u: int) -> bool:
    """Whether each matmul quantises unit u's trained matrices: codes of all would leave too little of a GPU."""
    return sum(prod(fused(group)) for group in fp8_groups(cfg, u) if not is_frozen(cfg, group)) > MOST_CODES


def made_groups(cfg: ModelConfig, u: int) -> tuple[list[Group], dict[str, str]]:
    """(what a pass makes of a unit's weights, dtypes that are not of the run's): packed_groups without sliced_groups;
    of fp8_groups codes in both orders, if frozen in the one that base_groups lack.
    """
    sliced, dtypes, each = sliced_groups(cfg, u), dict[str, str](), quantised_each(cfg, u)
    found = [group for group in packed_groups(cfg, u) if group not in sliced]
    for group in fp8_groups(cfg, u):
        if each and not is_frozen(cfg, group):
            continue
        name, (rows, columns) = group[0][0], fused(group)
        shapes = {ROWS: (rows, columns), COLUMNS: (columns, rows), SCALE: FP8_SCALE}
        made = [COLUMNS] if is_frozen(cfg, group) else FP8
        found += [[(name + part, shapes[part])] for part in made]
        dtypes |= {name + part: FP8_DTYPES[part] for part in made}
    return found, dtypes
