"""Checkpoints of bitsandbytes in NF4, with and without double quantization: the parts of each matrix X, and its state.

With double quantization, X.absmax has bytes, an offset and, for each 256 of them, a scale in X.nested_absmax. They are
decoded as bitsandbytes does while they are read, to the fp32 scales that memory has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import numpy as np

from trireme.models.config import Packing
from trireme.storage.checkpoint import Source, SourceTensor
from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import parse_json

STATE, FP4, INT8 = ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".SCB"
SCALES, MAP, NESTED, NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
LARGEST_STATE, NESTED_BLOCK = 4096, 256  # bytes, scales
AGAIN = "Download the release again"
FIXED = (("quant_type", "nf4"), ("blocksize", 64), ("nested_blocksize", NESTED_BLOCK))  # of the state
TABLE = (  # of kernels/packed/reference.py, which needs torch
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022833334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Nested:
    """Scales that are quantized themselves."""

    source: Source
    codes: SourceTensor
    scales: SourceTensor
    table: np.ndarray  # (256,) fp32
    offset: np.float32

    def __call__(self, first: int, last: int) -> np.ndarray:
        """Scales [first, last) in fp32: a product, then a sum, each rounded."""
        codes = self.source.bytes_of(self.codes.file, self.codes.offset + first, last - first)
        a, b = first // NESTED_BLOCK, -(-last // NESTED_BLOCK)
        scales = self.source.bytes_of(self.scales.file, self.scales.offset + 4 * a, 4 * (b - a)).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            of_each = np.repeat(scales, NESTED_BLOCK)[first - a * NESTED_BLOCK :][: last - first]
            return self.table[codes] * of_each + self.offset


@dataclass(frozen=True)
class Matrix:
    """A matrix in NF4: its shape, its parts in memory, and what computes its scales if no file has them."""

    shape: tuple[int, int]
    parts: tuple[SourceTensor, SourceTensor]
    nested: Nested | None


def matrices(source: Source, packing: Packing) -> dict[str, tuple[tuple[str, ...], Matrix]]:
    """For each matrix (its tensors in files, what they are). Raises CheckpointError, also if a part has no state."""
    found = dict[str, tuple[tuple[str, ...], Matrix]]()
    for stored in source.tensors:
        if stored.endswith((FP4, INT8)):
            how = f"weights that bitsandbytes quantized to {'fp4' if stored.endswith(FP4) else '8 bits'}"
            raise CheckpointError(f"{source.named(stored)} is of {how}, which is not read. Take the BF16 original.")
        if stored.endswith(STATE):
            name = stored.removesuffix(STATE)
            found[name] = _matrix(source, packing, name)
    taken = {part for names, _ in found.values() for part in names}
    for stored in source.tensors.keys() - taken:
        if stored.endswith((SCALES, MAP, NESTED, NESTED_MAP)):
            state = stored.rpartition(".")[0] + STATE
            raise CheckpointError(f"{source.named(stored)} is there, but {state} is missing. {AGAIN}.")
    return found


def _matrix(source: Source, packing: Packing, name: str) -> tuple[tuple[str, ...], Matrix]:
    state = _state(source, name)
    nested = "nested_offset" in state
    names = (name, name + SCALES, name + MAP, name + STATE, *((name + NESTED, name + NESTED_MAP) if nested else ()))
    if missing := [part for part in names if part not in source.tensors]:
        raise CheckpointError(f"{source.folder}: {name} is in NF4, but {missing[0]} is missing. {AGAIN}.")
    shape = state["shape"][0], state["shape"][1]
    groups = -(-prod(shape) // packing.block[1])
    wanted = [("U8", prod(shape) // 2), ("U8" if nested else "F32", groups), ("F32", 16), ("U8", None)]
    wanted += [("F32", -(-groups // NESTED_BLOCK)), ("F32", 256)] if nested else []
    for part, (dtype, n) in zip(names, wanted, strict=True):
        t = source.tensors[part]
        if n is not None and (t.dtype, t.numel) != (dtype, n):
            of = f"of a matrix of {list(shape)} in NF4 it is {dtype} with {n:,} elements"
            raise CheckpointError(f"{source.named(part)} is {t.dtype} {list(t.shape)}; {of}.")
    if not np.array_equal(_floats(source, name + MAP), np.array(TABLE, np.float32)):
        raise CheckpointError(f"{source.named(name + MAP)} is another table than NF4's. {AGAIN}.")
    codes, scales = (
        source.tensors[part]._replace(shape=own) for part, own in zip(names[:2], packing.shapes(shape), strict=True)
    )
    if not nested:
        return names, Matrix(shape, (codes, scales), None)
    made = Nested(
        source, source.tensors[name + SCALES], source.tensors[name + NESTED], _floats(source, name + NESTED_MAP),
        state["nested_offset"],
    )  # fmt: skip
    return names, Matrix(shape, (codes, SourceTensor("F32", scales.shape, "", 0)), made)


def _floats(source: Source, name: str) -> np.ndarray:
    return source.read(name).view(np.float32)


def _state(source: Source, name: str) -> dict[str, Any]:
    """The quantizer's state, which was checked. Raises CheckpointError."""
    t, where = source.tensors[name + STATE], source.named(name + STATE)
    if t.dtype != "U8" or t.numel > LARGEST_STATE:
        raise CheckpointError(f"{where} is {t.dtype} {list(t.shape)}, expected U8, {LARGEST_STATE:,} at most.")
    try:
        state = parse_json(source.read(name + STATE).tobytes(), "state")
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}. {AGAIN}.") from error
    shape: Any = state.get("shape")
    offset: Any = state.get("nested_offset", 0.0)
    right = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
    faults = {key: json.dumps(value) for key, value in FIXED if state.get(key, value) != value}
    if not right or shape[1] % 2:
        faults["shape"] = "two sizes, the second even"
    if type(offset) not in (int, float) or not isfinite(offset):
        faults["nested_offset"] = "a number"
    for key, expected in faults.items():
        raise CheckpointError(f"{where}: {key} is {json.dumps(state.get(key))[:60]}, expected {expected}.")
    if "nested_offset" in state:
        state["nested_offset"] = np.float32(offset)
    return state
