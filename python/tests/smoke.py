"""Basic checks for every interpreter, without pytest. test_versions.py runs this program."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import traceback
from concurrent.futures import wait

import jobs
from pools import LONG, wait_for
from running import WORKER, running

from bulkhead import AsyncClient, BulkheadExecutor, CallTimeout, Client, Crashed, WorkerCrashed

THREADS = 8
#: Number of calls per thread. Lower if each call starts a process.
CALLS, CALLS_WITH_PROCESS = 100, 20


def in_threads(action: object, *arguments: object) -> None:
    """Runs an action in many threads concurrently."""
    wrong: list[BaseException] = []

    def run(number: int) -> None:
        try:
            action(number, *arguments)  # type: ignore[operator]
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def calls(thread: int, pool: BulkheadExecutor, count: int) -> None:
    futures = [(number, pool.submit(jobs.double, number)) for number in range(thread, count * THREADS, THREADS)]
    futures[7][1].cancel()
    for number, future in futures[8:]:
        assert future.result(LONG) == number * 2


def of_timeout(pool: BulkheadExecutor) -> str:
    """Returns the traceback of a call that times out."""
    error = pool.with_options(timeout=0.2).submit(jobs.sleep, 600).exception(LONG)
    assert isinstance(error, CallTimeout)
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def of_executor(method: str, tasks: int | None) -> None:
    context = multiprocessing.get_context(method)
    with BulkheadExecutor(2, mp_context=context, max_tasks_per_child=tasks) as pool:
        in_threads(calls, pool, CALLS if tasks is None else CALLS_WITH_PROCESS)
        assert isinstance(pool.submit(jobs.segfault).exception(LONG), WorkerCrashed)
        # On a busy machine, some exceptions have no stack.
        wait_for("a timeout has a stack", lambda: " in sleep\n" in of_timeout(pool))
        assert isinstance(pool.submit(int, "x").exception(LONG), ValueError)
        assert list(pool.map(jobs.double, range(50), chunksize=7)) == [number * 2 for number in range(50)]

        async def looped() -> list[int]:
            loop = asyncio.get_running_loop()
            return await asyncio.gather(*(loop.run_in_executor(pool, jobs.double, number) for number in range(50)))

        assert asyncio.run(looped()) == [number * 2 for number in range(50)]
        if (child := os.fork()) == 0:
            os._exit(0 if pool.submit(jobs.double, 3).result(LONG) == 6 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def of_clients() -> None:
    with running(one={**WORKER, "max_in_flight": 4, "processes": 2}) as supervisor:
        with Client(supervisor.socket) as client:

            def ask(thread: int) -> None:
                for number in range(CALLS):
                    payload = b"%d %d" % (thread, number)
                    assert client.call("one", payload).payload == payload
                assert len(client.call("one", b"100000", operation="size").payload) == 100_000

            in_threads(ask)
            wait(jobs_there := [client.submit("one", b"x" * 100_000) for _ in range(20)])
            assert all(len(job.result().payload) == 100_000 for job in jobs_there)
            try:
                client.call("one", operation="segv")
            except Crashed:
                pass

        async def many() -> None:
            async with AsyncClient(supervisor.socket) as client:
                payloads = [b"%d" % number for number in range(200)]
                replies = await asyncio.gather(*(client.call("one", payload) for payload in payloads))
                assert [reply.payload for reply in replies] == payloads

        asyncio.run(many())


if __name__ == "__main__":
    for arguments in (("spawn", None), ("forkserver", None), ("forkserver", 1)):
        of_executor(*arguments)
    of_clients()
    # Submitted calls are finished when the interpreter exits.
    last = BulkheadExecutor(2)
    ended: list[int] = []
    for _ in range(20):
        last.submit(jobs.double, 1).add_done_callback(
            lambda future: (ended.append(future.result()), len(ended) == 20 and print("done", flush=True))
        )
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"{sys.version.split()[0]}{'' if has_lock else ' free-threaded'}", flush=True)
