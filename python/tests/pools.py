"""What tests of executors share: waiting for a condition, and looking at processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

#: Seconds that anything may take on a busy machine.
LONG = 60.0

T = TypeVar("T")
TESTS = Path(__file__).parent


def wait_for(what: str, condition: Callable[[], T | None], seconds: float = LONG) -> T:
    """What a condition says once it says something."""
    give_up = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_sleeping(pid: int) -> bool:
    """Whether a process's first thread waits for something."""
    with open(f"/proc/{pid}/task/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


def read(path: os.PathLike[str] | str) -> str | None:
    """What stands in a file, if it is there."""
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def tree(root: int) -> set[int]:
    """A process and all its descendants, zombies left out."""
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
    """Runs a program that can import what tests can."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
