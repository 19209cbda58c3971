"""What the kernels' tests share: where they run, the oracle's precision, and frames that show a read out of bounds."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch


def correct_interpreter() -> None:
    """Casts of bf16, and of fp32 to E4M3, round to nearest even in Triton's CPU interpreter, as they do on a GPU.

    It keeps both as raw bits. E4M3 saturates; dots of bf16, which multiply bit patterns, take fp32 operands, and so do
    dots of E4M3, in which NaN would be a number. Arithmetic in bf16 stays wrong, which is why every kernel casts to
    fp32 on load. Calling it twice does no harm.
    """
    import ml_dtypes
    import triton.language as tl
    from triton.runtime import interpreter

    def as_float(data: np.ndarray, dtype: type = ml_dtypes.bfloat16) -> np.ndarray:
        return np.ascontiguousarray(data).view(dtype).astype(np.float32)

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "bf16_corrected", False):
        return
    cast, dot, to_fp = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return cast(self, src, dst_type)
        values = as_float(src.data) if source == tl.bfloat16 else np.asarray(src.data)
        if target == tl.bfloat16:
            data = values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            data = values.astype(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(data, target)

    def create_dot(self, a, b, d, *args):
        stored = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn}.get(a.dtype.scalar)
        if stored is not None:
            a, b = (interpreter.TensorHandle(as_float(x.data, stored), tl.float32) for x in (a, b))
        return dot(self, a, b, d, *args)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.float8e4nv):
            return to_fp(self, src, dst_type, rounding_mode)
        data = np.clip(src.data, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return interpreter.TensorHandle(data, dst_type.scalar)

    builder.cast_impl, builder.create_dot, builder.create_fp_to_fp = cast_impl, create_dot, create_fp_to_fp
    builder.bf16_corrected = True


def hasten_interpreter() -> None:
    """Half of its time it replaces Triton's language, and looks for what to replace, at each call of a function: here
    it does so once for all.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scope = type(interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))
    interpreter._patch_lang = lambda fn: scope()


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    correct_interpreter()
    hasten_interpreter()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled where there is a GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.bfloat16]


def on_gpu(*values):
    """A case of a GPU alone: it is slow in the interpreter, where smaller ones take the same branches."""
    return pytest.param(*values, marks=pytest.mark.gpu)


LOADS = ["drawn", "one expert has all", "some have none"]

# Relative Frobenius error against fp64 on the same inputs.
ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.4e-3}  # bf16: 1.9e-3 over many values; few values scatter
FP32_SUM = 1e-5


def error(out: torch.Tensor, oracle: torch.Tensor) -> float:
    """|out - oracle| / |oracle|, in fp64; NaN where either is."""
    out, oracle = out.double().cpu(), oracle.double().cpu()
    assert out.shape == oracle.shape
    return float((out - oracle).norm() / oracle.norm().clamp_min(1e-300))


def check(out: torch.Tensor, oracle: torch.Tensor, bound: float) -> None:
    """The error is within `bound`; NaN never is."""
    e = error(out, oracle)
    assert e <= bound, f"relative error {e:.2e} > {bound:.1e}"


def framed(t: torch.Tensor) -> torch.Tensor:
    """A copy of t inside a buffer of NaN, or 255: what is read out of bounds shows in the results."""
    margin, beside = 64, float("nan") if t.is_floating_point() else 255
    buffer = torch.full((t.numel() + 2 * margin,), beside, dtype=t.dtype, device=t.device)
    view = buffer[margin : margin + t.numel()].view(t.shape)
    view.copy_(t)
    return view


def randn(*shape: int, device: str, dtype: torch.dtype, scale: float = 1.0, outliers: bool = False) -> torch.Tensor:
    """Framed normal values; with `outliers` one in a hundred is 20 times larger."""
    t = torch.randn(shape, device=device) * scale
    if outliers:
        t = torch.where(torch.rand(shape, device=device) < 0.01, 20 * t, t)
    return framed(t.to(dtype))


def up(*tensors):
    """fp64 copies: with them reference.py is the oracle."""
    return [None if t is None else t.double() for t in tensors]


def choices(load: str, N: int, E: int, k: int, device: str) -> torch.Tensor:
    """(N, k) int32 ascending: the experts of N tokens; of "one expert has all" every first slot is the same."""
    torch.manual_seed(N + E)
    if load == "one expert has all":
        return torch.arange(E - k, E, device=device, dtype=torch.int32).repeat(N, 1)
    few = E if load == "drawn" else max(k, E // 3)
    return torch.rand(N, few, device=device).argsort(1)[:, :k].sort(1).values.int()
