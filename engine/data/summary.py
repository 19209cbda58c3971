"""The report on data before the first step: rows, tokens, cuts, an example with its mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from trireme.engine.amounts import compact, count, percent
from trireme.engine.data.codec import Codec
from trireme.engine.data.documents import Fitted
from trireme.engine.data.prepare import DataOptions
from trireme.engine.data.tokens import TokenFile

SHOWN = 2000  # characters, and tokens, of an example
LISTED = 12  # files
WARNING = "warning: "  # begins notes of what is likely wrong
_LEARNED = {  # what is trained and perhaps not meant: count, noun, note
    "early": ("row", "{} with an end token inside the trained text: the model learns to stop there"),
    "thoughtless": ("answer", "{} with an empty thought; try --chat-template-kwargs '{{\"enable_thinking\": false}}'"),
    "spaced": ("prompt", "{} with a space at the end, which the answer's first token takes: move it to the answer"),
}


class FileReport(NamedTuple):
    name: str
    weight: float
    meta: Mapping[str, Any]  # of its TokenFile
    left: bool = True  # any row, after its weight

    def __str__(self) -> str:
        m = self.meta
        forms = "; ".join(f"{name}: {count(rows, 'row')}" for name, rows in m["forms"].items())
        form = f"formats {forms}" if len(m["forms"]) > 1 else f'format "{next(iter(m["forms"]))}"'
        weight = "" if self.weight == 1 else f", weight {self.weight:g}{'' if self.left else ' leaves no row'}"
        bad = f", {m['bad']:,} bad dropped (first: {m['first_bad']})" if m["bad"] else ""
        unused = f"; not used: {', '.join(m['unused'])}" if m["unused"] else ""
        return f"{self.name}: {count(m['rows'], 'row')}, {form}{weight}{bad}{unused}"


def row_lines(rows: np.ndarray, options: DataOptions) -> tuple[str, ...]:
    """Lines on rows, (n > 0, documents of a row) DOCUMENT, before weights and cuts."""
    tokens, learned = int(rows["length"].sum()), int(rows["trained"].sum())
    p50, p99, longest = np.percentile(rows["length"], [50, 99, 100])
    trained = "" if options.scored else f", {compact(learned)} trained ({percent(learned / max(tokens, 1))})"
    line = f"{compact(tokens)} tokens{trained}; length p50 {p50:,.0f}, p99 {p99:,.0f}, max {longest:,.0f}"
    if options.kind != "labels":
        return (line,)
    bad = int((rows["weight"][:, 0] < 0).sum())
    good = len(rows) - bad
    (few, flag), (many, _) = sorted([(bad, "--undesirable-weight"), (good, "--desirable-weight")])
    ratio = many / few if few else 0.0
    advice = f"; {flag} {ratio:.2g} balances them" if ratio > 4 / 3 else "" if few else ": kto needs both"
    return line, f"{good:,} good and {bad:,} bad answers{advice}"


@dataclass(frozen=True)
class Report:
    """Counts, from files to packed sequences."""

    files: tuple[FileReport, ...]
    counts: tuple[str, ...]  # lines on rows
    fitted: Fitted  # without its pieces
    options: DataOptions
    sequences: int
    used: float  # share of the sequences' room
    held_out: str = ""  # what of the rows
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The lines to print."""
        o = self.options
        summed = [file for file in self.files if file.left and not (file.meta["bad"] or file.meta["unused"])][LISTED:]
        lines = [str(file) for file in self.files if file not in summed]
        if summed:
            lines.append(f"{len(summed):,} more files: {count(sum(file.meta['rows'] for file in summed), 'row')}")
        held_out = f"{self.held_out} held out; " if self.held_out else ""
        prefix = "before weights: " if any(file.weight != 1 for file in self.files) else ""
        lines += [held_out + prefix + self.counts[0], *self.counts[1:], *self.losses()]
        packed, single = ("packed into ", "") if o.pack else ("", ", one row each")
        lines.append(
            f"{packed}{count(self.sequences, 'sequence')} of up to {o.room:,} tokens{single}; "
            f"{percent(1 - self.used)} of the positions are empty and are not computed"
        )
        return [*lines, *(note if note.startswith(WARNING) else f"note: {note}" for note in self.notes)]

    def losses(self) -> list[str]:
        """Lines on rows that were cut, split or dropped."""
        f, o, lines = self.fitted, self.options, list[str]()
        if f.longer:
            beyond = "dropped, as what they train lies beyond it"
            cut = f.longer - f.split - f.dropped - f.lost
            counts = {"cut": cut, "split": f.split, "dropped": f.dropped, beyond: f.lost}
            parts = ", ".join(f"{n:,} {word}" for word, n in counts.items() if n)
            share = percent(f.longer / f.rows)
            lines.append(
                f"at --seq-len {o.seq_len}: longer {count(f.longer, 'row')} ({share}): {parts}; --seq-len {f.longest} "
                f"keeps all   (--long cut|drop|{'' if o.paired else 'split|'}error)"
            )
        if f.unlearnable:
            lines.append(f"{count(f.unlearnable, 'row')} dropped: nothing in them is trained")
        if f.alike and o.kind in ("pairs", "rewards"):
            lines.append(f"{count(f.alike, 'pair')} with equal answers, so neither is preferred")
        return lines


