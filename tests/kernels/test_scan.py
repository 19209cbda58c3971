"""Scans, convolutions and gated norms against recurrences token by token and autograd, in fp64."""

from typing import NamedTuple

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, FP32_SUM, INTERPRETED, ONE_ROUNDING, check, randn, up
from torch import Tensor
from torch.nn.functional import silu

from trireme.kernels import launch
from trireme.kernels.attention.docs import make_docs
from trireme.kernels.scan import reference

LENGTHS = {"in order": [1, 63, 64, 65], "long first": [200, 1, 65, 1, 1, 64], "one": [129]}
# K key heads, H value heads, their widths, delta rule, skip
FORMS = {
    "delta": (2, 4, 32, 32, True, False),
    "delta, odd widths": (1, 1, 24, 40, True, False),
    "plain": (1, 3, 32, 16, False, True),
    "plain, odd widths": (2, 2, 20, 8, False, False),
}
REAL = {
    "as qwen3.5": (2, 6, 128, 128, True, False),
    "as mamba2": (1, 8, 128, 64, False, True),
    "as falcon h1": (1, 4, 256, 64, False, True),
    "as olmo hybrid": (3, 3, 96, 192, True, False),
}
SHAPES = FORMS | REAL


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    skip: Tensor | None


def inputs(form: str, N: int, device="cpu", dtype=torch.float32) -> tuple[Inputs, bool]:
    """Of documents of N tokens in all; q, k and v beside each other in one buffer, as a block has them."""
    K, H, d, e, delta, skips = SHAPES[form]
    torch.manual_seed(N)
    packed = randn(N, 2 * K * d + H * e, device=device, dtype=torch.float32)
    q, k = (t.view(N, K, d) for t in packed[:, : 2 * K * d].split([K * d, K * d], 1))
    q /= q.norm(dim=-1, keepdim=True)
    k /= k.norm(dim=-1, keepdim=True)
    packed = randn(*packed.shape, device=device, dtype=dtype).copy_(packed)
    q, k, v = packed.split([K * d, K * d, H * e], 1)
    g = -(torch.rand(N, H, device=device) ** 3) * 2
    beta = torch.rand(N, H, device=device)
    skip = torch.randn(H, device=device) if skips else None
    return Inputs(q.view(N, K, d), k.view(N, K, d), v.view(N, H, e), g, beta, skip), delta


