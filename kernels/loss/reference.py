"""Losses of a linear layer's result in plain torch: reference for tests, and CPU path.

Distillation from a teacher's most likely tokens: it gives probabilities (shares) of K + 1 classes, its K most likely
tokens, and all other tokens together. p are the student's shares of these classes, q the teacher's, both softened, that
is in proportion to share^(1 / T).

    loss = (1 - weight) * (lse - logits[label]) + weight * T^2 * sum(q * log(q / p))

Let g = T * (p - q), whose sum is 0. The derivative of T^2 times the divergence is g of a likeliest token by its logit,
and g of the others times the softmax over the others by the logit of another one (Hinton et al. 2015,
arXiv:1503.02531, section 2, for these classes).
Legend: N tokens, M labels, K most likely tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels.reference import add_, soft_cap, upcast

NEVER = -1e6  # logarithm of a share that is 0


class Taught(NamedTuple):
    """A teacher's most likely tokens and probabilities for M labels, and the weight of its loss."""

    ids: Tensor  # (M, K) int32, different in a row
    logps: Tensor  # (M, K) fp16 or fp32
    tail: Tensor  # (M,) fp32: logarithm of the share of all other tokens
    weight: float  # of its loss; cross-entropy has the rest of 1
    temperature: float


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    scale: float,
    dweight_: Tensor | None = None,
    dx_: Tensor | None = None,
    chunk: int = 2048,
    cap: float = 0.0,
    factors: Tensor | None = None,
    smoothing: float = 0.0,
    hits_: Tensor | None = None,
    taught: Taught | None = None,
) -> Tensor:
    """Cross-entropy of each token, (N,) fp32, under softmax(x @ weight.T).

    x (N, D), weight (V, D), labels (N,) int64; rows (M,) int64 are the indices of the tokens with a label. Losses of
    other tokens are zero. With `cap` > 0 logits are cap * tanh(x @ weight.T / cap). `smoothing` is the share of the
    label's probability that is spread evenly over all V.

    With dx_ also the gradients of scale * sum(factors * loss), factors (N,) fp32 by token (None: 1): fills dx_ (N, D),
    adds to dweight_ (V, D). Sets hits_ (N,) uint8 of `rows` to 1 where no logit is above the label's, else to 0.

    With `taught`, whose row m belongs to token rows[m], the gradients are those of the loss above; the result is
    (2, N), cross-entropy and T^2 times the divergence. Then without smoothing and hits_.

    Logits exist for `chunk` rows at a time.
    """
    losses = torch.zeros(x.shape[0] if taught is None else (2, len(x)), dtype=upcast(x).dtype, device=x.device)
    if dx_ is not None:
        dx_.zero_()
    for i in range(0, len(rows), chunk):
        part = rows[i : i + chunk]
        xs, target = x[part], labels[part]
        logits = soft_cap(upcast(xs @ weight.T), cap)
        slope = 1 - (logits / cap) ** 2 if cap and dx_ is not None else 1.0
        if taught is None:
            losses[part] = _plain(logits, target, smoothing, hits_, part, dx_ is not None)
        else:
            losses[:, part] = _taught(logits, target, taught, slice(i, i + chunk))
        if dx_ is None:
            continue
        dlogits = logits.mul_(scale if factors is None else scale * factors[part][:, None]).mul_(slope)
        dlogits = dlogits.to(x.dtype)
        dx_[part] = dlogits @ weight
        if dweight_ is not None:
            _add_dweight_(dweight_, dlogits, xs)
    return losses


def _plain(
    logits_: Tensor, target: Tensor, smoothing: float, hits_: Tensor | None, part: Tensor, gradient: bool
) -> Tensor:
    """Losses; if `gradient` logits_ becomes their derivatives."""
    lse, label = torch.logsumexp(logits_, -1), logits_.gather(-1, target[:, None])[:, 0]
    losses = lse - ((1 - smoothing) * label + smoothing * logits_.mean(-1) if smoothing else label)
    if hits_ is not None:
        hits_[part] = (label == logits_.amax(-1)).to(torch.uint8)
    if gradient:
        logits_.sub_(lse[:, None]).exp_()
        logits_[torch.arange(len(part), device=logits_.device), target] -= 1 - smoothing
        if smoothing:
            logits_ -= smoothing / logits_.shape[1]
    return losses


def _taught(logits_: Tensor, target: Tensor, taught: Taught, part: slice) -> Tensor:
    """(2, rows): cross-entropies and divergences; logits_ becomes the derivatives of the loss."""
    weight, T = taught.weight, taught.temperature
    ids = taught.ids[part].long()
    top, label = logits_.gather(-1, ids), logits_.gather(-1, target[:, None])[:, 0]
    logits_.scatter_(-1, ids, float("-inf"))
    tail = torch.logsumexp(logits_, -1).clamp(min=-1e30)  # none, where the teacher has all tokens
    lse = torch.logaddexp(tail, torch.logsumexp(top, -1))
    logps = torch.cat([top, tail[:, None]], -1) - lse[:, None]
    teacher = torch.cat([taught.logps[part], taught.tail[part, None]], -1).to(logps.dtype)
    p, q = (torch.log_softmax(t.clamp(min=NEVER) / T, -1) for t in (logps, teacher))
    divergence = T**2 * (q.exp() * (q - p)).sum(-1)
    g = weight * T * (p.exp() - q.exp()) + (1 - weight) * logps.exp()
    logits_.sub_(tail[:, None]).exp_().mul_(g[:, -1:])
    logits_.scatter_(-1, ids, g[:, :-1])
    logits_[torch.arange(len(target), device=logits_.device), target] -= 1 - weight
    return torch.stack((lse - label, divergence))


def _add_dweight_(dweight_: Tensor, dlogits: Tensor, xs: Tensor) -> None:
    """dweight_ (V, D) += dlogits.T @ xs of a chunk."""
    add_(dweight_, upcast(dlogits.T @ xs) if dweight_.dtype == xs.dtype else upcast(dlogits).T @ upcast(xs))
