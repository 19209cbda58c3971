"""AdamW and the gradient's norm: the same bits as the reference."""

import pytest
import torch
from kernel_checks import DEVICES, framed

from trireme.kernels import adamw, reference

pytestmark = pytest.mark.grid


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
