"""Norms against the reference in fp64, and the reference against autograd."""

import pytest
import torch
from kernel_checks import DEVICES, DTYPES, FP32_SUM, check, on_gpu, randn, up
from torch.nn.functional import layer_norm, rms_norm, silu

from trireme.kernels import norms, reference
from trireme.kernels.reference import NormKind

pytestmark = [pytest.mark.grid, pytest.mark.turns]

ROUNDED = {torch.float32: 3e-6, torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2}  # one rounding of an outlier
# kind, with a bias, with a gate, weights by head, with a residual gradient
FORMS = {
    "rms": (NormKind(), False, False, False, False),
    "rms + residual": (NormKind(), False, False, False, True),
    "rms, 1 + weight": (NormKind(add_one=True), False, False, False, False),
    "layer": (NormKind(centred=True), True, False, False, False),
    "layer + residual": (NormKind(centred=True), True, False, False, True),
    "layer without bias": (NormKind(centred=True), False, False, False, False),
    "gate last": (NormKind(), False, True, False, False),
    "gate first": (NormKind(gate_first=True), False, True, False, False),
    "gate last, by head": (NormKind(), False, True, True, False),
    "gate first, by head": (NormKind(gate_first=True), False, True, True, False),
}
CASES = [(form, (7, 3, 40)) for form in FORMS]
CASES += [("rms", (1, 1, 600)), ("rms", (70, 2, 128)), ("layer", (5, 1, 257)), ("layer", (5, 1, 2048))]
# rows of several parts; a part's last columns are short
CASES += [("rms + residual", (1, 1, 8200))]
CASES += [on_gpu(form, (1, 2, 8200)) for form in ("layer + residual", "gate last", "gate first, by head")]
LARGE = [(9, 1, 5120), (1500, 1, 12288), (300, 1, 16384), (300, 8, 8192), (20, 3, 18432), (300, 40, 128)]
CASES += [on_gpu(form, shape) for form in FORMS for shape in LARGE]


class Inputs:
    """Heads of wider rows, contiguous where a residual gradient is added."""

    def __init__(self, form: str, shape: tuple[int, int, int], device: str, dtype: torch.dtype):
        torch.manual_seed(0)
        self.kind, bias, gate, by_head, residual = FORMS[form]
        N, H, D = shape
        random = lambda *size, **options: randn(*size, device=device, dtype=dtype, **options)
        wide = lambda: random(N, H * D + 16, outliers=True)[:, : H * D].view(N, H, D)
        heads = lambda: random(*shape, outliers=True) if residual else wide()
        self.x, self.dy = heads(), heads()
        self.weight, self.bias = random(*((H, D) if by_head else (D,))), random(D) if bias else None
        self.gate, self.residual = heads() if gate else None, heads() if residual else None

    def copies(self) -> list[torch.Tensor | None]:
        """Zeroed memory for dx, dgate, dweight and dbias."""
        return [None if t is None else torch.zeros_like(t) for t in (self.dy, self.gate, self.weight, self.bias)]

    def backward(self, module, of, stats, dx, dgate, dweight, dbias) -> None:
        dy, x, weight, gate, residual = of(self.dy, self.x, self.weight, self.gate, self.residual)
        module.norm_bwd(dy, x, weight, stats, self.kind, dx, dweight, dbias, gate, dgate, residual)


def same(*tensors):
    return tensors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_norm(device, dtype, form, shape):
    a, copy = Inputs(form, shape, device, dtype), torch.empty(shape, dtype=dtype, device=device)
    y, stats = norms.norm_fwd(a.x, a.weight, 1e-5, a.kind, a.bias, a.gate, copy)
    x, w, b, z = up(a.x, a.weight, a.bias, a.gate)
    y64, stats64 = reference.norm_fwd(x, w, 1e-5, a.kind, b, z)
    check(y, y64, ROUNDED[dtype])
    assert torch.equal(copy, a.x)
    for found, exact in zip(stats, stats64, strict=True):
        assert found is None or check(found, exact, FP32_SUM) is None

    exact, found = up(*a.copies()), a.copies()
    found[2:] = (None if t is None else t.float() for t in found[2:])
    a.backward(reference, up, stats64, *exact)
    a.backward(norms, same, stats, *found)
    for own, right, bound in zip(found, exact, (ROUNDED[dtype], ROUNDED[dtype], FP32_SUM, FP32_SUM), strict=True):
        assert own is None or check(own, right, bound) is None

    frozen = a.copies()
    a.backward(norms, same, stats, *frozen[:2], None, None)
    assert torch.equal(frozen[0], found[0])
    again = [None if t is None else t.float() for t in a.copies()[2:]]
    a.backward(norms, same, stats, a.dy, frozen[1], *again)  # in place
    assert torch.equal(a.dy, found[0])
    assert all(own is None or torch.equal(own, other) for own, other in zip(again, found[2:], strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_is_autograd(form):
    a = Inputs(form, (7, 3, 10), "cpu", torch.float64)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (a.x, a.gate, a.weight, a.bias)]
    x, z, w, b = leaves
    u = x * silu(z) if a.kind.gate_first else x
    normed = layer_norm(u, (10,), eps=1e-5) if a.kind.centred else rms_norm(u, (10,), eps=1e-5)
    y = normed * (1 + w if a.kind.add_one else w) + (0 if b is None else b)
    y = y if z is None or a.kind.gate_first else y * silu(z)
    y.backward(a.dy)
    found, stats = reference.norm_fwd(a.x, a.weight, 1e-5, a.kind, a.bias, a.gate)
    check(found, y.detach(), 1e-14)
    sums = a.copies()
    a.backward(reference, same, stats, *sums)
    sums[0] -= 0 if a.residual is None else a.residual
    for own, leaf in zip(sums, leaves, strict=True):
        assert own is None or check(own, leaf.grad, 1e-12) is None


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_norms_of_a_large_model_repeat_bit_by_bit(form):
    a = Inputs(form, (4099, 1, 5120), "cuda", torch.bfloat16)

    def run():
        y, stats = norms.norm_fwd(a.x, a.weight, 1e-5, a.kind, a.bias, a.gate)
        sums = a.copies()
        a.backward(norms, same, stats, *sums)
        return [t for t in (y, *stats, *sums) if t is not None]

    assert all(torch.equal(first, again) for first, again in zip(run(), run(), strict=True))
