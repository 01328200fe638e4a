"""Tests of the worker SDK with real supervisors: threads, prefetch, limits, shutdown, sandboxes, and handlers."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pools import LONG, is_running, read, wait_for
from running import HERE, SOURCE, WORKER, Supervisor, running, sandboxed

import bulkhead
from bulkhead import Client, JobError


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    with running(
        plain=WORKER,
        many={**WORKER, "max_in_flight": 8},
        strict=sandboxed("strict"),
        none=sandboxed("none"),
        small={**WORKER, "max_result": "1KiB"},
    ) as one:
        yield one


@pytest.fixture
def client(supervisor: Supervisor) -> Iterator[Client]:
    with Client(supervisor.socket) as one:
        yield one


def failure(client: Client, name: str, operation: str, payload: bytes = b"") -> JobError:
    with pytest.raises(JobError) as caught:
        client.call(name, payload, operation=operation)
    return caught.value


# Handlers.


@pytest.mark.parametrize("name", ["plain", "many", "strict", "none"])
def test_handlers_return_results_and_failures(client: Client, name: str) -> None:
    assert client.call(name, b"x").payload == b"x"
    assert client.call(name, b"none", operation="kind").payload == b""
    assert client.call(name, b"str", operation="kind").payload.decode() == "größe"
    assert client.call(name, b"a text of its own", operation="kind").payload.decode() == "größe"
    assert client.call(name, b"bytearray", operation="kind").payload == b"ab"
    assert client.call(name, b"view", operation="kind").payload == b"ac"
    assert client.call(name, b"0.01", operation="asleep").payload == b"slept"
    assert client.call(name, b"5000000", operation="size").payload == bytes(5_000_000)
    wrong = failure(client, name, "kind", b"int")
    assert wrong.outcome.message == "TypeError: a handler must return bytes, str or None, not int"
    assert failure(client, name, "raise").outcome.message == "ValueError: no such page: 7"
    assert failure(client, name, "raise-unprintable").outcome.message.startswith("Unprintable: ")
    assert failure(client, name, "exit").outcome.message == "SystemExit: 4"
    assert failure(client, name, "aexit").outcome.message == "SystemExit: 4"
    assert client.call(name, operation="aexit-later").payload == b"left behind"
    assert client.call(name, b"0.01", operation="asleep").payload == b"slept"
    assert client.call(name, operation="libraries").payload == b'"e3b0"'


ANSWERS = [
    b"a file's name",
    b"an object",
    b"an object that ends the program",
    b"a code that is a number",
    b"a message that is an error",
    b"a released view",
    b"progress without words",
    b"progress of a word",
    b"an error that was changed",
]


@pytest.mark.parametrize("operation", ["answer", "aanswer"])
@pytest.mark.parametrize("name", ["plain", "many"])
def test_unsendable_reply_fails_only_its_job(client: Client, name: str, operation: str) -> None:
    beside = client.submit(name, b"0.5", operation="asleep") if name == "many" else None
    before = client.call(name, operation="pid").payload
    for answer in ANSWERS:
        error = failure(client, name, operation, answer)
        assert (error.outcome.outcome, error.outcome.reason) == ("failed", "exception"), answer
    assert client.call(name, operation="pid").payload == before
    assert beside is None or beside.result(LONG).payload == b"slept"


def test_failure_has_the_fields_of_the_handler_error(client: Client) -> None:
    error = failure(client, "plain", "error", b"x" * 65_536)
    assert (error.outcome.reason, error.outcome.fault, error.retryable, error.payload) == (
        "bad_page",
        "caller",
        True,
        b"x" * 65_536,
    )
    with pytest.raises(ValueError, match="fault"):
        bulkhead.HandlerError("x", fault="nobody")


def test_result_over_max_result_fails_the_job(client: Client, supervisor: Supervisor) -> None:
    error = failure(client, "small", "size", b"1025")
    assert error.outcome.reason == "result_too_large"
    assert error.outcome.message == "the result has 1025 bytes; max_result is 1024"
    assert len(client.call("small", b"1024", operation="size").payload) == 1024
    assert supervisor.snapshot("small")["restarts"] == 0


def test_job_without_a_matching_handler_fails() -> None:
    with (
        running(one={**WORKER, "command": [*WORKER["command"][:-1], "handlers:about"]}) as own,
        Client(own.socket) as client,
    ):
        assert b"by init" in client.call("one", operation="whatever").payload
    program = "from bulkhead import serve; serve(operations={'a': lambda payload, ctx: b'A'})"
    with running(one={**WORKER, "command": [sys.executable, "-c", program]}) as own, Client(own.socket) as client:
        assert client.call("one", operation="a").payload == b"A"
        error = failure(client, "one", "b")
        assert (error.outcome.reason, error.outcome.fault) == ("unknown_operation", "caller")
        assert "no operation 'b'; available operations: 'a'" in str(error)


def test_crash_report_contains_the_python_stack(client: Client, supervisor: Supervisor) -> None:
    error = failure(client, "plain", "segv")
    assert error.outcome.reason == "signal"

    def reported() -> bool:
        _, listed = supervisor.request("GET", "/v1/crashes")
        ids = [report["id"] for report in listed["crashes"]]
        return any("in segv" in json.dumps(supervisor.request("GET", f"/v1/crashes/{one}")[1]) for one in ids)

    wait_for("the report has the stack", reported)


# Concurrent jobs.


def test_worker_runs_max_in_flight_jobs_at_once(client: Client) -> None:
    jobs = [client.submit("many", operation="meet") for _ in range(8)]
    assert {bytes(job.result(LONG).payload) for job in jobs} == {b"met"}
    assert int(client.call("many", operation="threads").payload) >= 8


def test_async_handlers_share_one_loop(tmp_path: pathlib.Path) -> None:
    with running(many={**sandboxed("none"), "max_in_flight": 100}) as own, Client(own.socket) as client:
        go = tmp_path / "go"
        jobs = [client.submit("many", bytes(go), operation="await") for _ in range(100)]
        wait_for("all jobs are running", lambda: own.snapshot("many")["in_flight"] == 100)
        go.touch()
        assert [bytes(job.result(LONG).payload) for job in jobs] == [b"waited"] * 100


def test_handler_sees_the_cancellation(tmp_path: pathlib.Path) -> None:
    notes = tmp_path / "notes"
    keys = {**sandboxed("none"), "env": {"PYTHONPATH": SOURCE, "NOTES": str(notes)}, "grace": "60s", "max_in_flight": 2}
    with running(one=keys) as own, Client(own.socket) as client:
        job = client.submit("one", operation="until-cancelled")
        # The supervisor would recall a job that the worker has not begun.
        wait_for("the job runs", lambda: read(notes) == "began\n")
        job.cancel()
        wait_for("the handler sees the cancellation", lambda: read(notes) == "began\nsaw it\n")
        job = client.submit("one", b"100", operation="asleep")
        wait_for("the job runs", lambda: read(notes) == "began\nsaw it\nbegan\n")
        job.cancel()
        wait_for("the coroutine is cancelled", lambda: read(notes) == "began\nsaw it\nbegan\ncancelled True\n")
        job = client.submit("one", operation="cling")
        wait_for("the job runs", lambda: read(notes).count("began") == 3)
        job.cancel()
        for _ in range(20):
            client.submit("one", b"100", operation="asleep").cancel()
        assert client.call("one", b"goes on").payload == b"goes on"
        wait_for("all jobs have ended", lambda: own.snapshot("one")["available"] == 2)
        assert own.snapshot("one")["restarts"] == 0
        assert "never awaited" not in own.log()


def test_worker_follows_changes_to_max_in_flight(tmp_path: pathlib.Path) -> None:
    with running(one={**sandboxed("none"), "max_in_flight": 1}) as own, Client(own.socket) as client:
        for limit in (6, 2, 5, 1, 3):
            assert own.request("PATCH", "/v1/bulkheads/one", {"max_in_flight": limit})[0] == 200
            go = tmp_path / str(limit)
            jobs = [client.submit("one", bytes(go), operation="wait") for _ in range(limit)]
            wait_for("all jobs run", lambda limit=limit: own.snapshot("one")["in_flight"] == limit)  # type: ignore[misc]
            go.touch()
            assert {bytes(job.result(LONG).payload) for job in jobs} == {b"waited"}
        assert own.snapshot("one")["restarts"] == 0
        assert own.snapshot("one")["late_replies"] == 0


# Prefetched jobs.


def test_prefetched_jobs_run_once(tmp_path: pathlib.Path) -> None:
    """Mixes quick and slow jobs, recalls, changes of limits, priorities and restarts."""
    notes = tmp_path / "notes"
    keys = {**sandboxed("none"), "env": {"PYTHONPATH": SOURCE, "NOTES": str(notes)}, "processes": 2}
    with running(one=keys) as own, Client(own.socket) as client:
        chance = random.Random(3)
        jobs = {}
        for number in range(1500):
            word = "slow" if chance.random() < 0.04 else "quick"
            payload = f"{word} {number}".encode()
            priority = chance.choice(["normal"] * 20 + ["critical", "best-effort"])
            jobs[payload] = client.submit("one", payload, operation="once", priority=priority)
            if number in (300, 900):
                assert own.request("PATCH", "/v1/bulkheads/one", {"max_in_flight": 3 if number == 300 else 1})[0] == 200
            if number == 600:
                assert own.request("POST", "/v1/bulkheads/one/restart")[0] < 300
            while len([job for job in jobs.values() if not job.done()]) > 200:
                time.sleep(0.001)
        for payload, job in jobs.items():
            assert job.result(LONG).payload == payload
        ran = collections.Counter(notes.read_text().split("\n")[:-1])
        assert set(ran.values()) == {1}
        assert len(ran) == 1500
        assert own.snapshot("one")["crashed"] == 0


def test_worker_death_fails_only_the_running_job() -> None:
    with running(one={**WORKER, "processes": 2}) as own, Client(own.socket) as client:
        chance = random.Random(5)
        jobs = []
        for number in range(600):
            word = chance.choices(["quick", "segv", "exit"], [0.95, 0.025, 0.025])[0]
            payload = f"{word} {number}".encode()
            # The last jobs wait for the start of about thirty workers.
            jobs.append((word, client.submit("one", payload, operation="once", deadline=10 * LONG)))
        for word, job in jobs:
            error = job.exception(10 * LONG)
            if word == "quick":
                assert error is None, error
            else:
                assert isinstance(error, bulkhead.Crashed)
                assert error.outcome.reason == ("signal" if word == "segv" else "exit")


def test_cancelled_jobs_run_at_most_once(tmp_path: pathlib.Path) -> None:
    notes = tmp_path / "notes"
    keys = {**sandboxed("none"), "env": {"PYTHONPATH": SOURCE, "NOTES": str(notes)}, "processes": 2}
    with running(one=keys) as own, Client(own.socket) as client:
        chance = random.Random(7)
        was_cancelled: dict[str, bool] = {}
        for _ in range(20):
            batch = {}
            for _ in range(100):
                number = str(len(was_cancelled) + len(batch))
                batch[number] = client.submit("one", f"quick {number}".encode(), operation="once")
            for job in chance.sample(list(batch.values()), 40):
                job.cancel()
            for number, job in batch.items():
                was_cancelled[number] = job.cancelled()
                assert job.cancelled() or job.exception(LONG) is None
        ran = collections.Counter(notes.read_text().split("\n")[:-1])
        assert set(ran.values()) == {1}
        assert set(ran) >= {number for number, is_cancelled in was_cancelled.items() if not is_cancelled}


def test_prefetched_job_keeps_its_deadline(client: Client, tmp_path: pathlib.Path) -> None:
    # A worker gets no prefetched jobs before its first job.
    assert client.call("none", b"x").payload == b"x"
    go = tmp_path / "go"
    blocking = client.submit("none", bytes(go), operation="wait")
    late = [client.submit("none", deadline=0.1) for _ in range(5)]
    for job in late:
        error = job.exception(LONG)
        assert isinstance(error, bulkhead.DeadlineExceeded)
        assert error.outcome.reason == "queued"
    go.touch()
    assert blocking.result(LONG).payload == b"waited"
    assert client.call("none", b"x").payload == b"x"


# Start and shutdown.


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fails", "RuntimeError: the model is missing"),
        ("exits", "SystemExit: no licence"),
        ("closes", "RuntimeError: the model is missing"),
        ("unprintable", "Unprintable: (the text is not available)"),
    ],
)
@pytest.mark.parametrize("mode", ["spawn", "fork"])
def test_error_explains_failed_initializer(how: str, said: str, mode: str) -> None:
    keys = {
        **WORKER,
        "env": {"PYTHONPATH": SOURCE, "INIT": how},
        # Deaths of workers that start slowly also count.
        "restart": {"max": 1, "within": "10m"},
        "start": {"mode": mode},
    }
    with running(one=keys) as own, Client(own.socket) as client:
        error = failure(client, "one", "")
        assert (error.outcome.reason, error.http_status) == ("unavailable", 503)
        assert said in str(error)


def test_error_explains_failed_import() -> None:
    for module, said in (("nowhere", "No module named 'nowhere'"), ("pools", "no function with @bulkhead.handler")):
        keys = {**WORKER, "command": [*WORKER["command"][:-1], module], "restart": {"max": 1, "within": "10m"}}
        with running(one=keys) as own, Client(own.socket) as client:
            assert said in str(failure(client, "one", ""))


def test_initializer_can_request_more_time() -> None:
    keys = {**WORKER, "env": {"PYTHONPATH": SOURCE, "INIT": "slow"}, "start": {"ready": "5s"}}
    with running(one=keys) as own, Client(own.socket) as client:
        assert client.call("one", b"x").payload == b"x"
        # Every start takes longer than `ready`. A start can fail if its first request for more time is late.
        assert own.snapshot("one")["workers"][0]["status"] == "step 7"


def test_sigterm_stops_a_worker_without_losing_jobs(client: Client) -> None:
    with running(one={**WORKER, "processes": 2}) as own, Client(own.socket) as many:
        ended = threading.Event()
        wrong: list[object] = []
        answered = [0]

        def load() -> None:
            while not ended.is_set():
                try:
                    if many.call("one", b"x").payload != b"x":
                        wrong.append("mixed up")
                    answered[0] += 1
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(4):
                before = answered[0]
                wait_for("more jobs end", lambda before=before: answered[0] > before + 50 or wrong)  # type: ignore[misc]
                # The snapshot may still contain a worker that has exited.
                victim = wait_for("a worker", lambda: [pid for pid in own.pids("one") if is_running(pid)])[0]
                os.kill(victim, signal.SIGTERM)
                wait_for("the worker is gone", lambda victim=victim: not is_running(victim))  # type: ignore[misc]
        finally:
            ended.set()
            for thread in threads:
                thread.join(LONG)
        assert wrong == []
        assert own.snapshot("one")["crashed"] == 0
        assert '"exit_code":1' not in own.log()


def test_sigterm_lets_the_running_handler_finish(client: Client) -> None:
    with running(one={**sandboxed("none"), "processes": 2}) as own, Client(own.socket) as many:
        reply = many.call("one", b"1", operation="terminate")
        assert reply.payload == b"slept"
        victim = reply.outcome.worker_pid
        assert victim is not None
        wait_for("the worker is gone", lambda: not is_running(victim))
        assert own.snapshot("one")["crashed"] == 0


def test_workers_exit_when_their_supervisor_dies() -> None:
    with running(one={**WORKER, "processes": 2}) as own, Client(own.socket) as client:
        job = client.submit("one", operation="spin")
        pids = own.pids("one")
        assert len(pids) == 2
        own.kill()
        wait_for("the workers are gone", lambda: not any(map(is_running, pids)))
        assert isinstance(job.exception(LONG), bulkhead.Disconnected)


def test_shutdown_finishes_the_running_job(tmp_path: pathlib.Path) -> None:
    with running(one=sandboxed("none")) as own, Client(own.socket) as client:
        go = tmp_path / "go"
        jobs = [client.submit("one", bytes(go), operation="wait") for _ in range(3)]
        wait_for("one job is running", lambda: own.snapshot("one")["in_flight"] == 1)
        assert own.process is not None
        own.process.terminate()
        assert all(isinstance(job.exception(LONG), bulkhead.Rejected) for job in jobs[1:])
        go.touch()
        assert jobs[0].exception(LONG) is None
        assert own.process.wait(LONG) == 0
        assert own.log().count("worker_exited") == 0 or "exit_code=0" in own.log()


# Heartbeats.


def test_worker_survives_a_handler_that_holds_the_gil() -> None:
    keys = {**WORKER, "health": {"heartbeat": "100ms", "missed": 2}, "max_in_flight": 2}
    with running(one=keys) as own, Client(own.socket) as client:

        def survives() -> bool:
            before = own.snapshot("one")["restarts"]
            try:
                assert client.call("one", b"1.5", operation="hold").payload == b"held"
                # The worker is idle for longer than the time after which a worker without heartbeats is killed.
                pid = client.call("one").outcome.worker_pid
                time.sleep(1)
                is_same = client.call("one").outcome.worker_pid == pid
            except bulkhead.Crashed:
                return False
            return is_same and own.snapshot("one")["restarts"] == before

        # On a busy machine, a worker can miss its heartbeats.
        wait_for("a worker survives", survives, 5 * LONG)


# Forks in handlers.


@pytest.mark.parametrize("name", ["plain", "many", "strict", "none"])
def test_child_forked_by_a_handler_is_not_a_worker(client: Client, supervisor: Supervisor, name: str) -> None:
    assert client.call(name, b"exit", operation="fork").payload == b"7"
    assert client.call(name, b"raise", operation="fork").payload == b"1"
    assert client.call(name, b"term", operation="fork").payload == b"-15"
    assert client.call(name, b"goes on").payload == b"goes on"
    assert supervisor.snapshot(name)["late_replies"] == 0


@pytest.mark.parametrize("name", ["plain", "many", "strict"])
def test_child_forked_by_c_code_is_not_a_worker(client: Client, supervisor: Supervisor, name: str) -> None:
    assert client.call(name, b"fork", operation="careless").payload == b"1"
    assert client.call(name, b"goes on").payload == b"goes on"
    assert supervisor.snapshot(name)["late_replies"] == 0


def test_payload_beyond_the_data_limit_fails_only_its_job(tmp_path: pathlib.Path) -> None:
    keys = {**WORKER, "max_in_flight": 2, "rlimits": {"data": "63MiB"}, "sandbox": {"profile": "none"}}
    with running(one=keys) as own, Client(own.socket) as client:
        job = client.submit("one", bytes(tmp_path / "go"), operation="wait")
        wait_for("the job runs", lambda: own.snapshot("one")["in_flight"] == 1)
        error = failure(client, "one", "echo", bytes(63 << 20))
        assert error.outcome.reason == "exception"
        assert "MemoryError: the payload has 66060288 bytes" in str(error)
        (tmp_path / "go").touch()
        assert job.result(LONG).payload == b"waited"


def test_worker_without_memory_for_its_link_exits(tmp_path: pathlib.Path) -> None:
    keys = {**WORKER, "max_in_flight": 2, "sandbox": {"profile": "none"}}
    with running(one=keys) as own, Client(own.socket) as client:
        client.call("one", operation="exhaust")
        # While the only handler thread is busy, the watcher reads the link.
        client.submit("one", bytes(tmp_path / "never"), operation="wait")
        wait_for("the job runs", lambda: own.snapshot("one")["in_flight"] == 1)
        assert failure(client, "one", "echo", bytes(1 << 20)).outcome.reason == "exit"
        assert client.call("one", b"goes on").payload == b"goes on"
        wait_for("the cause is logged", lambda: "this worker has no memory left" in own.log())


@pytest.mark.parametrize("how", [b"close", b"replace"])
def test_worker_exits_when_its_link_is_lost(how: bytes) -> None:
    keys = {**WORKER, "health": {"heartbeat": "200ms", "missed": 50}, "deadline": "5m"}
    with running(one=keys) as own, Client(own.socket) as client:
        job = client.submit("one", how, operation="careless", deadline=300)
        wait_for("the worker is replaced", lambda: own.snapshot("one")["restarts"] >= 1)
        assert not isinstance(job.exception(LONG), bulkhead.DeadlineExceeded)
        assert client.call("one", b"goes on").payload == b"goes on"
        wait_for("the mistake is logged", lambda: "closed or replaced the worker's link" in own.log())


# Started without a supervisor.


def by_hand(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=LONG, check=False)


def test_worker_started_by_hand_prints_instructions() -> None:
    run = by_hand("-m", "bulkhead", "serve", "handlers")
    assert run.returncode == 2
    assert "[bulkhead.NAME]" in run.stderr
    run = by_hand("-m", "bulkhead", "serve", "handlers", BULKHEAD_LINK_FD="77")
    assert run.returncode == 2
    run = by_hand("-m", "bulkhead", "frobnicate")
    assert run.returncode == 2
    assert "usage:" in run.stderr
    assert by_hand("-m", "bulkhead", "--help").returncode == 0
    assert by_hand("-m", "bulkhead", "--version").stdout.startswith("bulkhead-py ")
    with pytest.raises(TypeError, match="handler"):
        bulkhead.serve()


def test_handler_output_is_logged_immediately() -> None:
    program = "from bulkhead import serve\ndef h(p, c): print('said', p.decode()); return b''\nserve(h)"
    with running(one={**WORKER, "command": [sys.executable, "-c", program]}) as own, Client(own.socket) as client:
        client.call("one", b"hello")
        wait_for("the output is logged", lambda: "said hello" in json.dumps(_logs(own)))


def _logs(own: Supervisor) -> Any:
    return str(own.request("GET", "/v1/bulkheads/one/logs")[1])
