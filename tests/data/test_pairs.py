"""Answers that are compared: every spelling is read to the same tokens, pairs stay together, weights are kept."""

import csv
import json
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.pairs import is_weighted, read_answers, weight_of
from trireme.engine.data.pairs import fit, packed
from trireme.engine.run.report import data_lines
from trireme.models.config import InputError

KINDS = ("pairs", "labels")


def load(tmp_path, rows, codec, kind="pairs", **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_dataset([str(path)], codec, DataOptions(**{"seq_len": 256, "kind": kind} | options))


def documents(data):
    """[(text, [trained parts joined], weight)] in the order of the file; a document follows its partner."""
    found = []
    for batch in data.batches(1):
        ends = np.cumsum(batch.lengths)
        assert len(ends) % 2 == 0
        for stop, length, weight in zip(ends, batch.lengths, batch.weights, strict=True):
            ids, labels = batch.ids[stop - length : stop], batch.labels[stop - length : stop]
            learned = labels[labels >= 0]
            found.append((data.codec.decode(ids), data.codec.decode(learned), weight))
    return found


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def gpt(text):
    return {"from": "gpt", "value": text}


TALKS = {
    "prompt as messages": dict(prompt=[user("q")], chosen=[assistant("good")], rejected=[assistant("bad")]),
    "messages of the whole": dict(chosen=[user("q"), assistant("good")], rejected=[user("q"), assistant("bad")]),
    "ultrafeedback": dict(
        prompt="q", prompt_id="f0", chosen=[user("q"), assistant("good")], rejected=[user("q"), assistant("bad")],
        messages=[user("q"), assistant("good")], score_chosen=8.0, score_rejected=2.0),
    "prompt as text, answers as messages": dict(prompt="q", chosen=[assistant("good")], rejected=[assistant("bad")]),
    "one message a side": dict(prompt=[user("q")], chosen=assistant("good"), rejected=assistant("bad")),
    "texts after messages": dict(prompt=[user("q")], chosen="good", rejected="bad"),
    "sharegpt": dict(conversations=[{"from": "human", "value": "q"}], chosen=gpt("good"), rejected=gpt("bad")),
    "messages and a turn": dict(messages=[user("q")], chosen=assistant("good"), rejected=assistant("bad")),
    "alpaca": dict(instruction="q", input="", chosen="good", rejected="bad"),
    "hh-rlhf": dict(
        chosen="\n\nHuman: q\n\nAssistant: good", rejected="\n\nHuman: q\n\nAssistant: bad"),
    "JSON in a text": dict(
        prompt="q", chosen=json.dumps([user("q"), assistant("good")]),
        rejected=json.dumps([user("q"), assistant("bad")])),
}  # fmt: skip
ASKED = "<s><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("case", TALKS)
def test_conversations_in_every_spelling(tmp_path, codecs, case):
    data = load(tmp_path, [TALKS[case]], codecs[1])
    (good, learned, weight), (bad, unlearned, _) = documents(data)
    assert good.removeprefix("<s>") == ASKED.removeprefix("<s>") + "good<|im_end|>\n"
    assert bad.removeprefix("<s>") == ASKED.removeprefix("<s>") + "bad<|im_end|>\n"
    assert (learned, unlearned, weight) == ("good<|im_end|>", "bad<|im_end|>", 1.0)
    unused = {"ultrafeedback": ("prompt_id", "messages", "score_chosen", "score_rejected")}
    assert data.report.files[0].unused == unused.get(case, ())


def test_earlier_turns_are_context(tmp_path, codecs):
    before = [user("a"), assistant("b"), user("q")]
    rows = [
        dict(prompt=before, chosen=[assistant("good")], rejected=[assistant("bad")]),
        dict(chosen=[*before, assistant("good")], rejected=[*before, assistant("bad")]),
        dict(instruction="q", history=[["a", "b"]], chosen="good", rejected="bad"),
        dict(
            chosen="\n\nHuman: a\n\nAssistant: b\n\nHuman: q\n\nAssistant: good",
            rejected="\n\nHuman: a\n\nAssistant: b\n\nHuman: q\n\nAssistant: bad",
        ),
    ]
    seen = [documents(load(tmp_path, [row], codecs[1])) for row in rows]
    assert all(each == seen[0] for each in seen)
    assert [learned for _, learned, _ in seen[0]] == ["good<|im_end|>", "bad<|im_end|>"]


TEXTS = {
    "prompt": (dict(prompt="Q: ", chosen="good", rejected="bad"), "Q: "),
    "hh-rlhf": (
        dict(chosen="\n\nHuman: q\n\nAssistant: good", rejected="\n\nHuman: q\n\nAssistant: bad"),
        "\n\nHuman: q\n\nAssistant:",
    ),
    "what both begin with": (dict(chosen="Say it: good", rejected="Say it: gold"), "Say it:"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_without_a_template(tmp_path, codecs, case):
    row, prompt = TEXTS[case]
    for (text, learned, _), whole in zip(
        documents(load(tmp_path, [row], codecs[0])), (row["chosen"], row["rejected"]), strict=True
    ):
        answer = whole.removeprefix(prompt)
        assert text == f"<s>{prompt}{answer}</s>"
        assert learned == f"{answer}</s>"


LABELLED = {
    "texts": lambda q, a, good: dict(prompt=q, completion=a, label=good),
    "numbers": lambda q, a, good: dict(prompt=q, completion=a, label=int(good)),
    "words": lambda q, a, good: dict(prompt=q, completion=a, label=str(good)),
    "another tag": lambda q, a, good: dict(prompt=q, completion=a, kto_tag=good),
}


@pytest.mark.parametrize("case", LABELLED)
def test_labelled_answers_have_a_counterpart(tmp_path, codecs, case):
    """The row's prompt with the answer of the row before; of the first, with that of the second."""
    make = LABELLED[case]
    rows = [make("a", "1", True), make("b", "2", False), make("c", "3", True)]
    seen = documents(load(tmp_path, rows, codecs[0], "labels"))
    pairs = sorted(zip(seen[::2], seen[1::2], strict=True))
    assert pairs == [
        (("<s>a1</s>", "1</s>", 1.0), ("<s>a2</s>", "2</s>", 1.0)),
        (("<s>b2</s>", "2</s>", -1.0), ("<s>b1</s>", "1</s>", -1.0)),
        (("<s>c3</s>", "3</s>", 1.0), ("<s>c2</s>", "2</s>", 1.0)),
    ]


def test_labels_of_a_table(tmp_path, codecs):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion", "label"], ["a", "1", "True"], ["b", "2", "False"]])
    data = load_dataset([str(path)], codecs[0], DataOptions(seq_len=64, kind="labels"))
    assert sorted(weight for _, _, weight in documents(data)) == [-1.0, -1.0, 1.0, 1.0]


def test_pairs_are_two_labelled_answers(tmp_path, codecs):
    seen = documents(load(tmp_path, [dict(prompt="a", chosen="1", rejected="2")], codecs[0], "labels"))
    assert sorted(zip(seen[::2], seen[1::2], strict=True)) == [
        (("<s>a1</s>", "1</s>", 1.0), ("<s>a2</s>", "2</s>", 1.0)),
        (("<s>a2</s>", "2</s>", -1.0), ("<s>a1</s>", "1</s>", -1.0)),
    ]


def test_a_labelled_answer_alone_has_no_counterpart(tmp_path, codecs):
    with pytest.raises(InputError, match="one row alone"):
        load(tmp_path, [dict(prompt="a", completion="1", label=True)], codecs[0], "labels")


WORDS = ("prompt", "chosen", "rejected", "completion", "label", "messages", "conversations", "instruction", "output")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.sampled_from(["", "a b", "\n\nHuman: a\n\nAssistant: b", "true"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "weight"]), inner, max_size=3)
        | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x", ""]), "content": inner})
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from((*WORDS, "weight", "history", "system")), VALUES), st.sampled_from(KINDS))
def test_any_row_is_read_or_bad(row, kind):
    with suppress(BadRow):
        form, answers, _ = read_answers(row, kind)
        assert len(answers) == (1 if form.labelled else 2)
        assert all(abs(weight) > 0 for _, weight in answers)


