"""Tests of reading results from potentially compromised workers."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import datetime
import decimal
import itertools
import os
import pathlib
import pickle
import pickletools
import resource
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from random import Random
from typing import Any

import jobs
import pytest
from pools import LONG

from bulkhead import BulkheadExecutor, ResultRefused, ResultUnreadable, _data
from bulkhead._data import _MAKERS, DataOnly, _longest_if_simple, loads


def short_named(module: str, name: str) -> bytes:
    """Returns opcodes that name an object, for use within a pickle."""
    return b"".join(b"\x8c%c%b" % (len(word), word.encode()) for word in (module, name)) + b"\x93"


def named(module: str, name: str) -> bytes:
    """Returns the start of a pickle that names an object."""
    return b"\x80\x05" + short_named(module, name)


DATA: list[Any] = [
    None,
    (True, -1, 1 << 200, 0.5, 2 + 3j, "größe", b"bytes", bytearray(b"array"), range(3), slice(1, None)),
    {"list": [1, [2]], "set": {1, 2}, "frozen": frozenset("ab")},
    (collections.OrderedDict(a=1), collections.deque([1], 3), collections.Counter("aab")),
    (datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(1), decimal.Decimal("1.50")),
    (pathlib.Path("/a"), pathlib.PurePosixPath("b"), uuid.UUID(int=7), uuid.uuid1(), [uuid.UUID(int=7)] * 2),
    {
        (1, "a", (2,)): {frozenset({(1, 2)})},
        1 << 100: 1,
        -1: 2,
        uuid.UUID(int=8): 3,
        pathlib.Path("a"): decimal.Decimal(1),
    },
    (collections.deque(), collections.deque([1, [2]]), collections.OrderedDict({(1, 2): [3]}), collections.Counter()),
    (datetime.date(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, fold=1), datetime.time(23, fold=1)),
    (datetime.time(1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "x")), datetime.timedelta(-1, 2, 3)),
    (200, [{"id": number, "name": f"n{number}", "at": (number, 0.5)} for number in range(3000)]),
    [[0] * 1000] * 1000,
    {"rows": [(number, None, True) for number in range(3000)], "\ud800": b"\xff"},
]


def test_plain_data_is_read() -> None:
    for value in DATA:
        assert loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) == value


def test_exceptions_are_read() -> None:
    named = ImportError("no", name="module", path="/path")
    noted = ValueError("bad", 1)
    noted.__notes__ = ["note"]  # type: ignore[attr-defined]
    noted.code = 5  # type: ignore[attr-defined]
    told = [KeyError("k"), OSError(2, "no", "/a"), UnicodeDecodeError("utf-8", b"x", 0, 1, "why")]
    try:
        object().missing  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        told.append(error)
    for error in [named, noted, *told]:
        read = loads(pickle.dumps(error, pickle.HIGHEST_PROTOCOL))
        assert (type(read), read.args, str(read)) == (type(error), error.args, str(error))
        assert vars(read) == vars(error)
    read = loads(pickle.dumps(named, pickle.HIGHEST_PROTOCOL))
    assert (read.name, read.path) == ("module", "/path")
    if sys.version_info >= (3, 11):
        group = loads(pickle.dumps(ExceptionGroup("both", [ValueError(1), KeyError(2)]), 5))  # noqa: F821
        assert [type(error) for error in group.exceptions] == [ValueError, KeyError]


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04cos\nsystem\n.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x0eException.mro\x93.",
        b"\x80\x04\x8c\x08datetime\x8c\x0dsys.setprofile\x93.",
        b"\x80\x04\x8c\x06uuid\x8c\x09os.system\x93.",
        b"\x80\x02\x82\x01.",
        b"Pname\n.",
        *(named("builtins", name) + b"K\x01\x85R." for name in ("SystemExit", "KeyboardInterrupt", "StopIteration")),
        *(named("builtins", name) + b"K\x05\x85R." for name in ("bytes", "bytearray", "set", "list", "int", "str")),
        named("datetime", "date") + b"C\x04\x07\xea\x01\xff\x85R.",
        named("decimal", "Decimal") + b"K\x01\x85R.",
        named("uuid", "UUID") + b")\x81.",
        named("uuid", "UUID") + b")\x81}\x8c\x03int\x8c\x01xsb.",
        named("uuid", "SafeUUID") + b"K\x00\x85R.",
        named("builtins", "UnicodeDecodeError") + b"(\x8c\x01xC\x01xJ\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x8c\x01xtR.",
        named("builtins", "ValueError") + b")R}\x8c\x09__cause__Nsb.",
        named("builtins", "slice") + b"]NN\x87R.",
        named("builtins", "range") + b"K\x00\x8b\x20\x00\x00\x00" + b"\x01" * 32 + b"K\x01\x87R.",
        named("collections", "deque") + b"\x85.",
        b"\x80\x05}" + named("builtins", "ValueError") + b"K\x01s.",
        b"\x80\x05)K\x01a.",
        b"\x80\x05(\x82\x01e.",
        b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"\x80\x05G\x00.",
        b"\x80\x05J\x00.",
        b"\x80\x05h\x00.",
        b"\x80\x05.",
        b"\x80\x05u.",
        b"",
    ],
)
def test_rejects_values_other_than_data(pickled: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        loads(pickled)


def test_data_of_all_sizes_is_read() -> None:
    numbers = [*range(70000), *(1 << bits for bits in range(0, 3000, 7)), -1, -(1 << 40), 0.5, None, True]
    texts = ["x" * size for size in (0, 1, 255, 256, 70000)]
    data = [text.encode() for text in texts]
    value = {"numbers": numbers, "texts": texts, "again": texts, "data": data, "arrays": [*map(bytearray, data)]}
    written = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    for pickled in (written, bytearray(written), pickle._dumps(value, pickle.HIGHEST_PROTOCOL)):  # type: ignore[attr-defined]
        assert loads(pickled) == value


@pytest.mark.parametrize("module_and_name", [*_MAKERS, ("builtins", "ValueError"), ("uuid", "SafeUUID")])
@pytest.mark.parametrize(
    "change", [b"N}\x8c\x02_xK\x01s\x86b.", b"}\x8c\x02_xK\x01sb.", b"\x8c\x02_xK\x01s.", b"K\x01a."]
)
def test_named_objects_cannot_be_modified(module_and_name: tuple[str, str], change: bytes) -> None:
    with pytest.raises(DataOnly):
        loads(named(*module_and_name) + change)
    if module_and_name in _MAKERS and not module_and_name[0].startswith("pathlib._"):
        assert not hasattr(getattr(sys.modules[module_and_name[0]], module_and_name[1]), "_x")


def test_rejects_copyreg_extensions() -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0.") is os.system
        for pickled in (b"\x80\x02\x82\xf0.", b"\x80\x02\x83\xf0\0.", b"\x80\x02\x84\xf0\0\0\0."):
            with pytest.raises(DataOnly, match="opcode"):
                loads(pickled)
    finally:
        copyreg.remove_extension("os", "system", 240)


#: A tuple that contains the previous value twice, two hundred levels deep. Each level takes twice as long to hash.
TWICE = b"K\x01" + b"".join(b"\x94h%c\x86" % number for number in range(200))
#: A number of 1 MiB, and a set of a thousand tuples that contain the number.
LARGE = (
    b"\x8b\x00\x00\x10\x00"
    + b"\x01" * (1 << 20)
    + b"\x94\x8f("
    + b"".join(b"h\x00M%c%c\x86" % (n % 256, n // 256) for n in range(1000))
)
LARGE_DECIMAL = (
    named("decimal", "Decimal")
    + b"X\x00\x00\x10\x00"
    + b"1" * (1 << 20)
    + b"\x85R\x94\x8f("
    + b"".join(b"h\x00M%c%c\x86" % (n % 256, n // 256) for n in range(3000))
)
#: Numbers with equal hashes.
EQUAL = b"".join(b"\x8a\x0a" + (number * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for number in range(100_000))
#: A dictionary of a thousand numbers, and the few bytes that copy it.
COPIED = b"}\x94(" + b"".join(b"M%c%cN" % (n % 256, n // 256) for n in range(1000)) + b"u"
COPY = b"h\x01h\x00\x85R"


@pytest.mark.parametrize(
    ("pickled", "why"),
    [
        (b"\x80\x04}" + TWICE + b"Ns.", "often"),
        (b"\x80\x04" + TWICE + b".", "often"),
        (b"\x80\x04(" + TWICE + b"\x91.", "often"),
        (b"\x80\x04}K\x01" + b"\x85" * 1_000_000 + b"Ns.", "deep"),
        (b"\x80\x04K\x01" + b"\x85" * 1_000_000 + b".", "deep"),
        (b"\x80\x04" + b"(" * 100_000 + b"K\x01" + b"\x91" * 100_000 + b".", "deep|size"),
        (b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "deep"),
        (b"\x80\x04]\x94h\x00a.", "itself"),
        (b"\x80\x04" + LARGE + b"\x90.", "size"),
        (b"\x80\x05" + LARGE_DECIMAL + b"\x90.", "size"),
        (b"\x80\x04}(" + EQUAL + b"u.", "size"),
        (b"\x80\x04" + COPIED + named("collections", "Counter")[2:] + b"\x94](" + COPY * 1000 + b"e.", "second"),
    ],
)
def test_work_is_limited_by_pickle_size(pickled: bytes, why: str) -> None:
    with pytest.raises(DataOnly, match=why):
        loads(pickled)


#: Pairs that each contain the previous pair twice.
PAIRS = b"K\x01\x85" + b"".join(b"\x94h" + bytes([index]) + b"\x86" for index in range(60))
RANGE = short_named("builtins", "range") + b"J\x80\x96\x98\x00\x85R"
BOMBS = {
    "a key of shared pairs": b"}" + PAIRS + b"Ns.",
    "a set member of shared pairs": b"\x8f(" + PAIRS + b"\x90.",
    "a frozenset of shared pairs": b"(" + PAIRS + b"\x91.",
    "a deep key": b"}K\x01" + b"\x85" * 1_000_000 + b"Ns.",
    "a deep value": b"K\x01" + b"\x85" * 1_000_000 + b".",
    "deep slices": short_named("builtins", "slice")
    + b"\x94"
    + b"h\x00" * 100_000
    + b"K\x01"
    + b"\x85R" * 100_001
    + b".",
    "a long number that is hashed repeatedly": b"}\x8b"
    + (1 << 16).to_bytes(4, "little")
    + b"\x01" * (1 << 16)
    + b"\x94"
    + b"Nsh\x00" * 100_000
    + b"Ns.",
    "a set of a range": short_named("builtins", "set") + RANGE + b"\x85R.",
    "a deque of a range": short_named("collections", "deque") + RANGE + b"\x85R.",
    "a Counter of a range": short_named("collections", "Counter") + RANGE + b"\x85R.",
    "SystemExit": short_named("builtins", "SystemExit") + b")R.",
    "KeyboardInterrupt": short_named("builtins", "KeyboardInterrupt") + b")R.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_rejects_pickles_that_need_excessive_work(bomb: str) -> None:
    """Without limits, each pickle would block the interpreter forever, terminate it, or exhaust its memory."""
    with pytest.raises(DataOnly):
        loads(b"\x80\x04" + BOMBS[bomb])


def test_tuples_in_dicts_and_sets_are_read() -> None:
    shared = (1, (2, "three"))
    values: list[Any] = [
        {(x, x + 1): ((x,), {"of": (shared, shared)}) for x in range(3000)},
        {shared, frozenset({1, (2, 3)})},
        [{"at": (1 << 70, -1)}, {(1 << 70): shared}],
        collections.OrderedDict({(1, 2): [shared]}),
        {datetime.date(2026, 1, day): uuid.UUID(int=day) for day in range(1, 20)},
        {pathlib.Path("/a/b"): decimal.Decimal("0.1")},
        collections.Counter({(1, 2): 3}),
        ValueError("why", {(1, 2): 3}).args,
    ]
    for value in values:
        for protocol in (4, 5):
            assert loads(pickle.dumps(value, protocol)) == value
    for cut in range(len(written := pickle.dumps([*DATA[:10], *values[1:]], 4))):
        with pytest.raises(pickle.UnpicklingError):
            loads(written[:cut])


@pytest.mark.parametrize(
    "pickled",
    [b"\x80\x05Nr\xff\xff\xff\x0f.", b"\x80\x05Np268435455\n.", b"\x80\x05(K\x01" * 2000 + b"r\xff\xff\xff\x0f."],
)
def test_small_pickle_cannot_exhaust_memory(pickled: bytes) -> None:
    """``pickle.loads`` allocates 4 GiB for these pickles."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataOnly, match="opcode"):
        loads(pickled)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize("call", [jobs.bomb, jobs.nested_bomb, jobs.raise_bomb])
