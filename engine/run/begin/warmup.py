"""Kernel warm-up while a checkpoint is loaded: the first unit of each kind computes on zeros.

Triton compiles for it and CUDA loads its libraries meanwhile, not under the first step. Nothing that it computes is
kept. Its buffers are the step's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trireme.engine.activations import Activation
from trireme.engine.memory import NOTHING
from trireme.engine.step import (
    Engine,
    Inputs,
    backward_block,
    backward_embedding,
    forward_block,
    forward_embedding,
    loss,
)
from trireme.models.losses.comparison import Comparison
from trireme.models.losses.preferences import Preference
from trireme.models.sizes.shapes import layer


def warm_up(e: Engine, mb: Inputs, loaded: Iterable[int]) -> None:
    """Takes units through forward and backward in the order in which they are `loaded`. For one GPU.

    Raises what a step of the micro-batch would.
    """
    seen = set[tuple[str, bool]]()
    for u in loaded:
        form = e.geo.kinds[u], 0 < u < e.geo.head and e.cfg.layer_window(layer(e.cfg, u)) > 0
        if form not in seen:
            seen.add(form)
            {0: _embedding, e.geo.head: _head}.get(u, _block)(e, u, mb)
    e.queues.drain()


def _arrives(e: Engine, activation: Activation, tokens: int, again: bool = False) -> None:
    """An activation of zeros, sent and brought back as a step would."""
    here = activation.fill(tokens, again)
    e.compute("zero", activation.u, here.buffer.tensor.zero_, (here,))
    activation.queue = e.activations.hop_in
    activation.fetch()


def _embedding(e: Engine, u: int, mb: Inputs) -> None:
    done = forward_embedding(e, 0, e.weights.get(u), mb, train=False)
    e.activations.x[1][0].discard(done)
    e.weights.release(u)
    _arrives(e, e.activations.dx[1][0], mb.tokens)
    backward_embedding(e, 0, e.gradients.get(u), mb)
    e.gradients.drop(u)


def _block(e: Engine, u: int, mb: Inputs) -> None:
    x, dx, saved = e.activations.x, e.activations.dx, e.activations.saved
    _arrives(e, x[u][0], mb.tokens, again=True)
    for part in e.weights.parts(e.weights.get(u)):
        done = forward_block(e, u, 0, part, mb, train=True)
    x[u + 1][0].discard(done)
    e.weights.release(u)
    _arrives(e, dx[u + 1][0], mb.tokens)
    for left in (x[u][0], *saved[u][0]):
        left.queue = "h2d"
        left.fetch()
    w, gradient = e.weights.get(u, backward=True), e.gradients.get(u)
    for part in e.weights.parts(w):
        done = backward_block(e, u, 0, part, gradient, mb)
    dx[u][0].discard(done)
    e.weights.release(u)
    e.gradients.drop(u)


def _head(e: Engine, u: int, mb: Inputs) -> None:
    read = (u, 0) if e.cfg.tied else (u,)
    x, comparison = e.activations.x[u][0], None
    _arrives(e, x, mb.tokens, again=bool(mb.docs))
    w, g = {v: e.weights.get(v) for v in read}, {v: e.gradients.get(v) for v in read}
    if mb.docs:
        loss(e, 0, w, {}, mb, 1.0, [NOTHING])
        x.fetch()
        factors = torch.zeros(mb.tokens, device=mb.on(e.gpu(u)).labels.device)
        comparison = Comparison(Preference("dpo"), [], factors=[factors])
    done = loss(e, 0, w, g, mb, 1.0, [NOTHING], comparison)
    e.activations.dx[u][0].discard(done)
    for v in read:
        e.weights.release(v)
        e.gradients.drop(v)
