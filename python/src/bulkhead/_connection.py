"""A connection to the supervisor, shared by the jobs of all threads.

One of the threads that wait for outcomes is the *leader*. It reads the socket and settles the jobs of all threads. When
the outcome of the leader's own job arrives, another waiting thread takes over. Futures have a dedicated thread, because
it is possible that no other thread waits for them.
"""

from __future__ import annotations

import _socket
import errno
import itertools
import os
import select
import struct
import threading
import time
import weakref
from collections import deque

from . import _wire
from ._reply import Reply
from .errors import Disconnected, JobError, Outcome, Rejected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ._future import JobFuture

    #: A buffer to be sent, and the sizes of its parts that have been sent.
    Outgoing = tuple[_wire.Buffer, list[int]]

#: The connections of all clients, including connections that have outlived their clients, and the states of the asyncio
#: clients. A forked child abandons all of them.
connections: weakref.WeakSet[Any] = weakref.WeakSet()


class _Link(_socket.socket):
    """A socket to the supervisor. Unlike its base class, it supports weak references."""


# The sockets of all connections, including unfinished connections.
_links: weakref.WeakSet[_Link] = weakref.WeakSet()

#: Timeout for the supervisor's welcome, in seconds.
HANDSHAKE_SECONDS_MAX = 10.0
#: Minimum timeout for the welcome, in seconds, even if the job's deadline is earlier. A supervisor that is only slow
#: can then still report what became of the job.
HANDSHAKE_SECONDS_MIN = 1.0
#: Minimum timeout for a job that has already waited for a connection, in seconds. A timeout of 0 would make the socket
#: non-blocking.
REPEATED_HANDSHAKE_SECONDS_MIN = 0.001
#: Maximum time after a job's deadline to wait for the outcome, in seconds. The supervisor usually reports a missed
#: deadline at once. The margin leaves time for a supervisor that is only slow, and for results that arrive late.
OUTCOME_MARGIN_SECONDS = 10.0
#: Interval between checks for jobs without an outcome, in seconds. If a check is later than that, this process was
#: paused, possibly together with the supervisor. The supervisor then gets this much more time.
OUTCOME_CHECK_SECONDS = 1.0


def lost_error(reason: str, executed: str = "unknown") -> Disconnected:
    """Returns the error for a job whose connection was lost."""
    advice = "the job may have run: send the job again only if it can safely run twice"
    if executed == "no":
        advice = "the job was not sent: send the job again"
    return Disconnected(f"the connection to the supervisor was lost ({reason}); {advice}", executed)


def unanswered_error() -> Disconnected:
    """Returns the error for a job that still has no outcome long after its deadline."""
    return Disconnected(
        f"no outcome within {OUTCOME_MARGIN_SECONDS:g} s after the deadline: the supervisor does not respond; "
        "the job may have run: send the job again only if it can safely run twice",
        "unknown",
    )


def handshake_seconds(left: float | None, *, is_repeated: bool = False) -> float:
    """Returns the timeout for a handshake for a job that has ``left`` seconds, or no limit if this is ``None``.

    ``is_repeated`` is true if the job has already waited for a connection.
    """
    if left is None:
        return HANDSHAKE_SECONDS_MAX
    least = REPEATED_HANDSHAKE_SECONDS_MIN if is_repeated else HANDSHAKE_SECONDS_MIN
    return min(max(left, least), HANDSHAKE_SECONDS_MAX)


def lost_before_sent() -> Disconnected:
    """Returns the error for a job that waits to be sent again because its connection was lost."""
    return Disconnected("the connection to the supervisor was lost; the job was not sent")


def of_parent() -> Disconnected:
    """Returns the error for a job in a forked child."""
    return Disconnected("the job belongs to the parent process, from which this process was forked", "unknown")


class NotSent(Exception):
    """The connection was lost before the job was sent, so the supervisor has not accepted the job."""


