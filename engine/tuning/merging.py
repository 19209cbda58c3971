"""Merges an adapter into its base model: the result is a plain checkpoint, each matrix rounded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.engine.exchange import LOADERS
from trireme.engine.memory import DTYPE
from trireme.engine.placement import Progress, silent
from trireme.engine.tuning.adapters import Adapter
from trireme.engine.tuning.base import check_unchanged, stamps
from trireme.engine.tuning.headed import headed
from trireme.engine.tuning.packed_source import Packed, by_strips, packed_in, unpacked
from trireme.engine.tuning.peft import read_adapter
from trireme.engine.tuning.repacked import repacked
from trireme.engine.tuning.rewritten import Values, entries_of, rewritten
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.auxiliary import content_of
from trireme.storage.checkpoint import Source, concat, convert, dtype_of, export, is_finite
from trireme.storage.files import Say, make_folder, remove_folders, sync_folder, to_stderr
from trireme.storage.temporary import Temporary

CPU = torch.device("cpu")
AT_ONCE, ON_GPU = 1 << 20, 1 << 23  # elements of a matrix in memory
ELEMENT = 32  # bytes that one needs while it is encoded
WRITERS = 4  # files written at once: while one waits for the drive, others are read and computed


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` when the context ends, and is removed if it fails; what killed processes left
    of others is removed. Raises InputError if `out` has files.
    """
    out = out.resolve()
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise InputError(f"--out {out} is there already. Name another folder.")
    parents = make_folder(out.parent)
    try:
        with Temporary(f".{out.name}-", out.parent) as place:
            (place / "new").mkdir()
            yield place / "new"
            sync_folder(place / "new")
            (place / "new").rename(out)
            sync_folder(out.parent)
    except BaseException:
        remove_folders(parents)
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
    `same` in its own format, each matrix rounded once more. Sums are made on `device`.

    Raises StoreError; InputError, also if a value is not finite.
    """
    base = hf.as_stored(replace(cfg, lora=None, frozen=()), source.shapes)
    adapter, before = read_adapter(folder, base, merging=True), stamps(source)
    unchanged = lambda: check_unchanged(before, "was changed while it was merged")
    total = Sum(adapter, source, base, device)
    if same and isinstance(source, Packed):
        if adapter.cfg != base:
            raise InputError(f"--format same: {folder} changes the vocabulary or the head. Leave --format out.")
        rows = {stored: partial(total.rows, stored) for stored in sorted(total.changed) if source.packs(stored)}
        new = repacked(source, rows, total.at_once)
        values = lambda name: total.values(name) if total.names.get(name) and not source.packs(name) else None
        export(new.raw, out, lambda name: new.values(name) or values(name), progress, unchanged, WRITERS)
        if rows:
            say(f"note: relative error of the rounding to {source.packing.word}: {new.errors()}")
        return
    if isinstance(source, Packed) and any(map(source.packs, total.changed)):
        source = unpacked(source)
    source = headed(adapter.cfg, with_ends(base, adapter, source, say))
    total = Sum(adapter, source, adapter.cfg, device)
    export(source, out, lambda name: total.values(name) if total.names[name] else None, progress, unchanged, WRITERS)


@dataclass(frozen=True)
class Sum:
    """A checkpoint plus an adapter, by names in the checkpoint."""

    adapter: Adapter
    source: Source
    cfg: ModelConfig
    device: torch.device  # that adds

    @cached_property
    def names(self) -> dict[str, str | None]:
        """Canonical names, None of what is not the model's."""
        return hf.canonical_names(self.cfg, self.source.shapes, self.source.named)

    @cached_property
    def tensor(self) -> Callable[[str], Tensor]:
        """An adapter's tensor; one of experts serves all of them."""
        return lru_cache(2 * LOADERS)(self.adapter.tensor)

    @property
    def changed(self) -> frozenset[str]:
        """The weights that the adapter changes or replaces."""
        has = lambda stored, name: name in self.adapter.whole or self._module(stored)
        return frozenset(stored for stored, name in self.names.items() if name and has(stored, name))

    @cached_property
    def at_once(self) -> int:
        """Elements of a matrix in memory, of each writer: on a GPU in half of what is free, and of a run's limit."""
        if self.device.type == "cpu":
            return AT_ONCE
        free, total = torch.cuda.mem_get_info(self.device)
        limit = min(free, total * torch.cuda.get_per_process_memory_fraction(self.device))
        return min(ON_GPU, int(limit) // (2 * ELEMENT * WRITERS))

    def values(self, stored: str, first: int = 0, last: int | None = None) -> Iterator[np.ndarray]:
        """Elements [first, last) of a weight in its dtype. Raises InputError as they are read."""
        t, (origin, key, damage) = self.source.tensors[stored], self._origin(stored)
        if not self._module(stored):
            pieces = _finite(origin.values(key, first, last), damage)
            if origin is not self.source:
                pieces = _finite((convert(piece, dtype_of(piece), t.dtype) for piece in pieces), self._beyond(stored))
            yield from pieces
            return
        packed = packed_in(self.source, stored)
        packing = packed.packing.of(stored) if packed else None
        yield from by_strips(partial(self.rows, stored, dtype=t.dtype), packing, t.shape, self.at_once, first, last)

    def rows(self, stored: str, first: int, last: int, dtype: str = "F32") -> Tensor:
        """Rows [first, last) of a matrix, or of one of those of all experts, which are counted one after another, on
        the device. Raises InputError.
        """
        x = self._base_rows(stored, first, last)
        if module := self._module(stored):
            pairs = self._factors(stored, module)
            matrix, row = divmod(first, len(pairs[0][0]))
            left, right = pairs[matrix]
            part = left[row : row + last - first].to(self.device)
            x += (part @ right.to(self.device)).mul_(self.adapter.scales[module])
        if not torch.stack(x.aminmax()).to(DTYPE[dtype]).isfinite().all():  # rounding keeps the order
            damaged = not self._base_rows(stored, first, last).isfinite().all()
            raise InputError(self._origin(stored)[2] if damaged else self._beyond(stored))
        return x.to(DTYPE[dtype])

    def _base_rows(self, stored: str, first: int, last: int) -> Tensor:
        """`rows` in fp32 before the adapter is added: of the checkpoint, or of what the adapter has in its place."""
        (origin, key, _), columns = self._origin(stored), self.source.tensors[stored].shape[-1]
        if origin is self.source and (packed := packed_in(origin, key)):
            return packed.rows(key, first, last, device=self.device)
        values = concat(origin.values(key, first * columns, last * columns), None)
        x = torch.from_numpy(values.view(np.uint8)).view(DTYPE[dtype_of(values)])
        return x.view(-1, columns).to(self.device).float()

    def _origin(self, stored: str) -> tuple[Source, str, str]:
        """(the checkpoint or the adapter, which has a weight without what is added; its name there; the message that it
        is not finite).
        """
        name = self.adapter.whole.get(self.names[stored] or "")
        origin, key, kind = (self.adapter.source, name, "adapter") if name else (self.source, stored, "checkpoint")
        return origin, key, f"{origin.named(key)} holds NaN or infinite values; the {kind} is damaged."

    def _beyond(self, stored: str) -> str:
        dtype, folder = self.source.tensors[stored].dtype, self.adapter.source.folder
        return f"{stored}: with the adapter of {folder}, values are beyond {dtype}. Is its lora_alpha right?"

    def _module(self, stored: str) -> str:
        """The module of a weight that has an adapter; "" without."""
        name = self.names[stored] or ""
        modules = name.removesuffix(".weight"), shapes.within_experts(self.cfg, name)[0]
        return next((module for module in modules if module in self.adapter.ranks), "")

    def _factors(self, stored: str, module: str) -> list[tuple[Tensor, Tensor]]:
        """Of each matrix in a tensor the two factors that are added to it: (rows, R) and (R, columns)."""
        cfg, parts = self.cfg, shapes.adapter_names(module)
        if not shapes.adapts_experts(parts[0]):
            a, b = map(self.tensor, parts)
            in_out = module == cfg.names.embed or (cfg.names.in_out and module != cfg.names.output)
            return [(a.T, b.T) if in_out else (b, a)]
        _, expert, half = shapes.within_experts(cfg, self.names[stored] or "")
        downs, ups = (self.tensor(part).unflatten(0, (-1, self.adapter.ranks[module])) for part in parts)
        if expert is None:
            pairs = zip(downs, ups, strict=True)
            return [(down.T, up) if cfg.names.mlp.experts_in_out else (up.T, down) for down, up in pairs]
        up = ups[expert].T
        return [(up if half is None else up.chunk(2)[half], downs[expert])]


def merged(cfg: ModelConfig, adapter: Adapter, source: Packed) -> Source:
    """`source` plus the adapter, as merge_adapter writes them without `same`. Raises InputError as it is read."""
    plain = unpacked(source)
    total = Sum(adapter, plain, cfg, CPU)
    return replace(plain, made={stored: partial(total.values, stored) for stored, name in total.names.items() if name})


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
    fields, values = dict[str, Any](), dict[str, Values]()
    if cfg.tied and not new.tied:
        say("note: the adapter changes one of embedding and output: they are two matrices in the merged model")
        fields["tie_word_embeddings"] = False
        if not any(name.endswith(hf.OUTPUTS) for name in ends):
            t = source.tensors[stored]
            entries[t.file].append((output, t.dtype, t.shape))
            ends[output], values[output] = output, lambda a, b: source.values(stored, a, b)
    if new.vocab != cfg.vocab:
        say(f"note: the merged model has the adapter's vocabulary of {new.vocab:,} tokens, not {cfg.vocab:,}")
        fields["vocab_size"] = new.vocab
        for file, tensors in entries.items():
            entries[file] = [(n, dtype, (new.vocab, *s[1:]) if n in ends else s) for n, dtype, s in tensors]
        replacements = {embed: adapter.whole[embed], output: adapter.whole[output]}
        values = {n: partial(adapter.source.values, replacements[embed if ends[n] == embed else output]) for n in ends}
    config = _with_fields(json.loads(content_of(source.auxiliary["config.json"])), fields)
    auxiliary = source.auxiliary | {"config.json": json.dumps(config, indent=2).encode()}
    return replace(rewritten(source, entries, values), auxiliary=auxiliary)


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
