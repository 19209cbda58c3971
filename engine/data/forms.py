"""Rows: what a row says, found by its keys from one table, as a text, a conversation or token ids.

To read another spelling, add it to a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from trireme.engine.data.read import EMPTY, BadRow, Fields, json_of, kind_of, unread_keys
from trireme.engine.data.tools import number_calls, read_calls, read_tools, turns_of
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

ROLES = {  # ours, and its names in files, in any case; others are left to the template
    name: role
    for role, names in {
        "user": "user human",
        "assistant": "assistant gpt chatgpt chatbot model bot ai bard bing claude",
        "system": "system",
        "tool": "tool function observation function_response tool_response",
        "call": "function_call tool_call",  # joins the assistant's message before it
    }.items()
    for name in names.split()
}
KEYS = {  # of a message: ours, and its names in files
    "role": ("role", "from"),
    "content": ("content", "value"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking"),
    "tool_calls": ("tool_calls", "function_call"),
}
LEARNED = (  # of a message, or a row: 1 or true is trained
    *("train", "training", "trainable", "is_trainable", "is_train", "do_train", "learn"),
    *("loss", "loss_mask", "step_loss_mask", "loss_scale", "loss_weight", "weight"),
)
NUMBERS = ("loss", "loss_scale", "loss_weight", "weight")  # of these, that may mean something else in a row
MASKED = ("mask", "masked", "is_masked")  # true: not trained
PARTS = {"text": ("text", "input_text", "output_text"), "thinking": ("thinking", "reasoning")}  # types in a content
MEDIA = ("image", "video", "audio", "pixel_value", "input_feature")  # less an s
TALK = ("system", "tools", "functions", "chat_template_kwargs")  # beside messages
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "loss_masks")  # of ids, 1: trained
PLACES = ("labels", "attention_mask", "position_ids", "seq_lengths")
HISTORY = ("input", "history")
LISTS = {  # columns that cannot be texts: what they hold as JSON in a string is read
    *("messages", "conversations", "rejected_messages", "tools", "functions", "history", "chat_template_kwargs"),
    *("input_ids", "preferred_output", "non_preferred_output", *MASKS, *PLACES),
}
ANSWERS = ("completion", "chosen", "rejected")  # that may be texts, or messages
SYSTEM = ("system", "developer")
LIKELY = {  # columns that --map is advised for
    "instruction": ("question", "query", "problem", "prompt", "input", "user"),
    "output": ("answer", "response", "reply", "solution", "completion", "assistant"),
    "text": ("content", "body", "document", "article"),
    "prompt": ("sentence1", "premise", "question1", "text1"),
    "completion": ("sentence2", "hypothesis", "question2", "text2"),
}


class Text(NamedTuple):
    """A text whose characters from `begins` on are trained: 0 of running text, the prompt's length of a completion. A
    long one comes in pieces, with the characters around each.
    """

    text: str
    begins: int = 0
    starts: bool = True
    ends: bool = True
    before: str = ""
    after: str = ""


class Chat(NamedTuple):
    """A conversation. The assistant's messages are trained but those with "train": False. A content is a string, a list
    of the texts of its parts, or absent.
    """

    messages: list[Fields]
    tools: list[Fields] | None = None
    variables: Fields | None = None  # of the chat template
    plain: Text | None = None  # for no chat template
    unused: tuple[str, ...] = ()  # keys inside the row that are not read


class Ids(NamedTuple):
    """Token ids, and which are trained (None: all)."""

    ids: list[int]
    trained: list[bool] | None = None


Example = Text | Chat | Ids


class Form(NamedTuple):
    """A form of rows: the keys that make it, what reads it, and keys that a conversation may have besides."""

    name: str
    keys: tuple[str, ...]
    read: Callable[[Fields], Any]
    others: tuple[str, ...] = TALK


# ---------------------------------------------------------------- a row


def parse_map(text: str | None, known: Iterable[str]) -> dict[str, str]:
    """`ours=theirs,...` as {their name: our name}. Raises InputError."""
    renames, known = dict[str, str](), {"unused", *known}
    for part in filter(None, (text or "").split(",")):
        ours, theirs = (name.strip() for name in f"{part}=".split("=", 1))
        theirs = theirs.removesuffix("=").strip()
        if not (ours and theirs):
            raise InputError(f"--map {text}: expected OURS=YOURS, such as prompt=question,completion=answer.")
        if theirs in renames or (ours != "unused" and ours in renames.values()):
            raise InputError(f"--map {text}: {theirs if theirs in renames else ours!r} is named twice. Leave one out.")
        renames[theirs] = ours
    for ours in renames.values():
        if ours not in known:
            turned = ",".join(f"{theirs}={ours}" for theirs, ours in renames.items())
            way_out = f"perhaps --map {turned}" if renames.keys() <= known else f"there are {', '.join(sorted(known))}"
            raise InputError(f"--map {text}: no form of rows has a column {shown(ours)!r}; {way_out}.")
    return renames


def normal(row: Fields, renames: Mapping[str, str], table: bool) -> Fields:
    """A row under our names, with lists in place of JSON in strings. A column whose place another takes by --map gets a
    name that no form reads. `table`: of a file whose cells cannot be lists. Raises BadRow.
    """
    if renames:
        ours = {name for theirs, name in renames.items() if theirs in row}
        named = {renames.get(key, f"{key} (of the file)" if key in ours else key): value for key, value in row.items()}
        row = {key: value for key, value in named.items() if key != "unused"}
    held = {key: value for key in LISTS & row.keys() if (value := _json_in(row[key], repr(key))) is not None}
    if table and any(isinstance(row.get(key), str) for key in ANSWERS):
        answers = {key: _messages_in(row[key]) for key in ANSWERS if key in row}
        if answers and all(answer and role_of(answer[-1]) in ("assistant", "call") for answer in answers.values()):
            held |= answers
            if asked := _messages_in(row.get("prompt")):
                held["prompt"] = asked
    return row | held if held else row


def _json_in(value: Any, what: str) -> Any:
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json_of(value)
    except BadRow as error:
        raise BadRow(f"{what}: {error}") from None
    except (ValueError, RecursionError):
        return None  # its reader says what it is


def _messages_in(value: Any) -> list[Any]:
    """A list of messages that a string holds as JSON, else []."""
    held = _json_in(value, "a message")
    held = [held] if isinstance(held, dict) else held
    return held if isinstance(held, list) and held and all(map(_is_message, held)) else []


def _is_message(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else set[str]()
    return any(key in keys for key in KEYS["role"]) and bool({*KEYS["content"], "tool_calls"} & keys)


def find_form(row: Fields, forms: Sequence[Form], mapped: Iterable[str] = ()) -> Form | None:
    """The first form whose keys have values, of those that --map names, then of others; else the first whose keys are
    there, whose reader says what is empty.
    """
    named = [form for form in forms if not {*mapped}.isdisjoint(form.keys)] if mapped else []
    order = [*named, *(form for form in forms if form not in named)] if named else forms
    for keys in ({key for key, value in row.items() if value not in EMPTY}, row.keys()):
        for form in order:
            if keys >= {*form.keys} and not (form.keys == ("text",) and _speaker(row)):
                return form
    return None


def _speaker(row: Mapping[str, Any]) -> str:
    """The key that says whose message a row is, if it is one; else ""."""
    said = (key for key in ("role", "from", "speaker") if isinstance(row.get(key), str))
    return next((key for key in said if row[key].strip().lower() in ROLES), "")


def unused_of(row: Fields, form: Form, examples: Sequence[Example], known: Iterable[str] = ()) -> list[str]:
    """Keys that have a value and are not read."""
    others = () if isinstance(examples[0], Text) else form.others
    inside = [key for example in examples if isinstance(example, Chat) for key in example.unused]
    return [*unread_keys(row, {*form.keys, *others, *known}), *dict.fromkeys(inside)]


def check_row(row: Mapping[str, Any]) -> None:
    """Raises BadRow if a column says that the row, or a part of it, is not to be trained, or holds more than text."""
    refuse_media(row)
    for key in [key for key in (*LEARNED, *MASKED) if key in row]:  # few rows have any
        value, off = row[key], key in MASKED
        words = (("false", "0", "0.0"), ("true", "1", "1.0"))[off][: 1 if key in NUMBERS else 3]
        if str(value).strip().lower() in words:
            raise BadRow(f"{key!r} is {str(value).lower()}: leave the row out, or the column: --map unused={key}")
        flags = value if isinstance(value, list) and "input_ids" not in row else []
        if flags and all(flag in (0, 1) for flag in flags) and off in flags:
            way_out = f'write "train" of true or false into the messages; to learn all: --map unused={key}'
            raise BadRow(f"{key!r} is a list, whose entries are not known to be about messages: {way_out}")


def refuse_media(keys: Mapping[str, Any], where: str = "") -> None:
    """Raises BadRow if a column, or a key at `where`, has images, videos or audio."""
    for key, value in keys.items():
        stem = key.lower().removesuffix("s").removesuffix("_url").removesuffix("_path")
        if stem in MEDIA and value not in (*EMPTY, "[]", "{}", "null"):
            way_out = "" if where else f". Where its text stands alone, leave the column out: --map unused={key}"
            raise BadRow(f"{where}{key!r} holds content that is not text; only text can be trained on{way_out}")


def string(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string of a row; `default` if it is absent or null. Raises BadRow."""
    value = default if row.get(key) is None else row[key]
    if isinstance(value, str):
        return value
    what, hint = kind_of(value), ""
    if isinstance(value, list):
        what = f"a list of {len(value)}"
        lists = {len(v) for v in row.values() if isinstance(v, list)}
        alike = len(lists) == 1 and len([v for v in row.values() if isinstance(v, list)]) > 1
        hint = ". Give each a row of its own" if value and isinstance(value[0], str) else ""
        hint = ". Its values are lists of one length: a file of columns? Write one object a row" if alike else hint
    raise BadRow(f"{key!r} is {what}, expected a string{hint}")


