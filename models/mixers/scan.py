"""The sub-layer of a block whose mixer is a recurrence: explicit forward and backward over named saved tensors.

    q, k, v, z, b, a = norm(x) @ mixed;  q, k, v = silu(convolution of (q, k, v));  q, k of unit length
    out = x + (rmsnorm(scan(q d^-1/2, k, v, g, sigmoid(b))) * silu(z)) @ o,  g = -exp(decay) softplus(a + step)

That is a gated delta rule (Yang et al. 2024, arXiv:2412.06464). Mamba2 (Dao and Gu 2024, arXiv:2405.21060):

    z, v, k, q, a = norm(x) @ mixed;  v, k, q = silu(convolution of (v, k, q));  t = softplus(a + step), within limits
    out = x + rmsnorm((scan(q, k, v, -exp(decay) t, t) + skip v) * silu(z)) @ o,  by group of heads with one q and k

z, v, k, q and a are multiplied by Scan.factors; Scan.normed says whether there is a norm. kernels/scan/reference.py has
the formulas of the scan.

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
from trireme.models.branch import Branch, add_branch, branch, branch_backward
from trireme.models.families.scans import Scan
from trireme.models.linear import Linear, add_gradients_, linear, linear_backward, or_scratch, trained, upstream
from trireme.models.norm import Norm, Stats, norm_for, normed_linear_backward
from trireme.models.reader import Reader
from trireme.models.rows import Pass, Rows

EPS = 1e-6  # of the lengths of q and k


class ScanWeights(NamedTuple):
    """Weights of the sub-layer, or their gradients: empty where a tensor is frozen."""

    spec: Scan
    norm: Norm | None
    mixed: Linear  # (D, C + H e + n H)
    o: Branch  # (H e, D)
    conv: Tensor  # (C, taps)
    decay: Tensor  # (H,), the logarithm
    step: Tensor  # (H,)
    gated: Tensor | None  # (e,), of the norm before the gate; (H e,) of that behind it; None without one
    conv_bias: Tensor | None  # (C,)
    skip: Tensor | None  # (H,)
    eps: float  # of that norm


class ScanParts(NamedTuple):
    """Views of `mixed`, or of its gradient."""

    channels: Tensor  # (N, C)
    z: Tensor  # (N, H, e), by the gated norm's groups
    b: Tensor | None  # (N, H)
    a: Tensor  # (N, H)


class ScanInputs(NamedTuple):
    """Inputs of the recurrence."""

    raw: Tensor  # (N, C): the convolution's result
    q: Tensor  # (N, K, d); with the delta rule divided by their lengths, as k
    k: Tensor
    v: Tensor  # (N, H, e)
    g: Tensor  # (N, H) fp32
    beta: Tensor  # (N, H) fp32
    q_stats: Stats | None = None
    k_stats: Stats | None = None


class ScanResult(NamedTuple):
    """What backward needs of forward."""

    mixed: Tensor  # (N, C + H e + n H)
    out: Tensor  # (N, H e)


# Convolution and recurrence of a pass: generation replaces those of training by its own, which have states.
Recur = Callable[[ScanWeights, ScanParts, Rows], Tensor]


def weights(read: Reader, spec: Scan) -> ScanWeights:
    names, before = read.layer.mixer_names, read.norm(read.layer.mixer_names.norm)
    o = branch(read, names.mixed_o, "", spec.factor, before)
    return ScanWeights(
        spec, before, read.linear(*names.mixed), o, read[f"{names.conv}.weight"], read[names.decay], read[names.step],
        read.get(f"{names.mixed_norm}.weight"), read.get(f"{names.conv}.bias"), read.get(names.skip),
        spec.eps or read.layer.eps,
    )  # fmt: skip


def forward(p: Pass, w: ScanWeights, x: Tensor, out: Tensor, onto: Tensor, recur: Recur | None = None) -> None:
    """Fills out (N, D) with onto + the branch of x, and every tensor of p.saved; the others are temporaries.

    `out` may be x or `onto`.
    """
    mixed = _project(p, w, x, p.saved.get("mixed"), out if onto is x and w.o.copies else None)
    scanned = _scan(p, w, mixed, p.saved.get("scan_out"), recur)
    inner, _ = _gated(w, mixed, scanned)
    del mixed, scanned
    add_branch(w.o, onto, inner, out)


def recall(p: Pass, w: ScanWeights, x: Tensor) -> ScanResult:
    """The tensors of forward that backward needs, saved or recomputed."""
    saved = p.saved
    mixed = saved["mixed"] if "mixed" in saved else _project(p, w, x)
    return ScanResult(mixed, saved["scan_out"] if "scan_out" in saved else _scan(p, w, mixed))


def residual(p: Pass, w: ScanWeights, x: Tensor, out: Tensor, onto: Tensor) -> ScanResult:
    """Computes forward again: fills out (N, D), returns what backward needs."""
    result = recall(p, w, x)
    if onto is x and w.o.copies:
        out.copy_(x)
    add_branch(w.o, onto, _gated(w, *result)[0], out)
    return result


def backward(
    p: Pass,
    w: ScanWeights,
    g: ScanWeights,
    x: Tensor,
    dy: Tensor,
    dx: Tensor,
    onto: Tensor,
    results: list[ScanResult],
) -> None:
    """Fills dx (N, D) with onto + the gradient of x, given dy (N, D), and adds to g. `results` as of attention."""
    result = results.pop(0) if results else recall(p, w, x)
    d_mixed = _backward_to_mixed(p, w, g, result, dy)
    del result
    d = upstream(d_mixed, w.mixed, g.mixed)
    del d_mixed
    normed_linear_backward((w.norm, w.mixed), (g.norm, g.mixed), x, d, onto, dx)


def _backward_to_mixed(p: Pass, w: ScanWeights, g: ScanWeights, result: ScanResult, dy: Tensor) -> Tensor:
    """The gradient of `mixed` (N, C + H e + n H), in the order in which files have its columns."""
    spec, docs = w.spec, p.rows.docs
    d_o = upstream(branch_backward(w.o, g.o, dy), w.o.linear, g.o.linear)
    inner, stats = _gated(w, *result)
    add_gradients_(g.o.linear, w.o.linear, inner, d_o)
    del inner
    d_inner = linear_backward(d_o, w.o.linear)
    del d_o
    d_mixed = torch.empty_like(result.mixed)
    parts, d_parts = split(spec, result.mixed), split(spec, d_mixed)
    d_inner = d_inner.view(parts.z.shape)
    d_out = _gate_backward(w, g, d_inner, result.out.view(parts.z.shape), stats, parts.z, d_parts.z)
    del d_inner
    a = _inputs(p, w, parts)
    d_raw = torch.empty_like(a.raw)
    dq, dk, dv = _heads(spec, d_raw)
    d_out = d_out.view(a.v.shape)
    dg, dbeta, d_skip = ops.scan_bwd(d_out, a.q, a.k, a.v, a.g, a.beta, docs, spec.delta, w.skip, dq, dk, dv)
    del d_out
    if g.skip is not None and d_skip is not None and trained(g.skip):
        g.skip.add_(d_skip)
    _numbers_backward(w, g, parts, d_parts, a, dg, dbeta)
    if spec.delta:
        _lengths_backward_(spec, a, dq, dk)
    d_bias = None if w.conv_bias is None or g.conv_bias is None else or_scratch(g.conv_bias, w.conv_bias)
    d_conv = or_scratch(g.conv, w.conv)
    ops.conv_bwd(d_raw, parts.channels, w.conv, w.conv_bias, docs, d_conv, d_bias, d_parts.channels)
    del a, dq, dk, dv, d_raw
    _scale_(spec, d_mixed)
    return _in_file_order(p, spec, d_mixed)


def _gate_backward(
    w: ScanWeights, g: ScanWeights, d_inner: Tensor, scanned: Tensor, stats: Stats | None, z: Tensor, dz: Tensor
) -> Tensor:
    """Gradient of the recurrence's result; fills dz."""
    spec = w.spec
    if w.gated is None or g.gated is None or stats is None:
        d_inner, scanned, z, dz = (t.view(-1, spec.heads, spec.value_dim) for t in (d_inner, scanned, z, dz))
        return ops.gate_bwd(d_inner, scanned, z, dz, "silu")
    d_weight = _by_group(spec, g.gated) if trained(g.gated) else None
    d_out, weight = torch.empty_like(scanned), _by_group(spec, w.gated)
    ops.norm_bwd(d_inner, scanned, weight, stats, _gated_kind(spec), d_out, d_weight, None, z, dz)
    return d_out


