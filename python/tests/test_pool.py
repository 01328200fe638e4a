"""Tests of failures around a pool: signals, failing callbacks, forks, missing threads, descriptors or supervisors."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import shutil
import signal
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jobs
import pytest
from pools import LONG, script, wait_for

import bulkhead._pool
from bulkhead import BulkheadExecutor, Disconnected, _output
from bulkhead._channel import Channel
from bulkhead._private import PrivateSupervisor, SupervisorFailed
from bulkhead.executor import Call, PoolDisconnected, PoolFuture


@pytest.fixture
def pool() -> Iterator[BulkheadExecutor]:
    """A pool with a running supervisor."""
    with BulkheadExecutor(1) as executor:
        executor.submit(jobs.pid).result(LONG)
        yield executor


def channel_of(pool: BulkheadExecutor) -> Channel:
    channel = pool._pool._channel
    assert channel is not None
    return channel


# Signals.


class Interrupted:
    """A socket whose send is interrupted by a signal handler's exception after part of the data was sent."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._is_interrupted = iter((False, True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def sendmsg(self, pieces: list[Any], *rest: Any) -> int:
        is_interrupted = next(self._is_interrupted, None)
        if is_interrupted is None:
            return int(self._real.sendmsg(pieces, *rest))
        if is_interrupted:
            raise TimeoutError("a soft limit")
        return int(self._real.sendmsg([b"".join(pieces)[:10]], *rest))


def test_timeout_during_a_send_does_not_lose_other_calls(pool: BulkheadExecutor) -> None:
    channel = channel_of(pool)
    channel._socket = Interrupted(channel._socket)  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="a soft limit"):
        pool.submit(jobs.echo, bytes(1000))
    assert pool.submit(jobs.double, 2).result(LONG) == 4
    assert channel_of(pool) is channel


class InMain:
    """Runs an action and raises KeyboardInterrupt when pickled in the main thread. In other threads, pickles as 7."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def __reduce__(self) -> Any:
        if threading.current_thread() is threading.main_thread():
            self._action()
            raise KeyboardInterrupt
        return int, (7,)


def test_ctrl_c_does_not_fail_another_threads_call(pool: BulkheadExecutor) -> None:
    future = PoolFuture(pool._pool)
    # Imitates a call that another thread has submitted but that has not been sent yet.
    pool._pool._waiting.append(Call(future, pool._metadata, False, jobs.double, (InMain(lambda: None),), {}))
    with pytest.raises(KeyboardInterrupt):
        pool._pool.shut_down(wait=False, cancel=False)
    assert future.result(LONG) == 14


def test_ctrl_c_during_pickling_does_not_block_shutdown(pool: BulkheadExecutor) -> None:
    thread = threading.Thread(target=pool.shutdown)

    def waits() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        names = set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        return {"join", "shut_down"} <= names

    def shut_down() -> None:
        thread.start()
        wait_for("the shutdown waits for the call", waits)

    with pytest.raises(KeyboardInterrupt):
        pool.submit(jobs.double, InMain(shut_down))
    thread.join(LONG)
    assert not thread.is_alive()


# Exceptions in threads on which other threads depend.


def test_callbacks_run_after_an_earlier_callback_has_raised(pool: BulkheadExecutor, tmp_path: Path) -> None:
    called = threading.Event()

    def leave(_: Future[Any]) -> None:
        sys.exit(3)

    future = pool.submit(jobs.note_and_wait, str(tmp_path), 1)
    future.add_done_callback(leave)
    future.add_done_callback(lambda _: called.set())
    (tmp_path / "go").touch()
    assert called.wait(LONG)
    assert pool.submit(jobs.double, 2).result(LONG) == 4


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_failed_thread_start_leaves_no_call_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    with BulkheadExecutor(1) as pool:
        futures = [pool.submit(jobs.sleep, 0.01)]
        channel = channel_of(pool)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            # Imitates the recovery after a signal handler raised an exception.
            channel.recover()
        assert isinstance(futures[0].exception(LONG), (PoolDisconnected, type(None)))
        assert pool.submit(jobs.double, 2).result(LONG) == 4
        assert channel_of(pool) is not channel


def test_unreadable_outcome_closes_only_the_connection(pool: BulkheadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_metadata: bytes) -> int:
        raise struct.error("an outcome that cannot be read")

    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with monkeypatch.context() as patch:
        patch.setattr(bulkhead._pool._wire, "ran_us", fail)
        channel = channel_of(pool)
        for future in [pool.submit(jobs.double, number) for number in range(100)]:
            assert isinstance(future.exception(LONG), (PoolDisconnected, type(None)))
    wait_for("the thread has exited", lambda: told)
    assert pool.submit(jobs.double, 2).result(LONG) == 4
    assert channel_of(pool) is not channel


class Large(bytes):
    def __len__(self) -> int:
        return 1 << 32


def test_oversized_call_fails_alone(pool: BulkheadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pool._pool.pickler, "dump", lambda _: [Large()])
        with pytest.raises(ValueError, match="4294967296 bytes; the maximum is"):
            pool.submit(jobs.pid).result(LONG)
    assert pool.submit(jobs.double, 2).result(LONG) == 4


# Supervisors that fail to start.


def test_waiting_calls_fail_if_no_supervisor_starts(pool: BulkheadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(supervisor: PrivateSupervisor, _command: list[str]) -> None:
        supervisor.stop(at_once=True)
        raise SupervisorFailed("too many open files")

    # The first call runs until the supervisor dies.
    futures = [pool.submit(jobs.sleep, seconds) for seconds in (600, *[0.05] * 99)]
    with monkeypatch.context() as patch:
        patch.setattr(PrivateSupervisor, "start", refuse)
        pid = pool._pool.supervisor().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        last = futures[-1].exception(LONG)
        assert isinstance(last, PoolDisconnected)
        assert "another could not be started: too many open files" in str(last)
        assert last.outcome.executed == "no"
        with pytest.raises(SupervisorFailed):
            pool.submit(jobs.double, 2)
    assert pool.submit(jobs.double, 2).result(LONG) == 4


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_failed_start_of_a_pool_leaks_no_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    before = descriptors(), threading.active_count()

    def leaks_nothing() -> bool:
        # Threads and descriptors of earlier tests can disappear at any time.
        is_left = set(descriptors()) - set(before[0]) or threading.active_count() > before[1]
        return not is_left and os.listdir(folder) == []

    def refuse(*_: object) -> Any:
        raise Disconnected("it is not reachable")

    def no_descriptor(*_: object) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    try:
        with (
            BulkheadExecutor(1, initializer=lambda: None) as pool,
            pytest.raises((pickle.PicklingError, AttributeError)),
        ):
            pool.submit(jobs.pid)
        assert leaks_nothing()
        for target, name, failing, kind in (
            (bulkhead._pool, "connect", refuse, Disconnected),
            (os, "memfd_create", no_descriptor, OSError),
            (os, "eventfd", no_descriptor, OSError),
        ):
            with BulkheadExecutor(1) as pool, monkeypatch.context() as patch:
                patch.setattr(target, name, failing)
                with pytest.raises(kind):
                    pool.submit(jobs.pid)
            assert leaks_nothing(), name
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("where", "is_killed"),
    [("behind.connect", True), ("behind.PrivateSupervisor.stop", True), ("behind._wire.ran_us", False)],
)
def test_executor_can_be_dropped_at_any_time(where: str, is_killed: bool, tmp_path: Path) -> None:
    """The garbage collector can run in the pool's thread, and while that thread holds the lock."""
    ended = script(f"""
        import gc, os, signal, jobs, bulkhead._pool as behind
        from bulkhead import BulkheadExecutor
        made = [BulkheadExecutor(1)]
        # The other calls wait for the first call.
        futures = [made[0].submit(jobs.note_and_wait, {str(tmp_path)!r}, 1)]
        futures += [made[0].submit(jobs.sleep, 0.01) for _ in range(40)]
        pool, real = made[0]._pool, {where}
        def drop(*given, **named):
            made.clear()
            gc.collect()
            return real(*given, **named)
        {where} = drop
        if {is_killed}:
            os.kill(pool.supervisor().pid, signal.SIGKILL)
        else:
            open({str(tmp_path / "go")!r}, "w").close()
            futures[0].result(60)
        assert futures[-1].result(60) == 0.01
        pool._join()
        assert not made and pool._channel is None
        print("ended")
    """)
    assert (ended.stdout, ended.returncode) == ("ended\n", 0), ended.stderr


