"""Heartbeats: a host that is lost, hangs or fails ends all hosts, with one line that names it.

A thread on each host counts in torchrun's store and reads the others' counts: gloo itself names nobody, and waits for
a host that hangs. No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

BEAT = 0.5  # seconds between signs of life
SILENT = 60.0  # seconds without one: lost
SUSPECTED = 5.0  # the same once a connection has broken
ANSWER = 60.0  # seconds for the store to answer
GRACE = 10.0  # seconds to end in order, then at once
END, OVER = "end", "over"
GONE = "torchrun's store does not answer: is the machine that it is on lost?"


def beat(host: int) -> str:
    """The key of a host's signs of life."""
    return f"beat {host}"


class LostHost(Exception):
    """Another host does not answer."""


class Store(Protocol):
    """torch.distributed.TCPStore, a client of this thread's own."""

    def set(self, key: str, value: str) -> None: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Watch:
    """`names`: of the hosts. `late(why)` is called once the run must end and has not ended in order."""

    def __init__(self, host: int, names: Sequence[str], store: Store, late: Callable[[str], object]):
        self.host, self.names, self.store, self.late = host, names, store, late
        self.why = ""  # the run ends, by all hosts' judgement
        self.suspicious = False  # a connection has broken
        self._told, self._left, self._judged = "", threading.Event(), threading.Event()
        self._keys = [END, *map(beat, range(len(names)))]
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()

    def tell(self, why: str) -> None:
        """Has all hosts end: this one is about to."""
        self._told = self._told or f"{self.names[self.host]}: {why}"

    def judgement(self, at_most: float = SUSPECTED + 4 * BEAT) -> str:
        """Why the run ends, once a connection has broken; "" if no host is to blame for seconds."""
        self.suspicious = True
        self._judged.wait(at_most)
        return self.why

    def close(self) -> None:
        """This host is done."""
        self._left.set()
        self._thread.join(GRACE)  # not for ever where the store is gone

    def _watch(self) -> None:
        seen, silent, count = [b""] * len(self.names), [0.0] * len(self.names), 0
        while not self.why:
            left, count = self._left.wait(BEAT), count + 1
            self.why, signs = self._asked(OVER if left and not self._told else str(count)) or (GONE, seen)
            if left:
                return
            for h, sign in enumerate(signs):
                silent[h] = silent[h] + BEAT if sign == seen[h] and sign != OVER.encode() else 0.0
            seen = signs
            longest = max(range(len(silent)), key=silent.__getitem__)
            if silent[longest] >= (SUSPECTED if self.suspicious else SILENT):
                lost = f"{self.names[longest]} is lost or hangs: no sign of life for {silent[longest]:.0f} s"
                self._told = self._told or lost  # to all, with the next sign
        self._judged.set()
        if not self._left.wait(GRACE):
            self.late(self.why)

    def _asked(self, sign: str) -> tuple[str, list[bytes]] | None:
        """As _exchange; None where the store is gone, or hangs with its machine: then a call does not return."""
        found: list[tuple[str, list[bytes]]] = []

        def ask() -> None:
            with suppress(RuntimeError):
                found.append(self._exchange(sign))

        asking = threading.Thread(target=ask, name="sign of life", daemon=True)
        asking.start()
        asking.join(ANSWER)
        return found[0] if found else None

    def _exchange(self, sign: str) -> tuple[str, list[bytes]]:
        """Leaves a sign of life: (why the run ends, the last sign of each host)."""
        self.store.set(beat(self.host), sign)
        if self._told:
            self.store.compare_set(END, "", self._told)
        end, *signs = self.store.multi_get(self._keys)
        return end.decode(errors="replace"), signs
