"""The admin socket of a supervisor: HTTP over a Unix socket, one request for each connection."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from itertools import chain
from typing import Any

#: Seconds in which an answer must come.
ANSWER_SECONDS_MAX = 10.0


class AdminError(RuntimeError):
    """The admin socket answered otherwise than by 200; the text says what it answered."""


def ask(admin: str, path: str) -> tuple[socket.socket, bytes]:
    """Sends a request; the connection, and what came of the answer's body with its head."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_SECONDS_MAX)
        connection.connect(admin)
        # By HTTP/1.0 the body is not sent in chunks: it ends with the connection.
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\nAccept: application/json\r\n\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            more = connection.recv(65536)
            if not more:
                raise AdminError(f"the admin socket closed the connection: GET {path}")
            answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1]
        if status != b"200":
            body += b"".join(_pieces(connection))
            raise AdminError(f"GET {path}: {status.decode()} {body.decode(errors='replace')}")
        return connection, body
    except BaseException:
        connection.close()
        raise


def _pieces(connection: socket.socket) -> Iterator[bytes]:
    """Receives until the supervisor closes the connection."""
    return iter(lambda: connection.recv(65536), b"")


def get(admin: str, path: str) -> Any:
    """What a path answers, as JSON. Raises ``AdminError``, or ``OSError`` if there is no supervisor."""
    connection, body = ask(admin, path)
    with connection:
        return json.loads(body + b"".join(_pieces(connection)))


def lines(connection: socket.socket, body: bytes) -> Iterator[Any]:
    """The JSON lines of an answer as they come, until the supervisor ends."""
    with connection:
        connection.settimeout(None)
        rest = b""
        for piece in chain((body,), _pieces(connection)):
            *whole, rest = (rest + piece).split(b"\n")
            yield from map(json.loads, filter(None, whole))
