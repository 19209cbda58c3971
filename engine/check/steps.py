"""Steps of a small model with random weights, compared with their estimates: in GPU memory, from RAM, from the SSD."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch

from trireme.engine.between import writing
from trireme.engine.build import Engine, build, make_inputs
from trireme.engine.check.row import Row
from trireme.engine.memory import DTYPE, views
from trireme.engine.placement import Entry, Placement
from trireme.engine.plan import DoesNotFit, Limits, Plan
from trireme.engine.planner.predict import Batch, predict
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.rule import TierChoice as Where
from trireme.engine.planner.rule import Wanted, simple_plan
from trireme.engine.planner.sizes import find_model
from trireme.engine.queues.real import RealQueues
from trireme.engine.step import train_step
from trireme.engine.updates import AdamW
from trireme.kernels.fp8.reference import Quantized, quantize
from trireme.models.config import ModelConfig
from trireme.models.losses.micro_batch import MicroBatch
from trireme.models.rows import rope_tables
from trireme.models.sizes.narrow import ROWS, SCALE
from trireme.storage.devices import open_device
from trireme.storage.store import Store
from trireme.storage.temporary import HIDDEN, Temporary

OFF = 0.25  # of a step's estimate: a larger difference is reported
WARM, TIMED = 3, 3  # steps; the first compile and fill
MODEL = {True: ("llama-0.4b", 16384, 4), False: ("llama-tiny", 128, 2)}  # on a GPU: tokens of a micro-batch, of a step
PLACES: dict[bool, dict[str, Where]] = {
    True: {"in GPU memory": "gpu", "from RAM": "ram", "from the SSD": "ssd"},
    False: {"in RAM": "gpu", "from the SSD": "ssd"},
}


def steps(device: torch.device, limits: Limits, rates: Rates, folder: Path | None, end: float) -> Iterator[Row]:
    """Yields rows of a step with its state in each memory, as long as it starts before `end` (time.monotonic).

    `folder`: on a drive; nothing is left in it.
    """
    cuda = device.type == "cuda"
    name, tokens, n_micro = MODEL[cuda]
    cfg = find_model(name)
    for place, placement in PLACES[cuda].items():
        label, dtype, seq, store = f"{name}, {place}", "BF16" if cuda else "F32", tokens // 8, placement == "ssd"
        wanted = Wanted(((tokens, n_micro),), dtype, record=1 << 22, placement=placement, on_cuda=cuda, document=seq)
        reason = "no drive was tried" if store and folder is None else "out of time" if time.monotonic() > end else ""
        try:
            plan = simple_plan(cfg, limits, wanted)
        except DoesNotFit as error:
            reason = reason or str(error).split(". ")[0]
        if reason:
            yield Row("step", label, f"not tried: {reason}")
            continue
        estimate = predict(cfg, plan, rates, Batch(tokens, seq, n_micro)).step_s
        with random_engine(cfg, plan, limits, RealQueues(device), folder if store else None) as e:
            seconds = _timed(e, seq)
        del e
        gc.collect()  # frees the engine's buffers
        yield compared(label, seconds, estimate, cuda)


def compared(name: str, seconds: float, estimate: float, cuda: bool) -> Row:
    """A step and its estimate. On a CPU estimates leave out too much to be judged."""
    deviation = seconds / estimate - 1
    result = f"{seconds:.3f} s, estimated {estimate:.3f} s ({100 * deviation:+.0f} %)"
    wrong = "a run corrects its estimate in the second step" if deviation > OFF and cuda else ""
    return Row("step", name, result, wrong, {"seconds": seconds, "estimate": estimate})


def _timed(e: Engine, seq: int) -> float:
    """The median seconds of steps after the first."""
    places = [(rope_tables(e.cfg, seq, gpu), gpu) for gpu in e.queues.devices]
    times = []
    for step in range(1, WARM + TIMED + 1):
        batch = make_batch(e.cfg, e.plan.tokens * e.plan.n_micro, seq, e.plan.tokens // seq, step)
        start = time.perf_counter()
        train_step(e, [make_inputs(e.cfg, mb, places) for mb in batch], step, 1e-5)
        times.append(time.perf_counter() - start)
    e.optimizer.flush()
    e.queues.drain()
    return statistics.median(times[WARM:])


@contextmanager
def random_engine(
    cfg: ModelConfig,
    plan: Plan,
    limits: Limits,
    queues: RealQueues,
    folder: Path | None,
    max_grad_norm: float = 1.0,
    pinned: bool = True,
) -> Iterator[Engine]:
    """A context with an engine that has random weights, and its store in `folder` meanwhile. Closes `queues`."""
    with ExitStack() as stack:
        stack.callback(queues.close)
        store = None
        if folder is not None:
            store = Store.create([open_device(stack.enter_context(Temporary(HIDDEN, folder)), say=lambda _: None)])
            stack.callback(store.close)
        e = build(cfg, plan, limits, queues, adamw=AdamW(max_grad_norm=max_grad_norm), store=store, pinned=pinned)
        stack.callback(e.close)
        if store is not None:
            for shard in e.placement.shards():
                if e.placement.tier(shard.entry) == "ssd":
                    store.add(shard.name, shard.layout)
            e.placement.scratch.claim(store.devices)
        random_state(e.placement)
        yield e


def random_state(placement: Placement) -> None:
    """Stores random weights, and moments of zero."""
    tile = (torch.randn(1 << 24) * 0.02).to(DTYPE[placement.geo.dtype])
    packed = cache(lambda: torch.randint(256, (1 << 24,), dtype=torch.uint8))
    coded = cache(lambda: quantize(tile.view(1 << 12, -1)))
    for u in range(placement.geo.n_units):
        for entry in (Entry("weights", u), *(Entry("base", v) for v in (u, *placement.geo.slices_of[u]))):
            if placement.layout(entry).tensors:
                _fill(placement, entry, tile, packed, coded)
        for r in range(len(placement.state[u])):
            with writing(placement, Entry("state", u, r)) as buffer:
                buffer.zero_()


def _fill(
    placement: Placement,
    entry: Entry,
    tile: torch.Tensor,
    packed: Callable[[], torch.Tensor],
    coded: Callable[[], Quantized],
) -> None:
    layout, offset, packing = placement.layout(entry), 0, placement.geo.cfg.packing
    with writing(placement, entry) as buffer:
        for name, tensor in views(layout, buffer).items():
            part = packing.part_of(name) if packing else None
            if name.endswith(SCALE):
                tensor.copy_(coded().scale)
            elif name.endswith(ROWS):
                rows = coded().rows
                assert rows is not None
                offset = _repeat(rows.view(torch.uint8).view(-1), tensor.view(torch.uint8).view(-1), offset)
            elif packing and part is packing.parts[1]:  # values of MXFP4 are about 3; times 2^-7 they are as the tile's
                tensor.fill_(120 if tensor.dtype == torch.uint8 else 0.02)
            elif part and tensor.dtype == torch.uint8:
                offset = _repeat(packed(), tensor.view(-1), offset)
            elif tensor.dim() == 1:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                offset = _repeat(tile, tensor.view(-1), offset)


def _repeat(tile: torch.Tensor, out: torch.Tensor, offset: int) -> int:
    """Fills `out` with the tile, repeated from its element `offset` on; returns the next element."""
    while len(out):
        part = tile[offset : offset + len(out)]
        out[: len(part)].copy_(part)
        out, offset = out[len(part) :], (offset + len(part)) % len(tile)
    return offset


def make_batch(
    cfg: ModelConfig, tokens: int, seq: int, micro: int, seed: int, text: bytes | None = None
) -> list[MicroBatch]:
    """`tokens` tokens in sequences of `seq`, `micro` of them a micro-batch: bytes of a text, or random ids."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(tokens // seq):
        if text:
            start = random.integers(0, len(text) - seq)
            rows.append(np.frombuffer(text[start : start + seq], np.uint8).astype(np.int32))
        else:
            rows.append(random.integers(0, cfg.vocab, seq).astype(np.int32))
    batch = []
    for k in range(0, len(rows), micro):
        part = rows[k : k + micro]
        labels = [np.append(row[1:], np.int32(-100)) for row in part]
        batch.append(MicroBatch(np.concatenate(part), np.concatenate(labels), (seq,) * len(part)))
    return batch