# ---------------------------------------------------------------- messages


def chat_of(row: Fields, column: str = "messages", answered: bool = True) -> Chat:
    """A conversation in a column. `answered`: the assistant has to say something. Raises BadRow."""
    return chat(row, [(column, messages_of(row, column), True)], answered)


def talk(row: Fields, asked: Any, answer: Any, column: str) -> Chat:
    """A conversation whose answer alone is trained. `asked`, `answer`: texts, or lists of messages. Raises BadRow."""
    before = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if before and role_of(before[-1]) in ("assistant", "call"):
        raise BadRow("the prompt ends with the assistant's words, and the answer goes on: write both as one message")
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if after and role_of(after[-1]) not in ("assistant", "call"):
        raise BadRow(f"{column!r} ends with the role {role_of(after[-1])!r}, expected 'assistant'")
    return chat(row, [("prompt", before, False), (column, after, True)])


def messages_of(row: Mapping[str, Any], column: str) -> list[Any]:
    """The messages of a column: a list, one alone, or an object of lists, as datasets keeps them. Raises BadRow."""
    value = row.get(column)
    columns = list(value.values()) if isinstance(value, dict) else []
    if columns and all(isinstance(held, list) for held in columns) and len({*map(len, columns)}) == 1:
        value = [dict(zip(value or {}, cells, strict=True)) for cells in zip(*columns, strict=True)]
    if _is_message(value):
        return [value]
    if not isinstance(value, list):
        python = isinstance(value, str) and value.lstrip().startswith("[") and "'" in value
        hint = " (it looks like Python's; write it with json.dumps)" if python else ""
        raise BadRow(f"{column!r} is {kind_of(value)}, expected a list of {{role, content}}{hint}")
    if not value:
        raise BadRow(f"{column!r} is empty")
    return value


