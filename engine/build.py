"""Assembly of an engine from a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from trireme.engine.activations import ActivationSwap
from trireme.engine.buffers import workspace
from trireme.engine.geometry import Geometry
from trireme.engine.gradients import Gradients
from trireme.engine.homes import BaseFiles, Homes, Scratch, Store
from trireme.engine.lanes import Lanes, Task
from trireme.engine.memory import Memory, Slot
from trireme.engine.optimizer import Optimizer
from trireme.engine.plan import Limits, Plan
from trireme.engine.step import Engine, Inputs, Packed
from trireme.engine.updates import AdamW
from trireme.engine.weights import UnitStream
from trireme.models import costs
from trireme.models.config import ModelConfig
from trireme.models.rows import Load, Tables, make_rows


def build(
    cfg: ModelConfig,
    plan: Plan,
    limits: Limits,
    lanes: Lanes,
    *,
    adamw: AdamW | None = None,
    store: Store | None = None,
    scratch: Scratch | None = None,
    files: BaseFiles | None = None,
    poison: bool = False,
    pinned: bool = True,
) -> Engine:
    """Makes all buffers; Exchange.load or Homes.load_from_store fills them. Raises DoesNotFit.

    `poison`: NaN in released slots (tests). `pinned`: register RAM with CUDA, for copies several times faster.
    """
    geo = Geometry.of(cfg, plan)
    memory = Memory(lanes.device, limits.gpu, limits.host, lanes.simulated, pinned=pinned)
    if poison:
        memory.poison = lambda slot: _poison(lanes, slot)
    memory.reserve("gpu", "workspace", workspace(geo, plan))
    homes = Homes(geo, plan, memory, lanes, store, scratch, files)
    weights = UnitStream(geo, plan, homes, lanes)
    swap = ActivationSwap(geo, plan, homes, lanes, scratch, homes.base_bytes)
    gradients = Gradients(geo, plan, homes, lanes, scratch, homes.base_bytes + swap.scratch_bytes)
    optimizer = Optimizer(homes, weights.trained, gradients, lanes, adamw or AdamW())
    return Engine(geo.cfg, geo, plan, lanes, memory, homes, weights, swap, gradients, optimizer)


def _poison(lanes: Lanes, slot: Slot) -> Task:
    def fill() -> None:
        slot.buffer.fill_(0xFF)  # NaN in every float format
        if slot.buffer.is_cuda:  # no stream orders the next user
            torch.cuda.current_stream(slot.buffer.device).synchronize()

    return lanes.run("poison", "other", f"poison {slot.ring.name}", fill, slot.ready)


class MicroBatch(Protocol):
    @property
    def ids(self) -> np.ndarray: ...  # (N,)

    @property
    def labels(self) -> np.ndarray: ...  # (N,): next tokens, -100 for none

    @property
    def lengths(self) -> Sequence[int]: ...  # of documents


def inputs(
    cfg: ModelConfig,
    micro_batch: MicroBatch,
    tables: Tables,
    device: torch.device | str,
    load: Load | None = None,
) -> Inputs:
    """On the device; `tables` from rope_tables, in training `load` from make_load."""
    labels = torch.from_numpy(micro_batch.labels).long()
    loss_rows = torch.nonzero(labels >= 0)[:, 0]
    tensors = (torch.from_numpy(micro_batch.ids).long(), labels, loss_rows)
    ids, labels, loss_rows = (t.to(device, non_blocking=True) for t in tensors)
    packed = Packed(ids, labels, loss_rows, make_rows(micro_batch.lengths, tables, device, load))
    pairs = costs.layer_pairs(cfg, micro_batch.lengths)
    return Inputs(len(labels), len(loss_rows), pairs, packed)
