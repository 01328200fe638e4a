"""The programs of Bulkhead, and where they lie."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["path"]


def path(program: str = "bulkhead-supervisor") -> str:
    """The path of a program of this distribution: ``bulkhead-supervisor``, ``bulkhead-worker`` or ``bulkhead``.

    Raises ``FileNotFoundError`` for another name, or for a distribution that was built without it.
    """
    found = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", os.path.basename(program))
    if not os.path.isfile(found):
        raise FileNotFoundError(f"this distribution has no program {program!r}")
    return found


def _run(program: str) -> NoReturn:
    found = path(program)
    os.execv(found, [found, *sys.argv[1:]])


def run_bulkhead() -> NoReturn:
    """Becomes the command ``bulkhead``."""
    _run("bulkhead")


def run_supervisor() -> NoReturn:
    """Becomes ``bulkhead-supervisor``."""
    _run("bulkhead-supervisor")
