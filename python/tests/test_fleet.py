"""Tests of fleet jobs, with a real server, supervisor and agent."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bulkhead import AsyncClient, errors

nats = pytest.importorskip("nats", reason="NOT RUN: nats-py is not installed")

from bulkhead import _fleet_connection, fleet  # noqa: E402
from bulkhead.fleet import AsyncFleet, _millis, escape, job_subject  # noqa: E402

PATIENCE = 60.0
T = TypeVar("T")
PROGRAMS = Path(os.environ.get("BULKHEAD_SUPERVISOR", "/none")).parent
SERVER = PROGRAMS.parent / "nats-server" / "2.15.1" / "nats-server"
AGENT = PROGRAMS / "bulkhead-fleet"

# The server chooses a free port and writes its address to a `*.ports` file.
LISTEN = 'listen: "127.0.0.1:-1"\nports_file_dir: "."\n'
NATS = LISTEN + 'jetstream { store_dir: "nats" }\n'

# The tenant cannot ask for the names of streams.
USERS = """
authorization {
  users: [
    { user: agent, password: pw }
    { user: acme, password: pw
      permissions {
        publish: ["bh.job.*.n.2.acme", "$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.*"]
        subscribe: ["_INBOX_acme.>", "bh.told.acme.>"]
      }
    }
  ]
}
"""

TLS = 'tls { cert_file: "cert.pem", key_file: "key.pem" }\n'

CLUSTER = """
server_name: n{number}
cluster {{ name: fleet, listen: "127.0.0.1:{port}", routes: [{routes}] }}
"""

ACCOUNTS = """
no_auth_user: "fleet"
accounts {
  FLEET {
    jetstream: enabled
    users: [{ user: "fleet", password: "fleet" }]
    exports: [
      { service: "bh.job.*.n.2.acme", accounts: [ACME] }
      { service: "$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.*", accounts: [ACME] }
      { stream: "bh.told.acme.>", accounts: [ACME] }
      { service: "$JS.API.STREAM.NAMES", accounts: [ACME] }
    ]
  }
  ACME {
    users: [{ user: "acme", password: "acme" }]
    imports: [
      { service: { account: FLEET, subject: "bh.job.*.n.2.acme" } }
      { service: { account: FLEET, subject: "$JS.API.DIRECT.GET.BH_LEDGER.bh.ledger.acme.*" } }
      { stream: { account: FLEET, subject: "bh.told.acme.>" } }
      { service: { account: FLEET, subject: "$JS.API.STREAM.NAMES" } }
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
    (folder / "nats.conf").write_text(NATS + ACCOUNTS)
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


@contextmanager
def nats_server(folder: Path, settings: str) -> Iterator[str]:
    """Runs a server in a new folder. Returns the server's address."""
    if not SERVER.exists():
        pytest.skip(f"NOT RUN: {SERVER} does not exist")
    folder.mkdir(exist_ok=True)
    (folder / "nats.conf").write_text(settings)
    server = subprocess.Popen([str(SERVER), "-c", "nats.conf"], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        yield wait_for(lambda: server_address(folder))
    finally:
        server.kill()
        server.wait()


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


def test_arguments_are_checked_as_in_the_local_client() -> None:
    invalid: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"deadline": 0.0}, ValueError),
        ({"deadline": -1.0}, ValueError),
        ({"deadline": float("nan")}, ValueError),
        ({"run_limit": 0.0}, ValueError),
        ({"priority": "urgent"}, ValueError),
        ({"cost": -1}, ValueError),
        ({"operation": "x" * 257}, ValueError),
        ({"tenant": "x" * 257}, ValueError),
        ({"operation": b"x"}, TypeError),
        ({"payload": "text"}, TypeError),
        ({"payload": 7}, TypeError),
    ]

    async def run() -> None:
        client = AsyncClient("/none")
        connection = AsyncFleet(_fleet_connection.Connection(False), "", 20.0)
        for arguments, error in invalid:
            with pytest.raises(error) as local:
                await client.submit("upper", **arguments)
            with pytest.raises(error) as durable:
                await connection.submit("upper", **arguments)
            assert str(durable.value) == str(local.value)
            assert type(durable.value) is error

    asyncio.run(run())


def test_payload_can_be_any_buffer(servers: str) -> None:
    async def run() -> None:
        async with await AsyncFleet.connect(servers) as fleet:
            submitted = await fleet.submit("upper", memoryview(b"abc"), deadline=PATIENCE)
            assert bytes((await submitted.result()).payload) == b"ABC"

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


def test_unreadable_outcome_is_reported_at_once() -> None:
    outcomes = [None, "{", "[]", "3", "{}", '{"outcome": "vanished"}', '{"outcome": []}']
    outcomes += ['{"outcome": "ok", "ran_ms": [1]}', '{"outcome": "ok", "attempts": 1e999}']

    class Ledger(BrokenConnection):
        def __init__(self, phase: str, outcome: str | None) -> None:
            self.headers = {"Bulkhead-Phase": phase} | ({} if outcome is None else {"Bulkhead-Outcome": outcome})
            self.data = b""

        async def request(self, *_given: object, **_named: object) -> Ledger:
            return self

    async def run() -> None:
        for outcome in outcomes:
            fleet = AsyncFleet(Ledger("decided", outcome), "", 0.0)
            with pytest.raises(
                errors.Disconnected, match="outcome of the job some cannot be read: .*; update"
            ) as failed:
                await asyncio.wait_for(fleet.result("some", wait=2 * PATIENCE), PATIENCE)
            assert (failed.value.executed, failed.value.retryable) == ("unknown", False)
        with pytest.raises(errors.Disconnected, match="has no outcome yet"):
            await AsyncFleet(Ledger("later", None), "", 0.0).result("some")

    asyncio.run(run())


def test_failing_connection_does_not_block_the_event_loop() -> None:
    async def run() -> None:
        fleet = AsyncFleet(BrokenConnection(), "", 0.0)
        waiting = asyncio.create_task(fleet.result("some", wait=2 * PATIENCE))
        # If the loop were blocked, the task would have ended before this line runs again.
        await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(run())


def test_unreachable_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fleet_connection, "CONNECT_TIMEOUT", 1.0)

    async def run() -> None:
        with pytest.raises(
            errors.Disconnected, match="failed to connect to .*: no connection within 1 s: .*Connect call"
        ):
            await AsyncFleet.connect("nats://127.0.0.1:1")
        with pytest.raises(errors.Disconnected, match="failed to connect to .*: nats: invalid"):
            await AsyncFleet.connect("nats://127.0.0.1:x")
        with pytest.raises(errors.Disconnected, match="the list of servers is empty"):
            await AsyncFleet.connect([])

    asyncio.run(run())


