"""The binary protocol (``docs/protocol.md``). Defines every code and structure once.

Clients, pools and workers use this module to encode and decode frames. It contains only the side that talks to a
supervisor. The module performs no I/O, and a ``Reader`` reads with functions that its owner provides.
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
    #: A frame: kind, number, metadata and payload. In most kinds, the number identifies the request, job or lease.
    Frame = tuple[int, int, bytes, Payload]
    #: Contiguous bytes-like objects that can be sent.
    Buffer = bytes | bytearray | memoryview

#: Errors after which a connection is unusable. Any other ``OSError`` comes from a signal handler, not the socket.
LOST_CONNECTION_ERRORS = frozenset(
    (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF, errno.ESHUTDOWN, errno.ENOBUFS, errno.ENOMEM)
)

VERSION = 1
MAGIC = 0x444145484B4C5542
CLIENT, WORKER = 1, 2
#: Frame flag: a peer that does not know the kind of this frame must close the connection.
CRITICAL = 1

# Frame kinds.
HELLO, CLIENT_WELCOME, REFUSED, WORKER_WELCOME = 1, 2, 3, 4
SUBMIT, CANCEL, LEASE, LEASE_TAKEN, LEASE_RETURNED = 16, 17, 18, 19, 20
OUTCOME, PROGRESS, LEASED, LEASE_ENDED, LEASE_REFUSED, GOAWAY = 32, 33, 34, 35, 36, 37
JOB, CANCEL_JOB, DRAIN, LIMITS, JOURNAL, FILES, FILES_ENDED = 48, 49, 50, 51, 53, 54, 55
READY, RESULT, FAILED, PROGRESSED, STATUS = 64, 66, 67, 68, 69
EXTEND_START, HEARTBEAT, STOPPING, PROGRAM_CRASHED, RETURNED, FILES_TAKEN = 70, 71, 72, 73, 74, 75

KNOWN = frozenset({*range(1, 5), *range(16, 21), *range(32, 38), *range(48, 52), *range(53, 56), READY, *range(66, 76)})

# Extensions. LEASE_REF refers to a payload or result in a memory file. The LEASE frames above manage the leases.
TRACEPARENT, SEAL, PROCESS, JOB_NUMBER, RUN_LIMIT, LEASE_REF = 1, 2, 3, 4, 5, 0x8006
#: Extension of CANCEL that cancels the job only if it has not begun.
UNLESS_BEGUN = 0x8007
CRASH_REPORT, ARRIVAL = 8, 10

# Capabilities of a client.
TAKES_GOAWAY = 1
# Capabilities of a worker.
WORKER_LIMITS, WORKER_JOURNAL_HEARTBEATS, WORKER_FILES, WORKER_PREFETCH, WORKER_STACK_TEXT = 2, 8, 16, 32, 128
# Capabilities of the supervisor, announced to clients.
SUPERVISOR_RUN_LIMIT = 1
SUPERVISOR_CANCEL_UNLESS_BEGUN = 4
# Capability of the supervisor, announced to workers.
JOURNAL_HEARTBEATS = 1

# Bounds, in bytes.
FRAME_BYTES_MAX = 0xFFFF_FFFF
METADATA_BYTES_MAX = 0xFFFF
OPERATION_BYTES_MAX = TENANT_BYTES_MAX = 256
CODE_BYTES_MAX = 128
MESSAGE_BYTES_MAX = 8 * 1024
#: Maximum size of a payload that is joined with its frame. Larger payloads are sent and received without copying.
INLINE_BYTES_MAX = 64 * 1024
READ_BYTES = 64 * 1024

#: Maximum duration on the wire: one year, in seconds.
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
    "crashed": ("exit", "signal", "oom", "violation", "protocol", "hung", "stopped", "collateral", "host_lost"),
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
_CODE = struct.Struct("<B")
NUMBER = _LENGTH
LIMIT = struct.Struct("<I")
#: Encoding of an empty structure without extensions.
EMPTY = bytes(8)


#: Exception raised if a field is missing or incomplete. Invalid values raise `Malformed`.
Unreadable = struct.error


class Malformed(ConnectionError):
    """The peer violated the protocol, or uses an unsupported version."""


def text(value: str, bytes_max: int = METADATA_BYTES_MAX) -> bytes:
    """Encodes a text field, truncated to at most ``bytes_max`` bytes at a character boundary."""
    data = value.encode("utf-8", "replace")
    if len(data) > bytes_max:
        data = data[:bytes_max].decode("utf-8", "ignore").encode()
    return _LENGTH.pack(len(data)) + data


def extensions(*given: tuple[int, bytes]) -> bytes:
    """Encodes the list of extensions that follows each structure."""
    return _LENGTH.pack(len(given)) + b"".join(_EXTENSION.pack(tag, len(data)) + data for tag, data in given)


def frame(kind: int, number: int, metadata: bytes = EMPTY, payload: Buffer = b"") -> bytes:
    """Encodes a frame."""
    size = len(metadata)
    return b"".join((HEADER.pack(size + len(payload), kind, 0, size, number), metadata, payload))


def head(kind: int, number: int, metadata: bytes, payload_bytes: int) -> bytes:
    """Encodes a frame without its payload, which the caller sends next. Raises ``ValueError`` for a long payload."""
    size = len(metadata)
    if size + payload_bytes > FRAME_BYTES_MAX:
        raise ValueError(f"the payload has {payload_bytes} bytes; the maximum is {FRAME_BYTES_MAX - size}")
    return HEADER.pack(size + payload_bytes, kind, 0, size, number) + metadata


def read_text(data: bytes, at: int) -> tuple[str, int]:
    """Decodes a text field. Returns the text and the position after the field."""
    start = at + 8
    (size,) = _LENGTH.unpack_from(data, at)
    end = start + size
    if end > len(data):
        raise Malformed("a text extends beyond the frame")
    return data[start:end].decode("utf-8", "replace"), end


def read_extensions(data: bytes, at: int) -> dict[int, bytes]:
    """Decodes the extensions that follow a structure."""
    (count,) = _LENGTH.unpack_from(data, at)
    at += 8
    found: dict[int, bytes] = {}
    for _ in range(count):
        tag, size = _EXTENSION.unpack_from(data, at)
        at += 10
        if at + size > len(data):
            raise Malformed("an extension extends beyond the frame")
        if tag & 0x8000 and tag != LEASE_REF:
            raise Malformed(f"the supervisor requires extension {tag:#x}, which this version does not support")
        found[tag] = data[at : at + size]
        at += size
    return found


def hello(role: int, capabilities: int, version: str, name: str = "bulkhead-py") -> bytes:
    """Encodes the HELLO frame, the first frame of a connection."""
    fixed = _HELLO.pack(VERSION, VERSION, role, FRAME_BYTES_MAX, capabilities)
    return frame(HELLO, MAGIC, fixed + text(name) + text(version) + EMPTY)


def check_submission(
    bulkhead: str,
    operation: str,
    tenant: str,
    deadline: float | None,
    priority: str,
    cost: int,
    traceparent: str | None,
    run_limit: float | None,
) -> None:
    """Checks the options of a job. Raises ``ValueError`` or ``TypeError``; the supervisor checks the rest."""
    for name, value, bytes_max in (
        ("bulkhead", bulkhead, 1024),
        ("operation", operation, OPERATION_BYTES_MAX),
        ("tenant", tenant, TENANT_BYTES_MAX),
        ("traceparent", traceparent or "", 1024),
    ):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be str, not {type(value).__name__}")
        if len(value.encode()) > bytes_max:
            raise ValueError(f"{name} is longer than {bytes_max} bytes")
    if priority not in PRIORITIES:
        raise ValueError(f"{priority!r} is not a priority: write 'critical', 'normal' or 'best-effort'")
    if not 0 <= cost <= 0xFFFF_FFFF:
        raise ValueError(f"cost must be from 0 to 2**32-1, not {cost}")
    for name, seconds in (("run_limit", run_limit), ("deadline", deadline)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name} must be more than 0 seconds, not {seconds!r}")


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
    """Encodes the metadata of SUBMIT. Raises the errors of ``check_submission``."""
    check_submission(bulkhead, operation, tenant, deadline, priority, cost, traceparent, run_limit)
    given = []
    if traceparent:
        given.append((TRACEPARENT, traceparent.encode()))
    if run_limit is not None:
        given.append((RUN_LIMIT, _LENGTH.pack(_micros(run_limit))))
    limit = 0 if deadline is None else _micros(deadline)
    tail = _SUBMIT_TAIL.pack(limit, PRIORITIES[priority], bool(idempotent), cost)
    return text(bulkhead) + text(operation) + text(tenant) + tail + extensions(*given)


def _texts_end(data: bytes, at: int, count: int) -> int:
    """Returns the position after ``count`` text fields."""
    for _ in range(count):
        at += 8 + int(_LENGTH.unpack_from(data, at)[0])
    return at


def lease_owner(metadata: bytes) -> bytes:
    """Returns the encoded bulkhead and tenant of a SUBMIT, as LEASE contains them."""
    bulkhead = _texts_end(metadata, 0, 1)
    return metadata[:bulkhead] + metadata[_texts_end(metadata, bulkhead, 1) : _texts_end(metadata, bulkhead, 2)]


def with_extension(metadata: bytes, tag: int, data: bytes) -> bytes:
    """Returns the metadata of a SUBMIT with an additional extension."""
    at = _texts_end(metadata, 0, 3) + _SUBMIT_TAIL.size
    (count,) = _LENGTH.unpack_from(metadata, at)
    return metadata[:at] + _LENGTH.pack(count + 1) + metadata[at + 8 :] + _EXTENSION.pack(tag, len(data)) + data


def outcome_extensions(metadata: bytes) -> dict[int, bytes]:
    """Decodes the extensions of an OUTCOME."""
    return read_extensions(metadata, _texts_end(metadata, _OUTCOME.size, 3))


def _number(data: bytes | None) -> int | None:
    """Decodes an extension that contains a number. Ignores data of another size, like the Rust client."""
    return None if data is None or len(data) != _LENGTH.size else int(_LENGTH.unpack(data)[0])


def _micros(seconds: float) -> int:
    return max(1, round(min(seconds, SECONDS_MAX) * 1e6))


def is_ok(metadata: bytes) -> bool:
    """Returns true if the outcome is ``ok``. In this case the payload is the result."""
    return metadata[:1] == b"\0"


def ran_us(metadata: bytes) -> int:
    """Returns the time that the job spent in a worker, in µs, from an OUTCOME."""
    return int(_LENGTH.unpack_from(metadata, 17)[0])


def outcome(metadata: bytes) -> Outcome:
    """Decodes an OUTCOME."""
    try:
        fields = _OUTCOME.unpack_from(metadata)
        bulkhead, at = read_text(metadata, _OUTCOME.size)
        code, at = read_text(metadata, at)
        message, at = read_text(metadata, at)
        given = read_extensions(metadata, at)
    except struct.error as error:
        raise Malformed(f"the supervisor sent an outcome that cannot be read: {error}") from None
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
    number, limit = _number(given.get(JOB_NUMBER)), _number(given.get(RUN_LIMIT))
    trace, report = given.get(TRACEPARENT), given.get(CRASH_REPORT)
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
        run_limit=None if limit is None else limit / 1e6,
        worker_pid=pid or None,
        status=status if has_status else None,
        bulkhead=bulkhead,
        job=None if number is None else f"{number:x}",
        traceparent=None if trace is None else trace.decode("ascii", "replace"),
        report=None if report is None else report.decode("ascii", "replace"),
    )


def error(metadata: bytes, payload: Payload) -> JobError:
    """Returns the exception for an OUTCOME other than ``ok``, or for an OUTCOME that cannot be decoded."""
    try:
        found = outcome(metadata)
    except Malformed as problem:
        return Disconnected(str(problem), "unknown")
    kind = ERROR_OF_OUTCOME.get(found.outcome)
    if kind is None:
        return Disconnected(
            f"the supervisor reported an outcome that this client does not know ({found}); update bulkhead-py",
            found.executed,
        )
    return kind(found, payload)


def progress(metadata: bytes) -> tuple[float, str]:
    """Decodes a PROGRESS: a fraction from 0 to 1, and a short text."""
    fraction, _ = _PROGRESS.unpack_from(metadata)
    return fraction, read_text(metadata, 4)[0]


def progressed(fraction: float, words: str) -> bytes:
    """Encodes the metadata of PROGRESSED."""
    return struct.pack("<f", min(max(fraction, 0.0), 1.0)) + text(words, MESSAGE_BYTES_MAX) + EMPTY


def failed(code: str, message: str, retryable: bool, fault: str) -> bytes:
    """Encodes the metadata of FAILED."""
    texts = text(code, CODE_BYTES_MAX) + text(message, MESSAGE_BYTES_MAX)
    return texts + bytes((retryable, 1 if fault == "caller" else 2)) + EMPTY


#: Encoding of two empty text fields.
_NO_TEXTS = bytes(16)


def job(metadata: bytes) -> tuple[str, str, int, str | None, bytes | None]:
    """Decodes a JOB: operation, tenant, remaining time in µs, traceparent, memory file of the payload."""
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
    return operation, tenant, remaining, traceparent, given.get(LEASE_REF)


def client_welcome(metadata: bytes) -> int:
    """Decodes a CLIENT_WELCOME. Returns the supervisor's capabilities."""
    return int(_CLIENT_WELCOME.unpack_from(metadata)[2])


