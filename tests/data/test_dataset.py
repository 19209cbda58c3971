"""The data of a run: a pure function of (options, step); what is cut, held out, weighted and compared."""

import json

import numpy as np
import pytest
from chats import CHATML, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.data import documents
from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, find_labels, load_dataset, parse_val
from trireme.models.config import InputError


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    found = load_codec(make_tokenizer(tmp_path_factory.mktemp("model"), chat_template=CHATML).folder)
    yield found
    found.close()


@pytest.fixture
def load(tmp_path, codec):
    def load(rows, name="rows.jsonl", sources=(), **options):
        path = tmp_path / name
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        ids = not isinstance(rows, str) and "input_ids" in rows[0]
        return load_dataset(
            [*(sources or [str(path)])], None if ids else codec, DataOptions(**{"seq_len": 64} | options)
        )

    return load


def ids_of(*lengths, first=10):
    return [{"input_ids": [first + i % 50] * n} for i, n in enumerate(lengths)]


def flat(batches):
    return [(mb.ids.tolist(), mb.labels.tolist(), mb.lengths) for mb in batches]


def bracketed(data):
    """Every document in order, with the trained part in brackets."""
    shown = []
    for mb in data.batches(1):
        for stop, n in zip(np.cumsum(mb.lengths), mb.lengths, strict=True):
            ids, labels = mb.ids[stop - n : stop], mb.labels[stop - n : stop]
            learned = data.codec.decode(labels[labels >= 0])
            shown.append((data.codec.decode(ids), learned))
    return shown


# ---------------------------------------------------------------- steps


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    seq_len=st.integers(2, 24),
    long=st.sampled_from(["cut", "split", "drop"]),
    pack=st.booleans(),
    batch=st.integers(1, 5),
)
@settings(max_examples=30, deadline=None)
def test_what_becomes_of_every_token(tmp_path_factory, lengths, seq_len, long, pack, batch):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [[100 * i + k for k in range(n)] for i, n in enumerate(lengths)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    expected = [row for row in rows if len(row) > 1 and (long != "drop" or len(row) <= seq_len)]
    if not expected:
        with pytest.raises(InputError):
            load_dataset([str(path)], None, DataOptions(seq_len=seq_len, long=long, pack=pack))
        return
    data = load_dataset([str(path)], None, DataOptions(seq_len=seq_len, long=long, pack=pack))
    cut = (lambda row: row[:seq_len]) if long == "cut" else lambda row: row
    labels = sorted(token for row in expected for token in cut(row)[1:])
    per_epoch, orders = data.steps_per_epoch(batch), []
    for epoch in (0, 1):
        steps = [mb for i in range(epoch * per_epoch, (epoch + 1) * per_epoch) for mb in data.step(i, batch, 2)]
        assert sorted(label for mb in steps for label in mb.labels.tolist() if label >= 0) == labels
        assert all(max(mb.lengths) <= seq_len and sum(mb.lengths) <= 2 * seq_len for mb in steps)
        orders.append([mb.ids.tolist() for mb in steps])
        for mb in steps:
            follows = mb.labels[:-1] >= 0
            assert (mb.ids[1:][follows] == mb.labels[:-1][follows]).mean() == 1 or long == "split"
    assert orders[0] != orders[1] or data.n_sequences < 8  # an order of its own for each epoch
    again = load_dataset([str(path)], None, DataOptions(seq_len=seq_len, long=long, pack=pack))
    assert again.fingerprint == data.fingerprint
    assert flat(again.step(per_epoch, batch, 2)) == flat(data.step(per_epoch, batch, 2))
    assert sorted(flat(data.batches(1))) == sorted(flat(again.batches(1)))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=200), capacity=st.integers(30, 64))
