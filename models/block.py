"""A block: attention, a recurrence or both, then MLP, or with cfg.parallel attention and MLP of one input.

Saved in addition to their tensors: resid (N, D), the MLP's input, where that is not the block's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models import attention, experts, mlp
from trireme.models.attention import Attend
from trireme.models.config import ModelConfig
from trireme.models.lora import dropping
from trireme.models.mixers import both, scan
from trireme.models.rows import Rows
from trireme.models.sizes.shapes import saved_shapes

Mixer = attention.Weights | scan.Weights | both.Weights
Mixing = Attend | scan.Recur | both.Mixing  # what a mixer calls: generation has a cache of its own


class Weights(NamedTuple):
    """A block's weights, or their gradients."""

    attention: Mixer
    mlp: mlp.Weights | experts.Weights


def forward(
    cfg: ModelConfig,
    layer: int,
    w: Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    attend: Mixing = ops.attention_fwd,
) -> None:
    """Fills out (N, D) and every tensor of `saved`, given x (N, D)."""
    resid = saved.get("resid", out)
    mixer_forward(cfg, layer, w.attention, x, rows, saved, resid, attend)
    mlp_forward(cfg, layer, w.mlp, x if cfg.parallel else resid, rows, saved, out)


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
    """Fills dx (N, D), adds to g, given dy (N, D); recomputes what is not in `saved`."""
    recalled: list[Any] = []  # the mixer's Result, which its backward takes and frees
    if cfg.parallel:
        resid = x
    elif "resid" in saved:
        resid = saved["resid"]
    else:
        resid = _residual(cfg, layer, w.attention, x, saved, rows, recalled)
    dresid = mlp_backward(cfg, w.mlp, g.mlp, resid, rows, saved, dy)
    del resid  # workspace._block_workspace
    dbranch = dy if cfg.parallel else dresid
    mixer_backward(cfg, layer, w.attention, g.attention, x, saved, dbranch, rows, dx, recalled, dresid)


def _residual(
    cfg: ModelConfig, layer: int, w: Mixer, x: Tensor, saved: dict[str, Tensor], rows: Rows, recalled: list[Any]
) -> Tensor:
    """As residual of attention.py, scan.py or both.py, with the Result in `recalled`."""
    result: Any
    if isinstance(w, both.Weights):
        out, result = both.residual(cfg, layer, w, x, saved, rows)
    elif isinstance(w, scan.Weights):
        out, result = scan.residual(cfg, w, x, saved, rows)
    else:
        out, result = attention.residual(cfg, layer, w, x, saved, rows)
    recalled.append(result)
    return out


def mixer_forward(
    cfg: ModelConfig,
    layer: int,
    w: Mixer,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    attend: Mixing = ops.attention_fwd,
) -> None:
    """As attention.forward, scan.forward or both.forward."""
    if isinstance(w, both.Weights):
        mixing = None if attend is ops.attention_fwd else cast(both.Mixing, attend)
        both.forward(cfg, layer, w, x, rows, saved, out, mixing)
    elif isinstance(w, scan.Weights):
        scan.forward(cfg, w, x, rows, saved, out, None if attend is ops.attention_fwd else cast(scan.Recur, attend))
    else:
        attention.forward(cfg, layer, w, x, rows, saved, out, cast(Attend, attend))


def mixer_backward(
    cfg: ModelConfig,
    layer: int,
    w: Mixer,
    g: Mixer,
    x: Tensor,
    saved: dict[str, Tensor],
    dy: Tensor,
    rows: Rows,
    dx: Tensor,
    recalled: list[Any] | None = None,
    dresid: Tensor | None = None,
) -> None:
    """As attention.backward, scan.backward or both.backward."""
    if isinstance(w, both.Weights) and isinstance(g, both.Weights):
        both.backward(cfg, layer, w, g, x, saved, dy, rows, dx, recalled)
    elif isinstance(w, scan.Weights) and isinstance(g, scan.Weights):
        scan.backward(cfg, w, g, x, saved, dy, rows, dx, recalled)
    else:
        assert isinstance(w, attention.Weights)
        assert isinstance(g, attention.Weights)
        attention.backward(cfg, layer, w, g, x, saved, dy, rows, dx, recalled, dresid)


def mlp_forward(
    cfg: ModelConfig,
    layer: int,
    w: mlp.Weights | experts.Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    passed: experts.Passed | None = None,
) -> None:
    """As mlp.forward, of either kind; a long text in tiles of rows, which do not mix. `passed`: experts.py."""
    cfg = cfg.in_mlp
    if len(x) <= cfg.mlp_rows:
        _tile_forward(cfg, layer, w, x, rows, saved, out, passed)
        return
    for part in _tiles(cfg, x):
        tile, onto, w = x[part], _passed_rows(passed, part), dropping(w, rows.dropout, part.start)
        _tile_forward(cfg, layer, w, tile, rows, _of_rows(cfg, saved, part), tile if out is x else out[part], onto)


def mlp_backward(
    cfg: ModelConfig,
    w: mlp.Weights | experts.Weights,
    g: mlp.Weights | experts.Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    dy: Tensor,
    dx: Tensor | None = None,
    passed: experts.Passed | None = None,
) -> Tensor:
    """As mlp.backward, of either kind, in the tiles of forward."""
    cfg = cfg.in_mlp
    if len(x) <= cfg.mlp_rows:
        return _tile_backward(cfg, w, g, x, rows, saved, dy, dx, passed)
    dx = torch.empty_like(x) if dx is None else dx
    for part in _tiles(cfg, x):
        onto, w = _passed_rows(passed, part), dropping(w, rows.dropout, part.start)
        _tile_backward(cfg, w, g, x[part], rows, _of_rows(cfg, saved, part), dy[part], dx[part], onto)
    return dx


def _passed_rows(passed: experts.Passed | None, rows: slice) -> experts.Passed | None:
    return passed and {name: t[rows] for name, t in passed.items()}


def _tiles(cfg: ModelConfig, x: Tensor) -> Iterator[slice]:
    return (slice(a, min(a + cfg.mlp_rows, len(x))) for a in range(0, len(x), cfg.mlp_rows))


def _of_rows(cfg: ModelConfig, saved: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """The MLP half's saved tensors of these tokens."""
    each = {name: shape[0] for name, (shape, _) in saved_shapes(cfg, 1, "mlp").items() if name in saved}
    return {name: saved[name][k * rows.start : k * rows.stop] for name, k in each.items()}


def _tile_forward(
    cfg: ModelConfig,
    layer: int,
    w: mlp.Weights | experts.Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    passed: experts.Passed | None,
) -> None:
    if isinstance(w, experts.Weights):
        experts.forward(cfg, layer, w, x, rows, saved, out, passed)
    else:
        mlp.forward(cfg, w, x, saved, out)


def _tile_backward(
    cfg: ModelConfig,
    w: mlp.Weights | experts.Weights,
    g: mlp.Weights | experts.Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    dy: Tensor,
    dx: Tensor | None,
    passed: experts.Passed | None,
) -> Tensor:
    if isinstance(w, experts.Weights) and isinstance(g, experts.Weights):
        return experts.backward(cfg, w, g, x, rows, saved, dy, dx, passed)
    assert isinstance(w, mlp.Weights)
    assert isinstance(g, mlp.Weights)
    return mlp.backward(cfg, w, g, x, saved, dy, dx)
