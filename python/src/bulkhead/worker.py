"""The worker SDK: ``serve`` makes this program a worker of a supervisor.

    from bulkhead import serve

    def thumbnail(payload, ctx):
        ...
        return picture

    serve(thumbnail)

Handlers get the payload (``bytes``, ``bytearray`` if it is large) and a ``Context``, and return ``bytes``, ``str`` or
None. What they raise is told to the client, ``HandlerError`` with a code of theirs. A handler that crashes or hangs
takes its process along and no other; its client is told so.
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

#: Seconds between two words of progress that are sent.
PROGRESS_SECONDS = 0.1
#: The exit code of a program that was started by hand.
USAGE = 2


class HandlerError(Exception):
    """What a handler raises when it cannot do its job.

    ``code`` is a short word for programs, ``message`` a sentence for people; ``retryable`` says that the same job may
    succeed later; ``fault`` is ``"dependency"``, or ``"caller"`` if the job itself was wrong, which does not speak
    against the bulkhead. ``payload``, up to 64 KiB, reaches the client as ``JobError.payload``.
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
    """A job, as its handler sees it."""

    __slots__ = (
        *("_arrival", "_deadline", "_payload", "_said", "_server", "_task", "_told_at"),
        *("cancelled", "number", "operation", "tenant", "traceparent"),
    )

    #: What the client wants done, and the tenant; empty if it did not say.
    operation: str
    tenant: str
    #: The job's number; log, events and crash reports write it in hexadecimal digits.
    number: int
    #: The W3C traceparent of the job's span, if there is one.
    traceparent: str | None
    #: Whether no client waits any more. A handler that looks now and then, and returns, is spared from being killed; an
    #: async handler is cancelled.
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
        # What was said of the progress and not sent; False once the job is answered.
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
        """Seconds until the client is told that it took too long; 0 if that has passed."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def state(self) -> Any:
        """What ``init`` returned."""
        return self._server.state

    def progress(self, fraction: float, text: str = "") -> None:
        """Tells the client how far the job is, from 0 to 1, and a few words. However often it is called, the client
        hears ten times a second at most, and the last word before the result."""
        if not isinstance(text, str):
            raise TypeError(f"text must be str, not {type(text).__name__}")
        self._server.say_progress(self, float(fraction), text)

    def __repr__(self) -> str:
        return f"<Context of job {self.number:x} {self.operation!r}>"


_handlers: dict[str | None, Handler] = {}
_initializer: list[Callable[[], Any]] = []


def handler(operation: str | Callable[..., Any] | None = None) -> Any:
    """Registers a function for ``python3 -m bulkhead serve MODULE``: ``@handler("decode")`` for one operation,
    ``@handler`` for all that have none of their own."""
    if callable(operation):
        _handlers[None] = operation
        return operation

    def register(function: H) -> H:
        _handlers[operation] = function
        return function

    return register


def initializer(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers the ``init`` of a module for ``python3 -m bulkhead serve``."""
    _initializer[:] = [function]
    return function


#: What hears of a start: this worker, or this template.
_serving: list[Server | Starting] = []


def status(text: str) -> None:
    """From ``init``: tells operators what the worker is doing."""
    for server in _serving:
        server.say_status(text)


def extend_start(seconds: float) -> None:
    """From ``init``: asks for so much time from now, at most ``start.ready`` each time."""
    for server in _serving:
        server.extend_start(seconds)


def serve(
    handler: Handler | None = None,
    *,
    operations: Mapping[str, Handler] | None = None,
    init: Callable[[], Any] | None = None,
    after_fork: Callable[[], object] | None = None,
) -> NoReturn:
    """Serves jobs until the supervisor ends the worker; call it in the main thread.

    ``operations`` has a handler for each operation, ``handler`` takes all others. ``init`` runs once before the first
    job, in the main thread; what it returns is ``ctx.state``. If it raises, the worker does not start, and clients are
    told why. With ``max_in_flight`` over 1 handlers run in threads beside the main one; async handlers share one event
    loop, which is a thread of its own.

    With ``start.mode = "fork"`` ``init`` runs once in a template, which must be left with one thread; ``after_fork``
    runs in each worker that is forked of it: there open and start what they must not share. ``random`` and
    ``numpy.random`` are seeded anew before it; libraries of linear algebra start no threads in the template, unless
    OPENBLAS_NUM_THREADS, OMP_NUM_THREADS or MKL_NUM_THREADS say otherwise.

    Exits with status 0 when the supervisor asks for it (DRAIN, SIGTERM), 1 if it cannot start, 2 if the program was
    not started by a supervisor. When the supervisor is gone the process ends at once.
    """
    given = dict(operations or {})

    def prepare() -> tuple[Handler | None, Mapping[str, Handler], Any]:
        return handler, given, None if init is None else init()

    if handler is None and not given:
        raise TypeError("serve() takes a handler, or operations")
    run(prepare, after_fork)


def serve_module(name: str, entry: str | None = None) -> NoReturn:
    """What ``python3 -m bulkhead serve`` does: imports a module and serves its handlers."""

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
    """Shakes hands, prepares, serves, exits. A template prepares, and each worker that it forks does the rest.

    A worker for one job does not see cancellations, and needs no thread that watches the link. With ``takes_files``,
    the handler gets payloads in memory files as a ``Loan``.
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
    """Returns in workers that this template forks, with what is left for each to prepare."""
    # For all workers at once.
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
    """Ends a forked worker. The interpreter is not taken down: that would touch, and copy, all memory it shares."""
    import atexit

    from . import _template

    atexit._run_exitfuncs()
    _template.flush()
    os._exit(0)
