"""Typed look-ups in a decoded config.json. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


class InputError(ValueError):
    """The user's input is wrong: one line with what, where and what to do. Exit code 2."""


class Keys:
    """Typed look-ups in config.json; `source` names it in errors.

    An absent key takes the default. Null is an error unless `null` says what it stands for. All methods raise
    InputError where a value is not of the type that they return.
    """

    def __init__(self, raw: dict[str, Any], source: str):
        self.raw, self.source = raw, source

    def error(self, name: str, expected: str) -> InputError:
        return InputError(f'{self.source}: "{name}" is {_shown(self.raw.get(name))}, expected {expected}.')

    def shown(self, name: str) -> str:
        """The value of a key as messages show it."""
        return _shown(self.raw.get(name))

    def _get(self, name: str, default: Any, null: Any = None) -> Any:
        value = self.raw.get(name, default)
        return null if value is None else value

    def count(self, name: str, default: int | None = None, limit: int | None = None, null: int | None = None) -> int:
        """A positive integer, of `limit` at most."""
        value = self._get(name, default, null)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.error(name, "a positive integer")
        if limit is not None and value > limit:
            raise self.error(name, f"at most {limit:,}")
        return value

    def number(self, name: str, default: float | None = None, null: float | None = None) -> float:
        """A positive finite number."""
        value = self._get(name, default, null)
        if not is_number(value):
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """`length` positive numbers."""
        value = self.raw.get(name)
        if not isinstance(value, list) or len(value) != length or not all(is_number(v) for v in value):
            raise self.error(name, f"a list of {length} positive numbers")
        return tuple(float(v) for v in value)

    def factors(self, name: str, length: int) -> tuple[float, ...]:
        """`length` positive numbers, all 1 where the key is absent or null."""
        return (1.0,) * length if self.raw.get(name) is None else self.numbers(name, length)

    def refuse_unless(self, name: str, accepted: tuple[Any, ...], default: Any = None) -> None:
        """Raises InputError unless the value is one of `accepted`."""
        value = self.raw.get(name, default)
        if value not in accepted:
            listing = ", ".join("absent" if v is None else json.dumps(v) for v in dict.fromkeys(accepted))
            raise InputError(f'{self.source}: "{name}": {_shown(value)} is not supported. Supported: {listing}.')

    def only(self, accepted: Mapping[str, tuple[Any, ...]] | None = None, /, **named: tuple[Any, ...]) -> None:
        """refuse_unless of several keys -> their accepted values."""
        for name, values in {**(accepted or {}), **named}.items():
            self.refuse_unless(name, values)


def is_number(value: Any) -> bool:
    """Whether a value is a positive number that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
