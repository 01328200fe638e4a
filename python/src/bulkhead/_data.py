"""Reads a pickle that may have been made to do harm: what it says is data, or it is refused.

To unpickle is to call whatever the pickle names. A worker in a sandbox may have been taken over by what it was given to
read; so of its results only names are followed that stand for data.
"""

from __future__ import annotations

import builtins
import io
import pickle
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


def loads(data: Any) -> Any:
    """As ``pickle.loads``. Raises ``DataOnly`` for classes and functions other than those of plain data."""
    return _Unpickler(io.BytesIO(data)).load()
