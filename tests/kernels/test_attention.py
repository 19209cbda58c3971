"""Attention launchers against the reference in fp64: packed documents, grouped queries, windows, head widths."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, FP32_SUM, ONE_ROUNDING, check, error, randn, up

from trireme.kernels import launch
from trireme.kernels.attention import attention, gate, reference
from trireme.kernels.attention import sinks as sinks_
from trireme.kernels.attention.docs import make_docs
from trireme.kernels.tiles import Chip

pytestmark = [pytest.mark.grid, pytest.mark.turns]

OUT = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3}
GRADIENT = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
BF16, FP32 = torch.bfloat16, torch.float32

CASES = [  # documents, query heads, key heads, head width or (of keys, of values), window, dtype, perhaps a cap
    ([100], 1, 1, 16, 0, FP32),
    ([150, 1, 30], 2, 1, 16, 0, FP32),
    ([64, 128], 2, 2, 8, 0, FP32),
    ([150], 1, 1, 16, 50, FP32),
    ([200, 7], 1, 1, 16, 2, FP32),
    ([130], 1, 1, 16, 128, FP32),
    ([70, 90], 4, 1, 32, 0, BF16),
    ([129], 1, 1, 80, 0, BF16),
    ([65], 1, 1, 192, 0, BF16),
    ([65], 1, 1, 256, 0, BF16),
    ([65], 2, 1, 512, 0, BF16),
    ([140], 2, 1, 32, 33, BF16),
    ([150, 1, 30], 2, 1, 16, 0, FP32, 1.5),
    ([140], 2, 1, 32, 33, BF16, 2.0),
    ([65], 1, 1, 256, 0, BF16, 50.0),
    ([100, 1, 30], 2, 2, (24, 16), 0, FP32),
    ([65], 1, 1, (192, 128), 0, BF16),
    ([70], 2, 1, (192, 128), 33, BF16),
    ([70, 1, 30], 2, 1, 72, 33, BF16, 2.0),
    ([70, 7], 2, 1, (96, 80), 0, FP32),
    ([65], 1, 1, (160, 192), 17, FP32),
    ([70], 2, 1, (16, 40), 33, FP32, 1.5),
]
GPU_CASES = [
    ([1000, 1, 3, 500, 129, 128, 127, 2], 8, 2, 128, 0, BF16),
    ([1000, 1, 3, 500], 4, 4, 64, 0, BF16),
    ([700, 333], 8, 1, 80, 0, BF16),
    ([700, 333], 4, 4, 96, 0, BF16),
    ([500, 77, 1], 4, 2, 48, 0, BF16),
    ([500, 77, 1], 4, 1, 112, 0, BF16),
    ([700, 333], 4, 2, 192, 0, BF16),
    ([700, 333], 4, 2, 256, 0, BF16),
    ([700, 333], 4, 2, 256, 100, BF16),
    ([700, 333, 1], 8, 2, 512, 0, BF16),
    ([1500, 20], 6, 2, 128, 256, BF16),
    ([1500, 20], 6, 2, 128, 100, BF16),
    ([1500, 20], 16, 2, 64, 128, BF16),
    ([300, 300], 2, 2, 8, 0, BF16),
    ([300, 300], 2, 2, 16, 0, BF16),
    ([300, 301], 2, 2, 32, 17, BF16),
    ([333, 100], 2, 1, 128, 0, FP32),
    ([333, 100], 2, 1, 64, 50, FP32),
    ([333, 100], 2, 1, 80, 0, FP32),
    ([333, 100], 2, 1, 128, 50, FP32),
    ([333, 100], 2, 1, 192, 50, FP32),
    ([333, 100], 1, 1, 256, 0, FP32),
    ([1024] * 3, 8, 2, 128, 0, BF16),  # documents of one length: may be dispatched to a dense kernel
    ([512], 4, 4, 64, 0, BF16),
    ([2048], 32, 8, 128, 0, BF16),
    ([1024, 1024], 4, 4, 80, 0, BF16),
    ([1024, 1024], 4, 2, 256, 0, BF16),
    ([1024, 1024], 4, 2, 256, 0, BF16, 2.0),
    ([1024, 1024], 4, 2, 128, 0, BF16, 2.0),
    ([700, 333], 4, 2, 128, 100, BF16, 50.0),
    ([333, 100], 2, 1, 64, 50, FP32, 2.0),
    ([1024, 1024], 4, 4, (192, 128), 0, BF16),
    ([700, 333, 1], 4, 4, (192, 128), 0, BF16),
    ([700, 333], 16, 1, (192, 128), 0, BF16),
    ([700, 333, 1], 16, 2, (192, 128), 129, BF16),
    ([700, 333], 2, 2, (192, 256), 100, BF16),
    ([700, 333], 4, 2, (64, 128), 0, BF16),
    ([333, 100], 2, 2, (192, 128), 0, FP32),
]
ONE_PASS = [  # as CASES
    ([1000, 1, 3, 500, 129, 128, 127, 2], 8, 2, 128, 0, BF16),
    ([1000, 1, 3, 500], 4, 4, 64, 0, BF16),
    ([1500, 20], 6, 2, 128, 100, BF16),
    ([1500, 20], 16, 2, 64, 128, BF16),
    ([2048], 8, 1, 128, 0, BF16),
]


def _run(case, device, outliers=False, by_head=False):
    """Inputs, our (out, lse, dq, dk, dv), and the oracle's, from one packed qkv buffer into another.

    `by_head`: q, k and v of a head stand together, as GPT-NeoX has them.
    """
    lengths, H, K, d, window, dtype, cap = (*case, 0.0)[:7]
    d, e = d if isinstance(d, tuple) else (d, d)
    N, scale = sum(lengths), d**-0.5
    docs = make_docs(lengths, device)
    split = lambda t: _split(t, H, K, d, e, by_head)
    width = (H + K) * d + K * (d if d == e else d + e)
    q, k, v = split(randn(N, width, device=device, dtype=dtype, outliers=outliers))
    dout = randn(N, H, e, device=device, dtype=dtype)
    out, lse = attention.attention_fwd(q, k, v, docs, scale, window, cap=cap)
    dqkv = split(torch.full((N, width), float("nan"), device=device, dtype=dtype))
    attention.attention_bwd(dout, q, k, v, out, lse, docs, scale, *dqkv, window, cap)

    q64, k64, v64, dout64 = up(q, k, v, dout)
    out64, lse64 = reference.attention_fwd(q64, k64, v64, docs, scale, window, cap=cap)
    dqkv64 = [torch.empty_like(t) for t in (q64, k64, v64)]
    reference.attention_bwd(dout64, q64, k64, v64, out64, lse64, docs, scale, *dqkv64, window, cap)
    return (q, k, v, dout), (out, lse, *dqkv), (out64, lse64, *dqkv64)


def _split(t, H, K, d, e, by_head):
    """q, k, v in one buffer; values of another width stand behind other features, as those of a latent do."""
    N = len(t)
    if by_head:
        return t.view(N, H, 3, d).unbind(2)
    if d == e:
        return t.view(N, H + 2 * K, d).split([H, K, K], 1)
    q, k, kv = t.split([H * d, K * d, K * (d + e)], 1)
    return q.view(N, H, d), k.view(N, K, d), kv.view(N, K, d + e)[..., d:]


def _compare(case, device, outliers=False):
    _check_run(case, *_run(case, device, outliers), outliers)


def _check_run(case, inputs, ours, oracle, outliers=False):
    dtype = case[5]
    check(ours[0], oracle[0], OUT[dtype])
    check(ours[1], oracle[1], 1e-5)
    # where outliers make every implementation lose digits, FlashAttention-2's error is the measure
    bounds = [GRADIENT[dtype]] * 3
    if outliers and dtype == BF16:
        plain = not case[4] and len(case) == 6 and isinstance(case[3], int) and case[3] <= 256
        peers = (
            _flash(*inputs, case[0]) if plain else [None] * 3
        )  # torch's has no window, no cap, one width, at most 256
        bounds = [
            max(4e-3, 1.5 * error(p, e)) if p is not None else 1e-2 for p, e in zip(peers, oracle[2:], strict=True)
        ]
    for out, expected, bound in zip(ours[2:], oracle[2:], bounds, strict=True):
        check(out, expected, bound)


def _flash(q, k, v, dout, lengths):
    """(dq, dk, dv) by torch's FlashAttention-2, document by document."""
    parts = []
    for q_, k_, v_, dout_ in zip(*(t.split(lengths) for t in (q, k, v, dout)), strict=True):
        leaves = [t.transpose(0, 1)[None].detach().requires_grad_() for t in (q_, k_, v_)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        parts.append([g[0].transpose(0, 1) for g in torch.autograd.grad(out, leaves, dout_.transpose(0, 1)[None])])
    return [torch.cat(t) for t in zip(*parts, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(device, case):
    torch.manual_seed(0)
    _compare(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("outliers", [False, True])
def test_attention_on_gpu(case, outliers):
    torch.manual_seed(0)
    _compare(case, "cuda", outliers)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "d"), [([1024, 1024], 96), ([700, 333], 96), ([1024], 128), ([500, 7], 64)])
def test_heads_may_stand_apart(lengths, d):
    """Each behind another's keys and values: for cuDNN, for Gluon and for Triton."""
    torch.manual_seed(0)
    case = (lengths, 4, 4, d, 0, BF16)
    _check_run(case, *_run(case, "cuda", by_head=True))


@pytest.mark.parametrize("device", DEVICES)
def test_out_is_filled_and_may_be_strided(device):
    torch.manual_seed(0)
    docs = make_docs([20, 13], device)
    q, k, v = (randn(33, 2, 16, device=device, dtype=FP32) for _ in range(3))
    buffer = torch.full((33, 3, 16), float("nan"), device=device)
    out, lse = attention.attention_fwd(q, k, v, docs, 0.25, out=buffer[:, :2])
    assert out.data_ptr() == buffer.data_ptr()
    assert buffer[:, 2].isnan().all()
    again, lse2 = attention.attention_fwd(q, k, v, docs, 0.25)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_document_does_not_notice_its_neighbours(device):
    torch.manual_seed(0)
    q, k, v = (randn(60, 1, 16, device=device, dtype=BF16) for _ in range(3))
    alone, _ = attention.attention_fwd(q[20:50], k[20:50], v[20:50], make_docs([30], device), 0.25)
    v[:20], v[50:], k[:20] = float("inf"), float("nan"), float("nan")
    packed, _ = attention.attention_fwd(q, k, v, make_docs([20, 30, 10], device), 0.25)
    assert torch.equal(packed[20:50], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2048, 5, 1000], [1024] * 4])
