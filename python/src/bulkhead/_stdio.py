"""Standard output and standard error of a worker, which handlers can close or replace."""

from __future__ import annotations

import sys


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


def describe(error: BaseException) -> str:
    """Returns a one-line description of an exception."""
    try:
        text = str(error)
    except BaseException:
        text = "(the text is not available)"
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name
