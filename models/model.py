"""The model as numbered units: embedding, blocks or sub-layers, head. Their weights by name, forward and backward.

Unit 0 is the embedding, unit cfg.n_units - 1 the head. shapes.kind says what each unit is. Legend: shapes.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models import attention, block, experts, head, latent, mlp, shared
from trireme.models.config import ModelConfig
from trireme.models.families.names import adapter_names
from trireme.models.linear import Codes, Linear, fuse, trained
from trireme.models.lora import Adapters, Stacked, dropping, part_key
from trireme.models.mixers import both, scan
from trireme.models.norm import Norm
from trireme.models.packed import Sliced, Stack, decode
from trireme.models.rows import Pass, Rows
from trireme.models.sizes import narrow, shapes

EMPTY = torch.empty(0, 0)  # a frozen tensor's gradient; a matrix that is there as codes alone

BlockWeights = block.Weights | block.Mixer | mlp.Weights | experts.Weights


def forward(
    cfg: ModelConfig,
    u: int,
    w: BlockWeights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    mixing: block.Mixing | None = None,
    passed: experts.Passed | None = None,
) -> None:
    """Forward of unit u, a block or sub-layer: fills out (N, D) and every tensor of `saved`, given x (N, D).

    `mixing`: what a mixer calls in generation, with a cache. `passed`: of units that are slices of experts
    (experts.py); one that does not end its layer fills it instead of out.
    """
    p = _pass(cfg, u, rows, saved)
    w = dropping(w, p.rows.dropout)
    if isinstance(w, block.Weights):
        block.forward(p, w, x, out, mixing)
    elif isinstance(w, block.Mixer):
        block.mixer(w).forward(p, w, x, out, mixing)
    else:
        block.mlp_forward(p, w, x, out, passed)


def backward(
    cfg: ModelConfig,
    u: int,
    w: BlockWeights,
    g: BlockWeights,
    x: Tensor,
    saved: dict[str, Tensor],
    dy: Tensor,
    rows: Rows,
    dx: Tensor,
    passed: experts.Passed | None = None,
) -> None:
    """Backward of unit u, a block or sub-layer: fills dx (N, D), adds to g, given dy (N, D). `passed` as in forward."""
    p = _pass(cfg, u, rows, saved)
    w = dropping(w, p.rows.dropout)
    if isinstance(w, block.Weights) and isinstance(g, block.Weights):
        block.backward(p, w, g, x, dy, dx)
    elif isinstance(w, block.Mixer) and isinstance(g, block.Mixer):
        block.mixer(w).backward(p, w, g, x, dy, dx)
    else:
        assert not isinstance(w, block.Weights | block.Mixer)
        assert not isinstance(g, block.Weights | block.Mixer)
        block.mlp_backward(p, w, g, x, dy, dx, passed)


def _pass(cfg: ModelConfig, u: int, rows: Rows, saved: dict[str, Tensor]) -> Pass:
    layer = shapes.layer(cfg, u)
    return Pass(cfg.at(layer), layer, rows.in_layer(layer), saved)


def gradients(cfg: ModelConfig, u: int, views: dict[str, Tensor]) -> Any:
    """The gradients of unit u, in the type of `weights`, over views of its trained tensors; empty where frozen."""
    return weights(cfg, u, {name: EMPTY for group in shapes.frozen_groups(cfg, u) for name, _ in group} | views)


def weights(cfg: ModelConfig, u: int, views: dict[str, Tensor], own: range | None = None) -> Any:
    """EmbedWeights, HeadWeights or BlockWeights of unit u, or its gradients, over `views`, name -> tensor.

    Tensors of a group (shapes.weight_groups) must be neighbours in memory. `own`: the experts of a slice, where the
    unit has `slices` (narrow.py).
    """
    layer = shapes.layer(cfg, u)
    cfg, what = shapes.seen(cfg, shapes.kind(cfg, u))
    if what == "embed":
        return head.embed_weights(cfg, views)
    if what == "head":
        return head.head_weights(cfg, views)
    prefix = cfg.names.prefix(layer)
    mine = {name.removeprefix(prefix): view for name, view in views.items()}
    if cfg.lora and cfg.lora.scales:
        cfg = replace(cfg, lora=cfg.lora.within(prefix))
    mixer = _scan_weights if cfg.scanning else _both_weights if cfg.both else _attention_weights
    if what == "attention":
        return mixer(cfg, mine)
    if what == "mlp":
        found = _mlp_weights(cfg, mine)
        if own is not None:
            assert isinstance(found, experts.Weights)
            assert cfg.experts is not None
            return found._replace(part=experts.Slice(own.start, own.stop, cfg.experts.count))
        return found
    return block.Weights(mixer(cfg, mine), _mlp_weights(cfg, mine))


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


def _attention_weights(cfg: ModelConfig, views: dict[str, Tensor]) -> attention.Weights:
    names = cfg.names
    norm, post, q_norm, k_norm = (
        _norm(cfg, name, views) for name in (names.norm1, names.post1, names.q_norm, names.k_norm)
    )
    qkv, o = _linear(cfg, names.qkv, views), _linear(cfg, (names.o,), views)
    if cfg.latent is not None:
        assert k_norm is not None
        q_b = _linear(cfg, (names.q_b,), views) if names.q_b else None
        inner = latent.Weights(k_norm, _linear(cfg, (names.kv_b,), views), q_norm, q_b)
        return attention.Weights(norm, qkv, o, post, latent=inner)
    return attention.Weights(norm, qkv, o, post, q_norm, k_norm, views.get(names.sinks))


def _both_weights(cfg: ModelConfig, views: dict[str, Tensor]) -> both.Weights:
    return both.Weights(_attention_weights(cfg, views), _scan_weights(cfg.scanned, views))


def _scan_weights(cfg: ModelConfig, views: dict[str, Tensor]) -> scan.Weights:
    names = cfg.names
    mixed, o = _linear(cfg, names.mixed, views), _linear(cfg, (names.mixed_o,), views)
    conv, gated = views[f"{names.conv}.weight"], views.get(f"{names.mixed_norm}.weight")
    return scan.Weights(
        _norm(cfg, names.norm1, views), mixed, o, conv, views[names.decay], views[names.step], gated,
        views.get(f"{names.conv}.bias"), views.get(names.skip),
    )  # fmt: skip


def _mlp_weights(cfg: ModelConfig, views: dict[str, Tensor]) -> mlp.Weights | experts.Weights:
    names = cfg.names
    if cfg.experts:
        norm, router = _norm(cfg, names.norm2, views), _linear(cfg, (names.router,), views)
        of_shared = _shared_weights(cfg, views) if cfg.experts.shared else None
        up, up_bias = _stack(cfg, f"{names.experts}.{shapes.GATE_UP}", views)
        down, down_bias = _stack(cfg, f"{names.experts}.{shapes.DOWN}", views)
        of_up, of_down = (_stacked(cfg, f"{names.experts}.{matrix}", views) for matrix in (shapes.GATE_UP, shapes.DOWN))
        correction = views.get(names.correction)
        weights = experts.Weights(norm, router, up, down, of_shared, up_bias, down_bias, correction, of_up, of_down)
        if not cfg.experts.latent:
            return weights
        inner, outer = (_linear(cfg, (name,), views) for name in (names.latent_in, names.latent_out))
        return weights._replace(latent_in=inner, latent_out=outer)
    first, second = _linear(cfg, names.up, views), _linear(cfg, (names.down,), views)
    norm, post = _norm(cfg, names.norm2, views), _norm(cfg, names.post2, views)
    if cfg.gated or cfg.relu2:
        return mlp.Weights(norm, first, second, post)
    return mlp.Weights(norm, first._replace(bias=None), second, post, gelu_bias=first.bias)


def _stack(cfg: ModelConfig, name: str, views: dict[str, Tensor]) -> tuple[Stack, Tensor | None]:
    """(matrices (E, in, out), biases (E, out)) of a layer's experts."""
    assert cfg.experts is not None
    bias = views.get(f"{name}_bias")
    if bias is not None and trained(bias):
        bias = bias.view(cfg.experts.count, -1)
    if name in views:
        return views[name] if cfg.names.experts_in_out else views[name].mT, bias
    assert cfg.packing is not None
    shape = shapes.expert_shape(cfg, name.rpartition(".")[2])
    parts = tuple(views[name + part.suffix] for part in cfg.packing.parts)
    return Sliced(cfg.packing, parts, shape, not cfg.names.experts_in_out, narrow.at_once(cfg)), bias


