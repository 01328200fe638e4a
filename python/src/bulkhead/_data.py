"""Reads a pickle that may have been made to do harm: what it says is data, or it is refused.

To unpickle is to call whatever the pickle names. A worker in a sandbox may have been taken over by what it was given to
read; so its results are not unpickled: they are read here, by the opcodes that data is written with and no other. What
they name is never looked up, but made by a function of this module, which checks what it is given. Nothing is reached
that was there before, and what is read can neither be nested, nor hashed, at a cost beyond its size.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import pathlib
import pickle
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from struct import Struct
from typing import Any, NoReturn

__all__ = ["DataOnly", "loads"]

#: How deep data is nested: to hash, print or compare what is deeper can overflow the stack.
DEPTH_MAX = 1000
#: Objects that data has when each is counted as often as it is found: what prints or compares it goes to all of them.
#: Those of a pickle that is large may be so many for each of its bytes.
OBJECTS_MAX, OBJECTS_PER_BYTE = 1 << 23, 4
#: Objects that are hashed, compared or copied while it is read.
WORK_MAX, WORK_PER_BYTE = 1 << 20, 16
#: Bits of a number in a range or a slice.
INDEX_BITS_MAX = 128


class DataOnly(pickle.UnpicklingError):
    """A result is no plain data."""


def loads(data: bytes | bytearray) -> Any:
    """As ``pickle.loads``, of protocol 4 and later. Raises ``DataOnly``, or another ``UnpicklingError``, for what is no
    plain data."""
    try:
        value = pickle.loads(data) if _is_simple(data) else _Reader(data).read()
    except IndexError:
        raise DataOnly("it is cut off, or takes what is not there") from None
    except (ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError) as error:
        raise DataOnly(f"it cannot be read: {error!r}") from error
    _check_nesting((value,), OBJECTS_MAX + OBJECTS_PER_BYTE * len(data))
    return value


def _refuse(what: str) -> NoReturn:
    raise DataOnly(f"{what}, which is no plain data")


# What is left to ``pickle``.

#: Opcodes of texts, bytes, and of numbers of at most 64 bits, that are short; of lists, and of what is remembered.
_SHORT = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(32))
_SIMPLE = rb"|[Kh\x80].|M..|[Jj].{4}|[G\x95].{8}|[C\x8c](?:" + _SHORT + rb")"
#: Those, with dictionaries and sets; and with tuples.
_HASHING = re.compile(rb"(?:[(N\x88\x89\x94\]ae}su\x8f\x90]" + _SIMPLE + rb"){0,1000}", re.DOTALL)
_HASHABLE = re.compile(rb"(?:[(N\x88\x89\x94\]ae)t\x85-\x87]" + _SIMPLE + rb"){0,1000}", re.DOTALL)
#: How many bytes the length of a longer text, of bytes and of a number takes.
_COUNTED: Mapping[int, int] = {
    **dict.fromkeys(b"C\x8a\x8c", 1),
    **dict.fromkeys(b"BX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}


def _is_simple(data: bytes | bytearray) -> bool:
    """Whether it makes nothing but numbers, texts, bytes and containers, and hashes texts, bytes and numbers of at most
    64 bits alone: all tuples and larger numbers come behind what was hashed. Then ``pickle`` does nothing else with it
    than it should, and several times faster."""
    at, end, skip, is_hashing = 0, len(data), _HASHING.match, True
    while at < end:
        found = skip(data, at)
        if found is not None and found.end() > at:
            at = found.end()
            continue
        code = data[at]
        width = _COUNTED.get(code)
        if width is not None and (
            code not in (0x8A, 0x8B) or not is_hashing or (code == 0x8A and data[at + 1 : at + 2] <= b"\x08")
        ):
            start = at + 1 + width
            at = start + int.from_bytes(data[at + 1 : start], "little")
        elif code == 0x2E:  # STOP
            return True
        elif is_hashing:
            is_hashing, skip = False, _HASHABLE.match
        else:
            return False
    return False


# What has a name.


class _Name:
    """What a pickle has named: never part of what it says."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[[_Reader, tuple[Any, ...]], Any]) -> None:
        self.name = name
        self.make = make


def _make_complex(_reader: _Reader, arguments: tuple[Any, ...]) -> complex:
    return complex(*_checked(arguments, 2, {float}))


