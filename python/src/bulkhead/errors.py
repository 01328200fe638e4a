"""Defines ``Outcome``, and one exception for each outcome other than ``ok``.

Also defines the exceptions for a lost connection and a missing supervisor. ``_wire`` creates outcomes from frames, and
the clients and pools raise the exceptions. ``_again`` decides which jobs are sent again.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "Cancelled",
    "Crashed",
    "DeadlineExceeded",
    "Disconnected",
    "Failed",
    "JobError",
    "Outcome",
    "Rejected",
    "SupervisorNotFound",
]

_HTTP_STATUS = {"ok": 200, "failed": 422, "rejected": 503, "deadline_exceeded": 504, "crashed": 502, "cancelled": 499}
_HTTP_STATUS_OF_REASON = {
    "invalid": 400,
    "too_large": 413,
    "not_found": 404,
    "unauthenticated": 401,
    "forbidden": 403,
    "rate_limited": 429,
    "tenant_quota": 429,
    "backpressure": 429,
    "quarantined": 422,
}


class Outcome:
    """Immutable result of a job. All times are in seconds.

    ===============  =================================================================================================
    ``outcome``      ``ok``, ``failed``, ``rejected``, ``deadline_exceeded``, ``crashed`` or ``cancelled``
    ``reason``       cause: ``queue_full``, ``running``, ``signal``, ...; the handler's code if it failed; else empty
    ``message``      human-readable description, possibly empty
    ``executed``     whether the handler began: ``no``, ``yes`` or ``unknown``
    ``retryable``    true if a retry is safe and may have another outcome
    ``retry_after``  time to wait before a retry, if the supervisor specified one
    ``fault``        ``caller`` or ``dependency`` if the job failed, else empty
    ``attempts``     number of times that the job was dispatched to a worker
    ``queued``       time that the job waited for a permit
    ``ran``          time that the job spent in a worker
    ``deadline``     the time limit that applied, end to end
    ``run_limit``    maximum run time of each attempt, if there was a limit
    ``worker_pid``   process that ran the job last, if any
    ``status``       exit code or signal of a crash, if known; for ``ok`` and ``failed`` the program's exit status
    ``bulkhead``     bulkhead that served the job, or to which it was submitted
    ``job``          number of an accepted job in the log, in events and in crash reports
    ``traceparent``  span of the job, if there is one
    ``report``       ID of the report if the job crashed or was late: ``bulkhead crashes ID`` shows it
    ===============  =================================================================================================
    """

    outcome: str
    reason: str
    message: str
    executed: str
    retryable: bool
    retry_after: float | None
    fault: str
    attempts: int
    queued: float
    ran: float
    deadline: float
    run_limit: float | None
    worker_pid: int | None
    status: int | None
    bulkhead: str
    job: str | None
    traceparent: str | None
    report: str | None

    __slots__ = sorted(__annotations__)

    def __init__(
        self,
        outcome: str,
        reason: str = "",
        message: str = "",
        *,
        executed: str = "no",
        retryable: bool = False,
        retry_after: float | None = None,
        fault: str = "",
        attempts: int = 0,
        queued: float = 0.0,
        ran: float = 0.0,
        deadline: float = 0.0,
        run_limit: float | None = None,
        worker_pid: int | None = None,
        status: int | None = None,
        bulkhead: str = "",
        job: str | None = None,
        traceparent: str | None = None,
        report: str | None = None,
    ) -> None:
        given = locals()
        for name in self.__slots__:
            object.__setattr__(self, name, given[name])

    @property
    def http_status(self) -> int:
        """Equivalent HTTP status. Send ``Retry-After`` with 429 and 503."""
        if self.outcome == "rejected":
            return _HTTP_STATUS_OF_REASON.get(self.reason, 503)
        if self.outcome == "disconnected":
            return 503 if self.retryable else 502
        return _HTTP_STATUS[self.outcome]

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as a dictionary."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        """Returns a one-line description, such as ``crashed (signal): killed by SIGSEGV``."""
        reason = f" ({self.reason})" if self.reason else ""
        message = f": {self.message}" if self.message else ""
        return f"{self.outcome}{reason}{message}"

    def __repr__(self) -> str:
        return "Outcome(" + ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items()) + ")"

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Outcome) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.to_dict().values()))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an outcome cannot be changed ({name})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an outcome cannot be changed ({name})")

    def __reduce__(self) -> tuple[Any, ...]:
        return _outcome_of, (self.to_dict(),)


def _outcome_of(fields: dict[str, Any]) -> Outcome:
    return Outcome(**fields)


class JobError(Exception):
    """A job ended with an outcome other than ``ok``. The text describes the problem and the remedy.

    ``payload`` contains the bytes that a handler added to its failure, or the first 64 KiB of a program's standard
    output.
    """

    outcome: Outcome
    payload: bytes | bytearray
    #: Part of the text that refers to the report.
    _report_text = "; see `bulkhead crashes {}`"

    def __init__(self, outcome: Outcome | str, payload: bytes | bytearray = b"") -> None:
        if isinstance(outcome, str):
            # `args` contains only this text. Serialisers such as Celery's rebuild the exception from `args`.
            text, outcome = outcome, _outcome_by_text(type(self), outcome)
        else:
            text = _sentence(outcome, self._report_text)
        super().__init__(text)
        self.outcome = outcome
        self.payload = payload

    def __reduce__(self) -> tuple[Any, ...]:
        notes = getattr(self, "__notes__", None)
        state = {"args": self.args} if notes is None else {"args": self.args, "__notes__": notes}
        return type(self), (self.outcome, bytes(self.payload)), state

    @property
    def executed(self) -> str:
        """Whether the handler began: ``no``, ``yes`` or ``unknown``."""
        return self.outcome.executed

    @property
    def retryable(self) -> bool:
        """True if a retry is safe and may have another outcome."""
        return self.outcome.retryable

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before a retry, or ``None`` if the supervisor specified no time."""
        return self.outcome.retry_after

    @property
    def http_status(self) -> int:
        """Equivalent HTTP status."""
        return self.outcome.http_status


