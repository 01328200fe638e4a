"""A worker's end of its link: the handshake, the journal, and writing by any thread."""

from __future__ import annotations

import _socket
import _thread
import errno
import mmap
import os

from . import _files, _wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# Taken before a main module that is imported by workers can replace it, as gevent does.
_Lock = _thread.allocate_lock

LINK_VARIABLE = "BULKHEAD_LINK_FD"
JOURNAL_BYTES = 69_632
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_REGISTER_GLOBAL_EXPEDITED = 4


class Refused(Exception):
    """The supervisor did not welcome this worker; the text says why."""


def _journal(descriptor: int) -> memoryview:
    """Words of memory that outlives this process. Each number is written by one store: 1 is the last job begun, 2 the
    time of the last heartbeat. The supervisor writes 3, also by one store: the last job taken back."""
    if os.fstat(descriptor).st_size != JOURNAL_BYTES:
        raise Refused("its journal has an odd size")
    return memoryview(mmap.mmap(descriptor, JOURNAL_BYTES)).cast("Q")


class Link:
    """The socket, and who may write to it."""

    __slots__ = ("_identity", "_owner", "_writing", "socket")

    def __init__(self, socket: _socket.socket) -> None:
        self.socket = socket
        self._identity = _identity(socket)
        self._owner = os.getpid()
        self._writing = _Lock()

    def is_own(self) -> bool:
        """Returns false in a process that code in the worker forked, in Python or in C."""
        return os.getpid() == self._owner

    def check(self) -> None:
        """Ends the worker if the link's descriptor is another file now."""
        try:
            if _identity(self.socket) != self._identity:
                raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        except OSError as error:
            lost(error)

    def send(self, kind: int, number: int, metadata: bytes = _wire.EMPTY, payload: _wire.Buffer = b"") -> None:
        """Sends a frame: when this returns, it outlives this process. A forked process sends nothing."""
        if not self.is_own():
            return
        try:
            if len(payload) <= _wire.INLINE_BYTES_MAX:
                data = _wire.frame(kind, number, metadata, payload)
                with self._writing:
                    self.socket.sendall(data)
            else:
                head = _wire.head(kind, number, metadata, len(payload))
                with self._writing:
                    self.socket.sendall(head)
                    self.socket.sendall(payload)
        except OSError as error:
            lost(error)

    def heartbeat(self) -> None:
        """Says that this process lives, unless another thread is writing: then bytes flow, which say as much."""
        self.check()
        if self._writing.acquire(False):
            try:
                self.socket.sendall(_wire.frame(_wire.HEARTBEAT, 0))
            except OSError as error:
                lost(error)
            finally:
                self._writing.release()


def _identity(socket: _socket.socket) -> tuple[int, int]:
    found = os.fstat(socket.fileno())
    return found.st_dev, found.st_ino


def lost(error: OSError) -> NoReturn:
    """Ends a worker that cannot use its link any more. It is silent if the supervisor is gone."""
    if error.errno not in (errno.EPIPE, errno.ECONNRESET):
        sentence = (
            "code in this worker closed or replaced the worker's link to its supervisor, or another descriptor that "
            f"it did not open ({error}); the worker ends here. Close only descriptors that you opened\n"
        )
        try:
            os.write(2, sentence.encode())
        except OSError:
            pass
    os._exit(1)


def _order_memory() -> bool:
    """Has the supervisor's barriers order this process's stores before its later loads, in which a job is begun."""
    number = _MEMBARRIER.get(os.uname().machine)
    try:
        # Importing ctypes itself takes a tenth of a worker's start.
        import _ctypes

        # `None` names the program itself, which the type of the function does not say.
        call = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "syscall")  # type: ignore[arg-type]
        return number is not None and _ctypes.call_function(call, (number, _REGISTER_GLOBAL_EXPEDITED, 0, 0)) == 0
    except (ImportError, AttributeError, OSError):
        return False


def inherited() -> _socket.socket | None:
    """The descriptor that the supervisor left; none if a person has started this program."""
    try:
        number = int(os.environ[LINK_VARIABLE])
        if number <= 2:
            return None
        link = _socket.socket(fileno=number)
        os.set_inheritable(number, False)
    except (KeyError, ValueError, OSError):
        return None
    link.settimeout(None)
    return link


def shake_hands(
    link: Link, reader: _wire.Reader, version: str, *, takes_ahead: bool, takes_files: bool = False
) -> tuple[_wire.WorkerWelcome, memoryview | None]:
    """Says hello and waits for the welcome, and the words of the journal if there is one. Frames behind it stay with
    the reader. Raises ``Refused``."""
    capabilities = _wire.WORKER_LIMITS
    if takes_ahead and _order_memory():
        capabilities |= _wire.WORKER_CLAIMS | _wire.WORKER_BEATS
    if takes_files:
        capabilities |= _wire.WORKER_FILES
    link.socket.sendall(_wire.hello(_wire.WORKER, capabilities, version))
    lent: list[int] = []
    receive = _files.receiver(link.socket, lent)
    is_lent = False
    while True:
        while reader.frames:
            kind, _, metadata, _ = reader.frames.popleft()
            if kind == _wire.JOURNAL:
                is_lent = True
            elif kind == _wire.REFUSED:
                raise Refused(": ".join(_wire.refused(metadata)))
            elif kind == _wire.WORKER_WELCOME:
                welcome = _wire.WorkerWelcome(metadata)
                if not is_lent:
                    return welcome, None
                # The supervisor counts on it from here on.
                if not lent:
                    raise Refused("its journal did not come along: see `rlimits.nofile`")
                journal = _journal(lent[-1])
                for descriptor in lent:
                    os.close(descriptor)
                return welcome, journal
        chunk = receive(_wire.READ_BYTES, 0)
        if not chunk:
            raise Refused("the supervisor closed the link before it said welcome")
        reader.take(chunk)
