"""BulkheadExecutor as an executor: the contract of concurrent.futures, options, threads, asyncio, fork, shutdown."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from pathlib import Path
from typing import Any

import jobs
import pytest
from pools import LONG, is_running, is_sleeping, read, tree, wait_for

import bulkhead
from bulkhead import BulkheadExecutor, SupervisorNotFound, _output, _private
from bulkhead.executor import CallTimeout, ResultUnreadable, WorkerCrashed

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"


@pytest.fixture(scope="module")
def pool() -> Iterator[BulkheadExecutor]:
    """A pool that all tests in this file share and leave unchanged."""
    with BulkheadExecutor(2) as executor:
        yield executor


def script(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that can import the test modules."""
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", **variables}
    # With this variable, output lines of several processes are interleaved.
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=5 * LONG,
        check=False,
    )


# Behaviour of any executor.


def test_calls_return_values_and_exceptions(pool: BulkheadExecutor) -> None:
    assert pool.submit(jobs.double, 21).result(LONG) == 42
    assert pool.submit(jobs.add, 1, other=2).result(LONG) == 3
    future = pool.submit(jobs.fail, "no")
    with pytest.raises(ValueError, match="^no$") as raised:
        future.result(LONG)
    assert isinstance(raised.value.__cause__, _RemoteTraceback)
    assert "raise ValueError(words)" in str(raised.value.__cause__)
    with pytest.raises(SystemExit):
        pool.submit(jobs.leave_by_exception).result(LONG)


def test_call_that_holds_the_gil_does_not_delay_other_calls(pool: BulkheadExecutor) -> None:
    for _ in range(3):
        list(pool.map(jobs.double, range(500)))
    # This call takes longer than all other calls together.
    slow = pool.submit(jobs.hold_the_lock, 10**12)
    calls = [pool.submit(jobs.double, number) for number in range(60)]
    try:
        assert [call.result(LONG) for call in calls] == [2 * number for number in range(60)]
        assert not slow.done()
    finally:
        slow.cancel()


def test_map_returns_results_in_order(pool: BulkheadExecutor) -> None:
    numbers = list(range(100))
    expected = [number * 2 for number in numbers]
    assert list(pool.map(jobs.double, numbers)) == expected
    assert list(pool.map(jobs.double, numbers, chunksize=7)) == expected
    assert list(pool.map(jobs.double, numbers, buffersize=3)) == expected
    assert list(pool.map(jobs.double, numbers, chunksize=7, buffersize=2)) == expected
    for wrong in ({"chunksize": 0}, {"buffersize": 0}):
        with pytest.raises(ValueError):
            pool.map(jobs.double, numbers, **wrong)
    with pytest.raises(TypeError):
        pool.map(jobs.double, numbers, buffersize=1.5)  # type: ignore[arg-type]


def test_map_with_buffersize_limits_consumption(pool: BulkheadExecutor) -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    results = pool.map(jobs.double, numbers(), buffersize=4)
    assert len(taken) == 4
    assert next(results) == 0
    assert len(taken) == 5
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("buffersize", [None, 2, 5])
def test_map_consumes_iterables_like_the_builtin(pool: BulkheadExecutor, buffersize: int | None) -> None:
    rows, others = iter(range(100)), iter(range(100))
    assert list(pool.map(pow, rows, [1, 1, 1], buffersize=buffersize)) == list(map(pow, others, [1, 1, 1]))
    assert next(rows) == next(others)


def test_large_values_are_sent_in_both_directions(pool: BulkheadExecutor) -> None:
    data = os.urandom(1 << 20) * 20
    assert pool.submit(jobs.echo, data).result(LONG) == data
    # The data is larger than the buffers of the sockets, so a side that blocks while sending would cause a deadlock.
    futures = [pool.submit(jobs.echo, data[: 3 << 20]) for _ in range(40)]
    assert all(future.result(LONG) == data[: 3 << 20] for future in futures)


def test_unpicklable_values_fail_only_their_call(pool: BulkheadExecutor) -> None:
    before = pool.submit(jobs.pid).result(LONG)
    bad = [
        (pool.submit(lambda: 1), (pickle.PicklingError, AttributeError)),
        (pool.submit(jobs.return_unpicklable), (pickle.PicklingError, AttributeError)),
        (pool.submit(jobs.raise_unpicklable), (pickle.PicklingError, AttributeError)),
        (pool.submit(jobs.raise_unreadable), ResultUnreadable),
        (pool.submit(jobs.raise_without_traceback), SyntaxError),
        (pool.submit(jobs.echo, Unreadable()), ResultUnreadable),
    ]
    for future, kind in bad:
        with pytest.raises(kind):
            future.result(LONG)
    assert "the one" in str(bad[3][0].exception(LONG))
    assert pool.submit(jobs.echo, 1).result(LONG) == 1
    # The worker is still alive.
    os.kill(before, 0)


class Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return jobs.fail, ("while it is unpickled",)


def test_many_unpicklable_calls_do_not_exhaust_the_stack(pool: BulkheadExecutor, tmp_path: Path) -> None:
    first = pool.submit(jobs.note_and_wait, str(tmp_path), 1)
    futures = [pool.submit(lambda: 1) for _ in range(3000)]
    (tmp_path / "go").touch()
    assert all(future.exception(LONG) is not None for future in futures)
    assert first.result(LONG) == 1


def test_pool_keeps_no_reference_to_results(pool: BulkheadExecutor) -> None:
    import weakref

    future = pool.submit(jobs.echo, {1, 2})
    result = weakref.ref(future.result(LONG))
    del future
    gc.collect()
    wait_for("the result is gone", lambda: result() is None)


# Timeout and cancel.


def test_timeout_kills_the_calls_process_tree(pool: BulkheadExecutor, tmp_path: Path) -> None:
    note = str(tmp_path / "note")

    def text_of_late_call() -> str | None:
        """Returns the PIDs that a call writes before its timeout, or None if the call was too slow."""
        future = pool.with_options(timeout=3).submit(jobs.hang, note)
        with pytest.raises(CallTimeout) as raised:
            future.result(LONG)
        assert isinstance(raised.value, concurrent.futures.TimeoutError)
        assert isinstance(raised.value, bulkhead.DeadlineExceeded)
        assert "3 s" in str(raised.value)
        return read(note)

    pids = list(map(int, wait_for("a call writes its PIDs", text_of_late_call).split()))
    assert len(pids) == 2
    wait_for("the process tree is gone", lambda: not any(map(is_running, pids)))
    assert pool.submit(jobs.double, 2).result(LONG) == 4


def test_timeout_and_cancel_take_effect_quickly(tmp_path: Path) -> None:
    """The design requires an exception within 0.25 s and no process after 0.5 s, for a timeout of 0.2 s.

    A busy machine needs longer. The test only shows that no time limit in the supervisor or worker delays the result.
    """
    raised, gone, cancelled = [], [], []
    with BulkheadExecutor(1) as pool:
        for number in range(6):
            pool.submit(jobs.pid).result(LONG)
            note = str(tmp_path / str(number))
            is_cancelled = number % 2 == 1
            executor = pool if is_cancelled else pool.with_options(timeout=0.2)
            began = time.monotonic()
            future = executor.submit(jobs.hang, note)
            if is_cancelled:
                wait_for("the call runs", lambda: read(note))
                began = time.monotonic()
                assert future.cancel()
            else:
                with pytest.raises(CallTimeout):
                    future.result(LONG)
                raised.append(time.monotonic() - began)
            text = wait_for("the call has run", lambda: read(note) or (None if is_cancelled else "0 0"))
            pids = [pid for pid in map(int, text.split()) if pid]
            wait_for("the process tree is gone", lambda: not any(map(is_running, pids)))
            (cancelled if is_cancelled else gone).append(time.monotonic() - began)
    print(f"raised after {raised}, gone after {gone}, cancelled after {cancelled}")
    assert min(raised + gone + cancelled) < 10


def test_future_can_be_cancelled_at_each_stage(tmp_path: Path) -> None:
    with BulkheadExecutor(1) as pool:
        note = str(tmp_path / "note")
        running = pool.submit(jobs.hang, note)
        sent = pool.submit(jobs.double, 1)
        waiting = [pool.submit(jobs.double, number) for number in range(500)]
        pids = list(map(int, wait_for("the call runs", lambda: read(note)).split()))
        assert running.running()
        for future in (sent, waiting[250], running):
            assert future.cancel()
            assert future.cancelled()
            assert future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            running.result(LONG)
        rest = [future for future in waiting if not future.cancelled()]
        assert [future.result(LONG) for future in rest] == [number * 2 for number in range(500) if number != 250]
        assert not waiting[0].cancel()
        wait_for("the process tree is gone", lambda: not any(map(is_running, pids)))
        done, _ = concurrent.futures.wait([running, sent, waiting[250]], timeout=LONG)
        assert len(done) == 3


def test_deadline_includes_the_time_in_the_queue(tmp_path: Path) -> None:
    with BulkheadExecutor(1) as pool:
        first = pool.submit(jobs.note_and_wait, str(tmp_path), 1)
        late = pool.with_options(deadline=0.1).submit(jobs.double, 1)
        with pytest.raises(CallTimeout):
            late.result(LONG)
        (tmp_path / "go").touch()
        assert first.result(LONG) == 1


