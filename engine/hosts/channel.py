"""Authenticated connections between hosts.

Before anything else is read, both ends prove that they know the secret, over random numbers of both (as in ISO/IEC
9798-4). Each direction then has a key of its own. A frame is its length (8 bytes), its content, and the HMAC-SHA256
(RFC 2104) of its number, length and content. So a frame that was changed, repeated, left out, moved or sent back is
noticed, and nothing in it is used. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

MAGIC = b"trireme1"
HELLO = struct.Struct(">8sIIII32s")  # MAGIC, hosts, source, target, line, random
NONCE = TAG = 32  # bytes
HEAD = struct.Struct(">Q")  # bytes of a frame's content
BLOCK = 1 << 20  # bytes hashed and sent at once: the kernel sends one while the next is hashed
FEW = 1 << 16  # bytes sent at once, with head and tag


class Forged(Exception):
    """Bytes that no host of this run has sent, or that were changed on the way."""


class End(NamedTuple):
    """What a connection is for: which hosts, and which `line` of several between them."""

    hosts: int
    source: int  # connects
    target: int  # was connected to
    line: int


class _Sealer:
    """Makes the authentication tags of one direction's frames, in order."""

    def __init__(self, key: bytes):
        self._mac, self._number = hmac.new(key, digestmod="sha256"), 0

    def next(self, head: bytes) -> hmac.HMAC:
        """The HMAC of the next frame, begun with its number and `head`."""
        mac = self._mac.copy()
        mac.update(HEAD.pack(self._number) + head)
        self._number += 1
        return mac


class Channel:
    """A connection after both ends have proven that they know the secret. One thread may send while another
    receives.
    """

    def __init__(self, connection: socket.socket, outward: bytes, inward: bytes):
        """`outward`, `inward`: the keys of the two directions."""
        self.socket, self._out, self._in = connection, _Sealer(outward), _Sealer(inward)

    def send(self, content: memoryview) -> None:
        """Sends a frame. Raises OSError."""
        if content.nbytes <= FEW:
            self.socket.sendall(self.sealed(bytes(content)))
            return
        head = HEAD.pack(content.nbytes)
        mac = self._out.next(head)
        self.socket.sendall(head)
        for a in range(0, content.nbytes, BLOCK):
            mac.update(content[a : a + BLOCK])
            self.socket.sendall(content[a : a + BLOCK])
        self.socket.sendall(mac.digest())

    def receive(self, into: memoryview) -> None:
        """Receives a frame of the size of `into`. Its content may be used only if this returns. Raises OSError,
        Forged.
        """
        head = read(self.socket, HEAD.size)
        if HEAD.unpack(head)[0] != into.nbytes:
            raise Forged(f"{HEAD.unpack(head)[0]} bytes came, expected {into.nbytes}")
        mac = self._in.next(head)
        for a in range(0, into.nbytes, BLOCK):
            read_into(self.socket, into[a : a + BLOCK])
            mac.update(into[a : a + BLOCK])
        _check(mac, read(self.socket, TAG))

    def sealed(self, content: bytes) -> bytes:
        """The bytes of the next frame to send."""
        head = HEAD.pack(len(content))
        mac = self._out.next(head)
        mac.update(content)
        return head + content + mac.digest()

    def opened(self, came: bytearray, most: int) -> bytes | None:
        """Takes the next frame out of the bytes `came` and returns its content; None if it is not complete. Raises
        Forged.
        """
        if len(came) < HEAD.size:
            return None
        head = bytes(came[: HEAD.size])
        (n,) = HEAD.unpack(head)
        if n > most:
            raise Forged(f"{n} bytes came, expected at most {most}")
        if len(came) < (whole := HEAD.size + n + TAG):
            return None
        content, tag = bytes(came[HEAD.size : whole - TAG]), bytes(came[whole - TAG : whole])
        mac = self._in.next(head)
        mac.update(content)
        _check(mac, tag)
        del came[:whole]
        return content

    def close(self) -> None:
        """Closes the connection, which wakes the threads that wait for it at both ends. Raises OSError if it has
        ended.
        """
        self.socket.shutdown(socket.SHUT_RDWR)


def _check(mac: hmac.HMAC, tag: bytes) -> None:
    """Raises Forged if a frame's tag is wrong."""
    if not hmac.compare_digest(mac.digest(), tag):
        raise Forged("a frame is not as a host of this run sent it")


def read_into(connection: socket.socket, into: memoryview, end: float | None = None) -> None:
    """Fills a buffer, until time.monotonic() is `end`. Raises OSError, also if the connection ends."""
    while into.nbytes:
        if end is not None:
            connection.settimeout(max(1e-3, end - time.monotonic()))
        n = connection.recv_into(into)
        if not n:
            raise ConnectionResetError("the connection has ended")
        into = into[n:]


def read(connection: socket.socket, n: int, end: float | None = None) -> bytes:
    """Reads `n` bytes, as `read_into`."""
    found = bytearray(n)
    read_into(connection, memoryview(found), end)
    return bytes(found)


def _derived(key: bytes, label: bytes, said: bytes) -> bytes:
    return hmac.digest(key, label + b"\n" + said, "sha256")


def greet(connection: socket.socket, key: bytes, end: End, until: float) -> Channel:
    """Opens a channel on the host that has connected; returns when the other host has its channel, too.

    Raises OSError; Forged if the other host does not know the secret.
    """
    hello = HELLO.pack(MAGIC, *end, secrets.token_bytes(NONCE))
    connection.settimeout(max(1e-3, until - time.monotonic()))
    connection.sendall(hello)
    said = hello + read(connection, NONCE, until)
    proof = read(connection, TAG, until)
    if not hmac.compare_digest(proof, _derived(key, b"target", said)):
        raise Forged("its secret differs")
    connection.sendall(_derived(key, b"source", said))
    channel = _channel(connection, key, said, b"to target", b"to source")
    connection.settimeout(max(1e-3, until - time.monotonic()))
    channel.receive(memoryview(b""))
    connection.settimeout(None)
    return channel


def answer(connection: socket.socket, key: bytes, host: int, hosts: int, until: float) -> tuple[End, Channel]:
    """Opens a channel on the host that was connected to, and sends an empty frame.

    Raises OSError; Forged if the other host is not one of this run.
    """
    connection.settimeout(max(1e-3, until - time.monotonic()))
    hello = read(connection, HELLO.size, until)
    magic, *numbers, _ = HELLO.unpack(hello)
    end = End(*numbers)
    if magic != MAGIC or (end.hosts, end.target) != (hosts, host) or not host < end.source < hosts:
        raise Forged("a greeting of another program, or for another host")
    said = hello + secrets.token_bytes(NONCE)
    connection.sendall(said[HELLO.size :] + _derived(key, b"target", said))
    if not hmac.compare_digest(read(connection, TAG, until), _derived(key, b"source", said)):
        raise Forged("its secret differs")
    return end, _channel(connection, key, said, b"to source", b"to target")


def _channel(connection: socket.socket, key: bytes, said: bytes, outward: bytes, inward: bytes) -> Channel:
    connection.settimeout(None)
    return Channel(connection, _derived(key, outward, said), _derived(key, inward, said))
