"""The job loop of a worker: distributes jobs over threads, from the READY frame until the worker exits.

The *link* is the socket to the supervisor. The main thread runs handlers. Further threads help if the limit allows
several concurrent jobs. Idle handler threads wait for the link in one epoll instance, and a *watcher* thread in
another. Both use ``EPOLLEXCLUSIVE``, and the handlers' instance is registered first. The kernel therefore wakes the
watcher only while all handlers are busy, which is when the watcher must notice cancellations. For jobs shorter than
``QUICK_SECONDS``, these wake-ups would cost more than the jobs. The watcher then ignores the link, and checks every
``TICK_SECONDS`` for a stuck job.

The *journal* is memory shared with the supervisor, with which the supervisor recalls jobs that have not begun. Each job
has an *arrival* number, its position among all jobs on the link. The worker writes word 1 of the journal, the arrival
number of the last job that has begun, and word 2, the time of the last heartbeat. The supervisor writes word 3, the
arrival number of the last recalled job. A job that is recalled just before it begins is returned in a RETURNED frame.

On SIGTERM, the worker sends STOPPING and continues to run jobs. The supervisor replies with DRAIN, and the worker exits
after its last job. Deadlines are enforced by the supervisor, never here.
"""

from __future__ import annotations

import _socket
import _thread
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial

from . import _files, _link, _stack_text, _wire
from ._context import Context, HandlerError
from ._stdio import describe, exit_child, print_traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from ._context import Handler

# Copied before the caller's main module is imported, because the main module can replace these functions, as gevent
# does.
_Lock, _start_thread, _epoll = _thread.allocate_lock, _thread.start_new_thread, select.epoll

#: Maximum number of handler threads per worker.
THREADS_MAX = 4096
#: Mean run time in seconds below which handlers are quick.
QUICK_SECONDS = 0.0005
#: Minimum interval between two progress reports of a job, in seconds.
PROGRESS_SECONDS = 0.1
#: Interval of the watcher's checks while quick jobs run, in seconds.
TICK_SECONDS = 0.01
#: Minimum interval between reads of the link while jobs are pending, in seconds.
READ_INTERVAL_SECONDS = 0.001
#: Assumed run time of a stuck job, and maximum run time with which a job counts towards the mean, in seconds.
ASSUMED_SECONDS = 1.0

_COROUTINE_FLAG = 0x80
_GREEN_THREADS = (
    "gevent has replaced the threads that this worker needs: call `gevent.monkey.patch_all(thread=False)`, or use "
    "`max_in_flight = 1` and no async handlers"
)
_NO_MEMORY = "this worker has no memory left: raise `rlimits` (or `memory` of an executor); the worker exits\n"


