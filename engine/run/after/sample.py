"""`trireme sample FOLDER`: text from a finished model, for prompts, for a file of them, or in a conversation, in the
format that was trained.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.engine.amounts import count
from trireme.engine.data.codec import Codec
from trireme.engine.data.find import DataFile
from trireme.engine.data.forms import Chat, chat_of, with_system
from trireme.engine.data.read import KINDS, TEXTS, BadRow
from trireme.engine.run import screen
from trireme.engine.run.after.opened import computing, open_finished, rows_in
from trireme.engine.run.evaluate import Evaluator, continued
from trireme.engine.run.options import Sample
from trireme.models.config import InputError, read_raw
from trireme.storage.untrusted import parse_json, read_small, read_text, shown, why

FILE = "generation_config.json"
COLDEST = 1e-6  # a lower temperature would not be finite, and draws the likeliest token all the same
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # transformers' defaults
# Keys that often have a value, choose tokens in another way and are not used; 0 and 1 have no effect.
UNUSED = ("repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p", "num_beams", "suppress_tokens")
AT_ONCE = 64  # prompts that share passes over the layers
CONTEXT = 4096  # tokens of a conversation that memory is kept for
HALF = "\ufffd"  # of a character
HELP = "/new begins another conversation, /quit (or an empty line, Ctrl-D) ends it, Ctrl-C ends an answer"
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
    o: Sample

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> str:
        """New tokens as text, without the end token."""
        content = new[:-1] if new and new[-1] in self.sampling.ends else new
        return self.codec.parts([*prompt, *content], [len(prompt), len(prompt) + len(content)])[-1]

    def answers(self, prompts: Sequence[Sequence[int]], first: int = 0, hear: Hear | None = None) -> list[Answer]:
        """The answers to prompts as tokens, AT_ONCE together. `first`: the number of the first one, of which its seed
        is made. `hear`: hears of the text of a single prompt.
        """
        if len(prompts) > AT_ONCE:
            return self.answers(prompts[:AT_ONCE], first) + self.answers(prompts[AT_ONCE:], first + AT_ONCE)
        new, length = list[int](), 0
        dice = [torch.Generator().manual_seed(self.sampling.seed + first + i) for i in range(len(prompts))]

        def pick(logits: Tensor) -> list[int]:
            nonlocal length
            tokens = picked(self.sampling, logits, dice)
            if hear:
                new.append(tokens[0])
                text = self.text(prompts[0], new)
                if not text.endswith(HALF):
                    hear(text[length:])
                    length = len(text)
            return tokens

        room = [min(self.o.max_new_tokens, self.e.e.cfg.max_positions - len(prompt)) for prompt in prompts]
        texts = zip(prompts, continued(self.e.e, prompts, room, self.sampling.ends, pick=pick), strict=True)
        ended = lambda ids: bool(ids) and ids[-1] in self.sampling.ends
        answers = [Answer(self.text(prompt, ids), len(ids), ended(ids)) for prompt, ids in texts]
        if hear:
            hear(answers[0].text[length:])
        return answers


def run(o: Sample) -> None:
    """The command. Text goes to standard output, all other lines to standard error."""
    if sum(map(bool, (o.prompt, o.prompts, o.chat))) != 1:
        raise InputError("one of --prompt TEXT, --prompts FILE and --chat is needed.")
    write = lambda text: (sys.stdout.write(text), sys.stdout.flush())
    with screen.to(sys.stderr):
        prompts = _read(o.prompts) if o.prompts else list(o.prompt)
        with speaking(o, prompts) as (speaker, tokens):
            if o.chat:
                _converse(speaker, write)
            elif o.prompts:
                for prompt, answer in zip(prompts, speaker.answers(tokens), strict=True):
                    question = {"prompt" if isinstance(prompt, str) else "messages": prompt}
                    write(json.dumps(question | answer._asdict(), ensure_ascii=False) + "\n")
            for i, ids in enumerate(tokens if o.prompt else ()):
                if len(tokens) > 1:
                    screen.say(f"prompt   {o.prompt[i]}")
                speaker.answers([ids], i, write)
                write("\n")


@contextmanager
def speaking(o: Sample, prompts: Sequence[Any]) -> Iterator[tuple[Speaker, list[list[int]]]]:
    """A context with the loaded model and the tokens of prompts, which are texts or lists of messages; without any it
    is for a conversation.

    Raises InputError, CheckpointError, DoesNotFit, StoreError.
    """
    f = open_finished(o.folder, o.model)
    f.refuse_scores(f"trireme score {o.folder} --data FILE --out DIR")
    codec, positions = f.codec(o), f.cfg.max_positions
    if codec is None:
        raise InputError(f"{f.tokenizer(o)} has no tokenizer.json. Name a folder with one: --tokenizer DIR.")
    sampling = sampling_of(o, f.base, codec.facts.eos)
    if o.chat and not codec.facts.template:
        raise InputError(f"{o.folder} has no chat template. Add --chat-template plain, or use --prompt TEXT.")
    if sampling.unused:
        screen.warn(f"{f.base / FILE}: not used: {', '.join(sampling.unused)}")
    if unread := json.loads(o.chat_template_kwargs or "{}").keys() - codec.facts.reads:
        screen.warn(f"the chat template does not read {', '.join(sorted(unread))}")
    name = f"{o.prompts or ''} prompt".strip()
    tokens = [_tokens(codec, o, prompt, f"{name} {i + 1}") for i, prompt in enumerate(prompts)]
    _check(tokens, positions)
    longest = max(map(len, tokens), default=min(CONTEXT, positions - 1))
    with computing(f, o, longest, min(AT_ONCE, max(1, len(prompts))), min(o.max_new_tokens, positions - longest)) as e:
        screen.say(f"sample   {sampling}")
        yield Speaker(e, codec, sampling, o), tokens


# ---------------------------------------------------------------- prompts


def _read(name: str) -> list[Any]:
    """The lines of a text as prompts, or `prompt` or `messages` of the rows of another file. Raises InputError."""
    prompts = list[Any]()
    if (kind := DataFile(Path(name)).kind) in TEXTS or kind not in KINDS:
        try:
            lines = read_text(Path(name)).removeprefix("\ufeff").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--prompts {name}: {why(error)}. Name a file of prompts.") from None
        prompts = [line.rstrip("\r") for line in lines if line.strip()]
    else:
        prompts = [row.get("prompt") or row.get("messages") for _, row in rows_in(name)]
    if not prompts:
        raise InputError(f"--prompts {name} has no prompts.")
    return prompts


def _tokens(codec: Codec, o: Sample, prompt: Any, name: str) -> list[int]:
    """A text as it is, or messages in the format of the chat template, as tokens. Raises InputError."""
    by_template = not o.as_text and (codec.facts.template or o.system or o.chat_template_kwargs)
    if isinstance(prompt, str) and not by_template:
        return codec.prompt(prompt, name)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        chat = chat_of({"messages": messages}, answered=False) if messages != [] else Chat([])
        chat = with_system(chat, o.system) if o.system else chat
        return codec.prompt(chat._replace(variables=json.loads(o.chat_template_kwargs or "{}") or None), name)
    except BadRow as error:
        raise InputError(f"{name}: {error}.") from None


def _check(prompts: Sequence[Sequence[int]], positions: int) -> None:
    """Raises InputError for a prompt that is empty, or leaves no position for an answer."""
    if wrong := [len(ids) for ids in prompts if not 0 < len(ids) < positions]:
        raise InputError(f"a prompt of {count(wrong[0], 'token')}: expected 1 to {positions - 1:,}, by the model.")


# ---------------------------------------------------------------- conversation


def _converse(speaker: Speaker, write: Hear) -> None:
    """A conversation until standard input ends. Ctrl-C ends an answer; the oldest turns are left out where it is too
    long for the model, of whose positions a quarter at most stays for an answer.
    """
    tokens = lambda turns: _tokens(speaker.codec, speaker.o, turns, "the conversation")
    turns, positions = list[dict[str, Any]](), speaker.e.e.cfg.max_positions
    room = min(speaker.o.max_new_tokens, positions // 4)
    screen.say(f"chat     {HELP}")
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as often as it comes
    while (line := _line()) and line not in ("/quit", "/exit"):
        if line == "/new":
            turns = []
        elif line.startswith("/") and " " not in line:
            screen.say(HELP)
        else:
            turns, before = [*turns, {"role": "user", "content": line}], len(turns)
            try:
                while len(ids := tokens(turns)) + room > positions and len(turns) > 2:
                    turns = turns[2:]
                if dropped := (before + 1 - len(turns)) // 2:
                    screen.say(f"note: the oldest {count(dropped, 'turn')} left out, to fit in {positions:,} tokens")
                _check([ids], positions)
            except InputError as error:
                screen.warn(str(error))
                turns.pop()
                continue
            parts = list[str]()

            def hear(text: str, parts: list[str] = parts) -> None:
                parts.append(text)
                write(text)

            with suppress(KeyboardInterrupt):
                speaker.answers([ids], hear=hear)
            write("\n")
            turns.append({"role": "assistant", "content": "".join(parts).strip()})


def _line() -> str:
    """A line of standard input without its end; "" at its end. Raises InputError."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 ({why(error)}). Convert it.") from None
    except (EOFError, KeyboardInterrupt):
        return ""


