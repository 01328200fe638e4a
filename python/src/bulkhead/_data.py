"""Reads a pickle that may have been made to do harm: what it says is data, or it is refused.

To unpickle is to call whatever the pickle names. A worker in a sandbox may have been taken over by what it was given
to read; so of its results only names are followed that stand for data, and only to make values of them: a class is
never changed, nor handed on. Nor may a few bytes take all time or all memory: what would be hashed again and again, or
so deep that the interpreter's stack ends, is refused before it is read.
"""

from __future__ import annotations

import builtins
import io
import marshal
import pickle
import re
from collections import Counter, OrderedDict, deque
from typing import Any

__all__ = ["DataOnly", "loads"]


class DataOnly(pickle.UnpicklingError):
    """A result is no plain data."""


def _counter(counted: Any) -> Counter[Any]:
    if type(counted) is not dict:
        raise DataOnly("a Counter is made of a dict")
    return Counter(counted)


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _deque(items: Any = (), maxlen: int | None = None) -> deque[Any]:
    if items != ():
        raise DataOnly("a deque begins empty")
    return deque(maxlen=maxlen)


#: What builds a value of its arguments and nothing else, in a time and a space that its pickle has as well.
_NAMES = {
    "builtins": ("complex", "range", "slice"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "uuid": ("UUID",),
}
#: In later versions they are found there.
_NAMES |= {"pathlib._local": _NAMES["pathlib"]}
_ALLOWED = frozenset((module, name) for module, names in _NAMES.items() for name in names)
#: Those that would take more than their pickle has: as pickles have them, and no other way.
_COLLECTIONS = {"Counter": _counter, "OrderedDict": _ordered_dict, "deque": _deque}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "collections" and name in _COLLECTIONS:
            return _COLLECTIONS[name]
        if (module, name) in _ALLOWED or (module == "builtins" and _is_exception(name)):
            return super().find_class(module, name)
        raise DataOnly(
            f"{module}.{name} is no plain data, which is all that is read from confined workers: "
            "return numbers, texts, bytes and the like, or make the executor with results='any' if you trust them"
        )


def _is_exception(name: str) -> bool:
    """Not those that end a program."""
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, Exception)


#: Values nested deeper are refused: to hash or to free them would take the interpreter's stack.
_DEPTH_MAX = 1000
#: So many values are hashed for each byte, at most.
_HASHED_PER_BYTE = 64

