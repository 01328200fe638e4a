"""Tests of large arrays: use of memory files, arrays that the function or the caller keeps, and forged replies."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import arrays
import jobs
import pytest
from pools import LONG, tree, wait_for

from bulkhead import BulkheadExecutor, _files
from bulkhead._channel import Channel
from bulkhead.executor import ResultRefused, ResultUnreadable, WorkerCrashed

numpy = pytest.importorskip("numpy", reason="NOT RUN: numpy is not installed")


@pytest.fixture
def pool() -> Iterator[BulkheadExecutor]:
    with BulkheadExecutor(1) as executor:
        yield executor


def filled(size: int, value: float) -> Any:
    return numpy.full(size // 8, float(value))


def warm(pool: BulkheadExecutor, size: int = arrays.MAPPED) -> None:
    """Waits until calls of this size use a memory file."""
    wait_for("a call uses a memory file", lambda: pool.submit(arrays.is_file, filled(size, 0.0)).result(LONG))


def leases(pool: BulkheadExecutor) -> list[int]:
    """Returns the numbers of the free leases."""
    return [lease.number for lease in pool._pool._channel.leases._free]  # type: ignore[union-attr]


def memory() -> int:
    """Returns the memory in bytes of this process and its descendants. Shared pages count once."""
    total = 0
    for pid in tree(os.getpid()):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    return total


def test_large_array_reaches_worker_in_memory_file(pool: BulkheadExecutor) -> None:
    warm(pool)
    for number in range(5):
        result = pool.submit(arrays.plus_one, filled(arrays.MAPPED, number)).result(LONG)
        assert (result == number + 1).all()
    assert len(leases(pool)) == 1


def test_result_is_independent_of_file_reuse(pool: BulkheadExecutor) -> None:
    for size in (arrays.MAPPED, arrays.COPIED):
        warm(pool)
        results = [pool.submit(arrays.plus_one, filled(size, number)).result(LONG) for number in range(4)]
        for number, result in enumerate(results):
            result += 1
            assert (result == number + 2).all()


@pytest.mark.parametrize("size", [arrays.MAPPED, arrays.COPIED])
def test_function_can_write_to_its_array(pool: BulkheadExecutor, size: int) -> None:
    warm(pool)
    for _ in range(3):
        array = filled(size, 1.0)
        assert pool.submit(arrays.add_in_place, array).result(LONG) == size // 8 * 2
        assert (array == 1).all()


@pytest.mark.parametrize("written", [0, 1000])
def test_array_kept_by_function_keeps_its_values(pool: BulkheadExecutor, written: int) -> None:
    warm(pool)
    count = arrays.MAPPED // 8
    assert pool.submit(arrays.keep, filled(arrays.MAPPED, 5.0), written).result(LONG)
    for number in range(3):
        pool.submit(arrays.add_in_place, filled(arrays.MAPPED, number)).result(LONG)
    assert leases(pool)
    ((first, last, total),) = pool.submit(arrays.kept).result(LONG)
    assert (first, last, total) == (-1.0 if written else 5.0, 5.0, (count - written) * 5.0 - written)


def test_kept_arrays_keep_values_on_older_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.14 has no MADV_POPULATE_WRITE."""
    monkeypatch.setattr(_files, "_POPULATE_WRITE", 12345)
    descriptor = os.memfd_create("payload")
    with open(descriptor, "r+b", buffering=0) as file:
        file.write(bytes([1]) * arrays.MAPPED)
        loan = _files.Loan.__new__(_files.Loan)
        loan._mappings = [_files.mmap.mmap(descriptor, arrays.MAPPED, flags=_files.mmap.MAP_PRIVATE)]
        array = numpy.frombuffer(loan._mappings[0], "u1")
        loan.release()
        os.pwrite(descriptor, bytes([2]) * arrays.MAPPED, 0)
        assert (array == 1).all()


def test_large_array_is_in_memory_once_beside_the_callers(pool: BulkheadExecutor, tmp_path: Path) -> None:
    size = 64 << 20
    warm(pool)
    array = filled(size, 1.0)
    before = memory()
    warm(pool, size)
    call = pool.submit(arrays.wait_with, array, str(tmp_path))
    wait_for("the function has read its array", (tmp_path / "running").exists)
    during = memory()
    (tmp_path / "go").touch()
    assert call.result(LONG) == size // 8
    assert during - before <= 1.2 * size


def test_many_large_calls_share_one_lease_per_worker() -> None:
    with BulkheadExecutor(2) as pool:
        given = [filled(arrays.COPIED * (1 + number % 3), number) for number in range(40)]
        for number, result in enumerate(pool.map(arrays.plus_one, given)):
            assert result.shape == given[number].shape
            assert (result == number + 1).all()
        assert len(leases(pool)) <= 2


def test_worker_death_fails_only_its_call(pool: BulkheadExecutor) -> None:
    for _ in range(2):
        warm(pool)
        assert isinstance(pool.submit(arrays.die).exception(LONG), WorkerCrashed)
        assert (pool.submit(arrays.plus_one, filled(arrays.MAPPED, 1)).result(LONG) == 2).all()


