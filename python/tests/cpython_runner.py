"""Runs CPython's ProcessPoolExecutor tests against BulkheadExecutor, in an interpreter that includes the tests.

test_cpython.py runs this program. The arguments are names such as ``test_wait.ProcessPoolSpawnWaitTest.test_all``. The
program prints a line of JSON with the result of each test. The tests come from the interpreter's ``test`` package.
"""

from __future__ import annotations

import importlib
import json
import sys
import unittest


class Told(unittest.TestResult):
    """Prints a line for each test."""

    def _tell(self, test: unittest.TestCase, ended: str, detail: str = "") -> None:
        method = test.id().rpartition(".")[2]
        print("\n@" + json.dumps([type(test).__name__, method, ended, detail]), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._tell(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._tell(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: object) -> None:
        super().addError(test, err)  # type: ignore[arg-type]
        self._tell(test, "failed", self.errors[-1][1])

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        super().addFailure(test, err)  # type: ignore[arg-type]
        self._tell(test, "failed", self.failures[-1][1])


def main(names: list[str]) -> None:
    from test import support

    support.use_resources = ["walltime"]
    for name in names:
        module_name, class_name, method = name.split(".")
        module = importlib.import_module(f"test.test_concurrent_futures.{module_name}")
        found = getattr(module, class_name, None)
        if found is None or not hasattr(found, method):
            print("\n@" + json.dumps([class_name, method, "absent", ""]), flush=True)
            continue
        found(method).run(Told())


if __name__ == "__main__":
    main(sys.argv[1:])
