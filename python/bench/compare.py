"""Compares the speed of pools and clients in one run. The pools take turns, so that disturbances affect all of them.

    BULKHEAD_SUPERVISOR=... python bench/compare.py [--rounds 5] [--json FILE]

Prints medians over the rounds, and compares the medians with the design's limits (docs/performance.md has the figures).
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import concurrent.futures
import contextlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rivals import RIVALS, WORKERS, ProcessPool, Rival, installed

ONE_IN_FLIGHT_JOBS = 300
OUTSTANDING = 64
OUTSTANDING_JOBS = 4000
MIB = 1 << 20
ONE_WORKER = "64 outstanding, one worker, jobs/s"
SPAWN = "ProcessPoolExecutor, spawn"
FRESH = "max_tasks_per_child=1, calls/s"


def work(number: int) -> int:
    return number + 1


def latency_us(pool: Rival) -> float:
    """Returns the median time of a job in microseconds, with one job in flight."""
    times = []
    for number in range(ONE_IN_FLIGHT_JOBS):
        began = time.perf_counter()
        assert pool.submit(work, number).result(60) == number + 1
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def rate(pool: Rival) -> float:
    """Returns the number of jobs per second with 64 outstanding jobs."""
    waiting: deque[Any] = deque()
    began = time.perf_counter()
    for number in range(OUTSTANDING_JOBS):
        if len(waiting) == OUTSTANDING:
            waiting.popleft().result(60)
        waiting.append(pool.submit(work, number))
    while waiting:
        waiting.popleft().result(60)
    return OUTSTANDING_JOBS / (time.perf_counter() - began)


def total(array: Any) -> float:
    return float(array.sum())


def plus_one(array: Any) -> Any:
    return array + 1


#: Measurements with large arrays: row, function, size of the array in bytes, number of calls per round.
ARRAYS: list[tuple[str, Callable[[Any], Any], int, int]] = [
    ("100 MB in and summed, ms", total, 100_000_000, 5),
    ("100 MB both ways, ms", plus_one, 100_000_000, 5),
    ("1 MB both ways, ms", plus_one, 1_000_000, 30),
]


def array_ms(pool: Rival, call: Callable[[Any], Any], size: int, count: int) -> float:
    """Returns the median time of a call with an array, in milliseconds. Each call gets a new array."""
    import numpy

    times = []
    for number in range(count):
        array = numpy.full(size // 8, float(number))
        began = time.perf_counter()
        result = pool.submit(call, array).result(120)
        times.append(time.perf_counter() - began)
        assert result == total(array) if call is total else result[-1] == number + 1
    return statistics.median(times) * 1e3


def fresh_rate(pool: Any, jobs: int = 300) -> float:
    """Returns the number of calls per second when each call runs in a fresh process."""
    assert pool.submit(work, 0).result(60) == 1
    began = time.perf_counter()
    for number, future in enumerate([pool.submit(work, number) for number in range(jobs)]):
        assert future.result(60) == number + 1
    elapsed = time.perf_counter() - began
    pool.shutdown()
    return jobs / elapsed


def fresh_pools() -> dict[str, Any]:
    """Returns pools whose processes run one call each."""
    from bulkhead import BulkheadExecutor

    forkserver = multiprocessing.get_context("forkserver")
    standard = concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=forkserver, max_tasks_per_child=1)
    return {
        "ProcessPoolExecutor": standard,
        "BulkheadExecutor, spawn": BulkheadExecutor(WORKERS, max_tasks_per_child=1),
        "BulkheadExecutor, forkserver": BulkheadExecutor(WORKERS, mp_context=forkserver, max_tasks_per_child=1),
    }


def start_and_exit_ms(make: Callable[[], Rival]) -> tuple[float, float]:
    """Returns the time from creating a pool to its first result, and the time to shut the pool down."""
    began = time.perf_counter()
    pool = make()
    pool.submit(work, 1).result(60)
    started = time.perf_counter()
    pool.close()
    return (started - began) * 1e3, (time.perf_counter() - started) * 1e3


WORKER = """
from bulkhead import serve
serve(lambda payload, context: payload)
"""


@contextlib.contextmanager
def echo_supervisor(processes: int = WORKERS, max_in_flight: int = 1) -> Iterator[str]:
    """Runs a supervisor whose workers echo the payload. Yields the socket's path."""
    from bulkhead._private import PrivateSupervisor

    keys = {"processes": processes, "max_in_flight": max_in_flight, "max_queue": 1000}
    surroundings = {"sandbox": {"profile": "none"}, "env": {"PYTHONPATH": _paths()}}
    supervisor = PrivateSupervisor("echo", {**keys, **surroundings}, {})
    worker = supervisor.write("worker.py", WORKER.encode())
    supervisor.start([sys.executable, worker])
    try:
        yield supervisor.socket
    finally:
        supervisor.stop()


