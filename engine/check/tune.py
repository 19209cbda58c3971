"""`trireme check --tune`: tries the few settings of each launch (kernels/tiles.py) on this GPU.

A setting counts if the kernel's results are within the bound of its reference and repeat. It is taken if it is faster
than the usual one by MIN_GAIN, twice. Results may round differently with it: each line says whether they do.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from trireme.engine.check import cases, tuned
from trireme.engine.check.cases import Case, Shapes
from trireme.engine.check.row import Row
from trireme.kernels import launch
from trireme.kernels.tiles import Chip, tried

MIN_GAIN = 1.03  # times as fast, from which another setting is taken
CALLS, ROUNDS = 10, 5  # that are timed: of each setting, and in turn with the usual one
REPEATS = 3  # calls that have to give the same bits
# queries' and keys', by width
HEADS = {64: (32, 32), 96: (32, 32), 128: (32, 8), 192: (16, 16), 256: (16, 8), 512: (32, 4)}
NARROW = 256  # width of the loss's inputs: its matrix multiplications take less than its kernel


def tune(chip: Chip, shapes: Shapes, seconds: Callable[[Case], float]) -> Iterator[Row]:
    """Yields a row for each launch; its numbers have a faster setting. `seconds`: measures a call."""
    for name, settings in tried(chip).items():
        try:
            yield _tried(name, case_of(name, chip, shapes), settings, seconds)
        except torch.cuda.OutOfMemoryError:
            yield Row("tune", name, "not tried: too large for this GPU's memory")


def _tried(name: str, case: Case, settings: Sequence[tuple[int, ...]], seconds: Callable[[Case], float]) -> Row:
    launch.use({})
    usual, expected, times = _median(case, seconds), cases.bits(case), dict[tuple[int, ...], float]()
    for setting in settings:
        launch.use({name: setting})
        took = _works(case, seconds)
        if took < math.inf:
            times[setting] = took
    best = min(times, key=times.__getitem__, default=None)
    if best is None or times[best] * MIN_GAIN > usual or (gain := _in_turn(name, best, case, seconds)) < MIN_GAIN:
        return Row("tune", name, f"as it is: {len(times)} of {len(settings)} settings tried", numbers={"gain": 1.0})
    launch.use({name: best})
    same = cases.equal(cases.bits(case), expected)
    bits_say = "bitwise identical" if same else "rounds differently"
    result = f"{', '.join(map(str, best))}: {gain:.2f} times as fast; {bits_say}"
    return Row("tune", name, result, numbers={"gain": gain, "same": same, "setting": json.dumps(best)})


def _works(case: Case, seconds: Callable[[Case], float]) -> float:
    """Seconds of a call; infinity if it fails, or its results are wrong or do not repeat."""
    try:
        right = cases.error(case) <= case.bound and cases.repeats(case, REPEATS)
        return _median(case, seconds) if right else math.inf
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:  # of Triton's compiler or its launcher: too much shared memory, an internal error
        return math.inf


def _median(case: Case, seconds: Callable[[Case], float]) -> float:
    return statistics.median(seconds(case) for _ in range(CALLS))


def _in_turn(name: str, setting: Sequence[int], case: Case, seconds: Callable[[Case], float]) -> float:
    """How many times as fast as the usual setting, timed alternately."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for new, spent in times.items():
            launch.use({name: setting} if new else {})
            spent.append(_median(case, seconds))
    return statistics.median(times[False]) / statistics.median(times[True])


# ---------------------------------------------------------------- what is timed


def case_of(name: str, chip: Chip, s: Shapes) -> Case:
    """A call in which the launch takes most of the time."""
    if name.startswith(("attention_", "one_pass")):
        kind, width = name.removeprefix("attention_").split()
        return _attention(kind, int(width), chip, s)
    if name.startswith("cross_entropy"):
        vocabulary = max(v for _, v in s.heads_of) if name.endswith("wide") else launch.WIDE // 2
        narrow = replace(s, heads_of=((min(NARROW, s.widths[0]), vocabulary),), chunks=s.chunks[:1])
        return next(cases.loss(narrow))
    group, op, label = {
        "rows_bwd": ("norms", "norm_bwd", ""),
        "grouped_mm": ("experts", "grouped_mm", "up"),
        "grouped_add": ("experts", "grouped_add_", "up"),
        "quantize": ("fp8", "quantize", "rows "),
        "quantize both": ("fp8", "quantize", "rows columns"),
        "gated_codes": ("fp8", "act_codes_bwd", ""),
        "block_scaled": ("fp8", "fp8_matmul", ""),
    }[name]
    candidates = cases.GROUPS[group](s)
    return next(case for case in candidates if case.op == op and label in f"{case.label} ")


def _attention(kind: str, width: int, chip: Chip, s: Shapes) -> Case:
    """On Hopper with a window as long as the text, since without a window other kernels compute heads up to 128.

    Two passes of backward by narrower heads where those of this width take one.
    """
    narrower = 8 * (kind in ("dq", "dkv") and f"one_pass {width}" in tried(chip))
    a = cases.attention_inputs(s.tuned, *HEADS[width], width - narrower, s)
    window = sum(a.docs.lengths) if chip.arch == 90 else 0
    forward, backward = cases.passes(str(width), a, window)
    return forward if kind == "fwd" else backward


def rows(device: torch.device, shapes: Shapes, seconds: Callable[[Case], float]) -> Iterator[Row]:
    """Yields a row for each launch of a GPU, and one on where the faster settings are stored."""
    settings, rounds = dict[str, list[int]](), ""
    with tuned.in_use({}):
        for row in tune(launch.chip(device), shapes, seconds):
            if "setting" in row.numbers:
                settings[row.name] = json.loads(str(row.numbers["setting"]))
                rounds = rounds if row.numbers["same"] else ", with other roundings than untuned ones"
            yield row
    path = tuned.store(device, settings)
    location = f"kept in {path}" if path else "not kept: there is no cache folder of this user's own"
    result = f"{len(settings)} launches, {location}. Runs use them from now on{rounds}"
    yield Row("tune", "settings", result if settings else f"none is faster; {location}")