def test_first_connection_waits_for_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"nats://127.0.0.1:{free_ports(1)[0]}"
    # A server can restart for as long as a submission is repeated.
    assert _fleet_connection.CONNECT_TIMEOUT == fleet.SUBMIT_TIMEOUT
    monkeypatch.setattr(_fleet_connection, "CONNECT_TIMEOUT", PATIENCE)

    async def run() -> None:
        report, refused = _fleet_connection.Connection.report, asyncio.Event()

        async def reported(connection: _fleet_connection.Connection, error: Exception) -> None:
            refused.set()
            await report(connection, error)

        monkeypatch.setattr(_fleet_connection.Connection, "report", reported)
        connecting = asyncio.create_task(AsyncFleet.connect(address))
        await asyncio.wait_for(refused.wait(), PATIENCE)
        listen = f'listen: "{address.removeprefix("nats://")}"\nports_file_dir: "."\n'
        with nats_server(tmp_path / "server", listen):
            await (await connecting).close()

    asyncio.run(run())


def test_failed_connection_reports_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fleet_connection, "CONNECT_TIMEOUT", 1.0)
    (tmp_path / "shared.nk").write_text("SU")
    (tmp_path / "shared.nk").chmod(0o640)
    (tmp_path / "ca.pem").write_text("no certificate")

    async def run(address: str) -> None:
        async def cause(**files: str) -> str:
            with pytest.raises(errors.Disconnected) as failed:
                await AsyncFleet.connect(address, **{name: tmp_path / file for name, file in files.items()})
            assert failed.value.executed == "no"
            return str(failed.value)

        # A wrong password does not become right, so there is no wait.
        assert "Authorization Violation" in await cause()
        assert "no connection within" not in await cause()
        for files in ({"nkey": "missing.nk"}, {"credentials": "missing.creds"}, {"ca": "missing.pem"}):
            assert f"{tmp_path}/missing" in await cause(**files)
            assert "No such file" in await cause(**files)
        for files in ({"nkey": "shared.nk"}, {"credentials": "shared.nk"}):
            assert "has mode 0640" in await cause(**files)
        assert f"failed to read {tmp_path}/ca.pem: " in await cause(ca="ca.pem")

    with nats_server(tmp_path / "server", LISTEN + USERS) as address:
        asyncio.run(run(address))