BAD = {
    "'chosen' and 'rejected' are of different kinds": dict(prompt="q", chosen="a", rejected=[assistant("b")]),
    "an answer is empty": dict(prompt="q", chosen="a", rejected=" "),
    "every assistant message is empty": dict(prompt=[user("q")], chosen=[assistant("")], rejected=[assistant("b")]),
    "no message in common": dict(chosen=[user("q"), assistant("a")], rejected=[user("r"), assistant("b")]),
    "'prompt' is not what": dict(
        prompt="z", chosen=[user("q"), assistant("a")], rejected=[user("q"), assistant("b")]),
    "do not share a turn": dict(chosen="\n\nHuman: q\n\nAssistant: a", rejected="\n\nHuman: r\n\nAssistant: a"),
    "no format of preferences has its keys": dict(prompt="q", completion="a"),
    "Labelled answers are for --method kto": dict(prompt="q", completion="a", label=True),
    "'weight' is -1": dict(prompt="q", chosen="a", rejected="b", weight=-1),
    "the role 'user', expected 'assistant'": dict(
        prompt=[user("q")], chosen=[assistant("a"), user("b")], rejected=[assistant("c")]),
}  # fmt: skip


@pytest.mark.parametrize("says", BAD)
def test_bad_rows(says):
    with pytest.raises(BadRow) as error:
        read_answers(BAD[says], "pairs")
    assert says in str(error.value)


