"""Norms over the width or over heads: RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016), also with a gate.

    y = n(u) * w + b,  u = x, or x * silu(gate) with the gate first;  with the gate last y is multiplied by silu(gate)
    RMSNorm: n(u) = u * rstd,  rstd = 1 / sqrt(mean(u^2) + eps);  LayerNorm: the same of u - mean(u)
    du = rstd * (g - mean(g) - n * mean(g * n)),  g = dn * w;  dw = sum over rows of dn * n     (mean(g): LayerNorm)

A row is one head of one token. Both have strides, so that heads within a wider matrix are read in place.
In the backward of rows wider than launch.WIDEST, each program owns the column sums of one part of the columns, which
then fit the registers, and reads the other parts only for the means over the row.
Legend: N tokens, H heads of D features; PARTS of BLOCK_D columns. ADD_ONE: w is 1 + weight. PER_HEAD: weight is (H, D).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.activations import silu
from trireme.kernels.column_sum import add_rows
from trireme.kernels.compiler import tl, triton
from trireme.kernels.fp8.quantize import raise_maximum
from trireme.kernels.launch import cdiv, rows_bwd, rows_fwd
from trireme.kernels.launcher import await_previous, launcher
from trireme.kernels.reference import RMS, NormKind, NormStats


@triton.jit
def _weight(p_w, o_w, mask, ADD_ONE: tl.constexpr):
    b_w = tl.load(p_w + o_w, mask, 0.0).to(tl.float32)
    return 1.0 + b_w if ADD_ONE else b_w


@launcher
@triton.jit(do_not_specialize=["N"])
def _norm_fwd(
    p_x, p_gate, p_w, p_b, p_y, p_copy, p_mean, p_rstd, p_most, N, eps, x_n, x_h, gate_n, H: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ADD_ONE: tl.constexpr, GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_row, o_d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    i_n, i_h = i_row // H, i_row % H
    m_d, m_row = o_d < D, i_row < N * H
    mask = m_row[:, None] & m_d[None, :]
    o = i_row[:, None] * D + o_d[None, :]
    o_w = (i_h[:, None] * D if PER_HEAD else 0) + o_d[None, :]
    b_w = _weight(p_w, o_w, mask if PER_HEAD else m_d[None, :], ADD_ONE)
    b_x = tl.load(p_x + (i_n * x_n + i_h * x_h)[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
    if p_copy is not None:
        tl.store(p_copy + o, b_x.to(p_copy.dtype.element_ty), mask)
    if p_gate is not None:
        b_s = silu(tl.load(p_gate + (i_n * gate_n + i_h * D)[:, None] + o_d[None, :], mask, 0.0).to(tl.float32))[0]
        b_x = b_x * b_s if GATE_FIRST else b_x
    if p_mean is not None:
        b_mean = tl.sum(b_x, 1) / D
        b_x = tl.where(m_d[None, :], b_x - b_mean[:, None], 0.0)  # centred first: no cancellation
        tl.store(p_mean + i_row, b_mean, m_row)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
    tl.store(p_rstd + i_row, b_rstd, m_row)
    b_y = b_x * b_rstd[:, None] * b_w
    if p_b is not None:
        b_y += tl.load(p_b + o_d, m_d, 0.0).to(tl.float32)[None, :]
    if p_gate is not None:
        b_y = b_y if GATE_FIRST else b_y * b_s
    b_y = b_y.to(p_y.dtype.element_ty)
    tl.store(p_y + o, b_y, mask)
    if p_most is not None:
        raise_maximum(p_most, tl.where(mask, b_y.to(tl.float32), 0.0))


@triton.jit
def _sums_of_others(
    p_dy, p_x, p_gate, p_w, p_mean, p_rstd, i_first, i_row, o_dy, o_x, o_gate, m_row, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, ADD_ONE: tl.constexpr, GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Sums of g and of g * n over the parts of the rows' columns that other programs own."""
    b_sum, b_dot = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(1, PARTS):
        o_d = ((tl.program_id(1) + i) % PARTS) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = m_row[:, None] & (o_d < D)[None, :]
        b_g = tl.load(p_dy + o_dy[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
        b_n = tl.load(p_x + o_x[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
        if p_gate is not None:
            b_s = silu(tl.load(p_gate + o_gate[:, None] + o_d[None, :], mask, 0.0).to(tl.float32))[0]
            b_n = b_n * b_s if GATE_FIRST else b_n
            b_g = b_g if GATE_FIRST else b_g * b_s
        b_g *= _weight(p_w, (i_first * D if PER_HEAD else 0) + o_d, o_d < D, ADD_ONE)[None, :]
        if p_mean is not None:
            b_n -= tl.load(p_mean + i_row, m_row, 0.0)[:, None]  # wrong beyond D, where dy is zero
        b_n *= tl.load(p_rstd + i_row, m_row, 0.0)[:, None]
        if p_mean is not None:
            b_of_g, b_of_gn = tl.split(tl.sum(tl.join(b_g, b_g * b_n), 1))
            b_sum += b_of_g
            b_dot += b_of_gn
        else:
            b_dot += tl.sum(b_g * b_n, 1)
    return b_sum, b_dot


@launcher
@triton.jit(do_not_specialize=["N"])
def _norm_bwd(
    p_dy, p_x, p_gate, p_w, p_mean, p_rstd, p_dresidual, p_dx, p_dgate, p_dw, p_db, N, dy_n, dy_h, x_n, x_h,
    dx_n, dx_h, gate_n, dgate_n, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, PARTS: tl.constexpr, ADD_ONE: tl.constexpr, GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Grid (programs, PARTS, H if PER_HEAD else 1)."""
    await_previous()
    i_prog, i_first = tl.program_id(0), tl.program_id(2)
    HEADS: tl.constexpr = 1 if PER_HEAD else H  # of a program's rows
    o_d = tl.arange(0, BLOCK_D)
    if PARTS > 1:
        o_d += tl.program_id(1) * BLOCK_D
    m_d = o_d < D
    b_w = _weight(p_w, (i_first * D if PER_HEAD else 0) + o_d, m_d, ADD_ONE)
    b_dw = tl.zeros((ROWS, BLOCK_D), tl.float32)
    if p_db is not None:
        b_db = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for i_tile in tl.range(i_prog, tl.cdiv(N * HEADS, ROWS), tl.num_programs(0), num_stages=STAGES):
        i_own = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        m_row = i_own < N * HEADS
        mask = m_row[:, None] & m_d[None, :]
        i_n, i_h = i_own // HEADS, i_own % HEADS + i_first
        i_row = i_n * H + i_h if PER_HEAD else i_own
        o_dy, o_x, o_gate = i_n * dy_n + i_h * dy_h, i_n * x_n + i_h * x_h, i_n * gate_n + i_h * D
        if PARTS > 1:
            b_sums, b_dots = _sums_of_others(
                p_dy, p_x, p_gate, p_w, p_mean, p_rstd, i_first, i_row, o_dy, o_x, o_gate, m_row, D, ROWS, BLOCK_D,
                PARTS, ADD_ONE, GATE_FIRST, PER_HEAD,
            )  # fmt: skip
        b_dy = tl.load(p_dy + o_dy[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
        b_x = tl.load(p_x + o_x[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
        b_u, b_dn = b_x, b_dy
        if p_gate is not None:
            b_z = tl.load(p_gate + o_gate[:, None] + o_d[None, :], mask, 0.0).to(tl.float32)
            b_s, b_slope = silu(b_z)
            b_u = b_x * b_s if GATE_FIRST else b_x
            b_dn = b_dy if GATE_FIRST else b_dy * b_s
        if p_mean is not None:
            b_u -= tl.load(p_mean + i_row, m_row, 0.0)[:, None]  # wrong beyond D, where dy is zero
        b_rstd = tl.load(p_rstd + i_row, m_row, 0.0)[:, None]
        b_n = b_u * b_rstd
        if p_dw is not None:
            b_dw += b_dn * b_n
        if p_db is not None:
            b_db += b_dn
        b_g = b_dn * b_w[None, :]
        if p_mean is not None:
            b_sum, b_dot = tl.split(tl.sum(tl.join(b_g, b_g * b_n), 1))  # together: half the barriers
            if PARTS > 1:
                b_sum += b_sums
                b_dot += b_dots
            b_du = (b_g - (b_sum / D)[:, None] - b_n * (b_dot / D)[:, None]) * b_rstd
        else:
            b_dot = tl.sum(b_g * b_n, 1)
            if PARTS > 1:
                b_dot += b_dots
            b_du = b_rstd * (b_g - b_n * (b_dot / D)[:, None])
        if p_gate is not None:
            b_dz = (b_du * b_x if GATE_FIRST else b_dy * b_n * b_w[None, :]) * b_slope
            p_dz = p_dgate + (i_n * dgate_n + i_h * D)[:, None] + o_d[None, :]
            tl.store(p_dz, b_dz.to(p_dgate.dtype.element_ty), mask)
            b_du = b_du * b_s if GATE_FIRST else b_du
        o_dx = (i_n * dx_n + i_h * dx_h)[:, None] + o_d[None, :]
        if p_dresidual is not None:
            b_du += tl.load(p_dresidual + o_dx, mask, 0.0).to(tl.float32)
        tl.store(p_dx + o_dx, b_du.to(p_dx.dtype.element_ty), mask)
    o_part = (i_prog * tl.num_programs(2) + i_first) * D + o_d
    if p_dw is not None:
        tl.store(p_dw + o_part, tl.sum(b_dw, 0), m_d)
    if p_db is not None:
        tl.store(p_db + o_part, tl.sum(b_db, 0), m_d)


def norm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    kind: NormKind = RMS,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    copy: Tensor | None = None,
    maxima_: Tensor | None = None,
) -> tuple[Tensor, NormStats]:
    """As reference.norm_fwd; features are contiguous, of the gate heads too, `copy` and the weights entirely."""
    N, H, D = x.shape
    assert x.stride(2) == 1
    assert weight.shape in ((D,), (H, D))
    assert weight.is_contiguous()
    assert bias is None or (bias.shape == (D,) and kind.centred)
    assert gate is None or (gate.shape == x.shape and gate.stride()[1:] == (D, 1))
    assert copy is None or (copy.shape == x.shape and copy.dtype == x.dtype and copy.is_contiguous())
    y = torch.empty((N, H, D), dtype=x.dtype, device=x.device)
    rstd = torch.empty((N, H), dtype=torch.float32, device=x.device)
    mean, tile = torch.empty_like(rstd) if kind.centred else None, rows_fwd(D)
    strides = *x.stride()[:2], 0 if gate is None else gate.stride(0)
    _norm_fwd[(cdiv(N * H, tile.rows),)](
        x, gate, weight, bias, y, copy, mean, rstd, maxima_, N, eps, *strides, H, D, tile.rows, tile.columns,
        kind.add_one, kind.gate_first, weight.dim() == 2, num_warps=tile.warps,
    )  # fmt: skip
    return y, NormStats(rstd, mean)


def norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stats: NormStats,
    kind: NormKind,
    dx_: Tensor,
    dweight_: Tensor | None = None,
    dbias_: Tensor | None = None,
    gate: Tensor | None = None,
    dgate_: Tensor | None = None,
    dresidual: Tensor | None = None,
) -> None:
    """As reference.norm_bwd; strides as in norm_fwd. With dresidual it and dx_ are contiguous."""
    N, H, D = x.shape
    assert dy.shape == dx_.shape == x.shape
    assert dy.stride(2) == x.stride(2) == dx_.stride(2) == 1
    assert weight.is_contiguous()
    assert dweight_ is None or (dweight_.shape == weight.shape and dweight_.is_contiguous())
    assert (gate is None) == (dgate_ is None)
    assert all(t is None or (t.shape == x.shape and t.stride()[1:] == (D, 1)) for t in (gate, dgate_))
    assert dresidual is None or (dresidual.shape == x.shape and dresidual.is_contiguous() and dx_.is_contiguous())
    if D > launch.WIDEST and _same_memory(dy, dx_):  # programs would read what others have written
        dy = dy.clone()
    per_head = weight.dim() == 2
    heads, tile = H if per_head else 1, rows_bwd(x.device, N if per_head else N * H, D, x.itemsize, gate is not None)
    parts, shape = cdiv(D, tile.columns), (tile.programs, heads * D)
    dw, db = (
        None if t is None else torch.empty(shape, dtype=torch.float32, device=x.device) for t in (dweight_, dbias_)
    )
    by_head = lambda t: t.stride()[:2]
    by_token = lambda t: 0 if t is None else t.stride(0)
    strides = *by_head(dy), *by_head(x), *by_head(dx_), by_token(gate), by_token(dgate_)
    _norm_bwd[(tile.programs, parts, heads)](
        dy, x, gate, weight, stats.mean, stats.rstd, dresidual, dx_, dgate_, dw, db, N, *strides, H, D, tile.rows,
        tile.columns, tile.stages, parts, kind.add_one, kind.gate_first, per_head,
        num_warps=tile.warps if gate is None else min(16, 2 * tile.warps),  # a gate's terms would spill
    )  # fmt: skip
    pairs = [(out_.view(-1), sums) for out_, sums in ((dweight_, dw), (dbias_, db)) if out_ is not None]
    if pairs:
        add_rows(*(t for pair in pairs for t in pair if t is not None))


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b if a.is_meta else a.data_ptr() == b.data_ptr()
