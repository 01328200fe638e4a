"""Reads a pickle that may have been made to do harm: what it says is data, or it is refused.

To unpickle is to call whatever the pickle names. A worker in a sandbox may have been taken over by what it was given to
read; so of its results only names are followed that stand for data.
"""

from __future__ import annotations

import builtins
import io
import pickle
import re
from typing import Any

__all__ = ["DataOnly", "loads"]

#: What builds a value of its arguments and nothing else, in a time and a space that its pickle has as well.
_NAMES = {
    "builtins": ("complex", "frozenset", "range", "set", "slice"),
    "collections": ("Counter", "OrderedDict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "uuid": ("UUID", "SafeUUID"),
}
#: In later versions they are found there.
_NAMES |= {"pathlib._local": _NAMES["pathlib"]}
_ALLOWED = frozenset((module, name) for module, names in _NAMES.items() for name in names)


class DataOnly(pickle.UnpicklingError):
    """A result names what is no data."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "builtins" and _is_exception(name)):
            return super().find_class(module, name)
        raise DataOnly(
            f"{module}.{name} is no plain data, which is all that is read from confined workers: "
            "return numbers, texts, bytes and the like, or make the executor with results='any' if you trust them"
        )


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


#: Opcodes whose arguments have a fixed size, none to eight bytes: some of them in one step, and so not all at once.
_FIXED = re.compile(
    rb"(?:[(012NQRabdelostu})\]\x81\x85-\x89\x8f-\x94\x97\x98]+"
    rb"|[Khq\x80\x82].|[M\x83].{2}|[Jj\x84].{4}|[G\x95].{8}){0,1000}",
    re.DOTALL,
)
#: Those whose argument has its length before it, and how many bytes that takes.
_COUNTED = {**dict.fromkeys(b"UC\x8a\x8c", 1), **dict.fromkeys(b"TXB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
_STOP = ord(".")


def _check_opcodes(data: bytes | bytearray) -> None:
    """Refuses opcodes that protocol 4 and later have no use for. Among them are those that number what is remembered:
    ``pickle`` makes room for all numbers below, and nine bytes would take all memory."""
    at, end, skip_fixed, counted = 0, len(data), _FIXED.match, _COUNTED
    while at < end:
        opcode = data[at]
        width = counted.get(opcode)
        if width is not None:
            start = at + 1 + width
            at = start + (
                data[at + 1] if width == 1 and start <= end else int.from_bytes(data[at + 1 : start], "little")
            )
            continue
        if opcode == _STOP:
            return
        fixed = skip_fixed(data, at)
        if fixed is None or fixed.end() == at:
            raise DataOnly(f"the opcode {chr(opcode)!r} is none of pickle's protocol 4 or later, or is cut off")
        at = fixed.end()


def loads(data: bytes | bytearray) -> Any:
    """As ``pickle.loads``. Raises ``DataOnly`` for classes and functions other than those of plain data."""
    _check_opcodes(data)
    return _Unpickler(io.BytesIO(data)).load()
