"""Routing: the k experts of each token with their weights, and the gradient of the router's logits.

    score = softmax(l) or sigmoid(l);  w = scale * score, with Rule.renormalise divided by the sum over the chosen
    softmax:              dl = p (dw - <p, dw> / scale), p = w; if renormalised, of the chosen alone
    sigmoid:              dl = scale s (1 - s) dw
    sigmoid, renormalised: dl = scale s (1 - s) (dw - <s, dw> / S) / S,  S the sum of s over the chosen

Legend: N tokens, E experts, CHOSEN (k) of them for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.compiler import tl, triton
from trireme.kernels.experts.reference import Rule
from trireme.kernels.launch import cdiv, power2
from trireme.kernels.launcher import await_previous, launcher

TINY = tl.constexpr(1e-20)
NONE = tl.constexpr(1 << 30)


@triton.jit
def _load_logits(p_logits, o_n, o_e, N, E: tl.constexpr):
    """(ROWS, BLOCK_E) fp32, -inf in columns beyond the experts."""
    mask = (o_n < N)[:, None] & (o_e < E)[None, :]
    return tl.load(p_logits + o_n.to(tl.int64)[:, None] * E + o_e[None, :], mask, float("-inf")).to(tl.float32)


@triton.jit
def _softmax(b_x):
    """Over the columns; rows of -inf alone give zeros."""
    b_max = tl.max(b_x, 1)
    b_p = tl.exp(b_x - tl.where(b_max == float("-inf"), 0.0, b_max)[:, None])
    b_sum = tl.sum(b_p, 1)
    return b_p / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]


@triton.jit
def _scores(b_x, b_chosen, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr):
    """Weights by expert before their scale."""
    if SIGMOID:
        b_s = tl.sigmoid(b_x)
        if RENORMALISE:
            b_s = b_s / (tl.sum(tl.where(b_chosen, b_s, 0.0), 1) + TINY)[:, None]
    elif RENORMALISE:
        b_s = _softmax(tl.where(b_chosen, b_x, float("-inf")))
    else:
        b_s = _softmax(b_x)
    return b_s


@triton.jit
def _of_best_groups(b_key, b_real, o_e, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr):
    """b_key, with -inf outside the KEPT best groups. b_real marks the columns that are experts, not padding."""
    o_group = o_e // (E // GROUPS)
    b_best = b_key
    for i_group in range(GROUPS):
        b_own = tl.where(b_real & (o_group == i_group)[None, :], b_key, float("-inf"))
        b_max = tl.max(b_own, 1)
        if TWO:
            b_first = tl.min(tl.where((o_group == i_group)[None, :] & (b_own >= b_max[:, None]), o_e[None, :], NONE), 1)
            b_max += tl.max(tl.where(o_e[None, :] == b_first[:, None], float("-inf"), b_own), 1)
        b_best = tl.where((o_group == i_group)[None, :], b_max[:, None], b_best)
    b_left = b_real
    for _ in range(KEPT):
        b_max = tl.max(tl.where(b_left, b_best, float("-inf")), 1)
        b_first = tl.min(tl.where(b_left & (b_best >= b_max[:, None]), o_e[None, :], NONE), 1)
        b_left = b_left & (o_group[None, :] != (b_first // (E // GROUPS))[:, None])
    return tl.where(b_left, float("-inf"), b_key)


@launcher
@triton.jit(do_not_specialize=["N"])
def _route_fwd(
    p_logits, p_correction, p_weights, p_experts, scale, N, E: tl.constexpr, CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, TWO: tl.constexpr,
    RAW: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Takes the largest score that is left, CHOSEN times; then stores the chosen experts in ascending order."""
    await_previous()
    o_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    b_x = _load_logits(p_logits, o_n, o_e, N, E)
    b_key = b_x
    if (p_correction is not None or GROUPS > 1) and not RAW:
        b_key = tl.sigmoid(b_x) if SIGMOID else _softmax(b_x)
    if p_correction is not None:
        b_key += tl.load(p_correction + o_e, o_e < E, 0.0)[None, :]
    b_key = tl.where(b_key == b_key, b_key, float("-inf"))
    b_left = (o_e < E)[None, :] & (o_n >= 0)[:, None]
    if GROUPS > 1:
        b_key = _of_best_groups(b_key, b_left, o_e, E, GROUPS, KEPT, TWO)
    for _ in range(CHOSEN):
        b_max = tl.max(tl.where(b_left, b_key, float("-inf")), 1)
        b_first = tl.min(tl.where(b_left & (b_key >= b_max[:, None]), o_e[None, :], NONE), 1)
        b_left = b_left & (o_e[None, :] != b_first[:, None])
    b_chosen = (o_e < E)[None, :] & (b_left == 0)
    b_w = _scores(b_x, b_chosen, SIGMOID, RENORMALISE) * scale
    b_one = b_chosen.to(tl.int32)
    o_out = o_n.to(tl.int64)[:, None] * CHOSEN + tl.cumsum(b_one, 1) - b_one
    mask = b_chosen & (o_n < N)[:, None]
    tl.store(p_weights + o_out, b_w, mask)
    tl.store(p_experts + o_out, tl.zeros((ROWS, BLOCK_E), tl.int32) + o_e[None, :], mask)


