"""A template (``start.mode = "fork"``): initialises once, runs no jobs, and forks the bulkhead's workers.

The protocol between template and keeper is defined in ``shared/src/template_protocol.rs``: messages on a SOCK_SEQPACKET
socket. Workers are forked as siblings, so that the keeper is their parent. ``os.fork`` cannot do this, so the system
call is made directly, between CPython's fork hooks. In a sandbox, each worker isolates itself from the others
(``_rules.py``). The worker's seal then removes the ability to fork in this way.
"""

from __future__ import annotations

import _socket
import gc
import os
import stat
import struct
import sys
import time
from collections import deque

from . import _files, _stdio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeVar

    from ._rules import Rules

    T = TypeVar("T")

TEMPLATE_VARIABLE = "BULKHEAD_TEMPLATE"
#: Variables that limit the threads of numerical libraries. Set to 1 by default, so that imports start no threads.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

#: Maximum time in seconds until a thread that has been joined is gone. Python joins threads before they have exited.
_EXITING_SECONDS_MAX = 1.0
_ORDER_BYTES_MAX = 512
_TEXT_BYTES_MAX = 512
_DESCRIPTORS = 3
_CLONE_PARENT, _SIGCHLD, _SIGKILL = 0x8000, 17, 9
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
#: Variables that contain the path of the temporary folder, unless ``env`` sets them.
_FOLDER_VARIABLES = (b"TMPDIR", b"HOME")
#: System call numbers of clone(2).
_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220}


class _CannotFork(Exception):
    """This process cannot be a template. The text is the reason."""


def is_wanted() -> bool:
    """Returns true if this process was started as a template."""
    return TEMPLATE_VARIABLE in os.environ


def serve_forks(socket: _socket.socket, prepare: Callable[[], T]) -> T:
    """Prepares the template, and forks a worker for each order from the keeper.

    Returns only in workers, with the result of ``prepare``. The descriptor of the template's socket is then the
    worker's link.
    """
    template = os.getpid()
    try:
        system = _System()
        rules = _sandbox(system)
        for variable in THREAD_VARIABLES:
            os.environ.setdefault(variable, "1")
        prepared = prepare()
        if os.getpid() != template:
            _stdio.exit_child(None)
        _check_threads()
    except BaseException as error:
        if os.getpid() != template:
            _stdio.exit_child(error)
        _stdio.print_traceback(error)
        text = str(error) if isinstance(error, _CannotFork) else f"initialisation failed: {_stdio.describe(error)}"
        end(socket, text)
    # Excludes existing objects from garbage collection, so that workers do not write to shared pages.
    gc.collect()
    gc.freeze()
    try:
        socket.send(b"R")
        forked_worker = _ForkedWorker(socket, system, rules)
        if rules is not None:
            rules.prepare()
        while True:
            worker, secret, descriptors = _next_order(socket, rules)
            _check_threads()
            # Without the flush, both processes would write the buffered output.
            _stdio.flush()
            pid = system.fork()
            if pid == 0:
                forked_worker.become_worker(worker, secret, descriptors)
                return prepared
            for descriptor in descriptors:
                os.close(descriptor)
            if pid > 0:
                socket.send(b"D" + struct.pack("<QI", worker, pid))
            else:
                socket.send(b"X" + struct.pack("<Qi", worker, -pid))
            if rules is not None:
                rules.prepare()
    except _CannotFork as error:
        end(socket, str(error))
    except OSError:
        # The keeper is gone, so this process must exit.
        os._exit(1)


def _sandbox(system: _System) -> Rules | None:
    """Reads the sandbox rules from the keeper, if there are any."""
    if not stat.S_ISREG(os.fstat(0).st_mode):
        return None
    from . import _rules

    _rules_descriptors.append(os.dup(0))
    rules = _rules.read(system.call)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    if rules is not None:
        # Prevents this user's other processes from reading this process's memory or duplicating its descriptors.
        system.control(_PR_SET_DUMPABLE, 0)
        if rules.exposes_temporary_files():
            problem = "workers can access each other's temporary directories"
            print(f"{problem}: check the paths in `read` and `write`", file=sys.stderr)
    return rules


