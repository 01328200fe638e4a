"""Flushes a worker's standard output and standard error, and prints tracebacks, even if a handler has closed them.

Also ends the child processes that handlers or ``init`` fork. ``_serve``, ``_start`` and ``_template`` call these
functions.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def flush() -> None:
    """Flushes standard output and standard error, and ignores errors."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            # The stream was closed or replaced.
            pass


def print_traceback(error: BaseException) -> None:
    """Prints a traceback to standard error, even if the exception itself cannot be printed."""
    try:
        # Fails if the process has no free descriptors.
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    except BaseException:
        try:
            print(f"{type(error).__qualname__} was raised and cannot be printed", file=sys.stderr)
        except Exception:
            # A handler has closed the stream.
            pass


def exit_child(error: BaseException | None) -> NoReturn:
    """Exits from a process that a handler or ``init`` has forked, and that returned or raised an exception.

    If ``SystemExit`` was raised, the process exits with the exception's status. Files in local variables are flushed.
    """
    status = 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        # As in `sys.exit`, only the lowest eight bits count.
        status = (error.code or 0) & 0xFF
    elif error is not None:
        print_traceback(error)
    while error is not None:
        _clear_frames(error)
        error = error.__context__
    flush()
    os._exit(status)


def _clear_frames(error: BaseException) -> None:
    """Deletes the local variables of the functions that raised an exception."""
    traceback = error.__traceback__
    while traceback is not None:
        try:
            traceback.tb_frame.clear()
        except RuntimeError:
            # The function is still running.
            pass
        traceback = traceback.tb_next


def describe(error: BaseException) -> str:
    """Returns a one-line description of an exception."""
    try:
        text = str(error)
    except BaseException:
        text = "(the text is not available)"
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name
