"""The synchronous client. Manages the options of jobs, and connects on demand."""

from __future__ import annotations

import os
import threading
import weakref

from . import _wire
from ._connection import Connection, NotSent
from ._reply import Reply
from .errors import Disconnected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ._future import JobFuture

#: Maximum number of cached option combinations.
SUBMISSIONS_MAX = 1024


def default_socket() -> str:
    """Returns the path of the jobs socket: ``$BULKHEAD_SOCKET``, or the supervisor's default."""
    named = os.environ.get("BULKHEAD_SOCKET")
    if named:
        return named
    folder = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR", "/run")
    return os.path.join(folder, "bulkhead", "jobs.sock")


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
    return view.cast("B") if view.c_contiguous else bytes(view)


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


class BaseClient:
    """Base class of both clients. Holds the path of the socket and the cached options."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = os.fspath(path) if path is not None else default_socket()
        self._submissions: dict[tuple[Any, ...], bytes] = {}
        self._is_closed = False
        _clients.add(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def _after_fork(self) -> None:
        """Drops connections and jobs in a forked child, because they belong to the parent."""
        raise NotImplementedError


class Client(BaseClient):
    """Sends jobs to a supervisor. A program needs only one client, which all threads can share.

    The client connects when the first job is sent, reconnects after a connection was lost, and connects again in a
    forked child. ``path`` is the path of the jobs socket. The default is ``$BULKHEAD_SOCKET``, or the supervisor's
    default path. Closing the client, or ending the program, cancels its jobs. Code inside a worker cannot use a client,
    because the supervisor rejects its own workers.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        # Reentrant, because a signal handler can use the client while the client connects.
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
        """Submits a job and waits for its result. Raises a ``JobError`` for any outcome other than ``ok``.

        ``payload`` is a bytes-like object, which is not copied if it is contiguous. ``deadline`` is the maximum time
        from now to the outcome. ``run_limit`` is the maximum time of each attempt from its dispatch. Both are in
        seconds, and the bulkhead's limits are the defaults. ``priority`` is ``critical``, ``normal`` or
        ``best-effort``. ``cost`` is the number of units that a rate limit counts for this job. An ``idempotent`` job
        can be run again after the death of its worker.

        Raises ``Crashed`` if the worker died, and ``Disconnected`` if the connection was lost. Raises
        ``DeadlineExceeded`` if a limit passed; the worker is then killed unless the job stops by itself.
        ``KeyboardInterrupt`` cancels the job.
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
        """Submits a job and returns a future without waiting for the result. The parameters are those of ``call``.

        ``cancel()`` of the future also ends a running job. Raises an exception only if the job could not be sent.
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
        """Returns a connection that is not known to be lost, and true if the connection was made just now."""
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
                        connection.lose("this program closed the client")
                        raise RuntimeError("the client is closed")
                    self._connection = connection
                    is_fresh = True
        if run_limit is not None and not connection.capabilities & _wire.CLIENT_RUN_LIMIT:
            raise Disconnected("the supervisor is too old for run_limit: update the supervisor")
        return connection, is_fresh

    def _retire(self, connection: Connection, is_fresh: bool) -> None:
        """Drops a connection that could not send a job. An old connection may belong to a supervisor that has ended."""
        connection.lose("the job could not be sent")
        if is_fresh:
            raise Disconnected("the supervisor closed the connection immediately; the job was not sent") from None

    def close(self) -> None:
        """Closes the connection and cancels all jobs that are in progress."""
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.lose("this program closed the client")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The attribute does not exist if `__init__` failed.
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
