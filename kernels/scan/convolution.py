"""The convolution before a scan: causal, of each channel by itself, with silu. reference.py has the formulas.

For gradients of weights each program sums one row in fp32, and the rows are added in order (column_sum.py).
Legend: N tokens, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.activations import silu
from trireme.kernels.attention.docs import Docs
from trireme.kernels.column_sum import add_rows
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv, column_splits, power2
from trireme.kernels.launcher import await_previous, launcher

ROWS, COLUMNS = 32, 64  # of a tile of the convolution


@triton.jit
def _convolved(
    p_x, p_w, p_bias, o_n, b_at, o_c, m_c, stride, TAPS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Rows o_n of the convolution, before silu; b_at (rows,): their positions, -1 where there is none."""
    b_y = tl.zeros((o_n.shape[0], o_c.shape[0]), tl.float32)
    for i in tl.static_range(TAPS):
        lag = TAPS - 1 - i
        mask = (b_at >= lag)[:, None] & m_c[None, :]
        b_x = tl.load(p_x + (o_n - lag)[:, None] * stride + o_c[None, :], mask, 0.0).to(tl.float32)
        b_y += b_x * tl.load(p_w + o_c * TAPS + i, m_c, 0.0).to(tl.float32)[None, :]
    if BIAS:
        b_y += tl.load(p_bias + o_c, m_c, 0.0).to(tl.float32)[None, :]
    return b_y


@launcher
@triton.jit(do_not_specialize=["N"])
def _conv_fwd(
    p_x, p_w, p_bias, p_positions, p_y, N, stride, C: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    await_previous()
    o_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < C
    b_at = tl.load(p_positions + o_n, o_n < N, -1)
    b_y = silu(_convolved(p_x, p_w, p_bias, o_n, b_at, o_c, m_c, stride, TAPS, BIAS))[0]
    tl.store(p_y + o_n[:, None] * C + o_c[None, :], b_y.to(p_y.dtype.element_ty), (o_n < N)[:, None] & m_c[None, :])


@launcher
@triton.jit(do_not_specialize=["N"])
def _conv_bwd(
    p_dy, p_x, p_w, p_bias, p_positions, p_dx, p_dw, p_dbias, N, stride, dx_stride, C: tl.constexpr,
    TAPS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_prog = tl.program_id(0)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m_c = o_c < C
    o_t = tl.arange(0, 2 * TAPS)  # a power of two, as TAPS is
    b_sums = tl.zeros((2 * TAPS, COLUMNS), tl.float32)
    for i_tile in range(i_prog, tl.cdiv(N, ROWS), tl.num_programs(0)):
        o_n = tl.cast(i_tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        b_dx = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in tl.static_range(TAPS):
            ahead = TAPS - 1 - i  # the row that sees this one through tap i
            b_at = tl.load(p_positions + o_n + ahead, o_n + ahead < N, -1)
            b_pre = _convolved(p_x, p_w, p_bias, o_n + ahead, b_at, o_c, m_c, stride, TAPS, BIAS)
            mask = (b_at >= ahead)[:, None] & m_c[None, :]
            b_d = tl.load(p_dy + (o_n + ahead)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_d = tl.where(mask, b_d * silu(b_pre)[1], 0.0)
            b_dx += b_d * tl.load(p_w + o_c * TAPS + i, m_c, 0.0).to(tl.float32)[None, :]
            b_x = tl.load(p_x + o_n[:, None] * stride + o_c[None, :], mask, 0.0).to(tl.float32)
            b_sums += tl.where((o_t == i)[:, None], tl.sum(b_d * b_x, 0)[None, :], 0.0)
            if BIAS and ahead == 0:
                b_sums += tl.where((o_t == TAPS)[:, None], tl.sum(b_d, 0)[None, :], 0.0)
        mask = (o_n < N)[:, None] & m_c[None, :]
        tl.store(p_dx + o_n[:, None] * dx_stride + o_c[None, :], b_dx.to(p_dx.dtype.element_ty), mask)
    p_sums = p_dw + i_prog * C * TAPS + o_c[None, :] * TAPS + o_t[:, None]
    tl.store(p_sums, b_sums, (o_t < TAPS)[:, None] & m_c[None, :])
    if BIAS:
        b_bias = tl.sum(tl.where((o_t == TAPS)[:, None], b_sums, 0.0), 0)
        tl.store(p_dbias + i_prog * C + o_c, b_bias, m_c)


def conv_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, docs: Docs) -> Tensor:
    """As reference.conv_fwd; taps are a power of two."""
    N, C = x.shape
    _check_conv(x, weight, bias)
    y = torch.empty((N, C), dtype=x.dtype, device=x.device)
    _conv_fwd[(cdiv(N, ROWS), cdiv(C, COLUMNS))](
        x, weight, bias, docs.positions, y, N, x.stride(0), C, weight.shape[1], bias is not None, ROWS, COLUMNS,
        num_warps=4,
    )  # fmt: skip
    return y


def conv_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    docs: Docs,
    dweight_: Tensor,
    dbias_: Tensor | None,
    dx: Tensor,
) -> None:
    """As reference.conv_bwd; dy is contiguous."""
    N, C = x.shape
    _check_conv(x, weight, bias)
    assert dy.is_contiguous()
    assert dx.stride(1) == 1
    blocks, taps = cdiv(C, COLUMNS), weight.shape[1]
    programs = column_splits(x.device, blocks, cdiv(N, ROWS))
    sums = torch.empty((programs, C * taps), dtype=torch.float32, device=x.device)
    of_bias = torch.empty((programs, C), dtype=torch.float32, device=x.device) if bias is not None else None
    _conv_bwd[(programs, blocks)](
        dy, x, weight, bias, docs.positions, dx, sums, of_bias, N, x.stride(0), dx.stride(0), C, taps,
        bias is not None, ROWS, COLUMNS, num_warps=4,
    )  # fmt: skip
    add_rows(dweight_.view(-1), sums)
    if of_bias is not None and dbias_ is not None:
        add_rows(dbias_, of_bias)


def _check_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    C, taps = weight.shape
    assert x.shape[1] == C
    assert x.stride(1) == 1
    assert power2(taps) == taps
    assert weight.is_contiguous()
    assert bias is None or bias.shape == (C,)