def chat(row: Fields, columns: Sequence[tuple[str, list[Any], bool]], answered: bool = True) -> Chat:
    """A conversation of the messages of columns, (name, messages, whether they are trained), with what the row has
    besides. Raises BadRow.
    """
    messages, unused = list[Fields](), dict[str, None]()
    for column, turns, trained in columns:
        for i, turn in enumerate(turns):
            for part in turns_of(turn, f"{column}[{i}]"):
                message, is_call = read_message(part, f"{column}[{i}]", unused)
                message |= {} if trained and answered else {"train": False}
                last = messages[-1] if messages and is_call else {}
                if last.get("role") == "assistant" and last.get("train", True) == message.get("train", True):
                    last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
                else:
                    messages.append(message)
    messages = _with_system_column(row, messages, unused)
    answers = [m for m in messages if m["role"] == "assistant"]
    if answered and not answers:
        roles = ", ".join(dict.fromkeys(repr(m["role"]) for m in messages)) or "none"
        raise BadRow(f"no message has the role 'assistant', so there is nothing to train on (its roles: {roles})")
    if answered and not any(map(_says, answers if columns[-1][2] and len(columns) == 1 else answers[-1:])):
        raise BadRow("every assistant message is empty" if len(columns) == 1 else f"{columns[-1][0]!r} is empty")
    for message in answers:
        if not _says(message):
            message["train"] = False  # learning to say nothing is not meant
    variables = row.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise BadRow(f"'chat_template_kwargs' is {kind_of(variables)}, expected an object")
    variables = {key: value for key, value in (variables or {}).items() if value is not None} or None
    return Chat(number_calls(messages), read_tools(row), variables, None, tuple(unused))


