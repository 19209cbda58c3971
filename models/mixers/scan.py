"""The sub-layer of a block whose mixer is a recurrence: explicit forward and backward over named saved tensors.

    q, k, v, z, b, a = norm(x) @ mixed;  q, k, v = silu(convolution of (q, k, v));  q, k of unit length
    out = x + (rmsnorm(scan(q d^-1/2, k, v, g, sigmoid(b))) * silu(z)) @ o,  g = -exp(decay) softplus(a + step)

That is a gated delta rule (Yang et al. 2024, arXiv:2412.06464). Mamba2 (Dao and Gu 2024, arXiv:2405.21060):

    z, v, k, q, a = norm(x) @ mixed;  v, k, q = silu(convolution of (v, k, q));  t = softplus(a + step), within limits
    out = x + rmsnorm((scan(q, k, v, -exp(decay) t, t) + skip v) * silu(z)) @ o,  by group of heads with one q and k

z, v, k, q and a are multiplied by Scan.factors; Scan.normed says whether there is a norm. Behind another mixer of
the same input the result is added to `out`, and backward adds to dx (block.py). kernels/scan/reference.py has the formulas of the scan.

Saved are x (by the caller), mixed (N, C + H e + n H) and scan_out (N, H e).
Legend: N tokens, D width, K heads of q and k, H of v, d and e their widths, C = 2 K d + H e channels of the
convolution, n numbers of each head and token (b and a: 2; of Mamba2 only a: 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.branch import add_branch, branch_backward, copies
from trireme.models.families.scans import Scan
from trireme.models.layers import Layer
from trireme.models.linear import (
    Linear,
    Upstream,
    add_gradients_,
    linear,
    linear_backward,
    or_scratch,
    trained,
    upstream,
)
from trireme.models.norm import Norm, Stats, norm_for, normed_linear_backward
from trireme.models.rows import Pass, Rows

EPS = 1e-6  # of the lengths of q and k


class Weights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen."""

    norm: Norm | None
    mixed: Linear  # (D, C + H e + n H)
    o: Linear  # (H e, D)
    conv: Tensor  # (C, taps)
    decay: Tensor  # (H,), the logarithm
    step: Tensor  # (H,)
    gated: Tensor | None  # (e,), of the norm before the gate; (H e,) of that behind it; None without one
    conv_bias: Tensor | None = None  # (C,)
    skip: Tensor | None = None  # (H,)


class Parts(NamedTuple):
    """Views of `mixed`, or of its gradient."""

    channels: Tensor  # (N, C)
    z: Tensor  # (N, H, e), by the gated norm's groups
    b: Tensor | None  # (N, H)
    a: Tensor  # (N, H)


class Inputs(NamedTuple):
    """Inputs of the recurrence."""

    raw: Tensor  # (N, C): the convolution's result
    q: Tensor  # (N, K, d); with the delta rule divided by their lengths, as k
    k: Tensor
    v: Tensor  # (N, H, e)
    g: Tensor  # (N, H) fp32
    beta: Tensor  # (N, H) fp32
    q_stats: Stats | None = None
    k_stats: Stats | None = None


class Result(NamedTuple):
    """What backward needs of forward."""

    mixed: Tensor  # (N, C + H e + n H)
    out: Tensor  # (N, H e)


# Convolution and recurrence of a pass: generation replaces those of training by its own, which have states.
Recur = Callable[[Layer, Weights, Parts, Rows], Tensor]


def forward(p: Pass, w: Weights, x: Tensor, out: Tensor, recur: Recur | None = None) -> None:
    """Fills out (N, D), which may be x, and every tensor of p.saved; the others are temporaries."""
    layer, own = p.layer, p.scan
    copy = out if copies(w.norm, None, w.o) and not _second(layer) else None
    mixed = _project(layer, w, x, p.saved.get("mixed"), copy)
    scanned = _scan(p, w, mixed, p.saved.get("scan_out"), recur)
    inner, _ = _gated(layer, w, mixed, scanned)
    del mixed, scanned  # workspace._around_mixer
    add_branch(own.factor, layer.eps, out if _second(layer) else x, inner, w.o, w.norm, None, out)


