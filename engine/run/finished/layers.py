"""A model's layers for passes in order: as many as fit stay in memory, the others are read from the files each time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.engine.amounts import gib, seconds
from trireme.engine.build import Ahead
from trireme.engine.exchange import LOADERS, check_tied, fill_weight, naming_files
from trireme.engine.geometry import Geometry
from trireme.engine.memory import views
from trireme.engine.plan import DoesNotFit, Limits
from trireme.engine.planner.host import choose_device, memory_limits
from trireme.engine.run.begin.limits import check_compiler, check_heads
from trireme.engine.run.finished.model import Opened
from trireme.engine.run.finished.options import FORMATS
from trireme.engine.run.screen import Screen
from trireme.engine.tuning.base import check_unchanged, stamps
from trireme.models import hf, model
from trireme.models.sizes import narrow, shapes
from trireme.storage.layout import ALIGN, ITEMSIZE, round_up


class Layers:
    """The layers of a model. Some stay on the device (on a CPU in RAM), some in RAM; of the others RAM holds two at a
    time.
    """

    def __init__(self, opened: Opened, device: torch.device, dtype: str, limits: Limits, needs: int):
        """`dtype`: F32 or BF16. `needs`: bytes of the device for other tensors. Raises DoesNotFit, InputError."""
        self.cfg, self.device, self.opened = opened.cfg, device, opened
        self._on_cpu = device.type == "cpu"
        try:
            self._place(dtype, limits, needs)
        except DoesNotFit:
            at_once = narrow.slice_of(opened.cfg)
            if not at_once:
                raise
            self.cfg = replace(opened.cfg, at_once=at_once)
            self._place(dtype, limits, needs)
        source = self._source = opened.source.computed_in(dtype)
        self.stored = hf.sources(opened.cfg, source.shapes, source.named)
        check_tied(source, hf.canonical_names(opened.cfg, source.shapes), self.stored)
        units = range(self.geo.n_units)
        self._read_s, self._copy_s = [0, 0.0], [0, 0.0]  # bytes, seconds
        self._held: dict[int, Tensor] = {}
        make = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
        largest = max((self.sizes[u] for u in self.streamed), default=0)
        self._slots = [make(largest) for _ in range(2 * bool(self.streamed))]
        brought = 0 if self._on_cpu else max((self.sizes[u] for u in units if u not in self.resident), default=0)
        self._slot = torch.empty(brought, dtype=torch.uint8, device=device)
        made = max(layout.span for layout in self.geo.decoded)
        self._made = torch.empty(made, dtype=torch.uint8, device=device)
        self._files = stamps(source) | (stamps(opened.adapter.source) if opened.adapter else {})
        self._pool = ThreadPoolExecutor(LOADERS)
        self._ahead = Ahead(self._bring)

    def _place(self, dtype: str, limits: Limits, needs: int) -> None:
        """Decides which layers stay on the device, in RAM, or only in the files."""
        self.geo = geo = Geometry(self.cfg, dtype)
        units = range(geo.n_units)
        self._second = [round_up(geo.base[u].span, ALIGN) for u in units]  # offset of adapters
        self.sizes = sizes = [self._second[u] + geo.weights[u].span for u in units]
        largest = max(sizes)
        rooms = [limits.both - needs] if self._on_cpu else [limits.gpu - needs, limits.host]
        sliced = max(narrow.slice_bytes(self.cfg, u, ITEMSIZE[dtype]) for u in units)
        made = max(layout.span for layout in geo.decoded) + sliced
        last = self.geo.n_units - 1
        first = [0, last, *range(1, last)]  # the ends: a tied embedding is read at both
        if sum(sizes) + made <= rooms[0]:
            self.resident, self.in_ram, self.streamed = set(first), set[int](), list[int]()
            return
        rooms[0] -= made + largest * (2 if self._on_cpu else 1)
        if not self._on_cpu:
            rooms[1] -= 2 * largest
        found: list[set[int]] = [set() for _ in rooms]
        for u in first:
            fits = next((i for i, room in enumerate(rooms) if sizes[u] <= room), None)
            if fits is not None:
                rooms[fits] -= sizes[u]
                found[fits].add(u)
        self.resident, self.in_ram = found[0], (found[1] if len(found) > 1 else set())
        self.streamed = [u for u in range(last + 1) if u not in self.resident and u not in self.in_ram]
        if not {0, last} <= self.resident:
            lacking = sizes[0] + sizes[last] + largest * (2 if self._on_cpu else 1) + made + needs
            there, flag, free = limits.gpu, "--gpu-memory", limits.all_free
            if self._on_cpu:
                there, flag, free = limits.both, "--ram", limits.free_ram
            way_out = "Free some memory" if free else f"Raise {flag}"
            raise DoesNotFit(
                f"even layer by layer this takes {gib(lacking)}, there are {gib(there)}. "
                f"{way_out}, or ask for less at once."
            )

    # ------------------------------------------------ filled

    def load(self, progress: Callable[[int], object]) -> None:
        """Reads the layers that stay in memory. Raises InputError for values that are not finite, StoreError."""
        for u in sorted(self.resident | self.in_ram):
            buffer = torch.empty(self.sizes[u], dtype=torch.uint8)
            self._fill(u, buffer)
            self._held[u] = self._copied(buffer) if u in self.resident else buffer
            progress(self.sizes[u])
        if self.streamed and not self._read_s[0]:
            self._fill(self.streamed[0], self._slots[0])
        self._check_files()

    def _check_files(self) -> None:
        """Raises StoreError if files have changed: layers would be of two models."""
        check_unchanged(self._files, "was changed while it was read")

    def _copied(self, buffer: Tensor) -> Tensor:
        if self._on_cpu:
            return buffer
        began = time.perf_counter()
        found = buffer.to(self.device)
        self._copy_s[0] += len(buffer)
        self._copy_s[1] += time.perf_counter() - began
        return found

    def _fill(self, u: int, buffer: Tensor) -> None:
        began, geo, at = time.perf_counter(), self.geo, self._second[u]
        parts = [(geo.stored_base[u], buffer[:at]), (geo.stored[u], buffer[at:])]
        tensors = [(t, part) for layout, part in parts for t in layout.tensors]
        packing = self.geo.cfg.packing
        with naming_files(self._source, self.stored):
            list(self._pool.map(lambda each: fill_weight(each[0], each[1], self._values, packing), tensors))
        self._read_s[0] += self.sizes[u]
        self._read_s[1] += time.perf_counter() - began

    def _values(self, name: str, first: int, last: int) -> Iterator[np.ndarray]:
        if name in self.stored:
            yield from self._source.values(self.stored[name], first, last)
        else:
            assert self.opened.adapter is not None
            yield from self.opened.adapter.values(name, first, last)

    def _bring(self, key: tuple[int, int]) -> Tensor:
        """Reads (layer, buffer) in another thread."""
        u, slot = key
        self._fill(u, self._slots[slot])
        return self._slots[slot]

    # ------------------------------------------------ passes

    def units(self) -> Iterator[tuple[int, Any]]:
        """Yields (u, model.weights) of all layers in order, as models.generate takes them."""
        keys = list(zip(self.streamed, cycle((0, 1)), strict=False))
        due = iter(zip(keys, [*keys[1:], None], strict=True))
        for u in range(self.geo.n_units):
            buffer = self._held[u] if u in self._held else self._ahead.take(*next(due))
            if u in self.streamed[-1:]:
                self._check_files()
            if u not in self.resident and not self._on_cpu:
                buffer = self._slot[: self.sizes[u]].copy_(buffer[: self.sizes[u]])  # waits for what reads the slot
            yield u, self._weights(u, buffer)

    def _weights(self, u: int, buffer: Tensor) -> Any:
        geo, at = self.geo, self._second[u]
        found = views(geo.base[u], buffer) | views(geo.weights[u], buffer[at:])
        if geo.decoded[u].tensors:
            made = views(geo.decoded[u], self._made)
            model.make_codes(self.cfg, u, found, made, False)
            found |= made
        return model.weights(self.cfg, u, found)

    @property
    def pass_s(self) -> float:
        """Seconds of a pass to bring layers that do not stay on the device, as measured while loading."""
        moved = [(self.streamed, self._read_s)] + (
            [] if self._on_cpu else [([*self.streamed, *self.in_ram], self._copy_s)]
        )
        return sum(sum(self.sizes[u] for u in us) * s / max(1, n) for us, (n, s) in moved)

    def speed_line(self, what: str) -> str:
        """How long a pass takes at least, if not all layers stay in memory; else "". `what`: names a pass."""
        if not self.streamed and not self.in_ram:
            return ""
        read = f"reads {gib(sum(self.sizes[u] for u in self.streamed))} of {gib(sum(self.sizes))} from the files"
        copied = f"copies {gib(sum(self.sizes[u] for u in self.in_ram))} from RAM"
        parts = " and ".join(part for part, there in ((read, self.streamed), (copied, self.in_ram)) if there)
        return f"the model is larger than the memory: {what} {parts}, about {seconds(self.pass_s)}"

    def close(self) -> None:
        self._ahead.close()
        self._pool.shutdown()


# ---------------------------------------------------------------- by the options of a command


def device_and_dtype(given: argparse.Namespace, opened: Opened) -> tuple[torch.device, str]:
    """The device and the number format, F32 or BF16. Raises InputError."""
    device = choose_device(given.device or "auto")
    if device.type == "cuda":
        check_compiler()
    check_heads(opened.cfg, device)
    return device, FORMATS[given.dtype or ("bf16" if device.type == "cuda" else "fp32")]


def load_layers(
    given: argparse.Namespace, opened: Opened, place: tuple[torch.device, str], needs: int, what: str, screen: Screen
) -> Layers:
    """Loads the layers; before that prints how fast they can be read. `place`: from device_and_dtype. `needs`: bytes of
    the device for other tensors. `what`: names a pass.
    """
    device, dtype = place
    layers = Layers(opened, device, dtype, memory_limits(device, given.gpu_memory, given.ram), needs)
    with screen.working("loading", sum(layers.sizes[u] for u in layers.resident | layers.in_ram)) as more:
        layers.load(more)
    adapter = f" with its adapter of rank {opened.cfg.lora.rank}" if opened.cfg.lora else ""
    where = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    size = f"{shapes.parameters(opened.cfg):,} parameters, {gib(sum(layers.sizes))} in {dtype.lower()}"
    screen.say(f"model    {opened.base}{adapter}, {size} on the {where}")
    if line := layers.speed_line(what):
        screen.say(f"speed    {line}")
    return layers
