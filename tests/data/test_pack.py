"""Packing and the choice of documents: everything is used exactly as often as it should be."""

import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.data import dataset, documents
from trireme.engine.data.dataset import DataOptions
from trireme.engine.data.files.sources import DataFile
from trireme.engine.data.pack import best_fit, cut_points, one_per_row, shuffled
from trireme.engine.plan import Limits
from trireme.engine.run.job import TABLES, _with_tables
from trireme.models.config import InputError


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=80), st.integers(40, 64))
def test_best_fit_uses_every_document_once_and_never_overflows(lengths, capacity):
    lengths = np.array(lengths)
    order, starts = best_fit(lengths, capacity)
    assert sorted(order) == list(range(len(lengths)))
    rows = [lengths[order[a:b]].sum() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert max(rows) <= capacity
    assert min(rows) >= 1
    # Two rows are never so empty that they would go into one.
    assert len(rows) < 2 or sum(sorted(rows)[:2]) > capacity


def one_by_one(lengths, capacity):
    """Best fit as it is defined: rows with their documents, of the rows that are equally full the last."""
    rows, rooms = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r, room in enumerate(rooms) if room >= lengths[i]]
        fullest = [r for r in fitting if rooms[r] == min(rooms[r] for r in fitting)]
        row = max(fullest, key=lambda r: rows[r][1], default=None)
        if row is None:
            rows.append([[], 0])
            rooms.append(capacity)
            row = len(rows) - 1
        rows[row][0].append(i)
        rows[row][1] = sum(len(documents) for documents, _ in rows)  # when it was filled last
        rooms[row] -= lengths[i]
    return [documents for documents, _ in rows]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(0, 20))
def test_best_fit_is_that_of_one_document_after_another(lengths, more):
    """Snapshots count on the rows: their order must not change."""
    capacity = max(lengths) + more
    order, starts = best_fit(np.array(lengths, np.int32), capacity)
    assert [order[a:b].tolist() for a, b in pairwise(starts)] == [sorted(row) for row in one_by_one(lengths, capacity)]
    assert (order.dtype, starts.dtype) == (np.int64, np.int64)


def test_best_fit_by_hand():
    order, starts = best_fit(np.array([3, 7, 5, 3, 2]), 10)
    assert [order[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)] == [[0, 1], [2, 3, 4]]


def test_best_fit_of_real_lengths_wastes_little_and_is_fast():
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, 20_000).astype(int).clip(1, 2048)
    order, starts = best_fit(lengths, 2048)
    assert lengths.sum() / ((len(starts) - 1) * 2048) > 0.99


def test_windows_cover_every_token_once():
    document, start, length = cut_points(np.array([5, 0, 4, 9]), 4)
    assert document.tolist() == [0, 0, 2, 3, 3, 3]
    assert start.tolist() == [0, 4, 0, 0, 4, 8]
    assert length.tolist() == [4, 1, 4, 4, 4, 1]


def test_one_per_row():
    order, starts = one_per_row(3)
    assert order.tolist() == [0, 1, 2]
    assert starts.tolist() == [0, 1, 2, 3]


def test_shuffle_is_pinned():
    """The order is part of what a resumed run relies on, so it must not change with a version of anything."""
    assert shuffled(8, 42, 0).tolist() == PINNED
    assert shuffled(8, 42, 1).tolist() != PINNED
    assert sorted(shuffled(1000, 1)) == list(range(1000))


PINNED = [0, 1, 4, 2, 6, 5, 7, 3]


# ---------------------------------------------------------------- documents


class File:
    """A TokenFile in memory, from one list of trained flags a document; ids count up."""

    def __init__(self, flags, form="messages"):
        self.offsets = np.concatenate([[0], np.cumsum([len(f) for f in flags])]).astype(np.int64)
        self.flags = np.concatenate([np.array(f, bool) for f in flags])
        self.trained = np.array([sum(f) for f in flags], np.int64)
        self.lengths, self.n_documents = np.diff(self.offsets), len(flags)
        self.weights, self.own_weights = 1.0, None
        self.meta = {"format": form, "rows": 1, "bad": 0, "first_bad": "", "unused": []}

    def read(self, start, stop):
        return np.arange(start, stop, dtype=np.uint16) + (self.flags[start:stop] * np.uint16(1 << 15))


def text(*lengths):
    """Each all learned but its first token."""
    return File([[False] + [True] * (n - 1) for n in lengths], "text")


def fit(files, seq_len, long=None):
    fitted = documents.fit(documents.all_documents(files), files, seq_len, long)
    return fitted.pieces[["file", "start", "length", "goes_on"]].tolist(), fitted


def test_text_is_split_by_default_and_loses_no_label():
    pieces, fitted = fit([text(10, 3)], 4)
    assert pieces == [(0, 0, 4, True), (0, 4, 4, True), (0, 8, 2, False), (0, 10, 3, False)]
    assert (fitted.longer, fitted.split, fitted.cut) == (1, 1, 0)


