"""Mixtures of experts beyond the tests of every family: the load of experts, the loss that evens it, bad input."""

import pytest
import torch
from tiny import CASES, LLAMA, Tiny, oracle, own_name, relative, shifted_labels

from trireme.models.config import parse_config
from trireme.models.rows import make_load

pytestmark = pytest.mark.grid

MIXTURES = ["qwen3 moe", "qwen2 moe", "mixtral", "olmoe", "qwen3 moe among dense layers"]


@pytest.mark.parametrize("case", MIXTURES)
def test_the_loss_of_balance_is_that_of_transformers(case):
    """Pooled over layers and over both documents of the step; and its gradients."""
    reference, cfg = oracle(*CASES[case])
    length, weight = 14, 0.5
    ids = torch.randint(cfg.vocab, (2 * length,), generator=torch.Generator().manual_seed(1))
    labels = shifted_labels(ids, [length, length])
    reference.router_aux_loss_coef = weight
    found = reference(ids.view(2, length), labels=ids.view(2, length), output_router_logits=True)
    found.loss.backward()
    tiny, load = Tiny(cfg, reference.state_dict()), make_load(cfg, 2 * length, weight, "cpu")
    losses = tiny.train(ids, labels, [length, length], load=load)
    assert load.loss() == pytest.approx(float(found.aux_loss), rel=1e-5)
    assert float(losses.sum() / (labels >= 0).sum()) + weight * load.loss() == pytest.approx(
        float(found.loss), rel=1e-5
    )
    plain = Tiny(cfg, reference.state_dict())
    plain.train(ids, labels, [length, length])
    for name, p in reference.named_parameters():
        ours = own_name(cfg, name)
        assert relative(tiny.grads[ours], p.grad) < 1e-5, name
        assert f"{cfg.names.mlp.router}." not in ours or relative(plain.grads[ours], p.grad) > 1e-2


def test_the_load_counts_a_step_once_whatever_is_recomputed():
    reference, cfg = oracle(*CASES["qwen3 moe"])
    ids = torch.arange(20)
    tiny, load = Tiny(cfg, reference.state_dict()), make_load(cfg, 40, 0.0, "cpu")
    for _ in range(2):  # micro-batches
        tiny.train(ids, shifted_labels(ids, [20]), [20], load=load)
    assert load.counts.sum(1).tolist() == [2 * 20 * cfg.experts.chosen] * cfg.n_layers
    assert (load.counts % 2 == 0).all()
    assert make_load(parse_config(LLAMA | dict(model_type="llama")), 40, 0.0, "cpu") is None
