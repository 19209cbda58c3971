"""Selects the implementation of each operation: the Triton launcher for CUDA tensors, plain torch for all others.

A call's first argument decides. fp64, which gradient checks use, takes the reference. Triton is imported when a kernel
is first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch

from trireme.kernels import reference
from trireme.kernels.attention import reference as attention
from trireme.kernels.attention.docs import Docs, Laid, lay_docs, make_docs, place_docs  # noqa: F401
from trireme.kernels.experts import reference as experts
from trireme.kernels.experts.reference import Order, Rule  # noqa: F401
from trireme.kernels.fp8 import reference as fp8
from trireme.kernels.fp8.reference import Quantized, new_maxima  # noqa: F401
from trireme.kernels.loss import reference as loss
from trireme.kernels.loss.reference import Taught  # noqa: F401
from trireme.kernels.observers import observers
from trireme.kernels.optimizer import reference as optimizer
from trireme.kernels.optimizer.reference import split_master  # noqa: F401
from trireme.kernels.packed import reference as packed
from trireme.kernels.reference import RMS, Act, NormKind, NormStats, rope_table, soft_cap  # noqa: F401
from trireme.kernels.scan import reference as scan
from trireme.kernels.scan.reference import decay_bwd, decay_fwd  # noqa: F401

P = ParamSpec("P")
R = TypeVar("R")


def _op(plain: Callable[P, R], module: str) -> Callable[P, R]:
    """A function that calls `plain`, or on a GPU the launcher of the same name in trireme.kernels.<module>."""
    launcher = cache(lambda: getattr(import_module(f"trireme.kernels.{module}"), plain.__name__))

    @wraps(plain)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        on_gpu = first.device.type in ("cuda", "meta") and first.dtype != torch.float64
        if first.is_meta:
            return _observe(plain.__name__, launcher() if on_gpu else plain, args, kwargs)
        return (launcher() if on_gpu else plain)(*args, **kwargs)

    op.launcher = launcher  # type: ignore[attr-defined]
    return op


def _observe(name: str, fn: Callable[..., R], args: tuple[Any, ...], options: dict[str, Any]) -> R:
    """Calls fn, and tells observers."""
    for observer in observers():
        observer.begin(name, args, options)
    result = fn(*args, **options)
    for observer in observers():
        observer.end()
    return result


norm_fwd = _op(reference.norm_fwd, "norms")
norm_bwd = _op(reference.norm_bwd, "norms")
rope_ = _op(reference.rope_, "rope")
act_fwd = _op(reference.act_fwd, "activations")
act_bwd_ = _op(reference.act_bwd_, "activations")
bias_bwd_ = _op(reference.bias_bwd_, "column_sum")
attention_fwd = _op(attention.attention_fwd, "attention.attention")
attention_bwd = _op(attention.attention_bwd, "attention.attention")
sinks_fwd_ = _op(attention.sinks_fwd_, "attention.sinks")
sinks_bwd_ = _op(attention.sinks_bwd_, "attention.sinks")
embedding_fwd = _op(reference.embedding_fwd, "embedding")
embedding_bwd_ = _op(reference.embedding_bwd_, "embedding")
add_noise_ = _op(reference.add_noise_, "embedding")
dropout = _op(reference.dropout, "embedding")
linear_cross_entropy = _op(loss.linear_cross_entropy, "loss.loss")
route_fwd = _op(experts.route_fwd, "experts.routing")
route_bwd = _op(experts.route_bwd, "experts.routing")
sort_pairs = _op(experts.sort_pairs, "experts.order")
grouped_mm = _op(experts.grouped_mm, "experts.matmuls")
grouped_add_ = _op(experts.grouped_add_, "experts.gradients")
combine = _op(experts.combine, "experts.rows")
e4m3_decode = _op(packed.e4m3_decode, "packed.e4m3")
nf4_decode = _op(packed.nf4_decode, "packed.nf4")
fp4_decode = _op(packed.fp4_decode, "packed.fp4")
int4_decode = _op(packed.int4_decode, "packed.int4")
scan_fwd = _op(scan.scan_fwd, "scan.scan")
scan_bwd = _op(scan.scan_bwd, "scan.scan")
conv_fwd = _op(scan.conv_fwd, "scan.convolution")
conv_bwd = _op(scan.conv_bwd, "scan.convolution")
gate_fwd = _op(attention.gate_fwd, "attention.gate")
gate_bwd = _op(attention.gate_bwd, "attention.gate")
quantize = _op(fp8.quantize, "fp8.quantize")
quantize_experts = _op(fp8.quantize_experts, "fp8.quantize")
quantize_rows = _op(fp8.quantize_rows, "fp8.quantize")
turn = _op(fp8.turn, "fp8.quantize")
act_codes_bwd = _op(fp8.act_codes_bwd, "fp8.gated")
fp8_matmul = _op(fp8.fp8_matmul, "fp8.matmuls")
fp8_add_ = _op(fp8.fp8_add_, "fp8.matmuls")
grad_finish = _op(optimizer.grad_finish, "optimizer.adamw")
adamw_ = _op(optimizer.adamw_, "optimizer.adamw")
