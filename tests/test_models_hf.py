"""Whole models against transformers: logits, losses and every gradient, for each family and its variants."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import Tiny, oracle, relative, shifted_labels

from trireme.models.config import read_config

LLAMA = dict(
    vocab_size=97,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
)
GPT2 = dict(vocab_size=97, n_embd=40, n_layer=2, n_head=4, n_positions=64)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
CASES = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": ("gpt2", GPT2 | dict(tie_word_embeddings=False, n_inner=72)),
    "gpt2 scaled by layer": ("gpt2", GPT2 | dict(scale_attn_by_inverse_layer_idx=True)),
    "gpt2 unscaled": ("gpt2", GPT2 | dict(scale_attn_weights=False, activation_function="gelu_pytorch_tanh")),
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", LLAMA | dict(tie_word_embeddings=True)),
    "llama biases": ("llama", LLAMA | dict(attention_bias=True, mlp_bias=True)),
    "llama one kv head, head dim 24": ("llama", LLAMA | dict(num_key_value_heads=1, head_dim=24)),
    "llama as many kv heads, head dim 80": ("llama", LLAMA | dict(num_key_value_heads=4, head_dim=80)),
    "llama linear rope": ("llama", LLAMA | dict(rope_parameters=dict(rope_type="linear", rope_theta=5e5, factor=3.0))),
    "llama 3.1 rope": ("llama", LLAMA | dict(rope_parameters=LLAMA3)),
    "mistral": ("mistral", LLAMA | dict(sliding_window=None)),
    "mistral window": ("mistral", LLAMA | dict(sliding_window=5)),
    "qwen2": ("qwen2", LLAMA | dict(tie_word_embeddings=True)),
    "qwen2 window above": ("qwen2", LLAMA | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3": ("qwen3", LLAMA),
    "qwen3 tied, biases": ("qwen3", LLAMA | dict(tie_word_embeddings=True, attention_bias=True, head_dim=16)),
}


def packed(lengths, vocab, seed=1):
    ids = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, shifted_labels(ids, lengths)


def oracle_run(model, ids, labels, lengths):
    """(logits, losses) of the documents one by one, gradients of the mean loss in model.grad."""
    logits = torch.cat([model(doc[None]).logits[0] for doc in ids.split(lengths)])
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    losses[labels >= 0].mean().backward()
    return logits.detach(), losses.detach()


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case):
    """Documents packed into one run give what transformers gives for each alone."""
    model_type, keys = CASES[case]
    reference, cfg = oracle(model_type, **keys)
    lengths = [13, 1, 20, 9]
    ids, labels = packed(lengths, cfg.vocab)
    labels[3:6] = -100
    tiny = Tiny(cfg, reference.state_dict())
    logits, losses = oracle_run(reference, ids, labels, lengths)
    assert relative(tiny.logits(ids, lengths), logits) < 1e-5
    assert relative(tiny.train(ids, labels, lengths, keep=("qkv", "resid")), losses) < 1e-5
    grads = tiny.grads
    for name, p in reference.named_parameters():
        error = relative(grads.pop(name), p.grad)
        # a key bias moves no softmax: its gradient is zero but for rounding
        assert error < 1e-5 or name.endswith("k_proj.bias") and float(p.grad.norm()) < 1e-6, (name, error)
    assert not grads


@pytest.mark.parametrize("folder", ["stories260k", "capp-gpt2"])
def test_real_checkpoint(real, folder):
    """Losses and gradient norms that transformers gave for a real checkpoint."""
    expected = json.loads((real / folder / "reference.json").read_text())
    cfg = read_config(real / folder)
    tiny = Tiny(cfg, load_file(real / folder / "model.safetensors"))
    ids = torch.tensor(expected["ids"])
    losses = tiny.train(ids, shifted_labels(ids, [len(ids)]), [len(ids)])
    assert losses[:-1].tolist() == pytest.approx(expected["token_losses"], rel=1e-5, abs=1e-5)
    assert float(losses[:-1].mean()) == pytest.approx(expected["loss"], rel=1e-5)
    norms = {name: float(g.double().norm()) for name, g in tiny.grads.items()}
    assert norms == pytest.approx(expected["grad_norms"], rel=1e-5)


@pytest.mark.parametrize("grad_dtype", ["F32", "BF16"])
@pytest.mark.parametrize("case", ["gpt2", "llama biases", "qwen3"])
def test_bf16(case, grad_dtype):
    """In bf16 our gradients are as near to the fp32 ones as those of transformers in bf16."""
    model_type, keys = CASES[case]
    reference, cfg = oracle(model_type, **keys)
    lengths = [30, 14]
    ids, labels = packed(lengths, cfg.vocab)
    reference.bfloat16()
    oracle_run(reference, ids, labels, lengths)
    exact, tiny = Tiny(cfg, reference.state_dict()), Tiny(cfg, reference.state_dict(), "BF16", grad_dtype)
    exact.train(ids, labels, lengths)
    tiny.train(ids, labels, lengths)
    theirs = {name: relative(p.grad, exact.grads[name]) for name, p in reference.named_parameters()}
    for name, g in tiny.grads.items():
        assert relative(g, exact.grads[name]) < 1.2 * theirs[name] + 0.002, name


def test_gradients_accumulate():
    """Two micro-batches add up to one, with the scale of the whole step."""
    reference, cfg = oracle("gpt2", **GPT2)
    lengths = [13, 20]
    ids, labels = packed(lengths, cfg.vocab)
    whole, parts = Tiny(cfg, reference.state_dict()), Tiny(cfg, reference.state_dict())
    whole.train(ids, labels, lengths)
    for doc, target in zip(ids.split(lengths), labels.split(lengths), strict=True):
        parts.train(doc, target, [len(doc)], scale=1 / int((labels >= 0).sum()))
    for name, g in parts.grads.items():
        assert relative(g, whole.grads[name]) < 1e-5, name


def test_without_labels():
    """A micro-batch without a label gives no loss and no gradient, and no NaN."""
    reference, cfg = oracle("llama", **LLAMA)
    tiny = Tiny(cfg, reference.state_dict())
    ids, labels = packed([8], cfg.vocab)
    losses = tiny.train(ids, torch.full_like(labels, -100), [8], scale=1.0)
    assert not losses.any() and not any(g.any() for g in tiny.grads.values())
