"""RoPE, gated units, GELU and bias gradients against the reference in fp64."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, FP32_SUM, ONE_ROUNDING, check, randn, up

from trireme.kernels import gelu, reference, rope, swiglu
from trireme.kernels.attention.docs import make_docs

pytestmark = pytest.mark.grid

SHAPES = [(1, 500), (70, 60), (5, 1500)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("H", "d", "r"), [(1, 8, 8), (5, 64, 64), (3, 80, 80), (3, 80, 24)])
def test_rope(device, dtype, H, d, r, pairs):
    """The first r features of each head, and nothing beside them."""
    torch.manual_seed(0)
    docs = make_docs([5, 1, 8], device)
    packed = randn(14, (H + 2) * d, device=device, dtype=dtype)
    before = packed.clone()
    inv_freq = 10000.0 ** (-torch.arange(0, r, 2, device=device) / r)
    cos, sin = reference.rope_table(inv_freq, 8, 0.7)
    heads = packed[:, : H * d].view(14, H, d)
    x, beyond = heads[..., :r], heads[..., r:].clone()
    expected = x.double()
    reference.rope_(expected, cos.double(), sin.double(), docs.positions, pairs=pairs)
    rope.rope_(x, cos, sin, docs.positions, pairs=pairs)
    check(x, expected, ONE_ROUNDING[dtype])
    assert torch.equal(packed[:, H * d :], before[:, H * d :])
    assert torch.equal(heads[..., r:], beyond)
    back = x.double()
    reference.rope_(back, cos.double(), sin.double(), docs.positions, True, pairs)
    rope.rope_(x, cos, sin, docs.positions, True, pairs)
    check(x, back, ONE_ROUNDING[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_units(device, dtype, shape, name):
    torch.manual_seed(0)
    N, F = shape
    gate_up = randn(N, 2 * F, device=device, dtype=dtype, outliers=True)
    dy = randn(N, F, device=device, dtype=dtype)
    y = getattr(swiglu, f"{name}_fwd")(gate_up)
    check(y, getattr(reference, f"{name}_fwd")(*up(gate_up)), ONE_ROUNDING[dtype])
    d_gate_up, again = getattr(swiglu, f"{name}_bwd")(dy, gate_up)
    d64, _ = getattr(reference, f"{name}_bwd")(*up(dy, gate_up))
    check(d_gate_up, d64, ONE_ROUNDING[dtype])
    assert torch.equal(again, y)  # recomputation gives the forward's bits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (100, 130)])
@pytest.mark.parametrize("exact", [False, True])
def test_gelu_bias(device, dtype, shape, exact):
    torch.manual_seed(0)
    h, dy = (randn(*shape, device=device, dtype=dtype, outliers=True) for _ in range(2))
    bias = randn(shape[1], device=device, dtype=dtype)
    y = gelu.gelu_bias_fwd(h, bias, exact)
    check(y, reference.gelu_bias_fwd(*up(h, bias), exact), ONE_ROUNDING[dtype])
    dbias = torch.ones(shape[1], device=device)
    dbias64 = dbias.double()
    dh, again = gelu.gelu_bias_bwd(dy, h, bias, dbias, exact)
    dh64, _ = reference.gelu_bias_bwd(*up(dy, h, bias), dbias64, exact)
    check(dh, dh64, ONE_ROUNDING[dtype])
    check(dbias, dbias64, FP32_SUM)
    assert torch.equal(again, y)

    dbias, dbias64 = torch.ones(shape[1], device=device), torch.ones(shape[1], device=device).double()
    gelu.bias_bwd_(dbias, dy)
    reference.bias_bwd_(dbias64, dy.double())
    check(dbias, dbias64, FP32_SUM)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_relu_squared(device, dtype, shape):
    """Each value to half a unit of its last place, and fp32's roundings."""
    half, roundings = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[dtype], 3 * 2.0**-24
    near = lambda out, exact: bool(((out.double() - exact).abs() <= (half + roundings) * exact.abs()).all())
    torch.manual_seed(0)
    h, dy = (randn(*shape, device=device, dtype=dtype, outliers=True) for _ in range(2))
    y = gelu.relu2_fwd(h)
    assert near(y, reference.relu2_fwd(*up(h)))
    dh, again = gelu.relu2_bwd(dy, h)
    assert near(dh, reference.relu2_bwd(*up(dy, h))[0])
    assert torch.equal(again, y)
    nan = torch.full((1, 1), float("nan"), device=device)
    assert gelu.relu2_fwd(nan).isnan().all()
    assert reference.relu2_fwd(nan).isnan().all()


@pytest.mark.gpu
def test_column_sums_of_many_rows_repeat_bit_by_bit():
    torch.manual_seed(0)
    h, dy = (randn(5003, 2051, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = randn(2051, device="cuda", dtype=torch.bfloat16)

    def run():
        db, db2 = torch.zeros(2, 2051, device="cuda")
        gelu.bias_bwd_(db2, dy)
        return *gelu.gelu_bias_bwd(dy, h, bias, db), db, db2

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    check(first[3], dy.double().sum(0), FP32_SUM)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    N, F = 70000, 16384
    gate_up = torch.empty(N, 2 * F, device="cuda", dtype=torch.bfloat16)
    gate_up[-1] = torch.randn(2 * F, device="cuda")
    y = swiglu.swiglu_fwd(gate_up)
    check(y[-1:], reference.swiglu_fwd(gate_up[-1:].double()), ONE_ROUNDING[torch.bfloat16])
