"""Examples to tokens. Spans of characters to train on become tokens by the tokens' offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trireme.engine.data.chat import ChatTemplate, Marked
from trireme.engine.data.files.rows import ROW, BadRow
from trireme.engine.data.formats.examples import Chat, Completion, Example, Ids, Text
from trireme.engine.data.template import Span
from trireme.engine.data.tokens import OVERLAP, WINDOW, Tokenizer


class Encoded(NamedTuple):
    """The tokens of an example, which of them are trained, and counts for the report."""

    ids: np.ndarray  # (n,) int32
    trained: np.ndarray  # (n,) bool: learned, from tokens before
    starts: bool = True
    characters: int = 0
    unknown: int = 0  # tokens
    said: int = 0  # as Marked
    unwritten: int = 0
    unread: tuple[str, ...] = ()
    early: bool = False  # ends within what is learned


TEMPLATE, TOKENIZER = "the chat template", "the tokenizer"


def encode(
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    begin: Callable[[str, int], None] = lambda *_: None,
) -> list[Encoded | BadRow]:
    """The tokens of each example, or what is wrong with it. `tokenizer` may be None if all examples are token ids.

    Calls begin(TEMPLATE or TOKENIZER, characters) before each.
    """
    results, plain, marked = _rendered(examples, template, begin)
    assert tokenizer or not (plain or marked)
    if plain and tokenizer:
        begin(TOKENIZER, sum(len(text.text) for _, text in plain))
        whole_ones = iter(tokenizer.encode([text.text for _, text in plain if not (text.before or text.after)]))
        for i, text in plain:
            if text.before or text.after:
                start, around = len(text.before), text.before + text.text + text.after
                found = tokenizer.part(around, start, start + len(text.text), offsets=False)
            else:
                found = next(whole_ones)
            if isinstance(found, BadRow):
                results[i] = found
            else:
                results[i] = _counted(_text(text, found[0], tokenizer), text.text, tokenizer)
    if marked and tokenizer:
        begin(TOKENIZER, sum(len(whole.text) for _, _, whole in marked))
        batch = tokenizer.encode([whole.text for _, _, whole in marked], offsets=True)
        for (i, example, whole), found in zip(marked, batch, strict=True):
            if isinstance(found, BadRow):
                results[i] = found
            else:
                made = _counted(_learned(example, *found, whole, tokenizer), whole.text, tokenizer)
                learned = made.ids[made.trained]
                ends = sum(int(np.count_nonzero(learned == stop)) for stop in tokenizer.stop_ids)
                results[i] = made._replace(
                    said=whole.said, unwritten=whole.unwritten, unread=whole.unread, early=ends > len(whole.spans)
                )
    return [results[i] for i in range(len(examples))]


def _rendered(
    examples: Sequence[Example], template: ChatTemplate | None, begin: Callable[[str, int], None]
) -> tuple[dict[int, Encoded | BadRow], list[tuple[int, Text]], list[tuple[int, Chat | Completion, Marked]]]:
    """With the examples' indices: results that need no tokenizer; texts; texts with the characters to train on."""
    results: dict[int, Encoded | BadRow] = {}
    plain: list[tuple[int, Text]] = []
    marked: list[tuple[int, Chat | Completion, Marked]] = []
    for i, example in enumerate(examples):
        try:
            if isinstance(example, Ids):
                results[i] = _ids(example)
            elif isinstance(example, Text):
                check(example.text)
                plain.append((i, example))
            else:
                if isinstance(example, Chat):
                    begin(TEMPLATE, size(example))
                whole = _marked(example, template)
                check(whole.text)
                marked.append((i, example, whole))
        except BadRow as error:
            results[i] = error
    return results, plain, marked


def pieces(example: Example) -> Iterator[Example]:
    """Yields the pieces of a long text, whose tokens joined are those of the whole text; another example as it is."""
    if not isinstance(example, Text) or not WINDOW < len(example.text) <= ROW:
        yield example
        return
    whole = example.before + example.text + example.after
    first, end = len(example.before), len(example.before) + len(example.text)
    for start in range(first, end, WINDOW):
        stop = min(start + WINDOW, end)
        starts, ends = example.starts and start == first, example.ends and stop == end
        yield Text(
            whole[start:stop], starts, ends, whole[max(0, start - OVERLAP) : start], whole[stop : stop + OVERLAP]
        )