def test_a_bad_row_is_counted_once_and_leaves_the_others_whole(tmp_path, codecs):
    rows = [dict(prompt=f"{i}", chosen="a" * i, rejected="\ud800" if i == 2 else "b") for i in range(1, 5)]
    with pytest.raises(InputError, match="line 2: .*half of a surrogate pair.* 1 of 4 rows is bad"):
        load(tmp_path, rows, codecs[0])
    alpaca = dict(instruction="5", chosen="a", rejected="\ud800")
    data = load(tmp_path, [*rows, alpaca, alpaca | {"chosen": "\ud800"}], codecs[0], skip_bad=True)
    assert (data.report.files[0].bad, data.report.files[0].format) == (3, "prompt,chosen,rejected")
    labelled = load(tmp_path, [*rows, alpaca, alpaca | {"chosen": "\ud800"}], codecs[0], "labels", skip_bad=True)
    assert labelled.report.files[0] == data.report.files[0]
    seen = documents(data)
    texts = {(good[0], bad[0]) for good, bad in zip(seen[::2], seen[1::2], strict=True)}
    assert texts == {(f"<s>{i}{'a' * i}</s>", f"<s>{i}b</s>") for i in (1, 3, 4)}


def test_weights_of_rows(tmp_path, codecs):
    rows = [dict(prompt="q", chosen="a", rejected="b", weight=w) for w in (0.5, "2")]
    data = load(tmp_path, rows, codecs[0])
    assert sorted(weight for _, _, weight in documents(data)) == [0.5, 0.5, 2.0, 2.0]
    assert any("'weight', 0.5 to 2" in note for note in data.report.notes)
    again = load(tmp_path, rows, codecs[0])
    assert again.fingerprint == data.fingerprint
    assert load(tmp_path, [*rows[:1], rows[1] | {"weight": 3}], codecs[0]).fingerprint != data.fingerprint


def test_rows_of_their_own_have_weights_too(tmp_path, codecs):
    rows = [dict(text="a b c", weight=0.25), dict(text="d"), dict(text="e", weight=2)]
    data = load(tmp_path, rows, codecs[0], "")
    (batch,) = data.batches(9)
    by_length = dict(zip(batch.lengths, batch.weights.tolist(), strict=True))
    assert by_length[7] == 0.25
    assert sorted(batch.weights) == [0.25, 1.0, 2.0]
    assert not data.report.files[0].unused
    plain = load(tmp_path, [dict(text="a", weight="heavy")], codecs[0], "")
    assert next(plain.batches(1)).weights is None
    assert plain.report.files[0].unused == ("weight",)


@pytest.mark.parametrize(("value", "weighs"), [(1, True), ("2.5", True), ("5kg", False), (True, False), (None, False)])
def test_a_weight_is_a_number(value, weighs):
    assert is_weighted({"weight": value}) == weighs
    assert weight_of({"weight": value}) == (float(value) if weighs else 1.0)


