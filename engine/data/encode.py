"""Examples to tokens. Spans of characters to train on become tokens by the tokens' offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from trireme.engine.data.chat import ChatTemplate, Marked
from trireme.engine.data.forms import Example, Ids, Text
from trireme.engine.data.read import CONTEXT, ROW, BadRow
from trireme.engine.data.template import Span
from trireme.engine.data.tokenizer import Tokenizer

WINDOW = 1 << 20  # characters of a piece: the library takes about 170 bytes each
COUNTED = ("characters", "unknown", "said", "unwritten", "beside", "thoughtless", "early", "spaced")

Made = tuple[np.ndarray, np.ndarray] | BadRow  # ids (n,) int32, trained (n,) bool


class Encoded(NamedTuple):
    """The tokens of examples, one after another, and which are trained, from tokens before."""

    ids: np.ndarray  # (N,) int32
    trained: np.ndarray  # (N,) bool
    lengths: list[int]  # of each example; 0 of a bad one
    faults: dict[int, str]  # of bad ones
    counts: Counter[str]  # of COUNTED
    unread: tuple[str, ...]  # keys that the template does not read


def encode(
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    begin: Callable[[int], None] = lambda _: None,
) -> Encoded:
    """The tokens of examples. `tokenizer` may be None if all are token ids. Calls begin(characters) before work."""
    made, counts, unread = dict[int, Made](), Counter[str](), dict[str, None]()
    plain, marked = dict[int, Text](), dict[int, Marked]()
    for i, example in enumerate(examples):
        try:
            if isinstance(example, Ids):
                made[i] = _ids(example)
            elif isinstance(example, Text):
                check(example.text)
                if example.begins:
                    marked[i] = Marked(example.text, [(example.begins, len(example.text))])
                else:
                    plain[i] = example
            else:
                assert template, "prepare.py takes the plain form of conversations where there is none"
                begin(size(example))
                marked[i] = template.mark(example)
                check(marked[i].text)
        except BadRow as error:
            made[i] = error
    if tokenizer:
        made |= _plain(plain, tokenizer, begin)
        made |= _marked(examples, {i: m for i, m in marked.items() if i not in made}, tokenizer, counts, unread, begin)
    good = {i: each for i, each in made.items() if not isinstance(each, BadRow)}
    faults = {i: str(each) for i, each in made.items() if isinstance(each, BadRow)}
    lengths = [len(good[i][0]) if i in good else 0 for i in range(len(examples))]
    order = [good[i] for i in sorted(good)] or [(np.zeros(0, np.int32), np.zeros(0, bool))]
    ids, trained = (np.concatenate(parts) for parts in zip(*order, strict=True))
    if tokenizer:
        counts["unknown"] = 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
        texts = [
            *(text.text for i, text in plain.items() if i in good),
            *(m.text for i, m in marked.items() if i in good),
        ]
        counts["characters"] = sum(map(len, texts))
    return Encoded(ids, trained, lengths, faults, counts, tuple(unread))


def pieces(example: Example) -> Iterator[Example]:
    """Yields the pieces of a long text, whose tokens joined are those of the whole text; another example as it is."""
    if not isinstance(example, Text) or example.begins or not WINDOW < len(example.text) <= ROW:
        yield example
        return
    whole, first = example.before + example.text + example.after, len(example.before)
    end = first + len(example.text)
    for start in range(first, end, WINDOW):
        stop = min(start + WINDOW, end)
        before, after = whole[max(0, start - CONTEXT) : start], whole[stop : stop + CONTEXT]
        yield Text(whole[start:stop], 0, example.starts and start == first, example.ends and stop == end, before, after)


def size(example: Example) -> int:
    """About the number of characters; it bounds a batch and its time."""
    if isinstance(example, Ids):
        return 4 * len(example.ids)
    characters, left = 0, list[Any](example)
    while left:
        value = left.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, (dict, list, tuple)):
            characters += 8 * len(value)  # in addition to text
            left += value.values() if isinstance(value, dict) else value
    return characters


def check(text: str) -> None:
    """Raises BadRow where `text` is too long or no Unicode: JSON may hold half of a surrogate pair."""
    if len(text) > ROW:
        raise BadRow(f"comes to a text of {len(text):,} characters; the most is {ROW:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"holds {text[error.start]!r}, half of a surrogate pair, which is not a character") from None


def _ids(example: Ids) -> Made:
    ids = np.array(example.ids, np.int32)
    return _first(ids, np.ones(len(ids), bool) if example.trained is None else np.array(example.trained, bool))


def _first(ids: np.ndarray, trained: np.ndarray) -> Made:
    """The first token of a document cannot be trained."""
    trained[:1] = False
    return ids, trained


def _plain(texts: dict[int, Text], tokenizer: Tokenizer, begin: Callable[[int], None]) -> dict[int, Made]:
    """Texts of which all is trained."""
    begin(sum(len(text.text) for text in texts.values()))
    whole = {i: text for i, text in texts.items() if not (text.before or text.after)}
    result: dict[int, Any] = dict(zip(whole, tokenizer.encode([text.text for text in whole.values()]), strict=True))
    made = dict[int, Made]()
    for i, text in texts.items():
        ids = result[i] if i in result else tokenizer.part(text.before, text.text, text.after)
        if isinstance(ids, BadRow):
            made[i] = ids
            continue
        ids = ids[0] if i in result else ids
        if text.starts:
            ids, _ = tokenizer.wrap(ids, text.ends)
            made[i] = _first(ids, np.ones(len(ids), bool))
        else:
            if text.ends and tokenizer.eos is not None and ids[-1:].tolist() != [tokenizer.eos]:
                ids = np.append(ids, np.int32(tokenizer.eos))
            made[i] = ids, np.ones(len(ids), bool)
    return made


def _marked(
    examples: Sequence[Example],
    marked: dict[int, Marked],
    tokenizer: Tokenizer,
    counts: Counter[str],
    unread: dict[str, None],
    begin: Callable[[int], None],
) -> dict[int, Made]:
    """Texts of which spans are trained."""
    begin(sum(len(whole.text) for whole in marked.values()))
    result, made = tokenizer.encode([whole.text for whole in marked.values()], offsets=True), dict[int, Made]()
    for (i, whole), tokens in zip(marked.items(), result, strict=True):
        if isinstance(tokens, BadRow):
            made[i] = tokens
            continue
        ids, offsets = tokens
        assert offsets is not None
        trained = overlap(within(ids, offsets, whole.text, tokenizer.greedy), whole.spans)
        example = examples[i]
        if isinstance(example, Text):
            starts = offsets[:, 0][trained]
            spaced = len(starts) and starts[0] < example.begins and whole.text[example.begins - 1].isspace()
            counts["spaced"] += bool(spaced)
            ids, lead = tokenizer.wrap(ids, example.ends)
            flags = np.ones(len(ids), bool)  # the end token too
            flags[: lead + len(trained)] = np.concatenate([np.zeros(lead, bool), trained])
            trained = flags
        made[i] = _first(ids, trained)
        learned = ids[trained]
        ends = sum(int(np.count_nonzero(learned == stop)) for stop in tokenizer.stop_ids)
        counts["early"] += ends > len(whole.spans)
        for name in ("said", "unwritten", "beside", "thoughtless"):
            counts[name] += getattr(whole, name)
        unread |= dict.fromkeys(whole.unread)
    return made


def within(ids: np.ndarray, offsets: np.ndarray, text: str, greedy: dict[int, str]) -> np.ndarray:
    """The offsets (n, 2) without the spaces that `greedy` tokens take."""
    if not greedy:
        return offsets
    offsets = offsets.copy()
    for at in np.flatnonzero(np.isin(ids, list(greedy))).tolist():
        start, stop = offsets[at].tolist()
        content = greedy[int(ids[at])]
        if stop - start > len(content) and (result := text[start:stop].find(content)) >= 0:
            offsets[at] = start + result, start + result + len(content)
    return offsets


def overlap(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens have a character of a span, (n,) bool. offsets (n, 2) int32.

    A token on a border counts, since it cannot be generated in part. One without characters (a word mark of a
    normalizer) counts with the next.
    """
    starts, stops = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    trained = np.zeros(len(offsets), bool)
    for start, stop in spans:
        trained |= (starts < stop) & (stops > start)
    return trained
