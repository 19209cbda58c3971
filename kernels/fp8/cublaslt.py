"""Matrix multiplications in fp8 whose result is added to a matrix in their epilogue: cuBLASLt, called by ctypes.

torch._scaled_mm calls the same library and adds nothing. In the library's column-major terms it computes out_.T (N, M)
+= b @ a.T, the one layout of sm_89 and sm_90. The library's heuristic chooses a kernel by shape and alignment, as for
torch; sums leave the matrix unit at intervals. The matrix that is added (C) is always the result (D): with another one
the library rounds differently, and is slower.
Legend: a (M, K) and b (N, K) E4M3, out_ (M, N).
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels.fp8.reference import E4M3

WORKSPACE = 1 << 25  # bytes at most: NVIDIA's advice for Hopper
TYPES = {torch.float32: 0, torch.bfloat16: 14, E4M3: 28}  # cudaDataType
FP32_SUMS = 68  # cublasComputeType_t
TRANSPOSE_A, SCALE_A, SCALE_B = 3, 17, 18  # cublasLtMatmulDescAttributes_t; B is not transposed: the default
MOST_BYTES, ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t; of A, B, C, D
SIGNATURES = {
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Form(NamedTuple):
    """What a matmul of fixed shapes and alignment is called with; kept until the process ends."""

    a: c_void_p  # layouts, column-major: b of the legend
    b: c_void_p  # a of the legend
    out: c_void_p
    choice: _Choice


@cache
def library() -> ctypes.CDLL:
    """cuBLASLt as torch is linked to it, found by its name among the loaded libraries."""
    assert torch.version.cuda is not None
    loaded = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    for name, types in SIGNATURES.items():
        getattr(loaded, name).argtypes = types
    return loaded


def _call(name: str, *args) -> None:
    if status := getattr(library(), name)(*args):
        raise RuntimeError(f"fp8: {name} of cuBLASLt failed with status {status}")


def _descriptor(scale_a: Tensor, scale_b: Tensor) -> c_void_p:
    """The description of a matmul with these scales, which the caller destroys."""
    handle = c_void_p()
    _call("cublasLtMatmulDescCreate", byref(handle), FP32_SUMS, TYPES[torch.float32])
    scales = c_void_p(scale_a.data_ptr()), c_void_p(scale_b.data_ptr())
    for attribute, value in zip((TRANSPOSE_A, SCALE_A, SCALE_B), (c_int32(1), *scales), strict=True):
        _call("cublasLtMatmulDescSetAttribute", handle, attribute, byref(value), ctypes.sizeof(value))
    return handle


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """The layout of a column-major matrix (rows, columns) without gaps."""
    handle = c_void_p()
    _call("cublasLtMatrixLayoutCreate", byref(handle), TYPES[dtype], rows, columns, rows)
    return handle


@cache
def _form(device: torch.device, M: int, N: int, K: int, dtype: torch.dtype, alignment: int) -> _Form:
    """For matrices whose addresses are multiples of `alignment`. Raises RuntimeError where cuBLASLt has no kernel."""
    a, b, out = _layout(E4M3, K, N), _layout(E4M3, K, M), _layout(dtype, N, M)
    preference, choice, count = c_void_p(), _Choice(), c_int()
    _call("cublasLtMatmulPreferenceCreate", byref(preference))
    limit = c_uint64(min(WORKSPACE, M * N * dtype.itemsize))
    _call("cublasLtMatmulPreferenceSetAttribute", preference, MOST_BYTES, byref(limit), 8)
    for attribute in ALIGNMENTS:
        _call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(c_uint32(alignment)), 4)
    scale = torch.ones(1, device=device)
    operation, handle = _descriptor(scale, scale), torch.cuda.current_blas_handle()
    layouts = a, b, out, out
    _call("cublasLtMatmulAlgoGetHeuristic", handle, operation, *layouts, preference, 1, byref(choice), byref(count))
    _call("cublasLtMatmulDescDestroy", operation)
    _call("cublasLtMatmulPreferenceDestroy", preference)
    if count.value == 0 or choice.status:
        raise RuntimeError(f"fp8: cuBLASLt has no kernel that adds ({M}, {K}) times ({K}, {N}) to {dtype}")
    return _Form(a, b, out, choice)


def fp8_add_(out_: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> None:
    """As reference.fp8_add_, rounded once; all contiguous, K and N multiples of 16. Raises RuntimeError on failure."""
    (M, K), N = a.shape, len(b)
    assert b.shape == (N, K)
    assert out_.shape == (M, N)
    assert a.dtype == b.dtype == E4M3
    assert all(t.is_contiguous() for t in (out_, a, b))
    if out_.is_meta:  # what it may take is counted
        torch.empty(min(WORKSPACE, M * N * out_.itemsize), dtype=torch.uint8, device=out_.device)
        return
    p_out, p_a, p_b = (t.data_ptr() for t in (out_, a, b))
    bits = p_out | p_a | p_b | 256
    form = _form(out_.device, M, N, K, out_.dtype, bits & -bits)
    operation, unit = _descriptor(scale_b, scale_a), c_float(1)
    workspace = torch.empty(form.choice.workspace, dtype=torch.uint8, device=out_.device)
    handle, stream = torch.cuda.current_blas_handle(), torch._C._cuda_getCurrentRawStream(out_.get_device())
    _call("cublasLtMatmul", handle, operation, byref(unit), p_b, form.a, p_a, form.b, byref(unit), p_out, form.out,
          p_out, form.out, byref(form.choice), workspace.data_ptr(), len(workspace), stream)  # fmt: skip
    _call("cublasLtMatmulDescDestroy", operation)
