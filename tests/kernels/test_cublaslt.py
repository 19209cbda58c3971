"""What cuBLASLt is called with, by a library in Python that multiplies the column-major matrices it is given."""

import ctypes

import pytest
import torch

from trireme.kernels import ops
from trireme.kernels.fp8 import cublaslt, reference

E4M3 = torch.float8_e4m3fn
DTYPES = {0: torch.float32, 14: torch.bfloat16, 28: E4M3}


def matrix(pointer: int, layout: dict) -> torch.Tensor:
    """A copy (rows, columns) of what is there."""
    dtype, rows, columns, ld = DTYPES[layout["dtype"]], layout["rows"], layout["columns"], layout["ld"]
    assert ld == rows
    raw = bytearray(ctypes.string_at(pointer, rows * columns * dtype.itemsize))
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(columns, rows).T


class Library:
    """Of one kernel, 42, that takes 48 bytes."""

    def __init__(self, kernels: int = 1, status: int = 0):
        self.things: dict[int, dict] = {}
        self.kernels, self.status, self.asked = kernels, status, 0

    def new(self, out, **what) -> int:
        out._obj.value = 1000 + len(self.things)
        self.things[out._obj.value] = what
        return 0

    def of(self, handle) -> dict:
        return self.things[handle.value]

    def cublasLtMatmulDescCreate(self, out, sums, scale):
        assert (sums, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self.new(out)

    def cublasLtMatmulPreferenceCreate(self, out):
        return self.new(out)

    def cublasLtMatmulDescSetAttribute(self, thing, attribute, value, size):
        assert size == ctypes.sizeof(value._obj)
        self.of(thing)[attribute] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulDescDestroy(self, thing):
        self.of(thing)["destroyed"] = True
        return 0

    cublasLtMatmulPreferenceDestroy = cublasLtMatmulDescDestroy

    def cublasLtMatrixLayoutCreate(self, out, dtype, rows, columns, ld):
        return self.new(out, dtype=dtype, rows=rows, columns=columns, ld=ld)

    def cublasLtMatmulAlgoGetHeuristic(self, handle, operation, a, b, c, d, preference, most, choice, found):
        assert (handle, most) == (7, 1)
        assert self.of(c) == self.of(d)
        own = self.of(preference)
        assert own[1] <= cublaslt.WORKSPACE
        assert all(16 <= own[i] <= 256 for i in (5, 6, 7, 8))
        assert self.of(operation).keys() == {3, 17, 18}
        self.asked += 1
        choice._obj.algorithm[0], choice._obj.workspace, found._obj.value = 42, 48, self.kernels
        return 0

    def cublasLtMatmul(
        self, handle, operation, alpha, p_a, a, p_b, b, beta, p_c, c, p_d, d, choice, workspace, size, stream
    ):
        assert (handle, stream, choice._obj.algorithm[0], size) == (7, 5, 42, 48)
        assert workspace
        own = self.of(operation)
        assert own[3] == 1  # A transposed
        scale = ctypes.c_float.from_address(own[17]).value * ctypes.c_float.from_address(own[18]).value
        product = matrix(p_a, self.of(a)).float().T @ matrix(p_b, self.of(b)).float()
        found = alpha._obj.value * scale * product + beta._obj.value * matrix(p_c, self.of(c)).float()
        assert found.shape == (self.of(d)["rows"], self.of(d)["columns"])
        out = found.T.contiguous().to(DTYPES[self.of(d)["dtype"]])
        ctypes.memmove(p_d, out.data_ptr(), out.nbytes)
        return self.status


@pytest.fixture
def load(monkeypatch):
    def load(**keys) -> Library:
        found = Library(**keys)
        monkeypatch.setattr(cublaslt, "library", lambda: found)
        monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 7)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
        cublaslt._form.cache_clear()
        return found

    yield load
    cublaslt._form.cache_clear()


def operands(M, N, K):
    torch.manual_seed(0)
    return ops.quantize(torch.randn(M, K).bfloat16()), ops.quantize(0.01 * torch.randn(N, K).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_sum_is_that_of_plain_torch(dtype, load):
    """A form is found once; nothing but layouts is left."""
    lib = load()
    for M, N, K in ((37, 48, 80), (16, 32, 16)):
        (a, b), out = operands(M, N, K), torch.randn(M, N).to(dtype)
        args, expected = (a.rows, a.scale, b.rows, b.scale), out.clone()
        for _ in range(2):
            reference.fp8_add_(expected, *args)
            cublaslt.fp8_add_(out, *args)
        bound = 2**-6 if dtype == torch.bfloat16 else 1e-5  # rounded once here, and there twice
        assert torch.allclose(out.float(), expected.float(), rtol=bound, atol=bound / 8)
    assert lib.asked == 2
    assert all(thing.get("destroyed", "rows" in thing) for thing in lib.things.values())


def test_alignment_is_that_of_the_least_aligned_matrix(load):
    lib = load()
    a, b = operands(16, 32, 16)
    memory = torch.zeros(4 + 16 * 32 + 64)
    at = -memory.data_ptr() // 4 % 64  # the first multiple of 256 bytes
    for first, expected in ((at, None), (at + 4, 16)):
        out = memory[first : first + 16 * 32].view(16, 32)
        cublaslt.fp8_add_(out, a.rows, a.scale, b.rows, b.scale)
        asked = [thing for thing in lib.things.values() if 5 in thing][-1]
        assert asked[5] == asked[6] == asked[7] == asked[8]
        assert expected in (None, asked[8])


def test_a_failure_is_said(load):
    a, b = operands(16, 32, 16)
    args = torch.zeros(16, 32), a.rows, a.scale, b.rows, b.scale
    load(status=13)
    with pytest.raises(RuntimeError, match="fp8: cublasLtMatmul of cuBLASLt failed with status 13"):
        cublaslt.fp8_add_(*args)
    load(kernels=0)
    with pytest.raises(RuntimeError, match=r"no kernel that adds \(16, 16\) times \(16, 32\) to torch.float32"):
        cublaslt.fp8_add_(*args)
