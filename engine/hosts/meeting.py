"""How the hosts of a run find each other: at the port of host 0, then each at a port of its own, until all are
connected.

A process that connects has a few seconds to prove that it knows the secret, else its connection is closed. When all
hosts are connected, no port is open.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from trireme.engine.hosts.channel import Channel, End, Forged, answer, greet
from trireme.engine.hosts.watch import LostHost
from trireme.models.config import InputError
from trireme.storage.untrusted import complaint, parse_json, shown

MEETING = 300.0  # seconds for all hosts to be here
PROOF = 10.0  # seconds for who connects to prove itself
AT_ONCE = 64  # connections of one address that have not yet
AGAIN = 0.2  # seconds between trials
STRANGE = 20.0  # seconds of connections that nobody proves anything on: another program's port
LINES = ("net", "sum", "statistics", "control", "watch")  # connections between each two hosts
TABLE = 256  # bytes for each host's address
WHERE = {"name": str, "port": int}

Lines = dict[str, dict[int, Channel]]  # by line and host
Say = Callable[[str], object]


def silent(_: str) -> None:
    pass


class Address(NamedTuple):
    """A port. `name`: of the host, as it was given."""

    name: str
    port: int


def first_address() -> Address:
    """The port of host 0: the one after MASTER_PORT, where torchrun's own store is."""
    behind = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + behind)


class Door:
    """An open port. `channels`: of the hosts that have proven that they know the secret, by (host, line)."""

    def __init__(self, host: int, hosts: int, key: bytes, at: Address):
        """Raises OSError if the port is in use."""
        self.host, self.hosts, self.key = host, hosts, key
        self.channels: dict[tuple[int, int], Channel] = {}
        self.refused = 0  # connections of strangers
        self._news, self._open, self._waiting = threading.Condition(), True, Counter[str]()
        self._listening = _listen(at)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def _accept(self) -> None:
        while self._open:
            try:
                connection, (address, *_) = self._listening.accept()
            except OSError:  # closed, or the connection is gone already
                time.sleep(0.01)
                continue
            with self._news:
                full = self._waiting[address] >= AT_ONCE
                self._waiting[address] += not full
            if full:
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection, address), name="guest", daemon=True).start()

    def _answer(self, connection: socket.socket, address: str) -> None:
        known = False
        with suppress(OSError, Forged):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end, channel = answer(connection, self.key, self.host, self.hosts, time.monotonic() + PROOF)
            with self._news:
                if known := self._open and end.line < len(LINES):
                    self.channels[end.source, end.line] = channel  # of two the last: the first was given up
                    channel.send(memoryview(b""))
        with self._news:
            self._waiting[address] -= 1
            self.refused += not known
            self._news.notify_all()
        if not known:
            connection.close()

    def wait(self, lines: range, until: float) -> dict[tuple[int, int], Channel]:
        """The channels, when all hosts after this one have connected on these lines. Raises LostHost."""
        wanted = {(host, line) for host in range(self.host + 1, self.hosts) for line in lines}
        with self._news:
            if self._news.wait_for(lambda: wanted <= self.channels.keys(), max(0.0, until - time.monotonic())):
                return dict(self.channels)
            host = min(wanted - self.channels.keys())[0]
            others = f"; {self.refused} connections without the secret were refused" if self.refused else ""
        raise LostHost(f"host {host} has not connected to port {self.port} within {MEETING:.0f} s{others}")

    def close(self) -> None:
        self._open = False
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listening.close()


def _listen(at: Address) -> socket.socket:
    """Opens a port: on the address, if it is given as a number, else on all addresses of this machine. Raises
    OSError.
    """
    name = "127.0.0.1" if at.name == "localhost" else at.name
    if is_number(name):
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        try:
            return socket.create_server((name, at.port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # not of this machine: translated on the way
                raise
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", at.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", at.port), backlog=1024)


