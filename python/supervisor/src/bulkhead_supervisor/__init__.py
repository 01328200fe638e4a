"""The compiled programs of Bulkhead, and functions to find and run them.

``bulkhead.BulkheadExecutor`` calls ``path`` to start its supervisor. The commands of this distribution replace the
Python process with a program. The supervisor itself is not written in Python.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

__all__ = ["path"]


def path(program: str = "bulkhead-supervisor") -> str:
    """Returns the path of a program: ``bulkhead-supervisor``, ``bulkhead-worker`` or ``bulkhead``.

    Raises ``FileNotFoundError`` for other names, and if this distribution was built without the program.
    """
    found = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", os.path.basename(program))
    if not os.path.isfile(found):
        raise FileNotFoundError(f"this distribution has no program {program!r}")
    return found


def _run(program: str) -> NoReturn:
    found = path(program)
    os.execv(found, [found, *sys.argv[1:]])


def run_bulkhead() -> NoReturn:
    """Replaces this process with the ``bulkhead`` command."""
    _run("bulkhead")


def run_supervisor() -> NoReturn:
    """Replaces this process with ``bulkhead-supervisor``."""
    _run("bulkhead-supervisor")
