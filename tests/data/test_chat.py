"""Chat templates: the same tokens as transformers, and masks that two other methods agree with."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from chats import said, user
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.encode import Encoded, encode, overlap
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.examples import Chat, Completion, Text
from trireme.engine.data.templates import PLAIN, load_template, read_choice
from trireme.engine.data.tokens import load_tokenizer
from trireme.models.config import InputError

TEMPLATES = Path(__file__).parent / "templates"

# Of each family: special tokens, and the text around what the assistant says, by which a regular expression finds it.
CHATML = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin_of_text|>"]
DEEPSEEK = [
    *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *(f"<｜tool▁{what}｜>" for what in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{what}｜>" for what in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
]
COHERE = [f"<|{what}_TOKEN|>" for what in ("START_OF_TURN", "END_OF_TURN", "USER", "CHATBOT", "SYSTEM")]
FAMILIES = {  # name: (bos, eos, other special tokens, before, after)
    "chatml": ("<s>", "</s>", CHATML, r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    "chatml_no_prompt": ("<s>", "</s>", CHATML, r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    "chatml_tagged": ("<s>", "</s>", CHATML, r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    "llama2": ("<s>", "</s>", [], r" \[/INST\] ", r"</s>"),
    "llama3": (HEADERS[3], HEADERS[2], HEADERS, r"assistant<\|end_header_id\|>\n\n", r"<\|eot_id\|>"),
    "llama31": (HEADERS[3], HEADERS[2], HEADERS, r"assistant<\|end_header_id\|>\n\n", r"<\|eot_id\|>"),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]"], r"\[/INST\]", r"</s>"),
    "mistral_nemo": ("<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]"], r"\[/(?:INST|TOOL_RESULTS)\]", r"</s>"),
    "qwen2": ("", "<|im_end|>", CHATML, r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    "qwen25": ("", "<|im_end|>", CHATML, r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    "qwen3": ("", "<|im_end|>", CHATML, r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    "phi3": ("<s>", "<|endoftext|>", ["<|user|>", "<|assistant|>", "<|end|>"], r"<\|assistant\|>\n", r"<\|end\|>"),
    "phi4": ("<s>", "<|endoftext|>", [*CHATML, "<|im_sep|>"], r"assistant<\|im_sep\|>", r"<\|im_end\|>"),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"], r"<start_of_turn>model\n", r"<end_of_turn>"),
    "zephyr": ("<s>", "</s>", [], r"<\|assistant\|>\n", r"</s>"),
    "vicuna": ("<s>", "</s>", [], r"ASSISTANT: ", r"</s>"),
    "deepseek_r1": (
        *(DEEPSEEK[4], DEEPSEEK[5], DEEPSEEK),
        *(
            "(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>)",
            "<｜end▁of▁sentence｜>(?:<｜Assistant｜><｜end▁of▁sentence｜>)?",
        ),
    ),
    "deepseek_v31": (
        *(DEEPSEEK[4], DEEPSEEK[5], DEEPSEEK),
        *("(?:<｜Assistant｜></think>|<｜tool▁output▁end｜>(?!<))", "<｜end▁of▁sentence｜>"),
    ),
    "hermes_tools": ("<s>", "<|im_end|>", CHATML, r"<\|im_start\|>assistant\n", r"<\|im_end\|>"),
    "command_r_tools": (
        *("<BOS_TOKEN>", COHERE[1], COHERE, r"<\|CHATBOT_TOKEN\|>"),
        r"(?:<\|END_OF_TURN_TOKEN\|>|\]```)",
    ),
    "command_r": ("<BOS_TOKEN>", COHERE[1], COHERE, r"<\|CHATBOT_TOKEN\|>", r"<\|END_OF_TURN_TOKEN\|>"),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> & then",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Straße, 日本"}}},
        },
    }
]


def call(arguments, id="abc123XYZ"):
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


PLAIN_TALK = {
    "one turn": [user("How do I reset it?"), said("Use a pin.")],
    "three turns": [user("a"), said("b"), user("c"), said("d d"), user("e"), said("f")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi"), said("Hello."), user("Bye"), said("Bye.")],
    "unicode": [user("naïve 日本語 👩‍👩‍👧 \u200b ß"), said("Zażółć gęślą jaźń 🦜 — “ja”")],
    "white space": [user("  two  spaces \n\n"), said("\n\n  indented\n\tand tabbed \n")],
    "the same words": [user("yes"), said("yes"), user("yes"), said("yes"), user("assistant"), said("assistant")],
    "no question": [user(""), said("You said nothing.")],
    "no answer": [user("Say nothing."), said(""), user("Thanks"), said("!")],
    "braces": [user("{{ messages }} {% if %}"), said("{{ eos_token }} <b>&amp;</b> \\n 'q' \"q\"")],
    "looks like a mark": [user("[TURN] <|assistant|>?"), said("<table>ASSIST: im_end </p>")],
}
THOUGHTS = {
    "thought": [user("1+1"), said("<think>\nOne and one.\n</think>\n\nTwo.")],
    "thought twice": [
        user("1+1"),
        said("<think>\nHm.\n</think>\n\n2"),
        user("2+2"),
        said("<think>\nHm!\n</think>\n\n4"),
    ],
    "empty thought": [user("1+1"), said("<think>\n\n</think>\n\n2")],
    "thought apart": [user("1+1"), said("Two.", reasoning_content="One and one.")],
}
CALLS = {
    "call": [
        user("Rain in Köln?"),
        {"role": "assistant", "content": "", "tool_calls": [call({"city": "Köln <&>"})]},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "abc123XYZ", "name": "weather"},
        said("Yes, it rains."),
    ],
    "call between turns": [
        *(user("Hi"), said("Hello."), user("Rain?")),
        {"role": "assistant", "content": "", "tool_calls": [call({"city": "Rom"})]},
        {"role": "tool", "content": "dry", "tool_call_id": "abc123XYZ", "name": "weather"},
        *(said("No."), user("Thanks"), said("Welcome.")),
    ],
}
WITH_THOUGHTS = ("qwen3", "deepseek_r1", "deepseek_v31")
NEED_TOOLS = ("hermes_tools", "command_r_tools")  # they come beside a default, for conversations with tools alone
WITH_CALLS = (*NEED_TOOLS, "llama31", "mistral_nemo", "qwen25", "qwen3", "deepseek_r1", "deepseek_v31")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes the tokenizer folder of a family: byte-level BPE, and the family's special tokens and template."""
    corpus = [json.dumps(PLAIN_TALK), json.dumps(CALLS), "assistant user system function weather"] * 4
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            bos, eos, specials, *_ = FAMILIES[name]
            core = tokenizers.Tokenizer(tokenizers.models.BPE())
            core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
            core.decoder = tokenizers.decoders.ByteLevel()
            trainer = tokenizers.trainers.BpeTrainer(
                vocab_size=600,
                special_tokens=list(dict.fromkeys([t for t in (bos, eos, *specials) if t])),
                initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            )
            core.train_from_iterator(corpus, trainer)
            core.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
            made[name] = tmp_path_factory.mktemp(name)
            core.save(str(made[name] / "tokenizer.json"))
            config = {"eos_token": eos} | ({"bos_token": bos} if bos else {})
            config |= {"chat_template": (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")}
            (made[name] / "tokenizer_config.json").write_text(json.dumps(config))
        return made[name]

    return make


def peer(folder: Path) -> PreTrainedTokenizerFast:
    """The same tokenizer in transformers."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {k: v for k, v in config.items() if k in ("bos_token", "eos_token")}
    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    made.chat_template = config["chat_template"]
    return made


def cases(name: str):
    yield from ((title, talk, TOOLS if name in NEED_TOOLS else None) for title, talk in PLAIN_TALK.items())
    if name in WITH_THOUGHTS:
        yield from ((title, talk, None) for title, talk in THOUGHTS.items())
    if name in WITH_CALLS:
        for title, talk in CALLS.items():
            # DeepSeek's templates join the arguments to text: a string there, everywhere else an object.
            if name.startswith("deepseek"):
                yield title, with_strings(talk), None
            else:
                yield title, talk, TOOLS


def with_strings(talk):
    """The talk with its calls' arguments as JSON in a string."""
    copy = json.loads(json.dumps(talk))
    for message in copy:
        for c in message.get("tool_calls", []):
            c["function"]["arguments"] = json.dumps(c["function"]["arguments"], ensure_ascii=False)
    return copy


@pytest.mark.parametrize("name", FAMILIES)
def test_same_tokens_as_transformers_and_the_expected_mask(name, folder):
    tokenizer = load_tokenizer(folder(name))
    template, theirs = load_template(tokenizer), peer(folder(name))
    before, after = FAMILIES[name][3:]
    done = 0
    for title, talk, tools in cases(name):
        (ours,) = encode([Chat(talk, tools)], tokenizer, template)
        try:
            expected = theirs.apply_chat_template(talk, tools=tools, tokenize=True, return_dict=False)
        except Exception:  # the template's own refusal
            assert isinstance(ours, BadRow), title
            assert "refuses" in str(ours), title
            continue
        assert isinstance(ours, Encoded), (title, ours)
        assert ours.ids.tolist() == expected, title
        text, spans, *_ = template.mark(talk, tools)
        assert [text[a:b] for a, b in spans] == expected_parts(text, before, after), title
        check_tokens(tokenizer, ours, text, spans)
        check_messages(template, talk, tools, title)
        done += 1
    assert done >= 8, name


def expected_parts(text: str, before: str, after: str) -> list[str]:
    """By regular expression: everything between the opening and, inclusively, the end mark."""
    return re.findall(f"(?s){before}(.*?{after})", text)


def check_tokens(tokenizer, encoded: Encoded, text: str, spans) -> None:
    """Token by token: what is trained decodes to the spans' text (these templates' marks stand on token borders)."""
    trained = encoded.ids[encoded.trained]
    assert tokenizer.decode(trained).replace(" ", "") == "".join(text[a:b] for a, b in spans).replace(" ", "")


@pytest.mark.parametrize("name", NEED_TOOLS)
def test_a_template_for_tools_beside_a_default(name, folder, tmp_path):
    """Rows with tools are read by the one, rows without by the other, and both masks are right."""
    default = name.removesuffix("_tools").replace("hermes", "chatml")
    for path in folder(name).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": n, "template": (TEMPLATES / f"{t}.jinja").read_text()}
             for n, t in (("default", default), ("tool_use", name))]  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    template = load_template(load_tokenizer(tmp_path))
    assert not template.notes()
    for title, talk, tools in [*cases(name), ("no tools", PLAIN_TALK["three turns"], None)]:
        text, spans, *_ = template.mark(talk, tools)
        assert ("weather" in text) == bool(tools)
        assert [text[a:b] for a, b in spans] == expected_parts(text, *FAMILIES[name][3:]), title


DATED = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}"


