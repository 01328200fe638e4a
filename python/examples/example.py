"""Runs functions that segfault, hang and leak alongside a hundred honest functions, and prints each outcome.

python3 -m venv v && v/bin/pip install ./python/supervisor ./python && v/bin/python python/examples/example.py
"""

import ctypes
import time
from concurrent.futures.process import BrokenProcessPool

from bulkhead import BulkheadExecutor


def honest(number):
    return number * number


def segfaults():
    ctypes.string_at(0)


def hangs():
    while True:
        pass


def leaks():
    kept = []
    while True:
        # Python does not write to this memory, so allocating is fast. The memory limit applies nevertheless.
        kept.append(bytes(1 << 20))


if __name__ == "__main__":
    began = time.monotonic()
    with BulkheadExecutor(2, timeout=1, memory="256MiB") as pool:
        bad = {function.__name__: pool.submit(function) for function in (segfaults, hangs, leaks)}
        squares = list(pool.map(honest, range(100)))
        for name, future in bad.items():
            try:
                future.result()
            except BrokenProcessPool as error:
                print(f"{name}: its process died: {error}")
            except TimeoutError as error:
                print(f"{name}: took too long: {error}")
            except MemoryError:
                print(f"{name}: wanted too much memory")
    assert squares == [number * number for number in range(100)]
    print(f"honest: all {len(squares)} were answered")
    print(f"{time.monotonic() - began:.1f} s in all")
