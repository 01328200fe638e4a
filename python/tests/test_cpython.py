"""Runs CPython's own ProcessPoolExecutor tests with BulkheadExecutor in its place.

The tests are never copied. They come from an installed interpreter (3.12 or later) with its ``test`` package. A virtual
environment for this interpreter gets a ``.pth`` file that replaces ProcessPoolExecutor in ``concurrent.futures`` at
startup. Without such an interpreter, the test prints a notice and is skipped.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
RUNNER = Path(__file__).with_name("cpython_runner.py")
#: Time limit for all tests in one module, in seconds.
PART_SECONDS_MAX = 240

#: Tests that must pass, by module, class (only classes that use "spawn") and method.
PASS: dict[str, dict[str, list[str]]] = {
    "test_wait": {
        "ProcessPoolSpawnWaitTest": [
            "test_20369",
            "test_all_completed",
            "test_first_completed",
            "test_first_completed_some_already_completed",
            "test_first_exception",
            "test_first_exception_one_already_failed",
            "test_first_exception_some_already_complete",
            "test_timeout",
        ],
    },
    "test_as_completed": {
        "ProcessPoolSpawnAsCompletedTest": [
            "test_correct_timeout_exception_msg",
            "test_duplicate_futures",
            "test_free_reference_yielded_future",
            "test_future_times_out",
            "test_no_timeout",
        ],
    },
    "test_init": {"ProcessPoolSpawnInitializerTest": ["test_initializer"]},
    "test_process_pool": {
        "ProcessPoolSpawnProcessPoolExecutorTest": [
            "test_free_reference",
            "test_map",
            "test_map_chunksize",
            "test_map_exception",
            "test_map_timeout",
            "test_max_tasks_early_shutdown",
            "test_max_tasks_per_child_defaults_to_spawn_context",
            "test_max_tasks_per_child_pending_tasks_gh115634",
            "test_max_workers_negative",
            "test_no_stale_references",
            "test_ressources_gced_in_workers",
            "test_shutdown_race_issue12456",
            "test_submit",
            "test_submit_keyword",
            "test_swallows_falsey_exceptions",
            "test_traceback",
        ],
    },
    "test_deadlock": {
        "ProcessPoolSpawnExecutorDeadlockTest": [
            "test_crash_at_task_unpickle",
            "test_crash_big_data",
            "test_crash_during_func_exec_on_worker",
            "test_crash_during_result_pickle_on_worker",
            "test_error_at_task_pickle",
            "test_error_at_task_unpickle",
            "test_error_during_func_exec_on_worker",
            "test_error_during_result_pickle_on_worker",
            "test_error_during_result_unpickle_in_result_handler",
            "test_exit_at_task_unpickle",
            "test_exit_during_func_exec_on_worker",
            "test_exit_during_result_pickle_on_worker",
            "test_exit_during_result_unpickle_in_result_handler",
            "test_gh105829_should_not_deadlock_if_wakeup_pipe_full",
            "test_shutdown_deadlock",
        ],
    },
    "test_shutdown": {
        "ProcessPoolSpawnProcessPoolShutdownTest": [
            "test_cancel_futures",
            "test_hang_gh94440",
            "test_hang_issue12364",
            "test_interpreter_shutdown",
            "test_run_after_shutdown",
            "test_submit_after_interpreter_shutdown",
        ],
    },
}

#: Tests in `PASS` that Python 3.13.0 does not have yet.
LATER = {"test_max_tasks_per_child_pending_tasks_gh115634", "test_swallows_falsey_exceptions"}

#: Tests that are not run, with the reasons. Tests in neither list are printed, so that new tests are noticed.
SKIP: dict[str, str] = {
    "test_idle_process_reuse_one": "uses _processes",
    "test_idle_process_reuse_multiple": "uses _processes",
    "test_killed_child": "uses _processes, and expects a death to break the pool",
    "test_max_tasks_per_child": "uses _processes",
    "test_saturation": "uses _processes",
    "test_context_manager_shutdown": "uses _processes",
    "test_processes_terminate": "uses _processes",
    "test_broken_process_pool_traceback": "uses _processes, and expects a death to break the pool",
    "test_shutdown_gh_132969_case_1": "uses _executor_manager_thread",
    "test_shutdown_gh_132969_case_2": "uses _executor_manager_thread",
    "test_shutdown_no_wait": "uses _executor_manager_thread",
    "test_del_shutdown": "uses _executor_manager_thread",
    "test_shutdown_deadlock_pickle": "uses _executor_manager_thread",
    "test_python_finalization_error": "mocks threads",
    "test_max_workers_too_large": "Windows",
    "test_hang_gh83386": "CPython skips it",
    "test_force_shutdown_workers": "uses _force_shutdown",
    "test_force_shutdown_workers_invalid_op": "uses _force_shutdown",
    "test_force_shutdown_workers_stops_pool": "uses _force_shutdown",
    "test_terminate_workers": "uses _force_shutdown",
    "test_kill_workers": "uses _force_shutdown",
}

IN_PLACE = """
import sys

