"""The loss with and without a teacher: the reference against autograd in fp64, the launcher against the reference."""

from typing import NamedTuple

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, check, framed, randn, up
from torch.nn.functional import cross_entropy, kl_div

from trireme.kernels.loss import loss, reference
from trireme.kernels.loss.reference import Taught
from trireme.kernels.reference import soft_cap

pytestmark = [pytest.mark.grid, pytest.mark.turns]

# of losses, dx, dw; bf16: a few logits carry each sum, so their rounding does not average out
BOUNDS = {torch.float32: (2e-6, 1e-5, 1e-5), torch.bfloat16: (5e-3, 1e-2, 1e-2)}
REAL = 1e-3, 4e-3, 4e-3  # many logits, bf16


class Form(NamedTuple):
    """How a loss is computed: K of a teacher's tokens, or 0."""

    cap: float = 0.0
    factors: bool = False
    smoothing: float = 0.0
    K: int = 0
    weight: float = 0.3
    temperature: float = 2.0


FORMS = {
    "plain": Form(),
    "cap": Form(cap=0.7),
    "high cap": Form(cap=30.0),
    "factors": Form(factors=True),
    "smoothed": Form(smoothing=0.1, factors=True),
    "smoothed, cap": Form(0.7, smoothing=0.2),
    "teacher": Form(K=4),
    "teacher alone, cap": Form(0.7, True, K=5, weight=1.0, temperature=4.0),
    "teacher without weight": Form(K=5, weight=0.0, temperature=1.0),
}
# N, D, V, M, chunk: all rows and some, several blocks of logits; with a teacher all its tokens at V = 5
SIZES = [(30, 16, 101, 30, 100), (40, 33, 70, 25, 7), (9, 8, 9001, 4, 3), (6, 5, 5, 6, 6)]


class Case(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor
    labels: torch.Tensor
    rows: torch.Tensor
    dw: torch.Tensor
    factors: torch.Tensor | None
    taught: Taught | None


def case(form: Form, N, D, V, M, dtype, device, dw_dtype=None) -> Case:
    """Every second label is a token of the teacher's; factors of rows without a label are not read."""
    torch.manual_seed(0)
    x, w = randn(N, D, device=device, dtype=dtype), randn(V, D, device=device, dtype=dtype, scale=D**-0.5)
    labels, rows = torch.full((N,), -100), torch.randperm(N)[:M].sort().values
    labels[rows] = torch.randint(V, (M,))
    factors, taught, K = None, None, min(form.K, V)
    if form.factors:
        factors = torch.randn(N)
        factors[labels < 0] = float("nan")
        factors[rows[:1]] = 0.0
        factors = factors.to(device)
    if K:
        logps = torch.log_softmax(2 * torch.randn(M, V), -1)
        top, ids = logps.topk(K)
        rest = torch.logsumexp(logps.scatter(1, ids, float("-inf")), -1)
        labels[rows[::2]] = ids[torch.arange(M), torch.randint(K, (M,))][::2]
        parts = framed(ids.int().to(device)), framed(top.half().to(device)), framed(rest.to(device))
        taught = Taught(*parts, form.weight, form.temperature)
    dw = randn(V, D, device=device, dtype=dw_dtype or dtype, scale=0.001)
    return Case(x, w, labels.to(device), rows.to(device), dw, factors, taught)


def run(module, form: Form, a: Case, x, w, dw=None, dx=None, chunk=2048, **more):
    given = dict(cap=form.cap, factors=a.factors, smoothing=form.smoothing, taught=a.taught) | more
    return module.linear_cross_entropy(x, w, a.labels, a.rows, 1 / 37, dw, dx, chunk, **given)


def compare(form: Form, a: Case, chunk: int, bounds) -> None:
    dx, (x, w, dw64) = torch.full_like(a.x, float("nan")), up(a.x, a.w, a.dw)
    dx64 = torch.empty_like(x)
    found, exact = run(loss, form, a, a.x, a.w, a.dw, dx, chunk), run(reference, form, a, x, w, dw64, dx64, chunk)
    for own, right in zip(found.view(-1, len(x)), exact.view(-1, len(x)), strict=True):
        check(own, right, bounds[0])
    check(dx, dx64, bounds[1])
    check(a.dw, dw64, bounds[2])
    assert not found[..., a.labels < 0].any()
    assert not dx[a.labels < 0].any()
    assert torch.equal(found, run(loss, form, a, a.x, a.w, chunk=chunk))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "size"), [(name, size) for name in FORMS for size in SIZES[1:2]]
                         + [(name, size) for name in ("plain", "teacher") for size in SIZES])  # fmt: skip
def test_loss(device, dtype, name, size):
    *sizes, chunk = size
    compare(FORMS[name], case(FORMS[name], *sizes, dtype, device, torch.float32), chunk, BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "D", "V", "M"), [(1500, 2048, 50257, 1111), (512, 512, 128256, 512)])
