"""Reads a layer's weights, or their gradients, over views of its unit's buffer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from trireme.models.config import ModelConfig
from trireme.models.families.names import adapter_names
from trireme.models.layers import Layer
from trireme.models.linear import Codes, Linear, fuse
from trireme.models.lora import Adapters, Stacked, part_key
from trireme.models.norm import Norm
from trireme.models.sizes import narrow
from trireme.models.sizes.groups import matmuls

EMPTY = torch.empty(0, 0)  # a frozen tensor's gradient; a matrix that is there as codes alone


class Reader:
    """Tensors by their names within a layer. Tensors of a group (shapes.weight_groups) are neighbours in memory."""

    def __init__(self, cfg: ModelConfig, layer: Layer, prefix: str, views: Mapping[str, Tensor]):
        self.cfg, self.layer = cfg, layer
        self.views = {name.removeprefix(prefix): view for name, view in views.items()}
        self.lora = cfg.lora.within(prefix) if cfg.lora else None

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name; None if there is none."""
        return self.views.get(name)

    def norm(self, name: str, eps: float = 0.0) -> Norm | None:
        """A norm; None if there is none of this name. eps 0: the layer's."""
        if f"{name}.weight" not in self.views:
            return None
        weight, bias, add_one = self[f"{name}.weight"], self.get(f"{name}.bias"), self.layer.norm == "rms + 1"
        return Norm(weight, eps or self.layer.eps, bias, add_one)

    def linear(self, *names: str, router: bool = False) -> Linear:
        """A linear layer, given the names of its matrices; a router's is never in fp8."""
        first, codes = names[0], self._codes(f"{names[0]}.weight")
        weight = fuse(*(self[f"{name}.weight"] for name in names)) if f"{first}.weight" in self.views else EMPTY
        bias = fuse(*(self[f"{name}.bias"] for name in names)) if f"{first}.bias" in self.views else None
        fp8 = codes is not None or (not router and narrow.in_fp8(self.cfg, *weight.shape))
        return Linear(weight if self.layer.in_out else weight.T, bias, self._adapters(names), fp8, codes)

    def _codes(self, name: str) -> Codes | None:
        if name + narrow.SCALE not in self.views:
            return None
        rows, columns, scale = (self[name + part] for part in narrow.FP8)
        return Codes(columns, rows, scale[:1]) if self.layer.in_out else Codes(rows, columns, scale[:1])

    def _adapters(self, names: tuple[str, ...]) -> Adapters | None:
        adapted = [name for name in names if adapter_names(name)[0] in self.views]
        if self.lora is None or not adapted:
            return None
        _, features = matmuls(self.layer)[names]
        columns = {name: (end - n, end) for name, n, end in zip(names, features, accumulate(features), strict=True)}
        a, b = zip(*(map(self.__getitem__, adapter_names(name)) for name in adapted), strict=True)
        return Adapters(
            fuse(*a), b, tuple(columns[name] for name in adapted), tuple(map(self.lora.scale_of, adapted)),
            tuple(map(part_key, adapted)), merged=self._merged(f"{names[0]}.weight"),
        )  # fmt: skip

    def stacked(self, name: str) -> Stacked | None:
        """The adapters of a matrix of a layer's experts."""
        a, b = map(self.get, adapter_names(name))
        if a is None or b is None or self.lora is None:
            return None
        by_expert = lambda t: t.view(-1, self.lora.rank, t.shape[1])
        return Stacked(by_expert(a), by_expert(b), self.lora.scale_of(name), self._merged(name))

    def _merged(self, name: str) -> bool:
        """Whether a matrix is packed and is decoded with its adapter in it."""
        packing = self.cfg.packing
        return bool(self.lora and self.lora.aware and packing and name + packing.parts[0].suffix in self.views)
