"""``BulkheadExecutor``: a ``ProcessPoolExecutor`` that survives misbehaving calls.

If a call segfaults, exits, hangs, exhausts its memory or cannot be pickled, only that call fails. A timeout or
``cancel()`` kills the running call and all processes that it started. When this process exits for any reason, the
workers are stopped too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import re
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from . import _pool_worker, _wire
from ._output import Fifos, Lines, Output
from ._pool import (
    NAME,
    Call,
    CallTimeout,
    Pool,
    PoolDisconnected,
    PoolFuture,
    ResultRefused,
    ResultUnreadable,
    WorkerCrashed,
)
from ._pool_worker import READ_BY_PICKLE, Pickler, process_chunk
from ._private import SERVICE_VARIABLES, PrivateSupervisor, merged, passed_environment, to_toml

__all__ = [
    "BulkheadExecutor",
    "CallTimeout",
    "PoolDisconnected",
    "PoolFuture",
    "ResultRefused",
    "ResultUnreadable",
    "WorkerCrashed",
]

P = ParamSpec("P")
T = TypeVar("T")

#: Maximum number of spare workers.
SPARES_MAX = 64
#: Maximum number of worker processes per pool.
WORKERS_MAX = 1024
_PROFILES = ("none", "default", "strict")
#: Pattern of the sizes that the configuration accepts as strings.
_SIZE = re.compile(r"\s*(\d+\s*B?|\d+(\.\d{1,9})?\s*[KMGT]i?B)\s*", re.ASCII | re.IGNORECASE)
#: Environment variables that the sandbox sets.
_SANDBOX_VARIABLES = ("TMPDIR", "HOME")
#: Environment variables for a template. Without this variable, `import pyarrow` (also by pandas) starts a jemalloc
#: thread.
_TEMPLATE_VARIABLES = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
#: Maximum size of the preparation data of confined workers, in bytes. The data is passed in an environment variable.
_PREPARATION_BYTES_MAX = 64 * 1024


class _Calls(Executor):
    """Base class of objects that accept calls: the executor, and the executors returned by ``with_options``."""

    _pool: Pool
    _metadata: bytes
    #: True if the supervisor decides the order of the calls.
    _is_ordered = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedules ``fn(*args, **kwargs)`` to run in a worker process, and returns a future.

        The future raises the exception that ``fn`` raised, or one of the following:

        - ``WorkerCrashed`` (a ``BrokenProcessPool``) if the worker died;
        - ``CallTimeout`` (a ``TimeoutError``) if ``timeout`` or ``deadline`` passed;
        - ``ResultUnreadable`` if the call or its result could not be unpickled.

        ``future.cancel()`` also stops a running call.

        Raises ``RuntimeError`` after ``shutdown``, ``BrokenProcessPool`` if the initializer has failed, and
        ``SupervisorNotFound`` if the supervisor is not installed.
        """
        pool = self._pool
        future: PoolFuture[T] = PoolFuture(pool)
        pool.submit(Call(future, self._metadata, self._is_ordered, fn, args, kwargs))
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Returns an iterator equivalent to ``map(fn, *iterables)``, with the calls made in worker processes.

        ``timeout`` is the number of seconds, counted from now, after which a missing result raises ``TimeoutError``.
        ``chunksize`` is the number of calls that are sent as one job. ``buffersize`` is the maximum number of submitted
        jobs whose results have not been consumed; by default, all jobs are submitted immediately. All remaining calls,
        including running calls, are cancelled if a call raises an exception or if the iterator is closed.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        give_up = None if timeout is None else time.monotonic() + timeout
        calls: Iterator[tuple[Any, ...]] = zip(*iterables, strict=False)
        function: Callable[..., Any] = fn
        if chunksize > 1:
            function, calls = partial(process_chunk, fn), ((chunk,) for chunk in _chunks(calls, chunksize))
        # A generator never calls an exhausted `zip` again, which would consume another item of the longer iterables.
        submitted = (future for future in itertools.starmap(partial(self.submit, function), calls))
        results = _in_order(deque(itertools.islice(submitted, buffersize)), submitted, give_up)
        return _chained(results) if chunksize > 1 else results


