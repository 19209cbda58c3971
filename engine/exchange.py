"""Tensors between a checkpoint's files and the homes of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trireme.engine.homes import Entry, Homes, Progress, Reader, Writer, silent
from trireme.kernels.reference import join_master, split_master
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig
from trireme.models.lora import initial
from trireme.storage.checkpoint import NUMPY, Source, convert, dtype_of, export
from trireme.storage.files import partial_of, sync_folder
from trireme.storage.layout import TensorSpec
from trireme.storage.untrusted import checksum, summed

Read = Callable[[str, int, int], Iterable[np.ndarray]]  # (tensor, first, last) -> elements in pieces
LOADERS = 8  # tensors read at once
PIECE = 1 << 18  # elements at a time, in a core's cache


class Exchange:
    """For use between steps: all lanes idle."""

    def __init__(self, cfg: ModelConfig, source: Source, homes: Homes, adapters: Read | None = None):
        """`adapters`: their values; None begins as peft does."""
        self.source, self.homes, self.adapters = source, homes, adapters
        self.shapes = {t.name: t.shape for layout in homes.geo.stored for t in layout.tensors}
        shapes = {name: t.shape for name, t in source.tensors.items()}
        self.stored = hf.sources(cfg, shapes)  # canonical -> source's name
        self.canonical = hf.canonical_names(cfg, shapes)  # source's -> canonical name, None if not trained
        self.base: dict[str, str] = {}  # checksums of frozen weights as they were loaded, by unit
        self.unit = {t.name: u for u, layout in enumerate(homes.geo.stored) for t in layout.tensors}

    def load(self, progress: Progress = silent) -> None:
        """Fills the homes, moments with zeros. Raises InputError as `fill`, StoreError."""
        self._check_tied()
        in_bf16 = {name for name, stored in self.stored.items() if self.source.tensors[stored].dtype == "BF16"}
        fill(self.homes, self._values, in_bf16, progress)
        self.load_base(progress)

    def load_base(self, progress: Progress = silent) -> None:
        """Fills homes of frozen weights alone; a snapshot has the rest. Errors as load."""
        self.base = fill_base(self.homes, self._values, progress)

    def save(self, folder: Path, progress: Progress = silent) -> None:
        """Writes the current checkpoint. Raises StoreError."""
        reader = Reader(self.homes)

        def values(stored: str) -> Iterator[np.ndarray] | None:
            name = self.canonical[stored]
            if name not in self.unit:  # frozen or unused
                return None
            return fetch(reader, self.unit[name], name, exact=self.source.tensors[stored].dtype != "BF16")

        export(self.source, folder, values, progress)

    def replace(self, folder: Path, progress: Progress = silent) -> None:
        """As save, by `replace_folder`."""
        replace_folder(folder, lambda new: self.save(new, progress))

    def _values(self, name: str, first: int, last: int) -> Iterator[np.ndarray]:
        if name in self.stored:
            yield from self.source.values(self.stored[name], first, last)
        elif self.adapters is not None:
            yield from self.adapters(name, first, last)
        else:
            yield initial(name, self.shapes[name]).flatten()[first:last].numpy()

    def _check_tied(self) -> None:
        """Raises InputError where two copies of a tied matrix differ."""
        for stored, name in self.canonical.items():
            first = self.stored.get(name) if name else None
            if first not in (None, stored) and not np.array_equal(self.source.read(first), self.source.read(stored)):
                raise InputError(
                    f"{stored} and {first} are tied by config.json but differ in the files of {self.source.folder}. "
                    'Set "tie_word_embeddings": false in config.json if they are meant to.'
                )


def replace_folder(folder: Path, save: Callable[[Path], None]) -> None:
    """Saves over `folder`, which stands until the new one is whole."""
    new, old = (folder.with_name(folder.name + ending) for ending in (".new", ".old"))
    bring_back(folder)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    save(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def bring_back(folder: Path) -> None:
    """Undoes a replacement that was killed between its renames."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def take_over(folder: Path, out: Path) -> None:
    """Gives `out` the files of `folder`, one by one: by links where the drive has them."""
    for path in (p for p in sorted(folder.rglob("*")) if p.is_file()):
        target = out / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = partial_of(target)
        part.unlink(missing_ok=True)
        try:
            part.hardlink_to(path)
        except OSError:
            shutil.copyfile(path, part)
        part.replace(target)
        sync_folder(target.parent)


# ---------------------------------------------------------------- homes


