"""A checkpoint's tokenizer and chat template in processes of their own: they are programs that are not trusted.

The processes have limits of memory and of processor time for each text. They protect the machine, not secrets: a
process has its user's rights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trireme.engine.data.encode import Encoded, check_text, encode_examples, size_of
from trireme.engine.data.forms import Chat, Example
from trireme.engine.data.read import BadRow
from trireme.engine.data.template import ALPACA
from trireme.engine.data.tokenizer import cut_marks, load_template, load_tokenizer, read_choice, standalone
from trireme.models.config import InputError

MEMORY = 4 << 30  # bytes of address space more than at the start
LOADING = 60.0  # seconds of processor time to load a tokenizer
PATIENCE, PER_CHARACTER = 10.0, 2e-5  # for a text, and each of its characters: at least ten times the usual
WORKERS, SHARE = 16, 1 << 22  # processes, at most, and bytes of a file that are worth one
SHOWN = 1 << 20  # characters
TRIES = 2  # of a call whose process died: it may have been killed from outside, or by another call
LOST = (BrokenProcessPool, CancelledError, MemoryError)  # of a result: its process died, or had no memory


class Died(Exception):
    """The process of a call, for a row or none, died as often as it was tried."""

    row = 0

    def __str__(self) -> str:
        return f"the tokenizer or the chat template crashes, takes too long or more than {MEMORY >> 30} GiB"


class Facts(NamedTuple):
    """What this process knows of tokenizer and template."""

    vocab_size: int  # all ids are less; some may have no token
    eos: int | None  # id after a text
    pad: int | None  # id that fills batches up
    unknown: str | None  # the unknown token
    tokenizer: str  # fingerprint
    chosen: str | None  # `standalone` template of --chat-template
    template: str | None = None  # fingerprint
    reads: frozenset[str] = frozenset()  # variables that the template reads
    template_notes: tuple[str, ...] = ()  # for the user, on conversations without tools
    tool_notes: tuple[str, ...] = ()  # on those with tools
    alpaca: bool = False  # the template has the wording of Alpaca


class Codec:
    """Texts and conversations to tokens, and tokens to text. Used by one thread at a time."""

    def __init__(self, folder: Path, choice: tuple[str, str] | None = None, date: str | None = None):
        """`choice`: of read_choice. `date`: as of Template. Raises InputError if they cannot be used, or exceed their
        limits.
        """
        self.folder, self._sources = folder, (folder, choice, date)
        self._pool: ProcessPoolExecutor | None = None
        self._end: Callable[[], object] = lambda: None
        self.facts: Facts = self._ask(attrgetter("facts"))

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a method of _Programs in a process. The result raises LOST if a process died, whichever call did it."""
        pool = self._pool or self._start()
        try:
            with _without_main():
                return pool.submit(_run, work, *args)
        except BrokenProcessPool:  # a pool notices only after a while that a process of it has died
            self.close()
            return self.submit(work, *args)

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """The result of a method of _Programs. Raises Died."""
        for _ in range(TRIES):
            with contextlib.suppress(*LOST):
                return self.submit(work, *args).result()
            self.close()
        raise Died

    def _start(self) -> ProcessPoolExecutor:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__])  # processes share what is imported
        alive, holder = server.Pipe(duplex=False)  # closed by `close`, and if this process is killed
        workers = min(len(os.sched_getaffinity(0)), WORKERS)
        self._pool = ProcessPoolExecutor(workers, server, _begin_process, (alive, *self._sources))
        self._end = weakref.finalize(self, _close, self._pool, holder, alive)
        return self._pool

    def close(self) -> None:
        """Ends the processes, also busy ones; the next call starts new ones."""
        self._end()
        self._pool = None

    def _ask(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return self.call(work, *args)
        except Died as error:
            advice = "Name another: --tokenizer FOLDER or --chat-template FILE."
            raise InputError(f"{self.folder}: {error}. {advice}") from None

    def vocabulary(self) -> str:
        """A hash of all tokens and their ids. Raises InputError."""
        return self._ask(_Programs.vocabulary)

    def prompt(self, prompt: str | Chat, where: str = "the prompt") -> list[int]:
        """Tokens of a text to continue, or of messages to answer, with the opening of the answer. Raises InputError."""
        try:
            return self._ask(_Programs.prompt, prompt).tolist()
        except BadRow as error:
            raise InputError(f"{where}: {error}.") from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, with special tokens. To be shown: a failure gives its reason in brackets."""
        return "".join(self.parts(ids, [len(ids)]))

    def parts(self, ids: Sequence[int] | np.ndarray, stops: Sequence[int]) -> list[str]:
        """The text, divided after `stops` tokens. Fails as `decode`."""
        try:
            return self._ask(_Programs.parts, np.asarray(ids), list(stops))
        except (InputError, BadRow, OSError) as error:
            return [f"({error})"]


def load_codec(folder: str | Path, chat_template: str | None = None, date: str | None = None) -> Codec | None:
    """The codec of a checkpoint; None without a tokenizer.json. `chat_template`: a file, or a name of BUILT_IN; None:
    the checkpoint's. `date`: what a template gets as today's, such as 2026-03-31. Raises InputError.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return None
    return Codec(Path(folder), read_choice(chat_template) if chat_template else None, date)


def _close(pool: ProcessPoolExecutor, holder: Connection, alive: Connection) -> None:
    holder.close()
    alive.close()  # the processes end, so that there is little to wait for
    # an executor whose thread still ends when the interpreter does prints a traceback
    pool.shutdown(wait=threading.current_thread() is threading.main_thread(), cancel_futures=True)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A context in which processes start without importing the user's script, which would run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ---------------------------------------------------------------- batches


class Pending(NamedTuple):
    """An example whose tokens are not written yet."""

    number: int  # of its row
    example: Example
    form: str = ""
    weight: float = 1.0
    value: float = 0.0
    starts: bool = True  # a document, of which more pieces may follow
    last: bool = True  # of its row


def encode_batches(
    codec: Codec | None, batches: Iterable[list[Pending]], nbytes: int
) -> Iterator[tuple[list[Pending], Encoded]]:
    """Yields batches with their tokens, in order; one that lost its process in batches of one row. A file of `nbytes`
    is worth some processes, since rendering holds the GIL. Without a codec (token ids) they are made here. Raises
    Died.
    """
    if codec is None:
        yield from ((batch, encode_examples([pending.example for pending in batch], None, None)) for batch in batches)
        return
    waiting = deque[tuple[list[Pending], Future[Encoded]]]()
    workers = min(WORKERS, 1 + nbytes // SHARE)
    for batch in batches:
        waiting.append((batch, codec.submit(_Programs.encode, [pending.example for pending in batch])))
        if len(waiting) >= workers + (workers > 1):
            yield from _results(codec, *waiting.popleft())
    while waiting:
        yield from _results(codec, *waiting.popleft())


def _results(codec: Codec, batch: list[Pending], future: Future[Encoded]) -> Iterator[tuple[list[Pending], Encoded]]:
    try:
        yield batch, future.result()
        return
    except (RecursionError, *LOST):
        codec.close()
    for pending in batch:  # which row? They run alone, so that no other is blamed
        try:
            result = codec.call(_Programs.encode, [pending.example])
        except RecursionError:  # while it is sent
            result = encode_examples([], None, None)._replace(lengths=[0], faults={0: "is nested too deeply"})
        except Died as error:
            error.row = pending.number
            raise
        yield [pending], result


# ---------------------------------------------------------------- in a process


class _Programs:
    """Tokenizer and template."""

    def __init__(self, folder: Path, choice: tuple[str, str] | None, date: str | None):
        self._tokenizer = tokenizer = load_tokenizer(folder)
        self._template = template = load_template(tokenizer, choice, date)
        self.facts = Facts(
            vocab_size=max(tokenizer.core.get_vocab().values(), default=-1) + 1,
            eos=tokenizer.eos,
            pad=tokenizer.core.token_to_id(tokenizer.specials.get("pad_token", "")),
            unknown=None if tokenizer.unknown is None else tokenizer.core.id_to_token(tokenizer.unknown),
            tokenizer=tokenizer.fingerprint,
            chosen=standalone(tokenizer, choice) if choice else None,
        )
        if template:
            cuts = cut_marks(tokenizer, template) if (choice or ("",))[0] != "plain" else []  # whose marks are words
            self.facts = self.facts._replace(
                template=template.fingerprint,
                reads=template.reads,
                template_notes=(*template.notes(False), *cuts),
                tool_notes=(*template.notes(True), *cuts),
                alpaca=any(ALPACA in source for source in template.sources.values()),
            )

    def vocabulary(self) -> str:
        ids = self._tokenizer.core.get_vocab(with_added_tokens=True)
        return hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()

    def encode(self, examples: Sequence[Example]) -> Encoded:
        return encode_examples(examples, self._tokenizer, self._template, _limit)

    def prompt(self, prompt: str | Chat) -> np.ndarray:
        """(n,) int32 of a text to continue, or of messages to answer. Raises BadRow."""
        if isinstance(prompt, Chat) and self._template is None:
            raise BadRow("messages need a chat template, and there is none. Give --chat-template plain, or a text")
        _limit(len(prompt) if isinstance(prompt, str) else size_of(prompt))
        text = self._template.prompt(prompt) if self._template and isinstance(prompt, Chat) else str(prompt)
        check_text(text)
        (tokens,) = self._tokenizer.encode([text])
        if isinstance(tokens, BadRow):
            raise tokens
        return tokens[0] if isinstance(prompt, Chat) else self._tokenizer.wrap(tokens[0], end=False)[0]

    def parts(self, ids: np.ndarray, stops: Sequence[int]) -> list[str]:
        """For ascending `stops`, the text that the tokens up to each stop add."""
        texts = [self._tokenizer.decode(ids[:stop])[:SHOWN] for stop in stops]  # decoders strip the first space
        return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]


_of_this_process: list[_Programs | Exception] = []


def _begin_process(alive: Connection, folder: Path, choice: tuple[str, str] | None, date: str | None) -> None:
    """Begins a process. It must not raise, since the pool would only say that it is broken."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the parent acts on them
    threading.Thread(target=_watch, args=(alive,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    signal.setitimer(signal.ITIMER_PROF, LOADING)
    try:
        _of_this_process.append(_Programs(folder, choice, date))
    except Exception as error:
        expected = isinstance(error, (InputError, MemoryError))
        _of_this_process.append(error if expected else RuntimeError(repr(error)))
    signal.setitimer(signal.ITIMER_PROF, 0)


def _watch(alive: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        alive.recv()
    os._exit(1)


def _limit(characters: int) -> None:
    """Sets a timer that ends the process, also C code that holds the GIL."""
    signal.setitimer(signal.ITIMER_PROF, PATIENCE + PER_CHARACTER * characters)


def _run(work: Callable[..., Any], *args: Any) -> Any:
    (programs,) = _of_this_process
    if isinstance(programs, Exception):
        raise programs
    _limit(SHOWN)
    try:
        return work(programs, *args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
