"""How long a step will take, from the step's own code on simulated lanes and a machine's Rates.

The simulation hands over exactly the tasks that a run hands over; this file says how long each takes, and what lanes
take from each other:

- **one drive**: all lanes to and from the SSD are queues of one half-duplex device. A request uses whatever moments of
  the device are left by those handed over before it, in pieces if need be; but what the step itself waits for shares
  the drive with the optimizer's records, rather than wait behind them. Several drives are one of their summed rate.
- **one memory**: all that is copied in the same half of a step as CPU AdamW, the way up or the way down, takes from it
  the time that the memory needs for it, and copies to the GPU run beside updates, slower, for as long as both can; what
  both directions of the bus carry in a half, they carry beside each other. All are bytes of a half, not moments: a
  faster part never makes another one slower.
- **one wait**: the step's statistics are waited for, so nothing handed over after them begins before they are known.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

from trireme.engine.build import build
from trireme.engine.lanes import LANES, OVER, READS, WRITES, SimulatedLanes, Span, Task
from trireme.engine.optimizer import PARTS
from trireme.engine.plan import Plan
from trireme.engine.rates import ADAM_BYTES, Rates
from trireme.engine.step import Inputs, train_step
from trireme.models import shapes
from trireme.models.config import ModelConfig
from trireme.storage.layout import ITEMSIZE

# Passes over memory at the device's copy rate, for one byte that a task is said to move.
PASSES = {"finish": 1.9, "zero": 1.3}
KERNELS = {"forward": 12, "backward": 40, "loss": 200, "zero": 1, "finish": 2, "adamw": 1, "statistics": 10}
HALVES = ("up", "down")
FEW = 8  # micro-batches that are told apart, at least
DRIVE = dict.fromkeys(READS, "ssd_read") | dict.fromkeys(WRITES, "ssd_write")  # lanes to and from it -> their rate
HALF = 450  # tokens of a document over which attention reaches half of its best: 0.54, 0.70, 0.73 at 1k, 4k, 8k
STEPS, DRIVE_STEPS = 3, 4  # simulated steps, and those where a drive takes part; the last is the answer


@dataclass(frozen=True)
class Prediction:
    """A step in its steady state. `busy`: seconds of compute, h2d, d2h, ssd, cpu, update; `bound` is the fullest."""

    step_s: float
    busy: dict[str, float]
    bound: str
    ssd_read: int  # bytes a step
    ssd_written: int
    spans: tuple[Span, ...] = ()  # of the last simulated step


@dataclass(frozen=True)
class Batch:
    """What a step computes on: `n_micro` micro-batches of `tokens` in documents of `seq_len` tokens."""

    tokens: int
    seq_len: int
    n_micro: int
    trained: float = 1.0  # share of the tokens whose label counts

    @property
    def learned(self) -> int:
        """Labels of a micro-batch that count."""
        return max(1, round(self.trained * self.tokens))

    @property
    def lengths(self) -> list[int]:
        """Tokens of a micro-batch's documents."""
        whole, rest = divmod(self.tokens, self.seq_len)
        return [self.seq_len] * whole + [rest] * (rest > 0)

    @property
    def total(self) -> int:
        return self.tokens * self.n_micro

    def inputs(self, cfg: ModelConfig) -> list[Inputs]:
        pairs = shapes.attended_pairs(self.lengths, cfg.window)
        return [Inputs(None, None, None, None, self.tokens, self.learned, pairs)] * self.n_micro


class PredictedLanes(SimulatedLanes):
    """Simulated lanes with one half-duplex drive, a shared memory, and the wait for a step's statistics."""

    def __init__(self, duration: Callable[[Task], float]):
        super().__init__(duration)
        self.drive = Intervals()
        self.waited = 0.0
        self.half = "up"  # or "down", from the loss and late moments to the statistics: when a task is handed over
        self.moved = {half: dict.fromkeys(LANES, 0.0) for half in HALVES}  # bytes of a step, so far
        self.slow = {half: dict.fromkeys(LANES, 1.0) for half in HALVES}

    def share(self, rates: Rates) -> None:
        """Slows the steps to come by what the lanes take from each other in a step like the last one."""
        read, written = (sum(moved[lane] for moved in self.moved.values() for lane in way) for way in (READS, WRITES))
        alone = drive_seconds(read, written, replace(rates, mixed=1.0)) or 1.0
        drive = dict.fromkeys(DRIVE, drive_seconds(read, written, rates) / alone or 1.0)
        for half, moved in self.moved.items():
            self.slow[half] |= _sharing(moved, rates) | drive
            self.moved[half] = dict.fromkeys(LANES, 0.0)

    def run(self, lane, name, fn, after=(), nbytes=0, flops=0) -> Task:
        task = Task(lane, name, nbytes, flops, OVER)
        task.start = max([self.free[lane], self.waited, *(t.end for t in after)])
        self.half = "down" if name == "loss" or name.startswith(PARTS["moments"][0]) else self.half
        self.moved[self.half][lane] += nbytes
        seconds = self.duration(task) * self.slow[self.half][lane]
        task.end = task.start + seconds
        if lane in DRIVE:
            task.end = self.drive.take(task.start, seconds)
            if DRIVE[lane] == lane:  # beside two queues of records at most, which share the drive with it
                task.end = min(task.end, task.start + 3 * seconds)
        self.free[lane] = task.end
        if name == "statistics":
            self.waited, self.half = task.end, "up"
        self.tasks.append(task)
        return task


