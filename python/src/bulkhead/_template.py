"""A template (``start.mode = "fork"``): this process initialises once, runs no job, and forks the bulkhead's workers.

What it says to the keeper, and hears, is in ``shared/src/template_protocol.rs``: whole messages on a SOCK_SEQPACKET
socket. Workers are forked as siblings, so that they are the keeper's children, which ``os.fork`` cannot do: CPython's
own preparations for a fork stand around the system call. In a sandbox each worker steps apart from the others
(``_rules.py``), and its seal takes the right to fork like its template from it.
"""

from __future__ import annotations

import _socket
import gc
import os
import stat
import struct
import sys
from collections import deque

from . import _files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeVar

    from ._rules import Rules

    T = TypeVar("T")

TEMPLATE_VARIABLE = "BULKHEAD_TEMPLATE"
#: Libraries that start threads when they are imported do not, unless these say otherwise.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_ORDER_BYTES_MAX = 512
_TEXT_BYTES_MAX = 512
_DESCRIPTORS = 3
_CLONE_PARENT, _SIGCHLD, _SIGKILL = 0x8000, 17, 9
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
#: Variables that name the temporary folder, unless ``env`` sets them.
_OF_FOLDER = (b"TMPDIR", b"HOME")
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
    try:
        system = _System()
        rules = _sandbox(system)
        for variable in THREAD_VARIABLES:
            os.environ.setdefault(variable, "1")
        prepared = prepare()
        _check_threads()
    except BaseException as error:
        from ._serve import print_traceback, told

        print_traceback(error)
        text = str(error) if isinstance(error, _Unfit) else f"initialisation failed: {told(error)}"
        end(socket, text)
    # What is there stays: children that do not touch it share it.
    gc.collect()
    gc.freeze()
    try:
        socket.send(b"R")
        newcomer = _Newcomer(socket, system, rules)
        if rules is not None:
            rules.prepare()
        while True:
            worker, secret, descriptors = _next_order(socket, rules)
            _check_threads()
            # What is not written would be written twice.
            flush()
            pid = system.fork()
            if pid == 0:
                newcomer.become_worker(worker, secret, descriptors)
                return prepared
            for descriptor in descriptors:
                os.close(descriptor)
            if pid > 0:
                socket.send(b"D" + struct.pack("<QI", worker, pid))
            else:
                socket.send(b"X" + struct.pack("<Qi", worker, -pid))
            if rules is not None:
                rules.prepare()
    except _Unfit as error:
        end(socket, str(error))
    except OSError:
        # The keeper is gone, and this process goes with it.
        os._exit(1)


def _sandbox(system: _System) -> Rules | None:
    """What the keeper tells of the sandbox, if there is one."""
    if not stat.S_ISREG(os.fstat(0).st_mode):
        return None
    from . import _rules

    _given_rules.append(os.dup(0))
    rules = _rules.told(system.call)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    if rules is not None:
        # Others of this user are not to read this memory, or take these descriptors.
        system.control(_PR_SET_DUMPABLE, 0)
        if rules.leave_temporary_files_open():
            print(
                "`read` or `write` give what the temporary folders lie in: workers reach each other's", file=sys.stderr
            )
    return rules


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


def end(socket: _socket.socket, text: str) -> NoReturn:
    """Ends this template. Operators and clients see the text as the reason."""
    try:
        socket.send(b"E" + text.encode(errors="replace")[:_TEXT_BYTES_MAX])
    except OSError:
        pass
    flush()
    os._exit(1)


