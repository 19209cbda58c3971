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
from trireme.kernels.attention.docs import Docs, Laid, lay_docs, make_docs, place_docs
from trireme.kernels.experts import reference as experts
from trireme.kernels.experts.reference import Order, Rule
from trireme.kernels.fp8 import reference as fp8
from trireme.kernels.fp8.reference import Quantized
from trireme.kernels.packed import reference as packed
from trireme.kernels.reference import join_master, rope_table, soft_cap, split_master
from trireme.kernels.scan import reference as scan
from trireme.kernels.scan.reference import decay_bwd, decay_fwd
from trireme.kernels.teacher import reference as teacher
from trireme.kernels.teacher.reference import Taught

P = ParamSpec("P")
R = TypeVar("R")


def _op(plain: Callable[P, R], module: str) -> Callable[P, R]:
    """A function that calls `plain`, or on a GPU the launcher of the same name in trireme.kernels.<module>."""
    launcher = cache(lambda: getattr(import_module(f"trireme.kernels.{module}"), plain.__name__))

    @wraps(plain)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        on_gpu = first.is_cuda and first.dtype != torch.float64
        return (launcher() if on_gpu else plain)(*args, **kwargs)

    return op


rmsnorm_fwd = _op(reference.rmsnorm_fwd, "rmsnorm")
rmsnorm_bwd = _op(reference.rmsnorm_bwd, "rmsnorm")
head_rmsnorm_fwd = _op(reference.head_rmsnorm_fwd, "rmsnorm")
head_rmsnorm_bwd = _op(reference.head_rmsnorm_bwd, "rmsnorm")
layernorm_fwd = _op(reference.layernorm_fwd, "layernorm")
layernorm_bwd = _op(reference.layernorm_bwd, "layernorm")
rope_ = _op(reference.rope_, "rope")
swiglu_fwd = _op(reference.swiglu_fwd, "swiglu")
swiglu_bwd = _op(reference.swiglu_bwd, "swiglu")
geglu_fwd = _op(reference.geglu_fwd, "swiglu")
geglu_bwd = _op(reference.geglu_bwd, "swiglu")
gelu_bias_fwd = _op(reference.gelu_bias_fwd, "gelu")
gelu_bias_bwd = _op(reference.gelu_bias_bwd, "gelu")
relu2_fwd = _op(reference.relu2_fwd, "gelu")
relu2_bwd = _op(reference.relu2_bwd, "gelu")
bias_bwd_ = _op(reference.bias_bwd_, "gelu")
attention_fwd = _op(attention.attention_fwd, "attention.attention")
attention_bwd = _op(attention.attention_bwd, "attention.attention")
sinks_fwd_ = _op(attention.sinks_fwd_, "attention.sinks")
sinks_bwd_ = _op(attention.sinks_bwd_, "attention.sinks")
embedding_fwd = _op(reference.embedding_fwd, "embedding")
embedding_bwd_ = _op(reference.embedding_bwd_, "embedding")
add_noise_ = _op(reference.add_noise_, "embedding")
dropout = _op(reference.dropout, "embedding")
linear_cross_entropy = _op(reference.linear_cross_entropy, "cross_entropy")
linear_cross_entropy_dweight = _op(reference.linear_cross_entropy_dweight, "cross_entropy")
linear_distillation = _op(teacher.linear_distillation, "teacher.distillation")
route_fwd = _op(experts.route_fwd, "experts.routing")
route_bwd = _op(experts.route_bwd, "experts.routing")
sort_pairs = _op(experts.sort_pairs, "experts.order")
grouped_mm = _op(experts.grouped_mm, "experts.matmuls")
grouped_add_ = _op(experts.grouped_add_, "experts.gradients")
clamped_swiglu_fwd = _op(experts.clamped_swiglu_fwd, "experts.rows")
combine = _op(experts.combine, "experts.rows")
mxfp4_decode = _op(packed.mxfp4_decode, "packed.mxfp4")
e4m3_decode = _op(packed.e4m3_decode, "packed.e4m3")
nf4_decode = _op(packed.nf4_decode, "packed.nf4")
fp4_decode = _op(packed.fp4_decode, "packed.fp4")
int4_decode = _op(packed.int4_decode, "packed.int4")
routed_swiglu_bwd = _op(experts.routed_swiglu_bwd, "experts.rows")
routed_relu2_bwd = _op(experts.routed_relu2_bwd, "experts.rows")
scan_fwd = _op(scan.scan_fwd, "scan.scan")
scan_bwd = _op(scan.scan_bwd, "scan.scan")
conv_fwd = _op(scan.conv_fwd, "scan.around")
conv_bwd = _op(scan.conv_bwd, "scan.around")
gated_norm_fwd = _op(scan.gated_norm_fwd, "scan.around")
gated_norm_bwd = _op(scan.gated_norm_bwd, "scan.around")
sigmoid_gate_fwd = _op(attention.sigmoid_gate_fwd, "attention.gate")
sigmoid_gate_bwd = _op(attention.sigmoid_gate_bwd, "attention.gate")
silu_gate_fwd = _op(attention.silu_gate_fwd, "attention.gate")
silu_gate_bwd = _op(attention.silu_gate_bwd, "attention.gate")
quantize = _op(fp8.quantize, "fp8.quantize")
quantize_experts = _op(fp8.quantize_experts, "fp8.quantize")
quantize_rows = _op(fp8.quantize_rows, "fp8.quantize")
turn = _op(fp8.turn, "fp8.quantize")
rmsnorm_codes = _op(fp8.rmsnorm_codes, "fp8.norms")
rotated_codes = _op(fp8.rotated_codes, "fp8.rotated")
swiglu_codes_fwd = _op(fp8.swiglu_codes_fwd, "fp8.gated")
swiglu_codes_bwd = _op(fp8.swiglu_codes_bwd, "fp8.gated")
geglu_codes_fwd = _op(fp8.geglu_codes_fwd, "fp8.gated")
geglu_codes_bwd = _op(fp8.geglu_codes_bwd, "fp8.gated")
fp8_matmul = _op(fp8.fp8_matmul, "fp8.matmuls")
fp8_add_ = _op(fp8.fp8_add_, "fp8.matmuls")
grad_finish = _op(reference.grad_finish, "adamw")
adamw_ = _op(reference.adamw_, "adamw")

