"""RoPE, activations and bias gradients against the reference in fp64, and the reference against autograd."""

from functools import partial

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, FP32_SUM, ONE_ROUNDING, check, randn, up
from torch.nn import functional

from trireme.kernels import activations, column_sum, reference, rope
from trireme.kernels.attention.docs import make_docs
from trireme.kernels.experts.reference import sort_pairs
from trireme.kernels.reference import Act

pytestmark = [pytest.mark.grid, pytest.mark.turns]


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


ROUNDED = {torch.float32: 1e-6, torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2}  # one rounding of an outlier
# activation, with a bias, with weights of rows
FORMS = {
    "silu": (Act(), False, False),
    "gelu": (Act("gelu"), False, False),
    "clamped": (Act(limit=0.75), False, False),
    "relu2": (Act("relu2", gated=False), False, False),
    "gelu + bias": (Act("gelu", gated=False), True, False),
    "exact gelu + bias": (Act("exact gelu", gated=False), True, False),
    "weighted silu": (Act(), False, True),
    "weighted clamped": (Act(limit=0.75), False, True),
    "weighted relu2": (Act("relu2", gated=False), False, True),
}


def activation(form: str, N: int, F: int, device: str, dtype: torch.dtype):
    """(activation, h, dy, keyword arguments of the backward: bias, dbias_, weights, order)."""
    torch.manual_seed(0)
    act, biased, weighted = FORMS[form]
    h = randn(N, F * (2 if act.gated else 1), device=device, dtype=dtype, outliers=True)
    more = {}
    if biased:
        more = dict(bias=randn(F, device=device, dtype=dtype), dbias_=torch.ones(F, device=device))
    if weighted:
        order = sort_pairs(torch.randint(3, (N, 1), device=device, dtype=torch.int32), 3)
        more = dict(weights=randn(N, 1, device=device, dtype=torch.float32), order=order)
    return act, h, randn(N, F, device=device, dtype=dtype), more


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 500), (70, 60), (5, 2500)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_activation(device, dtype, shape, form):
    act, h, dy, more = activation(form, *shape, device, dtype)
    y = activations.act_fwd(h, act, more.get("bias"))
    check(y, reference.act_fwd(h.double(), act, *up(more.get("bias"))), ROUNDED[dtype])
    dy64, h64 = up(dy, h)
    more64 = {name: t.double() if isinstance(t, torch.Tensor) else t for name, t in more.items()}
    dweights64 = reference.act_bwd_(dy64, h64, act, **more64)
    dweights = activations.act_bwd_(dy, h, act, **more)
    check(h, h64, ROUNDED[dtype])
    check(dy, dy64, ROUNDED[dtype])
    if "order" in more:
        check(dweights, dweights64, FP32_SUM)
    else:
        assert torch.equal(dy, y)  # recomputation gives the forward's bits
    if "bias" in more:
        check(more["dbias_"], more64["dbias_"], FP32_SUM)


@pytest.mark.parametrize("form", FORMS)
def test_reference_activations_are_autograd(form):
    act, h, dy, more = activation(form, 9, 6, "cpu", torch.float64)
    leaves = [t if t is None else t.double().requires_grad_() for t in (h, more.get("bias"), more.get("weights"))]
    x, bias, weights = leaves
    f = dict(
        silu=functional.silu, relu2=lambda x: functional.relu(x) ** 2, gelu=partial(functional.gelu, approximate="tanh")
    )
    f = f | {"exact gelu": functional.gelu}
    if act.limit:
        gate, up_ = x[:, ::2].clamp(max=act.limit), x[:, 1::2].clamp(-act.limit, act.limit)
        y = (up_ + 1) * gate * torch.sigmoid(1.702 * gate)
    elif act.gated:
        y = f[act.name](x[:, :6]) * x[:, 6:]
    else:
        y = f[act.name](x if bias is None else x + bias)
    check(reference.act_fwd(h, act, bias), y.detach(), 1e-14)
    y = y if weights is None else y * weights[more["order"].pair.long()]
    y.backward(dy)
    if "dbias_" in more:
        more["dbias_"] = torch.zeros(6, dtype=torch.float64)
    if "weights" in more:
        more["weights"] = more["weights"].double()
    with torch.no_grad():
        dweights = reference.act_bwd_(dy, h, act, **more)
    check(dy, y.detach(), 1e-14)
    for own, leaf in zip((h, more.get("dbias_"), dweights), leaves, strict=True):
        assert own is None or check(own, leaf.grad, 1e-13) is None


@pytest.mark.parametrize("device", DEVICES)
def test_relu_squared_keeps_nan(device):
    nan, act = torch.full((1, 1), float("nan"), device=device), Act("relu2", gated=False)
    assert activations.act_fwd(nan, act).isnan().all()
    assert reference.act_fwd(nan, act).isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gradient(device, dtype):
    torch.manual_seed(0)
    dy, dbias = randn(100, 130, device=device, dtype=dtype, outliers=True), torch.ones(130, device=device)
    dbias64 = dbias.double()
    column_sum.bias_bwd_(dbias, dy)
    reference.bias_bwd_(dbias64, dy.double())
    check(dbias, dbias64, FP32_SUM)


@pytest.mark.gpu
def test_column_sums_of_many_rows_repeat_bit_by_bit():
    torch.manual_seed(0)
    h, dy = (randn(5003, 2051, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = randn(2051, device="cuda", dtype=torch.bfloat16)

    def run():
        (db, db2), d, y = torch.zeros(2, 2051, device="cuda"), h.clone(), dy.clone()
        column_sum.bias_bwd_(db2, dy)
        activations.act_bwd_(y, d, Act("gelu", gated=False), bias, db)
        return d, y, db, db2

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    check(first[3], dy.double().sum(0), FP32_SUM)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    N, F = 70000, 16384
    h, dy = (
        torch.empty(N, 2 * F, device="cuda", dtype=torch.bfloat16),
        torch.empty(N, F, device="cuda", dtype=torch.bfloat16),
    )
    h[-1], dy[-1] = torch.randn(2 * F, device="cuda"), torch.randn(F, device="cuda")
    (h64, dy64), y = up(h[-1:], dy[-1:]), activations.act_fwd(h, Act())
    check(y[-1:], reference.act_fwd(h64, Act()), ONE_ROUNDING[torch.bfloat16])
    reference.act_bwd_(dy64, h64, Act())
    activations.act_bwd_(dy, h, Act())
    check(h[-1:], h64, ONE_ROUNDING[torch.bfloat16])
