"""A GPU under sustained load: FLOP/s of a GEMM and of a block's parts, and implementations timed in rounds.

A GPU lowers its clock within a second of full load. So no step reaches the rate that a GEMM has after a pause, and of
two implementations timed one after the other the first seems faster: they are compared in rounds (`in_turn`).
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trireme.engine.planner.probe.compute import timed
from trireme.kernels import ops
from trireme.models.config import ModelConfig
from trireme.models.sizes import costs, measure, narrow, shapes

Call = Callable[[], object]
LONG = 1.0  # seconds of warm-up until the clock settles, and of a timed loop
ROUNDS = 5
Key = TypeVar("Key", bound=Hashable)


class Turn(NamedTuple):
    """An implementation's rounds: median, minimum and maximum seconds; median clock (MHz) and power (W), if known."""

    seconds: float
    least: float
    most: float
    clock: float | None
    power: float | None

    def __str__(self) -> str:
        return "" if self.clock is None else f"{self.clock:.0f} MHz {self.power:.0f} W"


def in_turn(
    measures: Mapping[Key, Callable[[], float]], device: torch.device | str, rounds: int = ROUNDS, warm: float = LONG
) -> dict[Key, Turn]:
    """Each of `measures`, which return seconds, once per round, after `warm` seconds of all of them."""
    spans: dict[Key, list[tuple[float, float, float]]] = {key: [] for key in measures}
    with sampled(device) as samples:
        for measure in measures.values() if warm else ():
            measure()  # may compile
        start = time.perf_counter()
        while time.perf_counter() - start < warm:
            for measure in measures.values():
                measure()
        for _ in range(rounds):
            for key, measure in measures.items():
                begin = time.perf_counter()
                seconds = measure()
                spans[key].append((begin, time.perf_counter(), seconds))
    return {key: _turn(timed, samples) for key, timed in spans.items()}


def _turn(spans: Sequence[tuple[float, float, float]], samples: Sequence[tuple[float, float, float]]) -> Turn:
    """Of (begin, end, seconds) by round and (time, clock, power)."""
    times = [seconds for _, _, seconds in spans]
    inside = [s for s in samples if any(begin <= s[0] <= end for begin, end, _ in spans)]
    clock, power = (statistics.median(s[i] for s in inside) if inside else None for i in (1, 2))
    return Turn(statistics.median(times), min(times), max(times), clock, power)


@contextmanager
def sampled(device: torch.device | str) -> Iterator[list[tuple[float, float, float]]]:
    """(time, MHz, W) of the GPU, ten per second, by nvidia-smi; none where it is absent or does not report them."""
    readings: list[tuple[float, float, float]] = []
    command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", "--loop-ms=100"]
    command += ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield readings
        return

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # [N/A]
                continue
            readings.append((time.perf_counter(), clock, power))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield readings
    finally:
        process.terminate()
        process.wait()
        reader.join()


def looped(run: Call, device: torch.device) -> Callable[[], float]:
    """A measure for in_turn: seconds of a call of `run`, in a loop that lasts about LONG."""

    def repeat(times: int) -> None:
        for _ in range(times):
            run()  # each result is freed before the next

    repeat(1)
    n = max(1, round(LONG / min(timed(partial(repeat, 1), device) for _ in range(3))))
    return lambda: timed(partial(repeat, n), device) / n


def sustained(calls: Sequence[Call], flops: float, device: torch.device) -> float:
    """FLOP/s of `calls` in a loop under sustained load."""

    def run() -> None:
        for call in calls:
            call()

    measure = looped(run, device)
    measure()  # warm-up
    return flops / measure()


def gemm_rate(device: torch.device) -> float:
    """FLOP/s of an 8192^3 GEMM in bf16 under sustained load."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return sustained([partial(torch.mm, a, b, out=out)], 2 * 8192**3, device)


def parts_rate(cfg: ModelConfig, tokens: int, seq: int, device: torch.device) -> float:
    """FLOP/s of a block's GEMMs by cuBLAS and attention by cuDNN, forward and backward, `tokens` in documents of `seq`.

    FLOPs are counted like those of tasks.
    """
    forward, backward = gemms(cfg, tokens, device)
    calls = [*forward, *backward, *_attention(cfg, tokens // seq, seq, device)]
    pairs = costs.layer_pairs(cfg.layers, [seq] * (tokens // seq))
    flops = measure.forward_flops(cfg, 1, tokens, pairs) + measure.backward_flops(cfg, 1, tokens, pairs)
    return sustained(calls, flops, device)


def gemms(cfg: ModelConfig, tokens: int, device: torch.device | str) -> tuple[list[Call], list[Call]]:
    """(forward, backward) GEMMs of a block, with fp8 codes where it is in fp8; a group (q, k, v; gate, up) is one GEMM.

    Frozen matrices have no gradient.
    """
    forward: list[Call] = []
    backward: list[Call] = []
    for group in shapes.weight_groups(cfg, 1):
        matrices = [shape for _, shape in group if len(shape) == 2]
        if not matrices:
            continue
        rows, columns = sum(shape[0] for shape in matrices), matrices[0][1]
        w, x, dy = (torch.randn(*shape, dtype=torch.bfloat16, device=device)
                    for shape in ((rows, columns), (tokens, columns), (tokens, rows)))  # fmt: skip
        y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
        if narrow.in_fp8(cfg, rows, columns):
            w8, x8, dy8 = (ops.quantize(t, columns=True) for t in (w, x, dy))
            calls = [
                partial(ops.fp8_matmul, x8.rows, x8.scale, w8.rows, w8.scale, y),
                partial(ops.fp8_matmul, dy8.rows, dy8.scale, w8.columns, w8.scale, dx),
                partial(ops.fp8_matmul, dy8.columns, dy8.scale, x8.columns, x8.scale, dw),
            ]
        else:
            pairs = (x, w.T, y), (dy, w, dx), (dy.T, x, dw)
            calls = [partial(torch.mm, a, b, out=out) for a, b, out in pairs]
        forward.append(calls[0])
        backward += calls[1:2] if shapes.is_frozen(cfg, group) else calls[1:]
    return forward, backward


def _attention(cfg: ModelConfig, documents: int, seq: int, device: torch.device) -> list[Call]:
    """cuDNN's forward and backward."""
    spec = cfg.attentions[0]
    q, k, v = (torch.randn(documents, heads, seq, spec.dim, dtype=torch.bfloat16, device=device, requires_grad=True)
               for heads in (spec.heads, spec.kv_heads, spec.kv_heads))  # fmt: skip
    dy = torch.randn_like(q)

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=spec.heads != spec.kv_heads)

    y = forward()
    return [forward, lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)]
