"""Calls that return many kinds of results, for ``test_results.py``."""

from __future__ import annotations

import enum
import fractions
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class Point:
    x: int
    y: int
    notes: list[Any] = field(default_factory=list)


class Pair(NamedTuple):
    one: Any
    two: Any


class Colour(enum.Enum):
    RED = 1


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class OwnError(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)
        self.code = code


class OtherError(Exception):
    pass


def own(name: str) -> Any:
    """Returns an instance of a class in this module."""
    made = {
        "Point": Point(1, 2, [Point(3, 4)]),
        "Pair": Pair(1, [Pair(2, 3)]),
        "Colour": Colour.RED,
        "Slotted": Slotted(5),
        "Fraction": fractions.Fraction(1, 3),
        "OtherError": OtherError("x"),
    }
    return made[name]


def fail(error: BaseException) -> None:
    raise error


def evaluate(code: str) -> Any:
    """Evaluates an expression about a library, which this process imports."""
    names: dict[str, Any] = {}
    for module in ("numpy", "pandas", "PIL.Image", "json", "zlib", "subprocess"):
        if module.partition(".")[0] in code:
            exec(f"import {module}", names)
    value = eval(code, names)
    if isinstance(value, Exception):
        raise value
    return value
