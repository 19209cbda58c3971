"""Linear layers: torch's GEMMs, or fp8, where x, weight and dy are each quantized by their largest value."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models import lora


class Codes(NamedTuple):
    """A weight in E4M3, as each matmul reads it."""

    forward: Tensor  # (out, in)
    backward: Tensor  # (in, out)
    scale: Tensor  # (1,) fp32


class Linear(NamedTuple):
    """A layer's weights, or their gradients: empty where frozen."""

    weight: Tensor  # (in, out); transposed view where stored (out, in); empty where only codes are there
    bias: Tensor | None = None  # (out,)
    adapters: lora.Adapters | None = None
    fp8: bool = False  # of the weight's matmuls
    codes: Codes | None = None  # None: made for each matmul

    @property
    def features(self) -> tuple[int, int]:
        """(in, out)."""
        rows, columns = self.weight.shape if self.codes is None else self.codes.backward.shape
        return rows, columns

    @property
    def takes_codes(self) -> bool:
        """Whether x is read as codes alone."""
        return self.fp8 and self.adapters is None


class Gradient(NamedTuple):
    """A gradient dy (N, out) for the matmuls of backward."""

    codes: ops.Quantized | None  # in fp8
    dtype: torch.dtype  # of dy
    dy: Tensor | None = None  # where not all is read as codes
    dh: Tensor | None = None  # (N, K R), of what adapters' second matmuls read


Operand = Tensor | ops.Quantized  # x, or its codes where they are all that is read
Upstream = Tensor | Gradient


def turned_alone(x: Operand) -> Operand:
    """Of codes the order that gradients read: the other one is freed."""
    return x if isinstance(x, Tensor) else x._replace(rows=None)


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