def test_chats_are_cut_by_default_and_dropped_when_nothing_is_left_to_learn():
    chats = File([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 1], [0, 0]])
    pieces, fitted = fit([chats], 4)
    assert pieces == [(0, 0, 4, False), (0, 12, 2, False)]
    assert (fitted.longer, fitted.cut, fitted.dropped, fitted.unlearnable) == (2, 1, 0, 2)


def test_drop_split_error():
    chats = File([[0, 1, 0, 0, 0, 0, 0, 0, 0, 1], [0, 1]])
    pieces, fitted = fit([chats], 4, "drop")
    assert pieces == [(0, 10, 2, False)]
    assert fitted.dropped == 1
    pieces, fitted = fit([chats], 4, "split")  # the window in the middle has nothing to learn
    assert pieces == [(0, 0, 4, True), (0, 8, 2, False), (0, 10, 2, False)]
    assert fitted.split == 1
    with pytest.raises(InputError, match="1 rows have more than --seq-len 4 tokens, the longest 10"):
        fit([chats], 4, "error")


def test_weights():
    table = documents.all_documents([text(*range(2, 12)), text(5, 5)])
    weighed = documents.weigh(table, [2.5, 1], 7)
    counts = [(weighed["start"][weighed["file"] == 0] == s).sum() for s in table["start"][:10]]
    assert sorted(counts) == [2] * 5 + [3] * 5
    assert (weighed["file"] == 1).sum() == 2
    assert (weighed == documents.weigh(table, [2.5, 1], 7)).all()
    assert documents.weigh(table, [1, 1], 7) is table


def test_hold_out():
    table = documents.all_documents([text(*[5] * 100)])
    train, held = documents.hold_out(table, 0.1, 42, True)
    assert (len(train), len(held)) == (90, 10)
    assert sorted([*train["start"], *held["start"]]) == sorted(table["start"])
    assert (documents.hold_out(table, 0.1, 42, True)[1] == held).all()
    assert (documents.hold_out(table, 0.1, 43, True)[1] != held).any()
    with pytest.raises(InputError, match="leaves nothing to train on"):
        documents.hold_out(table[:1], 0.4, 42, False)


def test_the_end_of_a_single_text_is_held_out():
    train, held = documents.hold_out(documents.all_documents([text(100)]), 0.2, 42, True)
    assert train[["start", "length", "trained"]].tolist() == [(0, 80, 79)]
    assert held[["start", "length", "trained"]].tolist() == [(80, 20, 19)]
    with pytest.raises(InputError, match="too short"):
        documents.hold_out(documents.all_documents([text(3)]), 0.2, 42, True)


# ---------------------------------------------------------------- rows


def lay_out(files, **options):
    """A Dataset of these files."""
    table = documents.all_documents(files)
    return dataset._lay_out([DataFile(Path("x"))] * len(files), tuple(files), table, None, DataOptions(**options))


@pytest.mark.parametrize("pack", [True, False])
def test_a_row_without_a_label_is_left_out(pack):
    data = lay_out([text(9, 4, 5)], seq_len=4, pack=pack)  # both ends are of one token
    assert [(mb.lengths, mb.trained) for mb in data.batches(1)] == [((4,), n) for n in (4, 4, 3, 4)]
    assert data.left_out == (1 if pack else 2)


def test_other_rows_keep_an_end_of_one_token():
    data = lay_out([text(9, 2, 5)], seq_len=4)
    assert [(mb.lengths, mb.trained) for mb in data.batches(1)] == [((4,), 4), ((4,), 4), ((4,), 4), ((1, 2, 1), 1)]


def test_what_a_dataset_holds_is_counted():
    files = [text(*np.random.default_rng(0).integers(2, 90, 5000))]
    tracemalloc.start()
    data = lay_out(files, seq_len=64)
    for epoch in range(3):
        data._order(epoch)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    tables = files[0].offsets.nbytes + files[0].trained.nbytes
    assert held < data.memory - tables + 20_000 < 1.1 * held + 20_000
    work = SimpleNamespace(memory=3 * TABLES - 1)
    assert _with_tables(Limits(5, 4 * TABLES), work) == Limits(5, 2 * TABLES)
    assert _with_tables(Limits(5, TABLES), work) == Limits(5, 0)
    assert _with_tables(Limits(5, TABLES), data) == _with_tables(Limits(5, TABLES), None) == Limits(5, TABLES)


texts = st.lists(st.integers(2, 30), min_size=1, max_size=8).map(lambda lengths: text(*lengths))
answers = st.lists(st.booleans(), max_size=30).map(lambda flags: [False, *flags])
chats = st.lists(answers, min_size=1, max_size=8).map(File)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(texts | chats, min_size=1, max_size=3),
    st.integers(2, 10),
    st.booleans(),
    st.sampled_from([None, "cut", "split", "drop"]),
)
def test_every_row_has_a_label(files, seq_len, pack, long):
    try:
        data = lay_out(files, seq_len=seq_len, pack=pack, long=long)
    except InputError as error:
        assert "no row" in str(error) or "leaves none" in str(error)  # noqa: PT017
        return
    assert min(mb.trained for mb in data.batches(1)) > 0
