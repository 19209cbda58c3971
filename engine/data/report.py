"""The report on data before the first step: rows, tokens, cuts, an example with its mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trireme.engine.amounts import compact, count, percent
from trireme.engine.data.cache import TokenFile
from trireme.engine.data.codec import Codec
from trireme.engine.data.documents import Fitted
from trireme.engine.data.prepare import DataOptions

SHOWN = 2000  # characters, and tokens, of an example
LISTED = 12  # files
WARNING = "warning: "  # begins notes of what is likely wrong
KEEP = "to train it too, --chat-template FILE that writes it (as message.reasoning_content)"
AS_CHAT = {  # formats of joined texts: columns by which they are read as question and answer
    "prompt,completion": (("instruction", "prompt"), ("output", "completion")),
    "prompt,completion,label": (("instruction", "prompt"), ("output", "completion")),
    "prompt,chosen,rejected": (("instruction", "prompt"),),
}
DROPPED = 20  # characters a token; beyond, a tokenizer drops text


@dataclass(frozen=True)
class FileReport:
    name: str
    rows: int  # good and bad
    bad: int
    first_bad: str
    format: str
    weight: float
    unused: tuple[str, ...] = ()  # keys

    def __str__(self) -> str:
        same = " (the same rows in every epoch)" if self.weight % 1 else ""
        weight = "" if self.weight == 1 else f", weight {self.weight:g}{same}"
        bad = f", {self.bad:,} bad dropped (first: {self.first_bad})" if self.bad else ""
        unused = f"; not used: {', '.join(self.unused)}" if self.unused else ""
        return f"{self.name}: {count(self.rows, 'row')}, {self._format()}{weight}{bad}{unused}"

    def _format(self) -> str:
        return f"in several formats ({self.format})" if self.mixed else f'format "{self.format}"'

    @property
    def mixed(self) -> bool:
        return ": " in self.format


class Counts(NamedTuple):
    """Counts of rows, before weights and cuts."""

    rows: int
    tokens: int
    trained: int
    p50: float  # of tokens a row
    p99: float
    longest: int

    @classmethod
    def of(cls, rows: np.ndarray) -> Counts:
        """Counts rows, (n,) DOCUMENT, n > 0."""
        p50, p99 = np.percentile(rows["length"], [50, 99]).tolist()
        tokens, trained = int(rows["length"].sum()), int(rows["trained"].sum())
        return cls(len(rows), tokens, trained, p50, p99, int(rows["length"].max()))


@dataclass(frozen=True)
class Report:
    """Counts, from files to packed sequences."""

    files: tuple[FileReport, ...]
    counts: Counts
    fitted: Fitted  # without its pieces
    options: DataOptions
    sequences: int
    used: float  # share of the sequences' room
    held_out: str = ""  # what of the rows
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The lines to print."""
        c = self.counts
        held = f"{self.held_out} held out; " if self.held_out else ""
        lines = self._files()
        trained = f", {compact(c.trained)} trained ({percent(c.trained / max(c.tokens, 1))})"
        lines.append(
            f"{held}{compact(c.tokens)} tokens{'' if self.options.scored else trained}; "
            f"length p50 {c.p50:,.0f}, p99 {c.p99:,.0f}, max {c.longest:,}"
        )
        if not self.fitted.longer:
            lines.append(f"at --seq-len {self.options.seq_len}: no row is longer")
        lines += self.losses()
        packed, single = ("packed into ", "") if self.options.pack else ("", ", one row each")
        lines.append(
            f"{packed}{count(self.sequences, 'sequence')} of up to {self.options.seq_len:,} tokens{single}; "
            f"{percent(1 - self.used)} of the positions are empty and are not computed"
        )
        return [*lines, *(note if note.startswith(WARNING) else f"note: {note}" for note in self.notes)]

    def _files(self) -> list[str]:
        """One line for each file; of many similar ones, lines for the first."""
        alike = [file for file in self.files if not (file.bad or file.unused)][LISTED:]
        lines = [str(file) for file in self.files if file not in alike]
        more = f"{len(alike):,} more files: {count(sum(file.rows for file in alike), 'row')}"
        return [*lines, more] if alike else lines

    def losses(self) -> list[str]:
        """Lines on rows that were cut, split or dropped."""
        lines = [self._long_rows()] if self.fitted.longer else []
        if self.fitted.unlearnable:
            lines.append(f"{count(self.fitted.unlearnable, 'row')} dropped: nothing to learn in what is kept")
        if self.fitted.alike and self.options.kind in ("pairs", "rewards"):
            have = "has" if self.fitted.alike == 1 else "have"
            lines.append(f"{count(self.fitted.alike, 'pair')} {have} two equal answers, so neither is preferred")
        return lines

    def _long_rows(self) -> str:
        f = self.fitted
        verb = "row is" if f.longer == 1 else "rows are"
        done = [f"{n:,} {word}" for n, word in ((f.cut, "cut"), (f.split, "split"), (f.dropped, "dropped")) if n]
        share = percent(f.longer / self.counts.rows)
        return (
            f"at --seq-len {self.options.seq_len}: {f.longer:,} {verb} longer ({share}): {', '.join(done)}   "
            "(--long cut|drop|split|error)"
        )


