"""Backend of ``BulkheadExecutor``: the calls, the private supervisor, and the thread that receives outcomes.

A call waits in this process, not yet pickled, until a place in the *window* is free. The call is then sent to the
supervisor. One thread, started with the supervisor, receives outcomes, settles futures and refills the window.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import itertools
import os
import pickle
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from . import _files, _pool_worker, _wire
from ._channel import Channel, connect
from ._future import CancellableFuture, Condition, run_callbacks
from ._output import Output
from ._pool_worker import INITIALIZER_FAILED, PICKLED, RAISED, UNREADABLE, Pickler
from ._private import PrivateSupervisor
from .errors import Crashed, DeadlineExceeded, Disconnected, JobError

T = TypeVar("T")

#: Name of the private supervisor's only bulkhead.
NAME = "pool"
#: Maximum number of calls at the supervisor in addition to one per worker: initially; while calls are quick
#: (prefetching needs a backlog); and while calls are slow (so that most cancellations need no message).
WINDOW_AT_FIRST, WINDOW_QUICK, WINDOW_SLOW = 16, 64, 1
#: Mean run times in µs below which calls are quick, and above which calls are slow.
QUICK_US, SLOW_US = 2_000, 20_000
#: Maximum total size of outstanding payloads, in bytes. At this size, no further call is sent to the supervisor.
WINDOW_BYTES_MAX = 256 << 20
#: Maximum size of a pickled call: the maximum size of a frame, minus the maximum size of the metadata.
CALL_BYTES_MAX = _wire.FRAME_BYTES_MAX - _wire.METADATA_BYTES_MAX
#: Maximum time that a large call waits for a memory file before it is sent through the socket, in seconds.
LEASE_SECONDS_MAX = 1.0
LEASE_PAUSE_SECONDS = 0.0005
#: Outcomes (``ok`` and ``failed``) after which no worker uses the call any more.
_ANSWERED = frozenset((0, 1))
_LEASE_KINDS = frozenset((_wire.LEASED, _wire.LEASE_ENDED, _wire.LEASE_REFUSED))
#: Interval in seconds between checks for a removed folder, if all calls succeed.
FOLDER_CHECK_SECONDS = 1.0
#: Limits for small calls, which are deferred so that several are sent in one write: number of deferred calls; size of a
#: call in bytes; minimum number of other calls at the supervisor beyond one per worker, so that no worker becomes idle.
DEFERRED_MAX, DEFERRED_BYTES_MAX, DEFERRED_BEHIND = 16, 4096, 16
#: Maximum number of calls that wait for a stack at the same time. Further calls fail without a stack.
STACKS_MAX = 16
_PACKAGE = r'  File "(?:[^"]*/)?bulkhead/'
#: The worker's frames below the call's function, in the format of ``faulthandler``.
_OWN_FRAME = re.compile(
    _PACKAGE + r'_pool_worker\.py", line \d+ in (?:_run|process_chunk|<listcomp>)$|  <no Python frame>$'
)
#: A frame of the thread that watches the link.
_WATCHER_FRAME = re.compile(_PACKAGE + r'_serve\.py", line \d+ in _watch$', re.MULTILINE)
#: Refers to the report without a command, because the ``bulkhead`` command does not find a private supervisor.
_REPORT_TEXT = "; crash report {}"


class WorkerCrashed(Crashed, BrokenProcessPool):
    """The worker process that ran the call died. ``outcome`` describes the death.

    Only this call is lost; the executor remains usable.
    """

    _report_text = _REPORT_TEXT


class CallTimeout(DeadlineExceeded, concurrent.futures.TimeoutError):
    """The call's ``timeout`` or ``deadline`` passed. If the call was running, its process tree was killed.

    A note (``__notes__``) contains the call's Python stack at that time, for at most one call per second.
    """

    _report_text = _REPORT_TEXT


class PoolDisconnected(Disconnected, BrokenProcessPool):
    """The private supervisor exited while the call was pending. The next call starts another supervisor."""


class ResultUnreadable(BrokenProcessPool):
    """The receiving process could not unpickle the call, its result or its exception. Only this call is lost."""


class ResultRefused(pickle.UnpicklingError):
    """The call returned or raised a value that is not accepted from a confined worker (see ``results``).

    Only this call is lost, and its worker continues.
    """


_ADVICE = (
    "return plain data, arrays, images or frames, name the class in results=['data', ...], or trust the worker "
    "with results='any'"
)
#: Metadata for a CANCEL that applies only if the call has not begun.
_CANCEL_UNLESS_BEGUN = _wire.extensions((_wire.UNLESS_BEGUN, b""))

_ERRORS: dict[type[JobError], type[JobError]] = {Crashed: WorkerCrashed, DeadlineExceeded: CallTimeout}


class PoolFuture(CancellableFuture[T]):
    """A future whose ``cancel()`` also stops a running call by killing its worker and all descendants."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self._number = 0
        # `with` on this lock, unlike `with` on a standard condition, is safe if a signal handler raises an exception.
        self._lock = self._condition._lock  # type: ignore[attr-defined]

    def _withdraw(self) -> None:
        self._pool.cancelled(self)

    def running(self) -> bool:
        """Returns true if the call is one of the oldest calls without an outcome, counting one call per worker."""
        return self._state == RUNNING and self._pool.is_among_oldest(self._number)

    def result(self, timeout: float | None = None) -> T:
        """Returns the call's result, or raises the exception that the call raised.

        Raises ``TimeoutError`` if there is no outcome within ``timeout`` seconds.
        """
        # No lock is needed, because a finished future does not change and the state is set last.
        if self._state == FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        try:
            return super().result(timeout)
        except BaseException:
            # An exception in a signal handler while the condition is being locked can leave it locked.
            while self._lock._is_owned():
                self._lock.release()
            raise
        finally:
            # Breaks the reference cycle: the exception refers to this frame.
            del self

    def _begin(self) -> bool:
        """Sets the state to running. Returns false if the future was cancelled."""
        with self._lock:
            # A call in the RUNNING state is sent again if a signal handler interrupted the first attempt with an
            # exception.
            if self._state not in (PENDING, RUNNING):
                return False
            self._state = RUNNING
            return True

    def _settle(self, value: Any, error: BaseException | None) -> None:
        """Sets the result or exception, unless the future was cancelled or is done."""
        with self._lock:
            if self._state in (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED):
                return
            self._result = value
            self._exception = error
            self._state = FINISHED
            for waiter in self._waiters:
                if error is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            if self._condition._waiters:  # type: ignore[attr-defined]
                self._condition.notify_all()
        if self._done_callbacks:  # type: ignore[attr-defined]
            run_callbacks(self)


