"""How the next token is chosen: greedily, or sampled as in transformers; by generation_config.json or options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trireme.models.config import InputError
from trireme.storage.untrusted import shown

COLDEST = 1e-6  # what is below draws the most likely token all the same, but would not be finite
READ = ("do_sample", "temperature", "top_k", "top_p", "eos_token_id", "max_new_tokens")
# What says nothing about how text is made, or what it would be made with by default.
INERT = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "max_length", "use_cache")
DEFAULTS: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "min_length": 0,
    "chat_format": "chatml",
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 42
    max_new: int = 512

    def __str__(self) -> str:
        if not self.temperature:
            return "the most likely token each time"
        parts = [f"temperature {self.temperature:g}", *([f"top-k {self.top_k}"] if self.top_k else [])]
        return ", ".join([*parts, *([f"top-p {self.top_p:g}"] if self.top_p < 1 else []), f"seed {self.seed}"])


def sampling_of(config: Mapping[str, Any], seed: int) -> tuple[Sampling, list[str]]:
    """The settings of generation_config.json, and its keys that are not used. Raises InputError."""
    found = Sampling(seed=seed)
    number = lambda key, low, high: _number(config, key, low, high)
    if config.get("do_sample"):
        found = replace(
            found,
            temperature=1.0 if number("temperature", 0, 100) is None else float(config["temperature"]),
            top_k=50 if (most := number("top_k", 0, 1 << 31)) is None else int(most),
            top_p=1.0 if number("top_p", 0, 1) is None else float(config["top_p"]),
        )
    if most := number("max_new_tokens", 1, 1 << 31):
        found = replace(found, max_new=int(most))
    unused = [
        f"{shown(key)} {shown(repr(value), 60)}"
        for key, value in config.items()
        if value not in (None, False, [], {}, DEFAULTS.get(key))
        and not key.startswith("_")
        and key not in (*READ, *INERT)
    ]
    return found, unused


def _number(config: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = config.get(key)
    if value is None or (type(value) in (int, float) and low <= value <= high):
        return value
    raise InputError(f"generation_config.json: {key} is {shown(repr(value), 60)}, expected {low:g} to {high:g}.")


def ends_of(config: Mapping[str, Any]) -> frozenset[int]:
    """The tokens that end a text. Raises InputError."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        where = "eos_token_id of generation_config.json, or of config.json,"
        raise InputError(f"{where} is {shown(repr(value), 60)}, expected numbers.")
    return frozenset(ids)


class Picker:
    """Chooses the next token of each prompt. Equal seeds give equal tokens; each prompt has its own random numbers."""

    def __init__(self, sampling: Sampling, prompts: int, first: int):
        """`first`: the number of the first prompt."""
        self.sampling = sampling
        self._dice = [torch.Generator().manual_seed(sampling.seed + first + i) for i in range(prompts)]

    def __call__(self, logits: Tensor) -> list[int]:
        """The next tokens, from logits (B, V) in fp32."""
        if not self.sampling.temperature:
            return logits.argmax(-1).tolist()
        found = probabilities(self.sampling, logits).cpu()
        return [int(torch.multinomial(p, 1, generator=dice)) for p, dice in zip(found, self._dice, strict=True)]


def probabilities(sampling: Sampling, logits: Tensor) -> Tensor:
    """Probabilities (B, V) in fp32: with the temperature, then restricted to the top_k largest, then to the fewest
    whose sum is top_p.
    """
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


def continued(prompt: Sequence[int], new: Sequence[int], ends: frozenset[int]) -> tuple[list[int], int, bool]:
    """(prompt and text without its end token, number of the prompt's tokens, whether it ended)."""
    ended = bool(new) and new[-1] in ends
    return [*prompt, *(new[:-1] if ended else new)], len(prompt), ended