class NotTaken(NotSent):
    """The supervisor is being replaced and has not accepted the job, which must be sent over another connection."""


class Lost(Exception):
    """The connection was lost after the job was sent, so it is unknown whether the job ran."""

    def __init__(self, error: Disconnected) -> None:
        super().__init__(error)
        self.error = error


class Unanswered(Lost):
    """The job has no outcome long after its deadline. It must not be sent again."""


class _Call:
    """A job that a thread is waiting for."""

    __slots__ = ("ends_at", "error", "is_sending", "is_taken", "is_unanswered", "outcome", "sleep_lock", "thread")

    def __init__(self, ends_at: float | None) -> None:
        self.thread = threading.get_ident()
        #: Time of the deadline.
        self.ends_at = ends_at
        self.outcome: tuple[bytes, bytes | bytearray] | None = None
        self.error: Disconnected | None = None
        #: True until the thread has sent the job.
        self.is_sending = True
        #: False if the supervisor has not accepted the job, which must be sent over another connection.
        self.is_taken = True
        #: True if there was no outcome long after the deadline.
        self.is_unanswered = False
        #: Locked while the thread sleeps. Another thread wakes the sleeping thread by releasing the lock.
        self.sleep_lock: threading.Lock | None = None

    def is_due(self, before: float) -> bool:
        """Returns true if the job's deadline was earlier than ``before``."""
        return self.ends_at is not None and self.ends_at < before


