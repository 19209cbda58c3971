"""Linear layers on top of torch's GEMMs. `weight` is (in, out), as a view where the checkpoint stores (out, in)."""

from __future__ import annotations

import torch
from torch import Tensor


def fuse(*parts: Tensor) -> Tensor:
    """One view over neighbours of a flat buffer that differ in their first dimension only (q, k, v; gate, up)."""
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    end = first.data_ptr()
    for p in parts:
        assert p.is_contiguous()
        assert p.shape[1:] == first.shape[1:]
        assert p.data_ptr() == end
        end += p.numel() * p.element_size()
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x (N, in) @ weight + bias -> (N, out), into `out` where given."""
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def add_linear_(out_: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """out_ (N, out) += x (N, in) @ weight + bias, rounded once without a bias."""
    out_.addmm_(x, weight)
    return out_ if bias is None else out_.add_(bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, out: Tensor | None = None) -> Tensor:
    """residual (N, out) + x @ weight + bias, into `out` where given. Without a bias the sum is rounded once."""
    if bias is None:
        return torch.addmm(residual, x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out).add_(residual)


def add_product_(grad_: Tensor, a: Tensor, b: Tensor) -> None:
    """grad_ (m, n) += a.T @ b for a (N, m), b (N, n): a weight's gradient, in the dtype of a and b or in fp32."""
    if grad_.dtype == a.dtype:
        grad_.addmm_(a.T, b)
    elif grad_.is_cuda:
        torch.addmm(grad_, a.T, b, out_dtype=grad_.dtype, out=grad_)
    else:  # no mixed product on the CPU
        grad_.addmm_(a.T.to(grad_.dtype), b.to(grad_.dtype))