def _make_range(_reader: _Reader, arguments: tuple[Any, ...]) -> range:
    return range(*_checked(arguments, 3, {int}))


def _make_slice(_reader: _Reader, arguments: tuple[Any, ...]) -> slice:
    return slice(*_checked(arguments, 3, {int, type(None), str, float, bool}))


def _make_counter(reader: _Reader, arguments: tuple[Any, ...]) -> collections.Counter[Any]:
    counts: collections.Counter[Any] = collections.Counter()
    for counted in _checked(arguments, 1, {dict}):
        # Written for it alone: a few bytes more do not make another one.
        if id(counted) in reader.counted:
            _refuse("a second Counter of one dictionary")
        reader.counted[id(counted)] = counted
        counts.update(counted)
    return counts


def _make_ordered(_reader: _Reader, arguments: tuple[Any, ...]) -> collections.OrderedDict[Any, Any]:
    _checked(arguments, 0, set())
    return collections.OrderedDict()


def _make_deque(_reader: _Reader, arguments: tuple[Any, ...]) -> collections.deque[Any]:
    if len(arguments) > 1 and arguments[0] == ():
        return collections.deque([], *_checked(arguments[1:], 1, {int, type(None)}))  # noqa: RUF037
    if arguments and arguments != ((),):
        _refuse("a deque made of something")
    return collections.deque()


def _make_date(_reader: _Reader, arguments: tuple[Any, ...]) -> datetime.date:
    # What is made of bytes is not checked: replace() does that.
    return datetime.date(*_checked(arguments, 1, {bytes})).replace()


def _make_datetime(_reader: _Reader, arguments: tuple[Any, ...]) -> datetime.datetime:
    _checked(arguments, 2, {bytes, datetime.timezone})
    return datetime.datetime(*arguments).replace()


def _make_time(_reader: _Reader, arguments: tuple[Any, ...]) -> datetime.time:
    _checked(arguments, 2, {bytes, datetime.timezone})
    return datetime.time(*arguments).replace()


def _make_timedelta(_reader: _Reader, arguments: tuple[Any, ...]) -> datetime.timedelta:
    return datetime.timedelta(*_checked(arguments, 3, {int}))


def _make_timezone(_reader: _Reader, arguments: tuple[Any, ...]) -> datetime.timezone:
    return datetime.timezone(*_checked(arguments, 2, {datetime.timedelta, str}))


def _make_decimal(reader: _Reader, arguments: tuple[Any, ...]) -> decimal.Decimal:
    # Of a number it would take a time that grows with the square of its length.
    (digits,) = _checked(arguments, 1, {str}) or _refuse("a decimal number without digits")
    reader.work(len(digits))
    reader.large |= {decimal.Decimal}
    return decimal.Decimal(digits)


def _make_path(reader: _Reader, arguments: tuple[Any, ...]) -> pathlib.PosixPath:
    reader.work(len(arguments) + sum(map(len, _checked(arguments, len(arguments), {str}))))
    return pathlib.PosixPath(*arguments)


def _make_pure_path(reader: _Reader, arguments: tuple[Any, ...]) -> pathlib.PurePosixPath:
    reader.work(len(arguments) + sum(map(len, _checked(arguments, len(arguments), {str}))))
    return pathlib.PurePosixPath(*arguments)


def _make_uuid(reader: _Reader, arguments: tuple[Any, ...]) -> uuid.UUID:
    """One that has its number yet to come."""
    _checked(arguments, 0, set())
    made = uuid.UUID.__new__(uuid.UUID)
    reader.unfinished[id(made)] = made
    return made


def _checked(arguments: tuple[Any, ...], most: int, kinds: set[type]) -> tuple[Any, ...]:
    """The arguments, at most so many, and of these types alone."""
    if len(arguments) > most or not kinds.issuperset(map(type, arguments)):
        _refuse("something made of " + ", ".join(type(argument).__name__ for argument in arguments[:8]))
    if int in kinds:
        for argument in arguments:
            if type(argument) is int and argument.bit_length() > INDEX_BITS_MAX:
                _refuse("an index that is so large")
    return arguments


