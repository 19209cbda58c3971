"""Linear recurrences of hybrids, forward and backward, compared with their bounds: python scripts/bench/scans.py

    python scripts/bench/scans.py --tokens 16384 --document 2048 --json results.json

Bounds: each input read and each output written once at the rate of a copy, and the products of chunks (costs.py) at the
rate of a GEMM, both measured in the same run. Where flash-linear-attention is installed, its kernels and ours take
turns on the same inputs. Without the delta rule its peer is simple_gla, on values times their steps and without a skip.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
from block_parts import gemm_rate, in_turn, looped
from torch import Tensor
from torch.nn.functional import normalize

from trireme.engine.planner.probe.compute import timed
from trireme.engine.planner.sizes import find_model
from trireme.kernels import ops
from trireme.models.families.scans import Scan
from trireme.models.sizes import costs

NAMES = ("Qwen3.5-27B", "Qwen3.5-35B-A3B", "Nemotron-3-Nano")
COPIED = 1 << 28  # bytes


class Inputs(NamedTuple):
    """Of N packed tokens; as scan_fwd has them."""

    q: Tensor  # (N, K, d)
    k: Tensor
    v: Tensor  # (N, H, e)
    g: Tensor  # (N, H) fp32
    beta: Tensor  # (N, H) fp32
    skip: Tensor | None  # (H,)
    dy: Tensor  # (N, H, e)


class Bound(NamedTuple):
    """Bytes and FLOPs of a pass."""

    nbytes: int
    flops: int


def inputs(own: Scan, tokens: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random inputs; queries and keys are normalized."""
    N, K, H, d, e = tokens, own.key_heads, own.heads, own.key_dim, own.value_dim
    randn = lambda *shape: torch.randn(shape, device=device)
    q, k = (normalize(randn(N, K, d), dim=-1).to(dtype) for _ in range(2))
    v, dy = (randn(N, H, e).to(dtype) for _ in range(2))
    g, beta = -0.1 * torch.rand(N, H, device=device), torch.rand(N, H, device=device)
    return Inputs(q, k, v, g, beta, None if own.delta else randn(H).to(dtype), dy)


def ours(own: Scan, a: Inputs, docs: ops.Docs) -> dict[str, Callable[[], object]]:
    into = [torch.empty_like(t) for t in (a.q, a.k, a.v)]
    given = a.q, a.k, a.v, a.g, a.beta, docs, own.delta, a.skip
    return {"forward": lambda: ops.scan_fwd(*given), "backward": lambda: ops.scan_bwd(a.dy, *given, *into)}


def peers(own: Scan, a: Inputs, docs: ops.Docs) -> dict[str, Callable[[], object]]:
    """flash-linear-attention's; none where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return {}
    each = own.heads // own.key_heads
    q, k = (t.repeat_interleave(each, 1)[None].contiguous().requires_grad_() for t in (a.q, a.k))
    v = (a.v if own.delta else (a.v * a.beta[..., None]).to(a.v.dtype))[None].contiguous().requires_grad_()
    g, beta, cu = a.g[None].clone().requires_grad_(), a.beta[None].clone().requires_grad_(), docs.cu_seqlens.long()
    if own.delta:
        run = lambda: chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0, cu_seqlens=cu)[0]
    else:
        run = lambda: chunk_simple_gla(q, k, v, g, scale=1.0, cu_seqlens=cu)[0]
    y, wanted = run(), (q, k, v, g, *((beta,) if own.delta else ()))

    def forward() -> None:
        with torch.no_grad():
            run()

    return {"forward": forward, "backward": lambda: torch.autograd.grad(y, wanted, a.dy[None], retain_graph=True)}


def bounds(own: Scan, tokens: int) -> dict[str, Bound]:
    """Work in bf16 of forward and of backward, which has five products for two of forward's."""
    keys, values = (2 * tokens * width for width in (own.key_width, own.value_width))
    numbers = 2 * 4 * tokens * own.heads  # g and beta
    flops = costs.recurrence_flops(own, tokens)
    return {
        "forward": Bound(2 * keys + 2 * values + numbers, flops),
        "backward": Bound(4 * keys + 3 * values + 2 * numbers, flops * 5 // 2),
    }


def compare(name: str, tokens: int, document: int, rates: tuple[float, float], device: torch.device) -> list[dict]:
    """Rows of a model's recurrence: seconds of ours and of the peer, and the bounds."""
    own = find_model(name).scan
    assert own is not None
    a, docs, rows = inputs(own, tokens, device), ops.make_docs([document] * (tokens // document), device), []
    mine, theirs = ours(own, a, docs), peers(own, a, docs)
    for what, work in bounds(own, tokens).items():
        calls = {"ours": mine[what]} | ({"flash-linear-attention": theirs[what]} if theirs else {})
        found = in_turn({who: looped(run, device) for who, run in calls.items()}, device)
        least = {"bytes": work.nbytes / rates[0], "FLOPs": work.flops / rates[1]}
        told = ", ".join(f"{who} {turn.seconds * 1e3:.3f} ms {turn}" for who, turn in found.items())
        limits = ", ".join(f"{by} {seconds * 1e3:.3f}" for by, seconds in least.items())
        share = max(least.values()) / found["ours"].seconds
        print(f"{name} {what}: {told}; bounds {limits} ms, {share:.2f} of the larger", flush=True)
        rows.append(dict(model=name, what=what, bounds=least) | {who: turn.seconds for who, turn in found.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=NAMES, help="shapes by name")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--document", type=int, default=2048, help="tokens of each")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    device = torch.device("cuda")
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    copy = 2 * COPIED / min(timed(lambda: into.copy_(source), device) for _ in range(10))
    rates = copy, gemm_rate(device)
    print(f"{torch.cuda.get_device_name()}: copy {rates[0] / 1e12:.2f} TB/s, GEMM {rates[1] / 1e12:.0f} TFLOP/s")
    rows = [row for name in args.models for row in compare(name, args.tokens, args.document, rates, device)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), rates=rates, rows=rows), file, indent=1)


if __name__ == "__main__":
    main()
