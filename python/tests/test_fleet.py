"""Tests of fleet jobs, with a real server, supervisor and agent."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from bulkhead import errors

nats = pytest.importorskip("nats", reason="NOT RUN: nats-py is not installed")

from bulkhead.fleet import AsyncFleet, _millis, escape, job_subject  # noqa: E402

PATIENCE = 60.0
T = TypeVar("T")
PROGRAMS = Path(os.environ.get("BULKHEAD_SUPERVISOR", "/none")).parent
SERVER = PROGRAMS.parent / "nats-server" / "2.15.1" / "nats-server"
AGENT = PROGRAMS / "bulkhead-fleet"

# The server chooses a free port and writes its address to a `*.ports` file.
NATS = """
listen: "127.0.0.1:-1"
ports_file_dir: "."
jetstream { store_dir: "nats" }
no_auth_user: "fleet"
accounts {
  FLEET {
    jetstream: enabled
    users: [{ user: "fleet", password: "fleet" }]
    exports: [
      { service: "bh.job.*.n.2.acme", accounts: [ACME] }
      { service: "$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.*", accounts: [ACME] }
      { stream: "bh.told.acme.>", accounts: [ACME] }
    ]
  }
  ACME {
    users: [{ user: "acme", password: "acme" }]
    imports: [
      { service: { account: FLEET, subject: "bh.job.*.n.2.acme" } }
      { service: { account: FLEET, subject: "$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.*" } }
      { stream: { account: FLEET, subject: "bh.told.acme.>" } }
    ]
  }
}
"""

WORKERS = """
[supervisor]
socket = "jobs.sock"
admin = "admin.sock"
[bulkhead.upper]
exec = ["tr", "a-z", "A-Z"]
max_in_flight = 2
[bulkhead.fails]
exec = ["sh", "-c", "echo partial; exit 3"]
[bulkhead.waits]
exec = ["sleep", "600"]
deadline = "600s"
[defaults.sandbox]
profile = "none"
"""

FLEET = """
[nats]
servers = ["{address}"]
[agent]
name = "host-a"
socket = "jobs.sock"
[streams]
host_lost_after = "60s"
max_bytes = "16MiB"
ledger_max_bytes = "16MiB"
dead_max_bytes = "16MiB"
[bulkhead.upper]
[bulkhead.fails]
[bulkhead.waits]
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    for program in (SERVER, AGENT):
        if not program.exists():
            pytest.skip(f"NOT RUN: {program} does not exist")
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "nats.conf").write_text(NATS)
    (folder / "workers.toml").write_text(WORKERS)
    command = [str(AGENT), "--config", "fleet.toml"]
    processes = [
        subprocess.Popen([str(SERVER), "-c", "nats.conf"], cwd=folder, stderr=subprocess.DEVNULL),
        subprocess.Popen([os.environ["BULKHEAD_SUPERVISOR"], "--config", "workers.toml"], cwd=folder),
    ]
    try:
        address = wait_for(lambda: server_address(folder))
        (folder / "fleet.toml").write_text(FLEET.format(address=address))
        init = [*command, "init"]
        wait_for(lambda: subprocess.run(init, cwd=folder, capture_output=True, timeout=PATIENCE).returncode == 0)
        processes.append(subprocess.Popen([*command, "agent"], cwd=folder, stderr=subprocess.DEVNULL))
        yield address
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def server_address(folder: Path) -> str:
    """The server's address, or "" if it is not listening yet."""
    for path in folder.glob("*.ports"):
        try:
            return str(json.loads(path.read_text())["nats"][0])
        except ValueError:
            pass  # the server is still writing the file
    return ""


def wait_for(condition: Callable[[], T]) -> T:
    until = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)
    return value


def test_names_are_escaped_as_in_the_agent() -> None:
    assert (escape(""), escape("a.b"), escape("ö")) == ("=", "a=2Eb", "=C3=B6")
    assert job_subject("b", "acme") == "bh.job.b.n.2.acme"


def test_endless_time_limit_is_a_valid_header() -> None:
    assert [_millis(seconds) for seconds in (0.0, 1.5)] == ["1", "1500"]
    assert {_millis(seconds) for seconds in (1e300, float("inf"))} == {"31536000000"}


def test_tenant_uses_the_fleet_from_its_own_account(servers: str) -> None:
    async def submit_all() -> None:
        address = servers.replace("nats://", "nats://acme:acme@")
        async with await AsyncFleet.connect(address, tenant="acme") as fleet:
            submitted = await fleet.submit("upper", b"hello", id="own-account")
            assert (await submitted.result()).payload == b"HELLO"
            assert (await fleet.result("own-account")).payload == b"HELLO"
            with pytest.raises(errors.Rejected) as refused:
                await fleet.submit("missing")
            assert refused.value.outcome.reason == "not_found"

    asyncio.run(submit_all())


