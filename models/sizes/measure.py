"""What a pass over a unit takes, measured: it runs over tensors without memory (watch.py), whatever its code is.

A unit takes a constant and a multiple of its tokens, up to a tile of an MLP; so two measurements give the line. FLOPs
of attention are by pair, of which documents have different numbers. Needs torch, no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.models import head, model
from trireme.models.config import ModelConfig
from trireme.models.packed import DTYPE
from trireme.models.rows import make_rows, rope_tables
from trireme.models.sizes import narrow, shapes
from trireme.models.sizes.costs import attended_pairs
from trireme.models.sizes.watch import Usage, Watch
from trireme.storage.layout import pack

POINTS = (1024, 2048)  # tokens that are measured
SLACK = 1 << 20  # bytes: tiles that end early
NAMES = {2: "BF16", 4: "F32"}  # dtypes by bytes of a value
META = torch.device("meta")
ATTENDED = frozenset({"attn_out", "lse"})  # made together
CACHED = 1 << 14
_tables = lru_cache(rope_tables)  # they are computed in RAM, then left out


class Work(NamedTuple):
    """What one pass over one unit takes."""

    flops: dict[str, float]  # by what multiplies: "gemm", "fp8", "attention 128" and others (watch.py)
    padded: float  # FLOPs of grouped products with empty rows
    launches: float
    moved: float  # bytes that launches read and write which multiply nothing

    def plus(self, other: Work, times: float = 1.0) -> Work:
        flops = {k: self.flops.get(k, 0.0) + times * other.flops.get(k, 0.0) for k in self.flops | other.flops}
        sums = (a + times * b for a, b in zip(self[1:], other[1:], strict=True))
        return Work({k: n for k, n in flops.items() if n}, *sums)


NOTHING = Work({}, 0.0, 0.0, 0.0)


def temporaries(cfg: ModelConfig, u: int, tokens: int, itemsize: int, grad_itemsize: int | None = None) -> int:
    """Bytes of a unit's temporaries on the GPU, forward or backward, with nothing saved.

    Item sizes of compute dtype and gradients (default: the same). Excludes the caller's tensors (x, dy, dx, weights,
    gradients, saved) and cuBLAS's workspace.
    """
    exact = u in (0, cfg.n_units - 1)  # the head's rows of logits are no multiple of its tokens
    passes = _points(cfg, u, tokens, itemsize, grad_itemsize or itemsize, frozenset(), exact)
    peak = max(_interpolate(tokens, [(n, usage[i].peak) for n, usage in passes]) for i in (0, 1))
    return max(int(peak), rounding(cfg, shapes.representatives(cfg)[u], itemsize).peak) + SLACK


def work(
    cfg: ModelConfig,
    u: int,
    tokens: int,
    pairs: int,
    itemsize: int = 2,
    grad_itemsize: int = 2,
    names: frozenset[str] = frozenset(),
) -> tuple[Work, Work]:
    """Work of (forward, backward) of unit u for so many tokens, which attend to `pairs`; backward finds `names` saved.

    Of the head: of the loss alone, and with its gradients; tokens are labels. Of slices of experts: of all together,
    but launches of one.
    """
    return _work(cfg, shapes.representatives(cfg)[u], tokens, pairs, itemsize, grad_itemsize, names)


def rebuilt(cfg: ModelConfig, u: int, tokens: int, pairs: int, names: frozenset[str], itemsize: int) -> Work:
    """What a unit's backward computes again, as it does not find the saved tensors that are not in `names`."""
    saved = frozenset(shapes.saved_of(cfg, shapes.unit(cfg, u), 1))
    missing = saved - names
    base = work(cfg, u, tokens, pairs, itemsize, names=saved)[1]
    total = NOTHING
    for name in sorted(missing - {"lse"} if missing >= ATTENDED else missing):
        recomputed = work(cfg, u, tokens, pairs, itemsize, names=saved - {name})[1]
        total = total.plus(recomputed).plus(base, -1.0)
    return total


@lru_cache(CACHED)
def forward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int) -> float:
    """FLOPs of a unit in forward. For the head, `tokens` is the number of labels."""
    return sum(work(cfg, u, tokens, pairs)[0].flops.values())


@lru_cache(CACHED)
def backward_flops(cfg: ModelConfig, u: int, tokens: int, pairs: int, names: frozenset[str] | None = None) -> float:
    """FLOPs of a unit in backward, which finds the saved tensors `names` (None: all). Of the head, of gradients."""
    if u == cfg.n_units - 1:
        return sum(work(cfg, u, tokens, pairs)[1].flops.values()) - forward_flops(cfg, u, tokens, pairs)
    if names is None and u:
        names = frozenset(shapes.saved_of(cfg, shapes.unit(cfg, u), 1))
    return sum(work(cfg, u, tokens, pairs, names=names or frozenset())[1].flops.values())