def _paths() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def client_latency_us(client: Any) -> float:
    """Returns the median time of ``Client.call`` with 64 bytes, in microseconds."""
    payload = b"x" * 64
    times = []
    for _ in range(ONE_IN_FLIGHT_JOBS):
        began = time.perf_counter()
        assert client.call("echo", payload).payload == payload
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def client_mib_s(client: Any) -> float:
    """Returns the number of MiB per second that ``Client.call`` sends and receives, with payloads of 1 MiB."""
    payload, count = os.urandom(MIB), 100
    began = time.perf_counter()
    for _ in range(count):
        assert len(client.call("echo", payload).payload) == MIB
    return count / (time.perf_counter() - began)


async def async_rate(socket: str) -> float:
    """Returns the number of calls per second through AsyncClient with 64 outstanding calls."""
    from bulkhead import AsyncClient

    async with AsyncClient(socket) as client:
        return await _in_loop(lambda number: client.call("echo", b"x" * 64))


async def pool_rate_in_loop(pool: Any) -> float:
    """Returns the number of calls per second through run_in_executor with 64 outstanding calls."""
    loop = asyncio.get_running_loop()
    return await _in_loop(lambda number: loop.run_in_executor(pool, work, number))


async def _in_loop(call: Callable[[int], Any]) -> float:
    numbers = iter(range(OUTSTANDING_JOBS))

    async def lane() -> None:
        for number in numbers:
            await call(number)

    await call(0)
    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(OUTSTANDING)))
    return OUTSTANDING_JOBS / (time.perf_counter() - began)


