"""`trireme sample FOLDER`: text from a finished model, for one prompt, for a file of them, or in a conversation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from trireme.engine.amounts import count
from trireme.engine.data.codec import Codec
from trireme.engine.data.find import DataFile
from trireme.engine.data.forms import TALK, Chat, chat_of, with_system
from trireme.engine.data.read import KINDS, LINES, PACKINGS, TEXTS, BadRow, Fields
from trireme.engine.memory import DTYPE
from trireme.engine.run.finished.layers import Layers, device_and_dtype, load_layers
from trireme.engine.run.finished.model import GENERATION, Opened, open_model, say_left_out
from trireme.engine.run.finished.sampling import Picker, Sampling, continued, ends_of, sampling_of
from trireme.engine.run.screen import Screen
from trireme.models.config import InputError, ModelConfig
from trireme.models.generate import generate, needs
from trireme.storage.untrusted import parse_json, read_text, shown, why

AT_ONCE = 64  # prompts that share passes over the layers
CHAT = 4096  # tokens of a conversation that memory is kept for
LOST = "\ufffd"  # half of a character
Told = Callable[[str], object]  # hears of text as it comes


class Speaker:
    """A loaded model that answers."""

    def __init__(self, opened: Opened, codec: Codec, layers: Layers, sampling: Sampling, dtype: str):
        self.cfg, self.codec, self.layers, self.sampling = opened.cfg, codec, layers, sampling
        self.dtype = DTYPE[dtype]
        end = codec.facts.eos
        self.ends = ends_of(opened.generation()) | frozenset([] if end is None else [end])

    def fit(self, prompt: Sequence[int]) -> int:
        """How many tokens may follow a prompt. Raises InputError."""
        return min(_after(self.cfg, prompt), self.sampling.max_new)

    def speak(
        self, prompts: Sequence[Sequence[int]], told: Told | None = None, first: int = 0
    ) -> list[tuple[str, int, bool]]:
        """(text, number of its tokens, whether it ended) for each prompt. `told`: is called with a single prompt's text
        as it is made.

        `first`: the number of the first prompt.
        """
        picker = Picker(self.sampling, len(prompts), first)
        new = list[int]()
        echo = Echo(self.codec, prompts[0], self.ends, told) if told else None

        def pick(logits: torch.Tensor) -> list[int]:
            found = picker(logits)
            if echo:
                new.append(found[0])
                echo.show(new)
            return found

        made = generate(
            self.cfg,
            self.layers.units,
            prompts,
            [self.fit(prompt) for prompt in prompts],
            eos=self.ends,
            device=self.layers.device,
            dtype=self.dtype,
            pick=pick,
        )
        if echo:
            echo.show(made[0], last=True)
        found = []
        for prompt, ids in zip(prompts, made, strict=True):
            whole, begins, ended = continued(prompt, ids, self.ends)
            found.append((self.codec.after(whole, begins), len(ids), ended))
        return found


def _after(cfg: ModelConfig, prompt: Sequence[int]) -> int:
    """Positions left after a prompt. Raises InputError if there are none, or the prompt has no tokens."""
    if not prompt:
        raise InputError("a prompt without tokens: there is nothing to continue. Write some text.")
    if len(prompt) >= cfg.max_positions:
        raise InputError(
            f"a prompt of {len(prompt):,} tokens: the model has {cfg.max_positions:,} positions. Shorten it."
        )
    return cfg.max_positions - len(prompt)


class Echo:
    """Prints text as it is made, only whole characters."""

    def __init__(self, codec: Codec, prompt: Sequence[int], ends: frozenset[int], told: Told):
        self.codec, self.prompt, self.ends, self.told, self.shown = codec, prompt, ends, told, 0

    def show(self, new: Sequence[int], last: bool = False) -> None:
        ids, begins, _ = continued(self.prompt, new, self.ends)
        text = self.codec.after(ids, begins)
        if last or not text.endswith(LOST):
            self.told(text[self.shown :])
            self.shown = len(text)


# ---------------------------------------------------------------- the command


def sample(given: argparse.Namespace) -> int:
    """Runs the command; returns the exit code. Raises InputError, CheckpointError, DoesNotFit, StoreError."""
    screen = Screen(sys.stderr)
    opened, codec, sampling = _opened(given, screen)
    by_template = bool(codec.facts.template) and not given.as_text
    if given.chat and not by_template:
        raise InputError(f"--chat: {opened.base} has no chat template. Add --chat-template plain, or use --prompt.")
    if by_template:
        say_left_out(opened.run, given, "the prompt is formatted", screen.warn)
    begun = [{"role": "system", "content": given.system}] if given.system else []
    empty = Chat(begun, None, variables=variables_of(given))
    rows = {} if given.chat else read_prompts(given, by_template, screen)
    warn_of(codec, [empty] if given.chat else rows.values(), screen)
    prompts = [codec.prompt(row, where) for where, row in rows.items()]
    with speaker(given, screen, opened, codec, sampling, prompts) as speaks:
        how = "; a prompt is a user's message (--as-text: continued as it is)" if by_template and rows else ""
        screen.say(f"sampling {sampling}{how}")
        if given.chat:
            chat(speaks, empty, screen)
        elif given.prompts is None:
            speaks.speak(prompts, say)
            say("\n")
        else:
            for first in range(0, len(rows), AT_ONCE):
                answers = speaks.speak(prompts[first : first + AT_ONCE], first=first)
                for row, (text, tokens, ended) in zip([*rows.values()][first:], answers, strict=False):
                    what = {"prompt": row} if isinstance(row, str) else {"messages": said_in(row)}
                    say(json.dumps({**what, "text": text, "tokens": tokens, "ended": ended}, ensure_ascii=False) + "\n")
    return 0


def answer(given: argparse.Namespace, prompt: str | list[Fields], screen: Screen) -> str:
    """The answer to a prompt as of --prompt, or to messages. Raises as `sample`."""
    opened, codec, sampling = _opened(given, screen)
    by_template = bool(codec.facts.template) and not given.as_text
    if isinstance(prompt, str):
        given.prompt = prompt
        (asked,) = read_prompts(given, by_template, screen).values()
    else:
        asked = _asked({"messages": prompt}, "the prompt", by_template, given)
    prompts = [codec.prompt(asked)]
    with speaker(given, screen, opened, codec, sampling, prompts) as speaks:
        ((text, _, _),) = speaks.speak(prompts)
    return text


def _opened(given: argparse.Namespace, screen: Screen) -> tuple[Opened, Codec, Sampling]:
    opened = open_model(given, screen)
    codec = opened.codec(given.tokenizer, given.chat_template)
    opened.refuse_head("it writes no text; `eval` says how good it is")
    return opened, codec, _sampling(given, opened, screen)


def _sampling(given: argparse.Namespace, opened: Opened, screen: Screen) -> Sampling:
    """How tokens are chosen, by options and generation_config.json; says what of the latter is not used. Raises
    InputError.
    """
    found, unused = sampling_of(opened.generation(), given.seed)
    asked = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k}
    asked["max_new"] = given.max_new_tokens
    found = replace(found, **{name: value for name, value in asked.items() if value is not None})
    if not found.temperature and (given.top_p is not None or given.top_k is not None):
        flag = "--top-p" if given.top_p is not None else "--top-k"
        raise InputError(f"{flag} is for sampling, and decoding is greedy. Add --temperature 1, for instance.")
    if unused:
        screen.warn(f"{opened.base / GENERATION}: not used: {', '.join(unused)}")
    return found


@contextmanager
def speaker(
    given: argparse.Namespace,
    screen: Screen,
    opened: Opened,
    codec: Codec,
    sampling: Sampling,
    prompts: list[list[int]],
) -> Iterator[Speaker]:
    """A context with the model, loaded to answer `prompts`; without prompts, for a conversation."""
    for prompt in prompts:
        _after(opened.cfg, prompt)
    longest = max(map(len, prompts), default=min(CHAT, opened.cfg.max_positions))
    most, place = min(sampling.max_new, max(1, opened.cfg.max_positions - longest)), device_and_dtype(given, opened)
    together = max(1, min(len(prompts), AT_ONCE))
    room = needs(opened.cfg, together, longest, most, DTYPE[place[1]].itemsize)
    what = "each token" if together == 1 else f"each token of {together} prompts together"
    layers = load_layers(given, opened, place, room, what, screen)
    try:
        yield Speaker(opened, codec, layers, sampling, place[1])
    finally:
        layers.close()


def say(text: str) -> None:
    Screen().text(text)


def read_prompts(given: argparse.Namespace, by_template: bool, screen: Screen) -> dict[str, str | Chat]:
    """Texts to continue, or messages to answer, by what a message calls them. Raises InputError."""
    for flag, value in (("--system", given.system), ("--chat-template-kwargs", given.chat_template_kwargs)):
        if value and not by_template:
            raise InputError(f"{flag}: texts are continued as they are, without the chat template. Leave it out.")
    if given.prompts is None:
        return {"the prompt": _asked({"prompt": given.prompt}, "the prompt", by_template, given)}
    kind = DataFile(Path(given.prompts)).kind
    if kind in KINDS and kind not in (*LINES, *TEXTS) or given.prompts.lower().endswith(PACKINGS):
        raise InputError(f"--prompts {given.prompts}: expected .jsonl, or text with a prompt a line. Convert it.")
    try:
        lines = read_text(Path(given.prompts)).removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {given.prompts}: {why(error)}. Name a file of prompts.") from None
    found, unused = dict[str, str | Chat](), dict[str, None]()
    for i, line in enumerate(lines, 1):
        if line.strip():
            where = f"{given.prompts} line {i}"
            row = _row(line, where) if kind in LINES else {"prompt": line}
            found[where] = asked = _asked(row, where, by_template, given)
            unused |= dict.fromkeys(key for key in row if key not in ("prompt", "messages", *TALK))
            unused |= dict.fromkeys(asked.unused if isinstance(asked, Chat) else ())
    if not found:
        raise InputError(f"--prompts {given.prompts} holds no prompts.")
    if unused:
        screen.say(f"prompts  not used: {shown(', '.join(unused), 200)}")
    return found


def warn_of(codec: Codec, asked: Iterable[str | Chat], screen: Screen) -> None:
    """Names variables that the chat template does not read, and says where an answer is there already."""
    chats = [chat for chat in asked if isinstance(chat, Chat)]
    if answered := sum(chat.messages[-1:] != [] and chat.messages[-1]["role"] == "assistant" for chat in chats):
        screen.warn(f"{count(answered, 'prompt')} of {len(chats):,} with an answer at the end: another comes after it")
    alike = {(*(chat.variables or ()), bool(chat.tools)): chat for chat in chats}
    if unread := dict.fromkeys(name for chat in alike.values() for name in codec.unread(chat)):
        screen.warn(f"the chat template does not read {shown(', '.join(unread), 200)}")


def _row(line: str, where: str) -> Fields:
    """Raises InputError."""
    try:
        return parse_json(line.encode(), "row")
    except ValueError as error:
        raise InputError(f"{where}: {shown(str(error), 200)}.") from None


def variables_of(given: argparse.Namespace) -> Fields:
    """--chat-template-kwargs."""
    return json.loads(given.chat_template_kwargs or "{}")


def _asked(row: Fields, where: str, by_template: bool, given: argparse.Namespace) -> str | Chat:
    """The text of `prompt`; with a template the messages of `prompt` or `messages`, read as in training.

    Raises InputError.
    """
    asked = {key: row[key] for key in ("prompt", "messages") if row.get(key) not in (None, [])}
    if len(asked) > 1:
        raise InputError(f"{where}: 'prompt' and 'messages' are both there. Leave one out.")
    ((key, value),) = asked.items() or [("", None)]
    if key == "prompt" and isinstance(value, str) and not by_template:
        if more := [name for name in TALK if row.get(name)]:
            raise InputError(f"{where}: {more[0]!r} is for a chat template, and texts are continued as they are.")
        return value
    if not key or not isinstance(value, (list, str) if key == "prompt" else list):
        keys = ", ".join(f"'{shown(name, 60)}'" for name in list(row)[:8]) or "none"
        raise InputError(f"{where}: expected 'prompt', a string, or 'messages', not empty; its keys are {keys}.")
    if not by_template:
        raise InputError(f"{where}: messages need a chat template. Give --chat-template plain, or a text.")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    try:
        found = chat_of({name: row[name] for name in TALK if name in row} | {"messages": messages}, answered=False)
    except BadRow as error:
        raise InputError(f"{where}: {error}.") from None
    found = with_system(found, given.system) if given.system else found
    return found._replace(variables=variables_of(given) | (found.variables or {}) or None)


def said_in(chat: Chat) -> list[Fields]:
    """Its messages as rows have them."""
    return [{key: value for key, value in message.items() if key != "train"} for message in chat.messages]


def chat(speaker: Speaker, empty: Chat, screen: Screen) -> None:
    """A conversation until standard input ends, starting from `empty`. Ctrl-C ends an answer."""
    messages = [*empty.messages]
    screen.say("chat     an empty line or Ctrl-D ends it, /new begins another, Ctrl-C ends an answer")
    while line := ask():
        if line == "/new":
            messages = [*empty.messages]
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(speaker, empty._replace(messages=messages))
        except InputError as error:
            screen.warn(f"{error} /new begins another conversation")
            messages.pop()
            continue
        say("\n")
        messages.append({"role": "assistant", "content": answer})


def _answer(speaker: Speaker, asked: Chat) -> str:
    """Prints the answer and returns it. Raises InputError."""
    parts: list[str] = []

    def told(text: str) -> None:
        parts.append(text)
        say(text)

    with suppress(KeyboardInterrupt):
        speaker.speak([speaker.codec.prompt(asked)], told)
    return "".join(parts)


def ask() -> str:
    """A line of standard input without its end; "" at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 ({why(error)}). Convert it, or change the terminal's.") from None
    except (EOFError, KeyboardInterrupt):
        return ""
