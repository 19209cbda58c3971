"""The tasks that compute with one layer and one micro-batch, in forward and backward: one function for each kind.

Only the functions given to `compute` touch data, so a simulation runs the same code. What a task reads and writes are
its uses: the task comes after their `ready`, and their `done` is called with it, which frees buffers or starts copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.engine.activations import saved_tensors
from trireme.engine.build import Engine, Inputs
from trireme.engine.memory import NOTHING, Buffer, Use, flat
from trireme.engine.queues.task import Task
from trireme.engine.weights import LayerPart, LayerWeights
from trireme.models import head, model
from trireme.models.losses.comparison import Comparison
from trireme.models.sizes import costs

# ---------------------------------------------------------------- forward


def forward_embedding(e: Engine, b: int, w: LayerPart, mb: Inputs, train: bool) -> Task:
    """Embeds a micro-batch's tokens."""
    out = e.activations.x[1][b].fill(mb.tokens, again=train)

    def forward() -> None:
        ids, rows = mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows
        head.embed_forward(weights, ids, rows, out.rows())

    weights = weights_of(e, w)
    return e.compute("forward", 0, forward, (w, out))


def forward_block(e: Engine, u: int, b: int, w: LayerPart, mb: Inputs, train: bool, twice: bool = False) -> Task:
    """Forward of a block, or of a slice of its experts: the last slice writes the layer's output and saves tensors.

    `twice`: the head reads its input two times.
    """
    again = train and (u + 1 < e.geo.head or twice)
    x = e.activations.x[u][b].read(last=w.ends)
    out = [e.activations.x[u + 1][b].fill(mb.tokens, again)] if w.ends else []
    saved = [each.fill(mb.tokens) for each in e.activations.saved[u][b]] if train and w.ends else []
    passed = e.activations.from_slice(u, b, mb.tokens, w.begins, w.ends)

    def forward() -> None:
        rows, (onto,) = mb.on(e.gpu(u)).rows, out or (x,)  # a slice before the last leaves x as it is
        kept, sums = saved_tensors(saved), passed[0].tensors() if passed else None
        model.forward(e.cfg, u, weights, x.rows(), rows, kept, onto.rows(), passed=sums)

    weights = weights_of(e, w)
    flops = costs.forward_flops(e.cfg, u, mb.tokens, mb.pairs) * w.share
    return e.compute("forward", u, forward, (w, *saved, x, *out, *passed), flops, w.name)


# ---------------------------------------------------------------- the head

# Where several GPUs compute the losses, all micro-batches still add to one sum of the head's gradients. It is copied
# from GPU to GPU in the order of micro-batches, so that the additions are those of one GPU. A loss does not wait for
# the sum; only the GEMM that adds to it does (`add_gradients`).
GRADIENT = "gradient"  # in the name of that GEMM's task


class Left(NamedTuple):
    """What `loss` computes for `add_gradients`, where the sum of the head's gradient is on another GPU at first."""

    dlogits: Buffer  # (M, V)
    norm: list[head.HeadWeights]  # the final norm's gradient: `loss` appends it, `add_gradients` takes it

    def logits(self, e: Engine, mb: Inputs) -> Tensor:
        vocab = e.cfg.vocab
        return flat(self.dlogits.tensor, e.geo.dtype, mb.trained * vocab).view(mb.trained, vocab)


class Into(NamedTuple):
    """Where the gradients of `scale` times the sum of losses go: they are added to `g` or, of the head, left for
    `add_gradients`.
    """

    scale: float
    g: Mapping[int, Buffer]  # sums, by unit
    left: Left | None = None
    comparison: Comparison | None = None  # has the losses' factors
    compared: Sequence[Task] = ()  # makes them


def loss(
    e: Engine,
    b: int,
    w: Mapping[int, LayerWeights],
    mb: Inputs,
    losses: list[Tensor],
    parts: list[Tensor] | None = None,
    into: Into | None = None,
) -> Task:
    """Sets `losses[b]` to the losses of micro-batch b's tokens, times their factors; with `into` computes gradients,
    too.

    `parts`: as of `evaluate`. The task's result, where several GPUs compute losses, is the number of labels that were
    the most likely token, (1,); else None.
    """
    u, gpu = e.geo.head, e.plan.loss_gpu(b)
    scale, g, left, comparison, compared = into or Into(1.0, {})
    x = e.activations.x[u][b].read(last=left is None)
    dx = e.activations.dx[u][b].fill(mb.tokens) if into else None
    place = _place(e, mb, parts)

    def add() -> Tensor | None:
        at, out = mb.on(gpu), dx.rows() if dx else None
        top = head.with_output(e.cfg, weights[u], weights.get(0))
        own = head.with_output(e.cfg, grads[u], grads.get(0)) if g else None
        factors = comparison.factors[b] if comparison else at.factors
        correct = None if comparison else at.correct
        more = None if correct is None or not e.plan.losses else torch.zeros_like(correct, device=at.labels.device)
        dlogits = left.logits(e, mb) if left else None
        if left:
            own = head.norm_sums(top, torch.float32 if e.plan.sums_wide else x.rows().dtype)
            left.norm.append(own)
        counts = correct if more is None else more
        given = top, x.rows(), at.labels, at.loss_rows, scale
        found = head.head_loss(e.cfg, *given, own, out, factors, at.shares, counts, dlogits)
        found = found if factors is None else found * factors
        if at.shares is not None and e.cfg.teaching:
            if parts is not None:
                parts[place] = found.sum(1, dtype=torch.float64)
            found = torch.lerp(found[0], found[1], e.cfg.teaching.weight)
        losses[b] = found
        return more

    weights = {v: weights_of(e, layer) for v, layer in w.items()}
    grads = {v: gradients_of(e, v, gradient) for v, gradient in g.items()}
    once, back = (count(e.cfg, u, mb.trained, mb.pairs) for count in (costs.forward_flops, costs.backward_flops))
    flops = once + (once if left else back if g else 0)
    uses: list[Use] = [*w.values(), x, *g.values(), *([dx] if dx else []), *([left.dlogits] if left else [])]
    return e.compute("loss", u, add, uses, flops, gpu=gpu, after=compared)


