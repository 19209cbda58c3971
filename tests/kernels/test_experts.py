"""Kernels of a mixture of experts against the reference in fp64, and the reference against autograd."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, FP32_SUM, LOADS, ONE_ROUNDING, check, choices, framed, randn, up

from trireme.kernels.experts import gradients, matmuls, reference, routing, rows
from trireme.kernels.experts import order as order_
from trireme.kernels.experts.reference import Rule
from trireme.kernels.reference import Act, act_bwd_

pytestmark = [pytest.mark.grid, pytest.mark.turns]

RULES = [Rule(2), Rule(3, renormalise=False), Rule(2, sigmoid=True, scale=1.5), Rule(1, False, True, 2.0), Rule(5)]
GROUPED = [  # of 12 experts
    Rule(3, True, True, 2.5, groups=4, kept=2),
    Rule(3, False, groups=3, kept=1, two=False),
    Rule(4, groups=2, kept=1),
    Rule(3, False, True, raw=True),
]


def logits_of(N: int, E: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Coarse values: ties in most rows."""
    x = randn(N, E, device=device, dtype=torch.float32, scale=2.0)
    return framed(((x * 2).round() / 2).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", [5, 40])
@pytest.mark.parametrize(("rule", "corrected"), [*((rule, rule.sigmoid) for rule in RULES), (RULES[0], True)])
def test_routing(device, dtype, E, rule, corrected):
    torch.manual_seed(0)
    N = 37
    logits = logits_of(N, E, device, dtype)
    correction = randn(E, device=device, dtype=torch.float32) if corrected else None
    weights, experts = routing.route_fwd(logits, rule, correction)
    weights64, experts64 = reference.route_fwd(logits.double(), rule, None if correction is None else correction)
    assert torch.equal(experts, experts64)
    assert experts.dtype == torch.int32
    check(weights, weights64, FP32_SUM)
    dweights = randn(N, rule.k, device=device, dtype=torch.float32)
    for balance in (None, randn(E, device=device, dtype=torch.float32)):
        d = routing.route_bwd(dweights, logits, experts, rule, balance)
        d64 = reference.route_bwd(dweights.double(), logits.double(), experts, rule, *up(balance))
        if d64.norm() > 1e-12:  # the one weight of a softmax over one has no gradient
            check(d, d64, ONE_ROUNDING[dtype] if dtype == torch.bfloat16 else FP32_SUM)


@pytest.mark.parametrize("device", DEVICES)
def test_ties_go_to_the_lower_index_and_nan_is_chosen_last(device):
    nan = float("nan")
    logits = torch.tensor(
        [[1.0, 3, 3, 3, 0], [0, 0, 0, 0, 0], [nan, 1, nan, 0, 2], [nan] * 5, [-torch.inf] * 5], device=device
    )
    expected = [[1, 2], [0, 1], [1, 4], [0, 1], [0, 1]]
    for route in (routing.route_fwd, reference.route_fwd):
        weights, experts = route(logits, Rule(2))
        assert experts.tolist() == expected
        assert weights[:2].isfinite().all()
    _, experts = routing.route_fwd(logits, Rule(2, sigmoid=True), torch.zeros(5, device=device))
    assert experts.tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("E", [12, 36])
@pytest.mark.parametrize("rule", GROUPED)
def test_groups_of_experts(device, E, rule):
    torch.manual_seed(0)
    logits = framed(randn(37, E, device=device, dtype=torch.float32))
    correction = randn(E, device=device, dtype=torch.float32) if rule.sigmoid else None
    weights, experts = routing.route_fwd(logits, rule, correction)
    weights64, experts64 = reference.route_fwd(logits.double(), rule, correction)
    assert torch.equal(experts, experts64)
    check(weights, weights64, FP32_SUM)
    score = torch.sigmoid(logits) + correction if rule.sigmoid else torch.softmax(logits, -1)
    for chosen, by_group in zip(experts.tolist(), score.unflatten(1, (rule.groups, -1)).tolist(), strict=True):
        best = [sum(sorted(own)[-2:]) if rule.two else max(own) for own in by_group]
        kept = sorted(range(rule.groups), key=best.__getitem__)[-rule.kept :]
        assert {e // (E // rule.groups) for e in chosen} <= set(kept)


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_groups_the_lower_is_kept_and_nan_is_no_reason(device):
    nan = float("nan")
    logits = torch.tensor([[1.0, 1, 1, 1], [0, 2, 2, 0], [nan, nan, 1, 0], [nan] * 4], device=device)
    for route in (routing.route_fwd, reference.route_fwd):
        for two in (True, False):
            _, experts = route(logits, Rule(2, True, True, groups=2, two=two), torch.zeros(4, device=device))
            assert experts.tolist() == [[0, 1], [0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("rule", RULES)
def test_reference_routing_is_autograds(rule):
    torch.manual_seed(1)
    logits = torch.randn(6, 7, dtype=torch.float64, requires_grad=True)
    correction = torch.randn(7) if rule.sigmoid else None
    _, experts = reference.route_fwd(logits.detach(), rule, correction)
    score = torch.sigmoid(logits) if rule.sigmoid else torch.softmax(logits, -1)
    w = score.gather(1, experts.long())
    w = (w / w.sum(-1, keepdim=True) if rule.renormalise else w) * rule.scale
    torch.testing.assert_close(reference.route_fwd(logits.detach(), rule, correction)[0], w.detach())
    g, balance = torch.randn(6, rule.k, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    ((w * g).sum() + (torch.softmax(logits, -1) * balance).sum()).backward()
    torch.testing.assert_close(reference.route_bwd(g, logits.detach(), experts, rule, balance), logits.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("N", "E", "k"), [(1, 4, 1), (50, 6, 2), (33, 40, 8)])
def test_pairs_are_sorted_as_by_the_reference(device, load, N, E, k):
    experts = choices(load, N, E, k, device)
    order, plain = order_.sort_pairs(experts, E), reference.sort_pairs(experts, E)
    for ours, theirs in zip(order[:3], plain[:3], strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype == torch.int32
    values = experts.flatten()[plain.pair.long()].tolist()
    assert list(zip(values, plain.pair.tolist(), strict=True)) == sorted(zip(values, plain.pair.tolist(), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "load", "N", "E", "k", "A", "B"),
    [
        (torch.float32, LOADS[0], 21, 5, 2, 40, 48),
        (torch.bfloat16, LOADS[1], 21, 5, 2, 48, 40),
        (torch.float32, LOADS[2], 50, 3, 1, 33, 36),
    ],
)
def test_grouped_products(device, dtype, load, N, E, k, A, B):
    """Both orientations of the matrices, rows by token and sorted ones; nothing is read beyond either."""
    order = reference.sort_pairs(choices(load, N, E, k, device), E)
    by_token = randn(N, A, device=device, dtype=dtype)
    sorted_rows = randn(N * k, A, device=device, dtype=dtype)
    stored = randn(E, A, B, device=device, dtype=dtype, scale=A**-0.5)
    turned = randn(E, B, A, device=device, dtype=dtype, scale=A**-0.5).transpose(1, 2)
    bound = ONE_ROUNDING[dtype]
    for w in (stored, turned):
        check(matmuls.grouped_mm(by_token, w, order, k), reference.grouped_mm(*up(by_token, w), order, k), bound)
        bias = randn(E, B, device=device, dtype=dtype)
        biased = matmuls.grouped_mm(sorted_rows, w, order, bias=bias)
        check(biased, reference.grouped_mm(*up(sorted_rows, w), order, bias=bias.double()), bound)
        check(matmuls.grouped_mm(sorted_rows, w, order), reference.grouped_mm(*up(sorted_rows, w), order), bound)
    dy, dy_token = randn(N * k, B, device=device, dtype=dtype), randn(N, B, device=device, dtype=dtype)
    for a, b, k_a, k_b in ((by_token, dy, k, 0), (sorted_rows, dy_token, 0, k)):
        for grad in (torch.ones(E, A, B, device=device), torch.ones(E, B, A, device=device).transpose(1, 2)):
            expected = grad.double()
            gradients.grouped_add_(grad, a, b, order, k_a, k_b)
            reference.grouped_add_(expected, *up(a, b), order, k_a, k_b)
            check(grad, expected, FP32_SUM)
            idle = order.starts[1:] == order.starts[:-1]
            assert (grad[idle] == 1).all()
    narrow = torch.ones(E, A, B, device=device, dtype=dtype)
    expected = narrow.double()
    gradients.grouped_add_(narrow, by_token, dy, order, k)
    reference.grouped_add_(expected, *up(by_token, dy), order, k)
    check(narrow, expected, bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_slice_of_experts(device, dtype):
    """The bits of all experts', whatever rows of other experts hold."""
    N, E, k, A, B = 60, 6, 2, 16, 40
    order = reference.sort_pairs(choices(LOADS[0], N, E, k, device), E)
    a, b = (randn(N * k, width, device=device, dtype=dtype) for width in (A, B))
    whole = torch.ones(E, A, B, device=device)
    gradients.grouped_add_(whole, a, b, order)
    part = order._replace(starts=order.starts[2:5], sliced=True)
    first, last = part.starts[0], part.starts[-1]
    for operand in (a, b):
        operand[:first], operand[last:] = float("nan"), float("inf")
    found = torch.ones(2, A, B, device=device)
    gradients.grouped_add_(found, a, b, part)
    assert 0 < first < last < N * k
    assert torch.equal(found, whole[2:4])


def check_in_parts(whole, sorted_rows, order, k, w, r):
    """Experts in three parts, each with its own rows alone: bitwise the whole, of the reference too."""
    E = len(order.starts) - 1
    parts = [order.starts[a : b + 1] for a, b in ((0, 1), (1, E - 1), (E - 1, E))]
    for combine in (rows.combine, reference.combine):
        total = whole if combine is rows.combine else combine(sorted_rows, order, k, w, r)
        carry = torch.full(total.shape, float("nan"), device=total.device)
        for i, among in enumerate(parts):
            own = torch.full_like(sorted_rows, float("nan"))  # rows of other experts are not there
            own[among[0] : among[-1]] = sorted_rows[among[0] : among[-1]]
            out, residual = (torch.empty_like(total), r) if i == 2 else (carry, None)
            combine(own, order, k, w, residual, out, carry if i else None, among)
        assert torch.equal(out, total)


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("load", "N", "E", "k", "D"), [(LOADS[1], 29, 5, 2, 40), (LOADS[0], 3, 12, 8, 1100)])
def test_combined_rows_are_those_of_the_reference(device, dtype, load, N, E, k, D):
    order = reference.sort_pairs(choices(load, N, E, k, device), E)
    sorted_rows, residual = randn(N * k, D, device=device, dtype=dtype), randn(N, D, device=device, dtype=dtype)
    weights = randn(N, k, device=device, dtype=torch.float32)
    for w, r in ((weights, residual), (None, None), (None, residual)):
        out = rows.combine(sorted_rows, order, k, w, r)
        check(out, reference.combine(sorted_rows.double(), order, k, *up(w, r)), ONE_ROUNDING[dtype])
        check_in_parts(out, sorted_rows, order, k, w, r)


@pytest.mark.parametrize("load", LOADS)
def test_reference_backward_is_autograds(load):
    """A whole layer of experts, every gradient in fp64."""
    torch.manual_seed(2)
    N, E, k, D, I = 11, 5, 2, 6, 4
    experts = choices(load, N, E, k, "cpu")
    order = reference.sort_pairs(experts, E)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x, w, up_, down = draw(N, D), draw(N, k), draw(E, 2 * I, D), draw(E, I, D)
    out = torch.zeros(N, D, dtype=torch.float64)
    for n in range(N):
        for j, e in enumerate(experts[n].tolist()):
            gate, value = (up_[e] @ x[n]).chunk(2)
            out[n] += w[n, j] * ((torch.nn.functional.silu(gate) * value) @ down[e])
    dy = torch.randn_like(out)
    out.backward(dy)
    with torch.no_grad():
        gate_up = reference.grouped_mm(x, up_.mT, order, k)
        gate, value = gate_up.chunk(2, -1)
        result = reference.grouped_mm(torch.nn.functional.silu(gate) * value, down, order)
        torch.testing.assert_close(reference.combine(result, order, k, w), out)
        d_act = reference.grouped_mm(dy, down.mT, order, k)
        dweights = act_bwd_(act := d_act, d_gate_up := gate_up, Act(), weights=w, order=order)
        torch.testing.assert_close(dweights, w.grad)
        torch.testing.assert_close(reference.combine(reference.grouped_mm(d_gate_up, up_, order), order, k), x.grad)
        d_up, d_down = torch.zeros_like(up_), torch.zeros_like(down)
        reference.grouped_add_(d_up.mT, x, d_gate_up, order, k)
        reference.grouped_add_(d_down, act, dy, order, 0, k)
        torch.testing.assert_close(d_up, up_.grad)
        torch.testing.assert_close(d_down, down.grad)


@pytest.mark.gpu
def test_experts_repeat_bit_by_bit():
    torch.manual_seed(0)
    N, E, k, D, I = 5003, 64, 8, 512, 384
    logits, x = (randn(N, n, device="cuda", dtype=torch.bfloat16) for n in (E, D))
    w = randn(E, 2 * I, D, device="cuda", dtype=torch.bfloat16, scale=D**-0.5)

    def run():
        weights, experts = routing.route_fwd(logits, Rule(k))
        order = order_.sort_pairs(experts, E)
        y = matmuls.grouped_mm(x, w.mT, order, k)
        grad = torch.zeros(w.shape, device="cuda")
        gradients.grouped_add_(grad.mT, x, y, order, k)
        return *order[:3], y, grad, rows.combine(y, order, k, weights)

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    plain = reference.sort_pairs(routing.route_fwd(logits, Rule(k))[1], E)
    assert all(torch.equal(a, b) for a, b in zip(first[:3], plain[:3], strict=True))
