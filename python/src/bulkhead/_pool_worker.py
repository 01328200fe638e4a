"""The worker of ``BulkheadExecutor``. Prepares the process like ``multiprocessing`` with "spawn", then serves calls.

``_serve`` runs the job loop, and ``_pool`` sends the calls from the caller's process.

A job is a pickled tuple ``(function, arguments, keywords)``. A result is the pickled value, or one of the letters
below, followed by the content described there. Pickles begin with the byte 0x80, which ``Pickler`` adds to the output
of other modules.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from functools import partial

from . import _files, _stdio, _template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

#: The function raised an exception: u32 length, traceback as text, pickled exception.
RAISED = b"E"
#: The job could not be unpickled: traceback as text.
UNREADABLE = b"U"
#: The initializer raised an exception: traceback as text. The worker never runs a job.
INITIALIZER_FAILED = b"I"

#: Environment variable that contains the preparation data of confined workers. Other workers read a file.
PREPARATION_VARIABLE = "PYTHON_BULKHEAD_PREPARATION"
#: Environment variable of a template that imports no modules. Each of its workers then imports the modules.
_BARE = "PYTHON_BULKHEAD_BARE"
#: Picklers whose output ``pickle`` can read.
READ_BY_PICKLE = ("pickle", "cloudpickle")
#: First byte of pickles.
PICKLED = b"\x80"

_LENGTH = struct.Struct("<I")


def process_chunk(fn: Callable[..., Any], chunk: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Runs a chunk of calls of ``map``."""
    return [fn(*arguments) for arguments in chunk]


class Pickler:
    """Serialises values with ``pickle``, or with ``dumps`` and ``loads`` from another module."""

    def __init__(self, module: str, *, is_data_only: bool = False) -> None:
        self.module = module
        self.is_read_by_pickle = module in READ_BY_PICKLE
        codec: Any = pickle if module == "pickle" else __import__(module, fromlist=["dumps", "loads"])
        self.dumps: Callable[..., bytes] = codec.dumps
        if is_data_only:
            # Imported only if needed, because the import would delay the first call of every pool.
            from . import _libraries

            self.dumps = _libraries.dumps
        self.loads: Callable[..., Any] = pickle.loads if self.is_read_by_pickle else codec.loads

    def dump(self, value: Any) -> _files.Pieces:
        """Serialises a value. Large buffers are kept outside the pickle if ``pickle`` reads it."""
        if not self.is_read_by_pickle:
            return [PICKLED, self.dumps(value)]
        buffers: list[memoryview] = []

        def is_within(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if len(view) >= _files.BUFFER_BYTES_MIN:
                buffers.append(view)
                return False
            view.release()
            return True

        return _files.pieces(self.dumps(value, protocol=5, buffer_callback=is_within), buffers)

    def dump_whole(self, value: Any) -> bytes:
        """Serialises a value with all its buffers in the pickle."""
        return self.dumps(value) if self.is_read_by_pickle else b"".join(self.dump(value))

    def load(self, parts: list[Any]) -> Any:
        """Deserialises a value."""
        if not self.is_read_by_pickle:
            # Not every `loads` accepts a memoryview.
            return self.loads(bytes(memoryview(parts[0])[len(PICKLED) :]))
        return self.loads(parts[0], buffers=parts[1:]) if len(parts) > 1 else self.loads(parts[0])


class _Descriptor:
    """A pipe or file of the process that created this object."""

    def __init__(self, descriptor: int) -> None:
        import fcntl

        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE

    def detach(self) -> int:
        """Opens the file in this process."""
        return os.open(self._path, self._flags | os.O_CLOEXEC)


class _Spawning:
    """Stands in for a process that ``multiprocessing`` spawns, so that its primitives can be pickled."""

    DupFd = _Descriptor

    def duplicate_for_child(self, descriptor: int) -> int:
        """Returns the descriptor unchanged. It stays open while the caller holds the primitive."""
        return descriptor


def dumps_with_primitives(value: Any) -> bytes:
    """Pickles a value that may contain ``multiprocessing`` locks, queues and shared memory.

    The receiving workers must have access to this process's files.
    """
    from multiprocessing import context, reduction

    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning())  # type: ignore[arg-type]
    try:
        return bytes(reduction.ForkingPickler.dumps(value, pickle.HIGHEST_PROTOCOL))
    finally:
        context.set_spawning_popen(before)