class Call:
    """A function with its arguments, and the metadata of its SUBMIT frame."""

    __slots__ = ("bytes", "future", "has_place", "is_large", "is_ordered", "job", "lease", "metadata")

    def __init__(
        self,
        future: PoolFuture[Any],
        metadata: bytes,
        is_ordered: bool,
        function: Callable[..., Any],
        arguments: Any,
        keywords: Any,
    ) -> None:
        self.future = future
        self.metadata = metadata
        #: True if the call is sent immediately, because the supervisor orders calls by deadline, priority and tenant.
        self.is_ordered = is_ordered
        #: True if the call occupies a place in the window.
        self.has_place = False
        self.job: tuple[Callable[..., Any], Any, Any] | None = (function, arguments, keywords)
        self.bytes = 0
        #: True for a large call in the window. There is at most one large call per worker.
        self.is_large = False
        self.lease: _files.Lease | None = None


class Pool:
    """The calls and the supervisor of one executor.

    ``launch`` starts a supervisor, and returns the reader of its workers' output.
    """

    def __init__(
        self,
        workers: int,
        bulkhead: Mapping[str, Any],
        supervisor: Mapping[str, Any],
        pickler: Pickler,
        allowed: Mapping[tuple[str, str], type] | None,
        launch: Callable[[PrivateSupervisor], Output],
    ) -> None:
        self.workers = workers
        self._bulkhead = bulkhead
        self._supervisor_keys = supervisor
        self._launch = launch
        self.pickler = pickler
        #: Classes whose instances are accepted as results in addition to plain data. `None` means that all results are
        #: accepted.
        self._allowed = allowed
        self._is_confined = bulkhead.get("sandbox", {}).get("profile") != "none"
        #: Reason why the pool accepts no more calls, or None.
        self.broken: str | None = None
        #: True if a worker has completed a call. A failure to start workers is then considered temporary.
        self._has_answered = False
        self.is_shut_down = False
        self._deferrable = workers + DEFERRED_BEHIND
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        """Initialises the state of an unused pool. Also used in forked children."""
        # Never acquired recursively. This is an `RLock` because an `RLock` knows its owner.
        self._lock = threading.RLock()
        self._waiting: deque[Call] = deque()
        #: Calls at the supervisor, by number. `_pickling` contains the calls that are about to be sent, and `_placed`
        #: is the number of calls with a place in the window.
        self._sent: dict[int, Call] = {}
        self._pickling: dict[Call, None] = {}
        self._placed = self._large = 0
        self._deferred = 0
        self._next_number = 1
        self._bytes = 0
        self._run_us = float(QUICK_US)
        self._window = self.workers + WINDOW_AT_FIRST
        self._supervisor: PrivateSupervisor | None = None
        self._channel: Channel | None = None
        #: Sessions of the running supervisor, and of supervisors that are stopping.
        self._sessions: list[_Session] = []
        self._thread: threading.Thread | None = None
        self._was_killed = False
        #: Threads that wait for a worker's stack before they settle the future.
        self._stacks: set[threading.Thread] = set()
        self._next_folder_check = 0.0
        #: True if Ctrl-C interrupted a shutdown. The interpreter then exits without waiting for the calls again.
        self.is_given_up = False
        #: True if calls that have not begun are being cancelled.
        self._is_cancelling = False
        #: Lists of futures that a thread of the pool is about to settle, by ``id`` of the list.
        self._ending: dict[int, list[PoolFuture[Any]]] = {}

    def after_fork(self) -> None:
        """Resets the pool in a forked child. The supervisor and all calls belong to the parent."""
        for session in self._sessions:
            session.forget()
        # Numbers continue, so that no future of the parent refers to a call of this process.
        number = self._next_number
        self._reset()
        self._next_number = number

    # Sending calls.

    def submit(self, call: Call) -> None:
        """Accepts a call. Raises ``BrokenProcessPool`` or ``RuntimeError`` if the pool accepts no more calls."""
        if self._is_nested():
            raise RuntimeError("a signal handler cannot submit calls during another submit")
        try:
            with self._lock:
                self._check_open()
                if self._channel is None:
                    self._start()
                if not call.is_ordered and (self._waiting or not self._has_place()):
                    self._waiting.append(call)
                    return
                # The call is about to be sent.
                self._pickling[call] = None
                if not call.is_ordered:
                    self._placed += 1
                    call.has_place = True
            # The receiving thread, which runs callbacks, must not block here, because the supervisor may be waiting for
            # its messages to be read.
            may_wait = threading.current_thread() is not self._thread
            if not self._send(call, may_wait=may_wait, is_own=True) or self._waiting:
                self._fill(may_wait=may_wait)
        except BaseException as error:
            self._give_up(call, error)
            raise

    def _undo_preparation(self, call: Call) -> None:
        """Undoes the preparation for sending. The caller holds the lock."""
        self._pickling.pop(call, None)
        self._free_place(call)

    def _free_place(self, call: Call, *, is_answered: bool = True) -> None:
        if call.has_place:
            self._placed -= 1
            call.has_place = False
        if call.is_large:
            self._large -= 1
            call.is_large = False
        if call.lease is not None:
            if self._channel is not None:
                self._channel.leases.put_back(call.lease, is_answered=is_answered)
            call.lease = None

    def _give_up(self, call: Call, error: BaseException) -> None:
        """Cleans up after a failed ``submit``.

        The error can come from a signal handler, which can raise an exception after any function call. If the call was
        not sent, its future fails. If the call was queued for sending, another thread sends it.
        """
        channel = self._channel
        with self._lock:
            is_pickling = call in self._pickling
            if is_pickling:
                self._undo_preparation(call)
        if is_pickling:
            call.future._settle(None, error)
        elif channel is not None and call.future._number:
            channel.recover()
        self._continue_elsewhere()

    def _requeue(self, call: Call) -> None:
        """Cleans up after a signal handler raised an exception in ``_fill``.

        The call belongs to another ``submit``, so it becomes the next waiting call again.
        """
        channel = self._channel
        is_lost = False
        with self._lock:
            is_pickling = call in self._pickling
            if is_pickling:
                self._undo_preparation(call)
            # A problem may also have removed the call from `_pickling` before its future was settled.
            if is_pickling or not (call.future._number or call.future._state not in (PENDING, RUNNING)):
                is_lost = self._channel is None or self.broken is not None
                if not is_lost:
                    self._waiting.appendleft(call)
        if is_lost:
            call.future._settle(None, PoolDisconnected("the supervisor exited before the call was sent"))
        if channel is not None and call.future._number:
            channel.recover()
        self._continue_elsewhere()

    def _continue_elsewhere(self) -> None:
        """Hands the remaining work over to another thread: sending waiting calls, or stopping a pool after shutdown."""
        if self._channel is None or not (self._waiting or self.is_shut_down):
            return
        fill = partial(self._fill, may_wait=True)
        try:
            threading.Thread(target=fill, name="bulkhead-fill", daemon=True).start()
        except RuntimeError:
            # No thread can be started.
            self._fill(may_wait=False)

    def _check_open(self) -> None:
        if self.broken is not None:
            raise BrokenProcessPool(self.broken)
        if self.is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if _interpreter_ends:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    def _has_place(self) -> bool:
        has_room = self._bytes < WINDOW_BYTES_MAX or not self._sent
        return has_room and self._placed < self._window and self._large < self.workers

    def _send(self, call: Call, *, may_wait: bool, is_own: bool = False) -> bool:
        """Pickles a call that has a place, and sends it. Returns false if the call no longer needs its place.

        If the call cannot be pickled, only its future fails. ``KeyboardInterrupt`` and ``SystemExit`` can come from a
        signal handler. They are re-raised if this is the main thread or the thread that submitted the call
        (``is_own``).
        """
        future = call.future
        payload: _files.Pieces = []
        problem: BaseException | None = None
        try:
            payload = self.pickler.dump(call.job)
        except BaseException as error:
            if not isinstance(error, Exception) and (is_own or threading.current_thread() is threading.main_thread()):
                raise
            problem = _pool_worker.with_hint(error)
        size = sum(map(len, payload))
        if size > CALL_BYTES_MAX:
            problem, payload = ValueError(f"the call has {size} bytes; the maximum is {CALL_BYTES_MAX}"), []
        metadata = call.metadata
        if size >= _files.LARGE_BYTES_MIN and problem is None:
            lease = self._lease(call, size, may_wait)
            if lease is not None:
                metadata, payload = lease.write(metadata, payload), []
        try:
            data = b"".join(payload)
        except Exception as error:
            # A MemoryError must not terminate the receiving thread, on which all calls depend.
            problem, data = error, b""
        payload = []
        call.bytes = len(data)
        # The call may have been cancelled during pickling. This code does not hold the pool's lock, because a thread
        # that waits for futures holds their locks, and a signal handler in that thread may stop the pool, which needs
        # the pool's lock.
        is_begun = problem is None and future._begin()
        with self._lock:
            channel = self._channel
            lease = call.lease
            if problem is None and (channel is None or (lease and channel.leases.used.get(lease.number) is not lease)):
                problem = PoolDisconnected("the supervisor exited before the call was sent")
                channel = None
            if channel is None or not is_begun:
                channel = None
                self._undo_preparation(call)
            else:
                # All workers have enough calls. A deferred frame is sent with the next frames or after an outcome.
                is_deferred = (
                    size <= DEFERRED_BYTES_MAX
                    and self._deferred < DEFERRED_MAX
                    and len(self._sent) - self._deferred >= self._deferrable
                    and not call.is_ordered
                )
                number = self._next_number
                frame = _wire.head(_wire.SUBMIT, number, metadata, len(data)), data
                put = channel.outgoing.append
                # There are no function calls from here on, so that no signal handler can interrupt the update.
                del self._pickling[call]
                self._deferred = self._deferred + 1 if is_deferred else 0
                future._number = number
                self._next_number = number + 1
                self._sent[number] = call
                self._bytes += call.bytes
                if size >= _files.LARGE_BYTES_MIN:
                    self._large += 1
                    call.is_large = True
                # Queued while the lock is held, so that a cancelling thread finds the frame queued before its CANCEL.
                put(frame)
        if channel is None and problem is not None:
            future._settle(None, problem)
        # Drops the references to the caller's objects.
        call.job = None
        if channel is None:
            return False
        if not is_deferred:
            channel.flush(may_wait=may_wait)
        if future._is_cancelled():
            # The CANCEL of the other thread may have been sent before the SUBMIT.
            self._send_cancel([number])
        elif self._is_cancelling and not self.is_among_oldest(number):
            self._cancel_unbegun([number])
        return True

    def _lease(self, call: Call, size: int, may_wait: bool) -> _files.Lease | None:
        """Returns a memory file for a large call, or None.

        The first large calls wait until the supervisor has created the file.
        """
        channel = self._channel
        for is_last in (not may_wait, True):
            if channel is None:
                break
            with self._lock:
                call.lease = channel.leases.take(call.metadata, size, self.workers, channel.has_unread)
            if call.lease is not None or is_last:
                break
            channel.flush(may_wait=True)
            give_up_at = time.monotonic() + LEASE_SECONDS_MAX
            while not channel.leases.is_answered and self._channel is channel and time.monotonic() < give_up_at:
                time.sleep(LEASE_PAUSE_SECONDS)
        return call.lease

    def _fill(self, *, may_wait: bool) -> None:
        """Sends waiting calls while there are free places. Closes the connection if the pool is shut down and empty."""
        call: Call | None = None
        try:
            while True:
                with self._lock:
                    while self._waiting and self._waiting[0].future._is_cancelled():
                        self._waiting.popleft()
                    if not self._waiting or not self._has_place() or self._channel is None:
                        is_over = self._is_over()
                        break
                    call = self._waiting[0]
                    # There are no function calls from here on, so that no signal handler can interrupt the update.
                    self._pickling[call] = None
                    del self._waiting[0]
                    self._placed += 1
                    call.has_place = True
                self._send(call, may_wait=may_wait)
        except BaseException as error:
            if call is None:
                self._continue_elsewhere()
            elif threading.current_thread() is threading.main_thread():
                self._requeue(call)
            else:
                self._give_up(call, error)
            raise
        if is_over:
            self._end_channel()

    def cancelled(self, future: PoolFuture[Any]) -> None:
        """Tells the supervisor that a future was cancelled, if its call was sent."""
        if future._number:
            self._send_cancel([future._number])
        elif self.is_shut_down:
            if self._is_nested():
                self._run_in_thread(self._fill_quietly)
            else:
                self._fill(may_wait=False)

    def _send_cancel(self, numbers: Iterable[int], metadata: bytes = _wire.EMPTY) -> None:
        channel = self._channel
        if channel is not None:
            frames = [(_wire.frame(_wire.CANCEL, number, metadata),) for number in numbers if number in self._sent]
            channel.outgoing.extend(frames)
            channel.flush(may_wait=False)

    def _cancel_unbegun(self, numbers: Iterable[int]) -> None:
        """Cancels calls at the supervisor that have not begun. Older supervisors finish these calls instead."""
        channel = self._channel
        if channel is not None and channel.capabilities & _wire.SUPERVISOR_CANCEL_UNLESS_BEGUN:
            self._send_cancel(numbers, _CANCEL_UNLESS_BEGUN)

    def is_among_oldest(self, number: int) -> bool:
        """Returns true if the call is one of the oldest calls at the supervisor, counting one call per worker."""
        with self._lock:
            return number in itertools.islice(self._sent, self.workers)

    # Outcomes.

    def handle_frames(self, frames: list[_wire.Frame], output: Output) -> None:
        """Handles received frames: settles futures and refills the window. The calls' output is written first."""
        settled = []
        ending: list[PoolFuture[Any]] = []
        try:
            with self._lock:
                self._ending[id(ending)] = ending
                channel = self._channel
                for kind, number, metadata, payload in frames:
                    call = self._sent.pop(number, None) if kind == _wire.OUTCOME else None
                    if call is not None:
                        settled.append((call.future, metadata, _parts(call, metadata, payload)))
                        ending.append(call.future)
                        self._bytes -= call.bytes
                        self._free_place(call, is_answered=metadata[0] in _ANSWERED)
                        self._run_us += (_wire.ran_us(metadata) - self._run_us) * 0.05
                    elif kind in _LEASE_KINDS and channel is not None:
                        channel.leases.handle(kind, number, metadata)
                quick, slow = self._run_us < QUICK_US, self._run_us > SLOW_US
                self._window = self.workers + (WINDOW_QUICK if quick else WINDOW_SLOW if slow else WINDOW_AT_FIRST)
                self._deferred = 0
            # Refill the window before anything slow, to keep the workers busy.
            self._fill(may_wait=False)
            if channel is not None:
                channel.flush(may_wait=False)
            output.catch_up()
            self._restore_folder(settled)
        finally:
            for future, metadata, parts in settled:
                try:
                    self._settle(future, metadata, parts)
                except BaseException as error:
                    future._settle(None, ResultUnreadable(f"the outcome cannot be read: {error!r}"))
            self._ending.pop(id(ending), None)
        if self.broken is not None:
            # If one of the outcomes broke the pool, there is nothing left to wait for.
            self._fill(may_wait=False)

    def _restore_folder(self, settled: list[tuple[PoolFuture[Any], bytes, list[Any]]]) -> None:
        """Restores the supervisor's folder for new workers, periodically and after a worker may have died."""
        now = time.monotonic()
        if now > self._next_folder_check or any(metadata[0] for _, metadata, _ in settled):
            self._next_folder_check = now + FOLDER_CHECK_SECONDS
            supervisor = self._supervisor
            if supervisor is not None:
                supervisor.restore_folder()

    def _settle(self, future: PoolFuture[Any], metadata: bytes, parts: list[Any]) -> None:
        if metadata[0] == _wire.CANCELLED:
            future.cancel()
            return
        payload = parts[0]
        if isinstance(payload, BaseException):
            raise payload
        if metadata[0] or payload[:1] != PICKLED:
            error = self._error(metadata, payload)
            self._has_answered = self._has_answered or not (metadata[0] or payload[:1] == INITIALIZER_FAILED)
            if not self._has_stack_awaited(future, error):
                future._settle(None, error)
            return
        self._has_answered = True
        try:
            value = self._load(parts)
        except BaseException as problem:
            error = _unreadable("the result", problem)
            error.__cause__ = problem
            future._settle(None, error)
        else:
            future._settle(value, None)

    def _load(self, parts: list[Any]) -> Any:
        if self._allowed is None:
            return self.pickler.load(parts)
        from ._data import loads

        pickled, *buffers = parts
        return loads(bytes(pickled) if isinstance(pickled, memoryview) else pickled, buffers, self._allowed)

    def _has_stack_awaited(self, future: PoolFuture[Any], error: BaseException) -> bool:
        """Starts a thread that adds the Python stack from the crash report to the error, and then settles the future.

        Returns false if there is no stack to wait for.
        """
        supervisor = self._supervisor
        if supervisor is None or not isinstance(error, (WorkerCrashed, CallTimeout)) or error.outcome.report is None:
            return False
        if len(self._stacks) >= STACKS_MAX:
            return False
        awaited = [future]
        await_stack = partial(self._await_stack, supervisor, awaited, error)
        thread = threading.Thread(target=await_stack, name="bulkhead-stack", daemon=True)
        with self._lock:
            self._ending[id(awaited)] = awaited
            self._stacks.add(thread)
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started.
            with self._lock:
                del self._ending[id(awaited)]
                self._stacks.discard(thread)
            return False
        return True

    def _await_stack(
        self, supervisor: PrivateSupervisor, awaited: list[PoolFuture[Any]], error: WorkerCrashed | CallTimeout
    ) -> None:
        try:
            stack = supervisor.stack_of(error.outcome.report or "")
            if isinstance(error, CallTimeout):
                _add_stack(error, _without_own_frames(stack))
            elif stack:
                error.__cause__ = _remote(stack)
        finally:
            awaited[0]._settle(None, error)
            with self._lock:
                self._ending.pop(id(awaited), None)
                self._stacks.discard(threading.current_thread())
            self._fill(may_wait=False)

    def _error(self, metadata: bytes, payload: _wire.Payload) -> BaseException:
        if metadata[0]:
            error = _wire.error(metadata, payload)
            if error.outcome.outcome == "rejected" and error.outcome.reason == "unavailable":
                problem = f"no worker of the pool can be started: {error.outcome.message}"
                if self._has_answered:
                    return BrokenProcessPool(problem)
                self._break(problem)
                return BrokenProcessPool(self.broken)
            kind = _ERRORS.get(type(error))
            return error if kind is None else kind(error.outcome, error.payload)
        letter = payload[:1]
        if letter == RAISED:
            end = 5 + int.from_bytes(payload[1:5], "little")
            text = bytes(payload[5:end]).decode(errors="replace")
            try:
                raised: BaseException = self._load([payload[end:]])
                if not isinstance(raised, BaseException):
                    raise TypeError(f"the object has the type {type(raised).__name__}")
            except BaseException as problem:
                raised = _unreadable("the exception", problem, f" (it was {_last_line(text)})")
            if self._is_confined and type(raised) in (PermissionError, FileNotFoundError):
                _explain_denial(raised)
            # Assigned through the base class, because a subclass can reject changes to its instances.
            BaseException.__dict__["__cause__"].__set__(raised, _remote(text))
            return raised
        text = bytes(payload[1:]).decode(errors="replace")
        if letter == UNREADABLE:
            reason = _pool_worker.with_hint(AttributeError(_last_line(text)))
            error_read = ResultUnreadable(f"the call cannot be unpickled by the worker: {reason}")
            error_read.__cause__ = _remote(text)
            return error_read
        if letter == INITIALIZER_FAILED:
            unfit = f"the initializer failed: {_last_line(text)}"
            # After the first outcome, a worker may be compromised, so its report fails only its own call.
            if not self._has_answered:
                self._break(unfit)
            broken = BrokenProcessPool(self.broken or unfit)
            broken.__cause__ = _remote(text)
            return broken
        return ResultUnreadable("the worker sent an invalid result")

    def _break(self, reason: str) -> None:
        """Stops accepting calls, and fails all waiting calls."""
        with self._lock:
            self.broken = (
                self.broken or f"A process in the process pool was terminated abruptly or did not start: {reason}"
            )
        self._end_waiting(lambda future: future._settle(None, BrokenProcessPool(self.broken)))

    def _end_waiting(self, end: Callable[[PoolFuture[Any]], object]) -> None:
        """Calls ``end`` for all waiting calls, even if a callback or a signal handler raises an exception."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        raised: BaseException | None = None
        while waiting:
            try:
                while waiting:
                    end(waiting[0].future)
                    waiting.popleft()
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    # Startup and shutdown.

    def _start(self) -> None:
        """Starts the supervisor and the receiving thread. The caller holds the lock."""
        # This may exit, so it precedes the creation of the supervisor's folder.
        _pool_worker.refuse_in_frozen_worker()
        session = _Session(PrivateSupervisor(NAME, self._bulkhead, self._supervisor_keys, _pool_worker.outer_folder))
        self._sessions.append(session)
        before = self._thread
        try:
            session.output = output = self._launch(session.supervisor)
            session.channel = channel = connect(session.supervisor.socket)
            self._supervisor, self._channel = session.supervisor, channel
            # Assigned before the thread starts, because callbacks on the thread need to recognise it.
            self._thread = _Thread(partial(self._serve, session, channel, output))
            self._thread.start()
        except BaseException:
            self._supervisor = self._channel = None
            self._thread = before
            session.stop(at_once=True)
            session.finish()
            self._sessions.remove(session)
            raise

    def _serve(self, session: _Session, channel: Channel, output: Output) -> None:
        try:
            channel.read(partial(self.handle_frames, output=output))
        finally:
            # Without this thread no call would get an outcome.
            self.lost(session)

    def lost(self, session: _Session) -> None:
        """Handles the end of the connection, whether by a shutdown or by the death of the supervisor."""
        with self._lock:
            if session not in self._sessions:
                # The session failed to start and was cleaned up. Another session may exist already.
                return
            self._channel = self._supervisor = None
            left = [call.future for call in self._sent.values()]
            self._ending[id(left)] = left
            for call in self._sent.values():
                self._free_place(call)
            self._sent.clear()
            self._bytes = self._deferred = 0
        try:
            session.stop(at_once=bool(left) or self._was_killed)
        finally:
            reason = "the pool was terminated" if self._was_killed else "the supervisor exited during the call"
            for future in left:
                future._settle(None, PoolDisconnected(reason, "unknown"))
            del self._ending[id(left)]
            try:
                self._start_again()
            finally:
                # This is done last, because the output stream may be blocked until its reader gets one of the outcomes
                # above.
                session.finish()
                with self._lock:
                    self._sessions.remove(session)

    def _start_again(self) -> None:
        """Starts another supervisor for calls that were not sent, even after a shutdown.

        If the start fails, these calls fail. A later call tries again.
        """
        failed: list[PoolFuture[Any]] = []
        reason = ""
        with self._lock:
            # A call that was submitted meanwhile may have started a supervisor.
            if self._waiting and self._channel is None:
                try:
                    self._start()
                except BaseException as error:
                    reason = str(error) or repr(error)
                    failed = self._ending[id(failed)] = [call.future for call in self._waiting]
                    self._waiting.clear()
        for future in failed:
            future._settle(None, PoolDisconnected(f"the supervisor exited, and another could not be started: {reason}"))
        self._ending.pop(id(failed), None)
        self._fill(may_wait=False)

    def _is_over(self) -> bool:
        is_ending = self.is_shut_down or self.broken is not None
        is_empty = not (self._sent or self._pickling or self._waiting or self._stacks)
        return is_ending and is_empty and self._channel is not None

    def _end_channel(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.end()

    def shut_down(self, *, wait: bool, cancel: bool) -> None:
        """Stops accepting calls, and stops the supervisor after the last outcome."""
        self.is_shut_down = True
        if self._is_nested() or self._holds_future_lock():
            self._run_in_thread(partial(self.shut_down, wait=False, cancel=cancel))
            return
        if cancel:
            self._is_cancelling = True
            self._end_waiting(PoolFuture.cancel)
            with self._lock:
                # As with the standard executors, calls whose `running()` is true are finished.
                sent = list(self._sent)[self.workers :]
            self._cancel_unbegun(sent)
        self._fill(may_wait=False)
        if wait:
            try:
                self._join()
            except KeyboardInterrupt:
                self.is_given_up = True
                raise

    def _join(self) -> None:
        """Waits for the receiving thread, and for the thread of any supervisor started in the meantime."""
        joined, current = None, threading.current_thread()
        while True:
            with self._lock:
                thread = self._thread
                # Callbacks run in these threads, which cannot wait for themselves.
                is_own = current is thread or current in self._stacks
            if thread is None or thread is joined or is_own:
                return
            thread.join()
            joined = thread

    def abandoned(self) -> None:
        """Shuts the pool down after its executor was dropped.

        The garbage collector can call this method between any two steps of any thread, so a new thread does the work.
        """
        self.is_shut_down = True
        self._run_in_thread(self._fill_quietly)

    def _is_nested(self) -> bool:
        """Returns true if a signal handler or the garbage collector called this in a thread that holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _holds_future_lock(self) -> bool:
        """Returns true if this thread holds the lock of an unfinished future, as ``wait`` does.

        The thread that settles the future would then wait for this thread, so this thread must not wait for the pool.
        """
        with self._lock:
            futures = [call.future for call in (*self._sent.values(), *self._pickling, *self._waiting)]
            futures += itertools.chain(*self._ending.values())
        return any(future._lock._is_owned() for future in futures)

    def _run_in_thread(self, task: Callable[[], None]) -> None:
        with suppress(RuntimeError):
            _thread.start_new_thread(task, ())

    def _fill_quietly(self) -> None:
        # At interpreter exit, parts of this module may already have been removed. In this case, `_at_exit` stops the
        # pool.
        with suppress(Exception):
            self._fill(may_wait=False)

    def terminate(self) -> None:
        """Stops the supervisor and kills all workers. Calls without an outcome fail."""
        self.is_shut_down = True
        self._was_killed = True
        if self._is_nested() or self._holds_future_lock():
            self._run_in_thread(self.terminate)
            return
        try:
            self._break("the pool was terminated")
        finally:
            self._end_channel()
        self._join()

    def supervisor(self) -> PrivateSupervisor:
        """Returns the running supervisor. Raises ``RuntimeError`` if no supervisor is running."""
        supervisor = self._supervisor
        if supervisor is None:
            raise RuntimeError("the supervisor is not running: it starts with the first call and stops with the pool")
        return supervisor