# Options.


def test_options_apply_to_executor_and_calls(tmp_path: Path) -> None:
    initial = ("made here", {"a": 1})
    with BulkheadExecutor(
        1, initializer=jobs.remember, initargs=(initial,), timeout=3, env={"GREETING": "hello"}, memory="512MiB"
    ) as pool:
        patient = pool.with_options(timeout=LONG)
        assert patient.submit(jobs.remembered).result(LONG) == [initial]
        assert patient.submit(jobs.variable, "GREETING").result(LONG) == "hello"
        assert patient.submit(jobs.variable, "HOME").result(LONG) == os.environ.get("HOME")
        assert patient.submit(jobs.folder).result(LONG) == os.getcwd()
        assert patient.submit(jobs.arguments).result(LONG) == sys.argv
        with pytest.raises(CallTimeout):
            pool.submit(jobs.hang).result(LONG)
        with pytest.raises(MemoryError):
            patient.submit(jobs.leak).result(LONG)
        assert patient.submit(jobs.sleep, 3.5).result(LONG) == 3.5
        again = pool.with_options(idempotent=True, timeout=LONG)
        assert again.submit(jobs.note_once, str(tmp_path / "once")).result(LONG) == "the second time"
        ordered = pool.with_options(priority="critical", tenant="acme", timeout=LONG)
        assert list(ordered.map(jobs.double, range(5))) == [0, 2, 4, 6, 8]
        ordered.shutdown()
        assert patient.submit(jobs.double, 1).result(LONG) == 2
        with pytest.raises(ValueError):
            pool.with_options(priority="urgent")


def test_constructor_rejects_wrong_arguments() -> None:
    for arguments in ({"max_workers": 0}, {"max_workers": 5000}, {"max_tasks_per_child": 0}, {"timeout": 0}):
        with pytest.raises(ValueError):
            BulkheadExecutor(**arguments)  # type: ignore[arg-type]
    for arguments in ({"initializer": 1}, {"max_tasks_per_child": 1.5}):
        with pytest.raises(TypeError):
            BulkheadExecutor(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="spawn"):
        BulkheadExecutor(mp_context=multiprocessing.get_context("fork"))
    with BulkheadExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        assert pool.submit(jobs.double, 1).result(LONG) == 2


def test_first_call_reports_an_invalid_configuration() -> None:
    with BulkheadExecutor(1, config={"max_qeue": 3}) as pool, pytest.raises(RuntimeError, match="max_queue"):
        pool.submit(jobs.pid)