def linear(x: Operand, w: Linear, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x (N, in) @ weight + bias, (N, out), where x is codes in `out` or of `dtype`."""
    if w.fp8:
        codes = ops.quantize(x) if isinstance(x, Tensor) else x
        assert codes.rows is not None
        if out is None:
            dtype = x.dtype if isinstance(x, Tensor) else dtype
            assert dtype is not None
            out = codes.rows.new_empty((len(codes.rows), w.features[1]), dtype=dtype)
        y = _matmul(codes, w, True, out, w.bias)
    else:
        assert isinstance(x, Tensor)
        y = torch.mm(x, w.weight, out=out) if w.bias is None else torch.addmm(w.bias, x, w.weight, out=out)
    if w.adapters is not None:
        assert isinstance(x, Tensor)
        lora.add_(y, x, w.adapters)
    return y


def add_linear_(out_: Tensor, x: Operand, w: Linear, times: float) -> None:
    """out_ (N, out) += times * linear(x, w), not in fp8; without a bias the sum is rounded once."""
    assert isinstance(x, Tensor)
    assert not w.fp8
    out_.addmm_(x, w.weight, alpha=times)
    if w.bias is not None:
        out_.add_(w.bias, alpha=times)
    if w.adapters is not None:
        lora.add_(out_, x, w.adapters, times)


def upstream(dy: Upstream, w: Linear, g: Linear) -> Upstream:
    """dy (N, out) as linear_backward and add_gradients_ take it: what both read is made once, dy kept if needed."""
    if isinstance(dy, Gradient):
        return dy
    dh = None if w.adapters is None else lora.down_gradient(dy, w.adapters)
    if not w.fp8:
        return dy if dh is None else Gradient(None, dy.dtype, dy, dh)
    needed = w.bias is not None or w.adapters is not None
    return Gradient(ops.quantize(dy, columns=trained(g.weight)), dy.dtype, dy if needed else None, dh)


def _down_gradient(dy: Upstream, w: lora.Adapters) -> Tensor:
    if isinstance(dy, Gradient) and dy.dh is not None:
        return dy.dh
    assert isinstance(dy, Tensor)
    return lora.down_gradient(dy, w)


def linear_backward(dy: Upstream, w: Linear) -> Tensor:
    """Gradient (N, in) of x, given dy (N, out) from `upstream`."""
    if isinstance(dy, Gradient) and dy.codes is not None:
        rows = dy.codes.rows
        assert rows is not None
        dx = _matmul(dy.codes, w, False, rows.new_empty((len(rows), w.features[0]), dtype=dy.dtype))
    else:
        plain = dy.dy if isinstance(dy, Gradient) else dy
        assert plain is not None
        dx = torch.mm(plain, w.weight.T)
    if w.adapters is not None:
        lora.add_backward_(dx, _down_gradient(dy, w.adapters), w.adapters)
    return dx


def _matmul(a: ops.Quantized, w: Linear, forward: bool, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """Fills out with a (N, in) @ weight + bias, or with a (N, out) @ weight.T."""
    assert a.rows is not None
    if w.codes is not None:
        codes, scale = w.codes.forward if forward else w.codes.backward, w.codes.scale
    else:
        codes, scale = _codes(w.weight.T if forward else w.weight)
    return ops.fp8_matmul(a.rows, a.scale, codes, scale, out, bias)


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a weight that may be a transposed view."""
    turned = not weight.is_contiguous()
    codes = ops.quantize(weight.T if turned else weight, rows=not turned, columns=turned)
    order = codes.columns if turned else codes.rows
    assert order is not None
    return order, codes.scale


def add_gradients_(g: Linear, w: Linear, x: Operand, dy: Upstream) -> None:
    """Adds the trained weights' gradients to g, given dy from `upstream`."""
    codes, plain = (dy.codes, dy.dy) if isinstance(dy, Gradient) else (None, dy)
    if codes is not None and trained(g.weight):
        turned = ops.quantize(x, rows=False, columns=True) if isinstance(x, Tensor) else x
        if g.weight.is_contiguous():
            _add_codes_(g.weight, turned, codes)
        else:  # stored (out, in)
            _add_codes_(g.weight.T, codes, turned)
        del turned
    if plain is None:
        return
    if codes is None and trained(g.weight):
        assert isinstance(x, Tensor)
        if g.weight.is_contiguous():
            add_matmul_(g.weight, x, plain)
        else:  # stored (out, in)
            add_matmul_(g.weight.T, plain, x)
    if g.bias is not None and trained(g.bias):
        ops.bias_bwd_(g.bias, plain)
    if g.adapters is not None and w.adapters is not None:
        assert isinstance(x, Tensor)
        dh = _down_gradient(dy, w.adapters)
        for part, read in lora.inputs(x, w.adapters):
            add_matmul_(g.adapters.a[part], dh[:, part], read)
            del read  # workspace._block_workspace
        for b, h, (start, stop) in zip(g.adapters.b, lora.scaled_down(x, w.adapters), w.adapters.columns, strict=True):
            add_matmul_(b, plain[:, start:stop], h)


def _add_codes_(grad_: Tensor, a: ops.Quantized, b: ops.Quantized) -> None:
    """grad_ (m, n) += a.T @ b."""
    assert a.columns is not None
    assert b.columns is not None
    ops.fp8_add_(grad_, a.columns, a.scale, b.columns, b.scale)


def trained(gradient: Tensor) -> bool:
    """Whether the gradient is wanted: a frozen tensor's is empty."""
    return gradient.numel() > 0


def if_trained(gradient: Tensor) -> Tensor | None:
    return gradient if trained(gradient) else None


def or_scratch(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient, or for a frozen tensor a buffer to throw away."""
    return gradient if trained(gradient) else torch.zeros_like(weight)


def product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) @ b (k, n), fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())  # the CPU has no mixed matmul


def add_matmul_(grad_: Tensor, a: Tensor, b: Tensor) -> None:
    """grad_ (m, n) += a.T @ b; grad_ may be fp32."""
    if grad_.dtype == a.dtype:
        grad_.addmm_(a.T, b)
    elif grad_.is_cuda:
        torch.addmm(grad_, a.T, b, out_dtype=grad_.dtype, out=grad_)
    else:  # the CPU has no mixed matmul
        grad_.addmm_(a.T.to(grad_.dtype), b.to(grad_.dtype))
