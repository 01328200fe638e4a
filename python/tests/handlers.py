"""Handlers for the workers in tests. Imports no slow modules."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import bulkhead
from bulkhead.worker import Context, extend_start, status

#: The last job of the handler ``progress``.
_reported: list[Context] = []
#: Eight jobs meet here.
_meeting = threading.Barrier(8)


@bulkhead.initializer
def init() -> dict[str, Any]:
    how = os.environ.get("INIT", "")
    if how == "fails":
        raise RuntimeError("the model is missing")
    if how == "exits":
        sys.exit("no licence")
    if how == "closes":
        sys.stderr.close()
        raise RuntimeError("the model is missing")
    if how == "unprintable":
        raise Unprintable
    if how == "slow":
        for step in range(8):
            extend_start(5.0)
            status(f"step {step}")
            time.sleep(0.75)
    return {"made": "by init", "thread": threading.get_ident()}


@bulkhead.handler
def echo(payload: bytes, ctx: Context) -> bytes:
    return payload


@bulkhead.handler("about")
def about(payload: bytes, ctx: Context) -> str:
    state = ctx.state
    is_main = threading.current_thread() is threading.main_thread()
    told = (ctx.operation, ctx.tenant, f"{ctx.number:x}", ctx.traceparent, ctx.remaining > 1, ctx.cancelled)
    return repr((*told, state["made"], state["thread"] == threading.get_ident(), is_main))


@bulkhead.handler("pid")
def pid(payload: bytes, ctx: Context) -> str:
    return str(os.getpid())


@bulkhead.handler("kind")
def kind(payload: bytes, ctx: Context) -> Any:
    kinds: dict[bytes, Any] = {
        b"none": None,
        b"str": "größe",
        b"a text of its own": _Text("größe"),
        b"bytearray": bytearray(b"ab"),
        b"view": memoryview(b"abcd")[::2],
        b"int": 7,
    }
    return kinds[bytes(payload)]


@bulkhead.handler("size")
def size(payload: bytes, ctx: Context) -> bytes:
    return bytes(int(payload))


@bulkhead.handler("sleep")
def sleep(payload: bytes, ctx: Context) -> bytes:
    time.sleep(float(payload))
    return b"slept"


@bulkhead.handler("wait")
def wait(payload: bytes, ctx: Context) -> bytes:
    """Waits for the file named by the payload."""
    while not os.path.exists(bytes(payload)):
        time.sleep(0.005)
    return b"waited"


@bulkhead.handler("await")
async def wait_in_loop(payload: bytes, ctx: Context) -> bytes:
    """Waits for the file named by the payload, in the event loop."""
    import asyncio

    while not os.path.exists(bytes(payload)):
        await asyncio.sleep(0.05)
    return b"waited"


@bulkhead.handler("meet")
def meet(payload: bytes, ctx: Context) -> bytes:
    """Waits until eight jobs run concurrently in this worker."""
    _meeting.wait()
    return b"met"


@bulkhead.handler("terminate")
def terminate(payload: bytes, ctx: Context) -> bytes:
    """Sends SIGTERM to its own worker, and then sleeps."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(payload))
    return b"slept"


@bulkhead.handler("stop")
def stop(payload: bytes, ctx: Context) -> bytes:
    """Stops its own worker, and then sleeps."""
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
    return b"slept"


@bulkhead.handler("asleep")
async def asleep(payload: bytes, ctx: Context) -> str:
    import asyncio

    if float(payload) > 10:
        _note("began")
    try:
        await asyncio.sleep(float(payload))
    except asyncio.CancelledError:
        _note(f"cancelled {ctx.cancelled}")
        raise
    return "slept"


@bulkhead.handler("until-cancelled")
def until_cancelled(payload: bytes, ctx: Context) -> None:
    _note("began")
    while not ctx.cancelled:
        time.sleep(0.005)
    _note("saw it")


@bulkhead.handler("cling")
def cling(payload: bytes, ctx: Context) -> Any:
    """Returns only after its cancellation, with an awaitable that cannot be closed."""
    until_cancelled(payload, ctx)
    return _Clinging()


@bulkhead.handler("spin")
def spin(payload: bytes, ctx: Context) -> None:
    """Never ends. Creates the file named by the payload, so that a test knows that the job has begun."""
    if payload:
        open(bytes(payload), "w").close()
    while True:
        pass


