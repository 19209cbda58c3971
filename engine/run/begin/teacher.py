"""--teacher: its output for the data, from given scores, or from scores that a pass before the run computes.

The pass writes the files of `trireme score` into the user's cache, or into OUT/teacher if the cache has no room. A
killed run continues after the parts that are there; scores.json is written last. Later runs with the same teacher and
data use the cache, from which scores that were not used for longest are removed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch

from trireme.engine.amounts import compact, gib, seconds
from trireme.engine.data.codec import Codec, load_codec
from trireme.engine.data.dataset import Dataset
from trireme.engine.data.taught import NAMES, Names, is_scores, read_names, taught_by
from trireme.engine.data.tokens import SHARE
from trireme.engine.memory import DTYPE
from trireme.engine.plan import DoesNotFit
from trireme.engine.run.begin.resume import Snapshot
from trireme.engine.run.finished import evaluate, score
from trireme.engine.run.finished.layers import device_and_dtype
from trireme.engine.run.finished.model import Opened, open_folder, open_model
from trireme.engine.run.finished.options import FORMATS
from trireme.engine.run.job import Job
from trireme.engine.run.output.folder import TEACHER
from trireme.engine.run.screen import Screen
from trireme.kernels.private import cache_folder
from trireme.models import head
from trireme.models.config import InputError
from trireme.models.sizes import shapes
from trireme.storage.files import existing, lock, remove_folders, replace_synced

PART = 1 << 24  # bytes of a part: what a killed pass loses at most
SOURCES = ("train", "val")
WAIT = 1.0  # seconds between looks at a pass of another run


def about_teacher(job: Job, screen: Screen) -> list[str]:
    """Lines for the report. Raises InputError if the teacher cannot teach this model."""
    teacher, teaching = job.options.teacher, job.cfg.teaching
    if not teacher or teaching is None:
        return []
    if is_scores(teacher):
        names = read_names(teacher)
        _check_same(teacher, names.tokenizer, job)
        return [f"teacher  {names.model}, by the scores in {teacher}"]
    codec = load_codec(teacher) or open_folder(teacher, "", screen.warn).codec()
    _check_same(teacher, codec.vocabulary(), job)
    nbytes = _nbytes(job)
    return [f"teacher  {teacher}: scores the data before the first step: {gib(nbytes)}"] * bool(job.read)


def with_teacher(job: Job, snapshot: Snapshot | None, screen: Screen) -> Job:
    """The job with the teacher's rows in its data. Raises InputError, CheckpointError, DoesNotFit, StoreError."""
    teacher = job.options.teacher
    if not teacher or job.cfg.teaching is None:
        return job
    begun = snapshot["teacher"] if snapshot else ""

    def taught(data: Dataset) -> Dataset:
        return replace(data, teacher=taught_by(names, data, job.cfg.vocab))

    with nullcontext(read_names(teacher)) if is_scores(teacher) else _passed(job, teacher, begun, screen) as names:
        data = taught(job.data)
        assert data.teacher is not None
        if begun and data.teacher.key != begun:
            raise InputError(_changed(job))
        held = data.held_out and taught(data.held_out)
    return replace(job, read=replace(data, held_out=held))


def _changed(job: Job) -> str:
    return (
        f"--resume {job.out}: the teacher {job.options.teacher} is not what the run began with, or its files were "
        "touched. Restore it, or start again."
    )


def _check_same(teacher: str, vocabulary: str, job: Job) -> None:
    """Raises InputError if the teacher has other tokens."""
    if job.read is None:
        return
    if job.codec is None:
        raise InputError(f"--teacher {teacher}: the model has no tokenizer to compare with its. Give --tokenizer DIR.")
    if vocabulary != job.codec.vocabulary():
        raise InputError(
            f"--teacher {teacher} has another tokenizer: its tokens or their ids are not those "
            f"of {job.options.tokenizer or job.options.model}, and its log-probabilities are of other tokens. Take one "
            "of the same family."
        )


# ---------------------------------------------------------------- the pass


def _sources(job: Job) -> dict[str, Dataset]:
    held = job.data.held_out
    return dict(zip(SOURCES, [job.data, *([held] if held else [])], strict=False))


def _nbytes(job: Job) -> int:
    """About the bytes of all scores."""
    assert job.cfg.teaching is not None
    labels = sum(data.trained * data.tokens for data in _sources(job).values()) if job.read else 0
    return int(labels * (job.cfg.teaching.nbytes + 4))


