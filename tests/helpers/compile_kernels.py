"""Compiles every launch that a set of launcher calls makes, for a chip that need not be at hand; prints its resources.

    python tests/helpers/compile_kernels.py 89              launches that a test compiles for that chip
    python tests/helpers/compile_kernels.py 89 --first      of these the first launch of each kernel
    python tests/helpers/compile_kernels.py --memory        memory alone: one launch of each kind of tile
    python tests/helpers/compile_kernels.py --all           every launch on every chip: some minutes each
    python tests/helpers/compile_kernels.py --all --dtype fp32

One JSON line per kernel: chip, name, constants, shared memory in bytes. Without `--memory` also registers, stack bytes
(spills), widest global access in bytes, whether it uses Hopper's matrix instruction, whether the copy engine adds, and
whether ptxas serialises matmuls. Exits with 1 if one does not fit its chip or spills. Run outside the interpreter:
TRITON_INTERPRET must be unset.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import target_info
from triton.runtime import jit

from trireme.kernels import activations, column_sum, embedding, launch, norms, rope
from trireme.kernels.attention import attention, gate, sinks
from trireme.kernels.attention.docs import make_docs
from trireme.kernels.experts import gradients, matmuls, order, routing, rows
from trireme.kernels.experts.reference import Order, Rule
from trireme.kernels.fp8 import block_scaled, gated
from trireme.kernels.fp8.quantize import quantize, quantize_experts, quantize_rows, turn
from trireme.kernels.fp8.reference import new_maxima
from trireme.kernels.loss.loss import linear_cross_entropy
from trireme.kernels.loss.reference import Taught
from trireme.kernels.optimizer import adamw
from trireme.kernels.packed import e4m3, fp4, int4, nf4, rounding
from trireme.kernels.packed.reference import Adapters
from trireme.kernels.reference import RMS, Act, NormKind
from trireme.kernels.scan import convolution, scan
from trireme.kernels.tiles import Chip

BF16, FP32 = torch.bfloat16, torch.float32
CHIPS = {  # RTX 3090, RTX 4090, H100, B200, RTX 5090, GB10: multiprocessors, MiB of L2
    arch: Chip(arch, sms, l2 << 20)
    for arch, sms, l2 in ((86, 82, 6), (89, 128, 72), (90, 132, 50), (100, 148, 126), (120, 170, 96), (121, 48, 24))
}
VOCABULARIES = 32000, 128256, 151936, 262208
SPILLED = 128  # bytes of a thread: gated norms of groups have as many on sm_90
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"  # its ptxas-blackwell is the newer assembler


def _source(fn, args, kwargs):
    """(source, options) of one launch, specialised as Triton's launcher would."""
    names = [p.name for p in fn.params]
    values = dict(zip(names, args)) | {k: v for k, v in kwargs.items() if k in names}  # noqa: B905
    signature, constants, attrs = {}, {}, {}
    for i, p in enumerate(fn.params):
        value = values[p.name]
        special = not p.do_not_specialize
        if p.is_constexpr or value is None or (special and type(value) is int and value == 1):
            signature[p.name], constants[p.name] = "constexpr", value
            continue
        signature[p.name] = jit.mangle_type(value)
        if hasattr(value, "data_ptr") or (special and type(value) is int and value % 16 == 0):
            attrs[(i,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if fn.is_gluon() else ASTSource
    return kind(fn, signature, constants, attrs), {k: v for k, v in kwargs.items() if k not in names}


def _resources(kernel) -> dict:
    ptx = kernel.asm["ptx"]
    text = _run_tool("cuobjdump", "--dump-resource-usage", kernel.asm["cubin"])
    wgmma = "wgmma.mma_async" in ptx
    notes = _run_tool("ptxas-blackwell", "-v", "--gpu-name=sm_90a", "-o", "/dev/null", ptx.encode()) if wgmma else ""
    widths = [int(n or 1) * int(b) // 8 for n, b in re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)]
    widths += [int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\S* \[.*\], \[.*\], 0x([0-9a-f]+)", ptx)]
    return dict(
        registers=int(re.search(r"REG:(\d+)", text)[1]),
        stack=int(re.search(r"STACK:(\d+)", text)[1]),
        shared=kernel.metadata.shared,
        widest=max(widths, default=0),
        wgmma=wgmma,
        block_scales="mxf8f6f4.block_scale" in ptx,
        reduces="cp.reduce.async.bulk.tensor" in ptx,
        serialised="wgmma.mma_async instructions are serialized" in notes,
    )


def _run_tool(name: str, *args) -> str:
    """Everything that one of CUDA's tools says about a file with the given bytes, its last argument."""
    with tempfile.NamedTemporaryFile() as f:
        f.write(args[-1])
        f.flush()
        done = subprocess.run([TOOLS / name, *args[:-1], f.name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _target(arch: int):
    """What kernels find when they ask for the chip that they are compiled for."""
    target = lambda: GPUTarget("cuda", arch, 32)
    target.__triton_builtin__ = True  # or Triton wants to compile it
    return target


class Allocated(Exception):
    """Shared memory of a kernel, in bytes, and columns of Blackwell's tensor memory."""


def stop_when_allocated() -> None:
    """From now on Triton raises Allocated when it knows a kernel's memory: LLVM and ptxas take longer."""
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # a kernel in the cache has no passes to stop at
    translate, passes = nvidia.CUDABackend.make_llir, nvidia.nvidia.passes.ttgpuir

    def make_llir(self, module, *given):
        def stop(passes_before, *_):
            passes_before.run(module, "memory")
            raise Allocated(*(module.get_int_attr(f"ttg.{kind}") for kind in ("shared", "tensor_memory_size")))

        passes.add_to_llvmir = stop
        return translate(self, module, *given)

    nvidia.CUDABackend.make_llir = make_llir


def _measured(source, options: dict, arch: int) -> dict:
    try:
        return _resources(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options))
    except Allocated as known:
        return dict(shared=known.args[0], tensor=known.args[1])


def compiled(arch: int, calls, first: bool = False):
    """Resources of each distinct launch that the functions in `calls` make, on a chip of that arch, one by one; or of
    the first of each kernel.
    """
    seen = {}

    def run(fn, *args, grid, warmup, **kwargs):
        source, options = _source(fn, args, kwargs)
        seen.setdefault(fn.__name__ if first else f"{source.hash()} {options}", (fn, source, options))

    jit.JITFunction.run, launch.chip = run, lambda device: CHIPS[arch]
    target_info.current_target = _target(arch)
    for known in (attention._forward, attention._backward, launch.quantize, launch.gated_codes):
        known.cache_clear()  # of another chip
    for call in calls:
        call()
    for fn, source, options in seen.values():
        shown = {k: v for k, v in source.constants.items() if not callable(v)}
        shown = {fn.params[k[0]].name: v for k, v in shown.items()}
        yield dict(chip=arch, name=fn.__name__, constants=shown, **_measured(source, options, arch))


def attention_call(H, K, d, window=0, dtype=BF16, cap=0.0, values=0):
    """Of values of another width behind their keys, if given."""
    docs, N = make_docs([200, 100], "cpu"), 300
    q, k, v = torch.zeros(N, (H + 2 * K) * d, dtype=dtype).view(N, H + 2 * K, d).split([H, K, K], 1)
    if values:
        v = torch.zeros(N, K, d + values, dtype=dtype)[..., d:]
    out, lse = attention.attention_fwd(q, k, v, docs, 0.1, window, cap=cap)
    attention.attention_bwd(out, q, k, v, out, lse, docs, 0.1, q, k, v, window, cap)


def one_pass_call(d, setting):
    """Backward in one pass."""
    launch.use({f"one_pass {d}": setting})
    attention_call(8, 2, d)
    launch.use({})


def norm_calls(D, dtype=BF16):
    x, w = torch.zeros(4, 1, D, dtype=dtype), torch.zeros(D, dtype=dtype)
    for kind, bias in ((RMS, None), (NormKind(centred=True), w)):
        _, stats = norms.norm_fwd(x, w, 1e-5, kind, bias, None, x)
        for residual in (None, x):
            norms.norm_bwd(x, x, w, stats, kind, x.clone(), w, bias, dresidual=residual)


def gated_norm_call(H, D, first, by_head, dtype=BF16):
    x, kind = torch.zeros(4, H, D, dtype=dtype), NormKind(gate_first=first)
    w = torch.zeros(H, D, dtype=dtype) if by_head else torch.zeros(D, dtype=dtype)
    _, stats = norms.norm_fwd(x, w, 1e-5, kind, gate=x)
    norms.norm_bwd(x, x, w, stats, kind, x.clone(), w, None, x, x.clone())


def wide_norm_call(D, dtype):
    """The norm that takes most memory, and most registers."""
    x, w, kind = torch.zeros(4, 1, D, dtype=dtype), torch.zeros(D, dtype=dtype), NormKind(centred=True)
    _, stats = norms.norm_fwd(x, w, 1e-5, kind, w)
    norms.norm_bwd(x, x, w, stats, kind, x.clone(), w, w, dresidual=x)


def other_calls(dtype=BF16):
    N, H, d = 4, 40, 128
    x = torch.zeros(N, H, d, dtype=dtype)
    docs = make_docs([N], "cpu")
    rope.rope_(x, torch.zeros(8, d // 2), torch.zeros(8, d // 2), docs.positions)
    w, one = torch.zeros(d, dtype=dtype), NormKind(add_one=True)
    _, stats = norms.norm_fwd(x, w, 1e-5, one)
    norms.norm_bwd(x, x, w, stats, one, x, w)
    for pairs in (False, True):
        rope.rope_(x[..., :96], torch.zeros(8, 48), torch.zeros(8, 48), docs.positions, pairs=pairs)
    for gates in (x, x[..., :1]):
        gate.gate_bwd(gate.gate_fwd(x, gates, "softplus"), x, gates, gates, "softplus")
    for F in (14336, 20480):
        h, dy, bias = torch.zeros(N, 2 * F, dtype=dtype), torch.zeros(N, F, dtype=dtype), torch.zeros(F, dtype=dtype)
        for act in (Act(), Act("gelu"), Act("gelu", False), Act("exact gelu", False), Act("relu2", False)):
            x_, b = (h, None) if act.gated else (dy, bias if "gelu" in act.name else None)
            activations.act_fwd(x_, act, b)
            activations.act_bwd_(dy, x_.clone(), act, b, b)
        column_sum.bias_bwd_(bias, dy)
    ids, table = torch.zeros(N, dtype=torch.int64), torch.zeros(32000, 128, dtype=dtype)
    y = embedding.embedding_fwd(ids, table)
    embedding.embedding_bwd_(table, y, ids)
    embedding.add_noise_(y, torch.zeros(N), 1, 1)
    embedding.dropout(y, 0.1, 1, 1)
    state = [torch.zeros(4096, dtype=t) for t in (BF16, torch.int16, torch.float32, torch.float32, BF16)]
    clip = torch.ones(1)
    adamw.adamw_(*state, clip, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, n_decay=100, step=1)
    adamw.grad_finish(state[2], state[0])
    adamw.grad_finish(state[0])


def loss_calls(V, dtype=BF16):
    """With a cap and factors, a teacher, smoothing with hits."""
    x, w = torch.zeros(4, 128, dtype=dtype), torch.zeros(V, 128, dtype=dtype)
    ids = torch.zeros(4, dtype=torch.int64)
    shares = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.float16), torch.zeros(4)
    for taught in (None, Taught(*shares, 0.5, 2.0)):
        for cap, factors in ((0.0, None), (30.0, torch.ones(4))):
            linear_cross_entropy(x, w, ids, ids, 1.0, w, x, cap=cap, factors=factors, taught=taught)
    hits = torch.zeros(4, dtype=torch.uint8)
    linear_cross_entropy(x, w, ids, ids, 1.0, w, x, smoothing=0.1, hits_=hits)


def experts_call(E, k, D, I, in_out=False, dtype=BF16):
    """One layer's grouped matmuls; matrices stored (out, in), or as gpt-oss has them."""
    N, P = 16, 16 * k
    x, d_gate_up, act = (torch.zeros(shape, dtype=dtype) for shape in ((N, D), (P, 2 * I), (P, I)))
    place = torch.zeros(P, dtype=torch.int32)
    found = Order(place, place, torch.zeros(E + 1, dtype=torch.int32))
    stored = lambda a, b: torch.zeros(E, a, b, dtype=dtype) if in_out else torch.zeros(E, b, a, dtype=dtype).mT
    up, down = stored(D, 2 * I), stored(I, D)
    matmuls.grouped_mm(x, up, found, k, bias=torch.zeros(E, 2 * I, dtype=dtype) if in_out else None)
    matmuls.grouped_mm(x, down.mT, found, k)
    matmuls.grouped_mm(d_gate_up, up.mT, found)
    gradients.grouped_add_(torch.zeros_like(up, dtype=torch.float32), x, d_gate_up, found, k, 0)
    gradients.grouped_add_(torch.zeros_like(down, dtype=torch.float32), act, x, found, 0, k)
    gradients.grouped_add_(torch.zeros_like(up), x, d_gate_up, found, k, 0)  # into bf16
    gradients.grouped_add_(torch.zeros_like(down), act, x, found, 0, k)
    for grad in (torch.zeros(E, 16, D), torch.zeros(E, 16, D, dtype=dtype)):  # of an adapter
        gradients.grouped_add_(grad, torch.zeros(P, 16, dtype=dtype), x, found, 0, k)
    if in_out:
        gradients.grouped_add_(torch.zeros(E, 1, 2 * I), torch.zeros(P, 1, dtype=dtype), d_gate_up, found)
        activations.act_fwd(d_gate_up, Act(limit=7.0))
        activations.act_bwd_(act, d_gate_up, Act(limit=7.0), weights=torch.zeros(N, k), order=found)
        out, lse, scores = torch.zeros(N, 64, 64, dtype=dtype), torch.zeros(64, N), torch.zeros(64, dtype=dtype)
        sinks.sinks_fwd_(out, lse, scores)
        sinks.sinks_bwd_(torch.zeros(64), out, out, lse, scores)


def products_call():
    x, w = torch.zeros(16, 512, dtype=BF16), torch.zeros(8, 512, 512, dtype=BF16)
    found = Order(
        torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    )
    matmuls.grouped_mm(x, w, found)
    gradients.grouped_add_(w.float(), x, x, found)


def routing_calls(dtype=BF16):
    N, E, k, D, I = 16, 128, 8, 2048, 768
    x, logits, bias = torch.zeros(N, D, dtype=dtype), torch.zeros(N, E, dtype=dtype), torch.zeros(E)
    for rule in (
        Rule(k),
        Rule(k, sigmoid=True),
        Rule(k, sigmoid=True, groups=8, kept=4),
        Rule(k, sigmoid=True, raw=True),
    ):
        weights, chosen = routing.route_fwd(logits, rule, bias if rule.sigmoid else None)
        routing.route_bwd(weights, logits, chosen, rule, bias)
    found = order.sort_pairs(chosen, E)
    y, gate_up, act = (torch.zeros(N * k, n, dtype=dtype) for n in (D, 2 * I, I))
    rows.combine(y, found, k, weights, x)
    rows.combine(y, found, k)
    rows.combine(y, found, k, weights, None, x.float(), x.float(), found.starts[:9])
    activations.act_bwd_(act, gate_up, Act(), weights=weights, order=found)
    activations.act_bwd_(act, act.clone(), Act("relu2", False), weights=weights, order=found)


def scan_call(K, H, D, E, delta, dtype=BF16):
    """A scan with its convolution and norm: with the delta rule the norm comes before the gate."""
    docs, N = make_docs([200, 100], "cpu"), 300
    packed, C = torch.zeros(N, 2 * K * D + 2 * H * E, dtype=dtype), 2 * K * D + H * E
    x, z = packed.split([C, H * E], 1)
    taps, bias = torch.zeros(C, 4, dtype=dtype), None if delta else torch.zeros(C, dtype=dtype)
    y = convolution.conv_fwd(x, taps, bias, docs)
    convolution.conv_bwd(y, x, taps, bias, docs, torch.zeros(C, 4), None if delta else torch.zeros(C), x)
    q, k, v = (t.view(N, -1, n) for t, n in zip(y.split([K * D, K * D, H * E], 1), (D, D, E), strict=True))
    g, skip = torch.zeros(N, H), None if delta else torch.zeros(H, dtype=dtype)
    o = scan.scan_fwd(q, k, v, g, g, docs, delta, skip)
    scan.scan_fwd(q, k, v, g, g, docs, delta, skip, final=torch.zeros(2, H, D, E))
    scan.scan_bwd(o, q, k, v, g, g, docs, delta, skip, q, k, v)
    o, z = (t.reshape(N, H, E) for t in (o, z)) if delta else (o.view(N, K, -1), z.unflatten(1, (K, -1)))
    gated_norm_call(*o.shape[1:], not delta, not delta, dtype)
    gate.gate_bwd(gate.gate_fwd(o, z, "silu"), o, z, z, "silu")


def packed_calls():
    """Matrices in fp8 with scales of each kind, into bf16 and fp32: of whole blocks, and with short last ones."""
    for dtype, kind, (R, C) in (
        (BF16, FP32, (4096, 14336)),
        (BF16, BF16, (1536, 2880)),
        (BF16, torch.float16, (1536, 2880)),
        (FP32, torch.uint8, (200, 300)),
    ):
        codes = torch.zeros(2, R, C, dtype=torch.uint8)
        scales = torch.zeros(2, -(-R // 128), -(-C // 128), dtype=kind)
        e4m3.e4m3_decode(codes, scales, torch.zeros(2, R, C, dtype=dtype), (128, 128))
        pairs = torch.zeros(2, R * C // 2, dtype=torch.uint8)
        nf4.nf4_decode(pairs, torch.zeros(2, -(-R * C // 64)), torch.zeros(2, R * C, dtype=dtype))


def small_packed_calls():
    """Matrices in fp4 with scales of each kind, and in int4, into bf16 and fp32."""
    for dtype, kind, (R, C) in ((BF16, torch.float16, (4096, 14336)), (FP32, BF16, (200, 320))):
        out = torch.zeros(2, R, C, dtype=dtype)
        pairs, all_of = torch.zeros(2, R, C // 2, dtype=torch.uint8), torch.zeros(2)
        for group, scale, divide in ((32, None, False), (16, all_of, False), (16, all_of, True)):
            fp4.fp4_decode(pairs, torch.zeros(2, R, C // group, dtype=torch.uint8), scale, out, divide)
        word = lambda *shape: torch.zeros(2, *shape, dtype=torch.int32)
        G, scales = -(-C // 128), lambda *shape, kind=kind: torch.zeros(2, *shape, dtype=kind)
        for zeros in (None, word(R // 8, G)):
            int4.int4_decode(word(R, C // 8), scales(R, G), zeros, out, 128)
        x, like = torch.zeros(2, R, C), torch.zeros(0, dtype=kind)
        adapters = Adapters(torch.zeros(2, 16, R, dtype=dtype), torch.zeros(2, 16, C, dtype=dtype), 2.0, 1, R)
        rounding.nf4_round(x, adapters, out)
        for group, scale, divide in ((32, None, False), (16, all_of, False), (16, all_of, True)):
            rounding.fp4_round(x, adapters, scale, out, group, divide)
        rounding.fp4_round(out, adapters, None, out, 32)
        for zeros in (False, True):
            rounding.int4_round(x, adapters, like, out, 64, zeros, 2.0**-10)
        by = torch.zeros(2, -(-R // 128), -(-C // 128))
        rounding.e4m3_round(x, by, by, out, (128, 128), True)
        rounding.e4m3_round(x, by[:, :1, :1].contiguous(), by[:, :1, :1].contiguous(), out, (R, C))


def fp8_calls():
    for D in (4096, 14336):
        x = torch.zeros(256, D, dtype=BF16)
        for orders in ((True, True), (True, False), (False, True)):
            quantize(x, *orders)
        turn(quantize(x).rows, torch.zeros(D, 256, dtype=torch.float8_e4m3fn))
    x = torch.zeros(256, 1, 4096, dtype=BF16)
    quantize(x[:, 0], maxima=(most := new_maxima(x)))
    norms.norm_fwd(x, x[0, 0], 1e-5, maxima_=most)
    for name, columns in (("silu", True), ("silu", False), ("gelu", True)):
        h = torch.zeros(64, 28672, dtype=BF16)
        activations.act_fwd(h, Act(name), maxima_=most)
        gated.act_codes_bwd(torch.zeros(64, 14336, dtype=BF16), h, Act(name), columns)


def block_scaled_calls():
    (a, b), one = (torch.zeros(n, 4096, dtype=torch.float8_e4m3fn) for n in (256, 512)), torch.ones(1)
    for dtype, bias in ((BF16, torch.zeros(512, dtype=BF16)), (FP32, None)):
        block_scaled.fp8_matmul(a, one, b, one, torch.zeros(256, 512, dtype=dtype), bias)
        block_scaled.fp8_add_(torch.zeros(256, 512, dtype=dtype), a, one, b, one)


def fp8_experts_calls(E=128, k=8, D=2048, I=768):
    """One layer's grouped products in fp8."""
    N, P = 16, 16 * k
    place = torch.zeros(P, dtype=torch.int32)
    found = Order(place, place, torch.zeros(E + 1, dtype=torch.int32))
    for w in (torch.zeros(E, D, 2 * I, dtype=BF16), torch.zeros(E, D, I, dtype=BF16).mT):
        quantize_experts(w)
    code = lambda *shape: torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for n, A, B, chosen in ((N, D, 2 * I, k), (P, I, D, 0)):
        quantize_rows(torch.zeros(n, A, dtype=BF16))
        scales, out = (torch.ones(n), torch.ones(E)), torch.zeros(P, B, dtype=BF16)
        matmuls.grouped_mm(code(n, A), code(E, B, A).mT, found, chosen, out, scales=scales)


def listed(arch: int) -> list:
    """What the tests compile in full: on Hopper only what Ada does not have."""
    losses = [lambda V=V: loss_calls(V) for V in VOCABULARIES[:: len(VOCABULARIES) - 1]]
    one_pass = [lambda: one_pass_call(64, (64, 128, 8, 1))] * (arch in (89, 120))
    one_pass += [lambda: one_pass_call(128, (16 if arch == 120 else 32, 128, 8, 1))] * (arch in (89, 120))
    if arch == 120:
        return [block_scaled_calls, fp8_experts_calls, lambda: attention_call(8, 2, 64), *one_pass, *losses]
    if arch >= 90:
        calls = [lambda d=d: attention_call(8, 2, d) for d in (64, 80, 128, 256)]
        calls += [lambda: attention_call(8, 2, 64, 128), lambda: attention_call(8, 8, 192, values=128)]
    else:
        calls = [lambda d=d: attention_call(8, 2, d) for d in (64, 128, 256)] + [lambda: attention_call(4, 4, 80)]
        calls += [lambda: attention_call(8, 2, 128, 256), lambda: attention_call(8, 2, 128, dtype=FP32)]
        calls += [lambda: attention_call(8, 4, 256, 4096, cap=50.0), lambda: attention_call(8, 8, 192, values=128)]
        calls += [lambda D=D: norm_calls(D) for D in (768, 5120, 12288)]
        calls += [other_calls, lambda: scan_call(16, 32, 128, 128, True), *losses]
        calls += [routing_calls, lambda: experts_call(32, 4, 2880, 2880, in_out=True), packed_calls, small_packed_calls]
    calls += [lambda: wide_norm_call(16384, BF16)] * (arch == 90)
    return [*calls, *one_pass, lambda: experts_call(128, 8, 2048, 768), fp8_calls, fp8_experts_calls]


def every(arch: int, dtype) -> list:
    """Every launch, at all head widths and widths of norms that models have."""
    calls = [lambda d=d: attention_call(8, 2, d, dtype=dtype) for d in (64, 80, 96, 112, 128, 192, 256)]
    calls += [lambda d=d: attention_call(4, 4, d, 100, dtype) for d in (64, 128, 256)]
    calls += [lambda d=d: attention_call(8, 4, d, 100, dtype, 50.0) for d in (128, 256)]
    calls += [lambda: attention_call(8, 8, 192, dtype=dtype, values=128)]
    calls += [lambda D=D: norm_calls(D, dtype) for D in (768, 2048, 4096, 5120, 8192, 12288, 16384)]
    calls += [lambda V=V: loss_calls(V, dtype) for V in VOCABULARIES]
    calls += [lambda: other_calls(dtype), lambda: routing_calls(dtype), packed_calls, small_packed_calls]
    calls += [
        lambda: experts_call(32, 4, 2880, 2880, True, dtype),
        lambda: experts_call(128, 8, 2048, 768, False, dtype),
        lambda: scan_call(16, 48, 128, 128, True, dtype),
        lambda: scan_call(8, 64, 128, 64, False, dtype),
        lambda: scan_call(1, 24, 256, 64, False, dtype),
        lambda: scan_call(30, 30, 96, 192, True, dtype),
    ]
    calls += [block_scaled_calls] * (dtype == BF16 and arch // 10 == 12)
    return calls + [fp8_calls, fp8_experts_calls] * (dtype == BF16 and arch >= 89)


def kinds(arch: int) -> list:
    """A launch of each tile that launch.py has for the chip, but for those that the tests compile in full."""
    calls = [lambda t=t: wide_norm_call(16384, t) for t in (BF16, FP32)] * (arch in (86, 90))
    if arch == 89:  # compiled in full
        return []
    if arch == 86:  # fp32 has the same tiles on all chips
        return calls + [lambda d=d: attention_call(8, 2, d, dtype=FP32) for d in (64, 128, 192)]
    heads = {90: (512,), 100: (128, 192, 512), 120: (64, 128, 192, 512), 121: ()}[arch]  # others of sm_90 are Gluon's
    if arch == 121:  # tiles and memory are those of sm_120
        return [block_scaled_calls, lambda: attention_call(8, 2, 128)]
    calls += [lambda d=d: attention_call(8, 2, d) for d in heads]
    calls += {90: [lambda: scan_call(8, 64, 128, 64, False)], 120: [lambda: scan_call(16, 48, 128, 128, True)]}.get(
        arch, []
    )
    return [*calls, products_call, lambda: quantize(torch.zeros(256, 4096, dtype=BF16))]


def misfit(kernel: dict) -> bool:
    """Whether a kernel takes more memory than its chip has, or spills more than a few registers."""
    return kernel["shared"] > CHIPS[kernel["chip"]].shared or kernel.get("stack", 0) > SPILLED


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("chips", nargs="*", type=int, default=[*CHIPS])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    given = parser.parse_args()
    if given.memory:
        stop_when_allocated()
    wrong = 0
    for arch in given.chips:
        calls = kinds(arch) if given.memory else listed(arch)
        if given.all:
            calls = every(arch, FP32 if given.dtype == "fp32" else BF16)
        for entry in compiled(arch, calls, given.first):
            print(json.dumps(entry), flush=True)
            wrong += misfit(entry)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
