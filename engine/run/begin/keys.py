"""Keys of a configuration file while they are read: what is left, given, ignored and refused."""

from __future__ import annotations

import re
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trireme.engine.run.config.option_names import field_of

MOST = 200  # keys within keys, and values shown of a list


class Item(NamedTuple):
    """A key as it is written, as options are, and its value."""

    key: str
    name: str
    value: Any

    @property
    def text(self) -> str:
        return text_of_value(self.value)


@dataclass
class Read:
    """What was read of a file."""

    left: list[Item]  # not looked at yet
    typed: Container[str] = ()  # options that win
    given: list[tuple[str, str, Any]] = field(default_factory=list)  # (key, field, value)
    ignored: list[str] = field(default_factory=list)  # keys
    said: list[str] = field(default_factory=list)  # lines
    wrong: list[str] = field(default_factory=list)  # a sentence for each key

    def take(self, *names: str) -> Item | None:
        """The key of one of these names, the last if there are several."""
        found = self.take_all("|".join(map(re.escape, names)) or "(?!)")
        if len(found) > 1:
            self.wrong.append(f"{found[-1].key} and {found[0].key} say the same. Leave one out")
        return found[-1] if found else None

    def take_all(self, names: str) -> list[Item]:
        """Keys whose whole name matches a regular expression."""
        found = [item for item in self.left if re.fullmatch(names, item.name)]
        self.left = [item for item in self.left if not re.fullmatch(names, item.name)]
        return found

    def value(self, name: str) -> Any:
        """Of a key that stays; None without it."""
        return next((item.value for item in self.left if name in (item.name, field_of(item.name))), None)

    def give(self, item: Item, name: str, value: Any) -> None:
        self.given.append((item.key, name, value))


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def text_of_value(value: Any) -> str:
    """Of a list its plain values."""
    if isinstance(value, list):
        return ",".join("…" if isinstance(v, (list, dict, set)) else text_of_value(v) for v in value[:MOST])
    if isinstance(value, (dict, set)):
        return "{…}"
    try:
        return str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:
        return "…"  # a number of thousands of digits


def number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_file(name: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(name).exists()
    return False