def test_compromised_worker_cannot_run_code_in_the_caller(call: Callable[..., Any], tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    with BulkheadExecutor(1, sandbox="strict") as pool:
        error = pool.submit(call, made).exception(LONG)
        assert isinstance(error, ResultRefused)
        assert not isinstance(error, BrokenProcessPool)
        assert "mkdir" in str(error)
        assert not os.path.exists(made)
        assert pool.submit(jobs.plain_data, DATA).result(LONG) == DATA
        assert isinstance(pool.submit(int, "x").exception(LONG), ValueError)
    # The caller can choose to trust confined workers. Workers without a sandbox are trusted, as in any other pool.
    with BulkheadExecutor(1, sandbox="strict", results="any") as pool:
        pool.submit(call, made).exception(LONG)
        assert os.path.exists(made)
    with BulkheadExecutor(1, results="data") as pool:
        assert isinstance(pool.submit(jobs.bomb, made + "2").exception(LONG).__cause__, DataOnly)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="results"):
        BulkheadExecutor(1, results="some")
    with pytest.raises(ValueError, match="marshal"):
        BulkheadExecutor(1, results="data", pickler="marshal")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"Ithe initializer failed", BrokenProcessPool),
        (b"E\0\0\0\0" + named("builtins", "SystemExit") + b")R.", ResultRefused),
        (b"E\0\0\0\0" + named("builtins", "KeyError") + b")R.", KeyError),
        (named("pathlib", "PosixPath") + b"N}\x8c\x04_str\x8c\x01xs\x86b.", ResultRefused),
        (b"\x80\x04}K\x01" + b"\x85" * 1_000_000 + b"Ns.", ResultRefused),
        (b"", ResultUnreadable),
    ],
)
def test_invalid_reply_fails_only_its_call(answer: bytes, error: type[Exception]) -> None:
    with BulkheadExecutor(1, sandbox="default") as pool:
        pool.submit(jobs.answer_next, answer).result(LONG)
        raised = pool.submit(jobs.pid).exception(LONG)
        assert type(raised) is error
        assert pool.submit(jobs.double, 4).result(LONG) == 8