_MAKERS: dict[tuple[str, str], Callable[[_Reader, tuple[Any, ...]], Any]] = {
    ("builtins", "complex"): _make_complex,
    ("builtins", "range"): _make_range,
    ("builtins", "slice"): _make_slice,
    ("collections", "Counter"): _make_counter,
    ("collections", "OrderedDict"): _make_ordered,
    ("collections", "deque"): _make_deque,
    ("datetime", "date"): _make_date,
    ("datetime", "datetime"): _make_datetime,
    ("datetime", "time"): _make_time,
    ("datetime", "timedelta"): _make_timedelta,
    ("datetime", "timezone"): _make_timezone,
    ("decimal", "Decimal"): _make_decimal,
    ("pathlib", "PosixPath"): _make_path,
    ("pathlib", "PurePosixPath"): _make_pure_path,
    # In 3.13 they are found there.
    ("pathlib._local", "PosixPath"): _make_path,
    ("pathlib._local", "PurePosixPath"): _make_pure_path,
    ("uuid", "UUID"): _make_uuid,
}


def _maker_of_exception(name: str) -> Callable[[_Reader, tuple[Any, ...]], Any] | None:
    """What makes a built-in exception; none that ends a program, or a generator, is one that a function may raise."""
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None

    def make(reader: _Reader, arguments: tuple[Any, ...]) -> Exception:
        # Some copy what they are given.
        reader.work(len(arguments) + sum(len(argument) for argument in arguments if hasattr(argument, "__len__")))
        made: Exception = kind(*arguments)
        if isinstance(made, (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)) and not (
            # Its text is made of what stands there.
            0 <= made.start <= made.end <= len(made.object)
        ):
            _refuse("an error of what stands nowhere")
        return made

    return make


#: Attributes of exceptions that are not in their dictionaries.
_MEMBERS: Mapping[type[Exception], tuple[str, ...]] = {
    ImportError: ("name", "path", "name_from"),
    NameError: ("name",),
    AttributeError: ("name",),
}


def _build_exception(error: Exception, state: dict[Any, Any]) -> None:
    members = [name for kind, names in _MEMBERS.items() if isinstance(error, kind) for name in names]
    for name, value in state.items():
        if type(name) is not str or (name.startswith("__") and name != "__notes__"):
            _refuse(f"an exception with {name!r}")
        if name in members and type(value) in (str, type(None)) and hasattr(error, name):
            setattr(error, name, value)
        elif name not in members and name != "args":
            error.__dict__[name] = value


def _build_uuid(made: uuid.UUID, state: dict[Any, Any]) -> None:
    number, safety = state.get("int"), state.get("is_safe")
    if type(number) is not int or not 0 <= number < 1 << 128 or type(safety) not in (int, type(None)):
        _refuse("a UUID of something else than a number")
    object.__setattr__(made, "int", number)
    object.__setattr__(made, "is_safe", uuid.SafeUUID.unknown if safety is None else uuid.SafeUUID(safety))


# Nesting.