def test_config_keys_reach_the_supervisor() -> None:
    with BulkheadExecutor(1, config={"rlimits": {"nofile": 77}, "supervisor": {"max_clients": 5}}) as pool:
        assert pool.submit(limit_of_files).result(LONG) == 77


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_env_files_override_the_callers_variables(
    context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame\n")
    secret.chmod(0o600)
    monkeypatch.setenv("DB_PASSWORD", "of the caller")
    # Variables beyond 24 KiB in total are set after the start of the interpreter.
    monkeypatch.setenv("A_LARGE_VARIABLE", "x" * 30_000)
    config = {"env_files": {"DB_PASSWORD": str(secret)}}
    with BulkheadExecutor(1, multiprocessing.get_context(context), config=config) as pool:
        assert pool.submit(jobs.variable, "DB_PASSWORD").result(LONG) == "sesame"
        assert pool.submit(jobs.variable, "A_LARGE_VARIABLE").result(LONG) == "x" * 30_000
    both = {"env": {"DB_PASSWORD": "x"}, "config": config}
    with BulkheadExecutor(1, **both) as pool, pytest.raises(RuntimeError, match="both"):
        pool.submit(jobs.pid)
    secret.chmod(0o644)
    with BulkheadExecutor(1, config=config) as pool, pytest.raises(RuntimeError, match="has mode 0644") as caught:
        pool.submit(jobs.pid)
    assert "sesame" not in str(caught.value)


def limit_of_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize("tasks", [1, 3])
def test_workers_never_exceed_max_tasks_per_child(tasks: int) -> None:
    with BulkheadExecutor(2, max_tasks_per_child=tasks) as pool:
        pids = [future.result(LONG) for future in [pool.submit(jobs.pid) for _ in range(12)]]
    assert max(map(pids.count, pids)) <= tasks
    if tasks == 1:
        assert len(set(pids)) == 12


@pytest.mark.parametrize("tasks", [None, 1, 3])
def test_forked_workers_behave_like_spawned_workers(
    tasks: int | None, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers forked from a template must behave like independent workers."""
    monkeypatch.setattr(_output, "CATCH_UP_SECONDS_MAX", LONG / 2)
    note = str(tmp_path / "note")
    with BulkheadExecutor(
        2,
        mp_context=multiprocessing.get_context("forkserver"),
        max_tasks_per_child=tasks,
        preload=["decimal"],
        initializer=jobs.remember,
        initargs=("made",),
    ) as pool:
        drawn = [future.result(LONG) for future in [pool.submit(jobs.draw) for _ in range(40)]]
        pids = [pid for pid, _ in drawn]
        assert len({number for _, number in drawn}) == 40
        assert tasks is None or max(map(pids.count, pids)) <= tasks
        assert pool.submit(jobs.loaded, "decimal").result(LONG)
        assert pool.submit(jobs.remembered).result(LONG) == ["made"]
        assert pool.submit(jobs.variable, "OMP_NUM_THREADS").result(LONG) == os.environ.get("OMP_NUM_THREADS", "1")
        assert pool.submit(jobs.say, "forked").result(LONG) == 1
        with pytest.raises(WorkerCrashed):
            pool.submit(jobs.segfault).result(LONG)
        with pytest.raises(CallTimeout):
            pool.with_options(timeout=1).submit(jobs.hang, note).result(LONG)
        hung = list(map(int, (read(note) or "").split()))
        wait_for("the process tree is gone", lambda: not any(map(is_running, hung)))
        assert list(pool.map(jobs.double, range(20))) == [number * 2 for number in range(20)]
        supervised = tree(pool._pool.supervisor().pid or 0)
    # The process that adds names to the timeout's stacks exits soon after the supervisor.
    wait_for("all processes have exited", lambda: not any(map(is_running, supervised)))
    assert capfd.readouterr().out == "forked\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_single_use_workers_send_heartbeats(method: str) -> None:
    health = {"heartbeat": "50ms", "missed": 20}
    context = multiprocessing.get_context(method)

    def ready() -> int | None:
        found = [worker for worker in pool.status()["workers"] if worker["state"] == "ready"]
        return found[0]["pid"] if found else None

    with BulkheadExecutor(1, mp_context=context, max_tasks_per_child=1, config={"health": health}) as pool:
        first = pool.submit(jobs.pid).result(LONG)

        def stays_ready() -> bool:
            waiting = wait_for("the next worker is ready", ready)
            time.sleep(1.5)
            return ready() == waiting != first

        # On a busy machine, a worker can miss its heartbeats.
        wait_for("a worker stays ready", stays_ready, 5 * LONG)
        assert pool.submit(jobs.sleep, 2).result(LONG) == 2
    with BulkheadExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        assert pool.submit(jobs.double, 1).result(LONG) == 2
        os.kill(wait_for("another worker is ready", ready), signal.SIGTERM)
        assert pool.submit(jobs.double, 2).result(LONG) == 4
        status = pool.status()
        assert (status["crashed"], pool.crashes()) == (0, [])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("sandbox", ["default", "strict"])
def test_confined_workers_start_in_both_modes(
    method: str, sandbox: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Workers cannot access the caller's folders.
    tmp_path.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    context = multiprocessing.get_context(method)
    with BulkheadExecutor(2, mp_context=context, sandbox=sandbox, max_tasks_per_child=1) as pool:
        folders = [future.result(LONG) for future in [pool.submit(jobs.temporary_file) for _ in range(8)]]
        assert str(tmp_path) not in folders
        assert method == "spawn" or len(set(folders)) == 8
        with pytest.raises(WorkerCrashed):
            pool.submit(jobs.segfault).result(LONG)
    with BulkheadExecutor(1, mp_context=context, sandbox=sandbox, env={"HOME": "/nowhere"}) as pool:
        assert pool.submit(jobs.variable, "HOME").result(LONG) == "/nowhere"
        confinement = pool.status()["workers"][0]["confinement"]
        assert confinement["profile"] == sandbox
        assert confinement["inherited"] == (method == "forkserver")


@pytest.mark.parametrize("sandbox", ["none", "default", "strict"])
def test_modules_that_start_threads_are_imported_by_each_worker(
    sandbox: str, capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("forkserver")
    with BulkheadExecutor(2, mp_context=context, preload=["threaded"], sandbox=sandbox) as pool:
        assert pool.submit(jobs.loaded, "threaded").result(LONG)
        with pytest.raises(WorkerCrashed):
            pool.submit(jobs.segfault).result(LONG)
        assert pool.submit(jobs.loaded, "threaded").result(LONG)
        # Programs and pools started by calls must not inherit the variable.
        assert pool.submit(jobs.variable, "PYTHON_BULKHEAD_BARE").result(LONG) is None
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "RuntimeWarning" in line]
    assert "leaves the thread" in line


@pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="NOT RUN: cloudpickle is not installed")
def test_cloudpickle_sends_lambdas_and_local_classes() -> None:
    word = "closed over"
    with BulkheadExecutor(1, pickler="cloudpickle") as pool:
        assert pool.submit(lambda: word).result(LONG) == word
        made = pool.submit(lambda: type("Made", (), {"word": word})()).result(LONG)
        assert made.word == word


# Failures at the start.


def test_output_of_a_custom_pickler_can_begin_with_any_byte() -> None:
    with BulkheadExecutor(1, pickler="letters") as pool:
        assert [pool.submit(jobs.double, number).result(LONG) for number in range(8)] == [*range(0, 16, 2)]
        large = bytes(1 << 20)
        assert [pool.submit(jobs.echo, large).result(LONG) == large for _ in range(4)] == [True] * 4
        for _ in range(4):
            assert type(pool.submit(jobs.fail, "x").exception(LONG)) is ValueError
            assert "lambda" in str(pool.submit(jobs.raise_unpicklable).exception(LONG))


@pytest.mark.parametrize("sandbox", ["none", "default"])
def test_arguments_beyond_the_memory_limit_raise_memory_error(sandbox: str) -> None:
    large = bytes(100 << 20)
    with BulkheadExecutor(1, memory="96MiB", sandbox=sandbox) as pool:
        # The first call is sent through the socket, and the second one in a memory file.
        pids = {pool.submit(jobs.pid).result(LONG)}
        for argument in (large, large, pickle.PickleBuffer(large)):
            assert isinstance(pool.submit(len, argument).exception(LONG), MemoryError)
            pids.add(pool.submit(jobs.pid).result(LONG))
        assert len(pids) == 1


def test_failed_initializer_breaks_the_pool() -> None:
    # Deaths of workers that start slowly also count.
    config = {"restart": {"within": "10m"}}
    for initializer in (jobs.fail_to_start, jobs.die_at_start):
        with BulkheadExecutor(2, initializer=initializer, config=config) as pool:
            future = pool.submit(jobs.pid)
            with pytest.raises(BrokenProcessPool) as raised:
                future.result(LONG)
            if initializer is jobs.fail_to_start:
                assert "no licence" in str(raised.value)
            with pytest.raises(BrokenProcessPool):
                wait_for("the pool accepts no more calls", lambda: pool.submit(jobs.pid).exception(LONG) and None)


def test_missing_supervisor_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BULKHEAD_SUPERVISOR", str(tmp_path / "none"))
    with BulkheadExecutor(1) as pool, pytest.raises(SupervisorNotFound, match="BULKHEAD_SUPERVISOR"):
        pool.submit(jobs.pid)
    monkeypatch.delenv("BULKHEAD_SUPERVISOR")
    monkeypatch.setenv("PATH", str(tmp_path))
    if importlib.util.find_spec("bulkhead_supervisor") is None:
        with BulkheadExecutor(1) as pool, pytest.raises(SupervisorNotFound, match="pip install"):
            pool.submit(jobs.pid)


# Output, status.


def test_output_is_written_before_the_result(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_output, "CATCH_UP_SECONDS_MAX", LONG / 2)
    with BulkheadExecutor(1) as pool:
        pool.submit(jobs.complain, "worried").result(LONG)
        assert pool.submit(jobs.say, "line", 20_000).result(LONG) == 20_000
    told = capfd.readouterr()
    assert told.out == "line\n" * 20_000
    assert told.err == "worried\n"


def test_pool_reports_status_and_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_private, "REPORT_SECONDS_MAX", LONG)
    with BulkheadExecutor(1) as pool:
        with pytest.raises(RuntimeError):
            pool.status()
        with pytest.raises(WorkerCrashed) as raised:
            pool.submit(jobs.segfault).result(LONG)
        assert raised.value.outcome.reason == "signal"
        assert str(raised.value).endswith(f"; crash report {raised.value.outcome.report}")
        assert "in segfault" in str(raised.value.__cause__)
        assert pool.submit(jobs.double, 1).result(LONG) == 2
        status = pool.status()
        assert (status["done"], status["crashed"]) == (1, 1)
        (crash,) = wait_for("there is a report", pool.crashes)
        # The stack printed by faulthandler for the function that died.
        assert "in segfault" in str(crash)


# Threads, asyncio, nesting.


def test_many_threads_share_a_pool(pool: BulkheadExecutor) -> None:
    def submits(base: int) -> None:
        numbers = range(base, base + 200)
        assert list(pool.map(jobs.double, numbers)) == [number * 2 for number in numbers]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for future in [threads.submit(submits, base) for base in range(0, 1600, 200)]:
            future.result(LONG)


def test_asyncio_can_await_and_abandon_calls(pool: BulkheadExecutor, tmp_path: Path) -> None:
    note = str(tmp_path / "note")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await asyncio.gather(*(loop.run_in_executor(pool, jobs.double, n) for n in range(50))) == [
            n * 2 for n in range(50)
        ]
        with pytest.raises((TimeoutError, asyncio.TimeoutError)):
            await asyncio.wait_for(loop.run_in_executor(pool, jobs.hang, note), 1)
        with pytest.raises(TimeoutError):
            await loop.run_in_executor(pool.with_options(timeout=0.1), jobs.hang)

    asyncio.run(main())
    pids = list(map(int, (read(note) or "").split()))
    wait_for("the processes of the abandoned call are gone", lambda: not any(map(is_running, pids)))


def test_pool_can_run_within_a_worker(pool: BulkheadExecutor) -> None:
    assert pool.submit(jobs.nested, 21).result(LONG) == 42


# Shutdown.


def test_shutdown_finishes_or_cancels_pending_calls(tmp_path: Path) -> None:
    pool = BulkheadExecutor(1)
    futures = [pool.submit(jobs.double, number) for number in range(300)]
    pool.shutdown()
    assert [future.result(0) for future in futures] == [number * 2 for number in range(300)]
    for _ in range(2):
        pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(jobs.pid)
    pool = BulkheadExecutor(1)
    running = pool.submit(jobs.note_and_wait, str(tmp_path), 1)
    futures = [pool.submit(jobs.sleep, 0.02) for _ in range(300)]
    # The running call ends after the shutdown has cancelled the last call.
    futures[-1].add_done_callback(lambda _: (tmp_path / "go").touch())
    pool.shutdown(cancel_futures=True)
    assert running.result(0) == 1
    assert sum(future.cancelled() for future in futures) > 200
    assert all(future.cancelled() or future.result(0) == 0.02 for future in futures)
    BulkheadExecutor(1).shutdown()


def test_closed_pool_leaves_no_process_or_file() -> None:
    before = {*os.listdir("/tmp")}, threading.active_count()
    with BulkheadExecutor(3) as pool:
        pool.submit(jobs.pid).result(LONG)
        supervisor = pool._pool.supervisor()
        pids: set[int] = set()

        def all_run() -> bool:
            nonlocal pids
            pids = tree(supervisor.pid or 0)
            return len(pids) >= 5

        wait_for("all processes are running", all_run)
        assert os.path.isdir(supervisor.folder)
    assert not any(map(is_running, pids))
    assert not os.path.exists(supervisor.folder)
    assert threading.active_count() <= before[1]
    # An executor that is dropped without shutdown ends after its calls.
    pool = BulkheadExecutor(1)
    future = pool.submit(jobs.sleep, 0.1)
    supervisor = pool._pool.supervisor()
    del pool
    gc.collect()
    assert future.result(LONG) == 0.1
    wait_for("the supervisor exits", lambda: not supervisor.is_alive() and not os.path.exists(supervisor.folder))


def test_terminate_workers_fails_pending_calls(tmp_path: Path) -> None:
    pool = BulkheadExecutor(1)
    note = str(tmp_path / "note")
    futures = [pool.submit(jobs.hang, note), *(pool.submit(jobs.pid) for _ in range(200))]
    pids = list(map(int, wait_for("the call runs", lambda: read(note)).split()))
    pool.terminate_workers()
    for future in futures:
        with pytest.raises(BrokenProcessPool):
            future.result(LONG)
    wait_for("the process tree is gone", lambda: not any(map(is_running, pids)))
    with pytest.raises((BrokenProcessPool, RuntimeError)):
        pool.submit(jobs.pid)


def test_death_of_the_supervisor_fails_its_calls() -> None:
    with BulkheadExecutor(1) as pool:
        running = pool.submit(jobs.sleep, 600)
        rest = [pool.submit(jobs.double, number) for number in range(200)]
        pid = pool._pool.supervisor().pid
        assert pid is not None
        os.kill(pid, 9)
        with pytest.raises(BrokenProcessPool):
            running.result(LONG)
        # Calls that were not sent to the old supervisor are sent to the next supervisor.
        outcomes = [future.exception(LONG) for future in rest]
        assert outcomes[-1] is None
        assert all(isinstance(each, (BrokenProcessPool, type(None))) for each in outcomes)
        assert pool.submit(jobs.double, 4).result(LONG) == 8


def test_forked_child_uses_another_pool() -> None:
    ended = script("""
        import os, jobs
        from bulkhead import BulkheadExecutor
        pool = BulkheadExecutor(1)
        first = pool.submit(jobs.pid).result(60)
        child = os.fork()
        if not child:
            second = pool.submit(jobs.pid).result(60)
            assert second != first
            pool.shutdown()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.submit(jobs.pid).result(60) == first
        children = []
        for _ in range(3):  # as gunicorn does, with a pool that was not used before
            if not (pid := os.fork()):
                with BulkheadExecutor(1) as own:
                    assert own.submit(jobs.double, 2).result(60) == 4
                assert pool.submit(jobs.double, 2).result(60) == 4
                raise SystemExit(0)
            children.append(pid)
        assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
        assert pool.submit(jobs.pid).result(60) == first
        print("served")
    """)
    assert (ended.stdout, ended.returncode) == ("served\n", 0), ended.stderr


def test_interpreter_exit_finishes_pending_calls() -> None:
    ended = script("""
        import jobs
        from bulkhead import BulkheadExecutor
        if __name__ == "__main__":
            pool = BulkheadExecutor(2)
            for number in range(100):
                pool.submit(jobs.say, f"call {number}")
            print(pool._pool.supervisor().folder, flush=True)
    """)
    assert (ended.stderr, ended.returncode) == ("", 0)
    # A worker may write first.
    folder, *lines = sorted(ended.stdout.splitlines())
    assert lines == sorted(f"call {number}" for number in range(100))
    assert not os.path.exists(folder)


def test_calling_functions_in_a_script_requires_the_main_guard(tmp_path: Path) -> None:
    body = """
        from bulkhead import BulkheadExecutor
        def triple(number):
            return number * 3
        {guard}
            with BulkheadExecutor(1) as pool:
                print(pool.submit(triple, 14).result(60))
    """
    for guard, words in (('if __name__ == "__main__":', "42\n"), ("if True:", "")):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(body).format(guard=guard))
        ended = subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=5 * LONG,
            check=False,
        )
        assert ended.stdout == words, ended.stderr
        if not words:
            assert "if __name__ == '__main__':" in ended.stderr


def test_pool_is_usable_after_ctrl_c() -> None:
    code = """
        import concurrent.futures, contextlib, jobs, sys
        from bulkhead import BulkheadExecutor
        pool = BulkheadExecutor(1)
        future = pool.submit(jobs.sleep, 600)
        try:
            print(pool._pool.supervisor().pid, pool._pool.supervisor().folder, flush=True)
            # An interpreter that waits without a limit does not notice a signal that comes just before it sleeps.
            while not future.done():
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    future.result(2)
        except KeyboardInterrupt:
            future.cancel()
            assert pool.submit(jobs.double, 2).result(60) == 4
            print("served", flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    pid, folder = child.stdout.readline().split()
    wait_for("the program is waiting", lambda: is_sleeping(child.pid))
    os.killpg(child.pid, 2)
    assert child.stdout.read() == "served\n"
    assert child.wait(LONG) == 0
    wait_for("the supervisor and its folder are gone", lambda: not is_running(int(pid)) and not os.path.exists(folder))
    child.stdout.close()


class Interrupted(BaseException):
    """Raised by a signal handler, like KeyboardInterrupt."""


def test_signal_exceptions_during_submit_do_not_lose_calls() -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    chance = random.Random(3)
    futures: list[tuple[int, concurrent.futures.Future[int]]] = []

    def submit_some(pool: BulkheadExecutor) -> None:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.003))
        for number in range(200):
            futures.append((number, pool.submit(jobs.double, number)))
            # Ensures that most calls are sent to the supervisor immediately.
            while len(pool._pool._sent) > 10:
                time.sleep(0.0001)

    def be_interrupted(pool: BulkheadExecutor) -> None:
        try:
            submit_some(pool)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    interruptions = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with BulkheadExecutor(2) as pool:
            pool.submit(jobs.double, 0).result(LONG)
            for _ in range(500):
                try:
                    be_interrupted(pool)
                except Interrupted:
                    interruptions += 1
            for number, future in futures:
                assert future.result(LONG) == number * 2
            assert pool.submit(jobs.double, 4).result(LONG) == 8
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interruptions > 100


def test_import_loads_no_heavy_modules() -> None:
    loaded = script(
        "import bulkhead, sys; heavy = {'concurrent.futures', 'multiprocessing', 'ssl', 'asyncio'}; "
        "print(list(heavy & sys.modules.keys()))"
    )
    assert loaded.stdout.strip() == "[]", loaded


def test_grandchild_can_write_to_inherited_files(pool: BulkheadExecutor, tmp_path: Path) -> None:
    assert pool.submit(jobs.fork_twice, str(tmp_path)).result(LONG) == ["written"] * 8


def test_pool_recovers_after_workers_failed_to_start(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    main = tmp_path / "main.py"
    main.write_text(
        textwrap.dedent("""
        import os, sys, time
        if os.path.exists(sys.argv[1]):
            raise OSError("it cannot be imported for a while")
        from bulkhead import BulkheadExecutor
        if __name__ == "__main__":
            with BulkheadExecutor(1) as pool:
                assert pool.submit(pow, 2, 2).result(120) == 4
                open(sys.argv[1], "w").close()
                pool.submit(os._exit, 1).exception(120)
                print(type(pool.submit(pow, 2, 3).exception(120)).__name__)
                os.unlink(sys.argv[1])
                until = time.monotonic() + 120
                while pool.submit(pow, 2, 3).exception(120) is not None:
                    assert time.monotonic() < until
                    time.sleep(0.1)
                print("goes on")
        """)
    )
    ran = subprocess.run(
        [sys.executable, main, flag],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=5 * LONG,
        check=False,
    )
    assert ran.stdout.split("\n")[:2] == ["BrokenProcessPool", "goes on"], ran.stdout + ran.stderr


def test_script_from_standard_input_can_call_module_functions() -> None:
    code = "from bulkhead import BulkheadExecutor\npool = BulkheadExecutor(1)\nprint(pool.submit(pow, 2, 3).result(60))"
    ran = subprocess.run(
        [sys.executable, "-"],
        input=code,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
    assert ran.stdout == "8\n", ran.stdout + ran.stderr


def test_errors_name_options_with_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="env: 'A'"):
        BulkheadExecutor(1, env={"A": 1})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        BulkheadExecutor(1, timeout="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout must be more than 0"):
        BulkheadExecutor(1, timeout=0)
    with pytest.raises(TypeError, match="preload must be a list"):
        BulkheadExecutor(1, preload="json")
    with pytest.raises(TypeError, match="sandbox must be the name of a profile or a dict, not bool"):
        BulkheadExecutor(1, sandbox=True)  # type: ignore[arg-type]


def test_broken_standard_output_does_not_fail_other_calls() -> None:
    with BulkheadExecutor(1) as pool:
        assert pool.submit(jobs.replace_output).result(LONG) == pool.submit(jobs.pid).result(LONG)


def test_too_little_memory_for_a_worker_is_reported() -> None:
    # There is enough memory for an interpreter, but not for the stack of a thread.
    rlimits = {"stack": "64GiB"}
    with (
        BulkheadExecutor(1, memory="512MiB", config={"rlimits": rlimits}) as pool,
        pytest.raises(BrokenProcessPool, match="`memory`"),
    ):
        pool.submit(jobs.pid).result(LONG)


def test_failed_join_of_a_payload_fails_only_its_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Imitates a lack of memory in the receiving thread, on which all calls depend."""
    with BulkheadExecutor(1) as pool:
        assert pool.submit(jobs.double, 4).result(LONG) == 8
        thread, dump = pool._pool._thread, pool._pool.pickler.dump

        def dump_or_fail(value: Any) -> Any:
            return [memoryview(bytearray(4))[::2]] * 2 if value[1] == ("large",) else dump(value)

        monkeypatch.setattr(pool._pool.pickler, "dump", dump_or_fail)
        # The other calls wait for the first call, so that the receiving thread sends them.
        first = pool.submit(jobs.note_and_wait, str(tmp_path), 1)
        futures = [pool.submit(jobs.double, "large" if number == 30 else number) for number in range(60)]
        (tmp_path / "go").touch()
        assert first.exception(LONG) is None
        concurrent.futures.wait(futures, LONG)
        assert [number for number, future in enumerate(futures) if future.exception()] == [30]
        assert pool._pool._thread is thread


def test_custom_pickler_receives_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_pickler.py").write_text(
        "import pickle\n"
        "def dumps(value):\n    return pickle.dumps(value)\n"
        "def loads(data):\n    return pickle.loads(data.removesuffix(b'?'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with BulkheadExecutor(1, pickler="own_pickler") as pool:
        for size in (8, 1 << 20, 1 << 20):
            assert pool.submit(jobs.plain_data, bytes(size)).result(LONG) == bytes(size)