def test_the_date_that_a_template_writes_is_the_one_it_is_given():
    """It is part of what makes the tokens, where it is written."""
    first, same, other = (
        ChatTemplate({"default": DATED}, {}, day) for day in ("2026-01-31", "2026-01-31", "2026-02-01")
    )
    assert first.text([user("a")]) == "31 Jan 2026 [user]a."
    assert other.text([user("a")]) == "01 Feb 2026 [user]a."
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert "2026-01-31" in first.notes()[0]
    plain = DATED.replace("strftime_now('%d %b %Y')", "'x'")
    found = [ChatTemplate({"default": plain}, {}, day) for day in (None, "2026-01-31", "2026-02-01")]
    assert len({template.fingerprint for template in found}) == 1
    assert ChatTemplate({"default": DATED}, {}).fingerprint == ChatTemplate({"default": DATED}, {}, None).fingerprint


def test_a_template_that_draws_at_random_draws_the_same_each_time():
    source = "{{ range(1000)|list|random }} " + DATED.partition("}} ")[2]
    template, talk = ChatTemplate({"default": source}, {}), [user("a"), said("b")]
    texts = {ChatTemplate({"default": source}, {}).text(talk) for _ in range(3)}
    assert texts == {template.text(talk)} == {template.mark(talk, None).text}
    assert len({template.text([user(f"a{i}"), said("b")]).partition(" ")[0] for i in range(20)}) > 10


