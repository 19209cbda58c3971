"""`trireme sample FOLDER`: text from a finished model, for prompts, for a file of them, or in a conversation, in the
format that was trained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trireme.engine.amounts import count
from trireme.engine.data.codec import Codec
from trireme.engine.data.find import DataFile
from trireme.engine.data.forms import TALK, Chat, chat_of, with_system
from trireme.engine.data.read import KINDS, LINES, TEXTS, BadRow
from trireme.engine.memory import DTYPE
from trireme.engine.run import screen
from trireme.engine.run.after.opened import computing, open_finished
from trireme.engine.run.after.sampling import FILE, Sampling, picked, sampling_of
from trireme.engine.run.evaluate import Evaluator, let_go
from trireme.engine.run.options import Sample, flag
from trireme.engine.step import stream_layers
from trireme.models.config import InputError
from trireme.models.generate import generate, needs
from trireme.storage.untrusted import parse_json, read_text, shown, why

AT_ONCE = 64  # prompts that share passes over the layers
CHAT = 4096  # tokens of a conversation that memory is kept for
LOST = "\ufffd"  # half of a character
HELP = "/new begins another conversation, /quit (or an empty line, Ctrl-D) ends it, Ctrl-C ends an answer"
Asked = str | Chat
Told = Callable[[str], object]  # hears of text as it comes


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

    def ids(self, asked: Asked) -> list[int]:
        """A prompt as tokens. Raises InputError if it leaves no position for an answer."""
        ids = self.codec.prompt(asked)
        if not ids:
            raise InputError("a prompt without tokens: there is nothing to continue. Write some text.")
        if len(ids) >= self.positions:
            long = f"a prompt of {count(len(ids), 'token')}: the model has {self.positions:,} positions"
            raise InputError(f"{long}. Shorten it.")
        return ids

    def answer(self, prompts: Sequence[Sequence[int]], told: Told | None = None, first: int = 0) -> list[Answer]:
        """The answers. `told`: hears of the text of a single prompt; `first`: the number of the first prompt."""
        e, ends, shown_text = self.e.e, self.sampling.ends, 0
        dice = [torch.Generator().manual_seed(self.sampling.seed + first + i) for i in range(len(prompts))]
        new = list[int]()

        def text_of(prompt: Sequence[int], ids: Sequence[int]) -> str:
            made = ids[:-1] if ids and ids[-1] in ends else ids
            return self.codec.after([*prompt, *made], len(prompt))

        def tell(last: bool = False) -> None:
            nonlocal shown_text
            text = text_of(prompts[0], new)
            if told and (last or not text.endswith(LOST)):
                told(text[shown_text:])
                shown_text = len(text)

        def pick(logits: torch.Tensor) -> list[int]:
            tokens = picked(self.sampling, logits, dice)
            if told:
                new.append(tokens[0])
                tell()
            return tokens

        room = [min(self.max_new, self.positions - len(prompt)) for prompt in prompts]
        places = [e.queues.devices[e.gpu(u)] for u in range(e.cfg.n_units)]
        try:
            made = generate(e.cfg, lambda: stream_layers(e), prompts, room, eos=ends, places=places,
                            dtype=DTYPE[e.plan.dtype], pick=pick)  # fmt: skip
        except BaseException:
            let_go(e)
            raise
        if told:
            new = made[0]
            tell(last=True)
        pairs = zip(prompts, made, strict=True)
        return [Answer(text_of(prompt, ids), len(ids), bool(ids) and ids[-1] in ends) for prompt, ids in pairs]


def run(o: Sample) -> int:
    """The command. Text goes to standard output, all other lines to standard error."""
    if sum(map(bool, (o.prompt, o.prompts, o.chat))) != 1:
        raise InputError("one of --prompt TEXT, --prompts FILE and --chat is needed.")
    out = sys.stdout
    rows = _rows(o.prompts) if o.prompts else {f"prompt {i + 1}": {"prompt": text} for i, text in enumerate(o.prompt)}
    together = len(rows) if o.prompts else 1
    with screen.to(sys.stderr), speaking(o, asking(o, rows), together) as (speaker, prompts):
        write = lambda text: (out.write(text), out.flush())
        if o.chat:
            chat(speaker, o, write)
            return 0
        every = list(prompts.values())
        ids = [speaker.ids(asked) for asked in every]
        if not o.prompts:
            for i, (text, prompt) in enumerate(zip(o.prompt, ids, strict=True)):
                if len(ids) > 1:
                    screen.say(f"prompt   {text}")
                speaker.answer([prompt], write, i)
                write("\n")
            return 0
        for first in range(0, len(ids), AT_ONCE):
            made = speaker.answer(ids[first : first + AT_ONCE], None, first)
            for asked, answer in zip(every[first:], made, strict=False):
                said = {"prompt": asked} if isinstance(asked, str) else {"messages": _messages(asked)}
                write(json.dumps({**said, **answer._asdict()}, ensure_ascii=False) + "\n")
    return 0


def answers(o: Sample, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The answers to rows with `prompt` or `messages`, all in one load. Raises as `speaking`."""
    named = {f"prompt {i + 1}": row for i, row in enumerate(rows)}
    with speaking(o, asking(o, named), len(rows)) as (speaker, prompts):
        ids = [speaker.ids(asked) for asked in prompts.values()]
        parts = (speaker.answer(ids[first : first + AT_ONCE], None, first) for first in range(0, len(ids), AT_ONCE))
        return [answer.text for part in parts for answer in part]


def _messages(asked: Chat) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != "train"} for message in asked.messages]


