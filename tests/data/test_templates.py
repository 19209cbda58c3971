"""Chat templates: the text of transformers, the masks of TRL's tags, and where answers are found without tags."""

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
from chats import CHATML, said, user

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.forms import chat_of
from trireme.engine.data.read import BadRow
from trireme.engine.data.template import BUILT_IN

FILES = Path(__file__).parent / "templates"
SPECIALS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "image_token": "<image>",
}
CALL = lambda arguments, id="abc123XYZ": {
    "id": id, "type": "function", "function": {"name": "tide_at", "arguments": arguments}
}  # fmt: skip
TOOL = lambda content, id="abc123XYZ": {"role": "tool", "tool_call_id": id, "name": "tide_at", "content": content}
TOOLS = [{"type": "function", "function": {"name": "tide_at", "description": "Tide", "parameters": {"type": "object",
          "properties": {"port": {"type": "string", "description": "where"}}, "required": ["port"]}}}]  # fmt: skip
SYSTEM = {"role": "system", "content": "Be brief."}
TALKS = {
    "one turn": [user("Hi there"), said("Hello.")],
    "system": [SYSTEM, user("Hi there"), said("Hello."), user("Bye"), said("Bye.")],
    "short words": [user("2 + 2 is?"), said("4"), user("4 + 4 is?"), said("8")],
    "context": [user("Hi"), said("Hello.", train=False), user("Name a fern"), said("Bracken.")],
    "thoughts": [user("Q"), said("First.", reasoning_content="One."),
                 user("R"), said("Second.", reasoning_content="Two.")],
    "thoughts inside": [user("Q"), said("<think>\nhm\n</think>\n\nDone."), user("R"), said("Again.")],
    "call": [user("Q"), said("", tool_calls=[CALL({"port": "Ayr"})]), TOOL("2.1 m"), said("2.1 m.")],
    "words and call": [user("Q"), said("Look.", tool_calls=[CALL('{"port": "Ayr"}')]), TOOL("2.1 m"), said("2.1 m.")],
    "two calls": [user("Q"), said("", tool_calls=[CALL({"port": "Ayr"}), CALL({"port": "Oban"}, "abc123XYW")]),
                  TOOL("2.1 m"), TOOL("1 m", "abc123XYW"), said("2.1 m and 1 m.")],
    "call after call": [user("Q"), said("", tool_calls=[CALL({"port": "Ayr"})]), TOOL("2.1 m"),
                        said("And", tool_calls=[CALL({"port": "Oban"}, "abc123XYW")]),
                        TOOL("1 m", "abc123XYW"), said("Both.")],
    "last call": [user("Q"), said("", tool_calls=[CALL({"port": "Ayr"})])],
    "first turn": [said("Welcome!"), user("Hi"), said("Hello.")],
    "two answers": [user("Hi"), said("One."), said("Two.")],
    "equal words": [user("same"), said("same"), user("same"), said("same")],
    "spaces": [user(" pad "), said("  spaces  ")],
}  # fmt: skip


def row_of(talk):
    return {"messages": json.loads(json.dumps(talk))} | (
        {"tools": TOOLS} if any("tool_calls" in m for m in talk) else {}
    )


@cache
def template_of(source, stops, names):
    return ChatTemplate(
        {"default": source}, {name: SPECIALS[name] for name in names}, "2026-03-31" if stops else None, stops, "</s>"
    )


def marked(source, talk, stops=("</s>",), names=tuple(SPECIALS)):
    found = template_of(source, stops, names).mark(chat_of(row_of(talk)))
    return found, "".join(found.text[a:b] for a, b in found.spans)


def bracketed(found):
    text = found.text
    for start, stop in reversed(found.spans):
        text = f"{text[:start]}[{text[start:stop]}]{text[stop:]}"
    return text


TRL = "trl.chat_templates"


def of_trl():
    pytest.importorskip("trl")
    folder = resources.files(TRL)
    return {path.name[:-15]: path.read_text() for path in folder.iterdir() if path.name.endswith("_training.jinja")}


