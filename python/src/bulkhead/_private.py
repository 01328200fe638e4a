"""A private supervisor: its folder, program, process and shutdown.

The supervisor always exits with this process. It holds a pidfd of this process (``--while-open``), stops when the pidfd
reports the exit, and removes the folder (``--own-folder``). This module knows nothing about jobs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ._runtime_dir import runtime_dir
from .errors import SupervisorNotFound

#: Service manager variables that are meant only for this process. They are not passed to the supervisor or workers.
SERVICE_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")

#: Maximum length of a Unix socket's path in bytes, without the terminating NUL.
SOCKET_PATH_BYTES_MAX = 107
#: Longest name of a socket or lock in the folder.
LONGEST_NAME = "admin.sock.lock"
#: Maximum time from the start of the supervisor until it is listening, in seconds.
START_SECONDS_MAX = 30.0
#: Maximum time for idle workers to exit on their own, in seconds.
STOP_SECONDS_MAX = 10.0

#: Maximum time that a call waits for its crash report, in seconds.
REPORT_SECONDS_MAX = 0.5
#: Maximum total size of the variables that workers get before their interpreters start. The remaining variables are
#: part of the preparation data, because arguments and environment together are limited to 96 KiB.
PASSED_BYTES_MAX = 24 * 1024
#: Surrogate characters, which stand for undecodable bytes and cannot occur in the configuration.
_UNDECODED = re.compile("[\ud800-\udfff]")


class SupervisorFailed(RuntimeError):
    """The supervisor could not be started, or rejected its options. The text is the supervisor's message."""


def find_supervisor() -> str:
    """Returns the path of ``bulkhead-supervisor``, from ``$BULKHEAD_SUPERVISOR``, the wheel or ``PATH``.

    Raises ``SupervisorNotFound`` with installation instructions.
    """
    named = os.environ.get("BULKHEAD_SUPERVISOR")
    if named:
        if os.path.isfile(named) and os.access(named, os.X_OK):
            return named
        raise SupervisorNotFound(f"$BULKHEAD_SUPERVISOR is {named!r}, which is not an executable program")
    try:
        import bulkhead_supervisor  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        pass
    else:
        return str(bulkhead_supervisor.path())
    found = shutil.which("bulkhead-supervisor")
    if found:
        return found
    raise SupervisorNotFound(
        "bulkhead-supervisor is neither installed nor in PATH: in a checkout of Bulkhead, run "
        "`pip install ./python/supervisor ./python`, or set $BULKHEAD_SUPERVISOR to the path of the program"
    )