# Simple pickles, which are read with ``pickle``.


def hashed_keys(pickled: bytes) -> Iterator[Any]:
    """Yields the objects that a pickle hashes, by simulating the opcodes of data on placeholders for their kinds."""
    stack: list[Any] = []
    memo: list[Any] = []
    marks: list[int] = []

    def pop_to_mark() -> list[Any]:
        at = marks.pop()
        taken = stack[at:]
        del stack[at:]
        return taken

    def target() -> Any:
        if len(stack) <= (marks[-1] if marks else 0):
            raise IndexError
        return stack[-1]

    def pop() -> Any:
        target()
        return stack.pop()

    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE":
            memo.append(target())
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            stack.append([name])
        elif name in ("SETITEM", "SETITEMS"):
            items = pop_to_mark() if name == "SETITEMS" else [pop(), pop()][::-1]
            kind = target()
            if items and (type(kind) is not list or kind[0] != "EMPTY_DICT"):
                return
            for key in items[::2]:
                if type(key) in (list, bytearray):
                    return
                yield key
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = pop_to_mark() if name != "APPEND" else [pop()]
            kind = target()
            if items and type(kind) is not bytearray and (type(kind) is not list or kind[0] == "EMPTY_DICT"):
                return
            if name == "ADDITEMS":
                yield from items
        elif name == "STOP":
            return
        elif name.startswith("TUPLE"):
            size = int(name[5:] or 0)
            stack.append(tuple([pop() for _ in range(size)]) if size else tuple(pop_to_mark()))
        else:
            assert argument is not None or name in ("NONE", "NEWTRUE", "NEWFALSE"), name
            stack.append(argument)


