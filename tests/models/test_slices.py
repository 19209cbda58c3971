"""Experts decoded a slice at a time: bitwise one grouped GEMM over all of them."""

from dataclasses import replace

import pytest
import torch

from trireme.kernels import ops
from trireme.models.families.packing import FP8, MXFP4, NF4
from trireme.models.packed import Sliced, decode, grouped_mm

PACKINGS = {"mxfp4": MXFP4, "fp8": replace(FP8, block=(24, 20)), "nf4": NF4}
BIASED = pytest.mark.parametrize("biased", [False, True])


def packed(name, experts, rows, columns, device="cpu"):
    """(packing, random parts, all decoded) of matrices (experts, rows, columns) in memory."""
    packing, found = PACKINGS[name], []
    for part, shape in zip(packing.parts, packing.shapes((experts, rows, columns)), strict=True):
        wide = part.itemsize > 1
        found.append(torch.rand(shape) if wide else torch.randint(96, 126, shape, dtype=torch.uint8))
    found = [part.to(device) for part in found]
    whole = torch.empty((experts, rows, columns), dtype=torch.bfloat16, device=device)
    decode(packing, found, whole)
    return packing, tuple(found), whole


def check(name, back, biased, sizes, device="cpu"):
    """Every cut, from one expert at a time to more than there are."""
    torch.manual_seed(0)
    N, E, k, D, F = sizes
    packing, parts, whole = packed(name, E, F, D, device)
    chosen = torch.rand(N, E, device=device).topk(k).indices.sort(1).values.int()
    chosen[chosen == 1] = 0  # one expert without rows
    order = ops.sort_pairs(chosen, E)
    x = torch.randn(N if not back else N * k, F if back else D, device=device).bfloat16()
    bias = torch.randn(E, F, device=device).bfloat16() if biased and not back else None
    expected = ops.grouped_mm(x, whole if back else whole.mT, order, 0 if back else k, None, bias)
    for at_once in (1, 2, E - 1, E, E + 3):
        sliced = Sliced(packing, parts, (F, D), True, at_once)
        found = grouped_mm(x, sliced, order, 0 if back else k, None, bias, back)
        assert torch.equal(found, expected), at_once


@BIASED
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", PACKINGS)
def test_any_cut_gives_the_same_bits(name, back, biased):
    check(name, back, biased, (19, 6, 2, 64, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(300, 6, 2, 64, 96), (700, 40, 6, 512, 1024)], ids=str)
@BIASED
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", PACKINGS)
def test_any_cut_gives_the_same_bits_on_a_gpu(name, back, biased, sizes):
    check(name, back, biased, sizes, "cuda")