def passed_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of an environment that a worker gets before its interpreter starts.

    This is the whole environment unless the environment is very large. The search paths for the loader and for Python
    have priority, followed by the shortest variables.
    """
    passed: dict[str, str] = {}
    room = PASSED_BYTES_MAX
    for name, value in sorted(variables.items(), key=lambda v: (not v[0].startswith(("LD_", "PYTHON")), len(v[1]))):
        room -= len(os.fsencode(f"{name}={value}")) + 1
        if room < 0:
            break
        is_text = not _UNDECODED.search(name + value)
        if name and "=" not in name and not name.startswith("BULKHEAD_") and is_text:
            passed[name] = value
    return passed


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` updated with ``over``. Tables are merged recursively; None removes a key."""
    result = dict(base)
    for key, value in over.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            before = result.get(key)
            result[key] = merged(before if isinstance(before, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def to_toml(value: Any) -> str:
    """Returns a configuration value in TOML, with inline tables. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if _UNDECODED.search(value):
            raise ValueError(f"{value!r} is not valid UTF-8, so a configuration cannot contain it: use another name")
        # A JSON string is a valid TOML basic string except for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, os.PathLike):
        return to_toml(os.fspath(value))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{to_toml(str(key))} = {to_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    raise TypeError(f"a configuration cannot contain the value {value!r}")


def _document(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{to_toml(key)} = {to_toml(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def _make_folder(outer: str | None) -> str:
    """Creates a private folder with a path that is short enough for Unix sockets."""
    tried: list[str] = []
    prefix = f"bulkhead-{os.getpid()}-" if outer else "bulkhead-"
    parents = (outer, tempfile.gettempdir(), runtime_dir(), "/tmp", "/dev/shm")
    for parent in filter(None, parents):
        longest = os.path.join(parent, f"{prefix}12345678", LONGEST_NAME)
        if len(os.fsencode(longest)) > SOCKET_PATH_BYTES_MAX:
            continue
        try:
            return tempfile.mkdtemp(prefix=prefix, dir=os.path.abspath(parent))
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
    raise SupervisorFailed("failed to create a directory for the supervisor's sockets: " + "; ".join(tried))


class PrivateSupervisor:
    """A supervisor that this process starts and that exits with this process.

    The constructor creates the folder, so that files can be added before the start. A forked child neither uses nor
    stops the supervisor.
    """

    def __init__(
        self, name: str, bulkhead: Mapping[str, Any], supervisor: Mapping[str, Any], outer: str | None = None
    ) -> None:
        """Creates the supervisor's folder.

        If this process is a worker of a pool, ``outer`` is that pool's folder. The new folder is created inside
        ``outer``, so that the pool removes it if this process is killed.
        """
        self.name = name
        self.folder = _make_folder(outer)
        self.socket = os.path.join(self.folder, "jobs.sock")
        self.admin = os.path.join(self.folder, "admin.sock")
        self._bulkhead = dict(bulkhead)
        self._supervisor = {**supervisor, "socket": self.socket, "admin": self.admin}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        #: Files in the folder that new workers need, with the functions that create them.
        self._kept: dict[str, Callable[[], object]] = {}
        self._descriptor = -1
        try:
            # systemd-tmpfiles removes old files from /tmp, but skips a folder with this lock.
            self._descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            # The log is in memory, because the supervisor removes the folder when it exits.
            self._log = open(os.memfd_create("bulkhead-log", os.MFD_CLOEXEC), "wb", buffering=0)  # noqa: SIM115
        except BaseException:
            self._unlock()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _unlock(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        """Closes the log and the folder's lock, for example in a forked child."""
        self._log.close()
        self._unlock()

    def keep(self, path: str, make: Callable[[], object]) -> None:
        """Registers a function that recreates a file if the folder was emptied."""
        self._kept[path] = make

    def restore_folder(self) -> None:
        """Restores registered files if the folder was emptied, and removes the folders of dead workers' pools."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                pid = name.removeprefix("bulkhead-").partition("-")[0]
                if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                    shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)
        for path, make in self._kept.items():
            if not os.path.lexists(path):
                with suppress(OSError):
                    os.makedirs(self.folder, 0o700, exist_ok=True)
                    make()

    def write(self, name: str, content: bytes) -> str:
        """Writes a file that only this user can read to the folder. Returns the path."""
        path = os.path.join(self.folder, name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        return path

    def fifo(self, name: str) -> str:
        """Creates a FIFO in the folder. Returns the path."""
        path = os.path.join(self.folder, name)
        os.mkfifo(path, 0o600)
        return path

    def add_variables(self, variables: Mapping[str, str]) -> None:
        """Adds environment variables for the workers. Variables from the configuration take precedence."""
        self._bulkhead["env"] = {**variables, **self._bulkhead.get("env", {})}

    def start(self, command: list[str]) -> None:
        """Starts the supervisor with workers that run ``command``.

        Returns when the supervisor is listening. Workers may not be ready yet. Raises ``SupervisorNotFound``, or
        ``SupervisorFailed`` with the supervisor's message.
        """
        try:
            program = find_supervisor()
            keys = {**self._bulkhead, "command": command}
            document = _document({"supervisor": self._supervisor, f"bulkhead.{to_toml(self.name)}": keys})
            config = self.write("workers.toml", document.encode())
            caller = os.pidfd_open(self._owner)
            # A duplicate, because gevent forks with `os.fork`, where `forget` closes the log before the child uses it.
            log = os.dup(self._log.fileno())
            try:
                ends = ["--while-open", str(caller), "--own-folder", self.folder]
                # Assigned before the start, because a signal handler can interrupt the wait for exec.
                self._process = subprocess.Popen.__new__(subprocess.Popen)
                self._process.__init__(  # type: ignore[misc]
                    [program, "--config", config, "--log-level", "error", "--log-output", "off", *ends],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[caller],
                    env={name: value for name, value in os.environ.items() if name not in SERVICE_VARIABLES},
                    # Ctrl-C must reach only this process, which then stops the supervisor in an orderly way.
                    start_new_session=True,
                )
            finally:
                os.close(caller)
                os.close(log)
            self._await_socket()
        except BaseException:
            self.stop(at_once=True)
            raise

    def _await_socket(self) -> None:
        assert self._process is not None
        give_up_at = time.monotonic() + START_SECONDS_MAX
        pause = 0.001
        while not _is_socket(self.socket) or not _is_socket(self.admin):
            if self._process.poll() is not None:
                raise SupervisorFailed(f"bulkhead-supervisor did not start: {self.log()}")
            if time.monotonic() > give_up_at:
                raise SupervisorFailed(
                    f"bulkhead-supervisor was not listening after {START_SECONDS_MAX:.0f} s: {self.log()}"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def log(self) -> str:
        """Returns the last 4 KiB of the supervisor's standard error."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4096, max(size - 4096, 0)).decode(errors="replace").strip()

    @property
    def pid(self) -> int | None:
        """PID of the supervisor, or None before the start."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Returns true if the supervisor is running."""
        return self._process is not None and self._process.poll() is None

    def stop(self, *, at_once: bool = False) -> None:
        """Stops the supervisor and its workers, and removes the folder. Can be called repeatedly.

        If ``at_once`` is true, jobs in flight get no time to finish.
        """
        if os.getpid() != self._owner:
            return
        process = self._process
        if process is not None and not process._child_created:  # type: ignore[attr-defined]
            process = self._process = None
        give_up_at = time.monotonic() + STOP_SECONDS_MAX
        while process is not None and process.poll() is None:
            if time.monotonic() > give_up_at:
                process.kill()
            else:
                process.send_signal(signal.SIGTERM)
            # A second SIGTERM stops everything immediately. Two signals sent together would be merged into one.
            if not _has_ended(process, 0.01 if at_once else STOP_SECONDS_MAX):
                at_once = True
        shutil.rmtree(self.folder, ignore_errors=True)

    def stack_of(self, report: str) -> str:
        """Returns the Python stack from a crash report, or an empty string if the report has no stack.

        Waits for the report, which is written shortly after the outcome.
        """
        from ._admin import AdminError, get

        give_up_at = time.monotonic() + REPORT_SECONDS_MAX
        while (left := give_up_at - time.monotonic()) > 0:
            try:
                found = get(self.admin, f"/v1/crashes/{report}", left)
            except AdminError:
                time.sleep(0.005)
            except (OSError, ValueError):
                break
            else:
                stack = str(found.get("runtime_stack") or "")
                if stack or found.get("cause") == "deadline":
                    return stack
                _, begins, stack = str(found.get("stderr_tail") or "").rpartition("Fatal Python error")
                return begins + stack if begins else ""
        return ""

    def get(self, path: str) -> Any:
        """Returns the parsed JSON response from the admin socket."""
        from ._admin import get

        return get(self.admin, path)


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for a process to exit. Does not poll as ``Popen.wait`` does, with pauses of up to 50 ms.

    Returns true if the process has exited.
    """
    try:
        watched = os.pidfd_open(process.pid)
    except OSError:
        # Another thread has reaped the process, or no descriptor is available.
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    else:
        try:
            poll = select.poll()
            poll.register(watched, select.POLLIN)
            poll.poll(seconds * 1e3)
        finally:
            os.close(watched)
    return process.poll() is not None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
