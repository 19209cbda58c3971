"""Tokenizers that versions of transformers read differently: Mistral's, and those that transformers 5 rebuilds.

Mistral's pattern of words was wrong in files of transformers 4. transformers 5 replaces it where tokenizer_config.json
has "fix_mistral_regex": true, and else warns. The tokens here are the same; the note comes only where the pattern of
the file differs.

For some values of `tokenizer_class` transformers 5 takes from tokenizer.json no more than the vocabulary: normalizer
and words are then those of the class (its tokenization_*.py, and AutoTokenizer.from_pretrained, of 5.24). Models were
trained with what tokenizer.json says, which is read here and by transformers 4; a note names files where tokens differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from trireme.engine.data import specials

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


# ---------------------------------------------------------------- built anew

_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_QWEN2 = rf"{_CONTRACTED}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN3_5 = rf"{_CONTRACTED}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OWN = {  # model types whose class is not read from tokenizer.json: that class
    **dict.fromkeys(("gpt2", "starcoder2", "jais2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
}
_AS_IT_IS = (  # those that have tokenizer.json as it is, whatever class is named
    *("mistral", "mistral3", "mixtral", "ministral", "ministral3", "phi3", "minimax_m2", "ernie4_5", "ernie4_5_moe"),
    *("granite", "granitemoe", "granitemoehybrid", "olmo2", "olmo3", "olmo_hybrid", "kimi_k25", "iquestcoder"),
    *("glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe"),
)
_FORCED = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")  # those whose own class comes first
_PROBES = (
    *("Hello, the world's 3rd\n\nlines.", "  two  spaces", "in 1234567 or 2.5", "\tx = [1, 2];\n", "I'LL don't ÀÉ"),
    *("A{0}b c{0} d\n{0}\ne", "的日本語 का हिन्दी", "¿qué? e\u0301", "a\u00a0b", "\n\nhello"),
)


def built_anew(
    spec: dict[str, Any], added: Sequence[Any], config: dict[str, Any], model: dict[str, Any]
) -> tuple[str, ...]:
    """A note if transformers 5 tokenizes a text differently, else none. `added`: all added tokens.

    `spec`: tokenizer.json, which the library reads; `config`: tokenizer_config.json; `model`: config.json.
    """
    name, old = class_of(spec, config, model), spec["model"]
    parts = _parts(name, config)
    if not parts:
        return ()
    shown = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    own = {key: spec.get(key) for key in parts}
    alike = _read(shown | own) == _read(shown | parts)
    if alike and old.get("type") == "BPE" and not old.get("ignore_merges"):
        return ()
    vocabulary = old["vocab"] if isinstance(old["vocab"], dict) else {each[0]: i for i, each in enumerate(old["vocab"])}
    new = {"type": "BPE", "vocab": vocabulary, "merges": old.get("merges", [])}
    if name in ("LlamaTokenizer", "GemmaTokenizer"):
        unknown = specials.text(config.get("unk_token")) or "<unk>"
        new |= {"fuse_unk": True, "byte_fallback": True}
        new |= {"unk_token": unknown} if name == "GemmaTokenizer" and unknown in vocabulary else {}
    special = next((token.content for token in added if token.special), "")
    texts = [text.replace("{0}", special) for text in _PROBES]
    ours = _ids(spec, added, texts)
    try:
        theirs = _ids(spec | parts | {"model": new}, added, texts)
    except Exception:  # the library has no narrower one
        what = f"transformers 5 cannot read the tokenizer, as it rebuilds {name}"
    else:
        if ours == theirs:
            return ()
        differ = sum(one != other for one, other in zip(ours, theirs, strict=True))
        what = f"{differ} of {len(texts)} sample texts have other tokens in transformers 5, which rebuilds {name}"
    cure = ': "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json makes it read tokenizer.json'
    return (f"{what}{'' if model.get('model_type') in _FORCED else cure}",)


def class_of(spec: dict[str, Any], config: dict[str, Any], model: dict[str, Any]) -> str:
    """The class that AutoTokenizer of transformers 5 takes, without Fast; "" of code of its own."""
    if "auto_map" in config:
        return ""
    kind, named = model.get("model_type"), config.get("tokenizer_class") or model.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else ""
    if not named:
        return _OWN.get(str(kind), "")
    if kind in _AS_IT_IS:
        return ""
    if (
        named == "LlamaTokenizer"
        and kind not in _FORCED
        and '"ByteLevel"' in json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")])
    ):
        return ""
    return _OWN[kind] if kind in _FORCED else named


def _parts(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Normalizer and pre-tokenizer of a class; {} of one that has tokenizer.json as it is."""
    space = config.get("add_prefix_space")
    spaced = {"type": "ByteLevel", "add_prefix_space": bool(space), "trim_offsets": True, "use_regex": True}
    if name == "GPT2Tokenizer":
        return {"normalizer": None, "pre_tokenizer": spaced}
    if name == "GPTNeoXTokenizer":
        return {"normalizer": {"type": "NFC"}, "pre_tokenizer": spaced}
    if name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer"):
        pattern = {"Regex": _QWEN2 if name == "Qwen2Tokenizer" else _QWEN3_5}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        both = [split, spaced | {"use_regex": False}]
        return {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": both}}
    if name == "GemmaTokenizer":
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        return {"normalizer": replaced, "pre_tokenizer": split}
    if name == "LlamaTokenizer":
        scheme = ("always" if config.get("legacy") else "first") if space in (None, True) else "never"
        words = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        return {"normalizer": None, "pre_tokenizer": words}
    return {}


def _read(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Normalizer and pre-tokenizer with all of their settings."""
    made = json.loads(tokenizers.Tokenizer.from_str(json.dumps(spec)).to_str())
    return made["normalizer"], made["pre_tokenizer"]


def _ids(spec: dict[str, Any], added: Sequence[Any], texts: list[str]) -> list[list[int]]:
    core = tokenizers.Tokenizer.from_str(json.dumps(spec | {"post_processor": None}))
    core.add_tokens(list(added))
    return [each.ids for each in core.encode_batch(texts, add_special_tokens=False)]
