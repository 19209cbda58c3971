"""Opens a checkpoint: collects the parts of packed matrices (models/families/packing.py), and checks them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trireme.engine.tuning import bitsandbytes
from trireme.engine.tuning.packed_source import OF_PACKINGS, Packed, globs
from trireme.models import hf
from trireme.models.config import ModelConfig, Packing
from trireme.models.families.packing import BY_ROW, MXFP4, NF4, PACKINGS, UNUSED, WHOLE
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import NUMPY, Source, SourceTensor, open_source, unread
from trireme.storage.files import Say, to_stderr
from trireme.storage.headers import CheckpointError

INTEGERS = {"I32": np.int32, "I64": np.int64}
LARGEST = 1 << 20  # columns of int4
StoredParts = Mapping[str, tuple[str, ...]]  # matrix -> names of its parts in files


def open_checkpoint(folder: str | Path, packing: Packing | None = None, say: Say = to_stderr) -> Source:
    """As open_source, but packed matrices appear as bf16. `packing`: what config.json says.

    Raises CheckpointError, also for packed matrices of which config.json says nothing.
    """
    source = open_source(folder, say)
    if packing is None:
        row = next((row for row in PACKINGS if _parts(source, row)), None)
        if row or any(name.endswith(bitsandbytes.STATE) for name in source.tensors):
            raise CheckpointError(_unsaid(source.folder, row or NF4))
        return source
    packing = _as_spelled(source, packing)
    opened = bitsandbytes.in_nf4(source) if packing is NF4 else _packed(source, packing, _parts(source, packing), say)
    if not opened.parts:
        fault = f'config.json has a "quantization_config" of {packing.word}, but no tensor is in it'
        say(f"note: {source.folder}: {fault}: all are read as they are")
        return source
    return opened


def as_stored(cfg: ModelConfig, source: Source) -> ModelConfig:
    """`cfg` with those matrices packed that are packed in `source`, whatever config.json says.

    Raises CheckpointError for a weight of a dtype that is not read.
    """
    cfg = replace(hf.as_stored(cfg, source.shapes), packing=None, packed=())
    odd = [name for name, t in source.tensors.items() if t.dtype not in NUMPY]
    names = hf.canonical_names(cfg, source.shapes, source.named) if odd else {}
    for name in (name for name in odd if names[name] is not None):
        t = source.tensors[name]
        raise CheckpointError(unread(source.folder / t.file, name, t.dtype))
    if not isinstance(source, Packed):
        return cfg
    cfg = replace(cfg, packing=source.packing)
    stored = hf.sources(cfg, source.shapes, source.named)
    in_files = lambda name, shape: (stored.get(file, file) for file, _ in shapes.on_disk(cfg, name, shape))
    packed = globs(cfg, lambda name, shape: all(map(source.packs, in_files(name, shape))))
    return replace(cfg, packed=packed)


def _unsaid(folder: Path, packing: Packing) -> str:
    """The message about packed matrices of which config.json says nothing."""
    advice = "Copy it from the release: transformers does not find these tensors without it"
    if (folder / OF_PACKINGS[0]).exists():
        key = {"quant_method": "modelopt", "quant_algo": "NVFP4" if packing.code == "fp4" else "FP8"}
        advice = f"{OF_PACKINGS[0]} describes them (ModelOpt 0.29 and older). "
        advice += f'Put "quantization_config": {json.dumps(key)} into config.json'
    return f'{folder}: there are tensors in {packing.word}, but config.json has no "quantization_config". {advice}.'


def _as_spelled(source: Source, packing: Packing) -> Packing:
    """`packing`, or AutoFP8's, which has the same "quant_method" but a scale for each matrix, in X.weight_scale."""
    ends = lambda part: any(name.endswith("weight" + part.stored) for name in source.tensors)
    if packing.code != "e4m3" or ends(packing.parts[1]) or not ends(BY_ROW.parts[1]):
        return packing
    return BY_ROW.scaled(WHOLE, WHOLE)


