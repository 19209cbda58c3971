"""Checkpoints with packed matrices (models/families/packing.py), read as if they were plain.

Frozen, they stay packed up to the GPU, and are copied as they are. Where one is trained, they are decoded as they are
read, and all is written in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trireme.models import hf
from trireme.models.config import PACKINGS, InputError, ModelConfig, Packing
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import CHUNK, INDEX, NUMPY, Source, SourceTensor, open_source, stored_values
from trireme.storage.companions import CONTENT, content_of
from trireme.storage.files import Say, to_stderr
from trireme.storage.headers import CheckpointError, encode_header
from trireme.storage.layout import ITEMSIZE, sequential


@dataclass(frozen=True)
class Packed(Source):
    """A checkpoint with packed matrices, which look like bf16 without a place in a file."""

    packing: Packing
    parts: dict[str, SourceTensor]  # of packed matrices, by the matrix's name with a part's suffix

    def packs(self, name: str) -> bool:
        return name + self.packing.parts[0].suffix in self.parts

    def place(self, name: str) -> SourceTensor:
        return self.parts.get(name) or super().place(name)

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        """As Source.values; of parts whose dtype is not of weights their bytes."""
        if name in self.parts:
            yield from self._of_part(self.parts[name], first, last)
        elif self.packs(name):
            yield from self._decoded(name, first, last)
        else:
            yield from super().values(name, first, last)

    def _of_part(self, t: SourceTensor, first: int, last: int | None) -> Iterator[np.ndarray]:
        size, last = ITEMSIZE[t.dtype], t.numel if last is None else last
        for a in range(first * size, last * size, CHUNK):
            piece = self.bytes_of(t.file, t.offset + a, min(CHUNK, last * size - a))
            yield piece.view(NUMPY.get(t.dtype, np.uint8))

    def _decoded(self, name: str, first: int, last: int | None) -> Iterator[np.ndarray]:
        experts, rows, columns = self.tensors[name].shape
        one, last = rows * columns, experts * rows * columns if last is None else last
        for e in range(first // one, -(-last // one)):
            parts = [self._expert(self.parts[name + part.suffix], e) for part in self.packing.parts]
            begin, end = max(first - e * one, 0), min(last - e * one, one)
            yield decode(self.packing, parts, (rows, columns)).reshape(-1)[begin:end]

    def _expert(self, t: SourceTensor, e: int) -> np.ndarray:
        nbytes = t.nbytes // t.shape[0]
        return self.bytes_of(t.file, t.offset + e * nbytes, nbytes).reshape(t.shape[1:])


@dataclass(frozen=True)
class Unpacked(Packed):
    """As one in bf16: so it is written, where packed matrices are trained."""

    places: dict[str, SourceTensor]  # of tensors that are not packed
    headers: dict[str, bytes]  # of the files

    def place(self, name: str) -> SourceTensor:
        return self.parts.get(name) or self.places[name]

    @property
    def nbytes(self) -> int:
        return sum(map(self.size_of, self.files))

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
        """Without the word of the packing, and with the index of these files."""
        found = super().others
        config = json.loads(content_of(found["config.json"]))
        config.pop("quantization_config", None)
        found["config.json"] = json.dumps(config, indent=2).encode()
        if INDEX in found:
            files = {name: t.file for name, t in self.tensors.items()}
            total = sum(t.nbytes for t in self.tensors.values())
            found[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2).encode()
        return found


def decode(packing: Packing, parts: Iterable[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """bf16 bits of a matrix of that shape."""
    import torch  # what else is here needs none

    from trireme.models import packed

    found = torch.empty((1, *shape), dtype=torch.bfloat16)
    packed.decode(packing, [torch.from_numpy(part)[None] for part in parts], found)
    return found[0].view(torch.int16).numpy().view(np.uint16)


# ---------------------------------------------------------------- opening


def open_checkpoint(folder: str | Path, packing: Packing | None = None, say: Say = to_stderr) -> Source:
    """As open_source, with packed matrices as if they were bf16. Raises CheckpointError.

    `packing`: what config.json says; None looks for all.
    """
    source = open_source(folder, say)
    for row in [packing] if packing else PACKINGS:
        found = _pairs(source, row)
        if found:
            return _packed(source, row, found)
    return source


def _pairs(source: Source, packing: Packing) -> dict[str, list[str]]:
    """Matrix -> names of its parts."""
    codes, *others = packing.parts
    found = dict[str, list[str]]()
    for stored in source.tensors:
        name = stored.removesuffix(codes.stored)
        parts = [name + part.stored for part in others]
        if stored.endswith(codes.stored) and all(part in source.tensors for part in parts):
            found[name] = [stored, *parts]
    return found


def _packed(source: Source, packing: Packing, found: Mapping[str, list[str]]) -> Packed:
    tensors, parts = dict(source.tensors), dict[str, SourceTensor]()
    for name, stored in found.items():
        if name in source.tensors:
            raise CheckpointError(
                f"{source.folder}: {name} is there twice, also in {packing.word} as {stored[0]}. Remove one."
            )
        own = [tensors.pop(part) for part in stored]
        parts |= {name + part.suffix: t for part, t in zip(packing.parts, own, strict=True)}
        tensors[name] = _looks(source, packing, stored, own)
    return Packed(source.folder, source.files, tensors, source.companions, packing, parts)


def _looks(source: Source, packing: Packing, stored: list[str], parts: list[SourceTensor]) -> SourceTensor:
    """What a packed matrix looks like."""
    shape = packing.decoded(parts[0].shape)
    typed = all(t.dtype in part.dtypes for part, t in zip(packing.parts, parts, strict=True))
    if shape is None or not typed or packing.shapes(shape) != tuple(t.shape for t in parts):
        shown = " and ".join(f"{n} {t.dtype} {list(t.shape)}" for n, t in zip(stored, parts, strict=True))
        shown = shown.replace(f"{stored[0]} ", f"{stored[0]} is ", 1)
        raise CheckpointError(f"{source.folder / parts[0].file}: {shown}; {packing.word} has {packing.wanted}.")
    return SourceTensor("BF16", shape, "", 0)


def check_packing(cfg: ModelConfig, source: Source, say: Say) -> None:
    """Whether config.json and the tensors agree. Raises InputError where transformers would not read them."""
    if isinstance(source, Packed) and cfg.packing is None:
        raise InputError(
            f'{source.folder}: there are tensors in {source.packing.word}, but config.json has no "quantization_config"'
            ". Copy it from the release: transformers does not find these tensors without it."
        )
    if cfg.packing is not None and not isinstance(source, Packed):
        word = cfg.packing.word
        say(
            f'note: {source.folder}: config.json has a "quantization_config" of {word}, but no tensor is in {word}: '
            "all are read as they are"
        )


def as_stored(cfg: ModelConfig, source: Source) -> ModelConfig:
    """`cfg` with those matrices packed that are in `source`, whatever config.json says."""
    cfg = replace(hf.as_found(cfg, {name: t.shape for name, t in source.tensors.items()}), packing=None, packed=())
    if not isinstance(source, Packed):
        return cfg
    stored = hf.sources(cfg, {name: t.shape for name, t in source.tensors.items()})
    before, after = cfg.names.block.split("{}")
    found: dict[str, dict[str, bool]] = {}  # a name for all layers -> names -> whether packed
    groups = (group for u in range(cfg.n_units) for group in shapes.weight_groups(cfg, u))
    for name, shape in (matrix for group in groups for matrix in group):
        if len(shape) > 1:
            number, _, rest = name.removeprefix(before).partition(after)
            inner = name.startswith(before) and number.isdigit()
            packed = all(source.packs(stored[there]) for there, _ in shapes.on_disk(cfg, name, shape))
            found.setdefault(f"{before}*{after}{rest}" if inner else name, {})[name] = packed
    globs = list[str]()
    for pattern, names in found.items():
        globs += [pattern] if all(names.values()) else [name for name, packed in names.items() if packed]
    return replace(cfg, packing=source.packing, packed=tuple(globs))


# ---------------------------------------------------------------- decoded as they are read


def as_trained(cfg: ModelConfig, source: Source, stored: Mapping[str, str]) -> Source:
    """`source`, as one in bf16 where packed matrices are trained. `stored`: canonical name -> name in `source`."""
    if not isinstance(source, Packed):
        return source
    groups = (group for u in range(cfg.n_units) for group in shapes.weight_groups(cfg, u))
    trained = (matrix for group in groups if not shapes.is_frozen(cfg, group) for matrix in group)
    files = (there for name, shape in trained for there, _ in shapes.on_disk(cfg, name, shape))
    return unpacked(source) if any(source.packs(stored[there]) for there in files) else source


def unpacked(source: Packed) -> Unpacked:
    """A checkpoint that is written in bf16: the same files, tensors in the same order."""
    codes = source.packing.parts[0].suffix
    places = source.tensors | {n.removesuffix(codes): t for n, t in source.parts.items() if n.endswith(codes)}
    tensors, headers = {}, {}
    for file in source.files:
        names = sorted((t.offset, name) for name, t in places.items() if t.file == file)
        layout = sequential([(name, source.tensors[name].dtype, source.tensors[name].shape) for _, name in names])
        headers[file] = encode_header(layout, {"format": "pt"})
        for t in layout.tensors:
            tensors[t.name] = SourceTensor(t.dtype, t.shape, file, len(headers[file]) + t.offset)
    given = source.folder, source.files, tensors, source.companions, source.packing, source.parts
    return Unpacked(*given, source.tensors, headers)
