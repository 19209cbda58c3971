"""The hosts of a run: a process each, started by torchrun, and what they agree on."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from trireme.engine.hosts.watch import END, LostHost, Watch, beat
from trireme.models.config import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from trireme.engine.hosts.wire import Wire

NEVER = timedelta(days=30)  # gloo's own timeouts name nobody; watch.py does
MEETING = timedelta(minutes=5)  # for all hosts that torchrun has started to be here
FEW = 64 << 20  # bytes that time the network


class Place(NamedTuple):
    """This process among those that torchrun started."""

    host: int = 0
    hosts: int = 1
    local: int = 0  # among those of this machine
    beside: int = 1  # on this machine


def place() -> Place:
    """From torchrun's environment; alone without one. Raises InputError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        found = Place(*(int(os.environ.get(name, str(usual))) for name, usual in zip(names, Place(), strict=True)))
    except ValueError:
        raise InputError(f"{', '.join(names)} of the environment are no numbers. Start with torchrun.") from None
    if found.hosts < 2:
        return Place()
    if not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT", "").isdecimal()):
        raise InputError(
            f"WORLD_SIZE of the environment is {found.hosts}, MASTER_ADDR and MASTER_PORT do not say where to meet. "
            "Start with torchrun, or unset WORLD_SIZE."
        )
    return found


class Alone:
    """A run on one host."""

    host, hosts, beside = 0, 1, 1
    wire: Wire | None = None

    def texts(self, text: str) -> list[str]:
        """What each host gives."""
        return [text]

    def numbers(self, own: Sequence[float], most: int) -> list[float]:
        """Those of all hosts in order, at most `most` of each."""
        assert len(own) <= most
        return list(own)

    def any(self, asked: bool) -> bool:
        """Whether a host says yes."""
        return any(self.numbers([asked], 1))

    def first(self, answer: bool) -> bool:
        """Host 0's answer: clocks differ."""
        return bool(self.numbers([answer], 1)[0])

    def meet(self) -> None:
        """Returns once all hosts are here."""
        self.numbers([], 1)

    def agree(self, what: str, said: Mapping[str, object], way: str) -> None:
        """Raises InputError where a host's `said`, values as JSON, is not host 0's; `way` out."""

    def tell(self, why: str) -> None:
        """Has all hosts end, as this one is about to: what unwinds it may wait for them."""

    def failed(self, error: BaseException) -> None:
        """As tell, of an error, unless another host is to blame."""
        if not (isinstance(error, LostHost) and self.judgement()):
            self.tell(_reason(error))

    def judgement(self) -> str:
        """Why the run ends, once a connection has broken."""
        return ""


class Group(Alone):
    """Several hosts. Methods raise LostHost."""

    def __init__(self, at: Place, late: Callable[[str], object]):
        """Returns once all are here. `late(why)`: called where the run must end and main does not."""
        import torch.distributed as dist

        from trireme.engine.hosts.wire import LINES, Wire, answered

        self.host, self.hosts, self.beside = at.host, at.hosts, at.beside
        with answered():
            dist.init_process_group("gloo", timeout=MEETING)
            every = list(range(at.hosts))
            groups = {line: dist.new_group(every, timeout=NEVER) for line in (*LINES, "control")}
        self._control = groups["control"]
        self.wire = Wire(at.host, groups)
        client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore("trireme", client)
        names = self.texts(socket.gethostname())
        if not at.host:
            store.set(END, "")  # a missing key would be waited for, one of before a restart by torchrun end this run
        store.set(beat(at.host), "0")
        self.meet()
        titles = [f"host {h}" + f" ({name})" * (len(set(names)) > 1) for h, name in enumerate(names)]
        self.watch = Watch(at.host, titles, store, late)

    def texts(self, text: str) -> list[str]:
        import torch

        own = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
        sizes = [int(n) for n in self.numbers([len(own)], 1)]
        found = self._gathered(torch.cat([own, own.new_zeros(max(sizes) - len(own))]))
        return [bytes(each[: n - 1].numpy()).decode() for each, n in zip(found, sizes, strict=True)]

    def numbers(self, own: Sequence[float], most: int) -> list[float]:
        import torch

        assert len(own) <= most
        padded = torch.zeros(1 + most, dtype=torch.float64)
        padded[: 1 + len(own)] = torch.tensor([float(len(own)), *own], dtype=torch.float64)
        return [x for each in self._gathered(padded) for x in each[1 : 1 + int(each[0])].tolist()]

    def agree(self, what: str, said: Mapping[str, object], way: str) -> None:
        hashes = {key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in said.items()}
        each = [json.loads(text) for text in self.texts(json.dumps(hashes))]
        for host, theirs in enumerate(each):
            if theirs != each[0]:
                keys = [key for key in {**each[0], **theirs} if each[0].get(key) != theirs.get(key)]
                raise InputError(f"host {host} was started with other {what} than host 0: {', '.join(keys)}. {way}.")

    def _gathered(self, own: Tensor) -> list[Tensor]:
        import torch
        import torch.distributed as dist

        from trireme.engine.hosts.wire import answered

        found = [torch.empty_like(own) for _ in range(self.hosts)]
        with answered():
            dist.all_gather(found, own, group=self._control)
        return found

    def speed(self) -> float:
        """Bytes a second from each host to the next, all at once; the slowest."""
        import torch

        assert self.wire is not None
        block = torch.zeros(FEW, dtype=torch.uint8)
        seconds = []
        for _ in range(2):  # the first opens connections
            self.meet()
            begun = time.monotonic()
            self.wire.exchange("net", (self.host + 1) % self.hosts, (self.host - 1) % self.hosts, block)
            seconds.append(time.monotonic() - begun)
        return min(FEW / s for s in self.numbers(seconds[1:], 1))

    def tell(self, why: str) -> None:
        self.watch.tell(why)

    def judgement(self) -> str:
        return self.watch.judgement()

    def close(self) -> None:
        """Ends signs of life: this host is done."""
        self.watch.close()


@contextmanager
def joined(at: Place, late: Callable[[str], object]) -> Iterator[Alone]:
    """The hosts, while this one takes part; an exception within ends all."""
    if at.hosts == 1:
        yield Alone()
        return
    group = Group(at, late)
    try:
        yield group
    except LostHost as error:
        raise LostHost(group.judgement() or str(error)) from error
    except BaseException as error:
        group.tell(_reason(error))
        raise
    finally:
        group.close()


def _reason(error: BaseException) -> str:
    """An error as other hosts hear of it."""
    where = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    return where or str(error) or type(error).__name__
