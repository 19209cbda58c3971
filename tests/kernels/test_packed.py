"""Packed weights: launchers and references decode to the same bits, those of the format."""

import numpy as np
import pytest
import torch
from kernel_checks import DEVICES, DTYPES, framed
from packed_files import in_words

from trireme.kernels.packed import e4m3, fp4, int4, nf4, reference

pytestmark = [pytest.mark.grid, pytest.mark.turns]


BLOCKS = [(128, 128), (2, 32), (24, 48), (1, 1 << 20), (1 << 20, 1 << 20)]  # short last ones; a row's, a matrix's


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype"), [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.uint8, torch.bfloat16),
    (torch.float16, torch.bfloat16),
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
        powers = powers.clamp(127 - 24, 127 + 14) if kind == torch.float16 else powers
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["powers", "factor", "divisor"])
def test_every_code_and_scale_of_fp4(device, dtype, kind):
    """Rounded as their formats say: by numpy's fp32, one operation after another."""
    M, R, group = 2, 33, 32 if kind == "powers" else 16
    C = 3 * group
    dice = torch.Generator().manual_seed(0)
    codes = torch.arange(M * R * C // 2).remainder(256).to(torch.uint8)
    codes = codes[torch.randperm(len(codes), generator=dice)].view(M, R, C // 2)
    scales = torch.arange(M * R * 3).remainder(252 if kind == "powers" else 127).to(torch.uint8).view(M, R, 3)
    scale = None if kind == "powers" else torch.tensor([0.0123456789, 3.7e-5])
    if kind == "powers":
        wide = np.ldexp(np.float32(1), scales.numpy().astype(np.int32) - 127)
    else:
        factor = scale.numpy()[:, None, None]
        wide = scales.view(torch.float8_e4m3fn).float().numpy()
        wide = wide / factor if kind == "divisor" else wide * factor
    magnitudes = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack((codes.numpy() & 15, codes.numpy() >> 4), -1).reshape(M, R, C)
    numbers = np.where(nibbles > 7, -magnitudes[nibbles & 7], magnitudes[nibbles & 7])
    theirs = torch.from_numpy(numbers * wide.repeat(group, 2)).to(dtype)
    on = lambda t: None if t is None else framed(t.to(device))
    for op in (fp4.fp4_decode, reference.fp4_decode):
        out = framed(torch.full((M, R, C), float("nan"), dtype=dtype, device=device))
        op(on(codes), on(scales), on(scale), out, kind == "divisor")
        assert torch.equal(out.cpu(), theirs)
        assert torch.equal(out.cpu().signbit(), theirs.signbit())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("zeros", "group", "kind"), [(False, 32, torch.bfloat16), (True, 48, torch.float16), (True, 1 << 30, torch.float32)]
)
def test_every_code_and_zero_point_of_int4(device, dtype, zeros, group, kind):
    """Bitwise (code - zero) * scale in fp64, rounded to fp32, then once; a short last group."""
    M, R, C = 2, 43, 136
    G, dice = -(-C // group), torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(16, shape, generator=dice)
    q, z = draw(M, R, C), draw(M, R, G) if zeros else torch.full((M, R, G), 8)
    scales = (torch.randn(M, R, G, generator=dice) / 100).to(kind)
    wide = lambda t: t.repeat_interleave(min(group, C), 2)[..., :C]
    theirs = ((q - wide(z)).double() * wide(scales).double()).float().to(dtype)
    codes, scales, points = (framed(part.to(device)) for part in (in_words(q, 2), scales, in_words(z, 1)))
    for op in (int4.int4_decode, reference.int4_decode):
        out = framed(torch.full((M, R, C), float("nan"), dtype=dtype, device=device))
        op(codes, scales, points if zeros else None, out, group)
        assert torch.equal(out.cpu(), theirs)
