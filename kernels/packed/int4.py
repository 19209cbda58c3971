"""Integers of 4 bits, eight in a word of 32, decoded into the compute dtype: fp32 products, rounded once.

A number is (code - zero point) * scale of its group of columns. Words are ordered as compressed-tensors ("rows"), GPTQ
(Frantar et al. 2022, as AutoGPTQ stores it) or AWQ (Lin et al. 2023, as AutoAWQ's GEMM reads it) have them:
reference.int4_decode describes these orders.
Legend: M matrices of R x C numbers, G groups of K columns, the last of which may be short.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

ROWS, COLUMNS = 32, 64  # of a program
SHORT, WORDS = 4, 64  # rows, and words of each, where words lie along rows
ORDERS = {"rows": 0, "gptq": 1, "awq": 2}


@triton.jit
def _bits(b_word, o, ORDER: tl.constexpr):
    """The code with index o % 8 in a word, in the order that ORDER says."""
    o_in = o % 8
    if ORDER == 2:
        o_in = o_in // 2 + o_in % 2 * 4
    return (b_word >> (4 * o_in)) & 15


@launcher
@triton.jit
def _int4_decode(
    p_codes,
    p_scales,
    p_zeros,
    p_groups,
    p_out,
    R: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    ORDER: tl.constexpr,
    ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    await_previous()
    n_columns: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    n_rows: tl.constexpr = (R + ROWS - 1) // ROWS
    i_m = (tl.program_id(0) // (n_columns * n_rows)).to(tl.int64)
    i_r, i_c = tl.program_id(0) // n_columns % n_rows, tl.program_id(0) % n_columns
    o_r, o_c = (i_r * ROWS + tl.arange(0, ROWS))[:, None], (i_c * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    mask = (o_r < R) & (o_c < C)
    o_g = o_c // K if ORDERED else tl.load(p_groups + i_m * C + o_c, o_c < C, 0)
    if ORDER == 0:
        o_word, o_scale, o_zero = o_r * (C // 8) + o_c // 8, o_r * G + o_g, o_r // 8 * G + o_g
    else:
        o_word = o_c // 8 * R + o_r if ORDER == 1 else o_c * (R // 8) + o_r // 8
        o_scale, o_zero = o_g * R + o_r, o_g * (R // 8) + o_r // 8
    b_word = tl.load(p_codes + i_m * (R * C // 8) + o_word, mask, 0)
    b_code = _bits(b_word, o_r if ORDER == 2 else o_c, ORDER)
    b_zero = 8
    if ZEROS:
        n_words: tl.constexpr = (R + 7) // 8 * G
        b_zero = _bits(tl.load(p_zeros + i_m * n_words + o_zero, mask, 0), o_r, ORDER) + OFFSET
    b_scale = tl.load(p_scales + i_m * (R * G) + o_scale, mask, 0.0).to(tl.float32)
    b_x = (b_code - b_zero).to(tl.float32) * b_scale
    tl.store(p_out + (i_m * R + o_r) * C + o_c, b_x.to(p_out.dtype.element_ty), mask)


@launcher
@triton.jit
def _int4_decode_rows(
    p_codes,
    p_scales,
    p_zeros,
    p_out,
    R: tl.constexpr,
    C: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    ZEROS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Order "rows", groups of whole words: a word and its scale are read once for eight numbers."""
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
    if ZEROS:
        n_words: tl.constexpr = (R + 7) // 8 * G
        b_zero = _bits(tl.load(p_zeros + i_m * n_words + o_r // 8 * G + o_g, mask, 0), o_r, 0) + OFFSET
    o_in = tl.arange(0, 8)[None, None, :]
    b_x = (((b_word[:, :, None] >> (4 * o_in)) & 15) - b_zero[:, :, None]).to(tl.float32) * b_scale[:, :, None]
    o_out = (i_m * R + o_r[:, :, None]) * C + o_w[:, :, None] * 8 + o_in
    tl.store(p_out + o_out, b_x.to(p_out.dtype.element_ty), mask[:, :, None])


def int4_decode(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    out: Tensor,
    group: int,
    order: str,
    offset: int = 0,
    groups: Tensor | None = None,
) -> None:
    """As reference.int4_decode, all contiguous."""
    M, R, C = out.shape
    G, rows = cdiv(C, group), order == "rows"
    words = {"rows": (R, C // 8), "gptq": (C // 8, R), "awq": (C, R // 8)}[order]
    assert C % 8 == 0
    assert rows or R % 8 == 0
    assert codes.shape == (M, *words)
    assert scales.shape == ((M, R, G) if rows else (M, G, R))
    assert zeros is None or zeros.shape == ((M, cdiv(R, 8), G) if rows else (M, G, R // 8))
    assert groups is None or (groups.shape == (M, C) and groups.dtype == torch.int32 and groups.is_contiguous())
    assert codes.dtype == torch.int32
    assert all(t.is_contiguous() for t in (codes, scales, out))
    if rows and groups is None and group % 8 == 0:
        found = codes if zeros is None else zeros
        _int4_decode_rows[(M * cdiv(R, SHORT) * cdiv(C // 8, WORDS),)](
            codes, scales, found, out, R, C, G, group, zeros is not None, offset, SHORT, WORDS, num_warps=4
        )
        return
    grid = (M * cdiv(R, ROWS) * cdiv(C, COLUMNS),)
    sizes = (R, C, G, group, ORDERS[order], zeros is not None, offset, groups is None, ROWS, COLUMNS)
    others = (codes if part is None else part for part in (zeros, groups))
    _int4_decode[grid](codes, scales, *others, out, *sizes, num_warps=4)
