"""Embedding and linear cross-entropy launchers against the reference in fp64."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, ONE_ROUNDING, check, randn, up

from trireme.kernels import embedding, reference
from trireme.kernels.loss import loss
from trireme.kernels.loss import reference as plain_loss

pytestmark = pytest.mark.grid

BOUNDS = 1e-4, 3e-3, 2.5e-3  # bf16: losses, dx, dw
FEW = 1e-3, 5e-3, 5e-3  # a few logits carry each sum, so their rounding does not average out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "D"), [(1, 8), (37, 520), (3, 1100)])
def test_noise(device, dtype, N, D):
    """The reference's bits; rows far from the step's first have theirs."""
    torch.manual_seed(0)
    x, scale = randn(N, D, device=device, dtype=dtype), torch.rand(N, device=device)
    (expected,) = up(x)
    reference.add_noise_(expected, scale, 2**31 - 1, 1_000_000)
    embedding.add_noise_(x, scale, 2**31 - 1, 1_000_000)
    check(x, expected, ONE_ROUNDING[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "D"), [(1, 8), (37, 520)])
def test_dropout(device, dtype, N, D):
    """The reference's mask, in place or of rows that are apart; rows are those of the step."""
    torch.manual_seed(0)
    x = randn(N, 2 * D, device=device, dtype=dtype)[:, :D]
    expected = reference.dropout(x.double(), 0.3, 2**31 - 1, 1_000_000)
    y = embedding.dropout(x, 0.3, 2**31 - 1, 1_000_000)
    check(y, expected, ONE_ROUNDING[dtype])
    assert torch.equal(y == 0, expected == 0)
    assert torch.equal(embedding.dropout(x[N // 2 :], 0.3, 2**31 - 1, 1_000_000 + N // 2), y[N // 2 :])
    own = x.contiguous()
    assert torch.equal(embedding.dropout(own, 0.3, 2**31 - 1, 1_000_000, own), y)


def test_dropout_drops_the_share_asked_for():
    x = torch.ones(500, 64, dtype=torch.float64)
    y = reference.dropout(x, 0.2, 7, 0)
    assert set(y.unique().tolist()) == {0.0, 1.25}
    assert abs((y == 0).double().mean() - 0.2) < 0.01
    assert not torch.equal(y, reference.dropout(x, 0.2, 8, 0))


def test_noise_is_uniform_and_its_rows_are_those_of_the_step():
    x = torch.zeros(500, 64, dtype=torch.float64)
    reference.add_noise_(x, torch.ones(500), 7, 0)
    assert -1 <= x.min() < -0.999
    assert 0.999 < x.max() < 1
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1 / 3) < 0.01
    assert len(x.unique()) > 0.99 * x.numel()
    assert abs(torch.corrcoef(torch.stack([x[1:].flatten(), x[:-1].flatten()]))[0, 1]) < 0.02
    part = torch.zeros(200, 64, dtype=torch.float64)
    reference.add_noise_(part, torch.ones(200), 7, 300)
    assert torch.equal(part, x[300:])
    other = torch.zeros_like(x)
    reference.add_noise_(other, torch.ones(500), 8, 0)
    assert abs(torch.corrcoef(torch.stack([x.flatten(), other.flatten()]))[0, 1]) < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "D", "V"), [(1, 8, 3), (50, 520, 11), (40, 100, 1000)])