def keys_of(pickled: bytes) -> list[Any]:
    found = []
    try:
        for key in hashed_keys(pickled):
            found.append(key)
    except (IndexError, ValueError):
        pass
    return found


KEYS = [b"\x8c\x01a\x94", b"\x8c\x02bc", *(b"h%c" % number for number in range(5))]
LONG_TEXT = b"X\x2c\x01\x00\x00" + b"y" * 300
SCALARS = [b"K\x05", b"K\x05\x94", b"\x8a\x01\x07", b"C\x01z\x94", b"j\x01\0\0\0", LONG_TEXT + b"\x94"]
NOT_SIMPLE = [LONG_TEXT, b"\x94", b"\x85", b"\x85\x94", b"\x8f", b"\x8a\x09" + b"\x01" * 9, b"\x8b\x01\0\0\0\x01"]
CONTAINERS = [b"}", b"}\x94", b"}(", b"}\x94(", b"](", b"]\x94(", b"]", b"]\x94", b"]\x94K\x05a", b"](K\x05K\x06e"]
CLOSING = [b"u", b"u", b"u", b"u(", b"e", b"e(", b"a", b"s", b"(", b"\x95" + bytes(8)]


def phrases(random: Random) -> bytes:
    """Returns random bytes that resemble a pickle of dictionaries and lists."""
    said = [b"\x80\x04", random.choice([b"}\x94(", *CONTAINERS])]
    for _ in range(random.randrange(2, 10)):
        chance = random.random()
        if chance < 0.5:
            said += [random.choice(KEYS), random.choice([random.choice([*KEYS, *CONTAINERS]), *SCALARS])]
        if chance > 0.4:
            said.append(random.choice([*CONTAINERS, *CLOSING, *CLOSING]))
        if chance > 0.9:
            said.append(random.choice([*KEYS, *SCALARS, *NOT_SIMPLE]))
    return b"".join([*said, b"."])


