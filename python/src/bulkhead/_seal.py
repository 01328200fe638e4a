"""Installs the seccomp filter ("seal") of a strictly confined worker before its first job.

The supervisor compiles the filter and sends it in the welcome. ``_serve`` calls this module.
"""

from __future__ import annotations

import os

_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_TSYNC = 1
_PR_SET_DUMPABLE = 4
_INSTRUCTION_BYTES = 8


class SealFailed(Exception):
    """The filter could not be installed. The worker must not run jobs."""


def install(instructions: bytes) -> None:
    """Applies a seccomp filter to all current and future threads of this process.

    Also makes the process non-dumpable, so that the user's other processes cannot read its memory. Raises
    ``SealFailed``.
    """
    try:
        import ctypes
    except ImportError as error:
        raise SealFailed(f"a strictly confined worker needs ctypes: {error}") from None

    machine = os.uname().machine
    number = _SYS_SECCOMP.get(machine)
    if number is None:
        raise SealFailed(f"the system call number of seccomp(2) on {machine} is unknown")
    count, rest = divmod(len(instructions), _INSTRUCTION_BYTES)
    if not 0 < count <= 0xFFFF or rest:
        raise SealFailed("the supervisor sent an invalid filter")

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    program = Program(count, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    # prctl(2) is called first, because the filter may forbid this call.
    if libc.prctl(ctypes.c_int(_PR_SET_DUMPABLE), *[ctypes.c_ulong(0)] * 4) != 0:
        raise SealFailed(f"prctl: {os.strerror(ctypes.get_errno())}")
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER),
        ctypes.c_ulong(_SECCOMP_FILTER_FLAG_TSYNC),
        ctypes.byref(program),
    )
    if result > 0:
        raise SealFailed(f"thread {result} has a seccomp filter that the other threads do not have")
    if result != 0:
        raise SealFailed(f"seccomp: {os.strerror(ctypes.get_errno())}")
