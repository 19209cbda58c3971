"""Rows and what they say, by the table in rows.yaml: [..] is trained, f({..}) a call, (..) a thought."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from trireme.engine.data import answers, forms
from trireme.engine.data.read import BadRow

TABLE = yaml.load(Path(__file__).with_name("rows.yaml").read_text(), yaml.CSafeLoader)


def said(example):
    if isinstance(example, forms.Text):
        return f"{example.text[: example.begins]}[{example.text[example.begins :]}]"
    if isinstance(example, forms.Ids):
        trained = example.trained or [True] * len(example.ids)
        return " ".join(f"[{i}]" if yes else str(i) for i, yes in zip(example.ids, trained, strict=True)).replace(
            "] [", " "
        )
    return " | ".join(map(turn, example.messages))


def turn(message):
    content, calls = message.get("content") or "", message.get("tool_calls", [])
    written = lambda arguments: arguments if isinstance(arguments, str) else json.dumps(arguments)
    called = [f"{call['function']['name']}({written(call['function']['arguments'])})" for call in calls]
    thought = f"({message['reasoning_content']})" if "reasoning_content" in message else ""
    words = thought + ("+".join(content) if isinstance(content, list) else content) + "".join(called)
    trained = message["role"] == "assistant" and message.get("train", True)
    return f"{message['role']}: " + (f"[{words}]" if trained else words) if words else f"{message['role']}:"


def read(case, names=""):
    pairs = ",".join(filter(None, [case.get("map", ""), names]))
    classes = answers.classes_of(case.get("labels", ()))
    row = copy.deepcopy(case["row"])
    return answers.read_row(row, answers.parse_map(pairs), case.get("kind", ""), classes, case.get("table", False))


@pytest.mark.parametrize("case", TABLE, ids=lambda case: json.dumps(case["row"], default=str)[:60])
def test_what_a_row_says(case):
    if "bad" in case:
        with pytest.raises(BadRow) as error:
            read(case)
        assert case["bad"] in str(error.value)
        if "advice" in case:
            assert f"--map {case['advice']}" in str(error.value)
            read(case, case["advice"])
        return
    result, says = read(case), case["says"]
    assert [said(example) for example in result.examples] == (says if isinstance(says, list) else [says])
    assert sorted(result.unused) == sorted(case.get("unused", []))
    assert (result.weight, result.value) == (case.get("weight", 1), case.get("value", 0))


@pytest.mark.parametrize("prompt", ["a", " a  b", "x" * 300_000, "x" + " " * 300_000 + "y"])
@pytest.mark.parametrize("word", [" b", "  ", "\n\n"])
def test_what_answers_begin_with_is_their_prompt_to_its_last_word(prompt, word):
    good, _ = answers.read_row({side: prompt + word + side for side in ("chosen", "rejected")}, {}, "pairs").examples
    assert (good.text, good.begins) == (prompt + word + "chosen", len(prompt))


def test_a_tool_of_a_response_is_one_of_a_chat():
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chat = forms.chat_of({"messages": talk, "tools": [{"type": "function", "name": "f"}]})
    assert chat.tools == [{"type": "function", "function": {"name": "f"}}]


def test_answers_without_ids_are_of_the_call_of_their_name():
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in "fgf"]
    tools = [{"role": "tool", "content": "2", "name": name} for name in ("g", "f", None)]
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}, *tools]
    chat = forms.chat_of({"messages": talk})
    ids = [call["id"] for call in chat.messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in chat.messages[2:]] == [ids[1], ids[0], ids[2]]


@pytest.mark.parametrize(
    ("labels", "named", "names"),
    [
        ([1, 2, 3, 4, 5], (), ("1", "2", "3", "4", "5")),
        ([-1, 0, 1], (), ("-1", "0", "1")),
        (["b", "a", "b"], (), ("a", "b")),
        ([True, False], (), ("false", "true")),
        ([2.0, 0, 1], (), ("LABEL_0", "LABEL_1", "LABEL_2")),
        ([0, 2], ("neg", "neutral", "pos"), ("neg", "neutral", "pos")),
        (["-1", "0", "1"], (), ("-1", "0", "1")),
    ],
)
def test_names_of_classes(labels, named, names):
    rows = [{"text": "a", "label": label} for label in labels]
    broken = {"messages": '[{"role": "user", "role": "user"}]', "label": 9}
    assert answers.labels_in([*rows, broken], {}, named) == names
    classes = answers.classes_of(names)
    assert {answers.read_row(row, {}, "classes", classes).value for row in rows} <= {*range(len(names))}
