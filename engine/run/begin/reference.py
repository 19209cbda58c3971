"""Log-probabilities of the data by the reference, which is the model before training: one forward pass.

They are stored in OUT/reference/logps.safetensors: tensors `train` and `val`, (documents,) float64, the sum over each
document's trained tokens, in the order of the packed data. The metadata has `key`, which names weights and data,
`done`, the number of documents that are known, and `sum`, the checksum of both and of the numbers. A killed run
continues after the documents that are known. The user's cache also stores them by that key. With several hosts each
computes its share, and host 0 stores all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from trireme.engine.amounts import count, seconds
from trireme.engine.build import Engine, dealt, in_ram, placed, shares
from trireme.engine.data.dataset import Dataset
from trireme.engine.hosts.group import Alone
from trireme.engine.planner.host import computed_by
from trireme.engine.run.begin.resume import run_folder
from trireme.engine.run.job import Job
from trireme.engine.run.output.folder import REFERENCE
from trireme.engine.run.screen import Screen
from trireme.engine.step import evaluate
from trireme.kernels.private import cache_folder
from trireme.models.config import InputError
from trireme.models.losses.preferences import Documents
from trireme.models.rows import rope_tables
from trireme.storage.files import replace_synced
from trireme.storage.untrusted import checksum

NAME = "logps.safetensors"
KEPT_EVERY = 20.0  # seconds between writes of what is known so far
CACHED = 50  # runs whose numbers are in the cache, for later ones


@dataclass
class Known:
    """The log-probabilities that are known so far, those of the training data first."""

    key: str
    values: np.ndarray  # (documents,) float64
    done: int = 0

    def sum(self) -> str:
        return checksum([f"{self.key} {self.done} ".encode(), self.values.view(np.uint8).data])

    def encoded(self, train: int) -> bytes:
        """The content of the file. `train`: documents of the training data."""
        tensors = {"train": self.values[:train], "val": self.values[train:]}
        said = {"format": "trireme reference 1", "key": self.key, "done": str(self.done), "sum": self.sum()}
        return save(tensors, said)


def with_reference(
    job: Job,
    e: Engine,
    screen: Screen,
    sums: Mapping[str, str],
    resumed: bool,
    stopped: Callable[[], bool],
    group: Alone,
) -> Job:
    """The job with the reference's numbers in its data: read, or computed by `e`, which has the model before training.

    `sums`: checksums of all weights; empty for a resumed run, which needs those that it began with. If `stopped()`,
    what is known is stored, and this returns early. Raises InputError, StoreError, LostHost.
    """
    data, held = job.data, job.data.held_out
    parts, path = [data, *([held] if held else [])], run_folder(job.out, group.host) / REFERENCE / NAME
    key, total = group.texts(_key(job, sums))[0], sum(len(part.pieces) for part in parts)
    found = _of_host_0(_read(path, total) if not group.host else None, total, group)
    if resumed:
        if found is None or found.done < total or found.key.partition("-")[2] != _data_key(job):
            raise InputError(
                f"{path} is lost or was changed: the run compares with the log-probabilities before training. "
                "Restore it from a copy, or start again."
            )
    else:
        cached = _cached_file(key) if not group.host else None
        others = [found, _of_host_0(_read(cached, total) if cached else None, total, group)]
        same = [each for each in others if each and each.key == key]
        found = max(same, key=lambda each: each.done, default=Known(key, np.zeros(total)))
        if found.done == total:
            screen.say(f"compared {_many(job, total)}: the reference's log-probabilities are kept from an earlier run")
        else:
            _compute(job, e, screen, found, parts, stopped, group)
        if not group.host and found.done:
            _keep(path, found, len(data.pieces))
        if cached and found.done:
            _keep_in_cache(cached, found, len(data.pieces))
    train, val = found.values[: len(data.pieces)], found.values[len(data.pieces) :]
    return replace(job, read=replace(data, reference=train, held_out=held and replace(held, reference=val)))


def _compute(
    job: Job,
    e: Engine,
    screen: Screen,
    known: Known,
    parts: list[Dataset],
    stopped: Callable[[], bool],
    group: Alone,
) -> None:
    """Computes what is not known yet."""
    places = [(rope_tables(job.cfg, job.seq_len, device), device) for device in e.queues.devices]
    began = kept = time.monotonic()
    documents = 0
    batches = chain.from_iterable(part.batches(job.micro_rows) for part in parts)
    tokens = sum(part.tokens for part in parts)
    with screen.working("the reference", tokens, "tokens") as more:
        while (some := list(islice(batches, job.n_micro))) and not group.any(stopped()):
            many = sum(len(mb.lengths) for mb in some)
            if documents >= known.done:
                step = [in_ram(job.cfg, mb) for mb in some]
                losses = evaluate(e, [placed(mb, places) for mb in dealt(step, group.host, group.hosts)])
                every = [[mb.of_docs for mb in share if mb.of_docs] for share in shares(step, group.hosts)]
                known.values[documents : documents + many] = in_order(every, losses, group, many)
                known.done = documents + many
            documents += many
            more(sum(len(mb.ids) for mb in some))
            if not group.host and time.monotonic() - kept > KEPT_EVERY:
                _keep(job.out / REFERENCE / NAME, known, len(parts[0].pieces))
                kept = time.monotonic()
    if known.done == len(known.values):
        took = seconds(time.monotonic() - began)
        screen.say(f"compared {_many(job, known.done)}: the reference took {took}")


def in_order(docs: Sequence[Sequence[Documents]], losses: Sequence[Tensor], group: Alone, many: int) -> list[float]:
    """The log-probabilities of `many` documents, from those of all hosts. docs: of each host's micro-batches; losses:
    of this host's, (N,).

    Raises LostHost.
    """
    own = [logps for each, of in zip(docs[group.host], losses, strict=False) for logps in each.sums(of.cpu().numpy())]
    found = group.numbers(own, many)
    assert len(found) == many, "hosts disagree on the documents of a step"
    return found


def _of_host_0(own: Known | None, total: int, group: Alone) -> Known | None:
    """What host 0 knows. Raises LostHost, InputError."""
    if group.hosts == 1:
        return own
    said = group.texts(own.encoded(0).hex() if own else "")[0]
    return _parsed(bytes.fromhex(said), total) if said else None


def _many(job: Job, documents: int) -> str:
    return count(documents // 2, "answer" if job.data.options.kind == "labels" else "pair")


def _key(job: Job, sums: Mapping[str, str]) -> str:
    """The key of the weights, the data, and all that decides roundings."""
    said: dict[str, Any] = {"weights": dict(sorted(sums.items())), "dtype": job.plan.dtype, "fp8": job.cfg.fp8}
    said |= {"rows": job.micro_rows, "together": job.n_micro, "by": computed_by(job.device)}
    said |= {"launches": job.launches} if job.launches else {}
    said["model"] = job.pinned.model["config"]
    return f"{hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]}-{_data_key(job)}"


def _data_key(job: Job) -> str:
    held = job.data.held_out
    return job.data.fingerprint + (f"-{held.fingerprint}" if held else "")


def _read(path: Path, total: int) -> Known | None:
    """The stored numbers; None if there are none, or of another number of documents."""
    try:
        return _parsed(path.read_bytes(), total)
    except OSError:
        return None


def _parsed(content: bytes, total: int) -> Known | None:
    try:
        length = int.from_bytes(content[:8], "little")
        said = json.loads(content[8 : 8 + length])["__metadata__"]
        tensors = load(content)
        values = np.concatenate([tensors["train"], tensors["val"]])
        known = Known(str(said["key"]), values, int(said["done"]))
    except (ValueError, KeyError, TypeError, SafetensorError, RecursionError):
        return None
    sound = values.dtype == np.float64 and values.shape == (total,) and np.isfinite(values).all()
    sound = sound and said.get("sum", known.sum()) == known.sum()  # older ones have none
    return known if sound and 0 <= known.done <= total else None


def _keep(path: Path, known: Known, train: int) -> None:
    path.parent.mkdir(exist_ok=True)
    replace_synced(path, known.encoded(train))


def _cached_file(key: str) -> Path | None:
    folder = cache_folder()
    return folder / "reference" / f"{key}.safetensors" if folder else None


def _keep_in_cache(path: Path, known: Known, train: int) -> None:
    """Stores the numbers in the cache, if it can be written, and removes the oldest from it."""
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True, parents=True)
        replace_synced(path, known.encoded(train))
        others = sorted(path.parent.glob("*.safetensors"), key=lambda each: each.stat().st_mtime)
        for old in others[:-CACHED]:
            old.unlink(missing_ok=True)
