"""Kernel warm-up while a checkpoint is loaded: the first unit of each kind computes on zeros.

Triton compiles for it and CUDA loads its libraries meanwhile, not under the first step. Nothing that it computes is
kept. Its buffers are the step's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trireme.engine.activations import Activation
from trireme.engine.build import Engine, Inputs
from trireme.engine.layers import Into, backward_block, backward_embedding, forward_block, forward_embedding, loss
from trireme.engine.memory import NOTHING
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
    for part in e.weights.parts(u):
        done = forward_embedding(e, 0, part, mb, train=False)
    e.activations.x[1][0].discard(done)
    _arrives(e, e.activations.dx[1][0], mb.tokens)
    backward_embedding(e, 0, mb)
    e.gradients.drop(u)


def _block(e: Engine, u: int, mb: Inputs) -> None:
    x, dx, saved = e.activations.x, e.activations.dx, e.activations.saved
    _arrives(e, x[u][0], mb.tokens, again=True)
    for part in e.weights.parts(u):
        done = forward_block(e, u, 0, part, mb, train=True)
    x[u + 1][0].discard(done)
    _arrives(e, dx[u + 1][0], mb.tokens)
    for left in (x[u][0], *saved[u][0]):
        left.queue = "h2d"
        left.fetch()
    for part in e.weights.parts(u, backward=True):
        done = backward_block(e, u, 0, part, mb)
    dx[u][0].discard(done)
    e.gradients.drop(u)


def _head(e: Engine, u: int, mb: Inputs) -> None:
    x, comparison = e.activations.x[u][0], None
    _arrives(e, x, mb.tokens, again=bool(mb.docs))
    with e.weights.of_losses([e.gpu(u)]) as w:
        g = {v: e.gradients.get(v) for v in w[e.gpu(u)]}
        if mb.docs:
            loss(e, 0, w[e.gpu(u)], mb, [NOTHING])
            x.fetch()
            factors = torch.zeros(mb.tokens, device=mb.on(e.gpu(u)).labels.device)
            comparison = Comparison(Preference("dpo"), [], factors=[factors])
        done = loss(e, 0, w[e.gpu(u)], mb, [NOTHING], into=Into(1.0, g, comparison=comparison))
    e.activations.dx[u][0].discard(done)
    for v in g:
        e.gradients.drop(v)
