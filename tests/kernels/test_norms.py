"""RMSNorm and LayerNorm launchers against the reference in fp64."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, FP32_SUM, ONE_ROUNDING, check, randn, up

from trireme.kernels import launch, layernorm, reference, rmsnorm

pytestmark = pytest.mark.grid

SHAPES = [(1, 600), (150, 8), (37, 257), (9, 2048)]
LARGE = (9, 5120), (9, 8192), (5, 16384), (1500, 12288), (300, 16384), (20, 18432)
SHAPES += [pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE]
GRADIENT = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3}  # one more rounding: the residual gradient is itself bf16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("residual", [False, True])
def test_rmsnorm(device, dtype, shape, residual):
    torch.manual_seed(0)
    h, dy = (randn(*shape, device=device, dtype=dtype, outliers=True) for _ in range(2))
    dr = randn(*shape, device=device, dtype=dtype) if residual else None
    w = randn(shape[1], device=device, dtype=dtype)
    y, rstd = rmsnorm.rmsnorm_fwd(h, w, 1e-5)
    kept = torch.empty_like(h)
    again, _ = rmsnorm.rmsnorm_fwd(h, w, 1e-5, kept)
    assert torch.equal(again, y)
    assert torch.equal(kept, h)
    y64, rstd64 = reference.rmsnorm_fwd(*up(h, w), 1e-5)
    check(y, y64, ONE_ROUNDING[dtype])
    check(rstd, rstd64, FP32_SUM)

    dw = torch.ones(shape[1], device=device)
    dw64 = dw.double()
    dh = rmsnorm.rmsnorm_bwd(dy, h, w, rstd, dw, dr)
    dh64 = reference.rmsnorm_bwd(*up(dy, h, w), rstd64, dw64, *up(dr))
    check(dh, dh64, GRADIENT[dtype])
    check(dw, dw64, FP32_SUM)
    assert torch.equal(dh, rmsnorm.rmsnorm_bwd(dy, h, w, rstd, None, dr))  # of a frozen weight
    assert torch.equal(dh, rmsnorm.rmsnorm_bwd(dy, h, w, rstd, dw, dr, out=dy))
    assert torch.equal(dh, dy)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("rows", [7, 1500])  # more in place than are made at a time
def test_columns_in_parts(device, residual, rows, monkeypatch):
    """Of wide rows; the last part is short. In place, too, where programs would read each other's results."""
    if device == "cpu" and rows > 7:
        monkeypatch.setattr(rmsnorm, "CHUNK", 3)
        rows = 7
    torch.manual_seed(0)
    monkeypatch.setattr(launch, "WIDEST", 64)
    D, bound = 150, GRADIENT[torch.bfloat16]
    h, dy, dr = (randn(rows, D, device=device, dtype=torch.bfloat16, outliers=True) for _ in range(3))
    w, dr = randn(D, device=device, dtype=torch.bfloat16), dr if residual else None
    _, rstd = rmsnorm.rmsnorm_fwd(h, w, 1e-5)
    _, mean, of_layer = layernorm.layernorm_fwd(h, w, w, 1e-5)
    for backward, plain, stats in (
        (rmsnorm.rmsnorm_bwd, reference.rmsnorm_bwd, (rstd,)),
        (layernorm.layernorm_bwd, reference.layernorm_bwd, (mean, of_layer)),
    ):
        sums = list(torch.ones(len(stats), D, device=device))
        sums64 = [t.double() for t in sums]
        dh = backward(dy, h, w, *stats, *sums, dr)
        check(dh, plain(*up(dy, h, w), *up(*stats), *sums64, *up(dr)), bound)
        for found, exact in zip(sums, sums64, strict=True):
            check(found, exact, FP32_SUM)
        own = dy.clone()
        assert backward(own, h, w, *stats, *sums, dr, out=own) is own
        assert torch.equal(own, dh)
        for found, exact in zip(sums, sums64, strict=True):
            check(found - 1, 2 * (exact - 1), FP32_SUM)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("residual", [False, True])