def _parts(source: Source, packing: Packing) -> dict[str, tuple[str, ...]]:
    """For each matrix the names of its parts, if all are there."""
    result = dict[str, tuple[str, ...]]()
    for stored, t in source.tensors.items():
        row = packing.of(stored)
        codes = row.parts[0]
        right = stored.endswith(codes.stored) and (t.dtype in codes.dtypes or packing is MXFP4)
        if right and not stored.startswith(packing.left):
            name = stored.removesuffix(codes.stored)
            parts = tuple(name + part.stored for part in row.parts)
            if all(part in source.tensors for part in parts):
                result[name] = parts
    return result


def _packed(source: Source, packing: Packing, stored: StoredParts, say: Say) -> Packed:
    tensors, parts = dict(source.tensors), dict[str, SourceTensor]()
    outer = [names for name, names in stored.items() if packing.of(name) is packing]
    inner = [names for name, names in stored.items() if packing.of(name) is packing.experts]
    experts = packing.experts and _typed(source, packing.experts, inner)
    packing = replace(_typed(source, packing, outer), experts=experts)
    for name, names in stored.items():
        row = packing.of(name)
        if name in source.tensors and name != names[0]:
            twice = f"{name} is there twice, also in {packing.word} as {names[0]}"
            raise CheckpointError(f"{source.folder}: {twice}. Remove one.")
        places = [tensors.pop(part) for part in names]
        parts |= {name + part.suffix: t for part, t in zip(row.parts, places, strict=True)}
        tensors[name] = SourceTensor("BF16", _shape(source, row, names, places), "", 0)
        for end in packing.checked:
            if (neighbour := name + end) in tensors:
                _check_int4(source, packing, neighbour, tensors[name].shape)
                del tensors[neighbour]
    unused = [name for name in tensors if name.endswith(UNUSED)]
    if unused:
        say(f"note: {source.folder}: {len(unused):,} scales of activations, as {unused[0]}, are not used")
    tensors = {name: t for name, t in tensors.items() if name not in set(unused)}
    return Packed(source.folder, source.files, tensors, source.auxiliary, packing, parts, {})


def _check_int4(source: Source, packing: Packing, name: str, shape: tuple[int, ...]) -> None:
    """Checks what int4 has of a matrix besides its parts: its shape, or the group of each column. Raises
    CheckpointError.
    """
    t, columns, order = source.tensors[name], shape[-1], name.endswith("_idx")
    n = columns if order else 2
    if t.dtype not in INTEGERS or t.shape != (n,) or n > LARGEST:
        raise CheckpointError(f"{source.named(name)} is {t.dtype} {list(t.shape)}, expected I32 or I64 [{n}].")
    values = source.read(name).view(INTEGERS[t.dtype])
    if order and not np.array_equal(values, np.arange(columns) // packing.block[1]):
        fault = "by activation order, which is not read"
        raise CheckpointError(f"{source.named(name)}: its columns are in groups {fault}. Take the BF16 original.")
    if not order and tuple(values.tolist()) != shape:
        fault = f"its codes are of {list(shape)}, and only multiples of 8 columns are read. Take the BF16 original"
        raise CheckpointError(f"{source.named(name)} is {values.tolist()}: {fault}.")


def _typed(source: Source, packing: Packing, matrices: Sequence[Sequence[str]]) -> Packing:
    """The packing with the dtypes of its first matrix, if they are allowed."""
    dtypes = tuple(source.tensors[name].dtype for name in matrices[0]) if matrices else ()
    right = all(d in part.dtypes for d, part in zip(dtypes, packing.parts, strict=False))
    return packing.with_dtypes(dtypes) if dtypes and right else packing


def _shape(source: Source, packing: Packing, stored: Sequence[str], parts: list[SourceTensor]) -> tuple[int, ...]:
    """The shape of a packed matrix. Raises CheckpointError if its parts do not fit each other."""
    shape = packing.decoded(parts[0].shape)
    typed = all(t.dtype in part.dtypes for part, t in zip(packing.parts, parts, strict=True))
    if shape is None or not typed or not packing.suits(shape, tuple(t.shape for t in parts)):
        listed = " and ".join(f"{n} is {t.dtype} {list(t.shape)}" for n, t in zip(stored, parts, strict=True))
        raise CheckpointError(f"{source.folder / parts[0].file}: {listed}; {packing.word} has {packing.wants}.")
    return shape
