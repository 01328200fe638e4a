"""Reads pickles from untrusted workers. A pickle that contains anything other than data is refused.

Unpickling calls whatever the pickle names. A worker in a sandbox may have been compromised by its input, so its results
are not unpickled. Instead, this module reads them, and accepts only the opcodes that are used for data. Names are not
imported. Each accepted name has a function in this module that checks its arguments and builds the value. Only names of
exceptions are looked up, in a fixed list of modules. A value cannot refer to existing objects, and nesting and hashing
cannot cost more than the size of the pickle justifies.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import functools
import pathlib
import pickle
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from struct import Struct
from types import MappingProxyType
from typing import Any, NoReturn

from . import _libraries

#: Maximum nesting depth of data. Hashing, printing or comparing deeper data can overflow the stack.
DEPTH_MAX = 1000
#: Limit on the weight of data, and on the memory of arrays, images and frames: a fixed number of bytes, plus a number
#: of bytes per byte of the pickle. An object is counted at each reference, because printing and hashing visit each
#: reference. The weight of an object is a fixed amount plus the size of its contents.
WEIGHT_MAX, WEIGHT_PER_BYTE, OBJECT_WEIGHT = 1 << 28, 64, 16
#: Weight of an exception in a group. Large, because a traceback describes each exception.
EXCEPTION_WEIGHT = 1 << 14
#: Maximum number of objects that are counted before repeated references are analysed.
QUICK_MAX, QUICK_PER_BYTE = 1 << 16, 4
#: Maximum number of objects that are hashed, compared or copied during reading.
WORK_MAX, WORK_PER_BYTE = 1 << 20, 16
#: Maximum number of bits of a number in a range or a slice.
INDEX_BITS_MAX = 128
#: Maximum size of a pickle in which ``pickle`` may hash numbers. In a larger pickle, crafted numbers could make each
#: insertion probe all other keys.
HASHING_MAX = 1 << 14
#: Maximum number of keys that may be numbers in a larger pickle.
NUMERIC_KEYS_MAX = 1000
#: Maximum size in bytes of a string whose comparisons are not counted; and maximum product of the sizes of a longer
#: string and of the pickle.
COMPARED_MAX, COMPARED_TIMES_BYTES_MAX = 1 << 12, 1 << 33
#: Maximum size of a time zone's name, and of strings in a slice.
NAME_MAX = 255
#: Maximum time for inserting keys, in seconds: a fixed amount, plus an amount per byte of the pickle.
KEYS_SECONDS, KEYS_SECONDS_PER_BYTE = 1.0, 5e-7


class DataOnly(_libraries.Refused):
    """A result contains something other than plain data."""


def allow(kinds: Sequence[Any]) -> dict[tuple[str, str], type]:
    """Registers additional classes whose instances are accepted. Returns the classes by their names.

    Raises ``TypeError`` for objects that are not classes and for exceptions that end a program or a generator.
    """
    for kind in kinds:
        if not isinstance(kind, type) or (issubclass(kind, BaseException) and not _is_raisable(kind)):
            raise TypeError(f"results: {kind!r} must be a class, and not an exception that ends a program")
        _CONTAINERS.add(kind)
        if issubclass(kind, BaseException):
            _EXCEPTIONS.add(kind)
    return {_name_of(kind.__module__, kind.__qualname__): kind for kind in kinds}


def _name_of(module: str, name: str) -> tuple[str, str]:
    """Returns the name of a class, with ``__main__`` for the main module, which workers call ``__mp_main__``."""
    return module.replace("__mp_main__", "__main__"), name


def loads(
    data: bytes | bytearray, buffers: Iterable[Any] = (), allowed: Mapping[tuple[str, str], type] = MappingProxyType({})
) -> Any:
    """Reads a pickle of protocol 4 or later, like ``pickle.loads``.

    Raises ``DataOnly`` for values that are neither plain data nor instances of allowed classes.
    """
    try:
        return _load(data, buffers, allowed)
    except pickle.UnpicklingError as error:
        reason = str(error)
    except RecursionError:
        reason = "keys are nested too deeply for a comparison"
    except IndexError:
        reason = "the pickle is truncated, or uses a missing object"
    except (ArithmeticError, AttributeError, EOFError, LookupError, TypeError, ValueError) as error:
        reason = f"the pickle cannot be read: {type(error).__name__}: {error!s:.200}"
    # Raises a new exception, because the frames of the original exception contain unchecked values.
    raise DataOnly(reason)


def _load(data: bytes | bytearray, buffers: Iterable[Any], allowed: Mapping[tuple[str, str], type]) -> Any:
    longest = _longest_if_simple(data)
    if longest is not None:
        value = pickle.loads(data)
    else:
        reader = _Reader(data, buffers, allowed)
        # Decimals are created and compared as keys. The caller's decimal context must not affect this or be changed.
        with decimal.localcontext(decimal.Context(traps=[decimal.InvalidOperation])):
            value = reader.read()
        longest = reader.longest
    count = _count((value,), QUICK_MAX + QUICK_PER_BYTE * len(data))
    weight_max = WEIGHT_MAX + WEIGHT_PER_BYTE * len(data)
    if count is None or count * longest > weight_max:
        _weigh(value, weight_max)
    return value


def _refuse(what: str) -> NoReturn:
    raise DataOnly(f"{what}, which is not plain data")


# Pickles that can be read with the ``pickle`` module.

#: Patterns for strings, bytes and numbers whose length is stored in one byte.
_SIZES = [b"\\x%02x.{%d}" % (size, size) for size in range(256)]
_SHORT = b"|".join(
    b"(?=[%b-%b])(?:%b)" % (s[0][:4], s[-1][:4], b"|".join(s))
    for s in (_SIZES[at : at + 16] for at in range(0, 256, 16))
)
#: Opcodes for strings, bytes and numbers of at most 64 bits, for the memo, and for frames.
_SIMPLE = rb"[Kh\x80].|M..|[Jj].{4}|[G\x95].{8}|[C\x8c](?:" + b"|".join(_SIZES[:32]) + b")"
#: Patterns of the simple opcodes combined with the opcodes for dictionaries and sets, and with the opcodes for tuples.
_HASHING = re.compile(rb"(?:[(N\x88\x89\x94\]ae}su\x8f\x90]|" + _SIMPLE + rb"){0,1000}", re.DOTALL)
_HASHABLE = re.compile(rb"(?:[(N\x88\x89\x94\]ae)t\x85-\x87]|" + _SIMPLE + rb"){0,1000}", re.DOTALL)
_SCALAR = (
    rb"(?:[Kh].|G.{8}|[N\x88\x89]|M..|[Jj].{4}|[C\x8c](?:" + _SHORT + rb")\x94?|\x8a(?:" + b"|".join(_SIZES[:9]) + b"))"
)
_KEY = rb"(?:h.|\x8c(?:" + _SHORT + rb")\x94?|j.{4})(?:\x95.{8})?"
#: A key that is followed by a long string or bytes.
_KEY_OF_LONG = rb"%b(?=[BX\x8d\x8e\x96])" % _KEY
_CONTAINER = rb"\}\x94?\(?|\]\x94?"
#: Opcodes before the first memoised object that is not a string.
_FIRST = rb"(?:\x80.)?(?:\x95.{8})?\(?(?:%b){0,8}" % _SCALAR
#: A key with its value, an empty container, one or all of the numbers and strings of a list, or opcodes between these.
_RECORDS = rb"(?:%b(?:%b|%b)s?|%b|u\(?|\((?:%b|\x95.{8}){0,1024}e|[(ea]|%ba|\x95.{8}){0,64}" % (
    _KEY,
    _SCALAR,
    _CONTAINER,
    _CONTAINER,
    _SCALAR,
    _SCALAR,
)
#: Size in bytes of the length field of a longer string, of bytes, and of a number.
_COUNTED: Mapping[int, int] = {
    **dict.fromkeys(b"C\x8a\x8c", 1),
    **dict.fromkeys(b"BX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}


@functools.cache
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    """Compiles a pattern on first use, which takes a few milliseconds. Needed only for large results."""
    return re.compile(pattern, re.DOTALL)


def _longest_if_simple(data: bytes | bytearray) -> int | None:
    """Returns the size of the longest string if ``pickle`` can read the data safely, and None otherwise.

    ``pickle`` is several times faster. It is safe if the pickle creates only numbers, strings, bytes and containers,
    and hashes only strings, bytes and a few numbers. Tuples must therefore come after the last hashed object.

    In a large pickle, a number must not be a key. Between two marks there are only keys with their values, and
    containers, whatever the closing opcodes remove. A number occurs only directly above its key, which is a string or a
    memoised object, and numbers are never memoised. SETITEMS takes everything after the mark. It therefore hashes only
    objects in key positions, and fails at the first container in such a position before any position is shifted. Only
    SETITEM could use a value as a key, so each SETITEM that does not follow its pair is counted.
    """
    at, end, longest, counted = 0, len(data), 0, 0
    is_hashing, is_small = True, end <= HASHING_MAX
    skip = _HASHING
    if not is_small:
        skip = _compiled(_RECORDS)
        first = _compiled(_FIRST).match(data)
        at = first.end() if first else 0
    while at < end:
        found = skip.match(data, at)
        if found is not None and found.end() > at:
            at = found.end()
            continue
        key = _compiled(_KEY_OF_LONG).match(data, at) if is_hashing and not is_small else None
        at = key.end() if key else at
        code = data[at]
        width = _COUNTED.get(code)
        if width is not None and (
            key
            or not is_hashing
            or (is_small and (code not in (0x8A, 0x8B) or (code == 0x8A and data[at + 1 : at + 2] <= b"\x08")))
        ):
            start = at + 1 + width
            size = int.from_bytes(data[at + 1 : start], "little")
            # Later opcodes can make a bytearray longer.
            at, longest = start + size, max(longest, end if code == 0x96 else size)
            if key:
                # The value may be memoised and later used as a key.
                at += data[at : at + 1] == b"\x94"
                if size > COMPARED_MAX and size * end > COMPARED_TIMES_BYTES_MAX:
                    return None
        elif code == 0x2E:  # STOP
            return longest
        elif code == 0x73 and is_hashing and counted < NUMERIC_KEYS_MAX:  # SETITEM
            at, counted = at + 1, counted + 1
        elif is_hashing:
            is_hashing, skip = False, _HASHABLE
        else:
            return None
    return None


# Named objects.


class _Name:
    """A name in a pickle, or a buffer outside the pickle. Never part of the resulting value."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Any) -> None:
        self.name = name
        #: A function of the reader and the arguments, or an allowed class, or the buffer.
        self.make = make


