"""AdamW and the gradient's norm: the same bits as the reference."""

import pytest
import torch
from kernel_checks import DEVICES, framed

from trireme.kernels.optimizer import adamw, reference

pytestmark = [pytest.mark.grid, pytest.mark.turns]


def _state(n, split, device):
    master = torch.randn(n) * 0.02
    w, lo = reference.split_master(master) if split else (master, None)
    m, v = torch.randn(n) * 1e-3, torch.rand(n) * 1e-6
    m[: n // 3], v[: n // 3] = 0, 0  # a first step
    return [
        None if t is None else framed(t.to(device)) if t.is_floating_point() else t.to(device) for t in (w, lo, m, v)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_adamw_has_the_bits_of_the_reference(device, split, grad_dtype):
    torch.manual_seed(0)
    n, n_decay = 5000, 1700
    state = _state(n, split, "cpu")
    ours = [None if t is None else t.clone().to(device) for t in state]
    for step, scale in enumerate([1.0, 1e-3, 1e4, 1e-22], 1):  # the last makes subnormal squares
        grad = (torch.randn(n) * scale).to(grad_dtype)
        clip = torch.tensor([0.37])
        options = dict(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, n_decay=n_decay, step=step)
        reference.adamw_(*state, grad, clip, **options)
        adamw.adamw_(*ours, grad.to(device), clip.to(device), **options)
        for ref, out in zip(state, ours, strict=True):
            assert ref is None or torch.equal(ref, out.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_a_master_that_is_not_finite_shows_in_the_weights(device):
    """NaN of every sign and size stays NaN; what bf16 cannot hold is infinity there, and exact with its low half."""
    words = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF, 0x7FC00000, 0xFFC08000]  # NaN
    words += [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF, 0x3F808000]  # infinite; rounded to it; not
    master = torch.tensor([w - (w >> 31 << 32) for w in words], dtype=torch.int32).view(torch.float32)
    hi, lo = reference.split_master(master)
    joined = reference.join_master(hi, lo)
    assert hi[:6].isnan().all()
    assert joined[:6].isnan().all()
    assert hi[6:10].tolist() == [float("inf"), -float("inf")] * 2
    assert hi[10:].view(torch.int16).tolist() == [0x7F7F, 0x3F81]
    assert torch.equal(joined[6:].view(torch.int32), master[6:].view(torch.int32))

    w, low, zero = hi.to(device), lo.to(device), torch.zeros(len(words), device=device)
    w[:6], low[:6] = 1.0, 0  # made NaN by their update, of whatever bits the processor gives it
    grad = torch.where(torch.arange(len(words), device=device) < 6, float("nan"), zero)
    options = dict(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, n_decay=0, step=1)
    adamw.adamw_(w, low, zero.clone(), zero.clone(), grad, torch.ones(1, device=device), **options)
    assert w[:6].isnan().all()
    assert torch.equal(w.view(torch.int16)[6:].cpu(), hi.view(torch.int16)[6:])
    assert torch.equal(low[6:].cpu(), lo[6:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", [False, True])
def test_weights_and_then_moments_leave_the_bits_of_all(device, split):
    torch.manual_seed(0)
    n = 3000
    state = _state(n, split, device)
    parts = [None if t is None else t.clone() for t in state]
    grad, clip = torch.randn(n, device=device), torch.ones(1, device=device)
    options = dict(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, n_decay=1000, step=2)
    adamw.adamw_(*state, grad, clip, **options)
    for part in ("weights", "moments"):
        adamw.adamw_(*parts, grad, clip, **options, part=part)
    assert all(a is None or torch.equal(a, b) for a, b in zip(state, parts, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 1000, 65536, 200_003])
def test_grad_finish_has_the_bits_of_the_reference(device, n):
    torch.manual_seed(0)
    x = torch.randn(n)
    for grad in (x, x.bfloat16()):
        assert torch.equal(adamw.grad_finish(framed(grad.to(device))).cpu(), reference.grad_finish(grad))
    torch.testing.assert_close(reference.grad_finish(x)[0].double(), x.double().square().sum(), rtol=1e-6, atol=0)
    out = torch.empty(n, dtype=torch.bfloat16)
    ours = out.to(device)
    total = torch.zeros(3, device=device)
    assert torch.equal(adamw.grad_finish(x.to(device), ours, total[1:2]).cpu(), reference.grad_finish(x, out))
    assert total.tolist() == [0.0, reference.grad_finish(x, out).item(), 0.0]
    assert torch.equal(ours.cpu(), out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_noticed(device, bad):
    x = torch.ones(3000, device=device)
    x[2077] = bad
    assert not torch.isfinite(adamw.grad_finish(x)).item()
    assert not torch.isfinite(adamw.grad_finish(x, torch.empty(3000, dtype=torch.bfloat16, device=device))).item()
