"""The hosts of a run, one process each, started by torchrun or SLURM; and how they agree on values."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from trireme.engine.plan import MOST_HOSTS
from trireme.models.config import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from trireme.engine.hosts.wire import Wire

TRIAL = 64 << 20  # bytes that time the network


class Place(NamedTuple):
    """Which of a run's processes this one is, and where host 0 listens."""

    host: int = 0
    hosts: int = 1
    local: int = 0  # among those of this machine
    local_hosts: int = 1  # on this machine
    address: str = ""
    port: int = 0


def place() -> Place:
    """Reads the environment of torchrun, or of a task of SLURM's; without it this process is alone. Raises
    InputError.
    """
    names = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | _of_slurm() | os.environ
    if names.get("WORLD_SIZE", "1") in ("0", "1"):
        return Place()
    hosts = _number(names, "WORLD_SIZE", 2, MOST_HOSTS)
    local_hosts = _number(names, "LOCAL_WORLD_SIZE", 1, hosts)
    rank, local = _number(names, "RANK", 0, hosts - 1), _number(names, "LOCAL_RANK", 0, local_hosts - 1)
    if not names.get("MASTER_ADDR"):
        raise InputError("MASTER_ADDR of the environment is not set. Set it to host 0's name or address.")
    return Place(rank, hosts, local, local_hosts, names["MASTER_ADDR"], _number(names, "MASTER_PORT", 1, 65535))


def _number(names: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = names.get(name, "")
    if not (re.fullmatch("[0-9]{1,18}", text) and low <= int(text) <= high):
        state = f"is {text!r}" if text else "is not set"
        expected = f"a number from {low} to {high}. Set it as torchrun does, or unset it"
        raise InputError(f"{name} of the environment {state}; expected {expected}.")
    return int(text)


def _of_slurm() -> dict[str, str]:
    """torchrun's variables for a task of `srun`. Nothing if this is no such task, or if torchrun has started it."""
    env = os.environ
    if "WORLD_SIZE" in env or env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return {}
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", env.get("SLURM_STEP_NODELIST", "")).split(",")[0]  # of "node[01-04],b7"
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))  # of "2(x3),1"
    tasks = [n for n, times in runs for _ in range(int(times or 1))]
    return {
        "RANK": env.get("SLURM_PROCID", ""),
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": dict(enumerate(tasks)).get(int(env.get("SLURM_NODEID", "0")), "1"),
        "MASTER_ADDR": first,
        "MASTER_PORT": str(10_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000),  # jobs may share a node
    }


class LostHost(Exception):
    """Another host has ended, or does not answer. The message is the run's reason to end, the same on all hosts."""


class Alone:
    """A run on one host: the methods of Group without other hosts."""

    host, hosts, local_hosts = 0, 1, 1
    wire: Wire | None = None

    @property
    def waits(self) -> bool:
        """Whether the run's own thread waits for another host now. The watch of the wire limits that time."""
        return self.wire is not None and self.wire.waits

    def texts(self, text: str) -> list[str]:
        """The text of each host."""
        return [text]

    def numbers(self, numbers: Sequence[float], limit: int) -> list[float]:
        """The numbers of all hosts, in order. A host gives `limit` of them at most."""
        assert len(numbers) <= limit
        return list(numbers)

    def values(self, value: float) -> list[float]:
        """The number of each host."""
        return self.numbers([value], 1)

    def any(self, answer: bool) -> bool:
        """Whether the answer of any host is yes."""
        return any(self.values(answer))

    def first(self, answer: bool) -> bool:
        """The answer of host 0. It decides about time, since clocks differ."""
        return bool(self.values(answer)[0])

    def barrier(self) -> None:
        """Returns when all hosts have called it."""
        self.numbers([], 1)

    def agree(self, kind: str, values: Mapping[str, object], advice: str) -> None:
        """Raises InputError if a host's `values` (as JSON) differ from those of host 0. `advice`: for the user."""

    def abort(self, reason: str) -> None:
        """Ends all other hosts, because this one is about to end and its cleanup may wait for them."""

    def fail(self, error: BaseException) -> None:
        """As `abort`, for an error, unless all know already."""
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        if not isinstance(error, LostHost):
            self.abort(text or str(error) or type(error).__name__.replace("KeyboardInterrupt", "interrupted"))


