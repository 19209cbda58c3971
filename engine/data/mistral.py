"""How Mistral's tokenizers split a text into words, by a pattern that was wrong in files of transformers 4.

transformers 5 replaces it where tokenizer_config.json has "fix_mistral_regex": true, and else warns. The tokens here
are the same; the note comes only where the pattern of the file differs.
"""

from __future__ import annotations

import re
from typing import Any

_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_LARGE = 100_000  # tokens; smaller vocabularies are of SentencePiece, and not affected
_LETTERS, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERN = (
    rf"{_LETTERS}{_UPPER}*{_LOWER}+|{_LETTERS}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_OLDER = re.compile(r"v?([0-4]\b|5(\.0)*[.-]?(dev|a|b|rc))")  # than 5.0.0
NOTE = (
    "the tokenizer splits words by a pattern that Mistral has corrected since; "
    'with "fix_mistral_regex": true in tokenizer_config.json it is read corrected, here and by transformers'
)


def corrected(
    spec: dict[str, Any], vocabulary: int, config: dict[str, Any], model: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(tokenizer.json as it is read, notes). `config`: tokenizer_config.json; `model`: the config.json next to it."""
    before = spec.get("pre_tokenizer")
    if vocabulary <= _LARGE or not isinstance(before, dict) or not _affected(model):
        return spec, ()
    parts = before.get("pretokenizers") if before.get("type") == "Sequence" else None
    if isinstance(parts, list) and parts:
        right = before | {"pretokenizers": [_SPLIT, *parts[1:]]}
    else:
        right = {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTES if before.get("type") == "Metaspace" else before]}
    if config.get("fix_mistral_regex"):
        return spec | {"pre_tokenizer": right}, ()
    return spec, () if right == before else (NOTE,)


def _affected(model: dict[str, Any]) -> bool:
    """As transformers decides: without a version, or with an older one, and of Mistral's types, or of none."""
    version, kind = model.get("transformers_version"), model.get("model_type")
    older = not version or (isinstance(version, str) and bool(_OLDER.match(version)))
    return bool(model) and older and (kind is None or kind in _TYPES)