def _with_system_column(row: Fields, messages: list[Fields], unused: dict[str, None]) -> list[Fields]:
    if isinstance(row.get("system"), list):  # of Anthropic's parts
        system = read_message({"role": "system", "content": row["system"]}, "'system'", unused)[0]["content"]
    else:
        system = string(row, "system", "")
    if not system:
        return messages
    if not messages or messages[0]["role"] not in SYSTEM:
        return [{"role": "system", "content": system}, *messages]
    if messages[0].get("content") != system:
        raise BadRow("has a 'system' column and a system message. Leave the column out: --map unused=system")
    return messages


def with_system(example: Chat, system: str) -> Chat:
    """With that system message if it has none."""
    if example.messages[:1] and example.messages[0]["role"] in SYSTEM:
        return example
    return example._replace(messages=[{"role": "system", "content": system}, *example.messages], plain=None)


def _says(message: Fields) -> bool:
    content = message.get("content") or ""
    said = any(text.strip() for text in content) if isinstance(content, list) else bool(content.strip())
    return said or any(message.get(key) for key in ("reasoning_content", "tool_calls"))


def role_of(turn: Any) -> str:
    """The role of a message under our name; "" if it has none."""
    said = next((turn[key] for key in KEYS["role"] if turn.get(key)), "") if isinstance(turn, dict) else ""
    return ROLES.get(said.strip().lower(), said) if isinstance(said, str) else ""


def read_message(turn: Any, where: str, unused: dict[str, None]) -> tuple[Fields, bool]:
    """(a message under our names, whether it is a call that is a turn of its own). Null values count as absent;
    "train": False marks what is not trained; keys that are not ours are left to the template. Raises BadRow.
    """
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is {kind_of(turn)}, expected {{role, content}}")
    message = {key: value for key, value in turn.items() if value is not None}
    for ours in ("role", "content"):
        theirs = next((key for key in KEYS[ours] if key in message), ours)
        if theirs != ours:
            message[ours] = message.pop(theirs)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        what = "has no 'role'" if role is None else f"'role' is {kind_of(role) if role else 'empty'}"
        raise BadRow(f"{where} {what}; expected 'user', 'assistant' or another. Its keys: {', '.join(map(repr, turn))}")
    message["role"] = role = ROLES.get(role.strip().lower(), role)
    refuse_media(message, f"{where}: ")
    is_call = role == "call"
    if is_call:
        if message.get("tool_calls") or message.get("function_call"):
            raise BadRow(f"{where} is a call, and has a list of calls too")
        calls = read_calls(message.pop("content", None), where, unused)
        message |= {"role": "assistant", "content": "", "tool_calls": calls}
    else:
        _read_thoughts(message, where)
        _read_content(message, where, unused)
        calls = [c for key in KEYS["tool_calls"] if (value := message.pop(key, None)) not in EMPTY
                 for c in read_calls(value, where, unused)]  # fmt: skip
        if calls and role != "assistant":
            raise BadRow(f"{where} has calls, and the role {role!r}; only an assistant calls")
        message |= {"tool_calls": calls} if calls else {}
    trained = _trained(message, where, unused)
    if "content" not in message and not any(message.get(key) for key in ("reasoning_content", "tool_calls")):
        absent = "has content null" if "content" in turn else "has no 'content'"
        raise BadRow(f"{where} {absent}; its keys: {', '.join(map(repr, turn))}")
    return message if trained else {**message, "train": False}, is_call


