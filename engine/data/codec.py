"""A checkpoint's tokenizer and chat template. They are programs that are not trusted, so they run in Sandboxes."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.encode import TEMPLATE, TOKENIZER, Encoded, check, encode, size
from trireme.engine.data.files.rows import BadRow
from trireme.engine.data.formats.examples import Chat, Example
from trireme.engine.data.sandbox import Begin, Died, Sandbox
from trireme.engine.data.templates import PLAIN, load_template, read_choice, standalone
from trireme.engine.data.tokens import load_tokenizer
from trireme.models.config import InputError

LOADING = 60.0  # seconds of processor time to load a tokenizer
PATIENCE, PER_CHARACTER = 10.0, 2e-5  # for a text, and each of its characters: at least ten times the usual
SHOWN = 1 << 20  # characters
SHOWN_TOKENS, MARKS = 1000, 3  # looked at, and named
CUT = "·"  # between the tokens of what looks like one


class Facts(NamedTuple):
    """What the parent process knows of tokenizer and template."""

    vocab_size: int
    eos: int | None  # id after a text
    eos_token: str | None
    tokenizer: str  # fingerprint
    template: str | None  # fingerprint
    chosen: str | None  # `standalone` template of --chat-template
    unknown: str | None  # the unknown token
    notes: tuple[str, ...]  # for the user
    template_notes: tuple[str, ...]
    date: str | None = None  # that the template writes
    pad: int | None = None  # id that fills batches up


class _Programs:
    """Tokenizer and template in the child process."""

    def __init__(
        self, begin: Begin, folder: Path, chat_template: tuple[str, str] | None, patience: float, date: str | None
    ):
        self._begin: Callable[[str, int], None] = lambda what, characters: begin(
            what, patience + PER_CHARACTER * characters
        )
        begin("tokenizer.json", LOADING)
        found = load_tokenizer(folder)
        if found is None:
            raise InputError(f"{folder} has lost its tokenizer.json. Start again.")
        self._tokenizer = t = found
        self._begin(TEMPLATE, 0)
        self._template = load_template(t, chat_template, date)
        template = self._template.fingerprint if self._template else None
        self._looks = chat_template != ("plain", PLAIN)  # whose marks are words
        notes = (*self._template.notes(), *self._cut_marks(self._template)) if self._template else ()
        chosen = standalone(t, chat_template) if chat_template else None
        unknown = None if t.unknown is None else t.core.id_to_token(t.unknown)
        self._facts = Facts(
            t.core.get_vocab_size(),
            t.eos,
            t.eos_token,
            t.fingerprint,
            template,
            chosen,
            unknown,
            t.notes,
            notes,
            self._template.date if self._template else None,
            t.pad,
        )

    def _cut_marks(self, template: ChatTemplate) -> list[str]:
        """A note on marks of the template that the tokenizer cuts up."""
        with suppress(BadRow):
            text = template.text([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
            found = self._tokenizer.encode([text])[0]
            cut = [] if isinstance(found, BadRow) else self._tokenizer.cut_up(found[0][:SHOWN_TOKENS], self._looks)
            if marks := {mark: stop - first for mark, first, stop in cut}:
                what = ", ".join(f"{mark} into {n}" for mark, n in list(marks.items())[:MARKS])
                return [f"the tokenizer has no tokens for marks of the chat template, and cuts {what} (by {CUT} below)"]
        return []

    def facts(self) -> Facts:
        return self._facts

    def tokens(self) -> dict[str, int]:
        return self._tokenizer.core.get_vocab(with_added_tokens=True)

    def encode(self, facts: Facts, examples: Sequence[Example]) -> list[Encoded | BadRow]:
        if self._facts != facts:
            raise InputError("the tokenizer or its chat template was changed while data was read. Start again.")
        return encode(examples, self._tokenizer, self._template, self._begin)

    def prompt(self, given: str | Chat) -> np.ndarray:
        """(n,) int32 of a text to continue, or of messages to answer. Raises BadRow."""
        if isinstance(given, str):
            check(given)
            self._begin(TOKENIZER, len(given))
            (made,) = self._tokenizer.encode([given])
            if isinstance(made, BadRow):
                raise made
            return self._tokenizer.wrap(made[0], end=False)[0]
        if self._template is None:
            raise BadRow("messages need a chat template, and there is none. Give --chat-template plain, or a text")
        self._begin(TEMPLATE, size(given))
        text = self._template.asked(given.messages, given.tools, given.variables)
        check(text)
        self._begin(TOKENIZER, len(text))
        (made,) = self._tokenizer.encode([text])
        if isinstance(made, BadRow):
            raise made
        return made[0]

    def unread(self, given: Chat) -> list[str]:
        return self._template.unread(given.variables or {}, given.tools) if self._template else []

    def parts(self, ids: np.ndarray, stops: Sequence[int], marks: bool) -> list[str]:
        """For ascending `stops`, the text that the tokens up to each stop add. `marks`: put CUT in special tokens that
        are encoded as several tokens.
        """
        self._begin(TOKENIZER, len(ids))
        found = self._tokenizer.cut_up(ids, self._looks) if marks else []
        cuts = {at for _, first, stop in found for at in range(first + 1, stop)}
        parts, shown, part = [], 0, ""
        for stop in sorted({*stops, *cuts}):  # from the beginning: decoders strip the first space
            text = self._tokenizer.decode(ids[:stop])[:SHOWN]
            part += text[shown:]
            shown = len(text)
            if stop in stops:
                parts.append(part)
                part = ""
            part += CUT if stop in cuts else ""
        return parts


class Codec:
    """Texts and conversations to tokens, and tokens to text."""

    def __init__(
        self,
        folder: Path,
        chat_template: tuple[str, str] | None,
        patience: float = PATIENCE,
        date: str | None = None,
    ):
        """`date`: as of Template. Raises InputError if tokenizer or template cannot be used or exceed their limits."""
        self._made_of = (folder, chat_template, patience, date)
        self.sandbox = self.another()
        try:
            self.facts: Facts = self.sandbox.call(_Programs.facts)
        except (Died, MemoryError) as error:
            raise InputError(f"{folder}: {error}. Name another: --tokenizer FOLDER or --chat-template FILE.") from None

    def tokens(self) -> dict[str, int]:
        """The ids of all tokens. Raises InputError."""
        try:
            return self.sandbox.call(_Programs.tokens)
        except (Died, MemoryError) as error:
            raise InputError(f"{self._made_of[0]}: {error}. Name another: --tokenizer FOLDER.") from None

    def vocabulary(self) -> str:
        """A hash of all tokens and their ids. Raises InputError."""
        return hashlib.sha256(json.dumps(sorted(self.tokens().items())).encode()).hexdigest()

    def another(self) -> Sandbox:
        """Another process with tokenizer and template."""
        return Sandbox(_Programs, *self._made_of)

    def prompt(self, given: str | Chat, where: str = "the prompt") -> list[int]:
        """Tokens of a text to continue, or of messages to answer, with the opening of the answer. Raises InputError."""
        try:
            return self.sandbox.call(_Programs.prompt, given).tolist()
        except (BadRow, Died, MemoryError) as error:
            raise InputError(f"{where}: {error}.") from None

    def unread(self, given: Chat) -> list[str]:
        """Its variables that the template does not read, as chat_template_kwargs.NAME."""
        return self.sandbox.call(_Programs.unread, given) if given.variables else []

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, with special tokens. To be shown: a failure gives its reason in brackets."""
        return "".join(self._parts(ids, [len(ids)], False))

    def parts(self, ids: Sequence[int] | np.ndarray, stops: Sequence[int]) -> list[str]:
        """The text, divided after `stops` tokens, with CUT in special tokens that are cut up. Fails as `decode`."""
        return self._parts(ids, stops, True)

    def after(self, ids: Sequence[int] | np.ndarray, begins: int) -> str:
        """The text of ids[begins:] as it reads after the tokens before. Fails as `decode`."""
        return self._parts(ids, [begins, len(ids)], False)[-1] if len(ids) > begins else ""

    def _parts(self, ids: Sequence[int] | np.ndarray, stops: Sequence[int], marks: bool) -> list[str]:
        try:
            return self.sandbox.call(_Programs.parts, np.asarray(ids), list(stops), marks)
        except (InputError, BadRow, Died, MemoryError, OSError) as error:
            return [f"({error})"]


