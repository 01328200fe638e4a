"""Tests of a pool's surroundings: environment, umask, frozen programs, editable packages, wrong arguments."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import jobs
import pytest
from pools import LONG, TESTS, script, wait_for

from bulkhead import BulkheadExecutor

SOURCE = TESTS.parent / "src"
METHODS = ["spawn", "forkserver"]


def program(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs an interpreter that can import the test modules."""
    paths = [variables.pop("PYTHONPATH", ""), str(SOURCE), str(TESTS)]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )


# State that workers inherit from the caller.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sandbox", ["none", "default"])
def test_workers_inherit_the_callers_umask(method: str, sandbox: str) -> None:
    before = os.umask(0o027)
    try:
        context = multiprocessing.get_context(method)
        with BulkheadExecutor(1, mp_context=context, sandbox=sandbox) as pool:
            assert pool.submit(jobs.modes).result(LONG) == (0o640, 0o750)
    finally:
        os.umask(before)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sandbox", ["none", "default"])
def test_environment_is_set_before_the_interpreter_starts(method: str, sandbox: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    hook = "import os\nseen_at_start = os.environ.get('HOOK')\nos.environ['SET_BY_HOOK'] = 'yes'\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    code = f"""
        import multiprocessing, jobs
        from bulkhead import BulkheadExecutor
        context = multiprocessing.get_context({method!r})
        with BulkheadExecutor(1, mp_context=context, sandbox={sandbox!r}, env={{"LARGE": "x" * 30_000}}) as pool:
            print(pool.submit(jobs.attribute, "sitecustomize", "seen_at_start").result(60))
            print(pool.submit(jobs.variable, "SET_BY_HOOK").result(60))
            print(len(pool.submit(jobs.variable, "LARGE").result(60)))
    """
    ended = program(code, HOOK="set", PYTHONPATH=str(tmp_path))
    assert ended.stdout.split() == ["set", "yes", "30000"], ended.stderr


@pytest.mark.parametrize("method", METHODS)
def test_coverage_measures_workers(method: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("coverage") is None:
        pytest.skip("NOT RUN: coverage is not installed")
    (tmp_path / "sitecustomize.py").write_text("import coverage\ncoverage.process_startup()\n")
    (tmp_path / "rc").write_text(f"[run]\nparallel = true\ndata_file = {tmp_path}/data\ninclude = */jobs.py\n")
    code = f"""
        import multiprocessing, jobs
        from bulkhead import BulkheadExecutor
        with BulkheadExecutor(1, mp_context=multiprocessing.get_context({method!r})) as pool:
            assert pool.submit(jobs.double, 4).result(60) == 8
    """
    ended = program(code, PYTHONPATH=str(tmp_path), COVERAGE_PROCESS_START=str(tmp_path / "rc"))
    assert ended.returncode == 0, ended.stderr
    import coverage

    (line,) = [
        n for n, text in enumerate((TESTS / "jobs.py").read_text().splitlines(), 1) if "return number * 2" in text
    ]
    measured = []
    for path in tmp_path.glob("data.*"):
        data = coverage.CoverageData(str(path))
        data.read()
        measured += data.lines(str(TESTS / "jobs.py")) or []
    assert line in measured


@pytest.mark.parametrize("sandbox", ["default", "strict"])
def test_errors_explain_denied_access(sandbox: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    note.write_text("read")
    with BulkheadExecutor(1, sandbox=sandbox) as pool:
        denied = pool.submit(jobs.read_file, str(note)).exception(LONG)
        absent = pool.submit(jobs.read_file, str(tmp_path / "absent")).exception(LONG)
    assert "denied by the sandbox: add `read`" in str(denied)
    assert str(pickle.loads(pickle.dumps(denied))) == str(denied)
    assert isinstance(absent, OSError)
    assert "sandbox" not in str(absent)
    with BulkheadExecutor(1, sandbox={"profile": sandbox, "read": [note]}) as pool:
        assert pool.submit(jobs.read_file, str(note)).result(LONG) == "read"


@pytest.mark.parametrize("kind", ["finder", "link"])
def test_editable_packages_are_readable_in_the_sandbox(kind: str, tmp_path: Path) -> None:
    """Covers installations by setuptools, and by flit with symbolic links."""
    tmp_path.chmod(0o755)
    package = tmp_path / "project" / "edited"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("def answer():\n    return 42\n")
    site = tmp_path / "site"
    site.mkdir()
    if kind == "link":
        (site / "edited").symlink_to(package)
    else:
        (site / "sitecustomize.py").write_text("import __editable___edited_finder\n")
        (site / "__editable___edited_finder.py").write_text(f"""
import importlib.util, sys
MAPPING = {{"edited": {str(package)!r}}}
NAMESPACES = {{}}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return importlib.util.spec_from_file_location(name, MAPPING[name] + "/__init__.py")
sys.meta_path.append(Finder)
""")
    code = """
        import edited.inner
        from bulkhead import BulkheadExecutor
        with BulkheadExecutor(1, sandbox="default") as pool:
            print(pool.submit(edited.inner.answer).result(60))
    """
    ended = program(code, PYTHONPATH=str(site))
    assert ended.stdout == "42\n", ended.stderr


def test_forked_workers_start_with_pandas(capfd: pytest.CaptureFixture[str]) -> None:
    """pyarrow's allocator starts a thread unless this feature is disabled."""
    context = multiprocessing.get_context("forkserver")
    preload = [name for name in ("pandas", "pyarrow") if importlib.util.find_spec(name)]
    with BulkheadExecutor(1, mp_context=context, preload=preload) as pool:
        assert pool.submit(jobs.variable, "JE_ARROW_MALLOC_CONF").result(LONG) == "background_thread:false"
        assert all(pool.submit(jobs.loaded, name).result(LONG) for name in preload)
    assert "leaves the thread" not in capfd.readouterr().err
    if "pyarrow" not in preload:
        pytest.skip("NOT RUN: the check with pandas, because pyarrow is not installed")


@pytest.mark.parametrize("method", METHODS)
def test_gevent_runs_while_a_call_is_awaited(method: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("gevent") is None:
        pytest.skip("NOT RUN: gevent is not installed")
    # Workers import this program as their main module, so gevent patches them as well.
    path = tmp_path / "program.py"
    path.write_text(f"""
from gevent import monkey
monkey.patch_all()
import multiprocessing, gevent, jobs
from bulkhead import BulkheadExecutor
if __name__ == "__main__":
    with BulkheadExecutor(2, mp_context=multiprocessing.get_context({method!r})) as pool:
        print(list(pool.map(jobs.double, range(3))))
        def wait(number):
            return pool.submit(jobs.note_and_wait, {str(tmp_path)!r}, number).result()
        others = [gevent.spawn(wait, number) for number in (1, 2)]
        gevent.sleep(0)
        open({str(tmp_path / "go")!r}, "w").close()
        gevent.joinall(others)
        print([other.value for other in others])
        future = pool.submit(jobs.sleep, 600)
        print(future.cancel(), pool.submit(jobs.double, 4).result())
""")
    ended = subprocess.run(
        [sys.executable, path],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}"},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
    assert ended.stdout.splitlines() == ["[0, 2, 4]", "[1, 2]", "True 8"], ended.stderr


@pytest.mark.parametrize("method", METHODS)
def test_initializers_receive_locks_and_queues_without_a_sandbox(method: str) -> None:
    # Runs a separate program, because `multiprocessing` leaves a helper process behind.
    ended = program(f"""
        import multiprocessing, jobs
        from bulkhead import BulkheadExecutor
        context = multiprocessing.get_context({method!r})
        queue, shared = context.Queue(), context.Value("i", 0)
        given = context.RLock(), queue, shared
        with BulkheadExecutor(2, mp_context=context, initializer=jobs.remember, initargs=(given,)) as pool:
            print(list(pool.map(jobs.use_primitives, range(5))))
        print(sorted(queue.get(timeout=60) for _ in range(5)), shared.value)
    """)
    assert ended.stdout.splitlines() == ["[0, 1, 2, 3, 4]", "[0, 1, 2, 3, 4] 10"], ended.stderr


def test_tqdm_shows_the_progress_of_a_pool(capfd: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("tqdm") is None:
        pytest.skip("NOT RUN: tqdm is not installed")
    code = """
        import multiprocessing, concurrent.futures, jobs
        import bulkhead
        multiprocessing.set_start_method("spawn")
        concurrent.futures.ProcessPoolExecutor = bulkhead.BulkheadExecutor
        from tqdm.contrib.concurrent import process_map
        print(process_map(jobs.double, range(3), max_workers=2, chunksize=1))
    """
    ended = program(code)
    assert ended.stdout == "[0, 2, 4]\n", ended.stderr
    assert "3/3" in ended.stderr


def test_pickling_errors_contain_a_hint() -> None:
    ended = program("""
        import multiprocessing, jobs
        from bulkhead import BulkheadExecutor
        lock = multiprocessing.get_context("spawn").Lock()
        def here():
            return 1
        with BulkheadExecutor(1) as pool:
            print(pool.submit(jobs.echo, lock).exception())
            print(pool.submit(lambda: 1).exception())
            print(pool.submit(here).exception())
        with BulkheadExecutor(1, initializer=jobs.remember, initargs=(lock,), sandbox="default") as confined:
            try:
                confined.submit(jobs.double, 1)
            except RuntimeError as error:
                print(error)
    """)
    lines = ended.stdout.splitlines()
    assert ["Manager" in line for line in lines] == [True, False, False, True], ended.stderr
    assert ['pickler="cloudpickle"' in line for line in lines] == [False, True, True, False], ended.stdout


# Frozen programs.

#: A program that starts copies of itself, like a PyInstaller program. Interpreter arguments have no effect until
#: `freeze_support` handles them.
FROZEN = """
import multiprocessing, os, sys
sys.frozen = True
with open(os.environ["TRACE"], "a") as trace:
    print(os.getpid(), file=trace)
if len(open(os.environ["TRACE"]).readlines()) > 10:
    sys.exit("it starts itself endlessly")
from bulkhead import BulkheadExecutor
def double(number):
    return 2 * number
def freeze_support():
    if "-c" in sys.argv:
        code = sys.argv[sys.argv.index("-c") + 1]
        if code.startswith("from multiprocessing.forkserver import main"):
            exec(code)
            sys.exit()
if __name__ == "__main__":
    if os.environ["SUPPORT"]:
        freeze_support()
    multiprocessing.set_executable(os.environ["FROZEN"])
    try:
        with BulkheadExecutor(1, mp_context=multiprocessing.get_context(os.environ["METHOD"])) as pool:
            print(pool.submit(double, 4).result(60))
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("support", ["yes", ""])
def test_frozen_program_starts_workers_or_reports_why_not(method: str, support: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FROZEN)
    frozen = tmp_path / "frozen"
    frozen.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/program.py "$@"\n')
    frozen.chmod(0o755)
    # A path below `tmp_path` is too long for sockets.
    with tempfile.TemporaryDirectory(prefix="frozen-") as temporary:
        ended = subprocess.run(
            [frozen],
            env={
                **os.environ,
                "PYTHONPATH": str(SOURCE),
                "METHOD": method,
                "SUPPORT": support,
                "TRACE": str(tmp_path / "trace"),
                "FROZEN": str(frozen),
                "TMPDIR": temporary,
            },
            capture_output=True,
            text=True,
            timeout=2 * LONG,
            check=False,
        )
        wait_for("no folder is left", lambda: not os.listdir(temporary))
    if support:
        assert ended.stdout == "8\n", ended.stderr
    else:
        assert ended.stdout.startswith("BrokenProcessPool "), ended.stdout
        assert "call multiprocessing.freeze_support() first" in ended.stdout


# Programming errors.


def test_import_fails_on_systems_other_than_linux() -> None:
    ended = script("""
        import sys
        sys.platform = "darwin"
        try:
            import bulkhead
        except ImportError as error:
            print(error)
    """)
    assert "runs only on Linux" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": "512M"}, ValueError, "a size such as '512MiB', not '512M'"),
        ({"memory": 0}, ValueError, "greater than 0"),
        ({"memory": 1.5}, TypeError, "not float"),
        ({"sandbox": "strickt"}, ValueError, "'none', 'default' or 'strict', not 'strickt'"),
        ({"sandbox": {"profile": "strickt"}}, ValueError, "'none', 'default' or 'strict'"),
        ({"sandbox": {"read": "/srv"}}, TypeError, "'read' must be a list of paths, not str"),
        ({"sandbox": True}, TypeError, "not bool"),
        ({"config": "workers.toml"}, TypeError, "config must be a dict, not str"),
        ({"config": {"env": {"A": object()}}}, TypeError, "config: a configuration cannot contain the value"),
        ({"config": {"supervisor": 1}}, TypeError, "must be a dict, not int"),
    ],
)
def test_constructor_rejects_wrong_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BulkheadExecutor(1, **options)


def test_error_names_a_path_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    with pytest.raises(ValueError, match=r"udcff.*UTF-8"):
        BulkheadExecutor(1, sandbox={"read": [os.fsdecode(folder)]})
    monkeypatch.chdir(os.fsdecode(folder))
    with BulkheadExecutor(1) as pool, pytest.raises(ValueError, match=r"udcff.*UTF-8"):
        pool.submit(jobs.pid)


def test_accepts_all_forms_of_sizes_and_paths(tmp_path: Path) -> None:
    for memory in (1 << 30, "512MiB", "1.5 GiB", "4096", "10MB", " 64kB "):
        BulkheadExecutor(1, memory=memory).shutdown()
    with BulkheadExecutor(1, sandbox={"read": [tmp_path, SOURCE, str(SOURCE)]}) as pool:
        assert pool.submit(jobs.double, 4).result(LONG) == 8


def test_pyright_accepts_as_completed(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("NOT RUN: pyright is not installed")
    (tmp_path / "checked.py").write_text("""
from concurrent.futures import as_completed
from bulkhead import BulkheadExecutor
def half(number: int) -> float:
    return number / 2
with BulkheadExecutor(1) as pool:
    futures = {pool.submit(half, number): number for number in range(3)}
    for future in as_completed(futures):
        print(future.result() + futures[future])
""")
    ended = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "checked.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=2 * LONG,
        check=False,
    )
    if "error" in ended.stderr.lower() and "checked.py" not in ended.stdout:
        pytest.skip(f"NOT RUN: pyright does not start: {ended.stderr[-200:]}")
    assert "0 errors" in ended.stdout, ended.stdout