def _read_thoughts(message: Fields, where: str) -> None:
    """Thoughts under our name. Raises BadRow if they are not a string, or are given twice and differ."""
    thoughts = {key: message.pop(key) for key in KEYS["reasoning_content"] if key in message}
    held = {key: value for key, value in thoughts.items() if value not in ("", [], {}, False)}
    if wrong := [key for key, value in held.items() if not isinstance(value, str)]:
        raise BadRow(f"{where}: {wrong[0]!r} is {kind_of(held[wrong[0]])}, expected a string")
    if len({*held.values()}) > 1:
        raise BadRow(f"{where}: {' and '.join(map(repr, held))}, the reasoning, are not the same. Leave one out")
    message |= dict.fromkeys(("reasoning_content",) if held else (), next(iter(held.values()), ""))


def _read_content(message: Fields, where: str, unused: dict[str, None]) -> None:
    """A list of parts becomes a text if it has one, else a list of texts. Thoughts among the parts get a key of their
    own.
    """
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise BadRow(f"{where}: 'content' is {kind_of(content)}, expected a string")
        return
    texts, thoughts = list[str](), list[str]()
    for part in [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]:
        kind = part.get("type", "text") if isinstance(part, dict) else kind_of(part)
        known = next((name for name, kinds in PARTS.items() if isinstance(part, dict) and kind in kinds), None)
        if not known:
            raise BadRow(f"{where} holds a part of type {kind!r}; only text can be trained on")
        keys = (*PARTS["thinking"], "text") if known == "thinking" else ("text",)
        held = next((part[key] for key in keys if part.get(key) is not None), None)
        inner = held if isinstance(held, list) and known == "thinking" else [held]
        result = [text.get("text") if isinstance(text, dict) else text for text in inner]
        if not result or not all(isinstance(text, str) for text in result):
            raise BadRow(f"{where} holds a part of type {kind!r} without text; its keys: {', '.join(map(repr, part))}")
        (thoughts if known == "thinking" else texts).append("\n".join(map(str, result)))
        others = unread_keys(part, ("type", "text", *PARTS["thinking"], "closed"))
        unused |= dict.fromkeys(f"messages[].content[].{key}" for key in others)
    message["content"] = texts if len(texts) > 1 else "".join(texts)
    if thoughts and message.get("reasoning_content"):
        raise BadRow(f"{where} has reasoning in its content and in a separate field")
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}


def _trained(message: Fields, where: str, unused: dict[str, None]) -> bool:
    """Removes the keys that say whether the message is trained; returns what they say. Raises BadRow."""
    trained = True
    for key in [key for key in (*LEARNED, *MASKED) if key in message]:
        value, masks = message.pop(key), key in MASKED
        if not isinstance(value, bool if masks else (bool, int, float)) or value not in (0, 1):
            expected = "0 or 1" if key in NUMBERS else "true (not learned) or false" if masks else "true or false"
            raise BadRow(f"{where}: {key!r} is {value!r}, expected {expected}")
        trained = trained and bool(value) != masks
        if bool(value) != masks and key not in NUMBERS and message["role"] != "assistant":
            unused[f"messages[].{key} (role {message['role']})"] = None
    return trained


# ---------------------------------------------------------------- forms


def _text(row: Fields) -> Text:
    text = string(row, "text")
    if not text.strip():
        raise BadRow("'text' is empty")
    return Text(text)


def completion(asked: str, answer: str, name: str = "completion") -> Text:
    """A prompt and its completion, joined as they are. Raises BadRow."""
    if not answer.strip():
        raise BadRow(f"{name!r} is empty")
    return Text(asked + answer, len(asked))


def _prompt_completion(row: Fields) -> Example:
    asked, answer = (part_of(row, key) for key in ("prompt", "completion"))
    if isinstance(asked, str) and isinstance(answer, str):
        return completion(asked, answer)
    return talk(row, asked if not isinstance(asked, str) or asked.strip() else [], answer, "completion")


def part_of(row: Fields, key: str) -> str | list[Any]:
    """A column that is a text or messages. Raises BadRow."""
    value = row.get(key)
    if value == [] or _is_message(value) or (isinstance(value, list) and not isinstance(value[0], str)):
        return messages_of(row, key) if value else []
    return string(row, key)


