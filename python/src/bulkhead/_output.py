"""What workers of a private supervisor write, on its way to the caller's standard output and error.

Without a sandbox workers write into two FIFOs, so that nothing is lost and a job's output has left it before its
result. Confined workers cannot open them: what they write comes by the supervisor, which takes 1,000 lines a second.
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

#: Seconds that results wait for a stream.
CATCH_UP_SECONDS_MAX = 2.0
_NAMES = ("stdout", "stderr")


def _write(name: str, data: bytes, decode: Callable[[bytes], str]) -> None:
    """Writes to what ``sys.stdout`` or ``sys.stderr`` is now: a terminal, a notebook's cell, a test's capture."""
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
        # It is closed, or its reader has gone; or it is the application's own, and fails as it likes.
        pass


class Output:
    """Passes the output of workers on, by a thread of its own."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._forward, name="bulkhead-output", daemon=True)

    def start(self) -> None:
        """Begins to read. The supervisor listens already."""
        self._thread.start()

    def catch_up(self) -> None:
        """Returns when all is written that was here before, or the stream stands still; at once where none can tell."""

    def end(self, seconds_max: float | None = CATCH_UP_SECONDS_MAX) -> None:
        """Waits until all is written, when the workers are gone, unless the stream stands still."""
        if self._thread.ident is not None:
            self._thread.join(seconds_max)

    def finish(self) -> None:
        """Waits until all is written, however long the stream takes, and closes the descriptors."""
        self.end(None)
        self.forget()

    def forget(self) -> None:
        """Closes this process's descriptors and does nothing else, as a forked child does."""

    def _forward(self) -> None:
        raise NotImplementedError


class Fifos(Output):
    """Two FIFOs in the supervisor's folder, and the thread that reads them."""

    def __init__(self, supervisor: PrivateSupervisor) -> None:
        super().__init__()
        self.paths = [supervisor.fifo(name) for name in _NAMES]
        self._readers: dict[int, str] = {}
        self._is_over = False
        # What is read may end within a character.
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in _NAMES}
        #: Wakes the thread, which ends if it is over.
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        #: Those that are open.
        self._descriptors = [self._end]
        try:
            # With a writer of its own no reader sees an end, and no worker waits for one.
            self._waiting = select.poll()
            for path, name in zip(self.paths, _NAMES, strict=True):
                self._read(path, name)
                supervisor.keep(path, partial(self._make_again, supervisor, path, name))
            #: As much as one holds.
            self._read_bytes = max(fcntl.fcntl(each, fcntl.F_GETPIPE_SZ) for each in self._readers)
            # Held from reading to written.
            self._passing = threading.Lock()
            # How often all that was ready has been passed on.
            self._rounds = 0
            self._round = threading.Condition()
            #: How often that was when results waited in vain.
            self._stuck_at = -1
        except BaseException:
            self.forget()
            raise

    def _read(self, path: str, name: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._descriptors.append(descriptor)
        self._readers[descriptor] = name
        self._waiting.register(descriptor, select.POLLIN)

    def _make_again(self, supervisor: PrivateSupervisor, path: str, name: str) -> None:
        """Makes a removed FIFO again. Older workers still write to the removed one."""
        supervisor.fifo(os.path.basename(path))
        self._read(path, name)
        os.eventfd_write(self._end, 1)

    def catch_up(self) -> None:
        # Written by the thread alone, since what the application's stream waits for may wait for a result.
        if self._is_passed_on() or self._stuck_at == self._rounds:
            return
        with self._round:
            until = self._rounds + 2
            if not self._round.wait_for(lambda: self._rounds >= until or self._is_passed_on(), CATCH_UP_SECONDS_MAX):
                self._stuck_at = self._rounds

    def _is_passed_on(self) -> bool:
        # In this order: what is read is passed on with the lock held.
        return not self._waiting.poll(0) and not self._passing.locked()

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
                    with self._passing:
                        self._pass_on(descriptor, is_all=is_over)
            with self._round:
                self._rounds += 1
                self._round.notify_all()

    def _pass_on(self, descriptor: int, *, is_all: bool) -> None:
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
    """The lines that the supervisor has, as they come."""

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
            self._connection, begun = _admin.ask(self._supervisor.admin, path)
            for line in _admin.lines(self._connection, begun):
                if "dropped" in line:
                    _write("stderr", f"[{line['dropped']} lines of output were dropped]\n".encode(), bytes.decode)
                else:
                    _write(line["stream"], f"{line['line']}\n".encode(errors="replace"), bytes.decode)
        except (OSError, _admin.AdminError):
            pass