class Failed(JobError):
    """The handler reported a failure. ``outcome.reason`` is the handler's code, ``outcome.message`` the description."""


class Rejected(JobError):
    """The job was rejected and did not run. ``outcome.reason`` is the cause; ``retry_after`` is the time to wait."""


class Crashed(JobError):
    """The worker died after the job had been dispatched to it. It is unknown whether the job ran."""


class Cancelled(JobError):
    """The job was cancelled by the client, or because the client disconnected."""


class DeadlineExceeded(JobError, TimeoutError):
    """The job's deadline or run limit passed.

    If the job was running (see ``executed``), its worker process is killed unless the job stops on its own.
    """


class Disconnected(JobError, ConnectionError):
    """The supervisor is not reachable, or the connection was lost.

    ``executed`` is ``no`` if the job was not sent, else ``unknown``.
    """

    def __init__(self, message: str, executed: str = "no") -> None:
        outcome = Outcome("disconnected", "", message, executed=executed, retryable=executed == "no")
        super().__init__(outcome)
        self.args = (message,)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outcome.message, self.outcome.executed)


class SupervisorNotFound(FileNotFoundError):
    """The program ``bulkhead-supervisor`` is not installed. The text describes the remedy."""


def _outcome_by_text(kind: type[JobError], text: str) -> Outcome:
    name = next((name for name, base in ERROR_OF_OUTCOME.items() if issubclass(kind, base)), "failed")
    return Outcome(name, "", text, executed="no" if name == "rejected" else "unknown")


def _sentence(outcome: Outcome, report_text: str) -> str:
    text = str(outcome)
    see = report_text.format(outcome.report) if outcome.report else ""
    if outcome.outcome == "rejected" and outcome.retryable and outcome.retry_after is not None:
        return f"{text}; try again after {outcome.retry_after:.3f} s"
    if outcome.outcome == "deadline_exceeded":
        if outcome.run_limit is not None and outcome.ran >= outcome.run_limit:
            advice = "raise the run limit, or give the job less work"
            return f"{text}: the job reached the run limit of {outcome.run_limit:g} s; {advice}{see}"
        if outcome.run_limit is not None and outcome.reason == "queued" and outcome.queued < outcome.deadline / 2:
            advice = "raise the run limit"
            return f"{text}: the run limit expired several times before a worker began the job; {advice}{see}"
        advice = "raise the deadline, or send fewer jobs concurrently"
        return f"{text}: the job did not finish within {outcome.deadline:g} s; {advice}{see}"
    if outcome.outcome == "crashed":
        if outcome.retryable:
            return f"{text}; the job can be sent again{see}"
        advice = "the job may have run: send the job again only if it can safely run twice"
        return f"{text}; {advice}{see}"
    return text


ERROR_OF_OUTCOME: dict[str, type[JobError]] = {
    "failed": Failed,
    "rejected": Rejected,
    "deadline_exceeded": DeadlineExceeded,
    "crashed": Crashed,
    "cancelled": Cancelled,
}