def notes_on(files: Sequence[TokenFile], codec: Codec | None, renames: Mapping[str, str], scored: bool) -> list[str]:
    """Notes about the files, the tokenizer and the template. `renames`: those of --map.

    `scored`: the model has a score head and says nothing, so what teaches it to stop does not matter.
    """
    if codec is None:
        return []
    facts, total = codec.facts, lambda name: sum(file.meta[name] for file in files)
    talks = facts.template and total("chats")
    notes = [*facts.notes, *(facts.template_notes if talks and not scored else ())]
    if (lost := total("unwritten")) and not scored:
        share = percent(lost / total("said"))
        notes.append(f"the chat template leaves out {share} of what the assistant says, which is not trained: {KEEP}")
    if (early := total("early")) and not scored:
        ends = "an end token inside the trained text: the model learns to stop there"
        notes.append(f"{count(early, 'row')} with {ends}")
    if unknown := total("unknown"):
        share = percent(unknown / sum(int(file.offsets[-1]) for file in files))
        notes.append(f"{share} of the tokens are {facts.unknown}: the tokenizer has none for this text")
    characters, tokens = total("characters"), sum(int(file.offsets[-1]) for file in files)
    if characters > DROPPED * tokens:
        made = f"{compact(characters)} characters become {count(tokens, 'token')}"
        notes.append(f"{made}: the tokenizer drops what it does not know. Is it the one for this text?")
    parts = [part for file in files if not file.meta["chats"] for part in file.meta["format"].split("; ")]
    joined = [form for part in parts if (form := part.partition(": ")[0]) in AS_CHAT]
    if facts.template and joined:
        theirs = {ours: name for name, ours in renames.items()}
        as_chat = [f"{o}={theirs.get(t, t)}" for o, t in AS_CHAT[joined[0]]]
        answer = "answers" if "chosen" in joined[0] else "completion"
        notes.append(
            f"{WARNING}prompt and {answer} are joined as they are, without the chat template; "
            f"as question and answer, with it: --map {','.join(as_chat)}"
        )
    texts = [file for file in files if not (facts.template and file.meta["chats"])]
    if facts.eos is None and not scored and any(file.meta["format"] != "input_ids" for file in texts):
        notes.append("the tokenizer has no end token, so where a text ends is not learned")
    return notes


def example_text(ids: np.ndarray, learned: np.ndarray, codec: Codec | None) -> str:
    """The beginning of a document as text, with [..] around trained tokens and ⏎ for line ends. ids (n,), learned (n,)
    bool.
    """
    tokens = len(ids)
    ids, runs = ids[:SHOWN], _runs(learned[:SHOWN])
    if codec is None:
        parts = [" ".join(map(str, ids[start:stop])) + " " for start, stop in runs]
    else:
        parts = codec.parts(ids, [stop for _, stop in runs])
    marked = (f"[{part}]" if learned[start] else part for part, (start, _) in zip(parts, runs, strict=False))
    text = "".join(marked).replace("\n", "⏎")  # one part if the codec fails
    return text if max(tokens, len(text)) <= SHOWN else f"{text[:SHOWN]} … of {count(tokens, 'token')}"


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Ranges [start, stop) of equal flags."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8))) + 1
    bounds = [0, *edges.tolist(), len(flags)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))