def _maker(kind: Callable[..., Any], most: int, *kinds: type) -> Callable[[_Reader, tuple[Any, ...]], Any]:
    """Returns a function that builds a value from at most ``most`` arguments of the given types."""

    def make(_reader: _Reader, arguments: tuple[Any, ...]) -> Any:
        made = kind(*_checked(arguments, most, {*kinds}))
        # The constructors of dates and times do not check their packed bytes, but replace() does.
        return made.replace() if isinstance(made, (datetime.date, datetime.time)) else made

    return make


def _make_bytearray(reader: _Reader, arguments: tuple[Any, ...]) -> bytearray:
    reader.work(sum(map(len, _checked(arguments, 1, {bytes}))))
    return bytearray(*arguments)


def _make_slice(_reader: _Reader, arguments: tuple[Any, ...]) -> slice:
    _check_names(arguments)
    return slice(*_checked(arguments, 3, {int, type(None), str, float, bool}))


def _make_counter(reader: _Reader, arguments: tuple[Any, ...]) -> collections.Counter[Any]:
    counts: collections.Counter[Any] = collections.Counter()
    for counted in _checked(arguments, 1, {dict}):
        # `pickle` writes a new dictionary for each Counter. A pickle that uses the same dictionary repeatedly could
        # create many Counters with few bytes.
        if id(counted) in reader.counted:
            _refuse("a second Counter made from the same dictionary")
        reader.counted[id(counted)] = counted
        reader.insert(counts, counted.items(), len(counted))
    return counts


