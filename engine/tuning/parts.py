"""Opens a checkpoint: finds the parts of packed matrices (models/families/packing.py), and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trireme.engine.tuning import bitsandbytes
from trireme.engine.tuning.packed_source import Made, Packed, unsaid
from trireme.models.config import BY_ROW, MXFP4, NF4, PACKINGS, UNUSED, WHOLE, Packing
from trireme.storage.checkpoint import Source, SourceTensor, open_source
from trireme.storage.files import Say, to_stderr
from trireme.storage.headers import CheckpointError

INTEGERS = {"I32": np.int32, "I64": np.int64}
LARGEST = 1 << 20  # columns of int4


def open_checkpoint(folder: str | Path, packing: Packing | None = None, say: Say = to_stderr) -> Source:
    """As open_source, but packed matrices appear as bf16. Raises CheckpointError.

    `packing`: what config.json says; None looks for all kinds.
    """
    source = open_source(folder, say)
    if packing is NF4 or (packing is None and any(name.endswith(bitsandbytes.STATE) for name in source.tensors)):
        return _in_nf4(source)
    packing = packing and _as_spelled(source, packing)
    for row in [packing] if packing else PACKINGS:
        found = _found(source, row)
        if packing:
            _check_whole(source, row, found)
        if found:
            try:
                return _packed(source, row, found, say)
            except CheckpointError:
                if packing or row is MXFP4:
                    raise
                raise CheckpointError(unsaid(source.folder, row)) from None  # groups may be of another size
    return source


def _as_spelled(source: Source, packing: Packing) -> Packing:
    """`packing`, or AutoFP8's, which has the same "quant_method" but a scale for each matrix, in X.weight_scale."""
    ends = lambda part: any(name.endswith("weight" + part.stored) for name in source.tensors)
    if packing.code != "e4m3" or ends(packing.parts[1]) or not ends(BY_ROW.parts[1]):
        return packing
    return BY_ROW.scaled(WHOLE, WHOLE)


def _in_nf4(source: Source) -> Source:
    found = bitsandbytes.matrices(source, NF4)
    taken = {part for names, _ in found.values() for part in names}
    tensors = {name: t for name, t in source.tensors.items() if name not in taken}
    parts, made = dict[str, SourceTensor](), dict[str, Made]()
    for name, (_, matrix) in found.items():
        tensors[name] = SourceTensor("BF16", matrix.shape, "", 0)
        named = [name + part.suffix for part in NF4.parts]
        parts |= dict(zip(named, matrix.parts, strict=True))
        made |= {named[1]: matrix.nested} if matrix.nested else {}
    return Packed(source.folder, source.files, tensors, source.auxiliary, NF4, parts, made) if found else source


def _found(source: Source, packing: Packing) -> dict[str, tuple[str, ...]]:
    """For each matrix the names of its parts, if all are there."""
    found = dict[str, tuple[str, ...]]()
    for stored, t in source.tensors.items():
        row = packing.of(stored)
        codes = row.parts[0]
        if stored.startswith(packing.left):
            continue
        if stored.endswith(codes.stored) and (t.dtype in codes.dtypes or packing is MXFP4):
            name = row.matrix(stored, codes.stored)
            parts = tuple(row.named(name, part.stored) for part in row.parts)
            if all(part in source.tensors for part in parts):
                found[name] = parts
    return found


