"""Kernel speed compared with the peak rates of the same run.

    python scripts/bench/ops.py
    python scripts/bench/ops.py attention --peers --json results.json

Work is each input read and each output written once, or FLOPs. An op that differs from the reference gets no figure.
Times are medians with no inputs in L2. Modified L2 lines are written to memory while the next op runs, so the same op
runs on other tensors before each call: a call then pays for as many writes as it makes. `--flush write` fills the L2
with modified lines, like triton.testing.do_bench, `--flush read` with unmodified ones; peers and the copy are timed in
the same way. Peers and ours are timed in rounds after a second of both; medians, with the GPU's clock and power.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import op_peers
import torch
import triton
from block_parts import LONG, ROUNDS, gemm_rate, in_turn
from op_cases import DEVICE, peers_of, randn
from triton.testing import do_bench

from trireme.engine.check.cases import GROUPS, PACKED, Case, Shapes, attention_inputs, error
from trireme.kernels import ops
from trireme.kernels.launcher import Fixed, Kernel

V3 = 16, 16, 192, 128  # DeepSeek-V3, an eighth of its heads
LATENT = (([4096] * 2, *V3), (PACKED, *V3), ([4096] * 2, 20, 20, 256, 256))  # and GLM-4.7-Flash


def seconds(run: Callable, rep: int = 60, flush: Callable | None = None) -> float:
    """Median time of `run`, launch included, over `rep` milliseconds, each call after `flush`."""
    if flush is None:
        return do_bench(run, warmup=10, rep=rep, return_mode="median") * 1e-3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    busy = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    times: list[float] = []
    while len(times) < 13 or (sum(times) < rep and len(times) < 103):
        busy.zero_()  # 300 us, in which the host enqueues what follows
        kept = flush()  # kept, so that the next results get other memory
        start.record()
        kept = kept, run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:]) * 1e-3


FLUSHES = ["same", "write", "read"]


def flusher(flush: str, op: Callable) -> Callable | None:
    """What runs before each call: `op`, a read of 256 MiB, or do_bench's writes (None)."""
    lines = torch.zeros(1 << 25, dtype=torch.int64, device=DEVICE)
    return {"same": op, "read": lines.sum, "write": None}[flush]


def ceilings() -> tuple[float, float]:
    """FLOP/s of a GEMM: after a pause, and under sustained load."""
    a, b = randn(8192, 8192), randn(8192, 8192)
    return 2 * 8192**3 / seconds(lambda: a @ b), gemm_rate(torch.device(DEVICE))


def copied(flush: str, n: int = 1 << 28) -> float:
    """Bytes/s read plus written by a copy of n bytes."""
    x, y, x2, y2 = torch.randint(256, (4, n), dtype=torch.uint8, device=DEVICE)
    return 2 * n / seconds(lambda: y.copy_(x), flush=flusher(flush, lambda: y2.copy_(x2)))


PEERS = ["torch", "liger", "compile"]  # torch's own; Liger; torch.compile and FlexAttention


def report(case: Case, peers: list[str], matmul: float, copies: dict[str, float]) -> list[dict]:
    """Prints and returns a case's figures; `copies`: bytes/s by flush."""
    wrong = error(case)
    torch.cuda.empty_cache()
    if not wrong <= case.bound:
        print(f"{case.op:22s} {case.label:38s} WRONG: relative error {wrong:.1e}")
        return []
    runs = {"ours": (lambda: getattr(ops, case.op)(*case.args, **case.kwargs), 1.0)}
    makers = dict(torch=lambda *_: peers_of(case), liger=op_peers.liger, compile=op_peers.compiled)
    for kind in peers:
        try:
            runs |= makers[kind](case.op, case.args, case.kwargs)
        except Exception as e:  # a peer may not run here
            print(f"{case.op:22s} {case.label:38s} {kind}: {type(e).__name__}: {str(e).splitlines()[0][:80]}")
    ways = {"write": matmul} if case.flops else copies  # GEMMs do not depend on the L2's state
    others = [] if case.flops else [a.clone() if torch.is_tensor(a) else a for a in case.args]
    flushes = {way: flusher(way, lambda: getattr(ops, case.op)(*others, **case.kwargs)) for way in ways}
    measures = {(who, way): partial(seconds, run, flush=flushes[way]) for who, (run, _) in runs.items() for way in ways}
    rounds, warm = (ROUNDS, LONG) if len(runs) > 1 else (1, 0.0)
    rows = []
    for (who, way), turn in in_turn(measures, DEVICE, rounds, warm).items():
        rate, unit = runs[who][1] * case.work / turn.seconds, "TFLOP/s" if case.flops else f"TB/s after {way}"
        print(
            f"{case.op:22s} {case.label:38s} {who:13s} {turn.seconds * 1e6:9.1f} us {rate / 1e12:8.2f} {unit:16s} "
            f"{rate / ways[way]:5.2f}  error {wrong:.1e} {turn}",
            flush=True,
        )
        figures = dict(rate=rate, fraction=rate / ways[way], rounds=rounds, **turn._asdict())
        rows.append(dict(op=case.op, shape=case.label, who=who, flush=way, **figures))
    return rows


