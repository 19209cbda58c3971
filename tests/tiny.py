"""Models small enough to hold in one memory: transformers' oracle beside our units, for the tests of models/."""

from __future__ import annotations

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trireme.engine.memory import DTYPE, views
from trireme.models import head, hf, model, shapes
from trireme.models.config import ModelConfig, parse_config
from trireme.models.rows import make_rows, rope_tables
from trireme.storage.layout import pack


def oracle(model_type: str, seed: int = 0, **keys):
    """(transformers model with random weights, biases and norms included; ModelConfig of its config.json)."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **keys)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in oracle.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() == 1 else p.shape[-1] ** -0.5))
            if "norm" in name or ".ln_" in name:
                p.add_(1.0 if name.endswith("weight") else 0.0)
    return oracle, parse_config(json.loads(config.to_json_string(use_diff=False)) | {"model_type": model_type})


class Tiny:
    """All units of a model in memory, each one flat buffer, with gradients of the same order."""

    def __init__(self, cfg: ModelConfig, state: dict[str, torch.Tensor], dtype="F32", grad_dtype=None):
        self.cfg, self.dtype = cfg, DTYPE[dtype]
        units = range(cfg.n_units)
        layouts = [pack(shapes.weight_groups(cfg, u), dtype) for u in units]
        grad_layouts = [pack(shapes.weight_groups(cfg, u), grad_dtype or dtype) for u in units]
        self.views = [views(l, torch.zeros(l.span, dtype=torch.uint8)) for l in layouts]
        self.grad_views = [views(l, torch.zeros(l.span, dtype=torch.uint8)) for l in grad_layouts]
        self.w = [model.weights(cfg, u, self.views[u]) for u in units]
        self.g = [model.weights(cfg, u, self.grad_views[u]) for u in units]
        found = hf.sources(cfg, {name: tuple(t.shape) for name, t in state.items()})
        for unit in self.views:
            for name, view in unit.items():
                view.copy_(state[found[name]])

    @property
    def grads(self) -> dict[str, torch.Tensor]:
        return {name: grad for unit in self.grad_views for name, grad in unit.items()}

    def hidden(self, ids, rows, keep=()):
        """Block inputs x[0..n_layers] and each block's saved tensors."""
        cfg, n = self.cfg, len(ids)
        xs, saves = [torch.empty(n, cfg.width, dtype=self.dtype)], []
        head.embed_forward(cfg, self.w[0], ids, rows, xs[0])
        for layer in range(cfg.n_layers):
            saves.append(empty_saved(cfg, n, self.dtype, keep))
            xs.append(torch.empty_like(xs[0]))
            model.block(cfg).forward(cfg, layer, self.w[layer + 1], xs[layer], rows, saves[-1], xs[-1])
        return xs, saves

    def logits(self, ids, lengths):
        """(N, V) of packed documents."""
        rows = self.rows(lengths)
        y = head.final_norm(self.cfg, self.w[-1], self.hidden(ids, rows)[0][-1])[0]
        return y @ model.output_matrix(self.cfg, self.w[0], self.w[-1]).T

    def rows(self, lengths):
        return make_rows(lengths, rope_tables(self.cfg, max(lengths), "cpu"), "cpu")

    def train(self, ids, labels, lengths, keep=(), scale=None):
        """Losses (N,), with the gradients of their mean over the labels added to self.grads."""
        cfg, rows, top = self.cfg, self.rows(lengths), self.cfg.n_units - 1
        loss_rows = torch.nonzero(labels >= 0)[:, 0]
        xs, saves = self.hidden(ids, rows, keep)
        dy, dx = torch.empty_like(xs[0]), torch.empty_like(xs[0])
        out, g_out = (model.output_matrix(cfg, side[0], side[top]) for side in (self.w, self.g))
        scale = 1 / len(loss_rows) if scale is None else scale
        losses = head.head_loss(cfg, self.w[top], out, xs[-1], labels, loss_rows, scale, self.g[top], g_out, dy)
        for layer in reversed(range(cfg.n_layers)):
            u = layer + 1
            model.block(cfg).backward(cfg, layer, self.w[u], self.g[u], xs[layer], saves[layer], dy, rows, dx)
            dy, dx = dx, dy
        head.embed_backward(cfg, self.g[0], dy, ids, rows)
        return losses


def empty_saved(cfg, tokens, dtype, keep):
    """Uninitialised memory for the names in `keep`, filled with NaN."""
    return {
        name: torch.full(shape, float("nan"), dtype=torch.float32 if kind == "F32" else dtype)
        for name, (shape, kind) in shapes.saved_shapes(cfg, tokens).items()
        if name in keep
    }


def shifted_labels(ids, lengths):
    """The token after each, -100 at the end of a document."""
    labels = torch.roll(ids, -1)
    labels[torch.cumsum(torch.tensor(lengths), 0) - 1] = -100
    return labels


def relative(a, b) -> float:
    """Frobenius distance of a from b, relative to b."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
