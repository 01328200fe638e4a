"""The life cycle of a worker process: handshake, preparation, job loop and exit. Forked workers start in a template."""

from __future__ import annotations

import os
import sys

from . import __version__, _link, _serve, _stdio, _template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn, TypeVar

    from ._context import Handler

    T = TypeVar("T")

#: Exit code of a program that was not started by a supervisor.
USAGE = 2

#: Receiver of calls such as ``status`` during startup: this worker or this template.
receivers: list[_serve.Server | _template.TemplateStart] = []


def run(
    prepare: Callable[[], tuple[Handler | None, Mapping[str, Handler], Any]],
    after_fork: Callable[[], object] | None = None,
    *,
    is_for_one_job: bool = False,
    takes_files: bool = False,
) -> NoReturn:
    """Performs the handshake, prepares the worker, serves jobs and exits.

    In a template, only ``prepare`` runs before the fork. A worker for one job does not notice cancellations and needs
    no watcher thread. If ``takes_files`` is true, the handler gets payloads in memory files as a ``Loan``.
    """
    if receivers:
        raise RuntimeError(
            "this process is already a worker: remove the call of serve() at the top level of the module, and register "
            "its handlers with @bulkhead.handler; or start the module itself, without `bulkhead serve`"
        )
    is_forked = _template.is_wanted()
    if is_forked:
        prepare = _forked(prepare, after_fork)
    socket = _link.inherited()
    if socket is None:
        program = " ".join(["python3", *sys.argv])
        print(
            "this program is a worker, which bulkhead-supervisor must start. In workers.toml:\n\n"
            f'    [bulkhead.NAME]\n    command = ["{program}"]',
            file=sys.stderr,
        )
        sys.exit(USAGE)
    import faulthandler

    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    try:
        server = _serve.Server(socket, __version__, is_for_one_job=is_for_one_job, takes_files=takes_files)
    except (_link.Refused, OSError) as error:
        print(f"the worker cannot start: {error}", file=sys.stderr)
        sys.exit(1)
    receivers.append(server)
    server.run(prepare)
    if is_forked:
        _leave()
    sys.exit(0)


def _forked(prepare: Callable[[], T], after_fork: Callable[[], object] | None) -> Callable[[], T]:
    """Runs ``prepare`` in the template. Returns, in each forked worker, a function for the remaining preparation."""
    socket = _link.inherited()
    if socket is None:
        sys.exit(USAGE)
    receivers.append(_template.TemplateStart(socket))
    prepared = _template.serve_forks(socket, prepare)
    receivers.clear()

    def rest() -> T:
        if after_fork is not None:
            after_fork()
        return prepared

    return rest


def _leave() -> NoReturn:
    """Exits from a forked worker. Does not finalise the interpreter, which would write to all shared pages."""
    import atexit
    import threading

    try:
        # Waits for the threads that the end of every Python program waits for.
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException as error:
        _stdio.print_traceback(error)
    atexit._run_exitfuncs()
    _stdio.flush()
    os._exit(0)
