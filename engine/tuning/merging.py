"""Merges an adapter into its base model: the result is a plain checkpoint, each matrix rounded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.engine.exchange import LOADERS
from trireme.engine.placement import Progress, silent
from trireme.engine.tuning.adapters import Adapter
from trireme.engine.tuning.base import check_unchanged, stamps
from trireme.engine.tuning.headed import headed
from trireme.engine.tuning.packed_source import Packed, unpacked
from trireme.engine.tuning.peft import read_adapter
from trireme.engine.tuning.quantized import as_rows
from trireme.engine.tuning.repacked import repacked
from trireme.engine.tuning.rewritten import Values, entries_of, rewritten
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.auxiliary import TOKENIZER, auxiliary_files, content_of
from trireme.storage.checkpoint import Source, convert, dtype_of, export, is_finite
from trireme.storage.files import Say, make_folder, remove_folders, sync_folder, to_stderr
from trireme.storage.temporary import Temporary

CPU = torch.device("cpu")
ON_GPU = 1 << 24  # elements of a packed matrix that are encoded at a time: some 500 MiB
Factors = list[tuple[Tensor, Tensor]]  # (left (rows, R), right (R, columns)) of each matrix


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` when the context ends, and is removed if it fails; what killed processes left
    of others is removed. Raises InputError if `out` has files.
    """
    out = out.resolve()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise InputError(f"--out {out} is there already. Name another folder.")
    made = make_folder(out.parent)
    try:
        with Temporary(f".{out.name}-", out.parent) as place:
            (place / "new").mkdir()
            yield place / "new"
            sync_folder(place / "new")
            (place / "new").rename(out)
            sync_folder(out.parent)
    except BaseException:
        remove_folders(made)
        raise


def merge_adapter(
    folder: Path,
    cfg: ModelConfig,
    source: Source,
    out: Path,
    progress: Progress = silent,
    say: Say = to_stderr,
    same: bool = False,
    device: torch.device = CPU,
) -> None:
    """Writes `source` plus the adapter to `out`: a packed one in bf16 if the adapter changes packed matrices, or with
    `same` in its own format, each matrix rounded once more, on `device`.

    Raises StoreError; InputError, also if a value is not finite.
    """
    base = hf.as_found(replace(cfg, lora=None, frozen=()), source.shapes)
    adapter, before = read_adapter(folder, base, merging=True), stamps(source)
    unchanged = lambda: check_unchanged(before, "was changed while it was merged")
    names = hf.canonical_names(base, source.shapes, source.named)
    if isinstance(source, Packed):
        changed = _changed(base, adapter, source, names)
        if same:
            if adapter.cfg != base:
                raise InputError(f"--format same: {folder} changes the vocabulary or the head. Leave --format out.")
            total = Sum(adapter, source, base, names)
            rows = {stored: partial(total.rows, device, stored) for stored in sorted(changed)}
            new = repacked(source, rows) if device == CPU else repacked(source, rows, ON_GPU)
            values = lambda name: total.values(name) if names.get(name) and not source.packs(name) else None
            fetch = lambda name: new.values(name) if name in new.places else values(name)
            export(new.raw, out, fetch, progress, unchanged)
            if changed:
                say(f"note: relative error of the rounding to {source.packing.word}: {new.errors()}")
            return
        source = unpacked(source, changed) if changed else source
    source, base = with_ends(base, adapter, source, say), adapter.cfg
    source = headed(base, source)
    total = Sum(adapter, source, base, hf.canonical_names(base, source.shapes))
    export(source, out, lambda name: total.values(name) if total.names[name] else None, progress, unchanged)


