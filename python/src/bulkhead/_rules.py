"""What a worker that a template has forked puts itself under in a sandbox: rules of Landlock of its own, on top of the
template's, so that it and the others are out of each other's reach.

Rules only ever take away: these give again what the template has, but of its temporary folder one folder for this
worker alone. They also scope: no signals to, no abstract sockets of, and no tracing of the others. What the template
has is told by the keeper, in a file that is standard input (``shared/src/program_rules.rs``).
"""

from __future__ import annotations

import os
import stat
import struct
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_READ_DIR = 1 << 3
#: Rights that there are for single files: to execute, write, read, truncate, and ioctl(2).
_OF_FILES = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_TOLD_BYTES_MAX = 64 << 20
_DEPTH_MAX = 256
#: Entries of a folder that are removed in one go.
ENTRIES_AT_ONCE = 256

_PLACE = os.O_PATH | os.O_CLOEXEC
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Temporary:
    """The template's temporary folder, in which each worker has one."""

    def __init__(self, path: bytes, access: int) -> None:
        self.path = path
        self.access = access
        self.folder = os.open(path, _PLACE | os.O_DIRECTORY)
        #: Whether nothing else that is given leads to it.
        self.is_hidden = False

    def make(self, name: bytes) -> int:
        """Makes a folder in it."""
        _open_up(self.folder)
        os.mkdir(name, 0o700, dir_fd=self.folder)
        return os.open(name, _FOLDER | os.O_PATH, dir_fd=self.folder)

    def is_listable(self) -> bool:
        """Whether this process can list it."""
        try:
            os.close(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.folder))
        except PermissionError:
            return False
        return True

    def remove(self, name: bytes) -> bool:
        """Removes a folder in it, with up to ``ENTRIES_AT_ONCE`` entries; whether nothing is left to do."""
        _open_up(self.folder)
        try:
            os.rmdir(name, dir_fd=self.folder)
        except OSError:
            pass
        else:
            return True
        try:
            folder = _opened(name, self.folder)
        except OSError:
            return True
        try:
            if not _emptied(folder, ENTRIES_AT_ONCE):
                return False
            os.rmdir(name, dir_fd=self.folder)
        except OSError:
            # What cannot be removed goes with the template's own folder.
            pass
        finally:
            os.close(folder)
        return True


def _open_up(folder: int) -> None:
    """Workers have the template's user, and may have shut it."""
    if os.fstat(folder).st_mode & 0o700 != 0o700:
        try:
            os.chmod(f"/proc/self/fd/{folder}", 0o700)
        except OSError:
            pass


def _opened(name: bytes, parent: int) -> int:
    """A folder to list and to change, whatever its mode was."""
    place = os.open(name, _FOLDER | os.O_PATH, dir_fd=parent)
    try:
        _open_up(place)
    finally:
        os.close(place)
    return os.open(name, _FOLDER | os.O_RDONLY, dir_fd=parent)


def _entries(folder: int) -> Iterator[tuple[bytes, bool]]:
    """The names of a folder's entries, and which are folders."""
    with os.scandir(folder) as entries:
        first = islice(entries, ENTRIES_AT_ONCE)
        yield from [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in first]


class _TooMany(Exception):
    """There are more entries than are removed in one go."""


def _folders(folder: int, budget: Iterator[int]) -> Iterator[bytes]:
    """Removes a folder's files, and gives the names of the folders in it. Raises ``_TooMany`` at the budget's end."""
    for name, is_folder in _entries(folder):
        if next(budget, None) is None:
            raise _TooMany
        if is_folder:
            yield name
        else:
            os.unlink(name, dir_fd=folder)


def _emptied(top: int, entries_max: int) -> bool:
    """Empties a folder, however deep it is and whatever the modes in it are; False if it has more entries. What is in a
    folder in it is brought up first, so that there are two levels at any time."""
    budget = iter(range(entries_max))
    try:
        while next(_entries(top), None) is not None:
            for name in _folders(top, budget):
                folder = _opened(name, top)
                try:
                    for inner in _folders(folder, budget):
                        _bring_up(inner, folder, top)
                finally:
                    os.close(folder)
                try:
                    os.rmdir(name, dir_fd=top)
                except OSError:
                    # In the next round.
                    pass
    except _TooMany:
        return False
    return True


