"""Rows of strangers: what they say is used, or the row is refused, or what is not used is named."""

import json
import math

import pytest
from chats import bracketed, encoded, example_of, make_tokenizer, said, unused_of, user

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.examples import Chat, Ids
from trireme.engine.data.formats.formats import parse_map, read_row
from trireme.engine.data.formats.pairs import read_answers
from trireme.engine.data.templates import CHATML, load_template
from trireme.models.config import InputError

TALK = [user("Hi?"), said("Hello."), user("Bye?"), said("Bye.")]
TAGLESS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
WHOLE = ChatTemplate({"default": CHATML}, {"bos_token": "", "eos_token": "</s>"})
CALLS = ChatTemplate({"default": TAGLESS}, {})


def marked(row, template=CALLS):
    """The text that a template makes of a row, with [..] around what is trained, and openings shortened."""
    example = example_of(row)
    text, spans, *_ = template.mark(example.messages, example.tools, example.variables)
    for start, stop in reversed(spans):
        text = f"{text[:start]}[{text[start:stop]}]{text[stop:]}"
    return text.replace("<|im_start|>", "@").replace("<|im_end|>]\n", "$]").replace("<|im_end|>\n", "$")


def refused(row, template=None):
    with pytest.raises(BadRow) as error:
        example = example_of(row)
        if template:
            template.mark(example.messages, example.tools, example.variables)
    return str(error.value)


# ---------------------------------------------------------------- calls

FERRY = {"name": "ferry_times", "arguments": '{"day": 1}'}
CALLED = '@assistant\n[<call>ferry_times {"day": 1}</call>$]'


@pytest.mark.parametrize("content", ["", None, "Let me look."])
@pytest.mark.parametrize(
    "call",
    [
        {"function_call": FERRY},
        {"function_call": json.dumps(FERRY)},
        {"tool_calls": [{"type": "function", "function": FERRY}]},
        {"tool_calls": json.dumps([{"function": FERRY}])},
        {"tool_calls": [{"function": {"name": "ferry_times", "parameters": {"day": 1}}}]},
        {"tool_calls": [{"function": {"name": "ferry_times", "arguments": {"day": 1}}}], "function_call": None},
    ],
)
def test_a_call_is_learned_in_every_spelling(content, call):
    row = {"messages": [user("When?"), {"role": "assistant", "content": content, **call}]}
    assert marked(row) == "@user\nWhen?$" + CALLED.replace("[", f"[{content or ''}")


def test_the_older_form_of_openai_with_its_answer():
    """Roles and columns as they were before `tools`; the answer belongs to the call."""
    talk = [user("When?"), said("", function_call=FERRY), {"role": "function", "name": "ferry_times", "content": "9"}]
    row = {"messages": [*talk, said("At nine.")], "functions": [{"name": "ferry_times", "parameters": {}}]}
    made = example_of(row)
    (call,) = made.messages[1]["tool_calls"]
    assert [m["role"] for m in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[2]["tool_call_id"] == call["id"]
    assert len(call["id"]) == 9
    assert made.tools == [{"type": "function", "function": {"name": "ferry_times", "parameters": {}}}]
    assert read_row(row)[2] == []


@pytest.mark.parametrize(
    "turns",
    [
        [user("When?"), {"role": "tool_call", "content": json.dumps(FERRY)}, {"role": "tool_response", "content": "9"}],
        [{"from": "human", "value": "When?"}, {"from": "function_call", "value": json.dumps(FERRY)},
         {"from": "observation", "value": "9"}],
        [{"from": "human", "value": "When?"}, {"from": "function_call", "value": [FERRY]},
         {"from": "tool", "value": "9"}],
    ],
)  # fmt: skip
def test_calls_as_turns_of_their_own(turns):
    column = "messages" if "role" in turns[0] else "conversations"
    row = {column: [*turns, {"role": "assistant", "content": "At nine."}]}
    if column == "conversations":
        row[column][-1] = {"from": "gpt", "value": "At nine."}
    assert marked(row) == f"@user\nWhen?${CALLED}@tool\n9$@assistant\n[At nine.$]"
    row[column][1]["loss"] = False
    assert marked(row) == f"@user\nWhen?${CALLED}@tool\n9$@assistant\n[At nine.$]".replace("[<", "<").replace(
        "$]@t", "$@t"
    )


NO_CALLS = "{% for m in messages %}@{{ m.role }}{% generation %}{{ m.content }}${% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        NO_CALLS,
        "{% for m in messages %}@{{ m.role }}{{ m.content }}${% endfor %}",
        NO_CALLS.replace("{% endfor %}", "{{ m.tool_calls }}{% endfor %}"),  # outside of the tags: not learned
    ],
)
def test_a_template_that_does_not_teach_the_calls_is_refused(source):
    talk = [user("When?"), said("", tool_calls=[{"function": FERRY}])]
    assert "does not write the tool calls of message 1" in refused(
        {"messages": talk}, ChatTemplate({"default": source}, {})
    )


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ({"arguments": ""}, "{}"),
        ({"arguments": "  "}, "{}"),
        ({"arguments": "{}"}, "{}"),
        ({"arguments": {}}, "{}"),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
        ({"parameters": {"x": 1}}, '{"x": 1}'),
        ({"arguments": '{"x": "a\\"b"}'}, '{"x": "a\\"b"}'),
    ],
)
@pytest.mark.parametrize("form", ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}",
                                  "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
                                  "{{ c.function.arguments | tojson }}{% endif %}"])  # fmt: skip