def test_an_opening_that_cannot_be_found_is_refused():
    """Here no talk of ours can be written, and the template refuses to ask: nothing says where the words begin."""
    source = (
        "{% if add_generation_prompt or messages|length != 2 or messages[0].content != 'a' %}"
        "{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}"
    )
    with pytest.raises(BadRow, match="message 1 .* begins with no known opening"):
        ChatTemplate({"default": source}, {}).mark([user("a"), said("b")], None)


def check_messages(template: ChatTemplate, talk, tools, title: str) -> None:
    """Message by message: of words that occur once, the assistant's are inside a span, the others outside."""
    if title in THOUGHTS or title in CALLS:
        return  # there a word may legitimately disappear
    marked = [{**m, "content": f"{m['content']} w{i}w"} for i, m in enumerate(talk)]
    text, spans, *_ = template.mark(marked, tools)
    for i, message in enumerate(talk):
        found = [m.start() for m in re.finditer(f"w{i}w", text)]
        inside = [any(a <= at < b for a, b in spans) for at in found]
        # A template may leave a system message out, as Mistral's do; what the assistant says is there once.
        assert inside == [True] if message["role"] == "assistant" else not any(inside)


def test_the_real_template_of_minimind(real):
    folder = real / "tokenizers" / "minimind"
    tokenizer, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    template = load_template(tokenizer)
    for title, talk in (PLAIN_TALK | THOUGHTS | CALLS).items():
        tools = TOOLS if title in CALLS else None
        (ours,) = encode([Chat(talk, tools)], tokenizer, template)
        assert ours.ids.tolist() == theirs.apply_chat_template(talk, tools=tools, return_dict=False), title
    text, spans, *_ = template.mark(THOUGHTS["thought"], None)
    assert [text[a:b] for a, b in spans] == ["One and one.\n</think>\n\nTwo.<|im_end|>"]
    text, spans, *_ = template.mark(CALLS["call"], TOOLS)
    assert text[slice(*spans[0])] == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln <&>"}}\n</tool_call><|im_end|>'
    )


