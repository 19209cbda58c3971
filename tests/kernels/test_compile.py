"""Launches compiled for chips that are not at hand: no spills, shared memory that fits, wide accesses."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")

TENSOR = 512  # columns of Blackwell's tensor memory
NARROW = {"_add_noise", "_embedding_fwd", "_embedding_bwd", "_sort", "_sum_blocks", "_sum_squares"}  # small, or faster
NARROW |= {"_count", "_scan", "_place", "_dropout", "_sinks_lse"}
SPILLS = {"bwd_kernel": 64}  # bytes; of the others none
BY_MEMORY = ("_maxima", "_quantize", "_turn", "_glu_", "_norm_", "_add_rows", "_act_")  # of those compiled for Hopper


def _compile(*options: str) -> list[dict]:
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(root)}
    script = root / "tests" / "helpers" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script, *options], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]  # shared memory and spills, too
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.full
def test_each_kernel_fits_an_rtx_40():
    """One launch of it; those marked `chips` compile all, for more of them."""
    kernels = _compile("89", "--first")
    assert {"_attention_fwd", "_loss", "_norm_fwd", "_grouped_mm", "_quantize", "bwd_kernel"} <= {
        k["name"] for k in kernels
    }
    assert all(kernel["stack"] <= SPILLS.get(kernel["name"], 0) for kernel in kernels)


@pytest.mark.chips
def test_each_chip_has_the_memory_of_its_tiles():
    """Of chips and number formats whose launches are not compiled in full; `--all --memory` takes every launch."""
    kernels = _compile("--memory")
    assert all(kernel["tensor"] <= TENSOR for kernel in kernels)
    heads = {(kernel["chip"], kernel["constants"]["D"]) for kernel in kernels if kernel["name"] == "_attention_bwd_dq"}
    assert heads == {
        *product((86, 120), (64, 128, 192)), *product((90, 100, 120), (512,)), (100, 128), (100, 192), (121, 128),
    }  # 86: in fp32  # fmt: skip


@pytest.mark.chips
def test_kernels_fit_ada():
    kernels = _compile("89")
    assert len(kernels) > 30
    for kernel in kernels:
        assert kernel["stack"] <= SPILLS.get(kernel["name"], 0), kernel
        neighbours = kernel["constants"].get("GAP") == 1  # every other feature
        assert kernel["widest"] == 16 or kernel["name"] in NARROW or neighbours, kernel


@pytest.mark.chips
def test_kernels_of_an_rtx_50():
    """fp8 has the full rate by the instruction with block scales; heads of 64 and rows of logits do not spill."""
    kernels = _compile("120")
    products = [kernel["name"] for kernel in kernels if kernel["block_scales"]]
    assert products == ["_fp8_matmul"] * 4 + ["_grouped_mm"] * 2
    assert sum(kernel["name"] == "_loss" and kernel["constants"]["BLOCK"] == 8192 for kernel in kernels) == 5
    for kernel in kernels:
        assert kernel["stack"] <= SPILLS.get(kernel["name"], 0), kernel
        assert kernel["widest"] == 16, kernel


@pytest.mark.chips
def test_products_use_hopper():
    kernels = _compile("90")
    assert {"fwd_kernel", "dq_kernel", "dkv_kernel", "_grouped_mm", "add_kernel"} <= {
        kernel["name"] for kernel in kernels
    }
    for kernel in kernels:
        if kernel["name"].startswith(BY_MEMORY):
            assert kernel["stack"] <= 8, kernel
            assert kernel["widest"] == 16, kernel
            continue
        assert kernel["stack"] <= 96, kernel  # 0 by Triton 3.6; 3.9 spills offsets of copies at 128 columns
        assert kernel["wgmma"], kernel
        assert not kernel["serialised"], kernel
    columns = [kernel["constants"]["BLOCK_B"] for kernel in kernels if kernel["name"] == "_grouped_mm"]
    assert set(columns) == {128, 256}  # of many experts
    gradients = [kernel for kernel in kernels if kernel["name"] == "add_kernel"]
    assert {(k["reduces"], *(k["constants"][name] for name in ("TURNED", "BLOCK_Y"))) for k in gradients} == {
        (reduces, turned, columns)
        for reduces in (True, False)  # sums in fp32, and in bf16
        for turned, columns in ((False, 256), (True, 256), (True, 64))
    }
