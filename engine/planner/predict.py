"""Estimates the time of a step: runs the step's own code on simulated queues (simulate.py).

The duration of a task is computed from its bytes and FLOPs and from the machine's rates (rates.py).
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from trireme.engine.build import Engine, Inputs, build
from trireme.engine.geometry import ADAM_BYTES, Geometry
from trireme.engine.plan import Limits, Plan
from trireme.engine.planner.rates import ATTENTION, Rates
from trireme.engine.planner.simulate import DRIVE, SimulatedQueues, SimulatedTask, drive_seconds, is_copy
from trireme.engine.queues.names import NET, PEERS, WRITES, gpu_of, plain
from trireme.engine.queues.task import Kind, Task
from trireme.engine.step import evaluate, train_step
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, measure, shapes
from trireme.models.sizes.measure import Work
from trireme.storage.layout import ITEMSIZE

PASSES: dict[Kind, float] = {"finish": 1.9, "zero": 1.3, "decode": 1.3}  # bytes copied for each byte of a task
KERNELS: dict[Kind, int] = {"finish": 8, "statistics": 10}  # of a block; others: 1
LOSS_FORWARD = 1 / 3  # share of forward in the loss's three matrix multiplications
FP8_LAYERS = 4  # linear layers of a block; for each, two kernels quantize a matrix
# Each other GPU's thread delays the launch of a kernel by this multiple of `Rates.launch_overhead`. Fitted: 1.1 to 2.3
# in steps of 3B to 30B on two and four H100s.
CONTENTION = 1.6
# Time of the interpreter in a block between its kernels, in units of Rates.task: 0.2 and 0.43 ms where a task takes 47
# us
WITHIN: dict[Kind, int] = {"forward": 4, "backward": 9}
MICRO: tuple[Kind, ...] = ("forward", "backward", "loss")  # tasks of each micro-batch
MIN_GROUPS, ROUGH_GROUPS = 8, 4  # groups of micro-batches that are simulated, at least; in a rough simulation
MIN_PER_GPU = 4  # the same for each of several GPUs
PIECES = 16  # pieces of the largest gradient in a rough simulation, at most
HALF = 450  # tokens of a document with half of attention's best rate: shares are 0.54, 0.70, 0.73 at 1k, 4k, 8k
CACHED = 1024  # predictions
STEADY, STEPS = 1e-4, 12  # relative change of steps in a steady state; steps that are simulated to reach it, at most


@dataclass(frozen=True)
class Prediction:
    """The estimate of a step in the steady state. `bound`: the busiest resource.

    `busy`: seconds for which each resource works: compute, h2d, d2h, ssd, cpu, update, with several hosts net, with
    several GPUs peer and the maximum over GPUs; dram: the seconds of all copies at the rate of RAM.
    """

    step_s: float  # seconds
    busy: dict[str, float]
    bound: str
    ssd_read: int  # bytes
    ssd_written: int
    swapped: int = 0  # of ssd_written, bytes of activations
    spans: tuple[Task, ...] = ()  # of the last step; none if `roughly`


@dataclass(frozen=True)
class Batch:
    """The micro-batches of a step: each has `tokens` in documents of `seq_len`."""

    tokens: int
    seq_len: int
    n_micro: int
    trained: float = 1.0  # share of tokens with a label
    compared: bool = False  # a loss that compares documents: the head's forward runs once more, for all micro-batches

    @property
    def learned(self) -> int:
        return max(1, round(self.trained * self.tokens))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return lengths_of(self.tokens, self.seq_len)

    def pairs(self, cfg: ModelConfig, u: int) -> int:
        """(query, key) pairs of a micro-batch in the attention of unit u: the mean of units like it."""
        kinds = shapes.representatives(cfg)
        layers = [unit for v, (_, unit) in enumerate(cfg.units, 1) if kinds[v] == kinds[u]]
        return costs.layer_pairs(layers, self.lengths) if layers else 0

    def inputs(self, cfg: ModelConfig) -> list[Inputs]:
        return [Inputs(self.tokens, self.learned, costs.layer_pairs(cfg.layers, self.lengths))] * self.n_micro


def lengths_of(tokens: int, length: int) -> list[int]:
    """The lengths of documents of `length` tokens, of which the last is cut."""
    count, remainder = divmod(tokens, length)
    return [length] * count + [remainder] * (remainder > 0)


def predict(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, roughly: bool = False) -> Prediction:
    """The estimate of `plan` in the steady state. Whether it fits is not checked. Raises ValueError if the plan uses
    the SSD and the rates have no drive.

    Several micro-batches are simulated as one, which changes the result by at most 2 %. With `roughly` also those of
    several GPUs and of outputs that are stored outside the GPU, and gradients have fewer pieces. Rough results are
    cached, since searches ask for the same plans.
    """
    return (_cached if roughly else _predict)(cfg, plan, rates, batch, roughly)


def _predict(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, roughly: bool) -> Prediction:
    with _engine(cfg, plan, rates, batch, roughly) as (e, queues, inputs):
        seconds = _steady(e, queues, inputs)
        if plan.hosts > 1:
            seconds += _lag(plan, unit_seconds(cfg, plan, rates, batch), e.geo, rates)
        return _prediction(seconds, queues, () if roughly else tuple(queues.trace()))


_cached = lru_cache(CACHED)(_predict)


def predict_evaluation(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch) -> Prediction:
    """The estimate of an evaluation of `batch` between steps, when no update is pending. Raises as `predict`."""
    with _engine(cfg, plan, rates, batch) as (e, queues, inputs):
        train = queues.duration
        queues.duration = lambda task: train(task) * (LOSS_FORWARD if task.kind == "loss" else 1)
        for _ in range(2):  # the second counts
            queues.begin()
            evaluate(e, inputs)
            seconds = queues.time_alone()
        return _prediction(seconds, queues, tuple(queues.trace()))


@contextmanager
def _engine(
    cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, roughly: bool = False
) -> Iterator[tuple[Engine, SimulatedQueues, list[Inputs]]]:
    """An engine on simulated queues, the queues, and the inputs, with micro-batches merged as `predict` describes."""
    if plan.uses_ssd and not rates.has_drive:
        raise ValueError("the plan uses a drive and the machine has none")
    cfg, rates = plan.cut(cfg), rates.with_moments(plan.adam_bits)
    merged = (roughly or (plan.between == "gpu" and plan.gpus == 1)) and (plan.resident or not plan.accumulate)
    k = merge_factor(batch.n_micro, plan.gpus, ROUGH_GROUPS if roughly else MIN_GROUPS) if merged else 1
    if plan.gpus > 1:  # one interpreter launches for all
        turns = CONTENTION * (plan.gpus - 1) * rates.launch_overhead
        rates = replace(rates, launch_overhead=plan.gpus * rates.launch_overhead, gap=rates.gap + turns)
    issue = issues(cfg, plan, rates, batch, k)
    queues = SimulatedQueues(durations(cfg, plan, rates, batch, k), rates, plan.gpus, issue, plan.hosts)
    if k > 1:
        plan = replace(plan, tokens=k * plan.tokens, n_micro=batch.n_micro // k)
        batch = replace(batch, tokens=k * batch.tokens, n_micro=batch.n_micro // k)
    if roughly:
        plan = replace(plan, piece=max(plan.piece, max(Geometry.of(cfg, plan).numel) // PIECES))
    with no_collection():
        yield build(cfg, plan, Limits(1 << 60, 1 << 60), queues), queues, batch.inputs(cfg)
        queues.close()


@lru_cache(CACHED)
def scratch_bytes(cfg: ModelConfig, plan: Plan) -> int:
    """Bytes of scratch space on the drives that a step takes for activations and gradients."""
    rates = Rates(1, 1, 1, 1, 1, 1, ssd_read=1, ssd_write=1)
    queues = SimulatedQueues(lambda _: 0.0, rates, plan.gpus, hosts=plan.hosts)
    placement = build(cfg, plan, Limits(1 << 60, 1 << 60), queues).placement
    return placement.scratch.nbytes - sum(placement.geo.base[v].span for v in placement.base_offset)


def _steady(e: Engine, queues: SimulatedQueues, inputs: Sequence[Inputs]) -> float:
    """Seconds of a step in the steady state, whose tasks are then in `queues`."""
    for step, part in enumerate((inputs[:1], inputs), 1):  # the first makes gradients
        queues.begin()
        train_step(e, part, step, 0.0)
        seconds = queues.time()
    queues.repeat()
    now = [seconds, *queues.behind()]
    for _ in range(STEPS):
        before, seconds = now, queues.time()
        now = [seconds, *queues.behind()]
        grown = [a - b for a, b in zip(now, before, strict=True)]
        if all(abs(change) < STEADY * seconds for change in grown):
            return seconds
    return seconds + max(grown[1:])  # the step as it will be when buffers wait for the queue that falls behind


def _lag(plan: Plan, times: Mapping[tuple[Kind, str], float], geo: Geometry, rates: Rates) -> float:
    """Seconds by which the last of several hosts begins backward later than the first: for each host the backward of a
    unit and the transfer of its sum.
    """
    seconds = lambda kind, u: sum(times.get((kind, name), 0.0) for name, _ in _parts(geo, u))
    slowest = max(seconds(kind, u) for kind in ("loss", "backward") for u in range(geo.n_units))
    return (plan.hosts - 1) * (plan.n_micro * slowest + 4 * max(geo.numel) / rates.net)


@contextmanager
def no_collection() -> Iterator[None]:
    """A context without garbage collection, which would double the time of a simulation."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def merge_factor(n_micro: int, gpus: int, groups: int) -> int:
    """How many micro-batches are simulated as one: the largest divisor of `n_micro` that leaves at least `groups`, and
    MIN_PER_GPU for each of several GPUs, since with fewer the simulation has idle GPUs that a run has not.
    """
    few = max(groups, MIN_PER_GPU * (gpus if gpus > 1 else 0))
    return max(k for k in range(1, n_micro + 1) if n_micro % k == 0 and (k == 1 or n_micro // k >= few))


def _prediction(seconds: float, queues: SimulatedQueues, spans: tuple[Task, ...]) -> Prediction:
    busy, moved = dict.fromkeys(("compute", "h2d", "d2h", "ssd", "cpu", "update"), 0.0), {"ssd_read": 0, "ssd_write": 0}
    working = defaultdict[tuple[str, int], list[SimulatedTask]](list)  # tasks by queue and GPU
    for t in queues.tasks:
        if t.queue in DRIVE:
            moved[DRIVE[t.queue]] += int(t.nbytes)
        else:
            working[plain(t.queue), gpu_of(t.queue)].append(t)
    for (queue, _), tasks in working.items():
        name = "net" if queue in NET else "peer" if queue in PEERS else queue
        busy[name] = max(busy.get(name, 0.0), _covered(tasks))
    # Spans include waits for the drive.
    busy["ssd"] = drive_seconds(moved["ssd_read"], moved["ssd_write"], queues.rates)
    busy["dram"] = sum(t.nbytes for t in queues.tasks if is_copy(t.queue)) / queues.rates.dram
    bound = max(busy, key=busy.__getitem__)
    swapped = int(sum(t.nbytes for t in queues.tasks if t.queue in WRITES and t.kind == "activations"))
    return Prediction(seconds, busy, bound, moved["ssd_read"], moved["ssd_write"], swapped, spans)


def _covered(tasks: Sequence[Task]) -> float:
    """Seconds in which at least one of `tasks` runs; those of different queues may overlap."""
    if len({task.queue for task in tasks}) == 1:
        return sum(task.end - task.start for task in tasks)
    seconds = end = 0.0
    for task in sorted(tasks, key=lambda task: task.start):
        seconds += max(0.0, task.end - max(task.start, end))
        end = max(end, task.end)
    return seconds


# ---------------------------------------------------------------- tasks


def durations(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, k: int = 1) -> Callable[[Task], float]:
    """Returns a function that gives the seconds of a task without others; k micro-batches are simulated as one."""
    cfg = plan.cut(cfg)
    latency, times = rates.latency, unit_seconds(cfg, plan, rates, batch)
    passes: dict[Kind, float] = PASSES | {"finish": PASSES["finish"] / rates.finish}
    speed = {queue: getattr(rates, DRIVE.get(queue, queue)) for queue in ("h2d", "d2h", *DRIVE)}
    speed |= dict.fromkeys(NET, rates.net) | dict.fromkeys(PEERS, rates.peer or min(rates.h2d, rates.d2h))
    speed["cpu"] = ADAM_BYTES * rates.adam * rates.concurrent
    kernels_in = cache(lambda kind: kernels_of(cfg, plan, batch, kind, None))

    def duration(task: Task) -> float:
        if (queue := plain(task.queue)) in speed:
            return latency + task.nbytes / speed[queue]
        if (task.kind, task.label) in times:
            return k * times[task.kind, task.label]
        kernels, passed = kernels_in(task.kind), passes.get(task.kind, 1.0)
        seconds = _launched(kernels, task.nbytes * passed / rates.copy, rates)
        return k * seconds if plan.accumulate and task.kind == "decode" else seconds

    return duration


def issues(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, k: int) -> Callable[[Task], float]:
    """Returns a function that gives the seconds of the interpreter to launch a task's kernels; 0 with several GPUs,
    where each GPU's thread launches them. k micro-batches are simulated as one.
    """
    cfg = plan.cut(cfg)
    geo = Geometry.of(cfg, plan)
    first = _first_alike(geo, plan)
    units = {name: first[geo.unit_of(v)] for v, name in enumerate(geo.base_names)}
    units |= dict(zip(geo.names, first, strict=True))

    @cache
    def seconds(kind: Kind, u: int | None) -> float:
        started = rates.launch_overhead * kernels_of(cfg, plan, batch, kind, u)
        if kind not in MICRO:
            return started
        within = WITHIN.get(kind, 0) / len(shapes.inner_kinds(cfg)) if u else 0
        return k * (started + within * rates.task) + (k - 1) * rates.task

    def issue(task: Task) -> float:
        return seconds(task.kind, units.get(task.label)) if plan.gpus == 1 and task.queue == "compute" else 0.0

    return issue


def kernels_of(cfg: ModelConfig, plan: Plan, batch: Batch, kind: Kind, u: int | None) -> float:
    """Kernels of a task on the GPU; u: its unit, if it has one."""
    if kind in MICRO and u is not None:
        forward, backward = work_of(cfg, plan, batch, u)
        return (forward if kind == "forward" else backward).launches
    if kind == "decode" and u is not None and cfg.lora and cfg.lora.aware:
        return measure.rounding(cfg, shapes.representatives(cfg)[u], ITEMSIZE[plan.dtype]).launches
    if kind == "decode" and cfg.fp8:
        return 2 * FP8_LAYERS / len(shapes.inner_kinds(cfg))
    return KERNELS.get(kind, 1) / (len(shapes.inner_kinds(cfg)) if kind == "finish" else 1)


def work_of(cfg: ModelConfig, plan: Plan, batch: Batch, u: int) -> tuple[Work, Work]:
    """What (forward, backward) of a micro-batch of unit u take on the GPU; of the head its loss, without and with
    gradients.
    """
    tokens, itemsize = batch.learned if u == cfg.n_units - 1 else batch.tokens, ITEMSIZE[plan.dtype]
    grad_itemsize = 4 if batch.n_micro > 1 or plan.hosts > 1 else itemsize
    saved = frozenset(name for name, _ in plan.units[u].saved)
    return measure.work(cfg, u, tokens, batch.pairs(cfg, u), itemsize, grad_itemsize, saved)


def _launched(kernels: float, seconds: float, rates: Rates) -> float:
    """Seconds of so many kernels that compute for `seconds`: with the gaps between them, or the time to launch them."""
    return max(seconds + kernels * rates.gap, kernels * rates.launch_overhead)


def least_seconds(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch) -> float:
    """A lower bound of a step with the plan's saved tensors: its GPUs wait for nothing, and pass over the units."""
    return batch.n_micro * sum(unit_seconds(cfg, plan, rates.with_moments(plan.adam_bits), batch).values()) / plan.gpus


@lru_cache(CACHED)
def unit_seconds(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch) -> Mapping[tuple[Kind, str], float]:
    """Seconds of forward, backward or loss of a micro-batch, by (kind, unit)."""
    cfg, geo = plan.cut(cfg), Geometry.of(cfg, plan)

    def launched(kind: Kind, seconds: float, u: int) -> float:
        return _launched(kernels_of(cfg, plan, batch, kind, u), seconds, rates)

    ends: tuple[tuple[int, Kind], ...] = ((0, "forward"), (0, "backward"), (cfg.n_units - 1, "loss"))
    times: dict[tuple[Kind, str], float] = {}
    for u, kind in ends:
        work = work_of(cfg, plan, batch, u)[kind != "forward"]
        times[kind, geo.names[u]] = launched(kind, pass_seconds(work, rates, batch), u) / (rates.loss if u else 1)
    if batch.compared:
        times["loss", geo.names[-1]] *= 1 + LOSS_FORWARD
    first = _first_alike(geo, plan)
    for u in range(1, cfg.n_units - 1):
        if first[u] < u:
            for (name, _), (same, _) in zip(_parts(geo, u), _parts(geo, first[u]), strict=True):
                times["forward", name], times["backward", name] = times["forward", same], times["backward", same]
            continue
        forward, backward = (pass_seconds(work, rates, batch) for work in work_of(cfg, plan, batch, u))
        # Gradients are read and written in each micro-batch, in fp32 if there are several.
        traffic = 8 if batch.n_micro > 1 or plan.hosts > 1 else 2 * ITEMSIZE[plan.dtype]
        backward += traffic * geo.numel[u] / rates.copy
        for name, share in _parts(geo, u):
            times["forward", name] = launched("forward", share * forward, u) / rates.forward
            times["backward", name] = launched("backward", share * backward, u) / rates.backward
    return times


def _first_alike(geo: Geometry, plan: Plan) -> list[int]:
    """For each unit the first one that computes the same in the same time."""
    first = dict[tuple[int, frozenset[str]], int]()
    saved = (frozenset(name for name, _ in unit.saved) for unit in plan.units)
    return [first.setdefault((geo.alike[u], names), u) for u, names in enumerate(saved)]


def _parts(geo: Geometry, u: int) -> list[tuple[str, float]]:
    """(name, share of the work) of a unit, or of each of its slices."""
    return [(geo.base_names[v], geo.share_of_slice(v)) for v in geo.slices_of[u]] or [(geo.names[u], 1.0)]


def rebuilt_seconds(cfg: ModelConfig, u: int, names: frozenset[str], size: int, rates: Rates, batch: Batch) -> float:
    """Seconds in which backward recomputes the tensors of unit u that are not in `names`. `size`: bytes of a number."""
    return pass_seconds(measure.rebuilt(cfg, u, batch.tokens, batch.pairs(cfg, u), names, size), rates, batch)


def pass_seconds(work: Work, rates: Rates, batch: Batch) -> float:
    """Seconds of a pass on the GPU, without the launches of its kernels."""
    reached = batch.seq_len / (batch.seq_len + HALF)  # the share of its rate that attention reaches in such documents
    share = {
        "gemm": rates.gemm, "grouped": rates.grouped, "grouped gradients": rates.grouped_add,
        "scan": rates.scan, "scan backward": rates.scan_backward,
    }  # fmt: skip
    for width, (forward, backward) in ATTENTION.items():
        share |= {f"attention {width}": forward * reached, f"attention backward {width}": backward * reached}
    in_fp8 = {"fp8": rates.gemm_fp8, "grouped fp8": rates.grouped_fp8}
    speed = {kind: rates.matmul * s for kind, s in share.items()} | {kind: rates.fp8 * s for kind, s in in_fp8.items()}
    seconds = sum(flops / speed[kind] for kind, flops in work.flops.items()) + work.moved / rates.copy
    grouped = "grouped fp8" if "grouped fp8" in work.flops else "grouped"
    return seconds + work.padded / speed[grouped] if work.padded else seconds