def test_fast_path_limits_numeric_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pickles must not have numbers as keys. Single keys, which are set by SETITEM, are counted."""
    monkeypatch.setattr(_data, "HASHING_MAX", -1)
    monkeypatch.setattr(_data, "NUMERIC_KEYS_MAX", 3)
    random = Random(7)
    honest = [
        [{"id": 5, "name": "x", "list": [1, 2], "of": {"a": None}} for _ in range(3)],
        {"a": {"b": [0.5, "t"], "c": [{"k": 1, "l": 2}]}, "x" * 300: "y" * 300, "z": "y" * 300},
        [[1, 2], [{"a": 1}], {"b": {}}, []],
    ]
    pickles = [pickle.dumps(value, 4) for value in honest]
    assert [_longest_if_simple(pickled) is not None for pickled in pickles] == [True, False, True]
    taken = 0
    for turn in range(30_000):
        pickled = phrases(random)
        if turn % 4 == 0:
            mutated = bytearray(random.choice(pickles))
            for _ in range(random.randrange(1, 4)):
                at = random.randrange(2, len(mutated))
                mutated[at : at + random.randrange(3)] = random.choice([*KEYS, *SCALARS, *NOT_SIMPLE, *CLOSING])
            pickled = bytes(mutated)
        if _longest_if_simple(pickled) is None:
            continue
        taken += 1
        others = [key for key in keys_of(pickled) if type(key) not in (str, bytes)]
        assert not any(type(key) is tuple for key in others), pickled
        assert len(others) <= min(_data.NUMERIC_KEYS_MAX, pickled.count(b"s")), pickled
    assert taken > 3_000


# Pickles that caused problems in earlier versions.


def short(text: str) -> bytes:
    return b"\x8c%c%b" % (len(text), text.encode())


def long(text: bytes) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text


def integer(number: int) -> bytes:
    digits = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + len(digits).to_bytes(4, "little") + digits


def built(name: str, state: bytes) -> bytes:
    """Returns the opcodes for an exception with a state."""
    return short_named("builtins", name) + b")R}" + state + b"sb"


def chained_keys(bits: int, times: int) -> bytes:
    """Returns numbers that fill the slots in which a dictionary searches for one key, which is set repeatedly."""
    keys, place = [1 << bits], 0
    while len(keys) < (1 << bits) * 2 // 3 - 1:
        place = (5 * place + 1) & ((1 << bits) - 1)
        keys.append(place)
    pairs = [b"J%bN" % key.to_bytes(4, "little") for key in keys] + [b"K\x00N"] * times
    return b"}" + b"".join(b"(%bu" % b"".join(pairs[at : at + 1000]) for at in range(0, len(pairs), 1000))


def decimal_of_the_hash_of_a_number() -> bytes:
    digits = 400_000
    modulus = (1 << 61) - 1
    number = 1 << (digits * 10 // 3)
    number += (7 * (pow(10, digits, modulus) - 1) * pow(9, -1, modulus) - number) % modulus
    made = short_named("decimal", "Decimal") + long(b"7" * digits) + b"\x85R\x94" + integer(number) + b"\x94"
    return b"(" + made + b"\x8f(h\x00h\x01\x90" * 100 + b"t"


#: A list of a hundred references, three levels deep.
SHARED = b"\x94(" + b"h\x00" * 99 + b"t\x94(" + b"h\x01" * 99 + b"t\x94(" + b"h\x02" * 99 + b"t"
DEQUE = short_named("collections", "deque")
GROUP = short_named("builtins", "ExceptionGroup")
EQUAL_TEXTS = long(b"a" * 1_500_000)


def equal_tuples_of_texts() -> bytes:
    """Returns two equal tuples, each with a million references to one long string, which are compared one by one."""
    first, second = (
        EQUAL_TEXTS + b"\x94(" + b"h%c" % at * 1000 + b"t\x94(" + b"h%c" % (at + 1) * 1000 + b"t\x94" for at in (0, 3)
    )
    return b"(" + first + second + b"}(h\x02Nh\x05Nut"


def equal_sets_of_one_hash() -> bytes:
    """Returns two sets of 512 members with equal hashes, so that all pairs are compared, and data that adds size."""
    members = [
        b"(" + b"".join(numbers) + b"t"
        for numbers in itertools.product((b"J" + b"\xff" * 4, b"J\xfe" + b"\xff" * 3), repeat=9)
    ]
    members_of_both = b"(" + b"".join(members) + b"\x91\x94"
    said = b"(" + members_of_both * 2 + long(b"p" * 4000) * 2000
    return said + (b"}(h\x00N" + b"h\x01N" * 10 + b"u") * 4000 + b"t"


HARM = {
    "numbers with a long probe sequence": chained_keys(17, 170_000),
    "numbers with a long probe sequence, and a tuple": b"(" + chained_keys(17, 170_000) + b")t",
    "equal long keys": b"}" + EQUAL_TEXTS + b"Ns(" + EQUAL_TEXTS + b"\x94N" + b"h\x00N" * 500_000 + b"u",
    "equal long members": b"\x8f(" + EQUAL_TEXTS + b"\x90(" + EQUAL_TEXTS + b"\x94" + b"h\x00" * 600_000 + b"\x90",
    "a decimal and a number": decimal_of_the_hash_of_a_number(),
    "deques of deques": DEQUE + b"\x94)R" + b"h\x00)R" * 200_000 + b"a" * 200_000,
    "deques of deques, left behind": b"N(" + DEQUE + b"\x94)R" + b"h\x00)R" * 200_000 + b"a" * 200_000 + b"\x91",
    "an error with a large number": b"(" + short_named("builtins", "OSError") + b"\x94" + integer(1 << 24_000_000)
    + b"N\x86\x94" + b"h\x00h\x01R" * 400_000 + b"t",
    "equal tuples of texts": equal_tuples_of_texts(),
    "equal sets of one hash": equal_sets_of_one_hash(),
    "copies of a bytearray": b"(" + short_named("builtins", "UnicodeDecodeError") + b"\x94(\x8c\x01x\x96"
    + (1 << 20).to_bytes(8, "little") + bytes(1 << 20) + b"K\x00K\x01\x8c\x01yt\x94" + b"h\x00h\x01R" * 5000 + b"t",
    "eight million objects": b"(((}\x94" + b"h\0" * 252 + b"t\x94" + b"h\1" * 252 + b"t\x94" + b"h\2" * 120 + b"t",
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_rejects_harmful_pickles(harm: str, tmp_path: Path) -> None:
    """Reads the pickle in a process with limited CPU time and 2 GiB of memory. It must be read or refused in time."""
    path = tmp_path / "pickled"
    path.write_bytes(b"\x80\x05" + HARM[harm] + b".")
    code = """if True:
        import resource, sys
        from bulkhead._data import DataOnly, loads
        resource.setrlimit(resource.RLIMIT_CPU, (12, 12))
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        try:
            loads(open(sys.argv[1], "rb").read())
        except DataOnly:
            pass
        print("end")
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(_data.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        timeout=5 * LONG,
        check=False,
        env=environment,
    )
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stderr