def test_generation_tags_give_the_mask_of_transformers(folder):
    made = folder("chatml_tagged")
    tokenizer, theirs = load_tokenizer(made), peer(made)
    for talk in PLAIN_TALK.values():
        (ours,) = encode([Chat(talk)], tokenizer, load_template(tokenizer))
        expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert ours.ids.tolist() == expected["input_ids"]
        assert ours.trained.astype(int).tolist() == expected["assistant_masks"]


def test_what_a_template_leaves_out_is_counted(folder):
    """As DeepSeek's and Qwen's do with thoughts; by hand: 3 of 9 characters, in each turn or in all but the last."""
    talk = [user("a"), said("<think>\nHm!\n</think>\n\nanswer"), user("b"), said("<think>\nHm!\n</think>\n\nanswer")]
    apart = [user("a"), said("answer", reasoning_content="Hm!"), user("b"), said("answer", train=False)]
    for name, lost in (("deepseek_r1", 6), ("qwen3", 3), ("chatml", 0)):
        marked = load_template(load_tokenizer(folder(name))).mark(talk, None)
        assert (marked.said, marked.unwritten) == (18, lost), name
    marked = load_template(load_tokenizer(folder("chatml"))).mark(apart, None)
    assert (marked.said, marked.unwritten) == (9, 3)
    for talk in PLAIN_TALK.values():
        assert load_template(load_tokenizer(folder("llama3"))).mark(talk, None).unwritten == 0


def test_messages_can_be_left_out(folder):
    talk = [user("a"), said("b", train=False), user("c"), said("d")]
    for name in ("chatml", "chatml_tagged"):
        text, spans, *_ = load_template(load_tokenizer(folder(name))).mark(talk, None)
        assert [text[a:b] for a, b in spans] == ["d<|im_end|>"]


def test_arguments_are_written_once_whatever_the_data_has(folder):
    """As a string in the data and an object in the template, or the other way round."""
    for name, written in (("qwen25", '"arguments": {"city": "Rom"}'), ("deepseek_r1", '```json\n{"city": "Rom"}\n```')):
        template = load_template(load_tokenizer(folder(name)))
        for arguments in ({"city": "Rom"}, '{"city": "Rom"}'):
            talk = [user("?"), {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}]
            assert written in template.mark(talk, None)[0]


