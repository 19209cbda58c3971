"""Layouts striped over drives: one safetensors file on each drive, with a size by the drive's speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from trireme.storage.headers import encode_header
from trireme.storage.layout import ALIGN, Layout, TensorSpec


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


def check_stripes(layout: Layout, stripes: Sequence[Stripe]) -> None:
    """Raises ValueError unless the stripes hold each byte once, in whole blocks, with one stripe on a device."""
    if any(a.device >= b.device for a, b in pairwise(stripes)):
        raise ValueError("two stripes are on one device")
    for stripe in stripes:
        ends = accumulate((n for _, _, n in stripe.segments), initial=0)
        if [*(offset for _, offset, _ in stripe.segments), stripe.layout.nbytes] != list(ends):
            raise ValueError("the segments of a stripe are not its data")
    end = 0
    for at, offset, n in sorted(segment for stripe in stripes for segment in stripe.segments):
        if at != end or n == 0 or at % ALIGN or offset % ALIGN:
            raise ValueError("the stripes are not the whole of a shard")
        end += n
    if end != layout.nbytes:
        raise ValueError("the stripes are not the whole of a shard")


def stripe_bytes(layout: Layout, speeds: Sequence[float]) -> tuple[Stripe, ...]:
    """Cuts a layout by speed alone, so that devices end together. A part of a tensor is U8, named `name[begin:end]` by
    its bytes.
    """
    stripes, begin, total = [], 0, sum(speeds)
    for device in range(len(speeds)):
        share = sum(speeds[: device + 1]) / total
        end = (
            layout.nbytes
            if device == len(speeds) - 1
            else min(layout.nbytes, round(layout.span * share) // ALIGN * ALIGN)
        )
        if end > begin:
            stripes.append(Stripe(device, _window(layout, begin, end), ((begin, 0, end - begin),)))
            begin = end
    return tuple(stripes)


def _window(layout: Layout, begin: int, end: int) -> Layout:
    """The tensors, and parts of tensors, within bytes [begin, end)."""
    tensors = []
    for t in layout.tensors:
        lo, hi = max(begin, t.offset), min(end, t.offset + t.nbytes)
        if (lo, hi) == (t.offset, t.offset + t.nbytes):
            tensors.append(TensorSpec(t.name, t.dtype, t.shape, lo - begin))
        elif lo < hi:
            name = f"{t.name}[{lo - t.offset}:{hi - t.offset}]"
            tensors.append(TensorSpec(name, "U8", (hi - lo,), lo - begin))
    return Layout(tuple(tensors))


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