@pytest.mark.parametrize(
    "pickled",
    [
        short_named("builtins", "OSError") + b"K\x02N" + PAIRS + b"\x87R",
        short_named("builtins", "SyntaxError") + b"\x8c\x01m(\x8c\x01fK\x01K\x01\x8c\x03abcK\x01J\0\0\0\x3ft\x86R",
        short_named("builtins", "SyntaxError") + b"\x8c\x01m(\x8c\x01fK\x01K\x01\x8c\x03abcK\x01]t\x86R",
        short_named("builtins", "SyntaxError") + b"\x8c\x01m(\x8c\x01fK\x01K\x01K\x05t\x86R",
        built("ValueError", short("__notes__") + RANGE),
        built("ValueError", short("__notes__") + b"](K\x01e"),
        built("ValueError", short("__notes__") + b"\x8c\x01x"),
        *(built("ValueError", short(name) + b"K\x05") for name in ("with_traceback", "__class__")),
        built("StopAsyncIteration", b"\x8c\x01xN"),
        long(b"a" * 100_000) + SHARED,
        integer(1 << 4_000_000) + SHARED,
        short_named("pathlib", "PosixPath") + long(b"a" * 100_000) + b"\x85R" + SHARED,
        short_named("builtins", "slice") + long(b"a" * 100_000) + b"NN\x87R",
        # A bytearray that is extended later and referenced very often.
        b"}(\x8c\x01a\x96" + bytes(8) + b"\x94" + b"(%be" % (b"K\x01" * 1000) * 400
        + b"\x8c\x01b]" + b"(%be" % (b"h\x00" * 1000) * 100 + b"u",
        built("ValueError", short("print_file_and_line") + b"K\x01"),
    ],
)  # fmt: skip
def test_rejects_pickles_with_hidden_objects(pickled: bytes) -> None:
    with pytest.raises(DataOnly):
        loads(b"\x80\x05" + pickled + b".")


