"""Rows in the conventions of TRL, axolotl, LLaMA-Factory and ShareGPT, and what is near to them."""

import json
import re

import pytest
from chats import said, user

from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.formats import read_row
from trireme.engine.data.formats.pairs import read_answers

system = lambda text: {"role": "system", "content": text}


def told(messages):
    return [(m["role"], m["content"]) for m in messages]


TALKS = {  # a row, and its messages
    "an input without an instruction": ({"instruction": "", "input": "q", "output": "a"}, [user("q"), said("a")]),
    "a message alone": ({"prompt": user("q"), "completion": said("a")}, [user("q"), said("a")]),
    "messages and a text": ({"prompt": [user("q")], "completion": "a"}, [user("q"), said("a")]),
    "a text and messages": ({"prompt": "q", "completion": [said("a")]}, [user("q"), said("a")]),
    "an empty text and messages": ({"prompt": " ", "completion": [user("q"), said("a")]}, [user("q"), said("a")]),
    "no messages and messages": ({"prompt": [], "completion": [user("q"), said("a")]}, [user("q"), said("a")]),
    "JSON of ShareGPT": (
        {"prompt": '[{"from": "human", "value": "q"}]', "completion": '[{"from": "gpt", "value": "a"}]'},
        [user("q"), said("a")],
    ),
    "JSON over lines": ({"prompt": json.dumps([user("q")], indent=2), "completion": "a"}, [user("q"), said("a")]),
    **{
        name: (
            {"conversations": [{"from": "human", "value": "q"}, {"from": name, "value": "a"}]},
            [user("q"), said("a")],
        )
        for name in ("bard", "bing", "claude", "ChatGPT")
    },
}


@pytest.mark.parametrize("case", TALKS)
def test_conversations(case):
    row, expected = TALKS[case]
    assert told(read_row(row)[1].messages) == told(expected)


def test_json_that_is_an_answer_is_a_text():
    for answer in ('[{"name": "x", "role": "admin"}]', '{"role": "admin"}', "[]", '{"a": 1}'):
        assert read_row({"prompt": "q", "completion": answer})[1].completion == answer
        row = {"prompt": "q", "chosen": answer, "rejected": "no"}
        assert [example.completion for example, _ in read_answers(row, "pairs")[1]] == [answer, "no"]


def test_columns_that_say_that_a_row_is_learned():
    for more in (
        {"train": "True"},
        {"train": 1},
        {"mask": "0"},
        {"loss": 0.0},
        {"loss_mask": [1, 1]},
        {"weight": "low"},
    ):
        assert read_row({"text": "a"} | more)[2] == list(more)


