"""Copies tensors between a checkpoint's files and the places where a run stores them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trireme.engine.between import Reader, writing
from trireme.engine.placement import Entry, Placement, Progress, silent
from trireme.kernels.fp8 import reference as fp8
from trireme.kernels.optimizer.reference import join_master, split_master
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig, Packing
from trireme.models.lora import initial
from trireme.models.packed import damage
from trireme.models.sizes import narrow
from trireme.models.sizes.narrow import FP8, ROWS, SCALE, in_file
from trireme.models.sizes.shapes import Group, is_frozen
from trireme.storage.checkpoint import NUMPY, Source, convert, dtype_of, export, is_finite
from trireme.storage.layout import TensorSpec
from trireme.storage.untrusted import checksum, summed

Loaded = Callable[[int], object]  # told of units
Read = Callable[[str, int, int], Iterable[np.ndarray]]  # (tensor, first, last) -> elements in pieces
LOADERS = 8  # tensors read at once
PIECE = 1 << 18  # elements at a time, in a core's cache
LARGEST_F16 = 65504.0
BITS = NUMPY | {"I16": np.int16, "I32": np.int32} | dict.fromkeys(("I8", "U8", "F8_E4M3", "F8_E8M0"), np.uint8)


class Exchange:
    """Loads weights from a checkpoint and saves trained ones in its form. Used between steps, when all queues are
    idle.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        source: Source,
        placement: Placement,
        adapters: Read | None = None,
        reader: Reader | None = None,
    ):
        """`adapters`: reads the values of adapters; None: they begin as in peft. `reader`: gives the weights to save;
        None: those of the engine.
        """
        self.reader = reader or Reader(placement)
        self.source, self.placement, self.adapters = source, placement, adapters
        self.read_from = source.computed_in(placement.geo.dtype)
        self.shapes = {t.name: t.shape for layout in placement.geo.stored for t in layout.tensors}
        self.stored = hf.sources(cfg, source.shapes, source.named)  # canonical -> source's name
        self.canonical = hf.canonical_names(cfg, source.shapes)  # source's -> canonical name, None if not trained
        self.base: dict[str, str] = {}  # checksums of frozen weights as they were loaded, by unit
        self.trained = ""  # that of trained ones
        self.clipped: dict[str, int] = {}  # values saved that F16 has not, by tensor
        self.unit = {t.name: u for u, layout in enumerate(placement.geo.stored) for t in layout.tensors}

    def load(self, progress: Progress = silent, loaded: Loaded = silent) -> None:
        """Sets all weights to the checkpoint's and all moments to zero; calls `loaded(u)` when unit u is complete.

        Raises InputError, which names the file, for values that cannot be used; StoreError.
        """
        check_tied(self.source, self.canonical, self.stored)
        in_bf16 = {name for name, stored in self.stored.items() if self.source.place(stored).dtype == "BF16"}
        frozen = {u for u, layout in enumerate(self.placement.geo.base) if layout.tensors}
        callback: Loaded = lambda u: None if u in frozen else loaded(u)
        self.trained = fill(self.placement, self._values, in_bf16, progress, callback)
        self.load_base(progress, loaded)

    def load_base(self, progress: Progress = silent, loaded: Loaded = silent) -> None:
        """Loads the frozen weights alone, when a snapshot has the others. Raises as `load`."""
        self.base = fill_base(self.placement, self._values, progress, loaded)

    def save(self, folder: Path, progress: Progress = silent) -> dict[str, str]:
        """Writes the checkpoint with the trained weights; returns the checksums of its files. Raises StoreError.

        In F16 files, values beyond the largest F16 number are written as that number, and counted in `clipped`.
        """
        self.clipped = {}

        def values(stored: str) -> Iterator[np.ndarray] | None:
            name, dtype = self.canonical[stored], self.source.tensors[stored].dtype
            if name not in self.unit:  # frozen or unused
                return None
            pieces = fetch(self.reader, self.unit[name], name, exact=dtype != "BF16")
            return self._in_f16(stored, pieces) if dtype == "F16" else pieces

        return export(self.source, folder, values, progress)

    def _in_f16(self, stored: str, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """fp32 values limited to the range of F16; counts those that were beyond it."""
        for piece in pieces:
            limited = np.clip(piece, -LARGEST_F16, LARGEST_F16)
            if n := int(np.count_nonzero(limited != piece)):
                self.clipped[stored] = self.clipped.get(stored, 0) + n
            yield limited

    def _values(self, name: str, first: int, last: int) -> Iterator[np.ndarray]:
        """Elements [first, last) of a tensor in pieces, each checked."""
        packing = self.placement.geo.cfg.packing
        packing = packing and packing.of(name)
        part = packing and packing.part_of(name)
        for values in self._read(name, first, last):
            infinite = "" if packing and part or is_finite(values) else "holds NaN or infinite values"
            if fault := damage(packing, part, values) if packing and part else infinite:
                tensor = self.source.named(self.stored.get(name, name))
                raise InputError(f"{tensor} {fault}; the checkpoint is damaged or diverged")
            yield values

    def _read(self, name: str, first: int, last: int) -> Iterator[np.ndarray]:
        if name in self.stored:
            yield from self.read_from.values(self.stored[name], first, last)
        elif self.adapters is not None:
            yield from self.adapters(name, first, last)
        else:
            std = self.placement.geo.cfg.score_std
            yield initial(name, self.shapes[name], std).flatten()[first:last].numpy()


def check_tied(source: Source, canonical: Mapping[str, str | None], stored: Mapping[str, str]) -> None:
    """Raises InputError if the checkpoint has two different copies of one matrix. `canonical`, `stored`: from
    hf.canonical_names and hf.sources.
    """
    for copy, name in canonical.items():
        first = stored.get(name) if name else None
        if first is not None and first != copy and not np.array_equal(source.read(first), source.read(copy)):
            difference = f"differ in the files of {source.folder}"
            if not copy.endswith(hf.OUTPUTS):
                raise InputError(f"{copy} and {first} are two names of one tensor but {difference}. Remove one.")
            raise InputError(
                f"{copy} and {first} are tied by config.json but {difference}. "
                'Set "tie_word_embeddings": false in config.json if they are meant to.'
            )


# ---------------------------------------------------------------- placement


def fill(
    placement: Placement, read: Read, in_bf16: Container[str] = (), progress: Progress = silent, filled: Loaded = silent
) -> str:
    """Stores initial values everywhere: weights as read, moments zero.

    `in_bf16`: names of tensors whose values are bf16, so that the low halves of their masters are zero. Calls
    `filled(u)` when unit u is complete. Returns a checksum of the values read.
    """
    blank, placement.blank = placement.blank, False
    sums = list[str]()
    with ThreadPoolExecutor(LOADERS) as pool:  # numpy and reads release the GIL
        for u in range(placement.geo.n_units):
            sums.append(_fill_weights(placement, Entry("weights", u), read, pool, progress))
            for r in range(len(placement.state[u])):
                _fill_record(placement, u, r, read, in_bf16, blank)
                progress(placement.layout(Entry("state", u, r)).span)
            filled(u)
    for device in placement.queues.devices:
        if device.type == "cuda":  # zeros on the GPU, which other streams read
            torch.cuda.current_stream(device).synchronize()
    return checksum(part.encode() for part in sums)


def fill_base(placement: Placement, read: Read, progress: Progress = silent, filled: Loaded = silent) -> dict[str, str]:
    """Stores frozen weights; in training, those read from the user's checkpoint in each step are only read.

    Returns checksums of the values read, by unit.
    """
    sums, trains = dict[str, str](), placement.geo.cfg.trains
    to_read = lambda v: placement.geo.base[v].tensors and (trains or not placement.in_place(Entry("base", v)))
    with ThreadPoolExecutor(LOADERS) as pool:
        for u, slices in enumerate(placement.geo.slices_of):
            entries = [v for v in (u, *slices) if to_read(v)]
            for v in entries:
                sums[placement.geo.base_names[v]] = _fill_weights(placement, Entry("base", v), read, pool, progress)
            if entries:
                filled(u)
    return sums


def _fill_weights(placement: Placement, entry: Entry, read: Read, pool: ThreadPoolExecutor, progress: Progress) -> str:
    """Fills the weights of one entry; returns the checksum of the values read."""
    layout, sums = placement.layout(entry), list[str]()
    if layout.tensors:
        with writing(placement, entry) as buffer:
            of_units = entry.kind == "base" and entry.u < placement.geo.n_units
            for group in narrow.fp8_groups(placement.geo.cfg, entry.u) if of_units else ():
                if is_frozen(placement.geo.cfg, group):
                    sums += _fill_codes(group, placement, entry, buffer, read, pool)
            plain, packing = [t for t in layout.tensors if not t.name.endswith(FP8)], placement.geo.cfg.packing
            sums += pool.map(lambda t: fill_weight(t, buffer, read, packing), plain)
        progress(layout.span)
    return checksum(part.encode() for part in sums)


def _fill_codes(
    group: Group, placement: Placement, entry: Entry, buffer: Tensor, read: Read, pool: ThreadPoolExecutor
) -> list[str]:
    """Quantises the matrices of one matmul to fp8. They are read twice: the scale depends on the largest value.

    Returns the checksums of the values read.
    """
    layout, dtype, name = placement.layout(entry), placement.geo.dtype, group[0][0]
    sizes = {part: prod(shape) for part, shape in group}
    firsts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    out = _numpy(buffer, layout[name + ROWS])

    def largest(part: str) -> tuple[Tensor, str]:
        sums, maximum = list[str](), torch.zeros(1)
        for raw in summed(read(part, 0, sizes[part]), sums.append):
            for values in map(_tensor, _pieces(_computed(raw, dtype))):
                maximum = torch.maximum(maximum, values.abs().amax().float())
        return maximum, sums[0]

    def write(part: str) -> None:
        offset = firsts[part]
        for raw in read(part, 0, sizes[part]):
            for values in map(_tensor, _pieces(_computed(raw, dtype))):
                out[offset : offset + len(values)] = fp8.codes_of(values.float(), power).view(torch.uint8).numpy()
                offset += len(values)

    maxima = list(pool.map(largest, sizes))
    power = fp8.power_of(torch.stack([maximum for maximum, _ in maxima]).amax(0))
    _numpy(buffer, layout[name + SCALE])[:] = fp8.power2(-power).numpy()
    list(pool.map(write, sizes))
    return [digest for _, digest in maxima]


def _fill_record(placement: Placement, u: int, r: int, read: Read, in_bf16: Container[str], blank: bool) -> None:
    """Fills one record of optimizer state. `blank`: its buffer in RAM is known to be zero, so zeros are not written."""
    a, b = placement.geo.records(u, placement.plan.record)[r]
    entry = Entry("state", u, r)
    stored = placement.stored(entry)
    if stored is not None and stored is not placement.in_ram(entry) and _is_zero(placement, u, in_bf16):
        stored.zero_()  # on the GPU: nothing to bring
        return
    with writing(placement, entry) as buffer:
        if not (blank and placement.in_ram(entry) is buffer):
            buffer.zero_()
        if placement.geo.dtype == "F32":
            return  # the weights are the master
        low, start = _numpy(buffer, placement.layout(entry)["lo"]), 0
        for t in placement.geo.stored[u].tensors:
            first, last, offset = max(a, start), min(b, start + t.numel), max(a, start) - a
            for values in read(t.name, first - start, last - start) if first < last and t.name not in in_bf16 else ():
                master = torch.from_numpy(convert(values, dtype_of(values), "F32"))
                low[offset : offset + len(values)] = split_master(master)[1].numpy()
                offset += len(values)
            start += t.numel


def _is_zero(placement: Placement, u: int, in_bf16: Container[str]) -> bool:
    """Whether all initial values of unit u's records are zero: moments always are, low halves if the weights are
    bf16.
    """
    return placement.geo.dtype == "F32" or all(t.name in in_bf16 for t in placement.geo.stored[u].tensors)


def fetch(reader: Reader, u: int, name: str, exact: bool) -> Iterator[np.ndarray]:
    """The values of a tensor, flat, in pieces: bf16 as uint16 bits, or with `exact` the fp32 masters."""
    placement, weights = reader.placement, Entry("weights", u)
    t = placement.geo.stored[u][name]
    high = _numpy(reader.read(weights), t)
    if not exact or t.dtype == "F32":
        yield from _pieces(high)
        return
    start = t.offset // 2
    for a, b in placement.geo.all_records(u, placement.plan.record):
        first, last = max(a, start), min(b, start + t.numel)
        if first < last:
            low = reader.low(u, a, b).numpy().view(np.int16)[first - a : last - a]
            for hi, lo in zip(_pieces(high[first - start : last - start]), _pieces(low), strict=True):
                high_bits = torch.from_numpy(hi.view(np.int16)).view(torch.bfloat16)
                yield join_master(high_bits, torch.from_numpy(lo)).numpy()


# ---------------------------------------------------------------- tensors


def _numpy(buffer: Tensor, t: TensorSpec) -> np.ndarray:
    """A tensor's values in a buffer, flat; bf16 and fp8 codes as bits."""
    return buffer[t.offset : t.offset + t.nbytes].numpy().view(BITS[t.dtype])


def _tensor(values: np.ndarray) -> Tensor:
    """From numpy: bf16 from its bits, or fp32."""
    bits = values.dtype == np.uint16
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(values)


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[a : a + PIECE] for a in range(0, len(values), PIECE))


def fill_weight(t: TensorSpec, buffer: Tensor, read: Read, packing: Packing | None) -> str:
    """Fills a tensor's part of a buffer; returns the checksum of the values read."""
    out, offset, sums = _numpy(buffer, t), 0, list[str]()
    name, first = in_file(t.name, t.numel)
    packing = packing and packing.of(name)
    part = packing and packing.part_of(name)
    for raw in summed(read(name, first, first + t.numel), sums.append):
        values = raw if part else _computed(raw, t.dtype)
        out[offset : offset + len(values)] = values
        offset += len(values)
    return sums[0]


def _computed(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Values converted to the run's dtype."""
    if dtype_of(raw) == dtype:
        return raw
    values = convert(raw, dtype_of(raw), "F32")
    return (
        values
        if dtype == "F32"
        else split_master(torch.from_numpy(values))[0].view(torch.int16).numpy().view(np.uint16)
    )