def load_codec(folder: str | Path, chat_template: str | None = None, date: str | None = None) -> Codec | None:
    """The codec of a checkpoint; None without a tokenizer.json. `chat_template`: a file, "plain" or "chatml"; None: the
    checkpoint's.

    `date`: the date that a template gets as today's, such as 2026-03-31. Raises InputError.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return None
    return Codec(Path(folder), read_choice(chat_template) if chat_template else None, date=date)


# ---------------------------------------------------------------- batches


Numbered = list[tuple[int, Example]]  # by row number


class RowDied(Exception):
    """A process died because of `row`; the message says how."""

    def __init__(self, row: int, how: str):
        super().__init__(how)
        self.row = row


class Encoders:
    """Encodes batches in order in `workers` processes, since rendering holds the GIL. Without a codec (token ids) at
    once.
    """

    def __init__(self, codec: Codec | None, workers: int):
        self._waiting: deque[tuple[Numbered, Future[list[Encoded | BadRow]]]] = deque()
        self._boxes = [codec.sandbox, *(codec.another() for _ in range(workers - 1))] if codec else []
        self._limit = 2 * len(self._boxes)  # of batches in memory
        self._facts = codec and codec.facts
        self._free: SimpleQueue[Sandbox] = SimpleQueue()
        for box in self._boxes:
            self._free.put(box)
        self._pool = ThreadPoolExecutor(len(self._boxes)) if codec else None

    def submit(self, batch: Numbered) -> None:
        result: Future[list[Encoded | BadRow]]
        if self._pool:
            result = self._pool.submit(self._encode, batch)
        else:
            result = Future()
            result.set_result(encode([example for _, example in batch], None, None))
        self._waiting.append((batch, result))

    def results(self, all: bool = False) -> Iterator[tuple[int, Encoded | BadRow]]:
        """Yields (row number, result) of batches beyond the limit, or of all. Raises RowDied."""
        while len(self._waiting) > (0 if all else self._limit):
            batch, result = self._waiting[0]
            found = result.result()
            self._waiting.popleft()
            yield from zip((number for number, _ in batch), found, strict=True)

    def _encode(self, batch: Numbered) -> list[Encoded | BadRow]:
        box = self._free.get()
        try:
            return box.call(_Programs.encode, self._facts, [example for _, example in batch])
        except (Died, MemoryError, RecursionError):  # which row?
            return [self._alone(box, number, example) for number, example in batch]
        finally:
            self._free.put(box)

    def _alone(self, box: Sandbox, number: int, example: Example) -> Encoded | BadRow:
        """Encodes one row of a batch that failed. Raises RowDied."""
        try:
            return box.call(_Programs.encode, self._facts, [example])[0]
        except RecursionError:
            return BadRow("is nested too deeply")
        except MemoryError as error:
            return BadRow(str(error))
        except Died as error:
            raise RowDied(number, str(error)) from None

    def close(self) -> None:
        """Ends all processes but the codec's own."""
        stopped = bool(self._waiting)  # by an error or Ctrl-C
        for box in self._boxes if stopped else ():
            box.kill()
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        for box in self._boxes if stopped else self._boxes[1:]:
            box.close()
