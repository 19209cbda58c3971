"""Rows with classes and pairs with margins: one token of each document is scored, the one that transformers reads."""

import json
from decimal import Decimal

import numpy as np
import pytest

from trireme.engine.data.dataset import DataOptions, find_labels, load_dataset
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.classes import class_of, read_class
from trireme.engine.data.pairs import scored
from trireme.models.config import InputError

NAMES = ("bad", "good")


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(folder, rows, codec, kind="classes", **options):
    given = {"seq_len": 256, "kind": kind, "labels": NAMES} | options
    return load_dataset([write(folder, rows)], codec, DataOptions(**given))


def documents(data):
    """[(text, place of the label from the end, label, weight, margin)]"""
    found = []
    for mb in data.batches(99):
        ends = np.cumsum(mb.lengths)
        for i, (stop, length) in enumerate(zip(ends, mb.lengths, strict=True)):
            labels = mb.labels[stop - length : stop]
            ((place,),) = np.nonzero(labels >= 0)
            weight, margin = (None if part is None else part[i] for part in (mb.weights, mb.reference))
            text = data.codec.decode(mb.ids[stop - length : stop])
            found.append((text, int(length - 1 - place), int(labels[place]), weight, margin))
    return sorted(found)


def test_a_text_is_as_its_tokenizer_has_it(tmp_path, codecs):
    """Without an end token; a prompt and its completion are one text."""
    rows = [dict(text="b", label="good"), dict(prompt="a", completion=" c", label=0), dict(text="d", label="1")]
    data = load(tmp_path, rows, codecs[0])
    assert documents(data) == [("<s>a c", 0, 0, None, None), ("<s>b", 0, 1, None, None), ("<s>d", 0, 1, None, None)]
    assert (data.trained * data.tokens, data.report.fitted.unlearnable, data.options.paired) == (3, 0, False)
    assert "trained" not in " ".join(data.report.lines())
    assert data.example(0).endswith(" -> good")
    again = load(tmp_path, [rows[0] | {"label": "bad"}, *rows[1:]], codecs[0])
    assert again.fingerprint != data.fingerprint


def test_a_conversation_ends_with_any_message(tmp_path, codecs):
    talk = [{"role": "user", "content": "hi"}]
    told = [*talk, {"role": "assistant", "content": "yes"}]
    data = load(tmp_path, [dict(messages=talk, label="bad"), dict(messages=told, label="good")], codecs[1])
    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert [found[:3] for found in documents(data)] == [
        (user, 0, 0),
        (f"{user}<|im_start|>assistant\nyes<|im_end|>\n", 0, 1),
    ]


def test_the_padding_is_not_scored(tmp_path, codecs):
    """The last token that is another, as transformers finds it; the first of a document of padding alone."""
    ids = np.array([5, 7, 7, 7, 7, 5])
    assert scored(ids, np.array([3, 2, 1]), 7).tolist() == [0, 3, 5]
    assert scored(ids, np.array([3, 2, 1]), None).tolist() == [2, 4, 5]
    pad = codecs[0].facts.eos
    pairs = [
        dict(prompt="a", chosen=" b", rejected=" c", margin=0.5, weight=2),
        dict(prompt="d", chosen="e", rejected="f"),
    ]
    data = load(tmp_path, pairs, codecs[0], "rewards", pad=pad)
    assert documents(data) == [
        ("<s>a b</s>", 1, 0, 2.0, 0.5), ("<s>a c</s>", 1, 0, 2.0, 0.0),
        ("<s>de</s>", 1, 0, 1.0, 0.0), ("<s>df</s>", 1, 0, 1.0, 0.0),
    ]  # fmt: skip
    assert data.options.paired
    assert "not used" not in " ".join(data.report.lines())


