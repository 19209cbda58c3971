"""From a data file to tokens in the cache: rows are read, recognized and tokenized, bad ones counted."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trireme.engine.amounts import count
from trireme.engine.data.cache import Shelf, TokenFile, TokenWriter, cache_key, digest, open_tokens
from trireme.engine.data.codec import Codec, Encoders, Numbered, RowDied
from trireme.engine.data.encode import Encoded, pieces, size
from trireme.engine.data.files.rows import EMPTY, BadRow, Fields, Row
from trireme.engine.data.files.sources import DataFile, Reader
from trireme.engine.data.formats.classes import as_read, read_class
from trireme.engine.data.formats.conversations import with_system
from trireme.engine.data.formats.examples import Chat, Example, Ids, Text
from trireme.engine.data.formats.formats import parsed, read_row, rename, replaced
from trireme.engine.data.formats.pairs import (
    MARGIN,
    PAIRED,
    SCORED,
    Answer,
    Kind,
    is_weighted,
    margin_of,
    read_answers,
    weight_of,
)
from trireme.engine.data.pairs import PairWriter
from trireme.models.config import InputError
from trireme.storage.temporary import Temporary
from trireme.storage.untrusted import shown

Progress = Callable[[str, int, int], None]  # (file name, bytes read, size)
_BATCH_ROWS, _BATCH_CHARACTERS = 1024, 1 << 21
_FIRST_ROWS = 8  # of the first batch; each has twice as many: templates may take seconds a row
_NAMED = 20  # unused keys reported
_GROWN = 100  # tokens that may have been added to a tokenizer
_SHARE = 1 << 22  # bytes of a file that are worth a process


@dataclass(frozen=True)
class DataOptions:
    seq_len: int = 2048  # tokens of a row, at most
    val: str | None = None  # share of rows to hold out (0.02), or a file
    map: str | None = None  # prompt=question,completion=answer
    long: str | None = None  # cut, drop, split, error; None: split text, else cut
    pack: bool = True  # several documents a row
    skip_bad: bool = False
    max_samples: int | None = None  # rows of each training file, the first ones
    seed: int = 42
    vocab_size: int | None = None  # of the model
    media: tuple[tuple[int, str], ...] = ()  # tokens of images and the like, which are refused, and their names
    cache: Path | None = None  # None: temporary
    shelf: Shelf | None = None  # comes first
    system: str | None = None  # system message of conversations that have none
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template; a row's own win
    kind: Kind = ""  # of rows: with answers that are compared, or classes
    labels: tuple[str, ...] = ()  # names of classes
    pad: int | None = None  # the token that is not scored

    @property
    def paired(self) -> bool:
        """Whether rows have two documents each, whose losses are compared."""
        return self.kind in PAIRED

    @property
    def scored(self) -> bool:
        """Whether one token of each document counts."""
        return self.kind in SCORED


@dataclass(frozen=True)
class Reading:
    """How files are read."""

    options: DataOptions
    codec: Codec | None
    renames: dict[str, str]  # theirs: ours
    folder: Path  # of the caches

    def key(self, source: DataFile, progress: Progress | None = None) -> str:
        """The key of a file's content and all that decides its tokens."""
        o = self.options
        tokenizer, template = (self.codec.facts.tokenizer, self.codec.facts.template) if self.codec else (None, None)
        more = [*([o.media] if o.media else []), *([{"system": o.system}] if o.system else [])]
        more += [{"variables": o.variables}] if o.variables else []
        more += [{"kind": o.kind}] if o.kind else []
        more += [{"labels": o.labels}] if o.kind == "classes" else []
        sums, size, done = list[str](), source.size, 0
        for path in source.files:
            far = lambda at, done=done: progress and progress(f"{source.path.name} (checksum)", done + at, size)
            sums.append(digest(path, far))
            done += path.stat().st_size
        content = sums if source.parts else sums[0]
        return cache_key(content, source.kind, tokenizer, template, self.renames, o.skip_bad, *more)


class _Waiting(NamedTuple):
    """What is known of an example that is not written yet."""

    weight: float
    value: float  # a pair's margin, or the number of a row's class; else 0
    form: str  # format of its row
    starts: bool  # a document, of which more pieces may follow
    last: bool  # of its row


