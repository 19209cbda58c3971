"""Experts on a GPU, where the interpreter cannot look: tiles of matrix instructions, offsets beyond 32 bits, waits."""

import pytest
import torch
from kernel_checks import FP32_SUM, LOADS, ONE_ROUNDING, check, choices, randn, up

from trireme.kernels import activations, launch, ops
from trireme.kernels.experts import gradients, hopper, matmuls, reference, routing, rows
from trireme.kernels.experts import order as order_
from trireme.kernels.experts.reference import Rule

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MIXTURES = {  # experts (some of them), chosen, width, width inside
    "Qwen3-30B": (32, 8, 2048, 768),
    "gpt-oss-20b": (6, 4, 2880, 2880),
    "Mixtral": (3, 2, 4096, 14336),
}


@pytest.fixture(autouse=True)
def freed():
    """Others use the GPU at the same time."""
    yield
    torch.cuda.empty_cache()


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
            check(matmuls.grouped_mm(x, w, order, chosen), expected, bound)
    for a, b, k_a, k_b in ((by_token, dy, k, 0), (sorted_rows, dy_token, 0, k)):
        for grad in (torch.ones(E, A, B, device="cuda"), torch.ones(E, B, A, device="cuda").mT):
            expected = grad.double()
            gradients.grouped_add_(grad, a, b, order, k_a, k_b)
            reference.grouped_add_(expected, *up(a, b), order, k_a, k_b)
            check(grad, expected, 3 * FP32_SUM)  # matrix instructions truncate their sums


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", MIXTURES)
def test_products_in_fp8(name, load, large):
    """Of codes, in fp64 by rows; sums in fp32 lose as little as cuBLASLt's. In 20 runs the same bits."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 here")
    needs(8)
    E, k, D, I = MIXTURES[name]
    N = 1500
    order = order_.sort_pairs(choices(load, N, E, k, "cuda"), E)
    stored = lambda a, b: randn(E, a, b, device="cuda", dtype=BF16, scale=b**-0.5)
    for n, w, chosen in ((N, stored(2 * I, D).mT, k), (N, stored(I, D).mT, k), (N * k, stored(D, I).mT, 0)):
        x = randn(n, w.shape[1], device="cuda", dtype=BF16)
        codes, scale = ops.quantize_rows(x)
        matrices, scales = ops.quantize_experts(w)
        plain = torch.zeros_like(matrices)
        for e in range(E):
            plain[e].view(torch.uint8).copy_(ops.quantize(w[e].T.contiguous()).rows.view(torch.uint8))
        assert torch.equal(matrices.view(torch.uint8), plain.view(torch.uint8))
        turned, of_turned = ops.quantize_experts(w.contiguous())
        assert torch.equal(turned.view(torch.uint8), matrices.view(torch.uint8))
        assert torch.equal(of_turned, scales)
        exact = reference.grouped_mm(
            codes.double() * scale.double()[:, None],
            (matrices.double() * scales.double()[:, None, None]).mT,
            order,
            chosen,
        )
        for dtype, bound in ((torch.float32, 3e-4), (BF16, ONE_ROUNDING[BF16])):
            out = torch.empty(N * k, w.shape[2], device="cuda", dtype=dtype)
            first = matmuls.grouped_mm(codes, matrices.mT, order, chosen, out, None, (scale, scales)).clone()
            check(first, exact, bound)
            for _ in range(20):
                matmuls.grouped_mm(codes, matrices.mT, order, chosen, out, None, (scale, scales))
                assert torch.equal(out, first)
        del exact, plain, turned, matrices, w


def needs_chip(*archs: int) -> None:
    if launch.chip(torch.device("cuda", 0)).arch not in archs:
        pytest.skip(f"for chips of sm_{archs}")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("N", [24, 3000])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_librarys_products_have_the_bits_of_ours(name, N, load):
    """In 20 runs, with few rows for each expert and many, and with none for some."""
    needs_chip(*matmuls.LIBRARY)
    needs(8)
    E, k, D, I = MIXTURES[name]
    order = order_.sort_pairs(choices(load, N, E, k, "cuda"), E)
    stored = lambda a, b: randn(E, a, b, device="cuda", dtype=BF16, scale=b**-0.5)
    by_column = (stored(D, I).mT, stored(2 * I, D)) if name != "gpt-oss-20b" else (stored(I, D), stored(D, 2 * I).mT)
    for w in by_column:  # down, and the gradient of the rows
        x = randn(N * k, w.shape[1], device="cuda", dtype=BF16)
        assert matmuls.by_library(x, w)
        ours = matmuls.grouped_mm(x, w, order, out=torch.empty(N * k, w.shape[2], device="cuda", dtype=BF16))
        for _ in range(20):
            assert torch.equal(matmuls.grouped_mm(x, w, order), ours)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("E", "B"), [(256, 512), (32, 704)])
def test_the_wide_tile_has_the_bits_of_the_usual_one(E, B, load, monkeypatch):
    """With rows looked up and sorted, matrices in both orders, and sizes that the tile does not divide."""
    needs_chip(90)
    N, k, A = 3000, 8, 712
    order = order_.sort_pairs(choices(load, N, E, k, "cuda"), E)
    x, rows = (randn(n, A, device="cuda", dtype=BF16) for n in (N, N * k))
    stored = randn(E, A, B, device="cuda", dtype=BF16, scale=A**-0.5)
    tile = launch.grouped_mm(x.device, BF16, B)
    assert tile.b == 256
    for w in (stored, stored.mT.contiguous().mT):
        for a, chosen in ((x, k), (rows, 0)):
            out = torch.empty(N * k, B, device="cuda", dtype=BF16)
            wide = matmuls.grouped_mm(a, w, order, chosen, out).clone()
            check(wide, reference.grouped_mm(*up(a, w), order, chosen), ONE_ROUNDING[BF16])
            with monkeypatch.context() as usual:
                usual.setattr(launch, "grouped_mm", lambda *_: tile._replace(b=128))
                assert torch.equal(matmuls.grouped_mm(a, w, order, chosen, out), wide)


def test_what_the_library_does_not_take_is_ours():
    """Rows and matrices that are not aligned to 16 bytes, biases, too many experts, other dtypes."""
    needs_chip(*matmuls.LIBRARY)
    E, N, A, B = 3, 40, 512, 264
    order = order_.sort_pairs(choices(LOADS[0], N, E, 1, "cuda"), E)
    x, w = randn(N, A, device="cuda", dtype=BF16), randn(E, A, B, device="cuda", dtype=BF16)
    odd = torch.empty(x.numel() + 1, device="cuda", dtype=BF16)[1:].view_as(x).copy_(x)
    cut = w[..., :260].contiguous()
    assert matmuls.by_library(x, w)
    assert not matmuls.by_library(odd, w)
    assert not matmuls.by_library(x, cut)
    assert not matmuls.by_library(x, w[..., :128].contiguous())
    assert not matmuls.by_library(x.float(), w.float())
    assert not matmuls.by_library(x[:, :256], torch.empty(1024, 256, 256, device="cuda", dtype=BF16))
    for a, b in ((odd, w), (x, cut)):
        check(matmuls.grouped_mm(a, b, order), reference.grouped_mm(*up(a, b), order), ONE_ROUNDING[BF16])


def by_triton(monkeypatch, *given) -> None:
    """gradients.grouped_add_ by the kernel of other chips."""
    with monkeypatch.context() as usual:
        usual.setattr(gradients, "suits_hopper", lambda *_: False)
        gradients.grouped_add_(*given)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("E", "k", "D", "I"), [MIXTURES["Qwen3-30B"], MIXTURES["gpt-oss-20b"], (300, 3, 136, 264)])
def test_hoppers_gradients_have_the_bits_of_tritons(E, k, D, I, dtype, load, monkeypatch):
    """In 20 runs: rows looked up in one operand or none, in both orders, of adapters; idle experts are not touched."""
    needs_chip(90)
    needs(8)
    N = 3000
    order = order_.sort_pairs(choices(load, N, E, k, "cuda"), E)
    x, h = randn(N, D, device="cuda", dtype=BF16), randn(N * k, 16, device="cuda", dtype=BF16)
    d_gate_up = randn(N * k, 2 * I, device="cuda", dtype=BF16)
    for a, b, k_a, k_b in ((x, d_gate_up, k, 0), (d_gate_up, x, 0, k), (h, x, 0, k), (h, d_gate_up, 0, 0)):
        start = torch.randn(E, a.shape[1], b.shape[1], device="cuda").to(dtype)
        plain, grad = start.clone(), torch.empty_like(start)
        assert gradients.suits_hopper(grad, a, b, k_a, k_b)
        by_triton(monkeypatch, plain, a, b, order, k_a, k_b)
        idle = order.starts[1:] == order.starts[:-1]
        assert torch.equal(plain[idle], start[idle])
        for _ in range(20):
            grad.copy_(start)
            gradients.grouped_add_(grad, a, b, order, k_a, k_b)
            assert torch.equal(grad, plain)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_hoppers_gradients_keep_what_is_not_finite(dtype, monkeypatch):
    """And a sum that is not aligned to 16 bytes is added to by Triton's kernel."""
    needs_chip(90)
    order = order_.sort_pairs(choices(LOADS[0], 300, 2, 1, "cuda"), 2)
    a, b = (randn(300, width, device="cuda", dtype=BF16) for width in (136, 264))
    start = torch.randn(2, 136, 264, device="cuda").to(dtype)
    start[:, 3, 5], start[:, 7, 11], start[:, 130, 260] = float("nan"), float("inf"), float("-inf")
    plain, grad = start.clone(), start.clone()
    by_triton(monkeypatch, plain, a, b, order)
    gradients.grouped_add_(grad, a, b, order)
    torch.testing.assert_close(grad, plain, rtol=0, atol=0, equal_nan=True)
    odd = torch.empty(start.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(start).copy_(start)
    assert not gradients.suits_hopper(odd, a, b, 0, 0)
    gradients.grouped_add_(odd, a, b, order)
    torch.testing.assert_close(odd, plain, rtol=0, atol=0, equal_nan=True)


def test_matrices_beyond_32_bits(large):
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
        check(matmuls.grouped_mm(x, stored, order), expected, ONE_ROUNDING[BF16])
    del w, stored
    grad = torch.zeros(E, A, B, device="cuda")
    gradients.grouped_add_(grad, x, dy, order)
    check(grad[-1], x.double().T @ dy.double(), FP32_SUM)
    assert not grad[:-1].any()


def test_rows_beyond_32_bits(large):
    """The last of 750,000 sorted rows, 2.2 billion elements."""
    needs(30)
    N, E, k, D, I = 187_500, 4, 4, 64, 1440
    assert N * k * 2 * I > 1 << 31
    order = order_.sort_pairs(torch.arange(E, device="cuda", dtype=torch.int32).repeat(N, 1), E)
    x, weights = randn(N, D, device="cuda", dtype=BF16), randn(N, k, device="cuda", dtype=torch.float32)
    up_ = randn(E, 2 * I, D, device="cuda", dtype=BF16, scale=D**-0.5).mT
    last = slice(N - 100, N)  # tokens; and of the sorted rows those of the last expert
    gate_up = matmuls.grouped_mm(x, up_, order, k)
    expected = x[last].double() @ up_[-1].double()
    check(gate_up[-100:], expected, ONE_ROUNDING[BF16])
    act = activations.act_fwd(gate_up, ops.Act())
    check(act[-100:], ops.act_fwd(gate_up[-100:].double(), ops.Act()), ONE_ROUNDING[BF16])
    out = rows.combine(gate_up, order, k, weights)
    picked = gate_up.view(E, N, -1)[:, last].double()
    check(out[last], (picked * weights[last].T[..., None].double()).sum(0), ONE_ROUNDING[BF16])
    alone = reference.Order(*(torch.arange(100, device="cuda"),) * 2, order.starts)
    d64, h64, w64 = up(act[-100:], gate_up[-100:], weights[last, -1:].contiguous())
    d_weights64 = ops.act_bwd_(d64, h64, ops.Act(), weights=w64, order=alone)
    d_weights = activations.act_bwd_(act, gate_up, ops.Act(), weights=weights, order=order)
    check(gate_up[-100:], h64, ONE_ROUNDING[BF16])
    check(act[-100:], d64, ONE_ROUNDING[BF16])
    check(d_weights[last, -1], d_weights64[:, 0], FP32_SUM)


def test_nothing_waits_for_the_gpu_and_no_number_of_tokens_compiles_anew():
    E, k, D, I = 24, 3, 512, 256  # widths that the library and the copy engine take
    launchers = (order_._count, order_._scan, order_._place, matmuls._grouped_mm, gradients._grouped_add)
    launchers += (hopper.add_kernel, routing._route_fwd, routing._route_bwd, rows._combine, activations._act_bwd)
    w_up, w_down = (torch.zeros(E, *shape, device="cuda", dtype=BF16) for shape in ((2 * I, D), (D, I)))
    g_up, g_down = (torch.zeros_like(w, dtype=torch.float32) for w in (w_up, w_down))

    def layer(x, logits):
        weights, experts = ops.route_fwd(logits, Rule(k))
        order = ops.sort_pairs(experts, E)
        gate_up = ops.grouped_mm(x, w_up.mT, order, k)
        out = ops.combine(ops.grouped_mm(ops.act_fwd(gate_up, ops.Act()), w_down.mT, order), order, k, weights, x)
        act = ops.grouped_mm(out, w_down, order, k)
        d_weights = ops.act_bwd_(act, gate_up, ops.Act(), weights=weights, order=order)
        ops.grouped_add_(g_down.mT, act, out, order, 0, k)
        ops.grouped_add_(g_up.mT, x, gate_up, order, k)
        ops.combine(ops.grouped_mm(gate_up, w_up, order), order, k)
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