def test_attention_repeats_bit_by_bit(lengths):
    case = (lengths, 8, 2, 128, 0, BF16)
    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        runs.append(_run(case, "cuda", False)[1])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.fixture
def as_ada(monkeypatch):
    """Settings of an RTX 4090, whose kernels any later GPU runs."""
    with monkeypatch.context() as patch:
        patch.setattr(launch, "chip", lambda device: Chip(89, 128, 72 << 20))
        launch.use({})
        yield
    launch.use({})


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [(64, 128, 8, 1), (32, 128, 8, 1), (16, 128, 8, 1), (32, 64, 4, 1)], ids=str)
@pytest.mark.parametrize("case", ONE_PASS, ids=str)
def test_one_pass_of_backward(as_ada, case, setting):
    """Without wgmma: right, and equal in each of ten runs, whatever program comes first."""
    if case[3] == 128 and setting == (64, 128, 8, 1):
        pytest.skip("more shared memory than 99 KiB")
    launch.use({f"one_pass {case[3]}": setting})
    assert launch.one_pass(torch.device("cuda", 0), BF16, (case[3],) * 2) == setting
    torch.manual_seed(0)
    first = _run(case, "cuda")
    _check_run(case, *first)
    for _ in range(9):
        torch.manual_seed(0)
        assert all(torch.equal(a, b) for a, b in zip(first[1], _run(case, "cuda")[1], strict=True))


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    N, step = 300, 1 << 23  # the last tokens lie 2.5e9 elements into the buffer
    buffer = torch.empty(N * step, device="cuda", dtype=BF16)
    q, k, v, dq, dk, dv = (buffer.as_strided((N, 2, 64), (step, 64, 1), 128 * i) for i in range(6))
    torch.manual_seed(0)
    for t in (q, k, v):
        t.normal_()
    dout = torch.randn(N, 2, 64, device="cuda").to(BF16)
    docs = make_docs([100, 200], "cuda")
    out, lse = attention.attention_fwd(q, k, v, docs, 0.125)
    attention.attention_bwd(dout, q, k, v, out, lse, docs, 0.125, dq, dk, dv)
    dense = [t.contiguous() for t in (q, k, v)]
    out2, lse2 = attention.attention_fwd(*dense, docs, 0.125)
    grads = [torch.empty_like(t) for t in dense]
    attention.attention_bwd(dout, *dense, out2, lse2, docs, 0.125, *grads)
    assert torch.equal(out, out2)
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), grads, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "H", "d"), [(70, 3, 64), (130, 2, 24)])
def test_sinks(device, dtype, N, H, d):
    torch.manual_seed(0)
    out, dout = (randn(N, H, d, device=device, dtype=dtype) for _ in range(2))
    lse, sinks = (randn(*shape, device=device, dtype=torch.float32, scale=2.0) for shape in ((H, N), (H,)))
    out64, lse64 = out.double(), lse.double()
    reference.sinks_fwd_(out64, lse64, sinks.double())
    sinks_.sinks_fwd_(out, lse, sinks)
    check(out, out64, ONE_ROUNDING[dtype])
    check(lse, lse64, FP32_SUM)
    dsinks = torch.ones(H, device=device)
    dsinks64 = dsinks.double()
    sinks_.sinks_bwd_(dsinks, dout, out, lse, sinks)
    reference.sinks_bwd_(dsinks64, *up(dout, out, lse, sinks))
    check(dsinks, dsinks64, FP32_SUM)


