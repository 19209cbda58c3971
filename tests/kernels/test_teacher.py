"""The loss with a teacher: the reference against autograd in fp64, the launcher against the reference."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, check, framed, randn, up

from trireme.kernels.loss import loss, reference
from trireme.kernels.loss.reference import Taught

pytestmark = pytest.mark.grid

EXACT = 2e-6, 1e-5, 1e-5  # fp32: losses, dx, dw
ROUNDED = 5e-3, 1e-2, 1e-2  # bf16: a few logits carry each sum, so their rounding does not average out


def case(N, D, V, M, K, dtype, device, dw_dtype=None, weight=0.3, temperature=2.0):
    """Every second label is a token of the teacher's."""
    torch.manual_seed(0)
    x, w = randn(N, D, device=device, dtype=dtype), randn(V, D, device=device, dtype=dtype, scale=D**-0.5)
    rows = torch.randperm(N)[:M].sort().values
    logps = torch.log_softmax(2 * torch.randn(M, V), -1)
    top, ids = logps.topk(K)
    rest = torch.logsumexp(logps.scatter(1, ids, float("-inf")), -1)
    labels = torch.full((N,), -100)
    labels[rows] = torch.randint(V, (M,))
    labels[rows[::2]] = ids[torch.arange(M), torch.randint(K, (M,))][::2]
    dw = randn(V, D, device=device, dtype=dw_dtype or dtype, scale=0.001)
    shares = framed(top.half().to(device)), framed(rest.to(device))
    taught = Taught(framed(ids.int().to(device)), *shares, weight, temperature)
    return x, w, labels.to(device), rows.to(device), dw, taught


