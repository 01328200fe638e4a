"""The worker SDK: ``serve`` makes this program a worker of a supervisor.

    from bulkhead import serve

    def thumbnail(payload, ctx):
        ...
        return picture

    serve(thumbnail)

A handler receives the payload (``bytes``, or ``bytearray`` if it is large) and a ``Context``, and returns ``bytes``,
``str`` or None. If it raises an exception, the client gets the outcome ``failed``. ``HandlerError`` sets the code.
A handler that crashes or hangs ends only its own process, and its client gets the outcome.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn, TypeVar

    from ._serve import Server
    from ._template import Starting

    Handler = Callable[..., Any]
    H = TypeVar("H", bound=Callable[..., Any])
    T = TypeVar("T")

__all__ = ["Context", "HandlerError", "extend_start", "handler", "initializer", "serve", "status"]

#: Minimum number of seconds between two progress reports that are sent.
PROGRESS_SECONDS = 0.1
#: Exit code of a program that was not started by a supervisor.
USAGE = 2


class HandlerError(Exception):
    """Raised by a handler to report a failure.

    ``code`` is a short machine-readable name, and ``message`` a sentence for people. ``retryable`` is true if the job
    may succeed later. ``fault`` is ``"dependency"``, or ``"caller"`` if the job itself was wrong. Failures with the
    fault ``"caller"`` do not count against the bulkhead. ``payload``, up to 64 KiB, reaches the client as
    ``JobError.payload``.
    """

    def __init__(
        self,
        code: str,
        message: str = "",
        *,
        retryable: bool = False,
        fault: str = "dependency",
        payload: bytes = b"",
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
        *("_arrival", "_deadline", "_payload", "_said", "_server", "_task", "_told_at"),
        *("cancelled", "number", "operation", "tenant", "traceparent"),
    )

    #: Operation and tenant that the client requested; empty if the client gave none.
    operation: str
    tenant: str
    #: Number of the job. The log, events and crash reports show it in hexadecimal digits.
    number: int
    #: W3C traceparent of the job's span, or None.
    traceparent: str | None
    #: True if no client waits for the job any more. A handler that checks this and returns early avoids being killed.
    #: Async handlers are cancelled.
    cancelled: bool

    def __init__(
        self,
        server: Server,
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
        # Progress report that was not sent yet; False after the job was answered.
        self._said: tuple[float, str] | bool | None = None
        self._told_at = 0.0
        self._task: Any = None
        self.cancelled = False
        self.number = number
        self.operation = operation
        self.tenant = tenant
        self.traceparent = traceparent

    @property
    def remaining(self) -> float:
        """Seconds until the job's deadline, or 0 if it has passed."""
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
        self._server.say_progress(self, float(fraction), text)

    def __repr__(self) -> str:
        return f"<Context of job {self.number:x} {self.operation!r}>"


_handlers: dict[str | None, Handler] = {}
_initializer: list[Callable[[], Any]] = []


def handler(operation: str | Callable[..., Any] | None = None) -> Any:
    """Registers a function for ``python3 -m bulkhead serve MODULE``.

    ``@handler("decode")`` registers the function for one operation. ``@handler`` registers it for all operations that
    have no separate handler.
    """
    if callable(operation):
        _handlers[None] = operation
        return operation

    def register(function: H) -> H:
        _handlers[operation] = function
        return function

    return register


