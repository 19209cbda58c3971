"""Checkpoints that get a score head (models/families/scores.py): their config.json, and the files that are written.

The files of a language model are written without its output matrix, and with `score.weight` after the last tensor of
one file; config.json names transformers' class, the labels and the padding token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trireme.engine.tuning.rewritten import entries_of, rewritten
from trireme.models import hf
from trireme.models.config import CLASS, InputError, ModelConfig
from trireme.models.families.scores import class_of
from trireme.models.sizes import shapes
from trireme.storage.checkpoint import Source

LANGUAGE = re.compile(r"(For[A-Z]\w*|LMHeadModel)$")  # ends of transformers' classes


def headed(cfg: ModelConfig, source: Source) -> Source:
    """`source` as it is written: with its score head, and without an output matrix; unchanged if it has only a score
    head.
    """
    name, shape = shapes.output_name(cfg), (cfg.scores, cfg.width)
    names = hf.canonical_names(cfg, source.shapes)
    without = {stored for stored in names if stored.endswith(hf.OUTPUTS)}
    if not cfg.scores or not source.files or (name in source.tensors and not without):
        return source
    entries = {file: [e for e in tensors if e[0] not in without] for file, tensors in entries_of(source).items()}
    if name in source.tensors:
        return rewritten(source, entries, {})
    embedding = next(stored for stored, ours in names.items() if ours == shapes.embedding_name(cfg))
    like = source.tensors[min(without, default=embedding)]
    entries[like.file or source.files[-1]].append((name, like.dtype, shape))

    def values(first: int, last: int) -> Iterator[np.ndarray]:
        from trireme.models.lora import initial  # torch, which nothing else here needs

        yield initial(name, shape, cfg.score_std).flatten()[first:last].numpy()

    return rewritten(source, entries, {name: values})


# ---------------------------------------------------------------- config.json


def names_in(raw: dict[str, Any], labels: int) -> tuple[str, ...]:
    """Names of the labels in config.json; LABEL_0 and so on if it has none."""
    names = raw.get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(labels))


def pad_in(raw: dict[str, Any], tokenizers: int | None) -> int | None:
    """The padding token: of config.json, else of the tokenizer, else the first end token."""
    ends = raw.get("eos_token_id")
    for value in (raw.get("pad_token_id"), tokenizers, ends[0] if isinstance(ends, list) and ends else ends):
        if type(value) is int:
            return value
    return None


def with_config(
    cfg: ModelConfig, source: Source, raw: dict[str, Any], labels: Sequence[str], pad: int | None
) -> Source:
    """`source` with the config.json of a model with a score head."""
    named = raw.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    base_class = LANGUAGE.sub("", first)
    problem = {} if cfg.scores == 1 else {"problem_type": "single_label_classification"}
    entries = {key: value for key, value in raw.items() if key not in ("num_labels", "problem_type")}
    config = entries | problem | {"architectures": [base_class + CLASS if base_class else class_of(cfg.model_type)]}
    config["id2label"] = {str(i): name for i, name in enumerate(labels)}
    config["label2id"] = {name: i for i, name in enumerate(labels)}
    content = json.dumps(config | {"pad_token_id": pad}, indent=2).encode()
    return replace(source, auxiliary=source.auxiliary | {"config.json": content})


def check_problem(raw: dict[str, Any], name: str) -> None:
    """Raises InputError if the model's classes are not such that one is right."""
    problem = raw.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise InputError(f'{name}: "problem_type" is {problem!r}: one class of several is learned, nothing else.')
