"""Redistributes a run's optimizer state from the snapshots of another number of hosts.

Records are the same for any number of hosts. Each is copied whole to the host that updates it now: read from its old
host's store if that can be reached, else sent by a host that can read it. All hosts go through the same list in the
same order, so none waits in a circle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.engine.between import writing
from trireme.engine.geometry import Geometry
from trireme.engine.hosts.group import refuse_text
from trireme.engine.hosts.held import Held, Whole
from trireme.engine.placement import Entry, Placement, Progress, Stored, entries, silent, stored
from trireme.engine.shared import BETWEEN, Wire


def fill(placement: Placement, whole: Whole, wire: Wire | None, progress: Progress = silent) -> None:
    """Sets trained weights and state to those of the snapshot. Raises StoreError, LostHost, InputError."""
    placement.blank = False
    plan, same = placement.plan, (placement.geo.cfg, placement.geo.dtype, placement.geo.adam_bits)
    then = Geometry(*same, 0, whole.key.hosts)
    for host in range(plan.hosts):
        geo = placement.geo if host == plan.host else Geometry(*same, host, plan.hosts)
        for entry in entries(geo, plan.record):
            source = _source(whole, host, geo, then, entry, plan.record)
            shards = stored(geo, plan.record, entry)
            if host == plan.host:
                with writing(placement, entry) as buffer:
                    _bring(buffer, shards, whole, source, wire)
                progress(placement.layout(entry).span)
            elif source not in whole.sights[host] and whole.seer(source) == plan.host:
                assert wire is not None
                _send(wire, host, whole.mine[source], shards)


def _source(whole: Whole, host: int, geo: Geometry, then: Geometry, entry: Entry, record: int) -> int:
    """The old host whose snapshot has an entry; if there is a choice, one that this process can read."""
    if entry.kind == "weights":  # all have them
        return min(whole.sights[host], default=0)
    first = geo.records(entry.u, record)[entry.r][0]
    return then.owner(entry.u, first, record)


def _bring(buffer: Tensor, shards: list[Stored], whole: Whole, source: int, wire: Wire | None) -> None:
    if source in whole.mine:
        for shard in shards:
            for at, piece in whole.mine[source].pieces(shard.name, shard.layout):
                into = buffer[shard.first + at :][: len(piece)]
                into.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        return
    assert wire is not None
    head = torch.zeros(2, dtype=torch.int64)
    while True:
        wire.receive(BETWEEN, whole.seer(source), head)
        at, n = head.tolist()
        if not n:
            return
        if at < 0 or not 0 < n <= len(buffer) - at:
            refuse_text(whole.seer(source), f": bytes {at} to {at + n} of {len(buffer)}")
        wire.receive(BETWEEN, whole.seer(source), buffer[at : at + n])


def _send(wire: Wire, host: int, held: Held, shards: list[Stored]) -> None:
    """Sends shards in pieces, each after its (offset, bytes)."""
    for shard in shards:
        for at, piece in held.pieces(shard.name, shard.layout):
            wire.send(BETWEEN, host, torch.tensor([shard.first + at, len(piece)]))
            wire.send(BETWEEN, host, torch.frombuffer(bytearray(piece), dtype=torch.uint8))
    wire.send(BETWEEN, host, torch.zeros(2, dtype=torch.int64))
