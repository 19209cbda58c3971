"""Layouts striped over drives, a safetensors file on each: by whole tensors, which any reader can read, or by turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trireme.storage.headers import encode_header
from trireme.storage.layout import ALIGN, Layout, TensorSpec, round_up

MOST_TURNS = 8  # of the fastest device to one of the slowest


@dataclass(frozen=True)
class Stripe:
    """The part of a shard on one device, a safetensors file.

    `segments`: (offset in the shard, offset in the file's data, bytes). All are multiples of 4,096 but the last one's
    bytes.
    """

    device: int
    layout: Layout
    segments: tuple[tuple[int, int, int], ...]

    @cached_property
    def header(self) -> bytes:
        """The file's header, a multiple of 4,096 bytes."""
        return encode_header(self.layout, {"format": "pt"})

    @property
    def nbytes(self) -> int:
        """Exact size of the file."""
        return len(self.header) + self.layout.nbytes

    @property
    def capacity(self) -> int:
        """Size of the file while it is in use: whole blocks."""
        return len(self.header) + self.layout.span

    def data_of(self, span: memoryview) -> list[memoryview]:
        """Views of the shard's buffer `span`, in the order of the file's data."""
        return [span[at : at + n] for at, _, n in self.segments]


def turns(speeds: Sequence[float]) -> tuple[int, ...]:
    """The device of each part in a round: faster ones have more of them, spread evenly."""
    counts = [min(MOST_TURNS, round(speed / min(speeds))) for speed in speeds]
    return tuple(d for _, d in sorted(((i + 0.5) / n, d) for d, n in enumerate(counts) for i in range(n)))


def stripe_turns(layout: Layout, speeds: Sequence[float]) -> tuple[Stripe, ...]:
    """Cuts a layout into the parts of one round. A part of a tensor is U8, named `name[begin:end]` by its bytes."""
    order, stripes = turns(speeds), []
    size = round_up(-(-layout.nbytes // len(order)))
    for device in range(len(speeds)):
        tensors: list[TensorSpec] = []
        segments: list[tuple[int, int, int]] = []
        for begin in range(0, layout.nbytes, size or 1):
            if order[begin // size] == device:
                offset, end = sum(n for _, _, n in segments), min(begin + size, layout.nbytes)
                tensors += _window(layout, begin, end, offset)
                segments.append((begin, offset, end - begin))
        if segments:
            stripes.append(Stripe(device, Layout(tuple(tensors)), tuple(segments)))
    return tuple(stripes)


def _window(layout: Layout, begin: int, end: int, offset: int) -> list[TensorSpec]:
    """The tensors, and parts of tensors, within bytes [begin, end), which are moved to `offset`."""
    tensors = []
    for t in layout.tensors:
        lo, hi = max(begin, t.offset), min(end, t.offset + t.nbytes)
        if (lo, hi) == (t.offset, t.offset + t.nbytes):
            tensors.append(TensorSpec(t.name, t.dtype, t.shape, offset + lo - begin))
        elif lo < hi:
            name = f"{t.name}[{lo - t.offset}:{hi - t.offset}]"
            tensors.append(TensorSpec(name, "U8", (hi - lo,), offset + lo - begin))
    return tensors


def stripe_tensors(layout: Layout, speeds: Sequence[float], load: list[float]) -> tuple[Stripe, ...]:
    """Assigns whole tensors to devices, so that any reader can read them: the largest first, each to the device that
    ends first.

    `load`: seconds of work of each device so far, is updated. Tensors from the first one that does not fill whole
    blocks are all on one device: they have no block-aligned offsets of their own.
    """
    aligned = [t for t in layout.tensors if t.offset % ALIGN == 0 and t.nbytes % ALIGN == 0]
    aligned = aligned[: next((i for i, t in enumerate(aligned) if t != layout.tensors[i]), len(aligned))]
    rest = layout.tensors[len(aligned) :]
    dealt: list[list[TensorSpec]] = [[] for _ in speeds]

    def deal(tensors: Sequence[TensorSpec]) -> None:
        nbytes = sum(t.nbytes for t in tensors)
        device = min(range(len(speeds)), key=lambda d: load[d] + nbytes / speeds[d])
        load[device] += nbytes / speeds[device]
        dealt[device].extend(tensors)

    for t in sorted(aligned, key=lambda t: -t.nbytes):
        deal([t])
    deal(rest)
    return tuple(_whole_stripe(d, sorted(ts, key=lambda t: t.offset)) for d, ts in enumerate(dealt) if ts)


def _whole_stripe(device: int, tensors: list[TensorSpec]) -> Stripe:
    """A stripe of these tensors, in the fewest segments."""
    specs, offset = [], 0
    segments: list[tuple[int, int, int]] = []
    for t in tensors:
        specs.append(TensorSpec(t.name, t.dtype, t.shape, offset))
        if segments and segments[-1][0] + segments[-1][2] == t.offset:
            at, begin, n = segments[-1]
            segments[-1] = (at, begin, n + t.nbytes)
        elif t.nbytes:
            segments.append((t.offset, offset, t.nbytes))
        offset += t.nbytes
    return Stripe(device, Layout(tuple(specs)), tuple(segments))
