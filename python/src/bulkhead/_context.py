"""``Context``, which a handler gets with each job, and ``HandlerError``, which a handler raises to report a failure.

``_serve`` creates the contexts, and sends the results and errors. A context stores the job's data and forwards
progress.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    #: A handler function, called with the payload and the context of a job.
    Handler = Callable[..., Any]

    class _Server(Protocol):
        """The part of the job loop's interface that a ``Context`` uses."""

        state: Any

        def report_progress(self, job: Context, fraction: float, text: str) -> None: ...


class HandlerError(Exception):
    """Raised by a handler to report a failure.

    ``code`` is a short, machine-readable name, and ``message`` is a human-readable sentence. ``retryable`` is true if
    the same job may succeed later. ``fault`` is ``"dependency"``, or ``"caller"`` if the job itself was wrong. Failures
    with ``fault`` set to ``"caller"`` do not count against the bulkhead. The client receives ``payload`` as
    ``JobError.payload``. At most 128 bytes of the code, 8 KiB of the message and 64 KiB of the payload are sent.
    """

    def __init__(
        self, code: str, message: str = "", *, retryable: bool = False, fault: str = "dependency", payload: bytes = b""
    ) -> None:
        for name, value in (("code", code), ("message", message)):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be str, not {type(value).__name__}")
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise TypeError(f"payload must be bytes, not {type(payload).__name__}")
        if fault not in ("caller", "dependency"):
            raise ValueError(f"fault must be 'caller' or 'dependency', not {fault!r}")
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.retryable = retryable
        self.fault = fault
        self.payload = payload

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code


class Context:
    """A running job, passed to its handler."""

    __slots__ = (
        *("_arrival", "_deadline", "_is_replied", "_payload", "_progress", "_progress_sent_at", "_server", "_task"),
        *("cancelled", "number", "operation", "tenant", "traceparent"),
    )

    #: Operation and tenant that the client requested; empty if the client specified none.
    operation: str
    tenant: str
    #: Job number. Logs, events and crash reports show this number in hexadecimal.
    number: int
    #: W3C traceparent of the job's span, or None.
    traceparent: str | None
    #: True if no client is waiting for the job any more. A handler that checks this and returns early is not killed.
    #: Async handlers are cancelled.
    cancelled: bool

    def __init__(
        self,
        server: _Server,
        arrival: int,
        number: int,
        operation: str,
        tenant: str,
        deadline: float,
        traceparent: str | None,
        payload: Any,
    ) -> None:
        self._server = server
        self._arrival = arrival
        self._deadline = deadline
        self._payload = payload
        # Progress report that has not been sent yet.
        self._progress: tuple[float, str] | None = None
        self._progress_sent_at = 0.0
        self._is_replied = False
        self._task: Any = None
        self.cancelled = False
        self.number = number
        self.operation = operation
        self.tenant = tenant
        self.traceparent = traceparent

    @property
    def remaining(self) -> float:
        """Seconds until the job's deadline, or 0 if the deadline has passed."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def state(self) -> Any:
        """Value that ``init`` returned."""
        return self._server.state

    def progress(self, fraction: float, text: str = "") -> None:
        """Reports progress to the client, as a fraction from 0 to 1 and a short text.

        Can be called at any rate. The client gets at most ten reports per second, and the last report before the
        result.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be str, not {type(text).__name__}")
        self._server.report_progress(self, float(fraction), text)

    def __repr__(self) -> str:
        return f"<Context of job {self.number:x} {self.operation!r}>"