def test_arguments_are_json_whatever_the_row_has(function, arguments, form):
    """A template of objects, one of strings, one that takes both."""
    source = TAGLESS.replace("{{ c.function.arguments | tojson }}", form)
    row = {"messages": [user("?"), said("", tool_calls=[{"function": {"name": "f", **function}}])]}
    assert marked(row, ChatTemplate({"default": source}, {})) == f"@user\n?$@assistant\n[<call>f {arguments}</call>$]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("close it", "messages[0]: the arguments of a call of 'f' are not JSON (Expecting value"),
        ("[1]", "the arguments of a call of 'f' are a list, expected an object"),
        ('"x"', "are a string, expected an object"),
        (5, "are a number, expected an object"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments, says):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert says in refused({"messages": [said("", tool_calls=[call])]})
    assert "'function_call' is not {name, arguments}" in refused({"messages": [said("", function_call={"a": 1})]})


def test_nulls_of_arrow_that_were_written_as_json():
    """Of a call, those that its tool does not know; of a schema, all but a default."""
    schema = {"type": "object", "properties": {"town": {"type": "string", "default": None, "enum": None}, "b": None}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": None}}]
    for given, kept in (({"town": "Oslo", "b": None}, {"town": "Oslo"}), ({"town": None, "c": None}, {"town": None})):
        call = {"function": {"name": "f", "arguments": given}}
        made = example_of({"messages": [user("?"), said("", tool_calls=[call])], "tools": tools})
        properties = {"town": {"type": "string", "default": None, "enum": None}}
        assert made.messages[1]["tool_calls"][0]["function"]["arguments"] == kept
        function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
        assert made.tools == [{"type": "function", "function": function}]
    deep: list = []
    for _ in range(50_000):  # the limit depends on Python's version
        deep = [deep]
    assert "nested too deeply" in refused({"messages": TALK, "tools": [{"name": "f", "x": deep}]})
    call = {"function": {"name": "f", "arguments": {"limit": None}}}
    made = example_of({"messages": [user("?"), said("", tool_calls=[call])]})  # a null that nothing speaks against
    assert made.messages[1]["tool_calls"] == [call]


# ---------------------------------------------------------------- keys of messages and rows


def test_a_system_column_is_the_first_message():
    for row in (
        {"messages": TALK[:2], "system": "Be brief."},
        {"conversations": TALK[:2], "system": "Be brief."},  # in sharegpt's column, in the form of messages
        {
            "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}],
            "system": "Be brief.",
        },
        {"instruction": "Hi?", "output": "Hello.", "system": "Be brief."},
        {"messages": [{"role": "system", "content": "Be brief."}, *TALK[:2]], "system": "Be brief."},
        {"prompt": TALK[:1], "completion": TALK[1:2], "system": "Be brief."},
    ):
        assert marked(row) == "@system\nBe brief.$@user\nHi?$@assistant\n[Hello.$]"
        assert read_row(row)[2] == []
    both = {"messages": [{"role": "system", "content": "No."}, *TALK], "system": "Be brief."}
    assert "has a 'system' column and a system message" in refused(both)
    assert read_row(both, renames=parse_map("unused=system"))[1].messages[0]["content"] == "No."
    text = {"prompt": "Hi?", "completion": "Hello.", "system": "Be brief."}
    assert read_row(text)[2] == ["system"]


FLAGS = [("train", False), ("training", False), ("loss", False), ("loss", 0), ("loss_mask", 0), ("weight", 0),
         ("weight", 0.0), ("mask", True), ("masked", True), ("trainable", False), ("is_train", False), ("do_train", 0),
         ("learn", False), ("loss_scale", 0.0), ("loss_weight", 0), ("is_masked", True)]  # fmt: skip


@pytest.mark.parametrize(("key", "off"), FLAGS)
def test_a_turn_that_is_not_to_be_learned_is_context(key, off):
    on = (not off) if isinstance(off, bool) else 1
    expected = "@user\nHi?$@assistant\nHello.$@user\nBye?$@assistant\n[Bye.$]"
    assert marked({"messages": [TALK[0], said("Hello.", **{key: off}), TALK[2], said("Bye.", **{key: on})]}) == expected
    turns = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello.", key: off},
             {"from": "human", "value": "Bye?"}, {"from": "gpt", "value": "Bye.", key: None}]  # fmt: skip
    assert marked({"conversations": turns}) == expected
    for template in (WHOLE, CALLS):
        example = example_of({"messages": [said("A.", **{key: off}), said("B.")]})
        text, spans, *_ = template.mark(example.messages, None)
        assert [text[a:b] for a, b in spans] == ["B.<|im_end|>"]


def test_flags_that_say_neither_are_refused_and_those_of_others_named():
    for key, value in (("loss", 0.5), ("train", "false"), ("weight", 2), ("mask", 1), ("masked", "no")):
        assert f"{key!r} is {value!r}, expected" in refused({"messages": [said("a", **{key: value})]})
    assert "marks parts of a message" in refused({"messages": [said("a", train_detail=[{"begin_offset": 0}])]})
    for key, value in (("no_loss", True), ("ignore_loss", False), ("supervised", 0), ("token_weight", 1)):
        assert f"{key!r} is not a known mask; name it 'train'" in refused({"messages": [said("a", **{key: value})]})
    assert example_of({"messages": [said("a", training_id=17)]}).messages == [said("a", training_id=17)]
    row = {"messages": [user("Hi?", training=True), said("Hello.", training=True)]}
    assert read_row(row)[2] == ["messages[].training (role user)"]
    assert marked(row) == "@user\nHi?$@assistant\n[Hello.$]"


def test_keys_that_no_template_reads_are_named(tmp_path):
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=TAGLESS)
    template = load_template(tokenizer)
    talk = [user("Hi?", name="Eve", empty="", none=None), said("Hello.", refusal=[], mood="glad", loss=True)]
    assert unused_of({"messages": talk, "id": 7}, tokenizer, template) == ["id", "messages[].name", "messages[].mood"]
    turns = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello.", "mood": "glad"}]
    assert unused_of({"conversations": turns}, tokenizer, template) == ["messages[].mood"]
    reads = TAGLESS.replace("(m.content or '')", "(m.content or '') + (m.name or '') + (m['mood'] or '')")
    template = ChatTemplate({"default": reads}, {})
    assert unused_of({"messages": talk}, tokenizer, template) == []
    for form in ("{{ m | tojson }}", "{{ m.items() | list }}", "{% for k in m %}{{ m[k] }}{% endfor %}", "{{ m }}"):
        template = ChatTemplate({"default": "{% for m in messages %}@" + form + "${% endfor %}"}, {})
        assert template.mark([user("a", mood="glad")], None).unread == ()
    thoughts = said("Hello.", reasoning_content="Hm.")
    assert unused_of({"messages": [thoughts]}, tokenizer, CALLS) == ["messages[].reasoning_content"]
    reads = TAGLESS.replace("(m.content or '')", "(m.thinking or '') + (m.content or '')")
    assert unused_of({"messages": [thoughts]}, tokenizer, ChatTemplate({"default": reads}, {})) == []