class File:
    meta = dict(format="prompt,chosen,rejected")

    def read(self, start, stop):
        return np.array([5] * 9 + [5 | 1 << 15] * 90, np.uint16)[start % 99 : start % 99 + stop - start]


def made(lengths):
    from trireme.engine.data.documents import DOCUMENT

    docs = np.zeros(len(lengths), DOCUMENT)
    docs["length"], docs["trained"], docs["start"] = lengths, np.array(lengths) - 9, 99 * np.arange(len(lengths))
    return docs


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([20, 30], [20, 30]),
        ([20, 60], [20, 44]),
        ([60, 20], [44, 20]),
        ([40, 50], [32, 32]),
        ([32, 33], [32, 32]),
    ],
)
def test_long_pairs_are_cut_at_their_ends(lengths, expected):
    fitted = fit(made(lengths), [File()], 64, None)
    assert fitted.pieces["length"].tolist() == expected
    assert (fitted.longer, fitted.cut) == ((1, 1) if lengths != expected else (0, 0))


def test_pairs_without_an_answer_in_what_is_kept_are_dropped():
    fitted = fit(made([20, 20, 30, 30, 12, 12]), [File()], 18, None)
    assert fitted.unlearnable == 3
    fitted = fit(made([20, 20, 12, 12]), [File()], 30, "drop")
    assert (fitted.dropped, fitted.pieces["length"].tolist()) == (1, [12, 12])
    with pytest.raises(InputError, match="1 pairs have more than --seq-len 30"):
        fit(made([20, 20, 12, 12]), [File()], 30, "error")
    with pytest.raises(InputError, match="--long split"):
        fit(made([20, 20]), [File()], 30, "split")


@pytest.mark.parametrize("together", [True, False])
def test_pairs_share_a_row(together):
    random = np.random.default_rng(0)
    pieces = fit(made(random.integers(10, 30, 40).tolist()), [File()], 64, None).pieces
    order, rows = packed(pieces, 64, together)
    assert sorted(order) == list(range(40))
    assert (order[::2] % 2 == 0).all()
    assert (order[1::2] == order[::2] + 1).all()
    assert (rows % 2 == 0).all()
    sums = [pieces["length"][order[a:b]].sum() for a, b in zip(rows, rows[1:], strict=False)]
    assert max(sums) <= 64
    assert (len(sums) == 20) == (not together)


@pytest.mark.parametrize(
    ("row", "kind", "names"),
    [
        (dict(prompt="q", chosen="good", rejected="bad"), "pairs", "instruction=prompt"),
        (dict(prompt="q", completion="good", label=True), "labels", "instruction=prompt,output=completion"),
    ],
)
def test_texts_are_offered_the_chat_template(tmp_path, codecs, row, kind, names):
    data = load(tmp_path, [row, row], codecs[1], kind)
    (note,) = [note for note in data.report.notes if "chat template" in note]
    assert note.endswith(f"--map {names}")
    data = load(tmp_path, [row, row], codecs[1], kind, map=names)
    assert documents(data)[0][0].removeprefix("<s>") == ASKED.removeprefix("<s>") + "good<|im_end|>\n"
    assert load(tmp_path, [row, row], codecs[0], kind).report.notes == ()


def test_held_out_pairs_are_whole(tmp_path, codecs):
    rows = [dict(prompt=f"{i:02}", chosen="good", rejected="bad") for i in range(20)]
    data = load(tmp_path, rows, codecs[0], val="0.25")
    seen, held = documents(data), documents(data.held_out)
    assert (len(seen), len(held)) == (30, 10)
    assert all(good[0].endswith("good</s>") for good in (seen + held)[::2])
    assert {text for text, _, _ in seen + held} == {f"<s>{i:02}{a}</s>" for i in range(20) for a in ("good", "bad")}


def test_the_report_shows_both_answers(tmp_path, codecs):
    data = load(tmp_path, [dict(prompt="q", chosen="good", rejected="bad")], codecs[0])
    assert data.example() == "good: <s>q[good</s>]\n         bad:  <s>q[bad</s>]"
    assert "1 row, format" in data.report.lines()[0]
    lines = data_lines(SimpleNamespace(read=data, work=None, options=SimpleNamespace(show_example=1)))
    assert lines[-2:] == ["example  good: <s>q[good</s>]", "         bad:  <s>q[bad</s>]"]