def recall(p: Pass, w: Weights, x: Tensor) -> Result:
    """The tensors of forward that backward needs, saved or recomputed."""
    saved = p.saved
    mixed = saved["mixed"] if "mixed" in saved else _project(p.layer, w, x)
    return Result(mixed, saved["scan_out"] if "scan_out" in saved else _scan(p, w, mixed))


def residual(p: Pass, w: Weights, x: Tensor) -> tuple[Tensor, Result]:
    """Recomputes forward: (its `out` (N, D), the Result that backward needs)."""
    result = recall(p, w, x)
    out = x.clone() if copies(w.norm, None, w.o) else torch.empty_like(x)
    add_branch(p.scan.factor, p.layer.eps, x, _gated(p.layer, w, *result)[0], w.o, w.norm, None, out)
    return out, result


def add_(p: Pass, w: Weights, result: Result, out_: Tensor) -> None:
    """Adds to out_ (N, D) what forward adds behind another mixer."""
    add_branch(p.scan.factor, p.layer.eps, out_, _gated(p.layer, w, *result)[0], w.o, w.norm, None, out_)


def backward(
    p: Pass, w: Weights, g: Weights, x: Tensor, dy: Tensor, dx: Tensor, recalled: list[Result] | None = None
) -> None:
    """Fills dx (N, D) and adds to g, given dy (N, D); recomputes what is not in p.saved.

    `recalled` may hold the Result of `residual`, which is taken from it.
    """
    result = recalled.pop() if recalled else recall(p, w, x)
    d_mixed: Upstream = _backward_to_mixed(p, w, g, result, dy)
    del result  # workspace._block_workspace
    d_mixed = upstream(d_mixed, w.mixed, g.mixed)
    normed_linear_backward(
        (w.norm, w.mixed), (g.norm, g.mixed), p.layer.eps, x, d_mixed, dx if _second(p.layer) else dy, dx
    )


def _backward_to_mixed(p: Pass, w: Weights, g: Weights, result: Result, dy: Tensor) -> Tensor:
    """The gradient of `mixed` (N, C + H e + n H), in the order in which files have its columns."""
    layer, docs = p.layer, p.rows.docs
    own = _own(layer)
    d_o = upstream(branch_backward(own.factor, layer.eps, dy, dy, w.o, None, None, None), w.o, g.o)
    inner, stats = _gated(layer, w, *result)
    add_gradients_(g.o, w.o, inner, d_o)
    del inner  # workspace._around_mixer
    d_inner = linear_backward(d_o, w.o)
    del d_o  # workspace._scan_moments
    d_mixed = torch.empty_like(result.mixed)
    parts, found = split(layer, result.mixed), split(layer, d_mixed)
    d_inner = d_inner.view(parts.z.shape)
    d_out = _gate_backward(own, w, g, d_inner, result.out.view(parts.z.shape), stats, parts.z, found.z)
    del d_inner  # workspace._scan_moments
    a = _inputs(p, w, parts)
    d_raw = torch.empty_like(a.raw)
    dq, dk, dv = _heads(own, d_raw)
    d_out = d_out.view(a.v.shape)
    dg, dbeta, d_skip = ops.scan_bwd(d_out, a.q, a.k, a.v, a.g, a.beta, docs, own.delta, w.skip, dq, dk, dv)
    del d_out  # workspace._scan_moments
    if g.skip is not None and d_skip is not None and trained(g.skip):
        g.skip.add_(d_skip)
    _numbers_backward(own, w, g, parts, found, a, dg, dbeta)
    if own.delta:
        _lengths_backward_(own, a, dq, dk)
    d_bias = None if w.conv_bias is None or g.conv_bias is None else or_scratch(g.conv_bias, w.conv_bias)
    d_conv = or_scratch(g.conv, w.conv)
    ops.conv_bwd(d_raw, parts.channels, w.conv, w.conv_bias, docs, d_conv, d_bias, found.channels)
    del a, dq, dk, dv, d_raw  # workspace._scan_moments
    _scale_(own, d_mixed)
    return _in_file_order(layer, d_mixed)


