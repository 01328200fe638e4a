"""Parses the command line of ``python3 -m bulkhead serve MODULE``, which a supervisor runs as a worker.

``worker.serve_module`` imports the module and serves its handlers. The program ``bulkhead``, which submits jobs and
operates a supervisor, is a different command.
"""

from __future__ import annotations

import sys

USAGE = """\
usage: python3 -m bulkhead serve MODULE[:FUNCTION]

Serves the functions of MODULE that are registered by @bulkhead.handler, or FUNCTION for all operations.
In workers.toml:

    [bulkhead.NAME]
    command = ["python3", "-m", "bulkhead", "serve", "MODULE"]"""


def main(arguments: list[str]) -> None:
    """Runs the command."""
    if arguments in (["--version"], ["-V"]):
        from . import __version__

        print(f"bulkhead-py {__version__}")
    elif arguments in (["--help"], ["-h"]):
        print(USAGE)
    elif len(arguments) == 2 and arguments[0] == "serve":
        from .worker import serve_module

        module, _, entry = arguments[1].partition(":")
        serve_module(module, entry or None)
    else:
        print(USAGE, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