class Intervals:
    """When a device that does one thing at a time is busy: sorted intervals that neither overlap nor touch."""

    def __init__(self):
        self.starts: list[float] = []
        self.ends: list[float] = []

    def take(self, start: float, seconds: float) -> float:
        """Books `seconds` of the moments that are free from `start` on; returns when the last of them ends."""
        first = i = bisect.bisect_left(self.ends, start)  # what ends before `start` is no concern
        at, left = start, seconds
        while i < len(self.starts) and self.starts[i] - at <= left:
            left -= max(0.0, self.starts[i] - at)
            at = max(at, self.ends[i])
            i += 1
        met = self.starts[first : first + 1] if i > first else []
        self.starts[first:i], self.ends[first:i] = [min([start, *met])], [at + left]
        return at + left


def predict(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, roughly: bool = False) -> Prediction:
    """The steady state of training by `plan` on a machine of these rates. The plan is taken to fit.

    Of very many micro-batches some pass as one that takes as long: that is quicker, and says the same within 2 %. Where
    what units leave for each other waits outside the GPU, each is a wait of its own: there only if `roughly` will do.
    Raises ValueError where the plan uses a drive and the rates have none.
    """
    if plan.uses("ssd") and not (rates.ssd_read and rates.ssd_write):
        raise ValueError("the plan uses a drive and the machine has none")
    cfg = plan.cut(cfg)
    k = together(batch.n_micro) if roughly or plan.between == "gpu" else 1
    lanes = PredictedLanes(durations(cfg, plan, rates, batch, k))
    if k > 1:
        plan, batch = (replace(p, tokens=k * p.tokens, n_micro=batch.n_micro // k) for p in (plan, batch))
    e = build(cfg, plan, {"gpu": 1 << 60, "host": 1 << 60}, lanes)
    inputs = batch.inputs(cfg)
    begun = 0.0
    for step in range(1, (DRIVE_STEPS if plan.uses("ssd") else STEPS) + 1):  # a drive works a step ahead and behind
        lanes.tasks, begun = [], lanes.waited
        train_step(e, inputs, step, 0.0)
        lanes.share(rates)
    return _prediction(lanes.waited - begun, lanes.trace(), rates)


def together(n_micro: int) -> int:
    """How many of `n_micro` micro-batches a prediction takes as one: a divisor that leaves at least FEW."""
    return max(k for k in range(1, n_micro + 1) if n_micro % k == 0 and (k == 1 or n_micro // k >= FEW))


def drive_seconds(read: float, written: float, rates: Rates) -> float:
    """Seconds that drives need for so many bytes of a step, as if the shorter of both ran beside the other."""
    if not (read or written):
        return 0.0
    up, down = read / rates.ssd_read, written / rates.ssd_write
    return up + down + 2 * min(up, down) * (1 / rates.mixed - 1)


def _prediction(seconds: float, spans: list[Span], rates: Rates) -> Prediction:
    busy, moved = dict.fromkeys(("compute", "h2d", "d2h", "ssd", "cpu", "update"), 0.0), {"ssd_read": 0, "ssd_write": 0}
    for s in spans:
        if s.lane in DRIVE:
            moved[DRIVE[s.lane]] += int(s.nbytes)
        else:
            busy[s.lane] += s.end - s.start
    busy["ssd"] = drive_seconds(*moved.values(), rates)  # spans are longer where both queues wait for the drive
    bound = max(busy, key=busy.get)
    return Prediction(seconds, busy, bound, moved["ssd_read"], moved["ssd_write"], tuple(spans))


def _sharing(moved: dict[str, float], rates: Rates) -> dict[str, float]:
    """How many times longer each lane's tasks take for what the others move, from the bytes that each lane moves."""
    beside = sum(moved[lane] for lane in ("h2d", "d2h", *DRIVE))
    crowd = 1 + ADAM_BYTES * rates.adam / rates.dram * beside / moved["cpu"] if moved["cpu"] else 1.0
    lost = dict.fromkeys(("h2d", "d2h"), (1 / rates.duplex - 1) * min(moved["h2d"], moved["d2h"]))
    lost["h2d"] += (1 / rates.reading - 1) * min(moved["h2d"], moved["cpu"] / ADAM_BYTES / rates.adam * rates.h2d)
    return {way: 1 + lost[way] / moved[way] if moved[way] else 1.0 for way in lost} | {"cpu": crowd}


def lane_seconds(moved: dict[str, float], rates: Rates) -> dict[str, float]:
    """Seconds that the bus and the CPU need for the bytes that each lane moves in a half of a step, all at once."""
    slow = _sharing(moved, rates)
    alone = {"h2d": rates.h2d, "d2h": rates.d2h, "cpu": ADAM_BYTES * rates.adam * rates.beside}
    return {lane: moved[lane] / rate * slow[lane] for lane, rate in alone.items()}


# ---------------------------------------------------------------- how long a task takes


def durations(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch, k: int = 1) -> Callable[[Task], float]:
    """A function from a task to its seconds when it has its resources to itself; k micro-batches pass as one."""
    known = {name: k * seconds for name, seconds in unit_seconds(cfg, plan, rates, batch).items()}
    passes = PASSES | {"finish": PASSES["finish"] / rates.finish}

    def duration(task: Task) -> float:
        kind = task.name.split()[0]
        if task.lane in ("compute", "update"):
            launches = KERNELS.get(kind, 1) * rates.launch
            return launches + known.get(task.name, task.nbytes * passes.get(kind, 1.0) / rates.copy)
        if task.lane == "cpu":
            return rates.latency + task.nbytes / ADAM_BYTES / (rates.adam * rates.beside)
        return rates.latency + task.nbytes / getattr(rates, DRIVE.get(task.lane, task.lane))

    return duration


def unit_seconds(cfg: ModelConfig, plan: Plan, rates: Rates, batch: Batch) -> dict[str, float]:
    """name -> seconds of every forward, backward and loss, for one micro-batch, without the launches."""
    cfg = plan.cut(cfg)
    names, N = shapes.unit_names(cfg), batch.tokens
    pairs = batch.inputs(cfg)[0].pairs
    row = N * ITEMSIZE[plan.dtype]  # bytes of one feature of every token
    attended = shapes.attention_flops(cfg, pairs)
    gemm = rates.matmul * rates.gemm
    long = batch.seq_len / (batch.seq_len + HALF)
    forward_attention = attended / (rates.matmul * rates.attention * long)
    backward_attention = 2.5 * attended / (rates.matmul * rates.attention_backward * long)
    # Norms, residuals, rotation and activation, each reading and writing once; backward does all of it twice.
    features = {"attention": 4.5 * cfg.width + 2 * (cfg.q_width + cfg.kv_width)}
    features["mlp"] = 4.5 * cfg.width + (2 if cfg.is_gpt else 3) * cfg.ffn
    features["block"] = features["attention"] + features["mlp"]
    known = {
        f"forward {names[0]}": 2 * row * cfg.width / rates.copy,
        f"backward {names[0]}": 7 * row * cfg.width / rates.copy,  # sorts the ids, adds in place
        "loss": _loss_seconds(cfg, rates, batch.learned, ITEMSIZE[plan.dtype], gemm) / rates.loss,
    }
    # A weight's gradient is read, added to and written once for each micro-batch, in fp32 where there are several.
    wide = 8 if batch.n_micro > 1 else 2 * ITEMSIZE[plan.dtype]
    parameters = {shapes.kind(cfg, u): shapes.parameters(cfg, u) for u in range(1, 1 + len(shapes.inner_kinds(cfg)))}
    for u in range(1, cfg.n_units - 1):
        kind = shapes.kind(cfg, u)
        kept = frozenset(name for name, _ in plan.units[u].saved)
        missing = shapes.saved_shapes(cfg, 1, kind).keys() - kept
        attends, again = kind != "mlp", bool(missing & {"attn_out", "lse"})
        once = shapes.forward_flops(cfg, u, N, pairs) - attends * attended
        rebuilt = shapes.recompute_flops(cfg, kept, N, pairs, kind) - again * attended
        small = row * features[kind] / rates.copy
        summed = wide * parameters[kind] / rates.copy
        known[f"forward {names[u]}"] = (once / gemm + attends * forward_attention + small) / rates.forward
        known[f"backward {names[u]}"] = (
            (2 * once + rebuilt) / gemm
            + attends * backward_attention
            + again * forward_attention
            + small * (3 if missing else 2)
            + summed
        ) / rates.backward
    return known


def _loss_seconds(cfg: ModelConfig, rates: Rates, tokens: int, itemsize: int, gemm: float) -> float:
    """Logits, their gradient and two products: five passes over the logits, and over the fp32 gradient each chunk."""
    chunks = -(-tokens // shapes.LOSS_CHUNK)
    moved = 5 * tokens * itemsize * cfg.vocab + 8 * chunks * cfg.vocab * cfg.width
    return 3 * shapes.forward_flops(cfg, cfg.n_units - 1, tokens, 0) / gemm + moved / rates.copy