@bulkhead.handler("once")
def once(payload: bytes, ctx: Context) -> bytes:
    """Records that the job ran. Depending on the job, sleeps or kills the worker."""
    word, _, rest = bytes(payload).partition(b" ")
    _note(rest.decode())
    if word == b"slow":
        time.sleep(0.02)
    if word == b"segv":
        _segfault()
    if word == b"exit":
        os._exit(3)
    return payload


@bulkhead.handler("raise")
def raises(payload: bytes, ctx: Context) -> None:
    raise ValueError("no such page: 7")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@bulkhead.handler("raise-unprintable")
def raises_unprintable(payload: bytes, ctx: Context) -> None:
    raise Unprintable


class _Stubborn:
    """An object that is not bytes-like and whose ``len()`` raises an unusual exception."""

    def __len__(self) -> int:
        raise OSError("not now")


class _Text(str):
    """A string whose own ``encode`` method fails."""

    def encode(self, *_: Any) -> Any:
        sys.exit(5)


class _Ending:
    """Exits when its class is read."""

    @property
    def __class__(self) -> Any:
        sys.exit(5)

    @__class__.setter
    def __class__(self, _: Any) -> None:
        pass


class _Clinging:
    """An awaitable whose ``close`` raises an exception."""

    def __await__(self) -> Iterator[None]:
        yield None

    def close(self) -> None:
        raise OSError("not now")


_ANSWERS: dict[bytes, Any] = {
    b"an object that ends the program": lambda ctx: _Ending(),
    b"a file's name": lambda ctx: os.fsdecode(b"a\xff"),
    b"an object": lambda ctx: _Stubborn(),
    b"a code that is a number": lambda ctx: bulkhead.HandlerError(404, "x"),  # type: ignore[arg-type]
    b"a message that is an error": lambda ctx: bulkhead.HandlerError("bad", ValueError("x")),  # type: ignore[arg-type]
    b"a released view": lambda ctx: _released(),
    b"progress without words": lambda ctx: ctx.progress(0.2, None),
    b"progress of a word": lambda ctx: ctx.progress("half"),
}


def _released() -> memoryview:
    view = memoryview(b"gone")
    view.release()
    return view


def _answer(payload: bytes, ctx: Context) -> Any:
    if payload == b"an error that was changed":
        error = bulkhead.HandlerError("bad", "x")
        error.code = error.payload = None  # type: ignore[assignment]
        raise error
    return _ANSWERS[payload](ctx)


@bulkhead.handler("answer")
def answer(payload: bytes, ctx: Context) -> Any:
    """Returns a result that cannot be sent."""
    return _answer(payload, ctx)


@bulkhead.handler("aexit")
async def aexit(payload: bytes, ctx: Context) -> None:
    sys.exit(4)


@bulkhead.handler("aexit-later")
async def aexit_later(payload: bytes, ctx: Context) -> str:
    import asyncio

    asyncio.get_running_loop().call_soon(sys.exit, 4)
    await asyncio.sleep(0.01)
    return "left behind"


@bulkhead.handler("aanswer")
async def aanswer(payload: bytes, ctx: Context) -> Any:
    return _answer(payload, ctx)


@bulkhead.handler("exit")
def exits(payload: bytes, ctx: Context) -> None:
    sys.exit(4)


@bulkhead.handler("error")
def error(payload: bytes, ctx: Context) -> None:
    raise bulkhead.HandlerError("bad_page", "größer", retryable=True, fault="caller", payload=bytes(payload))


def _segfault() -> None:
    import ctypes

    ctypes.string_at(0)


@bulkhead.handler("segv")
def segv(payload: bytes, ctx: Context) -> None:
    _segfault()


@bulkhead.handler("hold")
def hold(payload: bytes, ctx: Context) -> bytes:
    """Holds the GIL."""
    import ctypes

    libc = ctypes.PyDLL(None)
    for _ in range(int(float(payload) * 10)):
        libc.usleep(100_000)
    return b"held"


@bulkhead.handler("progress")
def progress(payload: bytes, ctx: Context) -> bytes:
    """Reports progress. With a payload, first waits for the file named by the payload."""
    if payload:
        wait(payload, ctx)
    for step in range(5):
        ctx.progress(step / 10, f"page {step}")
    time.sleep(0.15)
    ctx.progress(0.9, "almost")
    ctx.progress(1.5, "the last word")
    _reported[:] = [ctx]
    return b"read"


@bulkhead.handler("progress-late")
def progress_late(payload: bytes, ctx: Context) -> str:
    """Reports progress of the last job of the handler ``progress``, whose result has been sent."""
    for job in _reported:
        job.progress(0.1, "too late")
    return str(len(_reported))


