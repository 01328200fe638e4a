"""The protocol's bytes (``docs/protocol.md``): every code and structure is named here, once.

It knows frames and fields, and one socket to read from; it decides nothing.
"""

from __future__ import annotations

import errno
import struct
from collections import deque

from .errors import ERROR_OF_OUTCOME, Disconnected, JobError, Outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Payload = bytes | bytearray
    #: Kind, number, metadata, payload.
    Frame = tuple[int, int, bytes, Payload]
    #: What may be sent: all that has bytes in one piece.
    Buffer = bytes | bytearray | memoryview

#: What says that a connection is of no more use. Any other ``OSError`` is not the socket's, but a signal handler's.
ENDS = frozenset(
    (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF, errno.ESHUTDOWN, errno.ENOBUFS, errno.ENOMEM)
)

VERSION = 1
MAGIC = 0x444145484B4C5542
CLIENT, WORKER = 1, 2
CRITICAL = 1

# Kinds.
HELLO, CLIENT_WELCOME, REFUSED, WORKER_WELCOME = 1, 2, 3, 4
SUBMIT, CANCEL, LEASE, LEASE_TAKEN, LEASE_RETURNED = 16, 17, 18, 19, 20
OUTCOME, PROGRESS, LEASED, LEASE_ENDED, LEASE_REFUSED = 32, 33, 34, 35, 36
JOB, CANCEL_JOB, DRAIN, LIMITS, JOURNAL, FILES, FILES_ENDED = 48, 49, 50, 51, 53, 54, 55
READY, RESULT, FAILED, PROGRESSED, STATUS = 64, 66, 67, 68, 69
EXTEND_START, HEARTBEAT, STOPPING, PROGRAM_CRASHED, RETURNED, FILES_TAKEN = 70, 71, 72, 73, 74, 75

KNOWN = frozenset({*range(1, 5), *range(16, 21), *range(32, 37), *range(48, 52), *range(53, 56), READY, *range(66, 76)})

# Extensions.
TRACEPARENT, SEAL, PROCESS, JOB_NUMBER, RUN_LIMIT, LEASED_BYTES = 1, 2, 3, 4, 5, 0x8006
#: Extension of CANCEL: cancel only if the job has not begun.
UNBEGUN = 0x8007
CRASH_REPORT, ARRIVAL = 8, 10

# Capabilities: of a worker, of the supervisor to a client, of the supervisor to a worker.
WORKER_LIMITS, WORKER_BEATS, WORKER_FILES, WORKER_CLAIMS = 2, 8, 16, 32
CLIENT_RUN_LIMIT = 1
CLIENT_CANCEL_UNBEGUN = 4
BEATS_IN_JOURNAL = 1

# Bounds, in bytes.
FRAME_BYTES_MAX = 0xFFFF_FFFF
METADATA_BYTES_MAX = 0xFFFF
OPERATION_BYTES_MAX = TENANT_BYTES_MAX = 256
CODE_BYTES_MAX = 128
MESSAGE_BYTES_MAX = 8 * 1024
#: A larger payload is sent and received by itself, without a copy.
INLINE_BYTES_MAX = 64 * 1024
READ_BYTES = 64 * 1024

#: No time is longer than this on the wire (in seconds): a year.
SECONDS_MAX = 86_400 * 365

PRIORITIES = {"best-effort": 0, "normal": 1, "critical": 2}
OUTCOMES = ("ok", "failed", "rejected", "deadline_exceeded", "crashed", "cancelled")
CANCELLED = OUTCOMES.index("cancelled")
EXECUTED = ("no", "yes", "unknown")
FAULTS = ("", "caller", "dependency")
REJECTED = (
    *("invalid", "too_large", "not_found", "unauthenticated", "forbidden", "rate_limited", "tenant_quota"),
    *("backpressure", "queue_full", "queue_timeout", "shed", "evicted", "circuit_open", "draining", "unavailable"),
    *("overloaded", "quarantined"),
)
REASONS: dict[str, Sequence[str]] = {
    "rejected": REJECTED,
    "deadline_exceeded": ("queued", "running"),
    "crashed": ("exit", "signal", "oom", "violation", "protocol", "hung", "stopped", "collateral"),
}

HEADER = struct.Struct("<IBBHQ")
_LENGTH = struct.Struct("<Q")
_EXTENSION = struct.Struct("<HQ")
_HELLO = struct.Struct("<HHBIQ")
_WORKER_WELCOME = struct.Struct("<HIQIIIIQ")
_CLIENT_WELCOME = struct.Struct("<HIQ")
_SUBMIT_TAIL = struct.Struct("<QBBI")
_OUTCOME = struct.Struct("<5BIQQQIBQBi")
_PROGRESS = struct.Struct("<fQ")
NUMBER = _LENGTH
LIMIT = struct.Struct("<I")
#: An empty structure and no extensions.
EMPTY = bytes(8)


