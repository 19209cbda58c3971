"""Amounts as text, parsed and printed: bytes, counts, shares, durations. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

MOST = 1e12  # no option means more

# ---------------------------------------------------------------- parsers: ValueError on other text


def number(low: float, high: float = MOST, kind: Callable[[str], float] = float) -> Callable[[str], Any]:
    """Returns a parser of numbers of type `kind` from `low` to `high`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            noun = "a whole number" if kind is int else "a number"
            bounds = f"from {low:g} to {high:g}" if high < MOST or value > high else f"of at least {low:g}"
            raise ValueError(f"{text!r} is not {noun} {bounds}")
        return value

    return parse


natural = number(1, kind=int)


def positive(text: str) -> float:
    """Parses a number above 0."""
    value = number(0)(text)
    if value == 0:
        raise ValueError("it must be greater than 0")
    return value


def size(text: str) -> int:
    """Parses a number of bytes: `24GiB`, `2TB`, `512MiB`. A number without a unit is refused."""
    match = re.fullmatch(r"(\d+\.?\d*) ?([KMGT]?)(i?)B", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write it like 24GiB, 2TB or 512MiB")
    nbytes = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    if nbytes >= 1 << 60:
        raise ValueError(f"{text!r} is more than any machine has")
    if nbytes < 1:
        raise ValueError("it must be greater than 0")
    return int(nbytes)


# ---------------------------------------------------------------- printed


def gib(nbytes: float, digits: int = 2) -> str:
    """Bytes in binary units: `1.50 GiB`, `12.00 MiB`."""
    for unit, nbytes_of in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= nbytes_of:
            return f"{nbytes / nbytes_of:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def rounded_up(nbytes: float) -> str:
    """As `gib`, rounded up: never less than `nbytes`."""
    unit, name = (1 << 30, "GiB") if nbytes >= 1 << 28 else (1 << 20, "MiB")
    return f"{math.ceil(100 * nbytes / unit) / 100:.2f} {name}"


def whole_gib(nbytes: float) -> str:
    """Rounded up to whole GiB, as an option takes it: `24GiB`."""
    return f"{math.ceil(nbytes / (1 << 30))}GiB"


def gb(nbytes: float) -> str:
    """Bytes in decimal units, as drives are sold: `3.2 GB`."""
    n, units = nbytes / 1000, ["kB", "MB", "GB", "TB", "PB"]
    while n >= 999.5 and len(units) > 1:
        n /= 1000
        del units[0]
    return f"{n:.3g} {units[0]}" if n < 999.5 else f"{n:,.0f} {units[0]}"


def count(n: int, noun: str) -> str:
    """A number with its noun: `1 row`, `1,100 rows`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def compact(n: float) -> str:
    """Three figures with a unit: `243`, `11.7k`, `13B`."""
    units = ["", "k", "M", "B"]
    while n >= 999.5 and len(units) > 1:
        n /= 1000
        del units[0]
    return f"{n:.0f}{units[0]}" if n >= 99.95 or not units[0] else f"{n:.3g}{units[0]}"


def seconds(s: float) -> str:
    """Three figures: `0.599 s`, `41.2 s`; from 1000 s on as `duration`."""
    return f"{s:.3g} s" if s < 999.5 else duration(s)


def percent(share: float) -> str:
    """`0.04 %`, `0.4 %`, `4.2 %`, `42 %`."""
    value = 100 * share
    return f"{round(value, 0 if value >= 9.95 else 1 if value >= 0.095 else 2):g} %"


def duration(s: float) -> str:
    """`41s`, `3m20s`, `30h34m`."""
    s = round(s)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s // 3600}h{s % 3600 // 60:02d}m"
