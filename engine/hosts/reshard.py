"""Loads the snapshot of another number of hosts: each host reads its share from their stores.

Records are the same for any number of hosts, so each is read whole from the store of the host that updated it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from trireme.engine.between import writing
from trireme.engine.geometry import Geometry
from trireme.engine.hosts.host_snapshots import HostSnapshot, RunSnapshot
from trireme.engine.placement import Placement, Progress, Stored, entries, silent, stored
from trireme.storage import snapshots
from trireme.storage.files import StoreError, as_store_error
from trireme.storage.shards import DAMAGED, Damaged
from trireme.storage.untrusted import summed

PIECE = 64 << 20  # bytes read at once, at most


def load_share(placement: Placement, snapshot: RunSnapshot, progress: Progress = silent) -> None:
    """Sets this host's weights and state to those of the snapshot. Raises StoreError."""
    placement.blank = False
    geo, record = placement.geo, placement.plan.record
    before = Geometry(geo.cfg, geo.dtype, geo.adam_bits, 0, snapshot.key.hosts)
    for entry in entries(geo, record):
        state = entry.kind == "state"
        owner = before.owner(entry.u, geo.records(entry.u, record)[entry.r][0], record) if state else 0
        with writing(placement, entry) as buffer:
            for shard in stored(geo, record, entry):
                for first, content in _pieces(snapshot.by_host[owner], shard):
                    into = buffer[shard.first + first :][: len(content)]
                    into.copy_(torch.frombuffer(content, dtype=torch.uint8))
        progress(placement.layout(entry).span)


def _pieces(source: HostSnapshot, shard: Stored) -> Iterator[tuple[int, bytearray]]:
    """Yields (offset in the shard, bytes), piece by piece. Raises StoreError; Damaged after the last piece."""
    folder, known = source.snapshot.folder, source.snapshot.shards.get(shard.name)
    if known is None or known.layout != shard.layout:
        raise StoreError(
            errno.EINVAL, "is the state of another model, or in other shards", str(source.dirs[0] / folder)
        )
    for k, (stripe, checksum) in enumerate(zip(known.stripes, known.sums, strict=True)):
        path, sums = source.dirs[stripe.device] / folder / snapshots.file_name(shard.name, k), list[str]()
        parts = [(at + a, min(PIECE, n - a)) for at, _, n in stripe.segments for a in range(0, n, PIECE)]
        try:
            snapshots.check_header(path, stripe, snapshots.NO_WAY_BACK)
            blocks = _blocks(path, len(stripe.header), [n for _, n in parts])
            yield from zip((at for at, _ in parts), summed(blocks, sums.append), strict=True)
        except OSError as e:
            raise as_store_error(e, path) from e
        if sums != [checksum]:
            raise Damaged(errno.EIO, f"{DAMAGED}: {snapshots.NO_WAY_BACK}", str(path))


def _blocks(path: Path, first: int, sizes: Iterable[int]) -> Iterator[bytearray]:
    with path.open("rb") as file:
        file.seek(first)
        for size in sizes:
            block = bytearray(size)
            file.readinto(block)
            yield block
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
