"""Matrix multiplications in fp8 for RTX 50xx and PRO 6000 (sm_120).

Their tensor cores have two instructions for E4M3 with sums in fp32: the plain one, at the rate of fp16, and one with
block scales, powers of two, at twice that rate. `tl.dot` compiles to the first, `tl.dot_scaled` to the second, so all
block scales are 1 here. Compiled for sm_120 and never run on one; on other chips Triton converts the codes to bf16.
Legend: a (M, K) and b (N, K) E4M3, out (M, N).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels import launch
from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv
from trireme.kernels.launcher import await_previous, launcher

BLOCK = tl.constexpr(32)  # numbers of a block scale
ONE = tl.constexpr(127)  # a block scale of 1: an exponent with a bias of 127


@triton.jit
def fp8_dot(b_a, b_b, b_sum):
    """b_sum (rows, columns) fp32 + b_a (rows, depth) @ b_b (depth, columns), both E4M3."""
    ROWS: tl.constexpr = b_a.shape[0]
    DEPTH: tl.constexpr = b_a.shape[1]
    COLUMNS: tl.constexpr = b_b.shape[1]
    b_ones_a = tl.full((ROWS, DEPTH // BLOCK), ONE, tl.uint8)
    b_ones_b = tl.full((COLUMNS, DEPTH // BLOCK), ONE, tl.uint8)
    return tl.dot_scaled(b_a, b_ones_a, "e4m3", b_b, b_ones_b, "e4m3", b_sum)


@launcher
@triton.jit(do_not_specialize=["M"])
def _fp8_matmul(
    p_a, p_b, p_scale_a, p_scale_b, p_bias, p_out, M, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    await_previous()
    n_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_group = tl.program_id(0) // (GROUP * n_n)  # GROUP rows of tiles share the columns of b in L2
    n_m = tl.minimum(tl.cdiv(M, BLOCK_M) - i_group * GROUP, GROUP)
    i_m = i_group * GROUP + tl.program_id(0) % (GROUP * n_n) % n_m
    i_n = tl.program_id(0) % (GROUP * n_n) // n_m
    o_m, o_n = i_m * BLOCK_M + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m, m_n = (o_m < M)[:, None], (o_n < N)[:, None]
    p_a += o_m.to(tl.int64)[:, None] * K + o_k[None, :]
    p_b += o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        m_k = (o_k < K - k)[None, :]
        b_a = tl.load(p_a + k, m_m & m_k, 0.0)
        b_b = tl.load(p_b + k, m_n & m_k, 0.0)
        b_sum = fp8_dot(b_a, b_b.T, b_sum)
    b_sum *= tl.load(p_scale_a) * tl.load(p_scale_b)
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_n, o_n < N, 0.0).to(tl.float32)[None, :]
    o = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    if ADD:
        b_sum += tl.load(p_out + o, m_m & m_n.T, 0.0).to(tl.float32)
    tl.store(p_out + o, b_sum.to(p_out.dtype.element_ty), m_m & m_n.T)


def fp8_matmul(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """As reference.fp8_matmul, all contiguous. K is a multiple of 16."""
    _launch(a, scale_a, b, scale_b, out, bias, False)
    return out


def fp8_add_(out_: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> None:
    """As reference.fp8_add_, all contiguous and rounded once. K is a multiple of 16."""
    _launch(a, scale_a, b, scale_b, out_, None, True)


def _launch(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out: Tensor, bias: Tensor | None, add: bool
) -> None:
    (M, K), N = a.shape, len(b)
    assert b.shape == (N, K)
    assert out.shape == (M, N)
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert all(t.is_contiguous() for t in (a, b, out))
    tile = launch.block_scaled(a.device)
    grid = (cdiv(M, tile.rows) * cdiv(N, tile.columns),)
    sizes = (M, N, K, tile.rows, tile.columns, tile.depth, tile.group, add)
    _fp8_matmul[grid](a, b, scale_a, scale_b, bias, out, *sizes, num_warps=tile.warps, num_stages=tile.stages)
