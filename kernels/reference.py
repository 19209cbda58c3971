"""Operations in plain torch, with the names and signatures of the Triton launchers: reference for tests, and CPU path.

The references of attention, experts, fp8, losses, the optimizer, packed weights and scans are in the folders of their
kernels.

Legend: N packed tokens, D width, F hidden width, V vocabulary, H heads, d head width.
Arithmetic is in fp32 (in fp64 for fp64 inputs), rounded once to the output's dtype. Arguments called `out` and those
whose names end in `_` are written or added to; others are only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trireme.kernels.experts.reference import Order


def upcast(x: Tensor) -> Tensor:
    """x in the arithmetic dtype: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def add_(out: Tensor, value: Tensor) -> None:
    """out += value, rounded once."""
    out.copy_(upcast(out) + value)


# ---------------------------------------------------------------- norms


class NormKind(NamedTuple):
    """What a norm does besides dividing by the root mean square."""

    add_one: bool = False  # multiplies by 1 + weight
    centred: bool = False  # LayerNorm
    gate_first: bool = False  # a gate multiplies x, not the result


RMS = NormKind()


class NormStats(NamedTuple):
    """Statistics of rows, for backward."""

    rstd: Tensor  # (N, H) fp32
    mean: Tensor | None  # likewise, of a LayerNorm


def norm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    kind: NormKind = RMS,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    copy: Tensor | None = None,
    maxima_: Tensor | None = None,
) -> tuple[Tensor, NormStats]:
    """(the norm of x over its features (N, H, D) contiguous, its statistics); x (N, H, D), rows may be strided.

    weight (D,), or (H, D) by head; bias (D,) of a LayerNorm. The result, or with kind.gate_first x, is multiplied by
    silu(gate), gate (N, H, D). Copies x to `copy`, if given. maxima_: fp8/reference.py, new_maxima.
    """
    if copy is not None:
        copy.copy_(x)
    u = upcast(x)
    s = None if gate is None else torch.nn.functional.silu(upcast(gate))
    u = u * s if s is not None and kind.gate_first else u
    mean = u.mean(-1) if kind.centred else None
    u = u if mean is None else u - mean[..., None]
    rstd = torch.rsqrt(u.square().mean(-1) + eps)
    y = u * rstd[..., None] * _norm_weight(weight, kind)
    y = y if bias is None else y + upcast(bias)
    y = (y if s is None or kind.gate_first else y * s).to(x.dtype)
    if maxima_ is not None:
        raise_maximum_(maxima_, y)
    return y, NormStats(rstd, mean)


def norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stats: NormStats,
    kind: NormKind,
    dx_: Tensor,
    dweight_: Tensor | None = None,
    dbias_: Tensor | None = None,
    gate: Tensor | None = None,
    dgate_: Tensor | None = None,
    dresidual: Tensor | None = None,
) -> None:
    """Fills dx_ (N, H, D), which may be dy, with the gradient of x plus dresidual, and dgate_ with that of the gate.

    Adds to dweight_ and dbias_, which are None where frozen.
    """
    dyf, xf, rstd = upcast(dy), upcast(x), stats.rstd[..., None]
    s, slope = (None, None) if gate is None else silu(upcast(gate))
    u = xf * s if s is not None and kind.gate_first else xf
    dn = dyf * s if s is not None and not kind.gate_first else dyf
    n = (u if stats.mean is None else u - stats.mean[..., None]) * rstd
    w = _norm_weight(weight, kind)
    if dweight_ is not None:
        add_(dweight_, (dn * n).sum(0 if weight.dim() == 2 else (0, 1)))
    if dbias_ is not None:
        add_(dbias_, dn.sum((0, 1)))
    g = dn * w
    centred = g if stats.mean is None else g - g.mean(-1, keepdim=True)
    du = rstd * (centred - n * (g * n).mean(-1, keepdim=True))
    if s is not None and slope is not None and dgate_ is not None:
        dgate_.copy_((du * xf if kind.gate_first else dyf * n * w) * slope)
        du = du * s if kind.gate_first else du
    dx_.copy_(du if dresidual is None else du + upcast(dresidual))


def _norm_weight(weight: Tensor, kind: NormKind) -> Tensor:
    return 1 + upcast(weight) if kind.add_one else upcast(weight)


