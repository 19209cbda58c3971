"""The trace of executed tasks: start and end of each, seconds by queue, and a file for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trireme.engine.queues.names import QUEUES, title
from trireme.engine.queues.task import Task


def busy(spans: Sequence[Task]) -> dict[str, float]:
    """Seconds of work by queue."""
    total: dict[str, float] = {}
    for s in spans:
        total[s.queue] = total.get(s.queue, 0.0) + s.end - s.start
    return total


def perfetto(spans: Sequence[Task]) -> str:
    """A Chrome trace for ui.perfetto.dev, in JSON: one row for each queue, times in microseconds."""
    rows = {queue: i for i, queue in enumerate(dict.fromkeys((*QUEUES, *(s.queue for s in spans))))}
    events = [
        {"ph": "M", "name": "thread_name", "pid": "measured", "tid": i, "args": {"name": title(queue)}}
        for queue, i in rows.items()
    ]
    for s in spans:
        args = {"MB": round(s.nbytes / 1e6, 3), "GFLOP": round(s.flops / 1e9, 3)}
        times = {"ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}
        events.append({"ph": "X", "name": s.name, "pid": "measured", "tid": rows[s.queue], "args": args, **times})
    return json.dumps({"traceEvents": events})
