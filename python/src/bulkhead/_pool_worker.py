"""The worker of BulkheadExecutor: prepares itself as ``multiprocessing`` does with "spawn", then serves calls.

A job is ``(function, arguments, keywords)``, pickled. Its result is the pickle of the value, which begins with the byte
0x80, or one of the letters below with what follows it.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from functools import partial

from . import _files, _libraries, _template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

#: The function raised: u32 length, the traceback as text, then the exception, pickled.
RAISED = b"E"
#: The job could not be unpickled: the traceback as text.
UNREADABLE = b"U"
#: The initializer raised: the traceback as text. No job is ever run by this worker.
UNFIT = b"I"

#: Variable that holds the preparation for confined workers; other workers read it from a file.
PREPARATION_VARIABLE = "PYTHON_BULKHEAD_PREPARATION"
#: Variable of a template that imports nothing: its workers do.
_BARE = "PYTHON_BULKHEAD_BARE"
#: Picklers whose pickles ``pickle`` reads.
READ_BY_PICKLE = ("pickle", "cloudpickle")

_LENGTH = struct.Struct("<I")


def process_chunk(fn: Callable[..., Any], chunk: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Runs a chunk of ``map``."""
    return [fn(*arguments) for arguments in chunk]


class Pickler:
    """How values travel: by pickle, or by another module's ``dumps`` and ``loads``."""

    def __init__(self, module: str, *, is_data_only: bool = False) -> None:
        self.module = module
        self.is_read_by_pickle = module in READ_BY_PICKLE
        codec: Any = pickle if module == "pickle" else __import__(module, fromlist=["dumps", "loads"])
        self.dumps: Callable[..., bytes] = _libraries.dumps if is_data_only else codec.dumps
        self.loads: Callable[..., Any] = pickle.loads if self.is_read_by_pickle else codec.loads

    def dump(self, value: Any) -> _files.Pieces:
        """A value, with large buffers outside of the pickle if ``pickle`` reads it."""
        if not self.is_read_by_pickle:
            return [self.dumps(value)]
        buffers: list[memoryview] = []

        def is_within(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if len(view) >= _files.BUFFER_BYTES_MIN:
                buffers.append(view)
                return False
            view.release()
            return True

        return _files.pieces(self.dumps(value, protocol=5, buffer_callback=is_within), buffers)

    def load(self, parts: list[Any]) -> Any:
        """Loads a dumped value."""
        if not self.is_read_by_pickle:
            # Not all `loads` take a view.
            return self.loads(bytes(parts[0]) if isinstance(parts[0], memoryview) else parts[0])
        return self.loads(parts[0], buffers=parts[1:]) if len(parts) > 1 else self.loads(parts[0])


class _Descriptor:
    """A pipe, or a file, of the process that pickles this."""

    def __init__(self, descriptor: int) -> None:
        import fcntl

        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE

    def detach(self) -> int:
        """Opens it in this process."""
        return os.open(self._path, self._flags | os.O_CLOEXEC)


class _Spawning:
    """Takes the place of a process that ``multiprocessing`` spawns: its primitives can be pickled meanwhile."""

    DupFd = _Descriptor

    def duplicate_for_child(self, descriptor: int) -> int:
        """The number of the descriptor, which stays open as long as the caller has the primitive."""
        return descriptor


def dumps_with_primitives(value: Any) -> bytes:
    """Pickles a value that may have locks, queues and shared memory of ``multiprocessing`` in it, for workers that can
    reach this process."""
    from multiprocessing import context, reduction

    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning())  # type: ignore[arg-type]
    try:
        return bytes(reduction.ForkingPickler.dumps(value, pickle.HIGHEST_PROTOCOL))
    finally:
        context.set_spawning_popen(before)


def explained(error: BaseException) -> BaseException:
    """An error of pickling with what to do about it."""
    text = str(error)
    if "through inheritance" in text:
        hint = "use multiprocessing.Manager(), or give it to workers by `initargs` if they have no sandbox"
    elif "__main__" in text or "<lambda>" in text or "<locals>" in text or "__mp_main__" in text:
        hint = 'define it at the top level of a module, or use BulkheadExecutor(pickler="cloudpickle")'
    else:
        return error
    if type(error) not in (AttributeError, TypeError, RuntimeError, pickle.PicklingError):
        return error
    made = type(error)(f"{text}: {hint}")
    made.__cause__ = error
    return made


def _raised(error: BaseException, pickler: Pickler) -> bytes:
    """An exception as a result; if it cannot be pickled, the reason in its place."""
    try:
        import traceback

        # The frame of `_run` is none of the caller's.
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, own or error.__traceback__))
    except BaseException:
        # It has what none should have, such as a SyntaxError a text that is a number.
        text = f"{type(error).__name__}, whose traceback cannot be made\n"
    told = text.encode(errors="backslashreplace")
    head = RAISED + _LENGTH.pack(len(told)) + told
    try:
        return head + pickler.dumps(error)
    except BaseException as problem:
        try:
            return head + pickle.dumps(type(problem)(*problem.args))
        except BaseException:
            return head + pickle.dumps(pickle.PicklingError(f"the exception cannot be pickled: {type(error).__name__}"))


def _traceback() -> bytes:
    """The traceback of the exception that is being handled."""
    import traceback

    return traceback.format_exc().encode(errors="backslashreplace")


