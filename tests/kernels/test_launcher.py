"""The launcher's memory of compiled kernels: no form is ever called with arguments it was not compiled for."""

import ast
import errno
import subprocess
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from trireme.kernels.launcher import Fixed, Kernel, await_previous, driver_error, is_tried  # noqa: E402


def _scaled(p_y, p_x, n, x_n, factor, BLOCK: tl.constexpr):
    await_previous()
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o * x_n, o < n, 0.0) * factor, o < n)


def test_a_triton_of_unknown_private_parts_launches_itself(monkeypatch):
    assert [is_tried(v) for v in ("3.6.0", "3.9.1+git", "3.5.1", "3.10.0", "4.0")] == [True, True, False, False, False]
    calls = []
    monkeypatch.setattr(JITFunction, "run", lambda fn, *args, **options: calls.append(args) or SimpleNamespace())
    kernel, x = Kernel(JITFunction(_scaled), private=False), torch.zeros(64)
    fixed = Fixed(kernel, 1, 0.5, 32)
    for _ in range(2):
        kernel[(3,)](x, x, 7, 1, 0.5, 32)
        fixed(3, (x, x), (7,))
    assert calls == [(x, x, 7, 1, 0.5, 32)] * 4


def test_few_modules_import_experimental_parts_of_triton_and_are_imported_late():
    """A renamed one must not break the launches that need none."""
    few, root = ("hopper", "ampere"), Path(__file__).parents[2] / "kernels"
    found = {path.name for path in root.rglob("*.py") if "triton.experimental" in path.read_text()}
    assert found
    assert all(name.startswith(few) for name in found)
    at_top = [
        node
        for path in root.rglob("*.py")
        if not path.name.startswith(few)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom) and any(name in ast.unparse(node) for name in few)
    ]
    assert not at_top


class NoDriver:
    """Triton's driver where it cannot be built."""

    def __init__(self, error: Exception):
        self.error = error

    @property
    def active(self):
        raise self.error


NOT_BUILT = {
    "no compiler": (RuntimeError("Failed to find C compiler. Specify CC."), "Failed to find C compiler. Specify CC."),
    "no headers": (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "/usr/bin/gcc failed"),
    "another compiler": (FileNotFoundError(errno.ENOENT, "No such file", "cc9"), "[Errno 2] No such file: 'cc9'"),
}


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_triton_cannot_build_is_said(monkeypatch, name):
    error, says = NOT_BUILT[name]
    monkeypatch.setattr(triton.runtime, "driver", NoDriver(error))
    assert driver_error() == says


@pytest.mark.gpu
def test_triton_can_launch():
    assert driver_error() == ""


def test_every_kernel_first_awaits_the_one_before():
    """A kernel that did not would read what is still being written."""
    found = 0
    for path in (Path(__file__).parents[2] / "kernels").rglob("*.py"):
        for f in ast.walk(ast.parse(path.read_text())):
            if isinstance(f, ast.FunctionDef) and "launcher" in [ast.unparse(d) for d in f.decorator_list]:
                found += 1
                assert ast.unparse(f.body[ast.get_docstring(f) is not None]) == "await_previous()", f"{path}: {f.name}"
    assert found > 20


def test_calls_of_one_key_are_one_specialisation_to_triton():
    fn = JITFunction(_scaled, do_not_specialize=["n"])
    kernel = Kernel(fn)
    specialise = create_function_from_signature(fn.signature, fn.params, make_backend(GPUTarget("cuda", 90, 32)))
    buffer = torch.zeros(64, dtype=torch.bfloat16)
    pointers = [buffer, buffer[1:], buffer[8:], buffer.float(), buffer.float()[1:]]
    counts = [-16, 0, 1, 15, 16, 2**31 - 1, 2**31, 2**40]
    found = {}
    for args in product(pointers, [*pointers, None], counts, counts, [0.5, 1.0], [1, 32]):
        for options in (dict(num_warps=4), dict(num_warps=8), dict(num_stages=4)):
            key, values = kernel.key(args, options)
            _, *form = specialise(*args, **options)
            assert found.setdefault(key, form) == form
            assert values[0] == args[0].data_ptr()
            assert values[2:] == list(args[2:])
    assert len(found) == 3 * 4 * 5 * 2 * len(counts) * 2  # alignments and dtypes, 32 or 64 bits, strides, constants


def test_descriptors_count_by_dtype_and_block():
    fn = JITFunction(_scaled, do_not_specialize=["n"])
    kernel = Kernel(fn)
    specialise = create_function_from_signature(fn.signature, fn.params, make_backend(GPUTarget("cuda", 90, 32)))
    found = {}
    for dtype, shape, block in product((torch.float32, torch.bfloat16), ((64, 64), (128, 32)), ([32, 32], [64, 32])):
        layout = NVMMASharedLayout(64, 16 if dtype == torch.bfloat16 else 32, rank=2)
        target = TensorDescriptor.from_tensor(torch.zeros(shape, dtype=dtype), block, layout)
        args = torch.zeros(4), target, 1, 1, 0.5, 32
        key, values = kernel.key(args, {})
        assert values[1] is target
        _, *form = specialise(*args)
        assert found.setdefault(key, form) == form
    assert len(found) == 4


