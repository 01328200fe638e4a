"""Compares pools: which bad jobs they survive, and how well they integrate into a program.

    python bench/survival.py [POOL...]

Prints two tables. Each case runs in a separate interpreter. Each case in the first table runs an honest job, then a bad
job, then honest jobs again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from rivals import RIVALS, installed, installed_modules

#: Factor for all limits on the time that a pool needs. The tests set it, because their machine can be busy.
PATIENCE = float(os.environ.get("BULKHEAD_SURVIVAL_PATIENCE", "1"))
#: Maximum number of seconds until a pool reports the outcome of a job. billiard takes ten seconds to notice a death.
RESPONSE_SECONDS_MAX = 15.0 * PATIENCE
#: Number of seconds after which an outcome counts as late.
LATE_SECONDS_MIN = 3.0 * PATIENCE
#: Time limit of a job in seconds, for pools that support time limits.
TIMEOUT_SECONDS = 0.5
#: Time limit of a case in seconds, after which the case is killed.
CASE_SECONDS_MAX = 45.0 * PATIENCE
#: Time limit of a case that builds a program.
BUILD_SECONDS_MAX = 300.0


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
    """An exception that cannot be unpickled, because pickle passes only one argument to the constructor."""

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
    "raises an exception that cannot be unpickled": raises_what_cannot_be_unpickled,
    "hangs with a grandchild": hangs_with_a_grandchild,
}


def write_file(path: str) -> None:
    with open(path, "w") as file:
        file.write("text")


def is_traced() -> bool:
    """Returns true if coverage.py measures this process."""
    import coverage

    return coverage.Coverage.current() is not None


def write_and_wait(path: str) -> None:
    write_file(path)
    time.sleep(0.05)


def cancelled(name: str, folder: str) -> str:
    """Returns the number of calls that ran although the pool was shut down as soon as the first call was running."""
    pool = RIVALS[name]()
    assert pool.submit(honest, 1).result(30) == 2
    calls = [pool.submit(write_and_wait, f"{folder}/{number}") for number in range(CALLS)]
    while not os.listdir(folder):
        time.sleep(0.001)
    try:
        pool.pool.shutdown(wait=True, cancel_futures=True)  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return "cannot cancel"
    ran = len(os.listdir(folder))
    assert ran + sum(call.cancelled() for call in calls) == CALLS
    return f"{ran} of {CALLS} calls ran"


def masked(name: str, folder: str) -> str:
    """Returns the permissions of a file that a call creates."""
    os.umask(0o027)
    RIVALS[name]().submit(write_file, f"{folder}/new").result(30)
    return f"{os.stat(f'{folder}/new').st_mode & 0o777:04o}"


def traced(name: str, folder: str) -> str:
    if importlib.util.find_spec("coverage") is None:
        return "NOT RUN: coverage is not installed"
    with open(f"{folder}/.coveragerc", "w") as file:
        file.write(f"[run]\ndata_file = {folder}/data\n")
    os.environ["COVERAGE_PROCESS_START"] = f"{folder}/.coveragerc"
    return "measured" if RIVALS[name]().submit(is_traced).result(30) else "not measured"


#: A program for PyInstaller. The call comes from a module, because workers cannot import the program's main module.
FROZEN = """
import multiprocessing, os, sys

if __name__ == "__main__":
    multiprocessing.freeze_support()
    import operator, rivals
    pool = rivals.RIVALS[sys.argv[1]]()
    print(pool.submit(operator.mul, 6, 7).result(20), flush=True)
    os._exit(0)
