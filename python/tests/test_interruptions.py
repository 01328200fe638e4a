"""Signal handlers that raise exceptions or do work, and garbage collection, at arbitrary points.

Each case is a separate program, in which the signal arrives at a point where the interpreter checks for signals.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pools import script, wait_for

COMMON = """
import gc, logging, os, signal, sys, threading, time, glob
import jobs, bulkhead._pool as behind
from collections import Counter
from concurrent.futures import wait
from bulkhead import BulkheadExecutor, _wire
main = threading.main_thread()

def interrupt():
    signal.raise_signal(signal.SIGINT)

def started():
    pool = BulkheadExecutor(1)
    assert pool.submit(abs, -1).result(60) == 1
    return pool

def waiting(pool, *given):
    # Returns the future of a call that another thread has submitted while the supervisor accepts no more calls.
    found = []
    inner = pool._pool
    inner._has_place = lambda: False
    thread = threading.Thread(target=lambda: found.append(pool.submit(*given)))
    thread.start()
    thread.join()
    del inner._has_place
    return found[0]
"""


def ends(code: str, expected: str = "ended") -> None:
    # If the program hangs, this limit ends it first and prints all stacks.
    watch = "import faulthandler; faulthandler.dump_traceback_later(280, exit=True)\n"
    ended = script(watch + COMMON + code + "\nprint('ended', flush=True)\nos._exit(0)\n")
    assert ended.stdout.strip().splitlines()[-1:] == [expected], ended.stdout + ended.stderr


def test_call_requeued_by_an_interrupt_is_sent() -> None:
    ends("""
pool = started()
future = waiting(pool, jobs.double, 4)
head = _wire.head
def hit(*given):
    if threading.current_thread() is main:
        _wire.head = head
        interrupt()
    return head(*given)
_wire.head = hit
try:
    pool._pool._fill(may_wait=True)
    raise AssertionError
except KeyboardInterrupt:
    pass
assert future.result(60) == 8
""")


def test_interrupted_unpicklable_call_fails() -> None:
    ends("""
pool = started()
future = waiting(pool, abs, threading.Lock())
put_down = pool._pool._undo_preparation
def hit(call):
    put_down(call)
    if threading.current_thread() is main:
        del pool._pool._undo_preparation
        interrupt()
pool._pool._undo_preparation = hit
try:
    pool._pool._fill(may_wait=True)
    raise AssertionError
except KeyboardInterrupt:
    pass
assert isinstance(future.exception(60), TypeError)
""")


@pytest.mark.parametrize("how", ["os.kill(pid, 9)", "pool.terminate_workers()"])
def test_requeued_call_gets_an_outcome_if_the_supervisor_dies(how: str) -> None:
    ends(f"""
pool = started()
pid = pool._pool.supervisor().pid
class Slow:
    def __reduce__(self):
        if threading.current_thread() is main:
            {how}
            while pool._pool._channel is not None:
                time.sleep(0.01)
            interrupt()
        return int, ()
future = waiting(pool, abs, Slow())
try:
    pool._pool._fill(may_wait=True)
    raise AssertionError
except KeyboardInterrupt:
    pass
assert not wait([future], 60).not_done
pool.shutdown()
""")


def test_pool_works_after_an_interrupted_start() -> None:
    ends("""
start, found = threading.Thread.start, []
def other():
    found.append(pool.submit(jobs.sleep, 0.2))
def hit(self):
    start(self)
    if self.name == "bulkhead-executor":
        threading.Thread.start = start
        found.append(threading.Thread(target=other))
        found[0].start()
        interrupt()
threading.Thread.start = hit
pool = BulkheadExecutor(1)
try:
    pool.submit(abs, -1)
    raise AssertionError
except KeyboardInterrupt:
    pass
found[0].join()
assert found[1].result(60) == 0.2
pool.shutdown()
""")


@pytest.mark.parametrize("moment", ["0", "0.03"])
def test_interrupted_start_leaves_no_process_or_file(moment: str) -> None:
    ends(f"""
import subprocess, tempfile
from pools import tree
tempfile.tempdir = tempfile.mkdtemp(dir="/tmp")
execute = subprocess.Popen._execute_child
def hit(self, *given, **named):
    execute(self, *given, **named)
    subprocess.Popen._execute_child = execute
    time.sleep({moment})
    interrupt()
subprocess.Popen._execute_child = hit
pool = BulkheadExecutor(1)
try:
    pool.submit(abs, -1)
    raise AssertionError
except KeyboardInterrupt:
    pass
