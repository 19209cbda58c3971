"""Checks of the GPU: memory, link, rates compared with its data sheet, kernels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch

from trireme.engine.amounts import gib, percent
from trireme.engine.check.cases import GROUPS, MIXTURES, Case, Shapes, error, repeats
from trireme.engine.check.row import Row
from trireme.engine.planner.gpus import MEASURED, Gpu, find_gpu
from trireme.engine.planner.host import gpu_now
from trireme.engine.planner.probe.cache import chips
from trireme.engine.planner.rates import GB
from trireme.kernels import ops
from trireme.kernels.launcher import driver_error

LITTLE = 0.7  # of a known rate: something is wrong
KERNELS_S, TIMES = 40.0, 5  # of all kernels; calls that are compared, and timed
ORDER = ("attention", "loss", "norms", "activations", "ends", "experts", "packed", "scans", "fp8")
# The shapes of common models, with 2,048 tokens: references keep whole matrices of attention scores.
CHECKED = Shapes(
    N=2048,
    widths=(4096,),
    heads_of=((4096, 128256),),
    chunks=(2048,),
    block=1 << 26,
    attention=(([2048], 32, 8, 128), ([900, 57, 1091], 32, 8, 128), ([2048], 32, 32, 64), ([2048], 16, 8, 256)),
    matmuls=((2048, 4096, 14336),),
    quantized=(4096,),
    mixtures={name: MIXTURES[name] for name in ("Qwen3-30B", "gpt-oss-20b")},
    mixed=2048,
)


def no_gpu() -> Row:
    """Why there is no GPU that trains."""
    if not torch.cuda.is_available():
        cause = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        advice = "to train on a GPU, install NVIDIA's driver and a torch with CUDA"
        result = f"torch {torch.__version__} {cause}: not measured are kernels, GPU memory and PCIe"
        return Row("gpu", "GPU", result, advice)
    if torch.version.hip:
        return Row("gpu", "GPU", "an AMD GPU; the kernels are for NVIDIA GPUs", "use an NVIDIA GPU")
    name = torch.cuda.get_device_name()
    return Row("gpu", "GPU", f"{name} has no bf16", "use an RTX 30, an A100 or anything newer")


def gpu(device: torch.device, rates: Mapping[str, float]) -> Iterator[Row]:
    """Yields rows. `rates`: from compute.matmul_rate and processor.processor_rates."""
    name, sheet = torch.cuda.get_device_name(device), None
    with suppress(ValueError):  # not a known one
        sheet = find_gpu(name)
    free, total = torch.cuda.mem_get_info(device)
    advice = "close what else uses it" if free < 0.85 * total else ""
    driver = re.search(r"\b\d{3,}\.[\d.]+", chips(device, "")["driver"])
    result = f"{name}, driver {driver[0] if driver else 'unknown'}, {gib(free, 1)} of {gib(total, 1)} free"
    yield Row("gpu", "GPU", result, advice, {"measured": bool(MEASURED.search(name))})
    reason = driver_error()
    yield Row("gpu", "Triton's compiler", reason or "works", "install gcc and python3-dev" if reason else "")
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(20):
        a @ a
    yield link(gpu_now(device))  # while they run
    yield from compared_rates(sheet, rates)
    overhead = rates["launch_overhead"]
    yield Row("gpu", "starting a kernel", f"{overhead * 1e6:.0f} us of the CPU for each")


def link(state: Mapping[str, int]) -> Row:
    """A row on the link. `state`: from host.gpu_now, while the GPU computes."""
    if "lanes" not in state:
        return Row("gpu", "PCIe", "the driver does not say")
    lanes, card_lanes, best = state["lanes"], state.get("lanes of the card", 0), state.get("generation", 0)
    result = f"x{lanes} of x{card_lanes}, generation {state.get('generation now', 0)} under load of {best}"
    slow = "another slot of the board may have all lanes" if lanes < card_lanes else ""
    if not slow and state.get("generation now", best) < best:
        slow = "look at the board's firmware: the link could be faster"
    watts = state.get("milliwatts", 0) / 1000
    result += f"; power limit {watts:.0f} W" if watts else ""
    return Row("gpu", "PCIe", result, slow)


def compared_rates(sheet: Gpu | None, rates: Mapping[str, float]) -> Iterator[Row]:
    """Yields rows of rates, compared with what such a GPU usually has."""
    cooling = "look at its power limit, temperature and mode, and at other programs"
    parts = (
        ("matmul", "bf16 matrix multiplication", 1e12, "TFLOP/s", "matmul", cooling),
        ("copy", "GPU memory", 1e9, "GB/s", "copy", cooling),
        ("h2d", "copies to the GPU", GB, "GB/s", "bus", "is it in the fastest slot, with all lanes?"),
        ("d2h", "copies from the GPU", GB, "GB/s", "bus", "is it in the fastest slot, with all lanes?"),
    )
    for name, label, unit, unit_name, field, advice in parts:
        rate, usual = rates[name], vars(sheet)[field] if sheet else 0.0
        share = f", {percent(rate / usual)} of what is usual for it" if usual else ""
        yield Row("gpu", label, f"{rate / unit:,.0f} {unit_name}{share}", advice if rate < LITTLE * usual else "")


# ---------------------------------------------------------------- kernels


def kernels(
    shapes: Shapes,
    timed: Callable[[Case], float],
    rates: Mapping[str, float],
    fp8: bool,
    groups: Sequence[str] = ORDER,
) -> Iterator[Row]:
    """Yields each kernel's time, its bound as a share of that, and its error against its reference.

    `timed`: seconds of a call. `rates`: as `gpu`. The bound: its FLOPs at the rate of a large bf16 matmul, of twice
    that in fp8, or its bytes at that of a copy.
    """
    end = time.monotonic() + KERNELS_S
    for name in groups:
        if name == "fp8" and not fp8:
            yield Row("kernels", name, "this GPU has none")
            continue
        try:
            for case in GROUPS[name](shapes):
                yield _compared(case, timed, rates)
                if time.monotonic() > end:
                    yield Row("kernels", name, "not all tried: out of time. Check again: what was compiled is kept")
                    break
        except torch.cuda.OutOfMemoryError:
            yield Row("kernels", name, "not all tried: too large for this GPU's memory")


def _compared(case: Case, timed: Callable[[Case], float], rates: Mapping[str, float]) -> Row:
    label, advice = f"{case.op} {case.label}", "do not train on this GPU; send this report to the project"
    try:
        deviation, repeatable, seconds = error(case), repeats(case, TIMES), timed(case)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as failure:  # of Triton's compiler, of its launcher, of CUDA
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        return Row("kernels", label, f"FAILED: {reason}", advice)
    if not deviation <= case.bound:
        return Row("kernels", label, f"WRONG: differs by {deviation:.1e} from its reference", advice)
    if not repeatable:
        return Row("kernels", label, f"WRONG: {TIMES} calls give different bits", advice)
    bound = case.work / (rates["matmul"] * (2 if "fp8" in label else 1) if case.flops else rates["copy"])
    result = f"{seconds * 1e3:.3g} ms, {percent(bound / seconds)} of the bound, error {deviation:.0e}"
    return Row("kernels", label, result, numbers={"seconds": seconds})


def call_seconds(case: Case) -> float:
    """Seconds of the fastest of a few calls on the GPU; compiles before. Arguments keep their values."""
    run = lambda: getattr(ops, case.op)(*case.args, **case.kwargs)
    before = [(t, t.clone()) for t in case.args if torch.is_tensor(t)]
    run()
    best = float("inf")
    for _ in range(TIMES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    for tensor, values in before:
        tensor.copy_(values)
    return best
