"""NF4 (Dettmers et al. 2023) decoded into the compute dtype: fp32 products, rounded once.

A number is one of 16 values of a table. A byte has two, the even one in its high bits; GROUP numbers of the flattened
matrix share an fp32 scale, their largest magnitude.
Legend: M matrices of L numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.packed.reference import GROUP, NF4

BLOCK = 2048  # bytes of a program; not measured


@launcher
@triton.jit
def _nf4_decode(p_codes, p_scales, p_table, p_out, L: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    n_blocks: tl.constexpr = (L // 2 + BLOCK - 1) // BLOCK
    i_m, i_b = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    o_b = i_b * BLOCK + tl.arange(0, BLOCK)
    mask = o_b < L // 2
    b_pair = tl.load(p_codes + i_m * (L // 2) + o_b, mask, 0).to(tl.int32)
    b_scale = tl.load(p_scales + i_m * ((L + GROUP - 1) // GROUP) + o_b // (GROUP // 2), mask, 0.0)
    b_high, b_low = tl.load(p_table + (b_pair >> 4)) * b_scale, tl.load(p_table + (b_pair & 15)) * b_scale
    b_x = tl.interleave(b_high.to(p_out.dtype.element_ty), b_low.to(p_out.dtype.element_ty))
    o_x = i_b * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(p_out + i_m * L + o_x, b_x, o_x < L)


@cache
def table(device: torch.device) -> Tensor:
    """The numbers, then the middles between them."""
    return torch.cat([NF4, (NF4[1:] + NF4[:-1]) / 2]).to(device)


def nf4_decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """As reference.nf4_decode, all contiguous."""
    M, L = out.shape
    assert L % 2 == 0
    assert codes.shape == (M, L // 2)
    assert scales.shape == (M, cdiv(L, GROUP))
    assert codes.dtype == torch.uint8
    assert scales.dtype == torch.float32
    assert all(t.is_contiguous() for t in (codes, scales, out))
    _nf4_decode[(M * cdiv(L // 2, BLOCK),)](codes, scales, table(codes.device), out, L, GROUP, BLOCK, num_warps=4)