def alpaca(row: Fields) -> Chat:
    """`instruction`, `input`, `output`, `history: [[question, answer]]`. Raises BadRow."""
    asked, extra, answer = string(row, "instruction"), string(row, "input", ""), string(row, "output")
    if not answer.strip():
        raise BadRow("'output' is empty")
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow("'history' is not a list of [question, answer] pairs")
    pairs = [*history, ["\n".join(part for part in (asked, extra) if part), answer]]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise BadRow("'history' holds something that is not a string")
    turns = [
        {"role": who, "content": text} for pair in pairs for who, text in zip(("user", "assistant"), pair, strict=True)
    ]
    result = chat(row, [("output", turns, True)])
    bare = not history and not any(row.get(key) for key in TALK)
    return result._replace(plain=completion(_alpaca_prompt(asked, extra), answer) if bare else None)


def _alpaca_prompt(asked: str, extra: str) -> str:
    """Stanford Alpaca's prompt, for models without a chat template."""
    context = ", paired with an input that provides further context" if extra else ""
    block = f"### Input:\n{extra}\n\n" if extra else ""
    return (
        f"Below is an instruction that describes a task{context}. "
        f"Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{asked}\n\n{block}### Response:\n"
    )


def _ids(row: Fields) -> Ids:
    """`input_ids` without the padding that attention_mask leaves out. A token is trained if labels and all masks say
    so. Raises BadRow.
    """
    ids = _whole(row, "input_ids")
    n, trained = len(ids), [True] * len(ids)
    for key in unread_keys(row, (*MASKS, *PLACES, "special_tokens_mask")):
        if key.endswith(("mask", "masks")):
            raise BadRow(f"{key!r} is not a known mask. Is 1 trained? --map loss_mask={key}, else unused={key}")
    for key in MASKS:
        if row.get(key) is not None:
            trained = [a and b for a, b in zip(trained, _flags(row, key, n), strict=True)]
    start, stop = 0, n
    if row.get("attention_mask") is not None:
        mask = _flags(row, "attention_mask", n)
        if not any(mask):
            raise BadRow("'attention_mask' leaves out every token")
        start, stop = mask.index(True), n - mask[::-1].index(True)
        if not all(mask[start:stop]):
            raise BadRow("'attention_mask' leaves out tokens between others; only pads at the ends can be left out")
    places = _whole(row, "position_ids", n)[start:stop] if row.get("position_ids") is not None else []
    parts = _whole(row, "seq_lengths") if row.get("seq_lengths") is not None else []
    if len(parts) > 1 or any(after != before + 1 for before, after in pairwise(places)):
        what = "'seq_lengths' says" if len(parts) > 1 else "'position_ids' say"
        raise BadRow(f"{what} that the row holds several documents. Give each a row of its own; they are packed here")
    if row.get("labels") is not None:
        labels = _whole(row, "labels", n)
        for i in range(start, stop):
            if labels[i] not in (ids[i], -100):
                what = f"expected -100 or input_ids[{i}] = {ids[i]} (labels are not shifted)"
                raise BadRow(f"labels[{i}] is {labels[i]}, {what}")
        trained = [a and label != -100 for a, label in zip(trained, labels, strict=True)]
    if min(ids) < 0 or max(ids) >= 1 << 31:
        raise BadRow("'input_ids' holds a number that is not a token id")
    return Ids(ids) if all(trained) and stop - start == n else Ids(ids[start:stop], trained[start:stop])


def _whole(row: Fields, key: str, n: int | None = None) -> list[int]:
    values = row[key]
    if not isinstance(values, list) or not values or not {*map(type, values)} <= {int}:
        what = kind_of(values) if not isinstance(values, list) else "empty" if not values else "of other things"
        raise BadRow(f"{key!r} is {what}, expected a list of whole numbers")
    if n is not None and len(values) != n:
        raise BadRow(f"{key!r} has {len(values)} entries, 'input_ids' {n}")
    return values


def _flags(row: Fields, key: str, n: int) -> list[bool]:
    values = row[key]
    if not isinstance(values, list) or not {*map(type, values)} <= {int, bool} or not {*values} <= {0, 1}:
        raise BadRow(f"{key!r} is not a list of 0 and 1")
    return list(map(bool, _whole({key: list(map(int, values))}, key, n)))


