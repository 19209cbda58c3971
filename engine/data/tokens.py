"""The tokenizer of a checkpoint folder: text to ids and back, its special tokens, and what it adds around a text."""

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

WINDOW = 1 << 20  # characters that are tokenized at once: the library takes some 170 bytes for each
OVERLAP = 1 << 12  # of two windows of a longer text

Tokens = tuple[np.ndarray, np.ndarray | None]  # ids (n,) int32; offsets (n, 2) int32, characters [start, stop), or None


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face fast tokenizer. `core` adds nothing to a text; the fields say what surrounds it.

    However the library fails (it raises bare Exception, and panics), load_tokenizer raises InputError, `encode` returns
    BadRow, `decode` raises it. Time and memory have no limit here: see sandbox.py.
    """

    core: tokenizers.Tokenizer
    folder: Path
    specials: dict[str, str]  # bos_token, eos_token, ...: the variables that a chat template sees
    bos: tuple[int, ...]  # ids put before a text
    eos: int | None  # id put after a finished text
    config: dict[str, Any]  # tokenizer_config.json
    fingerprint: str  # of everything that decides the ids
    notes: tuple[str, ...] = ()  # what the user should know
    unknown: int | None = None  # id of what the vocabulary has no token for

    @property
    def eos_token(self) -> str | None:
        return None if self.eos is None else self.core.id_to_token(self.eos)

    def encode(self, texts: Sequence[str], offsets: bool = False) -> list[Tokens | BadRow]:
        """The tokens of each text, nothing added; offsets count characters. BadRow where the library fails on it."""
        short = [text for text in texts if len(text) <= WINDOW]
        found = iter(self._batch(short, offsets))
        return [next(found) if len(text) <= WINDOW else self._long(text, offsets) for text in texts]

    def _batch(self, texts: Sequence[str], offsets: bool) -> list[Tokens | BadRow]:
        run = self.core.encode_batch if offsets else self.core.encode_batch_fast
        try:
            return [_tokens(e, offsets) for e in run(list(texts), add_special_tokens=False)]
        except BaseException as error:
            reason = _reason(error)
        if len(texts) > 1:  # of which one it is
            return [self._batch([text], offsets)[0] for text in texts]
        return [BadRow(f"the tokenizer fails on it: {reason}")]

    def _long(self, text: str, offsets: bool) -> Tokens | BadRow:
        """The tokens of a text, in memory for a window of it. Windows overlap, and part where both have a token begin.

        The tokens are those of the whole text where no word is longer than the overlap.
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
                else:  # a word longer than the overlap has other tokens from its middle on: part it
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
        """ids with the beginning-of-text tokens before and, where `end`, the end token after; neither twice.

        Returns (ids (n,) int32, how many tokens were put before).
        """
        lead = () if tuple(ids[: len(self.bos)]) == self.bos else self.bos
        tail = (self.eos,) if end and self.eos is not None and (not len(ids) or ids[-1] != self.eos) else ()
        return np.concatenate([np.array(lead, np.int32), ids, np.array(tail, np.int32)]), len(lead)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens included. BadRow where the library fails on them."""
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
    """What the library says is wrong. Raises what is not the library's: Ctrl-C, an exit, want of memory."""
    panic = (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")  # a BaseException
    if not panic and (not isinstance(error, Exception) or isinstance(error, MemoryError)):
        raise error
    return " ".join(str(error).split()) or type(error).__name__


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer in `folder`, or None where there is no tokenizer.json. InputError where it cannot be used."""
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
        # Only the tokens of the text itself are wanted from here on, and offsets that cover all of it:
        # a post-processor adds tokens and may trim the offsets.
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
    """(the tokenizer without what would cut texts, fill them up, or make their tokens random; what to say of that)."""
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
    """Every `*_token` that the folder names; tokenizer_config.json over the older special_tokens_map.json."""
    found = {}
    for name, given in (_optional(folder / "special_tokens_map.json") | config).items():
        value = given.get("content") if isinstance(given, dict) else given
        if name.endswith("_token") and isinstance(value, str):
            if any("\ud800" <= c <= "\udfff" for c in name + value):
                raise InputError(f"{folder}: {name} {value!r} holds half of a surrogate pair, which is no character.")
            found[name] = value
    return found


def _eos(core: tokenizers.Tokenizer, folder: Path, specials: dict[str, str]) -> int | None:
    """The id of eos_token; where the tokenizer names none, the model's first eos_token_id."""
    if "eos_token" in specials:
        return core.token_to_id(specials["eos_token"])
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder / name).get("eos_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and 0 <= value < 1 << 31 and core.id_to_token(value) is not None:
            return value
    return core.token_to_id("<|endoftext|>")


def _unknown(core: tokenizers.Tokenizer, spec: dict[str, Any]) -> int | None:
    """The id of the model's unknown token: by number in Unigram, by name elsewhere."""
    model = spec.get("model")
    name, number = (model.get("unk_token"), model.get("unk_id")) if isinstance(model, dict) else (None, None)
    return core.token_to_id(name) if isinstance(name, str) else number if type(number) is int else None


def _bos(
    core: tokenizers.Tokenizer, config: dict[str, Any], specials: dict[str, str], surround: list[int], eos: int | None
) -> tuple[int, ...]:
    """What goes before a text: add_bos_token where the configuration has it, else what the post-processor does."""
    asked = config.get("add_bos_token")
    if asked is None:
        return tuple(surround[:-1] if surround and surround[-1] == eos else surround)
    bos = core.token_to_id(specials.get("bos_token", ""))
    return (bos,) if asked and bos is not None else ()
