"""A checkpoint's tokenizer: text to ids and back, special tokens, tokens around a text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from trireme.engine.data.rows import BadRow
from trireme.models.config import InputError

WINDOW = 1 << 20  # characters at once: the library takes about 170 bytes each
OVERLAP = 1 << 12  # of windows

Tokens = tuple[np.ndarray, np.ndarray | None]  # ids (n,) int32; offsets (n, 2) int32, in characters, or None


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face fast tokenizer; `core` adds nothing to a text.

    Where the library fails (it raises bare Exception, and panics), load_tokenizer raises InputError, `encode` returns
    BadRow, `decode` raises it. Limits: see sandbox.py.
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

    @property
    def eos_token(self) -> str | None:
        return None if self.eos is None else self.core.id_to_token(self.eos)

    def encode(self, texts: Sequence[str], offsets: bool = False) -> list[Tokens | BadRow]:
        """Tokens of each text, nothing added."""
        short = [text for text in texts if len(text) <= WINDOW]
        found = iter(self._batch(short, offsets))
        return [next(found) if len(text) <= WINDOW else self._long(text, offsets) for text in texts]

    def _batch(self, texts: Sequence[str], offsets: bool) -> list[Tokens | BadRow]:
        run = self.core.encode_batch if offsets else self.core.encode_batch_fast
        try:
            return [_tokens(e, offsets) for e in run(list(texts), add_special_tokens=False)]
        except BaseException as error:
            reason = _reason(error)
        if len(texts) > 1:  # which one?
            return [self._batch([text], offsets)[0] for text in texts]
        return [BadRow(f"the tokenizer fails on it: {reason}")]

    def _long(self, text: str, offsets: bool) -> Tokens | BadRow:
        """Takes the memory of a window. Windows overlap, and part where a token begins in both.

        The tokens are those of the whole text unless a word is longer than OVERLAP.
        """
        parts: list[tuple[np.ndarray, np.ndarray]] = []  # ids, offsets
        for start in range(0, len(text) - OVERLAP, WINDOW - OVERLAP):
            made = self._window(text, start, start + WINDOW)
            if isinstance(made, BadRow):
                return made
            seam = 0
            if parts:
                (ids, spans), middle = parts.pop(), start + OVERLAP // 2
                common = _nearest(np.intersect1d(spans[:, 0], made[1][:, 0]), middle)
                if common is not None:
                    seam = common
                else:  # tokens differ from the middle of a longer word: part it
                    seam = _nearest(spans[spans[:, 0] >= start, 0], middle) or middle
                    made = self._window(text, seam, start + WINDOW)
                    if isinstance(made, BadRow):
                        return made
                before = np.searchsorted(spans[:, 0], seam)
                parts.append((ids[:before], spans[:before]))
            after = np.searchsorted(made[1][:, 0], seam) if parts else 0
            parts.append((made[0][after:], made[1][after:]))
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]) if offsets else None

    def _window(self, text: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray] | BadRow:
        made = self._batch([text[start:stop]], offsets=True)[0]
        if isinstance(made, BadRow):
            return made
        ids, offsets = made
        assert offsets is not None
        return ids, offsets + np.int32(start)

    def wrap(self, ids: np.ndarray, end: bool = True) -> tuple[np.ndarray, int]:
        """(ids (n,) int32 with bos and, if `end`, eos, neither twice; tokens put before)."""
        lead = () if tuple(ids[: len(self.bos)]) == self.bos else self.bos
        tail = (self.eos,) if end and self.eos is not None and (not len(ids) or ids[-1] != self.eos) else ()
        return np.concatenate([np.array(lead, np.int32), ids, np.array(tail, np.int32)]), len(lead)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, special tokens included. Raises BadRow."""
        try:
            return self.core.decode([int(i) for i in ids], skip_special_tokens=False)
        except BaseException as error:
            raise BadRow(f"the tokenizer fails on it: {_reason(error)}") from None


