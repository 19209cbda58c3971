"""Special tokens of a checkpoint's tokenizer: those that its configuration adds to tokenizer.json.

They are added as transformers 5 adds them, so that a text has the tokens that servers of the model use.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tokenizers

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def named(config: dict[str, Any], older: dict[str, Any]) -> dict[str, Any]:
    """Every `*_token`, as text or object. `older`: special_tokens_map.json; it wins if `config`, tokenizer_config.json,
    lists no added tokens, and is not read otherwise.
    """
    given = config if "added_tokens_decoder" in config else config | older
    extra = given.get("extra_special_tokens")
    more = extra if isinstance(extra, dict) else {}
    return {name: value for name, value in given.items() if name.endswith("_token")} | more


def added(
    config: dict[str, Any], older: dict[str, Any], older_ids: dict[str, Any], spec: dict[str, Any]
) -> list[tokenizers.AddedToken]:
    """Tokens to add, in order; of the same text the last one counts. `older_ids`: added_tokens.json; `spec`:
    tokenizer.json.
    """
    names, extra = named(config, older), _extra(config, older)
    padding = spec.get("padding")
    if isinstance(padding, dict):
        names = {"pad_token": padding.get("pad_token")} | names
    ordered = [names.get(name) for name in (*NAMES, *(n for n in names if n not in NAMES))]
    own = {text(value) for value in ordered}
    by_id: dict[int, tokenizers.AddedToken] = {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids = [i for i, value in decoder.items() if i.isdecimal() and len(i) < 12 and text(value)]
        by_id = {int(i): _token(decoder[i]) for i in ids}
    else:
        special = own | {text(value) for value in extra}
        for content, i in older_ids.items():
            if type(i) is int and content:
                by_id[i] = tokenizers.AddedToken(content, normalized=content not in special, special=content in special)
        by_id |= {token["id"]: _token(token) for token in listed(spec) if type(token.get("id")) is int and text(token)}
    found = [token for _, token in sorted(by_id.items())]
    known = {token.content for token in found} | {text(token) for token in listed(spec)}
    values = [*ordered, *extra]
    for i, value in enumerate(values):
        if (content := text(value)) and content not in known and value not in values[:i]:
            found.append(_token(value, special=True))
            found[-1].special |= content in own
    return found


def listed(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of tokenizer.json."""
    given = spec.get("added_tokens")
    return [token for token in given if isinstance(token, dict)] if isinstance(given, list) else []


def _extra(config: dict[str, Any], older: dict[str, Any]) -> list[Any]:
    """Further special tokens, under either name; of the older file only those of the newer name, if it has both."""
    older = {} if "added_tokens_decoder" in config else older
    found = [
        given.get(name) for given in (config, older) for name in ("extra_special_tokens", "additional_special_tokens")
    ]
    new, additional, more, last = (value if isinstance(value, list) else None for value in found)
    ours = new or additional if additional is not None else new
    if more is not None:
        return [*(ours or []), *more]
    return ours if ours is not None else last or []


def text(value: Any) -> str:
    """The characters of a token; "" if `value` is not one that the library takes."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or any("\ud800" <= c <= "\udfff" for c in content):
        return ""
    return content


def _token(value: Any, special: bool = False) -> tokenizers.AddedToken:
    flags = {name: value[name] for name in _FLAGS if type(value.get(name)) is bool} if isinstance(value, dict) else {}
    return tokenizers.AddedToken(text(value), **(flags or {"special": special}))


_LOOKS = r"<\|[\w.-]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>"  # like a special token, whatever the tokenizer has


def cut_up(pieces: Sequence[str], names: Sequence[str], looks: bool = True) -> list[tuple[str, int, int]]:
    """(special token, first, stop) of special tokens that are written with several tokens, whose texts are `pieces`.

    Those in `names` and, with `looks`, all that look like one.
    """
    starts = [0, *accumulate(map(len, pieces))]
    known = [*sorted((re.escape(name) for name in names if name), key=len, reverse=True), *([_LOOKS] if looks else [])]
    found = []
    for match in re.finditer("|".join(known), "".join(pieces)) if known else ():
        first, stop = bisect_right(starts, match.start()) - 1, bisect_left(starts, match.end())
        if stop - first > 1:
            found.append((match[0], first, stop))
    return found
