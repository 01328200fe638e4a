"""Submits durable jobs to a fleet of hosts over NATS JetStream. Needs the extra ``fleet`` (``nats-py``).

>>> async with await AsyncFleet.connect("nats://n1:4222") as fleet:
...     submitted = await fleet.submit("thumbnail", picture, id="picture-17", idempotent=True)
...     reply = await submitted.result()

The agents of ``bulkhead-fleet`` run the jobs, and ``bulkhead-fleet init`` creates the streams. Outcomes and errors are
the same as for :class:`bulkhead.AsyncClient`. If the host of a job is lost, the job ends as ``Crashed`` with the reason
``host_lost``, unless it is idempotent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import nats.errors

from ._client import as_buffer
from ._fleet_connection import Connection, Forbidden, connect
from ._reply import Reply
from ._wire import SECONDS_MAX, check_submission
from .errors import ERROR_OF_OUTCOME, Disconnected, Outcome, Rejected

if TYPE_CHECKING:
    from ._wire import Buffer

__all__ = ["AsyncFleet", "Submitted"]

#: Default deadline of a job, in seconds.
DEADLINE_DEFAULT = 3600.0
#: Time for which an unacknowledged submission is repeated, in seconds.
SUBMIT_TIMEOUT = 15.0
#: Time limit of one request, in seconds.
REQUEST_TIMEOUT = 5.0
#: Pause after a failed request, in seconds.
PAUSE_AFTER_ERROR = 0.25
#: Maximum pause between two reads of the ledger, in seconds.
READ_PAUSE_MAX = 15.0
#: Number of bytes of each message that are reserved for headers.
HEADER_BYTES_RESERVED = 32 * 1024
#: Request for the names of the streams that accept a subject.
STREAM_NAMES = "$JS.API.STREAM.NAMES"
#: Server error code for a full stream or subject.
STORE_FAILED = 10077
#: Error codes of servers that cannot store messages: no memory or disk space, no majority.
UNAVAILABLE = (10023, 10008)


def escape(name: str) -> str:
    """Escapes a name for use as one token of a subject."""
    plain = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
    return "".join(chr(byte) if byte in plain else f"={byte:02X}" for byte in name.encode()) or "="


def job_subject(bulkhead: str, tenant: str) -> str:
    """Returns the subject of a tenant's jobs."""
    lane = hashlib.sha256(tenant.encode()).digest()[0] % 16
    return f"bh.job.{escape(bulkhead)}.n.{lane}.{escape(tenant)}"


def _millis(seconds: float) -> str:
    return str(max(1, round(min(seconds, SECONDS_MAX) * 1000)))


