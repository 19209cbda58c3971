"""The forms in which templates of released models take calls, texts and thoughts, and where they write turns."""

import pytest
from chats import said, user

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.formats import read_row

TURNS = "{% for m in messages %}<{{ m.role }}>BODY<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CALLS = TURNS.replace("BODY", "{% for c in m.tool_calls or [] %}WRITTEN{% endfor %}{{ m.content or '' }}")


def learned(source, talk, **more):
    """The text, with [..] around what is trained, and what is named as not used."""
    example = read_row({"messages": talk} | more)[1]
    text, spans, _, _, unread = ChatTemplate({"default": source}, {}).mark(example.messages, example.tools)
    for start, stop in reversed(spans):
        text = f"{text[:start]}[{text[start:stop]}]{text[stop:]}"
    return text, unread


ARGUMENTS = {  # how a template writes them: what it makes of {"city": "Rom"}, as an object and as JSON in a string
    "JSON alone": ("{{ c.function.arguments | tojson }}", '{"city": "Rom"}'),
    "a string alone": ("{{ 'f:' + c.function.arguments }}", 'f:{"city": "Rom"}'),
    "a syntax of its own, else as it is": (
        "{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments | items %}{{ k }}:<|{{ v }}|>"
        "{% endfor %}{% else %}{{ c.function.arguments }}{% endif %}",
        "city:<|Rom|>",
    ),
    "tags": (
        "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}",
        "<city>Rom</city>",
    ),
    "calls with an id alone": (
        "{% if c.id | length != 9 %}{{ raise_exception('an id') }}{% endif %}{{ c.function | tojson }}",
        '{"name": "f", "arguments": {"city": "Rom"}}',
    ),
}


@pytest.mark.parametrize("form", ARGUMENTS)
@pytest.mark.parametrize("arguments", [{"city": "Rom"}, '{"city": "Rom"}'])
def test_arguments_are_an_object_wherever_the_template_can_write_one(form, arguments):
    written, expected = ARGUMENTS[form]
    source = CALLS.replace("WRITTEN", written + "{{ c.function.name }}")
    talk = [user("?"), said("", tool_calls=[{"id": "abcdefgh1", "function": {"name": "f", "arguments": arguments}}])]
    assert learned(source, talk)[0] == f"<user>?<end><assistant>[{expected}f<end>]"


PARTS = TURNS.replace("BODY", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}")
THINKING = TURNS.replace(
    "BODY",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'thinking' %}<t>{{ p.thinking }}</t>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}",
)


def test_a_template_of_lists_of_parts_gets_lists():
    """Those of models that see; a string would be written as nothing."""
    told = "<user>a<end><assistant>[b<end>]"
    assert learned(PARTS, [user("a"), said("b")]) == (told, ())
    assert learned(PARTS, [user([{"type": "text", "text": "a"}]), said("b")]) == (told, ())
    template = ChatTemplate({"default": PARTS}, {})
    assert template.text([user("a")], prompt=True) == "<user>a<end><assistant>"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking", "part"])
def test_thoughts_are_written_whatever_they_are_called(key, read):
    """As a part of the content too, as in Ministral."""
    source = TURNS.replace("BODY", f"{{% if m.{read} %}}<t>{{{{ m.{read} }}}}</t>{{% endif %}}{{{{ m.content }}}}")
    source = THINKING if read == "part" else source
    told = ("<user>a<end><assistant>[<t>Hm.</t>b<end>]", ())
    assert learned(source, [user("a"), said("b", **{key: "Hm."})]) == told
    assert learned(source, [user("a"), said([{"type": "thinking", "thinking": "Hm."}, "b"])]) == told
    assert learned(source, [user("a"), said("b")])[0] == "<user>a<end><assistant>[b<end>]"


def test_a_loop_over_numbers_of_messages():
    """As in EXAONE 4."""
    source = TURNS.replace("for m in messages %}", "for i in range(messages | length) %}{% set m = messages[i] %}")
    source = source.replace(
        "BODY", "{{ m.content }}{% for k in range(i + 1, 9) %}{% if messages[k] %}{% endif %}{% endfor %}"
    )
    talk = [user("a"), said("b"), user("c"), said("d")]
    assert learned(source, talk)[0] == "<user>a<end><assistant>[b<end>]<user>c<end><assistant>[d<end>]"