def _make_deque(_reader: _Reader, arguments: tuple[Any, ...]) -> collections.deque[Any]:
    if len(arguments) > 1 and arguments[0] == ():
        return collections.deque([], *_checked(arguments[1:], 1, {int, type(None)}))  # noqa: RUF037
    if arguments and arguments != ((),):
        _refuse("a deque with constructor arguments")
    return collections.deque()


def _make_timezone(_reader: _Reader, arguments: tuple[Any, ...]) -> datetime.timezone:
    _check_names(arguments)
    return datetime.timezone(*_checked(arguments, 2, {datetime.timedelta, str}))


def _make_decimal(reader: _Reader, arguments: tuple[Any, ...]) -> decimal.Decimal:
    # Only text is accepted, because converting an int would take time quadratic in its length.
    (digits,) = _checked(arguments, 1, {str}) or _refuse("a decimal number without digits")
    reader.work(len(digits))
    reader.large |= {decimal.Decimal}
    return decimal.Decimal(digits)


def _maker_of_path(kind: type[pathlib.PurePath]) -> Callable[[_Reader, tuple[Any, ...]], Any]:
    def make(reader: _Reader, arguments: tuple[Any, ...]) -> pathlib.PurePath:
        size = len(arguments) + sum(map(len, _checked(arguments, len(arguments), {str})))
        reader.work(size)
        reader.longest = max(reader.longest, size)
        return kind(*arguments)

    return make