def _check_whole(source: Source, packing: Packing, found: Mapping[str, tuple[str, ...]]) -> None:
    """Raises CheckpointError if a matrix lacks a part, or scales belong to a matrix that is not packed."""
    taken = {part for parts in found.values() for part in parts}
    for stored, t in source.tensors.items():
        if stored in taken or stored.endswith(UNUSED) or stored.startswith(packing.left):
            continue
        where, row = f"{source.folder / t.file}: {stored}", packing.of(stored)
        codes, *others = row.parts
        for part in others:
            name = row.matrix(stored, part.stored)
            there = row.named(name, codes.stored)
            other = source.tensors.get(there)
            if stored.endswith(part.stored) and name.endswith((".weight", "_proj")):
                wrong = f"{there} is {other.dtype}: one tensor in two forms" if other else f"{there} is missing"
                if other is None or other.dtype not in codes.dtypes:
                    raise CheckpointError(
                        f"{where} holds {part.word} of {row.word}, but {wrong}. Download the release again."
                    )
        if stored.endswith(codes.stored) and (codes.stored or t.dtype in codes.dtypes):
            name = row.matrix(stored, codes.stored)
            lacks = next((part for part in others if row.named(name, part.stored) not in source.tensors), None)
            if lacks is None:
                raise CheckpointError(f"{where} is {t.dtype} {list(t.shape)}; {row.word} has {row.wants}.")
            raise CheckpointError(
                f"{where} is {t.dtype}, and its {lacks.word}, {row.named(name, lacks.stored)}, are missing. "
                "Download the release again."
            )


def _packed(source: Source, packing: Packing, found: Mapping[str, tuple[str, ...]], say: Say) -> Packed:
    tensors, parts = dict(source.tensors), dict[str, SourceTensor]()
    outer = [stored for name, stored in found.items() if packing.of(name) is packing]
    inner = [stored for name, stored in found.items() if packing.of(name) is packing.experts]
    experts = packing.experts and _typed(source, packing.experts, inner)
    packing = replace(_typed(source, packing, outer), experts=experts)
    for name, stored in found.items():
        if name in source.tensors and name != stored[0]:
            raise CheckpointError(
                f"{source.folder}: {name} is there twice, also in {packing.word} as {stored[0]}. Remove one."
            )
        own = [tensors.pop(part) for part in stored]
        parts |= {name + part.suffix: t for part, t in zip(packing.of(name).parts, own, strict=True)}
        tensors[name] = _looks(source, packing.of(name), stored, own)
        for end in packing.checked:
            if packing.named(name, end) in tensors:
                _check_int4(source, packing, packing.named(name, end), tensors[name].shape)
                del tensors[packing.named(name, end)]
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
        how = "by activation order, which is not read. Take a release without it, or the BF16 original"
        raise CheckpointError(f"{source.named(name)}: its columns are in groups {how}.")
    if not order and tuple(values.tolist()) != shape:
        cut = values[0] == shape[0] and values[1] % 8 and values[1] < columns <= values[1] + 8
        how = "only multiples of 8 columns are read. Take the BF16 original"
        how = how if cut else f"its codes are of {list(shape)}. Download it again"
        raise CheckpointError(f"{source.named(name)} is {values.tolist()}: {how}.")


def _typed(source: Source, packing: Packing, matrices: Sequence[Sequence[str]]) -> Packing:
    """The packing with the dtypes of its first matrix, if they are allowed."""
    dtypes = tuple(source.tensors[name].dtype for name in matrices[0]) if matrices else ()
    right = all(d in part.dtypes for d, part in zip(dtypes, packing.parts, strict=False))
    return packing.with_dtypes(dtypes) if dtypes and right else packing


def _looks(source: Source, packing: Packing, stored: Sequence[str], parts: list[SourceTensor]) -> SourceTensor:
    """How a packed matrix appears."""
    shape = packing.decoded(parts[0].shape)
    typed = all(t.dtype in part.dtypes for part, t in zip(packing.parts, parts, strict=True))
    if shape is None or not typed or not packing.suits(shape, tuple(t.shape for t in parts)):
        shown = " and ".join(f"{n} {t.dtype} {list(t.shape)}" for n, t in zip(stored, parts, strict=True))
        shown = shown.replace(f"{stored[0]} ", f"{stored[0]} is ", 1)
        raise CheckpointError(f"{source.folder / parts[0].file}: {shown}; {packing.word} has {packing.wants}.")
    return SourceTensor("BF16", shape, "", 0)
