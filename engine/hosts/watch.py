"""Heartbeats: a host that is lost, hangs or fails ends the run on all hosts, with one line that names it.

A thread on each host sends a heartbeat to each other host over a connection of its own, and counts how long each is
silent: a connection that waits for a host cannot tell which host hangs. Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from trireme.engine.hosts.channel import Channel, Forged

BEAT = 0.5  # seconds between heartbeats
SILENT = 45.0  # seconds without one: lost, and said to all within a minute
SUSPECTED = 5.0  # the same once a connection has broken
GRACE = 10.0  # seconds to end in order, then at once
LIVES, OVER, END = b"lives", b"over", b"end "  # END: and why
LONGEST = 4096  # bytes of a sign


class LostHost(Exception):
    """Another host does not answer."""


class Signs:
    """Heartbeats to and from one host. No method waits."""

    def __init__(self, channel: Channel):
        channel.socket.setblocking(False)
        self.channel, self.broken, self.over = channel, False, False
        self._unsent, self._unread = bytearray(), bytearray()

    def leave(self, sign: bytes) -> None:
        if self.broken or self.over:
            return
        self._unsent += self.channel.sealed(sign)
        try:
            del self._unsent[: self.channel.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True

    def collect(self) -> list[bytes]:
        """All heartbeats that have arrived. Raises Forged."""
        while not self.over:
            try:
                came = self.channel.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                came = b""
            if not came:
                self.broken = True
                break
            self._unread += came
        found = []
        while (sign := self.channel.opened(self._unread, LONGEST)) is not None:
            self.over = self.over or sign == OVER
            found.append(sign)
        return found


class Watch:
    """The thread of heartbeats. When the run has to end, `cut()` is called, and `late(why)` if it does not end in
    order.
    """

    def __init__(
        self,
        host: int,
        names: Sequence[str],
        channels: Mapping[int, Channel],
        late: Callable[[str], object],
        cut: Callable[[], object],
    ):
        """`names`: of the hosts. `channels`: to the other hosts, for heartbeats alone."""
        self.host, self.names, self.late, self.cut = host, names, late, cut
        self.why = ""  # the run ends
        self.suspicious = False  # a connection has broken
        self._told, self._left, self._judged = "", threading.Event(), threading.Event()
        self._signs = {other: Signs(channel) for other, channel in channels.items()}
        self._silent = dict.fromkeys(channels, 0.0)
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()

    def tell(self, why: str) -> None:
        """Ends the run on all hosts: this one is about to end."""
        self._told = self._told or f"{self.names[self.host]}: {why}"

    def judgement(self, at_most: float = SUSPECTED + 4 * BEAT) -> str:
        """Why the run ends, after a connection has broken; "" if no host is found to be the cause within `at_most`
        seconds.
        """
        self.suspicious = True
        self._judged.wait(at_most)
        return self.why

    def close(self) -> None:
        """Ends the heartbeats: this host is done."""
        self._left.set()
        self._thread.join(GRACE)

    def _watch(self) -> None:
        while not self.why:
            left = self._left.wait(BEAT)
            self.why = self._heard()
            if left or self._told:
                self.why = self.why or self._told
                last = END + self._told.encode()[: LONGEST - len(END)] if self._told else OVER
                for signs in self._signs.values():
                    signs.leave(last)
                if left:
                    return
        self._judged.set()
        self.cut()
        if not self._left.wait(GRACE):
            self.late(self.why)
        for signs in self._signs.values():
            signs.leave(OVER)

    def _heard(self) -> str:
        """Sends a heartbeat to all hosts and reads theirs. Returns why the run ends, or ""."""
        for other, signs in self._signs.items():
            signs.leave(LIVES)
            try:
                came = signs.collect()
            except Forged as error:
                self.tell(f"what came from {self.names[other]} was changed in transit: {error}")
                return self._told
            for sign in came:
                if sign.startswith(END):
                    return sign[len(END) :].decode(errors="replace")
            self._silent[other] = 0.0 if came or signs.over else self._silent[other] + BEAT
        longest = max(self._silent, key=self._silent.__getitem__)
        suspected = self.suspicious or self._signs[longest].broken
        if self._silent[longest] >= (SUSPECTED if suspected else SILENT):
            lost = f"{self.names[longest]} is lost or hangs: no heartbeat for {self._silent[longest]:.0f} s"
            self._told = self._told or lost  # to all, with this sign
        return ""
