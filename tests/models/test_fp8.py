"""Blocks in fp8: which matmuls are, the error that the format leaves, the same bits whatever is saved."""

from dataclasses import replace

import pytest
import torch
from blocks import block_gradients, check_every_subset
from tiny import CASES, Tiny, oracle, relative, shifted_labels

from trireme.models.config import Lora
from trireme.models.sizes import shapes

pytestmark = pytest.mark.grid

KEYS = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
GPT = dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64)
FAMILIES = {
    "llama": ("llama", KEYS),
    "llama biases": ("llama", KEYS | dict(attention_bias=True, mlp_bias=True)),
    "qwen3": ("qwen3", KEYS),
    "gpt2": ("gpt2", GPT),
    "olmo2": CASES["olmo2"],
    "gpt_neox": CASES["gpt_neox"],
    "phi3": CASES["phi3"],
    "qwen2 moe": ("qwen2_moe", CASES["qwen2 moe"][1] | KEYS),
    "falcon h1": ("falcon_h1", CASES["falcon h1"][1] | KEYS | dict(mamba_d_ssm=64, mamba_n_heads=16, mamba_d_state=16)),
}
EPSILON = 2**-4 / 3**0.5 * 2**0.5  # of a matmul, relative: two operands, each off by at most 2^-4, evenly spread
DEEP = 8  # matmuls between a block's ends and any of its gradients, at most


def check_errors(model_type, keys):
    """Checks a block's output and gradients; the relative error of the output.

    Errors of matmuls are independent: their squares add up along the way.
    """
    reference, cfg = oracle(model_type, keys)
    exact = block_gradients(Tiny(cfg, reference.state_dict()), ())
    found = block_gradients(Tiny(replace(cfg, fp8=True), reference.state_dict(), "BF16", "F32"), ())
    bound = EPSILON * DEEP**0.5
    assert relative(found[0], exact[0]) < bound
    assert relative(found[1], exact[1]) < bound
    whole = sum(float(g.norm()) ** 2 for g in exact[2].values()) ** 0.5
    for weight, gradient in exact[2].items():  # of some biases nothing but rounding is left
        error = float((found[2][weight] - gradient).norm())
        assert error < bound * float(gradient.norm()) + 1e-3 * whole, weight
    return relative(found[0], exact[0])


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FAMILIES if "moe" not in name])  # a choice of experts is no matmul
def test_gradients_of_a_block_are_within_the_error_of_the_format(name):
    assert check_errors(*FAMILIES[name]) > EPSILON / 4


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "llama biases", "gpt2", "olmo2", "gpt_neox", "qwen2 moe", "falcon h1"])
def test_gradients_are_equal_whatever_is_saved(name):
    model_type, keys = FAMILIES[name]
    check_every_subset(model_type, "BF16", "F32", fp8=True, few=name not in ("llama", "qwen2 moe"), **keys)


def test_products_that_the_hardware_has_not_stay_in_bf16():
    """Of 40 or 56 features; and a router's."""
    reference, cfg = oracle(*CASES["llama"])
    plain, fp8 = (Tiny(replace(cfg, fp8=on), reference.state_dict(), "BF16", "F32") for on in (False, True))
    for a, b in zip(block_gradients(plain, ())[:2], block_gradients(fp8, ())[:2], strict=True):
        assert torch.equal(a, b)
    reference, cfg = oracle(*FAMILIES["qwen2 moe"])
    block = Tiny(replace(cfg, fp8=True), reference.state_dict()).w[1]
    assert block.mixers[0].qkv.fp8
    assert block.mixers[0].o.linear.fp8
    assert block.mlps[0].shared.up.fp8
    assert not block.mlps[0].router.linear.fp8


MIXTURE = KEYS | dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=32, decoder_sparse_step=1)


@pytest.mark.full
@pytest.mark.usefixtures("few_rows_in_fp8")
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_experts_are_within_the_error_of_the_format(bias):
    """All are chosen, so that no choice is another one; every subset of what is saved leaves the same bits."""
    model_type, keys = "qwen3_moe", MIXTURE
    if bias:
        model_type, keys = "gpt_oss", KEYS | dict(num_local_experts=4, num_experts_per_tok=4, intermediate_size=32)
    check_errors(model_type, keys)
    check_every_subset(model_type, "BF16", "F32", fp8=True, **keys)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters_stay_in_bf16(name):
    """Beside a frozen base in fp8: gradients as in bf16 but for the base's error; the base has none."""
    reference, cfg = oracle(*FAMILIES[name])
    targets = ("c_attn", "c_proj", "c_fc") if name == "gpt2" else ("q_proj", "o_proj", "up_proj", "down_proj")
    cfg = replace(cfg, lora=Lora(4, 8.0, targets), frozen=("*",))
    torch.manual_seed(2)
    state = reference.state_dict() | {
        part: torch.randn(shape) * 0.1
        for u in range(cfg.n_units)
        for groups in shapes.trained_parts(cfg, u)
        for group in groups
        for part, shape in group
    }
    exact = block_gradients(Tiny(cfg, state), ())
    found = block_gradients(Tiny(replace(cfg, fp8=True), state, "BF16", "F32"), ())
    assert exact[2].keys() == found[2].keys()
    assert all(".lora_" in part for part in found[2])
    for part, gradient in exact[2].items():
        assert relative(found[2][part], gradient) < EPSILON * DEEP**0.5, part


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in FAMILIES if "moe" not in name])
def test_a_gpu_computes_what_the_cpu_does(name):
    """As near as the format lets them be: a last bit of bf16 may be another code, and errors of both add in squares."""
    reference, cfg = oracle(*FAMILIES[name])
    cfg, state = replace(cfg, fp8=True), reference.state_dict()
    ids = torch.randint(cfg.vocab, (40,), generator=torch.Generator().manual_seed(1))
    labels, lengths = shifted_labels(ids, [13, 1, 26]), [13, 1, 26]
    here, there = Tiny(cfg, state, "BF16", "F32"), Tiny(cfg, state, "BF16", "F32", device="cuda")
    expected, losses = here.train(ids, labels, lengths), there.train(ids.cuda(), labels.cuda(), lengths)
    assert relative(losses.cpu(), expected) < EPSILON
    norm = max(float(grad.norm()) for grad in here.grads.values())
    for weight, grad in here.grads.items():
        error = float((there.grads[weight].cpu() - grad).norm())
        assert error < EPSILON * (2 * DEEP) ** 0.5 * float(grad.norm()) + 1e-3 * norm, weight
