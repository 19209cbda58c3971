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

from trireme.models.config import InputError


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face fast tokenizer. `core` tokenizes and adds nothing; what surrounds a text is said by the fields."""

    core: tokenizers.Tokenizer
    folder: Path
    specials: dict[str, str]  # bos_token, eos_token, ...: the variables that a chat template sees
    bos: tuple[int, ...]  # ids put before a text
    eos: int | None  # id put after a finished text
    config: dict[str, Any]  # tokenizer_config.json
    fingerprint: str  # of everything that decides the ids

    @property
    def eos_token(self) -> str | None:
        return None if self.eos is None else self.core.id_to_token(self.eos)

    def encode(self, texts: Sequence[str], offsets: bool = False) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """(ids (n,) int32, offsets (n, 2) int64 or None) of each text, nothing added. Offsets count characters."""
        run = self.core.encode_batch if offsets else self.core.encode_batch_fast
        encodings = run(list(texts), add_special_tokens=False)
        spans = lambda e: np.array(e.offsets, np.int64).reshape(-1, 2) if offsets else None  # noqa: E731
        return [(np.array(e.ids, np.int32), spans(e)) for e in encodings]

    def wrap(self, ids: np.ndarray, end: bool = True) -> tuple[np.ndarray, int]:
        """ids with the beginning-of-text tokens before and, where `end`, the end token after; neither twice.

        Returns (ids (n,) int32, how many tokens were put before).
        """
        lead = () if tuple(ids[: len(self.bos)]) == self.bos else self.bos
        tail = (self.eos,) if end and self.eos is not None and (not len(ids) or ids[-1] != self.eos) else ()
        return np.concatenate([np.array(lead, np.int32), ids, np.array(tail, np.int32)]), len(lead)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens included."""
        return self.core.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer in `folder`, or None where there is no tokenizer.json. InputError where it cannot be used."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    text = _read(path)
    spec = _parse(text, path)
    config = _optional(folder / "tokenizer_config.json")
    try:
        core = tokenizers.Tokenizer.from_str(text)
        surround = core.encode("", add_special_tokens=True).ids
        # Only the tokens of the text itself are wanted from here on, and offsets that cover all of it:
        # a post-processor adds tokens and may trim the offsets.
        core = tokenizers.Tokenizer.from_str(json.dumps(spec | {"post_processor": None}))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path} is not a tokenizer that can be read: {error}. Download it again.") from None
    core.no_truncation()
    core.no_padding()
    specials = _specials(folder, config)
    eos = _eos(core, folder, specials)
    bos = _bos(core, config, specials, surround, eos)
    state = json.dumps([hashlib.sha256(text.encode()).hexdigest(), specials, bos, eos], sort_keys=True)
    return Tokenizer(core, folder, specials, bos, eos, config, hashlib.sha256(state.encode()).hexdigest())


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
    for name, value in (_optional(folder / "special_tokens_map.json") | config).items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            found[name] = value
    return found


def _eos(core: tokenizers.Tokenizer, folder: Path, specials: dict[str, str]) -> int | None:
    """The id of eos_token; where the tokenizer names none, the model's first eos_token_id."""
    if "eos_token" in specials:
        return core.token_to_id(specials["eos_token"])
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder / name).get("eos_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and core.id_to_token(value) is not None:
            return value
    return core.token_to_id("<|endoftext|>")


def _bos(
    core, config: dict[str, Any], specials: dict[str, str], surround: list[int], eos: int | None
) -> tuple[int, ...]:
    """What goes before a text: add_bos_token where the configuration has it, else what the post-processor does."""
    asked = config.get("add_bos_token")
    if asked is None:
        return tuple(surround[:-1] if surround and surround[-1] == eos else surround)
    bos = core.token_to_id(specials.get("bos_token", ""))
    return (bos,) if asked and bos is not None else ()