class TemplateStart:
    """Sends the messages that ``init`` can send from a template."""

    def __init__(self, socket: _socket.socket) -> None:
        self._socket = socket

    def report_status(self, text: str) -> None:
        """Reports a status text to operators."""
        self._socket.send(b"S" + text.encode(errors="replace")[:_TEXT_BYTES_MAX].decode(errors="ignore").encode())

    def extend_start(self, seconds: float) -> None:
        """Requests more time to start."""
        self._socket.send(b"M" + struct.pack("<I", min(max(round(seconds * 1e3), 0), 0xFFFF_FFFF)))


def end(socket: _socket.socket, text: str) -> NoReturn:
    """Exits from this template. Operators and clients see the text as the reason."""
    try:
        socket.send(b"E" + text.encode(errors="replace")[:_TEXT_BYTES_MAX])
    except OSError:
        pass
    _stdio.flush()
    os._exit(1)


class _System:
    """System calls for which Python has no function."""

    def __init__(self) -> None:
        import platform

        try:
            import ctypes
        except ImportError:
            raise _CannotFork('`start.mode = "fork"` needs an interpreter with ctypes: omit `start.mode`') from None
        if sys.implementation.name != "cpython" or platform.machine() not in _CLONE:
            raise _CannotFork('`start.mode = "fork"` needs CPython on x86-64, aarch64 or riscv64: omit `start.mode`')
        # PyDLL keeps the GIL during the call, as os.fork() does.
        library: Any = ctypes.PyDLL(None, use_errno=True)
        library.syscall.restype = ctypes.c_long
        self._library = library
        self._interpreter: Any = ctypes.pythonapi
        self._errno = ctypes.get_errno
        self._long = ctypes.c_long
        self._arguments = [ctypes.c_long(value) for value in (_CLONE[platform.machine()], _CLONE_PARENT | _SIGCHLD)]
        self._arguments += [ctypes.c_long(0)] * 4

    def fork(self) -> int:
        """Forks a sibling of this process. Returns the PID, 0 in the new process, or a negative errno."""
        self._interpreter.PyOS_BeforeFork()
        pid = int(self._library.syscall(*self._arguments))
        if pid == 0:
            self._interpreter.PyOS_AfterFork_Child()
            return 0
        error = self._errno()
        self._interpreter.PyOS_AfterFork_Parent()
        return pid if pid > 0 else -error

    def call(self, number: int, *arguments: int | bytes) -> int:
        """Makes a system call. Raises OSError."""
        result = int(self._library.syscall(*(self._long(a) if isinstance(a, int) else a for a in (number, *arguments))))
        if result < 0:
            raise OSError(self._errno(), f"system call {number}")
        return result

    def control(self, option: int, value: int) -> None:
        """Calls prctl(2)."""
        if self._library.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(self._errno(), "prctl")

    def reseed(self) -> None:
        """Reseeds the random number generators of this process."""
        low, high = struct.unpack("<Ii", os.urandom(8))
        self._library.srand(low)
        self._library.srand48(high)
        # The `random` module reseeds itself after a fork.
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()


#: Descriptor of the sandbox rules from the keeper.
_rules_descriptors: list[int] = []


def restart(variable: str) -> NoReturn:
    """Restarts this process in a fresh interpreter, with the environment variable set."""
    from ._link import LINK_VARIABLE

    for descriptor in _rules_descriptors:
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.dup2(descriptor, 0)
    os.environ[variable] = "1"
    os.set_inheritable(int(os.environ[LINK_VARIABLE]), True)
    _stdio.flush()
    os.execv(sys.executable, sys.orig_argv)


def threads() -> list[str]:
    """Returns the names of all threads except the main thread."""
    # The folder's link count is the number of threads plus 2 (for the folder itself and its parent).
    if os.stat("/proc/self/task").st_nlink == 3:
        return []
    names = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            try:
                with open(f"/proc/self/task/{thread}/comm") as file:
                    names.append(repr(file.read().strip()))
            except OSError:
                continue
    return names


def remaining_threads() -> list[str]:
    """Returns the names of all threads except the main thread, after waiting for threads that are exiting."""
    give_up = time.monotonic() + _EXITING_SECONDS_MAX
    while (names := threads()) and time.monotonic() < give_up:
        time.sleep(0.001)
    return names