def _numbers_backward(
    w: ScanWeights,
    g: ScanWeights,
    parts: ScanParts,
    d_parts: ScanParts,
    a: ScanInputs,
    dg: Tensor,
    dbeta: Tensor,
) -> None:
    """Fills the gradients of a and b in d_parts; adds those of decay and step to g."""
    d_decay, d_step, limits = or_scratch(g.decay, w.decay), or_scratch(g.step, w.step), _limits(w.spec)
    of_steps = None if w.spec.delta else dbeta
    d_parts.a.copy_(ops.decay_bwd(dg, of_steps, parts.a, w.decay, w.step, d_decay, d_step, *limits))
    if d_parts.b is not None:
        d_parts.b.copy_(dbeta * a.beta * (1 - a.beta / w.spec.most))


def _lengths_backward_(spec: Scan, a: ScanInputs, dq_: Tensor, dk_: Tensor) -> None:
    """Replaces the gradients of q and k divided by their lengths by those of q and k."""
    q, k, _ = _heads(spec, a.raw)
    for d_, t, factor, stats in zip((dq_, dk_), (q, k), _lengths(spec, q), (a.q_stats, a.k_stats), strict=True):
        assert stats is not None
        ops.norm_bwd(d_, t, factor, stats, ops.RMS, d_)