FORMS = (
    Form("messages", ("messages",), chat_of),
    Form("sharegpt", ("conversations",), lambda row: chat_of(row, "conversations")),
    Form("input_ids", ("input_ids",), _ids, (*MASKS, *PLACES)),
    Form("prompt,completion", ("prompt", "completion"), _prompt_completion),
    Form("alpaca", ("instruction", "output"), alpaca, (*HISTORY, *TALK)),
    Form("text", ("text",), _text),
)


# ---------------------------------------------------------------- rows of no form


def unknown(row: Fields, forms: Sequence[Form], works: Callable[[str], bool]) -> str:
    """What is wrong with a row of no form: the row, what is expected, and what its shape or a --map that works says.
    `works`: whether the row can be read with that --map.
    """
    try:
        seen = shown(json.dumps(row, ensure_ascii=False, default=str), 200)
    except RecursionError:
        return "is nested too deeply"
    known = "; ".join(", ".join(form.keys) for form in forms[: len(FORMS)])
    return f"no known form of a row: {seen}. Expected the keys {known}.{_shape(row) or _map_for(row, works)}"


def _shape(row: Fields) -> str:
    """What the shape of a row says, if it is certain, and what to do; else ""."""
    keys, lists = list(row), [value for value in row.values() if isinstance(value, list)]
    if key := _speaker(row):
        names = "" if key == "role" else f" (here {key!r})"
        return f' One message is not a row{names}; a conversation is: {{"messages": [{{"role": …, "content": …}}, …]}}.'
    if len(lists) > 1 and len(lists) == len(row) and len({*map(len, lists)}) == 1:
        return " Its values are lists of one length: a file of columns? Write one object a row."
    odd = [key for key in keys if not key.strip() or re.search(r"[.?!:]\s*$|\s.*\s.*\s", key)]
    if keys and odd and all(isinstance(value, (str, type(None))) for value in row.values()):
        return " The first line of a table names its columns: does it? Put a line such as prompt,completion before it."
    if len(keys) == 1 and "|" in keys[0]:
        return " Its cells end with '|', which is not read: use commas, semicolons or tabs."
    if any(key != key.strip() for key in keys):
        return " Remove the spaces around the names of its columns."
    for key, value in ((key, value) for key, value in row.items() if key not in (*TALK, *PLACES)):
        inner = value if isinstance(value, dict) else value[0] if isinstance(value, list) and value else None
        if isinstance(inner, dict):
            names = ", ".join(shown(name) for name in list(inner)[:4])
            if isinstance(value, list) and all(map(_is_message, value)):
                return f" --map {'messages' if 'role' in inner else 'conversations'}={key}."
            return f" What stands inside {shown(key)!r} ({names}) is not found: write it as columns or as messages."
    return ""


def _map_for(row: Fields, works: Callable[[str], bool]) -> str:
    """Advice on --map, which is tried if it names columns."""
    names = {str(key).strip().lower(): str(key) for key in row}
    for form in FORMS:  # in another case
        if {*form.keys} <= names.keys():
            pairs = ",".join(f"{ours}={names[ours]}" for ours in (*form.keys, *form.others) if ours in names)
            if works(pairs):
                return f" Perhaps --map {pairs}."
    theirs = {ours: [names[name] for name in likely if name in names] for ours, likely in LIKELY.items()}
    for wanted in (("instruction", "output"), ("text",), ("prompt", "completion")):
        if all(len(theirs[ours]) == 1 for ours in wanted):
            pairs = ",".join(f"{ours}={theirs[ours][0]}" for ours in wanted)
            if works(pairs):
                return f" Perhaps --map {pairs}."
    return " Rename columns, OURS=YOURS: --map instruction=question,output=answer."


def tried(
    row: Fields, pairs: str, read: Callable[[Fields, dict[str, str]], Any], renames: Mapping[str, str] | None = None
) -> bool:
    """Whether a row of a file can be read with a --map of these pairs, and those of `renames`."""
    names = {theirs: ours for ours, _, theirs in (pair.partition("=") for pair in pairs.split(","))}
    try:
        read(row, {**(renames or {}), **names})
        return True
    except BadRow:
        return False
