"""Builds both wheels, installs them into a fresh virtual environment, and uses them there."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pools import LONG

PYTHON = Path(__file__).resolve().parents[1]
ROOT = PYTHON.parent
#: Folder that contains the programs used by the tests.
SUPERVISOR = os.environ.get("BULKHEAD_SUPERVISOR", "")
PROGRAMS = ("bulkhead-supervisor", "bulkhead-worker", "bulkhead")


def run(*command: str | Path, **variables: str) -> str:
    """Runs a program that must succeed. Returns its output."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BULKHEAD"))}
    ended = subprocess.run(
        command, env={**kept, **variables}, capture_output=True, text=True, timeout=5 * LONG, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Returns a folder that only the first caller fills, even among several pytest-xdist processes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    complete = folder.with_suffix(".complete")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the programs without debug information, so that compressing them takes a fraction of the time."""
    if subprocess.run([sys.executable, "-c", "import hatchling, pip"], capture_output=True, check=False).returncode:
        message = "NOT RUN: hatchling is not installed: pip install hatchling"
        print(f"\n{message}", file=sys.__stderr__)
        pytest.skip(message)
    folder = Path(SUPERVISOR).parent
    if not all((folder / program).is_file() for program in PROGRAMS):
        message = f"NOT RUN: {', '.join(PROGRAMS)} must all be in the folder of $BULKHEAD_SUPERVISOR"
        print(f"\n{message}", file=sys.__stderr__)
        pytest.skip(message)

    def copy(to: Path) -> None:
        for program in PROGRAMS:
            shutil.copy2(folder / program, to)
            if strip := shutil.which("strip"):
                run(strip, "--strip-debug", to / program)

    return made_once(tmp_path_factory, "programs", copy)


@pytest.fixture(scope="module")
def wheels(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Builds both wheels with hatchling, without access to a package index."""

    def build(to: Path) -> None:
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
        run(*wheel, "--wheel-dir", to, PYTHON, PYTHON / "supervisor", BULKHEAD_PROGRAMS=str(programs))

    return sorted(made_once(tmp_path_factory, "wheels", build).glob("*.whl"))


@pytest.mark.parametrize("is_built", [True, False])
def test_one_command_installs_both_packages(is_built: bool, programs: Path, tmp_path: Path) -> None:
    """Works with any cargo target folder. A fake cargo only copies the programs, because a build takes minutes."""
    target = tmp_path / "target"
    tools = tmp_path / "tools"
    tools.mkdir()
    cargo = tools / "cargo"
    cargo.write_text(f"""#!/bin/sh
case $1 in
metadata) echo '{{"target_directory": "'$CARGO_TARGET_DIR'"}}' ;;
build) echo "$@" >> {tmp_path}/asked && mkdir -p $CARGO_TARGET_DIR/dist && cd {programs} &&
    cp {" ".join(PROGRAMS)} $CARGO_TARGET_DIR/dist ;;
esac
""")
    cargo.chmod(0o755)
    if is_built:
        (target / "release").mkdir(parents=True)
        for program in PROGRAMS:
            (target / "release" / program).symlink_to(programs / program)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "v")
    python = tmp_path / "v" / "bin" / "python"
    # No package index is used, and the build backend comes from this environment, so that nothing is downloaded.
    offline = ["--quiet", "--no-index", "--no-build-isolation"]
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", *offline),
        *(PYTHON / "supervisor", PYTHON),
        CARGO_TARGET_DIR=str(target),
        PATH=f"{tools}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path.endswith("site-packages")),
    )
    assert (tmp_path / "asked").exists() != is_built
    code = "from bulkhead import BulkheadExecutor as E; p = E(1); print(p.submit(abs, -4).result(60)); p.shutdown()"
    assert run(python, "-c", code) == "4\n"


