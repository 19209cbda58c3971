"""A checkpoint's tensors into the homes of a run, and back out in the checkpoint's own names, dtypes and files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import torch

from trireme.engine.homes import Homes
from trireme.models import hf
from trireme.models.config import InputError, ModelConfig
from trireme.storage.checkpoint import Source, export


class Exchange:
    """Between a source checkpoint and the homes. Used between steps, when all lanes are idle."""

    def __init__(self, cfg: ModelConfig, source: Source, homes: Homes):
        self.source, self.homes = source, homes
        shapes = {name: t.shape for name, t in source.tensors.items()}
        self.stored = hf.sources(cfg, shapes)  # canonical name -> name in the source
        self.canonical = hf.canonical_names(cfg, shapes)  # name in the source -> canonical name, None if not trained
        self.unit = {t.name: u for u, layout in enumerate(homes.geo.weights) for t in layout.tensors}

    def load(self) -> None:
        """Fills the homes; moments are zero. Raises InputError on a value that is not finite, StoreError."""
        self._check_tied()
        in_bf16 = {name for name, stored in self.stored.items() if self.source.tensors[stored].dtype == "BF16"}
        self.homes.load(self._read_fp32, in_bf16.__contains__)

    def save(self, folder: Path) -> None:
        """Writes the checkpoint as it now stands into `folder`. Raises StoreError."""
        self.homes.staged = None
        export(self.source, folder, self._fetch)

    def replace(self, folder: Path) -> None:
        """As save, over an older checkpoint in `folder`, which stands until the new one is whole."""
        new, old = (folder.with_name(folder.name + ending) for ending in (".new", ".old"))
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        self.save(new)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        shutil.rmtree(old, ignore_errors=True)

    def _read_fp32(self, name: str) -> torch.Tensor:
        out = np.empty(self.source.tensors[self.stored[name]].numel, np.float32)
        self.source.read_as(self.stored[name], "F32", out)
        return torch.from_numpy(out)

    def _fetch(self, stored: str) -> np.ndarray | None:
        name = self.canonical[stored]
        if name is None:
            return None
        exact = self.source.tensors[stored].dtype != "BF16"
        values = self.homes.fetch(self.unit[name], name, exact)
        return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()

    def _check_tied(self) -> None:
        """A tied matrix that is stored twice must be the same twice; else nobody can say which is meant."""
        for stored, name in self.canonical.items():
            first = self.stored.get(name)
            if first not in (None, stored) and not np.array_equal(self.source.read(first), self.source.read(stored)):
                raise InputError(
                    f"{stored} and {first} are tied by config.json but differ in the files of {self.source.folder}. "
                    'Set "tie_word_embeddings": false in config.json if they are meant to.'
                )
