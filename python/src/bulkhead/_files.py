"""Memory files (``docs/protocol.md``): values with large buffers in one piece, and the leases of client and worker.

A value in one piece is a head, the sizes of the buffers, the pickle, and each buffer at the beginning of a page. The
head names no places that a reader would have to believe, so that buffers cannot overlap.
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

#: First byte of a value in one piece.
PIECES = b"P"
#: The letter, the number of buffers, the bytes of the pickle. The sizes of the buffers follow.
_HEAD = struct.Struct("<cxxxIQ")
_NAMED = struct.Struct("<QQ")
#: Bytes of the smallest buffer that is not copied into the pickle.
BUFFER_BYTES_MIN = 64 * 1024
_BUFFERS_MAX = _wire.FRAME_BYTES_MAX // BUFFER_BYTES_MIN
#: Bytes of the smallest call that goes by a memory file: smaller ones gain more by being sent ahead.
LARGE_BYTES_MIN = 512 * 1024
#: Bytes of the smallest buffer that a worker maps; smaller ones are copied sooner than mapped.
MAPPED_BYTES_MIN = 256 * 1024
#: Maximum number of mappings of a worker, for the running call and for kept arrays. Each has a descriptor.
_MAPPINGS_MAX = 32
#: Bytes of the smallest copy that is worth huge pages.
_HUGE_BYTES_MIN = 4 << 20
#: `MADV_POPULATE_WRITE`, since Linux 5.14.
_POPULATE_WRITE = 23
#: Leases that a client asks for at once.
_ASKED_MAX = 4
#: Seconds after a refusal before a client asks again.
_ASK_AGAIN_SECONDS = 0.25
#: Seconds without a call after which a lease may have been recalled, in a process that was stopped meanwhile.
_FRESH_SECONDS = 4.0


#: A payload in the order of its bytes: a pickle alone, or a value in one piece.
Pieces = list[bytes | memoryview]


def pieces(pickled: bytes, buffers: Sequence[memoryview]) -> Pieces:
    """A pickle with the buffers that stay outside of it."""
    if not buffers:
        return [pickled]
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    head: bytes | memoryview = _HEAD.pack(PIECES, len(buffers), len(pickled)) + sizes + pickled
    return [part for piece in (head, *buffers) for part in (piece, bytes(-len(piece) % mmap.PAGESIZE))]


def _write(payload: Pieces, target: mmap.mmap) -> int:
    """Copies a payload to the beginning of a file that has room for it; how many bytes it has."""
    target.seek(0)
    return sum(map(target.write, payload))


def _places(data: memoryview) -> Iterator[slice]:
    """The places of the pickle and of the buffers. Reads each byte of the head once, since another process may be
    writing there. Raises ``ValueError``."""
    if len(data) < _HEAD.size:
        raise ValueError("the value is cut off")
    _, count, pickled = _HEAD.unpack(bytes(data[: _HEAD.size]))
    at = _HEAD.size + 8 * count
    if count > _BUFFERS_MAX or at > len(data):
        raise ValueError(f"the value says that it has {count} buffers")
    for size in (pickled, *struct.unpack(f"<{count}Q", bytes(data[_HEAD.size : at]))):
        if size > len(data) - at:
            raise ValueError(f"a buffer of {size} bytes reaches beyond the end")
        yield slice(at, at + size)
        at += size + -(at + size) % mmap.PAGESIZE


def parts(data: _wire.Buffer, buffer: Callable[[slice], Any] | None = None) -> list[Any]:
    """Returns the pickle in place, and writable buffers: copies, or the results of ``buffer`` for their places. Raises
    ``ValueError`` for an invalid head."""
    view = memoryview(data)
    if view[:1] != PIECES:
        return [view]
    pickled, *places = _places(view)
    return [view[pickled], *(buffer(place) if buffer else copied(view[place]) for place in places)]


def copied(view: memoryview) -> bytearray | mmap.mmap:
    """Makes a private copy. A large copy uses huge pages, because small pages would take longer to get than to fill."""
    if len(view) < _HUGE_BYTES_MIN:
        return bytearray(view)
    memory = mmap.mmap(-1, len(view), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # This kernel has no huge pages.
        pass
    memory[:] = view
    return memory


def receiver(socket: _socket.socket, descriptors: list[int]) -> Callable[[int, int], bytes]:
    """The socket's ``recv``, which keeps the descriptors that come along."""
    space = _socket.CMSG_SPACE(8 * 4)

    def receive(size: int, flags: int) -> bytes:
        data, control, _, _ = socket.recvmsg(size, space, flags | _socket.MSG_CMSG_CLOEXEC)
        for level, kind, found in control:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                descriptors.extend(struct.unpack(f"{len(found) // 4}i", found[: len(found) // 4 * 4]))
        return data

    return receive


class Pair:
    """Two files of one size: this side writes to one, the other side to the other."""

    def __init__(self, size: int, descriptors: list[int], own: int) -> None:
        pair, descriptors[:] = descriptors[:2], descriptors[2:]
        try:
            if len(pair) < 2:
                raise OSError("they did not come along: see `rlimits.nofile`")
            self.own = mmap.mmap(pair[own], size)
            self.other = memoryview(mmap.mmap(pair[1 - own], size, prot=mmap.PROT_READ))
            self.other_file = pair.pop(1 - own)
        finally:
            for descriptor in pair:
                os.close(descriptor)

    def __del__(self) -> None:
        # Each mapping is removed with its last view.
        if hasattr(self, "other_file"):
            os.close(self.other_file)


class Lease(Pair):
    """Two files that the supervisor lends to this client, for one call at a time: its own has the payload."""

    def __init__(self, number: int, size: int, whose: bytes, descriptors: list[int]) -> None:
        super().__init__(size, descriptors, 0)
        self.number = number
        self.whose = whose
        self.is_recalled = False
        self.used_at = time.monotonic()

    def write(self, submission: bytes, payload: Pieces) -> bytes:
        """Writes a call into the file. Returns the metadata of its SUBMIT."""
        named = _NAMED.pack(self.number, _write(payload, self.own))
        return _wire.with_extension(submission, _wire.LEASED_BYTES, named)

    def read(self, named: bytes) -> list[Any]:
        """Copies the parts of a result. Raises ``ValueError`` if the result is invalid or its lease was recalled."""
        number, size = _NAMED.unpack(named)
        if number != self.number or size > len(self.other):
            raise ValueError("the result is not in the file of its call")
        pickled, *buffers = parts(self.other[:size])
        found = [bytes(pickled), *buffers]
        if os.fstat(self.other_file).st_mode & 0o777:
            raise ValueError("the supervisor took the result back before it was read")
        return found


class Leases:
    """The leases of one connection. The pool's lock is held in all calls."""

    def __init__(self, say: Callable[[Sequence[bytes]], None], descriptors: list[int]) -> None:
        self._say = say
        self._descriptors = descriptors
        self._free: list[Lease] = []
        #: Leases that calls use, by number.
        self.used: dict[int, Lease] = {}
        #: Bulkhead and tenant of leases that were asked for, by the number of the request.
        self._asked: dict[int, bytes] = {}
        self._last_asked = 0
        self._refused_at = -_ASK_AGAIN_SECONDS
        #: Whether an answer has come since one was asked for. It is looked at again and again: what waits without a
        #: pause has a lock, and a signal's handler that comes meanwhile may submit calls, or raise.
        self.is_answered = True

    def _tell(self, kind: int, number: int) -> None:
        self._say((_wire.frame(kind, number),))

    def take(self, submission: bytes, size: int, most: int, has_unread: Callable[[], bool]) -> Lease | None:
        """Returns a free lease for a call of this size. If there is no such lease, asks the supervisor for one for
        later calls."""
        whose, now = _wire.lessee(submission), time.monotonic()
        for lease in reversed(self._free):
            if lease.whose == whose:
                if now - lease.used_at > _FRESH_SECONDS and has_unread():
                    return None
                self._free.remove(lease)
                if len(lease.own) >= size:
                    self.used[lease.number] = lease
                    return lease
                self._tell(_wire.LEASE_RETURNED, lease.number)
                break
        is_early = now - self._refused_at < _ASK_AGAIN_SECONDS
        if not is_early and len(self._asked) < min(_ASKED_MAX, most - len(self.used)):
            self._last_asked += 1
            self._asked[self._last_asked] = whose
            self.is_answered = False
            self._say((_wire.frame(_wire.LEASE, self._last_asked, whose + _wire.NUMBER.pack(size) + _wire.EMPTY),))
        return None

    def put_back(self, lease: Lease, *, is_answered: bool = True) -> None:
        """Ends a call's use of a lease. If the call has no answer, its worker may still be writing, so the lease is
        given back."""
        if self.used.get(lease.number) is not lease:
            return
        del self.used[lease.number]
        if lease.is_recalled or not is_answered:
            self._tell(_wire.LEASE_RETURNED, lease.number)
        else:
            lease.used_at = time.monotonic()
            self._free.append(lease)

    def told(self, kind: int, number: int, metadata: bytes) -> None:
        """Takes a frame of the supervisor about leases."""
        if kind == _wire.LEASE_ENDED:
            if number in self.used:
                self.used[number].is_recalled = True
                return
            # A lease that is not free was given back already.
            for lease in [lease for lease in self._free if lease.number == number]:
                self._free.remove(lease)
                self._tell(_wire.LEASE_RETURNED, number)
            return
        whose = self._asked.pop(number, None)
        self.is_answered = True
        if kind == _wire.LEASED and whose is not None:
            lent, size = _NAMED.unpack_from(metadata)
            try:
                self._free.append(Lease(lent, size, whose, self._descriptors))
            except (OSError, ValueError):
                self._tell(_wire.LEASE_RETURNED, lent)
            else:
                self._tell(_wire.LEASE_TAKEN, lent)
                return
        self._refused_at = time.monotonic()


class Written:
    """A result that stands in a memory file."""

    def __init__(self, lease: int, size: int) -> None:
        self.extension = _wire.extensions((_wire.LEASED_BYTES, _NAMED.pack(lease, size)))
        self.size = size


#: Mappings of what functions have kept.
_kept: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Loan:
    """A job's payload in a memory file, and the file for its result."""

    __slots__ = ("_files", "_lease", "_mappings", "_size")

    def __init__(self, lent: dict[int, Pair], named: bytes) -> None:
        self._lease, self._size = _NAMED.unpack(named)
        self._files = lent[self._lease]
        self._mappings: list[mmap.mmap] = []

    def parts(self) -> list[Any]:
        """The pickle and its buffers, which the function may write to."""
        return parts(self._files.other[: self._size], self._buffer)

    def _buffer(self, place: slice) -> Any:
        size = place.stop - place.start
        if size >= MAPPED_BYTES_MIN and len(self._mappings) + len(_kept) < _MAPPINGS_MAX:
            try:
                # Each page is the file's until it is written to.
                mapping = mmap.mmap(self._files.other_file, size, flags=mmap.MAP_PRIVATE, offset=place.start)
                self._mappings.append(mapping)
                return mapping
            except OSError:
                # `rlimits` leave no room for it. What copies finds room, or raises MemoryError.
                pass
        return copied(self._files.other[place])

    def write(self, result: Pieces) -> Written | bytes:
        """Writes a large result into its file if that has room."""
        if not LARGE_BYTES_MIN <= sum(map(len, result)) <= len(self._files.own):
            return b"".join(result)
        return Written(self._lease, _write(result, self._files.own))

    def release(self) -> None:
        """The call is over, and the client may write to the file. What the function has kept keeps its values."""
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