assert tree(os.getpid()) == {{os.getpid()}} and os.listdir(tempfile.tempdir) == []
os.rmdir(tempfile.tempdir)
assert started().submit(abs, -2).result(60) == 2
""")


@pytest.mark.parametrize("how", ["shutdown(cancel_futures=True)", "terminate_workers()"])
@pytest.mark.parametrize("what", ["a signal", "a callback"])
def test_interrupted_shutdown_leaves_no_future_pending(how: str, what: str) -> None:
    ends(f"""
pool = started()
futures = [pool.submit(jobs.sleep, 0.02) for _ in range(3000)]
class Hit:
    def __call__(self, future):
        {"interrupt()" if what == "a signal" else "sys.exit(3)"}
futures[1000].add_done_callback(Hit())
try:
    pool.{how}
    raise AssertionError
except (KeyboardInterrupt, SystemExit):
    pass
assert not wait(futures, 60).not_done
pool.shutdown()
""")


def test_ctrl_c_during_a_wait_does_not_affect_other_futures() -> None:
    ends("""
pool = started()
looked_at, other = pool.submit(jobs.sleep, 0.3), pool.submit(jobs.sleep, 0.3)
interrupted, is_armed = 0, False
def hit(*_):
    global is_armed
    if is_armed:
        is_armed = False
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, hit)
signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
def look():
    global is_armed
    is_armed = True
    while is_armed:
        looked_at.done()
give_up = time.monotonic() + 1
while time.monotonic() < give_up:
    try:
        look()
    except KeyboardInterrupt:
        interrupted += 1
signal.setitimer(signal.ITIMER_REAL, 0, 0)
assert interrupted
assert other.result(60) == looked_at.result(60) == 0.3
""")


def test_collected_map_iterator_does_not_block_shutdown() -> None:
    ends("""
gc.disable()
pool = started()
def use():
    results = pool.map(jobs.sleep, [0.002] * 2000)
    cycle = [results]
    cycle.append(cycle)
    next(results)
use()
ran_us = _wire.ran_us
def hit(metadata):
    if pool._pool.is_shut_down:
        _wire.ran_us = ran_us
        # An allocation while the lock is held can start a collection.
        gc.collect()
    return ran_us(metadata)
_wire.ran_us = hit
pool.shutdown()
""")


@pytest.mark.parametrize("how", ["shutdown(cancel_futures=True)", "terminate_workers()"])
def test_signal_handler_can_stop_the_pool_during_its_start(how: str) -> None:
    ends(f"""
pool = BulkheadExecutor(1)
done = []
def end(*_):
    pool.{how}
    done.append(1)
signal.signal(signal.SIGALRM, end)
connect = behind.connect
def hit(*given):
    signal.raise_signal(signal.SIGALRM)
    return connect(*given)
behind.connect = hit
try:
    future = pool.submit(abs, -1)
    assert not wait([future], 60).not_done
except RuntimeError:
    pass
assert done
pool._pool._join()
assert pool._pool._channel is None
""")


def test_signal_handler_cannot_submit_during_a_submit() -> None:
    ends("""
pool = BulkheadExecutor(1)
refused = []
def submit(*_):
    try:
        pool.submit(abs, -2)
    except RuntimeError as error:
        refused.append(error)
signal.signal(signal.SIGALRM, submit)
connect = behind.connect
def hit(*given):
    signal.raise_signal(signal.SIGALRM)
    return connect(*given)
behind.connect = hit
assert pool.submit(abs, -1).result(60) == 1
assert len(refused) == 1
""")


def test_failing_log_handler_leaves_no_future_pending() -> None:
    ends("""
class Gone(logging.Handler):
    def emit(self, record):
        raise OSError("the log's server is gone")
logging.getLogger().addHandler(Gone())
pool = started()
futures = [pool.submit(jobs.sleep, 600) for _ in range(30)]
futures[0].add_done_callback(lambda _: 1 / 0)
os.kill(pool._pool.supervisor().pid, 9)
for future in futures[1:]:
    future.cancel()
assert not wait(futures, 60).not_done
""")


def test_blocked_output_stream_does_not_delay_results() -> None:
    ends("""
lock = threading.Lock()
class Widget:
    def write(self, text):
        with lock:
            return len(text)
    def flush(self):
        pass
real, sys.stdout = sys.stdout, Widget()
pool = started()
with lock:
    for _ in range(20):
        assert pool.submit(jobs.say, "words").result(60) == 1
# Now all output is written, so that no output follows the last line of this program.
pool.shutdown()
sys.stdout = real
""")


def test_failed_initializer_stops_all_processes() -> None:
    ends("""
