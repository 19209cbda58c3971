"""The shapes of benchmarks: some layers of a published model, with adapters, on a quantized base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trireme.engine.planner.sizes import find_model
from trireme.engine.tuning.chosen import adapted, targets
from trireme.engine.tuning.packed_source import outlined
from trireme.engine.tuning.quantized import quantized
from trireme.models.config import Lora, ModelConfig
from trireme.models.sizes import shapes


def shaped(name: str, layers: int, rank: int, base: str, experts: bool = False) -> ModelConfig:
    """A shape's first `layers` (0: all), frozen matrices in `base` (quantized.BASES; "": as released).

    With `rank` it has adapters on every linear layer, of mixtures on attention; also on routed `experts`.
    """
    cfg = find_model(name)
    if base:
        cfg = replace(cfg, packing=None, packed=())
    if layers:
        cfg = replace(cfg, layers=cfg.layers[:layers])
    if rank:
        modules = (*targets(cfg, ()), *((cfg.names.mlp.experts,) if experts else ()))
        cfg = adapted(cfg, Lora(rank, 2.0 * rank, modules))
    if not base:
        return cfg
    return quantized(cfg, outlined(cfg, Path()), base, {name: name for name in shapes.stored_tensors(cfg)})[0]
