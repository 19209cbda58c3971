"""A block: attention, a recurrence or both, then an MLP; with cfg.parallel both read the same input.

Saved in addition to the tensors of the sub-layers: resid (N, D), the MLP's input, unless that is the block's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.models import attention, experts, mlp
from trireme.models.attention import Attend
from trireme.models.config import ModelConfig
from trireme.models.lora import dropping
from trireme.models.mixers import both, scan
from trireme.models.rows import Pass
from trireme.models.sizes.shapes import saved_shapes

Mixer = attention.Weights | scan.Weights | both.Weights
Mlp = mlp.Weights | experts.Weights
Mixing = Attend | scan.Recur | both.Mixing  # what a mixer calls: generation has a cache of its own


class Weights(NamedTuple):
    """A block's weights, or their gradients."""

    attention: Mixer
    mlp: Mlp


def mixer(w: Mixer) -> Any:
    """The module of a mixer, by the type of its weights: attention.py, scan.py or both.py."""
    return both if isinstance(w, both.Weights) else scan if isinstance(w, scan.Weights) else attention


def forward(p: Pass, w: Weights, x: Tensor, out: Tensor, mixing: Mixing | None = None) -> None:
    """Fills out (N, D) and every tensor of p.saved, given x (N, D)."""
    resid = p.saved.get("resid", out)
    mixer(w.attention).forward(p, w.attention, x, resid, mixing)
    mlp_forward(p, w.mlp, x if p.cfg.parallel else resid, out)


def backward(p: Pass, w: Weights, g: Weights, x: Tensor, dy: Tensor, dx: Tensor) -> None:
    """Fills dx (N, D) and adds to g, given dy (N, D); recomputes what is not in p.saved."""
    recalled: list[Any] = []  # the mixer's Result, which its backward takes and frees
    if p.cfg.parallel:
        resid = x
    elif "resid" in p.saved:
        resid = p.saved["resid"]
    else:
        resid, *recalled = mixer(w.attention).residual(p, w.attention, x)
    dresid = mlp_backward(p, w.mlp, g.mlp, resid, dy)
    del resid  # workspace._block_workspace
    passed = (dy, dx, recalled, dresid) if p.cfg.parallel else (dresid, dx, recalled)
    mixer(w.attention).backward(p, w.attention, g.attention, x, *passed)


def mlp_forward(p: Pass, w: Mlp, x: Tensor, out: Tensor, passed: experts.Passed | None = None) -> None:
    """mlp.forward or experts.forward, for long texts in tiles of cfg.mlp_rows tokens. `passed`: experts.py."""
    p = p._replace(cfg=p.cfg.in_mlp)
    if len(x) <= p.cfg.mlp_rows:
        _tile_forward(p, w, x, out, passed)
        return
    for part in _tiles(p.cfg, x):
        tile, onto, w = x[part], _passed_rows(passed, part), dropping(w, p.rows.dropout, part.start)
        _tile_forward(_of_rows(p, part), w, tile, tile if out is x else out[part], onto)


def mlp_backward(
    p: Pass, w: Mlp, g: Mlp, x: Tensor, dy: Tensor, dx: Tensor | None = None, passed: experts.Passed | None = None
) -> Tensor:
    """mlp.backward or experts.backward, in the tiles of forward."""
    p = p._replace(cfg=p.cfg.in_mlp)
    if len(x) <= p.cfg.mlp_rows:
        return _tile_backward(p, w, g, x, dy, dx, passed)
    dx = torch.empty_like(x) if dx is None else dx
    for part in _tiles(p.cfg, x):
        onto, w = _passed_rows(passed, part), dropping(w, p.rows.dropout, part.start)
        _tile_backward(_of_rows(p, part), w, g, x[part], dy[part], dx[part], onto)
    return dx


def _passed_rows(passed: experts.Passed | None, rows: slice) -> experts.Passed | None:
    return passed and {name: t[rows] for name, t in passed.items()}


def _tiles(cfg: ModelConfig, x: Tensor) -> Iterator[slice]:
    return (slice(a, min(a + cfg.mlp_rows, len(x))) for a in range(0, len(x), cfg.mlp_rows))


def _of_rows(p: Pass, rows: slice) -> Pass:
    """p with the MLP's saved tensors of these tokens alone."""
    each = {name: shape[0] for name, (shape, _) in saved_shapes(p.cfg, 1, "mlp").items() if name in p.saved}
    return p._replace(saved={name: p.saved[name][k * rows.start : k * rows.stop] for name, k in each.items()})


def _tile_forward(p: Pass, w: Mlp, x: Tensor, out: Tensor, passed: experts.Passed | None) -> None:
    if isinstance(w, experts.Weights):
        experts.forward(p, w, x, out, passed)
    else:
        mlp.forward(p, w, x, out)


def _tile_backward(
    p: Pass, w: Mlp, g: Mlp, x: Tensor, dy: Tensor, dx: Tensor | None, passed: experts.Passed | None
) -> Tensor:
    if isinstance(w, experts.Weights) and isinstance(g, experts.Weights):
        return experts.backward(p, w, g, x, dy, dx, passed)
    assert isinstance(w, mlp.Weights)
    assert isinstance(g, mlp.Weights)
    return mlp.backward(p, w, g, x, dy, dx)
