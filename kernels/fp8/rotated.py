"""The gradient of queries, keys and values rotated back (rope.py) and quantized: not written to memory in bf16.

Two passes over it: first the largest value, of results rounded to bf16; then the codes, bitwise identical to those of
`quantize` after the rotation. Legend: N tokens, HEADS heads that are neighbours, TURNED of them rotated by halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.fp8.quantize import bits_of, codes_of, power_of
from trireme.kernels.fp8.reference import E4M3, LEAST, PAD, Quantized
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.rope import turned

ROWS = 16  # tokens of a head that a partial maximum takes at a time


@triton.jit
def _rotated(
    p_x,
    p_cos,
    p_sin,
    p_positions,
    o_n,
    i_h,
    N,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The two halves (tokens, BLOCK_D) of head i_h, rotated back if i_h < TURNED, fp32 rounded to the dtype of x."""
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_n < N)[:, None] & (o_d < HALF)[None, :]
    p_a = p_x + o_n[:, None] * (2 * HALF * HEADS) + i_h * 2 * HALF + o_d[None, :]
    b_a = tl.load(p_a, mask, 0.0).to(tl.float32)
    b_b = tl.load(p_a + HALF, mask, 0.0).to(tl.float32)
    o_angle = tl.load(p_positions + o_n, o_n < N, 0).to(tl.int64)[:, None] * HALF + o_d[None, :]
    m_turned = mask & (i_h + 0 * o_d < TURNED)[None, :]
    b_cos = tl.load(p_cos + o_angle, m_turned, 0.0)
    b_sin = -tl.load(p_sin + o_angle, m_turned, 0.0)
    b_c, b_d = turned(b_a, b_b, b_cos, b_sin)
    b_a, b_b = tl.where(m_turned, b_c, b_a), tl.where(m_turned, b_d, b_b)
    dtype: tl.constexpr = p_x.dtype.element_ty
    return b_a.to(dtype).to(tl.float32), b_b.to(dtype).to(tl.float32)


@launcher
@triton.jit(do_not_specialize=["N"])
def _rotated_maxima(
    p_x,
    p_cos,
    p_sin,
    p_positions,
    p_most,
    N,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    await_previous()
    b_most = tl.zeros((ROWS, BLOCK_D), tl.int32)
    for i in tl.range(tl.program_id(0), tl.cdiv(N, ROWS) * HEADS, tl.num_programs(0), num_stages=STAGES):
        o_n = tl.cast(i // HEADS, tl.int64) * ROWS + tl.arange(0, ROWS)
        b_a, b_b = _rotated(p_x, p_cos, p_sin, p_positions, o_n, i % HEADS, N, HEADS, TURNED, HALF, BLOCK_D)
        b_most = tl.maximum(b_most, tl.maximum(bits_of(b_a), bits_of(b_b)))
    tl.store(p_most + tl.program_id(0), tl.max(tl.max(b_most, 1), 0))


@launcher
@triton.jit(do_not_specialize=["N", "CHUNKS", "P"])
def _rotated_codes(
    p_x,
    p_cos,
    p_sin,
    p_positions,
    p_most,
    p_scale,
    p_rows,
    p_columns,
    N,
    CHUNKS,
    P,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAD: tl.constexpr,
    LEAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    await_previous()
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: what the maxima read last is still in L2
    i_h, o_d = i % HEADS, tl.arange(0, BLOCK_D)
    o_n = (i // HEADS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b_a, b_b = _rotated(p_x, p_cos, p_sin, p_positions, o_n, i_h, N, HEADS, TURNED, HALF, BLOCK_D)
    power = power_of(p_most, p_scale, P, i == 0, LEAST, BLOCK_P)
    b_a, b_b = codes_of(b_a, power), codes_of(b_b, power)
    mask = (o_n < N)[:, None] & (o_d < HALF)[None, :]
    p_a = p_rows + o_n[:, None] * (2 * HALF * HEADS) + i_h * 2 * HALF + o_d[None, :]
    tl.store(p_a, b_a, mask)
    tl.store(p_a + HALF, b_b, mask)
    if COLUMNS:
        size = (CHUNKS * PAD).to(tl.int64)
        p_t = p_columns + (i_h * 2 * HALF + o_d)[:, None] * size + o_n[None, :]
        m_t = (o_d < HALF)[:, None] & (o_n < CHUNKS * PAD)[None, :]
        tl.store(p_t, tl.trans(b_a), m_t)
        tl.store(p_t + HALF * size, tl.trans(b_b), m_t)


def rotated_codes(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, turned: int, columns: bool = True
) -> Quantized:
    """As reference.rotated_codes, contiguous."""
    (N, D), half = x.shape, cos.shape[1]
    heads = D // (2 * half)
    assert all(t.is_contiguous() for t in (x, cos, sin, positions))
    assert cos.shape == sin.shape
    assert positions.shape == (N,)
    assert heads * 2 * half == D
    assert D % PAD == 0
    sizes, chunks, rows = (heads, turned, half, launch.power2(half)), cdiv(N, PAD), launch.quantize(x.device, columns)
    programs = launch.maxima(x.device, cdiv(N, ROWS) * heads)
    most = torch.empty(programs, dtype=torch.int32, device=x.device)
    given = x, cos, sin, positions, most
    _rotated_maxima[(programs,)](*given, N, *sizes, ROWS, 3, num_warps=4)
    new = lambda *shape: torch.empty(shape, dtype=E4M3, device=x.device)
    found = Quantized(torch.empty(1, device=x.device), new(N, D), new(D, chunks * PAD) if columns else None)
    grid = (cdiv(chunks * PAD if columns else N, rows.rows) * heads,)
    written = found.scale, found.rows, found.columns if columns else found.rows
    more = PAD, LEAST, columns, rows.rows, launch.power2(programs)
    _rotated_codes[grid](*given, *written, N, chunks, programs, *sizes, *more, num_warps=rows.warps)
    return found
