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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.encode import Encoded, check, encode, size
from trireme.engine.data.forms import Chat, Example
from trireme.engine.data.read import BadRow
from trireme.engine.data.template import BUILT_IN
from trireme.engine.data.tokenizer import load_template, load_tokenizer, read_choice, standalone
from trireme.models.config import InputError

MEMORY = 4 << 30  # bytes of address space more than at the start
LOADING = 60.0  # seconds of processor time to load a tokenizer
PATIENCE, PER_CHARACTER = 10.0, 2e-5  # for a text, and each of its characters: at least ten times the usual
WORKERS, SHARE = 16, 1 << 22  # processes, at most, and bytes of a file that are worth one
SHOWN = 1 << 20  # characters
CUT = "·"  # between the tokens of what looks like one


class Facts(NamedTuple):
    """What this process knows of tokenizer and template."""

    vocab_size: int
    eos: int | None  # id after a text
    eos_token: str | None
    pad: int | None  # id that fills batches up
    unknown: str | None  # the unknown token
    tokenizer: str  # fingerprint
    template: str | None  # fingerprint
    chosen: str | None  # `standalone` template of --chat-template
    date: str | None  # that the template writes
    notes: tuple[str, ...]  # for the user
    template_notes: tuple[str, ...]  # on conversations without tools
    tool_notes: tuple[str, ...]  # on those with tools
    alpaca: bool = False  # the template has the wording of Alpaca


class Codec:
    """Texts and conversations to tokens, and tokens to text. Used by one thread at a time."""

    def __init__(self, folder: Path, choice: tuple[str, str] | None = None, date: str | None = None):
        """`choice`: of read_choice. `date`: as of Template. Raises InputError if they cannot be used, or exceed their
        limits.
        """
        self.folder, self._made_of = folder, (folder, choice, date)
        self._pool: ProcessPoolExecutor | None = None
        self._end: Callable[[], object] = lambda: None
        self.facts: Facts = self._ask(_Programs.facts)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a method of _Programs in a process. The result raises BrokenProcessPool if the process ends."""
        if self._pool is None:
            server = multiprocessing.get_context("forkserver")
            server.set_forkserver_preload([__name__])  # processes share what is imported
            alive, held = server.Pipe(duplex=False)  # closed by `close`, and if this process is killed
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self._pool = ProcessPoolExecutor(min(cpus, WORKERS), server, _start, (alive, *self._made_of))
            self._end = weakref.finalize(self, _close, self._pool, held, alive)
        with _without_main():
            return self._pool.submit(_run, work, *args)

    def close(self) -> None:
        """Ends the processes; the next call starts new ones."""
        self._end()
        self._pool = None

    def _ask(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return self.submit(work, *args).result()
        except BrokenProcessPool:
            self.close()
            limits = f"{MEMORY >> 30} GiB of memory or {LOADING:.0f} s"
        except MemoryError:
            limits = f"{MEMORY >> 30} GiB of memory"
        raise InputError(
            f"{self.folder}: the tokenizer or its chat template crashes, or takes more than {limits}. Name another: "
            "--tokenizer FOLDER or --chat-template FILE."
        )

    def tokens(self) -> dict[str, int]:
        """The ids of all tokens. Raises InputError."""
        return self._ask(_Programs.tokens)

    def vocabulary(self) -> str:
        """A hash of all tokens and their ids. Raises InputError."""
        return hashlib.sha256(json.dumps(sorted(self.tokens().items())).encode()).hexdigest()

    def prompt(self, asked: str | Chat, where: str = "the prompt") -> list[int]:
        """Tokens of a text to continue, or of messages to answer, with the opening of the answer. Raises InputError."""
        try:
            return self._ask(_Programs.prompt, asked).tolist()
        except BadRow as error:
            raise InputError(f"{where}: {error}.") from None

    def unread(self, asked: Chat) -> list[str]:
        """Its variables that the template does not read, as chat_template_kwargs.NAME."""
        return self._ask(_Programs.unread, asked) if asked.variables else []

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
            return self._ask(_Programs.parts, np.asarray(ids), list(stops), marks)
        except (InputError, BadRow, OSError) as error:
            return [f"({error})"]


def load_codec(folder: str | Path, chat_template: str | None = None, date: str | None = None) -> Codec | None:
    """The codec of a checkpoint; None without a tokenizer.json. `chat_template`: a file, "plain" or "chatml"; None: the
    checkpoint's. `date`: what a template gets as today's, such as 2026-03-31. Raises InputError.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        return None
    return Codec(Path(folder), read_choice(chat_template) if chat_template else None, date)