class AsyncFleet:
    """A connection to a fleet."""

    def __init__(self, connection: Connection, tenant: str, host_lost_after: float) -> None:
        self._nats = connection
        self._tenant = tenant
        self._host_lost_after = host_lost_after

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        tenant: str = "",
        nkey: str | Path | None = None,
        credentials: str | Path | None = None,
        ca: str | Path | None = None,
        host_lost_after: float = 20.0,
    ) -> AsyncFleet:
        """Connects to the servers. Raises ``Disconnected`` if this fails, or if no server is available within 15 s.

        ``nkey`` and ``credentials`` are secret files, which other users must not be able to read. ``ca`` holds CA
        certificates. With ``ca`` or an address that begins with ``tls://``, servers without TLS are refused.
        """
        inbox_prefix = f"_INBOX_{escape(tenant)}" if tenant else "_INBOX"
        connection = await connect(servers, inbox_prefix, nkey, credentials, ca)
        return cls(connection, tenant, host_lost_after)

    async def submit(
        self,
        bulkhead: str,
        payload: Buffer = b"",
        *,
        id: str | None = None,
        operation: str = "",
        tenant: str | None = None,
        deadline: float = DEADLINE_DEFAULT,
        run_limit: float | None = None,
        priority: str = "normal",
        cost: int = 1,
        idempotent: bool = False,
        traceparent: str | None = None,
    ) -> Submitted:
        """Submits a job. Once this returns, the job is stored and survives the loss of any host.

        If a tenant submits several jobs with the same ``id``, only one of them runs. All times are in seconds. Invalid
        arguments raise the same errors as in ``AsyncClient.submit``.
        """
        tenant = self._tenant if tenant is None else tenant
        check_submission(bulkhead, operation, tenant, deadline, priority, cost, traceparent, run_limit)
        payload = bytes(as_buffer(payload))
        id = secrets.token_hex(16) if id is None else id
        headers = {"Bulkhead-Id": id, "Bulkhead-Deadline-Ms": _millis(deadline)}
        optional = {
            "Bulkhead-Operation": operation,
            "Bulkhead-Run-Limit-Ms": "" if run_limit is None else _millis(run_limit),
            "Bulkhead-Priority": "" if priority == "normal" else priority,
            "Bulkhead-Cost": "" if cost == 1 else str(cost),
            "Bulkhead-Idempotent": "true" if idempotent else "",
            "traceparent": traceparent or "",
        }
        headers |= {name: value for name, value in optional.items() if value}
        _check(bulkhead, id, tenant, headers)
        if len(payload) > self._nats.max_payload - HEADER_BYTES_RESERVED:
            raise _rejected(bulkhead, "too_large", f"the payload has {len(payload)} bytes, which is too large")
        await self._publish(bulkhead, tenant, payload, headers)
        # The deadline counts from the time at which the job is stored.
        return Submitted(self, id, tenant, time.monotonic() + deadline + self._host_lost_after)

    async def _publish(self, bulkhead: str, tenant: str, payload: bytes, headers: dict[str, str]) -> None:
        began, may_be_stored, reason, cause = time.monotonic(), False, None, ""
        subject = job_subject(bulkhead, tenant)
        while time.monotonic() - began < SUBMIT_TIMEOUT:
            if self._nats.is_closed:
                executed = "unknown" if may_be_stored else "no"
                raise Disconnected("the fleet was closed before the servers acknowledged the job", executed)
            is_final = True
            try:
                answer = await self._nats.request(subject, payload, timeout=REQUEST_TIMEOUT, headers=headers)
            except nats.errors.NoRespondersError:
                reason, cause = await self._missing_stream(subject)
                is_final = reason == "not_found"
            except Forbidden as error:
                reason, cause = "forbidden", str(error)
            except (nats.errors.Error, asyncio.TimeoutError, OSError) as error:
                reason, cause = None, str(error) or type(error).__name__
            else:
                try:
                    refusal = json.loads(answer.data).get("error")
                    if refusal is None:
                        return
                    reason, cause = _reason(refusal), refusal.get("description", "")
                except (AttributeError, TypeError, ValueError):
                    reason, cause = None, "the response is not an acknowledgement"
            may_be_stored = may_be_stored or reason is None
            if reason is not None and is_final and not may_be_stored:
                raise _rejected(bulkhead, reason, cause)
            await asyncio.sleep(PAUSE_AFTER_ERROR)
        if reason is not None and not may_be_stored:
            raise _rejected(bulkhead, reason, cause)
        raise Disconnected(
            f"the servers are not responding: {cause}; the job may have been accepted; submit the job "
            f"again with the same ID ({headers['Bulkhead-Id']}): it runs only once",
            "unknown",
        )

    async def _missing_stream(self, subject: str) -> tuple[str, str]:
        """Returns the reject reason for a subject for which there are no responders, and the cause.

        A stream without a leader has no responders either. The servers list the stream's name only with a majority.
        """
        try:
            request = json.dumps({"subject": subject}).encode()
            names = await self._nats.request_fleet_account(STREAM_NAMES, request, REQUEST_TIMEOUT)
        except (nats.errors.Error, asyncio.TimeoutError, OSError, AttributeError, ValueError) as error:
            return "unavailable", (
                "the fleet has no such bulkhead, or the job stream has no leader; the servers did not say which: "
                f"{str(error) or type(error).__name__}"
            )
        if "error" in names:
            return "unavailable", f"the job stream has no leader: {names['error'].get('description', '')}"
        if names.get("streams"):
            return "unavailable", "the job stream has no leader"
        return "not_found", "the fleet has no such bulkhead"

    async def result(self, id: str, *, tenant: str | None = None, wait: float = 0.0) -> Reply:
        """Returns the result of a job that was submitted earlier, possibly by another process.

        ``wait`` is the maximum time to wait for the outcome, in seconds. After that time, ``Disconnected`` is raised.
        """
        tenant = self._tenant if tenant is None else tenant
        return await Submitted(self, id, tenant, time.monotonic() + wait).result()

    async def _ending(self, tenant: str, id: str) -> tuple[Outcome, bytes] | None:
        """Reads the ledger once. Returns None if the job has no outcome yet."""
        subject = f"$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.{escape(tenant)}.{escape(id)}"
        record = await self._nats.request(subject, b"", timeout=REQUEST_TIMEOUT)
        headers = record.headers or {}
        if headers.get("Bulkhead-Phase") != "decided":
            return None
        try:
            return _outcome(json.loads(headers["Bulkhead-Outcome"])), record.data
        except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {error}"
            sentence = f"the outcome of the job {id} cannot be read: {cause}; update the package bulkhead-py"
            raise Disconnected(sentence, "unknown") from error

    async def close(self) -> None:
        """Closes the connection. Submitted jobs continue."""
        await self._nats.close()

    async def __aenter__(self) -> AsyncFleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Submitted:
    """A submitted job. Dropping it does not cancel the job."""

    def __init__(self, fleet: AsyncFleet, id: str, tenant: str, until: float) -> None:
        #: Job ID.
        self.id = id
        self._fleet = fleet
        self._tenant = tenant
        self._until = until

    async def result(self) -> Reply:
        """Waits for the outcome. If no outcome arrives within ``host_lost_after`` seconds after the deadline, or if the
        outcome cannot be read, raises ``Disconnected``. If the user has no permission to read the outcome, raises
        ``Rejected``. Otherwise raises the same errors as a local job. Can be called repeatedly."""
        connection = self._fleet._nats
        if connection.is_closed:
            raise self._closed()
        # The subscription precedes the first read of the ledger, so that no outcome is missed between the two.
        notices = await connection.subscribe(f"bh.told.{escape(self._tenant)}.{escape(self.id)}")
        try:
            return await self._await(notices)
        finally:
            if not connection.is_closed:
                await notices.unsubscribe()

    async def _await(self, notices: Any) -> Reply:
        pause = 1.0
        while True:
            try:
                ending = await self._fleet._ending(self._tenant, self.id)
            except Forbidden as error:
                outcome = Outcome("rejected", "forbidden", str(error), executed="unknown")
                raise Rejected(outcome) from error
            except Disconnected:  # also an OSError
                raise
            except (nats.errors.Error, asyncio.TimeoutError, OSError):
                ending = None
            if ending is not None:
                return _reply(*ending)
            if self._fleet._nats.is_closed:
                raise self._closed()
            left = self._until - time.monotonic()
            if left <= 0:
                raise Disconnected(f"the job {self.id} has no outcome yet, but may have run", "unknown")
            try:
                await notices.next_msg(timeout=min(pause, left))
                # The replica that responds may not have the record yet.
                pause = 0.05
            except asyncio.TimeoutError:
                pause = min(max(2 * pause, 0.1), READ_PAUSE_MAX)
            except nats.errors.Error:
                # An error can be raised without any wait. The event loop must still run.
                await asyncio.sleep(PAUSE_AFTER_ERROR)

    def _closed(self) -> Disconnected:
        sentence = f"the fleet was closed before the job {self.id} had an outcome; the job may have run"
        return Disconnected(sentence, "unknown")