from pools import tree
pool = BulkheadExecutor(1, initializer=jobs.fail_to_start)
assert pool.submit(abs, -1).exception(60)
pool._pool._join()
assert tree(os.getpid()) == {os.getpid()}
""")


def test_ctrl_c_during_shutdown_allows_another_shutdown() -> None:
    ends("""
import shutil, tempfile
pool = started()
folder = tempfile.mkdtemp()
future = pool.submit(jobs.note_and_wait, folder, 1)
is_interrupted = False
def hit(*_):
    global is_interrupted
    if not is_interrupted:
        is_interrupted = True
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, hit)
def waits():
    frame = sys._current_frames().get(main.ident)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "_join" in names
def press():
    while not waits():
        time.sleep(0.005)
    # A signal that comes just before the main thread sleeps is overlooked.
    while not is_interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
threading.Thread(target=press).start()
try:
    pool.shutdown()
    raise AssertionError
except KeyboardInterrupt:
    open(folder + "/go", "w").close()
pool.shutdown()
assert future.done()
shutil.rmtree(folder)
""")


@pytest.mark.parametrize(
    "how", ["shutdown()", "shutdown(wait=False)", "shutdown(cancel_futures=True)", "terminate_workers()"]
)
@pytest.mark.parametrize("other", ["fills", "settles"])
def test_signal_handler_can_stop_the_pool_during_a_wait(how: str, other: str, tmp_path: Path) -> None:
    ends(f"""
import concurrent.futures._base as base
pool = started()
# No call ends before the main thread holds the locks of the futures.
futures = [pool.submit(jobs.note_and_wait, {str(tmp_path)!r}, 1)]
futures += [pool.submit(jobs.sleep, 0.005) for _ in range(200 if {other!r} == "fills" else 0)]
done = []
def end(*_):
    pool.{how}
    done.append(1)
signal.signal(signal.SIGALRM, end)
def needs_one():
    # True if the thread of the pool waits for a lock that this thread holds.
    frame = sys._current_frames().get(pool._pool._thread.ident)
    return frame is None or frame.f_code.co_name in ("_begin", "_is_cancelled", "_settle", "_fill")
enter = base._AcquireFutures.__enter__
def hit(self):
    enter(self)
    base._AcquireFutures.__enter__ = enter
    open({str(tmp_path / "go")!r}, "w").close()
    while not needs_one():
        time.sleep(0.005)
    time.sleep(0.05)
    signal.raise_signal(signal.SIGALRM)
base._AcquireFutures.__enter__ = hit
assert not wait(futures, 60).not_done
assert done
pool.shutdown()
assert pool._pool._channel is None
""")


def test_blocked_output_stream_leaves_no_future_pending() -> None:
    ends("""
lock = threading.Lock()
class Widget:
    def write(self, text):
        with lock:
            return len(text)
    def flush(self):
        pass
real, sys.stdout = sys.stdout, Widget()
pool = started()
with lock:
    assert pool.submit(jobs.say, "words").result(60) == 1
    lost = pool.submit(jobs.sleep, 600)
    others = [waiting(pool, jobs.double, number) for number in range(5)]
    os.kill(pool._pool.supervisor().pid, 9)
    assert isinstance(lost.exception(60), behind.PoolDisconnected)
    assert [other.result(60) for other in others] == [0, 2, 4, 6, 8]
pool.shutdown()
sys.stdout = real
""")


def test_second_interrupt_stops_a_waiting_program() -> None:
    """The first interrupt ends the wait for the result; the second ends the wait in ``shutdown``."""
    ended = script("""
        import faulthandler, os, signal, sys, threading, time, jobs
        from bulkhead import BulkheadExecutor
        faulthandler.dump_traceback_later(280, exit=True)
        main = threading.main_thread().ident
        def names():
            frame, found = sys._current_frames().get(main), set()
            while frame is not None:
                found.add(frame.f_code.co_name)
                frame = frame.f_back
            return found
        def press():
            for waits in ({"result", "wait"}, {"shut_down", "wait"}):
                while not waits <= names():
                    time.sleep(0.01)
                # A waiting interpreter overlooks a signal that comes just before the thread sleeps.
                time.sleep(0.2)
                while waits <= names():
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.2)
        with BulkheadExecutor(1) as pool:
            future = pool.submit(jobs.sleep, 600)
            print(pool._pool.supervisor().folder, flush=True)
            threading.Thread(target=press, daemon=True).start()
            future.result()
    """)
    assert "Timeout" not in ended.stderr, ended.stderr
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt", ended.stderr
    wait_for("the folder of the pool is gone", lambda: not os.path.exists(ended.stdout.strip()))
