"""Kernel launches with little CPU overhead: compiled kernels are cached by everything that they depend on.

Triton classifies arguments (dtypes, constants, alignment by 16, integers of 1 or multiples of 16) at every launch; a
look-up by a finer key takes a third of the time. On Hopper kernels start before the last ends (programmatic dependent
launch), 1 to 2 us sooner: each begins with await_previous().
"""

from __future__ import annotations

import subprocess
import threading
import warnings
from functools import partial
from typing import Any

import torch

from trireme.kernels import launch
from trireme.kernels.compiler import JITFunction, cuda_capability_geq, tl, triton
from trireme.kernels.observers import observers

COMPILING = threading.Lock()  # the queues of several GPUs launch from threads of their own
TRIED = ("3.6", "3.7", "3.8", "3.9")  # versions with the private launch called below


def is_tried(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in TRIED


if not is_tried(triton.__version__):
    warnings.warn(
        f"Triton {triton.__version__} was never tried: kernels are launched by its own launch, 3 to 11 us slower each. "
        f"Triton {TRIED[0]} to {TRIED[-1]} are known to work.",
        stacklevel=2,
    )


def driver_error() -> str:
    """Why no kernel can be launched on this machine's GPU, or "". Triton compiles its driver in C at its first use."""
    try:
        triton.runtime.driver.active.get_current_device()
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]} failed"
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


@triton.jit
def await_previous():
    """Waits until the writes of earlier launches are visible. A kernel must not touch memory before."""
    if cuda_capability_geq(9):
        tl.extra.cuda.gdc_wait()


class Kernel:
    """Launches a @triton.jit function as `kernel[grid](*arguments, **options)`; its constants must come last."""

    def __init__(self, fn: JITFunction, private: bool = True):
        self.fn, self.private = fn, private  # without private parts of Triton each launch is its own
        self.forms: dict[tuple, tuple] = {}  # key -> (run, function, metadata, compiled)
        self.varying = [(i, not p.do_not_specialize) for i, p in enumerate(fn.params) if not p.is_constexpr]
        assert [i for i, _ in self.varying] == list(range(len(self.varying)))

    def __getitem__(self, grid: tuple[int, ...]):
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args, **options) -> None:
        if _observe(self.fn, args):
            return
        key, values = self.key(args, options)
        form = self.forms.get(key)
        if form is None:
            early = launch.chip(args[0].device).arch >= 90
            keywords = {"enable_fp_fusion": True} | options  # Triton's own default depends on version and environment
            with COMPILING:
                compiled = self.fn[grid](*args, **keywords, launch_pdl=early)  # Triton's own launch
            if compiled is not None and self.private:  # kept: else it unloads its function
                self.forms[key] = compiled.run, compiled.function, compiled.packed_metadata, compiled
            return
        run, function, metadata, _ = form
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(key[0])
        run(x, y, z, stream, function, metadata, None, None, None, *values)

    def key(self, args: tuple, options: dict) -> tuple[tuple, list]:
        """(what the compiled form depends on, arguments with pointers as integers).

        A tensor counts by dtype and alignment, a float by type, an unspecialised integer by whether 32 bits hold it, a
        descriptor by dtype and block.
        """
        key, values = [*args, *options.items()], list(args)
        for i, special in self.varying:
            a = args[i]
            if type(a) is int:
                if not special:
                    key[i] = -(2**31) <= a < 2**31
            elif a is None or type(a) is float:
                key[i] = type(a)
            elif type(a).__name__ == "TensorDescriptor":  # whose module is experimental
                key[i] = a.base.dtype, *a.block_shape
            else:
                values[i] = pointer = a.data_ptr()
                key[i] = a.dtype if pointer % 16 == 0 else (a.dtype,)
        return (args[0].get_device(), *key), values


class Fixed:
    """Launches `kernel` with fixed dtypes, shapes and strides, so that a call needs no key.

    A call gives the grid, tensors, of which only the addresses may change, and `numbers` (floats, unspecialised 32-bit
    integers). The arguments `constants` follow and are fixed.
    """

    def __init__(self, kernel, *constants, **options):
        self.kernel, self.constants, self.options = kernel, constants, options
        self.form: tuple[Any, ...] | None = None  # (device, *form of Kernel), for tensors aligned to 16 bytes

    def __call__(self, programs: int, tensors: tuple[torch.Tensor, ...], numbers: tuple) -> None:
        pointers, bits = [], 0
        for t in tensors:
            p = t.data_ptr()
            pointers.append(p)
            bits |= p
        if self.form is None or bits % 16:
            self._search(programs, (*tensors, *numbers, *self.constants), bits % 16 == 0)
            return
        device, run, function, metadata, _ = self.form
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *numbers, *self.constants)

    def _search(self, programs: int, args: tuple, aligned: bool) -> None:
        self.kernel[(programs,)](*args, **self.options)
        if aligned and isinstance(self.kernel, Kernel):
            key, _ = self.kernel.key(args, self.options)
            form = self.kernel.forms.get(key)
            self.form = form and (key[0], *form)


def _observe(fn: Any, args: tuple) -> bool:
    """Whether the arguments are tensors without memory: then observers are told of the launch."""
    meta = next(a.is_meta for a in args if isinstance(a, torch.Tensor))
    for observer in observers() if meta else ():
        observer.launch(fn.__name__, args)
    return meta


class Interpreted:
    """Launches a @triton.jit function in Triton's interpreter."""

    def __init__(self, fn: Any):
        self.fn = fn

    def __getitem__(self, grid: tuple[int, ...]):
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args, **options) -> None:
        if not _observe(self.fn, args):
            self.fn[grid](*args, **options)


def launcher(fn):
    """Decorator: Kernel(fn), or Interpreted(fn) in Triton's interpreter."""
    return Kernel(fn, is_tried(triton.__version__)) if isinstance(fn, JITFunction) else Interpreted(fn)