def test_invalid_secret_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("nkeys", reason="NOT RUN: nkeys is not installed")
    jwt = "-----BEGIN NATS USER JWT-----\nx.y.z\n------END NATS USER JWT------\n"
    seed = "-----BEGIN USER NKEY SEED-----\nSUX\n------END USER NKEY SEED------\n"
    invalid = [("nkey", ""), ("nkey", "SUAB"), ("nkey", "\xff"), ("nkey", seed)]
    invalid += [("credentials", text) for text in ("", "SUAB", jwt, seed, jwt + seed)]

    async def run() -> None:
        for name, text in invalid:
            path = tmp_path / "secret"
            path.write_bytes(text.encode("latin-1"))
            path.chmod(0o600)
            with pytest.raises(errors.Disconnected, match=f"{path} does not contain"):
                await AsyncFleet.connect("nats://127.0.0.1:1", **{name: path})

    asyncio.run(run())


def test_user_with_nkey_connects(tmp_path: Path) -> None:
    nkeys = pytest.importorskip("nkeys", reason="NOT RUN: nkeys is not installed")
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    key = nkeys.from_seed(bytearray(seed)).public_key.decode()
    (tmp_path / "user.nk").write_bytes(seed + b"\n")
    (tmp_path / "user.nk").chmod(0o600)

    async def run(address: str) -> None:
        await (await AsyncFleet.connect(address, nkey=tmp_path / "user.nk")).close()

    with nats_server(tmp_path / "server", LISTEN + f"authorization {{ users: [{{ nkey: {key} }}] }}\n") as address:
        asyncio.run(run(address))


def test_failed_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fleet_connection, "CONNECT_TIMEOUT", 0.5)

    async def run() -> None:
        received: list[bytes] = []
        tasks = asyncio.all_tasks()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.append(await reader.read())
            writer.close()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(errors.Disconnected):
                await AsyncFleet.connect(f"nats://127.0.0.1:{port}")
            while not received:
                await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == tasks

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_connection_that_the_server_ends_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fleet_connection, "CONNECT_TIMEOUT", 1.0)

    async def run() -> None:
        async def ending(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'INFO {"server_id":"n1","version":"2.12.8","max_payload":1048576,"headers":true}\r\n')
            await reader.readuntil(b"PING\r\n")
            writer.write(b"PONG\r\n")
            await writer.drain()
            writer.transport.abort()

        async with await asyncio.start_server(ending, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(errors.Disconnected, match="failed to connect"):
                await AsyncFleet.connect(f"nats://127.0.0.1:{port}")

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_connection_with_unsent_data_is_closed() -> None:
    class BrokenTransport:
        aborted = False

        @property
        def _io_writer(self) -> BrokenTransport:
            return self

        @property
        def transport(self) -> BrokenTransport:
            return self

        def abort(self) -> None:
            self.aborted = True

        def writelines(self, _lines: object) -> None:
            pass

        async def drain(self) -> None:
            raise BrokenPipeError

    async def run() -> None:
        connection = _fleet_connection.Connection(False)
        connection._transport = transport = BrokenTransport()
        connection._current_server = "a server"
        connection._pending, connection._pending_data_size = [b"PING"], 4
        await connection.close()
        assert transport.aborted

    asyncio.run(run())


def test_connecting_ends_although_the_tls_handshake_hangs() -> None:
    async def run() -> None:
        async def frozen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'INFO {"server_id":"n1","version":"2.12.8","max_payload":1048576,"tls_required":true}\r\n')
            await reader.read()
            writer.close()

        async with await asyncio.start_server(frozen, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(AsyncFleet.connect(f"tls://127.0.0.1:{port}"), 0.5)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def make_certificate(folder: Path) -> Path:
    """Creates a self-signed certificate for 127.0.0.1 in a new folder."""
    if shutil.which("openssl") is None:
        pytest.skip("NOT RUN: openssl is not installed")
    folder.mkdir()
    options = "-x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=n1"
    extension = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", *options.split(), *extension], cwd=folder, check=True, capture_output=True)
    return folder / "cert.pem"


def test_server_without_tls_receives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fleet_connection, "CONNECT_TIMEOUT", 1.0)
    certificate = make_certificate(tmp_path / "tls")

    async def run() -> None:
        received = b""

        async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal received
            writer.write(b'INFO {"server_id":"n1","version":"2.12.8","max_payload":1048576,"headers":true}\r\n')
            received += await reader.read()
            writer.close()

        async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(errors.Disconnected, match="does not offer TLS"):
                await AsyncFleet.connect(f"tls://{address}")
            for servers in (
                f" tls://{address}",
                [f"nats://{address}", f"\ttls://{address}"],
                f"nats://{address},tls://n1",
                f"nats://{address},TLS://n1",
            ):
                with pytest.raises(errors.Disconnected, match="does not offer TLS"):
                    await AsyncFleet.connect(servers)
            with pytest.raises(errors.Disconnected, match="does not offer TLS"):
                await AsyncFleet.connect(f"nats://{address}", ca=certificate)
        assert received == b""

    asyncio.run(run())


