"""The executor's connection to its supervisor: frames out from any thread, outcomes in by one thread of its own.

Sending never waits for reading: the thread that reads hands on what the socket does not take at once, since the
supervisor stops listening to a client that does not read.
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

#: Payloads up to this size are joined with others into one write.
_JOINED_BYTES_MAX = 64 * 1024
#: Frames of one write, of two pieces each; the kernel takes 1024 pieces.
_FRAMES_MAX = 256
#: Seconds that the supervisor has to answer a HELLO.
_HELLO_SECONDS_MAX = 30.0

_POP: Callable[[deque[Sequence[_wire.Buffer]]], Sequence[_wire.Buffer]] = deque.popleft


def connect(path: str) -> Channel:
    """Connects to a jobs socket. Raises ``Disconnected`` if it is refused, or there is none."""
    try:
        link, _, capabilities = open_connection(path, _HELLO_SECONDS_MAX)
    except Rejected as refused:
        raise Disconnected(f"{refused.outcome.reason}: {refused.outcome.message}") from None
    if not capabilities & _wire.CLIENT_RUN_LIMIT:
        link.close()
        raise Disconnected("this supervisor is too old for the executor: it knows no run limit")
    # A socket as the program has them, which gevent may have replaced.
    return Channel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=link.detach()), capabilities)


class Channel:
    """A client's connection behind its welcome."""

    def __init__(self, connection: socket.socket, capabilities: int) -> None:
        self._socket = connection
        self._descriptors: list[int] = []
        #: Capabilities of the supervisor.
        self.capabilities = capabilities
        #: Frames in pieces, to be appended behind those that wait to be sent. They leave with the next ``flush``.
        self.outgoing: deque[Sequence[_wire.Buffer]] = deque()
        self.leases = _files.Leases(self.outgoing.append, self._descriptors)
        #: Guards what is being sent: frames, and the counts of their bytes that have left.
        self._writing = threading.RLock()
        self._taken: list[Sequence[_wire.Buffer]] = []
        self._gone: list[int] = []

    # Sending.

    def flush(self, *, may_wait: bool) -> None:
        """Sends what waits. With ``may_wait`` it may take as long as the supervisor does not listen; without, another
        thread takes over. A lost connection is told by ``read``."""
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
        """After an exception of a signal's handler, wherever in this class it came: another thread sends the rest."""
        while self._writing._is_owned():  # type: ignore[attr-defined]
            self._writing.release()
        self._hand_on()

    def _hand_on(self) -> None:
        try:
            threading.Thread(target=self._finish, name="bulkhead-send", daemon=True).start()
        except RuntimeError:
            # There is no room for a thread. What waits would wait for ever.
            self.end()

    def _finish(self) -> None:
        with self._writing:
            self._drain(may_wait=True)
        # What came between the last look and the release.
        self.flush(may_wait=True)

    def _drain(self, may_wait: bool) -> bool:
        """Writes what waits; whether all of it was taken.

        An exception of a signal's handler may come behind any call. So what is taken out, and what is sent, is noted
        by the same call that does it.
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
                if error.errno not in _wire.ENDS:
                    # Of a signal's handler, such as a TimeoutError: what is left is sent all the same.
                    raise
                outgoing.clear()
                taken.clear()
                self.end()
                return True

    # Reading.

    def read(self, told: Callable[[list[_wire.Frame]], None]) -> None:
        """Reads until the connection ends; ``told`` is called with all frames that came together."""
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
                told(together)
                # Not held until the next ones come.
                del together

    def has_unread(self) -> bool:
        """True if the supervisor has sent bytes that are not read yet."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            # It was closed meanwhile.
            return True
        return bool(poll.poll(0))

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