PROMPTS = {  # prompt, what both sides begin with, what is before the answer
    "a system message in the prompt alone": ([system("s"), user("q")], [user("q")], [system("s"), user("q")]),
    "a system message in the answers alone": ([user("q")], [system("s"), user("q")], [system("s"), user("q")]),
    "the first question": ("q", [user("q"), said("b"), user("r")], [user("q"), said("b"), user("r")]),
    "the last question": ("r", [user("q"), said("b"), user("r")], [user("q"), said("b"), user("r")]),
    "an end that is shared": ([user("q"), said("b"), user("r")], [user("r")], [user("q"), said("b"), user("r")]),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_of_pairs(case):
    prompt, begun, before = PROMPTS[case]
    row = {"prompt": prompt, "chosen": [*begun, said("good")], "rejected": [*begun, said("bad")]}
    answers = [told(chat.messages) for chat, _ in read_answers(row, "pairs")[1]]
    assert answers == [told([*before, said("good")]), told([*before, said("bad")])]


def test_a_label_that_is_null_gives_way_to_its_other_name():
    row = {"prompt": "q", "completion": "a", "label": None, "kto_tag": False}
    assert read_answers(row, "labels")[1][0][1] == -1


CALLED = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OTHERS = {  # rows of other trainers: format, and what is before either answer
    "OpenAI": ({"input": {"messages": [user("q")], "tools": [{"name": "f"}], "parallel_tool_calls": True},
                "preferred_output": [said("good")], "non_preferred_output": [said("bad")]}, [user("q")]),
    "ms-swift": ({"messages": [system("s"), user("q"), said("good")], "rejected_response": "bad"},
                 [system("s"), user("q")]),
    "ms-swift's messages": ({"messages": [user("q"), said("good")], "rejected_messages": [user("q"), said("bad")]},
                            [user("q")]),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_pairs_of_other_trainers(case):
    row, before = OTHERS[case]
    _, ((good, one), (bad, other)), unused = read_answers(row, "pairs")
    assert (one, other, unused) == (1, 1, ["input.parallel_tool_calls"] if case == "OpenAI" else [])
    assert told(good.messages) == told([*before, said("good")])
    assert told(bad.messages) == told([*before, said("bad")])
    assert (good.tools is not None) == (case == "OpenAI")
    assert [weight for _, weight in read_answers(row, "labels")[1]] == [1, -1]


@pytest.mark.parametrize(("row", "says"), [
    ({"input": "q", "preferred_output": [said("a")], "non_preferred_output": [said("b")]}, "'input' is a string, exp"),
    ({"input": {}, "preferred_output": [said("a")], "non_preferred_output": [said("b")]}, "'input' has no 'messages'"),
    ({"input": {"messages": [user("q")], "images": ["x.png"]}, "preferred_output": [said("a")],
      "non_preferred_output": [said("b")]}, "'input': 'images' holds content that is not text"),
    ({"messages": [user("q")], "rejected_response": "b"}, "'messages' does not end with the assistant's message"),
    ({"messages": [user("q"), said("a")], "system": 0, "rejected_response": "b"}, "'system' is a number, exp"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "images": ["x.png"]}, "'images' holds content that is not text"),
])  # fmt: skip
def test_pairs_of_other_trainers_that_are_refused(row, says):
    for kind in ("pairs", "labels", "rewards"):
        with pytest.raises(BadRow, match=re.escape(says)):
            read_answers(row, kind)


def test_of_two_bad_answers_of_ms_swift_the_messages_count():
    row = {"messages": [user("q"), said("a")], "rejected_messages": [user("q"), said("b")], "rejected_response": "c"}
    form, (_, (bad, _)), unused = read_answers(row, "pairs")
    assert (form.name, told(bad.messages)[-1]) == ("messages,rejected_messages", ("assistant", "b"))
    assert unused == ["rejected_response"]


def test_messages_of_anthropic():
    """Calls and answers of tools are parts of the content; the system message and answers are lists of parts."""
    text = lambda said: {"type": "text", "text": said}
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Rom"}}
    answer = {"type": "tool_result", "tool_use_id": "t1", "content": [text("20")], "is_error": False}
    row = {
        "system": [text("s") | {"cache_control": {"type": "ephemeral"}}],
        "messages": [
            user("q"),
            said([text("Let me look."), use]),
            user([answer, text("Well?")]),
            said([text("Warm.")]),
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    }
    _, chat, unused = read_row(row)
    assert unused == ["messages[].content[].cache_control"]
    assert told(chat.messages) == [
        ("system", "s"), ("user", "q"), ("assistant", "Let me look."), ("tool", "20"), ("user", "Well?"),
        ("assistant", "Warm."),
    ]  # fmt: skip
    assert chat.messages[2]["tool_calls"] == [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"city": "Rom"}}}
    ]
    assert list(chat.messages[2]["tool_calls"][0]) == ["id", "type", "function"]  # templates write them in this order
    assert chat.messages[3]["tool_call_id"] == "t1"
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]
    assert read_row({"messages": [user("q"), said([use])]})[1].messages[1]["content"] == ""
    row = {"messages": [user("q"), said([use | {"caller": "x"}]), user([answer]) | {"name": "n"}, said("a")]}
    _, chat, unused = read_row(row)
    assert (unused, chat.messages[2]["name"]) == (["messages[].tool_calls[].caller"], "n")
    for bad, says in (
        (said([use, text("more")]), "messages[1] has a part after tool_use; calls come last"),
        (said([text("a"), {**use, "name": None}]), "messages[1]: 'tool_calls' is not a list"),
        (user([use]), "messages[1] has calls, and the role 'user'"),
        (user([text("a"), answer]), "messages[1] has a part before tool_result; answers come first"),
        (user([answer, {"type": "image", "source": {}}]), "messages[1] holds a part of type 'image'"),
        (said([use, answer]), "messages[1] holds tool_use and tool_result"),
    ):
        with pytest.raises(BadRow, match=re.escape(says)):
            read_row({"messages": [user("q"), bad, said("a")]})
