"""Checkpoints with packed matrices (models/families/packing.py), read as if they were plain.

Frozen matrices stay packed until the GPU decodes them, and are copied as they are. If a packed matrix is trained, all
are decoded as they are read, and the result is written in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trireme.engine.tuning.rewritten import Entries, Rewritten, rewritten
from trireme.models.config import ModelConfig, Packing, without_packing
from trireme.models.sizes import shapes
from trireme.storage.auxiliary import content_of
from trireme.storage.checkpoint import CHUNK, NUMPY, Source, SourceTensor
from trireme.storage.headers import CheckpointError, read_header
from trireme.storage.layout import ITEMSIZE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Made = Callable[[int, int], np.ndarray]  # elements [first, last) of a part
STRIP = 1 << 22  # elements of a matrix decoded at a time
DTYPES = ("dtype", "torch_dtype")  # keys of config.json
# Files that say how weights are packed, for other programs: they are not copied beside decoded weights.
OF_PACKINGS = ("hf_quant_config.json", "quant_config.json", "quantization_config.json", "quantize_config.json")
OF_PARTS = NUMPY | {"I32": np.int32}  # others are bytes


@dataclass(frozen=True)
class Packed(Source):
    """A checkpoint with packed matrices. They appear as bf16 tensors that have no place in a file."""

    packing: Packing  # its parts have one dtype, that of these files
    parts: dict[str, SourceTensor]  # of packed matrices, by the matrix's name with a part's suffix
    made: Mapping[str, Made]  # what makes the elements of parts that no file has
    wide: frozenset[str] = field(default=frozenset(), kw_only=True)  # matrices that are decoded into fp32, not bf16

    @property
    def nbytes(self) -> int:
        """As Source.nbytes: the packed bytes."""
        plain = (t for name, t in self.tensors.items() if not self.packs(name))
        return super().nbytes if self.files else sum(t.nbytes for t in (*self.parts.values(), *plain))

    def packs(self, name: str) -> bool:
        """Whether a tensor is a packed matrix."""
        return name + self.packing.parts[0].suffix in self.parts

    def place(self, name: str) -> SourceTensor:
        t = self.parts.get(name) or super().place(name)
        return t._replace(dtype="F32") if name in self.wide else t

    def computed_in(self, dtype: str) -> Source:
        packed = frozenset(name for name in self.tensors if self.packs(name))
        return replace(self, wide=packed) if packed and dtype == "F32" and not self.packing.exact else self

    def named(self, name: str) -> str:
        """As Source.named; a part by its name in the file."""
        part = self.packing.of(name).part_of(name)
        if part and name in self.parts and (file := self.parts[name].file):
            return f"{self.folder / file}: {name.removesuffix(part.suffix) + part.stored}"
        return super().named(name)

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        """As Source.values. A part with a dtype that weights do not have is given as bytes."""
        if name in self.parts:
            last = self.parts[name].numel if last is None else last
            for a in range(first, last, CHUNK // 4):
                yield self._of_part(name, a, min(a + CHUNK // 4, last))
        elif self.packs(name):
            rows = partial(self.rows, name, dtype="F32" if name in self.wide else "BF16")
            yield from by_strips(rows, self.packing.of(name), self.tensors[name].shape, STRIP, first, last)
        else:
            yield from super().values(name, first, last)

    def _of_part(self, name: str, first: int, last: int) -> np.ndarray:
        if name in self.made:
            return self.made[name](first, last)
        t = self.parts[name]
        size = ITEMSIZE[t.dtype]
        content = self.bytes_of(t.file, t.offset + first * size, (last - first) * size)
        return content.view(OF_PARTS.get(t.dtype, np.uint8))

    def rows(self, name: str, first: int, last: int, dtype: str = "F32", device: torch.device | str = "cpu") -> Tensor:
        """Rows [first, last) of a matrix, or of one of those of all experts, which are counted one after another, from
        the first of a block on: decoded on a device in F32 or BF16. Raises CheckpointError.
        """
        from trireme.models.packed import damage, decoded  # torch, which nothing else here needs

        packing, (height, columns) = self.packing.of(name), self.tensors[name].shape[-2:]
        (matrix, row), shape = divmod(first, height), (1, last - first, columns)
        stored = list[tuple[np.ndarray, str, tuple[int, ...]]]()
        starts, wholes = packing.starts((height, columns), row), packing.shapes((height, columns))
        for part, start, full, strip in zip(packing.parts, starts, wholes, packing.shapes(shape), strict=True):
            begin, named = matrix * prod(full) + start * prod(full[1:]), name + part.suffix
            values = self._of_part(named, begin, begin + prod(strip))
            if damaged := damage(packing, part, values):
                raise CheckpointError(f"{self.named(named)} {damaged}; the checkpoint is damaged. Download it again.")
            stored.append((values.view(np.uint8), self.parts[named].dtype, strip))
        return decoded(packing, stored, shape, dtype, device)[0]


def strips(packing: Packing | None, shape: tuple[int, ...], most: int) -> Iterator[list[tuple[int, int]]]:
    """Of each matrix of (..., rows, columns) the rows [a, b) that are in memory at a time, counted over all of them:
    whole blocks, of gpt-oss's experts all of one; `most` elements if it can be.
    """
    rows, step = shape[-2], strip_height(packing, shape, most)
    for m in range(0, prod(shape[:-1]), rows):
        yield [(m + a, m + min(a + step, rows)) for a in range(0, rows, step)]


def strip_height(packing: Packing | None, shape: tuple[int, ...], most: int) -> int:
    """The rows of a strip; the last one may have fewer."""
    rows, columns = shape[-2:]
    step = packing.step((rows, columns)) if packing else 1
    return min(rows, max(1, most // (columns * step)) * step)


def by_strips(
    rows: Callable[[int, int], Tensor], packing: Packing | None, shape: tuple[int, ...], most: int,
    first: int, last: int | None,
) -> Iterator[np.ndarray]:  # fmt: skip
    """Yields elements [first, last) of a tensor of `shape`, of which rows(a, b) makes those of a strip."""
    from trireme.models.encoding import arrays

    columns, last = shape[-1], prod(shape) if last is None else last
    for a, b in chain.from_iterable(strips(packing, shape, most)):
        begin, end = max(first - a * columns, 0), min(last, b * columns) - a * columns
        if begin < end:
            yield arrays([rows(a, b)])[0][begin:end]


def packed_in(source: Source, name: str) -> Packed | None:
    """The checkpoint that has a matrix of `source` packed."""
    while isinstance(source, Rewritten) and name not in source.made:
        source = source.inner
    return source if isinstance(source, Packed) and source.packs(name) else None


# ---------------------------------------------------------------- which are packed


def as_configured(cfg: ModelConfig) -> ModelConfig:
    """`cfg` with the matrices packed that config.json names, in as few globs as possible."""
    return replace(cfg, packed=globs(cfg, lambda *matrix: shapes.is_packed(cfg, [matrix])))


def globs(cfg: ModelConfig, is_packed: Callable[[str, tuple[int, ...]], bool]) -> tuple[str, ...]:
    """Globs over the names of packed matrices: one for all layers if all are packed, else their names."""
    before, after = cfg.names.block.split("{}")
    layers: dict[str, dict[str, bool]] = {}  # a name for all layers -> names -> whether packed
    for name, shape in (matrix for group in shapes.all_groups(cfg) for matrix in group):
        if len(shape) > 1:
            number, _, suffix = name.removeprefix(before).partition(after)
            inner = name.startswith(before) and number.isdigit()
            layers.setdefault(f"{before}*{after}{suffix}" if inner else name, {})[name] = is_packed(name, shape)
    packed_of = lambda names: (name for name, packed in names.items() if packed)
    return tuple(g for glob, names in layers.items() for g in ([glob] if all(names.values()) else packed_of(names)))


def outlined(cfg: ModelConfig, folder: Path) -> Source:
    """A checkpoint of this config without files, in bf16 but for what is packed."""
    tensors = {name: SourceTensor("BF16", shape, "", 0) for name, shape in shapes.stored_tensors(cfg).items()}
    if cfg.packing is None:
        return Source(folder, (), tensors, {})
    parts, packed = dict[str, SourceTensor](), (g for g in shapes.all_groups(cfg) if shapes.is_packed(cfg, g))
    for name, shape in (matrix for group in packed for matrix in group):
        for stored, file_shape in shapes.on_disk(cfg, name, shape):
            packing = cfg.packing.of(name)
            for part, part_shape in zip(packing.parts, packing.shapes(file_shape), strict=True):
                parts[stored + part.suffix] = SourceTensor(part.dtypes[0], part_shape, "", 0)
    return Packed(folder, (), tensors, {}, cfg.packing, parts, {})


# ---------------------------------------------------------------- decoded as they are read


def as_trained(cfg: ModelConfig, source: Packed, stored: Mapping[str, str]) -> Source:
    """`source`, or the same in bf16 if packed matrices are trained. `stored`: canonical name -> name in `source`."""
    matrices = (matrix for group in shapes.all_groups(cfg) if not shapes.is_frozen(cfg, group) for matrix in group)
    files = (file_name for name, shape in matrices for file_name, _ in shapes.on_disk(cfg, name, shape))
    names = (stored.get(file_name, file_name) for file_name in files)  # a new score head is in no file
    trained = frozenset(name for name in names if source.packs(name))
    if trained and not source.files:
        return Source(source.folder, (), source.tensors, source.auxiliary)
    return unpacked(source, trained) if trained else source


def unpacked(source: Packed, changed: frozenset[str] = frozenset()) -> Rewritten:
    """A checkpoint to be written in bf16: the same files and tensors in the same order.

    `changed`: packed matrices that are not written as they are, so that they are read without a rounding to bf16.
    Raises CheckpointError if there are tensors that are packed in another way.
    """
    for name in (name for name, t in source.tensors.items() if t.dtype not in NUMPY):
        if name.startswith(source.packing.left):
            wrong = "is packed in another way than the layers, so the result cannot be in bf16"
            raise CheckpointError(f"{source.named(name)} {wrong}. Take the BF16 original.")
    codes, entries = source.packing.parts[0].suffix, dict[str, Entries]()
    place = lambda t, file, first=0: (file, first + t.offset, t.nbytes)  # an empty tensor may have the same offset
    matrices = {place(t, t.file): n.removesuffix(codes) for n, t in source.parts.items() if n.endswith(codes)}
    for file in source.files:
        header, entries[file] = read_header(source.folder / file), []
        for stored in header.layout.tensors:
            extent = place(stored, file, header.data)
            t = source.tensors.get(name := matrices.get(extent, stored.name))
            if t and (t.file or extent in matrices):
                entries[file].append((name, t.dtype, t.shape))
    inner = replace(source, wide=frozenset() if source.packing.exact else changed)
    auxiliary = {name: content for name, content in source.auxiliary.items() if name not in OF_PACKINGS}
    config = decoded_config(json.loads(content_of(auxiliary["config.json"])))
    auxiliary["config.json"] = json.dumps(config, indent=2).encode()
    return replace(rewritten(inner, entries, {}), auxiliary=auxiliary)


def decoded_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint after its packed matrices are decoded, with the dtype of these."""
    in_bf16 = lambda config: config | {key: "bfloat16" for key in DTYPES if config.get(key) == "float16"}
    inner = {key: in_bf16(value) for key, value in raw.items() if isinstance(value, dict)}
    return in_bf16(without_packing(raw | inner))
