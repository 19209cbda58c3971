"""An expert that processes every token, in addition to the selected ones (experts.py).

    out = x + s * ((act(gate) * up) @ down),  (gate, up) = y @ up,  s = sigmoid(y @ gate of its own), or Experts.factor
    out = x + s * (act(y @ up) @ down)                          without a gate of the activation

Legend: N tokens, D width, S hidden width. Saved: shared_up (N, 2S), or (N, S).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.kernels import ops
from trireme.models.families.experts import Experts
from trireme.models.linear import (
    Linear,
    Operand,
    add_gradients_,
    add_matmul_,
    columns_alone,
    linear,
    linear_backward,
    trained,
    upstream,
)
from trireme.models.reader import Reader
from trireme.models.rows import Pass


class SharedWeights(NamedTuple):
    """Weights of the shared expert, or their gradients: empty where a tensor is frozen."""

    up: Linear  # (D, 2S), gate first, or (D, S)
    down: Linear  # (S, D)
    gate: Tensor | None  # (1, D)


def weights(read: Reader) -> SharedWeights:
    names = read.layer.mlp_names
    return SharedWeights(read.linear(*names.up), read.linear(names.down), read.get(f"{names.shared_gate}.weight"))


def forward(p: Pass, spec: Experts, w: SharedWeights, x: Tensor, y: Tensor, out: Tensor) -> None:
    """Fills out (N, D), which may be x, given x (N, D) and y = norm(x) (N, D)."""
    up = linear(y, w.up, p.saved.get("shared_up"))
    act = ops.act_fwd(up, _act(spec))
    del up
    ops.combine(linear(act, w.down), _each(x), 1, _weights(spec, w, y), x, out)


def backward(
    p: Pass, spec: Experts, w: SharedWeights, g: SharedWeights, y: Tensor, dy: Tensor, d_norm_: Tensor
) -> None:
    """Adds the gradient of y to d_norm_ and those of the weights to g, given dy (N, D)."""
    again = "shared_up" not in p.saved
    read: Operand = ops.quantize(y, columns=trained(g.up.weight)) if again and w.up.takes_codes else y
    up = linear(read, w.up, dtype=y.dtype) if again else p.saved["shared_up"]
    read = columns_alone(read)
    s = _weights(spec, w, y)
    d_down = upstream(dy, w.down, g.down)
    act, dup = linear_backward(d_down, w.down), up
    ds = ops.act_bwd_(act, dup, _act(spec), weights=s, order=_each(y))
    assert ds is not None
    del up
    add_gradients_(g.down, w.down, act, d_down)
    del act, d_down
    d_up = upstream(dup, w.up, g.up)
    del dup
    add_gradients_(g.up, w.up, read, d_up)
    del read
    if w.gate is not None and g.gate is not None:
        d_gate = (ds * s * (1 - s)).to(y.dtype)
        if trained(g.gate):
            add_matmul_(g.gate, d_gate, y)
        d_norm_.addmm_(d_gate, w.gate)
    d_norm_.add_(linear_backward(d_up, w.up))


def _act(spec: Experts) -> ops.Act:
    return ops.Act(spec.act, spec.gated)


def _weights(spec: Experts, w: SharedWeights, y: Tensor) -> Tensor:
    """The weight s of each token, (N, 1) fp32."""
    if w.gate is None:
        return torch.full((len(y), 1), spec.factor, dtype=torch.float32, device=y.device)
    return torch.sigmoid(torch.mm(y, w.gate.T).float())


def _each(x: Tensor) -> ops.Order:
    """An Order of rows that are in the order of their tokens, one each."""
    rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
    return ops.Order(rows, rows, rows[:0])
