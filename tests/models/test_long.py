"""Long texts: the MLP half in tiles of rows, and contexts that are extended."""

from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch
from blocks import block_gradients
from tiny import CASES, Tiny, oracle, relative, shifted_labels

from trireme.models import shapes

TILED = ["gpt2", "llama biases", "qwen3", "granite", "gemma3", "qwen3 moe", "qwen2 moe"]


@pytest.mark.parametrize("case", TILED)
def test_tiles_are_the_mlp(case):
    """Logits, losses and gradients of the untiled half, but for rounding; a text of one tile has its bits."""
    reference, cfg = oracle(*CASES[case])
    state, lengths = reference.state_dict(), [13, 1, 20, 9]
    ids = torch.randint(cfg.vocab, (43,), generator=torch.Generator().manual_seed(1))
    labels = shifted_labels(ids, lengths)
    whole, one, many = (Tiny(replace(cfg, mlp_rows=n), state) for n in (1 << 14, 43, 8))
    losses = whole.train(ids, labels, lengths)
    assert torch.equal(one.train(ids, labels, lengths), losses)
    assert all(torch.equal(g, whole.grads[name]) for name, g in one.grads.items())
    assert relative(many.train(ids, labels, lengths), losses) < 1e-6
    for name, g in many.grads.items():
        assert relative(g, whole.grads[name]) < 1e-5 or "k_proj.bias" in name, name


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("F32", "F32"), ("BF16", "F32"), ("BF16", "BF16")])
@pytest.mark.parametrize("case", TILED)
def test_every_subset_of_saved_in_tiles(case, dtype, grad_dtype):
    """Gives the same bits, the last tile being shorter."""
    reference, cfg = oracle(*CASES[case])
    tiny = Tiny(replace(cfg, mlp_rows=8), reference.state_dict(), dtype, grad_dtype)
    mine = [name for name in shapes.saved_shapes(cfg, 1) if name not in ("qkv", "attn_out", "lse", "attn_branch")]
    out, dx, grads = block_gradients(tiny, mine)
    assert not out.isnan().any()
    assert not dx.isnan().any()
    for keep in chain.from_iterable(combinations(mine, k) for k in range(len(mine))):
        out2, dx2, grads2 = block_gradients(tiny, keep)
        assert torch.equal(out, out2), keep
        assert torch.equal(dx, dx2), keep
        assert all(torch.equal(g, grads2[name]) for name, g in grads.items()), keep