@dataclass
class _Tally:
    """Counts of a file so far."""

    unit: str = "line"
    weighted: bool | None = None  # whether column "weight" holds numbers
    formats: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # good rows of each
    rows: int = 0
    bad: int = 0
    refused: int = -1  # the last bad row that was tokenized
    broken: bool = False  # a piece of the last document was bad
    first: tuple[int, str] | None = None  # bad row, its fault
    skip_bad: bool = False
    batch: Numbered = field(default_factory=list)  # read, not yet tokenized
    batch_rows: int = _FIRST_ROWS  # at most
    waiting: deque[_Waiting] = field(default_factory=deque)
    done: int = 0  # bytes read, without those of what waits
    characters: int = 0
    unused: dict[str, None] = field(default_factory=dict)  # keys, in order
    encoded: int = 0  # characters
    unknown: int = 0  # tokens
    said: int = 0  # characters, as Marked
    unwritten: int = 0
    chats: int = 0  # rows for a chat template
    early: int = 0  # rows, as Encoded
    absent: set[str] = field(default_factory=set)  # columns of --map that no row has

    def reject(self, number: int, error: BadRow) -> None:
        self.bad += 1
        if self.first is None or number < self.first[0]:
            self.first = (number, shown(str(error), 1000))

    @property
    def first_bad(self) -> str:
        return f"{self.unit} {self.first[0]}: {self.first[1]}" if self.first else ""

    @property
    def hopeless(self) -> bool:
        """Whether the run will stop, so that rows are only counted."""
        return self.bad > 0 and not self.skip_bad


def tokenize(source: DataFile, reading: Reading, progress: Progress | None) -> TokenFile:
    """The tokens of a file, from the cache or tokenized now. Raises InputError for bad rows, and for token ids beyond
    the model's vocabulary.
    """
    key = reading.key(source, progress)
    made = open_tokens(reading.folder / f"tokens-{key}") or _shelved(source, reading, key, progress)
    made = made or _build(source, reading, key, progress)
    if reading.options.vocab_size is not None and made.meta["max_id"] >= reading.options.vocab_size:
        raise InputError(_beyond(source, made.meta["max_id"], reading))
    return made


def _beyond(source: DataFile, token: int, reading: Reading) -> str:
    size = reading.options.vocab_size or 0
    said = f"{source} has token id {token}, the model's vocabulary is {size}: "
    tokens = reading.codec.facts.vocab_size if reading.codec else 0
    if size < tokens <= size + _GROWN:
        return (
            f"{said}the tokenizer has {tokens - size} tokens that the model was not given. Give it embeddings for them "
            f"with transformers, model.resize_token_embeddings({tokens}), or name another: --tokenizer FOLDER."
        )
    return f"{said}the tokenizer does not belong to this model. Name the right one: --tokenizer FOLDER."


def _shelved(source: DataFile, reading: Reading, key: str, progress: Progress | None) -> TokenFile | None:
    """The tokens from the shelf, or made there; None without a shelf or room."""
    if reading.options.shelf is None:
        return None
    if made := reading.options.shelf.find(key):
        return made
    if not reading.options.shelf.has_room(source.size):  # a token takes about as many bytes as its text
        return None
    with Temporary(".making-", reading.options.shelf.folder) as folder:
        made = _build(source, replace(reading, folder=folder), key, progress)
        reading.options.shelf.put(made)
        return made


