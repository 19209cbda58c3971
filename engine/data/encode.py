"""Examples to tokens. Spans of characters to train on become tokens by the tokens' offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trireme.engine.data.chat import ChatTemplate, Marked
from trireme.engine.data.forms import Example, Ids, Text
from trireme.engine.data.read import ROW, BadRow
from trireme.engine.data.template import Span
from trireme.engine.data.tokenizer import Tokenizer, Tokens


class Encoded(NamedTuple):
    """The tokens of examples, one after another, and which are trained, from tokens before."""

    ids: np.ndarray  # (N,) int32
    trained: np.ndarray  # (N,) bool
    lengths: list[int]  # of each example; 0 of a bad one
    faults: dict[int, str]  # of bad ones
    counts: Counter[str]  # characters, unknown (tokens), early and spaced (rows), those of Marked
    unread: tuple[str, ...]  # keys that the template does not write


def encode_examples(
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    limit: Callable[[int], None] = lambda _: None,
) -> Encoded:
    """The tokens of examples. `tokenizer` may be None if all are token ids. Calls limit(characters) before work."""
    results, texts = dict[int, tuple[np.ndarray, np.ndarray] | BadRow](), dict[int, Marked]()
    for i, example in enumerate(examples):
        try:
            if isinstance(example, Ids):
                results[i] = _ids(example)
            else:
                texts[i] = _marked(example, template, limit)
        except (BadRow, RecursionError) as error:
            results[i] = error if isinstance(error, BadRow) else BadRow("is nested too deeply")
    counts, unread = Counter[str](), dict[str, None]()
    for i, tokens in _tokenized(examples, texts, tokenizer, limit) if tokenizer else ():
        assert tokenizer
        if isinstance(tokens, BadRow):
            results[i] = tokens
            continue
        text = texts[i]
        results[i] = _trained(examples[i], text, tokens, tokenizer, counts)
        counts["characters"] += len(text.text)
        counts.update(text.counts)
        unread |= dict.fromkeys(text.unread)
    good = {i: tokens for i, tokens in sorted(results.items()) if not isinstance(tokens, BadRow)}
    faults = {i: str(tokens) for i, tokens in results.items() if isinstance(tokens, BadRow)}
    empty = (np.zeros(0, np.int32), np.zeros(0, bool))
    ids, trained = (np.concatenate(parts) for parts in zip(empty, *good.values(), strict=True))
    if tokenizer and tokenizer.unknown is not None:
        counts["unknown"] = int((ids == tokenizer.unknown).sum())
    lengths = [len(good.get(i, empty)[0]) for i in range(len(examples))]
    return Encoded(ids, trained, lengths, faults, counts, tuple(unread))


def size_of(example: Example) -> int:
    """About the number of characters; it bounds a batch and its time. Raises RecursionError."""
    return 4 * len(example.ids) if isinstance(example, Ids) else len(repr(example))


def check_text(text: str) -> None:
    """Raises BadRow where `text` is too long or no Unicode: JSON may hold half of a surrogate pair."""
    fault = f"comes to a text of {len(text):,} characters; the most is {ROW:,}" if len(text) > ROW else ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        fault = f"holds {text[error.start]!r}, half of a surrogate pair, which is not a character"
    if fault:
        raise BadRow(fault)


def _ids(example: Ids) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(example.ids, np.int32)
    trained = np.ones(len(ids), bool) if example.trained is None else np.array(example.trained, bool)
    trained[:1] = False  # nothing predicts the first token
    return ids, trained


def _marked(example: Example, template: ChatTemplate | None, limit: Callable[[int], None]) -> Marked:
    """The text of an example, with what is trained of it; of running text, all of which is, no span. Raises BadRow."""
    if isinstance(example, Text):
        marked = Marked(example.text, [(example.begins, len(example.text))] if example.begins else [])
    else:
        assert template, "prepare.py takes the plain form of conversations where there is none"
        assert not isinstance(example, Ids)
        limit(size_of(example))
        marked = template.mark(example)
    check_text(marked.text)
    return marked


def _tokenized(
    examples: Sequence[Example], texts: dict[int, Marked], tokenizer: Tokenizer, limit: Callable[[int], None]
) -> Iterator[tuple[int, Tokens | BadRow]]:
    """Yields the tokens of texts, with offsets but of running text."""
    running = {i: example for i in texts if isinstance(example := examples[i], Text) and not example.begins}
    plain = [i for i, example in running.items() if not (example.before or example.after)]
    limit(sum(len(text.text) for text in texts.values()))
    for numbers, offsets in ((plain, False), ([i for i in texts if i not in running], True)):
        yield from zip(numbers, tokenizer.encode([texts[i].text for i in numbers], offsets), strict=True)
    for i in running.keys() - plain:
        yield i, tokenizer.part(running[i].before, running[i].text, running[i].after)


def _trained(
    example: Example, text: Marked, tokens: Tokens, tokenizer: Tokenizer, counts: Counter[str]
) -> tuple[np.ndarray, np.ndarray]:
    """(ids (n,) int32, trained (n,) bool) of an example, with the tokens around a text."""
    ids, offsets = tokens
    if offsets is None:  # running text
        assert isinstance(example, Text)
        ids, _ = tokenizer.wrap(ids, example.starts, example.ends)
        trained = np.ones(len(ids), bool)
        trained[:1] = not example.starts  # nothing predicts the first token
        return ids, trained
    trained = overlap(without_spaces(ids, offsets, text.text, tokenizer.greedy), text.spans)
    if isinstance(example, Text):
        if text.text[example.begins - 1].isspace() and trained.any():
            counts["spaced"] += bool(offsets[trained.argmax(), 0] < example.begins)
        n = len(ids)
        ids, lead = tokenizer.wrap(ids, end=example.ends)
        trained = np.concatenate([np.zeros(lead, bool), trained, np.ones(len(ids) - lead - n, bool)])  # the end too
    trained[:1] = False
    learned = ids[trained]
    counts["early"] += sum(int(np.count_nonzero(learned == stop)) for stop in tokenizer.stop_ids) > len(text.spans)
    return ids, trained


def without_spaces(ids: np.ndarray, offsets: np.ndarray, text: str, greedy: Sequence[int]) -> np.ndarray:
    """The offsets (n, 2) without the spaces that `greedy` tokens take."""
    offsets = offsets.copy() if greedy else offsets
    for position in np.flatnonzero(np.isin(ids, greedy)).tolist() if greedy else ():
        start, stop = offsets[position].tolist()
        piece = text[start:stop]
        offsets[position] = start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
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
