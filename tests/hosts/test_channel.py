"""Connections between hosts: who knows the secret is answered, and only what it sent is believed."""

import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from runs import free_port

from trireme.engine.hosts import meeting, secret
from trireme.engine.hosts.channel import HELLO, MAGIC, Channel, End, Forged, answer, greet
from trireme.engine.hosts.meeting import Address, Door, address_of, meet
from trireme.engine.hosts.watch import LostHost
from trireme.models.config import InputError

KEY, OTHER = b"k" * 32, b"o" * 32
END = End(2, 1, 0, 3)


def met(source: bytes, target: bytes, end=END):
    """What greet and answer give, or raise, with these secrets."""
    there, here = socket.socketpair()
    until = time.monotonic() + 10

    def answered():
        try:
            found, channel = answer(here, target, 0, 2, until)
        except BaseException:
            here.close()
            raise
        channel.send(memoryview(b""))
        return found, channel

    def asked():
        try:
            return greet(there, source, end, until)
        except BaseException:
            there.close()
            raise

    with ThreadPoolExecutor(2) as pool:
        asking, answering = pool.submit(asked), pool.submit(answered)
        return asking, answering


@pytest.fixture
def pair():
    """Two ends of a connection."""
    asking, answering = met(KEY, KEY)
    assert answering.result()[0] == END
    return asking.result(), answering.result()[1]


@pytest.mark.parametrize("n", [0, 1, 1 << 16, (1 << 16) + 1, 3_000_000])
def test_frames_go_both_ways(pair, n):
    content = os.urandom(n)
    for there, here in (pair, pair[::-1]):
        into = bytearray(n)
        sending = threading.Thread(target=there.send, args=(memoryview(content),))
        sending.start()
        here.receive(memoryview(into))
        sending.join()
        assert into == content


def test_another_secret_is_refused_by_both_ends():
    asking, answering = met(OTHER, KEY)
    with pytest.raises(Forged, match="it has another secret"):
        asking.result()
    with pytest.raises((Forged, OSError)):
        answering.result()


@pytest.mark.parametrize("end", [End(3, 1, 0, 0), End(2, 0, 0, 0), End(2, 2, 0, 0), End(2, 1, 1, 0)])
def test_a_greeting_for_another_host_is_refused(end):
    _, answering = met(KEY, KEY, end)
    with pytest.raises(Forged, match="for another host"):
        answering.result()


def test_what_was_recorded_is_not_taken_again():
    """The target's random number is another."""
    there, here = socket.socketpair()
    said = HELLO.pack(MAGIC, 2, 1, 0, 3, bytes(32))
    there.sendall(said + bytes(32))
    with pytest.raises(Forged, match="another secret"):
        answer(here, KEY, 0, 2, time.monotonic() + 10)


def flip(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


@pytest.mark.parametrize(
    "changed",
    [
        lambda a, b: flip(a, 7),
        lambda a, b: flip(a, 8),
        lambda a, b: flip(a, len(a) - 1),
        lambda a, b: b,  # out of order, or the first left out
        lambda a, b: a[:8] + b[8:],
        lambda a, b: a[8:],
    ],
)
def test_what_was_changed_on_its_way_is_not_believed(changed):
    there, here = socket.socketpair()
    out, came = Channel(there, KEY, OTHER), Channel(here, OTHER, KEY)
    there.sendall(changed(out.sealed(b"first"), out.sealed(b"other")))
    there.close()
    with pytest.raises((Forged, OSError)):
        came.receive(memoryview(bytearray(5)))


def test_a_frame_is_taken_once_and_only_from_the_other_end():
    there, here = socket.socketpair()
    out, came = Channel(there, KEY, OTHER), Channel(here, OTHER, KEY)
    frame = out.sealed(b"first")
    there.sendall(frame + frame + Channel(None, OTHER, KEY).sealed(b"first"))
    came.receive(memoryview(bytearray(5)))
    for _ in ("again", "sent back"):
        with pytest.raises(Forged):
            came.receive(memoryview(bytearray(5)))


def test_short_messages_are_taken_as_they_come():
    out, came, buffer = Channel(None, KEY, OTHER), Channel(None, OTHER, KEY), bytearray()
    found = []
    for byte in out.sealed(b"one") + out.sealed(b"") + out.sealed(b"two"):
        buffer.append(byte)
        found += [each for each in [came.opened(buffer, 10)] if each is not None]
    assert found == [b"one", b"", b"two"]
    buffer += out.sealed(b"x" * 11)
    with pytest.raises(Forged, match="11 bytes came, expected at most 10"):
        came.opened(buffer, 10)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"name": "10.0.0.1"}',
        b'{"name": "10.0.0.1", "port": 65536}',
        b'{"name": "10.0.0.1", "port": -1}',
        b'{"name": "10.0.0.1", "port": 1.5}',
        b'{"name": "a.b", "port": 1}',
        b'{"name": "\\u0000", "port": 1}',
    ],
)
def test_an_address_is_a_number_and_a_port(text):
    with pytest.raises(Forged, match="the address of host 1"):
        address_of(text, 1)


