"""Packed weights decoded in plain torch, with the names and signatures of the launchers: reference, and CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
STRIP = 1024  # rows decoded at a time
NUMBERS = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])  # by 4 bits


def mxfp4_decode(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fills out (E, 32 G, R), exactly, by blocks (E, R, G, 16) and scales (E, R, G), both uint8 (mxfp4.py)."""
    byte = torch.arange(256)
    both = torch.stack((NUMBERS[byte & 15], NUMBERS[byte >> 4]), 1).to(out.device, torch.bfloat16)
    pairs = both.view(torch.int32)[:, 0]
    powers = torch.where(byte == 0, 1 << 6, byte << 7).to(out.device, torch.int16).view(torch.bfloat16)
    look_up = lambda table, index: table.index_select(0, index.flatten().int())  # thrice as fast as table[index]
    for expert, scale, into in zip(blocks, scales, out, strict=True):
        values = look_up(pairs, expert).view(torch.bfloat16).view(*scale.shape, 32)
        into.copy_((values * look_up(powers, scale).view(*scale.shape, 1)).flatten(1).T)


def e4m3_decode(codes: Tensor, scales: Tensor, out: Tensor, block: tuple[int, int]) -> None:
    """Fills out (M, R, C) by codes (M, R, C) uint8, E4M3, times scales (M, S, T) of blocks, short last ones included:
    fp32, bf16, or uint8, powers of two with a bias of 127. In fp32, then rounded.
    """
    _, R, C = codes.shape
    if scales.dtype == torch.uint8:
        power = scales.int()
        scales = torch.where(power == 0, 1 << 22, power << 23).view(torch.float32)  # 2^-127 has no exponent
    B, K = min(block[0], R), min(block[1], C)
    step = max(1, STRIP // B)  # rows of scales at a time
    for matrix, scale, into in zip(codes, scales.float(), out, strict=True):
        for first, part in enumerate(scale.split(step)):
            rows = slice(first * step * B, (first + 1) * step * B)
            wide = part.repeat_interleave(K, 1)[:, :C].repeat_interleave(B, 0)
            numbers = matrix[rows].view(torch.float8_e4m3fn).float()
            into[rows].copy_(numbers * wide[: len(numbers)])
