"""Tests of jobs that are sent again: after the supervisor dies, after a lost connection, and as retries."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import errno
import gc
import os
import random
import select
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import LONG, script, wait_for
from running import WORKER, Supervisor, running

import bulkhead
from bulkhead import AsyncClient, Client, JobError, _again, _aio, _connection, _wire

#: Number of jobs that must have an outcome before each kill of the supervisor.
JOBS_PER_ROUND = 100
KILLS = 3


class Book:
    """The clients' record of all jobs: the error of each job, by job number."""

    def __init__(self) -> None:
        self.results: dict[int, list[JobError | None]] = collections.defaultdict(list)
        self.is_over = False
        self._lock = threading.Lock()

    def note(self, number: int, error: JobError | None) -> None:
        with self._lock:
            self.results[number].append(error)

    def count(self) -> int:
        with self._lock:
            return len(self.results)


def job(number: int) -> dict[str, Any]:
    """Returns the arguments of a job. Every second job is idempotent."""
    payload = b"slow %d" % number if number % 3 else b"slow %d" % number + b" " * 100_000
    return {"payload": payload, "operation": "once", "idempotent": number % 2 == 0, "deadline": LONG}


def call_all(client: Client, book: Book, start: int) -> None:
    for number in range(start, start + 1_000_000):
        if book.is_over:
            return
        arguments = job(number)
        try:
            assert bytes(client.call("plain", **arguments).payload) == arguments["payload"]
            book.note(number, None)
        except JobError as error:
            book.note(number, error)


def submit_all(client: Client, book: Book, start: int) -> None:
    for number in range(start, start + 1_000_000, 4):
        if book.is_over:
            return
        futures = {number: client.submit("plain", **job(number)) for number in range(number, number + 4)}
        for one, future in futures.items():
            error = future.exception(LONG)
            assert error is None or isinstance(error, JobError), error
            book.note(one, error)


def await_all(path: str, book: Book, start: int) -> None:
    async def lane(client: AsyncClient, start: int) -> None:
        for number in range(start, start + 1_000_000):
            if book.is_over:
                return
            try:
                await client.call("plain", **job(number))
                book.note(number, None)
            except JobError as error:
                book.note(number, error)

    async def all_lanes() -> None:
        async with AsyncClient(path) as client:
            await asyncio.gather(*(lane(client, start + (index << 24)) for index in range(4)))

    asyncio.run(all_lanes())


def test_killed_supervisor_repeats_only_idempotent_jobs(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    keys = {
        **WORKER,
        "env": {**WORKER["env"], "NOTES": str(notes)},
        "processes": 2,
        "max_in_flight": 2,
        "sandbox": {"profile": "none"},
    }
    book = Book()
    with running(plain=keys) as own, Client(own.socket) as client:
        ways: list[tuple[Callable[..., None], Any]] = [(call_all, client)] * 4 + [(submit_all, client)] * 2
        ways.append((await_all, own.socket))
        threads = [
            threading.Thread(target=way, args=(target, book, index << 32)) for index, (way, target) in enumerate(ways)
        ]
        for thread in threads:
            thread.start()
        try:
            for round in range(KILLS + 1):
                goal = book.count() + JOBS_PER_ROUND
                wait_for("the clients continue", lambda goal=goal: book.count() >= goal)
                if round < KILLS:
                    own.kill()
                    own.start()
        finally:
            book.is_over = True
            for thread in threads:
                thread.join(LONG)
        assert not any(thread.is_alive() for thread in threads), "a job has no outcome"
    begun = collections.Counter(int(line) for line in notes.read_text().split())
    assert set(begun) <= set(book.results), "a job began that no client had sent"
    unknown = 0
    for number, results in book.results.items():
        [error] = results
        what = f"job {number} began {begun[number]} times: {error!r}"
        if number % 2 == 0:
            assert error is None, what
        else:
            assert begun[number] <= 1, what
        if error is None:
            assert begun[number], what
        elif error.executed == "no":
            assert not begun[number], what
        else:
            assert error.executed == "unknown", what
            unknown += 1
    assert unknown, "jobs were in progress when the supervisor was killed"


# A fake supervisor.


class Peer:
    """The supervisor's end of a connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._reader = _wire.Reader(link.recv, link.recv_into)
        assert self._next()[0] == _wire.HELLO

    def _next(self) -> _wire.Frame:
        while not self._reader.frames:
            self._reader.read()
        return self._reader.frames.popleft()

    def welcome(self) -> None:
        fixed = struct.pack("<HIQ", 1, 0xFFFF_FFFF, 0)
        self.link.sendall(_wire.frame(_wire.CLIENT_WELCOME, 0, fixed + bytes(8) + _wire.EMPTY))

    def job(self) -> tuple[int, bytes]:
        """Returns the number and the payload of the next job."""
        while True:
            kind, number, _, payload = self._next()
            if kind == _wire.SUBMIT:
                return number, bytes(payload)

    def cancellation(self) -> int:
        """Returns the number of the next job that the client cancels."""
        while True:
            kind, number, _, _ = self._next()
            if kind == _wire.CANCEL:
                return number

    def end(self, number: int, verdict: int, reason: int = 0, retry_after: float | None = None) -> None:
        """Sends an outcome."""
        after = (0, 0) if retry_after is None else (1, round(retry_after * 1e6))
        fixed = _wire._OUTCOME.pack(verdict, reason, 0, 1, 0, 0, 0, 0, 1_000_000, 0, *after, 0, 0)
        self.link.sendall(_wire.frame(_wire.OUTCOME, number, fixed + bytes(24) + _wire.EMPTY))

    def go_away(self, count: int, taken: list[int]) -> None:
        """Sends GOAWAY: the supervisor has accepted ``count`` jobs, of which ``taken`` have no outcome."""
        self.link.sendall(_wire.frame(_wire.GOAWAY, count, _wire.EMPTY, b"".join(map(_wire.NUMBER.pack, taken))))

    def pid(self) -> int:
        """Returns the PID of the client."""
        return int(struct.unpack("iii", self.link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def wait_for_end(self) -> None:
        """Waits until the client closes the connection."""
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                self._next()

    def close(self) -> None:
        self.link.close()


OK, REJECTED, CANCELLED = (_wire.OUTCOMES.index(name) for name in ("ok", "rejected", "cancelled"))
QUEUE_FULL, OVERLOADED = (1 + _wire.REASONS["rejected"].index(name) for name in ("queue_full", "overloaded"))


class FakeSupervisor:
    """A listening socket, with a script that runs in a thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()

    def accept(self) -> Peer:
        return Peer(self._listening.accept()[0])

    def welcome(self) -> Peer:
        peer = self.accept()
        peer.welcome()
        return peer

    def close(self) -> None:
        self._listening.close()
        os.unlink(self.path)

    @contextlib.contextmanager
    def running(self, script: Callable[[FakeSupervisor], object]) -> Iterator[str]:
        problems: list[BaseException] = []

        def run() -> None:
            try:
                script(self)
            except BaseException as problem:
                problems.append(problem)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield self.path
        thread.join(LONG)
        assert not problems, problems
        assert not thread.is_alive(), "the client keeps a connection open, or has not opened one"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSupervisor:
    # Only the jobs' deadlines limit the attempts to connect, because a script can be slow.
    monkeypatch.setattr(_connection, "HANDSHAKE_SECONDS_MAX", 10 * LONG)
    monkeypatch.setattr(_again, "RECONNECT_SECONDS_MAX", LONG)
    return FakeSupervisor(str(tmp_path / "s"))


def call_of(
    way: str,
    path: str,
    *,
    is_connected: bool = False,
    payload: bytes = b"x",
    reconnect_timeout: float | None = None,
    **options: Any,
) -> bytes:
    """Runs a job with the given kind of client. Returns the result.

    If ``is_connected`` is true, the client first connects and runs another job.
    """
    if way == "asyncio":

        async def run() -> bytes:
            async with AsyncClient(path, reconnect_timeout=reconnect_timeout) as client:
                if is_connected:
                    await client.call("plain")
                return bytes((await client.call("plain", payload, **options)).payload)

        return asyncio.run(run())
    with Client(path, reconnect_timeout=reconnect_timeout) as client:
        if is_connected:
            client.call("plain")
        if way == "call":
            return bytes(client.call("plain", payload, **options).payload)
        return bytes(client.submit("plain", payload, **options).result(LONG).payload)


WAYS = pytest.mark.parametrize("way", ["call", "submit", "asyncio"])


@WAYS
def test_idempotent_job_is_sent_again(fake: FakeSupervisor, way: str) -> None:
    def script(fake: FakeSupervisor) -> None:
        for _ in range(3):
            peer = fake.welcome()
            assert peer.job()[1] == b"x"
            peer.close()
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)

    with fake.running(script) as path:
        assert call_of(way, path, idempotent=True, deadline=LONG) == b""


