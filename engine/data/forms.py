"""Forms of rows: what a row says, by its keys, as a text, a conversation or token ids.

To read another spelling, add it to a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from trireme.engine.data import messages
from trireme.engine.data.messages import LEARNED, MASKED, NUMBERS, ROLES, is_message, read_message, role_of
from trireme.engine.data.read import EMPTY, BadRow, Fields, json_of, json_type, refuse_media, typed, unread_keys

TALK = ("system", "tools", "functions", "chat_template_kwargs")  # beside messages
MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "loss_masks")  # of ids, 1: trained
PLACES = ("labels", "attention_mask", "position_ids", "seq_lengths")
HISTORY = ("input", "history")
_LISTS = {  # columns that cannot be texts: what they hold as JSON in a string is read
    *("messages", "conversations", "tools", "functions", "history", "chat_template_kwargs"),
    *("input_ids", *MASKS, *PLACES),
}
_READ = {*MASKS, *PLACES, "special_tokens_mask"}  # besides ids
_ANSWERS = ("completion", "chosen", "rejected")  # that may be texts, or messages
ANSWERING = ("assistant", "call")  # roles
_SYSTEM = ("system", "developer")
_SEVERAL = " Give each text a row of its own; of a file of columns, write one object a row"


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


def normal(row: Fields, renames: Mapping[str, str], table: bool) -> Fields:
    """A row under our names, with lists in place of JSON in strings. A column whose place another takes by --map gets a
    name that no form reads. `table`: of a file whose cells cannot be lists. Raises BadRow.
    """
    if renames:
        ours = {name for theirs, name in renames.items() if theirs in row}
        named = {renames.get(key, f"{key} (of the file)" if key in ours else key): value for key, value in row.items()}
        row = {key: value for key, value in named.items() if key != "unused"}
    parsed = {key: value for key in _LISTS & row.keys() if (value := _json_in(row[key], key)) is not None}
    if table and any(isinstance(row.get(key), str) for key in _ANSWERS):
        answers = {key: _messages_in(row[key], key) for key in _ANSWERS if key in row}
        if all(answer and role_of(answer[-1]) in ANSWERING for answer in answers.values()):
            prompt = _messages_in(row.get("prompt"), "prompt")
            parsed |= answers | ({"prompt": prompt} if prompt else {})
    return row | parsed if parsed else row


def _json_in(value: Any, key: str) -> Any:
    """What a string holds as JSON, or None: its reader says what it is. Raises BadRow if a key occurs twice."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json_of(value)
    except BadRow as error:
        raise BadRow(f"{key!r}: {error}") from None
    except (ValueError, RecursionError):
        return None


def _messages_in(value: Any, key: str) -> list[Any]:
    """A list of messages that a string holds as JSON, else []."""
    parsed = _json_in(value, key)
    parsed = [parsed] if isinstance(parsed, dict) else parsed
    return parsed if isinstance(parsed, list) and parsed and all(map(is_message, parsed)) else []


def find_form(row: Fields, forms: Sequence[Form], mapped: Iterable[str] = ()) -> Form | None:
    """The first form whose keys have values, of those that --map names, then of others; else the first whose keys are
    there, whose reader says what is empty.
    """
    order = sorted(forms, key=lambda form: {*mapped}.isdisjoint(form.keys)) if mapped else forms
    for keys in ({key for key, value in row.items() if value not in EMPTY}, {*row}):
        for form in order:
            if keys.issuperset(form.keys) and not (form.keys == ("text",) and _is_turn(row)):
                return form
    return None


def _is_turn(row: Mapping[str, Any]) -> bool:
    """Whether a row is one message."""
    return any(str(row.get(key)).strip().lower() in ROLES for key in ("role", "from", "speaker"))


def shape_of(row: Fields) -> str:
    """What the shape of a row of no form says, if it is certain, and what to do; else ""."""
    if _is_turn(row):
        return ' One message is not a row; a conversation is: {"messages": [{"role": …, "content": …}, …]}.'
    if len(row) > 1 and all(isinstance(value, list) for value in row.values()):
        return f" It holds lists.{_SEVERAL}."
    for key, value in row.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and find_form(inner, FORMS[:-1]):  # a text alone may be anything
            return f" Its {key!r} holds rows: write them alone into a file."
    texts = all(isinstance(value, (str, type(None))) for value in row.values())
    if texts and any(not key.strip() or re.search(r"[.?!:]\s*$|\s.*\s.*\s|\|", key) for key in row):
        return " The first line of a table names its columns: does it? Put a line such as prompt,completion before it."
    return ""


def unused_of(row: Fields, form: Form, example: Example, used: Iterable[str] = ()) -> list[str]:
    """Keys that have a value and are not read."""
    return unread_keys(row, {*form.keys, *used, *(() if isinstance(example, Text) else form.others)})


