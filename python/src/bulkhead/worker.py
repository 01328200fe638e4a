"""The worker SDK: ``serve`` makes this program a worker of a supervisor.

    from bulkhead import serve

    def thumbnail(payload, ctx):
        ...
        return picture

    serve(thumbnail)

A handler receives the payload (``bytes``, or ``bytearray`` if it is large) and a ``Context``, and returns ``bytes``,
``str`` or None. If it raises an exception, the client gets the outcome ``failed``. ``HandlerError`` sets the code. A
handler that crashes or hangs loses only its own process, and its client gets the outcome.
"""

from __future__ import annotations

from ._context import Context, HandlerError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn, TypeVar

    from ._context import Handler

    H = TypeVar("H", bound=Callable[..., Any])

__all__ = ["Context", "HandlerError", "extend_start", "handler", "initializer", "serve", "status"]

_handlers: dict[str | None, Handler] = {}
_initializer: list[Callable[[], Any]] = []


def handler(operation: str | Callable[..., Any] | None = None) -> Any:
    """Registers a function for ``python3 -m bulkhead serve MODULE``.

    ``@handler("decode")`` registers the function for one operation. ``@handler`` registers it for all operations that
    have no handler of their own.
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


def status(text: str) -> None:
    """Reports to operators what the worker is doing. Call this from ``init``."""
    from ._start import receivers

    for receiver in receivers:
        receiver.report_status(text)


def extend_start(seconds: float) -> None:
    """Requests ``seconds`` more for startup, counted from now; at most ``start.ready`` per call.

    Call this from ``init``.
    """
    from ._start import receivers

    for receiver in receivers:
        receiver.extend_start(seconds)


def serve(
    handler: Handler | None = None,
    *,
    operations: Mapping[str, Handler] | None = None,
    init: Callable[[], Any] | None = None,
    after_fork: Callable[[], object] | None = None,
) -> NoReturn:
    """Serves jobs until the supervisor stops the worker. Must be called in the main thread. Does not return.

    ``operations`` maps operations to handlers, and ``handler`` serves all other operations. ``init`` runs once before
    the first job, in the main thread, and its return value becomes ``ctx.state``. If ``init`` raises an exception, the
    worker does not start, and clients get the reason. If ``max_in_flight`` is more than 1, handlers also run in
    additional threads. Async handlers share one event loop, which has a separate thread.

    With ``start.mode = "fork"``, ``init`` runs once in a template and must not leave any threads running.
    ``after_fork`` runs in each worker that is forked from the template, and opens resources that workers must not
    share. ``random`` and ``numpy.random`` are reseeded before ``after_fork``. Numerical libraries start no threads in
    the template unless OPENBLAS_NUM_THREADS, OMP_NUM_THREADS or MKL_NUM_THREADS allow more than one.

    The exit status is 0 after DRAIN or SIGTERM, 1 if the worker cannot start, and 2 if no supervisor started the
    program. If the supervisor is gone, the process exits immediately.
    """
    from ._start import run

    given = dict(operations or {})

    def prepare() -> tuple[Handler | None, Mapping[str, Handler], Any]:
        return handler, given, None if init is None else init()

    if handler is None and not given:
        raise TypeError("serve() needs a handler or operations")
    run(prepare, after_fork)


def serve_module(name: str, entry: str | None = None) -> NoReturn:
    """Implements ``python3 -m bulkhead serve``: imports a module and serves its handlers."""
    from ._start import run

    def prepare() -> tuple[Handler | None, Mapping[str, Handler], Any]:
        import importlib

        module = importlib.import_module(name)
        default: Handler | None = _handlers.get(None) if entry is None else getattr(module, entry)
        named = {operation: function for operation, function in _handlers.items() if operation is not None}
        if default is None and not named:
            raise LookupError(f"the module {name!r} has no function with @bulkhead.handler")
        return default, named, _initializer[0]() if _initializer else None

    run(prepare)