class _Session:
    """The lifetime of one supervisor, with the connection and the reader of the workers' output."""

    def __init__(self, supervisor: PrivateSupervisor) -> None:
        self.supervisor = supervisor
        self.channel: Channel | None = None
        self.output: Output | None = None

    def stop(self, *, at_once: bool) -> None:
        """Stops the supervisor and its workers. Waits for the remaining output unless the output stream is blocked."""
        if self.channel is not None:
            self.channel.end()
            self.channel.close()
        self.supervisor.stop(at_once=at_once)
        if self.output is not None:
            self.output.end()

    def finish(self) -> None:
        """Frees all resources after ``stop``."""
        if self.output is not None:
            self.output.finish()
        self.supervisor.forget()

    def forget(self) -> None:
        """Closes this process's descriptors without stopping the supervisor. Used in forked children."""
        if self.channel is not None:
            self.channel.close()
        if self.output is not None:
            self.output.forget()
        self.supervisor.forget()


class _Thread(threading.Thread):
    """The receiving thread of a session.

    Up to CPython 3.12, if a signal handler interrupts ``join`` with an exception, the thread is considered finished,
    and later calls of ``join`` return immediately. This class waits for its own flag instead.
    """

    def __init__(self, task: Callable[[], None]) -> None:
        super().__init__(target=task, name="bulkhead-executor", daemon=True)
        self._is_done = False
        self._done = Condition()

    def run(self) -> None:
        try:
            # Thread.run then drops the task, along with its references to memory files.
            super().run()
        finally:
            with self._done:
                self._is_done = True
                self._done.notify_all()

    def join(self, timeout: float | None = None) -> None:
        with self._done:
            self._done.wait_for(lambda: self._is_done, timeout)
        if self._is_done:
            super().join(timeout)