def _make_uuid(reader: _Reader, arguments: tuple[Any, ...]) -> uuid.UUID:
    """Returns a UUID whose number is set later, from its state."""
    _checked(arguments, 0, set())
    made = uuid.UUID.__new__(uuid.UUID)
    reader.unfinished[id(made)] = made
    return made


def _maker_of_library(make: Callable[..., Any]) -> Callable[[_Reader, tuple[Any, ...]], Any]:
    def made(reader: _Reader, arguments: tuple[Any, ...]) -> Any:
        reader.work(len(arguments))
        # The only named objects that are values are buffers.
        values = (a.make if type(a) is _Name and type(a.make) is memoryview else a for a in arguments)
        return make(reader.allocate, *values)

    return made


def _checked(arguments: tuple[Any, ...], most: int, kinds: set[type]) -> tuple[Any, ...]:
    """Returns the arguments after checking their number and types."""
    if len(arguments) > most or not kinds.issuperset(map(type, arguments)):
        _refuse("an object made from " + ", ".join(type(argument).__name__ for argument in arguments[:8]))
    if int in kinds and any(type(a) is int and a.bit_length() > INDEX_BITS_MAX for a in arguments):
        _refuse("an index that is too large")
    return arguments


def _check_names(arguments: tuple[Any, ...]) -> None:
    """Refuses long strings in objects that can be referenced many times without being weighed."""
    if any(type(argument) is str and len(argument) > NAME_MAX for argument in arguments):
        _refuse("a name that is too long")


_MAKERS: dict[tuple[str, str], Callable[[_Reader, tuple[Any, ...]], Any]] = {
    ("builtins", "bytearray"): _make_bytearray,
    ("builtins", "complex"): _maker(complex, 2, float),
    ("builtins", "range"): _maker(range, 3, int),
    ("builtins", "slice"): _make_slice,
    ("collections", "Counter"): _make_counter,
    ("collections", "OrderedDict"): _maker(collections.OrderedDict, 0),
    ("collections", "deque"): _make_deque,
    ("datetime", "date"): _maker(datetime.date, 1, bytes),
    ("datetime", "datetime"): _maker(datetime.datetime, 2, bytes, datetime.timezone),
    ("datetime", "time"): _maker(datetime.time, 2, bytes, datetime.timezone),
    ("datetime", "timedelta"): _maker(datetime.timedelta, 3, int),
    ("datetime", "timezone"): _make_timezone,
    ("decimal", "Decimal"): _make_decimal,
    **{
        # Python 3.13 uses the second module.
        (module, kind.__name__): _maker_of_path(kind)
        for module in ("pathlib", "pathlib._local")
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath)
    },
    ("uuid", "UUID"): _make_uuid,
    **{("bulkhead._libraries", name): _maker_of_library(make) for name, make in _libraries.MAKERS.items()},
}


def _maker_of_exception(module: str, name: str) -> Callable[[_Reader, tuple[Any, ...]], Any] | None:
    """Returns a function that builds a built-in exception or a library's exception; None for other names."""
    if module != "builtins" and module not in _libraries.ERROR_MODULES:
        return None
    # Does not use getattr, because a module's `__getattr__` may import another module.
    kind = vars(sys.modules.get(module, object)).get(name)
    if not isinstance(kind, type) or not _is_raisable(kind) or kind.__module__ != module:
        return None
    for kinds in (_EXCEPTIONS, _CONTAINERS):
        kinds.add(kind)

    def make(reader: _Reader, arguments: tuple[Any, ...]) -> Any:
        if issubclass(kind, _COPYING) and range in set(map(type, arguments)):
            _refuse("an exception made from a range")
        # These exceptions copy their arguments; a UnicodeDecodeError copies a bytearray.
        reader.work(len(arguments) + sum(len(part) for part in arguments if type(part) in _COPIED))
        # OSError hashes its errno.
        reader.work(sum(map(_size, (argument for argument in arguments if type(argument) is int))))
        made: Any = kind(*arguments)
        if isinstance(made, SyntaxError) and hasattr(made, "_metadata"):
            # Since Python 3.14, a traceback opens the file of a SyntaxError that has this attribute.
            made._metadata = None
        if isinstance(made, SyntaxError) and not (
            {type(made.filename), type(made.text)} <= {str, type(None)}
            and all(
                number is None or (type(number) is int and -1 <= number < 1 << 20)
                for number in (made.lineno, made.offset, made.end_lineno, made.end_offset)
            )
        ):
            _refuse("a SyntaxError with an invalid position")
        if isinstance(made, OSError) and not {type(made.filename), type(made.filename2)} <= _FILENAMES:
            # Freeing a long chain of nested errors would overflow the stack.
            _refuse("an OSError with an invalid file name")
        if isinstance(made, (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)) and not (
            # The error's text is computed from this range.
            0 <= made.start <= made.end <= len(made.object)
        ):
            _refuse("an encoding error with an invalid position")
        return made

    return make


