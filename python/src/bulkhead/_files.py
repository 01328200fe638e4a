"""Encodes values with large buffers, and transfers them in memory files (``docs/protocol-extensions.md``).

``_pool`` writes large calls to files that are leased from the supervisor, and a worker writes its results to such
files. Only the supervisor creates the files and decides who gets them.

An encoded value consists of a head, the sizes of the buffers, the pickle, and the buffers, each at the start of a page.
The head contains sizes but no offsets, so that buffers cannot overlap even if the writer is hostile.
"""

from __future__ import annotations

import _socket
import mmap
import os
import struct
import time
import weakref

from . import _wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

#: First byte of an encoded value with buffers.
PIECES = b"P"
#: Tag byte, number of buffers, size of the pickle. The sizes of the buffers follow.
_HEAD = struct.Struct("<cxxxIQ")
_LEASE_REF = struct.Struct("<QQ")
#: Minimum size of a buffer that is kept outside the pickle.
BUFFER_BYTES_MIN = 64 * 1024
_BUFFERS_MAX = _wire.FRAME_BYTES_MAX // BUFFER_BYTES_MIN
#: Minimum size of a call that uses a memory file. Smaller calls benefit more from prefetching.
LARGE_BYTES_MIN = 512 * 1024
#: Minimum size of a buffer that a worker maps. Copying a smaller buffer is faster than mapping it.
MAPPED_BYTES_MIN = 256 * 1024
#: Maximum number of mappings in a worker, for the running call and for kept arrays. Each mapping uses a descriptor.
_MAPPINGS_MAX = 32
#: Minimum size of a copy that uses huge pages.
_HUGE_BYTES_MIN = 4 << 20
#: `MADV_POPULATE_WRITE`, available since Linux 5.14.
_POPULATE_WRITE = 23
#: Maximum number of leases in one client request.
_REQUESTS_MAX = 4
#: Time after a refusal before a client requests another lease, in seconds.
_RETRY_SECONDS = 0.25
#: Idle time of a lease, in seconds, after which the supervisor may have recalled the lease while this process was
#: stopped.
_FRESH_SECONDS = 4.0


#: Consecutive parts of a payload: a pickle alone, or an encoded value with buffers.
Pieces = list[bytes | memoryview]


def pieces(pickled: bytes, buffers: Sequence[memoryview]) -> Pieces:
    """Returns the parts of a value whose buffers are outside the pickle."""
    if not buffers:
        return [pickled]
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    head: bytes | memoryview = _HEAD.pack(PIECES, len(buffers), len(pickled)) + sizes + pickled
    return [part for piece in (head, *buffers) for part in (piece, bytes(-len(piece) % mmap.PAGESIZE))]


def _write(payload: Pieces, target: mmap.mmap) -> int:
    """Copies a payload to the start of a file, which must be large enough. Returns the size of the payload."""
    target.seek(0)
    return sum(map(target.write, payload))


def _places(data: memoryview) -> Iterator[slice]:
    """Yields the positions of the pickle and the buffers. Raises ``ValueError`` for an invalid head.

    Reads each byte of the head only once, because another process may be writing to the file.
    """
    if len(data) < _HEAD.size:
        raise ValueError("the value is truncated")
    _, count, pickled = _HEAD.unpack(bytes(data[: _HEAD.size]))
    at = _HEAD.size + 8 * count
    if count > _BUFFERS_MAX or at > len(data):
        raise ValueError(f"the value announces {count} buffers, which is too many")
    for size in (pickled, *struct.unpack(f"<{count}Q", bytes(data[_HEAD.size : at]))):
        if size > len(data) - at:
            raise ValueError(f"a buffer of {size} bytes extends beyond the end of the value")
        yield slice(at, at + size)
        at += size + -(at + size) % mmap.PAGESIZE


def parts(data: _wire.Buffer, buffer: Callable[[slice], Any] | None = None) -> list[Any]:
    """Returns the pickle, as a view, and writable buffers.

    The buffers are copies, or the results of ``buffer`` for their positions. Raises ``ValueError`` for an invalid head.
    """
    view = memoryview(data)
    if view[:1] != PIECES:
        return [view]
    pickled, *places = _places(view)
    return [view[pickled], *(buffer(place) if buffer else copied(view[place]) for place in places)]


