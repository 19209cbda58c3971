"""What the tests of blocks ask of one: every subset of saved tensors, and inputs that stay as they were."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import torch
from tiny import Tiny, empty_saved, oracle

from trireme.models import model
from trireme.models.sizes import shapes

LENGTHS = [7, 1, 12]


def block_gradients(tiny: Tiny, keep):
    """(out, dx, gradients) of the second block with the names of `keep` saved."""
    cfg, n = tiny.cfg, sum(LENGTHS)
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(n, cfg.width, generator=generator).to(tiny.dtype) for _ in range(2))
    before = x.clone(), dy.clone()
    out, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    u, rows = 2, tiny.rows(LENGTHS)
    saved = empty_saved(cfg, n, tiny.dtype, keep)
    model.forward(cfg, u, tiny.w[u], x, rows, saved, out)
    kept = {name: t.clone() for name, t in saved.items()}
    for grad in tiny.grad_views[u].values():
        grad.fill_(0.25)  # gradients are added to what is there
    model.backward(cfg, u, tiny.w[u], tiny.g[u], x, saved, dy, rows, dx)
    assert torch.equal(x, before[0])
    assert torch.equal(dy, before[1])
    assert all(torch.equal(t, kept[name]) for name, t in saved.items() if not name.endswith(("up", "fc")))  # consumed
    return out, dx, {name: t.clone() for name, t in tiny.grad_views[u].items()}


def check_every_subset(
    model_type: str, dtype: str, grad_dtype: str, fp8: bool = False, few: bool = False, **keys
) -> None:
    """All subsets of the saved names give the same bits; of `few`, those of none, one, all but one and all."""
    reference, cfg = oracle(model_type, keys)
    names = list(shapes.saved_shapes(cfg, 1))
    assert 4 <= len(names) <= 8
    check_subsets(Tiny(replace(cfg, fp8=fp8), reference.state_dict(), dtype, grad_dtype), names, few)


def check_subsets(tiny: Tiny, names: list[str], few: bool = False) -> None:
    out, dx, grads = block_gradients(tiny, names)
    assert not out.isnan().any()
    assert not dx.isnan().any()
    sizes = {0, 1, len(names) - 1, len(names)} if few else range(len(names) + 1)
    for keep in chain.from_iterable(combinations(names, k) for k in sizes):
        out2, dx2, grads2 = block_gradients(tiny, keep)
        assert torch.equal(out, out2), keep
        assert torch.equal(dx, dx2), keep
        assert all(torch.equal(g, grads2[name]) for name, g in grads.items()), keep
