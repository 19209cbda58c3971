"""Linear layers on top of torch's GEMMs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models import lora


class Linear(NamedTuple):
    """A layer's weights, or their gradients: empty where frozen."""

    weight: Tensor  # (in, out); transposed view where stored (out, in)
    bias: Tensor | None = None  # (out,)
    adapters: lora.Adapters | None = None


def fuse(*parts: Tensor) -> Tensor:
    """One view over neighbours in memory that differ in their first dimension (q, k, v; gate, up)."""
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    end = first.data_ptr()
    for p in parts:
        assert p.is_contiguous()
        assert p.shape[1:] == first.shape[1:]
        assert p.data_ptr() == end
        end += p.numel() * p.element_size()
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def linear(x: Tensor, w: Linear, out: Tensor | None = None) -> Tensor:
    """x (N, in) @ weight + bias, (N, out)."""
    y = torch.mm(x, w.weight, out=out) if w.bias is None else torch.addmm(w.bias, x, w.weight, out=out)
    if w.adapters is not None:
        lora.add_(y, x, w.adapters)
    return y


def linear_backward(dy: Tensor, w: Linear) -> Tensor:
    """Gradient (N, in) of x, given dy (N, out)."""
    dx = torch.mm(dy, w.weight.T)
    if w.adapters is not None:
        dx.addmm_(lora.down_gradient(dy, w.adapters), w.adapters.a)
    return dx


def add_gradients_(g: Linear, w: Linear, x: Tensor, dy: Tensor) -> None:
    """Adds the trained weights' gradients to g."""
    if trained(g.weight):
        if g.weight.is_contiguous():
            add_product_(g.weight, x, dy)
        else:  # stored (out, in)
            add_product_(g.weight.T, dy, x)
    if g.bias is not None and trained(g.bias):
        ops.bias_bwd_(g.bias, dy)
    if g.adapters is not None and w.adapters is not None:
        add_product_(g.adapters.a, lora.down_gradient(dy, w.adapters), x)
        down = torch.mm(x, w.adapters.a.T).mul_(w.adapters.scale).split(len(w.adapters.a) // len(w.adapters.b), 1)
        for b, h, (start, stop) in zip(g.adapters.b, down, w.adapters.columns, strict=True):
            add_product_(b, dy[:, start:stop], h)


def trained(gradient: Tensor) -> bool:
    """Whether the gradient is wanted: a frozen tensor's is empty."""
    return gradient.numel() > 0


def or_scratch(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient, or for a frozen tensor a buffer to throw away."""
    return gradient if trained(gradient) else torch.zeros_like(weight)


def add_product_(grad_: Tensor, a: Tensor, b: Tensor) -> None:
    """grad_ (m, n) += a.T @ b; grad_ may be fp32."""
    if grad_.dtype == a.dtype:
        grad_.addmm_(a.T, b)
    elif grad_.is_cuda:
        torch.addmm(grad_, a.T, b, out_dtype=grad_.dtype, out=grad_)
    else:  # the CPU has no mixed product
        grad_.addmm_(a.T.to(grad_.dtype), b.to(grad_.dtype))