#: What has other objects. Strings, numbers, dates, paths and the like have none that matter.
_SEQUENCES = frozenset({list, tuple, set, frozenset, collections.deque})
_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter})
_EXCEPTIONS = frozenset(
    kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_HAVING = _SEQUENCES | _MAPPINGS | _EXCEPTIONS | {_Name}


def _check_nesting(roots: Iterable[Any], objects_max: int, large: frozenset[type] = frozenset()) -> int:
    """Counts the objects below, as often as they are found. Refuses what is too deep, or holds itself, and too many.

    What is of the types ``large`` counts by its size.
    """
    count = 0
    layer = [value for value in roots if type(value) in _HAVING]
    for _ in range(DEPTH_MAX):
        if not layer:
            return count
        kinds = set(map(type, layer))
        parts = layer if kinds <= _SEQUENCES else [part for value in layer for part in _parts(value)]
        count += sum(map(len, parts))
        if count > objects_max:
            raise DataOnly("it holds the same so often that it is far larger than what was sent")
        if large:
            count += sum(map(_size, (value for value in chain.from_iterable(parts) if type(value) in large)))
        if _HAVING.isdisjoint(map(type, chain.from_iterable(parts))):
            return count
        layer = [value for value in chain.from_iterable(parts) if type(value) in _HAVING]
    raise DataOnly(f"it is nested more than {DEPTH_MAX} deep, or holds itself")


def _parts(value: Any) -> tuple[Any, ...]:
    """The containers that a container consists of."""
    kind = type(value)
    if kind in _SEQUENCES:
        return (value,)
    if kind in _MAPPINGS:
        return value, value.values()
    if kind is _Name:
        _refuse(f"{value.name} itself")
    return value.args, vars(value).values()


def _size(value: Any) -> int:
    """How often the time of a small number it takes to hash a large one."""
    return sys.getsizeof(value) >> 5


# Opcodes.

#: Hashes of these are kept, or cost nothing; and equal ones can hardly be made for different values.
_QUICK_KEYS = frozenset({str, bytes, float, bool, type(None)})
#: So are those of numbers of at most 64 bits.
_QUICK_KEYS_WITH_NUMBERS = _QUICK_KEYS | {int}
_NUMBER_BYTES = 8
#: Numbers that follow each other: these are left to ``pickle``.
_NUMBERS = re.compile(rb"(?:K.|[N\x88\x89]|M..|J.{4}|G.{8}){4,2000}", re.DOTALL)
_FLOAT = Struct(">d")
_INT = Struct("<i")
_CONSTANTS: Mapping[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
#: Bytes of the lengths of texts and of bytes.
_TEXTS: Mapping[int, int] = {0x8C: 1, ord("X"): 4, 0x8D: 8}
_BYTES: Mapping[int, int] = {ord("C"): 1, ord("B"): 4, 0x8E: 8}


class _Reader:
    """One pickle, and what it has done so far."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self._work_left = WORK_MAX + WORK_PER_BYTE * len(data)
        self._quick_keys = _QUICK_KEYS_WITH_NUMBERS
        #: Hashes of keys that are not quick, with what holds the keys.
        self._hashes: dict[int, tuple[Any, set[int], list[int]]] = {}
        #: Types of which there are large numbers, whose hashes take time and are not kept.
        self.large: frozenset[type] = frozenset()
        #: Objects that lack their state.
        self.unfinished: dict[int, uuid.UUID] = {}
        #: Dictionaries that a Counter was made of.
        self.counted: dict[int, dict[Any, Any]] = {}

    def work(self, amount: int) -> None:
        """It is about to do what takes time or space."""
        self._work_left -= amount
        if self._work_left < 0:
            raise DataOnly("to read it takes far more than its size")

    def read(self) -> Any:
        """What it says."""
        data, view = self._data, memoryview(self._data)
        from_bytes, unpack_float, unpack_int = int.from_bytes, _FLOAT.unpack_from, _INT.unpack_from
        find_numbers = _NUMBERS.match
        memo: list[Any] = []
        marks: list[list[Any]] = []
        stack: list[Any] = []
        at = 0
        # Whatever is cut off leaves `at` behind the end. The commonest come first.
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x8C:  # SHORT_BINUNICODE
                start = at + 1
                at = start + data[at]
                stack.append(data[start:at].decode("utf-8", "surrogatepass"))
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x4D:  # BININT2
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif code == 0x47:  # BINFLOAT
                start = at
                at += 8
                if at > len(data):
                    break
                stack.append(unpack_float(data, start)[0])
            elif code == 0x28:  # MARK
                marks.append(stack)
                stack = []
                found = find_numbers(data, at)
                if found is not None:
                    at = found.end()
                    stack.extend(pickle.loads(b"(%bt." % found[0]))
            elif code == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x52:  # REDUCE
                arguments = stack.pop()
                stack[-1] = self._make(stack[-1], arguments)
            elif code in _BYTES:
                start = at + _BYTES[code]
                at = start + from_bytes(data[at:start], "little")
                stack.append(bytes(view[start:at]))
            elif code == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                self._set(stack[-1], items)
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x65:  # APPENDS
                items, stack = stack, marks.pop()
                if type(stack[-1]) not in (list, collections.deque):
                    _refuse("something appended to what is no list")
                stack[-1].extend(items)
            elif code == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif code == 0x62:  # BUILD
                state = stack.pop()
                self._build(stack[-1], state)
            elif code == 0x8A or code == 0x8B:  # LONG1, LONG4
                start = at + (1 if code == 0x8A else 4)
                size = from_bytes(data[at:start], "little")
                at = start + size
                if size > _NUMBER_BYTES:
                    self._quick_keys = _QUICK_KEYS
                    self.large |= {int}
                stack.append(from_bytes(data[start:at], "little", signed=True))
            elif code == 0x81:  # NEWOBJ
                arguments = stack.pop()
                stack[-1] = self._make(stack[-1], arguments)
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x87:  # TUPLE3
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif code == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                stack.append(tuple(items))
            elif code == 0x4A:  # BININT
                start = at
                at += 4
                if at > len(data):
                    break
                stack.append(unpack_int(data, start)[0])
            elif code == 0x73:  # SETITEM
                items = stack[-2:]
                del stack[-2:]
                self._set(stack[-1], items)
            elif code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            elif code == 0x61:  # APPEND
                item = stack.pop()
                if type(stack[-1]) not in (list, collections.deque):
                    _refuse("something appended to what is no list")
                stack[-1].append(item)
            elif code in _TEXTS:
                start = at + _TEXTS[code]
                at = start + from_bytes(data[at:start], "little")
                stack.append(str(view[start:at], "utf-8", "surrogatepass"))
            elif code == 0x8F:  # EMPTY_SET
                stack.append(set())
            elif code == 0x90:  # ADDITEMS
                items, stack = stack, marks.pop()
                if type(stack[-1]) is not set:
                    _refuse("something added to what is no set")
                self._hash(stack[-1], items)
                stack[-1].update(items)
            elif code == 0x91:  # FROZENSET
                items, stack = stack, marks.pop()
                self._hash(items, items)
                stack.append(frozenset(items))
            elif code == 0x96:  # BYTEARRAY8
                start = at + 8
                at = start + from_bytes(data[at:start], "little")
                stack.append(bytearray(view[start:at]))
            elif code == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                stack[-1] = _named(stack[-1], name)
            elif code == 0x95:  # FRAME
                at += 8
            elif code == 0x80:  # PROTO
                at += 1
            elif code == 0x2E:  # STOP
                if self.unfinished:
                    _refuse("a UUID without a number")
                return stack.pop()
            else:
                raise DataOnly(f"the opcode {chr(code)!r} is none that pickle's protocol 4 or later writes data with")
        raise IndexError

    def _make(self, named: Any, arguments: Any) -> Any:
        if type(named) is not _Name or type(arguments) is not tuple:
            _refuse("a call of something else than a name")
        return named.make(self, arguments)

    def _build(self, made: Any, state: Any) -> None:
        if type(state) is not dict:
            _refuse("a state that is no dictionary")
        self.work(len(state))
        if id(made) in self.unfinished:
            _build_uuid(self.unfinished.pop(id(made)), state)
        elif type(made) in _EXCEPTIONS:
            _build_exception(made, state)
        else:
            _refuse(f"{type(made).__name__} with a state of its own")

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict and type(target) is not collections.OrderedDict:
            _refuse("something set in what is no dictionary")
        keys = items[::2]
        if not self._quick_keys.issuperset(map(type, keys)):
            self._hash(target, keys)
        target.update(zip(keys, items[1::2], strict=True))

    def _hash(self, target: Any, keys: list[Any]) -> None:
        """These are about to be keys: to hash them takes time, and to compare those whose hashes are equal."""
        if self._quick_keys.issuperset(map(type, keys)):
            return
        work = _check_nesting((keys,), self._work_left, self.large)
        self.work(work)
        _, known, doubles = self._hashes.setdefault(id(target), (target, set(), [0]))
        before = len(known)
        known.update(map(hash, keys))
        new_doubles = len(keys) - (len(known) - before)
        if new_doubles:
            doubles[0] += new_doubles
            self.work(doubles[0] * work)


def _named(module: Any, name: Any) -> _Name:
    if type(module) is not str or type(name) is not str:
        _refuse("a name that is no text")
    make = _MAKERS.get((module, name)) or (_maker_of_exception(name) if module == "builtins" else None)
    if make is None:
        raise DataOnly(
            f"{module}.{name} is no plain data, which is all that is read from confined workers: "
            "return numbers, texts, bytes and the like, or make the executor with results='any' if you trust them"
        )
    return _Name(f"{module}.{name}", make)
