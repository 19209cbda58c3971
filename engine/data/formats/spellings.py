"""Preference rows of OpenAI and ms-swift, as rows of `chosen` and `rejected`."""

from __future__ import annotations

from typing import Any

from trireme.engine.data.files.rows import BadRow, Fields, kind_of
from trireme.engine.data.formats.conversations import SAYS_MORE, role_of
from trireme.engine.data.formats.examples import filled_list, string
from trireme.engine.data.formats.messages import refuse_media


def of_openai(row: Fields) -> Fields:
    """`input: {messages, tools}`, `preferred_output`, `non_preferred_output`. Raises BadRow."""
    given = row["input"]
    if not isinstance(given, dict):
        raise BadRow(f"'input' is {kind_of(given)}, expected an object with 'messages'")
    if "messages" not in given:
        raise BadRow("'input' has no 'messages'")
    refuse_media(given, "'input': ")
    asked = filled_list(given, "messages", "{role, content}")
    more = {key: given[key] for key in SAYS_MORE if key in given}
    return {**more, "prompt": asked, "chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}


def of_swift(row: Fields) -> Fields:
    """`messages` with the good answer, and `rejected_response` or `rejected_messages`. Raises BadRow."""
    good: list[Any] = filled_list(row, "messages", "{role, content}")
    if role_of(good[-1]) != "assistant":
        raise BadRow("'messages' does not end with the assistant's message, the good answer")
    bad = row.get("rejected_messages")
    if bad is None:
        bad = [*good[:-1], {"role": "assistant", "content": string(row, "rejected_response")}]
    return {**{key: row[key] for key in SAYS_MORE if key in row}, "chosen": good, "rejected": bad}
