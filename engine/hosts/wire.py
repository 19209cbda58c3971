"""Tensors between hosts by torch.distributed: a gloo group for each channel, so that queues do not wait for each other.

The hosts meet at a store on host 0 (torchrun's, if it has one). How a run ends is written there: the first reason is
the run's, and all hosts end with it. Each host also counts up a number there; a host whose number stands still hangs.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from trireme.engine.hosts.group import LostHost, Place
from trireme.models.config import InputError

CONTROL = "control"  # of the run's own thread alone
CHANNELS = ("net", "sum", "statistics", CONTROL)
MEETING = timedelta(seconds=300)
NEVER = timedelta(days=30)  # of gloo: the watch limits waits, as a step of a large model may take hours
BEAT, SILENT = 1.0, 40.0  # seconds between beats; until a host hangs
REASON, PARTING, GRACE = 2.0, 5.0, 10.0  # seconds for a reason to arrive; for others to read it; for main to end
END = "end"  # key of the reason
LOST = "host {} is lost or hangs"


class Wire:
    """Implements the Wire of engine/gradients.py. Methods raise LostHost."""

    def __init__(self, place: Place, on_timeout: Callable[[str], object], timeout_s: float = SILENT):
        """Returns when all hosts are connected. `on_timeout(reason)`: called by a thread when the run must end and main
        does not: waits for a host that hangs cannot be ended. `timeout_s`: seconds until a silent host hangs.
        """
        self.host, self.hosts, self._on_timeout, self._timeout_s = place.host, place.hosts, on_timeout, timeout_s
        self.waits = False  # the run's own thread does, for another host
        msg = f"not all hosts are connected after {MEETING.seconds} s. Are MASTER_ADDR and MASTER_PORT those of host 0?"
        timer = threading.Timer(MEETING.seconds + GRACE, on_timeout, [msg])  # a program at that port may not answer
        timer.daemon = True
        timer.start()
        try:
            self.store = _open_store(place)
            self.address = self._meet(place)
            self._groups = {name: self._connect(name) for name in CHANNELS}
        except (RuntimeError, OSError, ValueError) as exc:
            text = str(exc).splitlines()[0]
            if "EADDRINUSE" in text:
                raise InputError(f"MASTER_PORT {place.port} is in use on this host. Give another one to all.") from exc
            raise LostHost(f"host 0 at {place.address}, port {place.port}: {text}") from exc
        finally:
            timer.cancel()
        self._closed, self._reason = threading.Event(), ""
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()

    def _meet(self, place: Place) -> str:
        """Waits for all hosts; returns the address at which this one listens, that of its route to host 0.

        On host 0 its own name may be a loopback address (127.0.1.1 on Ubuntu): then it is the one that other machines
        have for it. Raises LostHost.
        """
        route, master = _route(place)
        is_loopback = ip_address(route).is_loopback
        self.store.add(f"beat {self.host}", 0)
        self.store.set(f"master {self.host}", "" if is_loopback else master)
        keys = [f"master {host}" for host in range(self.hosts)]
        try:
            self.store.wait(keys, MEETING)
        except RuntimeError:
            missing = [f"host {host}" for host, key in enumerate(keys) if not self.store.check([key])]
            raise LostHost(f"{', '.join(missing)} did not connect within {MEETING.seconds} s") from None
        masters = [text.decode() for text in self.store.multi_get(keys)]
        return next(filter(None, masters), route) if is_loopback else route

    def _connect(self, name: str) -> Any:
        """A group of all hosts. Made directly, since init_process_group takes no address."""
        nic = os.environ.get("GLOO_SOCKET_IFNAME")
        device = ProcessGroupGloo.create_device(**({"interface": nic} if nic else {"hostname": self.address}))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], MEETING
        return ProcessGroupGloo(PrefixStore(name, self.store), self.host, self.hosts, options)

    # ------------------------------------------------ tensors

    def _move(self, queue: str, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """Sends and receives (host, tensor) at once; returns when all have arrived."""
        channel, host, works = queue.partition("_")[0], 0, []
        if channel == CONTROL:
            self.waits = True
        try:
            group = self._groups[channel]
            for move, pairs in ((group.recv, received), (group.send, sent)):
                for host, tensor in pairs:
                    works += [(host, move([tensor], host, 0))] if tensor.numel() else []
            for host, work in works:  # noqa: B007 (the error names it)
                work.wait(NEVER)
        except (RuntimeError, KeyError) as error:
            raise LostHost(self.reason(host)) from error
        finally:
            if channel == CONTROL:
                self.waits = False

    def send(self, queue: str, host: int, tensor: Tensor) -> None:
        self._move(queue, [(host, tensor)], [])

    def receive(self, queue: str, host: int, tensor: Tensor) -> None:
        self._move(queue, [], [(host, tensor)])

    def exchange(self, queue: str, target: int, source: int, block: Tensor) -> None:
        """Sends `block` to one host while another's is received."""
        self._move(queue, [(target, block)], [(source, block.clone())])

    def scatter(self, queue: str, root: int, parts: Sequence[Tensor]) -> None:
        pairs = [(host, part) for host, part in enumerate(parts) if host != self.host]
        self._move(queue, *((pairs, []) if self.host == root else ([], [(root, parts[self.host])])))

    def all_gather(self, queue: str, parts: Sequence[Tensor]) -> None:
        pairs = [(host, part) for host, part in enumerate(parts) if host != self.host]
        self._move(queue, [(host, parts[self.host]) for host, _ in pairs], pairs)

    # ------------------------------------------------ how a run ends

    def abort(self, reason: str) -> str:
        """Ends all hosts; returns the reason, which is the first one told. Their calls end with LostHost."""
        try:
            return self.store.compare_set(END, "", reason).decode(errors="replace") or reason
        except RuntimeError:
            return self._reason or LOST.format(0)  # the store has ended with host 0

    def reason(self, suspect: int) -> str:
        """Why the run ends, after a call has failed with host `suspect`."""
        with suppress(RuntimeError):
            self.store.wait([END], timedelta(seconds=REASON))
        return self.abort(LOST.format(suspect))

    def _watch(self) -> None:
        """A thread: counts up this host's number, finds hosts that hang and the reason of the end. When the run is over
        it ends the process, unless main does.
        """
        keys, counts = [f"beat {host}" for host in range(self.hosts)], [b""] * self.hosts
        last_beats, executor = [0.0] * self.hosts, futures.ThreadPoolExecutor(1)
        ask = lambda: (self.store.add(keys[self.host], 1), self.store.multi_get(keys), self.store.check([END]))
        while not self._reason and not self._closed.wait(BEAT):
            try:
                _, new_counts, ended = executor.submit(ask).result(self._timeout_s)
                for host, (count, count_before) in enumerate(zip(new_counts, counts, strict=True)):
                    last_beats[host] = time.monotonic() if count != count_before else last_beats[host]
                    if time.monotonic() - last_beats[host] > self._timeout_s and not self.store.check([f"done {host}"]):
                        self._reason = self.abort(f"{LOST.format(host)}: no sign of it for {self._timeout_s:.0f} s")
                counts, self._reason = new_counts, self.abort("") if ended else self._reason
            except (RuntimeError, futures.TimeoutError):  # the store has ended, or does not answer
                self._reason = LOST.format(0)
        if not self._closed.wait(GRACE):
            self._on_timeout(self._reason)

    def disconnect(self) -> None:
        """Breaks the connections, so that other hosts' calls end."""
        self._groups.clear()

    def close(self) -> None:
        """This host is done. Host 0, whose store has the reason, waits for the others."""
        with suppress(RuntimeError):
            self.store.set(f"done {self.host}", "")
            if self.host == 0:
                self.store.wait([f"done {host}" for host in range(self.hosts)], timedelta(seconds=PARTING))
        self._closed.set()
        self.disconnect()


def _open_store(place: Place) -> Store:
    """The store of the host's torchrun, or one that host 0 opens."""
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = place.host == 0 and not by_torchrun
    store = TCPStore(place.address, place.port, is_master=is_master, timeout=MEETING, wait_for_workers=False)
    return PrefixStore(f"trireme {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _route(place: Place) -> tuple[str, str]:
    """(this host's address on its route to host 0, host 0's address)."""
    family, kind, _, _, master = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(master)  # sends nothing
        return probe.getsockname()[0], str(master[0])
