"""Mixture-of-experts operations in plain torch, with the launchers' names and signatures: reference, and CPU path.

Legend: N tokens, E experts, k chosen for each token, P = N k pairs (token, slot), numbered token * k + slot, D width.
A token's slots are in ascending order of expert, so sums over slots are in this order. Sorted rows: pairs by expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels.reference import upcast


class Rule(NamedTuple):
    """How logits become k experts and their weights.

    Scores are the softmax over all experts, or sigmoids. The weights are the scores of the chosen experts, divided by
    their sum if `renormalise` (with softmax that is the softmax over the chosen), times `scale`.
    With several `groups` of experts with neighbouring numbers, experts are chosen from the best `kept` groups only
    (DeepSeek-V2 and V3, arXiv:2405.04434, 2412.19437). A group is rated by the sum of its two best scores, or without
    `two` by its best. With `raw` a correction is added to logits, not to scores, to choose experts.
    """

    k: int
    renormalise: bool = True
    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    kept: int = 1
    two: bool = True
    raw: bool = False


class Order(NamedTuple):
    """Pairs sorted by expert; pairs of one expert in the order of their numbers."""

    pair: Tensor  # (P,) int32, the pair of each sorted row
    row: Tensor  # (P,) int32, the sorted row of each pair
    starts: Tensor  # (E + 1,) int32, the first sorted row of each expert, and P
    sliced: bool = False  # whether `starts` is of some neighbouring experts; rows of others may hold anything


TINY = 1e-20  # added to a sum of sigmoids


# ---------------------------------------------------------------- routing


def route_fwd(logits: Tensor, rule: Rule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights (N, k) fp32, experts (N, k) int32, ascending) of logits (N, E).

    Chosen are the k largest logits; with a correction (E,) fp32 the k largest of score + correction. With groups the
    best groups, and in them the experts, are chosen by score + correction, or by score without one. Of equal values the
    lower index is chosen. NaN is chosen last, and makes the weights NaN.
    """
    x = upcast(logits)
    score = torch.sigmoid(x) if rule.sigmoid else torch.softmax(x, -1)
    key = score if rule.groups > 1 else x
    if correction is not None:
        key = (x if rule.raw else score) + correction
    key = torch.where(key.isnan(), float("-inf"), key)
    key = _mask_groups(key, rule) if rule.groups > 1 else key
    experts = torch.sort(key, dim=-1, descending=True, stable=True).indices[:, : rule.k].sort(-1).values
    return _scores(x, rule, _chosen(experts, x)).gather(-1, experts), experts.int()


def route_bwd(dweights: Tensor, logits: Tensor, experts: Tensor, rule: Rule, balance: Tensor | None = None) -> Tensor:
    """The gradient (N, E) of the logits, given that of the weights (N, k) fp32.

    With `balance` (E,) fp32 the gradient of sum(softmax(logits) * balance), a load-balancing loss, is added.
    """
    x, picked = upcast(logits), experts.long()
    chosen = _chosen(picked, x)
    g = torch.zeros_like(x).scatter_(-1, picked, dweights.to(x.dtype))
    if rule.sigmoid:
        s = torch.sigmoid(x)
        if rule.renormalise:
            total = torch.where(chosen, s, 0.0).sum(-1, keepdim=True) + TINY
            g = (g - (g * s / total).sum(-1, keepdim=True)) / total
        dx = torch.where(chosen, g * rule.scale * s * (1 - s), 0.0)
    else:
        p = _scores(x, rule, chosen)
        dx = p * (g - (g * p).sum(-1, keepdim=True) / rule.scale)
    if balance is not None:
        p = torch.softmax(x, -1)
        dx += p * (balance - (p * balance).sum(-1, keepdim=True))
    return dx.to(logits.dtype)


def _mask_groups(key: Tensor, rule: Rule) -> Tensor:
    """key (N, E), -inf outside the groups that are kept."""
    grouped = key.unflatten(-1, (rule.groups, -1))
    best = grouped.topk(2).values.sum(-1) if rule.two else grouped.amax(-1)
    groups = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : rule.kept]
    return grouped.masked_fill(~_chosen(groups, best)[..., None], float("-inf")).flatten(1)


def _chosen(experts: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, experts.long(), True)


