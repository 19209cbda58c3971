"""The tasks that compute with one layer and one micro-batch, in forward and backward: one function for each kind.

Only the functions given to `compute` touch data, so a simulation runs the same code. What a task reads and writes are
its uses: the task comes after their `ready`, and `attach` is called with it, which frees buffers or starts copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trireme.engine.activations import saved_tensors
from trireme.engine.build import Engine, Inputs, Packed, Use
from trireme.engine.memory import Buffer, views
from trireme.engine.queues.task import Task
from trireme.engine.weights import UnitWeights
from trireme.models import head, model
from trireme.models.config import ModelConfig
from trireme.models.sizes import measure

# ---------------------------------------------------------------- forward


def forward_embedding(e: Engine, b: int, w: UnitWeights, mb: Inputs, train: bool) -> Task:
    """Embeds a micro-batch's tokens."""
    out = e.activations.x[1][b].fill(mb.tokens, for_backward=train)

    def forward() -> None:
        ids, rows = mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows
        head.embed_forward(weights, ids, rows, out.rows())

    weights = weights_of(e, w)
    return e.compute("forward", 0, forward, (w, out))


def forward_block(e: Engine, u: int, b: int, w: UnitWeights, mb: Inputs, train: bool) -> Task:
    """Forward of a block, or of a slice of its experts: the last slice writes the layer's output and saves
    tensors.
    """
    for_backward = train and u + 1 < e.geo.head
    x = e.activations.x[u][b].read(last=w.ends)
    out = [e.activations.x[u + 1][b].fill(mb.tokens, for_backward)] if w.ends else []
    saved = [activation.fill(mb.tokens) for activation in e.activations.saved[u][b]] if train and w.ends else []
    passed = e.activations.from_slice(u, b, w.begins, w.ends)

    def forward() -> None:
        rows, (target,) = mb.on(e.gpu(u)).rows, out or (x,)  # a slice before the last leaves x as it is
        sums = views(e.geo.passed_layout(mb.tokens), passed[0].tensor) if passed else None
        model.forward(e.cfg, u, weights, x.rows(), rows, saved_tensors(saved), target.rows(), passed=sums)

    weights = weights_of(e, w)
    flops = lambda: measure.forward_flops(e.cfg, u, mb.tokens, mb.pairs) * w.share
    task = e.compute("forward", u, forward, (w, *saved, x, *out, *passed), flops, w.name)
    if w.ends:
        e.activations.end_slices(b, task)
    return task


# ---------------------------------------------------------------- the head

Take = Callable[[int, Packed, head.HeadWeights, Tensor], object]  # (micro-batch, its tensors, head, its input (N, D))
# The same with where gradients are added: those of the head, and of its input.
TakeGradients = Callable[[int, Packed, head.HeadWeights, Tensor, head.HeadWeights, Tensor], object]


def take_head(e: Engine, b: int, w: Mapping[int, UnitWeights], mb: Inputs, take: Take) -> Task:
    """Gives the head's input of micro-batch b to `take`."""
    u, x = e.geo.head, e.activations.x[e.geo.head][b].read()

    def run() -> None:
        take(b, mb.on(e.gpu(u)), head.with_output(e.cfg, weights[u], weights.get(0)), x.rows())

    weights = {v: weights_of(e, layer) for v, layer in w.items()}
    flops = lambda: measure.forward_flops(e.cfg, u, mb.trained, mb.pairs)
    return e.compute("loss", u, run, (*w.values(), x), flops)


def loss(e: Engine, b: int, w: Mapping[int, UnitWeights], mb: Inputs, take: TakeGradients) -> Task:
    """As `take_head`, and `take` adds gradients."""
    sums = {v: e.gradients.get(v) for v in w}
    u, x, dx = e.geo.head, e.activations.x[e.geo.head][b].read(), e.activations.dx[e.geo.head][b].fill(mb.tokens)

    def run() -> None:
        top, head_grads = (head.with_output(e.cfg, tensors[u], tensors.get(0)) for tensors in (weights, grads))
        take(b, mb.on(e.gpu(u)), top, x.rows(), head_grads, dx.rows())

    weights = {v: weights_of(e, layer) for v, layer in w.items()}
    grads = {v: gradients_of(e, v, gradient) for v, gradient in sums.items()}
    counts = measure.forward_flops, measure.backward_flops
    flops = lambda: sum(count(e.cfg, u, mb.trained, mb.pairs) for count in counts)
    return e.compute("loss", u, run, (*w.values(), x, *sums.values(), dx), flops)


