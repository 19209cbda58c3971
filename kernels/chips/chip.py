"""A GPU's chip as launches see it: multiprocessors, shared memory, registers, L2, and programs that run at once.

From the CUDA C programming guide, "Compute capabilities". arch 0 is Triton's interpreter: few programs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

KIB = 1 << 10
SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB of a program, by compute capability
USUAL = 99  # of every other chip since Ampere, RTX 30 to 50 among them
WARPS = {80: 64, 87: 48, 90: 64, 100: 64, 103: 64}  # of a multiprocessor; else 48
L2 = 50 << 20  # of an H100


class Chip(NamedTuple):
    arch: int  # compute capability: 90 for sm_90; 0 in the interpreter
    sms: int  # multiprocessors
    l2: int = L2  # bytes

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program can have."""
        return SHARED.get(self.arch, USUAL) * KIB

    @property
    def large(self) -> bool:
        """Whether it is Hopper or B200: launches were measured on Hopper, and B200 has as much shared memory."""
        return self.shared > 200 * KIB

    @property
    def warps(self) -> int:
        """Warps of a multiprocessor."""
        return WARPS.get(self.arch, 48)


described = Chip(89, 128, 72 << 20)  # of tensors without memory: the GPU that is planned for


@cache
def chip(device: torch.device) -> Chip:
    if device.type == "meta":
        return described
    if device.type != "cuda":
        return Chip(0, 2)
    p = torch.cuda.get_device_properties(device)
    return Chip(10 * p.major + p.minor, p.multi_processor_count, p.L2_cache_size)