def test_server_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fleet_connection, "CONNECT_TIMEOUT", 2.0)
    certificate, other = make_certificate(tmp_path / "server"), make_certificate(tmp_path / "other")

    async def run(address: str) -> None:
        for scheme in ("tls", "nats"):
            await (await AsyncFleet.connect(f"{scheme}://{address}", ca=certificate)).close()
        for options in ({"ca": other}, {}):
            with pytest.raises(errors.Disconnected, match="certificate verify failed"):
                await AsyncFleet.connect(f"tls://{address}", **options)
        # Like a version of nats-py that no longer calls this method.
        monkeypatch.delattr(_fleet_connection.Connection, "_connect_command")
        with pytest.raises(errors.Disconnected, match="this version of nats-py is not supported"):
            await AsyncFleet.connect(f"tls://{address}", ca=certificate)

    with nats_server(tmp_path / "server", LISTEN + TLS) as address:
        asyncio.run(run(address.partition("://")[2]))


def test_missing_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(address: str) -> None:
        acme = address.replace("://", "://acme:pw@")
        async with await AsyncFleet.connect(acme, tenant="acme") as tenant:
            with pytest.raises(errors.Rejected, match="permissions violation") as rejected:
                await tenant.submit("upper", tenant="other")
            assert (rejected.value.outcome.reason, rejected.value.executed) == ("forbidden", "no")
            with pytest.raises(errors.Rejected, match="permissions violation") as rejected:
                await tenant.result("some", tenant="other", wait=PATIENCE)
            assert (rejected.value.outcome.reason, rejected.value.executed) == ("forbidden", "unknown")
            # The tenant cannot find out whether the bulkhead exists.
            monkeypatch.setattr(fleet, "SUBMIT_TIMEOUT", 0.5)
            with pytest.raises(errors.Rejected, match="no such bulkhead, or the job stream has no leader") as rejected:
                await tenant.submit("upper")
            assert (rejected.value.outcome.reason, rejected.value.retryable) == ("unavailable", True)
        async with await AsyncFleet.connect(address.replace("://", "://agent:pw@")) as agent:
            with pytest.raises(errors.Rejected) as rejected:
                await agent.submit("upper")
            assert rejected.value.outcome.reason == "not_found"
        with pytest.raises(errors.Disconnected, match="permissions violation .*set `tenant`"):
            await AsyncFleet.connect(acme)

    with nats_server(tmp_path, NATS + USERS) as address:
        asyncio.run(run(address))


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def test_loss_of_the_majority_is_not_a_missing_bulkhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not AGENT.exists():
        pytest.skip(f"NOT RUN: {AGENT} does not exist")
    monkeypatch.setattr(fleet, "SUBMIT_TIMEOUT", 2.0)
    monkeypatch.setattr(fleet, "REQUEST_TIMEOUT", 2.0)
    ports = free_ports(3)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)

    async def reason(connection: AsyncFleet, bulkhead: str) -> str:
        try:
            await connection.submit(bulkhead)
        except errors.Rejected as rejected:
            return rejected.outcome.reason
        except errors.Disconnected as lost:
            return lost.executed
        return "accepted"

    async def run(addresses: list[str], others: ExitStack) -> None:
        async with await AsyncFleet.connect(addresses[0]) as connection:
            assert await reason(connection, "nowhere") == "not_found"
            while await reason(connection, "upper") != "accepted":
                pass
            others.close()
            # Until the leader of the stream notices the loss, submissions are not answered.
            while (found := await reason(connection, "upper")) == "unknown":
                pass
            assert found == "unavailable"
            # The servers' leader still lists the streams until it notices the loss, too.
            while await reason(connection, "nowhere") == "not_found":
                assert await reason(connection, "upper") == "unavailable"
            assert await reason(connection, "upper") == "unavailable"

    with ExitStack() as first, ExitStack() as others:
        stacks = [first, others, others]
        settings = [NATS + CLUSTER.format(number=n, port=port, routes=routes) for n, port in enumerate(ports)]
        servers = [nats_server(tmp_path / f"n{number}", text) for number, text in enumerate(settings)]
        addresses = [stack.enter_context(server) for stack, server in zip(stacks, servers, strict=True)]
        text = FLEET.format(address=addresses[0]).replace("[streams]", "[streams]\nreplicas = 3")
        (tmp_path / "fleet.toml").write_text(text)
        init = [str(AGENT), "--config", "fleet.toml", "init"]
        wait_for(lambda: subprocess.run(init, cwd=tmp_path, capture_output=True, timeout=PATIENCE).returncode == 0)
        asyncio.run(asyncio.wait_for(run(addresses, others), PATIENCE))
