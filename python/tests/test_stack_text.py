"""Tests of stacks taken at a deadline: as written by a worker, in crash reports, and in a pool's exceptions."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import handlers
import jobs
import pytest
from pools import LONG, read, wait_for
from running import HERE, SOURCE, Supervisor, running, sandboxed

import bulkhead._pool
from bulkhead import BulkheadExecutor, CallTimeout, Client, DeadlineExceeded, _link, _stack_text, _wire
from bulkhead._admin import AdminError
from bulkhead._pool import _without_own_frames
from bulkhead._private import PrivateSupervisor

FILE_BYTES = _link.JOURNAL_BYTES + _stack_text.FILE_BYTES


class FalseSupervisor:
    """Runs one worker, and performs the supervisor's part of a stack request."""

    def __init__(self, *command: str, file_bytes: int = FILE_BYTES) -> None:
        self.file = os.memfd_create("journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, file_bytes)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        self._link, theirs = socket.socketpair()
        self._link.settimeout(LONG)
        self._reader = _wire.Reader(self._link.recv, self._link.recv_into)
        environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{HERE}", "BULKHEAD_LINK_FD": str(theirs.fileno())}
        self._process = subprocess.Popen([sys.executable, *command], env=environment, pass_fds=[theirs.fileno()])
        self.pid = self._process.pid
        theirs.close()
        hello = self.receive(_wire.HELLO)
        self.capabilities: int = struct.unpack_from("<HHBIQ", hello[2])[-1]
        socket.send_fds(self._link, [_wire.frame(_wire.JOURNAL, 0)], [self.file])
        welcome = struct.pack("<HIQIIIIQ", 1, 0xFFFF_FFFF, 0, 0, 1, 1, 100, 1 << 20) + bytes(8) + _wire.EMPTY
        self._link.sendall(_wire.frame(_wire.WORKER_WELCOME, _wire.MAGIC, welcome))
        self.receive(_wire.READY)

    def receive(self, kind: int) -> _wire.Frame:
        """Returns the next frame of a kind, and drops all earlier frames."""
        while True:
            while self._reader.frames:
                frame = self._reader.frames.popleft()
                if frame[0] == kind:
                    return frame
            self._reader.read()

    def submit(self, operation: str, payload: bytes = b"") -> None:
        metadata = _wire.text(operation) + _wire.text("") + struct.pack("<Q", 60_000_000) + _wire.EMPTY
        self._link.sendall(_wire.frame(_wire.JOB, 1, metadata, payload))

    def call(self, operation: str, payload: bytes = b"") -> bytes:
        self.submit(operation, payload)
        return bytes(self.receive(_wire.RESULT)[3])

    def request(self) -> None:
        os.pwrite(self.file, bytes(_stack_text.FILE_BYTES), _link.JOURNAL_BYTES)
        os.lseek(self.file, _link.JOURNAL_BYTES, os.SEEK_SET)
        os.kill(self.pid, _stack_text.SIGNAL)

    def text(self) -> str:
        return os.pread(self.file, 65_536, _link.JOURNAL_BYTES).partition(b"\0")[0].decode()

    def stacks(self) -> str:
        """Requests the stacks until there is a text, and returns the text.

        A request that arrives while another thread is still writing the text for the previous request has no effect.
        """

        def found() -> str | None:
            self.request()
            with contextlib.suppress(AssertionError):
                wait_for("the text has the main thread", lambda: "in _run_handlers" in self.text(), 1.0)
                return self.text()
            return None

        return wait_for("the stacks are available", found)

    def is_handled(self) -> bool:
        with open(f"/proc/{self.pid}/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (_stack_text.SIGNAL - 1) & 1)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._link.close()
        os.close(self.file)


@contextlib.contextmanager
def worker(*command: str, file_bytes: int = FILE_BYTES) -> Iterator[FalseSupervisor]:
    supervisor = FalseSupervisor(*command, file_bytes=file_bytes)
    try:
        yield supervisor
    finally:
        supervisor.end()


HANDLERS = ("-m", "bulkhead", "serve", "handlers")


def line_in(stacks: str, function: Callable[..., object]) -> int:
    """Returns the line of a function in the stacks, or 0 if the function is not in the stacks."""
    code = function.__code__
    for line in stacks.splitlines():
        if line.startswith(f'  File "{code.co_filename}", line ') and line.endswith(f" in {code.co_name}"):
            return int(line.split()[-3])
    return 0


def body(function: Callable[..., object]) -> set[int]:
    """Returns the lines of a function after its first line."""
    lines = {line for _, _, line in function.__code__.co_lines() if line is not None}
    return lines - {function.__code__.co_firstlineno}


@pytest.mark.parametrize(("operation", "payload"), [("sleep", b"600"), ("spin", b""), ("hold", b"600")])
def test_worker_writes_the_stack_of_a_running_handler(operation: str, payload: bytes) -> None:
    function: Any = getattr(handlers, operation)
    with worker(*HANDLERS) as supervisor:
        assert supervisor.capabilities & _wire.WORKER_STACK_TEXT
        supervisor.submit(operation, payload)
        line = wait_for("the handler is running", lambda: line_in(supervisor.stacks(), function))
        assert line in body(function)

        def is_replaced() -> bool:
            return supervisor.stacks().count("in _run_handlers") == 1

        # A slow worker can write the texts for two requests one after the other.
        wait_for("the text for a later request replaces the text for an earlier request", is_replaced)


def test_worker_survives_stack_requests_without_a_job() -> None:
    with worker(*HANDLERS) as supervisor:
        wait_for("the link's thread is running", lambda: "in _watch" in supervisor.stacks())
        assert supervisor.call("", b"x") == b"x"
        # The text is longer than the file.
        os.lseek(supervisor.file, FILE_BYTES - 10, os.SEEK_SET)
        os.kill(supervisor.pid, _stack_text.SIGNAL)
        wait_for("the file is full", lambda: os.pread(supervisor.file, 10, FILE_BYTES - 10).strip(b"\0"))
        assert supervisor.call("", b"x") == b"x"


def test_worker_with_a_small_journal_registers_no_handler() -> None:
    with worker(*HANDLERS, file_bytes=_link.JOURNAL_BYTES) as supervisor:
        assert supervisor.call("", b"x") == b"x"
        assert not supervisor.is_handled()


#: Operations that change the handling of the signal, or fork a process that sends the signal to itself.
PROGRAM = """
import faulthandler, os, signal, tempfile
from bulkhead import serve

seen, files = [], []

def own(payload, ctx):
    signal.signal(62, lambda *_: seen.append("own handler"))

def own_file(payload, ctx):
    files.append(tempfile.TemporaryFile())
    faulthandler.register(62, file=files[0], chain=False)

def unregister(payload, ctx):
    faulthandler.unregister(62)

def disable(payload, ctx):
    faulthandler.disable()

def answer(payload, ctx):
    for file in files:
        file.seek(0)
        seen.append(file.read().decode())
    return "".join(seen)

def fork(payload, ctx):
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), 62)
        os._exit(40 + len(seen))
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

serve(operations={name: globals()[name] for name in NAMES})
"""
NAMES = ("own", "own_file", "unregister", "disable", "answer", "fork")
PROGRAM = PROGRAM.replace("NAMES", repr(NAMES))


@pytest.mark.parametrize(("change", "answer"), [("own", b"own handler"), ("own_file", b"in _run_handlers")])
def test_user_signal_handler_replaces_the_stack_text(change: str, answer: bytes) -> None:
    with worker("-c", PROGRAM) as supervisor:
        supervisor.call(change)
        supervisor.request()
        wait_for("the user code's signal handler has run", lambda: answer in supervisor.call("answer"))
        assert supervisor.text() == ""


def test_worker_ignores_stack_requests_after_unregistering() -> None:
    with worker("-c", PROGRAM) as supervisor:
        supervisor.call("unregister")
        supervisor.request()
        assert supervisor.call("answer") == b""
        assert supervisor.text() == ""


def test_worker_writes_stacks_after_faulthandler_was_disabled() -> None:
    with worker("-c", PROGRAM) as supervisor:
        supervisor.call("disable")
        assert "in _run_handlers" in supervisor.stacks()


def test_forked_process_does_not_write_to_its_parents_file() -> None:
    with worker("-c", PROGRAM) as supervisor:
        os.lseek(supervisor.file, _link.JOURNAL_BYTES, os.SEEK_SET)
        assert supervisor.call("fork") == b"40"
        assert supervisor.text() == ""
        assert "in _run_handlers" in supervisor.stacks()
        # The user code's signal handler also works in a forked process.
        supervisor.call("own")
        assert supervisor.call("fork") == b"41"


# Human-readable text.

#: Written by Python 3.11 for a call made by `map` with a `chunksize`.
STACKS = """Thread 0x00007f0c1d7fa6c0 (most recent call first):
  File "/venv/bulkhead/_serve.py", line 592 in _watch_link
  File "/venv/bulkhead/_serve.py", line 577 in _watch

Thread 0x00007f0c1dffb6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/app/own.py", line 9 in _run

Current thread 0x00007f0c2a0f3040 (most recent call first):
  File "/app/own.py", line 4 in hang
  File "/venv/bulkhead/_pool_worker.py", line 47 in <listcomp>
  File "/venv/bulkhead/_pool_worker.py", line 47 in process_chunk
  File "/venv/bulkhead/_pool_worker.py", line 186 in _run
  File "/venv/bulkhead/_pool_worker.py", line 300 in __call__
  File "<string>", line 1 in <module>
"""


def test_stack_of_a_call_omits_the_workers_frames() -> None:
    _, others, current = STACKS.split("\n\n")
    own = "\n".join(current.splitlines()[:2])
    assert _without_own_frames(STACKS) == f"{others}\n\n{own}"
    # A compiled program has relative paths.
    assert _without_own_frames(STACKS.replace("/venv/", "")) == f"{others}\n\n{own}"
    # The stack is deeper than `faulthandler` supports, or a thread has no frame of the call.
    deep = "Thread 0x1 (most recent call first):\n" + '  File "/app/own.py", line 4 in f\n' * 100 + "  ..."
    assert _without_own_frames(deep + "\n") == deep
    for frame in ('File "/venv/bulkhead/_pool_worker.py", line 9 in _run', "<no Python frame>"):
        assert _without_own_frames(f"Thread 0x1 (most recent call first):\n  {frame}\n") == ""
    assert _without_own_frames("") == ""


# A supervisor's reports. It takes stacks at most once per second, and on a busy machine not always in time.


def late_report(supervisor: Supervisor, client: Client, name: str, operation: str, payload: bytes) -> Any:
    """Runs a job beyond its deadline. Returns the report, or ``None`` if no report was written."""
    with pytest.raises(DeadlineExceeded) as raised:
        client.call(name, payload, operation=operation, deadline=0.5)
    outcome = raised.value.outcome
    if outcome.reason != "running" or outcome.report is None:
        return None

    def report() -> Any:
        status, found = supervisor.request("GET", f"/v1/crashes/{outcome.report}")
        return found if status == 200 else None

    found = wait_for("there is a report", report)
    assert found["cause"] == "deadline"
    return found


def stack_in_report(supervisor: Supervisor, client: Client, name: str, operation: str, payload: bytes) -> str:
    """Runs jobs beyond their deadline until a report contains the worker's text. Returns the text."""

    def found() -> str | None:
        report = late_report(supervisor, client, name, operation, payload)
        return report and str(report.get("runtime_stack") or "")

    return wait_for("a report contains the text", found, 3 * LONG)


@pytest.mark.parametrize("mode", ["spawn", "fork"])
@pytest.mark.parametrize("profile", ["none", "default", "strict"])
def test_report_on_a_late_job_contains_the_handlers_stack(profile: str, mode: str) -> None:
    keys = {**sandboxed(profile), **({"start": {"mode": "fork"}} if mode == "fork" else {})}
    with running(one=keys, many={**keys, "max_in_flight": 4}) as own, Client(own.socket) as client:
        # Connects without a deadline.
        assert client.call("one", b"x").payload == b"x"
        for name, operation in (("one", "sleep"), ("one", "hold"), ("many", "sleep")):
            function: Any = getattr(handlers, operation)
            assert line_in(stack_in_report(own, client, name, operation, b"600"), function) in body(function)
        assert client.call("one", b"x").payload == b"x"


@pytest.mark.parametrize("profile", ["none", "strict"])
def test_report_on_a_stopped_worker_contains_only_native_stacks(profile: str) -> None:
    with running(one=sandboxed(profile)) as own, Client(own.socket) as client:

        def stopped() -> Any:
            report = late_report(own, client, "one", "stop", b"")
            if report is None:
                return None
            path = f"/v1/crashes/{report['id']}"
            report = wait_for("the stacks", lambda: _with_native(own.request("GET", path)[1]))
            threads = report["native"].get("threads", [])
            # On a busy machine, the handler might not have stopped the worker at the deadline.
            has_stack = any(thread["state"] == "T" and thread["frames"] for thread in threads)
            return report if has_stack else None

        report = wait_for("a report has the stacks of the stopped worker", stopped, 3 * LONG)
        assert not report.get("runtime_stack")
        assert client.call("one", b"x").payload == b"x"


def _with_native(report: Any) -> Any:
    return report if "native" in report else None


def test_stack_request_does_not_kill_a_wrapper_script(tmp_path: Path) -> None:
    script, go = tmp_path / "worker.sh", tmp_path / "go"
    # The shell, which does not handle the signal, stays the parent of the worker.
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    keys = sandboxed("none")
    keys = {**keys, "command": [str(script), *keys["command"]], "max_in_flight": 2}
    with running(one=keys) as own, Client(own.socket) as client:
        assert client.call("one", b"x").payload == b"x"
        other = client.submit("one", os.fsencode(go), operation="wait")
        report = wait_for("a report", lambda: late_report(own, client, "one", "until-cancelled", b""), LONG)
        assert "runtime_stack" not in report
        go.touch()
        assert other.result(LONG).payload == b"waited"


# A pool's exceptions.


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def timeout_with_report(call: Callable[[], Any], is_wanted: Callable[[CallTimeout], object]) -> CallTimeout:
    """Makes calls until one times out and ``is_wanted`` accepts its exception. Returns the exception."""

    def found() -> CallTimeout | None:
        error = call().exception(LONG)
        assert isinstance(error, CallTimeout)
        return error if error.outcome.report is not None and is_wanted(error) else None

    return wait_for("a timeout has a report", found, 3 * LONG)


def has_stack(error: CallTimeout) -> bool:
    return "stack of the worker when the call timed out" in shown(error)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("sandbox", "tasks"), [("none", None), ("none", 1), ("default", None), ("strict", None), ("strict", 1)]
)
def test_timeout_of_a_call_shows_the_functions_position(method: str, sandbox: str, tasks: int | None) -> None:
    context = multiprocessing.get_context(method)
    with BulkheadExecutor(1, context, timeout=0.5, sandbox=sandbox, max_tasks_per_child=tasks) as pool:
        function: Any
        for function in (jobs.sleep, jobs.hold_the_lock_for):
            error = timeout_with_report(lambda: pool.submit(function, 600), has_stack)
            text = shown(error)
            assert line_in(text, function) in body(function), text
            assert "_pool_worker" not in text
            assert "_watch" not in text
        assert sys.version_info < (3, 11) or shown(pickle.loads(pickle.dumps(error))).endswith(text[-200:])
        crash = next(crash for crash in pool.crashes() if crash["id"] == error.outcome.report)
        assert crash["cause"] == "deadline"
        assert pool.with_options(timeout=LONG).submit(jobs.double, 1).result(LONG) == 2


@pytest.mark.parametrize(("function", "arguments"), [(jobs.spin, ()), (jobs.hold_the_lock, (10**12,))])
def test_timeout_of_a_busy_call_shows_the_functions_position(function: Any, arguments: tuple[Any, ...]) -> None:
    with BulkheadExecutor(1, timeout=0.5) as pool:
        try:
            error = timeout_with_report(lambda: pool.submit(function, *arguments), has_stack)
        except AssertionError:
            # The worker gets too little CPU time to write its stack within the supervisor's time limit.
            if os.getloadavg()[0] < 4 * (os.cpu_count() or 1):
                raise
            message = "NOT RUN: the machine is too busy"
            print(f"\n{message}", file=sys.__stderr__)
            pytest.skip(message)
        assert line_in(shown(error), function) in body(function)


def test_timeout_without_a_stack_text_shows_no_stack(tmp_path: Path) -> None:
    with BulkheadExecutor(1, timeout=0.5, initializer=jobs.handle_stack_signal) as pool:
        error = timeout_with_report(lambda: pool.submit(jobs.sleep, 600), lambda _: True)
        assert not has_stack(error)

        def report() -> Any:
            with contextlib.suppress(AdminError):
                return pool._pool.supervisor().get(f"/v1/crashes/{error.outcome.report}")
            return None

        assert "runtime_stack" not in wait_for("there is a report", report)
    # A stopped process does not handle signals.
    note = tmp_path / "note"
    with BulkheadExecutor(1, timeout=3, config={"health": {"heartbeat": "60s"}}) as pool:
        patient = pool.with_options(timeout=LONG)

        def has_no_stack() -> bool:
            pid = patient.submit(jobs.pid).result(LONG)
            note.unlink(missing_ok=True)
            future = pool.submit(jobs.spin, str(note))
            wait_for("the call runs", lambda: future.done() or read(note) is not None)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            error = future.exception(LONG)
            assert isinstance(error, CallTimeout)
            return not has_stack(error)

        # The signal can come after the timeout.
        wait_for("a timeout has no stack", has_no_stack)
        assert patient.submit(jobs.double, 1).result(LONG) == 2


def test_many_timeouts_request_few_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []
    stack_of = PrivateSupervisor.stack_of
    monkeypatch.setattr(
        PrivateSupervisor, "stack_of", lambda self, report: requests.append(report) or stack_of(self, report)
    )
    with BulkheadExecutor(8) as pool:
        assert list(pool.map(jobs.double, range(100))) == [number * 2 for number in range(100)]
        began = time.monotonic()
        late = pool.with_options(deadline=6)
        errors = [future.exception(LONG) for future in [late.submit(jobs.sleep, 600) for _ in range(1000)]]
        took = time.monotonic() - began
    outcomes = [error.outcome for error in errors if isinstance(error, CallTimeout)]
    assert len(outcomes) == 1000
    assert sorted(requests) == sorted(outcome.report for outcome in outcomes if outcome.report is not None)
    assert 1 <= len(requests) <= took + 1


def test_waiting_for_a_stack_does_not_delay_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    is_waiting, may_end = threading.Event(), threading.Event()

    def stack_of(_supervisor: PrivateSupervisor, _report: str) -> str:
        is_waiting.set()
        assert may_end.wait(LONG)
        return ""

    monkeypatch.setattr(PrivateSupervisor, "stack_of", stack_of)
    with BulkheadExecutor(1) as pool:
        late = pool.with_options(timeout=0.2).submit(jobs.sleep, 600)
        assert is_waiting.wait(LONG)
        assert pool.submit(jobs.double, 1).result(LONG) == 2
        assert not late.done()
        # Too many calls are waiting for their stacks.
        monkeypatch.setattr(bulkhead._pool, "STACKS_MAX", 1)
        error = timeout_with_report(lambda: pool.with_options(timeout=0.2).submit(jobs.sleep, 600), lambda _: True)
        assert not has_stack(error)
        may_end.set()
        error = late.exception(LONG)
        assert isinstance(error, CallTimeout)
        assert not has_stack(error)
