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
        wait_for("the exception is logged", lambda: "TimeoutError: the handler is too slow" in own.log())
        assert "an exception reached the worker's job loop" in own.log()
        assert client.call("one", b"goes on").payload == b"goes on"


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
