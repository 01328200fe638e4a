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
