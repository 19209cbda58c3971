"""`trireme eval FOLDER --data FILE`: the loss of a finished model on each file; perplexity, accuracy or margins."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from trireme.engine.amounts import count
from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.run import screen
from trireme.engine.run.after.opened import Finished, computing, open_finished, read_rows, rows_of, with_defaults
from trireme.engine.run.opening import KINDS, check_method, preference_of
from trireme.engine.run.options import Eval
from trireme.models.config import InputError
from trireme.models.losses.preferences import Preference


class Found(NamedTuple):
    """The result on a file."""

    name: str
    loss: float
    figures: dict[str, float]  # perplexity, accuracy, margin and the like
    labels: int  # trained tokens, documents or pairs

    def __str__(self) -> str:
        figures = "  ".join(f"{name.rpartition('/')[2]} {value:.4g}" for name, value in self.figures.items())
        return f"{self.name}: loss {self.loss:.4f}  {figures}"


def run(o: Eval) -> int:
    """The command. Results go to standard output, all other lines to standard error."""
    with screen.to(sys.stderr):
        results = list(losses(o))
    for result in results:
        screen.say(f"eval     {result}")
    if len(results) > 1 and all("perplexity" in result.figures for result in results):
        n = sum(result.labels for result in results)
        loss = sum(result.loss * result.labels for result in results) / n
        screen.say(f"eval     all {len(results)} files: loss {loss:.4f}  perplexity {math.exp(min(loss, 50.0)):.4g}")
    return 0


def losses(o: Eval) -> Iterator[Found]:
    """The result on each file. Raises InputError, CheckpointError, DoesNotFit, StoreError."""
    if not o.data:
        raise InputError("no data is named. Add --data FILE.")
    f = open_finished(o.folder, o.model)
    o = with_defaults(f, o)
    if "method" not in o.given and not f.cfg.scores and f.run.method in ("reward", "classify"):
        o = replace(o, method="sft")
    check_method(o)
    if f.cfg.scores and preference_of(o) and o.method != "reward":
        raise InputError(f"--method {o.method}: {o.folder} has a score head. Leave --method out.")
    of = Preference("reward") if f.kind == "rewards" else preference_of(o)
    if o.reference and not (of and of.compares):
        raise InputError("--reference is for --method dpo, ipo and kto. Leave it out.")
    codec, kind = f.codec(o), f.kind or ("" if of is None else KINDS.get(o.method, "pairs"))
    data = [read_rows(f, o, codec, name, kind) for name in o.data]
    seq_len = data[0].options.room
    rows = rows_of(o, seq_len)
    if of and of.compares:
        before = _reference(f, o, data)
        screen.say(f"compared with {before.name}")
        with computing(before, o, rows, seq_len) as e:
            data = [replace(d, reference=e.logps([d], np.zeros(0), lambda _: None, lambda: False)) for d in data]
    with computing(f, o, rows, seq_len) as e:
        for name, rows_read in zip(o.data, data, strict=True):
            loss, figures = e.loss(rows_read, of)
            texts = {} if of or f.cfg.scores else {"perplexity": math.exp(min(loss, 50.0))}
            yield Found(name, loss, texts | figures, int(rows_read.trained))


def _reference(f: Finished, o: Eval, data: list[Dataset]) -> Finished:
    """The model before training: --reference, else what the run began with. Raises InputError."""
    began = o.reference or f.run.adapter or (str(f.base) if f.adapter else f.run.model)
    if not began:
        raise InputError(f"--method {o.method} compares with the model before training. Name it: --reference DIR.")
    before = open_finished(began)
    before.refuse_scores("it is no --reference of preferences")
    if before.cfg.vocab < f.cfg.vocab or before.cfg.max_positions < data[0].options.seq_len:
        few = f"{count(before.cfg.vocab, 'token')} and {before.cfg.max_positions:,} positions"
        raise InputError(f"--reference {began} has {few}, too few for this data. Name what the model was trained from.")
    theirs = load_codec(before.base, "plain")
    if o.reference and theirs:
        _check_tokens(began, data, theirs)
    return before


def _check_tokens(reference: str, data: list[Dataset], theirs: Codec) -> None:
    """Raises InputError if an id in the data is another token to the reference. That it would cut up a text in another
    way does not matter, nor a reserved token that has got a name in one of them.
    """
    ours, other = data[0].codec.tokens() if data[0].codec else {}, theirs.tokens()
    names, others = ({i: token for token, i in ids.items()} for ids in (ours, other))
    used = {int(i) for rows in data for mb in rows.batches(1) for i in np.unique(mb.ids)}
    for i in sorted(used & names.keys() & others.keys()):
        if names[i] != others[i] and (names[i] in other or others[i] in ours):
            what = f"token {i} is {others[i]!r} there, and {names[i]!r} in the data"
            raise InputError(f"--reference {reference}: {what}. Name what the model was trained from.")
