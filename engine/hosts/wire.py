"""Tensors between hosts by torch.distributed: a gloo group for each line, so that queues do not wait for each other.

How a run ends is told through the store that the hosts met by: the first line that is written there is the reason, and
all hosts end with it. Each host also counts up a number there; a host whose number stands still hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from trireme.engine.hosts.group import LostHost
from trireme.engine.shared import BETWEEN

LINES = ("net", "sum", "statistics", "control")
MEETING = timedelta(seconds=300)
NEVER = timedelta(days=30)  # heartbeats end waits
BEAT, SILENT = 5.0, 45.0  # seconds between beats; until a host hangs
TOLD, GRACE = 2.0, 10.0  # seconds for a reason to arrive; for this process to end once there is one
END = "end"  # key of the reason


class Wire:
    """Implements the Wire of engine/shared.py. Methods raise LostHost."""

    def __init__(self, late: Callable[[str], object]):
        """Returns when all hosts are here; finds them by the environment of torchrun. `late(why)`: called by a thread
        where the run must end, and main does not: gloo's waits for a host that hangs cannot be ended.
        """
        try:
            store, self.host, self.hosts = next(iter(dist.rendezvous("env://", timeout=MEETING)))
            self.store = dist.PrefixStore("trireme", store)
            groups = dist.PrefixStore("groups", self.store)
            dist.init_process_group("gloo", store=groups, rank=self.host, world_size=self.hosts, timeout=MEETING)
            self._groups = {line: dist.new_group(timeout=NEVER) for line in LINES}
            dist.barrier()
        except (RuntimeError, ValueError) as error:
            raise LostHost(f"not all hosts are here: {str(error).splitlines()[0]}") from error
        self.waits = False  # the run's own thread does, for another host
        self._over, self._late = threading.Event(), late
        self._beats = threading.Thread(target=self._watch, name="beats", daemon=True)
        self._beats.start()

    # ------------------------------------------------ tensors

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    def _move(self, queue: str, sent: Sequence[tuple[int, Tensor]], came: Sequence[tuple[int, Tensor]]) -> None:
        """Sends and receives (host, tensor) at once; returns when all have arrived."""
        if queue == BETWEEN and not self.waits:
            with self.waiting():
                return self._move(queue, sent, came)
        group, at, moving = self._groups[queue.partition("_")[0]], 0, []
        try:
            for move, pairs in ((dist.irecv, came), (dist.isend, sent)):
                for at, what in pairs:
                    moving += [(at, move(what, at, group=group))] if what.numel() else []
            for at, each in moving:
                each.wait()
        except (RuntimeError, ValueError) as error:
            raise LostHost(self.reason(at)) from error

    def send(self, queue: str, host: int, what: Tensor) -> None:
        self._move(queue, [(host, what)], [])

    def receive(self, queue: str, host: int, what: Tensor) -> None:
        self._move(queue, [], [(host, what)])

    def exchange(self, queue: str, to: int, source: int, block: Tensor) -> None:
        self._move(queue, [(to, block)], [(source, block.clone())])

    def deal(self, queue: str, root: int, parts: Sequence[Tensor]) -> None:
        others = [(host, part) for host, part in enumerate(parts) if host != self.host]
        self._move(queue, *((others, []) if self.host == root else ([], [(root, parts[self.host])])))

    def gather(self, queue: str, parts: Sequence[Tensor]) -> None:
        others = [(host, part) for host, part in enumerate(parts) if host != self.host]
        self._move(queue, [(host, parts[self.host]) for host, _ in others], others)

    # ------------------------------------------------ how a run ends

    def tell(self, why: str) -> str:
        """Ends all hosts; returns the reason, which is the first one told. Their calls end with LostHost."""
        with suppress(RuntimeError):  # host 0 is gone, and the store with it
            why = self.store.compare_set(END, "", why).decode(errors="replace") or why
        return why

    def reason(self, suspect: int) -> str:
        """Why the run ends, after a call has failed with host `suspect`."""
        with suppress(RuntimeError):
            self.store.wait([END], timedelta(seconds=TOLD))
        return self.tell(f"host {suspect} is lost or hangs")

    def _watch(self) -> None:
        """Counts up this host's number until the run ends, and then ends the process unless main does."""
        others = [host for host in range(self.hosts) if host != self.host]
        seen, why = dict.fromkeys(others, (-1, time.monotonic())), ""
        while not why and not self._over.wait(BEAT):
            try:
                self.store.add(f"beat {self.host}", 1)
                why = self.tell("") if self.store.check([END]) else ""
                for host in others:
                    beats, now = self.store.add(f"beat {host}", 0), time.monotonic()
                    seen[host] = (beats, now) if beats != seen[host][0] else seen[host]
                    if now - seen[host][1] > SILENT and not self.store.check([f"done {host}"]):
                        why = self.tell(f"host {host} is lost or hangs: no sign of it for {SILENT:.0f} s")
            except RuntimeError:
                why = "host 0 is lost or hangs"
        if why and not self._over.wait(GRACE):
            self._late(why)

    def cut(self) -> None:
        """Breaks the connections, so that other hosts' calls end."""
        with suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group()

    def close(self) -> None:
        """This host is done. Host 0, which may hold the store, waits for the others."""
        self._over.set()
        self._beats.join()
        with suppress(RuntimeError):
            self.store.set(f"done {self.host}", "")
            if self.host == 0 and not self.store.check([END]):
                self.store.wait([f"done {host}" for host in range(self.hosts)], timedelta(seconds=GRACE))
        self.cut()