def is_number(name: str) -> bool:
    """Whether a host is named by its address."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def meet(host: int, hosts: int, key: bytes, at: Address, say: Say = silent) -> Lines:
    """Connections to all other hosts. `at`: host 0's; `say`: called with what seems wrong while this waits.

    Raises LostHost, InputError.
    """
    until, control = time.monotonic() + MEETING, LINES.index("control")
    reach = lambda other, where, line: _reach(where, key, End(hosts, host, other, line), until, say)
    found: dict[tuple[int, int], Channel] = {}
    if host:
        found[0, control] = reach(0, at, control)
    own = _own(found[0, control].socket, at) if host else at
    try:
        door = Door(host, hosts, key, own)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise InputError(f"port {own.port} of {shown(own.name)}: {why}. Take another MASTER_PORT.") from None
    try:
        try:
            table = _tell(door, until) if not host else _ask(found[0, control], own._replace(port=door.port), hosts)
        except (OSError, Forged) as error:
            raise LostHost(f"another host has ended while hosts met: {error}") from error
        for other in range(host):
            where = at if not other else Address(table[other].name or at.name, table[other].port)
            for line in range(len(LINES)):
                if (other, line) not in found:
                    found[other, line] = reach(other, where, line)
        found |= door.wait(range(len(LINES)), until)
    finally:
        door.close()
    return {name: {h: found[h, i] for h in range(hosts) if h != host} for i, name in enumerate(LINES)}


def _own(connection: socket.socket, at: Address) -> Address:
    """Where this host listens: its address towards host 0; "" stands for all addresses of this machine."""
    name = connection.getsockname()[0].removeprefix("::ffff:")
    here = ipaddress.ip_address(name.partition("%")[0]).is_loopback
    return Address("" if here and not (is_number(at.name) or at.name == "localhost") else name, 0)


def _reach(where: Address, key: bytes, end: End, until: float, say: Say) -> Channel:
    """Connects to a host, which may not be there yet. Raises LostHost, InputError where it has another secret."""
    why, place, strange = "no time is left", f"host {end.target} at {shown(where.name)}, port {where.port}", 0.0
    while time.monotonic() < until:
        connection, began = None, time.monotonic()
        try:
            connection = socket.create_connection(where, timeout=PROOF)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return greet(connection, key, end, min(until, time.monotonic() + PROOF))
        except Forged as error:
            raise InputError(
                f"{place}: {error}. Copy host 0's to all hosts: ~/.config/trireme/hosts.secret. If another program "
                "answers there, take another MASTER_PORT."
            ) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
            why = getattr(error, "strerror", None) or str(error)
            time.sleep(AGAIN)
            if connection is not None:
                connection.close()
                before, strange = strange, strange + time.monotonic() - began
                if before < STRANGE <= strange:
                    say(
                        f"{place}: what takes connections there does not answer as a host of this run ({why}). If it "
                        "is another program, take another MASTER_PORT"
                    )
    raise LostHost(f"{place} does not answer: {why}")


def _tell(door: Door, until: float) -> list[Address]:
    """On host 0: receives where each host listens, and sends the list to all."""
    control = LINES.index("control")
    door.wait(range(control, control + 1), until)
    table = [Address("", 0)]
    for host in range(1, door.hosts):
        channel = door.channels[host, control]
        channel.socket.settimeout(max(1e-3, until - time.monotonic()))
        table.append(address_of(_received(channel), host))
    for host in range(1, door.hosts):
        channel = door.channels[host, control]
        for each in table:
            _say(channel, each)
        channel.socket.settimeout(None)
    return table


def _ask(channel: Channel, own: Address, hosts: int) -> list[Address]:
    """On the other hosts: sends where this one listens, and receives the list."""
    channel.socket.settimeout(MEETING)
    _say(channel, own)
    found = [address_of(_received(channel), host) for host in range(hosts)]
    channel.socket.settimeout(None)
    return found


def _say(channel: Channel, where: Address) -> None:
    """Sends an address."""
    channel.send(memoryview(json.dumps(where._asdict()).encode().ljust(TABLE)))


def _received(channel: Channel) -> bytes:
    """Receives an address as text."""
    found = bytearray(TABLE)
    channel.receive(memoryview(found))
    return bytes(found)


def address_of(text: bytes, host: int) -> Address:
    """The address that a host has sent. Raises Forged."""
    try:
        found = parse_json(text, "address")
        wrong = complaint(found, WHERE)
    except ValueError as error:
        wrong = f": {error}"
    if wrong:
        raise Forged(f"the address of host {host}{wrong}")
    at = Address(**found)
    if at.port >> 16 or (at.name and not is_number(at.name)):
        raise Forged(f"the address of host {host} is {shown(repr(at.name))}, port {at.port}")
    return at
