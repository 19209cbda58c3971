"""The model as numbered units: embedding, blocks or sub-layers, head. Their weights by name, forward and backward.

Unit 0 is the embedding, unit cfg.n_units - 1 the head. shapes.kind says what each unit is. Legend: shapes.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models import attention, block, experts, head, latent, mlp, shared
from trireme.models.config import ModelConfig
from trireme.models.families.experts import Experts
from trireme.models.families.names import Names, adapter_names
from trireme.models.families.scans import Scan
from trireme.models.layers import Layer
from trireme.models.linear import Codes, Linear, fuse, trained
from trireme.models.lora import Adapters, Stacked, dropping, part_key
from trireme.models.mixers import scan
from trireme.models.norm import Norm
from trireme.models.packed import Sliced, Stack, decode, whole
from trireme.models.rows import Pass, Rows
from trireme.models.sizes import narrow, shapes

EMPTY = torch.empty(0, 0)  # a frozen tensor's gradient; a matrix that is there as codes alone


def forward(
    cfg: ModelConfig,
    u: int,
    w: block.Weights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    mixing: block.Mixing = (),
    passed: experts.Passed | None = None,
) -> None:
    """Forward of inner unit u: fills out (N, D) and every tensor of `saved`, given x (N, D).

    `mixing`: what mixers call in generation, with a cache. `passed`: of units that are slices of experts
    (experts.py); one that does not end its layer fills it instead of out.
    """
    p = _pass(cfg, u, rows, saved)
    block.forward(p, dropping(w, p.rows.dropout), x, out, mixing, passed)


def backward(
    cfg: ModelConfig,
    u: int,
    w: block.Weights,
    g: block.Weights,
    x: Tensor,
    saved: dict[str, Tensor],
    dy: Tensor,
    rows: Rows,
    dx: Tensor,
    passed: experts.Passed | None = None,
) -> None:
    """Backward of inner unit u: fills dx (N, D), adds to g, given dy (N, D). `passed` as in forward."""
    p = _pass(cfg, u, rows, saved)
    block.backward(p, dropping(w, p.rows.dropout), g, x, dy, dx, passed)


def _pass(cfg: ModelConfig, u: int, rows: Rows, saved: dict[str, Tensor]) -> Pass:
    i, layer = cfg.units[u - 1]
    return Pass(cfg, layer, i, rows.in_layer(i), saved)


def gradients(cfg: ModelConfig, u: int, views: dict[str, Tensor]) -> Any:
    """The gradients of unit u, in the type of `weights`, over views of its trained tensors; empty where frozen."""
    return weights(cfg, u, {name: EMPTY for group in shapes.frozen_groups(cfg, u) for name, _ in group} | views)


def weights(cfg: ModelConfig, u: int, views: dict[str, Tensor], own: range | None = None) -> Any:
    """EmbedWeights, HeadWeights or block.Weights of unit u, or its gradients, over `views`, name -> tensor.

    Tensors of a group (shapes.weight_groups) must be neighbours in memory. `own`: the experts of a slice, where the
    unit has `slices` (narrow.py).
    """
    if u == 0:
        return head.embed_weights(cfg, views)
    if u == cfg.n_units - 1:
        return head.head_weights(cfg, views)
    i, layer = cfg.units[u - 1]
    prefix = cfg.names.prefix(i)
    mine = {name.removeprefix(prefix): view for name, view in views.items()}
    if cfg.lora and cfg.lora.scales:
        cfg = replace(cfg, lora=cfg.lora.within(prefix))
    at = At(cfg, layer)
    mixers = tuple((_scan_weights if isinstance(m, Scan) else _attention_weights)(at, mine) for m in layer.mixers)
    mlps = tuple((_expert_weights if isinstance(m, Experts) else _mlp_weights)(at, mine) for m in layer.mlps)
    if own is not None:
        assert layer.experts is not None
        part = experts.Slice(own.start, own.stop, layer.experts.count)
        mlps = tuple(w._replace(part=part) if isinstance(w, experts.Weights) else w for w in mlps)
    if len(mlps) > 1:
        return block.Weights(mixers, mlps, _norm(at, at.names.post2, mine), mine.get(at.names.scalar))
    return block.Weights(mixers, mlps, scalar=mine.get(at.names.scalar) if at.names.scalar else None)


class At(NamedTuple):
    """Where weights are read."""

    cfg: ModelConfig
    layer: Layer

    @property
    def names(self) -> Names:
        return self.layer.names


def make_codes(cfg: ModelConfig, u: int, views: dict[str, Tensor], out: dict[str, Tensor], backward: bool) -> None:
    """Fills `out`, views of narrow.made_groups, before a pass over unit u: decoded matrices, and codes for fp8.

    `views` are the unit's stored tensors; `backward` says which pass, and so in which orders codes are read.
    """
    packed = [name for group in narrow.packed_groups(cfg, u) for name, _ in group]
    for name in (name for name in packed if name in out):
        assert cfg.packing is not None
        packing = cfg.packing.of(name)
        decode(packing, [views[name + part.suffix] for part in packing.parts], out[name])
    rows, columns = backward or not cfg.names.in_out, backward or cfg.names.in_out  # orders that the pass reads
    for group in narrow.fp8_groups(cfg, u):
        name = group[0][0]
        if name + narrow.ROWS in views:
            if columns:
                ops.turn(views[name + narrow.ROWS], out[name + narrow.COLUMNS])
            continue
        if name + narrow.SCALE not in out:
            continue
        codes = ops.Quantized(out[name + narrow.SCALE][:1], out[name + narrow.ROWS], out[name + narrow.COLUMNS])
        ops.quantize(fuse(*(views[name] for name, _ in group)), rows, columns, codes)


def _attention_weights(at: At, views: dict[str, Tensor]) -> attention.Weights:
    names = at.names
    norm, post, q_norm, k_norm = (
        _norm(at, name, views) for name in (names.norm1, names.post1, names.q_norm, names.k_norm)
    )
    qkv, o = _linear(at, names.qkv, views), _linear(at, (names.o,), views)
    if at.layer.attention and at.layer.attention.latent:
        assert k_norm is not None
        q_b = _linear(at, (names.q_b,), views) if names.q_b else None
        inner = latent.Weights(k_norm, _linear(at, (names.kv_b,), views), q_norm, q_b)
        return attention.Weights(norm, qkv, o, post, latent=inner)
    return attention.Weights(norm, qkv, o, post, q_norm, k_norm, views.get(names.sinks))


def _scan_weights(at: At, views: dict[str, Tensor]) -> scan.Weights:
    names = at.names
    mixed, o = _linear(at, names.mixed, views), _linear(at, (names.mixed_o,), views)
    conv, gated = views[f"{names.conv}.weight"], views.get(f"{names.mixed_norm}.weight")
    return scan.Weights(
        _norm(at, names.norm1, views), mixed, o, conv, views[names.decay], views[names.step], gated,
        views.get(f"{names.conv}.bias"), views.get(names.skip),
    )  # fmt: skip


def _expert_weights(at: At, views: dict[str, Tensor]) -> experts.Weights:
    names, own = at.names, at.layer.experts
    assert own is not None
    norm, router = _norm(at, names.norm_experts or names.norm2, views), _linear(at, (names.router,), views)
    of_shared = _shared_weights(at, views) if own.shared else None
    up, up_bias = _stack(at, f"{names.experts}.{shapes.GATE_UP}", views)
    down, down_bias = _stack(at, f"{names.experts}.{shapes.DOWN}", views)
    of_up, of_down = (_stacked(at, f"{names.experts}.{matrix}", views) for matrix in (shapes.GATE_UP, shapes.DOWN))
    correction = views.get(names.correction)
    weights = experts.Weights(norm, router, up, down, of_shared, up_bias, down_bias, correction, of_up, of_down)
    if names.router_scale:
        of_router = Norm(views[names.router_scale])
        weights = weights._replace(
            post=_norm(at, names.post_experts, views), router_norm=of_router, expert_scale=views[names.expert_scale]
        )
    if not own.latent:
        return weights
    inner, outer = (_linear(at, (name,), views) for name in (names.latent_in, names.latent_out))
    return weights._replace(latent_in=inner, latent_out=outer)


def _mlp_weights(at: At, views: dict[str, Tensor]) -> mlp.Weights:
    names, own = at.names, at.layer.mlp
    assert own is not None
    first, second = _linear(at, names.up, views), _linear(at, (names.down,), views)
    norm, post = _norm(at, names.norm2, views), _norm(at, names.post_mlp or names.post2, views)
    if own.gated or own.act == "relu2":
        return mlp.Weights(norm, first, second, post)
    return mlp.Weights(norm, first._replace(bias=None), second, post, gelu_bias=first.bias)


def _stack(at: At, name: str, views: dict[str, Tensor]) -> tuple[Stack, Tensor | None]:
    """(matrices (E, in, out), biases (E, out)) of a layer's experts."""
    assert at.layer.experts is not None
    bias = views.get(f"{name}_bias")
    if bias is not None and trained(bias):
        bias = bias.view(at.layer.experts.count, -1)
    if name in views:
        matrices = whole(at.cfg.packing, name, views)
        return matrices if at.names.experts_in_out else matrices.mT, bias
    assert at.cfg.packing is not None
    shape = shapes.expert_shape(at.layer, name.rpartition(".")[2])
    parts = tuple(views[name + part.suffix] for part in at.cfg.packing.parts)
    return Sliced(at.cfg.packing, parts, shape, not at.names.experts_in_out, narrow.at_once(at.cfg)), bias


