"""Packed weights decoded in plain torch, with the names and signatures of the launchers: reference, and CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
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