def _parts(call: Call, metadata: bytes, payload: _wire.Payload) -> list[Any]:
    """Returns the parts of a result, or a list that contains an exception if the parts cannot be read."""
    try:
        if call.lease is not None and (named := _wire.outcome_extensions(metadata).get(_wire.LEASE_REF)) is not None:
            return call.lease.read(named)
        return _files.parts(payload) if payload[:1] == _files.PIECES else [payload]
    except Exception as error:
        return [error]


def _unreadable(what: str, problem: BaseException, detail: str = "") -> BaseException:
    from ._libraries import Refused

    if isinstance(problem, Refused):
        return ResultRefused(f"{what} is not accepted from a confined worker{detail}: {problem}; {_ADVICE}")
    return ResultUnreadable(f"{what} cannot be unpickled{detail}: {problem!r}")


def _remote(text: str) -> BaseException:
    """Returns an exception that shows a traceback of another process, to be used as a cause."""
    made: BaseException = _RemoteTraceback(f'\n"""\n{text}"""')  # type: ignore[arg-type]
    return made


def _without_own_frames(stacks: str) -> str:
    """Returns a worker's stacks, as written by ``faulthandler``, without the frames of this package."""
    threads = []
    for thread in stacks.strip().split("\n\n"):
        lines = thread.split("\n")
        own = next((index for index, line in enumerate(lines) if _OWN_FRAME.match(line)), len(lines))
        if own > 1 and not _WATCHER_FRAME.search(thread):
            threads.append("\n".join(lines[:own]))
    return "\n\n".join(threads)


def _add_stack(error: CallTimeout, stack: str) -> None:
    """Adds a stack to an exception, as a note."""
    if not stack:
        return
    text = f"stack of the worker when the call timed out:\n{stack}"
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        # Python 3.10 does not print notes.
        error.__cause__ = _remote(f"{text}\n")


def _explain_denial(error: Any) -> None:
    """Adds to a confined worker's file error that the sandbox denied access, if this process can read the path."""
    try:
        is_readable = error.filename is not None and os.access(error.filename, os.R_OK)
    except (TypeError, ValueError):
        return
    if is_readable:
        error.strerror = f"{error.strerror} (denied by the sandbox: add `read`, or `write`, for this path)"
        error.args = (error.errno, error.strerror)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_interpreter_ends = False


def _at_exit() -> None:
    """Finishes all submitted calls and accepts no more, like the standard executors."""
    global _interpreter_ends
    _interpreter_ends = True
    for pool in list(_pools):
        if pool.is_given_up:
            pool.terminate()
        else:
            pool.shut_down(wait=True, cancel=False)


def _after_fork() -> None:
    for pool in list(_pools):
        pool.after_fork()


threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_after_fork)