def with_hint(error: BaseException) -> BaseException:
    """Returns a pickling error that suggests a remedy, or the original error if there is no suggestion."""
    text = str(error)
    if "through inheritance" in text:
        hint = "use multiprocessing.Manager(), or pass the object in `initargs` if the workers have no sandbox"
    elif "__main__" in text or "<lambda>" in text or "<locals>" in text or "__mp_main__" in text:
        hint = 'define the object at the top level of a module, or use BulkheadExecutor(pickler="cloudpickle")'
    else:
        return error
    if type(error) not in (AttributeError, TypeError, RuntimeError, pickle.PicklingError):
        return error
    made = type(error)(f"{text}: {hint}")
    made.__cause__ = error
    return made


def _raised(error: BaseException, pickler: Pickler) -> bytes:
    """Serialises an exception as a result. If the exception cannot be pickled, the pickling error is used instead."""
    try:
        import traceback

        # Omits the frame of `_run`.
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(type(error), error, own or error.__traceback__))
    except BaseException:
        # The exception has invalid attributes, such as a SyntaxError with a number as its text.
        text = f"{type(error).__name__} (the traceback is not available)\n"
    report = text.encode(errors="backslashreplace")
    head = RAISED + _LENGTH.pack(len(report)) + report
    try:
        return head + pickler.dump_whole(error)
    except BaseException as problem:
        try:
            return head + pickler.dump_whole(type(problem)(*problem.args))
        except BaseException:
            text = f"the exception cannot be pickled: {type(error).__name__}"
            return head + pickler.dump_whole(pickle.PicklingError(text))


def _traceback() -> bytes:
    """Returns the traceback of the exception that is being handled."""
    import traceback

    return traceback.format_exc().encode(errors="backslashreplace")


def _run(pickler: Pickler, payload: Any, _context: Any) -> bytes | _files.Written:
    """Unpickles and runs a call. Returns the pickled result or exception."""
    loan = payload if isinstance(payload, _files.Loan) else None
    try:
        function, arguments, keywords = pickler.load(_files.parts(payload) if loan is None else loan.parts())
    except MemoryError as error:
        return _raised(error, pickler)
    except BaseException:
        return UNREADABLE + _traceback()
    try:
        value = function(*arguments, **keywords)
        # Output must be written before the result is sent.
        _stdio.flush()
        # Drops the references, so that the objects are freed at the end of this call and not during the next call.
        del function, arguments, keywords
        result = pickler.dump(value)
        return b"".join(result) if loan is None else loan.write(result)
    except BaseException as error:
        try:
            return _raised(error, pickler)
        finally:
            # Breaks the cycle of traceback and frames. A subclass can reject changes to its instances.
            BaseException.with_traceback(error, None)


def _prepare(preparation: dict[str, Any]) -> None:
    """Copies state from the caller's interpreter: environment, paths, working directory, authkey and main module."""
    own = {name: value for name, value in os.environ.items() if name.startswith("BULKHEAD_")}
    os.environ.update(preparation["environment"])
    os.environ.update(own)
    os.umask(preparation["umask"])
    from multiprocessing import process, spawn

    current = process.current_process()
    # Code that starts processes while it is imported gets the same error as with "spawn", which requires a main guard.
    current._inheriting = True  # type: ignore[attr-defined]
    try:
        spawn.prepare(preparation["multiprocessing"])
    finally:
        del current._inheriting  # type: ignore[attr-defined]


