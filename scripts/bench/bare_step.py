"""A training step of plain kernel calls, on the GPU."""

from __future__ import annotations

import torch

from trireme.engine.activations import Activation
from trireme.engine.memory import flat, views
from trireme.engine.optimizer import StepStats
from trireme.engine.step import Engine
from trireme.kernels import ops
from trireme.models import head, model


def bare_step(e: Engine, batch, step: int, lr: float) -> StepStats:
    """A step in the engine's buffers, without lanes, tasks or rings."""
    cfg, geo, homes = e.cfg, e.geo, e.homes
    w = [model.weights(cfg, u, views(geo.weights[u], homes.weights[u])) for u in range(geo.n_units)]
    fixed = e.activations.fixed
    x = lambda u, b: flat(fixed[Activation(u, b, "x", "gpu")], geo.dtype, batch[b].tokens * cfg.width).view(
        -1, cfg.width
    )
    saved = lambda u, b: (
        views(
            geo.saved_layout(u, e.plan.units[u].names("gpu"), batch[b].tokens), fixed[Activation(u, b, "saved", "gpu")]
        )
        if e.plan.units[u].saved
        else {}
    )
    wide = e.gradients.wide
    for b, mb in enumerate(batch):
        head.embed_forward(w[0], mb.on_device.ids, mb.on_device.rows, x(1, b))
    for u in range(1, geo.head):
        for b, mb in enumerate(batch):
            model.forward(cfg, u, w[u], x(u, b), mb.on_device.rows, saved(u, b), x(u + 1, b))

    sums = torch.zeros(geo.first_stretch[-1], device=e.memory.device)

    def gradient(u: int):
        buffer = e.gradients.accumulator.slots[0].buffer
        buffer.zero_()
        return buffer, model.weights(cfg, u, views(wide[u], buffer))

    def finish(u: int, buffer) -> None:
        wide_flat = flat(buffer, wide[u].tensors[0].dtype, geo.numel[u])
        out = flat(homes.gradients[u], geo.dtype, geo.numel[u])
        for a, b, i in geo.pieces(u, geo.numel[u])[0]:
            sums[geo.first_stretch[u] + i] = ops.grad_finish(wide_flat[a:b], out=out[a:b])[0]

    buffer, g = gradient(geo.head)
    trained = sum(mb.trained for mb in batch)
    dx = [torch.empty_like(x(1, b)) for b in range(len(batch))]
    losses = [
        head.head_loss(
            cfg,
            w[-1],
            w[-1].output,
            x(geo.head, b),
            mb.on_device.labels,
            mb.on_device.loss_rows,
            1 / trained,
            g,
            g.output,
            dx[b],
        )
        for b, mb in enumerate(batch)
    ]
    finish(geo.head, buffer)
    other = torch.empty_like(dx[0])
    for u in range(geo.head - 1, 0, -1):
        buffer, g = gradient(u)
        for b, mb in enumerate(batch):
            model.backward(cfg, u, w[u], g, x(u, b), saved(u, b), dx[b], mb.on_device.rows, other)
            dx[b], other = other, dx[b]
        finish(u, buffer)
    buffer, g = gradient(0)
    for b, mb in enumerate(batch):
        head.embed_backward(g, dx[b], mb.on_device.ids, mb.on_device.rows)
    finish(0, buffer)
    norm = sums.double().sum().sqrt()
    clip = torch.clamp(1.0 / (norm + 1e-6), max=1.0).float().reshape(1)
    hyper = dict(lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, step=step)
    for u in range(geo.n_units):
        for r, (a, b) in enumerate(geo.records(u, e.plan.record)):
            s = views(geo.state_layout(b - a), homes.state[u][r])
            hi, grad = (flat(t, geo.dtype, b)[a:] for t in (homes.weights[u], homes.gradients[u]))
            n_decay = min(max(geo.n_decay[u] - a, 0), b - a)
            ops.adamw_(hi, s.get("lo"), s["m"], s["v"], grad, clip, n_decay=n_decay, **hyper)
    total = sum(part.double().sum() for part in losses) / trained
    return StepStats(float(total), float(norm), float(clip))
