"""Tests of the client with real supervisors: threads, futures, fork, signals, and lost supervisors."""

from __future__ import annotations

import ast
import collections
import concurrent.futures
import gc
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import LONG, is_running, wait_for
from running import SOURCE, WORKER, Supervisor, running, sandboxed

import bulkhead
from bulkhead import Client, JobError, _client, _private, _wire
from bulkhead._future import Condition


@pytest.mark.parametrize(("value", "folder"), [("", "/run"), ("run", "/run"), ("./run", "/run"), ("/x", "/x")])
def test_relative_runtime_dir_is_ignored(
    value: str, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    monkeypatch.delenv("BULKHEAD_SOCKET", raising=False)
    # Root does not use the variable.
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert _client.default_socket() == f"{folder}/bulkhead/jobs.sock"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/nonexistent")
    made = _private._make_folder(None)
    os.rmdir(made)
    assert Path(made).parent == Path("/tmp")


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    tight = {**WORKER, "max_queue": 0, "sandbox": {"profile": "none"}}
    limited = {**WORKER, "rate_limit": {"per_second": 0.05, "burst": 1}, "max_payload": "1KiB"}
    free = {**WORKER, "sandbox": {"profile": "none"}}
    with running(plain=WORKER, free=free, two={**WORKER, "processes": 2}, tight=tight, limited=limited) as one:
        yield one


@pytest.fixture
def client(supervisor: Supervisor) -> Iterator[Client]:
    with Client(supervisor.socket) as one:
        yield one


def error_of(client: Client, *arguments: object, **options: object) -> JobError:
    with pytest.raises(JobError) as caught:
        client.call(*arguments, **options)  # type: ignore[arg-type]
    return caught.value


# One job.


@pytest.mark.parametrize("size", [0, 1, 64, 65_536, 65_537, 1 << 20, 5_000_000])
def test_payload_is_returned(client: Client, size: int) -> None:
    payload = random.Random(size).randbytes(size)
    assert client.call("plain", payload).payload == payload
    assert client.call("plain", bytearray(payload)).payload == payload
    assert client.call("plain", memoryview(payload + payload)[::2]).payload == (payload + payload)[::2]
    assert bytes(client.submit("plain", payload).result(LONG)) == payload


def test_empty_payload_of_several_dimensions_is_sent(client: Client) -> None:
    empty = memoryview(bytearray(6)).cast("B", (2, 3))[:0]
    assert (empty.shape, empty.nbytes) == ((0, 3), 0)
    for payload in (client.call("plain", empty).payload, client.submit("plain", empty).result(LONG).payload):
        assert payload == b""


def test_reply_contains_the_outcome(client: Client, supervisor: Supervisor) -> None:
    reply = client.call("plain", b"1", operation="echo", deadline=2 * LONG, run_limit=LONG)
    told = reply.outcome
    assert (told.outcome, told.executed, told.attempts, told.bulkhead, told.http_status) == (
        "ok",
        "yes",
        1,
        "plain",
        200,
    )
    assert (told.deadline, told.run_limit) == (2 * LONG, LONG)
    assert told.worker_pid in supervisor.pids("plain")
    assert 0 < told.ran < LONG
    assert told.job is not None
    int(told.job, 16)
    assert pickle.loads(pickle.dumps(reply)).outcome == told


def test_options_reach_the_worker(client: Client) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    reply = client.call("plain", operation="about", tenant="acme", traceparent=trace, deadline=30, priority="critical")
    operation, tenant, number, traceparent, has_time, cancelled, made, own_thread, is_main = ast.literal_eval(
        reply.payload.decode()
    )
    assert (operation, tenant, has_time, cancelled, made) == ("about", "acme", True, False, "by init")
    assert number == reply.outcome.job
    assert traceparent.split("-")[1] == trace.split("-")[1]
    assert own_thread
    assert is_main


def test_each_outcome_raises_its_exception(client: Client, tmp_path: Path) -> None:
    failed = error_of(client, "plain", operation="raise")
    assert type(failed) is bulkhead.Failed
    assert (failed.outcome.reason, failed.outcome.message) == ("exception", "ValueError: no such page: 7")
    assert (failed.executed, failed.retryable, failed.http_status, failed.outcome.fault) == (
        "yes",
        False,
        422,
        "dependency",
    )
    own = error_of(client, "plain", b"details", operation="error")
    assert (own.outcome.reason, own.outcome.message, own.retryable, own.outcome.fault) == (
        "bad_page",
        "größer",
        True,
        "caller",
    )
    assert own.payload == b"details"
    crashed = error_of(client, "plain", operation="segv")
    assert type(crashed) is bulkhead.Crashed
    assert (crashed.outcome.reason, crashed.outcome.status, crashed.executed) == ("signal", 11, "unknown")
    assert "SIGSEGV" in str(crashed)
    assert str(crashed).endswith(f"; see `bulkhead crashes {crashed.outcome.report}`")
    left = error_of(client, "plain", b"exit x", operation="once")
    assert (left.outcome.reason, left.outcome.status) == ("exit", 3)
    late = error_of(client, "plain", operation="spin", run_limit=0.1)
    assert type(late) is bulkhead.DeadlineExceeded
    assert isinstance(late, TimeoutError)
    assert (late.outcome.reason, late.executed, late.http_status, late.outcome.run_limit) == (
        "running",
        "yes",
        504,
        0.1,
    )
    missing = error_of(client, "nowhere")
    assert type(missing) is bulkhead.Rejected
    assert (missing.http_status, missing.retryable, missing.executed) == (404, False, "no")
    large = error_of(client, "limited", bytes(2000))
    assert (large.outcome.reason, large.http_status) == ("too_large", 413)
    client.call("limited")
    rated = error_of(client, "limited")
    assert rated.http_status == 429
    assert rated.retryable
    assert rated.retry_after is not None
    assert rated.retry_after > 1
    go = tmp_path / "go"
    with_job = client.submit("tight", bytes(go), operation="wait")
    wait_for("a job is rejected", lambda: _is_full(client))
    go.touch()
    assert with_job.result(LONG).payload == b"waited"


def _is_full(client: Client) -> bool:
    error = client.submit("tight").exception(LONG)
    if error is None:
        return False
    assert isinstance(error, bulkhead.Rejected)
    assert (error.outcome.reason, error.http_status, error.retry_after is not None) == ("queue_full", 503, True)
    return True


def test_errors_can_be_pickled(client: Client) -> None:
    for error in (
        error_of(client, "plain", b"details", operation="error"),
        error_of(client, "plain", operation="spin", run_limit=0.05),
        error_of(Client("/nowhere/jobs.sock"), "plain"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.outcome, copy.payload) == (
            type(error),
            str(error),
            error.outcome,
            error.payload,
        )


def test_wrong_arguments_are_rejected_before_sending(client: Client) -> None:
    for wrong in ("text", 7, None, [b"x"]):
        with pytest.raises(TypeError, match="payload"):
            client.call("plain", wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="priority"):
        client.call("plain", priority="urgent")
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.call("plain")


# Concurrent jobs.


def test_threads_share_a_connection(client: Client) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for turn in range(60):
            payload = chance.randbytes(chance.choice([0, 10, 1000, 70_000]))
            if turn % 5 == 0:
                futures = [client.submit("two", payload + bytes((n,))) for n in range(3)]
                answers = [future.result(LONG).payload for future in futures]
                wrong.extend(a for n, a in enumerate(answers) if a != payload + bytes((n,)))
            elif turn % 7 == 0:
                try:
                    client.call("two", operation="raise")
                    wrong.append("no error")
                except bulkhead.Failed:
                    pass
            elif client.call("two", payload).payload != payload:
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert wrong == []


def test_callback_can_send_large_jobs(client: Client) -> None:
    payload = bytes(300_000)
    done: list[int] = []
    futures: list[concurrent.futures.Future[object]] = []
    lock = threading.Lock()

    def again(future: concurrent.futures.Future[object]) -> None:
        with lock:
            done.append(len(future.result().payload))  # type: ignore[attr-defined]
            count = len(done)
        if count <= 60:
            for _ in range(2):
                following = client.submit("two", payload)
                futures.append(following)
                following.add_done_callback(again)

    first = [client.submit("two", payload) for _ in range(30)]
    for future in first:
        future.add_done_callback(again)
    wait_for("all jobs are done", lambda: len(done) == 30 + 120)
    assert set(done) == {300_000}


# Futures.


def test_future_is_a_standard_future(client: Client) -> None:
    futures = [client.submit("two", b"%d" % n) for n in range(20)]
    assert {bytes(f.result()) for f in concurrent.futures.as_completed(futures, LONG)} == {b"%d" % n for n in range(20)}
    failing = client.submit("two", operation="raise")
    assert isinstance(failing.exception(LONG), bulkhead.Failed)
    assert not failing.cancel()


def test_failing_callback_does_not_affect_other_jobs(client: Client, tmp_path: Path) -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    called = threading.Event()
    go = tmp_path / "go"
    future = client.submit("free", bytes(go), operation="progress")
    future.on_progress(leave)
    future.add_done_callback(leave)
    future.add_done_callback(lambda _: called.set())
    go.touch()
    assert future.result(LONG).payload == b"read"
    assert called.wait(LONG)
    assert client.submit("plain", b"x").result(LONG).payload == b"x"


def test_callback_cannot_wait_for_a_job(client: Client) -> None:
    """The callback runs in the thread that reads outcomes."""
    refused: list[BaseException] = []

    def again(_: object) -> None:
        try:
            client.call("plain", b"2")
        except RuntimeError as error:
            refused.append(error)
            client.submit("plain", b"3").add_done_callback(refused.append)  # type: ignore[arg-type]

    client.submit("plain", b"1").add_done_callback(again)
    wait_for("the callback's job is done", lambda: len(refused) == 2)
    assert "cannot wait for a job" in str(refused[0])
    assert client.call("plain", b"4").payload == b"4"


def test_cancel_stops_a_running_job(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with running(plain=sandboxed("none")) as supervisor, Client(supervisor.socket) as client:
        before = client.call("plain").outcome.worker_pid
        future = client.submit("plain", bytes(begun), operation="spin")
        wait_for("the job has begun", begun.exists)
        assert supervisor.snapshot("plain")["in_flight"] == 1
        assert future.running()
        seen: list[bool] = []
        future.add_done_callback(lambda f: seen.append(f.cancelled()))
        assert future.cancel()
        assert future.cancel()
        assert future.cancelled()
        assert seen == [True]
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()
        assert client.call("plain").outcome.worker_pid != before
        waiting = client.submit("plain", b"0.3", operation="sleep")
        queued = client.submit("plain", operation="spin")
        assert queued.cancel()
        assert concurrent.futures.wait([waiting, queued], LONG).done == {waiting, queued}


def test_listener_receives_progress_reports(client: Client, tmp_path: Path) -> None:
    heard: list[tuple[float, str]] = []
    go = tmp_path / "go"
    future = client.submit("free", bytes(go), operation="progress")
    future.on_progress(lambda fraction, words: heard.append((round(fraction, 3), words)))
    go.touch()
    assert future.result(LONG).payload == b"read"
    late: list[object] = []
    future.on_progress(lambda *told: late.append(told))
    assert heard[-1] == (1.0, "the last word")
    assert len(late) == 1
    # The next job makes another report after the result, so no listener gets it.
    assert client.call("free", operation="progress-late").payload == b"1"
    assert "too late" not in str(heard)


# Signals.


class Interrupted(Exception):
    pass


def send_signal(number: int = signal.SIGUSR1) -> None:
    """Sends a signal. To be repeated, because a signal that comes just before the main thread sleeps is overlooked."""
    os.kill(os.getpid(), number)
    time.sleep(0.05)


def test_keyboard_interrupt_cancels_the_job(client: Client, supervisor: Supervisor) -> None:
    client.call("plain")
    connection = client._connection
    interruptions: list[int] = []

    def handle(number: int, _frame: object) -> None:
        interruptions.append(number)
        if len(interruptions) == 1:
            raise KeyboardInterrupt

    def interrupt() -> None:
        wait_for("the job runs", lambda: supervisor.snapshot("plain")["in_flight"] == 1)
        wait_for("the signal handler has run", lambda: send_signal(signal.SIGINT) or interruptions)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, handle)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.call("plain", operation="until-cancelled", deadline=3 * LONG)
        thread.join(3 * LONG)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for("the job is cancelled", lambda: supervisor.snapshot("plain")["in_flight"] == 0)
    assert client.call("plain", b"goes on").payload == b"goes on"
    assert client._connection is connection


def test_signal_handler_exceptions_do_not_lose_jobs(client: Client) -> None:
    """Imitates Celery's soft time limits, whose exceptions in the main thread must not affect other threads."""
    ended = threading.Event()
    wrong: list[object] = []

    def other(seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not ended.is_set():
                payload = chance.randbytes(chance.choice([10, 100_000]))
                if client.call("two", payload).payload != payload:
                    wrong.append("mixed up")
        except BaseException as error:
            wrong.append(error)

    def interrupt(*_: object) -> None:
        raise Interrupted

    threads = [threading.Thread(target=other, args=(seed,)) for seed in range(2)]
    before = signal.signal(signal.SIGALRM, interrupt)
    chance = random.Random(1)
    interruptions = 0
    try:
        for thread in threads:
            thread.start()
        for turn in range(400):
            payload = chance.randbytes(chance.choice([10, 10, 200_000]))
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00005, 0.002))
                    assert client.call("two", payload).payload == payload, turn
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interruptions += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ended.set()
        for thread in threads:
            thread.join(LONG)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
    assert interruptions > 20
    connection = client._connection
    assert connection is not None
    assert connection.lost is None
    assert client.call("two", b"goes on").payload == b"goes on"


# Fork.


class Interruption:
    """Wraps a connection's reader or ``send``, and raises an error once, as a signal handler would."""

    def __init__(self, real: Any, error: Exception, after: int = 0) -> None:
        self._real = real
        self._error = error
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            raise self._error

    def read(self) -> bool:
        self._count()
        return bool(self._real.read())

    def __call__(self, *arguments: Any) -> int:
        self._count()
        return int(self._real(*arguments))


def test_timeout_in_a_signal_handler_fails_only_its_job(client: Client) -> None:
    assert client.call("two", b"x").payload == b"x"
    connection = client._connection
    assert connection is not None
    other = client.submit("two", b"0.2", operation="sleep")
    reader, send = connection._reader, connection._send
    connection._send = Interruption(send, TimeoutError("a soft limit"))  # type: ignore[assignment]
    with pytest.raises(TimeoutError, match="a soft limit"):
        client.call("two", b"y")
    connection._send = send
    assert other.result(LONG).payload == b"slept"
    connection._reader = Interruption(reader, TimeoutError("a soft limit"))  # type: ignore[assignment]
    # The thread that reads for futures is asleep, because no future is pending.
    with pytest.raises(TimeoutError, match="a soft limit"):
        client.call("two", b"z")
    connection._reader = reader
    assert client.call("two", b"x").payload == b"x"
    assert client._connection is connection


def test_abandoned_result_does_not_block_the_next_payload(client: Client) -> None:
    assert client.call("plain", b"x").payload == b"x"
    connection = client._connection
    assert connection is not None
    # Part of the result is received. The rest is larger than the socket buffers.
    connection._reader = Interruption(connection._reader, TimeoutError("a soft limit"), after=1)  # type: ignore
    with pytest.raises(TimeoutError, match="a soft limit"):
        client.call("plain", str(12 << 20).encode(), operation="size")
    payload = bytes(12 << 20)
    assert client.call("plain", payload).payload == payload
    assert client._connection is connection


def test_cancel_in_a_signal_handler_sends_the_job_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    other = client.submit("two", operation="spin")
    connection = client._connection
    assert connection is not None
    signal.signal(signal.SIGUSR1, lambda *_: other.cancel())

    class Queue(collections.deque[Any]):
        is_new = True

        def append(self, entry: Any) -> None:
            super().append(entry)
            if self.is_new:
                self.is_new = False
                signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(connection, "_outgoing", Queue())
    try:
        for payload in (b"x", b"y"):
            assert client.call("two", payload).payload == payload
        assert client._connection is connection
        assert connection.lost is None
        assert other.cancelled()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.parametrize("is_first", [True, False])
def test_signal_handler_cannot_wait_during_a_call(client: Client, is_first: bool, tmp_path: Path) -> None:
    found: list[Any] = []
    go = tmp_path / "go"

    def handle(*_: object) -> None:
        try:
            client.call("two", b"x")
        except RuntimeError as error:
            found.append(error)
        found.append(client.submit("two", b"y"))
        go.touch()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        # The main thread reads, or sleeps while the thread for futures reads.
        other = None if is_first else client.submit("free", bytes(go), operation="wait")
        connection = client._connection

        def press() -> None:
            wait_for("the call has begun", lambda: client._connection and client._connection._calls)
            time.sleep(0.05)
            wait_for("the signal handler has run", lambda: send_signal() or found)

        thread = threading.Thread(target=press)
        thread.start()
        assert client.call("free", bytes(go), operation="wait").payload == b"waited"
        thread.join(3 * LONG)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "cannot wait for a job" in str(found[0])
    assert found[1].result(LONG).payload == b"y"
    assert other is None or other.result(LONG).payload == b"waited"
    assert is_first or client._connection is connection


@pytest.mark.parametrize("moment", ["append", "__len__"])
def test_signal_handler_can_submit_during_a_send(client: Client, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    assert client.call("two", b"x").payload == b"x"
    connection = client._connection
    assert connection is not None
    found: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(client.submit("two", b"nested")))

    class Queue(collections.deque[Any]):
        """Raises the signal after the first entry was added, or when the sending code finds the queue empty."""

        appended = looks = 0

        def append(self, entry: Any) -> None:
            super().append(entry)
            self.appended += 1
            if moment == "append" and self.appended == 1:
                signal.raise_signal(signal.SIGUSR1)

        def __len__(self) -> int:
            length = super().__len__()
            self.looks += not length and connection._writing._is_owned()  # type: ignore
            # The code checks for the first time before anything is sent.
            if moment == "__len__" and self.looks == 2:
                self.looks += 1
                signal.raise_signal(signal.SIGUSR1)
            return length

    monkeypatch.setattr(connection, "_outgoing", Queue())
    try:
        # The pause is long enough to notice a job that is sent twice.
        future = client.submit("two", b"0.3", operation="sleep")
        assert future.result(LONG).payload == b"slept"
        assert found[0].result(LONG).payload == b"nested"
        assert client.call("two", b"x").payload == b"x"
        assert client._connection is connection
        assert connection.lost is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_handler_can_close_a_connecting_client(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.settimeout(LONG)
        client = Client(path)

        def press() -> None:
            with listening.accept()[0] as peer:
                peer.settimeout(LONG)
                peer.recv(65_536)
                wait_for("the client is closed", lambda: send_signal() or client._is_closed)
                peer.sendall(_wire.frame(_wire.CLIENT_WELCOME, 0, struct.pack("<HIQ", 1, 0xFFFF_FFFF, 0) + bytes(8)))

        before = signal.signal(signal.SIGUSR1, lambda *_: client.close())
        thread = threading.Thread(target=press)
        try:
            thread.start()
            with pytest.raises(RuntimeError, match="closed"):
                client.call("plain", b"1")
        finally:
            thread.join(4 * LONG)
            signal.signal(signal.SIGUSR1, before)
    assert client._connection is None


def test_ctrl_c_does_not_lose_futures_in_other_threads(
    client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert client.call("two", b"x").payload == b"x"
    connection = client._connection
    assert connection is not None
    go = tmp_path / "go"
    found: list[Any] = []
    told: list[Any] = []
    called = threading.Event()

    def other() -> None:
        wait_for("the main thread reads for all threads", lambda: connection._leader is not None)
        found.append(client.submit("free", bytes(go), operation="wait"))
        found[0].add_done_callback(lambda _: called.set())
        go.touch()
        told.append(found[0].result(LONG).payload)

    notify_all = Condition.notify_all

    def hit(condition: Condition) -> None:
        if found and condition is found[0]._condition:
            monkeypatch.undo()
            raise KeyboardInterrupt
        notify_all(condition)

    monkeypatch.setattr(Condition, "notify_all", hit)
    thread = threading.Thread(target=other)
    thread.start()
    # This thread reads for all threads.
    with pytest.raises(KeyboardInterrupt):
        client.call("two", b"%d" % LONG, operation="sleep")
    thread.join(LONG)
    assert (told, called.wait(LONG)) == ([b"waited"], True)
    assert client.submit("two", b"x").result(LONG).payload == b"x"


def test_forked_child_uses_another_connection(client: Client, supervisor: Supervisor) -> None:
    running_job = client.submit("two", operation="until-cancelled", deadline=10 * LONG)
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                answers = [client.call("two", b"%d %d" % (number, n)).payload for n in range(50)]
                futures = [client.submit("two", b"%d" % n) for n in range(10)]
                right = answers == [b"%d %d" % (number, n) for n in range(50)]
                right &= [bytes(f.result(LONG)) for f in futures] == [b"%d" % n for n in range(10)]
                # The child does not own the parent's job.
                right &= isinstance(running_job.exception(LONG), bulkhead.Disconnected)
                status = 0 if right else 2
            finally:
                os._exit(status)
        children.append(child)
    mine = [client.call("two", b"%d" % n).payload for n in range(50)]
    assert mine == [b"%d" % n for n in range(50)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert not running_job.done()
    assert running_job.cancel()


def test_forked_child_cannot_cancel_a_job_of_a_dropped_client(supervisor: Supervisor, tmp_path: Path) -> None:
    file = tmp_path / "file"
    client = Client(supervisor.socket)
    job = client.submit("free", bytes(file), operation="wait")
    del client
    gc.collect()
    child = os.fork()
    if child == 0:
        try:
            job.cancel()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    file.touch()
    assert job.result(LONG).payload == b"waited"


def test_prefork_children_can_use_the_inherited_client(supervisor: Supervisor) -> None:
    """gunicorn, for example, imports and uses the client before it forks, and uses it in threads of its children."""
    program = f"""
import os, threading, bulkhead
client = bulkhead.Client({supervisor.socket!r})
stop = threading.Event()
def use():
    while not stop.is_set():
        assert client.call("two", b"x").payload == b"x"
threads = [threading.Thread(target=use) for _ in range(3)]
for thread in threads: thread.start()
pids = []
for n in range(6):
    pid = os.fork()
    if pid == 0:
        ok = []
        def work():
            ok.extend(client.call("two", b"y").payload == b"y" for _ in range(30))
        workers = [threading.Thread(target=work) for _ in range(3)]
        for w in workers: w.start()
        for w in workers: w.join()
        os._exit(0 if ok == [True] * 90 else 1)
    pids.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
stop.set()
for thread in threads: thread.join()
print(codes)
"""
    environment = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=5 * LONG, check=False
    )
    assert run.stdout.strip() == b"[0, 0, 0, 0, 0, 0]", run.stderr.decode()


# Lost supervisors.


def test_missing_supervisor_is_reported(tmp_path: os.PathLike[str]) -> None:
    error = error_of(Client(os.path.join(tmp_path, "jobs.sock")), "plain")
    assert type(error) is bulkhead.Disconnected
    assert isinstance(error, ConnectionError)
    assert (error.executed, error.retryable, error.outcome.http_status) == ("no", True, 503)
    assert "jobs.sock" in str(error)


def test_client_reconnects_after_a_restart() -> None:
    with running(plain=WORKER) as own, Client(own.socket) as client:
        workers = own.pids("plain")
        future = client.submit("plain", b"60", operation="sleep")
        queued = client.submit("plain")
        errors: list[JobError] = []
        thread = threading.Thread(target=lambda: errors.append(error_of(client, "plain")))
        thread.start()
        wait_for("all jobs have arrived", lambda: own.snapshot("plain")["queued"] == 2)
        own.kill()
        thread.join(LONG)
        for error in (future.exception(LONG), queued.exception(LONG), errors[0]):
            assert isinstance(error, bulkhead.Disconnected)
            assert (error.executed, error.retryable, error.outcome.http_status) == ("unknown", False, 502)
        wait_for("the workers are gone", lambda: not any(map(is_running, workers)))
        assert error_of(client, "plain").executed == "no"
        own.start()
        assert client.call("plain", b"again").payload == b"again"
        # An idle client reconnects without an error.
        own.stop()
        own.start()
        assert client.call("plain", b"once more").payload == b"once more"
        assert client.submit("plain", b"and more").result(LONG).payload == b"and more"


def test_workers_cannot_be_clients(client: Client, supervisor: Supervisor) -> None:
    said = client.call("free", supervisor.socket.encode(), operation="client").payload.decode()
    assert said.startswith("Rejected: rejected (forbidden)"), said
    said = client.call("plain", supervisor.socket.encode(), operation="client").payload.decode()
    assert said.startswith("Disconnected: a socket could not be created"), said


def test_dropped_client_leaks_no_resources(supervisor: Supervisor) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    Client(supervisor.socket).call("two")
    gc.collect()
    before = descriptors()
    for _ in range(20):
        with Client(supervisor.socket) as client:
            client.call("two")
            client.submit("two").result(LONG)
    # A client that is dropped without being closed ends after its last future is done.
    for _ in range(20):
        client = Client(supervisor.socket)
        left = client.submit("two", b"later")
        del client
        assert left.result(LONG).payload == b"later"
    idle = [Client(supervisor.socket) for _ in range(5)]
    for client in idle:
        client.submit("two").result(LONG)
    del client, idle
    gc.collect()
    wait_for("client threads are gone", lambda: not [t for t in threading.enumerate() if t.name == "bulkhead-client"])
    wait_for("all descriptors are closed", lambda: descriptors() <= before)


# Importing.


def test_import_loads_no_heavy_modules() -> None:
    program = """
import sys
before = set(sys.modules)
import bulkhead
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded <= {"bulkhead", "__future__"}, loaded
bulkhead.Client
heavy = {"asyncio", "concurrent", "ctypes", "logging", "pickle", "typing", "inspect", "multiprocessing", "subprocess"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in bulkhead.__all__: getattr(bulkhead, name)
assert "Client" in dir(bulkhead)
try: bulkhead.Nothing
except AttributeError: print("ok")
"""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=2 * LONG, check=False
    )
    assert run.stdout == b"ok\n", run.stderr.decode()


def test_thousand_jobs_start_no_threads(client: Client) -> None:
    threads = threading.active_count()
    for _ in range(1000):
        client.call("two", bytes(64))
    # A thread from another test may have exited in the meantime.
    assert threading.active_count() <= threads