class Connection:
    """A connection to the supervisor, with its jobs. A lost connection is never restored.

    ``send_again`` sends lost jobs over another connection. Its arguments are the futures, the reason for the loss, and
    whether the supervisor may have accepted the jobs. ``waiting`` are the futures that wait to be sent.
    """

    def __init__(
        self,
        path: str,
        send_again: Callable[[list[JobFuture], str, bool], None],
        seconds: float,
        waiting: deque[JobFuture],
    ) -> None:
        self._socket, self._reader, self.capabilities = open_connection(path, seconds)
        # Makes the thread that reads check regularly for jobs without an outcome.
        timeout = struct.pack("ll", int(OUTCOME_CHECK_SECONDS), int(OUTCOME_CHECK_SECONDS % 1 * 1e6))
        self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, timeout)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        #: Time of the last check.
        self._checked_at = 0.0
        self._send_again = send_again
        self._waiting = waiting
        self._send = self._socket.send
        self._numbers = itertools.count(1)
        # Guards the attributes below, up to `lost`.
        self._lock = threading.RLock()
        self._calls: dict[int, _Call] = {}
        self._futures: dict[int, JobFuture] = {}
        self._sleeping: dict[int, _Call] = {}
        # The call whose thread reads the socket, or this connection if the thread for futures reads it.
        self._leader: object = None
        self._reading_thread = 0
        self._thread_sleep_lock: threading.Lock | None = None
        self._thread_sleeps = False
        #: Numbers of futures that were being sent when the supervisor announced that it accepts no further jobs.
        self._not_taken: set[int] = set()
        #: True if further jobs need another connection.
        self.is_over = False
        # True if a send failed. Outcomes that arrived earlier can still be read.
        self._is_broken = False
        self.lost: Disconnected | None = None
        #: Time since which further jobs need another connection.
        self.lost_at = 0.0
        # Guards the queue of outgoing buffers.
        self._writing = threading.RLock()
        self._outgoing: deque[Outgoing] = deque()
        #: True if a buffer was queued while the queue was being sent.
        self._has_more = False
        #: True if a call was abandoned, so its result may arrive while no thread reads.
        self._leaves_unread = False
        #: True if the client was dropped.
        self._is_released = False
        connections.add(self)

    # Sending.

    def _push(self, entries: Sequence[Outgoing]) -> None:
        """Sends the buffers of the entries. Blocks while the socket's buffer is full.

        If a signal handler interrupts this method with an exception, the remaining data is sent before the next frame.
        """
        if self._writing._is_owned():  # type: ignore[attr-defined]
            # Called by a signal handler or the garbage collector during a send. The interrupted send also sends these
            # buffers.
            self._outgoing.extend(entries)
            self._has_more = True
            return
        self._send_all(entries)
        while self._has_more:
            # A buffer may have been queued after the last check.
            self._has_more = False
            self._send_all(())

    def _send_all(self, entries: Sequence[Outgoing]) -> None:
        if self._reading_thread == threading.get_ident():
            self._push_from_reader(entries)
            return
        if self._leaves_unread and self._leader is None and self._push_as_leader(entries):
            return
        outgoing = self._outgoing
        with self._writing:
            if len(entries) == 1 and not outgoing and len(entries[0][0]) <= _wire.INLINE_BYTES_MAX:
                buffer, counts = entries[0]
                outgoing.append(entries[0])
                # A signal handler may have queued another buffer first.
                if outgoing[0] is entries[0]:
                    try:
                        counts.extend(map(self._send, (buffer,), (_socket.MSG_DONTWAIT,)))
                    except BlockingIOError as error:
                        if error.errno != errno.EAGAIN:
                            # Raised by a signal handler.
                            raise
            else:
                outgoing.extend(entries)
            while not self._drain_some():
                self._wait_for_space()

    def _drain_some(self) -> bool:
        """Sends the queued buffers without blocking. Returns false if the socket is full."""
        outgoing = self._outgoing
        while outgoing:
            buffer, counts = outgoing[0]
            done = sum(counts)
            if done == len(buffer):
                outgoing.popleft()
                continue
            try:
                counts.extend(map(self._send, (memoryview(buffer)[done:],), (_socket.MSG_DONTWAIT,)))
            except BlockingIOError as error:
                if error.errno != errno.EAGAIN:
                    # Raised by a signal handler.
                    raise
                return False
        return True

    def _push_as_leader(self, entries: Sequence[Outgoing]) -> bool:
        """Sends the buffers and also reads the socket, because an abandoned call may have left a result unread.

        Returns false if another thread reads the socket.
        """
        leader = object()
        try:
            with self._lock:
                if self._leader is None:
                    self._leader = leader
            if self._leader is not leader:
                return False
            self._reading_thread = threading.get_ident()
            self._push_from_reader(entries)
            return True
        finally:
            self._hand_over(leader)

    def _push_from_reader(self, entries: Sequence[Outgoing]) -> None:
        """Sends the buffers from a callback in the thread that reads the socket.

        Receives data while waiting, because the supervisor stops reading from clients that do not read results.
        """
        try:
            while not self._writing.acquire(timeout=0.005):
                self._receive()
            self._outgoing.extend(entries)
            while not self._drain_some():
                self._wait_for_space(select.POLLIN | select.POLLOUT)
                self._receive()
        finally:
            # A signal handler may have raised an exception before or after the lock was acquired.
            if self._writing._is_owned():  # type: ignore[attr-defined]
                self._writing.release()

    def _poll(self, events: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(seconds * 1000))

    def _receive(self) -> None:
        """Receives available data for later processing."""
        if self._poll(select.POLLIN, 0):
            try:
                self._reader.read()
            except EOFError:
                raise ConnectionResetError(errno.ECONNRESET, "it has closed") from None

    def _wait_for_space(self, events: int = select.POLLOUT) -> None:
        """Waits until the socket is writable, or until the next check for jobs that cannot be sent.

        The thread that reads also waits until the socket is readable.
        """
        began = time.monotonic()
        is_found = self._poll(events, OUTCOME_CHECK_SECONDS)
        # A longer wait means that this process was paused, possibly together with the supervisor.
        if not is_found and time.monotonic() - began <= 2 * OUTCOME_CHECK_SECONDS:
            self._break_if_stuck()

    def _break_if_stuck(self) -> None:
        """Raises an exception that breaks the connection, if a job on it or behind it is long past its deadline.

        Called when the socket has been full for a check interval. The supervisor may have read only a part of a frame,
        so no other frame can be sent instead.
        """
        before = time.monotonic() - OUTCOME_MARGIN_SECONDS
        # By then, the thread that reads has ended the jobs that were sent, unless one of its callbacks waits to send.
        before_sent = before - 3 * OUTCOME_CHECK_SECONDS
        # Does not acquire the lock, because a signal handler in its owner's thread may be waiting to send.
        jobs: dict[int, _Call | JobFuture] = {**self._calls, **self._futures}
        for kind, number, _, _ in list(self._reader.frames):
            if kind == _wire.OUTCOME:
                jobs.pop(number, None)
        # The supervisor does not read from a client that does not read.
        is_read = not self._poll(select.POLLIN, 0)
        is_stuck = any(
            job.is_due(before) if job.is_sending else is_read and job.is_due(before_sent) for job in jobs.values()
        )
        waiting = [future.job for future in list(self._waiting)]
        is_behind = any(job is not None and (job.waits_until or 0.0) < before for job in waiting)
        if is_stuck or (is_read and is_behind):
            raise ConnectionResetError(errno.ECONNRESET, "it does not read")

    def _push_or_break(self, *buffers: _wire.Buffer) -> bool:
        """Sends the buffers. Returns false if the connection broke before all of the buffers were sent.

        Outcomes may have arrived before the connection broke. The thread that reads therefore handles the received
        frames first, and closes the connection when it finds the end.
        """
        entries: list[Outgoing] = [(buffer, []) for buffer in buffers]
        try:
            self._push(entries)
            return True
        except OSError as error:
            if error.errno not in _wire.LOST_CONNECTION_ERRORS:
                # Raised by a signal handler, such as a TimeoutError.
                raise
            reason = f"the supervisor closed the connection: {error.strerror}"
        with self._lock:
            if not self.is_over:
                self.lost_at = time.monotonic()
            self.is_over = self._is_broken = True
            is_unread = self._leader is None and not self._calls and not self._futures
            try:
                # If only the send has failed, for example for lack of memory, this makes the supervisor close the
                # connection.
                self._socket.shutdown(_socket.SHUT_WR)
            except OSError:
                pass
        with self._writing:
            # The failed buffer may be a signal handler's. Another thread can also have sent these buffers after the
            # failure. Nothing more can be sent now, because the socket is shut down.
            is_sent = all(sum(counts) == len(buffer) for buffer, counts in entries)
        if is_unread:
            self.lose(reason)
        return is_sent

    def _submit(self, number: int, metadata: bytes, payload: _wire.Buffer) -> bool:
        """Sends a job. Returns false if the connection broke before the whole job was sent."""
        if len(payload) <= _wire.INLINE_BYTES_MAX:
            return self._push_or_break(_wire.frame(_wire.SUBMIT, number, metadata, payload))
        return self._push_or_break(_wire.head(_wire.SUBMIT, number, metadata, len(payload)), payload)

    def cancel(self, number: int) -> None:
        """Requests cancellation of a job. The job still gets an outcome."""
        if self.lost is None and not self._is_broken:
            self._push_or_break(_wire.frame(_wire.CANCEL, number))

    def _cancel_unanswered(self, numbers: list[int]) -> None:
        """Requests cancellation of jobs without blocking.

        If the socket is full, the next thread that sends also sends the requests. If another thread is sending, does
        nothing.
        """
        if not self._writing.acquire(blocking=False):
            return
        try:
            self._outgoing.extend([(_wire.frame(_wire.CANCEL, number), []) for number in numbers])
            self._drain_some()
        except OSError as error:
            # The thread that reads detects a lost connection.
            if error.errno not in _wire.LOST_CONNECTION_ERRORS:
                raise
        finally:
            self._writing.release()

    # Jobs.

    def call(self, metadata: bytes, payload: _wire.Buffer, ends_at: float | None = None) -> Reply:
        """Submits a job and waits for the result. Raises ``JobError``, ``NotSent`` or ``Lost``.

        ``ends_at`` is the time of the deadline.
        """
        number = next(self._numbers)
        call = _Call(ends_at)
        if self._is_nested(call.thread):
            raise RuntimeError("a callback, or a signal handler during another call, cannot wait for a job: use submit")
        try:
            with self._lock:
                if self.is_over:
                    raise self._not_sent()
                self._calls[number] = call
            is_sent = self._submit(number, metadata, payload)
            call.is_sending = False
            while call.outcome is None:
                if not call.is_taken:
                    raise NotTaken
                if call.is_unanswered and is_sent:
                    raise Unanswered(unanswered_error())
                if call.error is not None:
                    raise Lost(call.error) if is_sent else NotSent
                self._read_or_sleep(number, call)
        except Lost:
            raise
        except BaseException as error:
            # NotSent, NotTaken, KeyboardInterrupt, or another exception from a signal handler, at any point.
            self._forget(number, call)
            self.cancel(number)
            if isinstance(error, NotSent) and not call.is_taken:
                raise NotTaken from None
            raise
        metadata, result = call.outcome
        if _wire.is_ok(metadata):
            return Reply(result, metadata)
        raise _wire.error(metadata, result)

    def start(self, future: JobFuture) -> None:
        """Submits the job of a future. Raises ``NotSent`` or ``Lost``.

        If the connection breaks, ``send_again`` can get the future later instead.
        """
        number = next(self._numbers)
        job = future.job
        assert job is not None
        with self._lock:
            if self.is_over:
                raise self._not_sent()
            if self._thread_sleep_lock is None:
                self._thread_sleep_lock = threading.Lock()
                self._thread_sleep_lock.acquire()
                try:
                    threading.Thread(target=self._read_for_futures, name="bulkhead-client", daemon=True).start()
                except BaseException:
                    # No thread can be started now. The next future tries again.
                    self._thread_sleep_lock = None
                    raise
            future.started(self.cancel, number)
            # If the connection is lost during the submission, this thread decides about the job.
            job.is_sending = True
            self._futures[number] = future
            self._wake_reader()
        try:
            is_sent = self._submit(number, job.metadata, job.payload)
            if future.cancelled():
                self.cancel(number)
        except BaseException:
            with self._lock:
                job.is_sending = False
                self._futures.pop(number, None)
            self.cancel(number)
            raise
        with self._lock:
            job.is_sending, job.is_incomplete = False, not is_sent
            is_lost = self.lost is not None and self._futures.pop(number, None) is not None
        if number in self._not_taken:
            raise NotTaken
        if is_lost:
            assert self.lost is not None
            raise Lost(self.lost) if is_sent else NotSent

    def _not_sent(self) -> NotSent:
        """Returns the error for a job that needs another connection."""
        return NotSent() if self.lost is not None or self._is_broken else NotTaken()

    def _is_nested(self, thread: int) -> bool:
        """Returns true if an outer frame of this thread is reading outcomes, or is sending or waiting for a job."""
        return (
            self._reading_thread == thread
            or self._writing._is_owned()  # type: ignore[attr-defined]
            or self._lock._is_owned()  # type: ignore[attr-defined]
            # A call that has an outcome is still listed if a signal handler interrupted the handling of the outcome.
            or any(other.thread == thread and other.outcome is None for other in list(self._calls.values()))
        )

    def _forget(self, number: int, call: _Call) -> None:
        """Abandons a call. If its thread was reading the socket, another thread takes over."""
        # A signal handler that raises an exception while a lock is being acquired can leave the lock held.
        for lock in (self._writing, self._lock):
            while lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
        with self._lock:
            self._calls.pop(number, None)
            self._sleeping.pop(number, None)
            self._leaves_unread = True
        self._hand_over(call)

    # Reading.

    def _read_or_sleep(self, number: int, call: _Call) -> None:
        """Reads until the call is settled, or sleeps while another thread reads."""
        sleep_lock: threading.Lock | None = None
        with self._lock:
            if call.outcome is not None or call.error is not None:
                return
            if self._leader is None:
                self._leader = call
            else:
                sleep_lock = call.sleep_lock = threading.Lock()
                sleep_lock.acquire()
                self._sleeping[number] = call
        if sleep_lock is not None:
            sleep_lock.acquire()
            return
        try:
            self._reading_thread = threading.get_ident()
            while call.outcome is None and call.error is None:
                self._read()
        finally:
            self._hand_over(call)

    def _read_for_futures(self) -> None:
        sleep_lock = self._thread_sleep_lock
        assert sleep_lock is not None
        while True:
            with self._lock:
                if self.lost is not None:
                    return
                if self._is_released and not self._futures:
                    break
                reads = bool(self._futures) and self._leader is None
                if reads:
                    self._leader = self
                else:
                    self._thread_sleeps = True
            if not reads:
                sleep_lock.acquire()
                continue
            try:
                self._reading_thread = threading.get_ident()
                while self._futures and self.lost is None:
                    try:
                        self._read()
                    except Exception as error:
                        self.lose(repr(error))
                    except BaseException:
                        # Raised by a callback, such as `sys.exit()`. The other futures still need their outcomes.
                        import traceback

                        traceback.print_exc()
            finally:
                self._hand_over(self)
        self.lose("the client was dropped")

    def _hand_over(self, leader: object) -> None:
        """If ``leader`` is the current leader, makes another thread the leader."""
        with self._lock:
            if self._leader is leader:
                self._reading_thread = 0
                self._leader = None
            self._wake_reader()
            is_lost = self.lost is not None
            is_unused = self.is_over and not self._calls and not self._futures
        if is_lost:
            self._close()
        elif is_unused:
            self.lose("the supervisor was replaced")

    def _wake_reader(self) -> None:
        """Wakes a thread to read the socket, if a reader is needed and no thread is reading. The caller holds the lock.

        A signal handler can interrupt this method, and the methods below, with an exception between any two steps. The
        steps are therefore idempotent.
        """
        if self._leader is not None:
            return
        is_thread_wanted = self._futures or self.lost is not None
        if is_thread_wanted and self._thread_sleeps and self._thread_sleep_lock is not None:
            if self._thread_sleep_lock.locked():
                self._thread_sleep_lock.release()
            self._thread_sleeps = False
            return
        for number, call in list(self._sleeping.items()):
            is_woken = self._wake(call)
            self._sleeping.pop(number, None)
            if is_woken:
                return

    @staticmethod
    def _wake(call: _Call) -> bool:
        """Wakes the thread of a call. Returns true if the thread was asleep."""
        sleep_lock = call.sleep_lock
        if sleep_lock is None:
            return False
        if sleep_lock.locked():
            sleep_lock.release()
        call.sleep_lock = None
        return True

    def _read(self) -> None:
        reader = self._reader
        frames = reader.frames
        try:
            if not frames:
                # After each signal, `recv` waits for the whole timeout again, unlike `poll`.
                is_main = self._reading_thread == threading.main_thread().ident
                if is_main and not self._readable.poll(OUTCOME_CHECK_SECONDS * 1000):
                    self._end_unanswered()
                    return
                try:
                    reader.read()
                except BlockingIOError as error:
                    if error.errno != errno.EAGAIN:
                        # Raised by a signal handler.
                        raise
                    self._end_unanswered()
            while frames:
                self._handle_frame(*frames[0])
                frames.popleft()
            # If frames of other jobs arrive all the time, `read` never times out.
            if time.monotonic() - self._checked_at >= OUTCOME_CHECK_SECONDS and not self._readable.poll(0):
                self._end_unanswered()
        except EOFError:
            self.lose("the supervisor closed the connection")
        except (_wire.Malformed, _wire.Unreadable) as error:
            self.lose(str(error))
        except OSError as error:
            if error.errno not in _wire.LOST_CONNECTION_ERRORS:
                raise
            self.lose(str(error))

    def _handle_frame(self, kind: int, number: int, metadata: bytes, payload: bytes | bytearray) -> None:
        if kind == _wire.OUTCOME:
            with self._lock:
                call = self._calls.get(number)
                if call is not None:
                    call.outcome = metadata, payload
                    self._wake(call)
                    self._sleeping.pop(number, None)
                    self._calls.pop(number)
                    return
                future = self._futures.get(number)
            if future is not None:
                future.settle(metadata, payload)
                with self._lock:
                    self._futures.pop(number, None)
        elif kind == _wire.PROGRESS:
            future = self._futures.get(number)
            if future is not None:
                future.progress(metadata)
        elif kind == _wire.GOAWAY:
            self._go_away(_wire.numbers(payload))
        elif kind == _wire.REFUSED:
            reason, sentence = _wire.refused(metadata)
            self.lose(f"the supervisor rejected the connection ({reason}): {sentence}")

    def _end_unanswered(self) -> None:
        """Ends and cancels the jobs whose outcomes have not arrived long after their deadlines.

        Called once per check interval, when no data is waiting to be read. Later outcomes of these jobs are ignored.
        """
        now = time.monotonic()
        checked_at, self._checked_at = self._checked_at, now
        if now - checked_at > 2 * OUTCOME_CHECK_SECONDS:
            return
        before = now - OUTCOME_MARGIN_SECONDS
        with self._lock:
            calls = {
                number: call for number, call in self._calls.items() if call.is_due(before) and not call.is_sending
            }
            futures = {
                number: future
                for number, future in self._futures.items()
                if future.is_due(before) and not future.is_sending
            }
            if calls or futures:
                # The outcomes can arrive while no thread reads.
                self._leaves_unread = True
            for number, call in calls.items():
                call.is_unanswered = True
                call.error = unanswered_error()
                self._wake(call)
                self._sleeping.pop(number, None)
                self._calls.pop(number, None)
        if calls or futures:
            self._cancel_unanswered([*calls, *futures])
        for number, future in futures.items():
            job = future.job
            if job is not None and job.is_incomplete:
                future.lose(lost_error("the job could not be sent", job.executed))
            else:
                future.lose(unanswered_error())
            with self._lock:
                self._futures.pop(number, None)

    # Closing.

    def _go_away(self, taken: set[int]) -> None:
        """Keeps only the jobs ``taken`` on this connection. Sends all other jobs over another connection."""
        again = []
        reason = "the supervisor is being replaced"
        with self._lock:
            if not self.is_over:
                self.lost_at = time.monotonic()
            self.is_over = True
            for number, call in list(self._calls.items()):
                if number not in taken:
                    call.is_taken = False
                    call.error = lost_error(reason, "no")
                    self._wake(call)
                    self._sleeping.pop(number, None)
                    self._calls.pop(number, None)
            for number, future in list(self._futures.items()):
                if number not in taken:
                    if future.is_sending:
                        self._not_taken.add(number)
                    else:
                        again.append(future)
                    self._futures.pop(number, None)
        if again:
            self._send_again(again, reason, False)

    def lose(self, reason: str) -> None:
        """Closes the connection. Its jobs fail or are sent again."""
        with self._lock:
            if self.lost is not None:
                return
            if not self.is_over:
                self.lost_at = time.monotonic()
            self.is_over = True
            self.lost = lost_error(reason)
            calls, self._calls = self._calls, {}
            # Other threads are still sending the remaining futures.
            futures = {number: future for number, future in self._futures.items() if not future.is_sending}
            for number in futures:
                self._futures.pop(number, None)
            for call in calls.values():
                call.error = lost_error(reason)
                self._wake(call)
            self._sleeping.clear()
            self._wake_reader()
        try:
            # Unlike close(), this wakes a thread that is reading.
            self._socket.shutdown(2)
        except OSError:
            pass
        self._close()
        if futures:
            self._send_again(list(futures.values()), reason, True)

    def _close(self) -> None:
        """Closes the descriptor if no thread uses it, because its number may soon refer to another file."""
        with self._writing, self._lock:
            if self._leader is None:
                self._socket.close()

    def release(self) -> None:
        """Releases the connection after its client was dropped.

        The thread for futures exits after the last future. If there is no such thread, the descriptor is closed when
        this object is garbage-collected. The garbage collector can call this method during any other method.
        """
        self._is_released = True
        sleep_lock = self._thread_sleep_lock
        if sleep_lock is not None and sleep_lock.locked():
            try:
                sleep_lock.release()
            except RuntimeError:
                # Another thread has just released the lock.
                pass

    def abandon(self) -> None:
        """Abandons the connection in a forked child, because it belongs to the parent."""
        self.is_over = True
        self.lost = of_parent()
        self._socket.close()
        self._lock, self._writing = threading.RLock(), threading.RLock()
        for call in self._calls.values():
            # A signal handler may have forked during this call.
            call.error = self.lost
            self._wake(call)
        for future in self._futures.values():
            future.forget()
            future.lose(self.lost)
        self._futures, self._calls, self._sleeping = {}, {}, {}


