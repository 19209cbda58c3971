"""The sub-layer of a block with two mixers of one input, attention and a recurrence (Falcon-H1, arXiv:2507.22448).

    out = x + attention(norm(x)) + scan(norm(x))

Each is as in attention.py and scan.py, with what is saved there; the norm is one, and each computes it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trireme.kernels import ops
from trireme.models import attention
from trireme.models.attention import Attend
from trireme.models.config import ModelConfig
from trireme.models.mixers import scan
from trireme.models.rows import Rows


class Weights(NamedTuple):
    """The half's weights, or their gradients."""

    attention: attention.Weights
    scan: scan.Weights  # with the same norm


class Mixing(NamedTuple):
    """What generation calls in place of attention and the recurrence."""

    attend: Attend
    recur: scan.Recur


def forward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    mixing: Mixing | None = None,
) -> None:
    """Fills out (N, D), which is not x, and every tensor of `saved`; the others are temporaries."""
    attend, recur = mixing or (ops.attention_fwd, None)
    attention.forward(cfg, layer, w.attention, x, rows, saved, out, attend)
    scan.forward(cfg.scanned, w.scan, x, rows, saved, out, recur)


Result = tuple[attention.Result, scan.Result]  # what backward needs of forward


def residual(
    cfg: ModelConfig, layer: int, w: Weights, x: Tensor, saved: dict[str, Tensor], rows: Rows
) -> tuple[Tensor, Result]:
    """(forward's `out` again, what backward needs too)."""
    second = scan.recall(cfg.scanned, w.scan, x, saved, rows)
    out, first = attention.residual(cfg, layer, w.attention, x, saved, rows)
    scan.add_(cfg.scanned, w.scan, second, out)
    return out, (first, second)


def backward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    g: Weights,
    x: Tensor,
    saved: dict[str, Tensor],
    dy: Tensor,
    rows: Rows,
    dx: Tensor,
    recalled: list[Result] | None = None,
) -> None:
    """Fills dx (N, D), which is not dy, adds to g, given dy (N, D); recomputes what is not in `saved`.

    `recalled`: with what `residual` left, if anything.
    """
    first, second = recalled.pop() if recalled else (None, None)  # workspace._block_workspace: both to the end
    attention.backward(cfg, layer, w.attention, g.attention, x, saved, dy, rows, dx, [first] if first else None)
    scan.backward(cfg.scanned, w.scan, g.scan, x, saved, dy, rows, dx, [second] if second else None)