def size(example: Example) -> int:
    """About the number of characters; it bounds a batch and its time."""
    if isinstance(example, Ids):
        return 4 * len(example.ids)
    characters = 0
    left: list[Any] = list(example)
    while left:
        value = left.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, (dict, list)):
            characters += 8 * len(value)  # in addition to text
            left += value.values() if isinstance(value, dict) else value
    return characters


def _marked(example: Chat | Completion, template: ChatTemplate | None) -> Marked:
    """The text of an example with the characters to train on. Raises BadRow if they are unclear."""
    if isinstance(example, Chat):
        assert template, "prepare.py has turned chats into completions where there is none"
        return template.mark(example.messages, example.tools, example.variables)
    text = example.prompt + example.completion
    return Marked(text, [(len(example.prompt), len(text))], 0, 0)


def check(text: str) -> None:
    """Raises BadRow where `text` is too long or no Unicode: JSON may hold half of a surrogate pair."""
    if len(text) > ROW:
        raise BadRow(f"comes to a text of {len(text):,} characters; the most is {ROW:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"holds {text[error.start]!r}, half of a surrogate pair, which is not a character") from None


def within(ids: np.ndarray, offsets: np.ndarray, text: str, greedy: dict[int, str]) -> np.ndarray:
    """The offsets (n, 2) without the spaces that `greedy` tokens take."""
    if not greedy:
        return offsets
    offsets = offsets.copy()
    for at in np.flatnonzero(np.isin(ids, list(greedy))).tolist():
        start, stop = offsets[at].tolist()
        content = greedy[int(ids[at])]
        if stop - start > len(content) and (found := text[start:stop].find(content)) >= 0:
            offsets[at] = start + found, start + found + len(content)
    return offsets


def overlap(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens have a character of a span, (n,) bool. offsets (n, 2) int64.

    A token on a border counts, since it cannot be generated in part. One without characters (a word mark of a
    normalizer) counts with the next.
    """
    starts, stops = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    trained = np.zeros(len(offsets), bool)
    for start, stop in spans:
        trained |= (starts < stop) & (stops > start)
    return trained


def _counted(made: Encoded, text: str, tokenizer: Tokenizer) -> Encoded:
    unknown = 0 if tokenizer.unknown is None else int((made.ids == tokenizer.unknown).sum())
    return made._replace(characters=len(text), unknown=unknown)


def _first(ids: np.ndarray, trained: np.ndarray) -> Encoded:
    """The first token cannot be trained."""
    trained[:1] = False
    return Encoded(ids, trained)


def _ids(example: Ids) -> Encoded | BadRow:
    if min(example.ids) < 0 or max(example.ids) >= 1 << 31:
        return BadRow("'input_ids' holds a number that is not a token id")
    ids = np.array(example.ids, np.int32)
    return _first(ids, np.ones(len(ids), bool) if example.trained is None else np.array(example.trained, bool))


def _text(example: Text, ids: np.ndarray, tokenizer: Tokenizer) -> Encoded:
    if example.starts:
        ids, _ = tokenizer.wrap(ids, example.ends)
        return _first(ids, np.ones(len(ids), bool))
    if example.ends and tokenizer.eos is not None and ids[-1:].tolist() != [tokenizer.eos]:
        ids = np.append(ids, np.int32(tokenizer.eos))
    return Encoded(ids, np.ones(len(ids), bool), starts=False)


def _learned(
    example: Chat | Completion, ids: np.ndarray, offsets: np.ndarray | None, whole: Marked, tokenizer: Tokenizer
) -> Encoded:
    assert offsets is not None
    trained = overlap(within(ids, offsets, whole.text, tokenizer.greedy), whole.spans)
    return _completion(ids, trained, tokenizer) if isinstance(example, Completion) else _first(ids, trained)


def _completion(ids: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer) -> Encoded:
    wrapped, lead = tokenizer.wrap(ids)
    flags = np.ones(len(wrapped), bool)  # the end token too
    flags[:lead] = False
    flags[lead : lead + len(ids)] = trained
    return _first(wrapped, flags)