def head_losses(
    cfg: ModelConfig,
    packed: Packed,
    top: head.HeadWeights,
    x: Tensor,
    scale: float = 1.0,
    gradients: head.HeadWeights | None = None,
    dx: Tensor | None = None,
    parts: list[Tensor] | None = None,
) -> Tensor:
    """The losses (N,) of a micro-batch's tokens, times their factors; with `gradients` and `dx` adds gradients there.

    `parts`: with a teacher, the sums of the two parts of the losses are appended, (2,) fp64.
    """
    targets = head.Targets(packed.labels, packed.loss_rows, packed.factors, packed.shares, packed.correct)
    losses = head.head_loss(cfg, top, x, targets, scale, gradients, dx)
    losses = losses if packed.factors is None else losses * packed.factors
    if packed.shares is None or not cfg.teaching:
        return losses
    if parts is not None:
        parts.append(losses.sum(1, dtype=torch.float64))
    return torch.lerp(losses[0], losses[1], cfg.teaching.weight)


# ---------------------------------------------------------------- backward


def backward_block(e: Engine, u: int, b: int, w: UnitWeights, mb: Inputs) -> Task:
    """Backward of a block, or of a slice of its experts: the last slice reads saved tensors and writes the input's
    gradient.
    """
    gradient = e.gradients.get(u)
    x, dy = e.activations.x[u][b].read(last=w.ends), e.activations.dx[u + 1][b].read(last=w.ends)
    saved = [activation.read() for activation in e.activations.saved[u][b]] if w.ends else []
    dx = [e.activations.dx[u][b].fill(mb.tokens)] if w.ends else []
    passed = e.activations.from_slice(u, b, w.begins, w.ends)

    def backward() -> None:
        rows, (target,) = mb.on(e.gpu(u)).rows, dx or (x,)  # a slice before the last leaves x as it is
        sums = views(e.geo.passed_layout(mb.tokens), passed[0].tensor) if passed else None
        tensors = x.rows(), saved_tensors(saved), dy.rows(), rows, target.rows(), sums
        model.backward(e.cfg, u, weights, grads, *tensors)

    weights, grads = weights_of(e, w), gradients_of(e, u, gradient)
    names = frozenset(name for name, _ in e.plan.units[u].saved)
    flops = lambda: measure.backward_flops(e.cfg, u, mb.tokens, mb.pairs, names) * w.share
    uses: list[Use] = [w, gradient, x, *saved, dy, *dx, *passed]
    task = e.compute("backward", u, backward, uses, flops, w.name)
    if w.ends:
        e.activations.end_slices(b, task)
    return task


def backward_embedding(e: Engine, b: int, mb: Inputs) -> Task:
    """Adds a micro-batch's gradient to that of the embedding."""
    gradient, dy = e.gradients.get(0), e.activations.dx[1][b].read()

    def backward() -> None:
        head.embed_backward(grads, dy.rows(), mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows)

    grads = gradients_of(e, 0, gradient)
    return e.compute("backward", 0, backward, (gradient, dy))


# ---------------------------------------------------------------- tensors


def weights_of(e: Engine, part: UnitWeights) -> Any:
    """The weights of a layer in use, as model.weights gives them. None in a simulation."""
    if e.queues.simulated:
        return None
    key = part.v, *(weights.get().tensor.data_ptr() for weights in part.stored)
    if key not in e.views:
        e.views[key] = model.weights(e.cfg, part.u, part.tensors(e.geo), part.experts)
    return e.views[key]


def gradients_of(e: Engine, u: int, gradient: Buffer) -> Any:
    """The gradient sums of a layer, as model.gradients gives them. None in a simulation."""
    if e.queues.simulated:
        return None
    key = u, gradient.tensor.data_ptr()
    if key not in e.views:
        e.views[key] = model.gradients(e.cfg, u, e.gradients.tensors(u, gradient))
    return e.views[key]
