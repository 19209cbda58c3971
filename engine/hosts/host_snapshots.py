"""Snapshots of a run's hosts: those that can be read here, the last that a run can continue, a host's share of it.

A store is read by its owner and, on shared disks, also by other hosts, without its lock: the files of a snapshot do not
change until all hosts have a newer one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from trireme.engine.amounts import count
from trireme.engine.between import writing
from trireme.engine.geometry import Geometry
from trireme.engine.hosts.group import Alone
from trireme.engine.placement import Placement, Progress, entries, silent, stored
from trireme.models.config import InputError
from trireme.storage import folders, snapshots
from trireme.storage.files import StoreError
from trireme.storage.shards import stream_shard
from trireme.storage.untrusted import checksum


class Key(NamedTuple):
    """What the snapshots of a run's hosts have in common if they belong together."""

    step: int
    hosts: int
    content: str  # checksum of what a resumed run keeps


@dataclass(frozen=True)
class HostSnapshot:
    """A host's snapshot. `dirs`: the folders of its store, by device."""

    host: int
    dirs: Sequence[Path]
    snapshot: snapshots.Snapshot

    @cached_property
    def key(self) -> Key:
        step, extra = self.snapshot.step, self.snapshot.extra
        try:
            fixed, plan = extra["fixed"], extra["fixed"]["plan"]
            content = json.dumps({**fixed, "plan": {**plan, "host": 0}}, sort_keys=True)
            return Key(step, plan["hosts"], checksum([content.encode()]))
        except (KeyError, TypeError):
            return Key(step, 1, "")  # another version's; whoever resumes it says so


@dataclass(frozen=True)
class RunSnapshot:
    """A snapshot of all hosts of a run. `by_host`: those that this host can read."""

    key: Key
    by_host: Mapping[int, HostSnapshot]


def readable(host: int, dirs: Sequence[Path], run: str) -> list[HostSnapshot]:
    """The snapshots in a host's store, oldest first; empty if it cannot be reached or belongs to another run."""
    try:
        dirs = [dirs[i] for i in folders.in_order(dirs, run)]
        return [HostSnapshot(host, dirs, snapshot) for snapshot in snapshots.load(dirs[0])]
    except (StoreError, OSError):
        return []


def last_common(group: Alone, here: Sequence[HostSnapshot], started: bool, run: Path) -> RunSnapshot | None:
    """The last snapshot that the hosts can continue; None if there is none yet.

    As many hosts as before need their own. Another number needs those of all hosts, on each host. `here`: snapshots
    that this host can read. `started`: whether the run has begun here. `run`: its folder. Raises InputError if some
    cannot be read.
    """
    texts = group.texts(json.dumps([started, [[snapshot.host, *snapshot.key] for snapshot in here]]))
    shown = [json.loads(text) for text in texts]
    read: dict[Key, list[set[int]]] = defaultdict(lambda: [set() for _ in shown])  # by each host: whose it can read
    for reader, (_, there) in enumerate(shown):
        for host, *key in there:
            read[Key(*key)][reader].add(host)
    needs = lambda key, reader: [reader] if key.hosts == len(shown) else range(key.hosts)
    lacks = {
        key: [(reader, host) for reader, hosts in enumerate(there) for host in needs(key, reader) if host not in hosts]
        for key, there in read.items()
    }
    common = [key for key in read if not lacks[key]]
    if common:
        key = max(common, key=lambda key: (key.step, key.hosts == group.hosts, key))
        return RunSnapshot(key, {snapshot.host: snapshot for snapshot in here if snapshot.key == key})
    begins = [key for key, there in read.items() if any(0 in hosts for hosts in there)]
    if not begins or (all(key.hosts == group.hosts for key in read) and all(started for started, _ in shown)):
        return None  # killed before all had their first
    last = max(begins)
    reader, host = lacks[last][0]
    raise InputError(
        f"--resume {run}: its last snapshot, of step {last.step}, is of {count(last.hosts, 'host')}, and host {reader} "
        f"cannot read that of host {host}. Copy the folder {run / f'host-{host}' if host else run} and its --store "
        f"there, or start {count(last.hosts, 'host')} where theirs are."
    )


def load_share(placement: Placement, snapshot: RunSnapshot, progress: Progress = silent) -> None:
    """Sets this host's weights and state to those of a snapshot of another number of hosts. Raises StoreError.

    Records are the same for any number of hosts: each is read whole from the store of the host that updated it.
    """
    placement.blank = False
    geo, record = placement.geo, placement.plan.record
    before = Geometry(geo.cfg, geo.dtype, geo.adam_bits, 0, snapshot.key.hosts)
    for entry in entries(geo, record):
        state = entry.kind == "state"
        owner = before.owner(entry.u, geo.records(entry.u, record)[entry.r][0], record) if state else 0
        source = snapshot.by_host[owner]
        with writing(placement, entry) as buffer:
            for shard in stored(geo, record, entry):
                for at, block in stream_shard(source.dirs, source.snapshot, shard.name, shard.layout):
                    first = shard.first + at
                    buffer[first : first + len(block)].copy_(torch.frombuffer(block, dtype=torch.uint8))
        progress(placement.layout(entry).span)
