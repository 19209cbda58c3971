"""Launches that cost little host time: a kernel's compiled forms are kept by all that they depend on.

Triton compiles a kernel for dtypes, constants, alignment of pointers by 16 and integers that are 1 or multiples of 16,
and classifies the arguments at every launch. Here a form is looked up by a key at least as fine: a third of the time.

On Hopper a kernel is launched before the one ahead is done (programmatic dependent launch), which saves 1 to 2 us. So
every kernel begins with await_previous().
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import JITFunction

from trireme.kernels import launch

TRIED = ("3.6", "3.7", "3.8", "3.9")  # versions of Triton whose private launch is called below as they expect


def check_version(version: str) -> None:
    """Raises ImportError unless this version of Triton is one whose private parts are known."""
    if ".".join(version.split(".")[:2]) not in TRIED:
        raise ImportError(
            f"Triton {version} is not supported: kernels are launched through private parts of Triton {TRIED[0]} to "
            f"{TRIED[-1]}. Install one of these, with the torch that it belongs to."
        )


check_version(triton.__version__)


@triton.jit
def await_previous():
    """Waits until all that was launched before is done and its writes are seen. Nothing may be touched before."""
    if cuda_capability_geq(9):
        tl.extra.cuda.gdc_wait()


class Kernel:
    """A @triton.jit function, launched as `kernel[grid](*arguments, **options)`; its constants come last."""

    def __init__(self, fn: JITFunction):
        self.fn = fn
        self.forms: dict[tuple, tuple] = {}  # key -> (run, function, metadata) and the compiled kernel they are of
        self.varying = [(i, not p.do_not_specialize) for i, p in enumerate(fn.params) if not p.is_constexpr]
        assert [i for i, _ in self.varying] == list(range(len(self.varying)))

    def __getitem__(self, grid: tuple[int, ...]):
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args, **options) -> None:
        key, values = self.key(args, options)
        form = self.forms.get(key)
        if form is None:
            early = launch.chip(args[0].device).arch >= 90
            compiled = self.fn[grid](*args, **options, launch_pdl=early)  # Triton's own launch
            if compiled is not None:  # kept, since it unloads its function when it is let go of
                self.forms[key] = compiled.run, compiled.function, compiled.packed_metadata, compiled
            return
        run, function, metadata, _ = form
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(key[0])
        run(x, y, z, stream, function, metadata, None, None, None, *values)

    def key(self, args: tuple, options: dict) -> tuple[tuple, list]:
        """(what the compiled form depends on, the arguments with pointers as integers).

        Everything stands for itself, but of a tensor its dtype and alignment, of a float its type, of an integer that
        is not specialised whether it takes 32 bits.
        """
        key, values = [*args, *options.items()], list(args)
        for i, special in self.varying:
            a = args[i]
            if type(a) is int:
                if not special:
                    key[i] = -(2**31) <= a < 2**31
            elif a is None or type(a) is float:
                key[i] = type(a)
            else:
                values[i] = pointer = a.data_ptr()
                key[i] = a.dtype if pointer % 16 == 0 else (a.dtype,)
        return (args[0].get_device(), *key), values


class Fixed:
    """A launch of `kernel` for fixed dtypes, shapes and strides: no key per call.

    Left open are the grid, the tensors' addresses and `numbers`: floats, or integers that are not specialised and take
    32 bits; `rest` follow.
    """

    def __init__(self, kernel, *rest, **options):
        self.kernel, self.rest, self.options = kernel, rest, options
        self.form: tuple[Any, ...] | None = (
            None  # (device, *what Kernel keeps), for tensors that are all aligned to 16 bytes
        )

    def __call__(self, programs: int, tensors: tuple[torch.Tensor, ...], numbers: tuple) -> None:
        pointers, bits = [], 0
        for t in tensors:
            p = t.data_ptr()
            pointers.append(p)
            bits |= p
        if self.form is None or bits % 16:
            self._search(programs, (*tensors, *numbers, *self.rest), bits % 16 == 0)
            return
        device, run, function, metadata, _ = self.form
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *numbers, *self.rest)

    def _search(self, programs: int, args: tuple, aligned: bool) -> None:
        self.kernel[(programs,)](*args, **self.options)
        if aligned and isinstance(self.kernel, Kernel):
            key, _ = self.kernel.key(args, self.options)
            form = self.kernel.forms.get(key)
            self.form = form and (key[0], *form)


def launcher(fn):
    """Kernel(fn) for a @triton.jit function; in Triton's interpreter nothing is compiled, and fn is left as it is."""
    return Kernel(fn) if isinstance(fn, JITFunction) else fn