_GROUPS: tuple[Any, ...] = tuple(filter(None, [getattr(builtins, "ExceptionGroup", None)]))
_COPYING: tuple[Any, ...] = (SyntaxError, *_GROUPS)
_FILENAMES = frozenset({str, bytes, int, type(None), pathlib.PosixPath, pathlib.PurePosixPath})
#: Attributes of exceptions that are not in the instance's dictionary, and the accepted subset. With the other
#: attributes, formatting a traceback would import a module or read attributes of the program's objects.
_MEMBERS: Mapping[type[Exception], tuple[set[str], set[str]]] = {
    ImportError: ({"name", "path", "name_from"}, {"name", "path"}),
    NameError: ({"name"}, set()),
    AttributeError: ({"name", "obj"}, {"name"}),
}


def _build_exception(reader: _Reader, error: Exception, state: dict[Any, Any]) -> None:
    members, taken = next((found for kind, found in _MEMBERS.items() if isinstance(error, kind)), (set(), set()))
    for name, value in state.items():
        if type(name) is not str or (name.startswith("__") and name != "__notes__"):
            _refuse(f"an exception with {name[:80] if type(name) is str else type(name).__name__}")
        if name == "print_file_and_line":
            # Up to Python 3.12, an exception with this attribute is printed like a SyntaxError, but has no valid text.
            _refuse("an exception that is printed like a SyntaxError")
        if callable(getattr(type(error), name, None)):
            _refuse(f"an exception that replaces the method {name}")
        if name == "__notes__":
            if type(value) is not list or not {str}.issuperset(map(type, value)):
                _refuse("notes that are not a list of strings")
            reader.work(len(value))
            value = value.copy()
        if name in taken and type(value) in (str, type(None)):
            setattr(error, name, value)
        elif name not in members and name != "args":
            error.__dict__[name] = value


def _build_uuid(made: uuid.UUID, state: dict[Any, Any]) -> None:
    number, safety = state.get("int"), state.get("is_safe")
    if (
        type(number) is not int
        or not 0 <= number < 1 << 128
        # An invalid large number would be converted to digits in the error message.
        or not (safety is None or (type(safety) is int and safety in (0, -1)))
    ):
        _refuse("a UUID made from an invalid number")
    object.__setattr__(made, "int", number)
    object.__setattr__(made, "is_safe", uuid.SafeUUID.unknown if safety is None else uuid.SafeUUID(safety))


# Nesting.

#: Types of objects that contain other objects. Strings, numbers, dates and paths contain no objects that matter.
_SEQUENCES = frozenset({list, tuple, set, frozenset, collections.deque})
_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.Counter})


def _is_raisable(kind: type) -> bool:
    """Returns false for exceptions that end a program or a generator. An asyncio future cannot hold them."""
    return issubclass(kind, Exception) and not issubclass(kind, (StopIteration, StopAsyncIteration))


#: `allow` adds classes to these two sets.
_EXCEPTIONS = {kind for kind in vars(builtins).values() if isinstance(kind, type) and _is_raisable(kind)}
_CONTAINERS: set[type] = {*_SEQUENCES, *_MAPPINGS, *_EXCEPTIONS, _Name}
_COPIED = _SEQUENCES | {bytearray}


#: Functions that return the size of a value, by type. Contains the types that have no members but can be large.
_LENGTHS: Mapping[type, Callable[[Any], int]] = {
    **dict.fromkeys((str, bytes, bytearray), len),
    **dict.fromkeys((pathlib.PosixPath, pathlib.PurePosixPath), lambda path: len(str(path))),
    int: lambda number: number.bit_length() >> 3,
    decimal.Decimal: sys.getsizeof,
}

#: Types whose hash is cached, but whose comparison takes time.
_TEXTUAL = frozenset({str, bytes, pathlib.PosixPath, pathlib.PurePosixPath})