@contextmanager
def speaking(
    o: Sample, asked: Callable[[Codec], dict[str, Asked]], together: int
) -> Iterator[tuple[Speaker, dict[str, Asked]]]:
    """A context with the model, loaded to answer what is asked, so many `together`; without prompts a conversation.

    Raises InputError, CheckpointError, DoesNotFit, StoreError.
    """
    f = open_finished(o.folder, o.model)
    f.refuse_scores(f"trireme score {o.folder} --data FILE --out DIR")
    codec = f.codec(o)
    sampling = sampling_of(o, f.base, codec.facts.eos)
    prompts = asked(codec)
    if sampling.unused:
        screen.warn(f"{f.base / FILE}: not used: {', '.join(sampling.unused)}")
    positions = f.cfg.max_positions
    longest = max((len(codec.prompt(each)) for each in prompts.values()), default=CHAT)
    longest = max(1, min(longest, positions - 1))
    together = max(1, min(AT_ONCE, together))
    itemsize = 2 if o.dtype == "bf16" or (o.dtype == "auto" and torch.cuda.is_available() and o.device != "cpu") else 4
    other = needs(f.cfg, together, longest, min(o.max_new_tokens, positions - longest), itemsize)
    with computing(f, o, 1, longest, other) as e:
        screen.say(f"sample   {sampling}")
        yield Speaker(e, codec, sampling, o.max_new_tokens), prompts


# ---------------------------------------------------------------- prompts


def asking(o: Sample, rows: Mapping[str, dict[str, Any]]) -> Callable[[Codec], dict[str, Asked]]:
    """What makes texts to continue, or messages to answer, of rows by what a message calls them."""

    def asked(codec: Codec) -> dict[str, Asked]:
        by_template = bool(codec.facts.template) and not o.as_text
        for name in ("system", "chat_template_kwargs"):
            if getattr(o, name) and not by_template:
                raise InputError(f"{flag(name)} is for a chat template, and texts are continued as they are.")
        found = {where: _asked(row, where, by_template, o) for where, row in rows.items()}
        chats = [each for each in found.values() if isinstance(each, Chat)]
        if unread := dict.fromkeys(name for each in chats for name in codec.unread(each)):
            screen.warn(f"the chat template does not read {', '.join(unread)}")
        return found

    return asked


def _rows(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a file of prompts, or its lines. Raises InputError."""
    kind = DataFile(Path(name)).kind
    if kind in KINDS and kind not in (*LINES, *TEXTS):
        raise InputError(f"--prompts {name}: expected .jsonl, or text with a prompt a line. Convert it.")
    try:
        lines = read_text(Path(name)).removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {name}: {why(error)}. Name a file of prompts.") from None
    rows = dict[str, dict[str, Any]]()
    for i, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows[f"{name} line {i}"] = parse_json(line.encode(), "row") if kind in LINES else {"prompt": line}
            except ValueError as error:
                raise InputError(f"{name} line {i}: {shown(str(error), 200)}.") from None
    if not rows:
        raise InputError(f"--prompts {name} has no prompts.")
    return rows


def _asked(row: dict[str, Any], where: str, by_template: bool, o: Sample) -> Asked:
    """The text of `prompt`; with a template the messages of `prompt` or `messages`. Raises InputError."""
    values = {key: row[key] for key in ("prompt", "messages") if row.get(key) not in (None, [])}
    (key, value), *others = values.items() or [("", None)]
    if others or not key or not isinstance(value, (list, str) if key == "prompt" else list):
        keys = ", ".join(f"'{shown(name, 60)}'" for name in list(row)[:8]) or "none"
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


# ---------------------------------------------------------------- conversation


def chat(speaker: Speaker, o: Sample, write: Told) -> None:
    """A conversation until standard input ends. Ctrl-C ends an answer; the oldest turns are left out where it is too
    long for the model. Raises InputError without a chat template.
    """
    if not speaker.codec.facts.template:
        raise InputError(f"{o.folder} has no chat template. Add --chat-template plain, or use --prompt TEXT.")
    turns = list[dict[str, Any]]()
    screen.say(f"chat     {HELP}")
    while (line := _line()) and line not in ("/quit", "/exit"):
        if line == "/new":
            turns = []
        elif line.startswith("/") and " " not in line:
            screen.say(HELP)
        else:
            turns.append({"role": "user", "content": line})
            turns = _fitting(speaker, o, turns)
            try:
                text = _spoken(speaker, _chat_of(turns, o), write)
            except InputError as error:
                screen.warn(str(error))
                turns.pop()
                continue
            write("\n")
            turns.append({"role": "assistant", "content": text.strip()})


def _spoken(speaker: Speaker, asked: Chat, write: Told) -> str:
    """Prints the answer, as far as it comes until Ctrl-C, and returns it. Raises InputError."""
    parts = list[str]()

    def told(text: str) -> None:
        parts.append(text)
        write(text)

    with suppress(KeyboardInterrupt):
        speaker.answer([speaker.ids(asked)], told)
    return "".join(parts)


def _chat_of(turns: list[dict[str, Any]], o: Sample) -> Chat:
    return _with_options(Chat(turns, None), o)


def _fitting(speaker: Speaker, o: Sample, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last turns that leave room for an answer: as long as is asked for, or a quarter of the model's positions."""
    room = min(speaker.max_new, speaker.positions // 4)
    kept = turns
    while len(kept) > 2 and len(speaker.codec.prompt(_chat_of(kept, o))) + room > speaker.positions:
        kept = kept[2:]
    if gone := len(turns) - len(kept):
        screen.say(f"note: the oldest {count(gone // 2, 'turn')} left out, to fit in {speaker.positions:,} tokens")
    return kept


def _line() -> str:
    """A line of standard input without its end; "" at its end. Raises InputError."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 ({why(error)}). Convert it.") from None
    except (EOFError, KeyboardInterrupt):
        return ""