class BulkheadExecutor(_Calls):
    """Runs calls in worker processes under a private supervisor, which starts with the first call.

    ``max_workers``, ``initializer``, ``initargs`` and ``max_tasks_per_child`` have the same meaning as for
    ``ProcessPoolExecutor``. With the default ``mp_context``, "spawn", each worker starts a new interpreter. With
    "forkserver", workers are forked from one interpreter that has imported the main module and ``preload``. A start
    then takes one to two milliseconds, and a call with ``max_tasks_per_child=1`` takes about 2 ms.

    Additional parameters:

    ``timeout``
        Maximum run time of a call, in seconds. After this time, the worker and the processes that it started are
        killed.
    ``memory``
        Maximum size of a worker's data, in bytes or as a size such as ``"512MiB"``. An allocation beyond the
        limit raises ``MemoryError``.
    ``sandbox``
        ``"none"``, ``"default"``, ``"strict"``, or a table of keys (docs/confinement/profiles.md).
    ``pickler``
        ``"pickle"``, ``"cloudpickle"`` (for lambdas and notebooks), or the name of a module with ``dumps`` and
        ``loads``.
    ``results``
        Values and exceptions that are accepted from workers. ``"any"`` unpickles them in this process, which can run
        code, as in all process pools. ``"data"`` accepts only plain data, arrays, images, frames and built-in
        exceptions. ``["data", MyError]`` also accepts instances of the listed classes. With a sandbox the default is
        ``"data"``, so that a compromised worker cannot compromise this process.
    ``preload``
        Names of modules to import before the first call. With "forkserver" they are imported once for all workers.
    ``env``
        Environment variables of the workers, in addition to the variables of this process.
    ``config``
        Keys of ``[bulkhead.NAME]`` (docs/configuration.md). These keys override the other parameters. The entry
        ``"supervisor"`` contains keys of ``[supervisor]``.

    In a forked child, the executor behaves as if it were new and starts another supervisor. When the interpreter exits,
    submitted calls are finished first, as with the standard executors. When this process is killed, the workers are
    killed too.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        timeout: float | None = None,
        memory: int | str | None = None,
        sandbox: str | Mapping[str, Any] = "none",
        pickler: str = "pickle",
        results: str | Sequence[str | type] | None = None,
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if max_workers is None:
            max_workers = min(_processors(), WORKERS_MAX)
        if max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if max_workers > WORKERS_MAX:
            raise ValueError(f"max_workers must be <= {WORKERS_MAX}")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if max_tasks_per_child is not None and not isinstance(max_tasks_per_child, int):
            raise TypeError("max_tasks_per_child must be an integer")
        if max_tasks_per_child is not None and max_tasks_per_child <= 0:
            raise ValueError("max_tasks_per_child must be >= 1")
        if mp_context is None:
            mp_context = multiprocessing.get_context("spawn")
        if mp_context.get_start_method(allow_none=False) == "fork":
            raise ValueError("mp_context must be 'spawn' or 'forkserver': workers are never forked from this process")
        _check_keys(memory, sandbox, config)
        if isinstance(preload, str):
            raise TypeError("preload must be a list of modules, not str")
        profile = {"profile": sandbox} if isinstance(sandbox, str) else {"profile": "default", **sandbox}
        is_confined = profile["profile"] != "none"
        is_forked = mp_context.get_start_method(allow_none=False) == "forkserver"
        if results is None:
            results = "data" if is_confined and pickler in READ_BY_PICKLE else "any"
        if results not in ("any", "data") and (isinstance(results, str) or "data" not in results):
            raise ValueError(f"results must be 'any', 'data', or a list of 'data' and classes, not {results!r}")
        allowed = None
        if results != "any":
            if pickler not in READ_BY_PICKLE:
                raise ValueError(f"results='data' needs pickler='pickle' or 'cloudpickle', not {pickler!r}")
            from ._data import allow

            allowed = allow([] if isinstance(results, str) else [kind for kind in results if kind != "data"])
        self._mp_context = mp_context
        self._max_workers = max_workers
        for name, value in (env or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"env: {name!r} and its value must be str, not {type(value).__name__}")
        self._timeout = timeout
        self._metadata = _submission(timeout)
        given = dict(config or {})
        supervisor = given.pop("supervisor", {})
        settings = {"preload": list(preload), "tasks": max_tasks_per_child, "is_data_only": allowed is not None}
        launch = _Launch(
            is_confined,
            is_forked,
            dict(env or {}),
            (initializer, tuple(initargs)),
            Pickler(pickler),
            settings,
            tuple(given.get("env_files", ())),
        )
        bulkhead = merged(_keys(max_workers, max_tasks_per_child, memory, profile, is_confined, is_forked), given)
        supervisor = {**_SUPERVISOR_KEYS, **supervisor}
        self._pool = Pool(max_workers, bulkhead, supervisor, launch.pickler, allowed, launch.start)
        # A garbage-collected executor ends as it does after shutdown(wait=False).
        weakref.finalize(self, self._pool.abandoned).atexit = False

    def with_options(
        self,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        priority: str = "normal",
        tenant: str = "",
        idempotent: bool = False,
    ) -> _Calls:
        """Returns an executor that runs calls in the same workers with different options.

        ``timeout`` is the maximum run time of a call in seconds; it overrides the timeout of this executor.
        ``deadline`` is the maximum number of seconds between submission and outcome, including waiting time.
        ``priority`` is ``"best-effort"``, ``"normal"`` or ``"critical"``. ``tenant`` names the customer or user that
        the call belongs to; tenants share the workers fairly. If the worker of an ``idempotent`` call dies, the
        call runs again, at most twice.

        Calls with a deadline, priority or tenant are sent to the supervisor immediately. The supervisor holds at most 4
        GiB of these calls. All other calls wait in this process until the supervisor can accept them.
        """
        if timeout is None:
            timeout = self._timeout
        metadata = _submission(timeout, deadline, priority=priority, tenant=tenant, idempotent=idempotent)
        return _Configured(self, metadata, is_ordered=bool(deadline or tenant or priority != "normal"))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stops accepting calls. Submitted calls are finished.

        If ``cancel_futures`` is true, cancels calls unless they have begun or are ``running()``. If ``wait`` is true,
        returns after all processes have exited.
        """
        self._pool.shut_down(wait=wait, cancel=cancel_futures)

    def terminate_workers(self) -> None:
        """Stops the supervisor and kills all workers. Pending futures raise ``BrokenProcessPool``."""
        self._pool.terminate()

    def kill_workers(self) -> None:
        """Equivalent to ``terminate_workers``, which also kills the workers."""
        self._pool.terminate()

    def status(self) -> dict[str, Any]:
        """Returns the supervisor's snapshot of the pool: workers, calls, outcomes (docs/operations/http.md).

        Raises ``RuntimeError`` if no supervisor is running: before the first call, and after shutdown.
        """
        status: dict[str, Any] = self._pool.supervisor().get(f"/v1/bulkheads/{NAME}")
        return status

    def crashes(self) -> list[dict[str, Any]]:
        """Returns the crash reports of dead workers and of calls that timed out, oldest first.

        A report contains the cause, the last output, and the stack if available.

        Raises ``RuntimeError`` if no supervisor is running.
        """
        supervisor = self._pool.supervisor()
        listed = supervisor.get("/v1/crashes")["crashes"]
        return [supervisor.get(f"/v1/crashes/{crash['id']}") for crash in listed]