def notes_on(
    files: Sequence[TokenFile], codec: Codec | None, renames: Mapping[str, str], options: DataOptions
) -> list[str]:
    """Notes about the files, the tokenizer and the template. `renames`: those of --map."""
    n, notes = Counter[str](), list[str]()
    for file in files:
        n.update(file.meta["counts"])
    weights = np.abs(np.concatenate([file.weights for file in files]))
    for name, value in (("--system", options.system), ("--chat-template-kwargs", options.variables)):
        if value and not all(file.meta["counts"]["chats"] for file in files):
            notes.append(f"{name} is for conversations, and not used in other rows")
    if (weights != 1).any():
        notes.append(f"rows count by their column 'weight', {weights.min():g} to {weights.max():g}")
    if codec and n["unknown"]:
        share = percent(n["unknown"] / sum(int(file.offsets[-1]) for file in files))
        notes.append(f"{share} of the tokens are {codec.facts.unknown}: the tokenizer has none for this text")
    if codec is None or options.scored:  # a score head says nothing, so what teaches a model to stop does not matter
        return notes
    facts, forms = codec.facts, {form: None for file in files for form in file.meta["forms"]}
    joined = next((form for form in forms if form.startswith("prompt,")), "") if n["spaced"] or not n["chats"] else ""
    if n["chats"] and facts.template:
        notes += facts.tool_notes if n["tools"] == n["chats"] else facts.template_notes
    elif facts.eos is None and {*forms} - {"input_ids"}:
        notes.append("the tokenizer has no end token, so where a text ends is not learned")
    if facts.template and joined:
        theirs = {ours: name for name, ours in renames.items()}
        names = {"instruction": "prompt"} | ({"output": "completion"} if "completion" in joined else {})
        mapping = ",".join(f"{ours}={theirs.get(name, name)}" for ours, name in names.items())
        notes.append(f"{WARNING}prompt and answer are joined without the chat template; with it: --map {mapping}")
    if n["unwritten"]:
        share = percent(n["unwritten"] / max(1, n["said"]))
        lost = f"the chat template leaves out {share} of what the assistant says, which is not trained: to train it too"
        notes.append(f"{lost}, --chat-template FILE that writes it (reasoning is message.reasoning_content)")
    return notes + [note.format(count(n[name], noun)) for name, (noun, note) in _LEARNED.items() if n[name]]


def example_text(ids: np.ndarray, learned: np.ndarray, codec: Codec | None, marks: str = "[]") -> str:
    """The beginning of a document as text, with `marks` around trained tokens and ⏎ for line ends. ids (n,), learned
    (n,) bool.
    """
    runs = [(trained, len([*run])) for trained, run in groupby(learned[:SHOWN].tolist())]
    stops = np.cumsum([n for _, n in runs]).tolist()
    words = [" ".join(map(str, part)) + " " for part in np.split(ids[:SHOWN], stops[:-1])]
    parts = words if codec is None else codec.parts(ids[:SHOWN], stops)  # one part if the codec fails
    marked = (
        f"{marks[0]}{part}{marks[1]}" if trained else part for part, (trained, _) in zip(parts, runs, strict=False)
    )
    text = "".join(marked).replace("\n", "⏎")
    return text if max(len(ids), len(text)) <= SHOWN else f"{text[:SHOWN]} … of {count(len(ids), 'token')}"