def _count(roots: Iterable[Any], most: int, large: frozenset[type] = frozenset()) -> int | None:
    """Returns the number of objects below the roots, counted at each reference, plus a small number per level.

    Returns None if there are more than ``most`` objects or if they are nested too deeply. Objects of the types in
    ``large`` count by their size.
    """
    count = 0
    layer = [value for value in roots if type(value) in _CONTAINERS]
    for _ in range(DEPTH_MAX):
        if not layer:
            return count
        kinds = set(map(type, layer))
        parts: list[Any] = layer
        if kinds <= _MAPPINGS:
            parts = [*layer, *(value.values() for value in layer)]
        elif not kinds <= _SEQUENCES:
            parts = [part for value in layer for part in _parts(value)]
            count += 4 * len(layer)
        count += 16 + sum(map(len, parts))
        if count > most:
            return None
        if large:
            count += sum(map(_size, (value for value in chain.from_iterable(parts) if type(value) in large)))
        if _CONTAINERS.isdisjoint(map(type, chain.from_iterable(parts))):
            return count
        layer = [value for value in chain.from_iterable(parts) if type(value) in _CONTAINERS]
    return None


def _weigh(root: Any, most: int) -> None:
    """Refuses a value that is nested too deeply, contains itself, or weighs too much. Visits each object once."""
    known: dict[int, tuple[int, int]] = {}
    opened: set[int] = set()
    stack = [root]
    while stack:
        value = stack[-1]
        if id(value) in known or type(value) not in _CONTAINERS:
            stack.pop()
            continue
        members = [*chain.from_iterable(_parts(value))]
        inner = [member for member in members if type(member) in _CONTAINERS]
        missing = {id(member): member for member in inner if id(member) not in known}
        if missing:
            opened.add(id(value))
            if not opened.isdisjoint(missing):
                raise DataOnly("the value contains itself")
            if len(opened) >= DEPTH_MAX:
                raise DataOnly(f"the value is nested more than {DEPTH_MAX} levels deep")
            stack.extend(missing.values())
            continue
        stack.pop()
        opened.discard(id(value))
        weight, depth = OBJECT_WEIGHT * len(members), 0
        weight += sum(_LENGTHS[type(member)](member) for member in members if type(member) in _LENGTHS)
        if isinstance(value, _GROUPS):
            weight += EXCEPTION_WEIGHT * len(value.exceptions)
        if inner:
            weights, depths = zip(*(known[id(member)] for member in inner), strict=True)
            weight, depth = weight + sum(weights), max(depths)
        known[id(value)] = weight, depth + 1
        if depth >= DEPTH_MAX:
            raise DataOnly(f"the value is nested more than {DEPTH_MAX} levels deep")
        if weight > most:
            raise DataOnly("the value repeats objects so often that the size is far larger than the pickle")


def _parts(value: Any) -> tuple[Any, ...]:
    """Returns the iterables that together contain the members of a container."""
    kind = type(value)
    if kind in _SEQUENCES:
        return (value,)
    if kind in _MAPPINGS:
        return value, value.values()
    if kind is _Name:
        _refuse(f"{value.name} itself")
    if kind not in _EXCEPTIONS:
        inner = getattr(value, "__dict__", {}).values()
        return (value, inner) if isinstance(value, tuple) else (inner,)
    found = value.args, vars(value).values()
    if isinstance(value, OSError):
        return *found, (value.filename, value.filename2)
    # The members of a group are included separately, because the list from which the group was made may have changed.
    return (*found, value.exceptions) if isinstance(value, _GROUPS) else found


def _size(value: Any) -> int:
    """Returns the cost of hashing a large number or comparing a string, relative to a small number."""
    if type(value) in _TEXTUAL:
        return _LENGTHS[type(value)](value) >> 5
    size = sys.getsizeof(value)
    # Comparing a Decimal with a number takes quadratic time.
    return size >> 5 if size < 1024 else size * size >> 10


# Opcodes.

