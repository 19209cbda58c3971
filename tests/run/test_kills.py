"""Killed at any instant a run goes on, by the commands that it names, to the same bits; no flipped bit is silent."""

import os
import signal
import time
from dataclasses import replace

import pytest
from kills import KINDS, Bench, flip, make_bench, trial
from runs import child, ended, hold, losses, options


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("seed", range(12))
def test_whenever_it_is_killed_it_ends_the_same(bench, seed):
    made = trial(bench, seed)
    assert not made.wrong, made


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_noticed_or_changes_nothing(bench, kind):
    found, what = flip(bench, kind, 0)
    assert found in ("noticed", "harmless"), what


def test_killed_with_two_gpus_a_run_goes_on_with_any_number(checkpoint, monkeypatch):
    """GPUs, pretended on a CPU, deal units otherwise; sums are over the same micro-batches in the same order."""

    def start(out, gpus, **more):
        return child(replace(options(checkpoint, out, "host", **more), micro_batch=1, gpus=gpus))

    whole, out = checkpoint / "with-one", checkpoint / "with-several"
    assert ended(start(whole, 1)) == 0
    for gpus, step in ((2, 3), (1, 6), (3, 9)):
        with monkeypatch.context() as m:
            hold(step + 1, m.setattr)
            pid = start(out, gpus, resume=str(out) if step > 3 else None)
        while not (out / "log.jsonl").exists() or max(losses(out), default=0) < step:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL
    assert ended(start(out, 2, resume=str(out))) == 0
    assert losses(out) == losses(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
