"""CPU AdamW compared with the memory bandwidth and torch's fused AdamW, in rounds: python scripts/bench/adamw.py

The ceiling is a pass in place (x *= 1) over as many bytes by the same threads. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import time
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import torch

from trireme.kernels import host_adamw

HYPER = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, step=10)
ONE = torch.ones(1)


def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on huge pages if possible, like the engine's buffers."""
    region = mmap.mmap(-1, n * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).zero_()


def filled(n: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Normal values times scale, a repeated pattern for speed."""
    pattern = (torch.randn(1 << 16) * scale).to(dtype)
    out = empty(n, dtype)
    for part in out.split(len(pattern)):
        part.copy_(pattern[: len(part)])
    return out


def contestants(n: int, workers: host_adamw.Workers) -> dict:
    """name -> (bytes moved per parameter, update of n parameters)."""
    m, v, lo = filled(n, torch.float32, 1e-3), filled(n, torch.float32, 1e-3).square_(), empty(n, torch.int16)
    master, hi = filled(n, torch.float32, 0.02), filled(n, torch.bfloat16, 0.02)
    grad, grad32 = filled(n, torch.bfloat16, 1e-3), filled(n, torch.float32, 1e-3)
    step = torch.tensor(10.0)
    m16, v16, m8, v8 = empty(n, torch.bfloat16), empty(n, torch.bfloat16), empty(n, torch.uint8), empty(n, torch.uint8)
    exponents = [torch.zeros(-(-n // 256), dtype=torch.int16) for _ in range(2)]
    hyper = dict(HYPER, n_decay=n - n // 100)

    def fused():
        options = {key: HYPER[key] for key in ("lr", "beta1", "beta2", "eps", "weight_decay")}
        torch._fused_adamw_([master], [grad32], [m], [v], [], [step], amsgrad=False, maximize=False, **options)

    def fused_and_casts():
        grad32.copy_(grad)
        fused()
        hi.copy_(master)

    return {
        "split master, bf16 gradient": (26, lambda: workers.adamw_(hi, lo, m, v, grad, ONE, **hyper)),
        "fp32 master, fp32 gradient": (28, lambda: workers.adamw_(master, None, m, v, grad32, ONE, **hyper)),
        "split master, 16-bit moments": (
            18,
            lambda: workers.adamw16_(hi, lo, m16, v16, grad, ONE, seed=1, **hyper),
        ),
        "split master, 8-bit moments": (
            14,
            lambda: workers.adamw8_(hi, lo, m8, exponents[0], v8, exponents[1], grad, ONE, seed=1, **hyper),
        ),
        "torch fused, fp32 gradient": (28, fused),
        "torch fused + casts, bf16 gradient": (28, fused_and_casts),
    }


class Scale(ctypes.Structure):
    """Mirrors Scale in host_adamw.cpp."""

    _fields_ = (("x", c_void_p), ("n", c_int64), ("places", c_int64), ("factor", c_float), ("record", c_int64))


def ceilings(n: int, workers: host_adamw.Workers) -> dict:
    """name -> a pass over 13n bytes: 26n of traffic, like the split master. Some machines are faster at four places."""
    x, lib = empty(13 * n // 4, torch.float32), host_adamw.library()

    def run(places: int) -> None:
        record = host_adamw.RECORD // places
        workers.spread(lib.trireme_scale, Scale(x.data_ptr(), len(x) // places, places, 1.0, record))

    return {"1 place": lambda: run(1), "4 places": lambda: run(4)}


def seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(n: int, threads: int, rounds: int) -> dict:
    """Gparam/s and GB/s of all contestants."""
    with host_adamw.Workers(threads) as workers:
        tops, runs = ceilings(n, workers), contestants(n, workers)
        tops_s: list[float] = []
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds + 1):
            tops_s.append(min(seconds(run) for run in tops.values()))
            for name, (_, run) in runs.items():
                times[name].append(seconds(run))
    result = {"ceiling_gbs": 26 * n / statistics.median(tops_s[1:]) / 1e9}
    for name, (nbytes, _) in runs.items():
        found = times[name][1:]  # warmed up
        ratios = [nbytes / 26 * top / t for top, t in zip(tops_s[1:], found, strict=True)]
        rate = n / statistics.median(found) / 1e9
        result[name] = dict(gparam_s=rate, gbs=nbytes * rate, of_ceiling=statistics.median(ratios))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, default=64, help="millions of parameters; each takes 47 bytes of RAM")
    parser.add_argument("--threads", type=int, help="default: all cores but one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    threads = args.threads or host_adamw.Workers().threads
    torch.set_num_threads(threads)
    if host_adamw.library() is None:
        raise SystemExit("error: no compiled kernel to measure (see the warning above)")
    found = measure(int(args.params * 1e6), threads, args.rounds)
    print(f"{threads} threads, {args.params:g}M parameters: ceiling in place {found['ceiling_gbs']:.1f} GB/s")
    for name, row in found.items():
        if name != "ceiling_gbs":
            print(f"  {name:36} {row['gparam_s']:7.3f} Gparam/s {row['gbs']:7.1f} GB/s  {row['of_ceiling']:6.2f}")
    if args.json:
        args.json.write_text(json.dumps({"threads": threads, "params": args.params, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
