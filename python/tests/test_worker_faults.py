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
