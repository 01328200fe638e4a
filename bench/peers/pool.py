"""Does the bench's work with a Python executor: `executor` (ProcessPoolExecutor), `pebble` or `loky`.

Reads one order from each line of standard input, and writes one JSON object for each order (see
`bench/src/peers.rs`).
"""

import json
import os
import signal
import statistics
import sys
import threading
import time


def echo(payload):
    return payload


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Executor:
    """An executor with a single worker process, as under the supervisor."""

    def __init__(self, kind):
        self.kind = kind
        self.start()

    def start(self):
        if self.kind == "executor":
            from concurrent.futures import ProcessPoolExecutor

            self.pool = ProcessPoolExecutor(max_workers=1)
            self.submit = self.pool.submit
        elif self.kind == "pebble":
            from pebble import ProcessPool

            self.pool = ProcessPool(max_workers=1)
            self.submit = lambda function, *args: self.pool.schedule(function, args=args)
        elif self.kind == "loky":
            from loky import get_reusable_executor

            self.pool = get_reusable_executor(max_workers=1, timeout=3600)
            self.submit = self.pool.submit
        else:
            sys.exit(f"no such executor: {self.kind}")

    def restart(self):
        if self.kind == "pebble":
            return
        self.pool.shutdown(wait=False)
        self.start()

    def call(self, payload):
        answer = self.submit(echo, payload).result()
        if len(answer) != len(payload):
            raise ValueError("too few bytes came back")


def latency(executor, size, total):
    payload, times = b"x" * size, []
    for _ in range(total):
        began = time.perf_counter()
        executor.call(payload)
        times.append(time.perf_counter() - began)
    return {"us": statistics.median(times) * 1e6}


def rate(executor, lanes, size, total):
    payload = b"x" * size
    room, failures = threading.Semaphore(lanes), []

    def ended(future):
        if future.exception() is not None:
            failures.append(future.exception())
        room.release()

    began = time.perf_counter()
    for _ in range(total):
        room.acquire()
        executor.submit(echo, payload).add_done_callback(ended)
    for _ in range(lanes):
        room.acquire()
    took = time.perf_counter() - began
    if failures:
        raise failures[0]
    return {"rate": total / took}


def recovery(executor, total):
    times = []
    for _ in range(total):
        began = time.perf_counter()
        try:
            executor.submit(die).result()
        except Exception:
            pass
        while True:
            try:
                executor.call(b"x" * 64)
                break
            except Exception:
                executor.restart()
        times.append(time.perf_counter() - began)
    return {"ms": statistics.median(times) * 1e3}


def main():
    executor = Executor(sys.argv[1])
    orders = {"latency": latency, "rate": rate, "recovery": recovery}
    for line in sys.stdin:
        order, *numbers = line.split()
        print(json.dumps(orders[order](executor, *map(int, numbers))), flush=True)
    # Exits without waiting for threads and processes that an executor has left behind.
    os._exit(0)


if __name__ == "__main__":
    main()