def _stacked(cfg: ModelConfig, name: str, views: dict[str, Tensor]) -> Stacked | None:
    a, b = (views.get(part) for part in adapter_names(name))
    if a is None or b is None or cfg.lora is None:
        return None
    rank = cfg.lora.rank
    by_expert = lambda t: t.view(-1, rank, t.shape[1])
    return Stacked(by_expert(a), by_expert(b), cfg.lora.scale_of(name))


def _shared_weights(cfg: ModelConfig, views: dict[str, Tensor]) -> shared.Weights:
    up, down = (_linear(cfg, names, views) for names in (cfg.names.up, (cfg.names.down,)))
    return shared.Weights(up, down, views.get(f"{cfg.names.shared_gate}.weight"))


def _norm(cfg: ModelConfig, name: str, views: dict[str, Tensor]) -> Norm | None:
    if f"{name}.weight" not in views:
        return None
    return Norm(views[f"{name}.weight"], views.get(f"{name}.bias"), cfg.family.add_one)


def _linear(cfg: ModelConfig, names: tuple[str, ...], views: dict[str, Tensor]) -> Linear:
    codes = _codes(cfg, f"{names[0]}.weight", views)
    weight = EMPTY if f"{names[0]}.weight" not in views else fuse(*(views[f"{name}.weight"] for name in names))
    bias = fuse(*(views[f"{name}.bias"] for name in names)) if f"{names[0]}.bias" in views else None
    fp8 = codes is not None or (names != (cfg.names.router,) and narrow.in_fp8(cfg, *weight.shape))
    return Linear(weight if cfg.names.in_out else weight.T, bias, _adapters(cfg, names, views), fp8, codes)


def _codes(cfg: ModelConfig, name: str, views: dict[str, Tensor]) -> Codes | None:
    if name + narrow.SCALE not in views:
        return None
    rows, columns, scale = views[name + narrow.ROWS], views[name + narrow.COLUMNS], views[name + narrow.SCALE][:1]
    return Codes(columns, rows, scale) if cfg.names.in_out else Codes(rows, columns, scale)


def _adapters(cfg: ModelConfig, names: tuple[str, ...], views: dict[str, Tensor]) -> Adapters | None:
    features = shapes.features(cfg, names)
    ends = list(accumulate(features))
    found = [(name, *adapter_names(name), (end - n, end)) for name, n, end in zip(names, features, ends, strict=True)]
    found = [(name, a, b, columns) for name, a, b, columns in found if a in views]
    if cfg.lora is None or not found:
        return None
    a = fuse(*(views[a] for _, a, _, _ in found))
    b = tuple(views[b] for _, _, b, _ in found)
    scales, keys = tuple(cfg.lora.scale_of(name) for name, *_ in found), tuple(part_key(name) for name, *_ in found)
    return Adapters(a, b, tuple(columns for *_, columns in found), scales, keys)
