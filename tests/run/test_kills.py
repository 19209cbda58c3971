"""Killed at any instant a run goes on, by the commands that it names, to the same bits; no flipped bit is silent."""

import pytest
from kills import KINDS, Bench, flip, make_bench, trial


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
