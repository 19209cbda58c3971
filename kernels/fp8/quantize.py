"""Quantization to E4M3 by the largest value of a tensor: two passes, of which the second can write both orders at once.

Stacked matrices of experts have a scale for each matrix, rows that go to experts one for each row: the result of a row
does not depend on other rows.

The maximum is that of the bits as integers, which have the order of the magnitudes. It does not depend on the order of
programs.
Legend: E experts, of a matrix one, N rows, D columns, P partial maxima of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.compiler import tl, triton
from trireme.kernels.fp8.reference import E4M3, LEAST, PAD, Quantized
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.reference import MAXIMA

SLOTS = tl.constexpr(MAXIMA)
BLOCK = 4096  # values at a time of a partial maximum
ROW = 2048  # values at a time of a row that is quantized by itself


@triton.jit
def _power_by(most, p_scale, first, LEAST: tl.constexpr):
    power = tl.minimum(135 - (most >> 23) - ((most & 0x7FFFFF) > 0x600000).to(tl.int32), LEAST)
    if first:
        tl.store(p_scale, ((127 - power) << 23).to(tl.float32, bitcast=True))
    return power


@triton.jit
def power_of(p_most, p_scale, P, first, LEAST: tl.constexpr, BLOCK_P: tl.constexpr):
    """The exponent that values are scaled by, of P partial maxima at p_most; the `first` program stores the scale."""
    o_p = tl.arange(0, BLOCK_P)
    return _power_by(tl.max(tl.load(p_most + o_p, o_p < P, 0), 0), p_scale, first, LEAST)


@triton.jit
def bits_of(b_x):
    """The bits of |x|, fp32, as int32 where x is finite, else 0."""
    b_bits = b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(b_bits < 0x7F800000, b_bits, 0)


@triton.jit
def raise_maximum(p_most, b_x):
    """Raises a slot of p_most (MAXIMA,) to the largest finite magnitude of b_x, fp32: in any order the same."""
    tl.atomic_max(p_most + tl.program_id(0) % SLOTS, tl.max(bits_of(b_x)), sem="relaxed")


@triton.jit
def codes_of(b_x, power):
    """fp32 times 2^power to E4M3. The conversion saturates, so 0 * x is added: inf becomes NaN, no other x changes."""
    b_x = b_x * ((power + 127) << 23).to(tl.float32, bitcast=True)
    return (b_x * 0.0 + b_x).to(tl.float8e4nv)


@launcher
@triton.jit(do_not_specialize=["CHUNKS"])
def _maxima(p_x, p_most, CHUNKS, PAD: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    NUMEL = CHUNKS.to(tl.int64) * PAD  # so that accesses are wide
    p_x += tl.program_id(1) * NUMEL
    p_most += tl.program_id(1) * PROGRAMS
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_most = tl.zeros((BLOCK,), tl.int32)
    for _ in range(tl.cdiv(NUMEL - tl.program_id(0).to(tl.int64) * BLOCK, PROGRAMS * BLOCK)):
        b_most = tl.maximum(b_most, bits_of(tl.load(p_x + o, o < NUMEL, 0.0).to(tl.float32)))
        o += PROGRAMS * BLOCK
    tl.store(p_most + tl.program_id(0), tl.max(b_most, 0))


@launcher
@triton.jit(do_not_specialize=["N", "CHUNKS", "P"])
def _quantize(
    p_x, p_most, p_scale, p_rows, p_columns, N, CHUNKS, P, D: tl.constexpr, PAD: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    await_previous()
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    i_e = tl.program_id(1).to(tl.int64)
    p_x += i_e * N * D
    p_rows += i_e * N * D
    p_columns += i_e * CHUNKS * PAD * D
    p_most += i_e * P
    p_scale += i_e
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: what the maxima read last is still in L2
    o_n = (i // BLOCKS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = (i % BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    mask = (o_n < N)[:, None] & m_d[None, :]
    b_x = tl.load(p_x + o_n[:, None] * D + o_d[None, :], mask, 0.0).to(tl.float32)
    b_codes = codes_of(b_x, power_of(p_most, p_scale, P, i == 0, LEAST, BLOCK_P))
    if ROWS:
        tl.store(p_rows + o_n[:, None] * D + o_d[None, :], b_codes, mask)
    if COLUMNS:
        m_n = o_n < CHUNKS * PAD
        tl.store(p_columns + o_d[:, None].to(tl.int64) * (CHUNKS * PAD) + o_n[None, :], tl.trans(b_codes),
                 m_d[:, None] & m_n[None, :])  # fmt: skip


def quantize(
    x: Tensor, rows: bool = True, columns: bool = False, out: Quantized | None = None, maxima: Tensor | None = None
) -> Quantized:
    """As reference.quantize; x and `out` are contiguous, D is a multiple of PAD."""
    N, D = x.shape
    assert x.is_contiguous()
    assert D % PAD == 0
    if maxima is None:
        programs = launch.maxima(x.device, cdiv(x.numel(), BLOCK))
        maxima = torch.empty(programs, dtype=torch.int32, device=x.device)
        _maxima[(programs,)](x, maxima, x.numel() // PAD, PAD, programs, BLOCK, num_warps=8)
    out = out or _empty(x, rows, columns)
    codes = out.rows if rows else out.columns  # a missing one is replaced by the other and not written
    transposed = out.columns if columns else out.rows
    assert codes is not None
    assert transposed is not None
    assert not rows or codes.shape == (N, D)
    assert not columns or transposed.shape == (D, cdiv(N, PAD) * PAD)
    assert all(t.is_contiguous() for t in (codes, transposed))
    chunks, tile = cdiv(N, PAD), launch.quantize(x.device, rows and columns)
    grid = (cdiv(chunks * PAD if columns else N, tile.rows) * cdiv(D, tile.columns),)
    sizes = (N, chunks, len(maxima), D, PAD, LEAST, rows, columns, tile.rows, tile.columns, launch.power2(len(maxima)))
    _quantize[grid](x, maxima, out.scale, codes, transposed, *sizes, num_warps=tile.warps)
    return out


def quantize_experts(w: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.quantize_experts: w (E, A, B) or a view of (E, B, A), contiguous; A and B multiples of PAD."""
    turned = w.is_contiguous()
    raw = w if turned else w.mT
    E, N, D = raw.shape
    assert raw.is_contiguous()
    assert N % PAD == D % PAD == 0
    codes = torch.empty((E, w.shape[2], w.shape[1]), dtype=E4M3, device=w.device)
    programs = cdiv(launch.maxima(w.device, cdiv(w.numel(), BLOCK)), E)
    maxima = torch.empty((E, programs), dtype=torch.int32, device=w.device)
    scale = torch.empty(E, dtype=torch.float32, device=w.device)
    _maxima[(programs, E)](raw, maxima, N * D // PAD, PAD, programs, BLOCK, num_warps=8)
    block = launch.quantize(w.device, False)
    grid = (cdiv(N, block.rows) * cdiv(D, block.columns), E)
    sizes = (N, N // PAD, programs, D, PAD, LEAST, not turned, turned, block.rows, block.columns)
    _quantize[grid](raw, maxima, scale, codes, codes, *sizes, launch.power2(programs), num_warps=block.warps)
    return codes, scale


@launcher
@triton.jit
def _quantize_rows(p_x, p_codes, p_scale, D: tl.constexpr, LEAST: tl.constexpr, BLOCK_D: tl.constexpr):
    await_previous()
    i_n = tl.program_id(0).to(tl.int64)
    b_most = tl.zeros((BLOCK_D,), tl.int32)
    for i_d in range(0, D, BLOCK_D):
        o_d = i_d + tl.arange(0, BLOCK_D)
        b_most = tl.maximum(b_most, bits_of(tl.load(p_x + i_n * D + o_d, o_d < D, 0.0).to(tl.float32)))
    power = _power_by(tl.max(b_most, 0), p_scale + i_n, True, LEAST)
    for i_d in range(0, D, BLOCK_D):
        o_d = i_d + tl.arange(0, BLOCK_D)
        b_x = tl.load(p_x + i_n * D + o_d, o_d < D, 0.0).to(tl.float32)  # again, out of the L1
        tl.store(p_codes + i_n * D + o_d, codes_of(b_x, power), o_d < D)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.quantize_rows, x contiguous, D a multiple of PAD."""
    N, D = x.shape
    assert x.is_contiguous()
    assert D % PAD == 0
    codes, scale = torch.empty((N, D), dtype=E4M3, device=x.device), torch.empty(N, device=x.device)
    block = min(ROW, launch.power2(D))
    _quantize_rows[(N,)](x, codes, scale, D, LEAST, block, num_warps=4)
    return codes, scale


@launcher
@triton.jit(do_not_specialize=["N"])
def _turn(p_rows, p_out, N, D: tl.constexpr, PAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    await_previous()
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    o_n = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = (tl.program_id(0) % BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_codes = tl.load(p_rows + o_n[:, None] * D + o_d[None, :], (o_n < N)[:, None] & m_d[None, :], 0)
    p_turned = p_out + o_d[:, None].to(tl.int64) * (N // PAD * PAD) + o_n[None, :]
    tl.store(p_turned, tl.trans(b_codes), m_d[:, None] & (o_n < N)[None, :])


def turn(rows: Tensor, out: Tensor) -> Tensor:
    """As reference.turn, both contiguous, N and D multiples of PAD."""
    N, D = rows.shape
    assert out.shape == (D, N)
    assert all(t.is_contiguous() for t in (rows, out))
    assert N % PAD == D % PAD == 0
    block = launch.quantize(rows.device, True)
    grid = (cdiv(N, block.rows) * cdiv(D, block.columns),)
    sizes = (N, D, PAD, block.rows, block.columns)
    _turn[grid](rows.view(torch.uint8), out.view(torch.uint8), *sizes, num_warps=block.warps)
    return out


def _empty(x: Tensor, rows: bool, columns: bool) -> Quantized:
    new = lambda shape, dtype=E4M3: torch.empty(shape, dtype=dtype, device=x.device)
    turned = (x.shape[1], cdiv(len(x), PAD) * PAD)
    return Quantized(new(1, torch.float32), new(x.shape) if rows else None, new(turned) if columns else None)
