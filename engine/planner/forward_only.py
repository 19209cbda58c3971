"""The plan of passes without gradients: evaluation, sampling, a teacher. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from trireme.engine.buffers import fits
from trireme.engine.geometry import Geometry, geometry
from trireme.engine.plan import Limits, Plan, UnitPlan
from trireme.engine.planner.rule import BetweenTier, all_cuts, base_to_gpu, fill_ram, refusal, wider_window
from trireme.models.config import ModelConfig


def forward_plan(
    cfg: ModelConfig, limits: Limits, sizes: Sequence[tuple[int, int]], dtype: str = "BF16", gpus: int = 1
) -> Plan:
    """The plan with as many weights on the GPU as fit, then in RAM; the others are read from the SSD in each pass.

    `cfg`: with `trains` False. `sizes`: (tokens of a micro-batch, micro-batches of a pass), the largest first. If all
    weights fit on the GPU with the last of them, that is taken: more micro-batches would only share copies. Several
    GPUs pass activations through RAM. Raises DoesNotFit.
    """
    assert not cfg.trains, "the plan has no gradients"
    refused = list[tuple[Geometry, Plan]]()
    for cut in all_cuts(cfg, gpus == 1):
        geo = geometry(replace(cfg, **cut._asdict()), dtype, 32)
        for plan in _lowest(geo, sizes, gpus):
            everything = replace(plan.changed(range(geo.n_units), base="gpu"), n_micro=sizes[-1][1])
            if fits(geo, everything, limits):
                return everything
            if fits(geo, plan, limits):
                return _filled(geo, plan, limits)
            refused.append((geo, plan))
    raise refusal(refused, limits)


def _lowest(geo: Geometry, sizes: Sequence[tuple[int, int]], gpus: int) -> Iterable[Plan]:
    """Plans with all frozen weights on the SSD, those with the largest buffers first. Adapters stay on their GPU."""
    unit = UnitPlan(base="ssd" if any(layout.tensors for layout in geo.base) else "gpu")
    betweens: tuple[BetweenTier, ...] = ("gpu", "ram") if gpus == 1 else ("ram",)
    betweens = ("gpu",) if geo.slices else betweens
    for between, (window, ram_window), (tokens, n_micro) in product(betweens, ((2, 2), (1, 2), (1, 1)), sizes):
        plan = Plan(
            (unit,) * geo.n_units, tokens, n_micro, geo.dtype, window=window, ram_window=ram_window, between=between,
            halves=geo.cfg.halves, at_once=geo.cfg.at_once, slices=geo.cfg.slices,
        )  # fmt: skip
        yield plan.on_gpus(gpus, geo.cfg.tied)


def _filled(geo: Geometry, plan: Plan, limits: Limits) -> Plan:
    """Moves frozen weights to RAM and to the GPU as far as they fit, then makes the window larger."""
    plan = base_to_gpu(geo, fill_ram(geo, plan, limits), limits)
    return wider_window(geo, fill_ram(geo, plan, limits), limits)
