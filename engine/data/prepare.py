"""From a data file to tokens in the cache: rows are read, recognized and tokenized, bad ones counted."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
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
COUNTED = ("characters", "unknown", "said", "unwritten", "early")  # of Encoded


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
    """The metadata of an example that is not written yet."""

    weight: float
    value: float  # a pair's margin, or the number of a row's class; else 0
    form: str  # format of its row
    starts: bool  # a document, of which more pieces may follow
    last: bool  # of its row


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
    build = _Build(source, reading, key, progress)
    try:
        build.read()
        return build.writer.finish(build.meta(key))
    except BaseException as error:
        build.writer.abandon()
        if isinstance(error, RowDied):
            raise InputError(f"{source} {build.reader.unit} {error.row}: {error}. Leave that row out.") from None
        raise
    finally:
        build.encoders.close()


class _Build:
    """A file while it is tokenized."""

    def __init__(self, source: DataFile, reading: Reading, key: str, progress: Progress | None):
        codec = reading.codec
        self.source, self.reading, self.options, self.progress = source, reading, reading.options, progress
        self.vocabulary = codec.facts.vocab_size if codec else 1 << 31
        self.writer = TokenWriter(reading.folder, key, self.vocabulary)
        self.sink = PairWriter(self.options.kind, self.writer) if self.options.paired else self.writer
        self.reader = Reader(source, codec.facts.eos_token if codec else None)
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.encoders = Encoders(codec, min(cpus, 16, 1 + self.reader.size // _SHARE))
        self.batch: Numbered = []  # read, not yet tokenized
        self.characters, self.batch_rows = 0, _FIRST_ROWS  # of the batch; at most
        self.waiting = deque[_Waiting]()
        self.done = 0  # bytes read, without those of what waits
        self.rows = self.bad = 0
        self.first: tuple[int, str] | None = None  # bad row, its fault
        self.refused = -1  # the last bad row that was tokenized
        self.broken = False  # a piece of the last document was bad
        self.weighted: bool | None = None  # whether column "weight" holds numbers
        self.formats = Counter[str]()  # good rows of each
        self.counts = dict.fromkeys((*COUNTED, "chats"), 0)  # chats: rows for a chat template
        self.unused: dict[str, None] = {}  # keys, in order
        self.absent = set(reading.renames)  # columns of --map that no row has

    @property
    def first_bad(self) -> str:
        return f"{self.reader.unit} {self.first[0]}: {self.first[1]}" if self.first else ""

    @property
    def hopeless(self) -> bool:
        """Whether the run will stop, so that rows are only counted."""
        return self.bad > 0 and not self.options.skip_bad

    def read(self) -> None:
        """Writes the tokens of all rows. Raises InputError if rows are bad, or none is good."""
        for row in self.reader.rows():
            self._take(row)
            if len(self.batch) >= self.batch_rows or self.characters >= _BATCH_CHARACTERS:
                self._encode()
        self._encode(last=True)
        if self.progress:
            self.progress(self.source.path.name, self.reader.size, self.reader.size)
        self._judge()
        if isinstance(self.sink, PairWriter):
            self.sink.finish()

    def meta(self, key: str) -> dict[str, Any]:
        unused = [shown(key) if key.strip() else "a column without a name" for key in list(self.unused)[:_NAMED]]
        unused += [f"{len(self.unused) - _NAMED:,} more"] if len(self.unused) > _NAMED else []
        found: dict[str, Any] = {"key": key, "name": self.source.path.name, "format": self._format(), "unused": unused}
        found |= {"rows": self.rows, "bad": self.bad, "first_bad": self.first_bad, "absent": sorted(self.absent)}
        return found | self.counts

    def _format(self) -> str:
        """The format; of a file with several formats, each with its number of rows."""
        if len(self.formats) == 1:
            return next(iter(self.formats))
        return "; ".join(f"{name}: {count(rows, 'row')}" for name, rows in self.formats.most_common())

    # ------------------------------------------------ rows

    def _take(self, row: Row) -> None:
        self.rows += row.starts
        try:
            if isinstance(row.value, BadRow):
                raise row.value
            self.absent -= row.value.keys()
            form, answers, unused, number = self._answers(row.value)
            examples = [(_dressed(example, row, self.reading), weight) for example, weight in answers]
        except BadRow as error:
            self._reject(row.number, error)
            return
        if self.hopeless:
            return
        self.unused |= dict.fromkeys(unused)
        self.counts["chats"] += sum(isinstance(example, Chat) for example, _ in examples)
        parts = [(piece, weight) for example, weight in examples for piece in pieces(example)]
        for i, (example, weight) in enumerate(parts, 1):
            self.batch.append((row.number, example))
            starts = not isinstance(example, Text) or example.starts
            self.waiting.append(_Waiting(weight, number, form, starts, i == len(parts)))
            self.characters += size(example)

    def _reject(self, number: int, error: BadRow) -> None:
        self.bad += 1
        if self.first is None or number < self.first[0]:
            self.first = (number, shown(str(error), 1000))

    def _answers(self, value: Fields) -> tuple[str, list[Answer], list[str], float]:
        """(format, examples with weights, keys that are not read, value as of _Waiting) of a row. Raises BadRow."""
        renames, kind = self.reading.renames, self.options.kind
        if self.options.paired:
            row = parsed(rename(value, renames))
            answered, answers, unused = read_answers(row, kind)
            self._check_weight(row)
            unused = [*unused, *replaced(value, renames)]
            if kind != "rewards":
                return answered.name, answers, unused, 0.0
            return answered.name, answers, [key for key in unused if key != MARGIN], margin_of(row)
        row, number = rename(value, renames), 0.0
        if kind == "classes":
            name, example, unused, number = read_class(value, renames, self.options.labels)
        else:
            form, example, unused = read_row(value, renames)
            name = form.name
        self._check_weight(row)
        if is_weighted(row):
            unused = [key for key in unused if key != "weight"]
        return name, [(example, weight_of(row))], unused, number

    def _check_weight(self, row: Fields) -> None:
        """Raises BadRow if the weights of some rows are numbers and those of others are not."""
        if row.get("weight") in EMPTY:
            return
        weighted = is_weighted(row)
        if self.weighted is None:
            self.weighted = weighted
        if self.weighted != weighted:
            is_no, one = ("is", "not") if weighted else ("is no", "one")
            raise BadRow(f"'weight' {is_no} number, and {one} in rows before; --map unused=weight")

    def _judge(self) -> None:
        """Raises InputError if rows are bad, or none is good."""
        rows = f"{self.rows:,} rows" if self.rows != 1 else "1 row"
        if self.rows == 0:
            raise InputError(f"{self.source} holds no rows. Name another file with --data.")
        first = f"{self.source} {self.first_bad.rstrip('.')}"
        if self.bad == self.rows:
            raise InputError(f"{first}. " + ("It is the only row." if self.rows == 1 else f"All {rows} are bad."))
        if self.hopeless:
            verb = "is" if self.bad == 1 else "are"
            raise InputError(f"{first}. {self.bad:,} of {rows} {verb} bad; --skip-bad drops and counts them.")

    # ------------------------------------------------ tokens

    def _encode(self, last: bool = False) -> None:
        """Submits the batch, and writes results that are due, at the `last` all of them."""
        if not self.hopeless and self.batch:
            each = 1 if self.characters >= 2 * _BATCH_CHARACTERS else len(self.batch)  # pieces of a long text
            for i in range(0, len(self.batch), each):
                self.encoders.submit(self.batch[i : i + each])
        self.batch, self.characters = [], 0
        self.batch_rows = min(_BATCH_ROWS, 2 * self.batch_rows)
        for number, found in self.encoders.results(last):
            self._tell()
            self._put(number, self._checked(found))

    def _tell(self) -> None:
        """Tells the progress of results, not of reading: a template may take seconds a row, and a row be the file."""
        waiting, size = len(self.waiting), self.reader.size
        self.done += (self.reader.position - self.done) // waiting
        if self.progress and (waiting % _FIRST_ROWS == 0 or not self.waiting[0].starts) and self.done < size:
            self.progress(self.source.path.name, self.done, size)

    def _put(self, number: int, result: Encoded | BadRow) -> None:
        weight, value, form, starts, last = self.waiting.popleft()
        self.broken &= not starts
        if self.broken:
            return
        sink, fault = self.sink, None
        if isinstance(sink, PairWriter):
            fault = sink.add(result, weight, value)
        elif isinstance(result, BadRow):
            fault, self.broken = result, True
            if not starts:
                sink.drop()
        elif self.options.kind == "classes":
            sink.add(result.ids, np.ones(len(result.ids), bool), weight=weight, value=value)
        else:
            sink.add(result.ids, result.trained, result.starts, weight)
        if fault and number != self.refused:  # of a row with two answers once
            self._reject(number, fault)
            self.refused = number
        if last and number != self.refused:
            self.formats[form] += 1
        if isinstance(result, Encoded):
            self.unused |= dict.fromkeys(result.unread)
            counted = (result.characters, result.unknown, result.said, result.unwritten, result.early)
            for name, more in zip(COUNTED, counted, strict=True):
                self.counts[name] += more

    def _checked(self, found: Encoded | BadRow) -> Encoded | BadRow:
        if isinstance(found, BadRow):
            return found
        if self.options.kind == "classes" and not len(found.ids):
            return BadRow("has no token")
        if media := [key for token, key in self.options.media if token in found.ids]:
            return BadRow(f'holds the token of "{media[0]}" in config.json, but only text is trained')
        if len(found.ids) and found.ids.max() >= self.vocabulary:
            return BadRow(f"token id {found.ids.max()} is in no vocabulary of {self.vocabulary}")
        return found


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
                "or --chat-template plain for a simple one."
            )
        return example.plain
    return example
