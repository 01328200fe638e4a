"""The client: what a program asks for, and a connection when it is needed."""

from __future__ import annotations

import os
import threading
import weakref

from . import _wire
from ._connection import Connection, NotSent, Reply
from .errors import Disconnected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._future import JobFuture

#: How many combinations of options are remembered.
SUBMISSIONS_MAX = 1024


def default_socket() -> str:
    """The path of the jobs socket: ``$BULKHEAD_SOCKET``, or where the supervisor has it if nothing else is said."""
    named = os.environ.get("BULKHEAD_SOCKET")
    if named:
        return named
    folder = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR", "/run")
    return os.path.join(folder, "bulkhead", "jobs.sock")


def as_buffer(payload: object) -> _wire.Buffer:
    """A payload as bytes in one piece. Raises ``TypeError`` for what has none."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, str):
        raise TypeError("a payload is bytes, not str: encode it")
    try:
        view = memoryview(payload)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"a payload is bytes, or what has a buffer of them, not {type(payload).__name__}") from None
    return view.cast("B") if view.c_contiguous else bytes(view)


def submission_with(remembered: dict[tuple[Any, ...], bytes], options: tuple[Any, ...]) -> bytes:
    """The metadata of SUBMIT, which is the same for the same options."""
    metadata = remembered.get(options)
    if metadata is None:
        metadata = _wire.submission(*options)
        if options[7] is None:
            if len(remembered) >= SUBMISSIONS_MAX:
                remembered.clear()
            remembered[options] = metadata
    return metadata


class BaseClient:
    """State of both clients: the path of the socket, and the options of earlier jobs."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = os.fspath(path) if path is not None else default_socket()
        self._submissions: dict[tuple[Any, ...], bytes] = {}
        self._is_closed = False
        _clients.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def _after_fork(self) -> None:
        """Leaves connections and jobs to the parent."""
        raise NotImplementedError


class Client(BaseClient):
    """Sends jobs to a supervisor. One for a program is enough: all threads may use it.

    It connects with the first job, again after a loss, and again in a child after fork. ``path`` is that of the jobs
    socket; without it ``$BULKHEAD_SOCKET``, else where the supervisor has it. A program that ends, or closes it, has
    cancelled its jobs. Code inside a worker cannot be a client: the supervisor refuses its own workers.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Taken twice by a signal's handler that comes while it connects.
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        super().__init__(path)

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
    ) -> Reply:
        """Has a job done, and waits for its result. Raises a ``JobError`` that says what became of it otherwise.

        ``deadline`` is the longest from now to the outcome, ``run_limit`` the longest of each attempt from its
        dispatch, both in seconds; without them the bulkhead's hold. ``priority`` is ``critical``, ``normal`` or
        ``best-effort``; ``cost`` is what a rate limit counts. An ``idempotent`` job may run again when its worker
        died. ``payload`` is anything with a buffer of bytes, and is not copied.

        A worker that dies is ``Crashed``; a limit that passed ``DeadlineExceeded``, and the process was ended if it
        did not yield; a supervisor that is gone ``Disconnected``. ``KeyboardInterrupt`` cancels the job.
        """
        options = (bulkhead, operation, tenant, deadline, priority, idempotent, cost, traceparent, run_limit)
        metadata = submission_with(self._submissions, options)
        data = as_buffer(payload)
        while True:
            connection, is_fresh = self._connected(run_limit)
            try:
                return connection.call(metadata, data)
            except NotSent:
                self._retire(connection, is_fresh)

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
        """As ``call``, but returns a future as soon as the job is sent, whose ``cancel()`` also ends a running job.

        Raises only if the job could not be sent.
        """
        from ._future import JobFuture

        options = (bulkhead, operation, tenant, deadline, priority, idempotent, cost, traceparent, run_limit)
        future = JobFuture()
        metadata = submission_with(self._submissions, options)
        data = as_buffer(payload)
        while True:
            connection, is_fresh = self._connected(run_limit)
            try:
                connection.start(metadata, data, future)
                return future
            except NotSent:
                self._retire(connection, is_fresh)

    def _connected(self, run_limit: float | None) -> tuple[Connection, bool]:
        """A connection that was there a moment ago, and whether it was made just now."""
        connection = self._connection
        is_fresh = False
        if connection is None or connection.lost is not None:
            with self._lock:
                connection = self._connection
                if self._is_closed:
                    raise RuntimeError("the client is closed")
                if connection is None or connection.lost is not None:
                    connection = Connection(self.path)
                    if self._is_closed:
                        connection.lose("it was closed here")
                        raise RuntimeError("the client is closed")
                    self._connection = connection
                    is_fresh = True
        if run_limit is not None and not connection.capabilities & _wire.CLIENT_RUN_LIMIT:
            raise Disconnected("the supervisor does not know run_limit: update it, or use deadline alone")
        return connection, is_fresh

    def _retire(self, connection: Connection, is_fresh: bool) -> None:
        """A connection that took no job. An old one may be of a supervisor that is no more."""
        connection.lose("nothing could be sent")
        if is_fresh:
            raise Disconnected("the supervisor closed the connection at once; the job was not sent") from None

    def close(self) -> None:
        """Ends the connection, and with it all jobs under way."""
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.lose("it was closed here")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        # There is none if `__init__` failed.
        connection: Connection | None = getattr(self, "_connection", None)
        if connection is not None:
            connection.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Client, (self.path,)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()


_clients: weakref.WeakSet[BaseClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_after_fork)