def numbers(payload: bytes | bytearray) -> set[int]:
    """Decodes the payload of a GOAWAY: the request numbers of the accepted jobs that have no outcome yet."""
    return {number for (number,) in NUMBER.iter_unpack(payload)}


class WorkerWelcome:
    """Fields of a WORKER_WELCOME that a worker uses."""

    def __init__(self, metadata: bytes) -> None:
        fields = _WORKER_WELCOME.unpack_from(metadata)
        self.capabilities, _slot, _generation, self.max_in_flight, self.heartbeat_ms, self.result_bytes_max = fields[2:]
        _bulkhead, at = read_text(metadata, _WORKER_WELCOME.size)
        self.seal = read_extensions(metadata, at).get(SEAL)


def refused(metadata: bytes) -> tuple[str, str]:
    """Decodes a REFUSED: the reason, and a human-readable sentence."""
    (code,) = _CODE.unpack_from(metadata)
    reason = REJECTED[code - 1] if 0 < code <= len(REJECTED) else f"unknown reason {code}"
    return reason, read_text(metadata, 1)[0]


class Reader:
    """Splits received data into frames. Large payloads are received directly into their final buffers.

    An exception at any point, such as one from a signal handler, loses no data. Each step is a single call that either
    takes effect or does not, and can be repeated. After such an exception, a frame can occur twice in ``frames``.
    ``allocate`` returns the buffer for a large payload.
    """

    __slots__ = ("_allocate", "_flags", "_receive", "_receive_into", "_state", "frames")

    def __init__(
        self,
        receive: Callable[[int, int], bytes],
        receive_into: Callable[[memoryview, int, int], int],
        flags: int = 0,
        allocate: Callable[[int], bytearray] = bytearray,
    ) -> None:
        self._receive = receive
        self._receive_into = receive_into
        self._flags = flags
        self._allocate = allocate
        # Received chunks that do not yet form a complete frame, and a large payload with the sizes of its received
        # parts.
        self._state: tuple[list[bytes], tuple[Frame, memoryview, list[int]] | None] = [], None
        #: Complete frames. The reader's user removes them.
        self.frames: deque[Frame] = deque()

    def read(self) -> bool:
        """Receives once, and appends complete frames to ``frames``. Returns true if more data may be available.

        Raises ``EOFError`` if the peer has closed the connection, ``BlockingIOError`` and other ``OSError`` from the
        socket, and ``Malformed``.
        """
        chunks, large = self._state
        if large is not None:
            return self._read_large(*large)
        before = len(chunks)
        # map() stores the received chunk in the list before any signal handler can run.
        chunks.extend(map(self._receive, (READ_BYTES,), (self._flags,)))
        received = chunks[before]
        if not received:
            raise EOFError
        self._cut(chunks)
        return len(received) == READ_BYTES

    def take(self, chunk: bytes) -> None:
        """Adds data that the caller has received from the socket."""
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
                raise Malformed("the supervisor sent a frame with metadata longer than the frame")
            if flags & CRITICAL and kind not in KNOWN:
                raise Malformed(f"the supervisor sent a critical frame of unknown kind {kind}: update bulkhead-py")
            start = at + 16
            middle = start + metadata_length
            stop = start + length
            if stop <= end:
                whole.append((kind, number, data[start:middle], data[middle:stop]))
                at = stop
                continue
            if middle <= end and length - metadata_length > INLINE_BYTES_MAX:
                payload = self._allocate(length - metadata_length)
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
