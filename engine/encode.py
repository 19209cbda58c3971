"""Examples to tokens: what is trained on is known by characters, and carried to tokens by their offsets."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from trireme.engine.chat import ChatTemplate
from trireme.engine.examples import Chat, Completion, Example, Ids, Text
from trireme.engine.rows import BadRow
from trireme.engine.tokens import Tokenizer

Span = tuple[int, int]  # characters [start, stop) of a text


class Encoded(NamedTuple):
    """A document, or a piece of one, as tokens."""

    ids: np.ndarray  # (n,) int32
    trained: np.ndarray  # (n,) bool: the token is learned, from those before it
    starts: bool = True


def encode(
    examples: Sequence[Example], tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> list[Encoded | BadRow]:
    """Each example as tokens, or what is wrong with it. `tokenizer` may be None where all examples are ids."""
    results: list[Encoded | BadRow | None] = [None] * len(examples)
    marked: list[tuple[int, str, list[Span]]] = []  # texts with the characters to train on
    plain: list[int] = []
    for i, example in enumerate(examples):
        try:
            if isinstance(example, Ids):
                results[i] = _ids(example)
            elif isinstance(example, Text):
                _check(example.text)
                plain.append(i)
            else:
                text, spans = _marked(example, template)
                _check(text)
                marked.append((i, text, spans))
        except BadRow as error:
            results[i] = error
    if plain:
        for i, (ids, _) in zip(plain, tokenizer.encode([examples[i].text for i in plain]), strict=True):
            results[i] = _text(examples[i], ids, tokenizer)
    if marked:
        batch = tokenizer.encode([text for _, text, _ in marked], offsets=True)
        for (i, _, spans), (ids, offsets) in zip(marked, batch, strict=True):
            trained = overlap(offsets, spans)
            results[i] = (
                _completion(ids, trained, tokenizer) if isinstance(examples[i], Completion) else _first(ids, trained)
            )
    return results


def _marked(example: Chat | Completion, template: ChatTemplate | None) -> tuple[str, list[Span]]:
    """(text, the characters to train on). Raises BadRow where that is not clear."""
    if isinstance(example, Chat):
        return template.spans(example.messages, example.tools)
    text = example.prompt + example.completion
    return text, [(len(example.prompt), len(text))]


def _check(text: str) -> None:
    """Raises BadRow where `text` is not Unicode: JSON may write one half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"holds {text[error.start]!r}, half of a surrogate pair, which is no character") from None


def overlap(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens hold a character of a span. offsets (n, 2) int64. Returns (n,) bool.

    A token on the border belongs to the span: it cannot be generated in part. A token without characters of its own
    (a word mark that a normalizer puts in) goes with the character that it stands before.
    """
    starts, stops = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    trained = np.zeros(len(offsets), bool)
    for start, stop in spans:
        trained |= (starts < stop) & (stops > start)
    return trained


def _first(ids: np.ndarray, trained: np.ndarray) -> Encoded:
    """A whole document: its first token has nothing before it, so it cannot be learned."""
    trained[:1] = False
    return Encoded(ids, trained)


def _ids(example: Ids) -> Encoded | BadRow:
    if min(example.ids) < 0 or max(example.ids) >= 1 << 31:
        return BadRow("'input_ids' holds a number that is no token id")
    ids = np.array(example.ids, np.int32)
    return _first(ids, np.ones(len(ids), bool) if example.trained is None else np.array(example.trained, bool))


def _text(example: Text, ids: np.ndarray, tokenizer: Tokenizer) -> Encoded:
    if example.starts:
        ids, _ = tokenizer.wrap(ids, example.ends)
        return _first(ids, np.ones(len(ids), bool))
    if example.ends and tokenizer.eos is not None:
        ids = np.append(ids, np.int32(tokenizer.eos))
    return Encoded(ids, np.ones(len(ids), bool), starts=False)


def _completion(ids: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer) -> Encoded:
    wrapped, lead = tokenizer.wrap(ids)
    flags = np.ones(len(wrapped), bool)  # the end token is learned
    flags[:lead] = False
    flags[lead : lead + len(ids)] = trained
    return _first(wrapped, flags)


Numbered = list[tuple[int, Example]]  # examples with the numbers of their rows


class Encoders:
    """Encodes batches of examples in order: at once, or in `workers` processes, one batch of each at a time.

    Rendering holds Python's lock, so threads would not help. Processes are spawned: a fork of a process that has
    threads, or a GPU, may hang.
    """

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None, workers: int):
        self._tools = (tokenizer, template)
        self._waiting: deque[tuple[Numbered, Future]] = deque()
        self._limit = 2 * workers  # bounds the memory that batches take
        self._pool = None
        if workers:
            self._pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, self._tools)

    def submit(self, batch: Numbered) -> None:
        examples = [example for _, example in batch]
        if self._pool:
            result = self._pool.submit(_work, examples)
        else:
            result = Future()
            result.set_result(encode(examples, *self._tools))
        self._waiting.append((batch, result))

    def results(self, all: bool = False) -> Iterator[tuple[int, Encoded | BadRow]]:
        """(row number, result) of the batches that are due: those beyond the limit, or all of them."""
        while len(self._waiting) > (0 if all else self._limit):
            batch, result = self._waiting.popleft()
            yield from zip((number for number, _ in batch), result.result(), strict=True)

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


_worker_tools: tuple[Tokenizer | None, ChatTemplate | None] = (None, None)  # of a worker process


def _start_worker(tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
    global _worker_tools
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    _worker_tools = (tokenizer, template)


def _work(examples: list[Example]) -> list[Encoded | BadRow]:
    return encode(examples, *_worker_tools)