# ---------------------------------------------------------------- the next token


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float  # 0: the likeliest token
    top_k: int  # 0: all
    top_p: float
    seed: int
    ends: frozenset[int]  # tokens that end a text
    unused: tuple[str, ...] = ()  # keys of generation_config.json

    def __str__(self) -> str:
        if not self.temperature:
            return "the likeliest token each time"
        parts = [f"temperature {self.temperature:g}", f"top-k {self.top_k}" if self.top_k else ""]
        parts += [f"top-p {self.top_p:g}" if self.top_p < 1 else "", f"seed {self.seed}"]
        return ", ".join(filter(None, parts))


def sampling_of(o: Sample, base: Path, end: int | None) -> Sampling:
    """By the options, else the files of the model in `base`. `end`: the tokenizer's end token. Raises InputError."""
    path = base / FILE
    try:
        generation = parse_json(read_small(path, links=True), "file") if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {why(error)}.") from None
    config = read_raw(base)
    values = [c.get("eos_token_id") for c in (generation, config, config.get("text_config")) if isinstance(c, dict)]
    stops: Any = next((value for value in values if value is not None), [])
    stops = [*(stops if isinstance(stops, list) else [stops]), *([] if end is None else [end])]
    if not all(type(token) is int for token in stops):
        raise InputError(f"{base}: eos_token_id is {shown(repr(stops), 60)}, expected numbers.")
    chosen: dict[str, Any] = dict(GREEDY)
    if generation.get("do_sample"):
        theirs = Sample.of({key: generation.get(key) for key in SAMPLED}, f"{path}: ")
        chosen = SAMPLED | {key: getattr(theirs, key) for key in theirs.chosen}
    chosen |= {key: value for key in GREEDY if (value := getattr(o, key)) is not None}
    if not chosen["temperature"] and (o.top_k, o.top_p) != (None, None):
        raise InputError("--top-k and --top-p are for sampling. Add --temperature 1, for instance.")
    unused = [f"{key} {shown(repr(v), 60)}" for key in UNUSED if (v := generation.get(key)) not in (None, 0, 1, [], {})]
    return Sampling(**chosen, seed=o.seed, ends=frozenset(stops), unused=(*unused,))


def picked(sampling: Sampling, logits: Tensor, dice: Sequence[torch.Generator]) -> list[int]:
    """The next token of each prompt, from logits (B, V) in fp32. Equal dice give equal tokens."""
    if not sampling.temperature:
        return logits.argmax(-1).tolist()
    chances = probabilities(sampling, logits).cpu()
    return [int(torch.multinomial(p, 1, generator=die)) for p, die in zip(chances, dice, strict=True)]


def probabilities(sampling: Sampling, logits: Tensor) -> Tensor:
    """(B, V) fp32: with the temperature, then of the top_k largest, then of the fewest whose sum is top_p."""
    scores = logits / max(sampling.temperature, COLDEST)
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest = torch.topk(scores, sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = scores.sort(-1)
        out = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        out[..., -1] = False
        scores = scores.masked_fill(out.scatter(-1, order, out), float("-inf"))
    return scores.softmax(-1)