#: Types whose hashes are cached or cheap, and for which different values with equal hashes are hard to construct.
_QUICK_KEYS = frozenset({str, bytes, float, bool, type(None)})
#: The quick types, and numbers. Numbers of at most 64 bits are also quick.
_QUICK_KEYS_WITH_NUMBERS = _QUICK_KEYS | {int}
_NUMBER_BYTES = 8
#: Pattern for consecutive numbers, which are read with ``pickle``.
_NUMBERS = re.compile(rb"(?:K.|[N\x88\x89]|M..|J.{4}|G.{8}){4,2000}", re.DOTALL)
_FLOAT = Struct(">d")
_INT = Struct("<i")
_CONSTANTS: Mapping[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
#: Size of the length field of strings, bytes and bytearrays, and the function that builds the object.
_SIZED: Mapping[int, tuple[int, Callable[[memoryview], Any]]] = {
    **{code: (size, lambda view: str(view, "utf-8", "surrogatepass")) for code, size in ((ord("X"), 4), (0x8D, 8))},
    **{code: (size, bytes) for code, size in ((ord("C"), 1), (ord("B"), 4), (0x8E, 8))},
    0x96: (8, bytearray),
}


class _Reader:
    """Reads one pickle, and limits the work needed to read it."""

    def __init__(
        self, data: bytes | bytearray, buffers: Iterable[Any], allowed: Mapping[tuple[str, str], type]
    ) -> None:
        self._data = data
        self._buffers = iter(buffers)
        self._allowed = allowed
        self._work_left = WORK_MAX + WORK_PER_BYTE * len(data)
        self._quick_keys = _QUICK_KEYS_WITH_NUMBERS
        #: Counts of hashes of keys that are not quick, by ``id`` of the container. Also keeps the container alive.
        self._hashes: dict[int, tuple[Any, dict[int, int]]] = {}
        #: Number types for which the pickle contains large values. Hashing these values takes time, and the hashes are
        #: not cached.
        self.large: frozenset[type] = frozenset()
        self._has_frozensets = False
        #: Size of the longest string, bytes or number.
        self.longest = 0
        #: UUIDs whose state is not set yet.
        self.unfinished: dict[int, uuid.UUID] = {}
        #: Deques that contain deques.
        self._holders: dict[int, Any] = {}
        self._bytes_left = WEIGHT_MAX + WEIGHT_PER_BYTE * len(data)
        self._seconds_left = KEYS_SECONDS + KEYS_SECONDS_PER_BYTE * len(data)
        #: Dictionaries from which Counters were built, by ``id``.
        self.counted: dict[int, dict[Any, Any]] = {}

    def work(self, amount: int) -> None:
        """Accounts for an operation that takes time or space. Raises ``DataOnly`` if the limit is exceeded."""
        self._work_left -= amount
        if self._work_left < 0:
            raise DataOnly("reading takes far more work than the size of the pickle justifies")

    def allocate(self, size: int) -> None:
        """Accounts for memory that a library allocates. Raises ``DataOnly`` if the limit is exceeded."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise DataOnly("reading takes far more memory than the size of the pickle justifies")

    def read(self) -> Any:
        """Returns the value of the pickle."""
        data, view = self._data, memoryview(self._data)
        from_bytes, unpack_float, unpack_int = int.from_bytes, _FLOAT.unpack_from, _INT.unpack_from
        find_numbers = _NUMBERS.match
        memo: list[Any] = []
        marks: list[list[Any]] = []
        stack: list[Any] = []
        at = 0
        # If an object is truncated, `at` moves beyond the end, and the next access raises IndexError. Frequent opcodes
        # come first.
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
            elif code in _SIZED:
                width, make = _SIZED[code]
                start = at + width
                size = from_bytes(data[at:start], "little")
                at, self.longest = start + size, max(self.longest, size)
                stack.append(make(view[start:at]))
            elif code == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                self._set(stack[-1], items)
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x65:  # APPENDS
                items, stack = stack, marks.pop()
                self._append(stack[-1], items)
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
                    self.longest = max(self.longest, size)
                    self._quick_keys = _QUICK_KEYS
                    self.large |= {int}
                stack.append(from_bytes(data[start:at], "little", signed=True))
            elif code == 0x81:  # NEWOBJ
                arguments = stack.pop()
                stack[-1] = self._make(stack[-1], arguments, is_new=True)
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
                self._append(stack[-1], [item])
            elif code == 0x8F:  # EMPTY_SET
                stack.append(set())
            elif code == 0x90:  # ADDITEMS
                items, stack = stack, marks.pop()
                if type(stack[-1]) is not set:
                    _refuse("an addition to an object that is not a set")
                self._hash(stack[-1], items)
                self.insert(stack[-1], items, len(items))
            elif code == 0x91:  # FROZENSET
                items, stack = stack, marks.pop()
                self._hash(items, items)
                members: set[Any] = set()
                self.insert(members, items, len(items))
                stack.append(frozenset(members))
                self._has_frozensets = True
            elif code == 0x93:  # STACK_GLOBAL
                name = stack.pop()
                stack[-1] = self._named(stack[-1], name)
            elif code == 0x97:  # NEXT_BUFFER
                buffer = memoryview(next(self._buffers, b""))
                self._bytes_left += WEIGHT_PER_BYTE * len(buffer)
                stack.append(_Name("a buffer", buffer))
            elif code == 0x98:  # READONLY_BUFFER
                stack[-1] = _Name("a buffer", stack[-1].make.toreadonly())
            elif code == 0x95:  # FRAME
                at += 8
            elif code == 0x80:  # PROTO
                at += 1
            elif code == 0x2E:  # STOP
                if self.unfinished:
                    _refuse("a UUID without a number")
                return stack.pop()
            else:
                raise DataOnly(f"the opcode {chr(code)!r} is not used for data by pickle protocol 4 or later")
        raise IndexError

    def _make(self, named: Any, arguments: Any, *, is_new: bool = False) -> Any:
        if type(named) is not _Name or type(arguments) is not tuple:
            _refuse("a call of an object without a name")
        make = named.make
        if isinstance(make, type):
            # The caller has allowed this class and is responsible for how the class handles arguments.
            return make.__new__(make, *arguments) if is_new else make(*arguments)
        return make(self, arguments)

    def _build(self, made: Any, state: Any) -> None:
        if type(made) in self._allowed.values() and type(made) not in _EXCEPTIONS:
            _set_state(made, state)
            return
        if type(state) is not dict:
            _refuse("a state that is not a dictionary")
        self.work(len(state))
        if id(made) in self.unfinished:
            _build_uuid(self.unfinished.pop(id(made)), state)
        elif type(made) in _EXCEPTIONS:
            _build_exception(self, made, state)
        else:
            _refuse(f"{type(made).__name__} with additional state")

    def _append(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list:
            if type(target) is not collections.deque:
                _refuse("an append to an object that is not a list")
            if collections.deque in set(map(type, items)):
                # Freeing a chain of nested deques would overflow the stack.
                self._holders[id(target)] = target
                if len(self._holders) > DEPTH_MAX:
                    raise DataOnly("the value has too many nested deques")
        target.extend(items)

    def insert(self, target: Any, items: Any, size: int) -> None:
        """Inserts items within a time limit, because the cost of equal hashes cannot be predicted."""
        # Counter.update would count the items instead of inserting them.
        update = target.update if type(target) is not collections.Counter else super(collections.Counter, target).update
        if size <= 64 and len(target) <= 256 and self.longest <= COMPARED_MAX:
            update(items)
            return
        items, step = iter(items), 64
        while piece := list(islice(items, step)):
            began = time.thread_time()
            update(piece)
            took = time.thread_time() - began
            self._seconds_left -= took
            if self._seconds_left < 0:
                raise DataOnly("inserting the keys takes far more time than the size of the pickle justifies")
            step = max(1, step // 4) if took > 0.005 else min(1024, step * 2)

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) is not dict and type(target) is not collections.OrderedDict:
            _refuse("an item of an object that is not a dictionary")
        keys = items[::2]
        if not self._quick_keys.issuperset(map(type, keys)):
            self._hash(target, keys)
        self.insert(target, zip(keys, items[1::2], strict=True), len(keys))

    def _hash(self, target: Any, keys: list[Any]) -> None:
        """Accounts for hashing keys, and for comparing keys with equal hashes."""
        if self._quick_keys.issuperset(map(type, keys)):
            return
        self.work(self._count(keys))
        _, counts = self._hashes.setdefault(id(target), (target, {}))
        for key, hashed in zip(keys, map(hash, keys), strict=True):
            counts[hashed] = before = counts.get(hashed, 0) + 1
            if before > 1:
                # Comparing two keys takes less time than counting one key with its strings. Comparing two sets,
                # however, may compare every member with every other member.
                count = self._count((key,), _TEXTUAL)
                self.work((before - 1) * (1 + (count * count if self._has_frozensets else count) // 4))

    def _count(self, keys: Any, others: frozenset[type] = frozenset()) -> int:
        count = _count((keys,), self._work_left, self.large | others)
        if count is None:
            _weigh(keys, WEIGHT_MAX)
            raise DataOnly("hashing the keys takes far more work than the size of the pickle justifies")
        return count

    def _named(self, module: Any, name: Any) -> _Name:
        if type(module) is not str or type(name) is not str:
            _refuse("a name that is not a string")
        make = (
            _MAKERS.get((module, name))
            or self._allowed.get(_name_of(module, name))
            or _maker_of_exception(module, name)
        )
        if make is None:
            raise DataOnly(f"{module}.{name}")
        return _Name(f"{module}.{name}", make)


def _set_state(made: Any, state: Any) -> None:
    """Sets the state of an instance of an allowed class, like ``pickle``."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for name, value in (attributes or {}).items():
        made.__dict__[name] = value
    for name, value in (slots or {}).items():
        setattr(made, name, value)