def _check_threads() -> None:
    names = remaining_threads()
    if names:
        raise _CannotFork(
            f'`start.mode = "fork"` needs a process with a single thread, but `init` left {", ".join(names[:8])}: '
            "start threads in `after_fork`, or remove `start.mode`"
        )


def _next_order(socket: _socket.socket, rules: Rules | None) -> tuple[int, bytes, list[int]]:
    """Waits for a fork order, and meanwhile removes the folders of dead workers.

    Returns the worker's number, the secret part of its folder's name, and its descriptors: link, stdout, stderr.
    """
    descriptors: list[int] = []
    receive = _files.receiver(socket, descriptors)
    while True:
        try:
            message = receive(_ORDER_BYTES_MAX, _socket.MSG_DONTWAIT if _removals else 0)
        except BlockingIOError:
            temporary = None if rules is None else rules.temporary
            if temporary is None or temporary.remove(_removals[0]):
                _removals.popleft()
            continue
        if not message:
            raise ConnectionResetError
        if message[:1] in (b"F", b"R") and len(message) == 25:
            (worker,) = struct.unpack_from("<Q", message, 1)
            if message[:1] == b"R":
                _removals.append(_folder_name(worker, message[9:]))
            elif len(descriptors) == _DESCRIPTORS:
                return worker, message[9:], descriptors
            else:
                socket.send(b"X" + struct.pack("<Qi", worker, 24) + b"descriptors")  # EMFILE
        while descriptors:
            os.close(descriptors.pop())


#: Names of folders to remove.
_removals: deque[bytes] = deque()


def _folder_name(worker: int, secret: bytes) -> bytes:
    return b"%d-%032x" % (worker, int.from_bytes(secret, "little"))


class _ForkedWorker:
    """Turns a forked process into a worker."""

    def __init__(self, socket: _socket.socket, system: _System, rules: Rules | None) -> None:
        self._socket = socket
        self._system = system
        self._rules = rules
        self._parent, self._template = os.getppid(), os.getpid()

    def become_worker(self, worker: int, secret: bytes, descriptors: list[int]) -> None:
        """Performs all steps in the forked process. If a step fails, reports the step and exits."""
        step = "session"
        try:
            os.setsid()
            step = "child subreaper"
            self._system.control(_PR_SET_CHILD_SUBREAPER, 1)
            step = "parent-death signal"
            self._system.control(_PR_SET_PDEATHSIG, _SIGKILL)
            if os.getppid() != self._parent:
                os._exit(1)
            step = "stdio"
            link, stdout, stderr = descriptors
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            step = "random numbers"
            self._system.reseed()
            step = "temporary directory"
            name = _folder_name(worker, secret)
            temporary = None if self._rules is None else self._rules.temporary
            folder = None if temporary is None else temporary.make(name)
            step = "landlock"
            if self._rules is not None:
                self._isolate(self._rules, name, folder)
            step = "keeper"
            self._socket.send(b"B" + struct.pack("<Q", worker))
            # The environment variable contains the number of the socket's descriptor, which the link replaces.
            number = self._socket.detach()
            os.dup2(link, number, inheritable=False)
            for descriptor in descriptors:
                os.close(descriptor)
            del os.environ[TEMPLATE_VARIABLE]
        except BaseException as error:
            number = (isinstance(error, OSError) and error.errno) or 5  # EIO
            try:
                self._socket.send(b"X" + struct.pack("<Qi", worker, number) + step.encode())
            except OSError:
                pass
            os._exit(1)

    def _isolate(self, rules: Rules, name: bytes, folder: int | None) -> None:
        """Isolates this process from the template and from other workers."""
        rules.enforce(folder)
        try:
            os.kill(self._template, 0)
        except PermissionError:
            pass
        else:
            raise OSError(131, "landlock")  # ENOTRECOVERABLE: the template must not be reachable.
        if rules.temporary is not None:
            path = rules.temporary.path
            for variable in _FOLDER_VARIABLES:
                if os.environb.get(variable) in (None, path):
                    os.environb[variable] = os.path.join(path, name)
            tempfile: Any = sys.modules.get("tempfile")
            if tempfile is not None:
                tempfile.tempdir = None
