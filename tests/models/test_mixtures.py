"""Mixtures of experts beyond the tests of every family: the load of experts, the loss that evens it, bad input."""

import pytest
import torch
from tiny import CASES, LLAMA, MIXTURE, OSS, YARN, Tiny, oracle, own_name, relative, shifted_labels

from trireme.models import hf
from trireme.models.config import InputError, parse_config
from trireme.models.rows import make_load
from trireme.models.sizes import shapes

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


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (dict(num_experts_per_tok=7), '"num_experts_per_tok" is 7, more than the 6 of "num_experts"'),
        (dict(num_experts=0), '"num_experts" is 0, expected a positive integer'),
        (dict(decoder_sparse_step=3), '"decoder_sparse_step" and "mlp_only_layers" leave no layer with experts'),
        (dict(mlp_only_layers=0.5), '"mlp_only_layers" is 0.5, expected a list of layers'),
        (dict(model_type="glm4_moe", partial_rotary_factor=1.0, n_group=2), '"n_group": 2 is not supported'),
        (
            dict(model_type="glm4_moe", partial_rotary_factor=1.0, first_k_dense_replace=2),
            '"first_k_dense_replace" is 2, expected an integer',
        ),
        (dict(use_sliding_window=True), '"use_sliding_window": true is not supported'),
        (dict(quantization_config=dict(quant_method="aqlm")), "quantization_config.*aqlm.*is not supported"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(router_aux_loss_coef=-1), "router_aux_loss_coef.*expected a positive number"),
    ],
)
def test_what_is_not_supported_is_named(keys, words):
    with pytest.raises(InputError, match=words):
        parse_config(dict(model_type="qwen3_moe") | MIXTURE | keys)


def test_the_rope_of_gpt_oss_must_be_said():
    """transformers would take YaRN."""
    with pytest.raises(InputError, match='"rope_parameters" is null, expected an object'):
        parse_config(
            {key: value for key, value in OSS.items() if key != "rope_parameters"} | dict(model_type="gpt_oss")
        )


def test_the_names_and_parameters_of_gpt_oss():
    """As published: 20.9 B and 116.8 B."""
    for layers, experts, expected in ((24, 32, 20_914_757_184), (36, 128, 116_829_156_672)):
        keys = dict(
            rope_scaling=YARN, vocab_size=201088, hidden_size=2880, num_hidden_layers=layers, num_attention_heads=64
        )
        cfg = parse_config(keys | dict(model_type="gpt_oss", intermediate_size=2880, num_local_experts=experts))
        names = shapes.stored_tensors(cfg)
        assert hf.sources(cfg, names) == {name: name for name in names}
        assert shapes.parameters(cfg) == expected
        assert [own.attention.window for own in cfg.layers[:2]] == [128, 0]
