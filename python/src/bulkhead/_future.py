"""Futures for jobs of the client and for calls of the pool. The connection or the pool settles a future.

This is a separate module because importing ``concurrent.futures`` is slow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import _base as _states
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from . import _wire
from ._reply import Reply

if TYPE_CHECKING:
    from ._again import Job
    from .errors import JobError

T = TypeVar("T")


class Condition(threading.Condition):
    """A condition that stays usable if a signal handler raises an exception while the lock is acquired or released."""

    # Uses the lock's own methods, because the standard condition's methods can leave the lock held.
    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until notified or until ``timeout`` seconds have passed. Returns false after a timeout."""
        lock: Any = self._lock  # type: ignore[attr-defined]
        if not lock._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        try:
            return super().wait(timeout)
        except BaseException:
            # The standard method does not reacquire the lock if the exception is raised just after the release. Leaving
            # the `with` block would then raise an exception that hides this one.
            if not lock._is_owned():
                lock.acquire()
            raise


def run_callbacks(future: Future[Any]) -> None:
    """Calls all of a future's done-callbacks, even if some callbacks raise exceptions.

    In the main thread, an exception that is not an ``Exception`` is re-raised at the end, because it may come from a
    signal handler. Other threads only log the exception, because all futures depend on these threads.
    """
    raised: BaseException | None = None
    for callback in future._done_callbacks:  # type: ignore[attr-defined]
        try:
            callback(future)
        except BaseException as error:
            with suppress(Exception):
                # A logging handler of the application can raise an exception.
                _states.LOGGER.exception("exception calling callback for %r", future)
            if not isinstance(error, Exception):
                raised = error
    if raised is not None and threading.current_thread() is threading.main_thread():
        raise raised


class CancellableFuture(Future[T]):
    """A future whose ``cancel()`` also stops a running job."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: threading.Condition = Condition()

    def cancel(self) -> bool:
        """Cancels the job, even if it is running. Returns false only if the job already has an outcome."""
        with self._condition:
            if self._state == _states.FINISHED:
                return False
            if self._is_cancelled():
                return True
            self._state = _states.CANCELLED_AND_NOTIFIED
            for waiter in self._waiters:
                waiter.add_cancelled(self)
            self._condition.notify_all()
        self._withdraw()
        run_callbacks(self)
        return True

    def _is_cancelled(self) -> bool:
        # Does not hold the future's lock, because the caller may hold the pool's lock. A cancelled future stays
        # cancelled.
        return self._state in (_states.CANCELLED, _states.CANCELLED_AND_NOTIFIED)

    def _withdraw(self) -> None:
        """Ends this future's job after the future was cancelled."""
        raise NotImplementedError


class JobFuture(CancellableFuture[Reply]):
    """A ``concurrent.futures.Future`` whose ``result()`` returns a ``Reply`` or raises a ``JobError``.

    ``cancel()`` also stops a running job. The worker is asked to stop the job, and is killed if the job is still
    running after the bulkhead's ``grace`` period. ``cancel()`` returns false only if the future is done. ``running()``
    returns true once the job has been sent. Callbacks run in the thread that reads the connection or cancels the job,
    so they must be short.
    """

    def __init__(self, job: Job | None = None) -> None:
        super().__init__()
        #: The job, until its outcome arrives.
        self.job = job
        self._cancel_job: Callable[[int], None] | None = None
        self._number = 0
        self._listeners: list[Callable[[float, str], object]] = []
        self._last_progress: tuple[float, str] | None = None
        #: True if all callbacks were called.
        self._are_callbacks_done = False

    def on_progress(self, listener: Callable[[float, str], object]) -> None:
        """Registers ``listener(fraction, text)`` for progress reports from the handler.

        If progress has already been reported, calls the listener immediately with the last report.
        """
        with self._condition:
            self._listeners.append(listener)
            progress = self._last_progress
        if progress is not None:
            listener(*progress)

    def _withdraw(self) -> None:
        cancel_job = self._cancel_job
        if cancel_job is not None:
            cancel_job(self._number)

    # Methods for the connection.

    def started(self, cancel_job: Callable[[int], None], number: int) -> None:
        """Sets the state to running. Called before the job is sent. ``cancel_job`` cancels the job by its number."""
        self._cancel_job, self._number = cancel_job, number
        with self._condition:
            if self._state == _states.PENDING:
                self._state = _states.RUNNING

    def is_due(self, before: float) -> bool:
        """Returns true if the job's deadline was earlier than ``before``."""
        job = self.job
        return job is not None and job.ends_at is not None and job.ends_at < before

    @property
    def is_sending(self) -> bool:
        """True while a thread is sending the job."""
        return self.job is not None and self.job.is_sending

    def settle(self, metadata: bytes, payload: bytes | bytearray) -> None:
        """Sets the result or exception from a received outcome."""
        try:
            if _wire.is_ok(metadata):
                self._resolve(Reply(payload, metadata), None, is_repeated=True)
            else:
                error = _wire.error(metadata, payload)
                self._resolve(None, error if self.job is None else self.job.corrected(error), is_repeated=True)
        except Exception as error:
            self._resolve(None, error)

    def progress(self, metadata: bytes) -> None:
        """Passes a progress report to the listeners."""
        with self._condition:
            self._last_progress = progress = _wire.progress(metadata)
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener(*progress)
            except BaseException as error:
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    # The exception may come from a signal handler.
                    raise
                _states.LOGGER.exception("calling a listener for %r", self)

    def lose(self, error: JobError) -> None:
        """Sets the exception after the connection was lost."""
        self._resolve(None, error)

    def forget(self) -> None:
        """Detaches the future in a forked child, which has no other threads."""
        self._cancel_job = None
        self._condition = Condition()
        self._done_callbacks: list[Any] = []

    def _resolve(self, value: Any, error: BaseException | None, *, is_repeated: bool = False) -> None:
        """Sets the result or exception, unless the future was cancelled.

        If ``is_repeated`` is true, a finished future notifies the remaining waiters and callbacks. This is needed after
        an exception in a signal handler has interrupted the first notification.
        """
        self._cancel_job = None
        self.job = None
        with self._condition:
            has_ended = self._state == _states.FINISHED
            if self._is_cancelled():
                return
            if has_ended and (self._are_callbacks_done or not is_repeated):
                return
            if not has_ended:
                self._result, self._exception = value, error
                self._state = _states.FINISHED
            for waiter in self._waiters:
                if has_ended and self in waiter.finished_futures:
                    continue
                if self._exception is None:
                    waiter.add_result(self)
                else:
                    waiter.add_exception(self)
            self._condition.notify_all()
        try:
            run_callbacks(self)
        finally:
            self._are_callbacks_done = True
