"""A rehearsal while a checkpoint is loaded: the first unit of each form computes on zeros as soon as it is there.

Triton compiles for it and CUDA loads its libraries meanwhile, not under the first step. Nothing that it computes is
kept. Its buffers are the step's.
"""

from __future__ import annotations

from collections.abc import Iterable

from trireme.engine.activations import Activation
from trireme.engine.lanes.task import Task
from trireme.engine.memory import NOTHING, OnGpu
from trireme.engine.step import (
    Engine,
    Inputs,
    backward_block,
    backward_embedding,
    forward_block,
    forward_embedding,
    loss,
)
from trireme.models.sizes.shapes import layer


def rehearse(e: Engine, mb: Inputs, loaded: Iterable[int]) -> None:
    """Takes units through forward and backward in the order in which they are `loaded`. For one GPU.

    Raises what a step of the micro-batch would.
    """
    seen = set[tuple[str, bool]]()
    for u in loaded:
        form = e.geo.kinds[u], 0 < u < e.geo.head and e.cfg.layer_window(layer(e.cfg, u)) > 0
        if form not in seen:
            seen.add(form)
            {0: _embedding, e.geo.head: _head}.get(u, _block)(e, u, mb)
    e.lanes.drain()


def _arrives(e: Engine, activation: Activation, tokens: int) -> OnGpu:
    """A span of zeros, sent and brought back as a step would."""
    swap = e.activations
    here = swap.open(activation)
    done = e.compute("zero", activation.u, here.buffer.zero_, here.ready)
    swap.send(activation, tokens, done)
    swap.prefetch([activation], tokens, swap.hop_in)
    return swap.get(activation)


def _leaves(e: Engine, activation: Activation, done: Task) -> None:
    """Frees what no unit reads."""
    if activation in e.activations.here:
        e.activations.release(activation, done)


def _embedding(e: Engine, u: int, mb: Inputs) -> None:
    target = e.activations.x(1, 0)
    done = forward_embedding(e, e.weights.get(u), mb, e.activations.open(target))
    _leaves(e, target, done)
    e.weights.release(u, done)
    _arrives(e, e.activations.dx(1, 0), mb.tokens)
    e.gradients.drop(u, backward_embedding(e, 0, e.gradients.get(u), mb))


def _block(e: Engine, u: int, mb: Inputs) -> None:
    swap, target = e.activations, e.activations.x(u + 1, 0)
    _arrives(e, swap.x(u, 0), mb.tokens)
    done = forward_block(e, u, 0, e.weights.get(u), mb, swap.open(target), train=True)
    _leaves(e, target, done)
    e.weights.release_in_forward(u, done, train=True)
    _arrives(e, swap.dx(u + 1, 0), mb.tokens)
    swap.prefetch([swap.x(u, 0), *swap.saved(u, 0)], mb.tokens)
    done = backward_block(e, u, 0, e.weights.get(u, backward=True), e.gradients.get(u), mb)
    _leaves(e, swap.dx(u, 0), done)
    e.weights.release(u, done)
    e.gradients.drop(u, done)


def _head(e: Engine, u: int, mb: Inputs) -> None:
    read = (u, 0) if e.cfg.tied else (u,)
    _arrives(e, e.activations.x(u, 0), mb.tokens)
    w, g = {v: e.weights.get(v) for v in read}, {v: e.gradients.get(v) for v in read}
    done = loss(e, 0, w, g, mb, 1.0, [NOTHING])
    _leaves(e, e.activations.dx(u, 0), done)
    for v in read:
        e.weights.release(v, done)
        e.gradients.drop(v, done)