def _gate_backward(
    own: Scan,
    w: Weights,
    g: Weights,
    d_inner: Tensor,
    scanned: Tensor,
    stats: Stats | None,
    z: Tensor,
    dz: Tensor,
) -> Tensor:
    """Gradient of the recurrence's result; fills dz."""
    if w.gated is None or g.gated is None or stats is None:
        d_inner, scanned, z, dz = (t.view(-1, own.heads, own.value_dim) for t in (d_inner, scanned, z, dz))
        return ops.gate_bwd(d_inner, scanned, z, dz, "silu")
    d_weight = _by_group(own, g.gated) if trained(g.gated) else None
    d_out, weight = torch.empty_like(scanned), _by_group(own, w.gated)
    ops.norm_bwd(d_inner, scanned, weight, stats, _gated_kind(own), d_out, d_weight, None, z, dz)
    return d_out


def _numbers_backward(
    own: Scan, w: Weights, g: Weights, parts: Parts, found: Parts, a: Inputs, dg: Tensor, dbeta: Tensor
) -> None:
    """Fills the gradients of a and b in `found`; adds those of decay and step to g."""
    d_decay, d_step, limits = or_scratch(g.decay, w.decay), or_scratch(g.step, w.step), _limits(own)
    of_steps = None if own.delta else dbeta
    found.a.copy_(ops.decay_bwd(dg, of_steps, parts.a, w.decay, w.step, d_decay, d_step, *limits))
    if found.b is not None:
        found.b.copy_(dbeta * a.beta * (1 - a.beta / own.most))


def _lengths_backward_(own: Scan, a: Inputs, dq_: Tensor, dk_: Tensor) -> None:
    """Replaces the gradients of q and k divided by their lengths by those of q and k."""
    q, k, _ = _heads(own, a.raw)
    for d_, t, factor, stats in zip((dq_, dk_), (q, k), _lengths(own, q), (a.q_stats, a.k_stats), strict=True):
        assert stats is not None
        ops.norm_bwd(d_, t, factor, stats, ops.RMS, d_)


def split(layer: Layer, mixed: Tensor) -> Parts:
    """The Parts of `mixed`, or of its gradient."""
    own = _own(layer)
    if not own.delta:
        z, channels, a = mixed.split([own.value_width, own.channels, own.heads], 1)
        return Parts(channels, z.unflatten(1, (own.key_heads, -1)), None, a)
    channels, z, b, a = mixed.split([own.channels, own.value_width, own.heads, own.heads], 1)
    return Parts(channels, z.view(-1, own.heads, own.value_dim), b, a)


def _scale_(own: Scan, mixed_: Tensor) -> None:
    """Multiplies `mixed`, or its gradient, by Mamba2's factors of its parts."""
    widths = own.value_width, own.value_width, own.key_width, own.key_width, own.heads
    for part, factor in zip(mixed_.split(widths, 1), own.factors, strict=True) if own.factors else ():
        part.mul_(factor)


def _second(layer: Layer) -> bool:
    """Whether its result is added to that of another mixer of the same input."""
    return layer.mixers[0] is not layer.scan


def _own(layer: Layer) -> Scan:
    assert layer.scan is not None
    return layer.scan


def _project(layer: Layer, w: Weights, x: Tensor, out: Tensor | None = None, copy: Tensor | None = None) -> Tensor:
    """Computes `mixed` with columns in the order of `split`, which files may not have; copies x to `copy`, if given."""
    y, _ = norm_for(w.mixed, x, w.norm, layer.eps, copy)
    if not layer.names.mixed_by_head:
        mixed = linear(y, w.mixed, out, x.dtype)
        _scale_(_own(layer), mixed)
        return mixed
    found = linear(y, w.mixed, dtype=x.dtype)
    del y  # workspace._around_mixer
    order = file_order(_own(layer), x.device)
    return torch.index_select(found, 1, order, out=out) if out is not None else found.index_select(1, order)


