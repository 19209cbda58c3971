"""Merges an adapter into its base model: the result is a plain checkpoint, each matrix rounded once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from torch import Tensor

from trireme.engine.placement import Progress, silent
from trireme.engine.tuning.adapters import Adapter
from trireme.engine.tuning.base import check_unchanged, stamps
from trireme.engine.tuning.headed import headed
from trireme.engine.tuning.opened import read_adapter
from trireme.engine.tuning.packed import Packed, unpacked
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source, convert, dtype_of, export, is_finite
from trireme.storage.files import Say, lock, make_folder, partial_of, remove_folders, sync_folder, write_synced
from trireme.storage.untrusted import read_small

Factors = list[tuple[Tensor, Tensor]]  # (left (rows, R), right (R, columns)) of each matrix
Working = Callable[[str, int], AbstractContextManager[Progress]]  # (what is done, its bytes) -> what hears of them


def merge_folder(folder: Path, cfg: ModelConfig, source: Source, out: Path, say: Say, working: Working) -> None:
    """Writes `source`, the model of the adapter in `folder`, plus the adapter to `out`, which is free.

    Raises InputError, CheckpointError, StoreError.
    """
    if isinstance(source, Packed):
        say(f"note: {source.folder}: matrices in {source.packing.word} that the adapter changes make all be in bf16")
    with _claimed(out, [*source.others, *source.files]), working("merging the adapter", 2 * source.nbytes) as more:
        merge_adapter(folder, cfg, source, out, more)


@contextmanager
def _claimed(out: Path, files: Sequence[str]) -> Iterator[None]:
    """A context that locks a folder for these files: a new or empty one, or one that a killed merge of the same files
    has left.

    A mark is in it until all files are there. Raises InputError if it is not free, StoreError.
    """
    mark, text = partial_of(out / "merge"), "\n".join(files).encode()
    if out.is_symlink() and not out.exists():
        raise InputError(f"--out {out} is a link to {out.readlink()}, which is not there. Name another folder.")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file. Name a folder.")
    made = make_folder(out)
    fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock(fd):
            raise InputError(f"--out {out}: another process is merging there. Name another folder.")
        if set(out.iterdir()) <= {mark}:
            write_synced(mark, [text])
            sync_folder(out)
        elif not mark.is_file() or read_small(mark) != text:
            raise InputError(f"--out {out} is there already. Name another folder.")
        try:
            yield
        except BaseException:
            remove_folders({(out / file).parent for file in files} - {out})
            if list(out.iterdir()) == [mark]:
                mark.unlink()
            raise
        mark.unlink()
        sync_folder(out)
    except BaseException:
        remove_folders(made)
        raise
    finally:
        os.close(fd)


def merge_adapter(folder: Path, cfg: ModelConfig, source: Source, out: Path, progress: Progress = silent) -> None:
    """Writes `source` plus the adapter to `out`. Raises StoreError; InputError, also if a value is not finite."""
    base = hf.as_found(replace(cfg, lora=None, frozen=()), source.shapes)
    adapter, before = read_adapter(folder, base, merging=True), stamps(source)
    tensor = lru_cache(4)(adapter.tensor)  # one of experts serves all of them
    names = hf.canonical_names(base, source.shapes, source.named)
    if isinstance(source, Packed):
        packed = {stored: name for stored, name in names.items() if name and source.packs(stored)}
        changed = frozenset(stored for stored, name in packed.items() if _is_adapted(base, adapter, name))
        source = unpacked(base, source, changed) if changed else source
    source = headed(base, source)
    names = hf.canonical_names(base, source.shapes)

    def values(stored: str) -> Iterator[np.ndarray] | None:
        name, dtype = names[stored], source.tensors[stored].dtype
        if not name:
            return None
        damaged = f"{source.named(stored)} holds NaN or infinite values; the checkpoint is damaged."
        module, pairs = factors(base, adapter, tensor, name)
        if name in adapter.whole:
            read = adapter.source.values(adapter.whole[name])
            of = adapter.source.named(adapter.whole[name])
            damaged = f"{of} holds NaN or infinite values; the adapter is damaged."
        else:
            read = source.values(stored)
            if not pairs:
                return _finite(read, damaged)
        beyond = f"{stored}: with the adapter of {folder}, values are beyond {dtype}. Is its lora_alpha right?"
        read = _finite(read, damaged)
        added = merged(read, pairs, adapter.scales[module]) if pairs else read
        return _finite((convert(piece, dtype_of(piece), dtype) for piece in added), beyond)

    export(source, out, values, progress, lambda: check_unchanged(before, "was changed while it was merged"))


def _finite(pieces: Iterable[np.ndarray], otherwise: str) -> Iterator[np.ndarray]:
    """The same pieces. Raises InputError if a value is not finite."""
    for piece in pieces:
        if not is_finite(piece):
            raise InputError(otherwise)
        yield piece


def _is_adapted(cfg: ModelConfig, adapter: Adapter, name: str) -> bool:
    """Whether the adapter changes or replaces a tensor."""
    modules = name.removesuffix(".weight"), shapes.within_experts(cfg, name)[0]
    return name in adapter.whole or any(module in adapter.ranks for module in modules)


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
        return module, [(down.T, up) if cfg.names.experts_in_out else (up.T, down) for down, up in both]
    up = ups[expert].T
    return module, [(up if half is None else up.chunk(2)[half], downs[expert])]


def merged(read: Iterator[np.ndarray], found: Factors, scale: float) -> Iterator[np.ndarray]:
    """Yields W + scale * left @ right in fp32, in pieces."""
    coming, first, stop = iter(found), 0, 0  # first: of the tensor's elements
    for piece in read:
        end = first + len(piece)
        while first < end:
            if first == stop:
                (left, right), begin = next(coming), stop
                stop += len(left) * right.shape[1]
            part, at, columns = piece[first - end :][: stop - first], first - begin, right.shape[1]
            rows = slice(at // columns, -(-(at + len(part)) // columns))
            delta = (left[rows] @ right).flatten()[at - rows.start * columns :][: len(part)].mul_(scale).numpy()
            delta += convert(part, dtype_of(part), "F32")
            yield delta
            first += len(part)
