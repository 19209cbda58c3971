"""E2M1 with a scale for each group of a row, decoded into the compute dtype: fp32 products, rounded once.

A number has 4 bits, the highest for its sign; its magnitude is 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
Scales are powers of two with a bias of 127 (OCP Microscaling Formats 1.0): decoding is exact. Or they are E4M3 and are
first multiplied or divided, in fp32, by the fp32 scale of the matrix (NVFP4).
Legend: M matrices of R x C numbers, two in a byte, the even one low; G groups in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.packed import e4m3

BLOCK = 1024  # bytes of a program; not measured
e4m3_number = e4m3.number


@triton.jit
def _number(b_bits, b_scale):
    """The fp32 value of an E2M1 code that is held in int32, times the scale."""
    b_m = b_bits & 7
    b_large = (((b_m >> 1) + 126) << 23) | ((b_m & 1) << 22)
    b_small = tl.where(b_m == 1, 126 << 23, 0)
    b_signed = tl.where(b_m > 1, b_large, b_small) | ((b_bits & 8) << 28)
    return b_signed.to(tl.float32, bitcast=True) * b_scale


@launcher
@triton.jit
def _fp4_decode(
    p_codes, p_scales, p_scale, p_out, L: tl.constexpr, GROUP: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr
):
    await_previous()
    n_blocks: tl.constexpr = (L // 2 + BLOCK - 1) // BLOCK
    i_m, i_b = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    o_b = i_b * BLOCK + tl.arange(0, BLOCK)
    mask = o_b < L // 2
    b_pair = tl.load(p_codes + i_m * (L // 2) + o_b, mask, 0).to(tl.int32)
    b_byte = tl.load(p_scales + i_m * (L // GROUP) + o_b // (GROUP // 2), mask, 0).to(tl.int32)
    if p_scale is not None:
        b_all = tl.load(p_scale + i_m)
        b_scale = e4m3_number(b_byte)
        b_scale = tl.div_rn(b_scale, b_all) if DIVIDE else b_scale * b_all
    else:
        b_scale = tl.where(b_byte == 0, 1 << 22, b_byte << 23).to(tl.float32, bitcast=True)  # 2^-127 has no exponent
    b_low, b_high = _number(b_pair & 15, b_scale), _number(b_pair >> 4, b_scale)
    b_x = tl.interleave(b_low.to(p_out.dtype.element_ty), b_high.to(p_out.dtype.element_ty))
    o_x = i_b * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(p_out + i_m * L + o_x, b_x, o_x < L)


def fp4_decode(codes: Tensor, scales: Tensor, scale: Tensor | None, out: Tensor, divide: bool = False) -> None:
    """As reference.fp4_decode, all contiguous."""
    M, R, C = out.shape
    G = scales.shape[2]
    group = C // G
    assert G * group == C
    assert group % 2 == 0
    assert codes.shape == (M, R, C // 2)
    assert scales.shape == (M, R, G)
    assert codes.dtype == scales.dtype == torch.uint8
    assert scale is None or (scale.shape == (M,) and scale.dtype == torch.float32)
    assert all(t.is_contiguous() for t in (codes, scales, out))
    grid = (M * cdiv(R * C // 2, BLOCK),)
    _fp4_decode[grid](codes, scales, scale, out, R * C, group, divide, BLOCK, num_warps=4)
