"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss has them: decoded to bf16, exactly, as they are read.

X_blocks (E, out, in / 32, 16) U8 holds 32 numbers of 4 bits a row, the even ones in the low halves, X_scales (E, out,
in / 32) U8 the powers of two that they are times, with a bias of 127; X is (E, in, out). Where experts are trained, all
is written in bf16; otherwise they are copied as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trireme.models import shapes
from trireme.models.config import ModelConfig
from trireme.storage.checkpoint import INDEX, Source, SourceTensor, open_source, stored_values
from trireme.storage.companions import CONTENT, content_of
from trireme.storage.files import Say, to_stderr
from trireme.storage.headers import CheckpointError, encode_header
from trireme.storage.layout import sequential

BLOCKS, SCALES = "_blocks", "_scales"
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], np.float32)  # by 4 bits
PAIRS = np.stack([NUMBERS[np.arange(256) & 15], NUMBERS[np.arange(256) >> 4]], 1)  # by a byte


@dataclass(frozen=True)
class Packed(Source):
    """A checkpoint with tensors in MXFP4, which look like bf16 without a place in a file."""

    packed: dict[str, tuple[SourceTensor, SourceTensor]] = field(default_factory=dict)  # name -> blocks, scales

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        if name not in self.packed:
            yield from super().values(name, first, last)
            return
        experts, rows, columns = self.tensors[name].shape
        one, last = rows * columns, experts * rows * columns if last is None else last
        for e in range(first // one, -(-last // one)):
            blocks, scales = (self._expert(t, e) for t in self.packed[name])
            begin, end = max(first - e * one, 0), min(last - e * one, one)
            yield decode(blocks.reshape(columns, -1), scales.reshape(columns, -1)).reshape(-1)[begin:end]

    def _expert(self, t: SourceTensor, e: int) -> np.ndarray:
        nbytes = t.nbytes // t.shape[0]
        return self.bytes_of(t.file, t.offset + e * nbytes, nbytes)


@dataclass(frozen=True)
class Unpacked(Packed):
    """As one in bf16: so it is written, where experts are trained."""

    places: dict[str, SourceTensor] = field(default_factory=dict)  # of tensors that are not packed
    headers: dict[str, bytes] = field(default_factory=dict)  # of the files

    def place(self, name: str) -> SourceTensor:
        return self.places[name]

    def size_of(self, file: str) -> int:
        return len(self.headers[file]) + sum(t.nbytes for t in self.tensors.values() if t.file == file)

    def rewritten(self, file: str, fetch: Callable[[str], Iterable[np.ndarray] | None]) -> Iterator[np.ndarray]:
        yield np.frombuffer(self.headers[file], np.uint8)
        for name, t in self.tensors.items():
            if t.file == file:
                new = fetch(name)
                yield from stored_values(name, t, self.values(name) if new is None else new)

    @property
    def others(self) -> dict[str, CONTENT]:
        """Without the word of MXFP4, and with the index of these files."""
        found = super().others
        config = json.loads(content_of(found["config.json"]))
        config.pop("quantization_config", None)
        found["config.json"] = json.dumps(config, indent=2).encode()
        if INDEX in found:
            files = {name: t.file for name, t in self.tensors.items()}
            total = sum(t.nbytes for t in self.tensors.values())
            found[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2).encode()
        return found


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(in, out) bf16 bits of blocks (out, in / 2) and scales (out, in / 32)."""
    values = PAIRS[blocks].reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):  # a scale of 255 is not finite, and refused
        values = np.ldexp(values, (scales.astype(np.int32) - 127)[..., None])
    bits = (values.reshape(len(scales), -1).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(bits.T)


def open_checkpoint(folder: str | Path, say: Say = to_stderr) -> Source:
    """As open_source, with tensors in MXFP4 as if they were bf16. Raises CheckpointError."""
    source = open_source(folder, say)
    packed, tensors = {}, dict(source.tensors)
    for stored in source.tensors:
        name = stored.removesuffix(BLOCKS)
        if stored.endswith(BLOCKS) and name + SCALES in source.tensors:
            blocks, scales = packed[name] = tensors.pop(stored), tensors.pop(name + SCALES)
            tensors[name] = _decoded(source, name, blocks, scales)
    if not packed:
        return source
    return Packed(source.folder, source.files, tensors, source.companions, packed)


def _decoded(source: Source, name: str, blocks: SourceTensor, scales: SourceTensor) -> SourceTensor:
    """What a pair looks like."""
    fits = len(scales.shape) == 3 and blocks.shape == (*scales.shape, 16)
    if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise CheckpointError(
            f"{source.folder / blocks.file}: {name}{BLOCKS} is {blocks.dtype} {list(blocks.shape)} and {name}{SCALES} "
            f"{scales.dtype} {list(scales.shape)}; MXFP4 has U8 [E, out, in / 32, 16] and U8 [E, out, in / 32]."
        )
    experts, out, groups = scales.shape
    return SourceTensor("BF16", (experts, 32 * groups, out), "", 0)


def as_trained(cfg: ModelConfig, source: Source, stored: Mapping[str, str]) -> Source:
    """`source`, as one in bf16 where experts in MXFP4 are trained. `stored`: canonical name -> name in `source`."""
    if not isinstance(source, Packed):
        return source
    trained = [n for n, there in stored.items() if there in source.packed and not shapes.is_frozen(cfg, [(n, ())])]
    return unpacked(source) if trained else source


def unpacked(source: Packed) -> Unpacked:
    """A checkpoint that is written in bf16: the same files, tensors in the same order."""
    places = source.tensors | {name: blocks for name, (blocks, _) in source.packed.items()}
    tensors, headers = {}, {}
    for file in source.files:
        names = sorted((t.offset, name) for name, t in places.items() if t.file == file)
        layout = sequential([(name, source.tensors[name].dtype, source.tensors[name].shape) for _, name in names])
        headers[file] = encode_header(layout, {"format": "pt"})
        for t in layout.tensors:
            tensors[t.name] = SourceTensor(t.dtype, t.shape, file, len(headers[file]) + t.offset)
    return Unpacked(source.folder, source.files, tensors, source.companions, source.packed, source.tensors, headers)