def test_not_used_is_in_the_report(tmp_path):
    """Of columns, of messages, and of a column without a name, as pandas writes it."""
    tokenizer = make_tokenizer(tmp_path, chat_template=TAGLESS)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [user("a"), said("b", mood="glad")], "id": 1}))
    (tmp_path / "b.csv").write_text(",text\n0,once\n")
    codec = load_codec(tokenizer.folder)
    data = load_dataset([str(tmp_path / "a.jsonl"), str(tmp_path / "b.csv")], codec, DataOptions(seq_len=64))
    first, second, *_ = data.report.lines()
    assert first.endswith("not used: id, messages[].mood")
    assert second.endswith("not used: a column without a name")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "x"} | {f"k{i}": i for i in range(1, 31)}))
    assert load_dataset([str(tmp_path / "c.jsonl")], codec, DataOptions()).report.lines()[0].endswith("k20, 10 more")


@pytest.mark.parametrize(
    "roles",
    [("human", "bot"), ("user", "gpt"), ("human", "chatgpt"), ("User", "Chatbot"), ("human", "model"), ("user", "ai")],
)
def test_roles_of_other_names(roles):
    row = {"messages": [{"role": roles[0], "content": "Hi?"}, {"role": roles[1], "content": "Hello."}]}
    assert marked(row) == "@user\nHi?$@assistant\n[Hello.$]"


