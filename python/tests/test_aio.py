"""Tests of the asyncio client with real supervisors: cancellation, load, event loops, fork, lost connections."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pools import LONG, wait_for
from running import WORKER, Supervisor, running, sandboxed

import bulkhead
from bulkhead import AsyncClient, _wire


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    free = {**WORKER, "sandbox": {"profile": "none"}}
    with running(plain=WORKER, two={**WORKER, "processes": 2}, free=free) as one:
        yield one


async def until(what: str, condition: Callable[[], object]) -> None:
    """Waits in a thread, so that the event loop keeps running."""
    await asyncio.get_running_loop().run_in_executor(None, wait_for, what, condition)


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(test(), 2 * LONG)

    return asyncio.run(limited())


@asynccontextmanager
async def connected(supervisor: Supervisor) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(supervisor.socket) as client:
        yield client


def test_payloads_are_returned(supervisor: Supervisor) -> None:
    async def test() -> None:
        async with connected(supervisor) as client:
            for size in (0, 1, 64, 65_536, 65_537, 5_000_000):
                payload = random.Random(size).randbytes(size)
                reply = await client.call("plain", payload, deadline=30)
                assert reply.payload == payload
                assert reply.outcome.deadline == 30.0
                assert (await client.submit("plain", bytearray(payload))).payload == payload

    run(test)


def test_concurrent_jobs_get_their_own_results(supervisor: Supervisor) -> None:
    async def test() -> None:
        async with connected(supervisor) as client:

            async def work(seed: int) -> None:
                chance = random.Random(seed)
                for _ in range(40):
                    payload = chance.randbytes(chance.choice([4, 100, 10_000, 200_000 if seed < 4 else 64]))
                    assert (await client.call("two", payload)).payload == payload

            await asyncio.gather(*map(work, range(64)))

    run(test)


def test_each_outcome_raises_its_exception(supervisor: Supervisor) -> None:
    async def test() -> None:
        async with connected(supervisor) as client:
            with pytest.raises(bulkhead.Failed, match="no such page"):
                await client.call("plain", operation="raise")
            with pytest.raises(bulkhead.Failed) as failed:
                await client.call("plain", b"details", operation="error")
            assert failed.value.payload == b"details"
            with pytest.raises(bulkhead.Crashed, match="SIGSEGV"):
                await client.call("plain", operation="segv")
            with pytest.raises(bulkhead.DeadlineExceeded):
                await client.call("plain", operation="spin", run_limit=0.1)
            with pytest.raises(TypeError):
                await client.call("plain", "text")  # type: ignore[arg-type]
            with pytest.raises(bulkhead.Rejected):
                await client.call("nowhere")

    run(test)


def test_cancelling_a_task_cancels_its_job(tmp_path: Path) -> None:
    async def test() -> None:
        with running(plain=sandboxed("none")) as supervisor:
            await cancel_tasks(supervisor)

    async def cancel_tasks(supervisor: Supervisor) -> None:
        async with connected(supervisor) as client:
            before = (await client.call("plain")).outcome.worker_pid
            begun = tmp_path / "begun"
            task = asyncio.ensure_future(client.call("plain", bytes(begun), operation="spin"))
            await until("the job has begun", begun.exists)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.call("plain")).outcome.worker_pid != before
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.call("plain", operation="spin"), 0.1)
            await until("the job has ended", lambda: supervisor.snapshot("plain")["in_flight"] == 0)
            if sys.version_info >= (3, 11):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await client.call("plain", operation="spin")
                await until("the job has ended", lambda: supervisor.snapshot("plain")["in_flight"] == 0)
            job = client.submit("plain", operation="spin")
            await until("the job is running", lambda: supervisor.snapshot("plain")["in_flight"] == 1)
            assert job.cancel()
            assert not job.cancel()
            await until("the job has ended", lambda: supervisor.snapshot("plain")["in_flight"] == 0)
            assert (await client.call("plain", b"goes on")).payload == b"goes on"

    run(test)


def test_job_cancelled_before_sending_is_not_sent(supervisor: Supervisor) -> None:
    async def test() -> None:
        async with connected(supervisor) as client:
            job = client.submit("plain", operation="spin")
            assert job.cancel()
            assert (await client.call("plain", b"free")).payload == b"free"

    run(test)


def test_listener_receives_progress_reports(supervisor: Supervisor) -> None:
    async def test() -> None:
        async with connected(supervisor) as client:
            heard: list[tuple[float, str]] = []
            job = client.submit("plain", operation="progress")
            job.on_progress(lambda fraction, words: heard.append((round(fraction, 3), words)))
            assert (await job).payload == b"read"
            await asyncio.sleep(0)
            assert heard[-1] == (1.0, "the last word")

    run(test)


def test_one_client_serves_several_event_loops_in_turn(supervisor: Supervisor) -> None:
    client = AsyncClient(supervisor.socket)

    async def test() -> bytes:
        return bytes((await client.call("plain", b"x")).payload)

    assert [run(test) for _ in range(3)] == [b"x"] * 3
    client.close()

    async def closed() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            await client.call("plain")

    run(closed)


def test_client_serves_event_loops_in_several_threads(supervisor: Supervisor) -> None:
    """Django, for example, uses an event loop for each request."""
    client = AsyncClient(supervisor.socket)
    begun, is_over = threading.Barrier(4), threading.Event()
    results: list[Any] = []

    async def use(number: int) -> None:
        # All loops connect at the same time.
        replies = await asyncio.gather(*[client.call("two", b"%d" % number) for _ in range(20)])
        results.extend(reply.payload for reply in replies)
        begun.wait(LONG)
        if number == 0:
            held = client.submit("plain", operation="until-cancelled", deadline=10 * LONG)
            await until("the others are done", is_over.is_set)
            assert not held.done()
            held.cancel()
            results.append((await client.call("plain", b"again")).payload)

    threads = [threading.Thread(target=asyncio.run, args=(use(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join(LONG)
    # Short-lived event loops are used while another event loop waits.
    for _ in range(3):
        assert asyncio.run(call_once(client)) == b"x"
    is_over.set()
    threads[0].join(LONG)
    assert sorted(results) == sorted([*[b"%d" % number for number in range(4)] * 20, b"again"])
    client.close()


async def call_once(client: AsyncClient) -> bytes | bytearray:
    return (await client.call("two", b"x")).payload


def test_closing_a_client_cancels_jobs_in_other_event_loops(supervisor: Supervisor) -> None:
    client = AsyncClient(supervisor.socket)
    began = threading.Event()
    errors: list[BaseException] = []

    async def wait() -> None:
        job = client.submit("plain", operation="until-cancelled")
        await client.call("two", b"x")
        began.set()
        try:
            await job
        except bulkhead.JobError as error:
            errors.append(error)

    thread = threading.Thread(target=asyncio.run, args=(wait(),))
    thread.start()
    assert began.wait(LONG)
    client.close()
    thread.join(LONG)
    assert [type(error) for error in errors] == [bulkhead.Disconnected]


def test_forked_child_uses_another_connection_and_loop(supervisor: Supervisor) -> None:
    async def test() -> None:
        async with connected(supervisor) as client:
            assert (await client.call("two", b"x")).payload == b"x"
            mine = client.submit("two", b"0.3", operation="sleep")
            child = os.fork()
            if child == 0:
                status = 1
                try:

                    async def in_child() -> bool:
                        answers = [await client.call("two", b"%d" % n) for n in range(20)]
                        return [answer.payload for answer in answers] == [b"%d" % n for n in range(20)]

                    # In the forked child, asyncio still thinks that the parent's loop is running in this thread.
                    asyncio._set_running_loop(None)
                    loop = asyncio.new_event_loop()
                    status = 0 if loop.run_until_complete(in_child()) else 2
                finally:
                    os._exit(status)
            assert (await client.call("two", b"y")).payload == b"y"
            waited = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(waited[1]) == 0
            assert (await mine).payload == b"slept"

    run(test)


def test_forked_child_cannot_cancel_a_job_of_a_dropped_client(supervisor: Supervisor, tmp_path: Path) -> None:
    file = tmp_path / "file"

    async def test() -> None:
        client = AsyncClient(supervisor.socket)
        await client.call("free")
        job = client.submit("free", bytes(file), operation="wait")
        del client
        gc.collect()
        child = os.fork()
        if child == 0:
            try:
                job.cancel()
            finally:
                os._exit(0)
        await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
        file.touch()
        assert (await job).payload == b"waited"

    run(test)


def test_supervisor_death_fails_its_jobs(tmp_path: os.PathLike[str]) -> None:
    async def test() -> None:
        with running(plain=WORKER) as own:
            async with AsyncClient(own.socket) as client:
                job = client.submit("plain", b"60", operation="sleep")
                queued = asyncio.ensure_future(client.call("plain"))
                await until("both jobs have arrived", lambda: own.snapshot("plain")["queued"] == 1)
                own.kill()
                for lost in (job, queued):
                    with pytest.raises(bulkhead.Disconnected) as caught:
                        await lost
                    assert caught.value.executed == "unknown"
                with pytest.raises(bulkhead.Disconnected) as caught:
                    await client.call("plain")
                assert caught.value.executed == "no"
                both = await asyncio.gather(client.call("plain"), client.call("plain"), return_exceptions=True)
                assert [type(error) for error in both] == [bulkhead.Disconnected] * 2
                await asyncio.get_running_loop().run_in_executor(None, own.start)
                assert (await client.call("plain", b"again")).payload == b"again"

    run(test)


def test_closing_a_client_cancels_its_jobs(supervisor: Supervisor) -> None:
    async def test() -> None:
        client = AsyncClient(supervisor.socket)
        job = client.submit("plain", operation="spin")
        await until("the job is running", lambda: supervisor.snapshot("plain")["in_flight"] == 1)
        await client.aclose()
        with pytest.raises(bulkhead.Disconnected, match="this program closed"):
            await job
        await until("the job has ended", lambda: supervisor.snapshot("plain")["in_flight"] == 0)

    run(test)


def test_dropped_client_closes_its_connection_after_its_last_job(supervisor: Supervisor) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def test() -> None:
        async with connected(supervisor) as client:
            await client.call("two")
        before = descriptors()
        for _ in range(10):
            client = AsyncClient(supervisor.socket)
            await client.call("two")
            lasting = client.submit("two", b"0.1", operation="sleep")
            # A client whose connection is not made yet.
            early = AsyncClient(supervisor.socket).submit("two", b"x")
            del client
            assert [(await lasting).payload, (await early).payload] == [b"slept", b"x"]
        await until("all connections are closed", lambda: gc.collect() >= 0 and descriptors() <= before)

    run(test)


def test_received_outcomes_survive_a_connection_reset(tmp_path: Path) -> None:
    def welcome(listening: socket.socket) -> socket.socket:
        peer = listening.accept()[0]
        peer.settimeout(LONG)
        peer.recv(65_536)
        peer.sendall(_wire.frame(_wire.CLIENT_WELCOME, 0, struct.pack("<HIQ", 1, 0xFFFF_FFFF, 0) + bytes(8)))
        return peer

    async def test() -> None:
        path = str(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            listening.settimeout(LONG)
            client = AsyncClient(path)
            peer = asyncio.get_running_loop().run_in_executor(None, welcome, listening)
            first, second = client.submit("plain", b"1"), client.submit("plain", b"2")
            with await peer as link:
                while first._job_connection is None:
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                # The data is as large as one read, so the client reads again. The peer closes the connection with
                # unread data.
                metadata = bytes(_wire._OUTCOME.size) + bytes(24) + bytes(8)
                link.sendall(_wire.frame(_wire.OUTCOME, 1, metadata, bytes(_wire.READ_BYTES - 16 - len(metadata))))
            assert len((await first).payload) > 60_000
            with pytest.raises(bulkhead.Disconnected):
                await second
            client.close()

    run(test)
