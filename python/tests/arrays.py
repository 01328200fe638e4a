"""Calls with arrays, for ``test_arrays.py``."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy

#: Sizes in bytes of an array that is mapped and of an array that is copied.
MAPPED, COPIED = 8 << 20, 1 << 20

_kept: list[Any] = []


def is_file(array: numpy.ndarray) -> bool:
    """Returns true if the array is in a mapping of a memory file."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as file:
        for line in file:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return "memfd:" in line
    return False


def plus_one(array: numpy.ndarray) -> numpy.ndarray:
    return array + 1


def add_in_place(array: numpy.ndarray) -> float:
    array += 1
    return float(array.sum())


def wait_with(array: numpy.ndarray, folder: str) -> float:
    """Reads the whole array, creates the file ``running``, and waits for the file ``go``. Returns the sum."""
    total = float(array.sum())
    open(f"{folder}/running", "w").close()
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.005)
    return total


def keep(array: numpy.ndarray, written: int = 0) -> bool:
    """Keeps the array after overwriting its first ``written`` values. Returns true if the array is in a memory file."""
    array[:written] = -1
    _kept.append(array)
    return is_file(array)


def kept() -> list[tuple[float, float, float]]:
    """Returns the first value, the last value and the sum of each kept array."""
    return [(float(array[0]), float(array[-1]), float(array.sum())) for array in _kept]


def forge(head: bytes) -> None:
    """Makes this worker write a forged head in front of its results."""
    from bulkhead import _files

    def write(payload: Any, target: Any) -> int:
        size = sum(map(len, payload))
        target[: len(head)] = head
        return size

    _files._write = write


def scribble(array: numpy.ndarray) -> numpy.ndarray:
    """Returns the array, and keeps overwriting the memory of results until this process exits."""
    from bulkhead import _files

    files = [value for value in gc.get_objects() if isinstance(value, _files.Pair)]

    def write() -> None:
        number = 0
        while True:
            number = (number + 1) % 256
            for file in files:
                file.own[:] = bytes([number]) * len(file.own)

    threading.Thread(target=write, daemon=True).start()
    return array


def sleep_with(_array: numpy.ndarray) -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), 9)
