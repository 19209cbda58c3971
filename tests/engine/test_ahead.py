"""A step's inputs: made by another thread while the step before runs, and the same."""

import threading

import pytest
import torch
from engines import LLAMA, batches

from trireme.engine.build import Ahead, in_ram, placed
from trireme.models.rows import rope_tables


@pytest.fixture
def made():
    return []


@pytest.fixture
def ahead(made):
    def make(key):
        made.append((key, threading.current_thread()))
        if key < 0:
            raise ValueError(key)
        return 10 * key

    ahead = Ahead(make)
    yield ahead
    ahead.close()


def test_the_following_value_is_made_once_by_another_thread(ahead, made):
    assert [ahead.take(1, 2), ahead.take(2, 3), ahead.take(3, None)] == [10, 20, 30]
    assert [key for key, _ in made] == [1, 2, 3]
    assert threading.current_thread() not in {thread for _, thread in made}


def test_another_key_than_the_announced_one_is_made_anew(ahead):
    ahead.take(1, 2)
    assert ahead.take(5, None) == 50


def test_an_error_is_raised_where_the_value_is_taken(ahead):
    assert ahead.take(1, -1) == 10
    with pytest.raises(ValueError, match="-1"):
        ahead.take(-1, 2)


def test_inputs_by_way_of_ram_are_the_micro_batch():
    ((micro_batch, *_), *_) = batches(LLAMA, 1, 2, 24)
    found = placed(in_ram(LLAMA, micro_batch), [(rope_tables(LLAMA, 24, "cpu"), "cpu")])
    packed, labels = found.on(0), torch.from_numpy(micro_batch.labels)
    assert packed.ids.tolist() == list(micro_batch.ids)
    assert packed.labels.tolist() == list(micro_batch.labels)
    assert packed.loss_rows.tolist() == torch.nonzero(labels >= 0)[:, 0].tolist()
    assert {t.dtype for t in packed[:3]} == {torch.int64}
    assert (found.tokens, found.trained) == (24, len(packed.loss_rows))
    assert packed.rows.docs.lengths == tuple(micro_batch.lengths)
