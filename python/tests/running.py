"""A supervisor with Python workers, for tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pools import wait_for

import bulkhead
from bulkhead._private import find_supervisor, to_toml

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(bulkhead.__file__)))

#: Configuration keys of a worker that uses this interpreter.
WORKER: dict[str, Any] = {
    "command": [os.path.abspath(sys.executable), "-m", "bulkhead", "serve", "handlers"],
    "cwd": HERE,
    "env": {"PYTHONPATH": SOURCE},
    "max_queue": 1000,
    "deadline": "60s",
    "deadline_max": "1h",
    "restart": {"backoff": "10ms", "max": 1000, "within": "1s"},
}


def sandboxed(profile: str) -> dict[str, Any]:
    """Returns the configuration keys of a confined worker."""
    read = [] if profile == "none" else sorted({HERE, SOURCE, sys.prefix, sys.base_prefix})
    return {**WORKER, "sandbox": {"profile": profile, **({"read": read} if read else {})}}


class Supervisor:
    """A supervisor that runs in a separate folder."""

    def __init__(self, bulkheads: dict[str, dict[str, Any]], **supervisor: Any) -> None:
        self.folder = tempfile.mkdtemp(prefix="bulkhead-test-")
        # Workers that run as other users need to read their modules below this folder.
        os.chmod(self.folder, 0o755)
        self.socket = os.path.join(self.folder, "jobs.sock")
        self.admin = os.path.join(self.folder, "admin.sock")
        self.config = os.path.join(self.folder, "workers.toml")
        self._supervisor = {"socket": self.socket, **supervisor}
        self.process: subprocess.Popen[bytes] | None = None
        self.write(bulkheads)
        self.start()

    def write(self, bulkheads: dict[str, dict[str, Any]]) -> None:
        """Writes the configuration."""
        tables = [("supervisor", self._supervisor)]
        tables += [(f"bulkhead.{name}", keys) for name, keys in bulkheads.items()]
        with open(self.config, "w") as file:
            for name, keys in tables:
                file.write(f"[{name}]\n" + "".join(f"{key} = {to_toml(value)}\n" for key, value in keys.items()))

    def start(self) -> None:
        """Starts the supervisor, and waits until its workers are ready or have failed."""
        log = open(os.path.join(self.folder, "log"), "ab")  # noqa: SIM115
        with log:
            self.process = subprocess.Popen(
                [find_supervisor(), "--config", self.config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_for("the supervisor is ready", self._is_ready)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()
        try:
            return self.request("GET", "/readyz")[0] == 200
        except (OSError, ValueError):
            return False

    def log(self) -> str:
        with open(os.path.join(self.folder, "log"), errors="replace") as file:
            return file.read()

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Sends a request to the admin socket. Returns the status and the response."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(30)
            link.connect(self.admin)
            link.sendall(head.encode() + data)
            received = b"".join(iter(lambda: link.recv(65536), b""))
        head_bytes, _, rest = received.partition(b"\r\n\r\n")
        status = int(head_bytes.split()[1])
        if b"chunked" in head_bytes.lower():
            rest = _unchunked(rest)
        try:
            return status, json.loads(rest)
        except ValueError:
            return status, rest

    def snapshot(self, name: str) -> dict[str, Any]:
        status, found = self.request("GET", f"/v1/bulkheads/{name}")
        assert status == 200, found
        assert isinstance(found, dict)
        return found

    def pids(self, name: str) -> list[int]:
        """Returns the PIDs of the workers."""
        return [worker["pid"] for worker in self.snapshot(name)["workers"] if worker.get("pid")]

    def kill(self) -> None:
        """Kills the supervisor, as the kernel's OOM killer would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the process with SIGSTOP for the duration of the block."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def end(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _unchunked(data: bytes) -> bytes:
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            break
        whole, data = whole + data[:count], data[count + 2 :]
    return whole


@contextmanager
def running(**bulkheads: dict[str, Any]) -> Iterator[Supervisor]:
    """Runs a supervisor for the duration of a test."""
    supervisor = Supervisor(bulkheads or {"plain": WORKER})
    try:
        yield supervisor
    except BaseException:
        print(supervisor.log()[-20_000:])
        raise
    finally:
        supervisor.end()