class _Worker:
    """Passed to ``serve``. ``init`` prepares the process, and the instance is the handler."""

    def __init__(self, preparation: dict[str, Any]) -> None:
        self._preparation = preparation
        self._pickler = Pickler("pickle")
        self._calls: Callable[[Any, Any], bytes | _files.Written] = partial(_run, self._pickler)

    def init(self) -> None:
        """Prepares the process before the first call. In a template, ``after_fork`` does the rest."""
        self._join_output()
        if not _template.is_wanted():
            self._import()
            self._initialize()
        elif _BARE not in os.environ:
            self._import()
            names = _template.remaining_threads()
            if names:
                import warnings

                # The standard forkserver forks despite such a thread. This pool restarts the template without the
                # imports.
                warnings.warn(
                    f"the main module or a `preload` module leaves the thread {', '.join(names[:8])} running, so each "
                    "worker imports the modules again, which is slower: start threads in functions",
                    RuntimeWarning,
                    stacklevel=1,
                )
                _template.restart(_BARE)

    def after_fork(self) -> None:
        """Prepares a worker that was forked from a template."""
        self._join_output()
        os.umask(self._preparation["umask"])
        # Removes the variable, so that programs and pools started by calls do not inherit it.
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
        """Redirects the output to the caller's FIFOs, if there are any.

        Crash messages still go to the supervisor, for the crash report.
        """
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
        # The variable may be large, and programs started by calls do not need it.
        os.environ.pop(PREPARATION_VARIABLE, None)
        self._calls = partial(_run, self._pickler)
        try:
            initializer, arguments = self._pickler.loads(self._preparation["initializer"])
            if initializer is not None:
                initializer(*arguments)
        except BaseException:
            # The report becomes the result of the first call, which breaks the pool immediately with this traceback.
            report = INITIALIZER_FAILED + _traceback()
            self._calls = lambda _payload, _context: report

    def __call__(self, payload: Any, context: Any) -> bytes | _files.Written:
        try:
            return self._calls(payload, context)
        finally:
            # The call's frame is gone, so only objects that the function kept are still alive.
            if isinstance(payload, _files.Loan):
                payload.release()


def refuse_in_frozen_worker() -> None:
    """Exits from a worker of a frozen program that has not called ``freeze_support()``.

    Such a worker would start copies of itself endlessly. The supervisor reports the reason to the caller of the first
    worker.
    """
    if getattr(sys, "frozen", False) and not is_worker:
        from . import __version__, _link, _serve

        link = _link.inherited()
        reason = (
            "this frozen program does not support workers: call multiprocessing.freeze_support() first under "
            "if __name__ == '__main__':"
        )
        if link is not None and _template.is_wanted():
            _template.end(link, reason)
        elif link is not None:
            _serve.Server(link, __version__).fail_start(reason)


#: True in a worker of an executor.
is_worker = False
#: Folder of the pool to which this worker belongs, if workers can access the folder.
outer_folder: str | None = None


def main(path: str) -> None:
    """Serves an executor's calls. Does not return.

    ``path`` is the file with the preparation data. If ``path`` is empty, an environment variable contains the data.
    """
    global is_worker, outer_folder
    is_worker = True
    if path:
        try:
            with open(path, "rb") as file:
                preparation = pickle.load(file)
        except FileNotFoundError:
            sys.exit(f"{path} does not exist: this pool's directory was removed while in use")
        outer_folder = os.path.dirname(path)
    else:
        import base64
        import zlib

        preparation = pickle.loads(zlib.decompress(base64.b64decode(os.environ[PREPARATION_VARIABLE])))
    worker = _Worker(preparation)
    from ._start import run

    def prepare() -> tuple[_Worker, dict[str, Any], None]:
        worker.init()
        return worker, {}, None

    run(prepare, worker.after_fork, is_for_one_job=preparation["tasks"] == 1, takes_files=True)
