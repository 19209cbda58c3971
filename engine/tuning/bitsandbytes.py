"""Checkpoints of bitsandbytes in NF4, with and without double quantization: the parts of each matrix X, and its state.

With double quantization, X.absmax has bytes, an offset and, for each 256 of them, a scale in X.nested_absmax. They are
decoded as bitsandbytes does while they are read, to the fp32 scales that memory has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from trireme.engine.tuning.packed_source import Made, Packed
from trireme.models.families.packing import NF4
from trireme.storage.checkpoint import Source, SourceTensor
from trireme.storage.headers import CheckpointError
from trireme.storage.untrusted import complaint, parse_json

STATE = ".quant_state.bitsandbytes__nf4"
OTHERS = {".quant_state.bitsandbytes__fp4": "fp4", ".SCB": "8 bits"}
SCALES, MAP, NESTED, NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
LARGEST_STATE, NESTED_BLOCK = 4096, 256  # bytes, scales
FIXED = {"quant_type": "nf4", "blocksize": 64, "nested_blocksize": NESTED_BLOCK}  # of the state
AGAIN = "Download the release again"


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

    def again(self, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) as bytes, of new fp32 scales, as bitsandbytes packs them; the offset stays."""
        middles = (self.table[1:] + self.table[:-1]) / 2
        blocks = np.split(scales - self.offset, range(NESTED_BLOCK, len(scales), NESTED_BLOCK))
        peaks = np.array([np.abs(block).max() for block in blocks])
        codes = [np.searchsorted(middles, block / (peak or 1)) for block, peak in zip(blocks, peaks, strict=True)]
        return np.concatenate(codes).astype(np.uint8), peaks.view(np.uint8)


def in_nf4(source: Source) -> Packed:
    """The checkpoint with its matrices in NF4 as packed ones. Raises CheckpointError."""
    for stored in source.tensors:
        if kind := next((kind for end, kind in OTHERS.items() if stored.endswith(end)), ""):
            form = f"weights that bitsandbytes quantized to {kind}, which is not read"
            raise CheckpointError(f"{source.named(stored)} is of {form}. Take the BF16 original.")
    tensors, parts, values = dict(source.tensors), dict[str, SourceTensor](), dict[str, Made]()
    for name in [stored.removesuffix(STATE) for stored in source.tensors if stored.endswith(STATE)]:
        state = _state(source, name)
        shape, nested = (state["shape"][0], state["shape"][1]), "nested_offset" in state
        places = {part: tensors.pop(part) for part in _checked(source, name, shape, nested)}
        del tensors[name + STATE]
        tensors[name] = SourceTensor("BF16", shape, "", 0)
        codes, scales = (name + part.suffix for part in NF4.parts)
        of_codes, of_scales = NF4.shapes(shape)
        parts |= {codes: places[name]._replace(shape=of_codes), scales: places[name + SCALES]._replace(shape=of_scales)}
        if nested:
            table, offset = source.read(name + NESTED_MAP).view(np.float32), np.float32(state["nested_offset"])
            parts[scales] = SourceTensor("F32", of_scales, "", 0)
            values[scales] = Nested(source, places[name + SCALES], places[name + NESTED], table, offset)
    return Packed(source.folder, source.files, tensors, source.auxiliary, NF4, parts, values)


def _checked(source: Source, name: str, shape: tuple[int, int], nested: bool) -> list[str]:
    """The names of a matrix's tensors but its state. Raises CheckpointError if one is missing or has another form."""
    groups = -(-prod(shape) // NF4.block[1])
    wanted = {name: ("U8", prod(shape) // 2), name + SCALES: ("U8" if nested else "F32", groups)}
    wanted |= {name + MAP: ("F32", 16)}
    if nested:
        wanted |= {name + NESTED: ("F32", -(-groups // NESTED_BLOCK)), name + NESTED_MAP: ("F32", 256)}
    for part, form in wanted.items():
        if (t := source.tensors.get(part)) is None:
            raise CheckpointError(f"{source.folder}: {name} is in NF4, but {part} is missing. {AGAIN}.")
        if (t.dtype, t.numel) != form:
            fault = f"of a matrix of {list(shape)} in NF4 it is {form[0]} with {form[1]:,} elements"
            raise CheckpointError(f"{source.named(part)} is {t.dtype} {list(t.shape)}; {fault}.")
    return list(wanted)


def _state(source: Source, name: str) -> dict[str, Any]:
    """The quantizer's state, checked. Raises CheckpointError."""
    t, culprit = source.tensors[name + STATE], source.named(name + STATE)
    if t.dtype != "U8" or t.numel > LARGEST_STATE:
        raise CheckpointError(f"{culprit} is {t.dtype} {list(t.shape)}, expected U8, {LARGEST_STATE:,} at most.")
    try:
        state = parse_json(source.read(name + STATE).tobytes(), "state")
    except ValueError as error:
        raise CheckpointError(f"{culprit}: {error}. {AGAIN}.") from error
    shape: Any = state.get("shape")
    offset: Any = state.get("nested_offset", 0.0)
    same = all(state.get(key, value) == value for key, value in FIXED.items())
    if not same or complaint(shape, (int, int)) or shape[1] % 2 or type(offset) not in (int, float):
        expected = f"NF4 in blocks of {NF4.block[1]}, of a shape of two sizes, the second even"
        raise CheckpointError(f"{culprit} is {json.dumps(state)[:200]}: expected {expected}.")
    return state