class Group(Alone):
    """Several hosts. All methods raise LostHost."""

    def __init__(self, place: Place, on_timeout: Callable[[str], object], timeout_s: float | None = None):
        """Returns once all are here. `on_timeout`, `timeout_s`: as of Wire."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else its store prints stacks while hosts connect
        from trireme.engine.hosts.wire import SILENT, Wire  # late: torch takes seconds

        self.host, self.hosts, self.local_hosts = place.host, place.hosts, place.local_hosts
        self.wire = Wire(place, on_timeout, timeout_s or SILENT)

    def texts(self, text: str) -> list[str]:
        import torch

        content = text.encode()
        sizes = [int(n) for n in self.values(len(content))]
        padded = torch.frombuffer(bytearray(content.ljust(max(sizes, default=0) + 1)), dtype=torch.uint8)
        return [bytes(part[:n].numpy()).decode() for part, n in zip(self._gathered(padded), sizes, strict=True)]

    def numbers(self, numbers: Sequence[float], limit: int) -> list[float]:
        import torch

        assert len(numbers) <= limit
        padded = torch.zeros(1 + limit, dtype=torch.float64)
        padded[: 1 + len(numbers)] = torch.tensor([float(len(numbers)), *numbers], dtype=torch.float64)
        return [x for n, *numbers in (part.tolist() for part in self._gathered(padded)) for x in numbers[: int(n)]]

    def agree(self, kind: str, values: Mapping[str, object], advice: str) -> None:
        hashes = {key: hashlib.sha256(json.dumps(value).encode()).hexdigest() for key, value in values.items()}
        first, *replies = (json.loads(text) for text in self.texts(json.dumps(hashes)))
        for host, reply in enumerate(replies, 1):
            if reply != first:
                keys = [key for key in {**first, **reply} if first.get(key) != reply.get(key)]
                raise InputError(f"host {host} was started with other {kind} than host 0: {', '.join(keys)}. {advice}.")

    def _gathered(self, part: Tensor) -> list[Tensor]:
        import torch

        assert self.wire is not None
        parts = [part if host == self.host else torch.empty_like(part) for host in range(self.hosts)]
        self.wire.all_gather("control", parts)
        return parts

    def bandwidth(self) -> float:
        """Bytes/s from each host to the next, all at once; those of the slowest."""
        import torch

        assert self.wire is not None
        block, seconds = torch.zeros(TRIAL, dtype=torch.uint8), 0.0
        for _ in range(2):  # the first is slower: TCP begins with small windows
            self.barrier()
            start = time.monotonic()
            self.wire.exchange("net", (self.host + 1) % self.hosts, (self.host - 1) % self.hosts, block)
            seconds = time.monotonic() - start
        return TRIAL / max(1e-9, *self.values(seconds))

    def abort(self, reason: str) -> None:
        assert self.wire is not None
        self.wire.abort(f"host {self.host}: {reason}")
        self.wire.disconnect()


_world = Alone()


def world() -> Alone:
    """The hosts of this process's run."""
    return _world


@contextmanager
def join(place: Place, on_timeout: Callable[[str], object], timeout_s: float | None = None) -> Iterator[Alone]:
    """The hosts, while this one takes part; an exception within ends all. `on_timeout`, `timeout_s`: as of Wire."""
    global _world  # noqa: PLW0603
    if place.hosts == 1:
        yield _world
        return
    _world = group = Group(place, on_timeout, timeout_s)
    assert group.wire is not None
    try:
        yield group
    except BaseException as error:
        group.fail(error)
        raise
    finally:
        _world = Alone()
        group.wire.close()
