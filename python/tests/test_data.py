"""What is read from workers that may have been taken over."""

from __future__ import annotations

import collections
import copyreg
import datetime
import decimal
import os
import pathlib
import pickle
import resource
import sys
import uuid
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jobs
import pytest
from pools import LONG

from bulkhead import BulkheadExecutor, ResultUnreadable
from bulkhead._data import _MAKERS, DataOnly, loads


def short_named(module: str, name: str) -> bytes:
    """What names something in the midst of a pickle."""
    return b"".join(b"\x8c%c%b" % (len(word), word.encode()) for word in (module, name)) + b"\x93"


def named(module: str, name: str) -> bytes:
    """The beginning of a pickle that names something."""
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


def test_data_is_read() -> None:
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
def test_what_is_no_data_is_refused(pickled: bytes) -> None:
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
def test_what_is_named_cannot_be_changed(module_and_name: tuple[str, str], change: bytes) -> None:
    with pytest.raises(DataOnly):
        loads(named(*module_and_name) + change)
    if module_and_name in _MAKERS and not module_and_name[0].startswith("pathlib._"):
        assert not hasattr(getattr(sys.modules[module_and_name[0]], module_and_name[1]), "_x")


def test_extensions_of_copyreg_are_not_looked_up() -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        assert pickle.loads(b"\x80\x02\x82\xf0.") is os.system
        for pickled in (b"\x80\x02\x82\xf0.", b"\x80\x02\x83\xf0\0.", b"\x80\x02\x84\xf0\0\0\0."):
            with pytest.raises(DataOnly, match="opcode"):
                loads(pickled)
    finally:
        copyreg.remove_extension("os", "system", 240)


#: A tuple of the value before it, twice, two hundred times over: each takes twice as long to hash.
TWICE = b"K\x01" + b"".join(b"\x94h%c\x86" % number for number in range(200))
#: A number of 1 MiB, and a set of a thousand tuples with it.
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
#: Numbers that have the same hash.
EQUAL = b"".join(b"\x8a\x0a" + (number * ((1 << 61) - 1)).to_bytes(10, "little") + b"N" for number in range(100_000))
#: A dictionary of a thousand numbers, of which a few bytes make a copy.
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
        (b"\x80\x04" + b"(" * 100_000 + b"K\x01" + b"\x91" * 100_000 + b".", "deep"),
        (b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", "deep"),
        (b"\x80\x04]\x94h\x00a.", "itself"),
        (b"\x80\x04" + LARGE + b"\x90.", "size"),
        (b"\x80\x05" + LARGE_DECIMAL + b"\x90.", "size"),
        (b"\x80\x04}(" + EQUAL + b"u.", "size"),
        (b"\x80\x04" + COPIED + named("collections", "Counter")[2:] + b"\x94](" + COPY * 1000 + b"e.", "second"),
    ],
)
def test_what_is_read_costs_no_more_than_its_size(pickled: bytes, why: str) -> None:
    with pytest.raises(DataOnly, match=why):
        loads(pickled)


#: Each holds the one before it twice.
PAIRS = b"K\x01\x85" + b"".join(b"\x94h" + bytes([index]) + b"\x86" for index in range(60))
RANGE = short_named("builtins", "range") + b"J\x80\x96\x98\x00\x85R"
BOMBS = {
    "a key of pairs of itself": b"}" + PAIRS + b"Ns.",
    "a member of pairs of itself": b"\x8f(" + PAIRS + b"\x90.",
    "a frozenset of pairs of itself": b"(" + PAIRS + b"\x91.",
    "a deep key": b"}K\x01" + b"\x85" * 1_000_000 + b"Ns.",
    "a deep value": b"K\x01" + b"\x85" * 1_000_000 + b".",
    "deep slices": short_named("builtins", "slice")
    + b"\x94"
    + b"h\x00" * 100_000
    + b"K\x01"
    + b"\x85R" * 100_001
    + b".",
    "a number that is hashed again and again": b"}\x8b"
    + (1 << 16).to_bytes(4, "little")
    + b"\x01" * (1 << 16)
    + b"\x94"
    + b"Nsh\x00" * 100_000
    + b"Ns.",
    "a set of a range": short_named("builtins", "set") + RANGE + b"\x85R.",
    "a deque of a range": short_named("collections", "deque") + RANGE + b"\x85R.",
    "a Counter of a range": short_named("collections", "Counter") + RANGE + b"\x85R.",
    "an end of the program": short_named("builtins", "SystemExit") + b")R.",
    "Ctrl-C": short_named("builtins", "KeyboardInterrupt") + b")R.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_takes_more_than_its_size_tells_is_refused(bomb: str) -> None:
    """Each would hold the interpreter for ever, end it, or take its memory."""
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
    for cut in range(len(written := pickle.dumps([*DATA, *values[1:]], 4))):
        with pytest.raises(pickle.UnpicklingError):
            loads(written[:cut])


@pytest.mark.parametrize(
    "pickled",
    [b"\x80\x05Nr\xff\xff\xff\x0f.", b"\x80\x05Np268435455\n.", b"\x80\x05(K\x01" * 2000 + b"r\xff\xff\xff\x0f."],
)
def test_a_few_bytes_do_not_take_all_memory(pickled: bytes) -> None:
    """What ``pickle.loads`` makes of them has 4 GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataOnly, match="opcode"):
        loads(pickled)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.parametrize("call", [jobs.bomb, jobs.nested_bomb, jobs.raise_bomb])
def test_a_worker_that_was_taken_over_runs_nothing_here(call: Callable[..., Any], tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    with BulkheadExecutor(1, sandbox="strict") as pool:
        error = pool.submit(call, made).exception(LONG)
        assert isinstance(error, ResultUnreadable)
        assert "mkdir" in str(error)
        assert not os.path.exists(made)
        assert pool.submit(jobs.plain_data, DATA).result(LONG) == DATA
        assert isinstance(pool.submit(int, "x").exception(LONG), ValueError)
    # Who trusts what runs there says so. Without a sandbox it is as in any pool.
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
        (b"E\0\0\0\0" + named("builtins", "SystemExit") + b")R.", ResultUnreadable),
        (b"E\0\0\0\0" + named("builtins", "KeyError") + b")R.", KeyError),
        (named("pathlib", "PosixPath") + b"N}\x8c\x04_str\x8c\x01xs\x86b.", ResultUnreadable),
        (b"\x80\x04}K\x01" + b"\x85" * 1_000_000 + b"Ns.", ResultUnreadable),
        (b"", ResultUnreadable),
    ],
)
def test_what_a_worker_answers_costs_its_call_alone(answer: bytes, error: type[Exception]) -> None:
    with BulkheadExecutor(1, sandbox="default") as pool:
        pool.submit(jobs.answer_next, answer).result(LONG)
        raised = pool.submit(jobs.pid).exception(LONG)
        assert type(raised) is error
        assert pool.submit(jobs.double, 4).result(LONG) == 8