def test_what_a_template_does_not_write_is_an_error(folder):
    template = load_template(load_tokenizer(folder("chatml")))
    with pytest.raises(BadRow, match="does not write the tool 'weather'"):
        template.mark(PLAIN_TALK["one turn"], TOOLS)
    with pytest.raises(BadRow, match="does not write the tool calls of message 1"):
        template.mark([user("?"), {"role": "assistant", "content": "", "tool_calls": [call({})]}], None)
    with pytest.raises(BadRow, match="U\\+FDD0"):
        template.mark([user("\ufdd0"), said("x")], None)
    context = {"role": "developer", "content": "Speak as pirates do."}
    assert context["content"] in template.mark([context, *PLAIN_TALK["one turn"]], None)[0]
    with pytest.raises(BadRow, match=r"writes nothing for message 0 \(role 'developer'\)"):
        load_template(load_tokenizer(folder("zephyr"))).mark([context, *PLAIN_TALK["one turn"]], None)


def test_half_a_surrogate_pair_is_an_error(folder):
    tokenizer = load_tokenizer(folder("chatml"))
    template = load_template(tokenizer)
    bad = [Text("a\ud800"), Completion("a", "b\udc00"), Chat([user("\ud83d"), said("b")])]
    found = encode([*bad, Text("a\U0001f600")], tokenizer, template)
    assert all(isinstance(error, BadRow) and "half of a surrogate pair" in str(error) for error in found[:3])
    assert isinstance(found[3], Encoded)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ messages | map(attribute='content') | join }}", "writes nothing for message 1"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}" * 2, "writes several parts"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "writes nothing for message 1"),
        ("{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x[1:] }}", "its own output"),
        ("{{ raise_exception('no <thanks>') }}", "refuses it: no <thanks>"),
        ("{{ messages[9].content.strip() }}", "refuses it"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "fails on it"),
    ],
)
def test_where_it_cannot_be_told_it_is_said(source, what):
    with pytest.raises(BadRow, match=what):
        ChatTemplate({"default": source}, {}).mark(PLAIN_TALK["one turn"], None)


def test_a_template_without_an_end_mark_is_noted():
    assert (
        "stopping is not learned"
        in ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}, {}).notes()[0]
    )
    assert not ChatTemplate({"default": PLAIN}, {"eos_token": "</s>", "bos_token": ""}).notes()


def test_a_prompt_that_opens_a_thought_which_earlier_turns_do_not_have():
    """As in Qwen3.5: what the prompt gives is not trained in the last turn; in earlier ones the header is not."""
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' }}"
        "{{ (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m.content + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}"
    )
    talk = [user("a"), said("b"), user("c"), said("d", reasoning_content="e")]
    text, spans, *_ = ChatTemplate({"default": source}, {}).mark(talk, None)
    assert [text[a:b] for a, b in spans] == ["b<end>", "e</think>d<end>"]


def learned(source: str, talk, tools=None) -> list[str]:
    text, spans, *_ = ChatTemplate({"default": source}, {}).mark(talk, tools)
    return [text[a:b] for a, b in spans]


def test_an_opening_that_is_always_behind_the_last_turn_is_not_the_answer():
    """As Command R7B writes it, asked to open a turn or not; the mark of an answer is the assistant's own."""
    source = (
        "{% for m in messages %}{{ '<turn>' + m.role + '|' + ('<answer>' if m.role == 'assistant' else '') }}"
        "{{ m.content + '</turn>' }}{% endfor %}{{ '<turn>assistant|' }}"
    )
    assert learned(source, PLAIN_TALK["three turns"]) == [f"<answer>{w}</turn>" for w in ("b", "d d", "f")]