# ---------------------------------------------------------------- launches


def host_seconds(run: Callable) -> float:
    """Host seconds of `run`."""
    times, calls = [], 50  # calls that fit the GPU's queue
    for _ in range(30):
        torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append(time.perf_counter() - start)
    return min(times) / calls


def host() -> list[dict]:
    """Prints and returns the host time of calls on tiny inputs, with allocations."""
    N, D = 64, 512
    x, dy, w, gate_up = randn(N, 1, D), randn(N, 1, D), randn(D), randn(N, 2 * D)
    dw, clip = torch.zeros(D, device=DEVICE), torch.ones(1, device=DEVICE)
    _, stats = ops.norm_fwd(x, w, 1e-5)
    flat, m, v = torch.zeros(3, 4096, device=DEVICE)
    cos, sin = (t.to(DEVICE) for t in ops.rope_table(torch.ones(32), N))
    a, dense = attention_inputs([N], 8, 8, 64), attention_inputs([1024], 2, 2, 128)
    out, lse = ops.attention_fwd(a.q, a.k, a.v, a.docs, a.scale)
    options = dict(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, n_decay=4096, step=10)
    calls = {
        "norm_fwd": lambda: ops.norm_fwd(x, w, 1e-5),
        "norm_bwd, 2 launches": lambda: ops.norm_bwd(dy, x, w, stats, ops.RMS, torch.empty_like(x), dw),
        "act_fwd": lambda: ops.act_fwd(gate_up, ops.Act()),
        "act_bwd_": lambda: ops.act_bwd_(dy[:, 0], gate_up, ops.Act()),
        "rope_": lambda: ops.rope_(a.q, cos, sin, a.docs.positions),
        "attention_fwd": lambda: ops.attention_fwd(a.q, a.k, a.v, a.docs, a.scale),
        "attention_fwd by cuDNN": lambda: ops.attention_fwd(dense.q, dense.k, dense.v, dense.docs, dense.scale),
        "attention_bwd, 2 launches": lambda: ops.attention_bwd(
            a.dout, a.q, a.k, a.v, out, lse, a.docs, a.scale, a.dq, a.dk, a.dv
        ),
        "adamw_": lambda: ops.adamw_(flat, None, m, v, flat, clip, **options),
    }
    ours, rows = (Kernel._launch, Fixed.__call__), []
    by_triton = (
        lambda kernel, grid, *args, **options: kernel.fn[grid](*args, **options),
        lambda fixed, n, *args: fixed.kernel.fn[(n,)](*itertools.chain(*args), *fixed.constants, **fixed.options),
    )
    for name, run in calls.items():
        times = []
        for Kernel._launch, Fixed.__call__ in (ours, by_triton):
            times.append(host_seconds(run))
        Kernel._launch, Fixed.__call__ = ours
        print(
            f"{name:26s} {times[0] * 1e6:6.1f} us of host time, by Triton's own launch {times[1] * 1e6:6.1f}",
            flush=True,
        )
        rows.append(dict(op=name, host=times[0], host_by_triton=times[1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all when none is named")
    parser.add_argument("--only", default="", help="only cases whose op and shape contain this")
    parser.add_argument("--flush", nargs="+", choices=FLUSHES, default=["same"], help="what empties the L2")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="time other implementations too: all, or those named")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--host", action="store_true", help="time the host's part of small calls instead")
    args = parser.parse_args()
    if args.host:
        host()
        return
    matmul, sustained = ceilings()
    copies = {flush: copied(flush) for flush in args.flush}
    peers = PEERS if args.peers == [] else args.peers or []
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"ceilings: matmul {matmul / 1e12:.0f} TFLOP/s, {sustained / 1e12:.0f} under sustained load")
    for flush, copy in copies.items():
        print(f"copy of 256 MiB {copy / 1e12:.2f} TB/s, of 64 MiB {copied(flush, 1 << 26) / 1e12:.2f}, after {flush}")
    cases = (
        case
        for g in args.groups or GROUPS
        for case in GROUPS[g](Shapes(DEVICE, latent=LATENT))
        if args.only in f"{case.op} {case.label}"
    )
    rows = [row for case in cases for row in report(case, peers, matmul, copies)]
    if args.json:
        with open(args.json, "w") as f:
            json.dump(dict(device=name, matmul=matmul, sustained=sustained, copies=copies, rows=rows), f, indent=1)


if __name__ == "__main__":
    main()
