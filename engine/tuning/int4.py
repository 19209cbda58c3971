"""What int4 checkpoints store of a matrix besides its parts: its shape (compressed-tensors), its groups of columns
(GPTQ).
"""

from __future__ import annotations

import numpy as np

from trireme.models.config import Packing
from trireme.storage.checkpoint import Source
from trireme.storage.headers import CheckpointError

INTEGERS = {"I32": np.int32, "I64": np.int64}
LARGEST = 1 << 20  # columns
CODES = 8  # of an int32


def check_groups(source: Source, packing: Packing, name: str, shape: tuple[int, ...]) -> None:
    """Checks the groups of columns of a matrix whose part they stay. Raises CheckpointError."""
    values, groups = source.read(name).view(np.int32), -(-shape[-1] // packing.block[1])
    if not (values.min(initial=0) >= 0 and values.max(initial=0) < groups):
        where = source.folder / source.tensors[name].file
        raise CheckpointError(f"{where}: {name} has groups beyond 0 to {groups - 1}. Download it again.")


def check(source: Source, packing: Packing, name: str, shape: tuple[int, ...]) -> None:
    """Checks a tensor that `packing.checked` names, given the shape of its matrix. Raises CheckpointError."""
    t = source.tensors[name]
    where, columns = f"{source.folder / t.file}: {name}", shape[-1]
    order = name.endswith("_idx")
    n = columns if order else 2
    if t.dtype not in INTEGERS or t.shape != (n,) or n > LARGEST:
        raise CheckpointError(f"{where} is {t.dtype} {list(t.shape)}, expected I32 or I64 [{n}].")
    values = source.read(name).view(INTEGERS[t.dtype])
    if order and not np.array_equal(values, np.arange(columns) // packing.block[1]):
        how = "which is not supported (actorder). Take a release without it, or the BF16 original"
        raise CheckpointError(f"{where}: its columns are in groups by activation order, {how}.")
    if not order and tuple(values.tolist()) != shape:
        if values[0] == shape[0] and values[1] % CODES and values[1] < columns <= values[1] + CODES:
            how = f"only multiples of {CODES} columns are supported. Take the BF16 original"
            raise CheckpointError(f"{where} is {values.tolist()}: {how}.")
        raise CheckpointError(f"{where} is {values.tolist()}, its codes are of {list(shape)}. Download it again.")
