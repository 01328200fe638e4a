"""Tests of workers whose handlers or ``init`` function disturb the worker itself: its threads, locks or descriptors."""

from __future__ import annotations

import importlib.util
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pools import LONG, wait_for
from running import SOURCE, WORKER, Supervisor, running

import bulkhead
from bulkhead import Client, JobError, _template

MODES = ["spawn", "fork"]


@contextmanager
def serving(folder: Path, code: str, **keys: Any) -> Iterator[tuple[Supervisor, Client]]:
    """Runs a bulkhead ``one``, whose workers serve a module with this code."""
    (folder / "faulty.py").write_text("import os, sys, threading, time, bulkhead\n" + textwrap.dedent(code))
    worker = {
        **WORKER,
        "command": [*WORKER["command"][:-1], "faulty"],
        "env": {"PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}"},
        "sandbox": {"profile": "none"},
    }
    with running(one={**worker, **keys}) as own, Client(own.socket) as client:
        yield own, client


def failure(client: Client, payload: bytes = b"", operation: str = "", **options: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        client.call("one", payload, operation=operation, **options)
    return caught.value


# Errors of handlers.


@pytest.mark.parametrize("limit", [1, 2])
def test_exception_without_free_descriptors_fails_only_its_job(limit: int, tmp_path: Path) -> None:
    code = """
        @bulkhead.handler("leak")
        def leak(payload, ctx):
            while True:
                os.open(os.devnull, os.O_RDONLY)

        @bulkhead.handler
        def echo(payload, ctx):
            return payload
    """
    with serving(tmp_path, code, max_in_flight=limit, rlimits={"nofile": 256}) as (own, client):
        assert "Too many open files" in failure(client, operation="leak").outcome.message
        assert client.call("one", b"goes on").payload == b"goes on"
        assert own.snapshot("one")["restarts"] == 0


# Exceptions between jobs, as raised by profilers, time limits and signal handlers.


def test_exception_in_the_job_loop_ends_the_worker(tmp_path: Path) -> None:
    code = """
        def raise_after_handler(frame, event, argument):
            sys.settrace(None)
            raise TimeoutError("the handler is too slow")

        @bulkhead.handler("limited")
        def limited(payload, ctx):
            while threading.current_thread() is threading.main_thread():
                time.sleep(0.01)
            sys.settrace(raise_after_handler)

        @bulkhead.handler
        def echo(payload, ctx):
            return payload
    """
    with serving(tmp_path, code, max_in_flight=2) as (own, client):
        jobs = [client.submit("one", operation="limited", deadline=LONG) for _ in range(2)]
        assert all(isinstance(job.exception(2 * LONG), bulkhead.Crashed) for job in jobs)
        wait_for("the exit is explained", lambda: "job loop; the worker exits" in own.log())
        assert "TimeoutError: the handler is too slow" in own.log()
        assert client.call("one", b"goes on").payload == b"goes on"


def test_exception_while_reading_the_link_is_reported(tmp_path: Path) -> None:
    code = """
        def raise_in_read(frame, event, argument):
            if frame.f_code.co_name == "read":
                sys.setprofile(None)
                raise TimeoutError("the handler is too slow")

        @bulkhead.handler
        def limited(payload, ctx):
            sys.setprofile(raise_in_read)
    """
    with serving(tmp_path, code) as (own, client):

        def has_exited() -> bool:
            # The watcher's thread may have read the link for the previous job.
            client.submit("one", deadline=LONG).exception(2 * LONG)
            return "the worker exits" in own.log()

        wait_for("a worker has exited", has_exited)
        assert "TimeoutError: the handler is too slow" in own.log()
        assert "closed or replaced" not in own.log()


def test_coroutine_of_a_failed_job_is_not_run(tmp_path: Path) -> None:
    code = """
        import asyncio

        def raise_after_scheduling(frame, event, argument):
            if frame.f_code.co_name == "call_soon_threadsafe":
                if event == "return":
                    sys.settrace(None)
                    raise TimeoutError("the handler is too slow")
                return raise_after_scheduling

        @bulkhead.handler("block")
        async def block(payload, ctx):
            open(payload + b".began", "w").close()
            while not os.path.exists(payload):
                time.sleep(0.01)

        @bulkhead.handler("limited")
        def limited(payload, ctx):
            sys.settrace(raise_after_scheduling)
            return create(payload)

        async def create(path):
            open(path, "w").close()

        @bulkhead.handler
        async def echo(payload, ctx):
            await asyncio.sleep(0)
            return payload
    """
    with serving(tmp_path, code, max_in_flight=2) as (own, client):
        go, ran = tmp_path / "go", tmp_path / "ran"
        blocking = client.submit("one", bytes(go), operation="block")
        wait_for("the loop is blocked", (tmp_path / "go.began").exists)
        assert "TimeoutError" in failure(client, bytes(ran), "limited").outcome.message
        go.touch()
        blocking.result(LONG)
        assert client.call("one", b"x").payload == b"x"
        assert not ran.exists()
        assert own.snapshot("one")["late_replies"] == 0


def test_event_loop_is_created_again_after_a_failure(tmp_path: Path) -> None:
    code = """
        import asyncio

        start = threading.Thread.start

        def fail(thread):
            raise RuntimeError("can't start new thread")

        async def hello():
            return "hello"

        @bulkhead.handler("fail")
        def first(payload, ctx):
            threading.Thread.start = fail
            return hello()

        @bulkhead.handler
        def later(payload, ctx):
            threading.Thread.start = start
            return hello()
    """
    with serving(tmp_path, code) as (_, client):
        assert "can't start new thread" in failure(client, operation="fail", deadline=LONG).outcome.message
        assert client.call("one", deadline=LONG).payload == b"hello"


# Templates.


def test_template_waits_for_threads_that_are_exiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.13, a thread can be joined before the kernel has removed it."""
    names = [["'exiting'"], ["'exiting'"], []]
    monkeypatch.setattr(_template, "threads", lambda: names.pop(0))
    _template._check_threads()
    assert names == []
    monkeypatch.setattr(_template, "threads", lambda: ["'running'"])
    with pytest.raises(_template._CannotFork, match="left 'running'"):
        _template._check_threads()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["sys.exit(0)", "return", "raise ValueError"])
def test_child_forked_by_init_is_not_a_worker(mode: str, end: str, tmp_path: Path) -> None:
    code = f"""
        @bulkhead.initializer
        def init():
            child = os.fork()
            if child == 0:
                {end}
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        @bulkhead.handler
        def status(payload, ctx):
            return str(ctx.state)
    """
    with serving(tmp_path, code, start={"mode": mode}, restart={"max": 1, "within": "10m"}) as (_, client):
        assert client.call("one").payload == (b"0" if end == "sys.exit(0)" else b"1")


@pytest.mark.parametrize("mode", MODES)
def test_worker_waits_for_background_threads_before_it_exits(mode: str, tmp_path: Path) -> None:
    code = """
        import atexit

        @bulkhead.handler
        def begin(payload, ctx):
            def run():
                while not os.path.exists(payload + b"/go"):
                    time.sleep(0.01)
                open(payload + b"/done", "w").close()

            threading.Thread(target=run).start()
            atexit.register(lambda: open(payload + b"/exiting", "w").close())
    """
    with serving(tmp_path, code, start={"mode": mode}, recycle={"jobs": 1}, grace="60s") as (own, client):
        pid = client.call("one", bytes(tmp_path)).outcome.worker_pid
        wait_for("another worker is ready", lambda: set(own.pids("one")) - {pid})
        (tmp_path / "go").touch()
        wait_for("the thread has ended", (tmp_path / "done").exists)
        wait_for("the exit handler has run", (tmp_path / "exiting").exists)


# Children of handlers.


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("end", ["sys.exit(0)", "raise ValueError", "return"])
def test_child_of_a_handler_writes_its_buffered_files(end: str, kind: str, tmp_path: Path) -> None:
    code = f"""
        @bulkhead.handler
        {kind} fork(payload, ctx):
            child = os.fork()
            if child == 0:
                file = open(payload, "w")
                file.write("by the child")
                sys.stdout.write("output")
                try:
                    raise KeyError
                except KeyError:
                    {end}
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(" of the child")
            return str(status)
    """
    with serving(tmp_path, code) as (own, client):
        path = tmp_path / "file"
        assert client.call("one", bytes(path)).payload == (b"0" if end == "sys.exit(0)" else b"1")
        assert path.read_text() == "by the child"
        wait_for("the line is logged", lambda: "output of the child" in own.log())
        if end == "raise ValueError":
            wait_for("the traceback is logged", lambda: "ValueError" in own.log())


# Progress reports.


def test_signal_handler_can_report_progress(tmp_path: Path) -> None:
    """The profile functions imitate a signal that arrives while the worker sends a frame."""
    code = """
        waiting = []

        def profile(call):
            def notice(frame, event, argument):
                if event == "c_call" and argument.__name__ == "sendall":
                    sys.setprofile(None)
                    call()
            sys.setprofile(notice)

        @bulkhead.handler("report")
        def report(payload, ctx):
            profile(lambda: ctx.progress(0.5, "during a report"))
            ctx.progress(0.1, "by the handler")
            return b"reported"

        @bulkhead.handler("wait")
        def wait(payload, ctx):
            waiting.append(ctx)
            while not os.path.exists(payload):
                time.sleep(0.01)

        @bulkhead.handler("reply")
        def reply(payload, ctx):
            while not waiting:
                time.sleep(0.01)
            profile(lambda: waiting[0].progress(0.9, "during a reply"))
            return b"replied"
    """
    with serving(tmp_path, code, max_in_flight=2) as (_, client):
        heard: list[str] = []
        waiting = client.submit("one", bytes(tmp_path / "go"), operation="wait")
        waiting.on_progress(lambda _, text: heard.append(text))
        assert client.call("one", operation="reply").payload == b"replied"
        (tmp_path / "go").touch()
        waiting.result(LONG)
        assert heard == ["during a reply"]
        reporting = client.submit("one", operation="report")
        reporting.on_progress(lambda _, text: heard.append(text))
        assert reporting.result(LONG).payload == b"reported"
        assert heard[-1] == "during a report"


def test_exception_of_a_signal_handler_leaves_no_lock_held(tmp_path: Path) -> None:
    """The signal arrives after each call in turn, because signal handlers run there."""
    code = """
        import signal
        import bulkhead._serve
        bulkhead._serve.PROGRESS_SECONDS = 0

        def fail(number, frame):
            raise TimeoutError("soft limit")

        signal.signal(signal.SIGALRM, fail)

        @bulkhead.handler
        def report(payload, ctx):
            moment = 0
            while True:
                left = [moment]

                def interrupt(frame, event, argument):
                    if event == "c_return":
                        left[0] -= 1
                        if left[0] < 0:
                            sys.setprofile(None)
                            signal.raise_signal(signal.SIGALRM)

                sys.setprofile(interrupt)
                try:
                    ctx.progress(0.5, "interrupted")
                    sys.setprofile(None)
                    break
                except TimeoutError:
                    moment += 1
            ctx.progress(0.9, "last")
            return str(moment)
    """
    with serving(tmp_path, code) as (_, client):
        heard: list[str] = []
        job = client.submit("one", deadline=LONG)
        job.on_progress(lambda _, text: heard.append(text))
        assert int(job.result(LONG).payload) > 5
        assert heard[-1] == "last"


# Unsuitable programs.


@pytest.mark.parametrize("mode", MODES)
def test_error_explains_serve_in_a_served_module(mode: str, tmp_path: Path) -> None:
    code = "bulkhead.serve(lambda payload, ctx: payload)"
    with serving(tmp_path, code, start={"mode": mode}, restart={"max": 1, "within": "10m"}) as (_, client):
        error = str(failure(client))
        assert "initialisation failed: RuntimeError: this process is already a worker" in error
        assert "remove the call of serve()" in error


GREEN_HANDLERS = """
    from gevent import monkey
    monkey.patch_all(thread={})

    @bulkhead.handler("sync")
    def sync(payload, ctx):
        time.sleep(0.01)
        return "slept"

    async def sleep():
        import asyncio

        await asyncio.sleep(0.01)
        return "slept"

    @bulkhead.handler("awaitable")
    def awaitable(payload, ctx):
        return sleep()
"""
ASYNC_HANDLER = """
    @bulkhead.handler("async")
    async def wait(payload, ctx):
        return await sleep()
"""


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="NOT RUN: gevent is not installed")
@pytest.mark.parametrize("mode", MODES)
def test_error_explains_unsuitable_gevent_patches(mode: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"start": {"mode": mode}, "restart": {"max": 1, "within": "10m"}}
    hint = "call `gevent.monkey.patch_all(thread=False)`"
    with serving(tmp_path, GREEN_HANDLERS.format(True), max_in_flight=2, **keys) as (_, client):
        assert hint in str(failure(client, operation="sync"))
    with serving(tmp_path, GREEN_HANDLERS.format(True) + ASYNC_HANDLER, **keys) as (_, client):
        assert hint in str(failure(client, operation="sync"))
    with serving(tmp_path, GREEN_HANDLERS.format(True), **keys) as (_, client):
        assert client.call("one", operation="sync").payload == b"slept"
        assert hint in str(failure(client, operation="awaitable"))
        assert client.call("one", operation="sync").payload == b"slept"
    with serving(tmp_path, GREEN_HANDLERS.format(False) + ASYNC_HANDLER, max_in_flight=2, **keys) as (_, client):
        for operation in ("sync", "awaitable", "async"):
            jobs = [client.submit("one", operation=operation) for _ in range(8)]
            assert [job.result(LONG).payload for job in jobs] == [b"slept"] * 8
