"""RMSNorm (Zhang & Sennrich 2019), over rows and over heads.

    y = h * rstd * w,  rstd = 1 / sqrt(mean(h^2) + eps)
    dh = rstd * (g - xhat * mean(g * xhat)),  g = dy * w,  xhat = h * rstd;  dw = sum over rows of dy * xhat

In the backward of rows wider than launch.WIDEST, each program owns the column sums of one part of the columns, which
then fit the registers, and reads the other parts only for the mean over the row.
Legend: N tokens, D width, H heads, PARTS of BLOCK_D columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.column_sum import add_rows
from trireme.kernels.launch import cdiv, rows_bwd, rows_fwd
from trireme.kernels.launcher import await_previous, launcher

CHUNK = 1024  # rows at a time of a wide norm's gradient that overwrites dy: the temporary fits models' workspace


@launcher
@triton.jit(do_not_specialize=["N"])
def _rmsnorm_fwd(
    p_h,
    p_w,
    p_y,
    p_copy,
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
    mask = (i_row < N)[:, None] & (o_d < D)[None, :]
    o = i_row[:, None] * D + o_d[None, :]
    b_w = tl.load(p_w + o_d, o_d < D, 0.0).to(tl.float32)
    b_h = tl.load(p_h + o, mask, 0.0).to(tl.float32)
    if p_copy is not None:
        tl.store(p_copy + o, b_h.to(p_copy.dtype.element_ty), mask)
    b_rstd = tl.rsqrt(tl.sum(b_h * b_h, 1) / D + eps)
    tl.store(p_rstd + i_row, b_rstd, i_row < N)
    b_y = b_h * b_rstd[:, None] * b_w[None, :]
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask)


@triton.jit
def _dot(p_dy, p_h, p_w, p_rstd, i_row, part, N, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sums of g * xhat over a part of the rows' columns."""
    b_rstd = tl.load(p_rstd + i_row, i_row < N, 0.0)[:, None]
    o_d = part * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (i_row < N)[:, None] & (o_d < D)[None, :]
    o = i_row[:, None] * D + o_d[None, :]
    b_g = tl.load(p_dy + o, mask, 0.0).to(tl.float32) * tl.load(p_w + o_d, o_d < D, 0.0).to(tl.float32)[None, :]
    return tl.sum(b_g * (tl.load(p_h + o, mask, 0.0).to(tl.float32) * b_rstd), 1)


