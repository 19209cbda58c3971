"""Packed weights decoded in plain torch, with the names and signatures of the launchers: reference, and CPU path."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
STRIP = 1024  # rows decoded at a time
NUMBERS = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])  # by 4 bits


class Adapters(NamedTuple):
    """What is added to matrices before they are rounded: scale * left^T right for each expert."""

    left: Tensor  # (E, r, n * height), from a first row on; bf16 or fp32
    right: Tensor  # (E, r, C), of the dtype of `left`
    scale: float
    matrices: int  # n, of an expert
    height: int  # rows of each, of which there may be fewer here

    def add_to(self, x: Tensor) -> None:
        """Adds to x (1 or n, R, C) fp32, all of an expert or rows of one of its matrices."""
        rows = x.shape[0] * x.shape[1]
        left, right = self.left[0, :, :rows].T.float(), self.right[0].float()
        x.view(rows, -1).addmm_(left, right, alpha=self.scale)


def _powers(exponents: Tensor) -> Tensor:
    """Powers of two, fp32, of exponents uint8 with a bias of 127."""
    power = exponents.int()
    return torch.where(power == 0, 1 << 22, power << 23).view(torch.float32)  # 2^-127 is subnormal


def e4m3_decode(codes: Tensor, scales: Tensor, out: Tensor, block: tuple[int, int]) -> None:
    """Decodes codes (M, R, C), E4M3 as uint8, into out (M, R, C): times their block's scale in fp32, then rounded.

    scales (M, S, T) are of blocks of `block` = (rows, columns), the last of which may be short: fp32, fp16, bf16, or
    uint8, exponents of powers of two with a bias of 127.
    """
    _, R, C = codes.shape
    if scales.dtype == torch.uint8:
        scales = _powers(scales)
    B, K = min(block[0], R), min(block[1], C)
    step = max(1, STRIP // B)  # rows of scales at a time
    for matrix, scale, target in zip(codes, scales.float(), out, strict=True):
        for first, part in enumerate(scale.split(step)):
            rows = slice(first * step * B, (first + 1) * step * B)
            factors = part.repeat_interleave(K, 1)[:, :C].repeat_interleave(B, 0)
            numbers = matrix[rows].view(torch.float8_e4m3fn).float()
            target[rows].copy_(numbers * factors[: len(numbers)])


GROUP = 64  # numbers that share a scale in NF4
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def nf4_decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Decodes codes (M, L / 2) uint8, the even number in the high bits, into out (M, L): in fp32, then rounded.

    scales (M, L / GROUP rounded up) fp32; L is even.
    """
    table = NF4.to(codes.device)
    for pairs, scale, target in zip(codes, scales, out, strict=True):
        for first in range(0, len(pairs), STRIP * GROUP):
            part = pairs[first : first + STRIP * GROUP].int()
            numbers = table[torch.stack((part >> 4, part & 15), 1).flatten()]
            factors = scale[2 * first // GROUP :].repeat_interleave(GROUP)[: len(numbers)]
            target[2 * first : 2 * first + len(numbers)].copy_(numbers * factors)


def fp4_decode(codes: Tensor, scales: Tensor, scale: Tensor | None, out: Tensor, divide: bool = False) -> None:
    """Decodes codes (M, R, C / 2) uint8, E2M1, the even number in the low bits, into out (M, R, C).

    scales (M, R, G) uint8 are of groups of C / G columns. Without `scale` they are exponents of powers of two with a
    bias of 127. With `scale` (M,) fp32, one for each matrix, they are E4M3 and are multiplied by it, or divided if
    `divide`. In fp32, then rounded.
    """
    for i, (pairs, group_scales, target) in enumerate(zip(codes, scales, out, strict=True)):
        if scale is None:
            row_factors = _powers(group_scales)
        else:
            row_factors = group_scales.view(torch.float8_e4m3fn).float()
            row_factors = row_factors / scale[i] if divide else row_factors * scale[i]
        for a in range(0, len(pairs), STRIP):
            part = pairs[a : a + STRIP].int()
            numbers = NUMBERS.to(codes.device)[torch.stack((part & 15, part >> 4), -1).flatten(1)]
            factors = row_factors[a : a + STRIP].repeat_interleave(out.shape[2] // group_scales.shape[1], 1)
            target[a : a + STRIP].copy_(numbers * factors)


def int4_decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group: int) -> None:
    """Fills out (M, R, C) with (code - zero) * scale of each group of `group` columns, in fp32, then rounded.

    codes (M, R, C / 8), scales (M, R, G), zeros (M, R / 8 rounded up, G), of eight rows in a word; without them 8.
    Codes and zeros are int32 words of eight numbers, the first in the lowest bits. `group` is a multiple of 8.
    """
    _, R, C = out.shape
    index = torch.arange(C, device=codes.device) // group
    bits = 4 * torch.arange(8, device=codes.device, dtype=torch.int32)
    unpacked = lambda words: (words[..., None] >> bits & 15).flatten(-2)  # along the last dimension
    for i, (words, scale, target) in enumerate(zip(codes, scales, out, strict=True)):
        zero = 8 if zeros is None else unpacked(zeros[i].mT).mT[:R].index_select(1, index)
        target.copy_((unpacked(words) - zero).float() * scale.float().index_select(1, index))
