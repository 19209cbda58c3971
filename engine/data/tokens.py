"""A checkpoint's tokenizer: text to ids and back, special tokens, tokens around a text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from trireme.engine.data import specials, versions
from trireme.engine.data.files.rows import BadRow
from trireme.models.config import InputError
from trireme.storage.untrusted import read_small, why

WINDOW = 1 << 20  # characters at once: the library takes about 170 bytes each
OVERLAP = 1 << 12  # on each side of a window
PROBES = ("a", "A", "0", ".", "的")  # of which every tokenizer knows one

Tokens = tuple[np.ndarray, np.ndarray | None]  # ids (n,) int32; offsets (n, 2) int32, in characters, or None
Located = tuple[np.ndarray, np.ndarray]  # the same with offsets


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face fast tokenizer; `core` adds nothing to a text.

    If the library fails (it raises bare Exception, and panics), load_tokenizer raises InputError, `encode` returns
    BadRow, and `decode` raises it. Limits: sandbox.py.
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
        """Encodes a long text with the memory of one window."""
        ids, places = list[np.ndarray](), list[np.ndarray]()
        for start in range(0, len(text), WINDOW):
            part = self.part(text, start, min(start + WINDOW, len(text)), offsets)
            if isinstance(part, BadRow):
                return part
            ids.append(part[0])
            places += [] if part[1] is None else [part[1]]
        return np.concatenate(ids), np.concatenate(places) if offsets else None

    def part(self, text: str, start: int, stop: int, offsets: bool = True) -> Tokens | BadRow:
        """(ids (n,) int32, offsets (n, 2) int32) of the tokens of `text` that begin in [start, stop).

        They are computed with OVERLAP characters on each side. If these do not settle the tokens at a border, it is
        taken as a border of tokens. Parts joined are the text's tokens, unless a word is about as long as OVERLAP.

        Without `offsets` it takes less time: only the tokens around the borders are located.
        """
        first, last = self._settled(text, start), self._settled(text, stop)
        low = start - min(OVERLAP, start) if first else start
        high = min(stop + OVERLAP, len(text)) if last else stop
        if not offsets:
            found = self._batch([text[low:high]], offsets=False)[0]
            if isinstance(found, BadRow):
                return found
            if (inside := self._inside(found[0], first, last, start, stop)) is not None:
                return found[0][inside], None
        made = self._window(text, low, high)
        if isinstance(made, BadRow):
            return made
        ids, places = made
        mine = places[:, 0] >= start
        if high > stop:
            mine &= places[:, 0] < stop
        return ids[mine], places[mine] if offsets else None

    def _inside(
        self, ids: np.ndarray, first: Located | None, last: Located | None, start: int, stop: int
    ) -> np.ndarray | None:
        """Which of the tokens `ids` begin in [start, stop), (n,) bool, from those around the borders, `first` and
        `last`; None if they are not the same as in `ids`.

        Equal tokens of equal text are at the same characters, but for the unknown token, which has any length.
        """
        inside = np.ones(len(ids), bool)
        if first:
            near, places = first
            n = len(near) - int((places[:, 0] >= start + OVERLAP // 4).sum())
            if not self._same(ids[:n], near[:n]):
                return None
            inside[:n] = places[:n, 0] >= start
        if last:
            near, places = last
            n = len(near) - int((places[:, 0] < stop - OVERLAP // 4).sum())
            if n > len(ids) or not self._same(ids[len(ids) - n :], near[len(near) - n :]):
                return None
            inside[len(ids) - n :] &= places[len(near) - n :, 0] < stop
        return inside

    def _same(self, ids: np.ndarray, near: np.ndarray) -> bool:
        return np.array_equal(ids, near) and (self.unknown is None or self.unknown not in ids)

    def _settled(self, text: str, border: int) -> Located | None:
        """The tokens around `border`, up to OVERLAP characters away, if those next to it are the same in a narrower
        window, else None.
        """
        found, windows = [], list[Located]()
        for reach in (OVERLAP // 2 + 1, OVERLAP) if 0 < border < len(text) else ():
            made = self._window(text, max(0, border - reach), min(len(text), border + reach))
            if isinstance(made, BadRow):
                return None
            near = np.abs(made[1][:, 0] - border) < OVERLAP // 4
            found.append((made[0][near].tolist(), made[1][near, 0].tolist()))
            windows.append(made)
        return windows[-1] if found and found[0] == found[1] else None

    def _window(self, text: str, start: int, stop: int) -> Located | BadRow:
        made = self._batch([text[start:stop]], offsets=True)[0]
        if isinstance(made, BadRow):
            return made
        ids, offsets = made
        assert offsets is not None
        return ids, offsets + np.int32(start)

    def wrap(self, ids: np.ndarray, end: bool = True) -> tuple[np.ndarray, int]:
        """(ids (n,) int32 with bos and, if `end`, eos, neither of them twice; number of tokens put before)."""
        lead = () if tuple(ids[: len(self.bos)]) == self.bos else self.bos
        tail = (self.eos,) if end and self.eos is not None and (not len(ids) or ids[-1] != self.eos) else ()
        return np.concatenate([np.array(lead, np.int32), ids, np.array(tail, np.int32)]), len(lead)

    def cut_up(self, ids: Sequence[int] | np.ndarray, looks: bool = True) -> list[tuple[str, int, int]]:
        """As specials.cut_up. Raises BadRow."""
        names = [token.content for token in self.core.get_added_tokens_decoder().values()]
        return specials.cut_up([self.decode([i]) for i in ids], [*names, *self.specials.values()], looks)

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


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a folder; None without a tokenizer.json. Raises InputError if it cannot be used."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    content = _read(path)
    whole = _parse(content, path)
    spec, notes = _without_chance(whole)
    config, older = _optional(folder / "tokenizer_config.json"), _optional(folder / "special_tokens_map.json")
    if config.get("fast_tokenizer_files") not in (None, [], ["tokenizer.json"]):
        others = f'{folder / "tokenizer_config.json"}: "fast_tokenizer_files" names others than tokenizer.json'
        raise InputError(f"{others}, and transformers reads the newest. Name that one tokenizer.json, remove the key.")
    more = specials.added(config, older, _optional(folder / "added_tokens.json"), whole)
    try:
        core = tokenizers.Tokenizer.from_str(json.dumps(spec))
        core.add_tokens(more)
        vocabulary, model = core.get_vocab_size(), _optional(folder / "config.json")
        read, wrong = versions.corrected(spec, vocabulary, config, model)
        probe = next((text for text in PROBES if core.encode(text, add_special_tokens=False).ids), "")
        around = [core.encode(probe, add_special_tokens=wanted).ids for wanted in (False, True)]
        # A post-processor adds tokens and may trim offsets.
        core = tokenizers.Tokenizer.from_str(json.dumps(read | {"post_processor": None}))
        core.add_tokens(more)
        core.encode_special_tokens = config.get("split_special_tokens") is True
        unlike = versions.built_anew(read, [*core.get_added_tokens_decoder().values()], config, model)
    except BaseException as error:
        raise InputError(f"{path} is not a tokenizer that can be read: {_reason(error)}. Download it again.") from None
    known = {specials.text(token) for token in specials.listed(whole)}
    new = [repr(token) for token in more if token.content not in known]
    names = _specials(folder, specials.named(config, older))
    lead, tail = _around(*around)
    eos = _eos(core, folder, names, tail)
    bos = _bos(core, config, names, lead)
    if (largest := max((*bos, eos or 0))) >= 1 << 31:
        why_not = f"it puts token id {largest:,} around a text; ids are below 2^31"
        raise InputError(f"{path} is not a tokenizer that can be read: {why_not}. Download it again.")
    split = [*(["words"] if read != spec else []), *(["split"] if core.encode_special_tokens else [])]
    parts = [hashlib.sha256(content.encode()).hexdigest(), names, bos, eos, *([new] if new else []), *split]
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Tokenizer(
        core,
        folder,
        names,
        bos,
        eos,
        config,
        fingerprint,
        (*notes, *wrong, *_unlike(bos, lead), *unlike),
        _unknown(core, spec),
        _stops(core, folder, eos),
    )


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


def _specials(folder: Path, given: dict[str, Any]) -> dict[str, str]:
    """The text of every `*_token`."""
    found = {}
    for name, entry in given.items():
        value = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(value, str):
            if any("\ud800" <= c <= "\udfff" for c in name + value):
                raise InputError(
                    f"{folder}: {name} {value!r} holds half of a surrogate pair, which is not a character."
                )
            found[name] = value
    return found


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
        found = [i for i in value if type(i) is int and 0 <= i < 1 << 31 and core.id_to_token(i) is not None]
        if found:
            return found
    return []


def _stops(core: tokenizers.Tokenizer, folder: Path, eos: int | None) -> tuple[str, ...]:
    """Tokens at which the model's generation stops."""
    ids = dict.fromkeys([*_model_ends(core, folder), *([] if eos is None else [eos])])
    return tuple(token for i in ids if (token := core.id_to_token(i)))


def _unknown(core: tokenizers.Tokenizer, spec: dict[str, Any]) -> int | None:
    """The unknown token: by number in Unigram, else by name."""
    model = spec.get("model")
    name, number = (model.get("unk_token"), model.get("unk_id")) if isinstance(model, dict) else (None, None)
    return core.token_to_id(name) if isinstance(name, str) else number if type(number) is int else None


def _bos(core: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str], lead: list[int]) -> tuple[int, ...]:
    """The tokens before a text: as add_bos_token says, else as the post-processor puts them."""
    asked = config.get("add_bos_token")
    if asked is None:
        return tuple(lead)
    bos = core.token_to_id(names.get("bos_token", ""))
    return (bos,) if asked and bos is not None else ()


def _unlike(bos: Sequence[int], lead: Sequence[int]) -> tuple[str, ...]:
    """A note if a text begins otherwise than tokenizer.json says."""
    if bool(bos) == bool(lead):
        return ()
    mine, its = ("begin with a begin token", "has none") if bos else ("have no begin token", "has one")
    by = '"add_bos_token" of tokenizer_config.json'
    return (f"texts {mine}, by {by}; transformers 5 goes by tokenizer.json, which {its}",)
