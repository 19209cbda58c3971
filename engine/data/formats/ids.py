"""Rows of token ids, with the masks that other trainers write."""

from __future__ import annotations

import re

from trireme.engine.data.files.rows import BadRow, Fields
from trireme.engine.data.formats.examples import Ids, filled_list

LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "loss_masks")  # 1: trained
_OTHER_MASKS = ("special_tokens_mask",)
_MAY_MASK = re.compile("loss|weight|train|learn", re.IGNORECASE)
SAYS_MORE = ("labels", *LOSS_MASKS, "attention_mask", "position_ids", "seq_lengths")


def read_ids(row: Fields) -> Ids:
    """`input_ids` without the padding that attention_mask leaves out. A token is trained if labels and all masks say
    so.
    """
    ids = _integers(row, "input_ids")
    for key, value in row.items():
        masks = key.endswith(("mask", "masks")) or (isinstance(value, list) and _MAY_MASK.search(key))
        if masks and key not in (*SAYS_MORE, *_OTHER_MASKS) and value not in (None, [], ""):
            raise BadRow(f"{key!r} is not a known mask. Is 1 trained? --map loss_mask={key}, else unused={key}")
    trained = [True] * len(ids)
    for key in LOSS_MASKS:
        if row.get(key) is not None:
            trained = [a and b for a, b in zip(trained, _mask(row, key, len(ids)), strict=True)]
    start, stop = _attended(row, len(ids))
    _check_one_document(row, start, stop, len(ids))
    if row.get("labels") is not None:
        labels = _integers(row, "labels")
        _check_length(labels, "labels", len(ids))
        for i in range(start, stop):
            if labels[i] not in (ids[i], -100):
                what = f"expected -100 or input_ids[{i}] = {ids[i]} (labels are not shifted)"
                raise BadRow(f"labels[{i}] is {labels[i]}, {what}")
        trained = [a and label != -100 for a, label in zip(trained, labels, strict=True)]
    all_of_them = all(trained) and stop - start == len(ids)
    return Ids(ids) if all_of_them else Ids(ids[start:stop], trained[start:stop])


def _integers(row: Fields, key: str) -> list[int]:
    values = filled_list(row, key, "token ids")
    if not all(type(value) is int for value in values):
        raise BadRow(f"{key!r} holds something that is not a whole number")
    return values


def _check_length(values: list[int], key: str, n: int) -> None:
    if len(values) != n:
        raise BadRow(f"{key!r} has {len(values)} entries, 'input_ids' {n}")


def _mask(row: Fields, key: str, n: int) -> list[bool]:
    values = filled_list(row, key, "0 and 1")
    _check_length(values, key, n)
    if any(type(value) not in (int, bool) or value not in (0, 1) for value in values):
        raise BadRow(f"{key!r} holds something that is neither 0 nor 1")
    return [bool(value) for value in values]


def _attended(row: Fields, n: int) -> tuple[int, int]:
    """[start, stop) of the tokens that attention_mask keeps. Padding is at the ends."""
    if row.get("attention_mask") is None:
        return 0, n
    mask = _mask(row, "attention_mask", n)
    if not any(mask):
        raise BadRow("'attention_mask' leaves out every token")
    start, stop = mask.index(True), n - mask[::-1].index(True)
    if not all(mask[start:stop]):
        raise BadRow("'attention_mask' leaves out tokens between others; only pads at the ends can be left out")
    return start, stop


def _check_one_document(row: Fields, start: int, stop: int, n: int) -> None:
    """Raises BadRow if positions or lengths show several documents in a row."""
    several = "the row holds several documents. Give each a row of its own; they are packed here"
    if row.get("position_ids") is not None:
        places = _integers(row, "position_ids")
        _check_length(places, "position_ids", n)
        for i in range(start + 1, stop):
            if places[i] != places[i - 1] + 1:
                raise BadRow(f"position_ids[{i}] is {places[i]} after {places[i - 1]}: {several}")
    if row.get("seq_lengths") is not None and len(_integers(row, "seq_lengths")) > 1:
        raise BadRow(f"'seq_lengths' has {len(row['seq_lengths'])} entries: {several}")