def test_memory_files_remain_usable_after_a_cancelled_call(pool: BulkheadExecutor) -> None:
    for _ in range(3):
        warm(pool)
        future = pool.submit(arrays.sleep_with, filled(arrays.MAPPED, 1))
        wait_for("the call runs", future.running)
        assert future.cancel()
    warm(pool)


def test_killed_supervisor_invalidates_leases(pool: BulkheadExecutor) -> None:
    warm(pool)
    os.kill(pool._pool.supervisor().pid or 0, signal.SIGKILL)
    wait_for("another supervisor", lambda: pool.submit(int).exception(LONG) is None)
    warm(pool)


def test_object_and_strided_arrays_are_pickled(pool: BulkheadExecutor) -> None:
    for array in (numpy.array([1, "x", None] * 50_000, object), filled(arrays.MAPPED, 3.0)[::3], numpy.zeros((0, 3))):
        assert (pool.submit(jobs.echo, array).result(LONG) == array).all()
    frozen = filled(arrays.COPIED, 3.0)
    frozen.flags.writeable = False
    assert not pool.submit(jobs.echo, frozen).result(LONG).flags.writeable


# Forged replies.


def is_lent(pool: BulkheadExecutor) -> bool:
    """Returns true if calls use a memory file."""
    pool.submit(arrays.is_file, filled(arrays.MAPPED, 0)).result(LONG)
    return pool.submit(arrays.is_file, filled(arrays.MAPPED, 0)).result(LONG)


def head(count: int, pickled: int, *sizes: int) -> bytes:
    return struct.pack("<cxxxIQ", b"P", count, pickled) + struct.pack(f"<{len(sizes)}Q", *sizes)


FORGED = {
    "count": head(0xFFFF_FFFF, 10),
    "large count": head(60_000, 10),
    "pickle beyond the end": head(1, 1 << 40, 8),
    "negative": head(1, 10, (1 << 64) - 8),
    "beyond the end": head(1, 10, 1 << 33),
    "cut off": b"P",
    "no pickle": head(0, 0),
}


@pytest.mark.parametrize("name", FORGED)
def test_rejects_forged_headers(name: str) -> None:
    for data in (FORGED[name], FORGED[name] + bytes(9000)):
        with pytest.raises((ValueError, EOFError, pickle.UnpicklingError)):
            pickle.loads(_files.parts(data)[0])


def test_forged_header_in_a_file_fails_only_its_call() -> None:
    with BulkheadExecutor(1, sandbox="default") as pool:
        wait_for("a lease", lambda: is_lent(pool))
        for forged in FORGED.values():
            pool.submit(arrays.forge, forged).result(LONG)
            error = pool.submit(jobs.echo, filled(arrays.MAPPED, 1)).exception(LONG)
            assert isinstance(error, (ResultUnreadable, ResultRefused)), error
        with pytest.raises(WorkerCrashed):
            pool.submit(arrays.die).result(LONG)
        assert (pool.submit(arrays.plus_one, filled(arrays.MAPPED, 1)).result(LONG) == 2).all()


def test_returned_array_is_independent_of_the_file() -> None:
    with BulkheadExecutor(1, sandbox="default") as pool:
        wait_for("a lease", lambda: is_lent(pool))
        for _ in range(10):
            # The caller gets an array with any of the written values, or refuses the result.
            try:
                result = pool.submit(arrays.scribble, filled(arrays.MAPPED, 1)).result(LONG)
            except (ResultRefused, BrokenProcessPool):
                continue
            assert (result.dtype, result.shape) == ("f8", (arrays.MAPPED // 8,))
            before = result.tobytes()
            pool.submit(int).result(LONG)
            assert result.tobytes() == before


def test_lease_is_not_used_after_the_connection_closed() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 0)
    assert not channel.has_unread()
    channel.close()
    assert channel.has_unread()
    theirs.close()


def test_signal_exception_ends_the_wait_for_a_lease() -> None:
    class Raised(Exception):
        pass

    def handler(_number: int, _frame: object) -> None:
        channel = pool._pool._channel
        if pool._pool._is_nested() or (channel is not None and channel._writing._is_owned()):  # type: ignore[attr-defined]
            # The interrupted code holds a lock. A later signal comes during the wait.
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        # Another large call, which also requests a lease.
        assert pool.submit(len, bytes(arrays.MAPPED)).result(LONG) == arrays.MAPPED
        raise Raised

    with BulkheadExecutor(2) as pool:
        assert pool.submit(jobs.double, 4).result(LONG) == 8
        os.kill(pool._pool.supervisor().pid or 0, signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, (pool._pool.supervisor().pid, signal.SIGCONT))

        def call_until_raised() -> None:
            timer.start()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            wait_for("the handler raises", lambda: pool.submit(len, bytes(arrays.MAPPED)).result(LONG) == 0)

        before = signal.signal(signal.SIGALRM, handler)
        try:
            with pytest.raises(Raised):
                call_until_raised()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        warm(pool)


def test_closed_pool_holds_no_memory_files() -> None:
    def files() -> list[str]:
        with open("/proc/self/maps") as maps:
            return [line for line in maps if "memfd" in line]

    # Files from other tests can still exist and be closed during this test.
    gc.collect()
    before = files()
    with BulkheadExecutor(1) as pool:
        warm(pool)
        assert len(files()) > len(before)
    gc.collect()
    assert pool._pool._channel is None
    assert set(files()) <= set(before)
