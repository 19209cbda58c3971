"""The plan: every decision of a run as frozen data. Imports no torch."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from trireme.models.config import InputError, ModelConfig
from trireme.models.layers import hash_once
from trireme.storage.untrusted import read_text

Tier = Literal["gpu", "ram", "ssd"]
SavedTier = Literal["gpu", "peer", "ram", "ssd"]  # peer: another GPU's memory
Saved = tuple[tuple[str, SavedTier], ...]  # as UnitPlan.saved
Mode = Literal["forward", "backward"]
TIERS: tuple[Tier, ...] = get_args(Tier)
SAVED: tuple[SavedTier, ...] = get_args(SavedTier)
MODES: tuple[Mode, ...] = get_args(Mode)
CHOICES = {"dtype": ("BF16", "F32"), "adam_bits": (32, 16, 8), "between": ("gpu", "ram"), "mode": MODES}
CHOICES |= {"gradients": ("ram", "ssd")}
UNIT_CHOICES = {"update": ("cpu", "gpu")} | dict.fromkeys(("weights", "state", "base", "x"), TIERS)
MOST = 1 << 48
MOST_GPUS = 64
MOST_HOSTS = 1024
SUM_PIECE = 1 << 24
COUNTS: tuple[str, ...] = ("tokens", "n_micro", "record", "piece", "slices")
COUNTS += ("window", "ram_window", "state_slots", "stream_slots", "swap_slots")


class DoesNotFit(Exception):
    """A plan needs more than the limits. The message has the numbers and says what to change. Exit code 3.

    `need`: bytes of the smallest plan, "gpu" and "ram", if known.
    """

    def __init__(self, message: str, need: dict[str, int] | None = None):
        super().__init__(message)
        self.need = need or {}


@dataclass(frozen=True)
class Limits:
    """Bytes that a plan may use, of each GPU and of RAM. On the CPU both are in RAM."""

    gpu: int
    ram: int
    gpus: int = 1
    all_free: bool = False  # `gpu` is all that a GPU has free: no option raises it
    free_ram: bool = False  # `ram` is what RAM has free: no option raises it
    less: tuple[int, ...] = ()  # bytes that each GPU has less than `gpu`, where their memory is unequal

    @property
    def total(self) -> int:
        """Bytes of all GPUs and of RAM."""
        return self.gpus * self.gpu - sum(self.less) + self.ram

    def gpu_bytes(self, gpu: int) -> int:
        """Bytes of one GPU."""
        return self.gpu - (self.less[gpu] if self.less else 0)

    def missing(self, need: Mapping[str, int]) -> dict[str, int]:
        """Bytes missing for `need`, by tier, without tiers that have enough."""
        lacks = {"gpu": need["gpu"] - self.gpu, "ram": need["ram"] - self.ram}
        return {tier: nbytes for tier, nbytes in lacks.items() if nbytes > 0}


@dataclass(frozen=True)
class UnitPlan:
    """Where one unit's weights, state and activations are stored, and where it is updated.

    With `state` "gpu" its weights are on the GPU and it is updated there.
    """

    weights: Tier = "gpu"  # where trained weights in the compute dtype are stored
    state: Tier = "gpu"  # where optimizer state is stored: moments, and low halves of fp32 masters
    update: Literal["cpu", "gpu"] = "cpu"  # where state in RAM is updated; "gpu" streams it through the GPU
    x: Tier = "gpu"  # where the unit's input is stored until backward
    saved: tuple[tuple[str, SavedTier], ...] = ()  # (name, tier) of saved tensors; others are recomputed
    base: Tier = "gpu"  # where frozen weights are stored
    gpu: int = 0  # the GPU that computes with it
    peer: int = 0  # the GPU that holds tensors saved in tier "peer"

    __hash__ = hash_once  # a search compares the units of hundreds of plans

    @property
    def lent(self) -> bool:
        """Whether some of its saved tensors are in another GPU's memory."""
        return any(tier == "peer" for _, tier in self.saved)

    def names(self, tier: SavedTier) -> tuple[str, ...]:
        """Names of the tensors saved in a tier."""
        return tuple(name for name, t in self.saved if t == tier)