def _scores(x: Tensor, rule: Rule, chosen: Tensor) -> Tensor:
    """Weights (N, E) by expert. Only those of the chosen count; softmax with `renormalise` has zeros elsewhere."""
    if not rule.sigmoid:
        return torch.softmax(torch.where(chosen, x, float("-inf")) if rule.renormalise else x, -1) * rule.scale
    s = torch.sigmoid(x)
    return (s / (torch.where(chosen, s, 0.0).sum(-1, keepdim=True) + TINY) if rule.renormalise else s) * rule.scale


def sort_pairs(experts: Tensor, n_experts: int) -> Order:
    """The Order of experts (N, k) int32, each < n_experts."""
    flat = experts.flatten().long()
    pair = torch.argsort(flat, stable=True)
    row = torch.empty_like(pair)
    row[pair] = torch.arange(len(pair), device=pair.device)
    counts = torch.bincount(flat, minlength=n_experts)
    return Order(pair.int(), row.int(), torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int())


# ---------------------------------------------------------------- grouped GEMMs


Scales = tuple[Tensor, Tensor]  # of rows of x, of experts (E,), fp32


def grouped_mm(
    x: Tensor,
    w: Tensor,
    order: Order,
    k: int = 0,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """y (P, B), or `out` filled: each sorted row of x (P, A) times its expert's matrix of w (E, A, B), plus its bias.

    With k > 0 x is (N, A), and a sorted row is the row of its token. w may be a transposed view; bias (E, B).
    With `scales` x and w are codes in E4M3 (fp8/reference.py): products of codes are summed in fp32, then multiplied by
    the scales of their row and expert. `out` must be given then.
    """
    y = torch.empty((len(order.pair), w.shape[2]), dtype=x.dtype, device=x.device) if out is None else out
    if scales is not None:
        assert out is not None
        x, of_rows = x.float(), scales[0][:, None]
        for e, rows in _groups(order):
            total = torch.mm(_rows(x, order, rows, k), w[e].float()).mul_(_rows(of_rows, order, rows, k) * scales[1][e])
            y[rows] = (total if bias is None else total.add_(bias[e].float())).to(y.dtype)
        return y
    for e, rows in _groups(order):
        part = _rows(x, order, rows, k)
        torch.mm(part, w[e], out=y[rows]) if bias is None else torch.addmm(bias[e], part, w[e], out=y[rows])
    return y


def grouped_add_(dw_: Tensor, a: Tensor, b: Tensor, order: Order, k_a: int = 0, k_b: int = 0) -> None:
    """Adds a.T @ b over each expert's sorted rows of a (P, A) and b (P, B) to dw_ (E, A, B).

    With k_a > 0 a is (N, A), and a sorted row is the row of its token; likewise b with k_b > 0. Experts without rows
    are not touched. dw_ may be a transposed view, in the dtype of a and b or in fp32.
    """
    for e, rows in _groups(order):
        x, y = _rows(a, order, rows, k_a), _rows(b, order, rows, k_b)
        if dw_.dtype == x.dtype:
            dw_[e].addmm_(x.T, y)
        else:
            dw_[e].addmm_(upcast(x).T, upcast(y))


def _groups(order: Order) -> list[tuple[int, slice]]:
    """(expert, its sorted rows) of those that have any."""
    starts = order.starts.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, starts[1:], strict=False)) if a < b]


def _rows(x: Tensor, order: Order, rows: slice, k: int) -> Tensor:
    return x[order.pair[rows].long() // k] if k else x[rows]


# ---------------------------------------------------------------- rows


def combine(
    rows: Tensor,
    order: Order,
    k: int,
    weights: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    carry: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """For each token the sum over its slots, in order, of weights (N, k) fp32 (None: 1) times rows (P, D).

    (N, D), in `out` if given. `residual` (N, D), which may be `out`, is added last; the sum is rounded once. A sum can
    be computed in parts: with `starts` (n + 1,) int32, the first rows of n neighbouring experts, only their rows are
    added, to `carry` (N, D) fp32, which may be `out`.
    """
    picked = upcast(rows)[order.row.long()].view(-1, k, rows.shape[1])
    total = torch.zeros_like(picked[:, 0]) if carry is None else carry.to(picked.dtype, copy=True)
    for slot in range(k):
        term = picked[:, slot] if weights is None else weights[:, slot, None] * picked[:, slot]
        if starts is not None:
            row = order.row.view(-1, k)[:, slot, None]
            term = torch.where((row >= starts[0]) & (row < starts[-1]), term, 0.0)
        total += term
    total = total if residual is None else total + upcast(residual)
    return total.to(rows.dtype) if out is None else out.copy_(total.to(out.dtype))
