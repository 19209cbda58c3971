"""Integers of 4 bits, eight in a word of 32, decoded into the compute dtype: fp32 products, rounded once.

A number is (code - zero point) * scale of its group of columns, as compressed-tensors has it: reference.int4_decode
describes it. A word and its scale are read once for eight numbers.
Legend: M matrices of R x C numbers, G groups of K columns, the last of which may be short.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

ROWS, WORDS = 4, 64  # rows, and words of each, of a program


@launcher
@triton.jit
def _int4_decode(
    p_codes, p_scales, p_zeros, p_out, R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    await_previous()
    n_columns: tl.constexpr = (C // 8 + WORDS - 1) // WORDS
    n_rows: tl.constexpr = (R + ROWS - 1) // ROWS
    i_m = (tl.program_id(0) // (n_columns * n_rows)).to(tl.int64)
    i_r, i_c = tl.program_id(0) // n_columns % n_rows, tl.program_id(0) % n_columns
    o_r, o_w = (i_r * ROWS + tl.arange(0, ROWS))[:, None], (i_c * WORDS + tl.arange(0, WORDS))[None, :]
    mask = (o_r < R) & (o_w < C // 8)
    o_g = o_w // (K // 8)
    b_word = tl.load(p_codes + i_m * (R * C // 8) + o_r * (C // 8) + o_w, mask, 0)
    b_scale = tl.load(p_scales + i_m * (R * G) + o_r * G + o_g, mask, 0.0).to(tl.float32)
    b_zero = tl.full((ROWS, WORDS), 8, tl.int32)
    if p_zeros is not None:
        n_words: tl.constexpr = (R + 7) // 8 * G
        b_zero = (tl.load(p_zeros + i_m * n_words + o_r // 8 * G + o_g, mask, 0) >> (4 * (o_r % 8))) & 15
    o_in = tl.arange(0, 8)[None, None, :]
    b_x = (((b_word[:, :, None] >> (4 * o_in)) & 15) - b_zero[:, :, None]).to(tl.float32) * b_scale[:, :, None]
    o_out = (i_m * R + o_r[:, :, None]) * C + o_w[:, :, None] * 8 + o_in
    tl.store(p_out + o_out, b_x.to(p_out.dtype.element_ty), mask[:, :, None])


def int4_decode(codes: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, group: int) -> None:
    """As reference.int4_decode, all contiguous."""
    M, R, C = out.shape
    G = cdiv(C, group)
    assert C % 8 == group % 8 == 0
    assert codes.shape == (M, R, C // 8)
    assert scales.shape == (M, R, G)
    assert zeros is None or zeros.shape == (M, cdiv(R, 8), G)
    assert codes.dtype == torch.int32
    assert all(t.is_contiguous() for t in (codes, scales, out))
    grid = (M * cdiv(R, ROWS) * cdiv(C // 8, WORDS),)
    _int4_decode[grid](codes, scales, zeros, out, R, C, G, group, ROWS, WORDS, num_warps=4)