class _Configured(_Calls):
    """Executor returned by ``with_options``. Shutting it down has no effect on the original executor."""

    def __init__(self, executor: BulkheadExecutor, metadata: bytes, *, is_ordered: bool) -> None:
        self._executor = executor
        self._pool = executor._pool
        self._metadata = metadata
        self._is_ordered = is_ordered

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing. Only the original executor can be shut down."""


#: Large results must be possible. Crash reports contain no payloads, because payloads can be just as large.
_SUPERVISOR_KEYS = {"max_payload": "1GiB", "max_buffered": "4GiB", "crash_payloads": False, "drain_timeout": "5s"}
#: Large enough for two files of 128 MiB for each of 16 workers.
_SUPERVISOR_KEYS["max_pooled"] = "4GiB"


def _keys(
    workers: int,
    tasks: int | None,
    memory: int | str | None,
    profile: dict[str, Any],
    is_confined: bool,
    is_forked: bool,
) -> dict[str, Any]:
    """Returns the bulkhead's configuration keys for the executor's parameters."""
    start: dict[str, Any] = {"handshake": "1m", "ready": "1h"}
    keys: dict[str, Any] = {
        "processes": workers,
        "max_in_flight": 1,
        "max_queue": 1_000_000,
        "deadline": "365d",
        "grace": "0s",
        # An initializer can take a long time.
        "start": start,
        "retry": {"attempts": 3, "budget": 1.0},
        "cwd": os.getcwd(),
        "sandbox": profile,
    }
    if tasks is not None:
        keys["recycle"] = {"jobs": tasks}
    if memory is not None:
        keys["rlimits"] = {"data": memory}
    if is_confined:
        given = list(dict.fromkeys(os.fspath(path) for path in profile.get("read", [])))
        named = {os.path.abspath(path) for path in [*given, *profile.get("write", [])]}
        profile["read"] = given + [path for path in _readable_paths() if path not in named]
    if is_forked:
        # Spares take over from workers that have reached `max_tasks_per_child`.
        start |= {"mode": "fork", "spares": 0 if tasks is None else min(2 * workers, SPARES_MAX)}
    return keys


def _submission(timeout: float | None, deadline: float | None = None, **options: Any) -> bytes:
    for name, seconds in (("timeout", timeout), ("deadline", deadline)):
        if seconds is not None and not isinstance(seconds, (int, float)):
            raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name} must be more than 0 seconds")
    return _wire.submission(NAME, run_limit=timeout, deadline=deadline, **options)


class _Launch(NamedTuple):
    """Starts an executor's supervisors, and stores the workers' initial state.

    Holds no reference to the executor, so that the executor can be dropped during a start.
    """

    is_confined: bool
    is_forked: bool
    environment: dict[str, str]
    initializer: tuple[Callable[..., object] | None, tuple[Any, ...]]
    pickler: Pickler
    #: Entries that are copied unchanged into the preparation data.
    settings: dict[str, Any]
    #: Names of variables whose values come from files (``env_files``). Workers do not get this process's values.
    from_files: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """Returns the environment of the workers."""
        left_out = (*SERVICE_VARIABLES, *self.from_files, *(_SANDBOX_VARIABLES if self.is_confined else ()))
        own = {name: value for name, value in os.environ.items() if name not in left_out}
        return {**(_TEMPLATE_VARIABLES if self.is_forked else {}), **own, **self.environment}

    def _preparation(self, output: list[str], passed: Mapping[str, str]) -> bytes:
        main = multiprocessing.spawn.get_preparation_data("BulkheadWorker")
        main["authkey"] = bytes(main["authkey"])
        if os.path.basename(main.get("init_main_from_path", "")) == "<stdin>":
            # The main module was read from standard input, so there is no file that a worker could import.
            del main["init_main_from_path"]
        preparation = {
            "multiprocessing": main,
            # Omits the variables that the workers already have when they start.
            "environment": {name: value for name, value in self.variables().items() if name not in passed},
            "umask": _umask(),
            "initializer": self._pickled_initializer(),
            "pickler": self.pickler.module,
            "output": output,
            **self.settings,
        }
        return pickle.dumps(preparation)

    def _pickled_initializer(self) -> bytes:
        try:
            if self.is_confined or self.pickler.module != "pickle":
                return self.pickler.dumps(self.initializer)
            return _pool_worker.dumps_with_primitives(self.initializer)
        except Exception as error:
            raise _pool_worker.with_hint(error) from None

    def start(self, supervisor: PrivateSupervisor) -> Output:
        """Starts a supervisor. Returns the reader of its workers' output."""
        current = multiprocessing.process.current_process()
        if getattr(current, "_inheriting", False):
            raise RuntimeError(
                "the main module submits calls while a worker imports the module: move the calls under "
                "if __name__ == '__main__':"
            )
        output: Output = Lines(supervisor) if self.is_confined else Fifos(supervisor)
        try:
            passed = passed_environment(self.variables())
            supervisor.add_variables(passed)
            preparation = self._preparation(output.paths if isinstance(output, Fifos) else [], passed)
            if self.is_confined:
                argument = _as_variable(supervisor, preparation)
            else:
                argument = supervisor.write("preparation", preparation)
                supervisor.keep(argument, partial(supervisor.write, "preparation", preparation))
            source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            code = (
                f"import sys; sys.path.insert(0, {source!r}); "
                f"from bulkhead._pool_worker import main; main({argument!r})"
            )
            if getattr(sys, "frozen", False):
                # `multiprocessing.freeze_support()` recognises the code by this prefix.
                code = f"from multiprocessing.forkserver import main; {code}"
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            supervisor.start([os.fsdecode(multiprocessing.spawn.get_executable()), *flags, "-c", code])
            output.start()
        except BaseException:
            supervisor.stop(at_once=True)
            output.finish()
            raise
        return output


