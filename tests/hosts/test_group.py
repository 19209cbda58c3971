"""Hosts that agree, differ, fail, die and hang: processes on this machine."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import Hosts

from trireme.engine.hosts import group, held, wire
from trireme.engine.hosts.group import LostHost
from trireme.engine.hosts.wire import Wire
from trireme.engine.plan import Limits
from trireme.engine.run import main
from trireme.engine.run.begin import limits
from trireme.engine.run.begin.limits import common_limits
from trireme.engine.run.options import Options
from trireme.engine.shared import BETWEEN
from trireme.models.config import InputError
from trireme.storage import snapshots


@pytest.fixture
def told(tmp_path):
    """What hosts note, by host."""

    def read() -> dict[int, str]:
        return {int(path.name): path.read_text() for path in tmp_path.iterdir()}

    read.note = lambda host, what: (tmp_path / str(host)).write_text(what)
    return read


def body(told, within):
    """Joins, does `within(group)`, notes the exception or "late: why"."""

    def run(host: int) -> int:
        wire.BEAT, wire.SILENT, wire.GRACE = 0.05, 3.0, 1.0

        def late(why: str) -> None:
            told.note(host, f"LostHost: {why}")
            os._exit(2)

        group.FEW = 1 << 20

        try:
            with group.joined(group.place(), late) as hosts:
                within(hosts)
        except (InputError, LostHost, OSError) as error:
            told.note(host, f"{type(error).__name__}: {error}")
            return 2
        return 0

    return run


def test_hosts_say_things_to_each_other(told):
    def within(hosts):
        assert hosts.texts("x" * hosts.host) == ["", "x", "xx"]
        assert hosts.numbers([hosts.host] * hosts.host, 2) == [1, 2, 2]
        assert hosts.any(hosts.host == 2)
        assert not hosts.any(False)
        assert hosts.first(hosts.host == 0)
        assert not hosts.first(hosts.host == 1)
        assert hosts.speed() > 0
        hosts.agree("options", {"--lr": "1"}, "")
        told.note(hosts.host, "all said")

    assert Hosts(3, body(told, within)).codes() == [0, 0, 0]
    assert told() == dict.fromkeys(range(3), "all said")


@pytest.mark.full
def test_a_host_with_other_options_is_named_by_all(told):
    say = lambda hosts: {"--lr": "1", "--seed": str(hosts.host // 2)}
    assert Hosts(3, body(told, lambda hosts: hosts.agree("options", say(hosts), "Be alike"))).codes() == [2, 2, 2]
    why = "InputError: host 2 was started with other options than host 0: --seed. Be alike."
    assert told() == dict.fromkeys(range(3), why)


def waits(hosts):
    """For ever, unless another host ends it."""
    while True:
        hosts.meet()
        time.sleep(0.01)


def test_a_failing_host_tells_the_others_why(told):
    def within(hosts):
        if hosts.host == 1:
            raise OSError("the disk is full")
        waits(hosts)

    assert Hosts(3, body(told, within)).codes() == [2, 2, 2]
    others = "LostHost: host 1: the disk is full"
    assert told() == {0: others, 1: "OSError: the disk is full", 2: others}


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_dies_or_hangs_is_named_in_time(told, how):
    def within(hosts):
        told.note(hosts.host, "is here")
        waits(hosts)

    hosts = Hosts(3, body(told, within))
    end = time.monotonic() + 60
    while len(told()) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(hosts.pids[1], how)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (hosts.pids[0], hosts.pids[2])]
    os.kill(hosts.pids[1], signal.SIGKILL)
    os.waitpid(hosts.pids[1], 0)
    assert codes == [2, 2]
    for host in (0, 2):
        assert "host 1 is lost or hangs" in told()[host]


def test_a_wait_for_another_host_is_known_as_one(monkeypatch):
    """Between steps alone: in a step the queues are watched."""
    here, seen = object.__new__(Wire), []
    here.waits, here._groups = False, {"net": None, "sum": None}
    move = lambda what, host, group: seen.append(here.waits) or SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(wire, "dist", SimpleNamespace(isend=move, irecv=move))
    for queue in (BETWEEN, "sum_in"):
        here.send(queue, 1, torch.zeros(1))
        here.receive(queue, 1, torch.zeros(1))
    assert seen == [True, True, False, False]
    assert not here.waits


def test_without_torchrun_a_run_is_alone():
    with group.joined(group.place(), print) as alone:
        assert (alone.host, alone.hosts, alone.wire) == (0, 1, None)
        assert alone.numbers([1.0], 1) == [1.0]
        assert alone.any(True)
        alone.agree("options", {"a": "b"}, "")
        alone.meet()


ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host0.local", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MASTER_PORT", "99999", "is '99999'; expected a port, 1 to 65534"),
        ("MASTER_PORT", "0", "is '0'; expected a port"),
        ("MASTER_PORT", "a", "is 'a'; expected a port"),
        ("MASTER_PORT", "", "is not set; expected a port"),
        ("MASTER_ADDR", "", "is not set; expected the name or the address of host 0"),
        ("MASTER_ADDR", "a\x1b[2J", r"is 'a\x1b[2J'; expected the name"),
        ("WORLD_SIZE", "3000000000", "is '3000000000'; expected at most 1024"),
        ("WORLD_SIZE", "9" * 5000, "more characters"),
        ("RANK", "2", "is '2'; expected a number for WORLD_SIZE 2"),
        ("RANK", "-1", "is '-1'; expected a whole number"),
        ("RANK", "\u00b2", "expected a whole number"),
        ("LOCAL_RANK", "1", "is '1'; expected a number for LOCAL_WORLD_SIZE 1"),
        ("LOCAL_WORLD_SIZE", "3", "is '3'; expected a number for WORLD_SIZE 2"),
    ],
)
def test_an_environment_that_is_not_torchruns_is_refused_at_once(environment, name, value, expected):
    environment.setenv(name, value)
    with pytest.raises(InputError) as refused:
        group.place()
    assert str(refused.value).startswith(f"{name} of the environment ")
    assert expected in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_torchruns_environment_is_a_place(environment):
    assert group.place() == group.Place(1, 2, 0, 1)
    environment.setenv("WORLD_SIZE", "1")
    environment.setenv("LOCAL_RANK", "-1")  # as some launchers say
    assert group.place() == group.Place()


class Says(group.Alone):
    """A host that hears these texts, its own first."""

    def __init__(self, *others: str):
        self.others = others

    def texts(self, text):
        return [text, *self.others]


SEEN = '{"begun": true, "held": [[1, 4, 2, "ab"]]}'


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[true, []]", "is not a JSON object"),
        ("", "is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"begun": true, "begun": true, "held": []}', "names 'begun' twice"),
        ('{"begun": 1, "held": []}', "begun is 1, expected true or false"),
        (SEEN.replace("4", "-4"), "is -4, expected a whole number"),
        (SEEN.replace("4", "4.5"), "is 4.5, expected a whole number"),
        (SEEN.replace("2", "1000000000"), "a snapshot of host 1 of 1000000000"),
        (SEEN.replace("[1", "[7"), "a snapshot of host 7 of 2"),
        (SEEN.replace('"ab"', "null"), "is null, expected a string"),
    ],
)
def test_what_another_host_says_is_read_without_trust(text, wrong):
    with pytest.raises(InputError, match="host 1 sent what this version does not expect") as refused:
        held.last_whole(Says(text), [], True, Path("out"))
    assert wrong in str(refused.value)
    assert held.last_whole(Says(SEEN), [], True, Path("out")) is None  # of host 0 no snapshot


def test_hosts_plan_with_the_least_memory_of_their_equal_gpus(monkeypatch):
    """Another process may use one of them; unequal GPUs are refused."""
    hosts = Says("")
    hosts.hosts, hosts.each = 2, lambda own: [own, own]
    of = lambda given, less=(3, 0): common_limits(
        hosts, Options(**given), Limits(10, 20, 2, less=less), torch.device("cpu")
    )
    assert of({}) == Limits(7, 20, 2)
    assert of({}, ()) == Limits(10, 20, 2)
    with pytest.raises(InputError, match="unequal GPUs round differently"):
        of({"assume": "gpu=rtx3060+rtx4090"})
    monkeypatch.setattr(limits, "are_equal", lambda device, gpus: False)
    with pytest.raises(InputError, match="unequal GPUs round differently"):
        of({})
    assert common_limits(group.Alone(), Options(), Limits(10, 20, 2, less=(3, 0)), torch.device("cpu")).of(0) == 7


@pytest.mark.parametrize("n", [float("nan"), float("inf"), -1.0, 0.5, 1e300])
def test_how_much_another_host_says_is_bounded(monkeypatch, n):
    here = object.__new__(group.Group)
    monkeypatch.setattr(here, "_gathered", lambda own: [own, own.clone().index_fill_(0, torch.tensor([0]), n)])
    with pytest.raises(InputError, match="host 1 sent what this version does not expect: .* numbers, expected 0 to 1"):
        here.numbers([3.0], 1)
    monkeypatch.setattr(here, "numbers", lambda own, *_: [*own, n])
    with pytest.raises(InputError, match="host 1 sent what this version does not expect: "):
        here.texts("")
    if abs(n) > 1e308 or n != n:
        with pytest.raises(InputError, match="host 1 sent what this version does not expect: (nan|inf)"):
            here.each(1.0)
    monkeypatch.undo()
    monkeypatch.setattr(here, "_gathered", lambda own: [own, torch.zeros_like(own)])
    with pytest.raises(InputError, match="host 1 sent what this version does not expect: 0 numbers, expected 1 to 1"):
        here.first(True)


def test_a_snapshot_of_a_billion_hosts_is_none_of_several():
    extra = {"cut": {"plan": {"hosts": 10**9, "host": 0}}, "data": "x"}
    snapshot = snapshots.Snapshot(1, 4, extra, {}, {})
    assert held.Held(0, [], snapshot).key == held.Key(4, 1, "")
    assert held.last_whole(group.Alone(), [held.Held(0, [], snapshot)], True, Path("out")).key.hosts == 1


@pytest.mark.parametrize(("shown", "own"), [(None, "2,3"), ("4,5,6,7", "6,7"), ("4,5,6", None), ("", "")])
def test_hosts_of_one_machine_take_gpus_of_their_own(monkeypatch, shown, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # to be as before afterwards
    if shown is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = shown
    take = lambda: main.take_gpus(Options(gpus=2), group.Place(1, 2, 1, 2))
    if own is not None:
        take()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    else:
        with pytest.raises(InputError, match="--gpus 2: CUDA_VISIBLE_DEVICES shows 3 to the 2 hosts"):
            take()
