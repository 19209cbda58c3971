"""How the next token is chosen: the likeliest, or sampled as in transformers; by options or generation_config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trireme.engine.run.options import Sample
from trireme.models.config import InputError, read_raw
from trireme.storage.untrusted import parse_json, read_small, shown, why

FILE = "generation_config.json"
COLDEST = 1e-6  # a lower temperature would not be finite, and draws the likeliest token all the same
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # transformers' defaults
# Keys that often have a value, choose tokens in another way and are not used; 0 and 1 have no effect.
UNUSED = ("repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p", "num_beams", "suppress_tokens")


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
        parts = [f"temperature {self.temperature:g}", f"top-k {self.top_k}" if self.top_k else ""]
        parts += [f"top-p {self.top_p:g}" if self.top_p < 1 else "", f"seed {self.seed}"]
        return ", ".join(filter(None, parts))


def sampling_of(o: Sample, base: Path, end: int | None) -> Sampling:
    """By the options, else the files of the model in `base`. `end`: the tokenizer's end token. Raises InputError."""
    path = base / FILE
    try:
        generation = parse_json(read_small(path, links=True), "file") if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {why(error)}.") from None
    config = read_raw(base)
    values = [c.get("eos_token_id") for c in (generation, config, config.get("text_config")) if isinstance(c, dict)]
    stops: Any = next((value for value in values if value is not None), [])
    stops = [*(stops if isinstance(stops, list) else [stops]), *([] if end is None else [end])]
    if not all(type(token) is int for token in stops):
        raise InputError(f"{base}: eos_token_id is {shown(repr(stops), 60)}, expected numbers.")
    chosen: dict[str, Any] = dict(GREEDY)
    if generation.get("do_sample"):
        theirs = Sample.of({key: generation.get(key) for key in SAMPLED}, f"{path}: ")
        chosen = SAMPLED | {key: getattr(theirs, key) for key in theirs.chosen}
    chosen |= {key: value for key in GREEDY if (value := getattr(o, key)) is not None}
    if not chosen["temperature"] and (o.top_k, o.top_p) != (None, None):
        raise InputError("--top-k and --top-p are for sampling. Add --temperature 1, for instance.")
    unused = [f"{key} {shown(repr(v), 60)}" for key in UNUSED if (v := generation.get(key)) not in (None, 0, 1, [], {})]
    return Sampling(**chosen, seed=o.seed, ends=frozenset(stops), unused=(*unused,))


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
