"""Puts an engine together from a plan: memory, homes, rings, lanes."""

from __future__ import annotations

import torch

from trireme.engine.activations import ActivationSwap
from trireme.engine.buffers import workspace
from trireme.engine.geometry import Geometry
from trireme.engine.gradients import Gradients
from trireme.engine.homes import Homes
from trireme.engine.lanes import Task
from trireme.engine.memory import Memory, Slot
from trireme.engine.optimizer import AdamW, Optimizer
from trireme.engine.plan import Plan
from trireme.engine.step import Engine, Inputs
from trireme.engine.weights import WeightStream
from trireme.models import shapes
from trireme.models.config import ModelConfig
from trireme.models.rows import make_rows


def build(
    cfg: ModelConfig,
    plan: Plan,
    limits: dict[str, int],
    lanes,
    *,
    adamw: AdamW | None = None,
    store=None,
    scratch=None,
    poison: bool = False,
    pinned: bool = True,
) -> Engine:
    """An engine with every buffer made and nothing in its homes yet: Exchange.load or Homes.load_from_store fills them.

    `limits`: bytes of gpu and host. `poison` fills released slots with NaN (tests). `pinned`: register RAM
    with CUDA, without which copies are several times slower. Raises DoesNotFit.
    """
    geo = Geometry.of(cfg, plan)
    memory = Memory(lanes.device, limits["gpu"], limits["host"], lanes.simulated, pinned=pinned)
    if poison:
        memory.poison = lambda slot: _poison(lanes, slot)
    memory.reserve("gpu", "workspace", workspace(geo, plan))
    homes = Homes(geo, plan, memory, lanes, store)
    rings = homes.rings("gpu", "weight ring"), homes.rings("host", "weight ring")
    weights = WeightStream(geo, plan, homes, lanes, *rings)
    swap = ActivationSwap(geo, plan, homes, lanes, scratch)
    gradients = Gradients(geo, plan, homes, lanes, scratch, swap.scratch_bytes)
    optimizer = Optimizer(geo, plan, homes, weights, gradients, lanes, adamw or AdamW())
    return Engine(geo.cfg, geo, plan, lanes, memory, homes, weights, swap, gradients, optimizer)


def _poison(lanes, slot: Slot) -> Task:
    def fill():
        slot.buffer.fill_(0xFF)  # every float format reads this as NaN
        if slot.buffer.is_cuda:  # the lane has no stream, so nothing else tells the next user when this is over
            torch.cuda.current_stream(slot.buffer.device).synchronize()

    return lanes.run("poison", f"poison {slot.ring.name}", fill, slot.ready)


def inputs(cfg: ModelConfig, micro_batch, tables, device: torch.device) -> Inputs:
    """A data.MicroBatch on the device. `tables` from rope_tables."""
    labels = torch.from_numpy(micro_batch.labels).long()
    loss_rows = torch.nonzero(labels >= 0)[:, 0]
    to = lambda t: t.to(device, non_blocking=True)
    return Inputs(
        ids=to(torch.from_numpy(micro_batch.ids).long()),
        labels=to(labels),
        loss_rows=to(loss_rows),
        rows=make_rows(micro_batch.lengths, tables, device),
        tokens=len(labels),
        trained=len(loss_rows),
        pairs=shapes.attended_pairs(micro_batch.lengths, cfg.window),
    )