# ---------------------------------------------------------------- batches

Numbered = list[tuple[int, Example]]  # by row number


class RowDied(Exception):
    """A process ended because of `row`."""

    def __init__(self, row: int):
        super().__init__(f"the tokenizer or the chat template crashes, takes too long or more than {MEMORY >> 30} GiB")
        self.row = row


def encoded(codec: Codec | None, batches: Iterable[Numbered], nbytes: int) -> Iterator[tuple[Numbered, Encoded]]:
    """Yields each batch with its tokens, in order. A file of `nbytes` is worth some processes, since rendering
    holds the GIL. Without a codec (token ids) they are made here. Raises RowDied.
    """
    if codec is None:
        yield from ((batch, encode([example for _, example in batch], None, None)) for batch in batches)
        return
    waiting = deque[tuple[Numbered, Future[Encoded]]]()
    workers = min(WORKERS, 1 + nbytes // SHARE)
    for batch in batches:
        waiting.append((batch, codec.submit(_Programs.encode, codec.facts, [example for _, example in batch])))
        if len(waiting) >= workers + (workers > 1):
            yield _result(codec, *waiting.popleft())
    while waiting:
        yield _result(codec, *waiting.popleft())


def _result(codec: Codec, batch: Numbered, result: Future[Encoded]) -> tuple[Numbered, Encoded]:
    """As encoded; row by row if a process has ended, to see because of which."""
    try:
        return batch, result.result()
    except RecursionError:
        pass
    except (BrokenProcessPool, MemoryError):
        codec.close()
    singles = list[Encoded]()
    for number, example in batch:
        try:
            singles.append(codec.submit(_Programs.encode, codec.facts, [example]).result())
        except RecursionError:
            empty = encode([], None, None)
            singles.append(empty._replace(lengths=[0], faults={0: "is nested too deeply"}))
        except (BrokenProcessPool, MemoryError):
            codec.close()
            raise RowDied(number) from None
    ids, trained = (np.concatenate(arrays) for arrays in zip(*(one[:2] for one in singles), strict=True))
    faults = {i: one.faults[0] for i, one in enumerate(singles) if one.faults}
    counts, unread = Counter[str](), dict.fromkeys(key for one in singles for key in one.unread)
    for one in singles:
        counts.update(one.counts)
    return batch, Encoded(ids, trained, [one.lengths[0] for one in singles], faults, counts, tuple(unread))


def _close(pool: ProcessPoolExecutor, held: Connection, alive: Connection) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    held.close()
    alive.close()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A context in which processes start without importing the user's script, which would run it again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ---------------------------------------------------------------- in a process


class _Programs:
    """Tokenizer and template."""

    def __init__(self, folder: Path, choice: tuple[str, str] | None, date: str | None):
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise InputError(f"{folder} has lost its tokenizer.json. Start again.")
        self._tokenizer = t = tokenizer
        self._template = template = load_template(t, choice, date)
        self._looks = choice != ("plain", BUILT_IN["plain"])  # whose marks are words
        cuts = self._cut_marks(template) if template else []
        self._facts = Facts(
            t.core.get_vocab_size(),
            t.eos,
            t.eos_token,
            t.pad,
            None if t.unknown is None else t.core.id_to_token(t.unknown),
            t.fingerprint,
            template.fingerprint if template else None,
            standalone(t, choice) if choice else None,
            template.date if template else None,
            t.notes,
            (*template.notes(False), *cuts) if template else (),
            (*template.notes(True), *cuts) if template else (),
            template is not None and template.speaks_alpaca,
        )

    def _cut_marks(self, template: ChatTemplate) -> list[str]:
        """A note on marks of the template that the tokenizer cuts up."""
        with contextlib.suppress(BadRow):
            text = template.text([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
            made = self._tokenizer.encode([text])[0]
            cuts = [] if isinstance(made, BadRow) else self._tokenizer.cuts(made[0][:1000], self._looks)
            if marks := {mark: stop - first for mark, first, stop in cuts}:
                what = ", ".join(f"{mark} into {n}" for mark, n in list(marks.items())[:3])
                return [f"the tokenizer has no tokens for marks of the chat template, and cuts {what} (by {CUT} below)"]
        return []

    def facts(self) -> Facts:
        return self._facts

    def tokens(self) -> dict[str, int]:
        return self._tokenizer.core.get_vocab(with_added_tokens=True)

    def encode(self, facts: Facts, examples: Sequence[Example]) -> Encoded:
        if self._facts != facts:
            raise InputError("the tokenizer or its chat template was changed while data was read. Start again.")
        return encode(examples, self._tokenizer, self._template, _begin)

    def prompt(self, asked: str | Chat) -> np.ndarray:
        """(n,) int32 of a text to continue, or of messages to answer. Raises BadRow."""
        if isinstance(asked, Chat) and self._template is None:
            raise BadRow("messages need a chat template, and there is none. Give --chat-template plain, or a text")
        _begin(size(asked) if isinstance(asked, Chat) else len(asked))
        text = self._template.prompt(asked) if isinstance(asked, Chat) and self._template else asked
        assert isinstance(text, str)
        check(text)
        (made,) = self._tokenizer.encode([text])
        if isinstance(made, BadRow):
            raise made
        return made[0] if isinstance(asked, Chat) else self._tokenizer.wrap(made[0], end=False)[0]

    def unread(self, asked: Chat) -> list[str]:
        return self._template.unread(asked.variables or {}, asked.tools) if self._template else []

    def parts(self, ids: np.ndarray, stops: Sequence[int], marks: bool) -> list[str]:
        """For ascending `stops`, the text that the tokens up to each stop add. `marks`: put CUT in special tokens that
        are encoded as several tokens.
        """
        marked = self._tokenizer.cuts(ids, self._looks) if marks else []
        cuts = {at for _, first, stop in marked for at in range(first + 1, stop)}
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


_of_this_process: list[_Programs | Exception] = []


def _start(alive: Connection, folder: Path, choice: tuple[str, str] | None, date: str | None) -> None:
    """Begins a process. It must not raise, since the pool would only say that it is broken."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the parent acts on them
    threading.Thread(target=_watch, args=(alive,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        address_space = MEMORY
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = address_space + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the first to be killed if memory runs out
    signal.setitimer(signal.ITIMER_PROF, LOADING)
    try:
        _of_this_process.append(_Programs(folder, choice, date))
    except Exception as error:
        known = isinstance(error, (InputError, MemoryError))
        _of_this_process.append(error if known else RuntimeError(repr(error)))
    signal.setitimer(signal.ITIMER_PROF, 0)


def _watch(alive: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        alive.recv()
    os._exit(1)


def _begin(characters: int) -> None:
    """A timer that ends the process, also C code that holds the GIL."""
    signal.setitimer(signal.ITIMER_PROF, PATIENCE + PER_CHARACTER * characters)


def _run(work: Callable[..., Any], *args: Any) -> Any:
    (programs,) = _of_this_process
    if isinstance(programs, Exception):
        raise programs
    _begin(SHOWN)
    try:
        return work(programs, *args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
