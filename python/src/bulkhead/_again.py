"""Decides which jobs are sent again, after a lost connection or as retries within a budget.

``_client`` and ``_aio`` ask for each decision, and send the jobs. Nothing here waits or uses a connection.
"""

from __future__ import annotations

import threading
import time

from . import _wire
from .errors import Cancelled, Crashed, DeadlineExceeded, Disconnected, JobError, Outcome, Rejected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Maximum number of times that a job is sent again after it may have reached a supervisor. The limit stops a job that
#: crashes every supervisor from being sent forever.
RESENDS_MAX = 3
#: Maximum time that a job without a deadline waits for a reconnection, in seconds.
RECONNECT_SECONDS_MAX = 5.0
#: Pause between two attempts to reconnect, or to send a job again, in seconds. The pause doubles after each attempt.
RECONNECT_PAUSE_MIN = 0.01
RECONNECT_PAUSE_MAX = 1.0

#: Maximum number of retries of a job.
RETRIES_MAX = 3
#: Pause before the first retry, in seconds, if the supervisor specifies no time. The pause doubles with each retry.
RETRY_PAUSE_MIN = 0.1
#: Length of the window over which jobs and retries are counted, in seconds.
BUDGET_WINDOW = 10
#: Maximum number of retries per hundred jobs in a window. Finagle's and Envoy's retry budgets have the same default.
BUDGET_PERCENT = 20
#: Number of retries that are always allowed in a window, because the percentage of a few jobs is less than one retry.
BUDGET_FLOOR = 10

#: Position of the deadline in a tuple of options.
DEADLINE = 3
#: Position of the ``idempotent`` flag in a tuple of options.
IDEMPOTENT = 5
#: Position of the run limit in a tuple of options.
RUN_LIMIT = 8


class Job:
    """A job that the client keeps until the outcome arrives, so that it can be sent again after a lost connection."""

    __slots__ = (
        "_not_before",
        "_pause",
        "_reconnect_timeout",
        "_was_taken",
        "ends_at",
        "is_incomplete",
        "is_sending",
        "losses",
        "metadata",
        "options",
        "payload",
        "waits_until",
    )

    def __init__(
        self,
        options: tuple[Any, ...],
        metadata: bytes,
        payload: _wire.Buffer,
        began: float,
        reconnect_timeout: float | None,
    ) -> None:
        self.options = options
        self.metadata = metadata
        self.payload = payload
        deadline = options[DEADLINE]
        #: Time of the deadline.
        self.ends_at: float | None = None if deadline is None else began + deadline
        self._reconnect_timeout = reconnect_timeout
        # False if a supervisor that is being replaced has not accepted the job.
        self._was_taken = True
        #: Number of connections that were lost after the job had been sent over them.
        self.losses = 0
        #: Time until which the job waits for a connection.
        self.waits_until: float | None = None
        #: True while a thread is sending the job. If the connection is lost, this thread decides what happens to the
        #: job.
        self.is_sending = False
        #: True if the connection broke before the whole job was sent. The supervisor has then not begun the job.
        self.is_incomplete = False
        # Pause before the next attempt to send the job, and the time at which the current pause ends.
        self._pause = RECONNECT_PAUSE_MIN
        self._not_before = 0.0

    def lost(self, was_sent: bool, since: float | None = None, *, was_taken: bool = True) -> bool:
        """Records a lost connection. Returns true if the job may be sent again.

        The job waits for a reconnection from the time ``since``, by default from now. ``was_taken`` is false if a
        supervisor that is being replaced has not accepted the job. Such a job waits for the new supervisor even with a
        reconnect timeout of 0.
        """
        if was_sent:
            self.losses += 1
            self.waits_until = None
            self._was_taken = True
        if not was_taken:
            self._was_taken = False
        limit = self._reconnect_timeout
        if limit == 0 and not self._was_taken:
            limit = RECONNECT_SECONDS_MAX
        if self.waits_until is None:
            if limit is None and self.ends_at is None:
                limit = RECONNECT_SECONDS_MAX
            ends = [] if self.ends_at is None else [self.ends_at]
            if limit is not None:
                ends.append((time.monotonic() if since is None else since) + limit)
            self.waits_until = min(ends)
        may_run_again = not self.losses or (self.options[IDEMPOTENT] and self.losses <= RESENDS_MAX)
        return may_run_again and limit != 0

    def wait_seconds(self) -> float | None:
        """Returns the time for which the job can still wait for a connection, or ``None`` if it has no limit.

        A job that has already waited too long has until its deadline for one more attempt to connect.
        """
        end = self.ends_at if self.waits_until is None or self.is_overdue() else self.waits_until
        return None if end is None else end - time.monotonic()

    def is_overdue(self) -> bool:
        """Returns true if the job has waited too long for a connection."""
        return self.waits_until is not None and self.waits_until <= time.monotonic()

    def postpone(self) -> None:
        """Begins the pause before the next attempt to connect or to send the job. Each pause is twice as long.

        A pause ends when the job is overdue, or after ``RECONNECT_PAUSE_MAX``.
        """
        self._not_before = time.monotonic() + self._pause
        if self.waits_until is not None:
            self._not_before = min(self._not_before, self.waits_until)
        self._pause = min(self._pause * 2, RECONNECT_PAUSE_MAX)

    def pause_seconds(self) -> float:
        """Returns the remaining time of the current pause, or 0."""
        return max(0.0, self._not_before - time.monotonic()) if self._not_before else 0.0

    @property
    def executed(self) -> str:
        """Whether the handler began, for a job without an outcome that is not being sent."""
        return "unknown" if self.losses else "no"

    def update_remaining(self) -> None:
        """Encodes the remaining time in ``metadata``. Raises ``DeadlineExceeded`` if the deadline has passed."""
        if self.ends_at is None:
            return
        left = self.ends_at - time.monotonic()
        if left <= 0:
            limit = self.options[DEADLINE]
            outcome = Outcome(
                "deadline_exceeded", "queued", retryable=True, queued=limit, deadline=limit, bulkhead=self.options[0]
            )
            raise self.corrected(DeadlineExceeded(outcome))
        self.metadata = _wire.submission(*with_deadline(self.options, left))

    def corrected(self, error: JobError) -> JobError:
        """Corrects the error of a job that had already been sent over an earlier, lost connection.

        The job may have run over the earlier connection, even if the supervisor on the later connection reports that
        the job did not run.
        """
        if not self.losses or error.executed != "no":
            return error
        if isinstance(error, (Rejected, DeadlineExceeded)):
            message = (
                "the connection to the supervisor was lost while the job was in progress; "
                f"the job was sent again and ended as {error.outcome}"
            )
            fields = {"outcome": "crashed", "reason": "stopped", "message": message, "executed": "unknown"}
            return Crashed(Outcome(**{**error.outcome.to_dict(), **fields}))
        if isinstance(error, Cancelled):
            return Cancelled(Outcome(**{**error.outcome.to_dict(), "executed": "unknown"}))
        return Disconnected(error.outcome.message, "unknown")

    def unreachable(self, error: JobError) -> JobError:
        """Returns the error for a job that waited too long for a connection."""
        if not self.losses:
            return _copy(error)
        text = error.outcome.message.removesuffix("; the job was not sent")
        advice = "the job may have run: send the job again only if it can safely run twice"
        return Disconnected(f"{text}; {advice}", "unknown")