if "bulkhead._pool_worker" not in " ".join(sys.orig_argv):
    import concurrent.futures
    import concurrent.futures.process

    import bulkhead

    class ProcessPoolExecutor(bulkhead.BulkheadExecutor):
        pass

    concurrent.futures.process.ProcessPoolExecutor = ProcessPoolExecutor
    concurrent.futures.ProcessPoolExecutor = ProcessPoolExecutor
"""


def find_interpreter() -> str | None:
    """Returns an interpreter of Python 3.12 or later that includes CPython's own tests, or None."""
    named = os.environ.get("BULKHEAD_CPYTHON")
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    candidates = [named, sys.executable]
    candidates += [shutil.which(f"python3.{minor}") for minor in (14, 13, 12)]
    candidates += sorted(glob.glob(f"{root}/versions/3.1[2-9].*/bin/python"), reverse=True)
    candidates += ["/usr/bin/python3", "/usr/local/bin/python3"]
    check = (
        "import sys, importlib.util as u; "
        "sys.exit(not (sys.version_info >= (3, 12) and u.find_spec('test.test_concurrent_futures.test_deadlock')))"
    )
    for candidate in candidates:
        if not candidate or not os.access(candidate, os.X_OK):
            continue
        if subprocess.run([candidate, "-c", check], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Creates a virtual environment with BulkheadExecutor as the standard executor. Returns its interpreter."""
    interpreter = find_interpreter()
    if interpreter is None:
        message = "NOT RUN: CPython's own tests need an interpreter (3.12 or later) with test.test_concurrent_futures"
        print(f"\n{message}", file=sys.__stderr__)
        pytest.skip(message)
    folder = tmp_path_factory.mktemp("cpython") / "venv"
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    (packages / "bulkhead_in_place.py").write_text(IN_PLACE)
    (packages / "bulkhead.pth").write_text(f"{SOURCE}\nimport bulkhead_in_place\n")
    return str(folder / "bin" / "python")


def run(interpreter: str, names: list[str]) -> dict[tuple[str, str], tuple[str, str]]:
    """Runs tests. Returns the result and details of each test."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    child = subprocess.Popen(
        [interpreter, RUNNER, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    timer = threading.Timer(PART_SECONDS_MAX, child.kill)
    timer.start()
    out, err = child.communicate()
    timer.cancel()
    ended: dict[tuple[str, str], tuple[str, str]] = {}
    for line in out.splitlines():
        if line.startswith("@"):
            class_name, method, how, detail = json.loads(line[1:])
            ended.setdefault((class_name, method), (how, detail))
    for name in names:
        _, class_name, method = name.split(".")
        ended.setdefault((class_name, method), ("did not end", f"{out[-2000:]}\n{err[-2000:]}"))
    return ended


@pytest.mark.parametrize("module", PASS)
def test_cpython_tests_pass(environment: str, module: str) -> None:
    names = [f"{module}.{name}.{method}" for name, methods in PASS[module].items() for method in methods]
    ended = run(environment, names)
    print(f"{module}: {sum(how == 'passed' for how, _ in ended.values())} of {len(names)} passed in {environment}")
    not_passed = {key: value for key, value in ended.items() if value[0] not in ("passed", "absent")}
    assert not not_passed, "\n".join(
        f"{name}.{method}: {how}\n{detail}" for (name, method), (how, detail) in not_passed.items()
    )
    assert any(how == "passed" for how, _ in ended.values()), f"no test of {module} exists"


def test_all_cpython_tests_are_listed(environment: str) -> None:
    code = (
        "import importlib, unittest\n"
        "for m in ('wait','as_completed','init','process_pool','deadlock','shutdown'):\n"
        "    module = importlib.import_module('test.test_concurrent_futures.test_' + m)\n"
        "    for name, found in vars(module).items():\n"
        "        if name.startswith('ProcessPoolSpawn') and isinstance(found, type) and 'Failing' not in name:\n"
        "            for method in unittest.defaultTestLoader.getTestCaseNames(found): print(name, method)\n"
    )
    listed = subprocess.run([environment, "-c", code], capture_output=True, text=True, check=True).stdout
    known = {(name, method) for classes in PASS.values() for name, methods in classes.items() for method in methods}
    found = [tuple(line.split()) for line in listed.splitlines()]
    news = [pair for pair in found if pair not in known and pair[1] not in SKIP]
    # Other interpreters may have additional tests. These are printed and do not fail this test.
    if news:
        print(f"\nCPython has tests that are in neither list: {news}", file=sys.__stderr__)
    if "3.13" in subprocess.run([environment, "-V"], capture_output=True, text=True, check=True).stdout:
        assert not news
        assert {pair for pair in known if pair[1] not in LATER} <= set(found)
