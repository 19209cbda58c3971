"""What a run notes on disk, in .run and in each snapshot of its store; folder.py reads and writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trireme.engine.plan import Plan
from trireme.models.config import InputError


@dataclass
class RunProgress:
    """How far a run has come. The loop changes it; a snapshot has a copy."""

    step: int = 0
    first: dict[str, float] = field(default_factory=dict)  # figures before training: eval_loss, general_loss and others
    best: float | None = None  # lowest eval_loss of what was trained, and its step
    best_step: int | None = None
    evaluated: int | None = None  # last evaluated step
    worse: int = 0  # evaluations since the lowest
    eval_rows: int | None = None  # rows that an evaluation reads; None: all
    written: int = 0  # bytes to drives
    log: int = 0  # bytes of log.jsonl


@dataclass(frozen=True)
class Fixed:
    """What a resumed run keeps, so that its results are bitwise those of an uninterrupted one."""

    plan: Plan  # placement may change; not what planning.INVARIANT names, nor where updates run
    config: dict[str, Any]  # numbers of the model's config, and what is trained
    tensors: dict[str, list[Any]]  # dtype and shape of every tensor of the source
    data: str  # fingerprints of the data and of what is held out
    date: str | None  # that chat templates take for today
    launches: str = ""  # digest of the settings of kernels, if they are not the usual ones
    base: dict[str, str] = field(default_factory=dict)  # checksums of frozen weights, by unit
    teacher: str = ""  # key of the teacher's scores


@dataclass(frozen=True)
class RunSnapshot:
    """What a snapshot of the store says of its run."""

    progress: RunProgress
    fixed: Fixed
    options: dict[str, Any]  # config_file.saved
    computed_by: str  # GPU and libraries

    @staticmethod
    def of(fields: dict[str, Any], where: str) -> RunSnapshot:
        """The record from the JSON of its `asdict`, whose checksum was compared. Raises InputError if keys differ."""
        try:
            fixed = Fixed(**fields["fixed"] | {"plan": Plan.of(fields["fixed"]["plan"])})
            return RunSnapshot(**fields | {"progress": RunProgress(**fields["progress"]), "fixed": fixed})
        except (TypeError, KeyError) as error:
            raise InputError(f"{where} is of another version of trireme ({error}). Start again.") from None


@dataclass(frozen=True)
class Best:
    """best.json: the checksums of the files next to it."""

    files: dict[str, str]


@dataclass(frozen=True)
class Reference:
    """.run/reference.json: log-probabilities of all documents by the model before training."""

    logps: list[float]


@dataclass(frozen=True)
class State:
    """.run/state.json: the run's id, and how far it has come."""

    id: str
    hosts: int = 1
    started: bool = False  # there was a snapshot that all hosts have
    ended: bool = False  # the output is complete: only .run and the store are left to be removed
    keep_state: bool = False  # ended, and these stay, so that the run can be extended
