"""Experts in MXFP4 (kernels/experts/mxfp4.py), as gpt-oss has them: X_blocks, X_scales of the matrices X (E, in, out).

Frozen, they stay packed up to the GPU, and are copied as they are. Where experts are trained, they are decoded to bf16,
exactly, as they are read, and all is written in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trireme.models import hf
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import shapes
from trireme.models.sizes.narrow import BLOCKS, SCALES
from trireme.storage.checkpoint import CHUNK, INDEX, Source, SourceTensor, open_source, stored_values
from trireme.storage.companions import CONTENT, content_of
from trireme.storage.files import Say, to_stderr
from trireme.storage.headers import CheckpointError, encode_header
from trireme.storage.layout import sequential


@dataclass(frozen=True)
class Packed(Source):
    """A checkpoint with tensors in MXFP4, which look like bf16 without a place in a file."""

    parts: dict[str, SourceTensor] = field(default_factory=dict)  # blocks and scales

    def packs(self, name: str) -> bool:
        return name + BLOCKS in self.parts

    def place(self, name: str) -> SourceTensor:
        return self.parts.get(name) or super().place(name)

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        """As Source.values; of blocks and scales their bytes."""
        if name in self.parts:
            t = self.parts[name]
            last = t.nbytes if last is None else last
            for a in range(first, last, CHUNK):
                yield self.bytes_of(t.file, t.offset + a, min(CHUNK, last - a))
        elif self.packs(name):
            yield from self._decoded(name, first, last)
        else:
            yield from super().values(name, first, last)

    def _decoded(self, name: str, first: int, last: int | None) -> Iterator[np.ndarray]:
        experts, rows, columns = self.tensors[name].shape
        one, last = rows * columns, experts * rows * columns if last is None else last
        for e in range(first // one, -(-last // one)):
            blocks, scales = (self._expert(self.parts[name + part], e) for part in (BLOCKS, SCALES))
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
        return self.parts.get(name) or self.places[name]

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
    import torch  # what else is here needs none

    from trireme.kernels import ops

    out, groups = scales.shape
    found = torch.empty((1, 32 * groups, out), dtype=torch.bfloat16)
    ops.mxfp4_decode(torch.from_numpy(blocks).view(1, out, groups, 16), torch.from_numpy(scales)[None], found)
    return found[0].view(torch.int16).numpy().view(np.uint16)


def open_checkpoint(folder: str | Path, say: Say = to_stderr) -> Source:
    """As open_source, with tensors in MXFP4 as if they were bf16. Raises CheckpointError."""
    source = open_source(folder, say)
    parts, tensors = dict[str, SourceTensor](), dict(source.tensors)
    for stored in source.tensors:
        name = stored.removesuffix(BLOCKS)
        if stored.endswith(BLOCKS) and name + SCALES in source.tensors:
            if name in source.tensors:
                raise CheckpointError(f"{source.folder}: {name} is there twice, also in MXFP4 as {stored}. Remove one.")
            parts[stored], parts[name + SCALES] = blocks, scales = tensors.pop(stored), tensors.pop(name + SCALES)
            tensors[name] = _decoded(source, name, blocks, scales)
    if not parts:
        return source
    return Packed(source.folder, source.files, tensors, source.companions, parts)


def check_packing(cfg: ModelConfig, source: Source, say: Say) -> None:
    """Whether config.json and the tensors agree on MXFP4. Raises InputError where transformers would not read them."""
    if cfg.experts is None or not cfg.family.mxfp4 or cfg.experts.packed == isinstance(source, Packed):
        return
    if not cfg.experts.packed:
        raise InputError(
            f'{source.folder}: there are tensors in MXFP4, but config.json has no "quantization_config". Copy it from '
            "the release: transformers does not find these tensors without it."
        )
    say(
        f'note: {source.folder}: config.json has a "quantization_config" of MXFP4, but no tensor is in MXFP4: all are '
        "read as they are"
    )


def as_stored(cfg: ModelConfig, source: Source) -> ModelConfig:
    """`cfg` with its experts as `source` has them: packed if all of them are, whatever config.json says."""
    cfg = hf.as_found(cfg, {name: t.shape for name, t in source.tensors.items()})
    if cfg.experts is None:
        return cfg
    matrices = sum(len(shape) == 3 for shape in shapes.stored_tensors(cfg).values())
    packed = isinstance(source, Packed) and 2 * matrices == len(source.parts)
    return replace(cfg, experts=replace(cfg.experts, packed=packed))


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
    trained = [n for n, there in stored.items() if source.packs(there) and not shapes.is_frozen(cfg, [(n, ())])]
    return unpacked(source) if trained else source


def unpacked(source: Packed) -> Unpacked:
    """A checkpoint that is written in bf16: the same files, tensors in the same order."""
    blocks = {name.removesuffix(BLOCKS): t for name, t in source.parts.items() if name.endswith(BLOCKS)}
    places = source.tensors | blocks
    tensors, headers = {}, {}
    for file in source.files:
        names = sorted((t.offset, name) for name, t in places.items() if t.file == file)
        layout = sequential([(name, source.tensors[name].dtype, source.tensors[name].shape) for _, name in names])
        headers[file] = encode_header(layout, {"format": "pt"})
        for t in layout.tensors:
            tensors[t.name] = SourceTensor(t.dtype, t.shape, file, len(headers[file]) + t.offset)
    return Unpacked(source.folder, source.files, tensors, source.companions, source.parts, source.tensors, headers)