def test_a_conversation_as_a_string_and_under_another_name():
    for column in ("messages", "conversations"):
        assert marked({column: json.dumps(TALK[:2])}) == "@user\nHi?$@assistant\n[Hello.$]"
    made = example_of({"prompt": json.dumps(TALK[:1]), "completion": json.dumps(TALK[1:2])})
    assert isinstance(made, Chat)
    assert "expected a list of {role, content} (it looks like Python's; write it with json.dumps)" in refused(
        {"messages": str(TALK)}
    )
    for key in ("conversation", "dialogue"):
        assert refused({key: TALK}).endswith(f"Perhaps --map messages={key}.")
        assert refused({key: [{"from": "human", "value": "?"}]}).endswith(f"Perhaps --map conversations={key}.")


def test_thoughts_among_the_parts():
    """As Magistral's rows have them, as a text or as parts."""
    for thinking in ("Hm.", [{"type": "text", "text": "Hm."}]):
        parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "Hello."}]
        (message,) = example_of({"messages": [said(parts)]}).messages
        assert message == said("Hello.", reasoning_content="Hm.")
    told = [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]
    assert read_row({"messages": [said(told)]})[2] == ["messages[].content[].cache_control"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"messages": TALK, "images": ["a.png"]},
            "'images' holds content that is not text; only text can be trained on",
        ),
        ({"conversations": TALK, "image": "a.png"}, "--map unused=image"),
        ({"messages": TALK, "videos": [{"bytes": "x"}]}, "'videos'"),
        ({"text": "x", "audio": {"path": "a.wav"}}, "'audio'"),
        ({"messages": [user("x", images=["a"]), said("y")]}, "messages[0]: 'images'"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "a"}}])]}, "a part of type 'image_url'"),
        ({"messages": [user([{"type": "input_audio", "input_audio": {}}])]}, "a part of type 'input_audio'"),
        ({"input_ids": [1, 2], "pixel_values": [[0.5]]}, "'pixel_values'"),
    ],
)
def test_rows_of_more_than_text_are_refused(row, says):
    assert says in refused(row)