# Fork.


@pytest.mark.parametrize("sandbox", ["none", "default"])
def test_forked_child_closes_the_pools_descriptors(sandbox: str) -> None:
    ended = script(f"""
        import os, jobs
        from bulkhead import BulkheadExecutor
        before = set(os.listdir("/proc/self/fd"))
        pool = BulkheadExecutor(1, sandbox={sandbox!r})
        pool.submit(abs, -1).result(60)
        if not os.fork():
            print(set(os.listdir("/proc/self/fd")) - before, flush=True)
            os._exit(0)
        os.wait()
        assert pool.submit(abs, -2).result(60) == 2
    """)
    assert (ended.stdout, ended.returncode) == ("set()\n", 0), ended.stderr


# Output.


class Kept:
    """A standard output stream in pure Python that raises an exception for some words."""

    def __init__(self) -> None:
        self.lines = ""

    def write(self, text: str) -> None:
        if "fail" in text:
            raise KeyError(text)
        self.lines += text

    def flush(self) -> None:
        pass


def test_printed_output_precedes_the_result(pool: BulkheadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setattr(_output, "CATCH_UP_SECONDS_MAX", LONG)
    monkeypatch.setattr(sys, "stdout", kept)
    for number in range(2000):
        pool.submit(jobs.say, f"line {number}").result(LONG)
        assert kept.lines.endswith(f"line {number}\n")


def test_failing_output_stream_does_not_fail_calls(pool: BulkheadExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    monkeypatch.setattr(_output, "CATCH_UP_SECONDS_MAX", LONG)
    monkeypatch.setattr(sys, "stdout", kept)
    assert pool.submit(jobs.say, "fail").result(LONG) == 1
    # More than the capacity of a FIFO.
    assert pool.submit(jobs.say, "x" * 99, 2000).result(LONG) == 2000
    assert kept.lines.count("x") == 99 * 2000


def test_multibyte_characters_reach_text_streams_intact(
    pool: BulkheadExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = io.StringIO()
    monkeypatch.setattr(_output, "CATCH_UP_SECONDS_MAX", LONG)
    with contextlib.redirect_stdout(kept):
        # More than the capacity of a FIFO, in pieces that end within a character.
        pool.submit(jobs.say, "x" + "\N{EURO SIGN}" * 200_000).result(LONG)
    text = kept.getvalue()
    assert text.count("\N{REPLACEMENT CHARACTER}") == 0
    assert text.count("\N{EURO SIGN}") == 200_000
