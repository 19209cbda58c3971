"""What a pass over a unit takes, counted: its forward and backward run over tensors without memory ("meta").

Launchers run as on a GPU, kernels do not. So sizes of temporaries, FLOPs of matrix products, launches and the bytes that
they move are those of the code, whatever it is. What products are within kernels is in costs.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trireme.kernels.launcher import WATCHING
from trireme.models import model
from trireme.models.config import ModelConfig
from trireme.models.packed import DTYPE
from trireme.models.rows import make_rows, rope_tables
from trireme.models.sizes import narrow, shapes
from trireme.storage.layout import pack

PRODUCTS = {"mm": 2, "addmm": 3, "addmm_": 3, "_scaled_mm": 2}  # arguments up to the second matrix
MADE = 512  # bytes to which the allocator rounds
BYTES = {"F8_E4M3": torch.float8_e4m3fn}


class Taken(NamedTuple):
    """Of a pass: most bytes of temporaries at once, FLOPs of products, launches of kernels, bytes that they move."""

    peak: int
    flops: int
    launches: int
    moved: int


class _Watch(TorchDispatchMode):
    """Counts storages while they live, matrix products and launches."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.flops = self.launches = self.moved = 0
        self.known = set[int]()
        self.by_name = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if (n := PRODUCTS.get(name)) is not None:
            a, b = args[n - 2], args[n - 1]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        if not func.is_view:
            self.note(name, [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)])
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self.hold(t.untyped_storage())
        return result

    def hold(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.known:
            return
        nbytes = -(-storage.nbytes() // MADE) * MADE
        self.known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, nbytes)

    def forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes

    def note(self, name: str, args: Any) -> None:
        if name.startswith(("empty", "new_empty", "detach")):
            return
        self.launches += 1
        self.by_name[name] += 1
        self.moved += sum(t.numel() * t.itemsize for t in args if isinstance(t, Tensor))

    @contextmanager
    def watching(self, *given: Any) -> Iterator[None]:
        """`given`: what the caller holds, which is not counted."""
        self.known |= {t.untyped_storage()._cdata for t in _tensors(given)}
        WATCHING.append(self.note)
        with self:
            yield
        WATCHING.remove(self.note)

    @property
    def taken(self) -> Taken:
        return Taken(self.peak, self.flops, self.launches, self.moved)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ():
        yield from _tensors(part)


@lru_cache(4096)
def measure(
    cfg: ModelConfig, u: int, lengths: tuple[int, ...], dtype: str, grads: str, kept: frozenset[str] = frozenset()
) -> tuple[Taken, Taken]:
    """What (forward, backward) of inner unit u take for documents of these lengths, if backward finds `kept`."""
    N, real, meta = sum(lengths), DTYPE[dtype], torch.device("meta")
    made, dtypes = narrow.made_groups(cfg, u)
    trained = [group for part in shapes.trained_parts(cfg, u) for group in part]
    stored = lambda groups: _memory(groups, dtype, narrow.own_dtypes(cfg, u))
    views = _memory(trained, dtype) | stored(narrow.base_groups(cfg, u)) | _memory(made, dtype, dtypes)
    cut = narrow.slices(cfg, u)
    parts = (
        [model.weights(cfg, u, views | stored(narrow.slice_groups(cfg, u, own)), own) for own in (cut[0], cut[-1])]
        if cut
        else [model.weights(cfg, u, views)]
    )
    passed = None
    if cut:
        shaped = shapes.passed_shapes(cfg, N).items()
        passed = {name: torch.empty(shape, dtype=DTYPE[kind], device=meta) for name, (shape, kind) in shaped}
    g = model.gradients(cfg, u, _memory(trained, grads))
    rows = make_rows(lengths, rope_tables(cfg, max(lengths), meta), meta)
    found = shapes.saved_of(cfg, shapes.unit(cfg, u), N)
    saved = {
        name: torch.empty(shape, dtype=torch.float32 if kind == "F32" else real, device=meta)
        for name, (shape, kind) in found.items()
        if name in kept
    }
    x, dy, out, dx = (torch.empty((N, cfg.width), dtype=real, device=meta) for _ in range(4))
    forward, backward, held = _Watch(), _Watch(), (parts, g, rows, saved, x, dy, out, dx, passed)
    with forward.watching(*held):
        for w in parts:
            model.forward(cfg, u, w, x, rows, saved, out, passed=passed)
    with backward.watching(*held):
        for w in reversed(parts):
            model.backward(cfg, u, w, g, x, saved, dy, rows, dx, passed)
    return forward.taken, backward.taken


def _memory(groups: list[shapes.Group], dtype: str, dtypes: dict[str, str] | None = None) -> dict[str, Tensor]:
    layout = pack(groups, dtype, dtypes or {})
    buffer = torch.empty(layout.span, dtype=torch.uint8, device="meta")
    cut = lambda t: (
        buffer[t.offset : t.offset + t.nbytes].view(DTYPE.get(t.dtype, BYTES.get(t.dtype, torch.uint8))).view(t.shape)
    )
    return {t.name: cut(t) for t in layout.tensors}


POINTS = (1024, 2048)  # tokens at which a unit is measured: what a pass takes is a line up to a tile of an MLP
NAMES = {2: "BF16", 4: "F32"}  # dtypes by bytes of a value


@lru_cache(4096)
def _line(cfg: ModelConfig, u: int, itemsize: int, grad_itemsize: int) -> tuple[float, float]:
    """(bytes, bytes a token) of a unit's temporaries."""
    a, b = (max(t.peak for t in measure(cfg, u, (n,), NAMES[itemsize], NAMES[grad_itemsize])) for n in POINTS)
    slope = (b - a) / (POINTS[1] - POINTS[0])
    return a - slope * POINTS[0], slope


def temporaries(cfg: ModelConfig, u: int, tokens: int, itemsize: int, grad_itemsize: int) -> int:
    """Bytes of an inner unit's temporaries on the GPU, forward or backward, with nothing saved."""
    if tokens > cfg.mlp_rows:
        return max(t.peak for t in measure(cfg, u, (tokens,), NAMES[itemsize], NAMES[grad_itemsize]))
    first, each = _line(cfg, u, itemsize, grad_itemsize)
    return int(first + each * tokens) + SLACK


SLACK = 1 << 20  # rounding of the allocator, and tiles that end early