@lru_cache(CACHED)
def rounding(cfg: ModelConfig, u: int, itemsize: int) -> Usage:
    """What a pass takes to add a unit's adapters to packed matrices and to round them again: nothing unless Lora.aware.

    Of experts that each product decodes it is among the unit's work.
    """
    watch, dtype = Watch(), NAMES[itemsize]
    decoded = narrow.derived_groups(cfg, u)[0] if cfg.lora and cfg.lora.aware else []
    if decoded:
        trained = [group for part in shapes.trained_parts(cfg, u) for group in part]
        views = _memory(trained, dtype) | _memory(narrow.base_groups(cfg, u), dtype, narrow.own_dtypes(cfg, u))
        out = _memory(decoded, dtype)
        with watch.watching(views, out):
            model.make_codes(cfg, u, views, out, backward=False)
    return watch.usage


Measured = list[tuple[int, tuple[Usage, Usage]]]  # (tokens, forward and backward)


@lru_cache(CACHED)
def _work(
    cfg: ModelConfig, u: int, tokens: int, pairs: int, itemsize: int, grad_itemsize: int, names: frozenset[str]
) -> tuple[Work, Work]:
    passes = _points(cfg, u, tokens, itemsize, grad_itemsize, names)
    spec = shapes.unit(cfg, u).attention if 0 < u < cfg.n_units - 1 else None
    window = spec.window if spec else 0
    forward, backward = (_line(tokens, pairs, window, [(n, usage[i]) for n, usage in passes]) for i in (0, 1))
    return forward, backward


def _line(tokens: int, pairs: int, window: int, points: list[tuple[int, Usage]]) -> Work:
    """The Work of so many tokens and pairs, given what one document of each number of tokens takes."""
    fit = lambda value: max(_interpolate(tokens, [(n, value(usage)) for n, usage in points]), 0.0)
    flops = {}
    for kind in points[0][1].flops:
        if kind.startswith("attention"):
            n, usage = points[0]
            flops[kind] = usage.flops[kind] / attended_pairs((n,), window) * pairs
        else:
            flops[kind] = fit(lambda usage, kind=kind: usage.flops[kind])
    flops = {kind: n for kind, n in flops.items() if n}
    return Work(flops, fit(lambda t: t.padded), fit(lambda t: t.launches), fit(lambda t: t.moved))


def _interpolate(tokens: int, points: list[tuple[int, float]]) -> float:
    """The value at `tokens` of the line through two points, or of the only one."""
    (n, a), (m, b) = points[0], points[-1]
    return a + (b - a) * (tokens - n) / (m - n) if n < m else a


def _points(
    cfg: ModelConfig,
    u: int,
    tokens: int,
    itemsize: int,
    grad_itemsize: int,
    names: frozenset[str],
    exact: bool = False,
) -> Measured:
    """What is measured for `tokens`."""
    u, inner = shapes.representatives(cfg)[u], 0 < u < cfg.n_units - 1
    if inner:  # by tiles, or with products in fp8 where experts have many rows
        exact = tokens > cfg.mlp_rows or (cfg.fp8 and shapes.unit(cfg, u).experts is not None)
    points = (tokens,) if exact else POINTS
    dtypes = NAMES[itemsize], NAMES[grad_itemsize]
    if inner:
        return [(n, _inner(cfg, u, n, *dtypes, names)) for n in points]
    return [(n, (_head if u else _embedding)(cfg, n, *dtypes)) for n in points]


@lru_cache(CACHED)
def _inner(cfg: ModelConfig, u: int, tokens: int, dtype: str, grads: str, names: frozenset[str]) -> tuple[Usage, Usage]:
    """An inner unit's passes over one document."""
    derived, dtypes = narrow.derived_groups(cfg, u)
    trained = [group for part in shapes.trained_parts(cfg, u) for group in part]
    stored = lambda groups: _memory(groups, dtype, narrow.own_dtypes(cfg, u))
    views = _memory(trained, dtype) | stored(narrow.base_groups(cfg, u)) | _memory(derived, dtype, dtypes)
    parts: list[Any] = [model.weights(cfg, u, views)] if not narrow.slices(cfg, u) else []
    for part in narrow.slices(cfg, u):
        parts.append(model.weights(cfg, u, views | stored(narrow.slice_groups(cfg, u, part)), part))
    passed = _empty(shapes.passed_shapes(cfg, tokens), dtype) if len(parts) > 1 else None
    g = model.gradients(cfg, u, _memory(trained, grads))
    rows = make_rows((tokens,), _tables(cfg, tokens, META), META)
    saved = {name: shape for name, shape in shapes.saved_of(cfg, shapes.unit(cfg, u), tokens).items() if name in names}
    tensors = _empty(saved, dtype)
    x, dy, out, dx = (torch.empty((tokens, cfg.width), dtype=DTYPE[dtype], device=META) for _ in range(4))
    owned = parts, g, rows, tensors, x, dy, out, dx, passed
    spec = shapes.unit(cfg, u).experts
    count = spec.count if spec else 0
    forward = _watched(owned, parts, lambda w: model.forward(cfg, u, w, x, rows, tensors, out, passed=passed), count)
    run = lambda w: model.backward(cfg, u, w, g, x, tensors, dy, rows, dx, passed)
    return forward, _watched(owned, reversed(parts), run, count)


