"""The future of a job. Apart from the client, since ``concurrent.futures`` takes long to import."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import _base as _states
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from . import _wire
from ._connection import Reply

if TYPE_CHECKING:
    from ._connection import Connection
    from .errors import JobError

T = TypeVar("T")


class Condition(threading.Condition):
    """One that a signal's exception does not leave taken: ``with`` calls its lock's own methods."""

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


def call_back(future: Future[Any]) -> None:
    """Calls all done-callbacks of a future, whatever one of them raises. In the main thread what is no ``Exception``,
    which may be of a signal's handler, is raised in the end; other threads go on, since all futures depend on them."""
    raised: BaseException | None = None
    for callback in future._done_callbacks:  # type: ignore[attr-defined]
        try:
            callback(future)
        except BaseException as error:
            with suppress(Exception):
                # A handler of the application's may raise.
                _states.LOGGER.exception("exception calling callback for %r", future)
            if not isinstance(error, Exception):
                raised = error
    if raised is not None and threading.current_thread() is threading.main_thread():
        raise raised


class CancellableFuture(Future[T]):
    """A future whose ``cancel()`` also ends what runs, unless it is done."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: threading.Condition = Condition()

    def cancel(self) -> bool:
        """Cancels it, also while it runs; False only if it has its outcome already."""
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
        call_back(self)
        return True

    def _is_cancelled(self) -> bool:
        # Without the lock, since the pool's is held; and what is cancelled stays so.
        return self._state in (_states.CANCELLED, _states.CANCELLED_AND_NOTIFIED)

    def _withdraw(self) -> None:
        """Ends the job of this future, which was cancelled."""
        raise NotImplementedError


class JobFuture(CancellableFuture[Reply]):
    """A ``concurrent.futures.Future`` of a job: ``result()`` is a ``Reply``, or raises the ``JobError``.

    ``cancel()`` also ends a job that runs: the worker is asked to stop, and is killed after the bulkhead's ``grace``
    if it does not. It is False only if the future is done. ``running()`` is true as soon as the job was sent.
    Callbacks run in the thread that reads the connection, or that cancels: they should be short.
    """

    def __init__(self) -> None:
        super().__init__()
        self._connection: Connection | None = None
        self._number = 0
        self._listeners: list[Callable[[float, str], object]] = []
        self._heard: tuple[float, str] | None = None
        #: Whether all callbacks were called.
        self._is_told = False

    def on_progress(self, listener: Callable[[float, str], object]) -> None:
        """Has ``listener(fraction, text)`` called when the handler tells how far it is, and with the last it told."""
        with self._condition:
            self._listeners.append(listener)
            heard = self._heard
        if heard is not None:
            listener(*heard)

    def _withdraw(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.cancel(self._number)

    # What the connection calls.

    def started(self, connection: Connection, number: int) -> None:
        """The job is about to be sent."""
        self._connection, self._number = connection, number
        with self._condition:
            if self._state == _states.PENDING:
                self._state = _states.RUNNING

    def settle(self, metadata: bytes, payload: bytes | bytearray) -> None:
        """Its outcome has come."""
        try:
            if _wire.is_ok(metadata):
                self._resolve(Reply(payload, metadata), None, is_repeated=True)
            else:
                self._resolve(None, _wire.error(metadata, payload), is_repeated=True)
        except Exception as error:
            self._resolve(None, error)

    def progress(self, metadata: bytes) -> None:
        """It has told how far it is."""
        with self._condition:
            self._heard = heard = _wire.progress(metadata)
            listeners = tuple(self._listeners)
        for listener in listeners:
            try:
                listener(*heard)
            except BaseException as error:
                if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                    # Perhaps of a signal's handler.
                    raise
                _states.LOGGER.exception("calling a listener for %r", self)

    def lose(self, error: JobError) -> None:
        """Its connection is lost."""
        self._resolve(None, error)

    def forget(self) -> None:
        """This process was forked from the one that had the job; no other thread is here."""
        self._connection = None
        self._condition = Condition()
        self._done_callbacks: list[Any] = []

    def _resolve(self, value: Any, error: BaseException | None, *, is_repeated: bool = False) -> None:
        """Ends it, unless it was cancelled. ``is_repeated``: if it has ended already, a signal's exception came before
        all were told."""
        self._connection = None
        with self._condition:
            has_ended = self._state == _states.FINISHED
            if self._is_cancelled():
                return
            if has_ended and (self._is_told or not is_repeated):
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
            call_back(self)
        finally:
            self._is_told = True