#: Raised for fields that are missing; `Malformed` for what makes no sense.
Unreadable = struct.error


class Malformed(ConnectionError):
    """The other side sent what is not the protocol, or a version that this one does not speak."""


def text(value: str, bytes_max: int = METADATA_BYTES_MAX) -> bytes:
    """A text field, cut to so many bytes between characters."""
    data = value.encode("utf-8", "replace")
    if len(data) > bytes_max:
        data = data[:bytes_max].decode("utf-8", "ignore").encode()
    return _LENGTH.pack(len(data)) + data


def extensions(*given: tuple[int, bytes]) -> bytes:
    """The list that stands behind each structure."""
    return _LENGTH.pack(len(given)) + b"".join(_EXTENSION.pack(tag, len(data)) + data for tag, data in given)


def frame(kind: int, number: int, metadata: bytes = EMPTY, payload: Buffer = b"") -> bytes:
    """A whole frame."""
    size = len(metadata)
    return b"".join((HEADER.pack(size + len(payload), kind, 0, size, number), metadata, payload))


def head(kind: int, number: int, metadata: bytes, payload_bytes: int) -> bytes:
    """A frame without its payload, which is sent behind it. Raises ``ValueError`` if no frame is so long."""
    size = len(metadata)
    if size + payload_bytes > FRAME_BYTES_MAX:
        raise ValueError(f"a payload of {payload_bytes} bytes is more than a frame holds ({FRAME_BYTES_MAX - size})")
    return HEADER.pack(size + payload_bytes, kind, 0, size, number) + metadata


def read_text(data: bytes, at: int) -> tuple[str, int]:
    """A text field, and where it ends."""
    start = at + 8
    (size,) = _LENGTH.unpack_from(data, at)
    end = start + size
    if end > len(data):
        raise Malformed("a text reaches beyond its frame")
    return data[start:end].decode("utf-8", "replace"), end


def read_extensions(data: bytes, at: int) -> dict[int, bytes]:
    """The extensions behind a structure."""
    (count,) = _LENGTH.unpack_from(data, at)
    at += 8
    found: dict[int, bytes] = {}
    for _ in range(count):
        tag, size = _EXTENSION.unpack_from(data, at)
        at += 10
        if at + size > len(data):
            raise Malformed("an extension reaches beyond its frame")
        if tag & 0x8000 and tag != LEASED_BYTES:
            raise Malformed(f"the supervisor demands the extension {tag:#x}, which this version does not know")
        found[tag] = data[at : at + size]
        at += size
    return found


def hello(role: int, capabilities: int, version: str, name: str = "bulkhead-py") -> bytes:
    """The frame that opens a connection."""
    fixed = _HELLO.pack(VERSION, VERSION, role, FRAME_BYTES_MAX, capabilities)
    return frame(HELLO, MAGIC, fixed + text(name) + text(version) + EMPTY)


def submission(
    bulkhead: str,
    operation: str = "",
    tenant: str = "",
    deadline: float | None = None,
    priority: str = "normal",
    idempotent: bool = False,
    cost: int = 1,
    traceparent: str | None = None,
    run_limit: float | None = None,
) -> bytes:
    """The metadata of SUBMIT. Raises ``ValueError`` for what cannot be meant; the supervisor judges the rest."""
    for name, value, bytes_max in (
        ("bulkhead", bulkhead, 1024),
        ("operation", operation, OPERATION_BYTES_MAX),
        ("tenant", tenant, TENANT_BYTES_MAX),
        ("traceparent", traceparent or "", 1024),
    ):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        if len(value.encode()) > bytes_max:
            raise ValueError(f"{name} is longer than {bytes_max} bytes")
    if priority not in PRIORITIES:
        raise ValueError(f"{priority!r} is no priority: write 'critical', 'normal' or 'best-effort'")
    if not 0 <= cost <= 0xFFFF_FFFF:
        raise ValueError(f"cost must be from 0 to 2**32-1, not {cost}")
    given = []
    if traceparent:
        given.append((TRACEPARENT, traceparent.encode()))
    if run_limit is not None:
        given.append((RUN_LIMIT, _LENGTH.pack(_micros("run_limit", run_limit))))
    limit = 0 if deadline is None else _micros("deadline", deadline)
    tail = _SUBMIT_TAIL.pack(limit, PRIORITIES[priority], bool(idempotent), cost)
    return text(bulkhead) + text(operation) + text(tenant) + tail + extensions(*given)


def _texts_end(data: bytes, at: int, count: int) -> int:
    """The end of so many text fields."""
    for _ in range(count):
        at += 8 + int(_LENGTH.unpack_from(data, at)[0])
    return at


