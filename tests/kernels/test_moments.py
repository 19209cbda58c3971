"""Narrow moments: the formats, rounding without bias, and training that follows fp32."""

import argparse
from functools import cache
from math import log, prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from trireme.kernels import host_adamw, moments

pytestmark = pytest.mark.grid

HYPER = dict(lr=3e-3, beta1=0.9, beta2=0.95, weight_decay=0.0, n_decay=0)


def noise(n, value=1 << 15):
    """The same noise for all: by default what rounds to nearest."""
    return torch.full((n,), value, dtype=torch.int32)


def state(n, width):
    """Zero moments of `width` bytes as adamw_, adamw16_ and adamw8_ take them, and the function itself."""
    if width == 1:
        codes = lambda: (torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // 256), dtype=torch.int16))
        return (*codes(), *codes()), host_adamw.adamw8_
    dtype = {2: torch.bfloat16, 4: torch.float32}[width]
    run = {2: host_adamw.adamw16_, 4: host_adamw.adamw_}[width]
    return (torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)), run


# ---------------------------------------------------------------- the formats


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("floor", [0, 1, 500, 1016, 1780])
@pytest.mark.parametrize("drawn", [0, 0xFFFF])
def test_codes_survive(signed, floor, drawn):
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
    tensors, run = state(n, width)
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


# ---------------------------------------------------------------- a language model trained with them

B, T, D, H, LAYERS, STEPS = 8, 48, 48, 3, 2, 120


@cache
def corpus():
    """The text of a module of Python's library as character ids, and how many characters there are."""
    text = Path(argparse.__file__).read_text()
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(c) for c in text]), len(alphabet)


def shapes():
    V = corpus()[1]
    block = {"qkv": (3 * D, D), "out": (D, D), "up": (4 * D, D), "down": (D, 4 * D)}
    blocks = {f"{name}{i}": shape for i in range(LAYERS) for name, shape in block.items()}
    return {"embed": (V, D), "place": (T, D), **blocks, "head": (V, D)}


def loss_of(flat, ids):
    """Cross-entropy of a small GPT with its weights in one flat tensor. ids (B, T + 1)."""
    sizes = [prod(shape) for shape in shapes().values()]
    w = {k: part.view(shape) for (k, shape), part in zip(shapes().items(), flat.split(sizes), strict=True)}
    norm = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    x = w["embed"][ids[:, :-1]] + w["place"]
    for i in range(LAYERS):
        q, k, v = (norm(x) @ w[f"qkv{i}"].T).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ w[f"out{i}"].T
        x = x + gelu(norm(x) @ w[f"up{i}"].T) @ w[f"down{i}"].T
    return cross_entropy((norm(x) @ w["head"].T).flatten(0, 1), ids[:, 1:].flatten())


@cache
def trained_loss(width, octaves):
    """Mean loss of the last 20 steps. Each element's gradient is scaled by its own number in 2^-octaves .. 2^octaves.

    Adam divides such a scale out again, so fp32 moments do not notice it; moments in blocks may.
    """
    random = torch.Generator().manual_seed(0)
    w = torch.cat([torch.randn(prod(s), generator=random) * s[1] ** -0.5 for s in shapes().values()])
    scale = torch.exp2((torch.rand(len(w), generator=random) * 2 - 1) * octaves)
    tensors, run = state(len(w), width)
    options = dict(HYPER, eps=1e-12, **({} if width == 4 else {"seed": 5}))
    losses = []
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(corpus()[0]) - T, (B,), generator=random)
        leaf = w.clone().requires_grad_()
        loss = loss_of(leaf, torch.stack([corpus()[0][i : i + T + 1] for i in starts]))
        losses.append(loss.item())
        grad = torch.autograd.grad(loss, leaf)[0] * scale
        run(w, None, *tensors, grad, torch.ones(1), step=step, **options)
    return sum(losses[-20:]) / 20


@pytest.mark.full
@pytest.mark.parametrize("octaves", [0, 6])
@pytest.mark.parametrize("width", [1, 2])
def test_training_follows_fp32(width, octaves):
    fp32, narrow = trained_loss(4, 0), trained_loss(width, octaves)
    print(f"fp32 {fp32:.4f}, {8 * width} bits at 2^±{octaves} {narrow:.4f}")
    assert fp32 < 0.6 * log(corpus()[1])  # it has learnt
    assert abs(narrow / fp32 - 1) < 0.01


def test_no_two_units_or_steps_share_their_noise():
    keys = {moments.noise_key(unit, step) for unit in range(64) for step in range(1, 65)}
    assert len(keys) == 64 * 64