def recurrence(a: Inputs, lengths, delta: bool) -> tuple[Tensor, Tensor]:
    """(o, states behind each document), token by token."""
    H = a.v.shape[1]
    q, k = (t.repeat_interleave(H // t.shape[1], 1) for t in (a.q, a.k))
    outs, finals, t = [], [], 0
    for length in lengths:
        S = a.v.new_zeros(H, q.shape[2], a.v.shape[2])
        for _ in range(length):
            S = S * a.g[t].exp()[:, None, None]
            told = torch.einsum("hde,hd->he", S, k[t]) if delta else 0.0
            S = S + k[t][:, :, None] * (a.beta[t][:, None] * (a.v[t] - told))[:, None]
            o = torch.einsum("hde,hd->he", S, q[t])
            outs.append(o if a.skip is None else o + a.skip[:, None] * a.v[t])
            t += 1
        finals.append(S)
    return torch.stack(outs), torch.stack(finals)


class Found(NamedTuple):
    out: Tensor
    final: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dskip: Tensor | None


def expected(a: Inputs, lengths, delta: bool, dout: Tensor) -> Found:
    """By autograd in fp64."""
    a = Inputs(*(None if t is None else t.double().requires_grad_() for t in a))
    out, final = recurrence(a, lengths, delta)
    out.backward(dout.double())
    return Found(out.detach(), final.detach(), *(None if t is None else t.grad for t in a))


def found(module, a: Inputs, docs, delta: bool, dout: Tensor) -> Found:
    """By a module's functions; gradients of q, k and v beside each other."""
    N, K, d = a.q.shape
    _, H, e = a.v.shape
    final = torch.empty((len(docs.lengths), H, d, e), dtype=a.g.dtype, device=a.q.device)
    out = module.scan_fwd(*a[:5], docs, delta, a.skip, final=final)
    packed = torch.full((N, 2 * K * d + H * e), float("nan"), dtype=a.q.dtype, device=a.q.device)
    dq, dk, dv = packed.split([K * d, K * d, H * e], 1)
    dq, dk, dv = dq.view(N, K, d), dk.view(N, K, d), dv.view(N, H, e)
    dg, dbeta, dskip = module.scan_bwd(dout, *a[:5], docs, delta, a.skip, dq, dk, dv)
    return Found(out, final, dq, dk, dv, dg, dbeta, dskip)


@pytest.mark.grid("delta-long first", "plain-long first")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_chunks_are_the_recurrence(form, lengths):
    """The reference in fp64, forward and every gradient."""
    docs = make_docs(LENGTHS[lengths], "cpu")
    a, delta = inputs(form, sum(docs.lengths))
    a = Inputs(*up(*a))
    dout = torch.randn(a.v.shape, dtype=torch.float64)
    for own, exact in zip(found(reference, a, docs, delta, dout), expected(a, docs.lengths, delta, dout), strict=True):
        assert (own is None) == (exact is None)
        if own is not None:
            check(own, exact, 1e-12)


def test_gradients_of_decays_are_autograds_and_zero_where_clamped():
    """dt is clamped, and its gradient is zero where it is."""
    torch.manual_seed(0)
    a, A_log, bias = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((9, 3), (3,), (3,)))
    dt = torch.nn.functional.softplus(a + bias).clamp(0.3, 1.2)
    g = -A_log.exp() * dt
    dg, ddt = torch.randn_like(g), torch.randn_like(g)
    (g * dg + dt * ddt).sum().backward()
    with torch.no_grad():
        own_g, own_dt = reference.decay_fwd(a, A_log, bias, 0.3, 1.2)
        check(own_g, g, 1e-15)
        check(own_dt, dt, 1e-15)
        dA, dbias = torch.zeros_like(A_log), torch.zeros_like(bias)
        da = reference.decay_bwd(dg, ddt, a, A_log, bias, dA, dbias, 0.3, 1.2)
    assert (a.grad == 0).any()
    for own, exact in ((da, a.grad), (dA, A_log.grad), (dbias, bias.grad)):
        check(own, exact, 1e-14)


def conv_inputs(lengths, C, biased, device="cpu", dtype=torch.float32):
    torch.manual_seed(C)
    N = sum(lengths)
    x, dy = (randn(N, C + 8, device=device, dtype=dtype)[:, :C] for _ in range(2))
    weight = randn(C, 4, device=device, dtype=dtype)
    return x, dy.contiguous(), weight, randn(C, device=device, dtype=dtype) if biased else None


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_convolution_sees_nothing_before_its_document(lengths, biased):
    lengths = LENGTHS[lengths]
    x, dy, weight, bias = up(*conv_inputs(lengths, 6, biased))
    docs, leaves = make_docs(lengths, "cpu"), [t.clone().requires_grad_() for t in (x, weight, *([bias] * biased))]
    ys = [
        silu(torch.nn.functional.conv1d(doc.T[None], leaves[1][:, None], *leaves[2:], padding=3, groups=6))[0].T[
            : len(doc)
        ]
        for doc in leaves[0].split(lengths)
    ]
    y = torch.cat(ys)
    y.backward(dy)
    check(reference.conv_fwd(x, weight, bias, docs), y.detach(), 1e-14)
    dx, dw, db = (
        torch.full_like(x, float("nan")),
        torch.zeros_like(weight),
        None if bias is None else torch.zeros(6).double(),
    )
    reference.conv_bwd(dy, x, weight, bias, docs, dw, db, dx)
    for own, exact in zip((dx, dw, db), leaves, strict=False):
        check(own, exact.grad, 1e-13)


# ---------------------------------------------------------------- kernels


BF16_ERROR = 5e-3  # operands and results of products are rounded, one behind the other
SUMS = {"final": 4e-6, "dg": 4e-6}  # of exponents that are sums of decays; of gradients that cancel
SETTINGS = [(32, 32, 32), (32, 16, 64), (32, 64, 64)]  # rows of a chunk, columns of a program, of keys in gradients


def compare(a: Inputs, delta: bool, lengths, device: str, dtype: torch.dtype) -> Found:
    from trireme.kernels.scan import scan

    docs = make_docs(lengths, device)
    dout = randn(*a.v.shape, device=device, dtype=dtype)
    own, exact = found(scan, a, docs, delta, dout), expected(a, docs.lengths, delta, dout)
    for name, result, right in zip(Found._fields, own, exact, strict=True):
        if result is not None:
            check(result, right, SUMS.get(name, 1e-6) if dtype == torch.float32 else BF16_ERROR)
    return own


@pytest.mark.full
@pytest.mark.turns
@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["delta", "plain, odd widths"])
@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled where there is a GPU")
def test_scan_interpreted(dtype, form, rows, monkeypatch):
    """Documents of one and of several chunks, and of one token."""
    lengths, (_, _, *rest) = [1, 65, 9], SHAPES[form]
    monkeypatch.setitem(SHAPES, form, (1, 2, *rest))
    monkeypatch.setattr(launch, "scan", lambda *_: launch.Scan(rows, 32, 16, 16, 16, 4, 1, "ieee"))
    a, delta = inputs(form, sum(lengths), "cpu", dtype)
    compare(a, delta, lengths, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("form", [*FORMS, *REAL])
def test_scan(dtype, form, lengths):
    a, delta = inputs(form, sum(LENGTHS[lengths]), "cuda", dtype)
    compare(a, delta, LENGTHS[lengths], "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [*FORMS, *REAL])
@pytest.mark.parametrize(("rows", "columns", "keys"), SETTINGS)
@pytest.mark.parametrize("warps", [4, 8])
def test_scan_at_every_setting(form, rows, columns, keys, warps, monkeypatch):
    """Triton has miscompiled such kernels at some tiles and warps."""
    width = max(16, launch.power2(SHAPES[form][2]))
    setting = launch.Scan(rows, width, columns, min(keys, width), columns, warps, 2, "tf32")
    monkeypatch.setattr(launch, "scan", lambda *_: setting)
    lengths = [200, 1, 65, 64]
    a, delta = inputs(form, sum(lengths), "cuda", torch.bfloat16)
    compare(a, delta, lengths, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("form", REAL)
def test_scan_repeats(form):
    """The same bits in twenty runs."""
    from trireme.kernels.scan import scan

    docs = make_docs([1000, 1, 500], "cuda")
    a, delta = inputs(form, sum(docs.lengths), "cuda", torch.bfloat16)
    dout = randn(*a.v.shape, device="cuda", dtype=torch.bfloat16)
    first = found(scan, a, docs, delta, dout)
    for _ in range(19):
        for own, again in zip(first, found(scan, a, docs, delta, dout), strict=True):
            assert own is None or torch.equal(own, again)


@pytest.mark.grid
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "C", "biased"), [([40], 8, False), ([1, 63, 2, 5], 70, True)])
def test_convolution(device, dtype, lengths, C, biased):
    from trireme.kernels.scan import convolution

    docs = make_docs(lengths, device)
    x, dy, weight, bias = conv_inputs(lengths, C, biased, device, dtype)
    check(
        convolution.conv_fwd(x, weight, bias, docs), reference.conv_fwd(*up(x, weight, bias), docs), ONE_ROUNDING[dtype]
    )
    dx = randn(len(x), C + 16, device=device, dtype=dtype)[:, :C]
    sums = [None if t is None else torch.ones(t.shape, device=device) for t in (weight, bias)]
    dx64, sums64 = dx.double(), up(*sums)
    convolution.conv_bwd(dy, x, weight, bias, docs, *sums, dx)
    reference.conv_bwd(*up(dy, x, weight, bias), docs, *sums64, dx64)
    check(dx, dx64, ONE_ROUNDING[dtype])
    for own, exact in zip(sums, sums64, strict=True):
        assert own is None or check(own, exact, FP32_SUM) is None