def test_embedding(device, dtype, N, D, V):
    torch.manual_seed(0)
    w, dy = randn(V, D, device=device, dtype=dtype), randn(N, D, device=device, dtype=dtype)
    ids = torch.randint(V, (N,), device=device)
    assert torch.equal(embedding.embedding_fwd(ids, w), w[ids])
    dw = randn(V, D, device=device, dtype=dtype)
    before, dw64 = dw.clone(), dw.double()
    embedding.embedding_bwd_(dw, dy, ids)
    reference.embedding_bwd_(dw64, dy.double(), ids)
    rows = torch.unique(ids)
    check(dw[rows], dw64[rows], ONE_ROUNDING[dtype])
    untouched = torch.ones(V, dtype=torch.bool, device=device).index_fill_(0, rows, False)
    assert torch.equal(dw[untouched], before[untouched])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "runs", [[64], [65], [63, 2], [64, 64], [1, 63, 64, 65, 1], [30, 200], [200, 1, 5], [10, 54, 130], [40, 40, 40, 8]]
)
def test_embedding_gradient_of_frequent_tokens(device, runs):
    """Runs of equal tokens that end on, cross and skip the chunks in which they are summed."""
    torch.manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs))
    ids = ids[torch.randperm(len(ids))].to(device)
    dy, dw = randn(len(ids), 24, device=device, dtype=torch.float32), torch.ones(len(runs) + 1, 24, device=device)
    dw64 = dw.double()
    reference.embedding_bwd_(dw64, dy.double(), ids)
    embedding.embedding_bwd_(dw, dy, ids)
    check(dw, dw64, 1e-6)
    assert (dw[-1] == 1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("N", [1, 16, 255, 256, 300])
@pytest.mark.parametrize("V", [3, 1000])
def test_few_tokens_are_sorted_as_torch_sorts_them(device, N, V):
    torch.manual_seed(0)
    _compare_sort(torch.randint(V, (N,), device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [8192, embedding.FEW, embedding.FEW + 1])
def test_tokens_are_sorted_as_torch_sorts_them(N):
    torch.manual_seed(0)
    _compare_sort((torch.rand(N, device="cuda") ** 4 * 128256).long())


def _compare_sort(ids):
    values, order = embedding.sort(ids)
    expected = torch.sort(ids, stable=True)
    assert torch.equal(values.long(), expected.values)
    assert torch.equal(order, expected.indices)


def _loss_case(N, D, V, M, dtype, device, dw_dtype):
    x = randn(N, D, device=device, dtype=dtype)
    w = randn(V, D, device=device, dtype=dtype, scale=D**-0.5)
    labels = torch.full((N,), -100)
    rows = torch.randperm(N)[:M].sort().values
    labels[rows] = torch.randint(V, (M,))
    dw = randn(V, D, device=device, dtype=dw_dtype, scale=0.01)
    return x, w, labels.to(device), rows.to(device), dw


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "D", "V", "M", "chunk"), [(30, 16, 101, 30, 100), (40, 33, 70, 25, 7), (9, 8, 9001, 4, 3)]
)
@pytest.mark.parametrize("dw_dtype", [torch.float32, None])
def test_linear_cross_entropy(device, dtype, N, D, V, M, chunk, dw_dtype):
    torch.manual_seed(0)
    x, w, labels, rows, dw = _loss_case(N, D, V, M, dtype, device, dw_dtype or dtype)
    _compare_loss(x, w, labels, rows, dw, chunk, FEW if dtype == torch.bfloat16 else (1e-6, 1e-5, 1e-5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cap", "V"), [(0.7, 101), (30.0, 9001)])
def test_logits_with_a_cap(device, dtype, cap, V):
    torch.manual_seed(0)
    x, w, labels, rows, dw = _loss_case(20, 16, V, 9, dtype, device, torch.float32)
    _compare_loss(3 * x, w, labels, rows, dw, 100, FEW if dtype == torch.bfloat16 else (1e-6, 1e-5, 1e-5), cap)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "cap"), [(9, 0.0), (20, 0.0), (9, 0.7)])
def test_losses_with_factors(device, dtype, M, cap):
    """Of either sign, and 0: those of a token without a label are not read."""
    torch.manual_seed(0)
    x, w, labels, rows, dw = _loss_case(20, 16, 101, M, dtype, device, torch.float32)
    factors = torch.randn(20, device=device)
    factors[rows[0]] = 0.0
    factors[labels < 0] = float("nan")
    _compare_loss(x, w, labels, rows, dw, 4, FEW if dtype == torch.bfloat16 else (1e-6, 1e-5, 1e-5), cap, factors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "cap", "smoothing"), [(101, 0.0, 0.1), (9001, 0.0, 0.3), (101, 0.7, 0.2)])