def _build(source: DataFile, reading: Reading, key: str, progress: Progress | None) -> TokenFile:
    codec = reading.codec
    vocabulary = codec.facts.vocab_size if codec else 1 << 31
    writer = TokenWriter(reading.folder, key, vocabulary)
    reader = Reader(source, codec.facts.eos_token if codec else None)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    encoders = Encoders(codec, min(cpus, 16, 1 + reader.size // _SHARE))
    tally = _Tally(skip_bad=reading.options.skip_bad, absent=set(reading.renames))
    sink = PairWriter(reading.options.kind, writer) if reading.options.paired else writer
    try:
        for row in reader.rows():
            tally.unit = reader.unit
            _take(row, reading, tally)
            if len(tally.batch) >= tally.batch_rows or tally.characters >= _BATCH_CHARACTERS:
                _flush(encoders, tally)
                _put(sink, tally, vocabulary, reading, _told(encoders.results(), tally, reader, progress))
        _flush(encoders, tally)
        _put(sink, tally, vocabulary, reading, _told(encoders.results(True), tally, reader, progress))
        if progress:
            progress(source.path.name, reader.size, reader.size)
        _judge(source, tally)
        if isinstance(sink, PairWriter):
            sink.finish()
        meta = {"key": key, "name": source.path.name, "format": _named(tally), "rows": tally.rows, "bad": tally.bad}
        unused = [shown(key) if key.strip() else "a column without a name" for key in list(tally.unused)[:_NAMED]]
        unused += [f"{len(tally.unused) - _NAMED:,} more"] if len(tally.unused) > _NAMED else []
        meta |= {"first_bad": tally.first_bad, "unused": unused}
        meta |= {"characters": tally.encoded, "unknown": tally.unknown}
        meta |= {"said": tally.said, "unwritten": tally.unwritten, "chats": tally.chats, "early": tally.early}
        meta |= {"absent": sorted(tally.absent)}
        return writer.finish(meta)
    except BaseException as error:
        writer.abandon()
        if isinstance(error, RowDied):
            raise InputError(f"{source} {reader.unit} {error.row}: {error}. Leave that row out.") from None
        raise
    finally:
        encoders.close()


def _take(row: Row, reading: Reading, tally: _Tally) -> None:
    value = row.value
    tally.rows += row.starts
    try:
        if isinstance(value, BadRow):
            raise value
        tally.absent -= value.keys()
        form, answers, unused, number = _answers(value, reading, tally)
        examples = [(_dressed(example, row, reading), weight) for example, weight in answers]
    except BadRow as error:
        tally.reject(row.number, error)
        return
    if not tally.hopeless:
        tally.unused |= dict.fromkeys(unused)
        tally.chats += sum(isinstance(example, Chat) for example, _ in examples)
        parts = [(piece, weight) for example, weight in examples for piece in pieces(example)]
        for i, (example, weight) in enumerate(parts, 1):
            tally.batch.append((row.number, example))
            starts = not isinstance(example, Text) or example.starts
            tally.waiting.append(_Waiting(weight, number, form, starts, i == len(parts)))
            tally.characters += size(example)


def _answers(value: Fields, reading: Reading, tally: _Tally) -> tuple[str, list[Answer], list[str], float]:
    """(format, examples with weights, keys that are not read, value as of _Waiting) of a row. Raises BadRow."""
    if reading.options.paired:
        row = parsed(rename(value, reading.renames))
        answered, answers, unused = read_answers(row, reading.options.kind)
        _check_weight(row, tally)
        unused = [*unused, *replaced(value, reading.renames)]
        if reading.options.kind != "rewards":
            return answered.name, answers, unused, 0.0
        return answered.name, answers, [key for key in unused if key != MARGIN], margin_of(row)
    row, number = rename(value, reading.renames), 0.0
    if reading.options.kind == "classes":
        name, example, unused, number = read_class(value, reading.renames, reading.options.labels)
    else:
        form, example, unused = read_row(value, reading.renames)
        name = form.name
    _check_weight(row, tally)
    if is_weighted(row):
        unused = [key for key in unused if key != "weight"]
    return name, [(example, weight_of(row))], unused, number


def _check_weight(row: Fields, tally: _Tally) -> None:
    """Raises BadRow if the weights of some rows are numbers and those of others are not."""
    if row.get("weight") in EMPTY:
        return
    weighted = is_weighted(row)
    if tally.weighted is None:
        tally.weighted = weighted
    if tally.weighted != weighted:
        is_no = "is" if weighted else "is no"
        raise BadRow(f"'weight' {is_no} number, and {'not' if weighted else 'one'} in rows before; --map unused=weight")


def _dressed(example: Example, row: Row, reading: Reading) -> Example:
    """An example with --system and --chat-template-kwargs, in a form that the checkpoint can read."""
    if isinstance(example, Chat) and reading.options.system:
        example = with_system(example, reading.options.system)
    if isinstance(example, Chat) and reading.options.variables:
        example = example._replace(variables=reading.options.variables | (example.variables or {}))
    example = _without_template(example, reading)
    if reading.options.kind == "classes":
        return as_read(example)
    if isinstance(example, Text):
        example = Text(example.text, row.starts, row.ends, row.before, row.after)
    return example


def _without_template(example: Example, reading: Reading) -> Example:
    """The plain form of an example if there is no template. Raises InputError if the checkpoint cannot read such
    data.
    """
    if isinstance(example, Ids):
        return example
    if reading.codec is None:
        raise InputError(
            "the checkpoint has no tokenizer.json, which this data needs. Give --tokenizer FOLDER. transformers "
            "converts tokenizer.model, or vocab.json and merges.txt: AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(FOLDER). Or train on rows of input_ids and labels."
        )
    if isinstance(example, Chat) and reading.codec.facts.template is None:
        if example.plain is None:
            raise InputError(
                "the checkpoint has no chat template, which this data needs. Give --chat-template FILE.jinja, "
                "or --chat-template chatml for a usual one."
            )
        return example.plain
    return example


def _flush(encoders: Encoders, tally: _Tally) -> None:
    if not tally.hopeless and tally.batch:
        each = 1 if tally.characters >= 2 * _BATCH_CHARACTERS else len(tally.batch)  # pieces of a long text
        for i in range(0, len(tally.batch), each):
            encoders.submit(tally.batch[i : i + each])
    tally.batch, tally.characters = [], 0
    tally.batch_rows = min(_BATCH_ROWS, 2 * tally.batch_rows)


def _told(
    results: Iterable[tuple[int, Encoded | BadRow]], tally: _Tally, reader: Reader, progress: Progress | None
) -> Iterator[tuple[int, Encoded | BadRow]]:
    """Yields the results. Progress is that of results, not of reading: a template may take seconds a row, and a row may
    be the whole file.
    """
    for result in results:
        waiting = len(tally.waiting)
        tally.done += (reader.position - tally.done) // waiting
        if progress and (waiting % _FIRST_ROWS == 0 or not tally.waiting[0].starts) and tally.done < reader.size:
            progress(reader.source.path.name, tally.done, reader.size)
        yield result


def _put(
    sink: TokenWriter | PairWriter,
    tally: _Tally,
    vocabulary: int,
    reading: Reading,
    results: Iterable[tuple[int, Encoded | BadRow]],
) -> None:
    for number, found in results:
        result, (weight, value, form, starts, last) = _checked(found, vocabulary, reading), tally.waiting.popleft()
        tally.broken &= not starts
        if tally.broken:
            continue
        fault: BadRow | None = None
        if isinstance(sink, PairWriter):
            fault = sink.add(result, weight, value)
        elif isinstance(result, BadRow):
            fault, tally.broken = result, True
            if not starts:
                sink.drop()
        elif reading.options.kind == "classes":
            sink.add(result.ids, np.ones(len(result.ids), bool), weight=weight, value=value)
        else:
            sink.add(result.ids, result.trained, result.starts, weight)
        if fault and number != tally.refused:  # of a row with two answers once
            tally.reject(number, fault)
            tally.refused = number
        if last and number != tally.refused:
            tally.formats[form] += 1
        if isinstance(result, Encoded):
            tally.encoded += result.characters
            tally.unknown += result.unknown
            tally.said += result.said
            tally.unwritten += result.unwritten
            tally.unused |= dict.fromkeys(result.unread)
            tally.early += result.early


def _checked(found: Encoded | BadRow, vocabulary: int, reading: Reading) -> Encoded | BadRow:
    if isinstance(found, BadRow):
        return found
    if reading.options.kind == "classes" and not len(found.ids):
        return BadRow("has no token")
    if media := [key for token, key in reading.options.media if token in found.ids]:
        return BadRow(f'holds the token of "{media[0]}" in config.json, but only text is trained')
    if len(found.ids) and found.ids.max() >= vocabulary:
        return BadRow(f"token id {found.ids.max()} is in no vocabulary of {vocabulary}")
    return found


def _named(tally: _Tally) -> str:
    """The format; of a file with several formats, each with its number of rows."""
    if len(tally.formats) == 1:
        return next(iter(tally.formats))
    most_first = sorted(tally.formats.items(), key=lambda item: -item[1])
    return "; ".join(f"{name}: {count(rows, 'row')}" for name, rows in most_first)


def _judge(source: DataFile, tally: _Tally) -> None:
    """Raises InputError if rows are bad, or none is good."""
    rows = f"{tally.rows:,} rows" if tally.rows != 1 else "1 row"
    if tally.rows == 0:
        raise InputError(f"{source} holds no rows. Name another file with --data.")
    first = f"{source} {tally.first_bad.rstrip('.')}"
    if tally.bad == tally.rows:
        raise InputError(f"{first}. " + ("It is the only row." if tally.rows == 1 else f"All {rows} are bad."))
    if tally.hopeless:
        verb = "is" if tally.bad == 1 else "are"
        raise InputError(f"{first}. {tally.bad:,} of {rows} {verb} bad; --skip-bad drops and counts them.")
