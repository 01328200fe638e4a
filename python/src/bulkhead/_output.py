"""Forwards the output of a private supervisor's workers to the caller's standard output and standard error.

Workers without a sandbox write to two FIFOs. No output is lost, and the output of a job is written before its result is
sent. Confined workers cannot open FIFOs. Their output is read from the supervisor, which accepts 1,000 lines per
second.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from . import _admin
from ._private import PrivateSupervisor

#: Maximum time that results wait for a blocked output stream, in seconds.
CATCH_UP_SECONDS_MAX = 2.0
_NAMES = ("stdout", "stderr")


def _write(name: str, data: bytes, decode: Callable[[bytes], str]) -> None:
    """Writes to the current ``sys.stdout`` or ``sys.stderr``: a terminal, a notebook cell or a test's capture."""
    stream: Any = getattr(sys, name, None)
    try:
        buffer = getattr(stream, "buffer", None)
        if buffer is not None:
            stream.flush()
            buffer.write(data)
        elif stream is not None:
            stream.write(decode(data))
        if stream is not None:
            stream.flush()
    except BaseException:
        # The stream is closed, its reader is gone, or an application-defined stream failed.
        pass


class Output:
    """Forwards the output of workers in a separate thread."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._forward, name="bulkhead-output", daemon=True)

    def start(self) -> None:
        """Starts the thread. The supervisor must be listening already."""
        self._thread.start()

    def catch_up(self) -> None:
        """Waits until all earlier output is written or the stream is blocked.

        The default implementation does not wait.
        """

    def end(self, seconds_max: float | None = CATCH_UP_SECONDS_MAX) -> None:
        """Waits until all output is written or ``seconds_max`` have passed. Called after the workers have exited."""
        if self._thread.ident is not None:
            self._thread.join(seconds_max)

    def finish(self) -> None:
        """Waits until all output is written, without a limit, and closes the descriptors."""
        self.end(None)
        self.forget()

    def forget(self) -> None:
        """Closes the descriptors of this process without waiting. Used in forked children."""

    def _forward(self) -> None:
        raise NotImplementedError


class Fifos(Output):
    """Reads the output from two FIFOs in the supervisor's folder."""

    def __init__(self, supervisor: PrivateSupervisor) -> None:
        super().__init__()
        self.paths = [supervisor.fifo(name) for name in _NAMES]
        self._readers: dict[int, str] = {}
        self._is_over = False
        # Incremental decoders, because a read may end within a multi-byte character.
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in _NAMES}
        #: Wakes the thread to check `_is_over`.
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        #: All open descriptors.
        self._descriptors = [self._end]
        try:
            # Opened for reading and writing, so that reads never see EOF and workers never wait for a reader.
            self._waiting = select.poll()
            for path, name in zip(self.paths, _NAMES, strict=True):
                self._read(path, name)
                supervisor.keep(path, partial(self._recreate, supervisor, path, name))
            #: Capacity of a FIFO in bytes.
            self._read_bytes = max(fcntl.fcntl(each, fcntl.F_GETPIPE_SZ) for each in self._readers)
            # Held from the time when data is read until the data is written.
            self._forwarding = threading.Lock()
            # Number of rounds in which all available data was forwarded.
            self._rounds = 0
            self._round = threading.Condition()
            #: Value of `_rounds` when `catch_up` last timed out.
            self._stuck_at = -1
        except BaseException:
            self.forget()
            raise

    def _read(self, path: str, name: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors.append(descriptor)
        self._readers[descriptor] = name
        self._waiting.register(descriptor, select.POLLIN)

    def _recreate(self, supervisor: PrivateSupervisor, path: str, name: str) -> None:
        """Recreates a FIFO that was removed. Older workers keep writing to the removed FIFO."""
        supervisor.fifo(os.path.basename(path))
        self._read(path, name)
        os.eventfd_write(self._end, 1)

    def catch_up(self) -> None:
        # Only this thread writes, because the application's stream may be blocked until its reader gets a result.
        if self._is_forwarded() or self._stuck_at == self._rounds:
            return
        with self._round:
            until = self._rounds + 2
            if not self._round.wait_for(lambda: self._rounds >= until or self._is_forwarded(), CATCH_UP_SECONDS_MAX):
                self._stuck_at = self._rounds

    def _is_forwarded(self) -> bool:
        # The order matters: data is removed from the FIFO only while the lock is held.
        return not self._waiting.poll(0) and not self._forwarding.locked()

    def end(self, seconds_max: float | None = CATCH_UP_SECONDS_MAX) -> None:
        self._is_over = True
        os.eventfd_write(self._end, 1)
        super().end(seconds_max)

    def forget(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _forward(self) -> None:
        is_over = False
        while not is_over:
            poll = select.poll()
            for descriptor in (*self._readers, self._end):
                poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._end in ready:
                os.eventfd_read(self._end)
                is_over = self._is_over
            for descriptor in list(self._readers):
                if is_over or descriptor in ready:
                    with self._forwarding:
                        self._forward_data(descriptor, is_all=is_over)
            with self._round:
                self._rounds += 1
                self._round.notify_all()

    def _forward_data(self, descriptor: int, *, is_all: bool) -> None:
        name = self._readers[descriptor]
        while True:
            try:
                data = os.read(descriptor, self._read_bytes)
            except BlockingIOError:
                return
            _write(name, data, self._decoders[name].decode)
            if not is_all:
                return


class Lines(Output):
    """Reads the output lines from the supervisor's admin socket."""

    def __init__(self, supervisor: PrivateSupervisor) -> None:
        super().__init__()
        self._supervisor = supervisor
        self._connection: socket.socket | None = None

    def forget(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _forward(self) -> None:
        path = f"/v1/bulkheads/{self._supervisor.name}/logs?follow=true"
        try:
            self._connection, begun = _admin.request(self._supervisor.admin, path)
            for line in _admin.lines(self._connection, begun):
                if "dropped" in line:
                    _write("stderr", f"[{line['dropped']} lines of output were dropped]\n".encode(), bytes.decode)
                else:
                    _write(line["stream"], f"{line['line']}\n".encode(errors="replace"), bytes.decode)
        except (OSError, _admin.AdminError):
            pass
