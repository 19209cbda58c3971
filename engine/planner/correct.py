"""Corrects rates with the task times of one traced step.

In a run shapes differ from those of the probe, other programs use the machine, and the caches of drives are full. The
traced step trains like any other (PatrickStar, section 7.1: the warm-up iteration).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from trireme.engine.build import Inputs
from trireme.engine.planner.predict import Batch, Prediction
from trireme.engine.planner.rates import COMPUTATION, Rates
from trireme.engine.planner.simulate import drive_seconds
from trireme.engine.queues.names import NET, READS, WRITES, kind_of, plain
from trireme.engine.queues.task import Task
from trireme.engine.queues.trace import busy

TIMED_BY = {  # kind of tasks -> their rates
    **{kind: (kind,) for kind in COMPUTATION},
    "h2d": ("h2d",),
    "d2h": ("d2h",),
    "cpu": ("adam", "adam8", "dram"),
    "ssd": ("ssd_read", "ssd_write"),
}
SHARE = 0.05  # a queue's rate is corrected if it works for more than this share of the step


def measured(spans: Sequence[Task]) -> dict[str, float]:
    """Seconds for which each kind of TIMED_BY worked; for the drive, seconds with requests in flight."""
    seconds_of, end = defaultdict[str, float](float), 0.0
    for queue, seconds in busy(spans).items():
        seconds_of[plain(queue)] += seconds
    for span in spans:
        if kind_of(span.queue) == "compute":
            seconds_of[span.kind] += span.end - span.start
    for span in sorted((s for s in spans if s.queue in READS + WRITES), key=lambda s: s.start):
        seconds_of["ssd"] += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    return {kind: seconds_of[kind] for kind in TIMED_BY}


def at_work(spans: Sequence[Task]) -> dict[str, float]:
    """Seconds for which each queue worked, those of the drive as "ssd"; without queues between hosts, which wait for
    each other.
    """
    seconds_of = {queue: seconds for queue, seconds in busy(spans).items() if queue not in READS + WRITES + NET}
    return seconds_of | {"ssd": measured(spans)["ssd"]}


def batch_of(micro: Sequence[Inputs]) -> Batch:
    """A step's micro-batches for a prediction: their number, each as large as the largest."""
    largest = max(micro, key=lambda mb: mb.tokens)
    document = max(1, round(2 * largest.pairs / largest.tokens) - 1)
    return Batch(largest.tokens, document, len(micro), largest.trained / largest.tokens, largest.docs is not None)


def until_its_end(spans: Sequence[Task]) -> list[Task]:
    """The spans of a traced step, cut at the end of its computation.

    The tasks after that are the last updates, and reads for the next step.
    """
    end = max((s.end for s in spans if kind_of(s.queue) == "compute"), default=float("inf"))
    return [span.cut(end) for span in spans if span.end <= end or span.start < end]


def corrected(rates: Rates, predicted: Prediction, spans: Sequence[Task], seconds: float) -> Rates:
    """Rates that would have `predicted` the time of each kind of task in `spans`, of a step that took `seconds`.

    Times are compared per byte, since a first step moves other amounts.
    """
    spans = until_its_end(spans)
    took, expected = measured(spans), measured(predicted.spans)
    bytes_now, bytes_predicted = defaultdict[str, float](float), defaultdict[str, float](float)
    for moved, traced in ((bytes_now, spans), (bytes_predicted, predicted.spans)):
        for span in traced:
            moved[plain(span.queue)] += span.nbytes
    for kind in ("h2d", "d2h", "cpu"):
        expected[kind] *= bytes_now[kind] / bytes_predicted[kind] if bytes_predicted[kind] else 0.0
    read, written = (sum(bytes_now[queue] for queue in direction) for direction in (READS, WRITES))
    expected["ssd"] = drive_seconds(read, written, rates)
    for kind in TIMED_BY:
        if min(took[kind], expected[kind]) > (0 if kind in COMPUTATION else SHARE * seconds):
            rates = rates.times(expected[kind] / took[kind], TIMED_BY[kind])
    return rates
