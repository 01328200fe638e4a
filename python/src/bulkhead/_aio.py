"""The asyncio client. A client has one connection per event loop, which is replaced after a loss.

Jobs that are submitted in the same iteration of the loop are sent together. The handshake blocks, so it runs in a
separate thread. ``_again`` decides which jobs are sent again after a loss.
"""

from __future__ import annotations

import _socket
import asyncio
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from . import _again, _connection, _wire
from ._client import BaseClient, as_buffer, submission_with, too_old
from ._connection import (
    HANDSHAKE_SECONDS_MIN,
    connections,
    handshake_seconds,
    lost_before_sent,
    lost_error,
    open_connection,
    unanswered_error,
)
from ._reply import Reply
from .errors import Disconnected, JobError

if TYPE_CHECKING:
    Opened = tuple[_socket.socket, _wire.Reader, int]

#: Maximum number of reads per iteration of the event loop.
READS_MAX = 16
#: Maximum time between two checks for jobs without an outcome, in seconds. Some event loops reject long delays.
CHECK_SECONDS_MAX = 3600.0
#: Time for the supervisor to refill the socket, in milliseconds.
REFILL_MS = 50
#: Maximum number of buffers per write. The kernel accepts 1024.
BUFFERS_MAX = 512


class AsyncJob(asyncio.Future[Reply]):
    """A submitted job. Awaiting it returns a ``Reply`` or raises a ``JobError``.

    ``cancel()``, or cancelling the awaiting task, cancels the job. The worker is asked to stop the job, and is killed
    if the job is still running after the bulkhead's ``grace`` period.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, job: _again.Job, state: _LoopState) -> None:
        super().__init__(loop=loop)
        #: The job, until its outcome arrives.
        self._job: _again.Job | None = job
        #: Time of the deadline, or of the cancellation.
        self._job_ends_at = math.inf if job.ends_at is None else job.ends_at
        self._job_state = state
        self._job_connection: _Connection | None = None
        self._job_number = 0
        #: Number of bytes queued on the connection up to the end of the job's frame.
        self._job_end = 0
        self._job_listeners: list[Callable[[float, str], object]] = []

    def on_progress(self, listener: Callable[[float, str], object]) -> None:
        """Registers ``listener(fraction, text)``, called in the event loop for each progress report."""
        self._job_listeners.append(listener)

    def cancel(self, msg: Any | None = None) -> bool:
        if not super().cancel(msg):
            return False
        self._job = None
        if self._job_connection is not None:
            self._job_connection.cancel(self._job_number)
        else:
            self._job_state.forget(self)
        return True

    def _fail_job(self, error: JobError) -> None:
        """Sets the exception for a job that has no result."""
        self._job = self._job_connection = None
        # A future of a closed loop cannot schedule its callbacks.
        if not self.done() and not self.get_loop().is_closed():
            self.set_exception(error)


class _Connection:
    """A connection to the supervisor. A lost connection is never restored.

    ``send_again`` is called with the lost jobs that can be sent again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send_again: Callable[[list[AsyncJob]], None],
        link: _socket.socket,
        reader: _wire.Reader,
        capabilities: int,
    ) -> None:
        self._loop = loop
        self._send_again = send_again
        self._socket = link
        self._reader = reader
        self._capabilities = capabilities
        self.is_lost = False
        #: True if further jobs need another connection.
        self.is_over = False
        #: Time since which further jobs need another connection.
        self.lost_at = 0.0
        self._is_released = False
        self._last = 0
        # Total numbers of bytes queued and bytes sent so far.
        self._queued_bytes = self._sent_bytes = 0
        #: Number of bytes sent at the previous check for jobs without an outcome, or -1 if it found no such jobs.
        self._sent_bytes_at_check = -1
        self._jobs: dict[int, AsyncJob] = {}
        self._outgoing: deque[_wire.Buffer] = deque()
        self._is_flush_due = False
        self._is_full = False
        #: The next check for jobs without an outcome, and its time.
        self._check: asyncio.TimerHandle | None = None
        self._check_at = 0.0
        link.setblocking(False)
        loop.add_reader(link, self._on_readable)
        connections.add(self)

    # Sending.

    def start(self, job: AsyncJob) -> None:
        """Sends a job, or sets an exception if the job cannot be sent."""
        kept = job._job
        assert kept is not None
        if kept.options[_again.RUN_LIMIT] is not None and not self._capabilities & _wire.SUPERVISOR_RUN_LIMIT:
            job._fail_job(too_old())
            return
        metadata, payload = kept.metadata, kept.payload
        self._last = number = self._last + 1
        job._job_connection, job._job_number = self, number
        if len(payload) <= _wire.INLINE_BYTES_MAX:
            self._queue(_wire.frame(_wire.SUBMIT, number, metadata, payload))
        else:
            self._queue(_wire.head(_wire.SUBMIT, number, metadata, len(payload)), payload)
        job._job_end = self._queued_bytes
        is_alone = not self._jobs
        self._jobs[number] = job
        self._check_by(job._job_ends_at + _connection.OUTCOME_MARGIN_SECONDS)
        self._flush_soon(is_alone)

    def _queue(self, *buffers: _wire.Buffer) -> None:
        for buffer in buffers:
            self._outgoing.append(buffer)
            self._queued_bytes += len(buffer)

    def cancel(self, number: int) -> None:
        """Requests cancellation of a job."""
        job = self._jobs.get(number)
        if job is not None:
            job._job_ends_at = time.monotonic()
            if not self._loop.is_closed():
                self._check_by(job._job_ends_at + _connection.OUTCOME_MARGIN_SECONDS)
            self._queue(_wire.frame(_wire.CANCEL, number))
            # Sent immediately, because the loop may be about to stop.
            self._flush_soon(at_once=True)

    def _flush_soon(self, at_once: bool) -> None:
        if self._is_full:
            return
        if at_once:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends the queued data until the socket is full."""
        self._is_flush_due = False
        outgoing = self._outgoing
        try:
            while outgoing and not self.is_lost:
                if len(outgoing) == 1:
                    sent = self._socket.send(outgoing[0])
                else:
                    sent = self._socket.sendmsg(islice(outgoing, BUFFERS_MAX))
                self._sent_bytes += sent
                while sent:
                    size = len(outgoing[0])
                    if sent < size:
                        outgoing[0] = memoryview(outgoing[0])[sent:]
                        break
                    outgoing.popleft()
                    sent -= size
        except BlockingIOError:
            if not self._is_full:
                self._is_full = True
                self._loop.add_writer(self._socket, self._flush)
            return
        except OSError:
            self._break()
        if self._is_full:
            self._is_full = False
            self._loop.remove_writer(self._socket)

    def _break(self) -> None:
        """Stops sending after a failed send.

        Outcomes may have arrived before the connection broke. ``_on_readable`` therefore handles the received frames
        first, and closes the connection when it finds the end.
        """
        self._end()
        self._outgoing.clear()
        with suppress(OSError):
            # If only the send has failed, for example for lack of memory, this makes the supervisor close the
            # connection.
            self._socket.shutdown(_socket.SHUT_WR)

    # Reading.

    def _on_readable(self) -> None:
        reader, reason = self._reader, None
        try:
            for _ in range(READS_MAX):
                if not reader.read():
                    break
        except BlockingIOError:
            pass
        except EOFError:
            reason = "the supervisor closed the connection"
        except (OSError, _wire.Unreadable) as error:
            reason = str(error)
        try:
            self._handle_frames()
        except (_wire.Malformed, _wire.Unreadable) as error:
            reason = str(error)
        if reason is not None:
            self.lose(reason)

    def _handle_frames(self) -> None:
        frames, jobs = self._reader.frames, self._jobs
        while frames:
            kind, number, metadata, payload = frames.popleft()
            if kind == _wire.OUTCOME:
                job = jobs.pop(number, None)
                if job is None or job.done():
                    continue
                kept, job._job, job._job_connection = job._job, None, None
                if _wire.is_ok(metadata):
                    job.set_result(Reply(payload, metadata))
                else:
                    error = _wire.error(metadata, payload)
                    job.set_exception(error if kept is None else kept.corrected(error))
            elif kind == _wire.PROGRESS:
                job = jobs.get(number)
                if job is not None and not job.done() and job._job_listeners:
                    progress = _wire.progress(metadata)
                    for listener in job._job_listeners:
                        self._loop.call_soon(listener, *progress)
            elif kind == _wire.GOAWAY:
                self._go_away(number)
            elif kind == _wire.REFUSED:
                reason, sentence = _wire.refused(metadata)
                self.lose(f"the supervisor rejected the connection ({reason}): {sentence}")
        self._end_if_unused()

    def _check_by(self, at: float) -> None:
        """Schedules a check for jobs without an outcome, unless there is an earlier one."""
        if self._check is not None:
            if self._check_at <= at:
                return
            self._check.cancel()
        delay = min(at - time.monotonic(), CHECK_SECONDS_MAX)
        self._check_at = time.monotonic() + delay
        self._check = self._loop.call_later(delay, self._end_unanswered)

    def _end_unanswered(self) -> None:
        """Ends and cancels the jobs whose outcomes have not arrived long after their deadlines.

        Later outcomes of these jobs are ignored. If one of these jobs is not completely sent, and nothing has been sent
        since the previous check, closes the connection.
        """
        self._check = None
        if self.is_lost:
            return
        now = time.monotonic()
        if now - self._check_at > _connection.OUTCOME_CHECK_SECONDS:
            # The loop or the process was paused, so outcomes may still be unread.
            self._check_by(now + _connection.OUTCOME_CHECK_SECONDS)
            return
        margin = _connection.OUTCOME_MARGIN_SECONDS
        due = self._receive_due(now - margin)
        if due:
            self._flush()
            is_stuck = self._sent_bytes == self._sent_bytes_at_check
            self._sent_bytes_at_check = self._sent_bytes
            for number in due:
                if self._jobs[number]._job_end <= self._sent_bytes:
                    self._queue(_wire.frame(_wire.CANCEL, number))
                    self._jobs.pop(number)._fail_job(unanswered_error())
                elif is_stuck:
                    self.lose("the supervisor does not read")
                    return
        else:
            self._sent_bytes_at_check = -1
        if self._jobs:
            first = min(job._job_ends_at for job in self._jobs.values())
            # Receiving may have blocked the loop for some time.
            self._check_by(max(first + margin, time.monotonic() + _connection.OUTCOME_CHECK_SECONDS))
        self._flush_soon(at_once=True)
        self._end_if_unused()

    def _receive_due(self, before: float) -> list[int]:
        """Receives all outcomes that the supervisor has sent. Returns the numbers of due jobs without an outcome.

        If the loop was busy, most of the outcomes can still be in the supervisor, which refills the socket. Blocks for
        at most half a check interval, because other data may arrive all the time.
        """
        until = time.monotonic() + _connection.OUTCOME_CHECK_SECONDS / 2
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            due = [number for number, job in self._jobs.items() if job._job_ends_at <= before]
            if not due or time.monotonic() >= until:
                return due
            # In case a signal handler raises an exception.
            self._check_by(until + _connection.OUTCOME_CHECK_SECONDS)
            if not poll.poll(REFILL_MS):
                return due
            self._on_readable()

    # Closing.

    def _end_if_unused(self) -> None:
        """Closes the connection after its last job, if there will be no further jobs."""
        if self.is_over and not self._jobs:
            self.lose("the supervisor was replaced")
        elif self._is_released and not self._jobs:
            self.release()

    def release(self) -> None:
        """Closes the connection after the last outcome, because the client was dropped."""
        self._is_released = True
        if not self._jobs:
            self.lose("the client was dropped")

    def _end(self) -> None:
        """Accepts no further jobs on this connection."""
        if not self.is_over:
            self.is_over = True
            self.lost_at = time.monotonic()

    def _go_away(self, taken: int) -> None:
        """Keeps only the first ``taken`` jobs, which the supervisor has accepted, on this connection.

        Sends the other jobs over another connection.
        """
        self._end()
        again = []
        for number in [number for number in self._jobs if number > taken]:
            job = self._jobs.pop(number)
            kept, job._job_connection = job._job, None
            if kept is not None and not job.done():
                kept.lost(False, was_taken=False)
                again.append(job)
        if again:
            self._send_again(again)

    def lose(self, reason: str, *, is_replaced: bool = True) -> None:
        """Closes the connection. Its jobs fail, or are sent again if ``is_replaced`` is true."""
        if self.is_lost:
            return
        self.is_lost = True
        self._end()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            if self._is_full:
                self._loop.remove_writer(self._socket)
            if self._check is not None:
                self._check.cancel()
        self._socket.close()
        jobs, self._jobs = self._jobs, {}
        self._outgoing.clear()
        if self._loop.is_closed():
            return
        again = []
        for job in jobs.values():
            kept, job._job_connection = job._job, None
            if kept is None or job.done():
                continue
            # The supervisor begins a job only after the whole frame has arrived.
            if kept.lost(job._job_end <= self._sent_bytes) and is_replaced and not kept.is_overdue():
                kept.postpone()
                again.append(job)
            else:
                job._fail_job(lost_error(reason, kept.executed))
        if again:
            self._send_again(again)

    def abandon(self) -> None:
        """Abandons the connection in a forked child, because the event loop and the jobs belong to the parent."""
        self.is_lost = self.is_over = True
        self._socket.close()
        self._jobs = {}


class _LoopState:
    """A client's state for one event loop: a connection, or jobs that wait for a connection.

    Only the loop's thread uses it. It holds no reference to the client, so that the client can be dropped.
    """

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop, is_closed: bool) -> None:
        self._path = path
        self._loop = loop
        #: True if the client was closed.
        self.is_closed = is_closed
        self._is_released = False
        #: True in a forked child, which must not send the jobs of its parent.
        self._is_abandoned = False
        self.connection: _Connection | None = None
        #: Earlier connections, on which a replaced supervisor finishes its jobs.
        self.leaving: list[_Connection] = []
        self.connecting: asyncio.Task[None] | None = None
        #: Jobs that wait for a connection, in the order in which they will be sent, with the timers that end the waits.
        self._waiting: dict[AsyncJob, asyncio.TimerHandle | None] = {}
        #: Reason why the last attempt to connect failed.
        self._problem: JobError | None = None
        self._pause = _again.RECONNECT_PAUSE_MIN
        connections.add(self)

    def start(self, job: AsyncJob) -> None:
        """Sends a job as soon as there is a connection."""
        connection = self.connection
        if connection is not None:
            if not connection.is_over:
                connection.start(job)
                return
            if job._job is not None:
                job._job.lost(False, connection.lost_at)
        self._waiting[job] = self._limit_wait(job)
        if self.connecting is None:
            self.connecting = self._loop.create_task(self._connect())

    def _send_again(self, jobs: list[AsyncJob]) -> None:
        """Sends the jobs of a lost connection again, before other jobs."""
        self._waiting = {job: self._limit_wait(job) for job in jobs} | self._waiting
        if self.connecting is None:
            self.connecting = self._loop.create_task(self._connect())

    def _limit_wait(self, job: AsyncJob) -> asyncio.TimerHandle | None:
        """Starts a timer that fails the job if it waits too long. Allows an overdue job one more connection attempt."""
        kept = job._job
        left = None if kept is None or kept.is_overdue() else kept.wait_seconds()
        if kept is None or left is None:
            return None
        # A job that waits for the first connection has the same minimum as the handshake.
        seconds = handshake_seconds(left) if kept.waits_until is None else left
        return self._loop.call_later(seconds, self._end_wait, job)

    def _end_wait(self, job: AsyncJob) -> None:
        """Fails a job that has waited too long for a connection."""
        self.forget(job)
        if job._job is not None:
            silent = Disconnected(f"the supervisor at {self._path} is not responding; the job was not sent")
            job._fail_job(job._job.unreachable(self._problem or silent))

    def forget(self, job: AsyncJob) -> None:
        """Removes a job that no longer waits for a connection."""
        timer = self._waiting.pop(job, None)
        if timer is not None:
            timer.cancel()

    async def _connect(self) -> None:
        """Connects, and sends the waiting jobs. Keeps trying if an earlier connection was lost."""
        loop = self._loop
        self._problem = None
        try:
            while self._waiting and not self._is_abandoned:
                pauses = [job._job.pause_seconds() for job in self._waiting if job._job is not None]
                if pauses and min(pauses) > 0:
                    self._problem = lost_before_sent()
                    # A job without a pause can arrive in the meantime.
                    await asyncio.sleep(min(*pauses, _again.RECONNECT_PAUSE_MIN))
                    continue
                if self.connection is not None and not self.connection.is_over:
                    self._send_waiting(self.connection)
                    continue
                try:
                    opened = await self._open(self._handshake_seconds())
                except JobError as error:
                    self._problem = error
                    if self.connection is None or not error.retryable or self.is_closed:
                        self._fail_waiting(error)
                        return
                    for job in list(self._waiting):
                        if job._job is not None and job._job.is_overdue():
                            self._end_wait(job)
                    await asyncio.sleep(self._pause)
                    self._pause = min(self._pause * 2, _again.RECONNECT_PAUSE_MAX)
                    continue
                earlier = [*self.leaving] if self.connection is None else [*self.leaving, self.connection]
                self.leaving = [other for other in earlier if not other.is_lost]
                self.connection = connection = _Connection(loop, self._send_again, *opened)
                self._problem = None
                self._pause = _again.RECONNECT_PAUSE_MIN
                if self.is_closed:
                    self._fail_waiting(lost_error("this program closed the client", "no"))
                    connection.lose("this program closed the client", is_replaced=False)
                    return
                self._send_waiting(connection)
                if self._is_released:
                    connection.release()
        except BaseException as error:
            self._fail_waiting(Disconnected(f"the connection failed: {error!r}; the job was not sent"))
            raise
        finally:
            self.connecting = None

    async def _open(self, seconds: float) -> Opened:
        """Connects in a separate thread, because the application's own calls can occupy the loop's executor."""
        loop = self._loop
        opening: asyncio.Future[Opened] = loop.create_future()

        def end(opened: Opened | None, error: BaseException | None) -> None:
            if opening.done():
                if opened is not None:
                    opened[0].close()
            elif error is not None:
                opening.set_exception(error)
            elif opened is not None:
                opening.set_result(opened)

        def run() -> None:
            opened, problem = None, None
            try:
                opened = open_connection(self._path, seconds)
            except BaseException as error:
                problem = error
            try:
                loop.call_soon_threadsafe(end, opened, problem)
            except RuntimeError:
                # The loop was closed.
                if opened is not None:
                    opened[0].close()

        try:
            threading.Thread(target=run, name="bulkhead-connect", daemon=True).start()
        except RuntimeError as error:
            raise Disconnected(f"failed to start a thread to connect: {error}; the job was not sent") from None
        return await opening

    def _handshake_seconds(self) -> float:
        """Returns the timeout for a handshake: the time until the last waiting job is overdue, within limits."""
        jobs = [job._job for job in self._waiting]
        seconds = [handshake_seconds(job.wait_seconds()) for job in jobs if job is not None]
        return max(seconds, default=HANDSHAKE_SECONDS_MIN)

    def _send_waiting(self, connection: _Connection) -> None:
        for job in list(self._waiting):
            kept = job._job
            if kept is not None and kept.pause_seconds() > 0:
                continue
            self.forget(job)
            if kept is None or job.done():
                continue
            try:
                if kept.waits_until is not None:
                    kept.update_remaining()
                connection.start(job)
            except JobError as error:
                job._fail_job(error)

    def _fail_waiting(self, error: JobError) -> None:
        for job in list(self._waiting):
            self.forget(job)
            if job._job is not None:
                job._fail_job(job._job.unreachable(error))

    def abandon(self) -> None:
        """Abandons the waiting jobs in a forked child, because they belong to the parent."""
        self._is_abandoned = True

    def release(self) -> None:
        """Closes the connections after their last outcomes, because the client was dropped."""
        self._is_released = True
        for connection in (*self.leaving, self.connection):
            if connection is not None:
                connection.release()

    def lose(self, reason: str) -> None:
        """Closes all connections. The jobs on them fail. Does nothing without a connection."""
        if self.connection is not None:
            for connection in (*self.leaving, self.connection):
                connection.lose(reason, is_replaced=False)
            self._fail_waiting(lost_error(reason, "no"))


class AsyncClient(BaseClient):
    """Sends jobs to a supervisor from asyncio. Has the same methods as ``Client``. A program needs only one client.

    Each event loop that uses the client has a separate connection, so loops can run in different threads. Cancelling a
    task that waits for a job cancels the job, so ``asyncio.timeout`` works as expected. The parameters are the same as
    for ``Client``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        retry: bool = False,
        reconnect_timeout: float | None = None,
    ) -> None:
        self._states: dict[asyncio.AbstractEventLoop, _LoopState] = {}
        # Guards changes to the dictionary, because loops can run in different threads. Reentrant, because a signal
        # handler can close the client.
        self._changing = threading.RLock()
        super().__init__(path, retry, reconnect_timeout)

    async def call(
        self,
        bulkhead: str,
        payload: _wire.Buffer = b"",
        *,
        operation: str = "",
        tenant: str = "",
        deadline: float | None = None,
        run_limit: float | None = None,
        priority: str = "normal",
        idempotent: bool = False,
        cost: int = 1,
        traceparent: str | None = None,
        retry: bool | None = None,
    ) -> Reply:
        """Submits a job and waits for its result, like ``Client.call``. Cancelling the coroutine cancels the job."""
        options = (bulkhead, operation, tenant, deadline, priority, idempotent, cost, traceparent, run_limit)
        if not (self.retry if retry is None else retry):
            return await self._start(options, payload)
        retries = _again.Retries(self._budget, options)
        while True:
            try:
                return await self._start(retries.options(), payload)
            except JobError as error:
                pause = retries.pause_after(error)
                if self._is_closed:
                    raise
            await asyncio.sleep(pause)

    def submit(
        self,
        bulkhead: str,
        payload: _wire.Buffer = b"",
        *,
        operation: str = "",
        tenant: str = "",
        deadline: float | None = None,
        run_limit: float | None = None,
        priority: str = "normal",
        idempotent: bool = False,
        cost: int = 1,
        traceparent: str | None = None,
    ) -> AsyncJob:
        """Submits a job and returns a future to await.

        Must be called in the event loop. The parameters are the same as for ``call``.
        """
        options = (bulkhead, operation, tenant, deadline, priority, idempotent, cost, traceparent, run_limit)
        return self._start(options, payload)

    def _start(self, options: tuple[Any, ...], payload: _wire.Buffer) -> AsyncJob:
        metadata = submission_with(self._submissions, options)
        data = payload if type(payload) is bytes else bytes(as_buffer(payload))
        if self._is_closed:
            raise RuntimeError("the client is closed")
        loop = asyncio.get_running_loop()
        state = self._states.get(loop) or self._state_of(loop)
        job = AsyncJob(loop, _again.Job(options, metadata, data, time.monotonic(), self.reconnect_timeout), state)
        state.start(job)
        return job

    def _state_of(self, loop: asyncio.AbstractEventLoop) -> _LoopState:
        """Creates the state for a new event loop, and drops the states of closed loops."""
        with self._changing:
            for other in [other for other in self._states if other.is_closed()]:
                self._states.pop(other).lose("the event loop was closed")
            state = self._states[loop] = _LoopState(self.path, loop, self._is_closed)
        return state

    def close(self) -> None:
        """Closes the connections and cancels all jobs in progress. Other event loops do so in their next iteration."""
        self._is_closed = True
        with self._changing:
            states, self._states = self._states, {}
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        for loop, state in states.items():
            state.is_closed = True
            if loop is not here and loop.is_running():
                with suppress(RuntimeError):
                    # Raises RuntimeError if the loop has been closed in the meantime.
                    loop.call_soon_threadsafe(state.lose, "this program closed the client")
            else:
                state.lose("this program closed the client")

    async def aclose(self) -> None:
        """Equivalent to ``close``, for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        # The attribute does not exist if `__init__` failed.
        for loop, state in getattr(self, "_states", {}).items():
            try:
                # The garbage collector can call this method in any thread.
                loop.call_soon_threadsafe(state.release)
            except RuntimeError:
                # The loop was closed, so its jobs have ended.
                state.lose("the event loop was closed")

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self.close()

    def _after_fork(self) -> None:
        super()._after_fork()
        self._states, self._changing = {}, threading.RLock()