def _copy(error: JobError) -> JobError:
    """Returns a copy of an exception, because each raise modifies the traceback."""
    kind, arguments, *_ = error.__reduce__()
    copied: JobError = kind(*arguments)
    return copied


def with_deadline(options: tuple[Any, ...], seconds: float) -> tuple[Any, ...]:
    """Returns the options with another deadline."""
    return (*options[:DEADLINE], seconds, *options[DEADLINE + 1 :])


class RetryBudget:
    """Counts a client's jobs and retries, so that retries do not multiply the load on a busy supervisor."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all jobs. Also used in forked children, because another thread of the parent may hold the lock."""
        # Reentrant, because a signal handler can use the client at any point.
        self._lock = threading.RLock()
        # The number of each second, and the jobs and retries in this second.
        self._seconds = [[-1, 0, 0] for _ in range(BUDGET_WINDOW)]

    def _second(self, now: float) -> list[int]:
        number = int(now)
        second = self._seconds[number % BUDGET_WINDOW]
        if second[0] != number:
            second[:] = [number, 0, 0]
        return second

    def job(self, now: float) -> None:
        """Counts a job that may be retried. ``now`` is a time in seconds."""
        with self._lock:
            self._second(now)[1] += 1

    def try_retry(self, now: float) -> bool:
        """Returns true if the budget allows a retry. If so, charges the retry to the budget."""
        with self._lock:
            recent = [second for second in self._seconds if int(now) - BUDGET_WINDOW < second[0] <= int(now)]
            jobs = sum(second[1] for second in recent)
            retries = sum(second[2] for second in recent) + 1
            is_allowed = retries <= BUDGET_FLOOR or retries * 100 <= jobs * BUDGET_PERCENT
            self._second(now)[2] += is_allowed
            return is_allowed


class Retries:
    """Decides whether and when one job is retried."""

    def __init__(self, budget: RetryBudget, options: tuple[Any, ...]) -> None:
        now = time.monotonic()
        self._budget = budget
        self._options = options
        deadline = options[DEADLINE]
        self._ends_at: float | None = None if deadline is None else now + deadline
        self._count = 0
        self._reported: JobError | None = None
        budget.job(now)

    def pause_after(self, error: JobError) -> float:
        """Returns the seconds to wait before the next attempt. Raises the job's error if no further attempt follows."""
        pause = error.retry_after
        if pause is None:
            pause = RETRY_PAUSE_MIN * 2**self._count
        now = time.monotonic()
        is_retried = (
            self._count < RETRIES_MAX
            and error.retryable
            and (self._ends_at is None or now + pause < self._ends_at)
            and self._budget.try_retry(now)
        )
        # The error of a retry that did not run would obscure the fact that an earlier attempt may have run.
        if self._reported is None or self._reported.executed == "no" or error.executed != "no":
            self._reported = error
        if not is_retried:
            raise self._reported from None
        self._count += 1
        return pause

    def options(self) -> tuple[Any, ...]:
        """Returns the options for the next attempt, with the remaining time as the deadline."""
        if self._ends_at is None:
            return self._options
        return with_deadline(self._options, max(1e-6, self._ends_at - time.monotonic()))
