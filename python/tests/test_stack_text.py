"""Tests of stacks at a deadline: as a worker writes them, in crash reports, and in the exceptions of a pool."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import handlers
import pytest
from pools import LONG, wait_for
from running import HERE, SOURCE

from bulkhead import _link, _stack_text, _wire

FILE_BYTES = _link.JOURNAL_BYTES + _stack_text.FILE_BYTES


class FalseSupervisor:
    """Runs one worker, and does the supervisor's part of a request for stacks."""

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
        """Returns the next frame of a kind, and drops all frames before."""
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

        A request that arrives while another thread still writes the text of the previous request has no effect.
        """

        def found() -> str | None:
            self.request()
            with contextlib.suppress(AssertionError):
                wait_for("the text has the main thread", lambda: "in _run_handlers" in self.text(), 1.0)
                return self.text()
            return None

        return wait_for("there are stacks", found)

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
        line = wait_for("the handler runs", lambda: line_in(supervisor.stacks(), function))
        assert line in body(function)
        # The text of a later request replaces the text of an earlier request.
        assert supervisor.stacks().count("in _run_handlers") == 1


def test_worker_survives_requests_without_a_job() -> None:
    with worker(*HANDLERS) as supervisor:
        wait_for("the thread for the link runs", lambda: "in _watch" in supervisor.stacks())
        assert supervisor.call("", b"x") == b"x"
        # The text is longer than the file.
        os.lseek(supervisor.file, FILE_BYTES - 10, os.SEEK_SET)
        os.kill(supervisor.pid, _stack_text.SIGNAL)
        wait_for("the file is full", lambda: os.pread(supervisor.file, 10, FILE_BYTES - 10).strip(b"\0"))
        assert supervisor.call("", b"x") == b"x"


def test_worker_with_a_small_journal_registers_nothing() -> None:
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
def test_handler_of_user_code_replaces_the_text(change: str, answer: bytes) -> None:
    with worker("-c", PROGRAM) as supervisor:
        supervisor.call(change)
        supervisor.request()
        wait_for("the handler of the user code has run", lambda: answer in supervisor.call("answer"))
        assert supervisor.text() == ""


def test_worker_ignores_requests_after_unregistering() -> None:
    with worker("-c", PROGRAM) as supervisor:
        supervisor.call("unregister")
        supervisor.request()
        assert supervisor.call("answer") == b""
        assert supervisor.text() == ""


def test_worker_writes_stacks_after_faulthandler_was_disabled() -> None:
    with worker("-c", PROGRAM) as supervisor:
        supervisor.call("disable")
        assert "in _run_handlers" in supervisor.stacks()


def test_forked_process_does_not_write_to_the_file_of_its_parent() -> None:
    with worker("-c", PROGRAM) as supervisor:
        os.lseek(supervisor.file, _link.JOURNAL_BYTES, os.SEEK_SET)
        assert supervisor.call("fork") == b"40"
        assert supervisor.text() == ""
        assert "in _run_handlers" in supervisor.stacks()
        # The handler of user code also works in a forked process.
        supervisor.call("own")
        assert supervisor.call("fork") == b"41"


# Texts for people.

#: Written by Python 3.11 for a call of `map` with a `chunksize`.
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


def test_stack_of_a_call_has_no_frames_of_the_worker() -> None:
    _, others, current = STACKS.split("\n\n")
    own = "\n".join(current.splitlines()[:2])
    assert _stack_text.of_function(STACKS) == f"{others}\n\n{own}"
    # A compiled program has relative paths.
    assert _stack_text.of_function(STACKS.replace("/venv/", "")) == f"{others}\n\n{own}"
    # The stack is deeper than the maximum of `faulthandler`, or a thread has no frame of the call.
    deep = "Thread 0x1 (most recent call first):\n" + '  File "/app/own.py", line 4 in f\n' * 100 + "  ..."
    assert _stack_text.of_function(deep + "\n") == deep
    for frame in ('File "/venv/bulkhead/_pool_worker.py", line 9 in _run', "<no Python frame>"):
        assert _stack_text.of_function(f"Thread 0x1 (most recent call first):\n  {frame}\n") == ""
    assert _stack_text.of_function("") == ""