def _check(bulkhead: str, id: str, tenant: str, headers: dict[str, str]) -> None:
    for name, text, most in (("the ID", id, 128), ("the name of the bulkhead", bulkhead, 64)):
        if not 1 <= len(text.encode()) <= most:
            raise _rejected(bulkhead, "invalid", f"{name} has {len(text.encode())} bytes; use 1 to {most}")
    for text in (bulkhead, tenant, *headers.values()):
        if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in text):
            raise _rejected(bulkhead, "invalid", f"{text!r} contains a control character; remove the character")
    for text in headers.values():
        # The NATS client removes these spaces, so the job would have another ID or operation.
        if text != text.strip():
            raise _rejected(bulkhead, "invalid", f"{text!r} begins or ends with a space; remove the space")


def _reason(error: dict[str, Any]) -> str | None:
    """Returns the reject reason for a server error, or None if the job may have been stored."""
    code, text = error.get("err_code"), error.get("description", "")
    if code == STORE_FAILED and "per subject" in text:
        return "tenant_quota"
    if code == STORE_FAILED and "maximum" in text:
        return "queue_full"
    return "unavailable" if code in UNAVAILABLE or "no space" in text else None


def _rejected(bulkhead: str, reason: str, message: str) -> Rejected:
    retryable = reason in ("tenant_quota", "queue_full", "unavailable")
    return Rejected(Outcome("rejected", reason, message, executed="no", retryable=retryable, bulkhead=bulkhead))


def _outcome(document: dict[str, Any]) -> Outcome:
    def seconds(name: str) -> float | None:
        millis = document.get(name)
        return None if millis is None else float(millis) / 1000

    outcome = document["outcome"]
    if outcome != "ok" and outcome not in ERROR_OF_OUTCOME:
        raise ValueError(f"unknown outcome {outcome!r}")
    status = document.get("exit_code")
    return Outcome(
        outcome,
        document.get("code") or document.get("reason") or "",
        document.get("message") or "",
        executed=document.get("executed", "unknown"),
        retryable=bool(document.get("retryable")),
        retry_after=seconds("retry_after_ms"),
        fault=document.get("fault") or "",
        attempts=int(document.get("attempts", 0)),
        queued=seconds("queued_ms") or 0.0,
        ran=seconds("ran_ms") or 0.0,
        deadline=seconds("deadline_ms") or 0.0,
        run_limit=seconds("run_limit_ms"),
        worker_pid=document.get("worker_pid"),
        status=document.get("status") if status is None else status,
        bulkhead=document.get("bulkhead", ""),
        job=document.get("job"),
        report=document.get("report"),
    )


def _reply(outcome: Outcome, payload: bytes) -> Reply:
    if outcome.outcome == "ok":
        return Reply(payload, b"", outcome)
    raise ERROR_OF_OUTCOME[outcome.outcome](outcome, payload)