def test_the_first_launch_is_tritons_and_the_next_calls_what_it_compiled(monkeypatch):
    calls = []
    compiled = SimpleNamespace(run=lambda *args: calls.append(args), function="function", packed_metadata="metadata")
    monkeypatch.setattr(JITFunction, "run", lambda fn, *args, grid, warmup, **options: calls.append(args) or compiled)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    kernel, x = Kernel(JITFunction(_scaled)), torch.zeros(64)
    for factor in (0.5, 0.25):
        kernel[(3,)](x, x, 7, 1, factor, 32, num_warps=4)
    kernel[(3,)](x[1:], x, 7, 1, 0.5, 32, num_warps=4)  # not aligned: another form
    p = x.data_ptr()
    assert calls[0][2:] == (7, 1, 0.5, 32)
    assert calls[1] == (3, 1, 1, "stream", "function", "metadata", None, None, None, p, p, 7, 1, 0.25, 32)
    assert calls[2][0].data_ptr() == p + 4
    assert len(kernel.forms) == 2


def test_every_launch_says_whether_operations_are_fused(monkeypatch):
    """Triton's own default depends on its version and on the environment, and with it the bits."""
    said = []
    monkeypatch.setattr(JITFunction, "run", lambda fn, *args, **options: said.append(options["enable_fp_fusion"]))
    kernel, x = Kernel(JITFunction(_scaled)), torch.zeros(64)
    kernel[(3,)](x, x, 7, 1, 0.5, 32)
    kernel[(3,)](x, x, 7, 1, 0.5, 32, enable_fp_fusion=False)
    Fixed(kernel, 1, 0.5, 32)(3, (x, x), (7,))
    assert said == [True, False, True]


def test_a_fixed_launch_calls_the_form_of_aligned_tensors_only(monkeypatch):
    calls = []
    monkeypatch.setattr(JITFunction, "run", lambda fn, *args, grid, warmup, **options: _compiled(fn, args))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)

    def _compiled(fn, args):
        form = "aligned" if all(t.data_ptr() % 16 == 0 for t in args[:2]) else "not aligned"
        run = lambda *launched: calls.append((form, *launched))
        return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

    kernel, x = Kernel(JITFunction(_scaled)), torch.zeros(64)
    run = Fixed(kernel, 1, 0.5, 32, num_warps=4)
    for _ in range(2):
        for y in (x[1:], x, x[4:]):
            run(3, (y, x), (7,))
    forms = [call[0] for call in calls]
    assert forms == ["aligned", "not aligned", "aligned", "aligned"]  # the first of each form is Triton's own launch
    p = x.data_ptr()
    assert calls[-1][1:] == (3, 1, 1, "stream", "function", "metadata", None, None, None, p + 16, p, 7, 1, 0.5, 32)


@pytest.mark.gpu
def test_every_form_computes_its_own_arguments():
    kernel = Kernel(JITFunction(_scaled, do_not_specialize=["n"]))
    x, y = torch.randn(2000, device="cuda"), torch.empty(101, device="cuda")
    cases = list(product([0, 1, 4, 7], [0, 1], [1, 16, 97], [1, 2, 16, 17], [0.5, 1.0], [32, 128]))
    for _ in range(2):  # the second time every form is known
        for x_at, y_at, n, x_n, factor, block in cases:
            y.fill_(-1)
            out, source = y[y_at : y_at + n], x[x_at:]
            kernel[(triton.cdiv(n, block),)](out, source, n, x_n, factor, block, num_warps=1)
            assert torch.equal(out, source[: n * x_n : x_n] * factor)
            assert (y == -1).sum() == len(y) - n
    assert len(kernel.forms) == 2 * 2 * 4 * 2


@pytest.mark.gpu
def test_a_fixed_launch_computes_what_the_kernel_does():
    kernel = Kernel(JITFunction(_scaled, do_not_specialize=["n"]))
    x, y = torch.randn(2000, device="cuda"), torch.empty(101, device="cuda")
    for x_n, block in product([1, 16], [32, 128]):
        run = Fixed(kernel, x_n, 0.5, block, num_warps=1)
        for _, x_at, y_at, n in product(range(2), [0, 1, 4, 7], [0, 1, 4], [1, 16, 97]):
            y.fill_(-1)
            out, source = y[y_at : y_at + n], x[x_at:]
            run(triton.cdiv(n, block), (out, source), (n,))
            assert torch.equal(out, source[: n * x_n : x_n] * 0.5)
            assert (y == -1).sum() == len(y) - n


@pytest.mark.gpu
def test_a_known_form_is_launched_on_the_current_stream():
    kernel = Kernel(JITFunction(_scaled))
    x, y = torch.randn(1 << 24, device="cuda"), torch.zeros(1 << 24, device="cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            y.copy_(x)
            kernel[(1 << 14,)](y, y, 1 << 24, 1, 2.0, 1024, num_warps=4)
        stream.synchronize()
        assert torch.equal(y, 2 * x)