def _bring_up(inner: bytes, folder: int, top: int) -> None:
    """Moves a folder to the top, by a random name: one that could be guessed may be taken, and nothing moves."""
    free = b".bulkhead-" + os.urandom(16).hex().encode()
    try:
        try:
            os.rename(inner, free, src_dir_fd=folder, dst_dir_fd=top)
        except PermissionError:
            # To move a folder takes the right to write to it, since that is where its parent is noted.
            os.close(_opened(inner, folder))
            os.rename(inner, free, src_dir_fd=folder, dst_dir_fd=top)
    except FileNotFoundError:
        pass


class Rules:
    """What the template has, ready to be given to workers."""

    def __init__(
        self,
        call: Callable[..., int],
        handled: int,
        scoped: int,
        temporary: tuple[bytes, int] | None,
        grants: list[tuple[bytes, int]],
    ) -> None:
        self._call = call
        self._handled = handled
        self._scoped = scoped
        self._ruleset = -1
        self._given: list[tuple[int, int]] = []
        for path, access in grants:
            try:
                place = os.open(path, _PLACE)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                # It may be gone since.
                continue
            self._given.append((place, access))
        self.temporary = None if temporary is None else Temporary(*temporary)
        if self.temporary is not None:
            self.temporary.is_hidden = not self._leads_to(self.temporary.folder)

    def leave_temporary_files_open(self) -> bool:
        """Whether workers reach each other's temporary files, since what is given has a folder above."""
        return bool(self._handled) and self.temporary is not None and not self.temporary.is_hidden

    def _leads_to(self, folder: int) -> bool:
        """Whether a folder lies in what is given to be listed."""
        listed = {_identity(place) for place, access in self._given if access & _READ_DIR}
        here, last = os.dup(folder), None
        try:
            for _ in range(_DEPTH_MAX):
                this = _identity(here)
                if this in listed:
                    return True
                if this == last:
                    return False
                last = this
                above = os.open(b"..", _PLACE | os.O_DIRECTORY, dir_fd=here)
                os.close(here)
                here = above
        finally:
            os.close(here)
        return True

    def prepare(self) -> None:
        """Makes the rules of the next worker, but for its temporary folder, and drops those of the last one."""
        if self._ruleset >= 0:
            os.close(self._ruleset)
        self._ruleset = self._call(_CREATE_RULESET, struct.pack("<QQQ", self._handled, 0, self._scoped), 24, 0)
        for place, access in self._given:
            self._give(place, access)

    def put_in_force(self, folder: int | None) -> None:
        """Puts this process under them, for ever, and all that it starts. It reaches this temporary folder, and no
        other from then on."""
        temporary = self.temporary
        if folder is not None and temporary is not None:
            self._give(folder, temporary.access)
            os.close(folder)
        self._call(_RESTRICT_SELF, self._ruleset, 0)
        os.close(self._ruleset)
        if temporary is not None and temporary.is_hidden and temporary.is_listable():
            # Said to be in force, and are not.
            raise OSError(131, "landlock")  # ENOTRECOVERABLE

    def _give(self, place: int, access: int) -> None:
        try:
            self._call(_ADD_RULE, self._ruleset, _PATH_BENEATH, struct.pack("<Qi", access, place), 0)
        except OSError as error:
            if error.errno != 22 or not access & ~_OF_FILES:  # EINVAL: rights of folders, and it is none.
                raise
            self._give(place, access & _OF_FILES)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def told(call: Callable[..., int]) -> Rules | None:
    """What the keeper left on standard input; None without a sandbox. ``call`` makes a system call, or raises
    OSError."""
    if not stat.S_ISREG(os.fstat(0).st_mode):
        return None
    data = b""
    while len(data) < _TOLD_BYTES_MAX and (more := os.pread(0, 1 << 20, len(data))):
        data += more
    handled, scoped = struct.unpack_from("<QQ", data)
    grants: list[tuple[bytes, int]] = []
    at = 16
    while at < len(data):
        access, length = struct.unpack_from("<QI", data, at)
        at += 12 + length
        if at > len(data):
            raise ValueError("the keeper's rules end too early")
        grants.append((data[at - length : at], access))
    if not grants:
        raise ValueError("the keeper's rules end too early")
    (path, access), *others = grants
    if not handled and not scoped:
        return None
    return Rules(call, handled, scoped, (path, access) if path else None, others if handled else [])
