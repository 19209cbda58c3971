"""A block of a model, forward and backward, compared with the sum of its parts and with transformers.

    python scripts/bench/blocks.py --peers

Blocks are of LLaMA-3-8B and LLaMA-2-13B, or with --models of those that are named (block_peers.py), in one document and
in several. transformers' attention is cuDNN's, FlexAttention where there are sinks; its linear attention has
flash-linear-attention's kernels where that is installed: they are tuned for minutes when they first run, and their
backward is timed even where it may be wrong. The parts are the GEMMs by cuBLAS and the fastest attention (cuDNN,
FlashAttention-2, ours). A block and its parts, bf16 and fp8, and transformers and ours are timed in rounds of a second
after all are warm: medians, with the GPU's clock and power.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import block_parts
import torch
from block_parts import Turn, in_turn, looped
from block_peers import BACKENDS, LARGE, LAYERS, peer_call, peers_of_block, unguard
from op_cases import DEVICE, dense_peers, randn
from ops import seconds
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from trireme.engine.check.cases import BF16, attention_inputs
from trireme.engine.memory import views
from trireme.engine.planner.sizes import find_model
from trireme.kernels import ops
from trireme.models import block, model
from trireme.models.config import ModelConfig, Rope, uniform
from trireme.models.rows import Rows, make_rows, rope_tables
from trireme.models.sizes import narrow, shapes
from trireme.storage.layout import pack


def llama_shape(width: int, heads: int, ffn: int) -> ModelConfig:
    """A layer of this shape."""
    return uniform("llama", 32000, width, 1, heads, heads, width // heads, ffn, 1 << 17, 1e-5, False, rope=Rope(1e4))


SMALL = {"125M": llama_shape(768, 12, 2048), "350M": llama_shape(1024, 16, 2816), "1.3B": find_model("llama-1.3b")}


class Block(NamedTuple):
    """A block's tensors for N tokens in documents of one length."""

    cfg: ModelConfig
    u: int  # which unit: the first block with experts where there are some
    w: block.LayerWeights
    g: block.LayerWeights
    rows: Rows
    saved: dict[str, Tensor]
    x: Tensor
    dy: Tensor
    out: Tensor
    dx: Tensor

    def forward(self) -> None:
        model.forward(self.cfg, self.u, self.w, self.x, self.rows, self.saved, self.out)

    def backward(self) -> None:
        model.backward(self.cfg, self.u, self.w, self.g, self.x, self.saved, self.dy, self.rows, self.dx)

    def both(self) -> None:
        self.forward()
        self.backward()


