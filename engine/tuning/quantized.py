"""A plain checkpoint whose frozen matrices are quantized as they are read (--base), some rows at a time.

Norms, embeddings, routers, the output matrix and all trained tensors stay as they are. What --merge writes, or is
written next to frozen matrices, is made of the checkpoint's own values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod

import numpy as np

from trireme.engine.tuning.packed_source import Made, Packed, globs
from trireme.models.config import FP8, MX, NF4, InputError, ModelConfig, Packing
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source, SourceTensor, convert, dtype_of

STRIP = 1 << 18  # elements of a matrix quantized at a time; each loader needs about 30 bytes of RAM for one
BASES = {"nf4": NF4, "fp8": FP8.with_dtypes(("F8_E4M3", "F32")), "mxfp4": MX}


@dataclass(frozen=True)
class Quantized(Packed):
    """`original`, with the parts of quantized matrices in addition to its tensors."""

    original: Source
    encoders: tuple[Encoder, ...]  # in the order of `parts`
    base: str  # of BASES

    def packs(self, name: str) -> bool:  # noqa: ARG002 (its files have none)
        return False

    @property
    def nbytes(self) -> int:
        return self.original.nbytes


@dataclass(frozen=True)
class Encoder:
    """Quantizes a matrix, some rows at a time; of several matrices in one tensor, whole ones."""

    source: Source
    name: str
    packing: Packing

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.tensors[self.name].shape

    @property
    def height(self) -> int:
        """The number of rows (whole blocks of them) or matrices at a time."""
        return self._rows if len(self.shape) == 2 else 1

    @property
    def _rows(self) -> int:
        """The number of rows that are quantized at once."""
        rows, columns = self.shape[-2:]
        step = max(self.packing.step((rows, columns)), min(self.packing.block[0], rows))
        return max(1, STRIP // (columns * step)) * step

    def strip(self, a: int, b: int) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) of rows or matrices [a, b), flat."""
        rows, columns = self.shape[-2:]
        if len(self.shape) == 2:
            return self._encoded(a, b - a, columns)
        places = [
            (m * rows + row, min(self._rows, rows - row)) for m in range(a, b) for row in range(0, rows, self._rows)
        ]
        codes, scales = zip(*(self._encoded(first, n, columns) for first, n in places), strict=True)
        return np.concatenate(codes), np.concatenate(scales)

    def _encoded(self, first: int, n: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """(codes, scales) of `n` rows of all matrices, flat."""
        from trireme.models.encoding import encode  # torch, which nothing else here needs

        pieces = self.source.values(self.name, first * columns, (first + n) * columns)
        values = np.concatenate([np.array(convert(piece, dtype_of(piece), "F32")) for piece in pieces])
        codes, scales = encode(self.packing, values.reshape(n, columns))
        return codes, scales

    def part(self, part: int, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of the codes (part 0) or of the scales (1), flat, computed each time."""
        rows, *rest = self.shape
        size = prod(self.packing.shapes((self.height, *rest))[part])  # of a strip
        result = list[np.ndarray]()
        for i in range(first // size, -(-last // size)):
            strip = self.strip(i * self.height, min((i + 1) * self.height, rows))[part]
            result.append(strip[max(first - i * size, 0) : last - i * size])
        return np.concatenate(result)


def quantized(cfg: ModelConfig, source: Source, base: str, stored: dict[str, str]) -> tuple[ModelConfig, Quantized]:
    """(cfg, source) with the frozen matrices of blocks quantized to `base`. `stored`: canonical name -> name in
    `source`.

    Raises InputError if nothing is frozen, or the checkpoint is packed already.
    """
    if isinstance(source, Packed):
        raise InputError(f"--base {base}: {source.folder} is in {source.packing.word} already. Leave --base out.")
    if cfg.fp8:
        raise InputError(f"--base {base}: with --dtype fp8 frozen matrices are kept in fp8. Leave one of them out.")
    packing = BASES[base]
    small = tuple(f".{name}.weight" for name in (cfg.names.mlp.router, cfg.names.mlp.shared_gate) if name)

    def is_packed(name: str, shape: tuple[int, ...]) -> bool:
        frozen = shapes.is_frozen(cfg, [(name, shape)]) and not name.endswith(small)
        fits = packing.holds(shapes.on_disk(cfg, name, shape)[0][1])
        return frozen and fits and name.startswith(cfg.names.block.split("{}")[0])

    cfg = replace(cfg, packing=packing, packed=globs(cfg, is_packed))
    parts, made, encoders = dict[str, SourceTensor](), dict[str, Made](), list[Encoder]()
    part_shapes = cache(packing.shapes)  # of some ten shapes, looked up for each expert
    for name, shape in (matrix for group in shapes.all_groups(cfg) if shapes.is_packed(cfg, group) for matrix in group):
        for there, one in shapes.on_disk(cfg, name, shape):
            encoders.append(Encoder(source, stored[there], packing))
            for i, (part, own) in enumerate(zip(packing.parts, part_shapes(one), strict=True)):
                parts[stored[there] + part.suffix] = SourceTensor(part.dtypes[0], own, "", 0)
                made[stored[there] + part.suffix] = partial(encoders[-1].part, i)
    if not parts:
        raise InputError(f"--base {base}: no matrix is frozen. It is for --lora, --adapter, --freeze and --train.")
    fields = source.folder, source.files, source.tensors, source.auxiliary, packing, parts, made
    return cfg, Quantized(*fields, source, tuple(encoders), base)