def _run(pickler: Pickler, payload: Any, _context: Any) -> bytes | _files.Written:
    """Unpickles a call, runs it, pickles what it returns or raises."""
    loan = payload if isinstance(payload, _files.Loan) else None
    try:
        function, arguments, keywords = pickler.load(_files.parts(payload) if loan is None else loan.parts())
    except BaseException:
        return UNREADABLE + _traceback()
    try:
        value = function(*arguments, **keywords)
        # Before its result.
        _template.flush()
        # What a result holds on to goes with it, and not with the next call.
        del function, arguments, keywords
        result = pickler.dump(value)
        return b"".join(result) if loan is None else loan.write(result)
    except BaseException as error:
        try:
            return _raised(error, pickler)
        finally:
            # A traceback and its frames hold each other. A class may refuse that its instances are changed.
            BaseException.with_traceback(error, None)


def _prepare(preparation: dict[str, Any]) -> None:
    """Makes this interpreter like the caller's: environment, paths, folder, authkey, and its main module."""
    own = {name: value for name, value in os.environ.items() if name.startswith("BULKHEAD_")}
    os.environ.update(preparation["environment"])
    os.environ.update(own)
    os.umask(preparation["umask"])
    from multiprocessing import process, spawn

    current = process.current_process()
    # What starts processes while it is imported is told so, as with "spawn": a script needs its guard.
    current._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(preparation["multiprocessing"])
    finally:
        del current._inheriting  # type: ignore[attr-defined]


class _Worker:
    """What ``serve`` is given: ``init`` prepares the process, and the instance is the handler."""

    def __init__(self, preparation: dict[str, Any]) -> None:
        self._preparation = preparation
        self._pickler = Pickler("pickle")
        self._calls: Callable[[Any, Any], bytes | _files.Written] = partial(_run, self._pickler)

    def init(self) -> None:
        """Before the first call. With a template that is all it does, and ``after_fork`` the rest."""
        self._join_output()
        if not _template.is_wanted():
            self._import()
            self._initialize()
        elif _BARE not in os.environ:
            self._import()
            names = _template.threads()
            if names:
                import warnings

                # As the standard forkserver, which forks in spite of threads, this works; but slower.
                warnings.warn(
                    f"the main module or `preload` leave the thread {', '.join(names[:8])} running, so that "
                    "each worker imports them itself instead of being forked with them: start threads in functions",
                    RuntimeWarning,
                    stacklevel=1,
                )
                _template.start_again(_BARE)

    def after_fork(self) -> None:
        """In a worker that was forked of a template."""
        self._join_output()
        os.umask(self._preparation["umask"])
        # Nothing for programs, and pools, that calls start.
        if os.environ.pop(_BARE, None) is not None:
            self._import()
        self._initialize()

    def _import(self) -> None:
        preparation = self._preparation
        _prepare(preparation)
        for module in preparation["preload"]:
            __import__(module)
        self._pickler = Pickler(preparation["pickler"], is_data_only=preparation["is_data_only"])

    def _join_output(self) -> None:
        """Writes to the caller's FIFOs, if there are any, from here on; what a death says stays with the supervisor,
        for its report."""
        paths = self._preparation["output"]
        if not paths:
            return
        import faulthandler

        original = os.dup(2)
        for descriptor, path in enumerate(paths, start=1):
            fifo = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(fifo, descriptor)
            os.close(fifo)
        faulthandler.enable(file=original)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def _initialize(self) -> None:
        # It may be large, and is nothing for programs that calls start.
        os.environ.pop(PREPARATION_VARIABLE, None)
        self._calls = partial(_run, self._pickler)
        try:
            initializer, arguments = self._pickler.loads(self._preparation["initializer"])
            if initializer is not None:
                initializer(*arguments)
        except BaseException:
            # Told to the first call, which ends the pool: at once, and with the traceback.
            told = UNFIT + _traceback()
            self._calls = lambda _payload, _context: told

    def __call__(self, payload: Any, context: Any) -> bytes | _files.Written:
        try:
            return self._calls(payload, context)
        finally:
            # The call's own frame is gone, and with it what the function has not kept.
            if isinstance(payload, _files.Loan):
                payload.release()


#: True in a worker of an executor.
is_worker = False
#: The folder of the pool whose worker this process is, if workers can reach such a folder.
outer_folder: str | None = None


def main(path: str) -> None:
    """Serves the calls of the executor that wrote the file at ``path``; does not return. Without a path the same is
    in a variable."""
    global is_worker, outer_folder
    is_worker = True
    if path:
        try:
            with open(path, "rb") as file:
                preparation = pickle.load(file)
        except FileNotFoundError:
            sys.exit(f"{path} is gone: the folder of this pool was removed while it was in use")
        outer_folder = os.path.dirname(path)
    else:
        import base64
        import zlib

        preparation = pickle.loads(zlib.decompress(base64.b64decode(os.environ[PREPARATION_VARIABLE])))
    worker = _Worker(preparation)
    from .worker import run

    def prepare() -> tuple[_Worker, dict[str, Any], None]:
        worker.init()
        return worker, {}, None

    run(prepare, worker.after_fork, is_for_one_job=preparation["tasks"] == 1, takes_files=True)