def check_row(row: Mapping[str, Any]) -> None:
    """Raises BadRow if a column says that the row, or a part of it, is not to be trained, or holds more than text."""
    refuse_media(row)
    for key in [key for key in (*LEARNED, *MASKED) if key in row]:  # few rows have any
        value, off = row[key], key in MASKED
        words = ("true", "1", "1.0") if off else ("false",) if key in NUMBERS else ("false", "0", "0.0")
        part = isinstance(value, list) and off in value and "input_ids" not in row
        if part and all(flag in (0, 1) for flag in value) or str(value).strip().lower() in words:
            fault = f"{key!r} says that the row, or a part of it, is not trained"
            raise BadRow(f"{fault}: leave it out, or the column: --map unused={key}; in messages write 'train': false")


def string(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A string of a row; `default` if it is absent or null. Raises BadRow."""
    value = default if row.get(key) is None else row[key]
    return typed(value, str, repr(key), f"a string.{_SEVERAL}" if isinstance(value, list) else "a string")


# ---------------------------------------------------------------- conversations


def chat_of(row: Fields, column: str = "messages", answered: bool = True) -> Chat:
    """A conversation in a column. `answered`: the assistant has to say something. Raises BadRow."""
    return _chat(row, [(column, messages_of(row, column), True)], answered)


def talk(row: Fields, prompt: Any, answer: Any, column: str) -> Chat:
    """A conversation whose answer alone is trained. `prompt`, `answer`: texts, or lists of messages. Raises BadRow."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    ends = [role_of(turns[-1]) if turns else "" for turns in (before, after)]
    if ends[0] in ANSWERING or (after and ends[1] not in ANSWERING):
        raise BadRow(f"the prompt ends with {ends[0]!r}, {column!r} with {ends[1]!r}, expected user and then assistant")
    if after and role_of(after[0]) == ends[0] == "user":
        raise BadRow(f"{column!r} begins with the user, as a whole conversation: --map messages={column},unused=prompt")
    return _chat(row, [("prompt", before, False), (column, after, True)])


def messages_of(row: Mapping[str, Any], column: str) -> list[Any]:
    """The messages of a column: a list, one alone, or an object of lists, as datasets keeps them. Raises BadRow."""
    value = row.get(column)
    lists = list(value.values()) if isinstance(value, dict) else []
    if lists and all(isinstance(cells, list) for cells in lists) and len({*map(len, lists)}) == 1:
        value = [dict(zip(value or {}, cells, strict=True)) for cells in zip(*lists, strict=True)]
    value = [value] if is_message(value) else value
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BadRow(f"{column!r} is {json_type(value)}, expected a list of {{role, content}}, or that as JSON")
    return value


def _chat(row: Fields, columns: Sequence[tuple[str, list[Any], bool]], answered: bool = True) -> Chat:
    """A conversation of the messages of columns, (name, messages, whether they are trained), with what the row has
    besides. Raises BadRow.
    """
    conversation = list[Fields]()
    for column, turns, trained in columns:
        for i, turn in enumerate(turns):
            message, is_call = read_message(turn, f"{column}[{i}]")
            message |= {} if trained and answered else {"train": False}
            last = conversation[-1] if conversation and is_call else {}
            if last.get("role") == "assistant" and last.get("train", True) == message.get("train", True):
                last["tool_calls"] = [*last.get("tool_calls", []), *message["tool_calls"]]
            else:
                conversation.append(message)
    if row.get("system") not in EMPTY:
        system, _ = read_message({"role": "system", "content": row["system"]}, "'system'")
        if not conversation or conversation[0]["role"] not in _SYSTEM:
            conversation = [system, *conversation]
        elif conversation[0].get("content") != system["content"]:
            raise BadRow("has a 'system' column and a system message. Leave the column out: --map unused=system")
    answers = [message for message in conversation if message["role"] == "assistant"]
    if answered and not any(map(_has_content, answers if len(columns) == 1 else answers[-1:])):
        raise BadRow(f"nothing to train on: {columns[-1][0]!r} has no words of the assistant")
    for message in answers:
        if not _has_content(message):
            message["train"] = False  # learning to say nothing is not meant
    name = "'chat_template_kwargs'"
    variables = typed(messages.parsed(row.get("chat_template_kwargs") or {}, name), dict, name, "an object")
    variables = {key: value for key, value in variables.items() if value is not None}
    return Chat(messages.number_calls(conversation), messages.read_tools(row), variables or None)


def with_system(example: Chat, system: str) -> Chat:
    """With that system message if it has none."""
    if example.messages and example.messages[0]["role"] in _SYSTEM:
        return example
    return example._replace(messages=[{"role": "system", "content": system}, *example.messages], plain=None)


def _has_content(message: Fields) -> bool:
    content = message.get("content") or ""
    has_text = any(text.strip() for text in content) if isinstance(content, list) else bool(content.strip())
    return has_text or any(message.get(key) for key in ("reasoning_content", "tool_calls"))


# ---------------------------------------------------------------- forms


def completion(prompt: str, answer: str, name: str = "'completion'") -> Text:
    """A prompt and its completion, joined as they are. Raises BadRow."""
    if not answer.strip():
        raise BadRow(f"{name} is empty")
    return Text(prompt + answer, len(prompt))


def _prompt_completion(row: Fields) -> Example:
    prompt, answer = (part_of(row, key) for key in ("prompt", "completion"))
    if isinstance(prompt, str) and isinstance(answer, str):
        return completion(prompt, answer)
    return talk(row, prompt if not isinstance(prompt, str) or prompt.strip() else [], answer, "completion")


def part_of(row: Fields, key: str) -> str | list[Any]:
    """A column that is a text or messages. Raises BadRow."""
    value = row.get(key)
    if value == [] or is_message(value) or (isinstance(value, list) and not isinstance(value[0], str)):
        return messages_of(row, key) if value else []
    return string(row, key)


def alpaca(row: Fields) -> Chat:
    """`instruction`, `input`, `output`, `history: [[question, answer]]`. Raises BadRow."""
    task, context, answer = string(row, "instruction"), string(row, "input", ""), string(row, "output")
    history = row.get("history") or []
    texts = lambda pair: isinstance(pair, list) and [*map(type, pair)] == [str, str]
    if not isinstance(history, list) or not all(map(texts, history)):
        raise BadRow("'history' is not a list of [question, answer] pairs")
    source = ", paired with an input that provides further context" if context else ""
    block = f"### Input:\n{context}\n\n" if context else ""
    prompt = (  # Stanford Alpaca's, for models without a chat template
        f"Below is an instruction that describes a task{source}. Write a response that appropriately completes the "
        f"request.\n\n### Instruction:\n{task}\n\n{block}### Response:\n"
    )
    plain = completion(prompt, answer, "'output'")
    pairs = [*history, ["\n".join(part for part in (task, context) if part), answer]]
    roles = ({"role": "user"}, {"role": "assistant"})
    turns = [role | {"content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]
    is_single = not history and not any(row.get(key) for key in TALK)
    return _chat(row, [("output", turns, True)])._replace(plain=plain if is_single else None)


def _ids(row: Fields) -> Ids:
    """`input_ids` without the padding that attention_mask leaves out. A token is trained if labels and all masks say
    so. Raises BadRow.
    """
    ids = _integers(row, "input_ids")
    column = lambda key, flags=True: _integers(row, key, len(ids), flags) if row.get(key) is not None else []
    masks, labels, attended = [*filter(None, map(column, MASKS))], column("labels", False), column("attention_mask")
    start, stop = (attended.index(1), len(ids) - attended[::-1].index(1)) if any(attended) else (0, len(ids))
    parts = [] if row.get("seq_lengths") is None else _integers(row, "seq_lengths")
    fault, places = "", column("position_ids", False)[start:stop]
    if unknown := [key for key in unread_keys(row, _READ) if key.endswith(("mask", "masks"))]:
        fault = (
            f"{unknown[0]!r} is not a known mask. Is 1 trained? --map loss_mask={unknown[0]}; else unused={unknown[0]}"
        )
    elif not all(attended[start:stop]):
        fault = "'attention_mask' leaves out all tokens, or some between others; only pads at the ends can be"
    elif len(parts) > 1 or any(after != before + 1 for before, after in pairwise(places)):
        fault = "'seq_lengths' or 'position_ids' say that the row holds several documents. Give each a row of its own"
    elif labels and (wrong := [i for i in range(start, stop) if labels[i] not in (ids[i], -100)]):
        fault = f"labels[{wrong[0]}] is {labels[wrong[0]]}, expected -100 or the token itself (labels are not shifted)"
    elif min(ids) < 0 or max(ids) >= 1 << 31:
        fault = "'input_ids' holds a number that is not a token id"
    if fault:
        raise BadRow(fault)
    masks += [[label != -100 for label in labels]] if labels else []
    trained = [*map(all, zip(*masks, strict=True))][start:stop]
    return Ids(ids[start:stop], None if all(trained) else trained)


def _integers(row: Fields, key: str, n: int = 0, flags: bool = False) -> list[int]:
    """A list of whole numbers, if n > 0 of n; with `flags` of 0 and 1. Raises BadRow."""
    values = row[key]
    kinds = {*map(type, values)} if isinstance(values, list) else {type(None)}
    right = kinds <= ({int, bool} if flags else {int}) and not (flags and not {*values} <= {0, 1})
    if not values or not right or len(values) != (n or len(values)):
        expected = f"a list of {f'{n} ' if n else ''}whole numbers{', 0 or 1' if flags else ''}"
        raise BadRow(f"{key!r} is {json_type(values)}, expected {expected}")
    return values


FORMS = (
    Form("messages", ("messages",), chat_of),
    Form("sharegpt", ("conversations",), lambda row: chat_of(row, "conversations")),
    Form("input_ids", ("input_ids",), _ids, (*MASKS, *PLACES)),
    Form("prompt,completion", ("prompt", "completion"), _prompt_completion),
    Form("alpaca", ("instruction", "output"), alpaca, (*HISTORY, *TALK)),
    Form("text", ("text",), lambda row: completion("", string(row, "text"), "'text'")),
)