@pytest.mark.full
@pytest.mark.parametrize("talk", TALKS)
def test_masks_of_trls_tags(talk):
    """Without the tags no more is found than they mark, and less only by what asks for the answer, or white space."""
    compared = 0
    for name, source in of_trl().items():
        tagged = source.replace("{%- generation", "{% generation").replace("endgeneration -%}", "endgeneration %}")
        plain = source
        for tag in ("generation", "endgeneration"):
            for left in ("{%-", "{%"):
                for right in ("-%}", "%}"):
                    word = "if true" if tag == "generation" else "endif"
                    plain = plain.replace(f"{left} {tag} {right}", f"{left} {word} {right}")
        try:
            with_tags, _ = marked(source, TALKS[talk])
            without, _ = marked(plain, TALKS[talk])
        except BadRow:
            continue
        if with_tags.text.rstrip("</s>") != without.text.rstrip("</s>"):
            continue
        compared += tagged != ""
        chars = lambda found: {i for a, b in found.spans for i in range(a, b) if not found.text[i].isspace()}
        over = "".join(without.text[i] for i in sorted(chars(without) - chars(with_tags)))
        assert over.replace("<|tool_response>", "").replace("</s>", "") == "", name
        said_ = {message["content"].strip() for message in TALKS[talk] if message["role"] == "assistant"}
        lost = "".join(with_tags.text[i] for i in sorted(chars(with_tags) - chars(without)))
        assert not any(words and words in lost for words in said_ if len(words) > 1), (name, lost)
    assert compared >= 5


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.jinja")))
def test_texts_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    from chats import make_tokenizer

    make_tokenizer(tmp_path)
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    source, n = (FILES / f"{name}.jinja").read_text(), 0
    for talk in TALKS.values():
        row = row_of([{k: v for k, v in message.items() if k != "train"} for message in talk])
        try:
            found, _ = marked(source, talk, (), ("bos_token", "eos_token"))
            theirs = peer.apply_chat_template(row["messages"], row.get("tools"), chat_template=source, tokenize=False)
        except Exception:  # the template refuses it, there or here
            continue
        n += 1
        ours = found.text
        if theirs != ours:  # arguments of calls in the other form
            for message in row["messages"]:
                for call in message.get("tool_calls", []):
                    given = call["function"]["arguments"]
                    call["function"]["arguments"] = json.loads(given) if isinstance(given, str) else json.dumps(given)
            theirs = peer.apply_chat_template(row["messages"], row.get("tools"), chat_template=source, tokenize=False)
        assert ours == theirs, name
    assert n >= 3


