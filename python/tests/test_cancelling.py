"""Tests of cancelling calls that have not begun, and of ``running()``."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jobs
import pytest
from pools import LONG, read, wait_for

import bulkhead._pool
from bulkhead import BulkheadExecutor, _wire
from bulkhead._channel import Channel


class Supervisor:
    """A fake supervisor that begins only the first call, and finishes it on request."""

    def __init__(self, capabilities: int) -> None:
        self.capabilities = capabilities
        self._socket, theirs = socket.socketpair()
        self.channel = Channel(theirs, capabilities)
        #: Numbers of submitted calls, and of requested cancellations with their metadata.
        self.submitted: list[int] = []
        self.cancelled: list[tuple[int, bytes]] = []
        self.is_finished = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        reader = _wire.Reader(self._socket.recv, self._socket.recv_into)
        try:
            while True:
                reader.read()
                while reader.frames:
                    kind, number, metadata, _ = reader.frames.popleft()
                    if kind == _wire.SUBMIT:
                        self.submitted.append(number)
                        if self.is_finished:
                            self.answer(number)
                    elif kind == _wire.CANCEL:
                        self.cancelled.append((number, metadata))
                        if number != self.submitted[0]:
                            self._outcome(number, _wire.CANCELLED)
        except (EOFError, OSError):
            self._socket.close()

    def answer(self, number: int) -> None:
        self._outcome(number, 0, pickle.dumps("finished"))

    def finish_the_first(self) -> None:
        self.is_finished = True
        self.answer(self.submitted[0])

    def _outcome(self, number: int, outcome: int, payload: bytes = b"") -> None:
        fields = struct.pack("<5BIQQQIBQBi", outcome, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0)
        self._socket.sendall(_wire.frame(_wire.OUTCOME, number, fields + bytes(24) + _wire.EMPTY, payload))


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Supervisor]]:
    made: list[Supervisor] = []

    def connect(capabilities: int) -> Supervisor:
        made.append(Supervisor(capabilities))
        monkeypatch.setattr(bulkhead._pool, "connect", lambda *_: made[-1].channel)
        return made[-1]

    yield connect
    for supervisor in made:
        supervisor.channel.end()


BOTH = _wire.SUPERVISOR_RUN_LIMIT | _wire.SUPERVISOR_CANCEL_UNLESS_BEGUN


@pytest.mark.parametrize("waits", [True, False])
def test_shutdown_cancels_calls_that_have_not_begun(connected: Callable[[int], Supervisor], waits: bool) -> None:
    supervisor = connected(BOTH)
    pool = BulkheadExecutor(1)
    futures = [pool.submit(jobs.double, number) for number in range(40)]
    wait_for("the calls have arrived", lambda: len(supervisor.submitted) == 17)
    thread = threading.Thread(target=pool.shutdown, args=(waits,), kwargs={"cancel_futures": True})
    thread.start()
    wait(futures[1:], LONG)
    assert all(future.cancelled() for future in futures[1:])
    assert not futures[0].done()
    # All calls except the oldest, which is running, are cancelled with an empty structure and one critical extension.
    assert supervisor.cancelled == [(n, struct.pack("<QHQ", 1, 0x8007, 0)) for n in supervisor.submitted[1:]]
    supervisor.finish_the_first()
    assert futures[0].result(LONG) == "finished"
    thread.join(LONG)
    assert not thread.is_alive()


def test_older_supervisors_finish_all_submitted_calls(connected: Callable[[int], Supervisor]) -> None:
    supervisor = connected(_wire.SUPERVISOR_RUN_LIMIT)
    pool = BulkheadExecutor(1)
    futures = [pool.submit(jobs.double, number) for number in range(40)]
    wait_for("the calls have arrived", lambda: len(supervisor.submitted) == 17)
    pool.shutdown(wait=False, cancel_futures=True)
    assert [future.cancelled() for future in futures] == [False] * 17 + [True] * 23
    for number in supervisor.submitted:
        supervisor.answer(number)
    assert {future.result(LONG) for future in futures[:17]} == {"finished"}
    assert supervisor.cancelled == []


def test_cancelling_a_future_stops_a_running_call(connected: Callable[[int], Supervisor]) -> None:
    supervisor = connected(BOTH)
    pool = BulkheadExecutor(1)
    future = pool.submit(jobs.double, 1)
    wait_for("the call has arrived", lambda: supervisor.submitted)
    assert future.cancel()
    wait_for("the cancellation has arrived", lambda: supervisor.cancelled)
    assert supervisor.cancelled == [(supervisor.submitted[0], _wire.EMPTY)]


@pytest.mark.parametrize("calls_before", [1, 5])
def test_no_call_begins_after_shutdown_with_cancel_futures(calls_before: int, tmp_path: Path) -> None:
    with BulkheadExecutor(1) as pool:
        # After quick calls, more calls are sent to the supervisor at once.
        list(pool.map(abs, range(calls_before)))
        channel = pool._pool._channel
        assert channel is not None
        if not channel.capabilities & _wire.SUPERVISOR_CANCEL_UNLESS_BEGUN:
            pytest.skip("NOT RUN: this supervisor cannot restrict cancellation to jobs that have not begun")
        futures: list[Future[Any]] = [pool.submit(jobs.note_and_wait, str(tmp_path), n) for n in range(40)]
        wait_for("the first call runs", lambda: read(tmp_path / "0"))
        thread = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True})
        thread.start()
        wait_for("the others are cancelled", lambda: sum(future.cancelled() for future in futures) >= 38)
        begun = {path.name for path in tmp_path.iterdir()}
        (tmp_path / "go").touch()
        thread.join(LONG)
        assert {path.name for path in tmp_path.iterdir()} == begun | {"go"}
        assert [n for n, future in enumerate(futures) if not future.cancelled()] == sorted(map(int, begun))


def test_each_worker_runs_one_call(tmp_path: Path) -> None:
    with BulkheadExecutor(2) as pool:
        futures: list[Future[Any]] = [pool.submit(jobs.note_and_wait, str(tmp_path), n) for n in range(10)]
        wait_for("two calls are running", lambda: len(list(tmp_path.iterdir())) == 2)
        assert [future.running() for future in futures] == [True] * 2 + [False] * 8
        (tmp_path / "go").touch()
        wait(futures, LONG)
        assert not any(future.running() for future in futures)


def test_recalled_call_runs_once() -> None:
    """Cancelling a prefetched call recalls its neighbours, which are then sent again with their old numbers."""
    # If this process is slow, the cancelled call may be running. The worker then has time to finish the call.
    with BulkheadExecutor(1, config={"lookahead": "100ms", "grace": "1m"}) as pool:
        # Calls are quick, so many of them are prefetched.
        pids, cancelled = {pool.submit(jobs.pid).result(LONG) for _ in range(100)}, 0
        for _ in range(50):
            futures = [pool.submit(jobs.hold_the_lock_for, 0.02), *(pool.submit(jobs.pid) for _ in range(8))]
            # False if this process had to wait until all calls had ended.
            cancelled += futures[4].cancel()
            pids |= {future.result(LONG) for future in futures if not future.cancelled()}
        assert len(pids) == 1
        assert cancelled