class Server:
    """A worker with its link, jobs and threads."""

    def __init__(
        self, socket: _socket.socket, version: str, *, is_for_one_job: bool = False, takes_files: bool = False
    ) -> None:
        #: True if the worker runs a single job and ignores messages during the job. There is then no watcher thread.
        self._is_for_one_job = is_for_one_job
        self._takes_files = takes_files
        self._link = _link.Link(socket)
        #: Received descriptors that no frame has claimed yet, and lent memory files by lease.
        self._descriptors: list[int] = []
        self._loans: dict[int, _files.Pair] = {}
        receive = _files.receiver(socket, self._descriptors) if takes_files else socket.recv
        self._reader = _wire.Reader(receive, socket.recv_into, _socket.MSG_DONTWAIT, _files.payload_buffer)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        can_prefetch = not is_for_one_job
        self.welcome, self._journal, self._stack_file = _link.handshake(
            self._link, self._reader, version, can_prefetch=can_prefetch, takes_files=takes_files
        )
        if self._stack_file is not None:
            _stack_text.register(self._stack_file)
        self._result_bytes_max = self.welcome.result_bytes_max
        self.state: Any = None
        self._handler: Handler | None = None
        self._operations: Mapping[str, Handler] = {}
        self._loop: Any = None
        self._reading = _Lock()
        self._progress_lock = _Lock()
        # Guards all changes to the attributes below, up to `_is_over`. Some of them are also read without the lock.
        self._lock = _Lock()
        self._pending: deque[Context] = deque()
        self._live: dict[int, Context] = {}
        self._arrived = 0
        self._begun = 0
        self._running: set[Context] = set()
        self._threads = 1
        self._threads_max = THREADS_MAX
        self._limit = self._clamped(self.welcome.max_in_flight)
        self._idle = 0
        self._is_wake_pending = False
        self._is_draining = False
        self._is_over = False
        # Mean run time of handlers, exponentially smoothed. Lost updates between threads are acceptable.
        self._typical = ASSUMED_SECONDS
        self._read_at = 0.0
        self._make_epolls()

    def _make_epolls(self) -> None:
        link = self._link.socket.fileno()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signals, self._signalled = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # The order of registration matters; see the module's docstring.
        self._handler_epoll = _epoll()
        self._handler_epoll.register(link, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        self._handler_epoll.register(self._wake, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        self._link_descriptor = link
        if self._is_for_one_job:
            self._handler_epoll.register(self._signals, select.EPOLLIN)
            return
        self._watcher_epoll = _epoll()
        self._watcher_epoll.register(link, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        self._watcher_epoll.register(self._signals, select.EPOLLIN)

    # Startup.

    def report_status(self, text: str) -> None:
        """Reports a status text to operators."""
        self._link.send(_wire.STATUS, 0, _wire.text(text, _wire.MESSAGE_BYTES_MAX) + _wire.EMPTY)

    def extend_start(self, seconds: float) -> None:
        """Requests more time to start."""
        more = _wire.LIMIT.pack(min(max(round(seconds * 1e3), 0), 0xFFFF_FFFF))
        self._link.send(_wire.EXTEND_START, 0, more + _wire.EMPTY)

    def fail_start(self, text: str) -> NoReturn:
        """Exits before the worker is ready. Operators and clients see the text as the reason."""
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # The code that ran during preparation has closed the stream.
            pass
        self.report_status(text)
        os._exit(1)

    def run(self, prepare: Callable[[], tuple[Handler | None, Mapping[str, Handler], Any]]) -> None:
        """Prepares the worker, and serves jobs until the supervisor drains it."""
        os.register_at_fork(after_in_child=self._leave_child)
        try:
            self._handler, self._operations, self.state = prepare()
            self._end_if_child(None)
            handlers = [*self._operations.values(), *([self._handler] if self._handler else [])]
            for handler in handlers:
                if not callable(handler):
                    raise TypeError(f"a handler must be callable, but {handler!r} is not")
        except BaseException as error:
            self._end_if_child(error)
            print_traceback(error)
            self.fail_start(f"initialisation failed: {describe(error)}")
        is_async = any(map(_is_async, handlers))
        if _are_threads_green():
            if is_async or self._limit > 1:
                self.fail_start(_GREEN_THREADS)
            self._threads_max = 1
        # Threads and the event loop are created before the seal is installed. The seal is a seccomp filter that forbids
        # the sockets that an event loop needs.
        if is_async:
            self._event_loop()
        self._watch_signals()
        if not self._is_for_one_job:
            try:
                _start_thread(self._guard, (self._watch,))
            except RuntimeError as error:
                self.fail_start(f"{error}: raise `rlimits` (or `memory` of an executor)")
        if self.welcome.seal is not None:
            from ._seal import SealFailed, install

            try:
                install(self.welcome.seal)
            except SealFailed as error:
                self.fail_start(f"failed to seal the worker: {error}")
        if self._journal is not None:
            self._journal[2] = time.monotonic_ns()
        self._link.send(_wire.READY, 0)
        # Frames that arrived with the welcome are already in the reader, so the link does not become readable.
        self._read_link()
        self._guard(partial(self._run_handlers, is_main=True))

    def _watch_signals(self) -> None:
        def stop(number: int, _frame: object) -> None:
            try:
                os.write(self._signalled, bytes((number,)))
            except OSError:
                pass

        # The C-level handler writes to the pipe immediately. The Python handler may run later.
        signal.signal(signal.SIGTERM, stop)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)

    def _leave_child(self) -> None:
        """Detaches a child process that a handler has forked. Also runs in the child's descendants."""
        if self._link.socket.fileno() < 0:
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._link.socket.close()
        if self._stack_file is not None:
            _stack_text.leave_child(self._stack_file)
        self._handler_epoll.close()
        if not self._is_for_one_job:
            self._watcher_epoll.close()
        for descriptor in (self._wake, self._signals, self._signalled):
            os.close(descriptor)

    def _end_if_child(self, error: BaseException | None) -> None:
        """Exits from a process that a handler has forked and that returned from the handler.

        Such a process must not send a reply in place of the worker.
        """
        if not self._link.is_own():
            exit_child(error)

    def _event_loop(self) -> Any:
        """Returns the event loop for all async handlers, and starts it if necessary."""
        with self._progress_lock:
            if self._loop is None:
                if _are_threads_green():
                    raise RuntimeError(_GREEN_THREADS)
                import asyncio

                self._loop = asyncio.new_event_loop()
                try:
                    threading.Thread(target=self._run_loop, name="bulkhead-loop", daemon=True).start()
                except BaseException:
                    # The next async job tries again.
                    self._loop.close()
                    self._loop = None
                    raise
            return self._loop

    def _run_loop(self) -> None:
        while not self._loop.is_closed():
            try:
                self._loop.run_forever()
            except BaseException as error:
                # SystemExit raised by a task or callback of a handler.
                print_traceback(error)

    def _guard(self, run: Callable[[], None]) -> None:
        """Runs the loop of a thread. After an exception, the worker exits, because its jobs would never end.

        Such exceptions come from code of the handlers that runs between jobs, such as a trace function.
        """
        try:
            run()
        except MemoryError:
            _link.exit_with_message(_NO_MEMORY)
        except BaseException as error:
            print_traceback(error)
            _link.exit_with_message("an exception reached the worker's job loop; the worker exits\n")

    # Handler threads.

    def _run_handlers(self, is_main: bool = False) -> None:
        done: Context | None = None
        while True:
            job = self._next(done, is_main)
            done = None
            if job is not None:
                if self._run_job(job):
                    done = job
                continue
            with self._lock:
                if self._is_over:
                    return
                if self._threads > self._limit and not is_main:
                    self._threads -= 1
                    if self._pending:
                        self._wake_or_start_thread()
                    return
                if self._can_begin():
                    continue
                self._idle += 1
            events = self._wait_alone() if self._is_for_one_job else self._handler_epoll.poll()
            with self._lock:
                self._idle -= 1
                if self._is_wake_pending and not self._is_over:
                    self._is_wake_pending = False
                    _drain(self._wake)
            for descriptor, _ in events:
                if descriptor == self._link_descriptor:
                    self._read_link()

    def _wait_alone(self) -> list[tuple[int, int]]:
        """Waits for data on the link, and does the work of the missing watcher."""
        interval = self.welcome.heartbeat_ms / 1e3 or None
        while not (events := self._handler_epoll.poll(interval)):
            self._link.heartbeat()
        if any(descriptor == self._signals for descriptor, _ in events) and signal.SIGTERM in _drain(self._signals):
            self._link.send(_wire.STOPPING, 0)
        return events

    def _clamped(self, limit: int) -> int:
        return min(max(limit, 1), self._threads_max)

    def _can_begin(self) -> bool:
        """Returns true if a job is pending and the limit allows another running job. The caller holds the lock."""
        return bool(self._pending) and len(self._running) < self._limit

    def _next(self, done: Context | None, is_main: bool) -> Context | None:
        """Ends the job ``done``, whose reply has been sent, and returns the next job to run.

        Wakes another thread for further jobs.
        """
        now = time.monotonic()
        if self._pending and now - self._read_at > READ_INTERVAL_SECONDS:
            self._read_link()
        with self._lock:
            if done is not None:
                self._end(done)
            if not is_main and self._threads > self._limit:
                return None
            journal = self._journal
            if journal is not None and self._pending and self._pending[0]._arrival <= journal[3]:
                self._drop_recalled()
            while self._can_begin():
                job = self._pending.popleft()
                if journal is not None:
                    journal[1] = job._arrival
                    # The worker writes word 1 before it reads word 3, and the supervisor writes word 3 before it reads
                    # word 1. At least one side therefore sees a conflict.
                    if job._arrival <= journal[3]:
                        # The frame is sent under the lock, so that it precedes the replies to later jobs.
                        self._remove_live(job)
                        arrival = _wire.extensions((_wire.ARRIVAL, job._arrival.to_bytes(8, "little")))
                        self._link.send(_wire.RETURNED, job.number, arrival)
                        self._drop_recalled()
                        continue
                self._running.add(job)
                self._begun += 1
                if self._can_begin():
                    self._wake_or_start_thread()
                return job
            if self._is_draining and not self._live:
                self._finish()
        return None

    def _drop_recalled(self) -> None:
        """Removes recalled jobs, and sends a heartbeat if there were any. The caller holds the lock."""
        journal, pending = self._journal, self._pending
        if journal is None or not pending or pending[0]._arrival > journal[3]:
            return
        while pending and pending[0]._arrival <= journal[3]:
            self._remove_live(pending.popleft())
        self._link.send(_wire.HEARTBEAT, 0)

    def _remove_live(self, job: Context) -> None:
        """Removes a job, unless another job with its number has arrived. The caller holds the lock."""
        if self._live.get(job.number) is job:
            del self._live[job.number]

    def _end(self, job: Context) -> None:
        """Updates the state after the reply to a job has been sent. The caller holds the lock."""
        self._remove_live(job)
        self._running.discard(job)

    def _finish(self) -> None:
        """Stops all handler threads, because no work is left. The caller holds the lock."""
        self._is_over = True
        os.eventfd_write(self._wake, 1)

    def _wake_or_start_thread(self) -> None:
        """Wakes or starts another handler thread, if the limit allows it. The caller holds the lock."""
        if self._idle:
            if not self._is_wake_pending:
                self._is_wake_pending = True
                os.eventfd_write(self._wake, 1)
        elif self._threads < self._limit:
            self._threads += 1
            try:
                run = partial(self._guard, self._run_handlers)
                threading.Thread(target=run, name="bulkhead-handler", daemon=True).start()
            except RuntimeError:
                # Without the new thread, jobs run one after another. Their deadlines still apply.
                self._threads -= 1

    def _run_job(self, job: Context) -> bool:
        """Runs a handler and sends the reply. Returns false if the job continues in the event loop."""
        began = time.monotonic()
        payload, job._payload = job._payload, b""
        try:
            handler = self._operations.get(job.operation, self._handler)
            if handler is None:
                known = ", ".join(map(repr, sorted(self._operations))) or "none"
                sentence = f"this worker has no operation {job.operation!r}; available operations: {known}"
                raise HandlerError("unknown_operation", sentence, fault="caller")
            if isinstance(payload, _files.SharedPayload) and not self._takes_files:
                raise MemoryError(f"the payload has {len(payload)} bytes; raise `rlimits`, or lower `max_payload`")
            result = handler(payload, job)
            if type(result) is not bytes and hasattr(result, "__await__"):
                loop = self._event_loop()
                loop.call_soon_threadsafe(self._begin_async, job, result)
                return False
        except BaseException as error:
            self._end_if_child(error)
            self._send_failure(job, error)
        else:
            self._end_if_child(None)
            del payload
            self._send_result(job, result)
        self._typical += (min(time.monotonic() - began, ASSUMED_SECONDS) - self._typical) / 8
        return True

    # Replies.

    def _send_result(self, job: Context, result: object) -> None:
        if type(result) is not bytes and type(result) is not _files.Written:
            try:
                result = _as_bytes(result)
            except BaseException as error:
                # An exception raised by a user-defined class is a failure of the job, not the worker.
                self._send_failure(job, error)
                return
        assert isinstance(result, (bytes, memoryview, _files.Written))
        size = result.size if isinstance(result, _files.Written) else len(result)
        if size > self._result_bytes_max:
            sentence = f"the result has {size} bytes; max_result is {self._result_bytes_max}"
            self._send_failure(job, HandlerError("result_too_large", sentence))
            return
        self._finish_progress(job)
        if isinstance(result, _files.Written):
            self._link.send(_wire.RESULT, job.number, result.extension)
        else:
            self._link.send(_wire.RESULT, job.number, _wire.EMPTY, result)

    def _send_failure(self, job: Context, error: BaseException) -> None:
        payload = b""
        if isinstance(error, HandlerError):
            try:
                metadata = _wire.failed(error.code, error.message, bool(error.retryable), error.fault)
                payload = bytes(error.payload[: _wire.INLINE_BYTES_MAX])
            except Exception as problem:
                # The attributes of the error were changed to invalid values.
                metadata = _wire.failed("exception", f"the HandlerError cannot be sent: {describe(problem)}", False, "")
        else:
            print_traceback(error)
            metadata = _wire.failed("exception", describe(error), False, "dependency")
        self._finish_progress(job)
        self._link.send(_wire.FAILED, job.number, metadata, payload)

    # Progress.

    def report_progress(self, job: Context, fraction: float, text: str) -> None:
        """Stores a progress report, and sends it unless another report was sent recently.

        This method waits for no lock, because a signal handler can call it while the interrupted code holds the lock.
        The stored report is then sent later.
        """
        if not self._link.is_own():
            return
        job._progress = fraction, text
        held: list[bool] = []
        try:
            if not _link.try_acquire(self._progress_lock, held):
                return
            now = time.monotonic()
            if job._is_replied or now - job._progress_sent_at < PROGRESS_SECONDS:
                return
            said, job._progress = job._progress, None
            if said is None:
                # A signal handler has sent the report in the meantime.
                return
            if self._link.send_unless_busy(_wire.PROGRESSED, job.number, _wire.progressed(*said)):
                job._progress_sent_at = now
            else:
                job._progress = job._progress or said
        finally:
            if held and held[0]:
                self._progress_lock.release()

    def _send_progress(self, job: Context) -> None:
        said, job._progress = job._progress, None
        if said is not None:
            self._link.send(_wire.PROGRESSED, job.number, _wire.progressed(*said))

    def _finish_progress(self, job: Context) -> None:
        """Sends a job's last progress report, and prevents later reports."""
        with self._progress_lock:
            self._send_progress(job)
            job._is_replied = True

    # Async handlers.

    def _begin_async(self, job: Context, awaitable: Any) -> None:
        # An exception after the handler's return can end a job whose awaitable is already scheduled.
        is_over = job not in self._running
        if is_over or job.cancelled:
            try:
                if hasattr(awaitable, "close"):
                    awaitable.close()
            except BaseException as error:
                print_traceback(error)
            if not is_over:
                self._send_failure(job, _was_cancelled())
                self._leave_loop(job)
            return

        async def run() -> tuple[object, BaseException | None]:
            try:
                return await awaitable, None
            except (SystemExit, KeyboardInterrupt) as error:
                # Otherwise the exception would stop the loop, and with it all other tasks.
                return None, error

        task = job._task = self._loop.create_task(run())
        if job.cancelled:
            # The job has been cancelled in the meantime. `call_soon` cancels after the first step, like a later
            # cancellation.
            self._loop.call_soon(task.cancel)
        task.add_done_callback(lambda _: self._end_async(job, task))

    def _end_async(self, job: Context, task: Any) -> None:
        try:
            try:
                result, ended = task.result()
            except BaseException as error:
                self._end_if_child(error)
                self._send_failure(job, _was_cancelled() if job.cancelled and task.cancelled() else error)
            else:
                self._end_if_child(ended)
                if ended is None:
                    self._send_result(job, result)
                else:
                    self._send_failure(job, ended)
        finally:
            self._leave_loop(job)

    def _leave_loop(self, job: Context) -> None:
        with self._lock:
            self._end(job)
            if self._can_begin():
                self._wake_or_start_thread()
            elif self._is_draining and not self._live:
                self._finish()

    # The link.

    def _read_link(self) -> None:
        """Reads all available frames, and queues the received jobs."""
        with self._reading:
            self._read_at = time.monotonic()
            frames = self._reader.frames
            try:
                with suppress(BlockingIOError):
                    while self._reader.read():
                        pass
                with self._lock:
                    # Recalled jobs are removed first, because the frames can contain the same job again.
                    self._drop_recalled()
                    while frames:
                        self._handle_frame(*frames.popleft())
            except EOFError:
                # The supervisor is gone, so this process is no longer needed.
                os._exit(1)
            except (LookupError, _wire.Malformed, _wire.Unreadable) as error:
                _link.exit_with_message(f"the supervisor sent an invalid frame ({error!r}); the worker exits\n")
            except MemoryError:
                # A job may have been lost.
                _link.exit_with_message(_NO_MEMORY)
            except OSError as error:
                _link.end_without_link(error)

    def _handle_frame(self, kind: int, number: int, metadata: bytes, payload: bytes | bytearray) -> None:
        if kind == _wire.JOB:
            operation, tenant, remaining, trace, named = _wire.job(metadata)
            self._arrived += 1
            deadline = time.monotonic() + min(remaining / 1e6, _wire.SECONDS_MAX)
            data = payload if named is None else _files.Loan(self._loans, named)
            job = Context(self, self._arrived, number, operation, tenant, deadline, trace, data)
            self._live[number] = job
            self._pending.append(job)
        elif kind == _wire.CANCEL_JOB:
            found = self._live.get(number)
            if found is not None:
                found.cancelled = True
                if found._task is not None:
                    self._loop.call_soon_threadsafe(found._task.cancel)
        elif kind == _wire.FILES:
            try:
                self._loans[number] = _files.Pair(_wire.NUMBER.unpack_from(metadata, 8)[0], self._descriptors, 1)
            except (OSError, ValueError) as error:
                # Without memory files, the supervisor sends payloads in frames.
                print(f"memory files cannot be used: {error}", file=sys.stderr)
            else:
                self._link.send(_wire.FILES_TAKEN, number)
        elif kind == _wire.FILES_ENDED:
            self._loans.pop(number, None)
        elif kind == _wire.LIMITS:
            self._limit = self._clamped(_wire.LIMIT.unpack_from(metadata)[0])
            if self._threads > self._limit and self._idle:
                self._wake_or_start_thread()
        elif kind == _wire.DRAIN:
            self._is_draining = True
            if not self._live:
                self._finish()

    # The watcher.

    def _watch(self) -> None:
        try:
            self._watch_link()
        except OSError as error:
            _link.end_without_link(error)

    def _watch_link(self) -> None:
        interval = self.welcome.heartbeat_ms / 1e3
        next_heartbeat = time.monotonic() + interval
        is_on_link, seen = True, 0
        while True:
            timeout = next_heartbeat - time.monotonic() if interval else -1.0
            if not is_on_link:
                timeout = min(timeout, TICK_SECONDS) if interval else TICK_SECONDS
            events = self._watcher_epoll.poll(max(timeout, 0.0) if timeout != -1.0 else None)
            for descriptor, _ in events:
                if descriptor == self._signals:
                    if signal.SIGTERM in _drain(self._signals):
                        self._link.send(_wire.STOPPING, 0)
                elif self._typical < QUICK_SECONDS:
                    self._watcher_epoll.unregister(self._link_descriptor)
                    is_on_link, seen = False, self._begun
                else:
                    self._serve_link()
            if not is_on_link and not events:
                if seen == self._begun:
                    # The handler threads are idle or stuck. In both cases the watcher must react to the link again.
                    if self._running:
                        self._typical = ASSUMED_SECONDS
                    self._watcher_epoll.register(self._link_descriptor, select.EPOLLIN | select.EPOLLEXCLUSIVE)
                    is_on_link = True
                seen = self._begun
            if interval and time.monotonic() >= next_heartbeat:
                if self._journal is not None and self.welcome.capabilities & _wire.JOURNAL_HEARTBEATS:
                    self._link.check()
                    self._journal[2] = time.monotonic_ns()
                else:
                    self._link.heartbeat()
                self._send_delayed_progress()
                next_heartbeat = time.monotonic() + interval

    def _serve_link(self) -> None:
        """Reads the link while all handlers are busy."""
        self._read_link()
        with self._lock:
            if self._can_begin():
                self._wake_or_start_thread()

    def _send_delayed_progress(self) -> None:
        """Sends progress reports that were held back because an earlier report had been sent recently."""
        with self._lock:
            telling = [job for job in self._live.values() if job._progress]
        for job in telling:
            with self._progress_lock:
                if job._progress and not job._is_replied:
                    job._progress_sent_at = time.monotonic()
                    self._send_progress(job)


def _was_cancelled() -> HandlerError:
    return HandlerError("cancelled", "the client is no longer waiting for the job", fault="caller")


def _as_bytes(result: object) -> bytes | memoryview:
    """Returns a handler's result as bytes. Raises ``TypeError`` for other types, or any error of the object itself."""
    if result is None:
        return b""
    if isinstance(result, str):
        # Not `result.encode()`, which a subclass may override.
        return str.encode(result)
    try:
        view = memoryview(result)  # type: ignore[arg-type]
        # An empty view cannot always be cast.
        return view.cast("B") if view.c_contiguous and view.nbytes else bytes(view)
    except TypeError:
        raise TypeError(f"a handler must return bytes, str or None, not {type(result).__name__}") from None


def _is_async(handler: Any) -> bool:
    """Returns true if calling the handler creates a coroutine, as far as its code object shows."""
    for _ in range(8):
        # Unwraps partials and decorated functions.
        inner = getattr(handler, "func", None) or getattr(handler, "__wrapped__", None)
        if inner is None:
            break
        handler = inner
    code = getattr(handler, "__code__", None)
    if code is None:
        code = getattr(getattr(type(handler), "__call__", None), "__code__", None)  # noqa: B004
    return code is not None and bool(code.co_flags & _COROUTINE_FLAG)


def _are_threads_green() -> bool:
    """Returns true if gevent has replaced threads by greenlets, which all run in the thread that starts them."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def _drain(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except BlockingIOError:
        return b""
