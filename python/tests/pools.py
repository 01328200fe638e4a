"""Helpers for tests of executors: waiting for conditions, and inspecting processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

#: Generous time limit in seconds for any operation on a busy machine.
LONG = 60.0

T = TypeVar("T")
TESTS = Path(__file__).parent


def wait_for(what: str, condition: Callable[[], T | None], seconds: float = LONG) -> T:
    """Waits until a condition is true. Returns its value."""
    give_up = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Returns true if a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_sleeping(pid: int) -> bool:
    """Returns true if the first thread of a process is sleeping."""
    with open(f"/proc/{pid}/task/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


def read(path: os.PathLike[str] | str) -> str | None:
    """Returns the contents of a file, or None if the file does not exist."""
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def tree(root: int) -> set[int]:
    """Returns a process and all its descendants, without zombies."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in "ZX":
                parents[int(name)] = int(fields[1])
    found = {root} & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def script(code: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that can import the test modules."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=5 * LONG,
        check=False,
    )