@settings(max_examples=30, deadline=None)
def test_packing_puts_each_document_into_one_sequence(lengths, capacity):
    order, starts = documents.best_fit(np.array(lengths), capacity)
    assert sorted(order.tolist()) == [*range(len(lengths))]
    room = [sum(lengths[i] for i in order[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    assert max(room) <= capacity
    assert len(room) <= 2 * sum(lengths) / capacity + 1


@pytest.mark.parametrize("text", ["a b\n" * 3000, "é" * 5000, "word " * 20_000])
def test_a_long_text_has_the_tokens_of_the_whole(load, codec, text):
    data = load(text, "a.txt", seq_len=103)
    whole = codec.prompt(text.rstrip("\n"))
    found = sorted((int(p["start"]), int(p["length"])) for p in data.pieces)
    assert found[-1][0] + found[-1][1] == len(whole) + 1  # and the end
    ids = np.concatenate([data._read(data.pieces[[np.flatnonzero(data.pieces["start"] == s)[0]]])[0] for s, _ in found])
    assert ids[:-1].tolist() == whole


# ---------------------------------------------------------------- which rows


def test_rows_that_are_held_out(load, tmp_path, codec):
    data = load(ids_of(*[5] * 50, first=1), val="0.1")
    assert (len(data.pieces), len(data.held_out.pieces)) == (45, 5)
    mine, theirs = ({int(p["start"]) for p in each.pieces} for each in (data, data.held_out))
    assert not mine & theirs
    other = tmp_path / "other.jsonl"
    other.write_text('{"input_ids": [1, 2, 3]}\n')
    data = load_dataset([str(tmp_path / "rows.jsonl")], None, DataOptions(seq_len=8, val=str(other)))
    assert data.held_out.tokens == 3
    for share in ("1", "-1", "1.5"):
        with pytest.raises(InputError):
            parse_val(share)
    with pytest.raises(InputError, match="leaves nothing"):
        load(ids_of(5), val="0.5")


def test_of_few_texts_parts_of_all_are_held_out(load, tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{'abc'[i]} text of its own {'xyz'[i]} " * 200)
    data = load("d text\n" * 500, "3.txt", sources=[str(tmp_path / "*.txt")], seq_len=50, val="0.2")
    held, train = data.held_out, data
    assert 0.1 < held.tokens / (held.tokens + train.tokens) < 0.3
    of = lambda each: {int(p["start"]) // 3000 for p in each.pieces}
    assert len(of(held)) >= 3
    spans = sorted((int(p["start"]), int(p["start"] + p["length"])) for each in (held, train) for p in each.pieces)
    assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))


def test_weights_samples_and_bad_rows(load, tmp_path):
    data = load(ids_of(*[5] * 8), sources=[f"{tmp_path / 'rows.jsonl'}:1.5"])
    assert len(data.pieces) == 12
    data = load(ids_of(5), "one.jsonl", sources=[str(tmp_path / "rows.jsonl"), f"{tmp_path / 'one.jsonl'}:0.3"])
    assert "0.3 leaves no row" in data.report.lines()[1]
    data = load([*ids_of(*[5] * 8), {"x": 1}], max_samples=3)
    assert len(data.pieces) == 3
    with pytest.raises(InputError) as error:
        load([*ids_of(5), {"x": 1}])
    assert "line 2" in str(error.value)
    assert "--skip-bad" in str(error.value)
    assert load([*ids_of(5), {"x": 1}], skip_bad=True).report.files[0].meta["bad"] == 1
    with pytest.raises(InputError) as error:
        load([{"x": 1}] * 3)
    assert "--skip-bad" not in str(error.value)
    data = load([{"text": "a b", "weight": 2}, {"text": "c d", "weight": "much"}])
    assert sorted(data.step(0, 2, 2)[0].weights) == [1, 2]
    with pytest.raises(InputError, match="no column|no row"):
        load(ids_of(5), map="unused=absent")
    load(ids_of(5), map="unused=absent", inherited=True)
    with pytest.raises(InputError, match="the first") as error:  # others are not tried
        load([{"text": "\ud83d"}] * 50)
    assert "--skip-bad" not in str(error.value)


def test_tokens_that_a_model_has_not(load):
    data = load(ids_of(9, 9, first=90))
    with pytest.raises(InputError, match="tokens"):
        load(ids_of(9, 9, first=90), vocab_size=91)
    data.check_model(92, 9, "--teacher T")
    for vocab, positions, word in ((91, 9, "tokens"), (92, 8, "positions")):
        with pytest.raises(InputError, match=word) as error:
            data.check_model(vocab, positions, "--teacher T")
        assert "--teacher T" in str(error.value)


def test_the_report_and_the_example(load):
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "id": 1}
    data = load([talk, {"text": "words"}, {"prompt": "Q: ", "completion": "a"}])
    lines = "\n".join(data.report.lines())
    assert "[yes<|im_end|>]" in data.example(0)
    for word in ("3 rows", "not used: id", "messages: 1 row", "text: 1 row"):
        assert word in lines
    data = load([{"prompt": "p" * 60, "completion": "c" * 60}, {"prompt": "p" * 90, "completion": "c"}], seq_len=70)
    (line,) = data.report.losses()
    assert "1 cut" in line and "1 dropped" in line and "--seq-len 122" in line  # noqa: PT018


# ---------------------------------------------------------------- compared answers

PAIRS = [{"prompt": f"Q{i}? ", "chosen": f"Yes{i}.", "rejected": f"No{i}."} for i in range(4)]


def test_pairs_have_room_for_two_documents(load):
    data = load(PAIRS, kind="pairs", seq_len=12, pack=False)
    assert (data.options.room, data.n_sequences, data.report.fitted.longer) == (24, 4, 0)
    for mb in data.batches(1):
        assert len(mb.lengths) == 2
        assert mb.reference.tolist() == [0, 0]
    shown = bracketed(data)
    assert [learned for _, learned in shown[:2]] == ["Yes0.</s>", "No0.</s>"]
    assert load(PAIRS, kind="pairs", seq_len=12).n_sequences == 4


@given(prompts=st.lists(st.integers(0, 5), min_size=2, max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_counterpart_is_of_another_prompt(prompts):
    prompts = np.array(prompts, np.uint64)
    if len({*prompts}) == 1:
        with pytest.raises(InputError, match="a.csv has one prompt"):
            documents.counterparts(prompts, "a.csv")
        return
    assert (prompts[documents.counterparts(prompts, "a.csv")] != prompts).all()


def test_labelled_answers_and_their_counterparts(load):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(PAIRS)]
    for given_rows in (PAIRS, rows):
        data = load(given_rows, kind="labels", seq_len=16)
        shown = bracketed(data)
        assert len(shown) == 2 * (len(PAIRS) * 2 if given_rows is PAIRS else len(rows))
        for (answer, learned), (counterpart, other) in zip(shown[::2], shown[1::2], strict=True):
            assert answer.split("?")[0] == counterpart.split("?")[0]
            assert learned[-6:-5] != other[-6:-5]  # of another question
        (mb,) = data.step(0, 99, 99)
        answers, others = mb.halves()
        assert len(answers.ids) + len(others.ids) == len(mb.ids)
        assert answers.weights.tolist() == mb.weights[::2].tolist()
        assert any("good and" in line for line in data.report.lines())
    with pytest.raises(InputError, match="one prompt alone"):
        load(PAIRS[:1], kind="labels")


def test_classes_and_margins(load, tmp_path):
    rows = [{"text": f"star {i}", "label": i} for i in (1, 2, 5)]
    path = tmp_path / "rows.jsonl"
    load(ids_of(5))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = find_labels([str(path)], None)
    assert names == ("1", "2", "5")
    data = load(rows, kind="classes", labels=names)
    assert sorted(label for mb in data.batches(1) for label in mb.labels if label >= 0) == [0, 1, 2]
    assert data.example(0).endswith("-> [1]")
    data = load([row | {"margin": i} for i, row in enumerate(PAIRS)], kind="rewards")
    assert sorted(margin for mb in data.batches(1) for margin in mb.reference) == [0, 0, 0, 0, 0, 1, 2, 3]
