"""RMSNorm (rmsnorm.py) with a quantized result, which is never written to memory in bf16.

Two passes over x: first the statistics of rows and the largest value of a result rounded to bf16; then the codes,
bitwise identical to those of `quantize` after a norm with these statistics. Legend: N tokens, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.fp8.quantize import bits_of, store_codes
from trireme.kernels.fp8.reference import PAD, Quantized
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

WIDE = tl.constexpr(8)  # neighbours, as many as a memory access has, of which a thread keeps the largest


@launcher
@triton.jit(do_not_specialize=["N"])
def _rmsnorm_maxima(
    p_x,
    p_w,
    p_rstd,
    p_most,
    N,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    await_previous()
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_w = tl.load(p_w + o_d, m_d, 0.0).to(tl.float32)
    b_most = tl.zeros((ROWS, BLOCK_D // WIDE), tl.int32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        i_row = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (i_row < N)[:, None] & m_d[None, :]
        b_x = tl.load(p_x + i_row[:, None] * D + o_d[None, :], mask, 0.0).to(tl.float32)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
        tl.store(p_rstd + i_row, b_rstd, i_row < N)
        b_y = (b_x * b_rstd[:, None] * b_w[None, :]).to(p_x.dtype.element_ty).to(tl.float32)
        b_most = tl.maximum(b_most, tl.max(tl.reshape(bits_of(b_y), (ROWS, BLOCK_D // WIDE, WIDE)), 2))
    tl.store(p_most + tl.program_id(0), tl.max(tl.max(b_most, 1), 0))


def rmsnorm_codes(
    x: Tensor, weight: Tensor, eps: float, rows: bool = True, columns: bool = False
) -> tuple[Quantized, Tensor]:
    """As reference.rmsnorm_codes, contiguous. In neither order only rstd is computed, and the scale is undefined."""
    N, D = x.shape
    assert x.is_contiguous()
    assert weight.shape == (D,)
    assert weight.is_contiguous()
    assert D % PAD == 0
    rstd = torch.empty(N, dtype=torch.float32, device=x.device)
    tile = launch.rows_maxima(D)
    programs = launch.maxima(x.device, cdiv(N, tile.rows))
    most = torch.empty(programs, dtype=torch.int32, device=x.device)
    _rmsnorm_maxima[(programs,)](
        x, weight, rstd, most, N, eps, D, tile.rows, tile.columns, tile.stages, num_warps=tile.warps
    )
    if not rows and not columns:
        return Quantized(torch.empty(1, device=x.device), None, None), rstd
    return store_codes(x, most, rows, columns, norm=(rstd, weight)), rstd