__all__ = [
    "Docs",
    "Laid",
    "Order",
    "Quantized",
    "Rule",
    "Taught",
    "adamw_",
    "add_noise_",
    "attention_bwd",
    "attention_fwd",
    "bias_bwd_",
    "clamped_swiglu_fwd",
    "combine",
    "conv_bwd",
    "conv_fwd",
    "decay_bwd",
    "decay_fwd",
    "e4m3_decode",
    "dropout",
    "embedding_bwd_",
    "embedding_fwd",
    "gated_norm_bwd",
    "gated_norm_fwd",
    "geglu_bwd",
    "geglu_codes_bwd",
    "geglu_codes_fwd",
    "geglu_fwd",
    "gelu_bias_bwd",
    "gelu_bias_fwd",
    "grad_finish",
    "grouped_add_",
    "grouped_mm",
    "head_rmsnorm_bwd",
    "head_rmsnorm_fwd",
    "int4_decode",
    "join_master",
    "layernorm_bwd",
    "layernorm_fwd",
    "linear_cross_entropy",
    "linear_cross_entropy_dweight",
    "linear_distillation",
    "lay_docs",
    "make_docs",
    "mxfp4_decode",
    "nf4_decode",
    "place_docs",
    "fp4_decode",
    "fp8_add_",
    "fp8_matmul",
    "quantize",
    "quantize_experts",
    "quantize_rows",
    "rmsnorm_bwd",
    "rmsnorm_codes",
    "rmsnorm_fwd",
    "rope_",
    "rope_table",
    "rotated_codes",
    "route_bwd",
    "route_fwd",
    "routed_relu2_bwd",
    "routed_swiglu_bwd",
    "scan_bwd",
    "scan_fwd",
    "sigmoid_gate_bwd",
    "sigmoid_gate_fwd",
    "silu_gate_bwd",
    "silu_gate_fwd",
    "sinks_bwd_",
    "sinks_fwd_",
    "soft_cap",
    "sort_pairs",
    "split_master",
    "swiglu_bwd",
    "swiglu_codes_bwd",
    "swiglu_codes_fwd",
    "swiglu_fwd",
    "turn",
]