@WAYS
def test_job_that_breaks_every_connection_is_sent_four_times(fake: FakeSupervisor, way: str) -> None:
    def script(fake: FakeSupervisor) -> None:
        for _ in range(4):
            peer = fake.welcome()
            peer.job()
            peer.close()

    with fake.running(script) as path, pytest.raises(bulkhead.Disconnected) as caught:
        call_of(way, path, idempotent=True)
    assert caught.value.executed == "unknown"


@WAYS
def test_rejection_after_reconnect_leaves_execution_unknown(fake: FakeSupervisor, way: str) -> None:
    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.job()
        peer.close()
        peer = fake.welcome()
        peer.end(peer.job()[0], REJECTED, QUEUE_FULL, 0.05)

    with fake.running(script) as path, pytest.raises(bulkhead.Crashed) as caught:
        call_of(way, path, idempotent=True)
    error = caught.value
    assert (error.executed, error.retryable, error.retry_after) == ("unknown", True, 0.05)
    assert "the job was sent again and ended as rejected (queue_full)" in str(error)


@WAYS
@pytest.mark.parametrize("listens", [False, True])
def test_job_ends_at_its_deadline_without_a_supervisor(fake: FakeSupervisor, way: str, listens: bool) -> None:
    ended = threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)
        peer.job()
        if not listens:
            fake.close()
        peer.close()
        # If the socket is listening, the client connects but gets no welcome.
        assert ended.wait(LONG)

    with fake.running(script) as path:
        try:
            with pytest.raises(bulkhead.Disconnected) as caught:
                call_of(way, path, is_connected=True, idempotent=True, deadline=0.4)
        finally:
            ended.set()
    assert caught.value.executed == "unknown"
    assert "the job may have run" in str(caught.value)


@WAYS
def test_first_job_ends_at_its_deadline_if_the_supervisor_is_silent(fake: FakeSupervisor, way: str) -> None:
    ended = threading.Event()
    with fake.running(lambda _: ended.wait(LONG)) as path:
        try:
            with pytest.raises(bulkhead.Disconnected) as caught:
                call_of(way, path, deadline=0.2)
        finally:
            ended.set()
    assert caught.value.executed == "no"
    assert "the job was not sent" in str(caught.value)


@WAYS
def test_zero_reconnect_timeout_fails_jobs_on_a_lost_connection(fake: FakeSupervisor, way: str) -> None:
    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.job()
        fake.close()
        peer.close()

    async def both(path: str) -> list[JobError]:
        async with AsyncClient(path, reconnect_timeout=0) as client:
            found = []
            for _ in range(2):
                with pytest.raises(bulkhead.Disconnected) as caught:
                    await client.call("plain", idempotent=True, deadline=LONG)
                found.append(caught.value)
            return found

    with fake.running(script) as path:
        if way == "asyncio":
            first, second = asyncio.run(both(path))
        else:
            with Client(path, reconnect_timeout=0) as client:
                send: Any = client.call
                if way == "submit":
                    send = lambda *job, **options: client.submit(*job, **options).result(LONG)  # noqa: E731
                with pytest.raises(bulkhead.Disconnected) as caught:
                    send("plain", idempotent=True, deadline=LONG)
                first = caught.value
                with pytest.raises(bulkhead.Disconnected) as caught:
                    send("plain", idempotent=True, deadline=LONG)
                second = caught.value
    assert (first.executed, second.executed) == ("unknown", "no")


@pytest.mark.parametrize("way", ["submit", "asyncio"])
def test_job_cancelled_while_disconnected_is_not_sent(fake: FakeSupervisor, way: str) -> None:
    is_disconnected, go_on = threading.Event(), threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.job()
        peer.job()
        peer.close()
        peer = fake.accept()
        is_disconnected.set()
        assert go_on.wait(LONG)
        peer.welcome()
        number, payload = peer.job()
        assert payload == b"stays"
        peer.end(number, OK)

    async def of_asyncio(path: str) -> None:
        async with AsyncClient(path) as client:
            cancelled = client.submit("plain", b"cancelled", idempotent=True)
            stays = client.submit("plain", b"stays", idempotent=True)
            await asyncio.get_running_loop().run_in_executor(None, is_disconnected.wait, LONG)
            cancelled.cancel()
            go_on.set()
            await asyncio.wait_for(stays, LONG)

    with fake.running(script) as path:
        if way == "asyncio":
            asyncio.run(of_asyncio(path))
            return
        with Client(path) as client:
            cancelled = client.submit("plain", b"cancelled", idempotent=True)
            stays = client.submit("plain", b"stays", idempotent=True)
            assert is_disconnected.wait(LONG)
            assert cancelled.cancel()
            go_on.set()
            stays.result(LONG)


def test_closed_client_fails_jobs_that_wait_for_a_connection(fake: FakeSupervisor) -> None:
    is_gone = threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.job()
        fake.close()
        peer.close()
        is_gone.set()

    with fake.running(script) as path:
        client = Client(path)
        future = client.submit("plain", idempotent=True, deadline=LONG)
        assert is_gone.wait(LONG)
        wait_for("the client has lost its connection", lambda: client._connection.lost is not None)  # type: ignore[union-attr]
        client.close()
        error = future.exception(LONG)
    assert isinstance(error, bulkhead.Disconnected)
    assert error.executed == "unknown"


