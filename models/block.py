"""A block: attention, a recurrence or both, then an MLP; with cfg.parallel both read the same input.

Saved in addition to the tensors of the sub-layers: resid (N, D), the MLP's input, unless that is the block's input.
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
from trireme.models.rows import Pass
from trireme.models.sizes.shapes import saved_shapes

Mixer = attention.Weights | scan.Weights | both.Weights
Mlp = mlp.Weights | experts.Weights
Mixing = Attend | scan.Recur | both.Mixing  # what a mixer calls: generation has a cache of its own


class Weights(NamedTuple):
    """A block's weights, or their gradients."""

    attention: Mixer
    mlp: Mlp


def forward(p: Pass, w: Weights, x: Tensor, out: Tensor, attend: Mixing = ops.attention_fwd) -> None:
    """Fills out (N, D) and every tensor of p.saved, given x (N, D)."""
    resid = p.saved.get("resid", out)
    mixer_forward(p, w.attention, x, resid, attend)
    mlp_forward(p, w.mlp, x if p.cfg.parallel else resid, out)


def backward(p: Pass, w: Weights, g: Weights, x: Tensor, dy: Tensor, dx: Tensor) -> None:
    """Fills dx (N, D) and adds to g, given dy (N, D); recomputes what is not in p.saved."""
    recalled: list[Any] = []  # the mixer's Result, which its backward takes and frees
    if p.cfg.parallel:
        resid = x
    elif "resid" in p.saved:
        resid = p.saved["resid"]
    else:
        resid = _residual(p, w.attention, x, recalled)
    dresid = mlp_backward(p, w.mlp, g.mlp, resid, dy)
    del resid  # workspace._block_workspace
    mixer_backward(p, w.attention, g.attention, x, dy if p.cfg.parallel else dresid, dx, recalled, dresid)


def _residual(p: Pass, w: Mixer, x: Tensor, recalled: list[Any]) -> Tensor:
    """The `out` of residual of attention.py, scan.py or both.py; appends its Result to `recalled`."""
    result: Any
    if isinstance(w, both.Weights):
        out, result = both.residual(p, w, x)
    elif isinstance(w, scan.Weights):
        out, result = scan.residual(p, w, x)
    else:
        out, result = attention.residual(p, w, x)
    recalled.append(result)
    return out


def mixer_forward(p: Pass, w: Mixer, x: Tensor, out: Tensor, attend: Mixing = ops.attention_fwd) -> None:
    """attention.forward, scan.forward or both.forward, by the type of w."""
    if isinstance(w, both.Weights):
        both.forward(p, w, x, out, None if attend is ops.attention_fwd else cast(both.Mixing, attend))
    elif isinstance(w, scan.Weights):
        scan.forward(p, w, x, out, None if attend is ops.attention_fwd else cast(scan.Recur, attend))
    else:
        attention.forward(p, w, x, out, cast(Attend, attend))


def mixer_backward(
    p: Pass,
    w: Mixer,
    g: Mixer,
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    recalled: list[Any] | None = None,
    dresid: Tensor | None = None,
) -> None:
    """attention.backward, scan.backward or both.backward, by the type of w."""
    if isinstance(w, both.Weights) and isinstance(g, both.Weights):
        both.backward(p, w, g, x, dy, dx, recalled)
    elif isinstance(w, scan.Weights) and isinstance(g, scan.Weights):
        scan.backward(p, w, g, x, dy, dx, recalled)
    else:
        assert isinstance(w, attention.Weights)
        assert isinstance(g, attention.Weights)
        attention.backward(p, w, g, x, dy, dx, recalled, dresid)


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
