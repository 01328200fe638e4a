"""Tests the encoding against docs/protocol.md, and the reading of data in arbitrary pieces."""

from __future__ import annotations

import json
import pathlib
import pickle
import random
import re
import struct

import pytest

from bulkhead import (
    CallTimeout,
    Cancelled,
    Crashed,
    DeadlineExceeded,
    Disconnected,
    Failed,
    JobError,
    Outcome,
    Rejected,
    WorkerCrashed,
    _wire,
)
from bulkhead.errors import ERROR_OF_OUTCOME

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "protocol.md"


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def test_hello_has_the_documented_bytes() -> None:
    block = re.search(r"```text\n(.*?)```", PAGE.read_text(), re.S)
    assert block is not None
    digits = "".join(re.match(r"((?:[0-9a-f]{2,} ?)+)", line)[1] for line in block[1].splitlines())  # type: ignore[index]
    assert _wire.hello(_wire.CLIENT, 0, "1", "doc") == bytes.fromhex(digits.replace(" ", ""))


def test_protocol_page_lists_every_kind_and_reason() -> None:
    page = PAGE.read_text()
    kinds = [
        *("HELLO", "CLIENT_WELCOME", "REFUSED", "WORKER_WELCOME", "SUBMIT", "CANCEL", "OUTCOME", "PROGRESS", "JOB"),
        *("CANCEL_JOB", "DRAIN", "LIMITS", "JOURNAL", "READY", "RESULT", "FAILED", "PROGRESSED"),
        *("STATUS", "EXTEND_START", "HEARTBEAT", "STOPPING", "PROGRAM_CRASHED", "RETURNED"),
    ]
    for kind in kinds:
        number = getattr(_wire, kind)
        assert re.search(rf"\*\*{kind}\*\* \((kind )?{number}\)|\| {kind} {number} \|", page), kind
        assert number in _wire.KNOWN
    for code, reason in enumerate(_wire.REJECTED, 1):
        assert f"{code} {reason}" in page
    for outcome, reasons in _wire.REASONS.items():
        assert f"| {_wire.OUTCOMES.index(outcome)} {outcome} |" in page
        for code, reason in enumerate(reasons, 1):
            assert f"{code} {reason}" in page
    assert f"`0x{_wire.MAGIC:x}`" in page


def test_submit_has_the_documented_bytes() -> None:
    given = _wire.submission("b", "op", "acme", 1.5, "critical", True, 7, "00-aa-bb-01", 0.25)
    fixed = text("b") + text("op") + text("acme") + struct.pack("<QBBI", 1_500_000, 2, 1, 7)
    extensions = u64(2) + struct.pack("<HQ", 1, 11) + b"00-aa-bb-01" + struct.pack("<HQ", 5, 8) + u64(250_000)
    assert given == fixed + extensions
    assert _wire.submission("b") == text("b") + text("") * 2 + struct.pack("<QBBI", 0, 1, 0, 1) + u64(0)
    header = struct.pack("<IBBHQ", len(given) + 3, 16, 0, len(given), 9)
    assert _wire.frame(_wire.SUBMIT, 9, given, b"abc") == header + given + b"abc"
    assert _wire.head(_wire.SUBMIT, 9, given, 3) == header + given


