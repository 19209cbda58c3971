"""bf16 and E4M3 in Triton's CPU interpreter, which keeps them as raw bits: casts do not round to nearest even.

`install()` mends the operations that our kernels use: casts of bf16, and of fp32 to E4M3, round to nearest even (E4M3
saturates, as on a GPU), and dots of bf16, which multiply bit patterns, take fp32 operands. Arithmetic in bf16 stays
wrong, which is why every kernel casts to fp32 on load.
"""

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _as_float(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(ml_dtypes.bfloat16).astype(np.float32)


def install() -> None:
    """Patches the interpreter's builder. Calling it twice does no harm."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "bf16_mended", False):
        return
    cast, dot, to_fp = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or tl.bfloat16 not in (source, target):
            return cast(self, src, dst_type)
        values = _as_float(src.data) if source == tl.bfloat16 else np.asarray(src.data)
        if target == tl.bfloat16:
            data = values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        else:
            data = values.astype(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(data, target)

    def create_dot(self, a, b, d, *args):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(_as_float(x.data), tl.float32) for x in (a, b))
        return dot(self, a, b, d, *args)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.float8e4nv):
            return to_fp(self, src, dst_type, rounding_mode)
        data = np.clip(src.data, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return interpreter.TensorHandle(data, dst_type.scalar)

    builder.cast_impl, builder.create_dot, builder.create_fp_to_fp = cast_impl, create_dot, create_fp_to_fp
    builder.bf16_mended = True
