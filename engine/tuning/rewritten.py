"""Checkpoints that are written with other tensors than they have: decoded ones, new ones, of another shape, without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from trireme.storage.auxiliary import CONTENT
from trireme.storage.checkpoint import CHUNK, INDEX, Source, SourceTensor, stored_values
from trireme.storage.headers import encode_header, read_header
from trireme.storage.layout import sequential

Values = Callable[[int, int], Iterator[np.ndarray]]  # elements [first, last) of a tensor, flat
Entries = list[tuple[str, str, tuple[int, ...]]]  # names, dtypes and shapes of a file's tensors, in order


@dataclass(frozen=True)
class Rewritten(Source):
    """`inner` as it is written with other tensors; `tensors` says where each is in the new files."""

    inner: Source
    made: Mapping[str, Values]  # tensors that `inner` has not, or not in this shape
    entries: Mapping[str, Entries]  # by file
    headers: Mapping[str, bytes]  # of the new files
    places: Mapping[str, SourceTensor]  # of all tensors in the files of the folder, by their names there

    def place(self, name: str) -> SourceTensor:
        return self.tensors[name]._replace(file="", offset=0) if name in self.made else self.inner.place(name)

    def named(self, name: str) -> str:
        return self.inner.named(name)

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        if name in self.made:
            yield from self.made[name](first, self.tensors[name].numel if last is None else last)
        else:
            yield from self.inner.values(name, first, last)

    def computed_in(self, dtype: str) -> Source:
        return replace(self, inner=self.inner.computed_in(dtype))

    @property
    def nbytes(self) -> int:
        return sum(map(self.size_of, self.files))

    def size_of(self, file: str) -> int:
        sizes = (SourceTensor(dtype, shape, file, 0).nbytes for _, dtype, shape in self.entries[file])
        return len(self.headers[file]) + sum(sizes)

    def rewritten(self, file: str, fetch: Callable[[str], Iterable[np.ndarray] | None]) -> Iterator[np.ndarray]:
        yield np.frombuffer(self.headers[file], np.uint8)
        for name, dtype, shape in self.entries[file]:
            t = self.tensors.get(name)
            new = fetch(name) if t and t.file == file and t.nbytes else None
            place = None if name in self.made else self.places.get(name)
            if new is not None:
                yield from stored_values(name, SourceTensor(dtype, shape, file, 0), new)
            elif place and place[:2] == (dtype, shape):
                for a in range(0, place.nbytes, CHUNK):
                    yield self.bytes_of(place.file, place.offset + a, min(CHUNK, place.nbytes - a))
            elif prod(shape):
                yield from stored_values(name, SourceTensor(dtype, shape, file, 0), self.values(name))

    @property
    def others(self) -> dict[str, CONTENT]:
        """The files but weights, with an index of the new files."""
        files = super().others
        if INDEX in files:
            weight_map = {name: file for file, entries in self.entries.items() for name, _, _ in entries}
            total = sum(self.size_of(file) - len(self.headers[file]) for file in self.files)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            files[INDEX] = json.dumps(index, indent=2).encode()
        return files


def entries_of(source: Source) -> dict[str, Entries]:
    """The tensors of each file as it is written."""
    if isinstance(source, Rewritten):
        return {file: list(entries) for file, entries in source.entries.items()}
    headers = {file: read_header(source.folder / file) for file in source.files}
    return {file: [(t.name, t.dtype, t.shape) for t in header.layout.tensors] for file, header in headers.items()}


def rewritten(source: Source, entries: Mapping[str, Entries], made: Mapping[str, Values]) -> Rewritten:
    """`source` to be written with these tensors; those of `made` are computed."""
    headers, tensors, places = dict[str, bytes](), dict[str, SourceTensor](), dict[str, SourceTensor]()
    for file in source.files:
        old = read_header(source.folder / file)
        places |= {t.name: SourceTensor(t.dtype, t.shape, file, old.data + t.offset) for t in old.layout.tensors}
        layout = sequential(entries[file])
        headers[file] = encode_header(layout, old.metadata or {"format": "pt"})
        new = {t.name: SourceTensor(t.dtype, t.shape, file, len(headers[file]) + t.offset) for t in layout.tensors}
        plain = {name for name, t in source.tensors.items() if name in new and t.dtype == new[name].dtype}
        tensors |= {name: t for name, t in new.items() if name in made or name in plain}
    written = {name for file in entries.values() for name, _, _ in file}
    remaining = {name: t for name, t in source.tensors.items() if name in written or not t.file}
    return Rewritten(
        source.folder, source.files, remaining | tensors, source.auxiliary, source, made, entries, headers, places
    )
