"""Counts what code over tensors of torch's "meta" device takes: bytes alive, FLOPs, launches, bytes that they move."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trireme.kernels.observers import observing
from trireme.kernels.ops import Docs, Order
from trireme.models.families.scans import Scan
from trireme.models.sizes.costs import HEADS, attended_pairs, recurrence_flops

TORCH_PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1}  # number of the argument that is the first matrix
NO_LAUNCH = ("empty", "new_empty", "detach", "_to_copy")  # begins of names; a copy of the same dtype is a view
# Results are like the first argument; like both, broadcast; likewise, but bool.
OF_ONE = ("abs", "clamp", "exp", "masked_fill", "nan_to_num", "neg", "reciprocal", "sigmoid", "softplus", "zeros_like")
OF_TWO = ("add", "bitwise_and", "bitwise_or", "div", "maximum", "mul", "rsub", "sub", "where")
COMPARED = ("eq", "ge", "gt", "le", "lt", "ne")
ROUNDED = 512  # bytes to which the allocator rounds
THIN = 128  # features of a product below which memory limits it: its bytes count
TILE = 128  # rows of a tile of grouped products, which belongs to one expert: on average half of its last is empty

Flops = tuple[str, float]  # (what multiplies, FLOPs)


class Usage(NamedTuple):
    """Of a pass."""

    peak: int  # bytes of temporaries, at the moment when there are most
    flops: dict[str, float]  # by what multiplies
    padded: float  # FLOPs of grouped products with empty rows
    launches: int
    moved: int  # bytes that launches read and write which multiply nothing


def _attention(kind: str, first: int, window: int, share: tuple[int, int]) -> Callable[..., Flops]:
    """Of ops whose arguments from `first` on are q, k and v; share: multiplications with a query and its result."""

    def flops(args: Sequence[Any]) -> Flops:
        q, v = args[first], args[first + 2]
        docs = next(a for a in args if isinstance(a, Docs))
        pairs = attended_pairs(docs.lengths, args[window] if len(args) > window else 0)
        width = max(q.shape[2], v.shape[2])
        name = f"{kind} {next((head for head in HEADS if width <= head), HEADS[-1])}"
        return name, 2.0 * pairs * q.shape[1] * (share[0] * q.shape[2] + share[1] * v.shape[2])

    return flops


def _scan(args: Sequence[Any], first: int) -> float:
    """Forward FLOPs of an op whose arguments from `first` on are those of scan_fwd."""
    q, v, delta = args[first], args[first + 2], args[first + 6]
    return recurrence_flops(Scan(q.shape[1], v.shape[1], q.shape[2], v.shape[2], 0, delta), len(q))


def _grouped(kind: str, order: Order, w: Tensor) -> Flops:
    return kind, 2.0 * len(order.pair) * w.shape[1] * w.shape[2]


# Ops whose kernels multiply matrices -> their FLOPs, given their arguments. Gradients of attention are of scores,
# queries, keys and values; those of recurrences five products for two.
PRODUCTS: dict[str, Callable[[Sequence[Any]], Flops]] = {
    "attention_fwd": _attention("attention", 0, 5, (1, 1)),
    "attention_bwd": _attention("attention backward", 1, 11, (3, 2)),
    "scan_fwd": lambda a: ("scan", _scan(a, 0)),
    "scan_bwd": lambda a: ("scan backward", 2.5 * _scan(a, 1)),
    "conv_fwd": lambda a: ("scan", 2.0 * len(a[0]) * a[1].numel()),
    "conv_bwd": lambda a: ("scan backward", 5.0 * len(a[1]) * a[2].numel()),
    "grouped_mm": lambda a: _grouped("grouped fp8" if len(a) > 6 and a[6] else "grouped", a[2], a[1]),
    "grouped_add_": lambda a: _grouped("grouped gradients", a[3], a[0]),
    "fp8_matmul": lambda a: ("fp8", 2.0 * a[0].numel() * len(a[2])),
    "fp8_add_": lambda a: ("fp8", 2.0 * a[1].numel() * len(a[3])),
}


def _result(name: str, args: Sequence[Any], dtype: torch.dtype | None) -> Tensor | tuple[Tensor, Tensor] | None:
    """The result of an op that torch has not for "meta", or has in Python, where the first call imports its compiler:
    that takes seconds, and leaves frames that hold the callers' tensors. Else None. `dtype`: among its arguments.
    """
    empty = lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    if name == "cat" and args[1:] == (1,) and args[0][0].dim() == 2:
        return empty((len(args[0][0]), sum(part.shape[1] for part in args[0])), args[0][0].dtype)
    if name in OF_TWO or name in COMPARED:
        shape = np.broadcast_shapes(*(a.shape for a in args[:3] if isinstance(a, Tensor)))
        return empty(shape, torch.bool if name in COMPARED else torch.result_type(*args[-2:]))
    if name in ("amax", "amin"):
        dims = {d % args[0].dim() for d in args[1]}
        sizes = ((d, 1 if d in dims else n) for d, n in enumerate(args[0].shape))
        return empty([n for d, n in sizes if d not in dims or args[2:] == (True,)], args[0].dtype)
    if (first := TORCH_PRODUCTS.get(name)) is not None:
        return empty((len(args[first]), args[first + 1].shape[1]), dtype or args[0].dtype)
    if name == "sort":
        return empty(args[0].shape, args[0].dtype), empty(args[0].shape, torch.int64)
    if name == "sum" and len(args) == 1:
        return empty((), dtype or args[0].dtype)
    return empty(args[0].shape, dtype or args[0].dtype) if name in OF_ONE else None


class Watch(TorchDispatchMode):
    """Counts storages while they live, products and launches."""

    def __init__(self, experts: int = 0) -> None:
        """experts: of a layer, whose rows they share evenly."""
        super().__init__()
        self.experts = experts
        self.alive = self.peak = self.launches = self.moved = 0
        self.flops, self.padded = defaultdict[str, float](float), 0.0
        self.ops: list[str] = []  # that run
        self.known = set[int]()  # storages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        thick, first = False, TORCH_PRODUCTS.get(name)
        if "out" in kwargs or name.endswith("_"):
            result = kwargs.get("out", args[0])
        else:
            dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
            tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, Tensor)]
            on_meta = bool(tensors) and all(t.is_meta for t in tensors)
            result = _result(name, args, dtype) if on_meta else None
            result = func(*args, **kwargs) if result is None else result
        if first is not None and not self._multiplies():
            a, b = args[first : first + 2]
            self.flops["gemm"] += 2.0 * a.numel() * b.shape[1]
            thick = min(*a.shape, b.shape[1]) >= THIN
        if not func.is_view and not name.startswith(NO_LAUNCH):
            self._count((*args, *kwargs.values(), *(args[:1] if name.endswith("_") else ())), thick)
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self._hold(t.untyped_storage())
        return result

    def begin(self, op: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """As kernels.observers.Observer."""
        if (product := PRODUCTS.get(op)) and not self._multiplies():
            assert not options, f"arguments of {op} are read by their places"
            kind, flops = product(args)
            for order in (a for a in args if isinstance(a, Order)):  # of all experts, or of some
                count = len(order.starts) - 1
                self.padded += flops / len(order.pair) * count * TILE / 2
                flops *= count / self.experts
            self.flops[kind] += flops
        self.ops.append(op)

    def end(self) -> None:
        self.ops.pop()

    def launch(self, kernel: str, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        in_place = bool(self.ops) and self.ops[-1].endswith("_")  # then it reads and writes what it is given
        self._count(args * (1 + in_place), False)

    def _multiplies(self) -> bool:
        return any(op in PRODUCTS for op in self.ops)

    def _count(self, args: tuple[Any, ...], multiplies: bool) -> None:
        self.launches += 1
        if not multiplies and not self._multiplies():
            self.moved += sum(t.numel() * t.itemsize for t in args if isinstance(t, Tensor))

    def _hold(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.known:
            return
        nbytes = -(-storage.nbytes() // ROUNDED) * ROUNDED
        self.known.add(key)
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.alive -= nbytes

    @contextmanager
    def watching(self, *owned: Any) -> Iterator[None]:
        """Counts all that happens. `owned`: what the caller holds, trees of tensors that are not counted."""
        self.known |= {t.untyped_storage()._cdata for t in _tensors(owned)}
        with observing(self), self:
            yield

    @property
    def usage(self) -> Usage:
        return Usage(self.peak, dict(self.flops), self.padded, self.launches, self.moved)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ():
        yield from _tensors(part)
