"""Narrow moments: the formats, and rounding without bias."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.kernels.optimizer import host_adamw, moments

pytestmark = [pytest.mark.grid, pytest.mark.turns]

HYPER = dict(lr=3e-3, beta1=0.9, beta2=0.95, weight_decay=0.0, n_decay=0)


def noise(n, value=1 << 15):
    """The same noise for all: by default what rounds to nearest."""
    return torch.full((n,), value, dtype=torch.int32)


def state(n, width):
    """Zero moments of `width` bytes as adamw_ takes them."""
    if width == 1:
        codes = lambda: (torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // 256), dtype=torch.int16))
        return (*codes(), *codes())
    return torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)


# ---------------------------------------------------------------- the formats


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("floor", [0, 1, 500, 1016, 1780])
@pytest.mark.parametrize("drawn", [0, 0xFFFF])
def test_decoded_codes_are_encoded_to_themselves(signed, floor, drawn):
    """What a code stands for is encoded to itself, whatever the noise; all but the last step above the floor."""
    code = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    x = moments.decode8(code, torch.tensor([floor], dtype=torch.int16), signed)
    again = moments.decode8(*moments.encode8(x, noise(256, drawn), signed), signed)
    inside = (code & (127 if signed else 255)) != 1
    assert torch.equal(again[inside], x[inside])
    assert signed or (again[1:] > 0).all()


@settings(max_examples=50, deadline=None)
@given(
    signed=st.booleans(), octaves=st.integers(0, 31), n=st.sampled_from([1, 255, 257, 700]), seed=st.integers(0, 999)
)
def test_error_is_relative(signed, octaves, n, seed):
    """Rounded to nearest, a value in reach (15 octaves, 31 for v) moves by 1/16 of itself, whatever its neighbours."""
    random = torch.Generator().manual_seed(seed)
    reach = min(octaves, 15) if signed else octaves
    x = torch.exp2(-torch.rand(n, generator=random) * reach) * 10.0 ** (seed % 20 - 10)
    if signed:
        x = torch.where(torch.rand(n, generator=random) < 0.5, -x, x)
    y = moments.decode8(*moments.encode8(x, noise(n), signed), signed)
    assert ((y - x).abs() <= x.abs() / 16).all()


def test_small_v_beside_a_large_one_is_not_lost():
    x = torch.tensor([1e30, 1e-30, 1e-45, 0.0])
    y = moments.decode8(*moments.encode8(x, noise(4, 0), False), False)
    assert (y[1:3] > 0).all()
    assert y[3] == 0


@pytest.mark.parametrize("width", [1, 2])
def test_rounding_keeps_the_mean(width):
    """Over 4,000 draws the mean is off by less than 6 % of a rounding step (nearest: up to 50 %)."""
    draws = 4000
    x = 1 + torch.rand(256, generator=torch.Generator().manual_seed(1))
    many, step = x.repeat(draws), 1 / 8 if width == 1 else 1 / 128
    for drawn in moments._noise(many, moments.noise_key(3, 7), 0):
        if width == 1:
            y = moments.decode8(*moments.encode8(many, drawn, False), False)
        else:
            y = moments.round_bf16(many, drawn).float()
        assert (y.view(draws, 256).double().mean(0) - x).abs().max() < 0.06 * step


@pytest.mark.parametrize("width", [1, 2])
def test_v_falls_when_gradients_stop(width):
    """1,000 steps of beta2 = 0.999 without a gradient leave 37 % of v. Rounded to nearest, v would not move at all."""
    n = 4096
    tensors, run = state(n, width), host_adamw.adamw_
    hyper = dict(HYPER, beta2=0.999, eps=1e-8, seed=1)
    w, grad, one = torch.zeros(n), torch.ones(n), torch.ones(1)
    run(w, None, *tensors, grad, one, step=1, **hyper)

    def mean_v():
        v = moments.decode8(*tensors[2:], False) if width == 1 else tensors[1].float()
        return v.mean()

    before = mean_v()
    for step in range(2, 1002):
        run(w, None, *tensors, grad * 0, one, step=step, **hyper)
    torch.testing.assert_close(mean_v() / before, torch.tensor(0.999**1000), rtol=0.03, atol=0)


def test_no_two_units_or_steps_share_their_noise():
    keys = {moments.noise_key(unit, step) for unit in range(64) for step in range(1, 65)}
    assert len(keys) == 64 * 64