def lessee(metadata: bytes) -> bytes:
    """The bulkhead and the tenant of a SUBMIT, as LEASE has them."""
    bulkhead = _texts_end(metadata, 0, 1)
    return metadata[:bulkhead] + metadata[_texts_end(metadata, bulkhead, 1) : _texts_end(metadata, bulkhead, 2)]


def with_extension(metadata: bytes, tag: int, data: bytes) -> bytes:
    """The metadata of a SUBMIT with one more extension."""
    at = _texts_end(metadata, 0, 3) + _SUBMIT_TAIL.size
    (count,) = _LENGTH.unpack_from(metadata, at)
    return metadata[:at] + _LENGTH.pack(count + 1) + metadata[at + 8 :] + _EXTENSION.pack(tag, len(data)) + data


def outcome_extensions(metadata: bytes) -> dict[int, bytes]:
    """The extensions of an OUTCOME."""
    return read_extensions(metadata, _texts_end(metadata, _OUTCOME.size, 3))


def _micros(name: str, seconds: float) -> int:
    if not seconds > 0:
        raise ValueError(f"{name} must be more than 0 seconds, not {seconds!r}")
    return max(1, round(min(seconds, SECONDS_MAX) * 1e6))


def is_ok(metadata: bytes) -> bool:
    """Whether an OUTCOME says that its payload is the result."""
    return metadata[0] == 0


def ran_us(metadata: bytes) -> int:
    """How long a worker had the job of an OUTCOME, in µs."""
    return int(_LENGTH.unpack_from(metadata, 17)[0])


def outcome(metadata: bytes) -> Outcome:
    """Reads an OUTCOME."""
    try:
        fields = _OUTCOME.unpack_from(metadata)
        bulkhead, at = read_text(metadata, _OUTCOME.size)
        code, at = read_text(metadata, at)
        message, at = read_text(metadata, at)
        given = read_extensions(metadata, at)
    except struct.error as error:
        raise Malformed(f"an outcome that cannot be read: {error}") from None
    verdict, reason, executed, retryable, fault, attempts, queued, ran, deadline, pid, has_after, after = fields[:12]
    has_status, status = fields[12:]
    name = OUTCOMES[verdict] if verdict < len(OUTCOMES) else "unknown"
    reasons = REASONS.get(name, ())
    if name == "failed":
        word = code
    elif 0 < reason <= len(reasons):
        word = reasons[reason - 1]
    else:
        word = f"unknown reason {reason}" if reason else ""
    number, limit, trace, report = map(given.get, (JOB_NUMBER, RUN_LIMIT, TRACEPARENT, CRASH_REPORT))
    return Outcome(
        name,
        word,
        message,
        executed=EXECUTED[min(executed, 2)],
        retryable=bool(retryable),
        retry_after=after / 1e6 if has_after else None,
        fault=FAULTS[min(fault, 2)] if name == "failed" else "",
        attempts=attempts,
        queued=queued / 1e6,
        ran=ran / 1e6,
        deadline=deadline / 1e6,
        run_limit=None if limit is None else _LENGTH.unpack(limit)[0] / 1e6,
        worker_pid=pid or None,
        status=status if has_status else None,
        bulkhead=bulkhead,
        job=None if number is None else f"{_LENGTH.unpack(number)[0]:x}",
        traceparent=None if trace is None else trace.decode("ascii", "replace"),
        report=None if report is None else report.decode("ascii", "replace"),
    )


def error(metadata: bytes, payload: Payload) -> JobError:
    """The exception for an OUTCOME that is not ``ok``."""
    told = outcome(metadata)
    kind = ERROR_OF_OUTCOME.get(told.outcome)
    if kind is None:
        return Disconnected(
            f"the supervisor told of an outcome that this client does not know ({told}); update bulkhead-py",
            told.executed,
        )
    return kind(told, payload)


def progress(metadata: bytes) -> tuple[float, str]:
    """Reads a PROGRESS: from 0 to 1, and a few words."""
    fraction, _ = _PROGRESS.unpack_from(metadata)
    return fraction, read_text(metadata, 4)[0]


def progressed(fraction: float, words: str) -> bytes:
    """The metadata of PROGRESSED."""
    return struct.pack("<f", min(max(fraction, 0.0), 1.0)) + text(words, MESSAGE_BYTES_MAX) + EMPTY


def failed(code: str, message: str, retryable: bool, fault: str) -> bytes:
    """The metadata of FAILED."""
    told = text(code, CODE_BYTES_MAX) + text(message, MESSAGE_BYTES_MAX)
    return told + bytes((retryable, 1 if fault == "caller" else 2)) + EMPTY


#: Two texts without a byte.
_NO_TEXTS = bytes(16)


