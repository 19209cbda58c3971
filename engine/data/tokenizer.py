"""A checkpoint's tokenizer and its chat template: text to ids and back, special tokens, tokens around a text.

Tokens of the configuration are added to tokenizer.json as transformers 5 adds them, so that a text has the tokens that
servers of the model use.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.forms import Chat
from trireme.engine.data.read import BadRow, Fields
from trireme.engine.data.template import BUILT_IN
from trireme.models.config import InputError
from trireme.storage.auxiliary import TEMPLATES
from trireme.storage.untrusted import read_small, read_text, why

_PROBES = ("a", "A", "0", ".", "的")  # of which every tokenizer knows one
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MODELS = ("generation_config.json", "config.json")  # that say where generation stops, the first that does
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_MARKS = re.compile(r"<\|[\w.-]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>")  # that look like special tokens

Tokens = tuple[np.ndarray, np.ndarray | None]  # ids (n,) int32; offsets (n, 2) int32, in characters, or None


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face fast tokenizer; `core` adds nothing to a text.

    If the library fails (it raises bare Exception, and panics), load_tokenizer raises InputError, `encode` returns
    BadRow, and `decode` raises it.
    """

    core: tokenizers.Tokenizer
    folder: Path
    specials: dict[str, str]  # bos_token, eos_token, ...: a chat template's variables
    bos: tuple[int, ...]  # before a text
    eos: int | None  # after it
    config: Fields  # tokenizer_config.json
    fingerprint: str  # of all that decides ids
    unknown: int | None = None  # id of the unknown token
    stops: tuple[str, ...] = ()  # tokens at which generation stops

    @cached_property
    def stop_ids(self) -> list[int]:
        return [i for stop in self.stops if (i := self.core.token_to_id(stop)) is not None]

    @cached_property
    def greedy(self) -> list[int]:
        """Added tokens that take the spaces around them."""
        return [i for i, token in self.core.get_added_tokens_decoder().items() if token.lstrip or token.rstrip]

    @property
    def eos_token(self) -> str | None:
        return None if self.eos is None else self.core.id_to_token(self.eos)

    def encode(self, texts: Sequence[str], offsets: bool = False) -> list[Tokens | BadRow]:
        """The tokens of each text; nothing is added."""
        run = self.core.encode_batch if offsets else self.core.encode_batch_fast
        try:
            return [_tokens(e, offsets) for e in run(list(texts), add_special_tokens=False)]
        except BaseException as error:
            fault = _fault(error)
        return [self.encode([text], offsets)[0] for text in texts] if len(texts) > 1 else [fault]

    def part(self, before: str, text: str, after: str) -> Tokens | BadRow:
        """The tokens that begin in `text`, a piece of a long text, without offsets."""
        (tokens,) = self.encode([before + text + after], offsets=True)
        if isinstance(tokens, BadRow):
            return tokens
        ids, offsets = tokens
        assert offsets is not None
        return ids[(offsets[:, 0] >= len(before)) & (offsets[:, 0] < len(before + text))], None

    def wrap(self, ids: np.ndarray, begin: bool = True, end: bool = True) -> tuple[np.ndarray, int]:
        """(ids (n,) int32 with, if `begin`, bos and, if `end`, eos, neither of them twice; number of tokens before)."""
        lead = self.bos if begin and tuple(ids[: len(self.bos)]) != self.bos else ()
        tail = [self.eos] if end and self.eos is not None and ids[-1:].tolist() != [self.eos] else []
        return np.concatenate([np.array(lead, np.int32), ids, np.array(tail, np.int32)]), len(lead)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, with special tokens. Raises BadRow."""
        try:
            return self.core.decode([int(i) for i in ids], skip_special_tokens=False)
        except BaseException as error:
            raise _fault(error) from None


def _tokens(encoding: tokenizers.Encoding, offsets: bool) -> Tokens:
    ids = encoding.ids
    flat = chain.from_iterable(encoding.offsets) if offsets else ()  # twice as fast as an array of pairs
    return np.array(ids, np.int32), np.fromiter(flat, np.int32, 2 * len(ids)).reshape(-1, 2) if offsets else None


def _fault(error: BaseException) -> BadRow:
    """The library's message. Errors that are not the library's (Ctrl-C, an exit, MemoryError) are raised."""
    panic = (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")  # a BaseException
    if not panic and (not isinstance(error, Exception) or isinstance(error, MemoryError)):
        raise error
    return BadRow(f"the tokenizer fails on it: {' '.join(str(error).split()) or type(error).__name__}")


# ---------------------------------------------------------------- loading


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder with a tokenizer.json. Raises InputError if it cannot be used."""
    folder = Path(folder)
    stored, config = _object(folder / "tokenizer.json"), _object(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else _object(folder / "special_tokens_map.json")
    by_name, models = _object(folder / "added_tokens.json"), [_object(folder / name) for name in _MODELS]
    model = stored["model"] if isinstance(stored.get("model"), dict) else {}
    spec = stored | {"truncation": None, "padding": None}
    if model.get("dropout"):  # equal texts have equal tokens
        spec["model"] = model | {"dropout": None}
    try:
        added = _added(stored, config, older, by_name)
        core = _build(spec, added)
        probe = next((text for text in _PROBES if core.encode(text, add_special_tokens=False).ids), "")
        lead, tail = _around(*(core.encode(probe, add_special_tokens=wanted).ids for wanted in (False, True)))
        core = _build(spec | {"post_processor": None}, added)  # it adds tokens and may trim offsets
        core.encode_special_tokens = config.get("split_special_tokens") is True
        names = {name: text for name, token in _named(config, older).items() if (text := _text(token)) is not None}
        ends, bos = next(filter(None, (_ends_of(core, fields) for fields in models)), []), tuple(lead)
        if (adds := config.get("add_bos_token")) is not None:
            first = core.token_to_id(names.get("bos_token", ""))
            bos = (first,) if adds and first is not None else ()
        candidates = [*tail[-1:], *ends, core.token_to_id("<|endoftext|>")]
        eos = core.token_to_id(names["eos_token"]) if "eos_token" in names else candidates[0]
        np.array([*bos, eos or 0], np.int32)  # they fit
    except BaseException as error:
        raise InputError(f"{folder / 'tokenizer.json'}: {_fault(error)}. Download it again.") from None
    parts = [spec, names, bos, eos, [repr(token) for token in added], core.encode_special_tokens]
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    name, number = model.get("unk_token"), model.get("unk_id")
    unknown = core.token_to_id(name) if isinstance(name, str) else number if type(number) is int else None
    stops = [core.id_to_token(i) for i in dict.fromkeys([*ends, *([] if eos is None else [eos])])]
    return Tokenizer(core, folder, names, bos, eos, config, fingerprint, unknown, tuple(filter(None, stops)))


def _build(spec: Fields, added: list[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_str(json.dumps(spec))
    core.add_tokens(added)
    return core


def _object(path: Path) -> Fields:
    """The JSON object in a file, empty without the file."""
    try:
        fields = json.loads(read_small(path, links=True))
        reason = "it is not a JSON object"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        fields, reason = None, why(error) if isinstance(error, (OSError, ValueError)) else "it is nested too deeply"
    if not isinstance(fields, dict):
        raise InputError(f"{path} cannot be read: {reason}. Download it again.")
    return fields


# ---------------------------------------------------------------- special tokens


def _named(config: Fields, older: Fields) -> Fields:
    """Every `*_token`, as text or object. `older`: special_tokens_map.json, if it counts."""
    merged = config | older
    extra = merged.get("extra_special_tokens")
    named = {name: value for name, value in merged.items() if name.endswith("_token")}
    return named | (extra if isinstance(extra, dict) else {})


def _added(spec: Fields, config: Fields, older: Fields, by_name: Fields) -> list[tokenizers.AddedToken]:
    """Tokens to add to tokenizer.json, in order: those of added_tokens_decoder, else of added_tokens.json (`by_name`)
    and tokenizer.json; then those of tokenizer_config.json and special_tokens_map.json that are none of these.
    """
    named, lists = _named(config, older), [fields.get(key) for fields in (config, older) for key in _EXTRA]
    if isinstance(padding := spec.get("padding"), dict):
        named = {"pad_token": padding.get("pad_token")} | named
    extra = next((tokens for tokens in lists if isinstance(tokens, list) and tokens), [])
    ordered = [named.get(name) for name in (*_NAMES, *(name for name in named if name not in _NAMES))]
    special = {text for token in (*ordered, *extra) if (text := _text(token))}
    in_spec = [token for token in spec.get("added_tokens") or () if _text(token)]
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        by_id = {int(i): _token(token) for i, token in decoder.items() if i.isdecimal() and _text(token)}
    else:
        kinds = {text: {"normalized": text not in special, "special": text in special} for text in by_name}
        by_id = {i: tokenizers.AddedToken(text, **kinds[text]) for text, i in by_name.items()}
        by_id |= {token["id"]: _token(token) for token in in_spec}
    result = [token for _, token in sorted(by_id.items())]
    texts = {token.content for token in result} | {_text(token) for token in in_spec}
    for token in (*ordered, *extra):
        if (text := _text(token)) and text not in texts:
            result.append(_token(token, special=True))
            result[-1].special |= token in ordered
            texts.add(text)
    return result


def _text(token: Any) -> str | None:
    """The characters of a token, which is a string or an object; None if it has none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _token(token: Any, special: bool = False) -> tokenizers.AddedToken:
    flags = {name: token[name] for name in _FLAGS if type(token.get(name)) is bool} if isinstance(token, dict) else {}
    return tokenizers.AddedToken(_text(token), **(flags or {"special": special}))


def _around(plain: list[int], full: list[int]) -> tuple[list[int], list[int]]:
    """(what the post-processor puts before a text, what it puts after it)."""
    for start in range(len(full) - len(plain) + 1) if plain else ():
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    return [], []


def _ends_of(core: tokenizers.Tokenizer, model: Fields) -> list[int]:
    """The tokens of eos_token_id of a configuration."""
    value = model.get("eos_token_id")
    value = value if isinstance(value, list) else [value]
    return [i for i in value if type(i) is int and 0 <= i < 1 << 31 and core.id_to_token(i) is not None]


# ---------------------------------------------------------------- chat templates


def read_choice(choice: str) -> tuple[str, str]:
    """--chat-template, which is a file or a name of BUILT_IN, as (name, template). Raises InputError."""
    if choice not in BUILT_IN and not Path(choice).exists():
        raise InputError(f"--chat-template {choice}: no such file, and none of {', '.join(sorted(BUILT_IN))}.")
    return choice, BUILT_IN.get(choice) or _template(Path(choice), "--chat-template ")


def load_template(
    tokenizer: Tokenizer, choice: tuple[str, str] | None = None, date: str | None = None
) -> ChatTemplate | None:
    """The template of `choice`, from read_choice, or the checkpoint's, if it has one. Raises InputError,
    MemoryError.
    """
    origin, sources = (choice[0], {"default": choice[1]}) if choice else _templates_of(tokenizer)
    if not sources:
        return None
    if "default" not in sources or not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise InputError(f"{origin} has no text as its default 'chat_template'. Name a file: --chat-template FILE.")
    try:
        variables = tokenizer.specials | (_ends(tokenizer) if origin in BUILT_IN else {})
        return ChatTemplate(sources, variables, date, tokenizer.stops, tokenizer.eos_token)
    except MemoryError:
        raise
    except Exception as error:  # compiling runs constant code
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InputError(f"{origin}: the chat template does not compile, {line}{error}.") from None


def cut_marks(tokenizer: Tokenizer, template: ChatTemplate) -> list[str]:
    """A note on what looks like a special token in a template's text, and is none."""
    with suppress(BadRow):
        text = template.mark(Chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])).text
        marks = [mark for mark in dict.fromkeys(_MARKS.findall(text)) if tokenizer.core.token_to_id(mark) is None]
        if marks:
            return [f"the tokenizer has no tokens for {', '.join(marks[:3])} of the chat template, and cuts them up"]
    return []


def standalone(tokenizer: Tokenizer, choice: tuple[str, str]) -> str:
    """The template for other programs: a built-in one sets the tokens that it needs."""
    origin, source = choice
    ends = _ends(tokenizer) if origin in BUILT_IN else {}
    return "".join(f"{{%- set {name} = {json.dumps(token)} %}}\n" for name, token in ends.items()) + source


def _ends(tokenizer: Tokenizer) -> dict[str, str]:
    """Variables of the built-in templates: tokens that the tokenizer puts around texts."""
    bos = "".join(tokenizer.core.id_to_token(i) or "" for i in tokenizer.bos)
    return {"bos_token": bos, "eos_token": tokenizer.eos_token or ""}


def _templates_of(tokenizer: Tokenizer) -> tuple[str, dict[str, str]]:
    """(the file of the checkpoint's templates, these by name)."""
    folder, path = tokenizer.folder, tokenizer.folder / "chat_template.jinja"
    named = {p.stem: _template(p) for p in sorted((folder / TEMPLATES).glob("*.jinja")) if p.is_file()}
    if path.is_file():
        return str(path), {"default": _template(path), **named}
    path, written = folder / "tokenizer_config.json", tokenizer.config.get("chat_template")
    if not written:  # of processors
        path = folder / "chat_template.json"
        written = _object(path).get("chat_template")
    if isinstance(written, list):
        written = {t.get("name"): t.get("template") for t in written if isinstance(t, dict)}
    return str(path), (written if isinstance(written, dict) else {"default": written} if written else {}) | named


def _template(path: Path, name: str = "") -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}{path}: {why(error)}.") from None
