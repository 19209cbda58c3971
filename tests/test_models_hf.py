"""Whole models against transformers: logits, losses and every gradient, for each family and its variants."""

import pytest
import torch
from tiny import Tiny, oracle, relative, shifted_labels

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