def initializer(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers the ``init`` function of a module for ``python3 -m bulkhead serve``."""
    _initializer[:] = [function]
    return function


#: Receivers of status texts and requests for time during a start: this worker, or this template.
_serving: list[Server | Starting] = []


def status(text: str) -> None:
    """Reports to operators what the worker is doing. Call it from ``init``."""
    for server in _serving:
        server.say_status(text)


def extend_start(seconds: float) -> None:
    """Requests time to start, in seconds from now; at most ``start.ready`` each time. Call it from ``init``."""
    for server in _serving:
        server.extend_start(seconds)


def serve(
    handler: Handler | None = None,
    *,
    operations: Mapping[str, Handler] | None = None,
    init: Callable[[], Any] | None = None,
    after_fork: Callable[[], object] | None = None,
) -> NoReturn:
    """Serves jobs until the supervisor ends the worker. Must be called in the main thread; does not return.

    ``operations`` maps operations to handlers, and ``handler`` serves all other operations. ``init`` runs once before
    the first job, in the main thread, and its return value becomes ``ctx.state``. If ``init`` raises an exception, the
    worker does not start, and clients get the reason. If ``max_in_flight`` is more than 1, handlers also run in
    additional threads. Async handlers share one event loop, which has a separate thread.

    With ``start.mode = "fork"``, ``init`` runs once in a template and must not leave any threads running.
    ``after_fork`` runs in each worker that is forked from the template, and opens resources that workers must not
    share. ``random`` and ``numpy.random`` are reseeded before ``after_fork``. Numerical libraries start no threads in
    the template unless OPENBLAS_NUM_THREADS, OMP_NUM_THREADS or MKL_NUM_THREADS allow more than one.

    The exit status is 0 after DRAIN or SIGTERM, 1 if the worker cannot start, and 2 if no supervisor started the
    program. If the supervisor is gone, the process ends immediately.
    """
    given = dict(operations or {})

    def prepare() -> tuple[Handler | None, Mapping[str, Handler], Any]:
        return handler, given, None if init is None else init()

    if handler is None and not given:
        raise TypeError("serve() takes a handler, or operations")
    run(prepare, after_fork)


def serve_module(name: str, entry: str | None = None) -> NoReturn:
    """Implements ``python3 -m bulkhead serve``: imports a module and serves its handlers."""

    def prepare() -> tuple[Handler | None, Mapping[str, Handler], Any]:
        import importlib

        module = importlib.import_module(name)
        default: Handler | None = _handlers.get(None) if entry is None else getattr(module, entry)
        named = {operation: function for operation, function in _handlers.items() if operation is not None}
        if default is None and not named:
            raise LookupError(f"the module {name!r} has no function with @bulkhead.handler")
        return default, named, _initializer[0]() if _initializer else None

    run(prepare)


def run(
    prepare: Callable[[], tuple[Handler | None, Mapping[str, Handler], Any]],
    after_fork: Callable[[], object] | None = None,
    *,
    is_for_one_job: bool = False,
    takes_files: bool = False,
) -> NoReturn:
    """Performs the handshake, prepares, serves and exits. In a template, only ``prepare`` runs before the fork.

    A worker for one job does not notice cancellations and needs no watcher thread. With ``takes_files``, the handler
    gets payloads in memory files as a ``Loan``.
    """
    from . import __version__, _link

    is_forked = os.environ.get("BULKHEAD_TEMPLATE") is not None
    if is_forked:
        prepare = _forked(prepare, after_fork)
    socket = _link.inherited()
    if socket is None:
        program = " ".join(["python3", *sys.argv])
        print(
            "run me under bulkhead-supervisor: this program is a worker. In workers.toml:\n\n"
            f'    [bulkhead.NAME]\n    command = ["{program}"]',
            file=sys.stderr,
        )
        sys.exit(USAGE)
    import faulthandler

    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    from ._serve import Server

    try:
        server = Server(socket, __version__, is_for_one_job=is_for_one_job, takes_files=takes_files)
    except (_link.Refused, OSError) as error:
        print(f"the worker cannot start: {error}", file=sys.stderr)
        sys.exit(1)
    _serving.append(server)
    server.run(prepare)
    if is_forked:
        _leave()
    sys.exit(0)


def _forked(prepare: Callable[[], T], after_fork: Callable[[], object] | None) -> Callable[[], T]:
    """Runs ``prepare`` in the template. Returns, in each forked worker, a function for the remaining preparation."""
    # Imported here once for all workers.
    from . import _link, _serve, _template  # noqa: F401

    socket = _link.inherited()
    if socket is None:
        sys.exit(USAGE)
    _serving.append(_template.Starting(socket))
    prepared = _template.serve_forks(socket, prepare)
    _serving.clear()

    def rest() -> T:
        if after_fork is not None:
            after_fork()
        return prepared

    return rest


def _leave() -> NoReturn:
    """Ends a forked worker. Does not finalise the interpreter, because this would write to all shared pages."""
    import atexit

    from . import _template

    atexit._run_exitfuncs()
    _template.flush()
    os._exit(0)
