"""Defines ``Reply``, the result of a job with the outcome ``ok``. Jobs with other outcomes raise a ``JobError``.

The clients and ``fleet`` return replies. ``BulkheadExecutor`` returns the values of its functions instead.
"""

from __future__ import annotations

from . import _wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .errors import Outcome


class Reply:
    """Result of a job with the outcome ``ok``: its ``payload``, and an ``outcome`` with times, attempts and worker."""

    __slots__ = ("_metadata", "_outcome", "payload")

    #: Payload of the result. Large payloads are ``bytearray`` objects.
    payload: bytes | bytearray

    def __init__(self, payload: bytes | bytearray, metadata: bytes, outcome: Outcome | None = None) -> None:
        self.payload = payload
        self._metadata = metadata
        # Decoded from the metadata on first use, unless the reply has no metadata.
        self._outcome = outcome

    @property
    def outcome(self) -> Outcome:
        """Details of the outcome."""
        if self._outcome is None:
            self._outcome = _wire.outcome(self._metadata)
        return self._outcome

    def __bytes__(self) -> bytes:
        return bytes(self.payload)

    def __repr__(self) -> str:
        return f"<Reply of {len(self.payload)} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Reply, (self.payload, self._metadata, self._outcome)
