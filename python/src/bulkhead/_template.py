"""A template (``start.mode = "fork"``): this process initialises once, runs no job, and forks the bulkhead's workers.

What it says to the keeper, and hears, is in ``shared/src/template_protocol.rs``: whole messages on a SOCK_SEQPACKET
socket. Workers are forked as siblings, so that they are the keeper's children, which ``os.fork`` cannot do: CPython's
own preparations for a fork stand around the system call. Without a sandbox only.
"""

from __future__ import annotations

import _socket
import gc
import os
import platform
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeVar

    T = TypeVar("T")

__all__ = ["THREAD_VARIABLES", "is_wanted", "serve_forks"]

TEMPLATE_VARIABLE = "BULKHEAD_TEMPLATE"
#: Libraries that start threads when they are imported do not, unless these say otherwise.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_ORDER_BYTES_MAX = 512
_TEXT_BYTES_MAX = 512
_DESCRIPTORS = 3
_CLONE_PARENT, _SIGCHLD, _SIGKILL = 0x8000, 17, 9
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Of clone(2).
_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220}


class _Unfit(Exception):
    """This process cannot be a template; the text says why."""


def is_wanted() -> bool:
    """Whether this process is to be a template."""
    return TEMPLATE_VARIABLE in os.environ


def serve_forks(socket: _socket.socket, prepare: Callable[[], T]) -> T:
    """Prepares, and forks a worker for each order. Returns only in workers: what ``prepare`` did; the template's
    socket has become the worker's link."""
    parent = os.getppid()
    try:
        if stat.S_ISREG(os.fstat(0).st_mode):
            raise _Unfit('Python has `start.mode = "fork"` only with `sandbox.profile = "none"`: leave one out')
        system = _System()
        for variable in THREAD_VARIABLES:
            os.environ.setdefault(variable, "1")
        prepared = prepare()
        _check_threads()
    except BaseException as error:
        import traceback

        traceback.print_exc()
        text = str(error) if isinstance(error, _Unfit) else f"initialisation failed: {type(error).__name__}: {error}"
        _end(socket, text)
    # What is there stays: children that do not touch it share it.
    gc.collect()
    gc.freeze()
    try:
        socket.send(b"R")
        while True:
            worker, descriptors = _next_order(socket)
            _check_threads()
            _flush()
            pid = system.fork()
            if pid == 0:
                _become_worker(socket, system, parent, worker, descriptors)
                return prepared
            for descriptor in descriptors:
                os.close(descriptor)
            if pid > 0:
                socket.send(b"D" + struct.pack("<QI", worker, pid))
            else:
                socket.send(b"X" + struct.pack("<Qi", worker, -pid))
    except _Unfit as error:
        _end(socket, str(error))
    except OSError:
        # The keeper is gone, and this process goes with it.
        os._exit(1)


class Starting:
    """What ``init`` may say of itself in a template."""

    def __init__(self, socket: _socket.socket) -> None:
        self._socket = socket

    def say_status(self, text: str) -> None:
        """Tells operators what this template is doing."""
        self._socket.send(b"S" + text.encode(errors="replace")[:_TEXT_BYTES_MAX].decode(errors="ignore").encode())

    def extend_start(self, seconds: float) -> None:
        """Asks for more time to start."""
        self._socket.send(b"M" + struct.pack("<I", min(max(round(seconds * 1e3), 0), 0xFFFF_FFFF)))


def _end(socket: _socket.socket, text: str) -> NoReturn:
    try:
        socket.send(b"E" + text.encode(errors="replace")[:_TEXT_BYTES_MAX])
    except OSError:
        pass
    _flush()
    os._exit(1)


