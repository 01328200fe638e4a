"""Isolates a template's workers from each other in a sandbox, with Landlock rules and separate temporary folders.

``_template`` creates and removes the folders, and applies the rules in each forked worker.

Each forked worker restricts itself further, because Landlock can only remove rights. The rules repeat the template's
grants, but grant only one subfolder of the template's temporary folder. The rules also set scopes: a worker cannot send
signals to other workers, connect to their abstract sockets, or trace them. The keeper passes the template's rules in a
file on standard input (``shared/src/program_rules.rs``).
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
#: Landlock rights that apply to single files: execute, write, read, truncate, ioctl(2).
_FILE_RIGHTS = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_RULES_BYTES_MAX = 64 << 20
_DEPTH_MAX = 256
#: Maximum number of folder entries that are removed in one step.
ENTRIES_AT_ONCE = 256

_PATH_FLAGS = os.O_PATH | os.O_CLOEXEC
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Temporary:
    """The template's temporary folder, which contains a folder for each worker."""

    def __init__(self, path: bytes, access: int) -> None:
        self.path = path
        self.access = access
        self.folder = os.open(path, _PATH_FLAGS | os.O_DIRECTORY)
        #: True if the folder is not below any granted path.
        self.is_hidden = False

    def make(self, name: bytes) -> int:
        """Creates a worker's folder. Returns a descriptor."""
        _restore_owner_rights(self.folder)
        os.mkdir(name, 0o700, dir_fd=self.folder)
        return os.open(name, _FOLDER | os.O_PATH, dir_fd=self.folder)

    def is_listable(self) -> bool:
        """Returns true if this process can list the folder."""
        try:
            os.close(os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.folder))
        except PermissionError:
            return False
        return True

    def remove(self, name: bytes) -> bool:
        """Removes up to ``ENTRIES_AT_ONCE`` entries of a worker's folder, and the folder if it becomes empty.

        Returns true if nothing is left to do.
        """
        _restore_owner_rights(self.folder)
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
            # Entries that cannot be removed disappear with the template's folder.
            pass
        finally:
            os.close(folder)
        return True


def _restore_owner_rights(folder: int) -> None:
    """Restores the owner's permissions. A worker can remove them, because it runs as the same user as the template."""
    if os.fstat(folder).st_mode & 0o700 != 0o700:
        try:
            os.chmod(f"/proc/self/fd/{folder}", 0o700)
        except OSError:
            pass


def _opened(name: bytes, parent: int) -> int:
    """Opens a folder for listing and changes, even if its mode forbids this."""
    place = os.open(name, _FOLDER | os.O_PATH, dir_fd=parent)
    try:
        _restore_owner_rights(place)
    finally:
        os.close(place)
    return os.open(name, _FOLDER | os.O_RDONLY, dir_fd=parent)


def _entries(folder: int) -> Iterator[tuple[bytes, bool]]:
    """Yields the names of up to ``ENTRIES_AT_ONCE`` entries of a folder, each with true if the entry is a folder."""
    with os.scandir(folder) as entries:
        first = islice(entries, ENTRIES_AT_ONCE)
        yield from [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in first]


class _TooMany(Exception):
    """The folder has more entries than can be removed in one step."""


def _folders(folder: int, budget: Iterator[int]) -> Iterator[bytes]:
    """Removes the files of a folder, and yields the names of its subfolders.

    Raises ``_TooMany`` when the budget is used up.
    """
    for name, is_folder in _entries(folder):
        if next(budget, None) is None:
            raise _TooMany
        if is_folder:
            yield name
        else:
            os.unlink(name, dir_fd=folder)


def _emptied(top: int, entries_max: int) -> bool:
    """Empties a folder of any depth and with any modes. Returns false if there are more than ``entries_max`` entries.

    Before a subfolder is removed, its own subfolders are moved to the top, so that only two levels are ever open.
    """
    budget = iter(range(entries_max))
    try:
        while next(_entries(top), None) is not None:
            for name in _folders(top, budget):
                folder = _opened(name, top)
                try:
                    for inner in _folders(folder, budget):
                        _move_to_top(inner, folder, top)
                finally:
                    os.close(folder)
                try:
                    os.rmdir(name, dir_fd=top)
                except OSError:
                    # The removal is tried again in the next round.
                    pass
    except _TooMany:
        return False
    return True