# Connections that break while a client sends.

#: A payload that is larger than the buffers of a socket.
LARGE = bytes(4 << 20)


@pytest.mark.parametrize("way", ["call", "submit"])
def test_failed_send_keeps_outcomes_that_have_arrived(fake: FakeSupervisor, way: str) -> None:
    has_closed, is_broken = threading.Event(), threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)
        peer.end(peer.job()[0], OK)
        peer.close()
        has_closed.set()
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)

    with fake.running(script) as path, Client(path) as client:
        client.call("plain")
        connection = client._connection
        assert connection is not None
        read = connection._read

        def read_after_failed_send() -> None:
            assert is_broken.wait(LONG)
            read()

        connection._read = read_after_failed_send  # type: ignore[method-assign]
        results: list[bytes] = []
        if way == "submit":
            first = client.submit("plain")
        else:
            thread = threading.Thread(target=lambda: results.append(bytes(client.call("plain").payload)))
            thread.start()
        assert has_closed.wait(LONG)
        second = client.submit("plain")
        is_broken.set()
        if way == "submit":
            results.append(bytes(first.result(LONG).payload))
        else:
            thread.join(LONG)
        assert results == [b""]
        assert bytes(second.result(LONG).payload) == b""


def test_failed_send_in_a_callback_keeps_outcomes_that_have_arrived(fake: FakeSupervisor) -> None:
    has_closed = threading.Event()
    chained: list[Any] = []

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        fixed = _wire._OUTCOME.pack(OK, 0, 0, 1, 0, 0, 0, 0, 1_000_000, 0, 0, 0, 0, 0)
        outcomes = [_wire.frame(_wire.OUTCOME, peer.job()[0], fixed + bytes(24) + _wire.EMPTY) for _ in range(2)]
        # The client receives both outcomes with one read.
        peer.link.sendall(b"".join(outcomes))
        peer.close()
        has_closed.set()
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)

    with fake.running(script) as path, Client(path) as client:

        def submit_next(_: object) -> None:
            assert has_closed.wait(LONG)
            chained.append(client.submit("plain"))

        first = client.submit("plain")
        first.add_done_callback(submit_next)
        second = client.submit("plain")
        assert bytes(first.result(LONG).payload) == bytes(second.result(LONG).payload) == b""
        wait_for("the callback has submitted a job", lambda: chained)
        assert bytes(chained[0].result(LONG).payload) == b""


def end_all_jobs(peer: Peer) -> list[bytes]:
    """Ends jobs until the client closes the connection. Returns their payloads."""
    payloads = []
    with contextlib.suppress(ConnectionError, EOFError):
        while True:
            number, payload = peer.job()
            payloads.append(payload)
            peer.end(number, OK)
    return payloads


@pytest.mark.parametrize("way", ["call", "submit"])
def test_failed_nested_send_does_not_repeat_the_outer_job(fake: FakeSupervisor, way: str) -> None:
    nested: list[Any] = []
    repeated: list[bytes] = []

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)
        assert peer.job()[1] == b"outer"
        peer.close()
        repeated.extend(end_all_jobs(fake.welcome()))

    with fake.running(script) as path, Client(path) as client:
        client.call("plain")
        connection = client._connection
        assert connection is not None
        send = connection._send

        def send_and_submit(*given: Any) -> int:
            sent = send(*given)
            if not nested:
                # Like a signal handler that runs just after the outer job was sent.
                nested.append(client.submit("plain", LARGE, idempotent=True))
            return sent

        connection._send = send_and_submit  # type: ignore[assignment]
        run: Any = client.call if way == "call" else lambda *job: client.submit(*job).result(LONG)
        with pytest.raises(bulkhead.Disconnected) as caught:
            run("plain", b"outer")
        nested[0].result(LONG)
    assert (caught.value.executed, repeated) == ("unknown", [LARGE])


def test_job_sent_by_another_thread_is_not_repeated(fake: FakeSupervisor) -> None:
    repeated: list[bytes] = []

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)
        assert [peer.job()[1], peer.job()[1]] == [b"failed", b"other"]
        peer.close()
        repeated.extend(end_all_jobs(fake.welcome()))

    with fake.running(script) as path, Client(path) as client:
        client.call("plain")
        connection = client._connection
        assert connection is not None
        send, link = connection._send, connection._socket
        shutdown = link.shutdown
        results: list[Any] = []

        def submit_other() -> None:
            results.append(client.submit("plain", b"other", idempotent=True).result(LONG))

        other = threading.Thread(target=submit_other)

        def fail_once(*_: Any) -> int:
            connection._send = send
            other.start()
            wait_for("the other thread waits to send", lambda: connection._futures)
            raise OSError(errno.ENOBUFS, "no memory")

        def shut_down_later(how: int) -> None:
            wait_for("the other thread has sent both jobs", lambda: not connection._outgoing)
            shutdown(how)

        connection._send = fail_once  # type: ignore[assignment]
        link.shutdown = shut_down_later  # type: ignore[method-assign]
        with pytest.raises(bulkhead.Disconnected) as caught:
            client.call("plain", b"failed")
        other.join(LONG)
    assert len(results) == 1
    assert (caught.value.executed, repeated) == ("unknown", [b"other"])


@pytest.mark.parametrize("last", ["submit", "cancel"])
def test_asyncio_keeps_outcomes_that_arrived_before_a_failed_send(fake: FakeSupervisor, last: str) -> None:
    is_busy, has_closed = threading.Event(), threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        first = peer.job()[0]
        peer.job()
        assert is_busy.wait(LONG)
        peer.end(first, OK)
        peer.close()
        has_closed.set()
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)

    async def run(path: str) -> None:
        async with AsyncClient(path) as client:
            first, second = client.submit("plain"), client.submit("plain")
            state = client._states[asyncio.get_running_loop()]
            while state.connection is None or state.connection._outgoing:
                await asyncio.sleep(0.001)
            # The event loop is busy until the connection has closed.
            is_busy.set()
            assert has_closed.wait(LONG)
            third = client.submit("plain")
            if last == "cancel":
                second.cancel()
            assert bytes((await first).payload) == b""
            assert bytes((await third).payload) == b""

    with fake.running(script) as path:
        asyncio.run(run(path))


@WAYS
def test_rejection_of_an_incompletely_sent_job_is_raised(fake: FakeSupervisor, way: str) -> None:
    """A supervisor without memory rejects a job before it has received the payload."""

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        assert peer.link.recv(1)
        peer.end(1, REJECTED, OVERLOADED, 0.5)
        peer.close()

    with fake.running(script) as path, pytest.raises(bulkhead.Rejected) as caught:
        call_of(way, path, payload=LARGE, deadline=LONG)
    assert (caught.value.outcome.reason, caught.value.retry_after) == ("overloaded", 0.5)


