"""A row of the check: what was checked, the result, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WIDTHS = 10, 34  # of the first columns


@dataclass(frozen=True)
class Row:
    part: str
    what: str
    result: str
    change: str = ""  # what to do; "": nothing
    numbers: dict[str, float | int | str | bool] = field(default_factory=dict)  # for the report

    def line(self) -> str:
        mark, what = "!" if self.change else " ", f"{self.what} "
        return f"{mark} {self.part:{WIDTHS[0]}}{what:{WIDTHS[1]}}{self.result}"


def changes(rows: Iterable[Row]) -> list[str]:
    """What to change, each advice once."""
    advice = [f"{row.what}: {row.change}" for row in rows if row.change]
    return list(dict.fromkeys(advice)) or ["nothing"]