def test_exception_group_members_are_checked_after_list_changes() -> None:
    """The members of a group are checked even if the list from which the group was made has changed."""
    if sys.version_info < (3, 11):
        pytest.skip("NOT RUN: Python 3.10 has no exception groups")
    # A deque contains the previous group twice. The next group is made from this deque. Then the deque gets other
    # members.
    said = GROUP + b"\x94\x8c\x01m" + DEQUE + b"\x94)K\x02\x86R\x94(" + short_named("builtins", "ValueError")
    said += b")R\x94h\x03e\x86R\x94h\x02(NNe"
    for number in range(4, 104, 2):
        said += b"h\x00\x8c\x01mh\x01)K\x02\x86R\x94(h%ch%ce\x86R\x94h%c(NNe" % (number, number, number + 1)
    with pytest.raises(DataOnly, match="often"):
        loads(b"\x80\x05(" + said + b"t.")


def test_traceback_of_an_untrusted_exception_runs_no_code() -> None:
    state = b"(" + b"".join(map(short, ("name", "antigravity", "name_from", "x", "path", "/p"))) + b"u"
    error = loads(b"\x80\x05" + short_named("builtins", "ImportError") + b"\x8c\x01m\x85R}" + state + b"b.")
    assert (error.name, error.path, getattr(error, "name_from", None)) == ("antigravity", "/p", None)
    error = loads(b"\x80\x05" + built("NameError", short("name") + short("danger")) + b".")
    assert (error.name, vars(error)) == (None, {})
    said = built("ValueError", short("__notes__") + b"]\x94\x8c\x01na")
    noted, notes = loads(b"\x80\x05(" + said + b"h\x00(K\x05et.")
    assert (noted.__notes__, notes) == (["n"], ["n", 5])


