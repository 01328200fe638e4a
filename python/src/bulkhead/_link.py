"""A worker's end of the link to the supervisor: handshake, journal, and thread-safe writing."""

from __future__ import annotations

import _socket
import _thread
import errno
import mmap
import os

from . import _files, _stack_text, _wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# Copied before the caller's main module is imported, because the main module can replace this function, as gevent does.
_Lock = _thread.allocate_lock

LINK_VARIABLE = "BULKHEAD_LINK_FD"
JOURNAL_BYTES = 69_632
_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_REGISTER_GLOBAL_EXPEDITED = 4


class Refused(Exception):
    """The supervisor refused this worker. The text contains the reason."""


def _journal(descriptor: int) -> memoryview:
    """Maps the journal, shared memory that outlives this process, as an array of 64-bit words.

    Each word is written with a single store. The worker writes word 1, the number of the last job that it began, and
    word 2, the time of the last heartbeat. The supervisor writes word 3, the number of the last recalled job.
    """
    if os.fstat(descriptor).st_size < JOURNAL_BYTES:
        raise Refused("the journal has an unexpected size")
    return memoryview(mmap.mmap(descriptor, JOURNAL_BYTES)).cast("Q")


class Link:
    """Socket of the link to the supervisor, with a lock for writers."""

    __slots__ = ("_identity", "_owner", "_writing", "socket")

    def __init__(self, socket: _socket.socket) -> None:
        self.socket = socket
        self._identity = _identity(socket)
        self._owner = os.getpid()
        self._writing = _Lock()

    def is_own(self) -> bool:
        """Returns false in a process that was forked from the worker, whether in Python or in C."""
        return os.getpid() == self._owner

    def check(self) -> None:
        """Exits if the link's descriptor now refers to another file."""
        try:
            if _identity(self.socket) != self._identity:
                raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        except OSError as error:
            end_without_link(error)

    def send(self, kind: int, number: int, metadata: bytes = _wire.EMPTY, payload: _wire.Buffer = b"") -> None:
        """Sends a frame. It is delivered even if this process exits afterwards. Forked processes send nothing."""
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
            end_without_link(error)

    def heartbeat(self) -> None:
        """Sends a heartbeat, unless another thread is writing, because any data proves that this process is alive."""
        self.check()
        self.send_unless_busy(_wire.HEARTBEAT, 0)

    def send_unless_busy(self, kind: int, number: int, metadata: bytes = _wire.EMPTY) -> bool:
        """Sends a small frame, and returns false if another frame is being sent.

        The other frame belongs to another thread, or to code that a signal handler has interrupted.
        """
        held: list[bool] = []
        try:
            if not try_acquire(self._writing, held):
                return False
            self.socket.sendall(_wire.frame(kind, number, metadata))
        except OSError as error:
            end_without_link(error)
        finally:
            if held and held[0]:
                self._writing.release()
        return True


def try_acquire(lock: _thread.LockType, held: list[bool]) -> bool:
    """Acquires a lock if it is free. Appends the result to ``held``, and returns it.

    A signal handler can raise an exception before this function returns. The caller must therefore release the lock if
    ``held`` says so.
    """
    # Signal handlers run only after `extend` has stored the result.
    held.extend(map(lock.acquire, (False,)))
    return held[0]


def _identity(socket: _socket.socket) -> tuple[int, int]:
    found = os.fstat(socket.fileno())
    return found.st_dev, found.st_ino


def end_without_link(error: OSError) -> NoReturn:
    """Exits after the link was lost. Prints a message unless the supervisor closed the link.

    Re-raises an exception without an error number, because it comes from a signal handler.
    """
    if error.errno is None:
        raise error
    if error.errno in (errno.EPIPE, errno.ECONNRESET):
        os._exit(1)
    exit_with_message(
        "code in this worker closed or replaced the worker's link to the supervisor, or another descriptor that "
        f"the code did not open ({error}); the worker exits. Close only descriptors that you opened\n"
    )


def exit_with_message(message: str) -> NoReturn:
    """Prints a message and exits immediately. Avoids ``sys.stderr``, which a handler may have closed."""
    try:
        os.write(2, message.encode())
    except OSError:
        pass
    os._exit(1)


def _register_memory_barriers() -> bool:
    """Registers this process for the supervisor's memory barriers (membarrier(2)).

    The barriers ensure that the store that begins a job is visible before the load that checks for a recall. Returns
    false if barriers are not available.
    """
    number = _MEMBARRIER.get(os.uname().machine)
    try:
        # Importing ctypes would take a tenth of a worker's start time.
        import _ctypes

        # `None` means the program itself. The type stub does not allow it.
        call = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "syscall")  # type: ignore[arg-type]
        return number is not None and _ctypes.call_function(call, (number, _REGISTER_GLOBAL_EXPEDITED, 0, 0)) == 0
    except (ImportError, AttributeError, OSError):
        return False


def inherited() -> _socket.socket | None:
    """Returns the link that was inherited from the supervisor, or None if the program was started by other means."""
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


def handshake(
    link: Link, reader: _wire.Reader, version: str, *, can_prefetch: bool, takes_files: bool = False
) -> tuple[_wire.WorkerWelcome, memoryview | None, int | None]:
    """Performs the handshake. Returns the welcome, and the words of the journal if there is one.

    The third value is the descriptor of the journal's file, if the file has room for stacks as text. Frames that follow
    the welcome stay in the reader. Raises ``Refused``.
    """
    capabilities = _wire.WORKER_LIMITS
    if can_prefetch and _register_memory_barriers():
        capabilities |= _wire.WORKER_PREFETCH | _wire.WORKER_JOURNAL_HEARTBEATS
    if takes_files:
        capabilities |= _wire.WORKER_FILES
    if _stack_text.is_available():
        capabilities |= _wire.WORKER_STACK_TEXT
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
                    return welcome, None, None
                # From now on, the supervisor relies on the journal.
                if not lent:
                    raise Refused("the journal's descriptor did not arrive: raise `rlimits.nofile`")
                journal = _journal(lent[-1])
                has_room = os.fstat(lent[-1]).st_size >= JOURNAL_BYTES + _stack_text.FILE_BYTES
                stack_file = lent.pop() if has_room and capabilities & _wire.WORKER_STACK_TEXT else None
                for descriptor in lent:
                    os.close(descriptor)
                return welcome, journal, stack_file
        chunk = receive(_wire.READ_BYTES, 0)
        if not chunk:
            raise Refused("the supervisor closed the link before sending a welcome")
        reader.take(chunk)
