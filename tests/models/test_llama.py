"""Blocks of the families by themselves; test_blocks_hf.py compares them with transformers."""

import pytest
from blocks import check_every_subset
from tiny import CASES

pytestmark = pytest.mark.grid

DTYPES = ("BF16", "F32"), ("BF16", "BF16"), ("F32", "F32")
# Blocks that differ in what follows from what: all subsets of their saved tensors; few of those that are like them.
FIRST = "llama", "gpt2", "gemma2", "gpt_neox", "falcon h1", "qwen2 moe", "gpt oss"
OTHERS = (
    "llama biases", "mistral window", "qwen3", "gpt2 scaled by layer",
    "phi3", "granite", "smollm3", "starcoder2", "olmo2", "olmo3", "exaone4", "seed_oss", "gemma3",
    "ministral3 tied, window", "glm4", "granite 4", "qwen3 moe",
    "glm4 moe", "minimax m2", "hy v3", "afmoe", "kolibri1", "granite moe", "granite swa", "ernie moe", "hunyuan",
    "arcee", "laguna", "mimo v2 flash",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype", "grad_dtype"),
    [(case, *DTYPES[i % 3]) for i, case in enumerate((*FIRST, *OTHERS))],
)
def test_gradients_are_equal_whatever_is_saved(case, dtype, grad_dtype):
    model_type, keys = CASES[case]
    check_every_subset(model_type, dtype, grad_dtype, few=case in OTHERS, **keys)
