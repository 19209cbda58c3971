"""Data that could be misread in silence: read rightly, refused with its place, or named."""

import json
from decimal import Decimal

import pytest
from chats import CHATML, make_tokenizer, said, user

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.codec import load_codec
from trireme.engine.data.dataset import DataOptions, load_dataset
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.formats import parse_map, read_row
from trireme.engine.data.formats.pairs import is_weighted, read_answers
from trireme.models.config import InputError

TALK = [user("q"), said("a")]


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return load_codec(make_tokenizer(tmp_path_factory.mktemp("model"), chat_template=CHATML).folder)


@pytest.fixture
def load(tmp_path, codec):
    """What is read of rows, or of the content of a file of that name."""

    def loaded(rows, name="rows.jsonl", **options):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows) if isinstance(rows, list) else rows
        path.write_bytes(lines)
        return load_dataset([str(path)], codec, DataOptions(**{"seq_len": 256} | options))

    return loaded


def call(arguments):
    return [user("q"), said("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])]


TWICE = '[{"role": "user", "content": "q", "content": "r"}, {"role": "assistant", "content": "a"}]'
REFUSED = {
    "a key twice in a string of JSON": ({"messages": TWICE}, "'messages': the key 'content' occurs twice"),
    "a key twice in arguments": ({"messages": call('{"a": 1, "a": 2}')}, "the key 'a' occurs twice"),
    "NaN in arguments": ({"messages": call({"a": float("nan")})}, "hold NaN or Infinity, which is not JSON"),
    "NaN in a string of arguments": ({"messages": call('{"a": NaN}')}, "hold NaN or Infinity, which is not JSON"),
    "NaN in tools": (
        {"messages": TALK, "tools": [{"name": "f", "parameters": {"default": float("inf")}}]},
        "'tools' hold NaN",
    ),
    "no role": ({"messages": [{"role": "", "content": "q"}, said("a")]}, "messages[0]: 'role' is an empty string"),
    "a role that is a number": ({"messages": [{"role": 1, "content": "q"}, said("a")]}, "'role' is a number"),
    "thoughts in a list": (
        {"messages": [user("q"), said("a", reasoning_content=["t"])]},
        "messages[1]: 'reasoning_content' is a list, expected a string",
    ),
    "thoughts twice": (
        {"messages": [user("q"), said("a", reasoning_content="t", reasoning="u")]},
        "'reasoning_content' and 'reasoning' are not the same",
    ),
    "a text that is an object": (
        {"messages": [user([{"type": "text", "text": {"value": "q"}}]), said("a")]},
        "a part whose 'text' is an object",
    ),
    "a row that is not to be learned": ({"messages": TALK, "train": False}, "'train' is false: leave the row out"),
    "a row that is masked": ({"text": "a", "mask": True}, "'mask' is true: leave the row out"),
    "rows inside": ({"data": [{"text": "a"}]}, "If 'data' is the list of rows, write that list alone"),
    "turns of Gemini": (
        {"contents": [{"role": "user", "parts": []}]},
        "'contents' holds objects with the keys 'role', 'p",
    ),
    "turns of XTuner": (
        {"conversation": [{"input": "q"}]},
        "with the keys 'input'; a conversation has {role, content}.",
    ),
    "pairs of alpaca": (
        {"instruction": "i", "input": "", "chosen": "c", "rejected": "r"},
        "rows: --map output=chosen,unused=rejected",
    ),
    "pairs of OpenAI": (
        {"input": {"messages": [user("q")]}, "preferred_output": [said("a")], "non_preferred_output": [said("b")]},
        "Write the good answers to a file of rows that are read: messages, or prompt, completion",
    ),
    "columns with a system message": (
        {"query": "q", "response": "a", "system": "s"},
        "Perhaps --map instruction=query,output=response.",
    ),
    "train of a table": ({"text": "a", "train": "False"}, "'train' is false: leave the row out"),
    "train 0": ({"prompt": "q", "completion": "a", "train": 0}, "'train' is 0: leave the row out"),
    "mask of a table": ({"text": "a", "masked": "1"}, "'masked' is 1: leave the row out"),
    "a list of flags": ({"messages": [user("q"), said("a")], "mask": [1, 0]}, "'mask' is a list, whose entries"),
    "weights of tokens": ({"input_ids": [1, 2], "loss_weights": [0.0, 1.0]}, "'loss_weights' is not a known mask"),
    "another case": ({"Instruction": "q", "Output": "a"}, "Perhaps --map instruction=Instruction,output=Output."),
    "spaces": ({"text ": "a"}, "Remove the spaces around the names of its columns."),
    "segments": ({"segments": [{"label": True, "text": "a"}] * 2}, "Of axolotl's segments write what is learned as"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_are_refused(case):
    row, says = REFUSED[case]
    with pytest.raises(BadRow) as error:
        read_row(row)
    assert says in str(error.value)


def test_a_list_of_numbers_is_taken_for_tokens_only_by_its_name():
    for key, hint in (("token_ids", True), ("index", False)):
        with pytest.raises(BadRow) as error:
            read_row({key: [0, 1]})
        assert ("--map input_ids=" in str(error.value)) == hint


def test_roles_with_spaces_and_thoughts_that_are_said_alike():
    talk = [{"from": "Human ", "value": "q"}, {"from": " GPT", "value": "a", "reasoning": "t", "thinking": "t"}]
    chat = read_row({"conversations": talk})[1]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


# ---------------------------------------------------------------- chat templates


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("i", [1, 2])
def test_a_message_that_the_template_leaves_out_is_missed_though_its_words_are_elsewhere(tags, i):
    generation = "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}" if tags else "{{ m.content }}<|im_end|>"
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}@user {{ m.content }}"
        "{% elif m.role == 'assistant' %}@bot " + generation + "{% endif %}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    talk = [user("2 and 2?"), said("2 + 2 is 4")]
    assert template.mark(talk, None).text == "@user 2 and 2?@bot 2 + 2 is 4<|im_end|>"
    talk.insert(i, {"role": "tool", "content": "4"})
    with pytest.raises(BadRow, match=rf"writes nothing for message {i} \(role 'tool'\)"):
        template.mark(talk, None)


@pytest.mark.parametrize("written", ["m.content | upper", "m.content[:3]", "m.content | replace('2', 'two')"])
def test_a_message_may_be_written_in_another_form(written):
    source = "{% for m in messages %}@{{ m.role }} {{ " + written + " if m.role == 'user' else m.content }}{% endfor %}"
    template = ChatTemplate({"default": source + "{% if add_generation_prompt %}@assistant {% endif %}"}, {})
    marked = template.mark([user("2 and 2?"), said("four")], None)
    assert [marked.text[a:b] for a, b in marked.spans] == ["four"]
    with pytest.raises(BadRow, match=r"writes nothing for message 0 \(role 'user'\)"):
        ChatTemplate({"default": source.replace(written, "'2 and 2?'")}, {}).mark([user("2 and two?"), said("4")], None)


def test_a_template_without_a_loop_is_asked_too():
    source = "{{ messages[-2].content }}{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    template = ChatTemplate({"default": source}, {})
    assert template.mark(TALK, None).spans == [(1, 2)]
    with pytest.raises(BadRow, match=r"writes nothing for message 0 \(role 'user'\)"):
        template.mark([user("q"), said("a"), user("q"), said("a")], None)


# ---------------------------------------------------------------- --map


def test_columns_of_map_that_take_each_others_place():
    for text, says in (
        ("prompt=a,prompt=b", "two columns for 'prompt'"),
        ("prompt=a,completion=a", "'a' is named twice"),
    ):
        with pytest.raises(InputError, match=says):
            parse_map(text)
    assert parse_map("unused=a,unused=b") == {"a": "unused", "b": "unused"}
    _, _, unused = read_row({"text": "a", "words": "b"}, parse_map("text=words"))
    assert unused == ["text (of the file)"]


def test_a_column_of_map_that_no_row_has(load):
    assert load([{"words": "a b"}, {"prompt": "c", "completion": "d"}], map="text=words").report.files[0].rows == 2
    with pytest.raises(InputError, match="--map names 'wrods', a column that no row has"):
        load([{"text": "a b"}], map="unused=wrods")


# ---------------------------------------------------------------- weights


def test_weights_of_which_some_are_words(load):
    rows = [{"text": "a b", "weight": weight} for weight in (2, None, "", "3")]
    assert sorted(load(rows).pieces["weight"]) == [1, 1, 2, 3]
    assert is_weighted({"weight": Decimal("2.5")})
    for first, last, says in ((2, "high", "is no number, and one in rows before"), ("x", 1, "is number, and not in")):
        with pytest.raises(InputError, match=rf"rows.jsonl line 2: 'weight' {says}"):
            load([{"text": "a b", "weight": first}, {"text": "a b", "weight": last}])


# ---------------------------------------------------------------- preferences

ASKED = "has no 'prompt'. Is it 'question'? --map instruction=question"
PAIRS = {
    "a prompt by another name": (dict(system="s", question="q", chosen="a b", rejected="a c"), ASKED),
    "nothing in common": (dict(chosen="a", rejected="b"), "begin with nothing in common, and there is no 'prompt'"),
    "a null prompt": (dict(prompt=None, chosen="a b", rejected="a c"), "'prompt' is null"),
    "a null answer": (dict(prompt="q", chosen="a", rejected=None), "has null for 'rejected'"),
    "a system message on one side": (
        dict(prompt="q", chosen=[{"role": "system", "content": "s"}, *TALK], rejected=[user("q"), said("b")]),
        "after the prompt there is a message of role 'system', expected 'assistant'",
    ),
    "a list of texts": (dict(prompt="q", chosen=["a"], rejected=["b"]), "the answer in 'chosen': message [0] is a"),
    "masked": (dict(prompt="q", chosen="a", rejected="b", trainable=False), "'trainable' is false"),
    "another question": (
        {"prompt": "q", "chosen": [user("r"), said("a")], "rejected": [user("r"), said("b")]},
        "is not what",
    ),
    "the same words of another role": (
        {"prompt": [said("q")], "chosen": [user("q"), said("a")], "rejected": [user("q"), said("b")]},
        "'prompt' is not what 'chosen' and 'rejected' begin with",
    ),
    "the prompt twice": (
        {"prompt": "What is the tallest tree of all?\n", "chosen": "What is the tallest tree of all? A redwood.",
         "rejected": "What is the tallest tree of all? An oak."},
        "'chosen' and 'rejected' begin with the prompt; leave it out: --map unused=prompt",
    ),
    "columns by their sides": ({"prompt": "q", "chosen_response": "a", "rejected_response": "b"},
                               "Perhaps --map chosen=chosen_response,rejected=rejected_response"),
    "columns in another case": ({"Prompt": "q", "Chosen": "a", "Rejected": "b"}, "--map prompt=Prompt,chosen=Chosen"),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_pairs_that_are_refused(case):
    row, says = PAIRS[case]
    with pytest.raises(BadRow) as error:
        read_answers(row, "pairs")
    assert says in str(error.value)


def test_rows_of_preferences_are_read_by_their_own_keys(load):
    rows = [dict(prompt="p ", chosen="a", rejected="b"), dict(instruction="i", chosen="a", rejected="b")]
    file = load([*rows, dict(prompt="q ", completion="c", label=True)], kind="labels").report.files[0]
    names = ("prompt,chosen,rejected", "instruction,chosen,rejected", "prompt,completion,label")
    assert (file.rows, file.format) == (3, "; ".join(f"{name}: 1 row" for name in names))
    assert file.unused == ()


def test_pairs_of_equal_answers_are_counted(load):
    rows = [dict(prompt="p ", chosen=a, rejected=b) for a, b in (("x y", "x y"), ("x y", "x z"), ("x", "x y"))]
    for kind in ("pairs", "rewards"):
        assert "1 pair has two equal answers, so neither is preferred" in load(rows, kind=kind).report.lines()
    cut = [dict(prompt="p ", chosen="s" * 80 + "a", rejected="s" * 80 + "b")]
    assert load(cut, kind="pairs", seq_len=32).report.fitted.alike == 1
    assert not any("equal answers" in line for line in load(rows, kind="labels").report.lines())


# ---------------------------------------------------------------- files

FILES = {
    "a.txt": (b"caf\n\xc3\xa9\ncaf\xe9\n", "a.txt line 3 is not UTF-8"),
    "a.csv": (b"text\na\ncaf\xe9\n", "a.csv line 3 is not UTF-8"),
    "u.txt": ("a".encode("utf-32"), "is UTF-32. Convert it: iconv -f UTF-32"),
    "rows.txt": (b'{"text": "a b"}\n{"text": "c"}\n', "holds rows of JSON, not running text. Rename it"),
    "rows.csv": (b'{"text": "a"}\n', "is JSON with another extension. Rename it"),
    "q.csv": (b'prompt,completion\na,b\n"c,d\ne,f\n', "q.csv line 3 to 4 is not CSV"),
    "n.csv": (b"prompt,completion\na,nan\n", "line 2: 'completion' is null"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_refused(load, name):
    content, says = FILES[name]
    with pytest.raises(InputError) as error:
        load(content, name)
    assert says in str(error.value)


def test_files_that_are_read(load):
    assert load(b'{"a": 1}\nis how an object looks\n', "a.txt").report.counts.rows == 1
    assert load(b"prompt\tcompletion\tseen, read, told\na\tb\tc\n", "a.tsv").report.files[0].unused == (
        "seen, read, told",
    )