def split(spec: Scan, mixed: Tensor) -> ScanParts:
    """The ScanParts of `mixed`, or of its gradient."""
    if not spec.delta:
        z, channels, a = mixed.split([spec.value_width, spec.channels, spec.heads], 1)
        return ScanParts(channels, z.unflatten(1, (spec.key_heads, -1)), None, a)
    channels, z, b, a = mixed.split([spec.channels, spec.value_width, spec.heads, spec.heads], 1)
    return ScanParts(channels, z.view(-1, spec.heads, spec.value_dim), b, a)


def _scale_(spec: Scan, mixed_: Tensor) -> None:
    """Multiplies `mixed`, or its gradient, by Mamba2's factors of its parts."""
    widths = spec.value_width, spec.value_width, spec.key_width, spec.key_width, spec.heads
    for part, factor in zip(mixed_.split(widths, 1), spec.factors, strict=True) if spec.factors else ():
        part.mul_(factor)


def _project(p: Pass, w: ScanWeights, x: Tensor, out: Tensor | None = None, copy: Tensor | None = None) -> Tensor:
    """Computes `mixed` with columns in the order of `split`, which files may not have; copies x to `copy`, if given."""
    y, _ = norm_for(w.mixed, x, w.norm, copy)
    if not p.layer.mixer_names.mixed_by_head:
        mixed = linear(y, w.mixed, out, x.dtype)
        _scale_(w.spec, mixed)
        return mixed
    mixed = linear(y, w.mixed, dtype=x.dtype)
    del y
    order = file_order(w.spec, x.device)
    return torch.index_select(mixed, 1, order, out=out) if out is not None else mixed.index_select(1, order)


@cache
def file_order(spec: Scan, device: torch.device) -> Tensor:
    """The columns of `mixed` in a file where q, k, v and z of a key head are neighbours, as are its b and a."""
    r = spec.heads // spec.key_heads
    widths = [spec.key_dim, spec.key_dim, r * spec.value_dim, r * spec.value_dim]
    end = spec.channels + spec.value_width
    parts = torch.arange(end).view(spec.key_heads, -1).split(widths, 1)
    numbers = (end + torch.arange(2 * spec.heads)).view(spec.key_heads, -1).split([r, r], 1)
    return torch.cat([part.flatten() for part in (*parts, *numbers)]).to(device)