def import_cpu_ms(statement: str) -> float:
    """Returns the CPU time of an import in a fresh interpreter."""
    code = f"import time; began = time.process_time(); {statement}; print(time.process_time() - began)"
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True) for _ in range(9)]
    return statistics.median(float(run.stdout) for run in runs) * 1e3


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Returns the medians over the rounds, by row and column."""
    there, missing = installed()
    for name in missing:
        print(f"not installed: {name}")
    figures: dict[str, dict[str, list[float]]] = {}

    def note(row: str, column: str, value: float) -> None:
        figures.setdefault(row, {}).setdefault(column, []).append(value)

    from bulkhead import Client

    pools = {name: RIVALS[name]() for name in there}
    with echo_supervisor() as socket, Client(socket) as client:
        for pool in pools.values():
            pool.submit(work, 0).result(60)
            rate(pool)
        client.call("echo", b"")
        for _ in range(rounds):
            for name, pool in pools.items():
                note("one in flight, us", name, latency_us(pool))
            note("one in flight, us", "Client.call", client_latency_us(client))
            for name, pool in pools.items():
                note("64 outstanding, jobs/s", name, rate(pool))
            note("64 outstanding, jobs/s", "AsyncClient", asyncio.run(async_rate(socket)))
            for name in ("ProcessPoolExecutor", "BulkheadExecutor"):
                value = asyncio.run(pool_rate_in_loop(pools[name].pool))  # type: ignore[attr-defined]
                note("64 outstanding in asyncio, jobs/s", name, value)
            note("1 MiB, MiB/s", "Client.call", client_mib_s(client))
        for number in range(rounds + 1 if importlib.util.find_spec("numpy") else 0):
            for row, call, size, count in ARRAYS:
                for name, pool in pools.items():
                    # Round 0 is a warm-up, in which memory files are created. Its figures are not used.
                    value = array_ms(pool, call, size, count)
                    if number:
                        note(row, name, value)
    for pool in pools.values():
        pool.close()
    with echo_supervisor(1) as one_at_a_time, echo_supervisor(1, OUTSTANDING) as side_by_side:
        for number in range(rounds + 1):
            for column, socket in ("one job at a time", one_at_a_time), ("64 jobs at once", side_by_side):
                value = asyncio.run(async_rate(socket))
                if number:
                    note(ONE_WORKER, column, value)
    for _ in range(rounds):
        for name, make in [*((name, RIVALS[name]) for name in there), (SPAWN, lambda: ProcessPool("spawn"))]:
            start, leave = start_and_exit_ms(make)
            note("first result, ms", name, start)
            note("pool shutdown, ms", name, leave)
        for name, fresh in fresh_pools().items():
            note(FRESH, name, fresh_rate(fresh, 50 if "spawn" in name else 600))
    note("import, ms of CPU", "bulkhead", import_cpu_ms("import bulkhead"))
    note("import, ms of CPU", "BulkheadExecutor", import_cpu_ms("from bulkhead import BulkheadExecutor"))
    note(
        "import, ms of CPU", "ProcessPoolExecutor", import_cpu_ms("from concurrent.futures import ProcessPoolExecutor")
    )
    return {
        row: {column: statistics.median(values) for column, values in columns.items()}
        for row, columns in figures.items()
    }


def accepted(figures: dict[str, dict[str, float]]) -> list[tuple[str, float, bool]]:
    """Returns the criteria of the design: description, measured value, and true if the criterion is met."""
    one, many = figures["one in flight, us"], figures["64 outstanding, jobs/s"]
    in_loop = figures["64 outstanding in asyncio, jobs/s"]
    standard = "ProcessPoolExecutor"
    rows = [
        (
            "executor, one in flight, at most 1.1 x ProcessPoolExecutor",
            one["BulkheadExecutor"] / one[standard],
            1.1,
            False,
        ),
        ("executor, 64 outstanding, at least 2.5 x (3 wanted)", many["BulkheadExecutor"] / many[standard], 2.5, True),
        ("Client.call of 64 B, at most 0.7 x", one["Client.call"] / one[standard], 0.7, False),
        ("AsyncClient at 64, at least 3 x run_in_executor", many["AsyncClient"] / in_loop[standard], 3.0, True),
        (
            "a worker with one job at a time, at least 0.8 x one with 64",
            figures[ONE_WORKER]["one job at a time"] / figures[ONE_WORKER]["64 jobs at once"],
            0.8,
            True,
        ),
        ("Client.call of 1 MiB, at least 500 MiB/s", figures["1 MiB, MiB/s"]["Client.call"], 500.0, True),
        ("import bulkhead, at most 15 ms of CPU", figures["import, ms of CPU"]["bulkhead"], 15.0, False),
        (
            "a fresh process for each call, at least 300 calls/s",
            figures[FRESH]["BulkheadExecutor, forkserver"],
            300.0,
            True,
        ),
        *(
            (
                f"{row.removesuffix(', ms')}, at least {least} x",
                figures[row][standard] / figures[row]["BulkheadExecutor"],
                least,
                True,
            )
            for (row, *_), least in zip(ARRAYS, (5.0, 4.0, 3.0), strict=True)
            if row in figures
        ),
        (
            "first result, at most 1.2 x ProcessPoolExecutor with spawn",
            figures["first result, ms"]["BulkheadExecutor"] / figures["first result, ms"][SPAWN],
            1.2,
            False,
        ),
        ("pool shutdown, at most 50 ms", figures["pool shutdown, ms"]["BulkheadExecutor"], 50.0, False),
    ]
    return [(words, value, value >= bound if is_least else value <= bound) for words, value, bound, is_least in rows]


def compile_package() -> None:
    """Compiles the package to byte code, as pip does for an installed package.

    The compared pools are already compiled, because pip installed them.
    """
    spec = importlib.util.find_spec("bulkhead")
    assert spec
    assert spec.submodule_search_locations
    for folder in spec.submodule_search_locations:
        compileall.compile_dir(folder, quiet=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    compile_package()
    figures = measure(options.rounds)
    version = sys.version.split()[0]
    print(f"{os.cpu_count()} processors, {WORKERS} workers, medians of {options.rounds} rounds, Python {version}")
    for row, columns in figures.items():
        print(f"{row}: " + ", ".join(f"{column} {value:,.0f}" for column, value in columns.items()))
    for words, value, is_met in accepted(figures):
        print(f"{'met    ' if is_met else 'NOT MET'} {words}: {value:,.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