@contextmanager
def _passed(job: Job, teacher: str, begun: str, screen: Screen) -> Iterator[Names]:
    """A context with the scores of a checkpoint, made unless they are there. No other run removes them meanwhile."""
    o, teaching = job.options, job.cfg.teaching
    assert teaching is not None
    dtype = o.dtype if o.dtype in FORMATS else None
    asked = argparse.Namespace(
        folder=teacher, model=None, tokenizer=None, chat_template=None, device=o.device, dtype=dtype,
        gpu_memory=o.gpu_memory, ram=o.ram,
    )  # fmt: skip
    opened = open_model(asked, screen)
    codec = opened.codec()
    opened.refuse_head("it has no log-probabilities of tokens. Name another --teacher")
    _check_same(teacher, codec.vocabulary(), job)
    job.data.check_model(opened.cfg.vocab, opened.cfg.max_positions, f"--teacher {teacher}")
    below = min(job.cfg.vocab, opened.cfg.vocab)
    if teaching.k > below:
        raise InputError(f"--top-k {teaching.k}: {teacher} has a vocabulary of {below}. Lower it.")
    device, format = device_and_dtype(asked, opened)
    how = device.type, DTYPE[format], evaluate.rows_of(device, job.seq_len), job.seq_len, teaching.k, below
    keys = [score.key_of(opened, data, *how) for data in _sources(job).values()]
    if begun and keys[0] != begun:
        raise InputError(_changed(job))
    folder = _folder(job, "-".join(keys))
    with _claimed(folder, screen):
        if is_scores(folder):
            screen.say(f"teacher  {teacher}: its scores are kept from an earlier run")
            with suppress(OSError):
                os.utime(folder / NAMES)
        else:
            _make(job, folder, opened, codec, asked, below, screen)
            _make_room(folder)
        yield read_names(folder)


@contextmanager
def _claimed(folder: Path, screen: Screen) -> Iterator[None]:
    """A context with a locked folder, made if it is missing. Waits for another run that has the lock."""
    fd = _locked(folder)
    if fd is None:
        screen.say("teacher  another run computes the same scores: waiting for it")
        while (fd := _locked(folder)) is None:
            time.sleep(WAIT)
    try:
        yield
    finally:
        remove_folders([folder, folder.parent])  # if it failed before the first part
        os.close(fd)


def _locked(folder: Path) -> int | None:
    """Makes and locks a folder; returns its descriptor. None if another process has the lock, or removes the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with suppress(FileNotFoundError):
        if lock(fd) and os.path.samestat(os.fstat(fd), folder.stat()):
            return fd
    os.close(fd)
    return None


def _folder(job: Job, key: str) -> Path:
    """Where scores are or will be: in the cache, if possible, else in OUT. Raises DoesNotFit if no drive has room."""
    own, cache, nbytes = job.out / TEACHER, cache_folder(), _nbytes(job)
    if cache is not None:
        shared = cache / TEACHER / key
        disk = shutil.disk_usage(existing(cache))
        if shared.is_dir() or nbytes <= min(disk.total // SHARE, disk.free // 2):
            with suppress(OSError):  # such as a file in the place of a folder
                shared.mkdir(parents=True, exist_ok=True)
                return shared
    if nbytes > (free := shutil.disk_usage(existing(job.out)).free):
        raise DoesNotFit(
            f"{own}: the teacher's scores take {gib(nbytes)}, {gib(free)} are free. Lower --top-k, or free some space."
        )
    return own / key


def _make(
    job: Job, folder: Path, opened: Opened, codec: Codec, asked: argparse.Namespace, below: int, screen: Screen
) -> None:
    """Runs the pass, or continues it."""
    began, k, sources = time.monotonic(), job.cfg.teaching.k if job.cfg.teaching else 0, _sources(job)
    held = list(sources.values())
    size = f"{compact(shapes.parameters(opened.cfg))} parameters"
    ready = evaluate.load_for_data(asked, opened, job.seq_len, head.TOP_CHUNK, below, screen)
    try:
        for i, data in enumerate(held):
            score.score_source(ready, data, folder / f"{i:03}", k, screen, PART)
    finally:
        ready.layers.close()
    named = score.described(opened.base, k, codec, list(sources.items()))
    replace_synced(folder / NAMES, json.dumps(named, indent=1).encode())
    del ready
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    tokens, took = sum(data.tokens for data in held), seconds(time.monotonic() - began)
    screen.say(f"teacher  {job.options.teacher}, {size}: scored {compact(tokens)} tokens in {took}")


def _make_room(folder: Path) -> None:
    """Removes scores, also parts of killed passes, that were not used for longest, beyond the cache's share of the
    drive.
    """
    with suppress(OSError):  # other runs remove some, too
        room = shutil.disk_usage(folder).total // SHARE
        found = list[tuple[float, int, Path]]()
        for old in folder.parent.iterdir():
            files = [path.stat() for path in old.rglob("*") if path.is_file()]
            used = max((file.st_mtime for file in files), default=0.0)
            found.append((used, sum(file.st_size for file in files), old))
        for _, nbytes, old in sorted(found, reverse=True):
            room -= nbytes
            if room < 0 and old != folder and (fd := _locked(old)) is not None:
                try:
                    (old / NAMES).unlink(missing_ok=True)  # first: without a part of them they are no scores
                    shutil.rmtree(old, ignore_errors=True)
                finally:
                    os.close(fd)
