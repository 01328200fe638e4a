"""The executor's connection to its supervisor. Any thread can send frames; one thread receives outcomes.

The receiving thread never blocks while sending, because the supervisor stops reading from a client that does not read.
If the socket is full, another thread takes over.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from . import _files, _wire
from ._connection import open_connection
from .errors import Disconnected, Rejected

#: Maximum size of a write, in bytes, up to which small payloads are joined into one buffer.
_JOINED_BYTES_MAX = 64 * 1024
#: Maximum number of frames per write, with two pieces each. The kernel accepts 1024 pieces.
_FRAMES_MAX = 256
#: Timeout for the supervisor's reply to HELLO, in seconds.
_HELLO_SECONDS_MAX = 30.0

_POP: Callable[[deque[Sequence[_wire.Buffer]]], Sequence[_wire.Buffer]] = deque.popleft


def connect(path: str) -> Channel:
    """Connects to a jobs socket. Raises ``Disconnected`` if the connection is refused or the socket does not exist."""
    try:
        link, _, capabilities = open_connection(path, _HELLO_SECONDS_MAX)
    except Rejected as refused:
        raise Disconnected(f"{refused.outcome.reason}: {refused.outcome.message}") from None
    if not capabilities & _wire.SUPERVISOR_RUN_LIMIT:
        link.close()
        raise Disconnected("the supervisor is too old for the executor: update the supervisor")
    # Uses the program's `socket` module, which gevent may have patched.
    return Channel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=link.detach()), capabilities)


class Channel:
    """An established connection."""

    def __init__(self, connection: socket.socket, capabilities: int) -> None:
        self._socket = connection
        self._descriptors: list[int] = []
        #: Capability flags of the supervisor.
        self.capabilities = capabilities
        #: Queued frames, each a sequence of buffers. The next ``flush`` sends them.
        self.outgoing: deque[Sequence[_wire.Buffer]] = deque()
        self.leases = _files.Leases(self.outgoing.append, self._descriptors)
        #: Guards the frames that are being sent, and the numbers of bytes already sent.
        self._writing = threading.RLock()
        self._taken: list[Sequence[_wire.Buffer]] = []
        self._gone: list[int] = []

    # Sending.

    def flush(self, *, may_wait: bool) -> None:
        """Sends the queued frames.

        If ``may_wait`` is true, blocks until the supervisor has read the frames. Otherwise another thread sends frames
        that do not fit into the socket's buffer. ``read`` detects a lost connection.
        """
        outgoing, writing = self.outgoing, self._writing
        try:
            while outgoing and not writing._is_owned() and writing.acquire(blocking=False):  # type: ignore[attr-defined]
                try:
                    is_stuck = not self._drain(may_wait)
                finally:
                    writing.release()
                if is_stuck:
                    self._hand_on()
                    return
        except BaseException:
            self.recover()
            raise

    def recover(self) -> None:
        """Hands sending over to another thread after a signal handler raised an exception in a method of this class."""
        while self._writing._is_owned():  # type: ignore[attr-defined]
            self._writing.release()
        self._hand_on()

    def _hand_on(self) -> None:
        try:
            threading.Thread(target=self._finish, name="bulkhead-send", daemon=True).start()
        except RuntimeError:
            # No thread can be started. Closing the connection is better than leaving frames unsent forever.
            self.end()

    def _finish(self) -> None:
        with self._writing:
            self._drain(may_wait=True)
        # Frames may have been queued after the last check and before the lock was released.
        self.flush(may_wait=True)

    def _drain(self, may_wait: bool) -> bool:
        """Writes the queued frames. Returns false if the socket could not take all of them.

        A signal handler can raise an exception after any function call. Therefore each removal or transmission of a
        frame is recorded by the function call that performs it.
        """
        outgoing, taken, gone = self.outgoing, self._taken, self._gone
        flags = socket.MSG_NOSIGNAL if may_wait else socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
        while True:
            if not taken:
                count = min(len(outgoing), _FRAMES_MAX)
                if not count:
                    return True
                gone.clear()
                taken.extend(map(_POP, [outgoing] * count))
            rest = [piece for frame in taken for piece in frame]
            if gone:
                rest = _without(rest, sum(gone))
            size = sum(map(len, rest))
            if size <= _JOINED_BYTES_MAX:
                rest = [b"".join(rest)]
            try:
                if size:
                    gone.extend(map(self._socket.sendmsg, (rest,), ((),), (flags,)))
                if not size or gone[-1] == size:
                    taken.clear()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _wire.LOST_CONNECTION_ERRORS:
                    # Raised by a signal handler, such as a TimeoutError. The remaining frames are still sent.
                    raise
                outgoing.clear()
                taken.clear()
                self.end()
                return True

    # Reading.

    def read(self, handle: Callable[[list[_wire.Frame]], None]) -> None:
        """Reads until the connection ends. Calls ``handle`` with each batch of received frames."""
        reader = _wire.Reader(_files.receiver(self._socket, self._descriptors), self._socket.recv_into)
        frames = reader.frames
        while True:
            try:
                reader.read()
            except (EOFError, OSError):
                return
            if frames:
                together = list(frames)
                frames.clear()
                handle(together)
                # Drops the references to the handled frames before the next frames arrive.
                del together

    def has_unread(self) -> bool:
        """Returns true if received bytes have not been read yet."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            # The socket has been closed in the meantime.
            return True
        return bool(poll.poll(0))

    # Closing.

    def end(self) -> None:
        """Shuts down both directions of the connection, which makes ``read`` return."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Closes the descriptor without shutting the connection down. Used in forked children."""
        self._socket.close()


def _without(pieces: Sequence[_wire.Buffer], count: int) -> list[_wire.Buffer]:
    """Returns the pieces without the first ``count`` bytes."""
    rest: list[_wire.Buffer] = []
    for piece in pieces:
        if count >= len(piece):
            count -= len(piece)
        else:
            rest.append(memoryview(piece)[count:] if count else piece)
            count = 0
    return rest
