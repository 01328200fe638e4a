"""Python stacks as text, which a worker writes when the supervisor sends ``SIGNAL`` at a job's deadline.

``faulthandler`` writes the stacks of all threads in a C signal handler, and therefore also while a C function holds the
GIL. The text goes into the journal's memory file, to the file offset that the supervisor sets before each signal.
"""

from __future__ import annotations

import faulthandler
import os
import signal

SIGNAL = 62
#: Size of the part of the memory file for the text, in bytes.
FILE_BYTES = 256 * 1024


def is_available() -> bool:
    """Returns true if no Python code handles the signal."""
    return hasattr(faulthandler, "register") and signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)


def register(descriptor: int) -> None:
    """Makes this process write its stacks to a descriptor, which must stay open."""
    # If the worker's code calls `faulthandler.unregister`, the signal is ignored instead of killing the process.
    signal.signal(SIGNAL, signal.SIG_IGN)
    faulthandler.register(SIGNAL, descriptor, all_threads=True, chain=False)


def leave_child(descriptor: int) -> None:
    """Prevents a forked child from writing to its parent's file."""
    # Unregistering would also remove a handler that the worker's code has installed in the meantime.
    if signal.getsignal(SIGNAL) == signal.SIG_IGN:
        faulthandler.unregister(SIGNAL)
    os.close(descriptor)