def test_documents_contain_the_install_command() -> None:
    command = "pip install ./python/supervisor ./python"
    for document in ("README.md", "python/README.md", "docs/python.md", "python/src/bulkhead/_private.py"):
        text = (ROOT / document).read_text()
        assert command in text, document
        assert "bulkhead-py[supervisor]" not in text, document


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a virtual environment with both wheels. Returns its interpreter."""

    def install(to: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", to)
        pip = [sys.executable, "-m", "pip", "--python", to / "bin" / "python"]
        run(*pip, "install", "--quiet", "--no-index", *wheels)

    return made_once(tmp_path_factory, "installed", install) / "bin" / "python"


def test_wheels_have_expected_names_and_contents(wheels: list[Path]) -> None:
    package, programs = wheels
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert package.name == f"bulkhead_py-{version[1]}-py3-none-any.whl"
    # The platform tag must match what the system's own tools report.
    tag = re.fullmatch(rf"bulkhead_supervisor-{re.escape(version[1])}-py3-none-(\w+)\.whl", programs.name)
    assert tag is not None, programs.name
    assert re.fullmatch(r"manylinux_2_\d+_\w+|musllinux_1_2_\w+", tag[1])
    assert f'__version__ = "{version[1]}"' in (PYTHON / "src/bulkhead/__init__.py").read_text()
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
    assert "bulkhead/py.typed" in names
    assert not [name for name in names if not name.startswith(("bulkhead/", "bulkhead_py-"))]
    with zipfile.ZipFile(programs) as archive:
        held = {name: archive.getinfo(name) for name in archive.namelist()}
    for program in PROGRAMS:
        assert held[f"bulkhead_supervisor/bin/{program}"].external_attr >> 16 & 0o111
    try:
        dump = subprocess.run(
            ["readelf", "-V", SUPERVISOR], capture_output=True, text=True, timeout=LONG, check=False
        ).stdout
    except FileNotFoundError:
        return
    newest = max((int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", dump)), default=17)
    found = re.match(r"manylinux_2_(\d+)_", tag[1])
    assert found is None or int(found[1]) >= newest


def test_example_distinguishes_all_failures(installed: Path) -> None:
    """The design requires two seconds, but a busy machine may need longer."""
    told = run(installed, PYTHON / "examples" / "example.py", HOME=os.environ.get("HOME", "/"))
    lines = told.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["segfaults", "hangs", "leaks", "honest"], told
    for line, words in zip(lines, ("SIGSEGV", "run limit", "memory", "all 100"), strict=False):
        assert words in line, told
    assert lines[-1].endswith(" s in all")


def test_wheel_contains_the_programs(installed: Path) -> None:
    for program in ("bulkhead", "bulkhead-supervisor"):
        assert "Usage" in run(installed.with_name(program), "--help")
    code = "import bulkhead_supervisor as s, os; print(os.access(s.path(), os.X_OK), s.path('bulkhead-worker'))"
    assert run(installed, "-c", code).startswith("True ")
    code = "from bulkhead._private import find_supervisor as f; import bulkhead_supervisor as s; assert f() == s.path()"
    run(installed, "-c", code)


def test_installed_package_has_types(installed: Path, tmp_path: Path) -> None:
    """mypy checks a user's program against the installed package."""
    if subprocess.run([sys.executable, "-c", "import mypy"], capture_output=True, check=False).returncode:
        pytest.skip("NOT RUN: mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(
        "from bulkhead import BulkheadExecutor, Client, Crashed\n"
        "with BulkheadExecutor(2, timeout=1.0) as pool:\n"
        "    reveal_type(pool.submit(len, 'x').cancel())\n"
        "client: Client = Client()\n"
    )
    told = run(
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        tmp_path / "cache",
        "--python-executable",
        installed,
        program,
    )
    assert 'Revealed type is "bool"' in told or 'Revealed type is "builtins.bool"' in told, told


def test_submit_preserves_the_functions_types(tmp_path: Path) -> None:
    """A strictly typed program remains valid after switching from a standard executor."""
    if subprocess.run([sys.executable, "-c", "import mypy"], capture_output=True, check=False).returncode:
        pytest.skip("NOT RUN: mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(
        "from bulkhead import BulkheadExecutor, Client\n"
        "def half(number: int) -> float:\n"
        "    return number / 2\n"
        "def one(pool: BulkheadExecutor) -> float:\n"
        "    return pool.with_options(timeout=1).submit(half, 1).result() + pool.submit(half, number=1).result()\n"
        "def first(pool: BulkheadExecutor) -> float:\n"
        "    return next(pool.map(half, [1]))\n"
        "def reason(client: Client) -> str:\n"
        "    return client.submit('thumbnail').result().outcome.reason\n"
        "def wrong(pool: BulkheadExecutor) -> None:\n"
        "    pool.submit(half, 'x')  # type: ignore[arg-type]\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(program)]
    assert "Success" in run(*mypy, MYPYPATH=str(PYTHON / "src"))