def _flush() -> None:
    """What is not written would be written twice."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass


class _System:
    """The system calls that Python has no words for."""

    def __init__(self) -> None:
        try:
            import ctypes
        except ImportError:
            raise _Unfit('`start.mode = "fork"` takes an interpreter with ctypes: leave it out') from None
        if sys.implementation.name != "cpython" or platform.machine() not in _CLONE:
            raise _Unfit('`start.mode = "fork"` takes CPython on x86-64, aarch64 or riscv64: leave it out')
        # With the interpreter's lock held, as os.fork() does.
        library: Any = ctypes.PyDLL(None, use_errno=True)
        library.syscall.restype = ctypes.c_long
        self._library = library
        self._interpreter: Any = ctypes.pythonapi
        self._errno = ctypes.get_errno
        self._arguments = [ctypes.c_long(value) for value in (_CLONE[platform.machine()], _CLONE_PARENT | _SIGCHLD)]
        self._arguments += [ctypes.c_long(0)] * 4

    def fork(self) -> int:
        """Forks a child of this process's parent: its number, 0 in the child, or less: the error."""
        self._interpreter.PyOS_BeforeFork()
        pid = int(self._library.syscall(*self._arguments))
        if pid == 0:
            self._interpreter.PyOS_AfterFork_Child()
            return 0
        error = self._errno()
        self._interpreter.PyOS_AfterFork_Parent()
        return pid if pid > 0 else -error

    def control(self, option: int, value: int) -> None:
        """prctl(2)."""
        if self._library.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(self._errno(), "prctl")

    def reseed(self) -> None:
        """What draws random numbers in this process has a state of its own from here on."""
        low, high = struct.unpack("<Ii", os.urandom(8))
        self._library.srand(low)
        self._library.srand48(high)
        random = sys.modules.get("random")
        if random is not None:
            random.seed()
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()


def _check_threads() -> None:
    threads = os.listdir("/proc/self/task")
    if len(threads) == 1:
        return
    names = []
    for thread in threads:
        if int(thread) != os.getpid():
            try:
                with open(f"/proc/self/task/{thread}/comm") as file:
                    names.append(repr(file.read().strip()))
            except OSError:
                continue
    if names:
        raise _Unfit(
            f'`start.mode = "fork"` takes a process of one thread, and `init` left {", ".join(names[:8])} beside it: '
            "start threads in `after_fork`, or leave `start.mode` out"
        )


def _next_order(socket: _socket.socket) -> tuple[int, list[int]]:
    """Waits for an order to fork: the worker's name, and its link, standard output and error."""
    while True:
        message, control, _, _ = socket.recvmsg(
            _ORDER_BYTES_MAX, _socket.CMSG_SPACE(4 * _DESCRIPTORS), _socket.MSG_CMSG_CLOEXEC
        )
        if not message:
            raise ConnectionResetError
        descriptors: list[int] = []
        for level, kind, data in control:
            if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                descriptors.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
        if message[:1] == b"F" and len(message) >= 9:
            (worker,) = struct.unpack_from("<Q", message, 1)
            if len(descriptors) == _DESCRIPTORS:
                return worker, descriptors
            socket.send(b"X" + struct.pack("<Qi", worker, 24))  # EMFILE
        for descriptor in descriptors:
            os.close(descriptor)


def _become_worker(socket: _socket.socket, system: _System, parent: int, worker: int, descriptors: list[int]) -> None:
    """What a forked process does before it is a worker like others."""
    try:
        os.setsid()
        system.control(_PR_SET_CHILD_SUBREAPER, 1)
        system.control(_PR_SET_PDEATHSIG, _SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        link, stdout, stderr = descriptors
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        system.reseed()
        socket.send(b"B" + struct.pack("<Q", worker))
        # The environment says that the link is where the socket was.
        number = socket.detach()
        os.dup2(link, number, inheritable=False)
        for descriptor in descriptors:
            os.close(descriptor)
        del os.environ[TEMPLATE_VARIABLE]
    except OSError as error:
        try:
            socket.send(b"X" + struct.pack("<Qi", worker, error.errno or 5))
        except OSError:
            pass
        os._exit(1)
