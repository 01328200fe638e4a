"""The synchronous client, which submits jobs, connects on demand, and reconnects if the connection is lost.

``_connection`` exchanges the frames, and ``_again`` decides which jobs are sent again. ``AsyncClient`` is in ``_aio``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from functools import partial

from . import _again, _wire
from ._connection import (
    Connection,
    Lost,
    NotSent,
    NotTaken,
    Unanswered,
    handshake_seconds,
    lost_before_sent,
    lost_error,
    of_parent,
)
from ._reply import Reply
from ._runtime_dir import runtime_dir
from .errors import Disconnected, JobError, Outcome, Rejected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ._future import JobFuture

#: Maximum number of cached option combinations.
SUBMISSIONS_MAX = 1024


def default_socket() -> str:
    """Returns the path of the jobs socket: ``$BULKHEAD_SOCKET``, or the supervisor's default."""
    named = os.environ.get("BULKHEAD_SOCKET")
    if named:
        return named
    folder = None if os.geteuid() == 0 else runtime_dir()
    return os.path.join(folder or "/run", "bulkhead", "jobs.sock")


def as_buffer(payload: object) -> _wire.Buffer:
    """Returns a payload as one contiguous bytes-like object. Raises ``TypeError`` for objects without a buffer."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, str):
        raise TypeError("the payload must be bytes, not str: encode the text")
    try:
        view = memoryview(payload)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"the payload must be a bytes-like object, not {type(payload).__name__}") from None
    # An empty view cannot always be cast.
    return view.cast("B") if view.c_contiguous and view.nbytes else bytes(view)


def submission_with(remembered: dict[tuple[Any, ...], bytes], options: tuple[Any, ...]) -> bytes:
    """Returns the metadata of a SUBMIT frame with these options. The result is cached."""
    metadata = remembered.get(options)
    if metadata is None:
        metadata = _wire.submission(*options)
        if options[7] is None:
            if len(remembered) >= SUBMISSIONS_MAX:
                remembered.clear()
            remembered[options] = metadata
    return metadata


def too_old() -> Rejected:
    """Returns the error for a job with a run limit that the supervisor does not support."""
    return Rejected(Outcome("rejected", "invalid", "the supervisor is too old for run_limit: update the supervisor"))


class BaseClient:
    """Base class of both clients. Holds the path of the socket, the default options and the retry budget."""

    def __init__(self, path: str | os.PathLike[str] | None, retry: bool, reconnect_timeout: float | None) -> None:
        self.path = os.fspath(path) if path is not None else default_socket()
        self.retry = retry
        if reconnect_timeout is not None and not reconnect_timeout >= 0:
            raise ValueError(f"reconnect_timeout must be at least 0 seconds, not {reconnect_timeout!r}")
        self.reconnect_timeout = reconnect_timeout
        self._budget = _again.RetryBudget()
        self._submissions: dict[tuple[Any, ...], bytes] = {}
        self._is_closed = False
        # Number of forks that separate this process from the process that created the client. A call that continues in
        # a forked child does not send its job.
        self._forks = 0
        _clients.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def _after_fork(self) -> None:
        """Drops connections and jobs in a forked child, because they belong to the parent.

        The connections have already been abandoned.
        """
        self._forks += 1
        # Not replaced, because a call that continues in the child refers to the budget.
        self._budget.reset()


class Client(BaseClient):
    """Sends jobs to a supervisor. A program needs only one client, which all threads can share.

    The client connects when the first job is sent, reconnects if the connection is lost, and connects again in a forked
    child. ``path`` is the path of the jobs socket. The default is ``$BULKHEAD_SOCKET``, or the supervisor's default
    path. Closing the client, or exiting the program, cancels its jobs. Code inside a worker cannot use a client,
    because the supervisor rejects connections from its own workers.

    If the connection is lost, the client sends incompletely sent jobs and idempotent jobs again (at most three times).
    Other jobs raise ``Disconnected``. Until the supervisor responds again, jobs wait until their deadline; jobs without
    a deadline wait until five seconds after the loss. ``reconnect_timeout`` is an additional limit for all jobs, in
    seconds. If it is 0, no job waits or is sent again, except jobs that a supervisor being replaced has not accepted.

    ``retry`` is the default for the ``retry`` parameter of ``call``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        retry: bool = False,
        reconnect_timeout: float | None = None,
    ) -> None:
        # Reentrant, because a signal handler can use the client while the client connects.
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        #: Earlier connections, on which a replaced supervisor finishes its jobs.
        self._leaving: list[Connection] = []
        #: Futures whose jobs wait for a connection. One thread sends them.
        self._waiting: deque[JobFuture] = deque()
        self._sender: threading.Thread | None = None
        self._closed = threading.Event()
        super().__init__(path, retry, reconnect_timeout)

    def call(
        self,
        bulkhead: str,
        payload: _wire.Buffer = b"",
        *,
        operation: str = "",
        tenant: str = "",
        deadline: float | None = None,
        run_limit: float | None = None,
        priority: str = "normal",
        idempotent: bool = False,
        cost: int = 1,
        traceparent: str | None = None,
        retry: bool | None = None,
    ) -> Reply:
        """Submits a job and waits for its result. Raises a ``JobError`` for any outcome other than ``ok``.

        ``payload`` is a bytes-like object, which is not copied if it is contiguous. ``deadline`` is the maximum time
        from now to the outcome. ``run_limit`` is the maximum time of each attempt from its dispatch. Both are in
        seconds, and the bulkhead's limits are the defaults. ``priority`` is ``critical``, ``normal`` or
        ``best-effort``. ``cost`` is the number of units that a rate limit counts for this job. An ``idempotent`` job
        can be run again after its worker dies, and after a lost connection.

        If ``retry`` is true, a job whose error is ``retryable`` is retried at most three times, and never beyond its
        deadline. A retry waits for ``retry_after``. If the error has no ``retry_after``, the retries wait for 0.1 s,
        0.2 s and 0.4 s. In any ten seconds, a client retries at most 20 % of the jobs for which retries are enabled,
        but ten retries are always allowed. If there is no further retry, the last error is raised. If an attempt may
        have run (``executed``) and later attempts did not, the error of the attempt that may have run is raised
        instead.

        Raises ``Crashed`` if the worker died, and ``Disconnected`` if the connection was lost and the job cannot be
        sent again. Also raises ``Disconnected`` if the supervisor has sent no outcome 10 s after the deadline. Raises
        ``DeadlineExceeded`` if a time limit passed; the worker is then killed unless the job stops on its own.
        ``KeyboardInterrupt`` cancels the job.
        """
        options = (bulkhead, operation, tenant, deadline, priority, idempotent, cost, traceparent, run_limit)
        metadata = submission_with(self._submissions, options)
        data = as_buffer(payload)
        forks = self._forks
        if not (self.retry if retry is None else retry):
            return self._call(options, metadata, data, forks)
        retries = _again.Retries(self._budget, options)
        while True:
            try:
                return self._call(options, metadata, data, forks)
            except JobError as error:
                pause = retries.pause_after(error)
                if self._closed.wait(pause):
                    raise
                self._check_process(forks)
            options = retries.options()
            metadata = _wire.submission(*options)

    def _check_process(self, forks: int) -> None:
        """Raises the error for a job of the parent if this process was forked during the call."""
        if self._forks != forks:
            raise of_parent() from None

    def _call(self, options: tuple[Any, ...], metadata: bytes, data: _wire.Buffer, forks: int) -> Reply:
        deadline = options[_again.DEADLINE]
        began = 0.0 if deadline is None else time.monotonic()
        connection = self._connection
        try:
            connected = self._connected(options, deadline)
        except Disconnected as error:
            if connection is None or not connection.is_over:
                # There is no connection at all.
                raise
            problem: Exception = error
        else:
            self._check_process(forks)
            try:
                return connected.call(metadata, data, None if deadline is None else began + deadline)
            except Unanswered as error:
                raise error.error from None
            except (NotSent, Lost) as error:
                problem = error
        job = _again.Job(options, metadata, data, began, self.reconnect_timeout)
        return self._call_again(job, connection, problem, forks)

    def _call_again(self, job: _again.Job, connection: Connection | None, problem: Exception, forks: int) -> Reply:
        """Sends a job after its connection was lost, or while the client has lost its connection."""
        while True:
            self._check_process(forks)
            if isinstance(problem, JobError):
                # No connection could be made.
                since = None if connection is None else connection.lost_at
                may_wait = job.lost(False, since) and problem.retryable and not job.is_overdue()
                if not may_wait or self._pause(job) or job.is_overdue():
                    raise job.unreachable(problem) from None
            else:
                was_taken = not isinstance(problem, NotTaken)
                is_repeated = job.lost(isinstance(problem, Lost), was_taken=was_taken) and not self._closed.is_set()
                if is_repeated and was_taken:
                    is_repeated = not self._pause(job) and not job.is_overdue()
                if not is_repeated:
                    if isinstance(problem, Lost):
                        raise problem.error from None
                    raise lost_error("the job could not be sent", job.executed) from None
            self._check_process(forks)
            try:
                connected = self._connected(job.options, job.wait_seconds(), is_repeated=True)
            except JobError as error:
                problem = error
                continue
            self._check_process(forks)
            try:
                job.update_remaining()
                return connected.call(job.metadata, job.payload, job.ends_at)
            except Unanswered as error:
                raise error.error from None
            except (NotSent, Lost) as error:
                problem, connection = error, connected
            except JobError as error:
                raise job.corrected(error) from None

    def _pause(self, job: _again.Job) -> bool:
        """Waits before another attempt to connect or to send the job. Returns true if the client was closed."""
        job.postpone()
        return self._closed.wait(job.pause_seconds())

    def submit(
        self,
        bulkhead: str,
        payload: _wire.Buffer = b"",
        *,
        operation: str = "",
        tenant: str = "",
        deadline: float | None = None,
        run_limit: float | None = None,
        priority: str = "normal",
        idempotent: bool = False,
        cost: int = 1,
        traceparent: str | None = None,
    ) -> JobFuture:
        """Submits a job and returns a future without waiting for the result. Has the same parameters as ``call``.

        The future's ``cancel()`` also stops a running job. Raises an exception only if the job could not be sent and no
        earlier connection was lost. A payload other than ``bytes`` is copied. The job is not retried.
        """
        from ._future import JobFuture

        options = (bulkhead, operation, tenant, deadline, priority, idempotent, cost, traceparent, run_limit)
        metadata = submission_with(self._submissions, options)
        data = as_buffer(payload)
        if not isinstance(data, bytes):
            # The client keeps the payload after this method has returned.
            data = bytes(data)
        future = JobFuture(_again.Job(options, metadata, data, time.monotonic(), self.reconnect_timeout))
        connection, forks = self._connection, self._forks
        try:
            connected = self._connected(options, deadline)
            self._check_process(forks)
            connected.start(future)
        except (NotSent, Lost) as error:
            self._check_process(forks)
            self._send_unsent_again(future, error)
        except JobError as error:
            self._check_process(forks)
            if connection is None or not connection.is_over:
                raise
            self._wait_for_connection([future], error, connection.lost_at)
        return future

    def _connected(
        self,
        options: tuple[Any, ...],
        left: float | Callable[[], float | None] | None,
        *,
        is_repeated: bool = False,
    ) -> Connection:
        """Returns a connection that is not known to be lost and accepts further jobs.

        ``left`` and ``is_repeated`` limit the time to make a new connection (see ``handshake_seconds``). A function
        ``left`` is called only if a new connection is needed.
        """
        connection = self._connection
        if connection is None or connection.is_over:
            with self._lock:
                connection = self._connection
                if self._is_closed:
                    raise RuntimeError("the client is closed")
                if connection is None or connection.is_over:
                    if connection is not None and connection not in self._leaving:
                        self._leaving = [other for other in (*self._leaving, connection) if other.lost is None]
                    send_again = partial(_send_lost_again, weakref.ref(self), self.path)
                    seconds = handshake_seconds(left() if callable(left) else left, is_repeated=is_repeated)
                    forks = self._forks
                    connection = Connection(self.path, send_again, seconds, self._waiting)
                    # If a signal handler has forked, this connection belongs to the parent.
                    self._check_process(forks)
                    if self._is_closed:
                        connection.lose("this program closed the client")
                        raise RuntimeError("the client is closed")
                    self._connection = connection
        if options[_again.RUN_LIMIT] is not None and not connection.capabilities & _wire.SUPERVISOR_RUN_LIMIT:
            raise too_old()
        return connection

    # Futures that wait for a connection.

    def _send_unsent_again(self, future: JobFuture, error: NotSent | Lost) -> None:
        """Sends a job again if its connection closed while the job was being sent."""
        reason = "the job could not be sent"
        self._send_again([future], reason, isinstance(error, Lost), was_taken=not isinstance(error, NotTaken))

    def _send_again(self, futures: list[JobFuture], reason: str, was_sent: bool, *, was_taken: bool = True) -> None:
        """Sends jobs again after their connection was lost. Jobs that cannot be sent again fail.

        ``was_taken`` is false if a supervisor that is being replaced has not accepted the jobs.
        """
        waiting = []
        for future in futures:
            job = future.job
            if job is None or future.cancelled():
                continue
            is_repeated = job.lost(was_sent and not job.is_incomplete, was_taken=was_taken) and not self._is_closed
            if is_repeated and was_taken:
                job.postpone()
                is_repeated = not job.is_overdue()
            if is_repeated:
                waiting.append(future)
            else:
                future.lose(lost_error(reason, job.executed))
        self._send_later(waiting)

    def _wait_for_connection(self, futures: list[JobFuture], error: JobError, since: float) -> None:
        """Sends jobs as soon as there is a connection. ``error`` says why there has been none since ``since``."""
        for future in futures:
            job = future.job
            assert job is not None
            if not job.lost(False, since) or not error.retryable or (job.waits_until or 0.0) <= time.monotonic():
                raise error
        self._send_later(futures)

    def _send_later(self, futures: list[JobFuture]) -> None:
        if not futures:
            return
        with self._lock:
            self._waiting.extend(futures)
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_waiting, name="bulkhead-reconnect", daemon=True)
                try:
                    self._sender.start()
                except BaseException:
                    # No thread can be started now.
                    self._sender = None
                    self._fail_waiting(Disconnected("failed to start a thread to reconnect"))

    def _send_waiting(self) -> None:
        """Sends the waiting jobs, and reconnects as often as necessary. Runs in a separate thread."""
        pause = _again.RECONNECT_PAUSE_MIN
        while True:
            with self._lock:
                if not self._waiting:
                    self._sender = None
                    return
                # A paused job does not delay the jobs behind it.
                future = next((other for other in self._waiting if not _is_paused(other)), None)
            if self._closed.is_set():
                self._fail_waiting(lost_error("this program closed the client"))
                continue
            if future is None:
                # A job without a pause can arrive in the meantime.
                if not self._closed.wait(_again.RECONNECT_PAUSE_MIN):
                    self._end_overdue(lost_before_sent())
                continue
            job = future.job
            if job is None or future.cancelled():
                self._waiting.remove(future)
                continue
            try:
                connection = self._connected(job.options, self._wait_seconds, is_repeated=True)
            except JobError as error:
                self._end_overdue(error)
                left = self._wait_seconds()
                if not self._closed.wait(pause if left is None else max(0.0, min(pause, left))):
                    self._end_overdue(error)
                pause = min(pause * 2, _again.RECONNECT_PAUSE_MAX)
                continue
            except RuntimeError:
                # The client was closed.
                continue
            pause = _again.RECONNECT_PAUSE_MIN
            self._waiting.remove(future)
            if future.cancelled():
                # Cancelled while this thread was connecting.
                continue
            try:
                job.update_remaining()
                connection.start(future)
            except (NotSent, Lost) as error:
                self._send_unsent_again(future, error)
                # Short, because other jobs may be waiting. Lost jobs also have a pause of their own.
                self._closed.wait(_again.RECONNECT_PAUSE_MIN)
            except JobError as error:
                future.lose(error)
            except BaseException as error:
                future.lose(Disconnected(f"the job could not be sent: {error!r}", job.executed))

    def _wait_seconds(self) -> float | None:
        """Returns the time until the first waiting job is overdue, or ``None`` if no job has a limit."""
        jobs = [future.job for future in list(self._waiting)]
        waits = [job.wait_seconds() for job in jobs if job is not None]
        return min((wait for wait in waits if wait is not None), default=None)

    def _end_overdue(self, error: JobError) -> None:
        """Fails the jobs that have waited too long, or all jobs if another attempt to connect would be futile."""
        now = time.monotonic()
        for _ in range(len(self._waiting)):
            future = self._waiting.popleft()
            job = future.job
            if job is None or future.cancelled():
                continue
            if error.retryable and (job.waits_until or 0.0) > now:
                self._waiting.append(future)
            else:
                future.lose(job.unreachable(error))

    def _fail_waiting(self, error: Disconnected) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            job = future.job
            if job is not None:
                future.lose(Disconnected(error.outcome.message, job.executed))

    def close(self) -> None:
        """Closes the connection and cancels all jobs in progress."""
        with self._lock:
            self._is_closed = True
            self._closed.set()
            connection, self._connection = self._connection, None
            leaving, self._leaving = self._leaving, []
        for other in (*leaving, connection):
            if other is not None:
                other.lose("this program closed the client")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The attribute does not exist if `__init__` failed.
        connection: Connection | None = getattr(self, "_connection", None)
        for other in (*getattr(self, "_leaving", ()), connection):
            if other is not None:
                other.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Client, retry=self.retry, reconnect_timeout=self.reconnect_timeout), (self.path,)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._lock = threading.RLock()
        is_closed, self._closed = self._closed.is_set(), threading.Event()
        if is_closed:
            self._closed.set()
        waiting, self._waiting, self._sender = self._waiting, deque(), None
        for future in waiting:
            future.forget()
            future.lose(of_parent())
        self._connection = None
        self._leaving = []


def _is_paused(future: JobFuture) -> bool:
    """Returns true if the job must not be sent yet."""
    job = future.job
    return job is not None and job.pause_seconds() > 0


def _send_lost_again(
    client: weakref.ref[Client], path: str, futures: list[JobFuture], reason: str, was_taken: bool
) -> None:
    """Sends the jobs of a lost connection again, even if the client of the connection was dropped."""
    (client() or Client(path))._send_again(futures, reason, was_taken, was_taken=was_taken)


_clients: weakref.WeakSet[BaseClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork)
