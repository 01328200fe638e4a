"""Tests that invalid frames from a peer acting as the supervisor never make a job or a worker wait forever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pools import LONG
from running import SOURCE

from bulkhead import AsyncClient, Client, Disconnected, _wire

#: A frame with more metadata than bytes, an outcome without fields, and a progress report without fields.
FRAMES = [
    _wire.HEADER.pack(4, _wire.OUTCOME, 0, 8, 1),
    _wire.frame(_wire.OUTCOME, 1, b""),
    _wire.frame(_wire.PROGRESS, 1, b""),
]


@contextlib.contextmanager
def false_supervisor(path: str, frame: bytes) -> Iterator[None]:
    """Accepts one client, and sends the frame after its first job. Then reads until the client disconnects."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def serve() -> None:
            with listening.accept()[0] as peer:
                peer.recv(65_536)
                fixed = struct.pack("<HIQ", 1, 0xFFFF_FFFF, 0)
                peer.sendall(_wire.frame(_wire.CLIENT_WELCOME, 0, fixed + bytes(8) + _wire.EMPTY))
                peer.recv(65_536)
                peer.sendall(frame)
                while peer.recv(65_536):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join(LONG)
        assert not thread.is_alive(), "the client keeps the connection open"


# A pool's calls ignore progress reports.
@pytest.mark.parametrize(
    ("way", "frame"), [*(("call", frame) for frame in FRAMES[:2]), *(("submit", frame) for frame in FRAMES)]
)
def test_invalid_frame_ends_the_connection(tmp_path: Path, way: str, frame: bytes) -> None:
    path = str(tmp_path / "s")
    with false_supervisor(path, frame), Client(path) as client:
        run = client.call if way == "call" else lambda *job: client.submit(*job).result(LONG)
        with pytest.raises(Disconnected):
            run("plain", b"1")


@pytest.mark.parametrize("frame", FRAMES)
def test_invalid_frame_fails_jobs_of_the_asyncio_client(tmp_path: Path, frame: bytes) -> None:
    path = str(tmp_path / "s")

    async def test() -> None:
        async with AsyncClient(path) as client:
            job = client.submit("plain", b"1")
            job.on_progress(print)
            with pytest.raises(Disconnected):
                await asyncio.wait_for(job, LONG)

    with false_supervisor(path, frame):
        asyncio.run(test())


@pytest.mark.parametrize("lease", [b"", struct.pack("<QQ", 7, 1)])
def test_invalid_job_ends_a_busy_worker(lease: bytes) -> None:
    """While the only handler runs, another thread reads the link."""
    program = "import time; from bulkhead import serve; serve(lambda payload, ctx: time.sleep(3600))"
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": SOURCE, "BULKHEAD_LINK_FD": str(theirs.fileno())}
    command = [sys.executable, "-c", program]
    worker = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    try:
        ours.settimeout(LONG)
        reader = _wire.Reader(ours.recv, ours.recv_into)

        def wait_for_frame(kind: int) -> None:
            while kind not in [frame[0] for frame in reader.frames]:
                reader.read()

        wait_for_frame(_wire.HELLO)
        welcome = struct.pack("<HIQIIIIQ", 1, 0xFFFF_FFFF, 0, 0, 1, 1, 100, 1 << 20) + bytes(8) + _wire.EMPTY
        ours.sendall(_wire.frame(_wire.WORKER_WELCOME, _wire.MAGIC, welcome))
        wait_for_frame(_wire.READY)
        fields = bytes(16) + struct.pack("<Q", 60_000_000)
        ours.sendall(_wire.frame(_wire.JOB, 1, fields + _wire.EMPTY))
        wait_for_frame(_wire.HEARTBEAT)
        metadata = fields + _wire.extensions((_wire.LEASE_REF, lease)) if lease else b""
        ours.sendall(_wire.frame(_wire.JOB, 2, metadata))
        _, errors = worker.communicate(timeout=LONG)
        assert worker.returncode == 1
        assert b"invalid frame" in errors
    finally:
        worker.kill()
        worker.wait()
        ours.close()
