"""`trireme eval FOLDER --data FILE`: the loss of a finished model on each file; perplexity, accuracy or margins."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trireme.engine.data.dataset import Dataset
from trireme.engine.run import screen
from trireme.engine.run.after.opened import Finished, computing, open_finished, read_as_run, with_defaults
from trireme.engine.run.opening import preference_of, row_kind
from trireme.engine.run.options import Eval
from trireme.models.config import InputError
from trireme.models.losses.preferences import Preference


def run(o: Eval) -> None:
    """The command. Results go to standard output, all other lines to standard error."""
    with screen.to(sys.stderr):
        results = list(losses(o))
    for name, result in zip(o.data, results, strict=True):
        figures = {key.removeprefix("rewards/"): f"{value:.4g}" for key, value in result.items()}
        shown = "  ".join(f"{key} {value}" for key, value in figures.items() if key not in ("loss", "labels"))
        screen.say(f"eval     {name}: loss {result['loss']:.4f}  {shown}")


def losses(o: Eval) -> Iterator[dict[str, float]]:
    """Figures of each file: `loss`, perplexity, accuracy, margins and the like, and `labels`, the number of trained
    tokens, documents or pairs. Raises InputError, CheckpointError, DoesNotFit, StoreError.
    """
    if not o.data:
        raise InputError("no data is named. Add --data FILE.")
    f = open_finished(o.folder, o.model)
    return results(f, *prepare(f, o))


def prepare(f: Finished, o: Eval) -> tuple[Eval, list[Dataset], Preference | None]:
    """(the options with those of the run, data with references, what is compared). Raises as `losses`."""
    head = {0: "", 1: "reward"}.get(f.cfg.scores, "classify")
    if o.method != head and (o.method in ("reward", "classify") or (head and o.method != "sft")):
        head_name = f"a score head, of --method {head}" if head else "no score head"
        raise InputError(f"--method {o.method}: {f.name} has {head_name}. Leave it out.")
    o = with_defaults(f, replace(o, method=head or o.method))
    o.check()
    preference, codec = preference_of(o), f.codec(o)
    data = [read_as_run(f, o, codec, name, row_kind(o)) for name in o.data]
    if preference and preference.compares:
        before = _reference(f, o, data)
        screen.say(f"compared with {before.name}")
        with computing(before, o, data[0].options.room) as e:
            data = [replace(d, reference=np.array(e.logps([d]))) for d in data]
    return o, data, preference


def results(f: Finished, o: Eval, data: list[Dataset], preference: Preference | None) -> Iterator[dict[str, float]]:
    """As `losses`, of a model with the tokens and the head of the one for which the data were prepared."""
    with computing(f, o, data[0].options.room) as e:
        for read in data:
            loss, metrics = e.loss(read, preference)
            perplexity = {} if preference or f.cfg.scores else {"perplexity": math.exp(min(loss, 50.0))}
            labels = len(read.pieces) // 2 if preference else sum(map(len, read.labels()))
            yield {"loss": loss, **perplexity, **metrics, "labels": labels}


def _reference(f: Finished, o: Eval, data: list[Dataset]) -> Finished:
    """The model before training: --reference, else what the run began with. Raises InputError."""
    name = o.reference or f.run.adapter or (str(f.base) if f.adapter else f.run.model)
    if not name:
        raise InputError(f"--method {o.method} compares with the model before training. Name it: --reference DIR.")
    before = open_finished(name)
    before.refuse_scores("it is no --reference of preferences")
    for read in data:
        read.check_model(before.cfg.vocab, before.cfg.max_positions, f"--reference {name}")
    return before
