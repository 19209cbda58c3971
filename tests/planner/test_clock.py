"""Seconds by part, and the first step's compilation: by a clock of the test's."""

import time

import pytest
import torch

from trireme.engine.planner import whole
from trireme.engine.planner.clock import Clock, process_began
from trireme.engine.planner.lines import took_line


class Time:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time_():
    return Time()


def test_time_within_another_part_counts_once(time_):
    clock = Clock(time_)
    time_.pass_(5)
    with clock.at("evaluations"):
        time_.pass_(1)
        with clock.at("samples"):
            time_.pass_(10)
        with clock.at("export"):
            time_.pass_(20)
        time_.pass_(2)
    with pytest.raises(KeyError), clock.at("steps"):
        time_.pass_(4)
        raise KeyError
    spent = {"steps": 4, "evaluations": 3, "samples": 10, "export": 20}
    assert {part: s for part, s in clock.spent.items() if s} == clock.last == spent
    assert (clock.whole, clock.other) == (42, 5)
    said = "steps 4s, evaluations 3s, samples 10s, export 20s, other 5s"
    assert took_line(clock) == f"42s: {said}"


def test_a_command_begins_with_its_process():
    assert 0 <= time.monotonic() - process_began() < 24 * 3600
    assert Clock(lambda: 10.0, began=4.0).whole == 6


# ---------------------------------------------------------------- compilation


def test_the_first_step_takes_longer_where_kernels_are_to_be_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [whole.compile_s(device) for device in (gpu, None, cpu)] == [whole.NEW, whole.NEW, 0]
    for i in range(40):
        (tmp_path / str(i)).mkdir()
    assert [whole.compile_s(device) for device in (gpu, None, cpu)] == [whole.KNOWN, whole.NEW, 0]
