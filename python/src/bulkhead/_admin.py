"""Client for a supervisor's admin socket. Sends HTTP over a Unix socket, with one connection per request.

The executor reads the state and output of a private supervisor with this client. Jobs use ``_connection``.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from itertools import chain
from typing import Any

#: Timeout of each socket operation, in seconds.
RESPONSE_SECONDS_MAX = 10.0


class AdminError(RuntimeError):
    """The supervisor responded with a status other than 200. The error text contains the status and the body."""


def request(admin: str, path: str, seconds_max: float = RESPONSE_SECONDS_MAX) -> tuple[socket.socket, bytes]:
    """Sends a GET request. Returns the connection and the part of the body that arrived together with the head.

    ``seconds_max`` is the timeout of each socket operation.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds_max)
        connection.connect(admin)
        # HTTP/1.0 prevents chunked encoding: the body ends when the connection is closed.
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n\r\n".encode())
        response = b""
        while b"\r\n\r\n" not in response:
            more = connection.recv(65536)
            if not more:
                raise AdminError(f"the admin socket closed the connection: GET {path}")
            response += more
        head, _, body = response.partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1]
        if status != b"200":
            body += b"".join(_pieces(connection))
            raise AdminError(f"GET {path}: {status.decode()} {body.decode(errors='replace')}")
        return connection, body
    except BaseException:
        connection.close()
        raise


def _pieces(connection: socket.socket) -> Iterator[bytes]:
    """Yields received data until the supervisor closes the connection."""
    return iter(lambda: connection.recv(65536), b"")


def get(admin: str, path: str, seconds_max: float = RESPONSE_SECONDS_MAX) -> Any:
    """Returns the parsed JSON response for a path.

    Raises ``AdminError``, or ``OSError`` if no supervisor is listening.
    """
    connection, body = request(admin, path, seconds_max)
    with connection:
        return json.loads(body + b"".join(_pieces(connection)))


def lines(connection: socket.socket, body: bytes) -> Iterator[Any]:
    """Yields the parsed lines of a JSON Lines response as they arrive, until the supervisor closes the connection."""
    with connection:
        connection.settimeout(None)
        rest = b""
        for piece in chain((body,), _pieces(connection)):
            *whole, rest = (rest + piece).split(b"\n")
            yield from map(json.loads, filter(None, whole))
