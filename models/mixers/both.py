"""The sub-layer of a block with two mixers of one input, attention and a recurrence (Falcon-H1, arXiv:2507.22448).

    out = x + attention(norm(x)) + scan(norm(x))

Both are as in attention.py and scan.py and save the tensors named there. They share one norm, which each computes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trireme.models import attention
from trireme.models.attention import Attend
from trireme.models.mixers import scan
from trireme.models.rows import Pass


class Weights(NamedTuple):
    """Weights of the sub-layer, or their gradients."""

    attention: attention.Weights
    scan: scan.Weights  # with the same norm


class Mixing(NamedTuple):
    """The functions that generation calls in place of attention and of the recurrence."""

    attend: Attend
    recur: scan.Recur


def forward(p: Pass, w: Weights, x: Tensor, out: Tensor, mixing: Mixing | None = None) -> None:
    """Fills out (N, D), which must not be x, and every tensor of p.saved; the others are temporaries."""
    attend, recur = mixing or (None, None)
    attention.forward(p, w.attention, x, out, attend)
    scan.forward(_scanned(p), w.scan, x, out, recur)


Result = tuple[attention.Result, scan.Result]  # what backward needs of forward


def residual(p: Pass, w: Weights, x: Tensor) -> tuple[Tensor, Result]:
    """Recomputes forward: (its `out` (N, D), the Result that backward needs)."""
    second = scan.recall(_scanned(p), w.scan, x)
    out, first = attention.residual(p, w.attention, x)
    scan.add_(p.cfg.scanned, w.scan, second, out)
    return out, (first, second)


def backward(
    p: Pass, w: Weights, g: Weights, x: Tensor, dy: Tensor, dx: Tensor, recalled: list[Result] | None = None
) -> None:
    """Fills dx (N, D), which must not be dy, and adds to g, given dy (N, D); recomputes what is not in p.saved.

    `recalled` may hold the Result of `residual`, which is taken from it.
    """
    first, second = recalled.pop() if recalled else (None, None)  # workspace._block_workspace: both to the end
    attention.backward(p, w.attention, g.attention, x, dy, dx, [first] if first else None)
    scan.backward(_scanned(p), w.scan, g.scan, x, dy, dx, [second] if second else None)


def _scanned(p: Pass) -> Pass:
    return p._replace(cfg=p.cfg.scanned)
