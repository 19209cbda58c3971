"""--base with --store: the quantized weights are kept in a file of the store, for this run and for later ones.

DIR/bases/nf4-KEY.safetensors has the parts of all matrices, by their names in memory. A .json file next to it has
its checksum, and the stamps of the checkpoint's files that it was made from. KEY is made of the shapes and of some of
the values.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trireme.engine.tuning.base import check_unchanged, stamps
from trireme.engine.tuning.quantized import Encoder, Quantized
from trireme.storage.checkpoint import SourceTensor, counted
from trireme.storage.files import (
    Say,
    check_space,
    partial_of,
    replace_synced,
    stream,
    sync_folder,
    to_stderr,
    write_synced,
)
from trireme.storage.headers import encode_header
from trireme.storage.layout import sequential
from trireme.storage.untrusted import checksum, parse_json, read_small, summed, why

FOLDER = "bases"
ENCODING = 1  # of this code: another one has other values
THREADS = 8
SAMPLE = 4096  # bytes of each file
LARGEST = 1 << 24  # of the record


@dataclass(frozen=True)
class Cached(Quantized):
    """A checkpoint whose quantized parts are in `file`, which `make` writes."""

    file: Path
    header: bytes

    @property
    def file_bytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.parts.values())

    @property
    def record(self) -> Path:
        return self.file.with_suffix(".json")

    def is_made(self) -> bool:
        """Whether the file is there, and was made from the checkpoint as it is."""
        same = self.file.is_file() and self.file.stat().st_size == self.file_bytes
        return same and "sum" in self._record() and self._record().get("stamps") == self._stamps()

    def make(self, progress: Callable[[int], object], say: Say = to_stderr) -> None:
        """Writes the file, unless it is made and has the bytes that were written. Raises StoreError."""
        if self.is_made():
            try:
                sound = checksum(counted(stream(self.file), progress)) == self._record()["sum"]
                damage = "" if sound else "its bytes are not those that were written"
            except OSError as error:
                damage = why(error)
            if not damage:
                return
            say(f"{self.file} is damaged: {damage}. It is made again")
        before, record = stamps(self.original), dict[str, Any](stamps=self._stamps())
        self.file.parent.mkdir(parents=True, exist_ok=True)
        check_space(self.file.parent, self.file_bytes, "the quantized base")
        self.record.unlink(missing_ok=True)
        try:
            content = summed(self._content(progress), lambda sum: record.update(sum=sum))
            write_synced(partial_of(self.file), content)
            check_unchanged(before)
            partial_of(self.file).replace(self.file)
        finally:
            partial_of(self.file).unlink(missing_ok=True)
        sync_folder(self.file.parent)
        replace_synced(self.record, json.dumps(record).encode())

    def _record(self) -> dict[str, Any]:
        """The content of the .json file; {} if it cannot be read."""
        try:
            return parse_json(read_small(self.record, LARGEST), "record")
        except (OSError, ValueError):
            return {}

    def _stamps(self) -> dict[str, list[int]]:
        return {str(path.absolute()): list(stamp) for path, stamp in stamps(self.original).items()}

    def _content(self, progress: Callable[[int], object]) -> Iterator[memoryview]:
        """Yields the file's bytes. The codes of a matrix come first, so its scales wait."""
        yield memoryview(self.header)
        with ThreadPoolExecutor(THREADS) as pool:  # torch and reads release the GIL
            scales = list[np.ndarray]()
            for last, (codes, some) in _ahead(pool, self.encoders):
                scales.append(some)
                yield codes.view(np.uint8).data
                if last:
                    yield np.concatenate(scales).view(np.uint8).data
                    scales.clear()
                progress(codes.nbytes + some.nbytes)


def _ahead(pool: ThreadPoolExecutor, encoders: tuple[Encoder, ...]) -> Iterator[tuple[bool, Any]]:
    """Yields (whether it is the last strip of its matrix, result of Encoder.strip) in order; a few are made ahead."""
    waiting = deque[tuple[bool, Future[Any]]]()
    for encoder in encoders:
        rows, height = encoder.shape[0], encoder.height
        for a in range(0, rows, height):
            waiting.append((a + height >= rows, pool.submit(encoder.strip, a, min(a + height, rows))))
            if len(waiting) > 2 * THREADS:
                last, strip = waiting.popleft()
                yield last, strip.result()
    for last, strip in waiting:
        yield last, strip.result()


def cached(source: Quantized, store: Path) -> Cached:
    """`source` with its quantized parts in a file of the store."""
    layout = sequential([(name, t.dtype, t.shape) for name, t in source.parts.items()])
    header, original = encode_header(layout), source.original
    sizes = {name: original.size_of(name) for name in original.files}
    samples = [original.bytes_of(name, n // 2, min(SAMPLE, n - n // 2)).data for name, n in sizes.items()]
    key = checksum([header, json.dumps([ENCODING, sizes]).encode(), *samples])
    file = store.absolute() / FOLDER / f"{source.base}-{key}.safetensors"
    parts = {t.name: SourceTensor(t.dtype, t.shape, str(file), len(header) + t.offset) for t in layout.tensors}
    fields = source.folder, source.files, source.tensors, source.auxiliary, source.packing, parts
    return Cached(*fields, {}, original, source.encoders, source.base, file, header)