def _as_variable(supervisor: PrivateSupervisor, preparation: bytes) -> str:
    """Passes preparation data in an environment variable. Returns the (empty) argument for the worker.

    Confined workers cannot open the user's private files.
    """
    import base64
    import zlib

    text = base64.b64encode(zlib.compress(preparation)).decode()
    if len(text) > _PREPARATION_BYTES_MAX:
        raise ValueError(
            "the environment and initializer are too large for confined workers: pass data to calls instead"
        )
    supervisor.add_variables({_pool_worker.PREPARATION_VARIABLE: text})
    return ""


def _umask() -> int:
    """Returns the umask of this process without changing it. ``os.umask`` would affect other threads temporarily."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _processors() -> int:
    count = getattr(os, "process_cpu_count", None)
    return (count() if count is not None else len(os.sched_getaffinity(0))) or 1


def _check_keys(memory: int | str | None, sandbox: str | Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
    """Raises ``TypeError`` or ``ValueError`` for options that the supervisor would reject on the first call."""
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, (int, str))):
        raise TypeError(f"memory must be a number of bytes or a size such as '512MiB', not {type(memory).__name__}")
    if isinstance(memory, int) and memory <= 0:
        raise ValueError("memory must be greater than 0")
    if isinstance(memory, str) and not _SIZE.fullmatch(memory):
        raise ValueError(f"memory must be a size such as '512MiB', not {memory!r}")
    if not isinstance(sandbox, (str, Mapping)):
        raise TypeError(f"sandbox must be the name of a profile or a dict, not {type(sandbox).__name__}")
    profile = sandbox if isinstance(sandbox, str) else sandbox.get("profile", "default")
    if profile not in _PROFILES:
        raise ValueError(f"sandbox must be 'none', 'default' or 'strict', not {profile!r}")
    for name in ("read", "write"):
        paths = () if isinstance(sandbox, str) else sandbox.get(name, ())
        if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Iterable):
            raise TypeError(f"sandbox: {name!r} must be a list of paths, not {type(paths).__name__}")
    tables = {"sandbox": sandbox if isinstance(sandbox, Mapping) else {}, "config": {} if config is None else config}
    if isinstance(config, Mapping) and "supervisor" in config:
        tables["config['supervisor']"] = config["supervisor"]
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise TypeError(f"{name} must be a dict, not {type(table).__name__}")
        try:
            to_toml(merged({}, table))
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None


def _readable_paths() -> list[str]:
    """Returns the paths that a confined interpreter reads in addition to system files."""
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    paths += [os.path.abspath(path) for path in sys.path]
    paths += _editable_paths()
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def _editable_paths() -> Iterator[str]:
    """Yields folders of packages outside ``sys.path``.

    These packages are symbolic links, or were installed with ``pip install -e``. A setuptools finder lists the
    installed packages in a table.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):
            yield from getattr(module, "MAPPING", {}).values()
            yield from itertools.chain(*getattr(module, "NAMESPACES", {}).values())
        elif "." not in name and (folders := getattr(module, "__path__", None)):
            yield from (os.path.realpath(folder) for folder in folders if os.path.realpath(folder) != folder)


def _chunks(calls: Iterator[tuple[Any, ...]], size: int) -> Iterator[tuple[tuple[Any, ...], ...]]:
    while chunk := tuple(itertools.islice(calls, size)):
        yield chunk


def _in_order(futures: deque[Future[Any]], submitted: Iterator[Future[Any]], give_up: float | None) -> Iterator[Any]:
    """Yields the results in the order of the calls, and drops each result's reference after yielding it."""
    try:
        while futures:
            futures.extend(itertools.islice(submitted, 1))
            yield _taken(futures, give_up)
    finally:
        for future in futures:
            future.cancel()


def _taken(futures: deque[Future[Any]], give_up: float | None) -> Any:
    future = futures.popleft()
    try:
        return future.result(None if give_up is None else give_up - time.monotonic())
    except BaseException:
        future.cancel()
        raise
    finally:
        del future


def _chained(chunks: Iterator[list[Any]]) -> Iterator[Any]:
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()