@bulkhead.handler("fork")
def fork(payload: bytes, ctx: Context) -> str:
    import mmap

    # Shared with the child.
    is_running = mmap.mmap(-1, 1)
    child = os.fork()
    if child == 0:
        if payload == b"exit":
            sys.exit(7)
        if payload == b"term":
            is_running[0] = 1
            time.sleep(60)
        raise RuntimeError("in the child")
    if payload == b"term":
        while not is_running[0]:
            time.sleep(0.005)
        os.kill(child, 15)
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@bulkhead.handler("reach")
def reach(payload: bytes, ctx: Context) -> str:
    """Reports what this process can access: other processes, their temporary folders, or the template's rights."""
    import ctypes
    import json
    import tempfile

    libc = ctypes.PyDLL(None, use_errno=True)
    done: list[str] = []

    def attempt(what: str, action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError as error:
            if error.errno not in (1, 13):  # EPERM, EACCES
                done.append(f"{what}: {error}")
        else:
            done.append(what)

    def call(number: int, *arguments: int) -> int:
        result = int(libc.syscall(*map(ctypes.c_long, (number, *arguments))))
        if result < 0:
            raise OSError(ctypes.get_errno(), "syscall")
        return result

    def fork_a_sibling() -> None:
        if call({"x86_64": 56}.get(os.uname().machine, 220), 0x8000 | 17, 0, 0, 0, 0) == 0:
            os._exit(0)

    for pid in set(json.loads(payload)) - {os.getpid()}:
        attempt("signal", os.kill, pid, 0)
        attempt("environment", lambda pid=pid: os.close(os.open(f"/proc/{pid}/environ", os.O_RDONLY)))
        attempt("descriptors", os.listdir, f"/proc/{pid}/fd")
        attempt("memory", lambda pid=pid: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)))
    above = os.path.dirname(tempfile.gettempdir())
    attempt("folder", os.listdir, above)
    attempt("file", lambda: open(f"{above}/new", "w").close())
    attempt("fork", fork_a_sibling)
    return json.dumps(sorted(set(done)))


@bulkhead.handler("litter")
def litter(payload: bytes, ctx: Context) -> str:
    """Fills its temporary folder with entries that are hard to remove, to the given depth."""
    import tempfile

    here = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY)
    for level in range(int(payload)):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
        os.symlink("/etc", "link", dir_fd=below)
        os.close(os.open(f".bulkhead-{level % 9}", os.O_CREAT | os.O_WRONLY, 0, dir_fd=below))
        os.fchmod(here, 0)
        os.close(here)
        here = below
    return os.environ["TMPDIR"]


@bulkhead.handler("client")
def client(payload: bytes, ctx: Context) -> str:
    """Tries to use a client, which a worker must not do."""
    try:
        return str(bulkhead.Client(payload.decode()).call("plain", b"x").payload)
    except bulkhead.JobError as error:
        return type(error).__name__ + ": " + str(error)


@bulkhead.handler("threads")
def threads(payload: bytes, ctx: Context) -> str:
    time.sleep(0.05)
    return str(threading.active_count())


@bulkhead.handler("libraries")
def libraries(payload: bytes, ctx: Context) -> str:
    """Uses libraries that must work in a sandbox."""
    import hashlib
    import json
    import sqlite3
    import tempfile
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
    database = sqlite3.connect(":memory:")
    assert database.execute("select 1").fetchone() == (1,)
    return json.dumps(hashlib.sha256(b"").hexdigest()[:4])


def _note(text: str) -> None:
    path = os.environ.get("NOTES")
    if path:
        with open(path, "a") as file:
            file.write(text + "\n")


@bulkhead.handler("exhaust")
def exhaust(payload: bytes, ctx: Context) -> None:
    """Makes every later allocation of a large payload in this worker fail."""

    def fail(size: int) -> bytearray:
        raise MemoryError

    ctx._server._reader._allocate = fail  # type: ignore[attr-defined]


@bulkhead.handler("careless")
def careless(payload: bytes, ctx: Context) -> str:
    """Imitates a mistake of a C library that affects the worker itself."""
    import ctypes
    import socket

    if payload == b"fork":
        # The call is made with the GIL held. Otherwise another thread could hold the GIL, and the child would wait
        # forever.
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            ctx.progress(0.5, "in the child")
            return "child"
        return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if payload == b"close":
        os.closerange(3, 256)
        return "closed"
    ours, theirs = socket.socketpair()
    kept = {ours.fileno(), theirs.fileno()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(ours.fileno(), int(name))
    time.sleep(600)
    return "replaced"