@WAYS
def test_attempts_to_send_a_job_are_limited(fake: FakeSupervisor, way: str) -> None:
    attempts = 0

    def script(fake: FakeSupervisor) -> None:
        nonlocal attempts
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                peer = fake.welcome()
                peer.link.recv(1)
                peer.close()
                attempts += 1

    with fake.running(script) as path:
        with pytest.raises(bulkhead.Disconnected) as caught:
            call_of(way, path, payload=LARGE, reconnect_timeout=3.0)
        # Ends the script, because this client sends nothing.
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(path)
    assert caught.value.executed == "no"
    assert "the connection to the supervisor was lost" in str(caught.value)
    # The pauses of 10 ms, 20 ms, ..., 1 s leave time for at most ten attempts.
    assert 2 <= attempts <= 10


def test_paused_future_does_not_delay_another_future(fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    has_paused = threading.Event()
    postpone = _again.Job.postpone

    def pause_large_job(job: _again.Job) -> None:
        postpone(job)
        if len(job.payload) == len(LARGE):
            job._not_before = time.monotonic() + LONG
            has_paused.set()

    monkeypatch.setattr(_again.Job, "postpone", pause_large_job)

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        assert peer.link.recv(1)
        peer.close()
        peer = fake.welcome()
        peer.job()
        peer.close()
        peer = fake.welcome()
        number, payload = peer.job()
        assert payload == b"small"
        peer.end(number, OK)
        peer.wait_for_end()

    with fake.running(script) as path, Client(path) as client:
        large = client.submit("plain", LARGE, deadline=10 * LONG)
        assert has_paused.wait(LONG)
        small = client.submit("plain", b"small", idempotent=True, deadline=LONG / 2)
        assert bytes(small.result(LONG).payload) == b""
        assert not large.done()


def test_resending_futures_takes_linear_time(fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Client] = []
    wait_seconds = Client._wait_seconds

    def search(client: Client) -> float | None:
        searches.append(client)
        return wait_seconds(client)

    # This method visits all waiting jobs.
    monkeypatch.setattr(Client, "_wait_seconds", search)

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        for _ in range(100):
            peer.job()
        peer.close()
        peer = fake.welcome()
        for _ in range(100):
            peer.end(peer.job()[0], OK)
        peer.wait_for_end()

    with fake.running(script) as path:
        with Client(path) as client:
            futures = [client.submit("plain", idempotent=True) for _ in range(100)]
            for future in futures:
                future.result(LONG)
        assert len(searches) == 1


# Waiting for a connection with asyncio.


def test_asyncio_error_does_not_name_an_earlier_cause(fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "HANDSHAKE_SECONDS_MIN", 0.01)
    ended = threading.Event()

    async def run(path: str) -> None:
        async with AsyncClient(path) as client:
            os.rename(path, f"{path}.away")
            with pytest.raises(bulkhead.Disconnected, match="No such file"):
                await client.call("plain", deadline=LONG)
            os.rename(f"{path}.away", path)
            # The job has no deadline, so that the attempt to connect continues after the other job's deadline.
            patient = client.submit("plain")
            with pytest.raises(bulkhead.Disconnected, match="is not responding; the job was not sent"):
                await client.call("plain", deadline=0.05)
            patient.cancel()

    with fake.running(lambda _: ended.wait(LONG)) as path:
        try:
            asyncio.run(run(path))
        finally:
            ended.set()


def test_asyncio_connects_while_the_executor_is_busy(fake: FakeSupervisor) -> None:
    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)

    async def run(path: str) -> None:
        loop, is_over = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, is_over.wait, 2 * LONG)
        try:
            async with AsyncClient(path) as client:
                await asyncio.wait_for(client.call("plain"), LONG)
        finally:
            is_over.set()
            await busy

    with fake.running(script) as path:
        asyncio.run(run(path))


def test_job_that_waits_for_the_first_connection_ends_at_its_deadline(
    fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_connection, "HANDSHAKE_SECONDS_MIN", 0.01)
    go_on = threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.accept()
        assert go_on.wait(LONG)
        peer.welcome()
        number, payload = peer.job()
        assert payload == b"patient"
        peer.end(number, OK)

    async def run(path: str) -> None:
        async with AsyncClient(path) as client:
            patient = client.submit("plain", b"patient")
            await asyncio.sleep(0)
            with pytest.raises(bulkhead.Disconnected, match="not responding; the job was not sent"):
                await asyncio.wait_for(client.call("plain", deadline=0.05), LONG)
            assert not patient.done()
            go_on.set()
            await patient

    with fake.running(script) as path:
        asyncio.run(run(path))


def shorten_outcome_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_connection, "OUTCOME_MARGIN_SECONDS", 0.2)
    monkeypatch.setattr(_connection, "OUTCOME_CHECK_SECONDS", 0.1)


def call_with(client: Client, way: str, name: str, deadline: float, payload: bytes = b"") -> bulkhead.Reply:
    """Runs an idempotent job."""
    if way == "call":
        return client.call(name, payload, idempotent=True, deadline=deadline)
    return client.submit(name, payload, idempotent=True, deadline=deadline).result(LONG)


def assert_unanswered(error: JobError) -> None:
    assert isinstance(error, bulkhead.Disconnected)
    assert (error.executed, error.retryable) == ("unknown", False)
    assert "the supervisor does not respond" in str(error)


