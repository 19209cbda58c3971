"""A layer, or half of one: mixers of one input, then MLPs; with Layer.parallel both read the same input.

    resid = x + sum over mixers of mixer(norm(x)),   out = resid + mlp(norm(resid))

Several mixers share one norm, which each computes; each adds to what those before it have made. Of several MLPs the sum
has a norm behind it. Saved in addition to their tensors: resid (N, D), the MLPs' input, unless that is the layer's
input; of several MLPs their sum as mlp_branch (N, D), and of their other tensors those of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.models.branch import add_normed, normed_backward
from trireme.models.families.experts import Experts
from trireme.models.families.scans import Scan
from trireme.models.layers import Attention, Layer, Mlp
from trireme.models.lora import dropping
from trireme.models.mixers import attention, scan
from trireme.models.mlps import experts, mlp
from trireme.models.mlps.grouped import Slice
from trireme.models.norm import Norm, bare_norm, norm, norm_backward
from trireme.models.reader import Reader
from trireme.models.rows import Pass
from trireme.models.sizes.shapes import saved_of

# Each has weights, forward, backward, and mixers recall and residual, with the same arguments.
MODULES: dict[type, ModuleType] = {Attention: attention, Scan: scan, Mlp: mlp, Experts: experts}
MixerWeights = attention.AttentionWeights | scan.ScanWeights
MlpOrExperts = mlp.MlpWeights | experts.ExpertWeights
Mixing = tuple[attention.Attend | scan.Recur, ...]  # what mixers call: generation has caches of its own


class LayerWeights(NamedTuple):
    """The weights of a layer or of half of one, or their gradients."""

    mixers: tuple[MixerWeights, ...]
    mlps: tuple[MlpOrExperts, ...]
    post: Norm | None = None  # behind the sum of several MLPs
    scalar: Tensor | None = None  # (1,) frozen: factor of the residual behind the layer

    @property
    def part(self) -> experts.Slice | None:
        """The slice of experts that it has; None where it has all, or none."""
        return next((mlp_.part for mlp_ in self.mlps if isinstance(mlp_, experts.ExpertWeights)), None)


def weights(read: Reader) -> LayerWeights:
    layer = read.layer
    mixers, mlps = (
        tuple(MODULES[type(spec)].weights(read, spec) for spec in part) for part in (layer.mixers, layer.mlps)
    )
    post = read.norm(layer.mlp_names.post, layer.post_eps) if len(mlps) > 1 else None
    return LayerWeights(mixers, mlps, post, read.get(layer.mlp_names.scalar))


def slice_weights(w: LayerWeights, layer: Layer, part: range) -> LayerWeights:
    """`w` whose matrices of experts are those of a slice alone."""
    assert layer.experts is not None
    slice_ = Slice(part.start, part.stop, layer.experts.count)
    named = lambda mlp_: mlp_._replace(part=slice_) if isinstance(mlp_, experts.ExpertWeights) else mlp_
    return w._replace(mlps=tuple(map(named, w.mlps)))


def forward(
    p: Pass, w: LayerWeights, x: Tensor, out: Tensor, mixing: Mixing = (), passed: experts.Passed | None = None
) -> None:
    """Fills out (N, D) and every tensor of p.saved, given x (N, D). `passed`: of slices of experts (experts.py)."""
    x, _ = norm(x, _entry(p, x))
    resid = p.saved.get("resid", out) if w.mixers else x
    for i, mixer in enumerate(w.mixers):
        attend = mixing[i] if mixing else None
        _module(mixer).forward(p, mixer, x, resid, x if i == 0 else resid, attend)
    for tile in _tiles(p, w, x if p.layer.parallel else resid, passed) if w.mlps else ():
        _feed(tile, tile.view(out), tile.view(out if p.layer.parallel else resid))
    if w.scalar is not None:
        out.mul_(w.scalar)


def backward(
    p: Pass,
    w: LayerWeights,
    g: LayerWeights,
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    passed: experts.Passed | None = None,
) -> None:
    """Fills dx (N, D) and adds to g, given dy (N, D); recomputes what is not in p.saved."""
    raw, entry = x, _entry(p, x)
    x, stats = norm(x, entry)
    results: list[Any] = []  # of each mixer, which its backward takes and frees
    resid = x
    if w.mixers and w.mlps and not p.layer.parallel:
        resid = p.saved["resid"] if "resid" in p.saved else _residual(p, w, x, results)
    dy = dy if w.scalar is None else dy * w.scalar
    dresid = _mlps_backward(p, w, g, resid, dy, None if w.mixers else dx, passed) if w.mlps else dy
    del resid
    for i, (mixer, grad) in enumerate(zip(w.mixers, g.mixers, strict=True)):
        d_branch = dy if p.layer.parallel else dresid
        _module(mixer).backward(p, mixer, grad, x, d_branch, dx, dresid if i == 0 else dx, results)
    if stats is not None:
        norm_backward(dx, raw, entry, stats, None, out=dx)


def _module(w: MixerWeights | MlpOrExperts) -> ModuleType:
    return MODULES[type(w.spec)]


def _entry(p: Pass, x: Tensor) -> Norm | None:
    """The norm of the layer's input, if it has one."""
    return bare_norm(x.shape[1], p.layer.eps, x) if p.layer.entry else None


