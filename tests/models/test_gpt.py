"""The GPT-2 block by itself; test_blocks_hf.py compares it with transformers."""

import pytest
from blocks import check_every_subset

KEYS = dict(vocab_size=64, n_embd=48, n_layer=2, n_head=3, n_positions=32)


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("F32", "F32"), ("BF16", "F32"), ("BF16", "BF16")])
@pytest.mark.parametrize("more", [{}, dict(scale_attn_by_inverse_layer_idx=True)])
def test_every_subset_of_saved(more, dtype, grad_dtype):
    check_every_subset("gpt2", dtype, grad_dtype, **KEYS, **more)