def _watched(owned: Any, parts: Iterable[Any], run: Callable[[Any], object], experts: int = 0) -> Usage:
    """What the passes over all parts of a unit's weights take; launches are those of one part."""
    watch, count = Watch(experts), 0
    with watch.watching(owned):
        for part in parts:
            run(part)
            count += 1
    return watch.usage._replace(launches=-(-watch.launches // count))


@lru_cache(CACHED)
def _head(cfg: ModelConfig, tokens: int, dtype: str, grads: str) -> tuple[Usage, Usage]:
    """The loss of so many labels, alone and with its gradients."""
    (first, g_first), (last, g_last) = (_end(cfg, u, dtype, grads) for u in (0, cfg.n_units - 1))
    w, g = head.with_output(cfg, last, first), head.with_output(cfg, g_last, g_first)
    x, dx = (torch.empty((tokens, cfg.width), dtype=DTYPE[dtype], device=META) for _ in range(2))
    labels, rows = (torch.empty(tokens, dtype=torch.int64, device=META) for _ in range(2))
    factors = torch.empty(tokens, dtype=torch.float32, device=META)
    hits: Tensor | None = torch.empty(1, dtype=torch.float64, device=META)
    shares = None
    if cfg.teaching:
        ids, logps = (
            torch.empty((tokens, cfg.teaching.k), dtype=kind, device=META) for kind in (torch.int32, torch.float16)
        )
        shares, hits = head.Shares(ids, logps, factors), None
    targets = head.Targets(labels, rows, factors, shares, hits)
    run = lambda outputs: head.head_loss(cfg, w, x, targets, 1.0, *outputs)
    owned = w, g, x, dx, targets
    return _watched(owned, ((None, None),), run), _watched(owned, ((g, dx),), run)


def _end(cfg: ModelConfig, u: int, dtype: str, grads: str) -> tuple[Any, Any]:
    """The weights of the embedding or head, and their gradients."""
    trained = [group for part in shapes.trained_parts(cfg, u) for group in part]
    w = model.weights(cfg, u, _memory(shapes.weight_groups(cfg, u), dtype))
    return w, model.gradients(cfg, u, _memory(trained, grads))


@lru_cache(CACHED)
def _embedding(cfg: ModelConfig, tokens: int, dtype: str, grads: str) -> tuple[Usage, Usage]:
    w, g = _end(cfg, 0, dtype, grads)
    rows, ids = make_rows((tokens,), {}, META), torch.empty(tokens, dtype=torch.int64, device=META)
    out = torch.empty((tokens, cfg.width), dtype=DTYPE[dtype], device=META)
    owned = w, g, rows, ids, out
    forward = _watched(owned, (None,), lambda _: head.embed_forward(w, ids, rows, out))
    return forward, _watched(owned, (None,), lambda _: head.embed_backward(g, out, ids, rows))


def _empty(shaped: shapes.Saved, dtype: str) -> dict[str, Tensor]:
    kind = lambda name: DTYPE[dtype] if name == "compute" else DTYPE[name]
    return {name: torch.empty(shape, dtype=kind(key), device=META) for name, (shape, key) in shaped.items()}


def _memory(groups: list[shapes.Group], dtype: str, dtypes: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Views of a unit's buffer."""
    layout = pack(groups, dtype, dtypes or {})
    buffer = torch.empty(layout.span, dtype=torch.uint8, device=META)
    kind = lambda name: torch.float8_e4m3fn if name == "F8_E4M3" else DTYPE.get(name, torch.uint8)
    view = lambda t: buffer[t.offset : t.offset + t.nbytes].view(kind(t.dtype)).view(t.shape)
    return {t.name: view(t) for t in layout.tensors}
