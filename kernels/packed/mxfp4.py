"""Experts in MXFP4 (OCP Microscaling Formats 1.0) decoded into the compute dtype, exactly, and transposed.

A number has 4 bits, the highest for its sign; its magnitude is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 (E2M1). A byte has two, the
even one in its low bits; 32 share a scale, a power of two with a bias of 127.
Legend: E experts, R output features, G groups of 32 input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

ROWS, GROUPS = 128, 4  # of a program: 3.3 of 4.3 TB/s on an H200


@triton.jit
def number(b_bits, b_scale):
    """The fp32 value of an E2M1 code that is held in int32, times the scale."""
    b_m = b_bits & 7
    b_large = (((b_m >> 1) + 126) << 23) | ((b_m & 1) << 22)
    b_small = tl.where(b_m == 1, 126 << 23, 0)
    b_signed = tl.where(b_m > 1, b_large, b_small) | ((b_bits & 8) << 28)
    return b_signed.to(tl.float32, bitcast=True) * b_scale


@launcher
@triton.jit
def _mxfp4_decode(
    p_blocks, p_scales, p_out, R: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    await_previous()
    n_groups: tl.constexpr = (G + GROUPS - 1) // GROUPS
    n_rows: tl.constexpr = (R + ROWS - 1) // ROWS
    i_e = (tl.program_id(0) // (n_groups * n_rows)).to(tl.int64)
    i_r, i_g = tl.program_id(0) // n_groups % n_rows, tl.program_id(0) % n_groups
    o_r = i_r * ROWS + tl.arange(0, ROWS)
    o_b = i_g * (GROUPS * 16) + tl.arange(0, GROUPS * 16)
    mask = (o_r < R)[:, None] & (o_b < G * 16)[None, :]
    o_row = (i_e * R + o_r)[:, None]
    b_pair = tl.load(p_blocks + o_row * (G * 16) + o_b[None, :], mask, 0).to(tl.int32)
    b_power = tl.load(p_scales + o_row * G + (o_b // 16)[None, :], mask, 0).to(tl.int32)
    b_scale = tl.where(b_power == 0, 1 << 22, b_power << 23).to(tl.float32, bitcast=True)  # 2^-127 has no exponent
    b_low, b_high = number(b_pair & 15, b_scale), number(b_pair >> 4, b_scale)
    b_x = tl.interleave(b_low.to(p_out.dtype.element_ty), b_high.to(p_out.dtype.element_ty))
    o_c = i_g * (GROUPS * 32) + tl.arange(0, GROUPS * 32)
    p_x = p_out + (i_e * (G * 32) + o_c[:, None]) * R + o_r[None, :]
    tl.store(p_x, tl.trans(b_x), (o_c < G * 32)[:, None] & (o_r < R)[None, :])


def mxfp4_decode(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """As reference.mxfp4_decode, all contiguous."""
    E, R, G, _ = blocks.shape
    assert blocks.shape == (E, R, G, 16)
    assert scales.shape == (E, R, G)
    assert out.shape == (E, 32 * G, R)
    assert blocks.dtype == scales.dtype == torch.uint8
    assert all(t.is_contiguous() for t in (blocks, scales, out))
    grid = (E * cdiv(R, ROWS) * cdiv(G, GROUPS),)
    _mxfp4_decode[grid](blocks, scales, out, R, G, ROWS, GROUPS, num_warps=4)
