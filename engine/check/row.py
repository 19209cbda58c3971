"""A row of the check: what was checked, the result, and what to change."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "numpy")
WIDTHS = 10, 34  # of the first columns


@dataclass(frozen=True)
class Row:
    part: str
    name: str
    result: str
    change: str = ""  # what to do; "": nothing
    numbers: dict[str, float | str | bool] = field(default_factory=dict)  # that others compute with

    def line(self) -> str:
        mark, name = "!" if self.change else " ", f"{self.name} "
        return f"{mark} {self.part:{WIDTHS[0]}}{name:{WIDTHS[1]}}{self.result}"


def changes(rows: Iterable[Row]) -> list[str]:
    """What to change, each advice once."""
    advice = [f"{row.name}: {row.change}" for row in rows if row.change]
    return list(dict.fromkeys(advice)) or ["nothing"]


def for_issue(rows: Sequence[Row]) -> list[str]:
    """A block to paste into an issue, of a GPU that was never measured: versions, GPU, of each kernel the call that
    takes longest, steps, and what to change. Of other GPUs nothing.
    """
    if all(row.numbers.get("measured", True) for row in rows):
        return []
    by_time = sorted(rows, key=lambda row: float(row.numbers.get("seconds", 0)))
    longest = {row.name.split()[0]: row for row in by_time if row.part == "kernels"}
    block = [row for row in rows if row.part != "kernels" or row.change or row in longest.values()]
    request = "this GPU was never measured: please paste what follows into an issue of the project (docs/machines.md)"
    return [f"{'issue':{2 + WIDTHS[0]}}{request}", "```", *(row.line() for row in block), "```"]


def versions() -> Row:
    """Of this program, Python, the system's kernel, and packages that are used. Imports none of them."""
    software = {"trireme": "from a clone, not installed", "python": platform.python_version()}
    software |= {"system": platform.release()} | dict.fromkeys(PACKAGES, "missing")
    for name in ("trireme", *PACKAGES):
        with suppress(PackageNotFoundError):
            software[name] = version(name)
    result = ", ".join(f"{name} {text}" for name, text in software.items())
    return Row("software", "versions", result)
