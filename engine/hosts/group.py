"""The hosts of a run, one process each, started with the environment of torchrun; and how they agree on values."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from trireme.engine.plan import MOST_HOSTS
from trireme.models.config import InputError
from trireme.storage.untrusted import Shape, complaint, parse_json, shown

if TYPE_CHECKING:
    from torch import Tensor

    from trireme.engine.hosts.wire import Wire

FEW = 64 << 20  # bytes that time the network
LONGEST = 256 << 20  # bytes of a text
MOST_PORT = (1 << 16) - 1  # of MASTER_PORT: the next may be needed, too
ADDRESS = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # in the environment, as in Place


class Place(NamedTuple):
    """Which of a run's processes this one is."""

    host: int = 0
    hosts: int = 1
    local: int = 0  # among those of this machine
    local_hosts: int = 1  # on this machine


def place() -> Place:
    """Reads the environment of torchrun; without it this process is alone. Raises InputError."""
    said = {name: os.environ.get(name, str(usual)) for name, usual in zip(NAMES, Place(), strict=True)}
    if said["WORLD_SIZE"] in ("0", "1"):
        return Place()
    for name, text in said.items():
        if not re.fullmatch("[0-9]{1,18}", text):
            _refuse(name, text, "a whole number")
    found = Place(*map(int, said.values()))
    if found.hosts > MOST_HOSTS:
        _refuse("WORLD_SIZE", said["WORLD_SIZE"], f"at most {MOST_HOSTS}")
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        if int(said[name]) >= int(said[of]) + (name == "LOCAL_WORLD_SIZE"):
            _refuse(name, said[name], f"a number for {of} {said[of]}")
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not ADDRESS.fullmatch(address):
        _refuse("MASTER_ADDR", address, "the name or the address of host 0")
    if not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < MOST_PORT):
        _refuse("MASTER_PORT", port, f"a port, 1 to {MOST_PORT - 1}")
    return found


def _refuse(name: str, text: str, expected: str) -> NoReturn:
    is_what = f"is {shown(repr(text))}" if text else "is not set"
    raise InputError(f"{name} of the environment {is_what}; expected {expected}. Set it as torchrun does, or unset it.")


def told(text: str, shape: Shape, host: int) -> Any:
    """Parses a JSON object of this shape that a host has sent. Raises InputError."""
    try:
        found = parse_json(text.encode(errors="surrogatepass"), "text")
        wrong = complaint(found, shape)
    except ValueError as error:
        wrong = f": {error}"
    if wrong:
        refuse_text(host, wrong)
    return found


def refuse_text(host: int, wrong: str) -> NoReturn:
    """Raises InputError about what a host has sent."""
    raise InputError(f"host {host} sent what this version does not expect{wrong}. Start the same version on all hosts.")


class LostHost(Exception):
    """Another host has ended, or does not answer. The message is the run's reason to end, the same on all hosts."""


class Alone:
    """A run on one host: the methods of Group without other hosts."""

    host, hosts, local_hosts = 0, 1, 1
    wire: Wire | None = None

    @property
    def waits(self) -> bool:
        """Whether the run's own thread waits for another host now. Heartbeats watch it, not the watchdog."""
        return self.wire is not None and self.wire.waits

    def texts(self, text: str) -> list[str]:
        """The text that each host gives."""
        return [text]

    def numbers(self, own: Sequence[float], most: int, least: int = 0) -> list[float]:
        """The numbers of all hosts, in order. Each host gives `least` to `most` of them."""
        assert least <= len(own) <= most
        return list(own)

    def each(self, own: float) -> list[float]:
        """One finite number of each host."""
        found = self.numbers([own], 1, 1)
        for host, n in enumerate(found):
            if not math.isfinite(n):
                refuse_text(host, f": {n:g}")
        return found

    def any(self, asked: bool) -> bool:
        """Whether the answer of any host is yes."""
        return any(self.each(asked))

    def first(self, answer: bool) -> bool:
        """The answer of host 0. It decides about time, since clocks differ."""
        return bool(self.each(answer)[0])

    def meet(self) -> None:
        """Returns when all hosts have called it."""
        self.numbers([], 1)

    def agree(self, what: str, said: Mapping[str, object], way: str) -> None:
        """Raises InputError if a host's `said` (values as JSON) differs from that of host 0. `way`: what the user can
        do.
        """

    def tell(self, why: str) -> None:
        """Ends all other hosts, because this one is about to end and its cleanup may wait for them."""

    def failed(self, error: BaseException) -> None:
        """As `tell`, for an error, unless all know already."""
        if not isinstance(error, LostHost):
            self.tell(_reason(error))


