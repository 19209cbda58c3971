"""From a data file to tokens on disk: rows are read, recognized and tokenized, bad ones counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import adler32, crc32

import numpy as np

from trireme.engine.amounts import count
from trireme.engine.data.answers import PAIRED, SCORED, Kind, classes_of, read_row
from trireme.engine.data.codec import Codec, Died, Pending, encode_batches
from trireme.engine.data.documents import counterparts
from trireme.engine.data.encode import Encoded, size_of
from trireme.engine.data.find import DataFile, FileRows
from trireme.engine.data.forms import Chat, Example, Ids, Text, with_system
from trireme.engine.data.read import BadRow, Row
from trireme.engine.data.template import ALPACA
from trireme.engine.data.tokens import TokenFile, Writer, digest_of, key_of, open_tokens, unpack_tokens
from trireme.models.config import InputError
from trireme.storage.untrusted import shown

OnRead = Callable[[str, int, int], None]  # (file name, bytes read, size)
_BATCH_ROWS, _BATCH_CHARACTERS = 1024, 1 << 21
_FIRST_ROWS = 8  # of the first batch; each has twice as many: templates may take seconds a row
_NAMED = 20  # unused keys reported


@dataclass(frozen=True)
class DataOptions:
    seq_len: int = 2048  # tokens of a document, at most
    val: str | None = None  # share of rows to hold out (0.02), or a file
    general: str | None = None  # a file that is evaluated besides
    map: str | None = None  # prompt=question,completion=answer
    inherited: bool = False  # the map is of another file, whose columns may be absent
    long: str | None = None  # cut, drop, split, error; None: split text, else cut
    pack: bool = True  # several documents a sequence
    skip_bad: bool = False
    max_samples: int | None = None  # rows of each file, the first ones
    seed: int = 42
    vocab_size: int | None = None  # of the model
    media: tuple[tuple[int, str], ...] = ()  # tokens of images and the like, which are refused, and their names
    cache: Path | None = None  # folder of the run's own files; None: temporary
    shared: Path | None = None  # folder of tokens that runs share; None: `cache`
    system: str | None = None  # system message of conversations that have none
    variables: dict[str, Any] = field(default_factory=dict)  # of the chat template; a row's own win
    kind: Kind = ""  # of rows: with answers that are compared, or classes
    labels: tuple[str, ...] = ()  # names of classes; () where rows need no label
    pad: int | None = None  # the token that is not scored

    @property
    def paired(self) -> bool:
        """Whether rows have two documents each, whose losses are compared."""
        return self.kind in PAIRED

    @property
    def scored(self) -> bool:
        """Whether one token of each document counts."""
        return self.kind in SCORED

    @property
    def room(self) -> int:
        """Tokens of a sequence: documents are packed into it; of a pair both have seq_len."""
        return self.seq_len * (2 if self.paired else 1)


@dataclass(frozen=True)
class Preparation:
    """How files become tokens."""

    options: DataOptions
    codec: Codec | None
    renames: dict[str, str]  # of --map, theirs: ours
    folder: Path  # of tokens
    progress: OnRead

    def tokens(self, source: DataFile) -> TokenFile:
        """The tokens of a file, from the cache or made now. Raises InputError for bad rows."""
        key = self._key(source)
        return open_tokens(self.folder, key) or _File(self, source).write(self.folder, key)

    def _key(self, source: DataFile) -> str:
        o, label = self.options, f"{source.path.name} (checksum)"
        content = digest_of(source.files, lambda done: self.progress(label, done, source.size))
        facts = (self.codec.facts.tokenizer, self.codec.facts.template) if self.codec else None
        labels = o.labels if o.kind == "classes" else None
        rows = (self.renames, o.skip_bad, o.max_samples, o.media, o.system, o.variables, o.kind, labels)
        return key_of(content, source.kind, facts, *rows)


class _File:
    """A file while it is tokenized."""

    def __init__(self, preparation: Preparation, source: DataFile):
        self.how, self.options, self.source = preparation, preparation.options, source
        self.vocabulary = preparation.codec.facts.vocab_size if preparation.codec else 1 << 31
        self.rows = FileRows(source.files, self.options.max_samples)
        self.classes = classes_of(self.options.labels)
        self.documents = list[tuple[np.ndarray, np.ndarray, Pending]]()  # of the row that is being written
        self.fault = ""  # of that row
        self.broken = False  # the row before was bad: if it was a piece of a text, the next piece begins a document
        self.n = self.bad = self.refused = 0  # rows; bad ones; of these, those that could be read
        self.first = (0, "")  # bad row, its fault
        self.forms, self.counts = Counter[str](), Counter(chats=0, tools=0)
        self.unused: dict[str, None] = {}  # keys, in order
        self.absent = set(preparation.renames)  # columns of --map that no row has

    @property
    def hopeless(self) -> bool:
        """Whether the run will stop, so that rows are only counted."""
        return self.bad > 0 and not self.options.skip_bad

    @property
    def first_bad(self) -> str:
        return f"{self.rows.unit} {self.first[0]}: {self.first[1]}" if self.bad else ""

    def write(self, folder: Path, key: str) -> TokenFile:
        """The tokens of all rows. Raises InputError if rows are bad, or none is good."""
        self.writer, encoding = Writer(folder, key), True
        try:
            for batch, codes in encode_batches(self.how.codec, self._batches(), self.rows.size):
                self._put_all(batch, codes)
                self.how.progress(self.source.path.name, self.rows.position, self.rows.size)
            encoding = False
            self._judge()
            if self.options.kind == "labels":
                self._write_counterparts()
            unused = [shown(key) if key.strip() else "a column without a name" for key in [*self.unused][:_NAMED]]
            unused += ["others"] if len(self.unused) > _NAMED else []
            meta = {"name": self.source.path.name, "rows": self.n, "bad": self.bad, "first_bad": self.first_bad}
            meta |= {"forms": dict(self.forms.most_common()), "counts": dict(self.counts)}
            return self.writer.finish(meta | {"unused": unused, "absent": sorted(self.absent)})
        except Died as error:
            raise InputError(f"{self.source} {self.rows.unit} {error.row}: {error}. Leave that row out.") from None
        finally:
            self.writer.close()
            if encoding and self.how.codec:
                self.how.codec.close()  # stopped by an error or Ctrl-C: a process may be busy

    # ------------------------------------------------ rows

    def _batches(self) -> Iterator[list[Pending]]:
        batch, characters, n_rows = list[Pending](), 0, _FIRST_ROWS
        for row in self.rows:
            for pending, n in self._examples(row):
                batch.append(pending)
                characters += n
                if len(batch) >= n_rows or characters >= _BATCH_CHARACTERS:
                    yield batch
                    batch, characters, n_rows = [], 0, min(_BATCH_ROWS, 2 * n_rows)
        if batch:
            yield batch

    def _examples(self, row: Row) -> Iterator[tuple[Pending, int]]:
        """Yields the examples of a row, each with about the number of its characters."""
        self.n += row.starts
        try:
            if isinstance(row.value, BadRow):
                raise row.value
            self.absent -= row.value.keys()
            content = read_row(row.value, self.how.renames, self.options.kind, self.classes, self.source.is_table)
            examples = [self._completed(example, row) for example in content.examples]
            sizes = [size_of(example) for example in examples]
        except (BadRow, RecursionError) as error:
            self._reject(row.number, "is nested too deeply" if isinstance(error, RecursionError) else str(error))
            return
        if self.hopeless:
            return
        self.unused |= dict.fromkeys(content.unused)
        for chat in (example for example in examples if isinstance(example, Chat)):
            self.counts["chats"] += 1
            self.counts["tools"] += chat.tools is not None
        weights = (content.weight, -content.weight if self.options.kind == "labels" else content.weight)
        for i, (example, weight, n) in enumerate(zip(examples, weights, sizes, strict=False)):
            value, last = 0.0 if i else content.value, i + 1 == len(examples)
            starts = not isinstance(example, Text) or example.starts
            yield Pending(row.number, example, content.form, weight, value, starts, last), n

    def _completed(self, example: Example, row: Row) -> Example:
        """An example with --system and --chat-template-kwargs, in a form that the checkpoint can read. Raises
        InputError.
        """
        o, codec = self.options, self.how.codec
        if isinstance(example, Ids):
            return example
        if codec is None:
            raise InputError(
                "this data needs a tokenizer.json, in the checkpoint or in --tokenizer FOLDER; "
                "transformers makes it of older files: AutoTokenizer.from_pretrained(DIR).save_pretrained(FOLDER)."
            )
        if isinstance(example, Chat):
            example = with_system(example, o.system) if o.system else example
            example = example._replace(variables={**o.variables, **(example.variables or {})} or None)
            alpaca = codec.facts.alpaca and example.plain is not None and example.plain.text.startswith(ALPACA)
            if codec.facts.template is not None and not (alpaca and not o.system):
                return example
            if example.plain is None:
                raise InputError(
                    "the checkpoint has no chat template, which this data needs. Give --chat-template FILE.jinja, or "
                    "--chat-template plain for a simple one."
                )
            example = example.plain
        if o.kind == "classes":
            return example._replace(begins=0, ends=False)
        return example._replace(starts=row.starts, ends=row.ends and example.ends, before=row.before, after=row.after)

    def _reject(self, number: int, fault: str) -> None:
        self.bad += 1
        if self.bad == 1 or number < self.first[0]:
            self.first = (number, shown(fault, 1000))

    def _judge(self) -> None:
        """Raises InputError if rows are bad, or none is good."""
        if not self.hopeless and self.bad < self.n:
            return
        judged = self.n if self.forms or not self.refused else self.bad  # the rest has not been tried
        sample = f"{'the first ' * (judged < self.n)}{count(judged, 'row')}"
        counts = f" {self.bad:,} of {sample} bad" if self.bad else " Name another file with --data"
        skip = "; --skip-bad drops and counts them" if self.bad < judged else ""
        raise InputError(f"{self.source} {self.first_bad.rstrip('.') or 'holds no rows'}.{counts}{skip}.")

    # ------------------------------------------------ tokens

    def _put_all(self, batch: list[Pending], codes: Encoded) -> None:
        self.counts.update(codes.counts)
        self.unused |= dict.fromkeys(codes.unread)
        start, media = 0, [token for token, _ in self.options.media]
        suspect = len(codes.ids) and (codes.ids.max() >= self.vocabulary or (media and np.isin(codes.ids, media).any()))
        for i, (length, pending) in enumerate(zip(codes.lengths, batch, strict=True)):
            ids, trained = codes.ids[start : start + length], codes.trained[start : start + length]
            start += length
            fault = codes.faults.get(i) or (self._fault(ids, trained) if suspect or self.options.kind else "")
            self._put(pending, ids, trained, fault)

    def _fault(self, ids: np.ndarray, trained: np.ndarray) -> str:
        if named := [name for token, name in self.options.media if token in ids]:
            return f'holds the token of "{named[0]}" in config.json, but only text is trained'
        if len(ids) and ids.max() >= self.vocabulary:
            return f"token id {ids.max()} is in no vocabulary of {self.vocabulary}"
        if self.options.kind == "classes" and not len(ids):
            return "has no token"
        return "an answer has no token to learn" if self.options.paired and not trained.any() else ""

    def _put(self, p: Pending, ids: np.ndarray, trained: np.ndarray, fault: str) -> None:
        self.documents.append((ids, trained, p))
        self.fault = self.fault or fault
        if not p.last:
            return
        if self.fault:
            self.refused += 1
            self._reject(p.number, self.fault)
        else:
            self.forms[p.form] += p.starts
            for ids, trained, p in self.documents:
                every = np.ones(len(ids), bool) if self.options.kind == "classes" else trained
                self.writer.add(ids, every, p.starts or self.broken, p.weight, p.value)
        self.documents, self.fault, self.broken = [], "", bool(self.fault)

    def _write_counterparts(self) -> None:
        """Behind all answers, writes each one's prompt with an answer of another prompt, as kto measures its KL."""
        file = self.writer.written()

        def parts(i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """The prompt, the answer, and which tokens of the answer are trained."""
            ids, trained = unpack_tokens(file.read(int(file.offsets[i]), int(file.offsets[i + 1])))
            begins = int(trained.argmax())
            return ids[:begins], ids[begins:], trained[begins:]

        prompts = (parts(i)[0].tobytes() for i in range(file.n_documents))
        hashes = np.array([crc32(prompt) << 32 | adler32(prompt) for prompt in prompts], np.uint64)
        for i, counterpart in enumerate(counterparts(hashes, str(self.source)).tolist()):
            prompt, (_, answer, learned) = parts(i)[0], parts(counterpart)
            trained = np.concatenate([np.zeros(len(prompt), bool), learned])
            self.writer.add(np.concatenate([prompt, answer]), trained, True, float(file.weights[i]))
