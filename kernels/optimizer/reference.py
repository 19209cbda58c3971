"""The gradient's norm and AdamW in plain torch, for tests and the CPU. All implementations are bitwise equal."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.kernels.reference import upcast


def grad_finish(grad: Tensor, out: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """Sum of squares of a flat gradient, (1,) fp32, in `total` if given.

    Every implementation adds in this order: within blocks of 64 rows of 1,024 lanes, each lane adds its rows one after
    the other, in fp32; the lanes' sums, then those of the blocks in fp64, are added by halves (_halve). `out` (flat,
    bf16) receives the gradient, and the sum is then that of its rounded values. A non-finite element makes the sum
    non-finite.
    """
    if out is not None:
        grad = out.copy_(grad)
    blocks = -(-len(grad) // (64 * 1024))
    rows = min(64, len(grad) // 1024 + 1)  # of an only block: its further ones are zero
    padded = torch.nn.functional.pad(grad, (0, blocks * rows * 1024 - len(grad))).view(blocks, rows, 1024)
    lanes = upcast(padded[:, 0]).square()
    for row in padded[:, 1:].unbind(1):
        lanes += upcast(row).square()
    sums = _halve(_halve(lanes).double()).float().reshape(1)
    return sums if total is None else total.copy_(sums)


def _halve(x: Tensor) -> Tensor:
    """Sum over the last dimension, zero-padded to a power of two: the second half is added to the first, repeatedly."""
    n = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << max(n - 1, 0).bit_length()) - n))
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


NAN_BITS = 0x7FC00000


def bits_of(x: Tensor) -> Tensor:
    """The bits of fp32 values, int32. Every NaN gets NAN_BITS: other NaNs may be rounded to infinity, or to zero."""
    return torch.where(x.isnan(), NAN_BITS, x.view(torch.int32))


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Divides fp32 exactly into (hi bf16, lo int16): bits(master) = (bits(hi) << 16) + lo. Ties round away from zero.

    A NaN is NaN in hi; a value nearer to infinity than to the largest bf16 is infinity in hi.
    """
    bits = bits_of(master.contiguous())
    hi = (bits + 0x8000) >> 16
    return hi.to(torch.int16).view(torch.bfloat16), (bits - (hi << 16)).to(torch.int16)


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """Inverse of split_master."""
    return ((hi.view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)).view(torch.float32)


PARTS = ("all", "weights", "moments")  # that an update stores


def adamw_(
    w_: Tensor,
    lo_: Tensor | None,
    m_: Tensor,
    v_: Tensor,
    grad: Tensor,
    clip: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    n_decay: int,
    step: int,
    part: str = "all",
) -> None:
    """One AdamW step (Loshchilov & Hutter 2019, algorithm 2) over flat tensors (n,), in place.

    Master weights are w_ in fp32 with lo_ None, or w_ in bf16 with lo_ int16 (split_master). m_, v_ fp32; grad fp32 or
    bf16, multiplied by clip (1,) fp32. The first n_decay elements have weight decay. `step` counts from 1. `part`, one
    of PARTS, says what is stored: "weights" followed by "moments" is bitwise identical to "all". Every implementation
    computes exactly these IEEE fp32 operations, none of them fused.
    """
    f32 = lambda value: torch.tensor(value, dtype=torch.float32, device=grad.device)
    b1, b2 = f32(beta1), f32(beta2)
    step_size = f32(lr / (1 - beta1**step))
    inv_sqrt_bias2 = f32(1 / (1 - beta2**step) ** 0.5)
    master = w_ if lo_ is None else join_master(w_, lo_)
    g = grad.float() * clip
    m = b1 * m_ + f32(1 - beta1) * g
    v = b2 * v_ + f32(1 - beta2) * (g * g)
    if part != "weights":
        m_.copy_(m)
        v_.copy_(v)
    if part == "moments":
        return
    master[:n_decay] *= f32(1 - lr * weight_decay)
    root = torch.sqrt(v.double()).float()  # correctly rounded; torch's fp32 root on the CPU (MKL) is not
    denom = root * inv_sqrt_bias2 + f32(eps)
    master -= (step_size * m) / denom
    if lo_ is not None:
        hi, lo = split_master(master)
        w_.copy_(hi)
        lo_.copy_(lo)