def test_layernorm(device, dtype, shape, residual):
    torch.manual_seed(0)
    h, dy = (randn(*shape, device=device, dtype=dtype, outliers=True) for _ in range(2))
    dr = randn(*shape, device=device, dtype=dtype) if residual else None
    w, b = (randn(shape[1], device=device, dtype=dtype) for _ in range(2))
    y, mean, rstd = layernorm.layernorm_fwd(h, w, b, 1e-5)
    y64, mean64, rstd64 = reference.layernorm_fwd(*up(h, w, b), 1e-5)
    check(y, y64, ONE_ROUNDING[dtype])
    check(mean, mean64, FP32_SUM)
    check(rstd, rstd64, FP32_SUM)

    dw, db = torch.ones(2, shape[1], device=device)
    dw64, db64 = dw.double(), db.double()
    dh = layernorm.layernorm_bwd(dy, h, w, mean, rstd, dw, db, dr)
    dh64 = reference.layernorm_bwd(*up(dy, h, w), mean64, rstd64, dw64, db64, *up(dr))
    check(dh, dh64, GRADIENT[dtype])
    check(dw, dw64, FP32_SUM)
    check(db, db64, FP32_SUM)
    assert torch.equal(dh, layernorm.layernorm_bwd(dy, h, w, mean, rstd, dw, db, dr, out=dy))
    assert torch.equal(dh, dy)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "D"), [(3, 16), (3, 80), (1, 4096)])  # the last: over the whole width
@pytest.mark.parametrize("weight", [None, torch.float32])  # in fp32, as 1 + w is
def test_head_rmsnorm(device, dtype, H, D, weight):
    torch.manual_seed(0)
    N = 13
    packed = randn(N, 2 * H * D, device=device, dtype=dtype)
    x = packed[:, H * D :].view(N, H, D)  # strided, as in a packed qkv row
    w = randn(D, device=device, dtype=weight or dtype)
    y, rstd = rmsnorm.head_rmsnorm_fwd(x, w, 1e-6)
    y64, rstd64 = reference.head_rmsnorm_fwd(*up(x, w), 1e-6)
    check(y, y64, ONE_ROUNDING[dtype])
    check(rstd, rstd64, FP32_SUM)

    d_packed = randn(N, 2 * H * D, device=device, dtype=dtype)
    left = d_packed[:, : H * D].clone()
    dy = d_packed[:, H * D :].view(N, H, D)
    dw = torch.zeros(D, device=device)
    dw64, dx64 = dw.double(), x.double()
    reference.head_rmsnorm_bwd(*up(dy, x, w), rstd64, dw64, dx64)
    rmsnorm.head_rmsnorm_bwd(dy, x, w, rstd, dw, dy)  # in place
    check(dy, dx64, GRADIENT[dtype])
    check(dw, dw64, FP32_SUM)
    assert torch.equal(d_packed[:, : H * D], left)


@pytest.mark.gpu
def test_norms_of_a_large_model_repeat_bit_by_bit():
    torch.manual_seed(0)
    h, dy, dr = (randn(4099, 5120, device="cuda", dtype=torch.bfloat16, outliers=True) for _ in range(3))
    w, b = (randn(5120, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run():
        dw, dw2, db = torch.zeros(3, 5120, device="cuda")
        y, rstd = rmsnorm.rmsnorm_fwd(h, w, 1e-5)
        y2, mean, rstd2 = layernorm.layernorm_fwd(h, w, b, 1e-5)
        dh = rmsnorm.rmsnorm_bwd(dy, h, w, rstd, dw, dr)
        dh2 = layernorm.layernorm_bwd(dy, h, w, mean, rstd2, dw2, db)
        return y, rstd, y2, mean, dh, dh2, dw, dw2, db

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    dw64 = torch.zeros(5120, device="cuda", dtype=torch.float64)
    dh64 = reference.rmsnorm_bwd(*up(dy, h, w), first[1].double(), dw64, *up(dr))
    check(first[4], dh64, GRADIENT[torch.bfloat16])
    check(first[6], dw64, FP32_SUM)