@pytest.mark.parametrize(("K", "chunk"), [(0, 128), (0, 2048), (64, 2048), (16, 128), (256, 512)])
@pytest.mark.parametrize("dw_dtype", [torch.float32, torch.bfloat16])
def test_loss_of_a_real_vocabulary(N, D, V, M, K, chunk, dw_dtype):
    form = Form(K=K, weight=0.5, temperature=1.0)
    compare(form, case(form, N, D, V, M, torch.bfloat16, "cuda", dw_dtype), chunk, REAL)


@pytest.mark.parametrize("name", FORMS)
def test_the_reference_is_autograd(name):
    """By the definition, over whole distributions."""
    form = FORMS[name]
    a = case(form, 12, 6, 31, 9, torch.float64, "cpu")
    x, w = a.x.clone().requires_grad_(), a.w.clone().requires_grad_()
    logits, own = soft_cap(x[a.rows] @ w.T, form.cap), a.labels[a.rows]
    losses = cross_entropy(logits, own, reduction="none", label_smoothing=form.smoothing)[None]
    if a.taught is not None:
        p = torch.softmax(logits, -1)
        of_top = p.gather(1, a.taught.ids.long())
        p = torch.cat([of_top, 1 - of_top.sum(1, keepdim=True)], 1)
        q = torch.cat([a.taught.logps.double(), a.taught.tail.double()[:, None]], 1)
        p, q = torch.log_softmax(p.log() / form.temperature, 1), torch.log_softmax(q / form.temperature, 1)
        divergence = form.temperature**2 * kl_div(p, q, reduction="none", log_target=True).sum(1)
        losses = torch.stack([losses[0], divergence])
    weights = torch.tensor([1.0] if a.taught is None else [1 - form.weight, form.weight], dtype=torch.float64)
    by = 1 / 37 if a.factors is None else (a.factors * (1 / 37))[a.rows]  # in fp32, as factors are
    ((weights[:, None] * losses).sum(0) * by).sum().backward()
    dx, dw = torch.full_like(a.x, float("nan")), torch.zeros_like(a.w)
    found = run(reference, form, a, a.x, a.w, dw, dx, 4)
    torch.testing.assert_close(found.view(-1, 12)[:, a.rows], losses.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close((dx, dw), (x.grad, w.grad), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("cap", "gradient"), [(0.0, True), (0.7, False)])
def test_labels_that_are_the_likeliest(device, cap, gradient):
    """Of every second row the most likely token is the label; rows without a label stay as they are."""
    form = Form(cap)
    a = case(form, 12, 16, 101, 9, torch.bfloat16, device, torch.float32)
    top, ids = (a.x.double() @ a.w.double().T).topk(2, 1)
    likeliest, clear = ids[:, 0], a.rows[(top[:, 0] - top[:, 1])[a.rows] > 0.05]  # others are rounded to equal ones
    a.labels[a.rows[::2]] = likeliest[a.rows[::2]]
    hits, other = (torch.full((12,), 7, dtype=torch.uint8, device=device) for _ in range(2))
    into = lambda: (a.dw.clone(), torch.empty_like(a.x)) if gradient else (None, None)
    losses = run(loss, form, a, a.x, a.w, *into(), 7, hits_=hits)
    run(reference, form, a, *up(a.x, a.w), chunk=7, hits_=other)
    assert len(clear) > 6
    assert torch.equal(hits[clear], (a.labels == likeliest)[clear].to(torch.uint8))
    assert torch.equal(hits[clear], other[clear])
    assert (hits[a.labels < 0] == 7).all()
    assert torch.equal(losses, run(loss, form, a, a.x, a.w, *into(), 7))


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
def test_a_teacher_that_is_the_student_moves_nothing(device):
    """And shares that are nearly 0 or 1 give finite gradients."""
    form = Form(K=5)
    a = case(form, 6, 16, 101, 6, torch.float32, device)
    logps = torch.log_softmax(a.x @ a.w.T, -1)
    top, ids = logps.topk(5)
    rest = torch.logsumexp(logps.scatter(1, ids, float("-inf")), -1)
    dx, dw = torch.empty_like(a.x), torch.zeros_like(a.w)
    found = run(loss, form, a._replace(taught=Taught(ids.int(), top, rest, 1.0, 1.0)), a.x, a.w, dw, dx)
    assert found[1].abs().max() < 1e-6
    assert dx.abs().max() < 1e-6
    certain = Taught(ids.int(), torch.full_like(top, -65504.0), torch.zeros_like(rest), 0.5, 1.0)
    found = run(loss, form, a._replace(taught=certain), 40 * a.x, a.w, dw, dx)
    assert torch.isfinite(found).all()
    assert torch.isfinite(dx).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("K", [0, 3])
def test_no_row_counts(device, K):
    form = Form(K=K)
    a = case(form, 5, 8, 12, 0, torch.float32, device)
    before, dx = a.dw.clone(), torch.full_like(a.x, float("nan"))
    assert not run(loss, form, a, a.x, a.w, a.dw, dx).any()
    assert not dx.any()
    assert torch.equal(a.dw, before)