@launcher
@triton.jit(do_not_specialize=["N"])
def _route_bwd(
    p_dweights, p_logits, p_experts, p_balance, p_dlogits, scale, N, E: tl.constexpr, CHOSEN: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    await_previous()
    o_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    b_x = _load_logits(p_logits, o_n, o_e, N, E)
    b_g = tl.zeros((ROWS, BLOCK_E), tl.float32)
    b_chosen = b_g != 0.0
    o_k = o_n.to(tl.int64) * CHOSEN
    for i_k in range(CHOSEN):
        b_here = tl.load(p_experts + o_k + i_k, o_n < N, 0)[:, None] == o_e[None, :]
        b_g = tl.where(b_here, tl.load(p_dweights + o_k + i_k, o_n < N, 0.0)[:, None], b_g)
        b_chosen = b_chosen | b_here
    b_p = _scores(b_x, b_chosen, SIGMOID, RENORMALISE)
    if SIGMOID:
        b_s = tl.sigmoid(b_x)
        if RENORMALISE:
            b_g = b_g - tl.sum(b_g * b_p, 1)[:, None]
            b_s = b_s / (tl.sum(tl.where(b_chosen, b_s, 0.0), 1) + TINY)[:, None]
        b_dx = tl.where(b_chosen, b_g * scale * b_s * (1.0 - tl.sigmoid(b_x)), 0.0)
    else:
        b_dx = b_p * (b_g - tl.sum(b_g * b_p, 1)[:, None]) * scale
    if p_balance is not None:
        b_f = tl.load(p_balance + o_e, o_e < E, 0.0)[None, :]
        b_all = _softmax(b_x)
        b_dx += b_all * (b_f - tl.sum(b_all * b_f, 1)[:, None])
    mask = (o_n < N)[:, None] & (o_e < E)[None, :]
    p_out = p_dlogits + o_n.to(tl.int64)[:, None] * E + o_e[None, :]
    tl.store(p_out, b_dx.to(p_dlogits.dtype.element_ty), mask)


def route_fwd(logits: Tensor, rule: Rule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As reference.route_fwd, logits contiguous."""
    N, E = logits.shape
    assert logits.is_contiguous()
    assert 0 < rule.k <= E
    assert E % rule.groups == 0
    assert rule.k * rule.groups <= E * rule.kept
    assert not rule.raw or rule.groups == 1
    assert correction is None or (correction.shape == (E,) and correction.dtype == torch.float32)
    weights = torch.empty((N, rule.k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((N, rule.k), dtype=torch.int32, device=logits.device)
    rows, columns = _block(E)
    _route_fwd[(cdiv(N, rows),)](
        logits, correction, weights, experts, float(rule.scale), N,
        E, rule.k, rule.sigmoid, rule.renormalise, rule.groups, rule.kept, rule.two, rule.raw, rows, columns,
        num_warps=4,
    )  # fmt: skip
    return weights, experts


def route_bwd(dweights: Tensor, logits: Tensor, experts: Tensor, rule: Rule, balance: Tensor | None = None) -> Tensor:
    """As reference.route_bwd, all contiguous."""
    N, E = logits.shape
    assert dweights.shape == experts.shape == (N, rule.k)
    assert dweights.dtype == torch.float32
    assert experts.dtype == torch.int32
    assert all(t.is_contiguous() for t in (dweights, logits, experts))
    assert balance is None or (balance.shape == (E,) and balance.dtype == torch.float32)
    dlogits = torch.empty_like(logits)
    rows, columns = _block(E)
    _route_bwd[(cdiv(N, rows),)](
        dweights, logits, experts, balance, dlogits, float(rule.scale), N,
        E, rule.k, rule.sigmoid, rule.renormalise, rows, columns, num_warps=4,
    )  # fmt: skip
    return dlogits


def _block(E: int) -> tuple[int, int]:
    """(rows, columns) of a program's tile."""
    columns = max(16, power2(E))
    return max(1, 2048 // columns), columns