@pytest.mark.grid
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [40, 1])
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_gate(name, each, device, dtype):
    """Gates of features lie behind queries; those of heads somewhere."""
    torch.manual_seed(0)
    N, H, d = 9, 3, 40
    x, dy = (randn(N, H, d, device=device, dtype=dtype) for _ in range(2))
    gates, d_gates = (randn(N, H, d + each, device=device, dtype=dtype) for _ in range(2))
    before, dgate = d_gates[..., :d].clone(), d_gates[..., d:]
    z, dz, leaf = gates[..., d:].double(), dgate.double(), x.double().requires_grad_()
    z.requires_grad_()
    y = leaf * (torch.sigmoid(z) if name == "sigmoid" else getattr(torch.nn.functional, name)(z))
    y.backward(dy.double())
    check(gate.gate_fwd(x, gates[..., d:], name), y.detach(), ONE_ROUNDING[dtype])
    check(gate.gate_bwd(dy, x, gates[..., d:], dgate, name), leaf.grad, ONE_ROUNDING[dtype])
    check(dgate, z.grad, ONE_ROUNDING[dtype])
    check(reference.gate_fwd(x.double(), z.detach(), name), y.detach(), 1e-14)
    check(reference.gate_bwd(*(t.double() for t in (dy, x)), z.detach(), dz, name), leaf.grad, 1e-14)
    check(dz, z.grad, 1e-14)
    assert torch.equal(d_gates[..., :d], before)