def _in_file_order(p: Pass, spec: Scan, d_mixed: Tensor) -> Tensor:
    if not p.layer.mixer_names.mixed_by_head:
        return d_mixed
    return d_mixed.index_select(1, torch.argsort(file_order(spec, d_mixed.device)))


def _heads(spec: Scan, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of channels: q, k (N, K, d), v (N, H, e)."""
    if spec.delta:
        q, k, v = raw.split([spec.key_width, spec.key_width, spec.value_width], 1)
    else:
        v, k, q = raw.split([spec.value_width, spec.key_width, spec.key_width], 1)
    keys = (-1, spec.key_heads, spec.key_dim)
    return q.view(keys), k.view(keys), v.view(-1, spec.heads, spec.value_dim)


def _lengths(spec: Scan, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (d,) fp32 of an RMSNorm, which then gives q the length d ** -0.5, and k the length 1."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    ones = torch.ones(spec.key_dim, dtype=dtype, device=like.device)
    return ones / spec.key_dim, ones * spec.key_dim**-0.5


def inputs(w: ScanWeights, parts: ScanParts, raw: Tensor) -> ScanInputs:
    """The recurrence's inputs, given the convolution's result `raw` (N, C)."""
    spec = w.spec
    q, k, v = _heads(spec, raw)
    g, steps = ops.decay_fwd(parts.a, w.decay, w.step, *_limits(spec))
    if parts.b is None:
        return ScanInputs(raw, q, k, v, g, steps)
    eps = EPS / spec.key_dim
    (q, q_stats), (k, k_stats) = (ops.norm_fwd(t, f, eps) for t, f in zip((q, k), _lengths(spec, q), strict=True))
    beta = torch.sigmoid(parts.b).to(g.dtype)
    return ScanInputs(raw, q, k, v, g, beta if spec.most == 1.0 else spec.most * beta, q_stats, k_stats)


def _limits(spec: Scan) -> tuple[float, float]:
    """(least, largest) step."""
    return spec.low, spec.high or float("inf")


def _by_group(spec: Scan, weight: Tensor) -> Tensor:
    """The gated norm's weight (e,) of all heads, or by group (K, H e / K)."""
    return weight if spec.delta else weight.view(spec.key_heads, -1)


def _inputs(p: Pass, w: ScanWeights, parts: ScanParts) -> ScanInputs:
    return inputs(w, parts, ops.conv_fwd(parts.channels, w.conv, w.conv_bias, p.rows.docs))


def _scan(p: Pass, w: ScanWeights, mixed: Tensor, out: Tensor | None = None, recur: Recur | None = None) -> Tensor:
    spec, parts = w.spec, split(w.spec, mixed)
    if recur is not None:
        return recur(w, parts, p.rows)
    a = _inputs(p, w, parts)
    out = None if out is None else out.view(a.v.shape)
    return ops.scan_fwd(a.q, a.k, a.v, a.g, a.beta, p.rows.docs, spec.delta, w.skip, out).view(-1, spec.value_width)


def _gated(w: ScanWeights, mixed: Tensor, scanned: Tensor) -> tuple[Tensor, Stats | None]:
    """(what the output projection reads, (N, H e), statistics of its norm)."""
    spec, z = w.spec, split(w.spec, mixed).z
    if w.gated is None:
        x, z = (t.view(-1, spec.heads, spec.value_dim) for t in (scanned, z))
        return ops.gate_fwd(x, z, "silu").view(scanned.shape), None
    weight, kind = _by_group(spec, w.gated), _gated_kind(spec)
    y, stats = ops.norm_fwd(scanned.view(z.shape), weight, w.eps, kind, gate=z)
    return y.view(scanned.shape), stats


def _gated_kind(spec: Scan) -> ops.NormKind:
    return ops.NormKind(gate_first=not spec.delta)
