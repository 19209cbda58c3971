"""Names and shapes of the models, their parameters, and FLOPs as MFU counts them."""

from dataclasses import replace

import pytest

from trireme.engine.planner.sizes import find_model
from trireme.models.config import parse_config
from trireme.models.sizes import costs, shapes
from trireme.storage.layout import pack

GPT2 = parse_config(dict(model_type="gpt2", vocab_size=50257, n_embd=768, n_layer=12, n_head=12))
LLAMA3_8B, QWEN3_30B = find_model("llama-8b"), find_model("qwen3-30b")
SMALL = dict(vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)


def test_vectors_come_last_in_a_layout():
    """So weight decay applies to a prefix; and q, k, v are neighbours."""
    layout = pack(shapes.weight_groups(LLAMA3_8B, 1), "BF16")
    dims = [len(t.shape) for t in layout.tensors]
    assert dims == sorted(dims, reverse=True)
    assert [t.name.split(".")[-2] for t in layout.tensors[:3]] == ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_attended_pairs(window):
    lengths = [1, 7, 4]
    seen = sum(1 for n in lengths for q in range(n) for k in range(q + 1) if not window or q - k < window)
    assert costs.attended_pairs(lengths, window) == seen


def test_pairs_of_a_layer_are_the_mean_over_windows():
    cfg = parse_config(SMALL | dict(model_type="olmo3", num_hidden_layers=4, sliding_window=3))
    lengths = [1, 7, 4]
    by_layer = [costs.attended_pairs(lengths, cfg.layers[i].attention.window) for i in range(4)]
    assert by_layer == [by_layer[0]] * 3 + [costs.attended_pairs(lengths)]
    assert costs.layer_pairs(cfg.layers, lengths) == sum(by_layer) // 4
    assert costs.layer_pairs(GPT2.layers, lengths) == costs.attended_pairs(lengths)


def test_model_flops_are_six_a_parameter():
    cfg = LLAMA3_8B
    vectors = (2 * 32 + 1) * 4096
    matrices = shapes.parameters(cfg) - shapes.parameters(cfg, 0) - vectors
    assert costs.model_flops(cfg, 1000, 0) == 6 * 1000 * matrices
    pairs = costs.attended_pairs([1000])
    assert costs.model_flops(cfg, 1000, pairs) - costs.model_flops(cfg, 1000, 0) == 12 * pairs * 32 * 4096


def test_a_mixture_has_the_bytes_of_all_experts_and_the_flops_of_the_chosen():
    cfg = QWEN3_30B
    embedding, vectors = 151936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    active = shapes.parameters(cfg) - embedding - vectors - 48 * 120 * 3 * 768 * 2048  # 120 of 128 are not taken
    assert costs.model_flops(cfg, 1000, 0) == 6 * 1000 * active
    assert costs.model_flops(replace(cfg, frozen=("*.mlp.*",)), 1000, 0) < 6 * 1000 * active
    assert shapes.saved_bytes(replace(cfg, halves=True), 10, 2, "mlp") == {"gate_up": 10 * 8 * 1536 * 2}


@pytest.mark.parametrize("cfg", [GPT2, LLAMA3_8B, QWEN3_30B])
def test_halves_make_a_block(cfg):
    cut = replace(cfg, halves=True)
    assert cut.n_units == 2 * cfg.n_layers + 2
    assert [shapes.layer(cut, u) for u in (1, 2, 3)] == [0, 0, 1]
    assert shapes.weight_parts(cfg, 2) == [part for v in (3, 4) for part in shapes.weight_parts(cut, v)]
    block = shapes.saved_shapes(cfg, 10)
    halves = [shapes.saved_shapes(cut, 10, kind) for kind in shapes.HALVES]
    assert halves[0] | halves[1] == {name: shape for name, shape in block.items() if name != "resid"}
    assert shapes.representatives(cut) == (0, *(1, 2) * cfg.n_layers, cut.n_units - 1)
