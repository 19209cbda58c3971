"""A checkpoint's tokenizer and its chat template: text to ids and back, special tokens, tokens around a text.

Tokens of the configuration are added to tokenizer.json as transformers 5 adds them, so that a text has the tokens that
servers of the model use.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers

from trireme.engine.data.chat import ChatTemplate
from trireme.engine.data.read import BadRow
from trireme.engine.data.template import BUILT_IN
from trireme.models.config import InputError
from trireme.storage.auxiliary import TEMPLATES
from trireme.storage.untrusted import parse_json, read_small, read_text, why

_PROBES = ("a", "A", "0", ".", "的")  # of which every tokenizer knows one
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LOOKS = r"<\|[\w.-]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>"  # like a special token, whatever the tokenizer has
_LETTERS, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MISTRAL = (  # words, where "fix_mistral_regex" of tokenizer_config.json asks transformers to correct them
    rf"{_LETTERS}{_UPPER}*{_LOWER}+|{_LETTERS}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LARGE = 100_000  # tokens; smaller vocabularies of Mistral's are of SentencePiece, and not corrected
_MISTRALS = ("mistral", "mistral3", "voxtral", "ministral", "pixtral", None)  # types of models that are
_OLDER = re.compile(
    r"v?([0-4]\b|5(\.0)*[.-]?(dev|a|b|rc))"
)  # than version 5.0.0 of transformers, which wrote them right

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
    config: dict[str, Any]  # tokenizer_config.json
    fingerprint: str  # of all that decides ids
    notes: tuple[str, ...] = ()  # for the user
    unknown: int | None = None  # id of the unknown token
    stops: tuple[str, ...] = ()  # tokens at which generation stops

    @cached_property
    def stop_ids(self) -> list[int]:
        return [i for stop in self.stops if (i := self.core.token_to_id(stop)) is not None]

    @cached_property
    def greedy(self) -> dict[int, str]:
        """Added tokens that take the spaces around them."""
        added = self.core.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.lstrip or token.rstrip}

    @property
    def eos_token(self) -> str | None:
        return None if self.eos is None else self.core.id_to_token(self.eos)

    @property
    def pad(self) -> int | None:
        """The token that fills up batches."""
        return self.core.token_to_id(self.specials.get("pad_token", ""))

    def encode(self, texts: Sequence[str], offsets: bool = False) -> list[Tokens | BadRow]:
        """The tokens of each text; nothing is added."""
        run = self.core.encode_batch if offsets else self.core.encode_batch_fast
        try:
            return [_tokens(e, offsets) for e in run(list(texts), add_special_tokens=False)]
        except BaseException as error:
            reason = _reason(error)
        if len(texts) > 1:  # which one?
            return [self.encode([text], offsets)[0] for text in texts]
        return [BadRow(f"the tokenizer fails on it: {reason}")]

    def part(self, before: str, text: str, after: str) -> np.ndarray | BadRow:
        """The tokens that begin in `text`, a piece of a long text, (n,) int32."""
        try:
            encoding = self.core.encode(before + text + after, add_special_tokens=False)
        except BaseException as error:
            return BadRow(f"the tokenizer fails on it: {_reason(error)}")
        ids = np.array(encoding.ids, np.int32)
        first, last = (self._first_from(encoding, at) for at in (len(before), len(before + text)))
        return ids[first:last]

    @staticmethod
    def _first_from(encoding: tokenizers.Encoding, at: int) -> int:
        """The first token that begins at character `at` or behind it."""
        low, high = 0, len(encoding.ids)
        while low < high:
            middle = (low + high) // 2
            start = encoding.token_to_chars(middle)
            low, high = (middle + 1, high) if start is None or start[0] < at else (low, middle)
        return low

    def wrap(self, ids: np.ndarray, end: bool = True) -> tuple[np.ndarray, int]:
        """(ids (n,) int32 with bos and, if `end`, eos, neither of them twice; number of tokens put before)."""
        lead = () if tuple(ids[: len(self.bos)]) == self.bos else self.bos
        tail = (self.eos,) if end and self.eos is not None and (not len(ids) or ids[-1] != self.eos) else ()
        return np.concatenate([np.array(lead, np.int32), ids, np.array(tail, np.int32)]), len(lead)

    def cuts(self, ids: Sequence[int] | np.ndarray, looks: bool = True) -> list[tuple[str, int, int]]:
        """(special token, first, stop) of special tokens that are written with several tokens: the tokenizer's and,
        with `looks`, all that look like one. Raises BadRow.
        """
        pieces = [self.decode([i]) for i in ids]
        starts = [0, *accumulate(map(len, pieces))]
        added = (token.content for token in self.core.get_added_tokens_decoder().values())
        names = sorted((re.escape(name) for name in {*added, *self.specials.values()} if name), key=len, reverse=True)
        result = []
        for match in re.finditer("|".join([*names, *([_LOOKS] if looks else [])]) or r"(?!)", "".join(pieces)):
            first, stop = bisect_right(starts, match.start()) - 1, bisect_left(starts, match.end())
            if stop - first > 1:
                result.append((match[0], first, stop))
        return result

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, with special tokens. Raises BadRow."""
        try:
            return self.core.decode([int(i) for i in ids], skip_special_tokens=False)
        except BaseException as error:
            raise BadRow(f"the tokenizer fails on it: {_reason(error)}") from None


