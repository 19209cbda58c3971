"""Embedding: rows gathered by token, and their gradients summed per token in a fixed order.

Backward sorts the tokens, so that equal ones form a run, and divides the sorted order into chunks of CHUNK places. One
kernel sums the part of each run within a chunk; a second one adds up runs that cross chunks. Up to FEW tokens are
sorted by comparing all pairs in one launch, which is faster than radix passes.

NEFTune (Jain et al. 2023, arXiv:2310.05914) adds noise in multiples of 2^-23 that is never stored: its random bits are
a 32-bit hash (lowbias32, Wellons 2018) of key and row, hashed again with the feature. Dropout (Srivastava et al. 2014)
compares 24 of the same bits with a threshold, so that backward computes the mask again. reference.py has the formulas.

Legend: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

CHUNK, ROWS = 64, 2  # places of a chunk; rows read at once
FEW = 12288  # most tokens for all pairs


@launcher
@triton.jit
def _embedding_fwd(p_ids, p_w, p_out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    await_previous()
    i_n = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i_v = tl.load(p_ids + i_n)
    tl.store(p_out + i_n * D + o_d, tl.load(p_w + i_v * D + o_d, o_d < D), o_d < D)


@triton.jit
def _mix(b_h):
    """lowbias32 of uint32 values."""
    b_h ^= b_h >> 16
    b_h *= tl.full((), 0x7FEB352D, tl.uint32)
    b_h ^= b_h >> 15
    b_h *= tl.full((), 0x846CA68B, tl.uint32)
    return b_h ^ (b_h >> 16)


@launcher
@triton.jit(do_not_specialize=["key", "first"])
def _add_noise(p_x, p_scale, key, first, D: tl.constexpr, BLOCK_D: tl.constexpr):
    await_previous()
    i_n = tl.program_id(0)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = _mix(_mix((first + i_n).to(tl.uint32)) ^ tl.cast(key, tl.uint32))
    b_h = _mix(row ^ _mix(o_d.to(tl.uint32)))
    b_u = (b_h >> 8).to(tl.int32).to(tl.float32) * 1.1920928955078125e-07 - 1.0
    p_x += i_n.to(tl.int64) * D + o_d
    b_x = tl.load(p_x, o_d < D).to(tl.float32) + b_u * tl.load(p_scale + i_n)
    tl.store(p_x, b_x.to(p_x.dtype.element_ty), o_d < D)


@launcher
@triton.jit(do_not_specialize=["key", "first"])
def _dropout(
    p_x, p_y, key, first, D: tl.constexpr, STRIDE: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    await_previous()
    i_n = tl.program_id(0)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = _mix(_mix((first + i_n).to(tl.uint32)) ^ tl.cast(key, tl.uint32))
    b_h = (_mix(row ^ _mix(o_d.to(tl.uint32))) >> 8).to(tl.int32)
    b_x = tl.load(p_x + i_n.to(tl.int64) * STRIDE + o_d, o_d < D).to(tl.float32)
    b_y = tl.where(b_h >= LEAST, b_x * SCALE, 0.0)
    tl.store(p_y + i_n.to(tl.int64) * D + o_d, b_y.to(p_y.dtype.element_ty), o_d < D)


@launcher
@triton.jit(do_not_specialize=["N"])
def _sort(p_sorted, p_order, p_ids, N, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    """A token's place in the order is the number of tokens that are smaller, or equal and earlier."""
    await_previous()
    first = tl.program_id(0) * BLOCK
    o_i = first + tl.arange(0, BLOCK)
    o_j = tl.arange(0, OTHERS)
    b_i = tl.load(p_ids + o_i, o_i < N, 0).to(tl.int32)
    b_place = tl.zeros((BLOCK, OTHERS), tl.int32)
    for j in range(0, first // OTHERS * OTHERS, OTHERS):  # all before the block
        b_j = tl.load(p_ids + j + o_j).to(tl.int32)
        b_place += (b_j[None, :] <= b_i[:, None]).to(tl.int32)
    for j in range(first // OTHERS * OTHERS, N, OTHERS):
        b_j = tl.load(p_ids + j + o_j, j + o_j < N, 0x7FFFFFFF).to(tl.int32)
        b_before = ((j + o_j)[None, :] < o_i[:, None]).to(tl.int32)
        b_place += (b_j[None, :] < b_i[:, None] + b_before).to(tl.int32)
    o_place = tl.sum(b_place, 1)
    tl.store(p_sorted + o_place, b_i, o_i < N)
    tl.store(p_order + o_place, o_i.to(tl.int64), o_i < N)


@triton.jit
def _add_row(p_dw, i_v, o_d, b_sum, D: tl.constexpr):
    """Adds to row i_v, rounded once."""
    p_dw += i_v * D + o_d
    b_dw = tl.load(p_dw, o_d < D).to(tl.float32) + b_sum
    tl.store(p_dw, b_dw.to(p_dw.dtype.element_ty), o_d < D)


@launcher
@triton.jit(do_not_specialize=["N"])
def _embedding_bwd(
    p_dw, p_dy, p_sorted, p_order, p_parts, N, D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program per place i: where a run or a chunk begins, it sums the run from there to the end of either."""
    await_previous()
    i = tl.program_id(0)
    i_v = tl.load(p_sorted + i).to(tl.int64)
    run_begins = tl.load(p_sorted + i - 1, i > 0, -1) != i_v
    if (i % CHUNK != 0) & (run_begins == 0):
        return
    stop = tl.minimum((i // CHUNK + 1) * CHUNK, N)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    o_i = i + tl.arange(0, ROWS)
    b_token = tl.load(p_sorted + o_i, o_i < stop, -1)
    b_n = tl.load(p_order + o_i, o_i < stop, 0)
    more = True
    while more:
        m_run = b_token == i_v
        b_dy = tl.load(p_dy + b_n[:, None] * D + o_d[None, :], m_run[:, None] & m_d[None, :], 0.0)
        more = tl.sum(m_run.to(tl.int32), 0) == ROWS
        o_i += ROWS  # read ahead of these rows: one latency a turn, not three
        b_token = tl.load(p_sorted + o_i, o_i < stop, -1)
        b_n = tl.load(p_order + o_i, o_i < stop, 0)
        b_sum += tl.sum(b_dy.to(tl.float32), 0)
    if run_begins & (tl.load(p_sorted + stop, stop < N, -1) != i_v):
        _add_row(p_dw, i_v, o_d, b_sum, D)
    else:  # two places a chunk: for a run going on into it, and one beyond it
        i_part = 2 * (i // CHUNK) + (i % CHUNK != 0).to(tl.int32)
        tl.store(p_parts + tl.cast(i_part, tl.int64) * D + o_d, b_sum, m_d)


@launcher
@triton.jit(do_not_specialize=["N"])
def _embedding_add(p_dw, p_sorted, p_parts, N, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr):
    """A program per chunk i: adds up the run that begins in the chunk and crosses its end."""
    await_previous()
    i = tl.program_id(0)
    end = (i + 1) * CHUNK
    i_v = tl.load(p_sorted + end - 1).to(tl.int64)
    here = tl.load(p_sorted + i * CHUNK) == i_v  # from the first place
    before = tl.load(p_sorted + i * CHUNK - 1, i > 0, -1) == i_v
    if before | (tl.load(p_sorted + end) != i_v):
        return
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    i_part = tl.cast(2 * i + (here == 0).to(tl.int32), tl.int64)
    b_sum = tl.load(p_parts + i_part * D + o_d, m_d, 0.0)
    while tl.load(p_sorted + end, end < N, -1) == i_v:
        b_sum += tl.load(p_parts + tl.cast(2 * (end // CHUNK), tl.int64) * D + o_d, m_d, 0.0)
        end += CHUNK
    _add_row(p_dw, i_v, o_d, b_sum, D)


def embedding_fwd(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """As reference.embedding_fwd, contiguous."""
    (N,), D = ids.shape, weight.shape[1]
    out = torch.empty((N, D), dtype=weight.dtype, device=weight.device) if out is None else out
    assert ids.dtype == torch.int64
    assert out.shape == (N, D)
    assert all(t.is_contiguous() for t in (weight, out))
    block = min(1024, power2(D))
    _embedding_fwd[(N, cdiv(D, block))](ids, weight, out, D, block, num_warps=4)
    return out


def sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts ids (N,) int64, 0 <= id < 2^31, stably: (sorted values (N,) int32, index of each in ids (N,) int64)."""
    N = len(ids)
    if N > FEW:
        return torch.sort(ids.to(torch.int32), stable=True)  # half the radix passes of int64
    values = torch.empty(N, dtype=torch.int32, device=ids.device)
    order = torch.empty_like(ids)
    _sort[(cdiv(N, 16),)](values, order, ids, N, 16, 128, num_warps=4)
    return values, order


def embedding_bwd_(dweight_: Tensor, dy: Tensor, ids: Tensor) -> None:
    """As reference.embedding_bwd_, contiguous."""
    N, D = dy.shape
    assert ids.shape == (N,)
    assert ids.dtype == torch.int64
    assert dweight_.shape[1] == D
    assert all(t.is_contiguous() for t in (ids, dy, dweight_))
    tokens, order = sort(ids)
    chunks, block = cdiv(N, CHUNK), min(4096, power2(D))
    parts = torch.empty((2 * chunks, D), dtype=torch.float32, device=dy.device)
    grid, warps = (N, cdiv(D, block)), max(4, block // 512)
    _embedding_bwd[grid](dweight_, dy, tokens, order, parts, N, D, CHUNK, ROWS, block, num_warps=warps)
    if chunks > 1:
        block = min(1024, power2(D))
        grid = (chunks - 1, cdiv(D, block))
        _embedding_add[grid](dweight_, tokens, parts, N, D, CHUNK, block, num_warps=4)


def add_noise_(x_: Tensor, scale: Tensor, key: int, first: int) -> None:
    """As reference.add_noise_."""
    (N, D), block = x_.shape, min(1024, power2(x_.shape[1]))
    assert x_.is_contiguous()
    assert scale.shape == (N,)
    assert scale.dtype == torch.float32
    assert 0 <= key < 1 << 31
    assert 0 <= first < (1 << 31) - N
    _add_noise[(N, cdiv(D, block))](x_, scale, key, first, D, block, num_warps=4)


def dropout(x: Tensor, p: float, key: int, first: int, out: Tensor | None = None) -> Tensor:
    """As reference.dropout; rows of x may be apart."""
    (N, D), block = x.shape, min(1024, power2(x.shape[1]))
    out = torch.empty((N, D), dtype=x.dtype, device=x.device) if out is None else out
    assert x.stride(1) == 1
    assert out.shape == x.shape
    assert out.is_contiguous()
    assert 0 <= p < 1
    assert 0 <= key < 1 << 31
    assert 0 <= first < (1 << 31) - N
    threshold, scale = round(p * 2**24), 1 / (1 - p)
    _dropout[(N, cdiv(D, block))](x, out, key, first, D, x.stride(0), threshold, scale, block, num_warps=4)
    return out
