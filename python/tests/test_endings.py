"""Tests of executors whose supervisor, callback or caller fails or exits at an unfavourable moment.

All futures get a result or exception, and no process remains.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jobs
import pytest
from pools import LONG, read, tree, wait_for

from bulkhead import BulkheadExecutor, WorkerCrashed, _output
from bulkhead._future import Condition
from bulkhead._private import PrivateSupervisor


def supervisor_of(pool: BulkheadExecutor) -> int:
    pid = pool._pool.supervisor().pid
    assert pid is not None
    return pid


def all_end(futures: list[Any]) -> None:
    assert not wait(futures, LONG).not_done


def naps(pool: BulkheadExecutor, count: int) -> list[Future[Any]]:
    """Submits calls. The first call runs until its supervisor dies, so the others wait."""
    pool.submit(jobs.pid).result(LONG)
    return [pool.submit(jobs.sleep, 600), *(pool.submit(time.sleep, 0.02) for _ in range(count))]


def test_waiting_calls_finish_despite_supervisor_death() -> None:
    pool = BulkheadExecutor(1)
    futures = naps(pool, 200)
    pool.shutdown(wait=False)
    os.kill(supervisor_of(pool), signal.SIGKILL)
    pool.shutdown(wait=True)
    assert all(future.done() for future in futures)
    assert futures[-1].exception() is None, "the dead supervisor did not have the call"
    assert tree(os.getpid()) == {os.getpid()}


def test_concurrent_calls_start_a_single_supervisor() -> None:
    pool = BulkheadExecutor(1)
    futures = naps(pool, 100)
    is_over = threading.Event()

    def feed() -> None:
        while not is_over.is_set():
            futures.append(pool.submit(jobs.double, 1))
            time.sleep(0.001)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        for _ in range(3):
            lost = supervisor_of(pool)
            os.kill(lost, signal.SIGKILL)

            def another(lost: int = lost) -> bool:
                now = pool._pool._supervisor
                return now is not None and now.pid not in (None, lost)

            wait_for("another supervisor is running", another)
    finally:
        is_over.set()
        feeder.join(LONG)
    pool.shutdown(wait=True)
    all_end(futures)
    assert tree(os.getpid()) == {os.getpid()}


def test_pool_dropped_during_a_restart_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BulkheadExecutor(1)
    futures = naps(pool, 100)
    starting, dropped = threading.Event(), threading.Event()
    start = PrivateSupervisor.start

    def slow_start(supervisor: PrivateSupervisor, command: list[str]) -> None:
        starting.set()
        assert dropped.wait(LONG)
        start(supervisor, command)

    monkeypatch.setattr(PrivateSupervisor, "start", slow_start)
    os.kill(supervisor_of(pool), signal.SIGKILL)
    assert starting.wait(LONG)
    del pool
    gc.collect()
    dropped.set()
    all_end(futures)
    wait_for("all processes are gone", lambda: tree(os.getpid()) == {os.getpid()})


def test_system_exit_in_a_callback_does_not_fail_other_calls(tmp_path: Path) -> None:
    with BulkheadExecutor(1) as pool:
        # The callbacks must not run in this thread, which would happen if a call had already ended.
        first = pool.submit(jobs.note_and_wait, str(tmp_path), 1)
        futures: list[Any] = [pool.submit(sys.exit, 1) for _ in range(3)]
        for future in futures:
            future.add_done_callback(lambda done: done.result())
        (tmp_path / "go").touch()
        assert first.result(LONG) == 1
        futures += [pool.submit(jobs.double, number) for number in range(100)]
        all_end(futures)
        assert futures[-1].result() == jobs.double(99)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    why: str


class WithoutCause(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("nothing is set here")


def raise_frozen() -> None:
    raise Frozen("why")


def raise_without_cause() -> None:
    raise WithoutCause("why")


def test_immutable_exception_fails_only_its_call() -> None:
    with BulkheadExecutor(1) as pool:
        # The exception can be pickled, but not unpickled.
        assert "Frozen: why" in str(pool.submit(raise_frozen).exception(LONG))
        raised = pool.submit(raise_without_cause).exception(LONG)
        assert isinstance(raised, WithoutCause)
        assert "raise WithoutCause" in str(raised.__cause__)
        assert pool.submit(jobs.double, 1).result(LONG) == jobs.double(1)


def test_callbacks_can_submit_large_calls() -> None:
    """The receiving thread sends these calls. The supervisor stops reading from a client that does not read."""
    left, is_over, errors = [24], threading.Event(), list[BaseException]()

    def again(future: Future[Any]) -> None:
        try:
            future.result()
            left[0] -= 1
            if left[0] > 0:
                pool.submit(bytes, large).add_done_callback(again)
            elif left[0] <= -7:
                is_over.set()
        except BaseException as error:
            errors.append(error)
            is_over.set()

    large = bytes(4 << 20)
    with BulkheadExecutor(2) as pool:
        for _ in range(8):
            pool.submit(bytes, large).add_done_callback(again)
        assert is_over.wait(LONG)
    assert errors == []


def test_inherited_future_does_not_cancel_calls_in_the_child() -> None:
    with BulkheadExecutor(1) as pool:
        inherited = [pool.submit(jobs.double, number) for number in range(5)]
        pending = pool.submit(time.sleep, 10 * LONG)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                own = [pool.submit(jobs.double, number) for number in range(20)]
                for future in [*inherited, pending]:
                    future.cancel()
                status = 0 if [future.result(LONG) for future in own] == [jobs.double(n) for n in range(20)] else 2
                pool.shutdown()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pending.cancel()


def test_supervisor_does_not_notify_the_callers_service_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        monkeypatch.setenv(name, "1")
    with BulkheadExecutor(1) as pool:
        assert pool.submit(jobs.variable, "NOTIFY_SOCKET").result(LONG) is None
        told = read(f"/proc/{supervisor_of(pool)}/environ")
        assert told is not None
        assert "NOTIFY_SOCKET" not in told
        assert "LISTEN_" not in told


SOFT_LIMIT = """
import signal
from concurrent.futures import wait
from bulkhead import BulkheadExecutor

