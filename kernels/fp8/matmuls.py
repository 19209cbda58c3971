"""Matrix multiplications in fp8 on a GPU: by cuBLASLt, and on sm_120 by a kernel that reaches the chip's full rate.

On sm_89 and sm_90 cuBLASLt has one layout: a row-major, b column-major. torch calls it where the result is not added to
a matrix; fp8/cublaslt.py calls it where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.fp8 import block_scaled, cublaslt
from trireme.kernels.launch import chip


def fp8_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As reference.fp8_matmul. K and N are multiples of 16."""
    if chip(a.device).arch // 10 == 12:
        return block_scaled.fp8_matmul(a, scale_a, b, scale_b, out, bias)
    # without "fast" accumulation: on sm_90 that leaves sums in the matrix unit, errs by 2e-3, and is not faster
    torch._scaled_mm(a, b.T, scale_a, scale_b, bias, None, out.dtype, False, out=out)
    return out


def fp8_add_(out_: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> None:
    """As reference.fp8_add_, all contiguous. K and N are multiples of 16."""
    backend = block_scaled if chip(out_.device).arch // 10 == 12 else cublaslt
    backend.fp8_add_(out_, a, scale_a, b, scale_b)
