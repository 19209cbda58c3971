"""Implementations timed in rounds."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

from script_files import script

block_parts = script("bench/block_parts")


def test_implementations_take_turns_and_medians_count(monkeypatch):
    calls, samples = [], []
    times = {"ours": iter([9.0, 9.0, 3.0, 1.0, 2.0]), "peer": iter([9.0, 9.0, 4.0, 6.0, 5.0])}
    clocks = {"ours": 1500.0, "peer": 1400.0}

    def measure(who):
        calls.append(who)
        samples.append((block_parts.time.perf_counter(), clocks[who], 690.0))
        return next(times[who])

    @contextmanager
    def sampled(device):
        yield samples

    monkeypatch.setattr(block_parts, "sampled", sampled)
    now = iter(range(100))
    monkeypatch.setattr(block_parts, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    turns = block_parts.in_turn({who: lambda who=who: measure(who) for who in clocks}, "cpu", rounds=3, warm=3.0)
    assert calls == ["ours", "peer"] * 5
    assert turns["ours"] == (2.0, 1.0, 3.0, 1500.0, 690.0)
    assert turns["peer"] == (5.0, 4.0, 6.0, 1400.0, 690.0)
    assert str(turns["peer"]) == "1400 MHz 690 W"


def test_results_of_a_timed_loop_do_not_pile_up(monkeypatch):
    """A second of an operation's outputs would not fit the GPU."""
    monkeypatch.setattr(block_parts, "timed", lambda run, device: (run(), 0.25)[1])
    results, alive = [], []

    def run():
        result = set()
        results.append(weakref.ref(result))
        alive.append(sum(each() is not None for each in results))
        return result

    assert block_parts.looped(run, "cpu")() == 0.25 / 4
    assert len(results) == 1 + 3 + 4
    assert max(alive) == 1


def test_without_samples_clock_and_power_are_absent():
    turn = block_parts._turn([(0.0, 1.0, 0.5)], [(2.0, 1500.0, 690.0)])
    assert turn == (0.5, 0.5, 0.5, None, None)
    assert str(turn) == ""