def _stacked(at: At, name: str, views: dict[str, Tensor]) -> Stacked | None:
    a, b = (views.get(part) for part in adapter_names(name))
    if a is None or b is None or at.cfg.lora is None:
        return None
    rank = at.cfg.lora.rank
    by_expert = lambda t: t.view(-1, rank, t.shape[1])
    return Stacked(by_expert(a), by_expert(b), at.cfg.lora.scale_of(name))


def _shared_weights(at: At, views: dict[str, Tensor]) -> shared.Weights:
    up, down = (_linear(at, names, views) for names in (at.names.up, (at.names.down,)))
    return shared.Weights(up, down, views.get(f"{at.names.shared_gate}.weight"))


def _norm(at: At, name: str, views: dict[str, Tensor]) -> Norm | None:
    if f"{name}.weight" not in views:
        return None
    return Norm(views[f"{name}.weight"], views.get(f"{name}.bias"), at.layer.norm == "rms + 1")


def _linear(at: At, names: tuple[str, ...], views: dict[str, Tensor]) -> Linear:
    codes = _codes(at, f"{names[0]}.weight", views)
    weight = EMPTY if f"{names[0]}.weight" not in views else fuse(*(views[f"{name}.weight"] for name in names))
    bias = fuse(*(views[f"{name}.bias"] for name in names)) if f"{names[0]}.bias" in views else None
    fp8 = codes is not None or (names != (at.names.router,) and narrow.in_fp8(at.cfg, *weight.shape))
    return Linear(weight if at.names.in_out else weight.T, bias, _adapters(at, names, views), fp8, codes)


def _codes(at: At, name: str, views: dict[str, Tensor]) -> Codes | None:
    if name + narrow.SCALE not in views:
        return None
    rows, columns, scale = views[name + narrow.ROWS], views[name + narrow.COLUMNS], views[name + narrow.SCALE][:1]
    return Codes(columns, rows, scale) if at.names.in_out else Codes(rows, columns, scale)


def _adapters(at: At, names: tuple[str, ...], views: dict[str, Tensor]) -> Adapters | None:
    features = shapes.features(at.layer, names)
    ends = list(accumulate(features))
    found = [(name, *adapter_names(name), (end - n, end)) for name, n, end in zip(names, features, ends, strict=True)]
    found = [(name, a, b, columns) for name, a, b, columns in found if a in views]
    if at.cfg.lora is None or not found:
        return None
    a = fuse(*(views[a] for _, a, _, _ in found))
    b = tuple(views[b] for _, _, b, _ in found)
    scales, keys = tuple(at.cfg.lora.scale_of(name) for name, *_ in found), tuple(part_key(name) for name, *_ in found)
    return Adapters(a, b, tuple(columns for *_, columns in found), scales, keys)
