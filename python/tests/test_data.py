"""What is read from workers that may have been taken over."""

from __future__ import annotations

import collections
import datetime
import decimal
import os
import pathlib
import pickle
import resource
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
from pools import LONG

from bulkhead import BulkheadExecutor, ResultUnreadable
from bulkhead._data import DataOnly, loads

DATA: list[Any] = [
    None,
    (True, -1, 1 << 200, 0.5, 2 + 3j, "größe", b"bytes", bytearray(b"array"), range(3), slice(1, None)),
    {"list": [1, [2]], "set": {1, 2}, "frozen": frozenset("ab")},
    (collections.OrderedDict(a=1), collections.deque([1], 3), collections.Counter("aab")),
    (datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(1), decimal.Decimal("1.50")),
    (pathlib.Path("/a"), pathlib.PurePosixPath("b"), uuid.UUID(int=7)),
]


def test_data_is_read() -> None:
    for value in DATA:
        assert loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)) == value
    error = loads(pickle.dumps(UnicodeDecodeError("utf-8", b"x", 0, 1, "why"), pickle.HIGHEST_PROTOCOL))
    assert isinstance(error, UnicodeDecodeError)


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
    ],
)
def test_what_is_no_data_is_refused(pickled: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        loads(pickled)


def _named(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


#: Each with what its class is made of as pickles have it, and what is written into the class behind that.
CLASSES = [
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("uuid", "UUID"),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("decimal", "Decimal"),
    ("datetime", "datetime"),
    ("builtins", "ValueError"),
]


@pytest.mark.parametrize(("module", "name"), CLASSES)
@pytest.mark.parametrize("state", [b"N}\x8c\x06nobodyK\x01s\x86b", b"}\x8c\x06nobodyK\x01sb"])
def test_no_class_is_changed(module: str, name: str, state: bytes) -> None:
    """`BUILD` sets attributes of what it finds, and these are the caller's own classes."""
    for behind in (b"", b"0K\x01"):
        with pytest.raises(DataOnly):
            loads(b"\x80\x04" + _named(module, name) + state + behind + b".")
    assert not hasattr(getattr(__import__(module), name), "nobody")


@pytest.mark.parametrize("used", [b"", b"\x85", b"}K\x01h\x02s", b"(K\x01e", b"K\x01a", b"K\x01K\x02s"])
def test_a_class_is_no_value(used: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        loads(b"\x80\x04\x8c\x04uuid\x94\x8c\x04UUID\x94\x93\x94" + used + b".")


#: Each holds the one before it twice.
PAIRS = b"K\x01\x85" + b"".join(b"\x94h" + bytes([index]) + b"\x86" for index in range(60))
RANGE = _named("builtins", "range") + b"J\x80\x96\x98\x00\x85R"
BOMBS = {
    "a key of pairs of itself": b"}" + PAIRS + b"Ns.",
    "a member of pairs of itself": b"\x8f(" + PAIRS + b"\x90.",
    "a frozenset of pairs of itself": b"(" + PAIRS + b"\x91.",
    "a deep key": b"}K\x01" + b"\x85" * 1_000_000 + b"Ns.",
    "a deep value": b"K\x01" + b"\x85" * 1_000_000 + b".",
    "deep slices": _named("builtins", "slice") + b"\x94" + b"h\x00" * 100_000 + b"K\x01" + b"\x85R" * 100_001 + b".",
    "a number that is hashed again and again": b"}\x8b"
    + (1 << 16).to_bytes(4, "little")
    + b"\x01" * (1 << 16)
    + b"\x94"
    + b"Nsh\x00" * 100_000
    + b"Ns.",
    "a set of a range": _named("builtins", "set") + RANGE + b"\x85R.",
    "a deque of a range": _named("collections", "deque") + RANGE + b"\x85R.",
    "a Counter of a range": _named("collections", "Counter") + RANGE + b"\x85R.",
    "an end of the program": _named("builtins", "SystemExit") + b")R.",
    "Ctrl-C": _named("builtins", "KeyboardInterrupt") + b")R.",
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
    recursive: tuple[Any, ...] = ([],)
    recursive[0].append(recursive)
    for value in values:
        for protocol in (4, 5):
            assert loads(pickle.dumps(value, protocol)) == value
    assert loads(pickle.dumps(recursive, 4))[0][0][0]
    for cut in range(len(written := pickle.dumps([*DATA, *values[1:]], 4))):
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, OverflowError)):
            loads(written[:cut])


def test_data_of_all_sizes_is_read() -> None:
    numbers = [*range(70000), *(1 << bits for bits in range(0, 3000, 7)), -1, -(1 << 40), 0.5, None, True]
    texts = ["x" * size for size in (0, 1, 255, 256, 70000)]
    data = [text.encode() for text in texts]
    value = {"numbers": numbers, "texts": texts, "again": texts, "data": data, "arrays": [*map(bytearray, data)]}
    written = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    for pickled in (written, bytearray(written), pickle._dumps(value, pickle.HIGHEST_PROTOCOL)):  # type: ignore[attr-defined]
        assert loads(pickled) == value


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