BEHIND = (  # as Nemotron Nano 2 has it
    "{% set last = messages[-1] if messages[-1].role == 'assistant' else none %}"
    "{% for m in messages %}{% if not (loop.last and last) %}<{{ m.role }}>{{ m.content }}<end>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
    "{% if last %}<assistant>{% if last.content %}<think>{{ last.content }}{% else %}<tool>{% endif %}<end>\nEND"
    "{% endif %}"
)


def test_the_last_answer_may_be_written_behind_the_loop():
    source, talk = BEHIND.replace("END", ""), [user("a"), said("b"), user("c"), said("d")]
    assert learned(source, talk)[0] == ("<user>a<end>\n<assistant>[b<end>]\n<user>c<end>\n<assistant><think>[d<end>]\n")
    talk = [user("a"), said("b"), user("c"), said("")]
    assert learned(source, talk)[0].endswith("<assistant>[<tool><end>]\n")
    with pytest.raises(BadRow, match="writes nothing for message 1"):
        learned(BEHIND.replace("END", "<assistant>more<end>"), [user("a"), said("b")])


def test_a_turn_may_look_up_a_word_of_another():
    """The name of the call that a tool answers, as in Solar Open: it is no part of the assistant's turn."""
    look = (
        "{% if m.role == 'tool' %}{% for n in messages %}{% for c in n.tool_calls or [] %}"
        "{% if c.id == m.tool_call_id %}{{ c.function.name }}:{% endif %}{% endfor %}{% endfor %}{% endif %}"
    )
    source = CALLS.replace("WRITTEN", "{{ c.function | tojson }}").replace("{{ m.content", look + "{{ m.content")
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {}}}
    talk = [
        user("a"),
        said("", tool_calls=[call]),
        {"role": "tool", "content": "9", "tool_call_id": "abcdefgh1"},
        said("b"),
    ]
    called = '<assistant>[{"name": "f", "arguments": {}}<end>]'
    assert learned(source, talk)[0] == f"<user>a<end>{called}<tool>f:9<end><assistant>[b<end>]"


def test_the_end_of_earlier_turns_is_that_of_the_last():
    """Some templates leave it to the server, or to a variable, as Hy3's is_training."""
    source = TURNS.replace("BODY<end>", "{{ m.content }}{% if not loop.last or is_training %}<end>{% endif %}")
    template = ChatTemplate({"default": source}, {}, None, ["<end>", "<eos>"], "<eos>")
    for talk in ([user("a"), said("b")], [user("a"), said("b"), user("c"), said("d")]):
        text, spans, *_ = template.mark(talk, None)
        assert [text[a:b] for a, b in spans] == [f"{m['content']}<end>" for m in talk if m["role"] == "assistant"]
        assert (text, spans) == template.mark(talk, None, {"is_training": True})[:2]
        asked = [*talk, user("e")]
        assert template.mark(asked, None).text == template.text(asked)
    assert template.mark([user("a"), said("b<end>")], None).text.count("<end>") == 2  # not doubled
    assert not template.notes()
    assert "so stopping is not learned" in ChatTemplate({"default": source}, {}, None, ["<eos>"], "<eos>").notes()[0]


def test_a_turn_ends_where_its_loop_jumps_on():
    """As in Command R7B, which writes the answers of tools in a loop that a message of another kind breaks."""
    answers = (
        "{% if m.role == 'tool' %}{% for n in messages[loop.index0:] %}{% if n.role == 'tool' %}{{ n.content }},"
        "{% elif n.role == 'user' %}{% continue %}{% else %}{% break %}{% endif %}"
        "{% endfor %}]{% continue %}{% endif %}"
    )
    source = TURNS.replace("<{{ m.role }}>BODY", answers + "<{{ m.role }}>{{ m.content }}")
    talk = [user("a"), said("b"), {"role": "tool", "content": "9"}, said("c"), user("d"), said("e")]
    told = "<user>a<end><assistant>[b<end>]9,]<assistant>[c<end>]<user>d<end><assistant>[e<end>]"
    assert learned(source, talk)[0] == told


def test_an_answer_may_end_with_a_jump():
    """A loop inside has jumps of its own."""
    words = "{% for w in m.content.split() %}{% if w == 'stop' %}{% break %}{% endif %}{{ w }}{% endfor %}"
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<end>"
        "{% else %}<assistant>" + words + "<end>{% continue %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [user("a"), said("b stop c"), user("d"), said("e")]
    assert learned(source, talk)[0] == "<user>a<end><assistant>[b<end>]<user>d<end><assistant>[e<end>]"