class Group(Alone):
    """Several hosts. All methods raise LostHost."""

    def __init__(self, at: Place, late: Callable[[str], object]):
        """Returns once all are here. `late`: as of Wire."""
        from trireme.engine.hosts.wire import Wire  # late: torch takes seconds

        self.host, self.hosts, self.local_hosts, self.wire = *at[:2], at.local_hosts, Wire(late)

    def texts(self, text: str) -> list[str]:
        import torch

        own = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
        sizes = self.each(len(own))
        for host, n in enumerate(sizes):
            if not 1 <= n <= LONGEST:
                refuse_text(host, f": a text of {n:g} bytes")
        found = self._gathered(torch.cat([own, own.new_zeros(int(max(sizes)) - len(own))]))
        return [
            bytes(each[: int(n) - 1].numpy()).decode(errors="replace") for each, n in zip(found, sizes, strict=True)
        ]

    def numbers(self, own: Sequence[float], most: int, least: int = 0) -> list[float]:
        import torch

        assert least <= len(own) <= most
        padded = torch.zeros(1 + most, dtype=torch.float64)
        padded[: 1 + len(own)] = torch.tensor([float(len(own)), *own], dtype=torch.float64)
        found = [each.tolist() for each in self._gathered(padded)]
        for host, (n, *_) in enumerate(found):
            if n not in range(least, 1 + most):
                refuse_text(host, f": {n:g} numbers, expected {least} to {most}")
        return [x for n, *numbers in found for x in numbers[: int(n)]]

    def agree(self, what: str, said: Mapping[str, object], way: str) -> None:
        hashes = {key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in said.items()}
        each = [told(text, {str: str}, host) for host, text in enumerate(self.texts(json.dumps(hashes)))]
        for host, theirs in enumerate(each):
            if theirs != each[0]:
                keys = [key for key in {**each[0], **theirs} if each[0].get(key) != theirs.get(key)]
                raise InputError(f"host {host} was started with other {what} than host 0: {', '.join(keys)}. {way}.")

    def _gathered(self, own: Tensor) -> list[Tensor]:
        import torch

        assert self.wire is not None
        found = [own if host == self.host else torch.empty_like(own) for host in range(self.hosts)]
        with self.wire.waiting():
            self.wire.gather("control", found)
        return found

    def speed(self) -> float:
        """Bytes/s from each host to the next, all at once; those of the slowest."""
        import torch

        assert self.wire is not None
        block = torch.zeros(FEW, dtype=torch.uint8)
        seconds = []
        for _ in range(2):  # the first opens connections
            self.meet()
            begun = time.monotonic()
            self.wire.exchange("net", (self.host + 1) % self.hosts, (self.host - 1) % self.hosts, block)
            seconds.append(time.monotonic() - begun)
        return FEW / max(1e-9, *self.each(seconds[1]))

    def tell(self, why: str) -> None:
        assert self.wire is not None
        self.wire.tell(f"host {self.host}: {why}")
        self.wire.cut()


@contextmanager
def joined(at: Place, late: Callable[[str], object]) -> Iterator[Alone]:
    """The hosts, while this one takes part; an exception within ends all."""
    if at.hosts == 1:
        yield Alone()
        return
    group = Group(at, late)
    assert group.wire is not None
    try:
        yield group
    except BaseException as error:
        group.failed(error)
        raise
    finally:
        group.wire.close()


def _reason(error: BaseException) -> str:
    """An error as other hosts report it."""
    where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return where or str(error) or type(error).__name__