def test_rejected_values_are_not_kept_or_shown() -> None:
    """Refused values must not be in the error, its cause or its frames."""
    key = long(b"a" * 1_000_000) + b"".join(b"\x94h%c\x86" % number for number in range(20))
    for pickled in (built("ValueError", key + b"N"), key + b"\x00", short_named("decimal", "Decimal") + key + b"\x85R"):
        with pytest.raises(DataOnly) as caught:
            loads(b"\x80\x05" + pickled + b".")
        assert len(str(caught.value)) < 1000
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)
        assert [frame.name for frame in caught.traceback][1:] == ["loads"]


def test_message_does_not_contain_a_rejected_number() -> None:
    """Converting the number to digits would take quadratic time."""
    said = short_named("uuid", "UUID") + b")\x81}(\x8c\x03intK\x01\x8c\x07is_safe" + integer(1 << 10_000) + b"ub"
    with pytest.raises(DataOnly, match="UUID made from an invalid number"):
        loads(b"\x80\x05" + said + b".")


def test_traceback_of_a_syntax_error_does_not_open_files() -> None:
    if sys.version_info < (3, 14):
        pytest.skip("NOT RUN: before Python 3.14, no such traceback opens a file")
    place = ("file", 1, 7, "a = 1 fi b", 1, 9, (1, 0, None))
    error = loads(pickle.dumps(SyntaxError("invalid syntax", place), 5))
    assert (error.args[1], error._metadata) == (place, None)


def test_no_recursion_error_escapes() -> None:
    with contextlib.suppress(DataOnly):
        loads(b"\x80\x05\x8f(N" + b"\x85" * 990 + b"N" + b"\x85" * 990 + b"\x90.")


def test_callers_decimal_context_is_not_used() -> None:
    with decimal.localcontext(decimal.Context(traps=[])) as context:
        with pytest.raises(DataOnly):
            loads(named("decimal", "Decimal") + b"\x8c\x01x\x85R.")
        assert loads(pickle.dumps({decimal.Decimal(1): 2, 1.5: 3}, 5)) == {decimal.Decimal(1): 2, 1.5: 3}
        assert not any(context.flags.values())


def test_large_honest_data_is_read() -> None:
    shared = [str(number) for number in range(50)]
    values: list[Any] = [
        {(x, y): 0 for x in range(-100, 100) for y in range(-100, 100)},
        {frozenset((x, y)) for x in range(-50, 50) for y in range(-50, 50)},
        set(itertools.product((-1, -2, 0), repeat=9)),
        [{"id": number, "texts": shared} for number in range(100_000)],
        {number * 2654435761 % (1 << 61): number for number in range(50_000)},
        [{"id": number, "text": "x" * 5000, "of": {"a": [number, None]}, "b": b"y" * 300} for number in range(100)],
        (200, [{"id": number, "name": f"n{number}"} for number in range(3000)]),
        collections.Counter((number % 100, -(number % 7)) for number in range(10_000)),
        [ValueError(range(1 << 100)).args],
    ]
    for value in values:
        for protocol in (4, 5):
            assert loads(pickle.dumps(value, protocol)) == value
    assert [loads(pickle.dumps(array, 4)) for array in (bytearray(), bytearray(b"abc"))] == [b"", b"abc"]
