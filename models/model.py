"""The model as numbered units: embedding, blocks or sub-layers, head. Their weights by name, forward and backward.

Unit 0 is the embedding, unit cfg.n_units - 1 the head. shapes.kind says what each unit is. Legend: shapes.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trireme.kernels import ops
from trireme.models import block, head
from trireme.models.config import ModelConfig
from trireme.models.families.names import adapter_names
from trireme.models.linear import fuse
from trireme.models.lora import dropping
from trireme.models.mlps.experts import Passed
from trireme.models.packed import decode
from trireme.models.reader import EMPTY, Reader
from trireme.models.rounded import decode_sum
from trireme.models.rows import Pass, Rows
from trireme.models.sizes import narrow, shapes


def forward(
    cfg: ModelConfig,
    u: int,
    w: block.LayerWeights,
    x: Tensor,
    rows: Rows,
    saved: dict[str, Tensor],
    out: Tensor,
    mixing: block.Mixing = (),
    passed: Passed | None = None,
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
    w: block.LayerWeights,
    g: block.LayerWeights,
    x: Tensor,
    saved: dict[str, Tensor],
    dy: Tensor,
    rows: Rows,
    dx: Tensor,
    passed: Passed | None = None,
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


def weights(cfg: ModelConfig, u: int, views: dict[str, Tensor], part: range | None = None) -> Any:
    """EmbedWeights, HeadWeights or LayerWeights of unit u, or its gradients, over `views`, name -> tensor.

    Tensors of a group (shapes.weight_groups) must be neighbours in memory. `part`: the experts of a slice, where the
    unit has `slices` (narrow.py).
    """
    if u == 0:
        return head.embed_weights(cfg, views)
    if u == cfg.n_units - 1:
        return head.head_weights(cfg, views)
    i, layer = cfg.units[u - 1]
    w = block.weights(Reader(cfg, layer, cfg.names.prefix(i), views))
    return w if part is None else block.slice_weights(w, layer, part)


def make_codes(cfg: ModelConfig, u: int, views: dict[str, Tensor], out: dict[str, Tensor], backward: bool) -> None:
    """Fills `out`, views of narrow.derived_groups, before a pass over unit u: decoded matrices, and codes for fp8.

    `views` are the unit's stored tensors; `backward` says which pass, and so in which orders codes are read.
    """
    packed = [name for group in narrow.packed_groups(cfg, u) for name, _ in group]
    for name in (name for name in packed if name in out):
        assert cfg.packing is not None
        packing = cfg.packing.of(name)
        parts = [views[name + part.suffix] for part in packing.parts]
        if cfg.lora is not None and cfg.lora.aware and (lora := _adapters(cfg, name, views)):
            decode_sum(packing, parts, *lora[:2], cfg.lora.scale_of(name.removesuffix(".weight")), out[name], lora[2])
        else:
            decode(packing, parts, out[name])
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


def _adapters(cfg: ModelConfig, name: str, views: dict[str, Tensor]) -> tuple[Tensor, Tensor, bool] | None:
    """(A (E, R, in), B (E, R, out) of a matrix or those of experts, whether it is (out, in)); None: it has none."""
    a, b = map(views.get, adapter_names(name.removesuffix(".weight")))
    if a is None or b is None or cfg.lora is None:
        return None
    if not shapes.adapts_experts(f"{name}.lora_"):
        return a[None], b.T[None], not cfg.names.in_out
    by_expert = lambda t: t.view(-1, cfg.lora.rank, t.shape[1])
    return by_expert(a), by_expert(b), not cfg.names.mlp.experts_in_out