def add_gradients(
    e: Engine, b: int, w: Mapping[int, LayerWeights], g: Mapping[int, Buffer], mb: Inputs, left: Left
) -> Task:
    """Adds the head's gradients of micro-batch b, from what its `loss` left, to `g`."""
    u, gpu = e.geo.head, e.plan.loss_gpu(b)
    x = e.activations.x[u][b].read()

    def add() -> None:
        total = head.with_output(e.cfg, grads[u], grads.get(0))
        given = weights[u], x.rows(), mb.on(gpu).loss_rows, left.logits(e, mb), left.norm.pop()
        head.head_gradients(e.cfg, *given, total)

    weights = {v: weights_of(e, layer) for v, layer in w.items()}
    grads = {v: gradients_of(e, v, gradient) for v, gradient in g.items()}
    once, back = (count(e.cfg, u, mb.trained, mb.pairs) for count in (costs.forward_flops, costs.backward_flops))
    uses: tuple[Use, ...] = (*w.values(), x, *g.values(), left.dlogits)
    done = e.compute("loss", u, add, uses, back - once, f"{e.geo.names[u]} {GRADIENT}", gpu)
    left.dlogits.free((done,))
    return done


def _place(e: Engine, mb: Inputs, parts: list[Tensor] | None) -> int:
    """The index in `parts` for a micro-batch with a teacher: they are in the order of micro-batches."""
    if parts is not None and e.cfg.teaching and mb.packed and mb.packed[0].shares is not None:
        parts.append(NOTHING)
    return len(parts or ()) - 1


# ---------------------------------------------------------------- backward


def backward_block(e: Engine, u: int, b: int, w: LayerPart, mb: Inputs) -> Task:
    """Backward of a block, or of a slice of its experts: the last slice reads saved tensors and writes the input's
    gradient.
    """
    gradient = e.gradients.get(u)
    x, dy = e.activations.x[u][b].read(last=w.ends), e.activations.dx[u + 1][b].read(last=w.ends)
    saved = [each.read() for each in e.activations.saved[u][b]] if w.ends else []
    dx = [e.activations.dx[u][b].fill(mb.tokens)] if w.ends else []
    passed = e.activations.from_slice(u, b, mb.tokens, w.begins, w.ends)

    def backward() -> None:
        rows, (onto,) = mb.on(e.gpu(u)).rows, dx or (x,)  # a slice before the last leaves x as it is
        kept, sums = saved_tensors(saved), passed[0].tensors() if passed else None
        given = x.rows(), kept, dy.rows(), rows, onto.rows(), sums
        model.backward(e.cfg, u, weights, grads, *given)

    weights, grads = weights_of(e, w), gradients_of(e, u, gradient)
    kept = frozenset(name for name, _ in e.plan.units[u].saved)
    flops = costs.backward_flops(e.cfg, u, mb.tokens, mb.pairs)
    flops += costs.recompute_flops(e.cfg, kept, mb.tokens, mb.pairs, e.geo.kinds[u])
    uses = w, gradient, x, *saved, dy, *dx, *passed
    return e.compute("backward", u, backward, uses, flops * w.share, w.name)


def backward_embedding(e: Engine, b: int, mb: Inputs) -> Task:
    """Adds a micro-batch's gradient to that of the embedding."""
    gradient, dy = e.gradients.get(0), e.activations.dx[1][b].read()

    def backward() -> None:
        head.embed_backward(grads, dy.rows(), mb.on(e.gpu(0)).ids, mb.on(e.gpu(0)).rows)

    grads = gradients_of(e, 0, gradient)
    return e.compute("backward", 0, backward, (gradient, dy))


# ---------------------------------------------------------------- tensors


def weights_of(e: Engine, part: LayerPart) -> Any:
    """The weights of a layer in use, as model.weights gives them. None in a simulation."""
    if e.queues.simulated:
        return None
    key = part.u, part.own.start if part.own else 0, *(frozen.get().tensor.data_ptr() for frozen in part.stored)
    if key not in e.views:
        e.views[key] = model.weights(e.cfg, part.u, part.tensors(e.geo), part.own)
    return e.views[key]


def gradients_of(e: Engine, u: int, gradient: Buffer) -> Any:
    """The gradient sums of a layer, as model.gradients gives them. None in a simulation."""
    if e.queues.simulated:
        return None
    key = u, gradient.tensor.data_ptr()
    if key not in e.views:
        e.views[key] = model.gradients(e.cfg, u, e.gradients.tensors(u, gradient))
    return e.views[key]
