"""Functions that tests run in worker processes. Every new worker imports this module, so it imports no slow modules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

STATE: list[object] = []


def double(number: int) -> int:
    return number * 2


def echo(value: Any) -> Any:
    return value


def draw() -> tuple[int, float]:
    """Returns the PID and a random number."""
    import random

    return os.getpid(), random.random()


def modes() -> tuple[int, int]:
    """Returns the permissions of a new file and of a new folder."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp()
    with open(f"{folder}/file", "w"):
        os.mkdir(f"{folder}/folder")
    made = tuple(os.stat(f"{folder}/{name}").st_mode & 0o777 for name in ("file", "folder"))
    shutil.rmtree(folder)
    return made[0], made[1]


def attribute(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def loaded(module: str) -> bool:
    return module in sys.modules


def pid() -> int:
    return os.getpid()


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def note_and_wait(folder: str, number: int) -> int:
    """Creates a file named by this number, and waits for a file named ``go``."""
    with open(os.path.join(folder, str(number)), "w") as file:
        file.write("begun")
    give_up = time.monotonic() + 600
    while not os.path.exists(os.path.join(folder, "go")) and time.monotonic() < give_up:
        time.sleep(0.01)
    return number


def hold_the_lock(count: int) -> int:
    """Makes one call that holds the GIL, so that no other thread in this interpreter can run."""
    return sum(range(count))


def add(one: int, *, other: int) -> int:
    return one + other


def fail(words: str) -> None:
    raise ValueError(words)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(status: int = 0) -> None:
    os._exit(status)


def spin(note: str | None = None) -> None:
    """Runs forever. Creates the file ``note``."""
    if note:
        open(note, "w").close()
    while True:
        pass


def handle_stack_signal() -> None:
    """Replaces the worker's handler for the signal that requests stacks."""
    signal.signal(62, lambda *_: None)


def hang(note: str | None = None) -> None:
    """Runs forever, with a grandchild in a separate session. Writes both PIDs to ``note``."""
    grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
    if note:
        with open(note + ".new", "w") as file:
            file.write(f"{os.getpid()} {grandchild.pid}")
        os.rename(note + ".new", note)
    while True:
        pass


def leak() -> None:
    """Allocates memory endlessly."""
    kept = []
    while True:
        kept.append(bytearray(16 << 20))


def note_once(path: str) -> str:
    """Kills the worker on the first call with ``path``, and returns on the second call."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "the second time"
    os._exit(1)


class TwoArguments(Exception):
    """An exception that cannot be unpickled, because pickle passes only one argument to the constructor."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def raise_unreadable() -> None:
    raise TwoArguments("the one", "the two")


def raise_unpicklable() -> None:
    error = ValueError("has a lambda")
    error.what = lambda: None  # type: ignore[attr-defined]
    raise error


def raise_without_traceback() -> None:
    """Raises an exception that ``traceback`` cannot format, because its text is a number."""
    raise SyntaxError("bad", ("file", 1, 1, 7))  # type: ignore[arg-type]


def return_unpicklable() -> Any:
    return lambda: None


def leave_by_exception() -> None:
    sys.exit(3)


def remember(value: object) -> None:
    STATE.append(value)


def use_primitives(number: int) -> int:
    """Uses the lock, the queue and the shared number that were passed to the initializer."""
    lock, queue, shared = STATE[0]  # type: ignore[misc]
    with lock:
        shared.value += number
        queue.put(number)
    return number


def read_file(path: str) -> str:
    with open(path) as file:
        return file.read()


def remembered() -> list[object]:
    return STATE


def fail_to_start() -> None:
    raise RuntimeError("no licence")


def die_at_start() -> None:
    os._exit(9)


def say(words: str, count: int = 1) -> int:
    for _ in range(count):
        print(words)
    return count


class BadOutput:
    def write(self, _text: str) -> None:
        pass

    def flush(self) -> None:
        raise KeyError("flush")


def replace_output() -> int:
    """Replaces standard output with an object that cannot be flushed."""
    sys.stdout = BadOutput()  # type: ignore[assignment]
    return os.getpid()


def complain(words: str) -> None:
    print(words, file=sys.stderr)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def folder() -> str:
    return os.getcwd()


def arguments() -> list[str]:
    return sys.argv


def use_semaphore() -> int:
    """Uses a thread pool, which needs locks, and an inter-process lock, which needs a named semaphore."""
    import multiprocessing.pool

    with multiprocessing.Lock(), multiprocessing.pool.ThreadPool(1) as threads:
        return threads.apply(len, ("abc",))


def connect_out() -> str:
    """Tries to reach the network."""
    import socket

    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except ConnectionRefusedError:
        return "refused by the other side"
    except OSError as error:
        return type(error).__name__
    return "connected"


def nested(number: int) -> int:
    """Uses a pool within a worker."""
    from bulkhead import BulkheadExecutor

    with BulkheadExecutor(1) as pool:
        return int(pool.submit(double, number).result(60))


def nest_and_hang(note: str) -> None:
    """Starts a pool and waits to be killed. Writes the pool's folder to ``note``."""
    from bulkhead import BulkheadExecutor

    pool = BulkheadExecutor(1)
    pool.submit(double, 1).result()
    with open(note, "w") as file:
        file.write(pool._pool.supervisor().folder)
    time.sleep(600)


def fork_twice(folder: str) -> list[str]:
    """Returns the data that a grandchild writes to files that its parent has opened."""
    if (child := os.fork()) == 0:
        files = [open(f"{folder}/{number}", "w") for number in range(8)]  # noqa: SIM115
        if os.fork() == 0:
            for file in files:
                file.write("written")
                file.flush()
            os._exit(0)
        os.wait()
        os._exit(0)
    os.waitpid(child, 0)
    return [open(f"{folder}/{number}").read() for number in range(8)]


def temporary_file() -> str:
    import tempfile

    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("x")
        return os.path.dirname(file.name)


class Bomb:
    """Runs code in the process that unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class BombRaised(Exception):
    def __init__(self, path: str) -> None:
        super().__init__(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.args[0],)


def bomb(path: str) -> Bomb:
    return Bomb(path)


def nested_bomb(path: str) -> Any:
    return {"pictures": [(1, {"a": [Bomb(path)]})]}


def raise_bomb(path: str) -> None:
    raise BombRaised(path)


def plain_data(value: Any) -> Any:
    return value


def answer_next(answer: bytes) -> None:
    """Makes the worker send this raw reply to its next call, as a compromised worker could."""
    import gc

    from bulkhead import _pool_worker

    (worker,) = (found for found in gc.get_objects() if type(found) is _pool_worker._Worker)
    honest = worker._calls

    def answer_once(_payload: Any, _context: Any) -> bytes:
        worker._calls = honest
        return answer

    worker._calls = answer_once


def hold_the_lock_for(seconds: float) -> int:
    """Holds the GIL, so that no thread of the worker reads the link."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return os.getpid()
