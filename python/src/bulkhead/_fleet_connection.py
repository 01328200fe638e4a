"""Connects ``fleet`` to the NATS servers, and reports requests for which the user has no permission.

Reads the files with secrets and certificates, and requires TLS where the addresses do. ``nats-py`` restores lost
connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg

from .errors import Disconnected

#: Time limit of the first connection, in seconds. A server can restart during this time.
CONNECT_TIMEOUT = 15.0
#: Time limit for closing a connection, in seconds.
CLOSE_TIMEOUT = 2.0
#: Error code of a server for an account without JetStream.
NOT_ENABLED_FOR_ACCOUNT = 10039
#: Contents of a credentials file. The group is the seed.
CREDENTIALS = re.compile(rb"-BEGIN NATS USER JWT-+\s+\S+\s.*-BEGIN USER NKEY SEED-+\s+(\S+)", re.DOTALL)


class Forbidden(nats.errors.Error):
    """The user has no permission for a request."""


class Connection(Client):
    """A client that can require TLS, and whose forbidden requests fail at once."""

    def __init__(self, requires_tls: bool) -> None:
        super().__init__()
        self.requires_tls = requires_tls
        self.has_checked_tls = False
        self.is_open = False
        #: Distinct errors of the first connection, in order.
        self.connect_errors: dict[str, None] = {}
        self._refusals: list[tuple[str, asyncio.Future[str]]] = []

    def _connect_command(self) -> bytes:
        # `nats-py` uses TLS only if the server asks for it. The server's request is not encrypted, so that anybody on
        # the network could suppress it. Nothing is sent before this method returns.
        self.has_checked_tls = True
        writer = getattr(self._transport, "_io_writer", None)
        if self.requires_tls and (writer is None or writer.get_extra_info("ssl_object") is None):
            raise nats.errors.Error("the server does not offer TLS, which `ca` and `tls://` require")
        return super()._connect_command()

    async def close(self) -> None:
        # During a TLS handshake, `nats-py` waits for a stream whose end is never reported. It also ignores a
        # cancellation, so `wait_for` would not end the wait.
        closing = asyncio.ensure_future(super().close())
        # Python would otherwise print an error that occurs after the time limit.
        closing.add_done_callback(lambda task: task.cancelled() or task.exception())
        is_closed = False
        try:
            await asyncio.wait((closing,), timeout=CLOSE_TIMEOUT)
            if closing.done():
                # `nats-py` cannot close a client whose addresses are invalid, because the client has no socket yet. It
                # also sends pending data, although the server may have closed the connection.
                with suppress(AssertionError, OSError, nats.errors.Error):
                    closing.result()
                    is_closed = True
        finally:
            if not is_closed:
                closing.cancel()
                writer = getattr(self._transport, "_io_writer", None)
                if writer is not None:
                    writer.transport.abort()

    async def report(self, error: Exception) -> None:
        """Passes a permission error to the requests for its subject. Drops all other errors of an open connection,
        because the connection is restored automatically. Raises ``Forbidden``, which ends the first connection attempt,
        if a server refuses the user."""
        text = str(error) or type(error).__name__
        if not self.is_open:
            if "authorization violation" in text.lower():
                raise Forbidden(text) from error
            self.connect_errors[text] = None
        if "permissions violation" in text.lower():
            for subject, refusal in self._refusals:
                if f'"{subject.lower()}"' in text.lower() and not refusal.done():
                    refusal.set_result(text)

    @contextmanager
    def refusal_of(self, subject: str) -> Iterator[asyncio.Future[str]]:
        """Returns a future for the server's next permission error for ``subject``."""
        refusal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._refusals.append((subject, refusal))
        try:
            yield refusal
        finally:
            self._refusals.remove((subject, refusal))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Sends a request. Raises ``Forbidden`` if the server reports a permission error instead of a response."""
        with self.refusal_of(subject) as refusal:
            request = asyncio.ensure_future(super().request(subject, payload, timeout, old_style, headers))
            try:
                await asyncio.wait((request, refusal), return_when=asyncio.FIRST_COMPLETED)
                if not request.done():
                    raise Forbidden(refusal.result())
                return request.result()
            finally:
                request.cancel()

    async def request_fleet_account(self, subject: str, payload: bytes, timeout: float) -> dict[str, Any]:
        """Calls the JetStream API of the fleet's account, which can differ from the user's account.

        If the user's account imports the call, there are two responses. Ignores the one for the user's own account.
        """
        inbox = self.new_inbox()
        responses = await self.subscribe(inbox)
        try:
            with self.refusal_of(subject) as refusal:
                await self.publish(subject, payload, reply=inbox)
                while True:
                    response = asyncio.ensure_future(responses.next_msg(timeout=timeout))
                    try:
                        await asyncio.wait((response, refusal), return_when=asyncio.FIRST_COMPLETED)
                        if not response.done():
                            raise Forbidden(refusal.result())
                        message = response.result()
                    finally:
                        response.cancel()
                    if not message.data:
                        raise nats.errors.NoRespondersError
                    answer: dict[str, Any] = json.loads(message.data)
                    if answer.get("error", {}).get("err_code") != NOT_ENABLED_FOR_ACCOUNT:
                        return answer
        finally:
            await responses.unsubscribe()

    async def check_inbox(self) -> None:
        """Raises ``Forbidden`` if the user cannot receive responses."""
        inbox = self.new_inbox()
        with self.refusal_of(inbox) as refusal:
            subscription = await self.subscribe(inbox)
            # `nats-py` can send the ping of the first flush before the subscription.
            await self.flush()
            await self.flush()
            if refusal.done():
                raise Forbidden(f"{refusal.result()}; if the user belongs to a tenant, set `tenant`")
            await subscription.unsubscribe()


async def connect(
    servers: str | Sequence[str],
    inbox_prefix: str,
    nkey: str | Path | None,
    credentials: str | Path | None,
    ca: str | Path | None,
) -> Connection:
    """Connects to the servers. Raises ``Disconnected`` with the cause."""
    # A password can contain a comma.
    separator = r",(?=\s*\w+://)" if "@" in servers else ","
    addresses = re.split(separator, servers) if isinstance(servers, str) else list(servers)
    # `nats-py` ignores spaces around an address.
    addresses = [address.strip() for address in addresses]
    if not addresses:
        raise Disconnected("the list of servers is empty: add a server, such as nats://127.0.0.1:4222", "no")
    options: dict[str, Any] = {"servers": addresses, "inbox_prefix": inbox_prefix}
    if nkey is not None:
        options["nkeys_seed_str"] = read_seed(nkey)
    if credentials is not None:
        options["user_credentials"] = RawCredentials(read_credentials(credentials))
    if ca is not None:
        options["tls"] = read_certificates(ca)
    connection = Connection(ca is not None or any(address.lower().startswith("tls://") for address in addresses))
    try:
        await asyncio.wait_for(_open(connection, options), CONNECT_TIMEOUT)
    except (OSError, nats.errors.Error, asyncio.TimeoutError) as error:
        await connection.close()
        # A timeout hides the errors of all attempts.
        if isinstance(error, asyncio.TimeoutError):
            causes = "; ".join(connection.connect_errors) or "no response"
            cause = f"no connection within {CONNECT_TIMEOUT:g} s: {causes}"
        else:
            cause = str(error) or type(error).__name__
        raise Disconnected(f"failed to connect to {servers}: {cause}", "no") from error
    except BaseException:
        await connection.close()
        raise
    return connection


async def _open(connection: Connection, options: dict[str, Any]) -> None:
    # With `max_reconnect_attempts=-1`, the client also retries the first connection indefinitely.
    await connection.connect(**options, max_reconnect_attempts=-1, ping_interval=5, error_cb=connection.report)
    if connection.requires_tls and not connection.has_checked_tls:
        raise nats.errors.Error("this version of nats-py is not supported, because its use of TLS cannot be checked")
    connection.is_open = True
    await connection.check_inbox()


def read_seed(path: str | Path) -> str:
    """Reads the seed of an NKey."""
    return _checked_seed(path, _read_secret(path).strip())


def read_credentials(path: str | Path) -> str:
    """Reads a credentials file, which contains a user's JWT and seed."""
    text = _read_secret(path)
    match = CREDENTIALS.search(text)
    if match is None:
        raise Disconnected(f"{path} does not contain the JWT and the seed of a user", "no")
    _checked_seed(path, match[1])
    return text.decode()


def read_certificates(path: str | Path) -> ssl.SSLContext:
    """Reads CA certificates."""
    try:
        return ssl.create_default_context(cafile=str(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_secret(path: str | Path) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            secret = file.read()
    except OSError as error:
        raise _unreadable(path, error) from error
    if mode & 0o077:
        cause = f"{path} has mode {mode:04o}, so other users can read the secret"
        raise Disconnected(f"{cause}; run: chmod 600 {path}", "no")
    return secret


def _checked_seed(path: str | Path, seed: bytes) -> str:
    import nkeys

    try:
        nkeys.from_seed(bytearray(seed)).wipe()
        return seed.decode()
    except (nkeys.NkeysError, ValueError) as error:
        raise Disconnected(f"{path} does not contain the seed of an NKey: {type(error).__name__}", "no") from error


def _unreadable(path: str | Path, error: OSError) -> Disconnected:
    return Disconnected(f"failed to read {path}: {error.strerror or error}", "no")
