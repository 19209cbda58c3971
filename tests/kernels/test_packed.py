"""Packed weights: launchers and references decode to the same bits, those of the format."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, framed

from trireme.kernels.packed import e4m3, mxfp4, nf4, reference

pytestmark = pytest.mark.grid


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_and_scale_of_mxfp4(device, dtype):
    """To the bit, beyond whole tiles, within bounds; by torch.ldexp. Scales above 252 overflow."""
    E, R, G = 3, 85, 5
    dice = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (E, R, G, 16), dtype=torch.uint8, generator=dice)
    scales = torch.arange(E * R * G, dtype=torch.int32).remainder(253).to(torch.uint8).view(E, R, G)
    both = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    exact = torch.ldexp(reference.NUMBERS.double()[both], scales[..., None].double() - 127).flatten(2).mT
    for op in (mxfp4.mxfp4_decode, reference.mxfp4_decode):
        out = framed(torch.full((E, 32 * G, R), float("nan"), dtype=dtype, device=device))
        op(framed(blocks.to(device)), framed(scales.to(device)), out)
        assert torch.equal(out.cpu().double(), exact)
        assert torch.equal(out.cpu().signbit(), exact.signbit())


BLOCKS = [(128, 128), (2, 32), (24, 48), (1, 1 << 20), (1 << 20, 1 << 20)]  # short last ones; a row's, a matrix's


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype"), [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.uint8, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("block", BLOCKS)
def test_every_code_and_scale_of_e4m3(device, dtype, kind, block):
    """Bitwise fp32 products, rounded once: all codes, NaN too, scales from the smallest to the largest."""
    M, R, C = 2, 131, 140
    dice = torch.Generator().manual_seed(0)
    codes = torch.arange(M * R * C).remainder(256).to(torch.uint8).view(M, R, C)
    codes = codes[:, :, torch.randperm(C, generator=dice)].contiguous()
    grid = (M, -(-R // block[0]), -(-C // block[1]))
    powers = torch.randint(0, 246, grid, dtype=torch.uint8, generator=dice)
    powers[0, 0, 0] = 0
    scales = powers
    if kind != torch.uint8:
        scales = torch.ldexp(torch.rand(grid, generator=dice) + 1, powers.int() - 127).to(kind)
    exact = torch.ldexp(torch.ones(grid).double(), powers.int() - 127) if kind == torch.uint8 else scales.double()
    wide = exact.repeat_interleave(min(block[0], R), 1)[:, :R].repeat_interleave(min(block[1], C), 2)[..., :C]
    theirs = (codes.view(torch.float8_e4m3fn).double() * wide).float().to(dtype)
    for op in (e4m3.e4m3_decode, reference.e4m3_decode):
        out = framed(torch.full((M, R, C), -1.0, dtype=dtype, device=device))
        op(framed(codes.to(device)), framed(scales.to(device)), out, block)
        numbers = ~theirs.isnan()
        assert torch.equal(out.cpu().isnan(), theirs.isnan())
        assert torch.equal(out.cpu()[numbers], theirs[numbers])
        assert torch.equal(out.cpu()[numbers].signbit(), theirs[numbers].signbit())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [64, 5000, 4096 + 62])
def test_every_code_of_nf4(device, dtype, L):
    """Bitwise fp32 products, rounded once; a short last group."""
    dice = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (3, L // 2), dtype=torch.uint8, generator=dice)
    powers = torch.randint(-126, 127, (3, -(-L // 64)), dtype=torch.int32, generator=dice)
    scales = torch.ldexp(torch.rand(powers.shape, generator=dice) + 0.5, powers)
    numbers = torch.tensor(reference.NF4.tolist(), dtype=torch.float64)[torch.stack((codes >> 4, codes & 15), -1).int()]
    theirs = (numbers.flatten(1) * scales.double().repeat_interleave(64, 1)[:, :L]).float().to(dtype)
    for op in (nf4.nf4_decode, reference.nf4_decode):
        out = framed(torch.full((3, L), float("nan"), dtype=dtype, device=device))
        op(framed(codes.to(device)), framed(scales.to(device)), out)
        assert torch.equal(out.cpu(), theirs)