"""


def frozen(name: str, folder: str) -> str:
    if importlib.util.find_spec("PyInstaller") is None:
        return "NOT RUN: PyInstaller is not installed"
    with open(f"{folder}/program.py", "w") as file:
        file.write(FROZEN)
    modules = [option for module in installed_modules() for option in ("--collect-all", module)]
    paths = ["--paths", os.path.dirname(os.path.abspath(__file__))]
    build = [sys.executable, "-m", "PyInstaller", "--onedir", "--noconfirm", "--specpath", folder, "--workpath"]
    build += [f"{folder}/work", "--distpath", f"{folder}/dist", *paths, *modules, f"{folder}/program.py"]
    subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    program = subprocess.Popen(
        [f"{folder}/dist/program/program", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "runs" if program.communicate(timeout=RESPONSE_SECONDS_MAX)[0] == b"42\n" else "fails"
    except subprocess.TimeoutExpired:
        return "no answer"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


#: Number of calls submitted before the shutdown cancels them.
CALLS = 40

SURROUNDINGS: dict[str, Callable[[str, str], str]] = {
    "calls cancelled by `shutdown(cancel_futures=True)`": cancelled,
    "mode of a new file, umask 0027": masked,
    "call measured by coverage.py": traced,
    "program built with PyInstaller": frozen,
}


def outcome_of(future: Any, limit: float) -> tuple[str, float]:
    """Waits for a future.

    Returns "a value", the name of the error, or "nothing" after ``limit`` seconds; and the time waited.
    """
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
    """Runs a case in this process. Returns a short description of the result."""
    if surroundings := SURROUNDINGS.get(case):
        with tempfile.TemporaryDirectory(prefix="bulkhead-survival-") as folder:
            try:
                return surroundings(name, folder)
            except Exception as error:
                return f"fails: {type(error).__name__}"
    try:
        pool = RIVALS[name]()
        assert pool.submit(honest, 1).result(30 * PATIENCE) == 2
    except Exception as error:
        return f"does not start: {type(error).__name__}"
    job = CASES[case]
    note = f"/tmp/bulkhead-survival-{os.getpid()}"
    arguments = (note,) if job is hangs_with_a_grandchild else ()
    is_endless = job in (hangs, hangs_with_a_grandchild)
    timeout = TIMEOUT_SECONDS if is_endless and pool.has_timeout else None
    limit = RESPONSE_SECONDS_MAX if timeout or not is_endless else 4 * TIMEOUT_SECONDS
    said, waited = outcome_of(pool.submit(job, *arguments, timeout=timeout), limit)
    if job is hangs_with_a_grandchild:
        return grandchild_fate(note)
    if said == "nothing":
        return "forever" if is_endless else f"no answer{'' if serves(pool) else ', pool dead'}"
    words = "timeout" if is_endless else "its error"
    if not serves(pool):
        return "pool broken"
    return words if waited < LATE_SECONDS_MIN else f"{words}, after {waited:.0f} s"


def serves(pool: Any) -> bool:
    """Returns true if the pool still serves honest jobs after the bad job."""
    try:
        return [pool.submit(honest, number).result(5 * PATIENCE) for number in range(4)] == [0, 2, 4, 6]
    except BaseException:
        return False


def grandchild_fate(note: str) -> str:
    try:
        with open(note) as file:
            pid = int(file.read())
    except FileNotFoundError:
        return "ended before the grandchild started"
    os.unlink(note)
    give_up = time.monotonic() + 2 * PATIENCE
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
    """Runs a case in a separate interpreter."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--one", name, case],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        # The first line of the output is the result. The process itself may never exit.
        limit = BUILD_SECONDS_MAX if SURROUNDINGS.get(case) is frozen else CASE_SECONDS_MAX
        timer = threading.Timer(limit, lambda: os.killpg(child.pid, signal.SIGKILL))
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        return str(json.loads(line)) if line else "no answer, caller dead"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.stdout.close()
        child.wait()


def main(names: list[str]) -> dict[str, dict[str, str]]:
    there, missing = installed()
    names = names or there
    table = {}
    for title, cases in ("one job ...", CASES), ("surroundings", SURROUNDINGS):
        print(f"| {title} | " + " | ".join(names) + " |")
        print("| --- |" + " --- |" * len(names))
        for case in cases:
            table[case] = {name: apart(name, case) for name in names}
            print(f"| {case} | " + " | ".join(table[case].values()) + " |", flush=True)
        print()
    for name in missing:
        print(f"not installed: {name}")
    return table


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:4])), flush=True)
        os._exit(0)
    main(sys.argv[1:])
