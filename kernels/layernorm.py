"""LayerNorm (Ba et al. 2016).

    y = xhat * w + b,  xhat = (h - mean) * rstd,  rstd = 1 / sqrt(var + eps)
    dh = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * w;  dw = sum of dy * xhat,  db = sum of dy, over rows

Rows wider than launch.WIDEST are divided as in rmsnorm.py. Legend: N tokens, D width, PARTS of BLOCK_D columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.column_sum import add_rows
from trireme.kernels.launch import cdiv, rows_bwd, rows_fwd
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.rmsnorm import reads_others, some_rows


@launcher
@triton.jit(do_not_specialize=["N"])
def _layernorm_fwd(
    p_h,
    p_w,
    p_b,
    p_y,
    p_mean,
    p_rstd,
    N,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    await_previous()
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    mask = (i_row < N)[:, None] & m_d[None, :]
    o = i_row[:, None] * D + o_d[None, :]
    b_w = tl.load(p_w + o_d, m_d, 0.0).to(tl.float32)
    b_b = tl.load(p_b + o_d, m_d, 0.0).to(tl.float32)
    b_h = tl.load(p_h + o, mask, 0.0).to(tl.float32)
    b_mean = tl.sum(b_h, 1) / D
    b_c = tl.where(m_d[None, :], b_h - b_mean[:, None], 0.0)  # centred first: no cancellation
    b_rstd = tl.rsqrt(tl.sum(b_c * b_c, 1) / D + eps)
    tl.store(p_mean + i_row, b_mean, i_row < N)
    tl.store(p_rstd + i_row, b_rstd, i_row < N)
    b_y = b_c * b_rstd[:, None] * b_w[None, :] + b_b[None, :]
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask)


@triton.jit
def _sums(p_dy, p_h, p_w, p_mean, p_rstd, i_row, part, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(sums of g, of g * xhat) over a part of the rows' columns."""
    b_mean = tl.load(p_mean + i_row, i_row < N, 0.0)[:, None]
    b_rstd = tl.load(p_rstd + i_row, i_row < N, 0.0)[:, None]
    o_d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (i_row < N)[:, None] & (o_d < D)[None, :]
    o = i_row[:, None] * D + o_d[None, :]
    b_g = tl.load(p_dy + o, mask, 0.0).to(tl.float32) * tl.load(p_w + o_d, o_d < D, 0.0).to(tl.float32)[None, :]
    b_xhat = (tl.load(p_h + o, mask, 0.0).to(tl.float32) - b_mean) * b_rstd
    return tl.split(tl.sum(tl.join(b_g, b_g * b_xhat), 1))


@launcher
@triton.jit(do_not_specialize=["N"])
def _layernorm_bwd(
    p_dy,
    p_h,
    p_w,
    p_mean,
    p_rstd,
    p_dresidual,
    p_dh,
    p_dw,
    p_db,
    N,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    await_previous()
    i_prog = tl.program_id(0)
    o_d = tl.arange(0, BLOCK_D)
    if PARTS > 1:
        o_d += tl.program_id(1) * BLOCK_D
    m_d = o_d < D
    b_w = tl.load(p_w + o_d, m_d, 0.0).to(tl.float32)
    b_dw = tl.zeros((ROWS, BLOCK_D), tl.float32)
    b_db = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for i_tile in tl.range(i_prog, tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        i_row = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (i_row < N)[:, None] & m_d[None, :]
        o = i_row[:, None] * D + o_d[None, :]
        if PARTS > 1:
            b_sums, b_dots = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
            for i in tl.static_range(1, PARTS):
                part = (tl.program_id(1) + i) % PARTS
                b_sum, b_dot = _sums(p_dy, p_h, p_w, p_mean, p_rstd, i_row, part, N, D, BLOCK_D)
                b_sums += b_sum
                b_dots += b_dot
        b_dy = tl.load(p_dy + o, mask, 0.0).to(tl.float32)
        b_h = tl.load(p_h + o, mask, 0.0).to(tl.float32)
        b_mean = tl.load(p_mean + i_row, i_row < N, 0.0)[:, None]
        b_rstd = tl.load(p_rstd + i_row, i_row < N, 0.0)[:, None]
        b_xhat = (b_h - b_mean) * b_rstd  # wrong beyond D, where dy is zero
        b_dw += b_dy * b_xhat
        b_db += b_dy
        b_g = b_dy * b_w[None, :]
        b_sum, b_dot = tl.split(tl.sum(tl.join(b_g, b_g * b_xhat), 1))  # together: half the barriers
        if PARTS > 1:
            b_sum += b_sums
            b_dot += b_dots
        b_dh = (b_g - (b_sum / D)[:, None] - b_xhat * (b_dot / D)[:, None]) * b_rstd
        if RESIDUAL:
            b_dh += tl.load(p_dresidual + o, mask, 0.0).to(tl.float32)
        tl.store(p_dh + o, b_dh.to(p_dh.dtype.element_ty), mask)
    tl.store(p_dw + i_prog * D + o_d, tl.sum(b_dw, 0), m_d)
    tl.store(p_db + i_prog * D + o_d, tl.sum(b_db, 0), m_d)


def layernorm_fwd(h: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.layernorm_fwd, contiguous."""
    N, D = h.shape
    assert h.is_contiguous()
    assert weight.shape == bias.shape == (D,)
    y = torch.empty_like(h)
    mean = torch.empty(N, dtype=torch.float32, device=h.device)
    rstd = torch.empty_like(mean)
    tile = rows_fwd(D)
    _layernorm_fwd[(cdiv(N, tile.rows),)](
        h, weight, bias, y, mean, rstd, N, eps, D, tile.rows, tile.columns, num_warps=tile.warps
    )
    return y, mean, rstd


def layernorm_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dweight_: Tensor,
    dbias_: Tensor,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As reference.layernorm_bwd, contiguous. `out` may be dy."""
    N, D = h.shape
    assert dy.shape == h.shape
    assert dy.is_contiguous()
    assert h.is_contiguous()
    assert dweight_.shape == dbias_.shape == (D,)
    assert dresidual is None or (dresidual.shape == h.shape and dresidual.is_contiguous())
    assert out is None or (out.shape == h.shape and out.dtype == h.dtype and out.is_contiguous())
    if out is not None and reads_others(out, dy):
        for rows in some_rows(N):
            residual, stats = None if dresidual is None else dresidual[rows], (mean[rows], rstd[rows])
            out[rows].copy_(layernorm_bwd(dy[rows], h[rows], weight, *stats, dweight_, dbias_, residual))
        return out
    dh = torch.empty_like(h) if out is None else out
    tile = rows_bwd(h.device, N, D, h.itemsize)
    dw, db = torch.empty((2, tile.programs, D), dtype=torch.float32, device=h.device)
    parts = cdiv(D, tile.columns)
    _layernorm_bwd[(tile.programs, parts)](
        dy, h, weight, mean, rstd, dresidual, dh, dw, db, N, D, tile.rows, tile.columns, tile.stages, parts,
        dresidual is not None, num_warps=tile.warps,
    )  # fmt: skip
    add_rows(dweight_, dw, dbias_, db)
    return dh