def test_an_empty_column_of_images_is_none():
    for value in (None, [], "", "[]"):
        assert example_of({"messages": TALK, "images": value}).messages == TALK


# ---------------------------------------------------------------- rows of ids


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks", "loss_mask"])
def test_masks_beside_ids(mask, tmp_path):
    """TRL writes them itself: by hand, 2 of 5 are trained, and what both masks say."""
    made = encoded({"input_ids": [1, 5, 6, 7, 2], mask: [0, 0, 0, 1, 1]}, None)
    assert made.trained.tolist() == [False, False, False, True, True]
    text = {"input_ids": "[1, 5, 6, 7, 2]", mask: "[0, 0, 0, 1, 1]"}  # as a CSV has them
    assert encoded(text, None).trained.tolist() == made.trained.tolist()
    both = {"input_ids": [1, 5, 6], mask: [0, 1, 1], "labels": [-100, -100, 6]}
    assert encoded(both, None).trained.tolist() == [False, False, True]
    assert read_row({"input_ids": [1, 5], mask: [0, 1]})[2] == []
    assert "has 1 entries, 'input_ids' 2" in refused({"input_ids": [1, 2], mask: [1]})
    other = {"input_ids": [1, 5, 6, 7, 2], "my_mask": [0, 0, 0, 1, 1]}
    hint = refused(other).rpartition("--map ")[2].partition(",")[0]
    assert read_row(other, renames=parse_map(hint))[1] == Ids([1, 5, 6, 7, 2], made.trained.tolist())
    assert refused({"tokens": [1, 5]}).endswith("Perhaps --map input_ids=tokens.")
    assert read_row({"input_ids": [1, 5], "special_tokens_mask": [1, 0]})[2] == ["special_tokens_mask"]
    assert "neither 0 nor 1" in refused({"input_ids": [1, 2], mask: [1, 0.5]})


def test_pads_are_left_out():
    pads = [0, 0]
    for before, after in (([], pads), (pads, []), (pads, pads)):
        row = {
            "input_ids": [*before, 1, 5, 6, 7, *after],
            "attention_mask": [0] * len(before) + [1] * 4 + [0] * len(after),
            "labels": [-100] * len(before) + [-100, -100, 6, 7] + [-100] * len(after),
        }
        made = encoded(row, None)
        assert made.ids.tolist() == [1, 5, 6, 7]
        assert made.trained.tolist() == [False, False, True, True]
        row.pop("labels")
        assert encoded(row, None).trained.tolist() == [False, True, True, True]
    assert example_of({"input_ids": [1, 2], "attention_mask": [1, 1]}) == Ids([1, 2])
    assert "between others" in refused({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]})
    assert "neither 0 nor 1" in refused({"input_ids": [1, 2, 3], "attention_mask": [1, 2, 2]})  # packed by others
    assert "every token" in refused({"input_ids": [1, 2], "attention_mask": [0, 0]})


