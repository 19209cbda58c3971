"""Experts on a GPU, where the interpreter cannot look: tiles of matrix instructions, offsets beyond 32 bits, waits."""

import pytest
import torch
from kernel_checks import FP32_SUM, LOADS, ONE_ROUNDING, check, choices, randn, up

from trireme.kernels import ops, swiglu
from trireme.kernels.experts import gradients, hopper, products, reference, routing, rows
from trireme.kernels.experts import order as order_
from trireme.kernels.experts.reference import Rule

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def needs(gib: int) -> None:
    if torch.cuda.get_device_properties(0).total_memory < gib << 30:
        pytest.skip(f"needs {gib} GiB of GPU memory")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("E", "k", "A", "B"), [(8, 2, 512, 384), (20, 3, 360, 264)])
def test_products_over_many_tiles(load, dtype, E, k, A, B):
    """Tiles full and cut at every edge, several along each width: what is pipelined is the right memory."""
    N, bound = 1500, {torch.float32: FP32_SUM, BF16: ONE_ROUNDING[BF16]}[dtype]
    order = order_.sort_pairs(choices(load, N, E, k, "cuda"), E)
    by_token, sorted_rows = randn(N, A, device="cuda", dtype=dtype), randn(N * k, A, device="cuda", dtype=dtype)
    stored = randn(E, A, B, device="cuda", dtype=dtype, scale=A**-0.5)
    turned = randn(E, B, A, device="cuda", dtype=dtype, scale=A**-0.5).mT
    dy, dy_token = randn(N * k, B, device="cuda", dtype=dtype), randn(N, B, device="cuda", dtype=dtype)
    for w in (stored, turned):
        for x, chosen in ((by_token, k), (sorted_rows, 0)):
            expected = reference.grouped_mm(*up(x, w), order, chosen)
            check(products.grouped_mm(x, w, order, chosen), expected, bound)
    for a, b, k_a, k_b in ((by_token, dy, k, 0), (sorted_rows, dy_token, 0, k)):
        for grad in (torch.ones(E, A, B, device="cuda"), torch.ones(E, B, A, device="cuda").mT):
            expected = grad.double()
            gradients.grouped_add_(grad, a, b, order, k_a, k_b)
            reference.grouped_add_(expected, *up(a, b), order, k_a, k_b)
            check(grad, expected, 3 * FP32_SUM)  # matrix instructions truncate their sums


def test_matrices_beyond_32_bits():
    """All tokens at the last of 128 experts, their matrices 2.3 billion elements."""
    needs(30)
    N, E, A, B = 200, 128, 2880, 6272
    assert E * A * B > 1 << 31
    order = order_.sort_pairs(torch.full((N, 1), E - 1, device="cuda", dtype=torch.int32), E)
    x, dy = randn(N, A, device="cuda", dtype=BF16), randn(N, B, device="cuda", dtype=BF16)
    w = torch.zeros(E, A, B, device="cuda", dtype=BF16)
    w[-1] = torch.randn(A, B, device="cuda") * A**-0.5
    for stored in (w, w.view(E, B, A).mT):
        expected = x.double() @ stored[-1].double()
        check(products.grouped_mm(x, stored, order), expected, ONE_ROUNDING[BF16])
    del w, stored
    grad = torch.zeros(E, A, B, device="cuda")
    gradients.grouped_add_(grad, x, dy, order)
    check(grad[-1], x.double().T @ dy.double(), FP32_SUM)
    assert not grad[:-1].any()


def test_rows_beyond_32_bits():
    """The last of 750,000 sorted rows, 2.2 billion elements."""
    needs(30)
    N, E, k, D, I = 187_500, 4, 4, 64, 1440
    assert N * k * 2 * I > 1 << 31
    order = order_.sort_pairs(torch.arange(E, device="cuda", dtype=torch.int32).repeat(N, 1), E)
    x, weights = randn(N, D, device="cuda", dtype=BF16), randn(N, k, device="cuda", dtype=torch.float32)
    up_ = randn(E, 2 * I, D, device="cuda", dtype=BF16, scale=D**-0.5).mT
    last = slice(N - 100, N)  # tokens; and of the sorted rows those of the last expert
    gate_up = products.grouped_mm(x, up_, order, k)
    expected = x[last].double() @ up_[-1].double()
    check(gate_up[-100:], expected, ONE_ROUNDING[BF16])
    act = swiglu.swiglu_fwd(gate_up)
    check(act[-100:], ops.swiglu_fwd(gate_up[-100:].double()), ONE_ROUNDING[BF16])
    out = rows.combine(gate_up, order, k, weights)
    picked = gate_up.view(E, N, -1)[:, last].double()
    check(out[last], (picked * weights[last].T[..., None].double()).sum(0), ONE_ROUNDING[BF16])
    d_gate_up, again, d_weights = rows.routed_swiglu_bwd(act, gate_up, weights, order)
    alone = reference.Order(*(torch.arange(100, device="cuda"),) * 2, order.starts)
    theirs = reference.routed_swiglu_bwd(*up(act[-100:], gate_up[-100:], weights[last, -1:].contiguous()), alone)
    for mine, exact in ((d_gate_up[-100:], theirs[0]), (again[-100:], theirs[1])):
        check(mine, exact, ONE_ROUNDING[BF16])
    check(d_weights[last, -1], theirs[2][:, 0], FP32_SUM)


def test_nothing_waits_for_the_gpu_and_no_number_of_tokens_compiles_anew():
    E, k, D, I = 24, 3, 128, 64
    launchers = (order_._count, order_._scan, order_._place, products._grouped_mm, gradients._grouped_add)
    launchers += (hopper.add_kernel, routing._route_fwd, routing._route_bwd, rows._combine, rows._routed_swiglu_bwd)
    w_up, w_down = (torch.zeros(E, *shape, device="cuda", dtype=BF16) for shape in ((2 * I, D), (D, I)))
    g_up, g_down = (torch.zeros_like(w, dtype=torch.float32) for w in (w_up, w_down))

    def layer(x, logits):
        weights, experts = ops.route_fwd(logits, Rule(k))
        order = ops.sort_pairs(experts, E)
        gate_up = ops.grouped_mm(x, w_up.mT, order, k)
        out = ops.combine(ops.grouped_mm(ops.swiglu_fwd(gate_up), w_down.mT, order), order, k, weights, x)
        d_act = ops.grouped_mm(out, w_down, order, k)
        d_gate_up, act, d_weights = ops.routed_swiglu_bwd(d_act, gate_up, weights, order)
        ops.grouped_add_(g_down.mT, act, out, order, 0, k)
        ops.grouped_add_(g_up.mT, x, d_gate_up, order, k)
        ops.combine(ops.grouped_mm(d_gate_up, w_up, order), order, k)
        ops.route_bwd(d_weights, logits, experts, Rule(k))

    inputs = [[randn(n, width, device="cuda", dtype=BF16) for width in (D, E)] for n in (1, 7, 64, 1000)]
    layer(*inputs[0])
    known = [len(kernel.forms) for kernel in launchers]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, logits in inputs:
            layer(x, logits)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert [len(kernel.forms) for kernel in launchers] == known