def zeros(groups: Sequence[shapes.Group], others: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Zeros by name, in a unit's layout; `others`: as of pack."""
    layout = pack(groups, "BF16", others)
    return views(layout, torch.zeros(layout.span, dtype=torch.uint8, device=DEVICE))


def make_block(cfg: ModelConfig, N: int, documents: int = 1, u: int = 1) -> Block:
    """Unit u for N tokens in so many documents. Norms are ones.

    fp8 codes are made here: a step makes them once per pass.
    """
    groups = shapes.weight_groups(cfg, u)
    stored, made = zeros(groups, narrow.own_dtypes(cfg, u)), zeros(*narrow.derived_groups(cfg, u))
    for weight in stored.values():
        weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)
    model.make_codes(cfg, u, stored, made, backward=True)
    kinds = {"compute": BF16, "F32": torch.float32}
    saved = {
        name: torch.empty(shape, dtype=kinds[kind], device=DEVICE)
        for name, (shape, kind) in shapes.saved_shapes(cfg, N, shapes.kind(cfg, u)).items()
    }
    rows = make_rows([N // documents] * documents, rope_tables(cfg, N, DEVICE), DEVICE)
    x, dy = randn(N, cfg.width), randn(N, cfg.width) * 1e-3
    w, g = model.weights(cfg, u, stored | made), model.gradients(cfg, u, zeros(groups, narrow.own_dtypes(cfg, u)))
    return Block(cfg, u, w, g, rows, saved, x, dy, torch.empty_like(x), torch.empty_like(x))


# ---------------------------------------------------------------- the parts

TIMES = ("forward", "backward", "together")


def gemms_of(b: Block) -> dict[str, Callable]:
    """All GEMMs of forward, and of backward."""
    passes = block_parts.gemms(b.cfg, len(b.x), DEVICE)
    return {f"GEMMs, {what}": partial(all_of, calls) for what, calls in zip(TIMES[:2], passes, strict=True)}


def all_of(calls: Sequence[Callable]) -> None:
    for call in calls:
        call()


def best_attention(b: Block) -> tuple[dict[str, Callable], tuple[str, ...]]:
    """(the fastest attention's forward and backward, whose they are)."""
    spec = b.cfg.attentions[0]
    a = attention_inputs(b.rows.docs.lengths, spec.heads, spec.kv_heads, spec.dim)
    forward, backward = ({who: run for who, (run, _) in runs.items()} for runs in dense_peers(a))
    out, lse = ops.attention_fwd(a.q, a.k, a.v, a.docs, a.scale)
    forward["ours"] = lambda: ops.attention_fwd(a.q, a.k, a.v, a.docs, a.scale)
    backward["ours"] = lambda: ops.attention_bwd(a.dout, a.q, a.k, a.v, out, lse, a.docs, a.scale, a.dq, a.dk, a.dv)
    best = tuple(min(runs, key=lambda who: seconds(runs[who], 200)) for runs in (forward, backward))
    runs = {"attention, forward": forward[best[0]], "attention, backward": backward[best[1]]}
    return runs, best


def peers(b: Block) -> dict[str, dict]:
    """The Turns of each peer and, in the same rounds, ours."""
    turns = {}
    for name, liger, compile in peers_of_block(b):
        try:
            with sdpa_kernel(BACKENDS, set_priority=True):
                runs = {"peer": peer_call(b, liger, compile), "ours": b.both}
                turns[f"transformers, {name}"] = alternate(runs)
        except Exception as e:  # not compilable by this torch
            if not (isinstance(e, ImportError) and (liger or b.cfg.fp8)):  # no Liger, no torchao
                print(f"transformers, {name}: {type(e).__name__}: {str(e).splitlines()[0][:100]}")
        torch._dynamo.reset()
    return turns


def alternate(runs: Mapping[str, Callable]) -> dict[str, dict]:
    """Turns of `runs`, as dicts for JSON."""
    measures = {who: looped(run, torch.device(DEVICE)) for who, run in runs.items()}
    return {who: turn._asdict() for who, turn in in_turn(measures, DEVICE).items()}


# ---------------------------------------------------------------- reports


def passes_of(b: Block) -> dict[str, Callable]:
    """The runs of forward and of backward, by their names in TIMES."""
    b.both()
    return dict(zip(TIMES, (b.forward, b.backward, b.both), strict=True))


def report_peers(b: Block, with_peers: bool, what: str = "") -> dict[str, dict]:
    """Prints and returns their Turns."""
    turns = peers(b) if with_peers else {}
    for who, both in turns.items():
        peer, ours = Turn(**both["peer"]), Turn(**both["ours"])
        print(f"  {what}{who}: {peer.seconds * 1e3:.3f} ms {peer}; ours {ours.seconds * 1e3:.3f} ms {ours}: "
              f"{peer.seconds / ours.seconds:.3f} times as fast", flush=True)  # fmt: skip
    return turns


def report(name: str, cfg: ModelConfig, N: int, with_peers: bool) -> dict:
    """A block and its parts, in the same rounds."""
    b = make_block(cfg, N)
    attention, best = best_attention(b)
    turns = alternate(passes_of(b) | gemms_of(b) | attention)
    ms = {what: turn["seconds"] * 1e3 for what, turn in turns.items()}
    print(f"{name} block, {N} tokens")
    both = 0.0
    for what, who in zip(TIMES[:2], best, strict=True):
        gemm, attend = ms[f"GEMMs, {what}"], ms[f"attention, {what}"]
        both += gemm + attend
        print(f"  {what:8s} {ms[what]:7.3f} ms {Turn(**turns[what])}, parts {gemm + attend:7.3f} = GEMMs {gemm:7.3f} + "
              f"attention {attend:6.3f} ({who}): {(gemm + attend) / ms[what]:.3f}", flush=True)  # fmt: skip
    print(f"  together {ms['together']:7.3f} ms {Turn(**turns['together'])}, parts {both:7.3f}: "
          f"{both / ms['together']:.3f}")  # fmt: skip
    return dict(block=name, tokens=N, **turns, best=best, peers=report_peers(b, with_peers))


def in_fp8(name: str, cfg: ModelConfig, N: int, with_peers: bool) -> dict:
    """A block in bf16 and in fp8 and their GEMMs, in the same rounds."""
    blocks = {dtype: make_block(replace(cfg, fp8=dtype == "fp8"), N) for dtype in ("bf16", "fp8")}
    runs = {dtype: passes_of(b) | gemms_of(b) for dtype, b in blocks.items()}
    rows = {what: alternate({dtype: runs[dtype][what] for dtype in blocks}) for what in runs["bf16"]}
    print(f"{name} block, {N} tokens, ms in bf16 and fp8")
    for what, both in rows.items():
        old, new = (Turn(**both[dtype]) for dtype in blocks)
        print(f"  {what:15s} {old.seconds * 1e3:7.3f} {old} {new.seconds * 1e3:7.3f} {new}: "
              f"{old.seconds / new.seconds:.3f} times as fast", flush=True)  # fmt: skip
    others = {dtype: report_peers(b, with_peers, f"{dtype}, ") for dtype, b in blocks.items()}
    return dict(block=name, tokens=N, **rows, peers=others)


def in_documents(name: str, cfg: ModelConfig, N: int, documents: int, with_peers: bool, u: int) -> dict:
    """Unit u, as of make_block; experts are routed at random."""
    b = make_block(cfg, N, documents, u)
    turns = alternate(passes_of(b))
    times = ", ".join(f"{what} {turn['seconds'] * 1e3:.3f} {Turn(**turn)}" for what, turn in turns.items())
    print(f"{name} block, {N} tokens in {documents} documents, ms: {times}")
    return dict(block=name, tokens=N, documents=documents, **turns, peers=report_peers(b, with_peers))


def host_and_wall(run: Callable) -> tuple[float, float]:
    """(host seconds, wall seconds) a call."""
    n = 50
    run()
    torch.cuda.current_stream().synchronize()
    start = time.perf_counter()
    for _ in range(n):
        run()
    host = time.perf_counter() - start
    torch.cuda.current_stream().synchronize()
    return host / n, (time.perf_counter() - start) / n


def captured(run: Callable) -> Callable:
    """`run` as a CUDA graph, without gaps between kernels."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def busy(name: str, cfg: ModelConfig, N: int) -> dict:
    """The GPU's share of the wall time of a loop of blocks: the time of their CUDA graph over that of the loop."""
    b = make_block(cfg, N)
    b.both()
    host, wall = host_and_wall(b.both)
    _, gpu = host_and_wall(captured(b.both))
    print(f"{name} block, {N} tokens: host {host * 1e6:.0f} us, wall {wall * 1e6:.0f} us, GPU {gpu * 1e6:.0f} us, "
          f"busy {gpu / wall:.3f}", flush=True)  # fmt: skip
    return dict(block=name, tokens=N, host=host, wall=wall, gpu=gpu)


def profile(name: str, cfg: ModelConfig, N: int, documents: int = 1, u: int = 1) -> None:
    b = make_block(cfg, N, documents, u)
    b.both()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for _ in range(5):
            b.both()
        torch.cuda.current_stream().synchronize()
    kernels = sorted(p.key_averages(), key=lambda k: -k.device_time_total)
    total = sum(k.device_time_total for k in kernels)
    print(f"{name} block, {N} tokens: {total / 5:.0f} us in kernels")
    for k in kernels[:24]:
        print(
            f"  {k.device_time_total / 5:8.1f} us {k.device_time_total / total:6.3f} {k.count // 5:3d} x {k.key[:90]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", action="store_true", help="time transformers too, in fp8 by torchao")
    parser.add_argument(
        "--small", action="store_true", help="the share of time in which blocks of small models keep the GPU busy"
    )
    parser.add_argument("--fp8", action="store_true", help="blocks in fp8 compared with bf16")
    parser.add_argument("--models", help=f"layers of {', '.join(LAYERS)} instead: NAME,NAME")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each block")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.small:
        rows = [busy(name, cfg, 4096) for name, cfg in SMALL.items()]
    elif args.models:
        unguard()
        rows = []
        for name in args.models.split(","):
            cfg, _, _, tokens, cases = LAYERS[name]
            for what, u, documents in cases:
                if args.profile:
                    profile(f"{name}{what}", cfg, tokens, documents, u)
                rows.append(in_documents(f"{name}{what}", cfg, tokens, documents, args.peers, u))
    else:
        if args.profile:
            for name, cfg in LARGE.items():
                profile(name, replace(cfg, fp8=args.fp8), 8192)
        compare = partial(in_fp8 if args.fp8 else report, with_peers=args.peers)
        rows = [compare(name, cfg, 8192) for name, cfg in LARGE.items()]
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