MAXIMA = 64  # slots of a tensor's largest magnitude


def raise_maximum_(maxima_: Tensor, y: Tensor) -> None:
    """Raises one of most_ (MAXIMA,) int32, bits of fp32, to the largest finite magnitude of y."""
    largest = torch.where(y.isfinite(), y.float().abs(), 0.0).amax().view(1)
    maxima_[:1] = torch.maximum(maxima_[:1], largest.view(torch.int32))


# ---------------------------------------------------------------- positions


def rope_table(inv_freq: Tensor, length: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position * inv_freq, both times `scale`, (length, d/2) fp32; inv_freq (d/2,)."""
    angle = torch.outer(torch.arange(length, device=inv_freq.device, dtype=torch.float32), inv_freq.float())
    return angle.cos() * scale, angle.sin() * scale


def rope_(x_: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, inverse: bool = False, pairs: bool = False) -> None:
    """Rotates x_ (N, H, d), which may be strided: (a, b) -> (a cos - b sin, b cos + a sin), or back if `inverse`.

    a and b are the halves of a head, or with `pairs` its even and odd features. cos, sin (P, d/2) fp32; positions (N,)
    int32 < P.
    """
    c, s = cos[positions.long()][:, None, :], sin[positions.long()][:, None, :]
    if inverse:
        s = -s
    half = x_.shape[-1] // 2
    first, second = (x_[..., ::2], x_[..., 1::2]) if pairs else (x_[..., :half], x_[..., half:])
    a, b = upcast(first), upcast(second)
    turned = a * c - b * s, b * c + a * s
    first.copy_(turned[0])
    second.copy_(turned[1])


# ---------------------------------------------------------------- activations


class Act(NamedTuple):
    """An activation: "silu", "gelu" (by tanh), "exact gelu" or "relu2", of a gate that multiplies `up` if gated."""

    name: str = "silu"
    gated: bool = True
    limit: float = 0.0  # clamped as in gpt-oss, of interleaved gate and up; 0: not


_GELU_K, _GELU_C = 0.7978845608028654, 0.044715  # sqrt(2 / pi); GPT-2
ALPHA = 1.702  # of the clamped SwiGLU


def silu(x: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(x), its derivative); so the others."""
    s = torch.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(_GELU_K * (x + _GELU_C * x * x * x))
    dt = (1 - t * t) * _GELU_K * (1 + 3 * _GELU_C * x * x)
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * dt


def _gelu_erf(x: Tensor) -> tuple[Tensor, Tensor]:
    s = 0.5 * (1 + torch.erf(x * 0.5**0.5))
    return x * s, s + x * torch.exp(-0.5 * x * x) * (_GELU_K / 2)


def _relu2(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.relu() ** 2, 2 * x.relu()


_ACTS = {"silu": silu, "gelu": _gelu_tanh, "exact gelu": _gelu_erf, "relu2": _relu2}


def _parts(h: Tensor, act: Act) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(activation, its derivative, derivative by up of what multiplies it, that factor) of a gated unit."""
    if not act.limit:
        gate, up = upcast(h).chunk(2, -1)
        return *_ACTS[act.name](gate), torch.ones_like(up), up
    gate, up = upcast(h)[..., ::2], upcast(h)[..., 1::2]
    low = gate.clamp(max=act.limit)
    s = torch.sigmoid(ALPHA * low)
    slope = torch.where(gate <= act.limit, s * (1 + ALPHA * low * (1 - s)), 0.0)
    return low * s, slope, (up.abs() <= act.limit).to(up.dtype), up.clamp(-act.limit, act.limit) + 1


def act_fwd(h: Tensor, act: Act, bias: Tensor | None = None, maxima_: Tensor | None = None) -> Tensor:
    """f(h + bias), h (N, F), or of gated units f(gate) * up (N, F), h (N, 2F), gate first unless clamped.

    maxima_: fp8/reference.py, new_maxima.
    """
    if act.gated:
        value, _, _, up = _parts(h, act)
        y = (value * up).to(h.dtype)
    else:
        y = _ACTS[act.name](upcast(h) if bias is None else upcast(h) + upcast(bias))[0].to(h.dtype)
    if maxima_ is not None:
        raise_maximum_(maxima_, y)
    return y


def act_bwd_(
    dy_: Tensor, h_: Tensor, act: Act, bias: Tensor | None = None, dbias_: Tensor | None = None,
    weights: Tensor | None = None, order: Order | None = None,
) -> Tensor | None:  # fmt: skip
    """Backward of act_fwd in place: h_ becomes its gradient, dy_ (N, F) becomes forward's result.

    Adds the bias's gradient, summed in fp32, to dbias_. With weights (tokens, k) fp32 of rows in `order` the results
    are those of weight * y, given the gradient of that; returns the gradient of weights: with dy_ = dy[token] @ down.T
    it is <dy, y @ down> (Guo et al., SonicMoE, arXiv:2512.14080), and the rows that weights multiply are not needed.
    """
    d, x = upcast(dy_), upcast(h_) if bias is None else upcast(h_) + upcast(bias)
    if act.gated:
        value, slope, passes, up = _parts(h_, act)
        y = value * up
    else:
        y, slope = _ACTS[act.name](x)
    dweights = None
    if weights is not None and order is not None:
        pair = order.pair.long()
        w, dweights = weights.flatten()[pair][:, None], torch.empty_like(weights)
        dweights.view(-1)[pair] = (d * value * up if act.gated else d * y).sum(-1)
        d, y = w * d, w * value * up if act.gated else w * y
    if act.gated:
        halves = d * up * slope, d * value * passes
        dh = torch.stack(halves, -1).flatten(1) if act.limit else torch.cat(halves, -1)
    else:
        dh = d * slope
    if dbias_ is not None:
        add_(dbias_, dh.sum(0))
    h_.copy_(dh)
    dy_.copy_(y)
    return dweights


def bias_bwd_(dbias_: Tensor, dy: Tensor) -> None:
    """dbias_ (D,) += the sum of dy (N, D) over rows, in fp32."""
    add_(dbias_, upcast(dy).sum(0))


# ---------------------------------------------------------------- the two ends


def embedding_fwd(ids: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """weight[ids] (N, D), for ids (N,) int64, weight (V, D)."""
    return torch.index_select(weight, 0, ids) if out is None else torch.index_select(weight, 0, ids, out=out)


def add_noise_(x_: Tensor, scale: Tensor, key: int, first: int) -> None:
    """Adds to x_ (N, D) noise in [-1, 1), a function of (key, first + row, feature), times scale (N,) fp32.

    Computed in fp32, rounded once.
    """
    for rows, random in _random(x_, key, first):
        u = random.float() * 2.0**-23 - 1.0
        x_[rows] = upcast(x_[rows]) + u * scale[rows, None]


def dropout(x: Tensor, p: float, key: int, first: int, out: Tensor | None = None) -> Tensor:
    """x (N, D) / (1 - p), or 0 with probability p: a function of (key, first + row, feature). `out` may be x."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    for rows, random in _random(x, key, first):
        out[rows] = torch.where(random >= round(p * 2**24), upcast(x[rows]) * (1 / (1 - p)), 0.0)
    return out


def _random(x: Tensor, key: int, first: int) -> Iterator[tuple[slice, Tensor]]:
    """(some rows, their random numbers (rows, D), int64 of 24 bits) of x (N, D), by (key, first + row, feature)."""
    features = hash32(torch.arange(x.shape[1], device=x.device))
    by_row = hash32(hash32(first + torch.arange(len(x), device=x.device)) ^ key)
    at_once = max(1, 65536 // x.shape[1])  # rows at once
    for a in range(0, len(x), at_once):
        rows = slice(a, a + at_once)
        yield rows, hash32(by_row[rows, None] ^ features) >> 8


def hash32(x):
    """Wellons' lowbias32 of an integer, or of an int64 tensor."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def embedding_bwd_(dweight_: Tensor, dy: Tensor, ids: Tensor) -> None:
    """Adds each dy[n] (D,) to dweight_[ids[n]]: summed in fp32, each row of dweight_ (V, D) rounded once."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    total = upcast(dweight_[unique])
    dweight_[unique] = total.index_add_(0, inverse, upcast(dy)).to(dweight_.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap); x where cap is 0."""
    return cap * torch.tanh(x / cap) if cap else x