def open_connection(path: str, seconds: float) -> tuple[_socket.socket, _wire.Reader, int]:
    """Connects and performs the handshake. Raises ``Disconnected`` (job not executed) or ``Rejected``."""
    from . import __version__

    process = os.getpid()
    try:
        link = _Link(_socket.AF_UNIX, _socket.SOCK_STREAM)
    except OSError as error:
        sentence = f"a socket could not be created: {error.strerror}; the job was not sent"
        raise Disconnected(sentence) from None
    _links.add(link)
    try:
        link.settimeout(seconds)
        link.connect(path)
        try:
            link.sendall(_wire.hello(_wire.CLIENT, _wire.TAKES_GOAWAY, __version__))
        except BrokenPipeError:
            # The supervisor rejected the connection before the hello. The reason can still be read.
            pass
        reader = _wire.Reader(link.recv, link.recv_into)
        while not reader.frames:
            reader.read()
        kind, _, metadata, _ = reader.frames.popleft()
        if kind == _wire.REFUSED:
            reason, sentence = _wire.refused(metadata)
            retryable = reason in ("draining", "unavailable", "overloaded")
            raise Rejected(Outcome("rejected", reason, sentence, retryable=retryable))
        if kind != _wire.CLIENT_WELCOME:
            raise _wire.Malformed(f"the supervisor sent a frame of kind {kind} instead of a welcome frame")
        capabilities = _wire.client_welcome(metadata)
        link.settimeout(None)
        return link, reader, capabilities
    except BaseException as error:
        link.close()
        if os.getpid() != process and isinstance(error, (OSError, EOFError, _wire.Unreadable, JobError)):
            # A signal handler has forked, and `_after_fork` has closed the socket.
            raise of_parent() from None
        if isinstance(error, EOFError):
            raise Disconnected(f"the supervisor at {path} closed the connection before its welcome frame") from None
        if isinstance(error, (OSError, _wire.Unreadable)) and not isinstance(error, JobError):
            said = getattr(error, "strerror", None) or error
            raise Disconnected(f"the supervisor is not reachable at {path}: {said}; the job was not sent") from None
        raise


def _after_fork() -> None:
    for connection in list(connections):
        connection.abandon()
    # Includes unfinished connections. A child that continued a handshake would read the parent's welcome frame.
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_after_fork)
