"""How the next token is chosen: the likeliest, or sampled as in transformers; by options or generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.engine.run.options import Sample
from trireme.models.config import InputError
from trireme.storage.untrusted import parse_json, read_small, shown, why

FILE = "generation_config.json"
COLDEST = 1e-6  # what is below draws the likeliest token all the same, but would not be finite
READ = ("do_sample", "temperature", "top_k", "top_p", "eos_token_id")
# Keys that say nothing about how text is made, or have values that change nothing.
INERT = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "max_length", "use_cache",
         "max_new_tokens", "chat_format")  # fmt: skip
PLAIN: dict[str, Any] = dict(num_beams=1, num_return_sequences=1, repetition_penalty=1.0, length_penalty=1.0,
                             no_repeat_ngram_size=0, min_p=0.0, typical_p=1.0, min_length=0)  # fmt: skip


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
        parts = [f"temperature {self.temperature:g}", *([f"top-k {self.top_k}"] if self.top_k else [])]
        return ", ".join([*parts, *([f"top-p {self.top_p:g}"] if self.top_p < 1 else []), f"seed {self.seed}"])


def sampling_of(o: Sample, base: Path, end: int | None) -> Sampling:
    """By the options, else the files of the model in `base`. `end`: the tokenizer's end token. Raises InputError."""
    files = {name: _json(base / name) for name in (FILE, "config.json") if (base / name).is_file()}
    generation, config = files.get(FILE, {}), files.get("config.json", {})
    inner = config.get("text_config")
    ends = [source.get("eos_token_id") for source in (generation, config, inner) if isinstance(source, dict)]
    first: Any = next((value for value in ends if value is not None), [])
    ids = [*(first if isinstance(first, list) else [first]), *([] if end is None else [end])]
    if not all(type(token) is int for token in ids):
        raise InputError(f"{base}: eos_token_id is {shown(repr(first), 60)}, expected numbers.")
    draws = bool(generation.get("do_sample"))

    def value(name: str, low: float, high: float, default: float, plain: float) -> float:
        """The option, else the file's number, else transformers' default where it samples, else `plain`."""
        if (own := getattr(o, name)) is not None:
            return own
        number = generation.get(name, default) if draws else plain
        number = default if number is None else number
        if type(number) not in (int, float) or not low <= number <= high:
            raise InputError(f"{base / FILE}: {name} is {shown(repr(number), 60)}, expected {low:g} to {high:g}.")
        return number

    temperature = value("temperature", 0, 100, 1.0, 0.0)
    for name in ("top_p", "top_k"):
        if getattr(o, name) is not None and not temperature:
            raise InputError(f"--{name.replace('_', '-')} is for sampling. Add --temperature 1, for instance.")
    unused = [
        f"{shown(key)} {shown(repr(each), 60)}"
        for key, each in generation.items()
        if each not in (None, False, [], {}, PLAIN.get(key)) and key not in (*READ, *INERT) and key[:1] != "_"
    ]
    top_k, top_p = int(value("top_k", 0, 1 << 31, 50, 0)), value("top_p", 0, 1, 1.0, 1.0)
    return Sampling(temperature, top_k, top_p, o.seed, frozenset(ids), tuple(unused))


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return parse_json(read_small(path, links=True), "file")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {why(error)}.") from None


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
        least = torch.topk(scores, sampling.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = scores.sort(-1)
        out = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        out[..., -1] = False
        scores = scores.masked_fill(out.scatter(-1, order, out), float("-inf"))
    return scores.softmax(-1)
