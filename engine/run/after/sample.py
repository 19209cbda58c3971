"""`trireme sample FOLDER`: text from a finished model, for prompts, for a file of them, or in a conversation, in the
format that was trained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trireme.engine.amounts import count
from trireme.engine.data.codec import Codec
from trireme.engine.data.find import DataFile
from trireme.engine.data.forms import TALK, Chat, chat_of, with_system
from trireme.engine.data.read import KINDS, TEXTS, BadRow
from trireme.engine.memory import DTYPE
from trireme.engine.run import screen
from trireme.engine.run.after.opened import Finished, computing, open_finished, rows_in
from trireme.engine.run.after.sampling import FILE, Sampling, picked, sampling_of
from trireme.engine.run.evaluate import Evaluator, let_go
from trireme.engine.run.options import Sample
from trireme.engine.step import stream_layers
from trireme.models.config import InputError
from trireme.models.generate import Pick, generate, needs
from trireme.storage.untrusted import read_text, shown, why

AT_ONCE = 64  # prompts that share passes over the layers
CONTEXT = 4096  # tokens of a conversation that memory is kept for
HALF = "\ufffd"  # of a character
HELP = "/new begins another conversation, /quit (or an empty line, Ctrl-D) ends it, Ctrl-C ends an answer"
Prompt = str | Chat  # a text to continue, or messages to answer
Hear = Callable[[str], object]  # hears of text as it comes


class Answer(NamedTuple):
    """What the model wrote."""

    text: str
    tokens: int
    ended: bool  # by an end token


@dataclass
class Speaker:
    """A loaded model that answers."""

    e: Evaluator
    codec: Codec
    sampling: Sampling
    max_new: int

    @property
    def positions(self) -> int:
        return self.e.e.cfg.max_positions

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """New tokens as text, without the end token."""
        content = new[:-1] if new and new[-1] in self.sampling.ends else new
        return self.codec.after([*prompt, *content], len(prompt))

    def continued(self, prompts: Sequence[Sequence[int]], room: Sequence[int], pick: Pick) -> list[list[int]]:
        """New tokens of each prompt, up to its `room` or an end token, chosen by `pick` (models.generate)."""
        e = self.e.e
        places = [e.queues.devices[e.gpu(u)] for u in range(e.cfg.n_units)]
        try:
            return generate(e.cfg, lambda: stream_layers(e), prompts, room, eos=self.sampling.ends, places=places,
                            dtype=DTYPE[e.plan.dtype], pick=pick)  # fmt: skip
        except BaseException:
            let_go(e)
            raise

    def answers(self, prompts: Sequence[Sequence[int]], first: int = 0, hear: Hear | None = None) -> list[Answer]:
        """The answers to prompts as tokens, AT_ONCE together. `first`: the number of the first one, of which its seed
        is made. `hear`: hears of the text of a single prompt.
        """
        if len(prompts) > AT_ONCE:
            rest = self.answers(prompts[AT_ONCE:], first + AT_ONCE)
            return self.answers(prompts[:AT_ONCE], first) + rest
        new, length = list[int](), 0
        dice = [torch.Generator().manual_seed(self.sampling.seed + first + i) for i in range(len(prompts))]

        def tell(tokens: Sequence[int], last: bool = False) -> None:
            nonlocal length
            text = self.text(prompts[0], tokens)
            if hear and (last or not text.endswith(HALF)):
                hear(text[length:])
                length = len(text)

        def pick(logits: torch.Tensor) -> list[int]:
            tokens = picked(self.sampling, logits, dice)
            if hear:
                new.append(tokens[0])
                tell(new)
            return tokens

        made = self.continued(prompts, [min(self.max_new, self.positions - len(prompt)) for prompt in prompts], pick)
        if hear:
            tell(made[0], last=True)
        ended = [bool(ids) and ids[-1] in self.sampling.ends for ids in made]
        return [Answer(self.text(*pair), len(pair[1]), end) for *pair, end in zip(prompts, made, ended, strict=True)]


def run(o: Sample) -> int:
    """The command. Text goes to standard output, all other lines to standard error."""
    if sum(map(bool, (o.prompt, o.prompts, o.chat))) != 1:
        raise InputError("one of --prompt TEXT, --prompts FILE and --chat is needed.")
    write = lambda text: (sys.stdout.write(text), sys.stdout.flush())
    with screen.to(sys.stderr):
        rows = _rows(o.prompts) if o.prompts else named([{"prompt": text} for text in o.prompt])
        with speaking(o, rows, together=len(rows) if o.prompts else 1) as (speaker, prompts):
            if o.chat:
                converse(speaker, o, write)
            elif o.prompts:
                for row, answer in zip(rows.values(), speaker.answers(prompts), strict=True):
                    asked = {key: row[key] for key in ("prompt", "messages") if key in row}
                    write(json.dumps(asked | answer._asdict(), ensure_ascii=False) + "\n")
            for i, ids in enumerate(prompts if o.prompt else ()):
                if len(prompts) > 1:
                    screen.say(f"prompt   {o.prompt[i]}")
                speaker.answers([ids], i, write)
                write("\n")
    return 0


def named(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows by what a message calls them."""
    return {f"prompt {i + 1}": row for i, row in enumerate(rows)}