def test_openings_that_share_a_part_of_a_token_end_before_it():
    """As DeepSeek V3.2 opens a turn, by <think> where there are thoughts, else by </think>."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<a>' }}{% if m.reasoning_content or '<think>' in"
        " m.content %}{{ '<think>' + (m.reasoning_content or '') }}{% endif %}{{ '</think>' + m.content + '<end>' }}"
        "{% else %}{{ '<u>' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<a><think>' }}{% endif %}"
    )
    assert learned(source, PLAIN_TALK["one turn"]) == ["</think>Use a pin.<end>"]
    assert learned(source, THOUGHTS["thought apart"]) == ["One and one.</think>Two.<end>"]


def test_answers_of_tools_in_the_assistants_turn_are_not_learned():
    """As Gemma 4 writes them; conversations without are read."""
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role != 'tool' %}{{ '<' + m.role + '>' }}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% if m.tool_calls %}{{ messages[loop.index0 + 1].content }}{% endif %}{{ '<end>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    assert learned(source, PLAIN_TALK["one turn"], TOOLS) == ["Use a pin.<end>"]
    with pytest.raises(BadRow, match="what tools answer into the assistant's turns"):
        learned(source, CALLS["call"], TOOLS)


def test_plain_template(folder, tmp_path):
    tokenizer = load_tokenizer(folder("llama2"))
    template = load_template(tokenizer, read_choice("plain"))
    text, spans, *_ = template.mark(CALLS["call"], TOOLS)
    assert text.startswith('<|tools|>\n[{"type": "function"')
    assert text.endswith("<|assistant|>\nYes, it rains.</s>\n")
    assert [text[a:b] for a, b in spans] == [
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln <&>"}}</tool_call></s>',
        "Yes, it rains.</s>",
    ]
    assert template.text([user("?")], prompt=True).endswith("</s>\n<|assistant|>\n")


def test_chatml_template(folder):
    tokenizer = load_tokenizer(folder("llama2"))
    template = load_template(tokenizer, read_choice("chatml"))
    for title, talk in PLAIN_TALK.items():
        text, spans, *_ = template.mark(talk, None)
        assert text.startswith("<|im_start|>")
        assert [text[a:b] for a, b in spans] == expected_parts(text, *FAMILIES["chatml"][3:]), title
    text, spans, *_ = template.mark(CALLS["call"], TOOLS)
    assert [text[a:b] for a, b in spans][0].endswith("</tool_call><|im_end|>")
    assert template.text([user("?")], prompt=True).endswith("?<|im_end|>\n<|im_start|>assistant\n")
    (note,) = template.notes()
    assert note.startswith("answers end in <|im_end|>, at which the model's generation does not stop (</s>)")


def test_where_a_template_is_found(folder, tmp_path):
    core = (folder("chatml") / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(core)
    assert load_template(load_tokenizer(tmp_path)) is None
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_template(load_tokenizer(tmp_path))
    assert (template.text([], None), template.text([], TOOLS)) == ("D", "T")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "D"}))
    template = load_template(load_tokenizer(tmp_path))
    assert (template.text([], None), template.text([], TOOLS)) == ("D", "A")
    (tmp_path / "chat_template.jinja").write_text("J")  # the newer place wins
    assert load_template(load_tokenizer(tmp_path)).text([]) == "J"
    (tmp_path / "mine.jinja").write_text("M{% if %}")
    with pytest.raises(InputError, match="mine.jinja: the chat template does not compile, line 1"):
        load_template(load_tokenizer(tmp_path), read_choice(str(tmp_path / "mine.jinja")))
    with pytest.raises(InputError, match="no such file, and none of chatml, plain"):
        read_choice(str(tmp_path / "absent.jinja"))


def test_templates_run_in_a_sandbox():
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include '/etc/passwd' %}"):
        with pytest.raises((BadRow, TypeError)):
            text = ChatTemplate({"default": source}, {}).text([user("a")])
            assert not text, text  # an unsafe attribute may also read as undefined
            raise BadRow("nothing leaks")


def test_overlap_by_hand():
    # "ab" "c" and two tokens of one character "é", then a mark without characters before "x".
    offsets = np.array([[0, 2], [2, 3], [3, 4], [3, 4], [4, 4], [4, 5]])
    assert overlap(offsets, [(1, 3)]).tolist() == [True, True, False, False, False, False]
    assert overlap(offsets, [(3, 4)]).tolist() == [False, False, True, True, False, False]
    assert overlap(offsets, [(4, 5), (0, 1)]).tolist() == [True, False, False, False, True, True]
    assert overlap(np.zeros((0, 2), np.int64), [(0, 1)]).tolist() == []


WORDS = st.text(st.sampled_from(list('ab \n<|>é日🦜_{}%"\\')), max_size=12)


ANY = sorted(set(FAMILIES) - {"llama31", *NEED_TOOLS})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    st.sampled_from(sorted(set(FAMILIES) - {"llama31", *NEED_TOOLS})),
)
def test_any_words(turns, name):
    """Whatever is said, the spans are what the template wrote between the opening and the end of the turn."""
    bos, eos, *_, before, after = FAMILIES[name]
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate({"default": source}, {"bos_token": bos, "eos_token": eos})
    talk = [m for asked, answer in turns for m in (user(asked), said(answer))]
    text, spans, *_ = template.mark(talk, None)
    assert [text[a:b] for a, b in spans] == expected_parts(text, before, after)