def _tokens(encoding: tokenizers.Encoding, offsets: bool) -> Tokens:
    spans = np.array(encoding.offsets, np.int32).reshape(-1, 2) if offsets else None
    return np.array(encoding.ids, np.int32), spans


def _nearest(places: np.ndarray, middle: int) -> int | None:
    return int(places[np.abs(places - middle).argmin()]) if len(places) else None


def _reason(error: BaseException) -> str:
    """The library's message. Raises others' errors: Ctrl-C, an exit, MemoryError."""
    panic = (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")  # a BaseException
    if not panic and (not isinstance(error, Exception) or isinstance(error, MemoryError)):
        raise error
    return " ".join(str(error).split()) or type(error).__name__


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """None without a tokenizer.json. Raises InputError where it cannot be used."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    text = _read(path)
    spec, notes = _without_chance(_parse(text, path))
    config = _optional(folder / "tokenizer_config.json")
    try:
        core = tokenizers.Tokenizer.from_str(json.dumps(spec))
        surround = core.encode("", add_special_tokens=True).ids
        # A post-processor adds tokens and may trim offsets.
        core = tokenizers.Tokenizer.from_str(json.dumps(spec | {"post_processor": None}))
    except BaseException as error:
        raise InputError(f"{path} is not a tokenizer that can be read: {_reason(error)}. Download it again.") from None
    specials = _specials(folder, config)
    eos = _eos(core, folder, specials)
    bos = _bos(core, config, specials, surround, eos)
    state = json.dumps([hashlib.sha256(text.encode()).hexdigest(), specials, bos, eos], sort_keys=True)
    fingerprint = hashlib.sha256(state.encode()).hexdigest()
    return Tokenizer(core, folder, specials, bos, eos, config, fingerprint, notes, _unknown(core, spec))


def _without_chance(spec: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(`spec` without truncation, padding and dropout, notes)."""
    spec = spec | {"truncation": None, "padding": None}
    model = spec.get("model")
    if not isinstance(model, dict) or not (dropout := model.get("dropout")):
        return spec, ()
    note = f"the tokenizer's BPE dropout ({dropout}) is left off: equal texts have equal tokens"
    return spec | {"model": model | {"dropout": None}}, (note,)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}. Download it again.") from None


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


def _specials(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Every `*_token`; tokenizer_config.json wins over the older special_tokens_map.json."""
    found = {}
    for name, given in (_optional(folder / "special_tokens_map.json") | config).items():
        value = given.get("content") if isinstance(given, dict) else given
        if name.endswith("_token") and isinstance(value, str):
            if any("\ud800" <= c <= "\udfff" for c in name + value):
                raise InputError(f"{folder}: {name} {value!r} holds half of a surrogate pair, which is no character.")
            found[name] = value
    return found


def _eos(core: tokenizers.Tokenizer, folder: Path, specials: dict[str, str]) -> int | None:
    """eos_token, else the model's first eos_token_id."""
    if "eos_token" in specials:
        return core.token_to_id(specials["eos_token"])
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder / name).get("eos_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and 0 <= value < 1 << 31 and core.id_to_token(value) is not None:
            return value
    return core.token_to_id("<|endoftext|>")


def _unknown(core: tokenizers.Tokenizer, spec: dict[str, Any]) -> int | None:
    """By number in Unigram, else by name."""
    model = spec.get("model")
    name, number = (model.get("unk_token"), model.get("unk_id")) if isinstance(model, dict) else (None, None)
    return core.token_to_id(name) if isinstance(name, str) else number if type(number) is int else None


def _bos(
    core: tokenizers.Tokenizer, config: dict[str, Any], specials: dict[str, str], surround: list[int], eos: int | None
) -> tuple[int, ...]:
    """As add_bos_token says, else as the post-processor does."""
    asked = config.get("add_bos_token")
    if asked is None:
        return tuple(surround[:-1] if surround and surround[-1] == eos else surround)
    bos = core.token_to_id(specials.get("bos_token", ""))
    return (bos,) if asked and bos is not None else ()