def flush() -> None:
    """Writes out what standard output and error still hold, if they can be written to."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            # It was closed or replaced.
            pass


class _System:
    """The system calls that Python has no words for."""

    def __init__(self) -> None:
        import platform

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
        self._long = ctypes.c_long
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

    def call(self, number: int, *arguments: int | bytes) -> int:
        """A system call; raises OSError."""
        result = int(self._library.syscall(*(self._long(a) if isinstance(a, int) else a for a in (number, *arguments))))
        if result < 0:
            raise OSError(self._errno(), f"system call {number}")
        return result

    def control(self, option: int, value: int) -> None:
        """prctl(2)."""
        if self._library.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(self._errno(), "prctl")

    def reseed(self) -> None:
        """What draws random numbers in this process has a state of its own from here on."""
        low, high = struct.unpack("<Ii", os.urandom(8))
        self._library.srand(low)
        self._library.srand48(high)
        # The module `random` has seen to itself, at the fork.
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()


#: Descriptor of the sandbox rules from the keeper.
_given_rules: list[int] = []


def start_again(variable: str) -> NoReturn:
    """Replaces this process by a fresh interpreter with this environment variable, which has initialised nothing
    yet."""
    from ._link import LINK_VARIABLE

    for descriptor in _given_rules:
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.dup2(descriptor, 0)
    os.environ[variable] = "1"
    os.set_inheritable(int(os.environ[LINK_VARIABLE]), True)
    flush()
    os.execv(sys.executable, sys.orig_argv)


def threads() -> list[str]:
    """Returns the names of all threads except the main one."""
    # With the folder itself and its own folders, its links are two more than threads.
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


def _check_threads() -> None:
    names = threads()
    if names:
        raise _Unfit(
            f'`start.mode = "fork"` takes a process of one thread, and `init` left {", ".join(names[:8])} beside it: '
            "start threads in `after_fork`, or leave `start.mode` out"
        )


def _next_order(socket: _socket.socket, rules: Rules | None) -> tuple[int, bytes, list[int]]:
    """Waits for an order to fork: the worker's name, what makes its folder's one that cannot be guessed, and its link,
    standard output and error. Removes folders meanwhile."""
    descriptors: list[int] = []
    receive = _files.receiver(socket, descriptors)
    while True:
        try:
            message = receive(_ORDER_BYTES_MAX, _socket.MSG_DONTWAIT if _doomed else 0)
        except BlockingIOError:
            temporary = None if rules is None else rules.temporary
            if temporary is None or temporary.remove(_doomed[0]):
                _doomed.popleft()
            continue
        if not message:
            raise ConnectionResetError
        if message[:1] in (b"F", b"R") and len(message) == 25:
            (worker,) = struct.unpack_from("<Q", message, 1)
            if message[:1] == b"R":
                _doomed.append(_folder_name(worker, message[9:]))
            elif len(descriptors) == _DESCRIPTORS:
                return worker, message[9:], descriptors
            else:
                socket.send(b"X" + struct.pack("<Qi", worker, 24) + b"descriptors")  # EMFILE
        while descriptors:
            os.close(descriptors.pop())


#: Names of folders that are to be removed.
_doomed: deque[bytes] = deque()


def _folder_name(worker: int, secret: bytes) -> bytes:
    return b"%d-%032x" % (worker, int.from_bytes(secret, "little"))


class _Newcomer:
    """What makes a forked process a worker like others."""

    def __init__(self, socket: _socket.socket, system: _System, rules: Rules | None) -> None:
        self._socket = socket
        self._system = system
        self._rules = rules
        self._parent, self._template = os.getppid(), os.getpid()

    def become_worker(self, worker: int, secret: bytes, descriptors: list[int]) -> None:
        """In the forked process: does all, or says what failed and ends."""
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
            step = "temporary folder"
            name = _folder_name(worker, secret)
            temporary = None if self._rules is None else self._rules.temporary
            folder = None if temporary is None else temporary.make(name)
            step = "landlock"
            if self._rules is not None:
                self._step_apart(self._rules, name, folder)
            step = "keeper"
            self._socket.send(b"B" + struct.pack("<Q", worker))
            # The environment says that the link is where the socket was.
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

    def _step_apart(self, rules: Rules, name: bytes, folder: int | None) -> None:
        """Puts this process under rules that nothing else is under."""
        rules.put_in_force(folder)
        try:
            os.kill(self._template, 0)
        except PermissionError:
            pass
        else:
            raise OSError(131, "landlock")  # ENOTRECOVERABLE: the template is one that it must not reach.
        if rules.temporary is not None:
            path = rules.temporary.path
            for variable in _OF_FOLDER:
                if os.environb.get(variable) in (None, path):
                    os.environb[variable] = os.path.join(path, name)
            tempfile: Any = sys.modules.get("tempfile")
            if tempfile is not None:
                tempfile.tempdir = None