def _tokens(encoding: tokenizers.Encoding, offsets: bool) -> Tokens:
    ids = encoding.ids
    flat = chain.from_iterable(encoding.offsets) if offsets else ()  # twice as fast as an array of pairs
    return np.array(ids, np.int32), np.fromiter(flat, np.int32, 2 * len(ids)).reshape(-1, 2) if offsets else None


def _reason(error: BaseException) -> str:
    """The library's message. Errors that are not the library's (Ctrl-C, an exit, MemoryError) are raised."""
    panic = (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")  # a BaseException
    if not panic and (not isinstance(error, Exception) or isinstance(error, MemoryError)):
        raise error
    return " ".join(str(error).split()) or type(error).__name__


# ---------------------------------------------------------------- loading


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a folder; None without a tokenizer.json. Raises InputError if it cannot be used."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = _read(path)
    spec = _parse(content, path) | {"truncation": None, "padding": None}
    config, older = _optional(folder / "tokenizer_config.json"), _optional(folder / "special_tokens_map.json")
    if config.get("fast_tokenizer_files") not in (None, [], ["tokenizer.json"]):
        others = f'{folder / "tokenizer_config.json"}: "fast_tokenizer_files" names others than tokenizer.json'
        raise InputError(f"{others}, and transformers reads the newest. Name that one tokenizer.json, remove the key.")
    model = spec.get("model")
    notes, dropout = list[str](), model.get("dropout") if isinstance(model, dict) else None
    if dropout:
        spec |= {"model": {**spec["model"], "dropout": None}}
        notes.append(f"the tokenizer's BPE dropout ({dropout}) is left off: equal texts have equal tokens")
    added = _added(config, older, _optional(folder / "added_tokens.json"), _parse(content, path))
    fixed = spec
    try:
        core = _made(spec, added)
        if _is_wrong(spec, folder) and config.get("fix_mistral_regex") and core.get_vocab_size() > _LARGE:
            fixed = spec | {"pre_tokenizer": _corrected(spec.get("pre_tokenizer"))}
            core = _made(fixed, added)
        probe = next((text for text in _PROBES if core.encode(text, add_special_tokens=False).ids), "")
        around = [core.encode(probe, add_special_tokens=wanted).ids for wanted in (False, True)]
        core = _made(fixed | {"post_processor": None}, added)  # it adds tokens and may trim offsets
        core.encode_special_tokens = config.get("split_special_tokens") is True
    except BaseException as error:
        raise InputError(f"{path} is not a tokenizer that can be read: {_reason(error)}. Download it again.") from None
    names = _specials(folder, _named(config, older))
    lead, tail = _around(*around)
    eos, bos = _eos(core, folder, names, tail), _bos(core, config, names, lead)
    if (largest := max((*bos, eos or 0))) >= 1 << 31:
        wrong = f"it puts token id {largest:,} around a text; ids are below 2^31"
        raise InputError(f"{path} is not a tokenizer that can be read: {wrong}. Download it again.")
    if bool(bos) != bool(lead):
        mine, its = ("begin with a begin token", "has none") if bos else ("have no begin token", "has one")
        by = '"add_bos_token" of tokenizer_config.json'
        notes.append(f"texts {mine}, by {by}; transformers 5 goes by tokenizer.json, which {its}")
    parts = [hashlib.sha256(content.encode()).hexdigest(), names, bos, eos, [repr(token) for token in added]]
    parts += ["fixed" if fixed is not spec else "", core.encode_special_tokens]
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    name, number = (model.get("unk_token"), model.get("unk_id")) if isinstance(model, dict) else (None, None)
    unknown = core.token_to_id(name) if isinstance(name, str) else number if type(number) is int else None
    ends = dict.fromkeys([*_model_ends(core, folder), *([] if eos is None else [eos])])
    stops = tuple(token for i in ends if (token := core.id_to_token(i)))
    return Tokenizer(core, folder, names, bos, eos, config, fingerprint, tuple(notes), unknown, stops)


def _made(spec: dict[str, Any], added: Sequence[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_str(json.dumps(spec))
    core.add_tokens(list(added))
    return core


def _is_wrong(spec: dict[str, Any], folder: Path) -> bool:
    """Whether transformers corrects Mistral's pattern of words in a tokenizer, if it is asked to."""
    model = _optional(folder / "config.json")
    version = model.get("transformers_version")
    older = not version or (isinstance(version, str) and bool(_OLDER.match(version)))
    return (
        bool(model) and older and model.get("model_type") in _MISTRALS and isinstance(spec.get("pre_tokenizer"), dict)
    )


def _corrected(words: Any) -> dict[str, Any]:
    """Mistral's pre-tokenizer with the right pattern of words."""
    split = {"type": "Split", "pattern": {"Regex": _MISTRAL}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if words.get("type") == "Sequence" and words.get("pretokenizers"):
        return {**words, "pretokenizers": [split, *words["pretokenizers"][1:]]}
    return {"type": "Sequence", "pretokenizers": [split, bytes_ if words.get("type") == "Metaspace" else words]}


def _read(path: Path) -> str:
    try:
        return read_small(path, links=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {why(error)}. Download it again.") from None


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}). Download it again.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}, expected an object. Download it again.")
    return value


def _optional(path: Path) -> dict[str, Any]:
    return _parse(_read(path), path) if path.is_file() else {}


# ---------------------------------------------------------------- special tokens


def _named(config: dict[str, Any], older: dict[str, Any]) -> dict[str, Any]:
    """Every `*_token`, as text or object. `older`: special_tokens_map.json; it wins if `config`, tokenizer_config.json,
    lists no added tokens, and is not read otherwise.
    """
    merged = config if "added_tokens_decoder" in config else config | older
    extra = merged.get("extra_special_tokens")
    named = extra if isinstance(extra, dict) else {}
    return {name: value for name, value in merged.items() if name.endswith("_token")} | named


def _specials(folder: Path, named: dict[str, Any]) -> dict[str, str]:
    """The text of every `*_token`."""
    texts = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in named.items()}
    result = {name: text for name, text in texts.items() if isinstance(text, str)}
    for name, text in result.items():
        if any("\ud800" <= c <= "\udfff" for c in name + text):
            raise InputError(f"{folder}: {name} {text!r} holds half of a surrogate pair, which is not a character.")
    return result


def _added(
    config: dict[str, Any], older: dict[str, Any], older_ids: dict[str, Any], spec: dict[str, Any]
) -> list[tokenizers.AddedToken]:
    """Tokens to add, in order; of the same text the last one counts. `older_ids`: added_tokens.json; `spec`:
    tokenizer.json.
    """
    names, extra = _named(config, older), _extra(config, older)
    if isinstance(padding := spec.get("padding"), dict):
        names = {"pad_token": padding.get("pad_token")} | names
    ordered = [names.get(name) for name in (*_NAMES, *(n for n in names if n not in _NAMES))]
    own = {_text(value) for value in ordered}
    entries = spec.get("added_tokens")
    listed = [token for token in entries if isinstance(token, dict)] if isinstance(entries, list) else []
    by_id: dict[int, tokenizers.AddedToken] = {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids = [i for i, value in decoder.items() if i.isdecimal() and len(i) < 12 and _text(value)]
        by_id = {int(i): _token(decoder[i]) for i in ids}
    else:
        special = own | {_text(value) for value in extra}
        for content, i in older_ids.items():
            if type(i) is int and content:
                by_id[i] = tokenizers.AddedToken(content, normalized=content not in special, special=content in special)
        by_id |= {token["id"]: _token(token) for token in listed if type(token.get("id")) is int and _text(token)}
    result = [token for _, token in sorted(by_id.items())]
    known = {token.content for token in result} | {_text(token) for token in listed}
    values = [*ordered, *extra]
    for i, value in enumerate(values):
        if (content := _text(value)) and content not in known and value not in values[:i]:
            result.append(_token(value, special=True))
            result[-1].special |= content in own
    return result


def _extra(config: dict[str, Any], older: dict[str, Any]) -> list[Any]:
    """Further special tokens, under either name; of the older file only those of the newer name, if it has both."""
    older = {} if "added_tokens_decoder" in config else older
    result = [
        fields.get(name) for fields in (config, older) for name in ("extra_special_tokens", "additional_special_tokens")
    ]
    new, additional, older_new, last = (value if isinstance(value, list) else None for value in result)
    ours = new or additional if additional is not None else new
    if older_new is not None:
        return [*(ours or []), *older_new]
    return ours if ours is not None else last or []


def _text(value: Any) -> str:
    """The characters of a token; "" if `value` is not one that the library takes."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
        return ""
    return content


def _token(value: Any, special: bool = False) -> tokenizers.AddedToken:
    flags = {name: value[name] for name in _FLAGS if type(value.get(name)) is bool} if isinstance(value, dict) else {}
    return tokenizers.AddedToken(_text(value), **(flags or {"special": special}))


def _around(plain: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
    """(what the post-processor puts before a text, what it puts after it)."""
    for at in range(len(whole) - len(plain) + 1) if plain else ():
        if whole[at : at + len(plain)] == plain:
            return whole[:at], whole[at + len(plain) :]
    return [], []


def _eos(core: tokenizers.Tokenizer, folder: Path, names: dict[str, str], tail: list[int]) -> int | None:
    """eos_token, else what the post-processor puts last, else the model's first eos_token_id."""
    if "eos_token" in names:
        return core.token_to_id(names["eos_token"])
    return next(iter([*tail[-1:], *_model_ends(core, folder)]), core.token_to_id("<|endoftext|>"))


def _model_ends(core: tokenizers.Tokenizer, folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder / name).get("eos_token_id")
        value = value if isinstance(value, list) else [value]
        result = [i for i in value if type(i) is int and 0 <= i < 1 << 31 and core.id_to_token(i) is not None]
        if result:
            return result
    return []


def _bos(core: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str], lead: list[int]) -> tuple[int, ...]:
    """The tokens before a text: as add_bos_token says, else as the post-processor puts them."""
    asked = config.get("add_bos_token")
    if asked is None:
        return tuple(lead)
    bos = core.token_to_id(names.get("bos_token", ""))
    return (bos,) if asked and bos is not None else ()


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
    variables = tokenizer.specials
    if choice:
        where, sources = choice[0], {"default": choice[1]}
        variables = variables | _ends(tokenizer) if where in BUILT_IN else variables
    else:
        sources, where = _own_templates(tokenizer)
    if not sources:
        return None
    if "default" not in sources:
        raise InputError(
            f"{where} has chat templates {', '.join(sources)}, but no default. Name a file: --chat-template FILE."
        )
    try:
        return ChatTemplate(sources, variables, date, tokenizer.stops, tokenizer.eos_token)
    except jinja2.TemplateSyntaxError as error:
        what = f"line {error.lineno}: {error.message}"
    except MemoryError:
        raise
    except Exception as error:  # compiling runs constant code
        what = f"{type(error).__name__}: {error}"
    raise InputError(f"{where}: the chat template does not compile, {what}.")


def standalone(tokenizer: Tokenizer, choice: tuple[str, str]) -> str:
    """The template for other programs: a built-in one sets the tokens that it needs."""
    where, source = choice
    ends = _ends(tokenizer) if where in BUILT_IN else {}
    return "".join(f"{{%- set {name} = {json.dumps(token)} %}}\n" for name, token in ends.items()) + source


def _ends(tokenizer: Tokenizer) -> dict[str, str]:
    """Variables of the built-in templates: tokens that the tokenizer puts around texts."""
    bos = "".join(tokenizer.core.id_to_token(i) or "" for i in tokenizer.bos)
    return {"bos_token": bos, "eos_token": tokenizer.eos_token or ""}


def _own_templates(tokenizer: Tokenizer) -> tuple[dict[str, str], str]:
    """(the checkpoint's templates by name, their file)."""
    path = tokenizer.folder / "chat_template.jinja"
    named = {p.stem: _template(p) for p in sorted((tokenizer.folder / TEMPLATES).glob("*.jinja")) if p.is_file()}
    if path.is_file():
        return {"default": _template(path), **named}, str(path)
    where = str(tokenizer.folder / "tokenizer_config.json")
    written = tokenizer.config.get("chat_template")
    if not written and (older := tokenizer.folder / "chat_template.json").is_file():  # of processors
        where = str(older)
        try:
            written = parse_json(_template(older).encode(), older.name).get("chat_template")
        except ValueError as error:
            raise InputError(f"{where}: {error}. Download it again.") from None
    if isinstance(written, str):
        written = {"default": written}
    elif isinstance(written, list):
        pairs = [(t.get("name"), t.get("template")) for t in written if isinstance(t, dict)]
        written = dict(pairs) if all(isinstance(name, str) for name, _ in pairs) else pairs
    written = written or {}
    if not isinstance(written, dict) or not all(isinstance(source, str) for source in written.values()):
        raise InputError(f"{where}: 'chat_template' is neither a string nor a list of named templates.")
    return written | named, where


def _template(path: Path, what: str = "") -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(f"{what}{path}: {reason}.") from None
