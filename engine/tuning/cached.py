"""--base with --store: the quantized weights are kept in a file of the store, for this run and for later ones.

DIR/bases/nf4-KEY.safetensors has the parts of all matrices, by their names in memory, and in its header the stamps of
the checkpoint's files that it was made from; a .sum file has its checksum. KEY is made of the shapes and some values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from trireme.engine.tuning.base import check_unchanged, stamps
from trireme.engine.tuning.quantized import Encoder, Quantized
from trireme.storage.checkpoint import SourceTensor, counted
from trireme.storage.files import check_space, partial_of, replace_synced, stream, sync_folder, write_synced
from trireme.storage.headers import encode_header
from trireme.storage.layout import sequential
from trireme.storage.untrusted import checksum, summed

FOLDER = "bases"
ENCODING = 2  # of this code: another one has other values
THREADS, AHEAD = 8, 64  # threads, and strips of which the codes may wait to be written
SAMPLE = 4096  # bytes of each file


@dataclass(frozen=True)
class Cached(Quantized):
    """A checkpoint whose quantized parts are in `file`, which `make` writes."""

    file: Path
    header: bytes

    @property
    def file_bytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.parts.values())

    @property
    def sum(self) -> Path:
        return self.file.with_suffix(".sum")

    def is_made(self) -> bool:
        """Whether the file is there, whole, and was made from the checkpoint as it is."""
        if not (self.file.is_file() and self.sum.is_file()) or self.file.stat().st_size != self.file_bytes:
            return False
        with self.file.open("rb") as file:
            return file.read(len(self.header)) == self.header

    def make(self, progress: Callable[[int], object], say: Callable[[str], object]) -> None:
        """Writes the file, unless it is made and has its checksum. It gets its name when it is complete and synced.
        Raises StoreError.
        """
        if self.is_made():
            if checksum(counted(stream(self.file), progress)).encode() == self.sum.read_bytes():
                return
            say(f"{self.file} is damaged: it is made again")
        before, sums = stamps(self.original), list[str]()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        check_space(self.file.parent, self.file_bytes, "the quantized base")
        self.sum.unlink(missing_ok=True)
        try:
            write_synced(partial_of(self.file), summed(self._content(progress), sums.append))
            check_unchanged(before)
            partial_of(self.file).replace(self.file)
        finally:
            partial_of(self.file).unlink(missing_ok=True)
        sync_folder(self.file.parent)
        replace_synced(self.sum, sums[0].encode())

    def _content(self, progress: Callable[[int], object]) -> Iterator[memoryview]:
        """Yields the file's bytes. The codes of a matrix come first, so its scales wait."""
        yield memoryview(self.header)
        strips = [(encoder, *span) for encoder in self.encoders for span in encoder.spans()]
        with ThreadPoolExecutor(THREADS) as pool:  # torch and reads release the GIL
            scales = list[np.ndarray]()
            for i in range(0, len(strips), AHEAD):
                window = strips[i : i + AHEAD]
                encoded = pool.map(Encoder.strip, *zip(*window, strict=True))
                for (encoder, _, b), (codes, part) in zip(window, encoded, strict=True):
                    yield codes.view(np.uint8).data
                    scales.append(part)
                    if b == prod(encoder.shape[:-1]):
                        yield np.concatenate(scales).view(np.uint8).data
                        scales.clear()
                    progress(codes.nbytes + part.nbytes)


def cached(source: Quantized, store: Path) -> Cached:
    """`source` with its quantized parts in a file of the store."""
    layout, original = sequential([(name, t.dtype, t.shape) for name, t in source.parts.items()]), source.original
    sizes = {name: original.size_of(name) for name in original.files}
    samples = [original.bytes_of(name, n // 2, min(SAMPLE, n - n // 2)).data for name, n in sizes.items()]
    key = checksum([encode_header(layout), json.dumps([ENCODING, sizes]).encode(), *samples])
    file = store.absolute() / FOLDER / f"{source.base}-{key}.safetensors"
    header = encode_header(layout, {str(path.absolute()): str(stamp) for path, stamp in stamps(original).items()})
    parts = {t.name: SourceTensor(t.dtype, t.shape, str(file), len(header) + t.offset) for t in layout.tensors}
    fields = source.folder, source.files, source.tensors, source.auxiliary, source.packing, parts
    return Cached(*fields, {}, original, source.encoders, source.base, file, header)