#: Constants, numbers and what is remembered, and their arguments; of these a pickle has most.
_SCALARS = rb"[N\x88\x89\x94]|[Kh\x80].|M.{2}|[Jj].{4}|[G\x95].{8}"
#: With lists and tuples nothing is hashed, with lists and dicts nothing that is nested. In pieces, since some opcodes
#: are matched in one step each.
_LISTS_AND_TUPLES = re.compile(rb"(?:%b|[](ae)t\x85-\x87]){0,1000}" % _SCALARS, re.DOTALL)
_LISTS_AND_DICTS = re.compile(rb"(?:%b|[](ae}su]){0,1000}" % _SCALARS, re.DOTALL)
#: Those whose argument has its length before it, and how many bytes that takes.
_COUNTED = {**dict.fromkeys(b"C\x8a\x8c", 1), **dict.fromkeys(b"XB\x8b", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
#: Opcodes without an argument that are followed one by one.
_STOP, _MARK, _MEMOIZE, _POP, _POP_MARK = b".(\x9401"
_NUMBERS = b"\x8a\x8b"


def _is_plain(data: bytes | bytearray, kinds: re.Pattern[bytes]) -> bool:
    """Whether there is nothing but these, so that it can be read without being followed."""
    at, end, counted = 0, len(data), _COUNTED
    while at < end:
        opcode = data[at]
        width = counted.get(opcode)
        if width is not None:
            start = at + 1 + width
            at = start + int.from_bytes(data[at + 1 : start], "little")
            # The hash of a large number is not kept, and `pickle` does not remember numbers.
            if opcode in _NUMBERS and data[at : at + 1] == b"\x94":
                return False
            continue
        if opcode == _STOP:
            return True
        run = kinds.match(data, at)
        if run is None or run.end() == at:
            return False
        at = run.end()
    return False


class _Value:
    """What is known of a value before it is made: how deep it is nested, and how many others its hash is made of."""

    __slots__ = ("cost", "depth", "kind")

    def __init__(self, kind: str, depth: int = 0, cost: int = 1) -> None:
        self.kind, self.depth, self.cost = kind, depth, cost

    def holds(self, others: list[_Value]) -> _Value:
        """These are in it."""
        for other in others:
            if other.kind == "class":
                raise DataOnly("a class is no plain data, which is all that is read from confined workers")
            if other.depth >= self.depth:
                self.depth = other.depth + 1
            self.cost += other.cost
        if self.depth > _DEPTH_MAX:
            raise DataOnly(f"values are nested deeper than {_DEPTH_MAX}")
        return self


_LEAF, _CLASS = _Value("leaf"), _Value("class")
_LEAVES = frozenset(b"N\x88\x89")
#: Opcodes with a fixed argument, of so many bytes.
_WIDTHS = {**dict.fromkeys(b"Kh\x80", 1), ord("M"): 2, **dict.fromkeys(b"Jj", 4), **dict.fromkeys(b"G\x95", 8)}


class _Follower:
    """Does with a pickle what ``pickle`` does, but makes no values. Raises ``DataOnly`` for what may not be made."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data
        self.stack: list[_Value] = []
        self.marked: list[list[_Value]] = []
        self.hashed, self.hashed_max = 0, _HASHED_PER_BYTE * len(data)

    def follow(self) -> None:
        data, memo, at = self.data, list[_Value](), 0
        while True:
            opcode = data[at]
            at += 1
            if (width := _COUNTED.get(opcode)) is not None:
                size = int.from_bytes(data[at : at + width], "little")
                at += width + size
                self.stack.append(_Value("leaf", 0, 1 + size // 8) if opcode in _NUMBERS else _LEAF)
            elif opcode == _MEMOIZE:
                memo.append(self.stack[-1])
            elif (width := _WIDTHS.get(opcode)) is not None:
                argument = data[at : at + width]
                at += width
                if opcode in b"hj":
                    self.stack.append(memo[int.from_bytes(argument, "little")])
                elif opcode in b"KMJG":
                    self.stack.append(_LEAF)
            elif opcode in _LEAVES:
                self.stack.append(_LEAF)
            elif opcode == _STOP:
                _Value("result").holds([self.stack[-1]])
                return
            else:
                self._step(opcode)

    def _pop_mark(self) -> list[_Value]:
        found, self.stack = self.stack, self.marked.pop()
        return found

    def _pop(self, count: int) -> list[_Value]:
        if count > len(self.stack):
            raise IndexError
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found

    def _hash(self, values: list[_Value]) -> None:
        self.hashed += sum(value.cost for value in values)
        if self.hashed > self.hashed_max:
            raise DataOnly("to hash its values takes longer than its size tells")

    def _step(self, opcode: int) -> None:
        push = self.stack.append
        if opcode == _MARK:
            self.marked.append(self.stack)
            self.stack = []
        elif opcode in b"\x85\x86\x87":
            found = self._pop(opcode - 0x84)
            push(_Value("tuple").holds(found))
        elif opcode in b")]}\x8f":
            push(_Value({0x29: "tuple", 0x5D: "list", 0x7D: "dict", 0x8F: "set"}[opcode]))
        elif opcode == 0x74:  # TUPLE
            found = self._pop_mark()
            self.stack.append(_Value("tuple").holds(found))
        elif opcode in b"ae":
            found = self._pop(1) if opcode == 0x61 else self._pop_mark()
            self._into(("list", "made")).holds(found)
        elif opcode in b"su":
            found = self._pop(2) if opcode == 0x73 else self._pop_mark()
            self._hash(found[::2])
            self._into(("dict", "made")).holds(found)
        elif opcode in b"\x90\x91":  # ADDITEMS, FROZENSET
            found = self._pop_mark()
            self._hash(found)
            if opcode == 0x91:
                self.stack.append(_Value("frozenset").holds(found))
            else:
                self._into(("set",)).holds(found)
        elif opcode == 0x93:  # STACK_GLOBAL
            self._pop(2)
            push(_CLASS)
        elif opcode in b"R\x81":  # REDUCE, NEWOBJ
            named, arguments = self._pop(2)
            if named is not _CLASS or arguments.kind != "tuple":
                raise DataOnly("what is called is no class of plain data")
            # What is made of others may hash them, such as a Counter.
            self._hash([arguments])
            push(_Value("made").holds([arguments]))
        elif opcode == 0x62:  # BUILD
            found = self._pop(1)
            self._into(("made",)).holds(found)
        elif opcode == _POP and self.stack:
            self.stack.pop()
        elif opcode == _POP_MARK:
            self._pop_mark()
        else:
            raise DataOnly(f"the opcode {chr(opcode)!r} is none that plain data has in pickle's protocol 4 or later")

    def _into(self, kinds: tuple[str, ...]) -> _Value:
        value = self.stack[-1]
        if value.kind not in kinds:
            raise DataOnly(f"something is put into a {value.kind}, which takes nothing")
        return value


def loads(data: bytes | bytearray) -> Any:
    """As ``pickle.loads``. Raises ``DataOnly`` for more than plain data, or for what its size does not tell of."""
    if _is_plain(data, _LISTS_AND_TUPLES):
        value = _Unpickler(io.BytesIO(data)).load()
        try:
            # Sees in one call how deep it is: the caller may hash it.
            marshal.dumps(value)
        except ValueError as problem:
            raise DataOnly(f"values are nested too deep: {problem}") from None
        return value
    if not _is_plain(data, _LISTS_AND_DICTS):
        try:
            _Follower(data).follow()
        except IndexError:
            raise DataOnly("the pickle is cut off, or refers to what it does not have") from None
    return _Unpickler(io.BytesIO(data)).load()
