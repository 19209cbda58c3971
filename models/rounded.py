"""Packed matrices plus their adapters, rounded to the packing again: what `merge --format same` will make of them.

With Lora.aware a run multiplies by them, and adapters get the gradients that they have in the plain sum, a
straight-through estimator (Bengio et al., arXiv:1308.3432). Decoders and encoders are those of the merge.

Legend: E experts, or one matrix; n packed matrices of R x C numbers for each, as gate and up; r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from trireme.kernels.packed.reference import Adapters
from trireme.models.encoding import SMALLEST, e4m3_scales, encoded, needs_extent, nvfp4_factor
from trireme.models.families.packing import MX, Packing
from trireme.models.packed import DTYPE, decode, in_file_order

STRIP = 1 << 22  # numbers that are in fp32 at a time: 16 MiB, which stay in the L2 of large GPUs
Strip = tuple[slice, slice]  # matrices of an expert and their rows


def decode_sum(
    packing: Packing, parts: Sequence[Tensor], a: Tensor, b: Tensor, scale: float, out: Tensor, out_in: bool
) -> Tensor:
    """As packed.decode, of one matrix or those of experts to which scale * adapters a (E, r, in), b (E, r, out) are
    added. `out_in`: whether `out` has a row for each output.
    """
    target = result = out
    if packing.code == "e2m1":
        result, out_in = in_file_order(out), True
        target, packing, parts = result.mT, replace(MX, block=packing.block), (parts[0].flatten(2), parts[1])
    by_row, by_column = (b, a) if out_in else (a, b)
    count, columns = prod(parts[0].shape[:-2]), by_column.shape[2]
    shape = target.numel() // (count * columns), columns
    parts = [part.view(count, *dims) for part, dims in zip(parts, packing.shapes(shape), strict=True)]
    target, per_expert = target.view(count, *shape), count // len(a)
    extent = target.new_zeros(count, dtype=torch.float32)
    by_row, by_column = by_row.contiguous(), by_column.contiguous()

    def read(strip: Strip) -> tuple[Tensor, Adapters]:
        """(the matrices of an expert, or rows of one, in fp32; their adapters)."""
        matrices, rows = strip
        x = torch.empty(target[strip].shape, dtype=torch.float32, device=target.device)
        decode(packing, _pieces(packing, parts, shape, strip), x)
        e, m = divmod(matrices.start, per_expert)
        return x, Adapters(by_row[e:, :, m * shape[0] + rows.start :], by_column[e:], scale, per_expert, shape[0])

    if packing.exact and target.device.type != "cpu":  # `target` holds the decoded numbers: all are rounded in place
        decode(packing, parts, target)
        if try_launch(packing, target, Adapters(by_row, by_column, scale, per_expert, shape[0]), extent, target):
            return result
    strips = list(_strips(packing, len(a), per_expert, shape))
    for strip in strips if needs_extent(packing) else ():
        x, adapters = read(strip)
        adapters.add_to(x)
        torch.maximum(extent[strip[0]], x.abs().amax((1, 2)), out=extent[strip[0]])
    for strip in strips:
        x, adapters = read(strip)
        if target.device.type == "cpu" or not try_launch(packing, x, adapters, extent[strip[0]], target[strip]):
            adapters.add_to(x)
            pairs = zip(encoded(packing, x, extent[strip[0]]), packing.shapes(x.shape), strict=True)
            decode(packing, [part.contiguous().view(dims) for part, dims in pairs], target[strip])
    return result


def try_launch(packing: Packing, x: Tensor, adapters: Adapters | None, extent: Tensor, out: Tensor) -> bool:
    """Rounds x plus adapters by a launch for its packing and shape; False, and x as it was, if there is none."""
    from trireme.kernels.packed import rounding  # Triton, which nothing on a CPU needs

    rows, columns = x.shape[1:]
    group, kind = min(packing.block[1], columns), packing.parts[1].dtypes[0]
    if packing.code == "e4m3":
        block = min(packing.block[0], rows), group
        if rows % block[0] or columns % block[1]:
            return False
        if adapters:
            adapters.add_to(x)
        blocks = x.unflatten(2, (-1, block[1])).unflatten(1, (-1, block[0]))
        amax = torch.maximum(blocks.amax((2, 4)), -blocks.amin((2, 4)))
        factor, inverse, scales = e4m3_scales(packing, amax, extent.view(-1, 1, 1))
        scales_fp32 = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
        rounding.e4m3_round(x, factor, scales_fp32, out, block, inverse)
        return True
    if group & (group - 1) or group > rounding.LARGEST_GROUP or columns % group:
        return False
    if packing.code == "nf4":
        rounding.nf4_round(x, adapters, out)
    elif packing.code == "int4":
        like = x.new_empty(0, dtype=DTYPE[kind])
        rounding.int4_round(x, adapters, like, out, group, len(packing.parts) == 3, SMALLEST[kind])
    else:
        global_factor = nvfp4_factor(extent) if len(packing.parts) == 3 else None
        rounding.fp4_round(x, adapters, global_factor, out, group, packing.divides)
    return True


def _strips(packing: Packing, experts: int, per_expert: int, shape: tuple[int, int]) -> Iterator[Strip]:
    """The matrices of an expert, or of larger ones some rows, in whole blocks. Products, and so their bits, are the
    same however experts are divided into slices.
    """
    rows, columns = shape
    if per_expert * rows * columns <= STRIP:
        yield from ((slice(e * per_expert, (e + 1) * per_expert), slice(0, rows)) for e in range(experts))
        return
    step = packing.step(shape)
    step *= max(1, STRIP // (step * columns))
    for m in range(experts * per_expert):
        for first in range(0, rows, step):
            yield slice(m, m + 1), slice(first, min(first + step, rows))


def _pieces(packing: Packing, parts: Sequence[Tensor], shape: tuple[int, int], strip: Strip) -> list[Tensor]:
    """What belongs to a strip in each part."""
    matrices, rows = strip
    starts = packing.starts(shape, rows.start)
    ends = packing.starts(shape, rows.stop) if rows.stop < shape[0] else tuple(part.shape[1] for part in parts)
    # of a part with one element for the whole matrix, all strips have it
    spans = (slice(a, max(b, a + 1)) for a, b in zip(starts, ends, strict=True))
    return [part[matrices, span] for part, span in zip(parts, spans, strict=True)]