@dataclass(frozen=True)
class Plan:
    """All decisions of a run. A step may have fewer tokens and micro-batches than the plan."""

    units: tuple[UnitPlan, ...]  # embedding, blocks or sub-layers, head
    tokens: int  # most tokens of a micro-batch
    n_micro: int  # most micro-batches of a step
    dtype: str = "BF16"  # or F32
    mode: Mode = "forward"  # when updates run (optimizer.py); docs/dev/how-it-works.md says what `backward` gains
    adam_bits: int = 32  # of each moment: 32, 16 or 8
    late_moments: tuple[Tier, ...] = ()  # tiers whose moments are updated in backward; gpu: of streamed updates
    window: int = 2  # GPU buffers for weights: one in use, the others prefetched
    ram_window: int = 2  # RAM buffers for weights on the SSD, and for gradients that pass through RAM
    state_slots: int = 4  # RAM buffers for records on the SSD
    record: int = 1 << 24  # parameters of an optimizer record
    stream_slots: int = 3  # GPU buffers for streamed records
    piece: int = 1 << 40  # most elements of a gradient that are copied from the GPU at once
    swap_slots: int = 2  # buffers of each pool of swapped activations
    between: Literal["gpu", "ram"] = "gpu"  # tier of x and dx until the next unit; gpu: peer copies to another GPU
    gradients: Literal["ram", "ssd"] = "ram"  # where gradients of units with state on the SSD wait for their update
    halves: bool = False  # units are sub-layers: attention, MLP
    at_once: int = 0  # packed experts that a matmul decodes at a time; 0: all of a layer, once in a pass
    slices: int = 1  # number of slices in which a layer's frozen experts are copied to the GPU
    accumulate: bool = False  # each micro-batch has its forward and backward before the next one's: on one GPU
    hosts: int = 1  # hosts, each with some of a step's micro-batches; n_micro is then of each host
    host: int = 0  # this host

    __hash__ = hash_once  # a search looks its plans up by hash

    def __post_init__(self) -> None:
        for name in (*COUNTS, "at_once"):
            value, low = getattr(self, name), name != "at_once"
            if type(value) is not int or not low <= value <= MOST:
                raise InputError(f"plan: {name} is {value!r}, expected a whole number from {low:d} to {MOST:,}")
        allowed = CHOICES if self.mode == "forward" else CHOICES | {"gradients": ("ram",)}
        _check_words("plan", self, allowed, [(tier, TIERS) for tier in self.late_moments])
        for u, unit in self.distinct.items():
            _check_words(f"plan: unit {u}", unit, UNIT_CHOICES, [(tier, SAVED) for _, tier in unit.saved])
            if len({name for name, _ in unit.saved}) < len(unit.saved):
                raise InputError(f"plan: unit {u} saves a tensor twice: {', '.join(name for name, _ in unit.saved)}")
            if (unit.weights == "gpu") != (unit.state == "gpu"):
                raise InputError(
                    f"plan: unit {u} has weights on {unit.weights} and state on {unit.state}; gpu is for both"
                )
            if unit.update == "gpu" and (unit.weights, unit.state, self.mode) != ("ram", "ram", "forward"):
                raise InputError(
                    f"plan: unit {u} is updated on the gpu, which needs mode forward, weights, state in ram"
                )
        if self.late_moments and (self.mode, self.adam_bits) != ("forward", 32):
            raise InputError("plan: late_moments needs mode forward and adam_bits 32")
        if self.slices > 1 and not (self.halves and self.between == "gpu" and self.gpus == 1):
            raise InputError("plan: slices of experts are of sub-layers, and what passes between them is on one gpu")
        if any(not 0 <= unit.gpu < MOST_GPUS for unit in self.distinct.values()):
            raise InputError(f"plan: units are on GPUs 0 to {MOST_GPUS - 1}")
        lent = [(u, unit) for u, unit in self.distinct.items() if unit.lent]
        if wrong := [u for u, unit in lent if unit.peer == unit.gpu or not 0 <= unit.peer < MOST_GPUS]:
            raise InputError(f"plan: unit {wrong[0]} saves in a peer, which is another GPU than its own")
        inner = self.units[1:-1]
        if self.halves and any(a.gpu != b.gpu for a, b in zip(inner[::2], inner[1::2], strict=True)):
            raise InputError("plan: both halves of a block are on one GPU")
        if self.accumulate and (self.gpus > 1 or self.hosts > 1):
            raise InputError("plan: accumulate is for one GPU of one host")
        self._check_hosts()

    def _check_hosts(self) -> None:
        if not (0 <= self.host < self.hosts <= MOST_HOSTS):
            raise InputError(f"plan: host {self.host} of {self.hosts}; there are at most {MOST_HOSTS}")
        if self.hosts == 1:
            return
        if self.slices > 1:  # hosts compare checksums of units
            raise InputError("plan: with several hosts experts come with their layer: slices is 1")
        if self.mode != "forward" or self.gradients != "ram":
            raise InputError("plan: with several hosts the mode is forward, and gradients wait in ram")
        for unit in self.distinct.values():
            if unit.state == "gpu" or unit.update == "gpu":
                raise InputError("plan: with several hosts state is in ram or ssd, and the cpu updates it")

    @property
    def last_host(self) -> bool:
        """Whether this host completes the sums of gradients."""
        return self.host == self.hosts - 1

    @property
    def sum_piece(self) -> int:
        """Most elements of a gradient sum that are sent to the next host at once."""
        return min(self.piece, SUM_PIECE)

    @property
    def pass_size(self) -> int:
        """Most micro-batches that a pass over the layers computes; activations of as many are stored at once."""
        return 1 if self.accumulate else self.n_micro

    @cached_property
    def resident(self) -> bool:
        """Whether all weights and optimizer state are on a GPU."""
        return all(unit.state == unit.base == "gpu" for unit in self.distinct.values())

    @property
    def sums_wide(self) -> bool:
        """Whether gradients are summed in fp32: if there are several micro-batches."""
        return self.n_micro > 1 or self.hosts > 1

    @cached_property
    def gpus(self) -> int:
        """The number of GPUs, those that only hold saved tensors of others included."""
        return 1 + max((max(unit.gpu, unit.peer * unit.lent) for unit in self.distinct.values()), default=0)

    def on_gpus(self, gpus: int, tied: bool, peers: bool = False, shares: Sequence[float] = ()) -> Plan:
        """This plan on `gpus` GPUs: blocks are assigned round robin, the head follows, and a tied embedding is on its
        GPU.

        `shares`: each GPU's number of blocks is in proportion, evenly spread, and the first of the largest has the
        head. `peers`: GPUs have access to each other's memory, so outputs of layers are copied between them; else they
        go through RAM. A plan that is on as many GPUs already is returned as it is.
        """
        in_ram = self.between == "ram" and not any(unit.lent for unit in self.distinct.values())
        if gpus == self.gpus and (gpus == 1 or peers or in_ram):
            return self
        head, halves = len(self.units) - 1, 2 if self.halves else 1
        blocks = (head - 1) // halves
        turns = spread_evenly(blocks, shares) if shares else [block % gpus for block in range(blocks)]
        last = shares.index(max(shares)) if shares else blocks % gpus

        def assign(u: int, unit: UnitPlan) -> UnitPlan:
            gpu = last if u == head or (u == 0 and tied) else turns[(u - 1) // halves] if u else 0
            return replace(unit, gpu=gpu, peer=0, saved=tuple((n, "ram" if t == "peer" else t) for n, t in unit.saved))

        units = tuple(assign(u, unit) for u, unit in enumerate(self.units))
        return replace(self, units=units, between="ram" if gpus > 1 and not peers else self.between)

    def cut(self, cfg: ModelConfig) -> ModelConfig:
        """`cfg` with the units of this plan: blocks or sub-layers, slices of experts."""
        return replace(cfg, halves=self.halves, at_once=self.at_once, slices=self.slices)

    def changed(self, chosen: Container[int], **change: Any) -> Plan:
        """This plan with the fields `change` in the units `chosen`."""
        replaced = {unit: replace(unit, **change) for unit in self.distinct.values()}
        return replace(self, units=tuple(replaced[unit] if u in chosen else unit for u, unit in enumerate(self.units)))

    def saving(self, saved: Mapping[int, Saved]) -> Plan:
        """This plan with other saved tensors in some units, by index."""
        cache = dict[tuple[UnitPlan, Saved], UnitPlan]()
        units = list(self.units)
        for u, names in saved.items():
            key = units[u], names
            units[u] = cache.get(key) or cache.setdefault(key, replace(units[u], saved=names))
        return replace(self, units=tuple(units))

    @cached_property
    def distinct(self) -> dict[int, UnitPlan]:
        """The different plans of units, each by the last index where it stands."""
        objects = {id(unit): u for u, unit in enumerate(self.units)}  # first, since most equal units are one object
        last = dict[UnitPlan, int]()
        for u in objects.values():
            last[self.units[u]] = max(u, last.get(self.units[u], 0))
        return {u: unit for unit, u in last.items()}

    @cached_property
    def uses_ssd(self) -> bool:
        """Whether the plan stores anything there."""
        placed = lambda unit: "ssd" in (unit.weights, unit.state, unit.base, unit.x) or unit.names("ssd")
        return any(map(placed, self.distinct.values()))

    @property
    def stored_on_ssd(self) -> bool:
        """Whether steps write weights or state to the store."""
        return any("ssd" in (unit.weights, unit.state) for unit in self.distinct.values())

    @property
    def runs_on_cuda(self) -> bool:
        """Whether there are CUDA kernels for its updates: not for 16- or 8-bit moments on a GPU."""
        return self.adam_bits == 32 or not any("gpu" in (unit.state, unit.update) for unit in self.distinct.values())

    def spilled(self, u: int) -> bool:
        """Whether unit u's gradient waits for its update on the SSD."""
        return self.gradients == "ssd" and self.units[u].state == "ssd"

    @staticmethod
    def of(data: dict[str, Any]) -> Plan:
        """The plan from the data of `asdict`. Raises InputError for anything else."""
        try:
            units = [UnitPlan(**{**u, "saved": tuple(tuple(s) for s in u.get("saved", ()))}) for u in data["units"]]
            plan = {**data, "units": tuple(units), "late_moments": tuple(data.get("late_moments", ()))}
            for values, cls in ((plan, Plan), *((vars(unit), UnitPlan) for unit in units)):
                _check_types(values, cls)
            return Plan(**plan)
        except InputError:
            raise
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise InputError(f"not a plan: {'lacks ' * isinstance(error, KeyError)}{error}") from error

    @staticmethod
    def load(path: Path) -> Plan:
        """The plan from a JSON or YAML file. Raises InputError for other content."""
        import yaml

        try:
            return Plan.of(yaml.safe_load(read_text(path)))
        except OSError as error:
            raise InputError(f"--plan {path}: {error.strerror or error}.") from error
        except (yaml.YAMLError, TypeError, LookupError, AttributeError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: not a plan: {error}") from error


def spread_evenly(n: int, shares: Sequence[float]) -> list[int]:
    """Assigns n items: each goes to the index of `shares` that is furthest behind its share."""
    had, indices = [0] * len(shares), list[int]()
    for i in range(1, n + 1):
        indices.append(max(range(len(shares)), key=lambda k: shares[k] / sum(shares) * i - had[k]))
        had[indices[-1]] += 1
    return indices


def _check_words(
    label: str,
    plan: Plan | UnitPlan,
    allowed: Mapping[str, Sequence[object]],
    tiers: Sequence[tuple[str, Sequence[str]]],
) -> None:
    """Raises InputError for a field that is none of the words allowed, or a tier that is none of its tiers."""
    for name, words in allowed.items():
        if getattr(plan, name) not in words:
            raise InputError(f"{label}: {name} is {getattr(plan, name)!r}, expected {' or '.join(map(str, words))}")
    for tier, choices in tiers:
        if tier not in choices:
            raise InputError(f"{label}: {tier!r} is no tier, expected {' or '.join(choices)}")


_TYPES = {"int": int, "bool": bool}


def _check_types(values: dict[str, Any], cls: type) -> None:
    """Raises InputError for fields of a wrong type. The value is not shown: YAML aliases can make it endless."""
    words = [*values.get("late_moments", ()), *(word for pair in values.get("saved", ()) for word in pair)]
    for f in fields(cls):
        expected = None if str(f.type).startswith("tuple") else _TYPES.get(str(f.type), str)
        if expected and f.name in values and type(values[f.name]) is not expected:
            raise InputError(f"plan: {f.name} is of type {type(values[f.name]).__name__}, expected {expected.__name__}")
    if not all(isinstance(word, str) for word in words):
        raise InputError("plan: saved and late_moments hold something that is not a name")