@contextmanager
def speaking(o: Sample, rows: Mapping[str, dict[str, Any]], together: int) -> Iterator[tuple[Speaker, list[list[int]]]]:
    """A context with the model, loaded to answer so many rows `together`, and the tokens of the rows.
    Rows have `prompt` or `messages`; without rows it is for a conversation.

    Raises InputError, CheckpointError, DoesNotFit, StoreError.
    """
    f = open_finished(o.folder, o.model)
    f.refuse_scores(f"trireme score {o.folder} --data FILE --out DIR")
    codec, positions = f.writer(o), f.cfg.max_positions
    sampling = sampling_of(o, f.base, codec.facts.eos)
    if o.chat and not codec.facts.template:
        raise InputError(f"{o.folder} has no chat template. Add --chat-template plain, or use --prompt TEXT.")
    if (o.system or o.chat_template_kwargs) and (o.as_text or not codec.facts.template):
        raise InputError("--system and --chat-template-kwargs are for a chat template. Leave them out.")
    if sampling.unused:
        screen.warn(f"{f.base / FILE}: not used: {', '.join(sampling.unused)}")
    prompts = [_prompt(row, where, codec, o) for where, row in rows.items()]
    tokens = [_tokens(codec, prompt, positions) for prompt in prompts]
    if unread := dict.fromkeys(name for prompt in prompts if isinstance(prompt, Chat) for name in codec.unread(prompt)):
        screen.warn(f"the chat template does not read {', '.join(unread)}")
    longest = max(map(len, tokens), default=min(CONTEXT, positions - 1))
    other = beside(f, o, together, longest, min(o.max_new_tokens, positions - longest))
    with computing(f, o, 1, longest, other) as e:
        screen.say(f"sample   {sampling}")
        yield Speaker(e, codec, sampling, o.max_new_tokens), tokens


def beside(f: Finished, o: Sample, prompts: int, longest: int, new: int) -> int:
    """Bytes on the device beside the plan's, where so many prompts of up to `longest` tokens get `new` ones."""
    itemsize = 2 if o.dtype == "bf16" or (o.dtype == "auto" and torch.cuda.is_available() and o.device != "cpu") else 4
    return needs(f.cfg, min(AT_ONCE, prompts), longest, new, itemsize)


# ---------------------------------------------------------------- prompts