def test_job_returns_its_result_and_runs_once(servers: str) -> None:
    async def run() -> None:
        async with await AsyncFleet.connect(servers) as fleet:
            replies = []
            for _ in range(2):
                submitted = await fleet.submit("upper", b"hello", id="once", deadline=PATIENCE)
                replies.append(await submitted.result())
            assert [bytes(reply.payload) for reply in replies] == [b"HELLO", b"HELLO"]
            assert replies[0].outcome == replies[1].outcome
            assert (await fleet.result("once")).outcome.bulkhead == "upper"
            for copied in (pickle.loads(pickle.dumps(replies[0])), copy.copy(replies[0])):
                assert (copied.payload, copied.outcome) == (replies[0].payload, replies[0].outcome)

    asyncio.run(run())


def test_fleet_jobs_raise_the_same_errors_as_local_jobs(servers: str) -> None:
    async def run() -> None:
        async with await AsyncFleet.connect(servers) as fleet:
            submitted = await fleet.submit("fails", deadline=PATIENCE)
            with pytest.raises(errors.Failed) as failed:
                await submitted.result()
            assert (failed.value.outcome.reason, failed.value.outcome.status) == ("exit_3", 3)
            assert bytes(failed.value.payload) == b"partial\n"
            with pytest.raises(errors.Rejected) as rejected:
                await fleet.submit("nowhere")
            assert rejected.value.outcome.reason == "not_found"
            invalid = [{"id": ""}, {"operation": "a\nb"}, {"id": "x" * 129}, {"id": "a\x85b"}]
            invalid += [{"id": "a "}, {"operation": " a"}, {"traceparent": "a\N{NO-BREAK SPACE}"}]
            for changes in invalid:
                with pytest.raises(errors.Rejected, match="invalid"):
                    await fleet.submit("upper", **changes)
            with pytest.raises(errors.Rejected, match="too_large"):
                await fleet.submit("upper", b"x" * (1 << 20))
            with pytest.raises(errors.Disconnected) as missing:
                await fleet.result("never")
            assert missing.value.executed == "unknown"

    asyncio.run(run())


def test_result_can_be_read_again_and_leaves_no_subscription(servers: str) -> None:
    async def run() -> None:
        async with await AsyncFleet.connect(servers) as fleet:
            submitted = await fleet.submit("upper", b"a", deadline=PATIENCE)
            replies = [await submitted.result() for _ in range(2)]
            replies += await asyncio.gather(submitted.result(), submitted.result())
            assert [bytes(reply.payload) for reply in replies] == [b"A"] * 4
            before = len(fleet._nats._subs)
            for _ in range(3):
                await fleet.submit("upper", b"never read", deadline=PATIENCE)
                with pytest.raises(errors.Rejected):
                    await fleet.submit("nowhere")
            waiting = asyncio.create_task((await fleet.submit("waits", deadline=PATIENCE)).result())
            while len(fleet._nats._subs) == before:
                await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert len(fleet._nats._subs) == before

    asyncio.run(run())


def test_closing_a_fleet_ends_its_calls(servers: str) -> None:
    async def run() -> None:
        fleet = await AsyncFleet.connect(servers)
        submitted = await fleet.submit("waits", deadline=PATIENCE)
        waiting = asyncio.create_task(submitted.result())
        before = len(fleet._nats._subs)
        while len(fleet._nats._subs) == before:
            await asyncio.sleep(0.01)
        await fleet.close()
        for pending in (waiting, submitted.result(), fleet.result("some")):
            with pytest.raises(errors.Disconnected, match="closed before the job .* had an outcome") as closed:
                await pending
            assert closed.value.executed == "unknown"
        with pytest.raises(errors.Disconnected, match="closed before the servers acknowledged") as refused:
            await fleet.submit("upper")
        assert refused.value.executed == "no"

    asyncio.run(run())


class BrokenConnection:
    """A connection on which every operation fails at once."""

    is_closed = False

    async def subscribe(self, _subject: str) -> BrokenConnection:
        return self

    async def unsubscribe(self) -> None:
        pass

    async def fail(self, *_given: object, **_named: object) -> None:
        raise nats.errors.Error

    request = next_msg = fail


def test_failing_connection_does_not_block_the_event_loop() -> None:
    async def run() -> None:
        fleet = AsyncFleet(BrokenConnection(), "", 0.0)
        waiting = asyncio.create_task(fleet.result("some", wait=2 * PATIENCE))
        # If the loop were blocked, the task would have ended before this line runs again.
        await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(run())


def test_unreachable_server_is_reported() -> None:
    async def run() -> None:
        with pytest.raises(errors.Disconnected, match="failed to connect"):
            await AsyncFleet.connect("nats://127.0.0.1:1")

    asyncio.run(run())