@pytest.mark.parametrize(
    "options",
    [
        {"deadline": 0},
        {"deadline": -1.0},
        {"deadline": float("nan")},
        {"run_limit": 0},
        {"priority": "urgent"},
        {"cost": -1},
        {"cost": 2**32},
        {"operation": "x" * 257},
        {"tenant": "ä" * 129},
    ],
)
def test_invalid_options_raise_value_error(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        _wire.submission("b", **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _wire.submission(b"b")  # type: ignore[arg-type]


def test_durations_are_clamped_between_microsecond_and_year() -> None:
    assert _wire.submission("b", deadline=float("inf"))[25:33] == u64(86_400 * 365 * 1_000_000)
    assert _wire.submission("b", deadline=1e-9)[25:33] == u64(1)


def outcome(verdict: int, reason: int = 0, extensions: bytes = u64(0), **changes: int | str) -> bytes:
    fields: dict[str, int | str] = {"executed": 2, "retryable": 1, "fault": 0, "attempts": 3, "after": 0, "status": 0}
    fields.update(changes)
    head = struct.pack(
        "<5BI", verdict, reason, fields["executed"], fields["retryable"], fields["fault"], fields["attempts"]
    )
    times = struct.pack("<QQQI", 1_000_000, 2_500_000, 30_000_000, 4711)
    after = struct.pack("<BQ", bool(fields["after"]), fields["after"])
    status = struct.pack("<Bi", bool(fields["status"]), fields["status"])
    texts = text("b") + text(str(fields.get("code", ""))) + text(str(fields.get("message", "")))
    return head + times + after + status + texts + extensions


def test_outcome_contains_all_fields() -> None:
    given = u64(3) + struct.pack("<HQ", 4, 8) + u64(0xABC) + struct.pack("<HQ", 5, 8) + u64(200_000)
    given += struct.pack("<HQ", 99, 1) + b"x"
    told = _wire.outcome(outcome(4, 2, given, status=11, message="killed by SIGSEGV"))
    assert (told.outcome, told.reason, told.message) == ("crashed", "signal", "killed by SIGSEGV")
    assert (told.executed, told.retryable, told.attempts, told.status) == ("unknown", True, 3, 11)
    assert (told.queued, told.ran, told.deadline, told.run_limit) == (1.0, 2.5, 30.0, 0.2)
    assert (told.worker_pid, told.job, told.bulkhead, told.retry_after) == (4711, "abc", "b", None)
    assert str(told) == "crashed (signal): killed by SIGSEGV"
    with pytest.raises(AttributeError):
        told.outcome = "ok"
    assert told == _wire.outcome(outcome(4, 2, given, status=11, message="killed by SIGSEGV"))


def test_each_outcome_maps_to_its_exception() -> None:
    failed = _wire.error(outcome(1, code="bad", fault=1, message="no"), b"details")
    assert (failed.outcome.reason, failed.outcome.fault, failed.payload, failed.http_status) == (
        "bad",
        "caller",
        b"details",
        422,
    )
    rejected = _wire.error(outcome(2, 9, after=1_500_000), b"")
    assert isinstance(rejected, Rejected)
    assert (rejected.retry_after, rejected.http_status, rejected.outcome.reason) == (1.5, 503, "queue_full")
    assert "try again after 1.500 s" in str(rejected)
    late = _wire.error(outcome(3, 2), b"")
    assert isinstance(late, TimeoutError)
    assert late.http_status == 504
    assert isinstance(_wire.error(outcome(4, 1), b""), Crashed)
    assert _wire.error(outcome(5), b"").http_status == 499
    unknown = _wire.error(outcome(9), b"")
    assert isinstance(unknown, Disconnected)
    assert "update" in str(unknown)
    statuses = [_wire.error(outcome(2, code), b"").http_status for code in range(1, 18)]
    assert statuses == [400, 413, 404, 401, 403, 429, 429, 429, 503, 503, 503, 503, 503, 503, 503, 503, 422]


def test_rejects_unknown_critical_parts() -> None:
    with pytest.raises(_wire.Malformed):
        _wire.outcome(outcome(0, 0, u64(1) + struct.pack("<HQ", 0x8009, 0)))
    with pytest.raises(_wire.Malformed):
        _wire.outcome(outcome(0)[:-20])
    with pytest.raises(_wire.Malformed):
        reader(_wire.frame(99, 0)[:5] + b"\1" + _wire.frame(99, 0)[6:], [1000]).read()
    with pytest.raises(_wire.Malformed):
        reader(struct.pack("<IBBHQ", 4, 32, 0, 8, 1), [1000]).read()


def extension(tag: int, data: bytes) -> bytes:
    return u64(1) + struct.pack("<HQ", tag, len(data)) + data


@pytest.mark.parametrize("size", [0, 1, 7, 9, 16])
def test_numbers_of_another_size_are_ignored(size: int) -> None:
    for tag in (_wire.JOB_NUMBER, _wire.RUN_LIMIT):
        error = _wire.error(outcome(2, 9, extension(tag, b"\1" * size)), b"")
        assert isinstance(error, Rejected)
        assert (error.outcome.job, error.outcome.run_limit) == (None, None)


def test_incomplete_outcome_leaves_execution_unknown() -> None:
    whole = outcome(4, 1, extension(_wire.JOB_NUMBER, u64(5)), message="text")
    for size in range(len(whole)):
        error = _wire.error(whole[:size], b"")
        assert isinstance(error, Disconnected)
        assert error.executed == "unknown"


def test_incomplete_refusal_is_unreadable() -> None:
    whole = b"\1" + text("text") + u64(0)
    for size in range(len(whole) - 8):
        with pytest.raises((_wire.Malformed, _wire.Unreadable)):
            _wire.refused(whole[:size])


def reader(data: bytes, sizes: list[int], interrupts: random.Random | None = None) -> _wire.Reader:
    """Returns a reader that receives pieces of the given sizes in turn, and is interrupted at random."""
    position = 0
    turn = 0

    def size(most: int) -> int:
        nonlocal turn
        turn += 1
        if interrupts is not None and interrupts.random() < 0.3:
            raise KeyboardInterrupt
        return min(sizes[turn % len(sizes)], most)

    def receive(most: int, _flags: int) -> bytes:
        nonlocal position
        piece = data[position : position + size(most)]
        position += len(piece)
        return piece

    def receive_into(view: memoryview, _count: int, _flags: int) -> int:
        nonlocal position
        piece = data[position : position + size(len(view))]
        view[: len(piece)] = piece
        position += len(piece)
        return len(piece)

    return _wire.Reader(receive, receive_into)


@pytest.mark.parametrize("sizes", [[1], [7], [16, 1, 100], [65_536], [3, 65_536], [50_000]])
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_frames_are_complete_for_all_read_sizes(sizes: list[int], is_interrupted: bool) -> None:
    chance = random.Random(7)
    payload_sizes = [0, 1, 64, 65_535, 65_536, 65_537, 200_000, 0, 5]
    if sizes in ([1], [7]):
        payload_sizes = [0, 1, 64, 2_000, 5]
    sent = [
        (_wire.OUTCOME, number, bytes(chance.randrange(256) for _ in range(8 + number)), chance.randbytes(size))
        for number, size in enumerate(payload_sizes, 1)
    ]
    data = b"".join(_wire.frame(*frame) for frame in sent)
    subject = reader(data, sizes, chance if is_interrupted else None)
    is_open = True
    while is_open:
        try:
            subject.read()
        except KeyboardInterrupt:
            pass
        except EOFError:
            is_open = False
    assert [(kind, number, meta, bytes(payload)) for kind, number, meta, payload in subject.frames] == sent
    assert isinstance(subject.frames[-1][3], bytes)


def test_text_is_truncated_between_characters() -> None:
    assert _wire.text("grün", 3) == text("gr")
    assert _wire.text("grün", 4) == text("grü")
    assert _wire.text("a\ud800b") == text("a?b")


@pytest.mark.parametrize("kind", [Failed, Rejected, Crashed, Cancelled, DeadlineExceeded, WorkerCrashed, CallTimeout])
def test_errors_can_be_recreated_from_their_args(kind: type[JobError]) -> None:
    """Checks serialisers that write the class and the arguments as JSON."""
    name = next(name for name, base in ERROR_OF_OUTCOME.items() if issubclass(kind, base))
    error = kind(Outcome(name, "signal", "killed by SIGSEGV", executed="yes"), b"data")
    again = kind(*json.loads(json.dumps(error.args)))
    assert (str(again), again.args, again.outcome.outcome) == (str(error), error.args, name)
    assert (again.retryable, again.payload) == (False, b"")
    pickled = pickle.loads(pickle.dumps(again))
    assert (str(pickled), pickled.outcome) == (str(again), again.outcome)
    assert isinstance(again, kind)
