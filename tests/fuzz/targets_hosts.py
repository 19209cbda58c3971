"""What another host, or a stranger at its place, may send: texts that are authentic, and bytes that need not be."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mutations import Target, as_json

from trireme.engine.hosts import channel, watch
from trireme.engine.hosts.channel import Channel, Forged
from trireme.engine.hosts.group import Group
from trireme.engine.hosts.held import Held, last_whole
from trireme.engine.hosts.meeting import address_of
from trireme.engine.plan import Plan, UnitPlan
from trireme.engine.run.job import common_plan
from trireme.models.config import InputError
from trireme.storage.snapshots import Snapshot

KEY = bytes(32)


def hosts(folder: Path) -> Target:
    """What another host says of the snapshots that it sees, of its options, its plan and its last snapshot."""
    plan = Plan((UnitPlan("host", "host"), UnitPlan("host", "ssd"), UnitPlan("host", "host")), 24, 2, "F32", hosts=2)
    key = [4, 2, "0" * 16]
    seen = {"begun": True, "held": [[0, *key], [1, *key], [1, 2, *key[1:]]]}
    own = Held(0, [], Snapshot(1, 4, {"cut": {"plan": {"hosts": 2, "host": 0}}, "data": "x"}, {}, {}))

    def read(content: bytes) -> None:
        group = _says(content.decode(errors="surrogateescape"))
        for hear in (
            lambda: last_whole(group, [own], True, folder),
            lambda: group.agree("options", {"--lr": "1"}, "Be alike"),
            lambda: common_plan(group, plan),
        ):
            with suppress(InputError):
                hear()

    return Target([seen, asdict(plan), {"--lr": "0" * 64}], as_json, read)


def _says(text: str) -> Group:
    """Two hosts that both say this."""
    group = object.__new__(Group)
    group.host, group.hosts, group.texts = 0, 2, lambda own: [text, text]
    return group


def hosts_address(folder: Path) -> Target:
    """Where another host says that it listens. What is taken can be connected to, or not be there."""

    def read(content: bytes) -> None:
        at = address_of(content.ljust(9), 1)
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in at.name else socket.AF_INET) as there:
            there.setblocking(False)
            there.connect(("127.0.0.1", at.port) if at.name else (at.name, at.port))

    return Target([{"name": "10.0.0.2", "port": 40000}, {"name": "", "port": 1}], as_json, read, (Forged,))


def hosts_connection(folder: Path) -> Target:
    """A greeting and three frames as bytes, changed in transit. Nothing but what was sent is ever believed."""
    frames = (b"", b"a text", bytes(range(256)) * 300)
    channel.secrets = SimpleNamespace(token_bytes=bytes)  # the same greeting every time
    hello = channel.HELLO.pack(channel.MAGIC, 2, 1, 0, 4, bytes(32))
    said = hello + bytes(32)
    proof = channel._derived(KEY, b"source", said)
    out = Channel(None, channel._derived(KEY, b"to target", said), b"")
    good = [hello, proof, *(out.sealed(frame) for frame in frames)]

    def read(content: bytes) -> None:
        there, here = socket.socketpair()
        with there, here:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            there.setblocking(False)
            there.send(content)
            there.shutdown(socket.SHUT_WR)
            end, found = channel.answer(here, KEY, 0, 2, time.monotonic() + 5)
            assert end == (2, 1, 0, 4), "another end"
            for frame in frames:
                into = bytearray(len(frame))
                found.receive(memoryview(into))
                assert into == frame, "believed what was not sent"

    read(_joined(good))
    return Target([good], _joined, read, (OSError, Forged))


def _joined(value: Any) -> bytes:
    """Bytes of lists of whatever."""
    if isinstance(value, list):
        return b"".join(map(_joined, value))
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


def hosts_signs(folder: Path) -> Target:
    """Signs of another host, authentic ones and others."""

    def read(content: bytes) -> None:
        authentic, _, others = content.partition(b"\x1e")
        there, here = socket.socketpair()
        with there, here:
            there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            found = object.__new__(watch.Watch)
            found.names, found.host, found.suspicious, found._told, found.why = ["host 0", "host 1"], 0, False, "", ""
            found._signs, found._silent = {1: watch.Signs(Channel(here, KEY, KEY))}, {1: 0.0}
            there.setblocking(False)
            there.send(Channel(there, KEY, KEY).sealed(authentic) + others)
            for why in (found._heard(), found._heard()):
                assert len(why) < 2 * watch.LONGEST

    signs = [watch.LIVES, watch.OVER, watch.END + b"host 1: the disk is full"]
    return Target([[*signs, b"\x1e"], [signs[2], b"\x1e", bytes(80)]], _joined, read)


HOSTS = {made.__name__: made for made in (hosts, hosts_address, hosts_connection, hosts_signs)}
