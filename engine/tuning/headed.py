"""Checkpoints that get a score head (models/families/scores.py): their config.json, and the files that are written.

The files of a language model are written without its output matrix, and with `score.weight` after the last tensor of
one file; config.json names transformers' class, the labels and the padding token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trireme.engine.tuning.packed import Unpacked
from trireme.models import hf
from trireme.models.config import CLASS, InputError, ModelConfig, class_of
from trireme.models.sizes import shapes
from trireme.storage.auxiliary import CONTENT, content_of
from trireme.storage.checkpoint import INDEX, Source, SourceTensor, stored_values
from trireme.storage.headers import encode_header, read_header
from trireme.storage.layout import Layout, sequential

LANGUAGE = re.compile(r"(For[A-Z]\w*|LMHeadModel)$")  # ends of transformers' classes


@dataclass(frozen=True)
class Headed(Source):
    """`inner` with a new head, and without the output matrices `without`."""

    inner: Source
    without: frozenset[str]
    name: str  # of the head
    std: float

    def place(self, name: str) -> SourceTensor:
        return self.tensors[name] if name == self.name else self.inner.place(name)

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        if name != self.name:
            yield from self.inner.values(name, first, last)
            return
        from trireme.models.lora import initial  # torch, which nothing else here needs

        yield initial(name, self.tensors[name].shape, self.std).flatten()[first:last].numpy()

    def computed_in(self, dtype: str) -> Source:
        return replace(self, inner=self.inner.computed_in(dtype))

    @property
    def nbytes(self) -> int:
        return sum(map(self.size_of, self.files))

    def size_of(self, file: str) -> int:
        _, new, _ = self._headers(file)
        kept = sum(t.nbytes for t in self._layout(file)[0].tensors if t.name not in self.without)
        return len(new) + kept + (self.tensors[self.name].nbytes if self._has(file) else 0)

    def rewritten(self, file: str, fetch: Callable[[str], Iterable[np.ndarray] | None]) -> Iterator[np.ndarray]:
        old, new, left_out = self._headers(file)
        yield np.frombuffer(new, np.uint8)
        ranges, at = [(0, old), *left_out], 0
        for written in self.inner.rewritten(file, lambda name: None if name in self.without else fetch(name)):
            piece, start = written.view(np.uint8), at
            at += len(piece)
            begin = start
            for a, b in ranges:  # in order
                yield piece[begin - start : max(begin, min(a, at)) - start]
                begin = max(begin, min(b, at))
            yield piece[begin - start :]
        if self._has(file):
            values = fetch(self.name)
            given = self.values(self.name) if values is None else values
            yield from stored_values(self.name, self.tensors[self.name], given)

    @property
    def others(self) -> dict[str, CONTENT]:
        """The files but weights, with an index of the new files."""
        found = self.inner.others
        if INDEX in found:
            index = json.loads(content_of(found[INDEX]))
            files = {name: file for name, file in index["weight_map"].items() if name not in self.without}
            files[self.name] = self.tensors[self.name].file
            lost = sum(self.inner.tensors[name].nbytes for name in self.without)
            total = (index.get("metadata") or {}).get("total_size")
            more = {"total_size": total - lost + self.tensors[self.name].nbytes} if isinstance(total, int) else {}
            metadata = (index.get("metadata") or {}) | more
            found[INDEX] = json.dumps({"metadata": metadata, "weight_map": files}, indent=2).encode()
        return found

    def _has(self, file: str) -> bool:
        """Whether a file gets the new head."""
        return self.tensors[self.name].file == file and self.name not in self.inner.tensors

    def _layout(self, file: str) -> tuple[Layout, dict[str, str], int]:
        """(tensors, metadata, offset of the tensors) of a file as `inner` writes it."""
        if isinstance(self.inner, Unpacked):
            header = self.inner.headers[file]
            layout = sequential([(n, *self.inner.tensors[n][:2]) for n in self.inner.names_in[file]])
            return layout, {"format": "pt"}, len(header)
        found = read_header(self.folder / file)
        return found.layout, found.metadata, found.data

    def _headers(self, file: str) -> tuple[int, bytes, list[tuple[int, int]]]:
        """(bytes of the old header, the new header, ranges of the old file that are left out)."""
        layout, metadata, data = self._layout(file)
        gone = [(data + t.offset, data + t.offset + t.nbytes) for t in layout.tensors if t.name in self.without]
        kept = [(t.name, t.dtype, t.shape) for t in layout.tensors if t.name not in self.without]
        own = self.tensors[self.name]
        made = [(self.name, own.dtype, own.shape)] if self._has(file) else []
        return data, encode_header(sequential([*kept, *made]), metadata or {"format": "pt"}), gone


def headed(cfg: ModelConfig, source: Source) -> Source:
    """`source` as it is written: with its score head, and without an output matrix; unchanged if it has only a score
    head.
    """
    name = shapes.output_name(cfg)
    names = hf.canonical_names(cfg, source.shapes)
    without = frozenset(stored for stored in names if stored.endswith(hf.OUTPUTS))
    if not cfg.scores or not source.files or (name in source.tensors and not without):
        return source
    embedding = next(stored for stored, found in names.items() if found == shapes.embedding_name(cfg))
    like = source.tensors[next(iter(without), embedding)]
    place = source.tensors.get(name) or SourceTensor(
        like.dtype, (cfg.scores, cfg.width), like.file or source.files[-1], 0
    )
    tensors = {stored: t for stored, t in source.tensors.items() if stored not in without} | {name: place}
    return Headed(source.folder, source.files, tensors, source.auxiliary, source, without, name, cfg.score_std)


# ---------------------------------------------------------------- config.json


def names_in(raw: dict[str, Any], labels: int) -> tuple[str, ...]:
    """Names of the labels in config.json; LABEL_0 and so on if it has none."""
    found = raw.get("id2label")
    found = found if isinstance(found, dict) else {}
    return tuple(str(found.get(str(i), f"LABEL_{i}")) for i in range(labels))


def pad_in(raw: dict[str, Any], tokenizers: int | None) -> int | None:
    """The padding token: of config.json, else of the tokenizer, else the first end token."""
    ends = raw.get("eos_token_id")
    for value in (raw.get("pad_token_id"), tokenizers, ends[0] if isinstance(ends, list) and ends else ends):
        if type(value) is int:
            return value
    return None


def config_of(raw: dict[str, Any], cfg: ModelConfig, labels: Sequence[str], pad: int | None) -> dict[str, Any]:
    """The config.json of a model with a score head."""
    named = raw.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    known = LANGUAGE.sub("", first)
    problem = {} if cfg.scores == 1 else {"problem_type": "single_label_classification"}
    found = {key: value for key, value in raw.items() if key not in ("num_labels", "problem_type")} | problem
    return found | {
        "architectures": [known + CLASS if known else class_of(cfg.model_type)],
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
        "pad_token_id": pad,
    }


def with_config(
    cfg: ModelConfig, source: Source, raw: dict[str, Any], labels: Sequence[str], pad: int | None
) -> Source:
    """`source` with the config.json of a model with a score head."""
    content = json.dumps(config_of(raw, cfg, labels, pad), indent=2).encode()
    return replace(source, auxiliary=source.auxiliary | {"config.json": content})


def check_problem(raw: dict[str, Any], where: str) -> None:
    """Raises InputError if the model's classes are not such that one is right."""
    problem = raw.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise InputError(f'{where}: "problem_type" is {problem!r}: one class of several is learned, nothing else.')
