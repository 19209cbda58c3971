"""Linear layers: forward and backward by torch's GEMMs, or in fp8.

In fp8, x, the weight and dy are each quantized by their largest value (kernels/fp8/reference.py). A layer that needs x
only as codes can be given codes. Legend: N tokens, in and out features, K R columns of the adapters' first matmul.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models import lora


class Codes(NamedTuple):
    """A weight in E4M3, in the two orders that matmuls read."""

    forward: Tensor  # (out, in)
    backward: Tensor  # (in, out)
    scale: Tensor  # (1,) fp32


class Linear(NamedTuple):
    """A layer's weights, or their gradients: empty where a tensor is frozen."""

    weight: Tensor  # (in, out); transposed view where stored (out, in); empty where only codes are there
    bias: Tensor | None = None  # (out,)
    adapters: lora.Adapters | None = None
    fp8: bool = False  # whether the weight's matmuls are in fp8
    codes: Codes | None = None  # of the weight, in fp8; None: each matmul quantizes it

    @property
    def features(self) -> tuple[int, int]:
        """Features (in, out)."""
        rows, columns = self.weight.shape if self.codes is None else self.codes.backward.shape
        return rows, columns

    @property
    def takes_codes(self) -> bool:
        """Whether the layer needs x as codes only: in fp8, without adapters."""
        return self.fp8 and self.adapters is None


class Gradient(NamedTuple):
    """A gradient dy (N, out), prepared by `upstream` for the matmuls of backward."""

    dtype: torch.dtype
    dy: Tensor | None  # itself, where something does not read codes
    codes: ops.Quantized | None = None  # in fp8
    dh: Tensor | None = None  # (N, K R): gradient of the input of the adapters' second matmuls


Operand = Tensor | ops.Quantized  # x (N, in), or its codes for a layer that takes_codes


def columns_alone(x: Operand) -> Operand:
    """x, of whose codes only the columns remain, which gradients of weights read: the rows are freed."""
    return x if isinstance(x, Tensor) else x._replace(rows=None)


def fuse(*parts: Tensor) -> Tensor:
    """One view over neighbours in memory whose shapes differ only in the first dimension (q, k, v; gate, up)."""
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    end = first.data_ptr()
    for p in parts:
        assert p.is_contiguous()
        assert p.shape[1:] == first.shape[1:]
        assert p.data_ptr() == end or p.is_meta  # which have no addresses
        end += p.numel() * p.element_size()
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def linear(x: Operand, w: Linear, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x (N, in) @ weight + bias, (N, out), in `out` if given; of `dtype` if x is codes and there is no `out`."""
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
    """Adds times * linear(x, w) to out_ (N, out); not in fp8. Without a bias the sum is rounded once."""
    assert isinstance(x, Tensor)
    assert not w.fp8
    out_.addmm_(x, w.weight, alpha=times)
    if w.bias is not None:
        out_.add_(w.bias, alpha=times)
    if w.adapters is not None:
        lora.add_(out_, x, w.adapters, times)


def upstream(dy: Tensor | Gradient, w: Linear, g: Linear) -> Gradient:
    """Prepares dy (N, out) for linear_backward and add_gradients_: what both need is computed once."""
    if isinstance(dy, Gradient):
        return dy
    dh = None if w.adapters is None else lora.down_gradient(dy, w.adapters)
    if not w.fp8:
        return Gradient(dy.dtype, dy, None, dh)
    needed = w.bias is not None or w.adapters is not None
    return Gradient(dy.dtype, dy if needed else None, ops.quantize(dy, columns=trained(g.weight)), dh)


def linear_backward(dy: Gradient, w: Linear) -> Tensor:
    """The gradient of x (N, in), given that of the result."""
    if dy.codes is not None:
        rows = dy.codes.rows
        assert rows is not None
        dx = _matmul(dy.codes, w, False, rows.new_empty((len(rows), w.features[0]), dtype=dy.dtype))
    else:
        assert dy.dy is not None
        dx = torch.mm(dy.dy, w.weight.T)
    if w.adapters is not None:
        assert dy.dh is not None
        lora.add_backward_(dx, dy.dh, w.adapters)
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
    """(codes, scale) of a weight that may be a transposed view, in the order of its shape."""
    transposed = not weight.is_contiguous()
    codes = ops.quantize(weight.T if transposed else weight, rows=not transposed, columns=transposed)
    order = codes.columns if transposed else codes.rows
    assert order is not None
    return order, codes.scale


def add_gradients_(g: Linear, w: Linear, x: Operand, dy: Gradient) -> None:
    """Adds the gradients of the trained weights to g, given x (N, in) and the gradient of the result."""
    _, plain, codes, dh = dy
    if codes is not None and trained(g.weight):
        columns = ops.quantize(x, rows=False, columns=True) if isinstance(x, Tensor) else x
        if g.weight.is_contiguous():
            _add_codes_(g.weight, columns, codes)
        else:  # stored (out, in)
            _add_codes_(g.weight.T, codes, columns)
        del columns
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
        assert dh is not None
        for part, read in lora.inputs(x, w.adapters):
            add_matmul_(g.adapters.a[part], dh[:, part], read)
            del read
        for b, h, (start, stop) in zip(g.adapters.b, lora.scaled_down(x, w.adapters), w.adapters.columns, strict=True):
            add_matmul_(b, plain[:, start:stop], h)


def _add_codes_(grad_: Tensor, a: ops.Quantized, b: ops.Quantized) -> None:
    """grad_ (m, n) += a.T @ b of quantized a (N, m) and b (N, n)."""
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
    if (a.is_cuda or a.is_meta) and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())  # the CPU has no mixed matmul


def add_matmul_(grad_: Tensor, a: Tensor, b: Tensor) -> None:
    """grad_ (m, n) += a.T @ b; grad_ may be fp32."""
    if grad_.dtype == a.dtype:
        grad_.addmm_(a.T, b)
    elif grad_.is_cuda or grad_.is_meta:
        torch.addmm(grad_, a.T, b, out_dtype=grad_.dtype, out=grad_)
    else:  # the CPU has no mixed matmul
        grad_.addmm_(a.T.to(grad_.dtype), b.to(grad_.dtype))
