"""Packed weights: launchers and references decode to the same bits, those of the format."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, framed

from trireme.kernels.packed import mxfp4, reference

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