def _residual(p: Pass, w: LayerWeights, x: Tensor, results: list[Any]) -> Tensor:
    """The MLPs' input again; appends the result of each mixer."""
    resid = torch.empty_like(x)
    for i, mixer in enumerate(w.mixers):
        results.append(_module(mixer).residual(p, mixer, x, resid, x if i == 0 else resid))
    return resid


class Tile(NamedTuple):
    """Some tokens of the MLPs' input, with the pass and weights for them."""

    p: Pass
    w: LayerWeights
    x: Tensor  # (n, D)
    full_x: Tensor  # (N, D), of which x is a part
    passed: tuple[experts.Passed, ...]  # of slices of experts
    rows: slice

    def view(self, t: Tensor) -> Tensor:
        """The part of t (N, D): the same object where t is the input, or where the tile is all of it."""
        return self.x if t is self.full_x else t if self.x is self.full_x else t[self.rows]


def _tiles(p: Pass, w: LayerWeights, x: Tensor, passed: experts.Passed | None) -> Iterator[Tile]:
    """The input of MLPs, of long texts in tiles of cfg.mlp_rows tokens."""
    limit = p.cfg.mlp_rows
    if len(x) <= limit:
        yield Tile(p, w, x, x, (passed,) if passed else (), slice(None))
        return
    rows_of = {name: shape[0] for name, (shape, _) in saved_of(p.cfg, p.layer.feeding, 1).items() if name in p.saved}
    for first in range(0, len(x), limit):
        rows = slice(first, min(first + limit, len(x)))
        saved = {name: p.saved[name][k * rows.start : k * rows.stop] for name, k in rows_of.items()}
        part = ({name: t[rows] for name, t in passed.items()},) if passed else ()
        yield Tile(p._replace(saved=saved), dropping(w, p.rows.dropout, first), x[rows], x, part, rows)


def _feed(t: Tile, out: Tensor, onto: Tensor) -> None:
    """Fills out with onto + what the MLPs make of a tile."""
    if t.w.post is not None:
        total = t.p.saved.get("mlp_branch")
        total = _sum_(t, torch.zeros_like(t.x) if total is None else total.zero_())
        add_normed(t.w.post, 1.0, onto, total, out)
        return
    for mlp_ in t.w.mlps:
        _module(mlp_).forward(t.p, mlp_, t.x, out, onto, *t.passed)


def _sum_(t: Tile, total_: Tensor) -> Tensor:
    """Adds what each of several MLPs makes of a tile."""
    for i, mlp_ in enumerate(t.w.mlps):
        _module(mlp_).forward(_mlp_pass(t.p, i), mlp_, t.x, total_, total_)
    return total_


def _mlp_pass(p: Pass, i: int) -> Pass:
    """The pass of one of several MLPs, of which the first alone has saved tensors."""
    return p._replace(saved={name: t for name, t in p.saved.items() if i == 0 and name != "mlp_branch"})


def _mlps_backward(
    p: Pass,
    w: LayerWeights,
    g: LayerWeights,
    x: Tensor,
    dy: Tensor,
    dx: Tensor | None,
    passed: experts.Passed | None,
) -> Tensor:
    """dy + the gradient of the MLPs' input (N, D), in dx if given."""
    tiled = len(x) > p.cfg.mlp_rows
    dx = torch.empty_like(x) if tiled and dx is None else dx
    for t in _tiles(p, w, x, passed):
        d = _feed_backward(t, g, t.view(dy), None if dx is None else t.view(dx))
    return dx if tiled and dx is not None else d


def _feed_backward(t: Tile, g: LayerWeights, dy: Tensor, dx: Tensor | None) -> Tensor:
    if t.w.post is None:
        ((mlp_, grad),) = zip(t.w.mlps, g.mlps, strict=True)
        d: Tensor = _module(mlp_).backward(t.p, mlp_, grad, t.x, dy, dx, dy, *t.passed)
        return d
    total = t.p.saved.get("mlp_branch")
    if total is None:  # experts have counted their loads in forward
        tile = t._replace(p=t.p._replace(rows=t.p.rows._replace(load=None)))
        total = _sum_(tile, torch.zeros_like(t.x))
    d_total, d = normed_backward(t.w.post, g.post, 1.0, dy, total), dy
    del total
    for i, (mlp_, grad) in enumerate(zip(t.w.mlps, g.mlps, strict=True)):
        d = _module(mlp_).backward(_mlp_pass(t.p, i), mlp_, grad, t.x, d_total, d if i else dx, d)
    return d
