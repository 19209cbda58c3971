"""Distillation from a teacher's most likely tokens, in plain torch: reference for tests, and CPU path.

A teacher gives probabilities (shares) of K + 1 classes: its K most likely tokens, and all other tokens together. p are
the student's shares of these classes, q the teacher's, both softened, that is in proportion to share^(1 / T).

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

from trireme.kernels.reference import add_dweight_, soft_cap, upcast

NEVER = -1e6  # logarithm of a share that is 0


class Taught(NamedTuple):
    """A teacher's most likely tokens and probabilities for M labels, and the weight of its loss."""

    ids: Tensor  # (M, K) int32, different in a row
    logps: Tensor  # (M, K) fp16 or fp32
    rest: Tensor  # (M,) fp32: logarithm of the share of all other tokens
    weight: float  # of its loss; cross-entropy has the rest of 1
    temperature: float


def linear_distillation(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    scale: float,
    taught: Taught,
    dweight_: Tensor | None = None,
    dx_: Tensor | None = None,
    chunk: int = 2048,
    cap: float = 0.0,
    factors: Tensor | None = None,
    dlogits_: Tensor | None = None,
) -> Tensor:
    """(2, N) fp32: cross-entropy and T^2 times the divergence of each token.

    Row m of `taught` belongs to token rows[m]. Gradients are those of the loss above; other arguments and effects are
    those of linear_cross_entropy.
    """
    found = torch.zeros((2, x.shape[0]), dtype=upcast(x).dtype, device=x.device)
    if dx_ is not None:
        dx_.zero_()
    for i in range(0, len(rows), chunk):
        part = rows[i : i + chunk]
        xs, target = x[part], labels[part]
        logits = soft_cap(upcast(xs @ weight.T), cap)
        slope = 1 - (logits / cap) ** 2 if cap else 1.0
        ids = taught.ids[i : i + chunk].long()
        top, label = logits.gather(-1, ids), logits.gather(-1, target[:, None])[:, 0]
        logits.scatter_(-1, ids, float("-inf"))
        rest = torch.logsumexp(logits, -1).clamp(min=-1e30)  # none, where the teacher has all tokens
        lse = torch.logaddexp(rest, torch.logsumexp(top, -1))
        own = torch.cat([top, rest[:, None]], -1) - lse[:, None]
        theirs = torch.cat([taught.logps[i : i + chunk], taught.rest[i : i + chunk, None]], -1).to(own.dtype)
        p, q = (torch.log_softmax(t.clamp(min=NEVER) / taught.temperature, -1) for t in (own, theirs))
        found[0, part] = lse - label
        found[1, part] = taught.temperature**2 * (q.exp() * (q - p)).sum(-1)
        if dx_ is None:
            continue
        g = taught.weight * taught.temperature * (p.exp() - q.exp()) + (1 - taught.weight) * own.exp()
        logits.sub_(rest[:, None]).exp_().mul_(g[:, -1:])
        logits.scatter_(-1, ids, g[:, :-1])
        logits[torch.arange(len(part), device=x.device), target] -= 1 - taught.weight
        each = scale if factors is None else scale * factors[part][:, None]
        dlogits = logits.mul_(each).mul_(slope).to(x.dtype)
        dx_[part] = dlogits @ weight
        if dlogits_ is not None:
            dlogits_[i : i + chunk] = dlogits
        if dweight_ is not None:
            add_dweight_(dweight_, dlogits, xs)
    return found
