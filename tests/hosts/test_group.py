"""Hosts that agree, differ, fail, die and hang: processes on this machine; and the environment that starts them."""

import os
import signal
import socket
import time
from itertools import product

import pytest
from runs import Hosts

from trireme.engine.hosts import group
from trireme.engine.hosts.group import LostHost, Place
from trireme.engine.run import cli
from trireme.models.config import InputError


def notes_in(folder):
    """What hosts note, by host."""

    def read() -> dict[int, str]:
        return {int(path.name): path.read_text() for path in folder.iterdir()}

    read.note = lambda host, what: (folder / str(host)).write_text(what)
    return read


@pytest.fixture
def notes(tmp_path):
    return notes_in(tmp_path)


def body(notes, within):
    """Joins, does `within(group)`, notes the exception or "late: why"."""

    def run(host: int) -> int:
        def late(why: str) -> None:
            notes.note(host, f"LostHost: {why}")
            os._exit(2)

        try:
            with group.join(group.place(), late, timeout_s=3.0) as hosts:
                within(hosts)
        except (InputError, LostHost, OSError) as error:
            notes.note(host, f"{type(error).__name__}: {error}")
            return 2
        return 0

    return run


@pytest.mark.full
def test_hosts_say_things_to_each_other(notes):
    def within(hosts):
        assert hosts.texts("é" * hosts.host) == ["", "é", "éé"]
        assert hosts.numbers([hosts.host] * hosts.host, 2) == [1, 2, 2]
        assert hosts.any(hosts.host == 2)
        assert not hosts.any(False)
        assert hosts.first(hosts.host == 0)
        assert not hosts.first(hosts.host == 1)
        assert hosts.bandwidth() > 0
        hosts.agree("options", {"--lr": "1"}, "")
        assert not hosts.waits
        notes.note(hosts.host, "all said")

    assert Hosts(3, body(notes, within)).codes() == [0, 0, 0]
    assert notes() == dict.fromkeys(range(3), "all said")


def waits(hosts):
    """For ever, unless another host ends it."""
    while True:
        hosts.barrier()
        time.sleep(0.05)


def differs(hosts):
    hosts.agree("options", {"--lr": "1", "--seed": str(hosts.host // 2)}, "Be alike")


def fails(which: int):
    def within(hosts):
        if hosts.host == which:
            raise OSError("the disk is full")
        waits(hosts)

    return within


@pytest.mark.full
@pytest.mark.grid
@pytest.mark.parametrize(("within", "culprit"), [(fails(1), "host 1"), (fails(0), "host 0"), (differs, "host 2")])
def test_what_ends_one_host_is_said_by_all(notes, within, culprit):
    assert Hosts(3, body(notes, within)).codes() == [2, 2, 2]
    reason = "--seed" if within is differs else "the disk is full"
    for host, said in notes().items():
        assert reason in said
        assert culprit in said or f"host {host}" == culprit


@pytest.mark.full
def test_a_host_that_dies_or_hangs_is_named_in_time(tmp_path):
    """Host 0 has the store that tells reasons. All at once, since who hangs is waited for a quarter of a minute."""
    runs = []
    for victim, how in product((0, 1), (signal.SIGKILL, signal.SIGSTOP)):
        (tmp_path / f"{victim}-{how}").mkdir()
        notes = notes_in(tmp_path / f"{victim}-{how}")
        within = lambda hosts, notes=notes: (notes.note(hosts.host, "is here"), waits(hosts))
        runs.append((notes, victim, how, Hosts(3, body(notes, within)).pids))
    end = time.monotonic() + 60
    for notes, victim, how, pids in runs:
        while len(notes()) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(pids[victim], how)
    for notes, victim, _, pids in runs:
        others = [host for host in range(3) if host != victim]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pids[host], 0)[1]) for host in others]
        os.kill(pids[victim], signal.SIGKILL)
        os.waitpid(pids[victim], 0)
        assert codes == [2, 2]
        assert all(f"host {victim} is lost or hangs" in notes()[host] for host in others)


@pytest.mark.full
def test_a_host_that_finds_no_other_says_what_to_look_at(notes, monkeypatch):
    """Its port belongs to another program."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        hosts = Hosts.__new__(Hosts)
        hosts.port = other.getsockname()[1]
        pid = hosts.start(0, 2, body(notes, waits))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert notes()[0].startswith(f"InputError: MASTER_PORT {hosts.port} ")


@pytest.mark.full
def test_host_0_listens_where_other_machines_reach_it(notes, monkeypatch):
    """Although its own name is a loopback address there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("there is no network")
        address = probe.getsockname()[0]

    def within(host: int) -> int:
        os.environ["MASTER_ADDR"] = address if host else "127.0.1.1"
        return body(notes, lambda hosts: notes.note(host, hosts.wire.address))(host)

    assert Hosts(2, within).codes() == [0, 0]
    assert notes() == {0: address, 1: address}


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host0.local", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "rack[2-3]n[07,09-11],b1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_ID": "40003",
}
PLACES = [
    (TORCHRUN, Place(1, 2, 0, 1, "host0.local", 29500)),
    (TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_RANK": "-1"}, Place()),  # as some launchers say
    (SLURM, Place(5, 7, 1, 2, "rack2n07", 10003)),
    (SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}, Place(5, 7, 1, 2, "10.0.0.1", 5)),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, Place()),
    (SLURM | TORCHRUN, Place(1, 2, 0, 1, "host0.local", 29500)),
    (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT"),
    (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT"),
    (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT"),
    (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR"),
    (TORCHRUN | {"WORLD_SIZE": "3000000000"}, "WORLD_SIZE"),
    (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
    (TORCHRUN | {"RANK": "2"}, "RANK"),
    (TORCHRUN | {"RANK": "-1"}, "RANK"),
    (TORCHRUN | {"RANK": "\u00b2"}, "RANK"),
    (TORCHRUN | {"LOCAL_RANK": "1"}, "LOCAL_RANK"),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE"),
]


@pytest.mark.parametrize(("environment", "expected"), PLACES)
def test_the_environment_of_torchrun_or_slurm_is_a_place(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, Place):
        assert group.place() == expected
        return
    with pytest.raises(InputError) as refused:
        group.place()
    assert str(refused.value).startswith(f"{expected} of the environment ")


@pytest.mark.parametrize(("visible", "taken"), [(None, "1"), ("4,5,6,7", "5,7"), ("4,5,6", "5"), ("", "")])
def test_hosts_of_one_machine_take_gpus_of_their_own(monkeypatch, visible, taken):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # to be as before afterwards
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert cli.gpus_of(Place(1, 2, 1, 2)) == {"CUDA_VISIBLE_DEVICES": taken}
    assert cli.gpus_of(Place(1, 2, 0, 1)) == {}
