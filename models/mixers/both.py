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


def recall(
    cfg: ModelConfig, layer: int, w: Weights, x: Tensor, saved: dict[str, Tensor], rows: Rows
) -> dict[str, Tensor]:
    """What forward can save, saved or recomputed."""
    first = attention.recall(cfg, layer, w.attention, x, saved, rows)
    second = scan.recall(cfg.scanned, w.scan, x, saved, rows)
    return dict(qkv=first.qkv, attn_out=first.out, lse=first.lse, mixed=second.mixed, scan_out=second.out)


def residual(cfg: ModelConfig, layer: int, w: Weights, x: Tensor, found: dict[str, Tensor], rows: Rows) -> Tensor:
    """Forward's `out` again, of what `recall` found."""
    out, _ = attention.residual(cfg, w.attention, x, attention.recall(cfg, layer, w.attention, x, found, rows), None)
    scan.add_(cfg.scanned, w.scan, scan.Result(found["mixed"], found["scan_out"]), out)
    return out


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
) -> None:
    """Fills dx (N, D), which is not dy, adds to g, given dy (N, D); recomputes what is not in `saved`."""
    attention.backward(cfg, layer, w.attention, g.attention, x, saved, dy, rows, dx)
    scan.backward(cfg.scanned, w.scan, g.scan, x, saved, dy, rows, dx)
