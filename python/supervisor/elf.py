"""Reads the platform requirements of ELF programs, and derives the platform tag of a wheel from them.

``hatch_build`` requests the tag. This module only reads the programs, and never runs or changes them.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 22: "s390x", 21: "ppc64le"}
_PT_INTERP = 3
_SHT_GNU_VERNEED = 0x6FFFFFFE


@dataclass(frozen=True)
class Needs:
    """Machine, program interpreter (empty if static) and symbol versions such as ``GLIBC_2.34``."""

    machine: str
    interpreter: str
    versions: frozenset[str]


def needs_of(path: Path) -> Needs:
    """Reads a 64-bit little-endian ELF file. Raises ``ValueError`` for other files."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
    (machine,) = struct.unpack_from("<H", data, 18)
    program_headers, section_headers = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    if machine not in _MACHINES:
        raise ValueError(f"{path} is for an unknown machine: {machine}")
    interpreter = ""
    for index in range(program_count):
        at = program_headers + index * program_size
        kind, _flags, offset, _virtual, _physical, size = struct.unpack_from("<IIQQQQ", data, at)
        if kind == _PT_INTERP:
            interpreter = data[offset : offset + size].rstrip(b"\0").decode()
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, section_headers + index * section_size)
        for index in range(section_count)
    ]
    versions: set[str] = set()
    for _name, kind, _flags, _address, offset, _size, link, count, _align, _entry in sections:
        if kind == _SHT_GNU_VERNEED:
            versions |= _versions(data, offset, count, texts=sections[link][4])
    return Needs(_MACHINES[machine], interpreter, frozenset(versions))


def _versions(data: bytes, at: int, count: int, *, texts: int) -> set[str]:
    found: set[str] = set()
    for _ in range(count):
        _version, entries, _file, first, following = struct.unpack_from("<HHIII", data, at)
        entry = at + first
        for _ in range(entries):
            _hash, _flags, _other, name, after = struct.unpack_from("<IHHII", data, entry)
            end = data.index(b"\0", texts + name)
            found.add(data[texts + name : end].decode())
            entry += after
        at += following
    return found


def platform_tag(programs: list[Path]) -> str:
    """Returns the platform tag of a wheel with these programs, such as ``manylinux_2_34_x86_64``."""
    needs = [needs_of(path) for path in programs]
    machines = {each.machine for each in needs}
    if len(machines) != 1:
        raise ValueError(f"the programs are for different machines: {sorted(machines)}")
    (machine,) = machines
    interpreters = [each.interpreter for each in needs if each.interpreter]
    is_musl = ["ld-musl" in each for each in interpreters]
    if is_musl and all(is_musl):
        return f"musllinux_1_2_{machine}"
    if any(is_musl):
        raise ValueError("some programs need musl and others glibc")
    # 2.17 is the oldest version with a tag. Static programs also run on systems with this version.
    names = "\n".join(name for each in needs for name in each.versions)
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"^GLIBC_(\d+)\.(\d+)", names, re.MULTILINE)]
    major, minor = max([*versions, (2, 17)])
    return f"manylinux_{major}_{minor}_{machine}"
