"""Snapshots of a run's hosts: those that can be read here, the last complete one, and its bytes.

A store is read by its owner and, on shared disks, also by other hosts, without its lock: the files of a snapshot do not
change until all hosts have a newer one.
"""

from __future__ import annotations

import errno
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.amounts import count
from trireme.engine.hosts.group import Alone, refuse_text, told
from trireme.engine.plan import MOST_HOSTS
from trireme.models.config import InputError
from trireme.storage import folders, snapshots
from trireme.storage.files import StoreError, as_store_error
from trireme.storage.layout import Layout
from trireme.storage.shards import DAMAGED, Damaged
from trireme.storage.untrusted import checksum, summed

PIECE = 64 << 20  # bytes read at once, at most
TOLD = {"begun": bool, "held": [(int, int, int, str)]}  # by each process: (host, *Key)


class Key(NamedTuple):
    """What the snapshots of a run's hosts have in common if they belong together."""

    step: int
    hosts: int
    content: str  # checksum: the cut, the data


@dataclass(frozen=True)
class Held:
    """A host's snapshot. `dirs`: the folders of its store, by device."""

    host: int
    dirs: Sequence[Path]
    snapshot: snapshots.Snapshot

    @cached_property
    def key(self) -> Key:
        step, extra = self.snapshot.step, self.snapshot.extra
        try:
            plan: dict[str, Any] = extra["cut"]["plan"]
            said = [{**extra["cut"], "plan": {**plan, "host": 0}}, extra["data"]]
            hosts, content = plan.get("hosts", 1), checksum([json.dumps(said, sort_keys=True).encode()])
        except (KeyError, TypeError, ValueError, AttributeError):
            hosts, content = None, ""
        if type(hosts) is int and 0 < hosts <= MOST_HOSTS:
            return Key(step, hosts, content)
        return Key(step, 1, "")  # another version's, or changed; whoever resumes it says so

    @property
    def of(self) -> int:
        """The number of the host, as the snapshot says."""
        try:
            host = self.snapshot.extra["cut"]["plan"]["host"]
        except (KeyError, TypeError):
            return 0
        return host if type(host) is int else 0

    def pieces(self, name: str, layout: Layout) -> Iterator[tuple[int, bytes]]:
        """Yields (offset in the shard, bytes) of a shard, piece by piece. Raises StoreError; Damaged after the last
        piece.
        """
        record = self.snapshot.shards.get(name)
        if record is None or record.layout != layout:
            message = "is the state of another model, or in other shards"
            raise StoreError(errno.EINVAL, message, str(self.dirs[0] / self.snapshot.folder))
        for k, (stripe, known) in enumerate(zip(record.stripes, record.sums, strict=True)):
            path, found = self.dirs[stripe.device] / self.snapshot.folder / snapshots.file_name(name, k), list[str]()
            parts = [(at + a, min(PIECE, n - a)) for at, _, n in stripe.segments for a in range(0, n, PIECE)]
            try:
                snapshots.check_header(path, stripe, snapshots.NO_WAY_BACK)
                blocks = _blocks(path, len(stripe.header), [n for _, n in parts])
                yield from zip((at for at, _ in parts), summed(blocks, found.append), strict=True)
            except OSError as e:
                raise as_store_error(e, path) from e
            if found != [known]:
                raise Damaged(errno.EIO, f"{DAMAGED}: {snapshots.NO_WAY_BACK}", str(path))


def _blocks(path: Path, first: int, sizes: Iterable[int]) -> Iterator[bytes]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
        file.seek(first)
        for size in sizes:
            yield file.read(size)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def held_in(host: int, dirs: Sequence[Path], run: str) -> list[Held]:
    """The snapshots in another host's store, oldest first; empty if it cannot be reached or belongs to another run."""
    try:
        dirs = [dirs[i] for i in folders.in_order(dirs, run)]
        found = [Held(host, dirs, snapshot) for snapshot in snapshots.load(dirs[0])]
    except (StoreError, OSError):
        return []
    return [each for each in found if each.of == host]


@dataclass(frozen=True)
class Whole:
    """The last snapshot that all hosts of a run have."""

    key: Key
    mine: Mapping[int, Held]  # in this process's sight, by host
    sights: Sequence[frozenset[int]]  # the hosts in each process's sight

    def seer(self, host: int) -> int:
        """The first process that can read the snapshot of `host`."""
        return next(process for process, sight in enumerate(self.sights) if host in sight)


def last_whole(group: Alone, held: Sequence[Held], begun: bool, run: Path) -> Whole | None:
    """The last snapshot that all hosts have; None if there is none yet. `held`: snapshots that this process can read.
    `begun`: whether the run has begun on this host.

    Raises InputError if a host's snapshot is missing.
    """
    own = json.dumps({"begun": begun, "held": [[each.host, *each.key] for each in held]})
    said = [told(text, TOLD, process) for process, text in enumerate(group.texts(own))]
    seen: dict[Key, list[set[int]]] = defaultdict(lambda: [set() for _ in said])
    for process, there in enumerate(said):
        for host, *words in there["held"]:
            key = Key(*words)
            if not host < key.hosts <= MOST_HOSTS:
                refuse_text(process, f": a snapshot of host {host} of {key.hosts}")
            seen[key][process].add(host)
    hosts = {key: set[int]().union(*sights) for key, sights in seen.items()}
    whole = [key for key in seen if len(hosts[key]) == key.hosts]
    if whole:
        key = max(whole, key=lambda key: (key.step, key.hosts == group.hosts, key))
        return Whole(key, {each.host: each for each in held if each.key == key}, [frozenset(s) for s in seen[key]])
    firsts = [key for key in seen if 0 in hosts[key]]
    as_many = all(key.hosts == group.hosts for key in seen) and all(each["begun"] for each in said)
    if not firsts or as_many:  # killed before all had their first
        return None
    last = max(firsts)
    lost = min(set(range(last.hosts)) - hosts[last])
    raise InputError(
        f"--resume {run}: its last snapshot, of step {last.step}, is of {count(last.hosts, 'host')}, and that of host "
        f"{lost} cannot be reached. Bring {run / f'host-{lost}' if lost else run} and its --store here, or start "
        f"{count(last.hosts, 'host')} where theirs are."
    )
