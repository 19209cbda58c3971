"""fp8: codes and scales of the kernels are those of plain torch to the bit; matmuls of codes."""

import pytest
import torch
from kernel_checks import DEVICES, LOADS, check, choices, framed, on_gpu

from trireme.kernels import ops
from trireme.kernels.fp8 import reference
from trireme.kernels.reference import Act

pytestmark = [pytest.mark.grid, pytest.mark.turns]

pytest.importorskip("triton")
E4M3 = torch.float8_e4m3fn
DEVICE = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture
def quantize():
    from trireme.kernels.fp8.quantize import quantize

    return quantize


def inputs(kind: str, N: int, D: int) -> torch.Tensor:
    """(N, D) bf16."""
    torch.manual_seed(N + D)
    x = torch.randn(N, D)
    if kind == "spread":  # over all of bf16's exponents
        x = x * torch.exp2(torch.randint(-140, 120, (N, D)).float())
    elif kind == "zeros":
        x = torch.zeros(N, D)
    elif kind == "negative zeros":
        x = -torch.zeros(N, D)
    elif kind == "one outlier":
        x[N // 2, D // 3] = -3e4
    elif kind == "denormal":
        x = torch.randint(-9, 9, (N, D)).float() * 2.0**-133
    elif kind == "all outliers":
        x = torch.full((N, D), 3.3895e38)
    elif kind == "halfway":  # between neighbouring codes, so that even ones win
        x = torch.randint(-72, 72, (N, D)).float() / 4
    elif kind == "inf":
        x[0, 1], x[N - 1, D - 1] = float("inf"), float("-inf")
    elif kind == "inf when rounded":  # the product of gate and up, in bf16
        x[N // 2, 3], x[N // 2, D // 2 + 3] = 181 * 2.0**56, 181 * 2.0**57
    elif kind == "nan":
        x[N // 2, 3] = float("nan")
    elif kind == "nothing finite":
        x = torch.where(x > 0, float("inf"), float("nan"))
    return x.bfloat16()


KINDS = ["normal", "spread", "zeros", "negative zeros", "one outlier", "denormal", "all outliers", "halfway", "inf",
         "nan", "nothing finite"]  # fmt: skip
SHAPES = [(1, 16), (16, 48), (37, 80), (70, 272)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Codes to the bit; NaN has two."""
    return torch.equal(a.float().nan_to_num(1e9), b.float().nan_to_num(1e9)) and torch.equal(
        torch.signbit(a.float().nan_to_num(1.0)), torch.signbit(b.float().nan_to_num(1.0))
    )


@DEVICE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scale_are_those_of_plain_torch(kind, shape, device, quantize):
    x = inputs(kind, *shape)
    given = framed(x.to(device))
    for rows, columns in ((True, True), (True, False), (False, True)):
        found, expected = quantize(given, rows, columns), reference.quantize(x, rows, columns)
        assert torch.equal(found.scale.cpu(), expected.scale)
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.shape == theirs.shape
                assert ours.dtype == E4M3
                assert same(ours.cpu(), theirs)


@pytest.mark.full
@DEVICE
@pytest.mark.parametrize("kind", ["normal", "one outlier", "inf"])
def test_codes_in_given_memory_are_the_same(kind, device, quantize):
    """And the order that is not asked for keeps what it had."""
    x = framed(inputs(kind, 48, 80).to(device))
    for rows, columns in ((True, True), (True, False), (False, True)):
        memory = [torch.full((48 * 80,), 7, dtype=torch.uint8, device=device).view(E4M3) for _ in range(2)]
        out = ops.Quantized(torch.zeros(1, device=device), memory[0].view(48, 80), memory[1].view(80, 48))
        for made in (quantize, reference.quantize):
            expected = made(x, rows, columns)
            assert made(x, rows, columns, out) is out
            assert torch.equal(out.scale, expected.scale)
            for found, new in zip(out[1:], expected[1:], strict=True):
                assert same(found, new) if new is not None else found.view(torch.uint8).eq(7).all()
            for t in memory:
                t.view(torch.uint8).fill_(7)


@DEVICE
@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (272, 144)], ids=str)
def test_codes_turn_as_they_are(shape, device):
    """Every code, NaN's too, into memory between others'."""
    from trireme.kernels.fp8.quantize import turn

    N, D = shape
    rows = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(N)).to(device)
    for made in (turn, reference.turn):
        memory = torch.full((16 + N * D + 16,), 7, dtype=torch.uint8, device=device)
        out = memory[16:-16].view(D, N)
        made(rows.view(E4M3), out.view(E4M3))
        assert torch.equal(out, rows.T)
        assert memory[:16].eq(7).all()
        assert memory[-16:].eq(7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_code_is_the_nearest_to_its_value(kind):
    """Against float64: half a unit in the last of four bits, or half of the smallest code."""
    x = inputs(kind, 37, 80)
    found = reference.quantize(x, columns=True)
    scale, exact = float(found.scale), x.double()
    value = found.rows.double() * scale
    finite = exact.isfinite()
    assert torch.equal(value.isfinite(), finite)
    bound = torch.maximum(exact.abs() * 2**-4, torch.tensor(scale * 2**-10, dtype=torch.float64))
    assert ((value - exact).abs() <= bound)[finite].all()
    most = exact[finite].abs().max() if finite.any() else 0.0
    assert most == 0 or float(most) / scale <= 448
    assert most < 2.0**-118 or float(most) / scale > 224
    assert same(found.columns[:, :37], found.rows.T.contiguous())
    assert not found.columns[:, 37:].float().any()


@DEVICE
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [50, 1])
def test_products_are_those_of_the_codes(rows, out_dtype, device):
    """In fp64, within fp32's sums and the output's rounding."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 here")
    torch.manual_seed(1)
    x, w = torch.randn(rows, 96).bfloat16().to(device), torch.randn(64, 96).bfloat16().to(device)
    bias = torch.randn(64).to(device, torch.bfloat16) if out_dtype == torch.bfloat16 else None
    a, b = ops.quantize(x), ops.quantize(w)
    out = torch.empty(rows, 64, dtype=out_dtype, device=device)
    assert ops.fp8_matmul(a.rows, a.scale, b.rows, b.scale, out, bias) is out
    exact = (a.rows.double() * a.scale) @ (b.rows.double() * b.scale).T + (0 if bias is None else bias.double())
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (2.4e-3 if out_dtype == torch.bfloat16 else 1e-6 if device == "cpu" else 3e-4)
    quantized = (exact - x.double() @ w.double().T - (0 if bias is None else bias.double())).norm() / exact.norm()
    assert 0.01 < quantized < 0.05  # of two roundings to four bits
    total = torch.randn(rows, 64, device=device).to(out_dtype)
    exact += total.double() - (0 if bias is None else bias.double())
    ops.fp8_add_(total, a.rows, a.scale, b.rows, b.scale)
    error = (total.double() - exact).norm() / exact.norm()
    assert error < (3.4e-3 if out_dtype == torch.bfloat16 else 1e-6 if device == "cpu" else 3e-4)  # rounded twice


@DEVICE
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(50, 70, 96), (1, 32, 16), on_gpu(300, 130, 272)])
def test_products_with_block_scales_of_one(M, N, K, out_dtype, device):
    """In fp64, as those without scales; NaN in a row stays there."""
    from trireme.kernels.fp8 import block_scaled

    torch.manual_seed(2)
    x, w = torch.randn(M, K).bfloat16().to(device), torch.randn(N, K).bfloat16().to(device)
    bias = torch.randn(N).to(device, torch.bfloat16) if out_dtype == torch.bfloat16 else None
    a, b = ops.quantize(x), ops.quantize(w)
    out = torch.empty(M, N, dtype=out_dtype, device=device)
    assert block_scaled.fp8_matmul(a.rows, a.scale, b.rows, b.scale, out, bias) is out
    exact = (a.rows.double() * a.scale) @ (b.rows.double() * b.scale).T + (0 if bias is None else bias.double())
    error = (out.double() - exact).norm() / exact.norm()
    assert error < (2.4e-3 if out_dtype == torch.bfloat16 else 1e-6 if device == "cpu" else 3e-4)
    start = torch.randn(M, N).to(device, out_dtype)
    total = start.clone()
    block_scaled.fp8_add_(total, a.rows, a.scale, b.rows, b.scale)
    exact = start.double() + (a.rows.double() * a.scale) @ (b.rows.double() * b.scale).T
    assert (total.double() - exact).norm() / exact.norm() < (2.4e-3 if out_dtype == torch.bfloat16 else 3e-4)
    a.rows[0, -1] = float("nan")
    block_scaled.fp8_matmul(a.rows, a.scale, b.rows, b.scale, out, bias)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@DEVICE
def test_products_hide_no_nan(device):
    """A row that is not finite leaves a row of NaN, and no other."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 here")
    for bad in ("inf", "nan"):
        x, w = inputs(bad, 37, 80).to(device), torch.randn(32, 80, device=device).bfloat16()
        a, b = ops.quantize(x, columns=True), ops.quantize(w)
        y = ops.fp8_matmul(a.rows, a.scale, b.rows, b.scale, torch.empty(37, 32, dtype=torch.bfloat16, device=device))
        assert torch.equal(y.isnan().all(1), ~x.isfinite().all(1))
        assert torch.equal(y.isnan().any(1), ~x.isfinite().all(1))
        dy = ops.quantize(torch.randn(37, 32, device=device).bfloat16(), columns=True)
        dw = ops.fp8_matmul(a.columns, a.scale, dy.columns, dy.scale, torch.empty(80, 32, device=device))
        assert torch.equal(dw.isnan().any(1), ~x.isfinite().all(0))


@DEVICE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 16), (37, 80), (3, 4112)], ids=str)
def test_rows_have_scales_of_their_own(kind, shape, device):
    """As each row quantized alone."""
    from trireme.kernels.fp8.quantize import quantize_rows

    x = inputs(kind, *shape)
    codes, scales = quantize_rows(framed(x.to(device)))
    for found, own in ((codes.cpu(), scales.cpu()), reference.quantize_rows(x)):
        each = [reference.quantize(row[None]) for row in x]
        assert torch.equal(own, torch.cat([one.scale for one in each]))
        assert same(found, torch.cat([one.rows for one in each]))


@DEVICE
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 48, 80), (2, 272, 160)], ids=str)
def test_experts_have_scales_of_their_own(turned, shape, device):
    """Codes lie along what products sum over, however the matrices are stored."""
    from trireme.kernels.fp8.quantize import quantize_experts

    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16() * torch.tensor([1.0, 1e-3, 50.0])[: shape[0], None, None].bfloat16()
    x[0, 1, 2] = float("nan")
    given = framed(x.to(device))
    w = given.mT if turned else given
    codes, scales = quantize_experts(w)
    for found, own in ((codes.cpu(), scales.cpu()), reference.quantize_experts(x.mT if turned else x)):
        for e, matrix in enumerate(x):
            one = reference.quantize(matrix, columns=True)
            assert own[e] == one.scale
            assert same(found[e], one.rows if turned else one.columns)


@pytest.mark.full
@DEVICE
@pytest.mark.parametrize(
    ("load", "N", "E", "k", "A", "B"),
    [
        *zip(LOADS, (21, 50, 21), (5, 3, 4), (2, 1, 2), (48, 160, 16), (80, 16, 48), strict=True),
        *[on_gpu(load, *sizes) for load in LOADS for sizes in ((50, 3, 1, 160, 16), (100, 9, 3, 272, 144))],
    ],
)
def test_grouped_products_are_those_of_the_codes(N, E, k, A, B, load, device):
    """In fp64: rows by token and sorted ones, with biases and without; NaN in a row stays there."""
    from trireme.kernels.experts import matmuls
    from trireme.kernels.experts import reference as experts

    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 here")
    torch.manual_seed(2)
    order = experts.sort_pairs(choices(load, N, E, k, device), E)
    w = torch.randn(E, A, B, device=device).bfloat16()
    codes_w, scale_w = ops.quantize_experts(w)
    bias = torch.randn(E, B, device=device).bfloat16()
    for rows, chosen, added in ((N, k, bias), (N * k, 0, None)):
        x = torch.randn(rows, A, device=device).bfloat16()
        codes, scale = ops.quantize_rows(x)
        exact = experts.grouped_mm(
            codes.double() * scale.double()[:, None],
            (codes_w.double() * scale_w.double()[:, None, None]).mT,
            order,
            chosen,
            bias=None if added is None else added.double(),
        )
        scales = framed(scale), framed(scale_w)
        for product in (matmuls.grouped_mm, experts.grouped_mm):
            for dtype, bound in ((torch.float32, 1e-6 if device == "cpu" else 3e-4), (torch.bfloat16, 2.4e-3)):
                out = torch.full((N * k, B), float("nan"), dtype=dtype, device=device)
                assert product(codes, codes_w.mT, order, chosen, out, added, scales) is out
                check(out, exact, bound)
        codes[0, 1] = float("nan")
        matmuls.grouped_mm(codes, codes_w.mT, order, chosen, out, added, scales)
        reads = (order.pair // k if chosen else torch.arange(N * k, device=device)) == 0
        assert torch.equal(out.isnan().all(1), reads)
        assert torch.equal(out.isnan().any(1), reads)


GATED = [Act("silu"), Act("gelu")]


@DEVICE
@pytest.mark.parametrize("act", GATED)
@pytest.mark.parametrize("shape", [(1, 16), (3, 32), on_gpu((37, 80))], ids=str)
@pytest.mark.parametrize("kind", ["normal", "one outlier", "inf", "inf when rounded", "nan"])
def test_codes_of_gated_gradients_are_those_of_the_plain_kernel(act, shape, kind, device):
    """To the bit."""
    from trireme.kernels import activations
    from trireme.kernels.fp8 import gated
    from trireme.kernels.fp8.quantize import quantize

    N, F = shape
    h, dy = framed(inputs(kind, N, 2 * F).to(device)), framed(inputs("normal", N, F).to(device))
    dh, y = h.clone(), dy.clone()
    activations.act_bwd_(y, dh, act)
    for columns in (True, False):
        d_up, found = gated.act_codes_bwd(dy, h, act, columns)
        assert same_codes(d_up, quantize(dh, True, columns))
        if columns:
            assert same_codes(found, quantize(y, False, True))


@pytest.mark.full
@DEVICE
@pytest.mark.parametrize("kind", ["normal", "one outlier", "zeros", "inf", "inf when rounded", "nan"])
@pytest.mark.parametrize("shape", [(1, 16), (70, 32), (3, 2064), on_gpu((200, 2064))], ids=str)
def test_maxima_that_ops_leave_are_those_of_their_results(kind, shape, device):
    """Of norms and activations, of the launchers and of the reference."""
    from trireme.kernels import activations, norms
    from trireme.kernels import reference as plain
    from trireme.kernels.fp8.quantize import quantize

    x, (N, D) = framed(inputs(kind, *shape).to(device)), shape
    h, weight = framed(inputs(kind, N, 2 * D).to(device)), inputs("normal", 3, D)[1].to(device)
    for norm_fwd, act_fwd in ((norms.norm_fwd, activations.act_fwd), (plain.norm_fwd, plain.act_fwd)):
        most = [ops.new_maxima(x) for _ in range(3)]
        results = (
            norm_fwd(x[:, None], weight, 1e-5, maxima_=most[0])[0][:, 0],
            act_fwd(h, Act(), maxima_=most[1]),
            act_fwd(x, Act("relu2", gated=False), maxima_=most[2]),
        )
        for y, largest in zip(results, most, strict=True):
            finite = torch.where(y.isfinite(), y.float().abs(), 0.0)
            assert largest.max() == finite.max().view(torch.int32)
            ways = ((True, True), (True, False), (False, True))[: 3 if D < 100 else 1]
            for orders in ways if device == "cuda" or D < 100 or norm_fwd is norms.norm_fwd else ():
                assert same_codes(quantize(y, *orders, maxima=largest), quantize(y, *orders))


def same_codes(a, b) -> bool:
    scales = torch.equal(a.scale, b.scale)
    return scales and all(x is y is None or same(x.cpu(), y.cpu()) for x, y in zip(a[1:], b[1:], strict=True))