def test_rows_that_others_packed_are_refused():
    assert example_of({"input_ids": [1, 2, 3], "position_ids": [0, 1, 2]}) == Ids([1, 2, 3])
    says = refused({"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]})
    assert "position_ids[2] is 0 after 1: the row holds several documents" in says
    assert "several documents" in refused({"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2]})
    assert read_row({"input_ids": [1, 2], "seq_lengths": [2], "token_type_ids": [0, 1]})[2] == ["token_type_ids"]


# ---------------------------------------------------------------- preferences

ASK, GOOD, BAD = [user("?")], [said("good")], [said("bad")]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "Human: ? Assistant: good", "rejected": "Human: ? Assistant: bad"},  # hh-rlhf's
        {"prompt": "?", "chosen": ASK + GOOD, "rejected": ASK + BAD, "messages": ASK + GOOD, "score_chosen": 9},
        {"prompt": "?", "chosen_response": "good", "rejected_response": "bad"},
        {"question": "?", "response_chosen": "good", "response_rejected": "bad"},
        {"messages": ASK + GOOD, "rejected_response": "bad"},  # ms-swift's
        {"messages": ASK + GOOD, "rejected_messages": ASK + BAD},
        {"prompt": "?", "preferred": "good", "dispreferred": "bad"},
        {"instruction": "?", "y_w": "good", "y_l": "bad", "rejected": "bad"},
        *({"prompt": "?", "completion": "good", "label": tag} for tag in (True, "True", "true", 1, "1", 1.0)),
        {"messages": ASK + GOOD, "kto_tag": "True"},
        {"instruction": "?", "output": "good", "label": "desirable"},
        {"chosen": json.dumps(ASK + GOOD), "rejected": json.dumps(ASK + BAD)},  # of a CSV
    ],
)
def test_preferences_are_refused_and_the_hint_works_when_followed(row):
    says = refused(row)
    assert "is preference data" in says
    form, made, unused = read_row(row, renames=parse_map(says.rpartition("--map ")[2]))
    assert "good" in repr(made)
    assert "bad" not in repr(made)


def test_a_hint_goes_with_the_map_that_is_given():
    row = {"ask": "?", "chosen": "good", "rejected": "bad"}
    with pytest.raises(BadRow) as error:
        read_row(row, renames=parse_map("prompt=ask"))
    text = str(error.value).rpartition("--map ")[2]
    assert text == "prompt=ask,completion=chosen,unused=rejected"
    assert read_row(row, renames=parse_map(text))[1].completion == "good"


def test_labels_of_something_else_are_named():
    for row in ({"text": "x", "label": 1}, {"text": "x", "label": "sports"}, {"messages": TALK, "label": "sports"}):
        assert read_row(row)[2] == ["label"]


def test_bad_answers_of_a_csv_are_not_trained(tmp_path):
    """A label in a CSV is a string."""
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion,label\n"Is ice cold? ","No, it burns.",False\n')
    codec = load_codec(make_tokenizer(tmp_path).folder)
    with pytest.raises(InputError, match=r"line 2: is preference data.* --map unused=label"):
        load_dataset([str(path)], codec, DataOptions(seq_len=64))


# ---------------------------------------------------------------- --system, shares


def test_a_system_message_for_rows_that_have_none(tmp_path):
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=TAGLESS)
    rows = [{"messages": TALK[:2]}, {"messages": [{"role": "system", "content": "Own."}, *TALK[:2]]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    codec, keys = load_codec(tokenizer.folder), set()
    for system, begins in ((None, "user"), ("Be kind.", "system\nBe kind.<|im_end|>\n<|im_start|>user")):
        options = DataOptions(seq_len=128, system=system, cache=tmp_path / "cache")
        data = load_dataset([str(tmp_path / "a.jsonl")], codec, options)
        assert data.example(0).replace("⏎", "\n").startswith(f"<|im_start|>{begins}\nHi?")
        assert data.example(1).startswith("<|im_start|>system⏎Own.")
        keys.add(data.files[0].meta["key"])
    assert len(keys) == 2
    (tmp_path / "b.jsonl").write_text('{"text": "once"}')
    data = load_dataset([str(tmp_path / "b.jsonl")], codec, DataOptions(seq_len=64, system="Be kind."))
    assert "note: --system is for conversations, and not used in other rows" in data.report.lines()


def test_variables_of_the_template_for_all_rows(tmp_path):
    """A row's own win; those that the template does not read are named."""
    template = "{{ mood }}" + TAGLESS
    tokenizer = make_tokenizer(tmp_path, bos="", chat_template=template)
    rows = [{"messages": TALK[:2]}, {"messages": TALK[:2], "chat_template_kwargs": {"mood": "calm "}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    codec, keys = load_codec(tokenizer.folder), set()
    for mood in ("kind ", "glad "):
        options = DataOptions(seq_len=128, variables={"mood": mood, "tone": 1}, cache=tmp_path / "cache")
        data = load_dataset([str(tmp_path / "a.jsonl")], codec, options)
        assert [data.example(k).split("<|im_start|>")[0] for k in (0, 1)] == [mood, "calm "]
        assert "not used: chat_template_kwargs.tone" in "\n".join(data.report.lines())
        keys.add(data.files[0].meta["key"])
    assert len(keys) == 2
    (tmp_path / "b.jsonl").write_text('{"text": "once"}')
    data = load_dataset([str(tmp_path / "b.jsonl")], codec, DataOptions(seq_len=64, variables={"mood": "kind"}))
    assert "note: --chat-template-kwargs is for conversations, and not used in other rows" in data.report.lines()


def test_a_share_of_a_file_is_the_same_in_every_epoch_and_that_is_said(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(10)))
    codec = load_codec(make_tokenizer(tmp_path).folder)
    data = load_dataset([f"{tmp_path / 'a.jsonl'}:0.5"], codec, DataOptions(seq_len=16, pack=False))
    assert "weight 0.5 (the same rows in every epoch)" in data.report.lines()[0]
    seen = [{batch.ids.tobytes() for i in range(5) for batch in data.step(5 * e + i, 1, 1)} for e in (0, 1)]
    assert seen[0] == seen[1]
    assert len(seen[0]) == math.ceil(10 * 0.5)


def test_prompt_and_completion_as_messages_are_no_joined_text(tmp_path):
    """The note that they are joined without a template was wrong; of strings it says the way to one, which works."""
    tokenizer = make_tokenizer(tmp_path, bos="", eos="<|im_end|>", chat_template=TAGLESS)
    row = {"prompt": TALK[:1], "completion": TALK[1:2]}
    assert bracketed(row, tokenizer, load_template(tokenizer)).endswith("assistant\n[Hello.<|im_end|>]\n")
    codec, path = load_codec(tokenizer.folder), tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    assert not load_dataset([str(path)], codec, DataOptions(seq_len=64)).report.notes
    for keys, given in ((("prompt", "completion"), None), (("ask", "reply"), "prompt=ask,completion=reply")):
        path.write_text(json.dumps(dict(zip(keys, ("Hi?", "Hello."), strict=True))))
        (note,) = load_dataset([str(path)], codec, DataOptions(seq_len=64, map=given)).report.notes
        hint = note.rpartition("--map ")[2]
        data = load_dataset([str(path)], codec, DataOptions(seq_len=64, map=hint))
        assert data.example().endswith("assistant⏎[Hello.<|im_end|>]⏎")


# ---------------------------------------------------------------- answers that are JSON

ASKING = [{"role": "user", "content": "q"}]
USERS, ANSWER = json.dumps(ASKING), json.dumps([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"prompt": "As JSON", "completion": USERS}, [USERS]),
        ({"prompt": "As JSON", "completion": '{"a": 1, "a": 2}'}, ['{"a": 1, "a": 2}']),
        ({"prompt": "As JSON", "completion": ANSWER}, ["x"]),  # as tables have messages
        ({"prompt": ASKING, "completion": ANSWER}, [ANSWER]),  # no table
        ({"prompt": USERS, "completion": USERS}, [USERS]),
        ({"prompt": "As JSON", "chosen": USERS, "rejected": "No."}, [USERS, "No."]),
        ({"prompt": "As JSON", "chosen": ANSWER, "rejected": "No."}, [ANSWER, "No."]),
        ({"prompt": ASKING, "chosen": USERS, "rejected": "No."}, [USERS, "No."]),
        ({"conversations": ASKING, "chosen": USERS, "rejected": ANSWER}, [USERS, ANSWER]),
        ({"prompt": "As JSON", "completion": USERS, "label": True}, [USERS]),
    ],
)
def test_json_is_messages_only_where_they_are_an_answer(row, answers):
    if "chosen" in row or "label" in row:
        examples = [example for example, _ in read_answers(row, "labels" if "label" in row else "pairs")[1]]
    else:
        examples = [read_row(row)[1]]
    found = [e.messages[-1]["content"] if isinstance(e, Chat) else e.completion for e in examples]
    assert found == answers