@launcher
@triton.jit(do_not_specialize=["N"])
def _rmsnorm_bwd(
    p_dy,
    p_h,
    p_w,
    p_rstd,
    p_dresidual,
    p_dh,
    p_dw,
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
    for i_tile in tl.range(i_prog, tl.cdiv(N, ROWS), tl.num_programs(0), num_stages=STAGES):
        i_row = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (i_row < N)[:, None] & m_d[None, :]
        o = i_row[:, None] * D + o_d[None, :]
        if PARTS > 1:
            b_others = tl.zeros((ROWS,), tl.float32)
            for i in tl.static_range(1, PARTS):
                b_others += _dot(p_dy, p_h, p_w, p_rstd, i_row, (tl.program_id(1) + i) % PARTS, N, D, BLOCK_D)
        b_dy = tl.load(p_dy + o, mask, 0.0).to(tl.float32)
        b_h = tl.load(p_h + o, mask, 0.0).to(tl.float32)
        b_rstd = tl.load(p_rstd + i_row, i_row < N, 0.0)[:, None]
        b_xhat = b_h * b_rstd
        if p_dw is not None:
            b_dw += b_dy * b_xhat
        b_g = b_dy * b_w[None, :]
        b_dot = tl.sum(b_g * b_xhat, 1)
        if PARTS > 1:
            b_dot += b_others
        b_dh = b_rstd * (b_g - b_xhat * (b_dot / D)[:, None])
        if RESIDUAL:
            b_dh += tl.load(p_dresidual + o, mask, 0.0).to(tl.float32)
        tl.store(p_dh + o, b_dh.to(p_dh.dtype.element_ty), mask)
    if p_dw is not None:
        tl.store(p_dw + i_prog * D + o_d, tl.sum(b_dw, 0), m_d)


def rmsnorm_fwd(h: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As reference.rmsnorm_fwd, contiguous."""
    N, D = h.shape
    assert h.is_contiguous()
    assert weight.shape == (D,)
    assert out is None or (out.shape == h.shape and out.dtype == h.dtype and out.is_contiguous())
    y = torch.empty_like(h)
    rstd = torch.empty(N, dtype=torch.float32, device=h.device)
    tile = rows_fwd(D)
    _rmsnorm_fwd[(cdiv(N, tile.rows),)](
        h, weight, y, out, rstd, N, eps, D, tile.rows, tile.columns, num_warps=tile.warps
    )
    return y, rstd


def reads_others(out: Tensor, dy: Tensor) -> bool:
    """Whether a program of a norm's backward would read what another one has written to `out`."""
    same = out is dy if out.is_meta else out.data_ptr() == dy.data_ptr()
    return out.shape[1] > launch.WIDEST and same


def some_rows(N: int) -> Iterator[slice]:
    """Slices of CHUNK rows, whose gradient is computed in a temporary and then copied over dy."""
    return (slice(a, min(a + CHUNK, N)) for a in range(0, N, CHUNK))


def rmsnorm_bwd(
    dy: Tensor,
    h: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dweight_: Tensor | None,
    dresidual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As reference.rmsnorm_bwd, contiguous. `out` may be dy."""
    N, D = h.shape
    assert dy.shape == h.shape
    assert dy.is_contiguous()
    assert h.is_contiguous()
    assert dweight_ is None or dweight_.shape == (D,)
    assert dresidual is None or (dresidual.shape == h.shape and dresidual.is_contiguous())
    assert out is None or (out.shape == h.shape and out.dtype == h.dtype and out.is_contiguous())
    if out is not None and reads_others(out, dy):
        for rows in some_rows(N):
            residual = None if dresidual is None else dresidual[rows]
            out[rows].copy_(rmsnorm_bwd(dy[rows], h[rows], weight, rstd[rows], dweight_, residual))
        return out
    dh = torch.empty_like(h) if out is None else out
    tile = rows_bwd(h.device, N, D, h.itemsize)
    dw = None if dweight_ is None else torch.empty((tile.programs, D), dtype=torch.float32, device=h.device)
    parts = cdiv(D, tile.columns)
    _rmsnorm_bwd[(tile.programs, parts)](
        dy, h, weight, rstd, dresidual, dh, dw, N, D, tile.rows, tile.columns, tile.stages, parts,
        dresidual is not None, num_warps=tile.warps,
    )  # fmt: skip
    if dweight_ is not None and dw is not None:
        add_rows(dweight_, dw)
    return dh


# ---------------------------------------------------------------- over heads


@launcher
@triton.jit(do_not_specialize=["N"])
def _head_fwd(
    p_x,
    p_w,
    p_y,
    p_rstd,
    N,
    eps,
    x_n,
    x_h,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    await_previous()
    i_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, BLOCK_D)
    m_row = i_row < N * H
    mask = m_row[:, None] & (o_d < D)[None, :]
    b_x = tl.load(p_x + ((i_row // H) * x_n + (i_row % H) * x_h)[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
    b_w = tl.load(p_w + o_d, o_d < D, 0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
    tl.store(p_rstd + i_row, b_rstd, m_row)
    b_y = b_x * b_rstd[:, None] * b_w[None, :]
    tl.store(p_y + i_row[:, None] * D + o_d[None, :], b_y.to(p_y.dtype.element_ty), mask)


@launcher
@triton.jit(do_not_specialize=["N"])
def _head_bwd(
    p_dy,
    p_x,
    p_w,
    p_rstd,
    p_dx,
    p_dw,
    N,
    dy_n,
    dy_h,
    x_n,
    x_h,
    dx_n,
    dx_h,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    await_previous()
    i_prog = tl.program_id(0)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_w = tl.load(p_w + o_d, m_d, 0.0).to(tl.float32)
    b_dw = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for i_tile in tl.range(i_prog, tl.cdiv(N * H, ROWS), tl.num_programs(0), num_stages=STAGES):
        i_row = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        m_row = i_row < N * H
        mask = m_row[:, None] & m_d[None, :]
        i_n, i_h = i_row // H, i_row % H
        b_dy = tl.load(p_dy + (i_n * dy_n + i_h * dy_h)[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
        b_x = tl.load(p_x + (i_n * x_n + i_h * x_h)[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
        b_rstd = tl.load(p_rstd + i_row, m_row, 0.0)[:, None]
        b_xhat = b_x * b_rstd
        if p_dw is not None:
            b_dw += b_dy * b_xhat
        b_g = b_dy * b_w[None, :]
        b_dx = b_rstd * (b_g - b_xhat * (tl.sum(b_g * b_xhat, 1) / D)[:, None])
        tl.store(p_dx + (i_n * dx_n + i_h * dx_h)[:, None] + o_d[None, :], b_dx.to(p_dx.dtype.element_ty), mask)
    if p_dw is not None:
        tl.store(p_dw + i_prog * D + o_d, tl.sum(b_dw, 0), m_d)


def head_rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As reference.head_rmsnorm_fwd; heads contiguous."""
    N, H, D = x.shape
    assert x.stride(2) == 1
    assert weight.shape == (D,)
    y = torch.empty((N, H, D), dtype=x.dtype, device=x.device)
    rstd = torch.empty((N, H), dtype=torch.float32, device=x.device)
    tile = rows_fwd(D)
    _head_fwd[(cdiv(N * H, tile.rows),)](
        x, weight, y, rstd, N, eps, x.stride(0), x.stride(1), H, D, tile.rows, tile.columns, num_warps=tile.warps
    )
    return y, rstd


def head_rmsnorm_bwd(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dweight_: Tensor | None, dx_: Tensor) -> None:
    """As reference.head_rmsnorm_bwd. dx_ may be dy: read before written."""
    N, H, D = x.shape
    assert dy.shape == dx_.shape == x.shape
    assert dy.stride(2) == x.stride(2) == dx_.stride(2) == 1
    tile = rows_bwd(x.device, N * H, D, x.itemsize)
    dw = None if dweight_ is None else torch.empty((tile.programs, D), dtype=torch.float32, device=x.device)
    strides = (*dy.stride()[:2], *x.stride()[:2], *dx_.stride()[:2])
    _head_bwd[(tile.programs,)](
        dy, x, weight, rstd, dx_, dw, N, *strides, H, D, tile.rows, tile.columns, tile.stages, num_warps=tile.warps
    )
    if dweight_ is not None and dw is not None:
        add_rows(dweight_, dw)