def job(metadata: bytes) -> tuple[str, str, int, str | None, bytes | None]:
    """Reads a JOB: operation, tenant, µs that remain, traceparent, the memory file with the payload."""
    if metadata.startswith(_NO_TEXTS):
        operation, tenant, at = "", "", len(_NO_TEXTS)
    else:
        operation, at = read_text(metadata, 0)
        tenant, at = read_text(metadata, at)
    (remaining,) = _LENGTH.unpack_from(metadata, at)
    if len(metadata) == at + 16:
        return operation, tenant, remaining, None, None
    given = read_extensions(metadata, at + 8)
    trace = given.get(TRACEPARENT)
    traceparent = None if trace is None else trace.decode("ascii", "replace")
    return operation, tenant, remaining, traceparent, given.get(LEASED_BYTES)


def client_welcome(metadata: bytes) -> int:
    """Reads a CLIENT_WELCOME: the supervisor's capabilities."""
    return int(_CLIENT_WELCOME.unpack_from(metadata)[2])


class WorkerWelcome:
    """The fields of a WORKER_WELCOME that a worker uses."""

    def __init__(self, metadata: bytes) -> None:
        fields = _WORKER_WELCOME.unpack_from(metadata)
        self.capabilities, _slot, _generation, self.max_in_flight, self.heartbeat_ms, self.result_bytes_max = fields[2:]
        _bulkhead, at = read_text(metadata, _WORKER_WELCOME.size)
        self.seal = read_extensions(metadata, at).get(SEAL)


def refused(metadata: bytes) -> tuple[str, str]:
    """Reads a REFUSED: the reason, and a sentence."""
    code = metadata[0]
    reason = REJECTED[code - 1] if 0 < code <= len(REJECTED) else f"unknown reason {code}"
    return reason, read_text(metadata, 1)[0]


class Reader:
    """Cuts what a socket gives into frames. Large payloads are received where they stay.

    An exception in the midst, be it of a signal's handler, loses nothing: each step is one call that is done or not,
    and may be done again. Frames may be put into ``frames`` twice then.
    """

    __slots__ = ("_flags", "_receive", "_receive_into", "_state", "frames")

    def __init__(
        self,
        receive: Callable[[int, int], bytes],
        receive_into: Callable[[memoryview, int, int], int],
        flags: int = 0,
    ) -> None:
        self._receive = receive
        self._receive_into = receive_into
        self._flags = flags
        # What was received and is no whole frame yet; and a large payload, with the counts of its bytes so far.
        self._state: tuple[list[bytes], tuple[Frame, memoryview, list[int]] | None] = [], None
        #: Those that are whole, to be taken out by the user.
        self.frames: deque[Frame] = deque()

    def read(self) -> bool:
        """Receives once, and puts what is whole into ``frames``; whether more may be there.

        Raises ``EOFError`` when the other side has closed, ``BlockingIOError`` and other ``OSError`` as they come,
        ``Malformed``.
        """
        chunks, large = self._state
        if large is not None:
            return self._read_large(*large)
        before = len(chunks)
        # What map() receives is in the list before any signal's handler runs.
        chunks.extend(map(self._receive, (READ_BYTES,), (self._flags,)))
        received = chunks[before]
        if not received:
            raise EOFError
        self._cut(chunks)
        return len(received) == READ_BYTES

    def take(self, chunk: bytes) -> None:
        """What was received otherwise."""
        chunks, _ = self._state
        chunks.append(chunk)
        self._cut(chunks)

    def _cut(self, chunks: list[bytes]) -> None:
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        at, end = 0, len(data)
        whole: list[Frame] = []
        large = None
        while end - at >= 16:
            length, kind, flags, metadata_length, number = HEADER.unpack_from(data, at)
            if metadata_length > length:
                raise Malformed("a frame whose metadata is longer than itself")
            if flags & CRITICAL and kind not in KNOWN:
                raise Malformed(f"the supervisor demands the frame {kind}, which this version does not know")
            start = at + 16
            middle = start + metadata_length
            stop = start + length
            if stop <= end:
                whole.append((kind, number, data[start:middle], data[middle:stop]))
                at = stop
                continue
            if middle <= end and length - metadata_length > INLINE_BYTES_MAX:
                payload = bytearray(length - metadata_length)
                view = memoryview(payload)
                here = end - middle
                view[:here] = data[middle:end]
                large = (kind, number, data[start:middle], payload), view, [here]
                at = end
            break
        self.frames.extend(whole)
        self._state = ([data[at:]] if at < end else [], large)

    def _read_large(self, frame: Frame, view: memoryview, counts: list[int]) -> bool:
        done = sum(counts)
        if done < len(view):
            counts.extend(map(self._receive_into, (view[done:],), (0,), (self._flags,)))
            if counts[-1] == 0:
                raise EOFError
            done += counts[-1]
        if done == len(view):
            self.frames.append(frame)
            self._state = [], None
        return True