@cache
def file_order(own: Scan, device: torch.device) -> Tensor:
    """The columns of `mixed` in a file where q, k, v and z of a key head are neighbours, as are its b and a."""
    r = own.heads // own.key_heads
    widths = [own.key_dim, own.key_dim, r * own.value_dim, r * own.value_dim]
    end = own.channels + own.value_width
    parts = torch.arange(end).view(own.key_heads, -1).split(widths, 1)
    numbers = (end + torch.arange(2 * own.heads)).view(own.key_heads, -1).split([r, r], 1)
    return torch.cat([part.flatten() for part in (*parts, *numbers)]).to(device)


def _in_file_order(layer: Layer, d_mixed: Tensor) -> Tensor:
    if not layer.names.mixed_by_head:
        return d_mixed
    return d_mixed.index_select(1, torch.argsort(file_order(_own(layer), d_mixed.device)))


def _heads(own: Scan, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of channels: q, k (N, K, d), v (N, H, e)."""
    if own.delta:
        q, k, v = raw.split([own.key_width, own.key_width, own.value_width], 1)
    else:
        v, k, q = raw.split([own.value_width, own.key_width, own.key_width], 1)
    keys = (-1, own.key_heads, own.key_dim)
    return q.view(keys), k.view(keys), v.view(-1, own.heads, own.value_dim)


def _lengths(own: Scan, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (d,) fp32 of an RMSNorm, which then gives q the length d ** -0.5, and k the length 1."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    ones = torch.ones(own.key_dim, dtype=dtype, device=like.device)
    return ones / own.key_dim, ones * own.key_dim**-0.5


def inputs(layer: Layer, w: Weights, parts: Parts, raw: Tensor) -> Inputs:
    """The recurrence's inputs, given the convolution's result `raw` (N, C)."""
    own = _own(layer)
    q, k, v = _heads(own, raw)
    g, steps = ops.decay_fwd(parts.a, w.decay, w.step, *_limits(own))
    if parts.b is None:
        return Inputs(raw, q, k, v, g, steps)
    eps = EPS / own.key_dim
    (q, q_stats), (k, k_stats) = (ops.norm_fwd(t, f, eps) for t, f in zip((q, k), _lengths(own, q), strict=True))
    beta = torch.sigmoid(parts.b).to(g.dtype)
    return Inputs(raw, q, k, v, g, beta if own.most == 1.0 else own.most * beta, q_stats, k_stats)


def _limits(own: Scan) -> tuple[float, float]:
    """(least, largest) step."""
    return own.low, own.high or float("inf")


def _by_group(own: Scan, weight: Tensor) -> Tensor:
    """The gated norm's weight (e,) of all heads, or by group (K, H e / K)."""
    return weight if own.delta else weight.view(own.key_heads, -1)


def _inputs(p: Pass, w: Weights, parts: Parts) -> Inputs:
    return inputs(p.layer, w, parts, ops.conv_fwd(parts.channels, w.conv, w.conv_bias, p.rows.docs))


def _scan(p: Pass, w: Weights, mixed: Tensor, out: Tensor | None = None, recur: Recur | None = None) -> Tensor:
    own, parts = p.scan, split(p.layer, mixed)
    if recur is not None:
        return recur(p.layer, w, parts, p.rows)
    a = _inputs(p, w, parts)
    out = None if out is None else out.view(a.v.shape)
    return ops.scan_fwd(a.q, a.k, a.v, a.g, a.beta, p.rows.docs, own.delta, w.skip, out).view(-1, own.value_width)


def _gated(layer: Layer, w: Weights, mixed: Tensor, scanned: Tensor) -> tuple[Tensor, Stats | None]:
    """(what the output projection reads, (N, H e), statistics of its norm)."""
    own, z = _own(layer), split(layer, mixed).z
    if w.gated is None:
        x, z = (t.view(-1, own.heads, own.value_dim) for t in (scanned, z))
        return ops.gate_fwd(x, z, "silu").view(scanned.shape), None
    weight, eps = _by_group(own, w.gated), own.eps or layer.eps
    y, stats = ops.norm_fwd(scanned.view(z.shape), weight, eps, _gated_kind(own), gate=z)
    return y.view(scanned.shape), stats


def _gated_kind(own: Scan) -> ops.NormKind:
    return ops.NormKind(gate_first=not own.delta)
