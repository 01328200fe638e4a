"""The executor's connection to its supervisor: frames out from any thread, outcomes in by one thread of its own.

Sending never waits for reading: the thread that reads hands on what the socket does not take at once, since the
supervisor stops listening to a client that does not read.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from . import _wire
from .errors import Disconnected

__all__ = ["Channel", "connect"]

#: Payloads up to this size are joined with others into one write.
_JOINED_BYTES_MAX = 64 * 1024
#: Pieces of one write; the kernel takes 1024.
_PIECES_MAX = 512
#: Seconds that the supervisor has to answer a HELLO.
_HELLO_SECONDS_MAX = 30.0


def connect(path: str, version: str) -> Channel:
    """Connects to a jobs socket. Raises ``Disconnected`` if it is refused, or there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_HELLO_SECONDS_MAX)
        connection.connect(path)
        connection.sendall(_wire.hello(_wire.CLIENT, 0, version))
        reader = _wire.Reader(connection.recv, connection.recv_into)
        while not reader.frames:
            reader.read()
        kind, _, metadata, _ = reader.frames.popleft()
        if kind == _wire.REFUSED:
            raise Disconnected(": ".join(_wire.refused(metadata)))
        if kind != _wire.CLIENT_WELCOME or not _wire.client_welcome(metadata) & _wire.CLIENT_RUN_LIMIT:
            raise Disconnected("this supervisor is too old for the executor: it knows no run limit")
        connection.settimeout(None)
        return Channel(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, (EOFError, OSError)) and not isinstance(error, Disconnected):
            raise Disconnected(f"the supervisor is not reachable at {path}: {error}") from error
        raise


class Channel:
    """A client's connection behind its welcome."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._outgoing: deque[Sequence[_wire.Buffer]] = deque()
        self._writing = threading.Lock()

    # Sending.

    def put(self, *pieces: _wire.Buffer) -> None:
        """Puts a frame, in pieces, behind those that wait to be sent. It leaves with the next ``flush``."""
        self._outgoing.append(pieces)

    def flush(self, *, may_wait: bool) -> None:
        """Sends what waits. With ``may_wait`` it may take as long as the supervisor does not listen; without, another
        thread takes over. A lost connection is told by ``read``."""
        outgoing = self._outgoing
        while outgoing and self._writing.acquire(blocking=False):
            try:
                is_stuck = not self._drain(may_wait)
            finally:
                self._writing.release()
            if is_stuck:
                threading.Thread(target=self._finish, name="bulkhead-send", daemon=True).start()
                return

    def _finish(self) -> None:
        with self._writing:
            self._drain(may_wait=True)
        # What came between the last look and the release.
        self.flush(may_wait=True)

    def _drain(self, may_wait: bool) -> bool:
        """Writes what waits; whether all of it was taken."""
        outgoing = self._outgoing
        flags = socket.MSG_NOSIGNAL if may_wait else socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
        while outgoing:
            pieces: list[_wire.Buffer] = []
            size = 0
            while outgoing and len(pieces) < _PIECES_MAX and size < _JOINED_BYTES_MAX:
                frame = outgoing.popleft()
                pieces.extend(frame)
                size += sum(map(len, frame))
            rest: Sequence[_wire.Buffer] = pieces
            if size <= _JOINED_BYTES_MAX:
                rest = (b"".join(pieces),)
            try:
                while rest:
                    sent = self._socket.sendmsg(rest, (), flags)
                    rest = _without(rest, sent)
            except BlockingIOError:
                outgoing.appendleft(rest)
                return False
            except OSError:
                outgoing.clear()
                return True
        return True

    # Reading.

    def read(self, told: Callable[[list[_wire.Frame]], None]) -> None:
        """Reads until the connection ends; ``told`` is called with all frames that came together."""
        reader = _wire.Reader(self._socket.recv, self._socket.recv_into)
        frames = reader.frames
        while True:
            try:
                reader.read()
            except (EOFError, OSError):
                return
            if frames:
                together = list(frames)
                frames.clear()
                told(together)
                # Not held until the next ones come.
                del together

    # The end.

    def end(self) -> None:
        """Ends the connection for both sides: ``read`` returns."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Closes this process's descriptor and nothing else, as a forked child does."""
        self._socket.close()


def _without(pieces: Sequence[_wire.Buffer], count: int) -> list[_wire.Buffer]:
    """What is left of pieces when so many bytes are gone."""
    rest: list[_wire.Buffer] = []
    for piece in pieces:
        if count >= len(piece):
            count -= len(piece)
        else:
            rest.append(memoryview(piece)[count:] if count else piece)
            count = 0
    return rest
