"""Tests the package with other installed Python versions, including free-threaded builds."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
VERSIONS = ["3.10", "3.11", "3.12", "3.13", "3.14", "3.13t", "3.14t"]
SECONDS_MAX = 300


def found(version: str) -> str | None:
    """Returns an interpreter from ``PATH``, pyenv, or a variable such as ``$BULKHEAD_PYTHON_3_14T``."""
    number, is_free = version.rstrip("t"), version.endswith("t")
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    candidates = [os.environ.get(f"BULKHEAD_PYTHON_{version.replace('.', '_').upper()}")]
    candidates += [shutil.which(f"python{version}")]
    candidates += sorted(glob.glob(f"{root}/versions/{number}.*/bin/python3"), reverse=True)
    check = (
        "import sys, sysconfig, ctypes, ssl; "
        "print('%d.%d' % sys.version_info[:2] + 't' * bool(sysconfig.get_config_var('Py_GIL_DISABLED')))"
    )
    for candidate in candidates:
        if not candidate or (is_free != candidate.rpartition("/bin/")[0].endswith("t") and root in candidate):
            continue
        ran = subprocess.run([candidate, "-c", check], capture_output=True, text=True, check=False)
        if ran.stdout.strip() == version:
            return candidate
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_package_works_with_each_interpreter(version: str) -> None:
    interpreter = found(version)
    if interpreter is None:
        message = f"NOT RUN: Python {version} is not installed"
        print(f"\n{message}", file=sys.__stderr__)
        pytest.skip(message)
    source = os.path.join(os.path.dirname(TESTS), "src")
    ran = subprocess.run(
        [interpreter, "-W", "ignore::DeprecationWarning", TESTS / "smoke.py"],
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    lines = ran.stdout.split("\n")
    assert "done" in lines, (lines, ran.stderr[-2000:])
    assert any(line.startswith(version.rstrip("t")) for line in lines)
    assert version.endswith("t") == any(line.endswith("free-threaded") for line in lines)