def fill(homes: Homes, read: Read, in_bf16: Container[str] = (), progress: Progress = silent) -> None:
    """Fills every home: weights as read, moments zero. Raises InputError on values that are not finite.

    `in_bf16`: tensors without low halves.
    """
    blank, homes.blank = homes.blank, False
    with ThreadPoolExecutor(LOADERS) as pool:  # numpy and reads release the GIL
        for u in range(homes.geo.n_units):
            _fill_weights(homes, Entry("weights", u), read, pool, progress)
            for r in range(len(homes.state[u])):
                _fill_record(homes, u, r, read, in_bf16, blank)
                progress(homes.layout(Entry("state", u, r)).span)


def fill_base(homes: Homes, read: Read, progress: Progress = silent) -> dict[str, str]:
    """Fills, or only reads, frozen weights. Returns checksums of what was read, by unit. Errors as `fill`."""
    with ThreadPoolExecutor(LOADERS) as pool:
        units = [(u, name) for u, name in enumerate(homes.geo.names) if homes.geo.base[u].tensors]
        return {name: _fill_weights(homes, Entry("base", u), read, pool, progress) for u, name in units}


def _fill_weights(homes: Homes, entry: Entry, read: Read, pool: ThreadPoolExecutor, progress: Progress) -> str:
    """The checksum of the values read."""
    layout, sums = homes.layout(entry), list[str]()
    if layout.tensors:
        with Writer(homes, entry) as buffer:
            sums += pool.map(lambda t: _fill_weight(t, buffer, read), layout.tensors)
        progress(layout.span)
    return checksum(found.encode() for found in sums)


def _fill_record(homes: Homes, u: int, r: int, read: Read, in_bf16: Container[str], blank: bool) -> None:
    """`blank`: its home in RAM is zero, and so untouched where it stays zero."""
    a, b = homes.geo.records(u, homes.plan.record)[r]
    entry = Entry("state", u, r)
    with Writer(homes, entry) as buffer:
        if not (blank and homes.in_ram(entry) is buffer):
            buffer.zero_()
        if homes.geo.dtype == "F32":
            return  # the weights are the master
        low, start = _numpy(buffer, homes.layout(entry)["lo"]), 0
        for t in homes.geo.stored[u].tensors:
            first, last, at = max(a, start), min(b, start + t.numel), max(a, start) - a
            for values in read(t.name, first - start, last - start) if first < last and t.name not in in_bf16 else ():
                master = torch.from_numpy(convert(values, dtype_of(values), "F32"))
                low[at : at + len(values)] = split_master(master)[1].numpy()
                at += len(values)
            start += t.numel


def fetch(reader: Reader, u: int, name: str, exact: bool) -> Iterator[np.ndarray]:
    """A tensor, flat, in pieces: bf16 bits, or with `exact` the fp32 master."""
    homes, weights = reader.homes, Entry("weights", u)
    t = homes.geo.stored[u][name]
    high = _numpy(reader.read(weights), t)
    if not exact or t.dtype == "F32":
        yield from _pieces(high)
        return
    if homes.in_ram(weights) is None:
        high = high.copy()  # low halves come through the same buffer
    start = t.offset // 2
    for r, (a, b) in enumerate(homes.geo.records(u, homes.plan.record)):
        first, last = max(a, start), min(b, start + t.numel)
        if first < last:
            entry = Entry("state", u, r)
            low = _numpy(reader.read(entry, "low"), homes.layout(entry)["lo"])[first - a : last - a]
            for hi, lo in zip(_pieces(high[first - start : last - start]), _pieces(low), strict=True):
                high_bits = torch.from_numpy(hi.view(np.int16)).view(torch.bfloat16)
                yield join_master(high_bits, torch.from_numpy(lo)).numpy()


# ---------------------------------------------------------------- tensors


def _numpy(buffer: Tensor, t: TensorSpec) -> np.ndarray:
    """Flat; bf16 as bits."""
    return buffer[t.offset : t.offset + t.nbytes].numpy().view(np.int16 if t.dtype == "I16" else NUMPY[t.dtype])


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[a : a + PIECE] for a in range(0, len(values), PIECE))


def _fill_weight(t: TensorSpec, buffer: Tensor, read: Read) -> str:
    """The checksum of the values read."""
    out, at, sums = _numpy(buffer, t), 0, list[str]()
    for raw in summed(read(t.name, 0, t.numel), sums.append):
        values = raw if dtype_of(raw) == t.dtype == "BF16" else convert(raw, dtype_of(raw), "F32")
        exponent = np.uint16(0x7F80) if values.dtype == np.uint16 else np.uint32(0x7F800000)
        if (values.view(exponent.dtype) & exponent).max(initial=0) == exponent:
            raise InputError(f"{t.name} holds NaN or infinite values; the checkpoint is damaged or diverged")
        if dtype_of(values) != t.dtype:
            values = split_master(torch.from_numpy(values))[0].view(torch.int16).numpy().view(np.uint16)
        out[at : at + len(values)] = values
        at += len(values)
    return sums[0]