def by_autograd(x, w, labels, rows, scale, taught, cap, factors):
    """(losses (2, N), gradients of x and w) by the definition, over whole distributions."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    logits = x[rows] @ w.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    logp, ids, T = torch.log_softmax(logits, -1), taught.ids.long(), taught.temperature
    ce = -logp.gather(1, labels[rows, None])[:, 0]
    others = 1 - logp.exp().gather(1, ids).sum(1)
    p = torch.cat([logp.gather(1, ids).exp(), others[:, None]], 1)
    q = torch.cat([taught.logps.double(), taught.rest.double()[:, None]], 1).exp()
    p, q = (t ** (1 / T) / (t ** (1 / T)).sum(1, keepdim=True) for t in (p, q))
    kl = T**2 * (q * (q / p).log()).sum(1)
    loss = (1 - taught.weight) * ce + taught.weight * kl
    (scale * loss * (1.0 if factors is None else factors[rows])).sum().backward()
    found = torch.zeros(2, len(x), dtype=torch.float64)
    found[:, rows] = torch.stack([ce, kl]).detach()
    return found, x.grad, w.grad


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("weight", "cap"), [(0.3, 0.0), (1.0, 0.7), (0.0, 0.0)])
def test_the_reference_is_the_definition(weight, cap, temperature):
    x, w, labels, rows, dw, taught = case(12, 6, 31, 9, 4, torch.float64, "cpu", None, weight, temperature)
    factors, dx, before = torch.rand(12).double() - 0.3, torch.full_like(x, float("nan")), dw.clone()
    found = reference.linear_cross_entropy(x, w, labels, rows, 0.7, dw, dx, 4, cap, factors, taught=taught)
    expected, dx64, dw64 = by_autograd(x, w, labels, rows, 0.7, taught, cap, factors)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dx, dx64, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dw, before + dw64, rtol=1e-9, atol=1e-12)


def compare(given, chunk, bounds, cap=0.0, factors=None):
    x, w, labels, rows, dw, taught = given
    scale, dx = 1 / 37, torch.full_like(x, float("nan"))
    dx64, dw64 = torch.empty_like(x, dtype=torch.float64), dw.double()
    found = loss.linear_cross_entropy(x, w, labels, rows, scale, dw, dx, chunk, cap, factors, taught=taught)
    theirs = reference.linear_cross_entropy(
        *up(x, w), labels, rows, scale, dw64, dx64, chunk, cap, factors, taught=taught
    )
    for mine, expected in ((found[0], theirs[0]), (found[1], theirs[1])):
        check(mine, expected, bounds[0])
    check(dx, dx64, bounds[1])
    check(dw, dw64, bounds[2])
    assert not found[:, labels < 0].any()
    assert not dx[labels < 0].any()
    again = loss.linear_cross_entropy(x, w, labels, rows, scale, chunk=chunk, cap=cap, taught=taught)
    assert torch.equal(found, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "D", "V", "M", "K", "chunk"),
    [
        (8, 16, 101, 8, 4, 100),
        (12, 33, 70, 7, 7, 3),
        (9, 8, 9001, 4, 64, 3),
        (6, 5, 5, 6, 5, 6),
        (6, 40, 9, 3, 1, 6),
    ],
)
def test_distillation(device, dtype, N, D, V, M, K, chunk):
    """A vocabulary of several blocks; a teacher that says all, and one that says a token."""
    compare(case(N, D, V, M, K, dtype, device, torch.float32), chunk, ROUNDED if dtype == torch.bfloat16 else EXACT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("weight", "temperature", "cap"), [(1.0, 1.0, 0.0), (0.3, 4.0, 0.7), (0.0, 1.0, 30.0)])
def test_weights_temperatures_caps_and_factors(device, dtype, weight, temperature, cap):
    given = case(10, 16, 101, 5, 6, dtype, device, torch.float32, weight, temperature)
    factors = torch.randn(10, device=device)
    factors[given[3][0]] = 0.0
    factors[given[2] < 0] = float("nan")
    compare(given, 4, ROUNDED if dtype == torch.bfloat16 else EXACT, cap, factors)


@pytest.mark.parametrize("device", DEVICES)
def test_a_teacher_that_is_the_student_moves_nothing(device):
    """And shares that are nearly 0 or 1 give finite gradients."""
    x, w, labels, rows, dw, _ = case(6, 16, 101, 6, 5, torch.float32, device)
    logps = torch.log_softmax(x @ w.T, -1)
    top, ids = logps.topk(5)
    rest = torch.logsumexp(logps.scatter(1, ids, float("-inf")), -1)
    dx, dw = torch.empty_like(x), torch.zeros_like(dw)
    given = x, w, labels, rows, 1.0
    found = loss.linear_cross_entropy(*given, dw, dx, taught=Taught(ids.int(), top, rest, 1.0, 1.0))
    assert found[1].abs().max() < 1e-6
    assert dx.abs().max() < 1e-6
    certain = Taught(ids.int(), torch.full_like(top, -65504.0), torch.zeros_like(rest), 0.5, 1.0)
    found = loss.linear_cross_entropy(40 * x, *given[1:], dw, dx, taught=certain)
    assert torch.isfinite(found).all()
    assert torch.isfinite(dx).all()


@pytest.mark.parametrize("device", DEVICES)
def test_no_row_counts(device):
    x, w, labels, rows, dw, taught = case(5, 8, 12, 0, 3, torch.float32, device)
    before, dx = dw.clone(), torch.full_like(x, float("nan"))
    assert not loss.linear_cross_entropy(x, w, labels, rows, 1.0, dw, dx, taught=taught).any()
    assert not dx.any()
    assert torch.equal(dw, before)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "D", "V", "M"), [(1500, 2048, 50257, 1111), (512, 512, 128256, 512)])
@pytest.mark.parametrize(("K", "chunk"), [(64, 2048), (16, 128), (256, 512)])
@pytest.mark.parametrize("dw_dtype", [torch.float32, torch.bfloat16])
def test_distillation_of_a_real_vocabulary(N, D, V, M, K, chunk, dw_dtype):
    given = case(N, D, V, M, K, torch.bfloat16, "cuda", dw_dtype, 0.5, 1.0)
    compare(given, chunk, (1e-3, 4e-3, 4e-3))
