"""How fast a device computes: GEMMs, recurrences and copies within its memory; and timing of work on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import normalize

from trireme.kernels import ops
from trireme.models.config import Scan
from trireme.models.sizes.costs import recurrence_flops

TURNS = 6  # the first warms up, the fastest counts
SCANNED = (2048,) * 4  # tokens of each document of a recurrence


def timed(fn: Callable[[], object], device: torch.device) -> float:
    """Seconds of the call `fn`, with its work on the current stream of `device`."""
    start = _now(device)
    fn()
    return _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matmul of random data, 8192 wide on a GPU and 512 on a CPU. MFU is relative to it."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    for _ in range(2):
        a @ b
    return 2 * n**3 * 5 / timed(lambda: [a @ b for _ in range(5)], device)


def fp8_rate(device: torch.device) -> float:
    """FLOP/s of the same matmul in fp8; quantizing the operands is not part of the time."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (ops.quantize(torch.randn(n, n, device=device, dtype=torch.bfloat16)) for _ in range(2))
    assert a.rows is not None
    assert b.rows is not None
    out = torch.empty(n, n, device=device, dtype=torch.bfloat16)
    once = partial(ops.fp8_matmul, a.rows, a.scale, b.rows, b.scale, out)
    for _ in range(2):
        once()
    return 2 * n**3 * 5 / timed(lambda: [once() for _ in range(5)], device)


def scan_shares(device: torch.device, dtype: torch.dtype, scan: Scan, matmul: float) -> dict[str, float]:
    """How fast the recurrence `scan` runs on random data, forward and backward, as shares of `matmul`, in FLOP/s."""
    N, K, H, d, e = sum(SCANNED), scan.key_heads, scan.heads, scan.key_dim, scan.value_dim
    q, k = (normalize(torch.randn(N, K, d, device=device), dim=-1).to(dtype) for _ in range(2))
    v, dy = (torch.randn(N, H, e, device=device).to(dtype) for _ in range(2))
    g, beta, docs = -torch.rand(N, H, device=device), torch.rand(N, H, device=device), ops.make_docs(SCANNED, device)
    gradients = [torch.empty_like(t) for t in (q, k, v)]
    passes = {
        "scan": lambda: ops.scan_fwd(q, k, v, g, beta, docs, scan.delta),
        "scan_backward": lambda: ops.scan_bwd(dy, q, k, v, g, beta, docs, scan.delta, None, *gradients),
    }
    seconds = {name: min(timed(run, device) for _ in range(TURNS)) for name, run in passes.items()}
    flops = recurrence_flops(scan, N)
    return {"scan": flops / seconds["scan"] / matmul, "scan_backward": 2.5 * flops / seconds["scan_backward"] / matmul}


def copy_rate(device: torch.device) -> float:
    """Bytes/s of a copy within the memory of `device`, read and written bytes added."""
    n = 256 << 20 if device.type == "cuda" else 64 << 20  # beyond caches
    a, b = (torch.ones(n, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * n / min(timed(lambda: b.copy_(a), device) for _ in range(3))
