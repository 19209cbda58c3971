"""Matrix multiplications in fp8 on a GPU, by cuBLASLt; on sm_120 by a kernel that has its full rate.

cuBLASLt has one layout on sm_89 and sm_90: a row-major, b column-major. torch calls it where nothing is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.fp8 import block_scaled, cublaslt
from trireme.kernels.launch import chip

FAST = False  # True: sums of sm_90's matrix unit alone, off by 2e-3, and no faster there; False: in fp32 now and then


def fp8_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As reference.fp8_matmul. K and N are multiples of 16."""
    if chip(a.device).arch // 10 == 12:
        return block_scaled.fp8_matmul(a, scale_a, b, scale_b, out, bias)
    torch._scaled_mm(a, b.T, scale_a, scale_b, bias, None, out.dtype, FAST, out=out)
    return out


def fp8_add_(out_: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> None:
    """As reference.fp8_add_, all contiguous. K and N are multiples of 16."""
    own = block_scaled if chip(out_.device).arch // 10 == 12 else cublaslt
    own.fp8_add_(out_, a, scale_a, b, scale_b)
