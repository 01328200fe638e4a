"""What becomes of a pool when one job does what jobs do: a table of all pools, printed in one run.

    python bench/survival.py [POOL...]

Each case runs in an interpreter of its own: an honest job, then the bad one, then honest ones again.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rivals import RIVALS, installed

#: Seconds that a pool has to say what became of a job; billiard takes ten to notice a death.
ANSWER_SECONDS_MAX = 15.0
#: Seconds that a job may run, where a pool can be told.
TIMEOUT_SECONDS = 0.5
#: Seconds after which a case is ended from outside.
CASE_SECONDS_MAX = 45.0


def honest(number: int) -> int:
    return number * 2


def segfaults() -> None:
    import faulthandler

    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def exits() -> None:
    os._exit(0)


def hangs() -> None:
    while True:
        time.sleep(1)


class TwoArguments(Exception):
    """Cannot be unpickled: pickle calls it with one argument."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def raises_what_cannot_be_unpickled() -> None:
    raise TwoArguments("one", "two")


def hangs_with_a_grandchild(note: str) -> None:
    grandchild = subprocess.Popen(["sleep", "600"])
    with open(note + ".new", "w") as file:
        file.write(str(grandchild.pid))
    os.rename(note + ".new", note)
    hangs()


CASES: dict[str, Callable[..., None]] = {
    "segfaults": segfaults,
    "calls os._exit(0)": exits,
    "hangs": hangs,
    "raises what cannot be unpickled": raises_what_cannot_be_unpickled,
    "hangs with a grandchild": hangs_with_a_grandchild,
}


def outcome_of(future: Any, limit: float) -> tuple[str, float]:
    """What a future says within ``limit`` seconds: a value, the name of an error, or nothing."""
    began = time.monotonic()
    try:
        future.result(limit)
        said = "a value"
    except BaseException as error:
        waited = time.monotonic() - began
        is_late = isinstance(error, (TimeoutError, concurrent.futures.TimeoutError))
        said = "nothing" if is_late and waited > limit * 0.95 else type(error).__name__
    return said, time.monotonic() - began


def one(name: str, case: str) -> str:
    """Runs one case in this process, and says in a few words what became of it."""
    try:
        pool = RIVALS[name]()
        assert pool.submit(honest, 1).result(30) == 2
    except Exception as error:
        return f"does not start: {type(error).__name__}"
    job = CASES[case]
    note = f"/tmp/bulkhead-survival-{os.getpid()}"
    arguments = (note,) if job is hangs_with_a_grandchild else ()
    is_endless = job in (hangs, hangs_with_a_grandchild)
    timeout = TIMEOUT_SECONDS if is_endless and pool.has_timeout else None
    limit = ANSWER_SECONDS_MAX if timeout or not is_endless else 4 * TIMEOUT_SECONDS
    said, waited = outcome_of(pool.submit(job, *arguments, timeout=timeout), limit)
    if job is hangs_with_a_grandchild:
        return grandchild_fate(note)
    if said == "nothing":
        return "for ever" if is_endless else f"no answer{'' if serves(pool) else ', pool dead'}"
    words = "timeout" if is_endless else "its error"
    if not serves(pool):
        return "pool broken"
    return words if waited < 3 else f"{words}, after {waited:.0f} s"


def serves(pool: Any) -> bool:
    """Whether honest jobs are served after the bad one."""
    try:
        return [pool.submit(honest, number).result(5) for number in range(4)] == [0, 2, 4, 6]
    except BaseException:
        return False


def grandchild_fate(note: str) -> str:
    try:
        with open(note) as file:
            pid = int(file.read())
    except FileNotFoundError:
        return "ended before it had a grandchild"
    os.unlink(note)
    give_up = time.monotonic() + 2
    while time.monotonic() < give_up:
        if not is_running(pid):
            return "killed"
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return "lives"


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def apart(name: str, case: str) -> str:
    """Runs one case in an interpreter of its own."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--one", name, case],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        # Its first line is its answer: it may never end.
        timer = __import__("threading").Timer(CASE_SECONDS_MAX, lambda: os.killpg(child.pid, signal.SIGKILL))
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        return str(json.loads(line)) if line else "no answer, caller dead"
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.stdout.close()
        child.wait()


def main(names: list[str]) -> dict[str, dict[str, str]]:
    there, missing = installed()
    names = names or there
    table = {case: {name: apart(name, case) for name in names} for case in CASES}
    print("| one job ... | " + " | ".join(names) + " |")
    print("| --- |" + " --- |" * len(names))
    for case, row in table.items():
        print(f"| {case} | " + " | ".join(row.values()) + " |", flush=True)
    for name in missing:
        print(f"not installed: {name}")
    return table


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:4])), flush=True)
        os._exit(0)
    main(sys.argv[1:])