def stranger(port: int, left: threading.Event, enough: threading.Event) -> None:
    """Says all kinds of things at a port, until `left`; `enough`: each of them."""
    tried, held = 0, []
    says = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), HELLO.pack(MAGIC, 3, 1, 0, 3, bytes(32)) + bytes(32)]
    says += [HELLO.pack(MAGIC, 3, 2, 0, 0, bytes(32)), bytes(1 << 16)]
    while not left.is_set():
        try:
            held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            held[-1].sendall(says[tried % len(says)])
            tried += 1
            time.sleep(0.005)
        except OSError:
            time.sleep(0.01)
        if tried > 2 * len(says):
            enough.set()
        if len(held) > 20:
            held.pop(0).close()
    for each in held:
        each.close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_hosts_meet_though_a_stranger_talks_and_leave_no_port_open(name):
    port, left, enough = free_port(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(meet, 0, 3, KEY, Address(name, port))
        speaks = pool.submit(stranger, port, left, enough)
        try:
            assert enough.wait(60)
            others = [pool.submit(meet, host, 3, KEY, Address(name, port)) for host in (1, 2)]
            lines = [found.result(60) for found in (first, *others)]
        finally:
            left.set()
        speaks.result()
    for a, b in ((0, 1), (0, 2), (2, 1)):
        for line in meeting.LINES:
            into = bytearray(4)
            lines[a][line][b].send(memoryview(b"text"))
            lines[b][line][a].receive(memoryview(into))
            assert into == b"text"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_who_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(meeting, "MEETING", 0.3)
    port = free_port()
    with pytest.raises(LostHost, match=f"host 1 has not connected to port {port} within 0 s"):
        meet(0, 2, KEY, Address("127.0.0.1", port))
    with pytest.raises(LostHost, match=f"host 0 at 127.0.0.1, port {port} does not answer: Connection refused"):
        meet(1, 2, KEY, Address("127.0.0.1", port))
    with pytest.raises(LostHost, match="host 0 at x.*x, port .* does not answer: "):
        meet(1, 2, KEY, Address("x" * 64, port))


def test_a_host_with_another_secret_says_so_and_the_other_waits_for_a_better():
    port = free_port()
    door = Door(0, 2, KEY, Address("127.0.0.1", port))
    with pytest.raises(InputError, match=f"host 0 at 127.0.0.1, port {port}: it has another secret. Copy host 0's"):
        meet(1, 2, OTHER, Address("127.0.0.1", port))
    with pytest.raises(LostHost, match="host 1 has not connected"):
        door.wait(range(1), 0.0)
    door.close()


@pytest.mark.parametrize("closes", [True, False])
def test_another_program_at_the_port_is_named_while_a_host_waits(closes, monkeypatch):
    for name, seconds in (("MEETING", 0.4), ("STRANGE", 0.1), ("PROOF", 0.1), ("AGAIN", 0.01)):
        monkeypatch.setattr(meeting, name, seconds)
    said, taken = [], []
    with socket.create_server(("127.0.0.1", 0)) as other:

        def take():
            with suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    taken.append(connection)
                    if closes:
                        connection.close()

        threading.Thread(target=take, daemon=True).start()
        at = Address("127.0.0.1", other.getsockname()[1])
        with pytest.raises(LostHost, match=f"host 0 at 127.0.0.1, port {at.port} does not answer"):
            meet(1, 2, KEY, at, said.append)
        other.shutdown(socket.SHUT_RDWR)
    (line,) = said
    assert line.startswith(f"host 0 at 127.0.0.1, port {at.port}: what takes connections there does not answer as")


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1: Address already in use. Take another"):
            meet(0, 2, KEY, Address("127.0.0.1", port))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_the_first_host_makes_a_secret_that_only_its_user_reads(home, monkeypatch):
    monkeypatch.setattr(secret, "PATIENCE", 0.0)
    with pytest.raises(InputError, match="the hosts' secret is not here. Copy host 0's .*/trireme/hosts.secret to"):
        secret.shared_secret(1)
    made = secret.shared_secret(0)
    path = home / "trireme" / "hosts.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [len(made), secret.shared_secret(1), secret.shared_secret(0)] == [32, made, made]
    assert list(path.parent.iterdir()) == [path]
    path.write_text("another secret, long enough to be one\n")
    assert secret.shared_secret(0) != made


@pytest.mark.parametrize(("content", "mode", "wrong"), [
    ("x" * 64, 0o640, "can be read or written by others"),
    ("x" * 31, 0o600, "has 31 characters, expected 32 or more"),
    ("x" * 5000, 0o600, "has more than 4096 bytes"),
])  # fmt: skip
def test_a_secret_that_is_none_is_refused(home, content, mode, wrong):
    path = home / "trireme" / "hosts.secret"
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(InputError, match=wrong):
        secret.shared_secret(0)


def test_a_home_that_cannot_be_written_is_one_line(home):
    (home / "trireme").write_text("a file")
    with pytest.raises(InputError, match="hosts.secret: Not a directory. It holds the hosts' secret"):
        secret.shared_secret(0)
