"""Triton; where it is not installed a stand-in, so that launchers can be imported and counted there (observers.py).

With the stand-in no kernel runs: a CPU computes by references, and tensors without memory are never launched.
"""

from __future__ import annotations

from typing import Any

try:
    import triton as triton
    import triton.language as tl
    from triton.language.target_info import cuda_capability_geq as cuda_capability_geq
    from triton.runtime.jit import JITFunction as JITFunction
except ImportError:

    class _Constant:
        def __init__(self, value: Any):
            self.value = value

    class _Absent:
        """Any attribute or decorator of Triton."""

        constexpr = _Constant
        __version__ = "3.9.0"  # one that needs no warning

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **_: Any) -> Any:
            return args[0] if args else self

    class JITFunction:  # type: ignore[no-redef]
        """The type of no function here."""

    triton = tl = cuda_capability_geq = _Absent()
