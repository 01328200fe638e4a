"""A storm of calls, one in twenty of which is bad. As a program, runs storms until it is killed.

The program reports when half of the first storm is done.
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import Future
from typing import Any

import jobs

from bulkhead import BulkheadExecutor
from bulkhead.executor import CallTimeout, ResultUnreadable, WorkerCrashed

#: Memory limit of the workers. The limit is low, so that leaking calls end soon.
MEMORY = "256MiB"
#: Bad calls: function, timeout, expected exception.
BAD = [
    (jobs.segfault, None, WorkerCrashed),
    (jobs.leave, None, WorkerCrashed),
    (jobs.hang, 0.05, CallTimeout),
    (jobs.leak, None, MemoryError),
    (jobs.raise_unreadable, None, ResultUnreadable),
]


def begin(pool: BulkheadExecutor, count: int) -> list[tuple[Future[Any], int | type[BaseException]]]:
    """Submits calls. Returns the futures, each with the expected result or exception type."""
    chance = random.Random(7)
    begun: list[tuple[Future[Any], int | type[BaseException]]] = []
    for number in range(count):
        if chance.random() >= 0.05:
            begun.append((pool.submit(jobs.double, number), number * 2))
            continue
        call, timeout, error = chance.choice(BAD)
        executor = pool if timeout is None else pool.with_options(timeout=timeout)
        begun.append((executor.submit(call), error))
    return begun


def main(count: int) -> None:
    pool = BulkheadExecutor(4, memory=MEMORY)
    begun = begin(pool, count)
    supervisor = pool._pool.supervisor()
    for future, _ in begun[: count // 2]:
        future.exception()
    print(supervisor.pid, supervisor.folder, flush=True)
    give_up = time.monotonic() + 600
    while time.monotonic() < give_up:
        following = begin(pool, count)
        for future, _ in begun:
            future.exception()
        begun = following


if __name__ == "__main__":
    main(int(sys.argv[1]))