def test_space_before_an_opening_may_be_the_last_turns():
    """As in axolotl's template for Alpaca."""
    source = (
        "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content }}{{ '<end>' if m.role == 'assistant' }}"
        "{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\n### assistant:\n' }}{% endif %}"
    )
    talk = [user("a"), said("b"), user("c"), said("d")]
    told = "### user:\na\n\n### assistant:\n[b<end>]\n\n### user:\nc\n\n### assistant:\n[d<end>]"
    assert learned(source, talk)[0] == told


@pytest.mark.parametrize("preface", ["<bos>", "<system>Help.<end>"])
def test_the_assistant_may_speak_first(preface):
    """Llama 3 and Kimi K2 write what begins the text within the first turn."""
    first = f"{{% if loop.first and m.role != 'system' %}}{preface}{{% endif %}}<{{{{ m.role }}}}>{{{{ m.content }}}}"
    source = TURNS.replace("<{{ m.role }}>BODY", first)
    talk = [said("a"), user("b"), said("c <assistant>")]
    assert learned(source, talk)[0] == f"{preface}<assistant>[a<end>]<user>b<end><assistant>[c <assistant><end>]"
    none = "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + '<end>' }}{% endfor %}"
    assert learned(none, talk)[0] == "[a<end>][b][c <assistant><end>]"  # Mistral's has no opening
    other = source.replace(preface, "{{ m.content }}")  # no preface, but words
    with pytest.raises(BadRow, match="does not begin with '<assistant>'"):
        learned(other, talk)


def test_words_that_a_turn_leaves_out_are_an_error():
    """As Command R does with a role that it does not know."""
    source = TURNS.replace("BODY", "{% if m.role != 'developer' %}{{ m.content | replace(';', ',') }}{% endif %}")
    assert learned(source, [user("a;"), said("b")])[0] == "<user>a,<end><assistant>[b<end>]"
    with pytest.raises(BadRow, match=r"nothing for message 0 \(role 'developer'\); call it 'system' in the data, or"):
        learned(source, [{"role": "developer", "content": "a"}, user("a"), said("c")])


def test_a_prompt_may_close_a_thought_that_a_turn_has():
    """As Hy3's, whose marks have names of their own."""
    source = TURNS.replace(
        "BODY", "{% if m.role == 'assistant' %}<think:x>{{ m.reasoning_content }}</think:x>{% endif %}{{ m.content }}"
    ).replace("%}<assistant>{%", "%}<assistant><think:x></think:x>{%")
    assert learned(source, [user("a"), said("b")])[0] == "<user>a<end><assistant><think:x></think:x>[b<end>]"
    thought = learned(source, [user("a"), said("b", reasoning_content="Hm.")])[0]
    assert thought == "<user>a<end><assistant><think:x>[Hm.</think:x>b<end>]"
    after = "{% set after = messages[loop.index0 - 1] if loop.index0 else {} %}{{ '</tool>' if after.role == 'tool' }}"
    source = source.replace("<{{ m.role }}>", after + "<{{ m.role }}>")
    source = source.replace("%}<assistant><think", "%}{{ '</tool>' if messages[-1].role == 'tool' }}<assistant><think")
    talk = [user("a"), said("b"), {"role": "tool", "content": "9"}, said("c", reasoning_content="Hm.")]
    assert learned(source, talk)[0].endswith("<tool>9<end></tool><assistant><think:x>[Hm.</think:x>c<end>]")
    assert learned(source, [*talk[:3], said("c")])[0].endswith("</tool><assistant><think:x></think:x>[c<end>]")


CONTENT = {  # how a template writes a turn that is a call alone
    "null": "{% if m.content is none %}null {% else %}{{ m.content + '' }}{% endif %}",
    "a text": "{{ m.content | trim }}{{ '!' if '</think>' in m.content }}",
    "none": "{{ m.content if m.content is defined else 'none ' }}",
}


@pytest.mark.parametrize(("form", "expected"), [("null", "null "), ("a text", ""), ("none", "none ")])
@pytest.mark.parametrize("content", [{"content": None}, {}])
def test_a_call_alone_is_written_by_templates_that_ask_for_null_or_a_text(form, expected, content):
    """DeepSeek-V3's template asks whether content is null; the first one of Qwen3 searches it as a text."""
    source = TURNS.replace("BODY", CONTENT[form] + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], **content}
    text, _ = learned(source, [user("?"), call, {"role": "tool", "content": "5"}, said("Five")])
    assert text == f"<user>?<end><assistant>[{expected}f<end>]<tool>5<end><assistant>[Five<end>]"
