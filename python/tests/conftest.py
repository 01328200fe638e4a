"""Setup for all tests."""

import faulthandler
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

#: Time limit in seconds for the teardown of a failed test.
TEARDOWN_SECONDS_MAX = 600.0

# In a shell's background jobs SIGINT is ignored, and child processes would inherit this disposition.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For interpreters started by tests.
_source = str(Path(__file__).resolve().parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([_source, *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.hookimpl(wrapper=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> Generator[None, object, object]:
    """Limits the teardown of a failed test, because pytest cancels `faulthandler_timeout` after a failure."""
    result = yield
    if isinstance(node, pytest.Item):
        faulthandler.dump_traceback_later(TEARDOWN_SECONDS_MAX, exit=True)
    return result