def _rows(name: str) -> dict[str, dict[str, Any]]:
    """The lines of a text as prompts, or the rows of another file. Raises InputError."""
    rows = dict[str, dict[str, Any]]()
    if (kind := DataFile(Path(name)).kind) in TEXTS or kind not in KINDS:
        try:
            lines = read_text(Path(name)).removeprefix("\ufeff").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompts {name}: {why(error)}. Name a file of prompts.") from None
        rows = {f"{name} line {i}": {"prompt": line.rstrip("\r")} for i, line in enumerate(lines, 1) if line.strip()}
    else:
        rows = dict(rows_in(name))
    if not rows:
        raise InputError(f"--prompts {name} has no prompts.")
    return rows


def _prompt(row: dict[str, Any], where: str, codec: Codec, o: Sample) -> Prompt:
    """The text of `prompt`; with a template the messages of `prompt` or `messages`. Raises InputError."""
    by_template = bool(codec.facts.template) and not o.as_text
    (key, value), *others = [(key, row[key]) for key in ("prompt", "messages") if row.get(key)] or [("", None)]
    if others or not isinstance(value, (str, list) if key == "prompt" else list):
        keys = shown(", ".join(map(repr, row)), 200) or "none"
        raise InputError(f"{where}: expected 'prompt', a text, or 'messages', not empty; its keys are {keys}.")
    if isinstance(value, str) and not by_template:
        return value
    if not by_template:
        raise InputError(f"{where}: messages need a chat template. Add --chat-template plain, or give a text.")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    try:
        chat = chat_of({name: row[name] for name in TALK if name in row} | {"messages": messages}, answered=False)
    except BadRow as error:
        raise InputError(f"{where}: {error}.") from None
    return _with_options(chat, o)


def _with_options(chat: Chat, o: Sample) -> Chat:
    chat = with_system(chat, o.system) if o.system else chat
    return chat._replace(variables=json.loads(o.chat_template_kwargs or "{}") | (chat.variables or {}) or None)


def _tokens(codec: Codec, prompt: Prompt, positions: int) -> list[int]:
    """A prompt as tokens. Raises InputError if it leaves no position for an answer."""
    ids = codec.prompt(prompt)
    if not 0 < len(ids) < positions:
        raise InputError(f"a prompt of {count(len(ids), 'token')}: expected 1 to {positions - 1:,}, by the model.")
    return ids


# ---------------------------------------------------------------- conversation


def converse(speaker: Speaker, o: Sample, write: Hear) -> None:
    """A conversation until standard input ends. Ctrl-C ends an answer; the oldest turns are left out where it is too
    long for the model.
    """
    turns = list[dict[str, Any]]()
    screen.say(f"chat     {HELP}")
    while (line := _line()) and line not in ("/quit", "/exit"):
        if line == "/new":
            turns = []
        elif line.startswith("/") and " " not in line:
            screen.say(HELP)
        else:
            try:
                turns, ids = _fitting(speaker, o, [*turns, {"role": "user", "content": line}])
            except InputError as error:
                screen.warn(str(error))
                continue
            parts = list[str]()
            with suppress(KeyboardInterrupt):
                speaker.answers([ids], hear=partial(_hear, parts, write))
            write("\n")
            turns.append({"role": "assistant", "content": "".join(parts).strip()})


def _hear(parts_: list[str], write: Hear, text: str) -> None:
    parts_.append(text)
    write(text)


def _fitting(speaker: Speaker, o: Sample, turns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """The last turns that leave room for an answer, a quarter of the model's positions at most, and their tokens.

    Raises InputError.
    """
    room, last = min(speaker.max_new, speaker.positions // 4), turns
    tokens = lambda turns: speaker.codec.prompt(_with_options(Chat(turns), o))
    while len(last) > 2 and len(tokens(last)) + room > speaker.positions:
        last = last[2:]
    if dropped := len(turns) - len(last):
        screen.say(f"note: the oldest {count(dropped // 2, 'turn')} left out, to fit in {speaker.positions:,} tokens")
    return last, _tokens(speaker.codec, _with_options(Chat(last), o), speaker.positions)


def _line() -> str:
    """A line of standard input without its end; "" at its end. Raises InputError."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 ({why(error)}). Convert it.") from None
    except (EOFError, KeyboardInterrupt):
        return ""