def too_late(number, frame):
    raise TimeoutError("soft limit")

if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_late)
    futures, caught = [], 0
    with BulkheadExecutor(1) as pool:
        pool.submit(abs, 1).result(60)
        while caught < 100:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + caught * 0.00001)
                while True:
                    futures.append(pool.submit(len, bytes(100_000)))
                    futures[-1].result(60)
            except TimeoutError:
                caught += 1
        assert not wait(futures, 60).not_done
        assert all(future.exception() is not None or future.result() == 100_000 for future in futures)
        assert {type(future.exception()).__name__ for future in futures} <= {"NoneType", "TimeoutError"}
        assert pool.submit(abs, -2).result(60) == 2
    print("all ended")
"""


def test_timeout_from_a_signal_does_not_fail_other_calls() -> None:
    """`TimeoutError` is an `OSError`, but this one does not come from the connection."""
    source = str(Path(__file__).parents[1] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", SOFT_LIMIT],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
    assert ran.stdout == "all ended\n", ran.stderr


def test_signal_exception_after_condition_release_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    condition = Condition()
    release = condition._release_save

    def interrupted() -> None:
        release()
        raise KeyboardInterrupt

    monkeypatch.setattr(condition, "_release_save", interrupted)
    with pytest.raises(KeyboardInterrupt), condition:
        condition.wait()
    monkeypatch.undo()
    with condition:
        assert not condition.wait(0)
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.wait(0)


def test_shutdown_waits_for_the_supervisor_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_seconds: float) -> None:
        raise AssertionError("shutdown polls the supervisor")

    with BulkheadExecutor(1) as pool:
        assert pool.submit(jobs.double, 4).result(LONG) == 8
        supervisor = pool._pool.supervisor()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.time, "sleep", sleep)  # type: ignore[attr-defined]
            pool.shutdown()
    assert not supervisor.is_alive()


def test_lock_protects_the_folder_from_systemd_tmpfiles() -> None:
    """Imitates systemd-tmpfiles, which skips a folder that it cannot lock."""
    with BulkheadExecutor(1) as pool:
        assert pool.submit(jobs.double, 4).result(LONG) == 8
        descriptor = os.open(pool._pool.supervisor().folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("is_removed", [True, False])
def test_pool_survives_the_loss_of_its_folder(
    is_removed: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_output, "CATCH_UP_SECONDS_MAX", LONG / 2)
    with BulkheadExecutor(1) as pool:
        assert pool.submit(jobs.say, "before").result(LONG) == 1
        folder = pool._pool.supervisor().folder
        shutil.rmtree(folder)
        if not is_removed:
            os.mkdir(folder, 0o700)
        with pytest.raises(WorkerCrashed):
            pool.submit(jobs.segfault).result(LONG)
        assert pool.submit(jobs.say, "after").result(LONG) == 1
    assert capfd.readouterr().out == "before\nafter\n"
    assert not os.path.exists(folder)


def test_folder_of_a_killed_nested_pool_is_removed(tmp_path: Path) -> None:
    with BulkheadExecutor(1) as pool:
        future = pool.submit(jobs.nest_and_hang, str(tmp_path / "note"))
        folder = wait_for("the worker has a pool", lambda: read(tmp_path / "note"))
        assert future.cancel()

        def is_gone() -> bool:
            # The folder is removed as a side effect of later calls.
            pool.submit(jobs.double, 4).result(LONG)
            return not os.path.exists(folder)

        wait_for("the folder of the nested pool is gone", is_gone)


@pytest.mark.parametrize("end", ["shutdown", "terminate_workers"])
def test_callback_for_a_crashed_call_can_stop_the_pool(end: str) -> None:
    pool = BulkheadExecutor(1)
    returned = threading.Event()

    def end_pool(_future: object) -> None:
        getattr(pool, end)()
        returned.set()

    future = pool.submit(jobs.segfault)
    future.add_done_callback(end_pool)
    assert isinstance(future.exception(LONG), WorkerCrashed)
    assert returned.wait(LONG)
    pool.shutdown()
    assert not pool._pool._stacks