def _move_to_top(inner: bytes, folder: int, top: int) -> None:
    """Moves a folder to the top under a random name, because a worker could occupy a predictable name."""
    free = b".bulkhead-" + os.urandom(16).hex().encode()
    try:
        try:
            os.rename(inner, free, src_dir_fd=folder, dst_dir_fd=top)
        except PermissionError:
            # Moving a folder requires write permission on the folder, because it contains the entry "..".
            os.close(_opened(inner, folder))
            os.rename(inner, free, src_dir_fd=folder, dst_dir_fd=top)
    except FileNotFoundError:
        pass


class Rules:
    """The template's rights, prepared for its workers."""

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
        self._granted: list[tuple[int, int]] = []
        for path, access in grants:
            try:
                place = os.open(path, _PATH_FLAGS)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                # The path may have been removed in the meantime.
                continue
            self._granted.append((place, access))
        self.temporary = None if temporary is None else Temporary(*temporary)
        if self.temporary is not None:
            self.temporary.is_hidden = not self._is_granted(self.temporary.folder)

    def exposes_temporary_files(self) -> bool:
        """Returns true if workers can access each other's temporary files, because a parent folder is granted."""
        return bool(self._handled) and self.temporary is not None and not self.temporary.is_hidden

    def _is_granted(self, folder: int) -> bool:
        """Returns true if a folder is below a granted folder that can be listed."""
        listed = {_identity(place) for place, access in self._granted if access & _READ_DIR}
        here, last = os.dup(folder), None
        try:
            for _ in range(_DEPTH_MAX):
                this = _identity(here)
                if this in listed:
                    return True
                if this == last:
                    return False
                last = this
                above = os.open(b"..", _PATH_FLAGS | os.O_DIRECTORY, dir_fd=here)
                os.close(here)
                here = above
        finally:
            os.close(here)
        return True

    def prepare(self) -> None:
        """Creates the rules for the next worker, except for its temporary folder. Drops the previous rules."""
        if self._ruleset >= 0:
            os.close(self._ruleset)
        self._ruleset = self._call(_CREATE_RULESET, struct.pack("<QQQ", self._handled, 0, self._scoped), 24, 0)
        for place, access in self._granted:
            self._grant(place, access)

    def enforce(self, folder: int | None) -> None:
        """Applies the rules irrevocably to this process and to all processes that it starts.

        Afterwards ``folder`` is the only accessible temporary folder.
        """
        temporary = self.temporary
        if folder is not None and temporary is not None:
            self._grant(folder, temporary.access)
            os.close(folder)
        self._call(_RESTRICT_SELF, self._ruleset, 0)
        os.close(self._ruleset)
        if temporary is not None and temporary.is_hidden and temporary.is_listable():
            # The kernel accepted the rules, but they have no effect.
            raise OSError(131, "landlock")  # ENOTRECOVERABLE

    def _grant(self, place: int, access: int) -> None:
        try:
            self._call(_ADD_RULE, self._ruleset, _PATH_BENEATH, struct.pack("<Qi", access, place), 0)
        except OSError as error:
            if error.errno != 22 or not access & ~_FILE_RIGHTS:  # EINVAL: some rights are not valid for files.
                raise
            self._grant(place, access & _FILE_RIGHTS)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def read(call: Callable[..., int]) -> Rules | None:
    """Reads the rules that the keeper passed on standard input. Returns None if there is no sandbox.

    ``call`` makes a system call, or raises OSError.
    """
    if not stat.S_ISREG(os.fstat(0).st_mode):
        return None
    data = b""
    while len(data) < _RULES_BYTES_MAX and (more := os.pread(0, 1 << 20, len(data))):
        data += more
    handled, scoped = struct.unpack_from("<QQ", data)
    grants: list[tuple[bytes, int]] = []
    at = 16
    while at < len(data):
        access, length = struct.unpack_from("<QI", data, at)
        at += 12 + length
        if at > len(data):
            raise ValueError("the keeper's rules are truncated")
        grants.append((data[at - length : at], access))
    if not grants:
        raise ValueError("the keeper's rules are truncated")
    (path, access), *others = grants
    if not handled and not scoped:
        return None
    return Rules(call, handled, scoped, (path, access) if path else None, others if handled else [])
