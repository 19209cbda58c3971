"""Embedding, noise and dropout against the reference in fp64."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, ONE_ROUNDING, check, randn, up

from trireme.kernels import embedding, reference

pytestmark = [pytest.mark.grid, pytest.mark.turns]


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