def test_of_a_pair_both_answers_must_be_left(tmp_path, codecs):
    """Else what is compared is the same."""
    rows = [dict(prompt="abcdefghij", chosen="k", rejected="l"), dict(prompt="a", chosen="b", rejected="c")]
    data = load(tmp_path, rows, codecs[0], "rewards", seq_len=12)
    assert (len(data.pieces), data.report.fitted.unlearnable) == (2, 1)


@pytest.mark.parametrize("kind", ["classes", "rewards"])
def test_a_document_that_is_cut_is_scored_at_its_new_end(tmp_path, codecs, kind):
    pair = dict(prompt="a", chosen="klmnopq", rejected="kl")
    rows = [pair if kind == "rewards" else dict(text="abcdefghij", label="good")]
    data = load(tmp_path, rows, codecs[0], kind, seq_len=8)
    assert [found[1] for found in documents(data)] == [0] * (1 if kind == "classes" else 2)
    assert data.report.fitted.cut == 1
    with pytest.raises(InputError, match="--long split"):
        load(tmp_path, rows, codecs[0], kind, seq_len=8, long="split")


BAD = {
    "'label' is 'ugly', which is none of bad, good": dict(label="ugly"),
    "'label' is 2, which is none of bad, good": dict(label=2),
    "'label' is 0.5, no class: regression is not supported": dict(label=0.5),
    "'label' is a list, expected one class: several labels": dict(label=["bad"]),
    "'label' is True, which is none of bad, good": dict(label=True),
    "'label' is 0.5, no class: regression": dict(label=Decimal("0.5")),
    "'label' is NaN, no class": dict(label=Decimal("nan")),
    "'label' is '9999": dict(label="9" * 5000),
    "has no 'label', the class of the row": dict(),
    "'images' holds content that is not text": dict(
        label="bad", messages=[{"role": "user", "content": "q"}], images=["x.png"]
    ),
    "'train' is false": dict(label="bad", messages=[{"role": "user", "content": "q"}], train=False),
}


@pytest.mark.parametrize("says", BAD)
def test_bad_rows(says):
    with pytest.raises(BadRow) as error:
        read_class(dict(text="a") | BAD[says], {}, NAMES)
    assert says in str(error.value)


def test_a_number_may_be_a_name():
    stars = ("2", "1")
    assert [class_of(value, stars) for value in ("1", "2")] == [1, 0]
    with pytest.raises(BadRow, match="'label' is 1, the name of class 1|the name of class 0"):
        class_of(2, stars)
    assert class_of(1, stars) == 1
    assert class_of(1.0, NAMES) == 1
    assert class_of(True, ("false", "true")) == 1
    assert class_of(Decimal("1.00"), NAMES) == 1


def test_labels_of_data(tmp_path):
    find = lambda *labels, **more: find_labels(
        [write(tmp_path, [dict(text="a", label=each, **more) for each in labels])], None
    )
    assert find("pos", "neg", "pos") == ("neg", "pos")
    assert find(0, 2) == find("0", "2") == find(2.0, 0) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert find(True, False) == ("false", "true")
    with pytest.raises(InputError, match="--data has one class alone, pos"):
        find("pos")
    for labels, says in (((0.5, 1.5), "no class: regression"), (([0, 1], [1, 0]), "a list, expected one class")):
        with pytest.raises(InputError, match=says):
            find(*labels)
    with pytest.raises(InputError, match="more than 1,000 different values"):
        find(*map(str, range(1002)), "x")
    with pytest.raises(InputError, match="no row with a 'label'"):
        find_labels([write(tmp_path, [dict(text="a", sentiment="pos")])], None)
    assert find_labels([write(tmp_path, [dict(text="a", mood=m) for m in "xy"])], "label=mood") == ("x", "y")
    with pytest.raises(InputError, match="--data -"):
        find_labels(["-"], None)


def test_margins_are_numbers(tmp_path, codecs):
    with pytest.raises(InputError, match="'margin' is 'much', expected a number"):
        load(tmp_path, [dict(prompt="a", chosen="b", rejected="c", margin="much")], codecs[0], "rewards")
