"""A step's predicted time: its own code on simulated lanes (simulate.py)."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from trireme.engine.build import build
from trireme.engine.geometry import ADAM_BYTES, Geometry
from trireme.engine.lanes import Kind, Span, Task, gpu_of, plain
from trireme.engine.plan import Limits, Plan
from trireme.engine.planner.rates import Rates
from trireme.engine.planner.simulate import DRIVE, SimulatedLanes, drive_seconds
from trireme.engine.step import Engine, Inputs, train_step
from trireme.models import costs, shapes
from trireme.models.config import ModelConfig
from trireme.storage.layout import ITEMSIZE

PASSES: dict[Kind, float] = {"finish": 1.9, "zero": 1.3}  # bytes copied for each byte of a task
KERNELS: dict[Kind, int] = {"forward": 12, "backward": 40, "finish": 2, "statistics": 10}  # others: 1
LOSS_KERNELS = 12, 6  # and for each chunk of logits
FEW = 8  # micro-batches simulated apart, at least
APART = 4  # of each of several GPUs
PIECES = 16  # of the largest gradient, `roughly`
HALF = 450  # tokens of a document at half of attention's best: 0.54, 0.70, 0.73 at 1k, 4k, 8k
STEADY, STEPS = 1e-4, 12  # change of a steady state's steps; steps before extrapolation


@dataclass(frozen=True)
class Prediction:
    """A steady state's step. `bound`: the busiest lane.

    `busy`: seconds of compute, h2d, d2h, ssd, cpu, update; of several GPUs the most.
    """

    step_s: float
    busy: dict[str, float]
    bound: str
    ssd_read: int  # bytes
    ssd_written: int
    spans: tuple[Span, ...] = ()  # of the last step; none if `roughly`


@dataclass(frozen=True)
class Batch:
    """A step's micro-batches of `tokens` in documents of `seq_len`."""

    tokens: int
    seq_len: int
    n_micro: int
    trained: float = 1.0  # share of tokens with a label

    @property
    def learned(self) -> int:
        return max(1, round(self.trained * self.tokens))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        whole, rest = divmod(self.tokens, self.seq_len)
        return [self.seq_len] * whole + [rest] * (rest > 0)

    @property
    def total(self) -> int:
        return self.tokens * self.n_micro

    def inputs(self, cfg: ModelConfig) -> list[Inputs]:
        pairs = costs.layer_pairs(cfg, self.lengths)
        return [Inputs(self.tokens, self.learned, pairs)] * self.n_micro


