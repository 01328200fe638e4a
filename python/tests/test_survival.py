"""Tests that failures that break other pools affect only one call in this pool.

Covers single failures, storms of failing calls, and killed callers.

``BULKHEAD_SURVIVAL_JOBS`` sets the number of calls in a storm. The default is 1,500; use 10,000 before a release.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import jobs
import pytest
import storm
from pools import LONG, is_running, read, tree, wait_for

from bulkhead import BulkheadExecutor, _output
from bulkhead.executor import WorkerCrashed

TESTS = Path(__file__).parent
BENCH = TESTS.parent / "bench"
JOBS = int(os.environ.get("BULKHEAD_SURVIVAL_JOBS", "1500"))


def test_documented_survival_table_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the survival program's results with the documented column."""
    monkeypatch.setenv("BULKHEAD_SURVIVAL_PATIENCE", "10")
    sys.path.insert(0, str(BENCH))
    try:
        import survival
    finally:
        sys.path.remove(str(BENCH))

    def result(case: str) -> str | None:
        """Returns the result of a case, or None if the job was too slow to start its grandchild."""
        said: str = survival.apart("BulkheadExecutor", case)
        return said if said != "ended before the grandchild started" else None

    said = {case: wait_for(case, lambda case=case: result(case), 5 * LONG) for case in survival.CASES}  # type: ignore[misc]
    assert said == {
        "segfaults": "its error",
        "calls os._exit(0)": "its error",
        "hangs": "timeout",
        "raises an exception that cannot be unpickled": "its error",
        "hangs with a grandchild": "killed",
    }


def test_storm_of_failing_calls_does_not_affect_honest_calls() -> None:
    """One call in twenty is bad. Each bad call raises the expected error, and every honest result is correct."""
    with BulkheadExecutor(4, memory=storm.MEMORY) as pool:
        ended: Counter[str] = Counter()
        for future, wanted in storm.begin(pool, JOBS):
            error = future.exception(LONG * 5)
            if isinstance(wanted, int):
                assert error is None, error
                assert future.result() == wanted
                ended["honest"] += 1
            else:
                assert isinstance(error, wanted), (error, wanted)
                ended[wanted.__name__] += 1
        print(f"{JOBS} calls: {dict(ended)}")
        assert sum(ended.values()) == JOBS
        assert len(ended) == 5, ended
        supervisor = pool._pool.supervisor()
        pids = tree(supervisor.pid or 0)
    wait_for("the pool is gone", lambda: not any(map(is_running, pids)) and not os.path.exists(supervisor.folder))


def test_caller_killed_under_load_leaves_no_process() -> None:
    caller = subprocess.Popen(
        [sys.executable, TESTS / "storm.py", str(JOBS)],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    supervisor, folder = caller.stdout.readline().split()
    pids = tree(int(supervisor))
    assert len(pids) >= 2
    assert os.path.exists(folder)
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait(LONG)
    caller.stdout.close()
    wait_for("no process is left", lambda: not any(map(is_running, pids)) and not of_folder(folder))
    wait_for("no folder is left", lambda: not os.path.exists(folder))


def of_folder(folder: str) -> list[int]:
    """Returns the PIDs of processes with this folder, or a file in it, as an argument."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and folder in Path("/proc", name, "cmdline").read_bytes().decode(errors="replace"):
                found.append(int(name))
        except OSError:
            continue
    return found


def test_killed_caller_leaves_no_process(tmp_path: Path) -> None:
    """The caller has waiting calls, a grandchild, and a forked child that stays alive."""
    note = tmp_path / "note"
    code = f"""
        import os, sys, time, jobs
        from bulkhead import BulkheadExecutor
        pool = BulkheadExecutor(3)
        hung = pool.submit(jobs.hang, {str(note)!r})
        for number in range(2000):
            pool.submit([jobs.double, jobs.segfault][number % 20 == 0], *([number] if number % 20 else []))
        if not (child := os.fork()):
            time.sleep(600)
        print(child, pool._pool.supervisor().pid, pool._pool.supervisor().folder, flush=True)
        time.sleep(600)
    """
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    child, supervisor, folder = caller.stdout.readline().split()
    hung = list(map(int, wait_for("a call hangs", lambda: read(note)).split()))
    pids = (tree(int(supervisor)) | set(hung)) - {int(child)}
    assert len(pids) >= 4
    os.kill(caller.pid, signal.SIGKILL)
    caller.wait(LONG)
    try:
        wait_for("no process is left", lambda: not any(map(is_running, pids)))
        wait_for("no folder is left", lambda: not os.path.exists(folder))
    finally:
        os.kill(int(child), signal.SIGKILL)
        caller.stdout.close()


def test_call_that_kills_its_process_group_fails_alone() -> None:
    """Workers run as this user, so a call can kill its own process group.

    That call fails, and the next call is served.
    """
    with BulkheadExecutor(2) as pool:
        for _ in range(3):
            assert isinstance(pool.submit(os.kill, 0, signal.SIGKILL).exception(LONG), WorkerCrashed)
            assert pool.submit(jobs.double, 3).result(LONG) == 6


@pytest.mark.parametrize("profile", ["default", "strict"])
def test_sandbox_denies_access(
    profile: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requires a machine and an interpreter path that allow a sandbox."""
    monkeypatch.setattr(_output, "CATCH_UP_SECONDS_MAX", LONG / 2)
    user = {"user": "shared"} if os.geteuid() == 0 else {}
    # Naming a path that the pool grants anyway is allowed.
    sandbox = {"profile": profile, "read": [sys.prefix, os.path.dirname(jobs.__file__)], **user}
    with BulkheadExecutor(1, sandbox=sandbox) as pool:
        assert pool.submit(jobs.double, 4).result(LONG) == 8
        assert pool.submit(jobs.use_semaphore).result(LONG) == 3
        assert pool.submit(jobs.connect_out).result(LONG) not in ("connected", "refused by the other side")
        assert pool.submit(jobs.say, "from inside").result(LONG) == 1
    assert "from inside" in capfd.readouterr().out
