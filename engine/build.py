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
from trireme.models.config import InputError, ModelConfig
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
    if plan.gpus > 1 and cfg.experts is not None:
        raise InputError("plan: a mixture of experts is trained on one GPU: its load is counted over all layers")
    if cfg.tied and plan.units[0].gpu != plan.units[-1].gpu:
        raise InputError("plan: the embedding and the head share a matrix, and are on two GPUs")
    assert len(lanes.devices) == plan.gpus, "lanes for other GPUs than the plan's"
    geo, others = Geometry.of(cfg, plan), lanes.devices[1:]
    memory = Memory(lanes.device, limits.gpu, limits.host, lanes.simulated, pinned=pinned, others=others)
    if poison:
        memory.poison = lambda slot: _poison(lanes, slot)
    for gpu in range(plan.gpus):
        memory.reserve("gpu", "workspace", workspace(geo, plan, gpu), gpu=gpu)
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
    return inputs_on(cfg, micro_batch, [(tables, device)], load)


def inputs_on(
    cfg: ModelConfig,
    micro_batch: MicroBatch,
    places: Sequence[tuple[Tables, torch.device | str]],
    load: Load | None = None,
) -> Inputs:
    """On several GPUs."""
    pairs, trained = costs.layer_pairs(cfg, micro_batch.lengths), int((micro_batch.labels >= 0).sum())
    packed = tuple(_packed(micro_batch, tables, device, load) for tables, device in places)
    return Inputs(len(micro_batch.labels), trained, pairs, packed)


def _packed(micro_batch: MicroBatch, tables: Tables, device: torch.device | str, load: Load | None) -> Packed:
    labels = torch.from_numpy(micro_batch.labels).long()
    loss_rows = torch.nonzero(labels >= 0)[:, 0]
    tensors = (torch.from_numpy(micro_batch.ids).long(), labels, loss_rows)
    ids, labels, loss_rows = (t.to(device, non_blocking=True) for t in tensors)
    return Packed(ids, labels, loss_rows, make_rows(micro_batch.lengths, tables, device, load))
