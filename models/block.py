"""A layer, or half of one: mixers of one input, then MLPs; with Layer.parallel both read the same input.

    resid = x + sum over mixers of mixer(norm(x)),   out = resid + mlp(norm(resid))

Several mixers share one norm, which each computes. Saved in addition to their tensors: resid (N, D), the MLP's input,
unless that is the layer's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.models import attention, experts, mlp
from trireme.models.attention import Attend
from trireme.models.branch import add_matmul
from trireme.models.lora import dropping
from trireme.models.mixers import scan
from trireme.models.norm import Norm, norm, norm_backward
from trireme.models.rows import Pass
from trireme.models.sizes.shapes import saved_of

Mixer = attention.Weights | scan.Weights
Mlp = mlp.Weights | experts.Weights
Mixing = tuple[Attend | scan.Recur, ...]  # what mixers call: generation has caches of its own
MODULES: dict[type, Any] = {
    attention.Weights: attention,
    scan.Weights: scan,
    mlp.Weights: mlp,
    experts.Weights: experts,
}


class Weights(NamedTuple):
    """The weights of a layer or of half of one, or their gradients."""

    mixers: tuple[Mixer, ...]
    mlps: tuple[Mlp, ...]
    post: Norm | None = None  # behind the sum of several MLPs
    scalar: Tensor | None = None  # (1,) frozen: factor of the residual behind the layer


def of(w: Mixer | Mlp) -> Any:
    """The module of a mixer or MLP, by the type of its weights."""
    return MODULES[type(w)]


def forward(
    p: Pass, w: Weights, x: Tensor, out: Tensor, mixing: Mixing = (), passed: experts.Passed | None = None
) -> None:
    """Fills out (N, D) and every tensor of p.saved, given x (N, D). `passed`: of slices of experts (experts.py)."""
    resid = p.saved.get("resid", out) if w.mixers else x
    for i, mixer in enumerate(w.mixers):
        of(mixer).forward(p, mixer, x, resid, mixing[i] if mixing else None)
    for mlp_ in w.mlps if len(w.mlps) == 1 else ():
        _mlp_forward(p, mlp_, x if p.layer.parallel else resid, out, passed)
    if w.post is not None:
        add_matmul(1.0, p.layer.eps, resid, _beside(p, w, resid), w.post, out)
    if w.scalar is not None:
        out.mul_(w.scalar)


def _beside(p: Pass, w: Weights, x: Tensor) -> Tensor:
    """The sum of MLPs that read the same x."""
    total = torch.zeros_like(x)
    for i, own in enumerate(w.mlps):
        of(own).forward(p if i == 0 else p._replace(saved={}), own, x, total, onto=total)
    return total


def backward(
    p: Pass, w: Weights, g: Weights, x: Tensor, dy: Tensor, dx: Tensor, passed: experts.Passed | None = None
) -> None:
    """Fills dx (N, D) and adds to g, given dy (N, D); recomputes what is not in p.saved."""
    results: list[Any] = []  # of each mixer, which its backward takes and frees
    resid = x
    if w.mixers and w.mlps and not p.layer.parallel:
        resid = p.saved["resid"] if "resid" in p.saved else _residual(p, w, x, results)
    if w.scalar is not None:
        dy = dy * w.scalar
    dresid = dy
    if len(w.mlps) > 1:
        total = _beside(p, w, resid)
        _, stats = norm(total, w.post, p.layer.eps)
        d_total = norm_backward(dy, total, w.post, stats, g.post)
        for i, (each, its) in enumerate(zip(w.mlps, g.mlps, strict=True)):
            q = p if i == 0 else p._replace(saved={})
            dresid = of(each).backward(q, each, its, resid, d_total, None, onto=dresid)
        if not w.mixers:
            dx.copy_(dresid)
    for each, its in zip(w.mlps, g.mlps, strict=True) if len(w.mlps) == 1 else ():
        dresid = _mlp_backward(p, each, its, resid, dy, None if w.mixers else dx, passed)
    del resid
    for i, (mixer, grad) in enumerate(zip(w.mixers, g.mixers, strict=True)):
        given = (dy, dx, results[i : i + 1]) if p.layer.parallel else (dresid, dx, results[i : i + 1])
        if results:
            results[i] = None
        of(mixer).backward(p, mixer, grad, x, *given, *([dresid] if p.layer.parallel else []))


def _residual(p: Pass, w: Weights, x: Tensor, results: list[Any]) -> Tensor:
    """The MLPs' input again; appends the Result of each mixer."""
    behind = [(each, scan.recall(p, each, x)) for each in w.mixers[1:] if isinstance(each, scan.Weights)]
    resid, first = of(w.mixers[0]).residual(p, w.mixers[0], x)
    for each, result in behind:
        scan.add_(p, each, result, resid)
    results += [first, *(result for _, result in behind)]
    return resid


def _mlp_forward(p: Pass, w: Mlp, x: Tensor, out: Tensor, passed: experts.Passed | None) -> None:
    """An MLP, for long texts in tiles of cfg.mlp_rows tokens."""
    for part, q, own, onto in _tiles(p, w, x, passed):
        tile = x[part] if len(x) > p.cfg.mlp_rows else x
        of(w).forward(q, own, tile, tile if out is x else out[part], *onto)


def _mlp_backward(
    p: Pass, w: Mlp, g: Mlp, x: Tensor, dy: Tensor, dx: Tensor | None, passed: experts.Passed | None
) -> Tensor:
    """Its backward, in the tiles of forward."""
    if len(x) <= p.cfg.mlp_rows:
        return of(w).backward(p, w, g, x, dy, dx, *((passed,) if isinstance(w, experts.Weights) else ()))
    dx = torch.empty_like(x) if dx is None else dx
    for part, q, own, onto in _tiles(p, w, x, passed):
        of(w).backward(q, own, g, x[part], dy[part], dx[part], *onto)
    return dx


def _tiles(p: Pass, w: Mlp, x: Tensor, passed: experts.Passed | None) -> Iterator[tuple[slice, Pass, Mlp, Any]]:
    """(tokens, pass, weights, and of experts what passes between slices) of each tile."""
    rows = p.cfg.mlp_rows
    slicing = isinstance(w, experts.Weights)
    if len(x) <= rows:
        yield slice(None), p, w, (passed,) if slicing else ()
        return
    each = {name: shape[0] for name, (shape, _) in saved_of(p.cfg, p.layer.feeding, 1).items() if name in p.saved}
    for a in range(0, len(x), rows):
        part = slice(a, min(a + rows, len(x)))
        saved = {name: p.saved[name][k * part.start : k * part.stop] for name, k in each.items()}
        onto = passed and {name: t[part] for name, t in passed.items()}
        w = dropping(w, p.rows.dropout, a)
        yield part, p._replace(saved=saved), w, (onto,) if slicing else ()