def predict(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, roughly: bool = False) -> Prediction:
    """The steady state of `plan`, which is taken to fit. Raises ValueError where it needs a drive and rates have none.

    Several micro-batches are simulated as one (within 2 %). Only `roughly`: the same where `between` is "host", and
    merged pieces of gradients.
    """
    if plan.uses("ssd") and not (rates.ssd_read and rates.ssd_write):
        raise ValueError("the plan uses a drive and the machine has none")
    cfg = plan.cut(cfg)
    k = together(batch.n_micro, plan.gpus) if roughly or plan.between == "gpu" else 1
    if plan.gpus > 1:
        rates = replace(rates, host=plan.gpus * rates.host)  # one interpreter launches for all
    lanes = SimulatedLanes(durations(cfg, plan, rates, batch, k), rates, plan.gpus)
    if k > 1:
        plan = replace(plan, tokens=k * plan.tokens, n_micro=batch.n_micro // k)
        batch = replace(batch, tokens=k * batch.tokens, n_micro=batch.n_micro // k)
    if roughly:
        plan = replace(plan, piece=max(plan.piece, max(Geometry.of(cfg, plan).numel) // PIECES))
    with _no_collection():
        e = build(cfg, plan, Limits(1 << 60, 1 << 60), lanes)
        seconds = _steady(e, lanes, batch.inputs(cfg))
        found = _prediction(seconds, lanes, () if roughly else tuple(lanes.trace()))
        lanes.close()
    return found


def _steady(e: Engine, lanes: SimulatedLanes, inputs: Sequence[Inputs]) -> float:
    """Seconds of a steady state's step, noted in `lanes`."""
    for step, part in enumerate((inputs[:1], inputs), 1):  # the first makes gradients
        lanes.begin()
        train_step(e, part, step, 0.0)
        seconds = lanes.time()
    lanes.repeat()
    now = [seconds, *lanes.behind()]
    for _ in range(STEPS):
        before, seconds = now, lanes.time()
        now = [seconds, *lanes.behind()]
        grown = [a - b for a, b in zip(now, before, strict=True)]
        if all(abs(more) < STEADY * seconds for more in grown):
            return seconds
    return seconds + max(grown[1:])  # once slots wait for the lane that falls behind


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: it doubles the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def together(n_micro: int, gpus: int = 1) -> int:
    """The largest divisor of `n_micro` that leaves FEW groups, and each GPU some: fewer would fake idle GPUs."""
    few = max(FEW, APART * gpus) if gpus > 1 else FEW
    return max(k for k in range(1, n_micro + 1) if n_micro % k == 0 and (k == 1 or n_micro // k >= few))


def _prediction(seconds: float, lanes: SimulatedLanes, spans: tuple[Span, ...]) -> Prediction:
    busy, moved = dict.fromkeys(("compute", "h2d", "d2h", "ssd", "cpu", "update"), 0.0), {"ssd_read": 0, "ssd_write": 0}
    working = defaultdict[tuple[str, int], float](float)  # seconds by lane and GPU
    for t in lanes.tasks:
        if t.lane in DRIVE:
            moved[DRIVE[t.lane]] += int(t.nbytes)
        else:
            working[plain(t.lane), gpu_of(t.lane)] += t.end - t.start
    for (lane, _), at_work in working.items():
        busy[lane] = max(busy[lane], at_work)
    busy["ssd"] = drive_seconds(moved["ssd_read"], moved["ssd_write"], lanes.rates)  # spans include waits for the drive
    bound = max(busy, key=busy.__getitem__)
    return Prediction(seconds, busy, bound, moved["ssd_read"], moved["ssd_write"], spans)


# ---------------------------------------------------------------- tasks


def durations(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, k: int = 1) -> Callable[[Task], float]:
    """A task's seconds alone, k micro-batches as one."""
    latency, known = rates.latency, unit_seconds(cfg, plan, rates, batch)
    passes: dict[Kind, float] = PASSES | {"finish": PASSES["finish"] / rates.finish}
    speed = {lane: getattr(rates, DRIVE.get(lane, lane)) for lane in ("h2d", "d2h", *DRIVE)}
    speed["cpu"] = ADAM_BYTES * rates.adam * rates.beside

    def duration(task: Task) -> float:
        if (lane := plain(task.lane)) in speed:
            return latency + task.nbytes / speed[lane]
        if (task.kind, task.of) in known:
            return k * known[task.kind, task.of]
        kernels, passed = KERNELS.get(task.kind, 1), passes.get(task.kind, 1.0)
        return _launched(kernels, task.nbytes * passed / rates.copy, rates)

    return duration


def _launched(kernels: float, seconds: float, rates: Rates) -> float:
    return max(seconds + kernels * rates.launch, kernels * rates.host)


def unit_seconds(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch) -> dict[tuple[Kind, str], float]:
    """(kind, unit) -> seconds of forward, backward or loss of a micro-batch."""
    cfg = plan.cut(cfg)
    names, N = shapes.unit_names(cfg), batch.tokens
    pairs = batch.inputs(cfg)[0].pairs
    row = N * ITEMSIZE[plan.dtype]  # bytes of a feature
    attended = costs.attention_flops(cfg, pairs)
    gemm = rates.matmul * rates.gemm
    long = batch.seq_len / (batch.seq_len + HALF)
    forward_attention = attended / (rates.matmul * rates.attention * long)
    backward_attention = 2.5 * attended / (rates.matmul * rates.attention_backward * long)
    # Norms, residuals, rotation, activation: read and written once, in backward twice.
    features = {"attention": 4.5 * cfg.width + 2 * (cfg.q_width + cfg.kv_width)}
    features["mlp"] = 4.5 * cfg.width + (3 if cfg.gated else 2) * costs.hidden_width(cfg)
    features["mlp"] += 2 * shapes.chosen(cfg) * cfg.width if cfg.experts else 0  # rows by expert, and their sum
    features["block"] = features["attention"] + features["mlp"]
    parts = len(shapes.inner_kinds(cfg))  # of a block
    thin = 2 if cfg.lora else 1  # adapters double the kernels

    def launched(kind: Kind, seconds: float) -> float:
        return _launched(thin * KERNELS[kind] / parts, seconds, rates)

    known: dict[tuple[Kind, str], float] = {
        ("forward", names[0]): _launched(1, 2 * row * cfg.width / rates.copy, rates),
        ("backward", names[0]): _launched(4, 7 * row * cfg.width / rates.copy, rates),  # sorts ids, adds in place
        ("loss", names[-1]): _loss_seconds(cfg, rates, batch.learned, ITEMSIZE[plan.dtype], gemm) / rates.loss,
    }
    # Gradients are read and written each micro-batch, in fp32 if several.
    wide = 8 if batch.n_micro > 1 else 2 * ITEMSIZE[plan.dtype]
    trained = Geometry.of(cfg, plan).numel
    for u in range(1, cfg.n_units - 1):
        kind = shapes.kind(cfg, u)
        kept = frozenset(name for name, _ in plan.units[u].saved)
        missing = shapes.saved_shapes(cfg, 1, kind).keys() - kept
        attends, again = kind != "mlp", bool(missing & {"attn_out", "lse"})
        once = costs.forward_flops(cfg, u, N, pairs) - attends * attended
        back = costs.backward_flops(cfg, u, N, pairs) - attends * (attended * 5 // 2)
        up, down = (row * n / rates.copy for n in _beside(cfg, u))
        rebuilt = costs.recompute_flops(cfg, kept, N, pairs, kind) - again * attended
        small = row * features[kind] / rates.copy
        summed = wide * trained[u] / rates.copy
        forward = once / gemm + attends * forward_attention + small + up
        backward = (
            (back + rebuilt) / gemm
            + attends * backward_attention
            + again * forward_attention
            + small * (3 if missing else 2)
            + summed
            + down
            + up * rebuilt / once
        )
        known["forward", names[u]] = launched("forward", forward) / rates.forward
        known["backward", names[u]] = launched("backward", backward) / rates.backward
    return known


def _beside(cfg: ModelConfig, u: int) -> tuple[int, int]:
    """Features of a token that adapters read and write, in forward and backward: products too thin for their FLOPs."""
    tensors = [group for part in shapes.trained_parts(cfg, u) for group in part if ".lora_" in group[0][0]]
    ins = sum(group[0][1][1] for group in tensors if group[0][0].endswith("lora_A.weight"))
    outs = sum(shape[0] for group in tensors for name, shape in group if name.endswith("lora_B.weight"))
    return ins + 2 * outs, 4 * ins + 3 * outs


def _loss_seconds(cfg: ModelConfig, rates: Rates, tokens: int, itemsize: int, gemm: float) -> float:
    """Five passes over the logits, two over a trained weight's fp32 gradient each chunk."""
    chunks, head = -(-tokens // costs.LOSS_CHUNK), cfg.n_units - 1
    once, back = (count(cfg, head, tokens, 0) for count in (costs.forward_flops, costs.backward_flops))
    moved = 5 * tokens * itemsize * cfg.vocab + 8 * chunks * cfg.vocab * cfg.width * (back > once)
    seconds = (once + back) / gemm + moved / rates.copy
    return _launched(LOSS_KERNELS[0] + LOSS_KERNELS[1] * chunks, seconds, rates)