ASKED = "{% if add_generation_prompt %}<assistant>{% endif %}"
ANSWERED = (  # tools answer inside of the turn of their calls, as in Gemma 4
    "{{ (tools or []) | tojson }}{% for m in messages %}{% set i = loop.index %}{% if m.role != 'tool' %}"
    "{{ '<' + m.role + '>' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}({% for t in messages"
    "[i:] %}{% if t.role != 'tool' %}{% break %}{% endif %}{{ '!' + t.content }}{% endfor %}){{ m.content }}"
    "{% endif %}{% endfor %}" + ASKED
)
BETWEEN = (  # the next turn begins with the end of the one before
    "{% for m in messages %}{{ '<|end|>' * (not loop.first) + '<|' + m.role + '|>' + m.content }}{% endfor %}<|end|>"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS = ASKED.replace("t>", "t><think>")
THINKING = "{% for m in messages %}{{ '<' + m.role + '><text>' + m.content }}{% endfor %}" + THINKS
NAMES = (  # a tool's turn looks for its name in the turns of the calls
    "{{ (tools or []) | tojson }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% for t in messages if 'tool' in (m.role, t.role) and t.tool_calls %}{{ t.tool_calls[0].function.name }}"
    "{% endfor %}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}" + ASKED
)
BEHIND = (  # the last answer stands behind the loop
    "{% for m in messages[:-1] %}{{ '<' + m.role + '>' + m.content }}{% endfor %}{% set m = messages[-1] %}"
    "{{ '<assistant><think>' + m.content + '</s>' if m.role == 'assistant' else '<' + m.role + '>' + m.content }}"
) + THINKS
FOUND = [  # template, talk, what is trained, joined by |
    (BEHIND, "short words", "4|8</s>"),
    (NAMES, "call", "[tide_at]|2.1 m."),
    (BETWEEN, "short words", "4|8"),
    (THINKING, "short words", "<text>4|<text>8"),
    (CHATML, "one turn", "Hello.<|im_end|>"),
    ("{# {% generation %} #}" + CHATML, "one turn", "Hello.<|im_end|>"),
    (BUILT_IN["plain"], "one turn", "Hello.</s>"),
    (BUILT_IN["chatml"], "context", "Bracken.<|im_end|>"),
    ("{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}" + ASKED, "short words", "4|8"),
    (
        "{% for m in messages %}{{ m.content if m.role == 'user' else ' A: ' + m.content + eos_token }}{% endfor %}",
        "short words",
        "4</s>|8</s>",
    ),
    (
        "{% for i in range(messages|length) %}{{ '<' + messages[i].role + '>' + messages[i].content }}{% endfor %}"
        + ASKED,
        "equal words",
        "same|same",
    ),
    (re.sub("[()](?=[{])", "", ANSWERED), "two calls", "[tide_at][tide_at]|2.1 m and 1 m."),
    (re.sub("[()](?=[{])", "", ANSWERED), "words and call", "[tide_at]|Look.|2.1 m."),
]


@pytest.mark.parametrize(("source", "talk", "trained"), FOUND)
def test_answers_are_found_without_tags(source, talk, trained):
    found, _ = marked(source, TALKS[talk], ())
    assert "|".join(found.text[a:b].strip() for a, b in found.spans) == trained, bracketed(found)


INSIDE = (  # the answer of a tool is written by the turn of its call
    "{{ (tools or []) | tojson }}{% for m in messages %}{% set i = loop.index %}{% if m.role != 'tool' %}"
    "{{ '<' + m.role + '>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + '=' + messages[loop.index0 + i].content + ']' }}"
    "{% endfor %}{% endif %}{% endfor %}" + ASKED
)
LOOP = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
SPEAK = "<a>{% generation %}{{ X.content }}</s>{% endgeneration %}{% endfor %}"
PAIRED = [  # templates whose tags stand in no turn of their message
    "{% for u, x in messages | batch(2) %}{{ u.content }}" + SPEAK.replace("X", "x"),
    "{% for i in range(0, 4, 2) %}{{ messages[i].content }}" + SPEAK.replace("X", "messages[i + 1]"),
]
MEASURED = [  # templates that see what their loops have written
    "{% set x %}" + LOOP + "{% endset %}{{ x | length }}{{ x }}",
    "{% macro f() %}" + LOOP + "{% endmacro %}{{ f() | length }}{{ f() }}",
    "{% macro f() %}{{ caller() | length }}{{ caller() }}{% endmacro %}{% call f() %}" + LOOP + "{% endcall %}",
    "{% filter replace('\ufdd2', '!') %}" + LOOP + "{% endfilter %}",
    "{% block b %}" + LOOP + "{% endblock %}{{ self.b() | length }}",
    "{{ '\ufdd2' }}" + LOOP,
]
REFUSED = [  # template, talk, a word of the fault
    *((source + ASKED, "one turn", "located") for source in MEASURED),
    ("{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('no') }}", "one turn", "no"),
    ("{{ messages[0].content }}", "one turn", "message 1"),
    ("{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}", "one turn", "message 0"),
    (CHATML, "call", "tide_at"),
    *((source, "context", "located") for source in PAIRED),
    (PAIRED[1], "short words", "located"),
    (INSIDE, "call", "message 1"),
    (INSIDE, "two calls", "message 1"),
    (ANSWERED, "two calls", "message 1"),
]


@pytest.mark.parametrize(("source", "talk", "word"), REFUSED)
def test_what_cannot_be_found_is_refused(source, talk, word):
    with pytest.raises(BadRow) as error:
        marked(source, TALKS[talk], ())
    assert word in str(error.value)


def test_the_end_of_turns_that_the_next_turn_begins():
    glm = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    glm += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    found, _ = marked(glm, TALKS["short words"], ("</s>", "<|user|>"))
    assert bracketed(found) == "<|user|>2 + 2 is?<|assistant|>[4<|user|>]4 + 4 is?<|assistant|>[8</s>]"


def test_ids_of_calls_that_a_template_refuses_are_given_anew():
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' + (m.content or '') + (m.tool_call_id or '') }}"
        "{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
        "{{ '[' + c.id + ' ' + c.function.name + ']' }}{% endfor %}{% endfor %}{{ (tools or []) | tojson }}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    id = "call_8fKq2LmZ0aTn"
    found, _ = marked(source, [user("Q"), said("", tool_calls=[CALL({}, id)]), TOOL("2 m", id), said("2 m.")], ())
    assert found.text.count("call00100") == 2


def test_thoughts_that_are_left_out_or_empty_are_counted():
    qwen3 = (FILES / "qwen3.jinja").read_text()
    found, trained = marked(qwen3, TALKS["thoughts"])
    assert found.counts["unwritten"] == len("One.")
    assert trained.count("Two.") == 1
    found, _ = marked(qwen3, TALKS["one turn"])
    assert found.counts["thoughtless"] == 1
    variables = {"enable_thinking": False}
    template = ChatTemplate({"default": qwen3}, SPECIALS, None, (), "</s>")
    assert template.mark(chat_of(row_of(TALKS["one turn"]))._replace(variables=variables)).counts["thoughtless"] == 0
    with pytest.raises(BadRow, match="documents"):
        template.mark(chat_of(row_of(TALKS["one turn"]) | {"chat_template_kwargs": {"documents": []}}))
