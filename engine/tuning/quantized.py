"""Matrices in a packing that are encoded as they are read, some rows at a time; of --base, the frozen ones of a plain
checkpoint.

Norms, embeddings, routers, the output matrix and all trained tensors stay as they are. What --merge writes, or is
written next to frozen matrices, is made of the checkpoint's own values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import prod

import numpy as np

from trireme.engine.tuning.packed_source import Made, Packed, globs, strip_height, strips, unpacked
from trireme.models.config import InputError, ModelConfig, Packing
from trireme.models.families.packing import FP8, MX, NF4
from trireme.models.sizes import shapes
from trireme.storage.auxiliary import CONTENT
from trireme.storage.checkpoint import Source, SourceTensor, concat

STRIP = 1 << 18  # elements of a matrix encoded at a time; each loader needs about 30 bytes of RAM for one
BASES = {"nf4": NF4, "fp8": FP8.with_dtypes(("F8_E4M3", "F32")), "mxfp4": MX}
ReadRows = Callable[[int, int], np.ndarray]  # fp32 (b - a, columns) of rows [a, b), of all matrices one after another


@dataclass(frozen=True)
class Encoder:
    """A matrix, or several in one tensor, whose parts are computed from its rows."""

    packing: Packing
    shape: tuple[int, ...]  # (rows, columns), or (matrices, rows, columns)
    rows: ReadRows

    def spans(self) -> list[tuple[int, int]]:
        """The rows [a, b) of each strip."""
        return list(chain.from_iterable(strips(self.packing, self.shape, STRIP)))

    def strip(self, a: int, b: int) -> tuple[np.ndarray, ...]:
        """The parts of rows [a, b), flat."""
        from trireme.models.encoding import encode  # torch, which nothing else here needs

        return encode(self.packing, self.rows(a, b))

    def part(self, part: int, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of the codes (part 0) or of the scales (1), flat, computed each time."""
        (rows, columns), result = self.shape[-2:], list[np.ndarray]()
        step = strip_height(self.packing, self.shape, STRIP)
        of_matrix, size = (prod(self.packing.shapes((n, columns))[part]) for n in (rows, step))
        for m in range(first // of_matrix, -(-last // of_matrix)):
            begin, end = max(first - m * of_matrix, 0), min(last - m * of_matrix, of_matrix)
            for i in range(begin // size, -(-end // size)):
                strip = self.strip(m * rows + i * step, m * rows + min((i + 1) * step, rows))[part]
                result.append(strip[max(begin - i * size, 0) : end - i * size])
        return np.concatenate(result)


@dataclass(frozen=True)
class Quantized(Packed):
    """`original`, with the parts of quantized matrices in addition to its tensors."""

    original: Source
    encoders: tuple[Encoder, ...]  # in the order of `parts`
    base: str  # of BASES

    def packs(self, name: str) -> bool:  # noqa: ARG002 (its files have none)
        return False

    def place(self, name: str) -> SourceTensor:
        return self.parts.get(name) or self.original.place(name)

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        yield from super().values(name, first, last) if name in self.parts else self.original.values(name, first, last)

    # What is written next to it is made of the original, which may itself be decoded as it is read.

    @property
    def nbytes(self) -> int:
        return self.original.nbytes

    @property
    def others(self) -> dict[str, CONTENT]:
        return replace(self.original, auxiliary=self.auxiliary).others

    def size_of(self, file: str) -> int:
        return self.original.size_of(file)

    def rewritten(self, file: str, fetch: Callable[[str], Iterable[np.ndarray] | None]) -> Iterator[np.ndarray]:
        return self.original.rewritten(file, fetch)


def _rows(source: Source, name: str, a: int, b: int) -> np.ndarray:
    columns = source.tensors[name].shape[-1]
    return concat(source.values(name, a * columns, b * columns)).reshape(-1, columns)


def quantized(cfg: ModelConfig, source: Source, base: str, stored: dict[str, str]) -> tuple[ModelConfig, Quantized]:
    """(cfg, source) with the frozen matrices of blocks quantized to `base`. `stored`: canonical name -> name in
    `source`.

    A packed checkpoint is decoded as it is read. Raises InputError if nothing is frozen, or it is in `base` already.
    """
    packing = BASES[base]
    if isinstance(source, Packed):
        if source.packing.code == packing.code:
            raise InputError(f"--base {base}: the checkpoint is in {source.packing.word} already. Leave --base out.")
        source = unpacked(source) if source.files else replace(source, parts={})
        cfg = replace(cfg, packing=None, packed=())
    if cfg.fp8:
        raise InputError(f"--base {base}: with --dtype fp8 frozen matrices are kept in fp8. Leave one of them out.")
    routers = tuple(f".{name}.weight" for name in (cfg.names.mlp.router, cfg.names.mlp.shared_gate) if name)

    def is_packed(name: str, shape: tuple[int, ...]) -> bool:
        frozen = shapes.is_frozen(cfg, [(name, shape)]) and not name.endswith(routers)
        fits = packing.holds(shapes.on_disk(cfg, name, shape)[0][1])
        return frozen and fits and name.startswith(cfg.names.block.split("{}")[0])

    cfg = replace(cfg, packing=packing, packed=globs(cfg, is_packed))
    parts, values, encoders = dict[str, SourceTensor](), dict[str, Made](), list[Encoder]()
    part_shapes = cache(packing.shapes)  # of some ten shapes, looked up for each expert
    for name, shape in (matrix for group in shapes.all_groups(cfg) if shapes.is_packed(cfg, group) for matrix in group):
        for file_name, file_shape in shapes.on_disk(cfg, name, shape):
            of_files = source.tensors[stored[file_name]].shape
            encoders.append(Encoder(packing, of_files, partial(_rows, source, stored[file_name])))
            for i, (part, part_shape) in enumerate(zip(packing.parts, part_shapes(file_shape), strict=True)):
                parts[stored[file_name] + part.suffix] = SourceTensor(part.dtypes[0], part_shape, "", 0)
                values[stored[file_name] + part.suffix] = partial(encoders[-1].part, i)
    if not parts:
        raise InputError(f"--base {base}: no matrix is frozen. It is for --lora, --adapter, --freeze and --train.")
    fields = source.folder, source.files, source.tensors, source.auxiliary, packing, parts, values
    return cfg, Quantized(*fields, source, tuple(encoders), base)