def test_smoothed_labels(device, dtype, V, cap, smoothing):
    """A last block of logits that is not full; gradients with a cap."""
    torch.manual_seed(0)
    x, w, labels, rows, dw = _loss_case(20, 16, V, 9, dtype, device, torch.float32)
    factors = torch.rand(20, device=device)
    bounds = FEW if dtype == torch.bfloat16 else (1e-6, 1e-5, 1e-5)
    _compare_loss(x, w, labels, rows, dw, 4, bounds, cap, factors, smoothing)


@pytest.mark.parametrize("cap", [0.0, 0.7])
def test_the_reference_smooths_labels_as_torch(cap):
    torch.manual_seed(0)
    x, w, labels, rows, dw = _loss_case(20, 16, 101, 9, torch.float64, "cpu", torch.float64)
    x.requires_grad_(), w.requires_grad_()
    logits = reference.soft_cap(x @ w.T, cap)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    loss.backward()
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    with torch.no_grad():
        losses = plain_loss.linear_cross_entropy(x, w, labels, rows, 1.0, dw, dx, cap=cap, smoothing=0.1)
    torch.testing.assert_close((losses.sum(), dx, dw), (loss.detach(), x.grad, w.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cap", "gradient"), [(0.0, True), (0.7, False)])
def test_labels_that_are_the_likeliest(device, dtype, cap, gradient):
    """Of every second row the most likely token is the label; rows without a label stay as they are."""
    torch.manual_seed(0)
    x, w, labels, rows, dw = _loss_case(12, 16, 101, 9, dtype, device, torch.float32)
    top, found = (x.double() @ w.double().T).topk(2, 1)
    likeliest, clear = found[:, 0], rows[(top[:, 0] - top[:, 1])[rows] > 0.05]  # of bf16, rounded, the others are not
    labels[rows[::2]] = likeliest[rows[::2]]
    hits, other = (torch.full((12,), 7, dtype=torch.uint8, device=device) for _ in range(2))
    given = (dw.clone(), torch.empty_like(x)) if gradient else (None, None)
    losses = loss.linear_cross_entropy(x, w, labels, rows, 1.0, *given, 7, cap, hits_=hits)
    plain_loss.linear_cross_entropy(*up(x, w), labels, rows, 1.0, chunk=7, cap=cap, hits_=other)
    assert len(clear) > 6
    assert torch.equal(hits[clear], (labels == likeliest)[clear].to(torch.uint8))
    assert torch.equal(hits[clear], other[clear])
    assert (hits[labels < 0] == 7).all()
    given = (dw.clone(), torch.empty_like(x)) if gradient else (None, None)
    assert torch.equal(losses, loss.linear_cross_entropy(x, w, labels, rows, 1.0, *given, 7, cap))


def _compare_loss(x, w, labels, rows, dw, chunk, bounds, cap=0.0, factors=None, smoothing=0.0):
    scale = 1 / 37
    dx = torch.full_like(x, float("nan"))
    dw.mul_(scale)
    dx64, dw64 = torch.empty_like(x, dtype=torch.float64), dw.double()
    losses = loss.linear_cross_entropy(x, w, labels, rows, scale, dw, dx, chunk, cap, factors, smoothing)
    losses64 = plain_loss.linear_cross_entropy(
        *up(x, w), labels, rows, scale, dw64, dx64, chunk, cap, factors, smoothing
    )
    check(losses, losses64, bounds[0])
    check(dx, dx64, bounds[1])
    check(dw, dw64, bounds[2])
    ignored = labels < 0
    assert not losses[ignored].any()
    assert not dx[ignored].any()
    again = loss.linear_cross_entropy(x, w, labels, rows, scale, chunk=chunk, cap=cap, smoothing=smoothing)
    assert torch.equal(losses, again)


@pytest.mark.parametrize("device", DEVICES)
def test_no_row_counts(device):
    x, w, labels, rows, dw = _loss_case(5, 8, 12, 0, torch.float32, device, torch.float32)
    before, dx = dw.clone(), torch.full_like(x, float("nan"))
    losses = loss.linear_cross_entropy(x, w, labels, rows, 1.0, dw, dx)
    assert not losses.any()
    assert not dx.any()
    assert torch.equal(dw, before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("N", "D", "V", "M"), [(2048, 1024, 32000, 2048), (1500, 2048, 50257, 1111), (512, 512, 128256, 512)]
)
@pytest.mark.parametrize("chunk", [128, 2048])
@pytest.mark.parametrize("dw_dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy_of_a_real_vocabulary(N, D, V, M, chunk, dw_dtype):
    torch.manual_seed(0)
    bounds = BOUNDS if dw_dtype == torch.float32 else (*BOUNDS[:2], 3e-3)  # one more rounding
    _compare_loss(*_loss_case(N, D, V, M, torch.bfloat16, "cuda", dw_dtype), chunk, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [6000, 20000])  # sorted by comparing all pairs, and by torch
def test_embedding_gradient_repeats_bit_by_bit(N):
    torch.manual_seed(0)
    dy = randn(N, 1000, device="cuda", dtype=torch.bfloat16)
    ids = (torch.rand(N, device="cuda") ** 8 * 30000).long()  # a few tokens are most of them, and cross chunks
    runs = [torch.zeros(30000, 1000, device="cuda") for _ in range(2)]
    for dw in runs:
        embedding.embedding_bwd_(dw, dy, ids)
    dw64 = torch.zeros(30000, 1000, device="cuda", dtype=torch.float64)
    reference.embedding_bwd_(dw64, dy.double(), ids)
    assert torch.equal(*runs)
    check(runs[0], dw64, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("given", [loss, plain_loss])
@pytest.mark.parametrize("M", [0, 5, 40])
def test_the_weights_gradient_may_be_added_later(device, wide, given, M):
    """To the bit as if the loss had added it, a chunk of rows after another."""
    torch.manual_seed(0)
    N, D, V = 40, 24, 50
    x, w = (randn(n, D, device=device, dtype=torch.bfloat16) for n in (N, V))
    labels, rows = torch.randint(V, (N,), device=device), torch.randperm(N, device=device)[:M].sort().values
    direct = randn(V, D, device=device, dtype=torch.float32 if wide else torch.bfloat16)
    later, dx, dx_later = direct.clone(), torch.empty_like(x), torch.empty_like(x)
    expected = given.linear_cross_entropy(x, w, labels, rows, 0.1, direct, dx, chunk=16)
    dlogits = torch.full((M, V), float("nan"), device=device, dtype=x.dtype)
    losses = given.linear_cross_entropy(x, w, labels, rows, 0.1, dx_=dx_later, chunk=16, dlogits_=dlogits)
    given.linear_cross_entropy_dweight(x, rows, dlogits, later, chunk=16)
    assert torch.equal(losses, expected)
    assert torch.equal(dx_later, dx)
    assert torch.equal(later, direct)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "M", "V"), [(5000, 4999, 50257), (4096, 4096, 128256)])
def test_the_weights_gradient_may_be_added_later_at_full_size(N, M, V):
    torch.manual_seed(0)
    x, w = (randn(n, 1024, device="cuda", dtype=torch.bfloat16) for n in (N, V))
    labels, rows = torch.randint(V, (N,), device="cuda"), torch.arange(M, device="cuda")
    direct = randn(V, 1024, device="cuda", dtype=torch.float32)
    later, dx, dx_later = direct.clone(), torch.empty_like(x), torch.empty_like(x)
    loss.linear_cross_entropy(x, w, labels, rows, 0.1, direct, dx)
    dlogits = torch.empty((M, V), device="cuda", dtype=x.dtype)
    loss.linear_cross_entropy(x, w, labels, rows, 0.1, dx_=dx_later, dlogits_=dlogits)
    loss.linear_cross_entropy_dweight(x, rows, dlogits, later)
    assert torch.equal(dx_later, dx)
    assert torch.equal(later, direct)