@dataclass(frozen=True)
class Sum:
    """A checkpoint plus an adapter, by names in the checkpoint."""

    adapter: Adapter
    source: Source
    cfg: ModelConfig
    names: dict[str, str | None]  # canonical

    @cached_property
    def tensor(self) -> Callable[[str], Tensor]:
        """An adapter's tensor; one of experts serves all of them."""
        return lru_cache(2 * LOADERS)(self.adapter.tensor)

    def values(self, stored: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        """Elements [first, last) of a weight in its dtype. Raises InputError as they are read."""
        name, dtype = self.names[stored], self.source.tensors[stored].dtype
        assert name
        module, pairs = factors(self.cfg, self.adapter, self.tensor, name)
        pieces = self._read(stored, name, first, last)
        if not (pairs or name in self.adapter.whole):
            return pieces
        folder = self.adapter.source.folder
        beyond = f"{stored}: with the adapter of {folder}, values are beyond {dtype}. Is its lora_alpha right?"
        sums = merged(pieces, pairs, self.adapter.scales[module], first) if pairs else pieces
        return _finite((convert(piece, dtype_of(piece), dtype) for piece in sums), beyond)

    def rows(self, device: torch.device, stored: str, first: int, last: int) -> Tensor:
        """Rows [first, last) of a packed matrix, or of those of all experts one after another, in fp32 on a device."""
        name, columns = self.names[stored], self.source.tensors[stored].shape[-1]
        assert name
        assert isinstance(self.source, Packed)
        if name in self.adapter.whole:
            whole = as_rows(self._read(stored, name, first * columns, last * columns), columns)
            return torch.from_numpy(whole).to(device)
        x = self.source.rows_on(device, stored, first, last)
        module, pairs = factors(self.cfg, self.adapter, self.tensor, name)
        at = first
        while pairs and at < last:
            matrix, row = divmod(at, len(pairs[0][0]))
            left, right = pairs[matrix]
            part = left[row : row + last - at]
            x[at - first :][: len(part)] += (part.to(device) @ right.to(device)).mul_(self.adapter.scales[module])
            at += len(part)
        if not x.isfinite().all():
            raise InputError(f"{self.source.named(stored)}: not finite, or not with {self.adapter.source.folder}.")
        return x

    def _read(self, stored: str, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        """Elements of a weight of the model, or of the adapter's that takes its place."""
        whole = self.adapter.whole.get(name)
        origin, key, kind = (self.adapter.source, whole, "adapter") if whole else (self.source, stored, "checkpoint")
        damage = f"{origin.named(key)} holds NaN or infinite values; the {kind} is damaged."
        return _finite(origin.values(key, first, last), damage)


@dataclass(frozen=True)
class InBf16(Source):
    """The merged model in bf16, whose values are computed as they are read."""

    total: Sum

    def values(self, name: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        return self.total.values(name, first, last)

    def read(self, name: str) -> np.ndarray:
        return np.concatenate([piece.copy() for piece in self.values(name)]).view(np.uint8)


def in_bf16(cfg: ModelConfig, adapter: Adapter, source: Packed) -> InBf16:
    """`source` plus the adapter, as merge_adapter writes them without `same`. Raises InputError as it is read."""
    wide = unpacked(source, _changed(cfg, adapter, source, hf.canonical_names(cfg, source.shapes, source.named)))
    tensors = {name: t._replace(file="", offset=0) for name, t in wide.tensors.items()}  # computed, so in no file
    total = Sum(adapter, wide, cfg, hf.canonical_names(cfg, wide.shapes))
    return InBf16(wide.folder, wide.files, tensors, wide.auxiliary, total)


def with_ends(cfg: ModelConfig, adapter: Adapter, source: Source, say: Say) -> Source:
    """`source` with the vocabulary of the adapter's model, and with an output matrix of its own where the adapter
    changes only one of embedding and output.
    """
    new = adapter.cfg
    if (new.vocab, new.tied) == (cfg.vocab, cfg.tied):
        return source
    embed, output, entries = shapes.embedding_name(cfg), shapes.output_name(new), entries_of(source)
    names = hf.canonical_names(cfg, source.shapes)
    ends = {stored: name for stored, name in names.items() if name in (embed, output)}
    stored = min(ends, key=lambda name: (ends[name] != embed, name.endswith(hf.OUTPUTS)))
    fields, made = dict[str, Any](), dict[str, Values]()
    if cfg.tied and not new.tied:
        say("note: the adapter changes one of embedding and output: they are two matrices in the merged model")
        fields["tie_word_embeddings"] = False
        if not any(name.endswith(hf.OUTPUTS) for name in ends):
            t = source.tensors[stored]
            entries[t.file].append((output, t.dtype, t.shape))
            ends[output], made[output] = output, lambda a, b: source.values(stored, a, b)
    auxiliary = source.auxiliary
    if new.vocab != cfg.vocab:
        say(f"note: the merged model has the adapter's vocabulary of {new.vocab:,} tokens, not {cfg.vocab:,}")
        fields["vocab_size"] = new.vocab
        for file, tensors in entries.items():
            entries[file] = [(n, dtype, (new.vocab, *s[1:]) if n in ends else s) for n, dtype, s in tensors]
        whole = {embed: adapter.whole[embed], output: adapter.whole[output]}
        made = {n: partial(adapter.source.values, whole[embed if ends[n] == embed else output]) for n in ends}
        if (adapter.source.folder / TOKENIZER).is_file():
            auxiliary = auxiliary_files(source.folder, adapter.source.folder)
    config = _with_fields(json.loads(content_of(source.auxiliary["config.json"])), fields)
    auxiliary = auxiliary | {"config.json": json.dumps(config, indent=2).encode()}
    return replace(rewritten(source, entries, made), auxiliary=auxiliary)


def _with_fields(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json with other values of keys, also where the language model's part has them."""
    inner = raw.get("text_config")
    if isinstance(inner, dict):
        raw = raw | {"text_config": inner | {key: value for key, value in fields.items() if key in inner}}
        fields = {key: value for key, value in fields.items() if key in raw or key not in inner}
    return raw | fields


def _finite(pieces: Iterable[np.ndarray], otherwise: str) -> Iterator[np.ndarray]:
    """The same pieces. Raises InputError if a value is not finite."""
    for piece in pieces:
        if not is_finite(piece):
            raise InputError(otherwise)
        yield piece


def _changed(cfg: ModelConfig, adapter: Adapter, source: Packed, names: Mapping[str, str | None]) -> frozenset[str]:
    """The packed matrices that the adapter changes or replaces."""
    modules = lambda name: (name.removesuffix(".weight"), shapes.within_experts(cfg, name)[0])
    is_changed = lambda name: name in adapter.whole or any(module in adapter.ranks for module in modules(name))
    return frozenset(s for s, name in names.items() if name and source.packs(s) and is_changed(name))


def factors(cfg: ModelConfig, adapter: Adapter, tensor: Callable[[str], Tensor], name: str) -> tuple[str, Factors]:
    """(the adapted module, for each matrix in a tensor the two factors that are added to it); no factors without an
    adapter.
    """
    module = name.removesuffix(".weight")
    parts = shapes.adapter_names(module)
    if module in adapter.ranks and not shapes.adapts_experts(parts[0]):
        a, b = map(tensor, parts)
        in_out = module == cfg.names.embed or (cfg.names.in_out and module != cfg.names.output)
        return module, [(a.T, b.T) if in_out else (b, a)]
    module, expert, half = shapes.within_experts(cfg, name)
    if module not in adapter.ranks:
        return module, []
    downs, ups = (tensor(part).unflatten(0, (-1, adapter.ranks[module])) for part in shapes.adapter_names(module))
    if expert is None:
        both = zip(downs, ups, strict=True)
        return module, [(down.T, up) if cfg.names.mlp.experts_in_out else (up.T, down) for down, up in both]
    up = ups[expert].T
    return module, [(up if half is None else up.chunk(2)[half], downs[expert])]


def merged(pieces: Iterable[np.ndarray], pairs: Factors, scale: float, first: int = 0) -> Iterator[np.ndarray]:
    """Yields W + scale * left @ right in fp32, in pieces. `first`: the element of the tensor that they begin with."""
    columns = pairs[0][1].shape[1]
    size = len(pairs[0][0]) * columns  # of a matrix
    for piece in pieces:
        rest = piece
        while len(rest):
            matrix, at = divmod(first, size)
            (left, right), part = pairs[matrix], rest[: size - at]
            rows = slice(at // columns, -(-(at + len(part)) // columns))
            delta = (left[rows] @ right).flatten()[at - rows.start * columns :][: len(part)].mul_(scale).numpy()
            delta += convert(part, dtype_of(part), "F32")
            yield delta
            rest, first = rest[len(part) :], first + len(part)