@WAYS
def test_late_outcome_of_an_unanswered_job_is_ignored(
    fake: FakeSupervisor, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_outcome_margin(monkeypatch)

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        number, _ = peer.job()
        assert peer.cancellation() == number
        peer.end(number, OK)
        peer.end(peer.job()[0], OK)

    async def of_asyncio(path: str) -> None:
        async with AsyncClient(path, retry=True) as client:
            with pytest.raises(JobError) as caught:
                await client.call("plain", idempotent=True, deadline=0.01)
            assert_unanswered(caught.value)
            assert (await client.call("plain")).payload == b""

    with fake.running(script) as path:
        if way == "asyncio":
            asyncio.run(of_asyncio(path))
            return
        with Client(path, retry=True) as client:
            with pytest.raises(JobError) as caught:
                call_with(client, way, "plain", deadline=0.01)
            assert_unanswered(caught.value)
            assert client.call("plain").payload == b""


@WAYS
def test_deadline_ends_only_its_job_if_the_supervisor_is_stopped(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_outcome_margin(monkeypatch)
    file = tmp_path / "end"
    name = bytes(file)
    free = {**WORKER, "processes": 2, "sandbox": {"profile": "none"}}

    async def of_asyncio(supervisor: Supervisor) -> None:
        async with AsyncClient(supervisor.socket) as client:
            unlimited = client.submit("free", name, operation="wait")
            await client.call("free")
            with supervisor.stopped(), pytest.raises(JobError) as caught:
                await client.call("free", idempotent=True, deadline=0.1)
            assert_unanswered(caught.value)
            assert not unlimited.done()
            file.touch()
            assert (await unlimited).payload == b"waited"

    with running(free=free) as supervisor:
        if way == "asyncio":
            asyncio.run(of_asyncio(supervisor))
            return
        with Client(supervisor.socket) as client, concurrent.futures.ThreadPoolExecutor() as threads:
            client.call("free")
            # Of two calls, the first one reads the connection for both.
            if way == "call":
                unlimited = threads.submit(client.call, "free", name, operation="wait")
            else:
                unlimited = client.submit("free", name, operation="wait")
            wait_for("the job without a deadline runs", lambda: supervisor.snapshot("free")["in_flight"] == 1)
            try:
                with supervisor.stopped(), pytest.raises(JobError) as caught:
                    call_with(client, way, "free", deadline=0.1)
                assert_unanswered(caught.value)
                assert not unlimited.done()
            finally:
                file.touch()
            assert unlimited.result(LONG).payload == b"waited"


@WAYS
def test_deadline_ends_jobs_that_cannot_be_sent(
    fake: FakeSupervisor, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job fills the socket, because the supervisor does not read. The second job waits behind the first."""
    shorten_outcome_margin(monkeypatch)
    has_ended = threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)
        assert has_ended.wait(LONG)
        # The connection is broken, so the jobs are not sent later.
        assert not any(kind == _wire.SUBMIT for kind in kinds_until_end(peer))

    def run(client: Client, payload: bytes) -> JobError:
        with pytest.raises(JobError) as caught:
            call_with(client, way, "plain", 0.1, payload)
        return caught.value

    async def of_asyncio(path: str) -> list[Any]:
        async with AsyncClient(path) as client:
            await client.call("plain")
            jobs = [client.submit("plain", payload, deadline=0.1) for payload in (LARGE, b"small")]
            return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), LONG)

    if way == "asyncio":
        with fake.running(script) as path:
            errors = asyncio.run(of_asyncio(path))
            has_ended.set()
        assert [error.executed for error in errors] == ["no", "no"]
        return
    with fake.running(script) as path, Client(path) as client, concurrent.futures.ThreadPoolExecutor() as threads:
        client.call("plain")
        connection = client._connection
        assert connection is not None
        first = threads.submit(run, client, LARGE)
        wait_for("the socket is full", lambda: connection._outgoing)
        second = threads.submit(run, client, b"small")
        errors = [first.result(LONG), second.result(LONG)]
        has_ended.set()
    assert [error.executed for error in errors] == ["no", "no"]


def test_deadline_ends_a_job_that_a_callback_cannot_send(fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_outcome_margin(monkeypatch)
    is_prepared, has_ended = threading.Event(), threading.Event()
    submitted: list[concurrent.futures.Future[bulkhead.Reply]] = []

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        number = peer.job()[0]
        assert is_prepared.wait(LONG)
        peer.end(number, OK)
        assert has_ended.wait(LONG)
        assert not any(kind == _wire.SUBMIT for kind in kinds_until_end(peer))

    with fake.running(script) as path, Client(path) as client:
        first = client.submit("plain")
        # The thread that reads the connection calls this.
        first.add_done_callback(lambda _: submitted.append(client.submit("plain", LARGE, deadline=0.1)))
        is_prepared.set()
        wait_for("the callback has returned", lambda: submitted)
        error = submitted[0].exception(LONG)
        has_ended.set()
    assert isinstance(error, bulkhead.Disconnected)
    assert error.executed == "no"


def test_deadline_ends_a_call_behind_a_job_without_a_deadline(
    fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_outcome_margin(monkeypatch)
    has_ended = threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        assert peer.job()[1] == b"patient"
        assert has_ended.wait(LONG)
        assert not any(kind == _wire.SUBMIT for kind in kinds_until_end(peer))
        peer.close()
        peer = fake.welcome()
        assert end_all_jobs(peer) == [LARGE]

    with fake.running(script) as path, Client(path) as client, concurrent.futures.ThreadPoolExecutor() as threads:
        # The thread for futures reads the connection.
        patient = client.submit("plain", b"patient")
        connection = client._connection
        assert connection is not None
        large = threads.submit(client.call, "plain", LARGE)
        wait_for("the socket is full", lambda: connection._outgoing)
        with pytest.raises(bulkhead.Disconnected) as caught:
            client.call("plain", b"small", deadline=0.1)
        assert caught.value.executed == "no"
        has_ended.set()
        large.result(LONG)
        assert isinstance(patient.exception(LONG), bulkhead.Disconnected)


@pytest.mark.parametrize("who", ["callback", "thread"])
def test_sent_job_ends_while_a_callback_waits_to_send(
    fake: FakeSupervisor, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without a deadline fills the socket. It is sent by the callback, or by a thread before the callback."""
    shorten_outcome_margin(monkeypatch)
    is_prepared, has_ended = threading.Event(), threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        number, _ = peer.job()
        assert peer.job()[1] == b"sent"
        assert is_prepared.wait(LONG)
        peer.end(number, OK)
        assert has_ended.wait(LONG)
        peer.close()
        peer = fake.welcome()
        assert sorted(end_all_jobs(peer)) == sorted(payloads)

    payloads = [LARGE] if who == "callback" else [LARGE, b"x"]
    futures: list[concurrent.futures.Future[bulkhead.Reply]] = []
    with fake.running(script) as path, Client(path) as client, concurrent.futures.ThreadPoolExecutor() as threads:
        first, sent = client.submit("plain"), client.submit("plain", b"sent", deadline=0.5)
        connection = client._connection
        assert connection is not None
        first.add_done_callback(lambda _: futures.append(client.submit("plain", payloads[-1])))
        if who == "thread":
            futures.append(threads.submit(client.call, "plain", LARGE))
            wait_for("the socket is full", lambda: connection._outgoing)
        is_prepared.set()
        error = sent.exception(LONG)
        has_ended.set()
        wait_for("all jobs are submitted", lambda: len(futures) == len(payloads))
        for future in futures:
            future.result(LONG)
    assert isinstance(error, JobError)
    assert_unanswered(error)


def test_job_that_cannot_be_sent_does_not_delay_waiting_jobs(
    fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_outcome_margin(monkeypatch)
    has_ended = threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        assert [peer.job()[1], peer.job()[1]] == [LARGE, b"small"]
        peer.close()
        peer = fake.welcome()
        assert has_ended.wait(LONG)
        fake.close()

    with fake.running(script) as path, Client(path) as client:
        client.submit("plain", LARGE, idempotent=True)
        small = client.submit("plain", b"small", idempotent=True, deadline=0.5)
        assert isinstance(small.exception(LONG), bulkhead.Disconnected)
        has_ended.set()


def test_asyncio_jobs_end_only_after_all_received_outcomes(
    fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcomes of jobs that are long past their deadlines are in the socket and in the supervisor."""
    monkeypatch.setattr(_connection, "OUTCOME_MARGIN_SECONDS", 0.2)
    # A later check would postpone the end of the jobs.
    monkeypatch.setattr(_connection, "OUTCOME_CHECK_SECONDS", LONG)
    monkeypatch.setattr(_aio, "REFILL_MS", LONG * 1000)
    is_full = threading.Event()

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        numbers = [peer.job()[0] for _ in range(1000)]
        for number in numbers:
            if not select.select([], [peer.link], [], 0)[1]:
                is_full.set()
            peer.end(number, OK)
        assert is_full.is_set()
        peer.wait_for_end()

    async def run(path: str) -> None:
        async with AsyncClient(path) as client:
            jobs = [client.submit("plain", deadline=0.5) for _ in range(1000)]
            due_at = time.monotonic() + 0.7
            state = client._states[asyncio.get_running_loop()]
            while state.connection is None or not state.connection._jobs or state.connection._outgoing:
                await asyncio.sleep(0.001)
            # The event loop is busy.
            assert is_full.wait(LONG)
            while time.monotonic() < due_at:
                time.sleep(0.01)
            for job in jobs:
                assert (await job).payload == b""

    with fake.running(script) as path:
        asyncio.run(run(path))


@pytest.mark.parametrize("state", ["unsent", "taken"])
def test_cancelled_asyncio_job_keeps_no_connection_open(
    fake: FakeSupervisor, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor does not read the job, or is being replaced and sends no outcome."""
    shorten_outcome_margin(monkeypatch)

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.end(peer.job()[0], OK)
        if state == "taken":
            number, _ = peer.job()
            peer.go_away(number, [number])
        else:
            assert peer.link.recv(1, socket.MSG_PEEK)
        other = fake.welcome()
        other.end(other.job()[0], OK)
        peer.wait_for_end()

    async def run(path: str) -> None:
        async with AsyncClient(path) as client:
            await client.call("plain")
            connection = client._states[asyncio.get_running_loop()].connection
            assert connection is not None
            job = client.submit("plain", LARGE if state == "unsent" else b"taken")
            while state == "taken" and not connection.is_over:
                await asyncio.sleep(0.001)
            job.cancel()
            assert (await asyncio.wait_for(client.call("plain"), LONG)).payload == b""
            while not connection.is_lost:
                await asyncio.sleep(0.001)

    with fake.running(script) as path:
        asyncio.run(run(path))


@WAYS
def test_traffic_of_other_jobs_does_not_prolong_an_unanswered_job(
    fake: FakeSupervisor, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_outcome_margin(monkeypatch)

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        patient, number = peer.job()[0], peer.job()[0]
        report = _wire.frame(_wire.PROGRESS, patient, _wire.progressed(0.5, "at work"))
        while not select.select([peer.link], [], [], 0)[0]:
            peer.link.sendall(report)
            # The asyncio client handles even an endless stream.
            if way != "asyncio":
                time.sleep(0.02)
        assert peer.cancellation() == number
        peer.end(patient, OK)

    async def of_asyncio(path: str) -> None:
        async with AsyncClient(path) as client:
            patient = client.submit("plain")
            with pytest.raises(JobError) as caught:
                await client.call("plain", deadline=0.1)
            assert_unanswered(caught.value)
            assert (await patient).payload == b""

    if way == "asyncio":
        with fake.running(script) as path:
            asyncio.run(of_asyncio(path))
        return

    with fake.running(script) as path, Client(path) as client:
        patient = client.submit("plain")
        with pytest.raises(JobError) as caught:
            call_with(client, way, "plain", 0.1)
        assert_unanswered(caught.value)
        assert patient.result(LONG).payload == b""


def test_periodic_signals_do_not_prolong_an_unanswered_job(
    fake: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_outcome_margin(monkeypatch)

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        number = peer.job()[0]
        assert peer.cancellation() == number

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    with fake.running(script) as path, Client(path) as client:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            with pytest.raises(JobError) as caught:
                client.call("plain", deadline=0.1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert_unanswered(caught.value)


def kinds_until_end(peer: Peer) -> list[int]:
    """Reads until the client shuts down the connection. Returns the kinds of the complete frames."""
    kinds = []
    with contextlib.suppress(ConnectionError, EOFError):
        while True:
            kinds.append(peer._next()[0])
    return kinds


def end_one_job(fake: FakeSupervisor) -> None:
    """Ends a job. Then closes the connection and the socket."""
    peer = fake.welcome()
    number = peer.job()[0]
    fake.close()
    peer.end(number, OK)
    peer.close()


def test_cancelled_asyncio_jobs_wait_for_no_connection(fake: FakeSupervisor) -> None:
    async def run(path: str) -> None:
        async with AsyncClient(path) as client:
            await client.call("plain")
            state = client._states[asyncio.get_running_loop()]
            while state.connection is None or not state.connection.is_lost:
                await asyncio.sleep(0.001)
            job = client.submit("plain", deadline=10 * LONG)
            await asyncio.sleep(0)
            assert state.connecting is not None
            job.cancel()
            reference = weakref.ref(job)
            del job
            gc.collect()
            assert reference() is None
            await asyncio.wait_for(state.connecting, LONG)

    with fake.running(end_one_job) as path:
        asyncio.run(run(path))


@pytest.mark.parametrize("then", ["close", "another loop"])
def test_job_that_waits_in_a_closed_loop_does_not_affect_the_client(fake: FakeSupervisor, then: str) -> None:
    async def leave_job(client: AsyncClient) -> None:
        await client.call("plain")
        state = client._states[asyncio.get_running_loop()]
        while state.connection is None or not state.connection.is_lost:
            await asyncio.sleep(0.001)
        jobs.append(client.submit("plain", deadline=LONG))
        jobs[0].add_done_callback(jobs.append)

    async def call(client: AsyncClient) -> None:
        with pytest.raises(bulkhead.Disconnected):
            await client.call("plain")

    jobs: list[Any] = []
    with fake.running(end_one_job) as path:
        client = AsyncClient(path)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave_job(client))
        loop.close()
        if then == "another loop":
            asyncio.run(call(client))
        client.close()
    assert len(jobs) == 1


# Forks.


@pytest.mark.parametrize("state", ["reads", "sleeps", "sends", "connects", "connects to submit", "has connected"])
def test_call_that_continues_in_a_forked_child_fails(fake: FakeSupervisor, state: str, tmp_path: Path) -> None:
    has_forked = tmp_path / "forked"
    payload = LARGE if state == "sends" else b"main"

    def script_of_supervisor(fake: FakeSupervisor) -> None:
        peer = fake.accept()
        if not state.startswith("connects"):
            peer.welcome()
        if state.startswith("connects") or state == "has connected":
            jobs = []
        elif state == "sleeps":
            jobs = [peer.job(), peer.job()]
        elif state == "sends":
            # The client cannot send the whole payload yet.
            assert peer.link.recv(1, socket.MSG_PEEK)
            jobs = []
        else:
            jobs = [peer.job()]
        if state != "has connected":
            os.kill(peer.pid(), signal.SIGUSR1)
        wait_for("the child has ended", has_forked.exists)
        if state.startswith("connects"):
            peer.welcome()
        if not jobs:
            jobs = [peer.job()]
        for number, _ in jobs:
            peer.end(number, OK)
        peer.wait_for_end()

    with fake.running(script_of_supervisor) as path:
        ended = script(f"""
import os, signal, threading, time, bulkhead
signal.alarm(60)
parent = os.getpid()
def fork(*_):
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        open({str(has_forked)!r}, "w").close()
    else:
        # Ends a child that waits forever.
        signal.alarm(30)
signal.signal(signal.SIGUSR1, fork)
client = bulkhead.Client({path!r})
thread = threading.Thread(target=client.call, args=("plain", b"other"))
if {state == "sleeps"}:
    thread.start()
    while client._connection is None or client._connection._leader is None:
        time.sleep(0.001)
if {state == "has connected"}:
    start = bulkhead._connection.Connection.start
    def fork_and_start(*given):
        bulkhead._connection.Connection.start = start
        signal.raise_signal(signal.SIGUSR1)
        start(*given)
    bulkhead._connection.Connection.start = fork_and_start
try:
    if {state in ("connects to submit", "has connected")}:
        client.submit("plain", idempotent=True).result()
    else:
        client.call("plain", bytes({len(payload)}), idempotent=True)
    result = 0
except bulkhead.Disconnected as error:
    result = 7 if "belongs to the parent process" in str(error) else 8
if os.getpid() != parent:
    os._exit(result)
print(result, flush=True)
if thread.ident is not None:
    thread.join()
client.close()
""")
    assert ended.stdout == "7\n0\n", (ended.stdout, ended.stderr)


def test_forked_child_closes_a_connecting_socket(fake: FakeSupervisor, tmp_path: Path) -> None:
    has_forked, has_ended = tmp_path / "forked", tmp_path / "ended"

    def script_of_supervisor(fake: FakeSupervisor) -> None:
        peer = fake.accept()
        os.kill(peer.pid(), signal.SIGUSR1)
        wait_for("the client has forked", has_forked.exists)
        peer.welcome()
        peer.end(peer.job()[0], OK)
        peer.wait_for_end()
        has_ended.touch()

    with fake.running(script_of_supervisor) as path:
        ended = script(f"""
import asyncio, os, signal, time, bulkhead
signal.alarm(60)
children = []
def fork(*_):
    child = os.fork()
    if not child:
        # Ends a child that waits forever.
        signal.alarm(30)
        while not os.path.exists({str(has_ended)!r}):
            time.sleep(0.005)
        os._exit(7)
    children.append(child)
    open({str(has_forked)!r}, "w").close()
signal.signal(signal.SIGUSR1, fork)
async def main():
    async with bulkhead.AsyncClient({path!r}) as client:
        await client.call("plain")
asyncio.run(main())
print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
""")
    assert ended.stdout == "7\n", (ended.stdout, ended.stderr)


def test_forked_child_sends_no_waiting_job(fake: FakeSupervisor, tmp_path: Path) -> None:
    has_forked, listens = tmp_path / "forked", tmp_path / "listens"

    def script_of_supervisor(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        peer.job()
        fake.close()
        peer.close()
        wait_for("the client has forked", has_forked.exists)
        new = FakeSupervisor(fake.path)
        listens.touch()
        peer = new.welcome()
        peer.end(peer.job()[0], OK)
        peer.wait_for_end()

    with fake.running(script_of_supervisor) as path:
        ended = script(f"""
import asyncio, os, signal, time, bulkhead
from bulkhead import _again
signal.alarm(60)
# The child is forked during the first pause.
_again.RECONNECT_PAUSE_MIN = 0.5
_again.RECONNECT_SECONDS_MAX = 60.0
async def main():
    loop = asyncio.get_running_loop()
    never = loop.create_future()
    async with bulkhead.AsyncClient({path!r}) as client:
        job = client.submit("plain", idempotent=True)
        state = client._states[loop]
        while "not reachable" not in str(state._problem):
            await asyncio.sleep(0)
        child = os.fork()
        if not child:
            # Ends a child that waits forever.
            signal.alarm(30)
            while not os.path.exists({str(listens)!r}):
                time.sleep(0.005)
            def end():
                if state.connecting is not None:
                    loop.call_later(0.005, end)
                else:
                    os._exit(7 if state.connection.is_lost else 8)
            end()
            await never
        open({str(has_forked)!r}, "w").close()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        await job
        print(0)
asyncio.run(main())
""")
    assert ended.stdout == "7\n0\n", (ended.stdout, ended.stderr)


# GOAWAY.


def run_both(way: str, path: str, first: bytes, second: bytes, timeout: float | None = None) -> list[bytes]:
    """Runs two jobs on one client at once, and a third after the second. Returns the results in this order."""
    if way == "asyncio":

        async def run() -> list[bytes]:
            async with AsyncClient(path, reconnect_timeout=timeout) as client:

                async def later() -> list[bytes]:
                    return [bytes((await client.call("plain", second)).payload) for _ in range(2)]

                one, others = await asyncio.gather(client.call("plain", first), later())
                return [bytes(one.payload), *others]

        return asyncio.run(run())
    with Client(path, reconnect_timeout=timeout) as client:
        if way == "submit":
            one = client.submit("plain", first)
            others = [bytes(client.submit("plain", second).result(LONG).payload) for _ in range(2)]
            return [bytes(one.result(LONG).payload), *others]
        results: list[bytes] = []
        thread = threading.Thread(target=lambda: results.append(bytes(client.call("plain", first).payload)))
        thread.start()
        others = [bytes(client.call("plain", second).payload) for _ in range(2)]
        thread.join(LONG)
        return results + others


@WAYS
@pytest.mark.parametrize("timeout", [None, 0])
def test_jobs_not_accepted_by_old_supervisor_are_sent_to_new_one(
    fake: FakeSupervisor, way: str, timeout: float | None
) -> None:
    def script(fake: FakeSupervisor) -> None:
        old = fake.welcome()
        jobs = dict(reversed(old.job()) for _ in range(2))
        # Only the job "first" was accepted. The number in the header is for clients that count their jobs. Such a
        # client sent this job first or second.
        taken = [jobs[b"first"]]
        count = 1 if jobs[b"first"] == min(jobs.values()) else 2
        if count == 2:
            taken.append(jobs[b"second"])
        old.go_away(count, taken)
        if count == 2:
            old.end(jobs[b"second"], OK)
        new = fake.welcome()
        for _ in range(3 - count):
            number, payload = new.job()
            assert payload == b"second"
            new.end(number, OK)
        # The old connection stays open until its last job has ended.
        old.end(jobs[b"first"], OK)
        old.wait_for_end()
        new.wait_for_end()

    with fake.running(script) as path:
        assert run_both(way, path, b"first", b"second", timeout) == [b"", b"", b""]


@WAYS
def test_slow_supervisor_reports_the_outcome_of_a_job_with_a_short_deadline(
    fake: FakeSupervisor, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_connection, "HANDSHAKE_SECONDS_MIN", LONG)
    monkeypatch.setattr(_connection, "HANDSHAKE_SECONDS_MAX", LONG)

    def script(fake: FakeSupervisor) -> None:
        peer = fake.accept()
        # The welcome comes after the deadline.
        time.sleep(0.05)
        peer.welcome()
        peer.end(peer.job()[0], OK)

    with fake.running(script) as path:
        assert call_of(way, path, deadline=0.01) == b""


@WAYS
@pytest.mark.parametrize("timeout", [None, 0])
def test_job_not_accepted_by_old_supervisor_waits_for_the_new_one(
    fake: FakeSupervisor, way: str, timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []
    connect = _connection.open_connection

    def counted(path: str, seconds: float) -> Any:
        attempts.append(path)
        return connect(path, seconds)

    monkeypatch.setattr(_connection, "open_connection", counted)
    monkeypatch.setattr(_aio, "open_connection", counted)

    def script(fake: FakeSupervisor) -> None:
        old = fake.welcome()
        old.job()
        fake.close()
        old.go_away(0, [])
        wait_for("the client tries twice to reconnect", lambda: len(attempts) >= 3)
        new = FakeSupervisor(fake.path)
        peer = new.welcome()
        peer.end(peer.job()[0], OK)

    with fake.running(script) as path:
        if way == "asyncio":

            async def run() -> bytes:
                async with AsyncClient(path, reconnect_timeout=timeout) as client:
                    return bytes((await client.call("plain", b"x")).payload)

            assert asyncio.run(run()) == b""
            return
        with Client(path, reconnect_timeout=timeout) as client:
            if way == "call":
                assert bytes(client.call("plain", b"x").payload) == b""
            else:
                assert bytes(client.submit("plain", b"x").result(LONG).payload) == b""


@WAYS
def test_job_sent_while_old_supervisor_exits_uses_the_new_one(fake: FakeSupervisor, way: str) -> None:
    def script(fake: FakeSupervisor) -> None:
        old = fake.welcome()
        old.job()
        old.go_away(0, [])
        new = fake.welcome()
        new.end(new.job()[0], OK)
        old.wait_for_end()

    with fake.running(script) as path:
        assert call_of(way, path) == b""


@pytest.mark.parametrize("way", ["submit", "asyncio"])
def test_closing_a_client_cancels_jobs_at_the_old_supervisor(fake: FakeSupervisor, way: str) -> None:
    def script(fake: FakeSupervisor) -> None:
        old = fake.welcome()
        number, _ = old.job()
        old.go_away(1, [number])
        new = fake.welcome()
        new.end(new.job()[0], OK)
        old.wait_for_end()

    with fake.running(script) as path:
        if way == "submit":
            client = Client(path)
            kept = client.submit("plain", b"kept")
            wait_for("GOAWAY has arrived", lambda: client._connection is not None and client._connection.is_over)
            assert bytes(client.call("plain", b"later").payload) == b""
            client.close()
            assert isinstance(kept.exception(LONG), bulkhead.Disconnected)
            return

        async def run() -> None:
            client = AsyncClient(path)
            kept = client.submit("plain", b"kept")
            state = client._states[asyncio.get_running_loop()]
            while state.connection is None or not state.connection.is_over:
                await asyncio.sleep(0.001)
            assert bytes((await client.call("plain", b"later")).payload) == b""
            client.close()
            with pytest.raises(bulkhead.Disconnected):
                await kept

        asyncio.run(run())


# Retries.


def reject(count: int, retry_after: float | None, seen: list[int]) -> Callable[[FakeSupervisor], None]:
    """Returns a script that rejects the first ``count`` jobs and accepts the others. Records the jobs in ``seen``."""

    def script(fake: FakeSupervisor) -> None:
        peer = fake.welcome()
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                number, _ = peer.job()
                seen.append(number)
                if len(seen) <= count:
                    peer.end(number, REJECTED, QUEUE_FULL, retry_after)
                else:
                    peer.end(number, OK)

    return script


@pytest.mark.parametrize("way", ["call", "asyncio"])
def test_rejected_job_is_retried(fake: FakeSupervisor, way: str) -> None:
    seen: list[int] = []
    with fake.running(reject(3, 0.01, seen)) as path:
        assert call_of(way, path, retry=True, deadline=LONG) == b""
    assert len(seen) == 4


@pytest.mark.parametrize("way", ["call", "asyncio"])
@pytest.mark.parametrize(("count", "retry_after", "expected"), [(9, 0.0, 4), (9, LONG + 1, 1)])
def test_retries_are_limited(fake: FakeSupervisor, way: str, count: int, retry_after: float, expected: int) -> None:
    seen: list[int] = []
    with fake.running(reject(count, retry_after, seen)) as path, pytest.raises(bulkhead.Rejected):
        call_of(way, path, retry=True, deadline=LONG)
    assert len(seen) == expected


def test_client_can_retry_by_default(fake: FakeSupervisor) -> None:
    seen: list[int] = []
    with fake.running(reject(2, 0.0, seen)) as path, Client(path, retry=True) as client:
        with pytest.raises(bulkhead.Rejected):
            client.call("plain", retry=False)
        client.call("plain")
        # Jobs submitted as futures are not retried.
        client.submit("plain").result(LONG)
    assert len(seen) == 4


def test_retries_never_exceed_the_share_of_a_window() -> None:
    for seed in range(30):
        choose = random.Random(seed)
        budget, now = _again.RetryBudget(), 0.0
        events: list[tuple[int, bool]] = []
        share = choose.uniform(0.1, 0.9)
        for _ in range(2_000):
            # Mostly small steps, and sometimes a pause longer than the window.
            now += choose.uniform(0, 30 if choose.random() < 0.002 else 0.03)
            recent = [is_retry for at, is_retry in events if at > int(now) - 10]
            if choose.random() > share:
                budget.job(now)
                events.append((int(now), False))
                continue
            retries = sum(recent) + 1
            expected = retries <= 10 or retries <= (len(recent) - sum(recent)) / 5
            assert budget.try_retry(now) == expected, (seed, now)
            if expected:
                events.append((int(now), True))


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_retry_budget_works_in_signal_handlers_and_after_fork(kind: str) -> None:
    ended = script(f"""
import os, signal, threading, bulkhead
# Ends a program that waits forever.
signal.alarm(60)
client = bulkhead.{kind}("/none")
budget = client._budget
signal.signal(signal.SIGUSR1, lambda *_: budget.job(0.0))
with budget._lock:
    signal.raise_signal(signal.SIGUSR1)
held, ends = threading.Event(), threading.Event()
def hold():
    with budget._lock:
        held.set()
        ends.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    os._exit(0 if budget.try_retry(0.0) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")
    assert ended.stdout == "0\n", ended.stderr


def test_error_from_an_attempt_that_ran_is_reported() -> None:
    options: tuple[Any, ...] = ("plain", "", "", None, "normal", False, 1, None, None)
    failed = bulkhead.Failed(bulkhead.Outcome("failed", "busy", executed="yes", retryable=True))
    rejected = bulkhead.Rejected(bulkhead.Outcome("rejected", "not_found"))
    retries = _again.Retries(_again.RetryBudget(), options)
    assert retries.pause_after(failed) == _again.RETRY_PAUSE_MIN
    with pytest.raises(bulkhead.Failed):
        retries.pause_after(rejected)