def _anonymous(kind: type[mmap.mmap], size: int, flags: int) -> mmap.mmap:
    """Returns an anonymous mapping. Raises ``MemoryError``."""
    try:
        return kind(-1, size, flags=flags | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None


def copied(view: memoryview) -> bytearray | mmap.mmap:
    """Returns a private copy. A large copy uses huge pages, because page faults on small pages would dominate."""
    if len(view) < _HUGE_BYTES_MIN:
        return bytearray(view)
    memory = _anonymous(mmap.mmap, len(view), mmap.MAP_PRIVATE)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # The kernel does not support huge pages.
        pass
    memory[:] = view
    return memory


class SharedPayload(mmap.mmap):
    """Shared memory for a payload that exceeds the data limit (``RLIMIT_DATA``), which excludes shared memory."""


def payload_buffer(size: int) -> Any:
    """Returns a buffer for a payload. Raises ``MemoryError`` if no memory is available even beyond the data limit."""
    try:
        return bytearray(size)
    except MemoryError:
        return _anonymous(SharedPayload, size, mmap.MAP_SHARED)


def receiver(socket: _socket.socket, descriptors: list[int]) -> Callable[[int, int], bytes]:
    """Returns a function like the socket's ``recv`` that adds received descriptors to ``descriptors``."""
    space = _socket.CMSG_SPACE(8 * 4)

    def receive(size: int, flags: int) -> bytes:
        data, control, _, _ = socket.recvmsg(size, space, flags | _socket.MSG_CMSG_CLOEXEC)
        for level, kind, found in control:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                descriptors.extend(struct.unpack(f"{len(found) // 4}i", found[: len(found) // 4 * 4]))
        return data

    return receive


class Pair:
    """Two memory files of equal size. Each side of the connection writes to one of the files."""

    def __init__(self, size: int, descriptors: list[int], own: int) -> None:
        pair, descriptors[:] = descriptors[:2], descriptors[2:]
        try:
            if len(pair) < 2:
                raise OSError("the message contains fewer memory files than it announces: see `rlimits.nofile`")
            self.own = mmap.mmap(pair[own], size)
            self.other = memoryview(mmap.mmap(pair[1 - own], size, prot=mmap.PROT_READ))
            self.other_file = pair.pop(1 - own)
        finally:
            for descriptor in pair:
                os.close(descriptor)

    def __del__(self) -> None:
        # Each mapping is removed when its last view is garbage-collected.
        if hasattr(self, "other_file"):
            os.close(self.other_file)


class Lease(Pair):
    """Two files lent to this client. Only one call uses them at a time. The payload is written to the client's file."""

    def __init__(self, number: int, size: int, owner: bytes, descriptors: list[int]) -> None:
        super().__init__(size, descriptors, 0)
        self.number = number
        self.owner = owner
        self.is_recalled = False
        self.used_at = time.monotonic()

    def write(self, submission: bytes, payload: Pieces) -> bytes:
        """Writes a call to the file. Returns the metadata of its SUBMIT frame."""
        lease_ref = _LEASE_REF.pack(self.number, _write(payload, self.own))
        return _wire.with_extension(submission, _wire.LEASE_REF, lease_ref)

    def read(self, lease_ref: bytes) -> list[Any]:
        """Returns copies of the parts of a result.

        Raises ``ValueError`` if the result is invalid or the lease was revoked.
        """
        number, size = _LEASE_REF.unpack(lease_ref)
        if number != self.number or size > len(self.other):
            raise ValueError("the result is not in the call's memory file")
        pickled, *buffers = parts(self.other[:size])
        found = [bytes(pickled), *buffers]
        if os.fstat(self.other_file).st_mode & 0o777:
            raise ValueError("the supervisor revoked the result before this program read it")
        return found


class Leases:
    """The leases of one connection. The caller of every method must hold the pool's lock."""

    def __init__(self, send: Callable[[Sequence[bytes]], None], descriptors: list[int]) -> None:
        self._send = send
        self._descriptors = descriptors
        self._free: list[Lease] = []
        #: Leases in use by calls, by lease number.
        self.used: dict[int, Lease] = {}
        #: Bulkhead and tenant of requested leases, by request number.
        self._requested: dict[int, bytes] = {}
        self._last_request = 0
        self._refused_at = -_RETRY_SECONDS
        #: True if the supervisor has replied to the last request. Callers poll this flag, because a blocking wait would
        #: hold a lock, and a signal handler during the wait can submit calls or raise an exception.
        self.is_answered = True

    def _send_empty(self, kind: int, number: int) -> None:
        self._send((_wire.frame(kind, number),))

    def take(self, submission: bytes, size: int, most: int, has_unread: Callable[[], bool]) -> Lease | None:
        """Returns a free lease for a call of this size, or None.

        If no lease is free, requests a lease for later calls from the supervisor.
        """
        owner, now = _wire.lease_owner(submission), time.monotonic()
        for lease in reversed(self._free):
            if lease.owner == owner:
                if now - lease.used_at > _FRESH_SECONDS and has_unread():
                    return None
                self._free.remove(lease)
                if len(lease.own) >= size:
                    self.used[lease.number] = lease
                    return lease
                self._send_empty(_wire.LEASE_RETURNED, lease.number)
                break
        is_early = now - self._refused_at < _RETRY_SECONDS
        if not is_early and len(self._requested) < min(_REQUESTS_MAX, most - len(self.used)):
            self._last_request += 1
            self._requested[self._last_request] = owner
            self.is_answered = False
            self._send((_wire.frame(_wire.LEASE, self._last_request, owner + _wire.NUMBER.pack(size) + _wire.EMPTY),))
        return None

    def put_back(self, lease: Lease, *, is_answered: bool = True) -> None:
        """Ends the use of a lease by a call.

        If the call has no outcome yet, its worker may still write to the file, so the lease is returned to the
        supervisor.
        """
        if self.used.get(lease.number) is not lease:
            return
        del self.used[lease.number]
        if lease.is_recalled or not is_answered:
            self._send_empty(_wire.LEASE_RETURNED, lease.number)
        else:
            lease.used_at = time.monotonic()
            self._free.append(lease)

    def handle(self, kind: int, number: int, metadata: bytes) -> None:
        """Handles a frame about leases from the supervisor."""
        if kind == _wire.LEASE_ENDED:
            if number in self.used:
                self.used[number].is_recalled = True
                return
            # A lease that is not free has already been returned.
            for lease in [lease for lease in self._free if lease.number == number]:
                self._free.remove(lease)
                self._send_empty(_wire.LEASE_RETURNED, number)
            return
        owner = self._requested.pop(number, None)
        self.is_answered = True
        if kind == _wire.LEASED and owner is not None:
            lent, size = _LEASE_REF.unpack_from(metadata)
            try:
                self._free.append(Lease(lent, size, owner, self._descriptors))
            except (OSError, ValueError):
                self._send_empty(_wire.LEASE_RETURNED, lent)
            else:
                self._send_empty(_wire.LEASE_TAKEN, lent)
                return
        self._refused_at = time.monotonic()


class Written:
    """A result in a memory file."""

    def __init__(self, lease: int, size: int) -> None:
        self.extension = _wire.extensions((_wire.LEASE_REF, _LEASE_REF.pack(lease, size)))
        self.size = size


#: Mappings of buffers that functions have kept after their call.
_kept: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Loan:
    """A job's payload in a memory file, and the file for its result."""

    __slots__ = ("_files", "_lease", "_mappings", "_size")

    def __init__(self, lent: dict[int, Pair], lease_ref: bytes) -> None:
        self._lease, self._size = _LEASE_REF.unpack(lease_ref)
        self._files = lent[self._lease]
        self._mappings: list[mmap.mmap] = []

    def parts(self) -> list[Any]:
        """Returns the pickle and its buffers. The function may write to the buffers."""
        return parts(self._files.other[: self._size], self._buffer)

    def _buffer(self, place: slice) -> Any:
        size = place.stop - place.start
        if size >= MAPPED_BYTES_MIN and len(self._mappings) + len(_kept) < _MAPPINGS_MAX:
            try:
                # Copy-on-write: a page is shared with the file until it is written to.
                mapping = mmap.mmap(self._files.other_file, size, flags=mmap.MAP_PRIVATE, offset=place.start)
                self._mappings.append(mapping)
                return mapping
            except OSError:
                # The mapping exceeds `rlimits`. A copy may still fit; if it does not, copying raises MemoryError.
                pass
        return copied(self._files.other[place])

    def write(self, result: Pieces) -> Written | bytes:
        """Writes a large result to the file if it fits. Otherwise returns the result as bytes."""
        if not LARGE_BYTES_MIN <= sum(map(len, result)) <= len(self._files.own):
            return b"".join(result)
        return Written(self._lease, _write(result, self._files.own))

    def release(self) -> None:
        """Ends the loan. The client can then overwrite the file, but buffers that the function kept stay unchanged.

        Kept mappings are detached from the file by writing to each page.
        """
        while self._mappings:
            mapping = self._mappings.pop()
            try:
                mapping.close()
            except BufferError:
                _kept.add(mapping)
                try:
                    mapping.madvise(_POPULATE_WRITE)
                except OSError:
                    mapping[:: mmap.PAGESIZE] = mapping[:: mmap.PAGESIZE]
